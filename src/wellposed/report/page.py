"""Sections -> one HTML page that opens offline.

All text goes through :func:`html.escape`, all data is JSON in which ``<``, ``>`` and ``&`` are escaped. The
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
from wellposed.report.verdict import Card, Code, Listed, Name, Sentence, Strong, Verdict, verdict

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
    told = [f"{n} {word}{'s' if n != 1 else ''}" for n, word in counts if n]
    left = len(material.unfinished)
    told += [f"{left} not finished"] if left else []
    variants = len(material.variants())
    return ", ".join([*told, f"{variants} variants"] if 1 < variants < len(material.subjects) else told)


LIBRARIES = ("vega.min.js", "vega-lite.min.js", "vega-interpreter.js")
LICENCES = ("LICENSE-vega.txt", "LICENSE-vega-lite.txt", "LICENSE-vega-interpreter.txt")
_DATA = "report-data"


def render(
    title: str, about: str, top: Verdict, sections: Sequence[Section], missing: Sequence[Missing]
) -> str:
    """The whole page."""
    scripts = [_asset(name) for name in (*LIBRARIES, "page.js")]
    # The chart of the variants stands among the cards, all other sections are folded below.
    chart = [each for each in sections if each.id == "runs" and each.chart and each.chart.spec]
    cards = [*map(_card, top.cards)]
    cards[1:1] = [_section(section, "section") for section in chart]
    body = "\n".join(
        [
            _header(title, about, top),
            "<main id='main'><div class='cards'>",
            *cards,
            "</div>",
            *(_section(section, "details") for section in sections if section not in chart),
            _missing(missing),
            "</main>",
            _footer(),
            f"<script type='application/json' id='{_DATA}'>{_json(_data(sections))}</script>",
            *(f"<script>{script}</script>" for script in scripts),
        ]
    )
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        f"<meta http-equiv='Content-Security-Policy' content=\"{_policy(scripts)}\">\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        "<meta name='referrer' content='no-referrer'>\n"
        f"<title>{html.escape(title)}</title>\n<style>{_asset('page.css')}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def read_data(page: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of each section of a page, by column: what its charts and tables show.

    Args:
        page: the text of the page.
    """
    found = re.search(rf"<script type='application/json' id='{_DATA}'>(.*?)</script>", page, re.DOTALL)
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
        told: dict[str, Any] = {"key": column.key, "title": column.title}
        if column.hidden:
            told["hidden"] = True
        told |= {"log_of": column.log_of} if column.log_of else pack([row[place] for row in chart.rows])
        columns.append(told)
    return {
        "columns": columns,
        "spec": chart.spec,
        "facet": chart.facet,
        "median": chart.median,
        "most": chart.most,
        "opens": chart.opens,
        "tableOpen": chart.table_open,
    }


def _header(title: str, about: str, top: Verdict) -> str:
    lead = f"<p class='lead'>{_sentence(top.lead)}</p>" if top.lead else ""
    return (
        "<a class='skip' href='#main'>Skip to the content</a>\n<header>"
        f"<div class='top'><h1>{html.escape(title)}</h1>"
        "<button type='button' id='theme' aria-pressed='false'>Dark</button></div>"
        f"<p class='about'>{html.escape(about)}</p>"
        f"<p class='headline'>{_sentence(top.headline)}</p>{lead}"
        "<noscript><p class='note'>The charts and tables need JavaScript; the words do not.</p></noscript>"
        "</header>"
    )


def _card(card: Card) -> str:
    words = "".join(f"<p>{_sentence(sentence)}</p>" for sentence in card.sentences)
    table = ""
    if card.rows:
        titles = [*map(html.escape, card.head)]
        head = "".join(f"<th scope='col'>{title}</th>" for title in titles)
        cell = "<td data-title='{}'><span>{}</span></td>".format
        rows = "".join(f"<tr>{''.join(map(cell, titles, map(_sentence, row)))}</tr>" for row in card.rows)
        table = f"<table class='small'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    wide = " wide" if len(card.head) > 3 else ""
    return f"<section class='card{wide}'><h2>{html.escape(card.title)}</h2>{table}{words}</section>"


def _sentence(sentence: Sentence) -> str:
    return "".join(map(_part, sentence))


