"""The embedded digits as tensors, and the small ViT for them."""

import torch

from wellposed.digits import build_model, load_digits


def test_the_split_keeps_train_and_test_apart_and_follows_the_seed() -> None:
    data, other = load_digits(0), load_digits(1)
    assert (len(data.train_x), len(data.test_x)) == (1397, 400)
    assert set(data.test_y.tolist()) == set(range(10))
    assert not torch.equal(other.test_x, data.test_x)


def test_the_same_seed_builds_the_same_model() -> None:
    first, again, other = (build_model(seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.mlp.fc1.weight"], other["blocks.0.mlp.fc1.weight"])
