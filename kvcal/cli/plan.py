"""`kvcal plan`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvcal.cli.output import command_line, line, note, on_stdout, print_json, print_table, wrapped
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import PlanOptions
from kvcal.report.quantities import significant

if TYPE_CHECKING:
    from kvcal.bench.planning.paged import PagedRow
    from kvcal.bench.planning.projection import KL, Row
    from kvcal.bench.planning.quality import MeasuredModel
    from kvcal.commands.plan import Assumed, CardRecord, PlanHead, PlanResult, ServedPlan


@command(PlanOptions, light=True)
def plan(o: PlanOptions, typed: Typed) -> None:
    """Plan before anything is downloaded: what fits on a GPU under each scheme, how long, how many, how fast, at which
    KL.

    Reads config.json at most. Every figure is projected; docs/plan.md says from what.
    """
    from kvcal.commands.plan import run_plan

    result = run_plan(o, note)
    if o.json:
        print_json(result)
        return
    with on_stdout():
        for text in _head(result):
            wrapped(text, wide=o.wide)
    if "refused" in result:
        print_table(PAGED, [_paged(row) for row in result["rows"]], wide=o.wide)
        foot = [*_foot_of_pages(result)]
    else:
        _table(result["rows"], o.wide)
        foot = _foot(result)
    with on_stdout():
        for text in foot:
            wrapped(text, indent="    ", wide=o.wide)
        _recommendation(result, o.wide)


def _table(rows: Sequence[Row], wide: bool) -> None:
    if wide:
        print_table(WIDE, [_wide(row) for row in rows], wide=True)
        return
    print_table(COLUMNS, [_cells(row) for row in rows])
    line()
    print_table(["scheme", "next"], [[row["scheme"], row["next"]] for row in rows if row["next"]])


COLUMNS = ["scheme", "× smaller", "fits", "longest", "prompt", "tokens/s", "batch: tokens/s", "KL"]
WIDE = [
    "scheme", "bits/value", "× smaller", "fits", "longest", "longest, prompt whole", "prompt", "tokens/s",
    "batch: tokens/s", "KL", "KL class", "KL of", "cache GiB", "decode peak GiB", "prefill peak GiB", "step", "next",
]  # fmt: skip
PAGED = ["scheme", "bits in pages", "× FP16's tokens", "tokens in vLLM", "requests", "KL"]
SHORT = {"in chunks": "chunks"}  # of the column `fits`


def _cells(row: Row) -> list[str | None]:
    fits, most = row["fits"] != "no", row["tokens_per_second_of_largest_batch"]
    speed = row["tokens_per_second"] if fits else None
    batch = f"{row['largest_batch']:,}"
    return [
        row["scheme"],
        significant(row["times_smaller"]),
        SHORT.get(row["fits"], row["fits"]),
        f"{row['longest_context']:,}",
        _seconds(row["prefill_seconds"]),
        None if speed is None else significant(speed),
        batch if most is None else f"{batch}: {_short(most)}",
        _kl(row),
    ]


def _seconds(prompt: float | None) -> str | None:
    if prompt is None:
        return None
    return "< 1 ms" if prompt < 1e-3 else f"{significant(prompt)} s"


def _short(speed: float) -> str:
    """Tokens per second in at most five signs, as 1,906 or 511k."""
    return significant(speed) if speed < 10_000 else f"{speed / 1000:,.0f}k"


def _kl(row: KL) -> str:
    return "not measured" if row["kl"] is None else significant(row["kl"])


def _wide(row: Row) -> list[str | None]:
    cells = _cells(row)
    peaks = [f"{row[name] / 2**30:.2f}" for name in ("cache_bytes", "decode_peak_bytes", "prefill_peak_bytes")]
    whole = f"{row['longest_context_whole_prompt']:,}"
    first = [cells[0], f"{row['bits']:.2f}", *cells[1:4], whole]
    rest = [row["kl_class"], row["kl_model"], *peaks]
    return [*first, *cells[4:], *rest, row["step"], row["next"]]


def _paged(row: PagedRow) -> list[str | None]:
    return [
        row["scheme"],
        f"{row['bits']:.2f}",
        significant(row["times_smaller"]),
        f"{row['tokens']:,}",
        f"{row['requests']:,}",
        _kl(row),
    ]


def _head(result: PlanHead) -> list[str]:
    model, gpu = result["model"], result["gpu"]
    rate = "" if gpu["bytes_per_second"] is None else f", {gpu['bytes_per_second'] / 1e9:,.0f} GB/s"
    server = "" if result["serve"] is None else ", served by vLLM on the GPU"
    whole = model["parameters"] is not None and model["weights_bytes"] in (
        2 * model["parameters"],
        4 * model["parameters"],
    )
    form = f"in {model['dtype']}" if whole else "as given" if model["parameters"] is None else "as stored"
    return [
        f"{model['name']}: weights {model['weights_bytes'] / 2**30:.2f} GiB {form}, at most "
        f"{model['context']:,} tokens",
        f"{gpu['title']}{', asked' if gpu['asked'] else ''}: {gpu['memory_bytes'] / 2**30:.2f} GiB for programs{rate}",
        f"planned: {result['batch']:,} x {result['context']:,} tokens{server}; every figure is projected",
        "",
    ]


def _foot(result: PlanResult) -> list[str]:
    rows, assumed = result["rows"], result["assumed"]
    rate = "tokens/s: of all rows that are planned; behind batch: of as many rows as fit"
    lines = ["", f"longest, batch: with prompts fed {assumed['chunk_tokens']:,} tokens at a time", rate]
    if any(row["fits"] == "in chunks" for row in rows):
        lines.append(_chunks_line(result))
    if any(row["prefill_seconds"] is not None for row in rows):
        lines.append(_prompt_line(assumed))
    lines += _kl_lines(rows, assumed["kl_models"])
    if result["gpu"]["bytes_per_second"] is None:
        lines.append("tokens/s: give --bandwidth, as 1008GB/s")
    elif slow := [row["scheme"] for row in rows if row["fits"] != "no" and row["tokens_per_second"] is None]:
        lines.append(f"tokens/s of {', '.join(slow)}: {_why_no_speed(result['gpu'])}")
    if result["gpu"]["no_kernels"] is not None:
        lines.append(f"no fused kernel runs there: {result['gpu']['no_kernels']}")
    if result["assumed"]["memory_of_the_system_counted"] is False:
        lines.append("a Jetson's memory is the system's too: what that takes is not counted")
    return [*lines, "vLLM serves fewer schemes on a GPU: the same command with --serve vllm names them"]


def _why_no_speed(gpu: CardRecord) -> str:
    if gpu["name"] == "given":
        return "only for cards with a profile (--gpu)"
    if gpu["flops"] is None:
        return "not known without the card's rate of 16-bit products, or no kernel of it was timed"
    return "no kernel of it was timed"


def _chunks_line(result: PlanResult) -> str:
    """What it means that a row fits in chunks only: how the prompt is fed, and how fast its two ways are."""
    assumed = result["assumed"]
    eager = 1 / (result["model"]["layers"] * assumed["eager_seconds_a_layer"])
    return (
        f"chunks: fits only where the prompt is fed {assumed['chunk_tokens']:,} tokens at a time. tokens/s is of your "
        "own loop over chunks, then generate(); generate(prefill_chunk_size=…) alone makes at most "
        f"{significant(eager)} a row"
    )


def _prompt_line(assumed: Assumed) -> str:
    """What the time of a prompt rests on."""
    return (
        f"prompt: seconds to prefill, its operations at {assumed['prompt_products_at']:.0%} of the card's sheet, as "
        f"measured on {assumed['prompt_measured_on']}; counted in are {assumed['packed_prompt_times']:.2f} times where "
        f"packed, {assumed['prompt_in_chunks_times']:.1f} times in chunks"
    )


def _kl_lines(rows: Sequence[Row | PagedRow], models: Mapping[str, MeasuredModel]) -> Iterator[str]:
    """Lines that name the models on which the KL was measured, of which architecture they are, and over how many
    tokens.
    """
    alike = dict.fromkeys(row["kl_model"] for row in rows if row["kl_same_architecture"] and row["kl_model"])
    if alike:
        yield f"KL: nats per token as measured on {', '.join(alike)}, of the same architecture"
    others: dict[str, list[str]] = {}
    for row in rows:
        if row["kl_same_architecture"] is False and row["kl_model"] is not None:
            others.setdefault(row["kl_model"], []).append(row["scheme"])
    for model, schemes in others.items():
        yield f"KL of {', '.join(schemes)}: as measured on {model}, the worst of other architectures"
    lengths = {models[row["kl_model"]]["length"] for row in rows if row["kl_model"]}
    if lengths:
        tokens = " or ".join(f"{length:,}" for length in sorted(lengths))
        yield f"KL is of windows of {tokens} tokens and grows with length; yours: kvcal eval --length N"


def _foot_of_pages(result: ServedPlan) -> Iterator[str]:
    assumed = result["assumed"]
    yield ""
    yield (
        f"tokens in vLLM: an estimate, of all requests together; {assumed['gpu_memory_utilization']} of the card "
        f"without weights, {assumed['runtime_bytes'] / 1e9:.1f} GB of runtime and a step of "
        f"{assumed['max_num_batched_tokens']:,} tokens (docs/plan.md)"
    )
    yield f"requests: of {result['context']:,} tokens (--max-model-len); fp8: vLLM's own cache, without the plug-in"
    yield "KL: every token packed, as the server does; tokens/s are not projected (docs/guides/vllm.md)"
    yield from _kl_lines(result["rows"], assumed["kl_models"])
    reasons: dict[str, list[str]] = {}
    for scheme, why in result["refused"].items():
        reasons.setdefault(why, []).append(scheme)
    for why, schemes in reasons.items():
        yield f"not served: {', '.join(schemes)}: {why}"


def _recommendation(result: PlanResult | ServedPlan, wide: bool) -> None:
    """The command to run, and why that scheme; or why there is none."""
    best = next((row for row in result["rows"] if row["scheme"] == result["recommended"]), None)
    if best is None or best["next"] is None:
        wrapped(f"recommended: {_nothing(result)}", indent="    ", wide=wide)
        return
    command_line(shlex.split(best["next"]), before="recommended: ", wide=wide)
    wrapped(f"why {best['scheme']}: {result['recommended_why']}", indent="    ", wide=wide)


def _nothing(result: PlanResult | ServedPlan) -> str:
    """What to do where no scheme is recommended: the budget that the best of those that fit needs."""
    fitting = [
        (row["kl_upper"], row["scheme"])
        for row in result["rows"][1:]
        if _fits(row, result["batch"]) and row["kl_upper"] is not None
    ]
    if not fitting and "refused" in result and result["refused"] and len(result["rows"]) == 1:
        return "none, vLLM serves none of these schemes: leave --preset out"
    unknown = [row["scheme"] for row in result["rows"][1:] if _fits(row, result["batch"]) and row["kl_upper"] is None]
    if not fitting and unknown:
        return f"none, the KL of {', '.join(unknown)} was not measured: kvcal eval measures it on your model"
    if not fitting:
        return "none, no scheme fits that was measured: less --context or --batch, or a smaller model"
    upper, scheme = min(fitting, key=lambda pair: pair[0])
    unit = 10 ** (math.floor(math.log10(upper)) - 1) if upper > 0 else 1.0
    return (
        f"none; of what fits {scheme} has the lowest KL, up to {significant(upper)}: "
        f"--budget-kl {math.ceil(upper / unit) * unit:.2g} takes it"
    )


def _fits(row: Row | PagedRow, batch: int) -> bool:
    return row["requests"] >= batch if "requests" in row else row["fits"] != "no"
