"""An input to run a model on: given by the caller, or made from what the model says of itself."""

import contextlib
import inspect
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from wellposed.interrupts import uninterrupted

LIBRARIES = ("timm", "torchvision", "transformers")
"""Whose models say of themselves what they take."""

MOST_CHANNELS = 16
"""Of images; a first convolution of more reads something else."""

_SIDE = 224  # what image models take that do not say a size


@dataclass(frozen=True)
class Example:
    """The arguments of one call of a model, for ``batch`` images or texts."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1

    def run(self, model: nn.Module) -> Any:
        """Call the model, the same way each time: what it draws at random is drawn from one seed."""
        torch.manual_seed(0)
        args, kwargs = tree_map_only(Tensor, Tensor.clone, (self.args, dict(self.kwargs)))
        return model(*args, **kwargs)

    def and_another(self) -> "Example":
        """The same with as many others behind: mirrored and so large that no layer hides the difference."""

        def doubled(x: Tensor) -> Tensor:
            if x.ndim == 0 or len(x) != self.batch:
                return x
            return torch.cat([x, x.flip(-1).mul(100) if x.is_floating_point() else x])

        args, kwargs = tree_map_only(Tensor, doubled, (self.args, dict(self.kwargs)))
        return Example(args, kwargs, 2 * self.batch)


def given_example(model: nn.Module, given: Any) -> Example:
    """An example of what a caller gave: a tensor, a dict of keyword arguments, a tuple of arguments.

    Of images (B, C, H, W) and of integers (B, N) the first is enough; other tensors are taken whole.
    """
    if isinstance(given, Example):
        return given
    parameter = next(model.parameters(), torch.empty(0))

    def moved(x: Tensor) -> Tensor:
        return x.to(parameter.device, parameter.dtype if x.is_floating_point() else None)

    if isinstance(given, Tensor):
        first = given[:1] if given.ndim >= 4 or not given.is_floating_point() else given
        return Example((moved(first),), batch=len(first))
    if isinstance(given, Mapping):
        sizes = {len(x) for x in given.values() if isinstance(x, Tensor) and x.ndim}
        one = len(sizes) == 1
        tensors = {
            name: moved(x[:1] if one and x.ndim else x) if isinstance(x, Tensor) else x
            for name, x in given.items()
        }
        return Example(kwargs=tensors, batch=1 if one else max(sizes, default=1))
    if isinstance(given, tuple | list) and any(isinstance(x, Tensor) for x in given):
        args = tuple(moved(x) if isinstance(x, Tensor) else x for x in given)
        return Example(args, batch=next(len(x) for x in args if isinstance(x, Tensor)))
    raise TypeError(
        f"example must be a tensor, a dict of keyword arguments or a tuple of arguments of the model, got "
        f"{type(given).__name__}."
    )


def examples_of(model: nn.Module, given: Any = None) -> list[tuple[str, nn.Module, Example]]:
    """What a caller gave for the whole model, or what can be made of it."""
    return made_examples(model) if given is None else [("", model, given_example(model, given))]


def made_examples(model: nn.Module) -> list[tuple[str, nn.Module, Example]]:
    """Examples for a model, or for the outermost parts of it that say what they take."""
    found: list[tuple[str, nn.Module, Example]] = []
    for name, module in model.named_modules():
        if any(name == done or name.startswith(f"{done}.") or not done for done, _, _ in found):
            continue
        if (example := _made(module)) is not None:
            found.append((name, module, example))
    return found


def _made(module: nn.Module) -> Example | None:
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.is_meta:
        return None
    library = next(
        (root for cls in type(module).__mro__ if (root := cls.__module__.partition(".")[0]) in _MAKERS), ""
    )
    shaped = _MAKERS[library](module) if library else None
    if shaped is None:
        return None
    generator = torch.Generator().manual_seed(0)

    def filled(x: Tensor) -> Tensor:
        if x.is_floating_point():
            x = torch.randn(x.shape, generator=generator).to(parameter.dtype)
        return x.to(parameter.device)

    return Example(
        kwargs=tree_map_only(Tensor, filled, shaped.kwargs), args=tree_map_only(Tensor, filled, shaped.args)
    )


def _of_timm(module: nn.Module) -> Example | None:
    """Of a whole model of timm: at the size it was built for, else at that of its configuration."""
    configuration = getattr(module, "pretrained_cfg", None)
    if configuration is None and not hasattr(module, "forward_features"):
        return None
    channels, *size = (configuration or {}).get("input_size") or (3, _SIDE, _SIDE)
    sizes = (getattr(part, "img_size", None) for part in module.modules())
    if (declared := next((size for size in sizes if size is not None), None)) is not None:
        size = [declared, declared] if isinstance(declared, int) else list(declared)
    first = next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)
    if first is not None and first.in_channels <= MOST_CHANNELS:
        channels = first.in_channels
    return Example((torch.zeros(1, channels, *size),))


def _of_torchvision(module: nn.Module) -> Example | None:
    if not module.__class__.__module__.startswith("torchvision.models") or _is_part(module):
        return None
    if ".video" in module.__class__.__module__:
        return Example((torch.zeros(1, 3, *_video_size(module)),))
    side = getattr(module, "image_size", _SIDE)
    return Example((torch.zeros(1, 3, side, side),))


def _video_size(module: nn.Module) -> tuple[int, ...]:
    """Frames, height and width: of MViT those that its positions are made for."""
    positions: Any = getattr(module, "pos_encoding", None)
    if positions is None:
        return 8, 112, 112
    tokens = positions.temporal_size, *positions.spatial_size
    stride: Any = next(m for m in module.modules() if isinstance(m, nn.Conv3d)).stride
    return tuple(count * step for count, step in zip(tokens, stride, strict=True))


def _is_part(module: nn.Module) -> bool:
    """Whether a module of torchvision is a part of a model: whole ones have a head."""
    return not any(hasattr(module, name) for name in ("head", "heads", "classifier", "fc"))


def _of_transformers(module: nn.Module) -> Example | None:
    config: Any = getattr(module, "config", None)
    name = getattr(module, "main_input_name", None)
    if config is None or not isinstance(name, str) or not hasattr(module, "save_pretrained"):
        return None
    vision = getattr(config, "vision_config", None)
    parameters = inspect.signature(type(module).forward).parameters
    if "spatial_shapes" in parameters:
        texts = {"input_ids": _ids(config.text_config)} if "input_ids" in parameters else {}
        patches = _patches(config)
        return Example(kwargs={**patches.kwargs, **texts})
    if name == "pixel_values" or (name == "input_ids" and vision is not None):
        pixels = _pixels(module, vision if vision is not None and name == "input_ids" else config)
        if vision is None or name == "pixel_values":
            return Example(kwargs={"pixel_values": pixels})
        return Example(
            kwargs={"pixel_values": pixels, "input_ids": _ids(getattr(config, "text_config", config))}
        )
    if name == "pixel_values_videos":
        return Example(kwargs={name: _pixels(module, config)})
    decoder = {"decoder_input_ids": _ids(config)} if getattr(config, "is_encoder_decoder", False) else {}
    if name == "input_ids":
        return Example(kwargs={"input_ids": _ids(config), **decoder})
    if name == "input_values" and hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return Example(kwargs={"input_values": torch.zeros(1, config.max_length, config.num_mel_bins)})
    if name == "input_values":
        return Example(kwargs={"input_values": torch.zeros(1, 4000)})
    if name == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 100)
        bins = getattr(config, "num_mel_bins", 80)
        return Example(kwargs={"input_features": torch.zeros(1, bins, frames), **decoder})
    return None


def _patches(config: Any) -> Example:
    """Images cut into patches, with a mask and the sizes of their grids, as SigLIP 2 takes them."""
    config = getattr(config, "vision_config", config)
    side = max(int(config.num_patches**0.5), 1)
    return Example(
        kwargs={
            "pixel_values": torch.zeros(1, side * side, config.num_channels * config.patch_size**2),
            "pixel_attention_mask": torch.ones(1, side * side, dtype=torch.int64),
            "spatial_shapes": torch.tensor([[side, side]]),
        }
    )


def _ids(config: Any) -> Tensor:
    return torch.arange(2, 10)[None] % max(int(getattr(config, "vocab_size", 10)), 2)


def _pixels(module: nn.Module, config: Any) -> Tensor:
    channels = int(getattr(config, "num_channels", 3) or 3)
    size = getattr(config, "image_size", None) or getattr(config, "crop_size", None) or _SIDE
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
    if frames:
        return torch.zeros(1, int(frames), channels, height, width)
    return torch.zeros(1, channels, height, width)


def _of_torch(module: nn.Module) -> Example | None:
    if not isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer):
        return None
    layer: Any = module.layers[0] if isinstance(module, nn.TransformerEncoder) else module
    attention: nn.MultiheadAttention = layer.self_attn
    shape = (1, 5) if attention.batch_first else (5, 1)
    return Example((torch.zeros(*shape, attention.embed_dim),))


_MAKERS = {
    "timm": _of_timm,
    "torchvision": _of_torchvision,
    "transformers": _of_transformers,
    "torch": _of_torch,
}


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Puts back the mode of every module and the state of every random generator.

    Ctrl-C is held back inside; see :func:`wellposed.interrupts.let_through`.
    """
    training = [(module, module.training) for module in model.modules()]
    kind = next((p.device.type for p in model.parameters() if p.device.type not in ("cpu", "meta")), None)
    devices = {p.device for p in model.parameters() if p.device.type == kind}
    python, numpy = random.getstate(), np.random.get_state()
    with uninterrupted():
        try:
            with torch.random.fork_rng(devices, device_type=kind or "cuda"):
                yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            for module, mode in training:
                module.training = mode


def eagerly() -> contextlib.AbstractContextManager[Any]:
    """A context in which compiled parts run as they were written."""
    # Importing the compiler takes seconds; where nobody has, nothing is compiled.
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
