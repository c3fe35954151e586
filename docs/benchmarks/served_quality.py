"""Whether quality through vLLM equals `kvcal eval`: KL to full precision on the same token windows, both ways.

    python docs/benchmarks/served_quality.py --model FOLDER --text FILE [--windows 4] [--length 256] [--modes] [SCHEME ...]

Needs vLLM with the plug-in (`nox -s tests_vllm` says how on a CPU). SCHEME: a preset's name or a bundle's path. A preset
becomes a bundle without exact windows, which do not apply in a server. `kvcal eval` reads each window in steps of 32
tokens; vLLM in chunks of 32 tokens, one request at a time, in its default mode: both see packed keys and values of
earlier steps and exact ones of the step itself. KL of vLLM: from `prompt_logprobs` of the whole vocabulary, of stock
vLLM and of vLLM with the scheme. All in float32.

--modes: also a window in one step, and both ways in deterministic mode: KL of each, and how far log-probabilities of the
text's tokens are apart between one step and chunks, on average.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STEP = 32


def prompt_logprobs(llm: Any, window: list[int], vocabulary: int) -> Tensor:
    """Log-probabilities of the tokens behind each prefix of a window but the whole: (T - 1, vocabulary) float32."""
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, flat_logprobs=True, detokenize=False)
    [answer] = llm.generate([{"prompt_token_ids": window}], asked, use_tqdm=False)
    flat, rows = answer.prompt_logprobs, torch.full((len(window) - 1, vocabulary), float("nan"))
    for row, (first, last) in enumerate(zip(flat.start_indices[1:], flat.end_indices[1:], strict=True)):
        rows[row, torch.tensor(flat.token_ids[first:last])] = torch.tensor(flat.logprobs[first:last])
    assert not rows.isnan().any(), "vLLM left tokens out"
    return rows


def served(
    model: str,
    windows: list[list[int]],
    vocabulary: int,
    bundle: str | None,
    step: int = STEP,
    deterministic: bool = False,
) -> list[Tensor]:
    """`prompt_logprobs` of all windows by a new engine. bundle: a path; None for stock vLLM. step: tokens of a step."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    ours: dict[str, Any] = {}
    if bundle is not None:
        how = {"kvcal": bundle, "kvcal_deterministic": deterministic}
        ours = {"attention_config": {"backend": "CUSTOM"}, "additional_config": how}
    llm = LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=len(windows[0]) + 1, max_num_seqs=1,
        max_num_batched_tokens=step, max_logprobs=-1, kv_cache_memory_bytes=256 << 20, **ours,
    )  # fmt: skip
    rows = [prompt_logprobs(llm, window, vocabulary) for window in windows]
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    return rows


def divergence(full: list[Tensor], logprobs: list[Tensor]) -> float:
    """KL of all windows' rows, nats per token."""
    pairs = zip(full, logprobs, strict=True)
    return float(torch.cat([(a.exp() * (a - b)).sum(-1).double() for a, b in pairs]).mean())


def apart(windows: list[list[int]], first: list[Tensor], second: list[Tensor]) -> float:
    """How far log-probabilities of the text's tokens are apart, nats on average."""
    rows = zip(windows, first, second, strict=True)
    off = [(a - b).gather(1, torch.tensor(ids[1:])[:, None]).abs() for ids, a, b in rows]
    return float(torch.cat(off).double().mean())


def modes(
    model: str, windows: list[list[int]], vocabulary: int, bundle: str, full: list[Tensor], chunks: list[Tensor]
) -> dict[str, float]:
    """Figures of one step, and of deterministic mode. chunks: log-probabilities in chunks, in the default mode."""
    whole = served(model, windows, vocabulary, bundle, len(windows[0]) + 1)
    both = [served(model, windows, vocabulary, bundle, step, True) for step in (STEP, len(windows[0]) + 1)]
    return {
        "kl_one_step": divergence(full, whole),
        "apart": apart(windows, whole, chunks),
        "kl_deterministic": divergence(full, both[0]),
        "kl_deterministic_one_step": divergence(full, both[1]),
        "apart_deterministic": apart(windows, *both),
    }


def kvcal(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "kvcal.cli", "-q", *arguments], stdout=subprocess.PIPE, check=True)
    return done.stdout.decode()


def main() -> None:
    from transformers import AutoConfig, AutoTokenizer

    from kvcal.text.token_windows import evaluation_windows

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemes", nargs="*", default=["uniform-4", "higgs-2"])
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--text", required=True, help="a file")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--modes", action="store_true", help="also one step, and deterministic mode")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    asked = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    text = evaluation_windows(tokenizer, asked.text, windows=asked.windows, length=asked.length)
    windows = text.ids.tolist()
    vocabulary = AutoConfig.from_pretrained(asked.model).vocab_size
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bundles = {}
        for name in asked.schemes:
            bundles[name] = name if name.endswith(".safetensors") else f"{folder}/{name}.kvcal.safetensors"
            if bundles[name] != name:
                exact = ("--sink", "0", "--recent", "0")
                kvcal("preset", name, "--model", asked.model, *exact, "--output", bundles[name])
        of_text = ("--text", asked.text, "--windows", str(asked.windows), "--length", str(asked.length))
        how = ("--model", asked.model, "--dtype", "float32", "--step", str(STEP), "--no-resume", "--json")
        given = [part for path in bundles.values() for part in ("--bundle", path)]
        evaluated = json.loads(kvcal("eval", *of_text, *how, *given))
        assert evaluated["windows"] == len(windows)
        full = served(asked.model, windows, vocabulary, None)
        for row, (name, path) in zip(evaluated["rows"][1:], bundles.items(), strict=True):
            logprobs = served(asked.model, windows, vocabulary, path)
            kl = divergence(full, logprobs)
            name = Path(name).name.removesuffix(".kvcal.safetensors")
            rows.append({"scheme": name, "kl_eval": row["kl"], "kl_vllm": kl, "ratio": kl / row["kl"]})
            print(
                f"{name}: KL {row['kl']:.5f} by kvcal eval, {kl:.5f} through vLLM: {kl / row['kl'] - 1:+.2%}",
                flush=True,
            )
            if asked.modes:
                rows[-1] |= modes(asked.model, windows, vocabulary, path, full, logprobs)
                print(rows[-1], flush=True)
    if asked.out is not None:
        record = {"model": Path(asked.model).name, "text": Path(asked.text).name, "windows": len(windows)}
        asked.out.write_text(json.dumps(record | {"length": asked.length, "step": STEP, "rows": rows}, indent=1) + "\n")
    if any(abs(row["ratio"] - 1) > 0.02 for row in rows):
        sys.exit("KL through vLLM differs from kvcal eval by more than 2 %")


if __name__ == "__main__":
    main()
