"""Text from a file, a name or another program, made fit to be printed: no character of it commands a terminal."""

from __future__ import annotations

import re
import unicodedata

JOINERS = "\u200c\u200d"  # zero width, and needed by Persian, Indic scripts and emoji
SECRETS = (  # what stands in addresses and must not stand in logs
    (re.compile(r"(?<=://)[^/\s@'\"<>]+@"), "***@"),
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}\b"), "hf_***"),
)


def shown(text: object, keep: str = "") -> str:
    """`str(text)` with control characters as Python writes them: \\n, \\x1b, \\u202e. The rest stays as it is.

    Escaped are C0 and C1 codes, line and paragraph separators, halves of surrogate pairs, and invisible characters such as
    those that reverse the direction of writing. keep: characters that stay, as "\\n" where lines are meant.
    """
    text = str(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one in keep or not _commands(one) else _escaped(one) for one in text)


def _commands(one: str) -> bool:
    return one not in JOINERS and unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _escaped(one: str) -> str:
    return one.encode("unicode_escape").decode("ascii")


def message(text: object) -> str:
    """`shown` in one line, without user names, passwords and tokens: an address as https://user:pass@host loses the first two."""
    line = shown(text)
    for secret, instead in SECRETS:
        line = secret.sub(instead, line)
    return line
