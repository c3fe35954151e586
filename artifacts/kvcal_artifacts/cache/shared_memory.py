"""Memory that the layers of a cache share on a device, because they run one after the other."""

from __future__ import annotations

import torch

from ..paths import codebook, fused
from ..paths.dequantised import SharedStorage


class SharedMemory:
    """Workspaces of kernels, and storage into which blocks are dequantised. keeps: graphs are recorded with it."""

    def __init__(self, kernels: str, keeps: bool) -> None:
        self._kernels, self._keeps = kernels, keeps
        self._workspaces: dict[tuple[torch.device, bool], object] = {}
        self._storage: dict[torch.device, SharedStorage] = {}

    def workspace(self, device: torch.device, vector: bool = False) -> object:
        """Memory for launches on a device. vector: for those over vector codes."""
        key = device, vector
        if key not in self._workspaces and vector:
            self._workspaces[key] = codebook.workspace(self._kernels, device, self._keeps)
        elif key not in self._workspaces:
            self._workspaces[key] = fused.workspace(self._kernels, device)
        return self._workspaces[key]

    def storage(self, device: torch.device) -> SharedStorage:
        """Storage on a device into which layers dequantise their blocks."""
        return self._storage.setdefault(device, SharedStorage())

    @property
    def nbytes(self) -> int:
        """Bytes of the storage into which layers dequantise their blocks."""
        return sum(storage.nbytes for storage in self._storage.values())
