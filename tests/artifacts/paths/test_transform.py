"""The transform codec in a cache: which path its layers take, and that the fused one gives what decoding gives."""

from __future__ import annotations

from typing import Any

import pytest

from kvcal_artifacts.codecs import Shape
from kvcal_artifacts.codecs.scaled import Scaled
from kvcal_artifacts.codecs.transform import Transform
from kvcal_artifacts.paths import choose
from kvcal_artifacts.scheme import LayerCodecs
from tests.artifacts.paths import test_fused as fused
from tests.support.cases.transform_cases import codec_of
from tests.support.interpreted import interpreted, needs_triton
from tests.support.schemes import token_ids

PAIR = LayerCodecs(codec_of("key", (3, 5, 9, 6), 64), codec_of("value", (2, 11, 4, 9), 64))


def caches(kernels: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    monkeypatch.setitem(fused.PAIRS, "transform", PAIR)
    return fused.both("transform", fused.model(), kernels, **options)


@pytest.mark.parametrize("longest", [None, 128])
def test_steps_read_packed_coordinates(longest: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    own = caches("torch", monkeypatch, **({} if longest is None else {"max_length": longest}))
    apart = fused.steps(own, token_ids(2, 90), [72, 73, 76, 89])
    assert max(map(float, apart)) < 1e-4
    assert own[0].describe()["layers"][0]["path"].startswith("fused: the kernel's reference in torch")


def test_pairs_that_no_kernel_reads_say_why() -> None:
    key, value = PAIR.key, PAIR.value
    beside = choose.shape_refusal(LayerCodecs(key, fused.PAIRS["higgs-2"].value))
    assert beside == "keys of transform, values of higgs: the transform's kernel reads both or none"
    divided = choose.shape_refusal(LayerCodecs(Scaled(key, fused.factor()), value))
    assert divided == "keys divided by factors: the transform's kernel takes the bare codec"
    assert choose.shape_refusal(LayerCodecs(Transform(Shape(2, 96, 32), "key"), value)) == (
        "keys: transform at head_dim 96: the kernel takes (64, 128)"
    )
    assert "not coordinates of a basis" in str(choose.rotation_refusal(PAIR, 64))
    assert choose.shape_refusal(PAIR) is None


INTERPRETED = """
import torch
from tests.artifacts.paths import test_fused as t
from tests.artifacts.paths.test_transform import PAIR
from kvcal_artifacts.paths.preflight import packing_trials
t.PAIRS["transform"] = PAIR
own = t.build("Llama", head_dim=64, num_hidden_layers=1).half()
caches = t.both("transform", own, "triton")
print(max(float(x) for x in t.steps(caches, t.token_ids(2, 74), [72, 73])))
print(caches[0].describe()["layers"][0]["path"], all(codec.encodes_by_kernel for codec in caches[0].layers[0].pair))
t.trials.BLOCKS, t.trials.RECENT, t.trials.CALLS, t.trials.SINK = (2, 0), (40, 3), ((2, True),), (4, 2)
place = torch.float16, torch.device("cpu")
forms = PAIR.key.fused(), PAIR.value.fused()
print(t.trials.transform_trial(*forms, 2, 2, *place))
print(packing_trials.encode_trial(PAIR.key, *place, 1), packing_trials.encode_trial(PAIR.value, *place, 1))
from kvcal_kernels.attention.triton.transform import launch
own = launch.key_constants
launch.key_constants = lambda *given: (own(*given)[0] * 1.1, own(*given)[1])
print(t.trials.transform_trial(*forms, 2, 2, *place))
"""


@needs_triton
def test_logits_and_trials_of_the_triton_kernels_in_the_interpreter() -> None:
    lines = interpreted("-c", INTERPRETED)
    assert float(lines[0]) < 2e-3, lines
    assert lines[1:4] == ["fused: Triton kernel True", "None", "None None"], lines
    assert lines[4].startswith("2 new tokens behind a ring: off by 0."), lines
