"""Plans a PagedLayer for each layer from what the user asked for and the model's config, or refuses with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvcal_artifacts import hf, load_bundle
from kvcal_artifacts import presets as data_free
from kvcal_artifacts.bundle import SUFFIX, Bundle, Fingerprint
from kvcal_artifacts.checked import shown
from kvcal_artifacts.codecs import Codec, Shape
from kvcal_artifacts.errors import IncompatibleBundle, UnsupportedModel, UsageError
from kvcal_artifacts.scheme import LayerCodecs, Scheme
from kvcal_kernels.layout import BLOCK, Form
from kvcal_kernels.layout.form import DIMS
from kvcal_kernels.layout.pages import unfit

from . import presets
from .paging import PagedLayer
from .settings import Settings
from .weights import key_probes

MOST_QUERIES = 16  # of a request's step that the decode kernel takes
EXACT_BITS = 16  # of a number in vLLM's cache of float16 or bfloat16


@dataclass(frozen=True)
class Plan:
    """What every layer stores. name: the bundle's or preset's. weighed: whether the bundle's key weights were compared
    with the model's; None for a preset, which fits any model. gpu: whether kvcal's kernels serve it.
    """

    name: str
    layers: tuple[PagedLayer, ...]
    deterministic: bool = False
    weighed: bool | None = None
    gpu: bool = False

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
        if self.gpu:
            if not self.deterministic:
                mode = "tokens of a chunk attend to each other's exact keys and values, one that comes alone is packed"
            mode += f"; {self._paths()}"
        unchecked = "; the model's key weights were not compared" if self.weighed is False else ""
        return (
            f"kvcal: {self.name}: {self.bits:.2f} bits per value in pages, {EXACT_BITS / self.bits:.2f} x the tokens "
            f"of FP16; {packed}, the bundle's windows do not apply; {mode}{unchecked}"
        )

    def _paths(self) -> str:
        most = f"up to {MOST_QUERIES} tokens of a request" if self.deterministic else "single tokens"
        return f"{most} attend by kvcal's kernel, chunks by torch over dequantised pages"

    def capacity(self, pages: int) -> str:
        """One line: how many tokens so many pages hold, and how many FP16 would in the same memory."""
        tokens = pages * BLOCK
        return f"kvcal: {tokens:,} tokens fit, where {int(tokens * self.bits / EXACT_BITS):,} would at FP16"


@dataclass(frozen=True)
class Rank:
    """One of `count` processes that the heads of a model are split over."""

    index: int = 0
    count: int = 1

    def heads(self, total: int) -> slice:
        """Its kv heads of so many, as vLLM splits them: where there are fewer than processes, several have the same."""
        each = max(1, total // self.count)
        first = self.index * total // self.count
        return slice(first, first + each)


def plan(
    settings: Settings,
    config: hf.ModelConfig,
    revision: str | None = None,
    model: str = "",
    multiple: int = 1,
    gpu: bool = False,
    rank: Rank | None = None,
) -> Plan:
    """The plan for a model. config: of its decoder. model: its folder, for its key weights. multiple: see PagedLayer.
    gpu: for kvcal's kernels. rank: whose heads alone are planned.

    Raises UnsupportedModel, IncompatibleBundle, CorruptBundle, or UsageError for what pages cannot hold, what no kernel
    reads there, and what cannot be split by heads.
    """
    target = _For(multiple, gpu, rank or Rank())
    _check_model(config)
    if not settings.source.endswith(SUFFIX) and not Path(settings.source).exists():
        shape = Shape(hf.kv_heads_of(config), hf.head_dim_of(config), BLOCK)
        layer = _preset(settings.source, shape, target)
        return Plan(settings.source, (layer,) * config.num_hidden_layers, settings.deterministic, gpu=gpu)
    bundle = load_bundle(settings.source)
    weighed = _check_bundle(bundle, config, revision, Path(model))
    _check_scheme(bundle.name, bundle.scheme)
    layers = [
        _paged(f"{bundle.name}, layer {index}", pair, target) for index, pair in enumerate(bundle.scheme.layers) if pair
    ]
    return Plan(bundle.name, tuple(layers), settings.deterministic, weighed, gpu)


def _preset(name: str, shape: Shape, target: _For) -> PagedLayer:
    """The pages of a preset. Raises UsageError: for a name of kvcal's that is not served it says why, and what is."""
    if name in presets.PRESETS:
        return _paged(f"preset {name}", presets.codecs(name, shape), target)
    if (reason := presets.OTHERS.get(name)) is not None:
        raise UsageError(f"preset {name} cannot be served: {reason}")
    if name in data_free.PRESETS or presets.is_codec(name):
        raise UsageError(_not_by_name(name, shape, target))
    if name == "vqkv" and target.gpu:
        raise UsageError(f"{name} cannot be served: on a GPU {SERVED_ON_GPUS}")
    fit = presets.VQKV if name == "vqkv" else presets.fit_of(name) if presets.TRANSFORM.fullmatch(name) else None
    if fit is not None:
        raise UsageError(f"{name} is fitted to text, and served from a bundle only; make it by `{fit}`")
    if "/" in name or name.startswith(".") or name.endswith(".safetensors"):
        raise UsageError(f"bundle {shown(name)}: no such file; the name of a bundle ends with {SUFFIX}")
    names = ", ".join(one for one in presets.PRESETS if _serves(one, shape, target))
    if not names:
        raise UsageError(f"preset {shown(name)}: at head_dim {shape.dim} a GPU serves no preset")
    raise UsageError(f"preset {shown(name)}: allowed is {names}, or a bundle's path, which ends with {SUFFIX}")


