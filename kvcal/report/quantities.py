"""What each quantity is called in tables, and how its value is written: one name and one form for all commands.

The keys are those of `--json`, which has every digit. Imports neither torch nor rich.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HASH_SHOWN = 16  # hexadecimal digits of a hash where not all are shown


def significant(value: float, digits: int = 3) -> str:
    """Write a number with so many significant digits: 0.00777, 5.00, 131, 1,372; below 0.0001 as 7.4e-05."""
    if not math.isfinite(value):
        return f"{value:g}"
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    if abs(rounded) < 1e-4:
        return f"{rounded:.{digits}g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:.{decimals}f}" if decimals else f"{value:,.0f}"


def size(count: float) -> str:
    """Write a number of bytes with its unit: 6.50 MB, 23.6 MB, 812 B. A MB is 1,000,000 bytes."""
    for unit, power in (("B", 0), ("kB", 1), ("MB", 2), ("GB", 3), ("TB", 4)):
        scaled = float(f"{count / 1000**power:.3g}")
        if abs(scaled) < 1000 or unit == "TB":
            return f"{scaled:g} B" if unit == "B" else f"{significant(scaled)} {unit}"
    raise AssertionError


def whole_bytes(count: float) -> str:
    return f"{count:,} B"


def duration(seconds: float) -> str:
    """Write a time: 0.4 s, 12 s, 3 min 5 s, 2 h 7 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_of_hour = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes_of_hour} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def percent(share: float) -> str:
    """Write a share as a percentage of three digits: 96.0 %, 100 %."""
    return f"{significant(100 * share)} %" if share != 1 else "100 %"


def whole_percent(share: float) -> str:
    return f"{share:.2%}".replace("%", " %")


def number(value: float) -> str:
    """Write a whole number with separators, any other with three significant digits."""
    return f"{value:,}" if isinstance(value, int) else significant(value)


def whole_number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def questions(count: int) -> str:
    """Write how many questions a task has: 1 question, 1,319 questions."""
    return "1 question" if count == 1 else f"{count:,} questions"


def ranges(numbers: Iterable[int]) -> str:
    """Write whole numbers that rise, runs of them folded: 0, 2–5, 9."""
    runs: list[list[int]] = []
    for one in numbers:
        if runs and one == runs[-1][1] + 1:
            runs[-1][1] = one
        else:
            runs.append([one, one])
    return ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in runs)


def folded(rows: Iterable[Sequence[Any]]) -> Iterator[list[Any]]:
    """Rows whose first cell is a layer's number; neighbours that are equal otherwise become one, as 1–29."""
    for rest, group in itertools.groupby(rows, key=lambda row: list(row[1:])):
        yield [ranges(row[0] for row in group), *rest]


@dataclass(frozen=True)
class Quantity:
    """A quantity as tables show it. name: heading of its column, or of its line. short: what is shown of a value;
    whole: the same with --wide.
    """

    name: str
    short: Callable[[Any], str] = number
    whole: Callable[[Any], str] = whole_number


def _size(name: str) -> Quantity:
    return Quantity(name, size, whole_bytes)


def _share(name: str) -> Quantity:
    return Quantity(name, percent, whole_percent)


def _plain(name: str) -> Quantity:
    return Quantity(name, str, str)


def _text(value: object) -> str:
    return str(value)


def _hash(value: object) -> str:
    text = str(value)
    kind, colon, digits = text.rpartition(":")
    return f"{kind}{colon}{digits[:HASH_SHOWN]}…" if len(digits) > HASH_SHOWN + 1 else text


