"""Sections -> one HTML page that opens offline.

The template escapes all text, all data is JSON in which ``<``, ``>`` and ``&`` are escaped. The
Content-Security-Policy lets those scripts run that are named by their hash, and lets nothing be requested.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from wellposed.files import write_text
from wellposed.records import Record
from wellposed.report.attention import attention_section
from wellposed.report.charts import Budget, Chart, Missing, Section, pack, unpacked
from wellposed.report.folders import diagnosis_subject, read_material
from wellposed.report.heat_maps import conditioning_section, density_section
from wellposed.report.material import Material, with_unique_names
from wellposed.report.measurements import (
    bounds_section,
    graying_section,
    jacobian_section,
    provenance_section,
    rest_section,
)
from wellposed.report.training import training_section
from wellposed.report.variants import variants_section
from wellposed.report.verdict import Verdict, verdict

LIMIT = 2_000_000
"""Bytes of a page."""

ONE_OF_EACH = (
    "Of each variant one run is in this section, to keep the page small; report fewer runs together to see "
    "the others."
)
Made = Section | Missing | None
Part = Callable[[Material, Budget], Made]


_PARTS: tuple[Part, ...] = (
    variants_section,
    conditioning_section,
    density_section,
    attention_section,
    bounds_section,
    jacobian_section,
    training_section,
    graying_section,
    rest_section,
    provenance_section,
)
_OF_ALL_RUNS = (variants_section, graying_section, provenance_section)


def sections(material: Material, budget: Budget) -> tuple[list[Section], list[Missing]]:
    """What the records give, in the order of the page, and what they do not."""
    made = [_made(part, material, budget) for part in _PARTS]
    found = [each for each in made if isinstance(each, Section)]
    return found, [each for each in made if isinstance(each, Missing)]


def _made(part: Part, material: Material, budget: Budget) -> Made:
    """A section; one that has rows for each run is of one run a variant, where the budget asks for it."""
    shown = material if budget.seeds or part in _OF_ALL_RUNS else material.one_of_each()
    made = part(shown, budget)
    if isinstance(made, Section) and len(shown.subjects) < len(material.subjects):
        return replace(made, thinned=f"{made.thinned} {ONE_OF_EACH}".strip())
    return made


def report_page(material: Material, *, title: str = "wellposed report", limit: int = LIMIT) -> str:
    """The page as text. Curves are thinned until it is no larger than ``limit``, and the page says so.

    Args:
        material: of :func:`wellposed.report.read_material`.
        title: of the page.
        limit: bytes.
    """
    budget, size, top = Budget(), 0, verdict(material)
    while True:
        found, missing = sections(material, budget)
        text = render(title, _about(material), top, found, missing)
        size, before = len(text.encode()), budget
        if size <= limit:
            return text
        budget = budget.smaller()
        if budget == before:
            raise ValueError(
                f"expected a page of at most {limit:,} bytes, {len(material.subjects)} runs and diagnoses "
                f"make {size:,} at the least; report fewer of them together."
            )


def write_report(paths: Sequence[str | Path], out: str | Path = "report.html") -> Material:
    """Read runs and diagnoses, write the page, and give what was read."""
    material = read_material(paths)
    write(report_page(material), out)
    return material


def diagnosis_page(records: Sequence[Record], about: dict[str, Any]) -> str:
    """The page of one diagnosis that is at hand."""
    subject = diagnosis_subject(records, about)
    return report_page(Material(tuple(with_unique_names([subject]))), title=f"diagnosis of {subject.name}")


def _about(material: Material) -> str:
    runs = sum(each.kind == "run" for each in material.subjects)
    rest = len(material.subjects) - runs
    counts = [(runs, "run"), (rest, "diagnosis" if rest == 1 else "diagnose")]
    counted = [f"{n} {word}{'s' if n != 1 else ''}" for n, word in counts if n]
    left = len(material.unfinished)
    counted += [f"{left} not finished"] if left else []
    variants = len(material.variants())
    return ", ".join([*counted, f"{variants} variants"] if 1 < variants < len(material.subjects) else counted)


LIBRARIES = ("vega.min.js", "vega-lite.min.js", "vega-interpreter.js")
LICENCES = ("LICENSE-vega.txt", "LICENSE-vega-lite.txt", "LICENSE-vega-interpreter.txt")


def render(
    title: str, about: str, top: Verdict, sections: Sequence[Section], missing: Sequence[Missing]
) -> str:
    """The whole page, by ``assets/page.html``."""
    from jinja2 import Environment  # here, since it takes a while

    # The chart of the variants stands among the cards, all other sections are folded below.
    charts = [each for each in sections if each.id == "runs" and each.chart and each.chart.spec]
    scripts = [_asset(name) for name in (*LIBRARIES, "page.js")]
    return (
        Environment(autoescape=True, finalize=_escaped)
        .from_string(_asset("page.html"))
        .render(
            title=title,
            about=about,
            top=top,
            charts=charts,
            folded=[each for each in sections if each not in charts],
            missing=missing,
            licences="\n\n".join(f"{name}\n{_asset(name).strip()}" for name in LICENCES),
            policy=_policy(scripts),
            style=_asset("page.css"),
            data=_json(_data(sections)),
            scripts=scripts,
            kind_of=lambda part: type(part).__name__.lower(),
        )
    )


class _Html(str):
    """What the template takes as it is."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


def _escaped(value: Any) -> Any:
    return _Html(html.escape(value)) if isinstance(value, str) and not hasattr(value, "__html__") else value


def read_data(page: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of each section of a page, by column: what its charts and tables show.

    Args:
        page: the text of the page.
    """
    found = re.search(r"<script type='application/json' id='report-data'>(.*?)</script>", page, re.DOTALL)
    if found is None:
        raise ValueError("expected a page that wellposed report wrote; this one holds no data.")
    sections = json.loads(found[1])
    return {each["id"]: _rows(each["chart"]) for each in sections if each.get("chart")}


def _rows(chart: Mapping[str, Any]) -> list[dict[str, Any]]:
    filled = unpacked(chart["columns"])
    return [dict(zip(filled, row, strict=True)) for row in zip(*filled.values(), strict=True)]


def _policy(scripts: Iterable[str]) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return (resources.files("wellposed.report") / "assets" / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    # Within a script element these could end it, or begin a comment.
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # Vega's expressions, in which names stand as texts, take the two separators for the end of a line.
    return text.replace("\u2028", " ").replace("\u2029", " ")


def _data(sections: Sequence[Section]) -> list[dict[str, Any]]:
    return [
        {"id": each.id, "title": each.title, "chart": _chart_data(each.chart), "extra": each.extra}
        for each in sections
        if each.chart is not None
    ]


def _chart_data(chart: Chart) -> dict[str, Any]:
    columns = []
    for place, column in enumerate(chart.columns):
        packed: dict[str, Any] = {"key": column.key, "title": column.title}
        if column.hidden:
            packed["hidden"] = True
        packed |= {"log_of": column.log_of} if column.log_of else pack([row[place] for row in chart.rows])
        columns.append(packed)
    return {
        "columns": columns,
        "spec": chart.spec,
        "facet": chart.facet,
        "median": chart.median,
        "most": chart.most,
        "opens": chart.opens,
        "tableOpen": chart.table_open,
    }


def write(text: str, path: str | Path) -> None:
    """Write a page, making its folder if needed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
