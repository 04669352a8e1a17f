"""The table: what the library must know of a class, as data. One row is one class.

A row names the residual adds in the class's ``forward`` and the submodules at which a position of the
papers (``mlp.end``, ``attention.end``, ...) is reached. Runs write rows (:mod:`wellposed.anatomy.find`),
and the table below has what a run cannot tell, and what was taught. Its rows are found by the class's full
name, so that no optional library is imported to look one up.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, cast

from torch import Tensor, nn

from wellposed.anatomy.subclass import unmarked_class

Role = Literal["attention", "ffn", "mixer", "local", "parallel"]
"""What a skip goes around: attention, the channel MLP, token mixing without attention (an MLP over
tokens, a depthwise convolution), XCiT's local patch interaction, an attention and an FFN beside each other
under one skip."""

Layout = Literal["NLC", "LNC", "NHWC", "NCHW"]
"""How tokens lie in a tensor; LNC is the ``batch_first=False`` of PyTorch."""

HeadsAt = Literal["axis 1", "channels"]
"""Where a query (B, H, N, D/H) or (B, N, D) has its heads."""

Side = Literal["before", "after", "query"]
"""Of a submodule; ``query`` is inside ``nn.MultiheadAttention``."""

Position = Literal["block.start", "attention.end", "mlp.start", "mlp.middle", "mlp.end"]


@dataclass(frozen=True)
class Site:
    """Where an add stands.

    Args:
        path: of the module whose method it is, relative to the block.
        method: its name.
        number: of the add, among all in that method.
        skip_is_left: on which side of it the skip stands.
        digest: of the method's source.
    """

    path: str
    method: str
    number: int
    skip_is_left: bool
    digest: str


@dataclass(frozen=True)
class Add:
    """One residual add: a skip plus a branch.

    Args:
        role: what the skip goes around.
        skip: the variable that holds it, in the block's ``forward``.
        site: where a run found it; then ``skip`` is not looked at.
        order: 2 for the second of its role in a block, and so on.
    """

    role: Role
    skip: str = "x"
    site: Site | None = None
    order: int = 1

    @property
    def name(self) -> str:
        """Of its join, and of the positions around it: ``attention``, ``local``, ``local2``."""
        return self.role if self.order == 1 else f"{self.role}{self.order}"

    @property
    def path(self) -> str:
        """Of the module in whose method it stands."""
        return self.site.path if self.site else ""


@dataclass(frozen=True)
class Tap:
    """Before or after a submodule: where an operation on tokens can be put.

    ``paths`` are relative to the block ("" is the block itself). Several are alternatives: the first
    that exists counts. ``layout`` overrides the row's.
    """

    side: Side
    paths: tuple[str, ...]
    layout: Layout | None = None


def before(*paths: str, layout: Layout | None = None) -> Tap:
    return Tap("before", paths, layout)


def after(*paths: str, layout: Layout | None = None) -> Tap:
    return Tap("after", paths, layout)


_ITSELF_AFTER = after("")

Taps = tuple[tuple[Position, Tap | str], ...]
"""For each position its tap, or a sentence that says why the block has no such position."""


def taps(
    *,
    attention: Tap | str,
    mlp: str | tuple[Tap, Tap] = "mlp",
    last_linear: str | tuple[str, ...] = "mlp.fc2",
    start: Tap | str | None = None,
) -> Taps:
    """The usual taps of a block.

    Args:
        attention: a tap for ``attention.end``, or why there is none.
        mlp: the path of the MLP module, or its (before, after) taps where it is a ``Sequential``, to
            which no child can be added.
        last_linear: the MLP's last linear layer; ``mlp.middle`` is what goes into it.
        start: the tap for ``block.start``; None is the block's first argument.
    """
    mlp_start, mlp_end = (before(mlp), after(mlp)) if isinstance(mlp, str) else mlp
    middle = (last_linear,) if isinstance(last_linear, str) else last_linear
    return (
        ("block.start", before("") if start is None else start),
        ("attention.end", attention),
        ("mlp.start", mlp_start),
        ("mlp.middle", before(*middle)),
        ("mlp.end", mlp_end),
    )


def no_taps(reason: str) -> Taps:
    return (
        ("block.start", reason),
        ("attention.end", reason),
        ("mlp.start", reason),
        ("mlp.middle", reason),
        ("mlp.end", reason),
    )


@dataclass(frozen=True)
class BlockRow:
    """One block class.

    Args:
        family: what people call the models it belongs to.
        adds: the residual adds of ``forward``, in the order of the source.
        taps: see :func:`taps`.
        layout: of the tokens at the block's input, or a function of the block that tells.
        stream: which positional argument of ``forward`` carries the residual stream.
        substitutions: (expression, replacement) pairs of ``forward``'s source, each found once.
        unchained: roles whose skip is computed inside ``forward`` by more than a submodule, so that
            the chain check cannot follow it.
        no_token_attention: where the attention has no rows over tokens, a sentence that says why.
        refused: of a block that can be neither edited nor measured, a sentence that says why.
        causal: whether its tokens cannot look at those after them; None where that depends on its call, as in
            CLIP, whose text blocks are of the class of its image blocks.
        pieces: whether it sees each image in several pieces, (B P, N, D): no operation there reaches all
            tokens of an image.
    """

    family: str
    adds: tuple[Add, ...]
    taps: Taps
    layout: Layout | Callable[[nn.Module], Layout] = "NLC"
    stream: int = 0
    substitutions: tuple[tuple[str, str], ...] = ()
    unchained: tuple[Role, ...] = ()
    no_token_attention: str = ""
    refused: str = ""
    causal: bool | None = False
    pieces: bool = False

    def in_pieces(self, reason: str) -> "BlockRow":
        """The same block where it sees images in pieces, so that no operation can go in."""
        return replace(self, taps=no_taps(reason), pieces=True)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of the adds, each once, in order."""
        return tuple(dict.fromkeys(add.role for add in self.adds))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the joins, each once, in order: the roles, but for a second one of a role."""
        return tuple(dict.fromkeys(add.name for add in self.adds))

    def tap(self, position: Position) -> Tap | str:
        return dict(self.taps).get(position, f"its row names no {position}")

    def layout_of(self, block: nn.Module) -> Layout:
        return self.layout(block) if callable(self.layout) else self.layout


@dataclass(frozen=True)
class EmbeddingRow:
    """One class that makes tokens of images, or that holds the submodules which do.

    Args:
        family: what people call the models it belongs to.
        tokens: the tap at which the embedded patches come out, with its layout.
        patch_convolution: path of the convolution whose kernel is the patch; None where there is no
            such thing, and then ``no_pixels`` says why.
        layout: of the tokens there, or a function of the embedding module that tells.
    """

    family: str
    tokens: Tap = _ITSELF_AFTER
    patch_convolution: str | None = "proj"
    no_pixels: str = ""
    layout: Layout | Callable[[nn.Module], Layout] = "NLC"

    def layout_of(self, module: nn.Module) -> Layout:
        return self.layout(module) if callable(self.layout) else self.layout


def _always(attention: nn.Module) -> str:
    return ""


@dataclass(frozen=True)
class AttentionRow:
    """One attention class whose weights are softmax(q k^T scale), with nothing added to the logits.

    Args:
        query: paths of the submodule whose output is the query, the first that exists. Where several come
            after one another (a projection, then a norm) it is the last: what follows may rotate or scale
            the query, but add nothing to it.
        heads_at: where the heads lie in that output.
        heads: the attribute that tells their number.
        refuses: a sentence for modules of the class that have something on the logits; "" for the others.
    """

    query: tuple[str, ...]
    heads_at: HeadsAt = "channels"
    heads: str = "num_heads"
    refuses: Callable[[nn.Module], str] = _always


def to_tokens(x: Tensor, layout: Layout) -> Tensor:
    """(B, N, D) of a tensor in ``layout``. Three axes are tokens already, whatever a grid would be.

    More than four are a grid of several dimensions, as of videos, or windows of one image.

    Two are the tokens of one image, (N, D), whichever comes first in a batch.
    """
    if x.ndim >= 4:
        return x.flatten(2).mT if layout == "NCHW" else x.flatten(1, -2)
    return x.transpose(0, 1) if layout == "LNC" and x.ndim == 3 else x


def from_tokens(tokens: Tensor, like: Tensor, layout: Layout) -> Tensor:
    """Undo :func:`to_tokens`, to the shape of ``like``."""
    if like.ndim >= 4:
        return (tokens.mT if layout == "NCHW" else tokens).reshape(like.shape)
    return tokens.transpose(0, 1) if layout == "LNC" and like.ndim == 3 else tokens


# The table itself

_X_TWICE = (Add("attention"), Add("ffn"))


def _encoder_layer_layout(block: nn.Module) -> Layout:
    return "NLC" if cast(nn.MultiheadAttention, block.self_attn).batch_first else "LNC"


def _timm_patch_layout(embed: nn.Module) -> Layout:
    # timm flattens unless it was asked for another format (Swin, dynamic image size).
    return "NLC" if embed.flatten else cast(Layout, getattr(embed.output_fmt, "value", embed.output_fmt))


BLOCKS: dict[str, BlockRow] = {
    "torch.nn.modules.transformer.TransformerEncoderLayer": BlockRow(
        "torch.nn.TransformerEncoderLayer",
        _X_TWICE * 2,
        taps(
            attention=after("self_attn"),
            mlp=(before("linear1"), after("linear2")),
            last_linear="linear2",
        ),
        layout=_encoder_layer_layout,
        # The fused kernel of evaluation does both adds inside.
        substitutions=(("torch.backends.mha.get_fastpath_enabled()", "False"),),
    ),
}

EMBEDDINGS: dict[str, EmbeddingRow] = {
    # Many classes of models hold it, which would need a run each, and on the meta device there is none.
    "timm.layers.patch_embed.PatchEmbed": EmbeddingRow("timm", layout=_timm_patch_layout),
    # A run takes the norm that follows for a part of the embedding; the patches are what comes before it.
    "transformers.models.swin.modeling_swin.SwinPatchEmbeddings": EmbeddingRow(
        "transformers Swin", patch_convolution="projection"
    ),
}

ATTENTIONS: dict[str, AttentionRow] = {}
"""The attention classes whose query was taught; a run finds that of the others."""

_Row = TypeVar("_Row", BlockRow, EmbeddingRow)


def teach(cls: type[nn.Module], row: BlockRow | EmbeddingRow | AttentionRow) -> None:
    """Add one's own block class, patch embedding or attention to the table.

    .. code-block:: python

        from wellposed.anatomy import Add, BlockRow, after, taps, teach, verify

        # class MyBlock(nn.Module):
        #     def forward(self, x):
        #         x = x + self.mix(self.norm1(x))
        #         return x + self.ff(self.norm2(x))

        teach(MyBlock, BlockRow(
            family="mine",
            adds=(Add("attention", skip="x"), Add("ffn", skip="x")),  # in the order of the source
            taps=taps(attention=after("mix"), mlp="ff", last_linear="ff.out"),
        ))
        verify(model, images)  # are these the residual adds? raises if not
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"teach needs a subclass of nn.Module, got {cls!r}; pass the class, not a model.")
    if isinstance(row, BlockRow):
        BLOCKS[_full_name(cls)] = row
    elif isinstance(row, EmbeddingRow):
        EMBEDDINGS[_full_name(cls)] = row
    elif isinstance(row, AttentionRow):
        ATTENTIONS[_full_name(cls)] = row
    else:
        raise TypeError(
            f"teach needs a BlockRow, an EmbeddingRow or an AttentionRow, got {type(row).__name__}."
        )


def block_row(module: nn.Module) -> BlockRow | None:
    return _look_up(BLOCKS, module)


def embedding_row(module: nn.Module) -> EmbeddingRow | None:
    return _look_up(EMBEDDINGS, module)


def attention_row(module: nn.Module) -> AttentionRow | None:
    """The row of an attention that was taught.

    By the class itself: a subclass may put anything on the logits.
    """
    return ATTENTIONS.get(_full_name(unmarked_class(module)))


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _look_up(table: dict[str, _Row], module: nn.Module) -> _Row | None:
    # A subclass counts as its base; a forward of its own is checked when the seam is made.
    for cls in type(module).__mro__:
        row = table.get(_full_name(cls))
        if row is not None:
            return row
    return None
