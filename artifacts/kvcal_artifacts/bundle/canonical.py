"""One text for one value, and one hash: canonical JSON, and the bytes of tensors."""

from __future__ import annotations

import hashlib
import json
import math

import torch
from torch import Tensor


def canonical(value: object) -> str:
    """JSON with sorted keys and no spaces: the same value gives the same text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_text(text: str) -> str:
    """The SHA-256 of a text in UTF-8, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor of any dtype and device, row after row."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as headers have it: float16 of torch.float16."""
    return str(dtype).removeprefix("torch.")


def is_finite(tensor: Tensor) -> bool:
    """Whether it holds neither NaN nor infinity; isfinite takes forty times as long for half a gigabyte."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = tensor.aminmax()  # NaN where one is
    return bool((low > -math.inf) & (high < math.inf))
