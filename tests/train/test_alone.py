"""Two trainings never share a folder."""

import fcntl
import os
import shutil

import pytest

from short_runs import run
from wellposed.train import alone, fitting
from wellposed.train.loop import Loop


@pytest.fixture
def no_patience(monkeypatch) -> None:
    monkeypatch.setattr(fitting, "PATIENCE", 0.0)


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_training_is_refused_and_changes_nothing(tmp_path, monkeypatch, overwrite: bool) -> None:
    folder, seen = tmp_path / "run", []
    updating = Loop.update

    def beside(self, update, passes, sums):
        if update == 5:
            before = sorted(path.name for path in folder.rglob("*"))
            with pytest.raises(
                BlockingIOError, match=r"still works in .*run; wait for it, or choose another"
            ):
                run_beside()
            seen.append(sorted(path.name for path in folder.rglob("*")) == before)
        return updating(self, update, passes, sums)

    def run_beside() -> None:
        monkeypatch.setattr(Loop, "update", updating)
        run(folder, overwrite=overwrite)

    monkeypatch.setattr(Loop, "update", beside)
    assert run(folder).status == "finished"
    assert seen == [True]
    # Nobody holds it any more.
    assert run(folder, overwrite=True).status == "finished"


def test_it_waits_for_what_a_killed_training_has_left(tmp_path, monkeypatch) -> None:
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    monkeypatch.setattr(alone.time, "sleep", lambda seconds: os.close(held))
    with alone.alone_in(tmp_path, 15.0):
        pass


def test_without_locks_it_goes_on(tmp_path, monkeypatch) -> None:
    def unsupported(*args) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(alone.fcntl, "flock", unsupported)
    with alone.alone_in(tmp_path, 15.0):
        shutil.rmtree(tmp_path)
