"""Caches whose storage is allocated once: against growing ones, compiled, traced without values, and under a CUDA
graph.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kvcal_artifacts import hf
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.cache.static import StaticLayer, storage
from kvcal_artifacts.codecs import ByHead, Context, MixKVQ, Shape, Squat, Uniform
from kvcal_artifacts.errors import KernelsUnavailable, KVCalError, NonFiniteError, UsageError
from kvcal_artifacts.paths import choose, codebook
from kvcal_artifacts.scheme import HeavyHitters, LayerCodecs, Scheme, Windows
from kvcal_kernels.layout import Rope
from kvcal_kernels.squat import Digits
from tests.artifacts.paths.test_codebook import PAIR as VECTORS
from tests.artifacts.paths.test_codebook import codes
from tests.artifacts.paths.test_fused import (
    PAIRS,
    SCALED_ROPE,
    SHAPE,
    WINDOWS,
    close,
    generated,
    model,
    placed,
    scheme,
    steps,
    uniform,
)
from tests.support.architectures import build
from tests.support.interpreted import interpreted, needs_triton
from tests.support.schemes import (
    close_all,
    left_mask,
    mixkvq_of,
    numbers,
    opened,
    packed_row,
    same,
    token_ids,
    window_row,
)

BEFORE = "before RoPE: "
TURNED = [f"{BEFORE}{name}" for name in ("inner-4", "kivi-4")]
FEW = pytest.mark.parametrize("name", ["inner-4", f"{BEFORE}kivi-4", "vectors"])
CALIBRATED = "squat, calibrated"
NAMES = ["inner-4", "kivi-4", "innerq-prefill", "higgs-2", "turboquant-4-2", CALIBRATED, *TURNED, "vectors"]
FEW_QUICK = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW.args[1] else pytest.mark.slow) for name in NAMES]
)
KNOWN = LayerCodecs(
    Squat(uniform("key", 4, inner=False), 5, 0.1, 32, "calibrated", calibrated=numbers(2, 5, 64, seed=1) * 3),
    uniform("value", 4, inner=False),
)
EVERY = {**PAIRS, "vectors": VECTORS, CALIBRATED: KNOWN}


def made(name: str, layers: int = 3) -> Scheme:
    return scheme(EVERY[name.removeprefix(BEFORE)], layers, "pre_rope" if name.startswith(BEFORE) else "post_rope")


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    close_all()


def fixed(name: str = "inner-4", served: Any = None, length: int = 256, kernels: str = "torch") -> KVCalCache:
    own = model() if served is None else served
    return opened(made(name, own.config.num_hidden_layers), own, kernels=kernels, max_length=length)


def both(name: str = "inner-4", layers: int | None = None) -> tuple[KVCalCache, KVCalCache]:
    served = model() if layers is None else model(num_hidden_layers=layers)
    own = made(name, served.config.num_hidden_layers)
    return fixed(name, served), opened(own, served, kernels="torch")


def first_layer(cache: KVCalCache, row: int) -> list[Tensor]:
    """Of layer 0, whose keys and values come from the tokens alone: what float32 rounding of attention cannot change."""
    cache.settle()
    held = 2 * len(cache.layers[0].packed[0])
    return packed_row(cache, row)[:held] + window_row(cache, row)[:4]


def addresses(cache: KVCalCache) -> list[int]:
    return [
        t.data_ptr() for layer in cache.compressed_layers for part in ("packed", "window") for t in layer.stored(part)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_steps_give_what_a_growing_cache_gives(name: str, calls: list[int]) -> None:
    """Prompt, two flushes of single tokens, 16 and 17 at a time; nothing moves."""
    caches = both(name, 2)
    cuts = [96, *range(97, 135), 150, 167]
    close(steps((caches[0], caches[1]), token_ids(2, 96, seed=1), []))
    where = addresses(caches[0])
    sizes = [caches[0].nbytes(part) for part in ("packed", "window")]
    close(steps(caches, token_ids(2, 171, seed=1)[:, 96:], [cut - 96 for cut in cuts[1:]]))
    assert addresses(caches[0]) == where
    assert [caches[0].nbytes(part) for part in ("packed", "window")] == sizes
    for row in (0, 1):
        assert same(first_layer(caches[0], row), first_layer(caches[1], row))
    assert caches[0].ledger.blocks.tolist() == caches[1].ledger.blocks.tolist() == [4, 4]
    path = caches[0].describe()["layers"][1]["path"]
    assert path.endswith("(kernels='torch'); steps appended by torch: kernels='torch'")
    assert calls == [q for q in [*[1] * 38, 16, 4] for _ in range(4)]


@FEW_QUICK
def test_rows_of_all_lengths_step_together(name: str) -> None:
    """One has packed blocks, one packs its first, one none yet, one has not even its sink."""
    mask = torch.cat([left_mask([120, 60, 40, 2]), torch.ones(4, 60, dtype=torch.long)], 1)
    caches = both(name, 2)
    close(steps(caches, token_ids(4, 180, seed=2), [120, *range(121, 150), 153, 169], mask))
    for row in range(4):
        assert same(first_layer(caches[0], row), first_layer(caches[1], row))
    assert caches[0].ledger.blocks.tolist() == [4, 2, 2, 0]
    assert caches[0].ledger.sink.tolist() == [4] * 4


@FEW
def test_crop_select_copy_and_reset(name: str) -> None:
    ids = token_ids(2, 160, seed=3)
    caches = both(name)
    steps(caches, ids[:, :100], [80, 81, 97])
    twins = tuple(copy.deepcopy(own) for own in caches)
    for number, pair in enumerate((caches, twins)):
        for own in pair:
            own.crop(-(5, 50)[number])  # out of the window, and into packed blocks
            own.reorder_cache(torch.tensor([1, 0]))
        where = addresses(pair[0])
        close(steps(pair, ids[:, 100:140], [1, 2, 18]))  # type: ignore[arg-type]
        assert same(first_layer(pair[0], 0), first_layer(pair[1], 0))
        assert addresses(pair[0]) == where
    for own in twins:
        own.close()
    for own in caches:
        own.batch_repeat_interleave(2)
    close(steps(caches, token_ids(4, 3), [1]))
    where = addresses(caches[0])
    for own in caches:
        own.reset()
    close(steps(caches, token_ids(4, 100, seed=5), [90, 91]))
    assert addresses(caches[0]) == where
    assert int(caches[0].get_seq_length()) == 100
    handle = caches[0].compressed_layers[0].handle
    caches[0].batch_select_indices(torch.tensor([3, 1]))
    assert caches[0].compressed_layers[0].handle != handle  # nothing compiled for four rows is called again


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 5}], ids=["greedy", "beams", "lookup"]
)
@pytest.mark.parametrize("prompt", [96, pytest.param(3, marks=pytest.mark.slow)])
@FEW
def test_generate(name: str, prompt: int, options: dict[str, Any], calls: list[int]) -> None:
    """Its masks have four dimensions for such caches."""
    ids = token_ids(1, 30, seed=4).repeat(1, 4)[:, :prompt]
    found = [generated(own, ids, max_new_tokens=38, **options) for own in both(name, 2)]
    assert found[0] == found[1] and calls


@FEW
def test_a_padded_batch_generates_what_its_rows_do(name: str, calls: list[int]) -> None:
    ids, mask = token_ids(2, 90, seed=5), left_mask([90, 50])
    ids = ids.masked_fill(mask == 0, 0)
    caches = both(name, 2)
    found = [generated(own, ids, attention_mask=mask) for own in caches]
    assert found[0] == found[1]
    assert caches[0].ledger.valid.equal(caches[1].ledger.valid) or caches[0].settle() is None
    assert caches[0].ledger.sink.tolist() == [4, 4] and caches[0].ledger.blocks.tolist() == [2, 1]


# Nothing in a step depends on a number that the host would have to know.


@FEW
def test_compiled_steps_are_one_graph(name: str) -> None:
    """No break, no second compilation, over two flushes; then the host goes on from where the device is."""
    ids = token_ids(1, 180, seed=6)
    own, plain = both(name, 2)
    for cache in (own, plain):
        with torch.no_grad():
            cache.model(ids[:, :96], past_key_values=cache)
    torch._dynamo.reset()
    step = torch.compile(own.model, fullgraph=True, backend="aot_eager")
    apart = []
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(96, 136):
            given = {"position_ids": torch.tensor([[i]]), "attention_mask": torch.ones(1, 1, 1, 256, dtype=torch.bool)}
            found = step(ids[:, i : i + 1], past_key_values=own, **given).logits
            wanted = plain.model(ids[:, i : i + 1], past_key_values=plain).logits
            apart.append((found - wanted).norm() / wanted.norm())
    close(apart)
    own.settle()
    assert own.ledger.columns == 136 and own.ledger.blocks.tolist() == plain.ledger.blocks.tolist() == [3]
    assert same(first_layer(own, 0), first_layer(plain, 0))
    close(steps((own, plain), ids[:, 136:166], [2, 19]))


@FEW
def test_generate_with_a_compiled_forward(name: str) -> None:
    from transformers import CompileConfig

    compiled = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compiled._compile_all_devices = True
    ids, mask = token_ids(2, 90, seed=7), left_mask([90, 45])
    ids = ids.masked_fill(mask == 0, 0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    own, plain = both(name, 2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = generated(own, ids, attention_mask=mask, compile_config=compiled, max_new_tokens=45)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert found == generated(plain, ids, attention_mask=mask, max_new_tokens=45)


@pytest.mark.parametrize("dropped", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("name", ["inner-4", f"{BEFORE}kivi-4"])
def test_caches_that_come_and_go_are_one_compilation(name: str, dropped: bool) -> None:
    """The first has its handles as constants, the second makes them dynamic, and all later ones run what that gave."""
    ids, served = token_ids(1, 84, seed=6), model(num_hidden_layers=2)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(served, fullgraph=True, backend="eager")
    for _ in range(5):
        own = fixed(name, served)
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=3):
            wanted = served(ids).logits[:, -1]
            served(ids[:, :80], past_key_values=own)
            for i in range(80, 84):
                given = {
                    "position_ids": torch.tensor([[i]]),
                    "attention_mask": torch.ones(1, 1, 1, 256, dtype=torch.bool),
                }
                found = step(ids[:, i : i + 1], past_key_values=own, **given).logits[:, -1]
        assert (found - wanted).norm() < 0.1 * wanted.norm()  # of 4 bits
        own.settle()
        assert own.ledger.columns == 84
        if dropped:
            own.close()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(("longest", "count"), [(None, 80), (256, 5)])
def test_prompts_that_are_compiled_say_what_can_be(longest: int | None, count: int) -> None:
    served = model(num_hidden_layers=1)
    own = opened(scheme(PAIRS["inner-4"], 1), served, kernels="torch", max_length=longest)
    why = "storage grows on the host" if longest is None else ""
    for whole in (True, False):
        torch._dynamo.reset()
        compiled = torch.compile(served, fullgraph=whole, backend="eager")
        with (
            pytest.raises(Exception, match=rf"not {count} behind 0.*{why}.*with the uncompiled model"),
            torch.no_grad(),
        ):
            compiled(token_ids(1, count), past_key_values=own)
        own.reset()


def test_a_compiled_step_gives_no_attention_weights() -> None:
    served = model(attn_implementation="eager")
    own = fixed(served=served)
    with torch.no_grad():
        served(token_ids(1, 80), past_key_values=own)
        torch._dynamo.reset()
        given = {"position_ids": torch.tensor([[80]]), "attention_mask": torch.zeros(1, 1, 1, 256)}
        attention = served.model.layers[0].self_attn
        compiled = torch.compile(attention, fullgraph=True, backend="eager")
        hidden = torch.zeros(1, 1, served.config.hidden_size)
        rope = served.model.rotary_emb(hidden, given["position_ids"])
        with pytest.raises(Exception, match="output_attentions: the fused kernel gives no attention weights"):
            compiled(hidden, rope, given["attention_mask"], past_key_values=own, output_attentions=True)


@pytest.mark.parametrize("longest", [None, 256])
@pytest.mark.parametrize("name", NAMES)
def test_inference_mode_may_come_and_go(name: str, longest: int | None) -> None:
    """A server runs prompts in one mode and steps in another."""
    ids = token_ids(2, 140, seed=3)
    own, plain = (opened(made(name), model(), kernels="torch", max_length=n) for n in (longest, None))
    modes, apart = (torch.inference_mode, torch.no_grad), []
    for number, (start, stop) in enumerate([(0, 80), (80, 81), (81, 97), (97, 98), (98, 130), (130, 131), (131, 132)]):
        with modes[number % 2]():
            found = model()(ids[:, start:stop], past_key_values=own).logits
        with torch.no_grad():
            wanted = model()(ids[:, start:stop], past_key_values=plain).logits
        apart.append(float((found - wanted).norm() / wanted.norm()))
    close(apart)
    with torch.inference_mode():
        own.crop(-3)
        own.reorder_cache(torch.tensor([1, 0]))
    with torch.no_grad():
        model()(ids[:, :2], past_key_values=own)
    own.settle()
    assert own.ledger.columns == 131


@pytest.mark.parametrize("name", NAMES)
def test_a_step_reads_no_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is recorded, traced with tensors that have none: whatever asked for one would raise."""
    own = fixed(name)
    with torch.no_grad():
        own.model(token_ids(2, 80), past_key_values=own)
    layer = own.layers[0]
    assert isinstance(layer, StaticLayer) and layer.allocation is not None
    room, shared = layer.allocation, layer.steps
    monkeypatch.setattr(hf, "capturing", lambda: True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # constants of codecs

        def fake(x: Any) -> Any:
            if isinstance(x, Tensor):
                return mode.from_tensor(x)
            if isinstance(x, Rope):
                return Rope(fake(x.first), fake(x.near))
            if isinstance(x, Digits):
                return Digits(x.channels, fake(x.digits), fake(x.units))
            if x is None:
                return None
            return [fake(y) for y in x] if isinstance(x, list) else {k: fake(y) for k, y in x.items()}

        layer.storage.allocation = type(room)(**{key: fake(value) for key, value in vars(room).items()})
        shared.counts.data, shared.length = fake(shared.counts.data), fake(shared.length)
        for statistic in layer.statistics.values():
            statistic.state = fake(statistic.state)
        if shared.rope is not None:
            shared.rope = type(shared.rope)(**{key: fake(value) for key, value in vars(shared.rope).items()})
        new = [torch.empty(2, heads, 1, 64) for heads in (4, 2, 2)]
        out = layer.attend(*new, 0.125, torch.full((1, 1), 80))
        assert out.shape == (2, 4, 1, 64)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            bool(shared.length > 3)


def test_a_row_that_is_not_due_keeps_its_bytes_and_one_that_is_gets_the_codecs_own() -> None:
    own = fixed("kivi-4")
    ids, mask = token_ids(2, 110, seed=8), left_mask([110, 100])
    with torch.no_grad():
        own.model(ids[:, :99], past_key_values=own, attention_mask=mask[:, :99])
    layer = own.layers[0]
    assert isinstance(layer, StaticLayer) and layer.allocation is not None
    before, window = copy.deepcopy(layer.allocation.packed), layer.window[0].clone()
    with torch.no_grad():
        own.model(ids[:, 99:100], past_key_values=own, attention_mask=mask[:, :100])
    assert (layer.steps.counts.blocks - layer.steps.counts.blocks_before).tolist() == [1, 0]
    made = layer.codecs.key.encode(window[:, :, :32])
    for name, held in layer.allocation.packed[0].items():
        assert torch.equal(held[0, :, 1], made[name][0, :, 0]) and torch.equal(held[1], before[0][name][1])


def test_a_factor_is_kept_only_where_no_recorded_step_can_change_it() -> None:
    own, ids = fixed("innerq-prefill"), token_ids(1, 104, seed=3)
    layer = own.layers[0]
    assert isinstance(layer, StaticLayer)
    with torch.no_grad():
        own.model(ids[:, :60], past_key_values=own)
        own.model(ids[:, 60:61], past_key_values=own)
        assert not own.opened and layer.key_factor.remembered is None
        layer.statistics["key_scale"].state["peak"].mul_(4)  # as a replayed graph would
        own.model(ids[:, 61:100], past_key_values=own)
        for at in (100, 101, 102):
            own.model(ids[:, at : at + 1], past_key_values=own)
    assert own.opened and layer.key_factor.remembered is not None
    wanted = layer.codecs.key.key_factor(Context(stats=layer.current_statistics()))
    assert wanted is not None and torch.equal(layer.key_factor.remembered[1][0], wanted)
    # memory of a compiled forward belongs to its graphs: what it makes must not stay
    layer.key_factor.forget()
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(own.model, fullgraph=True, backend="eager")(ids[:, 103:104], past_key_values=own)
        assert layer.key_factor.remembered is None
        layer.publish()  # while the host works
        assert torch.equal(layer.key_factor.remembered[1][0], wanted)  # type: ignore[index]
    own.reset()
    assert not own.opened


# What goes wrong.


def step(own: KVCalCache) -> Tensor:
    """As a recorded graph would go on, whatever the host thinks of it: what attention of the last layer gives."""
    return [
        layer.attend(*(torch.randn(1, heads, 1, 64) for heads in (4, 2, 2)), 0.1) for layer in own.compressed_layers
    ][-1]


def test_what_steps_could_not_say_is_said_afterwards() -> None:
    own = fixed()
    ids = token_ids(1, 100)
    with torch.no_grad():
        own.model(ids[:, :80], past_key_values=own)
        layer = own.layers[1]
        assert isinstance(layer, StaticLayer) and layer.allocation is not None
        layer.allocation.ring[0][0, 1, 32 + 3, 5] = torch.inf  # packed with 4 + 32 + 32 + 32 tokens
        for _ in range(19):
            step(own)
        own.settle()
        step(own)
    with pytest.raises(NonFiniteError, match="layer 1, key head 1: a NaN or infinity reached the cache"):
        own.settle()
    own.reset()
    with torch.no_grad():
        bad = model().model.embed_tokens(ids)
        bad[0, 7] = torch.nan
        with pytest.raises(NonFiniteError, match="layer 0"):
            own.model(inputs_embeds=bad, past_key_values=own)


def test_no_token_beyond_max_length() -> None:
    own = fixed(length=96)
    with torch.no_grad():
        own.model(token_ids(1, 90), past_key_values=own)
        with pytest.raises(KVCalError, match="20 tokens behind 90: the cache was made for max_length=96"):
            own.model(token_ids(1, 20), past_key_values=own)
        for _ in range(6):
            own.model(token_ids(1, 1), past_key_values=own)
        with pytest.raises(KVCalError, match="1 tokens behind 96"):
            own.model(token_ids(1, 1), past_key_values=own)
        for _ in range(80):
            step(own)
    with pytest.raises(KVCalError, match=r"layer 0, key head 0: there is no slot left \(max_length\)"):
        own.describe()


@pytest.mark.parametrize(
    "length", [131, 128]
)  # the first block without a slot is due with the first token too many, or later
def test_a_compiled_generate_goes_no_further_than_max_length(length: int) -> None:
    """Its forward asks nothing of the host; generate() does, before each step."""
    from transformers import CompileConfig

    compiled = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compiled._compile_all_devices = True
    ids = token_ids(2, length - 40, seed=7)
    torch._dynamo.reset()
    with fixed(served=model(num_hidden_layers=1), length=length) as own:
        assert len(generated(own, ids, compile_config=compiled, max_new_tokens=40)) == 2  # the last is not stored
        own.reset()
        with pytest.raises(KVCalError, match=f"tokens: the cache was made for max_length={length}|no slot left"):
            generated(own, ids, compile_config=compiled, max_new_tokens=60)


def unheard(own: KVCalCache, ids: Tensor, count: int) -> Tensor:
    """Steps as a replayed graph takes them, of which no one hears; what attention of the last one gives."""
    torch.manual_seed(0)
    with torch.no_grad():
        own.model(ids, past_key_values=own)
        for _ in range(count):
            found = step(own)
    return found


def test_what_was_lost_is_nan() -> None:
    """Beyond max_length numbers are those of the model until a block has no slot; then every logit says so."""
    own, plain = (fixed(length=length) for length in (128, 256))
    torch.testing.assert_close(unheard(own, token_ids(1, 100), 28), unheard(plain, token_ids(1, 100), 28))
    assert not bool(next(iter(own.steps.values())).wrong)
    assert [bool(step(own).isnan().any()) for _ in range(6)] == [False] * 3 + [True] * 3
    assert bool(next(iter(own.steps.values())).wrong)
    own.reset()
    assert not unheard(own, token_ids(1, 100), 28).isnan().any()


def test_a_closing_cache_says_what_was_lost() -> None:
    with (
        pytest.raises(KVCalError, match="went on to 130 tokens: the cache was made for max_length=128"),
        fixed(length=128) as own,
    ):
        unheard(own, token_ids(1, 100), 30)
    with fixed(length=128) as own:
        unheard(own, token_ids(1, 100), 30)
        with pytest.raises(KVCalError, match="went on to 130 tokens"):
            own.describe()  # once is enough
    with fixed(length=128) as own:
        unheard(own, token_ids(1, 100), 30)
        own.reset()
    with fixed(length=128) as own:
        unheard(own, token_ids(1, 100), 30)
        with pytest.raises(ZeroDivisionError), own:
            raise ZeroDivisionError
    with fixed(length=128) as own:
        unheard(own, token_ids(1, 100), 28)


def test_layers_that_hold_different_numbers_of_tokens() -> None:
    own = fixed()
    with torch.no_grad():
        own.model(token_ids(1, 80), past_key_values=own)
        own.layers[0].attend(*(torch.randn(1, heads, 1, 64) for heads in (4, 2, 2)), 0.1)
        with pytest.raises(KVCalError, match="layers on cpu hold different numbers of tokens: a forward broke off"):
            own.model(token_ids(1, 1), past_key_values=own)
        own.reset()
        own.model(token_ids(1, 80), past_key_values=own)


def test_steps_with_masks_of_ones_own_and_gradients_are_the_hosts(calls: list[int]) -> None:
    caches = both()
    for own in caches:
        with torch.no_grad():
            own.model(token_ids(1, 80), past_key_values=own)
    seen = torch.ones(1, 1, 2, 82, dtype=torch.bool).tril(80)
    seen[..., 7] = False
    seen[:, :, 1, 7] = True
    with torch.no_grad():
        out = [own.model(token_ids(1, 2), past_key_values=own, attention_mask=seen).logits for own in caches]
    close([(out[0] - out[1]).norm() / out[1].norm()])
    assert not calls
    found = caches[0].model(token_ids(1, 1), past_key_values=caches[0]).logits
    assert found.requires_grad and not calls
    caches[1].model(token_ids(1, 1), past_key_values=caches[1])
    close(steps(caches, token_ids(1, 3), [1]))
    assert calls


def test_caches_that_do_not_compile_say_why() -> None:
    def why(made: Any, **options: Any) -> Any:
        own = opened(made, model(), kernels="torch", **options)
        found = own.describe()["compileable"]
        assert own.is_compileable is (found is True)
        return found

    pair = PAIRS["inner-4"]
    assert why(scheme(pair), max_length=100) is True
    assert "storage grows" in why(scheme(pair))
    assert why(scheme(PAIRS["squat"]), max_length=100) is True
    assert why(scheme(pair, frame="pre_rope"), max_length=100) is True
    assert why(scheme(PAIRS["squat"], frame="pre_rope"), max_length=100) is True
    short = LayerCodecs(*(codes(role, shape=Shape(2, 64, 16)) for role in ("key", "value")))
    assert "vector codes in blocks of 16 tokens" in why(scheme(short, windows=Windows(4, 32, 16)), max_length=100)
    odd = LayerCodecs(Uniform(pair.key.shape, "key", 5, 32), pair.value)
    assert "5 bits at head_dim 64" in why(scheme(odd), max_length=100)
    assert "token selection" in why(scheme(pair).keeping(HeavyHitters()), max_length=100)
    apart = LayerCodecs(ByHead([Uniform(Shape(1, 64, 32), "key", bits, 32) for bits in (4, 8)]), pair.value)
    assert "layer 0: keys: groups of heads in different codecs" in why(scheme(apart), max_length=100)
    searched = Squat(Uniform(SHAPE, "key", 4, 32, "token", search=True), channels=32)
    assert "layer 0: SQuat over uniform" in why(scheme(LayerCodecs(searched, pair.value)), max_length=100)
    chosen = "layer 0: MixKVQ chooses the channels of its tiers block by block"
    assert f"{chosen}, by query_abs, which the host counts: no" in why(scheme(PAIRS["mixkvq"]), max_length=100)
    errors = LayerCodecs(MixKVQ(pair.key.shape, "key", full=16, four=16, importance="none"), pair.value)
    assert f"{chosen}: no kernel appends them" in why(scheme(errors), max_length=100)
    small = mixkvq_of(model(), "post_rope")
    assert "MixKVQ's tiers take another size" in why(small, max_length=100)
    left = type(scheme(pair))(WINDOWS, "post_rope", (pair, None, pair), {1: "asked for"})
    assert "layer 1 is left to Transformers' own cache" in why(left, max_length=100)


def only(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...] = (0, 1, 2)) -> None:
    """As if the kernel took that dtype alone, and in other layers, which ask in turn, none."""
    asked: list[int] = []

    def absence(
        kernels: str, pair: Any, ratio: int, given: torch.dtype, device: torch.device, rotary: int
    ) -> str | None:
        asked.append(len(asked) % 3)
        taken = given == dtype and asked[-1] in layers
        return None if taken else f"not in {given}"

    monkeypatch.setattr(choose, "absence", absence)


