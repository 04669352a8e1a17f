"""One run, from a recipe to trained weights.

::

    from wellposed.train import Recipe, fit

    result = fit(Recipe(data="cifar10:DIR", model="vit_tiny_patch16_224", graying="dct"))
    print(result.accuracy, result.folder)
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor

from wellposed import graying_pictures
from wellposed.environment import environment, without_secrets
from wellposed.files import PATIENCE, alone_in
from wellposed.probes.gray_images import COUNT, SIDE, gray_images, settings_of, squares
from wellposed.run_records import best_accuracy
from wellposed.train.batches import EvalBatches, TrainBatches, make_batches
from wellposed.train.batches.order import generators_kept, slot_positions
from wellposed.train.checkpoint import Store
from wellposed.train.data import ImageData, UnreadableImageError
from wellposed.train.distributed import from_first, is_first, rank, require_accelerate, wait_for_all, world
from wellposed.train.durable import recover
from wellposed.train.export import export_weights
from wellposed.train.guard import without_cudnn_attention
from wellposed.train.loop import Loop, Status, StopRequest, first_test_images
from wellposed.train.mae import MaskedAutoencoder, draw_reconstruction, fixed_mask_noise, mae_warnings
from wellposed.train.optimizer import check_optimizer
from wellposed.train.parallel import distribute, room_for_programs
from wellposed.train.recipe import Recipe
from wellposed.train.reporter import EndTable, Reporter, tracker_names
from wellposed.train.resolve import Prepared, make_accelerator, prepare, settled
from wellposed.train.runs import default_folder, open_folder, write_environment
from wellposed.train.tasks import Task, make_task
from wellposed.train.training_state import Exporter, Weights

if TYPE_CHECKING:
    from accelerate import Accelerator


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
        console: to print on; None is standard error.
    """
    console = Console(stderr=True, quiet=quiet) if console is None or quiet else console
    require_accelerate()
    trackers = tracker_names(recipe)
    check_optimizer(recipe)
    with generators_kept(), without_cudnn_attention():
        accelerator = make_accelerator(recipe, trackers, "runs" if out is None else out)
        prepared = prepare(recipe, accelerator)
        folder = default_folder(prepared.recipe) if out is None else Path(out)
        with ExitStack() as held:
            return _run(prepared, accelerator, folder, overwrite, console, held)


def _run(
    prepared: Prepared,
    accelerator: "Accelerator",
    folder: Path,
    overwrite: bool,
    console: Console,
    held: ExitStack,
) -> Result:
    device = accelerator.device
    prepared = settled(prepared, folder, overwrite, device)
    recipe = prepared.recipe
    done = from_first(lambda: _open(folder, recipe, overwrite, held), device)
    if done is not None:
        if is_first():
            console.print(f"{folder} is finished already; --overwrite runs it again.")
        return _result("finished", folder, done)

    train, test = make_batches(
        recipe,
        prepared.data,
        image_size=prepared.size,
        mean=prepared.built.mean,
        std=prepared.built.std,
        device=device,
        rank=rank(),
        world=world(),
        compile=bool(recipe.compile),
    )
    try:
        with room_for_programs(recipe, prepared.built.model):
            return _train(prepared, accelerator, folder, train, test, console)
    finally:
        train.close()


def _train(
    prepared: Prepared,
    accelerator: "Accelerator",
    folder: Path,
    train: TrainBatches,
    test: EvalBatches,
    console: Console,
) -> Result:
    recipe, device = prepared.recipe, accelerator.device
    about = environment()
    task = make_task(prepared.built.model, recipe, _positions(recipe))
    task.module.to(device)
    images = first_test_images(test) if recipe.monitor_every != 0 else None
    store = Store(folder / "checkpoints", recipe.keep)
    exporter = _exporter(folder, recipe, prepared, about, train, test)
    module = distribute(task.module, task.trunk, recipe, device)
    loop = Loop(recipe, task, module, train, test, accelerator, store, exporter, images)
    checkpoint = store.newest() if is_first() else None
    found = from_first(lambda: checkpoint is not None, device)
    if found:
        loop.resume(checkpoint)

    accelerator.project_configuration.project_dir = str(folder)
    accelerator.project_configuration.logging_dir = str(folder)
    table = EndTable([])
    with (
        StopRequest() as stop,
        Reporter(
            folder,
            recipe,
            updates=loop.updates,
            start=loop.progress.update,
            main=is_first(),
            accelerator=accelerator if accelerator.log_with else None,
            console=console,
            quiet=console.quiet,
            about=_about(prepared, train, test, device),
        ) as reporter,
    ):
        built, data = prepared.built, prepared.data
        for sentence in [*data.notes, *built.notes, *mae_warnings(recipe), *store.passed_over, *train.notes]:
            reporter.say(sentence)
        if found:
            reporter.say(f"goes on at update {loop.progress.update} of {loop.updates}.")
        elif store.passed_over:
            reporter.say("no whole checkpoint is left; starts anew.")
        status = loop.run(reporter, stop)
        if status == "finished":
            last = loop.last_weights()
            if is_first():
                exporter("last", last)
                _draw(folder, task, images, recipe, prepared)
                _keep_graying(folder, recipe, prepared.data, reporter)
            reporter.event("finished", update=loop.progress.update)
        reporter.about |= _counts(train, test)  # streamed images that cannot be read are known by now
        summary = reporter.write_result(about) | {"status": status}
        table = reporter.table()
    wait_for_all()  # what the first process writes is there when any of them returns
    if is_first():
        console.print(table)
    return _result(status, folder, summary)


