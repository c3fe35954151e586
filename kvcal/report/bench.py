"""Tables of `kvcal bench`: title, columns, rows, ready to print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Found = dict[str, Any]
TABLE_4 = "innerq-table-4 "


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: list[list[str]]


def tables(result: Found) -> Iterator[Table]:
    """All rows of run_bench, grouped as they are read."""
    rows: list[Found] = result["rows"]
    paper = [row for row in rows if row["operation"].startswith(TABLE_4)]
    if paper:
        yield from _table_4(paper)
    rest = [row for row in rows if not row["operation"].startswith(TABLE_4)]
    timed = [row for row in rest if row["operation"] != "longest-generation" and not _hidden(row)]
    if timed:
        yield _timed(timed)
    longest = [row for row in rest if row["operation"] == "longest-generation"]
    if longest:
        yield _longest(longest)
    if result.get("compared"):
        yield _compared(result["compared"])


def rates(result: Found) -> Iterator[str]:
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


def _hidden(row: Found) -> bool:
    """A backend of torch that does not run here: said in --json, no line of a table."""
    return row["operation"] == "decode-attention" and row["microseconds"] is None and not row["projected"]


def _number(value: float | None, digits: int = 1) -> str | None:
    return None if value is None else f"{value:,.{digits}f}"


def said(row: Found) -> str:
    return "projected" if row["projected"] else "measured"


def _timed(rows: list[Found]) -> Table:
    columns = ["operation", "scheme", "batch", "length", "µs", "bits", "of copy", "× FP16", "", "how", "remark"]
    table_rows = []
    for row in rows:
        remarks = [row["refused"] or "", _remark(row)]
        table_rows.append(
            [
                row["operation"],
                row["scheme"],
                row["batch"],
                row["length"],
                _number(row["microseconds"]),
                _number(row["stored_bits"], 2),
                _number(row["fraction_of_copy"], 3),
                _number(row["ratio_to_fp16"], 2),
                said(row),
                row["path"].removeprefix("projected: "),
                "; ".join(filter(None, remarks)),
            ]
        )
    models = ", ".join(dict.fromkeys(str(row["model"]) for row in rows))
    places = ", ".join(dict.fromkeys(str(row["device"]) for row in rows))
    title = f"{models} on {places}, {' and '.join(dict.fromkeys(map(said, rows)))}"
    return Table(title + _by_torch(rows), columns, table_rows)


def _by_torch(rows: list[Found]) -> str:
    """Which papers' tables the rows have times of torch for, where the papers' are of kernels."""
    tables = [row["paper_table"] for row in rows if row.get("paper_table") and row["path"].startswith("reference")]
    if not tables:
        return ""
    return f"; of {' and '.join(dict.fromkeys(tables))}, rows of reference are torch's times, no kernel's"


def _remark(row: Found) -> str:
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
            parts.append(form.format(row[key]))
    if (row.get("queries") or 1) > 1:
        parts.append(f"{row['queries']} new tokens a call")
    if row.get("peak_bytes"):
        parts.append(f"peak {row['peak_bytes'] / 2**30:.2f} GiB")
    return ", ".join(parts)


def _table_4(rows: list[Found]) -> Iterator[Table]:
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    columns = ["part", "scheme", "bits", *map(str, lengths), ""]

    def table(title: str, cell: str, parts: Sequence[str]) -> Table:
        lines = []
        for part in parts:
            for scheme in dict.fromkeys(row["scheme"] for row in rows):
                of_part = [row for row in rows if row["scheme"] == scheme and row["operation"] == TABLE_4 + part]
                cells = [cell.format(**row) for row in of_part]
                paper = f" (paper {of_part[0]['paper_bits']:g})" if "paper_bits" in of_part[0] else ""
                lines.append([part, scheme, f"{of_part[0]['stored_bits']:g}{paper}", *cells, "projected"])
        return Table(title, columns, lines)

    every = ("K", "V", "total")
    yield table(
        "InnerQ Table 4, Jetson Xavier NX, one layer of Llama-3.1-8B: paper's µs | projected from stored bytes",
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


def _longest(rows: list[Found]) -> Table:
    table_rows = [
        [
            row["scheme"],
            row["batch"],
            _number(row["stored_bits"], 2),
            f"{row['memory_gib']:g}",
            f"{row['longest_length']:,}",
            said(row),
            row["path"].removeprefix("projected: "),
            row["refused"] or (f"paper {row['paper_longest']:,}" if "paper_longest" in row else ""),
        ]
        for row in rows
    ]
    return Table(
        f"longest generation of {rows[0]['model']}",
        ["scheme", "batch", "bits", "GiB", "tokens", "", "how", "remark"],
        table_rows,
    )


def _compared(rows: list[Found]) -> Table:
    table_rows = [
        [
            row["operation"],
            row["scheme"],
            row["batch"],
            row["length"],
            row["path"],
            _number(row["earlier"]),
            _number(row["now"]),
            _number(row["times_as_fast"], 2),
            said(row),
        ]
        for row in rows
    ]
    columns = ["operation", "scheme", "batch", "length", "how", "earlier µs", "now µs", "times as fast", ""]
    return Table("compared with the earlier file", columns, table_rows)