def test_the_first_keys_say_whether_storage_is_allocated_once(
    monkeypatch: pytest.MonkeyPatch, calls: list[int]
) -> None:
    """Weights may be cast between construction and the prompt, or packed; what they were then is a guess."""
    only(torch.bfloat16, monkeypatch)
    served = copy.deepcopy(model())
    own, plain = fixed(served=served), opened(scheme(PAIRS["inner-4"]), served, kernels="off")
    assert own.why_not_compileable == "layer 0: not in torch.float32"
    served.bfloat16()
    ids = token_ids(2, 160, seed=4)
    steps((own, plain), ids[:, :80], [])
    assert own.is_compileable and all(layer.ready for layer in own.compressed_layers)
    where = addresses(own)
    apart = steps((own, plain), ids[:, 80:], [*range(1, 70)])
    assert addresses(own) == where and len(calls) == 3 * 70 and max(apart) < 0.1  # of bfloat16
    own.reset()
    served.float()
    steps((own, plain), ids[:, :1], [])  # plain goes on in float32, too
    assert own.why_not_compileable == "layer 0: not in torch.float32"


@pytest.mark.parametrize(("layers", "late"), [((), False), ((0, 2), False), ((0,), True)])
def test_layers_whose_first_keys_are_refused_grow_with_all_others(
    layers: tuple[int, ...], late: bool, monkeypatch: pytest.MonkeyPatch, calls: list[int]
) -> None:
    """late: when the first layer has allocated its room already."""
    only(torch.float32, monkeypatch)
    ids = token_ids(2, 200, seed=4)
    caches = both()
    assert caches[0].is_compileable
    steps(caches, ids[:, :80], [])  # with a room
    caches[0].reset()
    caches[1].reset()
    only(torch.float32, monkeypatch, layers)
    if late:
        own_expect = StaticLayer.expect

        def expect(layer: StaticLayer, dtype: torch.dtype, device: torch.device | None = None) -> None:
            own_expect(layer, dtype, device)
            if device is None:  # not yet its first keys
                layer.paths = layer.paths._replace(kind=choose.PathKind.FUSED, refused=None)

        monkeypatch.setattr(StaticLayer, "expect", expect)
    mask = torch.cat([left_mask([80, 60]), torch.ones(2, 60, dtype=torch.long)], 1)
    first = steps(caches, ids[:, :140], [80, 81, 97, 130, 131], mask)
    assert not caches[0].is_compileable and "not in torch.float32" in str(caches[0].describe()["compileable"])
    assert [layer.paths.refused is None for layer in caches[0].compressed_layers] == [
        index in layers for index in range(3)
    ]
    close(first)
    for row in (0, 1):
        assert same(first_layer(caches[0], row), first_layer(caches[1], row))
    caches[0].crop(-9)
    caches[1].crop(-9)
    twin = copy.deepcopy(caches[0])
    close(steps((twin, caches[1]), ids[:, 150:], [3]))
    twin.close()
    assert bool(calls) == bool(layers)


