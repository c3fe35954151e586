"""vLLM's attention backend over pages of packed keys and values: classes that vLLM makes, and nothing that computes.

This is the backend of a CPU, and what it shares with that of GPUs (gpu.backend). It is registered as CUSTOM and instead
of CPU_ATTN, as which vLLM takes it on a CPU. Where nobody asked for kvcal it is vLLM's backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec

from kvcal_artifacts.errors import UnsupportedModel, UsageError
from kvcal_kernels.layout import BLOCK

from .attention import Step, attend, attend_tails
from .paging import PagedLayer
from .plan import Plan, Rank, plan
from .plugin import logger, one_line
from .settings import Settings, active
from .tails import LayerTails, TailTable


def plan_of(config: VllmConfig, gpu: bool = False) -> Plan:
    """The plan of an engine that asked for kvcal, computed and logged once per set of settings and model. gpu: whether
    kvcal's kernels serve it, on a CUDA GPU.
    """
    asked = active(config)
    assert asked is not None
    check_device(config, gpu)
    _check_engine(config)
    model, size = config.model_config, config.parallel_config.tensor_parallel_size
    rank = Rank(get_tensor_model_parallel_rank(), size) if size > 1 else Rank()
    asked_of = asked, str(model.model), model.revision, _Hashed(model.hf_text_config), model.dtype.itemsize
    served = _plan(*asked_of, gpu, rank)
    if served.tailed and config.kv_transfer_config is not None:
        raise UsageError(
            f"kvcal: {served.name} with a KV connector: unfinished blocks lie outside of pages, which it would not "
            "move; serve a scheme whose tokens are packed one by one"
        )
    return served


@dataclass(frozen=True)
class _Hashed:
    """A config that stands for itself in a cache's key."""

    config: Any

    def __hash__(self) -> int:
        return id(self.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and other.config is self.config


@cache
def _plan(
    asked: Settings, model: str, revision: str | None, config: _Hashed, multiple: int, gpu: bool, rank: Rank
) -> Plan:
    served = plan(asked, config.config, revision, model, multiple, gpu, rank)
    logger.info(served.describe())
    return served


def report_capacity(served: Plan, config: VllmConfig) -> None:
    """Log, once, how many tokens vLLM's pages hold; nothing while vLLM only measures memory, with a few blocks."""
    cache = config.cache_config
    if cache.num_gpu_blocks is not None:
        _log_capacity(served, cache.num_gpu_blocks * cache.block_size // BLOCK)


@cache
def _log_capacity(served: Plan, pages: int) -> None:
    logger.info(served.capacity(pages))


def check_device(config: VllmConfig, gpu: bool) -> None:
    """Raise UsageError where the engine's device is not the one that this backend serves on."""
    device, parallel = config.device_config.device_type, config.parallel_config
    if not (current_platform.is_cuda() if gpu else device == "cpu"):
        name = current_platform.device_name
        raise UsageError(f"kvcal: device {device} ({name}): this version serves on NVIDIA GPUs and on a CPU")
    sizes = {"tensor": parallel.tensor_parallel_size, "pipeline": parallel.pipeline_parallel_size}
    for kind, size in sizes.items():
        if not gpu and size != 1:
            raise UsageError(f"kvcal: {kind} parallel size {size}: a CPU is served by one process")


def _check_engine(config: VllmConfig) -> None:
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size != 1:
        raise UsageError(
            f"kvcal: decode-context parallel size {parallel.decode_context_parallel_size}: heads can be split over "
            "devices (--tensor-parallel-size), tokens of a request cannot"
        )
    if parallel.use_ubatching:
        raise UsageError(
            "kvcal: two batches at a time (--enable-dbo): all layers share the kernels' memory; leave it out"
        )
    if config.cache_config.cache_dtype != "auto":
        raise UsageError(
            f"kvcal: --kv-cache-dtype {config.cache_config.cache_dtype}: the bundle says how: leave it out"
        )
    if config.speculative_config is not None:
        raise UsageError("kvcal: speculative decoding: this version does not serve it")


class KVCalBackend(CPUAttentionBackend):
    """vLLM's CPU backend, with kvcal's pages where a bundle was asked for."""

    _served: ClassVar[Plan | None] = None  # of the newest engine in this process

    @classmethod
    def get_impl_cls(cls) -> Any:
        config = get_current_vllm_config()
        with one_line():
            cls._served = None if active(config) is None else plan_of(config)
        if cls._served is None:
            return CPUAttentionBackend.get_impl_cls()
        if cls._served.token_bytes is None:
            size_each_layer()
        return KVCalImpl

    @classmethod
    def stands_aside(cls) -> bool:
        """Whether this is vLLM's own backend in the newest engine; the conformance suite asks."""
        return cls._served is None

    @classmethod
    def get_builder_cls(cls) -> Any:
        return CPUAttentionBackend.get_builder_cls() if cls._served is None else KVCalMetadataBuilder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> Any:
        return CPUAttentionBackend.get_supported_kernel_block_sizes() if cls._served is None else [BLOCK]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        if cls._served is None or spec.state_content_bytes is not None:
            return spec
        return replace(spec, state_content_bytes=cls._served.token_bytes)


def size_each_layer() -> None:
    """Wrap vLLM's `Attention.get_kv_cache_spec`, once, for bundles whose layers take unlike bytes.

    `customize_spec`, which does so for all others, does not get the layer.
    """
    stock = Attention.get_kv_cache_spec
    if hasattr(stock, "__wrapped__"):
        return

    @wraps(stock)
    def sized(layer: Any, vllm_config: VllmConfig) -> Any:
        spec = stock(layer, vllm_config)
        if isinstance(layer.impl, KVCalImpl):
            return replace(spec, state_content_bytes=layer.impl.paged(layer).token_bytes)
        return spec

    Attention.get_kv_cache_spec = sized


@dataclass
class KVCalMetadata:
    """A step, and how many tokens it has without padding."""

    step: Step
    tokens: int


class KVCalMetadataBuilder(AttentionMetadataBuilder[KVCalMetadata]):
    """Reads a step out of vLLM's metadata."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in layer_names]
        report_capacity(layers[0].impl.plan, vllm_config)
        self._tails: TailTable | None = None
        if any(layer.impl.paged(layer).tailed for layer in layers):
            self._tails = TailTable(2 * vllm_config.scheduler_config.max_num_seqs)
            for layer in layers:
                layer.impl.tails = LayerTails(self._tails)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KVCalMetadata:
        common, count = common_attn_metadata, common_attn_metadata.num_reqs
        if common.causal is not True:
            raise UsageError("kvcal: attention that is not causal cannot be served")
        starts = tuple(common.query_start_loc_cpu[: count + 1].tolist())
        lengths = tuple(common.seq_lens[:count].tolist())
        step = Step(starts, lengths, common.block_table_tensor[:count].long())
        if self._tails is not None:
            step = replace(step, tails=tuple(self._tails.begin(step.spans)))
        return KVCalMetadata(step, common.num_actual_tokens)


class KVCalImpl(AttentionImpl[KVCalMetadata]):
    """Attention of one layer. Raises UnsupportedModel for what kvcal's pages cannot serve, when the model is built.

    gpu: whether kvcal's kernels serve it (gpu.backend).
    """

    gpu: ClassVar[bool] = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        reasons = {
            "ALiBi slopes": alibi_slopes is not None,
            f"a sliding window of {sliding_window}": sliding_window is not None,
            "soft-capped logits": bool(logits_soft_cap),
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            "keys and values of another layer": kv_sharing_target_layer_name is not None,
            "attention sinks": sinks is not None,
        }
        with one_line():
            for what, holds in reasons.items():
                if holds:
                    raise UnsupportedModel(
                        f"kvcal: a layer with {what}: kvcal's pages hold plain causal attention only"
                    )
        self.scale, self.plan = float(scale), plan_of(get_current_vllm_config(), self.gpu)
        self.tails: LayerTails | None = None  # of this layer, where its plan needs them

    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        count = len(slot_mapping)
        self.paged(layer).store(kv_cache, slot_mapping, key[:count], value[:count], self.tails)

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: KVCalMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise UsageError("kvcal: quantised outputs of attention cannot be served")
        if attn_metadata is None:  # vLLM measures memory
            return output
        count = attn_metadata.tokens
        step_tokens, paged = (key[:count], value[:count]), self.paged(layer)
        asked = paged, kv_cache, attn_metadata.step, query[:count], self.scale
        if paged.tailed:
            assert self.tails is not None
            out = attend_tails(*asked, step_tokens, self.tails, self.plan.deterministic)
        else:
            out = attend(*asked, None if self.plan.deterministic else step_tokens)
        output[:count] = out.to(output.dtype).view_as(output[:count])
        return output

    def paged(self, layer: Any) -> PagedLayer:
        """The codecs of a layer."""
        number: int = extract_layer_index(layer.layer_name)
        return self.plan.layers[number]
