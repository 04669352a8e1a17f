"""The runs that are measured: one plain ViT, of a size that fits the data."""

from typing import Any

from wellposed.study.plan import Scale, data_name
from wellposed.study.trained.bases import vit
from wellposed.train.recipe import Recipe

_DIGITS: dict[str, Any] = {"model": "test_vit", "epochs": 60, "batch_size": 128, "trackers": ()}
_LOOKED_BACK = {"digits": (60, 60), "small": (15, 150), "paper": (300, 30_000)}
"""Epochs, and updates between two checkpoints, for about ten of them: of 600 updates with the digits,
1,455 with sets of images, 375,000."""


def plain_vit(scale: Scale, data: str) -> Recipe:
    """That of the other studies; the digits have their own, which a laptop trains in a minute."""
    if data_name(data) == "digits":
        return Recipe(data=data, **_DIGITS)
    return vit(scale, data)


def plain_vit_with_checkpoints(scale: Scale, data: str) -> Recipe:
    """The same with its checkpoints kept, to look back at training."""
    kind = "digits" if data_name(data) == "digits" else scale
    epochs, every = _LOOKED_BACK[kind]
    kept: dict[str, Any] = {"epochs": epochs, "checkpoint_every": every, "keep": 100}
    if kind == "small":
        # With larger steps it does not learn without skips.
        kept["lr"] = 3e-4
    # Stochastic depth does not go with blocks without skips.
    kept["drop_path"] = 0.0
    return Recipe(**plain_vit(scale, data).to_mapping() | kept)
