"""A loss or gradient that is not finite never reaches the weights, on any process.

On a GPU waiting for each update's numbers would leave it idle. There the check stays on the device: torch's
fused optimizers take a flag and leave the weights alone where it is set. The flag stays set, so the weights
are still those before the first bad update when the host reads it, some updates later.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from wellposed.train.agree import largest
from wellposed.train.reading import read


class Guard:
    """Makes the optimizer's steps, except bad ones.

    Args:
        module: whose running statistics a bad batch must not reach either.
        optimizer: of its parameters.
        device: where the loss is.
        goes_on: a bad update is left out and training goes on, else all later ones are left out too.
        on_host: read the flag at every update.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, device: torch.device, *, goes_on: bool, on_host: bool
    ) -> None:
        self.optimizer, self.goes_on, self.on_host = optimizer, goes_on, on_host
        self.statistics = [
            buffer
            for part in module.modules()
            if isinstance(part, _BatchNorm)
            for buffer in (part.running_mean, part.running_var, part.num_batches_tracked)
            if buffer is not None
        ]
        self._before: list[Tensor] = []
        self.left_out_last = False
        """Whether the last update was left out; known on the host only with ``on_host``."""
        # bad now or before, updates left out, the first bad one
        self._state = torch.tensor([0.0, 0.0, -1.0], device=device, dtype=torch.float64)
        self._flag = torch.zeros((), device=device)
        if not on_host:
            optimizer.found_inf = self._flag  # type: ignore[attr-defined]

    def begin(self) -> None:
        """Before the forward pass."""
        self._before = [buffer.clone() for buffer in self.statistics]

    def step(self, update: int, loss: Tensor, norm: Tensor) -> None:
        """One step of the optimizer, if loss and gradient norm are finite on all processes."""
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        is_bad = largest((~(loss.isfinite() & whole.isfinite())).to(self._flag.dtype))
        self._flag.copy_(is_bad if self.goes_on else torch.maximum(self._flag, is_bad))
        first = torch.where((is_bad > 0) & (self._state[2] < 0), float(update), self._state[2])
        flag = self._flag.double()
        self._state.copy_(torch.stack([torch.maximum(self._state[0], flag), self._state[1] + flag, first]))
        self.left_out_last = self.on_host and bool(self._flag)
        if not self.left_out_last:
            self.optimizer.step()
        for buffer, before in zip(self.statistics, self._before, strict=True):
            buffer.copy_(torch.where(self._flag > 0, before, buffer))

    def put_back(self) -> None:
        """The running statistics as they were at :meth:`begin`."""
        for buffer, before in zip(self.statistics, self._before, strict=True):
            buffer.copy_(before)

    def read(self) -> tuple[int, int | None]:
        """How many updates were left out so far, and the first of them; waits for the device."""
        bad, left_out, first = read(self._state)
        return int(left_out), int(first) if bad else None

    def reset(self) -> None:
        """Forget what was; after a rollback."""
        self._flag.zero_()
        self._state.copy_(torch.tensor([0.0, 0.0, -1.0], dtype=torch.float64))


def takes_flag(optimizer: Optimizer) -> bool:
    """Whether an optimizer leaves out steps on the device."""
    return all(group.get("fused") for group in optimizer.param_groups)
