"""An optimizer's state by the names of its parameters, with the tensors apart from the plain values.

Works on what ``state_dict`` gives and ``load_state_dict`` takes, so on any optimizer of torch, timm and
Accelerate, whatever its state holds.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from wellposed.train.checkpoint.plain_values import TensorName
from wellposed.train.checkpoint.processes import parted, placed, whole

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


def few(names: Iterable[str], most: int = 4) -> str:
    """The first of some names, and how many more there are.

    >>> few("abcdef")
    'a, b, c, d, and 2 more'
    """
    listed = list(names)
    more = [f"and {len(listed) - most} more"] if len(listed) > most else []
    return ", ".join([*listed[:most], *more])
