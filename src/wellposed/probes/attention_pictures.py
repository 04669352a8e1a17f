"""What attention looks at, as pictures over the first image: of each block and head, and rolled out.

A picture holds the weights that one query gives the patches, as a grid. The query is the class token; where a
model has no prefix tokens, the mean over all queries. Attention rollout (arXiv 2005.00928) is that of the
product of (A + I) / 2 over the blocks, the first one on the right, with A the mean over the heads.

>>> import timm, torch
>>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
>>> [(r.measure, r.head, r.shape) for r in attention_pictures(model, torch.randn(1, 3, 224, 224))][:3]
[('image', None, (56, 56)), ('attention picture', None, (14, 14)), ('attention picture', 0, (14, 14))]
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wellposed.anatomy.model import Block, BlockSelection, select
from wellposed.probes.attention_maps import no_attention, watching_attention
from wellposed.probes.density import ABSOLUTE_ERROR
from wellposed.probes.images import first_image
from wellposed.probes.observe import plain
from wellposed.probes.passes import Probe, forward_passes, place_of
from wellposed.records import Record, dtype_name, not_measured

MOST_PREFIX = 5
"""Tokens that may come before those of the patches, a class token and four registers, where the model does
not say how many they are (as timm's ``num_prefix_tokens``)."""

_SIDE = 56  # of the image that is kept, at most


def attention_pictures(model: nn.Module, images: object, *, blocks: BlockSelection = None) -> list[Record]:
    """Pictures of the attention of the blocks and their heads over the first image.

    Args:
        model: a model that :func:`wellposed.anatomy.blocks` knows; left as it was.
        images: see :func:`wellposed.probes.images.image_batches`; the first one is shown.
        blocks: an index, a slice, several indices, or None for all; rollout is of all.

    Returns:
        ``"image"``, the image in grey; ``"attention picture"`` of each block, of the mean over the heads and
        of each head; ``"attention rollout"`` of the model. Their ``curve`` has the values row by row, their
        ``shape`` is that of the grid. Blocks whose attention has no picture (windows, pooled keys, other
        tokens) are ``not measured``.

    >>> import timm, torch
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    >>> [record.shape for record in attention_pictures(model, torch.randn(1, 3, 32, 32), blocks=0)][:2]
    [(32, 32), (2, 2)]
    """
    model = plain(model)
    image = first_image(images, model)
    if not isinstance(image, Tensor) or image.ndim != 4:
        got = f"a tensor {tuple(image.shape)}" if isinstance(image, Tensor) else "named inputs"
        raise ValueError(f"expected an image (1, C, H, W) to picture attention over, got {got}.")
    size = (image.shape[-2], image.shape[-1])
    prefix = getattr(model, "num_prefix_tokens", None)

    def make(found: list[Block]) -> list[Probe]:
        return [_Pictures(found, size, prefix, {block.index for block in select(found, blocks)})]

    return [_grey(image), *forward_passes(model, [image], make)]


class _Pictures:
    """Keeps what each block's first attention gives the patches of an image of so many pixels."""

    def __init__(
        self, found: list[Block], size: tuple[int, int], prefix: int | None, wanted: set[int]
    ) -> None:
        if all(map(no_attention, found)):
            raise ValueError(f"expected a block with attention over tokens: {no_attention(found[0])}.")
        self.found, self.size, self.prefix, self.wanted = found, size, prefix, wanted
        self._maps: dict[int, Tensor] = {}  # (H, N, M) each
        self._made: dict[int, dict[str, Any]] = {}
        self._reasons: dict[int, str] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with watching_attention(self.found, self._see, 1, strict=False) as self._watch:
            yield

    def _see(self, block: Block, p: Tensor) -> None:
        source = self._watch.source
        if source.order:
            return
        if p.shape[1] > 1:
            self._reasons[block.index] = "its attention is in windows, each of which sees a part of the image"
        elif p.shape[-2] != p.shape[-1] or grid_of(p.shape[-1], self.size, self.prefix) is None:
            shape = f"{p.shape[-2]} queries and {p.shape[-1]} keys"
            self._reasons[block.index] = f"{shape} are no patches of {self.size[0]} x {self.size[1]} pixels"
        else:
            self._maps[block.index] = p[0, 0].double().cpu()
            # Weights are about 1 / N.
            tolerance = ABSOLUTE_ERROR * p.shape[-1]
            made = {"estimator": source.estimator, "dtype": dtype_name(source.dtype), "tolerance": tolerance}
            self._made[block.index] = made

    def records(self) -> list[Record]:
        out = []
        for block in self.found:
            where = place_of(block, "attention")
            if block.index in self.wanted and block.index in self._maps:
                heads = self._maps[block.index]
                made = where | self._made[block.index]
                out.append(self._record("attention picture", heads.mean(0), **made))
                for head, p in enumerate(heads):
                    out.append(self._record("attention picture", p, head=head, **made))
            elif block.index in self.wanted:
                why = no_attention(block) or self._reasons.get(block.index, "it showed no softmax attention")
                out.append(not_measured("attention picture", why, **where))
        if maps := [self._maps[index] for index in sorted(self._maps)]:
            alike = [p for p in maps if p.shape[-1] == maps[0].shape[-1]]
            note = f"through {len(alike)} of {len(self.found)} blocks"
            made = self._made[min(self._maps)]
            out.append(self._record("attention rollout", rollout(alike), note=note, **made))
        return out

    def _record(self, measure: str, p: Tensor, *, note: str = "", **where: Any) -> Record:
        grid = grid_of(p.shape[-1], self.size, self.prefix)
        assert grid is not None
        prefix = p.shape[-1] - grid[0] * grid[1]
        row = p[0] if prefix else p.mean(0)
        said = "of the class token" if prefix else "mean over the queries"
        curve = tuple(float(f"{weight:.4g}") for weight in row[prefix:].tolist())
        note = "; ".join(filter(None, (said, note)))
        return Record(measure=measure, value=None, curve=curve, shape=grid, images=1, note=note, **where)


def rollout(maps: list[Tensor]) -> Tensor:
    """The product of (A + I) / 2 over blocks, A (N, N) the mean over the heads of (H, N, N)."""
    through = torch.eye(maps[0].shape[-1], dtype=torch.float64)
    for heads in maps:
        through = (heads.mean(0) + torch.eye(heads.shape[-1], dtype=heads.dtype)) / 2 @ through
    return through


def grid_of(tokens: int, size: tuple[int, int], prefix: int | None = None) -> tuple[int, int] | None:
    """Rows and columns of the square patches of an image; the tokens before them are prefix tokens.

    None where there is no such grid. ``prefix`` is their number, None if it is not known.

    >>> grid_of(197, (224, 224)), grid_of(8 * 6, (128, 96)), grid_of(100, (224, 224))
    ((14, 14), (8, 6), None)
    """
    height, width = size
    for side in range(1, math.gcd(height, width) + 1):
        before = tokens - (height // side) * (width // side)
        fits = 0 <= before <= MOST_PREFIX if prefix is None else before == prefix
        if fits and height % side == width % side == 0:
            return height // side, width // side
    return None


def _grey(image: Tensor) -> Record:
    """The image in grey, small, between 0 and 1."""
    grey = image.detach().double().mean(1, keepdim=True).cpu()
    height, width = grey.shape[-2:]
    scale = max(height, width) / _SIDE
    shape = (height, width) if scale <= 1 else (max(round(height / scale), 1), max(round(width / scale), 1))
    small = functional.adaptive_avg_pool2d(grey, shape)[0, 0]
    low, high = small.aminmax()
    relative = (small - low) / (high - low).clamp(min=torch.finfo(torch.float64).tiny)
    return Record(
        measure="image",
        value=None,
        curve=tuple(round(value, 3) for value in relative.flatten().tolist()),
        shape=shape,
        images=1,
        note="mean of the channels, from darkest to brightest",
        estimator="mean over squares of pixels",
        dtype=dtype_name(image.dtype),
        tolerance=1e-3,
    )