def _not_by_name(name: str, shape: Shape, target: _For) -> str:
    """What to say of a preset or a codec of kvcal's that is not served by its name. Raises UsageError where pages
    cannot hold it.
    """
    named = data_free.PRESETS.get(name)
    kind = "codec" if named is None else "preset"
    if named is not None and (reason := scheme_refusal(False, named.frame)) is not None:
        return f"preset {name} cannot be served: {reason}"
    layer = _paged(f"{kind} {name}", presets.codecs(name, shape), target)
    if layer.bits >= EXACT_BITS:
        return (
            f"{kind} {name} cannot be served: it takes {layer.bits:g} bits per value in pages, and FP16 {EXACT_BITS}; "
            "start vLLM without kvcal"
        )
    if named is not None and (other := presets.without_windows(name)) is not None:
        return (
            f"preset {name} cannot be served: it is {other} with its first {named.sink} and newest {named.recent} "
            f"tokens exact, and a server packs every token; {other} is served, without them"
        )
    return f"{kind} {name} is served from a bundle only; make it by `{presets.make(name)}`"


def _serves(name: str, shape: Shape, target: _For) -> bool:
    try:
        _paged(name, presets.codecs(name, shape), target)
    except UsageError:
        return False
    return True


def page_layer(where: str, pair: LayerCodecs, multiple: int = 1, gpu: bool = False) -> PagedLayer:
    """One layer's pages, all heads in one process, as `plan` makes them. Raises UsageError, which begins with `where`,
    for what it refuses.
    """
    return _paged(where, pair, _For(multiple, gpu, Rank()))


class _For(NamedTuple):
    """What a layer is planned for; see `plan`."""

    multiple: int
    gpu: bool
    rank: Rank


def _check_model(config: hf.ModelConfig) -> None:
    if (why := hf.unsupported_config(config)) is not None:
        raise UnsupportedModel(f"{config.model_type}: {why}")
    if _adds_biases(config):
        raise UnsupportedModel(
            f"{config.model_type}: its attention adds biases by distance (ALiBi); kvcal's pages hold plain causal "
            "attention only"
        )
    for index, why in hf.unsupported_layers(config).items():
        raise UnsupportedModel(f"{config.model_type}, layer {index}: {why}; kvcal's pages hold full attention only")


def _adds_biases(config: hf.ModelConfig) -> bool:
    """Whether attention has ALiBi slopes: Bloom's always, Falcon's and MPT's by their configs."""
    of_layers = getattr(config, "attn_config", None)  # MPT's
    return config.model_type == "bloom" or bool(getattr(config, "alibi", False) or getattr(of_layers, "alibi", False))


def _check_bundle(bundle: Bundle, config: hf.ModelConfig, revision: str | None, folder: Path) -> bool:
    """Refuse another model's bundle; return whether key weights were compared."""
    probe = key_probes(folder, bundle.fingerprint.layers)
    differences = bundle.fingerprint.differences(Fingerprint.of_config(config, revision, probe))
    if differences:
        raise IncompatibleBundle(f"{bundle.name} was made for another model: {'; '.join(differences)}")
    return bool(probe and bundle.fingerprint.probe)


