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

from tests.emulator import ptx_instructions
from tests.emulator.ptx import Fault, Machine, Memory, Race, Unknown
from tests.support.interpreted import emulated, needs_triton


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
        ("bfi.b32 %r0, 0xFF, 0x11223344, 8, 4;", 0x11223F44),
        ("bfi.b32 %r0, 0xFF, 0x11223344, 28, 255;", 0xF1223344 - 2**32),
    ],
)
def test_integers(given: str, kept: int) -> None:
    """By hand, as the manual of PTX says."""
    x = torch.zeros(64, dtype=torch.int32)
    launched(OWN + given + " st.global.b32 [%d8], %r0;", x)
    assert set(x.tolist()) == {kept}


PAIR = "mov.b16 %h1, 0xBF80; mov.b16 %h2, 0x3F80; "  # -1 and 1 in bfloat16


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (PAIR + "max.bf16 %h0, %h1, %h2; mov.b32 %r0, {%h0, 0};", 0x3F80),
        (PAIR + "min.bf16 %h0, %h1, %h2; mov.b32 %r0, {%h0, 0};", 0xBF80),
        (PAIR + "setp.gt.bf16 %p0, %h1, %h2; selp.b32 %r0, 1, 0, %p0;", 0),
        (PAIR + "setp.neu.bf16 %p0, %h1, %h1; selp.b32 %r0, 1, 0, %p0;", 0),
        # 1.0625 squared and 2^-40: above the middle of two numbers by less than float32 has
        ("mov.b16 %h1, 0x3F88; mov.b16 %h2, 0x2B80; fma.rn.bf16 %h0, %h1, %h1, %h2; mov.b32 %r0, {%h0, 0};", 0x3F91),
        ("fma.rn.bf16x2 %r0, 0x3F883F88, 0x3F883F88, 0x2B80AB80;", 0x3F913F90),
        ("cvt.rna.tf32.f32 %r0, 0f7FFFFFFF;", 0x7FFFFFFF),
        ("cvt.rna.tf32.f32 %r0, 0fFF800001;", 0x7FFFFFFF),
        ("cvt.rna.tf32.f32 %r0, 0fBF801000;", 0xBF802000),
        ("cvt.rna.tf32.f32 %r0, 0fFF800000;", 0xFF800000),
        ("ex2.approx.ftz.f32 %r0, 0fC3020000;", 0),  # of -130
        ("lg2.approx.ftz.f32 %r0, 0f00400000;", 0xFF800000),
        ("rcp.approx.ftz.f32 %r0, 0f80366C5B;", 0xFF800000),
        ("mul.rn.ftz.f32 %r0, 0f8D800000, 0f30800000;", 0x80000000),
        ("mul.rn.f32 %r0, 0f8D800000, 0f30800000;", 0x80080000),
        ("add.ftz.f32 %r0, 0f00400000, 0f00400000;", 0),
        ("max.ftz.f32 %r0, 0f00400000, 0fBF800000;", 0),
        ("setp.gt.ftz.f32 %p0, 0f00400000, 0f00000000; selp.b32 %r0, 1, 0, %p0;", 0),
    ],
)
def test_floats(given: str, kept: int) -> None:
    """By hand, as the manual of PTX says."""
    x = torch.zeros(64, dtype=torch.int32)
    launched(OWN + given + " st.global.b32 [%d8], %r0;", x)
    assert {hex(i & 0xFFFFFFFF) for i in x.tolist()} == {hex(kept)}


STORED = "mad.lo.u32 %r1, %i, 4, %s; st.shared.b32 [%r1], %i; "
OTHERS = (
    "xor.b32 %r2, %i, 32; mad.lo.u32 %r2, %r2, 4, %s; ld.shared.b32 %r3, [%r2]; " + OWN + "st.global.b32 [%d8], %r3;"
)


FIRST = "setp.eq.s32 %p0, %i, 0; @%p0 st.shared.b32 [%s], 77;"  # one of those that read it
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
    [
        ("cp.async.wait_group 0;", False, 3),
        ("cp.async.wait_all;", False, 3),
        ("cp.async.wait_group 1;", False, 7),
        ("", False, 7),
        ("", True, 3),
    ],
)
def test_a_copy_is_there_once_it_was_waited_for(end: str, early: bool, seen: int) -> None:
    x = torch.full((64,), 3, dtype=torch.int32)
    launched(copied(end), x, early=early)
    assert set(x.tolist()) == {seen}


