"""A tensor-parallel model (tp_plan) over two processes: each stores its own kv heads, and the tokens are those of one
process.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from transformers import LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.cache.auto import auto_scheme
from kvcal_artifacts.codecs import ByHead, MixKVQ, Shape
from kvcal_artifacts.errors import UnsupportedModel
from kvcal_artifacts.hf.head_shards import head_shard
from kvcal_artifacts.scheme import HeavyHitters, LayerCodecs, Scheme
from tests.artifacts.paths import test_codebook, test_dequantised, test_fused
from tests.artifacts.paths.test_fused import PAIRS, SHAPE, WINDOWS, uniform
from tests.support.ranks import in_ranks
from tests.support.schemes import left_mask, token_ids

LAYERS = 2
FAR = 3e-3  # a code that lies between two may fall to either side
CALLS = [80, 81, 82, 90, 98, 106, 114, 122, 123]  # a prompt, and steps beyond two flushes


def scheme(pair: LayerCodecs, frame: Any = "post_rope") -> Scheme:
    return Scheme(WINDOWS, frame, (pair,) * LAYERS)


def by_head() -> LayerCodecs:
    """Two codecs for the two heads: each process has one."""
    parts = [test_fused.Uniform(Shape(1, SHAPE.dim, SHAPE.block), "key", bits, 32) for bits in (4, 8)]
    return LayerCodecs(ByHead(parts), uniform("value", 4))


SCHEMES = {
    **{name: scheme(PAIRS[name]) for name in ("inner-4", "kivi-4", "innerq-prefill", "squat", "mixkvq", "higgs-2")},
    "kivi-4 before RoPE": scheme(PAIRS["kivi-4"], "pre_rope"),
    "vectors": scheme(test_codebook.PAIR),
    "by head": scheme(by_head()),
    "H2O": scheme(PAIRS["kivi-4"]).keeping(HeavyHitters(0.9, 0.5)),
    "aqua": test_dequantised.chained(layers=LAYERS),
    "aqua before RoPE": test_dequantised.chained("pre_rope", LAYERS),
    "ragged": scheme(LayerCodecs(MixKVQ(SHAPE, "key"), uniform("value", 2))),
    "ragged, H2O": scheme(LayerCodecs(MixKVQ(SHAPE, "key"), uniform("value", 2))).keeping(HeavyHitters(0.9, 0.5)),
}
TOGETHER = {"aqua", "aqua before RoPE", "ragged", "ragged, H2O"}  # whose codecs store heads together


@torch.no_grad()
def logits(cache: KVCalCache, model: Any) -> Tensor:
    """Of a left-padded batch, call after call."""
    ids, mask, parts = token_ids(2, CALLS[-1], seed=1), left_mask([CALLS[-1], CALLS[-1] - 7]), []
    for start, stop in zip([0, *CALLS[:-1]], CALLS, strict=True):
        places = (mask.cumsum(1) - 1).clamp_min(0)[:, start:stop]
        out = model(ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=places, past_key_values=cache)
        parts.append(out.logits[:, -1])
    return torch.stack(parts)


def process(folder: Path, whole: Any) -> int:
    parallel = LlamaForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=2, tp_plan="auto")
    ).eval()
    failed = []
    for name, made in SCHEMES.items():
        with KVCalCache(made, parallel, kernels="torch") as cache, KVCalCache(made, whole, kernels="torch") as one:
            found, wanted = logits(cache, parallel), logits(one, whole)
            size, right = cache.nbytes("packed"), one.nbytes("packed") // (1 if name in TOGETHER else 2)
            parts = "stores those of all" if name in TOGETHER else "stores its own"
            far = float((found - wanted).norm() / wanted.norm())
            same = torch.equal(found.argmax(-1), wanted.argmax(-1))
            if not (
                far < FAR and same and 0 < right / 1.2 <= size <= right * 1.2 and parts in cache.describe()["heads"]
            ):
                failed.append(f"{name}: {far:.2g}, same tokens {same}, {size} bytes of {right}")
    chosen, right = (auto_scheme("auto-3", model)[1] for model in (parallel, whole))
    failed += [] if chosen == right else [f"auto-3: {chosen}, {right}"]
    distributed.destroy_process_group()
    print("\n".join(failed))
    return len(failed)


def test_every_way_of_storing_gives_the_tokens_of_one_process(tmp_path: Path) -> None:
    whole = test_fused.model(num_hidden_layers=LAYERS)
    whole.save_pretrained(tmp_path / "m")
    for code, said in in_ranks(2, lambda: process(tmp_path / "m", whole), tmp_path):
        assert code == 0, said


def spread(count: int, style: str = "colwise", heads: int = 4, name: str = "k_proj") -> Any:
    mesh = SimpleNamespace(size=lambda: count, get_local_rank=lambda: 1, get_group=lambda: None)
    attention: Any = SimpleNamespace(**{name: SimpleNamespace(weight=SimpleNamespace(device_mesh=mesh))})
    config = SimpleNamespace(model_type="llama", num_attention_heads=8)
    decoder: Any = SimpleNamespace(config=config, tp_plan={f"layers.*.self_attn.{name}": style})
    return head_shard(decoder, attention, heads)


def test_heads_that_cannot_be_divided_are_refused() -> None:
    shard = spread(2)
    assert shard is not None and shard.heads(2) == slice(2, 4)
    assert spread(1) is None and spread(3, "colwise_gather_output") is None
    with pytest.raises(UnsupportedModel, match="4 kv heads and 8 query heads cannot be divided among 3 processes"):
        spread(3)
    with pytest.raises(UnsupportedModel, match="spreads qkv_proj as packed_colwise"):
        spread(2, "packed_colwise", name="qkv_proj")
