"""What is wrong with a command's options, as far as it shows without torch: before anything heavy is imported.

The commands check the same where they use a value: a recipe or a record does not come through here.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from kvcal_artifacts.errors import UsageError

from ..bundles.missing import refuse_missing
from ..models.names import ModelSource, resolve
from ..pipeline.names import COMMANDS, SUFFIX, names_of
from ..pipeline.options import CalibrationOptions, EvalOptions, PresetOptions
from ..pipeline.shared_options import MaybeModelOptions, ModelOptions, Schemes, Selection, TextSource
from ..pipeline.spec import Options, specs
from ..report.outputs import check_output
from ..report.suggest import allowed, refuse_auto
from ..search.limit import Limit
from .idle import refuse_empty_text, refuse_prompt, refuse_shares
from .options import (
    CardOptions,
    DiffOptions,
    GenerateOptions,
    InspectOptions,
    PlanOptions,
    PushOptions,
    RecommendOptions,
    VerifyOptions,
)
from .task_choice import chosen_tasks

TORCH_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "meta", "xla", "npu", "privateuseone")


def refuse(o: Options) -> None:
    """Raise UsageError, CorruptBundle for a bundle that is not there, or what names no model, text or output file."""
    if isinstance(o, CalibrationOptions | PresetOptions | RecommendOptions) and o.output is not None:
        check_output(o.output)
    _check_values(o)
    for path, presets in _bundles(o):
        refuse_missing(path, presets=presets)
    for name in _presets(o):
        _check_preset(name)
    if isinstance(o, GenerateOptions):
        refuse_prompt(o)
    if isinstance(o, EvalOptions):
        chosen_tasks(o)
    if isinstance(o, RecommendOptions):
        Limit(o.max_bits, o.max_kl)
    if isinstance(o, Selection):
        refuse_shares(o)
    source = _model(o)
    if isinstance(o, TextSource) and o.text is not None:
        refuse_empty_text(o.text)
        if source is None or source.kind != "folder":  # whose config.json is blamed first, by Transformers
            from ..text.documents import check_local

            check_local(o.text)


def _check_values(o: Options) -> None:
    """UsageError for a value that is none of those that an option has, and for a device that torch does not know."""
    for name, spec in specs(type(o)).items():
        value = getattr(o, name)
        if not isinstance(value, str):
            continue
        if spec.one_of and value not in spec.one_of:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} {value or repr(value)}: allowed are {', '.join(spec.one_of)}")
        if "machine" in spec.names and value != "auto":
            _check_device(value)


def _model(o: Options) -> ModelSource | None:
    """What --model names; None for commands without, and for `kvcal plan`, which reads a config.json too."""
    if isinstance(o, PlanOptions) or not isinstance(o, ModelOptions | MaybeModelOptions) or o.model is None:
        return None
    return resolve(o.model, o.revision)


def _check_device(name: str) -> None:
    if name.partition(":")[0] not in TORCH_DEVICES:
        raise UsageError(
            f"device {name or repr(name)}: torch knows no such device; allowed are cpu, cuda, cuda:N and auto"
        )


def _bundles(o: Options) -> Iterator[tuple[Path, bool]]:
    """Each bundle that the command reads, and whether it has --preset."""
    if isinstance(o, EvalOptions):
        yield from ((path, True) for path in o.bundles or ())
    if isinstance(o, Schemes):
        yield from ((path, True) for path in o.bundle or ())
    if isinstance(o, GenerateOptions) and o.bundle is not None:
        yield o.bundle, True
    if isinstance(o, InspectOptions | VerifyOptions | CardOptions | PushOptions):
        yield o.bundle, False
    if isinstance(o, DiffOptions):
        yield from ((o.a, False), (o.b, False))


def _presets(o: Options) -> Iterator[str]:
    if isinstance(o, Schemes):
        yield from o.preset or ()
    if isinstance(o, GenerateOptions) and o.preset:
        yield o.preset
    if isinstance(o, PresetOptions) and o.name is not None:
        yield o.name


def _check_preset(name: str) -> None:
    """UsageError for an unknown preset; where packages that add presets are installed, the command asks them."""
    refuse_auto(name)
    presets = names_of("preset")
    if name in presets or name.endswith((SUFFIX, ".safetensors")):
        return
    if not entry_points(group="kvcal"):
        if name in COMMANDS:
            raise UsageError(
                f"preset {name!r} is a method, which needs a text: `kvcal {COMMANDS[name]}` makes its bundle, which "
                "--bundle takes"
            )
        raise UsageError(f"preset {name!r} is not known; {allowed(name, presets, 'kvcal names preset')}")
