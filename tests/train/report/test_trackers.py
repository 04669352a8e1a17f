"""Trackers through Accelerate."""

import io

import pytest
from accelerate import Accelerator, tracking
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from wellposed.run_records import read_run
from wellposed.train.recipe import Recipe
from wellposed.train.reporter import Reporter, flat, tracker_names


@pytest.fixture(autouse=True)
def fresh_accelerate():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def reporter(folder, recipe, log_with=None, *, start=0, stream=None):
    accelerator = Accelerator(cpu=True, log_with=log_with or tracker_names(recipe), project_dir=folder)
    console = Console(file=stream or io.StringIO(), width=300)
    return Reporter(
        folder, recipe, updates=100, start=start, main=True, accelerator=accelerator, console=console
    )


def test_tensorboard_reads_what_was_logged(tmp_path) -> None:
    recipe = Recipe(epochs=2, model_options={"depth": 3}, edits=["gray_tokens method=dct"])
    with reporter(tmp_path, recipe) as tell:
        tell.train(10, loss=0.5, accuracy=0.25, lr=1e-3, images=64)
        tell.train(20, loss=0.25, accuracy=0.5, lr=5e-4, images=64)
        tell.measured(20, {"kappa/0/input": 82.0, "entropy/mean": 0.75})
        tell.tested(20, epoch=1, loss=0.125, accuracy=0.875, ema_accuracy=0.9375)
        tell.train(40, loss=9.0, lr=1e-4, images=64)
    # The run was killed after update 40 and goes on from 20.
    AcceleratorState._reset_state(reset_partial_state=True)
    with reporter(tmp_path, recipe, start=20) as tell:
        tell.train(30, loss=0.125, lr=1e-4, images=64)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()

    def values(tag):
        return [(event.step, event.value) for event in events.Scalars(tag)]

    assert values("train/loss") == [(10, 0.5), (20, 0.25), (30, 0.125)]
    assert values("train/accuracy") == [(10, 0.25), (20, 0.5)]
    assert values("train/lr")[1] == (20, pytest.approx(5e-4))
    assert values("kappa/0/input") == [(20, 82.0)]
    assert values("entropy/mean") == [(20, 0.75)]
    assert values("test/accuracy") == [(20, 0.875)]
    assert values("test/ema_accuracy") == [(20, 0.9375)]
    (hyperparameters,) = (tmp_path / "tensorboard").glob("*/hparams.yml")
    assert "model_options.depth: 3" in hyperparameters.read_text()


def test_the_process_group_and_the_accelerator_are_left_alone(tmp_path) -> None:
    with reporter(tmp_path, Recipe()) as tell:
        accelerator = tell._accelerator
        assert [tracker.name for tracker in accelerator.trackers] == ["tensorboard"]
    assert accelerator.trackers == []
    assert list(map(str, accelerator.log_with)) == ["tensorboard"]
    accelerator.end_training()


class Away(GeneralTracker):
    """A tracker whose server can be away."""

    name = "away"
    requires_logging_directory = False

    def __init__(self, fails=(), name="away") -> None:
        super().__init__()
        self.fails, self.name, self.logged = fails, name, []

    @property
    def tracker(self):
        return self

    def start(self) -> None:
        self._do("start")

    def store_init_configuration(self, values) -> None:
        self._do("store_init_configuration")

    def log(self, values, step=None, **kwargs) -> None:
        self._do("log")
        self.logged.append((step, values))

    def finish(self) -> None:
        self._do("finish")

    def _do(self, what: str) -> None:
        if what in self.fails:
            raise ConnectionError(f"no route to host\n{what}")


def test_a_tracker_that_fails_is_named_once_and_stops_nothing(tmp_path) -> None:
    stream, broken, well = io.StringIO(), Away(("log", "finish")), Away(name="well")
    with reporter(tmp_path, Recipe(), [broken, well], stream=stream) as tell:
        for update in (10, 20, 30):
            tell.train(update, loss=0.5, lr=1e-3, images=64)
    assert [step for step, _ in well.logged] == [10, 20, 30]
    assert stream.getvalue().count("the tracker away fails (no route to host)") == 1
    assert "tracker well" not in stream.getvalue()
    warnings = [line["text"] for line in read_run(tmp_path) if line["event"] == "warning"]
    assert len(warnings) == 1


def test_a_tracker_that_does_not_start_is_an_error_but_not_at_a_resume(tmp_path) -> None:
    broken, well = Away(("start",)), Away(name="well")
    with pytest.raises(
        RuntimeError, match=r"the tracker away does not start \(no route to host\); leave it out"
    ):
        reporter(tmp_path, Recipe(), [broken]).__enter__()
    AcceleratorState._reset_state(reset_partial_state=True)
    with reporter(tmp_path, Recipe(), [broken, well], start=10) as tell:
        tell.train(20, loss=0.5, lr=1e-3, images=64)
    assert broken.logged == []
    assert [step for step, _ in well.logged] == [20]


def test_a_resumed_run_keeps_its_identity(tmp_path, monkeypatch) -> None:
    given = []

    class FakeWandB(Away):
        name = "wandb"

        def __init__(self, project, **options) -> None:
            super().__init__(name="wandb")
            given.append((project, options))

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", FakeWandB)
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.WANDB])
    for start in (0, 50):
        AcceleratorState._reset_state(reset_partial_state=True)
        with reporter(tmp_path / "mine", Recipe(trackers=("wandb",)), start=start):
            pass
    (project, first), (_, second) = given
    assert project == "wellposed"
    assert first == second
    assert first["name"] == "mine"
    assert first["resume"] == "allow"
    assert len(first["id"]) == 32


@pytest.mark.parametrize("names", [(), ("none",)])
def test_no_trackers(names) -> None:
    assert tracker_names(Recipe(trackers=names)) == []


def test_names_are_checked_before_any_time_is_spent(monkeypatch) -> None:
    assert tracker_names(Recipe(trackers=("tensorboard", "tensorboard"))) == ["tensorboard"]
    with pytest.raises(ValueError, match="got 'tensorbord'; did you mean 'tensorboard'"):
        tracker_names(Recipe(trackers=("tensorbord",)))
    with pytest.raises(ValueError, match="none stands alone"):
        tracker_names(Recipe(trackers=("none", "tensorboard")))
    monkeypatch.setattr(tracking, "_available_trackers", [])
    with pytest.raises(ImportError, match="pip install tensorboard"):
        tracker_names(Recipe(trackers=("tensorboard",)))
    assert tracker_names(Recipe()) == []
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "away", Away)
    assert tracker_names(Recipe(trackers=("away",))) == ["away"]


def test_hyperparameters_are_flat_and_hold_no_password() -> None:
    values = flat(
        Recipe(data="wds:https://me:pw@host/a.tar", trackers=("a", "b"), edits=["gray_tokens eps=0.5"])
    )
    assert values["data"] == "wds:https://[hidden]@host/a.tar"
    assert values["trackers"] == "a, b"
    assert all(isinstance(value, (bool, int, float, str)) for value in values.values())
