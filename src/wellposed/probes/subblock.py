r"""One sub-block of a model as a pure function of the tokens that enter it, to be differentiated.

.. math::
    x \mapsto f(x) \quad \text{(the branch alone)} \qquad \text{or} \qquad x \mapsto x + f(x)

>>> import timm, torch
>>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
>>> part = sub_block(model, torch.randn(1, 3, 32, 32), block=1, part="attention")
>>> part.input.shape, part.function(part.input).shape
(torch.Size([1, 5, 192]), torch.Size([1, 5, 192]))
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from wellposed.anatomy.masks import mask_reader
from wellposed.anatomy.model import Block, select
from wellposed.anatomy.seam import Join, block_joins
from wellposed.anatomy.trace import without_fast_path
from wellposed.errors import SeamError, WrappedModelError
from wellposed.interrupts import let_through, uninterrupted
from wellposed.linalg.precision import without_autocast
from wellposed.probes.images import Batch
from wellposed.probes.named_inputs import as_dtype, run
from wellposed.probes.observe import observed, plain, removing, stream_of, tokens_of


@dataclass(frozen=True)
class SubBlock:
    """A part of a block.

    Args:
        block, name: index and name of the block in the model.
        part: a role of the block, or ``"block"``.
        skip: whether a role's skip is in; None for ``"block"``, whose skips are as the model has them.
        function: tokens to tokens, as they lie in the model; ``torch.func`` can transform it.
        input: the tokens at which the model evaluates it.
    """

    block: int
    name: str
    part: str
    skip: bool | None
    function: Callable[[Tensor], Tensor]
    input: Tensor


def sub_block(
    model: nn.Module,
    image: Batch,
    block: int,
    part: str = "attention",
    *,
    skip: bool = False,
    dtype: torch.dtype | None = None,
    widen: bool = False,
) -> SubBlock:
    """Cut a sub-block out of a model, at the tokens that ``image`` gives there.

    It is a copy of the block, in evaluation mode; the model is run once and left as it was. Its input is
    what enters the block's own ``forward``: hooks on the block itself, such as graying inserted before
    it, have acted already and are no part of the function. Hooks inside the block are.

    Args:
        image: one image (1, C, H, W), or what else the model takes for one. A text has no padding here.
        block: index of the block.
        part: ``"block"``, from the block's input to its output, or a role (``"attention"``, ``"ffn"``,
            ...). The first role starts at the block's input, a later one at the sum before it.
        skip: of a role, whether its skip is added, also where the model has it removed.
        dtype: to compute in; None keeps the tokens'.
        widen: run the whole model in ``dtype`` where that is wider, so that the tokens have its digits too.
    """
    model = plain(model)
    # Tensors made in inference mode could not be differentiated later.
    with uninterrupted(), torch.inference_mode(False), observed(model) as found, torch.no_grad():
        (chosen,) = select(found, block)
        parts = (*chosen.row.names, "block")
        if part not in parts:
            raise ValueError(f"part must be one of {', '.join(parts)} for {chosen.name}, got {part!r}.")
        if isinstance(chosen.module, FSDPModule):
            raise WrappedModelError(
                f"{chosen.name} is sharded by fully_shard, no rank has all of it; take the model before that."
            )
        call = _captured_call(model, image, chosen)
        dtype = call.stream.dtype if dtype is None else dtype
        if widen and dtype.itemsize > call.stream.dtype.itemsize and not _is_sharded(model):
            with without_autocast(call.stream):
                call = _captured_call(_widened(model, dtype), as_dtype(image, dtype), chosen)
        call, own = call.to(dtype), _own_copy(chosen.module).to(dtype)
        start, end = _ends(own, chosen, part)
        into = call.stream if start is None else _Path(own, call, None, start, skip=None)(call.stream)
    kept = None if part == "block" else skip
    return SubBlock(chosen.index, chosen.name, part, kept, _Path(own, call, start, end, kept), into)


@dataclass(frozen=True)
class _Call:
    """The arguments of a block; ``index`` is that of the one which carries the residual stream."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int
    stream: Tensor

    def to(self, dtype: torch.dtype) -> "_Call":
        def cast(x: Tensor) -> Tensor:
            return x.detach().to(dtype) if x.is_floating_point() else x

        args, kwargs = tree_map_only(Tensor, cast, (self.args, self.kwargs))
        return _Call(args, kwargs, self.index, cast(self.stream))

    def carrying(self, x: Tensor) -> tuple[list[Any], dict[str, Any]]:
        """The same arguments with ``x`` for the stream."""
        values = [*self.args, *self.kwargs.values()]
        values[self.index] = x
        positional = len(self.args)
        return values[:positional], dict(zip(self.kwargs, values[positional:], strict=True))


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _widened(model: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    """The model's forward with copies of its parameters and buffers in ``dtype``."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    values = {name: x.to(dtype) if x.is_floating_point() else x.clone() for name, x in tensors}
    return lambda *args, **kwargs: functional_call(model, values, args, kwargs)


def _captured_call(model: Any, image: Batch, block: Block) -> _Call:
    calls: list[_Call] = []
    masks = mask_reader(block.module)

    def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream = stream_of(block, args, kwargs)
        padding = masks.padding(args, kwargs, *tokens_of(block, stream).shape[:2])
        if padding is not None and padding.any():
            raise ValueError(
                f"expected a text without padding, got {int(padding.sum())} tokens of it at {block.name}: "
                "the Jacobian is of a text's own tokens; pass one text alone, without padding."
            )
        calls.append(_Call(args, kwargs, block.row.stream, stream))

    # Added last, so that it sees what the hooks before made of the input.
    with removing([block.module.register_forward_pre_hook(capture, with_kwargs=True)]):
        run(model, image.clone() if isinstance(image, Tensor) else image.mapped(Tensor.clone))
    if not calls:
        raise ValueError(f"{block.name} was not run by this image; the model needs an input that reaches it.")
    images = tokens_of(block, calls[0].stream).shape[0]
    if images != 1:
        raise ValueError(
            f"expected one image, got {images} at {block.name}; pass images[:1], or images[:, :1] to a model "
            "with batch_first=False."
        )
    return calls[0]


def _own_copy(block: nn.Module) -> nn.Module:
    own = copy.deepcopy(block)
    own._forward_pre_hooks.clear()
    own._forward_hooks.clear()
    for module in own.modules():
        # Those watch or change gradients; the derivative here is that of the forward.
        module._backward_pre_hooks.clear()
        module._backward_hooks.clear()
    return own.eval().requires_grad_(False)


def _ends(own: nn.Module, block: Block, part: str) -> tuple[Join | None, Join | None]:
    """The joins at which a part starts and ends, None at an end of the block."""
    if part == "block":
        return None, None
    ordered = [None, *block_joins(own, block.row)]
    position = block.row.names.index(part)
    return ordered[position], ordered[position + 1]


@contextlib.contextmanager
def _without_fused_attention() -> Iterator[None]:
    """Attention as plain products: the fused kernels lack forward mode and second derivatives."""
    with without_fast_path(), sdpa_kernel(SDPBackend.MATH):
        yield


class _Reached(Exception):  # noqa: N818
    """Carries the tokens out of a forward that need not continue."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self.tokens = tokens


@dataclass(frozen=True)
class _Path:
    """From one join of a block to another, None being the block's own ends."""

    own: nn.Module
    call: _Call
    start: Join | None
    end: Join | None
    skip: bool | None  # None: as the join has it

    def __call__(self, x: Tensor) -> Tensor:
        handles: list[Any] = []
        let_through()
        with uninterrupted(), removing(handles), without_autocast(x), _without_fused_attention():
            if self.start is not None:
                handles.append(self.start.register_forward_hook(lambda join, args, output: x))
            if self.end is not None:
                handles.append(self.end.register_forward_hook(self._stop))
            args, kwargs = self.call.carrying(x if self.start is None else self.call.stream)
            try:
                out = self.own(*args, **kwargs)
            except _Reached as reached:
                return reached.tokens
        if self.end is not None:
            raise SeamError(f"the forward of {type(self.own).__name__} went past its {self.end.role} join.")
        tokens: Tensor = out[0] if isinstance(out, tuple) else out
        return tokens

    def _stop(self, join: nn.Module, args: tuple[Tensor, Tensor], output: Tensor) -> None:
        shortcut, branch = args
        raise _Reached(output if self.skip is None else shortcut + branch if self.skip else branch)
