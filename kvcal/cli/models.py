"""`kvcal models`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcal.cli.output import print_json, print_table
from kvcal.cli.signature import Typed, command
from kvcal.pipeline.spec import Options

if TYPE_CHECKING:
    from kvcal.models.catalogue import ModelRow

COLUMNS = [
    "model",
    "parameters",
    "layers",
    "hidden",
    "kv heads",
    "head dim",
    "context",
    "KiB/token",
    "hub id",
]
NARROW = [column for column in COLUMNS if column not in ("hidden", "hub id")]


@command(Options, light=True)
def models(o: Options, typed: Typed) -> None:
    """List the models known by a short name, with their geometry.

    KiB/token is the cache at 16 bits, all layers. --wide adds hidden size and hub id, --json more.
    """
    from kvcal.models.catalogue import models_table

    rows = models_table()
    if o.json:
        print_json({"models": rows})
    else:
        cells = [dict(zip(COLUMNS, _cells(row), strict=True)) for row in rows]
        shown = COLUMNS if o.wide else NARROW
        print_table(shown, [[row[column] for column in shown] for row in cells], wide=o.wide)


def _cells(row: ModelRow) -> list[str | None]:
    size = row["parameters"]
    parameters = f"{size / 1e9:.1f}B" if size >= 1e9 else f"{size / 1e6:.0f}M"
    counts = (row["layers"], row["hidden"], row["kv_heads"], row["head_dim"], row["context"])
    geometry = [f"{count:,}" for count in counts]
    return [row["name"], parameters, *geometry, f"{row['kv_bytes_per_token'] / 1024:g}", row["hub_id"]]
