"""Launches of the attention kernel: checked arguments, compiled kernels, and the memory in which programs leave
results.
"""

from __future__ import annotations

import ctypes
import functools
from operator import attrgetter

import torch
from torch import Tensor
from triton.compiler.compiler import make_backend

from ...layout import Blocks, Form
from ...layout.rope import Rope
from ...triton import Kernel, Prepared, Ready, interpreted
from ..checks import Exact, check_arguments, check_layouts
from ..plan import (
    ALONE,
    FEW,
    MOST_AT_ONCE,
    MOST_WARPS,
    SHORT,
    SPARE,
    Launch,
    Plan,
    Settings,
    launches,
    merge_width_of,
    plan,
    ring_bytes,
    settings,
)
from .kernel import attend_kernel


def chosen(
    keys: Form, values: Form, rows: int, before_rope: bool, groups: int, capacity: int, device: torch.device
) -> Launch:
    """Return the launch for `groups` of query rows with capacity for so many blocks each. Where blocks are few, most of
    the time goes to what comes before and after them: four warps leave their program one split, and those of a group
    are merged in one wait for memory instead of two or three. Many groups have few splits anyway. The limits were timed
    on an H200 (docs/benchmarks/decode_attention.md); those of other GPUs follow by their count of multiprocessors,
    untimed. A capacity that grows into these limits, or out of them, takes another compiled kernel from there on.
    """
    choices, processors = launches(keys, values, rows, before_rope), processors_of(device)
    few = 4 * groups <= processors and capacity >= 64 and groups * capacity < FEW * processors
    return choices[-1] if few else choices[0]


def attend(
    q: Tensor,
    keys: Blocks,
    values: Blocks,
    blocks: Tensor,
    sink: tuple[Tensor, Tensor, Tensor],
    recent: tuple[Tensor, Tensor, Tensor],
    scaling: float,
    launch: Launch | None = None,
    workspace: Workspace | None = None,
    packed_q: Tensor | None = None,
    ring: bool = False,
    rope: Rope | None = None,
) -> Tensor:
    """Compute `reference.attend` for q, sink and recent of one dtype, float16 or bfloat16, and every tensor contiguous:
    ValueError says what is not. The capacity of blocks must be whole groups of tokens; scales of values in outer groups
    are not negative. A separate `workspace` is needed where launches overlap, and under a CUDA graph.
    """
    packed_q = q if packed_q is None else packed_q
    if packed_q.data_ptr() % 4:  # two numbers are read at a time
        aligned = packed_q.clone()
        q, packed_q = aligned if packed_q is q else q, aligned
    k_table, k_sign = _of_grid(keys)
    v_table, v_sign = _of_grid(values)
    same = keys.grid is not None and k_table.data_ptr() == v_table.data_ptr()
    inputs = (q, packed_q, blocks, *sink, *recent)
    key = (
        keys.launch_key,
        values.launch_key,
        *map(_CHECKED, inputs),
        packed_q is q,
        same,
        launch,
        ring,
        None if rope is None else rope.launch_key,
    )
    prepared = _PREPARED.get(key)
    if reusable := prepared is not None and all(map(Tensor.is_contiguous, inputs)):
        ready, take, numbers = prepared
    else:
        check_arguments(q, packed_q, keys, values, blocks, sink, recent, rope)
    out = torch.empty_like(q)
    before = (
        packed_q,
        q,
        out,
        keys.words,
        keys.scale,
        values.words,
        values.scale,
        *sink[:2],
        *recent[:2],
        blocks,
        sink[2],
        recent[2],
    )
    behind = (
        k_table,
        v_table,
        k_sign,
        v_sign,
        keys.words if keys.order is None else keys.order,
        *_rope_words(rope, keys.scale),
    )
    if not reusable:
        fresh = _prepared(q, keys, values, sink, recent, launch, same, ring, rope, before, behind)
        ready, take, numbers = _PREPARED[key] = fresh
    tensors = (*before, *(workspace or Workspace(q.device)).take(*take), *behind)
    ready(tensors, *numbers, scaling * LOG2E, *(1.0 if b.grid is None else b.grid.unit for b in (keys, values)))
    return out


_CHECKED = attrgetter("shape", "dtype", "device")  # with contiguity all that is checked of a tensor
LOG2E = 1.4426950408889634
_PREPARED: Prepared[tuple[Ready, tuple[int, ...], tuple[int, ...]]] = Prepared()
PROGRAMS_AT_ONCE: dict[int, int] = {}  # on a multiprocessor, of compiled kernels that were examined, which stay


