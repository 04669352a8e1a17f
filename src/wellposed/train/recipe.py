r"""All that decides a training run, as one typed value, and its file.

Every field has a default, can stand in a TOML file, and is a flag of ``wellposed train``. A field that is
None is filled in from the data and the model when the run starts; the run's folder holds the recipe with all
of them filled in.

>>> Recipe(data="cifar10:DIR", edits=["gray_tokens method=dct"]).lr is None
True
>>> Recipe(precision="fp16")
Traceback (most recent call last):
ValueError: precision must be one of fp32, bf16, got 'fp16'; did you mean 'bf16'?
>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "mine.toml"
>>> write_recipe(Recipe(epochs=3), path)
>>> combine(read_recipe(path), {"lr": 1e-4}).epochs
3
>>> _ = path.write_text("epoch = 3")
>>> read_recipe(path)
Traceback (most recent call last):
ValueError: ...mine.toml has an unknown field 'epoch'; did you mean 'epochs'?
"""

import contextlib
import dataclasses
import functools
import json
import math
import numbers
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from wellposed.calls import OLD_FIELDS, with_edits
from wellposed.files import parse_toml, read_bytes, write_text
from wellposed.text import nearest
from wellposed.train import edits

NONE = "none"
"""Stands for None where a field may be None, since TOML has no such value, and for an empty list."""

Task = Literal["classify", "mae", "probe"]
Placement = Literal["auto", "device", "stream"]
Precision = Literal["fp32", "bf16"]
OnNonfinite = Literal["stop", "skip"]
TRIVIAL_POLICY = "trivial"


