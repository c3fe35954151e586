"""Layers that the reconstruction kernel decodes into storage that all share: against the reference path, in every
frame.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend
from transformers import DynamicCache

from kvcal_artifacts import hf
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import Codec, Higgs, Predicted, Shape
from kvcal_artifacts.codecs.predictors import Linear
from kvcal_artifacts.errors import KernelsUnavailable
from kvcal_artifacts.paths.dequantised import LayerDequantiser
from kvcal_artifacts.paths.preflight import (
    trials,  # noqa: F401, of scripts below
    verdicts,
)
from kvcal_artifacts.scheme import HeavyHitters, LayerCodecs, Scheme
from tests.artifacts.paths.test_fused import HALVES, WINDOWS, Card, close, generated, model, on_a_gpu, steps
from tests.support.architectures import build, rope
from tests.support.interpreted import interpreted, needs_triton
from tests.support.schemes import close_all, left_mask, numbers, opened, token_ids

pytestmark = needs_triton
SHAPE = Shape(2, 64, 32)
FRAMES = pytest.mark.parametrize("frame", ["post_rope", "pre_rope"])


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    close_all()


def predicted(role: Any, inputs: tuple[str, ...], seed: int, rotation: Any = "token") -> Codec:
    wide = 128 * len(inputs)
    weights = {"weight": (numbers(wide, 128, seed=seed) / wide**0.5).half(), "bias": numbers(128, seed=seed).half()}
    return Predicted(Higgs(SHAPE, role, rotation=rotation, gain="debiased"), Linear(weights), inputs)


def chained(frame: Any = "post_rope", layers: int = 3, far: bool = False) -> Scheme:
    """far: keys of layers from the third on are predicted from two layers below."""
    pairs = [LayerCodecs(*(Higgs(SHAPE, role, 2, 256, "token") for role in ("key", "value")))]  # type: ignore[arg-type]
    for index in range(1, layers):
        below = ("k1", "v2") if far and index > 1 else ("k1",)
        pairs.append(LayerCodecs(predicted("key", below, index), predicted("value", ("v1", "k0"), index, "head")))
    return Scheme(WINDOWS, frame, tuple(pairs))


def both(made: Scheme, served: Any = None, **options: Any) -> tuple[KVCalCache, KVCalCache]:
    own = model() if served is None else served
    return opened(made, own, kernels="torch", **options), opened(made, own, kernels="off", **options)


def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers that readers read, by the number of their storage."""

    seen: list[int] = []
    own = LayerDequantiser.__call__

    def counted(self: LayerDequantiser, *given: Any) -> Any:
        seen.append(self._number)
        return own(self, *given)

    monkeypatch.setattr(LayerDequantiser, "__call__", counted)
    return seen


