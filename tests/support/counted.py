"""Devices that are not there, on which tensors really compute (on the CPU), to count what a GPU would be waited for."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

FAR = "far"
aten: Any = torch.ops.aten
SCALARS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
SIZES = {aten.nonzero.default, aten.masked_select.default, aten.unique_dim.default, aten._unique2.default}
VIEWS = {
    "view", "slice", "select", "unsqueeze", "expand", "transpose", "t", "detach", "alias", "as_strided", "unbind",
    "split", "split_with_sizes", "permute", "_unsafe_view", "empty", "empty_like", "new_empty",
}  # fmt: skip
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}


class Far(Tensor):
    """A tensor on such a device: `held` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> Far:
        made: Far = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {}, Counts())


@dataclass
class Counts:
    """up: copies from the host to a device, each the shape; waits: times that the host waits for a number, which it
    does not where a copy into its own memory is non_blocking; launches: what a device would have to do besides, a
    kernel each.
    """

    up: list[tuple[int, ...]] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)

    def clear(self) -> None:
        self.up.clear()
        self.waits.clear()
        self.launches.clear()


class Counted(TorchDispatchMode):
    """Inside, tensors may be made on FAR devices; what goes to and from them is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {}, self.counts)


@cache
def name_of(func: Any) -> str:
    """Torch works it out anew each time."""
    return str(func)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among arguments and in their lists: torch's trees take four times as long as all else here."""
    found: list[Tensor] = []
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif type(x) in (list, tuple):
            found += tensors_in(x)
    return found


def mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """x, or a list or tuple of such, with `change` applied to what is neither."""
    kind = type(x)
    if kind is list or kind is tuple:
        return kind([mapped(change, one) for one in x])
    return change(x)


def compute(func: Any, args: Any, kwargs: dict[str, Any], counts: Counts) -> Any:
    every = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
    far, near = [x for x in every if isinstance(x, Far)], [x for x in every if not isinstance(x, Far) and x.ndim]
    places = {x.device for x in far}
    to = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if func in SCALARS | SIZES and far:
        counts.waits.append(str(func))
    if func is aten._to_copy.default or func is aten.copy_.default:
        return copied(func, args, kwargs, to, counts)
    if func in INDEXED:
        counts.up += [tuple(x.shape) for x in near if far]
    elif (near and far) or len(places) > 1:
        raise RuntimeError(f"{func}: tensors on {places} and {[x.device for x in near]}")
    where = to or next(iter(places), None)
    if where is None or where.type != FAR:
        return func(*args, **kwargs)
    if to is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    name = name_of(func)
    if name.split(".")[1] not in VIEWS:
        counts.launches.append(name)
    return wrapped(func, args, kwargs, where)


def copied(func: Any, args: Any, kwargs: dict[str, Any], to: torch.device | None, counts: Counts) -> Any:
    source = args[1] if func is aten.copy_.default else args[0]
    where = args[0].device if func is aten.copy_.default else to or source.device
    if where.type == FAR and not isinstance(source, Far):
        counts.up.append(tuple(source.shape))
    elif where.type != FAR and isinstance(source, Far) and not (func is aten.copy_.default and args[2:] == (True,)):
        counts.waits.append("to the host")
    if to is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    return wrapped(func, args, kwargs, where)


def wrapped(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], where: torch.device) -> Any:
    """The same on the tensors that are held; what comes back is on `where`, and itself where it was changed in place."""
    known: dict[int, Far] = {}

    def held(x: Any) -> Any:
        if not isinstance(x, Far):
            return x
        known[id(x.held)] = x
        return x.held

    out = func(*mapped(held, args), **{name: mapped(held, x) for name, x in kwargs.items()})

    def place(x: Any) -> Any:
        if not isinstance(x, Tensor) or where.type != FAR:
            return x
        return known[id(x)] if id(x) in known else Far(x, where)

    return mapped(place, out)


def start() -> None:
    """Make the devices known to torch: in a process of its own, as it cannot be undone."""
    module: Any = backend_registration._DummyBackendModule()
    module.get_amp_supported_dtype = list
    backend_registration._setup_privateuseone_for_python_backend(FAR, module)


def printed(main: Callable[[], object]) -> str:
    """What a function prints in a fork of this process, as `start` changes it for good, with torch's own `empty`."""
    from tests import conftest

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if not child:
            code = 1
            try:
                conftest._patches.undo()
                sys.stdout, sys.stderr = out, errors
                main()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                out.flush()
                errors.flush()
                os._exit(code)  # not into pytest
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        errors.seek(0)
        assert ended == 0, errors.read()
        return out.read()


def far(x: Tensor, number: int = 0) -> Tensor:
    return Far(x, torch.device(FAR, number))
