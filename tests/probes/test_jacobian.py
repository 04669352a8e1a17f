"""The spectrum of a sub-block's Jacobian: dense, matrix-free, and under graying."""

import math

import pytest
import timm
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.digits import build_model
from wellposed.probes.jacobian import JacobianSpectrum, dense_jacobian, graying_sweep, jacobian_spectrum
from wellposed.probes.subblock import sub_block
from wellposed.records import from_dict, to_dict
from zoo import BY_NAME, Case, families


@pytest.mark.parametrize("method", ["spectral", "svd"])
def test_own_graying_in_a_block_is_right_dense_and_refused_matrix_free(method: str) -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, depth=1, embed_dim=12, num_heads=3
    )
    block = model.blocks[0]
    block.norm1 = nn.Sequential(block.norm1, wp.nn.TokenGraying(0.7, method))
    x = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.svdvals(by_finite_differences(model, x, "attention", skip=True))
    found = jacobian_spectrum(model, x, skip=True, method="dense", dtype=torch.float64)
    assert found.sigma_max.value == pytest.approx(expected[0].item(), rel=1e-6)
    # Matrix-free takes the derivative of the backward pass; without one it would be wrong by half.
    with pytest.raises(RuntimeError, match="method='dense'"):
        jacobian_spectrum(model, x, skip=True, method="matrix-free", dtype=torch.float64)


def by_finite_differences(model: nn.Module, x: Tensor, part: str, *, skip: bool) -> Tensor:
    """The Jacobian column by column, from the function alone, in float64."""
    cut = sub_block(model, x, 0, part, skip=skip, dtype=torch.float64)
    step, columns = 1e-6, []
    with torch.no_grad():
        for i in range(cut.input.numel()):
            moved = torch.zeros(cut.input.numel(), dtype=torch.float64)
            moved[i] = step
            moved = moved.reshape(cut.input.shape)
            difference = cut.function(cut.input + moved) - cut.function(cut.input - moved)
            columns.append(difference.reshape(-1) / (2 * step))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("part", ["attention", "local", "ffn", "block"])
@pytest.mark.parametrize("skip", [False, True])
def test_dense_against_finite_differences(part: str, skip: bool) -> None:
    case = BY_NAME["timm xcit"]
    model, x = case.model(), case.input(1)
    expected = by_finite_differences(model, x, part, skip=skip)
    cut = sub_block(model, x, 0, part, skip=skip, dtype=torch.float64)
    torch.testing.assert_close(dense_jacobian(cut), expected, rtol=1e-6, atol=1e-7)
    spectrum = jacobian_spectrum(model, x, part=part, skip=skip)
    assert (spectrum.method, spectrum.dtype) == ("dense", torch.float64)
    torch.testing.assert_close(spectrum.singular_values, torch.linalg.svdvals(expected), rtol=1e-6, atol=1e-7)


def test_a_skip_adds_the_identity() -> None:
    case = BY_NAME["timm vit"]
    model, x = case.model(), case.input(1)
    without, with_skip = (
        dense_jacobian(sub_block(model, x, 1, skip=skip, dtype=torch.float64)) for skip in (False, True)
    )
    torch.testing.assert_close(with_skip - without, torch.eye(len(without), dtype=torch.float64))


FAMILIES = (
    "timm vit",
    "timm swin",
    "hf vit",
    "torchvision vit",
    "timm dinov3",
    "timm cait",
    "timm convmixer",
)


@pytest.mark.slow
@families(*FAMILIES, "torch encoder")
def test_matrix_free_agrees_with_dense(case: Case) -> None:
    model, x = case.model(), case.input()
    for part in (*case.roles, "block"):
        for skip in (False, True)[: 1 if part == "block" else 2]:
            s = jacobian_spectrum(model, x, part=part, skip=skip, method="dense").singular_values
            free = jacobian_spectrum(model, x, part=part, skip=skip, method="matrix-free", k=3, max_steps=60)
            assert (free.method, free.dtype) == ("matrix-free", torch.float32)
            assert free.largest.converged.all(), (part, skip)
            torch.testing.assert_close(free.largest.values, s[:3], rtol=1e-2, atol=0)
            # Bounds hold, and what is called known is known.
            assert (free.smallest.high >= s[-3:]).all()
            within = (free.smallest.values - s[-3:]).abs() <= 1e-2 * s[-3:]
            assert (within | ~free.smallest.converged).all()


