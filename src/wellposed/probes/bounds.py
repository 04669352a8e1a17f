r"""Do the bounds of Always Skip Attention hold for a model's own weights and tokens, and by what margin?

Each record has a measured kappa and the bound of :mod:`wellposed.linalg.bounds`, which also says
where that is a theorem and where a rule of thumb. X is what goes into the layers: in a pre-norm block, the
tokens after the norm. As in the paper, C and the linear forms know no biases and no 1 / sqrt(D/H).

========================  ============================================================================
``kappa 4.1 linear``      X W_Q W_K^T X^T X W_V, for each head, and for all heads as one (head None)
``kappa 4.1 softmax``     P (X W_V + b_V) of a head, with the probabilities P that the model runs; head
                          None: what the attention branch adds
``kappa 4.2 linear``      X M + X with M = W_Q W_K^T X^T X W_V; of a head, M has the head's part of W_O
                          behind it and C a factor kappa(W_O)
``kappa 4.2 softmax``     what leaves the attention's skip, which carries the tokens before the
                          norm where the proposition has X
``kappa ffn linear``      X W_1 W_2; in a gated MLP, W_1 is the one that is not the gate
``kappa ffn``             what the MLP adds
``kappa convolution``     what ConvMixer's depthwise convolution adds, after activation and norm (eq. 24);
                          ``kappa convolution linear``: what it gives alone
========================  ============================================================================

In windows each window has its own X, and the sample of an image is the median over its windows. What a branch
adds is known for whole images, so it has the bound of all the image's tokens. Where keys and values come from
fewer tokens than queries (PVT), these count twice in the bound.

A margin is bound / measured. LayerNorm without a bias gives tokens whose (weighted) channels sum to zero: for
N >= D these have no full rank, kappa(X) and the bound are infinite, and the bound holds trivially.
"""

# Shapes: tokens (B, W, N, D), B images, W windows; kappas and bounds (B, W), or (B,) for whole images.

import contextlib
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from wellposed.anatomy.model import Block, BlockSelection, select
from wellposed.anatomy.seam import block_joins
from wellposed.errors import NoMeaningError
from wellposed.linalg.bounds import (
    SLACK,
    bound_attention,
    bound_attention_with_skip,
    bound_depthwise,
    bound_ffn,
    compare,
    depthwise_extremes,
    extremes,
    product_condition_number,
)
from wellposed.linalg.precision import in_float64, without_autocast
from wellposed.linalg.spectrum import ON_CPU, ConditionNumber, condition_number, estimator, tolerance
from wellposed.probes.attention_maps import no_attention, watching_attention
from wellposed.probes.conditioning import token_condition_number
from wellposed.probes.images import first_images
from wellposed.probes.observe import padding_of, plain, watching_tokens
from wellposed.probes.passes import Sample, forward_passes, median, summarize
from wellposed.probes.projections import (
    AttentionProjections,
    FeedForward,
    Map,
    attention_projections,
    depthwise_convolution,
    feed_forward,
    watching_inputs,
)
from wellposed.records import Record, dtype_name
from wellposed.surgery.uniform import uniform_heads_of

# The position of each measure, and which input its tokens are.
_ATTENTION = {
    "kappa 4.1 linear": ("attention.branch", "q"),
    "kappa 4.1 softmax": ("attention.branch", "q"),
    "kappa 4.2 linear": ("attention.sum", "q"),
    "kappa 4.2 softmax": ("attention.sum", "q"),
}
_FFN = {"kappa ffn linear": ("ffn.branch", "ffn"), "kappa ffn": ("ffn.branch", "ffn")}
_CONVOLUTION = {
    "kappa convolution linear": ("mixer.branch", "convolution"),
    "kappa convolution": ("mixer.branch", "convolution"),
}
_MEASURES = _ATTENTION | _FFN | _CONVOLUTION
_WATCHED = {position for position, _ in _MEASURES.values()}

_MASKED = "the propositions are of attention that sees all tokens, and here a mask hides some"
_RESHAPED = (
    "its queries, keys or values are pooled or cut into windows after their projection, so that it attends "
    "among other tokens than those that were projected"
)
_TOGETHER = "its attention and its FFN are added as one, and the propositions are of each alone"
_OTHER_VALUES = "what its probabilities weigh are not the outputs of its value projection, head by head"
_PADDED = "the tokens of its texts are not all their own; give texts of one length, without padding"

