"""Records survive files, and say what they are."""

import csv
import json
import math

import pytest

from wellposed.records import Record, dtype_name, from_dict, read_json, short, to_dict, write_csv, write_json
from wellposed.text import aligned

FULL = Record(
    measure="kappa",
    value=12.5,
    block=3,
    module="blocks.3",
    position="attention.branch",
    head=1,
    low=10.0,
    high=20.0,
    bound=1e9,
    images=2,
    status="at least",
    note="a, note",
    estimator="float64 SVD",
    dtype="float32",
    tolerance=1e-3,
    samples=(12.0, None),
    at_least=(0,),
    curve=(1.0, 0.5),
)
EMPTY = Record(measure="entropy", value=None, status="not measured", note="no attention")


def test_json_round_trip(tmp_path) -> None:
    write_json([FULL, EMPTY], {"model": "ViT"}, tmp_path / "r.json")
    assert read_json(tmp_path / "r.json") == ([FULL, EMPTY], {"model": "ViT"})


def test_csv_has_every_field_that_is_a_number_or_a_word(tmp_path) -> None:
    write_csv([FULL, EMPTY], tmp_path / "r.csv")
    with (tmp_path / "r.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["value"], first["status"], first["note"]) == ("12.5", "at least", "a, note")
    assert float(first["log"]) == math.log(12.5)
    assert (second["value"], second["block"], second["log"]) == ("", "", "")
    named = {"block", "position", "estimator", "dtype", "tolerance", "images", "head", "bound"}
    assert named < set(first)


def test_nothing_that_is_not_json_gets_into_a_file(tmp_path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json([Record(measure="kappa", value=math.nan)], {}, tmp_path / "r.json")


def test_foreign_files_are_refused(tmp_path) -> None:
    (tmp_path / "r.json").write_text(json.dumps([1, 2]))
    with pytest.raises(ValueError, match=r"expected a diagnosis.*r\.json"):
        read_json(tmp_path / "r.json")
    with pytest.raises(ValueError, match="colour"):
        from_dict(to_dict(FULL) | {"colour": "red"})


@pytest.mark.parametrize(
    ("status", "text"),
    [("ok", "12.5"), ("at least", "≥ 12.5"), ("at most", "≤ 12.5"), ("not converged", "~ 12.5")],
)
def test_text_says_what_the_number_is(status, text) -> None:
    assert Record(measure="kappa", value=12.5, status=status).text() == text
    assert EMPTY.text() == "-"


def test_numbers() -> None:
    assert [short(x) for x in (0.0, 0.25, 1234.6, 99999.0, 1e5, 3e7, 1.5e-8, -2.0)] == [
        *("0", "0.25", "1,235", "99,999", "1e5", "3e7", "1.5e-8", "-2")
    ]
    assert Record(measure="x", value=0.0).log is None
    assert dtype_name("torch.bfloat16") == "bfloat16"


def test_columns_line_up() -> None:
    assert aligned([("a", "b"), ("long", "1")], right=(1,)).splitlines() == ["a     b", "long  1"]
