"""Whether a kernel gives on this GPU what its reference gives: tried once, the verdict stored in a file of the user's.

The file is preflight.json in $KVCAL_CACHE_DIR, else in kvcal/ of the user's cache directory ($XDG_CACHE_HOME or
~/.cache; ~/Library/Caches on macOS, %LOCALAPPDATA% on Windows). Delete it to have everything tried again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from threading import RLock

import torch

import kvcal_kernels
from kvcal_kernels.device import capturing, on
from kvcal_kernels.device import interpreted as interpreted  # others ask here
from kvcal_kernels.layout import Form, TransformForm
from kvcal_kernels.quantise import AnyRule, Rule

from ... import codecs
from ...codecs import Codec
from ...codecs.base import outline_of_form
from ...codecs.dequantise import kind
from ...errors import KVCalError
from ...files import lock, open_lock, read_text, write_atomically
from ...modes import without_autocast
from .codebook_trials import codebook_append_trial, codebook_trial
from .packing_trials import append_trial, encode_trial, quantise_trial
from .trials import dequantise_trial, transform_trial, trial

LEAST_CAPABILITY = (8, 0)  # what Triton supports
FILE = "preflight.json"
LOCK = "preflight.lock"
DRIVER = Path("/proc/driver/nvidia/version")


def folder() -> Path:
    """The folder in which verdicts are stored: KVCAL_CACHE_DIR, else where the system has its caches."""
    if directory := os.environ.get("KVCAL_CACHE_DIR"):
        return Path(directory).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "kvcal"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvcal"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcal"


@cache
def triton_version() -> str | None:
    """The version of the Triton that is installed; None without one."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def driver_version() -> str:
    """The version of NVIDIA's driver by its kernel module; else the CUDA that it offers (Jetson, WSL, Windows)."""
    try:
        if match := re.search(r"\s(\d+\.\d[\d.]*)\s", DRIVER.read_text("utf-8", "replace")):
            return match[1]
    except OSError:
        pass
    try:
        cuda, number = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"), ctypes.c_int()
        failed = cuda.cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return "unknown"
    return "unknown" if failed else f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"


