"""What is trained: the model of a recipe, its task, and how it is tested.

The model is built by timm, initialised, edited, and loaded with trained weights. These, for fine-tuning or a
linear probe, must fit the trunk in every tensor. What belongs to another task may start fresh, and is
reported: the head of another number of classes, the norm of another pooling, the scales of CB_S.

A task (classifier, masked autoencoder, head on a frozen trunk) knows its loss and nothing of devices,
processes or time. ``module`` is what the optimizer sees, ``trunk`` the timm model in it, which edits, exports
and measurements are about.

>>> import timm
>>> model = timm.create_model("test_vit", img_size=32, num_classes=10)
>>> [parameter.shape for parameter in freeze_for_probe(model)]
[torch.Size([10, 64]), torch.Size([10])]
>>> probe_train_mode(model)
>>> model.blocks.training, model.head.training
(False, True)
"""

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn
from torch.nn import functional

from wellposed import surgery
from wellposed.anatomy.model import refuse_wrapped
from wellposed.models import build, describe_weights, say_weights, timm_architecture
from wellposed.probes.observe import plain
from wellposed.saving import lacks
from wellposed.surgery import Edits
from wellposed.surgery.insertion import scales
from wellposed.text import few
from wellposed.train.batches import Batch, EvalBatch, EvalBatches
from wellposed.train.edits import apply_edits
from wellposed.train.mae import (
    FixedMask,
    MaskedAutoencoder,
    MaskedOutput,
    encoder_state,
    fixed_mask_noise,
    mask_noise,
)
from wellposed.train.order import slot_positions
from wellposed.train.parallel import read, total
from wellposed.train.recipe import Recipe
from wellposed.weights import from_file, misfits, read_weights


@dataclass(frozen=True)
class Built:
    """A model with the options that plain timm needs to build it again."""

    model: nn.Module
    options: dict[str, Any]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    edits: Edits
    notes: list[str] = field(default_factory=list)


def build_model(recipe: Recipe, classes: int, channels: int) -> Built:
    """The model of a resolved recipe, on the CPU; equal recipes give equal weights."""
    if recipe.model.startswith(("hf:", "tv:")):
        raise ValueError(
            f"expected a model of timm to train, got {recipe.model}; timm.list_models() lists all. In a loop "
            "of your own any model can be edited: wellposed.gray_tokens(model)."
        )
    options: dict[str, Any] = {"num_classes": classes, "in_chans": channels}
    if recipe.drop_path:
        options["drop_path_rate"] = recipe.drop_path
    _check_options(recipe, options)
    options |= recipe.model_options
    model, options = _build(recipe, options)
    _check_patches(model, recipe)
    if recipe.init == "xavier":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(recipe.seed)
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    nn.init.xavier_uniform_(module.weight)
    elif recipe.init != "timm":
        surgery.initialise(model, recipe.init, seed=recipe.seed)
    edits = apply_edits(model, recipe)
    if recipe.start_from is not None:
        notes = start_from(model, recipe.start_from)
    else:
        notes = [f"Starts from {describe_weights(model)}."] if recipe.pretrained else []
    mean, std = _statistics(model, channels)
    _, own = timm_architecture(recipe.model)
    return Built(model, own | options, mean, std, edits, notes)


