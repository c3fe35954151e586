"""Decode steps through the fused attention operator: against the reference path, in every way a cache is used."""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcal.methods.data_free import Preset
from kvcal_artifacts import operator
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.cache.rope import StoredRope
from kvcal_artifacts.codecs import Higgs, MixKVQ, Predicted, Scaled, Shape, Squat, Uniform
from kvcal_artifacts.codecs.predictors import Linear
from kvcal_artifacts.errors import KernelsUnavailable, KVCalError, UsageError
from kvcal_artifacts.paths import choose, fused, notices, packing_rules
from kvcal_artifacts.paths.preflight import trials, verdicts
from kvcal_artifacts.scheme import HeavyHitters, LayerCodecs, Scheme, Windows
from kvcal_kernels.layout import Form, decode
from tests.support.architectures import build
from tests.support.interpreted import interpreted, needs_triton
from tests.support.models_fixture import file_size_limit, kvcal
from tests.support.schemes import Fed, close_all, left_mask, numbers, opened, packed_row, token_ids

WINDOWS = Windows(4, 32, 32)
SHAPE = Shape(2, 64, 32)


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    close_all()


@cache
def model(family: str = "Llama", **overrides: Any) -> Any:
    return build(family, head_dim=64, **overrides)


def uniform(role: Any, bits: int, inner: bool = True, mode: Any = "asymmetric") -> Uniform:
    axis: Any = "channel" if inner == (role == "key") else "token"
    return Uniform(SHAPE, role, bits, 32, axis, mode)


def higgs(d: int, n: int, **settings: Any) -> LayerCodecs:
    """Keys and values of one grid."""
    return LayerCodecs(*(Higgs(SHAPE, role, d, n, **settings) for role in ("key", "value")))  # type: ignore[arg-type]


def factor() -> Tensor:
    return numbers(2, 64, seed=3).mul(0.7).exp().half()


PAIRS: dict[str, LayerCodecs] = {
    "inner-4": LayerCodecs(uniform("key", 4, mode="symmetric"), uniform("value", 4, mode="symmetric")),
    "kivi-4": LayerCodecs(uniform("key", 4, inner=False), uniform("value", 4, inner=False)),
    "innerq": LayerCodecs(
        Scaled(uniform("key", 4, mode="symmetric"), factor()), uniform("value", 2, mode="hybrid")
    ),
    "innerq-prefill": LayerCodecs(
        Scaled(uniform("key", 4, mode="symmetric"), None, "prefill"), uniform("value", 2, mode="hybrid")
    ),
    "squat": LayerCodecs(Squat(uniform("key", 4, inner=False), channels=32), uniform("value", 8)),
    "mixkvq": LayerCodecs(MixKVQ(SHAPE, "key", full=16, four=16), uniform("value", 2, inner=False)),
    "higgs-2": higgs(2, 16),
    "turboquant-4-2": LayerCodecs(higgs(1, 16, norm="head").key, higgs(1, 4, norm="head", seed=1).value),
    "higgs-2-bytes": higgs(2, 16, points="bytes", gain="debiased"),
    "turboquant-4-2-bytes": LayerCodecs(
        higgs(1, 16, norm="head", points="bytes").key, higgs(1, 4, norm="head", seed=1, points="bytes").value
    ),
    "higgs-4-debiased": LayerCodecs(
        Scaled(higgs(2, 256, gain="debiased").key, factor()), higgs(4, 256, gain="debiased").value
    ),
}  # fmt: skip


LONG = pytest.mark.parametrize("longest", [None, 256])


def scheme(pair: LayerCodecs, layers: int = 3, frame: Any = "post_rope", windows: Windows = WINDOWS) -> Scheme:
    return Scheme(windows, frame, (pair,) * layers)


def both(
    name: str, served: nn.Module | None = None, kernels: str = "torch", **options: Any
) -> tuple[KVCalCache, KVCalCache]:
    """The fused path and the reference path on one model."""
    own = model() if served is None else served
    made = scheme(PAIRS[name], own.config.num_hidden_layers)
    return opened(made, own, kernels=kernels, **options), opened(made, own, kernels="off", **options)


def steps(
    caches: tuple[KVCalCache, KVCalCache], ids: Tensor, cuts: list[int], mask: Tensor | None = None
) -> list[Tensor]:
    """The same ids in the same pieces through both: how far apart logits are in each piece, over their size."""
    apart = []
    for start, stop in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
        out = []
        for own in caches:
            given: dict[str, Any] = {}
            if mask is not None:
                at = (mask.cumsum(1) - 1).clamp_min(0)
                given = {"attention_mask": mask[:, :stop], "position_ids": at[:, start:stop]}
            with torch.no_grad():
                out.append(own.model(ids[:, start:stop], past_key_values=own, **given).logits)
        real = out if mask is None else [x[mask[:, start:stop].bool()] for x in out]
        apart.append((real[0] - real[1]).norm() / real[1].norm())
    return apart


@pytest.mark.parametrize("name", PAIRS)
def test_logits_are_those_of_the_reference_path(name: str, calls: list[int]) -> None:
    """Prefill, single tokens over a flush, 16 and 17 tokens at a time (17 are none of the kernel's)."""
    cuts = [80, *range(81, 105), 120, 137]
    caches = both(name)
    close(steps(caches, token_ids(2, 140, seed=1), cuts))
    assert calls == [q for q in [*[1] * 24, 16, 3] for _ in range(3)]
    assert caches[0].ledger.blocks.tolist() == caches[1].ledger.blocks.tolist() == [3, 3]


def close(apart: list[float]) -> None:
    """Float32 rounding; where it moves a code that lies between two, a little more from there on."""
    assert sorted(apart)[len(apart) // 2] < 2e-6 or max(apart) < 2e-5
    assert max(apart) < 3e-3


def test_the_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    own = fused.queries_for
    monkeypatch.setattr(fused, "queries_for", lambda q, factor: None)
    with pytest.raises(AssertionError):
        close(steps(both("innerq"), token_ids(1, 83), [80, 81, 82]))
    monkeypatch.setattr(fused, "queries_for", own)
    close(steps(both("innerq"), token_ids(1, 83), [80, 81, 82]))


BYTE_PAIRS = ["higgs-2-bytes", "turboquant-4-2-bytes"]


def in_bytes(pair: LayerCodecs) -> list[bool]:
    forms = [codec.fused() for codec in (pair.key, pair.value)]
    return [form.in_bytes for form in forms if isinstance(form, Form)]


@pytest.mark.parametrize("name", BYTE_PAIRS)
@pytest.mark.parametrize(("heads", "bytewise"), [(8, True), (16, False)])
def test_grids_in_bytes_are_looked_up_where_a_kv_head_has_more_than_four_query_heads(
    name: str, heads: int, bytewise: bool, calls: list[int]
) -> None:
    """The same logits either way; the scheme itself stays as it was for other models."""
    caches = both(name, model(num_attention_heads=heads))
    close(steps(caches, token_ids(2, 90, seed=1), [80, 81, 84]))
    assert len(calls) == 9
    for own in caches:
        assert in_bytes(own.compressed_layers[0].codecs) == [bytewise] * 2
        assert in_bytes(own.scheme.layers[0]) == [True, True]


def test_grids_in_bytes_are_looked_up_beside_what_products_of_bytes_do_not_take(calls: list[int]) -> None:
    own, other = PAIRS["higgs-2-bytes"], PAIRS["higgs-4-debiased"]
    beside = {
        "grids of 256": LayerCodecs(own.key, other.value),
        "groups of 32 channels": LayerCodecs(own.key, PAIRS["kivi-4"].value),
        "groups of 32 tokens": LayerCodecs(PAIRS["kivi-4"].key, own.value),
    }
    for pair in beside.values():
        made = scheme(pair, model().config.num_hidden_layers)
        assert not any(in_bytes(made.layers[0]))
        close(steps(tuple(opened(made, model(), kernels=k) for k in ("torch", "off")), token_ids(1, 83), [80, 81]))  # type: ignore[arg-type]
    assert in_bytes(scheme(LayerCodecs(own.key, PAIRS["inner-4"].value)).layers[0]) == [True, False]
    assert len(calls) == 3 * 3 * 2


FAMILIES = ["Llama", "Qwen2", "Qwen3", "Phi3", "Mistral"]


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_architectures(family: str, kind: str, calls: list[int]) -> None:
    more = {"sliding_window": None} if family in ("Mistral", "Phi3") else {}
    own = model(family, attn_implementation=kind, **more)
    close(steps(both("kivi-4", own), token_ids(2, 90), [80, 81, 84]))
    assert len(calls) == 9
    close_all()
    assert own.model.layers[0].self_attn.config is own.config  # nothing is left behind
    assert own.config._attn_implementation == kind


def test_layers_without_rope_take_the_kernel_before_rope_too(calls: list[int]) -> None:
    own = build("SmolLM3", head_dim=64, num_hidden_layers=4, no_rope_layer_interval=2)
    for name, taken in (("inner-4", 4), ("mixkvq", 2)):
        calls.clear()
        caches = tuple(opened(scheme(PAIRS[name], 4, "pre_rope"), own, kernels=k) for k in ("torch", "off"))
        close(steps(caches, token_ids(1, 85), [80, 81]))  # type: ignore[arg-type]
        assert len(calls) == 2 * taken
        paths = [row["path"].split(":")[0] for row in caches[0].describe()["layers"]]
        assert sorted(paths) == ["fused"] * taken + ["reference"] * (4 - taken)


@pytest.mark.parametrize("name", ["innerq-prefill", "squat", "mixkvq", "higgs-2"])
def test_left_padding_and_rows_that_pack_nothing(name: str, calls: list[int]) -> None:
    mask = left_mask([120, 90, 40, 3])
    mask = torch.cat([mask, torch.ones(4, 40, dtype=mask.dtype)], 1)
    caches = both(name)
    close(steps(caches, token_ids(4, 160, seed=2), [120, *range(121, 150), 155], mask))
    assert len(calls) == 3 * 31
    assert caches[0].ledger.blocks.tolist() == [3, 2, 1, 0]


def test_pads_among_new_tokens_and_custom_masks_take_the_reference_path(calls: list[int]) -> None:
    mask = left_mask([100, 100])
    mask[1, 90] = 0
    mask[0, 82] = 0
    both_told = both("inner-4")
    close(steps(both_told, token_ids(2, 100), [80, 81, 83, 85, 88, 92], mask))
    assert calls == [1, 1, 1, 2, 2, 2, 3, 3, 3, 8, 8, 8]
    assert both_told[0].describe()["decoded_steps"] == {"a row's mask says 0 for a new token": 2}
    calls.clear()
    for own in both("inner-4"):
        with torch.no_grad():
            own.model(token_ids(1, 80), past_key_values=own)
            seen = torch.ones(1, 1, 2, 82, dtype=torch.bool).tril(80)
            own.model(token_ids(1, 2), past_key_values=own, attention_mask=seen)
        told = {} if own.kernels == "off" else {"a mask that is not 2-D": 1}
        assert own.describe()["decoded_steps"] == told
    assert not calls


def generated(own: KVCalCache, ids: Tensor, **options: Any) -> list[int]:
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **options}
    out: list[int] = own.model.generate(ids, past_key_values=own, **options).tolist()
    return out


