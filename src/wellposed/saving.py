"""Edits that are kept with a model's weights, and made again.

A state dict has the scales of CB_S, and nothing of the other edits. So the calls that made them go into a
JSON file next to the weights, ``config.json`` of a folder, under the key ``wellposed``::

    model.save_pretrained("mine")
    wp.save_edits(model, "mine")

    model = ViTForImageClassification.from_pretrained("mine")
    wp.apply(model, "mine")
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellposed import surgery
from wellposed.anatomy.model import refuse_wrapped
from wellposed.calls import EditCall
from wellposed.files import parse_json, read_json, read_object, write_text
from wellposed.interrupts import uninterrupted
from wellposed.probes.model_input import is_of
from wellposed.probes.observe import plain
from wellposed.surgery.insertion import scales
from wellposed.surgery.record import Edits
from wellposed.text import few
from wellposed.weights import HELD, INDEX, WEIGHT_ENDINGS, misfits, read_weights, renamed

KEY, CONFIG = "wellposed", "config.json"
_FORM = '{"edits": [{"edit": "gray_tokens", "eps": 0.7}], "modules": ["patch_embed"]}'


@dataclass(frozen=True)
class SavedEdits:
    """The calls that made a model's edits, and the names of the modules that they touched."""

    calls: list[EditCall]
    modules: list[str]

    @classmethod
    def of(cls, values: Any, place: str) -> "SavedEdits":
        """Those of :meth:`wellposed.Edits.to_dict`; ``place`` is what an error calls them."""
        calls, modules = (
            [values.get(key) for key in ("edits", "modules")] if isinstance(values, Mapping) else [None, None]
        )
        if not isinstance(calls, list) or not isinstance(modules, list):
            raise TypeError(f"expected edits such as {_FORM} in {place}, got {values!r:.200}.")
        made = [EditCall.of(call, f"edits[{index}] of {place}") for index, call in enumerate(calls)]
        return SavedEdits(made, [str(name) for name in modules])

    def to_dict(self) -> dict[str, Any]:
        """What :meth:`of` takes."""
        return {"edits": [call.to_mapping() for call in self.calls], "modules": self.modules}

    @property
    def words(self) -> str:
        """Their calls."""
        return ", ".join(call.code() for call in self.calls)

    def are_in(self, made: Edits) -> bool:
        """Whether a model's edits are of these modules; one may be a part of the other's model."""
        saved, there = sorted(self.modules), sorted(edit.module for edit in made)
        if len(saved) != len(there) or not saved:
            return len(saved) == len(there)
        inner, outer = sorted((saved, there), key=lambda names: len(names[0]))
        prefix = outer[0].removesuffix(inner[0])
        return [prefix + name for name in inner] == outer


@uninterrupted()
def apply(
    model: nn.Module, edits: Edits | Mapping[str, Any] | str | os.PathLike[str], *, example: Any = None
) -> Edits:
    """Make saved edits again in a model that has none, in place. If they do not fit, nothing is changed.

    Args:
        model: not yet compiled, sharded or replicated, built as the one that the edits are of.
        edits: those of another model; what their ``to_dict`` or ``to_json`` gave; or a path: a folder or a
            JSON file in which :func:`save_edits` put them, or a file of weights next to it. The scales of
            CB_S are loaded from the weights in that folder or file; from a dict or a JSON file they are where
            ``init`` puts them, until ``load_state_dict``.
        example: an input of your own model, as for the edits themselves.

    Returns:
        The edits of the model.

    >>> import timm, wellposed as wp
    >>> model, other = (timm.create_model("vit_tiny_patch16_224", depth=1) for _ in range(2))
    >>> touched = wp.gray_tokens(model, eps=0.8)
    >>> print(wp.apply(other, wp.edits(model).to_json()))
    edit         where      block  module       detail
    gray_tokens  embedding  -      patch_embed  TokenGraying(eps=0.8, method='spectral')
    """
    refuse_wrapped(model)
    saved, place = _given(edits)
    if present := surgery.edits(model):
        raise ValueError(
            f"expected a model without edits, got one with {len(present)}; wp.edits(model) lists them, "
            "wp.restore(model) undoes them."
        )
    try:
        for call in saved.calls:
            call(model, example=example)
        made = surgery.edits(model)
        if not saved.are_in(made):
            raise ValueError(
                f"the edits are of a model that is built otherwise: they touched "
                f"{few(saved.modules) or 'nothing'} there and "
                f"{few(edit.module for edit in made) or 'nothing'} here; build the model as that one."
            )
        if place is not None:
            _load_scales(model, place)
    except BaseException:
        surgery.restore(model)
        raise
    return made


