"""Mixup, CutMix and label smoothing: timm's, with draws that depend on (seed, update) alone.

timm draws one mixing weight (and one rectangle) for the batch it is given. Here every pass of an update, on
every process, draws the same, and the passes hold mirrored positions (see ``order.py``): together they are
what timm makes of the whole batch.
"""

from timm.data.mixup import Mixup, one_hot
from torch import Tensor

from wellposed.train.batches.draws import Purpose, numpy_seeded


class Mixing:
    """Makes the labels of a pass, and with mixup or CutMix mixes its images.

    Args:
        mixup, cutmix: alpha of each, 0 for none.
        smoothing: of the labels.
        classes: how many there are.
        seed: of the draws.
        probability: that an update is mixed.
    """

    def __init__(
        self,
        mixup: float,
        cutmix: float,
        smoothing: float,
        classes: int,
        seed: int,
        probability: float = 1.0,
    ) -> None:
        self.smoothing, self.classes, self.seed = smoothing, classes, seed
        self.mixes = mixup > 0 or cutmix > 0
        self._mixup = Mixup(
            mixup_alpha=mixup,
            cutmix_alpha=cutmix,
            prob=probability,
            label_smoothing=smoothing,
            num_classes=classes,
        )

    def __call__(self, update: int, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of one pass; the images are mixed in place."""
        if self.mixes:
            with numpy_seeded(self.seed, Purpose.MIX, update):
                images, labels = self._mixup(images, labels)
        elif self.smoothing > 0:
            off = self.smoothing / self.classes
            labels = one_hot(labels, self.classes, on_value=1.0 - self.smoothing + off, off_value=off)
        return images, labels
