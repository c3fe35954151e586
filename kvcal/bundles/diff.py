"""What differs between two bundles: model, settings, scheme, codecs, tensors, metrics, in this order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Literal, Required, TypedDict

import torch
from torch import Tensor

from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.bundle.canonical import dtype_name, tensor_bytes
from kvcal_artifacts.codecs import state_of

from ..report.records import check_depth, is_number

SECTIONS = ("model", "settings", "scheme", "codecs", "tensors", "metrics")


class Change(TypedDict, total=False):
    """How two values a and b differ. only_in: the one bundle that has the value. change: b - a of numbers.

    tensor: dtype and shape of two tensors, which differ in `differing` of their `of` entries. at: the place of the
    first of these; largest: the largest difference; relative: the norm of all over that of the first tensor, None where
    that is zero.
    """

    only_in: Literal["a", "b"]
    a: object
    b: object
    change: float
    tensor: str
    differing: int
    of: int
    at: list[int]
    largest: float
    relative: float | None


class Difference(Change, total=False):
    """A difference as `diff` says. what: path of the value."""

    what: Required[str]


class Differences(TypedDict):
    """What differs between two bundles, section by section. same: whether their files are equal."""

    same: bool
    first_tensor: Difference | None
    model: list[Difference]
    settings: list[Difference]
    scheme: list[Difference]
    codecs: list[Difference]
    tensors: list[Difference]
    metrics: list[Difference]


def diff(a: Bundle, b: Bundle, *, same_bytes: bool) -> Differences:
    """The differences of two bundles. same_bytes: whether the two files are equal.

    A difference has "what" and the values "a" and "b", or "only_in"; numbers also "change", tensors how many entries
    differ, which first, and how much. A tensor that many layers share is listed at the first of them.
    """
    for bundle in (a, b):
        check_depth(bundle)
    tensors = list(_tensors(a, b))
    return {
        "same": same_bytes,
        "first_tensor": tensors[0] if tensors else None,
        "model": compared(asdict(a.fingerprint), asdict(b.fingerprint)),
        "settings": compared(a.provenance, b.provenance),
        "scheme": compared(_scheme(a), _scheme(b)),
        "codecs": compared(_codecs(a), _codecs(b)),
        "tensors": tensors,
        "metrics": compared(a.metrics, b.metrics),
    }


def compared(a: object, b: object, where: str = "") -> list[Difference]:
    """Leaves of two JSON values that differ, in the order of their names; where: path of the values."""
    if isinstance(a, dict) and isinstance(b, dict):
        names = [*a, *(name for name in b if name not in a)]
        return [d for name in names for d in _member(a, b, name, f"{where}.{name}" if where else str(name))]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in compared(x, y, f"{where}.{i}")]
    if a == b and isinstance(a, bool) == isinstance(b, bool):
        return []
    change: Change = {"change": b - a} if is_number(a) and is_number(b) and is_number(b - a) else {}
    return [{"what": where, "a": a, "b": b, **change}]


def _member(a: Mapping[str, object], b: Mapping[str, object], name: str, where: str) -> list[Difference]:
    if name in a and name in b:
        return compared(a[name], b[name], where)
    if name in a:
        return [{"what": where, "only_in": "a", "a": a[name]}]
    return [{"what": where, "only_in": "b", "b": b[name]}]


def _scheme(bundle: Bundle) -> dict[str, object]:
    return dict(bundle.scheme.config()) | {"skipped": {str(i): reason for i, reason in bundle.scheme.skipped.items()}}


def _codecs(bundle: Bundle) -> dict[str, object]:
    """ "layers.0.key" -> codec and config."""
    return {
        f"layers.{index}.{role}": state_of(codec)
        for index, pair in enumerate(bundle.scheme.layers)
        if pair is not None
        for role, codec in (("key", pair.key), ("value", pair.value))
    }


def named_tensors(bundle: Bundle) -> Iterator[tuple[str, Tensor]]:
    """Constants of all codecs in the order of layers, keys before values; shared ones come again in each layer."""
    for index, pair in enumerate(bundle.scheme.layers):
        if pair is not None:
            for role, codec in (("key", pair.key), ("value", pair.value)):
                for name, tensor in sorted(codec.tensors().items()):
                    yield f"layers.{index}.{role}.{name}", tensor


def _tensors(a: Bundle, b: Bundle) -> Iterator[Difference]:
    mine, theirs = dict(named_tensors(a)), dict(named_tensors(b))
    hashes: dict[int, str] = {}
    reported: set[tuple[str, str]] = set()
    for name in sorted({*mine, *theirs}, key=_place):
        x, y = mine.get(name), theirs.get(name)
        if x is None or y is None:
            if x is not None:
                yield {"what": name, "only_in": "a", "a": _kind(x)}
            elif y is not None:
                yield {"what": name, "only_in": "b", "b": _kind(y)}
            continue
        pair = _digest(x, hashes), _digest(y, hashes)
        if pair[0] != pair[1] and pair not in reported:
            reported.add(pair)
            yield {"what": name, **_change(x, y)}


def _place(name: str) -> tuple[int, str]:
    """ "layers.10.key.codes" after "layers.9.value.codes"; "key" < "value" by luck of the alphabet."""
    _, layer, rest = name.split(".", 2)
    return int(layer), rest


def _kind(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def _digest(tensor: Tensor, digests: dict[int, str]) -> str:
    """A hash of content, dtype and shape; codebooks of 100 MB that layers share are hashed once. digests: by id, of
    held tensors.
    """
    if id(tensor) not in digests:
        digests[id(tensor)] = _kind(tensor) + hashlib.sha256(tensor_bytes(tensor)).hexdigest()
    return digests[id(tensor)]


def _change(x: Tensor, y: Tensor) -> Change:
    """How many entries differ, the first of them, the largest difference, and the root of |x - y|^2 over |x|^2."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return {"a": _kind(x), "b": _kind(y)}
    off = (x != y).flatten()
    if not bool(off.any()):  # 0.0 and -0.0
        return {"a": _kind(x), "b": _kind(y), "differing": 0, "of": x.numel()}
    place = int(off.to(torch.uint8).argmax())
    error = (x.double() - y.double()).flatten()
    scale = float(x.double().square().sum())
    return {
        "tensor": _kind(x),
        "differing": int(off.sum()),
        "of": x.numel(),
        "at": [int(i) for i in torch.unravel_index(torch.tensor(place, device="cpu"), x.shape)],
        "a": x.flatten()[place].item(),
        "b": y.flatten()[place].item(),
        "largest": float(error.abs().max()),
        "relative": (float(error.square().sum()) / scale) ** 0.5 if scale else None,
    }


VALUE = 60  # signs of a value that are shown


def phrase(difference: Difference, limit: int | None = VALUE) -> str:
    """One difference as a line. limit: signs of a value that are shown; None: all."""
    what = difference["what"]
    if "only_in" in difference:
        side = difference["only_in"]
        return f"{what}: only in {side} ({short(difference[side], limit)})"
    text = f"{what}: {short(difference['a'], limit)} -> {short(difference['b'], limit)}"
    if "differing" in difference:
        text += f"; {difference['differing']:,} of {difference['of']:,} entries differ"
    if "at" in difference:
        relative = "" if difference["relative"] is None else f", relative {difference['relative']:.3g}"
        text += f", the first at {difference['at']}, largest by {difference['largest']:.3g}{relative}"
    return text


def short(value: object, limit: int | None = VALUE) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"
