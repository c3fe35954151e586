"""What cannot be encoded (NaN, infinity, more than float16 holds) is refused, at once or when a forward is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..checked import HALF_MAX
from ..errors import NonFiniteError
from .base import Role

HALF_FLOOR = 2.0**-24  # the smallest positive float16: scales never round to zero

_THREAD = threading.local()


class Refusals:
    """What encoding refused inside `collecting`. `check` raises it, with one wait per device, not some per layer.

    Until then what was refused is encoded as something else, which must not be used.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[int, Tensor, Callable[[], NonFiniteError]]] = []

    def note(self, layer: int, fine: Tensor, error: Callable[[], NonFiniteError]) -> None:
        """Note a check whose result, `fine` (0-d bool on the device), is not yet known.

        error: what to raise if it fails.
        """
        self._noted.append((layer, fine, error))

    def check(self) -> None:
        """Raises NonFiniteError, which names its layer, for the first refusal since the last check."""
        noted, self._noted = self._noted, []
        places: dict[torch.device, list[Tensor]] = {}
        for _, fine, _ in noted:
            places.setdefault(fine.device, []).append(fine)
        passed = {place: iter(torch.stack(flags).to("cpu").tolist()) for place, flags in places.items()}
        for layer, fine, error in noted:
            if not next(passed[fine.device]):
                raise _of_layer(layer, str(error()))


def _of_layer(layer: int, why: str) -> NonFiniteError:
    error = NonFiniteError(why if why.startswith(f"layer {layer},") else f"layer {layer}: {why}")
    error.layer = layer
    return error


@contextmanager
def collecting(refusals: Refusals, layer: int) -> Iterator[None]:
    """A context in which, on this thread, check_finite and to_half leave what they refuse to `refusals`."""
    before, _THREAD.refusals = getattr(_THREAD, "refusals", None), (refusals, layer)
    try:
        yield
    finally:
        _THREAD.refusals = before


def check_finite(x: Tensor, layer: int, role: Role) -> Tensor:
    """Return x (B, H, T, D), or raise one error naming layer and head instead of storing a NaN or infinity."""
    finite = torch.isfinite(x)
    heads = finite.transpose(0, 1).flatten(1).all(1)

    def error() -> NonFiniteError:
        return NonFiniteError(
            f"layer {layer}, {role} head {int((~heads).nonzero()[0])}: a NaN or infinity reached the cache; "
            "only finite values can be compressed: check the model's dtype and weights"
        )

    return _unless(heads.all(), error, x, lambda: x.masked_fill(~finite, 0))


def _unless(fine: Tensor, error: Callable[[], NonFiniteError], x: Tensor, otherwise: Callable[[], Tensor]) -> Tensor:
    """Return x where `fine` holds; otherwise raise the error.

    Inside `collecting` nothing is raised here, and `otherwise()` is returned in any case.
    """
    collected: tuple[Refusals, int] | None = getattr(_THREAD, "refusals", None)
    if collected is not None:
        refusals, layer = collected
        refusals.note(layer, fine, error)
        return otherwise()
    if not bool(fine):
        raise error()
    return x


@contextmanager
def device_only() -> Iterator[list[Tensor]]:
    """A context in which encoding waits for no number from the device.

    What it would refuse stands in the list that it gives. Each tensor of scales or minima (B, H, ...) has a bool (B, H)
    there, True where float16 holds all of a row's head.
    """
    fits: list[Tensor] = []
    _THREAD.fits = fits
    try:
        yield fits
    finally:
        _THREAD.fits = None


def to_half(x: Tensor, what: str) -> Tensor:
    """Scales and norms float32 (B, ...) -> float16.

    What float16 cannot hold is refused instead of stored as infinity.
    """
    fits = getattr(_THREAD, "fits", None)
    if fits is not None:
        fits.append((x.abs() <= HALF_MAX).flatten(2).all(2))  # not where x is NaN
        return x.to(torch.float16)
    largest = x.abs().amax() if x.numel() else x.new_zeros(())

    def error() -> NonFiniteError:
        return NonFiniteError(
            f"{what} of {float(largest):.3g} does not fit float16 (largest 65504); use smaller groups"
        )

    return _unless(largest <= HALF_MAX, error, x, lambda: x.clamp(-HALF_MAX, HALF_MAX)).to(torch.float16)
