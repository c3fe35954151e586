"""The entry point that vLLM calls once in each of its processes, or more often."""

from __future__ import annotations

import logging
from typing import Any

ON_CPU = "kvcal_vllm.backend.KVCalBackend"
ON_GPU = "kvcal_vllm.gpu.backend.KVCalGPUBackend"

logger = logging.getLogger("vllm.kvcal")  # below vLLM's own, whose level and format it takes


def register() -> None:
    """Name the attention backend of this platform to vLLM: as CUSTOM, on a CPU also instead of CPU_ATTN. A second call
    changes nothing.

    vLLM takes CPU_ATTN on a CPU whatever was asked for. Without `--attention-backend CUSTOM` the backend is vLLM's own
    there, too. Names that another package has registered are left to it, with a warning.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    members = [AttentionBackendEnum.CUSTOM]
    if on_cpu := current_platform.is_cpu():
        members.append(AttentionBackendEnum.CPU_ATTN)
    if taken := taken_by_others(members):
        logger.warning("kvcal: %s, and is left as it is: kvcal serves nothing in this process; %s", taken, ALONE)
        return
    for member in members:
        register_backend(member, ON_CPU if on_cpu else ON_GPU)


ALONE = "VLLM_PLUGINS=kvcal loads kvcal without other plug-ins"


def taken_by_others(members: list[Any]) -> str | None:
    """Which of vLLM's names of backends another package has registered, and as what; None where none is."""
    for member in members:
        if member.is_overridden() and not (path := member.get_path()).startswith("kvcal_vllm."):
            return f"attention backend {member.name} is {path}, of another package"
    return None
