"""One run, from a recipe to trained weights.

::

    from wellposed.train import Recipe, fit

    result = fit(Recipe(data="cifar10:DIR", model="vit_tiny_patch16_224", graying="dct"))
    print(result.accuracy, result.folder)
"""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from rich.console import Console
from torch import Tensor

from wellposed.surgery import edits as edits_of
from wellposed.train.batches import EvalBatches, make_batches
from wellposed.train.batches.checks import check_batch_size, check_images, check_share
from wellposed.train.batches.order import slot_positions
from wellposed.train.batches.placement import choose_placement
from wellposed.train.checkpoint import Store
from wellposed.train.checkpoint.processes import from_first
from wellposed.train.data import ImageData, open_data
from wellposed.train.environment import environment
from wellposed.train.export import export_weights
from wellposed.train.folder_swap import recover
from wellposed.train.loop import BestWeights, Loop, Status
from wellposed.train.mae import MaskedAutoencoder
from wellposed.train.mae_check import check_mae, mae_warnings
from wellposed.train.mae_masks import mask_noise
from wellposed.train.mae_picture import draw_reconstruction
from wellposed.train.model import Built, build_model
from wellposed.train.optimize import check_optimizer
from wellposed.train.parallel import distribute
from wellposed.train.recipe import Recipe
from wellposed.train.report import Reporter, tracker_names
from wellposed.train.resolve import resolve, resolve_for
from wellposed.train.run_folder import default_folder, open_folder, write_environment
from wellposed.train.seeding import generators_kept
from wellposed.train.signals import StopRequest
from wellposed.train.tasks import make_task

