"""What `--help` prints: commands in groups, options in panels, two examples a command. Plain text, without rich."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

GROUPS: dict[str, dict[str, str]] = {  # heading -> command -> what it does, on a line of 80 columns
    "Start": {
        "demo": "Calibrate, save, load, generate and measure in a minute or two",
        "plan": "What fits on a GPU, how fast, at which KL; no download",
        "recommend": "Measure a ladder of schemes on a model and choose one",
        "models": "Models that have a short name",
        "names": "Names of presets, codecs, operations and devices",
        "doctor": "This machine, and which kernels would run on it",
    },
    "Calibrate": {
        "preset": "Write a bundle for a method that needs no data",
        "fit": "Calibrate a method on text: kvcal fit METHOD",
        "fit-predictors": "AQUA-KV: predictors for each layer (fit aqua-kv)",
        "train-codebooks": "VQKV: residual codebooks (fit vqkv)",
        "tune-thresholds": "MixKVQ: search for thresholds (fit mixkvq)",
        "measure-subspaces": "SQuat: subspaces of queries (fit squat)",
        "fit-norms": "InnerQ: a factor for each key channel (fit innerq)",
        "tune-bits": "KVTuner-like: bits for each layer (fit kvtuner)",
        "probe": "How well layers predict each other's keys and values",
    },
    "Use and measure": {
        "generate": "Generate text from a compressed cache",
        "eval": "Perplexity and KL of bundles and presets, with gates",
        "compare": "Many schemes on one text, and their Pareto front",
        "export": "A checkpoint with scales for fp8 or int8 servers",
        "bench": "Time kernels and generation, or project the times",
    },
    "Bundles": {
        "inspect": "Show what a bundle holds",
        "verify": "Check a bundle's format and hashes, and its model",
        "diff": "What differs between two bundles",
        "reproduce": "Make a bundle again and compare the bytes",
        "combine": "One bundle's keys with another one's values",
        "report": "One HTML page of results and bundles",
        "fold": "Write a model with a bundle's key factors folded in",
    },
    "Publish and CI": {
        "card": "Write a bundle's model card",
        "push": "Publish a bundle and its card on the hub",
        "pull": "Fetch a bundle from the hub and check its hashes",
        "build": "Build the bundles of a recipe and hold their gates",
        "check-codec": "Hold a codec of a package of yours to the contract",
    },
}
OTHER = "Other"  # commands that no group names

BUNDLE = "mine.kvcal.safetensors"
EXAMPLES: dict[str, tuple[str, str]] = {
    "plan": ("plan -m llama-3.1-8b --gpu rtx-4090 --context 32k", "plan -m qwen2.5-7b --memory 24GB --budget-kl 0.05"),
    "recommend": ("recommend -m llama-3.2-1b --max-bits 3", "recommend -m llama-3.2-1b --text books.txt --max-kl 0.02"),
    "fit": ("fit aqua-kv -m llama-3.2-1b", "fit squat -m llama-3.2-1b --rank 10"),
    "fit-predictors": (
        "fit-predictors -m llama-3.2-1b -o mine.kvcal.safetensors",
        "fit-predictors -m llama-3.1-8b --layerwise --text books.txt",
    ),
    "combine": (
        "combine a.kvcal.safetensors b.kvcal.safetensors -o c.kvcal.safetensors",
        "combine a.safetensors b.safetensors -o c.safetensors --json",
    ),
    "fit-norms": ("fit-norms -m llama-3.2-1b --variant hybrid", "fit-norms -m qwen2.5-0.5b --factors pair"),
    "fold": (
        f"fold -m llama-3.2-1b -b {BUNDLE} -o folded",
        f"fold -m llama-3.2-1b -b {BUNDLE} -o folded --json",
    ),
    "preset": (
        "preset kivi-2 -m llama-3.2-1b",
        "preset -m llama-3.2-1b --keys higgs-4 --per-layer 0=exact-16",
    ),
    "tune-thresholds": (
        "tune-thresholds -m llama-3.2-1b --objective perplexity --max-bits 3",
        "tune-thresholds -m llama-3.2-1b --tau-low 1.5 --tau-high 4",
    ),
    "tune-bits": ("tune-bits -m llama-3.2-1b --max-bits 4", "tune-bits -m llama-3.2-1b --bits 2,3,4,8"),
    "measure-subspaces": (
        "measure-subspaces -m llama-3.2-1b --rank 10",
        "measure-subspaces -m llama-3.2-1b --search --plot ranks.png",
    ),
    "train-codebooks": (
        "train-codebooks -m llama-3.2-1b --preset small",
        "train-codebooks -m llama-3.1-8b --layerwise --spill cpu",
    ),
    "probe": ("probe -m llama-3.2-1b --plot probe.png", "probe -m llama-3.2-1b --probe v=v1,k0 --csv probe.csv"),
    "check-codec": ("check-codec kivi-2", "check-codec kivi-2 --json"),
    "build": ("build bundles.toml", "build bundles.toml --jobs 2 --junit gates.xml"),
    "inspect": (f"inspect {BUNDLE}", f"inspect {BUNDLE} -m llama-3.2-1b --plot heads.png"),
    "verify": (f"verify {BUNDLE}", f"verify {BUNDLE} -m llama-3.2-1b"),
    "diff": (f"diff {BUNDLE} new.kvcal.safetensors", f"diff {BUNDLE} new.kvcal.safetensors --json"),
    "reproduce": (f"reproduce {BUNDLE}", f"reproduce {BUNDLE} -o again.kvcal.safetensors"),
    "export": (
        "export -m llama-3.2-1b --to fp8 -o llama-fp8-kv",
        "export -m llama-3.2-1b --to int8 --per-head -o llama-int8-kv",
    ),
    "report": (
        "report eval.json mine.kvcal.safetensors -o report.html",
        "report compare.json -o report.html --json",
    ),
    "card": (f"card {BUNDLE}", f"card {BUNDLE} --eval figures.json -o README.md"),
    "push": (f"push {BUNDLE} me/my-bundle --private", f"push {BUNDLE} me/my-bundle --eval figures.json"),
    "pull": ("pull me/my-bundle", "pull me/my-bundle --revision v1 -o bundles"),
    "eval": (
        f"eval {BUNDLE} -m llama-3.2-1b -p kivi-2 --text books.txt",
        f"eval {BUNDLE} --max-kl 0.05 --junit gates.xml",
    ),
    "compare": (
        "compare -m llama-3.2-1b -p kivi-2 -p higgs-3 --plot front.png",
        "compare -m llama-3.2-1b --keys higgs-2,higgs-3 --values kivi-2",
    ),
    "generate": (
        'generate -p kivi-2 --prompt "The emperor had resolved"',
        f'generate -b {BUNDLE} --chat --prompt "Who are you?"',
    ),
    "bench": ("bench -p kivi-2 --length 4k,32k", "bench --device jetson-orin-nano --memory 8 -o longest-generation"),
    "doctor": ("doctor", "doctor --json"),
    "models": ("models", "models --json"),
    "names": ("names preset", "names codec -m qwen2.5-7b"),
    "demo": ("demo", "demo -o demo.kvcal.safetensors --json"),
}
SHORTER = {  # what Click writes of a type -> what is enough
    r"<list\[(\w+)\]>": r"<\1>",
    r"(int|float) range": r"\1",
    r"0<=x<=9223372036854775807": "x>=0",
}
METHODS = {  # of `kvcal fit`, and the command that each one is
    "aqua-kv": "fit-predictors",
    "vqkv": "train-codebooks",
    "mixkvq": "tune-thresholds",
    "squat": "measure-subspaces",
    "innerq": "fit-norms",
    "kvtuner": "tune-bits",
}


def examples_of(words: str) -> list[str]:
    """Two command lines for `kvcal WORDS`, in which WORDS may be `fit METHOD` too."""
    method = words.removeprefix("fit ")
    name = METHODS.get(method, words)
    return [f"kvcal {words}{line.removeprefix(name)}" for line in EXAMPLES.get(name, ())]


def summary_of(name: str) -> str:
    """What a command does, in one line; empty for one that no group names."""
    return next((commands[name] for commands in GROUPS.values() if name in commands), "")


def grouped(names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Headings, each with those of the commands `names` that stand under it."""
    for heading, commands in GROUPS.items():
        if here := [name for name in commands if name in names]:
            yield heading, here
    if others := [name for name in names if not summary_of(name)]:
        yield OTHER, others


