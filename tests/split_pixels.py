"""A split as worker processes see it."""

import numpy as np

from wellposed.train.data import Split


class Pixels:
    """A Dataset of arrays, to see a split from a worker process."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> np.ndarray:
        return np.asarray(self.split.picture(index))
