"""The neural tangent kernel against gradients by plain autograd, in every family."""

import math

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from reference.gradients import SEED, assert_kernel, gram, reference_rows, single_images
from untouched import assert_same, fingerprint
from wellposed.anatomy import blocks
from wellposed.probes import ntk_gradients
from wellposed.probes.ntk import kernel_spectrum, ntk, ntk_spectrum
from zoo import BY_NAME, Case, each_kind, families

VIT = BY_NAME["timm vit"]


def measure(model: nn.Module, x: Tensor, **settings):
    torch.manual_seed(SEED)
    return ntk(model, x, **settings)


@each_kind
def test_the_kernel_and_its_parts_are_those_of_plain_gradients(case: Case) -> None:
    model, x = case.model(dtype=torch.float64), case.input(3, dtype=torch.float64)
    rows = reference_rows(model, single_images(case, x), None)
    found = measure(model, x, groups="parts")
    whole = gram(rows)
    assert_kernel(found.kernel, whole)
    assert_kernel(sum(found.groups.values()), whole)
    assert torch.equal(found.kernel, found.kernel.mT)
    assert found.eigenvalues[-1] >= -1e-12 * found.eigenvalues[0]
    for group in found.members:
        torch.testing.assert_close(
            found.groups[group.name],
            gram(rows, group.parameters),
            rtol=0,
            atol=1e-12 * whole.abs().max().item(),
        )


@pytest.mark.parametrize(
    "edit",
    [
        lambda model: wp.gray_tokens(model, 0.7, "svd"),
        lambda model: wp.gray_tokens(model, 0.7, "svd", "blocks"),
        lambda model: wp.gray_tokens(model, 0.9, "dct"),
        lambda model: wp.gray_tokens(model, 0.7, "svd", "pixels"),
        lambda model: wp.broadcast_context(model, scaled=True),
        lambda model: wp.remove_skips(model, "both"),
    ],
    ids=["svd", "svd in blocks", "dct", "pixels", "CB_S", "no skips"],
)
def test_edited_models(edit) -> None:
    model, x = VIT.model(dtype=torch.float64), VIT.input(3, dtype=torch.float64)
    edit(model)
    rows = reference_rows(model, list(x.split(1)), None)
    found = ntk(model, x, groups="parts")
    assert_kernel(found.kernel, gram(rows))
    for group in found.members:
        assert_kernel(found.groups[group.name], gram(rows, group.parameters), relative=1e-11)


@families("timm vit", "timm swin", "hf vit", "torch encoder pre-norm", "hf vitmae")
def test_single_outputs(case: Case) -> None:
    model, x = case.model(dtype=torch.float64), case.input(2, dtype=torch.float64)
    found = measure(model, x, outputs=[1, 0], groups="blocks")
    assert_kernel(found.kernel, gram(reference_rows(model, single_images(case, x), [1, 0])))


def test_all_outputs_and_their_sum_agree() -> None:
    model, x = VIT.model(dtype=torch.float64), VIT.input(3, dtype=torch.float64)
    every, total, two = ntk(model, x, outputs="all"), ntk(model, x), ntk(model, x, outputs=(4, 1))
    classes = 5
    assert every.kernel.shape == (3 * classes, 3 * classes)
    by_image = every.kernel.reshape(3, classes, 3, classes)
    assert_kernel(by_image.sum((1, 3)) / classes, total.kernel)
    assert_kernel(by_image[:, [4, 1]][..., [4, 1]].reshape(6, 6), two.kernel)


def test_a_mask_drawn_at_random_is_the_same_in_every_pass() -> None:
    case = BY_NAME["hf vitmae"]
    model, x = case.model(dtype=torch.float64), case.input(3, dtype=torch.float64)
    once, often = measure(model, x), measure(model, x, memory_limit="600KB")
    assert len(often.plan.passes) > len(once.plan.passes)
    assert_kernel(often.kernel, once.kernel)


