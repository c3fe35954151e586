"""MixKVQ: tiers by hand, thresholds searched, the same bytes twice and after a kill, and by several workers."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcal.capture.scan import TapBatch
from kvcal.methods.attention import probe
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.search.study_storage import Storage, this_worker
from kvcal.search.thresholds import choose
from kvcal.search.two_objectives import Point, SearchResult, front_of, search, suggest
from kvcal_artifacts import hf, load_bundle, load_cache
from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import Context, MixKVQ, Shape
from kvcal_artifacts.codecs.ragged import Ragged
from kvcal_artifacts.errors import KVCalError
from tests.support import schemes
from tests.support.models_fixture import (
    SMALL,
    SUFFIX,
    finished,
    killed_when,
    kvcal,
    started,
    wait_until,
    write_model,
    write_text,
)

SHAPE = Shape(2, 16, 16)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def keys(batch: int = 2, blocks: int = 3) -> Tensor:
    """Some channels wide, some narrow, some constant."""
    x = normal(batch, SHAPE.heads, blocks * SHAPE.block, SHAPE.dim) * torch.logspace(-1.5, 1.5, SHAPE.dim)
    x[..., 3] = 0.25
    return x


def context(batch: int = 2, blocks: int = 3) -> Context:
    return Context(5, stats={"query_abs": normal(batch, SHAPE.heads, blocks, SHAPE.dim, seed=1).abs()})


def counts(codec: MixKVQ, x: Tensor, seen: Context) -> list[Tensor]:
    packed = codec.encode(x, seen)
    return [packed[name].counts.long() for name in ("raw", "four_codes", "two_codes")]


def test_paper_loop_by_loop() -> None:
    """Equations 2, 3, 6, 7 and 8 in float64, one channel at a time."""
    codec = MixKVQ(SHAPE, "key", tau_low=1.0, tau_high=6.0, group=8, round_up=1, dtype="float32")
    x, seen = keys(), context()
    packed, query = codec.encode(x, seen), seen.stats["query_abs"].double()
    made, tier_of = codec.decode(packed, seen), torch.zeros(2, 2, 3, 16, dtype=torch.long)
    for b in range(2):
        for n in range(3):
            block = x[b, :, n * 16 : n * 16 + 16].double()
            salience = query[b, :, n] * (block.amax(1) - block.amin(1)) / 3
            unit = sorted(a for a in salience.flatten().tolist() if a > 0)
            median = unit[(len(unit) - 1) // 2]
            for h in range(2):
                for c in range(16):
                    bits = 16 if salience[h, c] > 6 * median else 4 if salience[h, c] > median else 2
                    tier_of[b, h, n, c] = (16, 4, 2).index(bits)
                    for g in range(2):
                        tokens = slice(n * 16 + 8 * g, n * 16 + 8 * g + 8)
                        values = x[b, h, tokens, c].double()
                        if bits < 16:
                            scale = ((values.amax() - values.amin()) / (2**bits - 1)).half().double()
                            zero = values.amin().half().double()
                            codes = ((values - zero) / scale.clamp_min(2.0**-24)).round().clamp(0, 2**bits - 1)
                            values = codes * scale + zero
                        torch.testing.assert_close(made[b, h, tokens, c].double(), values, rtol=2e-3, atol=2e-3)
    got = [packed[name].counts.long() for name in ("raw", "four_codes", "two_codes")]
    assert all(torch.equal(got[tier], (tier_of == tier).sum(-1)) for tier in range(3))
    assert all(int(g.sum()) for g in got), "every tier takes part"


def test_counts_round_up_to_the_better_tier() -> None:
    x, seen = keys(), context()
    fine = counts(MixKVQ(SHAPE, "key", 1.0, 6.0, group=8, round_up=1), x, seen)
    coarse = counts(MixKVQ(SHAPE, "key", 1.0, 6.0, group=8), x, seen)
    assert torch.equal(coarse[0], (fine[0] + 7) // 8 * 8)
    assert torch.equal(coarse[0] + coarse[1], torch.maximum(coarse[0], (fine[0] + fine[1] + 7) // 8 * 8))
    assert {int(n) % 8 for tier in coarse for n in tier.flatten()} == {0}


def test_a_channel_that_no_query_reads_gets_two_bits() -> None:
    """The paper's point: error-only selection spends its bits on the widest channel, whoever asks for it."""
    x, seen = keys(1, 1), context(1, 1)
    seen.stats["query_abs"][..., 15] = 0
    asked = MixKVQ(SHAPE, "key", 1.0, 6.0, group=8, round_up=1).encode(x, seen)
    blind = MixKVQ(SHAPE, "key", 1.0, 6.0, group=8, round_up=1, importance="none").encode(x)
    for packed, exact in ((asked, False), (blind, True)):
        first = packed["raw"].counts[0, :, 0]
        kept = [packed["perm"][0, h, 0, : int(first[h])].tolist() for h in range(2)]
        assert all((15 in channels) is exact for channels in kept)


