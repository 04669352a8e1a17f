"""Small sets of images, made anew for each test."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

WriteFolder = Callable[..., Path]


def noise(seed: int, size: tuple[int, int] = (16, 16), mode: str = "RGB") -> Image.Image:
    """A picture of noise; no two seeds give the same."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(picture: Image.Image, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, form)
    return buffer.getvalue()


@pytest.fixture
def write_folder(tmp_path: Path) -> WriteFolder:
    """Writes pictures at the given paths below a folder, numbered as given."""

    def write(*paths: str, size: tuple[int, int] = (16, 16), mode: str = "RGB", into: str = "images") -> Path:
        root = tmp_path / into
        for seed, path in enumerate(paths):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            noise(seed, size, mode).save(root / path)
        return root

    return write


@pytest.fixture
def picture() -> Callable[..., Image.Image]:
    return noise


@pytest.fixture
def as_file() -> Callable[..., bytes]:
    return encoded
