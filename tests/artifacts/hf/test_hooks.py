"""A cache beside other things on the same model: modules that are replaced (adapters), forwards that were given another
cache or none, forwards that do not return, and forwards that are compiled.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.errors import KVCalError
from kvcal_artifacts.scheme import HeavyHitters, Scheme
from tests.artifacts.paths import test_fused
from tests.artifacts.paths.test_fused import PAIRS
from tests.support import schemes
from tests.support.architectures import HYBRID, TINY, build
from tests.support.schemes import close_all, opened, same, token_ids

REPLACED = "was (replaced|added) since this cache was made .*close the cache and make a new one"
BROKE_OFF = "an earlier forward broke off; call reset"
PROMPT, NEW = 100, 3


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_all()
    torch._dynamo.reset()


def fresh(**overrides: Any) -> Any:
    """A Llama of 3 layers that no cache has ever been on. Tests share test_fused.model: one that generated with a
    compiled forward keeps it in `_compiled_call`, and cannot be pickled.
    """
    return build("Llama", head_dim=64, **overrides)


def held(cache: KVCalCache) -> list[Any]:
    """What a cache holds, by value; also where tokens were evicted."""
    tensors = [
        t.clone() for layer in cache.compressed_layers for part in ("packed", "window") for t in layer.stored(part)
    ]
    return [
        cache.ledger.columns,
        *(t.clone() for layer in cache.compressed_layers for t in layer.bookkeeping()),
        *tensors,
    ]


def exact(frame: Any = "pre_rope", **settings: Any) -> Callable[[Any], KVCalCache]:
    """Whose logits are those of Transformers' own cache."""
    return lambda model: opened(schemes.scheme(model, "exact-32", frame), model, **settings)


def fused(name: str, frame: Any = "post_rope", **settings: Any) -> Callable[[Any], KVCalCache]:
    """Attended by the kernel's reference."""
    return lambda model: opened(
        test_fused.scheme(PAIRS[name], model.config.num_hidden_layers, frame), model, kernels="torch", **settings
    )


def evicting(model: Any) -> KVCalCache:
    own = schemes.scheme(model, "exact-32", "post_rope")
    return opened(Scheme(own.windows, own.frame, own.layers, selection=HeavyHitters(0.3)), model)


CACHES: dict[str, Callable[[Any], KVCalCache]] = {
    "exact": exact(),
    "exact, max_length": exact(max_length=256),
    "kivi-4 before RoPE": fused("kivi-4", "pre_rope"),
    "kivi-4 before RoPE, max_length": fused("kivi-4", "pre_rope", max_length=256),
    "squat": fused("squat"),
    "mixkvq": fused("mixkvq"),
    "innerq-prefill": fused("innerq-prefill"),
    "inner-4, max_length": fused("inner-4", max_length=256),
    "H2O": evicting,
}


# Modules that are replaced.


class Adapted(nn.Module):
    """What PEFT puts into the place of a projection: it calls the old one, and adds to it."""

    def __init__(self, old: nn.Linear, seed: int) -> None:
        super().__init__()
        self.base_layer = old
        self.more = nn.Linear(old.in_features, old.out_features, bias=False)
        self.more.weight.data = schemes.numbers(*old.weight.shape, seed=seed) / old.in_features**0.5

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x) + self.more(x)


def adapt(model: Any, *names: str) -> None:
    for layer in model.model.layers:
        for seed, name in enumerate(names):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name), seed))


def unload(model: Any, *names: str) -> None:
    """Merged: a projection of its own in the place of the adapted one."""
    adapt(model, *names)
    for layer in model.model.layers:
        for name in names:
            was = getattr(layer.self_attn, name)
            merged = nn.Linear(was.more.in_features, was.more.out_features, bias=False)
            merged.weight.data = was.base_layer.weight.data + was.more.weight.data
            setattr(layer.self_attn, name, merged)


def louder(module: nn.Module) -> Any:
    twin = copy.deepcopy(module)
    for parameter in twin.parameters():
        parameter.data *= 1.2
    return twin


def replace_layer(model: Any) -> None:
    model.model.layers[-1] = louder(model.model.layers[-1])


