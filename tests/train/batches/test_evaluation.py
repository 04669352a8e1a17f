from pathlib import Path

import pytest
import torch

from train.batches.small_sets import MEAN, STD, arrays, batches, files
from wellposed.train.batches import shares


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("images", [1, 5, 12, 13])
def test_every_image_once_and_every_process_as_many_batches(images: int, world: int) -> None:
    parts = [shares(images, 2, rank, world) for rank in range(world)]
    assert len({indices.shape for indices, _ in parts}) == 1
    seen = [
        int(i) for indices, weights in parts for i, w in zip(indices.flat, weights.flat, strict=True) if w
    ]
    assert sorted(seen) == list(range(images))
    assert all(indices.max() < images for indices, _ in parts)


@pytest.mark.parametrize("placement", ["device", "stream"])
def test_the_test_images_come_in_order_with_weights_that_sum_to_their_number(placement: str) -> None:
    data = arrays()
    _, test = batches(data, placement=placement, workers=0, flip=0.5, crop_padding=2, mixup=1.0)
    found = list(test)
    assert len(found) == len(test) == 2
    assert test.images == 11
    assert all(batch.images.shape == (8, 3, 8, 8) for batch in found)
    weights = torch.cat([batch.weights for batch in found])
    assert weights.sum() == 11
    pixels = torch.from_numpy(data.test.pixels.copy()).permute(0, 3, 1, 2) / 255
    expected = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(torch.cat([batch.images for batch in found])[weights > 0], expected)
    assert torch.cat([batch.labels for batch in found])[weights > 0].tolist() == data.test.labels.tolist()


def test_processes_share_the_images() -> None:
    found = [list(batches(arrays(), rank=rank, world=2)[1]) for rank in range(2)]
    assert [len(part) for part in found] == [2, 2]
    assert [batch.weights.sum().item() for part in found for batch in part] == [4, 3, 4, 0]


def test_workers_read_the_same(tmp_path: Path) -> None:
    data = files(tmp_path)
    alone, workers = (list(batches(data, placement="stream", workers=count)[1]) for count in (0, 2))
    for ours, theirs in zip(workers, alone, strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)


def test_unreadable_resident_images_are_counted_and_named(tmp_path: Path) -> None:
    data = files(tmp_path)
    Path(data.train.name(5)).write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"1 of 21 images .*5\.png"):
        batches(data)
