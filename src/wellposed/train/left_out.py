"""Streamed images that cannot be read: they are found as training goes, and told then."""

from wellposed.train.agree import of_all
from wellposed.train.batches import EvalBatches, TrainBatches
from wellposed.train.data.headers import counted
from wellposed.train.recipe import Recipe

_INSTEAD = {"train": "Others stand in for them.", "test": "They were left out."}


class LeftOut:
    """What ``skip_unreadable`` leaves out of the streamed images of a run."""

    def __init__(self, recipe: Recipe, train: TrainBatches, test: EvalBatches) -> None:
        self._data = recipe.data
        self._finds_some = recipe.skip_unreadable and train.placement == "stream"
        self._splits: dict[str, TrainBatches | EvalBatches] = {"train": train, "test": test}
        self._told = dict.fromkeys(self._splits, 0)

    def news(self) -> list[str]:
        """A sentence for each split where more were found since the last call; all processes must call it."""
        if not self._finds_some:
            return []
        sentences = []
        for split, batches in self._splits.items():
            # Every process has met its own share of the images.
            batches.unreadable[:] = found = of_all(batches.unreadable)
            if len(found) > self._told[split]:
                total = batches.images + len(found)
                sentences.append(f"{counted(f'{self._data}, {split},', found, total)} {_INSTEAD[split]}")
            self._told[split] = len(found)
        return sentences