_Layers = TypeVar("_Layers")


def bounds(
    model: nn.Module,
    images: object,
    *,
    images_limit: int = 4,
    blocks: BlockSelection = None,
    strict: bool = True,
) -> list[Record]:
    """Measured kappa compared with its bound for the attention, MLP and depthwise convolution of each block.

    Takes two float64 SVDs for each image, block and head: choose some blocks of a large model.

    Args:
        model: a model that :func:`wellposed.anatomy.blocks` knows; left as it was.
        images: see :func:`wellposed.probes.images.image_batches`.
        images_limit: from how many images, the first ones.
        blocks: an index, a slice or several indices; None for all.
        strict: whether it is an error that no block has anything to measure.

    Returns:
        A record for each measure of the table above, block and head, with ``bound``, ``verdicts`` and
        ``margins``; ``not measured`` with the reason where a proposition does not apply.

    >>> import timm, torch
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    >>> found = bounds(model, torch.randn(1, 3, 32, 32))
    >>> [(r.measure, r.verdicts) for r in found if r.head is None][-1]
    ('kappa ffn', (1, 0, 0, 0))
    """
    if images_limit < 1:
        raise ValueError(f"images_limit must be at least 1, got {images_limit}; a bound is for some tokens.")
    batch = first_images(images, plain(model), images_limit)
    return forward_passes(model, [batch], lambda found: [BoundsProbe(select(found, blocks), strict)])


class BoundsProbe:
    """Sees the first forward pass, all its images; see the module for what it measures."""

    def __init__(self, found: list[Block], strict: bool = True) -> None:
        self.strict = strict
        self._of = {block.index: _BlockBounds(block) for block in found}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        each = self._of.values()
        attending = [one.block for one in each if isinstance(one.attention, AttentionProjections)]
        with (
            watching_tokens([one.block for one in each], self._see_tokens),
            watching_inputs([(one.block, one.sources()) for one in each], self._see_input),
            watching_attention(attending, self._see_attention, sys.maxsize) as self._watch,
        ):
            yield

    def _see_tokens(self, block: Block, position: str, tokens: Tensor) -> None:
        if padding_of(block, tokens) is not None:
            self._of[block.index].is_padded = True
        self._of[block.index].images = self._of[block.index].images or len(tokens)
        if position in _WATCHED:
            self._of[block.index].see_position(position, tokens)

    def _see_input(self, block: Block, kind: str, tokens: Tensor) -> None:
        # The attention watch calls nn.MultiheadAttention again: the first call is the model's own.
        self._of[block.index].inputs.setdefault(kind, tokens)

    def _see_attention(self, block: Block, p: Tensor) -> None:
        keys = self._watch.rows.keys
        if keys is not None and bool((keys < p.shape[-1]).any()):
            self._of[block.index].is_masked = True
        if not self._watch.source.tells_heads:
            self._of[block.index].attention = "its heads and windows lie on one axis and cannot be told apart"
        elif self._watch.source.order == 0:
            self._of[block.index].see_attention(p, self._watch.values)

    def records(self) -> list[Record]:
        records: list[Record] = []
        for one in self._of.values():
            with without_autocast(next(iter(one.inputs.values()), torch.empty(0))):
                records += one.records()
        is_padded = any(one.is_padded or one.is_masked for one in self._of.values())
        if self.strict and not is_padded and not any(record.value is not None for record in records):
            reasons = dict.fromkeys(f"{record.module}: {record.note}" for record in records)
            names = ", ".join(one.block.name for one in self._of.values())
            raise NoMeaningError(
                "expected a block with attention over tokens, an MLP or a depthwise convolution, got none in "
                f"{names} ({'; '.join(reasons) or 'they have neither'}); choose others with blocks=.",
                tuple(dict.fromkeys(record.note for record in records)),
            )
        return records


