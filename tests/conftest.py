"""Tests over many combinations of settings run a sample of them.

``@pytest.mark.pairwise`` above the parameters of a test keeps so many that each two values of two parameters
meet in one, ``@pytest.mark.every_value`` so many that each value of every parameter is in one.
``@each_kind`` and ``@some_families`` of zoo.py are for what is much the same in many of the families.
``pytest --every-setting`` runs them all.

A test of one of the zoo's families is marked with the library that the family comes from.
"""

from collections import defaultdict

import pytest

from pairwise import covering
from zoo import BY_NAME

STRENGTHS = {"every_value": 1, "pairwise": 2}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-setting", action="store_true", help="all combinations of settings, not a sample of them"
    )


def settings(case: pytest.Function) -> tuple[tuple[int, ...], ...]:
    """What tells the value of each parameter; arguments that are given together are one parameter."""
    together = [mark.args[0] for mark in case.iter_markers("parametrize")]
    groups = [names.split(",") if isinstance(names, str) else names for names in together]
    named = {name.strip() for names in groups for name in names}
    groups += [[name] for name in case.callspec.params if name not in named]  # of fixtures
    return tuple(tuple(id(case.callspec.params[name.strip()]) for name in names) for names in groups)


@pytest.hookimpl(tryfirst=True)  # before a selection by -k or -m, which is among what is left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("every_setting"):
        return
    marked: dict[tuple[str, int], list[pytest.Function]] = defaultdict(list)
    left_out: set[pytest.Item] = set()
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        some = item.get_closest_marker("some_families")
        if some and item.callspec.params["case"].name not in some.args:
            left_out.add(item)
            continue
        for name, strength in STRENGTHS.items():
            if item.get_closest_marker(name):
                marked[item.nodeid.partition("[")[0], strength].append(item)
    for (_, strength), cases in marked.items():
        kept = covering([settings(case) for case in cases], strength)
        left_out |= set(cases) - {cases[i] for i in kept}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_itemcollected(item: pytest.Item) -> None:
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    for value in parameters:
        name = getattr(value, "family", getattr(value, "name", value))  # a subject, a case, a name
        if isinstance(name, str) and name in BY_NAME:
            item.add_marker(pytest.mark.libraries(BY_NAME[name].library))
