"""The embedded model is what its card says, fits into the wheel, and runs the README's example."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal.commands.demo import DEMO_PRESETS, NEXT
from kvcal.commands.workbench import cache_makers, rows_named
from kvcal.evaluate.agreement import agreement
from kvcal.evaluate.perplexity import evaluate
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.text import token_windows
from kvcal_artifacts.errors import UsageError
from tests.support.models_fixture import kvcal
from tests.support.pages import ROOT

DEMO = ROOT / "kvcal" / "demo"
CARD = DEMO / "tiny" / "README.md"
BITS_PER_BYTE = 1.662  # on the embedded evaluation text, windows of 1024 with BOS


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_model(resolve("tiny"), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def card() -> str:
    return CARD.read_text("utf-8")


def test_geometry(tiny: Any) -> None:
    config = tiny.model.config
    assert config.model_type == "llama"
    assert config.num_attention_heads > config.num_key_value_heads
    assert config.num_key_value_heads * config.head_dim <= config.hidden_size / 3
    assert config.rope_parameters["rope_theta"] == 10_000
    assert config.max_position_embeddings >= 2048


def test_card_tells_its_numbers(tiny: Any, card: str) -> None:
    record = json.loads((DEMO / "tiny" / "training.json").read_text("utf-8"))
    parameters = sum(p.numel() for p in tiny.model.parameters())
    assert parameters == record["parameters"]
    weights = hashlib.sha256((DEMO / "tiny" / "packed.safetensors").read_bytes()).hexdigest()
    known = [f"{record[n]:,}" for n in ("parameters", "train_tokens_unique", "train_tokens_seen")]
    known += [weights, record["source_sha256"], record["note"], str(record["heldout_bits_per_byte_after_int8"])]
    known += [title.removeprefix("# ") for title in record["heldout_documents"]]
    known += [f"| {row['heldout_bits_per_byte']:.3f} |" for row in record["curve"]]
    assert [fact for fact in known if fact not in card] == []
    config = tiny.model.config
    assert f"| {config.num_hidden_layers}, {config.hidden_size}, {config.intermediate_size} |" in card


def test_held_out_loss_has_flattened() -> None:
    curve = json.loads((DEMO / "tiny" / "training.json").read_text("utf-8"))["curve"]
    late = [row["heldout_bits_per_byte"] for row in curve if row["step"] >= 1400]
    assert len(late) >= 5
    assert max(late) - min(late) < 0.005


def test_demo_fits_into_the_wheel() -> None:
    """The wheel itself is measured by `nox -s install_check`."""
    files = [path for path in DEMO.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 12_000_000


@pytest.mark.slow
def test_bits_per_byte(tiny: Any, card: str) -> None:
    text = token_windows.evaluation_windows(tiny.tokenizer, "embedded:evaluation", windows=None, length=1024)
    assert bool((text.ids[:, 0] == tiny.tokenizer.bos_token_id).all())
    full = evaluate(tiny.model, text.ids, {}, step=1024)[0]
    # a character of a byte-level token stands for one byte
    spelt = tiny.tokenizer.convert_ids_to_tokens(text.ids[:, 1:].flatten().tolist())
    count = sum(map(len, spelt))
    found = math.log2(full.perplexity) * full.tokens / count
    print(f"perplexity {full.perplexity:.3f}, {full.tokens} tokens, {count} bytes: {found:.4f} bits a byte")
    assert found == pytest.approx(BITS_PER_BYTE, abs=0.01)
    assert all(fact in card for fact in (f"**{BITS_PER_BYTE}**", f"{full.tokens:,}", f"{count:,}"))


@pytest.mark.slow
def test_debiasing_brings_a_trained_model_closer_to_itself(tiny: Any) -> None:
    """Same codes, another factor a layer: 0.0096 against 0.0075 nats over 16 windows, measured with `kvcal eval`."""
    text = token_windows.evaluation_windows(tiny.tokenizer, "embedded:evaluation", windows=4, length=1024)
    rows = evaluate(tiny.model, text.ids, cache_makers(tiny.model, rows_named(["higgs-2", "higgs-2-debiased"], [])))
    kl = {row.name: row.kl for row in rows}
    assert 0 < kl["higgs-2-debiased"] < 0.9 * kl["higgs-2"]


def test_generates_english(tiny: Any) -> None:
    inputs = tiny.tokenizer("The emperor had resolved", return_tensors="pt")
    with torch.no_grad():
        out = tiny.model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert tiny.tokenizer.decode(out[0], skip_special_tokens=True).startswith("The emperor had resolved to ")


def test_readme_example_runs(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, on `tiny` in a folder of the model's place."""
    [example] = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    monkeypatch.chdir(tmp_path)
    folder = as_checkpoint(tiny, tmp_path / "model")
    bundle, name = (re.search(rf'{before}"(.*?)"', example) for before in (r"kvcal\.cache\(model, ", "name = "))
    assert bundle is not None and name is not None
    assert kvcal("preset", "kivi-4", "--model", folder, "--output", bundle[1], "--no-check").code == 0
    (tmp_path / "LICENSE").write_text((ROOT / "LICENSE").read_text("utf-8")[:2000])
    with contextlib.redirect_stdout((tmp_path / "printed.txt").open("w")) as printed:
        exec(compile(example.replace(name[1], str(folder)), "README.md", "exec"), {})
        printed.flush()
    *answer, last = (tmp_path / "printed.txt").read_text().splitlines()
    assert answer and re.fullmatch(r"\d+ tokens in \d+\.\d MB, 5\.00 bits per value", last)


