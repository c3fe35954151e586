"""VQKV's codebooks at the paper's size for Llama-3.2-3B: 10 + 20 + 14 stages of 65536 codewords on 20 million vectors.

    python docs/ablations/vqkv_scale.py --folder /tmp/vqkv-3b --seconds 540     # again until it says "complete"
    python docs/ablations/vqkv_scale.py --bench                                 # the search kernel alone

Vectors are keys and values of the model's geometry with random weights on random tokens: there is nothing to learn but
the shape of noise, so times and memory are those of the real model and errors are not. It is `kvcal train-codebooks`
with a limit of time: a stage that ends after the limit is kept, and the next command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kvcal.calibrate.codebooks import TrainResult
from kvcal.calibrate.driver import train
from kvcal.calibrate.job import FitOptions
from kvcal.commands.workbench import open_for_fit
from kvcal.methods.codebooks import TRAINERS, Training, last_fall
from kvcal.methods.vqkv import SIZES, VQKV
from kvcal.models import configuration, names
from kvcal.text import token_windows

LENGTH, HOLDOUT = 8192, 2


class OutOfTime(Exception):
    """Not an error: the command's time is over."""


def limited(seconds: float) -> Callable[[str], None]:
    """Prints each line with the time; after so many seconds it ends the run, which then lies on disk up to here."""
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {line}", flush=True)
        if " stage " in line and time.monotonic() - started > seconds:
            raise OutOfTime

    return say


def method(options: argparse.Namespace, dim: int) -> VQKV:
    sizes = SIZES[options.preset]
    training = Training(options.trainer, least=options.least, most=options.most)
    return VQKV(sizes.stages_for(dim), sizes.sizes, sizes.high_for(dim), options.vectors, training=training)


