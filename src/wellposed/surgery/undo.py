"""What was changed in a model, read off the model itself, and taking it back.

Nothing is kept outside the model: a copy, a pickle or a model on another device knows its own edits.
"""

from torch import nn

from wellposed.anatomy.model import blocks, join_names, refuse_wrapped
from wellposed.anatomy.seam import close_seam, joins
from wellposed.anatomy.subclass import original
from wellposed.errors import UnknownModelError
from wellposed.interrupts import uninterrupted
from wellposed.surgery.insertion import Inserted, take_out
from wellposed.surgery.padding import forget_padding
from wellposed.surgery.record import Edit, Edits
from wellposed.surgery.weights import WeightEdit, take_off
from wellposed.surgery.wrappers import place_of


def edits(model: nn.Module) -> Edits:
    """Every edit of a model, in the order of its modules.

    Args:
        model: edited or not; compiled or wrapped too.

    Returns:
        One entry for each module that an edit touched.

    >>> import timm, wellposed as wp
    >>> print(wp.edits(timm.create_model("vit_tiny_patch16_224")))
    no edits
    """
    try:
        index_of = {block.name: block.index for block in blocks(model)}
        count: int | None = len(index_of)
    except UnknownModelError:
        index_of, count = {}, None

    def block_of(name: str) -> int | None:
        while name and name not in index_of:
            name = name.rpartition(".")[0]
        return index_of.get(name)

    found: list[Edit] = []
    for name, module in model.named_modules():
        for join in joins(module):
            if not join.keep:
                place = join_names(name, f"join_{join.name}")
                settings = {"allow_drop_path": join.allow_drop_path}
                found.append(Edit("remove_skips", join.role, block_of(name), place, settings=settings))
        if isinstance(module, Inserted) and (owner := place_of(name)) is not None:
            block, detail = block_of(owner), str(original(module.op))
            found.append(Edit(module.kind, module.where, block, owner, detail, module.settings))
        if isinstance(module, WeightEdit) and (owner := place_of(name)) is not None:
            found.append(
                Edit(module.kind, module.where, block_of(owner), owner, str(module), module.settings)
            )
    return Edits(found, count)


@uninterrupted()
def restore(model: nn.Module) -> Edits:
    """Undo every edit of a model, in place and bit for bit.

    The learned scales of CB_S go with it.

    Args:
        model: not compiled, sharded or replicated.

    Returns:
        What was undone.

    >>> import timm, wellposed as wp
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
    >>> _ = wp.broadcast_context(model)
    >>> len(wp.restore(model)), len(wp.edits(model))
    (1, 0)
    """
    refuse_wrapped(model)
    undone = edits(model)
    for module in list(model.modules()):
        take_out(module)
        take_off(module)
        forget_padding(module)
        close_seam(module)
    return undone
