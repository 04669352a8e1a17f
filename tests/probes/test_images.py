"""Images from everything that a user may have, and the errors where a model cannot take them."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from untouched import assert_same, fingerprint
from wellposed.probes.images import DEFAULT_LIMIT, first_images, image_batches
from wellposed.probes.model_input import expected_size, model_transform
from zoo import BY_NAME, SIDE, Case, families

VIT = {"img_size": SIDE, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **VIT)


def images(count: int = 5, side: int = SIDE) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(3))


def picture(seed: int = 0, size: tuple[int, int] = (50, 40), mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def folder_of(path: Path, names: list[str]) -> Path:
    for seed, name in enumerate(names):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        picture(seed).save(path / name)
    return path


def stacked(source: object, model: nn.Module, **options: Any) -> Tensor:
    return torch.cat(list(image_batches(source, model, **options)))


class Pairs(Dataset[tuple[Tensor, int]]):
    """By index alone: iterating over it by itself would not end."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return images()[index % 5], index


class Stream(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return ((x, 0) for x in images())


SOURCES: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda x: x,
    "float64": lambda x: x.double(),
    "list of tensors": list,
    "tuple of tensors": tuple,
    "list of batches": lambda x: [x[:3], x[3:]],
    "images and labels": lambda x: (x, torch.arange(5)),
    "dict": lambda x: {"labels": torch.arange(5), "pixel_values": x},
    "BatchFeature": lambda x: transformers.BatchFeature({"pixel_values": x}),
    "loader": lambda x: DataLoader(TensorDataset(x, torch.arange(5)), batch_size=3),
    "loader of dicts": lambda x: DataLoader([{"img": i, "y": 0} for i in x], batch_size=2),
    "dataset": lambda x: Pairs(),
    "iterable dataset": lambda x: Stream(),
    "generator": lambda x: ((i[None], 0) for i in x),
    "generator of collated lists": lambda x: (i for i in [([*x[:2]], {}), ([*x[2:]], {})]),
}


# Sources of tensors


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_every_source_gives_the_same_images_and_starts_over(source, model):
    batches = image_batches(source(images()), model, batch_size=2)
    for _ in range(2):
        got = list(batches)
        assert [len(batch) for batch in got] == [2, 2, 1]
        assert torch.equal(torch.cat(got), images())
        assert batches.count == 5
    assert batches.notes == []
    assert torch.equal(first_images(source(images()), model, 3), images(3))


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_limit(source, model):
    batches = image_batches(source(images()), model, batch_size=3, limit=4)
    assert [len(batch) for batch in batches] == [3, 1]
    assert batches.count == 4


def test_count_runs_with_the_batches(model):
    batches = image_batches(images(), model, batch_size=2)
    assert [batches.count for _ in batches] == [2, 4, 5]


def test_default_limit_is_for_what_was_not_chosen_one_by_one(model):
    many = images(DEFAULT_LIMIT + 3)
    loader = image_batches(DataLoader(TensorDataset(many), batch_size=20), model)
    assert sum(map(len, loader)) == DEFAULT_LIMIT
    assert loader.notes == [f"The first {DEFAULT_LIMIT} images of the DataLoader were used."]
    assert len(stacked(many, model)) == len(stacked(list(many), model)) == DEFAULT_LIMIT + 3
    assert len(stacked(DataLoader(TensorDataset(many)), model, limit=34)) == 34


def test_no_more_is_taken_from_an_iterator_than_needed(model):
    taken = []

    def endless() -> Iterator[Tensor]:
        while True:
            taken.append(1)
            yield images(2)

    assert len(first_images(endless(), model, 3)) == 3
    assert len(taken) == 2


def test_batches_of_batches_leave_the_first_as_they_are(model, tmp_path):
    folder = folder_of(tmp_path, [f"{i}.png" for i in range(4)])
    (folder / "3.png").write_bytes(b"no picture")
    batches = image_batches(folder, model, limit=3)
    whole = torch.cat(list(batches))
    notes = batches.notes
    assert torch.equal(first_images(batches, model, 1), whole[:1])
    assert torch.equal(stacked(batches, model, limit=50), whole)
    assert batches.count == 3
    assert batches.notes == notes
    generator = image_batches((x for x in images()), model)
    assert torch.equal(first_images(generator, model, 2), images(2))
    assert torch.equal(stacked(generator, model), images())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtype_and_device_are_the_models(dtype):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter(
                "codes", nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
            )
            self.head = nn.Linear(2, 2, dtype=dtype)

    assert first_images(images(), Model(), 2).dtype == dtype
    assert first_images(images(), Model().to("meta"), 2).device.type == "meta"
    assert first_images(images().double(), nn.Identity(), 2).dtype == torch.float64


