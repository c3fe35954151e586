"""SQuat: rounding against a direct constrained solve and against KIVI, query subspaces, and measure-subspaces."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcal.capture.scan import Capture
from kvcal.methods.squat import PAPER_MODELS, logit_squares, paper_settings
from kvcal.methods.squat import Squat as Method
from kvcal.models.catalogue import CATALOGUE
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.text import token_windows
from kvcal_artifacts import load_bundle, load_cache
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.cache.statistics import statistic
from kvcal_artifacts.cache.statistics.prefixes import Prefixes, due_tokens, refits
from kvcal_artifacts.cache.statistics.subspace import principal, subspace
from kvcal_artifacts.codecs import Context, Exact, Higgs, Shape, Squat, Uniform
from kvcal_artifacts.codecs.squat import exact_product, responses
from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.scheme import LayerCodecs, Scheme, Windows
from kvcal_artifacts.scheme.subspace import choose
from kvcal_artifacts.storage.ledger import Ledger
from kvcal_kernels import squat as squat_kernels
from tests.support.models_fixture import ROOT, SUFFIX, Done, kvcal, write_model, write_text

SHAPE = Shape(2, 32, 16)
KIVI = Uniform(SHAPE, "key", 2, 16, "token")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(rows: int, heads: int, tokens: int, dim: int, seed: int = 0) -> Tensor:
    """Queries in a few directions, as those of trained models."""
    mix = normal(heads, dim, dim, seed=seed + 50) * torch.logspace(0.6, -1.4, dim)[:, None]
    return normal(rows, heads, tokens, dim, seed=seed) @ mix / dim**0.5


def codec(strength: float = 1e-3, rank: int = 5, channels: int = 16, inner: Uniform = KIVI, **rest: Any) -> Squat:
    return Squat(inner, rank, strength, channels, **rest)


def context(own: Squat, basis: Tensor) -> Context:
    """basis (B, H, N or 1, R, D)."""
    return Context(3, stats={own.statistic: basis})


def loaded_script(name: str) -> ModuleType:
    """A script of docs/ablations."""
    spec = importlib.util.spec_from_file_location(f"ablation_{name}", ROOT / "docs" / "ablations" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def basis_of(q: Tensor, rank: int = 5) -> Tensor:
    """(B, H, 1, R, D) of queries (B, H, tokens, D)."""
    wide = q.double()
    return subspace(wide.mT @ wide, rank).float()[:, :, None]


# Rounding


@pytest.mark.parametrize("channels", [1, 5, 16, 32, 100])
def test_strength_zero_is_kivi_bit_for_bit(channels: int) -> None:
    x, own = normal(2, 2, 64, 32), codec(0.0, channels=channels)
    packed = own.encode(x, context(own, 30 * normal(2, 2, 4, 5, 32)))
    plain = KIVI.encode(x)
    assert packed.keys() == plain.keys()
    assert all(torch.equal(packed[name], plain[name]) for name in plain)


def test_a_calibrated_subspace_is_solved_once_for_all_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's own is solved for the row's cache; what a codec by the kernel has solved no codec elsewhere takes."""
    solved: list[int] = []

    def counted(basis: Tensor, steps: list[slice]) -> list[Tensor]:
        solved.append(len(steps))
        return responses(basis, steps)

    monkeypatch.setattr("kvcal_artifacts.codecs.squat.responses", counted)
    calibrated = codec(channels=16, subspace="calibrated", calibrated=normal(2, 5, 32))
    basis = next(calibrated._bases(Context(), 1))[1]
    twins = [calibrated.by_kernel() for _ in range(3)]
    assert all(twin.encodes_by_kernel for twin in twins) and not calibrated.encodes_by_kernel
    assert len({id(twin._moves(basis)) for twin in twins}) == 1 and solved == [1]
    own = codec(channels=16)
    for twin in (own.by_kernel(), own.by_kernel()):
        twin._moves(basis), twin._moves(basis.clone())
    assert solved == [1] * 3
    assert twin._memo is not None
    twin._memo = replace(twin._memo, basis=twin._memo.basis.to("meta"))  # of a trial on another device
    assert twin._moves(basis) is twin._moves(basis) and solved == [1] * 4
    moved = twins[0].to(torch.device("meta"))
    assert moved.encodes_by_kernel and moved._memo is None


