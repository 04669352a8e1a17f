"""What a person wants to know first: a headline, the worst place, what the edits changed, what to try next.

Sentences are lists of parts, of which a :class:`Name` is text that somebody else chose: the page keeps it
apart, so that it cannot run into the sentence around it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from wellposed.calls import GRAY
from wellposed.records import short
from wellposed.report.heat_maps import sorted_positions
from wellposed.report.material import Material, Subject
from wellposed.report.variants import (
    Change,
    Place,
    Worst,
    by_place,
    changes,
    kappa_text,
    mean_entropy,
    worst,
)
from wellposed.stats import Estimate, Median, median

LARGE_KAPPA = 1e3
DENSE = 0.95
"""Mean entropy from which attention is called dense."""
SEEDS = 3
MOST = 6
"""Variants in a table of a card; the large table has all."""
NAMED = 3
"""Variants that a sentence names."""


class Name(str):
    """A name of a run, a model or a class."""

    __slots__ = ()


class Code(str):
    """Something to type."""

    __slots__ = ()


class Strong(str):
    """The word of a cell that counts."""

    __slots__ = ()


class Listed(tuple[str, ...]):
    """Points under a sentence, folded where they are many."""

    __slots__ = ()


Sentence = tuple[str | Name | Code | Strong | Listed, ...]


@dataclass(frozen=True)
class Card:
    """Part of the page above the details.

    Args:
        title: a heading.
        sentences: each a paragraph.
        head: of a small table.
        rows: its cells.
    """

    title: str
    sentences: tuple[Sentence, ...] = ()
    head: tuple[str, ...] = ()
    rows: tuple[tuple[Sentence, ...], ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The top of the page; a card that would be empty is not among them."""

    headline: Sentence
    lead: Sentence
    cards: tuple[Card, ...]


def verdict(material: Material) -> Verdict:
    """Of everything that was read."""
    variants = material.variants()
    found = {name: bad for name, own in variants.items() if (bad := worst(own)) is not None}
    ranked = sorted(found, key=lambda name: (-found[name].bounds, -found[name].kappa.value))
    made = changes(material)
    known = [change for change in made if change.accuracy is not None]
    conditioning = _where(ranked[0], found[ranked[0]], len(variants)) if ranked else _without_kappa(material)
    cards = (
        Card(
            "What could not be read", tuple((Name(each.path), f": {each.what}") for each in material.damage)
        ),
        _worst_card(material, ranked, found),
        _changes_card(made),
        Card(
            "What the studies say",
            tuple((each.sentence, Listed(each.claims)) for each in material.conclusions),
        ),
        Card("What to try next", tuple(_next(material, made))),
    )
    return Verdict(
        headline=_accuracies(known) if known else conditioning,
        lead=conditioning if known and ranked else (),
        cards=tuple(card for card in cards if card.sentences or card.rows),
    )


def _accuracies(known: Sequence[Change]) -> Sentence:
    """What the edits did to accuracy, as far as the runs decide it."""
    of: dict[str, list[str]] = {"lower": [], "higher": [], "undecided": []}
    estimates = [change.accuracy for change in known if change.accuracy is not None]
    for change, estimate in zip(known, estimates, strict=True):
        of[estimate.direction].append(change.name)
    if len(of["undecided"]) == len(known):
        why = "zero is inside the interval" if len(known) == 1 else "zero is inside every interval"
        if any(estimate.p is None for estimate in estimates):
            single = any(estimate.n < 2 for estimate in estimates)
            why = "one run decides nothing" if single else "equal differences show no spread"
        if len(known) == 1:
            return ("Whether accuracy changes with ", Name(known[0].name), f" is undecided: {why}.")
        return (f"None of the {len(known)} differences in accuracy is decided: {why}.",)
    said: list[str | Name | Code | Strong | Listed] = ["Compared with no edits, accuracy is "]
    for place, word in enumerate(word for word in ("lower", "higher") if of[word]):
        said += [" and " if place else "", f"{word} with ", *_names(of[word])]
    if left := len(of["undecided"]):
        verb = "the other difference is" if left == 1 else "the others are"
        said.append(f"; {verb} undecided")
    return (*said, ".")


def _names(names: Sequence[str]) -> Iterator[str | Name]:
    if len(names) > NAMED:
        yield f"{len(names)} variants"
        return
    for place, name in enumerate(names):
        yield "" if not place else " and " if place == len(names) - 1 else ", "
        yield Name(name)


def _where(name: str, bad: Worst, variants: int) -> Sentence:
    """The worst variant of several, or the worst place of one."""
    several = ("Conditioning is worst with ", Name(name), ": ")
    if len(bad.places) > 1:
        said = f"kappa exceeds float32 resolution at {bad.bounds} of {bad.of} places"
        return (*several, f"{said}.") if variants > 1 else ("In ", Name(name), f" {said}.")
    said = f"kappa is {'at least ' if bad.kappa.at_least else ''}{short(math.exp(bad.kappa.value))}"
    where = _in_words(bad.places[0])
    if variants > 1:
        return (*several, f"{said} at {where}.")
    return ("The worst place in ", Name(name), f" is {where}: {said}.")


