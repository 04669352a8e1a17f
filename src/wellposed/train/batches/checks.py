"""What batches need of a recipe and its data, told before any image is read."""

from collections.abc import Sequence
from dataclasses import replace

from wellposed.train.data.split import ImageData
from wellposed.train.recipe import Recipe


def check_share(recipe: Recipe, rank: int, world: int) -> None:
    """An update must divide evenly among processes and passes."""
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in [0, world), got rank={rank} and world={world}.")
    slots = world * recipe.accumulate
    size, rest = divmod(recipe.batch_size, slots)
    words = f"{world} processes x accumulate={recipe.accumulate}"
    if rest or not size:
        raise ValueError(
            f"batch_size must be a multiple of {words} = {slots}, got {recipe.batch_size}; use "
            f"{max(size, 1) * slots} or {(size + 1) * slots}."
        )
    if (recipe.mixup or recipe.cutmix) and size % 2:
        raise ValueError(
            f"mixup and cutmix pair the images of a pass, so it needs an even number, got batch_size="
            f"{recipe.batch_size} over {words} = {size} in a pass; use batch_size={(size + 1) * slots}."
        )


def check_batch_size(recipe: Recipe, images: int) -> None:
    """An epoch has at least one update."""
    if recipe.batch_size > images:
        raise ValueError(
            f"batch_size must be at most the number of training images, {images}, got {recipe.batch_size}; "
            "lower batch_size."
        )


def with_batch_size(recipe: Recipe, images: int, world: int) -> tuple[Recipe, list[str]]:
    """The recipe with batches no larger than the set, so that an epoch has an update, and a note of that."""
    if recipe.batch_size <= images:
        return recipe, []
    step = world * recipe.accumulate * (2 if recipe.mixup or recipe.cutmix else 1)
    if images < step:
        raise ValueError(
            f"expected at least {step} training images, for one batch of the recipe, got {images}; add some."
        )
    lowered = replace(recipe, batch_size=images // step * step)
    return lowered, [
        f"batch_size is {lowered.batch_size}, not {recipe.batch_size}: there are {images} training images."
    ]


def check_images(
    recipe: Recipe, data: ImageData, size: int, mean: Sequence[float], std: Sequence[float]
) -> None:
    """The images, their normalisation, and augmentation that would do nothing."""
    if recipe.task != "mae" and len(data.classes) < 2:
        raise ValueError(
            f"expected at least two classes to tell apart in {data.name}, got {len(data.classes)} "
            f"({', '.join(data.classes)}); add images of another class, or pre-train with task=mae."
        )
    if not len(data.test):
        raise ValueError(f"expected test images in {data.name}, got none; add some, or raise holdout.")
    if len(mean) != data.channels or len(std) != data.channels or min(std) <= 0:
        raise ValueError(
            f"mean and std must have {data.channels} values each, as {data.name} has channels, those of std "
            f"positive, got mean={tuple(mean)} and std={tuple(std)}."
        )
    if recipe.crop_padding is not None and recipe.crop_padding >= size:
        raise ValueError(
            f"crop_padding must be less than the image's side of {size} pixels, got {recipe.crop_padding}; "
            "an eighth of the side is usual."
        )
    policy = recipe.worker_policy
    if policy is not None and recipe.color_jitter and "3a" not in policy:
        raise ValueError(
            f"timm leaves color_jitter out beside auto_augment={policy}, got color_jitter="
            f"{recipe.color_jitter}; leave one of them out."
        )
