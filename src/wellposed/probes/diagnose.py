"""One call that measures a model."""

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from wellposed.anatomy.model import Block, BlockSelection, is_settled, refusal, select
from wellposed.anatomy.model import blocks as all_blocks
from wellposed.probes.alarms import Alarm, alarm, signs
from wellposed.probes.attention_maps import no_attention
from wellposed.probes.attention_pictures import attention_pictures
from wellposed.probes.bounds import bounds as measure_bounds
from wellposed.probes.conditioning import ConditioningProbe
from wellposed.probes.density import DensityProbe
from wellposed.probes.diagnosis import Diagnosis
from wellposed.probes.grayed_embedding import GrayedEmbeddingProbe
from wellposed.probes.images import Batch, image_batches
from wellposed.probes.jacobian import jacobian_spectrum
from wellposed.probes.named_inputs import example_of
from wellposed.probes.nonfinite import first_nonfinite_of
from wellposed.probes.ntk import ntk_spectrum
from wellposed.probes.observe import plain
from wellposed.probes.parameters import gradient_norms, in_one_direction, weight_spectra
from wellposed.probes.passes import Probe, forward_passes
from wellposed.probes.tokens import TokenProbe
from wellposed.records import Record
from wellposed.surgery.undo import edits

What = Literal[
    "conditioning", "density", "tokens", "weights", "gradients", "attention", "bounds", "jacobian", "ntk"
]
EVERYTHING: tuple[What, ...] = get_args(What)
DEFAULT: tuple[What, ...] = ("conditioning", "density", "tokens")
IN_A_PASS = {"conditioning", "density", "tokens"}

NTK_IMAGES = 8
LINE_SECONDS = 15.0
"""Between two lines of progress where there is no terminal."""


def diagnose(
    model: nn.Module,
    images: object = None,
    *,
    what: What | Literal["all"] | Sequence[What] | None = None,
    blocks: BlockSelection = None,
    max_images: int | None = None,
    attention_images: int = 16,
    batch_size: int = 16,
    transform: Callable[[Any], Tensor] | None = None,
    progress: bool | None = None,
) -> Diagnosis:
    """Measure how ill-conditioned a model is, and leave it exactly as it was.

    Args:
        model: any model of a known family, edited or not, compiled or wrapped in DDP or not, on any
            device. It is run in evaluation mode, inside autocast if the caller is.
        images: a tensor (B, C, H, W), of videos with one more axis; a folder; paths or PIL images; a
            DataLoader. For texts, sounds or several inputs: a dict of what the model takes (``input_ids``,
            ``attention_mask``, ...), a tensor of token ids, or a DataLoader of these. Padding does not count.
            ``what="weights"`` needs none.
        what: ``"conditioning"``: kappa, ranks and spectrum of the tokens at each position of each block, and
            kappa right before and after a graying of the embedding or of pixels; ``"density"``: how near
            attention is to uniform; ``"tokens"``: their norms, outliers and the share of their mean;
            ``"weights"``: kappa and stable rank of the weights; ``"gradients"``: how much of
            the output's gradient reaches each block, of 4 images; ``"attention"``: pictures of what it looks
            at, of the first image; ``"bounds"``: kappa compared with what the
            paper's propositions say, on 4 images; ``"jacobian"``: extreme singular values of the attention
            and FFN Jacobians of the blocks named (of block 0 if none is), at the first image; ``"ntk"``:
            condition number of the neural tangent kernel of 8 images. None is the first three, ``"all"`` is
            all of them.
        blocks: an index, a slice, several indices, or None for all.
        max_images: None is all of a tensor or list, and a few dozen of a folder or DataLoader.
        attention_images: density is measured on so many images; the others keep fused attention.
        batch_size: of the forward passes.
        transform: from a PIL image to the model's input; None is the model's own preprocessing.
        progress: a progress bar on the terminal, and lines where there is none; None is the bar alone.

    Returns:
        The records with what they are of: printed a table, in files as CSV, JSON and a page.

    >>> import timm, torch
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
    >>> diagnosis = diagnose(model, torch.randn(2, 3, 224, 224))
    >>> diagnosis.select("kappa", block=1, position="attention.branch")[0].images
    2
    """
    started = time.perf_counter()
    chosen = _check_what(what)
    inner = plain(model)
    if images is None and chosen == ("weights",):
        return _diagnosis(inner, weight_spectra(inner, blocks=blocks), chosen, [], started)
    if images is None:
        others = ", ".join(name for name in chosen if name != "weights")
        raise ValueError(
            f'expected images to measure {others}, got none; what="weights" alone needs no images.'
        )
    batches = image_batches(images, inner, batch_size=batch_size, limit=max_images, transform=transform)
    if not is_settled(inner):
        all_blocks(inner, example=example_of(next(iter(batches))))
    found = _blocks(inner, blocks)
    notes: list[str] = []
    asks_for_density = what not in (None, "all")
    if not asks_for_density and all(map(no_attention, found)):
        for name in ("density", "attention"):
            if name in chosen:
                notes.append(f"{name} not measured: {no_attention(found[0])}")
        chosen = tuple(name for name in chosen if name not in ("density", "attention"))
    records: list[Record] = []
    with _Bar(progress) as bar:
        if IN_A_PASS & set(chosen):
            kept = {block.index for block in found}

            def probes(present: list[Block]) -> list[Probe]:
                wanted = [block for block in present if block.index in kept]
                made: list[Probe] = []
                if "conditioning" in chosen:
                    made += [ConditioningProbe(wanted), GrayedEmbeddingProbe(inner)]
                if "density" in chosen:
                    made.append(DensityProbe(wanted, attention_images, strict=asks_for_density))
                if "tokens" in chosen:
                    made.append(TokenProbe(wanted))
                return made

            records += forward_passes(model, bar.over(batches, "forward passes"), probes)
        if "weights" in chosen:
            example = example_of(next(iter(batches)))
            records += weight_spectra(model, blocks=blocks, example=example)
        if "gradients" in chosen:
            bar.say("gradients")
            records += gradient_norms(model, batches, blocks=blocks)
        if "attention" in chosen:
            bar.say("attention")
            records += attention_pictures(model, batches, blocks=blocks)
        if "bounds" in chosen:
            bar.say("bounds")
            records += measure_bounds(model, batches, blocks=blocks, strict=chosen == ("bounds",))
        if "jacobian" in chosen:
            if blocks is None:
                notes.append(f"The Jacobians are of block {found[0].index} alone; blocks= names others.")
            for block in found if blocks is not None else found[:1]:
                for part, skip in itertools.product(block.row.names, (False, True)):
                    bar.say(f"Jacobian of {block.name}, {part}{' with its skip' if skip else ''}")
                    spectrum = jacobian_spectrum(
                        model, batches, block=block.index, part=part, skip=skip, on_step=bar.step
                    )
                    records += spectrum.records()
        if "ntk" in chosen:
            bar.say("neural tangent kernel")
            records += ntk_spectrum(model, batches, max_images=NTK_IMAGES, groups="parts")
    notes += map(str, _signs(inner, batches, records))
    return _diagnosis(inner, records, chosen, batches.notes + notes, started)


