"""What a model is given that is not one tensor of images: texts with their masks, sounds, several inputs.

>>> inputs = NamedInputs({"input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]),
...                       "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])})
>>> len(inputs), inputs.take(slice(1, 2)).unpadded().values["input_ids"].tolist()
(2, [[8, 9]])
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wellposed.anatomy.example import Example
from wellposed.anatomy.masks import hides
from wellposed.probes.model_input import image_axis

if TYPE_CHECKING:
    from wellposed.probes.images import Source

KEYS = ("pixel_values", "image", "images", "img", "x")
"""Where the images are in a batch that is a dict; the first that it has."""

DEFAULT_LIMIT = 32
"""How many images are taken from a folder, a DataLoader or another iterable unless the caller says."""

MASKS = (
    "attention_mask",
    "decoder_attention_mask",
    "pixel_attention_mask",
    "patch_valid",
    "src_key_padding_mask",
    "key_padding_mask",
    "padding_mask",
)
"""Names of inputs that say which tokens are padding."""

CONTENTS = (
    "input_ids",
    "inputs_embeds",
    "decoder_input_ids",
    "pixel_values",
    "pixel_values_videos",
    "input_values",
    "input_features",
    "patches",
    "src",
)
"""Names of inputs of which tokens are made."""


@dataclass(frozen=True)
class NamedInputs:
    """Inputs of one call, by name.

    Args:
        whole: whether the model takes them as one dict, as NaFlexViT does.
        axis: that of the texts in the main one.
    """

    values: dict[str, Any]
    whole: bool = False
    axis: int = 0

    def __len__(self) -> int:
        name = next((name for name in CONTENTS if name in self.values), next(iter(self.values)))
        return int(self.values[name].shape[self.axis])

    def mapped(self, change: Any) -> "NamedInputs":
        """The same with each tensor changed."""
        values = {name: change(x) if isinstance(x, Tensor) else x for name, x in self.values.items()}
        return NamedInputs(values, self.whole, self.axis)

    @property
    def is_divisible(self) -> bool:
        """Whether every tensor has a row for each text."""
        tensors = [x for x in self.values.values() if isinstance(x, Tensor)]
        return self.axis == 0 and all(x.ndim and len(x) == len(self) for x in tensors)

    def take(self, rows: slice) -> "NamedInputs":
        """Some of the texts."""
        if len(range(*rows.indices(len(self)))) == len(self):
            return self
        if not self.is_divisible:
            shapes = {k: tuple(x.shape) for k, x in self.values.items() if isinstance(x, Tensor)}
            raise ValueError(
                "expected inputs that all have a row for each text, so that some can be taken, got "
                f"{shapes}; pass only as many as are wanted."
            )
        return self.mapped(lambda x: x[rows])

    @property
    def paddings(self) -> list[Tensor]:
        """For each mask (B, N), True where the input is padding."""
        return [hides(x, name) for name, x in self.values.items() if name in MASKS and x is not None]

    @property
    def kinds(self) -> int:
        """How many inputs tokens are made of: texts and images are two."""
        return max(1, sum(name in self.values for name in CONTENTS))

    def unpadded(self) -> "NamedInputs":
        """One text without its padding."""
        found = [x for x in self.paddings if x.any()]
        if not found:
            return self
        shape, keep = found[0].shape, ~found[0][0]
        if len(found) > 1 or shape[0] != 1 or self.kinds > 1:
            raise ValueError("expected one text without padding; pass its own tokens alone.")
        return self.mapped(lambda x: x[:, keep] if x.shape[:2] == shape else x)


def as_named(item: Any, model: nn.Module) -> NamedInputs | None:
    """An item of a source as named inputs of a model; None for images, with or without labels."""
    parameters = inspect.signature(model.forward).parameters
    names = [name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
    main = getattr(model, "main_input_name", names[0] if names else "")
    if isinstance(item, Tensor):
        is_ids = not item.is_floating_point() and item.dtype != torch.uint8 and item.ndim == 2
        is_sound = main in ("input_values", "input_features") and item.is_floating_point()
        return _prepared({main: item}, names) if is_ids or is_sound else None
    if not isinstance(item, Mapping):
        return None
    tensors = {str(name): x for name, x in item.items() if isinstance(x, Tensor)}
    taken = {name: x for name, x in tensors.items() if name in names}
    required = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if any(name not in taken for name in required):
        if any(name in MASKS for name in taken):
            return NamedInputs(tensors, whole=True)
        return None
    if not set(taken) - set(KEYS) - {"labels"}:
        return None
    return _prepared(taken, names, image_axis(model))


def _prepared(taken: dict[str, Any], names: list[str], axis: int = 0) -> NamedInputs:
    for name, x in taken.items():
        if isinstance(x, Tensor) and name in CONTENTS and x.ndim < 2:
            raise ValueError(
                f"expected a batch, got {name} of shape {tuple(x.shape)}; {name}[None] is a batch of one, "
                "and a DataLoader makes batches of a Dataset."
            )
    # A cache of keys and values would carry one call over to the next.
    cache = {"use_cache": False} if "use_cache" in names else {}
    return NamedInputs(taken | cache, axis=axis)


class NamedBatches:
    """Batches of named inputs on the model's device and in its dtype; iterating again starts over.

    ``count`` is the number of texts so far, ``notes`` are sentences for a report.
    """

    def __init__(self, source: "Source", model: nn.Module, batch_size: int, limit: int | None) -> None:
        self.count = 0
        self._source, self._model, self._batch_size = source, model, batch_size
        self._is_default = limit is None and not source.is_chosen
        self._limit = DEFAULT_LIMIT if self._is_default else limit

    def again(self, batch_size: int, limit: int | None) -> "NamedBatches":
        """The same texts in other batches, no more of them."""
        limit = min((most for most in (limit, self._limit) if most is not None), default=None)
        return NamedBatches(self._source, self._model, batch_size, limit)

    @property
    def notes(self) -> list[str]:
        notes = []
        if self._is_default and self.count == self._limit:
            notes.append(f"The first {self.count} of {self._source.what} were used.")
        if self._source.shuffles:
            notes.append("The DataLoader shuffles: another run may see others.")
        return notes

    def __iter__(self) -> Iterator[NamedInputs]:
        self.count = 0
        parameter = next((p for p in self._model.parameters() if p.is_floating_point()), None)

        def moved(x: Tensor) -> Tensor:
            if parameter is None:
                return x
            return x.to(parameter.device, parameter.dtype if x.is_floating_point() else None)

        for item in self._source.items:
            named = as_named(item, self._model)
            if named is None:
                raise TypeError(
                    "expected batches of named inputs, as the first one, got a "
                    f"{type(item).__name__} of another kind."
                )
            size = self._batch_size if named.is_divisible else len(named)
            for first in range(0, len(named), max(size, 1)):
                left = len(named) if self._limit is None else self._limit - self.count
                part = named.take(slice(first, min(first + size, first + left, len(named)))).mapped(moved)
                for name, x in part.values.items():
                    is_bad = isinstance(x, Tensor) and x.is_floating_point() and name not in MASKS
                    if is_bad and not x.is_meta and not x.isfinite().all():
                        raise ValueError(f"expected finite inputs, got NaN or infinite values in {name}.")
                self.count += len(part)
                yield part
                if self.count == self._limit:
                    return
        if not self.count:
            raise ValueError(f"expected at least one text or image, found none in {self._source.what}.")


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with for a batch of either kind."""
    if not isinstance(batch, NamedInputs):
        return (batch,), {}
    return ((batch.values,), {}) if batch.whole else ((), batch.values)


def example_of(batch: Any) -> Any:
    """A batch of either kind as an example for :func:`wellposed.anatomy.blocks`."""
    return Example(*arguments(batch), len(batch)) if isinstance(batch, NamedInputs) else batch


def run(model: nn.Module, batch: Any) -> Any:
    """Call a model on a batch of either kind."""
    args, kwargs = arguments(batch)
    return model(*args, **kwargs)


def as_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """A batch with its floating tensors in ``dtype``."""
    if isinstance(batch, Tensor):
        return batch.to(dtype)
    return batch.mapped(lambda x: x.to(dtype) if x.is_floating_point() else x)