def _field(default: Any, group: str, help: str, *, free: bool = False) -> Any:
    """A field with the text of its flag; ``free`` ones may differ when a run is resumed."""
    metadata = {"help": help, "group": group, "free": free}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run. See the fields' help, ``wellposed train --help-all`` or docs/train.md.

    Example:
        >>> Recipe(model="vit_tiny_patch16_224", edits=["gray_tokens eps=0.7"], epochs=3).edits
        ({'edit': 'gray_tokens', 'eps': 0.7},)
    """

    # fmt: off
    task: Task = _field("classify", "Task",
        "classify; mae: masked pre-training; probe: train a linear head on a frozen model")

    data: str = _field("digits", "Data",
        "digits, torchvision:NAME such as torchvision:CIFAR10, cifar10:DIR, a folder, hf:NAME_OR_PARQUET, "
        "wds:SHARDS or packed:FILE.npz")
    placement: Placement = _field("auto", "Data",
        "device: decode once and keep on the device; stream: decode in workers; auto: device if it fits")
    workers: int = _field(2, "Data",
        "processes that decode streamed images; 0 decodes in the training process", free=True)
    limit: int | None = _field(None, "Data", "train on this many images only")
    holdout: float = _field(0.1, "Data", "share of the images to test on, where the set has no test split")

    model: str = _field("test_vit", "Model", "a timm name, hf-hub:NAME or local-dir:FOLDER")
    image_size: int | None = _field(None, "Model",
        "side of the images in pixels [default: the data's own, else the model's]")
    patch_size: int | None = _field(None, "Model",
        "side of a patch [default: the model's own, smaller for small images]")
    model_options: dict[str, Any] = _field({}, "Model", "further options for timm, such as depth=6")
    init: Literal["timm", "xavier", "torch", "mimetic", "skipless"] = _field("timm", "Model",
        "initial weights: what timm gives, Xavier's for all linear layers, or what wellposed.initialise "
        "draws for the blocks; with timm's a deep model without skips does not start to learn")
    pretrained: bool = _field(False, "Model", "start from the weights that timm has for the model")
    start_from: str | None = _field(None, "Model",
        "a .safetensors or .pth file, or the folder of a run, whose weights to start from; "
        "a head that does not fit starts fresh")
    drop_path: float = _field(0.0, "Model", "stochastic depth")

    edits: tuple[dict[str, Any], ...] = _field((), "Edits",
        "an edit with its arguments, such as 'gray_tokens eps=0.7 where=pixels'; may be repeated. "
        "gray_tokens takes eps_end and eps_schedule=cosine too, for a power that changes")

    epochs: int = _field(60, "Optimizer", "passes over the training images")
    batch_size: int = _field(128, "Optimizer", "images in one update, over all processes")
    accumulate: int = _field(1, "Optimizer", "passes that one update is split into")
    optimizer: str = _field("adamw", "Optimizer", "a name of timm's optimizers")
    lr: float | None = _field(None, "Optimizer",
        "highest learning rate [default: 0.2 over the model's width, at most 0.003]")
    weight_decay: float = _field(0.05, "Optimizer", "not for biases and norms")
    layer_decay: float | None = _field(None, "Optimizer",
        "factor of the learning rate from each layer to the one before, for fine-tuning")
    schedule: str = _field("cosine", "Optimizer",
        "a name of timm's schedules that change with the updates: cosine, tanh, poly, step, ...")
    warmup_epochs: float | None = _field(None, "Optimizer",
        "linear warm-up [default: a tenth of the epochs, at most 5]")
    min_lr: float = _field(1e-5, "Optimizer", "lowest learning rate")
    clip_grad: float | None = _field(1.0, "Optimizer", "largest norm of the gradient")
    smoothing: float = _field(0.1, "Optimizer", "label smoothing")
    ema: float | None = _field(None, "Optimizer",
        "decay of an exponential moving average of the weights, evaluated too")

    flip: float | None = _field(None, "Augmentation",
        "probability of mirroring [default: 0.5 for photographs, else 0]")
    crop_padding: int | None = _field(None, "Augmentation",
        "shift by up to so many pixels [default: an eighth of images of 16 to 64 pixels, else 0]")
    crop_scale: float | None = _field(None, "Augmentation",
        "smallest share of the image that a random resized crop keeps "
        "[default: 0.08 for photographs over 64 pixels, else none]")
    auto_augment: str | None = _field(None, "Augmentation",
        "trivial: TrivialAugment, on the device; or timm's name such as rand-m9-mstd0.5, for streamed images")
    color_jitter: float = _field(0.0, "Augmentation",
        "strength of random brightness, contrast and saturation")
    erase: float = _field(0.0, "Augmentation", "probability of erasing a rectangle")
    mixup: float | None = _field(None, "Augmentation",
        "alpha of mixup, 0 for none [default: 0.2 to classify, else 0]")
    cutmix: float = _field(0.0, "Augmentation", "alpha of CutMix, 0 for none")
    mix_probability: float = _field(1.0, "Augmentation",
        "share of the updates whose images are mixed, with mixup or cutmix")

    mask_ratio: float = _field(0.75, "MAE", "share of the patches that are hidden")
    decoder_width: int | None = _field(None, "MAE",
        "width of the decoder [default: half of the encoder's, in whole heads]")
    decoder_depth: int = _field(4, "MAE", "blocks of the decoder")
    norm_pixels: bool = _field(True, "MAE", "predict each patch standardised")

    seed: int = _field(0, "Run", "of everything that is drawn")
    precision: Precision = _field("fp32", "Run", "fp32, or bf16 autocast")
    compile: bool | None = _field(None, "Run", "compile the model [default: on a GPU]", free=True)
    compile_blocks: bool = _field(False, "Run",
        "compile block by block: equal blocks are compiled once, so that training starts sooner", free=True)
    device: str | None = _field(None, "Run", "cpu, cuda [default: a GPU if there is one]", free=True)
    parallel: Literal["ddp", "fsdp2"] = _field("ddp", "Run",
        "with several processes: replicate or shard the model", free=True)
    eval_every: int = _field(1, "Run", "epochs between two tests")
    collapse_patience: int = _field(0, "Run",
        "end a collapsed run: after so many tests in a row below half of its best accuracy; 0: never")
    monitor_every: int | None = _field(None, "Run",
        "updates between two measurements of kappa and density, 0 for none "
        "[default: 100, or so many that they take 1% of the time]", free=True)
    log_every: int = _field(50, "Run", "updates between two lines of run.jsonl", free=True)
    checkpoint_every: int | None = _field(None, "Run",
        "updates between two checkpoints [default: one an epoch, at most one a minute]", free=True)
    keep: int = _field(2, "Run", "checkpoints to keep", free=True)
    trackers: tuple[str, ...] = _field(("auto",), "Run",
        "auto: tensorboard if it is installed; else names of Accelerate's trackers: wandb, mlflow, ...; none",
        free=True)
    on_nonfinite: OnNonfinite = _field("stop", "Run",
        "what a NaN or infinite loss or gradient does: stop, or skip the update", free=True)
    # fmt: on

    def __post_init__(self) -> None:
        for name in field_types():
            object.__setattr__(self, name, checked(name, getattr(self, name)))
        check_together(self)

    @property
    def worker_policy(self) -> str | None:
        """The policy of timm that workers apply to pictures; TrivialAugment is done on the device instead."""
        return None if self.auto_augment == TRIVIAL_POLICY else self.auto_augment

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "the recipe") -> "Recipe":
        """A recipe of named values, also those of older versions; an unknown name is an error."""
        values = without_removed(with_edits(values), source)
        require_known(values, source)
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """The fields as files hold them: lists for tuples, None only where the default is another."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "edits" and not value:
                continue  # folders of runs are named by what is here, also those of versions without it
            if value is not None:
                values[field.name] = list(value) if isinstance(value, tuple) else value
            elif field.default is not None:
                values[field.name] = NONE
        return values


