"""Quantise and append: the reference against the codec and the ledger, the Triton kernels against the reference in the
interpreter and on a GPU, and what they compile to without one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal_artifacts import scheme as cache_windows
from kvcal_artifacts.codecs import Higgs, Shape, uniform
from kvcal_artifacts.codecs.refusals import check_finite
from kvcal_artifacts.errors import NonFiniteError
from kvcal_artifacts.paths.packing_rules import rule_of
from kvcal_artifacts.storage.ledger import Ledger
from kvcal_kernels.attention.reference import attend
from kvcal_kernels.layout import Form, unpack
from kvcal_kernels.quantise import Counts, GridRule, Rule, Windows, blocks_for, reference
from tests.support.cases.quantise_cases import (
    ATTENDED,
    GRID_ATTENDED,
    GRIDS,
    OBSERVED,
    SETTINGS,
    Case,
    appended,
    codec,
    exhaustive,
    inputs,
    layer,
    misattended,
    misobserved,
    same,
    small,
    wrong,
)  # fmt: skip
from tests.support.compiled import compiled, loops, resources, skip_unless_pinned
from tests.support.interpreted import interpreted, needs_triton

WINDOWS = Windows(5, 33)
GRID = Case("higgs 2", "turboquant 2", windows=WINDOWS, cuts=(4,))


# The reference against the codec.


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_numbers_are_those_of_the_codec(name: str, search: bool) -> None:
    if search and name.startswith("outer"):
        name = name.replace("outer", "asymmetric")
    case = Case(name, name, 128, search=search, kind="odd", heads=1, dtype=torch.float32)
    k, v, _ = inputs(case)
    if name in ("symmetric 8", "hybrid 8"):
        k, v = k.abs() * 20, v.abs() * 20  # beyond 65504, where scale and minimum are not
        assert k.abs().max() > reference.HALF_MAX
    for role, x in (("key", k), ("value", v)):
        rule = case.rule(role)
        own = codec(case, role)
        made, flags = reference.quantise(x, rule)
        assert same(made, own.as_blocks(own.encode(x)))
        assert not flags.any()


@pytest.mark.parametrize("name", GRIDS)
def test_numbers_of_grids_are_those_of_the_codec(name: str) -> None:
    case = Case(name, name, 128, kind="odd", dtype=torch.float32)
    for role, x in zip(("key", "value"), inputs(case), strict=False):
        rule, own = case.rule(role), codec(case, role)
        assert x is not None
        made, flags = reference.quantise(x, rule)
        assert same(made, own.as_blocks(own.encode(x)))
        assert not flags.any()


@pytest.mark.parametrize(
    ("name", "number", "says"),
    [
        ("higgs 2", torch.nan, reference.NONFINITE),
        ("higgs 2, heads", -torch.inf, reference.NONFINITE),
        ("higgs 2", 2.0**24, reference.SCALE),
        ("turboquant 2", 2.0**24, reference.SCALE),
    ],
)
def test_what_the_codec_of_a_grid_refuses_is_flagged(name: str, number: float, says: int) -> None:
    """A norm over all heads is none where one is not finite: that head is named."""
    case = Case(name, name, heads=4, dtype=torch.float32)
    x = inputs(case)[0]
    x[1, 2, 40, 9] = number
    _, flags = reference.quantise(x, case.rule("key"))
    assert flags[2] & (says if says == reference.NONFINITE else -1) == says
    shared = case.rule("key").form.norm_heads > 1
    assert all(bool(flags[head] & reference.SCALE) == shared for head in (0, 1, 3))
    told = reference.check(flags, 7)
    assert told is not None
    assert told.startswith(f"layer 7, key head {0 if shared and says == reference.SCALE else 2}: ")
    with pytest.raises(NonFiniteError):
        codec(case, "key").encode(check_finite(x, 7, "key"))


def test_what_search_tries_is_what_the_codec_tries() -> None:
    assert (reference.SCALES, reference.RANGES) == (uniform.SCALES, uniform.RANGES)
    for mode, count in (("symmetric", 2 * len(uniform.SCALES)), ("hybrid", len(uniform.SCALES) + len(uniform.RANGES))):
        assert len(Rule(Form("key", 64, 2, 32, True, mode == "symmetric"), mode, True).factors) == count  # type: ignore[arg-type]


def test_a_factor_divides_keys_first() -> None:
    case = Case(factor="rows")
    k, _, factor = inputs(case)
    assert factor is not None
    wanted, _ = reference.quantise(k.float() / factor, case.rule("key"))
    assert same(reference.quantise(k, case.rule("key"), factor)[0], wanted)


@pytest.mark.parametrize(
    ("name", "number", "says"),
    [
        ("symmetric 4", torch.nan, reference.NONFINITE),
        ("asymmetric 2", -torch.inf, reference.NONFINITE),
        ("symmetric 2", 2.0**18, reference.SCALE),
        ("asymmetric 8", 2.0**24, reference.SCALE),
        ("asymmetric 8", -(2.0**17), reference.MINIMUM),
        ("symmetric 8", 2.0**17, 0),  # its scale is 2^10
        ("hybrid 8", 2.0**17, 0),
    ],
)
@pytest.mark.parametrize("role", ["key", "value"])
def test_what_the_codec_refuses_is_flagged(role: Any, name: str, number: float, says: int) -> None:
    case = Case(name, name, heads=3, dtype=torch.float32)
    x = inputs(case)[0]
    x[1, 2, 40, 9] = number
    _, flags = reference.quantise(x, case.rule(role))
    assert flags[:2].tolist() == [0, 0]
    assert flags[2] & (reference.NONFINITE if says == reference.NONFINITE else -1) == says
    said = reference.check(flags << (reference.VALUES if role == "value" else 0), 7)
    assert (said is None) if not says else (said is not None and said.startswith(f"layer 7, {role} head 2: "))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ((Form("key", 64, 4), "hybrid"), "only 'symmetric' is stored without zero points"),
        ((Form("key", 96, 4, 48, True, False), "hybrid"), "groups of 48 with search or mode 'hybrid'"),
        ((Form("key", 96, 4, 96), "symmetric", True), "must be a power of two"),
    ],
)
def test_rules_are_refused_in_one_line(settings: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Rule(*settings)


@pytest.mark.parametrize(
    ("heads", "dim", "settings", "says"),
    [
        (3, 64, {}, None),
        (
            3,
            64,
            {"norm": "token"},
            "no kernel quantises for a grid at head_dim 64, norms over 3 kv heads: both must be powers of two",
        ),
        (2, 96, {"norm": "head", "n": 256}, "grid at head_dim 96, norms over 1 kv heads: both must be powers of two"),
        (2, 64, {"axis": "token"}, "HIGGS along tokens"),
    ],
)
def test_grids_that_no_kernel_packs_say_why(heads: int, dim: int, settings: Any, says: str | None) -> None:
    found = rule_of(Higgs(Shape(heads, dim, 32), "key", **settings))
    assert isinstance(found, GridRule) if says is None else says in found


# Windows.


@pytest.mark.parametrize("windows", [WINDOWS, Windows(0, 0), Windows(32, 100, 96)])
def test_counts_are_those_of_the_ledger(windows: Windows) -> None:
    pads = torch.tensor([0, 40, 3])
    counts, ledger = Counts(3, windows), Ledger(cache_windows.Windows(windows.sink, windows.recent, windows.block))
    at = 0
    for count in (50, 1, 1, 130, 4, 16, 200):
        new = count - (pads - at).clamp(0, count)
        reference.advance(counts, new.int())
        ledger.begin(3, count, torch.arange(count)[None] >= (count - new)[:, None])
        at += count
        found = (counts.sink, counts.window, counts.blocks * 32 // windows.block)
        assert all(
            torch.equal(a.long(), b) for a, b in zip(found, (ledger.sink, ledger.window, ledger.blocks), strict=True)
        )


class Whole:
    """Where a module with `launch` is expected."""

    advance, append = staticmethod(reference.advance), staticmethod(reference.append)


@pytest.mark.parametrize("case", [case for case in small() if case.windows], ids=str)
def test_appended_in_any_calls_is_packed_at_once(case: Case) -> None:
    total = sum(case.cuts)
    for cuts in (case.cuts, (total,), (7,) * (total // 7) + (total % 7,)):
        assert wrong(Whole, replace(case, cuts=cuts)) is None


def test_the_test_of_windows_can_fail() -> None:
    class Late(Whole):
        @staticmethod
        def append(layer: Any, counts: Any, k: Any, *rest: Any) -> None:
            reference.append(layer, counts, k * 1.01, *rest)

    assert "differ" in str(wrong(Late, Case(windows=WINDOWS, cuts=(120,))))


def test_a_block_without_a_slot_is_dropped_and_flagged() -> None:
    case = Case(windows=WINDOWS, cuts=(150,))
    k, v, _ = inputs(case)
    made, counts = layer(case, k, 2, 4), Counts(2, WINDOWS)
    reference.advance(counts, torch.tensor([150, 20], dtype=torch.int32))
    before = made.keys.words.clone()
    reference.append(made, counts, k, v, case.rule("key"), case.rule("value"))
    assert made.flags.tolist() == [reference.NO_SLOT * 257] * 2
    assert torch.equal(made.keys.words[1], before[1])
    assert not torch.equal(made.keys.words[0, :, 1], before[0, :, 1])


def test_attention_reads_the_ring() -> None:
    assert misattended(attend, ATTENDED) is None
    assert misattended(attend, GRID_ATTENDED) is None
    assert "is off" in str(misattended(lambda *given, ring: attend(*given), ATTENDED))


# The kernels in Triton's interpreter.


@needs_triton
def test_interpreted_kernels_agree_with_the_reference() -> None:
    assert interpreted("-m", "tests.support.cases.quantise_cases", "small") == [str(len(small()))]


@pytest.mark.parametrize(("heads", "dim", "dtype"), OBSERVED)
def test_key_factors_are_of_the_keys_before_the_first_block(heads: int, dim: int, dtype: torch.dtype) -> None:
    assert misobserved(reference, heads, dim, dtype) is None


@needs_triton
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"peak": torch.zeros(2, 2, 64).half()},
            r"peak \(2, 2, 64\) torch.float16: must be \(2, 2, 64\) torch.float32",
        ),
        ({"peak": torch.zeros(2, 64, 2).mT}, "peak .*contiguous"),
        ({"fixed": torch.zeros(3, dtype=torch.bool)}, r"fixed \(3,\)"),
        ({"counts": Counts(3, WINDOWS)}, "counts of 3 rows, keys of 2"),
    ],
)
def test_factors_that_the_kernel_would_misread_are_refused(change: dict[str, Any], says: str) -> None:
    from kvcal_kernels.quantise import triton

    own = {"peak": torch.zeros(2, 2, 64), "fixed": torch.zeros(2, dtype=torch.bool), "counts": Counts(2, WINDOWS)}
    with pytest.raises(ValueError, match=says):
        triton.observe(**{**own, **change}, keys=torch.zeros(2, 2, 1, 64), ratio=2)


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_interpreted_kernels_agree_with_the_reference_everywhere() -> None:
    assert interpreted("-m", "tests.support.cases.quantise_cases", "exhaustive") == [str(len(exhaustive()))]


@needs_triton
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k": lambda k: k.double()}, "keys of torch.float64"),
        ({"k": lambda k: k[:, :, :40], "v": lambda v: v[:, :, :40]}, "keys of 40 tokens: must be whole blocks of 32"),
        ({"k": lambda k: k.mT.contiguous().mT}, "keys: strides"),
        ({"v": lambda v: v[:, :1]}, "values"),
        ({"factor": lambda f: torch.ones(3)}, r"factor \(3,\): must be \(2, 1, 64\) or \(2, 2, 1, 64\)"),
    ],
)
def test_what_the_kernel_would_misread_is_refused(change: dict[str, Any], says: str) -> None:
    from kvcal_kernels.quantise import triton

    case = Case()
    k, v, _ = inputs(case)
    own: dict[str, Any] = {"k": k, "v": v, "factor": None}
    own = {name: change[name](x) if name in change else x for name, x in own.items()}
    with pytest.raises(ValueError, match=says):
        triton.quantise(own["k"], own["v"], case.rule("key"), case.rule("value"), own["factor"])


@needs_triton
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda o, c: (replace(o, recent=(o.recent[0][:, :, :32],) * 2), c), "recent .* at least 65"),
        (lambda o, c: (replace(o, sink=(o.sink[0].float(),) * 2), c), "sink .* torch.float32"),
        (lambda o, c: (replace(o, recent=(o.recent[0].bfloat16(), o.recent[1])), c), "recent .* torch.bfloat16"),
        (lambda o, c: (replace(o, keys=o.values), c), "stored keys"),
        (
            lambda o, c: (replace(o, keys=blocks_for(GRID.rule("key"), 2, 2, 4, "cpu")), c),
            "stored keys: Form.*vector=2",
        ),
        (lambda o, c: (replace(o, flags=o.flags[:1]), c), r"flags \(1,\)"),
        (lambda o, c: (o, Counts(3, WINDOWS)), r"counts \(8, 3\)"),
    ],
)
def test_layers_that_the_kernel_would_misread_are_refused(change: Any, says: str) -> None:
    from kvcal_kernels.quantise import triton

    case = Case(windows=WINDOWS, cuts=(4,))
    k, v, _ = inputs(case)
    made, counts = change(layer(case, k, 4, 4), Counts(2, WINDOWS))
    with pytest.raises(ValueError, match=says):
        triton.append(made, counts, k, v, case.rule("key"), case.rule("value"))


def test_two_fused_operations_give_the_quotient() -> None:
    """The kernel's division, in float64 where an operation is fused: 24 bits by 11, near ties of the rounding that
    follows.
    """
    g = torch.Generator().manual_seed(0)
    s = (torch.rand(200_000, generator=g) * 3 + 2.0**-20).half().float()
    x = s.double() * (torch.randint(-600, 600, s.shape, generator=g) / 2)
    x = (x * (1 + torch.randint(-3, 4, s.shape, generator=g) * 2.0**-24)).float()
    for off in (-1, 0, 1):  # of the reciprocal, in units of its last place
        inverse = torch.nextafter(1 / s, torch.tensor(torch.inf) * off) if off else 1 / s
        q = x * inverse
        rest = (x.double() - q.double() * s.double()).float()
        found = (q.double() + rest.double() * inverse.double()).float()
        assert torch.equal(found, x / s)


# Compiled without a GPU.

INPUTS = ["p_k", "p_v", "p_sink_k", "p_sink_v", "p_ring_k", "p_ring_v"]
TYPES = {
    **dict.fromkeys(INPUTS, "*fp16"), **dict.fromkeys(["p_kw", "p_vw"], "*i16"),
    **dict.fromkeys(["p_ks", "p_vs", "p_factor"], "*fp16"), **dict.fromkeys(["p_k_table", "p_v_table"], "*fp32"),
    "p_counts": "*i32", "p_flags": "*i32", "p_due": "*fp32",
}  # fmt: skip


def built(case: Case, capability: int, step: bool = False, due: int = 0) -> Any:
    """The kernel of `quantise`, or with `step` of a decode step's `append`, of keys that are corrected with `due`."""
    from kvcal_kernels.quantise import triton

    rules = case.rule("key"), case.rule("value")
    launch = triton.launch_of(*rules, step)
    own = {"HEADS": case.heads, "WRITE": step, "PACK": True, "STORED": step, "FACTOR": case.factor is not None}
    own["DUE"] = due
    constants = triton.settings(*rules) | own | {"NW": launch.warps, "ASM": True}
    names = [name for name in triton.append_kernel.arg_names if name not in constants]
    types = {name: TYPES.get(name, "i32") for name in names}
    types |= {name: "*i32" for name, rule in zip(("p_kw", "p_vw"), rules, strict=True) if rule.form.vector}
    aligned = [name for name in names if name.startswith(("p_", "k_", "v_"))]
    options: dict[str, Any] = {"num_warps": launch.warps, "num_stages": 1, "enable_fp_fusion": False}
    if launch.registers:
        options["maxnreg"] = launch.registers
    return compiled(triton.append_kernel, types, constants, aligned, capability, **options)


