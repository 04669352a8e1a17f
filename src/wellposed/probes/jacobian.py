r"""The singular values of the Jacobian of one sub-block, at the tokens of an image.

.. math::
    J = \frac{\partial f(x)}{\partial x}, \qquad J \in R^{ND \times ND}

A small one is made whole. The attention of a ViT-B has a Jacobian of 151,296 x 151,296, 92 GB: there only
products with vectors are computed, and from them both ends of the spectrum by
:mod:`wellposed.linalg.lanczos`, and on demand the distribution of the rest.

A pre-norm branch without its skip has singular values of exactly zero: LayerNorm forgets the mean and the
length of every token. Its smallest value is then "at most" what the arithmetic can tell from zero.

>>> import timm, torch
>>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
>>> spectrum = jacobian_spectrum(model, torch.randn(1, 3, 32, 32), skip=True)
>>> spectrum.method, len(spectrum.singular_values), spectrum.kappa.status
('dense', 960, 'ok')
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from wellposed.interrupts import let_through, uninterrupted
from wellposed.linalg.lanczos import (
    ROUNDING,
    Ends,
    Estimates,
    OnStep,
    Product,
    extreme_singular_values,
    spectral_density,
)
from wellposed.linalg.precision import full_float32, without_autocast
from wellposed.nn.functional import Method as GrayMethod
from wellposed.probes.images import first_images
from wellposed.probes.jacobian_result import JacobianSpectrum, Method
from wellposed.probes.observe import plain
from wellposed.probes.subblock import SubBlock, sub_block
from wellposed.surgery.gray import gray_tokens


def jacobian_spectrum(
    model: nn.Module,
    images: object,
    *,
    block: int = 0,
    part: str = "attention",
    skip: bool = False,
    method: Method = "auto",
    k: int = 5,
    tolerance: float = 1e-2,
    max_steps: int = 300,
    ends: Ends = "both",
    density: bool = False,
    density_probes: int = 4,
    density_steps: int = 40,
    dtype: torch.dtype | None = None,
    dense_limit: int = 2048,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> JacobianSpectrum:
    """The spectrum of the Jacobian of one sub-block, at the first image.

    Args:
        images: whatever :func:`~wellposed.probes.images.image_batches` takes.
        block, part, skip: see :func:`~wellposed.probes.subblock.sub_block`.
        method: ``"auto"`` is dense up to ``dense_limit`` rows, and matrix-free beyond.
        k: how many values at each end.
        tolerance: the relative error up to which a value counts as known, else it is a bound.
        max_steps: of the matrix-free method, which stops before where all 2 k values are known; each costs
            a product with the Jacobian and one with its transpose.
        ends: ``"largest"`` stops as soon as the k largest are known, often after a tenth of the steps; of the
            smallest and of kappa there is a bound then.
        density: the distribution of the singular values too, of the matrix-free method; from
            ``density_probes`` random vectors with ``density_steps`` steps each.
        dtype: to compute in, the tokens too, float32 or float64. None is float64 for a dense one and for a
            model in float64, else float32.
        seed: of the random vectors, which leave the global generators alone.
        on_step: called with the number of steps done and the most there will be.
    """
    model = plain(model)
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}.")
    if ends not in get_args(Ends):
        raise ValueError(f"ends must be one of {', '.join(get_args(Ends))}, got {ends!r}.")
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"dtype must be float32 or float64, got {dtype}; a spectrum needs their digits.")
    if k < 1 or not tolerance > 0:
        raise ValueError(f"k and tolerance must be positive, got {k} and {tolerance}; 5 and 0.01 are usual.")

    def step(done: int, most: int) -> None:
        let_through()
        if on_step is not None:
            on_step(done, most)

    image = first_images(images, model, 1)
    cut = sub_block(model, image, block, part, skip=skip, dtype=dtype, widen=True)
    size = cut.input.numel()
    is_dense = method == "dense" or (method == "auto" and size <= dense_limit)
    if dtype is None:
        dtype = _default_dtype(cut.input, is_dense)
        if cut.input.dtype != dtype:
            cut = sub_block(model, image, block, part, skip=skip, dtype=dtype, widen=True)
    with (
        uninterrupted(),
        torch.inference_mode(False),
        torch.enable_grad(),
        without_autocast(cut.input),
        full_float32(),
    ):
        if is_dense:
            return _dense(cut, k, tolerance)
        apply, apply_adjoint = products(cut)
        shared: dict[str, Any] = {
            "dtype": dtype,
            "device": cut.input.device,
            "seed": seed,
            "on_step": step,
        }
        shown: dict[str, Any] = {"k": k, "tolerance": tolerance, "max_steps": max_steps, "ends": ends}
        lost = _constant_tokens(cut.input, k) if ends == "both" else None
        found = extreme_singular_values(apply, apply_adjoint, size, lost=lost, **shown, **shared)
        if density:
            shared |= {"probes": density_probes, "steps": density_steps, "known": [found.bidiagonal]}
            spread = spectral_density(apply, apply_adjoint, size, **shared)
    return _spectrum(
        cut,
        method="matrix-free",
        steps=found.steps,
        ends=ends,
        largest=found.largest,
        smallest=found.smallest,
        rounding=found.rounding,
        singular_values=None,
        density=spread if density else None,
    )


def _constant_tokens(x: Tensor, k: int) -> Tensor:
    """Directions (k or fewer, size) of one token, all channels alike: LayerNorm forgets them."""
    tokens, channels = math.prod(x.shape[:-1]), x.shape[-1]
    one = torch.eye(tokens, dtype=x.dtype, device=x.device)[:k, :, None]
    directions: Tensor = (one / channels**0.5).expand(-1, -1, channels).reshape(-1, x.numel())
    return directions


def _default_dtype(x: Tensor, is_dense: bool) -> torch.dtype:
    # Float64 costs little where the Jacobian is small; MPS has none.
    is_wide = x.dtype == torch.float64 or (is_dense and x.device.type != "mps")
    return torch.float64 if is_wide else torch.float32


def products(cut: SubBlock) -> tuple[Product, Product]:
    """J v and J^T u on flat vectors; the forward pass is done once for all of them.

    J v is the adjoint of u -> J^T u, which is linear, so its derivative at zero serves everywhere. That
    takes no forward mode, costs a third of it, and works for every operation with a second derivative.
    """
    output, pull = _pullback(cut.function, cut.input)
    _, push = _pullback(pull, torch.zeros_like(output))

    def apply(v: Tensor) -> Tensor:
        return push(v.reshape(cut.input.shape)).detach().reshape(-1)

    def apply_adjoint(u: Tensor) -> Tensor:
        return pull(u.reshape(output.shape)).detach().reshape(-1)

    return apply, apply_adjoint


def dense_jacobian(cut: SubBlock) -> Tensor:
    """J as a matrix, output by input."""
    output, pull = _pullback(cut.function, cut.input)
    units = torch.eye(output.numel(), dtype=output.dtype, device=output.device)
    # Row by row: vmap takes some backward passes (BatchNorm's) for others, without an error.
    return torch.stack([pull(unit.reshape(output.shape)).detach().reshape(-1) for unit in units])


def _pullback(function: Product, x: Tensor) -> tuple[Tensor, Product]:
    """function(x), and u -> J^T u there."""
    output, pull, *_ = torch.func.vjp(function, x)
    return output, lambda u: pull(u)[0]


def _dense(cut: SubBlock, k: int, tolerance: float) -> JacobianSpectrum:
    matrix = dense_jacobian(cut)
    s = torch.linalg.svdvals(matrix.cpu().double())
    rounding = ROUNDING * torch.finfo(matrix.dtype).eps * s[0].item()
    every = Estimates(s, (s - rounding).clamp(min=0), s + rounding, (s > 0) & (rounding <= tolerance * s))
    return _spectrum(
        cut,
        method="dense",
        steps=0,
        ends="both",
        largest=Estimates(*(column[:k] for column in every)),
        smallest=Estimates(*(column[-k:] for column in every)),
        rounding=rounding,
        singular_values=s,
        density=None,
    )


def _spectrum(cut: SubBlock, **found: Any) -> JacobianSpectrum:
    return JacobianSpectrum(
        block=cut.block,
        module=cut.name,
        part=cut.part,
        skip=cut.skip,
        size=cut.input.numel(),
        dtype=cut.input.dtype,
        **found,
    )


def graying_sweep(
    model: nn.Module,
    images: object,
    eps: Sequence[float] = (1.0, 0.9, 0.7, 0.5),
    *,
    gray_method: GrayMethod = "svd",
    where: Literal["embedding", "blocks"] = "embedding",
    block: int = 0,
    **options: Any,
) -> dict[float, JacobianSpectrum]:
    """The spectrum of one sub-block's Jacobian under Token Graying of several strengths.

    Figures 7 and 8 of Always Skip Attention. Each eps grays the tokens in a copy of the model and looks at
    the same sub-block there, with the weights as they are; :meth:`JacobianSpectrum.relative` compares the
    shapes.

    Args:
        eps: strengths in (0, 1]; 1 is the model as it is.
        gray_method: ``"svd"`` (Figure 7), ``"dct"`` (Figure 8) or ``"spectral"``.
        where: the patch embedding's output, or ``"blocks"`` for the input of ``block``. The first leaves
            the class token alone, which is short in many models: LayerNorm's slope there may set the
            largest value, and then the first block changes little.
        options: of :func:`jacobian_spectrum`.
    """
    if where not in ("embedding", "blocks"):
        raise ValueError(f"where must be embedding or blocks, got {where!r}.")
    if not eps:
        raise ValueError(
            "eps must name at least one strength, got none; (1.0, 0.9, 0.7, 0.5) is the default."
        )
    model = plain(model)
    image = first_images(images, model, 1)
    spectra = {}
    for strength in eps:
        grayed = copy.deepcopy(model)
        gray_tokens(grayed, strength, gray_method, where, blocks=block if where == "blocks" else None)
        spectra[float(strength)] = jacobian_spectrum(grayed, image, block=block, **options)
    return spectra
