"""Checks of what the attention kernel relies on and cannot see: shapes, dtypes and devices of its arguments, and
Triton's layouts.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from ..layout import Blocks, PageForm, check_pages
from ..layout.grids import ENTRIES
from ..layout.rope import RUN, Rope
from ..layout.rope import runs as runs_of

Exact = tuple[Tensor, Tensor, Tensor]  # keys, values (B, H, capacity, D), counts (B,) int32


def check_arguments(
    q: Tensor,
    packed_q: Tensor,
    keys: Blocks,
    values: Blocks,
    blocks: Tensor,
    sink: Exact,
    recent: Exact,
    rope: Rope | None,
) -> None:
    """Raise ValueError unless the kernel can take these arguments; `reference.attend` says what they are."""
    for queries in (q, packed_q):
        _check(queries, keys, values, blocks, sink, recent)
    if rope is not None:
        _check_rope(rope, keys, q, packed_q, (sink[0].shape[2], recent[0].shape[2]))


def _check_rope(rope: Rope, keys: Blocks, q: Tensor, packed_q: Tensor, windows: tuple[int, int]) -> None:
    batch, _, capacity = keys.words.shape[:3]
    if keys.form.vector or keys.form.tiered:
        raise ValueError(f"keys of {keys.form} before RoPE: only integers in one tier are rotated where they are read")
    if packed_q is not q:
        raise ValueError("packed_q with keys before RoPE: they are not divided by factors")
    least, width = runs_of(windows[0], capacity, windows[1]), RUN * rope.pairs
    if width > keys.form.dim or len(rope.first) not in (1, batch) or rope.first.shape[1] < least:
        shape = f"RoPE of {width} channels, {len(rope.first)} rows of {rope.first.shape[1]} runs"
        raise ValueError(f"{shape}: must be of at most {keys.form.dim}, 1 or {batch}, {least} or more")
    if rope.first.device != q.device:
        raise ValueError(f"RoPE on {rope.first.device}, queries on {q.device}: must be on one device")


def check_layouts(ttgir: str) -> None:
    """Raise RuntimeError where Triton chose a layout that the inline assembly does not expect. Look-ups of several rows
    and rotations by RoPE count on the layout of a product's first operand, reads of the ring on that of its result. A
    product over 16 numbers must not have the layout of one over 32.
    """
    mma = r"versionMajor = 2, versionMinor = 0, warpsPerCTA = \[\d+, 1, 1\], instrShape = \[1, 16, 8\]"
    result = rf"#ttg.nvidia_mma<\{{{mma}\}}>"
    for line in ttgir.splitlines():
        if re.search(r"tt\.dot.*x16xf16, .*kWidth = (8|16)", line):
            raise RuntimeError(f"this Triton contracts 32 numbers where there are 16: {line.strip()[:200]}")
        packed = re.search(r"elementwise_inline_asm.*packed_element = ([48]) ", line)
        if packed and re.search(
            r"ldmatrix|kvcal_[kv]\d|kvcal_(matrix|norms)|"
            r"ld\.shared\.(v2\.b32 \{a, b\}|b16 a)|kvcal_table|movmatrix|KVCAL_LOW|kvcal_fit|mma\.sync|"
            r"mov\.f32 \$0",
            line,
        ):
            if not re.search(rf"-> \(?tensor<[\dx]*x[if](16|32), ({_aliases(result, ttgir)})>", line):
                raise RuntimeError(f"this Triton puts tiles of the ring in an unknown layout: {line.strip()[-200:]}")
        elif packed:
            operand = rf"#ttg.dot_op<\{{opIdx = 0, [^}}]*kWidth = {int(packed[1]) // 2}\}}>"
            if not re.search(rf"-> \(?tensor<[\dx]*f16, ({_aliases(operand, ttgir)})>", line):
                raise RuntimeError(f"this Triton rotates keys in an unknown layout: {line.strip()[-200:]}")


def _aliases(layout: str, ttgir: str) -> str:
    """Return a regular expression for a layout and the names that stand for it."""
    return "|".join([layout, *re.findall(rf"^(#\w+) = {layout}", ttgir, re.MULTILINE)])


def _check(q: Tensor, keys: Blocks, values: Blocks, blocks: Tensor, sink: Exact, recent: Exact) -> None:
    """Check shapes, dtypes, devices and contiguity: the kernel gets pointers and takes strides from the shapes."""
    batch, heads, capacity = keys.words.shape[:3]
    if keys.form.role != "key" or values.form.role != "value" or keys.form.dim != values.form.dim:
        raise ValueError(f"blocks of {keys.form} and {values.form}: must be keys and values of one head_dim")
    for name, packed in (("keys", keys), ("values", values)):
        _check_blocks(name, packed, batch, heads, capacity)
    check_exact(q, (batch, heads, keys.form.dim), blocks, sink, recent)
    tensors = {"words of keys": keys.words, "words of values": values.words, "scales of keys": keys.scale}
    tensors |= {"scales of values": values.scale}
    for name, packed in (("keys", keys), ("values", values)):
        if packed.grid is not None:
            tensors |= {f"table of {name}": packed.grid.table, f"signs of {name}": packed.grid.sign}
    if keys.order is not None:
        tensors["order of channels"] = keys.order
    _check_places(tensors, q)


ALIGNED = 16  # bytes that a lane loads at a time


def aligned_exact(q: Tensor, sink: Exact, recent: Exact) -> tuple[Tensor, Exact, Exact]:
    """Return queries and exact tokens, copies of all where one begins between multiples of ALIGNED bytes."""
    if not any(x.data_ptr() % ALIGNED for x in (q, *sink[:2], *recent[:2])):
        return q, sink, recent
    q, *exact = (x.clone() for x in (q, *sink[:2], *recent[:2]))
    return q, (exact[0], exact[1], sink[2]), (exact[2], exact[3], recent[2])


def check_exact(q: Tensor, shape: tuple[int, int, int], blocks: Tensor, sink: Exact, recent: Exact) -> None:
    """Raise ValueError unless queries, counts and exact tokens are as the kernel takes them. shape: rows, kv heads,
    head_dim.
    """
    batch, heads, dim = shape
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"queries of {q.dtype}: must be float16 or bfloat16")
    if q.ndim != 4 or q.shape[0] != batch or q.shape[1] % heads or q.shape[3] != dim:
        raise ValueError(f"queries {tuple(q.shape)}: must be ({batch}, a multiple of {heads}, Q, {dim})")
    for name, window in (("sink", sink), ("recent", recent)):
        _check_window(name, window, q, (batch, heads, window[0].shape[2], dim))
    counts = {"blocks": blocks, "sink counts": sink[2], "recent counts": recent[2]}
    for name, count in counts.items():
        if count.dtype != torch.int32 or count.shape != (batch,):
            raise ValueError(f"{name}: {tuple(count.shape)} {count.dtype}; must be ({batch},) torch.int32")
    tensors = {"q": q, "sink": sink[0], "sink values": sink[1], "recent": recent[0], "recent values": recent[1]}
    _check_places(tensors | counts, q)


def check_paged(q: Tensor, pages: Tensor, form: PageForm, table: Tensor, lengths: Tensor, starts: Tensor) -> None:
    """Raise ValueError unless a kernel over pages can take these arguments; `reference.attend_pages` says what they
    are.
    """
    check_pages(pages, form)
    heads, dim, rows = pages.shape[1], form.keys.dim, len(table)
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"queries of {q.dtype}: must be float16 or bfloat16")
    if q.ndim != 3 or q.shape[1] % heads or q.shape[2] != dim or q.stride()[1:] != (dim, 1):
        raise ValueError(
            f"queries {tuple(q.shape)}, strides {q.stride()}: must be (T, a multiple of {heads}, {dim}), heads of a "
            "token one behind the other"
        )
    shapes = {"table": (table, (rows, table.shape[1])), "lengths": (lengths, (rows,)), "starts": (starts, (rows + 1,))}
    for name, (x, shape) in shapes.items():
        if x.dtype != torch.int32 or x.shape != shape or x.stride(-1) != 1 or x.device != q.device:
            raise ValueError(
                f"{name}: {tuple(x.shape)} {x.dtype} on {x.device}; must be {shape} torch.int32 on {q.device}"
            )
    if pages.device != q.device:
        raise ValueError(f"pages on {pages.device}, queries on {q.device}: must be on one device")


def _check_places(tensors: dict[str, Tensor], q: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != q.device:
            raise ValueError(f"{name} on {tensor.device}, queries on {q.device}: must be on one device")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()} of {tuple(tensor.shape)}; must be contiguous")


def _check_blocks(name: str, packed: Blocks, batch: int, heads: int, capacity: int) -> None:
    form = packed.form
    if form.norm_heads not in (1, heads):
        raise ValueError(f"{name}: norms over {form.norm_heads} heads; must be of each head or of all {heads}")
    _check_grid(name, packed, heads)
    words = (batch, heads, capacity, form.words)
    scales = (batch, heads // form.norm_heads, capacity // form.scale_blocks, form.scales)
    order = (batch, heads, capacity // form.scale_blocks, form.dim) if form.tiered else None
    order_shape = None if packed.order is None else tuple(packed.order.shape)
    if order_shape != order:
        raise ValueError(f"{name}: order of channels {order_shape}; must be {order}")
    if packed.words.shape != words or packed.scale.shape != scales or capacity % form.scale_blocks:
        shapes = f"words {tuple(packed.words.shape)}, scales {tuple(packed.scale.shape)}"
        raise ValueError(f"{name}: {shapes}; must be {words} and {scales}, of whole groups of tokens")


def _check_window(name: str, window: Exact, q: Tensor, shape: tuple[int, ...]) -> None:
    k, v, count = window
    alike = all(x.shape == shape and x.dtype == q.dtype for x in (k, v))
    if not alike or count.shape != (shape[0],):
        shapes = f"keys {tuple(k.shape)} {k.dtype}, values {tuple(v.shape)} {v.dtype}, counts {tuple(count.shape)}"
        raise ValueError(f"{name}: {shapes}; must be {shape} {q.dtype} and ({shape[0]},)")


def _check_grid(name: str, packed: Blocks, heads: int) -> None:
    form, grid = packed.form, packed.grid
    if (grid is not None) != bool(form.vector):
        raise ValueError(
            f"{name} of {form}: {'no grid' if grid is None else 'a grid'}; codes of a grid need one, others none"
        )
    if grid is None:
        return
    shapes = (4 * form.vector,) if form.in_bytes else ENTRIES[form.bits], (heads, form.dim)
    if grid.table.dtype != (torch.int32 if form.in_bytes else torch.float16):
        kind = "in bytes" if form.in_bytes else "looked up"
        raise ValueError(
            f"{name}: a table of {grid.table.dtype} for a grid {kind}; make it by grid_of(..., in_bytes=...)"
        )
    if (*grid.table.shape,) != shapes[0] or (*grid.sign.shape,) != shapes[1] or grid.vector != form.vector:
        actual = f"table {tuple(grid.table.shape)}, signs {tuple(grid.sign.shape)}, {grid.vector} numbers a point"
        raise ValueError(f"{name}: {actual}; must be {shapes[0]}, {shapes[1]}, {form.vector}")
