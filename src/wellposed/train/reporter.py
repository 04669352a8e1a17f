"""Everything that a run reports: ``run.jsonl``, ``result.json``, a bar or lines, and trackers.

TensorBoard and the other trackers that Accelerate knows are checked by name before any time is spent. One
that fails later, because its server is away, is named once and does not stop the run: ``run.jsonl`` has all
numbers anyway.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from wellposed.environment import without_secrets
from wellposed.files import write_json
from wellposed.run_records import NAME, RunLog, current, read_run, summarise
from wellposed.text import nearest
from wellposed.train.recipe import Recipe
from wellposed.train.screen import EndTable, Screen, end_table, make_screen, status_parts, time_left

if TYPE_CHECKING:
    from wellposed.probes import Alarm


class Reporter:
    """Reports one start of a run; a resumed run has one for each start. Nothing here stops the run.

    Args:
        folder, recipe, updates: of the run, with all fields filled in.
        start: updates that were done before this start.
        main: whether this process reports; for the others every call does nothing.
        accelerator: made with ``log_with=tracker_names(recipe), project_dir=folder``; None for no trackers.
        console, quiet: to show on, None is standard error; show nothing.
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
        self._newest: dict[str, float] = {}
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
    ) -> None:
        """Numbers of the updates since the last call, and how many images they took.

        ``timed`` are the images since this start, where a resumed run has some of before in its numbers.
        """
        self._update = update
        now = time.monotonic()
        pace = (images if timed is None else timed) / max(now - self._counted, 1e-9)
        self._counted = now
        numbers = _known(loss=loss, accuracy=accuracy, lr=lr, grad_norm=grad_norm, images_per_second=pace)
        self._newest |= _known(loss=loss, accuracy=accuracy, rate=pace)
        self.event("train", update=update, **numbers, images=images)
        self._track(update, {f"train/{name}": value for name, value in numbers.items()})

    def measured(self, update: int, numbers: Mapping[str, float], alarms: "Iterable[Alarm]" = ()) -> None:
        """What the monitor gives, with its alarms; an empty mapping is no measurement."""
        if numbers:
            self.event("monitor", update=update, **numbers)
            for each in alarms:
                said = {"blocks": list(each.blocks), "evidence": each.evidence, "remedy": each.remedy}
                self.event("alarm", update=update, name=each.name, **said)
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
        self._newest |= _known(**{"test loss": loss, "test accuracy": accuracy})
        numbers = _known(loss=loss, accuracy=accuracy, ema_accuracy=ema_accuracy, **more)
        self.event("test", update=update, epoch=epoch, **numbers, best=best)
        self._track(update, {f"test/{name}": value for name, value in numbers.items()})

    def say(self, text: str) -> None:
        """A sentence, above the bar and in ``run.jsonl``."""
        self.event("note", text=text)
        self._above(text)

    def warn(self, text: str) -> None:
        """A sentence about something that went wrong but does not stop the run."""
        self.event("warning", text=text)
        self._above(f"warning: {text}")

    def event(self, event: str, /, *, update: int | None = None, **values: Any) -> None:
        """A line of ``run.jsonl``.

        "finished" fills the bar.
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
            if not self._lost_lines:
                self._above(f"warning: cannot write {NAME} ({error.strerror}); the run continues.")
            self._lost_lines += 1

    def table(self) -> EndTable:
        """The run so far, with all of its starts."""
        if not self._main:
            return EndTable([])
        return end_table(self.recipe, summarise(read_run(self.folder)), self.about, self.folder)

    def write_result(self, environment: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Write ``result.json``: the summary, the recipe and the environment. Also returns it."""
        if not self._main:
            return {}
        recipe = {
            name: without_secrets(value) if isinstance(value, str) else value
            for name, value in self.recipe.to_mapping().items()
        }
        summary = summarise(read_run(self.folder))
        result = {**summary, "about": self.about, "recipe": recipe, "environment": environment}
        write_json(self.folder / "result.json", result)
        return result

    def _above(self, text: str) -> None:
        if self._screen is not None:
            self._screen.above(text)

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
            left = time_left(self._update, self.updates, self.start, time.monotonic() - self._began)
            self._screen.show(
                self._update,
                f"epoch {epoch}/{epochs}",
                lambda: status_parts(self._newest, self._seconds(), left),
            )

    def _close(self) -> None:
        self._due = float("inf")
        if self._trackers is not None:
            self._trackers.close()
        if self._screen is not None:
            self._screen.close()
        if self._log is not None:
            self._log.close()
        self._trackers = self._screen = self._log = None


def _known(**values: float | None) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


PROJECT = "wellposed"


