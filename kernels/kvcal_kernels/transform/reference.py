"""Coordinates to the codes of their tiers, in plain PyTorch: what the kernel is held to, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..lattice import nearest
from ..layout import TransformForm
from ..layout.transform import CODE_BITS
from ..packing import pack

LEAST = 2.0**-24  # a norm that numbers are divided by, at least


def encode(y: Tensor, norm: Tensor, form: TransformForm, points: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
    """Return the codes of each tier of a form, uint8 (B, H, N, pairs or coordinates, bytes), as layout/transform.py
    lays them out. y (B, H, N, 32, coded) float32: coordinates; norm (B, N, 32) float16; points: by bits (n, 2) float32.
    """
    unit = y / norm.float().clamp_min(LEAST)[:, None, ..., None]
    codes, first = [], 0
    for bits, count in form.tiers:
        part = unit[..., first : first + 2 * count]
        first += 2 * count
        if bits == 1:
            numbers = (part >= 0).to(torch.uint8)
        else:
            numbers = nearest(part.reshape(-1, 2), points[bits]).view(*part.shape[:-1], count)
        codes.append(pack(numbers.transpose(-1, -2), CODE_BITS[bits]).contiguous())
    return tuple(codes)
