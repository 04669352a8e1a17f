"""Signs of a collapse, in the records of a model at one moment: by name, with the evidence and what to try.

| name | sign | source |
| --- | --- | --- |
| not finite | NaN or infinity in tokens or gradients | - |
| rank collapse | at a block's output the mean has 99% of the tokens' square norm | arXiv 2206.03126 |
| entropy collapse | the entropy of a block's attention is below 0.2 of its maximum | arXiv 2303.06296 |
| outlier tokens | at a block's output a token is longer than 5 median ones | arXiv 2309.16588 |
| dead block | its branches add less than 1e-7 of the stream, or its gradient is 0 | - |
| kappa rising | kappa into a block is 10 times that of the first measurement | arXiv 2505.01996 |

For comparison: a DeiT-Ti trained on ImageNet-1k has at its blocks' outputs a share of the mean of 0.26 to
0.38, a longest token of 1.5 to 2.4 medians, and entropies of 0.47 to 0.82. Untrained ViT-Ti have shares below
0.44, and without the skips of attention above 0.99 from block 1 on. All on 8 images of 224 px.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from wellposed.records import Record, of_outputs, short
from wellposed.text import ranges

Name = Literal[
    "not finite", "rank collapse", "entropy collapse", "outlier tokens", "dead block", "kappa rising"
]
RANK = 0.99
ENTROPY = 0.2
OUTLIERS = 5.0
DEAD = 1e-7
KAPPA_RISE = 10.0

_REMEDIES: dict[Name, str] = {
    "not finite": "lower the learning rate, or wp.normalise_spectrum(model, 'attention') before training",
    "rank collapse": "keep or restore the skips of attention, or before training "
    "wp.initialise(model, 'skipless'); for a trained model wp.broadcast_context(model, scaled=True, "
    "init='identity') learns how much of the mean stays",
    "entropy collapse": "wp.normalise_spectrum(model, 'attention') before training, or a lower learning rate",
    "outlier tokens": "register tokens (reg_tokens=4 of timm's models) where the model is trained again",
    "dead block": "wp.initialise(model, 'timm', blocks=BLOCKS) draws it again; a larger layer scale",
    "kappa rising": "wp.gray_tokens(model, where='blocks') or wp.condition_weights(model) before training, "
    "or a lower learning rate",
}


@dataclass(frozen=True)
class Alarm:
    """A sign of a collapse.

    Args:
        name: of the collapse.
        blocks: in which it is seen; none for the whole model.
        evidence: the numbers, in words.
        remedy: what to try.
        step: of the training, None outside of one.

    >>> print(alarm("dead block", (3,), "it adds nothing, or gets no gradient"))
    dead block: it adds nothing, or gets no gradient; try: wp.initialise(model, 'timm', blocks=[3]) draws it
    again; a larger layer scale
    """

    name: Name
    blocks: tuple[int, ...]
    evidence: str
    remedy: str
    step: int | None = None

    def __str__(self) -> str:
        when = "" if self.step is None else f" at step {self.step}"
        return f"{self.name}{when}: {self.evidence}; try: {self.remedy}"


def signs(records: Sequence[Record], gradients: Mapping[int, float] | None = None) -> list[Alarm]:
    """The signs of a collapse in records of conditioning, density and tokens.

    Args:
        records: of one model.
        gradients: norms by block, of a training step.
    """
    gradients = gradients or {}
    found: list[Alarm] = []
    if bad := next((r for r in records if r.measure == "token norm" and None in r.samples), None):
        said = f"tokens that are not finite first at {bad.position} of {bad.module}"
        found.append(alarm("not finite", () if bad.block is None else (bad.block,), said))
    elif blocks := tuple(block for block, norm in sorted(gradients.items()) if not math.isfinite(norm)):
        # A backward pass begins at the last block.
        said = f"gradients that are not finite, in the backward pass first in block {blocks[-1]}"
        found.append(alarm("not finite", blocks, said))
    outputs = of_outputs(records)
    shares = {r.block: r.value for r in outputs if r.measure == "mean share"}
    outliers = {r.block: r.value for r in outputs if r.measure == "outlier tokens"}
    entropies = {r.block: r.value for r in records if r.measure == "entropy" and r.head is None}
    found += _beyond(
        "rank collapse",
        shares,
        lambda x: x > RANK,
        lambda x: f"the tokens' mean holds {100 * x:.4g}% of their square norm",
    )
    found += _beyond(
        "entropy collapse", entropies, lambda x: x < ENTROPY, lambda x: f"entropy {short(x)} of its maximum"
    )
    found += _beyond(
        "outlier tokens", outliers, lambda x: x > OUTLIERS, lambda x: f"a token of {short(x)} median norms"
    )
    dead = _dead(records)
    if largest := max((norm for norm in gradients.values() if math.isfinite(norm)), default=0.0):
        dead |= {block: norm / largest for block, norm in gradients.items() if norm == 0}
    found += _beyond("dead block", dead, lambda x: x < DEAD, lambda x: "it adds nothing, or gets no gradient")
    return found


def risen(first: Iterable[Record], now: Iterable[Record]) -> list[Alarm]:
    """The alarm of a kappa that has become :data:`KAPPA_RISE` times what it was; none of bounds of before.

    A bound of now may be far larger, so that it rises at least as much.
    """
    before = {r.block: r for r in first if _is_kappa_in(r)}
    factors: dict[int | None, float | None] = {}
    for record in now:
        old = before.get(record.block) if _is_kappa_in(record) else None
        if old is not None and old.status == "ok" and old.value and record.value is not None:
            factors[record.block] = record.value / old.value
    return _beyond(
        "kappa rising",
        factors,
        lambda x: x > KAPPA_RISE,
        lambda x: f"kappa into it is at least {short(x)} times that of the first measurement",
    )


def _beyond(
    name: Name,
    values: Mapping[int | None, float | None],
    is_beyond: Callable[[float], bool],
    words: Callable[[float], str],
) -> list[Alarm]:
    """One alarm for the blocks whose value is beyond a threshold, with the first of them in words."""
    found = {
        block: value
        for block, value in values.items()
        if block is not None and value is not None and is_beyond(value)
    }
    if not found:
        return []
    blocks = tuple(sorted(found))
    last = max(block for block in values if block is not None)
    is_rest = blocks == tuple(range(blocks[0], last + 1)) and len(blocks) > 1
    where = f"from block {blocks[0]} on" if is_rest else f"in block{'s' * (len(blocks) > 1)} {ranges(blocks)}"
    return [alarm(name, blocks, f"{where} ({words(found[blocks[0]])} in block {blocks[0]})")]


def alarm(name: Name, blocks: tuple[int, ...], evidence: str) -> Alarm:
    """One with the remedy of its name."""
    return Alarm(name, blocks, evidence, _REMEDIES[name].replace("BLOCKS", str(list(blocks))))


def _dead(records: Sequence[Record]) -> dict[int | None, float | None]:
    """By block, the largest share of the stream that one of its branches adds."""
    norms = {(r.block, r.position): r.value for r in records if r.measure == "token norm"}
    shares: dict[int | None, float | None] = {}
    for (block, position), norm in norms.items():
        role, _, part = position.partition(".")
        stream = norms.get((block, f"{role}.sum"))
        if part == "branch" and norm is not None and stream:
            shares[block] = max(shares.get(block) or 0.0, norm / stream)
    return shares


def _is_kappa_in(record: Record) -> bool:
    return record.measure == "kappa" and record.position == "input"
