"""The way that devices other than a CPU take, on a CPU."""

import importlib
from collections.abc import Iterator

import pytest

PLAN = importlib.import_module("wellposed.linalg.spectral_plan")


@pytest.fixture
def by_the_chain() -> Iterator[pytest.MonkeyPatch]:
    """The chain of products takes the place of the eigendecomposition, until the patch is undone."""
    patch = pytest.MonkeyPatch()
    patch.setattr(PLAN, "_has_eigen", lambda device_type: False)
    yield patch
    patch.undo()


@pytest.fixture(params=["eigen", "chain"])
def engine(request: pytest.FixtureRequest) -> str:
    """Both ways, one after the other."""
    if request.param == "chain":
        request.getfixturevalue("by_the_chain")
    return request.param
