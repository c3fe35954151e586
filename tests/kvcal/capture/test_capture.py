"""Layer-by-layer capture against an ordinary forward of the same model: equal bit for bit (fp32, CPU)."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from kvcal.capture import call, scan, spill
from kvcal.capture.scan import Capture, LayerTaps, WholeModel, default_batch
from kvcal.capture.spill import SpillStore
from kvcal.models import layerwise, names
from kvcal.report.timing import PhaseTimer
from kvcal_artifacts.errors import KVCalError, NonFiniteError, UsageError
from tests.support.architectures import TINY, VARIANTS

ALL = TINY | VARIANTS
LENGTH = 96  # past the 64 positions at which the length-dependent variants change

pytestmark = pytest.mark.transformers


@cache
def tiny(name: str) -> Any:
    return ALL[name]()


def tokens(windows: int = 3, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (windows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference(model: Any, ids: Tensor) -> tuple[list[Tensor], DynamicCache]:
    cache = DynamicCache()
    out = model(ids, past_key_values=cache, output_hidden_states=True)
    return list(out.hidden_states), cache


def joined(taps: LayerTaps, name: str, **options: Any) -> Tensor:
    return torch.cat([getattr(batch, name) for batch in taps.batches({name}, **options)])


def run(model: Any, ids: Tensor, **options: Any) -> dict[tuple[str, int], Tensor]:
    """Everything a capture gives: hidden states, taps of both frames by layer."""
    found = {}
    with Capture(model, ids, device="cpu", **options) as driver:
        for taps in driver:
            assert driver.hidden is not None
            found["hidden", taps.index] = driver.hidden.read(slice(0, len(ids))).clone()
            for name, frame in (("k", "pre_rope"), ("q", "pre_rope"), ("v", "pre_rope")):
                found[name, taps.index] = joined(taps, name, frame=frame)
            batches = list(taps.batches({"q", "k", "v"}, frame="post_rope", advance=True))
            for name in ("q", "k", "v"):
                found[f"{name} post", taps.index] = torch.cat([getattr(b, name) for b in batches])
    return found


@cache
def captured(name: str) -> dict[tuple[str, int], Tensor]:
    return run(tiny(name), tokens())


@pytest.mark.parametrize("name", ALL)
def test_equals_the_models_own_forward(name: str) -> None:
    model, found = tiny(name), captured(name)
    hidden, cache = reference(model, tokens())
    for index, layer in enumerate(cache.layers):
        assert torch.equal(found["hidden", index], hidden[index])
        assert torch.equal(found["k post", index], layer.keys)
        assert torch.equal(found["v post", index], layer.values)
        assert torch.equal(found["v", index], layer.values)


@pytest.mark.parametrize("name", ALL)
def test_pre_rope_taps_rotate_to_what_the_model_uses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = tiny(name), captured(name)
    queries = attended_queries(model, tokens(), monkeypatch)
    for taps in Capture(model, tokens(), device="cpu"):
        index, k, q = taps.index, found["k", taps.index], found["q", taps.index]
        assert k.shape == (3, 2, LENGTH, 16)
        assert q.shape == (3, 4, LENGTH, 16)
        if taps.rope is None:
            assert torch.equal(k, found["k post", index])
        else:
            assert not torch.equal(k, found["k post", index])
            assert torch.equal(taps.site.rotate(k, *taps.rope), found["k post", index])
        assert torch.equal(found["q post", index], queries[index])


def attended_queries(model: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What each layer's attention function is called with."""
    seen: list[Tensor] = []
    true = torch.nn.functional.scaled_dot_product_attention

    def spy(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(query)
        return true(query, *args, **kwargs)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        model(ids)
    return seen


def test_layers_without_rope() -> None:
    ropes = [taps.rope is not None for taps in Capture(tiny("smollm3"), tokens(), device="cpu")]
    assert ropes == [True, False, True, False]


@pytest.mark.parametrize("name", ["llama-yarn", "phi3-longrope"])
def test_scaled_rope_is_tested(name: str) -> None:
    assert tiny(name).model.rotary_emb.attention_scaling > 1.1


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("name", ["granite", "phi3-longrope"])
def test_spilled_hidden_states_give_the_same(name: str, where: str, tmp_path: Path) -> None:
    found = run(tiny(name), tokens(), hidden=where, spill_dir=tmp_path)
    assert all(torch.equal(found[key], x) for key, x in captured(name).items())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ALL)
def test_batch_sizes_agree(name: str) -> None:
    for batch in (1, 2):  # of 3 windows: the last batch of two is smaller
        for key, x in run(tiny(name), tokens(), batch=batch).items():
            torch.testing.assert_close(x, captured(name)[key], rtol=1e-4, atol=1e-4)


