"""Every error kvcal raises on purpose, and the exit code the command line turns it into.

A message is one line: the thing, its value, what is allowed, what to do. The command line catches
`KVCalError`, prints the line and exits with `exit_code`; anything else is a bug and keeps its traceback.
0 is success, 1 any other error.
"""

from __future__ import annotations

from .shown import message


class KVCalError(Exception):
    """The root of all errors. Its text is one line: control characters are escaped, credentials left out."""

    exit_code: int = 1

    def __str__(self) -> str:
        return message(super().__str__())


class UsageError(KVCalError):
    """An option or a combination of options that makes no sense."""

    exit_code = 2


class UnsupportedModel(UsageError):
    """A model of an architecture, or with layers, that cannot be compressed."""


class GateFailed(KVCalError):
    """A quality gate was not met."""

    exit_code = 3


class IncompatibleBundle(KVCalError):
    """A bundle of an unknown format, or for another model."""

    exit_code = 4


class CorruptBundle(KVCalError):
    """A bundle that is damaged: a wrong hash, missing, surplus, misshapen or non-finite tensors.

    Same exit code as IncompatibleBundle: to a script both mean that this file cannot be used.
    """

    exit_code = 4


class ModelUnavailable(KVCalError):
    """A model that cannot be had: unknown, gated, offline, no such revision, files missing."""

    exit_code = 5


class OutOfMemory(KVCalError):
    """Device or host memory did not suffice."""

    exit_code = 6


class KernelsUnavailable(KVCalError):
    """Kernels were required, and a layer cannot take one: no such GPU, a shape that none reads, or a failed check."""

    exit_code = 8


class TextError(KVCalError):
    """Text that cannot be used: missing, empty, undecodable, or too little of it."""


class TextUnavailable(TextError):
    """A data set on the hub that cannot be had; the exit code of a model that cannot be had."""

    exit_code = 5


class NonFiniteError(KVCalError):
    """NaN or infinity where numbers are needed; the message names layer and head.

    layer: that a cache could not pack.
    """

    layer: int | None = None
