"""What is benchmarked: one layer's codecs from a preset, a pair of codecs, a bundle, or one of the shapes named
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Predicted, ResidualVQ, Shape, Squat, Uniform
from kvcal_artifacts.codecs.predictors import Linear
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.scheme import Frame, LayerCodecs, Scheme, Windows

from ..bundles.paths import bundle_at
from ..methods.data_free import PRESETS, Preset
from ..methods.mixkvq import MixKVQ
from ..methods.registry import codec_maker
from ..models.geometry import Geometry
from ..report.suggest import allowed
from .rows import WindowSettings

WINDOWS = Windows(32, 96, 32)  # of all rows but bundles': so that schemes differ in their codecs alone
LONG = 128  # tokens a group, and a block, of the schemes that end in -g128


@dataclass(frozen=True)
class Benched:
    """One scheme as one layer of a model has it. placeholder: what stands for calibrated constants, if anything does.
    whole: all layers, of a bundle.
    """

    name: str
    codecs: LayerCodecs
    windows: Windows
    frame: Frame
    placeholder: str | None = None
    whole: Scheme | None = field(default=None, compare=False, repr=False)

    @property
    def stored_bits(self) -> float:
        return self.codecs.bits_per_value()

    @property
    def settings(self) -> WindowSettings:
        """The settings as rows have them."""
        return {"sink": self.windows.sink, "recent": self.windows.recent, "block": self.windows.block}

    @property
    def scheme(self) -> Scheme:
        """All layers of a bundle; else this one alone."""
        return self.whole or Scheme(self.windows, self.frame, (self.codecs,))


Maker = Callable[[Shape], LayerCodecs]


def _pair(key: str, value: str) -> Maker:
    return lambda shape: LayerCodecs(codec_maker(key)(shape, "key"), codec_maker(value)(shape, "value"))


def _kivi_long(shape: Shape) -> LayerCodecs:
    group = min(LONG, shape.dim)
    return LayerCodecs(Uniform(shape, "key", 2, LONG, "token"), Uniform(shape, "value", 2, group, "channel"))


def _squat_long(shape: Shape) -> LayerCodecs:
    plain = _kivi_long(shape)
    return LayerCodecs(Squat(plain.key, channels=-(-shape.dim // 2)), plain.value)


def _mixkvq(group: int, tier: int | None = None) -> Maker:
    """A maker of MixKVQ with groups of so many tokens. tier: channels a head in either upper tier, always; None: by the
    thresholds of the preset.
    """

    def make(shape: Shape) -> LayerCodecs:
        method = MixKVQ(group=group, value_group=min(group, shape.dim), block=group, full=tier, four=tier)
        return LayerCodecs(method.key_codec(shape, torch.float16), method.value_codec(shape))

    return make


def _numbers(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")


def _aqua(shape: Shape) -> LayerCodecs:
    """AQUA-KV over HIGGS in 2 bits, linear predictors of random weights."""
    width, plain = shape.heads * shape.dim, _pair("higgs-2-wide", "higgs-2-wide")(shape)

    def linear(inputs: int, seed: int) -> Linear:
        weight = _numbers(seed, inputs * width, width) / (inputs * width) ** 0.5
        return Linear({"weight": weight.half(), "bias": torch.zeros(width, dtype=torch.float16, device="cpu")})

    return LayerCodecs(Predicted(plain.key, linear(1, 1), ("k1",)), Predicted(plain.value, linear(2, 2), ("v1", "k0")))


def _vqkv(size: int, stages: tuple[int, int, int]) -> Maker:
    """VQKV's shape with random codebooks of `size` codewords: stages of (values, low band, high band)."""

    def make(shape: Shape) -> LayerCodecs:
        high = 2 * int(48 * shape.dim / 128 / 2 + 0.5)
        dims = list(range(shape.dim))
        bands = [dims[: shape.dim - high], dims[shape.dim - high :]]
        books = [
            (_numbers(i, count, size, len(band)) * 2.0 ** -torch.arange(count, device="cpu").view(-1, 1, 1)).half()
            for i, (count, band) in enumerate(zip(stages, [dims, *bands], strict=True))
        ]
        return LayerCodecs(ResidualVQ(shape, "key", bands, books[1:]), ResidualVQ(shape, "value", [dims], books[:1]))

    return make


@dataclass(frozen=True)
class Named:
    make: Maker
    block: int = WINDOWS.block
    frame: Frame = "post_rope"
    placeholder: str | None = None


