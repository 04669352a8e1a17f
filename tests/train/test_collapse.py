"""A run whose accuracy has fallen and stays down ends early, if it is told to."""

import pytest

from short_runs import run, weights
from wellposed.run_records import read_run
from wellposed.train import Recipe
from wellposed.train.loop import Loop
from wellposed.train.model import Tested as Found


def epochs_tested(folder) -> list[int]:
    return [line["epoch"] for line in read_run(folder) if line["event"] == "test"]


@pytest.fixture
def accuracies(monkeypatch):
    """Sets what the tests find, by epoch; the weights are trained all the same."""
    found: list[float] = []

    def test(self, forward, module) -> Found:
        epoch = self.progress.update // self.train.updates_per_epoch
        return Found(1.0, found[epoch - 1], 10)

    monkeypatch.setattr(Loop, "_test", test)
    return found


@pytest.mark.parametrize(
    ("told", "patience", "last"),
    [
        ((0.8, 0.39, 0.39, 0.8, 0.8, 0.8), 2, 3),
        ((0.8, 0.39, 0.41, 0.39, 0.41, 0.39), 2, 6),  # never twice in a row
        ((0.8, 0.4, 0.4, 0.4, 0.4, 0.4), 1, 6),  # half is not less than half
        ((0.8, 0.1, 0.1, 0.1, 0.1, 0.1), 0, 6),
        ((0.8, 0.7, 0.7, 0.7, 0.1, 0.1), 2, 6),  # the last test: it has come to its end
        ((0.1, 0.1, 0.1, 0.1, 0.1, 0.1), 1, 6),  # what has learnt nothing has nothing to lose
    ],
)
def test_it_ends_after_so_many_low_tests_in_a_row(tmp_path, accuracies, told, patience, last) -> None:
    accuracies.extend(told)
    result = run(tmp_path, epochs=6, collapse_patience=patience)
    assert result.status == "finished"
    assert epochs_tested(tmp_path)[-1] == last
    assert result.summary["collapsed"] is (last < 6)
    assert result.accuracy == told[last - 1]
    assert (tmp_path / "last" / "model.safetensors").is_file()


def test_a_resumed_run_remembers_and_a_finished_one_stays_so(tmp_path, accuracies, monkeypatch) -> None:
    accuracies.extend([0.8, 0.1, 0.1, 0.1, 0.1, 0.1])
    told = Loop._report_collapse

    def killed(self) -> None:
        self.save()
        raise KeyboardInterrupt

    monkeypatch.setattr(Loop, "_report_collapse", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, epochs=6, collapse_patience=2)
    monkeypatch.setattr(Loop, "_report_collapse", told)
    result = run(tmp_path, epochs=6, collapse_patience=2)
    assert (result.status, epochs_tested(tmp_path)) == ("finished", [1, 2, 3])
    ended = weights(tmp_path)
    again = run(tmp_path, epochs=6, collapse_patience=2)
    assert again.summary["updates"] == result.summary["updates"]
    assert all((weights(tmp_path)[name] == value).all() for name, value in ended.items())


def test_pretraining_has_no_accuracy_to_lose() -> None:
    with pytest.raises(ValueError, match="no accuracy"):
        Recipe(task="mae", collapse_patience=1)
