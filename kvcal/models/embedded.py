"""The embedded model's weights: int8 rows with a float16 scale each, as kvcal/demo/train.py writes them.

`NAME.q` holds the codes and `NAME.s` the scales of a matrix; vectors are stored in float16 under their own
name. The rounded weights are the model: they are multiplied out in float32 and only then cast, as the
training script does.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvcal_artifacts.errors import ModelUnavailable

from .hub import one_line


class EmbeddedWeights:
    """A source of parameters for `kvcal.models.weights.fill`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelUnavailable(f"{path}: damaged ({one_line(error)}); install kvcal again") from error

    def get(self, name: str, like: Tensor, device: torch.device) -> Tensor:
        tensor = self._dense(name)
        if tensor.shape != like.shape:
            raise ModelUnavailable(
                f"{self.path}: {name} has shape {tuple(tensor.shape)}, config.json asks for "
                f"{tuple(like.shape)}; install kvcal again"
            )
        return tensor.to(like.dtype).to(device)

    def _dense(self, name: str) -> Tensor:
        if f"{name}.q" in self.tensors:
            return self.tensors[f"{name}.q"].float() * self.tensors[f"{name}.s"].float()[:, None]
        if name in self.tensors:
            return self.tensors[name].float()
        raise ModelUnavailable(f"{self.path}: {name} is missing; install kvcal again")
