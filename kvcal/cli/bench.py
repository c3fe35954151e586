"""`kvcal bench` and `kvcal doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.cli.options import Bundles, Json, RequireKernels, Resume, Revision, said_of
from kvcal.cli.output import line, note, on_stdout, print_json, print_table

Names = Annotated[
    list[str] | None,
    typer.Option(
        "--preset",
        "-p",
        help="A preset, another shape (`kvcal names`), or KEYCODEC+VALUECODEC; repeatable.",
    ),
]
Operations = Annotated[
    list[str] | None,
    typer.Option(
        "--operation", "-o", help="Operation or paper table (`kvcal names operation`); repeatable. Default: kernels."
    ),
]


def bench(
    context: typer.Context,
    device: Annotated[
        str,
        typer.Option(help="auto, cpu, cuda, jetson, or a profile as jetson-orin-nano: projected where it is not here."),
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Whose geometry; no weights are read. Default: llama-3.1-8b; tiny for `generate` on a CPU.",
        ),
    ] = None,
    revision: Revision = None,
    preset: Names = None,
    bundle: Bundles = None,
    operation: Operations = None,
    batch: Annotated[str | None, typer.Option(help="Rows, as 1,8,32.")] = None,
    length: Annotated[
        str | None, typer.Option(help="Cached tokens, as 512,4k,32k; k is 1024, no other suffix.")
    ] = None,
    queries: Annotated[int, typer.Option(min=1, max=16, help="New tokens of a call: decode attention, append.")] = 1,
    sink: Annotated[int | None, typer.Option(min=0, help="First tokens kept exact. Default: 32.")] = None,
    recent: Annotated[int | None, typer.Option(min=0, help="Newest tokens kept exact. Default: 96.")] = None,
    dtype: Annotated[str, typer.Option(help="Of windows, queries and peers: float16, bfloat16, float32.")] = "auto",
    memory: Annotated[
        float | None, typer.Option(help="GiB that largest-batch and longest-generation may fill.")
    ] = None,
    require_kernels: RequireKernels = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of an operation, at most.")] = 50,
    seconds: Annotated[float, typer.Option(help="Seconds for timing an operation, at most.")] = 2.0,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of the random data and weights.")] = 0,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the rows there too.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw times against tokens, a .png, .svg or .pdf.")
    ] = None,
    compare: Annotated[Path | None, typer.Option("--compare", help="A file that --json printed earlier.")] = None,
    resume: Resume = True,
    json: Json = False,
) -> None:
    """Measure kernels and generation of any scheme on random data; project them for devices that are not here.

    After a kill the same command goes on behind the last batch and length of kernels, or scheme of a whole model, that
    it measured.
    """
    options: dict[str, Any] = {name: value for name, value in locals().items() if name != "context"}
    from kvcal.commands.bench import run_bench

    run_bench(options, note, print_json if json else _print_bench, said_of(context))


def _print_bench(result: dict[str, Any]) -> None:
    from kvcal.report.bench import rates, tables

    if result.get("why_projected"):
        note("projected: " + "; ".join(filter(None, (result[k] for k in ("why_projected", "assumed", "paper_device")))))
    with on_stdout():
        if result.get("assumed"):
            line(
                f"projected with bandwidth efficiency {result['efficiency']:.3f} and launch "
                f"{result['launch_microseconds']:.2f} µs, fitted on InnerQ's FP16 totals at 1024 and 16384 tokens only"
            )
        for rate in rates(result):
            line(rate)
        for table in tables(result):
            print_table(table.columns, table.rows, title=table.title)
            line()


def doctor(json: Json = False) -> None:
    """What this machine has, and which kernels would run on it, or why not."""
    from kvcal.commands.doctor import run_doctor

    facts = run_doctor()
    if json:
        print_json(facts)
        return
    for name, value in facts["machine"].items():
        line(f"{name}: {value if value is not None else 'none'}")
    for row in facts["kernels"]:
        line(f"kernel {row['kernel']}: {'runs' if row['runs'] else 'does not run'}: {row['why']}")
    checked = facts["preflight"]
    line(f"kernels checked on first use: {len(checked['verdicts'])} in {checked['file']}")
    for name, why in checked["verdicts"].items():
        line(f"  {'passes' if why is None else f'fails, {why}'}: {name}")
    if any(checked["verdicts"].values()):
        line("  to have those that fail tried again delete that file")
