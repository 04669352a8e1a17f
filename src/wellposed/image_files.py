"""Image files: which there are by their names, and how one is decoded.

>>> decode(Image.new("L", (4, 4)), "RGB", any_depth=False).mode
'RGB'
"""

import base64
import io
import os

import numpy as np
from PIL import Image, UnidentifiedImageError

from wellposed.files import require_regular

SUFFIXES = (
    ".avif",
    ".bmp",
    ".gif",
    ".jp2",
    ".jpeg",
    ".jpg",
    ".pgm",
    ".png",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
)

LONGEST = 100
"""How many times a side of a picture may be as long as the other."""


def decode(piece: "str | os.PathLike[str] | Image.Image", mode: str, any_depth: bool) -> Image.Image:
    """The picture in a mode of 8 bits; with ``any_depth`` one of 32 bits stays as it is."""
    if not isinstance(piece, Image.Image):
        require_regular(piece)
        with Image.open(piece) as opened:
            return decode(opened, mode, any_depth)
    require_picture(piece, any_depth)
    if piece.mode.startswith("I;16"):  # Pillow would clip it at 255
        return Image.fromarray((np.asarray(piece) >> 8).astype(np.uint8)).convert(mode)
    return piece.copy() if piece.mode in ("I", "F") else piece.convert(mode)


def require_picture(piece: Image.Image, any_depth: bool = False) -> None:
    """Raise for what the header shows to be no picture of 8 or 16 bits.

    A line of pixels would fill the memory once its shorter side is as long as a model's images.
    """
    shorter, longer = sorted(piece.size)
    if longer > LONGEST * shorter:
        raise ValueError(
            f"one side is more than {LONGEST} times as long as the other, {piece.size[0]} x {piece.size[1]}"
        )
    if piece.mode in ("I", "F") and not any_depth:
        raise ValueError(
            f"the range of its values, of mode {piece.mode}, is not known; save it with 8 bits, or pass "
            "transform= where there is one"
        )


PNG = "data:image/png;base64,"


def data_uri(picture: Image.Image) -> str:
    """The picture as a PNG file in a text, for a page.

    >>> data_uri(Image.new("L", (1, 1))).startswith(PNG)
    True
    """
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return PNG + base64.b64encode(file.getvalue()).decode()


def reason(error: Exception) -> str:
    """Why a file could not be read, without its path."""
    if isinstance(error, UnidentifiedImageError):
        return "cannot identify image file"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
