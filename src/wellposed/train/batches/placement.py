"""Whether the images are kept on the device or streamed through workers."""

import os
from typing import Literal

import torch

from wellposed.train.data.split import ImageData
from wellposed.train.recipe import Recipe

SHARE = 1 / 4
"""Of the memory that the images may take; the rest is for the model and what it computes."""
CPU_LIMIT = 8 * 2**30


def choose_placement(
    recipe: Recipe, data: ImageData, image_size: int, device: torch.device
) -> Literal["device", "stream"]:
    """What ``recipe.placement`` means for this data and device.

    ``auto`` keeps the images on the device if their bytes, decoded, are at most a quarter of its free memory;
    on a CPU a quarter of the machine's, at most 8 GiB. What only workers can do is streamed.
    """
    if recipe.placement == "stream":
        return "stream"
    needed, budget = bytes_needed(data, image_size), bytes_allowed(device)
    if recipe.placement == "auto":
        return "device" if recipe.worker_policy is None and needed <= budget else "stream"
    if recipe.worker_policy is not None:
        raise ValueError(
            f"auto_augment={recipe.worker_policy} is done by workers, got placement=device; use "
            "placement=stream, or auto_augment=trivial, or leave auto_augment out."
        )
    if needed > budget:
        raise ValueError(
            f"placement=device: the images take {_size(needed)}, a quarter of the memory of {device} that "
            f"can be used is {_size(budget)}; use placement=stream, or lower image_size or limit."
        )
    return "device"


def bytes_needed(data: ImageData, image_size: int) -> int:
    """Pixels and labels of both splits."""
    return (len(data.train) + len(data.test)) * (data.channels * image_size**2 + 8)


def bytes_allowed(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(SHARE * free)
    # All of the machine's memory and not what is free: that changes with the cache of files, and with it the
    # images that a training run sees would.
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(int(SHARE * total), CPU_LIMIT)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
