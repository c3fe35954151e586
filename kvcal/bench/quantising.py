"""Quantise-and-pack and append, as operations.

The kernels of kvcal_kernels.quantise and residual_vq.append do them, where they run and know the format. Else the
codecs do, with their kernels where they have some.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Codec, MixKVQ, Squat
from kvcal_artifacts.codecs.base import Packed
from kvcal_artifacts.paths import codebook
from kvcal_artifacts.paths.choose import DTYPES_TAKEN
from kvcal_artifacts.paths.packing_rules import packing, rule_of
from kvcal_artifacts.paths.preflight.verdicts import interpreted, unsupported
from kvcal_artifacts.scheme import LayerCodecs
from kvcal_kernels import residual_vq
from kvcal_kernels.layout import BLOCK, Blocks
from kvcal_kernels.quantise import AnyRule, Counts, Layer, Windows, blocks_for, reference
from kvcal_kernels.squat import Digits

from . import distortion
from .fused import unreadable
from .layer import Case, Filled, fill, nbytes, some_rows
from .operation import APART, Prepared, misread, one_block, packed_blocks
from .peers import DTYPE_NAMES, SIXTEEN

KERNELS = {Squat.name: "correct, then torch", MixKVQ.name: "choose channels, then torch"}  # of the rest "encode"
VECTORS_APART = 1e-3  # of the squared error: codes of the kernel against the codec's


def rules(case: Case) -> tuple[AnyRule, AnyRule] | str:
    """Rules of keys and values that steps append, of SQuat's as they are corrected; else why the reference is
    measured.
    """
    return refused_on_device(case.scheme.codecs) or block_rules(case)


def block_rules(case: Case) -> tuple[AnyRule, AnyRule] | str:
    """Like `rules`, for whole blocks: of keys as `before_rounding` leaves them."""
    key = case.scheme.codecs.key
    return _rules(case, key.rounding, case.scheme.codecs.value)


def _rules(case: Case, *codecs: Codec) -> tuple[AnyRule, AnyRule] | str:
    if not interpreted() and (why := unsupported(case.device)):
        return why
    if why := unreadable(case.scheme, case.scheme.codecs, case.group):  # a cache packs these by the codecs
        return why
    if case.dtype not in SIXTEEN:
        return f"{DTYPES_TAKEN}, not {DTYPE_NAMES[case.dtype]}"
    rules = []
    for codec in codecs:
        rule = rule_of(codec.to(case.device))
        if isinstance(rule, str):
            return rule
        rules.append(rule)
    return rules[0], rules[1]


def encoders(case: Case, codecs: LayerCodecs) -> tuple[LayerCodecs, str]:
    """The codecs as a cache packs with them where the case is, on its device; and which code encodes."""
    encoders_by_role = packing("triton" if interpreted() else "auto", codecs, case.dtype, case.device)
    by = [encodes(codec, case.device) for codec in (encoders_by_role.key, encoders_by_role.value)]
    return encoders_by_role, by[0] if by[0] == by[1] else f"keys {by[0]}, values {by[1]}"


def encodes(codec: Codec, device: torch.device) -> str:
    """Which code encodes: of SQuat's corrections and MixKVQ's choice of channels torch packs the rest."""
    if codec.codebooks:  # its codebooks may lie elsewhere yet
        like = torch.empty(0, device=device, dtype=torch.float32)
        compiled = all(residual_vq.nearest.backend(like, book) == "triton" for book in codec.codebooks)
        return "triton: nearest codeword, stage by stage" if compiled else "reference"
    return f"triton: {KERNELS.get(codec.name, 'encode')}" if codec.encodes_by_kernel else "reference"


def factor_of(filled: Filled) -> Tensor | None:
    """What keys are divided by."""
    factor = filled.codecs.key.key_factor(filled.encoding)
    return None if factor is None else factor.contiguous()


def packer(case: Case) -> tuple[Callable[[], list[Packed]], LayerCodecs, str]:
    """Blocks packed as a cache packs those that leave a window on the host; the codecs that do so, and which code it
    is.
    """
    filled = fill(case)
    by, path = encoders(case, filled.codecs)
    rules = block_rules(case)
    if isinstance(rules, str):
        return partial(filled.encoded, filled.raw, by), by, path
    prepared = by_kernel(case, rules)

    def packed() -> list[Packed]:
        output = cast("tuple[Blocks, Blocks, Tensor]", prepared.run())
        count = packed_blocks(case)
        return [codec.from_blocks(x, count) for codec, x in zip(filled.pair, output[:2], strict=True)]

    return packed, by, prepared.path


def by_kernel(case: Case, rules: tuple[AnyRule, AnyRule]) -> Prepared:
    """A prefill's packed tokens in one launch; SQuat's keys behind its correction."""
    from kvcal_kernels.quantise import triton as kernel  # not installed everywhere

    filled = fill(case)
    raw, factor = [x.contiguous() for x in filled.raw], factor_of(filled)
    encoder = encoders(case, filled.codecs)[0].key

    def rounded() -> Tensor:
        return encoder.before_rounding(raw[0], filled.encoding)

    def run() -> tuple[Blocks, Blocks, Tensor]:
        return kernel.quantise(rounded(), raw[1], *rules, factor)

    def check() -> str | None:
        """All rows next to the codec's packing, of which few numbers may differ; some_rows next to the kernel's
        reference, all of whose bits must be the same.
        """
        keys, values, flags = run()
        if fault := reference.check(flags, 0):
            return f"check failed: {fault}"
        if why := _unlike(filled, (keys, values)):
            return why
        inputs = rounded(), raw[1]
        for row in some_rows(case.batch, case.seed):
            for x, rule, blocks, by in zip(inputs, rules, (keys, values), (factor, None), strict=True):
                by = by[row, None] if by is not None and by.ndim == 4 else by
                expected, _ = reference.quantise(x[row, None], rule, by)
                for name, some in (("words", blocks.words), ("scale", blocks.scale)):
                    if not torch.equal(some[row, None], getattr(expected, name)):
                        return f"check failed: {name} of {rule.form.role}s differ from the reference's"
        return misread(filled, filled.decoded())

    path = "triton: quantise"
    if filled.codecs.key.corrected_channels:
        path = f"{'triton: correct' if encoder.encodes_by_kernel else 'torch: correct'}, {path}"
    return Prepared(run, sum(nbytes(x) for x in raw) + filled.packed_bytes, check, path)


def _unlike(filled: Filled, blocks: tuple[Blocks, Blocks]) -> str | None:
    """Where blocks of a kernel are not those that the codecs packed."""
    for codec, packed, output in zip(filled.pair, filled.packed, blocks, strict=True):
        expected = codec.as_blocks(packed)
        for name in ("words", "scale"):
            one, other = getattr(output, name), getattr(expected, name)
            if (off := int((one != other).sum())) > APART * one.numel():
                return f"check failed: {off} of {one.numel()} {name} of {codec.role}s differ from the codec's"
    return None


def append_by_kernel(case: Case, rules: tuple[AnyRule, AnyRule]) -> Prepared:
    """The steps that fill a block, one launch each: all but the last write new tokens, the last packs a block of every
    row. Of SQuat two or more, whose first ones correct the keys that are due.
    """
    from kvcal_kernels.quantise import triton as kernel

    new, windows = fill(one_block(case)), _windows(case)
    factor, path, moves, scratch = factor_of(new), "triton: append", None, None
    layer = _filled_layer(case, new, windows, rules)
    blocks, key = (layer.keys, layer.values), encoders(case, new.codecs)[0].key
    if key.corrected_channels:
        subspace = next((now for name, now in new.encoding.stats.items() if name in key.standing_stats), None)
        moves = Digits.of(key.step_moves(None if subspace is None else subspace[:, :, 0]))
        scratch = torch.empty(
            case.batch,
            case.geometry.kv_heads,
            windows.block,
            case.geometry.head_dim,
            device=case.device,
            dtype=torch.float32,
        )
        path = f"{'triton: correct' if key.encodes_by_kernel else 'torch: correct'}, {path}"

    def step(counts: Counts, k: Tensor, v: Tensor) -> None:
        due = None
        if moves is not None:
            due = key.due(layer.recent[0], counts, k, moves, scratch)
        kernel.append(layer, counts, k, v, *rules, factor, due)

    return _steps(case, new, windows, layer.recent, layer.flags, step, partial(_unlike, new, blocks), path)


def refused_on_device(pair: LayerCodecs) -> str | None:
    """Why no kernel appends steps to this pair on the device; None where one does."""
    from kvcal_artifacts.cache.static import device_steps  # with Transformers, which projections do without

    return device_steps.refusal(pair, False)


def appends_vectors(case: Case) -> bool:
    """Whether a cache with max_length appends steps to this case's codes by the kernels of residual_vq.append."""
    pair = case.scheme.codecs
    runs = interpreted() or unsupported(case.device) is None
    if not runs or case.dtype not in SIXTEEN or not pair.has_codes:
        return False
    return unreadable(case.scheme, pair, case.group) is None and refused_on_device(pair) is None