def test_one_at_a_time_is_exactly_one_window() -> None:
    hidden, _ = reference(tiny("llama"), tokens()[1:2])
    found = run(tiny("llama"), tokens(), batch=1)
    assert all(torch.equal(found["hidden", i][1:2], hidden[i]) for i in range(3))


@pytest.mark.parametrize("name", TINY)
def test_repeated_kv_heads_attend_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way around grouped attention, which float32 on CUDA takes."""
    monkeypatch.setattr(call, "kv_repeats", lambda site, x: 2)
    for key, x in run(tiny(name), tokens()).items():
        torch.testing.assert_close(x, captured(name)[key], rtol=1e-4, atol=1e-4)
    assert tiny(name).model.layers[0].self_attn.num_key_value_groups == 2


def test_passes_repeat_and_rows_select() -> None:
    for taps in Capture(tiny("qwen3"), tokens(5), device="cpu", batch=2):
        first, second = joined(taps, "k"), joined(taps, "k")
        assert torch.equal(first, second)
        rows = [batch.rows for batch in taps.batches({"v"}, rows=slice(0, 3))]
        assert rows == [slice(0, 2), slice(2, 3)] == taps.chunks(slice(0, 3))
        torch.testing.assert_close(joined(taps, "k", rows=slice(3, None)), first[3:])
        batch = next(taps.batches({"v"}))
        assert batch.q is None
        assert batch.k is None


def test_a_layer_left_alone_is_advanced() -> None:
    found = {}
    with Capture(tiny("olmo2"), tokens(), device="cpu") as driver:
        for taps in driver:
            if taps.index == 2:
                found["k"] = joined(taps, "k")
    assert torch.equal(found["k"], captured("olmo2")["k", 2])


def test_taps_end_with_their_layer() -> None:
    driver = Capture(tiny("llama"), tokens(), device="cpu", batch=1)
    layers = iter(driver)
    first = next(layers)
    half = first.batches({"k"})
    next(half)
    first.advance()
    first.advance()  # done already
    for late in (lambda: next(half), lambda: first.batches({"k"}), lambda: joined(first, "k", advance=True)):
        with pytest.raises(KVCalError, match="layer 0 was advanced"):
            late()
    second = next(layers)
    with pytest.raises(KVCalError, match="left behind"):
        first.batches({"k"})
    next(second.batches({"k"}, advance=True))
    with pytest.raises(KVCalError, match="was not finished"):
        next(layers)


def test_an_iteration_can_be_started_again() -> None:
    driver = Capture(tiny("llama"), tokens(), device="cpu")
    keys = [[joined(taps, "k") for taps in driver] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*keys, strict=True))
    assert driver.hidden is None


def test_leaves_the_model_as_it_was() -> None:
    model, ids = TINY["llama"](), tokens()
    before = [x.clone() for x in reference(model, ids)[0]]
    run(model, ids)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    fresh = TINY["llama"]()
    reference(fresh, ids)  # Transformers installs hooks of its own when hidden states are asked for
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in fresh.modules()]
    assert all(torch.equal(a, b) for a, b in zip(before, reference(model, ids)[0], strict=True))


def test_gradients_stay_the_callers_choice() -> None:
    for taps in Capture(tiny("llama"), tokens(), device="cpu"):
        for batch in taps.batches({"k"}):
            assert torch.is_grad_enabled()
            assert not batch.k.requires_grad
            weight = torch.ones(16, requires_grad=True)
            (batch.k * weight).sum().backward()  # would fail on a tensor of inference mode


class OneLayerAtATime(WholeModel):
    """Layers and embedding on the meta device, except while they are loaded."""

    def __init__(self, name: str) -> None:
        super().__init__(ALL[name]())
        self.decoder, self.stored = self.model.get_decoder(), ALL[name]().state_dict()
        self.held: list[int] = []
        self.decoder.layers.to("meta")
        self.decoder.embed_tokens.to("meta")

    def load_outer(self) -> None:
        self._fill(self.decoder.embed_tokens, "model.embed_tokens.")

    def free_outer(self) -> None:
        self.decoder.embed_tokens.to("meta")

    def load_layer(self, index: int) -> Any:
        self.held.append(index)
        assert self.held == [index]
        return self._fill(self.decoder.layers[index], f"model.layers.{index}.")

    def free_layer(self, index: int) -> None:
        self.held.remove(index)
        self.decoder.layers[index].to("meta")

    def _fill(self, module: Any, prefix: str) -> Any:
        module.to_empty(device="cpu")
        own = {name.removeprefix(prefix): x for name, x in self.stored.items() if name.startswith(prefix)}
        module.load_state_dict(own)
        return module


@pytest.mark.parametrize("name", ["granite", "smollm3", "llama-dynamic"])
def test_one_layer_in_memory_at_a_time(name: str) -> None:
    source = OneLayerAtATime(name)
    found = run(source, tokens())
    assert all(torch.equal(found[key], x) for key, x in captured(name).items())
    assert source.held == []


def test_layerwise_weights_are_a_source(tmp_path: Path) -> None:
    tiny("granite").save_pretrained(tmp_path)
    source = layerwise.open_layerwise(names.resolve(str(tmp_path)), dtype="float32", device="cpu")
    found = run(source, tokens())
    assert all(torch.equal(found[key], x) for key, x in captured("granite").items())
    assert all(parameter.is_meta for parameter in source.model.parameters())


def planted(part: str, name: str = "llama") -> Any:
    model = TINY[name]()
    dict(model.named_parameters())[part].data[17] = float("nan")  # row 17: the second head
    return model


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            "model.layers.1.self_attn.k_proj.weight",
            r"layer 1, key head 1: NaN .* window 0 to 2 \(torch.float32\)",
        ),
        ("model.layers.1.self_attn.v_proj.weight", r"layer 1, value head 1"),
        ("model.layers.1.mlp.up_proj.weight", r"layer 1, its output: NaN"),
        ("model.layers.2.self_attn.k_proj.weight", r"layer 2, key head 1"),
    ],
)
def test_nan_is_reported_where_it_arises(part: str, message: str) -> None:
    with pytest.raises(NonFiniteError, match=message):
        list(Capture(planted(part), tokens(), device="cpu"))


def test_nan_is_reported_on_the_first_look() -> None:
    for taps in Capture(planted("model.layers.0.self_attn.k_proj.weight"), tokens(), device="cpu"):
        with pytest.raises(NonFiniteError, match="layer 0, key head 1"):
            next(taps.batches({"v"}, rows=slice(1, 2)))
        break


def test_nan_in_the_embedding() -> None:
    model = planted("model.embed_tokens.weight")
    ids = torch.full((3, 8), 5)
    ids[1, 2] = 17
    with pytest.raises(NonFiniteError, match=r"embedding's output: NaN or infinity in window 1 "):
        next(iter(Capture(model, ids, device="cpu")))


def test_overflow_of_float16_gives_advice() -> None:
    model = TINY["llama"](dtype=torch.float32)
    model.model.layers[0].mlp.down_proj.weight.data *= 1e6
    with pytest.raises(NonFiniteError, match=r"layer 0, its output.*take bfloat16 or float32"):
        list(Capture(model.half(), tokens(), device="cpu"))


def test_refuses_layers_it_cannot_calibrate() -> None:
    config = MistralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    with pytest.raises(
        KVCalError, match=r"mistral: no layer can be compressed: sliding-attention layer \(window 4096\)"
    ):
        Capture(model, tokens(), device="cpu")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Capture(tiny("llama"), tokens() + 200, device="cpu"), "the model knows 0 to 255"),
        (lambda: Capture(tiny("llama"), tokens() - 1, device="cpu"), "token -1"),
        (lambda: Capture(tiny("llama"), tokens(), device="cpu", batch=-1), "batch of -1"),
        (lambda: Capture(TINY["llama"]().train(), tokens(), device="cpu"), "training mode"),
        (
            lambda: next(iter(Capture(TINY["llama"](attn_implementation="eager"), tokens(), device="cpu"))),
            "eager attention makes a mask of 96 x 96",
        ),
    ],
)
def test_refusals_are_one_line(build: Callable[[], object], message: str) -> None:
    with pytest.raises(KVCalError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_default_batch_depends_on_nothing_but_length_and_device() -> None:
    assert default_batch(8192, torch.device("cuda")) == 2
    assert default_batch(2048, torch.device("cpu")) == 2
    assert default_batch(100_000, torch.device("cpu")) == 1


def test_phases_are_timed() -> None:
    timer = PhaseTimer()
    for taps in Capture(tiny("llama"), tokens(), device="cpu", timer=timer):
        joined(taps, "k")
    assert set(timer.seconds) == {"load", "embed", "spill", "forward"}
    assert all(seconds > 0 for seconds in timer.seconds.values())


def test_each_window_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check waits for the device. Keys seen before RoPE are compared even where others have been checked."""
    finite, rotated = list[int](), list[int]()
    monkeypatch.setattr(scan, "check_finite", lambda x, what, rows: finite.append(rows.start))
    monkeypatch.setattr(scan, "check_rotation", lambda site, rope, called: rotated.append(1))
    windows = len(tokens())
    for taps in Capture(tiny("llama"), tokens(), device="cpu", batch=1):
        finite.clear(), rotated.clear()
        for _ in taps.batches({"v"}, rows=slice(0, windows - 1)):
            pass
        assert finite == [window for window in range(windows - 1) for _ in "kv"]
        for want in ("v", "k", "k", "kv"):
            for _ in taps.batches(set(want)):
                pass
        assert len(finite) == 2 * (windows - 1) + 2 + 2 * windows
        assert len(rotated) == windows - 1 + 1 + windows
        break


