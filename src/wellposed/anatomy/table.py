"""Looking a class up in the table, and teaching it a new one."""

from typing import TypeVar

from torch import nn

from wellposed.anatomy.attentions import ATTENTIONS
from wellposed.anatomy.families import BLOCKS, EMBEDDINGS
from wellposed.anatomy.marked import unmarked_class
from wellposed.anatomy.proof import proofs
from wellposed.anatomy.rows import AttentionRow, BlockRow, EmbeddingRow
from wellposed.errors import UnknownModelError

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


def attention_row(module: nn.Module) -> AttentionRow | str | None:
    """The row of an attention, or why it can have none; None of a class that the table does not know.

    By the class itself: a subclass may put anything on the logits.
    """
    return ATTENTIONS.get(_full_name(unmarked_class(module)))


def families() -> list[str]:
    """The families that are known without a run: those of the table, and those that were proven."""
    rows = [*BLOCKS.values(), *proofs().rows.values()]
    return list(dict.fromkeys(row.family for row in rows if not row.refused))


def unknown_model(model: nn.Module, trouble: str = "") -> UnknownModelError:
    """The error for a model without a known block."""
    name = type(model).__name__
    return UnknownModelError(
        f"found no transformer block in {name}.\n"
        + (f"{trouble}\n" if trouble else "")
        + "A model of one's own is run once to find its blocks: give an input as example=, such as\n"
        "    wp.remove_skips(model, example=torch.randn(1, 3, 224, 224))\n"
        f"Known without a run: {'; '.join(families())}.\n"
        "Teach it a class whose blocks a run does not show, with the adds of its forward in order:\n"
        "    from wellposed.anatomy import Add, BlockRow, after, taps, teach, verify\n"
        "    teach(MyBlock, BlockRow('mine', adds=(Add('attention', skip='x'), Add('ffn', skip='x')),\n"
        "                            taps=taps(attention=after('attn'), mlp='mlp', last_linear='mlp.fc2')))\n"
        "    verify(model, images)"
    )


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _look_up(table: dict[str, _Row], module: nn.Module) -> _Row | None:
    # A subclass counts as its base; a forward of its own is checked when the seam is made.
    for cls in type(module).__mro__:
        row = table.get(_full_name(cls))
        if row is not None:
            return row
    return None