class Command(TyperCommand):
    """A command whose options stand in the help under the headings of their panels."""

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                record = (_shorter(record[0]), _shorter(record[1]))
                place = "Arguments" if parameter.param_type_name == "argument" else None
                panels.setdefault(place or getattr(parameter, "rich_help_panel", None) or "Output", []).append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(sorted(records, key=_place))

    def format_epilog(self, ctx: Context, formatter: HelpFormatter) -> None:
        write_examples(ctx, formatter)


def _shorter(text: str) -> str:
    for pattern, instead in SHORTER.items():
        text = re.sub(pattern, instead, text)
    return text


def _place(record: tuple[str, str]) -> int:
    """What has a short name, as the model, comes first, and --help last."""
    return 2 if record[0].startswith("-h") else 0 if re.match(r"-\w,", record[0]) else 1


def write_examples(ctx: Context, formatter: HelpFormatter) -> None:
    words = ctx.command_path.removeprefix("kvcal").strip()
    if lines := examples_of(words):
        formatter.write_paragraph()
        formatter.write("Examples:\n" + "".join(f"  {line}\n" for line in lines))


class Methods(TyperGroup):
    """`kvcal fit`: a method a line."""

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        with formatter.section("Methods"):
            formatter.write_dl([(method, summary_of(name).partition(" (")[0]) for method, name in METHODS.items()])

    def format_epilog(self, ctx: Context, formatter: HelpFormatter) -> None:
        write_examples(ctx, formatter)


class Group(TyperGroup):
    """The program: its commands in groups."""

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        for heading, names in grouped(self.list_commands(ctx)):
            with formatter.section(heading):
                formatter.write_dl([(name, summary_of(name) or self._short(ctx, name)) for name in names])

    def _short(self, ctx: Context, name: str) -> str:
        command = self.get_command(ctx, name)
        return "" if command is None else str(command.get_short_help_str(limit=55))