@dataclass
class _BlockBounds:
    """What one block has and what it showed. A string in place of layers says why there are none."""

    block: Block
    images: int = 0
    inputs: dict[str, Tensor] = field(default_factory=dict)  # (B W, N, D)
    heads: list[ConditionNumber] = field(default_factory=list)  # (images, W, H) each
    positions: dict[str, tuple[ConditionNumber, str, str]] = field(default_factory=dict)
    is_padded: bool = False
    is_masked: bool = False

    def __post_init__(self) -> None:
        block, roles = self.block, self.block.row.roles
        self.attention: AttentionProjections | str | None = None
        self.ffn: FeedForward | str | None = None
        if "attention" in roles:
            reason = no_attention(block) or _uniform(block)
            self.attention = reason or _or_reason(attention_projections, block)
        if "ffn" in roles:
            self.ffn = _or_reason(feed_forward, block)
        if "parallel" in roles:
            self.attention = self.ffn = _TOGETHER
        self.convolution = depthwise_convolution(block)

    def sources(self) -> dict[str, Tensor]:
        """The weights whose inputs to watch."""
        sources = dict(self.attention.sources) if isinstance(self.attention, AttentionProjections) else {}
        if isinstance(self.ffn, FeedForward):
            sources["ffn"] = self.ffn.source
        if isinstance(self.convolution, nn.Conv2d):
            sources["convolution"] = self.convolution.weight
        return sources

    def see_position(self, position: str, tokens: Tensor) -> None:
        if position not in self.positions:
            dtype = dtype_name(tokens.dtype)
            self.positions[position] = token_condition_number(tokens), estimator(tokens), dtype

    def see_attention(self, p: Tensor, values: Tensor | None) -> None:
        """Kappa of P V (images, W, H) at once: the probabilities of all blocks would fill the memory."""
        if not isinstance(self.attention, AttentionProjections) or self.is_masked:
            return
        images, windows, heads = p.shape[:3]
        if reason := self._not_of_its_tokens(windows, heads, p.shape[-2:]):
            self.attention = reason
            return
        before = sum(len(part.kappa) for part in self.heads)
        inputs = self.inputs["v"][before * windows : (before + images) * windows]
        if not len(inputs):  # a second forward pass
            return
        with without_autocast(p):
            v = self.attention.v(in_float64(inputs))
            v = v.reshape(images, windows, v.shape[-2], heads, -1).transpose(2, 3)
            if values is not None and not _is_nearly(v, values):
                self.attention = _OTHER_VALUES
                return
            self.heads.append(condition_number(in_float64(p) @ v))

    def _not_of_its_tokens(self, windows: int, heads: int, rows_and_keys: tuple[int, ...]) -> str:
        """Bring what was projected to the windows (B W, N, D) that attend, or say why that cannot be."""
        assert isinstance(self.attention, AttentionProjections)
        if heads != self.attention.heads:
            return f"it attends with {heads} heads where its module says {self.attention.heads}"
        for letter, count in zip("qkv", (*rows_and_keys, rows_and_keys[-1]), strict=True):
            if letter not in self.inputs:
                return "the model did not run its projections, or not through its layers' weights"
            cut = _in_windows(self.inputs[letter], self.images, windows, count)
            if cut is None:
                return _RESHAPED
            self.inputs[letter] = cut
        same = torch.equal(*(self.inputs[letter].nan_to_num() for letter in "kv"))
        return "" if same else "its keys and its values are made of different tokens"

    def records(self) -> Iterator[Record]:
        for layers, measures, make in (
            (self.attention, _ATTENTION, self._attention_records),
            (self.ffn, _FFN, self._ffn_records),
            (self.convolution, _CONVOLUTION, self._convolution_records),
        ):
            if layers is None:
                continue
            if self.is_padded:
                yield from (self._missing(measure, _PADDED) for measure in measures)
            elif measures is _ATTENTION and self.is_masked:
                yield from (self._missing(measure, _MASKED) for measure in measures)
            elif reason := layers if isinstance(layers, str) else self._unseen(measures):
                yield from (self._missing(measure, reason) for measure in measures)
            else:
                yield from make()

    def _attention_records(self) -> Iterator[Record]:
        layers = self.attention
        assert isinstance(layers, AttentionProjections)
        queries, keys = self._windows("q"), self._windows("k")
        tokens, key_tokens = extremes(queries), extremes(keys)
        remark = f"{queries.shape[1]} windows an image" if queries.shape[1] > 1 else ""
        for head in (None, *range(layers.heads)):
            q, k, v, out = layers.of(head)
            C, norm = _of_weights(q, k, v)
            norm = norm * tokens.largest * key_tokens.largest**2
            attended = (queries @ q.W) @ ((keys @ k.W).mT @ (keys @ v.W))
            bound = bound_attention(C, *tokens, keys=key_tokens)
            yield self._linear("kappa 4.1 linear", attended, norm, bound, remark, head)
            if head is None:
                yield from self._attention_positions(C, queries.flatten(1, 2), keys.flatten(1, 2), remark)
            else:
                yield self._softmax_of_head(head, bound, remark, layers.remark)
                C_out, norm_out = _of_weights(out)
                attended, C, norm = attended @ out.W, C * C_out, norm * norm_out
            if attended.shape != queries.shape:
                yield self._missing("kappa 4.2 linear", "the heads together do not have the tokens' width")
                continue
            bound = bound_attention_with_skip(C, *tokens, keys=key_tokens)
            norm = norm + tokens.largest
            yield self._linear("kappa 4.2 linear", attended + queries, norm, bound, remark, head)

    def _attention_positions(self, C: Tensor, queries: Tensor, keys: Tensor, remark: str) -> Iterator[Record]:
        tokens, key_tokens = extremes(queries), extremes(keys)
        remark = f"{remark}, the bound is of all its tokens" if remark else ""
        yield self._position("kappa 4.1 softmax", bound_attention(C, *tokens, keys=key_tokens), remark)
        if all(
            join.keep for join in block_joins(self.block.module, self.block.row) if join.role == "attention"
        ):
            bound = bound_attention_with_skip(C, *tokens, keys=key_tokens)
            yield self._position("kappa 4.2 softmax", bound, remark)
        else:
            yield self._missing("kappa 4.2 softmax", "its attention skip is removed")

    def _softmax_of_head(self, head: int, bound: Tensor, *remarks: str) -> Record:
        parts = [(part.kappa[..., head], part.at_least[..., head]) for part in self.heads]
        measured = ConditionNumber(*(torch.cat(part) for part in zip(*parts, strict=True)))
        where = replace(self._where("kappa 4.1 softmax", estimator(bound), head), tolerance=tolerance(bound))
        return _compared(where, measured, bound, "; ".join(filter(None, remarks)))

    def _ffn_records(self) -> Iterator[Record]:
        layers = self.ffn
        assert isinstance(layers, FeedForward)
        x = in_float64(self.inputs["ffn"])
        x = x if len(x) == self.images else x.reshape(self.images, -1, x.shape[-1])
        tokens, first, last = extremes(x), extremes(layers.first.W), extremes(layers.last.W)
        bound = bound_ffn(first.kappa, last.kappa, tokens.kappa)
        norm = tokens.largest * first.largest * last.largest
        product = x @ layers.first.W @ layers.last.W
        yield self._linear("kappa ffn linear", product, norm, bound, layers.remark)
        yield self._position("kappa ffn", bound, layers.remark)

    def _convolution_records(self) -> Iterator[Record]:
        layer = self.convolution
        assert isinstance(layer, nn.Conv2d)
        kernels, image = in_float64(layer.weight), in_float64(self.inputs["convolution"])
        grid, dilation = (image.shape[-2], image.shape[-1]), (layer.dilation[0], layer.dilation[1])
        convolution, how = depthwise_extremes(kernels[:, 0], grid, dilation=dilation)
        tokens = extremes(image.flatten(2).mT)
        bound = bound_depthwise(convolution.kappa, tokens.kappa)
        out = nn.functional.conv2d(image, kernels, padding="same", dilation=dilation, groups=layer.groups)
        norm = tokens.largest * kernels.abs().sum((-3, -2, -1)).max()
        remark = f"kappa(W_CD) by the {how}"
        yield self._linear("kappa convolution linear", out.flatten(2).mT, norm, bound, remark)
        yield self._position("kappa convolution", bound, remark)

    def _windows(self, letter: str) -> Tensor:
        """(B, W, N, D)."""
        x = in_float64(self.inputs[letter])
        return x.reshape(self.images, -1, *x.shape[-2:])

    def _unseen(self, measures: dict[str, tuple[str, str]]) -> str:
        position, kind = next(iter(measures.values()))
        tokens = self.inputs.get(kind)
        if tokens is None or position not in self.positions:
            return "the model did not run it, or not through its layers' weights"
        one_token = kind != "convolution" and tokens.shape[-2] == 1
        return "it has the class token alone, and kappa of one token is 1" if one_token else ""

    def _where(self, measure: str, estimator: str = "", head: int | None = None) -> Record:
        position, kind = _MEASURES[measure]
        return Record(
            measure=measure,
            value=None,
            block=self.block.index,
            module=self.block.name,
            position=position,
            head=head,
            images=self.images,
            estimator=estimator,
            dtype=dtype_name(self.inputs[kind].dtype) if kind in self.inputs else "",
        )

    def _missing(self, measure: str, reason: str) -> Record:
        return replace(self._where(measure), status="not measured", note=reason)

    def _linear(
        self, measure: str, product: Tensor, norm: Tensor, bound: Tensor, remark: str, head: int | None = None
    ) -> Record:
        where = replace(self._where(measure, ON_CPU, head), tolerance=SLACK)
        return _compared(where, product_condition_number(product, norm), bound, remark)

    def _position(self, measure: str, bound: Tensor, remark: str) -> Record:
        measured, how, dtype = self.positions[_MEASURES[measure][0]]
        where = replace(self._where(measure, how), dtype=dtype, tolerance=tolerance(measured.kappa))
        return _compared(where, measured, bound.to(measured.kappa.device), remark)


