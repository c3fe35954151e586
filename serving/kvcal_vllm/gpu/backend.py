"""vLLM's attention backend on a CUDA GPU: classes that vLLM makes. `layer` has what they launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayer,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from kvcal_artifacts.errors import UsageError
from kvcal_kernels.layout import BLOCK

from ..backend import KVCalImpl, plan_of, report_capacity, size_each_layer
from ..plan import MOST_QUERIES, Plan
from ..plugin import one_line
from .layer import GPULayer, layer_on, scratch_on
from .step import Step, step_of

OLDEST = 8  # compute capability that the kernels need: copies that do not wait, products of 16 x 8


class KVCalGPUBackend(AttentionBackend):
    """kvcal's pages on a CUDA GPU, named to vLLM as CUSTOM."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]
    _served: ClassVar[Plan | None] = None  # of the newest engine in this process

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def get_impl_cls(cls) -> Any:
        with one_line(), torch.device("cpu"):  # vLLM builds a model with the GPU as torch's default device
            cls._served = plan_of(get_current_vllm_config(), gpu=True)
        if cls._served.token_bytes is None:
            size_each_layer()
        return KVCalGPUImpl

    @staticmethod
    def get_builder_cls() -> Any:
        return KVCalGPUMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [BLOCK]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # a head's bytes of a page lie together

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= OLDEST)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True  # so that it is `KVCalImpl` which refuses it, with a reason

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        if cls._served is None or spec.state_content_bytes is not None:
            return spec
        return replace(spec, state_content_bytes=cls._served.token_bytes)


@dataclass
class KVCalGPUMetadata:
    """A step, and how many tokens it has with padding."""

    step: Step
    tokens: int


class KVCalGPUMetadataBuilder(AttentionMetadataBuilder[KVCalGPUMetadata]):
    """Reads a step out of vLLM's metadata without waiting for the device.

    Steps of decode rows alone can be CUDA graphs: what their launches need is reserved before each is captured.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        self._layers = [context[name] for name in layer_names]
        report_capacity(self._layers[0].impl.plan, vllm_config)
        # chunks of few tokens see their exact keys in the default mode, which the kernel does not
        self._most = MOST_QUERIES if self._layers[0].impl.plan.deterministic else 1
        self._init_reorder_batch_threshold(self._most)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KVCalGPUMetadata:
        common, rows = common_attn_metadata, common_attn_metadata.num_reqs
        if common.causal is not True:
            raise UsageError("kvcal: attention that is not causal cannot be served")
        assert common.seq_lens_cpu_upper_bound is not None
        step = step_of(
            common.block_table_tensor[:rows],
            common.seq_lens[:rows],
            common.query_start_loc[: rows + 1],
            common.query_start_loc_cpu[: rows + 1].tolist(),  # the host's
            common.seq_lens_cpu_upper_bound[:rows].tolist(),
            common.num_actual_tokens,
            self._most,
            common.max_seq_len,
        )
        return KVCalGPUMetadata(step, common.num_actual_tokens)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> KVCalGPUMetadata:
        """The metadata of a step that is captured next: its number of programs is that of the longest rows."""
        metadata = self.build(0, common_attn_metadata)
        if metadata.step.prefills:
            raise UsageError("kvcal: a CUDA graph of chunks of a prompt: only steps of decode rows can be captured")
        metadata.step.lengths.fill_(1)  # so that launches take no time; a replay has its own
        step = replace(metadata.step, blocks=0)
        scratch = scratch_on(self.device)
        for layer in self._distinct():
            impl: KVCalGPUImpl = layer.impl
            shape = metadata.tokens, impl.query_heads, impl.head_size
            query = torch.zeros(shape, dtype=impl.dtype, device=self.device)
            impl.kernels(layer).reserve(step, query, layer.kv_cache, scratch)
        return replace(metadata, step=replace(step, captured=True))

    def _distinct(self) -> list[Any]:
        """Layers, one of those that share their kernels and tables."""
        return list({id(layer.impl.kernels(layer)): layer for layer in self._layers}.values())


class KVCalGPUImpl(KVCalImpl):
    """Attention of one layer by kvcal's kernels."""

    gpu: ClassVar[bool] = True

    def __init__(self, num_heads: int, head_size: int, *arguments: Any, **more: Any) -> None:
        super().__init__(num_heads, head_size, *arguments, **more)
        self.query_heads, self.head_size = num_heads, head_size
        config = get_current_vllm_config()
        self._longest, self.dtype = int(config.model_config.max_model_len), config.model_config.dtype

    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        count = len(slot_mapping)
        self.kernels(layer).store(kv_cache, slot_mapping, key[:count], value[:count])

    def forward(  # type: ignore[override]
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: KVCalGPUMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise UsageError("kvcal: quantised outputs of attention cannot be served")
        scratch = scratch_on(query.device)
        if attn_metadata is None:  # vLLM measures memory: as much as the longest prompt takes
            scratch.dense(key.shape[1], -(-self._longest // BLOCK) * BLOCK, self.head_size, self.dtype)
            return output
        step, kernels = attn_metadata.step, self.kernels(layer)
        out = output.view(len(output), self.query_heads, self.head_size)
        kernels.decode(kv_cache, step, query, self.scale, scratch, out)
        exact = None if self.plan.deterministic else (key, value)
        for part in step.prefills:
            kernels.prefill(kv_cache, step.table, part, query, exact, self.scale, scratch, out)
        return output

    def kernels(self, layer: Any) -> GPULayer:
        """The kernels of a layer, on the device of its weights."""
        return layer_on(self.paged(layer), self._device())

    @staticmethod
    def _device() -> torch.device:
        kind = current_platform.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
