import multiprocessing
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from train.batches.small_sets import EVERYTHING, MIXES, SIZE, batches, equal, files
from wellposed.train.augment import Augmentation
from wellposed.train.batches import Items, train_steps
from wellposed.train.data.images import ImageData, UnreadableImageError
from wellposed.train.order import Key, slot_positions
from wellposed.train.recipe import Recipe

POLICY = {**EVERYTHING, **MIXES, "color_jitter": 0.0, "auto_augment": "rand-m9-mstd0.5-inc1"}


def _streamed(data: ImageData, **options: Any) -> Any:
    return batches(data, **{"placement": "stream", "workers": 0, **options})[0]


def _state() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_without_augmentation_the_batches_are_those_of_resident_images(tmp_path: Path) -> None:
    data = files(tmp_path)
    train, test = batches(data, placement="stream", workers=0)
    resident, resident_test = batches(data, placement="device")
    assert (train.placement, resident.placement) == ("stream", "device")
    for (_, ours), (_, theirs) in zip(train.iterate(0, 4), resident.iterate(0, 4), strict=True):
        assert equal(ours, theirs)
    for ours, theirs in zip(test, resident_test, strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.equal(ours.weights, theirs.weights)


@pytest.mark.parametrize("options", [{**EVERYTHING, **MIXES}, POLICY], ids=["everything", "policy"])
def test_an_update_is_the_same_whenever_it_is_asked_for(tmp_path: Path, options: dict[str, Any]) -> None:
    train = _streamed(files(tmp_path), **options)
    run = dict(train.iterate(0, 5))
    assert list(run) == list(range(5))
    for update in (4, 0, 3, 3):
        assert equal(train.at(update), run[update])
    for update, passes in _streamed(files(tmp_path), **options).iterate(3, 5):
        assert equal(passes, run[update])
    assert not equal(run[0], run[1])


def test_workers_change_nothing_and_serve_one_iteration_after_the_other(tmp_path: Path) -> None:
    data = files(tmp_path)
    alone = dict(_streamed(data, accumulate=2, **POLICY).iterate(0, 6))
    before, state = set(multiprocessing.active_children()), _state()
    train = _streamed(data, accumulate=2, workers=2, **POLICY)
    for update, passes in train.iterate(1, 4):
        assert equal(passes, alone[update])
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2

    abandoned = train.iterate(0, 6)
    assert equal(next(abandoned)[1], alone[0])
    abandoned.close()
    # A scheduler stops all processes of a job at once; the training process decides what happens then.
    for name in ("-TERM", "-INT"):
        subprocess.run(["kill", name, *(str(worker.pid) for worker in workers)], check=True)
    assert [equal(passes, alone[update]) for update, passes in train.iterate(3, 6)] == [True] * 3
    assert set(multiprocessing.active_children()) - before == workers

    unfinished = train.iterate(0, 6)
    next(unfinished)
    train.close()
    assert set(multiprocessing.active_children()) == before
    with pytest.raises(RuntimeError, match=r"iterate\(\) was ended before update 1 by close\(\)"):
        next(unfinished)
    assert _state() == state


def test_two_iterations_at_once_are_refused(tmp_path: Path) -> None:
    train = _streamed(files(tmp_path))
    first, second = train.iterate(0, 4), train.iterate(2, 4)
    next(first)
    assert next(second)[0] == 2
    with pytest.raises(RuntimeError, match="another iterate"):
        next(first)
    assert next(second)[0] == 3


@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (2, 2)])
def test_processes_and_passes_together_make_the_same_update(
    tmp_path: Path, world: int, accumulate: int
) -> None:
    data = files(tmp_path)
    (whole,) = _streamed(data, **POLICY).at(3)
    images, labels = torch.empty_like(whole.images), torch.empty_like(whole.labels)
    for rank in range(world):
        passes = _streamed(data, rank=rank, world=world, accumulate=accumulate, **POLICY).at(3)
        for number, batch in enumerate(passes):
            positions = slot_positions(number * world + rank, world * accumulate, 8)
            images[positions], labels[positions] = batch.images, batch.labels
    assert torch.equal(images, whole.images)
    assert torch.equal(labels, whole.labels)