EXTRA: dict[str, Named] = {
    **{f"inner-{bits}": Named(_pair(f"inner-{bits}-symmetric", f"inner-{bits}-symmetric")) for bits in (2, 3, 4)},
    "kivi-2-g128": Named(_kivi_long, LONG),
    "squat-2-g128": Named(_squat_long, LONG),
    "mixkvq-g128": Named(_mixkvq(LONG), LONG),
    "mixkvq-16-16": Named(_mixkvq(WINDOWS.block, 16), placeholder="16 channels a head exact, 16 in 4 bits"),
    "mixkvq-16-16-g128": Named(_mixkvq(LONG, 16), LONG, placeholder="16 channels a head exact, 16 in 4 bits"),
    "aqua-kv-2": Named(_aqua, frame="pre_rope", placeholder="predictors of random weights"),
    "vqkv-4k": Named(_vqkv(4096, (13, 27, 19)), LONG, placeholder="random codebooks"),
    "vqkv-256": Named(_vqkv(256, (20, 40, 28)), LONG, placeholder="random codebooks"),
}


def scheme_names() -> list[str]:
    return [*PRESETS, *EXTRA]


def named(name: str, geometry: Geometry, windows: Windows | None = None) -> Benched:
    """A preset, one of EXTRA, or KEY+VALUE, two codecs as `kvcal compare --keys` takes them.

    windows: instead of the bench's; the block is the scheme's, because groups depend on it.
    """
    sink, recent = (WINDOWS.sink, WINDOWS.recent) if windows is None else (windows.sink, windows.recent)
    extra, method = EXTRA.get(name), PRESETS.get(name)
    if extra is not None:
        block, frame, make, placeholder = extra.block, extra.frame, extra.make, extra.placeholder
    elif isinstance(method, MixKVQ):
        fitted = method
        block, frame, placeholder = fitted.block, fitted.frame, None

        def make(shape: Shape) -> LayerCodecs:
            return LayerCodecs(fitted.key_codec(shape, torch.float16), fitted.value_codec(shape))

    elif isinstance(method, Preset):
        block, frame, make, placeholder = method.block, method.rope, _pair(method.key, method.value), None
    elif name.count("+") == 1:
        _check_pair(name)
        block, frame, make, placeholder = WINDOWS.block, "post_rope", _pair(*name.split("+")), None
    else:
        hint = allowed(name, scheme_names(), "kvcal names")
        raise UsageError(f"scheme {name!r} is not known; {hint}, or KEYCODEC+VALUECODEC")
    shape = Shape(geometry.kv_heads, geometry.head_dim, block)
    try:
        codecs = make(shape)
    except KVCalError as error:
        raise UsageError(f"scheme {name}: does not fit head_dim {geometry.head_dim} ({error})") from error
    scheme_windows = Windows(sink, recent, block)
    (stored,) = Scheme(scheme_windows, frame, (codecs,)).layers  # as a cache stores them
    assert stored is not None
    return Benched(name, stored, scheme_windows, frame, placeholder)


def _check_pair(name: str) -> None:
    """UsageError where a side of KEYCODEC+VALUECODEC is no codec by name."""
    for side, codec in zip(("before", "behind"), name.split("+"), strict=True):
        if not codec:
            raise UsageError(
                f"scheme {name!r}: no codec {side} the +; give KEYCODEC+VALUECODEC (`kvcal names codec`), or a scheme "
                "without a +"
            )
        try:
            codec_maker(codec)
        except UsageError as error:
            raise UsageError(f"scheme {name!r}: {error}") from error


def from_bundle(path: Path, geometry: Geometry) -> Benched:
    """The middle layer of a bundle, or the compressed one nearest to it, with the bundle's windows."""
    bundle = bundle_at(path, presets=True)
    layers = bundle.scheme.layers
    middle = sorted(range(len(layers)), key=lambda index: abs(index - len(layers) // 2))
    pair = next((layers[index] for index in middle if layers[index] is not None), None)
    if pair is None:
        raise UsageError(f"{path}: compresses no layer")
    shape = pair.key.shape
    if (shape.heads, shape.dim) != (geometry.kv_heads, geometry.head_dim):
        raise UsageError(
            f"{path}: made for {shape.heads} kv heads of {shape.dim}, --model has {geometry.kv_heads} of "
            f"{geometry.head_dim}"
        )
    return Benched(bundle.name, pair, bundle.scheme.windows, bundle.scheme.frame, whole=bundle.scheme)


def schemes(
    names: Iterable[str], bundles: Iterable[Path], geometry: Geometry, windows: Windows | None = None
) -> list[Benched]:
    benched = [named(name, geometry, windows) for name in names] + [from_bundle(path, geometry) for path in bundles]
    names_used = [one.name for one in benched]
    if twice := next((name for name in names_used if names_used.count(name) > 1), None):
        raise UsageError(f"two schemes would be called {twice!r}: leave one out, or rename the file")
    return benched
