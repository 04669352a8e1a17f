"""Edited models in the life of a model: copied, saved, compiled, exported, moved, checkpointed."""

import copy
import dataclasses
import io
import pickle

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wellposed as wp
from zoo import BY_NAME, KINDS, Case, each_kind, families, output, some_families

pytestmark = pytest.mark.slow

# For compilers and ONNX, which take seconds: a plain model, windows, class attention, convolutions, fused
# attention with a bias (and transformers), packed parameters, images on the second axis.
FEW = (
    *("timm vit", "timm swin", "timm cait", "timm convmixer"),
    *("hf beit", "torchvision vit", "torch encoder pre-norm"),
)


def of_one_block(case: Case) -> Case:
    """A ViT of timm, for a compiler that takes long."""

    def build() -> nn.Module:
        model = case.build()
        model.blocks = model.blocks[:1]
        return model

    return dataclasses.replace(case, build=build, blocks=1)


def edited(case: Case, *, method: str = "dct", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with an edit of every kind."""
    model = case.model(dtype=dtype)
    wp.gray_tokens(model, 0.6, method, "embedding" if case.has_embedding else "blocks")
    if case.has_mlp:
        wp.broadcast_context(model, scaled=True)
    wp.remove_skips(model, case.roles[0], blocks=0)
    return model


class Tensors(nn.Module):
    """A model of any library as a map from tensor to tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, x: Tensor) -> Tensor:
        return output(self.model, x)


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(0)  # stochastic depth, and the jitter of DINOv3's positions in training
    output(model, x).double().square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def pickled_and_unpickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@each_kind
def test_copies_are_exact_and_independent(case: Case) -> None:
    model, x = edited(case), case.input()
    expected, plain = output(model, x), output(case.model(), x)
    for duplicate in (copy.deepcopy, pickled_and_unpickled, saved_and_loaded):
        twin = duplicate(model)
        assert torch.equal(output(twin, x), expected), duplicate
        assert wp.edits(twin) == wp.edits(model)
        wp.restore(twin)
        assert torch.equal(output(twin, x), plain), duplicate
        assert torch.equal(output(model, x), expected), duplicate


@each_kind
def test_state_dict_goes_into_a_model_edited_alike(case: Case) -> None:
    model, x = edited(case), case.input()
    other = edited(case)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(output(other, x), output(model, x))


@pytest.mark.every_value  # what the edit changes, Dynamo traces; AOT only sees operations
@some_families(*FEW)
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_compiles_whole_forward_and_backward(case: Case, backend: str) -> None:
    torch._dynamo.reset()
    # In float32 the rounding of the gradients of large weights hides what is asserted.
    model, x = edited(case, dtype=torch.float64), case.input(dtype=torch.float64)
    expected, expected_gradients = output(model, x), gradients(model, x)
    model.zero_grad()
    out = torch.compile(Tensors(model), fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(out, expected)
    out.square().mean().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected_gradients[name])


@families("timm vit")
@pytest.mark.parametrize("method", ["dct", "svd"])
def test_compiles_with_inductor(case: Case, method: str) -> None:
    torch._dynamo.reset()
    model, x = edited(of_one_block(case), method=method), case.input()
    expected, expected_gradients = output(model, x), gradients(model, x)
    model.zero_grad()
    out = torch.compile(Tensors(model), fullgraph=True)(x)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    out.float().square().mean().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected_gradients[name], rtol=1e-3, atol=1e-4)


@pytest.mark.every_value
@families("timm vit", "timm swinv2", "hf vit", "torchvision vit")
@pytest.mark.parametrize("method", ["dct", "svd"])
def test_exports_strictly_with_a_free_batch(case: Case, method: str) -> None:
    model, x = edited(case, method=method), case.input()
    free = {"x": {0: torch.export.Dim("batch", min=2, max=64)}} if case.name != "timm swinv2" else None
    program = torch.export.export(Tensors(model), (x,), strict=True, dynamic_shapes=free)
    batch = 2 if free is None else 5
    torch.testing.assert_close(
        program.module()(case.input(batch)), output(model, case.input(batch)), rtol=1e-4, atol=1e-5
    )


def test_spectral_graying_exports_strictly_with_a_free_batch() -> None:
    case = BY_NAME["timm vit"]
    model = edited(case, method="spectral")
    free = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    program = torch.export.export(Tensors(model), (case.input(),), strict=True, dynamic_shapes=free)
    got, expected = program.module()(case.input(5)), output(model, case.input(5))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def without_fused_attention(model: nn.Module) -> nn.Module:
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return model


@some_families(*(name for name in KINDS if name not in FEW))
def test_exports(case: Case) -> None:
    model, x = edited(case), case.input()
    program = torch.export.export(Tensors(model), (x,))
    # The DCT of a program is two products, that of eager code on a CPU an FFT.
    torch.testing.assert_close(program.module()(x), output(model, x), rtol=1e-5, atol=1e-4)


