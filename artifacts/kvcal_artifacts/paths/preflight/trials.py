"""Kernels on small random data against their references: None where they agree, or by how much they do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvcal_kernels import attention, dequantise, layout, quantise, residual_vq, squat
from kvcal_kernels.attention import reference
from kvcal_kernels.dequantise import Rotation
from kvcal_kernels.layout import BLOCK, Form, TransformBlocks, TransformForm
from kvcal_kernels.quantise import AnyRule, GridRule
from kvcal_kernels.squat import Moves

from ...codecs import Codec, Context, ResidualVQ
from ...codecs.base import CONTEXT_TENSORS
from ...codecs.ragged import Ragged
from ...codecs.reconstruct import Reconstruction
from ...storage.block_store import Stored

BLOCKS = (9, 0, 4)  # packed blocks of the rows that are tried: several programs, none, one turn of a program
SINK, RECENT = (4, 2, 4), (131, 17, 40)
CALLS = ((1, False), (1, True), (3, True), (16, False))  # new tokens, and whether recent ones lie in a ring
OF_TIERS = ((1, False), (3, False))  # each compiles for 80 s; tiers come in caches without a ring
VECTOR_CALLS = (1, 3)  # new tokens, of kernels over vector codes
ROWS = (512, 832)  # tokens that the reconstruction kernel is tried on: whole tiles of it, and not


def trial(
    keys: Form, values: Form, heads: int, ratio: int, dtype: torch.dtype, device: torch.device, rotary: int = 0
) -> str | None:
    """The kernel on random rows of different lengths against the reference in float32: None, or by how much it is off.

    Allowed is four times the rounding of the dtype: of the output, of probabilities and of queries (2 were seen).
    """
    generator = torch.Generator(device).manual_seed(0)
    each = max(keys.scale_blocks, values.scale_blocks)
    key_blocks = _blocks(keys, heads, each, None, device, generator)
    pair = key_blocks, _blocks(values, heads, each, key_blocks.grid, device, generator)
    counts = [torch.tensor(n, dtype=torch.int32, device=device) for n in (BLOCKS, SINK, RECENT)]

    def random(count: int, tokens: int) -> Tensor:
        size = (len(BLOCKS), count, tokens, keys.dim)
        return torch.randn(size, generator=generator, device=device).to(dtype)

    def exact(tokens: int, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return random(heads, tokens), random(heads, tokens), count

    sink, recent = exact(max(SINK), counts[1]), exact(-(-max(RECENT) // BLOCK) * BLOCK, counts[2])
    room = key_blocks.words.shape[2]
    turns = _turns(rotary, sink[0].shape[2], room, recent[0].shape[2], device) if rotary else None
    for queries, ring in OF_TIERS if keys.tiered else CALLS:
        q, scaling = random(heads * ratio, queries), keys.dim**-0.5
        packed_q = None if rotary else (q.float() * torch.linspace(0.5, 2, keys.dim, device=device)).to(dtype)
        arguments = *pair, counts[0], sink, recent, scaling
        expected = reference.attend(q.float(), *arguments, None if packed_q is None else packed_q.float(), ring, turns)
        for launch in attention.fast().launches(keys, values, ratio * queries, rotary > 0):
            actual = attention.fast().attend(q, *arguments, launch, packed_q=packed_q, ring=ring, rope=turns)
            where = f"{queries} new tokens{' behind a ring' if ring else ''}, warps a program {launch.warps}"
            if why := _apart(actual, expected, dtype, where):
                return why
    return None


def transform_trial(
    keys: TransformForm, values: TransformForm, heads: int, ratio: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """The kernel over the transform codec on random rows of different lengths against the reference in float32, as `trial`
    tries the others.
    """
    generator = torch.Generator(device).manual_seed(0)
    points = {b: torch.randn(1 << 2 * b, 2, generator=generator, device=device).half().float() for b in (4, 3, 2)}
    points[1] = torch.tensor([[-0.75], [0.75]], device=device)
    pair = (
        _coordinates(keys, heads, points, device, generator),
        _coordinates(values, heads, points, device, generator),
    )
    counts = [torch.tensor(n, dtype=torch.int32, device=device) for n in (BLOCKS, SINK, RECENT)]

    def random(count: int, tokens: int) -> Tensor:
        size = (len(BLOCKS), count, tokens, keys.dim)
        return torch.randn(size, generator=generator, device=device).to(dtype)

    def exact(tokens: int, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return random(heads, tokens), random(heads, tokens), count

    sink, recent = exact(max(SINK), counts[1]), exact(-(-max(RECENT) // BLOCK) * BLOCK, counts[2])
    for queries, ring in CALLS:
        q, arguments = random(heads * ratio, queries), (*pair, counts[0], sink, recent, keys.dim**-0.5)
        actual = attention.transform().attend(q, *arguments, ring=ring)
        expected = reference.attend(q.float(), *pair, counts[0], sink, recent, keys.dim**-0.5, ring=ring)
        if why := _apart(actual, expected, dtype, f"{queries} new tokens{' behind a ring' if ring else ''}"):
            return why
    return None


def _coordinates(
    form: TransformForm, heads: int, points: dict[int, Tensor], device: torch.device, generator: torch.Generator
) -> TransformBlocks:
    """Random blocks of a random basis, numbers of variance about 1."""

    def bytes_of(*size: int) -> Tensor:
        return torch.randint(0, 256, size, generator=generator, device=device, dtype=torch.uint8)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    rows = len(BLOCKS), heads, max(BLOCKS)
    codes = tuple(
        bytes_of(*rows, *((2 * count, 4) if bits == 1 else (count, layout.transform.PAIR_BYTES[bits])))
        for bits, count in form.tiers
    )
    decoder = (normal(heads, form.dim, form.dim) * form.dim**-0.5).half()
    basis = layout.Basis(decoder, (normal(heads, form.dim) / 2).half(), points, dict.fromkeys(points, 1.25))
    norm = torch.rand(len(BLOCKS), 1, max(BLOCKS), BLOCK, generator=generator, device=device) + 0.5
    return TransformBlocks(form, codes, norm.half(), basis)


def _turns(rotary: int, sink: int, blocks: int, recent: int, device: torch.device) -> layout.Rope:
    """RoPE of rows that begin at positions of their own."""
    speed = 1e4 ** -(torch.arange(0, rotary, 2, device=device) / rotary)
    start = torch.arange(len(BLOCKS), device=device) * 1000
    first = layout.rope.first_positions(start, sink, blocks, recent)[..., None] * speed
    close = torch.arange(BLOCK, device=device)[:, None] * speed
    return layout.Rope(torch.stack([first.cos(), first.sin()], -2), layout.rope.near(close.cos(), close.sin()))


def _apart(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> str | None:
    off, allowed = (
        float((actual.double() - expected.double()).norm() / expected.double().norm()),
        4 * torch.finfo(dtype).eps,
    )
    return None if off <= allowed else f"{what}: off by {off:.2g} of the reference, allowed {allowed:.2g}"


def _blocks(
    form: Form, heads: int, each: int, twin: layout.Grid | None, device: torch.device, generator: torch.Generator
) -> layout.Blocks:
    """Random blocks, a multiple of `each`, numbers of variance about 1. twin: of keys; values have its grid if they may."""
    tokens = -(-max(BLOCKS) // each) * each * BLOCK

    def codes(high: int, count: int) -> Tensor:
        size = (len(BLOCKS), heads, tokens, count)
        return torch.randint(0, high, size, generator=generator, device=device)

    def noise(*size: int) -> Tensor:
        return torch.rand(len(BLOCKS), *size, generator=generator, device=device)

    if form.vector:
        grid = _grid(form, heads, twin, device, generator)
        norm = (noise(heads // form.norm_heads, tokens, 1) + 0.5).half()
        return layout.pack(codes(len(grid.points), form.dim // form.vector), norm, None, form, grid)
    along = (tokens // form.group, form.dim - form.full) if form.along_tokens else (tokens, form.dim // form.group)
    scale, zero = (noise(heads, *along) + 0.5) * 3.4 / (1 << form.bits), noise(heads, *along).half() - 2.2
    if not form.tiered:
        return layout.pack(codes(1 << form.bits, form.dim), scale.half(), None if form.symmetric else zero, form)
    scale[..., : form.four] /= 4
    exact = (noise(heads, tokens, form.full) * 3.4 - 1.7).half()
    order = noise(heads, tokens // form.group, form.dim).argsort(-1)
    lower = codes(16, form.four), codes(4, form.dim - form.full - form.four)
    return layout.pack_tiers(exact, *lower, scale.half(), zero, order, form)


def _grid(
    form: Form, heads: int, twin: layout.Grid | None, device: torch.device, generator: torch.Generator
) -> layout.Grid:
    """Random signs, and points in no order, of float16: codes here are not those of Gaussian numbers (grids._times). Of a grid
    in bytes they are multiples of a step.
    """
    size = (1 << form.bits * form.vector, form.vector)
    drawn = torch.randn(size, generator=generator, device=device).half().float()
    if form.in_bytes:
        most = layout.grids.LARGEST
        drawn = (drawn / drawn.abs().max() * most).round() / 64
    sign = torch.randint(0, 2, (heads, form.dim), generator=generator, device=device) * 2 - 1
    points = drawn if twin is None or twin.points.shape != size else twin.points
    return layout.grid_of(points, sign, form.bits, twin, form.in_bytes)


def reconstruct_trial(
    codec: Codec, dtype: torch.dtype, rotary: int, device: torch.device, by: str = "auto", sizes: tuple[int, ...] = ROWS
) -> str | None:
    """The kernel on random blocks and inputs against the codec in float32, as often as the kernel is compiled."""
    generator, shape, codec = torch.Generator(device).manual_seed(0), codec.shape, codec.to(device)
    kernel = Reconstruction(codec, dtype, rotary, by)
    for rows in sizes:
        size = (2, shape.heads, max(1, rows // (2 * shape.block)) * shape.block, shape.dim)
        x, *inputs = (torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(6))
        tensors: dict[str, Any] = dict(zip(CONTEXT_TENSORS, inputs, strict=True))
        context = Context(1, **{name: tensors[name] for name in codec.needs})
        packed = codec.encode(x, context)
        angle = torch.rand(2, size[2], rotary // 2, generator=generator, device=device).repeat(1, 1, 2) * 6.28
        turn = Rotation(angle.cos(), angle.sin()) if rotary else None
        (actual, turned), exact = kernel(packed, context, turn), codec.decode(packed, context)
        why = _apart(actual, exact, dtype, f"{rows} tokens")
        if turn is not None and turned is not None:
            why = why or _apart(turned, turn(exact), dtype, f"{rows} tokens after RoPE")
        if why:
            return why
        if why := _misplaced(x, turn, kernel):
            return why
    return None


def _misplaced(x: Tensor, turn: Rotation | None, kernel: Reconstruction) -> str | None:
    """The kernel that writes exact tokens around packed ones, x (B, H, T, D) and RoPE of them: bit by bit."""
    parts = [[x[:, :, a:b], -x[:, :, a:b]] for a, b in ((0, 4), (4, 45), (45, 47))]
    first = turn and Rotation(turn.cos[:, :45], turn.sin[:, :45])
    wholes = [[x.new_zeros(*x.shape[:2], 64, x.shape[3]) for _ in (0, 1)] for _ in (0, 1)]
    for by, whole in zip(
        (dequantise, dequantise if kernel.path == "reference" else dequantise.fast()), wholes, strict=True
    ):
        by.place(whole, *parts, 8, first)
    same = all(torch.equal(a, b) for a, b in zip(*wholes, strict=True))
    return None if same else "exact tokens around the packed ones differ"


def encode_trial(codec: Codec, dtype: torch.dtype, device: torch.device, blocks: int = 2) -> str | None:
    """The kernel on random tokens, one of them nothing, against the codec on the CPU, bit by bit; on the same device where a
    codec's bytes are the device's.
    """
    shape, generator = codec.shape, torch.Generator().manual_seed(0)
    x = 3 * torch.randn(2, shape.heads, blocks * shape.block, shape.dim, generator=generator)
    x[..., ::9] *= 20
    x[0, :, 3] = 0
    x, stats = x.to(dtype), codec.example_stats(2, blocks, generator)
    places = device, x.device if codec.same_bytes_everywhere else device
    contexts = [Context(stats={name: one.to(where) for name, one in stats.items()}) for where in places]
    pair = codec.to(device).by_kernel(), codec.to(places[1])
    if isinstance(codec.fused(), Form | TransformForm):
        actual, expected = (
            coder.encode(x.to(where), now) for coder, where, now in zip(pair, places, contexts, strict=True)
        )
    else:  # as layers that are predicted from it need it, too
        (actual, here), (expected, there) = (
            coder.encode_decode(x.to(where), now) for coder, where, now in zip(pair, places, contexts, strict=True)
        )
        if not torch.equal(here.cpu(), there.cpu()):
            return f"what packed {codec.role}s decode to differs"
    apart = [name for name, one in expected.items() if not _same(actual[name], one)]
    return f"{apart[0]} of packed {codec.role}s differ" if apart else None


def _same(actual: Stored, expected: Stored) -> bool:
    """Bit by bit, wherever they lie."""
    if isinstance(actual, Ragged) and isinstance(expected, Ragged):
        return torch.equal(actual.counts.cpu(), expected.counts) and torch.equal(actual.data.cpu(), expected.data)
    assert isinstance(actual, Tensor) and isinstance(expected, Tensor)
    return torch.equal(actual.cpu(), expected.cpu())


def quantise_trial(
    key: AnyRule, value: AnyRule, dtypes: tuple[torch.dtype, torch.dtype], scaled: bool, device: torch.device
) -> str | None:
    """The kernel on random tokens, one of them nothing, against the reference on the CPU, bit by bit."""
    generator = torch.Generator().manual_seed(0)
    heads = next((rule.heads for rule in (key, value) if isinstance(rule, GridRule)), 2)
    tokens = 2 * BLOCK * max(key.form.scale_blocks, value.form.scale_blocks)
    inputs = []
    for dtype in dtypes:
        x = 3 * torch.randn(2, heads, tokens, key.form.dim, generator=generator)
        x[..., ::9] *= 20
        x[0, :, 3] = 0
        inputs.append(x.to(dtype))
    factor = torch.rand(heads, 1, key.form.dim, generator=generator) + 0.5 if scaled else None
    pair = _rule_on(key, device), _rule_on(value, device)
    there = None if factor is None else factor.to(device)
    *actual, flags = quantise.fast().quantise(*(x.to(device) for x in inputs), *pair, there)
    rules = [_rule_on(rule, torch.device("cpu")) for rule in (key, value)]
    for name, blocks, x, rule, by in zip(("keys", "values"), actual, inputs, rules, (factor, None), strict=True):
        expected = quantise.quantise(x, rule, by)[0]
        if not torch.equal(blocks.words.cpu(), expected.words):
            return f"words of packed {name} differ"
        if not torch.equal(blocks.scale.cpu().view(torch.int16), expected.scale.view(torch.int16)):
            return f"scales of packed {name} differ"
    return "finite tokens are refused" if bool(flags.any()) else None


def vectors_trial(
    keys: ResidualVQ, values: ResidualVQ, ratio: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """The kernels on random codes of rows of different lengths against the reference in float32."""
    generator = torch.Generator(device).manual_seed(0)
    blocks = torch.tensor(BLOCKS, dtype=torch.int32, device=device)
    sides = []
    for codec in (keys.to(device), values.to(device)):
        packed = codec.empty(len(BLOCKS), device)
        for name, none in packed.items():
            size = (*none.shape[:2], max(BLOCKS), *none.shape[3:])
            packed[name] = torch.randint(0, 256, size, generator=generator, device=device, dtype=torch.uint8)
        sides.append(codec.coded(packed))
    k, v = sides
    shape, there = keys.shape, blocks > 0
    for queries in VECTOR_CALLS:
        q = torch.randn(len(BLOCKS), shape.heads * ratio, queries, shape.dim, generator=generator, device=device)
        asked = (q / float(residual_vq.attention.decode(k).std())).to(dtype)
        actual, log = residual_vq.attention.fast().attend(asked, k, v, blocks, shape.dim**-0.5)
        expected, sums = residual_vq.attention.attend(asked.float(), k, v, blocks, shape.dim**-0.5)
        if bool(actual[~there].any()) or not float((log - sums)[there].abs().max()) < 8 * torch.finfo(dtype).eps:
            return f"{queries} new tokens: sums differ, or a row without blocks is not nothing"
        if why := _apart(actual, expected, dtype, f"{queries} new tokens"):
            return why
    return None


def vectors_append_trial(
    keys: ResidualVQ, values: ResidualVQ, dtype: torch.dtype, device: torch.device, recent: int = 40
) -> str | None:
    """Steps around a block that is due in one row of three: what a row without one holds stays, and the block is as near to
    its tokens as the codec's own codes, up to a thousandth.
    """
    generator, shape = torch.Generator(device).manual_seed(0), keys.shape
    windows = quantise.Windows(4, recent, shape.block)
    counts = quantise.Counts(3, windows, device)
    full = windows.recent + windows.block
    counts.data[4] = 4
    counts.data[6] = torch.tensor([full - 2, full - 9, 0], dtype=torch.int32)

    def random(tokens: int) -> tuple[Tensor, Tensor]:
        size = (3, shape.heads, tokens, shape.dim)
        pair = [torch.randn(size, generator=generator, device=device).to(dtype) for _ in (0, 1)]
        return pair[0], pair[1]

    sink, ring, sides = random(windows.sink), random(windows.ring_capacity(16)), []
    for codec in (keys.to(device), values.to(device)):
        packed = {n: t.new_zeros(*t.shape[:2], 2, *t.shape[3:]) for n, t in codec.empty(3, device).items()}
        sides.append((codec, packed, codec.coded(packed)))
    flags = torch.zeros(shape.heads, dtype=torch.int32, device=device)
    for _ in range(2):
        quantise.fast().advance(counts, torch.full((3,), 1, dtype=torch.int32, device=device))
        residual_vq.append.fast().append(sides[0][2], sides[1][2], sink, ring, counts, flags, *random(1))
    if counts.data[7].tolist() != [shape.block // BLOCK, 0, 0] or bool(flags.any()):
        return "counts or flags differ"
    for (codec, packed, _), exact in zip(sides, ring, strict=True):
        if any(bool(t[1:].any() or t[:, :, 1:].any()) for t in packed.values()):
            return f"packed {codec.role}s: a row without a block due was written to"
        x = exact[:1, :, : shape.block].float()
        appended, expected = ({n: t[:1, :, :1] for n, t in packed.items()}, codec.encode(x))
        off, least = (float((codec.decode(one) - x).square().sum()) for one in (appended, expected))
        if not off <= least * (1 + 1e-3):
            return f"packed {codec.role}s: error {off / least:.4g} times that of the codec's own"
    return None


def append_trial(
    key: AnyRule, value: AnyRule, dtype: torch.dtype, device: torch.device, channels: int = 0, flushes: int = 2
) -> str | None:
    """A prompt and steps over so many flushes of rows of different lengths, against the reference on the CPU, bit by bit;
    then attention over what they left. channels: of append_verdict.
    """
    generator = torch.Generator().manual_seed(0)
    windows = quantise.Windows(4, 32, BLOCK * max(key.form.scale_blocks, value.form.scale_blocks))
    calls = [[70, 3, 41], *[[1] * 3] * 3, *[[16] * 3] * (flushes * windows.block // 16)]
    places = torch.device("cpu"), device
    pairs = [(_rule_on(key, where), _rule_on(value, where)) for where in places]
    room = 4 * windows.block // BLOCK
    layers = [_empty(*pair, windows, dtype, where, room) for pair, where in zip(pairs, places, strict=True)]
    heads = len(layers[0][0].flags)
    factor = None if channels else torch.rand(heads, 1, key.form.dim, generator=generator) + 0.5
    moves = _random_moves(heads, key.form.dim, channels, generator) if channels else None
    states = [
        (torch.zeros(3, heads, key.form.dim, device=where), torch.zeros(3, dtype=torch.bool, device=where))
        for where in places
    ]
    for new in calls:
        fresh = [torch.randn(3, heads, max(new), key.form.dim, generator=generator).to(dtype) for _ in (0, 1)]
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
    q = torch.randn(3, 2 * heads, 1, key.form.dim, generator=generator).to(dtype)
    outs = []
    for (layer, now), by, asked in zip(layers, (reference, attention.fast()), (q.float(), q.to(device)), strict=True):
        sink, ring = (*layer.sink, now.sink), (*layer.recent, now.seen)
        scaling = key.form.dim**-0.5
        outs.append(by.attend(asked, layer.keys, layer.values, now.blocks_before, sink, ring, scaling, ring=True))
    return _apart(outs[1].to("cpu"), outs[0], dtype, "attention over the ring")


def _random_moves(heads: int, dim: int, channels: int, generator: torch.Generator) -> Moves:
    """SQuat's of three rows, so large that a wrong digit shows."""
    steps = range(channels, dim, channels)
    responses = [torch.randn(3, heads, channels, dim - stop, generator=generator).double() / 8 for stop in steps]
    return squat.moves(responses, channels)


