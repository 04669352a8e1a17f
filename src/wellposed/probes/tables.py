"""Tables of records, as text and as HTML in which a bad condition number is red."""

import html
import itertools
import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wellposed.linalg import KAPPA_LIMIT
from wellposed.records import BOUNDED, VERDICTS, Record, of_outputs, short
from wellposed.text import aligned

_IN_GRIDS = {
    "token norm": "norm of the tokens, median over them",
    "outlier tokens": "the longest token over the median one",
    "norm kurtosis": "kurtosis of the tokens' norms, 3 for a normal law",
    "mean share": "of the tokens' square norm, that of their mean",
    "weight kappa": "condition number of the weights",
    "weight stable rank": "of the weights, square Frobenius norm over square spectral norm",
    "gradient norm": "of the output in a fixed direction, by the block's parameters",
}
"""Measures with a table of their own, blocks by positions, and what it says under it."""
_IN_BLOCK_TABLE = ("kappa", "entropy", *_IN_GRIDS)
_NOT_SHOWN = (
    "rank deficient",
    "effective rank",
    "stable rank",
    "spectrum",
    "softmax jacobian frobenius",
    "softmax jacobian trace",
    "distance from uniform",
    "ntk lambda max",
    "ntk lambda min",
    "ntk trace",
    "image",
    "attention picture",
    "attention rollout",
)
MOST_PAIRS = 40
_BLOCK = ("block", "module")
TOKEN_MEASURES = ("token norm", "outlier tokens", "norm kurtosis", "mean share")

WIDTH = 80
"""Columns of a terminal, which captions keep to."""


Pair = tuple[Record, Record]


@dataclass(frozen=True)
class Table:
    """Rows of cells under titles.

    Args:
        caption: what they say.
        titles: of the columns.
        rows: one text a column.
        right: columns of numbers, which a terminal aligns to the right.
        lines: the titles for a terminal, where they take several lines.
        heat: of each cell, from 0 (good) to 1 (bad), None for no colour; empty for a table without colours.
    """

    caption: str
    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: Sequence[int] = ()
    lines: Sequence[tuple[str, ...]] = ()
    heat: Sequence[tuple[float | None, ...]] = ()


def block_table(records: Sequence[Record]) -> Table:
    """One row a block: kappa at its positions, and the entropy of its attention. The worst block first."""
    kappas = {(r.block, r.position): r for r in records if r.measure == "kappa" and r.head is None}
    entropies = {r.block: r for r in records if r.measure == "entropy" and r.head is None}
    # A skip carries what came before it.
    positions = [each for each in dict.fromkeys(where for _, where in kappas) if not each.endswith(".skip")]
    names = {r.block: r.module for r in (*kappas.values(), *entropies.values())}
    worst_first = sorted(names, key=lambda block: _badness(block, kappas), reverse=True)
    rows, heat = [], []
    for block in worst_first:
        cells = [kappas.get((block, position)) for position in positions]
        density = [_four_digits(entropies.get(block))] if entropies else []
        rows.append((str(block), names[block], *map(_text, cells), *density))
        heat.append((None, None, *map(_heat, cells), *(None for _ in density)))
    last = ("entropy",) if entropies else ()
    titles = (*_BLOCK, *(f"kappa {position}" for position in positions), *last)
    # A terminal has roles above parts, and no kappa, which is in the caption.
    parts = [position.rpartition(".") for position in positions]
    lines = [("", "", *(role for role, _, _ in parts), *("" for _ in last))]
    lines += [(*_BLOCK, *(dot + part for _, dot, part in parts), *last)]
    said = []
    if kappas:
        said.append("kappa (condition number) of the tokens at each position, median over the images")
    if entropies:
        said.append("entropy of the attention rows, 1 is uniform")
    said.append("worst block first")
    if any(r.status == "at least" for r in kappas.values()):
        said.append("≥ is a lower bound: float32 resolves no more")
    if sum(_is_ranked_by_a_bound(block, kappas) for block in names) > 1:
        said.append("blocks ranked by a bound have no order among them")
    right = range(len(_BLOCK), len(titles))
    return Table("; ".join(said), titles, tuple(rows), right, [line for line in lines if any(line)], heat)