@cache
def source_hash() -> str:
    """A hash over all kernels and references, and over what decides how they are tried: codecs and these checks."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    for package in (kvcal_kernels, codecs):
        files += sorted(Path(str(package.__file__)).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def unsupported(device: torch.device) -> str | None:
    """Why no Triton kernel runs on this device, whatever its shapes; None if they may."""
    if device.type != "cuda":
        return f"the layer is on {device.type}; the fused kernel needs a CUDA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        name, least = torch.cuda.get_device_name(device), ".".join(map(str, LEAST_CAPABILITY))
        return f"{name} has compute capability {capability[0]}.{capability[1]}; Triton needs {least}"
    if triton_version() is None:
        return "triton is not installed"
    return None


def verdict(
    keys: Form, values: Form, heads: int, ratio: int, dtype: torch.dtype, device: torch.device, rotary: int = 0
) -> str | None:
    """None where the attention kernel gives what the reference gives; else what is wrong.

    ratio: query heads per kv head. rotary: channels that it rotates of keys before RoPE.
    """
    parts = [
        "decode_attention",
        outline_of_form(keys),
        outline_of_form(values),
        f"d{keys.dim}",
        f"h{heads}",
        f"r{ratio}",
    ]
    parts += [f"RoPE of {rotary}"] if rotary else []
    return _verdict(parts, dtype, device, lambda: trial(keys, values, heads, ratio, dtype, device, rotary))


def transform_verdict(
    keys: TransformForm, values: TransformForm, heads: int, ratio: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """None where the kernel over the transform codec gives what the reference gives; else what is wrong."""
    parts = ["transform_attention", f"{keys.pairs}", f"{values.pairs}", f"d{keys.dim}", f"h{heads}", f"r{ratio}"]
    return _verdict(parts, dtype, device, lambda: transform_trial(keys, values, heads, ratio, dtype, device))


def append_verdict(
    key: AnyRule, value: AnyRule, dtype: torch.dtype, device: torch.device, channels: int = 0
) -> str | None:
    """The verdict on the kernel that appends and packs the tokens of a step; heads count where there is a grid.

    channels: rounded at a time in keys that SQuat corrects; 0: keys are packed uncorrected.
    """
    parts = ["append", rule_text(key), rule_text(value), f"d{key.form.dim}"]
    parts += [f"corrected by {channels} channels"] if channels else []
    return _verdict(parts, dtype, device, lambda: append_trial(key, value, dtype, device, channels))


def quantise_verdict(
    key: AnyRule, value: AnyRule, dtypes: tuple[torch.dtype, torch.dtype], scaled: bool, device: torch.device
) -> str | None:
    """The verdict on the kernel that packs whole blocks.

    dtypes: of keys and values; scaled: whether keys are divided by factors.
    """
    parts = ["quantise", rule_text(key), rule_text(value), f"d{key.form.dim}", f"keys of {dtypes[0]}, scaled {scaled}"]
    return _verdict(parts, dtypes[1], device, lambda: quantise_trial(key, value, dtypes, scaled, device))


def rule_text(rule: AnyRule) -> str:
    """A rule, in the name of a verdict."""
    if isinstance(rule, Rule):
        return f"{outline_of_form(rule.form)} {rule.mode}{' search' if rule.search else ''}"
    return f"{outline_of_form(rule.form)} grid of {len(rule.grid.points)}, h{rule.heads}, gain {rule.gain:.4g}"


def dequantise_verdict(codec: Codec, dtype: torch.dtype, rotary: int, device: torch.device) -> str | None:
    """The verdict on the kernel that decodes HIGGS under linear predictors.

    rotary: channels that it rotates by RoPE.
    """
    parts = ["reconstruct", kind(codec), f"RoPE of {rotary}"]
    return _verdict(parts, dtype, device, lambda: dequantise_trial(codec, dtype, rotary, device))


def encode_verdict(codec: Codec, dtype: torch.dtype, device: torch.device) -> str | None:
    """The verdict on the kernels by which a codec encodes.

    dtype: of what is encoded, which is float32 behind factors and predictors.
    """
    while codec.encoding_codec is not codec:
        codec, dtype = codec.encoding_codec, torch.float32
    return _verdict(["encode", codec.encoding()], dtype, device, lambda: encode_trial(codec, dtype, device))


def codebook_verdict(keys: Codec, values: Codec, ratio: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """The verdict on the kernels that attend to vector codes."""
    parts = ["vq_attention", keys.encoding(), values.encoding(), f"r{ratio}"]
    return _verdict(parts, dtype, device, lambda: codebook_trial(keys, values, ratio, dtype, device))


def codebook_append_verdict(keys: Codec, values: Codec, dtype: torch.dtype, device: torch.device) -> str | None:
    """The verdict on the kernels that append a step's tokens to vector codes."""
    parts = ["vq_append", keys.encoding(), values.encoding()]
    return _verdict(parts, dtype, device, lambda: codebook_append_trial(keys, values, dtype, device))


# What this process has tried. A verdict holds for all GPUs of a kind: (name, None). A check without one, because there
# was no memory, say, is of the one device where it ran.
_TRIED: dict[tuple[str, torch.device | None], str | None] = {}
_ONE_AT_A_TIME = RLock()  # a second thread that asks waits, and makes no second trial


def _verdict(parts: list[str], dtype: torch.dtype, device: torch.device, trial: Callable[[], str | None]) -> str | None:
    """Why this kernel does not run on the device; None if it does. It is tried once, and the verdict is stored."""
    if why := unsupported(device):
        return why
    name = key_of(parts, dtype, device)
    keys = (name, None), (name, device)
    if not any(key in _TRIED for key in keys):
        with _ONE_AT_A_TIME:
            if not any(key in _TRIED for key in keys):
                why, is_verdict = _tried_or_read(name, device, trial)
                _TRIED[keys[0] if is_verdict else keys[1]] = why
    return _TRIED[keys[0] if keys[0] in _TRIED else keys[1]]


