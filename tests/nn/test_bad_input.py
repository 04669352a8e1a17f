"""Wrong input raises the right exception, whose message says what was got."""

import re
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor

from wellposed.nn import ContextBroadcast, PixelGraying, TokenGraying
from wellposed.nn.functional import broadcast, gray

TOKENS = torch.ones(3, 4)

NOT_FRACTIONS = [
    pytest.param(0, ValueError, r"got 0\b", id="zero"),
    pytest.param(0.0, ValueError, r"got 0\.0", id="zero float"),
    pytest.param(-1, ValueError, "got -1", id="negative"),
    pytest.param(1.5, ValueError, r"got 1\.5", id="above one"),
    pytest.param(float("nan"), ValueError, "got nan", id="nan"),
    pytest.param(float("inf"), ValueError, "got inf", id="inf"),
    pytest.param("0.5", TypeError, "got str", id="string"),
    pytest.param(True, TypeError, "got bool", id="bool"),
    pytest.param([0.5], TypeError, "got list", id="list"),
    pytest.param(0.5j, TypeError, "got complex", id="complex"),
]
over_fractions = pytest.mark.parametrize(("value", "error", "message"), NOT_FRACTIONS)

NOT_TOKENS = [
    pytest.param(torch.ones(3, 4, dtype=torch.int64), TypeError, r"got torch\.int64", id="integers"),
    pytest.param(torch.ones(3, 4, dtype=torch.uint8), TypeError, r"got torch\.uint8", id="bytes"),
    pytest.param(torch.ones(3, 4, dtype=torch.bool), TypeError, r"got torch\.bool", id="bools"),
    pytest.param(torch.ones(3, 4, dtype=torch.complex64), TypeError, r"got torch\.complex64", id="complex"),
    pytest.param(np.ones((3, 4)), TypeError, "got ndarray", id="numpy"),
    pytest.param([[1.0, 2.0]], TypeError, "got list", id="list"),
    pytest.param(None, TypeError, "got NoneType", id="none"),
    pytest.param(torch.ones(4), ValueError, r"got shape \(4,\)", id="vector"),
    pytest.param(torch.tensor(1.0), ValueError, r"got shape \(\)", id="scalar"),
    pytest.param(torch.ones(0, 4), ValueError, r"got shape \(0, 4\)", id="no token"),
    pytest.param(torch.ones(2, 3, 0), ValueError, r"got shape \(2, 3, 0\)", id="no channel"),
]
over_tokens = pytest.mark.parametrize(("x", "error", "message"), NOT_TOKENS)
over_methods = pytest.mark.parametrize("method", ["svd", "spectral", "dct"])


@over_fractions
def test_eps(value, error, message):
    with pytest.raises(error, match=f"eps must be .*{message}"):
        gray(TOKENS, value)


@pytest.mark.every_value
@over_fractions
@pytest.mark.parametrize("module", [TokenGraying, lambda eps: PixelGraying(4, eps)], ids=["tokens", "pixels"])
def test_eps_fails_where_the_module_is_made(module, value, error, message):
    with pytest.raises(error, match=f"eps must be .*{message}"):
        module(value)


@over_fractions
def test_floor(value, error, message):
    with pytest.raises(error, match=f"floor must be .*{message}"):
        gray(TOKENS, 0.5, floor=value)


@over_fractions
def test_floor_fails_where_the_module_is_made(value, error, message):
    with pytest.raises(error, match=f"floor must be .*{message}"):
        TokenGraying(0.5, floor=value)


@pytest.mark.parametrize("method", ["SVD", "", "fft", None])
@pytest.mark.parametrize("call", [lambda method: gray(TOKENS, 0.5, method), lambda m: TokenGraying(None, m)])
def test_method(call, method):
    with pytest.raises(
        ValueError, match=f"method must be one of spectral, svd, dct, condition, energy, got {method!r}"
    ):
        call(method)


@pytest.mark.every_value
@over_tokens
@over_methods
def test_tokens_of_gray(x, method, error, message):
    with pytest.raises(error, match=message):
        gray(x, 0.5, method)