def token_table(records: Sequence[Record]) -> Table:
    """Where the tokens of the blocks' outputs are most and least alike, and most and least unequal."""
    rows = []
    for measure in ("outlier tokens", "mean share"):
        found = [r for r in of_outputs(records) if r.measure == measure and r.value is not None]
        if found:
            found.sort(key=lambda r: r.value or 0.0)
            ends = (found[0], found[-1])
            rows.append((measure, *(cell for r in ends for cell in (r.text(), str(r.block)))))
    titles = ("tokens of the outputs", "least", "in block", "most", "in block")
    caption = "outlier tokens: the longest over the median one; mean share: of the square norm, the mean's"
    return Table(caption, titles, tuple(rows), right=range(1, len(titles)))


def grid_tables(records: Sequence[Record]) -> list[Table]:
    """For each measure of tokens, weights and gradients, blocks by positions."""
    tables = []
    for measure, words in _IN_GRIDS.items():
        found = {(r.block, r.position): r for r in records if r.measure == measure}
        if not found:
            continue
        positions = list(dict.fromkeys(position for _, position in found))
        names = {r.block: r.module for r in found.values()}
        rows = [
            (str(block), name, *(_text(found.get((block, position))) for position in positions))
            for block, name in names.items()
        ]
        titles = (*_BLOCK, *(position or measure for position in positions))
        tables.append(
            Table(f"{measure}: {words}", titles, tuple(rows), right=range(len(_BLOCK), len(titles)))
        )
    return tables


def rest_table(records: Sequence[Record]) -> Table:
    """What the other tables do not hold: Jacobian and NTK."""
    elsewhere = (*_IN_BLOCK_TABLE, *_NOT_SHOWN, *BOUNDED)
    shown = [r for r in records if r.measure not in elsewhere and not r.verdicts and r.head is None]
    rows = [(r.measure, _place(r), r.text(), _bar(r), r.note) for r in shown]
    return Table("", ("measure", "where", "value", "error bar", "note"), tuple(rows), right=(2,))


