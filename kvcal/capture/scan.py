"""Run a causal LM over token windows layer by layer and hand out q, k, v of one layer at a time.

    with Capture(model, ids, device="cuda") as capture:
        for taps in capture:                                   # layer 0, 1, 2, ...
            for batch in taps.batches({"k", "v"}):             # as often as needed
                gram += batch.k ...
            for batch in taps.batches({"k"}, advance=True):    # the last pass may run the whole layer
                ...

Memory: the hidden states, N windows of T tokens in the model's dtype, and what one batch of one layer needs.

The driver knows no architecture. The decoder's forward, stopped at its first layer, shows the arguments of every
layer. A stand-in for the cache receives keys and values, and stops a layer before attention where no more is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from kvcal_artifacts.bundle import probed_layers
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.hf import (
    AttentionSite,
    attention_site,
    check_frame,
    check_queries,
    decoder_of,
    key_probe,
    layer_kind,
    layer_probe,
    unsupported_layers,
)
from kvcal_artifacts.hf.protocols import attribute

from .call import LayerCall, call_layer, check_rotation, layer_calls
from .checks import check_finite, check_model, checked_ids
from .ranks import ALONE, Ranks
from .shards import SHARDS, S, Shards, ShardStore, ShardSums
from .spill import SpillStore, Where

Item = TypeVar("Item")
Frame = Literal["pre_rope", "post_rope"]
Timer = Callable[[str], AbstractContextManager[None]]

TAPS = frozenset({"q", "k", "v"})
TOKENS_PER_BATCH = {"cuda": 16384, "cpu": 4096}


class LayerSource(Protocol):
    """A source of the model's parts. `kvcal.models.layerwise.LayerwiseWeights` is one, `WholeModel` another."""

    @property
    def model(self) -> nn.Module:
        """The model, complete in structure; its layers may be on the meta device."""

    def load_outer(self) -> object:
        """Put embedding and rotary module on the device."""

    def free_outer(self) -> None: ...

    def load_layer(self, index: int) -> nn.Module:
        """Put one decoder layer on the device."""

    def free_layer(self, index: int) -> None: ...