@functools.cache
def field_types() -> dict[str, Any]:
    """The type of each field, in order."""
    hints = get_type_hints(Recipe)
    return {field.name: hints[field.name] for field in dataclasses.fields(Recipe)}


def checked(name: str, value: Any) -> Any:
    """One field's value as its type has it, or an error."""
    if name == "edits":
        given = () if value in (None, NONE) else value
        if not isinstance(given, (list, tuple)):
            raise TypeError(f"edits must be a list, got {given!r}.")
        return tuple(edits.checked(call, f"edits[{index}]") for index, call in enumerate(given))
    value = fitting(name, value, field_types()[name])
    words, holds = RANGES.get(name, ("", None))
    if holds is not None and value is not None and not (math.isfinite(value) and holds(value)):
        raise ValueError(f"{name} must be {words}, got {value}.")
    return value


REMOVED: dict[str, tuple[Any, str]] = {
    "skip_unreadable": (False, "wellposed pack --skip-unreadable makes a set without such images"),
}
"""Fields of earlier versions, with what they were by default and what to use instead."""


def without_removed(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The fields without those that went, which may only say what is always so now.

    >>> without_removed({"epochs": 3, "skip_unreadable": False}, "mine.toml")
    {'epochs': 3}
    """
    for name, (default, instead) in REMOVED.items():
        if values.get(name, default) != default:
            raise ValueError(f"{source} has {name!r}, which is no field any more: {instead}.")
    return {name: value for name, value in values.items() if name not in REMOVED}


def require_known(names: Iterable[str], source: str) -> None:
    """Raise if a name is none of the fields."""
    for name in names:
        if name in OLD_FIELDS:
            raise ValueError(
                f"{source} has {name!r}, which is an argument of an edit now, such as "
                "edit='gray_tokens method=dct eps=0.9'."
            )
        if name not in field_types():
            raise ValueError(f"{source} has an unknown field {name!r}{nearest(name, field_types())}")


def decisive(recipe: Recipe) -> dict[str, Any]:
    """The fields that decide the result; the others may change when a run is resumed."""
    free = {field.name for field in dataclasses.fields(recipe) if field.metadata["free"]}
    return {name: value for name, value in recipe.to_mapping().items() if name not in free}


def changes_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The fields whose values differ, with both; one that is open is ``"unset"``.

    >>> changes_of({"lr": 0.1, "seed": 0}, {"seed": 0, "ema": 0.9})
    [('lr', 0.1, 'unset'), ('ema', 'unset', 0.9)]
    """
    both = [(name, before.get(name, "unset"), now.get(name, "unset")) for name in {**before, **now}]
    return [change for change in both if change[1] != change[2]]


_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def kind_of(hint: Any) -> tuple[Any, bool]:
    """A field's type without its None, and whether it may be None.

    >>> kind_of(int | None), kind_of(str)
    ((<class 'int'>, True), (<class 'str'>, False))
    """
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    (kind,) = (option for option in options if option is not types.NoneType)
    return kind, types.NoneType in options


def fitting(name: str, value: Any, hint: Any) -> Any:
    """The value as the field's type has it, or an error that says what was expected."""
    kind, may_be_none = kind_of(hint)
    is_none = isinstance(value, str) and value == NONE
    if may_be_none and (value is None or is_none):
        return None
    origin = get_origin(kind)
    if origin is Literal:
        choices = get_args(kind)
        if value in choices:
            return value
        listed = ", ".join(map(str, choices))
        raise ValueError(f"{name} must be one of {listed}, got {value!r}{nearest(value, choices)}")
    if origin is tuple:
        if is_none:
            return ()
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{name} must be a list, got {value!r}.")
        (item, *_) = get_args(kind)
        return tuple(fitting(f"{name}[{index}]", each, item) for index, each in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a table of options, got {value!r}.")
        return _plain(name, value)
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    number = {int: numbers.Integral, float: numbers.Real}.get(kind)
    if number is not None and isinstance(value, number) and not isinstance(value, bool):
        return kind(value)
    if type(value) is not kind:
        raise TypeError(f"{name} must be {_WORDS[kind]}, got {value!r}.")
    return value


def _plain(name: str, value: Any) -> Any:
    """What a file can hold, so that a saved recipe is the recipe."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{name} must have texts for keys, got {key!r}.")
        return {key: _plain(f"{name}.{key}", each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(f"{name}[{index}]", each) for index, each in enumerate(value)]
    if type(value) in _WORDS:
        return value
    raise TypeError(f"{name} must be a text, a number, true, false, a list or a table, got {value!r}.")


# fmt: off
_RANGES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    ("at least 1", lambda value: value >= 1, (
        "epochs", "batch_size", "accumulate", "eval_every", "log_every", "checkpoint_every", "keep",
        "limit", "image_size", "patch_size", "decoder_depth", "decoder_width")),
    ("at least 0", lambda value: value >= 0, (
        "workers", "monitor_every", "collapse_patience", "warmup_epochs", "min_lr", "weight_decay",
        "crop_padding", "mixup", "cutmix")),
    ("at least 0 and below 2**63", lambda value: 0 <= value < 2**63, ("seed",)),
    ("in [0, 1]", lambda value: 0 <= value <= 1, (
        "flip", "erase", "smoothing", "drop_path", "color_jitter", "ema", "mix_probability")),
    ("in (0, 1]", lambda value: 0 < value <= 1, (
        "crop_scale", "layer_decay")),
    ("in (0, 1)", lambda value: 0 < value < 1, ("holdout", "mask_ratio")),
    ("positive", lambda value: value > 0, ("lr", "clip_grad")),
)
# fmt: on
RANGES = {name: (words, holds) for words, holds, names in _RANGES for name in names}


def check_together(recipe: "Recipe") -> None:
    """Raise if fields do not go together."""
    trained = [name for name in ("pretrained", "start_from") if getattr(recipe, name)]
    if len(trained) == 2:
        raise ValueError("expected pretrained or start_from, got both; leave one of them out.")
    if trained and recipe.init != "timm":
        raise ValueError(
            f"init={recipe.init} would draw again what {trained[0]} loads; leave one of them out."
        )
    if recipe.task == "probe" and not trained:
        raise ValueError(
            "task=probe trains a head on trained weights; add start_from=RUN_OR_FILE or pretrained."
        )
    if recipe.task == "mae" and (recipe.mixup or recipe.cutmix):
        raise ValueError("task=mae has no labels to mix; leave mixup and cutmix out.")
    if recipe.task == "mae" and recipe.collapse_patience:
        raise ValueError("task=mae has no accuracy that could collapse; leave collapse_patience out.")
    if recipe.mix_probability != 1 and recipe.mixup == 0 and recipe.cutmix == 0:
        raise ValueError("mix_probability does nothing alone; add mixup or cutmix, or leave it out.")
    removes = [call for call in edits.calls(recipe) if call.kind == "remove_skips"]
    if recipe.drop_path and not all(call.argument("allow_drop_path") for call in removes):
        raise ValueError(
            "drop_path drops branches, and where remove_skips has removed the skip nothing of an "
            "image would be left; leave one of them out."
        )
    if recipe.warmup_epochs is not None and recipe.warmup_epochs >= recipe.epochs:
        raise ValueError(
            f"warmup_epochs must be less than epochs, got {recipe.warmup_epochs:g} and {recipe.epochs}; "
            "lower it, or leave it out."
        )
    if recipe.batch_size % recipe.accumulate:
        raise ValueError(
            f"batch_size must be a multiple of accumulate, got {recipe.batch_size} and {recipe.accumulate}."
        )


def table(values: Mapping[str, Any]) -> str:
    """One line a value."""
    return "\n".join(f"{_key(name)} = {value_text(value)}" for name, value in values.items())


def value_text(value: Any) -> str:
    """The value so that a TOML reader gives the same value back, floats bit for bit."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(name)} = {value_text(each)}" for name, each in value.items())
        return f"{{{inside}}}"
    raise TypeError(f"TOML holds texts, numbers, true and false, lists and tables, got {value!r}.")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _string(name)


def _string(text: str) -> str:
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        byte = next(ord(character) & 0xFF for character in text if 0xD800 <= ord(character) <= 0xDFFF)
        raise ValueError(f"TOML is UTF-8 text, got the byte {byte:#04x} that is none; rename the file.")
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON leaves this one as it is


MOST_BYTES = 2**22
SUFFIX = ".toml"


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The fields that a file gives, each checked; an error names the file."""
    path = Path(path)
    text = _read_text(path)
    try:
        given = parse_toml(text)
    except ValueError as error:
        said = str(error).replace("end of document", f"the end, line {text.count(chr(10)) + 1}")
        raise ValueError(f"{path} is not valid TOML: {said}") from error
    with named(path):
        given = with_edits(given)
    values = without_removed(given, str(path))
    require_known(values, str(path))
    with named(path):
        return {name: checked(name, value) for name, value in values.items()}


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """An error inside names the file."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}: {error}") from error