def replace_layers(model: Any) -> None:
    model.model.layers = louder(model.model.layers)


def replace_attention(model: Any) -> None:
    model.model.layers[-1].self_attn = louder(model.model.layers[-1].self_attn)


def replace_mlp(model: Any) -> None:
    model.model.layers[0].mlp = louder(model.model.layers[0].mlp)


def replace_rotary(model: Any) -> None:
    model.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    model.model.rotary_emb.inv_freq *= 0.7


CHANGES: dict[str, Callable[[Any], None]] = {
    "k_proj": lambda model: adapt(model, "k_proj"),
    "q_proj": lambda model: adapt(model, "q_proj"),
    "v_proj": lambda model: adapt(model, "v_proj"),
    "mlp": replace_mlp,
    "merged": lambda model: unload(model, "q_proj", "k_proj"),
    "self_attn": replace_attention,
    "layer": replace_layer,
    "layers": replace_layers,
    "rotary_emb": replace_rotary,
}
SOME = [("exact", change) for change in CHANGES] + [
    (name, "merged" if index % 2 else "self_attn") for index, name in enumerate(CACHES) if name != "exact"
]
SOME += [("squat", "q_proj"), ("H2O", "q_proj"), ("kivi-4 before RoPE", "k_proj"), ("kivi-4 before RoPE", "rotary_emb")]


@torch.no_grad()
def logits(model: Any, cache: Any) -> Tensor:
    """Of a prompt, a few tokens, and steps."""
    ids = token_ids(1, PROMPT + NEW + 2, seed=2)
    cuts = [0, PROMPT, PROMPT + NEW, PROMPT + NEW + 1, PROMPT + NEW + 2]
    pieces = [ids[:, a:b] for a, b in pairwise(cuts)]
    return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], 1)


