"""The verdict in words: the worst place, what the edits changed, what to try next.

Sentences are lists of parts, of which a :class:`Name` is text that somebody else chose: the page keeps it
apart, so that it cannot run into the sentence around it.
"""

import math
from collections.abc import Iterator, Sequence

from wellposed.calls import GRAY
from wellposed.records import Record, short
from wellposed.report.comparing import (
    accuracy,
    has_bounds,
    largest_log,
    mean_entropy,
    mean_log,
    worst,
    worst_places,
)
from wellposed.report.subjects import Material, Subject
from wellposed.stats import spread

LARGE_KAPPA = 1e3
DENSE = 0.95
"""Mean entropy from which attention is called dense."""
SEEDS = 3
MOST_WORST = 3
MOST_TIED = 4
MOST = 8
"""Variants that get a sentence; the table has all."""


class Name(str):
    """A name of a run, a model or a class."""

    __slots__ = ()


class Edits(str):
    """Edits in words, which hold the names of modules."""

    __slots__ = ()


class Code(str):
    """Something to type."""

    __slots__ = ()


class Listed(tuple[str, ...]):
    """Points under a sentence."""

    __slots__ = ()


Sentence = tuple[str | Name | Edits | Code | Listed, ...]


def verdict(material: Material) -> dict[str, list[Sentence]]:
    """Heading -> sentences; a heading without sentences is skipped."""
    groups = material.groups()
    counted = _counted(groups)
    parts: dict[str, list[Sentence]] = {
        "What could not be read": [(Name(each.path), f": {each.what}") for each in material.damage],
        "What is worst": list(_worst(groups)),
        "What the edits changed": list(_changes(counted)),
        "What the studies say": [(each.sentence, Listed(each.claims)) for each in material.conclusions],
        "What to try next": list(_next(material, counted)),
    }
    return {title: sentences for title, sentences in parts.items() if sentences}


def _counted(groups: dict[str, list[Subject]]) -> dict[str, list[Subject]]:
    """What means are taken over."""
    kept = {name: [each for each in of if each.counts] for name, of in groups.items()}
    return {name: of for name, of in kept.items() if of}


def _worst(groups: dict[str, list[Subject]]) -> Iterator[Sentence]:
    found = []
    for subjects in groups.values():
        known = [(subject, record) for subject in subjects if (record := worst(subject)) is not None]
        if known:
            found.append(max(known, key=lambda pair: pair[1].value or 0.0))
    if not found:
        yield ("No condition numbers are in these records.",)
        return
    found.sort(key=lambda pair: pair[1].value or 0.0, reverse=True)
    for subject, record in found[:MOST_WORST]:
        images = f", median over {record.images} images" if record.images else ""
        if len(tied := worst_places(subject)) > 1:
            yield _tied(subject, tied, record, images)
            continue
        yield (
            "In ",
            Name(subject.name),
            f" the worst place is block {record.block}, {record.position}: kappa {record.text()} "
            f"(ln kappa {record.log:.2f}{images}).{_comparison(subject)}",
        )
    if len(found) > MOST_WORST:
        left = len(found) - MOST_WORST
        yield (f"The other variants, {left} in number, are better; the table below has them.",)


def _tied(subject: Subject, tied: Sequence[Record], largest: Record, images: str) -> Sentence:
    """Bounds cannot be ranked."""
    named = [f"block {record.block}, {record.position}" for record in tied]
    more = f"; and {len(named) - MOST_TIED} more" if len(named) > MOST_TIED else ""
    return (
        "In ",
        Name(subject.name),
        f" the worst place is not known: kappa exceeds what the arithmetic resolves at {len(tied)} places "
        f"({'; '.join(named[:MOST_TIED])}{more}), where it is at least {short(_least(tied))}, up to "
        f"{largest.text()}{images}.{_comparison(subject)}",
    )


def _least(records: Sequence[Record]) -> float:
    return min(record.value or 0.0 for record in records)


def _comparison(subject: Subject) -> str:
    """Attention compared with the FFN, which is the papers' point; a ratio of two bounds says nothing."""
    attention, ffn = (mean_log(subject, f"{role}.branch") for role in ("attention", "ffn"))
    if attention is None or ffn is None:
        return ""
    more, times = attention > ffn, short(math.exp(abs(attention - ffn)))
    larger, smaller = ("attention", "ffn") if more else ("ffn", "attention")
    if has_bounds(subject, f"{smaller}.branch"):
        return ""
    if has_bounds(subject, f"{larger}.branch"):
        times = f"at least {times}"
    return (
        f" Over the blocks, what attention adds is {times} times {'worse' if more else 'better'} conditioned "
        "than what the FFN adds."
    )