def append_vectors(case: Case) -> Prepared:
    """Like append_by_kernel, for vector codes: windows, then for each band codewords and codes, programs that return at
    once where no block is due.
    """
    new, windows = fill(one_block(case)), _windows(case)
    stores = [codec.empty(case.batch, case.device) for codec in new.pair]
    stores = [{n: t.new_zeros(*t.shape[:2], 1, *t.shape[3:]) for n, t in one.items()} for one in stores]
    coded, space = codebook.coded(new.codecs, stores), codebook.workspace("triton", case.device, False)
    sink, ring = _exact(case, new, windows)
    flags = torch.zeros(case.geometry.kv_heads, dtype=torch.int32, device=case.device)

    def differing() -> str | None:
        """Codes may part at near ties, and numbers with them, not in how near they are."""
        for codec, packed, raw in zip(new.pair, stores, new.raw, strict=True):
            decoded, expected = (codec.decode(one, new.decoding) for one in (packed, codec.encode(raw, new.encoding)))
            off, least = (float((x - raw.float()).square().sum()) for x in (decoded, expected))
            if not off <= least * (1 + VECTORS_APART):
                apart = f"{off / least:.3g} times that of the codec's own codes"
                return f"check failed: squared error of {codec.role}s {apart}"
            if why := distortion.misread(new, new.pair.index(codec), decoded):
                return why
        return None

    def step(counts: Counts, k: Tensor, v: Tensor) -> None:
        codebook.append("triton", coded, sink, ring, counts, flags, (k, v), space)

    return _steps(case, new, windows, ring, flags, step, differing, "triton: append to vector codes")


