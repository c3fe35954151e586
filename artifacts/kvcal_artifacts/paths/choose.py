"""Which paths a layer takes, and why no others: `layer_paths` alone chooses, for all that reads or packs. It is called
when a layer is made, and again when the first keys have come, whose dtype and device are then known.

It asks codecs which kernels can serve them (codecs/base.py), and each path whether its kernels run on the device.
Whether one call goes by it (at most 16 new tokens, a mask that the kernel knows) is `KVCalLayer._is_for_kernel`.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

from kvcal_kernels.layout import rope

from .. import hf
from ..codecs.base import AttentionKernel
from ..errors import KernelsUnavailable, UsageError
from ..scheme import LayerCodecs, Scheme
from . import codebook, dequantised, fused, packing_rules
from .dequantised import LayerDequantiser
from .fused import QUERIES
from .notices import warn
from .packing_rules import PackingRules
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


class LayerPaths(NamedTuple):
    """The paths that a layer takes, as one value with its reasons: `layer_paths` alone makes it.

    kind: what reads packed blocks in decode steps. refused: why no kernel attends to them; None where one does.
    unreadable: the part of `refused` that holds on every device. why_decoded: why no kernel decodes them either.

    A call goes by the kernel with `most_queries` new tokens at most, over more than `least_tokens` packed ones of a
    row. replaces_attention: the layer's attention function is ours: a kernel, or the model's where it gets a token per
    step. dequantiser: decodes blocks by a kernel, where one does. codecs: encode by kernels where these pass.
    packing: how tokens are packed; chosen when keys have come.
    """

    kind: PathKind
    refused: str | None
    unreadable: str | None
    why_decoded: str
    most_queries: int
    least_tokens: int
    replaces_attention: bool
    dequantiser: LayerDequantiser | None
    codecs: LayerCodecs
    packing: PackingRules = PackingRules()

    def __deepcopy__(self, memo: dict[int, object]) -> LayerPaths:
        return self  # holds nothing of a cache

    @property
    def reads_codes(self) -> bool:
        """Whether the kernels over vector codes attend to the blocks."""
        return self.kind is PathKind.CODEBOOK

    def describe(self, why_reference: str | None, kernels: str) -> str:
        """One line for describe(): how decode steps read packed blocks.

        why_reference: why they do not take the kernel.
        """
        text = path(why_reference, kernels)
        if self.kind is PathKind.DEQUANTISED:
            kernel = "its reference in torch" if kernels == "torch" else "the Triton kernel"
            return f"{text}; reconstructed by {kernel}"
        if self.codecs.needs:  # what other layers decode to
            return f"{text}; decoded by torch, not the reconstruction kernel: {self.why_decoded}"
        return text


def layer_paths(
    kernels: str,
    scheme: Scheme,
    index: int,
    pair: LayerCodecs,
    site: hf.AttentionSite,
    rotary: int,
    dtype: torch.dtype,
    device: torch.device,
    static: bool | None = None,
) -> LayerPaths:
    """The paths of layer `index` for keys of this dtype on this device; on a GPU kernels are tried once.

    rotary: see `refusal`. static: whether its storage is allocated once; None before keys have come, when nothing is
    packed yet.
    """
    unreadable, codes = refusal(kernels, scheme, pair, site, rotary), pair.has_codes
    refused = unreadable or absence(kernels, pair, site.ratio, dtype, device, rotary)
    most_queries, least_tokens = QUERIES, 0
    if unreadable is None and codes:
        most_queries, least_tokens = codebook.most_queries(site.ratio), codebook.least_tokens(pair)
    kind, why_decoded, dequantiser = PathKind.CODEBOOK if codes else PathKind.FUSED, "", None
    if refused is not None:
        selects = "token selection" if scheme.selection is not None else None
        why_decoded = selects or dequantised.refusal(kernels, pair, dtype, device) or ""
        kind = PathKind.DECODED if why_decoded else PathKind.DEQUANTISED
    if kind is PathKind.DEQUANTISED:  # neighbours in the chain do not share storage
        place = scheme.compressed.index(index), scheme.reach + 1
        dequantiser = dequantised.dequantiser_of(pair, dtype, kernels, *place)
    replaced = _replaces_attention(kernels, scheme, site, unreadable is None)
    paths = LayerPaths(kind, refused, unreadable, why_decoded, most_queries, least_tokens, replaced, dequantiser, pair)
    if static is None:
        return paths
    codecs = packing_rules.packing(kernels, pair, dtype, device)
    unpacked = "vector codes" if paths.reads_codes else refused
    packing = packing_rules.packing_rules(kernels, codecs, dtype, device, unpacked, static)
    return paths._replace(codecs=codecs, packing=packing)


def _replaces_attention(kernels: str, scheme: Scheme, site: hf.AttentionSite, readable: bool) -> bool:
    plain = kernels != "off" and scheme.selection is None and hf.odd_attention(site) is None
    return readable or (plain and hf.implementation(site) == "sdpa")


def check_choice(kernels: str) -> None:
    """Raises UsageError for a `kernels` that is not one of CHOICES, or that needs a Triton which is not installed."""
    if kernels not in CHOICES:
        raise UsageError(f"kernels={kernels!r}: allowed are {', '.join(map(repr, CHOICES))}")
    if kernels == "triton" and verdicts.triton_version() is None:
        raise UsageError("kernels='triton': triton is not installed")


def refusal(kernels: str, scheme: Scheme, pair: LayerCodecs, site: hf.AttentionSite, rotary: int = 0) -> str | None:
    """Why decode steps fall back to decoded blocks and the model's attention; None where a kernel may read blocks.

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
    for codec, other in ((pair.key, pair.value), (pair.value, pair.key)):
        if why := codec.attention_refusal(other):
            return f"{codec.role}s: {why}"
    if pair.attention_kernel is None:
        return f"keys of {pair.key.name}, values of {pair.value.name}: the transform's kernel reads both or none"
    if pair.attention_kernel is AttentionKernel.TRANSFORM and pair.key.divided:
        return "keys divided by factors: the transform's kernel takes the bare codec"
    return None


def rotation_refusal(pair: LayerCodecs, rotary: int) -> str | None:
    """Why no kernel rotates keys that these codecs store before RoPE of `rotary` channels, if one reads them."""
    kernel = pair.key.attention_kernel
    if kernel is None or (kernel is AttentionKernel.CODEBOOK and not pair.has_codes):
        return None
    if (what := pair.key.not_rotated) is None:
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
    has_kernel = pair.has_codes or all(codec.has_attention_kernel for codec in (pair.key, pair.value))
    shape = why == shape_refusal(pair) or why.startswith(DTYPES_TAKEN) or why.endswith(MANY_HEADS)
    if kernels != "off" and runs and has_kernel and shape:
        warn(f"fused kernel: {why}")


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device, by its kind and Triton's presence alone: no trial is made."""
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
    if pair.has_codes:
        why = codebook.verdict(pair, ratio, dtype, device)
    else:
        why = fused.verdict(pair, ratio, dtype, device, rotary)
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
