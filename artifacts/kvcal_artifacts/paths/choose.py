"""Which path a layer takes and why it takes no other: `read_path` alone chooses. What packs is packing_rules.py.

Whether one call goes by it (at most 16 new tokens, a mask that the kernel knows) is `KVCalLayer._is_for_kernel`.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

from kvcal_kernels.layout import Form, TransformForm, rope

from .. import hf
from ..codecs import Codec
from ..errors import KernelsUnavailable, UsageError
from ..scheme import LayerCodecs, Scheme
from . import codebook, dequantised
from .fused import QUERIES
from .notices import warn
from .preflight import verdicts

CHOICES = ("auto", "off", "torch", "triton")
RATIO = 16  # query heads per kv head, at most
MANY_HEADS = f"query heads a kv head: the fused kernel takes {RATIO} at most"
DECODED = "keys before RoPE are rotated after they are decoded"
GAPS = f"{DECODED}: positions of a row's tokens do not follow one another"
UNEVEN = f"{DECODED}: the model's RoPE does not rotate evenly from token to token"
DTYPES_TAKEN = "the fused kernel takes float16 and bfloat16"


class PathKind(Enum):
    """What reads a layer's packed blocks in decode steps."""

    FUSED = "the fused kernel attends to them"
    CODEBOOK = "the kernels of vector codes attend to them"
    DEQUANTISED = "a kernel decodes them for the model's own attention"
    DECODED = "torch decodes them for the model's own attention"


class ReadPath(NamedTuple):
    """The path by which decode steps read a layer's packed blocks, and why not a faster one.

    refused: why no kernel attends to the blocks; None where one does. why_decoded: why no kernel decodes them either.
    """

    kind: PathKind
    refused: str | None = None
    why_decoded: str = ""

    def describe(self, why_reference: str | None, kernels: str, needs: bool) -> str:
        """One line for describe(): how decode steps read packed blocks.

        why_reference: why they do not take the kernel. needs: whether codecs need what other layers decode to.
        """
        text = path(why_reference, kernels)
        if self.kind is PathKind.DEQUANTISED:
            kernel = "its reference in torch" if kernels == "torch" else "the Triton kernel"
            return f"{text}; reconstructed by {kernel}"
        if needs:
            return f"{text}; decoded by torch, not the reconstruction kernel: {self.why_decoded}"
        return text


def read_path(
    kernels: str,
    scheme: Scheme,
    pair: LayerCodecs,
    site: hf.AttentionSite,
    dtype: torch.dtype,
    device: torch.device,
    rotary: int = 0,
) -> ReadPath:
    """The path of a layer whose keys have this dtype and lie on this device; on a GPU kernels are tried once.

    rotary: see `refusal`.
    """
    refused = refusal(kernels, scheme, pair, site, rotary) or absence(kernels, pair, site.ratio, dtype, device, rotary)
    if refused is None:
        return ReadPath(PathKind.CODEBOOK if codebook.both(pair) else PathKind.FUSED)
    selects = "token selection" if scheme.selection is not None else None
    if why := selects or dequantised.refusal(kernels, pair, dtype, device):
        return ReadPath(PathKind.DECODED, refused, why)
    return ReadPath(PathKind.DEQUANTISED, refused)


class Limits(NamedTuple):
    """Calls that a layer's kernel takes, where it has one.

    most_queries: new tokens of a call, at most. least_tokens: packed tokens of a row above which it is taken.
    """

    most_queries: int
    least_tokens: int


def limits(pair: LayerCodecs, site: hf.AttentionSite, readable: bool) -> Limits:
    """The limits of the kernel that reads these codecs at their place in the model. readable: whether there is one."""
    if readable and codebook.both(pair):
        return Limits(codebook.most_queries(site.ratio), codebook.least_tokens(pair))
    return Limits(QUERIES, 0)


def replaces_attention(kernels: str, scheme: Scheme, site: hf.AttentionSite, readable: bool) -> bool:
    """Whether a layer's attention function is ours: a kernel's, or the model's own one that gets a token each step."""
    plain = kernels != "off" and scheme.selection is None and hf.odd_attention(site) is None
    return readable or (plain and hf.implementation(site) == "sdpa")


def check_choice(kernels: str) -> None:
    """Raises UsageError for a `kernels` that is not one of CHOICES, or that needs a Triton which is not installed."""
    if kernels not in CHOICES:
        raise UsageError(f"kernels={kernels!r}: allowed are {', '.join(map(repr, CHOICES))}")
    if kernels == "triton" and verdicts.triton_version() is None:
        raise UsageError("kernels='triton': triton is not installed")


def refusal(kernels: str, scheme: Scheme, pair: LayerCodecs, site: hf.AttentionSite, rotary: int = 0) -> str | None:
    """Why a layer's decode steps decode its blocks for the model's own attention; None where a kernel may read them.

    rotary: channels of a head that RoPE rotates, where keys are stored before it; else 0.
    """
    if kernels == "off":
        return "kernels='off'"
    if site.shard is not None:
        return "heads are stored together, and this process attends with a part of them"
    why = format_refusal(scheme, pair, rotary) or (_odd_pairs(site, rotary) if rotary else None)
    return why or hf.odd_attention(site) or ratio_refusal(site.ratio)