@pytest.mark.parametrize(
    ("name", "part"),
    [("timm convmixer", "mixer"), ("timm cait", "ffn"), ("timm xcit", "attention"), ("timm xcit", "block")],
)
def test_matrix_free_finds_the_smallest_where_the_skip_keeps_it_up(name: str, part: str) -> None:
    case = BY_NAME[name]
    model, x = case.model(), case.input()
    dense = jacobian_spectrum(model, x, part=part, skip=True)
    free = jacobian_spectrum(model, x, part=part, skip=True, method="matrix-free")
    assert free.kappa.status == dense.kappa.status == "ok"
    assert free.kappa.value == pytest.approx(dense.kappa.value, rel=2e-2)
    assert free.kappa.low <= dense.kappa.value <= free.kappa.high
    torch.testing.assert_close(free.smallest.values, dense.smallest.values, rtol=1e-2, atol=0)
    assert free.steps < dense.size


@families("timm vit", "hf swin")
def test_a_pre_norm_branch_is_singular_and_said_to_be(case: Case) -> None:
    spectrum = jacobian_spectrum(case.model(), case.input())
    assert spectrum.sigma_min.status == "at most"
    assert spectrum.kappa.status == "at least"
    assert spectrum.kappa.value >= 1e13
    # LayerNorm forgets the mean of each token, and its length but for its eps.
    tokens = spectrum.size // case.model().state_dict()[_first_norm(case.model())].numel()
    assert (spectrum.singular_values <= 1e-12 * spectrum.singular_values[0]).sum() >= tokens
    note = spectrum.records()[1].note
    assert note == "the smallest is zero as far as float64 can tell"


def _first_norm(model: nn.Module) -> str:
    return next(f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.LayerNorm))


def test_unfinished_values_are_bounds() -> None:
    case = BY_NAME["timm vit"]
    dense = jacobian_spectrum(case.model(), case.input(), skip=True)
    free = jacobian_spectrum(case.model(), case.input(), skip=True, method="matrix-free", k=1, max_steps=2)
    assert free.steps == 2
    assert free.sigma_max.status == "at least"
    assert free.sigma_max.value <= dense.sigma_max.value
    assert free.sigma_min.status == "at most"
    assert free.sigma_min.value >= dense.sigma_min.value
    assert free.kappa.status == "at least"
    assert free.kappa.value <= dense.kappa.value
    notes = [record.note for record in free.records()]
    assert notes[0] == "the largest has not converged in 2 steps"
    assert notes[1] == "the smallest has not converged in 2 steps"
    assert notes[2] == f"{notes[0]}; {notes[1]}"


def test_float32_says_where_its_digits_end() -> None:
    case = BY_NAME["timm vit"]
    wide = jacobian_spectrum(case.model(), case.input(), skip=True)
    narrow = jacobian_spectrum(case.model(), case.input(), skip=True, dtype=torch.float32)
    assert wide.kappa.status == "ok"
    assert narrow.kappa.status == "at least"
    assert narrow.kappa.value <= wide.kappa.value
    error = (narrow.singular_values - wide.singular_values).abs().max()
    assert error <= narrow.rounding
    assert "rounding of float32" in narrow.records()[2].note


def test_the_attention_of_a_vit_b_in_little_memory() -> None:
    # The Jacobian is 151,296 x 151,296, 92 GB.
    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224", depth=1)
    steps: list[int] = []
    spectrum = jacobian_spectrum(
        model, torch.randn(1, 3, 224, 224), k=1, max_steps=3, on_step=lambda done, most: steps.append(done)
    )
    assert (spectrum.method, spectrum.size, steps) == ("matrix-free", 151_296, [1, 2, 3])
    assert spectrum.sigma_max.value > spectrum.sigma_min.value > 0


def test_a_jacobian_of_zeros() -> None:
    case = BY_NAME["timm vit"]
    model = case.model()
    nn.init.zeros_(model.blocks[0].attn.proj.weight)
    for method in ("dense", "matrix-free"):
        spectrum = jacobian_spectrum(model, case.input(), method=method)
        assert spectrum.sigma_max == spectrum.sigma_min == (0, 0, 0, "ok")
        assert spectrum.kappa == (None, None, None, "not measured")
        assert [record.note for record in spectrum.records()] == ["", "", "the Jacobian is zero"]
        assert all(math.isfinite(value) for value in spectrum.relative())


