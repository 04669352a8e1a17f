"""The errors that a caller may want to distinguish."""


class UnknownModelError(ValueError):
    """No blocks were found in the model.

    >>> import torch, wellposed as wp
    >>> wp.edits(torch.nn.Linear(2, 2))
    no edits
    >>> wp.anatomy.blocks(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
    wellposed.errors.UnknownModelError: ...
    """


class WorkerDiedError(RuntimeError):
    """A process that reads images ended before its time."""


class WrappedModelError(ValueError):
    """The model is compiled, sharded or replicated already; edits come before wrapping.

    >>> import torch, wellposed as wp
    >>> wp.gray_tokens(torch.nn.DataParallel(torch.nn.Linear(2, 2)))
    Traceback (most recent call last):
    wellposed.errors.WrappedModelError: ...
    """


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
