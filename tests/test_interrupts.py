"""Ctrl-C at any line of a measurement leaves the model and torch as they were."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

import wellposed as wp
import zoo
from untouched import assert_same, fingerprint
from wellposed.interrupts import let_through, uninterrupted

VIT = zoo.BY_NAME["timm vit"]
OURS = Path(wp.__file__).parent
PLACES = (
    *(str(OURS / name) for name in ("anatomy/seam.py", "linalg/precision.py")),
    *(
        str(OURS / "probes" / f"{name}.py")
        for name in ("attention_maps", "observe", "ntk_gradients", "subblock")
    ),
    os.sep + "contextlib.py",
    os.path.join("torch", "overrides.py"),
)
"""Files in which something is changed and put back."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


EDITING = tuple(str(OURS / name) for name in ("anatomy/seam.py", "anatomy/subclass.py", "surgery"))


def lines_of(
    work: Callable[[], Any], interrupt_at: int | None = None, places: tuple[str, ...] = PLACES
) -> int:
    """How many lines of ours ``work`` runs; at one of them Ctrl-C is pressed."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        name = frame.f_code.co_filename
        if not name.endswith(places) and not name.startswith(places):
            return None
        if event in ("line", "return"):
            count += 1
            if count == interrupt_at:
                os.kill(os.getpid(), signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return count


def test_the_places_are_there() -> None:
    """A file that was renamed would be interrupted nowhere."""
    assert all(Path(place).exists() for place in (*PLACES, *EDITING) if place.startswith(str(OURS)))


WORK: dict[str, Any] = {
    "conditioning and density": {"what": ("conditioning", "density")},
    "bounds": {"what": "bounds"},
    "jacobian": {"what": "jacobian"},
    "ntk": {"what": "ntk", "max_images": 2},
}


@pytest.mark.parametrize("name", WORK)
def test_it_leaves_no_trace(name: str) -> None:
    model, x = VIT.model(), VIT.input(2)

    def work() -> None:
        wp.diagnose(model, x, progress=False, **WORK[name])

    work()  # what is imported and cached on first use
    before, precision = fingerprint(model), torch.backends.cuda.matmul.fp32_precision
    lines, moments = lines_of(work), 5 if name == "jacobian" else 30
    for moment in range(moments):
        lines_of(work, 1 + (2 * moment + 1) * lines // (2 * moments))
        assert_same(before, fingerprint(model))
        assert not _get_current_function_mode_stack()
        assert torch.backends.cuda.matmul.fp32_precision == precision
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_autocast_enabled("cpu")


def test_it_is_held_back_and_let_through() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():  # noqa: PT012
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("inside")
        done.append("after the inner block")
        let_through()
        done.append("never")
    assert done == ["inside", "after the inner block"]
    with pytest.raises(KeyboardInterrupt), uninterrupted():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        done.append("at the end")
    assert done[-1] == "at the end"


def test_the_second_one_does_not_wait() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        done.append("held")
        os.kill(os.getpid(), signal.SIGINT)
        done.append("never")
    assert done == ["held"]


def test_threads_measure_one_after_the_other() -> None:
    """Torch's switches are of the process: who puts them back must have found them as they were."""
    first, second, x = VIT.model(), VIT.model(), VIT.input(2)
    alone = [wp.diagnose(model, x, progress=False).records for model in (first, second)]
    inside, done = threading.Event(), threading.Event()
    found: dict[int, Any] = {}

    def wait_for_the_other(*_: Any) -> None:
        inside.wait(0.5)

    def wait_until_it_is_done(*_: Any) -> None:
        inside.set()
        done.wait(5)

    first.register_forward_pre_hook(wait_for_the_other)
    second.register_forward_pre_hook(wait_until_it_is_done)

    def measure(number: int, model: torch.nn.Module) -> None:
        found[number] = wp.diagnose(model, x, progress=False).records
        done.set()

    threads = [threading.Thread(target=measure, args=each) for each in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.backends.mha.get_fastpath_enabled()
    assert [found[0], found[1]] == alone


def test_an_interrupted_edit_can_be_undone() -> None:
    edits: tuple[Callable[[torch.nn.Module], Any], ...] = (
        lambda model: wp.remove_skips(model, "attention"),
        lambda model: wp.gray_tokens(model, eps=0.5, where="blocks"),
        lambda model: wp.broadcast_context(model, scaled=True),
        lambda model: wp.uniform_heads(model, heads=[0]),
        wp.normalise_spectrum,
    )
    model, x = VIT.model(), VIT.input(1)
    wp.diagnose(model, x, what="conditioning", progress=False)
    before = fingerprint(model)
    for edit in edits:
        lines = lines_of(lambda edit=edit: edit(model), places=EDITING)
        wp.restore(model)
        assert_same(before, fingerprint(model))
        for moment in range(1, lines + 1, 1 + lines // 40):
            lines_of(lambda edit=edit: edit(model), moment, EDITING)
            lines_of(lambda: wp.restore(model), moment, EDITING)
            wp.restore(model)
            assert_same(before, fingerprint(model))


def test_other_threads_and_handlers_are_left_alone() -> None:
    def elsewhere() -> None:
        with uninterrupted():
            let_through()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    seen = []
    signal.signal(signal.SIGINT, lambda *arguments: seen.append(arguments))
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        assert not seen
    assert len(seen) == 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