def test_inner_phases_interrupt_outer_ones() -> None:
    ticks = iter([0.0, 1.0, 3.0, 7.0, 8.0, 10.0])
    timer = PhaseTimer(clock=lambda: next(ticks))
    with timer("outer"), timer("inner"):
        pass
    with timer("inner"):
        pass
    assert timer.seconds == {"outer": 5.0, "inner": 4.0}
    assert str(timer) == "outer 5.0 s (56 %) · inner 4.0 s (44 %)"
    assert timer.total == 9.0


@pytest.mark.parametrize("where", ["device", "cpu", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spill_store_keeps_rows(where: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    check_spill_store("cpu", where, dtype, tmp_path)


def check_spill_store(device: str, where: Any, dtype: torch.dtype, folder: Path) -> None:
    x = torch.randn(10, 4, 6, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    chunks = [slice(0, 4), slice(4, 8), slice(8, 10)]
    with SpillStore(x.shape, dtype, device=device, where=where, spill_dir=folder) as store:
        assert store.nbytes == 240 * dtype.itemsize
        for rows in chunks:
            store.write(rows, x[rows])
        assert torch.equal(store.read(slice(3, 9)), x[3:9])
        for rows, part in store.stream(chunks):
            store.write(rows, part * 2)
        doubled = torch.cat([part.clone() for _, part in store.stream(chunks)])
        assert torch.equal(doubled, x * 2)
        assert list(store.stream([])) == []
        assert not list(folder.iterdir())


def test_spill_file_goes_with_its_tensor(tmp_path: Path) -> None:
    def mapped() -> int:
        return sum(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())

    store = SpillStore((4, 4), torch.float32, device="cpu", where="disk", spill_dir=tmp_path)
    assert mapped() == 1
    store.close()
    gc.collect()
    assert mapped() == 0


def test_a_full_disk_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, size: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(spill, "_reserve", full)
    with pytest.raises(KVCalError, match=r"need 0\.00 GB.*No space left on device.*another spill folder"):
        SpillStore((4, 4), torch.float32, device="cpu", where="disk", spill_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_spill_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KVCalError, match="No such file"):
        SpillStore((4, 4), torch.float32, device="cpu", where="disk", spill_dir=tmp_path / "absent")


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["device", "cpu", "disk"])
@pytest.mark.parametrize("pinned", [True, False])
def test_spill_store_on_cuda(where: Any, pinned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not pinned:
        monkeypatch.setattr(spill, "_pin", lambda rows: False)
    check_spill_store("cuda", where, torch.bfloat16, tmp_path)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_to_the_host_are_those_of_the_call(device: str) -> None:
    """Of numbers that are still being computed then, whatever is computed behind them, and contiguous."""
    x = torch.randn(400, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    for _ in range(20 if device == "cuda" else 1):
        product = (x @ x.T).T
        copy = spill.to_host(product)
        x = x / x.norm()
        found = copy()
        assert found.device.type == "cpu" and found.is_contiguous()
        assert torch.equal(found, product.cpu())
    none = spill.to_host(x[:0])()
    assert none.shape == (0, 300)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_does_not_grow_with_the_square_of_the_length(dtype: torch.dtype) -> None:
    model = TINY["llama"](max_position_embeddings=16384).to("cuda", dtype)
    torch.cuda.reset_peak_memory_stats()
    list(Capture(model, tokens(1, 16384), device="cuda"))
    assert torch.cuda.max_memory_allocated() < 500e6  # the scores alone would take 2 GB and more


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_capture_on_cuda(name: str, tmp_path: Path) -> None:
    model = ALL[name]().cuda()
    found: dict[str, list[Tensor]] = {}
    for where in ("device", "cpu", "disk"):
        with Capture(model, tokens(9), device="cuda", batch=2, hidden=where, spill_dir=tmp_path) as driver:
            found[where] = [joined(taps, "k", frame="post_rope", advance=True) for taps in driver]
    for index, keys in enumerate(found["device"]):
        assert torch.equal(keys, found["cpu"][index])
        assert torch.equal(keys, found["disk"][index])
        expected = reference(model, tokens(9)[:2].cuda())[1].layers[index].keys
        torch.testing.assert_close(keys[:2], expected, rtol=1e-4, atol=1e-4)  # see kv_repeats


def test_usage_errors_have_their_code() -> None:
    with pytest.raises(UsageError):
        Capture(tiny("llama"), tokens(), device="cpu", batch=-3)