def instructions(made: Any, case: Case, folder: Path) -> list[float]:
    """Of a thread for each number of keys, then of values: loops over slices and, shared out, what a unit takes
    besides. Each role has a loop over units and in it loops over slices: one, of values one for the slices of each
    tile. A slice of a half block is 8 numbers.
    """
    found, made_of = [loop.total() for loop in loops(made, folder)], []
    for form in (case.rule("key").form, case.rule("value").form):
        tiles = form.tiles if form.role == "value" else 1
        (outer, *inner), found = found[: 1 + tiles], found[1 + tiles :]
        per = 16 * form.scale_blocks if form.along_tokens else form.group
        assert len(inner) == tiles
        made_of.append(sum(inner) / tiles / per + (outer - sum(inner)) / (case.dim * form.scale_blocks))
    assert not found
    return made_of


# Formats, compute capability, ceilings: registers, instructions a number of keys and of values. Half of the copy
# bandwidth of an H200 leaves 34 instructions a number: 2.5 bytes at 2.14 TB/s against 132 multiprocessors of 128 lanes
# at 1.76 GHz.
BUDGET = [
    ("symmetric 3", "symmetric 3", 90, 128, 20.1, 29.3),
    ("symmetric 3", "hybrid 2", 90, 168, 20.0, 76.3),
    ("symmetric 2", "symmetric 2", 90, 128, 15.4, 24.2),
    ("outer 2", "outer 2", 90, 128, 34.1, 18.6),
    ("symmetric 3", "symmetric 3", 87, 128, 20.1, 29.3),
    ("symmetric 2", "symmetric 2", 87, 128, 15.4, 24.3),
    ("outer 2", "outer 2", 87, 128, 34.0, 18.7),
    ("symmetric 2", "symmetric 2", 80, 128, 15.4, 24.2),
    ("outer 2", "outer 2", 80, 128, 34.0, 18.6),
]