def test_a_wrapped_model_counts_as_the_one_inside(model):
    compiled = torch.compile(model)
    assert expected_size(compiled) == (SIDE, SIDE)
    wrapped = nn.DataParallel(model)
    wrapped.module.cpu()  # it goes to a GPU where there is one
    assert torch.equal(stacked(images(), wrapped), images())
    with pytest.raises(ValueError, match="takes images of 32 x 32"):
        image_batches(images(2, 40), compiled)


def test_shuffling_is_said_and_leaves_the_random_state(model):
    loader = DataLoader(TensorDataset(images()), batch_size=2, shuffle=True)
    before = fingerprint(model)
    shuffled = first_images(loader, model, 5)
    assert_same(before, fingerprint(model))
    assert torch.equal(first_images(loader, model, 5), shuffled)
    assert image_batches(loader, model).notes == [
        "The DataLoader shuffles: another run may see other images."
    ]


@families("torch encoder", "torch encoder pre-norm")
def test_tokens_go_in_as_the_model_takes_them(case: Case):
    model = case.model()
    axis = 0 if model.layers[0].self_attn.batch_first else 1  # type: ignore[union-attr]
    x = torch.randn(7, 7, 32)
    batches = list(image_batches(x, model, batch_size=3))
    assert [batch.shape[axis] for batch in batches] == [3, 3, 1]
    assert torch.equal(torch.cat(batches, axis), x)
    assert torch.equal(first_images(x, model, 2), x.narrow(axis, 0, 2))
    assert torch.equal(first_images([x, x], model, 9).narrow(axis, 7, 2), x.narrow(axis, 0, 2))
    one = x.select(axis, 0)
    shape = ("B, L, C", "L, B, C")[axis]
    with pytest.raises(
        ValueError, match=rf"expected tokens \({shape}\), got a tensor of shape \(7, 32\)"
    ) as told:
        image_batches(one, model)
    assert f"x.unsqueeze({axis}) makes" in str(told.value)
    assert torch.equal(first_images(one.unsqueeze(axis), model, 1), x.narrow(axis, 0, 1))


# Tensors that cannot be meant

NOT_FINITE = images()
NOT_FINITE[3, 1, 2, 2] = torch.inf

BAD = {
    "uint8": (images().to(torch.uint8), "expected images in floating point.*torch.uint8.*PIL images"),
    "one image": (images()[0], r"expected images \(B, C, H, W\).*unsqueeze\(0\)"),
    "matrix": (images()[0, 0], r"expected images \(B, C, H, W\), got a tensor of shape \(32, 32\)\."),
    "video": (images()[None], r"got a tensor of shape \(1, 5, 3, 32, 32\)"),
    "channels last": (images().permute(0, 2, 3, 1), "images of 3 channels, got 32.*permute"),
    "grey": (images()[:, :1], "images of 3 channels, got 1"),
    "too large": (
        images(2, 64),
        "images of 32 x 32, got 64 x 64; resize them, or create it with img_size=64",
    ),
    "not square": (images()[..., :24], r"got 32 x 24.*img_size=\(32, 24\)"),
    "empty": (images()[:0], r"at least one image, got a tensor of shape \(0, 3, 32, 32\)"),
    "inf": (NOT_FINITE, "NaN or infinite values in image 3"),
    "list of sizes": ([*images(2), images(1, 40)[0]], "images of 32 x 32, got 40 x 40"),
    "empty list": ([], "found none in the list"),
    "empty generator": ((x for x in ()), "found none in the generator"),
    "empty loader": (DataLoader(TensorDataset(images()[:0])), "found none in the DataLoader"),
}