def combine(file_values: Mapping[str, Any], flag_values: Mapping[str, Any]) -> Recipe:
    """The recipe of a file with flags over it; single ``model_options`` too."""
    values = {**file_values, **flag_values}
    options = [each["model_options"] for each in (file_values, flag_values) if each.get("model_options")]
    if options:
        values["model_options"] = {name: value for each in options for name, value in each.items()}
    return Recipe.from_mapping(values)


def recipe_text(recipe: Recipe) -> str:
    """The recipe as TOML, under the groups of the fields."""
    values = recipe.to_mapping()
    options = values.pop("model_options")
    groups: dict[str, dict[str, Any]] = {}
    for field in dataclasses.fields(recipe):
        if field.name in values:
            groups.setdefault(field.metadata["group"], {})[field.name] = values[field.name]
    parts = [f"# {group}\n{table(fields)}" for group, fields in groups.items()]
    if options:
        parts.append(f"[model_options]\n{table(options)}")
    return "\n\n".join(parts) + "\n"


def write_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write the recipe as TOML; a kill at any moment leaves the old file or the new one."""
    write_text(path, recipe_text(recipe))


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, expected a recipe; `wellposed sweep` takes folders.")
    if path.suffix in (".yaml", ".yml"):
        raise ValueError(f"recipes are TOML, got {path}; write NAME = VALUE for NAME: VALUE in a .toml file.")
    if path.suffix != SUFFIX:
        raise ValueError(f"a recipe's name must end in {SUFFIX}, got {path}.")
    if not path.exists():
        others = [other.name for other in path.parent.glob("*") if other.suffix == SUFFIX]
        raise FileNotFoundError(f"there is no recipe {path}{nearest(path.name, others)}")
    try:
        return read_bytes(path, MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path} must be UTF-8 text, got a byte that is none in line {line}.") from error
    except ValueError as error:
        raise ValueError(f"expected a recipe in {path}, which cannot be read: {error}.") from error
