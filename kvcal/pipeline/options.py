"""Options of the commands that recipes know, in groups that several commands share.

A group is a dataclass of options (`kvcal.pipeline.spec`); a command's own dataclass inherits its groups. Imports
neither torch nor Typer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .spec import Options, argument, flag, option

LARGEST_SEED = 2**63 - 1
FRAMES = ("pre_rope", "post_rope")
DTYPES = ("auto", "float32", "bfloat16", "float16")

# Groups.


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
    limit: int | None = option(None, "Of --task: questions, of needle and others contexts.", at_least=1)
    lengths: str | None = option(None, "Of --task: tokens of synthetic contexts (RULER, needle and others), as 4k,8k.")
    tasks_path: Path | None = option(None, "Of --task: a folder of task files; lm-eval runs the Python in it.")
    allow_code: bool = flag("Of --task humaneval: run generated programs, in a sandbox.")
    chat: bool = flag("Of --task: lm-eval's prompts in the tokenizer's chat template.")
    needle_plot: Path | None = option(
        None, "Of --task needle: a plot of what was found (.png, .svg, .pdf).", panel="Output"
    )
    max_score_drop: float | None = option(
        None, "Gate: any task's mean score below full precision's, at most.", at_least=0, panel="Gates"
    )


# Commands that recipes know.


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions(WeightsOptions, CalibrationText, Batched, Resumable):
    """What all commands take that run a model on text, layer by layer. spill: where hidden states lie meanwhile."""

    panel: ClassVar[str] = "Scheme"

    output: Path | None = option(None, "", "--output", "-o", panel="Output")
    spill: str = option("device", "Where hidden states lie: device, cpu or disk.", panel="Machine")


@dataclass(frozen=True, kw_only=True)
class FitPredictorsOptions(CalibrationOptions, PerLayer, CacheWindows, Selection, Layerwise):
    """Of `kvcal fit-predictors`, AQUA-KV."""

    panel: ClassVar[str] = "Scheme"

    output: Path | None = option(None, "Default: <model>-aqua-kv.kvcal.safetensors here.", "--output", "-o")
    backbone: str = option(
        "higgs-2-wide-debiased-balanced",
        "Codec of the residuals: higgs-{2,3,4,2-d4}[-wide|-channel][-debiased], uniform-{1..8}[-channel], "
        "exact-{16,32,bf16}, kivi-{2,3,4,8}, turboquant-{2,3,4}, innerq-{base,hybrid,small}, "
        "squat-{2,3,4}, mixkvq; learned from the residuals: transform-BITS, vq-BITS, mixkvq-BITS, "
        "squat-{2,3,4}-calibrated, CODEC-scaled, CODEC-balanced; all: `kvcal names codec`.",
        "--backbone",
        "--residual",
        names=("codec",),
    )
    first_layer: str = option(
        "higgs-4-wide-debiased-balanced", "Codec of the first compressed layer; exact-16 keeps it.", names=("codec",)
    )
    keys: str = option("", "Codec of key residuals, where not that of --backbone.")
    values: str = option("", "Codec of value residuals, likewise.")
    recipe: Path | None = option(None, "A TOML file with codecs, windows, frame and predictor instead of options.")
    predictor: str = option(
        "linear",
        "linear, reduced-rank, mlp, mlp-no-norm, linear-4bit or bias.",
        one_of=("linear", "reduced-rank", "mlp", "mlp-no-norm", "linear-4bit", "bias"),
    )
    rank: int = option(0, "Of reduced-rank; 0: a quarter of the kv width.", at_least=0)
    key_inputs: str = option("k1", "What predicts keys, of k1,v1 (layer below) and k2,v2; `none`: no predictor.")
    value_inputs: str = option("v1,k0", "What predicts values; also k0, this layer's keys; `none`: no predictor.")
    frame: str = option("pre_rope", "pre_rope or post_rope.", one_of=FRAMES)
    ridge: float = option(1e-3, "Times the mean of the Gram diagonal.")
    quantiser_agnostic: bool = flag("Fit on exact keys and values.")
    mlp_epochs: int = option(4, "Passes of MLP training.", at_least=1)
    spill: str = option("device", "Where hidden states and reconstructions lie: device, cpu or disk.")


@dataclass(frozen=True, kw_only=True)
class TrainCodebooksOptions(CalibrationOptions, Selection, Layerwise):
    """Of `kvcal train-codebooks`, VQKV."""

    panel: ClassVar[str] = "Scheme"

    seed: int = option(0, "Windows, vectors, first codewords.", at_least=0, at_most=LARGEST_SEED)
    output: Path | None = option(None, "Default: <model>-vqkv.kvcal.safetensors here.", "--output", "-o")
    preset: str | None = option(
        None,
        "8b and 3b are the paper's for Llama-3.1-8B and Llama-3.2-3B; medium: 4096 codewords, small: 256. "
        "Default: by the model's size. Stages and high band are scaled to the model's head_dim.",
    )
    stages: str | None = option(None, "VALUES,LOW,HIGH instead of the preset's: 10,20,14.")
    sizes: str | None = option(None, "Codewords a stage, powers of two up to 65536: 65536,65536,16384.")
    high_dims: int | None = option(
        None, "Key dimensions in the high band; 0: one band. Default: 48 of 128.", at_least=0
    )
    split_by: str = option(
        "relative",
        "Dimensions ranked by their error over their energy (relative), or as such (absolute).",
        one_of=("relative", "absolute"),
    )
    scale: str = option(
        "query",
        "Units in which vectors are quantised: none (the paper), head, channel, or query (keys times the "
        "queries' root mean square).",
        one_of=("none", "head", "channel", "query"),
    )
    vectors: int | None = option(None, "Keys and values trained on; default: the preset's.", at_least=1)
    per_layer: bool = flag("Codebooks of each layer's own.")
    trainer: str = option(
        "k-means",
        "k-means (free codewords), closed-form or adam (SimVQ, as in the paper).",
        one_of=("k-means", "closed-form", "adam"),
    )
    tolerance: float = option(0.01, "A stage ends with the iteration that lowers the held-out error by less.")
    min_iterations: int = option(5, "Iterations a stage, at least.", at_least=1)
    max_iterations: int = option(50, "And at most.", at_least=1)
    rate: float = option(1e-3, "Adam's learning rate.")
    batch_vectors: int = option(65536, "Vectors a step of Adam.", at_least=1)
    beta: float = option(1.0, "Of the paper's loss, Eq. 4.")
    gamma: float = option(0.25, "Likewise; without an encoder it changes nothing.")
    frame: str = option("post_rope", "post_rope (the paper) or pre_rope.", one_of=FRAMES)
    sink: int = option(4, "First tokens kept in the model's dtype.", at_least=0, panel="Cache")
    recent: int | None = option(
        None, "Newest tokens kept, at least. Default: 1024; preset small 128.", at_least=0, panel="Cache"
    )
    block: int | None = option(None, "Tokens packed at a time. Default: as --recent's.", at_least=1, panel="Cache")


@dataclass(frozen=True, kw_only=True)
class TuneThresholdsOptions(CalibrationOptions, CacheWindows, Stepped):
    """Of `kvcal tune-thresholds`, MixKVQ."""

    panel: ClassVar[str] = "Scheme"

    windows: int | None = option(None, "Windows in all (default: 12).", at_least=2)
    holdout: int | None = option(None, "How many of them only measure the result (default: 4, or 1 in 8).", at_least=1)
    seed: int = option(0, "Of the windows and of the search.", at_least=0, at_most=LARGEST_SEED)
    output: Path | None = option(None, "Default: <model>-mixkvq.kvcal.safetensors here.", "--output", "-o")
    plot: Path | None = option(None, "Default: <output>.front.png.", panel="Output")
    objective: str = option(
        "auto",
        "What to lose little of: attention, perplexity, or task:NAME[,NAME] of lm-eval; auto: attention for the "
        "embedded model, task:gsm8k for others.",
        panel="Search",
    )
    trials: int = option(30, "How many thresholds are tried.", at_least=1, panel="Search")
    max_bits: float = option(
        3.7,
        "Stored bits a value, at most: the best point below is chosen.",
        at_least=0,
        at_most=32,
        panel="Search",
    )
    tau_low: str | None = option(None, "Range of the lower threshold, or one number (default: 0.5,8).")
    tau_high: str | None = option(None, "Range of the upper threshold, or one number (default: 1,32).")
    raw_salience: bool = flag("Thresholds of the salience itself, not over the layer's median.")
    importance: str = option(
        "query", "query: mean |q| so far; recent: since the last block; none: error-only selection."
    )
    full: int | None = option(
        None, "With --four: channels a head in the top tier, always; nothing is searched.", at_least=0
    )
    four: int | None = option(None, "With --full: channels a head at 4 bits.", at_least=0)
    group: int = option(32, "Tokens of a key channel that share a scale.", at_least=1)
    round_up: int = option(8, "Channels of a tier come in multiples of this.", at_least=1)
    raw_dtype: str = option(
        "auto",
        "Of the top tier: float16, bfloat16, float32; auto: bfloat16 if the model is, else (or with --full) float16.",
    )
    value_bits: int = option(2, "Of values, in groups of 32 channels of a token.", at_least=1, at_most=8)
    block: int = option(128, "Tokens packed at a time: the paper's R.", at_least=1)
    tasks_path: Path | None = option(
        None, "Folder of lm-eval task files, for tasks that lm-eval does not know.", panel="Search"
    )
    limit: int | None = option(None, "Questions of each task, from the first.", at_least=1, panel="Search")
    metric: str | None = option(None, "METRIC or METRIC,FILTER of the tasks; default: their first.", panel="Search")
    storage: str | None = option(
        None,
        "An Optuna storage URL (sqlite:///FILE, postgresql://…) that several workers share.",
        panel="Search",
    )
    heartbeat: int = option(
        5,
        "With --storage: seconds between signs of life; after six missed ones a trial is redone.",
        at_least=1,
        panel="Search",
    )
    batch: int | None = option(None, "Windows, or questions, at a time.", at_least=1)
    spill: str = option("device", "Where q, k, v wait during the search: device or cpu.")


@dataclass(frozen=True, kw_only=True)
class MeasureSubspacesOptions(CalibrationOptions, CacheWindows, Selection, Layerwise):
    """Of `kvcal measure-subspaces`, SQuat."""

    panel: ClassVar[str] = "Scheme"

    other_text: str | None = option(None, "Another text: is its subspace as good for this one?", panel="Text")
    windows: int | None = option(None, "Windows in all; default: 32.", at_least=2)
    holdout: int | None = option(None, "How many of them are held out (default: 8).", at_least=1)
    output: Path | None = option(None, "Default: <model>-squat.kvcal.safetensors here.", "--output", "-o")
    subspace: str = option(
        "calibrated",
        "What the cache uses: prompt (the row's own queries), calibrated, or both.",
        one_of=("prompt", "calibrated", "both"),
    )
    frame: str = option("post_rope", "Keys after RoPE, post_rope, or before it, pre_rope.", one_of=FRAMES)
    queries: str = option("post_rope", "The same of the queries that make the subspace.", one_of=FRAMES)
    settings: str = option(
        "lm-eval",
        "The paper's rank, strength and channels for lm-eval, longbench or math-500.",
        one_of=("lm-eval", "longbench", "math-500"),
    )
    rank: int | None = option(None, "Directions of a subspace; 0: all, head_dim.", at_least=0)
    strength: float | None = option(None, "Lambda of the paper; 0 is KIVI.", at_least=0)
    channels: int | None = option(None, "Channels rounded at a time; 0: half of head_dim.", at_least=0)
    normalise: str = option(
        "paper",
        "paper: singular values grow with the text; length: divided by the root of its tokens.",
        one_of=("paper", "length"),
    )
    search: bool = flag("Take each layer's best of a grid of ranks and strengths (Table 3).")
    prompt_tokens: int = option(0, "First tokens of a window taken for its prompt; 0: a quarter.", at_least=0)
    plot: Path | None = option(None, "Deviation against rank as .png, .svg or .pdf (Figures 2 and 6).", panel="Output")
    bits: int = option(2, "Of keys and values.", at_least=1, at_most=8)
    group: int = option(32, "Tokens, or channels of a value, that share a scale.", at_least=1)
    sink: int = 0
    recent: int = 32
    block: int = 32


@dataclass(frozen=True, kw_only=True)
class FitNormsOptions(CalibrationOptions, PerLayer, CacheWindows, Selection, Layerwise):
    """Of `kvcal fit-norms`, InnerQ."""

    panel: ClassVar[str] = "Scheme"

    windows: int | None = option(16, "Windows in all.", at_least=2)
    output: Path | None = option(None, "Default: <model>-innerq-<variant>.kvcal.safetensors here.", "--output", "-o")
    variant: str = option(
        "base", "base, hybrid or small: values of 3 bits, 2 bits hybrid, 2 bits.", one_of=("base", "hybrid", "small")
    )
    keys: str | None = option(None, "Another codec for keys, e.g. inner-{2,3,4}-{symmetric,asymmetric,hybrid}[-max].")
    values: str | None = option(None, "Another codec for values.")
    factors: str | None = option(
        None,
        "channel: the paper's; pair: shared by a RoPE pair, which can be folded; none. Default: channel, none for "
        "keys of a codec that has no use for them (kivi-2, squat-2, …).",
        one_of=("channel", "pair", "none"),
    )
    exponent: float = option(0.5, "Factor = (largest magnitude of the channel) to this power.")
    powers_of_two: bool = flag("Round factors to powers of two: folding is then exact in any dtype.")
    search: str = option(
        "queries",
        "What a searched scale of keys minimises: queries: squared errors weighted by each channel's queries; plain: "
        "unweighted ones, which GPU kernels pack.",
        one_of=("queries", "plain"),
    )
    sink: int = 32
    recent: int = 96


@dataclass(frozen=True, kw_only=True)
class TuneBitsOptions(CalibrationOptions, CacheWindows, Selection, Layerwise):
    """Of `kvcal tune-bits`, a baseline like KVTuner."""

    panel: ClassVar[str] = "Scheme"

    windows: int | None = option(None, "Windows in all (default: 12).", at_least=2)
    holdout: int | None = option(None, "How many of them only measure the result (default: 4, or 1 in 8).", at_least=1)
    output: Path | None = option(None, "Default: <model>-kvtuner.kvcal.safetensors here.", "--output", "-o")
    max_bits: float = option(3.7, "Stored bits a value, scales included, at most on average.", at_least=0, at_most=32)
    objective: str = option(
        "attention", "What is made small: attention (KVTuner-like, integers), or kl (of the model, any codecs)."
    )
    codecs: str = option(
        "higgs-2,higgs-3,higgs-4,uniform-2-channel,uniform-4",
        "Of --objective kl: what keys or values of a layer may be stored in.",
    )
    predict: bool = flag("Of --objective kl: store what AQUA-KV's predictors leave, in learned codecs, too.")
    bits: str = option("2,4,8", "What keys and values of a layer may have.")
    group: int = option(32, "Tokens of a key channel, channels of a value, that share a scale.", at_least=1)
    block: int = 128


@dataclass(frozen=True, kw_only=True)
class PresetOptions(WeightsOptions, PerLayer, Selection):
    """Of `kvcal preset`. name: of the method."""

    panel: ClassVar[str] = "Scheme"

    name: str | None = argument(None, "A method without data, as kivi-2 (see `kvcal names preset`).", ("preset",))
    output: Path | None = option(
        None, "Default: <model>-<name>.kvcal.safetensors here.", "--output", "-o", panel="Output"
    )
    keys: str | None = option(
        None, "Codec of keys, in the preset's place or without one: uniform-4, higgs-2, kivi-2, …", names=("codec",)
    )
    values: str | None = option(None, "Codec of values, likewise.", names=("codec",))
    recipe: Path | None = option(None, "A TOML file with codecs, windows and frame instead of a name and options.")
    sink: int | None = option(None, "First tokens kept; default: the preset's.", at_least=0, panel="Cache")
    recent: int | None = option(None, "Newest tokens kept; default: the preset's.", at_least=0, panel="Cache")
    block: int | None = option(None, "Tokens packed at a time; default: the preset's.", at_least=1, panel="Cache")
    frame: str | None = option(None, "pre_rope or post_rope; default: the preset's.", one_of=FRAMES)
    config_only: bool = flag("Read no weights: the bundle then fits any of this config.", panel="Model")
    check: bool = option(
        True,
        "Run the model on two windows of 512 tokens, layer by layer; warn if the KL forecast is high.",
        panel="Machine",
    )
    device: str = option(
        "auto", "cpu, cuda, cuda:1, or auto: a GPU if there is one.", panel="Machine", names=("machine",)
    )


BuiltOptions = CalibrationOptions | PresetOptions  # of commands that make a bundle from a model


@dataclass(frozen=True, kw_only=True)
class EvalOptions(
    BundlesModel,
    TextOptions,
    Stepped,
    Schemes,
    Selection,
    Kernels,
    Subspaces,
    Batched,
    Tasks,
    Resumable,
    GateReports,
):
    """Of `kvcal eval`."""

    panel: ClassVar[str] = "Gates"

    bundles: list[Path] | None = argument(None, "Bundle files, as with --bundle.")
    max_ppl_increase: str | None = option(
        None, "Gate: perplexity above full precision's by at most this share, as 1% or 0.01."
    )
    max_kl: float | None = option(None, "Gate: KL to full precision, nats a token.")
    max_bits: float | None = option(None, "Gate: stored bits a value of packed blocks.")
    max_cache_bytes: float | None = option(
        None, "Gate: bytes that packed blocks and windows take at one text window's end."
    )
    max_layer_drift: float | None = option(
        None, "Gate: any layer's relative error of keys or values, in times what the bundle recorded."
    )