def run(options: argparse.Namespace, say: Callable[[str], None]) -> TrainResult:
    source = names.resolve(options.model)
    geometry = configuration.geometry(source)
    length = min(LENGTH, geometry.context)
    a_window = geometry.layers * geometry.kv_heads * (length - 4)
    windows = -(-options.vectors // a_window)
    opened = open_for_fit(
        options.model, None, dtype="auto", device=options.device, layerwise=False, random_weights=True, seed=0
    )
    where = torch.cuda.get_device_name(opened.device) if opened.device.type == "cuda" else "CPU"
    say(f"{windows} windows of {length} random tokens and {HOLDOUT} held out, on {where}")
    text = token_windows.random_windows(geometry.vocab, windows=windows + HOLDOUT, length=length, holdout=HOLDOUT)
    return train(
        method(options, geometry.head_dim), opened.source, text, options.folder / "vqkv.kvcal.safetensors",
        model_record=opened.record, revision=opened.revision, device=opened.device, options=FitOptions(), say=say,
    )  # fmt: skip


def table(result: TrainResult) -> Iterator[str]:
    metrics = result.bundle.metrics
    yield "| quantiser | stage | iterations | error at first | at last | last iteration's fall | used | reseeded | seconds |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in result.stages:
        errors = row["errors"]
        yield (
            f"| {row['quantiser']} | {row['stage'] + 1} | {row['iterations']} | {errors[0]:.4f} | {errors[-1]:.4f} | "
            f"{last_fall(errors):.2%} | {row['used']} | {row['reseeded']} | {row['seconds']:.1f} |"
        )
    yield ""
    yield "Held-out squared error over the vectors' squares: of a stage's first codewords, and after its last iteration."
    yield f"{metrics['train_vectors']} keys and as many values, {metrics['holdout_vectors']} held out."
    yield f"Stages together {sum(row['seconds'] for row in result.stages):.0f} s; peak {result.peak_bytes / 1e9:.1f} GB."
    yield (
        f"{metrics['bits_per_value']:.4g} bits a value, {metrics['paper_bits_per_value']:.4g} in the paper's count "
        f"({metrics['paper_compression']:.1%} saved); codebooks {metrics['codebook_bytes'] / 1e6:.0f} MB."
    )


def scale(options: argparse.Namespace) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    log = options.folder / "commands.json"
    spent = json.loads(log.read_text()) if log.exists() else []
    started = time.monotonic()
    try:
        result = run(options, limited(options.seconds))
    except OutOfTime:
        result = None
    log.write_text(json.dumps([*spent, round(time.monotonic() - started, 1)]))
    whole = f"commands so far: {', '.join(f'{s:.0f} s' for s in [*spent, time.monotonic() - started])}"
    if result is None:
        print(f"not complete; {whole}; the same command goes on")
        return
    text = "\n".join([*table(result), f"Complete; {whole}, collecting vectors and loading included."])
    print(text)
    (options.folder / "report.md").write_text(text + "\n")


# The search kernel alone.

CONFIGURATIONS = [
    {"BM": rows, "BN": columns, "num_warps": warps, "num_stages": stages}
    for rows, columns, warps in ((128, 64, 4), (128, 128, 8), (256, 64, 8), (64, 128, 4), (64, 64, 4))
    for stages in (2, 3, 4)
]


def median_ms(work: Callable[[], Any], repeats: int = 7) -> float:
    """Median time by CUDA events; the data are far larger than any cache."""
    times = []
    for _ in range(repeats + 2):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    return sorted(times[2:])[repeats // 2]


def bench(k: int = 65536, n: int = 1 << 19) -> None:
    """TFLOP/s of 2 n k d operations: a plain product of that shape, the unfused search, and the fused one by
    configuration.
    """
    import triton

    from kvcal_kernels.residual_vq.nearest import reference
    from kvcal_kernels.residual_vq.nearest import triton as fused

    generator = torch.Generator("cuda").manual_seed(0)
    for d in (48, 80, 128):
        x = torch.randn(n, d, device="cuda", generator=generator, dtype=torch.bfloat16)
        book = torch.randn(k, d, device="cuda", generator=generator, dtype=torch.float16) * 0.5
        half = 0.5 * book.float().square().sum(-1)
        work = 2 * n * k * d / 1e9
        part = x[: 1 << 15].half()
        print(
            f"d {d}: product {work * len(part) / n / median_ms(lambda part=part, book=book: part @ book.T):.0f} TFLOP/s"
        )
        some = x[: 1 << 14]
        unfused = work * len(some) / n / median_ms(lambda some=some, book=book: reference.nearest(some, book), 3)
        shipped = work / median_ms(lambda x=x, book=book: fused.nearest(x, book))
        print(f"  unfused reference {unfused:.0f} TFLOP/s; nearest as shipped {shipped:.0f}")
        expected = reference.nearest(some, book)
        print(
            "  codes that differ from the reference: "
            f"{float((fused.nearest(some, book) != expected).double().mean()):.2e}",
        )
        found = torch.empty(n, fused.CANDIDATES, dtype=torch.int32, device="cuda")
        for wanted in CONFIGURATIONS:
            settings: dict[str, Any] = fused.propose_settings(d, k)
            tiles = -(-k // wanted["BN"])
            settings |= {
                "BM": wanted["BM"],
                "BN": wanted["BN"],
                "TILES": tiles,
                "INDEX": (1 << (tiles - 1).bit_length()) - 1,
            }
            launch = {name: wanted[name] for name in ("num_warps", "num_stages")}
            grid = (triton.cdiv(n, wanted["BM"]),)
            try:
                ms = median_ms(
                    lambda g=grid, x=x, b=book, h=half, f=found, s=settings, o=launch: fused.propose_kernel[g](
                        x, b, h, f, n, k, **s, **o
                    )
                )
            except triton.runtime.errors.OutOfResources as error:
                print(f"  {wanted}: {error}")
                continue
            print(f"  {wanted}: {ms:.2f} ms, {work / ms:.0f} TFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("vqkv-scale"), help="bundle, checkpoint and report")
    parser.add_argument("--seconds", type=float, default=540, help="no stage begins after this many")
    parser.add_argument("--model", default="llama-3.2-3b")
    parser.add_argument("--preset", default="3b", choices=SIZES)
    parser.add_argument("--vectors", type=int, default=20_000_000)
    parser.add_argument("--trainer", default="k-means", choices=TRAINERS)
    parser.add_argument("--least", type=int, default=5)
    parser.add_argument("--most", type=int, default=50)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--bench", action="store_true", help="time the search kernel and stop")
    options = parser.parse_args()
    bench() if options.bench else scale(options)


if __name__ == "__main__":
    main()
