"""What the operations that edits put into a model have in common."""

from typing import Any, NoReturn

from torch import nn


class ScriptError(TypeError):
    """TorchScript cannot compile an edited model."""


class Operation(nn.Module):
    """A module that tracers of ``torch.fx`` call as a whole, and that TorchScript's compiler refuses.

    What an operation does depends on shapes and on numbers that may change, which symbolic tracing cannot
    follow. So it is one node of the graph, as torch's own layers are, and keeps its settings and scales.
    """

    def __init__(self) -> None:
        super().__init__()
        # A tracer takes for a layer of torch what says so; pickling asks the class, which does not.
        self.__module__ = "torch.nn.modules.wellposed"

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_script(self)


def refuse_script(module: Any) -> NoReturn:
    """Raise for ``torch.jit.script``, with what to use."""
    raise ScriptError(
        f"torch.jit.script cannot compile an edited model ({type(module).__name__} chooses its code by the "
        "tokens' shape and dtype); use torch.export.export or torch.jit.trace, or wp.restore(model) first."
    )
