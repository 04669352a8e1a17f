"""What a study is: its variants as recipes, what is measured on their weights, and what is read off.

A study is a module ``studies/NAME/study.py`` with ``STUDY``. Its criterion stands there before the runs: the
claims, their direction and margin. No setting is chosen while it runs; a setting that was chosen before
stands in its file, with where it comes from.
"""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from wellposed.stats import Claim
from wellposed.study_records import Role, RunRecord
from wellposed.train import Recipe

ROOT = Path(__file__).parent

Scale = Literal["small", "paper"]
"""``small`` takes minutes on one GPU, or on a laptop with the digits; ``paper`` is what the papers did."""


@dataclass(frozen=True)
class Variant:
    """One line of the tables.

    Args:
        label: as tables and figures call it.
        recipe: what is trained, but for the seed.
        start: label of the variant whose weights, of the same seed, it starts from.
        role: ``start`` for a run that others only start from.
        chosen: settings that were chosen for it, such as its learning rate.
    """

    label: str
    recipe: Recipe
    start: str | None = None
    role: Role = "result"
    chosen: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Records:
    """All that a report is made from.

    Args:
        scale: at which it ran.
        runs: one record each, by data set, variant and seed.
        measured: what ``Study.once`` found, without a run.
    """

    scale: Scale
    runs: Sequence[RunRecord] = ()
    measured: Sequence[Mapping[str, Any]] = ()

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(run.data for run in self.runs))

    @property
    def labels(self) -> list[str]:
        """Of the results."""
        return list(dict.fromkeys(run.label for run in self.runs if run.role == "result"))

    def of(self, label: str, data: str | None = None) -> list[RunRecord]:
        """The results of a variant, one a seed."""
        return [
            run
            for run in self.runs
            if run.label == label and run.role == "result" and data in (None, run.data)
        ]

    def on(self, data: str, what: str) -> str:
        """Words on a data set, with its name where there are several."""
        return f"{data}: {what}" if len(self.datasets) > 1 else what


@dataclass(frozen=True)
class Report:
    """What a study found.

    Args:
        tables: by file name without suffix; ``table`` is the main one. Rows are mappings of plain values,
            the columns are those of the first row.
        claims: each with its estimate; the runner judges them together, with Holm's correction.
        draw: draws the figure into a file, with matplotlib; None for none.
        notes: what a reader should know as well.
    """

    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    claims: Sequence[Claim]
    draw: Callable[[Path], None] | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Study:
    """A figure or table of a paper, or a question beyond them.

    Args:
        title: one line for the list.
        paper: where in which paper, or ``beyond``.
        claim: what the paper says, in one sentence with its numbers; or the question.
        variants: (scale, data set as ``--data`` has it) -> what is trained. Empty for a study without runs.
        report: what is read off.
        seeds: unless the user gives others.
        after: folder of a finished run -> what is measured on its last weights, which its accuracy is of.
        once: (scale, folder for its files, data sets, changes as ``--set`` has them) -> what is measured
            without a run.
        on_cpu: whether the small scale takes minutes on a laptop with the embedded digits.
        decides: what would decide its claims as published, in a sentence.
    """

    title: str
    paper: str
    claim: str
    variants: Callable[[Scale, str], list[Variant]]
    report: Callable[[Records], Report]
    seeds: tuple[int, ...] = (0, 1, 2)
    after: Callable[[Path], list[dict[str, Any]]] | None = None
    once: Callable[[Scale, Path, Sequence[str], Mapping[str, Any]], list[dict[str, Any]]] | None = None
    on_cpu: bool = False
    decides: str = ""


def names() -> list[str]:
    """Of all studies.

    >>> "context-broadcasting" in names()
    True
    """
    return sorted(path.parent.name.replace("_", "-") for path in ROOT.glob("*/study.py"))


def get(name: str) -> Study:
    """The study of a folder.

    >>> get("skip-ablatoin")
    Traceback (most recent call last):
    ValueError: there is no study 'skip-ablatoin'; the studies are ...
    """
    name = name.replace("_", "-")
    if name not in names():
        raise ValueError(f"there is no study {name!r}; the studies are {', '.join(names())}.")
    study: Study = importlib.import_module(f"studies.{name.replace('-', '_')}.study").STUDY
    return study


def folder_of(name: str, scale: Scale) -> Path:
    """Where a study's records, tables and figure are."""
    return ROOT / name.replace("-", "_") / scale


def data_name(spec: str) -> str:
    """A data set without its folder, for names and for files that others read.

    >>> [data_name(spec) for spec in ("digits", "cifar10:DIR", "packed:sets/tiny.npz", "sets/imagenet/")]
    ['digits', 'cifar10', 'tiny', 'imagenet']
    """
    kind, colon, rest = spec.partition(":")
    if not colon:
        return slug(Path(kind).name)
    return slug(Path(rest.split(",")[0]).stem if kind in ("packed", "hf", "wds", "folder") else kind)


def slug(text: str) -> str:
    """A text as part of a file's name.

    >>> slug("SVD, eps 0.7 (pixels)")
    'svd-eps-0.7-pixels'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