QUANTITIES: Mapping[str, Quantity] = {
    "bits_per_value": Quantity("bits/value"),
    "stored_bits": Quantity("bits/value"),
    "bits": Quantity("bits/value"),
    "paper_bits": Quantity("paper's bits/value"),
    "kl": Quantity("KL"),
    "kl_se": Quantity("±", lambda value: significant(value, 1)),
    "kl_median": Quantity("KL median"),
    "kl_p99": Quantity("KL 99 %"),
    "kl_max": Quantity("KL max"),
    "forecast_kl": Quantity("forecast KL"),
    "holdout_kl": Quantity("held-out KL"),
    "holdout_kl_se": Quantity("±", lambda value: significant(value, 1)),
    "tuned_kl": Quantity("KL of the tuned"),
    "by_layer_kl": Quantity("KL of the tuned by layer"),
    "predicted_kl": Quantity("predicted KL"),
    "best_uniform_kl": Quantity("KL of the best uniform"),
    "best_uniform_kl_se": Quantity("± of the best uniform", lambda value: significant(value, 1)),
    "best_uniform_bits": Quantity("bits/value of the best uniform"),
    "perplexity": Quantity("perplexity", lambda value: significant(value, 4)),  # schemes differ in the fourth digit
    "same_top": _share("same top"),
    "smaller": Quantity("× smaller"),
    "times_smaller": Quantity("× smaller"),
    "ratio_to_fp16": Quantity("× FP16"),
    "fraction_of_copy": Quantity("of copy"),
    "microseconds": Quantity("µs"),
    "tokens_per_second": Quantity("tokens/s"),
    "bytes": _size("size"),
    "nbytes": _size("size"),
    "bytes_at_length": _size("size"),
    "resident_bytes": _size("resident"),
    "predictor_bytes": _size("predictors"),
    "codebook_bytes": _size("codebooks"),
    "factor_bytes": _size("key factors"),
    "subspace_bytes": _size("subspaces"),
    "seconds": Quantity("time", duration, lambda value: f"{value} s"),
    "key_relative_error": Quantity("key error"),
    "value_relative_error": Quantity("value error"),
    "logit_error": Quantity("logit error"),
    "logit_error_plain": Quantity("logit error, no factors"),
    "logit_error_kivi": Quantity("logit error of KIVI"),
    "output_error": Quantity("output error"),
    "sha256": Quantity("sha256", _hash, _text),
    "revision": Quantity("revision", _hash, _text),
    "fits": Quantity("fits", _hash, _text),
    "commit": Quantity("commit", _hash, _text),
    "weights": Quantity("weights", _hash, _text),
    "text_sha256": Quantity("text sha256", _hash, _text),
    "ids_sha256": Quantity("ids sha256", _hash, _text),
    "seed": _plain("seed"),
}

# Facts that are there with --wide alone: how a run went, and what else its windows were.
DETAILS = frozenset({
    "resumed_layers", "resumed_stages", "resumed_rows", "phases", "peak_device_bytes", "ids_sha256", "text_sha256",
    "first_token", "random_weights", "train_vectors", "holdout_vectors", "version",
})  # fmt: skip


def quantity(key: str) -> Quantity:
    """The quantity of a key of --json; one that has no name of its own is called as its key is, in words."""
    if key in QUANTITIES:
        return QUANTITIES[key]
    name = key.replace("_", " ")
    return _size(name.removesuffix(" bytes")) if key.endswith("_bytes") else Quantity(name)


def is_hash(key: str) -> bool:
    return quantity(key).short is _hash


def written(key: str, value: Any, *, whole: bool = False) -> str | None:
    """The value of a key as a cell; None where there is none to show. whole: with all its digits."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "yes" if value else "no"
    form = quantity(key).whole if whole else quantity(key).short
    if isinstance(value, Mapping):
        parts = {quantity(str(name)).name: written(str(name), one, whole=whole) for name, one in value.items()}
        return ", ".join(f"{name} {part}" for name, part in parts.items() if part is not None) or None
    if isinstance(value, (list, tuple)):
        return ", ".join(filter(None, (written(key, one, whole=whole) for one in value))) or None
    if isinstance(value, str) and form not in (_hash, _text):
        return value or None
    if not isinstance(value, (int, float, str)):
        return str(value) or None
    return form(value)
