"""What a bundle's provenance says of its making: everything that decides its bytes."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from kvcal_artifacts.checked import Json

from ..methods.base import Method, settings_of
from ..methods.vqkv import VQKV
from ..report.version import __version__

if TYPE_CHECKING:
    from ..text.token_windows import Windows


def provenance(
    method: Method | VQKV,
    text: Windows,
    model_record: Mapping[str, Json],
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    seed: int,
) -> dict[str, Json]:
    """Everything that decides the bytes; no times, no paths of this machine."""
    import transformers

    return {
        "tool": f"kvcal {__version__}",
        "method": method.name,
        "settings": settings_of(method),
        "model": model_record,
        "text": {
            "source": text.source,
            "sha256": text.sha256,
            "ids_sha256": text.ids_sha256,
            "train_windows": len(text.train),
            "holdout_windows": len(text.holdout),
            "length": int(text.train.shape[1]),
            **({} if text.column is None else {"column": text.column}),
        },
        "seed": seed,
        "batch": batch,  # of windows: it decides the last bits of products
        "dtype": str(dtype).removeprefix("torch."),
        "device": device_name(device),
        **({"cpu": cpu_record()} if device.type == "cpu" else {}),
        "versions": {
            "python": ".".join(platform.python_version_tuple()[:2]),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def device_name(device: torch.device) -> str:
    return device.type if device.type == "cpu" else torch.cuda.get_device_name(device)


def cpu_record() -> dict[str, Json]:
    """What decides the last bits of sums on a CPU: how they are split over threads, and its vector instructions."""
    return {"threads": torch.get_num_threads(), "vectors": torch.backends.cpu.get_cpu_capability()}
