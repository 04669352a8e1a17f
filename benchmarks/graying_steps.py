"""What each edit adds to a training step: a bare timm step, plain and edited, in turns.

All models are built and compiled first and stay on the device. Then the rounds: every step a few times, in
one order and in the next round in the other, so that a machine that slows down meets all of them. A ratio is
taken within a round. The floors are the least time of a step and of what each edit adds to it.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.floors import (
    FLOAT,
    HALF,
    Peaks,
    Work,
    broadcast_work,
    chain_of,
    dct_work,
    floor_of,
    spectral_work,
    svd_work,
)
from benchmarks.timing import PeakMemory, message, release, seconds_per_call
from benchmarks.trainer import bare_step
from wellposed.anatomy.model import blocks, embeddings
from wellposed.compiling import many_programs
from wellposed.nn.graying import DEFAULT_EPS
from wellposed.train.model import build_model
from wellposed.train.order import generators_kept
from wellposed.train.recipe import Recipe

PLAIN = "plain"
EDITS: dict[str, dict[str, Any]] = {
    **{
        f"{method}-{where}": {"edit": "gray_tokens", "method": method, "where": where}
        for method in ("spectral", "dct", "svd")
        for where in ("pixels", "embedding")
    },
    "cb": {"edit": "broadcast_context"},
    "cb_s": {"edit": "broadcast_context", "scaled": True},
}
USUAL = ("spectral-pixels", "spectral-embedding", "dct-pixels", "dct-embedding", "cb", "cb_s")
CLASSES, CHANNELS = 1000, 3
MOST_PROGRAMS = 64

Step = Callable[[int], None]


@dataclass
class Timed:
    """Seconds a step of each round, and the most memory beyond what lies on the device between steps."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    failure: str = ""