def _diagnosis(
    model: nn.Module, records: Sequence[Record], what: Sequence[What], notes: list[str], started: float
) -> Diagnosis:
    parameter, made = next(model.parameters(), torch.empty(0)), edits(model)
    about = {
        "model": type(model).__name__,
        "edits": [f"{edit.kind} {edit.where} {edit.module} {edit.detail}".rstrip() for edit in made],
        "edited": [
            {"edit": edit.kind, "where": edit.where, "module": edit.module, "detail": edit.detail}
            for edit in made
        ],
        "images": max((record.images for record in records), default=0),
        "device": parameter.device.type,
        "torch": torch.__version__,
        "notes": notes,
        "what": list(what),
        "seconds": time.perf_counter() - started,
    }
    return Diagnosis(tuple(records), about)


def _signs(model: nn.Module, batches: Iterable[Batch], records: list[Record]) -> Iterator[Alarm]:
    """The signs of a collapse; where something is not finite, the first place."""
    bad = [r for r in records if r.measure in ("kappa", "token norm", "gradient norm") and None in r.samples]
    if bad:
        is_backward = all(record.measure == "gradient norm" for record in bad)
        loss = in_one_direction if is_backward else None
        found = (first_nonfinite_of(model, batch, loss) for batch in batches)
        place = next((each for each in found if each is not None), None)
        yield alarm("not finite", (), f"first in {bad[0].module}" if place is None else str(place))
    yield from (sign for sign in signs(records) if sign.name != "not finite")


def _check_what(what: What | Literal["all"] | Sequence[What] | None) -> tuple[What, ...]:
    if what is None:
        return DEFAULT
    if what == "all":
        return EVERYTHING
    chosen: tuple[What, ...] = (what,) if isinstance(what, str) else tuple(what)  # type: ignore[assignment]
    unknown = [name for name in chosen if name not in EVERYTHING]
    if unknown or not chosen:
        got = ", ".join(map(repr, unknown)) or "nothing"
        raise ValueError(f"what must be one or several of {', '.join(EVERYTHING)}, or all, got {got}.")
    return tuple(dict.fromkeys(chosen))


def _blocks(model: nn.Module, selection: BlockSelection) -> list[Block]:
    """The blocks to measure; those that can be neither edited nor measured only if there are no others."""
    chosen = select(all_blocks(model), selection)
    usable = [block for block in chosen if not block.row.refused]
    if not usable:
        raise refusal(chosen)
    return usable


class _Bar:
    """Progress on standard error: a bar on a terminal, elsewhere a line now and then if it is wanted."""

    def __init__(self, wanted: bool | None) -> None:
        before = random.getstate()  # rich draws a random number when it is first imported
        from rich.console import Console
        from rich.progress import Progress

        random.setstate(before)
        console = Console(stderr=True)
        is_bar = console.is_terminal and wanted is not False
        self.progress = Progress(console=console, transient=True, disable=not is_bar)
        self.task: Any = None
        self._has_lines, self._text, self._last = bool(wanted) and not is_bar, "", time.monotonic()

    def __enter__(self) -> "_Bar":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def say(self, text: str, total: int | None = None) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(text, total=total)
        self._text = text
        self._line("")

    def step(self, done: int, most: int) -> None:
        self.progress.update(self.task, completed=done, total=most)
        self._line(f", step {done} of at most {most}")

    def over(self, batches: Iterable[Batch], text: str) -> Iterator[Batch]:
        self.say(text)
        for done, batch in enumerate(batches):
            yield batch
            self.progress.update(self.task, description=f"{text}, {done + 1} batches")
            self._line(f", {done + 1} batches")

    def _line(self, how_far: str) -> None:
        now = time.monotonic()
        if self._has_lines and now - self._last >= LINE_SECONDS:
            self._last = now
            print(f"{self._text}{how_far}", file=sys.stderr, flush=True)
