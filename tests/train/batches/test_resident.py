import random
from typing import Any

import numpy as np
import pytest
import torch

from train.batches.small_sets import EVERYTHING, MEAN, MIXES, SIZE, STD, arrays, batches, equal
from wellposed.train.batches import upload
from wellposed.train.order import permutation, slot_positions


def _state() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_plain_batches_are_the_images_in_order() -> None:
    data = arrays()
    train, _ = batches(data)
    assert train.placement == "device"
    assert train.updates_per_epoch == 4
    for update, (batch,) in train.iterate(3, 6):
        epoch, step = divmod(update, 4)
        chosen = permutation(37, 3, epoch)[8 * step : 8 * step + 8]
        pixels = torch.from_numpy(data.train.pixels[chosen]).permute(0, 3, 1, 2) / 255
        expected = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
        torch.testing.assert_close(batch.images, expected)
        assert batch.images.dtype == torch.float32
        assert batch.labels.tolist() == data.train.labels[chosen].tolist()
        assert batch.labels.dtype == torch.int64


@pytest.mark.parametrize("options", [{}, {**EVERYTHING, **MIXES}], ids=["plain", "everything"])
def test_an_update_is_the_same_whenever_it_is_asked_for(options: dict[str, Any]) -> None:
    train, _ = batches(arrays(), **options)
    run = dict(train.iterate(0, 9))
    assert list(run) == list(range(9))
    for update in (8, 0, 5, 5, 3, 7):
        assert equal(train.at(update), run[update])
    resumed, _ = batches(arrays(), **options)
    for update, passes in resumed.iterate(5, 9):
        assert equal(passes, run[update])


def test_every_augmentation_changes_the_images() -> None:
    data = arrays()
    (plain,) = batches(data)[0].at(2)
    for name, value in {**EVERYTHING, **MIXES}.items():
        (batch,) = batches(data, **{name: value})[0].at(2)
        changed = not torch.equal(batch.images, plain.images)
        assert changed == (name != "smoothing")
        assert (batch.labels.ndim == 2) == (name in ("smoothing", "mixup", "cutmix"))


@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (1, 2), (2, 2), (1, 4)])
def test_processes_and_passes_together_make_the_same_update(world: int, accumulate: int) -> None:
    data, slots = arrays(), world * accumulate
    (whole,) = batches(data, **EVERYTHING, **MIXES)[0].at(6)
    images, labels = torch.empty_like(whole.images), torch.empty_like(whole.labels)
    for rank in range(world):
        options = {"rank": rank, "world": world, "accumulate": accumulate, **EVERYTHING, **MIXES}
        passes = batches(data, **options)[0].at(6)
        assert len(passes) == accumulate
        for number, batch in enumerate(passes):
            positions = slot_positions(number * world + rank, slots, 8)
            images[positions], labels[positions] = batch.images, batch.labels
    assert torch.equal(images, whole.images)
    assert torch.equal(labels, whole.labels)


def test_odd_passes_make_the_same_update_without_mixing() -> None:
    data = arrays()
    (whole,) = batches(data, batch_size=6, **EVERYTHING)[0].at(3)
    passes = batches(data, batch_size=6, accumulate=2, **EVERYTHING)[0].at(3)
    assert torch.equal(torch.cat([batch.images for batch in passes]), whole.images)
    assert torch.equal(torch.cat([batch.labels for batch in passes]), whole.labels)


def test_seeds_differ() -> None:
    assert not equal(batches(arrays())[0].at(0), batches(arrays(), seed=4)[0].at(0))


def test_one_channel() -> None:
    train, test = batches(arrays(channels=1), **EVERYTHING, **MIXES)
    assert train.at(0)[0].images.shape == (8, 1, SIZE, SIZE)
    assert next(iter(test)).images.shape == (8, 1, SIZE, SIZE)


def test_the_global_generators_stay_as_they_were() -> None:
    before = _state()
    train, test = batches(arrays(), **EVERYTHING, **MIXES)
    list(train.iterate(0, 5))
    list(test)
    assert _state() == before


def test_a_span_that_runs_backwards_is_refused() -> None:
    train, _ = batches(arrays())
    assert list(train.iterate(4, 4)) == []
    with pytest.raises(ValueError, match="expected 0 <= start <= stop, got start=5 and stop=4"):
        list(train.iterate(5, 4))


def test_what_a_batch_holds_is_its_own() -> None:
    train, _ = batches(arrays())
    first = train.at(0)[0].images.clone()
    train.at(0)[0].images.zero_()
    assert torch.equal(train.at(0)[0].images, first)


def test_an_array_that_may_not_be_written_is_copied() -> None:
    array = np.arange(6)
    array.flags.writeable = False
    upload(array, torch.device("cpu")).zero_()
    assert array.tolist() == [0, 1, 2, 3, 4, 5]