def format_refusal(scheme: Scheme, pair: LayerCodecs, rotary: int = 0) -> str | None:
    """The refusal as far as the scheme decides, for any model."""
    if scheme.selection is not None:
        return "token selection needs the weights of the model's own attention"
    if scheme.chained:
        return "layers are predicted from reconstructions of others, which decoding makes"
    if rotary and (why := rotation_refusal(pair, rotary)):
        return why
    return shape_refusal(pair)


def ratio_refusal(ratio: int) -> str | None:
    """Why no kernel takes so many query heads per kv head; None if one does."""
    return None if ratio <= RATIO else f"{ratio} {MANY_HEADS}"


def shape_refusal(pair: LayerCodecs) -> str | None:
    """Why no kernel reads what these codecs store at their shape."""
    if codebook.both(pair):
        return codebook.refusal(pair)
    for codec in (pair.key, pair.value):
        if isinstance(why := codec.fused(), str):
            return f"{codec.role}s: {why}"
    if isinstance(pair.key.fused(), Form) != isinstance(pair.value.fused(), Form):
        return f"keys of {pair.key.name}, values of {pair.value.name}: the transform's kernel reads both or none"
    if isinstance(pair.key.fused(), TransformForm) and pair.key.divided:
        return "keys divided by factors: the transform's kernel takes the bare codec"
    return None


def rotation_refusal(pair: LayerCodecs, rotary: int) -> str | None:
    """Why no kernel rotates keys that these codecs store before RoPE of `rotary` channels, if one reads them."""
    form = pair.key.fused()
    if codebook.both(pair):
        what = "vector codes"
    elif isinstance(form, TransformForm):
        what = "coordinates of a basis"
    elif not isinstance(form, Form):
        return None
    elif form.vector or form.tiered:
        what = "grids" if form.vector else "tiers"
    elif pair.key.divided:
        what = "keys divided by factors"
    else:
        return rope.refusal(rotary)
    return f"{DECODED}: the kernel rotates plain integers, not {what}"


def _odd_pairs(site: hf.AttentionSite, rotary: int) -> str | None:
    if hf.by_halves(site, rotary):
        return None
    return f"{DECODED}: RoPE does not pair channels of two halves here"


def warn_of_shape(kernels: str, pair: LayerCodecs, device: torch.device, why: str) -> None:
    """Warn where the kernel would run except for the layer's shape or dtype, which `why` names.

    Of codecs without any kernel only describe() tells.
    """
    runs = kernels in ("torch", "triton") or runs_kernels(device)
    has_kernel = codebook.both(pair) or all(type(codec).fused is not Codec.fused for codec in (pair.key, pair.value))
    shape = why == shape_refusal(pair) or why.startswith(DTYPES_TAKEN) or why.endswith(MANY_HEADS)
    if kernels != "off" and runs and has_kernel and shape:
        warn(f"fused kernel: {why}")


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device, as far as it is known without a trial."""
    return verdicts.unsupported(device) is None


def absence(
    kernels: str, pair: LayerCodecs, ratio: int, dtype: torch.dtype, device: torch.device, rotary: int = 0
) -> str | None:
    """Why the kernel does not run for this layer on its device; None if it does. On a GPU it is tried once.

    rotary: channels that it must rotate by RoPE.
    """
    if kernels == "torch":
        return None
    interpreted = kernels == "triton" and verdicts.interpreted()
    if not interpreted and not runs_kernels(device):
        why = verdicts.unsupported(device)
        if device.type == "cuda":
            warn(f"fused kernel: {why}")
        return why
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{DTYPES_TAKEN}, not {str(dtype).removeprefix('torch.')}"
    if interpreted:
        return None
    keys, values = pair.key.fused(), pair.value.fused()
    if codebook.both(pair):
        why = codebook.verdict(pair, ratio, dtype, device)
    elif isinstance(keys, TransformForm):
        assert isinstance(values, TransformForm)
        why = verdicts.transform_verdict(keys, values, pair.key.shape.heads, ratio, dtype, device)
    else:
        assert isinstance(keys, Form) and isinstance(values, Form)
        why = verdicts.verdict(keys, values, pair.key.shape.heads, ratio, dtype, device, rotary)
    if why:
        reason = f"the fused kernel does not pass on {torch.cuda.get_device_name(device)}: {why}"
        warn(reason, verdict=why)
        return reason
    return None


def path(refused: str | None, kernels: str) -> str:
    """One line for describe(): the path of decode steps."""
    if refused is not None:
        return f"reference: {refused}"
    return "fused: the kernel's reference in torch (kernels='torch')" if kernels == "torch" else "fused: Triton kernel"


def summary(refused: list[str | None], kernels: str) -> str:
    """One line for describe(): the path of decode steps in all layers."""
    if not any(why is None for why in refused):
        why = f" ({refused[0]})" if refused and len(set(refused)) == 1 else ""
        return f"reference: decode, then the model's own attention{why}"
    count = sum(why is None for why in refused)
    return (
        f"{path(None, kernels)} for steps of up to {QUERIES} tokens in {count} of {len(refused)} layers; else reference"
    )


def require(refused: list[tuple[int, str]]) -> None:
    """Raises KernelsUnavailable naming the first layer that does not take the kernel."""
    if refused:
        index, why = refused[0]
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        raise KernelsUnavailable(
            f"layer {index}{more}: no fused kernel for its decode steps: {why}; "
            "use another scheme or device, or do without require_kernels (--require-kernels)"
        )
