"""Edits of layers that are wrapped, merged, quantised or replaced afterwards."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from attention_watch import maps_by_block
from zoo import BY_NAME, output

Edit = Callable[[nn.Module], Any]


def lora(model: nn.Module, targets: list[str], **options: Any) -> Any:
    """A LoRA model whose adapters are not zero, as after training."""
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, r=2, **options))
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return wrapped.eval()


def merged(name: str, targets: list[str]) -> nn.Module:
    """The plain model with the adapters in its weights."""
    model = BY_NAME[name].model()
    merged: nn.Module = lora(model, targets).merge_and_unload()
    return merged


CASES = {
    "query": ("hf vit", ["q_proj"], lambda m: wp.uniform_heads(m, [1])),
    "query before a norm": ("timm vit", ["qkv"], lambda m: wp.uniform_heads(m, [1])),
    "middle": ("timm vit", ["fc2"], lambda m: wp.broadcast_context(m, "mlp.middle")),
    "middle of transformers": ("hf vit", ["fc2"], lambda m: wp.broadcast_context(m, "mlp.middle")),
    "pixels": ("timm vit", ["proj"], lambda m: wp.gray_tokens(m, where="pixels")),
}
by_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4)


@by_case
def test_an_edit_before_or_after_lora_acts_on_the_adapted_layer(case: tuple[str, list[str], Edit]) -> None:
    name, targets, edit = case
    x = BY_NAME[name].input()
    reference = merged(name, targets)
    plain = output(reference, x)
    names = [one.module for one in edit(reference)]
    expected = output(reference, x)
    assert not close(expected, plain)
    for first in (True, False):
        model = BY_NAME[name].model()
        if first:
            edit(model)
        wrapped = lora(model, targets)
        if not first:
            edit(model)
        assert close(output(model, x), expected)
        listed = wp.edits(model)
        assert [one.module for one in listed] == names
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert close(output(twin, x), expected)
        back = wrapped.merge_and_unload()
        assert close(output(back, x), expected)
        assert [one.module for one in wp.edits(back)] == names
        assert len(wp.restore(back)) == len(names)
        assert close(output(back, x), plain)


@by_case
def test_restore_of_an_adapted_model(case: tuple[str, list[str], Edit]) -> None:
    name, targets, edit = case
    x = BY_NAME[name].input()
    model = BY_NAME[name].model()
    edit(model)
    wrapped = lora(model, targets)
    wp.restore(model)
    assert not wp.edits(model)
    assert close(output(model, x), output(merged(name, targets), x))
    assert close(output(wrapped.merge_and_unload(), x), output(merged(name, targets), x))


def test_packed_attention_of_torch() -> None:
    case = BY_NAME["torchvision vit"]
    model, x = case.model(), case.input()
    wp.uniform_heads(model, [0], blocks=0)
    wrapped = lora(model, ["self_attention"])
    expected = output(model, x)
    assert (maps_by_block(model, x)[0][:, :, 0] == 1 / torch.tensor(17.0)).all()
    back = wrapped.merge_and_unload()
    assert close(output(back, x), expected)
    assert [edit.kind for edit in wp.edits(back)] == ["uniform_heads"]


def test_the_scale_is_trained_with_the_adapters(tmp_path: Any) -> None:
    case = BY_NAME["timm vit"]
    model, x = case.model(), case.input()
    wp.broadcast_context(model, "mlp.middle", scaled=True)
    wrapped = lora(model, ["fc2"], modules_to_save=["inserted_before.op"])
    trained = [name for name, p in wrapped.named_parameters() if p.requires_grad and "inserted" in name]
    assert len(trained) == 2
    assert len(wp.edits(model)) == 2
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.1)
    before = output(model, x)
    output(model, x).square().mean().backward()
    optimizer.step()
    after = output(model, x)
    assert not close(after, before)
    scales = [p.detach().clone() for name, p in wrapped.named_parameters() if name in trained]
    assert all((scale - scale[0]).abs().max() > 0 for scale in scales)
    wrapped.save_pretrained(tmp_path)
    other = case.model()
    wp.broadcast_context(other, "mlp.middle", scaled=True)
    loaded = peft.PeftModel.from_pretrained(other, tmp_path).eval()
    assert close(output(other, x), after)
    back = loaded.merge_and_unload()
    assert close(output(back, x), after)
    assert len(wp.edits(back)) == 2
    wp.restore(back)
    assert not any("inserted" in name for name, _ in back.named_modules())


def test_a_layer_that_is_replaced_takes_its_edit_along_and_says_so() -> None:
    case = BY_NAME["timm vit"]
    model = case.model()
    wp.broadcast_context(model, "mlp.middle")
    with pytest.warns(UserWarning, match=r"'fc2', a Linear with an edit, was replaced by a Linear: the edit"):
        model.blocks[0].mlp.fc2 = nn.Linear(128, 32)
    assert [edit.block for edit in wp.edits(model)] == [1]
    output(model, case.input())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dynamic_quantisation_keeps_the_edit() -> None:
    case = BY_NAME["timm vit"]
    model, x = case.model(), case.input()
    wp.broadcast_context(model, "mlp.middle")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert len(wp.edits(quantised)) == 2
    near = output(quantised, x)
    assert (near - output(model, x)).abs().max() < 0.2 * (near - output(case.model(), x)).abs().max()


WEIGHT_EDITS = {
    "condition": lambda m: wp.condition_weights(m, strength=2),
    "exact": lambda m: wp.condition_weights(m, strength="exact"),
    "sigma": wp.normalise_spectrum,
}


OF = [("hf vit", ["q_proj"]), ("torchvision vit", ["self_attention"])]


@pytest.mark.parametrize(("name", "targets"), OF)
@pytest.mark.parametrize("edit", WEIGHT_EDITS.values(), ids=WEIGHT_EDITS)
def test_adapters_of_an_edited_weight_are_refused(name: str, targets: list[str], edit: Edit) -> None:
    """What peft merges is added to what the layer reads: a tensor made on the spot, so it was lost."""
    x = BY_NAME[name].input()
    model = BY_NAME[name].model()
    edit(model)
    for twin in (model, pickle.loads(pickle.dumps(model))):
        with pytest.raises(wp.WrappedModelError, match=r"wp\.fold\(model\) before get_peft_model"):
            lora(twin, targets)
    wp.fold(model)
    plain = output(model, x)
    wrapped = lora(model, targets)
    adapted = output(model, x)
    assert not close(adapted, plain)
    assert close(output(wrapped.merge_and_unload(), x), adapted)


@pytest.mark.parametrize("edit", WEIGHT_EDITS.values(), ids=WEIGHT_EDITS)
def test_the_weights_of_adapted_layers_are_not_edited(edit: Edit) -> None:
    model = BY_NAME["hf vit"].model()
    lora(model, ["q_proj"])
    with pytest.raises(wp.WrappedModelError, match=r"peft has not adapted, got vit\.layers\.0.*q_proj"):
        edit(model)
    assert not wp.edits(model)


@pytest.mark.slow
def test_nothing_is_watched_without_edits() -> None:
    """In a process that makes none."""
    import subprocess
    import sys

    code = (
        "import timm, wellposed\n"
        "from torch.nn.modules.module import _global_module_registration_hooks as hooks\n"
        "assert not hooks\n"
        "model = timm.create_model('vit_tiny_patch16_224', depth=1, img_size=32)\n"
        "wellposed.broadcast_context(model)\n"
        "assert len(hooks) == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
