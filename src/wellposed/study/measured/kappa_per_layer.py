"""Kappa of the tokens at every position of every block of a run's weights (ASA, Figure 1b).

The paper looks at four: what attention adds without its skip, that skip, what the MLP adds without its skip,
and that one. The input of the first block and what leaves the last one are its kappa in and kappa out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from wellposed.probes import diagnose
from wellposed.study.measured.rows import measured_row
from wellposed.train.trained_run import IMAGES, Moment, TrainedRun, open_run

FOUR = ("attention.branch", "attention.skip", "ffn.branch", "ffn.skip")
"""The paper's positions (1) to (4)."""

After = Callable[[Path, Path], list[dict[str, Any]]]
"""A ``Study.after``."""


def kappa_per_layer(
    run: Path,
    study: Path | None = None,
    *,
    weights: Literal["best", "last"] = "last",
    through_training: bool = False,
    images: int = IMAGES,
) -> list[dict[str, Any]]:
    """One row for each block and position; ``value`` is the median over the images, ``log`` its logarithm.

    Args:
        run: the folder of a finished run.
        study: not used; a ``Study.after`` has it.
        weights: which of the run; its accuracy is of the last.
        through_training: its start, its checkpoints and its end as well; rows tell ``epoch`` and ``weights``.
        images: of its test set.
    """
    trained = open_run(run, images)
    moments = trained.through_training() if through_training else []
    return [row for moment in (*moments, trained.moment(weights)) for row in _rows(trained, moment)]


def kappa_after(**options: Any) -> After:
    """:func:`kappa_per_layer` with options, as a ``Study.after``."""
    return lambda run, study: kappa_per_layer(run, study, **options)


def _rows(trained: TrainedRun, moment: Moment) -> list[dict[str, Any]]:
    found = diagnose(trained.model(moment), trained.images, what="conditioning", progress=False)
    return [measured_row(record, moment) for record in found.select("kappa")]