def test_thresholds_are_of_the_layers_median() -> None:
    """Eight times larger queries change nothing; the raw form does not forgive it."""
    x, seen = keys(), context()
    larger = Context(5, stats={"query_abs": 8 * seen.stats["query_abs"]})
    codec, raw = (MixKVQ(SHAPE, "key", 1.0, 6.0, 8, 1, normalise=form) for form in ("median", "none"))
    assert torch.equal(codec.encode(x, seen)["perm"], codec.encode(x, larger)["perm"])
    assert torch.equal(torch.stack(counts(codec, x, seen)), torch.stack(counts(codec, x, larger)))
    assert int(counts(raw, x, larger)[0].sum()) > int(counts(raw, x, seen)[0].sum())
    one_head = x.clone()
    one_head[:, 1] *= 1e-4  # of the layer, not of the head: a quiet head takes fewer bits
    assert int(counts(codec, one_head, seen)[0][:, 1].sum()) == 0


def test_a_layer_of_constant_channels() -> None:
    x = torch.full((1, 2, 16, 16), 0.5)
    codec = MixKVQ(SHAPE, "key", 0.5, 6.0, group=8)
    assert [int(n.sum()) for n in counts(codec, x, context(1, 1))] == [0, 0, 32]
    x[..., 2] += normal(1, 2, 16)  # one that moves: the median of the positive ones is its own
    assert [int(n.sum()) for n in counts(codec, x, context(1, 1))] == [0, 16, 16]


def test_a_fixed_shape_goes_by_rank() -> None:
    codec = MixKVQ(SHAPE, "key", group=8, full=8, four=0, dtype="bfloat16")
    x, seen = keys(), context()
    packed, salience = codec.encode(x, seen), codec.salience(x, seen)
    assert not any(isinstance(held, Ragged) for held in packed.values())
    assert packed["raw"].shape == (2, 2, 3, 8, 16) and packed["raw"].dtype == torch.bfloat16
    best = salience.topk(8, -1).indices.sort(-1).values
    assert torch.equal(packed["perm"][..., :8].long(), best)
    assert codec.bits_per_value() == pytest.approx((8 * 16 + 8 * (2 + 32 / 8)) / 16 + 8 / 16)
    assert codec.block_bytes() * 2 * 3 == sum(t.numel() * t.element_size() for t in packed.values())


def test_a_head_of_256_channels() -> None:
    shape = Shape(1, 256, 8)
    codec = MixKVQ(shape, "key", 0.0, 0.0, group=8, dtype="float32")
    x = normal(1, 1, 16, 256)
    packed = codec.encode(x, Context(stats={"query_abs": torch.ones(1, 1, 2, 256)}))
    assert packed["raw"].counts.tolist() == [[[256, 256]]]
    assert torch.equal(codec.decode(packed), x)


def test_without_queries_it_says_so() -> None:
    with pytest.raises(
        KVCalError, match=r"layer 5: mixkvq needs the run-time statistic query_abs .*importance \"none\""
    ) as e:
        MixKVQ(SHAPE, "key", group=8).encode(keys(), Context(5))
    assert "\n" not in str(e.value)


def test_expected_bits_are_those_of_the_blocks_it_saw() -> None:
    x, seen = keys(), context()
    codec = MixKVQ(SHAPE, "key", 1.0, 6.0, group=8)
    first, second, _ = (n.double().mean().item() for n in counts(codec, x, seen))
    told = MixKVQ(SHAPE, "key", 1.0, 6.0, group=8, expected=(first, second))
    packed = told.encode(x, seen)
    stored = sum(t.numel() * t.element_size() for held in packed.values() for t in
                 ([held.data, held.counts] if isinstance(held, Ragged) else [held]))  # fmt: skip
    assert told.ragged and told.bits_per_value() == pytest.approx(stored * 8 / x.numel(), rel=2e-3)
    assert codec.bits_per_value() < told.bits_per_value()  # uncalibrated: two bits for all


