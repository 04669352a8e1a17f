"""The attentions of a block while it runs: the softmax of each, what it is of and what its weights multiply.

Fused attention hides its softmax in a kernel; there the queries and keys that go in stand for it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from wellposed.anatomy.flow import PRODUCTS, VIEWS
from wellposed.anatomy.masks import FUSED, MULTI_HEAD
from wellposed.linalg.precision import full_float32, without_autocast

_LARGEST = 2**24  # probabilities that are looked at; of larger attentions some rows


def attention_probabilities(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q k^T scale + mask), with the arguments of ``scaled_dot_product_attention``.

    As there, the row of a query that may look at nothing is zero.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    with without_autocast(query), full_float32():
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores: Tensor = (at_least_float32(query) * scale) @ at_least_float32(key).mT
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is None:
            return scores.softmax(-1)
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = scores + attn_mask
        sees_nothing = (scores == -math.inf).all(-1, keepdim=True)
        return scores.softmax(-1).masked_fill(sees_nothing, 0.0)


def at_least_float32(x: Any) -> Any:
    """Half precision as float32; everything else as it is."""
    return x.float() if isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16) else x


def _floating(mask: Tensor | None) -> Tensor | None:
    return mask if mask is not None and mask.is_floating_point() else None


@dataclass
class Finished:
    """A call of a module inside the block that has ended, with the tensor that it returned."""

    path: str
    module: nn.Module
    given: Tensor | None
    result: Tensor


@dataclass
class Core:
    """One attention: of ``query`` and ``key`` if fused, else of the ``logits`` of its softmax.

    Args:
        p: its probabilities (..., N, M), of some rows where there are very many.
        before: how many calls had ended before queries and keys met.
        within: the modules at work.
    """

    p: Tensor
    before: int
    within: tuple[int, ...]
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    logits: Tensor | None = None
    is_packed: bool = False
    is_mixed: bool = False
    bias: Tensor | None = None  # of floating point, on the logits of fused attention


@dataclass
class Seen:
    """What one run of a block has shown."""

    finished: list[Finished] = field(default_factory=list)
    cores: list[Core] = field(default_factory=list)
    ran: dict[int, int] = field(default_factory=dict)  # how often, by the module's id


@contextmanager
def watching_cores(block: nn.Module) -> Iterator[Seen]:
    """Inside, a run of the block shows its attentions and the results of its modules."""
    watch = _Watch()
    handles: list[Any] = []
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for path, module in block.named_modules():
            handles.append(module.register_forward_pre_hook(watch.enter, with_kwargs=True))
            leave = _Leave(watch, path)
            handles.append(module.register_forward_hook(leave, always_call=True))
        with watch:
            yield watch.seen
        for core in watch.open_cores:
            if core.value is not None:
                watch.seen.cores.append(core)
    finally:
        for handle in handles:
            handle.remove()
        torch.backends.mha.set_fastpath_enabled(fast)


@dataclass
class _Leave:
    watch: "_Watch"
    path: str

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.watch.leave(self.path, module, output)


class _Watch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()
        self.open_cores: list[Core] = []
        self._stack: list[int] = []
        self._given: list[Tensor | None] = []
        self._of_weights: dict[int, Core] = {}  # by the id of what was made of its probabilities
        self._kept: list[Tensor] = []  # so that no id is used twice
        self._met = 0

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = next((x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)), None)
        self._stack.append(id(module))
        self._given.append(given)

    def leave(self, path: str, module: nn.Module, output: Any) -> None:
        if not self._stack:
            return
        self._stack.pop()
        given = self._given.pop()
        self.seen.ran[id(module)] = self.seen.ran.get(id(module), 0) + 1
        if isinstance(output, Tensor):
            self.seen.finished.append(Finished(path, module, given, output))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            self._see_packed(args, kwargs)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            self._see_fused(args, kwargs)
        elif name == "softmax" and isinstance(out, Tensor):
            self._see_softmax(out, args, kwargs)
        elif name in PRODUCTS or name in VIEWS or name in ("linear", "type_as", "__mul__", "mul"):
            self._follow(name, out, [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)])
        return out

    def _see_packed(self, args: Any, kwargs: Any) -> None:
        call = MULTI_HEAD.bind(*args, **kwargs).arguments
        shape = call["query"].shape[1], call["num_heads"], call["query"].shape[0], call["key"].shape[0]
        core = Core(torch.empty(shape, device="meta"), len(self.seen.finished), tuple(self._stack))
        core.is_packed, core.bias = True, _floating(call.get("attn_mask"))
        self.seen.cores.append(core)

    def _see_fused(self, args: Any, kwargs: Any) -> None:
        call = FUSED.bind(*args, **kwargs).arguments
        query, key, mask = call["query"], call["key"], call.get("attn_mask")
        causal = bool(call.get("is_causal"))
        step = max(1, math.ceil(math.prod(query.shape[:-1]) * key.shape[-2] / _LARGEST))
        with torch.no_grad():
            if step > 1 and causal:
                causal = False
                mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril().to(query.device)
            rows = slice(None, None, step)
            few = mask[..., rows, :] if mask is not None and mask.shape[-2] > 1 else mask
            p = attention_probabilities(
                query[..., rows, :], key, few, causal, call.get("scale"), bool(call.get("enable_gqa"))
            )
        core = Core(p, len(self.seen.finished), tuple(self._stack), query, key, call["value"])
        core.bias = _floating(mask)
        self.seen.cores.append(core)

    def _see_softmax(self, out: Tensor, args: Any, kwargs: Any) -> None:
        logits = args[0] if args else kwargs.get("input", kwargs.get("self"))
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(logits, Tensor) or logits.ndim < 3 or dim not in (-1, logits.ndim - 1):
            return
        core = Core(out.detach(), self._met, tuple(self._stack), logits=logits)
        self.open_cores.append(core)
        self._of_weights[id(out)] = core
        self._kept.append(out)

    def _follow(self, name: str, out: Any, given: list[Tensor]) -> None:
        """Follow what is made of probabilities, up to the product that they weigh."""
        core = next((self._of_weights[id(x)] for x in given if id(x) in self._of_weights), None)
        if core is None:
            if name in PRODUCTS and not any(isinstance(x, nn.Parameter) for x in given):
                self._met = len(self.seen.finished)
            return
        if name in PRODUCTS:
            others = [x for x in given if id(x) not in self._of_weights]
            if core.value is None and others:
                core.value = others[0]
            return
        if name == "linear":
            core.is_mixed = True
        for x in tree_iter(out):
            if isinstance(x, Tensor):
                self._of_weights[id(x)] = core
                self._kept.append(x)
