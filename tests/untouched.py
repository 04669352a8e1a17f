"""Is a model exactly as it was? A fingerprint to compare before and after."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Classes, modes, hooks, parameters, buffers and gradients of every module, and all random states."""
    modules = [
        (
            name,
            type(module),
            module.training,
            [list(hooks.values()) for hooks in _hooks(module)],
            list(module._modules),
        )
        for name, module in model.named_modules()
    ]
    tensors = {
        name: (tensor.clone(), None if tensor.grad is None else tensor.grad.clone(), tensor.requires_grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    return {
        "modules": modules,
        "tensors": tensors,
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "mha fast path": torch.backends.mha.get_fastpath_enabled(),
        "grad mode": torch.is_grad_enabled(),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before["modules"] == after["modules"]
    assert before["tensors"].keys() == after["tensors"].keys()
    for name, (value, grad, requires_grad) in before["tensors"].items():
        value_now, grad_now, requires_grad_now = after["tensors"][name]
        assert torch.equal(value, value_now), name
        assert requires_grad == requires_grad_now, name
        assert (grad is None) == (grad_now is None), name
        assert grad is None or torch.equal(grad, grad_now), name
    assert torch.equal(before["torch"], after["torch"])
    assert before["python"] == after["python"]
    assert all(np.array_equal(a, b) for a, b in zip(before["numpy"], after["numpy"], strict=True))
    assert before["mha fast path"] == after["mha fast path"]
    assert before["grad mode"] == after["grad mode"]


def _hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return (
        module._forward_hooks,
        module._forward_hooks_always_called,
        module._forward_pre_hooks,
        module._backward_hooks,
    )