def _tried_or_read(name: str, device: torch.device, trial: Callable[[], str | None]) -> tuple[str | None, bool]:
    """What is wrong with the kernel, and whether that is a verdict on it."""
    verdicts = read()
    if name in verdicts:
        return verdicts[name], True
    if capturing():
        raise KVCalError(
            f"{name.split(' | ')[0]}: a CUDA graph is being recorded, in which this kernel cannot be checked before "
            "its first use; make the cache, and run a prompt with it, before you record"
        )
    if fault := _cuda_fault(device):
        raise KVCalError(
            f"{torch.cuda.get_device_name(device)}: this process cannot use the GPU since what it ran before "
            f"({fault}); start again, with CUDA_LAUNCH_BLOCKING=1 to see where it happens"
        )
    try:
        with on(device), without_autocast(device.type):
            why = trial()
    except torch.OutOfMemoryError as error:  # says nothing of the kernel
        return f"its check ran out of memory: {error}", False
    except Exception as error:  # no compiler, say, which may be there next time: not written down
        if fault := _cuda_fault(device):
            keep(name, f"its check ended in a CUDA fault: {fault}")
            raise KVCalError(_broken(name, device, fault)) from error
        return f"its check failed: {type(error).__name__}: {error}".splitlines()[0], False
    keep(name, why)
    return why, True


def _cuda_fault(device: torch.device) -> str | None:
    """CUDA's error if this process can no longer use the GPU, after an illegal access, say; None if it can."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        message = (str(error) or type(error).__name__).splitlines()[0]
        return None if "captur" in message else message  # cudaErrorStreamCapture...: another thread records a graph
    return None


def _broken(name: str, device: torch.device, fault: str) -> str:
    again = f"start again: {folder() / FILE} now keeps this kernel from being used"
    if name not in read():
        again = f"{folder() / FILE} cannot be written, so start again with kernels='off'"
    return (
        f"{name.split(' | ')[0]}: the check of this kernel ended in a CUDA fault on "
        f"{torch.cuda.get_device_name(device)} ({fault}), after which this process cannot use the GPU; {again}"
    )


def remembered(why: str) -> str:
    """How to have a kernel tried again, if `why` is a verdict in the file; else nothing: each process tries anew."""
    return f"; to have it tried again delete {folder() / FILE}" if why in read().values() else ""


def key_of(parts: list[str], dtype: torch.dtype, device: torch.device) -> str:
    """Everything that a verdict may depend on."""
    mode = "interpreted" if interpreted() else "compiled"
    machine = [str(dtype), torch.cuda.get_device_name(device), mode, source_hash(), f"triton {triton_version()}"]
    return " | ".join([*parts, *machine, f"torch {torch.__version__}", f"driver {driver_version()}"])


def read() -> dict[str, str | None]:
    """The verdicts in the file; none where it is missing, damaged or not ours.

    Raises KVCalError where it is a pipe, say.
    """
    try:
        verdicts = json.loads(read_text(folder() / FILE))
    except FileNotFoundError:
        return {}
    except OSError as error:
        if error.errno == errno.EINVAL:  # a pipe, say, which a run would wait for
            raise KVCalError(
                f"{folder() / FILE} is {error.strerror}: remove it, or set KVCAL_CACHE_DIR to another folder"
            ) from error
        return {}
    except (ValueError, RecursionError):  # the last of brackets in brackets
        return {}
    ours = isinstance(verdicts, dict) and all(why is None or isinstance(why, str) for why in verdicts.values())
    return verdicts if ours else {}


def keep(name: str, why: str | None) -> None:
    """Add a verdict to the file, which may have those of other processes by now.

    If the directory cannot be written, the next process tries the kernel again.
    """
    with contextlib.suppress(OSError, KVCalError):
        folder().mkdir(parents=True, exist_ok=True)
        with _alone():
            verdicts = read() | {name: why}
            write_atomically(folder() / FILE, json.dumps(verdicts, indent=1, sort_keys=True).encode())


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A context that one process at a time is in.

    Where files cannot be locked (Windows), one of two processes that write at a time loses its verdict.
    """
    handle = open_lock(folder() / LOCK)
    try:
        lock(handle, wait=True)
        yield
    finally:
        os.close(handle)
