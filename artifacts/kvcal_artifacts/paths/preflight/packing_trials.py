"""The kernels that encode, quantise and append, on small random data against their references, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvcal_kernels import attention, quantise, squat
from kvcal_kernels.attention import reference
from kvcal_kernels.layout import BLOCK, Form
from kvcal_kernels.quantise import AnyRule, GridRule
from kvcal_kernels.squat import Moves

from ...codecs import Codec, Context
from ...codecs.ragged import Ragged
from ...storage.block_store import Stored
from .trials import apart


def encode_trial(codec: Codec, dtype: torch.dtype, device: torch.device, blocks: int = 2) -> str | None:
    """Try a codec's kernel on random tokens, one of them zero, against the codec on the CPU, bit by bit.

    Where a codec's bytes depend on the device, it is compared with the codec on the same device.
    """
    shape, generator = codec.shape, torch.Generator().manual_seed(0)
    x = 3 * torch.randn(
        2, shape.heads, blocks * shape.block, shape.dim, generator=generator, dtype=torch.float32, device="cpu"
    )
    x[..., ::9] *= 20
    x[0, :, 3] = 0
    x, stats = x.to(dtype), codec.example_stats(2, blocks, generator)
    places = device, x.device if codec.same_bytes_everywhere else device
    contexts = [Context(stats={name: one.to(where) for name, one in stats.items()}) for where in places]
    pair = codec.to(device).by_kernel(), codec.to(places[1])
    if codec.attention_kernel is not None:
        actual, expected = (
            coder.encode(x.to(where), now) for coder, where, now in zip(pair, places, contexts, strict=True)
        )
    else:  # as layers that are predicted from it need it, too
        (actual, decoded), (expected, decoded_by_torch) = (
            coder.encode_decode(x.to(where), now) for coder, where, now in zip(pair, places, contexts, strict=True)
        )
        if not torch.equal(decoded.cpu(), decoded_by_torch.cpu()):
            return f"what packed {codec.role}s decode to differs"
    apart = [name for name, one in expected.items() if not _same(actual[name], one)]
    return f"{apart[0]} of packed {codec.role}s differ" if apart else None


def _same(actual: Stored, expected: Stored) -> bool:
    """Whether two packed tensors are the same, bit by bit, on whatever devices."""
    if isinstance(actual, Ragged) and isinstance(expected, Ragged):
        return torch.equal(actual.counts.cpu(), expected.counts) and torch.equal(actual.data.cpu(), expected.data)
    assert isinstance(actual, Tensor) and isinstance(expected, Tensor)
    return torch.equal(actual.cpu(), expected.cpu())


def quantise_trial(
    key: AnyRule, value: AnyRule, dtypes: tuple[torch.dtype, torch.dtype], scaled: bool, device: torch.device
) -> str | None:
    """Try the quantise kernel on random tokens, one of them zero, against the reference on the CPU, bit by bit."""
    generator = torch.Generator().manual_seed(0)
    heads = next((rule.heads for rule in (key, value) if isinstance(rule, GridRule)), 2)
    tokens = 2 * BLOCK * max(key.form.scale_blocks, value.form.scale_blocks)
    inputs = []
    for dtype in dtypes:
        x = 3 * torch.randn(2, heads, tokens, key.form.dim, generator=generator, dtype=torch.float32, device="cpu")
        x[..., ::9] *= 20
        x[0, :, 3] = 0
        inputs.append(x.to(dtype))
    factor = (
        torch.rand(heads, 1, key.form.dim, generator=generator, dtype=torch.float32, device="cpu") + 0.5
        if scaled
        else None
    )
    pair = _rule_on(key, device), _rule_on(value, device)
    factor_on_device = None if factor is None else factor.to(device)
    *actual, flags = quantise.fast().quantise(*(x.to(device) for x in inputs), *pair, factor_on_device)
    rules = [_rule_on(rule, torch.device("cpu")) for rule in (key, value)]
    for name, blocks, x, rule, by in zip(("keys", "values"), actual, inputs, rules, (factor, None), strict=True):
        expected = quantise.quantise(x, rule, by)[0]
        if not torch.equal(blocks.words.cpu(), expected.words):
            return f"words of packed {name} differ"
        if not torch.equal(blocks.scale.cpu().view(torch.int16), expected.scale.view(torch.int16)):
            return f"scales of packed {name} differ"
    return "finite tokens are refused" if bool(flags.any()) else None


def append_trial(
    key: AnyRule, value: AnyRule, dtype: torch.dtype, device: torch.device, channels: int = 0, flushes: int = 2
) -> str | None:
    """Try the kernel that appends, against the reference on the CPU, bit by bit, then attention over what it stored.

    The tokens are a prompt and steps over so many flushes of rows of different lengths. channels: see append_verdict.
    """
    generator = torch.Generator().manual_seed(0)
    windows = quantise.Windows(4, 32, BLOCK * max(key.form.scale_blocks, value.form.scale_blocks))
    calls = [[70, 3, 41], *[[1] * 3] * 3, *[[16] * 3] * (flushes * windows.block // 16)]
    places = torch.device("cpu"), device
    pairs = [(_rule_on(key, where), _rule_on(value, where)) for where in places]
    capacity = 4 * windows.block // BLOCK
    layers = [_empty(*pair, windows, dtype, where, capacity) for pair, where in zip(pairs, places, strict=True)]
    heads = len(layers[0][0].flags)
    factor = (
        None
        if channels
        else torch.rand(heads, 1, key.form.dim, generator=generator, dtype=torch.float32, device="cpu") + 0.5
    )
    moves = _random_moves(heads, key.form.dim, channels, generator) if channels else None
    states = [
        (
            torch.zeros(3, heads, key.form.dim, device=where, dtype=torch.float32),
            torch.zeros(3, dtype=torch.bool, device=where),
        )
        for where in places
    ]
    for new in calls:
        fresh = [
            torch.randn(3, heads, max(new), key.form.dim, generator=generator, dtype=torch.float32, device="cpu").to(
                dtype
            )
            for _ in (0, 1)
        ]
        factors = []
        for (layer, counts), by, pair, state in zip(layers, (quantise, quantise.fast()), pairs, states, strict=True):
            where = counts.data.device
            by.advance(counts, torch.tensor(new, dtype=torch.int32, device=where))
            k, v = (x.to(where) for x in fresh)
            due = None if moves is None else _keys_due(layer, counts, k, moves, key.form, by is not quantise)
            by.append(layer, counts, k, v, *pair, None if factor is None else factor.to(where), due)
            if min(new) == max(new):  # a step: no row is padded
                factors.append([x.cpu() for x in (*by.observe(*state, counts, fresh[0].to(where), 2), *state)])
        if factors and not all(map(torch.equal, *factors)):
            return "key factors differ"
    if why := _stored_apart(*layers):
        return why
    q = torch.randn(3, 2 * heads, 1, key.form.dim, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    outs = []
    for (layer, now), by, asked in zip(layers, (reference, attention.fast()), (q.float(), q.to(device)), strict=True):
        sink, ring = (*layer.sink, now.sink), (*layer.recent, now.seen)
        scaling = key.form.dim**-0.5
        outs.append(by.attend(asked, layer.keys, layer.values, now.blocks_before, sink, ring, scaling, ring=True))
    return apart(outs[1].to("cpu"), outs[0], dtype, "attention over the ring")


def _random_moves(heads: int, dim: int, channels: int, generator: torch.Generator) -> Moves:
    """SQuat's corrections for three rows, so large that a wrong digit shows."""
    steps = range(channels, dim, channels)
    responses = [
        torch.randn(3, heads, channels, dim - stop, generator=generator, dtype=torch.float32, device="cpu").double() / 8
        for stop in steps
    ]
    return squat.moves(responses, channels)


