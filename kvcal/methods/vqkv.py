"""VQKV: residual codebooks for keys (two bands of dimensions) and values, shared by all layers and heads.

The paper trains them by gradient with frozen Gaussian codebooks (SimVQ); see codebooks.py for the trainers. What is
quantised are single heads' vectors: keys after RoPE, and values. Dimensions of a key go to the low or the high band by
how well a first quantiser reconstructs them (section 3.1, Figure 2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvcal_artifacts.codecs import ResidualVQ, Shape
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import FRAMES, Frame, LayerCodecs, Windows

from .codebooks import Training, train_stage
from .hashing import spread
from .training_vectors import TrainingVectors, subtract

PAPER_DIM = 128  # head_dim of both models in the paper
PROBE_STAGES, PROBE_SIZE, PROBE_VECTORS = 4, 256, 1 << 16  # the quantiser that the bands are measured with
SCALES = ("none", "head", "channel", "query")
SPLITS = ("relative", "absolute")
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Sizes:
    """Stages and codewords of (values, low band, high band) at head_dim 128, dims of the high band, and what goes with
    it.
    """

    stages: Triple
    sizes: Triple
    vectors: int
    recent: int = 1024
    block: int = 1024
    high: int = 48

    def stages_for(self, dim: int) -> Triple:
        """Stages that keep the codes a value at another head_dim, at least one."""
        values, low, high = (max(1, int(stages * dim / PAPER_DIM + 0.5)) for stages in self.stages)
        return values, low, high

    def high_for(self, dim: int) -> int:
        """Dimensions that are the same part of a head of another size, in whole RoPE pairs."""
        return 2 * int(self.high * dim / PAPER_DIM / 2 + 0.5)


# The first two are the paper's (section 4.1). The others spend the bits per value of 3b (2.75) on smaller codebooks.
SIZES = {
    "8b": Sizes((8, 20, 16), (65536, 65536, 16384), 10_000_000),
    "3b": Sizes((10, 20, 14), (65536, 65536, 65536), 10_000_000),
    "medium": Sizes((13, 27, 19), (4096, 4096, 4096), 1_000_000),
    "small": Sizes((20, 40, 28), (256, 256, 256), 100_000, recent=128, block=128),
}


def default_sizes(parameters: int) -> str:
    """Which entry of SIZES suits a model of so many parameters."""
    limits = (("8b", 5e9), ("3b", 2e9), ("medium", 1e8))
    return next((name for name, least in limits if parameters >= least), "small")


@dataclass(frozen=True)
class VQKV:
    """VQKV: residual vector quantisation of keys and values.

    stages, sizes: (values, low band, high band). high: dimensions of the high band; 0: one band, and the high band's
    numbers are not used. shared: one set of codebooks for all layers, as the paper has it, else one per layer.

    scale: in which units vectors are quantised. "none", the paper's: unscaled. "head", "channel": divided by the root
    mean square of their layer and head or channel. "query": keys times that of the queries they will meet, so that the
    error of a score is what is minimised; values then as "head". split: dimensions are ranked by squared error over
    their own energy ("relative") or by the error alone ("absolute").
    """

    name: ClassVar[str] = "vqkv"

    stages: Triple = SIZES["small"].stages
    sizes: Triple = SIZES["small"].sizes
    high: int = 48
    vectors: int = SIZES["small"].vectors
    shared: bool = True
    scale: str = "query"
    split: str = "relative"
    rope: Frame = "post_rope"
    training: Training = field(default_factory=Training)
    sink: int = 4
    recent: int = 1024
    block: int = 1024

    def __post_init__(self) -> None:
        for what, setting, allowed in (
            ("scale", self.scale, SCALES),
            ("split-by", self.split, SPLITS),
            ("frame", self.rope, FRAMES),
        ):
            if setting not in allowed:
                raise UsageError(f"--{what} {setting!r}: allowed are {', '.join(allowed)}")
        if len(self.stages) != 3 or min(self.stages) < 1:
            raise UsageError(f"--stages {self.stages}: three numbers of at least 1: values, low band, high band")
        if len(self.sizes) != 3 or any(not 2 <= k <= 65536 or k & (k - 1) for k in self.sizes):
            raise UsageError(f"--sizes {self.sizes}: three powers of two from 2 to 65536: values, low band, high band")
        if self.vectors < max(self.sizes):
            raise UsageError(
                f"--vectors {self.vectors}: a codebook of {max(self.sizes)} codewords needs at least as many"
            )
        self.windows  # noqa: B018  validates

    @property
    def taps(self) -> frozenset[str]:
        return frozenset({"q", "k", "v"} if self.scale == "query" else {"k", "v"})

    @property
    def windows(self) -> Windows:
        return Windows(self.sink, self.recent, self.block)

    @property
    def frame(self) -> Frame:
        return self.rope

    def high_dims(self, dim: int) -> int:
        """The high band's dimensions, checked against a head's."""
        if not 0 <= self.high < dim:
            raise UsageError(f"--high-dims {self.high}: a head has {dim}, at least one of them must be in the low band")
        return self.high

    def codes(self, split: bool) -> int:
        """Codes of a key and a value."""
        values, low, high = self.stages
        return values + low + (high if split else 0)

    def paper_compression(self, dim: int) -> float:
        """VQKV Eq. 12: one code counted as one number of the model's dtype."""
        return 1 - self.codes(self.high > 0) / (2 * dim)

    def layer_codecs(
        self, shape: Shape, bands: list[list[int]], books: dict[str, Tensor], scales: dict[str, Tensor | None]
    ) -> LayerCodecs:
        """The codecs of a layer with these codebooks. books: "value", "low" and, with two bands, "high", each (S, k, d)
        float16; scales: "key", "value" (H, D).
        """
        keys = [books[name] for name in ("low", "high") if name in books]
        key = ResidualVQ(shape, "key", bands, keys, scales["key"])
        value = ResidualVQ(shape, "value", [list(range(shape.dim))], [books["value"]], scales["value"])
        return LayerCodecs(key, value)