def test_a_start_in_the_middle_reads_nothing_before_it(tmp_path: Path) -> None:
    data = files(tmp_path)
    whole = dict(_streamed(data).iterate(0, 4))
    wanted = {key.image for key in _streamed(data).order.passes(1)[0].keys}
    for number in set(range(len(data.train))) - wanted:
        Path(data.train.name(number)).unlink()
    ((update, passes),) = _streamed(data).iterate(1, 2)
    assert update == 1
    assert equal(passes, whole[1])


def test_the_global_generators_stay_as_they_were(tmp_path: Path) -> None:
    state = _state()
    train, test = batches(files(tmp_path), placement="stream", workers=0, **POLICY)
    list(train.iterate(0, 2))
    train.at(1)
    list(test)
    assert _state() == state


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_named(tmp_path: Path, workers: int) -> None:
    data = files(tmp_path)
    Path(data.train.name(5)).write_bytes(b"no image")
    train = _streamed(data, workers=workers)
    with pytest.raises(UnreadableImageError, match=r"5\.png cannot be read: .*skip-unreadable\.$") as raised:
        list(train.iterate(0, 2 * train.updates_per_epoch))
    assert "Traceback" not in str(raised.value)
    train.close()


def test_what_is_drawn_for_an_image_depends_on_seed_epoch_and_position(tmp_path: Path) -> None:
    data = files(tmp_path)
    items = [_streamed(data, seed=seed, crop_scale=0.1).source.items for seed in (1, 1, 2)]
    keys = [Key(1, 5, 0), Key(1, 5, 0), Key(1, 5, 0), Key(1, 6, 0), Key(2, 5, 0)]
    first, same, *others = [one[key][0] for one, key in zip([*items, items[0], items[0]], keys, strict=True)]
    assert torch.equal(first, same)
    assert not any(torch.equal(first, other) for other in others)


def test_keys_hold_the_place_in_the_epoch(tmp_path: Path) -> None:
    train = _streamed(files(tmp_path), accumulate=2)
    keys = [key for update in (2, 3) for one in train.order.passes(update) for key in one.keys]
    assert sorted(key.position for key in keys) == list(range(16))
    assert {key.epoch for key in keys} == {1}
    assert len({key.image for key in keys}) == 16


def test_what_workers_have_done_is_not_done_again(tmp_path: Path) -> None:
    data = files(tmp_path)
    (plain,) = _streamed(data).at(0)
    (mirrored,) = _streamed(data, flip=1.0).at(0)
    assert torch.equal(mirrored.images, plain.images.flip(-1))
    train = _streamed(data, **EVERYTHING)
    assert train.augmentation == Augmentation(shift=2, erase=0.5)


def test_items_can_be_sent_to_another_process(tmp_path: Path) -> None:
    items = _streamed(files(tmp_path), **POLICY).source.items
    key = Key(1, 2, 3)
    again = pickle.loads(pickle.dumps(items))
    assert torch.equal(again[key][0], items[key][0])


@pytest.mark.parametrize(
    ("policy", "mode"),
    [("rand-m10-inc1", "L"), ("rand-m10-inc1", "RGB"), ("v0", "L"), ("v0", "RGB"), ("augmix-m10", "RGB")],
)
def test_strong_policies_leave_a_picture(policy: str, mode: str) -> None:
    channels = len(mode) if mode == "RGB" else 1
    recipe = Recipe(auto_augment=policy, crop_scale=0.5)
    (step,) = train_steps(recipe, SIZE, (0.5,) * channels)
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels).convert(mode)

    class One:
        labels = np.zeros(1, np.int64)

        def __len__(self) -> int:
            return 1

        def picture(self, index: int) -> Image.Image:
            return picture

    items = Items(One(), (step,), 0)  # type: ignore[arg-type]
    for position in range(150):
        made = items[Key(0, position, 0)][0]
        assert made.shape == (channels, SIZE, SIZE)
        assert made.dtype == torch.uint8


LEFT_BEHIND = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from train.batches.small_sets import batches, files
train, test = batches(files(Path({folder!r})), placement="stream", workers=2)
run = train.iterate(0, 8)
next(run)
tests = iter(test)
next(tests)
raise SystemExit(7)
"""


def test_a_process_that_leaves_in_the_middle_ends_in_silence(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[2])
    code = LEFT_BEHIND.format(tests=tests, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "")
