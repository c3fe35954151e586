"""`--gpus`: the GPUs of the processes of `kvcal build`, one each."""

from __future__ import annotations

import os
import re

import torch

from kvcal_artifacts.errors import UsageError

VISIBLE = "CUDA_VISIBLE_DEVICES"
PART = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def gpu_names() -> list[str]:
    """The name of each GPU that this process sees."""
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def gpus_of(text: str) -> list[str]:
    """ "0-2,5" -> what CUDA_VISIBLE_DEVICES is to be in each process: a number, or what it calls that GPU here.

    Raises UsageError for what is no such list, for a GPU that is not here or is named twice, and for GPUs of several
    kinds: bundles record the kind.
    """
    numbers = _numbers(text)
    names = gpu_names()
    if missing := [number for number in numbers if number >= len(names)]:
        there = f"there are 0 to {len(names) - 1}" if len(names) > 1 else "there is only 0"
        raise UsageError(
            f"--gpus {text}: no GPU {missing[0]} here; {there if names else 'there is none at all, leave it out'}"
        )
    if twice := [number for number in numbers if numbers.count(number) > 1]:
        raise UsageError(f"--gpus {text}: GPU {twice[0]} is named twice; each builds one bundle at a time")
    kinds = {names[number]: number for number in (0, *numbers)}  # 0: whose kind decides what is up to date
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise UsageError(f"--gpus {text}: GPU {first} is a {one}, {second} a {other}: give GPUs of one kind, GPU 0's")
    called = [part.strip() for part in os.environ.get(VISIBLE, "").split(",") if part.strip()]
    return [called[number] if called else str(number) for number in numbers]


def _numbers(text: str) -> list[int]:
    numbers: list[int] = []
    for part in text.split(","):
        match = PART.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (1, 0)
        if first > last:
            raise UsageError(f"--gpus {text}: {part.strip()!r} is no GPU; give numbers and ranges, as 0-7 or 0,2,5")
        numbers += range(first, last + 1)
    return numbers
