"""What images a model takes: their size, their channels, and how a file becomes one."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from wellposed.anatomy.example import MOST_CHANNELS, made_examples
from wellposed.anatomy.table import embedding_row
from wellposed.probes.observe import plain

Transform = Callable[[Image.Image], Tensor]
"""Makes a model's input (C, H, W) of a PIL image."""

_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
# The published checkpoints of these two were trained so, those of the other families with ImageNet's. The
# defaults of transformers' processor classes do not say: DINOv2's has the numbers of CLIP, Swin's has 0.5.
_HALF_FAMILIES = ("vit", "beit")
_LIBRARIES = ("timm", "transformers", "torchvision")


def expected_size(model: nn.Module) -> tuple[int, int] | None:
    """The one (height, width) that a model of timm, transformers or torchvision takes.

    None where it takes others too, and for your own model, which may resize its images itself.
    """
    model = plain(model)
    if not is_of(model, *_LIBRARIES):
        return None
    first = _first_convolution(model)
    for module in model.modules():
        # One with another convolution cuts patches of a later stage.
        if _insists_on_its_size(module) and _first_convolution(module) in (None, first):
            size = _declared_size(module) or _declared_size(model)
            if size is not None:
                return size
    return None


def expected_channels(model: nn.Module) -> int | None:
    """How many channels a model of timm, transformers or torchvision takes; None where that is not known."""
    model = plain(model)
    return channels_of(model) if is_of(model, *_LIBRARIES) else None


def takes_images(model: nn.Module) -> bool:
    """Whether its input is images, so far as its library or the table of wellposed.anatomy says."""
    made = [example for name, _, example in made_examples(model) if not name]
    given = [x for example in made for x in tree_leaves((example.args, dict(example.kwargs)))]
    return any(embedding_row(module) for module in model.modules()) or any(x.ndim == 4 for x in given)


def channels_of(model: nn.Module) -> int | None:
    """Input channels of the first convolution that could read images; None where there is none."""
    first = _first_convolution(model)
    return first.in_channels if first is not None and first.in_channels <= MOST_CHANNELS else None


def _first_convolution(model: nn.Module) -> nn.Conv2d | nn.Conv3d | None:
    return next((module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Conv3d)), None)


def takes_videos(model: nn.Module) -> bool:
    """Whether a model of a library takes (B, T, C, H, W) or (B, C, T, H, W)."""
    frames = getattr(getattr(model, "config", None), "num_frames", None)
    is_three_dimensional = any(isinstance(module, nn.Conv3d) for module in model.modules())
    return is_of(model, *_LIBRARIES) and (frames is not None or is_three_dimensional)


def model_transform(model: nn.Module) -> tuple[Transform, str]:
    """How an image file becomes this model's input, and a sentence that says how.

    timm: its configuration of the model, at the size that the model was built for. transformers: the image
    processor saved with the model, if it is on this disk; else the size in the configuration and the
    statistics of the family. Others: resize and crop the centre, with ImageNet's statistics.
    """
    model = plain(model)
    saved = _saved_processor(model)
    if saved is not None:
        processor, place = saved
        sentence = f"Files were preprocessed by the {type(processor).__name__} saved in {place}."
        return lambda image: processor(images=image, return_tensors="pt")["pixel_values"][0], sentence

    channels = channels_of(model) or 3
    if channels not in (1, 3):
        raise ValueError(
            f"expected a model of 1 or 3 channels for image files, got one of {channels}; pass transform=, "
            "which makes a tensor (channels, height, width) of a PIL image, or pass a tensor."
        )
    settings, source = _settings(model)
    height, width = settings["input_size"][-2:]
    settings["input_size"] = (channels, height, width)
    if channels == 1:
        settings |= {name: (float(np.mean(settings[name])),) for name in ("mean", "std")}

    from timm.data import create_transform

    sides = {"squash": "both sides", "border": "longer side"}.get(settings["crop_mode"], "shorter side")
    mean, std = (", ".join(f"{value:g}" for value in settings[name]) for name in ("mean", "std"))
    sentence = (
        f"Files were resized ({sides}, {settings['interpolation']}, crop {settings['crop_pct']:g}) to "
        f"{height} x {width} and normalised with mean {mean} and std {std}, {source}."
    )
    transform: Transform = create_transform(**settings, is_training=False)
    return transform, sentence


def is_of(module: nn.Module, *libraries: str) -> bool:
    """Whether its class, or one that it inherits from, is of one of the libraries."""
    return any(cls.__module__.partition(".")[0] in libraries for cls in type(module).__mro__)


def _settings(model: nn.Module) -> tuple[dict[str, Any], str]:
    """Arguments of timm's create_transform, and where they are from."""
    size = next((found for module in model.modules() if (found := _declared_size(module))), None)
    input_size = {"input_size": (3, *(size or (224, 224)))}
    for module in model.modules():
        configuration = getattr(module, "pretrained_cfg", None)
        if isinstance(configuration, dict):
            from timm.data import resolve_model_data_config

            settings = resolve_model_data_config(module) | (input_size if size else {})
            return settings, f"as timm's configuration of {configuration.get('architecture')} says"
        if is_of(module, "transformers"):
            family = getattr(getattr(module, "config", None), "model_type", "models")
            squash = {"interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": "squash"}
            statistics = _HALF if family in _HALF_FAMILIES else _IMAGENET
            return input_size | squash | statistics, f"as usual for transformers' {family}"
    crop = {"interpolation": "bilinear", "crop_pct": 0.875, "crop_mode": "center"}
    return input_size | crop | _IMAGENET, "as usual for ImageNet"


def _saved_processor(model: nn.Module) -> tuple[Any, str] | None:
    """The image processor of transformers saved with the checkpoint that the model is from, and its place."""
    part = next((module for module in model.modules() if is_of(module, "transformers")), None)
    place = getattr(part, "name_or_path", "")
    if not place:
        return None
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(
            place, local_files_only=True, trust_remote_code=False
        ), place
    except (OSError, ValueError):  # none was saved, or one that would need code of its own
        return None


def _declared_size(module: nn.Module) -> tuple[int, int] | None:
    """What a module or its configuration calls its image size."""
    named = (
        getattr(module, "img_size", None),
        getattr(module, "image_size", None),
        getattr(getattr(module, "config", None), "image_size", None),
    )
    for size in named:
        match size:
            case int():
                return size, size
            case [int() as height, int() as width]:
                return height, width
    return None


def _insists_on_its_size(module: nn.Module) -> bool:
    if is_of(module, "timm"):
        return getattr(module, "strict_img_size", False) and getattr(module, "img_size", None) is not None
    if is_of(module, "torchvision"):
        return any(cls.__qualname__ == "VisionTransformer" for cls in type(module).__mro__)
    if not is_of(module, "transformers") or getattr(module, "position_embeddings", True) is None:
        return False
    # Embeddings that interpolate their positions when asked to, but not of themselves.
    asked = inspect.signature(type(module).forward).parameters.get("interpolate_pos_encoding")
    can = hasattr(type(module), "interpolate_pos_encoding")
    return can and asked is not None and asked.default is False


def image_axis(model: nn.Module) -> int:
    """The axis of the images in what the model takes: 1 for PyTorch's encoder with ``batch_first=False``."""
    layer = model.layers[0] if isinstance(model, nn.TransformerEncoder) else model
    if not isinstance(layer, nn.TransformerEncoderLayer):
        return 0
    attention: Any = layer.self_attn
    return 0 if attention.batch_first else 1
