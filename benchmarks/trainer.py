"""What training costs compared with a bare step of timm and torch.

python -m benchmarks trainer [--model NAME] [--image-size N] [--batch-size N] [--precision bf16]

The bare step is a timm model, compiled as torch does by default, with a fused AdamW, on one batch that lies
on the device. The other is the trainer's own: batches out of a set with crops and mirroring, learning-rate
schedule, clipping, the guard against numbers that are not finite. Rounds of both alternate, so that a machine
that changes its speed changes both.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn

from wellposed.files import write_text
from wellposed.text import aligned
from wellposed.train.batches import make_batches
from wellposed.train.checkpoint import Store
from wellposed.train.data import ImageData, Split
from wellposed.train.data.images import PixelImages
from wellposed.train.fitting import from_data, from_model
from wellposed.train.loop import LOOK_EVERY, USUAL, Loop, Sums, paced
from wellposed.train.model import build_model, make_task
from wellposed.train.optimizer import make_optimizer
from wellposed.train.order import generators_kept
from wellposed.train.parallel import make_accelerator
from wellposed.train.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

WARM_UP = 12
CLASSES = 10


@dataclass(frozen=True)
class BenchResult:
    """Seconds an update, of each round; the monitor's are of one measurement."""

    recipe: Recipe
    device: str
    bare: list[float]
    trained: list[float]
    monitor: list[float]

    @property
    def ratio(self) -> float:
        """Of the trainer's update to the bare one, the median over the rounds."""
        return statistics.median(own / bare for own, bare in zip(self.trained, self.bare, strict=True))

    @property
    def images_per_second(self) -> float:
        return self.recipe.batch_size / statistics.median(self.trained)

    @property
    def monitor_every(self) -> int:
        """Updates between two measurements at the default pace."""
        return paced(statistics.median(self.monitor), statistics.median(self.trained))

    @property
    def monitor_share(self) -> float:
        """Of training time, that the monitor takes at its default pace."""
        cost = statistics.median(self.monitor) / self.monitor_every
        return cost / statistics.median(self.trained)

    def to_mapping(self) -> dict[str, Any]:
        return {
            "model": self.recipe.model,
            "image_size": self.recipe.image_size,
            "patch_size": self.recipe.patch_size,
            "batch_size": self.recipe.batch_size,
            "precision": self.recipe.precision,
            "compile": self.recipe.compile,
            "device": self.device,
            "torch": torch.__version__,
            "bare_seconds": self.bare,
            "train_seconds": self.trained,
            "ratio": self.ratio,
            "images_per_second": self.images_per_second,
            "monitor_seconds": self.monitor,
            "monitor_every": self.monitor_every,
            "monitor_share": self.monitor_share,
        }

    def table(self) -> str:
        def row(name: str, seconds: list[float]) -> tuple[str, ...]:
            middle = statistics.median(seconds)
            spread = f"{min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f}"
            return name, f"{middle * 1e3:.2f}", spread, f"{self.recipe.batch_size / middle:,.0f}"

        rows = [
            ("step", "ms", "over the rounds", "images/s"),
            row("bare timm", self.bare),
            row("wellposed", self.trained),
        ]
        return (
            f"{self.recipe.model}, {self.recipe.image_size} px, batch {self.recipe.batch_size}, "
            f"{self.recipe.precision}, {'compiled' if self.recipe.compile else 'eager'}, {self.device}\n\n"
            f"{aligned(rows)}\n\n"
            f"ratio {self.ratio:.3f}; the monitor takes {statistics.median(self.monitor) * 1e3:.0f} ms every "
            f"{self.monitor_every} updates: {self.monitor_share:.2%} of the time"
        )