@pytest.mark.parametrize("still_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize(("name", "change"), SOME)
def test_a_new_cache_reads_the_modules_that_are_there(name: str, change: str, still_open: bool) -> None:
    """Also where an earlier one, which still listens to those that were there, is not closed."""
    model, other = fresh(), fresh()
    earlier = CACHES[name](model)
    logits(model, earlier)
    if not still_open:
        earlier.close()
    for own in (model, other):
        CHANGES[change](own)
    found, wanted = logits(model, CACHES[name](model)), logits(other, CACHES[name](other))
    assert torch.equal(found, wanted)
    if name.startswith("exact"):
        torch.testing.assert_close(found, logits(other, DynamicCache(config=other.config)))
    if still_open:
        with pytest.raises(KVCalError, match=REPLACED):
            model(token_ids(1, 1), past_key_values=earlier)


def twice(model: Any, name: str) -> None:
    for layer in model.model.layers:
        getattr(layer.self_attn, name).register_forward_hook(lambda module, args, output: output * 1.3)


def patched(model: Any, name: str) -> None:
    for layer in model.model.layers:
        projection = getattr(layer.self_attn, name)
        projection.forward = lambda x, plain=projection.forward: plain(x) * 1.3


def parameter(model: Any, name: str) -> None:
    for layer in model.model.layers:
        projection = getattr(layer.self_attn, name)
        projection.weight = nn.Parameter(projection.weight.detach() * 1.3)


def earlier_input(model: Any, name: str) -> None:
    """A hook before attention, which changes what it is given."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 1.3}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("change", [twice, patched, parameter, earlier_input])
@pytest.mark.parametrize("name", ["squat", "H2O", "kivi-4 before RoPE"])
def test_a_cache_is_told_what_attention_gets(name: str, change: Callable[[Any, str], None]) -> None:
    """Also where another hook, patch or parameter came after the cache, before its first forward or between two."""
    projection = "k_proj" if "RoPE" in name else "q_proj"
    model, other = fresh(), fresh()
    cache = CACHES[name](model)
    change(model, projection)
    change(other, projection)
    assert torch.equal(logits(model, cache), logits(other, CACHES[name](other)))
    cache.reset()
    change(model, projection)
    change(other, projection)
    assert torch.equal(logits(model, cache), logits(other, CACHES[name](other)))


@pytest.mark.parametrize(("name", "change"), SOME)
def test_an_open_cache_says_that_a_module_was_replaced(name: str, change: str) -> None:
    model = fresh()
    cache, before = CACHES[name](model), dict(model.named_modules())
    logits(model, cache)
    before_it = held(cache)
    CHANGES[change](model)
    for ids in (token_ids(1, 1), token_ids(1, 40)):
        with torch.no_grad(), pytest.raises(KVCalError, match=REPLACED):
            model(ids, past_key_values=cache)
    assert same(before_it, held(cache))
    for part in ("rotary_emb", "layers"):  # as they were: nothing is wrong any more
        setattr(model.model, part, before[f"model.{part}"])
    for index in range(3):
        model.model.layers[index] = before[f"model.layers.{index}"]
        for part in ("self_attn", "mlp"):
            setattr(model.model.layers[index], part, before[f"model.layers.{index}.{part}"])
        for part in ("q_proj", "k_proj", "v_proj"):
            setattr(model.model.layers[index].self_attn, part, before[f"model.layers.{index}.self_attn.{part}"])
    with torch.no_grad():
        model(token_ids(1, 1), past_key_values=cache)


ARCHITECTURES = {name: {**TINY, **HYBRID}[name] for name in ("llama", "qwen3", "gemma3", "olmo2", "phi3")}
ELSEWHERE = ("embed_tokens", "rotary_emb", "layers.0.mlp", "layers.0.mlp.down_proj", "layers.0.input_layernorm")


def put(model: Any, path: str, module: nn.Module) -> None:
    holder, _, name = path.rpartition(".")
    setattr(model.model.get_submodule(holder), name, module)


def paths_of(model: Any) -> list[str]:
    """Every module of two layers' attention, and some outside of it: each makes keys or values, or what they come of."""
    own = [
        f"layers.{i}.self_attn.{name}" for i in (0, 1) for name, _ in model.model.layers[i].self_attn.named_children()
    ]
    names = {name for name, _ in model.model.named_modules()}
    return own + [path for path in ELSEWHERE if path in names]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (family, name)
        for family in ARCHITECTURES
        for name in ("exact", "exact after RoPE", "H2O")
        if (family, name) != ("gemma3", "H2O")  # this scheme has codecs for every layer, also for sliding ones
    ],
)
def test_whatever_makes_keys_and_values_is_missed(family: str, name: str) -> None:
    """Also where a norm follows the projection, where q, k and v are one, and in layers that are not compressed."""
    model = ARCHITECTURES[family]()
    cache = {**CACHES, "exact after RoPE": exact("post_rope")}[name](model)
    logits(model, cache)
    before, paths = held(cache), paths_of(model)
    assert {path.rpartition(".")[2] for path in paths} >= ({"qkv_proj"} if family == "phi3" else {"k_proj", "v_proj"})
    assert ("layers.1.self_attn.k_norm" in paths) == (family in ("qwen3", "gemma3", "olmo2"))
    for path in paths:
        was = model.model.get_submodule(path)
        put(model, path, copy.deepcopy(was))
        with torch.no_grad(), pytest.raises(KVCalError, match=f"^{path} {REPLACED}"):
            model(token_ids(1, 1), past_key_values=cache)
        put(model, path, was)
    assert same(before, held(cache))
    with torch.no_grad():
        model(token_ids(1, 1), past_key_values=cache)