def _build(recipe: Recipe, options: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """The model as timm makes it; one that takes images of any size has no option for it."""
    patch: dict[str, Any] = {} if recipe.patch_size is None else {"patch_size": recipe.patch_size}
    own: dict[str, Any] = patch | {"img_size": recipe.image_size} | options
    try:
        try:
            return build(recipe.model, seed=recipe.seed, pretrained=recipe.pretrained, **own), own
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            own = patch | options
            return build(recipe.model, seed=recipe.seed, pretrained=recipe.pretrained, **own), own
    except TypeError as error:
        raise TypeError(
            f"timm's {recipe.model} does not take the options of the recipe: {error}. Leave it out of "
            "patch_size, drop_path or model_options."
        ) from error


def _check_options(recipe: Recipe, of_the_data: dict[str, Any]) -> None:
    """A model of another number of classes or channels would fail in the first update."""
    for name in ("num_classes", "in_chans"):
        is_headless = recipe.task == "mae" and name == "num_classes"
        given = recipe.model_options.get(name, of_the_data[name])
        if given != of_the_data[name] and not is_headless:
            raise ValueError(
                f"{name} must be {of_the_data[name]}, as {recipe.data} has it, got {given!r} in "
                "model_options; leave it out."
            )


def _check_patches(model: nn.Module, recipe: Recipe) -> None:
    """What timm's patch embedding would refuse in its first forward pass."""
    embed, size = getattr(model, "patch_embed", None), recipe.image_size
    if not isinstance(embed, PatchEmbed) or size is None or embed.dynamic_img_pad:
        return
    patch = embed.patch_size[0]
    if patch > size or (size % patch and not embed.strict_img_size):
        fits = ", ".join(str(side) for side in range(1, size + 1) if size % side == 0)
        raise ValueError(
            f"patch_size must divide the side of the images, {size} pixels, got {patch}; take one of {fits}, "
            "or another image_size."
        )


def _statistics(model: nn.Module, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the pixels that the model's library expects."""
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    mean = tuple(config.get("mean", (0.5, 0.5, 0.5)))
    std = tuple(config.get("std", (0.5, 0.5, 0.5)))
    if len(mean) != channels:
        mean = (sum(mean) / len(mean),) * channels
        std = (sum(std) / len(std),) * channels
    return mean, std


_IN_A_RUN = ("best/model.safetensors", "last/model.safetensors", "model.safetensors")
_NORMS = ("norm", "fc_norm")
"""timm's ViTs have one of them, by how they pool the tokens."""
_POOLING = "attn_pool"


class _Plan(NamedTuple):
    """What becomes of the tensors of a file: those to load, what to report, and what does not fit."""

    load: dict[str, Tensor]
    notes: list[str]
    misfits: list[str]


def start_from(model: nn.Module, source: str | Path) -> list[str]:
    """Load trained weights into a fresh timm model, edited or not; if they do not fit, nothing is loaded.

    Position and patch embeddings of another size are resampled, as timm does; those of another image size are
    taken to be of square images.

    Args:
        model: not yet compiled, sharded or replicated.
        source: a file of weights (.safetensors, .pth, .pt, ...), or the folder of a run: its best weights,
            else its last.

    Returns:
        Sentences: what was loaded, what was resampled and what starts fresh.
    """
    refuse_wrapped(model)
    path = weights_file(source)
    state, taken = read_weights(path)
    plan, resampled = _plan(model, state), list[str]()
    if plan.misfits:
        converted = _converted_by_timm(model, state, path)
        plan = _plan(model, converted)
        changed = [
            f"{key}, from {tuple(state[key].shape)} to {tuple(value.shape)}"
            for key, value in converted.items()
            if key in state and state[key].shape != value.shape
        ]
        if changed:
            resampled = [f"Resampled for another size of image or patch: {few(changed)}."]
    if plan.misfits:
        raise _unfit(model, path, plan.misfits)
    own = model.state_dict()
    model.load_state_dict(own | plan.load)
    words = from_file(path, taken)
    say_weights(model, words)
    return [
        f"{words[:1].upper()}{words[1:]}: {len(plan.load)} of {len(own)} tensors.",
        *resampled,
        *plan.notes,
        *([f"{lacking}."] if (lacking := lacks(model, path)) else []),
    ]


def weights_file(source: str | Path) -> Path:
    """The file of weights that ``source`` means: itself, or that of a run's folder."""
    path = Path(source).expanduser()
    if not path.is_dir():
        if not path.exists() and not path.suffix:
            raise FileNotFoundError(f"expected a file of weights or the folder of a run, there is no {path}.")
        return path
    for name in _IN_A_RUN:
        if (path / name).is_file():
            return path / name
    raise FileNotFoundError(
        f"expected {' or '.join(_IN_A_RUN[:2])} in {path}, there is neither; a run writes them as it goes."
    )


def _plan(model: nn.Module, state: dict[str, Tensor]) -> _Plan:
    there, needed = dict(state), dict(model.state_dict())
    notes = _set_aside(model, there, needed)
    return _Plan({key: there[key] for key in needed if key in there}, notes, misfits(needed, there))


def _set_aside(model: nn.Module, there: dict[str, Tensor], needed: dict[str, Tensor]) -> list[str]:
    """Take out of the file's tensors and of the model's what need not fit; returns sentences on it."""
    notes = []

    def set_aside(names: Iterable[str], words: str) -> None:
        notes.append(words)
        for state in (there, needed):
            for key in _under(state, names):
                del state[key]

    heads = list(classifiers(model))
    if words := _head_misfit(_under(there, heads), _under(needed, heads)):
        set_aside(heads, words)

    swap = [name for name in _NORMS if bool(_under(there, [name])) != bool(_under(needed, [name]))]
    if len(swap) == 2:
        left, fresh = sorted(swap, key=lambda name: bool(_under(needed, [name])))
        set_aside(
            swap, f"{fresh} starts fresh, the file's {left} is skipped: they pool the tokens differently."
        )
    if bool(_under(there, [_POOLING])) != bool(_under(needed, [_POOLING])):
        starts = bool(_under(needed, [_POOLING]))
        set_aside([_POOLING], f"{_POOLING} starts fresh." if starts else f"The file's {_POOLING} is skipped.")

    fresh_scales = [key for key in scales(model) if key not in there]
    if fresh_scales:
        set_aside(fresh_scales, f"{len(fresh_scales)} CB_S scales start fresh: the file does not hold them.")
    return notes


def _under(state: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of the modules, or with the very names, that are given."""
    names = tuple(names)
    prefixes = tuple(f"{name}." for name in names)
    return {key: value for key, value in state.items() if key in names or key.startswith(prefixes)}


def _head_misfit(there: dict[str, Tensor], needed: dict[str, Tensor]) -> str | None:
    """What to report if the file's head does not fit."""
    if there.keys() == needed.keys() and all(there[key].shape == needed[key].shape for key in needed):
        return None
    if not needed:
        return "The file's head is skipped: the model has none."
    if not there:
        return "The head starts fresh: the file has none."
    counts = [next(iter(tensors.values())).shape[0] for tensors in (there, needed)]
    if counts[0] == counts[1]:
        return "The head starts fresh: the file's is of another shape."
    return f"The head starts fresh: the file's has {counts[0]} classes, the model's {counts[1]}."


def _converted_by_timm(model: nn.Module, state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The weights as the filter of the model's own timm module makes them: renamed, resampled."""
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return state
    try:
        _check_grid(model, state)
        converted: dict[str, Tensor] = convert(dict(state), model)
    except Exception as error:
        # timm's filters are written for files that it knows: they fail in many ways on others.
        reason = f"and timm cannot convert them ({type(error).__name__}: {error})"
        raise _unfit(model, path, [*_plan(model, state).misfits, reason]) from error
    return converted


def _check_grid(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Refuse a position embedding whose grid is not known: timm would take it for the nearest square."""
    held, own = state.get("pos_embed"), getattr(model, "pos_embed", None)
    if held is None or own is None or held.ndim != 3 or held.shape == own.shape:
        return
    prefix: Any = 0 if getattr(model, "no_embed_class", False) else getattr(model, "num_prefix_tokens", 0)
    patches = held.shape[1] - prefix
    if math.isqrt(max(patches, 0)) ** 2 != patches:
        raise ValueError(f"pos_embed has {patches} patches, which is no square")


def _unfit(model: nn.Module, path: Path, reasons: list[str]) -> ValueError:
    return ValueError(
        f"the weights in {path} do not fit {type(model).__name__}: {'; '.join(reasons)}. "
        "Nothing was loaded; take the model and the edits that they were trained with "
        "(model, model_options, patch_size, broadcast)."
    )


def classifiers(model: nn.Module) -> dict[str, nn.Module]:
    """The classifier of a timm model by its name in the model; a distilled DeiT has two."""
    inner: Any = plain(model)
    found = inner.get_classifier()
    wanted = found if isinstance(found, (tuple, list)) else (found,)
    return {name: module for name, module in inner.named_modules() if any(module is head for head in wanted)}


def freeze_for_probe(model: nn.Module) -> list[nn.Parameter]:
    """Freeze all but the classifier, and go to :func:`probe_train_mode`. Returns what is left to train."""
    heads = classifiers(model).values()
    left = [parameter for head in heads for parameter in head.parameters()]
    if not left:
        raise ValueError(
            "a linear probe trains the model's head, got a model without one; use num_classes >= 2."
        )
    model.requires_grad_(False)
    for parameter in left:
        parameter.requires_grad_(True)
    probe_train_mode(model)
    return left


def probe_train_mode(model: nn.Module) -> None:
    """Instead of ``model.train()``: the trunk's dropout and batch norm stay as in evaluation."""
    model.eval()
    for head in classifiers(model).values():
        head.train()


def order_tokens(model: nn.Module) -> None:
    """Let patch embeddings return (B, N, D) tokens that lie in this order; values stay the same.

    A patch convolution writes channel by channel, and timm's embedding is a transposed view of that.
    Additions keep the order of what they add to, so in a model that joins no class token every block gets
    tokens whose numbers lie far apart: each of its norms gathers them, and compiled ones need a loop over
    what a GPU could read at once.
    """
    for module in model.modules():
        if isinstance(module, PatchEmbed):
            # Before edits that stand after the embedding: they read the tokens too.
            module.register_forward_hook(_in_order, prepend=True)


def _in_order(module: nn.Module, args: tuple[Any, ...], tokens: Tensor) -> Tensor:
    return tokens.contiguous() if tokens.dim() == 3 else tokens


WATCHED = 64
"""Images that a monitor may show a masked autoencoder, at most."""


class Scores(NamedTuple):
    """Of each image (b,): its loss, and 1 if its class was found. MAE finds no classes."""

    loss: Tensor
    correct: Tensor | None


class Task:
    """Classification: cross-entropy, of hard or soft labels. What is trained otherwise is a subclass."""

    def __init__(self, model: nn.Module) -> None:
        self.module = self.trunk = model

    def train_mode(self) -> None:
        self.module.train()

    def inputs(self, batch: Batch, update: int, number: int) -> tuple[Tensor, ...]:
        """What the module takes for pass ``number`` of an update."""
        return (batch.images,)

    def loss(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The mean loss of a pass, and how many images were classified right."""
        logits: Tensor = output.float()
        labels = batch.labels if batch.labels.ndim == 1 else batch.labels.argmax(-1)
        correct = (logits.detach().argmax(-1) == labels).sum()
        return functional.cross_entropy(logits, batch.labels), correct

    def eval_inputs(self, batch: EvalBatch, first: int) -> tuple[Tensor, ...]:
        """What the module takes for test images that start at position ``first`` of the test set."""
        return (batch.images,)

    def scores(self, output: Any, batch: EvalBatch) -> Scores:
        logits: Tensor = output.float()
        loss = functional.cross_entropy(logits, batch.labels, reduction="none")
        return Scores(loss, (logits.argmax(-1) == batch.labels).to(loss.dtype))

    def watched(self) -> nn.Module:
        """What the monitor runs: a module of images alone."""
        return self.module

    def export_state(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of the module's gathered weights those that timm's model has."""
        return weights


class LinearProbe(Task):
    """Only the head learns; dropout and batch norm of the trunk stay as in evaluation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        freeze_for_probe(model)

    def train_mode(self) -> None:
        probe_train_mode(self.module)


class MaskedPretraining(Task):
    """Masks are drawn from (seed, update) and the place in the batch, whoever processes it."""

    def __init__(self, model: nn.Module, recipe: Recipe, rank: int, world: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(recipe.seed)
            self.module: nn.Module = MaskedAutoencoder(
                model,
                mask_ratio=recipe.mask_ratio,
                decoder_width=recipe.decoder_width,
                decoder_depth=recipe.decoder_depth,
                norm_pixels=recipe.norm_pixels,
            )
        self.trunk = model
        self.autoencoder: MaskedAutoencoder = self.module
        self.recipe = recipe
        self.positions = [
            slot_positions(number * world + rank, world * recipe.accumulate, recipe.batch_size)
            for number in range(recipe.accumulate)
        ]
        """Of this process's images in a batch, for each pass."""

    def inputs(self, batch: Batch, update: int, number: int) -> tuple[Tensor, ...]:
        noise = mask_noise(self.recipe.seed, update, self.recipe.batch_size, self.autoencoder.tokens)
        noise = noise[torch.from_numpy(self.positions[number])]
        return batch.images, noise.to(batch.images.device, non_blocking=True)

    def loss(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
        masked: MaskedOutput = output
        return masked.loss, None

    def eval_inputs(self, batch: EvalBatch, first: int) -> tuple[Tensor, ...]:
        noise = fixed_mask_noise(self.recipe.seed, first, len(batch.images), self.autoencoder.tokens)
        return batch.images, noise.to(batch.images.device, non_blocking=True)

    def scores(self, output: Any, batch: EvalBatch) -> Scores:
        masked: MaskedOutput = output
        errors = (masked.prediction - self.autoencoder.targets(batch.images)).square().mean(-1)
        return Scores((errors * masked.mask).sum(1) / masked.mask.sum(1), None)

    def watched(self) -> nn.Module:
        noise = fixed_mask_noise(self.recipe.seed, 0, WATCHED, self.autoencoder.tokens)
        return FixedMask(self.module, noise)

    def export_state(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return encoder_state(weights)


def make_task(model: nn.Module, recipe: Recipe, rank: int = 0, world: int = 1) -> Task:
    """The recipe's task for a model, on one of the processes of a run."""
    order_tokens(model)
    if recipe.task == "mae":
        return MaskedPretraining(model, recipe, rank, world)
    return LinearProbe(model) if recipe.task == "probe" else Task(model)


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