MONITOR_IMAGES = 4


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        status: ``"finished"``; ``"terminated"`` by a signal, to go on later; ``"nonfinite"``.
        folder: of the run.
        accuracy: of the last test, None where nothing is classified or nothing was tested.
        best_accuracy: of the best test, which the weights in ``best`` had.
        summary: all numbers of ``result.json``; on other processes than the first it is empty.
    """

    status: Status
    folder: Path
    accuracy: float | None
    best_accuracy: float | None
    summary: dict[str, Any]


def fit(
    recipe: Recipe,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    console: Console | None = None,
) -> Result:
    """Train a model by a recipe, or go on where the same run was interrupted.

    Under ``torchrun`` or ``accelerate launch`` every process calls it. The caller's random generators stay as
    they are.

    Args:
        recipe: of the run.
        out: its folder; by default one under ``runs/`` whose name hangs on the recipe, so that the same call
            goes on.
        overwrite: delete the run that is in the folder.
        quiet: print nothing.
        console: to print on.
    """
    names = tracker_names(recipe)
    check_optimizer(recipe)
    with generators_kept():
        accelerator = _accelerator(recipe, names, out)
        return _fit(recipe, accelerator, out, overwrite, quiet, console)


def _accelerator(recipe: Recipe, trackers: list[str], out: str | Path | None) -> Accelerator:
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise ValueError(
            "sharding is a field of the recipe here: use --parallel fsdp2 and launch without --use_fsdp."
        )
    if not torch.distributed.is_initialized():
        # Accelerate keeps the first accelerator's settings for the whole process.
        AcceleratorState._reset_state(reset_partial_state=True)
    if recipe.device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {recipe.device!r}; a launcher chooses among GPUs.")
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda needs a GPU that torch sees, there is none; use device=cpu.")
    return Accelerator(
        cpu=recipe.device == "cpu",
        mixed_precision="bf16" if recipe.precision == "bf16" else "no",
        log_with=trackers or None,
        # The folder of a run without a given one is known later.
        project_dir=str(out if out is not None else "runs"),
    )


def _fit(
    recipe: Recipe,
    accelerator: Accelerator,
    out: str | Path | None,
    overwrite: bool,
    quiet: bool,
    console: Console | None,
) -> Result:
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    if recipe.ema is not None and recipe.parallel == "fsdp2" and world > 1:
        raise ValueError("ema keeps a whole copy of the model, got parallel=fsdp2; use ddp or leave it out.")
    data = open_data(
        recipe.data,
        holdout=recipe.holdout,
        seed=recipe.seed,
        limit=recipe.limit,
        skip_unreadable=recipe.skip_unreadable,
    )
    recipe = resolve(recipe, data)
    if recipe.compile is None:
        recipe = dataclasses.replace(recipe, compile=device.type == "cuda")
    built = build_model(recipe, len(data.classes), data.channels)
    recipe = resolve_for(recipe, built.model)
    if recipe.task == "mae":
        check_mae(built.model, recipe.mask_ratio)
    assert recipe.image_size is not None
    check_share(recipe, rank, world)
    check_images(recipe, data, recipe.image_size, built.mean, built.std)
    check_batch_size(recipe, len(data.train))
    choose_placement(recipe, data, recipe.image_size, device)
    folder = Path(out) if out is not None else default_folder(recipe)
    done = from_first(lambda: _open(folder, recipe, overwrite, rank), device)
    if done is not None:
        if rank == 0 and not quiet:
            text = f"{folder} is finished already; --overwrite runs it again."
            (console or Console(stderr=True)).print(text)
        return _result("finished", folder, done)

    train, test = make_batches(
        recipe,
        data,
        image_size=recipe.image_size,
        mean=built.mean,
        std=built.std,
        device=device,
        rank=rank,
        world=world,
        compile=bool(recipe.compile),
    )
    positions = torch.stack(
        [
            torch.from_numpy(
                slot_positions(number * world + rank, world * recipe.accumulate, recipe.batch_size)
            )
            for number in range(recipe.accumulate)
        ]
    )
    task = make_task(built.model, recipe, positions)
    task.module.to(device)
    # The head's share of the images is asked for before anything is wrapped: every process has the same.
    images = _first_images(test) if recipe.monitor_every != 0 else None
    store = Store(folder / "checkpoints", recipe.keep)
    about = environment()
    exporter = _exporter(folder, recipe, built, data, about)
    module = distribute(task.module, task.trunk, recipe, device)
    loop = Loop(recipe, task, module, train, test, accelerator, store, exporter, images)
    checkpoint = store.newest() if rank == 0 else None
    found = from_first(lambda: checkpoint is not None, device)
    loop.resume(checkpoint, found)

    accelerator.project_configuration.project_dir = str(folder)
    accelerator.project_configuration.logging_dir = str(folder)
    with (
        StopRequest() as stop,
        Reporter(
            folder,
            recipe,
            updates=loop.updates,
            start=loop.progress.update,
            main=rank == 0,
            accelerator=accelerator if accelerator.log_with else None,
            console=console,
            quiet=quiet,
            about=_about(built, data, train.placement, device, world),
        ) as reporter,
    ):
        for sentence in [*data.notes, *built.notes, *mae_warnings(recipe), *store.passed_over, *train.notes]:
            reporter.say(sentence)
        if found:
            reporter.say(f"goes on at update {loop.progress.update} of {loop.updates}.")
        elif store.passed_over:
            reporter.say("no whole checkpoint is left; starts anew.")
        status = loop.run(reporter, stop)
        last = loop.last_weights(None)
        if status == "finished":
            if rank == 0:
                exporter("last", last)
                if isinstance(task.module, MaskedAutoencoder) and images is not None:
                    _draw(folder, task.module, images, recipe, built)
            reporter.event("finished", update=loop.updates)
        summary = reporter.write_result(about) | {"status": status}
        table = reporter.table()
    if rank == 0 and not quiet:
        (console or Console(stderr=True)).print(table)
    train.close()
    return _result(status, folder, summary)


def _open(folder: Path, recipe: Recipe, overwrite: bool, rank: int) -> dict[str, Any] | None:
    done = open_folder(folder, recipe, overwrite)
    for name in ("best", "last"):
        recover(folder / name)
    if done is None and rank == 0:
        write_environment(folder, environment())
    return done


def _result(status: Status, folder: Path, summary: dict[str, Any]) -> Result:
    test, best = (summary.get(name) or {} for name in ("test", "best"))
    # The best test may have been that of the averaged weights.
    best_accuracy = max(
        (value for value in (best.get("accuracy"), best.get("ema_accuracy")) if value is not None),
        default=None,
    )
    return Result(status, folder, test.get("accuracy"), best_accuracy, summary)


def _first_images(test: EvalBatches) -> Tensor:
    return next(iter(test)).images[:MONITOR_IMAGES]


def _exporter(
    folder: Path, recipe: Recipe, built: Built, data: ImageData, about: dict[str, Any]
) -> Callable[[str, BestWeights], None]:
    assert recipe.image_size is not None
    size = recipe.image_size

    def export(name: str, weights: BestWeights) -> None:
        export_weights(
            folder / name,
            weights.state,
            recipe=recipe,
            model_kwargs=built.options,
            classes=data.classes,
            mean=built.mean,
            std=built.std,
            image_size=size,
            accuracy=weights.accuracy,
            update=weights.update,
            edits=edits_of(built.model),
            environment=about,
            train_images=len(data.train),
            test_images=len(data.test),
            note=weights.note,
        )

    return export


def _about(built: Built, data: ImageData, placement: str, device: torch.device, world: int) -> dict[str, Any]:
    return {
        "parameters": sum(parameter.numel() for parameter in built.model.parameters()),
        "edits": str(built.edits),
        "train_images": len(data.train),
        "test_images": len(data.test),
        "placement": placement,
        "device": str(device),
        "processes": world,
    }


def _draw(folder: Path, mae: MaskedAutoencoder, images: Tensor, recipe: Recipe, built: Built) -> None:
    noise = mask_noise(recipe.seed, 0, len(images), mae.tokens, split="test").to(images.device)
    mae.eval()
    draw_reconstruction(mae, images, noise, built.mean, built.std).save(folder / "reconstruction.png")
