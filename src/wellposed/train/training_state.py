"""A model and its optimizer as tensors and plain values, and back, bit for bit.

One checkpoint serves a plain model, one in DDP and one that ``fully_shard`` distributes over any number of
processes, compiled or not: its tensors are whole and have the names that they have in the plain model. An
optimizer's state goes by the names of its parameters; what is no tensor in it is kept as it is, so any
optimizer of torch, timm and Accelerate can be saved.

torch.distributed.checkpoint.state_dict is made for this, but its functions for optimizers are not exact. One
that has not stepped yet comes out with a step made, so its counter is 1; tuples such as betas come back as
lists; an optimizer without tensors, or with a parameter that never had a gradient, cannot be loaded. So the
objects' own state dicts are used here, with DTensor's public methods for the parts.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from wellposed.probes.observe import unwrapped
from wellposed.records import dtype_name
from wellposed.text import few
from wellposed.train.checkpoint import Checkpoint, TensorName
from wellposed.train.parallel import (
    Outline,
    device_of,
    from_first,
    is_first,
    outline,
    parted,
    placed,
    send,
    whole,
)

Names = dict[Tensor, str]
"""The names of a model's parameters; tensors are equal as keys if they are the same object."""

_HOW_NOT_WHAT = ("foreach", "fused", "capturable")
"""Options that fit the device, not the training: they stay as the new optimizer has them."""


