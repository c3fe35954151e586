"""`kvcal compare`: rows equal those of eval, the front is right, an interrupted comparison goes on."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcal.commands import compare as command
from kvcal.evaluate import perplexity
from kvcal.search.comparison import best, front
from kvcal_artifacts.cache import KVCalCache
from tests.support.models_fixture import SUFFIX, kvcal, write_model, write_text

LENGTH = 220
CROSS = ["--keys", "higgs-2,uniform-2-channel", "--values", "uniform-2,higgs-2", "--recent", 16]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("compare")
    write_model(base / "model")
    write_text(base / "words.txt")
    return base


def named(base: Path) -> list[Any]:
    return ["--model", base / "model", "--text", base / "words.txt", "--length", LENGTH, "--windows", 2]


def test_a_row_is_the_row_of_eval(base: Path) -> None:
    presets = ["--preset", "higgs-3", "--preset", "uniform-4"]
    alone = {row["name"]: row for row in kvcal("eval", *named(base), *presets, "--json").json["rows"]}
    done = kvcal("compare", *named(base), *presets, *CROSS, "--max-bits", 3, "--json")
    assert done.code == 0, done.err
    found = {row["name"]: row for row in done.json["rows"]}
    assert done.json["full_perplexity"] == alone["full"]["perplexity"]
    for name in ("higgs-3", "uniform-4"):
        assert {field: found[name][field] for field in alone[name]} == alone[name]
    pairs = {"higgs-2", "higgs-2 + uniform-2", "uniform-2-channel + uniform-2", "uniform-2-channel + higgs-2"}
    assert set(found) == pairs | {"higgs-3", "uniform-4"}
    assert (
        done.json["best"] == min((r for r in found.values() if r["bits_per_value"] <= 3), key=lambda r: r["kl"])["name"]
    )
    starred = [name for name, row in found.items() if row["front"]]
    assert "uniform-4" in starred or "higgs-3" in starred


@pytest.mark.parametrize("command_name", ["eval", "compare"])
def test_a_text_with_fewer_windows_is_said_to_have_them(base: Path, tmp_path: Path, command_name: str) -> None:
    (tmp_path / "short.txt").write_text(" ".join((base / "words.txt").read_text().split()[: 3 * LENGTH]))

    def notes(windows: int) -> tuple[int, list[str]]:
        text = ["--text", tmp_path / "short.txt", "--length", LENGTH, "--windows", windows]
        done = kvcal(command_name, "--model", base / "model", *text, "--preset", "uniform-4", "--json")
        assert done.code == 0, done.err
        return done.json["windows"], [line for line in done.err.splitlines() if "windows of" in line]

    count, lines = notes(60)
    assert lines == [f"note: text file:short.txt holds {count} windows of {LENGTH} tokens, not 60: all are taken"]
    assert notes(count) == (count, [])


@pytest.mark.parametrize("free", [1 << 40, 8, None])
def test_full_precision_runs_once_for_all_rows(base: Path, monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    """As long as an eighth of the free memory holds what it gave; else once for each row."""
    runs: list[int] = []
    inner = perplexity._log_probabilities

    def counted(model: Any, chunk: Any, cache: Any, count: int) -> Any:
        runs.extend([] if isinstance(cache, KVCalCache) else [chunk.numel()])
        return inner(model, chunk, cache, count)

    presets = ["--preset", "higgs-3", "--preset", "uniform-4", "--preset", "fp8"]
    expected = [kvcal("compare", *named(base), *presets[i : i + 2], "--json").json["rows"][0] for i in (0, 2, 4)]
    monkeypatch.setattr(perplexity, "_log_probabilities", counted)
    monkeypatch.setattr(command, "free_bytes", lambda device: free)
    rows = {row["name"]: row for row in kvcal("compare", *named(base), *presets, "--json").json["rows"]}
    assert sum(runs) == 2 * LENGTH * (1 if free == 1 << 40 else 3)
    for row in expected:
        assert rows[row["name"]] | {"front": True} == row | {"front": True}


def test_pairs_under_predictors(base: Path) -> None:
    fitting = ["--predict", "--calibration", base / "words.txt", "--fit-windows", 4, "--fit-length", 96]
    done = kvcal("compare", *named(base), "--keys", "uniform-2", "--values", "uniform-4", *fitting, "--json")
    assert done.code == 0, done.err
    rows = {row["name"]: row for row in done.json["rows"]}
    assert set(rows) == {"uniform-2 + uniform-4", "aqua(uniform-2 + uniform-4)"}
    assert rows["aqua(uniform-2 + uniform-4)"]["resident_bytes"] > 0
    assert rows["aqua(uniform-2 + uniform-4)"]["kl"] < rows["uniform-2 + uniform-4"]["kl"]


def test_codecs_learned_from_text_recipes_and_exceptions(base: Path, tmp_path: Path) -> None:
    """Learned pairs are fitted without predictors, too; a recipe's row is the bundle that its command writes."""
    (tmp_path / "plain.toml").write_text('codec = "uniform-4"\n[layers]\n"0" = "higgs-2"\n[windows]\nrecent = 16\n')
    (tmp_path / "learned.toml").write_text('keys = "vq-2-k16"\nvalues = "uniform-4"\nframe = "post_rope"\n')
    (tmp_path / "predicted.toml").write_text('codec = "uniform-4"\n[predictor]\nkind = "bias"\n')
    recipes = [word for name in ("plain", "learned", "predicted") for word in ("--recipe", tmp_path / f"{name}.toml")]
    fitting = ["--calibration", base / "words.txt", "--fit-windows", 4, "--fit-length", 96]
    pairs = ["--keys", "uniform-2,vq-2-k16", "--values", "uniform-4", "--predict", "--per-layer", "-1=exact-16"]
    done = kvcal("compare", *named(base), *recipes, *pairs, *fitting, "--recent", 16, "--json")
    assert done.code == 0, done.err
    rows = {row["name"]: row for row in done.json["rows"]}
    alone = ["uniform-2 + uniform-4", "vq-2-k16 + uniform-4"]
    assert set(rows) == {"plain", "learned", "predicted", *alone, *(f"aqua({name})" for name in alone)}
    assert rows["aqua(uniform-2 + uniform-4)"]["kl"] < rows["uniform-2 + uniform-4"]["kl"]
    books = rows["vq-2-k16 + uniform-4"]["resident_bytes"]
    assert 0 < books < rows["aqua(vq-2-k16 + uniform-4)"]["resident_bytes"] and rows["plain"]["resident_bytes"] > 0
    output = tmp_path / f"plain{SUFFIX}"
    assert kvcal("preset", "--recipe", tmp_path / "plain.toml", "--model", base / "model", "-o", output).code == 0
    learned = tmp_path / f"learned{SUFFIX}"
    fit = ["--model", base / "model", "--text", base / "words.txt", "--windows", 4, "--length", 96, "--output", learned]
    assert kvcal("fit-predictors", "--recipe", tmp_path / "learned.toml", *fit).code == 0
    seen = kvcal("compare", *named(base), "--bundle", output, "--bundle", learned, "--json").json["rows"]
    for row in seen:
        assert row["kl"] == rows[row["name"]]["kl"] and row["bits_per_value"] == rows[row["name"]]["bits_per_value"]


