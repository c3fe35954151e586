"""Training of residual codebooks: three trainers, one stage at a time, vectors held once and turned into residuals in
place. Ranks share the vectors (training_vectors.py), and all have the codewords of rank 0.

Letters: n vectors of dimension d, k codewords per stage. A codeword is W q, q a row of a frozen Gaussian codebook
(SimVQ, Zhu et al. 2024), or free (k-means). Given which codeword each vector has, the best W needs no gradient. With
n_j vectors of sum s_j at codeword j, it solves W sum_j n_j q_j q_j' = sum_j s_j q_j'. VQKV has no encoder: nothing else
is learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvcal_artifacts.codecs.refusals import to_half
from kvcal_artifacts.codecs.residual_vq import LEAST, no_codewords
from kvcal_artifacts.errors import UsageError
from kvcal_kernels.residual_vq.nearest import sums

from ..capture.ranks import ALONE, Ranks
from .hashing import hashed_normal, spread
from .training_vectors import TrainingVectors, shared_nearest

SAMPLE = 1 << 17  # vectors that a covariance is taken of
FILL, WIDEST_NORMAL = 2.0**-10, 4.5  # of codewords that no vector needs: the least magnitude; above hashed_normal's
ADAM_STEPS = 100  # an iteration of Adam has at least as many, however few the vectors


@dataclass(frozen=True)
class Training:
    """How a stage is trained. tolerance, least, most: an iteration that lowers the held-out error by less than this
    fraction is the last, but never before `least` or after `most`. beta, gamma: of VQKV Eq. 4; rate, batch: of Adam.
    """

    trainer: str = "k-means"
    tolerance: float = 0.01
    least: int = 5
    most: int = 50
    rate: float = 1e-3
    batch: int = 65536
    beta: float = 1.0
    gamma: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trainer not in TRAINERS:
            raise UsageError(f"--trainer {self.trainer!r}: allowed are {', '.join(TRAINERS)}")
        if not 0 < self.tolerance < 1:
            raise UsageError(f"--tolerance {self.tolerance:g}: must lie between 0 and 1")
        if not 1 <= self.least <= self.most:
            raise UsageError(f"--min-iterations {self.least}, --max-iterations {self.most}: needs 1 <= min <= max")
        if not (
            0 < self.rate < math.inf and self.batch > 0 and 0 <= self.beta < math.inf and 0 <= self.gamma < math.inf
        ):
            raise UsageError(
                "--rate and --batch-vectors must be positive, --beta and --gamma not negative, all of them finite"
            )


@dataclass
class StageReport:
    """How the training of one stage went. error: held-out squared error over the held-out vectors' squares, all stages
    so far. errors: the same of the codewords that the stage begins with, then after each iteration; `error` is the
    least of the latter. used: codewords that some training vector has, 0 until that is counted. reseeded: dead
    codewords replaced on the way. seconds: not in a bundle.
    """

    stage: int
    iterations: int
    error: float
    errors: list[float]
    used: int
    reseeded: int
    seconds: float = 0.0


def last_fall(errors: Sequence[float]) -> float:
    """The fraction by which a stage's last iteration lowered its error: what Training.tolerance is compared with."""
    before, after = errors[-2:]
    return 1 - after / before if before else 0.0


class Trainer(Protocol):
    """One stage's codewords on their way."""

    reseeded: int

    def start(self, x: TrainingVectors) -> Tensor:
        """First codewords (k, d) float32 for vectors x (n, d)."""

    def improve(self, x: TrainingVectors, book: Tensor) -> Tensor:
        """Better ones, from vectors and the codewords (k, d) float16 that they have now."""


def second_moment(x: TrainingVectors, label: str) -> Tensor:
    """Mean of x x' over a sample: float64 (d, d)."""
    part = x.rows(spread(len(x), min(len(x), SAMPLE), label)).double()
    return part.T @ part / len(part)


def shrinkage(moment: Tensor, bits: float) -> tuple[Tensor, Tensor]:
    """Reverse water-filling of a Gaussian of this second moment at so many bits a vector: (directions (d, d) in
    columns, variance of the best codewords along each (d,)). Directions below the water do not change.
    """
    value, vector = torch.linalg.eigh(moment.cpu())  # LAPACK: small, and the same on every run
    value = value.clamp_min(0)
    low, high = 0.0, float(value.max())
    for _ in range(60):
        water = (low + high) / 2
        spent = 0.5 * torch.log2((value / max(water, 1e-300)).clamp_min(1)).sum()
        low, high = (water, high) if float(spent) > bits else (low, water)
    return vector.to(moment.device), (value - high).clamp_min(0).to(moment.device)


