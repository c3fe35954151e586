"""Plans a PagedLayer for each layer from what the user asked for and the model's config, or refuses with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcal_artifacts import hf, load_bundle
from kvcal_artifacts.bundle import SUFFIX, Bundle, Fingerprint
from kvcal_artifacts.codecs import ByHead, Codec, Shape
from kvcal_artifacts.errors import IncompatibleBundle, UnsupportedModel, UsageError
from kvcal_artifacts.scheme import LayerCodecs, Scheme
from kvcal_kernels.layout import BLOCK

from . import presets
from .paging import PagedLayer
from .settings import Settings
from .weights import key_probes

EXACT_BITS = 16  # of a number in vLLM's own cache of float16 or bfloat16


@dataclass(frozen=True)
class Plan:
    """What every layer stores. name: the bundle's or preset's. weighed: whether the bundle's key weights were compared
    with the model's; None for a preset, which fits any model.
    """

    name: str
    layers: tuple[PagedLayer, ...]
    deterministic: bool = False
    weighed: bool | None = None

    @property
    def bits(self) -> float:
        """Bits of memory for each number: all layers' pages, padding and copies of norms included."""
        return sum(layer.bits for layer in self.layers) / len(self.layers)

    @property
    def token_bytes(self) -> int | None:
        """Bytes of a token in one head, where all layers agree."""
        sizes = {layer.token_bytes for layer in self.layers}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def tailed(self) -> bool:
        """Whether any layer keeps unfinished blocks exact."""
        return any(layer.tailed for layer in self.layers)

    def describe(self) -> str:
        """One line: bits, how many times FP16's capacity that is, and the mode."""
        packed = "all tokens are packed"
        mode = "tokens of one step attend to each other's exact keys and values"
        if self.tailed:
            packed = f"blocks of {BLOCK} tokens are packed once they are full, and lie outside of pages until then"
        if self.deterministic:
            mode = "every token attends to packed keys and values" + (" of full blocks" if self.tailed else "")
        unchecked = "; the model's key weights were not compared" if self.weighed is False else ""
        return (
            f"kvcal: {self.name}: {self.bits:.2f} bits per value in pages, {EXACT_BITS / self.bits:.2f} x the tokens "
            f"of FP16; {packed}, the bundle's windows do not apply; {mode}{unchecked}"
        )

    def capacity(self, pages: int) -> str:
        """One line: how many tokens so many pages hold, and how many FP16 would in the same memory."""
        tokens = pages * BLOCK
        return f"kvcal: {tokens:,} tokens fit, where {int(tokens * self.bits / EXACT_BITS):,} would at FP16"


def plan(
    settings: Settings, config: hf.ModelConfig, revision: str | None = None, model: str = "", multiple: int = 1
) -> Plan:
    """The plan for a model. config: of its decoder. model: its folder, for its key weights. multiple: see PagedLayer.

    Raises UnsupportedModel, IncompatibleBundle, CorruptBundle, or UsageError for what pages cannot hold.
    """
    _check_model(config)
    if not settings.source.endswith(SUFFIX) and not Path(settings.source).exists():
        shape = Shape(hf.kv_heads_of(config), hf.head_dim_of(config), BLOCK)
        pair = presets.codecs(settings.source, shape)
        layer = _paged(f"preset {settings.source}", pair, multiple)
        return Plan(settings.source, (layer,) * config.num_hidden_layers, settings.deterministic)
    bundle = load_bundle(settings.source)
    weighed = _check_bundle(bundle, config, revision, Path(model))
    _check_scheme(bundle.name, bundle.scheme)
    layers = [
        _paged(f"{bundle.name}, layer {index}", pair, multiple)
        for index, pair in enumerate(bundle.scheme.layers)
        if pair
    ]
    return Plan(bundle.name, tuple(layers), settings.deterministic, weighed)


def _check_model(config: hf.ModelConfig) -> None:
    if (why := hf.unsupported_config(config)) is not None:
        raise UnsupportedModel(f"{config.model_type}: {why}")
    for index, why in hf.unsupported_layers(config).items():
        raise UnsupportedModel(f"{config.model_type}, layer {index}: {why}; kvcal's pages hold full attention only")


def _check_bundle(bundle: Bundle, config: hf.ModelConfig, revision: str | None, folder: Path) -> bool:
    """Refuse another model's bundle; return whether key weights were compared."""
    probe = key_probes(folder, bundle.fingerprint.layers)
    differences = bundle.fingerprint.differences(Fingerprint.of_config(config, revision, probe))
    if differences:
        raise IncompatibleBundle(f"{bundle.name} was made for another model: {'; '.join(differences)}")
    return bool(probe and bundle.fingerprint.probe)


def _check_scheme(name: str, scheme: Scheme) -> None:
    """Refuse what no paged cache with shared prefixes can do."""
    reason = None
    if scheme.selection is not None:
        reason = "it selects tokens by attention (H2O), and a page that requests share cannot lose those of one"
    elif scheme.chained:
        reason = "it predicts layers from the one below (AQUA-KV), for all tokens of a request at every step"
    elif scheme.frame == "pre_rope":
        reason = "it stores keys before RoPE, and vLLM hands them over after RoPE; fit with --rope post_rope"
    if reason is not None:
        raise UsageError(f"{name} cannot be served: {reason}")
    for index, why in scheme.skipped.items():
        raise UsageError(f"{name} cannot be served: layer {index} is not compressed: {why}")


def _paged(where: str, pair: LayerCodecs, multiple: int) -> PagedLayer:
    for codec in (pair.key, pair.value):
        if (reason := _refusal(codec)) is not None:
            raise UsageError(f"{where}, {codec.role}s, codec {codec.name!r} cannot be served: {reason}")
    try:
        return PagedLayer(pair, multiple)
    except UsageError as error:
        raise UsageError(f"{where} cannot be served: {error}") from error


def _refusal(codec: Codec) -> str | None:
    if codec.stats:
        return "what it stores depends on the request's own tokens, so requests could not share a prefix"
    if codec.ragged:
        return "its blocks differ in size, and pages do not; give it fixed tiers (full and four)"
    if isinstance(codec.encoding_codec, ByHead):
        return "its heads are stored in different codecs, and a page gives every head as many bytes"
    if getattr(codec.encoding_codec, "rotation", "head") != "head":
        return "it rotates all heads of a token together, and a page keeps each head's bytes apart"
    return None
