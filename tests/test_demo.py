"""The demo measures what it prints."""

import statistics
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from wellposed import demo
from wellposed.cli import app


@pytest.fixture(scope="module")
def data() -> demo.Digits:
    return demo.load_digits(0)


def test_the_split_keeps_train_and_test_apart(data: demo.Digits) -> None:
    assert (len(data.train_x), len(data.test_x)) == (1397, 400)
    assert set(data.test_y.tolist()) == set(range(10))
    other = demo.load_digits(1)
    assert not torch.equal(other.test_x, data.test_x)


def test_a_little_training_beats_guessing_and_repeats(data: demo.Digits) -> None:
    results = []
    for _ in range(2):
        model = demo.build_model(0)
        losses = list(demo.train(model, data, 3, seed=0))
        results.append((losses, demo.accuracy(model, data)))
    assert results[0] == results[1]
    assert results[0][0][-1] < results[0][0][0]
    assert results[0][1] > 0.3


def test_kappa_is_that_of_the_tokens(data: demo.Digits) -> None:
    images = data.test_x[:8]
    model = demo.build_model(0).eval()
    caught: list[torch.Tensor] = []
    handle = model.blocks[0].register_forward_pre_hook(lambda block, args: caught.append(args[0]))
    model(images)
    handle.remove()
    expected = statistics.median(torch.linalg.cond(caught[0].double()).tolist())
    assert demo.measure(model, images)["kappa_in"].value == pytest.approx(expected)


def test_the_command_prints_a_row_for_each_variant() -> None:
    result = CliRunner().invoke(app, ["demo", "--epochs", "1"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for name, _ in demo.VARIANTS:
        assert name in result.output
    assert "1397 training and 400 test images" in result.output


def test_help_needs_no_torch() -> None:
    code = "import sys; import wellposed.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_there() -> None:
    import wellposed as wp

    for name in wp.__all__:
        assert getattr(wp, name) is not None
    assert set(dir(wp)) == set(wp.__all__)
    with pytest.raises(AttributeError, match="no attribute 'grey_tokens'"):
        _ = wp.grey_tokens
