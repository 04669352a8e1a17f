"""A request to stop that is honoured between two updates."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE = 90.0
"""Seconds that an update may still take after a request; a compilation whose workers got the signal too may
never end. Checkpoints are whole at any moment, so leaving is safe."""


class StopRequest:
    """Within ``with``, SIGTERM and the first Ctrl-C only set ``requested``; a second Ctrl-C interrupts.

    Who sees the request calls :meth:`honour` and may then take the time that saving needs. If nobody does so
    within :data:`GRACE` seconds, the process ends. Outside the main thread Python cannot take signals, and
    then nothing is changed.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._timer: threading.Timer | None = None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.honour()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def honour(self) -> None:
        """The request was seen."""
        if self._timer is not None:
            self._timer.cancel()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested is signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested is None:
            self._timer = threading.Timer(GRACE, self._leave)
            self._timer.daemon = True
            self._timer.start()
        self.requested = signal.Signals(number)

    def _leave(self) -> None:
        print(
            f"no update ended within {GRACE:.0f} s of the signal; leaves without saving, "
            "the same command goes on from the last checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(128 + int(self.requested or signal.SIGTERM))
