"""Small records for the tests of the report, and names that want to do harm."""

import functools
import json
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from wellposed import graying_pictures
from wellposed.digits import load_digits
from wellposed.probes.gray_images import gray_images, settings_of
from wellposed.records import Record

HOSTILE = '</script><img src=x onerror="window.harmed=1"> \'"& \u202egnp.live'
"""Would end the data, run a script, end an attribute, and turn what follows it round."""
HOSTILE_FOLDER = HOSTILE.replace("/", "")

POSITIONS = (
    "input",
    "attention.branch",
    "attention.skip",
    "attention.sum",
    "ffn.branch",
    "ffn.skip",
    "ffn.sum",
)


def records(blocks: int = 2, scale: float = 1.0, heads: int = 3) -> list[Record]:
    """What a diagnosis holds, with round numbers."""
    made = []
    for block in range(blocks):
        for place, position in enumerate(POSITIONS):
            kappa = scale * (10.0 + block + 7.0 * place + 1000.0 * (position == "attention.branch"))
            where: dict[str, Any] = {
                "block": block,
                "module": f"blocks.{block}",
                "position": position,
                "images": 4,
            }
            made.append(Record(measure="kappa", value=kappa, low=kappa / 2, high=kappa * 2, **where))
            curve = tuple(math.exp(-i * math.log(kappa) / 15) for i in range(16))
            made.append(Record(measure="spectrum", value=None, curve=curve, **where))
            made.append(Record(measure="effective rank", value=3.0 + place, **where))
        for head in (None, *range(heads)):
            entropy = 0.9 + 0.01 * block + 0.001 * (head or 0)
            made.append(Record(measure="entropy", value=entropy, block=block, head=head, images=4))
        made.append(
            Record(
                measure="kappa 4.1 linear",
                value=50.0 + block,
                bound=5e6 * (block + 1),
                block=block,
                position="attention.branch",
                verdicts=(4, 0, 0, 0),
            )
        )
        for part in ("attention", "attention+skip"):
            spectrum = tuple(3.0 * math.exp(-i / 9) for i in range(90))
            made.append(
                Record(
                    measure="jacobian kappa", value=9e3, block=block, position=part, curve=spectrum, images=1
                )
            )
    return made


def write_run(
    folder: Path,
    *,
    seed: int = 0,
    epochs: int = 3,
    per_epoch: int = 10,
    blocks: int = 2,
    recipe: str = "",
    data: str = "digits",
    end: Sequence[str] = ("finished",),
) -> list[dict[str, Any]]:
    """The folder of a run, as ``wellposed train`` leaves it; returns its lines.

    Args:
        end: the events after the last numbers.
    """
    folder.mkdir(parents=True)
    text = (
        f'model = "test_vit"\ndata = {json.dumps(data)}\nepochs = {epochs}\nseed = {seed}\npatch_size = 2\n'
    )
    (folder / "recipe.toml").write_text(text + recipe, encoding="utf-8")
    updates = epochs * per_epoch
    lines: list[dict[str, Any]] = [{"event": "start", "update": 0, "updates": updates}]
    for update in range(1, updates + 1):
        noise = math.sin(update * (seed + 1.5))
        train = {"loss": 2.5 / update + 0.01 * noise + 0.1, "images_per_second": 900.0 + noise}
        lines.append({"event": "train", "update": update, **train})
        if update % 5 == 0 or update == 1:
            lines.append({"event": "monitor", "update": update, **_scalars(blocks, update, noise)})
        if update % per_epoch == 0:
            test = {"epoch": update // per_epoch, "loss": 1.0 / update + 0.2, "accuracy": 0.9 - 1.0 / update}
            test["accuracy"] += 0.01 * seed
            lines.append({"event": "test", "update": update, **test, "best": True})
    lines += [{"event": event, "update": updates} for event in end]
    (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    environment = {"command": ["wellposed", "train"], "git": {"commit": "c0ffee", "changed": False}}
    (folder / "environment.json").write_text(json.dumps(environment | {"packages": {"torch": "2.11"}}))
    graying_pictures.write(_graying(text + recipe), folder)
    return lines


def digits() -> Tensor:
    """Three of the embedded digits, from 0 to 1."""
    x = load_digits(0).test_x[:3]
    return (x - x.min()) / (x.max() - x.min())


@functools.cache
def _graying(recipe: str) -> graying_pictures.GrayingPictures:
    settings = settings_of([tomllib.loads(recipe)])
    return gray_images(digits(), ["a", "b", "c"], patch=2, source="handwritten digits", **settings)


def _scalars(blocks: int, update: int, noise: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for position, size in (("input", 40.0), ("attention.branch", 4000.0), ("ffn.branch", 90.0)):
        kappas = [size * (1 + block) + 3 * noise + update for block in range(blocks)]
        found |= {f"kappa/{block}/{position}": kappa for block, kappa in enumerate(kappas)}
        found[f"kappa/{position}/worst"] = max(kappas)
    entropies = [0.9 + 0.001 * block for block in range(blocks)]
    found |= {f"entropy/{block}": value for block, value in enumerate(entropies)}
    return found | {"entropy/mean": sum(entropies) / blocks}
