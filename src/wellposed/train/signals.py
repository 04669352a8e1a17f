"""A request to stop that is honoured between two updates."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Within ``with``, SIGTERM and the first Ctrl-C only set ``requested``; a second Ctrl-C interrupts.

    Outside the main thread Python cannot take signals, and then nothing is changed.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested is signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number)
