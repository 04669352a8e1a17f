import numpy as np
import pytest

from wellposed.train.order import Order, permutation, slot_positions


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 6, 12])
def test_slots_partition_the_batch_and_are_ascending(slots: int) -> None:
    cut = [slot_positions(slot, slots, 12) for slot in range(slots)]
    assert sorted(np.concatenate(cut)) == list(range(12))
    assert all(len(part) == 12 // slots and (np.diff(part) > 0).all() for part in cut)


@pytest.mark.parametrize("slots", [1, 2, 3, 6])
def test_even_slots_hold_mirrored_pairs(slots: int) -> None:
    for slot in range(slots):
        positions = slot_positions(slot, slots, 12)
        assert (positions + positions[::-1] == 11).all()


def test_odd_slots_are_contiguous() -> None:
    assert [slot_positions(slot, 4, 12).tolist() for slot in range(4)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
    ]


def test_permutations_differ_by_epoch_and_seed() -> None:
    orders = [permutation(50, *where).tolist() for where in [(0, 0), (0, 1), (1, 0), (0, 0)]]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] == orders[3]
    assert len({tuple(order) for order in orders}) == 3


def test_an_epoch_visits_each_image_at_most_once_over_all_processes() -> None:
    orders = [Order(37, 12, accumulate=3, rank=rank, world=2, seed=1) for rank in range(2)]
    taken = np.concatenate([order.table(4).ravel() for order in orders])
    assert len(taken) == len(set(taken.tolist())) == 36
    assert orders[0].updates_per_epoch == 3
    assert orders[0].place(7) == (2, 1)


def test_an_update_is_a_stretch_of_the_permutation() -> None:
    order = Order(37, 12, accumulate=2, rank=1, world=3, seed=1)
    expected = permutation(37, 1, 5)[12:24]
    for one_pass in range(2):
        positions = slot_positions(one_pass * 3 + 1, 6, 12)
        assert order.table(5)[1, one_pass].tolist() == expected[positions].tolist()
