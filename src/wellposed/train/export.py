"""Trained weights for others: a folder that plain timm loads, with its model card, and one on the Hub."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import timm
from torch import Tensor

from wellposed.environment import without_secrets
from wellposed.files import plain
from wellposed.models import timm_architecture
from wellposed.run_records import NAME as LOG
from wellposed.run_records import RESULT
from wellposed.surgery.record import Edit, Edits
from wellposed.train import checkpoint
from wellposed.train.edits import calls, code_of
from wellposed.train.recipe import Recipe, recipe_text

_ALWAYS = ("data", "model", "epochs", "batch_size", "optimizer", "lr", "weight_decay", "schedule", "seed")
_MOST_CLASSES = 30
FIRST_LOCAL_DIR = "1.0.26"
"""The timm that loads safetensors from a folder; older ones take every file there for a pickle, and fail."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What there is to say of weights; the first fields are those of their run.

    Args:
        recipe: with all fields filled in.
        model_kwargs: with which ``timm.create_model`` makes the model, edits aside.
        classes: names in the order of the labels; none for an encoder without a head.
        mean, std: of the channels, for pixels from 0 to 1.
        image_size: side in pixels.
        environment: of :func:`wellposed.environment.environment`.
        train_images, test_images: how many there were.
        accuracy: on the test images, None if they were not tested.
        update: how many updates the weights have seen.
        edits: of the model with these weights; the power of a graying may change during training.
        note: a sentence for the card, such as that the weights are an average.
    """

    recipe: Recipe
    model_kwargs: Mapping[str, Any]
    classes: Sequence[str]
    mean: Sequence[float]
    std: Sequence[float]
    image_size: int
    environment: Mapping[str, Any]
    train_images: int | None = None
    test_images: int | None = None
    accuracy: float | None = None
    update: int = 0
    edits: Sequence[Edit] = ()
    note: str = ""

    @cached_property
    def architecture(self) -> str:
        """Timm's name of it."""
        return timm_architecture(self.recipe.model)[0]

    @property
    def num_classes(self) -> int:
        return int(self.model_kwargs.get("num_classes", len(self.classes)))


WEIGHTS = "model.safetensors"
RECIPE, ENVIRONMENT = "recipe.toml", "environment.json"
"""In the folder of a run; the recipe is with its weights too."""


def export_weights(folder: Path, state: Mapping[str, Tensor], exported: Exported) -> None:
    """Write the folder; one that is there already stays whole until the new one takes its place.

    Args:
        folder: of these weights alone.
        state: the model's state dict, with the names it has when it is not compiled or wrapped.
        exported: what there is to say of them.
    """
    recipe = dataclasses.replace(exported.recipe, data=without_secrets(exported.recipe.data))
    exported = dataclasses.replace(exported, recipe=recipe)
    with checkpoint.replaced(folder) as staged:
        checkpoint.write_tensors(staged / WEIGHTS, state)
        texts = {
            "config.json": _config_text(exported, checkpoint.file_hash(staged / WEIGHTS)),
            "README.md": model_card(exported),
            RECIPE: recipe_text(recipe),
        }
        for name, text in texts.items():
            checkpoint.write_bytes(staged / name, text.encode())


