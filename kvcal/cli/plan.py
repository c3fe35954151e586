"""`kvcal plan`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvcal.cli.output import line, note, on_stdout, print_json, print_table, wrapped
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import PlanOptions
from kvcal.report.quantities import significant

if TYPE_CHECKING:
    from kvcal.bench.planning.projection import Row
    from kvcal.commands.plan import Assumed, PlanResult


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
    if o.wide:
        print_table(WIDE, [_wide(row) for row in result["rows"]], wide=True)
    else:
        print_table(COLUMNS, [_cells(row) for row in result["rows"]])
        line()
        print_table(["scheme", "next"], [[row["scheme"], row["next"]] for row in result["rows"] if row["next"]])
    with on_stdout():
        for text in _foot(result):
            wrapped(text, indent="    ", wide=o.wide)
        best = next((row for row in result["rows"] if row["scheme"] == result["recommended"]), None)
        if best is None:
            wrapped(f"recommended: {_nothing(result)}", indent="    ", wide=o.wide)
        else:
            line(f"recommended: {best['next']}")
            wrapped(f"why {best['scheme']}: {result['recommended_why']}", indent="    ", wide=o.wide)


COLUMNS = ["scheme", "× smaller", "fits", "longest", "batch", "prompt", "tokens/s", "KL"]
WIDE = [
    "scheme", "bits/value", "× smaller", "fits", "longest", "longest, prompt whole", "batch", "prompt", "tokens/s",
    "KL", "KL class", "KL of", "cache GiB", "decode peak GiB", "prefill peak GiB", "step", "next",
]  # fmt: skip


def _cells(row: Row) -> list[str | None]:
    speed = None if row["fits"] == "no" else row["tokens_per_second"]
    return [
        row["scheme"],
        significant(row["times_smaller"]),
        row["fits"],
        f"{row['longest_context']:,}",
        f"{row['largest_batch']:,}",
        None if row["prefill_seconds"] is None else f"{significant(row['prefill_seconds'])} s",
        None if speed is None else significant(speed),
        "not measured" if row["kl"] is None else significant(row["kl"]),
    ]


def _wide(row: Row) -> list[str | None]:
    cells = _cells(row)
    peaks = [f"{row[name] / 2**30:.2f}" for name in ("cache_bytes", "decode_peak_bytes", "prefill_peak_bytes")]
    whole = f"{row['longest_context_whole_prompt']:,}"
    first = [cells[0], f"{row['bits']:.2f}", *cells[1:4], whole]
    rest = [row["kl_class"], row["kl_model"], *peaks]
    return [*first, *cells[4:], *rest, row["step"], row["next"]]


def _head(result: PlanResult) -> list[str]:
    model, gpu = result["model"], result["gpu"]
    rate = "" if gpu["bytes_per_second"] is None else f", {gpu['bytes_per_second'] / 1e9:,.0f} GB/s"
    return [
        f"{model['name']}: weights {model['weights_bytes'] / 2**30:.2f} GiB in {model['dtype']}, at most "
        f"{model['context']:,} tokens",
        f"{gpu['title']}{', asked' if gpu['asked'] else ''}: {gpu['memory_bytes'] / 2**30:.2f} GiB for programs{rate}",
        f"planned: {result['batch']:,} x {result['context']:,} tokens; every figure is projected",
        "",
    ]


def _foot(result: PlanResult) -> list[str]:
    rows, chunk = result["rows"], result["assumed"]["chunk_tokens"]
    lines = ["", f"in chunks: prompts fed {chunk:,} tokens at a time; longest and batch are so too", *_kl_lines(rows)]
    if any(row["prefill_seconds"] is not None for row in rows):
        lines.insert(2, _prompt_line(result["assumed"]))
    if result["gpu"]["bytes_per_second"] is None:
        lines.append("tokens/s: give --bandwidth, as 1008GB/s")
    elif slow := [row["scheme"] for row in rows if row["fits"] != "no" and row["tokens_per_second"] is None]:
        lines.append(f"tokens/s of {', '.join(slow)}: only for cards with a profile (--gpu)")
    if result["gpu"]["no_kernels"] is not None:
        lines.append(f"no fused kernel runs there: {result['gpu']['no_kernels']}")
    if result["assumed"]["memory_of_the_system_counted"] is False:
        lines.append("a Jetson's memory is the system's too: what that takes is not counted")
    return lines


def _prompt_line(assumed: Assumed) -> str:
    """What the time of a prompt rests on."""
    return (
        f"prompt: seconds to prefill, its operations at {assumed['prompt_products_at']:.0%} of the card's sheet, as "
        f"measured on {assumed['prompt_measured_on']}; "
        f"{assumed['packed_prompt_times']:.2f} times as long where packed, "
        f"{assumed['prompt_in_chunks_times']:.1f} times in chunks"
    )


def _kl_lines(rows: list[Row]) -> Iterator[str]:
    """Lines that name the models on which the KL was measured, and of which architecture they are."""
    alike = dict.fromkeys(row["kl_model"] for row in rows if row["kl_same_architecture"] and row["kl_model"])
    if alike:
        yield f"KL: nats per token as measured on {', '.join(alike)}, of the same architecture; yours: kvcal eval"
    others: dict[str, list[str]] = {}
    for row in rows:
        if row["kl_same_architecture"] is False and row["kl_model"] is not None:
            others.setdefault(row["kl_model"], []).append(row["scheme"])
    for model, schemes in others.items():
        yield f"KL of {', '.join(schemes)}: as measured on {model}, the worst of other architectures"


def _nothing(result: PlanResult) -> str:
    """What to do where no scheme is recommended: the budget that the best of those that fit needs."""
    fitting = [
        (row["kl_upper"], row["scheme"])
        for row in result["rows"][1:]
        if row["fits"] != "no" and row["kl_upper"] is not None
    ]
    if not fitting:
        return "none, no scheme fits that was measured: less --context or --batch, or a smaller model"
    upper, scheme = min(fitting, key=lambda pair: pair[0])
    unit = 10 ** (math.floor(math.log10(upper)) - 1) if upper > 0 else 1.0
    return (
        f"none; of what fits {scheme} has the lowest KL, up to {significant(upper)}: "
        f"--budget-kl {math.ceil(upper / unit) * unit:.2g} takes it"
    )
