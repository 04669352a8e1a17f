"""Requests to stop."""

import os
import signal
import threading

import pytest

from wellposed.train import loop as signals
from wellposed.train.loop import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request(number) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested is number
    assert signal.getsignal(number) is before


def test_a_second_interrupt_interrupts() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_who_does_not_honour_it_is_ended(monkeypatch, capsys) -> None:
    left, codes = threading.Event(), []
    monkeypatch.setattr(signals, "GRACE", 0.05)
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), left.set()))
    with StopRequest():
        os.kill(os.getpid(), signal.SIGTERM)
        assert left.wait(10)
    assert codes == [143]
    assert "resumes from the last checkpoint" in capsys.readouterr().err
    left.clear()
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        stop.honour()
        assert not left.wait(0.3)


def test_in_another_thread_nothing_is_changed() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def enter() -> None:
        with StopRequest():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
