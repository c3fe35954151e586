"""With the exact codec a KVCalCache is a DynamicCache: the same logits, bit for bit, in every way to generate.

Blocks are packed and decoded all the same (each test asserts it), so a difference is a bug of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvcal_artifacts import hf
from kvcal_artifacts.errors import KVCalError
from tests.support.architectures import TINY, VARIANTS
from tests.support.schemes import ALL, BLOCK, RECENT, SINK, left_mask, make, tiny, token_ids

pytestmark = pytest.mark.transformers

LENGTH_DEPENDENT = [  # RoPE frequencies that change with the sequence's length
    name for name in ALL if (tiny(name).config.rope_parameters or {}).get("rope_type") in ("dynamic", "longrope")
]
CHANGE = 64  # positions at which their frequencies change
STEPS = 18  # behind prompts of 48 tokens: two blocks are packed on the way, and frequencies change


def generate(model: Any, cache: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> list[Tensor]:
    """Sequences, then the logits of each step."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        past_key_values=cache,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return [out.sequences, *out.logits]


def greedy(model: Any, cache: Any, prompt: int) -> list[Tensor]:
    return generate(model, cache, token_ids(1, prompt), max_new_tokens=STEPS)


def padded(model: Any, cache: Any, prompt: int) -> list[Tensor]:
    mask = left_mask([prompt, prompt - 15, 9, 2])
    return generate(model, cache, token_ids(*mask.shape, seed=1) * mask, mask, max_new_tokens=STEPS)


def beams(model: Any, cache: Any, prompt: int) -> list[Tensor]:
    mask = left_mask([prompt, prompt - 9])
    return generate(model, cache, token_ids(*mask.shape, seed=2) * mask, mask, num_beams=3, max_new_tokens=STEPS)


