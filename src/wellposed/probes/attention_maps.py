"""The attention probabilities of each block, with fused attention left on.

A fused kernel never holds the matrix softmax(q k^T scale + mask), so a hook cannot read it. Here the
calls of torch's attention functions inside a block are seen by a ``TorchFunctionMode``. The model's own
call runs as it would, and for the first few images the probabilities are computed again:

- ``scaled_dot_product_attention``: recomputed from q, k and the mask, in at least float32;
- ``softmax`` over the last axis, where attention is not fused: read;
- ``multi_head_attention_forward``: its weights, from a second call on these images in at least float32.

Axes: B images, W windows of an image (1 for global attention), H heads, N queries, M keys. Where a
leading axis is B W, image i owns the rows i W to (i + 1) W.

>>> q = torch.eye(2).expand(1, 1, 2, 2)
>>> attention_probabilities(q, q, scale=math.log(3.0))
tensor([[[[0.7500, 0.2500],
          [0.2500, 0.7500]]]])
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from wellposed.anatomy.cores import at_least_float32
from wellposed.anatomy.cores import attention_probabilities as attention_probabilities
from wellposed.anatomy.masks import far_below, hidden_by
from wellposed.anatomy.model import Block
from wellposed.anatomy.model import no_attention as no_attention
from wellposed.anatomy.queries import HEAD_COUNTS
from wellposed.anatomy.trace import without_fast_path
from wellposed.linalg.precision import full_float32, without_autocast
from wellposed.probes.observe import is_repeated, padding_of, removing, stream_of, tokens_of
from wellposed.text import few

See = Callable[[Block, Tensor], None]
"""Gets a block and attention probabilities (images, W, H, N, M), in at least float32."""

LARGEST_MAP = 2**29
"""Bytes of probabilities made at a time; more are shown in several parts, each of whole images."""

FROM_QK = "softmax of q k^T recomputed beside the fused kernel"
FROM_SOFTMAX = "softmax output"
FROM_SCORES = "softmax of the scores recomputed in float32"
FROM_WEIGHTS = "weights of multi_head_attention_forward"


@contextlib.contextmanager
def watching_attention(
    found: list[Block], see: See, images: int, *, strict: bool = True
) -> Iterator["AttentionWatch"]:
    """Inside, every block shows ``see`` the attention of the first ``images`` images that reach it.

    Blocks without attention over tokens (see :func:`no_attention`) are passed over. A block with several
    attentions shows each, in order; the watch's ``source`` says which, and how it was made. The model's
    results stay as they are, bit for bit, with one exception: ``nn.MultiheadAttention`` has a fast path
    for inference that nothing can look into. It is off inside, by
    ``torch.backends.mha.set_fastpath_enabled(False)``, which moves the last digits.

    A block that ran without showing attention is an error at the end, unless ``strict`` is False: then it
    is among the watch's ``silent`` blocks.
    """
    if images < 1:
        raise ValueError(f"images must be at least 1, got {images}; attention is that of some image.")
    watch = AttentionWatch(see, images)
    handles: list[Any] = []
    try:
        with without_fast_path(), removing(handles):
            for block in found:
                if not no_attention(block):
                    enter, leave = partial(watch.enter, block), partial(watch.leave, block)
                    handles.append(block.module.register_forward_pre_hook(enter, with_kwargs=True))
                    handles.append(block.module.register_forward_hook(leave, always_call=True))
            yield watch
    finally:
        watch.abandon()
    if strict:
        watch.check()


class Source(NamedTuple):
    """How the probabilities that ``see`` is looking at were made.

    ``dtype`` is that of the model's q and k, or of its scores; ``order`` counts the attentions of a block,
    from 0. ``tells_heads`` is False where heads and windows lie on one axis, all of them shown as windows.
    """

    estimator: str
    dtype: torch.dtype
    order: int
    tells_heads: bool = True


class Rows(NamedTuple):
    """What the rows of the probabilities that ``see`` is looking at may see.

    ``keys``: how many keys each, in a shape that broadcasts to (images, W, H, N); None where that is all.
    ``padding``: the rows that are padding (images, N), or why that is not known.
    """

    keys: Tensor | None = None
    padding: Tensor | str | None = None


@dataclass
class _Run:
    """One forward pass of a block."""

    block: Block
    batch: int
    sampled: int
    switched_on: bool
    shown: int = 0


class AttentionWatch(TorchFunctionMode):
    """Sees the attention functions while a block runs; made by :func:`watching_attention`."""

    def __init__(self, see: See, images: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.see, self.images = see, images
        self.source: Source
        self.rows = Rows()
        self.values: Tensor | None = None  # (images, W, H, M, D/H) that the probabilities weigh, if fused
        self._runs: list[_Run] = []  # the innermost block last
        self._seen: dict[int, int] = {}
        self.silent: dict[int, Block] = {}

    def enter(self, block: Block, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = tokens_of(block, stream_of(block, args, kwargs)).shape[0]
        sampled = 0 if is_repeated(block) else min(batch, self.images - self._seen.get(block.index, 0))
        # Once is enough where a block holds another one.
        switch_on = sampled > 0 and not any(run.switched_on for run in self._runs)
        if switch_on:
            self.__enter__()  # type: ignore[no-untyped-call]
        self._runs.append(_Run(block, batch, sampled, switch_on))

    def leave(self, block: Block, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # A pre-hook before ours may have failed, then the block was never entered.
        if self._runs and self._runs[-1].block is block:
            run = self._end_run()
            if output is not None:  # None after an error
                self._seen[block.index] = self._seen.get(block.index, 0) + run.sampled
                if run.sampled and not run.shown:
                    self.silent[block.index] = block

    def abandon(self) -> None:
        """End the runs that an interrupt broke off: after one, torch calls no hooks."""
        while self._runs:
            self._end_run()

    def _end_run(self) -> _Run:
        run = self._runs.pop()
        if run.switched_on:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return run

    def check(self) -> None:
        """Raise where a block ran without showing attention."""
        if not self.silent:
            return
        silent = list(self.silent.values())
        raise RuntimeError(
            "expected a call of scaled_dot_product_attention, softmax or multi_head_attention_forward in "
            f"{few((block.name for block in silent), 3)} "
            f"({', '.join(dict.fromkeys(type(block.module).__name__ for block in silent))}), found none: "
            "its attention is a kernel outside torch, or no softmax. For a transformers model, "
            'model.set_attn_implementation("sdpa") or "eager" shows it; for a class of your own whose '
            "attention has no rows over tokens, say so in its row: BlockRow(..., no_token_attention=...)."
        )

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # torch switches the mode off for this method, so what is called here is not seen again.
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = _READERS.get(func)
        if read is not None and self._runs and self._runs[-1].sampled:
            with torch.no_grad():
                maps = read(out, *args, **kwargs)
                if maps is not None:
                    self._show(self._runs[-1], maps)
        return out

    def _show(self, run: _Run, maps: "_Maps") -> None:
        axes = len(maps.shape)
        windows, rest = divmod(maps.shape[0], run.batch)
        if rest or axes not in (3, 4, 5) or (axes == 5 and windows != 1):
            raise ValueError(
                "expected attention of shape (B, H, N, M), (B W, H, N, M), (B, W, H, N, M), (B, H, W, N, M) "
                f"or (B W H, N, M) for B = {run.batch} images in {run.block.name} "
                f"({type(run.block.module).__name__}), got {tuple(maps.shape)}; put the images first."
            )
        order, run.shown = run.shown, run.shown + 1
        padding = padding_of(run.block, torch.empty(run.batch, maps.shape[-2], 0))
        bytes_of_image = math.prod(maps.shape) // run.batch * max(maps.dtype.itemsize, 4)
        at_once = max(1, LARGEST_MAP // max(bytes_of_image, 1))
        for first in range(0, run.sampled, at_once):
            last = min(first + at_once, run.sampled)
            p = maps.rows(slice(first * windows, last * windows))
            if axes == 3:
                p = p.reshape(last - first, windows, 1, *p.shape[1:])
            elif axes == 4:
                p = p.reshape(last - first, windows, *p.shape[1:])
            keys = maps.keys(slice(first * windows, last * windows)) if maps.keys is not None else None
            if keys is not None and axes == 3:  # (images W or 1, N or 1), or one axis more in front
                keys = keys.reshape(-1, keys.shape[-1])
                keys = keys.reshape(-1, windows if len(keys) > 1 else 1, 1, keys.shape[-1])
            elif keys is not None and keys.ndim == 3:  # (images W or 1, H or 1, N or 1)
                keys = keys.reshape(-1, windows if len(keys) > 1 else 1, *keys.shape[1:])
            values = maps.values
            if values is not None:
                values = values[first * windows : last * windows].detach()
                values = values.reshape(last - first, *((windows,) if axes == 4 else ()), *values.shape[1:])
            tells_heads = axes != 3 or windows == 1
            if axes == 5:
                swapped = _heads_are_first(run.block, p.shape[1], p.shape[2])
                tells_heads = swapped is not None
                p = _windows_first(p, swapped)
                keys = keys if keys is None else _windows_first(keys, swapped)
                values = values if values is None else _windows_first(values, swapped)
            self.values = values
            of_these = padding[first:last] if isinstance(padding, Tensor) else padding
            self.source = Source(maps.estimator, maps.dtype, order, tells_heads)
            self.rows = Rows(keys, of_these)
            self.see(run.block, p)


def _heads_are_first(block: Block, one: int, other: int) -> bool | None:
    """Whether of two axes of attention the first is that of heads, by what the block says of their number.

    True of (B, H, W, N, M), False of (B, W, H, N, M), as of a block that says nothing; None if unknown.
    """
    said = {
        count
        for part in block.module.modules()
        for name in HEAD_COUNTS
        if isinstance(count := getattr(part, name, None), int)
    }
    if not said or (other in said and (one not in said or one == 1)):
        return False
    if one in said and (other not in said or other == 1):
        return True
    return None


def _windows_first(x: Tensor, heads_are_first: bool | None) -> Tensor:
    """(B, W, H, ...); where heads cannot be distinguished from windows, all are windows."""
    if heads_are_first is None:
        return x.flatten(1, 2)[:, :, None]
    return x.transpose(1, 2) if heads_are_first else x


class _Maps(NamedTuple):
    """The probabilities of one call, not made yet: their shape, and what makes rows of their first axis."""

    shape: tuple[int, ...]
    rows: Callable[[slice], Tensor]
    estimator: str
    dtype: torch.dtype
    keys: Callable[[slice], Tensor] | None = None
    values: Tensor | None = None


def _counted(hidden: Tensor | None, of_keys: int) -> Callable[[slice], Tensor] | None:
    """From what attention hides, (..., N, M) or less, to how many keys a row sees."""
    if hidden is None:
        return None

    def keys(chosen: slice) -> Tensor:
        some = hidden if hidden.ndim < 4 or hidden.shape[0] == 1 else hidden[chosen]
        seen = of_keys - some.sum(-1) * (of_keys // some.shape[-1])
        while seen.ndim < 3:
            seen = seen[None]
        return seen

    return keys


def _read_fused(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> _Maps:
    inputs = [None if x is None else x.to(_model_dtype(x)) for x in (query, key, attn_mask)]

    def rows(chosen: slice) -> Tensor:
        # An input without the leading axis, or with one row there, is broadcast.
        q, k, mask = (x if x is None or x.ndim < query.ndim or x.shape[0] == 1 else x[chosen] for x in inputs)
        assert q is not None
        assert k is not None
        return attention_probabilities(q, k, mask, is_causal, scale, enable_gqa)

    hidden = hidden_by(
        "scaled_dot_product_attention", (query, key, value, attn_mask, dropout_p, is_causal), {}
    )
    seen = _counted(hidden, key.shape[-2]) if out.ndim == 4 else None
    has_all = value.shape[:-2] == query.shape[:-2] and value.ndim > 3
    return _Maps(
        (*out.shape[:-1], key.shape[-2]),
        rows,
        FROM_QK,
        _model_dtype(query),
        seen,
        value if has_all else None,
    )


def _read_softmax(out: Tensor, input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> _Maps | None:
    if out.ndim < 3 or dim not in (-1, out.ndim - 1):
        return None
    dtype = _model_dtype(input)

    def keys(chosen: slice) -> Tensor:
        return (~far_below(input[chosen])).sum(-1)

    if out.dtype in (torch.float32, torch.float64):
        return _Maps(out.shape, lambda chosen: out[chosen].detach(), FROM_SOFTMAX, dtype, keys)
    in_float32 = partial(functional.softmax, dim=-1, dtype=torch.float32)
    return _Maps(out.shape, lambda chosen: in_float32(input[chosen]), FROM_SCORES, dtype, keys)


def _read_multi_head(out: tuple[Tensor, Tensor | None], *args: Any, **kwargs: Any) -> _Maps:
    call = _MULTI_HEAD.bind(*args, **kwargs).arguments
    query, heads = call["query"], call["num_heads"]

    def rows(chosen: slice) -> Tensor:
        few = dict(call)
        for name in ("query", "key", "value"):
            few[name] = call[name][:, chosen]
        if call.get("key_padding_mask") is not None:
            few["key_padding_mask"] = call["key_padding_mask"][chosen]
        for name in ("attn_mask", "static_k", "static_v"):
            if call.get(name) is not None and call[name].ndim == 3:
                few[name] = call[name][chosen.start * heads : chosen.stop * heads]
        few = {name: at_least_float32(x) for name, x in few.items()}
        few |= {"training": False, "is_causal": False, "need_weights": True, "average_attn_weights": False}
        with without_autocast(query), full_float32():
            weights = functional.multi_head_attention_forward(**few)[1]
        assert weights is not None
        return weights

    shape = (query.shape[1], heads, query.shape[0], call["key"].shape[0])
    seen = _counted(hidden_by("multi_head_attention_forward", args, kwargs), shape[-1])
    return _Maps(shape, rows, FROM_WEIGHTS, _model_dtype(query), seen)


_MULTI_HEAD = inspect.signature(functional.multi_head_attention_forward)

_READERS: dict[Any, Callable[..., _Maps | None]] = {
    functional.scaled_dot_product_attention: _read_fused,
    functional.softmax: _read_softmax,
    torch.softmax: _read_softmax,
    torch.special.softmax: _read_softmax,
    Tensor.softmax: _read_softmax,
    functional.multi_head_attention_forward: _read_multi_head,
}


def _model_dtype(x: Tensor) -> torch.dtype:
    """In which the model multiplies x: inside autocast, float32 is rounded first."""
    if x.dtype != torch.float32 or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)