def _config_text(exported: Exported, sha256: str) -> str:
    """What timm reads of a folder or of the hub: how to build the model, and how its images are prepared."""
    registered = timm.get_pretrained_cfg(exported.architecture)
    known = registered.to_dict() if registered is not None else {}
    config = {
        "architecture": exported.architecture,
        "num_classes": exported.num_classes,
        "label_names": list(exported.classes) or None,
        "model_args": dict(exported.model_kwargs),
        "pretrained_cfg": {
            # Whether the size is an argument of the model; the layer that another number of classes replaces.
            **{name: known[name] for name in ("fixed_input_size", "classifier") if name in known},
            # timm would adapt a first layer of other than three channels, that is already as it should be.
            "first_conv": None,
            "input_size": [len(exported.mean), exported.image_size, exported.image_size],
            "mean": list(exported.mean),
            "std": list(exported.std),
            "num_classes": exported.num_classes,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "center",
        },
        "wellposed": {
            "accuracy": plain(exported.accuracy),
            "update": exported.update,
            "sha256": sha256,
            **Edits(exported.edits).to_dict(),
            "environment": plain(exported.environment),
        },
    }
    try:
        return json.dumps(config, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(
            "expected options for timm that JSON can hold (numbers, texts, lists, true and false), got "
            f"{exported.model_kwargs}: {error}; leave the option out of model_options."
        ) from error


def model_card(exported: Exported) -> str:
    """Markdown with the front matter that hubs read. Its Python blocks run in the folder, in their order."""
    task = "image-classification" if exported.classes else "image-feature-extraction"
    parts = [
        f"---\nlibrary_name: timm\npipeline_tag: {task}\ntags:\n- {task}\n- timm\n- wellposed\n---",
        f"# {_text(exported.recipe.model)} on {_text(exported.recipe.data)}",
        *_result(exported),
        *_load(exported),
        "## Images",
        _images(exported),
        f"```python\n{_prediction(exported)}\n```",
        *_classes(exported),
        "## Recipe",
        _recipe_table(exported.recipe),
        "`recipe.toml` has every field. This trains it again:",
        "```bash\nwellposed train recipe.toml --out again\n```",
        _environment(exported.environment),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _result(exported: Exported) -> list[str]:
    """Which weights these are, and how good."""
    recipe = exported.recipe
    count = "" if exported.train_images is None else f" ({exported.train_images:,} training images)"
    trained = "pre-trained without labels (MAE)" if recipe.task == "mae" else "trained"
    edited = ", with edits that timm does not have" if exported.edits else ""
    owner = "wellposed's" if _is_of_wellposed(exported.architecture) else "timm's"
    what = (
        f"{owner} {_code(recipe.model)}{edited}, {trained} by wellposed on {_code(recipe.data)}{count} for "
        f"{recipe.epochs} epochs. These are the weights after update {exported.update:,}."
        + (f" {exported.note}" if exported.note else "")
    )
    if exported.accuracy is None:
        return [what, "There is no test accuracy for these weights."]
    count = "the test images" if exported.test_images is None else f"{exported.test_images:,} test images"
    return [
        what,
        f"**Test accuracy: {100 * exported.accuracy:.2f}%** on {count}. This is one run (seed "
        f"{recipe.seed}); how much the accuracy changes from seed to seed was not measured.",
    ]


def _load(exported: Exported) -> list[str]:
    values = {"num_classes": exported.num_classes, **exported.model_kwargs}
    keywords = [f"{name}={value!r}" for name, value in values.items() if name.isidentifier()]
    arguments = ", ".join([f'"{exported.architecture}"', *keywords])
    built = f"timm.create_model({arguments})"
    is_ours = _is_of_wellposed(exported.architecture)
    if not exported.edits:
        imports = "import timm\nimport wellposed" if is_ours else "import timm"
        block = (
            f"```python\n{imports}\nfrom safetensors.torch import load_file\n\n"
            f'model = {built}.eval()\nmodel.load_state_dict(load_file("model.safetensors"))\n```'
        )
        if is_ours:
            first = "timm has this model once wellposed is imported. In this folder:"
            return ["## Load with timm and wellposed", first, block]
        return [
            "## Load with timm",
            "In this folder:",
            block,
            f'From timm {FIRST_LOCAL_DIR} on the folder is enough, `"local-dir:PATH"` from elsewhere:',
            '```python\nimport timm\n\nmodel = timm.create_model("local-dir:.", pretrained=True).eval()\n```',
        ]
    calls = "\n".join(code_of(exported.recipe, exported.edits))
    return [
        "## Edits",
        "The model was trained with these edits. They change what it computes, so the accuracy above holds "
        "only with them.",
        f"```\n{Edits(exported.edits)}\n```",
        "## Load with timm and wellposed",
        "In this folder: timm makes the model, wellposed edits it, then the weights go in.",
        "```python\nimport timm\nimport wellposed as wp\nfrom safetensors.torch import load_file\n\n"
        f'model = {built}\n{calls}\nmodel.load_state_dict(load_file("model.safetensors"))\nmodel.eval()\n```',
        *([] if is_ours else [_without_wellposed(exported)]),
    ]


def _is_of_wellposed(name: str) -> bool:
    """Whether timm has the model only once wellposed is imported."""
    return bool(timm.is_model(name) and timm.model_entrypoint(name).__module__.startswith("wellposed."))


def _without_wellposed(exported: Exported) -> str:
    text = "timm alone builds the model without the edits, which is another function with the same weights. "
    if any(call.argument("scaled") or call.argument("learned") for call in calls(exported.recipe)):
        return text + (
            "It also has learned scales, which timm has no place for: `load_state_dict(..., strict=False)` "
            "leaves them out, and `timm.create_model(..., pretrained=True)` refuses the file."
        )
    return (
        text
        + '`timm.create_model("local-dir:.", pretrained=True)` does that, for a start of fine-tuning say.'
    )


def _images(exported: Exported) -> str:
    size, channels = exported.image_size, len(exported.mean)
    kind = {1: "Grey images", 3: "RGB images"}.get(channels, f"Images of {channels} channels")
    mean, std = (", ".join(f"{value:.6g}" for value in values) for values in (exported.mean, exported.std))
    return (
        f"{kind} of {size} x {size} pixels: the shorter side is resized to {size} (bicubic), the centre is "
        f"cut out. Values from 0 to 1, minus the mean ({mean}), divided by the standard deviation ({std})."
    )


def _prediction(exported: Exported) -> str:
    mode = "L" if len(exported.mean) == 1 else "RGB"
    lines = [
        "import numpy as np",
        "from PIL import Image",
        "from timm.data import create_transform",
        "",
        "transform = create_transform(",
        f"    input_size=({len(exported.mean)}, {exported.image_size}, {exported.image_size}),",
        '    interpolation="bicubic",',
        "    crop_pct=1.0,",
        f"    mean={tuple(exported.mean)},",
        f"    std={tuple(exported.std)},",
        ")",
        'picture = Image.open("picture.png")',
        'if picture.mode.startswith("I;16"):  # Pillow would clip it at 255',
        "    picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))",
        f'image = transform(picture.convert("{mode}"))',
    ]
    asked = (
        "label = int(model(image[None]).argmax())" if exported.classes else "features = model(image[None])"
    )
    return "\n".join([*lines, asked])


def _classes(exported: Exported) -> list[str]:
    if not exported.classes:
        return []
    shown = ", ".join(
        f"{index}: {_text(name)}" for index, name in enumerate(exported.classes[:_MOST_CLASSES])
    )
    more = len(exported.classes) - _MOST_CLASSES
    rest = f" and {more} more, all in `config.json`" if more > 0 else ""
    return ["## Classes", f"{shown}{rest}."]


def _recipe_table(recipe: Recipe) -> str:
    """The fields that say most, and those that are not at their default."""
    values = recipe.to_mapping()
    shown = []
    for field in dataclasses.fields(recipe):
        is_default = getattr(recipe, field.name) == field.default or values.get(field.name) == {}
        if field.name in values and (field.name in _ALWAYS or not is_default):
            shown.append(f"| {field.name} | {_text(str(values[field.name]))} |")
    return "\n".join(["| field | value |", "| --- | --- |", *shown])


def _environment(environment: Mapping[str, Any]) -> str:
    parts = [f"{name} {version}" for name, version in environment.get("packages", {}).items()]
    if "python" in environment:
        parts.insert(0, f"Python {environment['python']}")
    devices = environment.get("devices") or [environment.get("cpu")]
    if any(devices):
        count = environment.get("processes", 1)
        processes = "1 process" if count == 1 else f"{count} processes"
        parts.append(f"{processes} on {', '.join(dict.fromkeys(map(str, devices)))}")
    return f"Made with {', '.join(parts)}." if parts else ""


def _text(text: str) -> str:
    r"""A name as Markdown shows it, whatever it holds: a link, HTML, the end of the line.

    >>> print(_text("[a](http://b)|<img>"))
    \[a\](http://b)\|&lt;img&gt;
    """
    flat = " ".join(text.split())
    escaped = re.sub(r"([\\`*\[\]|])", r"\\\1", flat)
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _code(text: str) -> str:
    """The same as code, in more backticks than it has."""
    flat = " ".join(text.split())
    fence = "`" * (max(map(len, re.findall("`+", flat)), default=0) + 1)
    space = " " if "`" in flat else ""
    return f"{fence}{space}{flat}{space}{fence}"


CARD = "README.md"
_OF_WEIGHTS = (CARD, "config.json", WEIGHTS, RECIPE)
_OF_RUN = (LOG, RESULT, ENVIRONMENT, "graying.json")


def files_of(folder: str | Path, weights: Literal["best", "last"] = "best") -> dict[str, Path]:
    """What is shared of a run's folder: the name in the repository, and the file.

    The weights with their card, configuration and recipe are at the top, so that timm loads the repository
    as ``hf-hub:REPO``; with them come the numbers of the run. Checkpoints and TensorBoard's files stay.

    Args:
        folder: of the run.
        weights: which ones.
    """
    folder = Path(folder).expanduser()
    chosen = folder / weights
    missing = [name for name in _OF_WEIGHTS if not (chosen / name).is_file()]
    if missing:
        why = f"{chosen} has no {missing[0]}" if chosen.is_dir() else f"there is no folder {chosen}"
        raise ValueError(
            f"expected the folder of a run that has its {weights} weights, {why}; finish the run with "
            f"wellposed train --out {folder}, or name another."
        )
    here = {name: chosen / name for name in _OF_WEIGHTS}
    return here | {name: folder / name for name in _OF_RUN if (folder / name).is_file()}


def push(
    folder: str | Path,
    repo: str,
    *,
    weights: Literal["best", "last"] = "best",
    private: bool = False,
    api: Any = None,
) -> str:
    """Put a run into a repository of models on the Hub, which is made if need be, in one commit.

    Args:
        folder: of the run.
        repo: ``"USER/NAME"``.
        weights: ``"best"`` or ``"last"``.
        private: whether a new repository can be seen by its owner alone.
        api: a ``huggingface_hub.HfApi``; None makes one, with the token of ``hf auth login``.

    Returns:
        The address of the commit.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    files = files_of(folder, weights)
    client = HfApi() if api is None else api
    # The Hub's errors are those of the library that it calls the network with.
    network = cast(tuple[type[Exception], ...], (OSError, *HfHubHTTPError.__bases__))
    try:
        client.create_repo(repo, repo_type="model", private=private, exist_ok=True)
        commit = client.create_commit(
            repo,
            operations=[CommitOperationAdd(name, str(file)) for name, file in files.items()],
            commit_message=f"The {weights} weights of {Path(folder).resolve().name}, with their run",
            repo_type="model",
        )
    except HFValidationError as error:
        raise ValueError(f"expected a repository such as USER/NAME, got {repo!r}: {error}") from error
    except network as error:
        raise ConnectionError(
            f"the Hub did not take {repo} ({str(error).splitlines()[0].rstrip('.')}); `hf auth login` stores "
            "a token, which needs write access to that repository."
        ) from error
    return str(commit.commit_url)
