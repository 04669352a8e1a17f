"""A ConvMixer for small images, under a name of timm's kind: ``convmixer_256_8``.

timm's own are for 224 pixels and fix their width and depth. This one is of the same class, so all that knows
timm's ConvMixers knows it.

>>> import timm
>>> timm.create_model("convmixer_256_8", depth=2, num_classes=10).num_features
256
"""

from typing import Any

from timm.models import register_model
from timm.models.convmixer import ConvMixer
from torch import nn

__all__ = ["convmixer_256_8"]

_PIXELS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
default_cfgs = {"convmixer_256_8": {"url": "", "input_size": (3, 32, 32), "num_classes": 10, **_PIXELS}}
"""timm looks here when the name is registered."""


@register_model  # type: ignore[untyped-decorator, unused-ignore]
def convmixer_256_8(pretrained: bool = False, **options: Any) -> nn.Module:
    """Width 256, depth 8, kernels of 5 and patches of 2 pixels."""
    if pretrained:
        raise ValueError("there are no pretrained weights of convmixer_256_8; leave pretrained out.")
    unused = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
    given = {name: value for name, value in options.items() if name not in unused}
    model: nn.Module = ConvMixer(**{"dim": 256, "depth": 8, "kernel_size": 5, "patch_size": 2, **given})
    config: Any = default_cfgs["convmixer_256_8"]
    model.pretrained_cfg = model.default_cfg = config
    return model
