"""The samples of settings: what they hold, and that the marks take them."""

import itertools
from pathlib import Path

import pytest

from pairwise import covering

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("sizes", [(5, 3, 4, 2, 2), (3, 4, 14), (31, 4), (2, 2), (6,), ()], ids=str)
@pytest.mark.parametrize("strength", [1, 2])
def test_every_group_of_values_is_in_a_row(sizes: tuple[int, ...], strength: int) -> None:
    rows = list(itertools.product(*(range(size) for size in sizes)))
    chosen = [rows[i] for i in covering(rows, strength)]
    for places in itertools.combinations(range(len(sizes)), min(strength, len(sizes))):
        seen = {tuple(row[place] for place in places) for row in chosen}
        assert len(seen) == len(list(itertools.product(*(range(sizes[place]) for place in places))))
    # As few as there can be, or a tenth more.
    largest = sorted(sizes, reverse=True)[:strength]
    assert len(chosen) <= 1.1 * len(list(itertools.product(*map(range, largest))))


def test_the_values_of_a_short_parameter_are_spread() -> None:
    rows = list(itertools.product(range(31), range(4)))
    counts = [[rows[i][1] for i in covering(rows, 1)].count(value) for value in range(4)]
    assert sorted(counts) == [7, 8, 8, 8]


def test_only_rows_that_there_are_count() -> None:
    rows = [(a, b, c) for a, b, c in itertools.product(range(3), repeat=3) if a != b]
    chosen = [rows[i] for i in covering(rows, 2)]
    assert {row[:2] for row in chosen} == {row[:2] for row in rows}
    assert all(row in rows for row in chosen)


TESTS = """
import pytest

@pytest.fixture(params=["x", "y"])
def way(request):
    return request.param

@pytest.mark.MARK
@pytest.mark.parametrize("dtype", ["half", "single"])
@pytest.mark.parametrize(("tokens", "channels"), [(2, 3), (3, 2), (3, 3)])
def test_marked(way, dtype, tokens, channels):
    pass

@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [1, 2])
def test_not_marked(a, b):
    pass
"""

OF_FAMILIES = """
from types import SimpleNamespace
import pytest

cases = pytest.mark.parametrize("case", [SimpleNamespace(name=name) for name in "abcd"])

@pytest.mark.some_families("b", "d")
@cases
def test_marked(case):
    assert case.name in "bd"

@pytest.mark.every_value
@pytest.mark.some_families("b", "d")
@pytest.mark.parametrize("way", [1, 2])
@cases
def test_with_another(case, way):
    assert (case.name, way) in [("b", 1), ("d", 2)]
"""


@pytest.mark.parametrize(
    ("mark", "option", "kept"),
    [("pairwise", (), 6), ("every_value", (), 3), ("pairwise", ("--every-setting",), 12)],
)
def test_marks(pytester: pytest.Pytester, mark: str, option: tuple[str, ...], kept: int) -> None:
    here = Path(__file__).parent
    pytester.makepyfile(pairwise=(here / "pairwise.py").read_text())
    pytester.makeconftest((here / "conftest.py").read_text())
    pytester.makepyfile(test_it=TESTS.replace("MARK", mark))
    pytester.makeini("[pytest]\nmarkers =\n    pairwise\n    every_value\n")
    # Those given together are one parameter, and so is a fixture with several values.
    result = pytester.runpytest_inprocess(*option)
    result.assert_outcomes(passed=kept + 4, deselected=12 - kept)
    # What is asked for by name runs.
    result = pytester.runpytest_inprocess("test_it.py::test_marked[x-3-2-half]")
    result.assert_outcomes(passed=1)


def test_some_of_the_families(pytester: pytest.Pytester) -> None:
    here = Path(__file__).parent
    pytester.makepyfile(pairwise=(here / "pairwise.py").read_text(), test_it=OF_FAMILIES)
    pytester.makeconftest((here / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers =\n    some_families\n    every_value\n")
    pytester.runpytest_inprocess().assert_outcomes(passed=4, deselected=8)
    # All of them, of which those that are not meant fail.
    pytester.runpytest_inprocess("--every-setting").assert_outcomes(passed=4, failed=8)