def _part(part: str | Listed) -> str:
    if isinstance(part, Listed):
        items = f"<ul>{''.join(f'<li>{html.escape(each)}</li>' for each in part)}</ul>"
        return f"<details><summary>{len(part)} claims</summary>{items}</details>" if part else ""
    text = html.escape(part)
    if isinstance(part, Name):
        return f"<bdi class='name'>{text}</bdi>"
    if isinstance(part, Strong):
        return f"<strong>{text}</strong>"
    return f"<code>{text}</code>" if isinstance(part, Code) else text


def _section(section: Section, tag: str) -> str:
    """As a card, or as details that are folded; heat maps are not."""
    name, chart = section.id, section.chart
    words = "".join(f"<p><bdi>{html.escape(text)}</bdi></p>" for text in section.words)
    thinned = f"<p class='note' data-thinned>{html.escape(section.thinned)}</p>" if section.thinned else ""
    pictures = (
        f"<div class='pictures' id='{name}-pictures'></div>" if "pictures" in (section.extra or {}) else ""
    )
    heading = f"<h2 id='{name}-title'>{html.escape(section.title)}</h2>"
    inner = "" if chart is None else _figure(name, section.title, chart)
    if tag == "section":
        start = f"<section class='card wide' id='{name}' aria-labelledby='{name}-title'>{heading}"
        return f"{start}{inner}{words}{thinned}</section>"
    opened = " open" if name == "conditioning" else ""
    return (
        f"<details class='part' id='{name}'{opened}><summary>{heading}</summary>{words}{thinned}{pictures}"
        f"{inner}</details>"
    )


def _figure(name: str, title: str, chart: Chart) -> str:
    figure = spectrum = ""
    buttons = _buttons(f"Save {title} as", "" if chart.spec else "CSV")
    if chart.spec is not None:
        label = html.escape(chart.describe)
        figure = (
            f"<figure><div class='chart' id='{name}-chart' role='img' aria-label='{label}'></div></figure>"
        )
    if chart.opens == "spectrum":
        spectrum = (
            f"<div class='spectrum' id='{name}-spectrum' aria-labelledby='{name}-spectrum-title'>"
            f"<h3 id='{name}-spectrum-title'>Singular values of a place</h3>"
            f"<div class='tools'><label for='{name}-place'>place</label> <select id='{name}-place'></select>"
            f"{_buttons('Save spectrum as', attributes=' data-of=spectrum')}</div>"
            f"<p class='said' id='{name}-said' aria-live='polite'></p>"
            f"<div class='chart' id='{name}-spectrum-chart' role='img' aria-label='Singular values over the "
            "largest, in falling order, of the place that the menu names.'></div></div>"
        )
    opened = " open" if chart.table_open else ""
    return (
        f"<div class='tools'>{buttons}</div>{figure}{spectrum}"
        f"<details{opened}><summary>Table, {len(chart.rows):,} rows</summary><div class='scroll' "
        f"tabindex='0' role='region' aria-label='Table: {html.escape(title)}' id='{name}-table'></div>"
        "</details>"
    )


def _buttons(label: str, kinds: str = "", attributes: str = "") -> str:
    button = "<button type='button' data-save='{0}' aria-label='{1} {0}'{2}>{0}</button>".format
    made = (button(kind, html.escape(label), attributes) for kind in (kinds or "PNG SVG CSV").split())
    return f"<span class='buttons'>{''.join(made)}</span>"


def _missing(missing: Sequence[Missing]) -> str:
    if not missing:
        return ""
    items = "".join(
        f"<li>{html.escape(each.title)}: <code>{html.escape(each.remedy)}</code></li>" for each in missing
    )
    return (
        "<details class='part' id='missing'><summary><h2>Not in these records</h2></summary>"
        f"<p>What would add these sections:</p><ul>{items}</ul></details>"
    )


def _footer() -> str:
    texts = "\n\n".join(f"{name}\n{_asset(name).strip()}" for name in LICENCES)
    return (
        "<footer><p>Made by wellposed from records alone; this page requests nothing.</p>"
        "<details><summary>Licences of the JavaScript in this page</summary>"
        f"<pre>{html.escape(texts)}</pre></details></footer>"
    )


def write(text: str, path: str | Path) -> None:
    """Write a page, making its folder if need be."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
