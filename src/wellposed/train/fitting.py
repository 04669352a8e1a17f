"""One run, from a recipe to trained weights.

::

    from wellposed.train import Recipe, fit

    result = fit(Recipe(data="cifar10:DIR", model="vit_tiny_patch16_224", edits=["gray_tokens method=dct"]))
    print(result.accuracy, result.folder)

First the recipe is completed: what it leaves open is filled in from the data, the device and the model. The
rules are few and what they chose is written into the run's recipe, so that running that file again does the
same whatever the rules become. :func:`resolve` is the only place where a recipe is completed.
"""

import functools
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import timm
import torch
from rich.console import Console
from torch import nn

from wellposed import anatomy, graying_pictures
from wellposed.calls import GRAY
from wellposed.environment import environment, without_secrets
from wellposed.errors import UnknownModelError
from wellposed.files import PATIENCE, alone_in, clear_staged, write_json
from wellposed.linalg import spectral_plan
from wellposed.models import timm_architecture
from wellposed.probes.gray_images import COUNT, SIDE, gray_images, settings_of, squares
from wellposed.run_records import RESULT, best_accuracy, read_result
from wellposed.train.batches import check_images, check_share, choose_placement, make_batches, with_batch_size
from wellposed.train.checkpoint import Store, recover
from wellposed.train.data import ImageData, UnreadableImageError, open_data
from wellposed.train.edits import DEVICE_FLOORS, whole
from wellposed.train.export import ENVIRONMENT, RECIPE, Exported, export_weights
from wellposed.train.loop import Loop, Status, StopRequest, Weights
from wellposed.train.mae import check_mae, mae_warnings
from wellposed.train.model import Built, build_model, make_task, weights_file
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
    several,
    wait_for_all,
    without_cudnn_attention,
    world,
)
from wellposed.train.recipe import REMOVED, Recipe, changes_of, decisive, read_recipe, write_recipe
from wellposed.train.reporter import Reporter, tracker_names

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

    Example:
        ``fit(Recipe(epochs=3), out="runs/first").accuracy``
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