def test_kernels_that_are_required_are_asked_of_the_first_keys_too(monkeypatch: pytest.MonkeyPatch) -> None:
    only(torch.float32, monkeypatch)
    served = copy.deepcopy(model())
    caches = [
        opened(scheme(PAIRS["inner-4"]), served, kernels="torch", require_kernels=True, max_length=length)
        for length in (None, 256)
    ]
    served.bfloat16()
    for own in caches:
        with pytest.raises(KernelsUnavailable, match=r"layer 0: .*: not in torch.bfloat16; .*require_kernels"):
            served(token_ids(1, 80), past_key_values=own)


def test_token_selection_goes_on_as_ever() -> None:
    made = scheme(PAIRS["inner-4"]).keeping(HeavyHitters(0.5))
    caches = opened(made, model(), max_length=200), opened(made, model())
    close(steps(caches, token_ids(1, 130), [100, 101, 120]))
    assert caches[0].describe()["selection"] == caches[1].describe()["selection"]


def test_layers_that_cannot_be_left_to_the_device_grow(calls: list[int]) -> None:
    caches = fixed("mixkvq", length=128), opened(made("mixkvq"), model(), kernels="torch")
    close(steps(caches, token_ids(1, 90), [80, 81]))
    assert len(calls) == 2 * 3 * 2
    assert "by query_abs, which the host counts" in caches[0].describe()["compileable"]
    with pytest.raises(KVCalError, match="max_length=128"):
        caches[0].model(token_ids(1, 60), past_key_values=caches[0])


