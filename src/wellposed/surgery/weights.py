"""Weights that a layer uses through an operation: the layer reads ``W``, its edit gives it ``f(W)``.

The parameter itself stays where it is, under its name, and is what is trained and saved; only what the layer
reads changes (see :mod:`wellposed.anatomy.subclass`). :func:`fold` writes ``f(W)`` into the parameter.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from wellposed.anatomy.model import refuse_wrapped
from wellposed.anatomy.subclass import child_name, edited_weights, inner, read_plainly, read_through
from wellposed.errors import NoMeaningError, SeamError
from wellposed.interrupts import uninterrupted
from wellposed.nn.operation import Operation
from wellposed.surgery.learned import follow_learned, refuse_replicated
from wellposed.surgery.record import Edits, Setting
from wellposed.surgery.wrappers import refuse_adapted, refuse_adapters


class WeightEdit(Operation):
    """An operation on a weight; a child of the layer that has it, so that it moves and is saved with that."""

    kind: str
    where: str

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        refuse_adapters()

    def forward(self, weight: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not say what becomes of a weight; define its forward.")

    @property
    def settings(self) -> Mapping[str, Setting]:
        """The arguments of the edit."""
        return {}


def weight_edits(layer: nn.Module) -> dict[str, WeightEdit]:
    """The edits of a layer's weights by the parameter's name."""
    return {name: cast(WeightEdit, getattr(layer, child_name(name))) for name in edited_weights(layer)}


@uninterrupted()
def edit_weights(model: nn.Module, wanted: Iterable[tuple[str, nn.Module, str, WeightEdit]]) -> Edits:
    """Edit weights: all of them or, where one has an edit already, none.

    Args:
        model: whose weights.
        wanted: name of the layer, the layer, the name of its parameter, the operation.
    """
    from wellposed.surgery.undo import edits  # it lists the edits that are made here

    wanted = list(wanted)
    refuse_adapted(model, {name: layer for name, layer, *_ in wanted})
    for name, layer, parameter, _ in wanted:
        if present := weight_edits(inner(layer)).get(parameter):
            raise ValueError(
                f"the {parameter} of {name} already has {present}; one edit of a weight at a time, "
                "wp.fold(model) writes it into the weight, wp.restore(model) undoes all edits."
            )
        if "forward" in vars(layer):
            raise SeamError(
                f"{name} ({type(layer).__name__}) has a forward of its own on the instance, which would hide "
                "the edit; edit the model before that."
            )
        if not isinstance(inner(layer)._parameters.get(parameter), Tensor):
            raise ValueError(
                f"expected a plain parameter {parameter} in {name} ({type(layer).__name__}), which is "
                "parametrized or quantised; edit the model before that."
            )
    refuse_replicated(model, [operation for *_, operation in wanted])
    before = set(edits(model))
    for _, layer, parameter, operation in wanted:
        owner = inner(layer)
        owner.add_module(child_name(parameter), operation.train(owner.training))
        read_through(owner, parameter)
    refuse_adapters()
    follow_learned(model, [operation for *_, operation in wanted])
    return Edits(edit for edit in edits(model) if edit not in before)


def take_off(layer: nn.Module) -> None:
    """Undo the edits of a layer's weights, if it has any."""
    names = edited_weights(layer)
    read_plainly(layer)
    for name in names:
        delattr(layer, child_name(name))


@uninterrupted()
def fold(model: nn.Module) -> Edits:
    """Write edits of weights into the weights: an equal model without them, for export or for other tools.

    What mixes tokens (graying, Context Broadcasting) and removed skips cannot be written into weights, and
    stay; so do uniform heads. A model that has nothing to fold raises.

    Args:
        model: with edits of weights; changed in place.

    Returns:
        What was folded.

    >>> import timm, wellposed as wp
    >>> model = timm.create_model("vit_tiny_patch16_224")
    >>> _ = wp.condition_weights(model, strength=1.0)
    >>> len(wp.fold(model)), len(wp.edits(model))
    (12, 0)
    """
    from wellposed.surgery.undo import edits

    refuse_wrapped(model)
    before = edits(model)
    edited = [module for module in model.modules() if weight_edits(module)]
    if not edited:
        kinds = ", ".join(dict.fromkeys(edit.kind for edit in before)) or "no edits"
        raise NoMeaningError(
            f"expected edits of weights (condition_weights, normalise_spectrum), got {kinds}: what mixes "
            "tokens or removes a skip cannot be written into the weights."
        )
    for layer in edited:
        values = {}
        for name, operation in weight_edits(layer).items():
            was_training = operation.training
            with torch.no_grad():
                values[name] = operation.eval()(layer._parameters[name]).clone()
            operation.train(was_training)
        take_off(layer)
        for name, value in values.items():
            with torch.no_grad():
                cast(Tensor, layer._parameters[name]).copy_(value)
    left = set(edits(model))
    return Edits(edit for edit in before if edit not in left)
