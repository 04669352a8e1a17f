"""Where a model or torch is changed for a while: nothing comes between the change and its undoing.

Python raises ``KeyboardInterrupt`` between any two of its steps, also between the last line of a block and
what the block puts back. So Ctrl-C is held back here, and let through where the changes can be undone. The
second Ctrl-C in a row is never held back.

Torch's switches (the fast path of attention, TF32, the random generators) belong to the process. A thread
that put them back while another is measuring would leave them as the other had set them, so one thread at a
time is here and others wait. ::

    with uninterrupted():
        ...  # change something
        for batch in batches:
            let_through()
            ...
        ...  # put it back
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Held:
    """The handler of SIGINT inside :func:`uninterrupted`."""

    def __init__(self, before: Any) -> None:
        self.before = before
        self.pending: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.pending is not None:  # somebody does not want to wait
            self.deliver()
        else:
            self.pending = number, frame

    def deliver(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            self.before(*pending)


def _current() -> _Held | None:
    """That of the section which this thread is in; only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = signal.getsignal(signal.SIGINT)
    return handler if isinstance(handler, _Held) else None


_ONE_THREAD = threading.RLock()
_LOOK = 0.1
"""Seconds between two looks for Ctrl-C while another thread is inside."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, Ctrl-C waits until :func:`let_through` or the end of the outermost such block.

    Other threads wait at such a block of theirs until this one has left its outermost.
    """
    with _without_ctrl_c():
        while not _ONE_THREAD.acquire(timeout=_LOOK):
            let_through()
        try:
            yield
        finally:
            _ONE_THREAD.release()


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(before) or isinstance(before, _Held):
        yield  # nobody asks for it, or a block around this one does it
        return
    held = _Held(before)
    try:
        signal.signal(signal.SIGINT, held)
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        held.deliver()


def let_through() -> None:
    """Raise what was held back: all that was changed can be put back from here."""
    if (held := _current()) is not None:
        held.deliver()
