"""Decode steps over residual vector codes: against the reference path, in every way a cache is used."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import ResidualVQ, Shape
from kvcal_artifacts.paths import choose, codebook
from kvcal_artifacts.paths.preflight import (
    trials,  # noqa: F401, of scripts below
    verdicts,
)
from kvcal_artifacts.scheme import LayerCodecs, Scheme
from kvcal_kernels.attention import reference as plain
from kvcal_kernels.residual_vq.attention import attend_exact
from tests.artifacts.paths.test_fused import HALVES, WINDOWS, Card, close, generated, model, on_a_gpu, steps, uniform
from tests.support.interpreted import interpreted, needs_triton
from tests.support.schemes import close_all, left_mask, numbers, opened, token_ids

SHAPE = Shape(2, 64, 32)


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    close_all()


def codes(
    role: Any, widths: tuple[int, ...] = (40, 24), size: int = 64, seed: int = 0, shape: Shape = SHAPE
) -> ResidualVQ:
    """Bands of so many dimensions each, three stages."""
    edges = [0, *(sum(widths[: i + 1]) for i in range(len(widths)))]
    bands = [list(range(*edge)) for edge in itertools.pairwise(edges)]
    falling = 0.6 ** torch.arange(3)[:, None, None]
    books = [(numbers(3, size, len(band), seed=seed + i) * falling).half() for i, band in enumerate(bands)]
    scale = (numbers(2, 64, seed=seed).abs() + 0.5).half() if role == "key" else None
    return ResidualVQ(shape, role, bands, books, scale)


PAIR = LayerCodecs(codes("key"), codes("value", (64,), seed=7))


def scheme(pair: LayerCodecs = PAIR, frame: Any = "post_rope") -> Scheme:
    return Scheme(WINDOWS, frame, (pair,) * 3)


def both(**options: Any) -> tuple[KVCalCache, KVCalCache]:
    return opened(scheme(), model(), kernels="torch", **options), opened(scheme(), model(), kernels="off", **options)


def test_logits_are_those_of_the_reference_path(calls: list[int]) -> None:
    caches = both()
    close(steps(caches, token_ids(2, 140, seed=1), [80, *range(81, 105), 120, 137]))
    assert calls == [q for q in [*[1] * 24, 16, 3] for _ in range(3)]


def test_left_padding_and_rows_that_pack_nothing(calls: list[int]) -> None:
    mask = torch.cat([left_mask([120, 90, 40, 3]), torch.ones(4, 40, dtype=torch.long)], 1)
    caches = both()
    close(steps(caches, token_ids(4, 160, seed=2), [120, *range(121, 150), 155], mask))
    assert calls and caches[0].ledger.blocks.tolist() == [3, 2, 1, 0]


def test_generate_crop_and_copies(calls: list[int]) -> None:
    ids = token_ids(1, 30, seed=4).repeat(1, 3)
    for options in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 5}):
        found = [generated(own, ids, **options) for own in both()]
        assert found[0] == found[1]
    caches = both()
    steps(caches, ids, [80, 81])
    twins = copy.deepcopy(caches[0]), copy.deepcopy(caches[1])
    for own in (*caches, *twins):
        own.crop(-7)
    close(steps(caches, token_ids(1, 2), [1]))
    close(steps(twins, token_ids(1, 3), [1]))
    for twin in twins:
        twin.close()


def test_the_exact_part_is_attention_to_the_windows() -> None:
    """Of rows without packed blocks it is all there is; what unused room holds does not show."""
    q = numbers(3, 4, 2, 64, seed=1)
    sink = numbers(3, 2, 5, 64, seed=2), numbers(3, 2, 5, 64, seed=3), torch.tensor([4, 1, 0], dtype=torch.int32)
    recent = numbers(3, 2, 9, 64, seed=4), numbers(3, 2, 9, 64, seed=5), torch.tensor([7, 2, 9], dtype=torch.int32)
    for part in (*sink[:2], *recent[:2]):
        for row, count in enumerate((sink if part.shape[2] == 5 else recent)[2].tolist()):
            part[row, :, count:] = torch.nan
    key, value = (
        one.as_blocks(one.encode(torch.zeros(3, 2, 32, 64))) for one in (uniform("key", 4), uniform("value", 4))
    )
    none = torch.zeros(3, dtype=torch.int32)
    wanted = plain.attend(q, key, value, none, sink, recent, 0.125)
    out, total = attend_exact(q, sink, recent, 0.125)
    assert torch.allclose(out, wanted, atol=1e-6) and bool(torch.isfinite(total).all())


def test_layers_say_why_their_codes_are_decoded() -> None:
    def path(pair: LayerCodecs, kernels: str = "torch", frame: Any = "post_rope") -> str:
        found: str = opened(scheme(pair, frame), model(), kernels=kernels).describe()["layers"][0]["path"]
        return found

    assert path(PAIR).startswith("fused: the kernel's reference")
    assert "the layer is on cpu" in path(PAIR, "auto")
    assert "before RoPE" in path(PAIR, frame="pre_rope")
    assert "keys: residual-vq in 3 bands" in path(LayerCodecs(codes("key", (16, 16, 32)), PAIR.value))
    assert "values: residual-vq, a band of 8 dimensions" in path(LayerCodecs(PAIR.key, codes("value", (56, 8))))
    assert "keys: no fused kernel reads residual-vq" in path(LayerCodecs(PAIR.key, uniform("value", 4)))
    assert opened(scheme(), model(), kernels="torch", max_length=200).describe()["compileable"] is True


@pytest.mark.parametrize(
    ("found", "said"),
    [("triton", "Triton kernels of the codecs of keys and values"), ("reference", "torch: vector codes")],
)
def test_describe_says_what_looks_for_codewords(monkeypatch: pytest.MonkeyPatch, found: str, said: str) -> None:
    """On a GPU the nearest codewords are a kernel's; where it is looked up nothing runs."""
    cache = opened(scheme(), model(), kernels="torch")
    model()(token_ids(1, 80), past_key_values=cache)
    monkeypatch.setattr("kvcal_artifacts.codecs.residual_vq.backend", lambda x, book: found)
    assert {row["packing"] for row in cache.describe()["layers"]} == {said}


