"""Kappa, density, norms and gradients during training, for any loop, and alarms where they collapse."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch import distributed as dist

from wellposed.anatomy.model import Block, BlockSelection, select
from wellposed.anatomy.model import blocks as all_blocks
from wellposed.probes.alarms import Alarm, risen, signs
from wellposed.probes.attention_maps import no_attention
from wellposed.probes.conditioning import ConditioningProbe
from wellposed.probes.density import DensityProbe
from wellposed.probes.images import Batch, first_images
from wellposed.probes.named_inputs import example_of
from wellposed.probes.nonfinite import first_nonfinite_of
from wellposed.probes.observe import plain
from wellposed.probes.parameters import norms_in_place, weight_spectra
from wellposed.probes.passes import Probe, forward_passes
from wellposed.probes.tokens import TokenProbe
from wellposed.records import AT_LEAST, Record, named_text

_LOG = logging.getLogger("wellposed.monitor")


class Monitor:
    """Measures a fixed batch of images every so many steps and gives plain numbers.

    | key | number |
    | --- | --- |
    | `kappa/<block>/<position>` | of the block's input and of what each branch adds, median over the images |
    | `kappa/<position>/worst` | the largest over the blocks |
    | `entropy/<block>`, `entropy/mean` | of attention, 1 is uniform |
    | `outliers/<block>` | the longest token over the median one, at the block's output |
    | `mean_share/<block>` | of the tokens' square norm, that of their mean, at the block's output |
    | `gradient/<block>` | norm of the gradients that lie in the block's parameters |
    | `weight_kappa/<block>`, `weight_stable_rank/<block>` | the worst of its weights, with `weights=True` |
    | `alarm/<name>` | in how many blocks an alarm has just been raised |

    Where a kappa exceeds float32 resolution, its number is a lower bound, and there is ``KEY/at_least`` too,
    which is 1; :meth:`text` writes the number with its sign. What a block does not have is skipped.

    A sign of a collapse (see :mod:`wellposed.probes.alarms` for their names and thresholds) is an
    :class:`~wellposed.probes.alarms.Alarm` with the evidence and what to try. It is raised when it appears
    in a block, and again only after it was gone. ``raised`` has those of the last measurement.

    The model is seen as it trains: a compiled or DDP-wrapped one may be passed, nothing in it changes, and
    neither do gradients or random numbers. With FSDP2 every process must call it.

    Args:
        model: the model in training.
        images: as for :func:`wellposed.diagnose`, texts too; the first ``max_images`` are kept.
        every: steps between two measurements; step 0 is the first.
        blocks: an index, a slice, several indices, or None for all.
        max_images: in the fixed batch.
        attention_images: of these, for the density.
        weights: measure the weights too.
        on_alarm: gets each alarm; None logs it as a warning of the logger ``wellposed.monitor``, once in a
            distributed run.

    >>> import timm, torch
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    >>> monitor = Monitor(model, torch.randn(4, 3, 32, 32), every=50)
    >>> sorted(monitor(0))[:2], monitor(1)
    (['entropy/0', 'entropy/mean'], {})
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
        weights: bool = False,
        on_alarm: Callable[[Alarm], None] | None = None,
    ) -> None:
        for name, value in (("every", every), ("max_images", max_images)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        self.model, self.every, self.blocks = model, every, blocks
        self.attention_images, self.weights = attention_images, weights
        self.on_alarm = _log if on_alarm is None else on_alarm
        self.images: Batch = first_images(images, model, max_images)
        self.raised: list[Alarm] = []
        self._first: list[Record] | None = None
        self._known: dict[str, set[int]] = {}
        self._gradients: dict[int, float] = {}

    def __call__(self, step: int) -> dict[str, float]:
        """The numbers if ``step`` is a multiple of ``every``, else an empty dict."""
        return self.measure(step) if step % self.every == 0 else {}

    def measure(self, step: int | None = None) -> dict[str, float]:
        """The numbers now; ``step`` is for the alarms."""
        records = forward_passes(self.model, [self._batch()], self._probes)
        self.keep_gradients()
        gradients, self._gradients = self._gradients, {}
        numbers = _scalars(records) | {f"gradient/{block}": norm for block, norm in gradients.items()}
        if self.weights:
            example = example_of(self._batch())
            numbers |= _of_weights(weight_spectra(self.model, blocks=self.blocks, example=example))
        self._first = records if self._first is None else self._first
        self.raised = self._new([*signs(records, gradients), *risen(self._first, records)], step)
        for alarm in self.raised:
            self.on_alarm(alarm)
        return numbers | {
            f"alarm/{alarm.name.replace(' ', '_')}": float(max(len(alarm.blocks), 1)) for alarm in self.raised
        }

    def keep_gradients(self) -> None:
        """Look at the gradients now, for the next measurement: where they are gone when it comes."""
        present = [block for block in all_blocks(plain(self.model)) if not block.row.refused]
        self._gradients = norms_in_place(select(present, self.blocks)) or self._gradients

    @staticmethod
    def text(numbers: Mapping[str, float], key: str) -> str:
        """One of the numbers for people: ``"123"``, or ``"≥ 9.88e6"`` for a lower bound."""
        return named_text(numbers, key)

    def _new(self, alarms: list[Alarm], step: int | None) -> list[Alarm]:
        """Those that are in a block where they were not at the last measurement."""
        before = self._known
        self._known = {alarm.name: set(alarm.blocks) for alarm in alarms}
        new = []
        for alarm in alarms:
            if alarm.name in before and set(alarm.blocks) <= before[alarm.name]:
                continue
            if alarm.name == "not finite" and (bad := first_nonfinite_of(plain(self.model), self._batch())):
                alarm = replace(alarm, evidence=str(bad))
            new.append(replace(alarm, step=step))
        return new

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
        roles = {role for block in wanted for role in block.row.names}
        branches = {f"{role}.branch" for role in roles}
        probes: list[Probe] = [
            ConditioningProbe(wanted, spectra=0, positions={"input", *branches}),
            TokenProbe(wanted, {*branches, *(f"{role}.sum" for role in roles)}),
        ]
        if not all(map(no_attention, wanted)):
            probes.append(DensityProbe(wanted, self.attention_images, strict=False))
        return probes


def _log(alarm: Alarm) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        _LOG.warning("%s", alarm)


_AT_OUTPUTS = {"outlier tokens": "outliers", "mean share": "mean_share"}


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
        elif record.measure in _AT_OUTPUTS and record.position.endswith(".sum"):  # the last one stays
            out[f"{_AT_OUTPUTS[record.measure]}/{record.block}"] = record.value
    for position, records_there in worst.items():
        key = f"kappa/{position}/worst"
        out[key] = max(record.value or 0.0 for record in records_there)
        # A bound of any block may stand for a kappa that is larger than all.
        out |= _bound(key, any(record.status == "at least" for record in records_there))
    if entropies:
        out["entropy/mean"] = sum(entropies) / len(entropies)
    return out


def _of_weights(records: list[Record]) -> dict[str, float]:
    """The largest kappa and the smallest stable rank of each block's weights."""
    out: dict[str, float] = {}
    for block in dict.fromkeys(record.block for record in records):
        own = [record for record in records if record.block == block and record.value is not None]
        kappas = [record for record in own if record.measure == "weight kappa"]
        if kappas:
            out[f"weight_kappa/{block}"] = max(record.value or 0.0 for record in kappas)
            out |= _bound(f"weight_kappa/{block}", any(record.status == "at least" for record in kappas))
        if ranks := [record.value or 0.0 for record in own if record.measure == "weight stable rank"]:
            out[f"weight_stable_rank/{block}"] = min(ranks)
    return out


def _bound(key: str, is_bound: bool) -> dict[str, float]:
    return {key + AT_LEAST: 1.0} if is_bound else {}
