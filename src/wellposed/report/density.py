"""How near attention is to uniform: the entropy of each head and layer."""

from typing import Any

from wellposed.report.charts import (
    Budget,
    Chart,
    Missing,
    Section,
    colour_range,
    columns,
    distinct,
    finite,
    most_told,
)
from wellposed.report.conditioning import heat_map
from wellposed.report.subjects import Material

TITLE = "Density of attention"
ALL = "all"
NO_HEADS = "Single heads are left out to keep the page small; report fewer runs together to see them."


def density_section(material: Material, budget: Budget) -> Section | Missing:
    rows: list[tuple[Any, ...]] = [
        (
            subject.name,
            r.block,
            ALL if r.head is None else str(r.head),
            r.value,
            finite(r.low),
            finite(r.high),
            r.images or None,
        )
        for subject in material.subjects
        for r in subject.select("entropy")
        if finite(r.value) is not None and r.block is not None and (budget.heads or r.head is None)
    ]
    if not rows:
        return Missing(TITLE, "wellposed diagnose MODEL --images DIR --what density --out DIR")
    values = [row[3] for row in rows]
    heads = sorted(distinct(row[2] for row in rows), key=lambda head: (head == ALL, len(head), head))
    chart = Chart(
        columns=columns(
            run="run",
            block="block",
            head="head",
            entropy="entropy",
            low="lower quartile",
            high="upper quartile",
            images="images",
        ),
        rows=tuple(rows),
        spec=heat_map(
            x=("head", "head", heads),
            y=("block", "block"),
            colour=("entropy", "entropy, 1 is uniform", colour_range(values, "entropy")),
            tooltips=("block", "head", "entropy", "low", "high"),
            ramp=True,
        ),
        describe="Heat map of the entropy of attention, a row for each block and a column for each head. "
        "The table below has the same numbers.",
        choose="run",
        choose_title="run",
        chosen=most_told(rows),
    )
    words = [
        "Entropy of the attention rows over its maximum, median over the images. 1 is uniform attention."
    ]
    thinned = ""
    if not budget.heads:
        thinned = NO_HEADS
    elif heads == [ALL]:
        words.append(
            "These records have no single heads; wellposed diagnose MODEL --images DIR --what density --out "
            "DIR measures them."
        )
    return Section(id="density", title=TITLE, words=tuple(words), chart=chart, thinned=thinned)