# What a trial is judged by.


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query of each head: q (heads, D), k and v (kv heads, T, D) -> (heads, D)."""
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    return torch.einsum("ht,htd->hd", (torch.einsum("hd,htd->ht", q, k) / k.shape[-1] ** 0.5).softmax(-1), v)


def test_a_probe_sees_what_a_cache_gives_back_token_by_token() -> None:
    fed, rows, found = schemes.Fed(), schemes.Rows([75]), schemes.mixkvq()
    keys, values = rows.keys[0][:1], rows.values[0][:1]
    query = torch.stack([keys.flip(-1), 3 * keys.roll(5, -1)], 2).flatten(1, 2)
    turn = fed.rotary_emb(keys, position_ids=torch.arange(75)[None])
    query, turned = (schemes.apply_rotary_pos_emb(x, x, *turn)[0] for x in (query, keys))
    pair = found.layers[0]
    assert pair is not None
    site = hf.attention_site(fed, 0)
    seen = probe(TapBatch(slice(0, 1), query, turned, values), 0, site, pair.key.shape, schemes.WINDOWS, pair.stats)
    made = seen.outputs(seen.decoded(pair.key), seen.decoded(pair.value))
    exact = seen.outputs()
    with KVCalCache(found, fed) as cache:
        for t in range(75):
            k, v = schemes.feed(cache, rows, torch.ones(1, t + 1, dtype=torch.bool))[0]
            if t in seen.at.tolist():
                at = seen.at.tolist().index(t)
                torch.testing.assert_close(made[0, :, :, at].flatten(0, 1), attention(query[0, :, t], k[0], v[0]))
                true = attention(query[0, :, t], turned[0, :, : t + 1], values[0, :, : t + 1])
                torch.testing.assert_close(exact[0, :, :, at].flatten(0, 1), true)
    assert not torch.allclose(made, exact, atol=1e-2)


# The search.

SPACE = {"a": (0.5, 8.0), "b": (1.0, 32.0)}


def bowl(p: dict[str, float]) -> tuple[float, float]:
    return (p["a"] - 2) ** 2 + 0.1 * p["b"], p["a"] + p["b"]


def found_in(
    folder: Path, trials: int = 12, evaluate: Any = bowl, maximise: bool = False, **storage: Any
) -> SearchResult:
    where = Storage("study", folder, **storage)
    return search(evaluate, SPACE, trials=trials, seed=3, maximise=maximise, storage=where)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    return found_in(tmp_path_factory.mktemp("search") / "s")


def test_points_follow_from_those_before(reference: SearchResult) -> None:
    points = reference.points
    assert len(points) == 12 and reference.in_order
    for number in (0, 9, 11):
        assert suggest(points[:number], SPACE, 3, number, maximise=False) == points[number].parameters
    assert suggest(points[:11], SPACE, 4, 11, maximise=False) != points[11].parameters
    assert suggest(points[:11], SPACE, 3, 11, maximise=True) != points[11].parameters
    assert all(low <= p.parameters[name] <= high for p in points for name, (low, high) in SPACE.items())


@pytest.mark.parametrize("broken", [1, 8])
def test_an_interrupted_search_gives_the_same_points(reference: SearchResult, broken: int, tmp_path: Path) -> None:
    calls = 0

    def breaks(p: dict[str, float]) -> tuple[float, float]:
        nonlocal calls
        calls += 1
        if calls == broken:
            raise KeyboardInterrupt
        return bowl(p)

    with pytest.raises(KeyboardInterrupt):
        found_in(tmp_path / "s", evaluate=breaks)
    assert found_in(tmp_path / "s") == reference
    assert found_in(tmp_path / "s", trials=13).points[:12] == reference.points
    assert found_in(tmp_path / "s", trials=5).points == reference.points[:5]


def test_a_folder_with_odd_characters(tmp_path: Path) -> None:
    folder = tmp_path / "a b%20?c#d&e"
    assert len(found_in(folder, trials=1).points) == 1
    assert (folder / "study.db").exists()


def test_two_searches_in_one_folder_are_refused(tmp_path: Path) -> None:
    def second(p: dict[str, float]) -> tuple[float, float]:
        found_in(tmp_path / "s")
        return bowl(p)

    with pytest.raises(KVCalError, match="another process is at this search"):
        found_in(tmp_path / "s", evaluate=second)


def left_running(url: str, worker: str | None) -> int:
    """A trial of somebody who is gone: parameters known, no values."""
    import optuna

    study = optuna.create_study(
        storage=url, study_name="study", directions=["minimize", "minimize"], load_if_exists=True
    )
    trial = study.ask()
    if worker is not None:
        for name, (low, high) in SPACE.items():
            trial.suggest_float(name, low, high, log=True)
        trial.set_user_attr("worker", worker)
    return trial.number


def states(url: str) -> dict[str, list[Any]]:
    import optuna

    found: dict[str, list[Any]] = {}
    for trial in optuna.load_study(study_name="study", storage=url).trials:
        found.setdefault(trial.state.name, []).append(trial)
    return found


@pytest.mark.parametrize("worker", ["here", "elsewhere", None])
def test_trials_of_the_dead_are_run_again(worker: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this machine: at once, by their process. Of others: by Optuna's heartbeat, which here has none to find and
    says nothing, so it takes the worker's silence. Without a name: when it has been silent for long enough.
    """
    monkeypatch.setattr("kvcal.search.study_storage.GRACE", 1)
    url = f"sqlite:///{tmp_path}/s.db"
    machine = this_worker().split(" ")[0]
    name = {"here": f"{machine} {2**22 - 1} 1", "elsewhere": None, None: None}[worker]
    number = left_running(url, name)
    if worker == "elsewhere":
        import optuna

        storage = optuna.storages.RDBStorage(url, heartbeat_interval=1, grace_period=1)
        storage.record_heartbeat(optuna.load_study(study_name="study", storage=storage).trials[number]._trial_id)
    found = found_in(tmp_path / "unused", trials=2, url=url, heartbeat=1)
    after = states(url)
    assert len(found.points) == len(after["COMPLETE"]) == 2
    assert [trial.number for trial in after["FAIL"]] == [number]
    if worker == "here":
        again = [trial for trial in after["COMPLETE"] if trial.user_attrs.get("again") == number]
        assert [trial.params for trial in again] == [after["FAIL"][0].params]
        assert not found.in_order