def _steps(
    case: Case,
    new: Filled,
    windows: Windows,
    ring: tuple[Tensor, Tensor],
    flags: Tensor,
    step: Callable[[Counts, Tensor, Tensor], None],
    differing: Callable[[], str | None],
    path: str,
) -> Prepared:
    """The steps that fill a block by `step`(counts, k, v). differing: what is wrong with the block that they leave, or
    None.

    New tokens are those that the ring has at their slots, which are emptied: where a block is longer than the window,
    they are of the block that is packed.
    """
    from kvcal_kernels.quantise import triton as kernel

    new_tokens, steps = case.new, windows.block // case.new
    each = torch.full((case.batch,), new_tokens, dtype=torch.int32, device=case.device)
    calls: list[tuple[Counts, slice, list[Tensor]]] = []
    for waiting in sorted({0, windows.block - new_tokens}):  # a step that only writes its tokens, and one that packs
        counts, slot = Counts(case.batch, windows, case.device), windows.recent + waiting
        counts.data[4], counts.data[6] = windows.sink, slot
        kernel.advance(counts, each)
        slots = slice(slot, slot + new_tokens)
        calls.append((counts, slots, [tensor[:, :, slots].clone() for tensor in ring]))
        for tensor in ring:
            tensor[:, :, slots] = 0
    (idle, _, first), (due, _, last) = calls[0], calls[-1]  # the same, where a call fills a block

    def run() -> None:
        for _ in range(steps - 1):
            step(idle, *first)
        step(due, *last)

    def check() -> str | None:
        run()
        if fault := reference.check(flags, 0):
            return f"check failed: {fault}"
        if why := differing():
            return why
        for role, what in enumerate(("keys", "values")):
            for _, slots, came in calls:
                if not torch.equal(ring[role][:, :, slots], came[role]):
                    return f"check failed: the window's token {slots.start} of {what} is not the one that came"
        return misread(new, new.decoded())

    written = 2 * sum(nbytes(x) for x in first) * steps  # a step reads its tokens and writes them
    size = sum(nbytes(x) for x in new.raw) + new.packed_bytes + new.book_bytes + written
    return Prepared(run, round(size / steps), check, path, per=steps, more={"calls": f"one packs in {steps} steps"})


def _windows(case: Case) -> Windows:
    windows = case.scheme.windows
    return Windows(windows.sink, windows.recent, windows.block)


def _filled_layer(case: Case, new: Filled, windows: Windows, rules: tuple[AnyRule, AnyRule]) -> Layer:
    """Capacity for one block."""
    heads = case.geometry.kv_heads
    stored = [blocks_for(rule, case.batch, heads, windows.block // BLOCK, case.device) for rule in rules]
    flags = torch.zeros(heads, dtype=torch.int32, device=case.device)
    return Layer(stored[0], stored[1], *_exact(case, new, windows), flags)


def _exact(case: Case, new: Filled, windows: Windows) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Sinks of keys and values, and rings: the tokens of the block that is due, with the others behind them."""
    rings, sinks = [], []
    for raw, window in zip(new.raw, new.window, strict=True):
        ring = torch.cat([raw, window], 2)
        rings.append(
            torch.nn.functional.pad(ring, (0, 0, 0, windows.ring_capacity(case.new) - ring.shape[2])).contiguous()
        )
        sinks.append(raw.new_zeros(*raw.shape[:2], max(windows.sink, 1), raw.shape[3]))
    return (sinks[0], sinks[1]), (rings[0], rings[1])
