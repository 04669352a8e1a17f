"""What is measured on trained weights, beside the training of the next runs.

One run after the other in a thread of its own: a measurement takes seconds and must not keep the next run
from starting. What was found is kept in the run's folder, for every study that measures the same.
"""

import gc
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from wellposed.files import parse_json, read_bytes
from wellposed.study.choosing import Planned
from wellposed.study.compact import rounded
from wellposed.study.files import write_lines
from wellposed.study.ledger import Key
from wellposed.study.plan import Study, slug
from wellposed.study.session import Session

After = Callable[[Path, Path], list[dict[str, Any]]]

PATIENCE = 60.0
"""Seconds without news after which it says what it is at."""


class Measurer:
    """Measures what sessions ask for, in the order in which they ask.

    Attributes:
        failed: sentences on those that could not be measured.
    """

    def __init__(self, console: Console) -> None:
        self.failed: list[str] = []
        self._console = console
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="measuring")
        self._asked: set[tuple[int, Key]] = set()
        self._waiting: list[Future[None]] = []
        self._done = 0
        self._at: tuple[str, float] | None = None

    def __enter__(self) -> "Measurer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def ask(self, session: Session) -> None:
        """Measure what the session can have measured and has not yet asked for."""
        for planned in session.to_measure():
            asked = (id(session), planned.key)
            if asked not in self._asked:
                self._asked.add(asked)
                self._waiting.append(self._threads.submit(self._measure, session, planned))

    def wait(self) -> None:
        """Until all is measured."""
        count = sum(not each.done() for each in self._waiting)
        if count:
            self._say(f"measuring {count} {'run' if count == 1 else 'runs'}")
        while left := [each for each in self._waiting if not each.done()]:
            ended, _ = wait(left, PATIENCE, FIRST_COMPLETED)
            if not ended and self._at is not None:
                title, since = self._at
                self._say(f"measuring {title}: {(time.monotonic() - since) / 60:.0f} min so far")
        for each in self._waiting:
            each.result()

    def _measure(self, session: Session, planned: Planned) -> None:
        self._at = planned.title, time.monotonic()
        try:
            rows = measured_on(session.study, planned.folder, session.folder)
            session.take_measured(planned, rows)
        except Exception as error:
            self.failed.append(f"measuring {planned.title} failed: {type(error).__name__}: {error}")
            self._say(self.failed[-1])
        else:
            self._done += 1
            self._say(f"measured {self._done} of {len(self._waiting)}: {planned.title}")
        finally:
            free_memory()

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def measured_on(study: Study, run: Path, folder: Path) -> list[dict[str, Any]]:
    """What ``Study.after`` finds, or found before."""
    assert study.after is not None
    path = run / f"measured-{_name(study, study.after)}.jsonl"
    if not path.exists():
        write_lines(path, [rounded(row) for row in study.after(run, folder)])
    return [parse_json(line) for line in read_bytes(path).split(b"\n") if line]


def _name(study: Study, after: After) -> str:
    """Of what is measured: that of the function, which studies share, or the study's where it has none."""
    own = getattr(after, "__qualname__", "<none>")
    return slug(study.name if "<" in own else f"{after.__module__.rpartition('.')[2]}-{own}")


def free_memory() -> None:
    """Of the model just measured: other runs need the GPU's."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
