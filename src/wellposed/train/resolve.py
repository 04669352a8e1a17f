"""Filling in what a recipe leaves open, from the data and the model.

The rules are few and what they chose is written into the run's recipe, so that running that file again does
the same whatever the rules become.

Whether a run tests on images that the weights it starts from were trained on.

What a run needs before its first update: devices, checks, images, a model.
"""

import dataclasses
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import timm
import torch
from torch import nn

from wellposed import anatomy
from wellposed.calls import GRAY
from wellposed.environment import without_secrets
from wellposed.errors import UnknownModelError
from wellposed.linalg import spectral_plan
from wellposed.models import timm_architecture
from wellposed.nn.graying import DEFAULT_EPS
from wellposed.train.batches import choose_placement
from wellposed.train.batches.make import check_images, check_share, with_batch_size
from wellposed.train.data import ImageData, open_data
from wellposed.train.distributed import (
    from_first,
    join_processes,
    rank,
    require_accelerate,
    several,
    started_processes,
    world,
)
from wellposed.train.edits import DEVICE_FLOORS
from wellposed.train.mae import check_mae
from wellposed.train.model import Built, build_model, weights_file, with_gray_floor
from wellposed.train.recipe import Recipe, read_recipe
from wellposed.train.runs import RECIPE, recipe_before

if TYPE_CHECKING:
    from accelerate import Accelerator

TINY, SMALL = 16, 64
"""Images of this side and between are shifted, larger ones get random resized crops. Of still smaller ones a
pixel is too much."""


def resolve(recipe: Recipe, data: ImageData) -> Recipe:
    """The recipe with image and patch size, eps and augmentation filled in."""
    size = recipe.image_size or data.size or _input_side(recipe.model)
    chosen: dict[str, Any] = {"image_size": size}
    if recipe.patch_size is None and "patch_size" not in recipe.model_options:
        chosen["patch_size"] = _patch_for(recipe, size)
    if recipe.graying in DEFAULT_EPS and all(
        value is None for value in (recipe.eps, recipe.eps_per_block, recipe.target_kappa)
    ):
        chosen["eps"] = DEFAULT_EPS[recipe.graying]
    if recipe.edits:
        chosen["edits"] = tuple(map(_with_power, recipe.edits))
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


def resolve_for(recipe: Recipe, model: nn.Module) -> Recipe:
    """The recipe with what hangs on the model as it was built: wider ones learn with smaller steps."""
    if recipe.lr is not None:
        return recipe
    width: Any = getattr(model, "num_features", None)
    if not isinstance(width, int):
        raise ValueError(f"the width of {recipe.model} is not known, which tells the learning rate; set lr.")
    return replace(recipe, lr=min(0.2 / width, 3e-3))


def _with_power(call: dict[str, Any]) -> dict[str, Any]:
    """A graying of the recipe's ``edits`` with its method and power, where the functions have a default."""
    if call["edit"] != GRAY:
        return call
    call = {"method": "spectral", **call}
    if call["method"] not in DEFAULT_EPS or "target_kappa" in call:
        return call
    return {"eps": DEFAULT_EPS[call["method"]], **call}


def resolve_floor(recipe: Recipe, device: torch.device) -> Recipe:
    """The recipe with the floors that its grayings have on a device, so that they have the same on others."""

    def floor(given: float | None, target_kappa: float | None) -> float:
        # A target for kappa needs more digits than float32 has; see wellposed.nn.functional.gray.
        is_wide = target_kappa is not None and device.type != "mps"
        tokens = torch.empty(0, dtype=torch.float32, device=device)
        return spectral_plan(tokens, floor=given, precision="float64" if is_wide else "auto").floor

    if recipe.graying in DEVICE_FLOORS:
        recipe = replace(recipe, gray_floor=floor(recipe.gray_floor, recipe.target_kappa))
    own = tuple(
        {**call, "floor": floor(call.get("floor"), call.get("target_kappa"))}
        if call["edit"] == GRAY and call.get("method", "spectral") in DEVICE_FLOORS
        else call
        for call in recipe.edits
    )
    return replace(recipe, edits=own)


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
    if config is None:
        return 224
    return int(config.input_size[-1])


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
        return None  # building it tells what is wrong with the name
    try:
        model: Any = _as_it_comes(name, **arguments)
        patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
        side = int(patch[0]) if isinstance(patch, (tuple, list)) else patch
        if side is not None:
            _as_it_comes(name, **{**arguments, "patch_size": side})
    except TypeError:  # no option of that name
        return None
    return side