def lookup(model: Any, cache: Any, prompt: int) -> list[Tensor]:
    """The prompt says everything twice: there is always something to look up."""
    ids = token_ids(1, prompt // 2, seed=3).repeat(1, 2)
    return generate(model, cache, ids, prompt_lookup_num_tokens=5, max_new_tokens=STEPS)


def assisted(model: Any, cache: Any, prompt: int) -> list[Tensor]:
    return generate(
        model, cache, token_ids(1, prompt, seed=5), assistant_model=assistant_of(model), max_new_tokens=STEPS
    )


@cache
def assistant_of(model: Any) -> Any:
    """Of one mind with the model about every other token; proposes six at a time."""
    with torch.random.fork_rng(devices=[]):
        assistant = type(model)(model.config).eval()
    assistant.load_state_dict(model.state_dict())
    with torch.no_grad():
        assistant.lm_head.weight.add_(0.1 * torch.randn(assistant.lm_head.weight.shape, generator=seeded(4)))
    assistant.generation_config.num_assistant_tokens = 6
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def turns(model: Any, cache: Any, prompt: int, lengths: tuple[int, ...] = (0,), seed: int = 6) -> list[Tensor]:
    """Two turns; `lengths`: how many columns each row lacks on the left in the first turn, half of them in the second."""
    mask = left_mask([prompt - 18 - less for less in lengths])
    first = generate(model, cache, token_ids(*mask.shape, seed=seed) * mask, mask, max_new_tokens=10)
    more = left_mask([8 - min(less, 12) // 2 for less in lengths])
    ids = torch.cat([first[0], token_ids(*more.shape, seed=seed + 1) * more], 1)
    mask = torch.cat([mask, mask.new_ones(len(mask), 10), more], 1)
    return first + generate(model, cache, ids, mask, max_new_tokens=12)


def chunks(model: Any, cache: Any, prompt: int, seed: int = 7) -> list[Tensor]:
    """A left-padded batch in pieces of random size; logits of real tokens."""
    mask = left_mask([prompt + 20, prompt - 5, 12, 3])
    ids = token_ids(*mask.shape, seed=seed) * mask
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits, start = [], 0
    while start < ids.shape[1]:
        stop = start + int(torch.randint(1, 14, (), generator=seeded(100 * seed + start)))
        part = slice(start, stop)
        out = model(ids[:, part], attention_mask=mask[:, :stop], position_ids=positions[:, part], past_key_values=cache)
        logits.append(out.logits[mask[:, part].bool()])
        start = stop
    return logits


def chunked_prefill(model: Any, cache: Any, prompt: int) -> list[Tensor]:
    """Transformers' own option; the first piece of the shorter rows is nothing but pads."""
    mask = left_mask([prompt, prompt - 15, 9, 2])
    ids = token_ids(*mask.shape, seed=9) * mask
    return generate(model, cache, ids, mask, max_new_tokens=12, prefill_chunk_size=7)


def unmasked(model: Any, cache: Any, prompt: int) -> list[Tensor]:
    """The decoder called by hand: no mask, no positions, a few tokens at a time."""
    parts = token_ids(2, prompt + 20, seed=10).split([30, 1, 1, 7, prompt - 19], 1)
    return [model(part, past_key_values=cache).logits for part in parts]


Mode = Callable[[Any, Any, int], list[Tensor]]
MODES: dict[str, Mode] = {
    "greedy": greedy,
    "left-padded": padded,
    "beams": beams,
    "prompt-lookup": lookup,
    "assisted": assisted,
    "two-turns": turns,
    "two-turns-padded": partial(turns, lengths=(0, 13, 5), seed=8),
    "chunks": chunks,
    "chunked-prefill": chunked_prefill,
    "unmasked": unmasked,
}
CROPS = ("prompt-lookup", "assisted")
BY_HAND = ("chunks", "unmasked")


def prompt_of(name: str, mode: str, frame: str) -> int:
    """Long enough that frequencies change on the way, but for two cases.

    Keys stored before RoPE are rotated with the frequencies of the current length, so that they equal DynamicCache's,
    rotated once, only while frequencies stay. And Phi-3's prepare_inputs_for_generation drops any cache, ours and
    DynamicCache alike, when generation crosses the change of LongRoPE; only forwards called by hand cross it.
    """
    if name not in LENGTH_DEPENDENT:
        return 48
    if frame == "pre_rope":
        return 36  # at most 62 positions in any mode
    return 48 if name != "phi3-longrope" or mode in BY_HAND else 36


@torch.no_grad()
def run(name: str, mode: str, prompt: int, cache: Any) -> list[Tensor]:
    model = tiny(name)
    model(torch.ones(1, 1, dtype=torch.long))  # dynamic RoPE remembers the longest length until it sees a short one
    return MODES[mode](model, cache, prompt)


@cache
def expected(name: str, mode: str, prompt: int) -> list[Tensor]:
    return run(name, mode, prompt, DynamicCache(config=tiny(name).config))


def assert_packed(cache: Any, mode: str) -> None:
    """The canary: every row long enough has blocks, all there can be unless tokens were taken back."""
    real = cache.ledger.valid.sum(1)
    blocks = ((real - SINK - RECENT) // BLOCK).clamp_min(0)
    assert int(real.max()) >= SINK + RECENT + BLOCK
    if mode in CROPS:
        assert (cache.ledger.blocks >= blocks.clamp_max(1)).all()
    else:
        assert cache.ledger.blocks.tolist() == blocks.tolist()
    assert cache.nbytes("packed") > 0


def equal_to_dynamic(name: str, mode: str, frame: str) -> None:
    prompt = prompt_of(name, mode, frame)
    with make(tiny(name), frame=frame) as cache:
        got = run(name, mode, prompt, cache)
        assert_packed(cache, mode)
    want = expected(name, mode, prompt)
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ALL)
def test_stored_as_handed_over(name: str, mode: str) -> None:
    equal_to_dynamic(name, mode, "post_rope")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ALL)
def test_stored_before_rope(name: str, mode: str) -> None:
    """Rotated again at every step, yet equal bit for bit on every architecture: the promise was 1e-5.

    Covers yarn and longrope (attention_scaling != 1), partial rotary, layers without RoPE (SmolLM3), Granite, OLMo-2.
    Where frequencies depend on length, only lengths at which they do not change (prompt_of says why).
    """
    equal_to_dynamic(name, mode, "pre_rope")


@pytest.mark.parametrize("mode", CROPS)
def test_speculation_takes_tokens_back_and_keeps_some(mode: str) -> None:
    with make(tiny("llama")) as made:
        crop, crops = made.crop, []
        made.crop = lambda count: (crops.append(-int(count)), crop(count))
        run("llama", mode, 48, made)
    assert sum(crops) > 0
    assert len(crops) < 20  # fewer forwards than tokens


@pytest.mark.parametrize("frame", ["post_rope", "pre_rope"])
@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "smollm3", "phi3-partial"])
def test_speculation_beyond_the_window(name: str, frame: str) -> None:
    """More wrong guesses than the recent window is long: they reach into packed blocks."""
    model = tiny(name)
    assistant, ids = assistant_of(model), token_ids(1, 48, seed=5)
    options = {"assistant_model": assistant, "max_new_tokens": 40}
    assistant.generation_config.num_assistant_tokens = RECENT + 2 * BLOCK
    with torch.no_grad(), make(model, frame=frame) as made:
        got = generate(model, made, ids, **options)
        assert made.describe()["returned_by_crop"] > 0
        assert int(made.ledger.blocks) > 0
        wanted = generate(model, DynamicCache(config=model.config), ids, **options)
    assistant.generation_config.num_assistant_tokens = 6
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("frame", ["post_rope", "pre_rope"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3-partial", "llama-yarn"])
def test_sixteen_bits(name: str, dtype: torch.dtype, frame: str) -> None:
    """Nothing is lost where the codec stores what the model computes in."""
    model = ALL[name]().to(dtype)
    codec = {torch.bfloat16: "exact-bf16", torch.float16: "exact-16"}[dtype]
    with torch.no_grad(), make(model, codec, frame) as made:
        got = padded(model, made, 48)
        assert_packed(made, "left-padded")
        wanted = padded(model, DynamicCache(config=model.config), 48)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("frame", ["post_rope", "pre_rope"])
@pytest.mark.parametrize("name", TINY)
def test_eager_attention(name: str, frame: str) -> None:
    model = TINY[name](attn_implementation="eager")
    with torch.no_grad(), make(model, frame=frame) as made:
        got = padded(model, made, 48)
        assert_packed(made, "left-padded")
        wanted = padded(model, DynamicCache(config=model.config), 48)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_keys_before_rope_follow_the_frequencies(name: str) -> None:
    """Where frequencies change with the length, keys stored before RoPE give what a forward over everything gives.

    (In one layer, where keys depend on the tokens only.) Keys stored after RoPE keep the old frequencies.
    """
    model, ids = VARIANTS[name](num_hidden_layers=1), token_ids(1, CHANGE + 16)
    whole = model(ids).logits[:, -1]
    last = {}
    for frame in ("pre_rope", "post_rope"):
        model(ids[:, :1])
        with make(model, frame=frame) as made:
            for part in ids.split([CHANGE - 10, 9, 8, *[1] * 9], 1):
                last[frame] = model(part, past_key_values=made).logits[:, -1]
    torch.testing.assert_close(last["pre_rope"], whole, atol=1e-5, rtol=1e-5)
    assert float((last["post_rope"] - whole).abs().max()) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("frame", ["post_rope", "pre_rope"])
def test_decoder_called_by_position(frame: str) -> None:
    """input_ids, attention_mask, position_ids, past_key_values without names."""
    model, mask = tiny("llama"), left_mask([40, 29])
    ids = token_ids(*mask.shape) * mask
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    states = []
    with make(model, frame=frame) as made:
        for used in (made, DynamicCache(config=model.config)):
            for start, stop in ((0, 32), (32, 40)):
                out = model.model(ids[:, start:stop], mask[:, :stop], positions[:, start:stop], used)
            states.append(out.last_hidden_state)
        assert made.ledger.blocks.tolist() == [2, 1]
    assert torch.equal(*states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_that_is_not_the_models_own_is_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one key: the check compares with cos and sin that the model itself made for this call."""
    model = TINY["llama"]().to(dtype)
    made = make(model, "exact-bf16" if dtype == torch.bfloat16 else "exact-32", "pre_rope")
    captured = hf.AttentionSite.keys_from

    def bent(self: hf.AttentionSite, output: Tensor) -> Tensor:
        keys = captured(self, output).clone()
        keys[0, 0, 0, 0] = keys[0, 0, 0, 0] * (1 + torch.finfo(dtype).eps)
        return keys

    monkeypatch.setattr(hf.AttentionSite, "keys_from", bent)
    with pytest.raises(KVCalError, match="layer 0: keys captured before RoPE do not give the model's keys"):
        model(token_ids(1, 5), past_key_values=made)


@pytest.mark.parametrize("max_length", [None, 120])
def test_rows_that_differ_after_a_crop(max_length: int | None) -> None:
    """New tokens are pads in the second row, pack a block in the first, and are cropped: each row goes on as it was."""
    model, behind = tiny("llama"), 5
    length = SINK + RECENT + BLOCK - 2  # a block is packed by two more
    ids = token_ids(2, length + behind, seed=11)

    def steps(past: Any) -> Tensor:
        mask = torch.ones(2, length + behind, dtype=torch.long)
        mask[1, length:] = 0
        with torch.no_grad():
            model(ids[:, :length], past_key_values=past, attention_mask=mask[:, :length])
            model(ids[:, length:], past_key_values=past, attention_mask=mask)
            past.crop(-behind)
            mask[1] = 1
            logits = [
                model(ids[:, at : at + 1], past_key_values=past, attention_mask=mask[:, : at + 1]).logits
                for at in range(length, length + behind)
            ]
        return torch.cat(logits, 1)

    with make(model, strict=False, max_length=max_length) as compressed:
        got = steps(compressed)
        assert compressed.ledger.lengths.tolist() == [length + behind] * 2
        assert compressed.describe()["packed_blocks"][0] > 0
    torch.testing.assert_close(got, steps(DynamicCache(config=model.config)), rtol=0, atol=1e-5)
