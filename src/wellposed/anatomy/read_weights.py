"""Layers that read a weight through an operation, their child: ``W`` is kept, ``f(W)`` is what they use.

Such a layer is of a subclass that differs in that one attribute, so that calls which use the weight without
calling the layer (BEiT's fused attention, ``nn.MultiheadAttention``) get ``f(W)`` too. torch's
parametrizations rename the parameter and do not pickle; this keeps its name and pickles.
"""

import copyreg
import functools
from typing import Any

from torch import nn

from wellposed.anatomy.marked import set_class, unmarked_class
from wellposed.errors import SeamError


def child_name(parameter: str) -> str:
    """The child of a layer that holds the operation on one of its parameters.

    >>> child_name("in_proj_weight")
    'in_proj_weight_edit'
    """
    return f"{parameter}_edit"


def edited_weights(layer: nn.Module) -> tuple[str, ...]:
    """The parameters that a layer reads through an operation."""
    return getattr(type(layer), "_edited_weights", ())


def read_through(layer: nn.Module, parameter: str) -> None:
    """Let a layer read a parameter through its child; the child must be there already."""
    plain, names = _plain_class(layer)
    set_class(layer, _edited_class(plain, tuple(sorted({*names, parameter}))))


def read_plainly(layer: nn.Module) -> None:
    """Undo :func:`read_through` for all parameters of a layer."""
    if edited_weights(layer):
        set_class(layer, _plain_class(layer)[0])


def _plain_class(layer: nn.Module) -> tuple[Any, tuple[str, ...]]:
    """The class that a layer would have without edits of its weights, and which are edited."""
    cls: Any = unmarked_class(layer)
    return (cls._edited_of, cls._edited_weights) if "_edited_of" in vars(cls) else (cls, ())


def _new_edited(plain: type[nn.Module], names: tuple[str, ...], *args: Any) -> nn.Module:
    hashable: Any = plain
    cls: Any = _edited_class(hashable, names)
    layer: nn.Module = cls.__new__(cls, *args)
    return layer


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    """Pickle and deepcopy by the plain class: the subclass has no importable name."""
    cls: Any = next(each for each in type(self).__mro__ if "_edited_of" in vars(each))
    make, args, *rest = super(cls, self).__reduce_ex__(max(int(protocol), 2))  # type: ignore[misc]
    if make is not copyreg.__newobj__ or args[0] is not cls:  # type: ignore[attr-defined]
        raise SeamError(f"{cls.__name__} pickles itself in its own way; wp.restore(model) before pickling.")
    return _new_edited, (cls._edited_of, cls._edited_weights, *args[1:]), *rest


def _reader(parameter: str) -> property:
    child = child_name(parameter)

    def read(self: nn.Module) -> Any:
        return self._modules[child](self._parameters[parameter])  # type: ignore[misc]

    return property(read)


@functools.cache
def _edited_class(plain: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    members: dict[str, Any] = {name: _reader(name) for name in names}
    members |= {
        "__reduce_ex__": _reduce_ex,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_edited_of": plain,
        "_edited_weights": names,
    }
    metaclass: Any = type(plain)
    cls: type[nn.Module] = metaclass(plain.__name__, (plain,), members)
    return cls
