"""Looking into a model without a trace: everything is put back, also after an error or Ctrl-C."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from wellposed.anatomy.example import eagerly as eagerly
from wellposed.anatomy.example import preserved as preserved
from wellposed.anatomy.layout import to_tokens
from wellposed.anatomy.model import Block, blocks
from wellposed.anatomy.seam import Join, block_joins, close_seam, is_open, open_seam
from wellposed.errors import WrappedModelError
from wellposed.interrupts import let_through, uninterrupted

See = Callable[[Block, str, Tensor], None]
"""Gets a block, a position in it and the tokens (B, N, D) there."""


def plain(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``, DDP or DataParallel; a flattened or scripted one is refused."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}.")
    for module in model.modules():
        if isinstance(module, (FullyShardedDataParallel, torch.jit.ScriptModule)):
            kind = type(module).__name__
            raise WrappedModelError(
                f"cannot look into a {kind}: its blocks are not modules with parameters of their own; "
                "diagnose the model it was made from, or shard with fully_shard (FSDP2)."
            )
    inner: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return inner


@contextlib.contextmanager
def observed(model: nn.Module, example: Any = None) -> Iterator[list[Block]]:
    """The blocks of a plain model, in evaluation mode, their seams open; as it was afterwards.

    Compiled parts run eagerly meanwhile: compiled code would not see the hooks. Blocks that cannot be
    measured are not among them.
    """
    found = [block for block in blocks(model, example) if not block.row.refused]
    opened: list[Block] = []
    with uninterrupted():
        try:
            with preserved(model), eagerly():
                for block in found:
                    if not is_open(block.module, block.row):
                        open_seam(block.module, block.row)
                        opened.append(block)
                model.eval()
                yield found
        finally:
            for block in opened:
                close_seam(block.module, block.row)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # a forward pass leaves the outermost one whole


@contextlib.contextmanager
def removing(handles: list[Any]) -> Iterator[None]:
    """Removes the hooks at the end."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def watching_tokens(found: list[Block], see: See) -> Iterator[None]:
    """Inside, every forward pass shows its tokens to ``see``.

    Positions: ``input``, and for each of the block's joins ``<role>.branch`` (what the branch adds,
    without its skip), ``<role>.skip`` and ``<role>.sum`` (what goes on).
    """
    handles: list[Any] = []
    with removing(handles):
        for block in found:
            handles.append(block.module.register_forward_pre_hook(_InputHook(block, see), with_kwargs=True))
            for join in block_joins(block.module, block.row):
                handles.append(join.register_forward_hook(_JoinHook(block, see)))
        yield


class _InputHook:
    def __init__(self, block: Block, see: See) -> None:
        self.block, self.see = block, see

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        let_through()
        self.see(self.block, "input", to_tokens(stream_of(self.block, args, kwargs), layout_of(self.block)))


class _JoinHook:
    def __init__(self, block: Block, see: See) -> None:
        self.block, self.see = block, see

    def __call__(self, join: nn.Module, args: tuple[Tensor, Tensor], output: Tensor) -> None:
        assert isinstance(join, Join)
        layout = layout_of(self.block)
        skip, branch = args
        for part, x in (("skip", skip), ("branch", branch), ("sum", output)):
            self.see(self.block, f"{join.name}.{part}", to_tokens(x, layout))


def layout_of(block: Block) -> Any:
    return block.row.layout_of(block.module)


def stream_of(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The argument that carries the residual stream."""
    tensors = [*args, *kwargs.values()]
    stream: Tensor = tensors[block.row.stream]
    return stream
