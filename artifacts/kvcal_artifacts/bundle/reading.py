"""A bundle file is read, and every byte of it checked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load
from torch import Tensor

from ..errors import CorruptBundle, IncompatibleBundle, KVCalError
from ..files import no_bundle_at
from .bundle import Bundle
from .canonical import dtype_name, is_finite, tensor_bytes
from .content import described
from .envelope import read_header, whole_file
from .header import HEADER, TensorEntry

# what a header of another program can raise here
ODD_HEADER = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError)


def load_bundle(path: str | os.PathLike[str], *, whole: bool = True) -> Bundle:
    """Read and check a bundle file. whole=False: one layer of an unfinished one.

    Raises CorruptBundle (damaged, tampered) or IncompatibleBundle (unknown format or version), naming what was seen and
    what is allowed.
    """
    path = Path(path)
    if not path.is_file():
        raise CorruptBundle(f"{path}: {no_bundle_at(path)}")
    bundle = parse(path, whole_file(path), whole=whole)
    bundle.path = path
    return bundle


def parse(path: Path, data: bytes, *, whole: bool = True) -> Bundle:
    """A bundle from a file's bytes, checked as `load_bundle` does. path: the name of the file in messages."""
    bundle = _parse(path, data, read_header(path, data))
    if whole:
        try:
            bundle.scheme.check_chain()
        except KVCalError as error:
            raise CorruptBundle(f"{path}: {error}") from error
        if not any(bundle.scheme.layers):
            raise CorruptBundle(f"{path}: compresses no layer")
    return bundle


def _parse(path: Path, data: bytes, stated: dict[str, object]) -> Bundle:
    try:
        header = HEADER.read(stated, "header")
        fingerprint, scheme = described(header, _checked_tensors(path, data, header["tensors"]))
        return Bundle(fingerprint, scheme, dict(header["provenance"]), dict(header["metrics"]))
    except CorruptBundle:
        raise
    except IncompatibleBundle as error:
        raise IncompatibleBundle(f"{path}: {error}") from error
    except KVCalError as error:
        raise CorruptBundle(f"{path}: {error}") from error
    except ODD_HEADER as error:
        raise CorruptBundle(f"{path}: header does not describe a bundle ({type(error).__name__}: {error})") from error


def _checked_tensors(path: Path, data: bytes, listed: Mapping[str, TensorEntry]) -> dict[str, Tensor]:
    """The file's tensors, which must be those that the header lists."""
    try:
        tensors = load(data)
    except Exception as error:  # safetensors raises its own type for every kind of damage
        raise CorruptBundle(f"{path}: {error}; the file is truncated or damaged") from error
    if missing := sorted(set(listed) - set(tensors)):
        raise CorruptBundle(f"{path}: tensor {missing[0]!r} is listed but missing")
    if surplus := sorted(set(tensors) - set(listed)):
        raise CorruptBundle(f"{path}: tensor {surplus[0]!r} is not listed in the header")
    for name, tensor in tensors.items():
        entry = listed[name]
        actual = (dtype_name(tensor.dtype), list(tensor.shape))
        if actual != (entry["dtype"], entry["shape"]):
            raise CorruptBundle(f"{path}: tensor {name!r} is {actual}, header says {(entry['dtype'], entry['shape'])}")
        digest = hashlib.sha256(tensor_bytes(tensor)).hexdigest()
        if digest != entry["sha256"]:
            raise CorruptBundle(f"{path}: tensor {name!r} has hash {digest[:16]}…, header says {entry['sha256'][:16]}…")
        if not is_finite(tensor):
            raise CorruptBundle(f"{path}: tensor {name!r} holds a NaN or infinity")
    return tensors
