"""PTX on the CPU (ptx.py): instructions against torch and exact fractions, and the faults that it must find."""

from __future__ import annotations

import ctypes
import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ptx_instructions
from interpreted import emulated, needs_triton
from ptx import Fault, Machine, Memory, Race, Unknown


def launched(body: str, *tensors: Tensor, threads: int = 64, programs: int = 1, shared: int = 4096, **how: Any) -> None:
    """Runs `body` with %d0, %d1, … the tensors' addresses, %i the thread's number."""
    n = len(tensors)
    given = ", ".join(f".param .u64 p_{i}" for i in range(n))
    loads = " ".join(f"ld.param.b64 %d{i}, [p_{i}];" for i in range(n))
    text = f""".extern .shared .align 16 .b8 memory[];
    .visible .entry kernel({given})
    .reqntid {threads}
    {{ .reg .b64 %d<9>; .reg .b32 %i, %s, %r<9>; .reg .b16 %h<9>; .reg .pred %p<9>;
    mov.u32 %i, %tid.x; mov.u32 %s, memory; {loads} {body} ret; }}"""
    memory = Memory()
    for x in tensors:
        bytes_ = (ctypes.c_uint8 * (x.numel() * x.element_size())).from_address(x.data_ptr())
        memory.add(x.data_ptr(), np.frombuffer(bytes_, np.uint8))
    Machine(text, **how).launch((programs, 1, 1), [x.data_ptr() for x in tensors], shared, memory)


OWN = "mad.wide.u32 %d8, %i, 4, %d0; "  # the thread's number of the first tensor


def floats(*x: float) -> Tensor:
    return torch.tensor(x).repeat(64)[:64].contiguous()


def test_a_kernel_reads_computes_and_writes() -> None:
    x = torch.randn(64)
    wanted = x * 2 + 1
    launched(
        OWN + "ld.global.f32 %r0, [%d8]; fma.rn.f32 %r0, %r0, 0f40000000, 0f3F800000; st.global.f32 [%d8], %r0;", x
    )
    assert torch.equal(x, wanted)


ONE, STEP = Fraction(1), Fraction(1, 2**23)  # of float32 above 1


@pytest.mark.parametrize(
    ("x", "y", "z"),
    [
        (ONE + STEP, ONE - STEP, STEP / 2),  # below the middle by 2^-46: in float64 as in fractions
        (ONE + STEP, ONE + STEP, STEP * STEP / 2**20),
        (ONE, ONE, STEP / 2),  # the middle: to the even one
        (ONE, ONE + STEP, STEP / 2),
        (ONE + STEP, (ONE + STEP) / 2**24, ONE),  # above the middle by more than float64 has beside 1
        (ONE + STEP, (ONE - STEP) / 2**24, ONE),
        (-ONE - STEP, (ONE + STEP) / 2**24, ONE),
    ],
)
def test_a_product_and_a_sum_are_rounded_once(x: Fraction, y: Fraction, z: Fraction) -> None:
    given = [np.array([float(v)], np.float32) for v in (x, y, z)]
    assert [Fraction(float(v[0])) for v in given] == [x, y, z]
    found = ptx_instructions.fused(*given)[0]
    exact = x * y + z
    others = [np.nextafter(found, np.float32(way)) for way in (-9, 9)]
    apart, rest = abs(Fraction(float(found)) - exact), [abs(Fraction(float(v)) - exact) for v in others]
    assert apart <= min(rest)
    assert apart < min(rest) or int(found.view(np.int32)) % 2 == 0


def test_bfloat16_is_torchs() -> None:
    x = torch.cat([torch.randn(10000), torch.tensor([0.0, torch.inf, -torch.inf, 3.4e38, 1e-40])])
    found = ptx_instructions.to_bf16(x.numpy())
    assert torch.equal(torch.from_numpy(found.view(np.int16)).view(torch.bfloat16), x.bfloat16())
    assert torch.equal(torch.from_numpy(ptx_instructions.from_bf16(found)), x.bfloat16().float())


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("prmt.b32 %r0, 0x33221180, 0x77665544, 0x8760;", 0xFF776680 - 2**32),
        (
            "lop3.b32 %r0, 0x00FF00FF, 0x0F0F0F0F, 0x33333333, 0xE4;",
            (0x00FF00FF & 0x33333333) | (0x0F0F0F0F & ~0x33333333),
        ),
        ("bfe.s32 %r0, 0xF0, 4, 4;", -1),
        ("bfe.u32 %r0, 0xF0, 4, 4;", 15),
        ("shf.l.wrap.b32 %r0, 0x80000000, 1, 1;", 3),
        ("shr.s32 %r0, -8, 40;", -1),
        ("shr.u32 %r0, 0x80000000, 32;", 0),
        ("mul.hi.s32 %r0, -2147483648, 4;", -2),
        ("rem.s32 %r0, -7, 4;", -3),
        ("popc.b32 %r0, 0xF0F0;", 8),
        ("cvt.rzi.s32.f32 %r0, 0fC0200000;", -2),
        ("cvt.rzi.s32.f32 %r0, 0f7FC00000;", 0),
        ("max.relu.s32 %r0, -5, -3;", 0),
    ],
)
def test_integers(given: str, kept: int) -> None:
    """By hand, as the manual of PTX says."""
    x = torch.zeros(64, dtype=torch.int32)
    launched(OWN + given + " st.global.b32 [%d8], %r0;", x)
    assert set(x.tolist()) == {kept}


STORED = "mad.lo.u32 %r1, %i, 4, %s; st.shared.b32 [%r1], %i; "
OTHERS = (
    "xor.b32 %r2, %i, 32; mad.lo.u32 %r2, %r2, 4, %s; ld.shared.b32 %r3, [%r2]; " + OWN + "st.global.b32 [%d8], %r3;"
)