def as_checkpoint(tiny: Any, folder: Path) -> Path:
    """`tiny` as Transformers writes models, with a chat template that gives the user's words alone."""
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    try:
        tiny.tokenizer.save_pretrained(folder)
    finally:
        tiny.tokenizer.chat_template = None
    return folder


def test_agreement_counts_equal_next_tokens(tiny: Any) -> None:
    """An exact cache agrees in every step and has 16-bit bytes; a coarse one does not; bytes are those of the cache."""
    text = token_windows.evaluation_windows(tiny.tokenizer, "embedded:evaluation", windows=2, length=260)
    makers = cache_makers(tiny.model, rows_named(["exact", "uniform-2"], []))
    full, exact, coarse = agreement(tiny.model, text.ids, makers, steps=8)
    assert (full.same, full.of, exact.same, exact.kl) == (16, 16, 16, pytest.approx(0, abs=1e-6))
    assert full.nbytes == 2 * 2 * 260 * 8 * 2 * 64 * 2  # keys and values, rows, tokens, layers, heads, dims, bytes
    assert exact.nbytes > full.nbytes > coarse.nbytes and coarse.kl > 0.01
    assert coarse.bits_per_value == pytest.approx(2.5) and 0 <= coarse.same <= 16
    with pytest.raises(UsageError, match="260 steps over windows of 260 tokens"):
        agreement(tiny.model, text.ids, makers, steps=260)


@pytest.mark.slow
def test_the_demo_ends_in_a_win(tmp_path: Path) -> None:
    """The default is smaller than all it is shown beside, and nearer to full precision than those of 3 bits."""
    done = kvcal("demo", "--output", tmp_path / "tiny.kvcal.safetensors", "--json")
    assert done.code == 0, done.err
    full, *others, ours = done.json["rows"]
    assert ours["nbytes"] < min(row["nbytes"] for row in others) < full["nbytes"] / 3
    assert ours["kl"] < min(row["kl"] for row in others if row["bits_per_value"] < 4)
    assert ours["same"] >= 90 and ours["of"] == 100
    words = done.json["sample"].split()
    assert len({*zip(words, words[1:], words[2:], strict=False)}) > 0.9 * (len(words) - 2), "the sample loops"


def test_the_readme_has_the_lines_of_the_demo() -> None:
    """Its last lines as the command prints them, and its rows."""
    readme = (ROOT / "README.md").read_text("utf-8").partition("What `kvcal demo` printed here")[2]
    for name in (*DEMO_PRESETS, "tiny-aqua-kv"):
        assert re.search(rf"^{name} ", readme, re.MULTILINE), name
    assert re.search(
        r"^16-bit cache [\d.]+ MB -> [\d.]+ MB with predictors; same next token in \d+ of 100", readme, re.M
    )
    assert f"next: {NEXT}" in readme