class Louder(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 1.2


def test_a_parametrised_weight_is_an_adapter_too() -> None:
    model = fresh()
    cache = CACHES["exact"](model)
    logits(model, cache)
    values = model.model.layers[1].self_attn.v_proj
    nn.utils.parametrize.register_parametrization(values, "weight", Louder())
    with torch.no_grad(), pytest.raises(KVCalError, match=f"layers.1.self_attn.v_proj.parametrizations {REPLACED}"):
        model(token_ids(1, 1), past_key_values=cache)


def test_an_adapter_that_is_not_in_use_is_no_error() -> None:
    """Beside one that was there: PEFT keeps adapters by name in a ModuleDict. Where that one goes, it is an error."""
    model = fresh()
    adapters = model.model.layers[0].self_attn.v_proj.adapters = nn.ModuleDict({"one": nn.Linear(2, 2)})
    cache = CACHES["exact"](model)
    logits(model, cache)
    adapters["two"] = nn.Linear(2, 2)
    with torch.no_grad():
        model(token_ids(1, 1), past_key_values=cache)
        del adapters["two"]
        model(token_ids(1, 1), past_key_values=cache)
        del adapters["one"]
        with pytest.raises(KVCalError, match=f"layers.0.self_attn.v_proj.adapters.one {REPLACED}"):
            model(token_ids(1, 1), past_key_values=cache)


def test_another_decoder() -> None:
    model = fresh()
    cache = CACHES["exact"](model)
    logits(model, cache)
    model.model = copy.deepcopy(model.model)
    with torch.no_grad(), pytest.raises(KVCalError, match=REPLACED):
        model(token_ids(1, 1), past_key_values=cache)


@pytest.mark.parametrize("change", ["k_proj", "q_proj", "v_proj", "mlp", "self_attn", "layers"])
@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("kivi-4 before RoPE, max_length", True),
        pytest.param("kivi-4 before RoPE, max_length", False, marks=pytest.mark.slow),
        pytest.param("inner-4, max_length", True, marks=pytest.mark.slow),
        pytest.param("inner-4, max_length", False, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_step_says_that_a_module_was_replaced(name: str, change: str, whole: bool) -> None:
    model = fresh(num_hidden_layers=1)
    cache = CACHES[name](model)
    step = torch.compile(model, fullgraph=whole, backend="eager")
    with torch.no_grad():
        model(token_ids(1, PROMPT), past_key_values=cache)
        step(token_ids(1, 1), past_key_values=cache)
        CHANGES[change](model)
        with pytest.raises(Exception, match=REPLACED):
            step(token_ids(1, 1), past_key_values=cache)


def test_adapters_of_peft() -> None:
    """Attached, switched off, merged and taken away, each with a cache before."""
    peft = pytest.importorskip("peft")
    model = fresh()
    logits(model, CACHES["exact"](model))
    close_all()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)

    def check(served: Any) -> None:
        for name in ("exact", "squat", "H2O"):
            twin = copy.deepcopy(served)
            found, wanted = logits(served, CACHES[name](served)), logits(twin, CACHES[name](twin))
            assert torch.equal(found, wanted), name
            if name == "exact":
                torch.testing.assert_close(found, logits(served, DynamicCache(config=served.config)))
            close_all()

    check(adapted)
    with adapted.disable_adapter():
        check(adapted)
    adapted.merge_adapter()
    check(adapted)
    adapted.unmerge_adapter()
    check(adapted.merge_and_unload())


@pytest.mark.parametrize("targets", [["q_proj", "k_proj", "v_proj"], ["v_proj"], ["o_proj"], "all-linear"], ids=str)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_peft_on_an_open_cache(family: str, targets: Any) -> None:
    peft = pytest.importorskip("peft")
    model = ARCHITECTURES[family]()
    if family == "phi3" and "v_proj" in targets and targets != "all-linear":
        targets = ["qkv_proj"]
    cache = CACHES["exact"](model)
    logits(model, cache)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    for served in (adapted, model):
        with torch.no_grad(), pytest.raises(KVCalError, match=rf"^layers.0.self_attn.\w+_proj {REPLACED}"):
            served(token_ids(1, 1), past_key_values=cache)


# Forwards that are not ours.


OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
IDS = token_ids(2, 20, seed=5)


def in_batches(model: Any, tmp_path: Path) -> Any:
    """Continuous batching: two requests of different lengths."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.importorskip("psutil", reason="by which Transformers 5.17 asks how much memory there is")
    found = model.generate_batch(
        inputs=[IDS[0, :9].tolist(), IDS[1].tolist()],
        generation_config=GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64),
    )
    own = [found[key] for key in sorted(found)]
    assert [request.error for request in own] == [None, None]
    return [request.generated_tokens for request in own]


def trained(model: Any, tmp_path: Path, checkpointed: bool = False) -> Any:
    twin = model.train()
    if checkpointed:
        twin.gradient_checkpointing_enable()
    model.zero_grad()
    with torch.enable_grad():
        model(IDS, labels=IDS, use_cache=False).loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    if checkpointed:
        model.gradient_checkpointing_disable()
    model.eval()
    return gradients


def compiled(model: Any, tmp_path: Path, cached: bool = False) -> Any:
    step = torch.compile(model, fullgraph=not cached, backend="eager")
    with torch.no_grad():
        if not cached:
            return step(IDS, use_cache=False).logits
        own = StaticCache(config=model.config, max_cache_len=64)
        model(IDS, past_key_values=own)
        return step(IDS[:, :1], past_key_values=own, position_ids=torch.tensor([[20]])).logits


def switched(model: Any, tmp_path: Path, kind: str) -> Any:
    was = model.config._attn_implementation
    model.set_attn_implementation(kind)
    try:
        with torch.no_grad():
            out = model(IDS, output_attentions=kind == "eager", use_cache=False)
        return [out.logits, *(out.attentions or [])]
    finally:
        model.set_attn_implementation(was)


def saved(model: Any, tmp_path: Path) -> Any:
    model.save_pretrained(tmp_path / "model")
    twin = type(model).from_pretrained(tmp_path / "model")
    return twin(IDS).logits


def pickled(model: Any, tmp_path: Path) -> Any:
    place = io.BytesIO()
    torch.save(model, place)
    place.seek(0)
    twin = torch.load(place, weights_only=False)
    other = pickle.loads(pickle.dumps(model))
    for own in (twin, other, copy.deepcopy(model)):
        assert type(own.model.layers[0].self_attn.config) is type(model.config)
        assert own.model.layers[0].self_attn.config is own.model.config
    return [own(IDS).logits for own in (twin, other, copy.deepcopy(model))]


def static(model: Any, tmp_path: Path) -> Any:
    own = StaticCache(config=model.config, max_cache_len=64)
    return [model(part, past_key_values=own).logits for part in (IDS, IDS[:, :1], IDS[:, :3])]


def one_layer(model: Any, tmp_path: Path) -> Any:
    """A layer alone, without its decoder; and what its attention's config says."""
    attention = model.model.layers[1].self_attn
    hidden = schemes.numbers(1, 7, model.config.hidden_size)
    rope = model.model.rotary_emb(hidden, torch.arange(7)[None])
    out = model.model.layers[1](hidden, position_embeddings=rope, attention_mask=None)
    return [out, attention.config._attn_implementation]


def shaped(model: Any, tmp_path: Path) -> Any:
    """An attention that gets a mask wider than its keys, as some caches do."""
    seen: list[Any] = []

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **given: Any) -> Any:
        seen.append(tuple(mask.shape))
        return torch.zeros_like(query).transpose(1, 2), None

    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("wide", attention)
    AttentionMaskInterface.register("wide", lambda *given, **named: None)
    wide = torch.ones(2, 1, 20, 45, dtype=torch.bool)
    model.set_attn_implementation("wide")
    try:
        model(IDS, attention_mask=wide, use_cache=False)
    finally:
        model.set_attn_implementation("sdpa")
    return seen


