"""From material to a page that stays below its size."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wellposed.records import Record
from wellposed.report.attention import attention_section
from wellposed.report.bounded import bounds_section
from wellposed.report.charts import Budget, Missing, Section
from wellposed.report.comparing import comparing_section
from wellposed.report.conditioning import conditioning_section
from wellposed.report.density import density_section
from wellposed.report.graying import graying_section
from wellposed.report.jacobian import jacobian_section
from wellposed.report.page import Page, render, write
from wellposed.report.provenance import provenance_section
from wellposed.report.reading import diagnosis_subject, read_material
from wellposed.report.rest import rest_section
from wellposed.report.subjects import Material, with_unique_names
from wellposed.report.training import training_section
from wellposed.report.verdict import verdict

LIMIT = 2_000_000
"""Bytes of a page."""

ONE_OF_EACH = (
    "Of each variant one run is in this section, to keep the page small; report fewer runs together to see "
    "the others."
)
Made = Section | Missing | None
Part = Callable[[Material, Budget], Made]


_OF_EACH_RUN: tuple[Part, ...] = (
    conditioning_section,
    density_section,
    attention_section,
    bounds_section,
    jacobian_section,
    training_section,
    rest_section,
)


def sections(material: Material, budget: Budget) -> tuple[list[Section], list[Missing]]:
    """What the records give, in the order of the page, and what they do not."""
    parts: tuple[Part, ...] = (
        comparing_section,
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
    made = [_made(part, material, budget) for part in parts]
    found = [each for each in made if isinstance(each, Section)]
    return found, [each for each in made if isinstance(each, Missing)]


def _made(part: Part, material: Material, budget: Budget) -> Made:
    """A section; one that has rows for each run is of one run a variant, where the budget asks for it."""
    shown = material if budget.seeds or part not in _OF_EACH_RUN else material.one_of_each()
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
    budget, size = Budget(), 0
    while True:
        found, missing = sections(material, budget)
        text = render(Page(title, _about(material), verdict(material), found, missing))
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
    return ", ".join([*told, f"{left} not finished"] if left else told)