LANES, TOGETHER = OTHERS.replace("%i, 32", "%i, 1"), "bar.warp.sync -1; "


def test_lanes_that_wait_for_one_another_share_memory() -> None:
    x = torch.zeros(64, dtype=torch.int32)
    launched(STORED + TOGETHER + LANES + TOGETHER + STORED.replace("%i;", "77;"), x)
    assert x.tolist() == [i ^ 1 for i in range(64)]


def test_warps_that_wait_for_one_another_share_memory() -> None:
    x = torch.zeros(64, dtype=torch.int32)
    launched(STORED + "bar.sync 0; " + OTHERS, x)
    assert x.tolist() == [*range(32, 64), *range(32)]


def copied(end: str) -> str:
    return (
        "mad.lo.u32 %r1, %i, 4, %s; mov.b32 %r0, 7; st.shared.b32 [%r1], %r0; " + OWN
        + "cp.async.ca.shared.global [%r1], [%d8], 4; cp.async.commit_group; "
        + end + " ld.shared.b32 %r3, [%r1]; st.global.b32 [%d8], %r3;"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("end", "early", "seen"),
    [("cp.async.wait_group 0;", False, 3), ("cp.async.wait_group 1;", False, 7), ("", False, 7), ("", True, 3)],
)
def test_a_copy_is_there_once_it_was_waited_for(end: str, early: bool, seen: int) -> None:
    x = torch.full((64,), 3, dtype=torch.int32)
    launched(copied(end), x, early=early)
    assert set(x.tolist()) == {seen}


THERE = (
    OWN + "st.global.b32 [%d8], %i; xor.b32 %r2, %i, 32; mad.wide.u32 %d7, %r2, 4, %d0; ld.global.b32 %r3, [%d7]; "
)  # another thread's number, in global memory


def test_global_memory_is_shared_behind_a_barrier_and_with_other_programs() -> None:
    x = torch.zeros(64, dtype=torch.int32)
    launched(THERE.replace("xor", "bar.sync 0; xor") + "bar.sync 0; st.global.b32 [%d8], %r3;", x, programs=2)
    assert x.tolist() == [*range(32, 64), *range(32)]


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (STORED + OTHERS, Race, "a read after another warp's write"),
        (STORED + OTHERS.replace("ld.shared.b32 %r3, [%r2]", "st.shared.b32 [%r2], 1"), Race, "two warps write"),
        (STORED + "bar.sync 0; " + OTHERS + STORED.replace("%i;", "77;"), Race, "a write after another warp's read"),
        (STORED + LANES, Race, "a read after another lane's write"),
        (STORED + TOGETHER + LANES + "st.shared.b32 [%r1], 77;", Race, "a write after another lane's read"),
        (STORED + LANES.replace("ld.shared.b32 %r3, [%r2]", "st.shared.b32 [%r2], 1"), Race, "two lanes write"),
        (copied("cp.async.wait_group 0; xor.b32 %r1, %r1, 4;"), Race, "a read after another lane's write"),
        (LANES, Fault, "nothing wrote"),
        ("st.shared.b32 [%s], %i;", Race, "two threads write different numbers"),
        ("st.global.b32 [%d0], %i;", Race, "two threads write different numbers"),
        (THERE, Race, "a read of global memory after another warp's write"),
        (THERE.replace("%i, 32", "%i, 1"), Race, "a read of global memory after another lane's write"),
        (THERE.replace("ld.global.b32 %r3, [%d7]", "st.global.b32 [%d7], 99"), Race, "two warps write to global"),
        ("setp.lt.s32 %p0, %i, 32; @%p0 bar.sync 0;", Fault, "a barrier that some threads never reach"),
        ("setp.lt.s32 %p0, %i, 32; @%p0 bra b; bar.sync 0; bra e; b: bar.sync 0; e:", Fault, "a barrier that some threads"),
        (OWN + "ld.global.b32 %r0, [%d8+4];", Fault, "is in no tensor"),
        (OWN + "ld.global.b64 %d7, [%d8];", Fault, "misaligned"),
        ("mad.lo.u32 %r1, %i, 4, %s; st.shared.b32 [%r1+3844], %i;", Fault, "shared memory has 4096 bytes"),
        ("setp.lt.s32 %p0, %i, 32; @%p0 bra done; bar.sync 0; done: bar.warp.sync -1; loop: bra loop;", Fault, "an end"),
        ("setp.lt.s32 %p0, %i, 5; @%p0 bra done; shfl.sync.bfly.b32 %r0, %i, 1, 31, -1; done:", Fault, "not all threads"),
    ],
)  # fmt: skip
def test_faults_are_found(body: str, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        launched(body, torch.zeros(64, dtype=torch.int32), most=10_000)


@pytest.mark.parametrize(
    "body", ["frob.b32 %r0, %r1;", "add.sat.s32 %r0, %r0, %r0;", "bar.arrive 0, 64;", "ld.local.b32 %r0, [%d0];"]
)
def test_what_is_not_known_is_not_passed_over(body: str) -> None:
    with pytest.raises(Unknown, match=body.split(" ")[0].split(".")[0]):
        launched(body, torch.zeros(64, dtype=torch.int32))


@needs_triton
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_products_and_sums_of_triton_are_those_of_torch(capability: int) -> None:
    """mma of each type, and on 90 wgmma with its swizzled tiles, turned ones too."""
    products, last = emulated("-m", "simple_kernels", capability=capability)
    for dtype, *case, off in json.loads(products):
        assert off < {"torch.float32": 2e-3, "torch.int8": 1e-9}.get(dtype, 2e-6), (dtype, case, off)
    off, count, there = last.split()
    assert float(off) < 1e-4 and count == "7" and there == "True"