def plain(**given: Any) -> Callable[[Any, Path], Any]:
    return lambda model, tmp_path: model.generate(IDS, **OPTIONS, **given)


USES: dict[str, Callable[[Any, Path], Any]] = {
    "continuous batching": in_batches,
    "generate": plain(),
    "generate, no cache": plain(use_cache=False),
    "generate, beams": plain(num_beams=2),
    "generate, static": plain(cache_implementation="static", disable_compile=True),
    "assisted": lambda model, tmp_path: model.generate(IDS[:1], assistant_model=model, **OPTIONS),
    "static": static,
    "positional": lambda model, tmp_path: model.model(IDS, torch.ones_like(IDS), None, DynamicCache())[0],
    "training": trained,
    "checkpointed": lambda model, tmp_path: trained(model, tmp_path, True),
    "compiled": compiled,
    "compiled, static": lambda model, tmp_path: compiled(model, tmp_path, True),
    "eager": lambda model, tmp_path: switched(model, tmp_path, "eager"),
    "saved": saved,
    "pickled": pickled,
    "one layer": one_layer,
    "wide mask": shaped,
}
BESIDE = ["kivi-4 before RoPE, max_length", "squat", "H2O"]


def flat(found: Any) -> list[Any]:
    return [part for one in found for part in flat(one)] if isinstance(found, list | tuple) else [found]


