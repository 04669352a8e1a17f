"""Sections of bounds, Jacobian spectra, ranks, pictures of graying, and where it all came from."""

from typing import Any

from wellposed.calls import GRAY
from wellposed.graying_pictures import together
from wellposed.records import OF_JACOBIANS, VERDICTS, Measure
from wellposed.report.charts import (
    LOG_AXIS,
    Budget,
    Chart,
    Missing,
    Section,
    Spec,
    cells,
    channel,
    columns,
    distinct,
    finite,
    known,
    layer,
    nominal,
    picked,
    table,
    tips,
)
from wellposed.report.heat_maps import MOST_PANELS, NO_HEADS
from wellposed.report.material import Material, isolated

BOUNDS = "Measured against bound"


def bounds_section(material: Material, budget: Budget) -> Section | Missing:
    bounded = [
        (subject, record)
        for subject in material.subjects
        for record in subject.records
        if record.verdicts and finite(record.value) is not None and (budget.heads or record.head is None)
    ]
    if not bounded:
        return Missing(BOUNDS, "wellposed diagnose MODEL --images DIR --what bounds --out DIR")
    rows = tuple(
        (
            subject.name,
            *cells(r, "measure block head position value bound"),
            *(map(finite, r.margins) if r.margins else (None, None)),
            r.status,
            *_counts(r.verdicts),
            subject.variant,
        )
        for subject, r in bounded
    )
    counts = [sum(column) for column in zip(*(row[10:-1] for row in rows), strict=True)]
    totals = ", ".join(
        f"{name} {count:,} times" for name, count in zip(VERDICTS, counts, strict=True) if count
    )
    infinite = sum(row[6] is None for row in rows)
    words = [
        "Each point is a quantity whose condition number has an upper bound (Propositions 4.1 and 4.2 of "
        "Always Skip Attention and their kin), as a median over images. Above the diagonal the bound holds; "
        "the further above, the looser it is.",
        f"Over images, windows and heads: {totals}.",
    ]
    if any(record.status == "at least" for _, record in bounded):
        words.append(
            'Where the status is "at least", kappa exceeds float32 resolution: the number is a lower bound.'
        )
    if infinite:
        words.append(
            f"{infinite} of {len(rows)} bounds are infinite (tokens or weights without full rank) and not "
            "drawn."
        )
    thinned = "" if budget.heads else NO_HEADS
    return Section(id="bounds", title=BOUNDS, words=tuple(words), chart=_chart(rows), thinned=thinned)


def _chart(rows: tuple[tuple[Any, ...], ...]) -> Chart:
    drawn = [value for row in rows if row[6] is not None for value in (row[5], row[6])]
    # Room for the points at the edge.
    ends = [min(drawn) / 3, max(drawn) * 3] if drawn else [1, 10]
    verdicts = "; ".join(f"{name.replace(' ', '_')}={name}" for name in VERDICTS)
    log: Spec = {"scale": {"type": "log", "nice": False, "domain": ends}, "axis": dict(LOG_AXIS)}
    diagonal = {"x": channel("end", "measured kappa", **log), "y": channel("end", "bound", **log)}
    points = {
        "x": channel("measured", "measured kappa", **log),
        "y": channel("bound", "bound", **log),
        "color": nominal("measure"),
        "shape": nominal("measure"),
        "tooltip": tips("measure", "block", "head", "measured", "bound", "margin", "status"),
    }
    return Chart(
        columns=columns(
            f"run; measure; block; head; position; measured; bound; margin=bound / measured, median; "
            f"smallest; status=status of measured; {verdicts}; variant"
        ),
        rows=rows,
        spec={
            "height": 240,
            "layer": [
                {"data": {"values": [{"end": ends[0]}, {"end": ends[1]}]}}
                | layer("line", diagonal, strokeDash=[4, 4], color="#888888", tooltip=None),
                layer("point", points, known("bound"), filled=True, opacity=0.75, size=45),
            ],
        },
        describe="Scatter plot on logarithmic axes: measured kappa to the right, its bound upwards, and the "
        "diagonal at which they are equal. The table below has the same numbers.",
        facet="variant",
        most=("variant", MOST_PANELS),
    )