def tracker_names(recipe: Recipe) -> list[str]:
    """The trackers that a recipe asks for, each known and installed; for ``Accelerator(log_with=...)``.

    >>> tracker_names(Recipe(trackers=("none",)))
    []
    >>> tracker_names(Recipe(trackers=("tensorbord",)))
    Traceback (most recent call last):
    ValueError: trackers must be of ..., auto or none, got 'tensorbord'; did you mean 'tensorboard'?
    """
    wanted = list(dict.fromkeys(recipe.trackers))
    if wanted in ([], ["none"]):
        return []
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    known = sorted(LOGGER_TYPE_TO_CLASS)
    installed = {str(name) for name in get_available_trackers()}
    if wanted == ["auto"]:
        return ["tensorboard"] if "tensorboard" in installed else []
    for name in wanted:
        if name in ("none", "auto"):
            raise ValueError(
                f"trackers={name} stands alone, got {', '.join(wanted)}; leave {name} or the others out."
            )
        if name not in known:
            raise ValueError(
                f"trackers must be of {', '.join(known)}, auto or none, got {name!r}{nearest(name, known)}"
            )
        # A class that was registered by hand is no package of Accelerate's list.
        if name in list(map(str, LoggerType)) and name not in installed:
            raise ImportError(
                f"the tracker {name} is not installed; install it with: pip install {name}, "
                "or leave it out of trackers."
            )
    return wanted


def flat(recipe: Recipe) -> dict[str, bool | int | float | str]:
    """A recipe as hyperparameters, which trackers want without nesting.

    >>> flat(Recipe(model_options={"depth": 6}))["model_options.depth"]
    6
    """
    values: dict[str, bool | int | float | str] = {}
    for name, value in recipe.to_mapping().items():
        items = (
            {f"{name}.{key}": item for key, item in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
        for key, item in items.items():
            if isinstance(item, (list, tuple)):
                item = ", ".join(map(str, item))
            values[key] = item if isinstance(item, (bool, int, float)) else without_secrets(str(item))
    return values


class Trackers:
    """The trackers of an accelerator, each fed and finished on its own, so that one may fail.

    Args:
        accelerator, recipe, start, name: of the :class:`Reporter`, its folder's name.
        run: identifies the run, so that a resumed one continues where trackers can do that.
        warn: gets a sentence, once for each tracker that fails.
    """

    def __init__(
        self,
        accelerator: Any,
        recipe: Recipe,
        *,
        name: str,
        run: str,
        start: int,
        warn: Callable[[str], None],
    ) -> None:
        self._accelerator, self._warn = accelerator, warn
        self._failed: set[str] = set()
        self._started: list[Any] = []
        options = {
            "tensorboard": {"purge_step": start + 1} if start else {},
            "wandb": {"name": name, "id": run, "resume": "allow"},
        }
        everything = list(accelerator.log_with)
        for kind in everything:
            is_tensorboard = _name(kind) == "tensorboard"
            # TensorBoard shows each set of hyperparameters as a run; a resumed run has one already.
            config = None if is_tensorboard and start else flat(recipe)
            accelerator.log_with, accelerator.trackers = [kind], []
            try:
                # For TensorBoard the name is that of the folder.
                accelerator.init_trackers("tensorboard" if is_tensorboard else PROJECT, config, options)
                self._started += accelerator.trackers
            except Exception as error:
                # Nobody waits at a restart: what was asked for at the start is worth less than the run.
                if start == 0:
                    self.close()
                    raise RuntimeError(
                        f"the tracker {_name(kind)} does not start ({_reason(error)}); "
                        "leave it out of trackers, or set it up first."
                    ) from error
                self._fails(kind, error)
            finally:
                accelerator.log_with = everything
        accelerator.trackers = list(self._started)

    def log(self, update: int, values: Mapping[str, float]) -> None:
        for tracker in self._started:
            self._try(tracker, lambda tracker: tracker.log(dict(values), step=update))

    def close(self) -> None:
        """Finish all; the process group, which ``Accelerator.end_training`` takes down too, stays."""
        for tracker in self._started:
            self._try(tracker, lambda tracker: tracker.finish())
        self._started.clear()
        self._accelerator.trackers = []

    def _try(self, tracker: Any, call: Callable[[Any], object]) -> None:
        try:
            call(tracker)
        except Exception as error:
            self._fails(tracker, error)

    def _fails(self, tracker: Any, error: Exception) -> None:
        name = _name(tracker)
        if name not in self._failed:
            self._failed.add(name)
            self._warn(
                f"the tracker {name} fails ({_reason(error)}); the run continues, run.jsonl has all numbers."
            )


def _name(tracker: Any) -> str:
    """Of a started tracker, or of one of Accelerate's kinds, which are enum members."""
    return str(tracker.name if hasattr(tracker, "store_init_configuration") else tracker)


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