@pytest.mark.parametrize("name", ["squat", f"{BEFORE}squat"])
def test_the_subspace_of_a_prompt_stays_in_steps(name: str, calls: list[int]) -> None:
    """Rows of 100 and 80 tokens, which have blocks, and of 40 and 3, which have none. A growing cache fits anew at the
    first block, 68 tokens, and at the fourth, 164.
    """
    mask = torch.cat([left_mask([100, 80, 40, 3]), torch.ones(4, 70, dtype=torch.long)], 1)
    caches, ids = both(name, 2), token_ids(4, 170, seed=2)
    steps(caches, ids[:, :163], [100, *range(101, 163)], mask[:, :163])
    assert calls == [1] * (63 * 4)
    for own in caches:
        own.settle()
    assert caches[0].ledger.blocks.tolist() == caches[1].ledger.blocks.tolist() == [3, 3, 2, 0]
    for row in (0, 1):
        assert same(first_layer(caches[0], row), first_layer(caches[1], row))
    assert not same(first_layer(caches[0], 2), first_layer(caches[1], 2))  # whose first block came in steps
    key = made(name).layers[0].key  # type: ignore[union-attr]
    layer, prompt = caches[0].compressed_layers[0], fixed(name)
    assert isinstance(key, Squat)
    with torch.no_grad():
        prompt.model(ids[2:3, 60:100], past_key_values=prompt)
    own = prompt.compressed_layers[0].statistics[key.statistic]
    gram = own.state["gram"][0].double() * 2.0**-20
    _, singular, right = torch.linalg.svd(gram)
    wanted = (singular.sqrt()[..., None] * right)[:, : key.rank]
    found = own.standing(prompt.ledger.blocks, prompt.ledger.lengths, 2)[0]  # type: ignore[attr-defined]
    assert torch.allclose(found.abs(), wanted.abs().float(), rtol=1e-3, atol=1e-3)
    assert layer.tail == 32 + 63 and layer.unseen == 63