def first_map(moment: Tensor, size: int) -> Tensor:
    """W (d, d) float64 that gives rows of the frozen codebook the second moment of the best code of so many
    codewords.
    """
    vector, factors = shrinkage(moment, _bits(size))
    return (vector * (factors * len(moment)).sqrt()) @ vector.T


def _bits(k: int) -> float:
    return float(torch.tensor(float(k), dtype=torch.float32, device="cpu").log2())


class KMeans:
    """Residual k-means: a codeword is the mean of its vectors. It starts from vectors shrunk as the best code would
    be.
    """

    def __init__(self, size: int, label: str, training: Training) -> None:
        self.size, self.label, self.reseeded, self.round = size, label, 0, 0

    def start(self, x: TrainingVectors) -> Tensor:
        moment = second_moment(x, f"{self.label}:moment")
        self.vector, factors = shrinkage(moment, _bits(self.size))
        value = (self.vector * (moment @ self.vector)).sum(0).clamp_min(1e-30)
        self.shrink = (factors / value).clamp(0, 1).sqrt()
        return self._seeds(x, self.size)

    def improve(self, x: TrainingVectors, book: Tensor) -> Tensor:
        count, total = x.sums(book)
        means = total / count.clamp_min(1)[:, None]
        dead = (count == 0).nonzero().flatten()
        if len(dead):
            means[dead] = self._seeds(x, len(dead))
            self.reseeded += len(dead)
        return means

    def _seeds(self, x: TrainingVectors, count: int) -> Tensor:
        rows = spread(len(x), count, f"{self.label}:seeds:{self.round}")
        self.round += 1
        picked = x.rows(rows).double() @ self.vector
        return ((picked * self.shrink) @ self.vector.T).float()


class ClosedForm:
    """SimVQ by alternation: assign, solve for W, move dead rows of the frozen codebook to where W maps them on
    vectors.
    """

    def __init__(self, size: int, label: str, training: Training) -> None:
        self.size, self.label, self.reseeded = size, label, 0
        self.seeds = KMeans(size, label, training)

    def start(self, x: TrainingVectors) -> Tensor:
        self.seeds.start(x)
        self.frozen = frozen_codebook(self.size, x.dim, self.label).to(x.device)
        self.w = first_map(second_moment(x, f"{self.label}:moment"), self.size)
        return (self.frozen.double() @ self.w.T).float()

    def improve(self, x: TrainingVectors, book: Tensor) -> Tensor:
        count, total = x.sums(book)
        q = self.frozen.double()
        gram = (q * count[:, None]).T @ q
        gram.diagonal().add_(1e-9 * gram.diagonal().mean() + 1e-30)
        self.w = torch.linalg.solve(gram, q.T @ total.double()).T
        dead = (count == 0).nonzero().flatten()
        if len(dead):
            seeds = self.seeds._seeds(x, len(dead)).double()
            self.frozen[dead] = (seeds @ torch.linalg.pinv(self.w).T).float()
            self.reseeded += len(dead)
        return (self.frozen.double() @ self.w.T).float()