class WholeModel:
    """An ordinary model in memory, already on the device it runs on."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def load_outer(self) -> None: ...

    def free_outer(self) -> None: ...

    def load_layer(self, index: int) -> nn.Module:
        return decoder_of(self.model).layers[index]

    def free_layer(self, index: int) -> None: ...


@dataclass(frozen=True)
class TapBatch:
    """What one layer computed for some windows; None where it was not asked for.

    (B, H, T, D) in the model's dtype on the compute device, not contiguous where the model's are not.
    H counts kv heads for k and v, query heads for q. Only q and k depend on the frame.
    """

    rows: slice
    q: Tensor | None
    k: Tensor | None
    v: Tensor | None


class Capture:
    """Token windows on their way through the layers of a model; iterate over it once for one run.

    Layers that Transformers caches (sliding windows) are run, and not handed out.

    source: a model on `device`, or a LayerSource.
    ids: (N, T) int64 token windows, without padding.
    batch: windows at a time; by default as many as make 16k tokens on CUDA, 4k on a CPU. Never measured: the
        shape of a batch decides the last bits of every product, and the same command gives the same bytes.
    hidden: where the hidden states (N, T, hidden size) live between layers.
    ranks: the processes that share the windows; this one runs and hands out those of its shards alone. Raises
        UsageError where there are more of them than batches.
    train: how many windows, from the first, are fitted on; None: all are alike. Ranks share both kinds evenly.
    """

    def __init__(
        self,
        source: LayerSource | nn.Module,
        ids: Tensor,
        *,
        device: torch.device | str,
        batch: int | None = None,
        hidden: Where = "device",
        spill_dir: Path | None = None,
        timer: Timer | None = None,
        ranks: Ranks = ALONE,
        train: int | None = None,
    ) -> None:
        self.source: LayerSource = WholeModel(source) if isinstance(source, nn.Module) else source
        self.device = torch.device(device)
        self.dtype: torch.dtype = attribute(self.source.model, "dtype")
        self.decoder = decoder_of(self.source.model)
        self.ids = checked_ids(ids, self.decoder.config)
        check_model(self.source.model, self.decoder)
        self.skipped = unsupported_layers(self.decoder.config)
        count = int(self.decoder.config.num_hidden_layers)
        self.layers = tuple(index for index in range(count) if index not in self.skipped)
        self.windows, self.length = int(ids.shape[0]), int(ids.shape[1])
        self.batch = default_batch(self.length, self.device) if batch is None else batch
        if self.batch < 1:
            raise UsageError(f"batch of {self.batch} windows: it takes at least 1")
        self.shards = Shards(self.windows, self.batch, ranks, train)
        if ranks.count > self.shards.most_ranks:
            raise UsageError(self._too_many())
        self.timer: Timer = timer or untimed
        self.hidden: SpillStore | None = None
        self.layer_kwargs: dict[str, dict[str, object]] = {}  # by the layers' kind
        self._where: Where = hidden
        self._spill_dir = spill_dir

    def _too_many(self) -> str:
        """The line for ranks some of which would have no windows."""
        count, most = self.shards.ranks.count, self.shards.most_ranks
        if most < SHARDS:
            batches = "1 batch" if most == 1 else f"{most} batches"
            fewer = "one process" if most == 1 else f"--nproc-per-node {most} or less"
            return f"{count} ranks for {batches} of windows: give {fewer}, more --windows, or a smaller --batch"
        return f"{count} ranks: windows are shared by {most} at most; start {most} ranks or less in all"

    def __len__(self) -> int:
        """Layers that are handed out."""
        return len(self.layers)

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the hidden states' memory back."""
        if self.hidden is not None:
            self.hidden.close()
            self.hidden = None

    def __iter__(self) -> Iterator[LayerTaps]:
        """Layers in order. A layer not advanced by then is advanced when the next one is asked for."""
        self._embed()
        probes = self._probes_of_skipped()
        for index in range(self.layers[-1] + 1):
            with self.timer("load"):
                layer = self.source.load_layer(index)
            taps = LayerTaps(self, index, layer, probes)
            assert self.hidden is not None
            self.hidden.move(taps.device)
            try:
                if index not in self.skipped:
                    yield taps
                taps.advance()
            finally:
                taps.closed = True
                self.source.free_layer(index)
        self.close()

    def first_input(self) -> Tensor:
        """The first layer's input for all windows, (N, T, hidden size); it also sets kwargs_of."""
        self._embed()
        assert self.hidden is not None
        return self.hidden.read(slice(0, self.windows))

    def kwargs_of(self, index: int, device: torch.device | None = None) -> dict[str, object]:
        """What a layer is called with besides hidden states. device: where its tensors are to be; by default the run's
        own.
        """
        kwargs = self.layer_kwargs[layer_kind(self.decoder.config, index)]
        return {name: _on(value, device or self.device) for name, value in kwargs.items()}

    def rope_of(self, index: int, device: torch.device | None = None) -> tuple[Tensor, Tensor] | None:
        """cos and sin (1, T, rotary dim) that a layer is called with; None where it is called without. device: see
        `kwargs_of`.
        """
        rope = self.kwargs_of(index, device).get("position_embeddings")
        assert rope is None or isinstance(rope, tuple)
        return rope

    def _probes_of_skipped(self) -> dict[int, tuple[float, ...]]:
        """hf.key_probe of the layers that a fingerprint looks at and that are not handed out."""
        probes = {}
        for index in probed_layers(int(self.decoder.config.num_hidden_layers)):
            if index in self.skipped:
                with self.timer("load"):
                    self.source.load_layer(index)
                probes[index] = layer_probe(self.decoder, index)
                self.source.free_layer(index)
        return probes

    def chunks(self, rows: slice | None = None) -> list[slice]:
        """The batches of this rank, in window order, in which those rows are run."""
        return self.shards.chunks(self.whole(rows))

    def whole(self, rows: slice | None) -> slice:
        """These windows with numbers for both ends; None: all."""
        start, stop, _ = (rows or slice(None)).indices(self.windows)
        return slice(start, stop)

    def _embed(self) -> None:
        """Fill the hidden states with the first layer's input, and learn what layers are called with."""
        self.close()
        with self.timer("load"):
            self.source.load_outer()
        try:
            for rows in self.chunks():
                with self.timer("embed"):
                    x, calls = layer_calls(self.decoder, self.ids[rows].to(self.device))
                    if self.hidden is None:
                        self.layer_kwargs = {kind: self._checked(kwargs) for kind, kwargs in calls.items()}
                        self.hidden = self._store_for(x)
                    check_finite(x, "the embedding's output", rows)
                    self.hidden.write(rows, x)
        finally:
            self.source.free_outer()

    def _store_for(self, x: Tensor) -> SpillStore:
        return ShardStore(
            self.shards,
            tuple(x.shape[1:]),
            x.dtype,
            device=self.device,
            where=self._where,
            spill_dir=self._spill_dir,
            label="hidden states",
        )

    def _checked(self, kwargs: dict[str, object]) -> dict[str, object]:
        """One call must fit batches of every size: tensors of batch dimension 1, and no mask where causality says it
        all.
        """
        name, kind = type(self.decoder).__name__, self.decoder.config._attn_implementation
        if "past_key_values" not in kwargs:
            raise KVCalError(f"{name} does not give its layers past_key_values; this architecture is not supported")
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 4:
            if kind == "eager" and getattr(self.decoder, "_supports_sdpa", False):
                raise KVCalError(
                    f"{name}: {kind} attention makes a mask of {self.length} x {self.length} for every window; "
                    'load the model with attn_implementation="sdpa"'
                )
            kwargs = {**kwargs, "attention_mask": mask[:1].clone()}  # windows have no padding: one mask serves all
        for key, value in kwargs.items():
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, Tensor) and part.ndim and part.shape[0] != 1:
                    raise KVCalError(f"{name} gives its layers a {key} per window; this architecture is not supported")
        return kwargs