def save_edits(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Put a model's edits where :func:`apply`, ``wellposed diagnose`` and ``models.build`` find them.

    Save the weights first: ``save_pretrained`` writes a new ``config.json``.

    Args:
        model: edited.
        path: the folder of its weights: the edits go into its ``config.json``, the rest of which stays. Or a
            file of weights, ``mine.pth``: they go into ``mine.json``. Or a JSON file.

    Returns:
        The file that was written.

    >>> import tempfile, timm, wellposed as wp
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
    >>> _ = wp.gray_tokens(model, eps=0.8)
    >>> save_edits(model, tempfile.mkdtemp()).name
    'config.json'
    """
    path = Path(path).expanduser()
    is_folder = path.is_dir() or path.suffix not in (".json", *WEIGHT_ENDINGS)
    file = path / CONFIG if is_folder else path.with_suffix(".json")
    content = read_object(file) if file.is_file() else {}
    before = content.get(KEY)
    content[KEY] = {**(before if isinstance(before, dict) else {}), **surgery.edits(plain(model)).to_dict()}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(content, indent=2, allow_nan=False) + "\n")
    return file


def saved_edits(path: str | os.PathLike[str]) -> SavedEdits | None:
    """The edits that were saved in a folder, in a JSON file, or with a file of weights; None without any."""
    path = Path(path).expanduser()
    if path.is_dir():
        places = [path / CONFIG]
    elif path.suffix == ".json":
        places = [path]
    else:
        places = [path.with_suffix(".json"), path.parent / CONFIG]
    for place in places:
        if place.is_file() and isinstance(kept := read_json(place), dict):
            inside = kept.get(KEY, kept if path == place else None)
            if isinstance(inside, dict) and "edits" in inside:
                return SavedEdits.of(inside, str(place))
    return None


def lacks(model: nn.Module, path: str | os.PathLike[str]) -> str:
    """In words, the edits that were saved with a file of weights and that a model does not have."""
    saved = saved_edits(path)
    if saved is None or saved.are_in(surgery.edits(plain(model))):
        return ""
    return (
        f"{path} was saved with edits that this model does not have, {saved.words}: it computes something "
        "else. "
        f"wp.apply(model, {str(path)!r}) makes them"
    )


def _given(edits: Edits | Mapping[str, Any] | str | os.PathLike[str]) -> tuple[SavedEdits, Path | None]:
    """What is to be made again, and where the scales lie."""
    if isinstance(edits, Edits):
        return SavedEdits(edits.calls(), [edit.module for edit in edits]), None
    if isinstance(edits, str) and edits.lstrip().startswith("{"):
        try:
            edits = parse_json(edits)
        except ValueError as error:
            raise ValueError(f"expected edits as JSON, which cannot be read: {error}.") from error
    if isinstance(edits, Mapping):
        return SavedEdits.of(edits, "what was given"), None
    if not isinstance(edits, (str, os.PathLike)):
        raise TypeError(
            f"expected wp.edits(model), its to_dict() or to_json(), or a path, got a {type(edits).__name__}."
        )
    path = Path(edits).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"expected a folder or file with edits, there is no {path}.")
    saved = saved_edits(path)
    if saved is None:
        raise ValueError(
            f"expected edits in {path}, there are none; wp.save_edits(model, {str(path)!r}) puts those of a "
            "model there."
        )
    return saved, None if path.suffix == ".json" else path


def is_of_edits(name: str) -> bool:
    """Whether a tensor of a state dict is of a module that an edit put in, by its name."""
    return ".inserted_" in name or "_edit." in name


def _load_scales(model: nn.Module, place: Path) -> None:
    own = scales(model)
    if not own:
        return
    held = {name: value for name, value in _weights_in(place).items() if is_of_edits(name)}
    if held.keys() != own.keys() and is_of(model, "transformers"):
        held = {name: value for name, value in renamed(model, held).items() if name in own}
    if wrong := misfits(own, held):
        raise ValueError(
            f"the tensors of edits (scales of CB_S among them) in {place} do not fit {type(model).__name__}: "
            f"{'; '.join(wrong)}."
        )
    with torch.no_grad():
        for name, scale in own.items():
            scale.copy_(held[name])


def _weights_in(place: Path) -> dict[str, Tensor]:
    """The tensors of a file, or of the file or files of a folder."""
    if place.is_file():
        return read_weights(place)[0]
    if (place / INDEX).is_file():
        files = sorted(set(read_object(place / INDEX)["weight_map"].values()))
        return {name: value for file in files for name, value in read_weights(place / file)[0].items()}
    for name in HELD:
        if (place / name).is_file():
            return read_weights(place / name)[0]
    raise FileNotFoundError(
        f"expected the scales of CB_S in {place}, there is no {' or '.join(HELD)}; name the file of "
        f"weights, or {place / CONFIG} to make the edits alone."
    )