def _without_kappa(material: Material) -> Sentence:
    runs = len(material.subjects)
    return (f"No condition numbers are in {'this record' if runs == 1 else f'these {runs} records'}.",)


_WORDS = {
    "input": "what enters block {}",
    "attention.branch": "attention's output in block {}",
    "ffn.branch": "the FFN's output in block {}",
    "attention.sum": "what leaves attention in block {}",
    "ffn.sum": "what leaves block {}",
}


def _in_words(place: Place) -> str:
    block, position = place
    return _WORDS.get(position, f"{position} of block {{}}").format(block)


def _worst_card(material: Material, ranked: Sequence[str], found: dict[str, Worst]) -> Card:
    if not ranked:
        return Card("Worst place")
    variants = material.variants()
    plain = next((name for name in ranked if not variants[name][0].edits), ranked[0])
    said: list[Sentence] = []
    if times := _attention_and_ffn(variants[plain]):
        said.append(("In ", Name(plain), ", ", times))
    if found[ranked[0]].bounds:
        said.append(("≥ marks a lower bound: kappa exceeds float32 resolution, and bounds have no order.",))
    if all(subject.is_random for subject in material.subjects):
        said.append(("The weights were never trained; trained ones look different.",))
    if (left := len(ranked) - MOST) > 0:
        said.append((f"The table of all variants has {left} more.",))
    if len(ranked) == 1:
        return Card(
            "Worst place", tuple(said), ("position", "worst in", "kappa"), _by_position(variants[plain])
        )
    rows: list[tuple[Sentence, ...]] = []
    for name in ranked[:MOST]:
        bad = found[name]
        rows.append(((Name(name),), (bad.where(" places"),), (kappa_text(bad.kappa),)))
    return Card("Worst place", tuple(said), ("variant", "place", "kappa"), tuple(rows))


def _by_position(subjects: Sequence[Subject]) -> tuple[tuple[Sentence, ...], ...]:
    """Of one variant. A skip carries what came before it."""
    places = by_place(subjects)
    positions = sorted_positions(name for _, name in places if not name.endswith(".skip"))
    rows: list[tuple[Sentence, ...]] = []
    for position in positions:
        block = max((b for b, name in places if name == position), key=lambda b: places[b, position].value)
        at = places[block, position]
        rows.append(((position,), ("a bound" if at.at_least else f"block {block}",), (kappa_text(at),)))
    return tuple(rows)


def _attention_and_ffn(subjects: Sequence[Subject]) -> str:
    """The papers' point. A ratio of two bounds says nothing."""
    places = by_place(subjects)
    attention, ffn = (_over_blocks(places, f"{role}.branch") for role in ("attention", "ffn"))
    if attention is None or ffn is None:
        return ""
    worse = attention.value > ffn.value
    larger, smaller = (attention, ffn) if worse else (ffn, attention)
    ratio = math.exp(larger.value - smaller.value)
    if smaller.at_least:
        return ""
    if ratio < 1.05 and not larger.at_least:
        return "attention's output is about as well conditioned as the FFN's."
    at_least = "at least " if larger.at_least else ""
    return (
        f"attention's output is {at_least}{short(ratio)} times {'worse' if worse else 'better'} conditioned "
        "than the FFN's (medians over the blocks)."
    )


def _over_blocks(places: dict[Place, Median], position: str) -> Median | None:
    """Ln kappa, the median."""
    known = [log for (_, where), log in places.items() if where == position]
    return median([log.value for log in known], [log.at_least for log in known]) if known else None


def _changes_card(made: Sequence[Change]) -> Card:
    columns: list[tuple[str, Callable[[Change], Sentence]]] = [("variant", lambda each: (Name(each.name),))]
    if any(each.accuracy for each in made):
        columns.append(("accuracy, points", lambda each: _cell(each.accuracy, _points)))
    if any(each.after for each in made):
        columns.append(("kappa of what leaves the last block, and its ratio", _kappa_cell))
    if any(each.entropy for each in made):
        columns.append(("entropy of attention", lambda each: _cell(each.entropy, _fraction)))
    if len(columns) == 1:
        return Card("What changed")
    baselines = list(dict.fromkeys(each.baseline for each in made))
    plain = _names(baselines) if len(baselines) <= NAMED else ["the variants without edits"]
    said: list[Sentence] = [
        ("Compared with ", *plain, "; in brackets the interval of 95%; one run has none.")
    ]
    if any(each.ln_kappa for each in made):
        said.append(("Kappa is a median over the runs; ratios are geometric means, taken seed by seed.",))
    if any(each.differs for each in made):
        said.append(("Some of these recipes differ in more than their edits; provenance lists the fields.",))
    if (left := len(made) - MOST) > 0:
        said.append((f"The table of all variants has {left} more.",))
    rows = tuple(tuple(cell(each) for _, cell in columns) for each in made[:MOST])
    return Card("What changed", tuple(said), tuple(title for title, _ in columns), rows)