class LayerTaps:
    """One layer of a model, its input windows waiting; of use until Capture is asked for the next layer."""

    def __init__(
        self, capture: Capture, index: int, layer: nn.Module, probes: dict[int, tuple[float, ...]] | None = None
    ) -> None:
        """Wait for a pass over one layer's windows. probes: of layers that are not handed out, see `probe`."""
        self.index = index
        self.site: AttentionSite = attention_site(capture.decoder, index)
        self.closed = False
        self._capture = capture
        self._probes = probes or {}
        self._layer = layer
        self._state: Literal["before", "advancing", "after"] = "before"
        # windows whose k and v are known to be finite, and those whose k has been seen before RoPE, too
        self._checked: dict[bool, set[int]] = {False: set(), True: set()}
        self._owns = True  # whether its advance is the layer's, or only that of one of several readers

    @property
    def timer(self) -> Timer:
        """The run's: a method may add phases for what it does between batches."""
        return self._capture.timer

    @property
    def ranks(self) -> Ranks:
        """The processes that share the windows."""
        return self._capture.shards.ranks

    @cached_property
    def device(self) -> torch.device:
        """Where q, k and v are computed: the layer's device, of a model spread over several (device_map)."""
        return execution_device(self._layer, self._capture.device)

    @property
    def place(self) -> int:
        """The layer's number among those that are handed out: what lies below it is the one handed out before."""
        return self._capture.layers.index(self.index)

    @property
    def probe(self) -> tuple[float, ...]:
        """What the layer adds to a fingerprint's probe; the first and the last one handed out speak for those beyond
        them.
        """
        layers, skipped = self._capture.layers, self._probes
        probed = probed_layers(int(self._capture.decoder.config.num_hidden_layers))
        probes = {self.index: key_probe(self.site)} if self.index in probed else {}
        if self.index == layers[0]:
            probes |= {index: probe for index, probe in skipped.items() if index < self.index}
        if self.index == layers[-1]:
            probes |= {index: probe for index, probe in skipped.items() if index > self.index}
        return tuple(number for index in sorted(probes) for number in probes[index])

    @property
    def windows(self) -> int:
        return self._capture.windows

    @property
    def length(self) -> int:
        """Tokens a window."""
        return self._capture.length

    @property
    def rope(self) -> tuple[Tensor, Tensor] | None:
        """cos and sin (1, T, rotary dim) of any window, for `site.rotate`; None in a layer without RoPE."""
        return self._capture.rope_of(self.index, self.device) if self.site.rope else None

    def chunks(self, rows: slice | None = None) -> list[slice]:
        """The rows of each batch that `batches` gives: to read a SpillStore in step with it."""
        return self._capture.chunks(rows)

    def batches(
        self,
        want: Collection[str],
        frame: Frame = "pre_rope",
        rows: slice | None = None,
        advance: bool = False,
        sums: ShardSums[S] | None = None,
    ) -> Iterator[TapBatch]:
        """q, k, v of this layer, those that are asked for, in window order; every call computes them again.

        rows: only these windows. advance: run the whole layer and replace its input by its output; allowed
        once, over all windows, and no batches can be had afterwards. Nothing follows the last layer: there it
        only gives the batches. sums: what the caller adds up batch by batch, over all ranks when the pass is over.
        """
        self._check_order()
        if not set(want) <= TAPS:
            raise ValueError(f"taps {sorted(want)}: allowed are q, k and v")
        if frame == "pre_rope" and "k" in want:
            check_frame([self.site], frame)
        if "q" in want:
            check_queries(self.site, "calibration")
        if advance and rows is not None:
            raise ValueError("a layer advances over all windows: advance=True goes without rows")
        batches = self._pass(frozenset(want), frame, rows, advance)
        if sums is None:
            return batches
        return sums.over(batches, self._capture.shards, self._capture.whole(rows), self.timer)

    def of_all(self, items: Iterator[Item], rows: slice | None = None) -> Iterator[Item]:
        """Every rank's item for each of its batches of these windows, in window order, on every rank. items: this
        rank's, one per batch; the next one is computed before others are waited for.
        """
        capture = self._capture
        if self.ranks.count == 1:
            yield from items
            return
        mine = next(items, None)
        for owner in capture.shards.owners(capture.whole(rows)):
            with capture.timer("exchange"):
                item = self.ranks.broadcast(mine if owner == self.ranks.rank else None, owner)
            if owner == self.ranks.rank:
                mine = next(items, None)
            yield item

    @contextmanager
    def shared(self) -> Iterator[LayerTaps]:
        """The same layer for one of several readers. Within the block no pass of these taps changes the layer's input,
        not even one that advances. So the next reader sees the same q, k and v.
        """
        self._check_order()
        reader = LayerTaps(self._capture, self.index, self._layer, self._probes)
        reader._owns, reader._checked = False, self._checked  # the same sets
        try:
            yield reader
        finally:
            reader.closed = True

    def advance(self) -> None:
        """Run the whole layer over all windows, unless a pass of `batches` has done so."""
        if self._state != "after":
            for _ in self.batches(frozenset(), advance=True):
                pass

    def _check_order(self) -> None:
        if self.closed:
            raise KVCalError(f"layer {self.index} was left behind: its taps end where the next layer begins")
        if self._state == "advancing":
            raise KVCalError(f"layer {self.index}: the pass that advances it was not finished, its input is lost")
        if self._state == "after":
            raise KVCalError(f"layer {self.index} was advanced: its taps are of its input, which is gone")

    def _pass(self, want: frozenset[str], frame: Frame, rows: slice | None, advance: bool) -> Iterator[TapBatch]:
        hidden = self._capture.hidden
        assert hidden is not None
        whole = advance and self._owns and self.index < self._capture.layers[-1]
        if advance:
            self._state = "advancing"
        for here, x in _timed(hidden.stream(self.chunks(rows)), self._capture.timer, "spill"):
            yield self._run(here, x, want, frame, whole)
            if not advance:
                self._check_order()
        if advance:
            self._state = "after"

    def _run(self, rows: slice, x: Tensor, want: frozenset[str], frame: Frame, whole: bool) -> TapBatch:
        """One batch through the layer; x (B, T, hidden size) is its input."""
        with self._capture.timer("forward"):
            kwargs = self._capture.kwargs_of(self.index, self.device)
            tapped = want if self.site.odd is None else want - {"k"}  # whose projection says nothing of them
            called = call_layer(self._layer, x, kwargs, self.site, tapped, stop=not whole)
            windows = range(rows.start, rows.stop)
            if not self._checked[called.pre_rope_keys is not None].issuperset(windows):  # a check waits for the device
                check_rotation(self.site, self.rope, called)
                check_finite(called.keys, f"layer {self.index}, key head", rows)
                check_finite(called.values, f"layer {self.index}, value head", rows)
                for before_rope in {False, called.pre_rope_keys is not None}:
                    self._checked[before_rope].update(windows)
            if called.output is not None:
                check_finite(called.output, f"layer {self.index}, its output", rows)
            batch = self._batch(rows, called, want, frame)
        if called.output is not None:
            with self._capture.timer("spill"):
                assert self._capture.hidden is not None
                self._capture.hidden.write(rows, called.output)
        return batch

    def _batch(self, rows: slice, called: LayerCall, want: frozenset[str], frame: Frame) -> TapBatch:
        queries, keys = called.pre_rope_queries, called.pre_rope_keys
        if frame == "post_rope":
            keys = called.keys
            if queries is not None and self.rope is not None:
                with torch.no_grad():
                    queries = self.site.rotate(queries, *self.rope)
        return TapBatch(
            rows,
            q=queries if "q" in want else None,
            k=keys if "k" in want else None,
            v=called.values if "v" in want else None,
        )


