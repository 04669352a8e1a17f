"""How accuracy holds under corrupted, occluded and attacked test images.

Four corruptions in five strengths, in the spirit of ImageNet-C: Gaussian noise and blur, contrast, JPEG.
Occlusion gives a share of the patches the mean colour. FGSM (arXiv 1412.6572) adds eps sign(gradient of the
loss) to the pixels. All start from the pixels that the model is tested on, 0 to 1.
"""

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.transforms.functional import gaussian_blur

from wellposed.train import open_run
from wellposed.train.runs import TrainedRun

IMAGES = 2000
BATCH = 2000
STRENGTHS: dict[str, tuple[float, ...]] = {
    "noise": (0.04, 0.08, 0.12, 0.18, 0.26),
    "blur": (0.5, 0.75, 1.0, 1.5, 2.0),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.2),
    "jpeg": (50, 30, 20, 10, 5),
    "occlusion": (0.25, 0.5, 0.75),
}
"""Deviation of the noise; of the blur in pixels; factor of the contrast; quality; share of the patches."""
ATTACKS = (1 / 255, 2 / 255, 4 / 255)
CORRUPTIONS = ("noise", "blur", "contrast", "jpeg")

_made: dict[tuple[str, int], dict[tuple[str, int], Tensor]] = {}


def corrupted(images: Tensor, kind: str, strength: float, patch: int = 4) -> Tensor:
    """Images (B, C, S, S) of 0 to 1 after one corruption; the same draws at every call.

    >>> images = torch.rand(2, 3, 8, 8)
    >>> float(corrupted(images, "contrast", 0.5).std() / images.std()) < 0.51
    True
    """
    generator = torch.Generator().manual_seed(0)
    if kind == "noise":
        return (images + strength * torch.randn(images.shape, generator=generator)).clamp(0, 1)
    if kind == "blur":
        return gaussian_blur(images, [2 * round(2 * strength) + 1] * 2, [strength] * 2)
    if kind == "contrast":
        mean = images.mean((1, 2, 3), keepdim=True)
        return mean + strength * (images - mean)
    if kind == "jpeg":
        return torch.stack([_jpeg(image, int(strength)) for image in images])
    if kind == "occlusion":
        count, side = len(images), images.shape[-1] // patch
        ranks = torch.rand(count, side * side, generator=generator).argsort(1).argsort(1)
        hidden = (ranks < round(strength * side * side)).view(count, 1, side, side)
        hidden = hidden.repeat_interleave(patch, 2).repeat_interleave(patch, 3)
        return torch.where(hidden, images.mean((2, 3), keepdim=True), images)
    raise ValueError(f"kind must be one of {', '.join(STRENGTHS)}, got {kind!r}.")


def _jpeg(image: Tensor, quality: int) -> Tensor:
    array = (image * 255).round().byte().permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    grey = array.shape[-1] == 1
    Image.fromarray(array[..., 0] if grey else array).save(buffer, "JPEG", quality=quality)
    back = np.asarray(Image.open(buffer))
    return torch.tensor(back[..., None] if grey else back).permute(2, 0, 1).float() / 255


def attacked(model: nn.Module, images: Tensor, labels: Tensor, eps: Tensor) -> Tensor:
    """FGSM on normalised images; ``eps`` is in their units, one a channel."""
    given = images.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(cross_entropy(model(given), labels), given)
    return (given + eps * gradient.sign()).detach()


def robustness(folder: Path) -> list[dict[str, Any]]:
    """Accuracy of a run's last weights on images of each kind and strength, as records."""
    run = open_run(folder, images=IMAGES)
    model, mean, std = run.model(run.moment("last")), _channel(run, "mean"), _channel(run, "std")
    clean, labels = run.images, run.labels.to(run.device)
    rows = [_row("none", 0, accuracy(model, clean, labels))]
    for (kind, strength), images in _all_corrupted(run, (clean * std + mean).cpu()).items():
        shown = (images.to(run.device).float() / 255 - mean) / std
        rows.append(_row(kind, strength, accuracy(model, shown, labels)))
    for strength, eps in enumerate(ATTACKS, 1):
        pieces = zip(clean.split(BATCH), labels.split(BATCH), strict=True)
        shown = torch.cat([attacked(model, *piece, eps / std) for piece in pieces])
        rows.append(_row("fgsm", strength, accuracy(model, shown, labels)))
    return rows


def _row(under: str, strength: int, value: float) -> dict[str, Any]:
    return {"measure": "accuracy", "under": under, "strength": strength, "value": value}


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of the images (B, C, S, S) that are classified right."""
    hits = [
        (model(piece).argmax(1) == wanted).sum()
        for piece, wanted in zip(images.split(BATCH), labels.split(BATCH), strict=True)
    ]
    return float(torch.stack(hits).sum()) / len(labels)


def _channel(run: TrainedRun, name: str) -> Tensor:
    return torch.tensor(run.expects[name], device=run.device).view(1, -1, 1, 1)


def _all_corrupted(run: TrainedRun, images: Tensor) -> dict[tuple[str, int], Tensor]:
    """Of all kinds and strengths, as 8 bits; made once for the runs that share their test images."""
    patch = int(run.recipe.patch_size or 4)
    key = hashlib.sha256((images * 255).round().byte().numpy().tobytes()).hexdigest(), patch
    if key not in _made:
        _made[key] = {
            (kind, number): (corrupted(images, kind, strength, patch) * 255).round().clamp(0, 255).byte()
            for kind, strengths in STRENGTHS.items()
            for number, strength in enumerate(strengths, 1)
        }
    return _made[key]
