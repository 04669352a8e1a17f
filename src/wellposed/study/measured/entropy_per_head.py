"""How dense attention is, head by head, in a run's weights (CB, analysis).

Entropy is over its maximum log n: 1 is uniform, 0 a single key.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from wellposed.probes import diagnose
from wellposed.study.measured.rows import measured_row
from wellposed.train.runs import Moment, TrainedRun, open_run

IMAGES = 16
_MEASURES = ("entropy", "softmax jacobian trace", "softmax jacobian frobenius")


def entropy_per_head(
    run: Path,
    study: Path | None = None,
    *,
    weights: Literal["best", "last"] = "last",
    initial: bool = True,
    images: int = IMAGES,
) -> list[dict[str, Any]]:
    """One row for each block and head, and one with no ``head`` for all of a block's.

    Args:
        run: the folder of a finished run.
        study: not used; a ``Study.after`` has it.
        weights: which of the run; its accuracy is of the last.
        initial: those that it started from as well.
        images: of its test set.
    """
    trained = open_run(run, images)
    moments = [trained.moment("initial")] if initial else []
    return [row for moment in (*moments, trained.moment(weights)) for row in _rows(trained, moment)]


def _rows(trained: TrainedRun, moment: Moment) -> Iterator[dict[str, Any]]:
    found = diagnose(
        trained.model(moment),
        trained.images,
        what="density",
        attention_images=len(trained.images),
        progress=False,
    )
    for measure in _MEASURES:
        for record in found.select(measure):
            yield measured_row(record, moment)
