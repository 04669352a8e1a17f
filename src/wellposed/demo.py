"""A small ViT on handwritten digits, trained as it is and with each edit: what changes?

Real images that come with a package, so it runs offline; the numbers are those of this run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import timm
import torch
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import wellposed as wp
from wellposed.probes.summary import Sample, summarize
from wellposed.records import Record
from wellposed.train.data.digits import TEST_IMAGES, all_digits

PROBE_IMAGES = 128


@dataclass(frozen=True)
class Digits:
    """8 x 8 grey images (n, 1, 8, 8), standardised, and their labels."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Outcome:
    """One row of the table."""

    name: str
    accuracy: float
    kappa_in: Record
    kappa_attention: Record
    kappa_ffn: Record
    entropy: Record


VARIANTS: tuple[tuple[str, Callable[[nn.Module], object] | None], ...] = (
    ("as it is", None),
    ("grayed, svd 0.7", lambda model: wp.gray_tokens(model, 0.7, "svd")),
    ("grayed, dct 0.95", lambda model: wp.gray_tokens(model, 0.95, "dct")),
    ("CB in every MLP", wp.broadcast_context),
    ("no FFN skips", lambda model: wp.remove_skips(model, "ffn")),
    ("no attention skips", lambda model: wp.remove_skips(model, "attention")),
)


def load_digits(seed: int) -> Digits:
    pixels, labels = all_digits()
    x = (torch.from_numpy(pixels).float() * 16 / 255).round().unsqueeze(1)  # the original grey levels
    x = (x - x.mean()) / x.std()
    y = torch.from_numpy(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return Digits(x[train], y[train], x[test], y[test])


def build_model(seed: int) -> nn.Module:
    """ViT with 16 patches of 2 x 2 pixels and a class token.

    Xavier initialisation, because with timm's own a model without skips does not start to learn.
    """
    torch.manual_seed(seed)
    model: nn.Module = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=8,
        patch_size=2,
        in_chans=1,
        num_classes=10,
        embed_dim=48,
        depth=6,
        num_heads=3,
    )
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return model


def train(model: nn.Module, data: Digits, epochs: int, seed: int) -> Iterator[float]:
    """AdamW with a one-cycle schedule; yields the mean loss of each epoch."""
    generator = torch.Generator().manual_seed(seed)
    batch = 64
    steps = len(data.train_x) // batch
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=epochs * steps)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(data.train_x), generator=generator)
        total = 0.0
        for indices in order[: steps * batch].reshape(steps, batch):
            loss = nn.functional.cross_entropy(model(data.train_x[indices]), data.train_y[indices])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
            total += loss.item()
        yield total / steps


def accuracy(model: nn.Module, data: Digits) -> float:
    model.eval()
    with torch.inference_mode():
        correct: Tensor = model(data.test_x).argmax(-1) == data.test_y
    return correct.double().mean().item()


def measure(model: nn.Module, images: Tensor) -> dict[str, Record]:
    """Medians over images and blocks: kappa into the first block and of what the branches add, entropy."""
    diagnosis = wp.diagnose(model, images, attention_images=len(images), batch_size=len(images))

    def median(measure: str, **where: Any) -> Record:
        records = diagnosis.select(measure, head=None, **where)
        values = torch.tensor([value for record in records for value in record.samples], dtype=torch.float64)
        flags = [index in record.at_least for record in records for index in range(len(record.samples))]
        return summarize(measure, Sample(values, torch.tensor(flags)))

    return {
        "kappa_in": median("kappa", block=0, position="input"),
        "kappa_attention": median("kappa", position="attention.branch"),
        "kappa_ffn": median("kappa", position="ffn.branch"),
        "entropy": median("entropy"),
    }


def run(epochs: int = 20, seed: int = 0, console: Console | None = None) -> list[Outcome]:
    """Train every variant and print the table. Returns its rows."""
    console = console or Console()
    data = load_digits(seed)
    outcomes = []
    columns = (*Progress.get_default_columns(), TimeElapsedColumn(), TextColumn("{task.fields[status]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("training", total=len(VARIANTS) * epochs, status="")
        for name, edit in VARIANTS:
            model = build_model(seed)
            if edit is not None:
                edit(model)
            for loss in train(model, data, epochs, seed):
                progress.update(task, advance=1, status=f"{name}, loss {loss:.3f}")
            measured = measure(model, data.test_x[:PROBE_IMAGES])
            outcomes.append(Outcome(name, accuracy(model, data), **measured))
    console.print(as_table(outcomes, data, epochs, seed))
    return outcomes


def as_table(outcomes: list[Outcome], data: Digits, epochs: int, seed: int) -> Table:
    table = Table(
        title="A small ViT on handwritten digits, with and without each edit",
        caption=(
            f"{len(data.train_x)} training and {len(data.test_x)} test images of handwritten digits, "
            f"{epochs} epochs, one run, seed {seed}. kappa: condition number of the token matrix, median "
            f"over {PROBE_IMAGES} test images and all blocks, float64 SVD, after training; 'into block 0' "
            "are the tokens that the first block sees, the others are what a branch adds, without its skip. "
            "entropy: of the attention rows, 1 is uniform."
        ),
        caption_justify="left",
    )
    table.add_column("model", no_wrap=True)
    titles = ("accuracy", "kappa into\nblock 0", "kappa of\nattention", "kappa\nof FFN", "entropy")
    for title in titles:
        table.add_column(title, justify="right")
    for row in outcomes:
        measured = (row.kappa_in, row.kappa_attention, row.kappa_ffn, row.entropy)
        table.add_row(row.name, f"{row.accuracy:.1%}", *(record.text() for record in measured))
    return table
