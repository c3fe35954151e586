"""Options of the commands that no recipe knows; those that recipes know are in kvcal.pipeline.options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvcal.pipeline.options import CalibrationOptions
from kvcal.pipeline.shared_options import (
    DTYPES,
    FRAMES,
    LARGEST_SEED,
    Batched,
    BundlesModel,
    DeviceMap,
    GateReports,
    Kernels,
    Layerwise,
    Machine,
    MaybeModelOptions,
    ModelOptions,
    PerLayer,
    RandomWeights,
    Resumable,
    RunOptions,
    Schemes,
    Selection,
    Stepped,
    Subspaces,
    TensorParallel,
    TextOptions,
    TextSource,
)
from kvcal.pipeline.spec import Options, argument, flag, option, required

BUNDLE = "A bundle, NAME.kvcal.safetensors."

MOST_ROWS = 65_536  # of a plan


@dataclass(frozen=True, kw_only=True)
class NamesOptions(Options):
    """The options of `kvcal names`."""

    kind: str | None = argument(
        None,
        "preset, codec, scheme, operation or device; default: all of them.",
        words=("preset", "codec", "scheme", "operation", "device"),
    )
    model: str = option(
        "llama-3.1-8b",
        "Whose geometry the bits are for; no weights are read.",
        "--model",
        "-m",
        panel="Model",
        names=("model",),
    )


@dataclass(frozen=True, kw_only=True)
class CheckCodecOptions(Options):
    """The options of `kvcal check-codec`."""

    name: str = required(str, "A codec by the name that bundles or --keys and --values give it.")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ModelOptions):
    """The options of `kvcal plan`. gpu, memory, bandwidth: on what; the card that is here where none is given. context:
    the model's own where it is not given. preset: the usual ones where none is given.
    """

    panel: ClassVar[str] = "Plan"

    model: str = option(
        "tiny",
        "Short name (see `kvcal models`), hub id, local folder or config.json.",
        "--model",
        "-m",
        names=("model",),
    )
    gpu: str | None = option(
        None,
        "A profile, as rtx-4090 (`kvcal names device`). Default: the card that is here, asked.",
        panel="Machine",
        names=("device",),
    )
    memory: str | None = option(None, "Instead of --gpu: memory for programs, as 24GB or 22.5GiB.", panel="Machine")
    bandwidth: str | None = option(
        None, "With --memory: of the data sheet, as 1008GB/s, for tokens per second.", panel="Machine"
    )
    context: str | None = option(None, "Tokens a row, as 128k; k is 1024. Default and most: the model's own.")
    batch: int = option(1, "Rows at a time.", at_least=1, at_most=MOST_ROWS)
    budget_kl: float | None = option(None, "Most KL, nats per token, for the recommendation, as 0.05.")
    preset: list[str] | None = option(
        None,
        "A preset, or KEYCODEC+VALUECODEC; may be repeated. Default: the usual ones.",
        "--preset",
        "-p",
        panel="Scheme",
        names=("preset",),
    )
    serve: str | None = option(
        None,
        "vllm: what our plug-in serves on a GPU, and how many tokens vLLM holds there.",
        panel="Scheme",
        words=("vllm",),
    )
    weights: str | None = option(
        None, "What the weights take in memory, where they are quantised, as 5.7GB.", panel="Model"
    )
    dtype: str = option(
        "bfloat16", "Of weights and windows: bfloat16, float16, float32.", panel="Machine", words=DTYPES[1:]
    )


@dataclass(frozen=True, kw_only=True)
class RecommendOptions(ModelOptions, TextSource, Machine, DeviceMap, Resumable):
    """The options of `kvcal recommend`. windows, holdout, length: by default what the device does in a few minutes, in
    windows no longer than the model's preset has.
    """

    panel: ClassVar[str] = "Scheme"

    windows: int | None = option(None, "Windows of text in all (default: 36; on a CPU 10).", at_least=2, panel="Text")
    holdout: int | None = option(
        None, "How many of them are measured on, not fitted on (default: 1 in 8).", at_least=1, panel="Text"
    )
    length: int | None = option(None, "Tokens a window (default: 1024; on a CPU 512).", at_least=2, panel="Text")
    seed: int = option(0, "Which windows are drawn.", at_least=0, at_most=LARGEST_SEED, panel="Text")
    max_bits: float | None = option(None, "Smallest KL of at most so many stored bits per value, as 4.1.")
    max_kl: float | None = option(None, "Fewest bits of at most this KL, nats per token (default: 0.01).")
    output: Path | None = option(
        None, "Default: <model>-recommended.kvcal.safetensors here.", "--output", "-o", panel="Output"
    )


@dataclass(frozen=True, kw_only=True)
class InspectOptions(MaybeModelOptions, TextOptions):
    """The options of `kvcal inspect`."""

    bundle: Path = required(Path, BUNDLE)
    plot: Path | None = option(None, "Errors by layer and kv head as a .png, .svg or .pdf.")
    model: str | None = option(
        None, "Measure these errors with it, instead of those of the fit.", "--model", "-m", names=("model",)
    )
    windows: int | None = option(None, "With --model: how many (default: 4).", at_least=1, panel="Text")
    length: int | None = option(None, "With --model: tokens a window (default: 1024).", at_least=2, panel="Text")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(MaybeModelOptions, RandomWeights):
    """The options of `kvcal verify`."""

    bundle: Path = required(Path, BUNDLE)
    model: str | None = option(None, "Also: was it made for this model?", "--model", "-m", names=("model",))
    device: str = option(
        "cpu", "cpu, cuda, cuda:1, or auto: a GPU if there is one.", panel="Machine", names=("machine",)
    )


@dataclass(frozen=True, kw_only=True)
class DiffOptions(Options):
    """The options of `kvcal diff`."""

    a: Path = required(Path, "A bundle.")
    b: Path = required(Path, "Another.")


@dataclass(frozen=True, kw_only=True)
class CombineOptions(Options):
    """The options of `kvcal combine`."""

    keys: Path = required(Path, "The bundle whose key codecs are taken.")
    values: Path = required(Path, "The bundle whose value codecs are taken.")
    output: Path = required(Path, "Where the new bundle goes.", "--output", "-o")


@dataclass(frozen=True, kw_only=True)
class FoldOptions(ModelOptions):
    """The options of `kvcal fold`."""

    panel: ClassVar[str] = "Output"

    bundle: Path = required(Path, "A bundle with key factors that RoPE pairs share.", "--bundle", "-b")
    output: Path = required(Path, "The new model's folder.", "--output", "-o")
    bundle_output: Path | None = option(
        None, "Also write the bundle that the folded model needs: the same without factors."
    )
    dtype: str = option("auto", "Of the new weights: float32, bfloat16, float16; auto: the model's.", words=DTYPES)


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ModelOptions, TextSource, Machine, Batched):
    """The options of `kvcal export`."""

    panel: ClassVar[str] = "Scheme"

    to: str = required(str, "The server's cache: fp8 (e4m3) or int8.", "--to")
    output: Path = required(Path, "The new model's folder.", "--output", "-o")
    per_head: bool = flag("A scale for each kv head, not for the layer.")
    windows: int | None = option(None, "Calibration windows (default: 16).", at_least=1, panel="Text")
    length: int | None = option(None, "Tokens a window (default: 2048).", at_least=2, panel="Text")
    seed: int = option(0, "Which windows are drawn.", at_least=0, at_most=LARGEST_SEED, panel="Text")


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """The options of `kvcal report`."""

    inputs: list[Path] = required(
        list[Path],
        "Files of `kvcal eval --json`, `kvcal compare --json` or its --output, `kvcal bench --json`, and bundles.",
    )
    output: Path = required(Path, "The page, an .html file.", "--output", "-o")


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(Options):
    """The options of `kvcal reproduce`."""

    panel: ClassVar[str] = "Inputs"

    bundle: Path = required(Path, BUNDLE)
    text: list[str] | None = option(None, "Where a local text lies now; found by its recorded name; may be repeated.")
    model: str | None = option(None, "Where the local model folder lies now.", "--model", "-m", names=("model",))
    input: list[Path] | None = option(
        None, "A bundle that `combine` or `fold` read, found by its hash; without it, it is made again too."
    )
    tasks_path: Path | None = option(
        None,
        "Folder of task files, where the recorded objective is a task that lm-eval does not come with.",
    )
    device: str | None = option(None, "Another device than recorded.", panel="Machine", names=("machine",))
    output: Path | None = option(
        None, "Keep the new bundle there; an interrupted run then goes on.", "--output", "-o", panel="Output"
    )


@dataclass(frozen=True, kw_only=True)
class CardFields(Options):
    """What a card says besides what its bundle holds."""

    panel: ClassVar[str] = "Card"

    evaluation: Path | None = option(None, "What `kvcal eval --json` printed: its figures go into the card.", "--eval")
    license: str | None = option(None, "For the card, as apache-2.0. Default: the model's, where it is known.")


@dataclass(frozen=True, kw_only=True)
class CardOptions(CardFields):
    """The options of `kvcal card`."""

    bundle: Path = required(Path, BUNDLE)
    output: Path | None = option(
        None, "Write it there, its plots beside it. Default: print it.", "--output", "-o", panel="Output"
    )
    repo: str | None = option(None, "Where the bundle will be, for the commands in the card.")


@dataclass(frozen=True, kw_only=True)
class PushOptions(CardFields):
    """The options of `kvcal push`."""

    panel: ClassVar[str] = "Hub"

    bundle: Path = required(Path, BUNDLE)
    repo: str = required(str, "A model repository on the hub, org/name.")
    branch: str | None = option(None, "Default: main.")
    message: str | None = option(None, "Of the commit. Default: name and hash.")
    private: bool = flag("If the repository is new.")


@dataclass(frozen=True, kw_only=True)
class PullOptions(Options):
    """The options of `kvcal pull`."""

    panel: ClassVar[str] = "Hub"

    repo: str = required(str, "A model repository on the hub, org/name.")
    output: Path = option(Path(), "A folder. Default: here.", "--output", "-o", panel="Output")
    revision: str | None = option(None, "Branch, tag or commit. Default: main.")
    file: str | None = option(None, "Which bundle, where there are several.")
    sha256: str | None = option(None, "Refuse a bundle with another hash.")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(BundlesModel, RunOptions, TensorParallel, Selection, Kernels, Subspaces):
    """The options of `kvcal generate`."""

    panel: ClassVar[str] = "Text"

    prompt: str = required(str, "Text to go on from.", "--prompt")
    bundle: Path | None = option(None, "A bundle file.", "--bundle", "-b", panel="Scheme")
    preset: str | None = option(None, "Or a method without data.", "--preset", "-p", panel="Scheme", names=("preset",))
    chat: bool = flag("The prompt as a user's message, by the tokenizer's chat template.")
    tokens: int = option(100, "New tokens at most.", at_least=1)
    sample: bool = flag("Draw tokens instead of taking the likeliest.")
    seed: int = option(0, "For --sample and --random-weights.", at_least=0, at_most=LARGEST_SEED)


@dataclass(frozen=True, kw_only=True)
class CompareOptions(
    BundlesModel,
    TextOptions,
    Stepped,
    Schemes,
    PerLayer,
    Selection,
    Kernels,
    DeviceMap,
    Batched,
    Resumable,
):
    """The options of `kvcal compare`."""

    panel: ClassVar[str] = "Scheme"

    keys: str | None = option(
        None, "Key codecs, as higgs-2,uniform-2-channel: with each of --values.", names=("codec",), listed=True
    )
    values: str | None = option(None, "Value codecs.", names=("codec",), listed=True)
    predict: bool = flag("Each pair also under AQUA-KV's predictors.")
    first_layer: str = option("higgs-4-wide-debiased", "Of --predict: codec of the first compressed layer.")
    key_inputs: str = option("k1", "Of --predict, as of fit-predictors.")
    value_inputs: str = option("v1,k0", "Of --predict, likewise.")
    recipe: list[Path] | None = option(
        None, "A recipe of fit-predictors or preset, fitted if need be; may be repeated."
    )
    frame: str = option("post_rope", "Of the pairs: pre_rope or post_rope.", one_of=FRAMES)
    sink: int = option(4, "Of the pairs: first tokens kept.", at_least=0, panel="Cache")
    recent: int = option(128, "Of the pairs: newest tokens kept.", at_least=0, panel="Cache")
    block: int = option(32, "Of the pairs: tokens packed at a time.", at_least=1, panel="Cache")
    max_bits: float | None = option(
        None, "Name the best row of at most so many bits.", at_least=0, at_most=32, panel="Output"
    )
    calibration: str | None = option(None, "Text for what is fitted. Default: the model's own.", panel="Text")
    fit_windows: int | None = option(None, "Calibration windows for what is fitted.", at_least=2, panel="Text")
    fit_length: int | None = option(None, "Tokens of one.", at_least=2, panel="Text")
    output: Path | None = option(
        None, "JSON file of all rows; a second call goes on from it.", "--output", "-o", panel="Output"
    )
    csv: Path | None = option(None, "The rows as CSV.", panel="Output")
    plot: Path | None = option(None, "PNG, SVG or PDF: KL against --against, the Pareto front drawn.", panel="Output")
    against: str = option(
        "bits",
        "What the front weighs KL against: bits per value, or size of one sequence of --at-length tokens, resident "
        "bytes included.",
        one_of=("bits", "size"),
        panel="Output",
    )
    attention_windows: int = option(4, "Attention errors are of the first so many windows.", at_least=1, panel="Text")
    at_length: int | None = option(
        None, "Bytes of one sequence of so many tokens; default: --length.", at_least=1, panel="Output"
    )
    seed: int = option(
        0,
        "Of --random-weights, and of the windows of what is fitted.",
        at_least=0,
        at_most=LARGEST_SEED,
        panel="Text",
    )


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(CalibrationOptions, Layerwise):
    """The options of `kvcal probe`."""

    panel: ClassVar[str] = "Probes"

    windows: int | None = option(None, "Windows in all; default: the model's preset, tiny 32.", at_least=2)
    holdout: int | None = option(
        None, "How many of them are held out and scored (default: 1 in 8; tiny 8).", at_least=1
    )
    probe: list[str] | None = option(
        None,
        "TARGET=INPUTS instead of the paper's: v=v1,k0 predicts values from those of the layer below and this "
        "layer's keys, k=k0t1 keys from those of the token before; may be repeated.",
    )
    frame: str = option("pre_rope", "Keys before RoPE, pre_rope, or after it, post_rope.", one_of=FRAMES)
    ridge: float = option(1e-3, "Times the mean of the Gram diagonal.")
    sink: int = option(4, "First tokens of a window, which are not predicted.", at_least=0)
    output: Path | None = option(None, "JSON file of all layers; a second call goes on from it.", "--output", "-o")
    csv: Path | None = option(None, "All figures as CSV, a line a probe and layer.", panel="Output")
    plot: Path | None = option(None, "Means and layers as .png, .svg or .pdf (Figures 2, 4 and 5).", panel="Output")
    spill: str = option("device", "Where hidden states, keys and values lie: device, cpu or disk.")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Kernels, Resumable):
    """The options of `kvcal bench`."""

    panel: ClassVar[str] = "Measurement"

    device: str = option(
        "auto",
        "auto, cpu, cuda, jetson, or a profile as jetson-orin-nano: projected where it is not here.",
        panel="Machine",
        names=("device",),
    )
    model: str | None = option(
        None,
        "Whose geometry; no weights are read. Default: llama-3.1-8b; tiny for `generate` on a CPU.",
        "--model",
        "-m",
        panel="Model",
        names=("model",),
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub model.", panel="Model")
    preset: list[str] | None = option(
        None,
        "A preset, another shape (`kvcal names`), or KEYCODEC+VALUECODEC; repeatable.",
        "--preset",
        "-p",
        panel="Scheme",
        names=("preset", "scheme"),
    )
    bundle: list[Path] | None = option(None, "A bundle file; may be repeated.", "--bundle", "-b", panel="Scheme")
    operation: list[str] | None = option(
        None,
        "Operation or paper table (`kvcal names operation`); repeatable. Default: kernels.",
        "--operation",
        "-o",
        names=("operation",),
    )
    batch: str | None = option(None, "Rows, as 1,8,32.")
    length: str | None = option(None, "Cached tokens, as 512,4k,32k; k is 1024, no other suffix.")
    queries: int = option(1, "New tokens of a call: decode attention, append.", at_least=1, at_most=16)
    sink: int | None = option(None, "First tokens kept exact. Default: 32.", at_least=0, panel="Cache")
    recent: int | None = option(None, "Newest tokens kept exact. Default: 96.", at_least=0, panel="Cache")
    dtype: str = option(
        "auto", "Of windows, queries and peers: float16, bfloat16, float32.", panel="Machine", words=DTYPES
    )
    memory: float | None = option(None, "GiB that largest-batch and longest-generation may fill.", panel="Machine")
    repeats: int = option(50, "Timed runs of an operation, at most.", at_least=1)
    seconds: float = option(2.0, "Seconds for timing an operation, at most.")
    seed: int = option(0, "Of the random data and weights.", at_least=0, at_most=2**31 - 1)
    csv: Path | None = option(None, "Write the rows there too.", panel="Output")
    plot: Path | None = option(None, "Draw times against tokens, a .png, .svg or .pdf.", panel="Output")
    compare: Path | None = option(None, "A file that --json printed earlier.", panel="Output")


@dataclass(frozen=True, kw_only=True)
class BuildOptions(GateReports):
    """The options of `kvcal build`."""

    panel: ClassVar[str] = "Build"

    recipe: Path = required(Path, "A build recipe, TOML (docs/pipeline.md).")
    dry_run: bool = flag("Only say what would be built, and why.")
    jobs: int = option(1, "Processes that build at a time.", "--jobs", "-j", at_least=1)
    gpus: str | None = option(None, "GPUs that build side by side, a process each: 0-7 or 0,2,5.")
    share: bool = option(True, "One pass over the model for bundles whose text and windows agree; else less memory.")
    gates: bool = option(True, "Hold bundles to the recipe's gates.")


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Options):
    """The options of `kvcal demo`."""

    output: Path = option(Path("tiny-aqua-kv.kvcal.safetensors"), "Where the bundle goes.", "--output", "-o")
