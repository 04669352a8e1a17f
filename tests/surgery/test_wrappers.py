"""Edits of layers that are wrapped, merged, quantised or replaced afterwards."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from attention_watch import maps_by_block
from wellposed.errors import NoMeaningError
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


class Opaque(nn.Linear):
    """A linear layer with weights of 8 bits and a kernel of its own, as bitsandbytes has."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features)
        scale = plain.weight.detach().abs().max() / 127
        self.weight = EightBits((plain.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.scale, self.bias = float(scale), plain.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Unseen.apply(x, self.weight.data.numpy() * np.float32(self.scale))
        return out + self.bias


class Unseen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.weight = weight
        return torch.from_numpy(x.detach().numpy() @ weight.T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.from_numpy(grad.numpy() @ ctx.weight), None


class EightBits(nn.Parameter):
    pass


class NoArithmetic(Tensor):
    """A weight that a linear layer can be called with and that has no other operation, as torchao's."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "NoArithmetic":
        made: NoArithmetic = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, bias = args
            return func(x, (weight.inner * 255).round() / 255, bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(f"{func} of a quantised weight")


def dynamically(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def opaquely(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, Opaque(child))
    return model


def in_place(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(NoArithmetic(module.weight.detach()), requires_grad=False)
    return model


QUANTISED = pytest.mark.parametrize("quantise", [dynamically, opaquely, in_place])
OF_TOKENS = {
    "uniform": lambda m: wp.uniform_heads(m, [1]),
    "middle": lambda m: wp.broadcast_context(m, "mlp.middle"),
    "scaled": lambda m: wp.broadcast_context(m, "mlp.middle", scaled=True),
    "end": lambda m: wp.broadcast_context(m, "attention.end"),
    "skips": wp.remove_skips,
    "gray": lambda m: wp.gray_tokens(m, 0.7, "svd", "blocks"),
}


@pytest.mark.filterwarnings("ignore:quantized")
@QUANTISED
@pytest.mark.parametrize("name", ["timm vit", "hf vit"])
@pytest.mark.parametrize("edit", OF_TOKENS.values(), ids=OF_TOKENS)
def test_quantised_models_are_edited(name: str, quantise: Any, edit: Edit) -> None:
    case = BY_NAME[name]
    x, reference = case.input(), case.model()
    plain = output(reference, x)
    listed = [one.module for one in edit(reference)]
    expected = output(reference, x)
    model = quantise(case.model())
    before = output(model, x)
    assert [one.module.removesuffix("_norm") for one in edit(model)] == [
        one.removesuffix("_norm") for one in listed
    ]
    assert (output(model, x) - expected).abs().max() < 0.3 * (expected - plain).abs().max()
    wp.restore(model)
    assert torch.equal(output(model, x), before)


@QUANTISED
@pytest.mark.parametrize("edit", [lambda m: wp.condition_weights(m, strength=2), wp.normalise_spectrum])
def test_quantised_weights_are_not_edited(quantise: Any, edit: Edit) -> None:
    model = quantise(BY_NAME["hf vit"].model())
    with pytest.raises(NoMeaningError, match=r"is quantised .*before|no linear layer"):
        edit(model)
    assert not wp.edits(model)


def test_a_weight_that_is_quantised_under_its_edit() -> None:
    case = BY_NAME["hf vit"]
    model, x = case.model(), case.input()
    wp.normalise_spectrum(model)
    in_place(model)
    with pytest.raises(TypeError, match=r"NoArithmetic of float32\); call wp\.fold\(model\) before"):
        output(model, x)
    model = case.model()
    wp.normalise_spectrum(model)
    with pytest.warns(
        UserWarning, match=r"was replaced by a Opaque: the edit is gone, or in the new weights"
    ):
        opaquely(model)
    assert not wp.edits(model)


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
