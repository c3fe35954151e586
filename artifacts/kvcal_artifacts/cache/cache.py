"""KVCalCache: a Transformers cache whose tokens are sinks, packed blocks and a recent window.

Prefill attends to the exact keys and values of the current call; what leaves the recent window is packed in the same
update, for later calls. Decode steps read packed blocks by the fused kernel where paths/choose.py says so; else, on
the reference path, blocks are decoded for the attention of the current call and dropped again.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from .. import hf
from ..codecs import Context
from ..errors import KVCalError
from ..paths import choose, codebook, dequantised, fused, notices
from ..scheme import Scheme
from ..storage.eviction import EvictingLedger, EvictingPlan
from ..storage.ledger import Ledger, Plan
from . import copying, cropping, device_steps, planning, report, setting_up, static_storage
from .evicting_layer import EvictingLayer, evict
from .forward import Forward
from .layer import KVCalLayer, Watch
from .masks import MaskHistory, full_mask
from .record import Record
from .rope import StoredRope


class KVCalCache(Cache):
    """A cache for `model.generate(past_key_values=cache)` that really holds what its scheme says.

    scheme: windows, frame and codecs of each layer. model: the model it will serve; hooks are put on it until close(),
    the end of a `with` block, or the cache's own end of life. strict: a crop that reaches into packed blocks raises
    before anything changes. offload: each layer's storage rests in host memory between its turns. remember: decoded blocks
    are kept beside the packed ones (nbytes("decoded")) in place of decoding them at each call: for evaluation, faster and
    not smaller.

    kernels: "auto": decode steps of 1 to 16 tokens read packed blocks by the fused Triton kernel on a GPU where it passes
    its check; "off": never; "triton": anywhere (on a CPU in Triton's interpreter); "torch": by its reference in torch.
    max_length: columns that a row can have; layers that take the kernel then have all their storage from the first call on,
    and decode steps of up to 16 tokens work under a CUDA graph and generate()'s compiled forward (`is_compileable`).
    require_kernels: raises errors.KernelsUnavailable unless every compressed layer takes the kernel, or another decodes it,
    here as far as it can be known, else when the first keys come.
    """

    layers: list[Any]
    watch: Watch | None = None
    auto: dict[str, Any] | None = None  # what a preset of auto.py chose, and why

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
        config = setting_up.checked_config(model, scheme)
        self.caveats = hf.caveats(config)
        for caveat in self.caveats:
            warnings.warn(caveat, stacklevel=2)
        if max_length is not None:
            self.caveats = [*self.caveats, *device_steps.caveats(scheme)]
        self.scheme, self.strict, self.offloading_layers, self.remember = scheme, strict, offload, remember
        self.model, self.max_length, self.kernels, self.require_kernels = model, max_length, kernels, require_kernels
        self._sites = hf.attention_sites(model)
        hf.check_frame([self._sites[index] for index in scheme.compressed], scheme.frame)
        before = scheme.frame == "pre_rope"
        self.stored_rope = StoredRope(model, hf.rotary_width(model) if before and kernels != "off" else 0)
        plain = DynamicCache(config=config).layers
        kind = KVCalLayer if scheme.selection is None else EvictingLayer
        layers = [
            kind(self, i, pair, self._sites[i]) if pair is not None else plain[i]
            for i, pair in enumerate(scheme.layers)
        ]
        self.growing: str | None = "without max_length, storage grows on the host"
        if max_length is not None:
            layers, self.growing = device_steps.static_layers(self, layers)
        super().__init__(layers=layers)
        # new tokens of a call that the kernels of all layers take
        self.most_queries = min([fused.QUERIES, *(layer.paths.most_queries for layer in self.own_layers)])
        if require_kernels:
            setting_up.require_kernels(self)
        self.record, self.forward = Record(), Forward(scheme, model)
        self.ledger: Any = Ledger(scheme.windows)  # or EvictingLedger, which has the same methods
        if scheme.selection is not None:
            self.ledger = EvictingLedger(scheme.windows, scheme.selection)
            for layer in self.own_layers:
                hf.check_selectable(layer.site)
        self._held: Any = None
        self.steps: dict[torch.device, Any] = {}  # static.Steps of the layers on a device
        self._workspaces: dict[tuple[torch.device, bool], Any] = {}
        self._rooms: dict[torch.device, dequantised.Rooms] = {}
        self.hooks = setting_up.hooks(self)
        self._seams = hf.Seams(self, [layer.site for layer in self.own_layers if layer.paths.seamed])
        self._opened: tuple[Tensor, bool] | None = None  # of the ledger's blocks
        self.mask_history = MaskHistory(compares=scheme.selection is None)

    @property
    def why_not_compileable(self) -> str | None:
        """Why decode steps are not left to the device as a whole; None if they are. A guess until keys have come."""
        refused = (f"{layer.title}: {layer.paths.refused}" for layer in self.own_layers if layer.paths.refused)
        return self.growing or next(refused, None) or (self.uneven if self.stored_rope.rotary else None)

    def why_not_compiled(self, query: int) -> str:
        """Why a call of so many tokens cannot run compiled, and what to do."""
        return device_steps.why_not_compiled(self, query)

    @property
    def is_compileable(self) -> bool:
        return self.why_not_compileable is None

    def grow(self, why: str) -> None:
        """With max_length: a layer cannot leave its steps to the device where it turned out to be."""
        self.growing = self.growing or why
        self.leave_rooms()

    @property
    def own_layers(self) -> list[KVCalLayer]:
        return [layer for layer in self.layers if isinstance(layer, KVCalLayer)]

    @property
    def opened(self) -> bool:
        """Whether every row has packed blocks, as far as the host knows; what it has not yet heard of are more."""
        blocks: Tensor = self.ledger.blocks  # never changed in place
        if self._opened is None or self._opened[0] is not blocks:
            self._opened = blocks, len(blocks) > 0 and bool((blocks > 0).all())
        return self._opened[1]

    # With max_length.

    def steps_on_device(self, keys: Tensor) -> bool:
        """Whether this forward, of which a layer has keys (B, H, Q, D), is a step that the device does by itself."""
        if self.forward.on_device is None:
            self.forward.on_device = device_steps.can_step(self, keys)
            if self.forward.on_device and not hf.capturing():
                self.record.stage = "layers"
        return self.forward.on_device

    def settle(self) -> None:
        """Let the host know of the steps that the device did by itself."""
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
    def held(self) -> Any:
        """static.Held of the ledger as it is, for all layers."""
        if self._held is None or not self._held.of(self.ledger):
            self._held = static_storage.Held(self.ledger)
        return self._held

    def note_decoded(self, layer: KVCalLayer, why: str) -> None:
        """A step of a layer that a kernel reads was not the kernel's. The first such layer speaks for all."""
        if next(one for one in self.own_layers if one.paths.refused is None) is layer:
            counts = self.record.decoded_steps
            counts[why] = counts.get(why, 0) + 1

    def on_keys_of(self, dtype: torch.dtype) -> None:
        """The first keys of a layer come: if they are the cache's first, all layers expect their dtype."""
        if not any(layer.is_initialized for layer in self.own_layers):
            for layer in self.own_layers:
                layer.expect(dtype)

    def on_refused(self, layer: KVCalLayer) -> None:
        """The first keys of a layer show that it does not take the kernel."""
        assert layer.paths.refused is not None
        if layer.paths.reader is None:
            choose.warn_of_shape(self.kernels, layer.codecs, layer.device, layer.paths.refused)
            if self.require_kernels:
                choose.require([(layer.index, layer.paths.refused)])
        self.leave_rooms()

    def leave_rooms(self) -> None:
        for layer in self.own_layers:
            layer.leave_room()

    def publish(self) -> None:
        for layer in self.own_layers:
            layer.publish()

    # What the hooks tell.

    def on_forward(self, mask: Tensor | Mapping[str, Tensor | None] | None, weights: bool = False) -> None:
        if weights and any(layer.paths.refused is None for layer in self.own_layers):
            notices.warn("output_attentions: the fused kernel gives no attention weights")
        self.settle()
        mask = full_mask(mask, self.ledger.columns, self.max_length is not None)
        custom = mask is not None and mask.ndim != 2
        self.forward = Forward(self.scheme, self.model, mask, custom, weights)
        self.stored_rope.begin()
        for layer in self.own_layers:
            layer.drop_turn()
        if self.scheme.selection is not None:
            planning.check_mask(mask)

    def on_rotary(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        self.forward.rotate_by(positions, cos, sin)

    def on_keys(self, layer: int, keys: Tensor) -> None:
        self.forward.keys_before[layer] = keys

    def on_queries(self, layer: int, queries: Tensor) -> None:
        self.forward.queries_before[layer] = queries

    @torch.no_grad()
    def on_attention(self, layer: int, hidden: Tensor, mask: Tensor | None) -> Tensor | None:
        """The mask of what is kept, (B, 1, query, kept + query), in the place of the model's of all columns."""
        target = self.layers[layer]
        assert isinstance(target, KVCalLayer)
        plan = planning.plan_of(self, target, hidden.shape[0], hidden.shape[1], hidden.device)
        assert isinstance(plan, EvictingPlan)
        if plan.first:
            return mask
        return self.forward.kept_mask(target.site, plan, hidden)

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
        for layer in self.own_layers:
            layer.drop_turn()

    def check_use(self) -> None:
        """What the hooks check before a forward, at a step that is compiled, of which they do not hear."""
        if not hf.capturing():
            if (replaced := self.hooks.replaced) is not None:
                raise KVCalError(replaced)
            self.record.check_returned()

    # What layers ask for.

    def add_mass(self, mass: Tensor) -> None:
        """Attention (B, past + query) that one layer's queries gave to each slot."""
        self.ledger.add(mass)

    def plan_for(self, layer: KVCalLayer, keys: Tensor) -> Plan:
        """The current forward's plan, made when its first layer comes, on the device of the keys."""
        return planning.plan_of(self, layer, keys.shape[0], keys.shape[2], keys.device)

    def workspace(self, device: torch.device, vector: bool = False) -> Any:
        """Memory that the launches of this cache's layers share on a device; vector: of those over vector codes."""
        if (device, vector) not in self._workspaces:
            space = codebook.workspace(self.kernels, device, self.max_length is not None) if vector else None
            self._workspaces[device, vector] = space if vector else fused.workspace(self.kernels, device)
        return self._workspaces[device, vector]

    def rooms(self, device: torch.device) -> dequantised.Rooms:
        """Storage for the layers on a device that are read one after the other."""
        return self._rooms.setdefault(device, dequantised.Rooms())

    @property
    def returned_tokens(self) -> int:
        """How many tokens crops have brought back from packed blocks, decoded."""
        return self.record.returned_tokens

    @property
    def shared_bytes(self) -> int:
        """Bytes of the storage that layers take turns in, by which blocks are dequantised."""
        return sum(shared.nbytes for shared in self._rooms.values())

    def rope(self, columns: slice, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin for these columns of every row, in the dtype and on the device of `like`; once a forward."""
        assert self.ledger.positions is not None
        return self.forward.tables(self.ledger.positions, columns, like)

    def rope_now(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin that the model rotated the current call's keys by, on the device of `like`."""
        return self.forward.rotation(like)

    def old_context(self, layer: int) -> Context:
        """What layers below left for this one of the blocks that were packed before the current call."""
        target = self.layers[layer]
        assert isinstance(target, KVCalLayer)
        return self.forward.chain.context("old", layer, target.device)

    @property
    def uneven(self) -> str | None:
        """Why no kernel rotates the keys that are held, stored before RoPE; None if it does, as far as is known."""
        return self.stored_rope.why_uneven(self.ledger)

    # What Transformers asks for.

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest -tokens_to_remove columns: exact inside the recent window, to the block edge below it."""
        cropping.crop(self, int(tokens_to_remove))  # assisted decoding of Transformers 5.17 counts in tensors

    def leave_forward(self) -> None:
        """Tokens come or go otherwise than by a call: nothing that the last call was told holds any more."""
        self.forward = Forward(self.scheme, self.model, custom_mask=self.forward.custom_mask)
        self.mask_history.forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx, lambda layer: layer.reorder_cache(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices, lambda layer: layer.batch_select_indices(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.settle()
        self.record.check_returned()
        rows = torch.arange(self.ledger.batch).repeat_interleave(repeats)
        self._select(rows, lambda layer: layer.batch_repeat_interleave(repeats))

    def _select(self, rows: Tensor, plain: Any) -> None:
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
        """Remove every hook from the model. The cache cannot be used afterwards. Raises KVCalError where steps since the last
        call lost something (a NaN, a block beyond max_length), unless an error has said so or is under way.
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

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCalCache:
        """An independent cache on the same model with the same contents, for reusing a prompt."""
        self.settle()
        kind: dict[str, Any] = {"strict": self.strict, "offload": self.offloading_layers, "remember": self.remember}
        kind |= {"kernels": self.kernels, "max_length": self.max_length, "require_kernels": self.require_kernels}
        twin = KVCalCache(self.scheme, self.model, **kind)
        copying.fill(twin, self, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises KVCalError: a cache is hooks in one model, and a shallow copy would share its layers."""
        raise KVCalError(
            "a KVCalCache cannot be pickled nor copied by copy.copy: it belongs to the model in this process; save the bundle "
            "and run the prompt again, or take copy.deepcopy(cache) for a second one on the same model"
        )

    # What people ask for.

    def nbytes(self, part: str | None = None) -> int:
        """Bytes of real storage: "packed" (codes, scales, zeros, norms), "window" (sinks and recent tokens, and layers
        left uncompressed), "bookkeeping", "decoded" (only with remember); None for their sum. Predictors and grids:
        resident_bytes().
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
        """As the methods' own papers count bits a value; of the packed blocks where their sizes differ."""
        if not self.scheme.ragged:
            return self.scheme.paper_bits()
        self.settle()
        return self.scheme.paper_bits_of({layer.index: layer.packed for layer in self.own_layers})

    def resident_bytes(self) -> int:
        """Bytes of predictors, grids and signs that serve the cache, whatever its length."""
        return self.scheme.resident_bytes()

    def describe(self) -> dict[str, Any]:
        """What every layer does, by which path and why; and what happened so far.

        auto: what a preset that chooses codecs chose, and why. unpacked: where nothing is packed yet, how many tokens it
        takes.
        returned_by_crop: tokens that came back from packed blocks, decoded. unforgotten_by_statistics: what crops removed but
        run-time statistics still show: `tokens` further back than they can forget, and `blocks` packed when the removed tokens
        were there. All zero: the cache is, to the byte, one that never had the removed tokens. decoded_steps: how many steps a
        kernel that reads packed blocks had to leave to the model's own attention, by the reason.
        """
        self.settle()
        return report.describe(self)

    def __repr__(self) -> str:
        return (
            f"KVCalCache({self.ledger.columns} tokens, {len(self.own_layers)} of {len(self.layers)} layers compressed)"
        )
