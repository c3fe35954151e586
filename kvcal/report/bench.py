"""Tables of `kvcal bench`: title, columns, rows, ready to print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from .quantities import quantity, significant, written

TABLE_4 = "innerq-table-4 "


class BenchRow(TypedDict, total=False):
    """A row of `kvcal bench`, as kvcal.bench.rows.Row and its remarks have it: times in µs, rates in GB/s."""

    operation: str
    scheme: str
    model: str
    device: str
    batch: int
    length: int
    path: str
    microseconds: float | None
    stored_bits: float | None
    fraction_of_copy: float | None
    ratio_to_fp16: float | None
    projected: bool
    refused: str | None
    queries: int | None
    peak_bytes: int | None
    paper_table: str
    paper_bits: float
    paper_microseconds: float
    paper_device: str
    paper_longest: int


class Compared(TypedDict):
    """A row next to that of an earlier file. earlier, now: µs; times_as_fast: the first over the second."""

    operation: str
    scheme: str
    batch: int
    length: int
    path: str
    earlier: float | None
    now: float | None
    times_as_fast: float | None
    projected: bool


@dataclass(frozen=True)
class Table:
    """A table to be printed. keys: how many of its columns name a row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | int | None]]
    keys: int = 1


def tables(result: Mapping[str, Any], wide: bool = False) -> Iterator[Table]:
    """All rows of run_bench, grouped as they are read. wide: with all columns and digits."""
    rows: list[BenchRow] = result["rows"]
    paper = [row for row in rows if row["operation"].startswith(TABLE_4)]
    if paper:
        yield from _table_4(paper, wide)
    rest = [row for row in rows if not row["operation"].startswith(TABLE_4)]
    timed = [row for row in rest if row["operation"] != "longest-generation" and not _hidden(row)]
    if timed:
        yield _timed(timed, wide)
    longest = [row for row in rest if row["operation"] == "longest-generation"]
    if longest:
        yield _longest(longest, wide)
    if result.get("compared"):
        yield _compared(result["compared"], wide)


def rates(result: Mapping[str, Any]) -> Iterator[str]:
    """What the rows' `of copy` is of: the device's rates in this run, and those of runs before it that measured some
    rows.
    """
    if result.get("copy_gb_per_s"):
        yield (
            f"measured in this run: copy {result['copy_gb_per_s']:.1f} GB/s read and written, read "
            f"{result['read_gb_per_s']:.1f} GB/s"
        )
    if result.get("resumed_copy_gb_per_s"):
        copies = ", ".join(f"{rate:.1f}" for rate in result["resumed_copy_gb_per_s"])
        rows = result["resumed_rows"]
        yield f"{rows} rows are of a run before this one, beside its copy: {copies} GB/s read and written"


def _hidden(row: BenchRow) -> bool:
    """A backend of torch that does not run here: in --json, but no line of a table."""
    return row["operation"] == "decode-attention" and row["microseconds"] is None and not row["projected"]


def origin_of(row: BenchRow | Compared) -> str:
    return "projected" if row["projected"] else "measured"


TIMED = ("operation", "scheme", "batch", "length", "microseconds", "stored_bits", "fraction_of_copy", "ratio_to_fp16")


def _timed(rows: list[BenchRow], wide: bool) -> Table:
    """How a row was timed, and whether that was measured or projected, stand in each line with --wide alone; the
    heading says it where it is the same in all rows.
    """
    kinds = list(dict.fromkeys(map(origin_of, rows)))
    mixed = wide or len(kinds) > 1
    heads = [quantity(name).name for name in TIMED]
    heads[TIMED.index("microseconds")] = "µs" if mixed else f"{kinds[0]} µs"
    columns = [*heads, *([""] if mixed else []), *(["how"] if wide else []), "remark"]
    table_rows = []
    for row in rows:
        cells: list[str | None] = [written(name, row.get(name), whole=wide) for name in TIMED]
        cells += [origin_of(row)] if mixed else []
        cells += [row["path"].removeprefix("projected: ")] if wide else []
        table_rows.append([*cells, "; ".join(filter(None, [row["refused"] or "", _remark(row)]))])
    [remark, *others] = dict.fromkeys(row[-1] for row in table_rows)
    once = not wide and not others and len(rows) > 1  # a remark that all rows share stands in the title
    if once:
        columns, table_rows = columns[:-1], [row[:-1] for row in table_rows]
    models = ", ".join(dict.fromkeys(str(row["model"]) for row in rows))
    places = ", ".join(dict.fromkeys(str(row["device"]) for row in rows))
    title = f"{models} on {places}, {' and '.join(kinds)}"
    title += f"; {remark}" if remark and once else ""
    return Table(title + _by_torch(rows), columns, table_rows, keys=2)


