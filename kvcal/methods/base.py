"""What a method is: a frozen configuration that turns one layer's keys and values into codecs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kvcal_artifacts import hf
from kvcal_artifacts.checked import Json
from kvcal_artifacts.codecs import Context, Shape
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import Frame, LayerCodecs, Scheme, Windows

from ..capture.scan import LayerTaps
from ..capture.spill import SpillStore
from ..report.timing import PhaseTimer


@dataclass
class Carry:
    """What a layer hands to the next compressed one: reconstructions by name (k1, v1, k2, v2), each (windows, tokens,
    C).

    train: windows [0, train) are fitted on, the rest are held out. tokens: which of each window's tokens are coded; the
    sink is not, nor is an unfinished block at the end. layers: of the model. holdout: how many windows are held out;
    what comes after them is of another text, to compare with. skipped: layers that keep a cache of their own, with the
    reason.
    """

    train: int
    tokens: slice
    shape: Shape
    timer: PhaseTimer
    layers: int = 0
    stores: dict[str, SpillStore] = field(default_factory=dict)
    holdout: int = 0
    skipped: Mapping[int, str] = field(default_factory=dict)

    @property
    def compressed(self) -> list[int]:
        """Layers that are compressed, lowest first."""
        return [index for index in range(self.layers) if index not in self.skipped]

    def coded(self, x: Tensor) -> Tensor:
        """(B, H, T, D) -> the coded tokens of it."""
        return x[:, :, self.tokens]

    def read(self, names: Iterable[str], rows: slice) -> dict[str, Tensor]:
        """Reconstructions (B, H, tokens, D) float32 of these windows."""
        return {n: self._heads(self.stores[n].read(rows).float()) for n in names}

    def context(self, layer: int, names: Iterable[str], rows: slice) -> Context:
        parts = self.read(names, rows)
        k0, k1, v1, k2, v2 = (parts.get(name) for name in ("k0", "k1", "v1", "k2", "v2"))
        return Context(layer, k1, v1, k2, v2, k0)

    def write(self, name: str, rows: slice, x: Tensor) -> None:
        """x (B, H, tokens, D)."""
        store = self.stores[name]
        store.write(rows, x.transpose(1, 2).flatten(2).to(store.dtype))

    def _heads(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (self.shape.heads, self.shape.dim)).transpose(1, 2)

    def training_rows(self, rows: slice) -> int:
        """How many of these windows, from the first, are fitted on."""
        return max(0, min(int(rows.stop), self.train) - int(rows.start))


@dataclass
class LayerFit:
    """One layer's codecs and how well they fit. metrics: numbers by name, and lists of a number a kv head
    (HoldoutError).
    """

    codecs: LayerCodecs
    metrics: dict[str, Any]


class Method(Protocol):
    """A frozen dataclass; its fields are its configuration."""

    name: ClassVar[str]
    taps: ClassVar[frozenset[str]]  # what it must see: of q, k, v; empty = no data, no forward pass

    @property
    def windows(self) -> Windows: ...

    @property
    def frame(self) -> Frame: ...

    def buffers(self) -> dict[str, str]:
        """Names of the reconstructions it keeps in a Carry, and which buffer each lies in."""

    def fit_layer(self, layer: int, taps: LayerTaps, carry: Carry) -> LayerFit:
        """Codecs of one layer; leaves reconstructions in `carry` and the layer advanced."""

    def replay_layer(self, layer: int, taps: LayerTaps, carry: Carry, codecs: LayerCodecs) -> None:
        """Repeat the effect of `fit_layer` on `carry` and the hidden states after a restart, with codecs already
        fitted.
        """


@runtime_checkable
class Finishing(Protocol):
    """A method that decides something only after all layers."""

    def finish(
        self, codecs: list[LayerCodecs], metrics: list[dict[str, float]]
    ) -> tuple[list[LayerCodecs], list[dict[str, float]]]:
        """What fit_layer gave for each compressed layer -> the bundle's codecs and metrics. Never from a checkpoint."""


@dataclass(frozen=True)
class Unfitted:
    """What a method comes down to without its text. preset: the scheme of the same codecs without a fit, called `name`.
    options: of the method's command, for another fit; "" for none.
    """

    name: str
    preset: HasScheme
    options: str = ""


class HasScheme(Protocol):
    def scheme(self, model: nn.Module) -> Scheme:
        """The scheme for this model."""


