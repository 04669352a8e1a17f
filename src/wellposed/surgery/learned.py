"""Scales that an edit adds to a model, and that nobody would train or keep alike on all processes.

An optimizer that was made before the edit does not hold them, and DistributedDataParallel does not
synchronise what was added after it. The first is seen when that optimizer steps, and is a warning; the second
is an error at once.
"""

import gc
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from wellposed.errors import WrappedModelError


class _Followed:
    """Parameters of an edit, until each has been in an optimizer that steps, or it is clear that none is."""

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        self.model = weakref.ref(model)
        self.parameters = [weakref.ref(parameter) for parameter in parameters]
        self.trained: set[int] = set()
        self.stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def see(self, optimizer: Optimizer) -> bool:
        """Whether there is more to see after this step of an optimizer."""
        model = self.model()
        if model is None:
            return False
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        present = {id(parameter): name for name, parameter in model.named_parameters()}
        self.trained |= held
        own = [p for p in (reference() for reference in self.parameters) if p is not None and p.requires_grad]
        missing = [present[id(p)] for p in own if id(p) in present and id(p) not in self.trained]
        if not missing or not held & present.keys():
            return bool(missing)
        if optimizer not in self.stepped:  # another one may hold them
            self.stepped.add(optimizer)
            return True
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        warnings.warn(
            f"{missing[0]}{more}, learned by an edit, is in no optimizer that steps and stays as it is; make "
            "the optimizer after the edit, or add it with optimizer.add_param_group.",
            UserWarning,
            stacklevel=4,
        )
        return False


_followed: list[_Followed] = []
_hooked: list[Any] = []


def follow_learned(model: nn.Module, operations: Iterable[nn.Module]) -> None:
    """Warn if an optimizer of the model steps twice without what these operations learn."""
    parameters = [parameter for operation in operations for parameter in operation.parameters()]
    if not parameters:
        return
    _followed.append(_Followed(model, parameters))
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_before_step))


def refuse_replicated(model: nn.Module, operations: Iterable[nn.Module]) -> None:
    """Raise if the operations learn something and the model is in a DistributedDataParallel already."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    learned: list[Tensor] = [p for operation in operations for p in operation.parameters()]
    # isinstance would ask the referents of weak proxies, which may be gone.
    wrappers = (each for each in gc.get_objects() if DistributedDataParallel in type(each).__mro__)
    if learned and any(_is_in(model, wrapper) for wrapper in wrappers):
        raise WrappedModelError(
            "expected a model that is not replicated yet, got one inside a DistributedDataParallel, which "
            "would not synchronise what this edit learns; edit the model first, then wrap it in "
            "DistributedDataParallel."
        )


def _is_in(model: nn.Module, wrapper: nn.Module) -> bool:
    return any(module is model for module in wrapper.modules())


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _followed[:] = [each for each in _followed if each.see(optimizer)]
    if not _followed:
        _hooked.pop().remove()