def default_folder(recipe: Recipe) -> Path:
    """The same for equal recipes, so that the same call resumes.

    >>> default_folder(Recipe()) == default_folder(Recipe(workers=0))
    True
    """
    removed = {name: default for name, (default, _) in REMOVED.items()}  # runs keep their names
    text = json.dumps(removed | decisive(recipe), sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    kind, colon, rest = recipe.data.removeprefix("torchvision:").partition(":")
    data = kind if colon and kind not in ("packed", "hf", "wds", "folder") else Path(rest or kind).stem
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{data}-{recipe.model}").strip("-.")
    return Path("runs") / f"{name}-{digest}"


def open_folder(folder: Path, recipe: Recipe, overwrite: bool) -> dict[str, Any] | None:
    """Make a folder that is there ready for a run; returns the result of one that is finished already.

    Raises:
        ValueError: the folder holds a run of another recipe, or something that is no run.
    """
    file = folder / RECIPE
    clear_staged(file, folder / ENVIRONMENT, folder / RESULT)
    if overwrite and file.is_file():
        _empty(folder)
    if file.is_file():
        before, now = decisive(Recipe.from_mapping(read_recipe(file))), decisive(recipe)
        earlier = before.get("edits", [])
        if earlier and len(earlier) == len(recipe.edits):
            # Older versions wrote them in another form, and no floors.
            before["edits"] = [
                {name: new[name] for name in ("floor",) if name in new} | whole(old)
                for old, new in zip(earlier, recipe.edits, strict=True)
            ]
        if changed := changes_of(before, now):
            listed = ", ".join(f"{name} {there!r} there, {here!r} now" for name, there, here in changed)
            raise ValueError(
                f"{folder} holds a run of another recipe ({listed}); take another --out, or --overwrite."
            )
        if (folder / RESULT).is_file() and (done := read_result(folder)).get("finished"):
            return done
    elif folder.is_dir() and any(folder.iterdir()):
        # A log may be there already, written by what started the run.
        strangers = [path.name for path in folder.iterdir() if path.suffix not in (".txt", ".log")]
        if strangers:
            raise ValueError(
                f"expected a new folder or that of a run, {folder} holds {strangers[0]!r} and no {RECIPE}; "
                "take another --out."
            )
    write_recipe(recipe, file)
    return None


def _empty(folder: Path) -> None:
    """Delete what is in the folder, which stays, with the lock on it.

    A kill leaves a run that was interrupted: its result goes first, and the recipe that makes it a run last.
    """
    first, last = folder / RESULT, folder / RECIPE
    inside = [path for path in folder.iterdir() if path not in (first, last)]
    for path in (first, *inside, last):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _train(resolved: "Resolved", accelerator: "Accelerator", folder: Path, console: Console) -> Result:
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
        of_run = Exported(
            recipe=recipe,
            model_kwargs=built.options,
            classes=data.classes,
            mean=built.mean,
            std=built.std,
            image_size=recipe.image_size,
            environment=about,
            train_images=train.images,
            test_images=test.images,
        )

        def export(name: str, weights: Weights) -> None:
            state, said = weights
            export_weights(folder / name, state, replace(of_run, **said))

        store = Store(folder / "checkpoints", recipe.keep)
        module = distribute(task.module, task.trunk, recipe, device)
        loop = Loop(recipe, task, module, train, test, accelerator, store, export)
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


TINY, SMALL = 16, 64
"""Images of this side and between are shifted, larger ones get random resized crops. Of still smaller ones a
pixel is too much."""


@dataclass(frozen=True)
class Resolved:
    """A recipe without open fields, its images, its model on the CPU, and sentences on them for the log."""

    recipe: Recipe
    data: ImageData
    built: Built
    notes: list[str]


def resolve(recipe: Recipe, device: torch.device, folder: Path, overwrite: bool = False) -> Resolved:
    """Open the data, fill in the recipe and build the model; every process of a run calls it.

    What does not fit together is an error before any image is decoded. A run that is in the folder stays as
    it was resolved at first, unless it is overwritten.
    """
    if recipe.ema is not None and recipe.parallel == "fsdp2" and several():
        raise ValueError("ema keeps a whole copy of the model, got parallel=fsdp2; use ddp or leave it out.")
    data = open_data(
        recipe.data,
        holdout=recipe.holdout,
        seed=recipe.seed,
        limit=recipe.limit,
    )
    recipe, size_notes = with_batch_size(from_data(recipe, data), len(data.train), world())

    def decided() -> tuple[Recipe, list[str]]:
        file = folder / RECIPE
        before = read_recipe(file) if file.is_file() and not overwrite else {}
        return from_device(recipe, data, device, before)

    # The folder and the memory that is free are those of the first process.
    recipe, device_notes = from_first(decided, device)
    built = build_model(recipe, len(data.classes), data.channels)
    recipe, model_notes = from_model(recipe, built.model)
    if recipe.task == "mae":
        check_mae(built.model, recipe.mask_ratio)
        device_notes += mae_warnings(recipe)
    check_share(recipe, rank(), world())
    assert recipe.image_size is not None
    check_images(recipe, data, recipe.image_size, built.mean, built.std)
    notes = [*data.notes, *built.notes, *seen_before(recipe, data), *model_notes, *size_notes, *device_notes]
    return Resolved(recipe, data, built, notes)


def from_data(recipe: Recipe, data: ImageData) -> Recipe:
    """The recipe with image and patch size, eps and augmentation filled in."""
    size = recipe.image_size or data.size or _input_side(recipe.model)
    chosen: dict[str, Any] = {"image_size": size}
    if recipe.patch_size is None and "patch_size" not in recipe.model_options:
        chosen["patch_size"] = _patch_for(recipe, size)
    if recipe.edits:
        chosen["edits"] = tuple(map(whole, recipe.edits))
    if recipe.flip is None:
        chosen["flip"] = 0.5 if data.photographs else 0.0
    if recipe.crop_scale is None and size > SMALL and data.photographs:
        chosen["crop_scale"] = 0.08
    if recipe.crop_padding is None:
        is_cropped = recipe.crop_scale is not None or "crop_scale" in chosen
        chosen["crop_padding"] = size // 8 if TINY <= size <= SMALL and not is_cropped else 0
    if recipe.mixup is None:
        # A linear probe has few weights; mixed images would only slow it.
        chosen["mixup"] = 0.2 if recipe.task == "classify" else 0.0
    if recipe.warmup_epochs is None:
        chosen["warmup_epochs"] = min(recipe.epochs / 10, 5.0)
    return replace(recipe, **chosen)


def from_device(
    recipe: Recipe, data: ImageData, device: torch.device, before: Mapping[str, Any]
) -> tuple[Recipe, list[str]]:
    """The recipe with what depends on the device a run starts on, and stays so on others; with notes.

    Where the images are may depend on the memory that is free, and they are augmented differently in both.
    The floor of the graying depends on the device, and the weights are trained for it. ``before`` is the
    recipe of an earlier start; empty at the first.
    """
    notes = []
    if recipe.compile is None:
        recipe = replace(recipe, compile=device.type == "cuda")
    if recipe.placement == "auto" and before:
        recipe = replace(recipe, placement=before.get("placement", "auto"))
    recipe = with_floors(recipe, device, before)
    for call, earlier in zip(recipe.edits, before.get("edits", ()), strict=False):
        if "floor" in call and "floor" not in earlier:
            notes.append(
                f"the floor of the graying is {call['floor']:g} from here on; the version that started the "
                "run had a lower one."
            )
    assert recipe.image_size is not None
    placement = choose_placement(recipe, data, recipe.image_size, device)
    return replace(recipe, placement=placement), notes


def with_floors(recipe: Recipe, device: torch.device, before: Mapping[str, Any]) -> Recipe:
    """The recipe with the floors of its grayings: as given, as the run had them before, or the device's."""

    def floor(given: float | None, target_kappa: float | None) -> float:
        # A target for kappa needs more digits than float32 has; see wellposed.nn.functional.gray.
        is_wide = target_kappa is not None and device.type != "mps"
        tokens = torch.empty(0, dtype=torch.float32, device=device)
        return spectral_plan(tokens, floor=given, precision="float64" if is_wide else "auto").floor

    calls, earlier = [], before.get("edits", ())
    if len(earlier) != len(recipe.edits):
        earlier = [{}] * len(recipe.edits)  # the first start, or another recipe, which is refused later
    for call, one in zip(recipe.edits, earlier, strict=True):
        if call["edit"] == GRAY and call.get("method", "spectral") in DEVICE_FLOORS:
            known = call.get("floor", one.get("floor"))
            call = {**call, "floor": floor(known, call.get("target_kappa"))}
        calls.append(call)
    return replace(recipe, edits=tuple(calls))


def from_model(recipe: Recipe, model: nn.Module) -> tuple[Recipe, list[str]]:
    """The recipe with what depends on the model as it was built, with notes.

    Wider models learn with smaller steps. Those without blocks that are known, a ResNet say, train like
    others; there is nothing to measure.
    """
    if recipe.lr is None:
        width: Any = getattr(model, "num_features", None)
        if not isinstance(width, int):
            raise ValueError(
                f"the width of {recipe.model} is not known, from which the learning rate follows; set lr."
            )
        recipe = replace(recipe, lr=min(0.2 / width, 3e-3))
    try:
        anatomy.blocks(model)
    except UnknownModelError:
        if recipe.monitor_every:
            raise
        note = f"kappa and density are not measured: no block of {recipe.model} is known."
        return replace(recipe, monitor_every=0), [note]
    return recipe, []


_PLACES = ("hf-hub:", "local-dir:")
"""Names of timm whose configuration says how the model is made."""


def _input_side(name: str) -> int:
    if name.startswith(_PLACES):
        architecture, arguments = timm_architecture(name)
        side = arguments.get("img_size")
        if side is not None:
            return int(side[-1] if isinstance(side, (list, tuple)) else side)
        name = architecture
    config: Any = timm.get_pretrained_cfg(name, allow_unregistered=False)
    return 224 if config is None else int(config.input_size[-1])


def _patch_for(recipe: Recipe, size: int) -> int | None:
    """The model's own patch if it cuts the image into enough pieces, else the largest one that does.

    None where the model has no patch size, or is taken as it is.
    """
    own = own_patch(recipe.model)
    if own is None:
        return None
    least = 4 if size <= 16 else 7
    if size % own == 0 and size // own >= least:
        return None
    if size < least:
        raise ValueError(
            f"image_size must be at least {least}, so that there are {least} x {least} patches, got {size}; "
            "raise it, or set patch_size."
        )
    return next(patch for patch in range(size // least, 0, -1) if size % patch == 0)


def own_patch(name: str) -> int | None:
    """The side of the patches of a timm model as it comes, if it has an option for them."""
    arguments: dict[str, Any] = {}
    if name.startswith(_PLACES):
        name, arguments = timm_architecture(name)
    if not timm.is_model(name.partition(".")[0]):
        return None  # building it says what is wrong with the name

    def made(**options: Any) -> nn.Module:
        """The model without memory for its weights; older releases of timm need it for some models."""
        create: Callable[..., nn.Module] = functools.partial(timm.create_model, name, **options)
        with torch.random.fork_rng(devices=[]):
            try:
                with torch.device("meta"):
                    return create()
            except (RuntimeError, ValueError):
                return create()

    try:
        patch: Any = getattr(getattr(made(**arguments), "patch_embed", None), "patch_size", None)
        side = int(patch[0]) if isinstance(patch, (tuple, list)) else patch
        if side is not None:
            made(**{**arguments, "patch_size": side})
    except TypeError:  # no option of that name
        return None
    return side


def seen_before(recipe: Recipe, data: ImageData) -> list[str]:
    """A sentence if a run tests on images that the weights it starts from were trained on.

    Where the set has no test split, seed and holdout draw it. With the same seed a smaller holdout is a part
    of a larger one.
    """
    if recipe.start_from is None or not data.is_test_drawn:
        return []
    file = weights_file(recipe.start_from).parent / RECIPE  # every folder of weights of ours has one
    if not file.is_file():
        return []
    before = Recipe.from_mapping(read_recipe(file))
    # Two ways to write one folder are the same.
    there, here = (
        Path(name.removeprefix("folder:")).expanduser().resolve()
        for name in (before.data, without_secrets(recipe.data))
    )
    if there != here:
        return []
    is_digits = data.name == "digits"
    if before.seed == recipe.seed and (is_digits or recipe.holdout <= before.holdout):
        return []
    drawn_there, drawn_here = (
        f"seed {each.seed}" + ("" if is_digits else f" and holdout {each.holdout:g}")
        for each in (before, recipe)
    )
    return [
        f"some test images are not new to these weights: {drawn_there} drew those of {recipe.start_from}, "
        f"{drawn_here} draws others of the same {recipe.data}, so the accuracy is too good. Take the seed "
        "and the holdout of that run, or a set with a test split of its own."
    ]