def within(case: Case, capability: int, registers: int, ceilings: tuple[float, float], folder: Path) -> None:
    skip_unless_pinned()
    made = built(case, capability)
    taken, spilled = resources(made, folder)
    assert spilled == 0
    assert taken <= registers
    found = instructions(made, case, folder)
    assert all(one <= ceiling for one, ceiling in zip(found, ceilings, strict=True)), found


@needs_triton
def test_compiled_kernel_keeps_to_its_budget(tmp_path: Path) -> None:
    name, other, capability, registers, *ceilings = BUDGET[2]
    within(Case(name, other, 128, heads=8), capability, registers, (ceilings[0], ceilings[1]), tmp_path)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("key", "value", "capability", "registers", "keys", "values"), BUDGET)
def test_compiled_kernels_keep_to_their_budgets(
    key: str, value: str, capability: int, registers: int, keys: float, values: float, tmp_path: Path
) -> None:
    within(Case(key, value, 128, heads=8), capability, registers, (keys, values), tmp_path)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("name", "due"), [*((name, 0) for name in SETTINGS), ("outer 2", 32)])
@pytest.mark.parametrize("capability", [80, 87, 89, 90])
def test_compiled_step_spills_nothing(name: str, due: int, capability: int, tmp_path: Path) -> None:
    assert resources(built(Case(name, name, 128, heads=8), capability, step=True, due=due), tmp_path)[1] == 0


