"""Inductor's missing barrier: the mend on a stand-in for its kernels, and on a GPU what it is for."""

from types import SimpleNamespace

import pytest
import timm
import torch

from wellposed.compiling import add_barrier, fix_inductor, needs_barrier


def stand_in():
    class Kernel:
        def __init__(self) -> None:
            self.cse = SimpleNamespace(invalidated_stores=set())
            self.lines = []

        def get_load_buffer(self, indexing):
            return SimpleNamespace(writeline=self.lines.append)

        def load(self, name, index):
            if name == "none":
                raise KeyError(name)
            self.get_load_buffer(index).writeline(f"load {name}")
            return name

    add_barrier(Kernel, lambda name: f"barrier {name}")
    return Kernel()


def test_only_what_was_stored_before_has_a_barrier() -> None:
    kernel = stand_in()
    assert kernel.load("a", 0) == "a"
    kernel.cse.invalidated_stores.add("a")
    assert kernel.load("b", 0) == "b"
    assert kernel.load("a", 0) == "a"
    assert kernel.lines == ["load a", "load b", "barrier a", "load a"]


def test_a_load_that_fails_leaves_no_barrier_behind() -> None:
    kernel = stand_in()
    kernel.cse.invalidated_stores.add("none")
    with pytest.raises(KeyError):
        kernel.load("none", 0)
    kernel.get_load_buffer(0)
    assert kernel.lines == []


def test_a_torch_that_has_the_barrier_stays_as_it_is() -> None:
    before = torch.compiler.config.cache_key_tag
    is_needed = fix_inductor()
    assert is_needed == needs_barrier(torch.__version__)
    assert fix_inductor() == is_needed  # once, however often it is called
    assert is_needed or torch.compiler.config.cache_key_tag == before


@pytest.mark.parametrize(
    ("version", "is_needed"),
    [("2.9.0", True), ("2.13.1", True), ("2.14.0a0", True), ("2.14.0", False), ("2.100.0", False)],
)
def test_versions_are_numbers_not_text(
    version: str, is_needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert needs_barrier(torch.__version__) == is_needed


def fill_free_memory(value: float) -> None:
    """Of the caching allocator, large and small."""
    held = []
    for size in (64 << 20, 16 << 20, 4 << 20, 1 << 20, 64 << 10, 512):
        while True:
            before = torch.cuda.memory_reserved()
            held.append(torch.full((size // 4,), value, device="cuda"))
            if torch.cuda.memory_reserved() > before or len(held) > 4000:
                break


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_training", [False, True])
def test_compiled_vits_read_nothing_that_they_have_not_written(is_training: bool) -> None:
    """Autotuning chooses among kernels of which some need the barrier, so each try compiles anew."""
    fix_inductor()
    torch.manual_seed(0)
    images = torch.randn(256, 3, 64, 64, device="cuda")
    options = {"img_size": 64, "patch_size": 8, "class_token": False, "global_pool": "avg", "depth": 3}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **options).cuda().train(is_training)
    for _ in range(3):
        torch.compiler.reset()
        with torch._inductor.utils.fresh_cache():
            compiled = torch.compile(model)
            for value in (0.0, float("nan"), 1e30):
                with torch.set_grad_enabled(is_training), torch.autocast("cuda", torch.bfloat16):
                    compiled(images)
                    fill_free_memory(value)
                    found, expected = compiled(images).float(), model(images).float()
                assert (found - expected).abs().max() <= 0.05 * expected.abs().max()