def test_an_interrupted_comparison_goes_on(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "rows.json"
    arguments = ["compare", *named(base), *CROSS, "--output", output, "--json"]
    whole = kvcal("compare", *named(base), *CROSS, "--json").json
    measured: list[int] = []
    evaluate = command.evaluate

    def until_the_third(*args: Any, **kwargs: Any) -> Any:
        measured.append(1)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(command, "evaluate", until_the_third)
    assert kvcal(*arguments).code == 130
    assert len(json.loads(output.read_text())["rows"]) == 2
    assert kvcal(*arguments).json["rows"] == whole["rows"]
    assert len(measured) == 3 + 2
    output.write_bytes(b"")  # as mktemp(1) leaves one
    assert kvcal("compare", *named(base), "--preset", "fp8", "--output", output).code == 0
    assert [row["name"] for row in json.loads(output.read_text())["rows"]] == ["fp8"]


def test_sizes_of_the_tables_are_those_that_they_are_divided_into(base: Path) -> None:
    """The model runs in float32; full precision and exact tokens are counted at 16 bits, in every column."""
    for name in ("compare", "eval"):
        lines = kvcal(name, *named(base), "--preset", "kivi-4", "--wide").out.splitlines()
        start = next(at for at, line in enumerate(lines) if line.startswith("───"))
        assert lines[start - 1].split()[-4:] == ["size", "×", "smaller", "perplexity"]
        full, row = (re.split(r" {2,}", line.strip())[-3:] for line in lines[start + 1 : start + 3])
        sizes = [int(cells[0].removesuffix(" B").replace(",", "")) for cells in (full, row)]
        assert float(full[1]) == 1 and sizes[0] / sizes[1] == pytest.approx(float(row[1]), rel=0.001) != 1


def test_errors_bytes_csv_and_plot(base: Path, tmp_path: Path) -> None:
    files = {"--csv": tmp_path / "rows.csv", "--plot": tmp_path / "front.svg"}
    presets = ["--preset", "kivi-2", "--preset", "kivi-4", "--preset", "fp8"]
    told = [part for pair in files.items() for part in pair]
    found = kvcal("compare", *named(base), *presets, *told, "--at-length", 1000, "--json").json
    rows = {row["name"]: row for row in found["rows"]}
    for error in ("logit_error", "output_error", "kl"):
        assert rows["kivi-2"][error] > rows["kivi-4"][error] > 0
    values = rows["fp8"]["bytes_at_16_bit"] / 2 / LENGTH
    for row in rows.values():
        here = row["cache_bytes"] + row["window_bytes"] + row["resident_bytes"]
        assert row["bytes_at_length"] == round(here + (1000 - LENGTH) * values * row["bits_per_value"] / 8)
        assert row["bytes_at_length"] - row["bytes_at_length_16_bit"] == row["window_bytes"] // 2  # float32 ran
    with files["--csv"].open() as file:
        read = list(csv.DictReader(file))
    assert [row["name"] for row in read] == [row["name"] for row in found["rows"]]
    assert float(read[0]["kl"]) == found["rows"][0]["kl"]
    made = {"date", "commit", "kvcal", "torch", "transformers", "triton"}
    assert all(row["measured_with"].keys() == made for row in found["rows"]) and "measured_with" not in read[0]
    drawn = files["--plot"].read_text()
    assert ">model, " in drawn and str(base) not in drawn  # a folder's last part alone
    kept = kvcal("compare", *named(base), "--preset", "fp8", "--keep", 0.5, "--json").json["rows"][0]
    assert kept["logit_error"] is None and kept["output_error"] is None
    assert kvcal("compare", *named(base), *presets, "--plot", tmp_path / "front.jpg").code == 2


def test_measured_rows_are_not_lost_to_other_settings(base: Path, tmp_path: Path) -> None:
    """--at-length is worked out of the figures that are there; another step would throw rows away, and is refused."""
    output = tmp_path / "rows.json"
    given = ["compare", *named(base), "--preset", "kivi-2", "--preset", "higgs-2", "--output", output]
    first = kvcal(*given, "--json").json
    kept = output.read_bytes()
    again = kvcal(*given, "--at-length", 1000, "--json").json
    asked = kvcal("compare", *named(base), "--preset", "kivi-2", "--at-length", 1000, "--json").json["rows"][0]
    (kivi,) = (row for row in again["rows"] if row["name"] == "kivi-2")
    assert again["resumed_rows"] == 2 and output.read_bytes() == kept and again["at_length"] == 1000
    assert kivi["bytes_at_length"] == asked["bytes_at_length"] != first["rows"][0]["bytes_at_length"]
    other = kvcal(*given, "--step", 7)
    assert other.code == 2 and output.read_bytes() == kept
    assert "its 2 rows are of step" in other.err and "not 7" in other.err and "--no-resume" in other.err
    assert kvcal(*given, "--step", 7, "--no-resume", "--json").json["resumed_rows"] == 0


@pytest.mark.parametrize("name", ["compare", "eval"])
def test_unequal_windows_are_told(base: Path, name: str) -> None:
    done = kvcal(name, *named(base), "--preset", "kivi-2", "--preset", "kivi-sink-2")
    said = " ".join(done.out.split())
    assert "exact tokens (first + last) differ: " in said and "; " in said and "0 + 32 of kivi-2" in said
    assert "32 + 96 of kivi-sink-2" in said and " Equal ones: " in said
    assert "±" in said and "block" not in said.replace("blocks", "")
    assert "exact tokens" not in kvcal(name, *named(base), "--preset", "kivi-2").out


@pytest.mark.parametrize("name", ["compare", "eval"])
def test_unequal_blocks_are_told(base: Path, tmp_path: Path, name: str) -> None:
    """At equal --sink and --recent, the row of larger blocks keeps more tokens exact, until a block is full."""
    options = []
    for block in (32, 128):
        path = tmp_path / f"block-{block}{SUFFIX}"
        windows = ["--sink", 4, "--recent", 16, "--block", block]
        assert kvcal("preset", "kivi-2", "--model", base / "model", *windows, "--no-check", "--output", path).code == 0
        options += ["--bundle", path]
    said = " ".join(kvcal(name, *named(base), *options, "--wide").out.split())
    assert "exact tokens (first + last) differ: " in said
    assert "4 + 16, block 32, of block-32" in said and "4 + 16, block 128, of block-128" in said
    assert "until their block is full" in said and "--block N" in said
    assert "windows block" in said and "4 + 16 128" in said  # columns of --wide
    rows = kvcal(name, *named(base), *options, "--json").json["rows"]
    assert {row["block"] for row in rows if row["name"] != "full"} == {32, 128}


@pytest.mark.parametrize("name", ["compare", "eval"])
def test_a_bundle_of_a_presets_name_is_a_row_of_its_own(base: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / f"kivi-2{SUFFIX}"
    model = ["--model", base / "model"]
    assert kvcal("preset", "kivi-2", *model, "--sink", 4, "--no-check", "--output", path).code == 0
    done = kvcal(name, *named(base), "--preset", "kivi-2", "--bundle", path, "--json")
    assert done.code == 0, done.err
    rows = {row["name"]: row["sink"] for row in done.json["rows"] if row["name"] != "full"}
    assert rows == {"kivi-2": 0, "kivi-2 (bundle)": 4}
    other = tmp_path / "other" / path.name
    other.parent.mkdir()
    other.write_bytes(path.read_bytes())
    done = kvcal(name, *named(base), "--bundle", path, "--bundle", other)
    assert done.code == 2 and "two rows would be called 'kivi-2'" in done.complaint


def test_a_pair_says_where_a_preset_of_its_name_packs_other_blocks(base: Path) -> None:
    pair = ["--keys", "mixkvq", "--values", "kivi-2"]
    said = "note: mixkvq as a codec packs 32 tokens at a time here, the preset mixkvq 128: give --block 128"
    assert said in kvcal("compare", *named(base), *pair, "--recent", 16).err
    assert "note: mixkvq as" not in kvcal("compare", *named(base), *pair, "--recent", 16, "--block", 32).err
    config = ["--model", base / "model", "--config-only", "--output", base / f"pair{SUFFIX}"]
    assert said in kvcal("preset", *pair, *config).err


def test_what_is_refused(base: Path, tmp_path: Path) -> None:
    for options, said in (
        ([], "nothing to compare"),
        (["--keys", "higgs-2"], "--keys and --values go together"),
        (["--preset", "higgs-2", "--per-layer", "0=higgs-4"], "--per-layer applies only to the pairs of --keys and"),
        (
            ["--preset", "higgs-2", "--recent", 16],
            "--recent applies only to the pairs of --keys and --values, and there",
        ),
        (["--preset", "higgs-2", "--frame", "post_rope"], "--frame applies only to the pairs"),
        (["--preset", "higgs-2", "--predict"], "--predict applies only to the pairs"),
        (["--preset", "higgs-2", "--key-inputs", "k1"], "--key-inputs applies only to the pairs"),
        ([*CROSS, "--first-layer", "higgs-4"], "--first-layer applies only to pairs under predictors"),
        ([*CROSS, "--fit-windows", 4], "--fit-windows applies only to rows that are fitted"),
        (["--preset", "higgs-2", "--calibration", "x"], "--calibration applies only to rows that are fitted"),
        (["--keys", "kivi-2-scaled", "--values", "kivi-2"], "a factor changes nothing"),
        (["--keys", "higgs-9", "--values", "higgs-2"], "higgs-9"),
        (["--keys", "higgs-2,higgs-2", "--values", "higgs-2"], "two rows would be called 'higgs-2'"),
        (["--preset", "higgs-2", "--frame", "mid"], "--frame mid"),
    ):
        done = kvcal("compare", *named(base), *options)
        assert done.code == 2 and said in done.complaint
    missing = tmp_path / f"none{SUFFIX}"
    assert kvcal("compare", *named(base), "--bundle", missing).code == 4


ROWS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=8)


@given(ROWS)
def test_the_front_is_what_nothing_beats(pairs: list[tuple[int, int]]) -> None:
    rows = [{"name": str(i), "bits_per_value": bits, "kl": kl} for i, (bits, kl) in enumerate(pairs)]
    kept = {pairs[int(name)] for name in front(rows)}
    for pair in set(pairs):
        beaten = any(a <= pair[0] and b <= pair[1] and (a, b) != pair for a, b in pairs)
        assert (pair in kept) != beaten
    chosen = best(rows, 3)
    assert chosen is None or chosen["kl"] == min(kl for bits, kl in pairs if bits <= 3)
    assert (chosen is None) == all(bits > 3 for bits, _ in pairs)


def test_a_front_of_size_is_another_than_one_of_bits(base: Path, tmp_path: Path) -> None:
    """Of KIVI's 3 bits with few exact tokens and 2.25 with many: at a short length the one of more bits is smaller."""
    presets = ["--preset", "kivi-2", "--preset", "kivi-4", "--preset", "higgs-2", "--output", tmp_path / "rows.json"]
    bits = kvcal("compare", *named(base), *presets, "--json").json
    size = kvcal("compare", *named(base), *presets, "--against", "size", "--plot", tmp_path / "size.svg", "--json").json
    assert (bits["against"], size["against"], size["resumed_rows"]) == ("bits", "size", 3)
    for result, cost in ((bits, "bits_per_value"), (size, "bytes_at_length_16_bit")):
        for row in result["rows"]:
            beaten = any(x[cost] < row[cost] and x["kl"] <= row["kl"] for x in result["rows"])
            assert row["front"] != beaten
    assert "MB of one sequence" in (tmp_path / "size.svg").read_text()
    said = kvcal("compare", *named(base), *presets, "--against", "size").out
    assert "front of KL and size" in " ".join(said.split())


def test_a_row_that_packed_nothing_is_on_no_front() -> None:
    assert front([{"name": "a", "bits_per_value": None, "kl": 0.0}]) == set()
    assert best([{"name": "a", "bits_per_value": None, "kl": 0.0}], 4) is None
