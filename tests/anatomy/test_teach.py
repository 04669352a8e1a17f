"""Teaching the library one's own classes, and what it says of models it does not know."""

import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import wellposed as wp
from own_model import OwnBlock, OwnModel, OwnPatches
from wellposed.anatomy import Add, BlockRow, EmbeddingRow, after, families, taps, teach, verify
from wellposed.anatomy.table import BLOCKS, EMBEDDINGS


@pytest.fixture
def taught():
    blocks, embeddings = dict(BLOCKS), dict(EMBEDDINGS)
    teach(
        OwnBlock,
        BlockRow(
            family="own",
            adds=(Add("attention", skip="x"), Add("ffn", skip="x")),
            taps=taps(attention=after("mix"), mlp="ff", last_linear="ff.out"),
        ),
    )
    teach(OwnPatches, EmbeddingRow("own", patch_convolution="conv"))
    yield OwnModel().eval()
    for table, before in ((BLOCKS, blocks), (EMBEDDINGS, embeddings)):
        table.clear()
        table.update(before)


IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_an_unknown_model_is_told_what_is_known_and_how_to_teach() -> None:
    with pytest.raises(wp.UnknownModelError) as error:
        wp.gray_tokens(OwnModel())
    message = str(error.value)
    assert "OwnModel" in message
    assert "teach(MyBlock, BlockRow(" in message
    for family in families():
        assert family in message


class ConvolutionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.shift(x * 2)


@pytest.mark.parametrize(
    ("model", "example", "seen"),
    [
        (
            nn.Sequential(ConvolutionBlock()),
            IMAGES,
            "showed skips in ConvolutionBlock around convolutions, none",
        ),
        (nn.Sequential(Shifted()), torch.randn(1, 3, 4), "showed adds in Shifted, none of a tensor and what"),
    ],
)
def test_what_a_run_has_shown_is_said(model: nn.Module, example: torch.Tensor, seen: str) -> None:
    with pytest.raises(wp.UnknownModelError, match=seen) as error:
        wp.remove_skips(model, example=example)
    assert "give an input as example=" not in str(error.value)


@pytest.mark.parametrize(
    "edit", [wp.gray_tokens, wp.broadcast_context, wp.remove_skips, verify], ids=lambda edit: edit.__name__
)
def test_every_edit_refuses_an_unknown_model(edit) -> None:
    with pytest.raises(wp.UnknownModelError):
        edit(nn.Linear(3, 3))


def test_a_taught_model_takes_every_edit(taught: OwnModel) -> None:
    assert verify(taught, IMAGES) == 4
    plain = taught(IMAGES)
    for edit in (
        lambda: wp.gray_tokens(taught, 0.5, "svd"),
        lambda: wp.gray_tokens(taught, 0.5, "svd", "pixels"),
        lambda: wp.gray_tokens(taught, 0.5, "svd", "blocks", blocks=0),
        lambda: wp.broadcast_context(taught, "mlp.middle", scaled=True),
        lambda: wp.remove_skips(taught, "both"),
    ):
        edit()
        assert not torch.allclose(taught(IMAGES), plain)
        wp.restore(taught)
        assert torch.equal(taught(IMAGES), plain)


def test_a_taught_block_computes_what_it_should(taught: OwnModel) -> None:
    wp.remove_skips(taught, "attention", blocks=0)
    block = taught.blocks[0]
    x = torch.randn(2, 4, 8)
    mixed = block.mix(block.norm1(x))
    torch.testing.assert_close(block(x), mixed + block.ff(block.norm2(mixed)))


@pytest.mark.slow
def test_a_taught_model_unpickles_where_nothing_was_taught(taught: OwnModel, tmp_path) -> None:
    wp.remove_skips(taught, "attention")
    wp.broadcast_context(taught, scaled=True)
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((taught, IMAGES, taught(IMAGES))))
    code = (
        "import pickle, sys, torch\n"
        "model, images, expected = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert torch.equal(model(images), expected)\n"
        "import wellposed as wp\n"
        "assert len(wp.restore(model)) == 4\n"
        "print(type(model.blocks[0]).__module__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model.pickle")],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "own_model"


def test_a_row_that_does_not_fit_says_what_it_found(taught: OwnModel) -> None:
    row = BlockRow("own", (Add("attention"), Add("ffn")), taps(attention=after("nowhere")))
    teach(OwnBlock, row)
    with pytest.raises(ValueError, match=r"'nowhere' in blocks.0 .*found norm1, mix, norm2, ff"):
        wp.broadcast_context(taught, "attention.end")
    assert not wp.edits(taught)


@pytest.mark.parametrize(("cls", "row"), [(OwnModel(), None), (OwnBlock, "row"), (int, None)])
def test_teach_refuses_what_is_no_class_or_row(cls, row) -> None:
    with pytest.raises(TypeError, match="teach needs"):
        teach(cls, row)


def test_no_closure_or_super_is_lost(taught: OwnModel) -> None:
    """OwnBlock's forward calls super() and reads a module global: both must work in the seam."""
    plain = taught(IMAGES)
    wp.remove_skips(taught, "ffn", blocks=1)
    assert not torch.equal(taught(IMAGES), plain)
