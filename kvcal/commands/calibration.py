"""What the calibrating commands share: a model opened layer by layer, windows of text, what is reported of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import HeavyHitters

from ..calibrate.checkpoint import check_partial
from ..calibrate.driver import fit
from ..calibrate.job import FitOptions, FitResult
from ..capture import ranks
from ..capture.spill import Where
from ..methods.base import Method
from ..models import names
from ..pipeline.options import CalibrationOptions
from ..pipeline.shared_options import Layerwise, Selection
from ..report.outputs import check_output
from ..report.timing import PhaseTimer
from ..text import token_windows
from .common import (
    Say,
    calibration_windows,
    check_column,
    check_context,
    other_text,
    other_windows,
    selection_of,
    text_for,
    tokenizer_for,
)
from .workbench import Opened, check_selection, open_for_fit, spread_of

SPILLS = ("device", "cpu", "disk")


@dataclass(frozen=True)
class Calibration:
    """A model, and windows of the text `origin` to fit it on.

    options: how to run; seed: of the windows; selection: which tokens a cache of the bundle keeps; other: windows of
    --other-text.
    """

    opened: Opened
    text: token_windows.Windows
    origin: str
    options: FitOptions
    seed: int
    say: Say
    selection: HeavyHitters | None
    other: token_windows.Windows | None = None

    @property
    def length(self) -> int:
        """Tokens a window."""
        return int(self.text.train.shape[1])

    def fit(self, method: Method, output: Path) -> FitResult:
        """Call kvcal.calibrate.driver.fit with the command's options."""
        return fit(
            method,
            self.opened.source,
            self.text,
            output,
            model_record=self.opened.record,
            revision=self.opened.revision,
            device=self.opened.device,
            seed=self.seed,
            say=self.say,
            options=self.options,
            other=self.other,
            selection=self.selection,
        )

    def counts(self) -> dict[str, int]:
        """Counts of windows for a command's result."""
        return {
            "train_windows": len(self.text.train),
            "holdout_windows": len(self.text.holdout),
            "length": self.length,
        }


def prepare(o: CalibrationOptions, source: names.ModelSource, output: Path | None, say: Say) -> Calibration:
    """Text, windows and model of a calibrating command. Raises KVCalError before any model is read, if one of the text,
    the output or --spill cannot be.
    """
    options, selection = run_options(o), selection_of(o) if isinstance(o, Selection) else None
    timer = PhaseTimer()
    timer.count_imports()
    with timer("text"):
        origin = text_for(o, source, "calibration")
        check_column(o.column, origin, other_text(o))
        say(f"text: {origin}")
        if output is not None:
            check_output(output)
            check_partial(output)
    with timer(timer.IMPORT):  # takes seconds, and would count as whatever asks first
        import transformers.modeling_utils  # noqa: F401
    with timer("text"):
        tokenizer = tokenizer_for(o, source, origin, other_text(o))
        check_selection(source, selection, random_weights=o.random_weights)
        text = calibration_windows(o, source, tokenizer, origin, say)
        check_context(source, text.length, say)
        other = other_windows(o, tokenizer, origin, len(text.train), text.length, say)
    with timer("weights"):
        opened = open_for_fit(
            o.model,
            o.revision,
            dtype=o.dtype,
            device=o.device,
            layerwise=is_layerwise(o),
            random_weights=o.random_weights,
            seed=o.seed,
            spread=spread_of(o, layerwise=is_layerwise(o)),
        )
        timer.device = opened.device
    options = replace(options, timer=timer)
    return Calibration(opened, text, origin, options, o.seed, say, selection, other)


def is_layerwise(o: CalibrationOptions) -> bool:
    """Whether one layer's weights are on the device at a time."""
    return isinstance(o, Layerwise) and o.layerwise


def spill_dir(o: CalibrationOptions) -> Path | None:
    """The folder for --spill disk, of commands that can spill to disk."""
    return o.spill_dir if isinstance(o, Layerwise) else None


def run_options(o: CalibrationOptions) -> FitOptions:
    """--batch, --spill, --spill-dir and --resume, checked."""
    if o.spill not in SPILLS:
        raise UsageError(f"--spill {o.spill}: allowed are {', '.join(SPILLS[:-1])} and {SPILLS[-1]}")
    folder = spill_dir(o)
    if folder is not None and o.spill != "disk":
        raise UsageError(
            f"--spill-dir applies only to --spill disk, and --spill is {o.spill}: give that, or leave it out"
        )
    return FitOptions(o.batch, cast(Where, o.spill), folder, o.resume, ranks=ranks.current())


def refuse_ranks(what: str, instead: str) -> None:
    """Raise UsageError where torchrun started more than one process, for what they cannot share."""
    if (count := ranks.current().count) > 1:
        raise UsageError(f"{what} is not spread over processes, and torchrun started {count}: {instead}")


def written(result: FitResult) -> dict[str, object]:
    """The bundle, for a command's result."""
    return {
        "bundle": str(result.path),
        "sha256": result.sha256,
        "bytes": result.path.stat().st_size,
        "bits_per_value": round(result.bundle.scheme.bits_per_value(), 4),
    }
