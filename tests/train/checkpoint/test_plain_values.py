"""Values come back from JSON as what they were, type by type."""

import json
import math
from collections import OrderedDict

import numpy as np
import pytest
import torch

from wellposed.train.checkpoint import TensorName, decode, encode

VALUES = {
    "none": None,
    "true": True,
    "int": 2**70,
    "float": 0.1 + 0.2,
    "smallest": 5e-324,
    "minus zero": -0.0,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "text": 'β₁ "quoted" $tuple \ud800',
    "tuple": (0.9, 0.999),
    "nested": {"a": [(1, (2.5, None)), []], "b": ()},
    "int keys": {0: {1: "one"}, "0": "text key"},
    "tuple keys": {(1, "a"): 1},
    "keys like tags": {"$tuple": [1, 2], "$float": "x"},
    "dtype": torch.bfloat16,
    "device": torch.device("cuda:1"),
    "tensor": TensorName("head.weight/exp_avg", parted=True),
    "numpy": [np.float32(0.1), np.float64(0.1), np.int64(-3), np.bool_(True), np.float16(math.inf)],
}


def types(value: object) -> object:
    match value:
        case dict():
            return {key: types(item) for key, item in value.items()}
        case list() | tuple():
            return type(value), [types(item) for item in value]
        case _:
            return type(value)


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back(name: str) -> None:
    value = VALUES[name]
    back = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert back == value
    assert types(back) == types(value)
    if isinstance(value, float):
        assert math.copysign(1, back) == math.copysign(1, value)


def test_nan_comes_back() -> None:
    assert math.isnan(decode(json.loads(json.dumps(encode(math.nan), allow_nan=False))))


def test_the_order_of_keys_comes_back() -> None:
    value = OrderedDict.fromkeys(["z", "a", "m"], 0)
    assert list(decode(json.loads(json.dumps(encode(value))))) == ["z", "a", "m"]


@pytest.mark.parametrize("value", [torch.zeros(2), {1, 2}, object(), print, b"bytes", 1j])
def test_what_cannot_come_back_is_refused_with_its_place(value: object) -> None:
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\] must be made of numbers"):
        encode({"a": [0, value]})


@pytest.mark.parametrize("text", ['{"$pickle": "gASV"}', '{"$tuple": [1], "x": 2}', '{"$dtype": "load"}'])
def test_unknown_tags_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        decode(json.loads(text))