@pytest.mark.parametrize("normalise", ["paper", "length"])
def test_what_the_host_does_between_steps_keeps_a_subspace(normalise: str) -> None:
    """Of rows whose first block the device packs: nothing but their own queries changes what corrects their keys."""
    key = Squat(uniform("key", 4, inner=False), channels=32, normalise=normalise)
    made = scheme(LayerCodecs(key, uniform("value", 8)))
    own, ids = opened(made, model(), kernels="torch", max_length=256), token_ids(2, 110, seed=4)
    mask = torch.cat([left_mask([40, 30]), torch.ones(2, 70, dtype=torch.long)], 1)
    place = (mask.cumsum(1) - 1).clamp_min(0)

    def go(start: int, stop: int) -> None:
        given = {"attention_mask": mask[:, :stop], "position_ids": place[:, start:stop]}
        with torch.no_grad():
            own.model(ids[:, start:stop], past_key_values=own, **given)

    def moves() -> Tensor:
        room = own.compressed_layers[0].allocation
        return torch.cat([x.flatten() for x in (*room.moves.digits, *(unit.float() for unit in room.moves.units))])

    go(0, 40)
    wanted = moves().clone()
    assert wanted.abs().max() > 1
    for i in range(40, 60):
        go(i, i + 1)
    own.crop(-5)  # none of which was seen
    assert torch.equal(moves(), wanted)
    for i in range(55, 80):
        go(i, i + 1)
    own.settle()
    assert own.ledger.blocks.tolist() == [1, 1]
    own.reorder_cache(torch.arange(2))
    assert torch.equal(moves(), wanted)
    go(80, 110)  # more tokens than a step has: queries that are seen, but no fit is due
    assert torch.equal(moves(), wanted)
    own.crop(-31)
    assert torch.equal(moves(), wanted)