def _points(value: float) -> str:
    return f"{value:+.1f}"


def _fraction(value: float) -> str:
    return f"{value:+.3f}"


def _times(log: float) -> str:
    return short(math.exp(log))


def _cell(difference: Estimate | None, number: Callable[[float], str]) -> Sentence:
    if difference is None:
        return ("-",)
    word = difference.direction
    return (Strong(word) if difference.is_decided else word, f" {_with_interval(difference, number)}")


def _with_interval(difference: Estimate, number: Callable[[float], str], unit: str = "") -> str:
    mean = number(difference.mean) + unit
    if difference.p is None or math.isinf(difference.low) or math.isinf(difference.high):
        return mean
    return f"{mean} [{number(difference.low)}, {number(difference.high)}]"


def _kappa_cell(change: Change) -> Sentence:
    """Before and after, and the ratio where there is one."""
    if change.before is None or change.after is None:
        return ("-",)
    arrow = f"{kappa_text(change.before)} → {kappa_text(change.after)}"
    ratio = change.ln_kappa
    if ratio is None:
        return (arrow,)
    if change.after.at_least or ratio.at_least:
        return (f"{arrow}, at least {_times(ratio.mean)} times",) if ratio.at_least else (arrow,)
    word = {"higher": "worse", "lower": "better"}.get(ratio.direction, "undecided")
    said = f" {arrow}, {_with_interval(ratio, _times, ' times')}"
    return (Strong(word) if ratio.is_decided else word, said)


def _next(material: Material, made: Sequence[Change]) -> list[Sentence]:
    said = list(_advice(material, made))
    if not said and any(subject.select("kappa") for subject in material.subjects):
        said = [
            ("Nothing in these records asks for an edit: an ill-conditioned output of attention is normal.",),
            ("The page Fix my model of the documentation says which edit fits which symptom.",),
        ]
    return said


def _advice(material: Material, made: Sequence[Change]) -> Iterator[Sentence]:
    every = material.subjects
    if left := len(material.unfinished):
        yield (
            f"{left} run{'' if left == 1 else 's'} did not finish and count{'s' if left == 1 else ''} in no "
            "mean: the same ",
            Code("wellposed train"),
            " command resumes.",
        )
    places = [by_place(own) for own in material.variants().values()]
    if any(log.at_least for of in places for log in of.values()):
        if any(subject.has("remove_skips", ("attention", "both", "all")) for subject in every):
            yield (
                "Keep attention's skips: without them kappa exceeds float32 resolution. ",
                Code("wp.restore(model)"),
                " puts them back.",
            )
        else:
            yield (
                "Where kappa exceeds float32 resolution, look at the effective rank instead: ",
                Code("wellposed diagnose MODEL --what tokens"),
                ".",
            )
    entering = [log.value for of in places for (_, position), log in of.items() if position == "input"]
    if entering and max(entering) >= math.log(LARGE_KAPPA) and not any(each.has(GRAY) for each in every):
        yield (
            "Kappa of what enters the blocks is large: try training with graying, ",
            Code("wellposed train --edit 'gray_tokens eps=0.7'"),
            ". It hardly changes attention's own output, and trained weights lose accuracy until they are "
            "trained with it.",
        )
    dense = [v for each in every if not each.is_random and (v := mean_entropy(each)) is not None]
    if dense and max(dense) >= DENSE and not any(each.has("broadcast_context") for each in every):
        yield (
            f"Attention is dense (mean entropy up to {max(dense):.3f}). Context Broadcasting was made for "
            "that, in models with a class token; in mean-pooled ones it cost accuracy in our runs. Plain CB "
            "ruins trained weights at once, CB_S from the identity changes nothing until it is trained: ",
            Code('wp.broadcast_context(model, scaled=True, init="identity")'),
            ".",
        )
    runs = [len(own) for own in material.variants().values() if own[0].kind == "run" and own[0].counts]
    open_ones = [each for each in made if each.accuracy and not each.accuracy.is_decided]
    if runs and min(runs) < SEEDS:
        yield (
            f"Some variants have fewer than {SEEDS} seeds, and one run decides nothing: ",
            Code("wellposed sweep RECIPES --seeds 0-2"),
            ".",
        )
    elif open_ones:
        yield (
            "More seeds narrow the intervals of what is undecided: ",
            Code("wellposed sweep RECIPES --seeds 0-9"),
            ".",
        )