@pytest.mark.parametrize("name", ["inner-4", "higgs-4-debiased"])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 5}], ids=["greedy", "beams", "lookup"]
)
def test_generate(name: str, options: dict[str, Any], calls: list[int]) -> None:
    ids = token_ids(1, 30, seed=4).repeat(1, 3)
    found = [generated(own, ids, **options) for own in both(name)]
    assert found[0] == found[1]
    assert len(calls) >= 3 * 10
    if "prompt_lookup_num_tokens" in options:
        assert max(calls) > 1


def test_a_padded_batch_generates_what_its_rows_do(calls: list[int]) -> None:
    ids, mask = token_ids(2, 90, seed=5), left_mask([90, 70])
    ids = ids.masked_fill(mask == 0, 0)
    found = [generated(own, ids, attention_mask=mask) for own in both("inner-4")]
    assert found[0] == found[1] and calls


@pytest.mark.parametrize("name", ["inner-4", "turboquant-4-2"])
def test_crop_and_copies(name: str, calls: list[int]) -> None:
    ids = token_ids(1, 120, seed=6)
    caches = both(name)
    steps(caches, ids[:, :100], [90, 95])
    twins = copy.deepcopy(caches[0]), copy.deepcopy(caches[1])
    assert twins[0].compressed_layers[0].handle != caches[0].compressed_layers[0].handle
    for own in (*caches, *twins):
        own.crop(-7)
    for pair in (caches, twins):
        count = len(calls)
        close(steps(pair, ids[:, 93:], [1, 2]))
        assert len(calls) == count + 6
    for own in (*caches, *twins):
        own.crop(-60)  # into packed blocks
    close(steps(caches, ids[:, :70], [1, 2]))
    for twin in twins:
        twin.close()