@pytest.mark.parametrize("channels", [1, 5, 8, 16])
@pytest.mark.parametrize("strength", [1e-4, 1e-2, 1.0])
def test_update_is_the_minimum_of_lemma_2(channels: int, strength: float) -> None:
    """Eq. 5 by its Karush-Kuhn-Tucker system in float64: all channels are unknown, the fixed ones are constraints."""
    x, basis = normal(1, 2, 32, 32), 6 * normal(1, 2, 1, 5, 32, seed=1)
    own = codec(strength, channels=channels)
    final = own.corrected(x, context(own, basis)).double()
    rounded = own.decode(own.encode(x, context(own, basis))).double()
    m = torch.eye(32, dtype=torch.float64) + strength * (basis[:, :, 0].double().mT @ basis[:, :, 0].double())
    keys = x.double()
    for start in range(0, 32, channels):
        stop = min(start + channels, 32)
        torch.testing.assert_close(final[..., start:stop], keys[..., start:stop], atol=1e-5, rtol=0)
        fixed = torch.eye(32, dtype=torch.float64)[:stop]
        change = torch.zeros_like(keys)[..., :stop]
        change[..., start:stop] = rounded[..., start:stop] - keys[..., start:stop]
        zero = torch.zeros(stop, stop, dtype=torch.float64)
        system = torch.cat(
            [torch.cat([2 * m, fixed.T.expand(1, 2, -1, -1)], -1), torch.cat([fixed, zero], -1).expand(1, 2, -1, -1)],
            -2,
        )
        right = torch.cat([torch.zeros_like(keys), change], -1)
        keys = keys + torch.linalg.solve(system, right.mT)[:, :, :32].mT


def test_update_is_the_paper_s_recursion() -> None:
    """Lemma 2 and 3: B_t H_t with A_T^-1 = I + lambda Q'Q and A_t^-1 from A_{t+1}^-1."""
    basis, g, dim = 0.7 * normal(5, 32, seed=2).double(), 8, 32
    inverse = m = torch.eye(dim, dtype=torch.float64) + basis.T @ basis
    p_inv = torch.linalg.inv(m)
    steps = [slice(i, i + g) for i in range(0, dim - g, g)]
    made = responses(basis, steps)
    for step in reversed(range(len(steps))):
        size = (step + 1) * g
        corner, side = inverse[:size, :size], inverse[size:, :size]
        inverse = corner - side.T @ torch.linalg.inv(inverse[size:, size:]) @ side
        wanted = p_inv[size:, :size] @ inverse[:, -g:]
        torch.testing.assert_close(-made[step].T, wanted, atol=1e-10, rtol=0)


def test_the_recursion_in_float32_fails_at_large_strengths_where_the_codec_is_exact() -> None:
    """The paper's A_t^-1 and P_inv in float32, as the authors' code has them, against solves in float64. Queries with a
    large mean, as those of Qwen2.5: lambda times the largest squared singular value is 1e6 and more.
    """
    ablation = loaded_script("squat")
    q, x = normal(1, 2, 512, 32) + 60 * normal(1, 2, 1, 32, seed=4), normal(1, 2, 64, 32, seed=5)
    own = codec(0.1, channels=16)
    basis = basis_of(q)
    rooted = basis[:, :, 0].double() * own.strength**0.5
    exact = ablation.solved_responses(rooted, own._steps)
    torch.testing.assert_close(ablation.recursive_responses(rooted, own._steps, ridge=0.0), exact, atol=1e-4, rtol=0)
    torch.testing.assert_close(responses(rooted, own._steps), exact, atol=1e-8, rtol=0)
    recursion = ablation.recursive_responses(rooted.float(), own._steps)
    assert float((recursion[0] - exact[0]).abs().max() / exact[0].abs().max()) > 0.5

    made = {
        "recursion": ablation.corrected(own, x, recursion),
        "solve": ablation.corrected(own, x, exact),
        "codec": own.corrected(x, context(own, basis)),
    }
    errors = {name: float((q @ (KIVI.decode(KIVI.encode(k)) - x).mT).square().mean()) for name, k in made.items()}
    assert errors["codec"] == pytest.approx(errors["solve"], rel=1e-3)
    assert errors["recursion"] > 2 * errors["codec"]


