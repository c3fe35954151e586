"""One text for one value, and one hash: canonical JSON, and the bytes of tensors."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor


def canonical(value: object) -> str:
    """JSON with sorted keys and no spaces: the same value gives the same text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
