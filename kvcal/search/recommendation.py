"""Which scheme to recommend: a ladder of schemes, which of them are worth measuring, and which one is chosen.

Each scheme of the ladder lies on the front of KL over bits on some model of guard.md or of the tables of methods.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from kvcal_artifacts.errors import GateFailed, UsageError

from ..methods.aqua_kv import AquaKV
from ..methods.data_free import PRESETS, DataFree, Preset
from .limit import Limit

MEASURED = 5  # schemes whose KL is measured at a time, those of the best forecasts
EVEN = 1.05  # KL over the smallest one that counts as even with it: less than what other text of the same kind changes
FORECAST_ERROR = 3.0  # measured over forecast KL that is common: 1.39 in the median over 73 rows of guard.md


@dataclass(frozen=True)
class Rung:
    """One scheme of the ladder. naive: integers per token, the first thing that everyone tries. least: of a scheme that
    is fitted to text, the bits per value of its codes alone.
    """

    name: str
    method: DataFree | AquaKV
    naive: bool = False
    least: int = 0

    @property
    def learned(self) -> bool:
        """Whether it is fitted to text."""
        return isinstance(self.method, AquaKV)

    def command(self, model: str, text: str) -> str:
        """The `kvcal` command that makes the same bundle; text: options that say on what it is fitted."""
        if isinstance(self.method, AquaKV):
            return f"kvcal fit-predictors -m {model}{text}{_changed(self.method, AquaKV())}"
        if self.name in PRESETS:
            return f"kvcal preset {self.name} -m {model}"
        assert isinstance(self.method, Preset)
        codecs = f" --keys {self.method.key} --values {self.method.value}"
        return f"kvcal preset{codecs}{_changed(self.method, Preset(self.method.key, self.method.value))} -m {model}"


OPTIONS = {"rope": "frame"}  # fields whose option has another name


def _changed(method: AquaKV | Preset, usual: AquaKV | Preset) -> str:
    """Options for the fields in which a method differs from the usual one."""
    words = []
    for one in fields(method):
        value = getattr(method, one.name)
        if value != getattr(usual, one.name):
            text = (",".join(value) or "none") if isinstance(value, tuple) else str(value)
            words.append(f" --{OPTIONS.get(one.name, one.name).replace('_', '-')} {shlex.quote(text)}")
    return "".join(words)


def _pair(keys: str, values: str) -> Rung:
    return Rung(f"{keys}+{values}", Preset(keys, values))


def _predicted(bits: int) -> Rung:
    return Rung(f"aqua-transform-{bits}", AquaKV(backbone=f"transform-{bits}", first_layer=""), least=bits)


def _unpredicted(bits: int) -> Rung:
    method = AquaKV(backbone=f"transform-{bits}", first_layer="", key_inputs=(), value_inputs=())
    return Rung(f"transform-{bits}", method, least=bits)


_DATA_FREE = (
    "uniform-8", "kivi-4", "higgs-4", "turboquant-4-3", "mixkvq", "innerq-base", "higgs-3", "innerq-small",
    "kivi-sink-2", "higgs-2",
)  # fmt: skip
LADDER = (
    *(Rung(name, PRESETS[name]) for name in _DATA_FREE),
    *(_pair(f"uniform-{bits}-channel", f"higgs-{bits}") for bits in (4, 3, 2)),
    *(Rung(f"uniform-{bits}", PRESETS[f"uniform-{bits}"], naive=True) for bits in (4, 3, 2)),
    *(_unpredicted(bits) for bits in (4, 3, 2)),
    *(_predicted(bits) for bits in (3, 2)),
    Rung("aqua-kv", AquaKV(), least=2),
)


@dataclass(frozen=True)
class Figures:
    """The figures of one scheme of the ladder. bits: stored per value. forecast: KL by `calibrate.forecast`. kl, se: KL
    measured through the cache and its standard error, None where it was not. All KL is in nats per token. kernel:
    whether decode attention reads its packed keys and values by a kernel.
    """

    name: str
    bits: float
    forecast: float
    kl: float | None = None
    se: float | None = None
    learned: bool = False
    naive: bool = False
    kernel: bool = False

    @property
    def most(self) -> float:
        """The measured KL and its standard error."""
        assert self.kl is not None
        return self.kl + (self.se or 0.0)


def to_fit(rungs: Iterable[Rung], rows: Iterable[Figures], limit: Limit) -> list[Rung]:
    """The learned schemes that may be chosen; rows: of those that need no text, forecast.

    Under a limit of bits, of each family the one of the most bits. Under one of KL, those that may take fewer bits than
    the smallest of `rows` that is forecast to be within it.
    """
    learned = [rung for rung in rungs if rung.learned]
    if limit.bits is not None:
        small = sorted((rung for rung in learned if rung.least <= limit.bits), key=lambda rung: rung.least)
        return list({_family(rung): rung for rung in small}.values())
    good = [row.bits for row in rows if row.forecast <= (limit.kl or 0)]
    return [rung for rung in learned if rung.least < min(good, default=math.inf)]


def _family(rung: Rung) -> str:
    return rung.name.removesuffix(f"-{rung.least}")


def to_measure(rows: Sequence[Figures], limit: Limit) -> list[Figures]:
    """The schemes whose KL is to be measured next, at most MEASURED; empty where the choice needs no more.

    Raises UsageError where no scheme has so few bits.
    """
    return _best_forecasts(rows, limit.bits) if limit.bits is not None else _smaller(rows, limit)


def _best_forecasts(rows: Sequence[Figures], bits: float) -> list[Figures]:
    """The schemes of the smallest forecasts under a limit of bits; none once some are measured."""
    small = [row for row in rows if row.bits <= bits]
    if not small:
        least = min(rows, key=lambda row: row.bits)
        raise UsageError(
            f"{Limit(bits)}: the smallest scheme of the ladder, {least.name}, takes {least.bits:.2f} bits per value; "
            f"give --max-bits {math.ceil(least.bits * 100) / 100:g} or more"
        )
    if any(row.kl is not None for row in rows):
        return []
    return sorted(small, key=lambda row: (row.forecast, row.bits))[:MEASURED]


def _smaller(rows: Sequence[Figures], limit: Limit) -> list[Figures]:
    """Schemes of fewer bits than the best one measured to be within a limit of KL, the smallest first.

    Those of a forecast far above the limit are left to the end, when nothing else is within it: it is a forecast.
    """
    assert limit.kl is not None
    least = min((row.bits for row in rows if row.kl is not None and row.most <= limit.kl), default=math.inf)
    smaller = [row for row in rows if row.kl is None and row.bits < least]
    likely = [row for row in smaller if row.forecast <= FORECAST_ERROR * limit.kl]
    if not likely and least == math.inf:
        likely = smaller
    return sorted(likely, key=lambda row: (row.bits, row.forecast))[:MEASURED]


def choose(rows: Iterable[Figures], limit: Limit) -> tuple[Figures, Figures | None]:
    """The chosen scheme and the runner-up, of those that were measured. Under a limit of bits the KL decides, and where
    KLs are even a kernel before none, then fewer bits. Raises GateFailed where none is within the limit.
    """
    measured = [row for row in rows if row.kl is not None]
    if limit.bits is not None:
        within = [row for row in measured if row.bits <= limit.bits]
        even = [row for row in within if _even(row, min(within, key=_kl_of))]
        ordered = sorted(even, key=lambda row: (not row.kernel, row.bits, row.kl))
        ordered += sorted((row for row in within if row not in even), key=lambda row: (row.kl, row.bits))
    else:
        within = [row for row in measured if row.most <= (limit.kl or 0)]
        ordered = sorted(within, key=lambda row: (row.bits, row.kl))
        if not within:
            best = min(measured, key=lambda row: row.most)
            raise GateFailed(
                f"{limit}: no scheme of the ladder is within it; the best, {best.name}, has a KL of {_kl(best)} at "
                f"{best.bits:.2f} bits per value; give a larger --max-kl, or keep the cache in 16 bits"
            )
    return ordered[0], ordered[1] if len(ordered) > 1 else None


def reference(rows: Sequence[Figures], chosen: Figures) -> Figures | None:
    """The naive scheme to compare with: that of the fewest bits of those that take no fewer than the chosen one."""
    larger = [row for row in rows if row.naive and row.bits >= chosen.bits]
    return min(larger, key=lambda row: row.bits, default=None)


def reason(chosen: Figures, second: Figures | None, limit: Limit, measured: int) -> str:
    """Why it was chosen, in a sentence, and what the runner-up costs."""
    if limit.bits is not None:
        why = f"smallest KL of the {measured} schemes measured that take at most {limit.bits:g} bits per value"
    else:
        why = f"fewest bits of the {measured} schemes measured with a KL, plus standard error, of at most {limit.kl:g}"
    tail = "none" if second is None else f"{second.name}, KL {_kl(second)} at {second.bits:.2f} bits"
    if limit.bits is not None and second is not None and (_even(second, chosen) or _even(chosen, second)):
        tail += ", which is even" + (" but has no kernel" if chosen.kernel and not second.kernel else "")
    return f"{chosen.name}: {why}; KL {_kl(chosen)} at {chosen.bits:.2f} bits; runner-up: {tail}"


def _kl_of(row: Figures) -> float:
    return math.inf if row.kl is None else row.kl


def _even(row: Figures, best: Figures) -> bool:
    return best.kl is not None and best.kl <= _kl_of(row) <= EVEN * best.kl


def _kl(row: Figures) -> str:
    return f"{row.kl:.3g}" + ("" if row.se is None else f" ± {row.se:.1g}")
