"""Killed at any moment, without power at any moment, with a full disk: the newest checkpoint is whole.

Children die by SIGKILL before every call that changes the disk, and after the last. For a loss of power they
first undo what was not synced: half of each such file is lost, and each such rename.
"""

import errno
import os
import resource
import shutil
import signal
import traceback
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from wellposed.train import checkpoint as durable
from wellposed.train import checkpoint as manifest
from wellposed.train.checkpoint import Checkpoint, CheckpointError, Store

CALLS = ("mkdir", "chmod", "fsync", "rename", "unlink", "rmdir")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on real syncing, which is slow."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def tensors(seed: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"a": torch.randn(50, 60, generator=generator)},
        "optimizer": {"a/exp_avg": torch.randn(100, 60, generator=generator)},
    }


def save(store: Store, update: int, seed: int) -> None:
    store.save(update, tensors(seed), {"seed": seed, "long": "x" * 40_000})


def which(checkpoint: Checkpoint | None) -> int | None:
    """The seed of a checkpoint, all of whose tensors are as they were saved."""
    if checkpoint is None:
        return None
    seed = checkpoint.state["seed"]
    for stem, expected in tensors(seed).items():
        got = checkpoint.tensors(stem)
        assert all(torch.equal(got[name], value) for name, value in expected.items())
        assert got.keys() == expected.keys()
    return seed


