"""Which part of a model each of its parameters belongs to: a block, a block's attention or FFN, the rest.

A block owns what its module holds. Inside a block the graph that autograd records shows the parts,
whatever the family calls its modules: a parameter belongs to the first branch that it has a say in, and one
that acts on the stream itself (the norm after an add) belongs to the branch added before it.

>>> import timm, torch
>>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
>>> for group in parameter_groups(model, torch.randn(1, 3, 32, 32), "parts"):
...     print(group.name, len(group.parameters))
block 0 attention 6
block 0 ffn 6
block 1 attention 6
block 1 ffn 6
rest 8
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from wellposed.anatomy.model import Block, blocks
from wellposed.anatomy.seam import Join, block_joins
from wellposed.interrupts import uninterrupted
from wellposed.probes.images import Batch
from wellposed.probes.named_inputs import run
from wellposed.probes.observe import observed, plain, removing

GroupBy = Literal["model", "blocks", "parts"]


@dataclass(frozen=True)
class ParameterGroup:
    """Some parameters of a model.

    Args:
        name: ``"model"``, ``"block 3"``, ``"block 3 attention"``, ``"rest"``.
        parameters: their names, as ``model.named_parameters()`` has them.
        block: index of the block; None for the whole model and for the rest.
        module: name of the block's module.
        part: a role of the block, ``"rest"``, or nothing for a whole block or model.
    """

    name: str
    parameters: tuple[str, ...]
    block: int | None = None
    module: str = ""
    part: str = ""


def parameter_groups(model: nn.Module, image: Batch, by: GroupBy) -> list[ParameterGroup]:
    """The trainable parameters of a model in disjoint groups that hold them all.

    Args:
        image: a batch of one image, or what else the model takes; ``"parts"`` runs the model on it once.
        by: ``"model"``, one group. ``"blocks"``, one a block, and ``"rest"`` for what belongs to no block
            (embedding, head, norms between blocks) or is shared by several. ``"parts"``, the same with a
            group for each role of a block.
    """
    model = plain(model)
    if by not in get_args(GroupBy):
        raise ValueError(f"groups must be one of {', '.join(get_args(GroupBy))}, got {by!r}.")
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError(
            f"every parameter of {type(model).__name__} is frozen, expected some with requires_grad=True; "
            "model.requires_grad_() unfreezes them."
        )
    if by == "model":
        return [ParameterGroup("model", tuple(trainable))]

    found = blocks(model)
    owned = _owned_parameters(trainable, found)
    part_of: dict[str, str] = _parts(model, image, trainable, owned) if by == "parts" else {}
    groups = []
    for block in found:
        parts: tuple[str, ...] = block.row.names if by == "parts" else ("",)
        for part in parts:
            names = tuple(name for name in owned[block.index] if part_of.get(name, "") == part)
            label = f"block {block.index} {part}".rstrip()
            groups.append(ParameterGroup(label, names, block.index, block.name, part))
    placed = {name for names in owned.values() for name in names}
    rest = tuple(name for name in trainable if name not in placed)
    groups.append(ParameterGroup("rest", rest, part="rest"))
    return [group for group in groups if group.parameters]


def _owned_parameters(trainable: dict[str, nn.Parameter], found: list[Block]) -> dict[int, list[str]]:
    """For each block the names of the parameters that it alone holds."""
    # By identity: a tied parameter has another name in each place.
    owners: dict[int, list[int]] = {}
    for block in found:
        for parameter in block.module.parameters():
            owners.setdefault(id(parameter), []).append(block.index)
    return {
        block.index: [name for name, p in trainable.items() if owners.get(id(p)) == [block.index]]
        for block in found
    }


def _parts(
    model: nn.Module, image: Batch, trainable: dict[str, nn.Parameter], owned: dict[int, list[str]]
) -> dict[str, str]:
    """The part of every parameter that a block owns."""
    walk = _Walk(trainable)
    parts: dict[str, str] = {}
    handles: list[Any] = []
    with (
        uninterrupted(),
        observed(model) as found,
        torch.inference_mode(False),
        torch.enable_grad(),
        removing(handles),
    ):
        for block in found:
            hooks = _BlockHooks(block, owned[block.index], walk, parts)
            handles.append(block.module.register_forward_hook(hooks.end))
            handles += [
                join.register_forward_hook(hooks.join) for join in block_joins(block.module, block.row)
            ]
        run(model, image)
    for block in found:
        for name in owned[block.index]:
            parts.setdefault(name, block.row.names[-1])  # no say in the output: it adds nothing anywhere
    return parts


class _Walk:
    """Goes back through the graph of autograd, to each node once."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.names = {get_gradient_edge(p).node: name for name, p in parameters.items()}
        self.seen: set[Any] = set()

    def new(self, value: Any) -> list[str]:
        """The parameters that had a say in the tensors of ``value``, but in none asked for before."""
        tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.requires_grad]
        found = []
        stack: list[Any] = [get_gradient_edge(x).node for x in tensors]
        while stack:
            node = stack.pop()
            if node is None or node in self.seen:
                continue
            self.seen.add(node)
            if node in self.names:
                found.append(self.names[node])
            stack += [before for before, _ in node.next_functions]
        return found


class _BlockHooks:
    """Notes for one block the part of each parameter that it owns."""

    def __init__(self, block: Block, owned: list[str], walk: _Walk, parts: dict[str, str]) -> None:
        self.owned, self.walk, self.parts = set(owned), walk, parts
        self.names = block.row.names
        self.last: str | None = None

    def join(self, join: nn.Module, args: tuple[Tensor, Tensor], output: Tensor) -> None:
        assert isinstance(join, Join)
        skip, branch = args
        self._note(skip, self.last or join.name)
        self._note(branch, join.name)
        self.last = join.name

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._note(output, self.last or self.names[-1])
        self.last = None

    def _note(self, value: Any, part: str) -> None:
        for name in self.walk.new(value):
            if name in self.owned:
                self.parts[name] = part
