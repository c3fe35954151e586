"""Hooks on single modules, and whether the modules that a cache knows are still in the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import KVCalError
from .protocols import Decoder, attribute
from .sites import AttentionSite


class _Hook:
    """One hook function.

    A compiled forward calls `traced` instead, which knows of no cache, or nothing: caches of what is compiled live on
    the device.
    """

    def __init__(self, call: Callable[..., object], traced: Callable[..., object] | None = None) -> None:
        self._call, self._traced = call, traced

    def __call__(self, *arguments: object) -> object:
        if torch.compiler.is_compiling():
            return None if self._traced is None else self._traced(*arguments)
        return self._call(*arguments)

    def __reduce__(self) -> tuple[object, ...]:
        """What a copied or pickled model gets: a function that does nothing, and exists without this package."""
        return getattr, (nullcontext(), "__exit__")


class Tap:
    """A hook on one module while at least one cache uses it.

    It is the same object under the same number each time, as compiled forwards are guarded by both.
    """

    def __init__(
        self,
        module: nn.Module,
        register: str,
        call: Callable[..., object],
        traced: Callable[..., object] | None = None,
        **options: bool,
    ) -> None:
        self._module, self._register, self._options = weakref.ref(module), register, options
        self._hook, self._users = _Hook(call, traced), set[int]()
        self._handle: RemovableHandle | None = None
        self._number: int | None = None

    def is_on(self, module: nn.Module | None) -> bool:
        return self._module() is module

    def open(self, user: int) -> None:
        self._users.add(user)  # sets, not counters: a garbage collection may close another cache at any time
        module = self._module()
        if self._handle is None and module is not None:
            self._handle = getattr(module, self._register)(self._hook, **self._options)
            self._number = _renumber(self._handle, self._number)

    def go_last(self) -> None:
        """Put the hook behind those that others have registered since, so that it gets what they return."""
        if (handle := self._handle) is None or (hooks := handle.hooks_dict_ref()) is None or handle.id not in hooks:
            return
        if next(reversed(hooks)) != handle.id:
            hooks[handle.id] = hooks.pop(handle.id)

    def close(self, user: int) -> None:
        self._users.discard(user)
        if not self._users and self._handle is not None:
            self._handle.remove()
            self._handle = None


def _renumber(handle: RemovableHandle, number: int | None) -> int:
    """Put a hook under the number that it had before, if it had one, and return its number."""
    if number is not None:
        for hooks in (ref() for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref)):
            if hooks is not None and handle.id in hooks:
                hooks[number] = hooks.pop(handle.id)
        handle.id = number
    return handle.id


class Places:
    """The modules of a decoder, each in its place.

    Any of them that another one takes the place of changes keys and values: its own layer's or those of the layers
    above. All are compared at each forward, which is cheap (docs/benchmarks/reasons.md).
    """

    def __init__(self, decoder: nn.Module) -> None:
        holders = dict(decoder.named_modules())
        self._names = list(holders)
        self._grows = [isinstance(holder, nn.ModuleDict) for holder in holders.values()]
        self._now: list[dict[str, nn.Module | None]] = [holder._modules for holder in holders.values()]
        self._placed = [dict(children) for children in self._now]
        self._then = list(self._placed)

    def changed(self) -> str | None:
        """What happened to the first module that is no longer as it was, in one clause; None if all are in place."""
        if self._now == self._then:  # modules have no equality but identity
            return None
        for name, grows, now, placed in zip(self._names, self._grows, self._now, self._placed, strict=True):
            for part in [*placed, *now]:
                if now.get(part) is placed.get(part) or (grows and part not in placed):
                    continue  # in a ModuleDict PEFT keeps adapters by name: a further one is not in use until it is set
                what = f"{name}.{part}" if name else part
                return f"{what} was {'replaced' if part in placed else 'added'}"
        self._then = [dict(children) for children in self._now]
        return None


CHANGED = (
    "{} since this cache was made (an adapter attached, merged or unloaded, or another module set): close the cache "
    "and make a new one"
)


class InPlace:
    """Whether a layer's attention and the modules in it are still in the model.

    It is for a forward that is traced, in which no hook compares them: by names that dynamo looks up.
    """

    def __init__(self, decoder: Decoder, site: AttentionSite) -> None:
        self._decoder, self._layer, self._site = decoder, str(site.index), site
        self._parts = dict(site.module.named_children())

    def check(self, title: str) -> None:
        """Raises KVCalError where one was replaced."""
        module: nn.Module = attribute(getattr(self._decoder.layers, self._layer), "self_attn")
        if module is not self._site.module:
            raise KVCalError(CHANGED.format(f"{title}: its attention was replaced"))
        for name, part in self._parts.items():
            if getattr(module, name) is not part:
                raise KVCalError(CHANGED.format(f"{title}: its {name} was replaced"))
