"""`kvcal train-codebooks`."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, cast

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import Frame

from ..calibrate.driver import train
from ..methods.codebooks import Training
from ..methods.vqkv import SIZES, VQKV, Triple, default_sizes
from ..models import configuration, names
from ..pipeline.options import TrainCodebooksOptions
from ..report.timing import command_start
from .calibration import prepare, written
from .common import Say, output_for, refuse_idle

if TYPE_CHECKING:
    from ..models.geometry import Geometry

OF_ADAM = ("rate", "batch_vectors", "beta", "gamma")


def _triple(option: str, text: str) -> Triple:
    """ "10,20,14" -> (10, 20, 14)."""
    try:
        values, low, high = (int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: three numbers, of values, low band and high band: 10,20,14") from error
    return values, low, high


def vqkv_method(o: TrainCodebooksOptions, geometry: Geometry) -> VQKV:
    """Options over the preset that suits the model."""
    name = default_sizes(geometry.parameters) if o.preset is None else o.preset
    if name not in SIZES:
        raise UsageError(f"--preset {name!r}: allowed are {', '.join(SIZES)}")
    preset, dim = SIZES[name], geometry.head_dim
    return VQKV(
        stages=_triple("--stages", o.stages) if o.stages is not None else preset.stages_for(dim),
        sizes=_triple("--sizes", o.sizes) if o.sizes is not None else preset.sizes,
        high=preset.high_for(dim) if o.high_dims is None else o.high_dims,
        vectors=o.vectors or preset.vectors,
        shared=not o.per_layer,
        scale=o.scale,
        split=o.split_by,
        rope=cast(Frame, o.frame),
        training=Training(
            trainer=o.trainer,
            tolerance=o.tolerance,
            least=o.min_iterations,
            most=o.max_iterations,
            rate=o.rate,
            batch=o.batch_vectors,
            beta=o.beta,
            gamma=o.gamma,
            seed=o.seed,
        ),
        sink=o.sink,
        recent=preset.recent if o.recent is None else o.recent,
        block=preset.block if o.block is None else o.block,
    )


def check_taken(o: TrainCodebooksOptions, method: VQKV, typed: Collection[str]) -> None:
    """Raise UsageError for the first option (`typed`) that the method does not use."""
    if method.training.trainer != "adam":
        refuse_idle(typed, OF_ADAM, "steps of Adam", "give --trainer adam, or leave it out")
    if not method.high:
        refuse_idle(typed, ("split_by",), "keys in two bands", "give a --high-dims above 0, or leave it out")
    if None not in (o.stages, o.sizes, o.high_dims, o.vectors, o.recent, o.block):  # what --preset stands for
        refuse_idle(
            typed,
            ("preset",),
            "sizes and windows that are not given",
            "leave out it or one of the options that give them",
        )


def run_train_codebooks(o: TrainCodebooksOptions, say: Say, typed: Collection[str] = ()) -> dict[str, Any]:
    """What was written and how good it is.

    typed: names of the options that somebody gave; UsageError for one that nothing takes.
    """
    started = command_start()
    source = names.resolve(o.model, o.revision)
    method = vqkv_method(o, configuration.geometry(source))
    check_taken(o, method, typed)
    output = output_for(o, source, method.name)
    of = prepare(o, source, output, say)
    result = train(
        method,
        of.opened.source,
        of.text,
        output,
        model_record=of.opened.record,
        revision=of.opened.revision,
        device=of.opened.device,
        seed=o.seed,
        say=say,
        options=of.options,
        selection=of.selection,
    )
    metrics = result.bundle.metrics
    return {
        **written(result),
        "trainer": method.training.trainer,
        "stages": list(method.stages),
        "sizes": list(method.sizes),
        "paper_bits_per_value": metrics["paper_bits_per_value"],
        "paper_compression": metrics["paper_compression"],
        "codebook_bytes": metrics["codebook_bytes"],
        "key_relative_error": metrics["key_relative_error"],
        "value_relative_error": metrics["value_relative_error"],
        "train_vectors": metrics["train_vectors"],
        "holdout_vectors": metrics["holdout_vectors"],
        "resumed_stages": result.resumed_stages,
        "seconds": round(time.monotonic() - started, 1),
        "phases": result.seconds,
        "peak_bytes": result.peak_bytes,
        "bands": metrics["bands"],
        "stage_rows": result.stages,
    }