def _counts(verdicts: tuple[int, ...]) -> tuple[int, ...]:
    if len(verdicts) != len(VERDICTS):
        raise ValueError(f"expected counts of {', '.join(VERDICTS)}, got {len(verdicts)} numbers.")
    return verdicts


JACOBIAN = "Jacobian spectra"


def jacobian_section(material: Material, budget: Budget) -> Section | Missing:
    rows: list[tuple[Any, ...]] = []
    longest = 0
    for subject in material.subjects:
        for number, curve in enumerate(subject.jacobians):
            longest = max(longest, len(curve.values))
            for place, value in picked(curve.values, budget.curve):
                share = place / (curve.points - 1) if curve.points > 1 else 0.0
                line = (curve.panel, curve.line or subject.name, subject.name, curve.eps, curve.image)
                rows.append((*line, number, share, value))
    if not rows and (extremes := _extremes(material)):
        return _without_spectra(extremes)
    if not rows:
        return Missing(JACOBIAN, "wellposed diagnose MODEL --images DIR --what jacobian --out DIR")
    lines = distinct(row[1] for row in rows)
    across = "share of the singular values, the largest first"
    scale = {"type": "log", "domain": [1e-8, 1], "clamp": True}
    chart = Chart(
        columns=columns(
            "panel=sub-block; line; run; eps; image; curve=-curve; share=share of the singular "
            "values; value=singular value / largest"
        ),
        rows=tuple(rows),
        spec={
            "height": 200,
            "transform": [{"filter": {"field": "value", "gt": 0}}],
            "mark": {"type": "line", "opacity": 0.85, "strokeWidth": 1.8},
            "encoding": {
                "x": channel("share", across, scale={"domain": [0, 1]}, axis={"format": ".0%"}),
                "y": channel("value", "singular value / largest", scale=scale, axis=dict(LOG_AXIS)),
                "color": nominal("line", sort=lines),
                "strokeDash": nominal("line", sort=lines),
                "detail": tips("run", "curve"),
                "tooltip": tips("line", "run", "eps", "image"),
            },
        },
        describe="Singular values of a sub-block's Jacobian over the largest, falling from left to right on "
        "a logarithmic axis; a flatter line is better conditioned. The table below has the same numbers.",
        facet="panel",
        most=("panel", MOST_PANELS),
    )
    words = (
        "Singular values of the Jacobian of a sub-block over its largest; a flatter line is better "
        "conditioned. A pre-norm branch without its skip has singular values of zero, because LayerNorm "
        "forgets the mean and the length of a token; values below 1e-8 are drawn at 1e-8.",
    )
    kept = f"Of each spectrum (up to {longest} values) {budget.curve} are kept."
    thinned = kept if longest > budget.curve else ""
    return Section(id="jacobian", title=JACOBIAN, words=words, chart=chart, thinned=thinned)


def _extremes(material: Material) -> list[tuple[Any, ...]]:
    """Of Jacobians too large for a whole spectrum, of which the ends alone were computed."""
    return [
        (subject.name, *cells(r, "block module position measure value status estimator"))
        for subject in material.subjects
        for r in subject.records
        if r.measure in OF_JACOBIANS
    ]


def _without_spectra(rows: list[tuple[Any, ...]]) -> Section:
    chart = table(
        "run; block; module; position=sub-block; measure; value; status; estimator",
        rows,
        "Extreme singular values of the Jacobians.",
        is_open=True,
    )
    words = (
        "The largest and the smallest singular value of the Jacobian of a sub-block. It is too large to "
        "compute all of them; density=True of wellposed.probes.jacobian_spectrum estimates their "
        "distribution, and smaller images have a whole spectrum.",
    )
    return Section(id="jacobian", title=JACOBIAN, words=words, chart=chart)


REST = "Other measurements"
_ELSEWHERE = frozenset(Measure) - set(OF_JACOBIANS)


