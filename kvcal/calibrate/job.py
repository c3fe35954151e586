"""What one scan over the layers makes: its bundles, what they share, and what each does with a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvcal_artifacts import hf
from kvcal_artifacts.bundle import Bundle, Fingerprint
from kvcal_artifacts.checked import Json
from kvcal_artifacts.hf import ModelConfig
from kvcal_artifacts.scheme import HeavyHitters, LayerCodecs, Scheme

from ..capture.ranks import ALONE, Ranks
from ..capture.scan import LayerSource, LayerTaps, default_batch
from ..capture.spill import Where
from ..methods.base import Method
from ..methods.vqkv import VQKV
from ..report.timing import PhaseTimer
from .checkpoint import LayerCheckpoint
from .provenance import provenance

if TYPE_CHECKING:
    from ..text.token_windows import Windows


@dataclass(frozen=True)
class FitOptions:
    """How to run, not what to learn. spill: where hidden states and reconstructions lie. warn: whether to forecast the
    fitted schemes' KL and say where it is high. ranks: the processes that share the windows. timer: has the phases
    before the fit; None: there are none.
    """

    batch: int | None = None
    spill: Where = "device"
    spill_dir: Path | None = None
    resume: bool = True
    warn: bool = True
    ranks: Ranks = ALONE
    timer: PhaseTimer | None = None


@dataclass
class FitResult:
    bundle: Bundle
    path: Path
    sha256: str
    seconds: dict[str, float]
    resumed_layers: int
    layer_metrics: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class FitJob:
    """One of the bundles that a scan makes. seed: which windows were drawn, for provenance.

    searched: how the method's settings were found and what was seen there: `provenance` and `metrics`, kept under
    "search". selection: tokens that a cache of this bundle keeps (H2O); nothing that is fitted depends on it.
    """

    method: Method | VQKV
    output: Path
    seed: int = 0
    searched: Mapping[str, Mapping[str, Json]] | None = None
    selection: HeavyHitters | None = None


@dataclass(frozen=True)
class Scan:
    """What the bundles of one scan share. batch: windows at a time, as provenance states it."""

    source: LayerSource
    text: Windows
    other: Windows | None
    ids: Tensor
    model_record: Mapping[str, Json]
    revision: str | None
    device: torch.device
    options: FitOptions
    timer: PhaseTimer
    say: Callable[[str], None]

    @property
    def config(self) -> ModelConfig:
        return hf.config_of(self.source.model)

    @property
    def skipped(self) -> dict[int, str]:
        """Layers that Transformers caches, with the reason."""
        return hf.unsupported_layers(self.config)

    @property
    def compressed(self) -> list[int]:
        """The others, lowest first."""
        skipped = self.skipped
        return [index for index in range(self.config.num_hidden_layers) if index not in skipped]

    def placed(self, codecs: Iterable[LayerCodecs]) -> tuple[LayerCodecs | None, ...]:
        """Codecs of the compressed layers -> those of all layers."""
        by_layer = dict(zip(self.compressed, codecs, strict=True))
        return tuple(by_layer.get(index) for index in range(self.config.num_hidden_layers))

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(self.source.model.parameters()).dtype
        return dtype

    def record(self, job: FitJob) -> dict[str, Json]:
        batch = self.options.batch or default_batch(self.ids.shape[1], self.device)
        record = provenance(job.method, self.text, self.model_record, self.device, self.dtype, batch, job.seed)
        if job.searched is not None and "provenance" in job.searched:
            record["search"] = job.searched["provenance"]
        if job.selection is not None:
            record["selection"] = asdict(job.selection)
        if (other := self.other) is not None:
            record["other_text"] = {"source": other.source, "sha256": other.sha256, "ids_sha256": other.ids_sha256}
        return record


class Part(Protocol):
    """One bundle on its way through a scan.

    saved_probe: the fingerprint's probe where an earlier run saved everything that the part reads from the layers; None
    where it must read them.
    """

    saved_probe: tuple[float, ...] | None

    @property
    def work(self) -> LayerCheckpoint: ...

    def open(self, stack: ExitStack) -> None:
        """Called before the first layer; what must be closed after the last goes on the stack."""

    def layer(self, taps: LayerTaps) -> None: ...

    def complete(self) -> Scheme | None:
        """The fitted scheme, to be forecast; None where `finish` makes and forecasts it. Called once, after the last
        layer.
        """

    def finish(self, fingerprint: Fingerprint) -> FitResult:
        """Write the bundle. Called after `complete`, when hidden states and reconstructions are freed."""

    def share(self) -> None:
        """What ranks other than 0 do of `finish`."""