UNDER = (  # a copy to where another warp has read
    STORED + "bar.sync 0; " + OTHERS + "bar.sync 0; ld.shared.b32 %r3, [%r2]; "
    + "cp.async.ca.shared.global [%r1], [%d8], 4; cp.async.commit_group; bar.sync 0; cp.async.wait_group 0; "
)  # fmt: skip
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
        (UNDER, Race, "a write after another warp's read"),
        (copied("cp.async.wait_group 0; xor.b32 %r1, %r1, 4;"), Race, "a read after another lane's write"),
        (LANES, Fault, "nothing wrote"),
        (STORED + "bar.sync 0; ld.shared.b32 %r3, [%s]; " + TOGETHER + FIRST, Race, "a write after another warp's read"),
        (STORED + "bar.sync 0; setp.lt.s32 %p1, %i, 32; @%p1 ld.shared.b32 %r3, [%s]; " + FIRST, Race, "another lane's read"),
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
    "body",
    [
        "frob.b32 %r0, %r1;", "add.sat.s32 %r0, %r0, %r0;", "bar.arrive 0, 64;", "ld.local.b32 %r0, [%d0];",
        "add.sat.f16x2 %r0, %r0, %r0;", "add.sat.f16 %h0, %h0, %h0;", "fma.rn.relu.f16x2 %r0, %r0, %r0, %r0;",
        "cvt.rn.satfinite.f16x2.f32 %r0, %r1, %r1;", "bfi.b64 %d6, %d6, %d6, 0, 8;", "vote.sync.uni.pred %p0, %p1, -1;",
        "mad.lo.cc.u32 %r0, %r0, %r0, %r0;", "mad.hi.s32 %r0, %r0, %r0, %r0;", "atom.global.cas.b32 %r0, [%d0], 0, 1;",
        "atom.global.inc.u32 %r0, [%d0], 1;", "bar.warp.sync 15;", "shfl.sync.bfly.b32 %r0, %i, 1, 31, 15;",
        "redux.sync.add.s32 %r0, %i, %i;", "vote.sync.any.pred %p0, %p1, 1;",
    ],
)  # fmt: skip
def test_what_is_not_known_is_not_passed_over(body: str) -> None:
    with pytest.raises(Unknown, match=body.split(" ")[0].split(".")[0]):
        launched(body, torch.zeros(64, dtype=torch.int32))


def test_a_launch_is_what_it_says() -> None:
    text = ".visible .entry kernel(.param .b32 p_0) .{} {{ ret; }}"
    for threads in ("maxntid 128, 1, 1", "reqntid 32, 2, 1"):
        with pytest.raises(Unknown, match="how many threads"):
            Machine(text.format(threads))
    with pytest.raises(Fault, match=r"0\.5 for a parameter"):
        Machine(text.format("reqntid 32, 1, 1")).launch((1, 1, 1), [0.5], 0, Memory())


OUTSIDE = """
import torch
from tests.support.cases.simple_kernels import sums
held = bytearray(2048)
x, y = (torch.frombuffer(held, dtype=torch.float32, count=256, offset=i) for i in (0, 1024))
out, count = torch.empty(2), torch.zeros(2, dtype=torch.int32)
sums[1,](y, out, count, count, 256)
sums[2,](x, out, count, count, 256)  # its second row is y, of which an earlier launch knew
"""


@needs_triton
def test_a_launch_sees_its_own_tensors() -> None:
    with pytest.raises(AssertionError, match="is in no tensor of the launch"):
        emulated("-c", OUTSIDE)


@needs_triton
def test_an_option_that_is_none_is_refused() -> None:
    with pytest.raises(AssertionError, match="neither early nor count"):
        emulated("-c", "", more="earyl")


@needs_triton
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_products_and_sums_of_triton_are_those_of_torch(capability: int) -> None:
    """mma of each type, and on 90 wgmma with its swizzled tiles, turned ones too."""
    products, last = emulated("-m", "tests.support.cases.simple_kernels", capability=capability)
    for dtype, *case, off in json.loads(products):
        assert off < {"torch.float32": 2e-3, "torch.int8": 1e-9}.get(dtype, 2e-6), (dtype, case, off)
    off, count, there = last.split()
    assert float(off) < 1e-4 and count == "7" and there == "True"