def test_vector_codes_that_no_kernel_appends_grow(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """As the first layer finds it where its keys are."""
    monkeypatch.setattr(
        codebook, "append_refusal", lambda *given: "the append kernel of vector codes does not pass: why"
    )
    caches = both("vectors")
    assert caches[0].is_compileable
    close(steps(caches, token_ids(2, 120), [80, 81, 97, 98]))
    assert len(calls) == 2 * 3 * 3
    for cache in (caches[0], copy.deepcopy(caches[0])):
        assert cache.describe()["compileable"] == "layer 0: the append kernel of vector codes does not pass: why"


def test_steps_over_vector_codes_bring_as_many_tokens_as_their_kernels_take(calls: list[int]) -> None:
    served = build("Llama", head_dim=64, num_attention_heads=16, hidden_size=1024)
    own, plain = fixed("vectors", served), opened(made("vectors"), served, kernels="torch")
    assert own.most_queries == 8
    close(steps((own, plain), token_ids(1, 110, seed=3), [80, 88, 89, 98]))
    assert calls == [q for q in (8, 1) for _ in range(6)]  # 9 and 12 are the model's own
    torch._dynamo.reset()
    compiled = torch.compile(served, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="only steps of up to 8 tokens can run compiled"), torch.no_grad():
        compiled(token_ids(1, 9), past_key_values=own)


# Keys before RoPE: positions.


KIVI = f"{BEFORE}kivi-4"


def test_rows_begin_anywhere_and_gaps_are_for_the_host(calls: list[int]) -> None:
    """Rows that begin elsewhere take what was allocated; behind a gap all layers grow, until the cache is empty again."""
    caches = both(KIVI)
    where = torch.arange(150).repeat(2, 1) + torch.tensor([[0], [500]])
    close(placed(caches, where[:, :118], [80, *range(81, 118)]))
    assert caches[0].is_compileable and len(calls) == 2 * 3 * 38
    table = caches[0].compressed_layers[0].steps.rope.angles.first_words  # type: ignore[attr-defined]
    for own in caches:
        own.batch_select_indices(torch.tensor([1, 0]))
    close(placed(caches, where[:, 118:121].flip(0), [1]))
    assert caches[0].compressed_layers[0].steps.rope.angles.first_words is table  # type: ignore[attr-defined]
    caches[0].settle()
    assert caches[0].ledger.positions.tolist() == where[:, :121].flip(0).tolist()
    taken = len(calls)
    close(placed(caches, where[:, 130:133], [1]))
    assert len(calls) == taken and "do not follow one another" in str(caches[0].describe()["compileable"])
    assert not any(layer.ready for layer in caches[0].compressed_layers)
    for own in caches:
        own.crop(-20)
    close(placed(caches, where[:, :2], [1]))
    assert len(calls) == taken
    for own in caches:
        own.reset()
    close(placed(caches, where[:, :90], [88, 89]))
    assert caches[0].describe()["compileable"] is True and len(calls) == taken + 2 * 3 * 2


def test_compiled_steps_at_other_positions_are_told_of_afterwards() -> None:
    ids, own = token_ids(1, 90, seed=6), fixed(KIVI)
    with torch.no_grad():
        own.model(ids[:, :80], past_key_values=own)
        torch._dynamo.reset()
        step = torch.compile(own.model, fullgraph=True, backend="eager")
        for at in (80, 82):
            step(ids[:, at : at + 1], past_key_values=own, position_ids=torch.tensor([[at]]))
    with pytest.raises(KVCalError, match="positions that do not follow those before them"):
        own.describe()
    own.reset()
    with torch.no_grad():
        own.model(ids[:, :80], past_key_values=own)
    assert own.describe()["tokens"] == 80


def test_a_row_without_a_token_waits_for_its_first() -> None:
    """Where it begins is not known before."""
    mask = torch.cat([left_mask([80, 1]), torch.ones(2, 20, dtype=torch.long)], 1)
    mask[1, 79:90] = 0
    caches = both(KIVI)
    close(steps(caches, token_ids(2, 100, seed=3), [79, 80, 89, *range(90, 97)], mask))
    assert all(layer.ready for layer in caches[0].compressed_layers)
    assert not any(layer.ready for layer in first_of(caches[0], token_ids(2, 60), mask[:, :60]))


def first_of(own: KVCalCache, ids: Tensor, mask: Tensor) -> list[Any]:
    own.reset()
    with torch.no_grad():
        own.model(ids, past_key_values=own, attention_mask=mask)
    return own.compressed_layers


def test_rope_that_changes_with_the_length_or_does_not_turn_evenly_is_the_hosts(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = SCALED_ROPE
    for kind in kinds:
        given = {"rope_type": kind, "rope_theta": 1e4, **kinds[kind]}
        served = build("Llama", head_dim=64, num_hidden_layers=2, max_position_embeddings=96, rope_parameters=given)
        caches = fixed(KIVI, served), opened(made(KIVI, 2), served, kernels="torch")
        why = str(caches[0].describe()["compileable"])
        assert ("angles change with the length" in why) == (kind == "dynamic")
        close(steps(caches, token_ids(1, 150, seed=2), [80, 90, 91, *range(92, 130), 145]))
    served = build("Llama", head_dim=64)
    rotary, plain = served.model.rotary_emb, type(served.model.rotary_emb).forward
    monkeypatch.setattr(rotary, "forward", lambda x, position_ids: plain(rotary, x, position_ids.float() ** 1.2))
    caches = fixed(KIVI, served), opened(made(KIVI), served, kernels="off")
    calls.clear()
    close(steps(caches, token_ids(1, 83), [80, 81]))
    assert not calls and "does not rotate evenly" in str(caches[0].describe()["compileable"])


def test_layers_without_rope_step_beside_those_with() -> None:
    served = build("SmolLM3", head_dim=64, num_hidden_layers=4, no_rope_layer_interval=2)
    caches = fixed(KIVI, served), opened(made(KIVI, 4), served, kernels="torch")
    close(steps(caches, token_ids(2, 150, seed=2), [80, *range(81, 140), 150 - 3]))
    assert caches[0].describe()["compileable"] is True


def test_the_test_of_turned_steps_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    own = storage._begin_rope

    def late(layer: StaticLayer, memory: Any, step_rope: Any) -> None:
        own(layer, memory, step_rope)
        step_rope.angles.renew(step_rope.angles.first.roll(1, 1))

    monkeypatch.setattr(storage, "_begin_rope", late)
    with pytest.raises(AssertionError):
        close(steps(both(KIVI), token_ids(1, 83), [80, 81, 82]))


@pytest.mark.parametrize("length", [0, 67, 100.0, True, 2**31, 2**63])
def test_lengths_that_make_no_sense(length: Any) -> None:
    with pytest.raises(UsageError, match=r"max_length=.*must be a whole number from 68, .* to 2147483647$"):
        fixed(length=length)


def test_fixed_and_moving_storage_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="offload"):
        opened(scheme(PAIRS["inner-4"]), model(), max_length=100, offload=True)


INTERPRETED = """
import torch
from tests.artifacts.cache import test_static as t
from tests.support.architectures import build
served = build("Llama", head_dim=64, num_hidden_layers=1).half()
mask = torch.cat([t.left_mask([88, 3]), torch.ones(2, 17, dtype=torch.long)], 1)
for name in ("innerq-prefill", "higgs-2", t.KIVI, "squat", "vectors"):
    caches = [t.fixed(name, served, kernels=kernels) for kernels in ("triton", "torch")]
    print(max(float(x) for x in t.steps(caches, t.token_ids(2, 105), [88, 104], mask)))
    print([t.same(*(t.first_layer(cache, row) for cache in caches)) for row in (0, 1)])
    print([cache.ledger.blocks.tolist() for cache in caches])
    print(caches[0].describe()["layers"][0]["path"])
"""


@needs_triton
def test_steps_of_the_triton_kernels_in_the_interpreter() -> None:
    lines = interpreted("-c", INTERPRETED)
    for apart, alike, blocks, path in zip(*(lines[i::4] for i in range(4)), strict=True):
        assert float(apart) < 2e-3, lines
        assert alike == "[True, True]" and blocks == "[[2, 0], [2, 0]]"
        assert path.startswith("fused: Triton kernel; steps appended by the Triton kernel")
    assert len(lines) == 20


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*NAMES, "higgs-4-debiased"])
def test_one_graph_over_two_flushes_is_the_eager_step(name: str) -> None:
    served = copy.deepcopy(model()).half().cuda()
    own, eager = (fixed(name, served, kernels="triton") for _ in range(2))
    ids = token_ids(2, 200, seed=9).cuda()
    token, place = ids[:, :1].clone(), torch.zeros(2, 1, dtype=torch.long, device="cuda")
    with torch.no_grad():
        for cache in (own, eager):
            served(ids[:, :80], past_key_values=cache)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels are compiled before the graph is recorded
            for i in (80, 81):
                token.copy_(ids[:, i : i + 1])
                place.fill_(i)
                served(token, position_ids=place, past_key_values=own)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = served(token, position_ids=place, past_key_values=own).logits
        for i in range(80, 160):
            wanted = served(ids[:, i : i + 1], position_ids=place.clone().fill_(i), past_key_values=eager).logits
            if i < 82:
                continue
            token.copy_(ids[:, i : i + 1])
            place.fill_(i)
            graph.replay()
            assert torch.equal(out, wanted), i
    for cache in (own, eager):
        cache.settle()
        assert cache.ledger.columns == 160 and cache.ledger.blocks.tolist() == [3, 3]
        assert by_kernel(cache)
    assert all(
        same(packed_row(own, row) + window_row(own, row), packed_row(eager, row) + window_row(eager, row))
        for row in (0, 1)
    )


