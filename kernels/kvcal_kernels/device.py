"""The GPU that work goes to."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one for a while. Triton launches there, and CUDA's events, streams and graphs
    belong to it, wherever the tensors are: a model on cuda:1, or spread over several GPUs, does not change it.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _THERE
    return torch.cuda.device(device)


_THERE = nullcontext()


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on any device; Triton need not be installed."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def capturing() -> bool:
    """Return whether a CUDA graph is being recorded on this thread's stream: nothing may be read from the device."""
    # torch.cuda.is_available() would ask the environment.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
