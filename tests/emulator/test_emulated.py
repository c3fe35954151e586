"""Kernels as they are compiled for a GPU, inline assembly and all, run on the CPU (__main__.py): against their
references, and without races, accesses outside of tensors, or numbers that are read before their copy was waited for.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.interpreted import emulated, needs_triton
from tests.support.pages import ROOT

pytestmark = needs_triton

CASES = (
    "attention_cases",
    "paged_cases",
    "quantise_cases",
    "dequantise_cases",
    "transform_cases",
    "vq_attention_cases",
)
FEW = {  # that take most of the assembly: how cases of the module's `small` begin. A kernel takes 5 s to compile
    "attention_cases.compare": (
        "asymmetric 3 and outer 3, dim 64",  # two warps a program
        "symmetric 2 and symmetric 3, blocks (7",  # products of bytes
        "bytes 4 of 1 and bytes 3 of 1",
        "grid 3 of 2 and symmetric 3",
        "tiers 0 16 and outer 2",
        "symmetric 2 and asymmetric 2, dim 64, ratio 2, blocks (2,), launch (1, 1), rotary 32",
    ),
    "paged_cases.main": ("Case(keys=(3, 5, 9, 6)", "Case(keys=('grid', 4, 1)", "Case(keys=('symmetric', 4, 32)"),
    "quantise_cases.main": ("symmetric 3 and hybrid 2, factor rows",),
    "dequantise_cases.main": ("Case(role='key', batch=2, heads=4",),
    "transform_cases.main": ("Case(keys=(3, 5, 9, 6)",),
    "vq_attention_cases.main": ("Case(keys=((3, 64), (3, 16)), values=((3, 64),), blocks=(3, 1), heads=2, ratio=4",),
}
IN_THE_INTERPRETER = (  # what these compute there, preflight's trials and whole caches, compiled kernels must
    "kernels/test_squat.py::test_interpreted_kernel_agrees_with_the_reference",
    "artifacts/cache/test_static.py::test_steps_of_the_triton_kernels_in_the_interpreter",
    "artifacts/paths/test_fused.py::test_logits_of_the_triton_kernel_in_the_interpreter",
    "artifacts/paths/test_fused.py::test_prompts_are_packed_by_kernels_bit_for_bit",
    "kernels/test_dequantise.py::test_interpreted_kernel_places_exact_tokens_as_the_reference_does",
    "artifacts/paths/test_dequantised.py::test_logits_of_the_triton_kernel_in_the_interpreter",
    "kernels/test_higgs.py::test_interpreted_kernel_agrees_with_the_reference",
    "kernels/test_mixkvq.py::test_interpreted_kernel_agrees_with_the_reference",
    "artifacts/paths/test_codebook.py::test_logits_of_the_triton_kernels_in_the_interpreter",
    "kernels/residual_vq/test_vq.py::test_interpreted_kernels_agree_with_the_reference",
    "kernels/residual_vq/test_vq_append.py::test_the_triton_kernels_in_the_interpreter",
)
SELECTED = """
from importlib import import_module
for what, names in {few}.items():
    module, function = what.split(".")
    module = import_module("tests.support.cases." + module)
    getattr(module, function)([next(case for case in module.small() if str(case).startswith(name)) for name in names])
"""
PACKED = """
from kvcal_kernels.higgs import triton
from tests.kernels import test_higgs
for case in {cases}:
    print(*test_higgs.misplaced(triton, test_higgs.CASES[case]))
"""
CHANGED = """
import re
from tests.emulator import ptx
from tests.support.cases import attention_cases
own = ptx.Reader.__init__
for pattern, by, number in {changes}:
    ptx.Reader.__init__ = lambda self, text: own(self, re.sub(pattern, by, text))
    try:
        attention_cases.compare([attention_cases.small()[number]])
    except ptx.Fault as error:
        print(type(error).__name__, error)
"""
CHANGES = (  # of compiled code, each in the kernel of another case; and what is then said
    (r"cp\.async\.wait_group\s+\d+;", "", 10, "nothing wrote"),  # codes are read before they are there
    (r"bar\.sync\s+0;", "", 6, "Race .*a read after another warp's write"),
    (r"bar\.warp\.sync[^;]*;", "", 2, "Race .*another lane's"),
    (r"bar\.warp\.sync[^;]*;", "", 12, "Race .*another lane's"),
    (r"(mma\.sync\S*\.u8\.s8\.s32 \{[^}]*\}, \{)([^,]*), ([^,]*),", r"\1\3, \2,", 0, "off by"),  # parts of an operand
)


def test_compiled_kernels_agree_with_the_reference() -> None:
    """One process, because each needs some seconds to begin."""
    packed = PACKED.format(cases=(4,))  # values of 4 bits in bytes: `tl.sum` had two threads write different numbers
    assert emulated("-c", SELECTED.format(few=FEW) + packed) == ["3"] + ["1"] * 4 + [""]


def test_a_change_of_the_compiled_code_is_found() -> None:
    lines = emulated("-c", CHANGED.format(changes=[change[:3] for change in CHANGES]))
    assert len(lines) == len(CHANGES), lines
    for line, (*_, said) in zip(lines, CHANGES, strict=True):
        assert re.search(said, line), lines


@pytest.mark.parametrize(
    ("what", "case", "kernel"),
    [
        ("quantise_cases.main", "higgs 2 and higgs 2, heads 4", "append_kernel"),
        pytest.param("attention_cases.compare", "grid 4 of 1 and grid 3 of 1", "attend_kernel", marks=pytest.mark.slow),
    ],
)
def test_threads_seldom_meet_in_a_bank_of_shared_memory(what: str, case: str, kernel: str) -> None:
    """Counted, as no clock is here. Sums between warps by `tl.sum` took 4 to 9 times as many cycles as all that is
    left.
    """
    lines = emulated("-c", SELECTED.format(few={what: [case]}), more="count")
    found = next(made for made in map(json.loads, lines) if isinstance(made, dict) and made["kernel"] == kernel)
    assert found["shared, cycles"] <= 1.1 * found["shared, at least"], found


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "more"), [(90, ""), (80, "early")])
@pytest.mark.parametrize("module", CASES)
def test_all_small_cases_compiled(module: str, capability: int, more: str) -> None:
    """sm_80 has other products and no wgmma. Copies that arrive at once find a room that is overwritten while it is
    read.
    """
    (count,) = emulated("-m", f"tests.support.cases.{module}", "small", capability=capability, more=more)
    assert int(count) > 5


@pytest.mark.slow
@pytest.mark.parametrize("test", IN_THE_INTERPRETER)
def test_compiled_kernels_pass_what_interpreted_ones_do(test: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / test)],
        capture_output=True, text=True, env={**os.environ, "KVCAL_EMULATE": "90"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-3000:]