def rest_section(material: Material, budget: Budget) -> Section | None:
    """A table alone; None if there is nothing for it."""
    rows: list[tuple[Any, ...]] = [
        (subject.name, *cells(r, "measure block position value status low high images estimator note"))
        for subject in material.subjects
        for r in subject.records
        if r.measure not in _ELSEWHERE and not r.verdicts and r.head is None
    ]
    if not rows:
        return None
    keys = "run; measure; block; position; value; status; low; high; images; estimator; note"
    chart = table(keys, rows, "Measurements that no chart shows.")
    words = (
        "Ranks, norms and mean of the tokens, spectra of weights, gradients by block, extreme singular "
        "values of Jacobians, the neural tangent kernel.",
    )
    return Section(id="rest", title=REST, words=words, chart=chart)


GRAYING = "What graying does to an image"
_TITLES = {"spectral": "Spectral", "svd": "SVD", "dct": "DCT"}


def graying_section(material: Material, budget: Budget) -> Section | Missing:
    """Rows of numbers, and in ``extra`` a picture for each image and eps."""
    grays_first = sorted(material.subjects, key=lambda subject: not subject.has(GRAY))
    shown = material.graying or together([each.graying for each in grays_first if each.graying])
    if shown is None:
        return Missing(GRAYING, "wellposed report RUN_OR_DIAGNOSIS... --images DIR")
    rows: list[tuple[Any, ...]] = []
    pictures: list[dict[str, Any]] = []
    for image in shown.images:
        steps = [{"label": "before", "src": image.picture}]
        for step in image.grayed:
            before = (image.kappa, image.status)
            rows.append((image.name, shown.method, step.eps, *before, step.kappa, step.status, step.change))
            steps.append({"label": f"eps {step.eps:g}", "src": step.picture})
            steps.append({"label": f"difference, eps {step.eps:g}", "src": step.difference})
        pictures.append({"name": image.name, "steps": steps})
    chart = table(
        "image; method; eps; before=kappa before; before_status=status before; after=kappa after; "
        "after_status=status after; change=largest change of a pixel",
        rows,
        "Condition numbers of the patch matrices before and after graying.",
    )
    words = (
        f"{_TITLES.get(shown.method, shown.method)} graying of the pixel patches ({shown.patch} x "
        f"{shown.patch}), shown on {shown.source}. After graying, values outside 0 to 1 are cut off for the "
        "picture. In a difference, grey is no change, and black and white are the largest change of that "
        "image, which the table has.",
    )
    extra = {"pictures": pictures}
    return Section(id="graying", title=GRAYING, words=words, chart=chart, extra=extra)


PROVENANCE = "Provenance"
_FIRST = (
    "command",
    "commit",
    "time",
    "data",
    "seed",
    "model",
    "weights",
    "device",
    "packages",
    "measured on",
)
_MOST_NAMES = 4


def _rank(field: str) -> tuple[int, int]:
    """What a reader looks for first comes first; the fields of recipes last."""
    known = _FIRST.index(field) if field in _FIRST else len(_FIRST)
    return int(field.startswith("recipe: ")), known


def _names(names: list[str], count: int) -> str:
    if len(names) == count > 1:
        return "all"
    left = len(names) - _MOST_NAMES
    shown = names if len(names) == 1 else [isolated(name) for name in names[:_MOST_NAMES]]
    return "; ".join(shown) + (f" and {left} more" if left > 0 else "")


def provenance_section(material: Material, budget: Budget) -> Section:
    """One row for each value of a field, with those that share it."""
    subjects = material.subjects
    rows: list[tuple[Any, ...]] = []
    provenance = {
        each.name: {"measured on": each.measured_on, **each.provenance}
        if each.measured_on
        else each.provenance
        for each in subjects
    }
    fields = distinct(key for of_subject in provenance.values() for key in of_subject)
    for field in sorted(fields, key=_rank):
        by_value: dict[str, list[str]] = {}
        for name, of_subject in provenance.items():
            if field in of_subject:
                by_value.setdefault(of_subject[field], []).append(name)
        rows += [(_names(names, len(subjects)), field, value) for value, names in by_value.items()]
    notes = distinct(note for subject in subjects for note in subject.notes)
    for note in notes:
        rows.append(
            (_names([each.name for each in subjects if note in each.notes], len(subjects)), "note", note)
        )
    describe = "What each run and diagnosis was made with."
    chart = table("run; field; value", rows, describe, is_open=True)
    words = ("How each number was made, as its record says. A value that several share is shown once.",)
    return Section(id="provenance", title=PROVENANCE, words=words, chart=chart)