def _prepared(
    q: Tensor,
    keys: Blocks,
    values: Blocks,
    sink: Exact,
    recent: Exact,
    launch: Launch | None,
    same: bool,
    ring: bool,
    rope: Rope | None,
    before: tuple[Tensor, ...],
    behind: tuple[Tensor, ...],
) -> tuple[Ready, tuple[int, ...], tuple[int, ...]]:
    """Return all of a launch that follows from shapes: what starts it, what it takes of a workspace, and whole numbers.
    before, behind: the launch's tensors except for the workspace's. The kernel is compiled for them, as only then it is
    known how many programs run at a time.
    """
    batch, heads, capacity = keys.words.shape[:3]
    ratio, queries, windows = q.shape[1] // heads, q.shape[2], (sink[0].shape[2], recent[0].shape[2])
    if launch is None:
        launch = chosen(keys.form, values.form, ratio * queries, rope is not None, batch * heads, capacity, q.device)
    pairs = 0 if rope is None else rope.pairs
    constants = settings(keys.form, values.form, heads, ratio, queries, launch.warps, same, pairs)
    options: dict[str, object] = {**constants, "STAGES": launch.stages, "ASM": not interpreted(), "RING": ring}
    options |= {"LONG": capacity + SPARE > SHORT, "num_warps": launch.warps, "num_stages": launch.stages}
    options |= {"maxnreg": launch.registers} if launch.registers and not interpreted() else {}
    ready = Ready(attend_kernel, (1, 1, 1), options, functools.partial(examine, ring_bytes(constants)))
    runs = 0 if rope is None or len(rope.first) == 1 else rope.first.shape[1]

    def numbers(plan: Plan, merge_width: int) -> tuple[int, ...]:
        splits, tail_tokens = plan.splits, plan.tail_tokens
        sink_splits, merges = -(-windows[0] // tail_tokens), -(-splits // merge_width)
        return capacity, *windows, *plan.numbers(), sink_splits, splits, tail_tokens, merge_width, merges, runs

    at_once = by_registers(launch)
    if q.is_cuda and not interpreted():
        some = q.new_empty(16, dtype=torch.float32)
        arguments = (
            (*before, some, some, some.view(torch.int32), *behind),
            (*numbers(Plan(2, 1, 16, ALONE), 1), 1.0, 1.0, 1.0),
        )
        at_once = PROGRAMS_AT_ONCE[id(ready.compiled(*arguments))]
    layout = _plan(constants, batch, capacity, windows, launch, at_once, q.device)
    merge_width = launch.merge_width or merge_width_of(layout.splits, constants["AT_ONCE"])
    ready.grid = (batch, heads * constants["CHUNKS"], layout.splits)
    workspace = (batch * ready.grid[1], layout.splits, constants["N"], constants["D"], merge_width)
    return ready, workspace, numbers(layout, merge_width)


def by_registers(launch: Launch) -> int:
    """Return how many programs a multiprocessor of 65536 registers runs at a time."""
    return max(1, 2048 // (launch.registers or 168) // launch.warps)


def programs_at_once(kernel: Kernel) -> int:
    """Return how many programs of a compiled and loaded kernel a multiprocessor runs at a time, by the driver's count.
    The calling thread must have the kernel's context: one that launched nothing yet has none.
    """
    count, threads = ctypes.c_int(), 32 * kernel.metadata.num_warps
    error = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(count), ctypes.c_void_p(kernel.function), threads, ctypes.c_size_t(kernel.metadata.shared)
    )
    if error:
        raise RuntimeError(f"cuOccupancyMaxActiveBlocksPerMultiprocessor: CUDA error {error}")
    return max(1, count.value)


def _rope_words(rope: Rope | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    return (unused, unused) if rope is None else (rope.first_words, rope.near_words)


def _plan(
    constants: Settings,
    batch: int,
    capacity: int,
    windows: tuple[int, int],
    launch: Launch,
    at_once: int,
    device: torch.device,
) -> Plan:
    groups = batch * constants["HEADS"] * constants["CHUNKS"]
    return plan(groups, capacity, windows, launch.warps, at_once * processors_of(device), _carried(constants), launch)


def _carried(constants: Settings) -> bool:
    """Return whether programs of packed tokens may have exact tokens, too. They may not where the channels of outputs
    lie otherwise. Before RoPE and with tiers they could, but take longer (docs/benchmarks/decode_attention.md).
    """
    keys, values = constants["KEYS"], constants["VALUES"]
    mixed = values.points and values.group > 1
    return not (mixed or constants["PAIRS"] or keys.tiers)


def reserve(
    space: Workspace,
    keys: Form,
    values: Form,
    batch: int,
    heads: int,
    ratio: int,
    capacity: int,
    windows: tuple[int, int],
    queries: int = 1,
    pairs: int = 0,
) -> None:
    """Let `space` have what a launch over exactly so many blocks of capacity needs, however many programs run at a
    time: under a CUDA graph it must not grow. A smaller capacity may need more (`chosen`). windows: capacities of sink
    and recent tokens. pairs: `Rope.pairs` of keys before RoPE.
    """
    launch = chosen(keys, values, ratio * queries, pairs > 0, batch * heads, capacity, space.counter.device)
    constants = settings(keys, values, heads, ratio, queries, launch.warps, pairs=pairs)
    device, most = space.counter.device, min(MOST_AT_ONCE, MOST_WARPS // launch.warps)
    plans = {
        _plan(constants, batch, capacity, windows, launch, at_once, device).splits for at_once in range(1, most + 1)
    }
    for splits in sorted(plans, reverse=True):
        merge_width = launch.merge_width or merge_width_of(splits, constants["AT_ONCE"])
        space.take(batch * heads * constants["CHUNKS"], splits, constants["N"], constants["D"], merge_width)


def examine(ring: int, kernel: Kernel) -> None:
    """Check a compiled kernel's layouts, and give it its ring behind the shared memory that Triton manages: launches of
    the kernel, not yet loaded, have so many bytes of shared memory more. What assembly declares is limited to 48 KB, in
    which tables of grids leave no space for a ring.
    """
    check_layouts(kernel.asm["ttgir"])
    before = kernel.metadata, kernel.packed_metadata
    if ring:
        if kernel.module is not None:
            raise RuntimeError("attend_kernel was loaded before its shared memory was enlarged; report it, please")
        kernel.metadata = kernel.metadata._replace(shared=-(-kernel.metadata.shared // 128) * 128 + ring)
        kernel.packed_metadata = make_backend(kernel.metadata.target).pack_metadata(kernel.metadata)
    try:
        kernel._init_handles()  # which gives the thread the kernel's context
        _allow(kernel)
        PROGRAMS_AT_ONCE[id(kernel)] = programs_at_once(kernel)
    except Exception:  # as it was, so that another launch can try again
        kernel.metadata, kernel.packed_metadata = before
        kernel.module = kernel.function = None
        raise


def _allow(kernel: Kernel) -> None:
    """Allow the kernel more than 48 KB of shared memory. Triton asks the driver where what Triton counts is that much;
    it does not count what assembly declares. As much as can be of a multiprocessor's memory is to be shared: what the
    rest caches is read once.
    """
    cuda, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(kernel.function)
    declared, dynamic = ctypes.c_int(), kernel.metadata.shared
    # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, _MAX_DYNAMIC_SHARED_SIZE_BYTES, _PREFERRED_SHARED_MEMORY_CARVEOUT (percent)
    shared_size, most_dynamic, carveout = 1, 8, 9
    cuda.cuFuncSetAttribute(function, carveout, 100)  # a hint, which a driver need not take
    error = cuda.cuFuncGetAttribute(ctypes.byref(declared), shared_size, function)
    if not error and dynamic <= 48 * 1024 < dynamic + declared.value:
        error = cuda.cuFuncSetAttribute(function, most_dynamic, dynamic)
    if error:
        raise RuntimeError(f"shared memory: {dynamic} bytes and {declared.value} of tables: CUDA error {error}")


def _of_grid(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return the table and the signs of blocks; for integers tensors that are never read."""
    return (blocks.scale, blocks.words) if blocks.grid is None else (blocks.grid.table, blocks.grid.sign)


@functools.cache
def processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


class Workspace:
    """The memory in which programs of one launch leave partial results. It grows, and every launch leaves its counters
    at zero.
    """

    def __init__(self, device: torch.device) -> None:
        self.partial = torch.empty(0, dtype=torch.float32, device=device)
        self.stat = torch.empty(0, dtype=torch.float32, device=device)
        self.counter = torch.zeros(0, dtype=torch.int32, device=device)

    def take(self, groups: int, splits: int, rows: int, dim: int, merge_width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return partial outputs (groups, splits, rows, dim) and statistics (groups, splits, 2, rows) float32; counters
        int32 of a group and of each `merge_width` of its splits, (groups, 1 + splits / merge_width).
        """
        counters = groups * (1 + -(-splits // merge_width))
        if self.partial.numel() < groups * splits * rows * dim:
            self.partial = self.partial.new_empty(groups * splits * rows * dim)
        if self.stat.numel() < groups * splits * rows * 2:
            self.stat = self.stat.new_empty(groups * splits * rows * 2)
        if self.counter.numel() < counters:
            self.counter = self.counter.new_zeros(counters)
        return self.partial, self.stat, self.counter