def test_layers_say_why_they_take_the_reference_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def paths(made: Scheme, own: Any = None, kernels: str = "torch") -> str:
        found = opened(made, own or model(), kernels=kernels).describe()
        one: str = found["layers"][0]["path"]
        return one

    pair, shape16 = PAIRS["inner-4"], Shape(2, 16, 8)
    assert paths(scheme(pair)).startswith("fused: the kernel's reference in torch")
    assert "kernels='off'" in paths(scheme(pair), kernels="off")
    assert "not tiers" in paths(scheme(PAIRS["mixkvq"], frame="pre_rope"))
    assert "not keys divided by factors" in paths(scheme(PAIRS["innerq"], frame="pre_rope"))
    narrow = build(
        "Phi3",
        head_dim=64,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    )
    turned = scheme(pair, narrow.config.num_hidden_layers, "pre_rope")
    assert "RoPE of 16 channels: the fused kernel rotates multiples of 32" in paths(turned, narrow)
    assert "token selection" in paths(scheme(pair).keeping(HeavyHitters()))
    plain = Preset("fp8", "fp8", "post_rope", 4, 32, 32).scheme(model())
    assert "keys: no fused kernel reads float8" in paths(plain)
    assert "before RoPE" in paths(scheme(PAIRS["higgs-2"], frame="pre_rope"))
    assert "keys: HIGGS rotated over all heads of a token, 128 channels" in paths(
        scheme(higgs(2, 16, rotation="token"))
    )
    assert "keys: HIGGS along tokens" in paths(scheme(higgs(2, 16, axis="token")))
    ragged = LayerCodecs(MixKVQ(SHAPE, "key"), PAIRS["mixkvq"].value)
    assert "keys: MixKVQ's tiers take another size in every block" in paths(scheme(ragged))
    odd = Windows(4, 32, 16)
    small = [Higgs(Shape(2, 64, 16), role) for role in ("key", "value")]  # type: ignore[arg-type]
    assert "keys: blocks of 16 tokens" in paths(scheme(LayerCodecs(*small), windows=odd))
    factors = Scaled(uniform("value", 4, mode="symmetric"), factor())
    assert "values: values divided by factors" in paths(scheme(LayerCodecs(pair.key, factors)))
    five = LayerCodecs(Uniform(SHAPE, "key", 5, 32), pair.value)
    assert "keys: the fused kernel cannot read 5 bits at head_dim 64" in paths(scheme(five))
    small = LayerCodecs(Uniform(shape16, "key", 4, 16), Uniform(shape16, "value", 4, 16))
    assert "keys: blocks of 8 tokens" in paths(scheme(small, windows=Windows(4, 16, 8)), build("Llama"))
    assert "the layer is on cpu" in paths(scheme(pair), kernels="auto")
    half = copy.deepcopy(model()).half()
    assert "the layer is on cpu; the fused kernel needs a CUDA GPU" in paths(scheme(pair), half, "auto")
    monkeypatch.setattr(model().model.layers[0].self_attn, "softcap", 30.0, raising=False)
    assert "softcap" in paths(scheme(pair))
    with pytest.raises(UsageError, match="kernels='fast': allowed are 'auto', 'off', 'torch', 'triton'"):
        opened(scheme(pair), model(), kernels="fast")


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_shapes_without_a_kernel_are_warned_of_once(
    kernels: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Where a kernel would run: not on a CPU that nobody asked one of, nor for codecs that have none."""

    def lines(pair: LayerCodecs, own: Any = None, kernels: str = kernels) -> list[str]:
        served = own or model()
        for _ in range(2):
            kept = opened(scheme(pair, served.config.num_hidden_layers), served, kernels=kernels)
            with torch.no_grad():
                served(token_ids(1, 40), past_key_values=kept)
        found = [str(one.message) for one in recwarn]
        recwarn.clear()
        return [
            line.removesuffix("; packed blocks are decoded for the model's own attention instead") for line in found
        ]

    monkeypatch.setattr(notices, "_WARNED", set())
    odd = LayerCodecs(Uniform(SHAPE, "key", 5, 32), PAIRS["inner-4"].value)
    if kernels == "auto":
        assert lines(odd) == []  # on a CPU
        monkeypatch.setattr(choose, "runs_kernels", lambda device: True)
        assert lines(PAIRS["inner-4"]) == ["fused kernel: the fused kernel takes float16 and bfloat16, not float32"]
    (line,) = lines(odd)
    assert line.startswith("fused kernel: keys: the fused kernel cannot read 5 bits at head_dim 64")
    many = build("Llama", head_dim=64, num_attention_heads=34, hidden_size=68, num_hidden_layers=1)
    assert lines(PAIRS["kivi-4"], many) == ["fused kernel: 17 query heads a kv head: the fused kernel takes 16 at most"]
    assert lines(PAIRS["kivi-4"], many) == []
    monkeypatch.setattr(notices, "_WARNED", set())
    assert lines(odd, kernels="off") == []
    higgs = Preset("higgs-2", "higgs-2", "post_rope", 4, 32, 32).scheme(model()).layers[0]
    assert higgs is not None and lines(LayerCodecs(higgs.key, PAIRS["inner-4"].value)) == []
    with pytest.raises(KernelsUnavailable, match=r"layer 0 and 2 more: .*5 bits at head_dim 64"):
        opened(scheme(odd), model(), kernels=kernels, require_kernels=True)


def test_attention_without_a_config_takes_the_reference_path() -> None:
    made = opened(scheme(PAIRS["inner-4"]), Fed(3, 2, 64), kernels="torch").describe()
    assert "no config that names an attention function" in made["layers"][0]["path"]


def test_kernels_can_be_required() -> None:
    made = scheme(PAIRS["inner-4"])
    with pytest.raises(
        KernelsUnavailable, match=r"layer 0 and 2 more: .*the layer is on cpu.*require_kernels"
    ) as found:
        KVCalCache(made, model(), require_kernels=True)
    assert found.value.exit_code == 8
    assert model().model.layers[0].self_attn.config is model().config
    opened(made, model(), kernels="torch", require_kernels=True)


def test_threads_with_caches_of_their_own_do_not_take_each_others_turn() -> None:
    ids, wanted = token_ids(1, 100, seed=7), []
    for own in both("inner-4")[:1]:
        wanted = generated(own, ids, max_new_tokens=12)
    found: list[Any] = [None] * 3
    caches = [both("inner-4")[0] for _ in found]

    def run(i: int) -> None:
        found[i] = generated(caches[i], ids, max_new_tokens=12)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 3


def test_a_forward_that_breaks_off_before_its_attention_leaves_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    own = both("inner-4")[0]
    with torch.no_grad():
        own.model(token_ids(1, 80), past_key_values=own)
        monkeypatch.setattr(fused, "attention", lambda *rest, **named: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            own.model(token_ids(1, 1), past_key_values=own)
        monkeypatch.undo()
        with pytest.raises(KVCalError, match="broke off"):
            own.model(token_ids(1, 1), past_key_values=own)
        own.reset()
        own.model(token_ids(1, 80), past_key_values=own)
        layer = own.compressed_layers[0]
        own.on_forward(None)
        monkeypatch.setattr(type(own.hooks), "active", True)
        layer.update(*(torch.randn(1, 2, 1, 64) for _ in range(2)))  # and no attention
        monkeypatch.undo()
        with pytest.raises(KVCalError, match="broke off"):
            own.model(token_ids(1, 1), past_key_values=own)
        plain = own.model(token_ids(1, 5, seed=9)).logits
    assert torch.equal(plain, both("inner-4")[1].model(token_ids(1, 5, seed=9)).logits)


def test_gradients_and_training_take_the_reference_path(calls: list[int]) -> None:
    own = both("inner-4")[0]
    own.model(token_ids(1, 80), past_key_values=own)
    out = own.model(token_ids(1, 1), past_key_values=own).logits
    assert not calls and out.requires_grad
    with torch.no_grad():
        own.model(token_ids(1, 1), past_key_values=own)
    assert len(calls) == 3


UNPICKLED = """
import pickle, sys
import torch
with open(sys.argv[1], "rb") as file:
    model, config, ids, wanted = pickle.load(file)
assert not [name for name in sys.modules if name.startswith("kvcal")]
assert model.model.layers[0].self_attn.config is model.config and type(config) is type(model.config)
with torch.no_grad():
    print(torch.equal(model(ids).logits, wanted))
"""


def test_models_with_a_cache_can_be_copied_and_written(tmp_path: Path) -> None:
    """What comes back has no cache, and is read without this package."""
    served, ids = build("Llama", head_dim=64), token_ids(1, 81)
    served.requires_grad_(False)
    wanted, plain = served(ids).logits, served.config.to_json_string()
    made = scheme(PAIRS["squat"], served.config.num_hidden_layers)  # taps queries, too
    for kept in (made, scheme(PAIRS["inner-4"], served.config.num_hidden_layers)):
        own = opened(kept, served, kernels="torch", max_length=256)
        served(ids[:, :80], past_key_values=own)
        served(ids[:, 80:], past_key_values=own)
    config = served.model.layers[0].self_attn.config
    assert config is not served.config and config.to_json_string() == plain
    for other in (copy.deepcopy(served), pickle.loads(pickle.dumps(served))):
        assert other.model.layers[0].self_attn.config is other.config
        assert torch.equal(other(ids).logits, wanted)
    assert type(copy.copy(config)) is type(copy.deepcopy(config)) is type(served.config)
    (tmp_path / "model").write_bytes(pickle.dumps((served, config, ids, wanted)))
    done = subprocess.run(
        [sys.executable, "-c", UNPICKLED, str(tmp_path / "model")], capture_output=True, text=True, check=False
    )
    assert done.stdout == "True\n", done.stderr


def test_what_is_changed_in_a_models_config_while_a_cache_is_open_stays_changed() -> None:
    served = build("Llama", head_dim=64)
    own = opened(scheme(PAIRS["inner-4"], served.config.num_hidden_layers), served, kernels="torch")
    attention = served.model.layers[0].self_attn
    attention.config.attention_dropout = 0.25
    assert served.config.attention_dropout == 0.25
    served.set_attn_implementation("eager")
    own.close()
    assert attention.config is served.config and served.config._attn_implementation == "eager"


@LONG
def test_attention_weights_that_are_asked_for_are_the_models_own(
    longest: int | None, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_WARNED", set())
    served, ids = model(attn_implementation="eager"), token_ids(1, 84)
    own, plain = (
        opened(scheme(PAIRS["inner-4"]), served, kernels=kernels, max_length=n)
        for kernels, n in (("torch", longest), ("off", None))
    )
    with torch.no_grad():
        for one in (own, plain):
            served(ids[:, :80], past_key_values=one)
        with pytest.warns(UserWarning, match="output_attentions: the fused kernel gives no attention weights") as seen:
            found = [served(ids[:, 80:82], past_key_values=one, output_attentions=True) for one in (own, plain)]
        monkeypatch.setattr(served.config, "output_attentions", True)
        found += [served(ids[:, 82:83], past_key_values=one) for one in (own, plain)]
        monkeypatch.setattr(served.config, "output_attentions", False)
        assert len(seen) == 1 and not calls
        for left, right in (found[:2], found[2:]):
            assert len(left.attentions) == 3 and torch.allclose(left.logits, right.logits, atol=1e-5)
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(left.attentions, right.attentions, strict=True))
        served(ids[:, 83:], past_key_values=own)
    assert calls == [1] * 3


def test_an_operator_whose_cache_is_gone_says_so() -> None:
    own = KVCalCache(scheme(PAIRS["inner-4"]), model(), kernels="torch")
    handle = own.compressed_layers[0].handle
    own.close()
    del own
    gc.collect()
    x = torch.zeros(1, 4, 1, 64)
    with pytest.raises(KVCalError, match="is gone"):
        torch.ops.kvcal.decode_attention(x, x[:, :2], x[:, :2], 1.0, handle)


def test_the_operator_keeps_the_rules_of_torch_library() -> None:
    """Schema and shapes; that it changes what the handle stands for is outside of what opcheck sees."""
    own = both("inner-4")[0]
    with torch.no_grad():
        own.model(token_ids(1, 80), past_key_values=own)
    layer = own.compressed_layers[0]

    class Same:
        def attend(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, positions: Tensor | None = None) -> Tensor:
            return q * scaling

    same = Same()
    handle = operator.register(same)
    x = torch.zeros(1, 4, 1, 64)
    torch.library.opcheck(
        torch.ops.kvcal.decode_attention.default, (x, x[:, :2], x[:, :2], 0.5, handle),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    assert layer.handle != handle


# Triton's interpreter, which has to be asked for before triton is imported.

INTERPRETED = """
import torch
from tests.artifacts.paths import test_fused as t
from kvcal_artifacts.paths import packing_rules
from kvcal_artifacts.paths.preflight import packing_trials, trials
own = t.build("Llama", head_dim=64, num_hidden_layers=1).half()
mask = t.left_mask([75, 72])
caches = t.both("innerq", own, "triton")
print(max(float(x) for x in t.steps(caches, t.token_ids(2, 75), [72, 73], mask)))
caches = t.both("higgs-2", own, "triton")
print(max(float(x) for x in t.steps(caches, t.token_ids(2, 74), [72, 73], mask[:, :74])))
assert all(codec._how is not None for codec in caches[0].layers[0].pair)
from tests.support.schemes import packed_row
assert all(torch.equal(a, b) for a, b in zip(*(packed_row(own, 0) for own in caches), strict=True))
print(caches[0].describe()["layers"][0]["path"])
trials.BLOCKS, trials.RECENT, trials.CALLS = (2, 0), (40, 3), ((2, True),)
trials.OF_TIERS = ((2, False),)
trials.SINK = (4, 2)
forms = [codec.fused() for codec in (t.uniform("key", 4, mode="symmetric"), t.uniform("value", 2))]
place = torch.float16, torch.device("cpu")
print(trials.trial(*forms, 2, 2, *place))
print(trials.trial(*forms, 2, 2, *place, 32))
one = t.PAIRS["higgs-2"]
print(packing_trials.encode_trial(one.key, *place, 1), packing_trials.encode_trial(one.value, *place, 1))
print(trials.trial(one.key.fused(), one.value.fused(), 2, 2, *place))
tiers = trials.Form("key", 64, 2, 32, False, False, full=16, four=16)
print(trials.trial(tiers, t.PAIRS["turboquant-4-2"].value.fused(), 2, 2, *place))
rules = [
    packing_rules.rule_of(codec)
    for codec in (t.uniform("key", 4, mode="symmetric"), t.uniform("value", 2, mode="hybrid"))
]
print(packing_trials.append_trial(*rules, *place, flushes=1))
grids = [packing_rules.rule_of(codec) for codec in (one.key, t.PAIRS["turboquant-4-2"].value)]
print(packing_trials.append_trial(*grids, *place, flushes=1))
own = packing_trials.quantise.append
packing_trials.quantise.append = lambda layer, counts, k, *rest: own(layer, counts, k * 1.01, *rest)
print(packing_trials.append_trial(*rules, *place, flushes=0))
print(packing_trials.append_trial(*grids, *place, flushes=0))
packing_trials.quantise.append, seen = own, packing_trials.quantise.observe
packing_trials.quantise.observe = lambda peak, fixed, counts, k, ratio: seen(peak, fixed, counts, k * 1.01, ratio)
print(packing_trials.append_trial(*rules, *place, flushes=1))
packing_trials.quantise.observe = seen
kivi = [packing_rules.rule_of(t.uniform(role, 4, inner=False)) for role in ("key", "value")]
print(packing_trials.append_trial(*kivi, *place, 32, 1))
due = packing_trials.squat.due
packing_trials.squat.due = lambda ring, *rest: due(ring * 1.01, *rest)
print(packing_trials.append_trial(*kivi, *place, 32, 1))
whole, by = trials.attention.fast(), trials.attention.fast().attend
whole.attend = lambda *given, **named: by(*given, **named) * (1.5 if given[-1].warps == 4 else 1)
print(trials.trial(*forms, 2, 2, *place))  # a kernel that only few blocks would take
whole.attend = by
trials.reference.attend = lambda q, *rest: q
print(trials.trial(*forms, 2, 2, *place))
"""


REFUSED = """
import torch
from tests.artifacts.paths import test_fused as t
from kvcal_artifacts.errors import NonFiniteError
own = t.build("Llama", head_dim=64, num_hidden_layers=1).half()
pairs = {name: t.PAIRS[name] for name in ("kivi-4", "innerq", "innerq-prefill", "squat", "mixkvq", "higgs-2")}
pairs["squat by torch"] = t.LayerCodecs(t.Squat(t.uniform("key", 4, inner=False), channels=8), t.uniform("value", 8))
own.model.layers[0].self_attn.k_proj.weight.data[64 + 50] = torch.nan
for pair in pairs.values():
    cache = t.opened(t.scheme(pair, 1), own, kernels="triton")
    try:
        own(t.token_ids(2, 70), past_key_values=cache)
    except NonFiniteError as error:
        print(cache.compressed_layers[0].columns, error.layer, error)
"""


PROMPTS = """
import json, torch
from kvcal_kernels import mixkvq, quantise, squat
from tests.artifacts.paths import test_fused as t
from kvcal_artifacts.paths import packing_rules
from kvcal_artifacts.paths.preflight import packing_trials
from tests.support.schemes import packed_row
own = t.build("Llama", head_dim=64, num_hidden_layers=1).half()
kernels = {"quantise": quantise.fast(), "corrected": squat.fast(), "select": mixkvq.fast()}
launched = []
for name, kernel in kernels.items():
    setattr(kernel, name, lambda *a, _name=name, _once=getattr(kernel, name), **k: (launched.append(_name), _once(*a, **k))[1])
t.PAIRS["squat by torch"] = t.LayerCodecs(t.Squat(t.uniform("key", 4, inner=False), channels=8), t.uniform("value", 8))
t.PAIRS["higgs and integers"] = t.LayerCodecs(t.PAIRS["higgs-2"].key, t.uniform("value", 8))
pairs = {name: t.PAIRS[name] for name in t.PACKED_BY}
for name, pair in pairs.items():
    caches = [t.opened(t.scheme(pair, 1), own, kernels=way) for way in ("triton", "off")]
    for cache in caches:
        launched.clear() if cache is caches[0] else None
        own(t.token_ids(2, 109), attention_mask=t.left_mask([109, 75]), past_key_values=cache)
    same = all(torch.equal(a, b) for row in (0, 1) for a, b in zip(*(packed_row(c, row) for c in caches), strict=True))
    said = [cache.describe()["layers"][0]["packing"] for cache in caches]
    print(json.dumps([name, same, caches[0].ledger.blocks.tolist(), sorted(set(launched)), *said]))
place = torch.float16, torch.device("cpu")
keys = pairs["squat"].key, pairs["mixkvq"].key, t.MixKVQ(t.SHAPE, "key")
print(*(packing_trials.encode_trial(key, *place, 2) for key in keys))
t.Squat._moves = lambda self, basis, _own=t.Squat._moves: _own(self, basis * 1.5)
print(packing_trials.encode_trial(pairs["squat"].key, *place, 1))
rules = [
    packing_rules.rule_of(codec)
    for codec in (t.uniform("key", 4, mode="symmetric"), t.uniform("value", 2, mode="hybrid"))
]
given = (torch.float32, torch.float16), True, place[1]
print(packing_trials.quantise_trial(*rules, *given))
exact = packing_trials.quantise.quantise
packing_trials.quantise.quantise = lambda x, rule, factor=None: exact(x, rule, None)
print(packing_trials.quantise_trial(*rules, *given))
"""
# What packs a prompt, and the kernels that do.
PACKED_BY = {
    "kivi-4": ("the Triton kernel", ["quantise"]),
    "innerq": ("the Triton kernel", ["quantise"]),
    "innerq-prefill": ("the Triton kernel", ["quantise"]),
    "squat": ("Triton kernels of the codecs of keys, else the Triton kernel", ["corrected", "quantise"]),
    "squat by torch": ("corrections of keys by torch, else the Triton kernel", ["quantise"]),
    "higgs and integers": ("the Triton kernel", ["quantise"]),
    "mixkvq": ("Triton kernels of the codecs of keys, else torch: keys: no kernel quantises for mixkvq", ["select"]),
}


@needs_triton
def test_prompts_are_packed_by_kernels_bit_for_bit() -> None:
    lines = interpreted("-c", PROMPTS)
    for line, (name, (said, launched)) in zip(lines, PACKED_BY.items(), strict=False):
        found = json.loads(line)
        assert found[:2] == [name, True] and min(found[2]) > 0, found
        assert found[3] == launched and found[4] == said and found[5].startswith("torch: "), found
    rest = lines[len(PACKED_BY) :]
    assert rest == ["None None None", "words of packed keys differ", "None", "words of packed keys differ"], rest


@needs_triton
def test_kernels_refuse_a_nan_as_torch_does() -> None:
    """At the end of the forward, with one wait for the device; SQuat also where it corrects by torch before the kernel."""
    why = "0 layer 0, key head 1: a NaN or infinity reached the cache; only finite values can be compressed: check the "
    lines = interpreted("-c", REFUSED)
    assert len(lines) == 7 and all(line.startswith(f"70 {why}") for line in lines), lines


@needs_triton
def test_logits_of_the_triton_kernel_in_the_interpreter() -> None:
    lines = interpreted("-c", INTERPRETED)
    apart = float(lines[0]), float(lines.pop(1))
    assert max(apart) < 2e-3 and lines[1] == "fused: Triton kernel", lines  # of float16
    assert lines[2:9] == ["None", "None", "None None", *["None"] * 4], lines
    assert lines[9:12] == ["packed keys differ"] * 2 + ["key factors differ"], lines
    assert lines[12:14] == ["None", "packed keys differ"], lines  # SQuat's
    assert lines[14].startswith("2 new tokens behind a ring, warps a program 4: off by 0."), lines
    assert lines[15].startswith("2 new tokens behind a ring, warps a program 1: off by"), lines


HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def on_a_gpu(made: Scheme, dtype: torch.dtype, wanted: str, **options: Any) -> None:
    """Decode steps with what a cache takes by itself against the reference path, over a flush, 3 and 16 tokens at a
    time.

    Rounding of the dtype, and more where it moves a code that lies between two.
    """
    served = copy.deepcopy(model()).to(dtype).cuda()
    caches = opened(made, served, **options), opened(made, served, kernels="off")
    apart = torch.stack(steps(caches, token_ids(2, 140, seed=1).cuda(), [80, *range(81, 105), 108, 124])).tolist()
    paths = [row["path"] for row in caches[0].describe()["layers"]]
    assert all(wanted in path for path in paths), paths
    assert sorted(apart)[len(apart) // 2] < 8 * torch.finfo(dtype).eps and max(apart) < 0.1, apart


@pytest.mark.gpu
@HALVES
@pytest.mark.parametrize("name", PAIRS)
def test_logits_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    on_a_gpu(scheme(PAIRS[name]), dtype, "fused: Triton kernel", require_kernels=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PAIRS)
def test_prompts_are_packed_by_kernels_on_a_gpu(name: str) -> None:
    """As torch packs them there, but for what a division by a number that is no tensor moves, one code in some
    thousands.
    """
    served = copy.deepcopy(model()).half().cuda()
    caches = [opened(scheme(PAIRS[name]), served, kernels=way) for way in ("auto", "off")]
    mask = left_mask([140, 75]).cuda()
    for own in caches:
        with torch.no_grad():
            served(token_ids(2, 140, seed=1).cuda(), attention_mask=mask, past_key_values=own)
    for row in caches[0].describe()["layers"]:
        assert "Triton kernel" in row["packing"] and ("torch" in row["packing"]) == (name == "mixkvq"), row
    both_packed = list(zip(*(packed_row(one, 0) for one in caches), strict=True))
    for own, other in both_packed[: len(both_packed) // 3]:  # later layers read what earlier ones' numbers gave
        assert float((own == other).double().mean()) > 0.999


# The check before the first use.


@pytest.mark.parametrize("name", PAIRS)
def test_kernels_are_tried_on_blocks_of_one_room(name: str) -> None:
    """Whole groups of either side; grids share a table where a codec's do."""
    device, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    long = Form("key", 64, 2, 128, False, False)
    keys, values = PAIRS[name].key.fused(), PAIRS[name].value.fused()
    assert isinstance(keys, Form) and isinstance(values, Form)
    for key in (keys, long):
        each = max(key.scale_blocks, values.scale_blocks)
        own = trials._blocks(key, 2, each, None, device, generator)
        other = trials._blocks(values, 2, each, own.grid, device, generator)
        assert own.words.shape[2] == other.words.shape[2] == -(-9 // each) * each
        assert own.words.shape[2] == own.scale.shape[2] * key.scale_blocks and (own.order is None) != key.tiered
        if own.grid and other.grid:
            assert (own.grid.table.data_ptr() == other.grid.table.data_ptr()) == name.startswith("higgs-2")
        numbers = decode(own)[:, :, :288].std(), decode(other)[:, :, :288].std()
        assert all(0.5 < float(size) < 2 for size in numbers), numbers


class Card:
    """What torch says of a GPU that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setenv("KVCAL_CACHE_DIR", str(folder))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Card 1")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(verdicts, "triton_version", lambda: "3.7.1")
        monkeypatch.setattr(verdicts, "trial", self._trial)
        monkeypatch.setattr(verdicts, "append_trial", self._trial)
        monkeypatch.setattr(verdicts, "quantise_trial", self._trial)
        monkeypatch.setattr(notices, "_WARNED", set())
        self.tried: list[Any] = []
        self.says: Any = None
        self.file = folder / "preflight.json"
        self.forget()

    def _trial(self, *given: Any) -> Any:
        self.tried.append(given)
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    @staticmethod
    def forget() -> None:
        """As a new process."""
        verdicts._TRIED.clear()

    def ask(self, name: str = "inner-4", dtype: torch.dtype = torch.float16, ratio: int = 2) -> str | None:
        return choose.absence("auto", PAIRS[name], ratio, dtype, torch.device("cuda", 0))


def test_each_kernel_is_tried_once_and_the_verdict_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card = Card(monkeypatch, tmp_path / "new" / "folder")
    assert [card.ask() for _ in range(3)] == [None] * 3 and len(card.tried) == 1
    card.forget()
    assert card.ask() is None and len(card.tried) == 1
    for other in ({"name": "kivi-4"}, {"dtype": torch.bfloat16}, {"ratio": 4}):
        assert card.ask(**other) is None  # type: ignore[arg-type]
    assert len(card.tried) == 4
    kept = json.loads(card.file.read_text())
    assert len(kept) == 4 and set(kept.values()) == {None}
    assert sorted(path.name for path in card.file.parent.iterdir()) == ["preflight.json", "preflight.lock"]
    assert all("Card 1" in key and verdicts.source_hash() in key and "triton 3.7.1" in key for key in kept)
    card.forget()
    monkeypatch.setattr(verdicts, "source_hash", lambda: "another kernel")
    assert card.ask() is None and len(card.tried) == 5


@pytest.mark.parametrize(
    "name",
    ["kvcal_kernels/higgs/triton.py", "kvcal_kernels/residual_vq/nearest/residual.py",
     "kvcal_kernels/residual_vq/attention/triton.py",
     "kvcal_kernels/packing/triton.py", "kvcal_kernels/triton.py", "codecs/higgs.py",
     "preflight/verdicts.py", "preflight/trials.py"],
)  # fmt: skip
def test_another_kernel_or_codec_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    card, own, changed = Card(monkeypatch, tmp_path), Path.read_bytes, list[str]()

    def read(path: Path) -> bytes:
        data = own(path)
        if not path.as_posix().endswith(name):
            return data
        changed.append(name)
        return data + b"\n"

    assert card.ask() is None and len(card.tried) == 1
    verdicts.source_hash.cache_clear()
    card.forget()
    assert card.ask() is None and len(card.tried) == 1
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read)
        verdicts.source_hash.cache_clear()
        card.forget()
        assert card.ask() is None and len(card.tried) == 2 and changed == [name]
    verdicts.source_hash.cache_clear()


def test_a_kernel_that_fails_is_not_used_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card = Card(monkeypatch, tmp_path)
    card.says = "1 new tokens: off by 0.3 of the reference, allowed 0.004"
    with pytest.warns(UserWarning, match="does not pass on Card 1: 1 new tokens: off by 0.3.*decoded for") as seen:
        assert {card.ask() for _ in range(3)} == {f"the fused kernel does not pass on Card 1: {card.says}"}
    assert len(seen) == 1
    card.says = RuntimeError("no such instruction\nmore")
    with pytest.warns(UserWarning, match="RuntimeError: no such instruction;"):
        card.ask("kivi-4")
    card.forget()
    assert "no such instruction" in str(card.ask("kivi-4")) and len(card.tried) == 3  # by each process
    card.says = torch.OutOfMemoryError("5 GiB")
    with pytest.warns(UserWarning, match="ran out of memory"):
        card.ask("squat")
    card.forget()
    card.says = None
    assert card.ask("squat") is None  # that was no verdict


def test_an_append_kernel_that_fails_leaves_its_work_to_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card = Card(monkeypatch, tmp_path)
    place = torch.float16, torch.device("cuda", 0)
    assert card.ask() is None and not isinstance(packing_rules.rules("auto", PAIRS["innerq"], *place), str)
    assert len(card.tried) == 2 and len(json.loads(card.file.read_text())) == 2
    assert packing_rules.rules("torch", PAIRS["innerq"], *place) == "kernels='torch'"
    assert packing_rules.rules("auto", PAIRS["mixkvq"], *place) == "keys: no kernel quantises for mixkvq"
    assert not isinstance(packing_rules.rules("auto", PAIRS["squat"], *place), str)
    assert card.tried[-1][-1] == 32 and packing_rules.rules("auto", PAIRS["squat"], *place) and len(card.tried) == 3
    debiased = (Scaled(higgs(2, 256, gain="debiased").key, factor()), higgs(4, 256, gain="debiased").value)
    for pair in (
        PAIRS["higgs-4-debiased"],
        LayerCodecs(*debiased),
    ):  # of two layers, whose rules are not the same objects
        keys, values = packing_rules.rules("auto", pair, *place)
        assert keys.gain != values.gain and len(card.tried) == 4  # type: ignore[union-attr]
    kept = [name for name in json.loads(card.file.read_text()) if "vector 4" in name]
    assert len(kept) == 1 and "append" in kept[0] and "grid of 256, h2" in kept[0]
    card.says = "packed values differ"
    with pytest.warns(
        UserWarning, match="append kernel: packed values differ; what decode steps pack is packed by torch"
    ):
        found = packing_rules.rules("auto", PAIRS["kivi-4"], *place)
    assert found == "the append kernel does not pass: packed values differ"
    card.forget()
    assert packing_rules.rules("auto", PAIRS["kivi-4"], *place) == found and len(card.tried) == 5


def test_an_encoding_kernel_that_fails_leaves_its_work_to_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card = Card(monkeypatch, tmp_path)
    monkeypatch.setattr(verdicts, "_TRIED", {})
    monkeypatch.setattr(verdicts, "encode_trial", card._trial)
    place = torch.float16, torch.device("cuda", 0)
    for name, tried in (("higgs-2", 2), ("higgs-2", 2), ("higgs-4-debiased", 4)):
        pair = packing_rules.packing("auto", PAIRS[name], *place)
        assert pair.key is not PAIRS[name].key and pair.value._how is not None and len(card.tried) == tried  # type: ignore[attr-defined]
    assert card.tried[2][1] == torch.float32  # behind factors
    own = PAIRS["higgs-4-debiased"].key
    wide = own.shape.heads * own.shape.dim
    nothing = Linear({"weight": torch.zeros(wide, wide).half(), "bias": torch.zeros(wide)})
    behind_both = LayerCodecs(Predicted(own, nothing, ("k1",)), PAIRS["higgs-4-debiased"].value)
    # stored, and decoded at once, by other code than blocks that attention reads
    assert packing_rules.packing("auto", behind_both, *place).key is not behind_both.key and len(card.tried) == 5
    in_bytes = PAIRS["higgs-2-bytes"]  # their own; for look-ups as the papers' grids
    for pair, tried in ((in_bytes, 7), (in_bytes.read_by(8), 7), (PAIRS["higgs-2"], 7)):
        assert packing_rules.packing("auto", pair, *place).key.encodes_by_kernel and len(card.tried) == tried
    for kernels, name in (("torch", "higgs-2"), ("off", "higgs-2"), ("auto", "kivi-4")):
        pair = packing_rules.packing(kernels, PAIRS[name], *place)
        assert pair.key is PAIRS[name].key and pair.value is PAIRS[name].value
    card.says = "words of packed keys differ"
    with pytest.warns(UserWarning, match="encoding kernel: words of packed keys differ; blocks are packed by torch"):
        pair = packing_rules.packing("auto", PAIRS["turboquant-4-2"], *place)
    assert pair.key is PAIRS["turboquant-4-2"].key


@pytest.mark.parametrize("name", ["higgs-2", "higgs-4-debiased"])
def test_grids_of_all_caches_of_a_scheme_lie_in_one_place(name: str) -> None:
    """A CUDA graph of a step has their tables' addresses, whatever prompts its cache has had since, and may outlive
    what else knows of them.
    """
    made = scheme(PAIRS[name])
    twins = [[codec.by_kernel() for codec in (pair.key, pair.value)] for pair in [made.on(0, torch.device("cpu"))] * 3]
    for role in (0, 1):
        found = {id(packing_rules.rule_of(pair[role])) for pair in twins}
        assert len(found) == 1 and all(pair[role].encodes_by_kernel for pair in twins)
        rule = packing_rules.rule_of(twins[0][role])
        assert copy.deepcopy({"of a copied layer": rule})["of a copied layer"] is rule
    own = higgs(2, 16).key
    assert not isinstance(own.rule(), str) and isinstance(own.for_decoding().rule(), str)  # type: ignore[attr-defined]
    assert own.to(torch.device("cpu")).rule() is own.rule()  # type: ignore[attr-defined]
    in_bytes = higgs(2, 16, points="bytes").key
    assert (
        packing_rules.rule_of(in_bytes).form.in_bytes
        and not packing_rules.rule_of(in_bytes.for_lookups()).form.in_bytes
    )  # type: ignore[union-attr]


DAMAGED = {
    "cut": b"{", "a list": b"[1]", "empty": b"", "no UTF-8": b'{"a": "\xff"}', "brackets": b"[" * 100_000,
    "objects": b'{"a":' * 100_000, "an object": b'{"a": {"b": 1}}', "a number": b'{"a": null, "b": 3}', "true": b'{"a": true}',
    "a list of lines": b'{"a": ["off by 1"]}', "nothing": b"null",
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_none(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tried again, and the file is whole then."""
    card = Card(monkeypatch, tmp_path)
    card.file.write_bytes(DAMAGED[name])
    done = kvcal("doctor")
    assert (done.code, done.err) == (0, "") and "kernels checked on first use: 0 in" in done.out
    assert card.ask() is None and len(card.tried) == 1
    card.forget()
    assert card.ask() is None and len(card.tried) == 1 and set(json.loads(card.file.read_text()).values()) == {None}


def test_a_folder_that_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card = Card(monkeypatch, tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVCAL_CACHE_DIR", str(tmp_path / "file"))
    for _ in range(2):
        card.forget()
        assert card.ask() is None
    assert len(card.tried) == 2


RELEASES = {
    "open": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs)\nGCC 12.3.0 \n",
    "closed": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Thu Feb 22 01:44:30\nGCC version:  gcc 9.4.0 (",
}


@pytest.mark.parametrize("kind", RELEASES)
def test_another_driver_is_tried_again(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the kernel module names it; without one as CUDA does."""
    card, file = Card(monkeypatch, tmp_path), tmp_path / "version"
    monkeypatch.setattr(verdicts, "DRIVER", file)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=_offers_12_8))
    for text, said in ((RELEASES[kind], "570.124.06"), ("odd", "CUDA 12.8"), (None, "CUDA 12.8")):
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        verdicts.driver_version.cache_clear()
        card.forget()
        assert card.ask() is None and verdicts.driver_version() == said
    kept = sorted(name.rsplit(" | ", 1)[1] for name in json.loads(card.file.read_text()))
    assert len(card.tried) == 2 and kept == ["driver 570.124.06", "driver CUDA 12.8"]
    monkeypatch.setattr(ctypes, "CDLL", _missing)
    verdicts.driver_version.cache_clear()
    assert verdicts.driver_version() == "unknown"
    verdicts.driver_version.cache_clear()


def _offers_12_8(number: Any) -> int:
    number._obj.value = 12080
    return 0


def _missing(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


def test_a_warning_says_how_a_kernel_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the file keeps it from being tried."""
    card = Card(monkeypatch, tmp_path)
    card.says = "1 new tokens: off by 0.3"
    with pytest.warns(UserWarning, match="decoded for .* instead; to have it tried again delete .*/preflight.json$"):
        assert card.ask() == "the fused kernel does not pass on Card 1: 1 new tokens: off by 0.3"
    with pytest.warns(UserWarning, match="slowly; to have it tried again delete .*/preflight.json$"):
        packing_rules.rules("auto", PAIRS["kivi-4"], torch.float16, torch.device("cuda", 0))
    assert "to have those that fail tried again delete that file" in kvcal("doctor").out
    card.says = RuntimeError("no such instruction")
    with pytest.warns(UserWarning, match="no such instruction; packed blocks are decoded .* instead$"):
        card.ask("innerq")
    card.file.unlink()
    assert "tried again" not in kvcal("doctor").out


def _illegal(device: Any = None) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronous")


@pytest.mark.parametrize("kept", [True, False])
def test_a_check_that_ends_in_a_fault_of_cuda(kept: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process has no GPU left: one line says so, and the next process goes another way if it can know."""
    card = Card(monkeypatch, tmp_path if kept else tmp_path / "file")
    if not kept:
        (tmp_path / "file").write_text("")
    card.says = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda device=None: _illegal() if card.tried else None)
        with pytest.raises(KVCalError) as raised:
            card.ask()
    said = str(raised.value)
    assert said.startswith(
        "decode_attention: the check of this kernel ended in a CUDA fault on Card 1 (CUDA error: an il"
    )
    assert "\n" not in said and "asynchronous" not in said and raised.value.__cause__ is card.says
    card.forget()
    if not kept:
        assert said.endswith("/file/preflight.json cannot be written, so start again with kernels='off'")
        return
    assert said.endswith(f"start again: {card.file} now keeps this kernel from being used")
    with pytest.warns(UserWarning, match="its check ended in a CUDA fault: CUDA error: an illegal.*; to have it tried"):
        assert "ended in a CUDA fault" in str(card.ask())
    assert len(card.tried) == 1


def test_a_fault_before_a_check_is_none_of_its_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What ran before has left the process without its GPU: one line says so, and there is no verdict."""
    card = Card(monkeypatch, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", _illegal)
        with pytest.raises(
            KVCalError, match=r"^Card 1: .* what it ran before \(CUDA error: an illegal.* start again, with"
        ):
            card.ask()
    assert not card.tried and not card.file.exists()
    assert card.ask() is None and len(card.tried) == 1


def test_a_check_while_another_thread_records_a_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CUDA then refuses to wait: no fault, no verdict."""
    card = Card(monkeypatch, tmp_path)
    card.says = RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def refused(device: Any = None) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", refused)
        with pytest.warns(UserWarning, match=r"its check failed: .* stream is capturing"):
            card.ask()
    card.forget()
    card.says = None
    assert not card.file.exists() and card.ask() is None


def test_no_check_is_made_in_a_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is known needs none."""
    card = Card(monkeypatch, tmp_path)
    assert card.ask() is None
    card.forget()
    monkeypatch.setattr(verdicts, "capturing", lambda: True)
    assert card.ask() is None
    with pytest.raises(
        KVCalError, match=r"^decode_attention: a CUDA graph is being recorded, in which .* before you re"
    ):
        card.ask("kivi-4")
    assert len(card.tried) == 1


def test_a_check_is_made_without_autocast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Products of its float32 reference would be of the kernel's dtype: a verdict on both."""
    card, seen = Card(monkeypatch, tmp_path), list[bool]()
    monkeypatch.setattr(verdicts, "trial", lambda *given: seen.append(torch.is_autocast_enabled("cuda")))
    torch.set_autocast_enabled("cuda", True)
    try:
        assert card.ask() is None
        assert seen == [False] and torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.gpu
def test_a_cache_made_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its checks are refused before they end the recording, and pass behind it."""
    monkeypatch.setenv("KVCAL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(verdicts, "_TRIED", {})
    place = torch.float16, torch.device("cuda", torch.cuda.current_device())
    graph, x = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
    with torch.cuda.graph(graph):
        with pytest.raises(KVCalError, match="a CUDA graph is being recorded"):
            choose.absence("auto", PAIRS["kivi-4"], 2, *place)
        y = x + 1
    graph.replay()
    assert y.tolist() == [2.0] * 4
    assert choose.absence("auto", PAIRS["kivi-4"], 2, *place) is None


FAULT = """
import torch
from kvcal_artifacts.paths.preflight import verdicts
from kvcal_artifacts.errors import KVCalError
from tests.artifacts.paths.test_fused import PAIRS, choose
def fault(*given):
    print("tried")
    return str(torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")].sum().item())
verdicts.trial = fault
try:
    print(choose.absence("auto", PAIRS["inner-4"], 2, torch.float16, torch.device("cuda", 0)))
except KVCalError as error:
    print(error)
"""


@pytest.mark.gpu
def test_a_check_that_ends_in_a_fault_on_a_gpu(tmp_path: Path) -> None:
    """Of a process of its own, whose GPU is gone; the next one's is not."""
    environment = {**os.environ, "KVCAL_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    first, second = (
        subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True, env=environment, check=False)
        for _ in range(2)
    )
    assert len(first.stdout.splitlines()) == 2, first.stdout + first.stderr
    tried, said = first.stdout.splitlines()
    assert tried == "tried" and "ended in a CUDA fault on" in said and "device-side assert" in said, said
    assert said.endswith("preflight.json now keeps this kernel from being used")
    assert len(second.stdout.splitlines()) == 1 and "its check ended in a CUDA fault" in second.stdout, second.stdout


def test_two_threads_try_a_kernel_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card = Card(monkeypatch, tmp_path)
    begun, said = threading.Barrier(2), list[str | None]()

    def trial(*given: Any) -> str | None:
        card.tried.append(given)
        time.sleep(0.2)
        return None

    def ask() -> None:
        begun.wait(10)
        said.append(card.ask())

    monkeypatch.setattr(verdicts, "trial", trial)
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert said == [None, None] and len(card.tried) == 1


def test_gpus_that_triton_does_not_support(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card = Card(monkeypatch, tmp_path, (7, 2))
    with pytest.warns(UserWarning, match=r"Card 1 has compute capability 7\.2; Triton needs 8\.0"):
        assert "7.2" in str(card.ask())
    Card(monkeypatch, tmp_path)
    monkeypatch.setattr(verdicts, "triton_version", lambda: None)
    with pytest.warns(UserWarning, match="triton is not installed; packed blocks are decoded"):
        card.ask()
    assert not card.tried


def test_the_folder_of_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVCAL_CACHE_DIR", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert verdicts.folder() == tmp_path / "kvcal"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert verdicts.folder() == Path.home() / ".cache" / "kvcal"


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (["generate", "--prompt", "hello", "--preset", "kivi-2"], 8, "layer 0 and 7 more: no fused kernel"),
        (["eval", "--preset", "kivi-2", "--windows", "1", "--length", "200", "--step", "16"], 8, "no fused kernel for"),
        (
            ["compare", "--preset", "kivi-2", "--windows", "1", "--length", "200", "--step", "16"],
            8,
            "no fused kernel for",
        ),
        (["eval", "--preset", "kivi-2"], 2, "up to 16 tokens a call, --step is 32; give --step 16 or less"),
        (
            ["bench", "--device", "cpu", "--preset", "kivi-2", "--length", "200"],
            8,
            "scheme kivi-2: the layer is on cpu",
        ),
    ],
)
def test_commands_can_require_kernels(command: list[str], code: int, says: str) -> None:
    done = kvcal(*command, "--require-kernels")
    assert (done.code, says in done.err) == (code, True), done.err


def test_the_doctor_tells_of_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Card(monkeypatch, tmp_path)
    verdicts.keep("this kernel", None)
    verdicts.keep("that kernel", "off by 1")
    found = " ".join(kvcal("doctor").out.split())  # lines are broken at the terminal's width
    assert f"kernels checked on first use: 2 in {tmp_path / 'preflight.json'}" in found
    assert "passes: this kernel" in found and "fails, off by 1: that kernel" in found


@pytest.mark.parametrize("why", ["a link", "a full disk", "a folder"])
def test_a_file_of_verdicts_that_is_a_link_or_cannot_be_written(
    why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run does not end because it cannot keep a verdict, and leaves nothing half."""
    monkeypatch.setenv("KVCAL_CACHE_DIR", str(tmp_path))
    file, before = tmp_path / "preflight.json", ["preflight.json", "preflight.lock"]
    if why == "a folder":
        file.mkdir()
    else:
        file.symlink_to("elsewhere.json")
        before = ["elsewhere.json", *before]
        verdicts.keep("first", None)
        assert file.is_symlink() and json.loads((tmp_path / "elsewhere.json").read_text()) == {"first": None}
    with file_size_limit(4 if why == "a full disk" else 10_000):
        verdicts.keep("second", None)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before
    kept = {"a folder": [], "a full disk": ["first"], "a link": ["first", "second"]}
    assert [*verdicts.read()] == kept[why]


def test_processes_keep_their_verdicts_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of torchrun do."""
    monkeypatch.setenv("KVCAL_CACHE_DIR", str(tmp_path))

    def keep(number: int) -> None:
        for i in range(60):
            verdicts.keep(f"{number} {i}", None)

    context = multiprocessing.get_context("fork")  # a fresh process would import for 1.4 s
    started = [context.Process(target=keep, args=(number,)) for number in range(3)]
    for one in started:
        one.start()
    for one in started:
        one.join(120)
    assert [one.exitcode for one in started] == [0, 0, 0]
    found = json.loads((tmp_path / "preflight.json").read_text())
    assert sorted(found) == sorted(f"{number} {i}" for number in range(3) for i in range(60))


def test_a_folder_of_verdicts_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVCAL_CACHE_DIR", "~/verdicts")
    assert verdicts.folder() == tmp_path / "verdicts"


# What a review found.


@LONG
def test_a_mask_that_hides_columns_held_is_kept(longest: int | None, calls: list[int]) -> None:
    """A padded row, too: its own padding is nothing new."""
    ids, caches = token_ids(2, 84), both("inner-4")
    caches = opened(scheme(PAIRS["inner-4"]), model(), kernels="torch", max_length=longest), caches[1]
    mask = left_mask([80, 71])
    mask = torch.cat([mask, torch.ones(2, 4, dtype=torch.long)], 1)
    close(steps(caches, ids[:, :81], [80], mask[:, :81]))
    assert calls == [1] * 3
    hidden = mask.clone()
    hidden[:, 20:60] = 0
    for column, given, count in ((81, hidden, 3), (82, hidden, 3), (83, mask, 6)):
        out = []
        for one in caches:
            with torch.no_grad():
                more: Any = {"attention_mask": given[:, : column + 1], "position_ids": torch.full((2, 1), column)}
                out.append(model()(ids[:, column : column + 1], past_key_values=one, **more).logits)
        assert (out[0] - out[1]).norm() < 1e-5 * out[1].norm()
        assert len(calls) == count


def test_with_a_layer_that_grows_all_do_and_still_take_the_kernel(calls: list[int]) -> None:
    mixed = Scheme(WINDOWS, "post_rope", (PAIRS["inner-4"], None, PAIRS["inner-4"]), {1: "asked for"})
    caches = tuple(
        opened(mixed, model(), kernels=kernels, max_length=longest)
        for kernels, longest in (("torch", 256), ("off", None))
    )
    mask = torch.cat([left_mask([80, 60]), torch.ones(2, 4, dtype=torch.long)], 1)
    close(steps(caches, token_ids(2, 84), [80, 81], mask))  # type: ignore[arg-type]
    assert calls == [1, 1, 3, 3]
    assert "layer 1 is left to Transformers' own cache" in caches[0].describe()["compileable"]


@LONG
def test_a_forward_that_broke_off_is_noticed(longest: int | None) -> None:
    own, ids = opened(scheme(PAIRS["inner-4"]), model(), kernels="torch", max_length=longest), token_ids(1, 121)

    def fail(*given: Any) -> None:
        raise MemoryError("mine")

    with torch.no_grad():
        model()(ids[:, :80], past_key_values=own)
        hook = model().model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(MemoryError, match="mine"):
            model()(ids[:, 80:120], past_key_values=own)
        hook.remove()
        with pytest.raises(KVCalError, match="broke off"):
            model()(ids[:, 120:], past_key_values=own)


def test_anothers_forward_does_not_take_a_turn_that_was_left(calls: list[int]) -> None:
    own = opened(scheme(PAIRS["inner-4"]), model(), kernels="torch")
    layer: Any = own.layers[1]
    update = layer.update

    def interrupted(*given: Any, **more: Any) -> None:
        update(*given, **more)
        raise KeyboardInterrupt

    with torch.no_grad():
        model()(token_ids(1, 80), past_key_values=own)
        layer.update = interrupted
        with pytest.raises(KeyboardInterrupt):
            model()(token_ids(1, 1), past_key_values=own)
        vars(layer).pop("update")
        model()(token_ids(1, 5), use_cache=False)
        with pytest.raises(KVCalError, match="an earlier forward broke off"):
            model()(token_ids(1, 1), past_key_values=own)
    assert calls == [1]


@LONG
def test_gradients_of_queries_alone_take_the_reference_path(longest: int | None, calls: list[int]) -> None:
    own = build("Llama", head_dim=64)
    for name, weight in own.named_parameters():
        weight.requires_grad_("q_proj" in name)
    kept = opened(scheme(PAIRS["inner-4"], own.config.num_hidden_layers), own, kernels="torch", max_length=longest)
    with torch.no_grad():
        own(token_ids(1, 80), past_key_values=kept)
    own(token_ids(1, 2), past_key_values=kept).logits.sum().backward()
    assert not calls and own.model.layers[0].self_attn.q_proj.weight.grad.norm() > 0


def test_whether_the_kernel_runs_is_seen_from_the_keys_that_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights may be packed, moved or cast between construction and the prompt."""
    own = build("Llama", head_dim=64)
    monkeypatch.setattr(
        choose, "absence", lambda kernels, pair, ratio, dtype, *rest: {torch.bfloat16: None}.get(dtype, "no")
    )
    kept = opened(scheme(PAIRS["inner-4"], own.config.num_hidden_layers), own, kernels="torch")
    assert "no" in kept.describe()["path"]
    own.bfloat16()
    with torch.no_grad():
        own(token_ids(1, 80), past_key_values=kept)
    assert "kernel" in kept.describe()["path"] and "no" not in {layer.paths.refused for layer in kept.compressed_layers}


def test_kernels_that_are_tried_are_compiled_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, in the order of the calls, on the caller's stream and in its modes; the first error is raised."""
    device, stream, seen = SimpleNamespace(type="cuda"), object(), list[Any]()
    monkeypatch.setattr(trials, "interpreted", lambda: False)
    monkeypatch.setattr(trials, "COMPILERS", 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda given: seen.append(given) or nullcontext())
    both = threading.Barrier(3)

    def call(number: int) -> tuple[int, bool, bool]:
        both.wait(10)  # which breaks where one call waits for another's end
        return number, torch.is_grad_enabled(), threading.current_thread() is threading.main_thread()

    with torch.no_grad():
        found = trials.in_threads([partial(call, number) for number in range(3)], device)  # type: ignore[arg-type]
    assert found == [(number, False, False) for number in range(3)] and seen == [stream] * 3

    def fails() -> None:
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        trials.in_threads([fails, lambda: None], device)  # type: ignore[arg-type]
    here = [threading.current_thread] * 2
    assert trials.in_threads(here, torch.device("cpu")) == [threading.main_thread()] * 2


def test_architectures_with_scores_of_their_own_are_refused() -> None:
    own = build("DiffLlama", head_dim=64)
    pair = PAIRS["inner-4"]
    kept = opened(scheme(pair, own.config.num_hidden_layers), own, kernels="torch")
    assert "computes more than softmax" in kept.describe()["layers"][0]["path"]


# Keys before RoPE.


BEFORE = ["inner-4", "kivi-4", "squat"]


def before_rope(name: str, served: nn.Module | None = None, **options: Any) -> tuple[KVCalCache, KVCalCache]:
    own = model() if served is None else served
    made = scheme(PAIRS[name], own.config.num_hidden_layers, "pre_rope")
    return opened(made, own, kernels="torch", **options), opened(made, own, kernels="off")


@pytest.mark.parametrize("name", BEFORE)
def test_keys_before_rope_give_the_reference_paths_logits(name: str, calls: list[int]) -> None:
    caches = before_rope(name)
    close(steps(caches, token_ids(2, 140, seed=1), [80, *range(81, 105), 120, 137]))
    assert calls == [q for q in [*[1] * 24, 16, 3] for _ in range(3)]
    assert "fused" in caches[0].describe()["path"]


SCALED_ROPE: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"factor": 2.0},
}


@pytest.mark.parametrize("kind", SCALED_ROPE)
def test_rope_of_every_kind_is_the_models_own(kind: str, calls: list[int]) -> None:
    """Of YaRN cosines are scaled, of `dynamic` frequencies change beyond the 96 tokens that the model was made for."""
    given = {"rope_type": kind, "rope_theta": 1e4, **SCALED_ROPE[kind]}
    own = build("Llama", head_dim=64, max_position_embeddings=96, rope_parameters=given)
    close(steps(before_rope("kivi-4", own), token_ids(1, 150, seed=2), [80, 90, 91, *range(92, 130), 145]))
    assert len(calls) == 3 * 42


def test_part_of_a_head_is_turned(calls: list[int]) -> None:
    given = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    own = build("Phi3", head_dim=64, sliding_window=None, rope_parameters=given)
    assert before_rope("inner-4", own)[0].stored_rope.rotary == 32
    close(steps(before_rope("inner-4", own), token_ids(1, 90), [80, 81, 84]))
    assert len(calls) == 9


def test_padded_rows_and_crops_before_rope(calls: list[int]) -> None:
    mask = left_mask([120, 90, 40, 3])
    mask = torch.cat([mask, torch.ones(4, 40, dtype=mask.dtype)], 1)
    caches = before_rope("kivi-4")
    close(steps(caches, token_ids(4, 160, seed=2), [120, *range(121, 150), 155], mask))
    assert len(calls) == 3 * 31 and caches[0].ledger.starts.tolist() == [0] * 4
    ids, caches = token_ids(1, 160, seed=3), before_rope("kivi-4")
    steps(caches, ids[:, :110], [100, 105])
    for count in (7, 40):  # in the window, and into packed blocks
        for own in caches:
            own.crop(-count)
        at = caches[0].ledger.columns
        taken = len(calls)
        close(steps(caches, ids[:, at : at + 4], [1, 3]))
        assert len(calls) == taken + 9


def placed(caches: tuple[KVCalCache, KVCalCache], positions: Tensor, cuts: list[int]) -> list[Tensor]:
    """As `steps`, at positions (B, T)."""
    ids, apart = token_ids(*positions.shape, seed=5), []
    for start, stop in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
        with torch.no_grad():
            out = [
                own.model(ids[:, start:stop], past_key_values=own, position_ids=positions[:, start:stop]).logits
                for own in caches
            ]
        apart.append((out[0] - out[1]).norm() / out[1].norm())
    return apart


def test_rows_may_begin_anywhere_but_gaps_take_the_reference_path(calls: list[int]) -> None:
    caches = before_rope("kivi-4")
    own = torch.arange(100).repeat(2, 1)
    own[1] += 500
    close(placed(caches, own, [90, 91, 95]))
    assert len(calls) == 9 and caches[0].ledger.starts.tolist() == [0, 500]
    for chosen in ([1, 0], [0]):  # what is kept of rows goes along
        for kept in caches:
            kept.batch_select_indices(torch.tensor(chosen))
    assert caches[0].ledger.starts.tolist() == [500]
    close(placed(caches, torch.arange(600, 603)[None], [1]))
    assert len(calls) == 15
    close(placed(caches, torch.arange(700, 703)[None], [1]))
    assert len(calls) == 15
    assert "do not follow one another" in caches[0].describe()["path"]
    for kept in caches:
        kept.reset()
    close(placed(caches, torch.arange(90)[None], [85, 88]))
    assert len(calls) == 21


def test_the_test_of_turned_keys_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    own = StoredRope.of_rows
    later = lambda self, ledger, device, sink, *rest: own(self, ledger, device, sink + 32, *rest)  # noqa: E731
    monkeypatch.setattr(StoredRope, "of_rows", later)
    with pytest.raises(AssertionError):
        close(steps(before_rope("kivi-4"), token_ids(1, 83), [80, 81, 82]))


def test_rope_that_does_not_turn_evenly_takes_the_reference_path(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = build("Llama", head_dim=64)
    rotary, plain = served.model.rotary_emb, type(served.model.rotary_emb).forward
    monkeypatch.setattr(rotary, "forward", lambda x, position_ids: plain(rotary, x, position_ids.float() ** 1.2))
    caches = before_rope("kivi-4", served)
    close(steps(caches, token_ids(1, 83), [80, 81]))
    assert not calls and "does not rotate evenly" in caches[0].describe()["path"]


@pytest.mark.gpu
@HALVES
@pytest.mark.parametrize("name", BEFORE)
def test_logits_of_keys_before_rope_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    on_a_gpu(scheme(PAIRS[name], frame="pre_rope"), dtype, "fused: Triton kernel", require_kernels=True)