def quantisers(method: VQKV) -> dict[str, tuple[int, int]]:
    """Name -> (stages, codewords) of each residual quantiser, in the order in which they are trained."""
    names = ("value", "low", "high") if method.high else ("value", "low")
    return {name: (method.stages[i], method.sizes[i]) for i, name in enumerate(names)}


def searches(method: VQKV, dim: int) -> set[tuple[int, int]]:
    """Dimension and codewords of every search for the nearest codeword that a training may make, heads being of `dim`
    dimensions.
    """
    high = method.high_dims(dim)
    dims = {"value": dim, "low": dim - high, "high": high}
    trained = {(dims[name], size) for name, (_, size) in quantisers(method).items()}
    return trained | ({(dim, PROBE_SIZE)} if high else set())


def reconstruction_errors(
    keys: TrainingVectors, holdout: Tensor, label: str, training: Training
) -> tuple[Tensor, Tensor]:
    """How badly each dimension comes out of one small residual quantiser of whole keys: (squared error, energy), each
    (D,) float64 over holdout (m, D). keys (n, D); neither is changed. Rank 0 trains it, on vectors of all.
    """
    rest, ranks = keys.rows(spread(len(keys), min(len(keys), PROBE_VECTORS), f"{label}:probe")), keys.ranks
    return ranks.broadcast(_errors_of_probe(rest, holdout, label, training) if ranks.rank == 0 else None, 0)


def _errors_of_probe(keys: Tensor, holdout: Tensor, label: str, training: Training) -> tuple[Tensor, Tensor]:
    rest, tail = TrainingVectors.of(keys), holdout.clone()
    energy = holdout.double().square().sum(0)
    probe = Training("k-means", least=training.least, most=training.least)
    for stage in range(PROBE_STAGES):
        size = min(PROBE_SIZE, 1 << (len(rest).bit_length() - 1))
        book, _ = train_stage(rest, tail, float(energy.sum()), stage, size, f"{label}:probe:{stage}", probe)
        rest.subtract(book)
        subtract(tail, book)
    return tail.double().square().sum(0), energy


def band_split(error: Tensor, energy: Tensor, high: int, rotary: int, by: str) -> list[list[int]]:
    """[low band, high band]: the `high` worst dimensions form the high band, RoPE pairs (i, i + rotary / 2) together.

    error, energy (D,) as from reconstruction_errors; rotary: dimensions that RoPE rotates. One band if `high` is 0.
    """
    dim = len(error)
    if not high:
        return [list(range(dim))]
    half = rotary // 2
    groups = [(i, i + half) for i in range(half)] + [(i,) for i in range(2 * half, dim)]
    sums = [(error[list(g)].sum(), energy[list(g)].sum(), len(g)) for g in groups]
    badness = [float(e / a.clamp_min(1e-300)) if by == "relative" else float(e) / n for e, a, n in sums]
    chosen: list[int] = []
    for i in sorted(range(len(groups)), key=lambda i: (-badness[i], i)):
        chosen += groups[i] if len(chosen) + len(groups[i]) <= high else ()
    if len(chosen) < high:
        raise UsageError(f"--high-dims {high}: RoPE pairs stay together here, so the number must be even")
    return [[d for d in range(dim) if d not in chosen], sorted(chosen)]


def head_scale(kind: str, square: Tensor, queries: Tensor | None) -> Tensor | None:
    """What a layer's channels are divided by: (H, D) float16, or None.

    square: mean square of keys or values (H, D); queries: of the queries that meet them, for "query" (None for values).
    """
    if kind == "none":
        return None
    if kind == "query" and queries is not None:
        scale = 1 / _floored(queries.sqrt())
    elif kind == "channel":
        scale = _floored(square.sqrt())
    else:
        scale = square.mean(-1, keepdim=True).sqrt().expand_as(square)
    return scale.clamp(2.0**-14, 32768.0).half().contiguous()


def _floored(root: Tensor) -> Tensor:
    """A dead channel gets a thousandth of its head's mean, not zero."""
    return root.clamp_min(1e-3 * root.mean(-1, keepdim=True)).clamp_min(1e-30)


def two_scales(method: VQKV, keys: Tensor, values: Tensor, queries: Tensor | None) -> dict[str, Tensor | None]:
    """Scales of one layer from the mean squares of its keys, values and queries, each (H, D)."""
    return {"key": head_scale(method.scale, keys, queries), "value": head_scale(method.scale, values, None)}


def peak_memory(device: torch.device) -> int:
    """Bytes: of the device's allocator on CUDA, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
