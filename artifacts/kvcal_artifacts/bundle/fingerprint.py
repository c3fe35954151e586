"""Which model a bundle is for: its shape, its RoPE, its config, and some of its key weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch import nn

from .. import hf
from ..checked import Json
from .canonical import canonical, sha256_text
from .settings import Settings, plain

# What decides a model's function; other config fields (dtype, versions, paths) may differ between loads of one model.
# This list is closed, because all of it is in one hash: what it overlooks is in `settings.FIELDS`.
FINGERPRINT_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "sliding_window",
    "no_rope_layers",
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
PROBE_TOLERANCE = 0.02  # bfloat16 keeps 8 bits: the same weight in another dtype differs by less than 1 %


@dataclass(frozen=True)
class Fingerprint:
    """What a bundle remembers of its model.

    probe: some key weights, to tell other weights of the same shape. settings: what `config_sha256` overlooks; None in
    bundles of before, which are then not compared in it.
    """

    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    rope: Mapping[str, Json]
    config_sha256: str
    revision: str | None = None
    probe: tuple[float, ...] = ()
    settings: Settings | None = None

    @classmethod
    def of(cls, model: nn.Module, revision: str | None = None, probe: tuple[float, ...] | None = None) -> Fingerprint:
        """The fingerprint of a model.

        probe: hf.key_probe of its first and last layer, where it no longer holds them.
        """
        return cls.of_config(hf.config_of(model), revision, _probe(model) if probe is None else probe)

    @classmethod
    def of_config(
        cls, config: hf.ModelConfig, revision: str | None = None, probe: tuple[float, ...] = ()
    ) -> Fingerprint:
        """The fingerprint of a model that another program loads, by the config of its decoder.

        probe: as `of` takes it; empty: weights are not compared.
        """
        values = {name: plain(getattr(config, name, None)) for name in FINGERPRINT_FIELDS}
        rope = {k: plain(v) for k, v in (getattr(config, "rope_parameters", None) or {}).items() if v is not None}
        values |= {"head_dim": hf.head_dim_of(config), "rope": rope}
        stated = {name: value for name, value in values.items() if value is not None}
        return cls(
            architecture=config.model_type,
            layers=config.num_hidden_layers,
            kv_heads=hf.kv_heads_of(config),
            head_dim=hf.head_dim_of(config),
            rope=rope,
            config_sha256=sha256_text(canonical(stated)),
            revision=revision or getattr(config, "_commit_hash", None),
            probe=probe,
            settings=Settings.of(config),
        )

    def entry(self) -> dict[str, object]:
        """The fingerprint as a header states it: without `settings` where there are none."""
        entry = asdict(self)
        return {name: value for name, value in entry.items() if name != "settings" or value is not None}

    def differences(self, other: Fingerprint, names: tuple[str, str] = ("bundle", "model")) -> list[str]:
        """A phrase for each field in which the other model differs; empty if this bundle fits it. names: what the
        phrases call the two.
        """
        first, second = names
        differences = [
            f"{name}: {first} {mine!r}, {second} {theirs!r}"
            for name in ("architecture", "layers", "kv_heads", "head_dim", "rope", "config_sha256")
            if (mine := getattr(self, name)) != (theirs := getattr(other, name))
        ]
        if self.settings is not None and other.settings is not None:
            differences += self.settings.differences(other.settings, names)
        if not differences and self.revision and other.revision and self.revision != other.revision:
            differences.append(f"weights revision: {first} {self.revision!r}, {second} {other.revision!r}")
        if not differences and self.probe and other.probe and not _close(self.probe, other.probe):
            differences.append(f"key weights: {first} starts {self.probe[:3]}, {second} {other.probe[:3]}")
        return differences


def _probe(model: nn.Module) -> tuple[float, ...]:
    decoder = hf.decoder_of(model)
    layers = probed_layers(decoder.config.num_hidden_layers)
    return tuple(number for index in layers for number in hf.layer_probe(decoder, index))


def probed_layers(count: int) -> tuple[int, ...]:
    """The layers whose key weights a fingerprint looks at: the first and the last, once where they are one."""
    return tuple(sorted({0, count - 1}))


def _close(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    scale = max(map(abs, a))
    return len(a) == len(b) and all(abs(x - y) <= PROBE_TOLERANCE * scale for x, y in zip(a, b, strict=True))
