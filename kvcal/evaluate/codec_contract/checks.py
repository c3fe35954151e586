"""The checks, one function each: it raises Broken, in one line, where the codec does not keep what it says.

What the codec itself raises is not caught here.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from kvcal_artifacts.bundle import Bundle, Fingerprint, parse
from kvcal_artifacts.codecs import CODECS, Codec, Context, Exact, Packed, Role, build, state_of
from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.scheme import LayerCodecs, Scheme, Windows

from .numbers import Broken, any_codec, prediction, require
from .subject import (
    Subject,
    changed,
    first_blocks,
    joined,
    moved,
    nbytes,
    of_blocks,
    rows_from,
    tensors_by_name,
    with_below,
)

CLOSE = 1e-5  # relative and absolute: float32 sums in another order


def require_same(packed: Packed, other: Packed, when: str) -> None:
    """Raises Broken unless two results of `encode` are the same in names, dtypes and bytes. when: ends the message."""
    ours, theirs = tensors_by_name(packed), tensors_by_name(other)
    require(ours.keys() == theirs.keys(), f"packed tensors {sorted(ours)} and {sorted(theirs)} {when}")
    for name, tensor in ours.items():
        like = (tuple(tensor.shape), tensor.dtype) == (tuple(theirs[name].shape), theirs[name].dtype)
        require(like and torch.equal(tensor, theirs[name]), f"packed tensor {name.rpartition('.')[0]!r} differs {when}")


def chunking(subject: Subject) -> None:
    """Bytes depend neither on how many blocks come in one call, nor on other rows, nor on how x lies in memory."""
    codec, blocks, b = subject.codec(), 3, subject.shape.block
    x, context = subject.noise(2, blocks), subject.context(2, blocks * b)
    whole = codec.encode(x, context)
    for cuts in ([0, 1, 2, 3], [0, 2, 3]):
        parts = [codec.encode(x[:, :, i * b : j * b], of_blocks(context, b, i, j)) for i, j in itertools.pairwise(cuts)]
        require_same(joined(parts), whole, f"where blocks come in chunks cut at {cuts}")
    alone = codec.encode(x[1:], context.rows(1, 2))
    require_same(alone, rows_from(whole, 1), "where a row comes alone")
    shared = changed(context, lambda t: t[1:].expand(3, *t.shape[1:]))
    together = codec.encode(torch.cat([300 * x, x[1:]]), shared)
    require_same(rows_from(together, 2), alone, "where a row comes with others, at another place")
    require_same(codec.encode(x.transpose(1, 2).contiguous().transpose(1, 2), context), whole, "for a strided tensor")
    if codec.decoding() is not None:  # then a cache decodes layers as rows of one
        row = codec.decode(rows_from(whole, 1), context.rows(1, 2))
        same = torch.equal(codec.decode(whole, context)[1:], row)
        require(same, "decode gives a row other bits beside others, and decoding() is not None")


def truncation(subject: Subject) -> None:
    """What stays of cropped blocks decodes to what it did, and to the same bits where other layers are coded by it."""
    codec, blocks, b = subject.codec(), 3, subject.shape.block
    x, context = subject.noise(2, blocks), subject.context(2, blocks * b)
    packed, reconstruction = codec.encode_decode(x, context)
    decoded = codec.decode(packed, context)
    for count in (1, 2):
        shorter = of_blocks(context, b, 0, count)
        again = codec.decode(first_blocks(packed, count), shorter)
        close = again.shape == decoded[:, :, : count * b].shape and torch.allclose(
            again, decoded[:, :, : count * b], rtol=CLOSE, atol=CLOSE
        )
        require(close, f"the first {count} of {blocks} blocks decode to other numbers where the others are cropped")
        part = codec.encode_decode(x[:, :, : count * b], shorter)[1]
        require(
            torch.equal(part, reconstruction[:, :, : count * b]),
            f"encode_decode of the first {count} of {blocks} blocks gives other bits than that of all",
        )


def deterministic(subject: Subject) -> None:
    """The same input gives the same bytes, and neither encode nor decode changes its arguments."""
    codec, x, context = subject.codec(), subject.noise(2, 2), subject.context(2, 2 * subject.shape.block)
    before = x.clone()
    packed = codec.encode(x, context)
    require(torch.equal(x, before), "encode changes its input")
    copy = rows_from(packed, 0)
    decoded = codec.decode(packed, context)
    require_same(packed, copy, "after decode, which changes it")
    require(torch.equal(codec.decode(packed, context), decoded), "decode gives other numbers the second time")
    require_same(codec.encode(x, context), copy, "the second time that the same is encoded")
    require_same(subject.codec().encode(x, context), copy, "where the codec is made again")


def stored_bits(subject: Subject) -> None:
    """Packed tensors have the shapes, dtypes and bytes that are declared; where blocks differ in size, their names."""
    codec, blocks, shape = subject.codec(), 3, subject.shape
    packed = codec.encode(subject.noise(2, blocks), subject.context(2, blocks * shape.block))
    specs, empty = codec.tensor_specs(), codec.empty(2, torch.device("cpu"))
    require(packed.keys() == empty.keys(), f"encode gives {sorted(packed)}, empty {sorted(empty)}")
    require(packed.keys() >= specs.keys(), f"encode gives {sorted(packed)}, tensor_specs {sorted(specs)}")
    for name, (declared, dtype) in specs.items():
        tensor = packed[name]
        expected = (2, declared[0], blocks, *declared[1:])
        require(
            (tuple(tensor.shape), tensor.dtype) == (expected, dtype),
            f"packed tensor {name!r} is {tuple(tensor.shape)} {tensor.dtype}, tensor_specs says {expected} {dtype}",
        )
    require_same(joined([empty, packed]), packed, "where it is appended to empty()")
    if codec.ragged:
        return
    require(packed.keys() == specs.keys(), f"encode gives {sorted(packed)}, tensor_specs {sorted(specs)}")
    stored = nbytes(packed)
    require(
        stored == codec.block_bytes() * 2 * blocks,
        f"{stored / (2 * blocks):g} bytes a block are stored, block_bytes() says {codec.block_bytes()}",
    )
    bits = stored * 8 / (shape.values * 2 * blocks)
    require(
        math.isclose(codec.bits_per_value(), bits, rel_tol=1e-6),
        f"{bits:g} bits per value are stored, bits_per_value() says {codec.bits_per_value():g}",
    )


def registered(subject: Subject) -> None:
    """Bundles may name the codec: its class is registered under its name."""
    codec = subject.codec()
    kind = type(codec)
    require(
        CODECS.get(codec.name) is kind,
        f"bundles cannot name codec {codec.name!r}: call kvcal.register(codec={kind.__name__})",
    )


def state(subject: Subject) -> None:
    """Settings through JSON and a copy of the constants make the same codec."""
    codec, x, context = subject.codec(), subject.noise(2, 2), subject.context(2, 2 * subject.shape.block)
    stated = json.loads(json.dumps(state_of(codec), allow_nan=False))
    again = build(subject.shape, subject.role, stated, {name: t.clone() for name, t in codec.tensors().items()})
    require_equivalent(codec, again, x, context)
    resident = sum(t.numel() * t.element_size() for t in codec.tensors().values())
    require(
        codec.resident_bytes() == resident,
        f"constants have {resident} bytes, resident_bytes() says {codec.resident_bytes()}",
    )
    text = codec.describe()
    require("\n" not in text, "describe() has more than one line")
    require(codec.name in text or codec.unpredicted is not codec, f"describe() says {text!r}, without {codec.name!r}")


def require_equivalent(codec: Codec, again: Codec, x: Tensor, context: Context) -> None:
    """Raises Broken unless the codec that was read stores x as the one that was written."""
    require(type(again) is type(codec), f"{type(again).__name__} is read where {type(codec).__name__} was written")
    before, after = (json.dumps(c.config(), sort_keys=True) for c in (codec, again))
    require(after == before, f"settings {after} are read where {before} were written")
    require((again.needs, again.tensor_specs()) == (codec.needs, codec.tensor_specs()), "other packed tensors are read")
    packed = codec.encode(x, context)
    require_same(again.encode(x, context), packed, "where the codec is read from its state")
    same = torch.equal(again.decode(packed, context), codec.decode(packed, context))
    require(same, "the codec that is read from its state decodes to other numbers")


def in_bundle(subject: Subject) -> None:
    """A bundle with the codec in a layer is written, and what is read from its bytes stores the same."""
    codec, shape = subject.codec(), subject.shape
    x, context = subject.noise(2, 2), subject.context(2, 2 * shape.block)
    plain = LayerCodecs(Exact(shape, "key"), Exact(shape, "value"))
    pair = LayerCodecs(codec, plain.value) if subject.role == "key" else LayerCodecs(plain.key, codec)
    scheme = Scheme(Windows(0, shape.block, shape.block), "post_rope", (plain, plain, pair))
    data = Bundle(Fingerprint("contract", 3, shape.heads, shape.dim, {}, ""), scheme).to_bytes()
    read = parse(Path("contract"), data)
    written, again = (_of_role(one, subject.role) for one in (scheme, read.scheme))
    require_equivalent(written, again, x, context)
    require(read.to_bytes() == data, "a bundle that is read and written again has other bytes")


def _of_role(scheme: Scheme, role: Role) -> Codec:
    """The codec of the last layer, as the scheme has it: kernels may read its blocks in another order there."""
    layer = scheme.layers[-1]
    assert layer is not None
    return layer.key if role == "key" else layer.value


def dtypes(subject: Subject) -> None:
    """Float16 and bfloat16 are stored as their numbers in float32 are."""
    codec, context = subject.codec(), subject.context(2, 2 * subject.shape.block)
    for dtype in (torch.float16, torch.bfloat16):
        x = subject.noise(2, 2).to(dtype)
        require_same(codec.encode(x, context), codec.encode(x.float(), context), f"for {dtype} and torch.float32")


def devices(subject: Subject) -> None:
    """`to` moves every constant, and a GPU that is there stores what the CPU does."""
    codec = subject.codec()
    require(codec.to(torch.device("cpu")) is codec, "to(cpu) of a codec on the CPU gives another codec")
    try:
        elsewhere = codec.to(torch.device("meta")).tensors()
    except (NotImplementedError, RuntimeError):  # it looks at its constants, and those of this device have no numbers
        elsewhere = {}
    for name, tensor in elsewhere.items():
        require(tensor.device.type == "meta", f"to(device) leaves constant {name!r} on {tensor.device}")
    for name, tensor in codec.tensors().items():
        require(tensor.device.type == "cpu", f"to(device) moves constant {name!r} of the codec it copies")
    if torch.cuda.is_available():
        stores_alike(subject, torch.device("cuda"))


def stores_alike(subject: Subject, device: torch.device) -> None:
    """The codec stores on a device what it stores on the CPU, to the byte if it says so, and decodes it there."""
    codec, x, context = subject.codec(), subject.noise(2, 2), subject.context(2, 2 * subject.shape.block)
    there = changed(context, lambda t: t.to(device))
    copy = codec.to(device)
    packed = copy.encode(x.to(device), there)
    decoded = copy.decode(packed, there)
    devices_of = {t.device.type for t in (*tensors_by_name(packed).values(), decoded)}
    require(devices_of == {device.type}, f"tensors of {device.type} are packed and decoded on {sorted(devices_of)}")
    on_host = codec.encode(x, context)
    if codec.same_bytes_everywhere and not codec.inputs:
        require_same(moved(packed, x.device), on_host, "on a GPU: set same_bytes_everywhere to False if it may")
    any_codec(codec, x - prediction(codec, context, x), packed, decoded.cpu() - prediction(codec, context, x), 1.1)


def no_blocks(subject: Subject) -> None:
    """No tokens are packed to tensors of no blocks, which decode to no tokens."""
    codec, context, shape = subject.codec(), subject.context(2, 0), subject.shape
    packed = codec.encode(subject.noise(2, 0), context)
    for name, (declared, dtype) in codec.tensor_specs().items():
        result, expected = (tuple(packed[name].shape), packed[name].dtype), ((2, declared[0], 0, *declared[1:]), dtype)
        require(result == expected, f"packed tensor {name!r} of no blocks is {result}, needs {expected}")
    decoded = tuple(codec.decode(packed, context).shape)
    expected_shape = (2, shape.heads, 0, shape.dim)
    require(decoded == expected_shape, f"no blocks decode to {decoded}, needs {expected_shape}")


def other_shapes(subject: Subject) -> None:
    """Input of other heads, channels or half blocks is refused by a KVCalError of one line."""
    codec, s = subject.codec(), subject.shape
    for heads, tokens, dim in (
        (s.heads + 1, s.block, s.dim),
        (s.heads, s.block + 1, s.dim),
        (s.heads, s.block, s.dim // 2),
    ):
        zeros = torch.zeros(1, s.heads, tokens, s.dim, dtype=torch.float32, device="cpu")
        context = with_below(Context(1), dict.fromkeys(codec.needs, zeros))
        try:
            codec.encode(torch.zeros(1, heads, tokens, dim, dtype=torch.float32, device="cpu"), context)
        except KVCalError as error:
            require("\n" not in str(error), "the error has more than one line")
            require("codec got" in str(error), f"the error {str(error)!r} does not say what the codec got")
            continue
        raise Broken(f"input of {(1, heads, tokens, dim)} is taken: refuse it, as Shape.blocks does")


def heads_alone(subject: Subject) -> None:
    """Where `of_heads` gives a codec of some heads, it stores them as the codec of all heads does."""
    if subject.shape.heads < 2:
        return
    codec, context, one = subject.codec(), subject.context(2, 2 * subject.shape.block), slice(1, 2)
    x = subject.noise(2, 2)
    whole, alone = codec.encode_decode(x, context)[1], codec.of_heads(one)
    if isinstance(alone, str):
        return
    stats = {name: values[:, one] for name, values in context.stats.items()}
    decoded = alone.encode_decode(x[:, one], Context(context.layer, stats=stats))[1]
    close = torch.allclose(decoded, whole[:, one], rtol=CLOSE, atol=CLOSE)
    require(close, "a head that is stored alone decodes to other numbers")
    parts = [codec.of_heads(slice(head, head + 1)) for head in range(subject.shape.heads)]
    total = sum(part.block_bytes() for part in parts if isinstance(part, Codec))
    same = total == codec.block_bytes() or alone.ragged
    require(same, f"heads take {total} bytes a block one by one, {codec.block_bytes()} together")
