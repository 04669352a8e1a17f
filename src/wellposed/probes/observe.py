"""Looking into a model without a trace: everything is put back, also after an error or Ctrl-C."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from wellposed.anatomy.example import eagerly as eagerly
from wellposed.anatomy.example import preserved as preserved
from wellposed.anatomy.masks import mask_reader
from wellposed.anatomy.model import Block, blocks, refusal
from wellposed.anatomy.seam import Join, block_joins, opened_seams
from wellposed.anatomy.table import to_tokens
from wellposed.anatomy.trace import removing as removing
from wellposed.errors import WrappedModelError
from wellposed.interrupts import let_through, uninterrupted
from wellposed.records import Record

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
    return unwrapped(model)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``, DDP, DataParallel and DeepSpeed's engine, one in the other."""
    while True:
        compiled = model._modules.get("_orig_mod")
        if compiled is not None:
            model = compiled
        elif isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif type(model).__name__ == "DeepSpeedEngine":
            model = cast(nn.Module, model.module)
        else:
            return model


@contextlib.contextmanager
def observed(model: nn.Module, example: Any = None) -> Iterator[list[Block]]:
    """The blocks of a plain model, in evaluation mode, their seams open; as it was afterwards.

    Compiled parts run eagerly meanwhile: compiled code would not see the hooks. Blocks that cannot be
    measured are not among them.
    """
    present = blocks(model, example)
    found = [block for block in present if not block.row.refused]
    if not found:
        raise refusal(present)
    seams = [(block.module, block.row) for block in found]
    with uninterrupted():
        try:
            with opened_seams(seams), preserved(model), eagerly():
                model.eval()
                yield found
        finally:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # a forward pass leaves the outermost one whole


class Calls:
    """The calls of the blocks in one forward pass, and which of their tokens are padding.

    Where a block runs several times in a pass, as ALBERT's, its first call is measured.
    """

    def __init__(self, found: list[Block]) -> None:
        self.most: dict[int, int] = {}
        self._readers = {block.index: mask_reader(block.module) for block in found}
        self._paddings: list[Tensor] = []
        self._kinds = 1
        self._count: dict[int, int] = {}
        self._of: dict[int, Tensor | str | None] = {}
        self.images = 1

    def start(self, images: int, paddings: Iterable[Tensor] = (), kinds: int = 1) -> None:
        """A new pass of so many images, with the paddings that were given, for so many kinds of inputs."""
        self.images = images
        self._paddings, self._kinds = [x for x in paddings if x.any()], kinds
        self._count, self._of = {}, {}

    def enter(self, block: Block, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        count = self._count.get(block.index, 0) + 1
        self._count[block.index] = count
        self.most[block.index] = max(count, self.most.get(block.index, 0))
        if count == 1:
            texts, tokens = tokens_of(block, stream_of(block, args, kwargs)).shape[:2]
            own = self._readers[block.index].padding(args, kwargs, texts, tokens)
            self._of[block.index] = self._given(texts, tokens) if own is None else own if own.any() else None

    def is_repeated(self, block: Block) -> bool:
        return self._count.get(block.index, 0) > 1

    def padding(self, block: Block, tokens: Tensor) -> Tensor | str | None:
        """Which of the tokens (B, N, D) of a block are padding (B, N), or why that is not known."""
        found = self._of.get(block.index)
        if isinstance(found, Tensor) and found.shape != tokens.shape[:2]:
            return _unmatched(tokens.shape[1], found.shape[1])
        return found

    def _given(self, texts: int, tokens: int) -> Tensor | str | None:
        """From the model's own inputs, for a block whose call had no mask."""
        if not self._paddings or self._kinds > 1:
            return None
        for one in self._paddings:
            if one.shape == (texts, tokens):
                return one
        return _unmatched(tokens, self._paddings[0].shape[-1])

    def noted(self, record: Record) -> Record:
        count = self.most.get(record.block, 0) if record.block is not None else 0
        if count < 2:
            return record
        said = f"of the first of {count} calls of the block in a pass"
        return replace(record, note="; ".join(filter(None, (record.note, said))))


def _unmatched(tokens: int, entries: int) -> str:
    return f"which of its {tokens} tokens are padding cannot be told: the mask has {entries} entries"


_CALLS: ContextVar[Calls | None] = ContextVar("calls", default=None)


@contextlib.contextmanager
def watching_calls(found: list[Block]) -> Iterator[Calls]:
    """Inside, the probes know of repeated calls and of padding."""
    calls, handles = Calls(found), list[Any]()
    token = _CALLS.set(calls)
    try:
        with removing(handles):
            for block in found:
                enter = partial(calls.enter, block)
                handles.append(block.module.register_forward_pre_hook(enter, with_kwargs=True))
            yield calls
    finally:
        _CALLS.reset(token)


def is_repeated(block: Block) -> bool:
    """Whether this is not the first call of a block in the pass."""
    calls = _CALLS.get()
    return calls is not None and calls.is_repeated(block)


def padding_of(block: Block, tokens: Tensor) -> Tensor | str | None:
    """Which of the tokens (B, N, D) of a block are padding (B, N); None if none, a sentence if unknown."""
    calls = _CALLS.get()
    return None if calls is None else calls.padding(block, tokens)


@contextlib.contextmanager
def watching_tokens(found: list[Block], see: See) -> Iterator[None]:
    """Inside, every forward pass shows its tokens to ``see``.

    Positions: ``input``, and for each of the block's joins ``<role>.branch`` (what the branch adds,
    without its skip), ``<role>.skip`` and ``<role>.sum`` (what leaves the join).
    """

    def enter(block: Block, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        let_through()
        if not is_repeated(block):
            see(block, "input", tokens_of(block, stream_of(block, args, kwargs)))

    def add(block: Block, join: Join, args: tuple[Tensor, Tensor], output: Tensor) -> None:
        if not is_repeated(block):
            skip, branch = args
            for part, x in (("skip", skip), ("branch", branch), ("sum", output)):
                see(block, f"{join.name}.{part}", tokens_of(block, x))

    handles: list[Any] = []
    with removing(handles):
        for block in found:
            handles.append(block.module.register_forward_pre_hook(partial(enter, block), with_kwargs=True))
            for join in block_joins(block.module, block.row):
                handles.append(join.register_forward_hook(partial(add, block)))
        yield


def layout_of(block: Block) -> Any:
    return block.row.layout_of(block.module)


def tokens_of(block: Block, x: Tensor) -> Tensor:
    """The tokens (B, N, D) of whole images in a tensor of a block."""
    tokens = to_tokens(x, layout_of(block))
    if not block.row.pieces:
        return tokens
    calls = _CALLS.get()
    return tokens.reshape(1 if calls is None else calls.images, -1, tokens.shape[-1])


def stream_of(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The argument that carries the residual stream."""
    tensors = [*args, *kwargs.values()]
    stream: Tensor = tensors[block.row.stream]
    return stream
