"""Marking a module, so that no compiled program of another one is taken for it.

``torch.compile`` keeps its programs by class and looks at a module's hooks once, when it compiles: the
program of a plain model would serve an edited one of the same class, without its edit. A marked module is of
a subclass that adds nothing, which is enough for the compiler to tell the two apart. It keeps the class's
name and pickles as the class it was plus the mark.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def is_marked(module: nn.Module) -> bool:
    """Whether the module's own class is a mark: FSDP2 and parametrizations make classes on top of one."""
    return "_unmarked" in vars(type(module))


def unmarked_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, whether it is marked or not."""
    cls: type[nn.Module] = type(module)._unmarked if is_marked(module) else type(module)  # type: ignore[attr-defined]
    return cls


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Change the class of a module; a mark stays."""
    hashable: Any = cls
    module.__class__ = _marked_class(hashable) if is_marked(module) else cls


def mark(module: nn.Module) -> None:
    if not is_marked(module):
        cls: Any = type(module)
        module.__class__ = _marked_class(cls)


def unmark(module: nn.Module) -> None:
    module.__class__ = unmarked_class(module)


def _new_marked(make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    module = make(*args)
    mark(module)
    return module


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    """Pickle and deepcopy by the class below: the subclass has no importable name."""
    if not is_marked(self):  # of a class that was made on top of the mark
        below = next(cls for cls in type(self).__mro__ if "_unmarked" in vars(cls))
        return below._unmarked.__reduce_ex__(self, protocol)  # type: ignore[attr-defined]
    unmark(self)
    try:
        reduced: Any = self.__reduce_ex__(max(int(protocol), 2))
    finally:
        mark(self)
    make, args, *rest = reduced
    return _new_marked, (make, args), *rest


@functools.cache
def _marked_class(cls: type[nn.Module]) -> type[nn.Module]:
    members = {
        "__reduce_ex__": _reduce_ex,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_unmarked": cls,
    }
    metaclass: Any = type(cls)
    marked: type[nn.Module] = metaclass(cls.__name__, (cls,), members)
    return marked
