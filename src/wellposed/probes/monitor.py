"""Kappa and density during training, for any loop.

>>> import timm, torch
>>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
>>> monitor = Monitor(model, torch.randn(4, 3, 32, 32), every=50)
>>> sorted(monitor(0))[:2], monitor(1)
(['entropy/0', 'entropy/mean'], {})
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from wellposed.anatomy.model import Block, BlockSelection, select
from wellposed.probes.attention_maps import no_attention
from wellposed.probes.conditioning import ConditioningProbe
from wellposed.probes.density import DensityProbe
from wellposed.probes.images import Batch, first_images
from wellposed.probes.passes import Probe, forward_passes
from wellposed.records import AT_LEAST, Record, named_text


class Monitor:
    """Measures a fixed batch of images every so many steps and gives plain numbers.

    The keys are ``kappa/<block>/<position>`` for the block's input and for what each branch adds, the median
    over the images, ``kappa/<position>/worst`` over the blocks, ``entropy/<block>`` and ``entropy/mean``.
    Where the arithmetic cannot tell a kappa, its number is a lower bound, and there is ``KEY/at_least`` too,
    which is 1; :meth:`text` writes the number with its sign. What a block does not have is skipped.

    The model is seen as it trains: a compiled or DDP-wrapped one may be passed, nothing in it changes, and
    neither do gradients or random numbers. With FSDP2 every process must call it.

    Args:
        model: the model in training.
        images: as for :func:`wellposed.diagnose`, texts too; the first ``max_images`` are kept.
        every: steps between two measurements; step 0 is the first.
        blocks: an index, a slice, several indices, or None for all.
        max_images: in the fixed batch.
        attention_images: of these, for the density.
    """

    def __init__(
        self,
        model: nn.Module,
        images: object,
        *,
        every: int = 100,
        blocks: BlockSelection = None,
        max_images: int = 4,
        attention_images: int = 4,
    ) -> None:
        for name, value in (("every", every), ("max_images", max_images)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        self.model, self.every, self.blocks = model, every, blocks
        self.attention_images = attention_images
        self.images: Batch = first_images(images, model, max_images)

    def __call__(self, step: int) -> dict[str, float]:
        """The numbers if ``step`` is a multiple of ``every``, else an empty dict."""
        return self.measure() if step % self.every == 0 else {}

    def measure(self) -> dict[str, float]:
        """The numbers now."""
        return _scalars(forward_passes(self.model, [self._batch()], self._probes))

    @staticmethod
    def text(numbers: Mapping[str, float], key: str) -> str:
        """One of the numbers for people: ``"123"``, or ``"≥ 9.88e6"`` for a lower bound."""
        return named_text(numbers, key)

    def _batch(self) -> Batch:
        # The model may have moved since.
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if isinstance(self.images, Tensor):
            self.images = self.images.to(device)
        else:
            self.images = self.images.mapped(lambda x: x.to(device))
        return self.images

    def _probes(self, found: list[Block]) -> list[Probe]:
        wanted = select(found, self.blocks)
        positions = {"input", *(f"{role}.branch" for block in wanted for role in block.row.names)}
        probes: list[Probe] = [ConditioningProbe(wanted, spectra=0, positions=positions)]
        if not all(map(no_attention, wanted)):
            probes.append(DensityProbe(wanted, self.attention_images, strict=False))
        return probes


def _scalars(records: list[Record]) -> dict[str, float]:
    out: dict[str, float] = {}
    worst: dict[str, list[Record]] = {}
    entropies: list[float] = []
    for record in records:
        if record.value is None or record.head is not None:
            continue
        if record.measure == "kappa":
            out[f"kappa/{record.block}/{record.position}"] = record.value
            out |= _bound(f"kappa/{record.block}/{record.position}", record.status == "at least")
            worst.setdefault(record.position, []).append(record)
        elif record.measure == "entropy":
            out[f"entropy/{record.block}"] = record.value
            entropies.append(record.value)
    for position, records_there in worst.items():
        key = f"kappa/{position}/worst"
        out[key] = max(record.value or 0.0 for record in records_there)
        # A bound of any block may stand for a kappa that is larger than all.
        out |= _bound(key, any(record.status == "at least" for record in records_there))
    if entropies:
        out["entropy/mean"] = sum(entropies) / len(entropies)
    return out


def _bound(key: str, is_bound: bool) -> dict[str, float]:
    return {key + AT_LEAST: 1.0} if is_bound else {}
