"""The entry point that vLLM calls once in each of its processes, or more often."""

from __future__ import annotations

ON_CPU = "kvcal_vllm.backend.KVCalBackend"
ON_GPU = "kvcal_vllm.gpu.backend.KVCalGPUBackend"


def register() -> None:
    """Name the attention backend of this platform to vLLM: as CUSTOM, on a CPU also instead of CPU_ATTN. A second call
    changes nothing.

    vLLM takes CPU_ATTN on a CPU whatever was asked for. Without `--attention-backend CUSTOM` the backend is vLLM's own
    there, too.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CUSTOM, ON_GPU)
        return
    for member in (AttentionBackendEnum.CUSTOM, AttentionBackendEnum.CPU_ATTN):
        register_backend(member, ON_CPU)