@pytest.mark.parametrize(("source", "message"), BAD.values(), ids=BAD.keys())
def test_bad_tensors(source, message, model):
    with pytest.raises(ValueError, match=message):
        list(image_batches(source, model, batch_size=2))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((2, 3, 32, 32)), "NumPy array; torch.from_numpy"),
        ([np.zeros((3, 32, 32))], "NumPy array; torch.from_numpy"),
        (7, "got int"),
        ([7], "got int"),
        ({"labels": torch.zeros(2)}, "one of pixel_values, image, images, img, x, got labels"),
    ],
)
def test_what_is_no_image(source, message, model):
    with pytest.raises(TypeError, match=message):
        list(image_batches(source, model))


def test_images_of_several_sizes_are_refused_where_the_model_would_take_them():
    model = BY_NAME["timm convmixer"].model()
    sizes = [*images(2), *images(1, 40)]
    with pytest.raises(ValueError, match=r"one shape, got \(3, 32, 32\) and \(3, 40, 40\) \(image 2\)"):
        list(image_batches(sizes, model, batch_size=2))


@pytest.mark.parametrize("option", ["batch_size", "limit"])
def test_sizes_below_one(option, model):
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        image_batches(images(), model, **{option: 0})


# Files and pictures


def test_files_pictures_and_folders_agree(model, tmp_path):
    folder = folder_of(tmp_path, ["a.png", "b.PNG", "c.bmp"])
    (folder / "notes.txt").write_text("not an image")
    picture(7).save(folder / "._a.png")  # left behind by another system
    transform, _ = model_transform(model)
    want = torch.stack([transform(picture(seed)) for seed in range(3)])
    paths = sorted(path for path in folder.iterdir() if path.suffix != ".txt" and path.name[0] != ".")
    for source in (
        folder,
        str(folder),
        paths,
        [str(path) for path in paths],
        [paths[0], picture(1), str(paths[2])],
        ((picture(seed), seed) for seed in range(3)),
        [(picture(seed), picture(9)) for seed in range(3)],
        [[picture(0), picture(1)], [picture(2)]],
        DataLoader([picture(seed) for seed in range(3)], batch_size=2, collate_fn=list),
        [paths[0], want[1], picture(2)],
    ):
        assert torch.equal(stacked(source, model, batch_size=2), want)
    assert torch.equal(stacked(paths[0], model), want[:1])
    assert torch.equal(stacked(picture(0), model), want[:1])


def test_files_are_decoded_batch_by_batch(model, tmp_path, monkeypatch):
    folder = folder_of(tmp_path, [f"{i}.png" for i in range(6)])
    opened = []
    monkeypatch.setattr(Image, "open", lambda path, open=Image.open: opened.append(path) or open(path))
    batches = iter(image_batches(folder, model, batch_size=2))
    assert opened == []
    next(batches)
    assert [path.name for path in opened] == ["0.png", "1.png"]


def test_a_folder_is_taken_in_turn_from_its_folders(model, tmp_path, monkeypatch):
    names = ["b/2.png", "b/1.png", "a/deep/3.png", "a/9.png", "a/7.png"]
    opened = []
    monkeypatch.setattr(Image, "open", lambda path, open=Image.open: opened.append(path) or open(path))
    list(image_batches(folder_of(tmp_path, names), model))
    order = " ".join(os.path.relpath(path, tmp_path) for path in opened)
    assert order == "a/7.png a/deep/3.png b/1.png a/9.png b/2.png"


def test_notes_of_a_large_folder(model, tmp_path):
    folder = folder_of(tmp_path, [f"{i % 2}/{i}.png" for i in range(DEFAULT_LIMIT + 2)])
    batches = image_batches(folder, model)
    assert sum(map(len, batches)) == DEFAULT_LIMIT
    assert batches.notes[0] == (
        f"The first 32 images of the 34 in {folder}, in turn from its folders were used."
    )
    assert "timm's configuration of vit_tiny_patch16_224" in batches.notes[1]