COMPILED = [use for use in USES if use.startswith("compiled")]


@pytest.mark.parametrize(
    ("name", "use"),
    [
        pytest.param(name, use, marks=pytest.mark.slow if use in COMPILED and name != BESIDE[0] else ())
        for name in BESIDE
        for use in USES
    ],
)
def test_forwards_that_are_not_ours_do_not_notice_an_open_cache(name: str, use: str, tmp_path: Path) -> None:
    """Nor does it notice them: it goes on as one does that was alone."""
    model, alone = fresh(), fresh()
    if use in COMPILED:
        model, alone = (fresh(num_hidden_layers=1) for _ in range(2))
    wanted, own = USES[use](copy.deepcopy(model), tmp_path), [CACHES[name](one) for one in (model, alone)]
    ids = token_ids(1, PROMPT + NEW + 1, seed=2)
    steps = [ids[:, :PROMPT], ids[:, PROMPT : PROMPT + NEW], ids[:, PROMPT + NEW :]]
    with torch.no_grad():
        for cache in own:
            cache.model(steps[0], past_key_values=cache)
        for step in steps[1:]:
            assert same(flat(USES[use](model, tmp_path)), flat(wanted))
            found, right = (cache.model(step, past_key_values=cache).logits for cache in own)
            assert torch.equal(found, right)
    assert same(held(own[0]), held(own[1]))


@pytest.mark.parametrize("name", ["exact", "kivi-4 before RoPE", "squat", "H2O"])
def test_a_model_that_is_its_own_assistant(name: str) -> None:
    model = fresh()
    given = {**OPTIONS, "max_new_tokens": 20}
    found, wanted = (
        model.generate(IDS[:1], past_key_values=CACHES[name](model), **given, **more)
        for more in ({"assistant_model": model}, {"prompt_lookup_num_tokens": 3})
    )
    assert found.shape == wanted.shape
    if name == "exact":
        assert torch.equal(found, model.generate(IDS[:1], **given))


def test_the_attention_implementation_may_change_while_a_cache_is_open() -> None:
    model = fresh()
    found = {}
    for kind in ("sdpa", "eager"):
        cache = CACHES["exact, max_length"](model)
        ids = token_ids(1, 60)
        with torch.no_grad():
            model(ids[:, :40], past_key_values=cache)
            model.set_attn_implementation(kind)
            found[kind] = model(ids[:, 40:], past_key_values=cache).logits
    torch.testing.assert_close(found["sdpa"], found["eager"])


# Forwards that do not return.


def failing(part: nn.Module, error: type[BaseException], *given: Any) -> Callable[[], None]:
    """Its next forward raises after it is done."""

    def fail(*ignored: Any) -> None:
        raise error(*given)

    handle = part.register_forward_hook(fail)
    return handle.remove


ERRORS: dict[str, type[BaseException]] = {"interrupt": KeyboardInterrupt, "memory": torch.OutOfMemoryError}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("where", ["model.layers.2.self_attn", "model.layers.2.mlp", "model.norm", "model", "lm_head"])
@pytest.mark.parametrize("name", ["kivi-4 before RoPE, max_length", "squat", "exact", "H2O"])
def test_a_forward_that_did_not_return_is_noticed(name: str, where: str, error: str) -> None:
    """However late it broke off: its tokens would be held twice."""
    model = fresh()
    cache, ids = CACHES[name](model), token_ids(1, 121, seed=2)
    with torch.no_grad():
        model(ids[:, :PROMPT], past_key_values=cache)
        remove = failing(model.get_submodule(where), ERRORS[error])
        with pytest.raises(ERRORS[error]):
            model(ids[:, PROMPT : PROMPT + 10], past_key_values=cache)
        remove()
        assert torch.equal(model(IDS, use_cache=False).logits, fresh()(IDS, use_cache=False).logits)
        for _ in range(2):
            with pytest.raises(KVCalError, match=BROKE_OFF):
                model(ids[:, PROMPT : PROMPT + 10], past_key_values=cache)
        with pytest.raises(KVCalError, match=BROKE_OFF):
            cache.crop(-10)
        cache.reset()
        twin = fresh()
        assert torch.equal(logits(model, cache), logits(twin, CACHES[name](twin)))