def switches(model: nn.Module) -> list:
    """What a measurement turns off meanwhile, beside what a fingerprint holds."""
    return [
        [getattr(module, "grad_checkpointing", None) for module in model.modules()],
        [dict(module._backward_pre_hooks) for module in model.modules()],
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cuda.flash_sdp_enabled(),
    ]


@pytest.mark.parametrize("fails", [False, True])
@families("timm vit", "timm xcit", "timm swin", "hf vitmae")
def test_the_model_is_left_as_it_was(case: Case, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = case.model().train(), case.input()
    found = blocks(model)
    found[0].module.eval()
    found[1].module.requires_grad_(False)
    found[0].module.register_full_backward_hook(lambda *_: None)
    found[0].module.register_full_backward_pre_hook(lambda *_: None)
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(True)
    for p in list(model.parameters())[::3]:
        p.grad = torch.ones_like(p)
    wp.remove_skips(model, "attention", blocks=0)
    before, switched = fingerprint(model), switches(model)
    if fails:
        for way in ("_gradient", "_mapped_gradients"):
            monkeypatch.setattr(ntk_gradients, way, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ntk(model, x, groups="parts")
    else:
        ntk(model, x, groups="parts")
    assert_same(before, fingerprint(model))
    assert switches(model) == switched


def test_frozen_parameters_do_not_count() -> None:
    model, x = VIT.model(dtype=torch.float64), VIT.input(3, dtype=torch.float64)
    rows = reference_rows(model, list(x.split(1)), None)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].attn.qkv.weight.requires_grad_(False)
    found = ntk(model, x, groups="parts")
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert_kernel(found.kernel, gram(rows, trainable))
    assert list(found.groups) == ["block 1 attention", "block 1 ffn", "rest"]
    model.requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"every parameter of VisionTransformer is frozen.*requires_grad_\(\)"
    ):
        ntk(model, x)


def test_tied_parameters_count_once() -> None:
    model, x = VIT.model(dtype=torch.float64), VIT.input(3, dtype=torch.float64)
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    found = ntk(model, x, groups="parts")
    assert_kernel(found.kernel, gram(reference_rows(model, list(x.split(1)), None)))
    (rest,) = [group for group in found.members if group.name == "rest"]
    assert "blocks.0.mlp.fc1.weight" in rest.parameters


def test_checkpoints_backward_hooks_and_contexts_make_no_difference() -> None:
    model, x = VIT.model(), VIT.input(3)
    model.blocks[0].mlp.drop1.p = 0.5
    expected = {dtype: ntk(model, x, dtype=dtype).kernel for dtype in (torch.float32, torch.float64)}
    model.train().set_grad_checkpointing(True)
    calls = []
    model.blocks[0].register_full_backward_hook(lambda *_: calls.append(1))
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        for dtype, kernel in expected.items():
            with context:
                found = ntk(model, x, groups="parts", dtype=dtype)
            assert_kernel(found.kernel, kernel)
    assert not calls


def test_a_compiled_model_is_measured_inside() -> None:
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    model, x = VIT.model(), VIT.input(2)
    expected = ntk(model, x).kernel
    assert torch.equal(ntk(torch.compile(model, backend=backend), x).kernel, expected)
    model.blocks[0].compile(backend=backend)
    assert torch.equal(ntk(model, x).kernel, expected)
    assert not compiled


@families("timm vit", "timm dinov3", "timm swinv2", "timm cait", "hf dinov3", "hf swin", "torchvision swin")
def test_float64_gradients_of_a_float32_model(case: Case) -> None:
    model, x = case.model(), case.input(3)
    found = ntk(model, x, dtype=torch.float64)
    assert found.dtype == torch.float64
    assert next(model.parameters()).dtype == torch.float32
    assert_kernel(found.kernel, ntk(case.model(dtype=torch.float64), x.double()).kernel, relative=1e-6)