def _stored_apart(
    reference_layer: tuple[quantise.Layer, quantise.Counts], kernel_layer: tuple[quantise.Layer, quantise.Counts]
) -> str | None:
    """What two layers that got the same tokens store differently, or None."""
    (expected, counts), (actual, kernel_counts) = reference_layer, kernel_layer
    if not torch.equal(counts.data, kernel_counts.data.cpu()):
        return "counts of tokens differ"
    for row, blocks in enumerate(counts.blocks.tolist()):
        for name in ("keys", "values"):
            first, second = getattr(expected, name), getattr(actual, name)
            scales = blocks // first.form.scale_blocks
            words = (one.words[row, :, :blocks].cpu() for one in (first, second))
            scale = (one.scale[row, :, :scales].view(torch.int16).cpu() for one in (first, second))
            if not torch.equal(*words) or not torch.equal(*scale):
                return f"packed {name} differ"
    return None


def _keys_due(
    layer: quantise.Layer, counts: quantise.Counts, keys: Tensor, moves: Moves, form: Form, by_kernel: bool
) -> Tensor | None:
    """The keys that a step packs, corrected by SQuat; None for a prompt."""
    block, device = counts.windows.block, keys.device
    if keys.shape[2] > block:
        return None
    here = Moves(moves.channels, [x.to(device) for x in moves.weights], [x.to(device) for x in moves.units])
    refused = squat.refusal(form.dim, moves.channels, form.group, block)
    by = squat.fast() if by_kernel and not refused else squat
    corrected: Tensor = by.due(layer.recent[0], counts, keys, here, form.bits, form.group)
    return corrected


def _rule_on(rule: AnyRule, device: torch.device) -> AnyRule:
    return replace(rule, grid=rule.grid.to(device)) if isinstance(rule, GridRule) else rule


def _empty(
    key: AnyRule, value: AnyRule, windows: quantise.Windows, dtype: torch.dtype, device: torch.device, capacity: int
) -> tuple[quantise.Layer, quantise.Counts]:
    """The storage of a layer of three rows without tokens: a grid's kv heads, else two."""
    heads = next((rule.heads for rule in (key, value) if isinstance(rule, GridRule)), 2)

    def exact(tokens: int) -> tuple[Tensor, Tensor]:
        pair = [torch.zeros(3, heads, tokens, key.form.dim, dtype=dtype, device=device) for _ in (0, 1)]
        return pair[0], pair[1]

    blocks = [quantise.blocks_for(rule, 3, heads, capacity, device) for rule in (key, value)]
    flags = torch.zeros(heads, dtype=torch.int32, device=device)
    layer = quantise.Layer(blocks[0], blocks[1], exact(windows.sink), exact(windows.ring_capacity(70)), flags)
    return layer, quantise.Counts(3, windows, device)
