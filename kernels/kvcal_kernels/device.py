"""The GPU that work goes to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a CUDA device the current one meanwhile. Triton launches there, and CUDA's events, streams and graphs are of it,
    wherever the tensors are: a model on cuda:1, or spread over several GPUs, does not change it.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _THERE
    return torch.cuda.device(device)


_THERE = nullcontext()
