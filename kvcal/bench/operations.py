"""What can be measured: an operation is an entry here, and nothing else has to know of it.

An entry builds, for a case, the closure to time, the bytes that it must move, and a check against a reference; no
figure is printed where the check fails.
"""

from __future__ import annotations

from . import needed, paper
from .fused import fused_attention, refuses_fused
from .kernels import append, decode_then_attend, dequantise, nearest, needs_codebooks, quantise
from .operation import Operation, needs_a_block, needs_blocks, needs_of_append, needs_whole_calls, needs_window
from .tables import (
    channel_selection,
    hybrid_share,
    mlp,
    needs_hybrid,
    needs_tiers,
    no_scheme,
    quantise_step,
    quantise_step_of,
)

_ALL = (
    Operation(
        "decode-then-attend",
        "one decode step's attention: decode all, then attend",
        decode_then_attend,
        needs_window,
        "attention",
        of_calls=True,
    ),
    Operation(
        "fused-attention",
        "one decode step's attention, from packed codes",
        fused_attention,
        refuses_fused,
        "attention",
        of_calls=True,
    ),
    Operation("quantise", "prefill: keys and values to packed blocks", quantise, needs_blocks),
    Operation(
        "append",
        "a decode step's share of packing and storing a block",
        append,
        needs_whole_calls,
        of_calls=True,
        needs=needs_of_append,
    ),
    Operation(
        "nearest",
        "nearest codeword of batch * length vectors",
        nearest,
        needs_codebooks,
        alone=True,
        needs=needed.vectors,
    ),
    Operation("reconstruct", "packed blocks to keys and values", dequantise, needs_blocks),
    Operation(
        "quantise-step",
        "a decode step's share of quantising (InnerQ Table 5)",
        quantise_step,
        by_default=False,
        needs=needs_a_block,
    ),
    Operation(
        "quantise-step-keys", "quantise-step of keys alone", quantise_step_of(0), by_default=False, needs=needs_a_block
    ),
    Operation(
        "quantise-step-values",
        "quantise-step of values alone",
        quantise_step_of(1),
        by_default=False,
        needs=needs_a_block,
    ),
    *(
        Operation(
            f"hybrid-{percent}",
            f"product with hybrid values, {percent} % of groups symmetric (InnerQ Table 6)",
            hybrid_share(percent),
            needs_hybrid,
            by_default=False,
        )
        for percent in paper.TABLE_6
    ),
    Operation(
        "channel-selection",
        "a decode step's share of choosing tiers (MixKVQ Table 7)",
        channel_selection,
        needs_tiers,
        by_default=False,
        needs=needs_a_block,
    ),
    Operation(
        "mlp",
        "a layer's feed-forward part (MixKVQ Table 7)",
        mlp,
        no_scheme,
        by_default=False,
        alone=True,
        needs=needed.feed_forward,
    ),
)

OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in _ALL}

# Names that stand for the operations of a paper's table.
TABLES: dict[str, tuple[str, ...]] = {
    "innerq-table-5": ("quantise-step-keys", "quantise-step-values", "quantise-step"),
    "innerq-table-6": tuple(f"hybrid-{percent}" for percent in paper.TABLE_6),
    "mixkvq-table-7": ("channel-selection", "decode-then-attend", "mlp"),
}