@needs_triton
@pytest.mark.parametrize("capability", [80, 87, 89, 90])
def test_compiled_key_factors_spill_nothing(capability: int, tmp_path: Path) -> None:
    from kvcal_kernels.quantise import triton

    types = dict.fromkeys(["p_peak", "p_factor", "p_wide"], "*fp32")
    types |= {"p_k": "*bf16", "p_fixed": "*u8", "p_counts": "*i32"}
    types |= dict.fromkeys(["batch", "queries", "until"], "i32")
    types = {name: types[name] for name in triton.observe_kernel.arg_names if name in types}
    sizes = {"HEADS": 8, "RATIO": 4, "D": 128, "H_WIDE": 8, "D_WIDE": 128}
    made = compiled(
        triton.observe_kernel, types, sizes, ["p_k", "p_peak", "p_factor", "p_wide"], capability, num_warps=4
    )
    assert resources(made, tmp_path)[1] == 0


@needs_triton
@pytest.mark.parametrize("capability", [80, 87, 89, 90])
def test_compiled_counts_spill_nothing(capability: int, tmp_path: Path) -> None:
    from kvcal_kernels.quantise import triton

    types = {"p_counts": "*i32", "p_new": "*i32", "batch": "i32"}
    sizes = {"SINK": 32, "RECENT": 96, "BLOCK_": 32, "WIDE": 256}
    made = compiled(triton.advance_kernel, types, sizes, ["p_counts", "p_new"], capability, num_warps=1)
    assert resources(made, tmp_path)[1] == 0


