"""Memory, bandwidth and tokens as people write them: 24GB, 1008GB/s, 128k."""

from __future__ import annotations

import re

from kvcal_artifacts.errors import UsageError

DECIMAL = {"MB": 1e6, "GB": 1e9, "TB": 1e12}
BINARY = {"MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
UNITS = DECIMAL | BINARY
MOST_TOKENS = 1 << 40


def bytes_of(text: str, option: str) -> float:
    """Bytes of a size with its unit; UsageError names the option, what was read and which units there are."""
    return _sized(text, option, "", "24GB or 22.5GiB")


def rate_of(text: str, option: str) -> float:
    """Bytes per second of a rate with its unit, as 1008GB/s."""
    return _sized(text, option, "/s", "1008GB/s or 3.35TB/s")


def _sized(text: str, option: str, behind: str, example: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)(/s)?", text.strip())
    units = {name.lower(): size for name, size in UNITS.items()}
    wrong = match is None or match[2].lower() not in units or (match[3] or "") != behind
    if match is None or wrong or not float(match[1]):
        unit = " a second" if behind else ""
        names = ", ".join(name + behind for name in UNITS)
        raise UsageError(
            f"{option} {text!r}: not a positive number of bytes{unit} with a unit of {names}; as {example}"
        )
    return float(match[1]) * units[match[2].lower()]


def tokens_of(text: str, option: str) -> int:
    """Tokens as 4096 or 128k, k being 1024."""
    word = text.strip().lower()
    digits = word.removesuffix("k")
    count = int(digits) * (1024 if word.endswith("k") else 1) if digits.isdecimal() else 0
    if not 1 <= count <= MOST_TOKENS:
        raise UsageError(f"{option} {text!r}: not a whole number of tokens from 1; as 4096 or 128k, k is 1024")
    return count
