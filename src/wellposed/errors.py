"""The errors that a caller may want to distinguish."""


class UnknownModelError(ValueError):
    """The model holds no block class that the library knows."""


class WorkerDiedError(RuntimeError):
    """A process that reads images ended before its time."""


class WrappedModelError(ValueError):
    """The model is compiled, sharded or replicated already; edits come before wrapping."""


class NoMeaningError(ValueError):
    """An edit has no meaning for the blocks it was asked of.

    Args:
        reasons: why, a sentence for each kind of block.
    """

    def __init__(self, message: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


class SeamError(RuntimeError):
    """A block's source is not the one that its row of the table describes."""
