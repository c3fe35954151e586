"""Keys of one bundle, values of another: a new bundle, or the reason why not."""

from __future__ import annotations

from kvcal_artifacts.bundle import Bundle
from kvcal_artifacts.bundle.bundle import NAMED
from kvcal_artifacts.errors import IncompatibleBundle, UsageError
from kvcal_artifacts.scheme import LayerCodecs, Scheme

from ..report.version import __version__

OF_KEYS, OF_VALUES = {"k1", "k2", "k0"}, {"v1", "v2"}


def combine(keys: Bundle, values: Bundle, *, hashes: tuple[str, str]) -> Bundle:
    """A bundle with the key codecs of one and the value codecs of the other; hashes: sha256 of their files.

    Raises IncompatibleBundle for bundles of different models, UsageError for parts that cannot work together, naming
    both.
    """
    if differences := _differences(keys, values):
        raise IncompatibleBundle(f"{keys.name} and {values.name} were made for different models: {differences}")
    if keys.scheme.windows != values.scheme.windows:
        raise UsageError(
            f"{keys.name} has windows {_windows(keys)}, {values.name} {_windows(values)}: make one of them again with "
            "the "
            "other's --sink, --recent and --block"
        )
    if keys.scheme.selection != values.scheme.selection:
        raise UsageError(
            f"{keys.name} keeps {_tokens_text(keys)}, {values.name} {_tokens_text(values)}: "
            "one token set serves both, make one of them again with the other's --keep and --heavy"
        )
    layers: list[LayerCodecs | None] = []
    for index, (a, b) in enumerate(zip(keys.scheme.layers, values.scheme.layers, strict=True)):
        if (a is None) != (b is None):
            raise UsageError(f"layer {index} is compressed in one of {keys.name} and {values.name} only")
        if a is None or b is None:
            layers.append(None)
            continue
        _check(index, keys, "keys", a.key.needs & OF_VALUES, "values")
        _check(index, values, "values", b.value.needs & OF_KEYS, "keys")
        layers.append(LayerCodecs(a.key, b.value))
    scheme = Scheme(
        keys.scheme.windows, keys.scheme.frame, tuple(layers), dict(keys.scheme.skipped), keys.scheme.selection
    )
    scheme.check_chain()
    record = {
        "tool": f"kvcal {__version__}",
        "method": "combine",
        "settings": {},
        "keys": _origin(keys, hashes[0]),
        "values": _origin(values, hashes[1]),
        "model": keys.provenance.get("model", {}),
    }
    return Bundle(keys.fingerprint, scheme, record, {"bits_per_value": scheme.bits_per_value()})


def _differences(keys: Bundle, values: Bundle) -> str:
    """How the bundles' models differ, in the first NAMED fields; empty if they do not. A hash is named alone only."""
    phrases = keys.fingerprint.differences(values.fingerprint, names=("first", "second"))
    telling = [phrase for phrase in phrases if not phrase.startswith("config_sha256")] or phrases
    return "; ".join([*telling[:NAMED], *([f"and {len(telling) - NAMED} more"] if len(telling) > NAMED else [])])


def _check(index: int, bundle: Bundle, part: str, needs: frozenset[str], other: str) -> None:
    """A predictor was fitted on reconstructions of its own bundle's other half."""
    if needs:
        raise UsageError(
            f"layer {index}: the {part} of {bundle.name} are predicted from {other} as {bundle.name} itself stores "
            "them "
            f"({', '.join(sorted(needs))}); fit them again without that input, or take {other} from {bundle.name} too"
        )


def _tokens_text(bundle: Bundle) -> str:
    selection = bundle.scheme.selection
    return "every token" if selection is None else f"{selection.keep:g} of the tokens ({selection.heavy:g} heavy)"


def _windows(bundle: Bundle) -> str:
    return ", ".join(f"{name} {value}" for name, value in vars(bundle.scheme.windows).items())


def _origin(bundle: Bundle, sha256: str) -> dict[str, object]:
    return {"bundle": bundle.name, "sha256": sha256, "provenance": bundle.provenance}
