"""What no chart shows: ranks, extreme singular values of Jacobians, the neural tangent kernel."""

from typing import Any

from wellposed.report.charts import Budget, Chart, Section, columns, finite
from wellposed.report.subjects import Material

TITLE = "Other measurements"
_ELSEWHERE = (
    "kappa",
    "entropy",
    "spectrum",
    "rank deficient",
    "image",
    "attention picture",
    "attention rollout",
)


def rest_section(material: Material, budget: Budget) -> Section | None:
    """A table alone; None if there is nothing for it."""
    rows: list[tuple[Any, ...]] = [
        (
            subject.name,
            r.measure,
            r.block,
            r.position,
            finite(r.value),
            r.status,
            finite(r.low),
            finite(r.high),
            r.images or None,
            r.estimator,
            r.note,
        )
        for subject in material.subjects
        for r in subject.records
        if r.measure not in _ELSEWHERE
        and not r.verdicts
        and r.head is None
        and not r.measure.startswith("kappa ")
    ]
    if not rows:
        return None
    chart = Chart(
        columns=columns(
            run="run",
            measure="measure",
            block="block",
            position="position",
            value="value",
            status="status",
            low="low",
            high="high",
            images="images",
            estimator="estimator",
            note="note",
        ),
        rows=tuple(rows),
        spec=None,
        describe="Measurements that no chart shows.",
    )
    words = (
        "Ranks, norms and mean of the tokens, spectra of weights, gradients by block, extreme singular "
        "values of Jacobians, the neural tangent kernel.",
    )
    return Section(id="rest", title=TITLE, words=words, chart=chart)
