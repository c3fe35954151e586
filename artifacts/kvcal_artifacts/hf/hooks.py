"""What a cache hears of its model during a forward.

One forward hook a layer tells keys before RoPE, one hook on the rotary module tells positions, cosines and sines, and one
pre-hook on the decoder tells the 2-D attention mask, none of which a cache is given otherwise. Where tokens were evicted, the
model's mask of all columns does not fit what the cache gives back: one pre-hook an attention module then puts ours in its
place.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import KVCalError
from .attention import weights_wanted
from .decoder import decoder_of
from .seam import FORWARD
from .sites import AttentionSite


class Listener(Protocol):
    """What a cache hears of its model during a forward pass."""

    def on_forward(self, mask: Tensor | Mapping[str, Tensor | None] | None, weights: bool = False) -> None:
        """Before the decoder runs: the mask it was given, (B, past + query), 4-D, None (all tokens real) or 4-D ones by the
        kind of layer, and whether it is to give attention weights back.
        """

    def on_rotary(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Position ids int (B or 1, query) and what the rotary module made of them, each (B or 1, query, rotary dim)."""

    def on_keys(self, layer: int, keys: Tensor) -> None:
        """Keys (B, H, query, D) of one layer before RoPE; only if asked for."""

    def on_queries(self, layer: int, queries: Tensor) -> None:
        """Queries (B, heads, query, D) of one layer before RoPE; only if asked for."""

    def on_attention(self, layer: int, hidden: Tensor, mask: Tensor | None) -> Tensor | None:
        """Before a layer's attention: its input (B, query, hidden size) and mask -> the mask to use; only if asked for."""

    def on_done(self) -> None:
        """After a decoder's forward that did not fail."""

    def on_returned(self) -> None:
        """After that, when the whole model's forward has returned, with its head."""

    def on_broken(self) -> None:
        """A forward, the decoder's or that of the model around it, did not return."""


Wanted = tuple[str, int]  # "keys", "queries" or "mask", and a layer