def default_batch(length: int, device: torch.device) -> int:
    """Windows of that many tokens run at a time."""
    return max(1, TOKENS_PER_BATCH.get(device.type, TOKENS_PER_BATCH["cpu"]) // length)


def execution_device(layer: nn.Module, default: torch.device) -> torch.device:
    """Where a layer runs: where its weights are, or where accelerate's hook of a device_map brings them."""
    hook = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
    device = next((one.device for one in layer.parameters()), default) if hook is None else torch.device(hook)
    indexed = default.type == "cuda" and default.index is None
    same = torch.device("cuda", torch.cuda.current_device()) if indexed else default
    return default if device.type == "meta" or device == same else device


def _on(value: object, device: torch.device) -> object:
    """Tensors of a layer's arguments there; the rest unchanged."""
    if isinstance(value, Tensor):
        return value.to(device)
    return tuple(_on(one, device) for one in value) if isinstance(value, tuple) else value


def untimed(phase: str) -> AbstractContextManager[None]:
    """A Timer that measures nothing."""
    return nullcontext()


def _timed(items: Iterator[Item], timer: Timer, phase: str) -> Iterator[Item]:
    """Yield the same items, the time to fetch each charged to a phase."""
    while True:
        with timer(phase):
            item = next(items, None)
        if item is None:
            return
        yield item