def test_large_codebooks_are_attended_to_from_where_that_is_faster(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert codebook.least_tokens(PAIR) == 0
    large = LayerCodecs(codes("key", size=8192), PAIR.value)
    assert codebook.least_tokens(large) == 600
    monkeypatch.setattr(codebook, "CODEWORDS", 32)
    monkeypatch.setattr(codebook, "TOKENS", 63)
    caches = both()
    close(steps(caches, token_ids(1, 104), [80, 81, *range(99, 104)]))
    assert calls == [1] * 12  # behind 100 tokens, 64 of them packed


def test_as_many_new_tokens_as_the_kernels_take() -> None:
    assert [codebook.most_queries(ratio) for ratio in (1, 4, 5, 16)] == [16, 16, 12, 4]


def test_kernels_that_fail_their_check_are_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card = Card(monkeypatch, tmp_path)
    monkeypatch.setattr(verdicts, "_TRIED", {})
    monkeypatch.setattr(verdicts, "codebook_trial", card._trial)
    place = 2, torch.float16, torch.device("cuda", 0)
    assert [choose.absence("auto", PAIR, *place) for _ in range(2)] == [None, None] and len(card.tried) == 1
    card.says = "1 new tokens: off by 0.3"
    with pytest.warns(
        UserWarning, match="does not pass on Card 1: 1 new tokens: off by 0.3; packed blocks are decoded"
    ):
        assert "off by 0.3" in str(choose.absence("auto", LayerCodecs(codes("key", size=128), PAIR.value), *place))


@pytest.mark.gpu
@HALVES
def test_logits_on_a_gpu(dtype: torch.dtype) -> None:
    on_a_gpu(scheme(), dtype, "fused: Triton kernel", require_kernels=True)


INTERPRETED = """
import torch
from tests.artifacts.paths import test_codebook as t
from kvcal_artifacts.paths.preflight import codebook_trials
own = t.model(num_hidden_layers=1).half()
made = t.Scheme(t.WINDOWS, "post_rope", (t.PAIR,))
caches = t.opened(made, own, kernels="triton"), t.opened(made, own, kernels="off")
mask = t.left_mask([75, 72])
print(max(float(x) for x in t.steps(caches, t.token_ids(2, 75)[:, :74], [72, 73], mask[:, :74])))
print(caches[0].describe()["layers"][0]["path"])
codebook_trials.BLOCKS, codebook_trials.VECTOR_CALLS = (1, 0), (2,)
place = 2, torch.float16, torch.device("cpu")
print(codebook_trials.codebook_trial(t.PAIR.key, t.PAIR.value, *place))
own = codebook_trials.residual_vq.attention.attend
codebook_trials.residual_vq.attention.attend = lambda q, *rest: (own(q, *rest)[0], own(q, *rest)[1] + 0.1)
print(codebook_trials.codebook_trial(t.PAIR.key, t.PAIR.value, *place))
"""


@needs_triton
def test_logits_of_the_triton_kernels_in_the_interpreter() -> None:
    lines = interpreted("-c", INTERPRETED)
    assert float(lines[0]) < 2e-3 and lines[1] == "fused: Triton kernel", lines  # of float16
    assert lines[2] == "None" and lines[3].startswith("2 new tokens: sums differ"), lines
