"""A model spread over two GPUs, layer by layer: the tokens that one GPU gives, with every way in which steps attend.

Where one differs, the tests at the end say which part of it depends on the GPU that is the current one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcal_artifacts.cache.statistics.subspace import principal
from kvcal_artifacts.codecs import Context, Squat
from kvcal_artifacts.scheme import Scheme
from tests.artifacts.paths import test_codebook, test_dequantised, test_fused
from tests.artifacts.paths.test_fused import PAIRS
from tests.support import schemes
from tests.support.schemes import close_all, left_mask, numbers, opened, token_ids

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LAYERS = 4
BEFORE = "before RoPE: "
NAMES = [*PAIRS, *(f"{BEFORE}{name}" for name in ("inner-4", "kivi-4")), "vectors", "aqua", f"{BEFORE}aqua"]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_all()


def scheme(name: str) -> Scheme:
    frame: Any = "pre_rope" if name.startswith(BEFORE) else "post_rope"
    kind = name.removeprefix(BEFORE)
    if kind == "aqua":
        return test_dequantised.chained(frame, LAYERS)
    pair = test_codebook.PAIR if kind == "vectors" else PAIRS[kind]
    return test_fused.scheme(pair, LAYERS, frame)


def moved(given: Any, device: torch.device) -> Any:
    """Tensors of a call there; caches as they are."""
    if isinstance(given, Tensor):
        return given.to(device)
    if isinstance(given, tuple):
        return tuple(moved(one, device) for one in given)
    return {name: moved(one, device) for name, one in given.items()} if isinstance(given, dict) else given


def place(module: nn.Module, device: torch.device) -> None:
    """What a device_map does to a part of a model."""
    module.to(device)
    module.register_forward_pre_hook(
        lambda own, args, kwargs: (moved(args, device), moved(kwargs, device)), with_kwargs=True
    )


def spread(split: int, dtype: torch.dtype = torch.float16) -> Any:
    """A model with its first `split` layers on one GPU, the others and the head on another."""
    model = copy.deepcopy(test_fused.model(num_hidden_layers=LAYERS)).to(FIRST, dtype)
    if split < LAYERS:
        for part in (*model.model.layers[split:], model.model.norm, model.lm_head):
            place(part, SECOND)
    return model


@torch.no_grad()
def steps(name: str, split: int, **options: Any) -> tuple[Tensor, Tensor, list[str]]:
    """Logits of a prompt and of greedy steps beyond a flush, tokens, and how layers attend."""
    model = spread(split)
    cache = opened(scheme(name), model, **options)
    ids, logits, tokens = token_ids(2, 100, seed=1).to(FIRST), [], []
    for _ in range(40):
        out = model(ids, past_key_values=cache).logits[:, -1].float().cpu()
        logits.append(out)
        tokens.append(out.argmax(-1))
        ids = tokens[-1][:, None].to(FIRST)
    assert torch.cuda.current_device() == 0
    return torch.stack(logits), torch.stack(tokens), [row["path"] for row in cache.describe()["layers"]]


@pytest.mark.parametrize("longest", [None, 256], ids=["grows", "max_length"])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_on_two_gpus_gives_the_tokens_of_one(name: str, longest: int | None) -> None:
    (found, tokens, paths), (wanted, right, same) = (steps(name, split, max_length=longest) for split in (2, LAYERS))
    assert paths == same and all("Triton kernel" in path for path in paths), paths
    assert bool(found.isfinite().all())
    assert float((found - wanted).norm() / wanted.norm()) < torch.finfo(torch.float16).eps
    assert torch.equal(tokens, right)


@pytest.mark.parametrize("longest", [None, 256], ids=["grows", "max_length"])
@pytest.mark.parametrize("name", ["kivi-4", f"{BEFORE}kivi-4", "squat", "aqua"])
def test_generate_on_two_gpus(name: str, longest: int | None) -> None:
    """A padded batch; and with the cache in host memory between calls, where it may grow."""
    mask = left_mask([90, 61]).to(FIRST)
    ids = token_ids(2, 90, seed=5).to(FIRST).masked_fill(mask == 0, 0)
    found = []
    for split, more in ((2, {}), (LAYERS, {}), *([(2, {"offload": True})] if longest is None else [])):
        model = spread(split)
        cache = opened(scheme(name), model, max_length=longest, **more)
        given = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
        found.append(model.generate(ids, attention_mask=mask, past_key_values=cache, **given).cpu())
        cache.crop(-5)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.describe()
    assert all(torch.equal(one, found[1]) for one in found)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_wherever_the_model_is_cut(split: int) -> None:
    """Layers of AQUA-KV are predicted from those below, across the cut, too."""
    found, wanted = steps("aqua", split), steps("aqua", LAYERS)
    assert torch.equal(found[1], wanted[1])


# What may depend on the current GPU.


def test_eigenvectors_are_those_of_the_first_gpu() -> None:
    rows = numbers(3, 2, 200, 64).double()
    gram = rows.transpose(-1, -2) @ rows
    for _ in range(3):
        there, here = principal(gram.to(SECOND)), principal(gram.to(FIRST))
        for one, other in zip(there, here, strict=True):
            assert bool(one.isfinite().all())
            torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-9, atol=1e-9)


def test_corrections_of_squat_are_those_of_the_first_gpu() -> None:
    """By the kernel and by torch, of one subspace."""
    own = PAIRS["squat"].key
    assert isinstance(own, Squat)
    x, basis = numbers(2, 2, 64, 64, seed=3), numbers(2, 2, 1, own.rank, 64, seed=4)
    made = []
    for device in (SECOND, FIRST, torch.device("cpu")):
        context = Context(stats={own.statistic: basis.to(device)})
        kinds = [own.to(device)] if device.type == "cpu" else [own.to(device), own.to(device).by_kernel()]
        made += [kind.before_rounding(x.half().to(device), context).cpu() for kind in kinds]
    for one in made:
        assert bool(one.isfinite().all())
        assert torch.equal(one, made[-1])


@pytest.mark.parametrize("wants", ["squat", "mixkvq", "innerq-prefill"])
def test_run_time_statistics_are_those_of_the_first_gpu(wants: str) -> None:
    """Of the same queries and keys, as a layer shows them."""
    found = []
    for device in (SECOND, FIRST):
        model = copy.deepcopy(test_fused.model(num_hidden_layers=1)).to(device, torch.float16)
        cache = opened(schemes.Scheme(test_fused.WINDOWS, "post_rope", (PAIRS[wants],)), model)
        with torch.no_grad():
            model(token_ids(2, 100, seed=1).to(device), past_key_values=cache)
        found.append([t.cpu() for own in cache.compressed_layers[0].statistics.values() for t in own.state.values()])
    assert found[0] and all(bool(t.isfinite().all()) for t in found[0] if t.is_floating_point())
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)
