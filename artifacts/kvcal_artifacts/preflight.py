"""Whether the fused kernel gives on this GPU what its reference gives: tried once, the verdict kept in a file of the user's.

The file is preflight.json in $KVCAL_CACHE_DIR, else in kvcal/ of the user's cache directory ($XDG_CACHE_HOME or ~/.cache;
~/Library/Caches on macOS, %LOCALAPPDATA% on Windows). Delete it to have everything tried again.
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
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

import kvcal_kernels
from kvcal_kernels import attention, compensated, layout, quantise, reconstruct, vq_append, vq_attention
from kvcal_kernels.attention import reference
from kvcal_kernels.compensated import Moves
from kvcal_kernels.device import capturing, on
from kvcal_kernels.layout import BLOCK, Form
from kvcal_kernels.quantise import AnyRule, GridRule, Rule
from kvcal_kernels.reconstruct import Turn

from . import codecs
from .codecs import Codec, Context, Higgs, MixKVQ, Predicted, ResidualVQ, Scaled, Squat, Uniform
from .codecs.base import CONTEXT_TENSORS
from .codecs.ragged import Ragged
from .codecs.reconstruct import Reconstruction, kind
from .errors import KVCalError
from .files import open_lock, read_text, write_atomically
from .modes import without_autocast
from .store import Stored

LEAST_CAPABILITY = (8, 0)  # what Triton supports
FILE = "preflight.json"
LOCK = "preflight.lock"
DRIVER = Path("/proc/driver/nvidia/version")
BLOCKS = (9, 0, 4)  # packed blocks of the rows that are tried: several programs, none, one turn of a program
SINK, RECENT = (4, 2, 4), (131, 17, 40)
CALLS = ((1, False), (1, True), (3, True), (16, False))  # new tokens, and whether recent ones lie in a ring
OF_TIERS = ((1, False), (3, False))  # each compiles for 80 s; tiers come in caches without a ring
VECTOR_CALLS = (1, 3)  # new tokens, of kernels over vector codes
ROWS = (512, 832)  # tokens that the reconstruction kernel is tried on: whole tiles of it, and not


def folder() -> Path:
    if own := os.environ.get("KVCAL_CACHE_DIR"):
        return Path(own).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "kvcal"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvcal"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcal"


@cache
def triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def driver_version() -> str:
    """Of NVIDIA's driver, as its kernel module says; where none does (Jetson, WSL, Windows) the CUDA that it offers."""
    try:
        if found := re.search(r"\s(\d+\.\d[\d.]*)\s", DRIVER.read_text("utf-8", "replace")):
            return found[1]
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
    """Of all kernels and their references, and of what decides what is tried of them: codecs, and this check."""
    files = [Path(__file__)]
    for package in (kvcal_kernels, codecs):
        files += sorted(Path(str(package.__file__)).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


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
    """None where the kernel gives what the reference gives; else what is wrong. ratio: query heads a kv head. rotary: channels
    that it turns of keys before RoPE.
    """
    parts = ["decode_attention", _said(keys), _said(values), f"d{keys.dim}", f"h{heads}", f"r{ratio}"]
    parts += [f"RoPE of {rotary}"] if rotary else []
    return _found(parts, dtype, device, lambda: trial(keys, values, heads, ratio, dtype, device, rotary))


def append_verdict(
    key: AnyRule, value: AnyRule, dtype: torch.dtype, device: torch.device, channels: int = 0
) -> str | None:
    """As `verdict`, of the kernel that appends and packs the tokens of a step; heads count where there is a grid. channels: of
    keys that SQuat corrects, rounded at a time; 0: they are packed as they are.
    """
    parts = ["append", rule_said(key), rule_said(value), f"d{key.form.dim}"]
    parts += [f"corrected by {channels} channels"] if channels else []
    return _found(parts, dtype, device, lambda: append_trial(key, value, dtype, device, channels))


def quantise_verdict(
    key: AnyRule, value: AnyRule, given: tuple[torch.dtype, torch.dtype], scaled: bool, device: torch.device
) -> str | None:
    """As `verdict`, of the kernel that packs whole blocks. given: dtypes of keys and values; scaled: keys are divided by
    factors.
    """
    parts = ["quantise", rule_said(key), rule_said(value), f"d{key.form.dim}", f"keys of {given[0]}, scaled {scaled}"]
    return _found(parts, given[1], device, lambda: quantise_trial(key, value, given, scaled, device))


def rule_said(rule: AnyRule) -> str:
    """In the name of a verdict."""
    if isinstance(rule, Rule):
        return f"{_said(rule.form)} {rule.mode}{' search' if rule.search else ''}"
    return f"{_said(rule.form)} grid of {len(rule.grid.points)}, h{rule.heads}, gain {rule.gain:.4g}"


def reconstruct_verdict(codec: Codec, dtype: torch.dtype, rotary: int, device: torch.device) -> str | None:
    """As `verdict`, of the kernel that decodes HIGGS under linear predictors. rotary: channels that it turns by RoPE."""
    parts = ["reconstruct", kind(codec), f"RoPE of {rotary}"]
    return _found(parts, dtype, device, lambda: reconstruct_trial(codec, dtype, rotary, device))


def encode_verdict(codec: Codec, dtype: torch.dtype, device: torch.device) -> str | None:
    """As `verdict`, of the kernels of a codec that encodes by some. dtype: of what is encoded, float32 behind factors and
    predictors.
    """
    while isinstance(codec, Scaled | Predicted):
        codec, dtype = codec.inner, torch.float32
    return _found(["encode", _encoding(codec)], dtype, device, lambda: encode_trial(codec, dtype, device))


def _encoding(codec: Codec) -> str:
    """What the code of a codec's kernels depends on."""
    if isinstance(
        codec, Higgs
    ):  # codes lie as the attention kernel reads them, or as bits that also decode what they pack
        form = codec.fused()
        return f"{kind(codec)}, {_said(form) if isinstance(form, Form) else 'plain codes'}"
    shape = f"{codec.name}, {codec.shape.heads} x {codec.shape.dim}, blocks of {codec.shape.block}"
    if isinstance(codec, Squat) and isinstance(codec.inner, Uniform):
        return (
            f"{shape}, {codec.channels} channels, {codec.inner.bits} bits, group {codec.inner.group}, {codec.subspace}"
        )
    if isinstance(codec, MixKVQ):
        how = f"{codec.normalise} {codec.importance} {codec.full} {codec.four}"
        return f"{shape}, {how}, rounded to {codec.round_up}, group {codec.group}, {codec.dtype}"
    return f"{shape}, {codec.describe()}"


def vectors_verdict(
    keys: ResidualVQ, values: ResidualVQ, ratio: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """As `verdict`, of the kernels that attend to vector codes."""
    shape, books = keys.shape, [f"{[tuple(book.shape) for book in codec.codebooks]}" for codec in (keys, values)]
    scaled = [codec.scale is not None for codec in (keys, values)]
    held = f"{shape.heads} x {shape.dim}, blocks of {shape.block}, scaled {scaled}"
    parts = ["vq_attention", *books, held, f"r{ratio}"]
    return _found(parts, dtype, device, lambda: vectors_trial(keys, values, ratio, dtype, device))


def vectors_append_verdict(
    keys: ResidualVQ, values: ResidualVQ, dtype: torch.dtype, device: torch.device
) -> str | None:
    """As `verdict`, of the kernels that append a step's tokens to vector codes."""
    shape, books = keys.shape, [f"{[tuple(book.shape) for book in codec.codebooks]}" for codec in (keys, values)]
    scaled = [codec.scale is not None for codec in (keys, values)]
    parts = ["vq_append", *books, f"{shape.heads} x {shape.dim}, blocks of {shape.block}, scaled {scaled}"]
    return _found(parts, dtype, device, lambda: vectors_append_trial(keys, values, dtype, device))


# Of this process. A verdict, which is the kernel's on that kind of GPU, holds for all of them: (name, None). A check without
# one, as there was no memory, say, is of the one device where it was made.
_TRIED: dict[tuple[str, torch.device | None], str | None] = {}
_ONE_AT_A_TIME = RLock()  # a second thread that asks waits, and makes no trial of its own


def _found(parts: list[str], dtype: torch.dtype, device: torch.device, trial: Callable[[], str | None]) -> str | None:
    """Why this kernel does not run on the device; None if it does. It is tried once, and the verdict kept."""
    if why := unsupported(device):
        return why
    name = key_of(parts, dtype, device)
    keys = (name, None), (name, device)
    if not any(key in _TRIED for key in keys):
        with _ONE_AT_A_TIME:
            if not any(key in _TRIED for key in keys):
                why, is_verdict = _kept(name, device, trial)
                _TRIED[keys[0] if is_verdict else keys[1]] = why
    return _TRIED[keys[0] if keys[0] in _TRIED else keys[1]]


def _kept(name: str, device: torch.device, trial: Callable[[], str | None]) -> tuple[str | None, bool]:
    """What is wrong with the kernel, and whether that is a verdict on it."""
    known = read()
    if name in known:
        return known[name], True
    if capturing():
        raise KVCalError(
            f"{name.split(' | ')[0]}: a CUDA graph is being recorded, in which this kernel cannot be checked before its first "
            "use; make the cache, and run a prompt with it, before you record"
        )
    if fault := _fault(device):
        raise KVCalError(
            f"{torch.cuda.get_device_name(device)}: this process cannot use the GPU since what it ran before ({fault}); start "
            "again, with CUDA_LAUNCH_BLOCKING=1 to see where it happens"
        )
    try:
        with on(device), without_autocast(device.type):
            why = trial()
    except torch.OutOfMemoryError as error:  # says nothing of the kernel
        return f"its check ran out of memory: {error}", False
    except Exception as error:  # no compiler, say, which may be there next time: not written down
        if fault := _fault(device):
            keep(name, f"its check ended in a CUDA fault: {fault}")
            raise KVCalError(_broken(name, device, fault)) from error
        return f"its check failed: {type(error).__name__}: {error}".splitlines()[0], False
    keep(name, why)
    return why, True


def _fault(device: torch.device) -> str | None:
    """What CUDA says of a process that an illegal access, say, has left without the GPU; None where it can still use it."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        return None if "captur" in said else said  # cudaErrorStreamCapture...: another thread records a graph
    return None


def _broken(name: str, device: torch.device, fault: str) -> str:
    again = f"start again: {folder() / FILE} now keeps this kernel from being used"
    if name not in read():
        again = f"{folder() / FILE} cannot be written, so start again with kernels='off'"
    return (
        f"{name.split(' | ')[0]}: the check of this kernel ended in a CUDA fault on {torch.cuda.get_device_name(device)} "
        f"({fault}), after which this process cannot use the GPU; {again}"
    )


def remembered(why: str) -> str:
    """How to have a kernel tried again, where `why` is a verdict that the file has; else nothing: each process tries anew."""
    return f"; to have it tried again delete {folder() / FILE}" if why in read().values() else ""


def _said(form: Form) -> str:
    return ", ".join(f"{name} {value}" for name, value in vars(form).items())


def key_of(parts: list[str], dtype: torch.dtype, device: torch.device) -> str:
    """Everything that a verdict may depend on."""
    mode = "interpreted" if interpreted() else "compiled"
    own = [str(dtype), torch.cuda.get_device_name(device), mode, source_hash(), f"triton {triton_version()}"]
    return " | ".join([*parts, *own, f"torch {torch.__version__}", f"driver {driver_version()}"])


def read() -> dict[str, str | None]:
    """Known verdicts; nothing where the file is missing, damaged or not ours. Raises KVCalError where it is a pipe, say."""
    try:
        found = json.loads(read_text(folder() / FILE))
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
    ours = isinstance(found, dict) and all(why is None or isinstance(why, str) for why in found.values())
    return found if ours else {}


def keep(name: str, why: str | None) -> None:
    """Beside what the file has by now: other processes keep theirs. A directory that cannot be written means that the next
    process tries again.
    """
    with contextlib.suppress(OSError, KVCalError):
        folder().mkdir(parents=True, exist_ok=True)
        with _alone():
            verdicts = read() | {name: why}
            write_atomically(folder() / FILE, json.dumps(verdicts, indent=1, sort_keys=True).encode())


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """No other process is in here; where files cannot be locked (Windows) one of two that are loses its verdict."""
    handle = open_lock(folder() / LOCK)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def trial(
    keys: Form, values: Form, heads: int, ratio: int, dtype: torch.dtype, device: torch.device, rotary: int = 0
) -> str | None:
    """The kernel on random rows of different lengths against the reference in float32: None, or by how much it is off.

    Allowed is four times the rounding of the dtype: of the output, of probabilities and of queries (2 were seen).
    """
    generator = torch.Generator(device).manual_seed(0)
    each = max(keys.scale_blocks, values.scale_blocks)
    own = _blocks(keys, heads, each, None, device, generator)
    held = own, _blocks(values, heads, each, own.grid, device, generator)
    counts = [torch.tensor(n, dtype=torch.int32, device=device) for n in (BLOCKS, SINK, RECENT)]

    def random(count: int, tokens: int) -> Tensor:
        size = (len(BLOCKS), count, tokens, keys.dim)
        return torch.randn(size, generator=generator, device=device).to(dtype)

    def exact(tokens: int, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return random(heads, tokens), random(heads, tokens), count

    sink, recent = exact(max(SINK), counts[1]), exact(-(-max(RECENT) // BLOCK) * BLOCK, counts[2])
    room = own.words.shape[2]
    turns = _turns(rotary, sink[0].shape[2], room, recent[0].shape[2], device) if rotary else None
    for queries, ring in OF_TIERS if keys.tiered else CALLS:
        q, scaling = random(heads * ratio, queries), keys.dim**-0.5
        packed_q = None if rotary else (q.float() * torch.linspace(0.5, 2, keys.dim, device=device)).to(dtype)
        given = *held, counts[0], sink, recent, scaling
        wanted = reference.attend(q.float(), *given, None if packed_q is None else packed_q.float(), ring, turns)
        for launch in attention.fast().launches(keys, values, ratio * queries, rotary > 0):
            found = attention.fast().attend(q, *given, launch, packed_q=packed_q, ring=ring, rope=turns)
            where = f"{queries} new tokens{' behind a ring' if ring else ''}, warps a program {launch.warps}"
            if why := _apart(found, wanted, dtype, where):
                return why
    return None


def _turns(rotary: int, sink: int, blocks: int, recent: int, device: torch.device) -> layout.Rope:
    """RoPE of rows that begin at positions of their own."""
    speed = 1e4 ** -(torch.arange(0, rotary, 2, device=device) / rotary)
    start = torch.arange(len(BLOCKS), device=device) * 1000
    first = layout.rope.first_positions(start, sink, blocks, recent)[..., None] * speed
    close = torch.arange(BLOCK, device=device)[:, None] * speed
    return layout.Rope(torch.stack([first.cos(), first.sin()], -2), layout.rope.near(close.cos(), close.sin()))


def _apart(found: Tensor, wanted: Tensor, dtype: torch.dtype, what: str) -> str | None:
    off, allowed = float((found.double() - wanted.double()).norm() / wanted.double().norm()), 4 * torch.finfo(dtype).eps
    return None if off <= allowed else f"{what}: off by {off:.2g} of the reference, allowed {allowed:.2g}"


def _blocks(
    form: Form, heads: int, each: int, twin: layout.Grid | None, device: torch.device, generator: torch.Generator
) -> layout.Blocks:
    """Random blocks, a multiple of `each`, numbers of variance about 1. twin: of keys; values have its grid if they may."""
    tokens = -(-max(BLOCKS) // each) * each * BLOCK

    def codes(high: int, count: int) -> Tensor:
        size = (len(BLOCKS), heads, tokens, count)
        return torch.randint(0, high, size, generator=generator, device=device)

    def noise(*size: int) -> Tensor:
        return torch.rand(len(BLOCKS), *size, generator=generator, device=device)

    if form.vector:
        grid = _grid(form, heads, twin, device, generator)
        norm = (noise(heads // form.norm_heads, tokens, 1) + 0.5).half()
        return layout.pack(codes(len(grid.points), form.dim // form.vector), norm, None, form, grid)
    along = (tokens // form.group, form.dim - form.full) if form.along_tokens else (tokens, form.dim // form.group)
    scale, zero = (noise(heads, *along) + 0.5) * 3.4 / (1 << form.bits), noise(heads, *along).half() - 2.2
    if not form.tiered:
        return layout.pack(codes(1 << form.bits, form.dim), scale.half(), None if form.symmetric else zero, form)
    scale[..., : form.four] /= 4
    exact = (noise(heads, tokens, form.full) * 3.4 - 1.7).half()
    order = noise(heads, tokens // form.group, form.dim).argsort(-1)
    lower = codes(16, form.four), codes(4, form.dim - form.full - form.four)
    return layout.pack_tiers(exact, *lower, scale.half(), zero, order, form)


def _grid(
    form: Form, heads: int, twin: layout.Grid | None, device: torch.device, generator: torch.Generator
) -> layout.Grid:
    """Random signs, and points in no order, of float16: codes here are not those of Gaussian numbers (grids._times). Of a grid
    in bytes they are multiples of a step.
    """
    size = (1 << form.bits * form.vector, form.vector)
    own = torch.randn(size, generator=generator, device=device).half().float()
    if form.in_bytes:
        most = layout.grids.LARGEST
        own = (own / own.abs().max() * most).round() / 64
    sign = torch.randint(0, 2, (heads, form.dim), generator=generator, device=device) * 2 - 1
    points = own if twin is None or twin.points.shape != size else twin.points
    return layout.grid_of(points, sign, form.bits, twin, form.in_bytes)


def reconstruct_trial(
    codec: Codec, dtype: torch.dtype, rotary: int, device: torch.device, by: str = "auto", sizes: tuple[int, ...] = ROWS
) -> str | None:
    """The kernel on random blocks and inputs against the codec in float32, as often as the kernel is compiled."""
    generator, shape, codec = torch.Generator(device).manual_seed(0), codec.shape, codec.to(device)
    own = Reconstruction(codec, dtype, rotary, by)
    for rows in sizes:
        size = (2, shape.heads, max(1, rows // (2 * shape.block)) * shape.block, shape.dim)
        x, *inputs = (torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(6))
        given: dict[str, Any] = dict(zip(CONTEXT_TENSORS, inputs, strict=True))
        context = Context(1, **{name: given[name] for name in codec.needs})
        packed = codec.encode(x, context)
        angle = torch.rand(2, size[2], rotary // 2, generator=generator, device=device).repeat(1, 1, 2) * 6.28
        turn = Turn(angle.cos(), angle.sin()) if rotary else None
        (found, turned), exact = own(packed, context, turn), codec.decode(packed, context)
        why = _apart(found, exact, dtype, f"{rows} tokens")
        if turn is not None and turned is not None:
            why = why or _apart(turned, turn(exact), dtype, f"{rows} tokens after RoPE")
        if why:
            return why
        if why := _misplaced(x, turn, own):
            return why
    return None


def _misplaced(x: Tensor, turn: Turn | None, own: Reconstruction) -> str | None:
    """The kernel that writes exact tokens around packed ones, x (B, H, T, D) and RoPE of them: bit by bit."""
    parts = [[x[:, :, a:b], -x[:, :, a:b]] for a, b in ((0, 4), (4, 45), (45, 47))]
    first = turn and Turn(turn.cos[:, :45], turn.sin[:, :45])
    made = [[x.new_zeros(*x.shape[:2], 64, x.shape[3]) for _ in (0, 1)] for _ in (0, 1)]
    for by, whole in zip(
        (reconstruct, reconstruct if own.path == "reference" else reconstruct.fast()), made, strict=True
    ):
        by.place(whole, *parts, 8, first)
    same = all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    return None if same else "exact tokens around the packed ones differ"


def encode_trial(codec: Codec, dtype: torch.dtype, device: torch.device, blocks: int = 2) -> str | None:
    """The kernel on random tokens, one of them nothing, against the codec on the CPU, bit by bit."""
    shape, generator = codec.shape, torch.Generator().manual_seed(0)
    x = 3 * torch.randn(2, shape.heads, blocks * shape.block, shape.dim, generator=generator)
    x[..., ::9] *= 20
    x[0, :, 3] = 0
    x, stats = x.to(dtype), codec.example_stats(2, blocks, generator)
    seen = [Context(stats={name: one.to(where) for name, one in stats.items()}) for where in (device, x.device)]
    pair = codec.to(device).by_kernel(), codec.to(x.device)
    if isinstance(codec.fused(), Form):
        found, wanted = (
            own.encode(x.to(where), now) for own, where, now in zip(pair, (device, x.device), seen, strict=True)
        )
    else:  # as layers that are predicted from it need it, too
        (found, here), (wanted, there) = (
            own.encode_decode(x.to(where), now) for own, where, now in zip(pair, (device, x.device), seen, strict=True)
        )
        if not torch.equal(here.cpu(), there):
            return f"what packed {codec.role}s decode to differs"
    apart = [name for name, one in wanted.items() if not _same(found[name], one)]
    return f"{apart[0]} of packed {codec.role}s differ" if apart else None


def _same(found: Stored, wanted: Stored) -> bool:
    """Bit by bit, wherever they lie."""
    if isinstance(found, Ragged) and isinstance(wanted, Ragged):
        return torch.equal(found.counts.cpu(), wanted.counts) and torch.equal(found.data.cpu(), wanted.data)
    assert isinstance(found, Tensor) and isinstance(wanted, Tensor)
    return torch.equal(found.cpu(), wanted)


def quantise_trial(
    key: AnyRule, value: AnyRule, given: tuple[torch.dtype, torch.dtype], scaled: bool, device: torch.device
) -> str | None:
    """The kernel on random tokens, one of them nothing, against the reference on the CPU, bit by bit."""
    generator = torch.Generator().manual_seed(0)
    heads = next((rule.heads for rule in (key, value) if isinstance(rule, GridRule)), 2)
    tokens = 2 * BLOCK * max(key.form.scale_blocks, value.form.scale_blocks)
    inputs = []
    for dtype in given:
        x = 3 * torch.randn(2, heads, tokens, key.form.dim, generator=generator)
        x[..., ::9] *= 20
        x[0, :, 3] = 0
        inputs.append(x.to(dtype))
    factor = torch.rand(heads, 1, key.form.dim, generator=generator) + 0.5 if scaled else None
    pair = _rule_on(key, device), _rule_on(value, device)
    there = None if factor is None else factor.to(device)
    *found, flags = quantise.fast().quantise(*(x.to(device) for x in inputs), *pair, there)
    rules = [_rule_on(rule, torch.device("cpu")) for rule in (key, value)]
    for name, made, x, rule, by in zip(("keys", "values"), found, inputs, rules, (factor, None), strict=True):
        wanted = quantise.quantise(x, rule, by)[0]
        if not torch.equal(made.words.cpu(), wanted.words):
            return f"words of packed {name} differ"
        if not torch.equal(made.scale.cpu().view(torch.int16), wanted.scale.view(torch.int16)):
            return f"scales of packed {name} differ"
    return "finite tokens are refused" if bool(flags.any()) else None


def vectors_trial(
    keys: ResidualVQ, values: ResidualVQ, ratio: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """The kernels on random codes of rows of different lengths against the reference in float32."""
    generator = torch.Generator(device).manual_seed(0)
    blocks = torch.tensor(BLOCKS, dtype=torch.int32, device=device)
    sides = []
    for codec in (keys.to(device), values.to(device)):
        packed = codec.empty(len(BLOCKS), device)
        for name, none in packed.items():
            size = (*none.shape[:2], max(BLOCKS), *none.shape[3:])
            packed[name] = torch.randint(0, 256, size, generator=generator, device=device, dtype=torch.uint8)
        sides.append(codec.coded(packed))
    k, v = sides
    shape, there = keys.shape, blocks > 0
    for queries in VECTOR_CALLS:
        q = torch.randn(len(BLOCKS), shape.heads * ratio, queries, shape.dim, generator=generator, device=device)
        own = (q / float(vq_attention.decode(k).std())).to(dtype)
        found, log = vq_attention.fast().attend(own, k, v, blocks, shape.dim**-0.5)
        wanted, sums = vq_attention.attend(own.float(), k, v, blocks, shape.dim**-0.5)
        if bool(found[~there].any()) or not float((log - sums)[there].abs().max()) < 8 * torch.finfo(dtype).eps:
            return f"{queries} new tokens: sums differ, or a row without blocks is not nothing"
        if why := _apart(found, wanted, dtype, f"{queries} new tokens"):
            return why
    return None


def vectors_append_trial(
    keys: ResidualVQ, values: ResidualVQ, dtype: torch.dtype, device: torch.device, recent: int = 40
) -> str | None:
    """Steps around a block that is due in one row of three: what a row without one holds stays, and the block is as near to
    its tokens as the codec's own codes, up to a thousandth.
    """
    generator, shape = torch.Generator(device).manual_seed(0), keys.shape
    windows = quantise.Windows(4, recent, shape.block)
    counts = quantise.Counts(3, windows, device)
    full = windows.recent + windows.block
    counts.data[4] = 4
    counts.data[6] = torch.tensor([full - 2, full - 9, 0], dtype=torch.int32)

    def random(tokens: int) -> tuple[Tensor, Tensor]:
        size = (3, shape.heads, tokens, shape.dim)
        made = [torch.randn(size, generator=generator, device=device).to(dtype) for _ in (0, 1)]
        return made[0], made[1]

    sink, ring, sides = random(windows.sink), random(windows.room(16)), []
    for codec in (keys.to(device), values.to(device)):
        packed = {n: t.new_zeros(*t.shape[:2], 2, *t.shape[3:]) for n, t in codec.empty(3, device).items()}
        sides.append((codec, packed, codec.coded(packed)))
    flags = torch.zeros(shape.heads, dtype=torch.int32, device=device)
    for _ in range(2):
        quantise.fast().advance(counts, torch.full((3,), 1, dtype=torch.int32, device=device))
        vq_append.fast().append(sides[0][2], sides[1][2], sink, ring, counts, flags, *random(1))
    if counts.data[7].tolist() != [shape.block // BLOCK, 0, 0] or bool(flags.any()):
        return "counts or flags differ"
    for (codec, packed, _), held in zip(sides, ring, strict=True):
        if any(bool(t[1:].any() or t[:, :, 1:].any()) for t in packed.values()):
            return f"packed {codec.role}s: a row without a block due was written to"
        x = held[:1, :, : shape.block].float()
        own, wanted = ({n: t[:1, :, :1] for n, t in packed.items()}, codec.encode(x))
        off, least = (float((codec.decode(one) - x).square().sum()) for one in (own, wanted))
        if not off <= least * (1 + 1e-3):
            return f"packed {codec.role}s: error {off / least:.4g} times that of the codec's own"
    return None


def append_trial(
    key: AnyRule, value: AnyRule, dtype: torch.dtype, device: torch.device, channels: int = 0, flushes: int = 2
) -> str | None:
    """A prompt and steps over so many flushes of rows of different lengths, against the reference on the CPU, bit by bit;
    then attention over what they left. channels: of append_verdict.
    """
    generator = torch.Generator().manual_seed(0)
    windows = quantise.Windows(4, 32, BLOCK * max(key.form.scale_blocks, value.form.scale_blocks))
    calls = [[70, 3, 41], *[[1] * 3] * 3, *[[16] * 3] * (flushes * windows.block // 16)]
    places = torch.device("cpu"), device
    pairs = [(_rule_on(key, where), _rule_on(value, where)) for where in places]
    room = 4 * windows.block // BLOCK
    own = [_empty(*pair, windows, dtype, where, room) for pair, where in zip(pairs, places, strict=True)]
    heads = len(own[0][0].flags)
    factor = None if channels else torch.rand(heads, 1, key.form.dim, generator=generator) + 0.5
    moves = _random_moves(heads, key.form.dim, channels, generator) if channels else None
    seen = [
        (torch.zeros(3, heads, key.form.dim, device=where), torch.zeros(3, dtype=torch.bool, device=where))
        for where in places
    ]
    for new in calls:
        fresh = [torch.randn(3, heads, max(new), key.form.dim, generator=generator).to(dtype) for _ in (0, 1)]
        factors = []
        for (layer, counts), by, pair, held in zip(own, (quantise, quantise.fast()), pairs, seen, strict=True):
            where = counts.data.device
            by.advance(counts, torch.tensor(new, dtype=torch.int32, device=where))
            k, v = (x.to(where) for x in fresh)
            due = None if moves is None else _keys_due(layer, counts, k, moves, key.form, by is not quantise)
            by.append(layer, counts, k, v, *pair, None if factor is None else factor.to(where), due)
            if min(new) == max(new):  # a step: no row is padded
                factors.append([x.cpu() for x in (*by.observe(*held, counts, fresh[0].to(where), 2), *held)])
        if factors and not all(map(torch.equal, *factors)):
            return "key factors differ"
    (wanted, counts), (found, own_counts) = own
    if not torch.equal(counts.data, own_counts.data.cpu()):
        return "counts of tokens differ"
    for row, blocks in enumerate(counts.blocks.tolist()):
        for name in ("keys", "values"):
            left, right = getattr(wanted, name), getattr(found, name)
            scales = blocks // left.form.scale_blocks
            words = (one.words[row, :, :blocks].cpu() for one in (left, right))
            scale = (one.scale[row, :, :scales].view(torch.int16).cpu() for one in (left, right))
            if not torch.equal(*words) or not torch.equal(*scale):
                return f"packed {name} differ"
    q = torch.randn(3, 2 * heads, 1, key.form.dim, generator=generator).to(dtype)
    outs = []
    for (layer, now), by, asked in zip(own, (reference, attention.fast()), (q.float(), q.to(device)), strict=True):
        sink, ring = (*layer.sink, now.sink), (*layer.recent, now.seen)
        scaling = key.form.dim**-0.5
        outs.append(by.attend(asked, layer.keys, layer.values, now.blocks_before, sink, ring, scaling, ring=True))
    return _apart(outs[1].to("cpu"), outs[0], dtype, "attention over the ring")


def _random_moves(heads: int, dim: int, channels: int, generator: torch.Generator) -> Moves:
    """SQuat's of three rows, so large that a wrong digit shows."""
    steps = range(channels, dim, channels)
    responses = [torch.randn(3, heads, channels, dim - stop, generator=generator).double() / 8 for stop in steps]
    return compensated.moves(responses, channels)


def _keys_due(
    layer: quantise.Layer, counts: quantise.Counts, keys: Tensor, moves: Moves, form: Form, by_kernel: bool
) -> Tensor | None:
    """What SQuat makes of the keys that a step packs; None of a prompt."""
    block, device = counts.windows.block, keys.device
    if keys.shape[2] > block:
        return None
    here = Moves(moves.channels, [x.to(device) for x in moves.weights], [x.to(device) for x in moves.units])
    refused = compensated.refusal(form.dim, moves.channels, form.group, block)
    by = compensated.fast() if by_kernel and not refused else compensated
    made: Tensor = by.due(layer.recent[0], counts, keys, here, form.bits, form.group)
    return made


def _rule_on(rule: AnyRule, device: torch.device) -> AnyRule:
    return replace(rule, grid=rule.grid.to(device)) if isinstance(rule, GridRule) else rule


def _empty(
    key: AnyRule, value: AnyRule, windows: quantise.Windows, dtype: torch.dtype, device: torch.device, room: int
) -> tuple[quantise.Layer, quantise.Counts]:
    """What a layer of three rows stores, of no tokens yet; of a grid's kv heads, else two."""
    heads = next((rule.heads for rule in (key, value) if isinstance(rule, GridRule)), 2)

    def exact(tokens: int) -> tuple[Tensor, Tensor]:
        made = [torch.zeros(3, heads, tokens, key.form.dim, dtype=dtype, device=device) for _ in (0, 1)]
        return made[0], made[1]

    blocks = [quantise.blocks_for(rule, 3, heads, room, device) for rule in (key, value)]
    flags = torch.zeros(heads, dtype=torch.int32, device=device)
    layer = quantise.Layer(blocks[0], blocks[1], exact(windows.sink), exact(windows.room(70)), flags)
    return layer, quantise.Counts(3, windows, device)
