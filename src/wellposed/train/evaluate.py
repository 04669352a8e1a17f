"""The test set through the model, on one or many processes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wellposed.train.agree import total
from wellposed.train.batches import EvalBatches
from wellposed.train.reading import read
from wellposed.train.tasks import Task


@dataclass(frozen=True)
class Tested:
    """Means over the test images; no accuracy where nothing is classified.

    Images whose scores are not finite count as wrong; ``nonfinite`` is how many there are.
    """

    loss: float
    accuracy: float | None
    images: int
    nonfinite: int = 0


def evaluate(
    forward: Callable[..., Any],
    module: nn.Module,
    task: Task,
    batches: EvalBatches,
    device: torch.device,
    *,
    rank: int = 0,
    world: int = 1,
) -> Tested:
    """Test a module; it is left in evaluation mode. ``forward`` is the module or its compiled form."""
    module.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    has_classes = True
    with torch.no_grad():
        for number, batch in enumerate(batches):
            first = (number * world + rank) * len(batch.images)
            scores = task.scores(forward(*task.eval_inputs(batch, first)), batch)
            has_classes = scores.correct is not None
            bad = ~scores.loss.isfinite()
            correct = torch.zeros_like(scores.loss) if scores.correct is None else scores.correct
            # NaN has a largest entry too, which may be the right one.
            columns = (scores.loss, correct.masked_fill(bad, 0), torch.ones_like(scores.loss), bad)
            sums += torch.stack([(batch.weights * column).sum().double() for column in columns])
    loss, right, images, nonfinite = read(total(sums))
    return Tested(loss / images, right / images if has_classes else None, int(images), int(nonfinite))