def _stored_apart(
    reference_layer: tuple[quantise.Layer, quantise.Counts], kernel_layer: tuple[quantise.Layer, quantise.Counts]
) -> str | None:
    """What two layers that were given the same tokens store differently, or None."""
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
    """What SQuat makes of the keys that a step packs; None of a prompt."""
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
    key: AnyRule, value: AnyRule, windows: quantise.Windows, dtype: torch.dtype, device: torch.device, room: int
) -> tuple[quantise.Layer, quantise.Counts]:
    """What a layer of three rows stores, of no tokens yet; of a grid's kv heads, else two."""
    heads = next((rule.heads for rule in (key, value) if isinstance(rule, GridRule)), 2)

    def exact(tokens: int) -> tuple[Tensor, Tensor]:
        pair = [torch.zeros(3, heads, tokens, key.form.dim, dtype=dtype, device=device) for _ in (0, 1)]
        return pair[0], pair[1]

    blocks = [quantise.blocks_for(rule, 3, heads, room, device) for rule in (key, value)]
    flags = torch.zeros(heads, dtype=torch.int32, device=device)
    layer = quantise.Layer(blocks[0], blocks[1], exact(windows.sink), exact(windows.ring_capacity(70)), flags)
    return layer, quantise.Counts(3, windows, device)