@pytest.mark.gpu
def test_a_graph_outlives_many_prompts_of_its_cache() -> None:
    """What its launch reads stays where it was, whatever else remembers launches: signs and points of a grid."""
    from kvcal_kernels.quantise import triton

    served = copy.deepcopy(model()).half().cuda()
    own, eager = (fixed("higgs-2", served, kernels="triton") for _ in range(2))
    ids = token_ids(2, 200, seed=9).cuda()
    token, place = ids[:, :1].clone(), torch.zeros(2, 1, dtype=torch.long, device="cuda")
    with torch.no_grad():
        served(ids[:, :80], past_key_values=own)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for i in (80, 81):
                served(token.copy_(ids[:, i : i + 1]), position_ids=place.fill_(i), past_key_values=own)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            served(token, position_ids=place, past_key_values=own)
        own.reset()
        for cache in (own, eager):
            served(ids[:, :80], past_key_values=cache)
        triton.launch._PREPARED.clear()  # as after some thousand launches of other shapes
        gc.collect()
        others = [torch.full((n,), torch.nan, device="cuda") for n in range(128, 8192, 64) for _ in range(8)]
        for i in range(80, 120):
            token.copy_(ids[:, i : i + 1])
            place.fill_(i)
            graph.replay()
            served(ids[:, i : i + 1], position_ids=place.clone(), past_key_values=eager)
    for cache in (own, eager):
        cache.settle()
    assert own.ledger.blocks.tolist() == eager.ledger.blocks.tolist() == [2, 2] and len(others) > 1000
    assert all(same(packed_row(own, row), packed_row(eager, row)) for row in (0, 1))


