"""Spectra of the Jacobians, over eps where several were measured."""

from typing import Any

from wellposed.report.charts import (
    LOG_AXIS,
    Budget,
    Chart,
    Missing,
    Section,
    columns,
    distinct,
    finite,
    picked,
)
from wellposed.report.subjects import Material

TITLE = "Jacobian spectra"


def jacobian_section(material: Material, budget: Budget) -> Section | Missing:
    rows: list[tuple[Any, ...]] = []
    longest = 0
    for subject in material.subjects:
        for number, curve in enumerate(subject.jacobians):
            longest = max(longest, len(curve.values))
            for place, value in picked(curve.values, budget.curve):
                share = place / (curve.points - 1) if curve.points > 1 else 0.0
                rows.append(
                    (
                        curve.panel,
                        curve.line or subject.name,
                        subject.name,
                        curve.eps,
                        curve.image,
                        number,
                        share,
                        value,
                    )
                )
    if not rows and (extremes := _extremes(material)):
        return _without_spectra(extremes)
    if not rows:
        return Missing(
            TITLE,
            "wellposed diagnose MODEL --images DIR --what jacobian --out DIR; over eps, in a clone of the "
            "repository: python -m studies jacobian-spectrum",
        )
    lines = distinct(row[1] for row in rows)
    chart = Chart(
        columns=columns(
            panel="sub-block",
            line="line",
            run="run",
            eps="eps",
            image="image",
            curve="-curve",
            share="share of the singular values",
            value="singular value / largest",
        ),
        rows=tuple(rows),
        spec={
            "height": 260,
            "transform": [{"filter": {"field": "value", "gt": 0}}],
            "mark": {"type": "line", "opacity": 0.85, "strokeWidth": 1.8},
            "encoding": {
                "x": {
                    "field": "share",
                    "type": "quantitative",
                    "title": "share of the singular values, the largest first",
                    "scale": {"domain": [0, 1]},
                    "axis": {"format": ".0%"},
                },
                "y": {
                    "field": "value",
                    "type": "quantitative",
                    "title": "singular value / largest",
                    "scale": {"type": "log", "domain": [1e-8, 1], "clamp": True},
                    "axis": dict(LOG_AXIS),
                },
                "color": {"field": "line", "type": "nominal", "title": None, "sort": lines},
                "strokeDash": {"field": "line", "type": "nominal", "title": None, "sort": lines},
                "detail": [{"field": "run"}, {"field": "curve"}],
                "tooltip": [{"field": name} for name in ("line", "run", "eps", "image")],
            },
        },
        describe="Singular values of a sub-block's Jacobian over the largest, falling from left to right on "
        "a logarithmic axis; a flatter line is better conditioned. The table below has the same numbers.",
        choose="panel",
        choose_title="sub-block",
    )
    words = (
        "Singular values of the Jacobian of a sub-block over its largest; a flatter line is better "
        "conditioned. A pre-norm branch without its skip has singular values of zero, because LayerNorm "
        "forgets the mean and the length of a token; values below 1e-8 are drawn at 1e-8.",
    )
    thinned = (
        f"Of each spectrum (up to {longest} values) {budget.curve} are kept."
        if longest > budget.curve
        else ""
    )
    return Section(id="jacobian", title=TITLE, words=words, chart=chart, thinned=thinned)


def _extremes(material: Material) -> list[tuple[Any, ...]]:
    """Of Jacobians too large for a whole spectrum, of which the ends alone were computed."""
    return [
        (subject.name, r.block, r.module, r.position, r.measure, finite(r.value), r.status, r.estimator)
        for subject in material.subjects
        for r in subject.records
        if r.measure.startswith("jacobian ")
    ]


def _without_spectra(rows: list[tuple[Any, ...]]) -> Section:
    chart = Chart(
        columns=columns(
            run="run",
            block="block",
            module="module",
            position="sub-block",
            measure="measure",
            value="value",
            status="status",
            estimator="estimator",
        ),
        rows=tuple(rows),
        spec=None,
        describe="Extreme singular values of the Jacobians.",
        table_open=True,
    )
    words = (
        "The largest and the smallest singular value of the Jacobian of a sub-block. It is too large to "
        "compute all of them; density=True of wellposed.probes.jacobian_spectrum estimates their "
        "distribution, and smaller images have a whole spectrum.",
    )
    return Section(id="jacobian", title=TITLE, words=words, chart=chart)
