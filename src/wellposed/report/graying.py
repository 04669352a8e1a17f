"""What graying does to an image: before, after and the difference, for several eps.

The patches of an image are the rows of a matrix; graying lifts its small singular values. Nothing is read
from a model: images and eps are enough.
"""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from wellposed.linalg import condition_number
from wellposed.nn import PixelGraying
from wellposed.report.charts import Budget, Chart, Section, columns, distinct
from wellposed.report.graying_images import gallery
from wellposed.report.subjects import Material

TITLE = "What graying does to an image"
EPS = (0.9, 0.7, 0.5)
Method = Literal["svd", "dct"]
_TITLES = {"spectral": "Spectral", "svd": "SVD", "dct": "DCT"}


def graying_section(material: Material, budget: Budget, images: Path | None = None) -> Section:
    """Rows of numbers, and in ``extra`` a picture for each image and eps."""
    shown = gallery(material, images)
    method = _method(material)
    # On small matrices the SVD gives the spectral method's result at once.
    exact: Method = "dct" if method == "dct" else "svd"
    eps = sorted({*EPS, *_own_eps(material)}, reverse=True)[:5]
    before, known = _kappas(shown.images, shown.patch)
    rows: list[tuple[Any, ...]] = []
    pictures: list[list[dict[str, Any]]] = [
        [{"label": "before", "src": png(image)}] for image in shown.images
    ]
    for power in eps:
        after = PixelGraying(shown.patch, power, exact)(shown.images.double())
        change = after - shown.images
        largest = change.abs().amax((-3, -2, -1))
        kappas, flags = _kappas(after, shown.patch)
        for i, name in enumerate(shown.names):
            told = (before[i], _status(known[i]), kappas[i], _status(flags[i]), largest[i].item())
            rows.append((name, method, power, *told))
            pictures[i] += [
                {"label": f"eps {power:g}", "src": png(after[i])},
                {
                    "label": f"difference, eps {power:g}",
                    "src": png(0.5 + change[i] / (2 * largest[i]).clamp(min=1e-9)),
                },
            ]
    chart = Chart(
        columns=columns(
            image="image",
            method="method",
            eps="eps",
            before="kappa before",
            before_status="status before",
            after="kappa after",
            after_status="status after",
            change="largest change of a pixel",
        ),
        rows=tuple(rows),
        spec=None,
        describe="Condition numbers of the patch matrices before and after graying.",
    )
    words = (
        f"{_TITLES[method]} graying of the pixel patches ({shown.patch} x {shown.patch}), shown on "
        f"{shown.source}. After graying, values outside 0 to 1 are cut off for the picture. In a difference, "
        "grey is no change, and black and white are the largest change of that image, which the table has.",
    )
    extra = {"pictures": [{"name": n, "steps": p} for n, p in zip(shown.names, pictures, strict=True)]}
    return Section(id="graying", title=TITLE, words=words, chart=chart, extra=extra)


def png(image: Tensor) -> str:
    """An image (C, H, W) from 0 to 1 as a data URI."""
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8)
    picture = Image.fromarray(pixels[0].numpy() if len(pixels) == 1 else pixels.movedim(0, -1).numpy())
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _status(is_bound: bool) -> str:
    return "at least" if is_bound else "ok"


def _kappas(images: Tensor, patch: int) -> tuple[list[float], list[bool]]:
    patches = torch.nn.functional.unfold(images.double(), patch, stride=patch).mT
    kappa, at_least = condition_number(patches)
    return kappa.tolist(), at_least.tolist()


def _method(material: Material) -> str:
    used: Sequence[str] = distinct(each.recipe.get("graying") for each in material.subjects)
    return next((method for method in used if method in _TITLES), "spectral")


def _own_eps(material: Material) -> set[float]:
    values = {each.recipe.get("eps") for each in material.subjects if each.recipe.get("graying")}
    return {value for value in values if isinstance(value, float) and 0 < value < 1}