def run(recipe: Recipe, *, updates: int = 50, rounds: int = 5) -> BenchResult:
    """Time the updates of a recipe on random images.

    Args:
        recipe: its model, sizes, precision and edits count; the data do not.
        updates: in one round.
        rounds: of each of the two.
    """
    with generators_kept(), tempfile.TemporaryDirectory() as folder:
        accelerator = make_accelerator(recipe, [], folder)
        device = accelerator.device
        data = _random_data(recipe)
        # A bare step mixes no images either.
        recipe = from_data(replace(recipe, monitor_every=0, mixup=0.0, smoothing=0.0), data)
        recipe = replace(recipe, compile=device.type == "cuda" if recipe.compile is None else recipe.compile)
        loop = _loop(recipe, data, accelerator, Path(folder))
        assert loop.monitor is not None
        monitor = loop.monitor.monitor
        trained, bare = _trained(loop), bare_step(recipe, device, len(data.classes), data.channels)
        for step in (bare, trained):
            _timed(step, WARM_UP, device)
        pairs = [(_timed(bare, updates, device), _timed(trained, updates, device)) for _ in range(rounds)]
        measured = [_timed(lambda _: monitor.measure(), 1, device) for _ in range(rounds + 1)][1:]
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        return BenchResult(recipe, name, [b for b, _ in pairs], [t for _, t in pairs], measured)


def _timed(step: Callable[[int], object], updates: int, device: torch.device) -> float:
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    before = time.perf_counter()
    step(updates)
    wait()
    return (time.perf_counter() - before) / updates


def _random_data(recipe: Recipe) -> ImageData:
    side = recipe.image_size or 224
    # A few batches: the gather of real data reads all over memory, but not more bytes.
    count = recipe.batch_size * (4 if side > 64 else 16)
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    labels = np.arange(count) % CLASSES
    split = Split(PixelImages(pixels, "random"), labels, 3)
    test = split.subset(range(recipe.batch_size))
    return ImageData("random", tuple(map(str, range(CLASSES))), split, test, 3, side, True)


def _loop(recipe: Recipe, data: ImageData, accelerator: "Accelerator", folder: Path) -> Loop:
    built = build_model(recipe, len(data.classes), data.channels)
    recipe, _ = from_model(recipe, built.model)
    assert recipe.image_size is not None
    train, test = make_batches(
        replace(recipe, placement="device"),
        data,
        image_size=recipe.image_size,
        mean=built.mean,
        std=built.std,
        device=accelerator.device,
        compile=bool(recipe.compile),
    )
    task = make_task(built.model, recipe)
    task.module.to(accelerator.device)
    # Enough epochs that the schedule does not end within the measurement.
    recipe = replace(recipe, epochs=10_000, monitor_every=USUAL)
    loop = Loop(recipe, task, task.module, train, test, accelerator, Store(folder), lambda *_: None)
    task.train_mode()
    return loop


def _trained(loop: Loop) -> Callable[[int], None]:
    sums = Sums.empty(loop.device)

    def step(updates: int) -> None:
        start = loop.progress.update
        for update, passes in loop.train.iterate(start, start + updates):
            loop.update(update, passes, sums)
            if (update + 1) % LOOK_EVERY == 0:
                loop.guard.read()
        loop.progress.update = start + updates

    return step


def bare_step(recipe: Recipe, device: torch.device, classes: int, channels: int) -> Callable[[int], None]:
    """A step as one writes it without a trainer."""
    model = build_model(recipe, classes, channels).model.to(device).train()
    forward: Any = torch.compile(model) if recipe.compile else model
    optimizer: torch.optim.Optimizer
    if recipe.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    else:
        optimizer = make_optimizer(model, recipe)
    side = recipe.image_size
    images = torch.randn(recipe.batch_size, channels, side, side, device=device)  # type: ignore[arg-type]
    labels = torch.randint(classes, (recipe.batch_size,), device=device)

    def step(updates: int) -> None:
        for _ in range(updates):
            with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
                loss: Tensor = nn.functional.cross_entropy(forward(images), labels)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def main(
    model: str = "test_vit",
    image_size: int | None = None,
    patch_size: int | None = None,
    batch_size: int = 128,
    precision: str = "fp32",
    compile: bool | None = None,
    device: str | None = None,
    updates: Annotated[int, typer.Option(min=1, help="Updates in one round.")] = 50,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here too.")] = None,
) -> None:
    """Images per second of training, and the ratio to a bare timm step."""
    recipe = Recipe(
        model=model,
        image_size=image_size,
        patch_size=patch_size,
        batch_size=batch_size,
        precision=precision,  # type: ignore[arg-type]
        compile=compile,
        device=device,
    )
    result = run(recipe, updates=updates)
    typer.echo(result.table())
    if json_file is not None:
        write_text(json_file, json.dumps(result.to_mapping(), indent=1) + "\n")
