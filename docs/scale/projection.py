"""Time and memory of `fit aqua-kv` on GPUs that nobody has run it on, from what was measured on one, two or four.

    python docs/scale/projection.py [--measured FILE ...]  # prints the tables of docs/scale.md
    python docs/scale/projection.py --write                # and puts them there

--measured: files of docs/runs/several_gpus.py, of which a later one's parts count; by default those of docs/runs that were
made last. From them come the seconds of each phase for Llama-3.2-3B geometry on one GPU ("fit-1", of two GPUs "fit-2")
and, where it was run, for two layers of Llama-3.1-70B geometry ("70b-1"). The model, for 256 windows of 8192 tokens, two
a batch, in bfloat16:

- forward: FLOPs of the passes (`flops`), at the rate of the measured run
- encode and any phase unknown here: layers x kv width; gram: layers with predictors x kv width squared; solve: the
  same, x kv width cubed
- embed, spill: hidden size, for spill x layers
- all of these except solve are divided by ranks: the rank with the most training windows counts, and only 24 have any
- import, text: the same for all, on each rank; method: layers, on each rank; keep, write: layers with predictors x kv
  width squared, by rank 0; weights (random ones are made there): left out, see load
- load: bytes of weights once a node over `read`, and once more for the guard, which rank 0 alone runs, and which random
  weights do not have. The system may keep weights in memory, and a guard that warns reads them twice more: neither is
  in the model. Exchange: bytes of the sums that ranks send over `link` or `network`, and `meeting` for each time that
  they meet, which the run on two GPUs gives
- memory: a layer's weights, hidden states, reconstructions, and activations scaled by hidden + intermediate size
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvcal.capture.ranks import Ranks
from kvcal.capture.shards import SHARDS, Shards
from kvcal.models.catalogue import CATALOGUE
from kvcal.models.geometry import Geometry

WINDOWS, TRAIN, LENGTH, BATCH = 256, 224, 8192, 2
TOKENS = WINDOWS * LENGTH
NAMES = ("llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b")
BASE, WIDE = NAMES[0], NAMES[2]
MACHINES = ((1, 1), (1, 2), (1, 4), (1, 8), (4, 8))  # nodes, GPUs of each
PAGE = Path(__file__).resolve().parents[1] / "scale.md"
RUNS = Path(__file__).resolve().parents[1] / "runs"
MEASURED = [RUNS / "two_gpus-bc2cf7a.json", RUNS / "several_gpus-6928256b.json"]  # of 70B the first: two H200s
SPILLED_PEAK = 3_972_776_960  # bytes, one H200, `--layerwise --spill cpu`: docs/runs/scale-llama-3.2-3b.md
PAIRS = {"fit": f"fit of {BASE}", "books": f"codebooks of {BASE}", "70b": f"two layers of {WIDE}"}
FASTER, FASTER_PARTS = 1.85, ("fit", "books")  # wanted of two GPUs, for BASE
MARK, END = "<!-- projection.py -->", "<!-- end -->"
GOALS = {(1, 1): 60, (1, 8): 10}  # minutes, for 70B
UNSHARED = ("import", "text", "guard", "method", "keep", "write", "solve", "weights")  # phases that ranks do not divide


@dataclass(frozen=True)
class Assumed:
    """Bytes per second: weights from a node's disk, sums from GPU to GPU of one node, and from node to node. Seconds:
    `meeting`, of ranks that meet, wait for each other and send sums, beside the bytes; of two GPUs it is measured.

    link: at least what two H200s had. Sums took 3.9 s at cb55843f, where they were 47 GB, and 1.8 s at 5e632804, where
    they are 4.
    """

    read: float = 2e9
    link: float = 20e9
    network: float = 10e9
    meeting: float = 2e-3


@dataclass(frozen=True)
class Measured:
    """Phases, in seconds, of one GPU for a geometry, of which so many layers were run."""

    geometry: Geometry
    layers: int
    phases: Mapping[str, float]

    @property
    def passes(self) -> int:
        """Passes over the training windows that stop before attention: two for predictors, one more for factors."""
        return 3 if "moments" in self.phases else 2


def flops(geometry: Geometry, layers: int, passes: int) -> float:
    """Floating-point operations of a fit: 2 for each weight and token, 4 for each query channel and key that it meets.

    One pass of each layer is whole, except the last layer's. All windows once more, and training windows `passes` times
    more, go through the projections to queries, keys and values. A causal token meets half of the window.
    """
    query = geometry.heads * geometry.head_dim
    projections = geometry.hidden * (query + 2 * geometry.kv_width)
    rest = geometry.hidden * query + 3 * geometry.hidden * geometry.intermediate
    attention = 4 * query * LENGTH / 2
    stopped = layers * (2 * TOKENS + passes * TRAIN * LENGTH) * 2 * projections
    return stopped + max(1, layers - 1) * TOKENS * (2 * rest + attention)


def busiest(ranks: int, windows: int = WINDOWS) -> float:
    """Share of the first so many windows that the rank with the most of them has."""
    shards = [Shards(WINDOWS, BATCH, Ranks(rank, ranks), TRAIN) for rank in range(ranks)]
    return max(sum(one.stop - one.start for one in each.chunks(slice(0, windows))) for each in shards) / windows


def sums_bytes(geometry: Geometry, layers: int, ranks: int) -> float:
    """Bytes of sums that are sent: of each layer with one below it, of all training windows, float64.

    X'X, X'Y and Y'Y of keys by the keys below, and of values by the values below and this layer's keys.
    """
    width = geometry.kv_width
    one = sum((inputs + 1) ** 2 + (inputs + 1) * width + width for inputs in (width, 2 * width))
    return float(8 * one * sent(ranks) * (layers - 1))


def sent(ranks: int) -> int:
    """How many sums all ranks send after a pass over the training windows: of the longest runs that each can add."""
    shards = Shards(WINDOWS, BATCH, Ranks(0, ranks), TRAIN)
    branches = shards.branches(shards.within(slice(0, TRAIN)))
    whole = [run for run in branches if len({shards.owner(shard) for shard in run}) == 1]
    return sum(all(run == other or not set(run) < set(other) for other in whole) for run in whole)


def meetings(layers: int, passes: int) -> int:
    """How often ranks meet: after each pass of each layer, two of which go over all windows, and for its two codecs."""
    return layers * (passes + 4)


def weight_bytes(geometry: Geometry) -> float:
    return 2.0 * geometry.parameters


def layer_bytes(geometry: Geometry) -> float:
    query = geometry.heads * geometry.head_dim
    return 2.0 * geometry.hidden * (2 * query + 2 * geometry.kv_width + 3 * geometry.intermediate)


def seconds(
    geometry: Geometry, measured: Measured, nodes: int, gpus: int, assumed: Assumed, *, read: bool = True
) -> float:
    """Projected seconds of a fit. read: whether weights are read, and guarded; random ones are neither."""
    ranks = min(nodes * gpus, SHARDS)
    base, layers = measured.geometry, geometry.layers / measured.layers
    width = geometry.kv_width / base.kv_width
    hidden = geometry.hidden / base.hidden
    work = flops(geometry, geometry.layers, measured.passes) / flops(base, measured.layers, measured.passes)
    fitted = (geometry.layers - 1) / (measured.layers - 1)  # the first layer has no predictors
    bundle = fitted * width**2
    scale = {"forward": work, "gram": bundle, "embed": hidden, "spill": hidden * layers, "load": 0.0, "exchange": 0.0,
             "import": 1.0, "text": 1.0, "guard": 1.0, "method": layers, "keep": bundle, "write": bundle,
             "solve": fitted * width**3, "weights": 0.0}  # fmt: skip
    parts = {name: scale.get(name, layers * width) * each for name, each in measured.phases.items()}
    unshared = sum(each for name, each in parts.items() if name in UNSHARED)
    total = busiest(ranks, TRAIN) * (sum(parts.values()) - unshared) + unshared
    total += 2 * weight_bytes(geometry) / assumed.read if read else 0.0
    if ranks > 1:
        total += sums_bytes(geometry, geometry.layers, ranks) / (assumed.link if nodes == 1 else assumed.network)
        total += meetings(geometry.layers, measured.passes) * assumed.meeting
    return total


@dataclass(frozen=True)
class Memory:
    """Bytes: on a GPU with `--layerwise`, on one with `--spill cpu` too, and what that puts into host memory."""

    device: float
    spilled_device: float
    host: float


def memory(geometry: Geometry, peak: float, nodes: int, gpus: int) -> Memory:
    """peak: bytes measured on one GPU for BASE with `--layerwise --spill cpu`."""
    base = CATALOGUE[BASE].geometry
    ranks = min(nodes * gpus, SHARDS)
    wider = (geometry.hidden + geometry.intermediate) / (base.hidden + base.intermediate)
    spilled = layer_bytes(geometry) + (peak - layer_bytes(base)) * wider
    states = 2.0 * TOKENS * (geometry.hidden + 2 * geometry.kv_width)
    return Memory(spilled + busiest(ranks) * states, spilled, states)


def read(paths: Sequence[Path]) -> tuple[dict[str, Any], dict[str, Measured]]:
    """The parts of all files, and the phases by geometry: those of 70B from its two layers where they are there."""
    found: dict[str, Any] = {}
    for path in paths:
        found |= json.loads(path.read_text("utf-8"))
    by_name = {name: Measured(CATALOGUE[BASE].geometry, CATALOGUE[BASE].geometry.layers, _ok(found, "fit-1")["phases"])
               for name in NAMES}  # fmt: skip
    if found.get("70b-1", {}).get("ok"):
        by_name[WIDE] = Measured(CATALOGUE[WIDE].geometry, 2, found["70b-1"]["phases"])
    return found, by_name


def _ok(found: Mapping[str, Any], part: str) -> Any:
    if not found.get(part, {}).get("ok"):
        raise SystemExit(f"projection.py: {part} is missing, or failed: run docs/runs/several_gpus.py --only {part}")
    return found[part]


def tables(paths: Sequence[Path], assumed: Assumed) -> list[str]:
    """Lines of Markdown."""
    found, by_name = read(paths)
    two = found.get("fit-2", {})
    source = "assumed"
    if two.get("ok") and two["phases"].get("exchange"):
        base = by_name[BASE]
        waited = two["phases"]["exchange"] - sums_bytes(base.geometry, base.layers, 2) / assumed.link
        assumed = replace(assumed, meeting=waited / meetings(base.layers, base.passes))
        source = "measured on two GPUs"
    lines = [
        "| geometry | " + " | ".join(_machine(*one) for one in MACHINES) + " |",
        "|---" * (len(MACHINES) + 1) + "|",
    ]
    for name in NAMES:
        cells = [_cell(found, name, by_name[name], *one, assumed) for one in MACHINES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        f"Measured: {', '.join(f'[{path.name}](runs/{path.name})' for path in paths)}. "
        f"Each time that ranks meet takes {assumed.meeting * 1e3:.1f} ms beside the bytes ({source}). "
        f"Assumed are {assumed.read / 1e9:.1f} GB/s of each node's disk, and for sums {assumed.link / 1e9:.1f} GB/s in a "
        f"node and {assumed.network / 1e9:.1f} between nodes.",
    ]
    lines.append("")
    for (nodes, gpus), goal in GOALS.items():
        minutes = seconds(CATALOGUE[WIDE].geometry, by_name[WIDE], nodes, gpus, assumed) / 60
        verdict = "within it" if minutes <= goal else "missed"
        lines.append(
            f"- {WIDE}, GPUs: {_machine(nodes, gpus)}. Projected {minutes:.1f} minutes, goal {goal}: {verdict}."
        )
    for gpus in (2, 4):  # one GPU is where the model's seconds are from
        if (part := found.get(f"fit-{gpus}", {})).get("ok"):
            model = seconds(by_name[BASE].geometry, by_name[BASE], 1, gpus, assumed, read=False)
            lines.append(f"- {BASE}, GPUs: {gpus}. Measured {part['seconds']:.0f} s, by the model {model:.0f} s.")
    return [*lines, *_pairs(found), "", *_memory_table(found, SPILLED_PEAK)]


def _pairs(found: Mapping[str, Any]) -> list[str]:
    """What two and four GPUs measured beside one, of the whole command and of the phases that ranks divide."""
    lines = []
    for (gpus, word), (part, what) in itertools.product({2: "Two", 4: "Four"}.items(), PAIRS.items()):
        one, more = found.get(f"{part}-1", {}), found.get(f"{part}-{gpus}", {})
        if one.get("ok") and more.get("ok"):
            faster = one["seconds"] / more["seconds"]
            phases = _divided(one) / _divided(more)
            judged = gpus == 2 and part in FASTER_PARTS
            goal = f" Goal {FASTER}: {'met' if faster >= FASTER else 'missed'}." if judged else ""
            lines.append(
                f"- {word} GPUs beside one, {what}: measured {faster:.3f} times as fast; {phases:.2f} in phases that "
                f"ranks divide.{goal}"
            )
    return lines


def _divided(part: Mapping[str, Any]) -> float:
    """Seconds of the phases that ranks divide, with what they wait for each other."""
    return sum(float(each) for name, each in part["phases"].items() if name not in UNSHARED)


def _memory_table(found: Mapping[str, Any], peak: float) -> list[str]:
    """Gigabytes; bold ones were measured: `peak`, and those of two layers of 70B, which 80 need as well."""
    machines = " | ".join(_machine(*one) for one in MACHINES)
    lines = [
        f"| geometry | {machines} | a GPU with `--spill cpu` too | spilled, all nodes |",
        "|---" * (len(MACHINES) + 3) + "|",
    ]
    for name in NAMES:
        every = [memory(CATALOGUE[name].geometry, peak, *one) for one in MACHINES]
        cells = [f"{one.device / 1e9:.0f}" for one in every]
        for gpus in (1, 2, 4):
            part = found.get(f"70b-{gpus}", {})
            if name == WIDE and part.get("ok"):
                cells[MACHINES.index((1, gpus))] = f"**{part['peak_device_bytes'] / 1e9:.0f}**"
        spilled = f"{every[0].spilled_device / 1e9:.1f}"
        cells += [f"**{spilled}**" if name == BASE else spilled, f"{every[0].host / 1e9:.0f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _machine(nodes: int, gpus: int) -> str:
    return f"{nodes} × {gpus}" if nodes > 1 else f"{gpus}"


def _cell(found: Mapping[str, Any], name: str, measured: Measured, nodes: int, gpus: int, assumed: Assumed) -> str:
    """Measured seconds in bold; others projected."""
    part = found.get(f"fit-{gpus}", {})
    if name == BASE and nodes == 1 and part.get("ok"):
        return f"**{_time(part['seconds'])}**"
    return f"{_time(seconds(CATALOGUE[name].geometry, measured, nodes, gpus, assumed))} projected"


def _time(value: float) -> str:
    return f"{value:.0f} s" if value < 300 else f"{value / 60:.0f} min"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--measured", type=Path, nargs="+", default=MEASURED)
    for name, default in (one for one in vars(Assumed()).items() if isinstance(one[1], float)):
        options.add_argument(f"--{name}", type=float, default=default, help="see Assumed")
    options.add_argument("--write", action="store_true", help="renew docs/scale.md")
    chosen = vars(options.parse_args())
    write = chosen.pop("write")
    text = "\n".join(tables(chosen.pop("measured"), Assumed(**chosen)))
    print(text)
    if write:
        before, _, rest = PAGE.read_text("utf-8").partition(MARK)
        PAGE.write_text(f"{before}{MARK}\n\n{text}\n\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