def _open(folder: Path, recipe: Recipe, overwrite: bool, held: ExitStack) -> dict[str, Any] | None:
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as trying:
        # Also what is overwritten must not be in use.
        trying.enter_context(alone_in(folder, PATIENCE))
        done = open_folder(folder, recipe, overwrite)
        for name in ("best", "last"):
            recover(folder / name)
        if done is None:
            write_environment(folder, environment())
            held.push(trying.pop_all())
    return done


def _result(status: Status, folder: Path, summary: dict[str, Any]) -> Result:
    test = summary.get("test") or {}
    return Result(status, folder, test.get("accuracy"), best_accuracy(summary), summary)


def _positions(recipe: Recipe) -> Tensor:
    """(passes, images of a pass): this process's positions in a batch."""
    passes = [
        slot_positions(number * world() + rank(), world() * recipe.accumulate, recipe.batch_size)
        for number in range(recipe.accumulate)
    ]
    return torch.stack([torch.from_numpy(positions) for positions in passes])


def _exporter(
    folder: Path,
    recipe: Recipe,
    prepared: Prepared,
    about: dict[str, Any],
    train: TrainBatches,
    test: EvalBatches,
) -> Exporter:
    built, data = prepared.built, prepared.data

    def export(name: str, weights: Weights) -> None:
        export_weights(
            folder / name,
            weights.state,
            recipe=recipe,
            architecture=built.architecture,
            model_kwargs=built.options,
            classes=data.classes,
            mean=built.mean,
            std=built.std,
            image_size=prepared.size,
            accuracy=weights.accuracy,
            update=weights.update,
            edits=weights.edits,
            environment=about,
            **_counts(train, test),
            note=weights.note,
        )

    return export


def _counts(train: TrainBatches, test: EvalBatches) -> dict[str, int]:
    return {"train_images": train.images, "test_images": test.images}


def _about(
    prepared: Prepared, train: TrainBatches, test: EvalBatches, device: torch.device
) -> dict[str, Any]:
    model = prepared.built.model
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "edits": str(prepared.built.edits),
        **_counts(train, test),
        "placement": train.placement,
        "device": str(device),
        "processes": world(),
    }


def _draw(folder: Path, task: Task, images: Tensor | None, recipe: Recipe, prepared: Prepared) -> None:
    """What a masked autoencoder sees and what it makes of it, unless its weights are in pieces."""
    mae = task.module
    is_whole = recipe.parallel == "ddp"
    if not isinstance(mae, MaskedAutoencoder) or images is None or not is_whole:
        return
    noise = fixed_mask_noise(recipe.seed, 0, len(images), mae.tokens).to(images.device)
    mae.eval()
    built = prepared.built
    draw_reconstruction(mae, images, noise, built.mean, built.std).save(folder / "reconstruction.png")


def _keep_graying(folder: Path, recipe: Recipe, data: ImageData, reporter: Reporter) -> None:
    """What graying does to the first test images, for reports: they have no data sets."""
    try:
        pictures = [data.test.picture(index) for index in range(min(COUNT, len(data.test)))]
    except UnreadableImageError as error:
        reporter.say(f"no pictures of graying are kept: {error}")
        return
    side = min(SIDE, *(min(picture.size) for picture in pictures))
    patch = recipe.patch_size or (8 if side == SIDE else 2)
    patch = patch if patch <= side else 1
    names = [f"{data.test.name(i)}: {data.classes[int(data.test.labels[i])]}" for i in range(len(pictures))]
    made = gray_images(
        squares(pictures, side - side % patch),
        names,
        patch=patch,
        source=f"test images of {without_secrets(data.name)}",
        **settings_of([recipe.to_mapping()]),
    )
    graying_pictures.write(made, folder)
