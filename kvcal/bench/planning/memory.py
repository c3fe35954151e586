"""Memory of a whole model with a cache of one scheme, from bytes alone. Nothing here imports torch.

`kvcal plan` and the projections of `kvcal bench` use it. Constants that are not a count of bytes are measured, and the
line next to each says where.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ...models.geometry import Geometry

# The CUDA context, code of kernels and the libraries' workspaces: what the driver reports in use besides weights and
# an FP16 cache whose tensors fill the allocator's pieces exactly (docs/benchmarks/generation-steps-2246769.json, H200).
RUNTIME = 1.015e9
# Of all tensors' bytes: what torch's allocator rounds up. The three packed schemes of the same file had 0.2 to 0.5 %
# more in use than bytes and RUNTIME say.
ALLOCATOR = 0.005
CHUNK = 2048  # tokens of a prompt that is fed in chunks
STEP_TOKENS = 16  # new tokens of a call for which a static cache reserves memory (paths/fused.QUERIES)
PARTS, FEW_PARTS = 131, 14  # programs whose results a step merges: of one row of 128k tokens, of many rows
KERNEL_BLOCK = 32  # tokens


@dataclass(frozen=True)
class Model:
    """Bytes that do not depend on the scheme. weights: all of them; width: of a number of activations, keys and values.
    parameters: how many weights there are; None: as many as `weights` holds at that width. activation: of a token in a
    forward; row: of a row whatever its tokens, its logits.
    """

    geometry: Geometry
    weights: float
    width: int
    parameters: float | None = None

    @property
    def activation(self) -> float:
        """The widest place of a layer.

        It has the residual stream and its norm, next to the wider of two sets. One is three MLP rows: gate, up and
        their product. The other is the query and what rotating it needs, five of its width, with keys and values.
        """
        geometry = self.geometry
        attention = 5 * geometry.heads * geometry.head_dim + 4 * geometry.kv_width
        return self.width * (2.0 * geometry.hidden + max(3 * geometry.intermediate, attention))

    @property
    def logits(self) -> float:
        """Bytes of a row's logits: in the model's dtype, as the head gives them, and in float32, as sampling takes
        them.
        """
        return self.geometry.vocab * (self.width + 4.0)

    @property
    def layer_token(self) -> float:
        """Keys and values of one token and layer, uncompressed."""
        return 2.0 * self.geometry.kv_width * self.width

    @property
    def read_bytes(self) -> float:
        """Bytes of weights that a decode step reads: the table of input embeddings is not, unless the head is the
        same.
        """
        return self.weights - self._table * self.width

    @property
    def multiplied(self) -> float:
        """Parameters that a token of a decode step is multiplied with, however they are stored: all but that table."""
        parameters = self.weights / self.width if self.parameters is None else self.parameters
        return parameters - self._table

    @property
    def _table(self) -> int:
        return 0 if self.geometry.tied else self.geometry.vocab * self.geometry.hidden

    def prompt_operations(self, length: int) -> float:
        """Multiplications and additions of a row's prompt of so many tokens.

        Every token goes through all weights except for the head, which the last one alone takes. Causal attention goes
        over half of the prompt's square, or over the window.
        """
        geometry = self.geometry
        head = geometry.vocab * geometry.hidden
        body = self.multiplied - head
        window = min(length, geometry.sliding_window or length)
        full_pairs, sliding_pairs = length * (length + 1) / 2, window * (length - (window - 1) / 2)
        full_layers = geometry.layers - geometry.sliding_layers
        pairs = full_layers * full_pairs + geometry.sliding_layers * sliding_pairs
        return 2 * (body * length + head) + 4 * geometry.heads * geometry.head_dim * pairs


@dataclass(frozen=True)
class Windows:
    """Tokens of a row that stay exact, and tokens that are packed together; block 0: nothing is packed."""

    sink: int = 0
    recent: int = 0
    block: int = 0


@dataclass(frozen=True)
class Parts:
    """Bytes in use at a time, by what they are."""

    weights: float
    packed: float
    windows: float
    constants: float
    activations: float
    decoded: float
    runtime: float
    allocator: float

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class Load:
    """One scheme on one model. layers: compressed ones, of which a row's block takes `block_bytes` in all; sliding
    layers keep caches of their own. static: whether storage is allocated once, for as many tokens as are planned.
    decodes: whether the layer that attends is decoded whole first.
    """

    model: Model
    windows: Windows
    block_bytes: float = 0.0
    constants: float = 0.0
    decodes: bool = False

    @property
    def layers(self) -> int:
        return self.model.geometry.layers - self.model.geometry.sliding_layers

    @property
    def static(self) -> bool:
        return bool(self.windows.block) and not self.decodes

    def blocks(self, length: int) -> int:
        """Packed blocks of a row of so many tokens."""
        windows = self.windows
        return max(0, (length - windows.sink - windows.recent) // windows.block) if windows.block else 0

    def packed_bytes(self, length: int) -> float:
        """Bytes of a row's packed blocks, over all layers."""
        return self.blocks(length) * self.block_bytes

    def window_bytes(self, length: int) -> float:
        """Bytes of a row's exact tokens, over all layers; those of sliding layers too."""
        exact = length - self.blocks(length) * self.windows.block
        return exact * self.layers * self.model.layer_token + self._sliding_bytes(length)

    def _sliding_bytes(self, length: int, new: int = 0) -> float:
        geometry = self.model.geometry
        return geometry.sliding_layers * min(length, (geometry.sliding_window or 0) + new) * self.model.layer_token

    def cache_bytes(self, length: int) -> float:
        """Bytes that a row of so many tokens takes in a cache that grows, spare capacity left out."""
        return self.packed_bytes(length) + self.window_bytes(length)

    def _storage(self, length: int) -> tuple[float, float]:
        """(packed, windows): bytes of a row of a cache that is made for so many tokens; of one that grows, its
        window as full as it gets.
        """
        windows = self.windows
        if not self.static:
            exact_tokens = min(length, windows.sink + windows.recent + windows.block - 1) if windows.block else length
            grown = exact_tokens * self.layers * self.model.layer_token
            return self.packed_bytes(length), grown + self._sliding_bytes(length)
        ring = -(-(windows.recent + windows.block - 1 + STEP_TOKENS) // KERNEL_BLOCK) * KERNEL_BLOCK
        exact = (windows.sink + ring) * self.layers * self.model.layer_token
        return max(1, self.blocks(length)) * self.block_bytes, exact + self._sliding_bytes(length)

    def decode(self, batch: int, length: int) -> Parts:
        """A decode step of `batch` rows of so many tokens."""
        transient = batch * (self.model.activation + self.model.logits)
        if self.decodes:
            return self._parts(batch, length, transient, batch * length * self.model.layer_token)
        return self._parts(batch, length, transient + self._merged(batch, length), 0.0)

    def _merged(self, batch: int, length: int) -> float:
        """What the fused kernel's programs leave for one another, reserved for calls of STEP_TOKENS tokens."""
        if not self.static:
            return 0.0
        geometry = self.model.geometry
        most = batch * (1 + math.isqrt(15 * max(1, length // KERNEL_BLOCK)))
        parts = min(max(FEW_PARTS * batch, PARTS), most)
        return 4.0 * geometry.heads * STEP_TOKENS * geometry.head_dim * parts

    def prefill(self, batch: int, length: int, chunk: int | None = None) -> Parts:
        """A prompt of so many tokens, in one forward or in chunks, at its last layer.

        The layer's keys and values lie next to their copies while they are packed. Of a chunk, what came before is
        decoded.
        """
        new = length if chunk is None else min(length, chunk)
        copies = 2 if self.windows.block else 0
        transient = batch * (new * (self.model.activation + copies * self.model.layer_token) + self.model.logits)
        earlier = length if new < length and self.windows.block else 0
        return self._parts(batch, length, transient, batch * earlier * self.model.layer_token, new)

    def _parts(self, batch: int, length: int, activations: float, decoded: float, new: int = 0) -> Parts:
        """The parts of a forward's memory, in bytes. new: tokens of the forward, which Transformers' sliding layers
        hold in full until the next one.
        """
        packed, windows = (batch * size for size in self._storage(length))
        windows += batch * (self._sliding_bytes(length, new) - self._sliding_bytes(length))
        tensors = self.model.weights + packed + windows + self.constants
        return Parts(
            self.model.weights, packed, windows, self.constants, activations, decoded, RUNTIME, ALLOCATOR * tensors
        )

    def peak(self, batch: int, length: int, chunk: int | None = None) -> float:
        """Bytes that generation needs: the larger of prefill and decode step."""
        return max(self.decode(batch, length).total, self.prefill(batch, length, chunk).total)


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number from 1 to `limit` that fits, 0 for none; whatever is smaller than one that fits does, too."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