def test_a_worker_taken_for_dead_is_not_counted(tmp_path: Path) -> None:
    """It was only slow: somebody else has done its trial, and its own result comes too late."""
    url, calls = f"sqlite:///{tmp_path}/s.db", 0

    def slow(p: dict[str, float]) -> tuple[float, float]:
        nonlocal calls
        calls += 1
        if calls == 1:
            study = optuna.load_study(study_name="study", storage=url)
            study._storage.set_trial_state_values(study.trials[0]._trial_id, optuna.trial.TrialState.FAIL)
        return bowl(p)

    import optuna

    found = found_in(tmp_path / "unused", trials=3, evaluate=slow, url=url)
    assert (calls, len(found.points), len(states(url)["COMPLETE"])) == (4, 3, 3)


@pytest.mark.parametrize("url", ["sqlite:////no/such/folder/x.db", "redis://me:secret@x/1", "rubbish"])
def test_a_storage_that_cannot_be_used_is_one_line(url: str, tmp_path: Path) -> None:
    with pytest.raises(KVCalError, match=r"--storage .*: cannot be used") as raised:
        found_in(tmp_path, url=url)
    assert "\n" not in str(raised.value) and "secret" not in str(raised.value)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12), st.booleans())
def test_the_front_is_what_nothing_beats(pairs: list[tuple[int, int]], maximise: bool) -> None:
    sign = -1 if maximise else 1
    points = [Point({}, float(sign * quality), float(cost)) for quality, cost in pairs]
    beaten = {
        i for i, (q, c) in enumerate(pairs)
        if any(a <= q and b <= c and (a, b) != (q, c) for a, b in pairs)
    }  # fmt: skip
    front = front_of(points, maximise)
    assert {pairs[i] for i in front} == {pair for i, pair in enumerate(pairs) if i not in beaten}
    assert [pairs[i][1] for i in front] == sorted({pairs[i][1] for i in front})
    limit = max(pairs[i][1] for i in front)
    assert choose(points, front, limit) == front[-1]
    with pytest.raises(KVCalError, match=r"none of .* trials stays under --max-bits -1"):
        choose(points, front, -1)


