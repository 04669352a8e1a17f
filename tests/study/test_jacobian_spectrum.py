"""The spectrum of one attention block under graying."""

from typing import Any

import pytest

from study_records import draws, kept, records
from wellposed.study.measured import jacobian_spectrum


def test_spectra_of_a_plain_run_under_both_grayings(run, monkeypatch, tmp_path):
    monkeypatch.setattr(jacobian_spectrum, "EPS", (1.0, 0.5))
    monkeypatch.setattr(jacobian_spectrum, "IMAGES", 1)
    rows = kept(jacobian_spectrum.spectra_of_run(run))
    places = {(row["method"], row["where"], row["eps"]) for row in rows}
    assert places == {(m, w, e) for m in ("svd", "dct") for w in ("blocks", "embedding") for e in (1.0, 0.5)}
    plain = [row["relative"] for row in rows if row["eps"] == 1]
    for relative in plain:
        assert relative == pytest.approx(plain[0], rel=1e-2, abs=1e-6)
        assert relative == sorted(relative, reverse=True)
        assert relative[0] == 1
    report = jacobian_spectrum.report(records({("plain", 0): rows}))
    assert len(report.tables["table"]) == len(rows)
    draws(report, tmp_path)


def test_the_spectrum_of_a_run_trained_with_graying_is_as_trained(edited, monkeypatch):
    monkeypatch.setattr(jacobian_spectrum, "IMAGES", 1)
    (row,) = jacobian_spectrum.spectra_of_run(edited)
    assert (row["method"], row["where"]) == ("dct", "as trained")


@pytest.mark.parametrize(("middle", "expected"), [(0.2, "reproduced"), (0.1, "no difference"), (0.01, "not")])
def test_a_flatter_spectrum_has_a_higher_middle(middle, expected):
    def row(method: str, where: str, eps: float, value: float) -> dict[str, Any]:
        told = {"measure": "jacobian spectrum", "method": method, "where": where, "eps": eps}
        return told | {"sigma_max": 1.0, "relative": [1.0, value, 1e-3], "points": 3}

    rows = [
        row(method, where, eps, value)
        for method in ("svd", "dct")
        for where in ("blocks", "embedding")
        for eps, value in ((1.0, 0.1), (0.5, middle))
    ]
    assert jacobian_spectrum.report(records({("plain", 0): rows})).verdict == expected


def test_without_the_whole_matrix_only_the_upper_tenth_is_told(run, monkeypatch):
    small = {"DENSE": 10, "EPS": (1.0, 0.5), "IMAGES": 1, "METHODS": ("svd",)}
    for name, value in small.items():
        monkeypatch.setattr(jacobian_spectrum, name, value)
    rows = jacobian_spectrum.spectra_of_run(run)
    assert {len(row["relative"]) for row in rows} == {5}
    report = jacobian_spectrum.report(records({("plain", 0): rows}))
    assert "at 10% of the spectrum" in report.reason
    assert all(row["ln relative at 50%"] is None for row in report.tables["table"])