@pytest.mark.every_value
@over_tokens
@over_methods
def test_tokens_of_gray_fail_where_graying_is_the_identity(x, method, error, message):
    with pytest.raises(error, match=message):
        gray(x, 1, method)


@over_tokens
def test_tokens_of_broadcast(x, error, message):
    with pytest.raises(error, match=message):
        broadcast(x)


@pytest.mark.parametrize("shape", [(3,), (5,), (1,), (1, 4), (3, 4)])
def test_shape_of_scale(shape):
    with pytest.raises(ValueError, match=re.escape(f"4 channels, got shape {shape}")):
        broadcast(TOKENS, torch.ones(shape))


def test_tokens_of_a_scaled_module_with_other_channels():
    with pytest.raises(ValueError, match=r"4 channels, got shape \(5,\)"):
        ContextBroadcast(5)(TOKENS)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (0.5, "got float"),
        (np.ones(4), "got ndarray"),
        (torch.ones(4, dtype=torch.complex64), r"got torch\.complex64"),
        (torch.ones(4, dtype=torch.int64), r"got torch\.int64"),
    ],
    ids=["float", "numpy", "complex", "integer"],
)
def test_type_of_scale(scale, message):
    with pytest.raises(TypeError, match=f"scale must be .*{message}"):
        broadcast(TOKENS, scale)


def test_identity_needs_channels():
    with pytest.raises(ValueError, match="init='identity' needs a learned scale, got channels=None"):
        ContextBroadcast(init="identity")


@pytest.mark.parametrize("channels", [0, -1])
def test_channels(channels):
    with pytest.raises(ValueError, match=f"channels must be at least 1, got {channels}"):
        ContextBroadcast(channels)


@pytest.mark.parametrize("channels", [None, 4])
def test_init(channels):
    with pytest.raises(ValueError, match="init must be one of cb, identity, got 'zero'"):
        ContextBroadcast(channels, init="zero")


@pytest.mark.parametrize("patch_size", [0, -2, (0, 4), (4, 0), (4, -1)])
def test_patch_size_that_is_not_positive(patch_size):
    with pytest.raises(ValueError, match=re.escape(f"patch_size must be positive, got {patch_size}")):
        PixelGraying(patch_size)


@pytest.mark.parametrize("patch_size", [4.0, (4.5, 4), "4", (4, 4, 4), None, True])
def test_patch_size_that_is_not_one_or_two_integers(patch_size: Any):
    with pytest.raises((TypeError, ValueError), match=r"patch_size must be .*got"):
        PixelGraying(patch_size)


@pytest.mark.parametrize(("patch", "size"), [(4, (8, 10)), (4, (6, 8)), ((2, 3), (4, 4)), (16, (8, 8))])
def test_image_that_is_not_a_multiple_of_the_patch(patch, size):
    with pytest.raises(ValueError, match=rf"multiple of the patch size .*got {size[0]} x {size[1]}"):
        PixelGraying(patch)(torch.ones(3, *size))


def test_image_of_bytes():
    with pytest.raises(TypeError, match=r"got torch\.uint8"):
        PixelGraying(4)(torch.ones(3, 8, 8, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (PIL.Image.new("RGB", (8, 8)), r"got Image; put v2\.ToImage"),
        (np.ones((8, 8, 3)), "got ndarray"),
    ],
    ids=["PIL", "numpy"],
)
def test_image_that_is_not_a_tensor(image, message):
    with pytest.raises(TypeError, match=message):
        PixelGraying(4)(image)


@pytest.mark.parametrize("image", [torch.ones(8, 8), torch.ones(8)], ids=["no channel axis", "vector"])
def test_image_with_too_few_axes(image: Tensor):
    shape = re.escape(str(tuple(image.shape)))
    with pytest.raises(ValueError, match=f"at least three axes .*got shape {shape}"):
        PixelGraying(4)(image)


@pytest.mark.parametrize("shape", [(0, 8, 8), (3, 0, 8), (3, 8, 0)])
def test_image_without_pixels(shape):
    with pytest.raises(ValueError, match=r"got shape \(\d+, \d+\)"):
        PixelGraying(4)(torch.ones(shape))
