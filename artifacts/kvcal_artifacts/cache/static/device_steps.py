"""Steps that the device does by itself: which layers allow them, and what the host reads of them afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcal_kernels import quantise
from kvcal_kernels.layout import BLOCK

from ... import hf
from ...errors import KVCalError, NonFiniteError, UsageError
from ...paths import fused
from ...scheme import LayerCodecs, Scheme
from ...storage.ledger import Ledger
from ...storage.static_storage import STORED, Steps
from .. import planning
from ..layer import KVCalLayer
from ..protocols import AnyLayer
from ..statistics.key_scale import KeyScale
from ..whole_cache import WholeCache
from .layer import StaticLayer


def in_decimals(number: int) -> str:
    """A whole number of at least 0 in decimals.

    In a forward that is traced it may be a symbol, which dynamo does not put into strings (torch 2.13). Compared with
    what it may be, it is a number again.
    """
    if not torch.compiler.is_compiling():
        return str(number)
    digits = ""
    while number or not digits:
        digits = next(digit for digit in DIGITS if DIGITS[digit] == number % 10) + digits
        number = number // 10
    return digits


DIGITS = {str(digit): digit for digit in range(10)}
PROMPTS = (
    "max_length: SQuat corrects keys by a subspace of the row's prompt, which steps on the device leave as it is; a "
    "prompt of few tokens gives another one than a cache that grows comes to"
)
MOST_COLUMNS = 2**31 - 1  # kernels count tokens in 32 bits


def check_length(max_length: int | None, scheme: Scheme, offload: bool) -> None:
    """Raises UsageError for a max_length that a cache cannot have."""
    if max_length is None:
        return
    least = scheme.windows.sink + scheme.windows.recent + scheme.windows.block
    if type(max_length) is not int or not least <= max_length <= MOST_COLUMNS:
        raise UsageError(
            f"max_length={max_length!r}: must be a whole number from {least}, sink, recent window and a block, "
            f"to {MOST_COLUMNS}"
        )
    if offload:
        raise UsageError("max_length with offload=True: storage that moves has no fixed place; give one of them")


def caveats(scheme: Scheme) -> list[str]:
    """Warnings for whoever makes a cache with max_length."""
    standing = (pair and pair.key.standing_stats and pair.stats for pair in scheme.layers)
    return [PROMPTS] if any(standing) else []


def refusal(pair: LayerCodecs, moves: bool) -> str | None:
    """Why a layer that takes the kernel cannot leave all of its step to the device; None if it can.

    moves: keys are stored before a RoPE whose angles change as the sequence grows.
    """
    if moves:
        return "keys before RoPE, whose angles change with the length of the sequence here: the host counts that"
    if pair.has_codes and pair.key.shape.block % BLOCK:
        return f"vector codes in blocks of {pair.key.shape.block} tokens: what appends them counts by {BLOCK}"
    if why := pair.key.step_refusal(pair.stats):
        return why
    standing = pair.key.standing_stats or {KeyScale.name}
    if others := sorted(pair.stats - standing):
        return f"its rounding follows {others[0]}, a run-time statistic that the host counts"
    return None


def static_layers(cache: WholeCache, layers: list[AnyLayer]) -> tuple[list[AnyLayer], str | None]:
    """Layers with static storage, if the device can do the step of every one; else the layers themselves, and why.

    Whether the kernel runs on the model's device and in its dtype, the first keys show: layers that it refuses then
    grow.
    """
    for index, layer in enumerate(layers):
        if not isinstance(layer, KVCalLayer):
            return layers, f"layer {index} is left to Transformers' own cache, which grows"
        if why := layer.paths.unreadable or refusal(layer.codecs, cache.stored_rope.moves):
            return layers, f"layer {index}: {why}"
    static = [layer for layer in layers if isinstance(layer, KVCalLayer)]
    return [StaticLayer(cache, layer.index, layer.codecs, layer.site) for layer in static], None


def _is_ready(cache: WholeCache, query: int) -> bool:
    """Whether all layers have their storage on the device, and its kernels take so many new tokens, with no watch."""
    if cache.watch is not None or not cache.is_compileable or query > cache.most_queries:
        return False
    return all(layer.ready for layer in cache.compressed_layers)


def can_step(cache: WholeCache, keys: Tensor) -> bool:
    """Whether a forward is a step that the device does by itself. keys: (B, H, Q, D) of one of its layers."""
    query, past, layers = keys.shape[2], cache.ledger.columns, cache.compressed_layers
    if not _is_ready(cache, query):
        return False
    if hf.capturing():
        return True
    if not cache.hooks.active or len(keys) != cache.ledger.batch:
        return False  # the host says what is wrong
    if any(layer.columns != past for layer in layers):
        raise KVCalError("layers hold different numbers of tokens: an earlier forward broke off; call reset()")
    cache.record.check_returned()
    forward, valid = cache.forward, cache.mask_history.new_columns(cache.forward, cache.ledger, query)
    learns = torch.is_grad_enabled() and any(layer.learns(keys, keys) for layer in layers)
    if forward.custom_mask or forward.hides_old or forward.gives_weights or cache.model.training or learns:
        return False
    planning.check_capacity(cache, query)
    if valid is not None and not bool(valid.all()):
        return False
    return cache.scheme.frame == "post_rope" or cache.full_ledger.follows(forward.positions)


def await_offloading(cache: WholeCache) -> None:
    """Wait for layers that are being copied to host memory: what runs on the host must not come first."""
    started = [layer for layer in cache.compressed_layers if layer.is_initialized]
    for device in {layer.device for layer in started if layer.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def heed_all(cache: WholeCache) -> None:
    """Raise the errors of steps on the devices, those that still run included."""
    for device in cache.steps:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a step that still runs may yet say so
    for layer in cache.compressed_layers:
        layer.heed()


def catch_up(cache: WholeCache) -> None:
    """Update the host about the steps that the device did by itself. Raises KVCalError for what went wrong in them."""
    ready = [layer for layer in cache.compressed_layers if isinstance(layer, StaticLayer) and layer.ready]
    if not ready:
        return
    length, counts = read(ready)
    if cache.max_length is not None and length > cache.max_length:
        raise KVCalError(
            f"compiled or recorded steps went on to {length} tokens: the cache was made for "
            f"max_length={cache.max_length}; make a larger one"
        )
    if new := length - cache.ledger.columns:
        cache.full_ledger.proceed(new)
        cache.mask_history.extend_by_steps(new)
    compare(counts, cache.full_ledger, fused.kernel_blocks(ready[0].codecs))
    for layer in ready if new else ():
        layer.columns = length
        layer.unseen += new
        layer.missed += new
        layer.storage.overlook(cache.contents)


def why_not_compiled(cache: WholeCache, query: int) -> str:
    """Why a call of so many tokens cannot run compiled, and what to do."""
    numbers = [in_decimals(number) for number in (cache.most_queries, query, cache.ledger.columns)]
    what = f"behind a prompt, of a cache with max_length, not {numbers[1]} behind {numbers[2]}"
    grows = f" ({cache.why_not_compileable})" if cache.why_not_compileable else ""
    return (
        f"only steps of up to {numbers[0]} tokens can run compiled, {what}{grows}: run this call with the "
        "uncompiled model, as generate() runs its prompt"
    )


BROKE_OFF = "a forward broke off; call reset() and start again"


def read(layers: Sequence[StaticLayer]) -> tuple[int, list[tuple[Steps, Tensor]]]:
    """The columns that all layers hold, and for each device what its rows hold, (3, B) as in STORED.

    There is one wait for each device. Raises KVCalError for what went wrong in steps there.
    """
    per_device: list[tuple[Steps, Tensor]] = []
    lengths: set[int] = set()
    groups: dict[int, list[StaticLayer]] = {}
    for layer in layers:
        groups.setdefault(id(layer.steps), []).append(layer)
    for ours in groups.values():
        steps = ours[0].steps
        memories = ((layer.index, layer.storage.allocation) for layer in ours)
        flags = [(index, memory.flags) for index, memory in memories if memory is not None]
        flagged = torch.cat([one for _, one in flags]).any()
        counts = [getattr(steps.counts, name) for name in STORED]
        gap = torch.zeros_like(flagged) if steps.rope is None else steps.rope.gap
        figures = torch.cat([flagged[None], gap[None], steps.length[None], *counts]).to("cpu")  # int64, as the length
        lost, gaps, columns = figures[:3].tolist()
        if lost:
            _refuse(flags)
        if gaps:
            raise KVCalError(
                "compiled or recorded steps had tokens at positions that do not follow those before them, as they must "
                "where keys are stored before RoPE; call reset() and start again, and give such positions to the "
                "uncompiled model"
            )
        lengths.add(columns)
        per_device.append((steps, figures[3:].view(len(STORED), -1)))
    if len(lengths) > 1:
        raise KVCalError(f"layers hold {sorted(lengths)} tokens: {BROKE_OFF}")
    return lengths.pop(), per_device


def _refuse(flagged: list[tuple[int, Tensor]]) -> None:
    """Raises the error of the first layer whose flags have one."""
    for index, flags in flagged:
        if why := quantise.check(flags, index):
            kind = KVCalError if "no slot left" in why else NonFiniteError
            more = " (max_length)" if kind is KVCalError else ""
            error = kind(f"{why}{more}; call reset() and start again")
            if isinstance(error, NonFiniteError):
                error.layer = index
            raise error


def compare(per_device: list[tuple[Steps, Tensor]], ledger: Ledger, each: int) -> None:
    """Raises KVCalError where counts on a device are not the ledger's: its first layer ran a step, its last did not.

    each: blocks of the kernel in one of the scheme.
    """
    expected = torch.stack([ledger.sink, ledger.window, ledger.blocks * each])
    for steps, counts in per_device:
        if not torch.equal(counts, expected):
            raise KVCalError(f"layers on {steps.counts.data.device} hold different numbers of tokens: {BROKE_OFF}")
