"""Trained weights into a fresh model, and the linear probe on them."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from torch import Tensor, nn

import wellposed as wp
from wellposed.models import build, describe_weights
from wellposed.train.mae import MaskedAutoencoder, encoder_state
from wellposed.train.model import start_from
from wellposed.train.tasks import freeze_for_probe, probe_train_mode

TINY = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def vit(seed: int = 0, name: str = "vit_tiny_patch16_224", **options: Any) -> nn.Module:
    return build(name, seed=seed, **{**TINY, **options})


def swin(seed: int = 0, **options: Any) -> nn.Module:
    own = {"img_size": 32, "embed_dim": 8, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}
    return build("swin_tiny_patch4_window7_224", seed=seed, **{**own, "num_classes": 5, **options})


def convmixer(seed: int = 0, num_classes: int = 5) -> nn.Module:
    from timm.models.convmixer import ConvMixer

    torch.manual_seed(seed)
    return ConvMixer(dim=8, depth=1, kernel_size=3, patch_size=4, num_classes=num_classes)


def save(model: nn.Module, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, path)
    return path


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    return {
        key for key in a.keys() | b.keys() if key not in a or key not in b or not torch.equal(a[key], b[key])
    }


# What fits


@pytest.mark.parametrize("make", [vit, swin, convmixer])
def test_the_same_model_is_loaded_whole(make, tmp_path):
    source, model = make(1), make(2)
    told = start_from(model, save(source, tmp_path / "w.safetensors"))
    assert same(source.state_dict(), model.state_dict())
    count = len(source.state_dict())
    assert told == [f"Weights from {tmp_path / 'w.safetensors'}: {count} of {count} tensors."]
    assert describe_weights(model) == f"weights from {tmp_path / 'w.safetensors'}"


def test_a_run_gives_its_best_weights_else_its_last(tmp_path):
    last, best, model = vit(1), vit(2), vit(3)
    save(last, tmp_path / "last/model.safetensors")
    start_from(model, tmp_path)
    assert same(model.state_dict(), last.state_dict())
    save(best, tmp_path / "best/model.safetensors")
    start_from(model, str(tmp_path))
    assert same(model.state_dict(), best.state_dict())
    start_from(model, tmp_path / "last")
    assert same(model.state_dict(), last.state_dict())


@pytest.mark.parametrize(
    ("make", "head"),
    [(vit, "head"), (swin, "head.fc"), (convmixer, "head")],
    ids=["vit", "swin", "convmixer"],
)
def test_a_head_of_another_number_of_classes_starts_fresh(make, head, tmp_path):
    source, model = make(1), make(2, num_classes=7)
    fresh = copy_of(model)
    told = start_from(model, save(source, tmp_path / "w.safetensors"))
    assert told[1:] == ["The head starts fresh: the file's has 5 classes, the model's 7."]
    changed = differing(source.state_dict(), model.state_dict())
    assert changed == {f"{head}.weight", f"{head}.bias"}
    assert all(torch.equal(fresh[key], model.state_dict()[key]) for key in changed)


def test_heads_that_are_missing(tmp_path):
    with_head, without = vit(1), vit(2, num_classes=0)
    told = start_from(without, save(with_head, tmp_path / "with.safetensors"))
    assert told[1:] == ["The file's head is skipped: the model has none."]
    model = vit(3)
    told = start_from(model, save(without, tmp_path / "without.safetensors"))
    assert told[1:] == ["The head starts fresh: the file has none."]
    assert differing(model.state_dict(), with_head.state_dict()) == {"head.weight"}  # biases start at 0


def test_a_distilled_model_has_two_heads(tmp_path):
    name = "deit_tiny_distilled_patch16_224"
    source, model = vit(1, name), vit(2, name, num_classes=7)
    start_from(model, save(source, tmp_path / "w.safetensors"))
    changed = {key.split(".")[0] for key in differing(source.state_dict(), model.state_dict())}
    assert changed == {"head", "head_dist"}


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        (("token", "avg"), "fc_norm starts fresh, the file's norm is skipped: they pool"),
        (("avg", "token"), "norm starts fresh, the file's fc_norm is skipped: they pool"),
        (("token", "map"), "attn_pool starts fresh."),
        (("map", "token"), "The file's attn_pool is skipped."),
    ],
)
def test_another_pooling_starts_fresh(pools, words, tmp_path):
    source, model = (vit(seed, global_pool=pool) for seed, pool in enumerate(pools))
    told = start_from(model, save(source, tmp_path / "w.safetensors"))
    assert len(told) == 2
    assert told[1].startswith(words)
    assert torch.equal(model.blocks[1].mlp.fc1.weight, source.blocks[1].mlp.fc1.weight)


def test_scales_of_cb_s(tmp_path):
    plain, edited = vit(1), vit(2)
    wp.broadcast_context(edited, scaled=True)
    told = start_from(edited, save(plain, tmp_path / "plain.safetensors"))
    assert told[1:] == ["2 CB_S scales start fresh: the file does not hold them."]
    scale = edited.blocks[0].mlp.inserted_after.op.scale
    assert (scale == 0.5).all()

    with torch.no_grad():
        scale.fill_(0.25)
    other = vit(3)
    wp.broadcast_context(other, scaled=True)
    assert len(start_from(other, save(edited, tmp_path / "edited.safetensors"))) == 1
    assert (other.blocks[0].mlp.inserted_after.op.scale == 0.25).all()

    before = copy_of(plain)
    with pytest.raises(ValueError, match=r"2 unexpected \(blocks.0.mlp.inserted_after.op.scale.*broadcast"):
        start_from(plain, tmp_path / "edited.safetensors")
    assert same(before, plain.state_dict())


def test_edits_that_were_saved_with_a_file_and_are_lacking_are_said(tmp_path):
    edited = vit(1)
    wp.gray_tokens(edited, 0.9)
    path = save(edited, tmp_path / "w.safetensors")
    wp.save_edits(edited, path)
    told = start_from(vit(2), path)
    assert "was saved with edits that this model does not have, wp.gray_tokens(model, 0.9" in told[-1]
    assert len(start_from(edited, path)) == 1


def test_an_edited_model_starts_from_a_masked_autoencoder(tmp_path):
    encoder = vit(1)
    mae = MaskedAutoencoder(encoder, mask_ratio=0.5, decoder_depth=1)
    save_file(encoder_state(mae), tmp_path / "w.safetensors")
    model = vit(2, num_classes=9, global_pool="avg")
    wp.gray_tokens(model, 0.95, "dct")
    wp.remove_skips(model, "attention", blocks=0)
    told = start_from(model, tmp_path / "w.safetensors")
    assert len(told) == 3
    assert torch.equal(model.pos_embed, encoder.pos_embed)
    assert len(wp.edits(model)) == 2


# Other sizes


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 2}, {"reg_tokens": 1, "no_embed_class": True}])
def test_positions_of_another_image_size_are_resampled(options, tmp_path):
    source, model = vit(1, **options), vit(2, img_size=24, **options)
    told = start_from(model, save(source, tmp_path / "w.safetensors"))
    prefix = 0 if model.no_embed_class else model.num_prefix_tokens
    expected = resample_abs_pos_embed(source.pos_embed, [6, 6], [4, 4], num_prefix_tokens=prefix)
    assert torch.equal(model.pos_embed, expected)
    old, new = (tuple(m.pos_embed.shape) for m in (source, model))
    assert told[1:] == [f"Resampled for another size of image or patch: pos_embed, from {old} to {new}."]
    assert differing(source.state_dict(), model.state_dict()) == {"pos_embed"}


def test_patches_of_another_size_are_resampled(tmp_path):
    source, model = vit(1), vit(2, img_size=32, patch_size=8)
    told = start_from(model, save(source, tmp_path / "w.safetensors"))
    expected = resample_patch_embed(source.patch_embed.proj.weight, [8, 8])
    torch.testing.assert_close(model.patch_embed.proj.weight, expected)
    assert "patch_embed.proj.weight, from (32, 3, 4, 4) to (32, 3, 8, 8)" in told[1]
    assert differing(source.state_dict(), model.state_dict()) == {"patch_embed.proj.weight"}


def test_windows_of_another_size_are_resampled(tmp_path):
    source, model = swin(1), swin(2, window_size=8)
    told = start_from(model, save(source, tmp_path / "w.safetensors"))
    assert "relative_position_bias_table, from (49, 2) to (225, 2)" in told[1]
    changed = differing(source.state_dict(), model.state_dict())
    assert all(key.endswith("relative_position_bias_table") for key in changed)
    headless = swin(1, num_classes=0)
    start_from(swin(2), save(headless, tmp_path / "headless.safetensors"))


def test_positions_of_an_oblong_image_are_refused(tmp_path):
    source, model = vit(1, img_size=(16, 20)), vit(2)
    before = copy_of(model)
    with pytest.raises(ValueError, match=r"timm cannot convert them \(ValueError: pos_embed has 20 patches"):
        start_from(model, save(source, tmp_path / "w.safetensors"))
    assert same(before, model.state_dict())


# What does not fit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 1}, r"12 missing \(blocks.1.norm1.weight.*and 8 more\)"),
        ({"depth": 3}, r"12 unexpected \(blocks.2.attn.proj.bias"),
        (
            {"embed_dim": 64},
            r"of another shape \(cls_token: \(1, 1, 64\) in the file, \(1, 1, 32\) in the model",
        ),
        ({"class_token": False, "global_pool": "avg"}, r"1 missing \(cls_token\)"),
        ({"in_chans": 1}, r"1 of another shape \(patch_embed.proj.weight"),
        ({"final_norm": False}, r"2 missing \(norm.weight, norm.bias\)"),
    ],
)
def test_another_trunk_is_refused(options, message, tmp_path):
    path = save(vit(1, **options), tmp_path / "w.safetensors")
    model = vit(2)
    before = copy_of(model)
    with pytest.raises(ValueError, match=rf"(?s)w.safetensors do not fit VisionTransformer: .*{message}"):
        start_from(model, path)
    assert same(before, model.state_dict())
    assert describe_weights(model) == "random weights (seed 2)"


def test_places_without_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"or the folder of a run, there is no .*nowhere"):
        start_from(vit(), tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"there is no .*gone.safetensors"):
        start_from(vit(), tmp_path / "gone.safetensors")
    with pytest.raises(
        FileNotFoundError, match=r"expected best/model.safetensors or last/model.safetensors in"
    ):
        start_from(vit(), tmp_path)
    whole = save(vit(1), tmp_path / "whole.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"cannot read those in .*cut.safetensors"):
        start_from(vit(), tmp_path / "cut.safetensors")


def test_a_wrapped_model_is_refused(tmp_path):
    path = save(vit(1), tmp_path / "w.safetensors")
    model = vit(2)
    model.compile()
    with pytest.raises(ValueError, match="the model is compiled"):
        start_from(model, path)


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.witness,)


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "w.bin", "w.pkl", "w.safetensors"])
def test_a_pickle_is_not_run(name, tmp_path):
    witness = tmp_path / "ran"
    poison = pickle.dumps(Malicious(witness))
    pickle.loads(poison)
    assert witness.exists()
    witness.unlink()

    file = tmp_path / name
    file.write_bytes(poison)
    message = (
        "cannot read those in" if name == "w.safetensors" else r"a pickle can run code(?s:.)*save_file\(state"
    )
    with pytest.raises(ValueError, match=message):
        start_from(vit(), file)
    torch.save({"model": Malicious(witness)}, file)
    with pytest.raises(ValueError, match=message):
        start_from(vit(), file)
    assert not witness.exists()


def test_a_run_that_holds_pickles_is_no_run(tmp_path):
    witness = tmp_path / "ran"
    (tmp_path / "best").mkdir()
    for name in ("best/model.pt", "best/pytorch_model.bin", "model.pth"):
        (tmp_path / name).write_bytes(pickle.dumps(Malicious(witness)))
    with pytest.raises(FileNotFoundError, match="there is neither"):
        start_from(vit(), tmp_path)
    assert not witness.exists()


# The linear probe


@pytest.mark.parametrize("make", [vit, swin, convmixer])
def test_only_the_head_learns(make):
    model = make(1)
    left = freeze_for_probe(model)
    assert left == list(model.get_classifier().parameters())
    before = copy_of(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    side = 16 if make is vit else 32
    for _ in range(3):
        model.train()
        probe_train_mode(model)
        loss = nn.functional.cross_entropy(model(torch.randn(8, 3, side, side)), torch.arange(8) % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    head = next(name for name, module in model.named_modules() if module is model.get_classifier())
    assert differing(before, model.state_dict()) == {f"{head}.weight", f"{head}.bias"}
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_without_the_probes_mode_batch_norm_would_move():
    model = convmixer()
    freeze_for_probe(model)
    before = copy_of(model)
    model.train()
    model(torch.randn(4, 3, 32, 32))
    assert any(key.endswith("running_mean") for key in differing(before, model.state_dict()))


def test_features_stay_without_chance():
    model = vit(drop_path_rate=0.5, proj_drop_rate=0.5)
    freeze_for_probe(model)
    model.train()
    images = torch.randn(2, 3, 16, 16)
    assert not torch.equal(model.forward_features(images), model.forward_features(images))
    probe_train_mode(model)
    assert model.head.training
    assert not model.blocks.training
    assert torch.equal(model.forward_features(images), model.forward_features(images))


def test_both_heads_of_a_distilled_model_learn():
    model = vit(name="deit_tiny_distilled_patch16_224")
    assert len(freeze_for_probe(model)) == 4
    assert model.head_dist.training


def test_a_probe_of_a_compiled_model_keeps_its_mode():
    model = vit()
    freeze_for_probe(model)
    compiled = torch.compile(model, backend="eager")
    compiled.train()
    probe_train_mode(compiled)
    assert not model.blocks.training
    assert model.head.training


def test_a_probe_needs_a_head():
    with pytest.raises(ValueError, match="got a model without one; use num_classes >= 2"):
        freeze_for_probe(timm.create_model("test_vit", num_classes=0))
