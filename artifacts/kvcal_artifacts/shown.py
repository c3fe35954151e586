"""Text from a file, a name or another program, fit to be printed: no character of it commands a terminal."""

from __future__ import annotations

import re

# C0 and C1 codes, halves of surrogate pairs, line separators, and what is invisible, which includes all that reverses
# the direction of writing. Joiners (U+200C, U+200D) stay: Persian, Indic scripts and emoji need them.
COMMANDS = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)
LAYOUT = re.compile(r" +[\r\n]+ *|[\r\n]+ +")
SECRETS = (  # what stands in addresses and must not stand in logs
    (re.compile(r"(?<=://)[^/\s'\"<>]+@"), "***@"),
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}\b"), "hf_***"),
)


def shown(text: object, keep: str = "") -> str:
    """The text with control characters as Python writes them: \\n, \\x1b, \\u202e. The rest does not change.

    keep: characters that stay, as "\\n" where lines are meant.
    """
    return COMMANDS.sub(lambda match: match[0] if match[0] in keep else _escaped(match[0]), str(text))


def _escaped(one: str) -> str:
    return one.encode("unicode_escape").decode("ascii")


def message(text: object) -> str:
    """The text `shown` without user names, passwords and tokens: https://user:pass@host loses the first two.

    Line ends next to spaces are layout, and become one space.
    """
    line = shown(LAYOUT.sub(" ", str(text)))
    for secret, instead in SECRETS:
        line = secret.sub(instead, line)
    return line