def test_errors_stay_out_of_the_subspace() -> None:
    """At equal bits, on queries in few directions: lower logit errors than KIVI, for queries that came after it too."""
    q, x = correlated(1, 2, 600, 32), normal(1, 2, 320, 32, seed=5)
    own = codec(1e-2, channels=4)
    basis = basis_of(q[:, :, :300])
    errors = {"kivi": KIVI.decode(KIVI.encode(x)) - x, "squat": own.decode(own.encode(x, context(own, basis))) - x}
    logits = {name: float((q[:, :, 300:] @ e.mT).square().mean()) for name, e in errors.items()}
    print(logits)
    assert logits["squat"] < 0.5 * logits["kivi"]
    assert own.bits_per_value() == KIVI.bits_per_value()


@pytest.mark.parametrize("what", ["zero", "rank 1", "rank above D"])
def test_subspaces_that_are_degenerate(what: str) -> None:
    q = torch.zeros(1, 2, 40, 32) if what == "zero" else normal(1, 2, 40, 1) * normal(1, 2, 1, 32, seed=1)
    rank = 40 if what == "rank above D" else 5
    basis = basis_of(q if what != "rank above D" else normal(1, 2, 40, 32), rank)
    assert basis.shape == (1, 2, 1, rank, 32)
    assert int((basis.abs().amax(-1) > 0).sum()) == {"zero": 0, "rank 1": 2, "rank above D": 64}[what]
    x, own = normal(1, 2, 32, 32), codec(1.0, rank=rank)
    packed = own.encode(x, context(own, basis))
    made = own.decode(packed)
    assert bool(made.isfinite().all())
    if what == "zero":
        assert torch.equal(packed["codes"], KIVI.encode(x)["codes"])


def test_both_adds_two_terms() -> None:
    x, own, fixed = normal(1, 2, 32, 32), 5 * normal(1, 2, 1, 3, 32), 5 * normal(2, 2, 32, seed=1)
    both = codec(0.02, rank=3, subspace="both", calibrated=fixed)
    one = codec(0.02, rank=5)
    stacked = torch.cat([own, fixed[None, :, None]], 3)
    assert torch.equal(both.encode(x, context(both, own))["codes"], one.encode(x, context(one, stacked))["codes"])
    alone = both.choose("calibrated")
    assert (alone.stats, both.stats) == (frozenset(), {"query_subspace:3"})
    assert torch.equal(alone.encode(x)["codes"], one.encode(x, context(one, fixed[None, :, None]))["codes"])
    pre = codec(normalise="length", queries="pre_rope")
    assert pre.stats == {"query_subspace_pre:5:length"}