def test_unreadable_files_are_named_and_the_rest_goes_on(model, tmp_path):
    folder = folder_of(tmp_path / "mixed", [f"{i}.jpg" for i in range(6)])
    (folder / "1.jpg").write_text("this is no picture")
    (folder / "3.jpg").write_bytes((folder / "3.jpg").read_bytes()[:-200])
    (folder / "4.jpg").write_bytes(b"")
    batches = image_batches(folder, model, batch_size=2)
    assert sum(map(len, batches)) == batches.count == 3
    assert [name for name, _ in batches.unreadable] == ["1.jpg", "3.jpg", "4.jpg"]
    reasons = dict(batches.unreadable)
    assert reasons["1.jpg"] == reasons["4.jpg"] == "cannot identify image file"
    assert "truncated" in reasons["3.jpg"]
    assert batches.notes[-1].startswith(
        "3 of 6 files could not be read: 1.jpg (cannot identify image file); 3.jpg (image file is truncated"
    )
    missing = image_batches([folder / "0.jpg", folder / "gone.jpg", folder], model)
    assert sum(map(len, missing)) == 1
    assert [why for _, why in missing.unreadable] == ["No such file or directory", "Is a directory"]


def test_a_limit_counts_images_not_files(model, tmp_path):
    folder = folder_of(tmp_path, [f"{i}.png" for i in range(4)])
    (folder / "0.png").write_text("")
    assert first_images(folder, model, 3).shape[0] == 3


def test_no_readable_file(model, tmp_path):
    for i in range(7):
        (tmp_path / f"{i}.jpg").write_text("no")
    with pytest.raises(ValueError, match=r"none of 7 files could be read: 0.jpg \(cannot.*and 2 more"):
        list(image_batches(tmp_path, model))
    with pytest.raises(ValueError, match="none of 1 files could be read"):
        first_images(tmp_path / "0.jpg", model, 1)


def test_no_file(model, tmp_path):
    with pytest.raises(ValueError, match=r"expected images in .*\.jpg.*found none"):
        image_batches(tmp_path, model)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        image_batches(tmp_path / "nowhere", model)


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK"])
def test_modes_of_pictures(mode, model, tmp_path):
    name = tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
    picture(0, mode=mode).save(name)
    x = first_images(name, model, 1)
    grey = torch.equal(x[0, 0], x[0, 1])
    assert x.shape == (1, 3, SIDE, SIDE)
    assert grey == (mode in ("1", "L", "LA"))


def test_16_bits_are_scaled_and_32_need_a_transform(model, tmp_path):
    ramp = np.linspace(0, 65535, 32 * 32).reshape(32, 32)
    Image.fromarray(ramp.astype(np.uint16)).save(tmp_path / "16.png")
    Image.fromarray((ramp / 257).astype(np.uint8)).save(tmp_path / "8.png")
    Image.fromarray(ramp.astype(np.float32)).save(tmp_path / "32.tif")
    eight, sixteen = (first_images(tmp_path / name, model, 1) for name in ("8.png", "16.png"))
    assert (eight - sixteen).abs().max() < 0.02  # one of 255 steps, in units of std 0.5
    batches = image_batches([tmp_path / "32.tif", tmp_path / "8.png"], model)
    assert sum(map(len, batches)) == 1
    assert "pass transform=" in batches.unreadable[0][1]

    def transform(image: Image.Image) -> Tensor:
        return torch.from_numpy(np.asarray(image) / 65535).float().expand(3, 32, 32)

    assert stacked(tmp_path / "32.tif", model, transform=transform).max() == 1


def test_a_transform_of_ones_own(model, tmp_path):
    folder = folder_of(tmp_path, ["a.png"])
    batches = image_batches(folder, model, transform=lambda image: torch.full((3, SIDE, SIDE), image.width))
    with pytest.raises(ValueError, match=r"float tensor.*torch\.int64"):
        list(batches)
    batches = image_batches(
        folder, model, transform=lambda image: torch.full((3, SIDE, SIDE), 1.0 * image.width)
    )
    assert torch.cat(list(batches)).unique().tolist() == [50]
    assert batches.notes == ["Files were preprocessed by the transform= that was given."]
    with pytest.raises(ValueError, match="takes images of 32 x 32, got 40 x 50"):
        list(image_batches(folder, model, transform=lambda image: torch.zeros(3, 40, 50)))
    with pytest.raises(ZeroDivisionError):  # not the file's fault
        list(image_batches(folder, model, transform=lambda image: torch.zeros(1 // 0)))
    with pytest.raises(ValueError, match="transform= is for files and PIL images"):
        image_batches(images(), model, transform=lambda image: torch.zeros(3, SIDE, SIDE))
