"""Numbers from the device, waited for asleep."""

import torch
from torch import Tensor


def read(values: Tensor) -> list[float]:
    """The values (n,) on the host.

    Plain reading keeps a core busy until the GPU is there. Where many small runs share a machine, others need
    that core to compile.
    """
    if values.is_cuda:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(values.device))
        event.synchronize()
    found: list[float] = values.tolist()
    return found