def test_what_fails_before_anything_changed_breaks_nothing() -> None:
    model = fresh()
    cache, ids = CACHES["squat"](model), token_ids(1, 121, seed=2)
    with torch.no_grad():
        model(ids[:, :PROMPT], past_key_values=cache)
        before = held(cache)
        for error in ERRORS.values():
            remove = failing(model.model.embed_tokens, error)
            with pytest.raises(error):
                model(ids[:, PROMPT:], past_key_values=cache)
            remove()
        with pytest.raises(KVCalError, match="attention_mask has 4 columns"):
            model(ids[:, PROMPT:], attention_mask=torch.ones(1, 4), past_key_values=cache)
        assert same(before, held(cache))
        model(ids[:, PROMPT:], past_key_values=cache)


class InPieces(nn.Module):
    """A model around a decoder that runs it twice in a forward."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def get_decoder(self) -> Any:
        return self.inner.get_decoder()

    def forward(self, ids: Tensor, past_key_values: Any = None) -> Tensor:
        pieces = [self.inner(part, past_key_values=past_key_values).logits for part in ids.split(PROMPT, 1)]
        return torch.cat(pieces, 1)


@pytest.mark.parametrize("served", ["model", "decoder", "around"])
def test_whatever_module_is_called(served: str) -> None:
    """The model, its decoder, or a model around them, whichever of them the cache was made for."""
    model, ids = fresh(), token_ids(1, 200, seed=2)
    around = InPieces(model)
    own = {"model": model, "decoder": model.model, "around": around}[served]
    cache, plain = (opened(test_fused.scheme(PAIRS["inner-4"]), one, kernels="torch") for one in (own, fresh()))
    with torch.no_grad():
        hidden = model.model(ids[:, :40], past_key_values=cache)[0]
        found = [model.lm_head(hidden), model(ids[:, 40:41], past_key_values=cache).logits]
        found.append(around(ids[:, 41:], past_key_values=cache))
        cuts = [0, 40, 41, 41 + PROMPT, 200]
        pieces = [ids[:, a:b] for a, b in pairwise(cuts)]
        wanted = [plain.model(piece, past_key_values=plain).logits for piece in pieces]
    assert torch.equal(torch.cat(found, 1), torch.cat(wanted, 1))


# Forwards that are compiled.


@pytest.mark.parametrize(
    ("name", "count", "whole", "backend"),
    [
        ("exact", 1, False, "eager"),
        ("squat", 30, True, "aot_eager"),
        ("kivi-4 before RoPE, max_length", 1, True, "eager"),
        *(
            pytest.param(name, count, whole, backend, marks=pytest.mark.slow)
            for name in ("exact", "kivi-4 before RoPE", "squat", "inner-4, max_length")
            for count in (1, 30)
            for whole in (False, True)
            for backend in ("eager", "aot_eager")
        ),
    ],
)
def test_a_compiled_forward_of_dynamic_shapes_says_what_can_be_compiled(
    name: str, count: int, whole: bool, backend: str
) -> None:
    """And a step that can be is what it is without."""
    model, ids = fresh(num_hidden_layers=1), token_ids(1, PROMPT + 40, seed=2)
    cache, plain = CACHES[name](model), CACHES[name](model)
    compiled = torch.compile(model.forward, dynamic=True, fullgraph=whole, backend=backend)
    with torch.no_grad():
        for own in (cache, plain):
            model(ids[:, :PROMPT], past_key_values=own)
        step = ids[:, PROMPT : PROMPT + count]
        if "max_length" in name and count == 1:
            found, wanted = (f(step, past_key_values=own).logits for f, own in ((compiled, cache), (model, plain)))
            torch.testing.assert_close(found, wanted)
            return
        with pytest.raises(Exception, match=rf"only steps of up to 16 .*not {count} behind 100") as raised:
            compiled(step, past_key_values=cache)
        assert whole or isinstance(raised.value, KVCalError)
