"""Options of each command that recipes know: a dataclass a command, made of groups (shared_options.py) and its own.

Imports neither torch nor Typer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .shared_options import (
    FRAMES,
    LARGEST_SEED,
    Batched,
    BundlesModel,
    CacheWindows,
    CalibrationText,
    DeviceMap,
    GateReports,
    Kernels,
    Layerwise,
    PerLayer,
    Resumable,
    Schemes,
    Selection,
    Stepped,
    Subspaces,
    Tasks,
    TensorParallel,
    TextOptions,
    WeightsOptions,
)
from .spec import argument, flag, option

# Options of one kind, by their names.
FROM_MODEL = ("model", "revision")
NOT_IN_RECIPE = ("output", "json", "wide", "plot", "resume", "storage", "heartbeat", "name")  # the build's own affair
HOW = ("spill", "spill_dir", "layerwise", "device_map", "tp_plan")  # changes no byte
PATHS = ("recipe", "tasks_path", "spill_dir")
MAYBE_PATHS = ("model", "text", "other_text")  # or a name: a path if there is one


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions(WeightsOptions, CalibrationText, DeviceMap, Batched, Resumable):
    """What all commands take that run a model on text, layer by layer. spill: where hidden states lie meanwhile."""

    panel: ClassVar[str] = "Scheme"

    output: Path | None = option(None, "", "--output", "-o", panel="Output")
    spill: str = option("device", "Where hidden states lie: device, cpu or disk.", panel="Machine")


@dataclass(frozen=True, kw_only=True)
class FitPredictorsOptions(CalibrationOptions, PerLayer, CacheWindows, Selection, Layerwise, TensorParallel):
    """The options of `kvcal fit-predictors`, AQUA-KV."""

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
    """The options of `kvcal train-codebooks`, VQKV."""

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
    """The options of `kvcal tune-thresholds`, MixKVQ."""

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
        "Stored bits per value, at most: the best point below is chosen.",
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
class MeasureSubspacesOptions(CalibrationOptions, CacheWindows, Selection, Layerwise, TensorParallel):
    """The options of `kvcal measure-subspaces`, SQuat."""

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
class FitNormsOptions(CalibrationOptions, PerLayer, CacheWindows, Selection, Layerwise, TensorParallel):
    """The options of `kvcal fit-norms`, InnerQ."""

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
    """The options of `kvcal tune-bits`, a baseline like KVTuner."""

    panel: ClassVar[str] = "Scheme"

    windows: int | None = option(None, "Windows in all (default: 12).", at_least=2)
    holdout: int | None = option(None, "How many of them only measure the result (default: 4, or 1 in 8).", at_least=1)
    output: Path | None = option(None, "Default: <model>-kvtuner.kvcal.safetensors here.", "--output", "-o")
    max_bits: float = option(3.7, "Stored bits per value, scales included, at most on average.", at_least=0, at_most=32)
    objective: str = option(
        "attention", "What is made small: attention (KVTuner-like, integers), or kl (of the model, any codecs)."
    )
    codecs: str = option(
        "higgs-2,higgs-3,higgs-4,uniform-2-channel,uniform-4",
        "Of --objective kl: what keys or values of a layer may be stored in.",
    )
    predict: bool = flag("Of --objective kl: store what AQUA-KV's predictors leave, in learned codecs, too.")
    head_groups: int = option(
        1, "Of --objective kl: groups of a layer's kv heads that may each have a codec of their own.", at_least=1
    )
    bits: str = option("2,4,8", "What keys and values of a layer may have.")
    group: int = option(32, "Tokens of a key channel, channels of a value, that share a scale.", at_least=1)
    block: int = 128


@dataclass(frozen=True, kw_only=True)
class PresetOptions(WeightsOptions, PerLayer, Selection):
    """The options of `kvcal preset`. name: of the method."""

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
        "Run the model on two windows of 512 tokens, layer by layer; warn if the KL forecast is high. Without it "
        "weights' shapes are checked, not their numbers.",
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
    TensorParallel,
    Batched,
    Tasks,
    Resumable,
    GateReports,
):
    """The options of `kvcal eval`."""

    panel: ClassVar[str] = "Gates"

    bundles: list[Path] | None = argument(None, "Bundle files, as with --bundle.")
    max_ppl_increase: str | None = option(
        None, "Gate: perplexity above full precision's by at most this share, as 1% or 0.01."
    )
    max_kl: float | None = option(None, "Gate: KL to full precision, nats a token.")
    max_bits: float | None = option(None, "Gate: stored bits per value of packed blocks.")
    max_cache_bytes: float | None = option(
        None, "Gate: bytes that packed blocks and windows take at one text window's end."
    )
    max_layer_drift: float | None = option(
        None, "Gate: any layer's relative error of keys or values, in times what the bundle recorded."
    )