def _uniform(block: Block) -> str:
    heads = ", ".join(map(str, uniform_heads_of(block)))
    return f"the propositions are of learned attention, but heads {heads} are uniform" if heads else ""


def _is_nearly(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same up to half precision, where both are finite."""
    if a.shape != b.shape:
        return False
    b = in_float64(b)
    difference = torch.where(a.isfinite() & b.isfinite(), a - b, 0)
    return bool(difference.norm() <= 0.03 * b.nan_to_num(posinf=0, neginf=0).norm())


def _in_windows(x: Tensor, images: int, windows: int, tokens: int) -> Tensor | None:
    """(B W, tokens, D) of a tensor with these on axes of their own; None where that would mix windows."""
    if windows == 1 and x.shape[:-1] == (1, images * tokens):  # all images below one another
        return x.reshape(images, tokens, -1)
    for behind in range(1, x.ndim):
        if (math.prod(x.shape[:behind]), math.prod(x.shape[behind:-1])) == (images * windows, tokens):
            return x.reshape(images * windows, tokens, x.shape[-1])
    return None


def _or_reason(find: Callable[[Block], _Layers], block: Block) -> _Layers | str:
    try:
        return find(block)
    except ValueError as error:
        return str(error)


def _of_weights(*layers: Map) -> tuple[Tensor, Tensor]:
    """The product of their kappas, and of their norms."""
    values = [extremes(layer.W) for layer in layers]
    kappas, norms = zip(*((one.kappa, one.largest) for one in values), strict=True)
    return torch.stack(kappas).prod(), torch.stack(norms).prod()


def _compared(where: Record, measured: ConditionNumber, bound: Tensor, remark: str) -> Record:
    """The record of kappas (B, W) or (B,) compared with bounds of the same shape."""
    comparison = compare(measured, bound)
    # The windows of an image first, then the images.
    windows = [
        Sample(*of_image) for of_image in zip(*(x.reshape(len(x), -1).cpu() for x in measured), strict=True)
    ]
    medians = [median(sample) for sample in windows]
    kappas = torch.tensor([kappa for kappa, _ in medians], dtype=torch.float64)
    known = asdict(where) | {"note": "; ".join(filter(None, (str(comparison), remark)))}
    for name in ("value", "low", "high", "status", "samples", "at_least", "images", "measure"):
        del known[name]
    record = summarize(where.measure, Sample(kappas, torch.tensor([flag for _, flag in medians])), **known)
    limit = statistics.median(bound.flatten().tolist())
    margins = (comparison.margin, comparison.smallest)
    return replace(
        record,
        bound=limit if math.isfinite(limit) else None,
        verdicts=comparison.counts,
        margins=tuple(margin for margin in margins if margin is not None),
    )