class _Counting(nn.Module):
    """Returns its outputs in a tuple, beside a tensor of integers, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        out = self.inner(x)
        return out.argmax(1), out


def test_the_model_need_not_be_known_unless_its_blocks_are_asked_for() -> None:
    torch.manual_seed(0)
    model = _Counting().double()
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64)
    found = ntk(model, x)
    assert model.calls == 0
    rows = reference_rows(model.inner, list(x.split(1)), None)
    assert_kernel(found.kernel, gram(rows))
    with pytest.raises(wp.UnknownModelError):
        ntk(model, x, groups="blocks")


@pytest.mark.every_value
@families("timm vit", "timm swin", "timm cait", "hf vit", "hf dinov3", "torchvision vit", "timm resmlp")
@pytest.mark.parametrize("outputs", ["sum", "all"])
def test_mapped_images_give_the_kernel_of_single_rows(
    case: Case, outputs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = case.model(), case.input(3)
    exact = measure(model, x, outputs=outputs, dtype=torch.float64).kernel
    mapped = measure(model, x, outputs=outputs)
    monkeypatch.setattr(ntk_gradients, "MAPPED_NUMBERS", {"cpu": 0})
    single = measure(model, x, outputs=outputs)
    assert (mapped.how, single.how) == ("mapped over 3 images at a time", "row by row")
    assert "mapped over" in mapped.records()[0].estimator
    assert_kernel(mapped.kernel, exact, relative=1e-5)
    assert_kernel(single.kernel, exact, relative=1e-5)


def test_what_is_not_mapped() -> None:
    assert measure(BY_NAME["timm xcit"].model(), BY_NAME["timm xcit"].input(2)).how == "row by row"
    assert measure(BY_NAME["hf vitmae"].model(), BY_NAME["hf vitmae"].input(2)).how == "row by row"

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(12))

        def forward(self, x: Tensor) -> Tensor:
            values = x.flatten(1) * self.weight
            return values if values.sum().item() > 0 else 2 * values

    x = torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = Branching().double()
    found = ntk(model, x)
    assert found.how.startswith("row by row, since it cannot be mapped: ")
    assert_kernel(found.kernel, gram(reference_rows(model, list(x.split(1)), None)))


def test_the_kernel_of_a_linear_model_is_that_of_its_inputs() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double(), torch.randn(4, 3, 2, 2).double()
    inputs = x.flatten(1) @ x.flatten(1).mT + 1
    assert_kernel(ntk(model, x).kernel, inputs)
    assert_kernel(ntk(model, x, outputs="all").kernel, torch.kron(inputs, torch.eye(3).double()))


def test_records() -> None:
    model, x = VIT.model(dtype=torch.float64), VIT.input(4, dtype=torch.float64)
    found = ntk(model, x, groups="parts")
    records = {record.key: record for record in ntk_spectrum(model, x, groups="parts")}
    assert len(records) == 4 * (1 + 5)
    for (block, position), kernel in {
        (None, ""): found.kernel,
        (0, "attention"): found.groups["block 0 attention"],
        (1, "ffn"): found.groups["block 1 ffn"],
        (None, "rest"): found.groups["rest"],
    }.items():
        values = torch.linalg.eigvalsh(kernel).flip(0).tolist()
        kappa = records["ntk kappa", block, position, None]
        assert kappa.value == pytest.approx(values[0] / values[-1])
        assert kappa.curve == pytest.approx(values)
        assert (kappa.status, kappa.images, kappa.dtype) == ("ok", 4, "float64")
        assert "sum of 5 outputs / sqrt(5)" in kappa.estimator
        assert "1 pass over 4 rows" in kappa.estimator
        assert records["ntk lambda max", block, position, None].value == pytest.approx(values[0])
        assert records["ntk lambda min", block, position, None].value == pytest.approx(values[-1])
        assert records["ntk trace", block, position, None].value == pytest.approx(sum(values))
    assert records["ntk kappa", 1, "ffn", None].module == "blocks.1"
    assert found.kappa == records["ntk kappa", None, "", None].value


def near_twins(distance: float, dtype: torch.dtype = torch.float32) -> Tensor:
    x = VIT.input(4, dtype=torch.float64)
    x[1] = x[0] + distance * x[1]
    return x.to(dtype)


def test_float32_gradients_tell_kappa_up_to_the_limit() -> None:
    model, wide = VIT.model(), VIT.model(dtype=torch.float64)
    for distance, expected in ((1e-2, 1e-3), (1e-4, 0.1)):
        x = near_twins(distance)
        found, exact = ntk(model, x), ntk(wide, x.double())
        assert not found.at_least
        assert found.kappa == pytest.approx(exact.kappa, rel=expected)
    assert exact.kappa > 1e7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_images_give_a_bound(dtype: torch.dtype) -> None:
    model, x = VIT.model(dtype=dtype), near_twins(0.0, dtype)
    found = ntk(model, x)
    records = {record.measure: record for record in found.records()}
    assert found.at_least
    kappa, smallest = records["ntk kappa"], records["ntk lambda min"]
    assert (kappa.status, smallest.status) == ("at least", "at most")
    assert kappa.value == pytest.approx(found.eigenvalues[0].item() / smallest.value)
    assert abs(found.eigenvalues[-1].item()) <= smallest.value
    assert "rounding" in kappa.note
    assert ("torch.float64" in kappa.note) == (dtype != torch.float64)


def test_spectra_that_have_no_kappa() -> None:
    zero, bad = torch.zeros(3, 3, dtype=torch.float64), torch.full((3, 3), torch.nan, dtype=torch.float64)
    for kernel in (zero, bad):
        assert math.isnan(kernel_spectrum(kernel, torch.float32).kappa)
    model, x = VIT.model(), VIT.input(2)
    model.head.weight.data.zero_()
    parts = {r.key: r for r in ntk(model, x, groups="parts").records()}
    kappa, trace = (parts[f"ntk {name}", 0, "ffn", None] for name in ("kappa", "trace"))
    assert (kappa.value, kappa.status, trace.value, trace.status) == (None, "not measured", 0.0, "ok")
    assert "do not depend" in kappa.note
    model.head.bias.data.fill_(torch.inf)
    model.norm.weight.data.fill_(torch.inf)
    for record in ntk_spectrum(model, x):
        assert (record.value, record.status, record.curve) == (None, "not measured", ())
        assert "non-finite" in record.note


def test_one_image_has_kappa_one() -> None:
    assert ntk(VIT.model(), VIT.input(1)).kappa == 1


def test_the_first_images_of_a_loader() -> None:
    model, x = VIT.model(), VIT.input(10)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
    found = ntk(model, loader, max_images=5)
    assert found.images == 5
    assert torch.equal(found.kernel, ntk(model, x[:5]).kernel)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"outputs": "mean"}, ValueError, '"sum", "all" or indices, got \'mean\''),
        ({"outputs": []}, ValueError, "at least one"),
        ({"outputs": [0, 5]}, ValueError, r"within 0 and 4.*got \[0, 5\].*5 outputs"),
        ({"outputs": [1, 1]}, ValueError, "different indices"),
        ({"outputs": [0.5]}, TypeError, r"got \[0.5\]"),
        ({"groups": "heads"}, ValueError, "model, blocks, parts, got 'heads'"),
        ({"memory_limit": "much"}, ValueError, "\"500MiB\", got 'much'"),
        ({"memory_limit": 0}, ValueError, "positive"),
        ({"memory_limit": 1.5}, TypeError, "got float"),
        ({"memory_limit": 100}, ValueError, "is enough"),
        ({"dtype": torch.int64}, TypeError, "floating point type"),
    ],
)
def test_bad_settings(settings: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ntk(VIT.model(), VIT.input(), **settings)


def test_a_model_without_a_tensor_to_differentiate() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return "words"

    with pytest.raises(TypeError, match=r"got str; wrap the model"):
        ntk(Words(), VIT.input())
