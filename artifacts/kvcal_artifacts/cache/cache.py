"""KVCalCache: a Transformers cache whose tokens are sinks, packed blocks and a recent window.

Prefill attends to the exact keys and values of the current call; what leaves the recent window is packed in the same
update, for later calls. Decode steps read packed blocks by the fused kernel where paths/choose.py says so. On the
reference path blocks are decoded for the attention of the current call and dropped again.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from .. import hf
from ..codecs import Context
from ..errors import KVCalError
from ..paths import choose, fused, notices
from ..scheme import Scheme
from ..storage import static_storage
from ..storage.eviction import EvictingLedger
from ..storage.ledger import Ledger
from ..storage.plan import Plan
from ..storage.selection import EvictingPlan
from . import construction, copying, cropping, planning, report
from .evicting_layer import EvictingLayer, evict
from .former_names import OF_CACHES, also_named
from .forward import Forward
from .layer import KVCalLayer
from .masks import MaskHistory, full_mask
from .protocols import AnyLayer, AnyLedger, CacheOptions, LayerProtocol, Watch
from .record import Record
from .rope import StoredRope
from .shared_memory import SharedMemory
from .static import device_steps


class KVCalCache(Cache):
    """A cache for `model.generate(past_key_values=cache)` that really stores what its scheme says.

    scheme: windows, frame and codecs of each layer. model: the model it will serve; hooks are put on it until close(),
    the end of a `with` block, or the cache's own end of life. strict: a crop that reaches into packed blocks raises
    before anything changes. offload: each layer's storage is in host memory while other layers run. remember: decoded
    blocks are stored too (nbytes("decoded")) instead of decoding them at each call: for evaluation, faster and not
    smaller.

    kernels: with "auto" decode steps of 1 to 16 tokens read packed blocks by the fused Triton kernel, on a GPU where it
    passes its check. With "off" they never do, with "triton" anywhere (on a CPU in Triton's interpreter), with "torch"
    by the kernel's reference in torch. max_length: columns that a row can have. Layers that take the kernel then have
    all their storage from the first call on. Their decode steps of up to 16 tokens work under a CUDA graph and
    generate()'s compiled forward (`is_compileable`). require_kernels: raises errors.KernelsUnavailable unless every
    compressed layer takes the kernel, or another decodes it: here, or when the first keys come if these decide it.
    """

    layers: list[AnyLayer]
    watch: Watch | None = None
    auto: dict[str, object] | None = None  # what a preset of auto.py chose, and why

    def __init__(
        self,
        scheme: Scheme,
        model: nn.Module,
        *,
        strict: bool = False,
        offload: bool = False,
        remember: bool = False,
        kernels: str = "auto",
        require_kernels: bool = False,
        max_length: int | None = None,
    ) -> None:
        choose.check_choice(kernels)
        device_steps.check_length(max_length, scheme, offload)
        config = construction.checked_config(model, scheme)
        self.caveats = hf.caveats(config)
        for caveat in self.caveats:
            warnings.warn(caveat, stacklevel=2)
        if max_length is not None:
            self.caveats = [*self.caveats, *device_steps.caveats(scheme)]
        self.whole_scheme = scheme  # of all heads, of which this process may have a part
        scheme, sites, self.head_shard, self.why_all_heads = construction.local_heads(scheme, model)
        self.scheme, self.strict, self.offloading_layers, self.remember = scheme, strict, offload, remember
        self.model, self.max_length, self.kernels, self.require_kernels = model, max_length, kernels, require_kernels
        before = scheme.frame == "pre_rope"
        self.stored_rope = StoredRope(model, hf.rotary_width(model) if before and kernels != "off" else 0)
        plain = DynamicCache(config=config).layers
        kind = KVCalLayer if scheme.selection is None else EvictingLayer
        layers: list[AnyLayer] = [
            kind(self, i, pair, sites[i]) if pair is not None else plain[i] for i, pair in enumerate(scheme.layers)
        ]
        self.growing: str | None = "without max_length, storage grows on the host"
        if max_length is not None:
            layers, self.growing = device_steps.static_layers(self, layers)
        super().__init__(layers=layers)
        self._compressed = [layer for layer in layers if isinstance(layer, KVCalLayer)]
        # new tokens of a call that the kernels of all layers take
        self.most_queries = min([fused.QUERIES, *(layer.paths.most_queries for layer in self.compressed_layers)])
        if require_kernels:
            construction.require_kernels(self)
        self.record, self.forward = Record(), Forward(scheme, model)
        self.ledger: AnyLedger = Ledger(scheme.windows)
        if scheme.selection is not None:
            self.ledger = EvictingLedger(scheme.windows, scheme.selection)
        self._contents: static_storage.Contents | None = None
        self.steps: dict[torch.device, static_storage.Steps] = {}  # of the layers on a device
        self.memory = SharedMemory(kernels, keeps=max_length is not None)
        self.hooks = construction.hooks(self)
        self._seams = hf.Seams(self, [layer.site for layer in self.compressed_layers if layer.paths.replaces_attention])
        self._opened: tuple[Tensor, bool] | None = None  # of the ledger's blocks
        self.mask_history = MaskHistory()

    @property
    def why_not_compileable(self) -> str | None:
        """Why decode steps do not run on the device as a whole; None if they do. It is a guess until keys come."""
        refused = (f"{layer.title}: {layer.paths.refused}" for layer in self.compressed_layers if layer.paths.refused)
        return self.growing or next(refused, None) or (self.uneven if self.stored_rope.rotary else None)

    def why_not_compiled(self, query: int) -> str:
        """Why a call of so many tokens cannot run compiled, and what to do."""
        return device_steps.why_not_compiled(self, query)

    @property
    def is_compileable(self) -> bool:
        return self.why_not_compileable is None

    def grow(self, why: str) -> None:
        """Let storage grow on the host, with max_length, because a layer's steps cannot run on its device."""
        self.growing = self.growing or why
        self.grow_on_host()

    @property
    def compressed_layers(self) -> list[KVCalLayer]:
        """The compressed layers."""
        return self._compressed

    @property
    def processes(self) -> int:
        """How many processes of a tensor-parallel model store as much as this one, each its kv heads; with this one."""
        return 1 if self.head_shard is None or self.why_all_heads is not None else self.head_shard.count

    def of_all_heads(self, x: Tensor) -> Tensor:
        """What all processes store, (B, H, ...), from what this one does; every process must ask."""
        return x if self.head_shard is None or self.processes == 1 else self.head_shard.gather(x)

    @property
    def opened(self) -> bool:
        """Whether every row has packed blocks, as far as the host knows; it may not yet know all of them."""
        blocks = self.ledger.blocks  # never changed in place
        if self._opened is None or self._opened[0] is not blocks:
            self._opened = blocks, len(blocks) > 0 and bool((blocks > 0).all())
        return self._opened[1]

    @property
    def full_ledger(self) -> Ledger:
        """The ledger of a cache that stores every token."""
        assert isinstance(self.ledger, Ledger)
        return self.ledger

    @property
    def evicting_ledger(self) -> EvictingLedger:
        """The ledger of a cache that evicts tokens."""
        assert isinstance(self.ledger, EvictingLedger)
        return self.ledger

    def steps_on_device(self, keys: Tensor) -> bool:
        """Whether this forward is a step that the device does by itself. keys: (B, H, Q, D) of one of its layers."""
        if self.forward.on_device is None:
            self.forward.on_device = device_steps.can_step(self, keys)
            if self.forward.on_device and not hf.capturing():
                self.record.stage = "layers"
        return self.forward.on_device

    def settle(self) -> None:
        """Bring the host's ledger up to date with the steps that the device did by itself."""
        if hf.capturing() or torch.compiler.is_compiling():
            return
        if self.offloading_layers:
            device_steps.await_offloading(self)
        self.record.check_packed()
        try:
            device_steps.catch_up(self)
        except KVCalError:
            self.record.warned = True
            raise

    @property
    def contents(self) -> static_storage.Contents:
        """What the ledger says now that layers hold."""
        ledger = self.full_ledger
        if self._contents is None or not self._contents.of(ledger):
            self._contents = static_storage.Contents(ledger)
        return self._contents

    def note_decoded(self, layer: LayerProtocol, why: str) -> None:
        """Count a step that fell back from a kernel to the model's attention. The first such layer counts for all."""
        if next(one for one in self.compressed_layers if one.paths.refused is None).index == layer.index:
            counts = self.record.decoded_steps
            counts[why] = counts.get(why, 0) + 1

    def on_keys_of(self, dtype: torch.dtype) -> None:
        """Let all layers expect the dtype of a layer's first keys, if these are the cache's first."""
        if not any(layer.is_initialized for layer in self.compressed_layers):
            for layer in self.compressed_layers:
                layer.expect(dtype)

    def on_refused(self, layer: LayerProtocol) -> None:
        """Called when the first keys of a layer show that it does not take the kernel."""
        assert layer.paths.refused is not None
        if layer.paths.kind is choose.PathKind.DECODED:
            choose.warn_of_shape(self.kernels, layer.codecs, layer.device, layer.paths.refused)
            if self.require_kernels:
                choose.require([(layer.index, layer.paths.refused)])
        self.grow_on_host()

    def grow_on_host(self) -> None:
        """Let the storage of all layers grow on the host from now on."""
        for layer in self.compressed_layers:
            layer.grow_on_host()

    def publish(self) -> None:
        """Let the device have what the host changed."""
        for layer in self.compressed_layers:
            layer.publish()

    def on_forward(self, mask: hf.Mask, weights: bool = False) -> None:
        """Take a forward's mask and whether it asks for weights. The methods on_* are those of hf.hooks.Listener."""
        if weights and any(layer.paths.refused is None for layer in self.compressed_layers):
            notices.warn("output_attentions: the fused kernel gives no attention weights")
        self.settle()
        full = full_mask(mask, self.ledger.columns, self.max_length is not None)
        custom = full is not None and full.ndim != 2
        self.forward = Forward(self.scheme, self.model, full, custom, weights)
        self.stored_rope.begin()
        for layer in self.compressed_layers:
            layer.drop_hand_off()
        if self.scheme.selection is not None:
            planning.check_mask(full)

    def on_rotary(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        self.forward.rotate_by(positions, cos, sin)

    def on_keys(self, layer: int, keys: Tensor) -> None:
        self.forward.keys_before[layer] = self.layers[layer].site.gather(keys)

    def on_queries(self, layer: int, queries: Tensor) -> None:
        self.forward.queries_before[layer] = self.layers[layer].site.gather(queries)

    @torch.no_grad()
    def on_attention(self, layer: int, hidden: Tensor, mask: Tensor | None) -> Tensor | None:
        """The mask (B, 1, query, remaining + query) of tokens that remain, instead of the model's of all columns."""
        target = self.layers[layer]
        assert isinstance(target, KVCalLayer)
        plan = planning.plan_of(self, target, hidden.shape[0], hidden.shape[1], hidden.device)
        assert isinstance(plan, EvictingPlan)
        if plan.first:
            return mask
        return self.forward.remaining_mask(target.site, plan, hidden)

    def on_done(self) -> None:
        plan, self.record.torn = self.forward.begun, self.scheme.selection is not None
        if isinstance(plan, EvictingPlan) and plan.flush:
            evict(self, plan)
        self.record.torn = False
        self.record.check_packed()
        self.record.stage = self.record.stage and "head"

    def on_returned(self) -> None:
        self.record.stage = None

    def on_broken(self) -> None:
        self.record.broken = self.record.broken or self.record.stage is not None
        for layer in self.compressed_layers:
            layer.drop_hand_off()

    def check_use(self) -> None:
        """Check before a compiled step, which no hook tells, what the hooks check before other forwards."""
        if not hf.capturing():
            if (replaced := self.hooks.replaced) is not None:
                raise KVCalError(replaced)
            self.record.check_returned()

    def add_mass(self, mass: Tensor) -> None:
        """Add the attention (B, past + query) that one layer's queries gave to each slot."""
        if self.head_shard is not None and self.processes > 1:  # every process evicts the same tokens
            mass = self.head_shard.add(mass)
        self.evicting_ledger.add(mass)

    def plan_for(self, layer: LayerProtocol, keys: Tensor) -> Plan:
        """The current forward's plan on the device of the keys; the call's first layer makes it."""
        return planning.plan_of(self, layer, keys.shape[0], keys.shape[2], keys.device)

    def rope(self, columns: slice, like: Tensor) -> tuple[Tensor, Tensor]:
        """The cos and sin of these columns of every row, in the dtype and on the device of `like`."""
        assert self.ledger.positions is not None
        return self.forward.tables(self.ledger.positions, columns, like)

    def rope_now(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The cos and sin that the model rotated the current call's keys by, on the device of `like`."""
        return self.forward.rotation(like)

    def old_context(self, layer: int) -> Context:
        """What the layers below decoded for this one of the blocks that were packed before the current call."""
        target = self.layers[layer]
        assert isinstance(target, KVCalLayer)
        return self.forward.chain.context("old", layer, target.device)

    @property
    def uneven(self) -> str | None:
        """Why no kernel rotates the keys that are stored before RoPE; None if one does, as far as measured."""
        return self.stored_rope.why_uneven(self.full_ledger)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest -tokens_to_remove columns, exactly in the recent window, below it by whole blocks."""
        cropping.crop(self, int(tokens_to_remove))  # assisted decoding of Transformers 5.17 counts in tensors

    def leave_forward(self) -> None:
        """Drop the last call's Forward, as tokens come or go otherwise than by a call."""
        self.forward = Forward(self.scheme, self.model, custom_mask=self.forward.custom_mask)
        self.mask_history.forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx, lambda layer: layer.reorder_cache(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices, lambda layer: layer.batch_select_indices(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.settle()
        self.record.check_returned()
        rows = torch.arange(self.ledger.batch, device="cpu").repeat_interleave(repeats)
        self._select(rows, lambda layer: layer.batch_repeat_interleave(repeats))

    def _select(self, rows: Tensor, plain: Callable[[AnyLayer], None]) -> None:
        """Continue with these batch rows. plain: selects them in a layer of Transformers."""
        self.settle()
        self.record.check_returned()
        if self.ledger.columns:
            self.ledger.select(rows)
        for layer in self.layers:
            if isinstance(layer, KVCalLayer):
                layer.select_rows(rows, self.ledger.widths)
            else:
                plain(layer)
        self.leave_forward()
        self.publish()

    def reset(self) -> None:
        super().reset()
        self.ledger.clear()
        self.hooks.forget()
        self.record = Record()
        self.leave_forward()

    def close(self) -> None:
        """Remove every hook from the model; the cache cannot be used afterwards.

        Raises KVCalError where steps since the last call lost something (a NaN, a block beyond max_length), unless an
        error has said so or is under way.
        """
        was = self.hooks.closed
        self.hooks.close()
        self._seams.close()
        if not was and not self.record.warned and sys.exc_info()[0] is None and not hf.capturing():
            self.record.check_packed()
            device_steps.heed_all(self)

    def __enter__(self) -> KVCalCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, object]) -> KVCalCache:
        """An independent cache on the same model with the same contents, for reusing a prompt."""
        self.settle()
        options: CacheOptions = {"strict": self.strict, "offload": self.offloading_layers, "remember": self.remember}
        options |= {"kernels": self.kernels, "max_length": self.max_length, "require_kernels": self.require_kernels}
        twin = KVCalCache(self.whole_scheme, self.model, **options)
        copying.fill(twin, self, memo)
        return twin

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises KVCalError: a cache is hooks in one model, and a shallow copy would share its layers."""
        raise KVCalError(
            "a KVCalCache cannot be pickled nor copied by copy.copy: it belongs to the model in this process; save the "
            "bundle and run the prompt again, or take copy.deepcopy(cache) for a second one on the same model"
        )

    def nbytes(self, part: str | None = None) -> int:
        """Bytes of real storage, in all or of one part; those of predictors and grids are resident_bytes().

        Parts are "packed" (codes, scales, zeros, norms), "window" (sinks and recent tokens, and layers that are not
        compressed), "bookkeeping" and "decoded" (only with remember).
        """
        if part is None:
            return sum(report.nbytes(self, name) for name in report.PARTS)
        return report.nbytes(self, part)

    def packed_values(self) -> int:
        """How many numbers the packed blocks stand for; those of evicted tokens do not count."""
        self.settle()
        return report.packed_values(self)

    def bits_per_value(self) -> float:
        """Stored bits of the packed blocks over the values they stand for; nan while nothing is packed."""
        values = self.packed_values()
        return self.nbytes("packed") * 8 / values if values else float("nan")

    def paper_bits(self) -> float:
        """Bits per value as the methods' papers count them; of the packed blocks where their sizes differ."""
        if not self.scheme.ragged:
            return self.scheme.paper_bits()
        self.settle()
        return self.scheme.paper_bits_of({layer.index: layer.packed for layer in self.compressed_layers})

    def resident_bytes(self) -> int:
        """Bytes of predictors, grids and signs that serve the cache, whatever its length."""
        return self.scheme.resident_bytes()

    def describe(self) -> dict[str, Any]:
        """What every layer does, by which path and why; and what happened so far.

        auto: what a preset that looks at the model chose, and why. unpacked: where nothing is packed yet, a sentence
        that says how many tokens it takes; None from the first packed block on.
        returned_by_crop: tokens that came back from packed blocks, decoded. unforgotten_by_statistics: what crops
        removed but run-time statistics still show: `tokens` further back than they can forget, and `blocks` packed when
        the removed tokens were in the cache. All zero: the cache is, to the byte, one that never had the removed
        tokens. decoded_steps: how many steps a kernel that reads packed blocks had to leave to the model's own
        attention, by the reason.
        """
        self.settle()
        return report.describe(self)

    def __repr__(self) -> str:
        layers = f"{len(self.compressed_layers)} of {len(self.layers)} layers compressed"
        return f"KVCalCache({self.ledger.columns} tokens, {layers})"


also_named(KVCalCache, OF_CACHES)