def pack(optimizer: Optimizer, names: Names) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Plain values, and the tensors that they name: ``PARAMETER/KEY``, such as ``head.bias/exp_avg``."""
    content = optimizer.state_dict()
    parameters = dict(_indexed(optimizer, content))
    tensors: dict[str, Tensor] = {}
    state = {}
    for index, values in sorted(content["state"].items(), key=lambda item: str(item[0])):
        if index not in parameters:
            raise TypeError(
                f"expected a state for each parameter, {_kind(optimizer)} has one for {index!r} too, "
                "which cannot be saved; choose another optimizer."
            )
        parameter = parameters[index]
        state[_name(parameter, names)] = _pack(values, (_name(parameter, names),), parameter, tensors)
    groups = [
        {
            key: [_name(parameters[index], names) for index in value]
            if key == "params"
            else _pack(value, ("param_groups", str(number), str(key)), None, tensors)
            for key, value in group.items()
        }
        for number, group in enumerate(content["param_groups"])
    ]
    # Some have more to say: timm's Kron puts its random generator there.
    rest = {key: value for key, value in content.items() if key not in ("state", "param_groups")}
    packed = {
        "kind": _kind(optimizer),
        "state": state,
        "param_groups": groups,
        "rest": _pack(rest, ("rest",), None, tensors),
    }
    return packed, tensors


def misfits(optimizer: Optimizer, names: Names, packed: dict[str, Any]) -> list[str]:
    """Why the state is not one of this optimizer, in words; empty if it is."""
    if packed["kind"] != _kind(optimizer):
        return [f"it holds the state of {packed['kind']}, the optimizer is {_kind(optimizer)}"]
    own = [{_name(parameter, names) for parameter in group["params"]} for group in optimizer.param_groups]
    saved = [set(group["params"]) for group in packed["param_groups"]]
    if len(own) != len(saved):
        return [f"it holds {len(saved)} groups of parameters, the optimizer has {len(own)}"]
    return [
        f"group {number} of the optimizer has other parameters ({few(sorted(mine ^ theirs))})"
        for number, (mine, theirs) in enumerate(zip(own, saved, strict=True))
        if mine != theirs
    ]


def unpack(
    optimizer: Optimizer, names: Names, packed: dict[str, Any], fetch: Callable[[str], Tensor]
) -> None:
    """Put a state that fits into the optimizer; ``fetch`` gives a whole tensor by its name."""
    content = optimizer.state_dict()
    saved = packed["state"]
    state = {
        index: _unpack(saved[_name(parameter, names)], parameter, fetch)
        for index, parameter in _indexed(optimizer, content)
        if _name(parameter, names) in saved
    }
    groups = []
    for own, group in zip(content["param_groups"], packed["param_groups"], strict=True):
        values = {key: _unpack(value, own.get(key), fetch) for key, value in group.items() if key != "params"}
        kept = {key: own[key] for key in ("params", *_HOW_NOT_WHAT) if key in own}
        groups.append({**values, **kept})
    rest = _unpack(packed["rest"], None, fetch)
    optimizer.load_state_dict({**rest, "state": state, "param_groups": groups})
    # load_state_dict casts to the parameters' dtype, and does not know all kinds of values.
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in state.get(index, {}).items():
            values[key] = _exactly(value, values[key])


def _pack(value: Any, path: tuple[str, ...], parameter: Tensor | None, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = "/".join(path)
        copy = whole(value)
        if copy is not None:
            tensors[name] = copy
        is_whole_model = not isinstance(parameter, DTensor)
        return TensorName(name, parted=value.dim() > 0 if is_whole_model else isinstance(value, DTensor))
    if isinstance(value, dict):
        return {key: _pack(item, (*path, str(key)), parameter, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(
            _pack(item, (*path, str(index)), parameter, tensors) for index, item in enumerate(value)
        )
    return value


def _unpack(value: Any, like: Any, fetch: Callable[[str], Tensor]) -> Any:
    """``like`` is the parameter that a state belongs to."""
    if isinstance(value, TensorName):
        tensor = fetch(value.name)
        if isinstance(like, DTensor) and value.parted:
            return parted(tensor, like)
        # Where a tensor of another shape belongs, load_state_dict knows: step counters stay in main memory.
        same = isinstance(like, Tensor) and not isinstance(like, DTensor) and like.shape == tensor.shape
        return placed(tensor, like) if same else tensor.cpu()
    if isinstance(value, dict):
        return {key: _unpack(item, like, fetch) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_unpack(item, like, fetch) for item in value)
    return value


def _exactly(saved: Any, loaded: Any) -> Any:
    """What was saved, on the device where it was loaded to."""
    if isinstance(saved, Tensor):
        return saved.to(loaded.device)
    if isinstance(saved, dict):
        return {key: _exactly(item, loaded[key]) for key, item in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(_exactly(item, other) for item, other in zip(saved, loaded, strict=True))
    return saved


def _indexed(optimizer: Optimizer, content: dict[str, Any]) -> Iterator[tuple[int, Tensor]]:
    """The parameters with the indices that stand for them in the state_dict."""
    for group, parameters in zip(content["param_groups"], optimizer.param_groups, strict=True):
        yield from zip(group["params"], parameters["params"], strict=True)


def _name(parameter: Tensor, names: Names) -> str:
    if parameter not in names:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model does not have; "
            "make the optimizer from the model's parameters, after the model is sharded."
        )
    return names[parameter]


def _kind(optimizer: Optimizer) -> str:
    return type(getattr(optimizer, "optimizer", optimizer)).__name__  # Accelerate's wrapper has the real one


def gather(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Files and state for :meth:`Store.save`. Model, optimizer and random generators stay as they are.

    Every process calls it. The first gets copies in main memory, the others nothing. Buffers are those of
    the first process.
    """
    weights = gather_weights(model)
    values, tensors = pack(optimizer, _parameter_names(model))
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
        wrong += misfits(optimizer, names, given.state["optimizer"])
        _refuse(given, model, wrong)
        return given.state, _outlines(weights), _outlines(moments)

    state, weight_outlines, moment_outlines = from_first(read, device)
    _load(model, lambda name: send(weights.get(name), weight_outlines[name], device))
    unpack(
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


def _parameter_names(model: nn.Module) -> Names:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # else parameters are not those that the optimizer has
    return {parameter: _plain_name(name) for name, parameter in _plain(model).named_parameters()}


def _plain(model: nn.Module) -> nn.Module:
    """The model inside DDP and torch.compile."""
    inner = unwrapped(model)
    if isinstance(inner, FullyShardedDataParallel):
        raise TypeError("expected a model sharded with fully_shard (FSDP2), got FullyShardedDataParallel.")
    return inner


def _plain_name(key: str) -> str:
    """Parts that torch.compile wraps have one more module in their names."""
    return key.replace("_orig_mod.", "")


def _misfits(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    def words(tensor: Tensor) -> str:
        return f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"

    own = {name: words(value) for name, (_, value) in _weights(model).items()}
    saved = {name: words(value) for name, value in weights.items()}
    other = [
        f"{name}: {saved[name]} in the checkpoint, {own[name]} in the model"
        for name in own
        if name in saved and own[name] != saved[name]
    ]
    kinds = {
        "missing": [name for name in own if name not in saved],
        "unexpected": sorted(saved.keys() - own.keys()),
        "of another shape or dtype": other,
    }
    return [f"{len(names)} {kind} ({few(names)})" for kind, names in kinds.items() if names]


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
