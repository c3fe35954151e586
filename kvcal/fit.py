"""The one calibration driver: a scan over layers with a checkpoint after each, so that a killed run goes on.

Layers below the interruption are replayed (their codecs are on disk; hidden states and reconstructions are computed
again), which gives the same bytes as an uninterrupted run.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcal_artifacts import hf
from kvcal_artifacts.bundle import (
    Bundle,
    Fingerprint,
    canonical,
    load_bundle,
    probed_layers,
    sha256_text,
    write_atomically,
)
from kvcal_artifacts.errors import KVCalError, NonFiniteError, UsageError
from kvcal_artifacts.scheme import LayerCodecs, Scheme

from . import __version__
from .capture import Capture, LayerSource, LayerTaps, default_batch

if TYPE_CHECKING:
    from .corpus import Windows
from .methods.base import Carry, Finishing, Method, outlier_warning, settings_of
from .methods.vqkv import VQKV
from .report.progress import progress
from .report.timing import PhaseTimer
from .spill import SpillStore, Where


@dataclass(frozen=True)
class FitOptions:
    """How to run, not what to learn. spill: where hidden states and reconstructions lie."""

    batch: int | None = None
    spill: Where = "device"
    spill_dir: Path | None = None
    resume: bool = True


@dataclass
class FitResult:
    bundle: Bundle
    path: Path
    sha256: str
    seconds: dict[str, float]
    resumed_layers: int
    layer_metrics: list[dict[str, float]] = field(default_factory=list)


def fit(
    method: Method | VQKV,
    source: LayerSource,
    text: Windows,
    output: Path,
    *,
    model_record: dict[str, Any],
    revision: str | None,
    device: torch.device,
    seed: int = 0,
    options: FitOptions | None = None,
    searched: Mapping[str, Mapping[str, Any]] | None = None,
    say: Callable[[str], None] = lambda line: None,
    other: Windows | None = None,
) -> FitResult:
    """Calibrate every layer and write the bundle; the same arguments give the same bytes.

    searched: how the method's settings were found and what was seen there: `provenance` and `metrics`, kept under "search".
    other: windows of another text, for methods that compare; they come behind the held-out ones.
    Raises KVCalError for models or windows that cannot be calibrated, before any work.
    """
    if isinstance(method, VQKV):  # its codebooks are shared by layers: no scan
        from .train import train

        return train(
            method, source, text, output, model_record=model_record, revision=revision, device=device, seed=seed,
            options=options, say=say,
        )  # fmt: skip
    options = options or FitOptions()
    timer = PhaseTimer(device)
    config, dtype = hf.config_of(source.model), next(source.model.parameters()).dtype
    ids = torch.cat((text.train, text.holdout, *(() if other is None else (other.train,))))
    shape = hf.layer_shape(config, method.windows.block)
    tokens = coded_tokens(ids.shape[1], method.windows.sink, method.windows.block)
    record = provenance(
        method, text, model_record, device, dtype, options.batch or default_batch(ids.shape[1], device), seed
    )
    searched = searched or {}
    record |= {"search": searched["provenance"]} if "provenance" in searched else {}
    if other is not None:
        record["other_text"] = {"source": other.source, "sha256": other.sha256, "ids_sha256": other.ids_sha256}
    work = Checkpoint(output, record, options.resume)
    done = work.layers()
    if done:
        say(f"resuming after layer {len(done) - 1} of {config.num_hidden_layers} from {work.folder}")
    fitted: list[LayerCodecs] = []
    metrics: list[dict[str, float]] = []
    probe: tuple[float, ...] = ()
    with work.failing(), ExitStack() as stack:
        capture = stack.enter_context(
            Capture(
                source, ids, device=device, batch=options.batch, hidden=options.spill,
                spill_dir=options.spill_dir, timer=timer,
            )
        )  # fmt: skip
        carry = Carry(len(text.train), tokens, shape, timer, config.num_hidden_layers, held=len(text.holdout))
        width = (len(ids), tokens.stop - tokens.start, shape.heads * shape.dim)
        made: dict[str, SpillStore] = {}
        for name, buffer in method.buffers().items():
            if buffer not in made:
                made[buffer] = stack.enter_context(
                    SpillStore(width, dtype, device=device, where=options.spill,
                               spill_dir=options.spill_dir, label="reconstructions")
                )  # fmt: skip
            carry.stores[name] = made[buffer]
        with progress("Fitting layers", total=config.num_hidden_layers) as advance:
            for taps in capture:
                if taps.index in probed_layers(config.num_hidden_layers):
                    probe += hf.key_probe(taps.site)
                pair, measured = _one_layer(method, taps, carry, done, work)
                fitted.append(pair)
                metrics.append(measured)
                advance()
    fingerprint = Fingerprint.of(source.model, revision, probe)
    if isinstance(method, Finishing):
        fitted, metrics = method.finish(fitted, metrics)
    scheme = Scheme(method.windows, method.frame, tuple(fitted))
    if (line := outlier_warning(metrics)) is not None:
        say(line)
    summary = {"layers": metrics, "holdout_windows": len(text.holdout), "bits_per_value": scheme.bits_per_value()}
    summary |= {"search": searched["metrics"]} if "metrics" in searched else {}
    bundle = Bundle(fingerprint, scheme, record, summary | averages(metrics))
    with work.failing():
        digest = bundle.write(output)
    work.remove()
    return FitResult(bundle, output, digest, timer.split(), len(done), metrics)


def _one_layer(
    method: Method, taps: LayerTaps, carry: Carry, done: dict[int, Bundle], work: Checkpoint
) -> tuple[LayerCodecs, dict[str, float]]:
    if (known := done.get(taps.index)) is not None:
        pair = known.scheme.layers[0]
        assert pair is not None
        method.replay_layer(taps.index, taps, carry, pair)
        return pair, known.metrics
    result = method.fit_layer(taps.index, taps, carry)
    work.save(taps.index, method, result.codecs, result.metrics)
    return result.codecs, result.metrics


def coded_tokens(length: int, sink: int, block: int) -> slice:
    """Which tokens of a window a cache would pack: not the sink, and whole blocks only."""
    blocks = (length - sink) // block
    if blocks < 1:
        raise UsageError(
            f"windows of {length} tokens leave nothing to compress behind a sink of {sink} in blocks of {block}; "
            f"use --length {sink + block} or more"
        )
    return slice(sink, sink + blocks * block)


def provenance(
    method: Method | VQKV,
    text: Windows,
    model_record: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    seed: int,
) -> dict[str, Any]:
    """Everything that decides the bytes; no times, no paths of this machine."""
    import transformers

    return {
        "tool": f"kvcal {__version__}",
        "method": method.name,
        "settings": settings_of(method),
        "model": model_record,
        "text": {
            "source": text.source,
            "sha256": text.sha256,
            "ids_sha256": text.ids_sha256,
            "train_windows": len(text.train),
            "holdout_windows": len(text.holdout),
            "length": int(text.train.shape[1]),
            **({} if text.column is None else {"column": text.column}),
        },
        "seed": seed,
        "batch": batch,  # of windows: it decides the last bits of products
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        **({"cpu": cpu_record()} if device.type == "cpu" else {}),
        "versions": {
            "python": ".".join(platform.python_version_tuple()[:2]),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def cpu_record() -> dict[str, Any]:
    """What decides the last bits of sums on a CPU: how they are split over threads, and its vector instructions."""
    return {"threads": torch.get_num_threads(), "vectors": torch.backends.cpu.get_cpu_capability()}


def averages(metrics: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the layers that have the figure; lists, a number a head, have none."""
    names = dict.fromkeys(name for row in metrics for name, value in row.items() if not isinstance(value, list))
    return {
        name: round(sum(row[name] for row in metrics if name in row) / sum(name in row for row in metrics), 6)
        for name in names
    }