# Of a decode step's append, 8 kv heads of 128: ceilings of instructions of a thread that has 32 of a block's 4096
# numbers. `own`: a block, but for what follows; `others`: 4096 numbers of any heads towards norms that span all, which
# take as many turns as there are heads; `point`: a grid point of a search through all, or a candidate beyond those that
# most cells of a raster have. With 128 registers four programs fit a multiprocessor.
STEPS = [
    ("higgs 2", 90, 2530, 690, 0),
    ("turboquant 3", 90, 2680, 0, 0),
    ("higgs 2", 87, 2530, 690, 0),
    ("higgs 2", 80, 2530, 690, 0),
    ("turboquant 3", 87, 2650, 0, 0),
    ("turboquant 3", 80, 2610, 0, 0),
    ("higgs 2 of 4", 87, 1320, 690, 79),
    ("higgs 3", 90, 2630, 690, 280),
    ("higgs 3", 80, 2600, 690, 280),
    ("higgs 4", 90, 3100, 0, 280),
    ("higgs 4, token", 90, 2660, 690, 280),
    ("higgs 4", 87, 3060, 0, 280),
    ("turboquant 2", 90, 2700, 0, 0),
    ("turboquant 4", 90, 2250, 690, 0),
    ("higgs 2 in bytes", 90, 2410, 690, 0),
    ("turboquant 3 in bytes", 90, 2890, 0, 0),
    ("turboquant 4 in bytes", 87, 2410, 0, 0),
    ("turboquant 2 in bytes", 80, 2700, 0, 0),
]


