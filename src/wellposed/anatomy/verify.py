"""The chain check: do the joins of a model's blocks carry its residual stream?

That an opened seam leaves the output alone does not show that the right adds were taken. In a right
seam the first skip is the block's input, each join's output is the next skip and the last one is the
block's output, up to one submodule in between (the norm of a post-norm block).
"""

from typing import Any

import torch
from torch import Tensor, nn

from wellposed.anatomy.example import preserved
from wellposed.anatomy.model import Block, blocks, refuse_wrapped
from wellposed.anatomy.seam import Join, block_joins, opened_seams
from wellposed.anatomy.trace import removing
from wellposed.errors import SeamError


def verify(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Run ``model(*args, **kwargs)`` and check the chain of skips in every block.

    Meant for a class one has taught the library. Runs in evaluation mode without gradients and leaves
    the model as it was. Returns the number of joins checked, raises
    :class:`~wellposed.errors.SeamError` where a chain is broken.
    """
    refuse_wrapped(model)
    found = blocks(model)
    handles: list[Any] = []
    with preserved(model), opened_seams([(block.module, block.row) for block in found]), removing(handles):
        traces = [_Trace(block) for block in found]
        for trace in traces:
            handles += trace.attach()
        model.eval()
        with torch.no_grad():
            model(*args, **kwargs)
        return sum(trace.check() for trace in traces)


class _Trace:
    """What went through one block in its last call."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.input: Tensor | None = None
        self.output: Tensor | None = None
        self.steps: list[tuple[Join, Tensor, Tensor]] = []  # join, skip, sum
        self.calls: list[tuple[Tensor, Tensor]] = []  # input and output of each child

    def attach(self) -> list[Any]:
        module = self.block.module
        children = [child for child in module.children() if not isinstance(child, Join)]
        return [
            module.register_forward_pre_hook(self._start),
            module.register_forward_hook(self._end),
            *(child.register_forward_hook(self._child) for child in children),
            *(join.register_forward_hook(self._join) for join in block_joins(module, self.block.row)),
        ]

    def _start(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.steps.clear()
        self.calls.clear()
        self.input = args[self.block.row.stream]

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.output = _first(output)

    def _child(self, module: nn.Module, args: Any, output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(_first(output), Tensor):
            self.calls.append((args[0], _first(output)))

    def _join(self, join: nn.Module, args: tuple[Tensor, Tensor], output: Tensor) -> None:
        assert isinstance(join, Join)
        self.steps.append((join, args[0], output))

    def check(self) -> int:
        row, name = self.block.row, self.block.name
        ran = tuple(join.name for join, _, _ in self.steps)
        if self.input is None or self.output is None:
            raise SeamError(f"{name} was not run by this input; verify needs one that reaches every block.")
        if ran != row.names:
            raise SeamError(f"expected the joins {row.names} to run in this order in {name}, got {ran}.")
        stream = self.input
        for join, skip, total in self.steps:
            if join.role not in row.unchained and not self._leads_to(stream, skip):
                raise SeamError(
                    f"the skip of the {join.role} join in {name} is not the residual stream: it differs from "
                    "what came out of the step before; the adds of its row are not its residual adds."
                )
            stream = total
        if not self._leads_to(stream, self.output):
            raise SeamError(
                f"the output of {name} is not that of its last join; its row misses a residual add."
            )
        return len(self.steps)

    def _leads_to(self, source: Tensor, target: Tensor) -> bool:
        if _same(source, target):
            return True
        return any(_same(source, given) and _same(result, target) for given, result in self.calls)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _same(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and torch.equal(a.reshape(-1), b.reshape(-1))
