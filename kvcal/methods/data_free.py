"""Methods that need no data: one codec for keys, one for values, exceptions by layer. Presets of `kvcal eval
--preset`: their table (kivi-2, innerq-base, ...) is kvcal_artifacts.presets, their codecs kvcal_artifacts.codecs.named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import nn

from kvcal_artifacts import hf, presets
from kvcal_artifacts.codecs import Codec, Role, Shape, load_plugins
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import FRAMES, Frame, LayerCodecs, Scheme, Windows

from ..report.suggest import allowed, refuse_auto
from .base import layer_by_layer
from .composition import DataFreeComposition
from .mixkvq import MixKVQ

COMPOSED = "composed"  # instead of a preset's name, where codecs are named one by one
ROLES: tuple[Role, Role] = ("key", "value")


@dataclass(frozen=True)
class Preset:
    """A scheme that needs no data. key, value: names of codecs (see registry); per_layer: exceptions (see composition).
    AQUA-KV's windows by default; presets of other papers have theirs.
    """

    key: str
    value: str
    rope: Frame = "post_rope"
    sink: int = 4
    recent: int = 128
    block: int = 32
    per_layer: tuple[str, ...] = ()

    @property
    def composition(self) -> DataFreeComposition:
        return DataFreeComposition(self.key, self.value, self.per_layer)

    def scheme(self, model: nn.Module) -> Scheme:
        """The preset for this model; layers that cannot be compressed are skipped with the reason."""
        if self.rope not in FRAMES:
            raise UsageError(f"frame {self.rope!r}: allowed are {', '.join(FRAMES)}")
        windows = Windows(self.sink, self.recent, self.block)
        composition, layers = self.composition, hf.config_of(model).num_hidden_layers
        composition.check(layers)

        def codec(layer: int, shape: Shape, role: Role) -> Codec:
            return composition.codec(layer, layers, role)(shape, role)

        scheme = layer_by_layer(
            model, windows, self.rope, lambda layer, shape: LayerCodecs(*(codec(layer, shape, role) for role in ROLES))
        )
        composition.check_reach(layers, scheme.skipped)
        return scheme


DataFree = Preset | MixKVQ  # what has a scheme without calibration

PRESETS: dict[str, DataFree] = {
    **{name: Preset(one.key, one.value, one.frame, one.sink, one.recent) for name, one in presets.PRESETS.items()},
    "mixkvq": MixKVQ(),
}


def composed(name: str | None, keys: str | None, values: str | None, per_layer: tuple[str, ...]) -> DataFree:
    """A preset, other codecs instead of its own as far as given; or, without a name, these codecs. Raises UsageError
    where they do not suffice.
    """
    if name is None:
        if keys is None or values is None:
            raise UsageError("nothing says what to store: give a preset's name, --keys with --values, or --recipe")
        method = Preset(keys, values, per_layer=per_layer)
    else:
        base = preset(name)
        if keys is None and values is None and not per_layer:
            return base
        if isinstance(base, MixKVQ):  # the same codecs by their names
            base = Preset("mixkvq", "mixkvq", sink=base.sink, recent=base.recent, block=base.block)
        method = replace(base, key=keys or base.key, value=values or base.value, per_layer=per_layer)
    method.composition  # noqa: B018  names are checked
    return method


def block_notes(codecs: Iterable[str], block: int) -> Iterator[str]:
    """A line for each of these codecs whose preset packs more or fewer tokens at a time. The codec has other stored
    bits then, where it stores something per block.
    """
    for name in dict.fromkeys(codecs):
        if (method := PRESETS.get(name)) is not None and method.block != block:
            yield (
                f"note: {name} as a codec packs {block} tokens at a time here, the preset {name} {method.block}: give "
                f"--block {method.block} for the preset's stored bits"
            )


def preset(name: str) -> DataFree:
    """The preset of this name, of kvcal or of an installed package. Raises UsageError for any other name."""
    if name not in PRESETS:
        load_plugins()
    if name not in PRESETS and name.endswith(".safetensors"):
        raise UsageError(
            f"preset {name!r} is the name of a bundle's file: give it with --bundle, where there is that option"
        )
    refuse_auto(name)
    if name not in PRESETS:
        raise UsageError(f"preset {name!r} is not known; {allowed(name, PRESETS, 'kvcal names preset')}")
    return PRESETS[name]