class Crash:
    """Ends this process before the n-th call that changes the disk."""

    def __init__(self, folder: Path, moment: int, power_loss: bool) -> None:
        self.folder, self.left, self.power_loss = folder, moment, power_loss
        self.synced = {path.stat().st_ino for path in folder.rglob("*")}
        self.renamed: list[tuple[Path, Path]] = []
        self.rename = os.rename
        for name in CALLS:
            setattr(os, name, self.watched(name, getattr(os, name)))
        durable.save_file = self.watched("save_file", durable.save_file)

    def watched(self, name: str, call: Callable) -> Callable:
        def watching(*args, **options):
            self.moment()
            if name == "rename":
                self.renamed.append(args)
            if name == "fsync":
                number = os.fstat(args[0]).st_ino
                self.synced.add(number)
                self.renamed = [pair for pair in self.renamed if pair[1].parent.stat().st_ino != number]
            return call(*args, **options)

        return watching

    def moment(self) -> None:
        self.left -= 1
        if self.left >= 0:
            return
        if self.power_loss:
            for path in self.folder.rglob("*"):
                if path.is_file() and path.stat().st_ino not in self.synced:
                    os.truncate(path, path.stat().st_size // 2)
            for source, target in reversed(self.renamed):
                if target.exists():
                    self.rename(target, source)
        os.kill(os.getpid(), signal.SIGKILL)


def in_child(work: Callable[[], None]) -> int:
    """The signal or exit code that a fork ended with; negative for signals."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def prepare_older(folder: Path) -> None:
    """Two older checkpoints, of which one must go, and what earlier deaths may have left."""
    store = Store(folder, keep=2)
    save(store, 1, seed=1)
    save(store, 2, seed=2)
    shutil.copytree(folder / "update-00000001", folder / ".deleted-update-00000000")
    (folder / ".deleted-update-00000000" / "manifest.json").unlink()
    shutil.copytree(folder / "update-00000001", folder / ".staging-update-00000002-99")


def prepare_same(folder: Path) -> None:
    """The update that is saved is there already, alone."""
    save(Store(folder), 3, seed=2)


SCENES = {
    # name: (what is there, keep, the seed that is newest before)
    "older ones": (prepare_older, 2, 2),
    "keep one": (prepare_older, 1, 2),
    "the same": (prepare_same, 1, 2),
    "none": (lambda folder: folder.mkdir(), 1, None),
}


@pytest.mark.parametrize("power_loss", [False, True], ids=["killed", "without power"])
@pytest.mark.parametrize("scene", SCENES)
def test_dead_at_any_moment(tmp_path: Path, scene: str, power_loss: bool) -> None:
    prepare, keep, before = SCENES[scene]
    prepare(tmp_path / "origin")
    seen: list[int | None] = []
    while True:
        folder = tmp_path / "run"
        shutil.copytree(tmp_path / "origin", folder)

        def work(folder: Path = folder) -> None:
            crash = Crash(folder, len(seen), power_loss)
            save(Store(folder, keep), 3, seed=3)
            crash.moment()

        code = in_child(work)
        store = Store(folder, keep)
        seed = which(store.newest())
        assert seed in (before, 3), f"moment {len(seen)}: {os.listdir(folder)}"
        if not power_loss:
            assert store.passed_over == []
            for path in folder.glob("update-*"):  # also the one that is being deleted
                manifest.verified_files(path, int(path.name.removeprefix("update-")))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        seen.append(seed)

        save(store, 4, seed=4)  # the next start goes on, and nothing is left behind
        assert which(store.newest()) == 4
        expected = (
            ["update-00000003", "update-00000004"] if seed == 3 else ["update-00000002", "update-00000004"]
        )
        if scene == "the same":
            expected[0] = "update-00000003"
        elif seed is None:
            expected = expected[1:]
        assert sorted(os.listdir(folder)) == expected[-keep:]
        shutil.rmtree(folder)
    assert seed == 3
    assert seen[0] == before
    assert seen[-1] == 3
    assert seen == sorted(seen, key=lambda item: item == 3), "once the new one is there, it stays"
    assert len(seen) > 10


def test_dead_in_the_middle_of_a_file(tmp_path: Path) -> None:
    save(Store(tmp_path), 2, seed=2)
    whole = durable.save_file

    def half(content: dict[str, Tensor], path: Path) -> None:
        whole(content, path)
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        durable.save_file = half
        save(Store(tmp_path), 3, seed=3)

    assert in_child(work) == -signal.SIGKILL
    store = Store(tmp_path)
    assert any(name.startswith(".staging") for name in os.listdir(tmp_path))
    assert which(store.newest()) == 2
    save(store, 3, seed=3)
    assert sorted(os.listdir(tmp_path)) == ["update-00000002", "update-00000003"]


SIZES = {"model.safetensors": 12_000, "optimizer.safetensors": 24_000, "state.json": 40_000}


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("name", SIZES)
def test_the_kernel_refuses_a_file(tmp_path: Path, name: str, share: float) -> None:
    """A limit on the size of files stands for a full disk: the kernel breaks off in the middle of one."""
    store = Store(tmp_path / "run")
    save(store, 2, seed=2)
    before = [size for size in SIZES.values() if size < SIZES[name]]
    lowest = max(before, default=0) + 1_000  # with the header; files before this one still fit
    limit = int(lowest + share * (SIZES[name] - lowest))

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(CheckpointError) as error:
            save(Store(tmp_path / "run"), 3, seed=3)
        (tmp_path / "message").write_text(str(error.value))

    assert in_child(work) == 0
    message = (tmp_path / "message").read_text()
    assert f"could not write the checkpoint of update 3 ({name}: " in message
    assert "File too large" in message
    assert f"{store.folder / 'update-00000002'} is still whole" in message
    assert which(store.newest()) == 2
    assert os.listdir(store.folder) == ["update-00000002"]
    save(store, 3, seed=3)
    assert which(store.newest()) == 3


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("scene", ["older ones", "the same", "none"])
@pytest.mark.parametrize(
    ("call", "stays_full"),
    [
        ("mkdir", True),
        ("fsync", True),
        ("fsync", False),
        ("rename", True),
        ("rename", False),
        ("save_file", True),
    ],
)
def test_the_disk_is_full_at_any_call(
    tmp_path: Path, monkeypatch, call: str, stays_full: bool, scene: str
) -> None:
    prepare, keep, before = SCENES[scene]
    prepare(tmp_path / "origin")
    place = durable if call == "save_file" else os
    real = getattr(place, call)
    failures = 0
    while True:
        folder = tmp_path / "run"
        shutil.copytree(tmp_path / "origin", folder)
        left = [failures]

        def full(*args, left: list[int] = left, **options):
            left[0] -= 1
            if left[0] == -1 or (left[0] < 0 and stays_full):
                raise FULL
            return real(*args, **options)

        store = Store(folder, keep=keep + 1)
        with monkeypatch.context() as patched:
            patched.setattr(place, call, full)
            try:
                save(store, 3, seed=3)
                break
            except CheckpointError as error:
                message = str(error)
        failures += 1
        seed = which(store.newest())
        assert seed in (before, 3)
        assert "No space left on device" in message
        assert (
            f"{store.newest().path} is still whole" if seed else "there is no whole one before"
        ) in message
        if call in ("mkdir", "save_file"):
            assert seed == before
        hidden = [name for name in os.listdir(folder) if name.startswith(".")]
        assert not any(name.startswith(".staging-update-00000003") for name in hidden)
        assert stays_full or not hidden
        save(store, 4, seed=4)
        assert which(store.newest()) == 4
        assert not [name for name in os.listdir(folder) if name.startswith(".")]
        shutil.rmtree(folder)
    assert which(store.newest()) == 3
    assert failures == {"mkdir": 2, "save_file": 2, "fsync": 6, "rename": 1}[call] + (
        {"rename": 1, "fsync": 1}.get(call, 0) if scene == "the same" else 0
    )


def test_too_little_space_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch) -> None:
    store = Store(tmp_path)
    save(store, 2, seed=2)
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5_000, 5_000))
        patched.setattr(durable, "write_tensors", None)
        patched.setattr(durable, "write_bytes", None)
        with pytest.raises(CheckpointError) as error:
            save(store, 3, seed=3)
    needed = 12_000 + 24_000 + 40_000
    assert "there is not enough space" in str(error.value)
    assert "5,000 are free" in str(error.value)
    told = int(str(error.value).split("It needs ")[1].split(" bytes")[0].replace(",", ""))
    assert needed < told < needed + 1_000
    assert os.listdir(tmp_path) == ["update-00000002"]
    save(store, 3, seed=3)
    assert which(store.newest()) == 3


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(CheckpointError, match=r"update 1 \(its folder: .*no whole one before it"):
            save(Store(folder), 1, seed=1)


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    store = Store(tmp_path)
    save(store, 2, seed=2)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(durable, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(store, 3, seed=3)
    assert os.listdir(tmp_path) == ["update-00000002"]
