"""A KV connector for vLLM that says that all of a prompt but its last token is stored, and moves nothing.

Decoding at a full cache can then be timed without computing the prompts. vLLM's own DecodeBenchConnector does the same,
but fills pages with one number, which is none that a packed page holds.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, SupportsHMA


class Stored(KVConnectorBase_V1, SupportsHMA):
    """enabled: whether prompts count as stored; else it does nothing, and vLLM computes them."""

    enabled: ClassVar[bool] = False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        missing = request.num_tokens - num_computed_tokens - 1
        return (missing, False) if self.enabled and missing > 0 and not request.num_output_tokens else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