class _Hook:
    """One hook function. In a forward that is compiled `traced`, which knows of no cache: what is compiled has its on the
    device; nothing without it.
    """

    def __init__(self, call: Callable[..., Any], traced: Callable[..., Any] | None = None) -> None:
        self._call, self._traced = call, traced

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return None if self._traced is None else self._traced(*arguments)
        return self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled model gets one that takes anything and does nothing, and is there without this package."""
        return getattr, (nullcontext(), "__exit__")


class _Tap:
    """A hook on one module while at least one cache uses it: the same object under the same number whenever it is there, as
    compiled forwards are guarded by both.
    """

    def __init__(
        self,
        module: nn.Module,
        register: str,
        call: Callable[..., Any],
        traced: Callable[..., Any] | None = None,
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
    """Put a hook under the number that it had before, if it had one; the number it has then."""
    if number is not None:
        for hooks in (ref() for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref)):
            if hooks is not None and handle.id in hooks:
                hooks[number] = hooks.pop(handle.id)
        handle.id = number
    return handle.id


@dataclass(frozen=True)
class _Owner:
    """A cache that listens, its hooks by what they tell, and where the modules that it knows hang. around: ids of hooked
    models around the decoder whose forward runs with it now.
    """

    listener: Callable[[], Listener | None]
    taps: dict[Wanted, _Tap]
    rotary: _Tap
    places: Places
    around: set[int]


class Places:
    """Where modules hang below a decoder, to see that one was replaced: compared at each forward, 5 us for 32 layers."""

    def __init__(self, decoder: nn.Module, modules: Iterable[nn.Module]) -> None:
        names = {id(module): name for name, module in decoder.named_modules()}
        links: dict[str, tuple[dict[str, Any], str, nn.Module | None]] = {}
        for name in (names[id(module)] for module in modules if id(module) in names):
            holder, path = decoder, ""
            for part in name.split("."):
                path = f"{path}.{part}" if path else part
                links[path] = holder._modules, part, holder._modules[part]
                holder = getattr(holder, part)
        self._names = list(links)
        self._held = [children for children, _, _ in links.values()]
        self._parts = [part for _, part, _ in links.values()]
        self._modules = [module for _, _, module in links.values()]

    def replaced(self) -> str | None:
        """The name of the first module in whose place another one is, or none; None if all are there."""
        now = list(map(dict.get, self._held, self._parts))
        if now == self._modules:  # modules have no equality but identity
            return None
        return next(n for n, one, was in zip(self._names, now, self._modules, strict=True) if one is not was)


class _Board:
    """The hooks of one decoder, for all its caches: they tell the cache that a forward was given, and no other."""

    def __init__(self, decoder: nn.Module) -> None:
        self._signature = inspect.signature(type(decoder).forward)
        self._thread = threading.local()
        self.owners: dict[int, _Owner] = {}
        self._always = [
            _Tap(decoder, "register_forward_pre_hook", self._before, with_kwargs=True),
            _Tap(decoder, "register_forward_hook", self._after, always_call=True),
        ]
        self._turning: _Tap | None = None
        self._taps: dict[Wanted, _Tap] = {}

    def open(
        self, decoder: Any, owner: Listener, subjects: dict[Wanted, AttentionSite], sites: list[AttentionSite]
    ) -> None:
        """sites: of all layers that the cache compresses. Hooks of modules that are no longer there stay with the caches that
        have them.
        """
        if self._turning is None or not self._turning.is_on(decoder.rotary_emb):
            self._turning = _Tap(decoder.rotary_emb, "register_forward_hook", self._rotary, with_kwargs=True)
        for key, site in subjects.items():
            if key not in self._taps or not self._taps[key].is_on(_source(key, site)):
                self._taps[key] = self._tap(key, site)
        modules = [decoder.rotary_emb, *(part for o in sites for part in (o.module, o.key_source, o.query_source))]
        taps = {key: self._taps[key] for key in subjects}
        self.owners[id(owner)] = _Owner(weakref.ref(owner), taps, self._turning, Places(decoder, modules), set())
        for tap in self._used(self.owners[id(owner)]):
            tap.open(id(owner))

    def close(self, user: int) -> None:
        for tap in self._used(self.owners.pop(user)):
            tap.close(user)

    def _used(self, owner: _Owner) -> list[_Tap]:
        return [*self._always, owner.rotary, *owner.taps.values()]

    def _tap(self, key: Wanted, site: AttentionSite) -> _Tap:
        source = _source(key, site)
        if key[0] == "keys":
            return _Tap(source, "register_forward_hook", self._key_hook(site), _show_keys(site))
        if key[0] == "queries":
            return _Tap(source, "register_forward_hook", self._query_hook(site))
        return _Tap(source, "register_forward_pre_hook", self._mask_hook(site), with_kwargs=True)

    def current(self, subject: Wanted | None = None, module: nn.Module | None = None) -> Listener | None:
        """The cache of this thread's forward, if it wants to hear of that from that module."""
        owner: _Owner | None = getattr(self._thread, "owner", None)
        if owner is None or (subject is not None and not (subject in owner.taps and owner.taps[subject].is_on(module))):
            return None
        return owner.listener()

    def owner_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Owner | None:
        """Of the cache of ours that a forward was given."""
        owner = self.owners.get(id(kwargs.get("past_key_values")))
        return owner or next((self.owners[id(x)] for x in args if id(x) in self.owners), None)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is None:  # removed while torch was calling its hooks: it then forgets that kwargs were asked for
            return
        if (broken := self.current()) is not None:  # not even hooks that are always called were: KeyboardInterrupt
            broken.on_broken()
        self._thread.owner = owner = self.owner_of(args, kwargs)
        FORWARD.ours = owner is not None
        if owner is None or (listener := owner.listener()) is None:
            return
        arguments = kwargs
        if args:  # called with positional arguments
            arguments = {**self._signature.bind_partial(module, *args, **kwargs).arguments}
            arguments.update(arguments.pop("kwargs", {}))
        if (name := owner.places.replaced()) is not None:
            raise KVCalError(REPLACED.format(name))
        listener.on_forward(arguments.get("attention_mask"), weights_wanted(getattr(module, "config", None), arguments))

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """output: None after a forward that failed."""
        owner: _Owner | None = getattr(self._thread, "owner", None)
        self._thread.owner, FORWARD.ours = None, False
        if owner is None or (listener := owner.listener()) is None:
            return
        if output is None:
            listener.on_broken()
            return
        listener.on_done()
        if not owner.around:
            listener.on_returned()

    def _rotary(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tables: Any) -> None:
        owner: _Owner | None = getattr(self._thread, "owner", None)
        if kwargs.get("layer_type", *args[2:3] or ("full_attention",)) != "full_attention":
            return  # RoPE of layers that keep their own cache
        if owner is not None and owner.rotary.is_on(module) and (listener := owner.listener()) is not None:
            cos, sin = tables
            listener.on_rotary(kwargs["position_ids"] if "position_ids" in kwargs else args[1], cos, sin)

    def _key_hook(self, site: AttentionSite) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if (owner := self.current(("keys", site.index), module)) is not None:
                owner.on_keys(site.index, site.keys_from(output))

        return hook

    def _query_hook(self, site: AttentionSite) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if (owner := self.current(("queries", site.index), module)) is not None:
                owner.on_queries(site.index, site.queries_from(output))

        return hook

    def _mask_hook(self, site: AttentionSite) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]:
        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            owner = self.current(("mask", site.index), module)
            if owner is None or kwargs is None:
                return None
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            if hidden is None or "attention_mask" not in kwargs:
                raise KVCalError(
                    f"layer {site.index} ({type(module).__name__}): attention is not called with hidden_states and "
                    "attention_mask=...; token selection cannot hide evicted tokens from it"
                )
            return args, {**kwargs, "attention_mask": owner.on_attention(site.index, hidden, kwargs["attention_mask"])}

        return hook


