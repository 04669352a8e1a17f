"""What is trained: a classifier, a masked autoencoder, or a head on a frozen trunk.

A task knows its loss and nothing of devices, processes or time. ``module`` is what the optimizer sees,
``trunk`` the timm model in it, which edits, exports and measurements are about.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from wellposed.train.batches import Batch, EvalBatch
from wellposed.train.linear_probe import freeze_for_probe, probe_train_mode
from wellposed.train.mae import FixedMask, MaskedAutoencoder, MaskedOutput, encoder_state
from wellposed.train.mae_masks import fixed_mask_noise, mask_noise
from wellposed.train.recipe import Recipe
from wellposed.train.token_order import order_tokens

WATCHED = 64
"""Images that a monitor may show a masked autoencoder, at most."""


class Scores(NamedTuple):
    """Of each image (b,): its loss, and 1 if its class was found. MAE finds no classes."""

    loss: Tensor
    correct: Tensor | None


class Task(Protocol):
    module: nn.Module
    trunk: nn.Module

    def train_mode(self) -> None: ...

    def inputs(self, batch: Batch, update: int, number: int) -> tuple[Tensor, ...]:
        """What the module takes for pass ``number`` of an update."""
        ...

    def loss(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The mean loss of a pass, and how many images were classified right."""
        ...

    def eval_inputs(self, batch: EvalBatch, first: int) -> tuple[Tensor, ...]:
        """What the module takes for test images that start at position ``first`` of the test set."""
        ...

    def scores(self, output: Any, batch: EvalBatch) -> Scores: ...

    def watched(self) -> nn.Module:
        """What the monitor runs: a module of images alone."""
        ...

    def export_state(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of the module's gathered weights those that timm's model has."""
        ...


class Classification:
    """Cross-entropy, of hard or soft labels."""

    def __init__(self, model: nn.Module) -> None:
        self.module = self.trunk = model

    def train_mode(self) -> None:
        self.module.train()

    def inputs(self, batch: Batch, update: int, number: int) -> tuple[Tensor, ...]:
        return (batch.images,)

    def loss(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
        logits: Tensor = output.float()
        labels = batch.labels if batch.labels.ndim == 1 else batch.labels.argmax(-1)
        correct = (logits.detach().argmax(-1) == labels).sum()
        return functional.cross_entropy(logits, batch.labels), correct

    def eval_inputs(self, batch: EvalBatch, first: int) -> tuple[Tensor, ...]:
        return (batch.images,)

    def scores(self, output: Any, batch: EvalBatch) -> Scores:
        logits: Tensor = output.float()
        loss = functional.cross_entropy(logits, batch.labels, reduction="none")
        return Scores(loss, (logits.argmax(-1) == batch.labels).to(loss.dtype))

    def watched(self) -> nn.Module:
        return self.module

    def export_state(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights


class LinearProbe(Classification):
    """Only the head learns; dropout and batch norm of the trunk stay as in evaluation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        freeze_for_probe(model)

    def train_mode(self) -> None:
        probe_train_mode(self.module)


class MaskedPretraining:
    """Masks are drawn from (seed, update) and the place in the batch, whoever processes it."""

    def __init__(self, model: nn.Module, recipe: Recipe, positions: Tensor | None = None) -> None:
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
        self.positions = positions
        """(passes, images of a pass): this process's positions in a batch; None for all of them."""

    def train_mode(self) -> None:
        self.module.train()

    def inputs(self, batch: Batch, update: int, number: int) -> tuple[Tensor, ...]:
        noise = mask_noise(self.recipe.seed, update, self.recipe.batch_size, self.autoencoder.tokens)
        if self.positions is not None:
            noise = noise[self.positions[number]]
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


def make_task(model: nn.Module, recipe: Recipe, positions: Tensor | None = None) -> Task:
    order_tokens(model)
    if recipe.task == "mae":
        return MaskedPretraining(model, recipe, positions)
    return LinearProbe(model) if recipe.task == "probe" else Classification(model)
