"""Calls of wellposed's edits in plain form, as recipes and saved edits hold them.

Each is a mapping with the function's name and its arguments, without the model. Nothing here loads torch.

>>> call = EditCall.of({"edit": "remove_skips", "which": "ffn", "blocks": [0, 2]})
>>> call.code()
'wp.remove_skips(model, "ffn", blocks=[0, 2])'
>>> call.to_mapping()
{'edit': 'remove_skips', 'which': 'ffn', 'blocks': [0, 2]}
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wellposed.text import indices, nearest

if TYPE_CHECKING:
    from torch import nn

    from wellposed.surgery import Edits

GRAY = "gray_tokens"
ARGUMENTS: dict[str, tuple[str, ...]] = {
    GRAY: ("eps", "method", "where", "blocks", "target_kappa", "floor", "rescale", "tolerance", "precision"),
    "broadcast_context": ("where", "scaled", "init", "mean", "difference", "learned", "blocks"),
    "remove_skips": ("which", "blocks", "allow_drop_path"),
    "uniform_heads": ("heads", "blocks"),
    "condition_weights": ("which", "strength", "blocks"),
    "normalise_spectrum": ("which", "init", "blocks"),
}
"""Of each function what a call can give, in the order in which code shows it. As texts, so that a call is
checked without loading torch; the values are checked by the functions."""
PLACED_BY = {
    GRAY: "where",
    "broadcast_context": "where",
    "remove_skips": "which",
    "condition_weights": "which",
    "normalise_spectrum": "which",
}
"""The argument that says where in a model or block; uniform heads have one place alone."""
_BY_PLACE = {
    GRAY: 2,
    "broadcast_context": 1,
    "remove_skips": 1,
    "uniform_heads": 1,
    "condition_weights": 1,
    "normalise_spectrum": 1,
}
"""How many arguments code gives without their names."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    GRAY: {"eps": None, "method": "spectral", "where": "embedding"},
    "broadcast_context": {"where": "mlp.end"},
    "remove_skips": {"which": "attention"},
    "uniform_heads": {"heads": 1},
    "condition_weights": {"which": "qkv"},
    "normalise_spectrum": {"which": "all"},
}


@dataclass(frozen=True)
class EditCall:
    """One call of an edit's function.

    Args:
        kind: the function's name.
        arguments: those that are given; blocks as indices, None for all.
    """

    kind: str
    arguments: dict[str, Any]

    @classmethod
    def of(cls, call: Any, name: str = "edits") -> "EditCall":
        """The call that a mapping means; ``name`` is what an error calls it."""
        return EditCall(call["edit"], call_arguments(checked_call(call, name, "saved edits")))

    def to_mapping(self) -> dict[str, Any]:
        """Its plain form."""
        return {"edit": self.kind, **self.arguments}

    def argument(self, name: str) -> Any:
        """What is given, or the function's default."""
        return self.arguments.get(name, _DEFAULTS[self.kind].get(name))

    def __call__(self, model: "nn.Module", **more: Any) -> "Edits":
        from wellposed import surgery

        edits: Edits = getattr(surgery, self.kind)(model, **self.arguments, **more)
        return edits

    def code(self, eps: float | None = None) -> str:
        """The call as Python, for a model called ``model``; ``eps`` stands for a power that has changed."""
        given = _DEFAULTS[self.kind] | self.arguments | ({} if eps is None else {"eps": eps})
        # Where scales start does not matter: weights that were trained take their place.
        names = [name for name in ARGUMENTS[self.kind] if name in given and name != "init"]
        first = [_shown(given[name]) for name in names[: _BY_PLACE[self.kind]]]
        rest = [f"{name}={_shown(given[name])}" for name in names[_BY_PLACE[self.kind] :]]
        return f"wp.{self.kind}({', '.join(['model', *first, *rest])})"


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def checked_call(call: Any, name: str, giver: str, more: Iterable[str] = ()) -> dict[str, Any]:
    """A mapping with the name of an edit, arguments that it has, and values of the right kinds.

    Args:
        call: what should be one.
        name: what an error calls it.
        giver: who gives it, in words.
        more: arguments besides those of the functions.
    """
    if not isinstance(call, Mapping) or not isinstance(call.get("edit"), str):
        raise TypeError(f"{name} must be such as {{edit = 'gray_tokens', eps = 0.7}}, got {call!r}.")
    kind = call["edit"]
    if kind not in ARGUMENTS:
        raise ValueError(f"there is no edit {kind!r}{nearest(kind, ARGUMENTS)}")
    known = (*ARGUMENTS[kind], *more)
    for key, value in call.items():
        if key != "edit" and key not in known:
            raise ValueError(f"{kind} has no {key!r} that {giver} can give{nearest(key, known)}")
        is_list = isinstance(value, (list, tuple)) and all(type(each) is int for each in value)
        if not isinstance(value, (bool, int, float, str)) and not is_list:
            raise TypeError(f"{kind}'s {key} must be a number, a word or indices, got {value!r}.")
    if isinstance(call.get("blocks"), str):
        indices(call["blocks"], f"{kind}'s blocks")
    return {key: list(value) if isinstance(value, tuple) else value for key, value in call.items()}


def call_arguments(call: Mapping[str, Any], without: Iterable[str] = ()) -> dict[str, Any]:
    """The arguments of a checked call, blocks as indices."""
    arguments = {key: value for key, value in call.items() if key != "edit" and key not in without}
    if isinstance(arguments.get("blocks"), str):
        arguments["blocks"] = indices(arguments["blocks"])
    if isinstance(arguments.get("blocks"), int):
        arguments["blocks"] = [arguments["blocks"]]
    return arguments
