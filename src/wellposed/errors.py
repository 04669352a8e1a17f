"""The errors that a caller may want to tell apart."""


class UnknownModelError(ValueError):
    """The model holds no block class that the library knows."""


class WorkerDiedError(RuntimeError):
    """A process that reads images ended before its time."""


class WrappedModelError(ValueError):
    """The model is compiled, sharded or replicated already; edits come before wrapping."""


class SeamError(RuntimeError):
    """A block's source is not the one that its row of the table describes."""
