"""Seconds of a decode step of a whole model: weights and cache over measured rates. Nothing here imports torch.

All rates except for a prompt's were measured on one H200, in bfloat16, with steps under a CUDA graph. A test computes
each again from docs/benchmarks/generation-2708de7.json, decode_attention-2708de7.json and aqua_tokens-2246769.json.
Other cards are taken to reach the same part of their data sheet's bandwidth, instructions and matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cards import Card

READ = 0.885  # of the sheet's bandwidth: a large copy, 4247 GB/s of 4800
LAYER = 97e-6  # seconds a layer, whatever it reads: norms, RoPE, products' and other kernels' launches
ATTENTION = 10e-6  # seconds of a decode attention over few tokens
FULL_READ = 0.967  # of the sheet's bandwidth: FP16 decode attention by cuDNN over 32 rows of 32768 tokens
PRODUCTS = 0.807  # of the sheet's rate of dense 16-bit matrix products: torch reached 799 of 989 TFLOP/s
# A prompt of 32768 tokens of Llama-3.1-8B on one H100 (docs/benchmarks/plan-3ee60f8.json, seconds): in one forward FP16
# did its operations at this part of the sheet's rate. kivi-4, which is packed, took so many times as long; in chunks of
# 2048 tokens, so many.
PROMPT, PACKED_PROMPT, CHUNKED_PROMPT = 0.512, 1.108, 2.444
EAGER = 1.16e-3  # seconds a layer of a step that Python launches kernel by kernel, blocks decoded
DECODING = 192.0  # thread-instructions a key or value that is decoded: HIGGS over the token, 32768 tokens of 8B
# Thread-instructions a key or value that decode attention takes as it was timed at 32 rows of 32768 tokens (8 kv heads
# of 128, 4 query heads each), where reading the bytes alone would be quicker.
SLOTS = {
    "inner-4": 4.15, "innerq-base": 3.33, "innerq-hybrid": 3.12, "innerq-small": 2.92, "inner-2": 2.43, "kivi-2": 3.32,
    "kivi-2-before": 6.03, "kivi-2-g128": 2.44, "turboquant-4-3": 4.54, "higgs-2": 3.44, "turboquant-4-3-bytes": 3.65,
    "higgs-2-bytes": 3.15, "higgs-3": 4.12, "higgs-4": 4.36,
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One decode step.

    weights, cache: bytes that it reads. parameters: that each row multiplies with. values: keys and values of the
    cache, in numbers. timed: a name in SLOTS; None for FP16. decoded: bytes of keys and values of all layers that are
    decoded first; 0 where a kernel reads their blocks. predicted: operations of predictors.
    """

    layers: int
    batch: int
    weights: float
    parameters: float
    cache: float
    values: float
    timed: str | None = None
    decoded: float = 0.0
    predicted: float = 0.0


def seconds(step: Step, card: Card) -> float | None:
    """None where the card's bandwidth is not known, nor what else bounds the step: its rate of instructions where
    blocks are decoded, and that of products where predictors are. Where blocks are decoded, Python launches the step
    kernel by kernel, which takes its own time.
    """
    if (step.decoded and card.issue_rate is None) or (step.predicted and card.flops is None):
        return None
    device = device_seconds(step, card)
    return max(device, step.layers * EAGER) if device is not None and step.decoded else device


def device_seconds(step: Step, card: Card) -> float | None:
    """The GPU's time, whatever the host takes."""
    if card.bandwidth is None:
        return None
    rest = weights_seconds(step, card) + step.layers * LAYER
    if step.decoded:
        return rest + step.layers * ATTENTION + _decoding(step, card)
    layers = step.layers
    return rest + layers * attention_seconds(step.cache / layers, step.values / layers, step.timed, card)


def weights_seconds(step: Step, card: Card) -> float:
    """Reading the weights, and the products that each row multiplies with."""
    assert card.bandwidth is not None
    products = step.weights / (READ * card.bandwidth)
    if card.flops is not None:
        products += (2 * step.parameters * step.batch + step.predicted) / (PRODUCTS * card.flops)
    return products


def attention_seconds(size: float, values: float, timed: str | float | None, card: Card) -> float:
    """One layer's decode attention, of all rows, for `kvcal plan` and for `kvcal bench` of a device that is not here.

    size: bytes of keys and values; values: how many numbers they are. timed: a name in SLOTS, or thread-instructions a
    number where none was timed; None for FP16.
    """
    slots = SLOTS[timed] if isinstance(timed, str) else timed or 0.0
    return ATTENTION + _slower(size, values * slots, card)


def prompt_seconds(operations: float, weights: float, card: Card, packed: bool, chunks: bool) -> float | None:
    """A prompt's operations at the part of the card's rate of products that was measured, and no shorter than reading
    the weights once.

    operations: of the prompts of all rows; weights: bytes. packed: whether blocks are packed; chunks: whether it is fed
    2048 tokens at a time. None where the card's rate of products is not known.
    """
    if card.flops is None or card.bandwidth is None:
        return None
    times = CHUNKED_PROMPT if chunks else PACKED_PROMPT if packed else 1.0
    return max(times * operations / (PROMPT * card.flops), weights / (READ * card.bandwidth))


def _decoding(step: Step, card: Card) -> float:
    """Blocks are read and written as numbers, which attention then reads."""
    return _slower(step.cache + step.decoded, step.values * DECODING, card) + _slower(step.decoded, 0.0, card)


def _slower(size: float, instructions: float, card: Card) -> float:
    """Seconds of reading or writing so many bytes, or of issuing so many instructions."""
    assert card.bandwidth is not None
    issuing = 0.0 if card.issue_rate is None else instructions / card.issue_rate
    return max(size / (FULL_READ * card.bandwidth), issuing)
