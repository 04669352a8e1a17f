"""What a study is: which runs it needs, what is measured on them, and what is read off.

The way of a study: cells x data sets x seeds -> recipes -> runs -> records measured on the trained weights ->
a report. :mod:`wellposed.study.running` goes that way.

>>> [cell.name for cell in grid([Cell("no FFN skip", {"remove_skips": "ffn"})], lr=(1e-3, 3e-4))]
['no-ffn-skip-lr0.001', 'no-ffn-skip-lr0.0003']
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from wellposed.train.recipe import Recipe

Scale = Literal["small", "paper"]
"""``small`` ends on one GPU in minutes; ``paper`` is what the papers did."""

Verdict = Literal["reproduced", "partly", "not", "no difference", "incomplete"]
"""``no difference``: what the paper tells apart is closer than its deviation; ``incomplete``: runs are
missing, or the paper claims nothing to hold it against."""


@dataclass(frozen=True)
class Cell:
    """One variant of a grid.

    Args:
        label: the variant, as tables and figures call it. Cells that differ only in fields that the study
            chooses (``Study.choose``) have the same label, and the best of them stands for it.
        fields: of the recipe, over the base.
        chosen: those of ``fields`` that are chosen; :func:`grid` fills it in.
        starts_from: label of the cell whose weights, of the same seed, it starts from.
        reported: False for a run that others only start from.
    """

    label: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    chosen: Mapping[str, Any] = field(default_factory=dict)
    starts_from: str | None = None
    reported: bool = True

    @property
    def name(self) -> str:
        """Of its files."""
        return "-".join([slug(self.label), *(slug(f"{name}{value}") for name, value in self.chosen.items())])


def grid(cells: Iterable[Cell], **choices: Sequence[Any]) -> list[Cell]:
    """Each cell with each combination of the values, of which the best stands for the cell."""
    made = []
    for cell in cells:
        for values in itertools.product(*choices.values()):
            picked = dict(zip(choices, values, strict=True))
            made.append(replace(cell, fields={**cell.fields, **picked}, chosen={**cell.chosen, **picked}))
    return made


@dataclass(frozen=True)
class RunRecord:
    """One run, as a line of ``records.jsonl``.

    Args:
        label: of its cell.
        data: the set it was trained on, without its folder: ``cifar10``.
        seed: of the run.
        fields: what the cell changes, and ``chosen`` of it what was chosen.
        recipe: all fields of the run, with nothing open.
        state: ``finished``, ``nonfinite`` or ``failed``.
        result: its ``result.json``.
        curve: its tests: epoch, loss, accuracy, and the training loss before each.
        measured: what ``Study.after`` found in it.
        best: whether it belongs to the cell that stands for its label.
        reported: as in the cell.
        trial: whether it was a short run that only chose; it never counts in a mean.
        run: name of its folder, the same for equal recipes.
    """

    label: str
    data: str
    seed: int
    fields: Mapping[str, Any]
    chosen: Mapping[str, Any]
    recipe: Mapping[str, Any]
    state: str
    result: Mapping[str, Any]
    curve: Sequence[Mapping[str, Any]] = ()
    measured: Sequence[Mapping[str, Any]] = ()
    best: bool = True
    reported: bool = True
    trial: bool = False
    run: str = ""

    @property
    def accuracy(self) -> float | None:
        """In percent, of the last test: the best one would be chosen on the test images.

        Of a run that came to a loss that is not finite, of the last test before. None of a test that could
        not score all of its images.
        """
        test = (self.result.get("test") or {}) if self.state in ("finished", "nonfinite") else {}
        is_whole = isinstance(test.get("loss", 0.0), (int, float)) and not test.get("nonfinite")
        value = test.get("accuracy") if is_whole else None
        return 100.0 * value if isinstance(value, (int, float)) else None


@dataclass(frozen=True)
class StudyRecords:
    """All that a report is made from; nothing else is read.

    Args:
        name: of the study.
        scale: at which it ran.
        runs: one record each, in the order of the grid.
        measured: what ``Study.once`` found, without a run.
    """

    name: str
    scale: Scale
    runs: Sequence[RunRecord] = ()
    measured: Sequence[Mapping[str, Any]] = ()

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(run.data for run in self.runs))

    @property
    def labels(self) -> list[str]:
        """Of what is reported, in the order of the grid."""
        return list(dict.fromkeys(run.label for run in self.runs if run.reported))

    def of(self, label: str, data: str | None = None) -> list[RunRecord]:
        """The runs that stand for a label, one a seed."""
        return [
            run
            for run in self.runs
            if run.label == label and run.best and run.reported and not run.trial and data in (None, run.data)
        ]

    def on(self, data: str, what: str) -> str:
        """Words on a data set, with its name where there are several."""
        return f"{data}: {what}" if len(self.datasets) > 1 else what


@dataclass(frozen=True)
class StudyReport:
    """What a study found.

    Args:
        tables: by file name without suffix; ``table`` is the main one. Rows are mappings of plain values,
            the columns are those of the first row.
        draw: draws the figure into a file, with matplotlib; None for none.
        verdict: see :data:`Verdict`.
        reason: why, in a sentence with the numbers.
        notes: what a reader should know beside.
    """

    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    draw: Callable[[Path], None] | None
    verdict: Verdict
    reason: str
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Study:
    """A figure or table of a paper, or one beyond them.

    Args:
        name: of the command.
        title: one line for the list.
        paper: where in which paper, or ``beyond``.
        claim: what the paper says, in one sentence with its numbers.
        cells: what differs. Empty for a study without runs.
        base: the recipe that all share, for a scale and a data set as ``--data`` has it.
        report: what is read off.
        seeds: unless the user gives others. With a grid to choose from, all of it is trained with the first
            seed, and the best of each variant with the others too.
        trial: fields over the recipes with which a grid is tried, such as fewer epochs, or (scale, data) ->
            those. The best of each variant is then trained in full with all seeds, so that no accuracy is
            reported that something was chosen by. None, or no fields, chooses by the full run of the first
            seed.
        chooses_once: one data set chooses for all: that of the trials in the records, else the first given.
        after: (folder of a finished run, folder of the study) -> what is measured on its last weights, which
            its accuracy is of. Kept in the run's folder, and not measured again.
        once: (scale, folder of the study) -> what is measured without a run, once.
        on_cpu: whether the small scale takes minutes on a laptop with the embedded digits.
        jobs: runs beside each other, where the user and the machine do not say.
    """

    name: str
    title: str
    paper: str
    claim: str
    cells: Callable[[Scale], list[Cell]]
    base: Callable[[Scale, str], Recipe]
    report: Callable[[StudyRecords], StudyReport]
    seeds: tuple[int, ...] = (0, 1, 2)
    trial: Mapping[str, Any] | Callable[[Scale, str], Mapping[str, Any]] | None = None
    chooses_once: bool = False
    after: Callable[[Path, Path], list[dict[str, Any]]] | None = None
    once: Callable[[Scale, Path], list[dict[str, Any]]] | None = None
    on_cpu: bool = False
    jobs: int | None = None

    def trial_fields(self, scale: Scale, data: str) -> Mapping[str, Any]:
        """Over the recipes of a grid that is tried; empty where the full runs choose."""
        return self.trial(scale, data) if callable(self.trial) else self.trial or {}


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