@some_families(*FEW)
def test_exports_and_runs_in_onnxruntime(case: Case, tmp_path) -> None:
    model, x = edited(case), case.input()
    program = torch.export.export(Tensors(model), (x,))
    # The DCT of a program is two products, that of eager code on a CPU an FFT.
    torch.testing.assert_close(program.module()(x), output(model, x), rtol=1e-5, atol=1e-4)
    if case.name in ("timm beit", "hf beit", "hf swin"):
        # PyTorch's exporter fails on fused attention with a bias, in the unedited models too.
        model = without_fused_attention(model)
        program = torch.export.export(Tensors(model), (x,))
    # One export for both: without the program ONNX would make its own.
    torch.onnx.export(program, (x,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), output(model, x).detach(), rtol=1e-3, atol=1e-4)


def test_spectral_graying_runs_in_onnxruntime(tmp_path) -> None:
    case = BY_NAME["timm vit"]
    model, x = edited(case, method="spectral"), case.input()
    torch.onnx.export(Tensors(model), (x,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), output(model, x).detach(), rtol=1e-3, atol=1e-4)


def test_onnx_has_no_svd_and_says_so(tmp_path) -> None:
    case = BY_NAME["timm vit"]
    model = edited(case, method="svd")
    with pytest.raises(Exception, match=r"No ONNX function found for .*linalg_svd"):
        torch.onnx.export(model, (case.input(),), tmp_path / "model.onnx", dynamo=True, verbose=False)


def similar(low: Tensor, exact: Tensor) -> bool:
    """Tiny models with large weights amplify rounding a lot; a wrong operation would not come near this."""
    cosine = nn.functional.cosine_similarity(low.float().flatten(), exact.float().flatten(), dim=0)
    return cosine.item() > 0.9


@each_kind
def test_bf16_autocast(case: Case) -> None:
    model, x = edited(case), case.input()
    exact = output(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        out = output(model, x)
        out.float().square().mean().backward()
    assert similar(out, exact)
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@each_kind
def test_moves_between_dtypes(case: Case) -> None:
    model, x = edited(case, method="svd"), case.input()
    exact = output(model, x)
    for dtype in (torch.float64, torch.bfloat16):
        out = output(model.to(dtype), x.to(dtype))
        assert out.dtype == dtype
        assert similar(out, exact), dtype
        if dtype == torch.float64:
            assert torch.equal(output(model.float(), x), exact)


@each_kind
def test_moves_between_devices(case: Case, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, x = edited(case), case.input()
    expected = output(model, x)
    device = "cuda" if torch.cuda.is_available() else "meta"
    moved = output(copy.deepcopy(model).to(device), x.to(device))
    assert (moved.device.type, moved.shape) == (device, expected.shape)
    if device == "cuda":
        torch.testing.assert_close(moved.cpu(), expected, rtol=1e-3, atol=1e-3)


def checkpointed(model: nn.Module) -> nn.Module:
    """With gradient checkpointing as its library offers it, else as PyTorch does."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable()
        return model
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(True)
        return model
    return Checkpointed(model)


class Checkpointed(nn.Module):
    """A model whose whole forward pass is run again in the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.model, x, use_reentrant=False)


@each_kind
def test_gradient_checkpointing(case: Case) -> None:
    model, x = edited(case, method="svd").train(), case.input()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.Dropout):
            module.eval()
    expected = list(gradients(model, x).values())
    got = list(gradients(checkpointed(model), x).values())
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_transformers_still_records_hidden_states_and_attentions() -> None:
    case = BY_NAME["hf vit"]
    model, x = case.model(), case.input()
    wp.remove_skips(model, "attention", blocks=0)
    out = model(x, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    # The first block without its attention skip, by its own parts
    layer = model.vit.layers[0]
    h = out.hidden_states[0]
    branch = layer.attention(layer.layernorm_before(h))[0]
    torch.testing.assert_close(out.hidden_states[1], branch + layer.mlp(layer.layernorm_after(branch)))


def test_evaluation_uses_no_fused_encoder_layer() -> None:
    """PyTorch fuses an encoder layer in evaluation without gradients, skips and all."""
    case = BY_NAME["torch encoder"]
    model, x = case.model(), case.input()
    wp.remove_skips(model, "attention")
    with_gradient = output(model, x)
    with torch.no_grad():
        torch.testing.assert_close(output(model, x), with_gradient)
    wp.restore(model)
    wp.broadcast_context(model)
    with_gradient = output(model, x)
    with torch.no_grad():
        torch.testing.assert_close(output(model, x), with_gradient)


def test_nested_tensors_are_refused_with_the_remedy() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    wp.broadcast_context(model)
    padding = torch.tensor([[False] * 9, [False] * 7 + [True] * 2])
    with torch.no_grad(), pytest.raises(TypeError, match="enable_nested_tensor=False"):
        model(torch.randn(2, 9, 32), src_key_padding_mask=padding)
