"""`kvcal check-codec`: a codec by name, held to the contract."""

from __future__ import annotations

from typing import TypedDict, cast

from kvcal_artifacts.codecs import CODECS, Shape, load_plugins
from kvcal_artifacts.errors import KVCalError, UsageError

from ..evaluate.codec_contract import Outcome, check_codec
from ..evaluate.codec_contract.subject import Make
from ..methods.registry import codec_maker

OURS = "kvcal_artifacts."  # the package whose codecs may be around others


def maker_of(name: str) -> Make:
    """What makes the codec of that name, as bundles name it or as `--keys` does.

    Raises UsageError for an unknown name, and for codecs of kvcal that shape and role alone do not make.
    """
    load_plugins()
    if name not in CODECS:
        return codec_maker(name)
    kind = CODECS[name]
    if kind.__module__.startswith(OURS):
        try:
            kind(Shape(2, 64, 32), "key")
        except KVCalError:
            pass
        except (TypeError, AttributeError) as error:
            raise UsageError(
                f"codec {name!r} is made of another codec or of data: give a whole one by the name that --keys takes, "
                "as squat-2 (`kvcal names codec`)"
            ) from error
    return cast("Make", kind)


class CheckedCodec(TypedDict):
    """What `kvcal check-codec` returns. passed: whether every check was."""

    codec: str
    passed: bool
    checks: list[Outcome]


def run_check_codec(name: str) -> CheckedCodec:
    """The outcome of every check, and whether the codec passed all. Raises UsageError as `maker_of` does."""
    outcomes = check_codec(maker_of(name))
    return {
        "codec": name,
        "passed": all(outcome.passed for outcome in outcomes),
        "checks": outcomes,
    }
