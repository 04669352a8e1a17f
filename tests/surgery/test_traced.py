"""Edited models under torch.fx, torchvision's feature extractor and torch.jit.trace; no torch.jit.script."""

import copy
import io
import pickle

import pytest
import timm
import torch
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor

import wellposed as wp
from wellposed.nn import ContextBroadcast, TokenGraying
from wellposed.nn.operation import ScriptError
from zoo import BY_NAME, Case, families, output

EDITS = {
    "spectral": lambda model: wp.gray_tokens(model, 0.7),
    "dct": lambda model: wp.gray_tokens(model, 0.7, "dct"),
    "blocks": lambda model: wp.gray_tokens(model, 0.7, where="blocks"),
    "cb": wp.broadcast_context,
    "cb_s": lambda model: wp.broadcast_context(model, scaled=True),
    "featscale": lambda model: wp.broadcast_context(
        model, "attention.end", mean=1, difference=1, learned=True
    ),
    "middle": lambda model: wp.broadcast_context(model, "mlp.middle"),
    "skips": lambda model: wp.remove_skips(model, "attention"),
    "uniform": wp.uniform_heads,
    "weights": lambda model: wp.condition_weights(model, strength=2),
    "sigma": wp.normalise_spectrum,
}
each_edit = pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())


@each_edit
@families("timm vit", "torchvision vit")
def test_symbolic_trace(case: Case, edit) -> None:
    model, x = case.model(), case.input(2)
    edit(model)
    expected = output(model, x)
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(output(traced, x), expected)
    with torch.no_grad():  # the same parameters, those of the edits too
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert torch.equal(output(traced, x), output(model, x))


@each_edit
@families("timm vit", "torchvision vit", "torchvision swin")
def test_feature_extractor(case: Case, edit) -> None:
    model, x = case.model(), case.input(2)
    if case.name == "torchvision swin" and edit is wp.uniform_heads:
        pytest.skip("its heads have position biases")
    edit(model)
    if case.name == "torchvision swin" and edit in (EDITS["weights"], EDITS["sigma"]):
        with pytest.raises(TypeError, match=r"whose weight is used from outside.*wp\.fold\(model\)"):
            create_feature_extractor(model, {"features.1.0": "out"})
        wp.fold(model)
    block = wp.anatomy.blocks(model)[-1]
    seen = {}
    handle = block.module.register_forward_hook(lambda _, __, out: seen.update(out=out))
    output(model, x)
    handle.remove()
    features = create_feature_extractor(model, {block.name: "out"})(x)["out"]
    assert torch.equal(features, seen["out"])


def test_a_symbolic_program_refuses_masks() -> None:
    case = BY_NAME["timm vit"]
    model, x = case.model(), case.input(2)
    wp.broadcast_context(model)
    traced = torch.fx.symbolic_trace(model)
    tokens = 1 + 16
    for refused in ({"attn_mask": torch.ones(2, 1, tokens, tokens, dtype=torch.bool)}, {"is_causal": True}):
        with pytest.raises(ValueError, match="expected a call without masks, got one"):
            traced(x, **refused)


class OfPatches(nn.Module):
    """A model that alone is told which patches are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 16)
        self.block = timm.models.vision_transformer.Block(16, 2)

    def forward(self, patches: torch.Tensor, patch_valid: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = self.block(self.embed(patches))
        return out


@pytest.mark.parametrize(
    ("make", "edit"),
    [
        (OfPatches, lambda m, x: wp.gray_tokens(m, 0.7, example=x)),
        (lambda: OfPatches().block, lambda m, x: wp.gray_tokens(m, 0.7, where="blocks", example=x)),
        (lambda: OfPatches().block, lambda m, x: wp.broadcast_context(m, example=x)),
    ],
)
def test_what_only_hooks_of_the_traced_module_do_is_not_lost(make, edit) -> None:
    model = make().eval()
    x = torch.randn(2, 6, 12 if isinstance(model, OfPatches) else 16)
    edit(model, x)
    expected = model(x)
    with pytest.raises(TypeError, match=r"hooks of the module that it traces; trace the whole model, or"):
        torch.fx.symbolic_trace(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(TypeError, match=r"torch\.export\.export"):
            create_feature_extractor(twin, ["mlp"])
    assert "Block(" in repr(model)
    assert torch.equal(torch.fx.symbolic_trace(nn.Sequential(model))(x), expected)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), expected, rtol=1e-5, atol=1e-6)  # graying takes other products
    wp.restore(model)
    torch.fx.symbolic_trace(model)


@pytest.mark.filterwarnings("ignore")
@each_edit
@families("timm vit")
def test_jit_trace_is_checked_and_saved(case: Case, edit) -> None:
    model, x = case.model().eval(), case.input(2)
    edit(model)
    traced = torch.jit.trace(model, x)  # compares the graphs and outputs of two traces
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    other = torch.rand(x.shape, generator=torch.Generator().manual_seed(3))
    first = (lambda out: out[0] if isinstance(out, tuple) else out)(torch.jit.load(file)(other))
    torch.testing.assert_close(first, output(model, other), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@each_edit
def test_script_is_refused_with_what_to_use(edit) -> None:
    model = BY_NAME["timm vit"].model()
    edit(model)
    with pytest.raises(ScriptError, match=r"use torch\.export\.export or torch\.jit\.trace"):
        torch.jit.script(model)
    wp.restore(model)
    torch.jit.script(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [lambda: TokenGraying(0.7), lambda: ContextBroadcast(6)])
def test_modules_in_a_model_of_ones_own(make) -> None:
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(6, 6), make())
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(x), model(x))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin[1]) is type(model[1])
        assert torch.equal(twin(x), model(x))
    with pytest.raises(ScriptError):
        torch.jit.script(model)