def _by_torch(rows: list[BenchRow]) -> str:
    """Which papers' tables the rows have times of torch for, where the papers' are of kernels."""
    tables = [row["paper_table"] for row in rows if row.get("paper_table") and row["path"].startswith("reference")]
    if not tables:
        return ""
    return f"; of {' and '.join(dict.fromkeys(tables))}, rows of reference are torch's times, no kernel's"


def _remark(row: BenchRow) -> str:
    parts = []
    if "paper_microseconds" in row:
        parts.append(f"paper {row['paper_microseconds']:g} ({row['paper_device']})")
    for key, form in (
        ("bound", "limit: {}"),
        ("fraction_of_matmul", "{:.0%} of matmul"),
        ("symmetric_percent", "{:g} % symmetric"),
        ("share_percent", "{:.1f} % of the layer"),
        ("paper_share_percent", "paper {:g} %"),
        ("calls", "{}"),
        ("tokens_per_second", "{:,.1f} tokens/s"),
        ("largest_batch", "batch {}"),
        ("batch_to_fp16", "{:.2f} × FP16's"),
        ("throughput_to_fp16", "throughput {:.2f} × FP16's"),
        ("no_graph", "no graph: {}"),
        ("note", "{}"),
        ("made_up", "{}"),
    ):
        if row.get(key) is not None:
            parts.append(form.format(row.get(key)))
    if (queries := row.get("queries") or 1) > 1:
        parts.append(f"{queries} new tokens a call")
    if peak := row.get("peak_bytes"):
        parts.append(f"peak {peak / 2**30:.2f} GiB")
    return ", ".join(parts)


def _table_4(rows: list[BenchRow], wide: bool) -> Iterator[Table]:
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    columns = ["part", "scheme", "bits/value", *map(str, lengths), *([""] if wide else [])]

    def table(title: str, cell: str, parts: Sequence[str]) -> Table:
        lines = []
        for part in parts:
            for scheme in dict.fromkeys(row["scheme"] for row in rows):
                of_part = [row for row in rows if row["scheme"] == scheme and row["operation"] == TABLE_4 + part]
                cells = [cell.format(**row) for row in of_part]
                paper = f" (paper {of_part[0]['paper_bits']:g})" if "paper_bits" in of_part[0] else ""
                lines.append(
                    [part, scheme, f"{of_part[0]['stored_bits']:g}{paper}", *cells, *(["projected"] if wide else [])]
                )
        return Table(title, columns, lines, keys=3)

    every = ("K", "V", "total")
    yield table(
        "InnerQ Table 4, Jetson Xavier NX, one layer of Llama-3.1-8B, by length: paper's µs | projected from stored "
        "bytes",
        "{paper_microseconds:.0f} | {microseconds:.0f}",
        every,
    )
    yield table(
        "what the paper's time means, launch as projected: GB/s of stored bytes | issue slots a value and query head",
        "{paper_gb_per_s:.1f} | {paper_slots_per_element:.1f}",
        every,
    )
    yield table(
        "a query head at a time | each kv head read once for its four query heads: projected µs",
        "{microseconds:.0f} | {shared_microseconds:.0f}",
        ("total",),
    )


LONGEST = ("scheme", "batch", "stored_bits", "memory_gib", "longest_length")


def _longest(rows: list[BenchRow], wide: bool) -> Table:
    table_rows = [
        [
            *(written(name, row.get(name), whole=wide) for name in LONGEST),
            origin_of(row),
            *([row["path"].removeprefix("projected: ")] if wide else []),
            row["refused"] or (f"paper {row['paper_longest']:,}" if "paper_longest" in row else ""),
        ]
        for row in rows
    ]
    columns = ["scheme", "batch", "bits/value", "GiB", "tokens", "", *(["how"] if wide else []), "remark"]
    return Table(f"longest generation of {rows[0]['model']}", columns, table_rows)


def _compared(rows: list[Compared], wide: bool) -> Table:
    table_rows = [
        [
            *(row["operation"], row["scheme"], row["batch"], row["length"]),
            *([row["path"]] if wide else []),
            *(None if time is None else f"{time:,.1f}" for time in (row["earlier"], row["now"])),
            None if row["times_as_fast"] is None else significant(row["times_as_fast"]),
            origin_of(row),
        ]
        for row in rows
    ]
    columns = ["operation", "scheme", "batch", "length", *(["how"] if wide else [])]
    columns += ["earlier µs", "now µs", "times as fast", ""]
    return Table("compared with the earlier file", columns, table_rows, keys=2)
