"""Two trainings never share a folder."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from short_runs import recipe, run
from wellposed import files as alone
from wellposed.train import fitting
from wellposed.train.fitting import open_folder
from wellposed.train.loop import Loop
from wellposed.train.recipe import write_recipe


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


def test_a_lock_of_a_folder_that_was_replaced_is_none(tmp_path, monkeypatch) -> None:
    """Two --overwrite at once: the one that waited had the old folder, and deleted the new one at work."""
    folder = tmp_path / "run"
    folder.mkdir()
    old = os.open(folder, os.O_RDONLY)
    fcntl.flock(old, fcntl.LOCK_EX)

    def replaced(seconds: float) -> None:
        if folder.stat().st_ino == os.fstat(old).st_ino:
            folder.rename(tmp_path / "aside")
            folder.mkdir()
            fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
            fcntl.flock(old, fcntl.LOCK_UN)

    monkeypatch.setattr(alone.time, "sleep", replaced)
    with pytest.raises(BlockingIOError, match="still works in"), alone.alone_in(folder, 0.5):
        pass


class Killed(BaseException):
    """At a moment of a test's choice."""


def test_overwriting_that_is_killed_leaves_no_finished_run(tmp_path, monkeypatch) -> None:
    """Nor a folder that nobody can train in."""
    given = recipe()
    for moment in range(1, 20):  # before the first nothing is deleted
        folder = tmp_path / str(moment)
        for name in ("best/model.safetensors", "checkpoints/update-00000012/state.json", "run.jsonl"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        write_recipe(given, folder / "recipe.toml")
        (folder / "result.json").write_text('{"finished": true}')
        left = moment

        def dying(kill_before):
            def call(*arguments, **options):
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return kill_before(*arguments, **options)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", dying(Path.unlink))
            patch.setattr(shutil, "rmtree", dying(shutil.rmtree))
            try:
                open_folder(folder, given, overwrite=True)
                ended = True
            except Killed:
                ended = False
        assert open_folder(folder, given, overwrite=False) is None
        if ended:
            assert [path.name for path in folder.iterdir()] == ["recipe.toml"]
            return
    raise AssertionError("it never came to its end")


def test_a_kill_before_the_first_file_does_not_block_the_folder(tmp_path) -> None:
    left = tmp_path / ".recipe.toml.123.tmp"
    left.touch()
    assert open_folder(tmp_path, recipe(), overwrite=False) is None
    assert not left.exists()


def test_without_locks_it_goes_on(tmp_path, monkeypatch) -> None:
    def unsupported(*args) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(alone.fcntl, "flock", unsupported)
    with alone.alone_in(tmp_path, 15.0):
        shutil.rmtree(tmp_path)
