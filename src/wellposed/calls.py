"""Calls of wellposed's edits in plain form, as recipes and saved edits hold them.

Each is a mapping with the function's name and its arguments, without the model. Nothing here loads torch.

>>> call = EditCall.of({"edit": "remove_skips", "which": "ffn", "blocks": [0, 2]})
>>> call.code()
'wp.remove_skips(model, "ffn", blocks=[0, 2])'
>>> call.to_mapping()
{'edit': 'remove_skips', 'which': 'ffn', 'blocks': [0, 2]}
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wellposed.text import closest, indices, nearest

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
CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    GRAY: {
        "method": ("spectral", "svd", "dct", "condition", "energy"),
        "where": ("embedding", "pixels", "blocks"),
    },
    "broadcast_context": {"where": ("mlp.end", "mlp.middle", "mlp.start", "attention.end")},
    "remove_skips": {"which": ("attention", "ffn", "both", "mixer", "local", "parallel", "all")},
}
"""Words that an argument can be, for errors that name the nearest."""
PLACED_BY = {kind: name for kind, names in ARGUMENTS.items() for name in ("where", "which") if name in names}
"""The argument that says where in a model or block; uniform heads have one place alone."""
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
        unnamed = 2 if self.kind == GRAY else 1  # so many arguments need no name to be understood
        first = [_shown(given[name]) for name in names[:unnamed]]
        rest = [f"{name}={_shown(given[name])}" for name in names[unnamed:]]
        return f"wp.{self.kind}({', '.join(['model', *first, *rest])})"


def defaults_of(kind: str) -> dict[str, Any]:
    """The arguments of an edit that a function fills in by itself, but for those that are None."""
    return {name: value for name, value in _DEFAULTS[kind].items() if value is not None}


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
        meant = closest(kind, ARGUMENTS)
        remedy = f"did you mean {meant!r}?" if meant else f"expected one of {', '.join(ARGUMENTS)}."
        raise ValueError(f"there is no edit {kind!r}; {remedy}")
    known = (*ARGUMENTS[kind], *more)
    for key, value in call.items():
        if key != "edit" and key not in known:
            raise ValueError(f"{kind} has no {key!r} that {giver} can give{nearest(key, known)}")
        is_list = isinstance(value, (list, tuple)) and all(type(each) is int for each in value)
        if not isinstance(value, (bool, int, float, str)) and not is_list:
            raise TypeError(f"{kind}'s {key} must be a number, a word or indices, got {value!r}.")
        words = CHOICES.get(kind, {}).get(key, ())
        if words and value not in words:
            raise ValueError(
                f"{kind}'s {key} must be one of {', '.join(words)}, got {value!r}{nearest(value, words)}"
            )
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


_OLD_FIELDS = {
    "graying": ("eps", "eps_end", "eps_per_block", "target_kappa", "gray_floor", "gray_blocks"),
    "broadcast": ("broadcast_blocks",),
    "remove_skips": ("skip_blocks",),
    "uniform_heads": ("uniform_blocks",),
}
_OLD_DEFAULTS = {"eps_schedule": "linear", "gray_where": "embedding", "broadcast_where": "mlp.end"}
OLD_FIELDS = frozenset([*_OLD_FIELDS, *_OLD_DEFAULTS, *itertools.chain(*_OLD_FIELDS.values())])
"""Fields of recipes before version 0.2.0, which had one for each argument of an edit."""


def with_edits(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a recipe with its edits as one list, also where they are those of an older version.

    >>> with_edits({"epochs": 3, "graying": "dct", "eps": 0.9, "broadcast": "cb"})["edits"]
    [{'edit': 'gray_tokens', 'method': 'dct', 'eps': 0.9}, {'edit': 'broadcast_context'}]
    """
    old = {
        name: value
        for name, value in values.items()
        if name in OLD_FIELDS and value not in (None, "none", 0) and value != _OLD_DEFAULTS.get(name)
    }
    rest = {name: value for name, value in values.items() if name not in OLD_FIELDS}
    for of, names in _OLD_FIELDS.items():
        if alone := [name for name in names if name in old and of not in old]:
            raise ValueError(f"{alone[0]} does nothing without {of}; give both, or an edit in edits.")
    made: list[dict[str, Any]] = []

    def add(edit: str, fixed: Mapping[str, Any], **fields: str) -> None:
        given = {argument: old[field] for argument, field in fields.items() if field in old}
        made.append({"edit": edit, **fixed, **given})

    if "graying" in old:
        where = {"where": "gray_where", "target_kappa": "target_kappa", "floor": "gray_floor"}
        change = {"eps_end": "eps_end", "eps_schedule": "eps_schedule"}
        if "eps_per_block" in old:
            powers = old["eps_per_block"]
            blocks = indices(old["gray_blocks"]) if "gray_blocks" in old else range(len(powers))
            if len(blocks) != len(powers):
                raise ValueError(f"eps_per_block must have {len(blocks)} powers, got {len(powers)}.")
            for eps, block in zip(powers, blocks, strict=True):
                add(GRAY, {"method": old["graying"], "eps": eps, "blocks": [block]}, **where)
        else:
            add(GRAY, {"method": old["graying"]}, eps="eps", **where, blocks="gray_blocks", **change)
    if "broadcast" in old:
        scaled = {"scaled": True} if old["broadcast"] == "cb_s" else {}
        add("broadcast_context", scaled, where="broadcast_where", blocks="broadcast_blocks")
    if "remove_skips" in old:
        add("remove_skips", {}, which="remove_skips", blocks="skip_blocks")
    if "uniform_heads" in old:
        add("uniform_heads", {}, heads="uniform_heads", blocks="uniform_blocks")
    own = rest.get("edits")
    return {**rest, "edits": [*made, *(() if own in (None, "none") else own)]} if made else rest


def plain_calls(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The edits of a recipe that was saved, by whichever version."""
    return list(with_edits(recipe).get("edits", ()))
