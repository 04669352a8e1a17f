"""The bar and the lines: right text, no control characters in a log, and nothing that can stop a run."""

import contextlib
import io
import os
import re
import sys

import pytest
from rich.console import Console

from wellposed.train.screen import LINE_SECONDS, Bar, Lines, Unbreakable, make_screen


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_terminal_gets_a_bar() -> None:
    stream = io.StringIO()
    screen = make_screen(Console(file=stream, force_terminal=True, width=160), updates=200, start=100)
    assert isinstance(screen, Bar)
    screen.show(150, "epoch 3/4", lambda: ["loss 0.25"])
    screen.above("a note")
    screen.close()
    text = stream.getvalue()
    assert "\x1b[" in text
    assert all(part in text for part in ("epoch 3/4", "75%", "loss 0.25", "a note"))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_narrow_terminal_loses_the_last_parts_and_not_the_bar(width) -> None:
    stream = io.StringIO()
    screen = make_screen(Console(file=stream, force_terminal=True, width=width), updates=200, start=0)
    screen.show(100, "epoch 150/300", lambda: ["loss 0.25", "test 87.5%", "x" * 25, "y" * 40])
    screen.close()
    text = stream.getvalue()
    assert all(part in text for part in ("epoch 150/300", "━", "50%", "loss 0.25"))
    assert "…" not in text
    assert ("x" * 25 in text, "y" * 40 in text) == (width > 60, width > 80)


def test_a_note_in_brackets_is_no_markup() -> None:
    for terminal in (True, False):
        stream = io.StringIO()
        screen = make_screen(Console(file=stream, force_terminal=terminal, width=80), updates=10, start=0)
        screen.above("[red]kept[/] as [it] is")
        screen.show(1, "epoch", lambda: ["[bold]too[/]"])
        screen.close()
        assert "[red]kept[/] as [it] is" in stream.getvalue()
        assert "[bold]too[/]" in stream.getvalue()


def test_a_log_gets_a_line_each_tenth_without_control_characters() -> None:
    stream = io.StringIO()
    screen = Lines(Console(file=stream, width=40), updates=1000, start=0, clock=Clock())
    for update in range(1, 1001):
        screen.show(update, "epoch 1/2", lambda: ["loss 0.25", "a long status " * 10])
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("epoch 1/2, 10%: loss 0.25, a long")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", stream.getvalue())


def test_a_slow_run_gets_a_line_each_half_minute() -> None:
    stream, clock = io.StringIO(), Clock()
    screen = Lines(Console(file=stream), updates=1_000_000, start=0, clock=clock)
    for update in range(100):
        clock.now += LINE_SECONDS / 4
        screen.show(update, "epoch 1/2", lambda: [])
    assert len(stream.getvalue().splitlines()) == 25


def test_status_is_made_only_when_shown() -> None:
    screen = Lines(Console(file=io.StringIO()), updates=1000, start=0, clock=Clock())
    screen.show(1, "", lambda: pytest.fail("nothing was due"))


def test_forced_colours_do_not_make_a_log_a_terminal(monkeypatch) -> None:
    stream = io.StringIO()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", stream)
    screen = make_screen(None, updates=10, start=0)
    assert isinstance(screen, Lines)
    screen.above("12 images")
    assert stream.getvalue() == "12 images\n"


def test_a_closed_pipe_drops_output_and_nothing_else() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w", buffering=1) as stream:
        screen = make_screen(Console(file=stream, force_terminal=True, width=80), updates=10, start=0)
        os.close(read_end)
        for update in range(10):
            screen.show(update, "epoch", lambda: ["loss"])
            screen.above("note")
        screen.close()
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def test_a_terminal_that_is_hung_up_drops_output_and_nothing_else() -> None:
    controller, terminal = os.openpty()
    stream = os.fdopen(terminal, "w", buffering=1)
    console = Console(file=stream, width=80)
    assert console.is_terminal
    screen = make_screen(console, updates=10, start=0)
    assert isinstance(screen, Bar)
    screen.show(1, "epoch", lambda: ["loss"])
    os.close(controller)
    for update in range(10):
        screen.show(update, "epoch", lambda: ["loss"])
    screen.close()
    with contextlib.suppress(OSError):
        stream.close()


@pytest.mark.parametrize("stream", [None, io.StringIO()], ids=["none", "closed"])
def test_no_stream(stream) -> None:
    if stream is not None:
        stream.close()
    dead = Unbreakable(stream)
    assert dead.write("x") == 0
    dead.flush()
    assert not dead.isatty()


def test_an_encoding_without_the_character() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    Unbreakable(stream).write("größe")
    assert raw.getvalue() == b"gr??e"
