"""Time of a kernel from what it must read and what it must compute: launch + max(bytes / bandwidth, instructions /
rate).

Instructions are thread-instructions a key or value element, whole loop (loads, unpacking, softmax, matrix products),
all query heads of the kv head together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcal_kernels.layout import Form

from .devices import Device

LONG, BEFORE = " G=128", " before RoPE"

# Of the fused decode kernel as it is compiled and launched (triton 3.7.1, head_dim 128, four query heads a kv head), by
# how keys are stored, values alike (of tiers: "outer 2"). They are the ceilings BUDGET of
# tests/kernels/attention/test_attention_kernel.py, counted in SASS there, of sm_87 where it has a row, else sm_90; a
# test next to it holds the two together. Other GPUs, head_dims and dtypes are taken to need as many; `counted_at` says
# of a model where it has another head_dim or other query heads.
COUNTED: dict[str, float] = {
    "symmetric 2": 1.32, "symmetric 3": 1.59, "symmetric 4": 1.33, "symmetric 8": 1.15, "asymmetric 2": 1.59,
    "asymmetric 3": 1.87, "asymmetric 4": 1.61, "asymmetric 8": 1.43, "outer 2": 2.01, "outer 2 G=128": 1.86,
    "outer 3": 2.42, "outer 4": 2.10, "outer 8": 2.06, "tiers": 2.66, "tiers G=128": 2.30, "grid 2 of 1": 1.61,
    "grid 3 of 1": 2.48, "grid 4 of 1": 2.32, "grid 2 of 2": 1.67, "grid 3 of 2": 2.48, "grid 4 of 2": 2.35,
    "bytes 2 of 1": 1.44, "bytes 3 of 1": 1.54, "bytes 4 of 1": 1.88, "bytes 2 of 2": 1.67,
    "symmetric 2 before RoPE": 3.25, "symmetric 3 before RoPE": 3.62, "symmetric 4 before RoPE": 3.35,
    "outer 2 before RoPE": 3.38, "outer 2 G=128 before RoPE": 3.14, "outer 3 before RoPE": 3.58,
    "outer 4 before RoPE": 3.53,
}  # fmt: skip

# Compiled for sm_87, a head_dim of 64 needs a fifth to a quarter more; fewer heads need as many as the four or eight
# that they are taken for, sixteen need more (docs/benchmarks/reasons.md).
COUNTED_DIM = 128

# Where a kv head has five query heads or more: what BUDGET has "of 8 rows", instead of the above, which other kinds
# keep (docs/benchmarks/reasons.md).
ALIKE_OF_8 = ("outer 2", "tiers")  # COUNTED is of eight, too
COUNTED_OF_8 = {
    "symmetric 2": 1.83,
    "symmetric 3": 2.21,
    "symmetric 4": 1.89,
    "asymmetric 2": 2.37,
    "outer 2 G=128": 1.72,
}


@dataclass(frozen=True)
class Machine:
    """A device as its kernels find it. efficiency: part of the data-sheet bandwidth that reading reaches; launch:
    µs.
    """

    device: Device
    efficiency: float
    launch: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.efficiency * self.device.bandwidth * 1e9

    def reading(self, size: float) -> float:
        """µs to read so many bytes, nothing else."""
        return size / self.bandwidth * 1e6

    def time(self, size: float, elements: float = 0, instructions: float = 0, launches: int = 1) -> float:
        """µs of kernels that read `size` bytes and spend so many instructions on each element."""
        issuing = elements * instructions / self.device.issue_rate * 1e6
        return launches * self.launch + max(self.reading(size), issuing)

    def implied(self, size: float, microseconds: float, launches: int = 1) -> float:
        """1e9 bytes per second that a measured time means, the launches taken off."""
        return size / (microseconds - launches * self.launch) / 1e3


def fit(device: Device, sizes: Sequence[float], microseconds: Sequence[float], launches: int) -> Machine:
    """Efficiency and launch time from two measurements of the same kernels: the line through both."""
    (small, large), (short, long) = sizes, microseconds
    slope = (long - short) / (large - small)  # µs a byte
    return Machine(device, 1e-3 / slope / device.bandwidth, (short - slope * small) / launches)


def kind(form: Form) -> str:
    """What instructions depend on.

    Of inner integers it is symmetry and bits. Of outer ones it is bits, and whether 128 numbers or more share a scale.
    Of grids it is bits and numbers per code, and whether their points are bytes.
    """
    if form.vector:
        return f"{'bytes' if form.in_bytes else 'grid'} {form.bits} of {form.vector}"
    if form.inner:
        return f"{'symmetric' if form.symmetric else 'asymmetric'} {form.bits}"
    return f"{'tiers' if form.tiered else f'outer {form.bits}'}{LONG if form.group >= 128 and form.bits == 2 else ''}"


def counted(keys: Form, values: Form, pre_rope: bool = False, ratio: int = 4) -> float | str:
    """Instructions an element of the fused decode kernel, or why they are not known. pre_rope: keys before RoPE. ratio:
    query heads a kv head.

    Values stored otherwise than keys take half the difference of their own schemes more.
    """
    terms = COUNTED | COUNTED_OF_8 if ratio > 4 else COUNTED
    first, plain, other = _kinds(keys, values, pre_rope)
    if missing := next((name for name in (first, plain, other) if name not in terms), None):
        return f"instructions of the compiled kernel are not counted for {missing}"
    return terms[first] + (terms[other] - terms[plain]) / 2


def counted_at(keys: Form, values: Form, pre_rope: bool = False, ratio: int = 4) -> str | None:
    """The shape of the instructions that `counted` gives, where this one may need more; None where it does not."""
    first, plain, other = _kinds(keys, values, pre_rope)
    used = (first,) if plain == other else (first, plain, other)
    heads = {8 if ratio > 4 and name in (*COUNTED_OF_8, *ALIKE_OF_8) else 4 for name in used}
    return of_another(keys.dim, None if ratio <= min(heads) else " or ".join(map(str, sorted(heads))))


def timed_at(dim: int, ratio: int) -> str | None:
    """A remark where a model has another head_dim, or more query heads a kv head, than what was timed on an H200."""
    remark = of_another(dim, "4" if ratio > 4 else None)
    return None if remark is None else remark.replace("counted", "timed")


def of_another(dim: int, heads: str | None = None) -> str | None:
    """A remark where instructions were counted at another shape than the model's; None where they were not. heads:
    query heads a kv head of which instructions were counted, where this model has more.
    """
    parts = [] if dim == COUNTED_DIM else [f"head_dim {COUNTED_DIM}"]
    if heads is not None:
        parts.append(f"{heads} query heads a kv head")
    return f"instructions counted at {' and '.join(parts)}" if parts else None


def _kinds(keys: Form, values: Form, pre_rope: bool) -> tuple[str, str, str]:
    """Kinds of decoding: of keys as they are read, of values stored as keys are, of values."""
    first = kind(keys)
    return first + (BEFORE if pre_rope else ""), first.replace("tiers", "outer 2"), kind(values)