def _check_writable(folder: Path) -> None:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise KVCalError(f"{folder}: cannot be written to ({error.strerror}); give another --output") from error


def check_output(output: Path) -> None:
    """Raise now, not after an hour, if no file can be written there."""
    if output.is_dir():
        raise KVCalError(f"--output {output} is a folder: give a file name")
    if not output.parent.is_dir():
        raise KVCalError(f"{output.parent} is not a folder; create it or give another --output")
    _check_writable(output.parent)


class Checkpoint:
    """A hidden folder beside the output: one small bundle a fitted layer, for the settings it was made with."""

    def __init__(self, output: Path, record: dict[str, Any], resume: bool) -> None:
        check_output(output)
        self.folder = output.parent / f".{output.name}.partial"
        self._key = sha256_text(canonical(record))
        if self.folder.exists() and (not resume or self._stored_key() != self._key):
            why = "is of other settings" if resume else "is not wanted"
            print(f"kvcal: {self.folder} {why}; starting anew", file=sys.stderr)
            shutil.rmtree(self.folder)

    def _stored_key(self) -> str | None:
        try:
            key = json.loads((self.folder / "settings.json").read_text())["key"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return str(key)

    def layers(self) -> dict[int, Bundle]:
        """Fitted layers 0, 1, ... up to the first that is missing or damaged."""
        found: dict[int, Bundle] = {}
        while (path := self._path(len(found))).exists():
            try:
                found[len(found)] = load_bundle(path, whole=False)
            except KVCalError:
                path.unlink()
                break
        return found

    def save(self, index: int, method: Method, pair: LayerCodecs, metrics: dict[str, float]) -> None:
        self.folder.mkdir(exist_ok=True)
        write_atomically(self.folder / "settings.json", json.dumps({"key": self._key}).encode())
        lone = Scheme(method.windows, method.frame, (pair,))
        nothing = Fingerprint("layer", 1, pair.key.shape.heads, pair.key.shape.dim, {}, "")
        Bundle(nothing, lone, {"layer": index}, metrics).write(self._path(index))

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Within, an error says what stays on disk; after one that would come again, nothing does."""
        try:
            yield
        except NonFiniteError:
            self.remove()
            raise
        except KVCalError as error:
            if type(error) is KVCalError and self.folder.exists():
                raise KVCalError(
                    f"{error} (fitted layers wait in {self.folder}: start again to go on, or delete it)"
                ) from error
            raise

    def _path(self, index: int) -> Path:
        return self.folder / f"layer-{index:04d}.safetensors"

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
