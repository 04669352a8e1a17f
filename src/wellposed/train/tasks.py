"""What is trained: a classifier, a masked autoencoder, or a head on a frozen trunk; and how it is tested.

A task knows its loss and nothing of devices, processes or time. ``module`` is what the optimizer sees,
``trunk`` the timm model in it, which edits, exports and measurements are about.

>>> import timm
>>> model = timm.create_model("test_vit", img_size=32, num_classes=10)
>>> [parameter.shape for parameter in freeze_for_probe(model)]
[torch.Size([10, 64]), torch.Size([10])]
>>> probe_train_mode(model)
>>> model.blocks.training, model.head.training
(False, True)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn
from torch.nn import functional

from wellposed.probes.observe import plain
from wellposed.train.batches import Batch, EvalBatch, EvalBatches
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
            module.register_forward_hook(in_order, prepend=True)


def in_order(module: nn.Module, args: tuple[Any, ...], tokens: Tensor) -> Tensor:
    """Forward hook."""
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