def by_kernel(own: KVCalCache) -> bool:
    """Whether steps of all layers are appended by the Triton kernel."""
    paths = [row["path"] for row in own.describe()["layers"]]
    return all("steps appended by the Triton kernel" in path for path in paths)


def steps_of(own: KVCalCache, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Tokens (B, count) and logits (B, count, vocabulary) of generate()."""
    out: Any = own.model.generate(
        ids, past_key_values=own, max_new_tokens=count, do_sample=False, pad_token_id=0, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    return out.sequences[:, -count:], torch.stack(out.logits, 1).float()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["innerq", "higgs-2", "turboquant-4-2", "turboquant-4-2-bytes", "higgs-4-debiased", *TURNED, "vectors"]
)
def test_generate_compiles_its_forward_on_a_gpu(name: str) -> None:
    served = copy.deepcopy(model()).half().cuda()
    ids = token_ids(2, 90, seed=10).cuda()
    own = fixed(name, served, kernels="auto")
    assert own.is_compileable, own.describe()["compileable"]
    found, logits = steps_of(own, ids, 60)
    assert by_kernel(own)
    wanted, plain_logits = steps_of(opened(made(name), served, kernels="auto"), ids, 60)
    for row in (0, 1):
        alike = int((found[row] == wanted[row]).long().cumprod(0).sum())  # tokens before the first that differs
        off = (logits[row, : alike + 1] - plain_logits[row, : alike + 1]).abs().max()
        # one of two codewords that are equally near may lie far from the other: 2.9 % seen
        assert off < (0.06 if name == "vectors" else 0.02) * plain_logits.abs().max(), (row, alike)
        if alike < 60:  # a tie of float16, which ends the comparison: random weights hardly tell tokens apart
            top = plain_logits[row, alike].topk(2).values
            assert top[0] - top[1] <= 2 * off, (row, alike)
        assert alike > 2, row
