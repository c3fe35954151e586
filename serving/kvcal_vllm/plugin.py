"""The entry point that vLLM calls once in each of its processes, or more often."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_kernels.layout import BLOCK

from .settings import active, settings_of

ON_CPU = "kvcal_vllm.backend.KVCalBackend"
ON_GPU = "kvcal_vllm.gpu.backend.KVCalGPUBackend"

logger = logging.getLogger("vllm.kvcal")  # below vLLM's own, whose level and format it takes


def register() -> None:
    """Name the attention backend of this platform to vLLM: as CUSTOM, on a CPU also instead of CPU_ATTN. A second call
    changes nothing.

    vLLM takes CPU_ATTN on a CPU whatever was asked for. Without `--attention-backend CUSTOM` the backend is vLLM's own
    there, too. Names that another package has registered are left to it, with a warning. An engine that names a bundle
    and would not be served by kvcal is refused when its config is made.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    members = [AttentionBackendEnum.CUSTOM]
    if on_cpu := current_platform.is_cpu():
        members.append(AttentionBackendEnum.CPU_ATTN)
    _check_engines(current_platform, members)
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


def _check_engines(platform: Any, members: list[Any]) -> None:
    """Let vLLM's platform, in this process, refuse configs by `check_engine`. vLLM asks it about each engine's config,
    in the process that makes it; no hook of its own does, and kvcal's backend is not asked unless it is selected.
    """
    if not isinstance(platform.check_and_update_config, _Checked):
        platform.check_and_update_config = _Checked(platform.check_and_update_config, members)


class _Checked:
    """vLLM's `check_and_update_config`, and then `check_engine`."""

    def __init__(self, stock: Callable[[Any], None], members: list[Any]) -> None:
        self._stock, self._members = stock, members

    def __call__(self, config: Any) -> None:
        self._stock(config)
        with one_line():
            check_engine(config, self._members)


def check_engine(config: Any, members: list[Any]) -> None:
    """Raise UsageError where a `VllmConfig` names a bundle that kvcal's backend would not serve, or selects that
    backend without one, or with blocks that pages do not divide. members: vLLM's names of backends that kvcal
    registers.
    """
    if config.model_config is None:  # of no engine
        return
    taken = taken_by_others(members)
    if taken is None:
        if active(config) is not None:
            _check_block_size(config.cache_config)
    elif asked := settings_of(config):
        raise UsageError(f"{asked.source} would not be served: {taken}; {ALONE}")


def _check_block_size(cache: Any) -> None:
    """vLLM would refuse it, too, without saying which sizes it may have."""
    if getattr(cache, "user_specified_block_size", False) and cache.block_size % BLOCK:  # older versions do not say
        raise UsageError(
            f"kvcal: --block-size {cache.block_size}: a page holds {BLOCK} tokens: give a multiple of {BLOCK}, or "
            "leave it out"
        )


@contextmanager
def one_line() -> Iterator[None]:
    """Log an error of kvcal's that is raised inside, in a line that begins with "kvcal: ": vLLM ends with a traceback
    of each of its processes.
    """
    try:
        yield
    except KVCalError as error:
        logger.error("kvcal: %s", str(error).removeprefix("kvcal: "))
        raise
