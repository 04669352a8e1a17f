"""What a run needs before its first update: devices, checks, images, a model."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from wellposed import anatomy
from wellposed.errors import UnknownModelError
from wellposed.train.batches import choose_placement
from wellposed.train.batches.checks import check_images, check_share, with_batch_size
from wellposed.train.checkpoint.processes import from_first, rank, several, world
from wellposed.train.data import ImageData, open_data
from wellposed.train.launching import join_processes, started_processes
from wellposed.train.mae_check import check_mae
from wellposed.train.model import Built, build_model, with_gray_floor
from wellposed.train.recipe import Recipe
from wellposed.train.resolve import resolve, resolve_floor, resolve_for
from wellposed.train.run_folder import recipe_before
from wellposed.train.seen_before import seen_before


def make_accelerator(recipe: Recipe, trackers: list[str], project: str | Path) -> Accelerator:
    """The devices, processes and precision of a run, also where one was made before in this process."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise ValueError(
            "sharding is a field of the recipe here: use --parallel fsdp2 and launch without --use_fsdp."
        )
    if recipe.device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {recipe.device!r}; a launcher chooses among GPUs.")
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda needs a GPU that torch sees, there is none; use device=cpu.")
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


def prepare(recipe: Recipe, accelerator: Accelerator) -> Prepared:
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
        if recipe.has_device_floor and recipe.gray_floor is None:
            recipe = dataclasses.replace(recipe, gray_floor=before.get("gray_floor"))
        recipe = resolve_floor(recipe, device)
        if before and recipe.has_device_floor and "gray_floor" not in before:
            notes.append(
                f"gray_floor is {recipe.gray_floor:g} from here on; the version that started the run had "
                "a lower one."
            )
        placement = choose_placement(recipe, prepared.data, prepared.size, device)
        return dataclasses.replace(recipe, placement=placement)

    recipe = from_first(decided, device)
    built = with_gray_floor(prepared.built, recipe.gray_floor)
    built.notes.extend(notes)
    return dataclasses.replace(prepared, recipe=recipe, built=built)