def test_records() -> None:
    case = BY_NAME["timm vit"]
    spectrum = jacobian_spectrum(case.model(), case.input(), block=1, part="ffn", skip=True)
    records = spectrum.records()
    assert [record.measure for record in records] == [
        "jacobian sigma max",
        "jacobian sigma min",
        "jacobian kappa",
    ]
    for record in records:
        assert (record.block, record.module, record.position) == (1, "blocks.1", "ffn+skip")
        assert (record.images, record.dtype, record.status) == (1, "float64", "ok")
        assert record.low <= record.value <= record.high
        assert from_dict(to_dict(record)) == record
    largest, smallest, kappa = records
    assert kappa.value == pytest.approx(largest.value / smallest.value)
    assert kappa.tolerance < 1e-9
    assert len(kappa.curve) == 200
    assert (kappa.curve[0], kappa.curve[-1]) == (largest.value, smallest.value)
    assert kappa.estimator == "dense Jacobian, singular values in float64"
    block = jacobian_spectrum(case.model(), case.input(), part="block").records()
    assert {record.position for record in block} == {"block"}


def test_records_of_a_distribution() -> None:
    case = BY_NAME["timm vit"]
    options = {"block": 1, "part": "ffn", "skip": True}
    dense = jacobian_spectrum(case.model(), case.input(), **options)
    free = jacobian_spectrum(
        case.model(), case.input(), method="matrix-free", density=True, max_steps=40, **options
    )
    record = free.records()[2]
    assert record.estimator == "Golub-Kahan-Lanczos, 40 steps; curve by Lanczos quadrature, 4 probes"
    curve, true = torch.tensor(record.curve), dense.curve()
    assert len(curve) == 200
    # Away from the ends, where few values lie, the distribution gives them to a few per cent.
    torch.testing.assert_close(curve[20:180].double(), true[20:180], rtol=0.15, atol=0)
    mean, error = free.density.average(torch.square)
    assert (mean - dense.singular_values.square().mean()).abs() <= 4 * error
    plain = jacobian_spectrum(case.model(), case.input(), method="matrix-free", max_steps=10, **options)
    assert plain.density is None
    assert plain.records()[2].curve == ()


def test_leaves_the_model_and_the_random_state() -> None:
    case = BY_NAME["torchvision vit"]
    model, x = case.model().train(), case.input()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    rng, convolution = torch.random.get_rng_state(), torch.backends.cudnn.conv.fp32_precision
    jacobian_spectrum(model, x, method="matrix-free", density=True, max_steps=12, density_steps=5)
    graying_sweep(model, x, (1.0, 0.5), max_steps=10, method="matrix-free")
    with pytest.raises(RuntimeError, match="stop"):
        jacobian_spectrum(model, x, method="matrix-free", on_step=_stop)
    assert all(m.training for m in model.modules())
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), rng)
    assert torch.backends.cudnn.conv.fp32_precision == convolution
    assert len(wp.edits(model)) == 0


def _stop(done: int, most: int) -> None:
    if done == 3:
        raise RuntimeError("stop")


def test_the_callers_modes_do_not_matter() -> None:
    case = BY_NAME["torch encoder"]  # block 0 gets the tokens as they are, also under autocast
    model, x = case.model(), case.input()

    def measure() -> Tensor:
        return jacobian_spectrum(model, x, method="matrix-free", k=1, max_steps=5).largest.values

    expected = measure()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(measure(), expected)
    with torch.no_grad():
        assert torch.equal(measure(), expected)
    with torch.inference_mode():
        assert torch.equal(measure(), expected)


@families("timm vit", "torch encoder pre-norm")
def test_half_precision_models_and_wide_ones(case: Case) -> None:
    for dtype, computed in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        spectrum = jacobian_spectrum(
            case.model(dtype=dtype), case.input(3, dtype=dtype), method="matrix-free", max_steps=10
        )
        assert spectrum.dtype == computed
        assert spectrum.size == case.input(3)[:, :1].numel() if case.tokens else True


def _flatness(spectrum: JacobianSpectrum) -> float:
    """The mean of the spectrum over its largest value."""
    return spectrum.relative().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("gray_method", ["svd", "dct"])
