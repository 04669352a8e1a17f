"""The chain check: do the joins of a model's blocks carry its residual stream?

That an opened seam leaves the output alone does not show that the right adds were taken. In a right
seam the first skip is the block's input, each join's output is the next skip and the last one is the
block's output, up to one submodule in between (the norm of a post-norm block).
"""

from typing import Any

from torch import nn

from wellposed.anatomy.example import preserved
from wellposed.anatomy.flow import Flow
from wellposed.anatomy.model import Block, blocks, refuse_wrapped
from wellposed.anatomy.seam import Join, opened_seams
from wellposed.anatomy.trace import trace
from wellposed.errors import SeamError


def verify(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Run ``model(*args, **kwargs)`` and check the chain of skips in every block.

    Meant for a class one has taught the library. Runs in evaluation mode without gradients and leaves
    the model as it was. Returns the number of joins checked, raises
    :class:`~wellposed.errors.SeamError` where a chain is broken.
    """
    refuse_wrapped(model)
    found = blocks(model)
    with preserved(model), opened_seams([(block.module, block.row) for block in found]):
        model.eval()
        flow = Flow(trace(model, lambda model: model(*args, **kwargs)))
    return sum(_checked(block, flow) for block in found)


def _checked(block: Block, flow: Flow) -> int:
    """Follow the stream through the last call of a block, and count its joins."""
    row, name = block.row, block.name
    calls = [call for call in flow.trace.calls if call.module is block.module and call.results]
    if not calls:
        raise SeamError(f"{name} was not run by this input; verify needs one that reaches every block.")
    call = calls[-1]
    steps = [each for each in flow.trace.calls if isinstance(each.module, Join) and each.within(call)]
    ran = tuple(step.module.name for step in steps)  # type: ignore[union-attr]
    if ran != row.names:
        raise SeamError(f"expected the joins {row.names} to run in this order in {name}, got {ran}.")
    stream = call.argument(row.stream)
    for step in steps:
        role = step.module.role
        if role not in row.unchained and not flow.leads(call, stream, step.argument(0)):
            raise SeamError(
                f"the skip of the {role} join in {name} is not the residual stream: it differs from "
                "what came out of the step before; the adds of its row are not its residual adds."
            )
        stream = step.results[0]
    if not flow.leads(call, stream, call.results[0]):
        raise SeamError(f"the output of {name} is not that of its last join; its row misses a residual add.")
    return len(steps)