# The command.


@pytest.fixture(scope="module")
def given_options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    base = tmp_path_factory.mktemp("tune")
    model, text = write_model(base / "small"), write_text(base / "words.txt")
    return ["--model", str(model), "--text", str(text), *SMALL, "--group", "8", "--objective", "attention"]


def tuned(options: list[str], output: Path, *more: object) -> dict[str, Any]:
    return good("tune-thresholds", *options, "--max-bits", 6, "--trials", 12, "--output", output, "--json", *more)


def untuned(options: list[str], output: Path, *more: object) -> dict[str, Any]:
    """With nothing to search: what says how would be refused."""
    return good("tune-thresholds", *options[: options.index("--objective")], "--output", output, "--json", *more)


def good(*arguments: object) -> dict[str, Any]:
    done = kvcal(*arguments)
    assert done.code == 0, done.err
    return dict(done.json)


@pytest.fixture(scope="module")
def usual(given_options: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tuned(given_options, tmp_path_factory.mktemp("usual") / f"x{SUFFIX}")


def test_the_bundle_holds_the_front_and_a_cache_runs_it(given_options: list[str], usual: dict[str, Any]) -> None:
    bundle = load_bundle(usual["bundle"])
    seen, record = bundle.metrics["search"], bundle.provenance
    assert len(seen["trials"]) == 12 and seen["chosen"] in seen["front"]
    assert [seen["trials"][i] | {"trial": i} for i in seen["front"]] == usual["front"]
    best = seen["trials"][seen["chosen"]]
    assert best["bits"] <= 6 and best["quality"] == min(t["quality"] for t in seen["trials"] if t["bits"] <= 6)
    assert (record["settings"]["tau_low"], record["settings"]["tau_high"]) == (best["tau_low"], best["tau_high"])
    assert "same command gives the same bytes" in record["search"]["order"]
    assert Path(usual["plot"]).read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in Path(usual["bundle"]).parent.iterdir()) == ["x.front.png", f"x{SUFFIX}"]
    model = load_model(resolve(given_options[1]), dtype="float32", device="cpu").model
    with load_cache(bundle, model) as cache, torch.no_grad():
        model(input_ids=schemes.token_ids(2, 200), past_key_values=cache)
        assert cache.bits_per_value() == pytest.approx(usual["expected_bits_per_value"], rel=0.15)
        assert bundle.scheme.ragged


def test_the_same_command_gives_the_same_bytes(given_options: list[str], usual: dict[str, Any], tmp_path: Path) -> None:
    again = tuned(given_options, tmp_path / f"x{SUFFIX}")
    assert again["sha256"] == usual["sha256"]
    assert Path(again["plot"]).read_bytes() == Path(usual["plot"]).read_bytes()
    assert tuned(given_options, tmp_path / f"y{SUFFIX}", "--seed", 1, "--trials", 2)["front"] != usual["front"]


def complete(database: Path) -> int:
    if not database.exists():
        return 0
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=30)) as found:
            return int(found.execute("select count(*) from trials where state = 'COMPLETE'").fetchone()[0])
    except sqlite3.OperationalError:  # no tables yet
        return 0


def test_killed_and_run_again_it_gives_the_same_bytes(
    given_options: list[str], usual: dict[str, Any], tmp_path: Path
) -> None:
    output = tmp_path / f"x{SUFFIX}"
    options = [*given_options, "--max-bits", "6", "--trials", "12", "--output", str(output)]
    database = tmp_path / f".x{SUFFIX}.search" / "study.db"
    killed_when(lambda: complete(database) >= 3, "tune-thresholds", *options, folder=tmp_path)
    assert not output.exists() and 3 <= complete(database) < 12
    assert tuned(given_options, output)["sha256"] == usual["sha256"]
    assert not database.exists()


