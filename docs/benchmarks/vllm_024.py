"""kvcal's backend of GPUs in vLLM 0.24, to measure only: that release has no `AttentionBackend.customize_spec`.

The plug-in needs vLLM 0.32. `adapt` gives 0.24 what it misses: the bytes of a page (`Attention.get_kv_cache_spec`), the
shape of a layer's cache (`get_kv_cache_shape`), and a name that the plug-in imports (`KVCacheLayout`).
"""

from __future__ import annotations

from enum import Enum
from functools import wraps
from typing import Any

import torch

RELEASE = "0.24."


class Layout(Enum):
    """Of later releases: layer, block, head, token, content."""

    LBHNC = "LBHNC"


def adapt() -> None:
    """Name kvcal's backend to vLLM 0.24 as CUSTOM; a second call changes nothing. To be called before a model is made.

    A page of kvcal is declared as one of TurboQuant's, whose size is given by the bytes of a token in a head. Raises
    RuntimeError in another release.
    """
    import vllm
    from vllm.v1 import kv_cache_interface
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not vllm.__version__.startswith(RELEASE):
        raise RuntimeError(f"vLLM {vllm.__version__}: this is for {RELEASE}x; later releases need no adapter")
    if not hasattr(kv_cache_interface, "KVCacheLayout"):
        kv_cache_interface.KVCacheLayout = Layout
    from vllm.model_executor.layers.attention import Attention

    from kvcal_vllm.gpu.backend import KVCalGPUBackend
    from kvcal_vllm.plugin import ON_GPU

    register_backend(AttentionBackendEnum.CUSTOM, ON_GPU)
    KVCalGPUBackend.get_kv_cache_shape = staticmethod(cache_shape)
    if not hasattr(Attention.get_kv_cache_spec, "__wrapped__"):
        Attention.get_kv_cache_spec = _sized(Attention.get_kv_cache_spec)


def cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
) -> tuple[int, int, int, int]:
    """Of a layer's cache: pages, kv heads, 32 tokens, bytes of a token in a head."""
    from kvcal_vllm.gpu.backend import KVCalGPUBackend

    served = KVCalGPUBackend._served
    if served is None or served.token_bytes is None:
        raise RuntimeError("a bundle whose layers take unlike bytes: vLLM 0.24 does not say whose shape it asks for")
    return num_blocks, num_kv_heads, block_size, served.token_bytes


def _sized(stock: Any) -> Any:
    from vllm.v1.kv_cache_interface import TQFullAttentionSpec

    from kvcal_vllm.backend import KVCalImpl

    @wraps(stock)
    def sized(layer: Any, vllm_config: Any) -> Any:
        spec = stock(layer, vllm_config)
        if not isinstance(layer.impl, KVCalImpl):
            return spec
        return TQFullAttentionSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size,
            dtype=torch.uint8,
            tq_slot_size=layer.impl.paged(layer).token_bytes,
        )

    return sized


def on_cpu() -> None:
    """Let vLLM for a CPU take the same backend, with the kernels' references for kernels: shows that all of it runs."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kvcal_kernels import attention
    from kvcal_kernels.attention import reference
    from kvcal_kernels.quantise import pages as storing
    from kvcal_vllm import backend
    from kvcal_vllm.plugin import ON_GPU

    class References:
        """Under the names of the kernels."""

        store = staticmethod(storing.store)

        class Workspace:
            def __init__(self, device: torch.device) -> None:
                self.partial = torch.empty(0, device=device)

        @staticmethod
        def attend_pages(*arguments: Any, workspace: Any, out: torch.Tensor) -> None:
            *given, _, _ = arguments
            count = int(given[5][-1])
            out[:count] = reference.attend_pages(given[0][:count], *given[1:])

    attention.fast = attention.transform = storing.fast = References
    backend.check_device = lambda config, gpu: None
    register_backend(AttentionBackendEnum.CPU_ATTN, ON_GPU)
