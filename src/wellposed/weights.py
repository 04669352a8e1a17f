"""Weights in files that cannot run code, and whether they fit a model.

>>> own = {"w": torch.zeros(2), "b": torch.zeros(1)}
>>> misfits(own, {"w": torch.zeros(3)})
['1 missing (b)', '1 of another shape (w: (3,) in the file, (2,) in the model)']
"""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from wellposed.surgery.insertion import Inserted
from wellposed.surgery.weights import WeightEdit
from wellposed.text import few

WEIGHT_ENDINGS = (".safetensors", ".pth", ".pt", ".tar", ".bin", ".ckpt")
HELD = ("model.safetensors", "pytorch_model.bin")
"""Names of the weights in a folder, the safe one first; large ones are in parts that :data:`INDEX` lists."""
INDEX = "model.safetensors.index.json"
_INSIDE = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Where checkpoints hold weights; averaged ones first, as timm takes them."""
_PREFIXES = ("module.", "_orig_mod.")
"""Of DistributedDataParallel and torch.compile."""


def read_weights(path: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors of a file, and in words what of the file was taken where that is not all of it."""
    if not path.is_file():
        raise FileNotFoundError(f"expected a file of weights, there is no {path}.")
    if path.suffix == ".safetensors":
        try:
            return load_file(path), ""
        except SafetensorError as error:
            raise unreadable(path, error) from error
    return _plain_state(_unpickled(path), path)


def _unpickled(path: Path) -> Any:
    """What torch reads of a pickle without running any code in it."""
    try:
        # timm's checkpoints hold the options of train.py so.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # the reader of pickles raises many kinds on a damaged file
        raise ValueError(_refuse_pickle(path, error)) from error


def _plain_state(content: Any, path: Path) -> tuple[dict[str, Tensor], str]:
    """The weights in a checkpoint, under the names of the plain model."""
    keys = content if isinstance(content, dict) else {}
    inside = next((name for name in _INSIDE if _is_state(keys.get(name))), None)
    state = content if inside is None else content[inside]
    if not _is_state(state):
        held = f"the keys {few(keys)}" if keys else f"a {type(content).__name__}"
        raise ValueError(
            f"expected weights by name in {path}, or under {', '.join(_INSIDE)}, got {held}; save the "
            "model's state_dict() alone."
        )
    taken = [] if inside is None else [f"its {inside}"]
    while prefix := next((p for p in _PREFIXES if all(name.startswith(p) for name in state)), None):
        taken.append(f"without the prefix {prefix}")
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return dict(state), ", ".join(taken)


def _is_state(value: Any) -> bool:
    is_named = isinstance(value, dict) and all(isinstance(name, str) for name in value)
    return is_named and bool(value) and all(isinstance(each, Tensor) for each in value.values())


def from_file(path: Path, taken: str) -> str:
    """Where weights are from, for a report."""
    return f"weights from {path}" + (f" ({taken})" if taken else "")


def unreadable(place: object, error: SafetensorError) -> ValueError:
    return ValueError(
        f"expected weights in the safetensors format, cannot read those in {place} ({error}); "
        "they may be cut off, or in another format: copy them again."
    )


def _refuse_pickle(path: Path, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"expected tensors alone, got {path}: a pickle can run code, so one that holds more, or is damaged, "
        f"is not loaded ({reason}). If you trust it, convert it, with state['model'] or where else the "
        "weights lie:\n"
        f"    state = torch.load({str(path)!r}, map_location='cpu', weights_only=False)\n"
        f"    safetensors.torch.save_file(state, {str(path.with_suffix('.safetensors'))!r})"
    )


def share_tied(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Give all names of a tied parameter the tensor that the file has for one of them."""
    names: dict[int, list[str]] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(key)
    for keys in names.values():
        held = next((key for key in keys if key in state), None)
        if held is not None:
            state |= {key: state[held] for key in keys if key not in state}


def misfits(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """In words, what of a file's tensors does not fit a model's own."""
    reshaped = [
        f"{key}: {tuple(state[key].shape)} in the file, {tuple(value.shape)} in the model"
        for key, value in own.items()
        if key in state and state[key].shape != value.shape
    ]
    kinds = {
        "missing": [key for key in own if key not in state],
        "unexpected": [key for key in state if key not in own],
        "of another shape": reshaped,
    }
    return [f"{len(keys)} {kind} ({few(keys)})" for kind, keys in kinds.items() if keys]


def renamed(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the names of this model: files of transformers have those of its older versions."""
    operations = {
        name: deepcopy(module).to("meta")
        for name, module in model.named_modules()
        if isinstance(module, Inserted | WeightEdit)
    }

    own: Any = type(model)

    class Holding(own):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for name, operation in operations.items():  # for their parameters alone: nothing runs them
                owner, _, child = name.rpartition(".")
                self.get_submodule(owner).add_module(child, operation)

    Holding.__name__, Holding.__module__ = own.__name__, own.__module__
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _quiet_transformers():
        copy, loaded = Holding.from_pretrained(
            None,
            config=deepcopy(model.config),
            state_dict=dict(state),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    there = {key: value for key, value in copy.state_dict().items() if key not in loaded["missing_keys"]}
    # Those that the model does not have are named as it would name them, or as the file does.
    there |= {key: state.get(key, torch.empty(0, device="meta")) for key in loaded["unexpected_keys"]}
    reshaped = {key: torch.empty(held, device="meta") for key, held, _ in loaded["mismatched_keys"]}
    return there | reshaped


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without its report of what is missing: its reader is the caller, by ``output_loading_info``."""
    from transformers.utils import logging

    level, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bar:
            logging.enable_progress_bar()
