"""Where everything came from: command, versions, device, seeds, data, commit."""

from typing import Any

from wellposed.report.charts import Budget, Chart, Section, columns, distinct
from wellposed.report.subjects import Material

TITLE = "Provenance"
_ALL = "all"


def provenance_section(material: Material, budget: Budget) -> Section:
    """One row a field that all share, else one row a subject."""
    subjects = material.subjects
    rows: list[tuple[Any, ...]] = []
    told = {
        each.name: {"measured on": each.measured_on, **each.provenance}
        if each.measured_on
        else each.provenance
        for each in subjects
    }
    fields = distinct(key for of_subject in told.values() for key in of_subject)
    for field in sorted(fields, key=lambda field: field.startswith("recipe: ")):
        values = {name: of_subject.get(field) for name, of_subject in told.items()}
        if len(set(values.values())) == 1 and len(values) > 1:
            rows.append((_ALL, field, next(iter(values.values()))))
        else:
            rows += [(name, field, value) for name, value in values.items() if value is not None]
    rows += [(subject.name, "note", note) for subject in subjects for note in subject.notes]
    chart = Chart(
        columns=columns(run="run", field="field", value="value"),
        rows=tuple(rows),
        spec=None,
        describe="What each run and diagnosis was made with.",
        table_open=True,
    )
    words = ("How each number was made, as its record says it. A field that all share is shown once.",)
    return Section(id="provenance", title=TITLE, words=words, chart=chart)
