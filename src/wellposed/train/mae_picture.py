"""What a masked autoencoder sees and what it makes of it, as a picture."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from wellposed.probes.observe import plain, preserved
from wellposed.train.mae import MaskedAutoencoder, MaskedOutput
from wellposed.train.mae_patches import standardise, to_images, to_patches

_GAP = 2
_SMALLEST_SIDE = 64
_HIDDEN_SHADE = 0.5


def draw_reconstruction(
    model: nn.Module, images: Tensor, noise: Tensor, mean: Sequence[float], std: Sequence[float]
) -> Image.Image:
    """Three rows, one column an image: the images, what is visible of them, and the reconstruction.

    The reconstruction shows the visible patches as they are and the predictions elsewhere. Where the model
    predicts standardised patches, the mean and deviation of the true ones turn them into pixels, as is usual:
    so their brightness and contrast are not the model's.

    Args:
        model: a :class:`~wellposed.train.mae.MaskedAutoencoder`, compiled or replicated or not.
        images: (B, C, H, W) as the model takes them.
        noise: (B, N), see :func:`~wellposed.train.mae_masks.mask_noise`.
        mean, std: with which the pixels in [0, 1] were normalised, one number a channel.
    """
    mae = plain(model)
    if not isinstance(mae, MaskedAutoencoder):
        raise TypeError(f"expected a MaskedAutoencoder, got {type(mae).__name__}.")
    if images.shape[1] not in (1, 3):
        raise ValueError(f"expected images of 1 or 3 channels to draw, got {images.shape[1]}.")
    with preserved(mae), torch.no_grad():
        model.eval()
        out: MaskedOutput = model(images, noise)

    patches = to_patches(images.float(), mae.patch_size)
    predicted = out.prediction.float()
    if mae.norm_pixels:
        scale = standardise(patches)
        predicted = predicted * scale.deviation + scale.mean
    hidden = out.mask.unsqueeze(-1)

    def pixels(rows: Tensor) -> Tensor:
        pictures = to_images(rows, mae.channels, mae.grid, mae.patch_size)
        per_channel = pictures.new_tensor([list(std), list(mean)]).reshape(2, 1, -1, 1, 1)
        return (pictures * per_channel[0] + per_channel[1]).clamp(0, 1)

    is_hidden = to_images(hidden.expand_as(patches), mae.channels, mae.grid, mae.patch_size)
    original, rebuilt = pixels(patches), pixels(torch.where(hidden, predicted, patches))
    masked = original.masked_fill(is_hidden, _HIDDEN_SHADE)
    return _table([original, masked, rebuilt])


def _table(rows: list[Tensor]) -> Image.Image:
    """Rows of images (B, C, H, W) in [0, 1] on white; small ones are enlarged pixel by pixel."""
    _, _, height, width = rows[0].shape
    factor = -(-_SMALLEST_SIDE // min(height, width))
    tall, wide = height * factor + _GAP, width * factor + _GAP
    channels, columns = rows[0].shape[1], len(rows[0])
    sheet = np.full((len(rows) * tall + _GAP, columns * wide + _GAP, channels), 255, dtype=np.uint8)
    for i, row in enumerate(rows):
        values = (row * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
        for j, picture in enumerate(values.repeat(factor, axis=1).repeat(factor, axis=2)):
            top, left = i * tall + _GAP, j * wide + _GAP
            sheet[top : top + height * factor, left : left + width * factor] = picture
    return Image.fromarray(sheet.squeeze(-1) if channels == 1 else sheet)
