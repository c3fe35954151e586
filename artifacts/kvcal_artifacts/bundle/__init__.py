"""The bundle: one safetensors file with everything a cache needs to know about a model (docs/format.md).

One metadata key, `kvcal`, holds canonical JSON {"header": ..., "sha256": hash of the canonical header}; the header
lists every tensor with dtype, shape and hash. The same content gives the same bytes. Readers check everything and
import nothing by name.
"""

from __future__ import annotations

from .bundle import Bundle
from .envelope import HEADER_LIMIT, read_header
from .fingerprint import Fingerprint, probed_layers
from .header import FORMAT, SUFFIX, VERSIONS
from .reading import load_bundle, parse

__all__ = [
    "FORMAT",
    "HEADER_LIMIT",
    "SUFFIX",
    "VERSIONS",
    "Bundle",
    "Fingerprint",
    "load_bundle",
    "parse",
    "probed_layers",
    "read_header",
]