@pytest.mark.parametrize("skip", [False, True])
def test_graying_the_input_of_a_block_flattens_its_jacobian(gray_method: str, skip: bool) -> None:
    image = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(2)).cumsum(-1).cumsum(-2)
    spectra = graying_sweep(build_model(0), image, gray_method=gray_method, where="blocks", skip=skip)
    assert list(spectra) == [1.0, 0.9, 0.7, 0.5]
    flatness = [_flatness(spectrum) for spectrum in spectra.values()]
    assert flatness == sorted(flatness)
    assert flatness[-1] > 1.5 * flatness[0]


def test_eps_of_one_is_no_graying() -> None:
    case = BY_NAME["timm vit"]
    model, x = case.model(), case.input()
    for where in ("embedding", "blocks"):
        spectra = graying_sweep(model, iter([x]), (1.0, 0.5), where=where, block=1, part="ffn")
        plain = jacobian_spectrum(model, x, block=1, part="ffn")
        assert torch.equal(spectra[1.0].singular_values, plain.singular_values)
        assert not torch.allclose(spectra[0.5].singular_values, plain.singular_values, rtol=1e-3)
        assert spectra[0.5].relative()[0] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "lanczos"}, "method must be one of auto, dense, matrix-free, got 'lanczos'"),
        ({"dtype": torch.float16}, "dtype must be float32 or float64, got torch.float16"),
        ({"k": 0}, "k and tolerance must be positive, got 0 and 0.01"),
        ({"tolerance": -1.0}, "k and tolerance must be positive, got 5 and -1.0"),
        ({"part": "mixer"}, "part must be one of attention, ffn, block"),
        ({"method": "matrix-free", "max_steps": 2}, "max_steps must be at least k = 5, got 2"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    case = BY_NAME["timm vit"]
    with pytest.raises(ValueError, match=message):
        jacobian_spectrum(case.model(), case.input(), **options)


def test_wrong_sweeps() -> None:
    case = BY_NAME["timm vit"]
    with pytest.raises(ValueError, match="where must be embedding or blocks, got 'pixels'"):
        graying_sweep(case.model(), case.input(), where="pixels")
    with pytest.raises(ValueError, match="eps must name at least one strength"):
        graying_sweep(case.model(), case.input(), ())
    with pytest.raises(ValueError, match=r"eps must be in \(0, 1\], got 1.5"):
        graying_sweep(case.model(), case.input(), (1.5,))


def test_only_the_largest_takes_few_steps() -> None:
    case = BY_NAME["timm vit"]
    model, x = case.model(), case.input()
    options = {"skip": True, "method": "matrix-free", "k": 1}
    both = jacobian_spectrum(model, x, **options)
    few = jacobian_spectrum(model, x, ends="largest", **options)
    assert few.steps < both.steps / 2
    assert few.sigma_max.status == "ok"
    assert few.sigma_max.value == pytest.approx(both.sigma_max.value, rel=1e-2)
    assert (few.sigma_min.status, few.kappa.status) == ("at most", "at least")
    assert few.sigma_min.value >= both.sigma_min.value
    assert few.records()[1].note == "only the largest was asked for"
    with pytest.raises(ValueError, match="ends must be one of largest, both, got 'smallest'"):
        jacobian_spectrum(model, x, ends="smallest")


@families("timm vit", "hf vit", "torchvision vit", "torch encoder pre-norm")
def test_no_small_value_is_claimed_that_layernorm_has_made_zero(case: Case) -> None:
    model, x = case.model(), case.input()
    for part in case.roles:
        true = jacobian_spectrum(model, x, part=part).smallest.values
        for options in ({}, {"ends": "largest"}, {"max_steps": 60}):
            found = jacobian_spectrum(model, x, part=part, method="matrix-free", **options).smallest
            assert (found.low <= true).all()
            assert (found.high >= true).all()
            assert not found.converged.any()
    # A token whose channels are all alike shows it, without a step for the smallest.
    assert jacobian_spectrum(model, x, method="matrix-free").steps < 100


@families("timm vit", "hf vit", "timm swin")
def test_a_wide_jacobian_is_that_of_the_wide_model(case: Case) -> None:
    found = jacobian_spectrum(case.model(), case.input(), skip=True, dtype=torch.float64)
    true = jacobian_spectrum(case.model(dtype=torch.float64), case.input().double(), skip=True)
    assert found.sigma_max.low <= true.sigma_max.value <= found.sigma_max.high
    assert found.kappa.low <= true.kappa.value <= found.kappa.high
    assert next(case.model().parameters()).dtype == torch.float32