class Adam:
    """VQKV's loss (Eq. 4) with Adam.

    Without an encoder the term of gamma has no gradient and the first two have the same: together (1 + beta) |x - W
    q|^2. Vectors are scaled to a mean square of 1, as the frozen rows are. W starts as the closed form does. From the
    identity, codewords would be as long as the vectors. The nearest one would leave more than the vector itself: 1.2
    times its energy at 256 codewords in 64 dimensions. The first 600 steps of rate 1e-3 would only shorten it to 0.4.
    """

    def __init__(self, size: int, label: str, training: Training) -> None:
        self.size, self.label, self.training, self.reseeded, self.step = size, label, training, 0, 0

    def start(self, x: TrainingVectors) -> Tensor:
        moment = second_moment(x, f"{self.label}:moment")
        self.scale = float(moment.diagonal().sum().sqrt().clamp_min(1e-30))
        self.frozen = frozen_codebook(self.size, x.dim, self.label).to(x.device)
        self.w = torch.nn.Parameter((first_map(moment, self.size) / self.scale).float())
        self.optimiser = torch.optim.Adam([self.w], lr=self.training.rate)
        return self._book(self.scale)

    def improve(self, x: TrainingVectors, book: Tensor) -> Tensor:
        batch = min(self.training.batch, -(-len(x) // 8))
        for _ in range(max(ADAM_STEPS, -(-len(x) // batch))):
            rows, self.step = spread(len(x), batch, f"{self.label}:batch:{self.step}"), self.step + 1
            missed = ((self._missed(x, part),) for part in x.picked(rows))
            [gradient] = x.added(missed, (self.w.detach(),))
            self.w.grad = gradient * (2 * (1 + self.training.beta) / batch)
            with torch.device("cpu"):  # where Adam counts its steps
                self.optimiser.step()
        return self._book(self.scale)

    def _missed(self, x: TrainingVectors, part: Tensor) -> Tensor:
        """What the loss of some vectors says of W, up to a factor: float32 (d, d)."""
        if not len(part):
            return torch.zeros_like(self.w.detach())
        part = part.float() / self.scale
        count, total = sums(part, x.nearest(part, self._book(1.0).half()), self.size)
        return self.w.detach() @ ((self.frozen * count[:, None]).T @ self.frozen) - total.T @ self.frozen

    def _book(self, scale: float) -> Tensor:
        return self.frozen @ self.w.detach().T * scale


TRAINERS: dict[str, Callable[[int, str, Training], Trainer]] = {
    "k-means": KMeans,
    "closed-form": ClosedForm,
    "adam": Adam,
}


def frozen_codebook(size: int, d: int, label: str) -> Tensor:
    """SimVQ's Gaussian codebook: float32 (size, d), standard deviation d^-1/2."""
    return hashed_normal(size, d, f"{label}:frozen") / math.sqrt(d)


def train_stage(
    x: TrainingVectors, holdout: Tensor, energy: float, stage: int, size: int, label: str, training: Training
) -> tuple[Tensor, StageReport]:
    """One codebook (k, d) float16 for residuals x (n, d), stopped by the error on holdout (m, d) float32, which every
    rank has; neither changes.

    energy: of the held-out vectors before any stage. The best of all iterations' codebooks is taken.
    """
    trainer, ranks = TRAINERS[training.trainer](size, label, training), x.ranks

    def judged(codewords: Tensor) -> tuple[Tensor, float]:
        """Codewords as they are stored, rank 0's, and their held-out error."""
        book = ranks.agree(_half(codewords, label))
        return book, ranks.agree(holdout_error(holdout, book, energy, ranks))

    book, first = judged(trainer.start(x))
    best, least, errors = book, float("inf"), [first]
    for iteration in range(1, training.most + 1):
        book, error = judged(trainer.improve(x, book))
        before = errors[-1]
        errors.append(error)
        if error < least:
            best, least = book, error
        if iteration >= training.least and before - error < training.tolerance * before:
            break
    return distinct_codewords(best, label), StageReport(stage, iteration, least, errors, 0, trainer.reseeded)


def distinct_codewords(book: Tensor, label: str) -> Tensor:
    """A stage's codewords (k, d) float16, as they are unless vectors of few kinds, as of a layer of zeros, left fewer
    different ones than a bundle may hold.

    Then those that repeat an earlier one, to which no vector went, become others, in each channel about as large. This
    takes no codeword away, so that no vector has a larger error. Where all are below float16's normal numbers, they are
    0 first. Raises UsageError where float16 has too few numbers, as for 65,536 codewords of one
    dimension.
    """
    if not no_codewords(book):
        return book
    if float(book.abs().max()) < LEAST:
        book = torch.zeros_like(book)
    size, (kinds, group) = len(book), book.unique(dim=0, return_inverse=True)
    number = torch.arange(size, device=book.device)
    first = torch.full((len(kinds),), size, device=book.device).scatter_reduce_(0, group, number, "amin")[group]
    width = book.float().abs().amax(0).clamp_min(FILL) / WIDEST_NORMAL
    others = hashed_normal(size, book.shape[1], f"{label}:others").to(book.device) * width
    book = torch.where((first == number)[:, None], book, others.half())
    if why := no_codewords(book):
        raise UsageError(f"codebook {label}: {why}; give smaller codebooks or wider bands")
    return book


def _half(book: Tensor, label: str) -> Tensor:
    return to_half(book, f"codeword of {label}")


def holdout_error(holdout: Tensor, book: Tensor, energy: float, ranks: Ranks = ALONE) -> float:
    """Squared error of vectors (m, d), which every rank has, over `energy`, when each is its nearest codeword."""
    rest = holdout - book[shared_nearest(holdout, book, ranks)].float()
    return float(rest.double().square().sum()) / max(energy, 1e-300)