def of_grids(name: str, capability: int, own: int, others: int, point: int, folder: Path) -> None:
    skip_unless_pinned()
    made = built(Case(name, name, 128, heads=8), capability, step=True)
    taken, spilled = resources(made, folder)
    assert spilled == 0
    assert taken <= 128
    found = [loop.total() for loop in loops(made, folder)]
    each = len(found) // 2  # of keys, then of values: the new tokens, the block and the loops in it
    assert len(found) == 2 * each
    for _, block, *inner in (found[:each], found[each:]):
        assert len(inner) == bool(others) + bool(point), found
        assert block - sum(inner) <= own, found
        assert not others or inner[0] <= others, found
        assert not point or inner[-1] <= point, found


@needs_triton
@pytest.mark.parametrize("step", STEPS[:2])
def test_compiled_step_of_a_grid_keeps_to_its_budget(step: Any, tmp_path: Path) -> None:
    of_grids(*step, tmp_path)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS[2:])
def test_compiled_steps_of_grids_keep_to_their_budgets(step: Any, tmp_path: Path) -> None:
    of_grids(*step, tmp_path)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "dim", "heads", "factor"),
    [
        ("higgs 2", "turboquant 4", 256, 4, True),
        ("higgs 4", "higgs 2 of 4", 64, 8, True),
        ("higgs 2", "outer 2", 128, 8, False),
    ],
)
@pytest.mark.parametrize("step", [True, False])
def test_compiled_grids_spill_nothing(
    key: str, value: str, dim: int, heads: int, factor: bool, step: bool, tmp_path: Path
) -> None:
    for capability in (80, 87, 89, 90):
        made = built(Case(key, value, dim, heads=heads, factor="rows" if factor else None), capability, step)
        assert resources(made, tmp_path)[1] == 0


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim", "dtype"), OBSERVED)
def test_key_factors_on_a_gpu(heads: int, dim: int, dtype: torch.dtype) -> None:
    from kvcal_kernels.quantise import triton

    assert misobserved(triton, heads, dim, dtype, "cuda") is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", small(), ids=str)
