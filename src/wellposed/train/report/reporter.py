"""Everything that a run tells: a bar, ``run.jsonl``, trackers, and the table at its end."""

import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from wellposed.train.environment import without_secrets
from wellposed.train.recipe import Recipe
from wellposed.train.report.result import write_json
from wellposed.train.report.run_log import NAME, RunLog, current, read_run
from wellposed.train.report.screen import Screen, make_screen
from wellposed.train.report.status import Status, time_left
from wellposed.train.report.summary import summarise
from wellposed.train.report.table import EndTable, end_table
from wellposed.train.report.trackers import Trackers


class Reporter:
    """Reports one start of a run; a resumed run has one for each start.

    Numbers are plain floats. A line that cannot be written, a tracker that fails, a terminal that is closed:
    none of them stops the run.

    Args:
        folder: of the run.
        recipe: with all fields filled in.
        updates: of the whole run.
        start: updates that were done before this start.
        main: whether this process reports; for the others every call does nothing.
        accelerator: made with ``log_with=tracker_names(recipe), project_dir=folder``; None for no trackers.
        console: to show on; None is standard error.
        quiet: show nothing.
        about: rows of the end table that only the caller knows, such as ``parameters``.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        *,
        updates: int,
        start: int,
        main: bool,
        accelerator: Any = None,
        console: Console | None = None,
        quiet: bool = False,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.recipe, self.updates, self.start = folder, recipe, updates, start
        self.about: dict[str, Any] = dict(about or {})
        self._main, self._quiet = main, quiet
        self._accelerator, self._console = accelerator, console
        self._status = Status()
        self._update = start
        self._log: RunLog | None = None
        self._lost_lines = 0
        self._earlier = 0.0
        self._screen: Screen | None = None
        self._trackers: Trackers | None = None
        # No call of advance is due before a screen is there.
        self._due = float("inf")

    def __enter__(self) -> Self:
        self._began = self._counted = time.monotonic()
        if not self._main:
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        before = read_run(self.folder) if (self.folder / NAME).exists() else []
        kept = current([*before, {"event": "resume", "update": self.start}])
        self._earlier = max((line.get("seconds", 0.0) for line in kept), default=0.0)
        run = next((line["run"] for line in before if "run" in line), uuid.uuid4().hex)
        self._log = RunLog(self.folder / NAME)
        if not self._quiet:
            self._screen = make_screen(self._console, self.updates, self.start)
            self._due = 0.0
        try:
            self.event("resume" if before else "start", update=self.start, run=run, updates=self.updates)
            if self._accelerator is not None:
                self._trackers = Trackers(
                    self._accelerator,
                    self.recipe,
                    name=self.folder.name,
                    run=run,
                    start=self.start,
                    warn=self.warn,
                )
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._main:
            if isinstance(error, (Exception, KeyboardInterrupt)):
                self.event("error", text=without_secrets(f"{type(error).__name__}: {error}"))
            self._show()
        self._close()

    def advance(self, update: int) -> None:
        """After every update; moves the bar when it is time to."""
        self._update = update
        now = time.monotonic()
        if now >= self._due and self._screen is not None:
            self._due = now + self._screen.interval
            self._show()

    def train(
        self,
        update: int,
        *,
        loss: float,
        lr: float,
        images: int,
        accuracy: float | None = None,
        grad_norm: float | None = None,
        timed: int | None = None,
        **more: float,
    ) -> None:
        """Numbers of the updates since the last call, and how many images they took.

        ``timed`` are the images since this start, where a resumed run has some of before in its numbers.
        """
        self._update = update
        if not self._main:
            return
        now = time.monotonic()
        rate = (images if timed is None else timed) / max(now - self._counted, 1e-9)
        self._counted = now
        self._status.loss, self._status.accuracy, self._status.rate = loss, accuracy, rate
        given = {"loss": loss, "accuracy": accuracy, "lr": lr, "grad_norm": grad_norm, **more}
        numbers = {name: value for name, value in given.items() if value is not None}
        numbers["images_per_second"] = rate
        self.event("train", update=update, **numbers, images=images)
        self._track(update, {f"train/{name}": value for name, value in numbers.items()})

    def measured(self, update: int, numbers: Mapping[str, float]) -> None:
        """What the monitor gives; an empty mapping is no measurement."""
        if self._main and numbers:
            self.event("monitor", update=update, **numbers)
            self._track(update, numbers)

    def tested(
        self,
        update: int,
        *,
        epoch: int,
        loss: float,
        accuracy: float | None = None,
        ema_accuracy: float | None = None,
        best: bool = False,
        **more: float,
    ) -> None:
        """The numbers of a test; ``best`` if its weights are now the best."""
        if not self._main:
            return
        self._status.test_loss, self._status.test_accuracy = loss, accuracy
        given = {"loss": loss, "accuracy": accuracy, "ema_accuracy": ema_accuracy, **more}
        numbers = {name: value for name, value in given.items() if value is not None}
        self.event("test", update=update, epoch=epoch, **numbers, best=best)
        self._track(update, {f"test/{name}": value for name, value in numbers.items()})

    def say(self, text: str) -> None:
        """A sentence, above the bar and in ``run.jsonl``."""
        self._tell("note", text)

    def warn(self, text: str) -> None:
        """A sentence about something that went wrong but does not stop the run."""
        self._tell("warning", text)

    def event(self, event: str, /, *, update: int | None = None, **values: Any) -> None:
        """A line of ``run.jsonl``.

        After "rollback" the numbers of updates later than its own no longer count; "finished" fills the bar.
        """
        if self._log is None:
            return
        if event == "finished":
            self._update = self.updates
        stamp = {
            "event": event,
            "update": self._update if update is None else update,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "seconds": round(self._seconds(), 3),
        }
        try:
            if self._lost_lines:
                lost = f"{self._lost_lines} lines before this one could not be written."
                self._log.write({**stamp, "event": "warning", "text": lost})
            self._log.write({**stamp, **values})
            self._lost_lines = 0
        except OSError as error:
            if not self._lost_lines and self._screen is not None:
                self._screen.above(f"warning: cannot write {NAME} ({error.strerror}); the run goes on.")
            self._lost_lines += 1

    def table(self, about: Mapping[str, Any] | None = None) -> EndTable:
        """The run so far, with all of its starts."""
        if not self._main:
            return EndTable([])
        return end_table(self.recipe, self._summary(), self.about | dict(about or {}), self.folder)

    def write_result(self, environment: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Write ``result.json``: the summary, the recipe and the environment. Also returns it."""
        if not self._main:
            return {}
        recipe = {
            name: without_secrets(value) if isinstance(value, str) else value
            for name, value in self.recipe.to_mapping().items()
        }
        result = {**self._summary(), "about": self.about, "recipe": recipe, "environment": environment}
        write_json(self.folder / "result.json", result)
        return result

    def _summary(self) -> dict[str, Any]:
        return summarise(read_run(self.folder))

    def _tell(self, kind: str, text: str) -> None:
        self.event(kind, text=text)
        if self._screen is not None:
            self._screen.above(text if kind == "note" else f"{kind}: {text}")

    def _track(self, update: int, numbers: Mapping[str, float]) -> None:
        if self._trackers is not None:
            self._trackers.log(update, numbers)

    def _seconds(self) -> float:
        """Of training, with what earlier starts did that still counts."""
        return self._earlier + time.monotonic() - self._began

    def _show(self) -> None:
        if self._screen is not None:
            epochs = self.recipe.epochs
            epoch = min(self._update * epochs // max(self.updates, 1) + 1, epochs)
            self._screen.show(self._update, f"epoch {epoch}/{epochs}", self._parts)

    def _parts(self) -> list[str]:
        elapsed = time.monotonic() - self._began
        return self._status.parts(self._seconds(), time_left(self._update, self.updates, self.start, elapsed))

    def _close(self) -> None:
        self._due = float("inf")
        if self._trackers is not None:
            self._trackers.close()
        if self._screen is not None:
            self._screen.close()
        if self._log is not None:
            self._log.close()
        self._trackers = self._screen = self._log = None