def bounds_table(records: Sequence[Record]) -> Table:
    """A line for each measure that has a bound: for how many images (or windows) it holds, by which margin.

    The median margin is that of the records' medians, the smallest that of any image, as the counts are.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.verdicts:
            groups.setdefault(record.measure + ("" if record.head is None else ", heads"), []).append(record)
    rows = []
    for name, group in groups.items():
        counts = (str(sum(counts)) for counts in zip(*(record.verdicts for record in group), strict=True))
        margins = [record.margins for record in group if record.margins]
        shown = ("-", "-")
        if margins:
            typical, smallest = zip(*margins, strict=True)
            shown = (f"x{short(statistics.median(typical))}", f"x{short(min(smallest))}")
        rows.append((name, *counts, *shown))
    titles = ("bound", *VERDICTS, "median margin", "smallest")
    return Table("how many images, windows and heads; margin: bound / measured", titles, tuple(rows))


def pair_table(pairs: Sequence[Pair], names: tuple[str, str]) -> Table:
    """Pairs of records, as :func:`most_changed_first` sorts them, and their ratio."""
    known = [(a, b) for a, b in pairs if a.value is not None and b.value is not None]
    rows = [(a.measure, _place(a), a.text(), b.text(), _ratio(a, b)) for a, b in known[:MOST_PAIRS]]
    titles = ("measure", "where", *names, "ratio")
    heat = [(None, None, _heat(a), _heat(b), None) for a, b in known[:MOST_PAIRS]]
    left = len(known) - len(rows)
    caption = "the largest change first" + (f"; {left} more pairs in .pairs" if left else "")
    return Table(caption, titles, tuple(rows), heat=heat)


def most_changed_first(pairs: Sequence[Pair]) -> list[Pair]:
    """Sorted by the ratio of the values; of two bounds nothing is known, and they come last."""
    return sorted(pairs, key=lambda pair: _change(*pair), reverse=True)


def without_repeats(pairs: Sequence[Pair]) -> list[Pair]:
    """Without the positions whose tokens are those of a position before, in both diagnoses.

    A skip carries what came before it, and the input of a block is the last sum of the one before; unless
    something was inserted between them.
    """
    seen: dict[tuple[Any, ...], set[Any]] = {}
    kept = []
    for a, b in pairs:
        numbers = (a.value, a.samples, a.curve, b.value, b.samples, b.curve)
        block = a.block if a.position.endswith(".skip") else None if a.block is None else a.block - 1
        is_stream = a.position == "input" or a.position.endswith(".skip")
        is_repeat = is_stream and numbers in seen.get((a.measure, block), ())
        if a.position == "input" or a.position.endswith(".sum"):
            seen.setdefault((a.measure, a.block), set()).add(numbers)
        if not is_repeat:
            kept.append((a, b))
    return kept


def as_text(table: Table) -> str:
    """The table for a terminal, in 80 columns for most models."""
    if not table.rows:
        return ""
    rows, caption = table.rows, table.caption
    if "module" in table.titles:
        at = table.titles.index("module")
        shared = _shared_path([row[at] for row in rows])
        rows = tuple((*row[:at], row[at].removeprefix(shared), *row[at + 1 :]) for row in rows)
        caption = f"modules are in {shared.removesuffix('.')}; {caption}" if shared else caption
    text = aligned([*(table.lines or [table.titles]), *rows], right=table.right)
    return f"{text}\n{textwrap.fill(caption, WIDTH)}" if caption else text


def _shared_path(names: Sequence[str]) -> str:
    """What all names begin with, without the last two parts of any.

    >>> _shared_path(["vit.encoder.layer.0", "vit.encoder.layer.1"]), _shared_path(["blocks.0", "blocks.1"])
    ('vit.encoder.', '')
    """
    parts = [name.split(".")[:-2] for name in names]
    levels = zip(*parts, strict=False)
    return "".join(f"{level[0]}." for level in itertools.takewhile(lambda level: len({*level}) == 1, levels))


def as_html(title: str, tables: Sequence[Table], lines: Sequence[str]) -> str:
    parts = [f"<div class='wellposed'><p><b>{html.escape(title)}</b></p>"]
    for table in tables:
        if not table.rows:
            continue
        head = "".join(f"<th style='text-align:left'>{html.escape(name)}</th>" for name in table.titles)
        heat = table.heat or [(None,) * len(table.titles)] * len(table.rows)
        body = "".join(
            f"<tr>{''.join(map(_cell, row, heats))}</tr>" for row, heats in zip(table.rows, heat, strict=True)
        )
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        parts.append(f"<p>{html.escape(table.caption)}</p>" if table.caption else "")
    parts += [f"<p>{html.escape(line)}</p>" for line in lines]
    return "".join(parts) + "</div>"


def _cell(text: str, heat: float | None) -> str:
    style = ""
    if heat is not None:  # from white to a red on which black text can be read
        green, blue = 255 - round(115 * heat), 255 - round(125 * heat)
        style = f" style='background:rgb(255,{green},{blue});color:#000'"
    return f"<td{style}>{html.escape(text)}</td>"


def _badness(block: int | None, kappas: dict[tuple[int | None, str], Record]) -> tuple[float, float, int]:
    logs = [r.log or 0.0 for (index, _), r in kappas.items() if index == block and r.value is not None]
    return (max(logs, default=0.0), sum(logs), -(block or 0))


def _is_ranked_by_a_bound(block: int | None, kappas: dict[tuple[int | None, str], Record]) -> bool:
    own = [r for (index, _), r in kappas.items() if index == block and r.log is not None]
    return bool(own) and max(own, key=lambda r: r.log or 0.0).status == "at least"


def _heat(record: Record | None) -> float | None:
    if record is None or "kappa" not in record.measure or record.log is None:
        return None
    return min(max(record.log / math.log(KAPPA_LIMIT), 0.0), 1.0)


def _text(record: Record | None) -> str:
    return "-" if record is None else record.text()


def _four_digits(record: Record | None) -> str:
    # Dense attention has an entropy near 1, and its last digits distinguish the blocks.
    return "-" if record is None or record.value is None else f"{record.value:.4f}"


def _place(record: Record) -> str:
    block = "" if record.block is None else f"block {record.block}"
    head = "" if record.head is None else f"head {record.head}"
    return " ".join(part for part in (block, record.position, head) if part) or "model"


def _bar(record: Record) -> str:
    return "" if record.low is None or record.high is None else f"{short(record.low)} to {short(record.high)}"


def _change(a: Record, b: Record) -> float:
    is_unknown = a.value is None or b.value is None or a.status == b.status == "at least"
    if is_unknown:
        return -1.0
    if not a.value or not b.value or a.value * b.value < 0:
        return abs((a.value or 0.0) - (b.value or 0.0))
    return abs(math.log(b.value / a.value))


def _ratio(a: Record, b: Record) -> str:
    if not a.value or b.value is None or a.status != "ok" or b.status != "ok":
        return "-"
    return short(b.value / a.value)
