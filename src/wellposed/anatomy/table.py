"""The table: what a run of a model cannot tell, and what it was taught.

PyTorch's encoder layer has a fused kernel in evaluation that does both adds inside, where no run sees them.
Patch embeddings are found by :mod:`wellposed.anatomy.places`, but for two.
"""

from typing import TypeVar, cast

from torch import nn

from wellposed.anatomy.proof import proofs
from wellposed.anatomy.rows import (
    Add,
    AttentionRow,
    BlockRow,
    EmbeddingRow,
    Layout,
    after,
    before,
    taps,
)
from wellposed.anatomy.subclass import unmarked_class
from wellposed.errors import UnknownModelError

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


def families() -> list[str]:
    """The families that are known without a run: those of the table, and those that were proven."""
    rows = [*BLOCKS.values(), *proofs().rows.values()]
    return sorted({row.family for row in rows if not row.refused})


GIVE_EXAMPLE = (
    "A model of one's own is run once to find its blocks: give an input as example=, such as\n"
    "    wp.remove_skips(model, example=torch.randn(1, 3, 224, 224))"
)


def unknown_model(model: nn.Module, seen: str) -> UnknownModelError:
    """The error for a model without a known block.

    Args:
        seen: what a run has shown instead, or how to make one.
    """
    cls = type(model)
    block = _repeated_class(model)
    twin = timm_twin(cls)
    return UnknownModelError(
        f"found no transformer block in {cls.__name__}.\n{seen}\n"
        + (f"{twin}\n" if twin else "")
        + f"Known without a run: {'; '.join(families())}.\n"
        + (f"The class to teach may be {block}, which is repeated in it.\n" if block else "")
        + "Teach it a class whose blocks a run does not show, with the adds of its forward in order:\n"
        "    from wellposed.anatomy import Add, BlockRow, after, taps, teach, verify\n"
        "    teach(MyBlock, BlockRow('mine', adds=(Add('attention', skip='x'), Add('ffn', skip='x')),\n"
        "                            taps=taps(attention=after('attn'), mlp='mlp', last_linear='mlp.fc2')))\n"
        "    verify(model, images)"
    )


def timm_twin(cls: type) -> str:
    """In words, what timm has of the same kind as a class of another library or one's own; empty if nothing.

    >>> class DinoVisionTransformer: pass
    >>> timm_twin(DinoVisionTransformer).partition(";")[0]
    'timm has models of this kind in timm.models.vision_transformer'
    """
    import timm  # this is for an error: nothing else here needs it

    library, *inside = cls.__module__.split(".")
    if library == "timm":
        return ""
    own = cls.__name__.casefold()
    homes = {
        name.casefold(): made.__module__.rpartition(".")[2]
        for name, made in vars(timm.models).items()
        if isinstance(made, type) and issubclass(made, nn.Module)
    }
    alike = [name for name in homes if own == name or (len(name) > 8 and own.endswith(name))]
    home = homes[max(alike, key=len)] if alike else None
    if home is None and library in ("transformers", "torchvision") and inside[1:]:
        there = timm.list_modules()
        home = next((m for m in there if m == inside[1] or m.startswith(f"{inside[1]}_")), None)
    names = [name for name in timm.list_models(module=home) if not name.startswith("test_")] if home else []
    if not names:
        return ""
    return f"timm has models of this kind in timm.models.{home}; try one, such as {min(names, key=len)}."


def _repeated_class(model: nn.Module) -> str:
    """The class of parts that are repeated most in lists of a model's modules; empty if there is none."""
    counts: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            for child in module:
                name, home = type(child).__name__, type(child).__module__
                if next(child.children(), None) is not None and not home.startswith("torch."):
                    counts[name] = counts.get(name, 0) + 1
    most = max(counts, key=lambda each: counts[each], default="")
    return most if counts.get(most, 0) > 1 else ""


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _look_up(table: dict[str, _Row], module: nn.Module) -> _Row | None:
    # A subclass counts as its base; a forward of its own is checked when the seam is made.
    for cls in type(module).__mro__:
        row = table.get(_full_name(cls))
        if row is not None:
            return row
    return None
