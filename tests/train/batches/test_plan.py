import dataclasses

import numpy as np

from wellposed.train.augment import (
    CROP,
    ERASE,
    FLIP,
    JITTER,
    NOISE,
    NOISE_STARTS,
    SHIFT,
    Augmentation,
    draw,
    windows,
)

FULL = Augmentation(flip=0.3, shift=2, crop_scale=0.2, jitter=0.4, erase=0.6)


def test_a_plan_depends_on_seed_and_update_only() -> None:
    plan = draw(FULL, 1, 7, 64, 16)
    assert (draw(FULL, 1, 7, 64, 16) == plan).all()
    assert (draw(FULL, 1, 8, 64, 16) != plan).any()
    assert (draw(FULL, 2, 7, 64, 16) != plan).any()


def test_switching_one_augmentation_off_leaves_the_others() -> None:
    plan = draw(FULL, 1, 7, 64, 16)
    columns = {"flip": [FLIP], "shift": [1, 2], "jitter": [7, 8, 9], "erase": [10, 11, 12, 13, 14]}
    for name, its_own in columns.items():
        without = draw(dataclasses.replace(FULL, **{name: 0}), 1, 7, 64, 16)
        others = np.setdiff1d(np.arange(17), its_own)
        assert (without[:, others] == plan[:, others]).all()
        assert (without[:, its_own] == 0).all()


def test_shares_and_ranges() -> None:
    plan = draw(FULL, 0, 0, 20_000, 16)
    assert abs(plan[:, FLIP].mean() - 0.3) < 0.02
    counts = [np.unique(column, return_counts=True) for column in plan[:, SHIFT].T]
    for shifts, count in counts:
        assert shifts.tolist() == [-2, -1, 0, 1, 2]
        assert (abs(count / 20_000 - 0.2) < 0.02).all()
    top, left, height, width = plan[:, CROP].T
    area = height * width
    assert 0.2 <= area.min() < 0.21
    assert 0.99 < area.max() <= 1
    assert (top >= 0).all()
    assert (top + height <= 1 + 1e-6).all()
    assert (left + width <= 1 + 1e-6).all()
    assert abs(area.mean() - 0.6) < 0.01
    assert (np.abs(np.log(width / height)) <= np.log(4 / 3) + 1e-5).all()
    assert 0.6 <= plan[:, JITTER].min() < 0.61
    assert 1.39 < plan[:, JITTER].max() <= 1.4
    assert plan[:, NOISE].min() >= 0
    assert plan[:, NOISE].max() < NOISE_STARTS


def test_rectangles_lie_inside_and_are_as_frequent_as_asked() -> None:
    plan = draw(FULL, 0, 0, 20_000, 16)
    top, left, bottom, right = plan[:, ERASE].T
    chosen = bottom > top
    assert abs(chosen.mean() - 0.6) < 0.02
    assert ((right > left) == chosen).all()
    assert (plan[:, ERASE] == np.rint(plan[:, ERASE])).all()
    assert plan[:, ERASE].min() >= 0
    assert plan[:, ERASE].max() == 16
    share = ((bottom - top) * (right - left) / 256)[chosen]
    assert abs(share.mean() - (0.02 + 1 / 3) / 2) < 0.01
    # Small ones too reach all four edges.
    for start, end in ((top, bottom), (left, right)):
        small = chosen & (end - start <= 4)
        assert (start[small].min(), end[small].max()) == (0, 16)


def test_a_window_of_area_one_is_the_whole_square() -> None:
    uniforms = np.random.default_rng(0).random((4, 100))
    assert (windows(uniforms, (1.0, 1.0), 4 / 3).T == [0, 0, 1, 1]).all()
