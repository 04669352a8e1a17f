"""Measured kappa against what a proposition says it stays below."""

from typing import Any

from wellposed.records import VERDICTS
from wellposed.report.charts import LOG_AXIS, Budget, Chart, Missing, Section, columns, finite, most_told
from wellposed.report.density import NO_HEADS
from wellposed.report.subjects import Material

TITLE = "Measured against bound"


def bounds_section(material: Material, budget: Budget) -> Section | Missing:
    bounded = [
        (subject, record)
        for subject in material.subjects
        for record in subject.records
        if record.verdicts and finite(record.value) is not None and (budget.heads or record.head is None)
    ]
    if not bounded:
        return Missing(TITLE, "wellposed diagnose MODEL --images DIR --what bounds --out DIR")
    rows = tuple(
        (
            subject.name,
            r.measure,
            r.block,
            "all" if r.head is None else str(r.head),
            r.position,
            r.value,
            finite(r.bound),
            *(map(finite, r.margins) if r.margins else (None, None)),
            r.status,
            *_counts(r.verdicts),
        )
        for subject, r in bounded
    )
    counts = [sum(column) for column in zip(*(row[10:] for row in rows), strict=True)]
    told = ", ".join(f"{name} {count:,} times" for name, count in zip(VERDICTS, counts, strict=True) if count)
    infinite = sum(row[6] is None for row in rows)
    words = [
        "Each point is a quantity whose condition number has an upper bound (Propositions 4.1 and 4.2 of "
        "Always Skip Attention and their kin), as a median over images. Above the diagonal the bound holds; "
        "the further above, the looser it is.",
        f"Over images, windows and heads: {told}.",
    ]
    if any(record.status == "at least" for _, record in bounded):
        words.append('Where the status is "at least", the arithmetic cannot tell a larger kappa from it.')
    if infinite:
        words.append(
            f"{infinite} of {len(rows)} bounds are infinite (tokens or weights without full rank) and not "
            "drawn."
        )
    thinned = "" if budget.heads else NO_HEADS
    return Section(id="bounds", title=TITLE, words=tuple(words), chart=_chart(rows), thinned=thinned)


def _chart(rows: tuple[tuple[Any, ...], ...]) -> Chart:
    drawn = [value for row in rows if row[6] is not None for value in (row[5], row[6])]
    # Room for the points at the edge.
    ends = [min(drawn) / 3, max(drawn) * 3] if drawn else [1, 10]
    verdicts = {name.replace(" ", "_"): name for name in VERDICTS}
    scale = {"type": "log", "nice": False, "domain": ends}
    return Chart(
        columns=columns(
            run="run",
            measure="measure",
            block="block",
            head="head",
            position="position",
            measured="measured",
            bound="bound",
            margin="bound / measured, median",
            smallest="smallest",
            status="status of measured",
            **verdicts,
        ),
        rows=rows,
        spec={
            "height": 320,
            "layer": [
                {
                    "data": {"values": [{"end": ends[0]}, {"end": ends[1]}]},
                    "mark": {"type": "line", "strokeDash": [4, 4], "color": "#888888", "tooltip": None},
                    "encoding": {
                        "x": {"field": "end", "type": "quantitative"},
                        "y": {"field": "end", "type": "quantitative"},
                    },
                },
                {
                    "transform": [{"filter": {"field": "bound", "valid": True}}],
                    "mark": {"type": "point", "filled": True, "opacity": 0.75, "size": 45},
                    "encoding": {
                        "x": {
                            "field": "measured",
                            "type": "quantitative",
                            "scale": scale,
                            "title": "measured kappa",
                            "axis": dict(LOG_AXIS),
                        },
                        "y": {
                            "field": "bound",
                            "type": "quantitative",
                            "scale": scale,
                            "title": "bound",
                            "axis": dict(LOG_AXIS),
                        },
                        "color": {"field": "measure", "type": "nominal", "title": None},
                        "shape": {"field": "measure", "type": "nominal", "title": None},
                        "tooltip": [
                            {"field": name}
                            for name in ("measure", "block", "head", "measured", "bound", "margin", "status")
                        ],
                    },
                },
            ],
        },
        describe="Scatter plot on logarithmic axes: measured kappa to the right, its bound upwards, and the "
        "diagonal at which they are equal. The table below has the same numbers.",
        choose="run",
        choose_title="run",
        chosen=most_told(rows),
    )


def _counts(verdicts: tuple[int, ...]) -> tuple[int, ...]:
    if len(verdicts) != len(VERDICTS):
        raise ValueError(f"expected counts of {', '.join(VERDICTS)}, got {len(verdicts)} numbers.")
    return verdicts
