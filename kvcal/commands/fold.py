"""`kvcal fold`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvcal_artifacts.bundle import Bundle, Fingerprint
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.files import refuse_dash

from ..bundles.paths import bundle_at
from ..models import configuration, layerwise, names, revision
from ..models.folding import key_factors, without_factors, write_folded
from ..report.outputs import check_output
from ..report.version import __version__
from .bundles import file_sha256
from .common import Say
from .options import FoldOptions
from .workbench import check_bundle, key_probe, model_record


def run_fold(o: FoldOptions, say: Say) -> dict[str, object]:
    """A new checkpoint with a bundle's key factors in W_K and W_Q, and, on request, the bundle that then needs none."""
    output = Path(o.output)
    refuse_dash(output, "--output")
    bundle = bundle_at(o.bundle)
    rest = o.bundle_output
    if rest is not None and output.resolve() in Path(rest).resolve().parents:
        raise UsageError(f"--bundle-output {rest}: lies in the folder of --output; put it beside")
    if rest is not None:
        check_output(Path(rest), "--bundle-output")
    factors = key_factors(bundle.scheme)
    check_bundle(bundle, o.model, o.revision, device="cpu", random_weights=False, seed=0)
    source = names.resolve(o.model, o.revision)
    changed = write_folded(source, factors, output, dtype=o.dtype)
    folded = names.resolve(str(output.resolve()))
    result = {
        "model": str(output.resolve()),
        "layers": len(factors),
        "changed_tensors": len(changed),
        "dtype": configuration.config_fields(folded)["dtype"],
        "revision": revision.weights_revision(folded, random_weights=False, seed=0),
        "bundle": None,
    }
    if rest is not None:
        written = folded_bundle(bundle, folded, file_sha256(Path(o.bundle)), o.dtype)
        result |= {"bundle": str(rest), "sha256": written.write(Path(rest))}
    else:
        say("the folded model needs a bundle without factors: `kvcal preset`, or --bundle-output for this one's scheme")
    return result


def folded_bundle(bundle: Bundle, folded: names.ModelSource, sha256: str, dtype: str) -> Bundle:
    """The bundle's scheme without factors, for the model that they were folded into. dtype: of its weights."""
    parts = layerwise.open_layerwise(folded, dtype="float32", device="cpu")
    fingerprint = Fingerprint.of(parts.model, parts.revision, key_probe(parts))
    record = {
        **bundle.provenance,
        "tool": f"kvcal {__version__}",
        "model": model_record(folded, parts.revision, False),
        "folded_from": {
            "bundle": bundle.name,
            "bundle_sha256": sha256,
            "model": bundle.provenance.get("model"),
            "tool": bundle.provenance.get("tool"),
            "dtype": dtype,
        },
    }
    return replace(bundle, fingerprint=fingerprint, scheme=without_factors(bundle.scheme), provenance=record, path=None)