@runtime_checkable
class HasUnfitted(Protocol):
    """A method whose text is not needed for a scheme, only for a better one."""

    def unfitted(self) -> Unfitted | None:
        """The preset of the same codecs; None where these settings have none."""


def layer_by_layer(
    model: nn.Module, windows: Windows, frame: Frame, pair: Callable[[int, Shape], LayerCodecs]
) -> Scheme:
    """A pair of codecs for each layer, by its number; those that cannot be compressed are skipped with the reason.

    Raises UnsupportedModel where none can, or not with keys in this frame.
    """
    hf.check_supported(model)
    config = hf.config_of(model)
    skipped = hf.unsupported_layers(config)
    hf.check_frame(hf.attention_sites(model), frame)
    shape = hf.layer_shape(config, windows.block)
    layers = tuple(None if i in skipped else pair(i, shape) for i in range(config.num_hidden_layers))
    return Scheme(windows, frame, layers, skipped)


def settings_of(method: Any) -> dict[str, Json]:
    """Every field, JSON-able."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(method).items()}


def flat(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B * T, H * D) float32."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1).float()


def summed(total: Tensor | float) -> Tensor:
    """Return a sum unchanged, or one that nothing was added to, a number, as a float64 tensor () on the CPU."""
    return total if isinstance(total, Tensor) else torch.tensor(total, dtype=torch.float64, device="cpu")


@dataclass
class HoldoutError:
    """Sums over held-out tokens that say how well a predictor and its codec do."""

    residual: Tensor | float = 0.0  # per channel, squared
    total: Tensor | float = 0.0
    square: Tensor | float = 0.0
    error: Tensor | float = 0.0  # per channel, squared
    count: int = 0

    def add(self, x: Tensor, guess: Tensor | None, decoded: Tensor) -> None:
        """Add tokens x (n, C), what was predicted for them (or None) and what they decode to, both (n, C)."""
        wide = x.double()
        self.square = self.square + wide.square().sum(0)
        self.total = self.total + wide.sum(0)
        self.error = self.error + (wide - decoded).square().sum(0)
        if guess is not None:
            self.residual = self.residual + (wide - guess).square().sum(0)
        self.count += len(x)

    def merge(self, other: HoldoutError) -> None:
        """Add the sums of other tokens."""
        self.residual = self.residual + other.residual
        self.total = self.total + other.total
        self.square = self.square + other.square
        self.error = self.error + other.error
        self.count += other.count

    def metrics(self, role: str, heads: int) -> dict[str, Json]:
        """relative_error: |x - decoded|^2 / |x|^2. explained_variance: mean over channels, AQUA-KV section 3.1.

        head_errors: the relative error of each of the kv heads, a list. key_channel_error: mean over channels of their
        error over their variance; key_channel_ratio: largest over median root mean square of a channel
        (calibrate/forecast.py).
        """
        if not self.count:
            return {}
        square, total, error, residual = map(summed, (self.square, self.total, self.error, self.residual))
        whole = square.sum().clamp_min(1e-30)
        out = {f"{role}_relative_error": float(error.sum() / whole)}
        by_head = error.view(heads, -1).sum(1) / square.view(heads, -1).sum(1).clamp_min(1e-30)
        if role == "key":
            spread = (square - total.square() / self.count).clamp_min(1e-12 * whole / len(square))
            size = square.sqrt()
            out["key_channel_error"] = float((error / spread).mean())
            out["key_channel_ratio"] = float(size.max() / size.median().clamp_min(1e-30))
        if residual.ndim:
            variance = (square - total.square() / self.count).clamp_min(1e-30)
            out[f"{role}_explained_variance"] = float((1 - residual / variance).mean())
        rounded = [round(value, 6) for value in by_head.tolist()]
        return {**{name: round(value, 6) for name, value in out.items()}, f"{role}_head_errors": rounded}


def coded_tokens(length: int, sink: int, block: int) -> slice:
    """Which tokens of a window a cache would pack: not the sink, and whole blocks only."""
    blocks = (length - sink) // block
    if blocks < 1:
        raise UsageError(
            f"windows of {length} tokens leave nothing to compress behind a sink of {sink} in blocks of {block}; "
            f"use --length {sink + block} or more"
        )
    return slice(sink, sink + blocks * block)
