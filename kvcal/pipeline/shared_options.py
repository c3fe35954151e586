"""Options that several commands share, in groups: --model, --text, the machine, the cache, gates and tasks.

A group is a dataclass of options (`kvcal.pipeline.spec`); a command's own dataclass inherits its groups. Imports
neither torch nor Typer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .spec import Options, flag, option

LARGEST_SEED = 2**63 - 1
FRAMES = ("pre_rope", "post_rope")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """Which model."""

    panel: ClassVar[str] = "Model"

    model: str = option(
        "tiny", "Short name (see `kvcal models`), hub id, or local folder.", "--model", "-m", names=("model",)
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")


@dataclass(frozen=True, kw_only=True)
class MaybeModelOptions(Options):
    """Which model, for commands that can do without."""

    panel: ClassVar[str] = "Model"

    model: str | None = option(None, "", "--model", "-m", names=("model",))
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")


@dataclass(frozen=True, kw_only=True)
class RandomWeights(Options):
    """Random weights instead of the model's."""

    panel: ClassVar[str] = "Model"

    random_weights: bool = flag("The geometry with random weights, no download.")
    seed: int = option(0, "Of --random-weights.", at_least=0, at_most=LARGEST_SEED)


@dataclass(frozen=True, kw_only=True)
class WeightsOptions(ModelOptions, RandomWeights):
    """Which weights."""


@dataclass(frozen=True, kw_only=True)
class BundlesModel(WeightsOptions):
    """Which weights, by default those that a bundle was made for."""

    model: str = option(
        "tiny",
        "Short name (see `kvcal models`), hub id, or local folder. Where a bundle is given, the one that it was made "
        "for.",
        "--model",
        "-m",
        panel="Model",
        names=("model",),
    )


@dataclass(frozen=True, kw_only=True)
class Machine(Options):
    """What a model runs as, and on."""

    panel: ClassVar[str] = "Machine"

    dtype: str = option(
        "auto", "float32, bfloat16, float16, or auto: float32 on a CPU, bfloat16 on a GPU.", one_of=DTYPES
    )
    device: str = option("auto", "cpu, cuda, cuda:1, or auto: a GPU if there is one.", names=("machine",))


@dataclass(frozen=True, kw_only=True)
class DeviceMap(Options):
    """Devices of a model's layers, where no single one holds the model."""

    panel: ClassVar[str] = "Machine"

    device_map: str | None = option(
        None,
        "Layers over the devices of one process: auto, balanced, balanced_low_0, sequential, or a JSON object of "
        "devices by names of modules.",
    )