def scheme_refusal(chained: bool, frame: str, selects: bool = False) -> str | None:
    """Why no paged cache with shared prefixes can hold a scheme; None where its codecs decide.

    chained: whether layers are predicted from others. frame: of keys. selects: whether it drops tokens.
    """
    if selects:
        return "it selects tokens by attention (H2O), and a page that requests share cannot lose those of one"
    if chained:
        return "it predicts layers from the one below (AQUA-KV), for all tokens of a request at every step"
    if frame == "pre_rope":
        return "it stores keys before RoPE, and vLLM hands them over after RoPE; fit with --frame post_rope"
    return None


def _check_scheme(name: str, scheme: Scheme) -> None:
    reason = scheme_refusal(scheme.chained, scheme.frame, scheme.selection is not None)
    if reason is not None:
        raise UsageError(f"{name} cannot be served: {reason}")
    for index, why in scheme.skipped.items():
        raise UsageError(f"{name} cannot be served: layer {index} is not compressed: {why}")


def _paged(where: str, pair: LayerCodecs, target: _For) -> PagedLayer:
    codecs = []
    for codec in (pair.key, pair.value):
        reason = _refusal(codec) or (_refusal_of_kernels(codec) if target.gpu else None)
        if reason is not None:
            raise UsageError(f"{where}, {codec.role}s, codec {codec.name!r} cannot be served: {reason}")
        codecs.append(_cut(where, codec, target.rank))
    try:
        return PagedLayer(LayerCodecs(*codecs), target.multiple)
    except UsageError as error:
        raise UsageError(f"{where} cannot be served: {error}") from error


def _cut(where: str, codec: Codec, rank: Rank) -> Codec:
    """The codec of a process's heads."""
    if rank.count == 1:
        return codec
    heads = codec.shape.heads
    cut = codec.of_heads(rank.heads(heads)) if heads % rank.count == 0 or rank.count % heads == 0 else None
    if not isinstance(cut, Codec):
        reason = cut or f"{heads} kv heads and {rank.count} processes: one must divide the other"
        raise UsageError(f"{where}, {codec.role}s cannot be served by heads (tensor parallel): {reason}")
    return cut


SERVED_ON_GPUS = "kvcal's kernels read HIGGS and TurboQuant per head, uniform in groups of channels, and transform"


def _refusal_of_kernels(codec: Codec) -> str | None:
    """Why no kernel stores and reads a codec's tokens in pages. A head_dim is refused with those that are served: of
    what attention reads, more than pages are packed for.
    """
    reason = _unserved_by_kernels(codec)
    if reason is None:
        return None
    others = presets.of_other_sizes(codec, DIMS)
    if sizes := [other.shape.dim for other in others if _unserved_by_kernels(other) is None]:
        served = ", ".join(map(str, sizes))
        reason = f"head_dim {codec.shape.dim}: this codec is served at {served}"
    return f"on a GPU {SERVED_ON_GPUS}: {reason}"


def _unserved_by_kernels(codec: Codec) -> str | None:
    form = codec.fused()
    reason: str | None = None
    if isinstance(form, str):
        reason = form
    elif (why := unfit(form)) is not None:
        reason = f"{why}, and no kernel reads the exact tokens of unfinished blocks"
    elif isinstance(form, Form) and form.in_bytes:
        reason = "its grid is for products of bytes; leave out -bytes"
    elif codec.key_factor() is not None:
        reason = "its keys are divided by factors"
    elif isinstance(form, Form) and isinstance(rule := codec.rule(), str):
        reason = rule
    return reason


def _refusal(codec: Codec) -> str | None:
    if codec.stats:
        return "what it stores depends on the request's own tokens, so requests could not share a prefix"
    if codec.ragged:
        return "its blocks differ in size, and pages do not; give it fixed tiers (full and four)"
    if codec.encoding_codec.mixed_heads:
        return "its heads are stored in different codecs, and a page gives every head as many bytes"
    if codec.encoding_codec.heads_together:
        return "it rotates all heads of a token together, and a page keeps each head's bytes apart"
    return None