@settings(max_examples=40)
@given(st.integers(1, 70), st.integers(1, 5), st.integers(-12, 12), st.integers(0, 9))
def test_products_are_exact_sums_of_integers(inner: int, width: int, scale: int, seed: int) -> None:
    error = normal(1, 2, 3, 4, inner, seed=seed) * 10.0**scale
    weight = normal(1, 2, inner, width, seed=seed + 1).double()
    made = exact_product(error, weight)
    true = error.double() @ weight[:, :, None]
    size = error.abs().amax((-1, -2), True).double() * weight.abs().amax((-1, -2), True)[:, :, None]
    assert bool(((made - true).abs() <= inner * 2.0**-22 * size).all())
    order = torch.randperm(inner, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(exact_product(error[..., order], weight[:, :, order]), made)
    assert torch.equal(exact_product(error[:, :, 1:2, :], weight), made[:, :, 1:2])


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 40), st.floats(-44, 38), st.integers(1, 26), st.integers(0, 9))
def test_integers_have_the_unit_of_frexp(heads: int, width: int, scale: float, bits: int, seed: int) -> None:
    x = torch.randn(heads, 4, width, generator=torch.Generator().manual_seed(seed)).double() * 10.0**scale
    x = x.float().clamp(-3e38, 3e38)
    x[0] *= seed % 2  # all zeros in half of the examples
    whole, unit = squat_kernels.integers(x, bits)
    exponent = torch.frexp(x.abs().amax((-1, -2)).double()).exponent
    assert torch.equal(unit[:, 0, 0], torch.ldexp(torch.ones(heads, dtype=torch.float64), exponent.int() - bits))
    assert torch.equal(whole, (x.double() / unit).round())
    assert float(whole.abs().max()) <= 2**bits