@dataclass(frozen=True, kw_only=True)
class TensorParallel(DeviceMap):
    """Processes, too, that share a model's heads."""

    panel: ClassVar[str] = "Machine"

    tp_plan: str | None = option(
        None, "Under torchrun: auto spreads the heads of every layer over its processes.", one_of=("auto",)
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(RandomWeights, Machine):
    """How a model is run."""


@dataclass(frozen=True, kw_only=True)
class TextSource(Options):
    """Which text."""

    panel: ClassVar[str] = "Text"

    text: str | None = option(
        None,
        "A file (plain text, .json, .jsonl, .csv, .tsv or .parquet; also .gz, .xz, .bz2, .zst), a folder of them, a "
        "hub data set org/name[:config][:split][@commit], or `embedded:calibration`. Default: the model's own.",
    )
    column: str | None = option(None, "Column of a file of rows or a data set that holds the text or chats.")


@dataclass(frozen=True, kw_only=True)
class TextOptions(RunOptions, TextSource):
    """Which text a model is run on, and how much of it."""

    panel: ClassVar[str] = "Text"

    windows: int | None = option(None, "At most so many windows, from the start.", at_least=1)
    length: int | None = option(None, "Tokens a window.", at_least=2)


@dataclass(frozen=True, kw_only=True)
class CalibrationText(TextOptions):
    """Windows of text that a method is fitted on."""

    panel: ClassVar[str] = "Text"

    windows: int | None = option(None, "Windows in all; default: the model's preset.", at_least=2)
    holdout: int | None = option(None, "How many of them are held out (default: 1 in 8).", at_least=1)
    length: int | None = option(None, "Tokens a window; default: the model's preset.", at_least=2)
    seed: int = option(0, "Which windows are drawn.", at_least=0, at_most=LARGEST_SEED, panel="Text")


@dataclass(frozen=True, kw_only=True)
class Stepped(Options):
    """Tokens of a forward pass."""

    panel: ClassVar[str] = "Text"

    step: int = option(32, "Tokens a forward pass: each step sees the compressed past.", at_least=1)


@dataclass(frozen=True, kw_only=True)
class CacheWindows(Options):
    """Tokens that a cache keeps exact, and tokens that it packs at a time."""

    panel: ClassVar[str] = "Cache"

    sink: int = option(4, "First tokens kept in the model's dtype.", at_least=0)
    recent: int = option(128, "Newest tokens kept, at least.", at_least=0)
    block: int = option(32, "Tokens packed at a time.", at_least=1)


@dataclass(frozen=True, kw_only=True)
class Selection(Options):
    """Which tokens a cache keeps at all."""

    panel: ClassVar[str] = "Cache"

    keep: float | None = option(
        None,
        "Keep this share of the tokens, by attention and age (H2O), as 0.2. Default: all, or what a bundle says.",
    )
    heavy: float | None = option(
        None, "With --keep: which share of the kept tokens is chosen by attention (default: 0.5)."
    )


@dataclass(frozen=True, kw_only=True)
class Kernels(Options):
    """Whether fused kernels are required."""

    panel: ClassVar[str] = "Cache"

    require_kernels: bool = flag("Fail, with exit code 8, where a layer cannot take the fused kernel.")


@dataclass(frozen=True, kw_only=True)
class Subspaces(Options):
    """Which subspace bundles of SQuat use."""

    panel: ClassVar[str] = "Cache"

    subspace: str | None = option(
        None,
        "Of SQuat bundles: prompt (the row's own queries), calibrated or both. Default: the bundle's.",
        one_of=("prompt", "calibrated", "both"),
    )


@dataclass(frozen=True, kw_only=True)
class Schemes(Options):
    """Bundles and presets, side by side."""

    panel: ClassVar[str] = "Scheme"

    bundle: list[Path] | None = option(None, "A bundle file; may be repeated.", "--bundle", "-b")
    preset: list[str] | None = option(
        None, "A method without data; may be repeated.", "--preset", "-p", names=("preset",)
    )


@dataclass(frozen=True, kw_only=True)
class PerLayer(Options):
    """Layers with codecs of their own."""

    panel: ClassVar[str] = "Scheme"

    per_layer: list[str] | None = option(
        None,
        "Exceptions, LAYERS[:keys|:values]=CODEC: 0=higgs-4, 3-5:keys=uniform-4, -1=exact-16; may be repeated.",
    )


@dataclass(frozen=True, kw_only=True)
class Batched(Options):
    """Windows that run together."""

    panel: ClassVar[str] = "Machine"

    batch: int | None = option(None, "Windows at a time.", at_least=1)


@dataclass(frozen=True, kw_only=True)
class Layerwise(Options):
    """How a model larger than the device is calibrated."""

    panel: ClassVar[str] = "Machine"

    spill_dir: Path | None = option(None, "Folder for --spill disk.")
    layerwise: bool = flag("One layer's weights on the device at a time.")


@dataclass(frozen=True, kw_only=True)
class Resumable(Options):
    """Whether an interrupted run goes on."""

    panel: ClassVar[str] = "Machine"

    resume: bool = option(True, "Go on from an interrupted run of the same settings.")


@dataclass(frozen=True, kw_only=True)
class GateReports(Options):
    """Where gates are reported."""

    panel: ClassVar[str] = "Output"

    junit: Path | None = option(None, "Write the gates as JUnit XML.")
    summary: Path | None = option(
        None, "Write the gates as Markdown; it is also appended to the file in $GITHUB_STEP_SUMMARY."
    )


@dataclass(frozen=True, kw_only=True)
class Tasks(Options):
    """Tasks that are answered through a cache and in full precision."""

    panel: ClassVar[str] = "Tasks"

    task: list[str] | None = option(
        None,
        "Tasks, each with its difference to full precision on the same questions: names of lm-eval's (gsm8k, "
        "niah_single_1), humaneval, needle, context-once, agreement; may be repeated, or given as a,b.",
    )
    limit: int | None = option(None, "Of --task: questions; of synthetic contexts, of each length.", at_least=1)
    lengths: str | None = option(None, "Of --task: tokens of synthetic contexts (RULER, needle and others), as 4k,8k.")
    tasks_path: Path | None = option(None, "Of --task: a folder of task files; lm-eval runs the Python in it.")
    allow_code: bool = flag("Of --task humaneval: run generated programs, in a sandbox.")
    chat: bool = flag("Of --task: prompts of lm-eval and humaneval in the tokenizer's chat template.")
    needle_plot: Path | None = option(
        None, "Of --task needle: a plot of what was found (.png, .svg, .pdf).", panel="Output"
    )
    max_score_drop: float | None = option(
        None, "Gate: any task's mean score below full precision's, at most.", at_least=0, panel="Gates"
    )
