"""Attention errors of `kvcal compare`: against a plain loop over captured tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcal.capture.scan import Capture, WholeModel
from kvcal.evaluate.attention_error import attention_errors
from kvcal.methods.data_free import Preset
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import Context
from kvcal_artifacts.scheme import Frame, HeavyHitters, Scheme
from tests.support.architectures import TINY, initialise

STEP, LENGTH = 32, 160


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    made = TINY["llama"]()
    initialise(made, 0)
    return made.eval()


def by_hand(model: torch.nn.Module, ids: Tensor, scheme: Scheme) -> dict[int, tuple[float, float]]:
    """Sink 0, recent 0, blocks of one step: a query sees all steps before its own packed, its own exact."""
    found = {}
    with Capture(WholeModel(model), ids, device="cpu") as capture:
        for taps in capture:
            batch = next(iter(taps.batches(frozenset("qkv"), "post_rope")))
            assert batch.q is not None and batch.k is not None and batch.v is not None
            pair, sums = scheme.layers[taps.index], [0.0] * 4
            assert pair is not None
            k_made = pair.key.decode(pair.key.encode(batch.k, Context(taps.index)), Context(taps.index))
            v_made = pair.value.decode(pair.value.encode(batch.v, Context(taps.index)), Context(taps.index))
            group = batch.q.shape[1] // batch.k.shape[1]
            for row in range(len(ids)):
                for head in range(batch.q.shape[1]):
                    for t in range(STEP, LENGTH):
                        first = t // STEP * STEP
                        q, kv = batch.q[row, head, t].double(), head // group
                        scores, outputs = [], []
                        for k, v in ((batch.k, batch.v), (k_made, v_made)):
                            keys = torch.cat([k[row, kv, :first], batch.k[row, kv, first : t + 1]]).double()
                            values = torch.cat([v[row, kv, :first], batch.v[row, kv, first : t + 1]]).double()
                            score = keys @ q / q.shape[0] ** 0.5
                            outputs.append(score.softmax(0) @ values)
                            scores.append(score - score.mean())
                        for i, (exact, made) in enumerate((scores, outputs)):
                            sums[2 * i] += float((made - exact).square().sum())
                            sums[2 * i + 1] += float(exact.square().sum())
            found[taps.index] = (sums[0] / sums[1]) ** 0.5, (sums[2] / sums[3]) ** 0.5
            taps.advance()
    return found


def test_equals_a_plain_loop(model: torch.nn.Module) -> None:
    ids = torch.randint(0, model.config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr,arg-type]
    scheme = Preset("kivi-2", "uniform-4", sink=0, recent=0).scheme(model)
    found = attention_errors(model, ids, lambda: KVCalCache(scheme, model), step=STEP, batch=1)
    assert found is not None
    for layer, (logit, output) in by_hand(model, ids, scheme).items():
        assert found.logit[layer] == pytest.approx(logit, rel=1e-4)
        assert found.output[layer] == pytest.approx(output, rel=1e-4)
        assert logit > 0.01
    for row in found.rows():  # a layer's error lies between those of its heads
        for name in ("logit", "output"):
            heads = row[f"{name}_head_errors"]
            assert len(heads) == model.config.num_key_value_heads  # type: ignore[union-attr]
            assert min(heads) <= row[f"{name}_error"] <= max(heads) and min(heads) < max(heads)


@pytest.mark.parametrize("name", ["uniform-2", "higgs-2", "pre-rope"])
def test_one_call_gives_what_steps_give(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Windows, sinks and keys before RoPE; blocks that are shorter and longer than a step."""
    ids = torch.randint(0, model.config.vocab_size, (2, 230), generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr,arg-type]
    frame: Frame = "pre_rope" if name == "pre-rope" else "post_rope"
    codec = "uniform-2" if name == "pre-rope" else name
    for block in (8, 64):
        scheme = Preset(codec, codec, frame, sink=3, recent=20, block=block).scheme(model)
        found = attention_errors(model, ids, lambda scheme=scheme: KVCalCache(scheme, model), step=STEP)
        with monkeypatch.context() as patch:
            patch.setattr("kvcal.evaluate.attention_error.decodes_alike", lambda cache: False)
            in_steps = attention_errors(model, ids, lambda scheme=scheme: KVCalCache(scheme, model), step=STEP)
        assert found is not None and in_steps is not None
        assert found.logit == pytest.approx(in_steps.logit, rel=1e-4)
        assert found.output == pytest.approx(in_steps.output, rel=1e-4)
        assert min(found.logit.values()) > 0.01


def test_an_exact_codec_has_no_error_and_evicted_tokens_have_none(model: torch.nn.Module) -> None:
    ids = torch.randint(0, 50, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    exact = Preset("exact-32", "exact-32", sink=0, recent=0).scheme(model)
    found = attention_errors(model, ids, lambda: KVCalCache(exact, model), step=STEP)
    assert found is not None and found.as_dict() == {"logit_error": 0.0, "output_error": 0.0}
    kept = exact.keeping(HeavyHitters(0.5, 0.5))
    assert attention_errors(model, ids, lambda: KVCalCache(kept, model), step=STEP) is None


def test_the_model_is_left_as_it_was(model: torch.nn.Module) -> None:
    ids = torch.randint(0, 50, (1, 64), generator=torch.Generator().manual_seed(0))
    before = model(ids).logits
    scheme = Preset("uniform-2", "uniform-2", sink=0, recent=0).scheme(model)
    attention_errors(model, ids, lambda: KVCalCache(scheme, model), step=STEP)
    assert torch.equal(model(ids).logits, before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
