"""TensorBoard and the other trackers that Accelerate knows.

A name is checked before any time is spent. A tracker that fails later, because its server is away, is named
once and does not stop the run: ``run.jsonl`` has all numbers anyway.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from wellposed.train.environment import without_secrets
from wellposed.train.recipe import Recipe

PROJECT = "wellposed"


def tracker_names(recipe: Recipe) -> list[str]:
    """The trackers that a recipe asks for, each known and installed; for ``Accelerator(log_with=...)``.

    >>> tracker_names(Recipe(trackers=("none",)))
    []
    >>> tracker_names(Recipe(trackers=("tensorbord",)))
    Traceback (most recent call last):
    ValueError: trackers must be of ... or none, got 'tensorbord'; did you mean 'tensorboard'?
    """
    wanted = list(dict.fromkeys(recipe.trackers))
    if wanted in ([], ["none"]):
        return []
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    known = sorted(LOGGER_TYPE_TO_CLASS)
    installed = {str(name) for name in get_available_trackers()}
    for name in wanted:
        if name == "none":
            raise ValueError(
                f"trackers=none stands alone, got {', '.join(wanted)}; leave none or the others out."
            )
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ValueError(f"trackers must be of {', '.join(known)} or none, got {name!r}{hint}")
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
            is_plain = isinstance(item, (bool, int, float))
            values[key] = item if is_plain else without_secrets(_listed(item))
    return values


class Trackers:
    """The trackers of an accelerator, each started, fed and finished on its own.

    Accelerate does the same for all of them at once, where one that fails keeps the next from being called.

    Args:
        accelerator: made with ``log_with=tracker_names(recipe), project_dir=folder``.
        recipe: stored as hyperparameters.
        name: of the run.
        run: identifies it, so that a resumed run goes on where trackers can do that.
        start: first update; above 0 the run is resumed.
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
        for kind in list(accelerator.log_with):
            try:
                self._started += self._start(kind, recipe, start, options)
            except Exception as error:
                # Nobody waits at a restart: what was asked for at the start is worth less than the run.
                if start == 0:
                    self.close()
                    raise RuntimeError(
                        f"the tracker {_name(kind)} does not start ({_reason(error)}); "
                        "leave it out of trackers, or set it up first."
                    ) from error
                self._fails(kind, error)
        accelerator.trackers = list(self._started)

    def log(self, update: int, values: Mapping[str, float]) -> None:
        for tracker in self._started:
            try:
                tracker.log(dict(values), step=update)
            except Exception as error:
                self._fails(tracker, error)

    def close(self) -> None:
        """Finish all; the process group, which ``Accelerator.end_training`` takes down too, stays."""
        for tracker in self._started:
            try:
                tracker.finish()
            except Exception as error:
                self._fails(tracker, error)
        self._started.clear()
        self._accelerator.trackers = []

    def _start(self, kind: Any, recipe: Recipe, start: int, options: dict[str, Any]) -> list[Any]:
        one = self._accelerator
        everything, one.log_with, one.trackers = one.log_with, [kind], []
        is_tensorboard = _name(kind) == "tensorboard"
        # TensorBoard shows each set of hyperparameters as a run of its own; a resumed run has one already.
        config = None if is_tensorboard and start else flat(recipe)
        try:
            # For TensorBoard the name is that of the folder.
            one.init_trackers("tensorboard" if is_tensorboard else PROJECT, config, options)
            return list(one.trackers)
        finally:
            one.log_with = everything

    def _fails(self, tracker: Any, error: Exception) -> None:
        name = _name(tracker)
        if name not in self._failed:
            self._failed.add(name)
            self._warn(
                f"the tracker {name} fails ({_reason(error)}); the run goes on, run.jsonl has all numbers."
            )


def _name(tracker: Any) -> str:
    """Of a started tracker, or of one of Accelerate's kinds, which are enum members."""
    return str(tracker.name if hasattr(tracker, "store_init_configuration") else tracker)


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
