"""Everything that touches Transformers' internals (5.17 to 5.23); other modules use only its cache classes."""

from __future__ import annotations

from kvcal_kernels.device import capturing

from .attention import check_queries, check_selectable, implementation, odd_attention, score_scaling
from .decoder import (
    config_of,
    decoder_of,
    head_dim_of,
    input_device,
    kv_heads_of,
    layer_kind,
    layer_shape,
    not_loaded,
    text_config,
    unsupported_config,
    unsupported_layers,
)
from .head_shards import HeadShard
from .hooks import Hooks, Listener
from .masks import mask_for, real_columns
from .protocols import Decoder, Mask, ModelConfig
from .rope import caveats, rope_moves, rope_tables, rotary_width
from .seam import HandOff, Seams, drop_hand_off, hand_off_of, note_keys
from .sites import (
    AttentionSite,
    attention_site,
    attention_sites,
    by_halves,
    check_frame,
    check_supported,
    head_processes,
    key_probe,
    layer_probe,
    output_projection,
    rope_partners,
    unsupported,
)
from .taps import InPlace

__all__ = [
    "AttentionSite",
    "Decoder",
    "HandOff",
    "HeadShard",
    "Hooks",
    "InPlace",
    "Listener",
    "Mask",
    "ModelConfig",
    "Seams",
    "attention_site",
    "attention_sites",
    "by_halves",
    "capturing",
    "caveats",
    "check_frame",
    "check_queries",
    "check_selectable",
    "check_supported",
    "config_of",
    "decoder_of",
    "drop_hand_off",
    "hand_off_of",
    "head_dim_of",
    "head_processes",
    "implementation",
    "input_device",
    "key_probe",
    "kv_heads_of",
    "layer_kind",
    "layer_probe",
    "layer_shape",
    "mask_for",
    "not_loaded",
    "note_keys",
    "odd_attention",
    "output_projection",
    "real_columns",
    "rope_moves",
    "rope_partners",
    "rope_tables",
    "rotary_width",
    "score_scaling",
    "text_config",
    "unsupported",
    "unsupported_config",
    "unsupported_layers",
]