def test_the_product_does_not_call_frexp() -> None:
    """torch 2.11's frexp on a GPU that is not the current one ends in an illegal memory access."""
    for folder in ("kvcal", "artifacts", "kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            assert "torch.frexp(" not in file.read_text(), file


def test_over_another_codec_along_tokens() -> None:
    """HIGGS of a channel's tokens, strength 0 and not: what each step rounds alone is what it is in the whole."""
    inner = Higgs(SHAPE, "key", axis="token")
    x, basis = normal(1, 2, 64, 32), 5 * normal(1, 2, 1, 5, 32)
    plain, own = (Squat(inner, strength=strength, channels=8) for strength in (0.0, 0.1))
    assert torch.equal(plain.encode(x, context(plain, basis))["codes"], inner.encode(x)["codes"])
    final = own.corrected(x, context(own, basis))
    packed = own.encode(x, context(own, basis))
    assert torch.equal(own.decode(packed), inner.decode(inner.encode(final)))
    blocks = SHAPE.blocks(final)
    rounded = own._rounded(blocks[..., 8:16])
    assert torch.equal(rounded, SHAPE.blocks(own.decode(packed))[..., 8:16])


@pytest.mark.parametrize(
    ("attempt", "says"),
    [
        (lambda: Squat(Uniform(SHAPE, "key", 2, 16)), "needs one whose groups run along tokens"),
        (lambda: Squat(Exact(SHAPE, "key", "float32")), "needs one whose groups run along tokens"),  # type: ignore[arg-type]
        (lambda: codec(rank=0), "rank 0: must be a whole number of at least 1"),
        (lambda: codec(channels=1.5), "channels 1.5"),  # type: ignore[arg-type]
        (lambda: codec(-1.0), "strength -1.0: must be"),
        (lambda: codec(float("inf")), "strength inf"),
        (lambda: codec(subspace="text"), "subspace 'text': allowed are prompt, calibrated, both"),
        (lambda: codec(normalise="rms"), "normalise 'rms': allowed are paper, length"),
        (lambda: codec(queries="mid"), "queries 'mid': allowed are post_rope, pre_rope"),
        (lambda: codec(subspace="both"), "no calibrated subspace is given"),
        (lambda: codec(calibrated=torch.zeros(2, 5, 16)), r"calibrated \(2, 5, 16\): must be \(2, R, 32\)"),
        (lambda: codec().encode(normal(1, 2, 16, 32), Context(7)), "layer 7: run-time statistic query_subspace:5 is"),
    ],
)
def test_settings_are_refused_in_one_line(attempt: Any, says: str) -> None:
    with pytest.raises(KVCalError, match=says) as raised:
        attempt()
    assert "\n" not in str(raised.value)


# Subspaces


def test_refits_whenever_the_tokens_have_doubled() -> None:
    windows = Windows(4, 128, 32)
    found = refits(windows, 10_000)
    due = [due_tokens(windows, number) for number in found]
    assert (found[0], due[0]) == (0, 164)
    for before, after in pairwise(due):
        assert 2 * before <= after < 2 * before + 32
    assert refits(windows, -1) == []
    assert refits(windows, found[3]) == found[:4]


def fed(q: Tensor, heads: int, rank: int, windows: Windows, name: str = "query_subspace") -> tuple[Tensor, Tensor]:
    """The statistic of each block and the Gram matrix in the end."""
    own = statistic(f"{name}:{rank}", Shape(heads, q.shape[3], windows.block))
    plan = Ledger(windows).begin(q.shape[0], q.shape[2], None)
    made = own.observe(q, Prefixes(plan, windows, q.device))
    assert made is not None
    return made, own.state["gram"]


def test_subspace_is_the_svd_of_the_queries_so_far() -> None:
    windows, q = Windows(2, 10, 8), correlated(2, 4, 90, 16)
    made, _ = fed(q, 2, 4, windows)
    assert made.shape == (2, 2, 9, 4, 16)
    for block in range(9):
        fitted = max(number for number in refits(windows, block) if number <= block)
        rows = q[:, :, : due_tokens(windows, fitted)].unflatten(1, (2, 2)).flatten(2, 3).double()
        _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
        wanted = (values[..., :, None] * vectors)[..., :4, :]
        sign = wanted.gather(-1, wanted.abs().argmax(-1, keepdim=True)).sign()
        torch.testing.assert_close(made[:, :, block].double(), wanted * sign, atol=0.02, rtol=2e-3)
    assert bool((made.gather(-1, made.abs().argmax(-1, keepdim=True)) > 0).all())


def test_gram_matrix_is_exact_for_the_largest_queries() -> None:
    """In Python's own integers; entries beyond the limit end there, a NaN is nothing."""
    q = normal(1, 2, 5000, 3) * 300
    q[0, 0, 7, 1], q[0, 1, 8, 2] = float("nan"), float("inf")
    _, gram = fed(q, 1, 2, Windows(0, 10, 8))
    whole = (q.nan_to_num(0, 1e9, -1e9).double() * 1024).round().clamp(-(2**18), 2**18).long().flatten(1, 2)[0].tolist()
    for i in range(3):
        for j in range(3):
            assert int(gram[0, 0, i, j]) == sum(row[i] * row[j] for row in whole)


def test_principal_directions() -> None:
    q = correlated(1, 2, 200, 8).double()
    values, rows = principal(q.mT @ q)
    torch.testing.assert_close(rows @ rows.mT, torch.eye(8, dtype=torch.float64).expand(1, 2, 8, 8))
    torch.testing.assert_close((rows.mT * values[..., None, :]) @ rows, q.mT @ q)
    assert bool((values.diff(dim=-1) <= 0).all())


# Logit errors


def test_logit_squares_against_all_scores() -> None:
    windows, q = Windows(2, 6, 4), normal(2, 2, 3, 40, 8)
    blocks = (40 - 8) // 4
    errors = [normal(2, 2, blocks * 4, 8, seed=seed) for seed in (1, 2)]
    totals, count = logit_squares(q, errors, windows)
    due = torch.tensor([due_tokens(windows, token // 4) for token in range(blocks * 4)])
    seen = torch.arange(40)[:, None] >= due
    for error, total in zip(errors, totals, strict=True):
        scores = q @ error[:, :, None].mT
        assert total == pytest.approx(float((scores.double().square() * seen).sum()), rel=1e-5)
    assert count == 2 * 2 * 3 * int(seen.sum())


# The method


LAYERS = 3
SMALL = ["--windows", "6", "--holdout", "2", "--length", "96", "--recent", "16", "--block", "8", "--group", "8"]


@dataclass(frozen=True)
class Given:
    folder: Path
    text: Path
    other: Path

    def run(self, output: Path, *options: object) -> Done:
        return kvcal("measure-subspaces", "--model", self.folder, "--text", self.text, *SMALL, "--output", output,
                     "--json", *options)  # fmt: skip


@pytest.fixture(scope="module")
def given_model(tmp_path_factory: pytest.TempPathFactory) -> Given:
    base = tmp_path_factory.mktemp("squat")
    other = base / "other.txt"
    other.write_text("".join(chr(33 + i * i % 90) for i in range(9000)))
    return Given(write_model(base / "small", LAYERS), write_text(base / "words.txt"), other)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / f"x{SUFFIX}"


def good(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    return dict(done.json)


@pytest.fixture(scope="module")
def usual(given_model: Given, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return good(given_model.run(tmp_path_factory.mktemp("usual") / f"usual{SUFFIX}", "--other-text", given_model.other))


def test_the_same_command_gives_the_same_bytes(given_model: Given, usual: dict[str, Any], output: Path) -> None:
    again = good(given_model.run(output, "--other-text", given_model.other))
    assert again["sha256"] == usual["sha256"]
    assert again["layers"] == usual["layers"]
    assert [entry.name for entry in output.parent.iterdir()] == [output.name]


def test_an_interrupted_run_goes_on(
    given_model: Given, usual: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Method.fit_layer

    def some(self: Method, layer: int, *args: Any) -> Any:
        if layer == 2:
            raise KeyboardInterrupt
        return whole(self, layer, *args)

    monkeypatch.setattr(Method, "fit_layer", some)
    assert given_model.run(output, "--other-text", given_model.other).code == 130
    monkeypatch.undo()
    again = good(given_model.run(output, "--other-text", given_model.other))
    assert (again["resumed_layers"], again["sha256"]) == (2, usual["sha256"])
    elsewhere = good(given_model.run(output))  # another text to compare with makes other metrics, not other codecs
    assert elsewhere["sha256"] != usual["sha256"]


def test_deviations(usual: dict[str, Any]) -> None:
    """They fall with the rank; a subspace of the very window is the best of its rank on it but for the mean of roots."""
    table = usual["deviation"]
    assert len(table["layers"]) == LAYERS
    assert set(table["mean"]) == {"window", "prompt", "same_text", "other_text"}
    for curves in [table["mean"], *table["layers"]]:
        for values in curves.values():
            assert all(a >= b for a, b in pairwise(values))
            assert all(0 <= v <= 1 for v in values)
    for source in ("prompt", "same_text", "other_text"):
        assert sum(table["mean"]["window"]) < sum(table["mean"][source])


@pytest.mark.parametrize("frame", ["post_rope", "pre_rope"])
@pytest.mark.parametrize("subspace", ["prompt", "calibrated", "both"])
def test_measured_errors_are_those_of_the_cache(given_model: Given, output: Path, frame: str, subspace: str) -> None:
    """Layer 0, whose keys depend on no cache: held-out windows fed whole, in a model with this bundle."""
    options = ["--frame", frame, "--subspace", subspace, "--strength", 0.05]
    found = good(given_model.run(output, *options))
    scheme = load_bundle(output).scheme
    model: Any = load_model(resolve(str(given_model.folder)), dtype="float32", device="cpu").model
    text = token_windows.token_windows(
        tokenizer(given_model), str(given_model.text), windows=6, holdout=2, length=96, seed=0
    )
    with KVCalCache(scheme, model) as cache, torch.no_grad():
        model(text.holdout, past_key_values=cache)
        made, values = cache.layers[0].decode_all()
        with Capture(model, text.holdout, device="cpu") as capture:
            for taps in capture:
                batch = next(taps.batches({"k", "v"}, frame))  # type: ignore[arg-type]
                break
    for role, x, decoded in (("key", batch.k, made), ("value", batch.v, values)):
        assert x is not None
        x = x[:, :, : decoded.shape[2]]
        error = float((decoded - x).square().sum() / x.square().sum())
        assert found["layers"][0][f"{role}_relative_error"] == pytest.approx(error, rel=1e-4)


def tokenizer(given_model: Given) -> Any:
    return load_model(resolve(str(given_model.folder)), dtype="float32", device="cpu").tokenizer


def test_a_bundle_generates(given_model: Given, usual: dict[str, Any]) -> None:
    done = kvcal("generate", "--model", given_model.folder, "--bundle", usual["bundle"], "--tokens", 8, "--json",
                 "--prompt", "the cat " * 20)  # fmt: skip
    assert good(done)["bits_per_value"] == pytest.approx(usual["bits_per_value"])


def test_search_takes_each_layer_s_best(given_model: Given, output: Path) -> None:
    found = good(given_model.run(output, "--search", "--subspace", "both"))
    assert len(found["search"]) == 25
    assert sum(point["layers"] for point in found["search"]) == LAYERS
    for layer in found["layers"]:
        tried = {name: value for name, value in layer.items() if name.startswith("search_")}
        assert layer["logit_error"] == min(tried.values()) == tried[f"search_r{layer['rank']}_l{layer['strength']:g}"]
    bundle = load_bundle(output)
    assert bundle.metrics["search_r5_l0.001"] == next(
        p["logit_error"] for p in found["search"] if (p["rank"], p["strength"]) == (5, 0.001)
    )
    chosen = [(pair.key.config()["rank"], pair.key.config()["strength"]) for pair in bundle.scheme.layers if pair]
    assert chosen == [(layer["rank"], layer["strength"]) for layer in found["layers"]]


def test_all_directions_and_another_choice_at_run_time(given_model: Given, output: Path) -> None:
    good(given_model.run(output, "--rank", 0, "--normalise", "length", "--channels", 1))
    bundle = load_bundle(output)
    key = bundle.scheme.layers[0].key if bundle.scheme.layers[0] else None
    assert isinstance(key, Squat)
    assert (key.rank, key.strength, key.channels) == (key.shape.dim, 1.0, 1)
    assert key.calibrated is not None and key.calibrated.shape[1] == key.shape.dim
    other = choose(bundle.scheme, "prompt")
    assert [pair.stats for pair in other.layers if pair] == [{f"query_subspace:{key.rank}:length"}] * LAYERS
    assert bundle.scheme.layers[0] is not None and not bundle.scheme.layers[0].stats
    model: Any = load_model(resolve(str(given_model.folder)), dtype="float32", device="cpu").model
    ids = torch.arange(60)[None]
    with KVCalCache(other, model) as made, KVCalCache(bundle.scheme, model) as usual, torch.no_grad():
        for cache in (made, usual):
            model(ids, past_key_values=cache)
        packed = [cache.layers[0].packed[0]["codes"] for cache in (made, usual)]
    assert not torch.equal(*packed)
    pair = LayerCodecs(KIVI, KIVI)
    with pytest.raises(KVCalError, match="there is no subspace to choose"):
        choose(Scheme(Windows(0, 16, 16), "post_rope", (pair,)), "both")


def test_the_commands_choose_at_run_time(given_model: Given, usual: dict[str, Any], output: Path) -> None:
    """A calibrated bundle run with the row's own subspace is the bundle that was made for it."""
    good(given_model.run(output, "--subspace", "prompt"))

    def divergence(bundle: object, *options: object) -> float:
        where = ["--model", given_model.folder, "--text", given_model.text, "--windows", 1, "--length", 160]
        return float(good(kvcal("eval", *where, "--bundle", bundle, "--json", *options))["rows"][1]["kl"])

    chosen = divergence(usual["bundle"], "--subspace", "prompt")
    assert chosen == divergence(output) != divergence(usual["bundle"])
    model = load_model(resolve(str(given_model.folder)), dtype="float32", device="cpu").model
    with load_cache(usual["bundle"], model, subspace="both") as cache:
        keys = [pair.key for pair in cache.scheme.layers if pair]
        assert [key.subspace for key in keys if isinstance(key, Squat)] == ["both"] * LAYERS
    generate = ["generate", "--model", given_model.folder, "--prompt", "a", "--tokens", 1, "--subspace", "both"]
    assert "no bundle given stores keys by squat" in kvcal(*generate, "--preset", "kivi-2").complaint
    assert "allowed are" in kvcal(*generate[:-1], "none", "--bundle", usual["bundle"]).complaint


def test_strength_zero_measures_kivi(given_model: Given, output: Path) -> None:
    found = good(given_model.run(output, "--strength", 0))
    assert found["logit_error"] == found["logit_error_kivi"]


def test_plot(given_model: Given, output: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = output.parent / "deviation.png"
    found = good(given_model.run(output, "--plot", picture))
    assert found["plot"] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tables_for_people(given_model: Given, output: Path) -> None:
    done = kvcal("measure-subspaces", "--model", given_model.folder, "--text", given_model.text, *SMALL, "-o", output,
                 "--search")  # fmt: skip
    assert done.code == 0
    for words in ("deviation of queries", "its prompt", "same text", "logit error", "strength"):
        assert words in done.out


def test_paper_settings() -> None:
    """Appendix D.2."""
    assert paper_settings("lm-eval", "anything", "post_rope") == (5, 1e-3, 64)
    assert paper_settings("longbench", "llama-2-7b", "post_rope") == (40, 1e-3, 64)
    assert paper_settings("math-500", "r1-distill-llama-8b", "pre_rope") == (40, 5e-4, 64)
    assert {name for _, name, _ in PAPER_MODELS} <= set(CATALOGUE)
    for task, model in (("longbench", "tiny"), ("math-500", "llama-2-7b"), ("gsm8k", "tiny")):
        with pytest.raises(UsageError, match=r"the paper has it for|allowed are"):
            paper_settings(task, model, "post_rope")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--subspace", "text"], "--subspace text: allowed are prompt, calibrated, both"),
        (["--frame", "mid_rope"], "--frame mid_rope: allowed are pre_rope, post_rope"),
        (["--queries", "mid_rope"], "--queries mid_rope: allowed are"),
        (["--normalise", "rms"], "--normalise rms: allowed are paper, length"),
        (["--settings", "gsm8k"], "--settings gsm8k: allowed are lm-eval"),
        (["--settings", "longbench"], "the paper has it for llama-2-7b"),
        (["--strength", "inf"], "strength inf: needs"),
        (["--search", "--rank", "4"], "--search tries ranks and strengths of its own"),
        (["--rank", "17"], "--rank 17: keys have 16 channels a head; give at most 16"),
        (["--channels", "17"], "--channels 17: keys have 16 channels a head"),
        (["--spill", "tape"], "--spill tape: allowed"),
        (["--plot", "x.gif"], "must end in .png"),
        (["--prompt-tokens", "96"], "--prompt-tokens 96: windows have 96 tokens"),
        (["--group", "7"], "--group 7: must divide the block of 8"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_make_no_sense(given_model: Given, output: Path, options: list[str], says: str) -> None:
    if "--plot" in options:
        pytest.importorskip("matplotlib")
    ended = given_model.run(output, *options)
    assert ended.code in (1, 2)
    assert says in ended.complaint
    assert not output.exists()


def test_windows_too_short_to_pack(given_model: Given, output: Path) -> None:
    short = ["--length", "20"]
    found = good(given_model.run(output, *short))
    assert found["logit_error"] is None
    ended = given_model.run(output, *short, "--search")
    assert (ended.code, "windows of 20 tokens pack nothing" in ended.complaint) == (2, True)


def test_scheme_is_the_method_s(usual: dict[str, Any]) -> None:
    scheme: Scheme = load_bundle(usual["bundle"]).scheme
    assert (scheme.windows, scheme.frame) == (Windows(0, 16, 8), "post_rope")
    assert usual["bits_per_value"] == 2 + 32 / 8
    assert json.dumps(scheme.config())
