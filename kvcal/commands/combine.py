"""`kvcal combine`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..bundles.combine import combine
from ..bundles.paths import bundle_at
from ..report.outputs import check_output
from .bundles import file_sha256


def run_combine(keys: Path, values: Path, output: Path) -> dict[str, Any]:
    """Write the bundle that takes keys from one and values from the other."""
    check_output(output)
    bundle = combine(bundle_at(keys), bundle_at(values), hashes=(file_sha256(keys), file_sha256(values)))
    digest = bundle.write(output)
    return {
        "bundle": str(output),
        "sha256": digest,
        "bytes": output.stat().st_size,
        "bits_per_value": round(bundle.scheme.bits_per_value(), 4),
        "resident_bytes": bundle.scheme.resident_bytes(),
        "keys": bundle.provenance["keys"]["bundle"],
        "values": bundle.provenance["values"]["bundle"],
    }
