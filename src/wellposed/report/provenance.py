"""Where everything came from: command, versions, device, seeds, data, commit."""

from typing import Any

from wellposed.report.charts import Budget, Chart, Section, columns, distinct
from wellposed.report.subjects import Material, isolated

TITLE = "Provenance"
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
    told = {
        each.name: {"measured on": each.measured_on, **each.provenance}
        if each.measured_on
        else each.provenance
        for each in subjects
    }
    fields = distinct(key for of_subject in told.values() for key in of_subject)
    for field in sorted(fields, key=_rank):
        by_value: dict[str, list[str]] = {}
        for name, of_subject in told.items():
            if field in of_subject:
                by_value.setdefault(of_subject[field], []).append(name)
        rows += [(_names(names, len(subjects)), field, value) for value, names in by_value.items()]
    notes = distinct(note for subject in subjects for note in subject.notes)
    for note in notes:
        rows.append(
            (_names([each.name for each in subjects if note in each.notes], len(subjects)), "note", note)
        )
    chart = Chart(
        columns=columns(run="run", field="field", value="value"),
        rows=tuple(rows),
        spec=None,
        describe="What each run and diagnosis was made with.",
        table_open=True,
    )
    words = ("How each number was made, as its record says it. A value that several share is shown once.",)
    return Section(id="provenance", title=TITLE, words=words, chart=chart)
