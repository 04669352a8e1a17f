"""A model and its optimizer as tensors and plain values, and back, bit for bit.

One checkpoint serves a plain model, one in DDP and one that ``fully_shard`` distributes over any number of
processes, compiled or not: its tensors are whole and have the names that they have in the plain model.

torch.distributed.checkpoint.state_dict is made for this, but its functions for optimizers are not exact. One
that has not stepped yet comes out with a step made, so its counter is 1; tuples such as betas come back as
lists; an optimizer without tensors, or with a parameter that never had a gradient, cannot be loaded. So the
objects' own state dicts are used here, with DTensor's public methods for the parts.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from wellposed.records import dtype_name
from wellposed.train.checkpoint import optimizer_state
from wellposed.train.checkpoint.processes import (
    Outline,
    device_of,
    from_first,
    is_first,
    outline,
    placed,
    send,
    whole,
)
from wellposed.train.checkpoint.store import Checkpoint


def gather(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Files and state for :meth:`Store.save`. Model, optimizer and random generators stay as they are.

    Every process calls it. The first gets copies in main memory, the others nothing. Buffers are those of
    the first process.
    """
    weights = gather_weights(model)
    values, tensors = optimizer_state.pack(optimizer, _parameter_names(model))
    if not is_first():
        return {}, {}
    return {"model": weights, "optimizer": tensors}, {"optimizer": values}


def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their names in the plain model; every process calls it, as :func:`gather`."""
    copies = {name: whole(value) for name, (_, value) in _weights(model).items()}
    return {name: value for name, value in copies.items() if value is not None}


def restore(model: nn.Module, optimizer: Optimizer, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Put a checkpoint into a model and its optimizer; returns the checkpoint's state.

    Every process calls it. The first reads the checkpoint and sends it to the others, which may give None:
    they need not see the folder. A checkpoint of another model or optimizer is an error on all of them, and
    nothing is loaded.
    """
    device, names = device_of(model), _parameter_names(model)
    weights: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}

    def read() -> tuple[dict[str, Any], dict[str, Outline], dict[str, Outline]]:
        given = _given(checkpoint)
        weights.update(given.tensors("model"))
        moments.update(given.tensors("optimizer"))
        wrong = _misfits(model, weights)
        wrong += optimizer_state.misfits(optimizer, names, given.state["optimizer"])
        _refuse(given, model, wrong)
        return given.state, _outlines(weights), _outlines(moments)

    state, weight_outlines, moment_outlines = from_first(read, device)
    _load(model, lambda name: send(weights.get(name), weight_outlines[name], device))
    optimizer_state.unpack(
        optimizer,
        names,
        state["optimizer"],
        lambda name: send(moments.get(name), moment_outlines[name], device),
    )
    return state


def restore_weights(model: nn.Module, checkpoint: Checkpoint | None, stem: str = "model") -> None:
    """Put the tensors of one file into a model, as :func:`restore` does; for an average of the weights."""
    device = device_of(model)
    weights: dict[str, Tensor] = {}

    def read() -> dict[str, Outline]:
        given = _given(checkpoint)
        weights.update(given.tensors(stem))
        _refuse(given, model, _misfits(model, weights))
        return _outlines(weights)

    outlines = from_first(read, device)
    _load(model, lambda name: send(weights.get(name), outlines[name], device))


def _load(model: nn.Module, fetch: Callable[[str], Tensor]) -> None:
    own = _weights(model)
    _plain(model).load_state_dict({key: placed(fetch(name), value) for name, (key, value) in own.items()})


def _weights(model: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Name in the plain model -> (key in the state dict, tensor)."""
    weights: dict[str, tuple[str, Tensor]] = {}
    for key, value in _plain(model).state_dict().items():
        if not isinstance(value, Tensor):
            raise TypeError(f"expected tensors in the model's state_dict, got {type(value)} as {key!r}.")
        weights[_plain_name(key)] = key, value
    return weights


def _parameter_names(model: nn.Module) -> optimizer_state.Names:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # else parameters are not those that the optimizer has
    return {parameter: _plain_name(name) for name, parameter in _plain(model).named_parameters()}


def _plain(model: nn.Module) -> nn.Module:
    """The model inside DDP and torch.compile."""
    while True:
        if isinstance(model, FullyShardedDataParallel):
            raise TypeError(
                "expected a model sharded with fully_shard (FSDP2), got FullyShardedDataParallel."
            )
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def _plain_name(key: str) -> str:
    """Parts that torch.compile wraps have one more module in their names."""
    return key.replace("_orig_mod.", "")


def _misfits(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    own = {name: outline(value) for name, (_, value) in _weights(model).items()}
    saved = _outlines(weights)
    other = [
        f"{name}: {_words(saved[name])} in the checkpoint, {_words(own[name])} in the model"
        for name in own
        if name in saved and own[name] != saved[name]
    ]
    kinds = {
        "missing": [name for name in own if name not in saved],
        "unexpected": sorted(saved.keys() - own.keys()),
        "of another shape or dtype": other,
    }
    return [f"{len(names)} {kind} ({optimizer_state.few(names)})" for kind, names in kinds.items() if names]


def _refuse(checkpoint: Checkpoint, model: nn.Module, wrong: list[str]) -> None:
    if wrong:
        raise ValueError(
            f"the checkpoint {checkpoint.path} does not fit this {type(_plain(model)).__name__} or its "
            f"optimizer: {'; '.join(wrong)}. Nothing was loaded; resume with the recipe it was made with."
        )


def _given(checkpoint: Checkpoint | None) -> Checkpoint:
    if checkpoint is None:
        raise ValueError("expected a checkpoint on the first process, got None; Store.newest gives one.")
    return checkpoint


def _outlines(tensors: Mapping[str, Tensor]) -> dict[str, Outline]:
    return {name: outline(tensor) for name, tensor in tensors.items()}


def _words(outline: Outline) -> str:
    shape, dtype = outline
    return f"{dtype_name(dtype)} {shape}"
