"""The memory limit of the neural tangent kernel: kept, and without a say in the result."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from reference.gradients import assert_kernel
from wellposed.probes import ntk_gradients
from wellposed.probes.ntk import ntk
from wellposed.probes.ntk_gradients import plan_passes
from zoo import BY_NAME

VIT = BY_NAME["timm vit"]


class _Live:
    """Counts the bytes of the tensors that are alive, through their storage."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.known: set[int] = set()

    def track(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key, size)
        return tensor

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def watched(monkeypatch: pytest.MonkeyPatch) -> _Live:
    """Counts all gradients that are made and kept from now on."""
    live, empty = _Live(), torch.empty
    row, mapped, held = (
        getattr(ntk_gradients, name) for name in ("_gradient", "_mapped_gradients", "_held_gradients")
    )

    def counted(made: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        return lambda *args: tuple(live.track(gradient) for gradient in made(*args))

    monkeypatch.setattr(ntk_gradients, "_gradient", counted(row))
    monkeypatch.setattr(ntk_gradients, "_mapped_gradients", counted(mapped))
    monkeypatch.setattr(
        ntk_gradients.torch, "empty", lambda *shape, **like: live.track(empty(*shape, **like))
    )
    monkeypatch.setattr(ntk_gradients, "_held_gradients", lambda *args: live.track(held(*args)))
    return live


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["60KB", "80KB", "500KB", "4MB"])
def test_the_memory_limit_is_kept_and_changes_nothing(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ntk_gradients, "MAPPED_NUMBERS", {"cpu": 0})
    model, x = VIT.model(), VIT.input(10)
    expected = ntk(model, x, groups="parts")
    live = watched(monkeypatch)
    found = ntk(model, x, groups="parts", memory_limit=limit)
    assert 0.5 * found.plan.held < live.most <= found.plan.held <= found.plan.limit
    assert live.now == 0
    assert (len(found.plan.passes) > 1) == (limit != "4MB")
    assert found.how == "row by row"
    assert_kernel(found.kernel, expected.kernel, relative=1e-12)
    for name, kernel in found.groups.items():
        assert_kernel(kernel, expected.groups[name], relative=1e-12)


@pytest.mark.parametrize("limit", ["1MB", "6MB"])
def test_images_are_mapped_within_the_memory_limit(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = VIT.model(dtype=torch.float64), VIT.input(10, dtype=torch.float64)
    with monkeypatch.context() as rows:
        rows.setattr(ntk_gradients, "MAPPED_NUMBERS", {"cpu": 0})
        expected = ntk(model, x, groups="parts")
    live = watched(monkeypatch)
    found = ntk(model, x, groups="parts", memory_limit=limit)
    assert "mapped over" in found.how
    assert live.most <= found.plan.held <= found.plan.limit
    assert live.now == 0
    assert (len(found.plan.passes) > 1) == (limit == "1MB")
    assert_kernel(found.kernel, expected.kernel, relative=1e-12)
    for name, kernel in found.groups.items():
        assert_kernel(kernel, expected.groups[name], relative=1e-12)


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_a_plan_holds_every_column_once_within_the_limit(rows: int) -> None:
    sizes = {"a": 10, "b": 5000, "c": 200, "d": 300, "e": 5000}
    for limit in (60_000, 100_000, 1_000_000, 10**8):
        plan = plan_passes(sizes, rows=rows, itemsize=4, limit=limit)
        covered = {name: [0] * size for name, size in sizes.items()}
        for step in plan.passes:
            for part in step.columns:
                for column in range(part.start, part.stop):
                    covered[part.parameter][column] += 1
        assert all(count == 1 for counts in covered.values() for count in counts)
        assert plan.held <= limit
    assert len(plan.passes) == 1


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_the_limit_that_the_error_names_is_enough(rows: int) -> None:
    with pytest.raises(ValueError, match="memory_limit must hold") as error:
        plan_passes({"weight": 300}, rows=rows, itemsize=4, limit=1000)
    needed = int(str(error.value).split(" bytes; ")[1].split(" is enough")[0].replace(",", ""))
    assert plan_passes({"weight": 300}, rows=rows, itemsize=4, limit=needed).held <= needed
