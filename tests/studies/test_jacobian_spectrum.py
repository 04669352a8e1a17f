"""The spectrum of one attention block under graying."""

from typing import Any

import pytest

from studies.jacobian_spectrum import study as jacobian_spectrum
from study_material import draws, kept, records, verdicts
from wellposed.stats import Verdict


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


@pytest.mark.parametrize(
    ("middle", "expected"),
    [(0.2, Verdict.SUPPORTED), (0.1, Verdict.UNDECIDED), (0.01, Verdict.CONTRADICTED)],
)
def test_a_flatter_spectrum_has_a_higher_middle(middle, expected):
    def row(method: str, where: str, eps: float, value: float) -> dict[str, Any]:
        about = {"measure": "jacobian spectrum", "method": method, "where": where, "eps": eps}
        return about | {"sigma_max": 1.0, "relative": [1.0, value, 1e-3], "points": 3}

    def rows(seed: int) -> list[dict[str, Any]]:
        # Seeds differ by 2%, in the same way for no claim: an interval needs a spread.
        return [
            row(method, where, eps, value * (1 + 0.02 * ((seed + 1) % 3 if eps < 1 else seed)))
            for method in ("svd", "dct")
            for where in ("blocks", "embedding")
            for eps, value in ((1.0, 0.1), (0.5, middle))
        ]

    report = jacobian_spectrum.report(records({("plain", seed): rows(seed) for seed in range(3)}))
    assert verdicts(report) == [expected] * 4


def test_without_the_whole_matrix_only_the_upper_tenth_is_reported(run, monkeypatch):
    small = {"DENSE": 10, "EPS": (1.0, 0.5), "IMAGES": 1, "METHODS": ("svd",)}
    for name, value in small.items():
        monkeypatch.setattr(jacobian_spectrum, name, value)
    rows = jacobian_spectrum.spectra_of_run(run)
    assert {len(row["relative"]) for row in rows} == {5}
    report = jacobian_spectrum.report(records({("plain", 0): rows}))
    assert all("ln of the value at 10% over the largest" in claim.contrast for claim in report.claims)
    assert all(row["ln relative at 50%"] is None for row in report.tables["table"])
