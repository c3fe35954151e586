"""The entry point that vLLM calls once in each of its processes, or more often."""

from __future__ import annotations

BACKEND = "kvcal_vllm.backend.KVCalBackend"


def register() -> None:
    """Name the attention backend to vLLM, as CUSTOM and instead of CPU_ATTN. A second call changes nothing.

    vLLM takes CPU_ATTN on a CPU whatever was asked for. Without `--attention-backend CUSTOM` the backend is vLLM's own
    there, too.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for member in (AttentionBackendEnum.CUSTOM, AttentionBackendEnum.CPU_ATTN):
        register_backend(member, BACKEND)
