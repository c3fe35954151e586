"""What a cache learns of its model during a forward.

A cache cannot get these otherwise. One forward hook per layer reports keys before RoPE. One hook on the rotary module
tells positions, cosines and sines; one pre-hook on the decoder tells the 2-D attention mask. Where tokens were evicted,
the model's mask of all columns does not fit what the cache returns: one pre-hook per attention module then replaces it.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor, nn

from ..errors import KVCalError
from .attention import asks_for_weights
from .decoder import decoder_of, find_decoder
from .protocols import Decoder, Mask
from .seam import FORWARD
from .sites import AttentionSite
from .taps import CHANGED, Places, Tap

Arguments: TypeAlias = tuple[object, ...]
Keywords: TypeAlias = dict[str, object]


class Listener(Protocol):
    """A cache, as its model's hooks see it during a forward."""

    def on_forward(self, mask: Mask, weights: bool = False) -> None:
        """Called before the decoder runs, with its mask, and whether it is to return attention weights.

        The mask is (B, past + query), 4-D, None (all tokens real) or 4-D ones by the kind of layer.
        """

    def on_rotary(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Called with position ids int (B or 1, query) and their cos and sin, each (B or 1, query, rotary dim)."""

    def on_keys(self, layer: int, keys: Tensor) -> None:
        """Called with keys (B, H, query, D) of one layer before RoPE, if it asked for them."""

    def on_queries(self, layer: int, queries: Tensor) -> None:
        """Called with queries (B, heads, query, D) of one layer before RoPE, if it asked for them."""

    def on_attention(self, layer: int, hidden: Tensor, mask: Tensor | None) -> Tensor | None:
        """The mask for a layer's attention, from its input (B, query, hidden size) and the model's mask."""

    def on_done(self) -> None:
        """Called after a decoder's forward that did not fail."""

    def on_returned(self) -> None:
        """Called after that, when the whole model's forward, with its head, has returned."""

    def on_broken(self) -> None:
        """Called when a forward, the decoder's or that of the model around it, did not return."""


Subject: TypeAlias = tuple[str, int]  # "keys", "queries" or "mask", and a layer


@dataclass(frozen=True)
class _Owner:
    """A cache that listens, its hooks by what they report, and the model's modules when the cache was made.

    around: ids of hooked models around the decoder whose forward runs with it now.
    """

    listener: Callable[[], Listener | None]
    taps: dict[Subject, Tap]
    rotary: Tap
    places: Places
    around: set[int]


TOKENS = ("input_ids", "inputs_embeds")  # arguments of a decoder, of which a call has one
NO_TOKEN = (
    "the call has no new token; for another prompt call cache.reset() or make a new cache, for a further turn give the "
    "whole conversation"
)


class _Board:
    """The hooks of one decoder, for all its caches: they report to the cache of the forward, and to no other."""

    def __init__(self, decoder: nn.Module) -> None:
        self._signature = inspect.signature(type(decoder).forward)
        self._thread = threading.local()
        self.owners: dict[int, _Owner] = {}
        self._always = [
            Tap(decoder, "register_forward_pre_hook", self._before, with_kwargs=True),
            Tap(decoder, "register_forward_hook", self._after, always_call=True),
        ]
        self._rotary_tap: Tap | None = None
        self._taps: dict[Subject, Tap] = {}

    def open(self, decoder: Decoder, owner: Listener, subjects: dict[Subject, AttentionSite]) -> None:
        """Hook what a cache asks for.

        Hooks of modules that are no longer in the model stay with the caches that have them.
        """
        assert isinstance(decoder, nn.Module)
        if self._rotary_tap is None or not self._rotary_tap.is_on(decoder.rotary_emb):
            self._rotary_tap = Tap(decoder.rotary_emb, "register_forward_hook", self._rotary, with_kwargs=True)
        for key, site in subjects.items():
            if key not in self._taps or not self._taps[key].is_on(_source(key, site)):
                self._taps[key] = self._tap(key, site)
        taps = {key: self._taps[key] for key in subjects}
        self.owners[id(owner)] = _Owner(weakref.ref(owner), taps, self._rotary_tap, Places(decoder), set())
        for tap in self._used(self.owners[id(owner)]):
            tap.open(id(owner))

    def close(self, user: int) -> None:
        for tap in self._used(self.owners.pop(user)):
            tap.close(user)

    def _used(self, owner: _Owner) -> list[Tap]:
        return [*self._always, owner.rotary, *owner.taps.values()]

    def _tap(self, key: Subject, site: AttentionSite) -> Tap:
        source = _source(key, site)
        if key[0] == "keys":
            return Tap(source, "register_forward_hook", self._key_hook(site), _show_keys(site))
        if key[0] == "queries":
            return Tap(source, "register_forward_hook", self._query_hook(site))
        return Tap(source, "register_forward_pre_hook", self._mask_hook(site), with_kwargs=True)

    def current(self, subject: Subject | None = None, module: nn.Module | None = None) -> Listener | None:
        """The cache of this thread's forward, if it asked for that subject of that module."""
        owner: _Owner | None = getattr(self._thread, "owner", None)
        if owner is None or (subject is not None and not (subject in owner.taps and owner.taps[subject].is_on(module))):
            return None
        return owner.listener()

    def owner_of(self, args: Arguments, kwargs: Keywords) -> _Owner | None:
        """The entry of the forward's cache; None if that is none of ours."""
        owner = self.owners.get(id(kwargs.get("past_key_values")))
        return owner or next((self.owners[id(x)] for x in args if id(x) in self.owners), None)

    def _before(self, module: nn.Module, args: Arguments, kwargs: Keywords | None = None) -> None:
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
            bound = self._signature.bind_partial(module, *args, **kwargs).arguments
            arguments = {**bound, **bound.get("kwargs", {})}
        if (change := owner.places.changed()) is not None:
            raise KVCalError(CHANGED.format(change))
        for tap in (owner.rotary, *owner.taps.values()):
            tap.go_last()
        tokens = next((arguments[name] for name in TOKENS if arguments.get(name) is not None), None)
        if isinstance(tokens, Tensor) and tokens.shape[1] == 0:
            raise KVCalError(NO_TOKEN)
        weights = asks_for_weights(getattr(module, "config", None), arguments)
        listener.on_forward(_mask_of(arguments.get("attention_mask")), weights)

    def _after(self, module: nn.Module, args: Arguments, output: object) -> None:
        """Tell the cache that the decoder's forward has ended. output: None after one that failed."""
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

    def _rotary(self, module: nn.Module, args: Arguments, kwargs: Keywords, tables: tuple[Tensor, Tensor]) -> None:
        owner: _Owner | None = getattr(self._thread, "owner", None)
        if kwargs.get("layer_type", args[2] if len(args) > 2 else "full_attention") != "full_attention":
            return  # RoPE of layers that Transformers caches
        if owner is not None and owner.rotary.is_on(module) and (listener := owner.listener()) is not None:
            positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
            assert isinstance(positions, Tensor)
            cos, sin = tables
            listener.on_rotary(positions, cos, sin)

    def _key_hook(self, site: AttentionSite) -> Callable[..., None]:
        def hook(module: nn.Module, args: Arguments, output: Tensor) -> None:
            if (owner := self.current(("keys", site.index), module)) is not None:
                owner.on_keys(site.index, site.keys_from(output))

        return hook

    def _query_hook(self, site: AttentionSite) -> Callable[..., None]:
        def hook(module: nn.Module, args: Arguments, output: Tensor) -> None:
            if (owner := self.current(("queries", site.index), module)) is not None:
                owner.on_queries(site.index, site.queries_from(output))

        return hook

    def _mask_hook(self, site: AttentionSite) -> Callable[..., tuple[Arguments, Keywords] | None]:
        def hook(
            module: nn.Module, args: Arguments, kwargs: Keywords | None = None
        ) -> tuple[Arguments, Keywords] | None:
            owner = self.current(("mask", site.index), module)
            if owner is None or kwargs is None:
                return None
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            mask = kwargs.get("attention_mask")
            if not isinstance(hidden, Tensor) or "attention_mask" not in kwargs:
                raise KVCalError(
                    f"layer {site.index} ({type(module).__name__}): attention is not called with hidden_states and "
                    "attention_mask=...; token selection cannot hide evicted tokens from it"
                )
            assert mask is None or isinstance(mask, Tensor)
            return args, {**kwargs, "attention_mask": owner.on_attention(site.index, hidden, mask)}

        return hook


def _source(subject: Subject, site: AttentionSite) -> nn.Module:
    """The module whose hook tells a subject."""
    return {"keys": site.key_source, "queries": site.query_source, "mask": site.module}[subject[0]]


def _mask_of(value: object) -> Mask:
    if value is None or isinstance(value, Tensor | Mapping):
        return value
    raise KVCalError(
        f"attention_mask is a {type(value).__name__}: a cache takes a tensor, tensors by the kind of layer, or None"
    )


_NO_KEYWORDS = object()  # the place of an argument that torch leaves out


class _Around:
    """The hooks of a model around a decoder: they tell the cache of a forward when all of it has returned."""

    def __init__(self, model: nn.Module, board: _Board) -> None:
        self._board, self._number = board, id(model)
        self.taps = [
            Tap(model, "register_forward_pre_hook", self._before, with_kwargs=True),
            Tap(model, "register_forward_hook", self._after, with_kwargs=True, always_call=True),
        ]

    def _before(self, module: nn.Module, args: Arguments, kwargs: Keywords | None = None) -> None:
        owner = None if kwargs is None else self._board.owner_of(args, kwargs)
        if owner is None:
            return
        if self._number in owner.around:  # KeyboardInterrupt: its last forward did not come to the hook below
            owner.around.clear()
            if (listener := owner.listener()) is not None:
                listener.on_broken()
        owner.around.add(self._number)

    def _after(self, module: nn.Module, args: Arguments, kwargs: Keywords, output: object = _NO_KEYWORDS) -> None:
        """Tell the cache that the model's forward has ended. output: None after one that failed."""
        if output is _NO_KEYWORDS:  # torch passes no kwargs, as in _before of _Board
            return
        owner = self._board.owner_of(args, kwargs)
        if owner is None or (listener := owner.listener()) is None:
            return
        owner.around.discard(self._number)
        if output is None:
            listener.on_broken()
        elif not owner.around:
            listener.on_returned()


def _show_keys(site: AttentionSite) -> Callable[..., None]:
    """The hook on a site's keys in a forward that is compiled: update() finds them in the layer's HandOff."""

    def hook(module: nn.Module, args: Arguments, output: Tensor) -> None:
        hand_off = getattr(site.config, "kvcal_hand_off", None)
        if hand_off is not None:
            hand_off.show(site.keys_from(output))

    return hook


_BOARDS: weakref.WeakKeyDictionary[nn.Module, _Board] = weakref.WeakKeyDictionary()  # by decoder
_AROUND: weakref.WeakKeyDictionary[nn.Module, tuple[_Board, _Around]] = weakref.WeakKeyDictionary()  # by model


class Hooks:
    """Tells one cache what its model does; it refers to the cache weakly, so that dropping it removes the hooks."""

    def __init__(
        self,
        model: nn.Module,
        owner: Listener,
        sites: list[AttentionSite],
        query_sites: list[AttentionSite],
        mask_sites: list[AttentionSite],
    ) -> None:
        """Hook the model.

        sites, query_sites: layers whose keys and queries before RoPE the cache gets; mask_sites: those whose mask
        may be replaced.
        """
        self._model, decoder = model, decoder_of(model)
        assert isinstance(decoder, nn.Module)
        subjects = {("keys", site.index): site for site in sites}
        subjects |= {("queries", site.index): site for site in query_sites}
        subjects |= {("mask", site.index): site for site in mask_sites}
        self._board = _BOARDS.get(decoder) or _BOARDS.setdefault(decoder, _Board(decoder))
        self._user, self.closed = id(owner), False
        self._owner: Callable[[], Listener | None] = weakref.ref(owner)
        self._around: list[Tap] = []
        if model is not decoder:
            board, around = _AROUND.get(model, (None, None))
            if around is None or board is not self._board:
                around = _Around(model, self._board)
                _AROUND[model] = self._board, around
            self._around = around.taps
        self._board.open(decoder, owner, subjects)
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
        """The error if a module of the decoder is no longer the one that the cache was made with; None if all are."""
        if _BOARDS.get(find_decoder(self._model)) is not self._board:
            return CHANGED.format("the decoder was replaced")
        owner = self._board.owners.get(self._user)
        change = None if owner is None else owner.places.changed()
        return None if change is None else CHANGED.format(change)

    def forget(self) -> None:
        """Forget forwards of the cache that seem to be still under way."""
        if (owner := self._board.owners.get(self._user)) is not None:
            owner.around.clear()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._board.close(self._user)
            for tap in self._around:
                tap.close(self._user)