@pytest.mark.slow
def test_two_workers_share_a_storage_and_one_is_killed(given_options: list[str], tmp_path: Path) -> None:
    database = tmp_path / "shared.db"
    shared = [
        *given_options,
        "--max-bits",
        "6",
        "--trials",
        "16",
        "--storage",
        f"sqlite:///{database}",
        "--json",
        "--heartbeat",
        "1",
    ]
    first, second = (
        started("tune-thresholds", *shared, "--output", tmp_path / f"{name}{SUFFIX}", folder=tmp_path)
        for name in ("first", "second")
    )
    wait_until(lambda: complete(database) >= 2, first)
    first.kill()
    ended = finished(second)
    finished(first)
    assert ended.code == 0, ended.err
    assert (ended.json["trials"], complete(database)) == (16, 16)
    assert len(load_bundle(ended.json["bundle"]).metrics["search"]["trials"]) == 16
    assert not (tmp_path / f"first{SUFFIX}").exists()


def test_other_objectives_and_nothing_to_search(given_options: list[str], tmp_path: Path) -> None:
    found = tuned(given_options, tmp_path / f"p{SUFFIX}", "--objective", "perplexity", "--trials", 2)
    assert found["quality"] > 1
    fixed = untuned(given_options, tmp_path / f"f{SUFFIX}", "--full", 8, "--four", 8)
    assert (fixed["full_channels"], fixed["four_bit_channels"], "front" in fixed) == (8, 8, False)
    assert not load_bundle(fixed["bundle"]).scheme.ragged
    alone = untuned(given_options, tmp_path / f"a{SUFFIX}", "--tau-low", 2, "--tau-high", 2, "--importance", "none")
    assert (alone["four_bit_channels"], alone["tau_low"]) == (0, 2)
    done = kvcal("tune-thresholds", *given_options, "--raw-salience", "--output", tmp_path / f"r{SUFFIX}")
    assert (done.code, "give --tau-low and --tau-high" in done.complaint) == (2, True)


def test_the_least_bits_are_those_of_thresholds_that_nothing_exceeds(
    given_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a limit below them is refused before the first trial."""
    made = untuned(given_options, tmp_path / f"a{SUFFIX}", "--tau-low", 1e9, "--tau-high", 1e9)
    least = made["expected_bits_per_value"]
    assert (made["full_channels"], made["four_bit_channels"]) == (0, 0)
    monkeypatch.setattr("kvcal.search.thresholds.AttentionError.__init__", lambda *args: pytest.fail("a search began"))
    output = tmp_path / f"x{SUFFIX}"
    done = kvcal("tune-thresholds", *given_options, "--output", output, "--max-bits", least - 0.001)
    assert done.code == 2
    assert float(done.err.partition("give --max-bits ")[2].split()[0]) == pytest.approx(least, abs=1e-4)
    assert not list(tmp_path.glob(".x*"))


BAD = {
    "objective": (["--objective", "speed"], 2, "allowed are auto, attention, perplexity and task:NAME"),
    "range": (["--tau-low", "8,2"], 2, "--tau-low 8,2: needs two positive numbers"),
    "text for a range": (["--tau-high", "many"], 2, "--tau-high many: needs a range"),
    "group": (["--group", "5"], 2, "groups of 5 tokens: must divide the block of 8"),
    "windows": (["--length", "20", "--recent", "16"], 2, "nothing would be packed; use --length 29 or more"),
    "max-bits": (
        ["--max-bits", "1"],
        2,
        "--max-bits 1: with all key channels at 2 bits and values of 2 a value takes 5.65625 bits",
    ),
    "storage": (["--storage", "rubbish"], 1, "--storage rubbish: cannot be used"),
    "tasks alone": (["--limit", "2"], 2, "--limit applies only to an objective of tasks, and there is none"),
    "no storage": (["--heartbeat", "5"], 2, "--heartbeat applies only to a storage that workers share"),
    "spill": (["--spill", "disk"], 2, "--spill disk: allowed are device and cpu"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_done_is_one_line(name: str, given_options: list[str], tmp_path: Path) -> None:
    options, code, said = BAD[name]
    done = kvcal("tune-thresholds", *given_options, "--output", tmp_path / f"x{SUFFIX}", "--max-bits", 6, *options)
    assert done.code == code
    assert said in done.err.splitlines()[-1]
    assert not (tmp_path / f"x{SUFFIX}").exists()
