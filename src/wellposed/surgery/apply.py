"""Inserting many operations at once: all of them or, where one place is taken, none."""

from collections.abc import Iterable

from torch import nn

from wellposed.anatomy.model import Block, Place
from wellposed.interrupts import uninterrupted
from wellposed.surgery.insertion import Inserted, insert, inserted_at
from wellposed.surgery.learned import follow_learned, refuse_replicated
from wellposed.surgery.padding import watch_padding, watch_patches
from wellposed.surgery.record import Edits
from wellposed.surgery.undo import edits


@uninterrupted()
def insert_all(
    model: nn.Module, insertions: list[tuple[Place, Inserted]], mixed: Iterable[Block] = ()
) -> Edits:
    """Insert every operation at its place and return what that touched.

    Args:
        mixed: the blocks in which one mixes tokens: they keep padding out of it.
    """
    for place, inserted in insertions:
        if (present := inserted_at(place)) is not None:
            raise ValueError(
                f"{place.name} already has {present.op} at {inserted.where}; the same edit twice is a "
                "mistake, wp.restore(model) undoes all edits."
            )
    refuse_replicated(model, [inserted for _, inserted in insertions])
    before = set(edits(model))
    for place, inserted in insertions:
        insert(place, inserted)
        if inserted.where == "embedding":
            watch_patches(model, place)
    for block in mixed:
        watch_padding(block)
    follow_learned(model, [inserted for _, inserted in insertions])
    now = edits(model)
    return Edits((edit for edit in now if edit not in before), now.blocks)
