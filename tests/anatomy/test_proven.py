"""Proofs that are shipped: what they spare, what they hold for, and what is run again."""

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.anatomy import blocks, embeddings, proof, table
from wellposed.anatomy.model import is_settled
from wellposed.anatomy.source import digest
from zoo import CASES, Case

SHIPPED = Path(proof.__file__).with_name("proven.json")
SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def test_the_shipped_file_is_small() -> None:
    assert SHIPPED.stat().st_size < 300_000


def test_it_is_read_back_as_it_was_written() -> None:
    data = json.loads(SHIPPED.read_text(encoding="utf-8"))
    again = proof.Proofs()
    again.load(data)
    assert json.loads(json.dumps(again.to_json())) == data


def test_a_digest_is_the_same_in_every_version_of_python() -> None:
    """Shipped proofs are made with one version and read with another; ast.dump writes differently in each."""
    method = """
def forward(self, x, *rest, mask=None, **options):
    def inner(): return None
    class Local: pass
    for block in []:
        x = x + block(x, mask, **options) if mask is not None else f"{x!r}"
    return x, (), {}
"""
    assert digest(ast.parse(method).body[0]) == "aaba8a5fb7d21606"


@pytest.fixture
def as_shipped(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The proofs of a fresh process; the list tells which models were run."""
    fresh = proof.Proofs()
    fresh.load(json.loads(SHIPPED.read_text(encoding="utf-8")))
    monkeypatch.setattr(proof, "proofs", lambda: fresh)
    runs: list[nn.Module] = []
    trace = proof.trace

    def counted(model: nn.Module, run: Callable[[nn.Module], Any]) -> Any:
        runs.append(model)
        return trace(model, run)

    monkeypatch.setattr(proof, "trace", counted)
    return runs


MADE_BY_TIMM = [
    pytest.param(name, options, id=f"{name} {', '.join(options)}")
    for name, options in (
        ("vit_base_patch16_224", {}),
        ("vit_tiny_patch16_224", {"drop_path_rate": 0.1, "depth": 3, "embed_dim": 96, "num_classes": 7}),
        ("deit3_small_patch16_224", {}),
        ("vit_small_patch14_reg4_dinov2", {"num_classes": 0}),
        ("swin_tiny_patch4_window7_224", {"drop_path_rate": 0.2}),
        ("cait_xxs24_224", {}),
        ("eva02_tiny_patch14_224", {}),
        ("pvt_v2_b1", {}),
    )
]


@pytest.mark.parametrize(("name", "options"), MADE_BY_TIMM)
def test_a_known_model_needs_no_run_even_on_the_meta_device(
    name: str, options: dict[str, Any], as_shipped: list[nn.Module]
) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, **options)
    assert is_settled(model)
    edited = wp.remove_skips(model, "attention", allow_drop_path=True)
    assert edited
    assert not as_shipped


def test_known_models_of_transformers_and_torchvision_need_no_run(as_shipped: list[nn.Module]) -> None:
    transformers = pytest.importorskip("transformers")
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        models = [
            transformers.ViTForImageClassification(transformers.ViTConfig()),
            transformers.Dinov2Model(transformers.Dinov2Config()),
            transformers.SwinModel(transformers.SwinConfig()),
            torchvision.models.vit_b_16(),
        ]
    for model in models:
        assert wp.remove_skips(model, "all", allow_drop_path=True)
    assert not as_shipped


# No small model of the class, or with these settings, is among those proven.
NOT_SHIPPED = ("timm convmixer", "timm resmlp")


@pytest.mark.parametrize("case", [c for c in CASES if c.name not in NOT_SHIPPED], ids=lambda case: case.name)
def test_the_known_families_need_no_run(case: Case, as_shipped: list[nn.Module]) -> None:
    """In the versions that the proofs were made with; in others a run finds what is written otherwise."""
    tested = proof.proofs().tested.get(case.library)
    if tested and version(case.library) not in tested:
        assert blocks(case.model())
        return
    assert is_settled(case.model())
    assert not as_shipped


@pytest.mark.parametrize("where", ["embedding", "pixels", "blocks"])
def test_an_edited_model_needs_no_run_either(where: str, as_shipped: list[nn.Module]) -> None:
    model = timm.create_model("vit_tiny_patch16_224", **SMALL)
    wp.gray_tokens(model, eps=0.7, where=where)
    assert wp.edits(model)
    assert is_settled(model)
    wp.restore(model)
    assert not as_shipped


def test_finding_runs_the_model_twice_at_most() -> None:
    model = timm.create_model("vit_tiny_patch16_224", **SMALL)
    calls = []
    model.register_forward_hook(lambda *args: calls.append(1))

    class Mine(type(model.blocks[0])):  # type: ignore[misc]
        pass

    for block in model.blocks:
        block.__class__ = Mine
    assert len(blocks(model)) == 2
    assert len(calls) == 2
    wp.remove_skips(model)
    wp.restore(model)
    assert len(calls) == 2


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.ff = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.ff(self.norm(x)).relu()


@pytest.mark.parametrize("example", [None, torch.randn(1, 3, 4)])
def test_an_unknown_model_on_the_meta_device_is_an_error_that_says_so(example: Tensor | None) -> None:
    model = nn.Sequential(Unknown()).to("meta")
    with pytest.raises(wp.UnknownModelError, match=r"on the meta device, .* known without a run: Unknown"):
        wp.remove_skips(model, "all", example=example)
    assert not wp.edits(nn.Linear(2, 2))


def test_an_unknown_patch_embedding_on_the_meta_device_is_an_error_that_says_so() -> None:
    with torch.device("meta"):
        model = timm.create_model("pvt_v2_b0", num_classes=0, global_pool="")
    with pytest.raises(wp.UnknownModelError, match=r"on the meta device, .* to find its patch embedding"):
        wp.gray_tokens(model)


def test_the_layout_of_an_embedding_goes_by_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches in a row and on a grid, in models of one class: a run of one is none of the other."""
    monkeypatch.setattr(table, "EMBEDDINGS", {})
    layouts = []
    for dynamic in (False, True):
        model = timm.create_model("vit_tiny_patch16_224", **SMALL, dynamic_img_size=dynamic)
        (embedding,) = embeddings(model)
        layouts.append(embedding.tokens().layout)
    assert layouts == ["NLC", "NHWC"]


def test_a_known_block_in_an_unknown_class_of_a_library_is_not_enough(as_shipped: list[nn.Module]) -> None:
    """What is not known of a library's model may hold blocks too."""
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", **SMALL)

    class Changed(type(model.blocks[1])):  # type: ignore[misc]
        __module__ = "timm.models.vision_transformer"

        def forward(self, x: Tensor) -> Tensor:
            return x - self.attn(self.norm1(x))

    model.blocks[1].__class__ = Changed
    with pytest.raises(wp.UnknownModelError, match=r"Changed \(timm"):
        wp.remove_skips(model)


def test_another_source_is_run_again(as_shipped: list[nn.Module]) -> None:
    """A class of the same name whose code differs is not the one that was proven."""
    model = timm.create_model("vit_tiny_patch16_224", **SMALL).eval()
    known = type(model.blocks[0])

    class Block(known):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
            y = self.attn(self.norm1(x))
            x = y + x
            return self.mlp(self.norm2(x)) + x

    Block.__module__, Block.__qualname__ = known.__module__, known.__qualname__
    for block in model.blocks:
        block.__class__ = Block
    assert len(wp.remove_skips(model, "all")) == 4
    assert len(as_shipped) == 1


@pytest.mark.slow
def test_the_keys_depend_on_the_source_alone(tmp_path: Path) -> None:
    """The same in another process, in another folder, with another seed of Python's hashes."""
    code = (
        "import timm, sys\n"
        "from wellposed.anatomy.proof import _class_key, block_signature\n"
        "model = timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=8, depth=2)\n"
        "print(_class_key(type(model)), block_signature(model.blocks[0]))\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=folder,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            check=True,
        ).stdout
        for folder, seed in ((tmp_path, "1"), (Path.cwd(), "2"))
    }
    assert len(said) == 1


@pytest.mark.parametrize(
    "other",
    [{"drop_path_rate": 0.1}, {"depth": 3}, {"embed_dim": 64}, {"num_heads": 4}, {"num_classes": 3}],
    ids=lambda other: next(iter(other)),
)
def test_sizes_and_rates_do_not_change_a_signature(other: dict[str, Any]) -> None:
    def signatures(**options: Any) -> set[str]:
        model = timm.create_model("vit_tiny_patch16_224", **SMALL | options)
        return {proof.block_signature(block) for block in model.blocks}

    assert signatures() == signatures(**other)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("rows"),
        lambda data: data["rows"][next(iter(data["rows"]))].pop("taps"),
        lambda data: data["rows"][next(iter(data["rows"]))].update(colour="red"),
        lambda data: data["rows"][next(iter(data["rows"]))]["taps"].update({"block.end": "nowhere"}),
        lambda data: data.update(colours=[]),
    ],
)
def test_what_does_not_fit_is_not_passed_over(damage: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(SHIPPED.read_text(encoding="utf-8"))
    damage(data)
    with pytest.raises((KeyError, TypeError, ValueError)):
        proof.Proofs().load(data)
