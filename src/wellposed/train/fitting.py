"""One run, from a recipe to trained weights.

::

    from wellposed.train import Recipe, fit

    result = fit(Recipe(data="cifar10:DIR", model="vit_tiny_patch16_224", edits=["gray_tokens method=dct"]))
    print(result.accuracy, result.folder)
"""

from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from wellposed import graying_pictures
from wellposed.environment import environment, without_secrets
from wellposed.files import PATIENCE, alone_in, write_json
from wellposed.probes.gray_images import COUNT, SIDE, gray_images, settings_of, squares
from wellposed.run_records import best_accuracy
from wellposed.train.batches import make_batches
from wellposed.train.checkpoint import Store, recover
from wellposed.train.data import ImageData, UnreadableImageError
from wellposed.train.export import ENVIRONMENT, Exported, Weights, export_weights
from wellposed.train.loop import Loop, Status, StopRequest, first_test_images
from wellposed.train.optimizer import check_optimizer
from wellposed.train.order import generators_kept
from wellposed.train.parallel import (
    distribute,
    from_first,
    is_first,
    make_accelerator,
    rank,
    require_accelerate,
    room_for_programs,
    wait_for_all,
    without_cudnn_attention,
    world,
)
from wellposed.train.recipe import Recipe
from wellposed.train.reporter import Reporter, tracker_names
from wellposed.train.resolve import Resolved, resolve
from wellposed.train.runs import default_folder, open_folder
from wellposed.train.tasks import make_task

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        status: ``"finished"``; ``"terminated"`` by a signal, to be resumed; ``"nonfinite"``.
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

    @classmethod
    def of(cls, status: Status, folder: Path, summary: dict[str, Any]) -> "Result":
        """Of a run with this summary."""
        accuracy = (summary.get("test") or {}).get("accuracy")
        return cls(status, folder, accuracy, best_accuracy(summary), summary)


def fit(
    recipe: Recipe,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    console: Console | None = None,
) -> Result:
    """Train a model by a recipe, or resume where the same run was interrupted.

    Under ``torchrun`` or ``accelerate launch`` every process calls it. The caller's random generators stay as
    they are.

    Args:
        recipe: of the run.
        out: its folder; by default one under ``runs/`` whose name depends on the recipe, so that the same
            call resumes.
        overwrite: delete the run that is in the folder.
        quiet: print nothing.
        console: to print on; None is standard error.

    Returns:
        How the run ended, with its numbers.
    """
    console = Console(stderr=True, quiet=quiet) if console is None or quiet else console
    require_accelerate()
    trackers = tracker_names(recipe)
    check_optimizer(recipe)
    folder = default_folder(recipe) if out is None else Path(out)
    with generators_kept(), without_cudnn_attention(), ExitStack() as held:
        accelerator = make_accelerator(recipe, trackers, folder)
        resolved = resolve(recipe, accelerator.device, folder, overwrite)
        done = from_first(lambda: _take(folder, resolved.recipe, overwrite, held), accelerator.device)
        if done is None:
            return _train(resolved, accelerator, folder, console)
    if is_first():
        console.print(f"{folder} is finished already; --overwrite runs it again.")
    return Result.of("finished", folder, done)


def _take(folder: Path, recipe: Recipe, overwrite: bool, held: ExitStack) -> dict[str, Any] | None:
    """Hold the folder until ``held`` ends and make it ready; the result of a run that is finished already."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as trying:
        # Also what is overwritten must not be in use.
        trying.enter_context(alone_in(folder, PATIENCE))
        done = open_folder(folder, recipe, overwrite)
        for name in ("best", "last"):
            recover(folder / name)
        if done is None:
            write_json(folder / ENVIRONMENT, environment())
            held.push(trying.pop_all())
    return done


def _train(resolved: Resolved, accelerator: "Accelerator", folder: Path, console: Console) -> Result:
    recipe, data, built = resolved.recipe, resolved.data, resolved.built
    device, about = accelerator.device, environment()
    assert recipe.image_size is not None
    train, test = make_batches(
        recipe,
        data,
        image_size=recipe.image_size,
        mean=built.mean,
        std=built.std,
        device=device,
        rank=rank(),
        world=world(),
        compile=bool(recipe.compile),
    )
    with closing(train), room_for_programs(recipe, built.model):
        task = make_task(built.model, recipe, rank(), world())
        task.module.to(device)
        images = first_test_images(test) if recipe.monitor_every != 0 else None
        exported = Exported(
            recipe=recipe,
            model_kwargs=built.options,
            classes=data.classes,
            mean=built.mean,
            std=built.std,
            image_size=recipe.image_size,
            environment=about,
        )

        def export(name: str, weights: Weights) -> None:
            of_them = replace(
                exported,
                accuracy=weights.accuracy,
                update=weights.update,
                edits=weights.edits,
                note=weights.note,
                train_images=train.images,
                test_images=test.images,
            )
            export_weights(folder / name, weights.state, of_them)

        store = Store(folder / "checkpoints", recipe.keep)
        module = distribute(task.module, task.trunk, recipe, device)
        loop = Loop(recipe, task, module, train, test, accelerator, store, export, images)
        checkpoint = store.newest() if is_first() else None
        found = from_first(lambda: checkpoint is not None, device)
        if found:
            loop.resume(checkpoint)

        rows: dict[str, Any] = {
            "parameters": sum(parameter.numel() for parameter in built.model.parameters()),
            "edits": str(built.edits),
            "train_images": train.images,
            "test_images": test.images,
            "placement": train.placement,
            "device": str(device),
            "processes": world(),
        }
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
                about=rows,
            ) as reporter,
        ):
            for sentence in [*resolved.notes, *store.passed_over]:
                reporter.say(sentence)
            if found:
                reporter.say(f"resumes at update {loop.progress.update} of {loop.updates}.")
            elif store.passed_over:
                reporter.say("no whole checkpoint is left; starts again.")
            status = loop.run(reporter, stop)
            if status == "finished":
                last = loop.last_weights()
                if is_first():
                    export("last", last)
                    _keep_graying(folder, recipe, data, reporter)
                reporter.event("finished", update=loop.progress.update)
            summary = reporter.write_result(about) | {"status": status}
            table = reporter.table()
    wait_for_all()  # what the first process writes is there when any of them returns
    if is_first():
        console.print(table)
    return Result.of(status, folder, summary)


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
