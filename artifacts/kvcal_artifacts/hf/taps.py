"""Hooks on single modules, and whether the modules that a cache knows are still in the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
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
    """The places of modules below a decoder. Comparing them, at each forward, takes 5 us for 32 layers."""

    def __init__(self, decoder: nn.Module, modules: Iterable[nn.Module]) -> None:
        names = {id(module): name for name, module in decoder.named_modules()}
        links: dict[str, tuple[dict[str, nn.Module | None], str, nn.Module | None]] = {}
        for name in (names[id(module)] for module in modules if id(module) in names):
            holder, path = decoder, ""
            for part in name.split("."):
                path = f"{path}.{part}" if path else part
                links[path] = holder._modules, part, holder._modules[part]
                holder = getattr(holder, part)
        self._names = list(links)
        self._parents = [children for children, _, _ in links.values()]
        self._parts = [part for _, part, _ in links.values()]
        self._modules = [module for _, _, module in links.values()]

    def replaced(self) -> str | None:
        """The name of the first module that is no longer in its place; None if all are."""
        now = list(map(dict.get, self._parents, self._parts))
        if now == self._modules:  # modules have no equality but identity
            return None
        return next(n for n, one, was in zip(self._names, now, self._modules, strict=True) if one is not was)


REPLACED = (
    "{} was replaced since this cache was made (an adapter attached, merged or unloaded, or another module set): "
    "close the cache and make a new one"
)


class InPlace:
    """Whether a layer's attention and its source of keys are still in the model.

    It is for a forward that is traced, in which no hook compares them: by names that dynamo looks up.
    """

    def __init__(self, decoder: Decoder, site: AttentionSite) -> None:
        self._decoder, self._layer, self._site = decoder, str(site.index), site
        self._source = next((name for name, child in site.module.named_children() if child is site.key_source), None)

    def check(self, title: str) -> None:
        """Raises KVCalError where one was replaced."""
        module: nn.Module = attribute(getattr(self._decoder.layers, self._layer), "self_attn")
        has_source = self._source is None or getattr(module, self._source) is self._site.key_source
        if module is not self._site.module or not has_source:
            raise KVCalError(REPLACED.format(f"{title}: its attention, or what makes its keys,"))