REPLACED = (
    "{} was replaced since this cache was made (an adapter attached, merged or unloaded, or another module set): close the "
    "cache and make a new one"
)


class InPlace:
    """Whether a layer's attention and its source of keys are still in the model, for a forward that is traced, in which no
    hook compares them: by names that dynamo looks up.
    """

    def __init__(self, decoder: Any, site: AttentionSite) -> None:
        self._decoder, self._layer, self._site = decoder, str(site.index), site
        self._source = next((name for name, child in site.module.named_children() if child is site.key_source), None)

    def check(self, title: str) -> None:
        """Raises KVCalError where one is not."""
        module = getattr(self._decoder.layers, self._layer).self_attn
        source = self._source is None or getattr(module, self._source) is self._site.key_source
        if module is not self._site.module or not source:
            raise KVCalError(REPLACED.format(f"{title}: its attention, or what makes its keys,"))


def _source(subject: Wanted, site: AttentionSite) -> nn.Module:
    """The module whose hook tells it."""
    return {"keys": site.key_source, "queries": site.query_source, "mask": site.module}[subject[0]]


class _Around:
    """The hooks of a model around a decoder: they tell the cache that a forward was given when all of it has returned."""

    def __init__(self, model: nn.Module, board: _Board) -> None:
        self._board, self._number = board, id(model)
        self.taps = [
            _Tap(model, "register_forward_pre_hook", self._before, with_kwargs=True),
            _Tap(model, "register_forward_hook", self._after, with_kwargs=True, always_call=True),
        ]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        owner = None if kwargs is None else self._board.owner_of(args, kwargs)
        if owner is None:
            return
        if self._number in owner.around:  # KeyboardInterrupt: its last forward did not come to the hook below
            owner.around.clear()
            if (listener := owner.listener()) is not None:
                listener.on_broken()
        owner.around.add(self._number)

    def _after(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        """rest: kwargs, and what the model gives; None after a forward that failed."""
        if len(rest) != 2:  # as in _before of _Board
            return
        kwargs, output = rest
        owner = self._board.owner_of(args, kwargs)
        if owner is None or (listener := owner.listener()) is None:
            return
        owner.around.discard(self._number)
        if output is None:
            listener.on_broken()
        elif not owner.around:
            listener.on_returned()


def _show_keys(site: AttentionSite) -> Callable[..., None]:
    """The hook on a site's keys in a forward that is compiled: update() finds them in the layer's turn."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        attention: Any = site.module
        turn = getattr(attention.config, "kvcal_turn", None)
        if turn is not None:
            turn.show(site.keys_from(output))

    return hook


_BOARDS: weakref.WeakKeyDictionary[nn.Module, _Board] = weakref.WeakKeyDictionary()  # by decoder
_AROUND: weakref.WeakKeyDictionary[nn.Module, tuple[_Board, _Around]] = weakref.WeakKeyDictionary()  # by model


class Hooks:
    """Tells one cache what its model does; holds the cache weakly, so that dropping it removes the hooks."""

    def __init__(
        self,
        model: nn.Module,
        owner: Listener,
        sites: list[AttentionSite],
        query_sites: list[AttentionSite],
        mask_sites: list[AttentionSite],
        compressed: list[AttentionSite],
    ) -> None:
        """The layers whose keys and queries before RoPE are wanted, and whose mask may be replaced; empty for none.
        compressed: all layers that are not left to Transformers.
        """
        self._model, decoder = model, decoder_of(model)
        subjects = {("keys", site.index): site for site in sites}
        subjects |= {("queries", site.index): site for site in query_sites}
        subjects |= {("mask", site.index): site for site in mask_sites}
        self._board = _BOARDS.get(decoder) or _BOARDS.setdefault(decoder, _Board(decoder))
        self._user, self.closed = id(owner), False
        self._owner: Callable[[], Listener | None] = weakref.ref(owner)
        self._around: list[_Tap] = []
        if model is not decoder:
            board, around = _AROUND.get(model, (None, None))
            if around is None or board is not self._board:
                around = _Around(model, self._board)
                _AROUND[model] = self._board, around
            self._around = around.taps
        self._board.open(decoder, owner, subjects, compressed)
        for tap in self._around:
            tap.open(self._user)
        weakref.finalize(owner, self.close)

    @property
    def active(self) -> bool:
        """Whether a forward of the model with this very cache is under way on this thread."""
        owner = self._board.current()
        return owner is not None and owner is self._owner()

    @property
    def replaced(self) -> str | None:
        """What to say if a module that the cache knows is no longer in the model; None if all are."""
        if _BOARDS.get(decoder_of(self._model)) is not self._board:
            return REPLACED.format("the decoder")
        owner = self._board.owners.get(self._user)
        name = None if owner is None else owner.places.replaced()
        return None if name is None else REPLACED.format(name)

    def forget(self) -> None:
        """Forwards of the cache that are still under way, as far as is known, are no more."""
        if (owner := self._board.owners.get(self._user)) is not None:
            owner.around.clear()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._board.close(self._user)
            for tap in self._around:
                tap.close(self._user)