def checked_edits(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in EDITS:
            raise ValueError(f"edits must be some of {', '.join(EDITS)}, got {name!r}.")
    return list(dict.fromkeys(names))


def measure_steps(
    recipe: Recipe,
    edits: Sequence[str],
    device: torch.device,
    *,
    rounds: int,
    updates: int,
    tell: Callable[[str], None] = lambda text: None,
    warm_up: int | None = None,
) -> Iterator[dict[str, Timed]]:
    """All that was measured so far, after each round.

    Args:
        recipe: model, sizes, precision, ``compile`` as True or False; its own edits stay in every step.
        edits: names of :data:`EDITS`.
        tell: gets a line when something that takes long begins or ends.
        warm_up: untimed steps of each model, the first of which compiles it; None is three, or one on a CPU.
    """
    names = [PLAIN, *checked_edits(edits)]
    warm_up = warm_up or (1 if device.type == "cpu" else 3)
    results = {name: Timed() for name in names}
    steps: dict[str, Step] = {}
    # All models are compiled from the same functions.
    with generators_kept(), many_programs(MOST_PROGRAMS):
        for name in names:
            tell(f"{name}: building and warming up")
            before, graphs = time.perf_counter(), _graphs()
            try:
                step = bare_step(
                    replace(recipe, edits=(EDITS[name],) if name in EDITS else ()), device, CLASSES, CHANNELS
                )
                seconds_per_call(lambda step=step: step(1), warm_up, device)  # type: ignore[misc]
                if recipe.compile and _graphs() == graphs:
                    raise RuntimeError("compiled nothing of its own: it runs another model's code, or eager.")
            except Exception as error:
                if name == PLAIN:
                    raise
                results[name].failure = message(error)
                tell(f"{name} failed: {results[name].failure}")
                release(device)
                continue
            steps[name] = step
            tell(f"{name}: ready after {time.perf_counter() - before:.0f} s")
        for index in range(rounds):
            for name in in_turn(list(steps), index):
                _measure(steps[name], results[name], updates, device)
            tell(f"round {index + 1} of {rounds} done")
            yield results


def in_turn(names: Sequence[str], index: int) -> list[str]:
    """The order of a round: forth, back, forth, ...

    >>> in_turn(["plain", "cb"], 1)
    ['cb', 'plain']
    """
    return list(reversed(names)) if index % 2 else list(names)


def _measure(step: Step, result: Timed, updates: int, device: torch.device) -> None:
    step(1)  # the first one after another model finds its memory elsewhere
    with PeakMemory(device) as peak:
        result.seconds.append(seconds_per_call(lambda: step(updates), 1, device) / updates)
    if peak.bytes is not None:
        result.peak_bytes = max(peak.bytes, result.peak_bytes or 0)


def _graphs() -> int:
    """How many graphs torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One step of the table; times in milliseconds, the spread from the fastest to the slowest round."""

    edit: str
    rounds: int
    milliseconds: float | None = None
    low: float | None = None
    high: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    peak_gib: float | None = None
    peak_gib_over_plain: float | None = None
    floor: float | None = None
    added: float | None = None
    added_floor: float | None = None
    each_round: str = ""
    status: str = "ok"
    note: str = ""


def step_rows(results: Mapping[str, Timed], floors: Mapping[str, float] | None = None) -> list[StepRow]:
    """Medians, spreads and ratios.

    Args:
        floors: least seconds of the plain step, and of what each edit adds to it.
    """
    plain = results[PLAIN]
    return [_row(name, timed, plain, floors or {}) for name, timed in results.items()]


def _row(name: str, timed: Timed, plain: Timed, floors: Mapping[str, float]) -> StepRow:
    if timed.failure or not timed.seconds:
        return StepRow(edit=name, rounds=0, status="failed", note=timed.failure or "not measured")
    # A round that was cut short has no ratio.
    pairs = list(zip(timed.seconds, plain.seconds, strict=False))
    ratios = [own / other for own, other in pairs]
    added_floor = None if name == PLAIN else floors.get(name)
    floor = floors.get(PLAIN)
    if floor is not None and name != PLAIN:
        floor = None if added_floor is None else floor + added_floor
    return StepRow(
        edit=name,
        rounds=len(timed.seconds),
        milliseconds=statistics.median(timed.seconds) * 1e3,
        low=min(timed.seconds) * 1e3,
        high=max(timed.seconds) * 1e3,
        ratio=statistics.median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        peak_gib=_gib(timed.peak_bytes),
        peak_gib_over_plain=_gib(
            None
            if timed.peak_bytes is None or plain.peak_bytes is None
            else timed.peak_bytes - plain.peak_bytes
        ),
        floor=_milliseconds(floor),
        added=None if name == PLAIN else statistics.median(own - other for own, other in pairs) * 1e3,
        added_floor=_milliseconds(added_floor),
        each_round=" ".join(f"{seconds * 1e3:.3f}" for seconds in timed.seconds),
    )


def _gib(count: int | None) -> float | None:
    return None if count is None else count / 2**30


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


_OPTIMIZER_TOUCHES = 7
"""Numbers that AdamW moves for a weight: reads it, its gradient, two moments; writes all but the gradient."""


@dataclass(frozen=True)
class ModelSize:
    """What the floors need of a model; operations are one image's, forward."""

    operations: float
    weights: int
    patches: tuple[int, int]
    """Rows and columns of the matrix of pixel patches."""
    embedded: tuple[int, int]
    block_tokens: list[tuple[int, int]]


def model_size(recipe: Recipe) -> ModelSize:
    """Of the model of a recipe without edits, by one image through it on the CPU."""
    model = build_model(recipe, CLASSES, CHANNELS).model.eval()
    embedding = embeddings(model)[0].patch_convolution()
    if isinstance(embedding, str):
        raise ValueError(f"the floors need a patch embedding that is a convolution: {embedding}.")
    _, convolution = embedding
    seen: dict[str, list[tuple[int, ...]]] = {"patches": [], "blocks": []}
    handles = [convolution.register_forward_hook(lambda _m, _a, out: seen["patches"].append(out.shape))]
    handles += [block.module.register_forward_pre_hook(_note_shape(seen)) for block in blocks(model)]
    side = recipe.image_size or 224
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model(torch.zeros(1, CHANNELS, side, side))
    for handle in handles:
        handle.remove()
    (_, width, rows, columns) = seen["patches"][0]
    height, breadth = convolution.kernel_size
    count = rows * columns
    return ModelSize(
        operations=float(counted.get_total_flops()),
        weights=sum(parameter.numel() for parameter in model.parameters()),
        patches=(count, convolution.in_channels * height * breadth),
        embedded=(count, width),
        block_tokens=[(shape[-2], shape[-1]) for shape in seen["blocks"]],
    )


def _note_shape(seen: dict[str, list[tuple[int, ...]]]) -> Any:
    def note(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen["blocks"].append(arguments[0].shape)

    return note


def plain_work(size: ModelSize, batch: int, precision: str) -> Work:
    """Forward and twice as much backward, and the optimizer."""
    kind = "half" if precision == "bf16" else "fp32"
    return Work(_OPTIMIZER_TOUCHES * FLOAT * size.weights, {kind: 3 * size.operations * batch})


def added_work(edit: str, size: ModelSize, precision: str) -> Work:
    """What an edit adds for one image; pixels need no gradient."""
    itemsize = HALF if precision == "bf16" else FLOAT
    call = EDITS[edit]
    if call["edit"] == "broadcast_context":
        works = [
            broadcast_work(*tokens, scaled=call.get("scaled", False), itemsize=itemsize)
            for tokens in size.block_tokens
        ]
        return sum(works, Work())
    backward = call["where"] == "embedding"
    shape = size.embedded if backward else size.patches
    if call["method"] == "svd":
        return svd_work(*shape, backward=backward)
    itemsize = itemsize if backward else FLOAT
    if call["method"] == "dct":
        return dct_work(*shape, backward=backward, itemsize=itemsize)
    chain = chain_of(DEFAULT_EPS["spectral"])
    return spectral_work(*shape, chain, backward=backward, itemsize=itemsize)


def step_floors(recipe: Recipe, edits: list[str], peaks: Peaks) -> dict[str, float]:
    """Seconds: of the plain step, and of what each edit adds."""
    size = model_size(recipe)
    floors = {PLAIN: floor_of(plain_work(size, recipe.batch_size, recipe.precision), peaks).seconds}
    for edit in edits:
        work = added_work(edit, size, recipe.precision) * recipe.batch_size
        floors[edit] = floor_of(work, peaks).seconds
    return floors