@FRAMES
@pytest.mark.parametrize("far", [False, True])
def test_logits_are_those_of_the_reference_path(frame: Any, far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, more of it, single tokens over a flush, many at a time; storage stays where it is."""
    seen, caches = reads(monkeypatch), both(chained(frame, 4, far), model(num_hidden_layers=4))
    cuts = [80, 97, *range(112, 118), 150]
    close(steps(caches, token_ids(2, 170, seed=1), cuts))
    places = [0, 1, 2, 0] if far else [0, 1, 0, 1]
    assert seen == places * len(cuts)
    rooms = caches[0].memory.storage(torch.device("cpu"))
    kinds = 3 if frame == "pre_rope" else 2
    assert caches[0].describe()["shared_bytes"] == rooms.nbytes == kinds * (3 if far else 2) * 2 * 2 * 256 * 64 * 4
    where = {name: t.data_ptr() for name, t in rooms._buffers.items()}
    close(steps(caches, token_ids(2, 3), [1, 2]))
    assert {name: t.data_ptr() for name, t in rooms._buffers.items()} == where
    for one in caches:
        one.crop(-60)
    close(steps(caches, token_ids(2, 3), [1, 2]))


@FRAMES
def test_left_padding_and_rows_that_pack_nothing(frame: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, mask = reads(monkeypatch), torch.cat([left_mask([120, 60, 3]), torch.ones(3, 40, dtype=torch.long)], 1)
    caches = both(chained(frame))
    close(steps(caches, token_ids(3, 160, seed=2), [120, 121, 132, 133, 155], mask))
    assert seen and caches[0].ledger.blocks.tolist() == [3, 2, 0]


FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {  # channels of a head that RoPE turns by halves
    "Qwen3": (64, {}),
    "Olmo2": (64, {}),
    "Phi3": (32, {"rope_parameters": rope("default", partial_rotary_factor=0.5), "sliding_window": None}),
    "Llama": (64, {"rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=128)}),
    "Cohere": (0, {}),  # neighbours are pairs
    "SmolLM3": (64, {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
}


@FRAMES
@pytest.mark.parametrize("family", FAMILIES)
def test_architectures(family: str, frame: Any) -> None:
    """Norms on keys, fused projections, RoPE of a part, scaled, and in neighbouring pairs, layers without."""
    turned, more = FAMILIES[family]
    own = build(family, head_dim=64, **more)
    caches = both(chained(frame, own.config.num_hidden_layers), own)
    close(steps(caches, token_ids(2, 90), [80, 81, 84]))
    turns = [0 if own is None else own[0].cos.shape[-1] for own in caches[0].forward._split_rotations.values()]
    assert turns == ([turned] if frame == "pre_rope" else [])


def test_generate_beams_and_copies() -> None:
    ids = token_ids(1, 30, seed=4).repeat(1, 3)
    for options in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 5}):
        found = [generated(own, ids, **options) for own in both(chained("pre_rope"))]
        assert found[0] == found[1]
    caches = both(chained())
    steps(caches, ids, [80, 81])
    twins = copy.deepcopy(caches[0]), copy.deepcopy(caches[1])
    close(steps(caches, token_ids(1, 2), [1]))
    close(steps(twins, token_ids(1, 3), [1]))
    assert twins[0].memory.storage(torch.device("cpu")) is not caches[0].memory.storage(torch.device("cpu"))
    for twin in twins:
        twin.close()


def test_storage_made_in_inference_mode_serves_outside() -> None:
    own, ids = both(chained())[0], token_ids(1, 90)
    with torch.inference_mode():
        own.model(ids[:, :80], past_key_values=own)
        own.model(ids[:, 80:81], past_key_values=own)
    with torch.no_grad():
        own.model(ids[:, 81:82], past_key_values=own)


def test_gradients_and_remembered_blocks_take_the_reference_path(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, served = reads(monkeypatch), build("Llama", head_dim=64)
    own = both(chained(), served)[0]
    with torch.no_grad():
        served(token_ids(1, 80), past_key_values=own)
    served(token_ids(1, 2), past_key_values=own).logits.sum().backward()
    assert served.model.layers[0].self_attn.q_proj.weight.grad.norm() > 0
    kept = both(chained(), remember=True)[0]
    steps((kept, kept), token_ids(1, 83), [80, 81])
    assert not seen


def test_describe_says_who_decodes() -> None:
    def path(made: Scheme, kernels: str = "torch", layer: int = 1) -> str:
        found: str = opened(made, model(), kernels=kernels).describe()["layers"][layer]["path"]
        return found

    assert path(chained()).endswith("which decoding makes; reconstructed by its reference in torch")
    assert "not the reconstruction kernel: the layer is on cpu" in path(chained(), "auto")
    assert "not the reconstruction kernel: kernels='off'" in path(chained(), "off")
    assert "not the reconstruction kernel: token selection" in path(chained().keeping(HeavyHitters()))
    wide = LayerCodecs(*(Higgs(SHAPE, role, rotation="token") for role in ("key", "value")))  # type: ignore[arg-type]
    assert "HIGGS rotated over all heads" in path(Scheme(WINDOWS, "post_rope", (wide,) * 3))
    assert "; reconstructed" in path(Scheme(WINDOWS, "post_rope", (wide,) * 3))


def test_caches_on_one_device_share_readers() -> None:
    made = chained()
    first, second = (opened(made, model(), kernels="torch") for _ in range(2))
    for own in (first, second):
        with torch.no_grad():
            own.model(token_ids(1, 81), past_key_values=own)
    assert all(
        a.paths.dequantiser is b.paths.dequantiser is not None
        for a, b in zip(first.compressed_layers, second.compressed_layers, strict=True)
    )


def test_a_kernel_that_fails_its_check_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvcal_artifacts.paths import dequantised

    card = Card(monkeypatch, tmp_path)
    pair, place = chained().layers[1], (torch.float16, torch.device("cuda", 0))
    assert pair is not None
    monkeypatch.setattr(verdicts, "_TRIED", {})
    monkeypatch.setattr(verdicts, "dequantise_trial", card._trial)
    assert dequantised.refusal("auto", pair, *place) is None and len(card.tried) == 2
    assert dequantised.refusal("auto", pair, *place) is None and len(card.tried) == 2
    monkeypatch.setattr(verdicts, "_TRIED", {})
    assert dequantised.refusal("auto", pair, *place) is None and len(card.tried) == 2  # of the file
    card.says, monkeypatch_key = "512 tokens: off by 0.3", "another kernel"
    monkeypatch.setattr(verdicts, "source_hash", lambda: monkeypatch_key)
    with pytest.warns(
        UserWarning, match="the reconstruction kernel does not pass on Card 1: 512 tokens: off by 0.3; packed"
    ):
        assert "512 tokens" in str(dequantised.refusal("auto", pair, *place))
    assert "torch.float32; the kernel writes" in str(dequantised.refusal("auto", pair, torch.float32, place[1]))


def test_a_scheme_that_is_reconstructed_has_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    opened(chained(), model(), kernels="torch", require_kernels=True)
    with pytest.raises(KernelsUnavailable, match="layer 0 and 2 more: no fused kernel"):
        KVCalCache(chained(), model(), kernels="auto", require_kernels=True)


def backends(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether cuDNN may take each call of torch's attention, as if on a GPU that has flash."""
    seen: list[bool] = []
    own = torch.nn.functional.scaled_dot_product_attention

    def spy(query: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return own(query, *given, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(hf.seam, "has_flash", lambda query: True)
    return seen


@pytest.mark.parametrize("kernels", ["torch", "off"])
def test_steps_of_growing_keys_leave_cudnn_out(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would build a plan for each number of keys. Prompts, a mask, and other caches of the model keep it."""
    own, seen, ids = model(), backends(monkeypatch), token_ids(2, 84)
    cache = opened(chained(), own, kernels=kernels)

    def run(held: Any, start: int, stop: int, mask: Any = None) -> bool:
        seen.clear()
        with torch.no_grad():
            own(ids[:, start:stop], past_key_values=held, attention_mask=mask)
        assert torch.backends.cuda.cudnn_sdp_enabled() and len(seen) == 3 and len(set(seen)) == 1
        return seen[0]

    plain, pieces = DynamicCache(config=own.config), [(0, 80), (80, 81), (81, 83), (83, 84)]
    assert [run(plain, *piece) for piece in pieces] == [True] * 4
    assert [run(cache, *piece) for piece in pieces] == [True, kernels == "off", True, kernels == "off"]
    cache.reset()
    mask = torch.cat([left_mask([80, 60]), torch.ones(2, 1, dtype=torch.long)], 1)
    assert run(cache, 0, 80, mask[:, :80]) and run(cache, 80, 81, mask)


def test_cudnn_comes_back_behind_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    own, cache = model(), opened(chained(), model(), kernels="torch")
    monkeypatch.setattr(hf.seam, "has_flash", lambda query: True)
    with torch.no_grad():
        own(token_ids(1, 80), past_key_values=cache)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            own(token_ids(1, 1), past_key_values=cache)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def kernels_of(own: Any, cache: Any, ids: torch.Tensor) -> str:
    """Names of all kernels of a step behind `ids`."""
    from torch.profiler import ProfilerActivity, profile

    with torch.no_grad():
        own(ids, past_key_values=cache)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            own(ids[:, :1], past_key_values=cache)
            torch.cuda.synchronize()
    return " ".join(event.key for event in seen.key_averages())


@pytest.mark.gpu
@HALVES
def test_no_plan_of_cudnn_on_a_gpu(dtype: torch.dtype) -> None:
    """Where torch prefers cuDNN, DynamicCache's step takes it (its kernels are named after flash, too); ours never
    does.
    """
    served = copy.deepcopy(model()).to(dtype).cuda()
    ids = token_ids(1, 80).cuda()
    own = kernels_of(served, opened(chained(), served), ids)
    assert "flash_fwd" in own and "cudnn" not in own
    plain = kernels_of(served, DynamicCache(config=served.config), ids)
    prefers = torch._C._get_sdp_priority_order()[0] == int(SDPBackend.CUDNN_ATTENTION)
    assert "cudnn" in plain or not prefers
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
@FRAMES
@HALVES
def test_logits_on_a_gpu(dtype: torch.dtype, frame: Any) -> None:
    on_a_gpu(chained(frame), dtype, "; reconstructed by the Triton kernel", require_kernels=True)


INTERPRETED = """
import torch
from tests.artifacts.paths import test_dequantised as t
from kvcal_artifacts.paths.preflight import packing_trials, trials
from kvcal_artifacts.codecs import Context
from kvcal_kernels import dequantise
from kvcal_kernels.dequantise import triton as kernel
kernel.launch_for = lambda device: kernel.Launch(32, 32, 4, 2)
own = t.build("Llama", head_dim=64, num_hidden_layers=2).half()
made = t.chained("pre_rope", 2)
caches = t.opened(made, own, kernels="triton"), t.opened(made, own, kernels="off")
print(max(float(x) for x in t.steps(caches, t.token_ids(1, 74), [72, 73])))
print(caches[0].describe()["layers"][1]["path"][-35:])
codec = made.layers[1].key
print(trials.dequantise_trial(codec, torch.float16, 64, torch.device("cpu"), "triton", (64,)))
run = kernel.dequantise
kernel.dequantise = lambda coded, prepared, inputs, *rest: run(coded, prepared, [x * 1.01 for x in inputs], *rest)
print(trials.dequantise_trial(codec, torch.float16, 64, torch.device("cpu"), "triton", (64,)))
kernel.dequantise, kernel.place = run, dequantise.place
print(trials.dequantise_trial(codec, torch.float16, 64, torch.device("cpu"), "triton", (64,)))
kernel.place = lambda whole, sink, window, new, behind, turn: dequantise.place(whole, sink, window, new, behind)
print(trials.dequantise_trial(codec, torch.float16, 64, torch.device("cpu"), "triton", (64,)))
x, context = t.numbers(2, 2, 64, 64, seed=1), Context(1, k1=t.numbers(2, 2, 64, 64, seed=2))
(packed, made), (own, here) = (one.encode_decode(x, context) for one in (codec, codec.by_kernel()))
print(codec.by_kernel() is not codec, torch.equal(made, here), all(torch.equal(packed[n], own[n]) for n in packed))
print(packing_trials.encode_trial(codec.inner, torch.float32, torch.device("cpu")))
"""


def test_logits_of_the_triton_kernel_in_the_interpreter() -> None:
    lines = interpreted("-c", INTERPRETED)
    assert float(lines[0]) < 4e-3 and lines[1].endswith("reconstructed by the Triton kernel"), lines  # of float16
    assert lines[2] == "None" and lines[3].startswith("64 tokens: off by"), lines
    assert lines[4:6] == ["None", "exact tokens around the packed ones differ"], lines
    assert lines[6:] == ["True True True", "None"], lines