def test_on_a_gpu(case: Case) -> None:
    """Against the reference on the CPU, bit for bit."""
    from kvcal_kernels.quantise import triton

    if case.windows is None:
        k, v, factor = (None if x is None else x.cuda() for x in inputs(case))
        assert k is not None and v is not None
        found = triton.quantise(k, v, case.rule("key", "cuda"), case.rule("value", "cuda"), factor)
        for x, rule, made, own in ((k, case.rule("key"), found[0], factor), (v, case.rule("value"), found[1], None)):
            wanted, _ = reference.quantise(x.cpu(), rule, None if own is None else own.cpu())
            assert same(replace(made, words=made.words.cpu(), scale=made.scale.cpu()), wanted)
        return
    layers = [appended(module, case, device=device)[0] for module, device in ((triton, "cuda"), (reference, "cpu"))]
    for name in ("keys", "values"):
        found, wanted = (getattr(one, name) for one in layers)
        assert same(replace(found, words=found.words.cpu(), scale=found.scale.cpu()), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("key", "value"), [("symmetric 3", "hybrid 2"), ("higgs 2", "turboquant 4"), ("higgs 2 of 4", "symmetric 3")]
)
def test_one_graph_serves_steps_that_pack_and_steps_that_do_not(key: str, value: str) -> None:
    from kvcal_kernels.quantise import triton

    case = Case(key, value, windows=WINDOWS, cuts=(50,) + (1,) * 80, pads=(0, 9))
    eager, _ = appended(triton, case, device="cuda")
    k, v, _ = (None if x is None else x.cuda() for x in inputs(case))
    assert k is not None and v is not None
    made, counts = layer(case, k, 8, 4), Counts(2, WINDOWS, "cuda")
    rules = case.rule("key", "cuda"), case.rule("value", "cuda")
    new = torch.tensor([50, 41], dtype=torch.int32, device="cuda")
    triton.advance(counts, new)
    triton.append(made, counts, k[:, :, :50], v[:, :, :50], *rules)
    one = [x[:, :, 50:51].contiguous() for x in (k, v)]
    new.fill_(1)
    kept = [t.clone() for t in (counts.data, *made.recent)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles
        triton.advance(counts, new)
        triton.append(made, counts, *one, *rules)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton.advance(counts, new)
        triton.append(made, counts, *one, *rules)
    for to, old in zip((counts.data, *made.recent), kept, strict=True):
        to.copy_(old)
    for at in range(50, 130):
        for to, x in zip(one, (k, v), strict=True):
            to.copy_(x[:, :, at : at + 1])
        graph.replay()
    count = int(counts.blocks.min())
    assert count >= 2
    for name in ("keys", "values"):
        assert torch.equal(getattr(made, name).words[:, :, :count], getattr(eager, name).words[:, :, :count])
        assert torch.equal(getattr(made, name).scale[:, :, :count], getattr(eager, name).scale[:, :, :count])
    assert not made.flags.any()


def test_codes_come_out_as_they_went_in() -> None:
    """Through the packed order: every number within half a step of what it was."""
    case = Case("asymmetric 4", "asymmetric 4")
    k, _, _ = inputs(case)
    made, _ = reference.quantise(k, case.rule("key"))
    codes, scale, zero = unpack(made)
    assert zero is not None
    steps, bases = (t.float().repeat_interleave(32, 3) for t in (scale, zero))
    assert ((codes * steps + bases - k.float()).abs() <= steps * 0.51 + bases.abs() * 2.0**-10).all()