def _as_it_comes(name: str, **options: Any) -> nn.Module:
    """The model without memory for its weights; older releases of timm need it for some models."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return timm.create_model(name, **options)  # type: ignore[no-any-return]
        except (RuntimeError, ValueError):
            return timm.create_model(name, **options)  # type: ignore[no-any-return]


def seen_before(recipe: Recipe, data: ImageData) -> list[str]:
    """A sentence if so, for the notes of a run that starts from another one on the same data.

    Where the set has no test split, seed and holdout draw it. With the same seed a smaller holdout is a part
    of a larger one.
    """
    if recipe.start_from is None or not data.is_test_drawn:
        return []
    file = weights_file(recipe.start_from).parent / RECIPE  # every folder of weights of ours has one
    if not file.is_file():
        return []
    before = Recipe.from_mapping(read_recipe(file))
    if _place(before.data) != _place(without_secrets(recipe.data)):
        return []
    drawn_there, drawn_here = (
        f"seed {each.seed}" + ("" if data.name == "digits" else f" and holdout {each.holdout:g}")
        for each in (before, recipe)
    )
    is_part = before.seed == recipe.seed and (data.name == "digits" or recipe.holdout <= before.holdout)
    if is_part:
        return []
    return [
        f"some test images are not new to these weights: {drawn_there} drew those of {recipe.start_from}, "
        f"{drawn_here} draws others of the same {recipe.data}, so the accuracy is too good. Take the seed "
        "and the holdout of that run, or a set with a test split of its own."
    ]


def _place(data: str) -> Path:
    """The same for two ways to write one folder."""
    return Path(data.removeprefix("folder:")).expanduser().resolve()


def make_accelerator(recipe: Recipe, trackers: list[str], project: str | Path) -> "Accelerator":
    """The devices, processes and precision of a run, also where one was made before in this process."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise ValueError(
            "sharding is a field of the recipe here: use --parallel fsdp2 and launch without --use_fsdp."
        )
    if recipe.device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {recipe.device!r}; a launcher chooses among GPUs.")
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda needs a GPU that torch sees, there is none; use device=cpu.")
    require_accelerate()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    join_processes(recipe.device)
    if not torch.distributed.is_initialized():
        # Accelerate keeps the first accelerator's settings for the whole process.
        AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        # Several processes without a GPU are one run only if Accelerate is told that they are on the CPU.
        cpu=recipe.device == "cpu" or (started_processes() > 1 and not torch.cuda.is_available()),
        mixed_precision="bf16" if recipe.precision == "bf16" else "no",
        log_with=trackers or None,
        project_dir=str(project),
    )
    joined = (rank(), world())
    if joined != (accelerator.process_index, accelerator.num_processes) or world() < started_processes():
        raise RuntimeError(
            f"expected one run on {started_processes()} processes, as the launcher's WORLD_SIZE says, got "
            f"process {rank()} of {world()} for torch and {accelerator.process_index} of "
            f"{accelerator.num_processes} for Accelerate; start them with torchrun or accelerate launch, or "
            "unset WORLD_SIZE for a run on one."
        )
    return accelerator


@dataclass(frozen=True)
class Prepared:
    """A recipe without open fields, its images and its model, on the CPU."""

    recipe: Recipe
    data: ImageData
    built: Built
    size: int


def prepare(recipe: Recipe, accelerator: "Accelerator") -> Prepared:
    """Open the data and build the model; what does not fit together is told before anything is decoded."""
    device = accelerator.device
    if recipe.ema is not None and recipe.parallel == "fsdp2" and several():
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
    built.notes.extend(seen_before(recipe, data))
    recipe = _with_a_monitor_that_can_be(resolve_for(recipe, built.model), built)
    if recipe.task == "mae":
        check_mae(built.model, recipe.mask_ratio)
    recipe, notes = with_batch_size(recipe, len(data.train), world())
    built.notes.extend(notes)
    check_share(recipe, rank(), world())
    assert recipe.image_size is not None
    check_images(recipe, data, recipe.image_size, built.mean, built.std)
    return Prepared(recipe, data, built, recipe.image_size)


def _with_a_monitor_that_can_be(recipe: Recipe, built: Built) -> Recipe:
    """Models without blocks that are known, a ResNet say, train like others; there is nothing to measure."""
    try:
        anatomy.blocks(built.model)
    except UnknownModelError:
        if recipe.monitor_every:
            raise
        built.notes.append(f"kappa and density are not measured: no block of {recipe.model} is known.")
        return dataclasses.replace(recipe, monitor_every=0)
    return recipe


def settled(prepared: Prepared, folder: Path, overwrite: bool, device: torch.device) -> Prepared:
    """With placement and floor decided, for all starts of the run and on all processes alike.

    Where the images are may depend on the memory that is free, and they are augmented differently in both.
    The floor of the graying depends on the device, and the weights are trained for it.
    """
    notes: list[str] = []

    def decided() -> Recipe:
        recipe = prepared.recipe
        before = {} if overwrite else recipe_before(folder)
        if recipe.placement == "auto" and before:
            recipe = dataclasses.replace(recipe, placement=before.get("placement", "auto"))
        recipe = resolve_floor(_with_floors_of(recipe, before), device)
        if before and recipe.graying in DEVICE_FLOORS and "gray_floor" not in before:
            notes.append(
                f"gray_floor is {recipe.gray_floor:g} from here on; the version that started the run had "
                "a lower one."
            )
        placement = choose_placement(recipe, prepared.data, prepared.size, device)
        return dataclasses.replace(recipe, placement=placement)

    recipe = from_first(decided, device)
    built = with_gray_floor(prepared.built, recipe)
    built.notes.extend(notes)
    return dataclasses.replace(prepared, recipe=recipe, built=built)


def _with_floors_of(recipe: Recipe, before: dict[str, Any]) -> Recipe:
    """The recipe with the floors that the run had before, where it says nothing of them."""
    if recipe.graying in DEVICE_FLOORS and recipe.gray_floor is None:
        recipe = replace(recipe, gray_floor=before.get("gray_floor"))
    earlier = before.get("edits", ())
    if len(earlier) != len(recipe.edits):
        return recipe  # a run of another recipe, which is refused later
    floors = [{"floor": each["floor"]} if "floor" in each else {} for each in earlier]
    own = tuple({**floor, **call} for floor, call in zip(floors, recipe.edits, strict=True))
    return replace(recipe, edits=own)
