import numpy as np
import pytest
import torch
from timm.data import Mixup

from train.batches.small_sets import MIXES, arrays, batches, equal
from wellposed.train.augment import Mixing
from wellposed.train.order import Purpose, sequence


def _pass() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (8,), generator=generator)
    return torch.randn(8, 3, 12, 12, generator=generator), labels


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_it_is_timms_mixup_with_the_seed_of_the_update(mixup: float, cutmix: float) -> None:
    mixing = Mixing(mixup, cutmix, 0.1, classes=5, seed=4)
    reference = Mixup(mixup, cutmix, label_smoothing=0.1, num_classes=5)
    seen = set()
    for update in range(6):
        images, labels = mixing(update, *_pass())
        np.random.seed(sequence(4, Purpose.MIX, update).generate_state(4))
        expected_images, expected_labels = reference(*_pass())
        assert torch.equal(images, expected_images)
        assert torch.equal(labels, expected_labels)
        seen.add(float(labels[0].max()))
    assert len(seen) > 3


def test_some_updates_stay_unmixed() -> None:
    mixing = Mixing(0.8, 1.0, 0.1, classes=5, seed=4, probability=0.5)
    images, labels = _pass()
    smooth = Mixing(0, 0, 0.1, classes=5, seed=4)(0, images, labels)[1]
    always = Mixing(0.8, 1.0, 0.1, classes=5, seed=4)
    unmixed = 0
    for update in range(40):
        got_images, got_labels = mixing(update, *_pass())
        if torch.equal(got_images, images):
            unmixed += 1
            torch.testing.assert_close(got_labels, smooth)
        else:
            assert torch.equal(got_images, always(update, *_pass())[0])
    assert 10 < unmixed < 30


def test_smoothing_alone_makes_soft_labels() -> None:
    images, labels = _pass()
    same, soft = Mixing(0, 0, 0.2, classes=5, seed=0)(0, images.clone(), labels)
    assert torch.equal(same, images)
    assert torch.equal(soft.argmax(1), labels)
    torch.testing.assert_close(soft.sum(1), torch.ones(8))
    torch.testing.assert_close(soft.max(1).values, torch.full((8,), 0.84))


def test_without_either_the_labels_stay_numbers() -> None:
    images, labels = _pass()
    same, hard = Mixing(0, 0, 0, classes=5, seed=0)(0, images, labels)
    assert same is images
    assert hard is labels


def test_numpys_generator_stays_as_it_was() -> None:
    np.random.seed(1)
    expected = np.random.rand()
    np.random.seed(1)
    Mixing(0.8, 1.0, 0, classes=5, seed=0)(0, *_pass())
    assert np.random.rand() == expected


def test_mixing_changes_from_update_to_update_only() -> None:
    train, _ = batches(arrays(), **MIXES)
    assert equal(train.at(5), train.at(5))
    assert not torch.equal(train.at(5)[0].labels, train.at(6)[0].labels)