def _changes(groups: dict[str, list[Subject]]) -> Iterator[Sentence]:
    count = 0
    for name, subjects in groups.items():
        edits = subjects[0].edits
        plain = next(
            (
                (other, of)
                for other, of in groups.items()
                if not of[0].edits and of[0].key == subjects[0].key and of[0].kind == subjects[0].kind
            ),
            None,
        )
        if not edits or plain is None:
            continue
        count += 1
        if count > MOST:
            continue
        parts = [text for text in (_accuracy(subjects, plain[1]), _kappa(subjects, plain[1])) if text]
        parts += [text for text in (_entropy(subjects, plain[1]),) if text]
        if parts:
            named = "; ".join(edits)
            of_edits: Sentence = () if named == name else (" (", Edits(named), ")")
            yield (Name(name), *of_edits, " compared with ", Name(plain[0]), f": {'; '.join(parts)}.")
    if count > MOST:
        yield (f"{count - MOST} more edited variants are in the table below.",)


def _accuracy(edited: Sequence[Subject], plain: Sequence[Subject]) -> str:
    a, b = spread(map(accuracy, edited)), spread(map(accuracy, plain))
    if a is None or b is None:
        return ""
    change = a.mean - b.mean
    said = f"accuracy {b.mean:.2f} → {a.mean:.2f} % ({change:+.2f} points, n = {b.n} and {a.n})"
    known = [each.deviation for each in (a, b) if each.deviation is not None]
    if not known:
        return f"{said}, one run a side, so no deviation to hold it against"
    deviation, how = math.hypot(*known), ""
    first, second = (_by_seed(subjects) for subjects in (edited, plain))
    if first.keys() == second.keys() and len(first) == a.n == b.n:
        # As the studies do: what a seed does to both sides is no doubt about their difference.
        paired = spread(first[seed] - second[seed] for seed in first)
        if paired is not None and paired.deviation is not None:
            deviation, how = paired.deviation, ", seed by seed"
    more = "more" if abs(change) > deviation else "less"
    return f"{said}, {more} than its deviation of {deviation:.2f}{how}"


def _by_seed(subjects: Sequence[Subject]) -> dict[int, float]:
    return {
        subject.seed: value
        for subject in subjects
        if subject.seed is not None and (value := accuracy(subject)) is not None
    }


def _kappa(edited: Sequence[Subject], plain: Sequence[Subject]) -> str:
    parts = []
    for position in ("input", "attention.branch", "ffn.branch"):
        a = spread(mean_log(subject, position) for subject in edited)
        b = spread(mean_log(subject, position) for subject in plain)
        if a is not None and b is not None:
            before, after = (
                "≥ " if any(has_bounds(each, position) for each in of) else "" for of in (plain, edited)
            )
            parts.append(f"{position} {before}{b.mean:.2f} → {after}{a.mean:.2f}")
    return f"mean ln kappa of {', '.join(parts)}" if parts else ""


def _entropy(edited: Sequence[Subject], plain: Sequence[Subject]) -> str:
    a, b = spread(map(mean_entropy, edited)), spread(map(mean_entropy, plain))
    return "" if a is None or b is None else f"mean entropy {b.mean:.4f} → {a.mean:.4f}"


def _next(material: Material, groups: dict[str, list[Subject]]) -> Iterator[Sentence]:
    every = material.subjects
    has_grayed = any(subject.has(GRAY) for subject in every)
    if left := len(material.unfinished):
        yield (
            f"{left} run{'' if left == 1 else 's'} did not finish and count{'s' if left == 1 else ''} in no "
            "mean: the same ",
            Code("wellposed train"),
            " command resumes it.",
        )
    if any(record is not None and record.status == "at least" for record in map(worst, every)):
        advice = "Some tokens exceed float32 resolution: they may be rank deficient. "
        if any(subject.has("remove_skips", ("attention", "both", "all")) for subject in every):
            yield (advice + "Put attention's skips back first (", Code("wp.restore(model)"), ").")
        else:
            yield (advice + "Look at those blocks first.",)
    entering = [log for each in every if (log := largest_log(each, "input")) is not None]
    if entering and max(entering) >= math.log(LARGE_KAPPA) and not has_grayed:
        yield (
            "Kappa of what enters the blocks is large and nothing is grayed: try training with it, ",
            Code("wellposed train --edit 'gray_tokens eps=0.7'"),
            ". It hardly moves the kappa of attention's own output, and in trained weights it costs accuracy "
            "until they are trained with it.",
        )
    elif has_grayed:
        yield (
            "Tokens are grayed already: try another eps or place (",
            Code("python -m studies eps-sweep"),
            ").",
        )
    dense = [v for each in every if not each.is_random and (v := mean_entropy(each)) is not None]
    if dense and max(dense) >= DENSE and not any(each.has("broadcast_context") for each in every):
        yield (
            f"Attention is dense (mean entropy up to {max(dense):.3f}), which Context Broadcasting was "
            "made for. Plain CB takes most of the accuracy of trained weights at once, and in our runs from "
            "scratch CB in the MLP cost 3 to 5 points on natural images. CB_S from the identity changes "
            "nothing until it is trained: ",
            Code('wp.broadcast_context(model, scaled=True, init="identity")'),
            ".",
        )
    runs = [len(of) for of in groups.values() if of[0].kind == "run"]
    if runs and min(runs) < SEEDS:
        yield (
            f"Some variants have fewer than {SEEDS} seeds; differences of single runs are often chance: ",
            Code("wellposed sweep RECIPES --seeds 0-2"),
            ".",
        )
