"""Which path a layer takes and why it takes no other: what a kernel reads, rotates and packs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcal_kernels.layout import Form, TransformForm, rope
from kvcal_kernels.quantise import AnyRule

from .. import hf
from ..codecs import Codec
from ..errors import KernelsUnavailable, UsageError
from ..scheme import LayerCodecs, Scheme
from . import codebook, dequantised
from .fused import QUERIES
from .notices import warn
from .preflight import verdicts

CHOICES = ("auto", "off", "torch", "triton")
RATIO = 16  # query heads a kv head, at most
MANY_HEADS = f"query heads a kv head: the fused kernel takes {RATIO} at most"
DECODED = "keys before RoPE are rotated after they are decoded"
GAPS = f"{DECODED}: positions of a row's tokens do not follow one another"
UNEVEN = f"{DECODED}: the model's RoPE does not turn evenly from token to token"
DTYPES_TAKEN = "the fused kernel takes float16 and bfloat16"


Rules = tuple[AnyRule, AnyRule] | str  # how a kernel writes keys and values; else why none does


@dataclass(frozen=True)
class LayerPaths:
    """Which paths a layer takes, and why it takes no others: chosen from its scheme and where its weights are, and once more
    where its first keys are.

    readable: a kernel may read its blocks, wherever they lie. refused: why none attends to them where they are; None where one
    does. vector: it is the one over vector codes. reader: what dequantises blocks for the model's own attention where no
    kernel attends to them; unread: why none does. seamed: the layer's attention function is ours, a kernel's, or the model's
    own one that gets a token more each step. most_queries, least_tokens: new tokens of a call, at most, and packed tokens of a
    row, more than these, that the kernel takes. packs: how a kernel packs whole blocks; appends: how one writes the tokens
    of a step to storage that is allocated once.
    """

    kernels: str
    readable: bool
    refused: str | None
    vector: bool
    seamed: bool
    most_queries: int
    least_tokens: int
    reader: dequantised.Reader | None = None
    unread: str = ""
    packs: Rules = ""
    appends: Rules = ""

    @classmethod
    def of(cls, kernels: str, scheme: Scheme, pair: LayerCodecs, site: hf.AttentionSite, rotary: int = 0) -> LayerPaths:
        """As far as the scheme and the model say, wherever the layer is. rotary: as of `refusal`."""
        refused = refusal(kernels, scheme, pair, site, rotary)
        readable = refused is None
        plain = kernels != "off" and scheme.selection is None and hf.odd_attention(site) is None
        vector = readable and codebook.both(pair)
        return cls(
            kernels,
            readable,
            refused,
            vector,
            seamed=readable or (plain and hf.implementation(site) == "sdpa"),
            most_queries=codebook.most_queries(site.ratio) if vector else QUERIES,
            least_tokens=codebook.least_tokens(pair) if vector else 0,
        )

    def on(
        self,
        scheme: Scheme,
        layer: int,
        pair: LayerCodecs,
        site: hf.AttentionSite,
        dtype: torch.dtype,
        device: torch.device,
        rotary: int = 0,
    ) -> LayerPaths:
        """The paths of keys of this dtype on this device; on a GPU kernels are tried out once. Where no kernel attends to the
        blocks, one may dequantise them.
        """
        refused = self.refused
        if self.readable:
            refused = absence(self.kernels, pair, site.ratio, dtype, device, rotary)
        reader, unread = None, "token selection" if scheme.selection is not None else ""
        if refused is not None and not unread:
            unread = dequantised.refusal(self.kernels, pair, dtype, device) or ""
            if not unread:
                number = scheme.compressed.index(layer)  # neighbours in the chain have storage of their own
                reader = dequantised.reader_of(pair, dtype, self.kernels, number, scheme.reach + 1)
        return replace(self, refused=refused, reader=reader, unread=unread)

    def packing(self, pair: LayerCodecs, dtype: torch.dtype, device: torch.device, steps: bool) -> LayerPaths:
        """With the rules by which a kernel packs what these codecs store. steps: and appends the tokens of steps."""
        if self.refused is not None or self.vector:
            why = self.refused or "vector codes"
            return replace(self, packs=why, appends=why)
        packs = block_rules(self.kernels, pair, dtype, device)
        return replace(self, packs=packs, appends=rules(self.kernels, pair, dtype, device) if steps else packs)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerPaths:
        return self  # holds nothing of a cache

    def reading(self, why_reference: str | None, pair: LayerCodecs) -> str:
        """One line for describe(): how decode steps read packed blocks. why_reference: why they do not take the kernel."""
        text = path(why_reference, self.kernels)
        if self.reader is not None:
            kernel = "its reference in torch" if self.kernels == "torch" else "the Triton kernel"
            return f"{text}; reconstructed by {kernel}"
        return f"{text}; decoded by torch, not the reconstruction kernel: {self.unread}" if pair.needs else text

    def packing_blocks(self, pair: LayerCodecs) -> str:
        """One line for describe(): what packs whole blocks, those of prompts above all."""
        codecs = (("keys", pair.key), ("values", pair.value))
        roles = [role for role, codec in codecs if codec.encodes_by_kernel]
        kernels = f"Triton kernels of the codecs of {' and '.join(roles)}" if roles else ""
        if len(roles) == 2:
            return kernels
        if isinstance(self.packs, str):
            return f"{kernels}, else torch: {self.packs}" if roles else f"torch: {self.packs}"
        if not pair.key.corrected_channels:
            return "the Triton kernel"  # also where one codec has its own
        return f"{kernels or 'corrections of keys by torch'}, else the Triton kernel"

    def appending(self) -> str:
        """One line for describe(): what appends the tokens of steps to storage that is allocated once."""
        if self.vector:
            triton = "the Triton kernels, which search codewords where a block is due"
            return triton if self.kernels != "torch" else "torch: kernels='torch'"
        return f"torch: {self.appends}" if isinstance(self.appends, str) else "the Triton kernel"


def check_choice(kernels: str) -> None:
    if kernels not in CHOICES:
        raise UsageError(f"kernels={kernels!r}: allowed are {', '.join(map(repr, CHOICES))}")
    if kernels == "triton" and verdicts.triton_version() is None:
        raise UsageError("kernels='triton': triton is not installed")


def refusal(kernels: str, scheme: Scheme, pair: LayerCodecs, site: hf.AttentionSite, rotary: int = 0) -> str | None:
    """Why a layer's decode steps decode its blocks for the model's own attention; None where a kernel may read them.

    rotary: channels of a head that RoPE turns, where keys are stored before it; else 0.
    """
    if kernels == "off":
        return "kernels='off'"
    why = format_refusal(scheme, pair, rotary) or (_odd_pairs(site, rotary) if rotary else None)
    return why or hf.odd_attention(site) or ratio_refusal(site.ratio)


def format_refusal(scheme: Scheme, pair: LayerCodecs, rotary: int = 0) -> str | None:
    """`refusal` as far as the scheme decides, whatever the model."""
    if scheme.selection is not None:
        return "token selection needs the weights of the model's own attention"
    if scheme.chained:
        return "layers are predicted from reconstructions of others, which decoding makes"
    if rotary and (why := turn_refusal(pair, rotary)):
        return why
    return shape_refusal(pair)


def ratio_refusal(ratio: int) -> str | None:
    """Of query heads a kv head."""
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


def turn_refusal(pair: LayerCodecs, rotary: int) -> str | None:
    """Why no kernel turns keys that these codecs store before RoPE of `rotary` channels, if it reads them."""
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
    return f"{DECODED}: the kernel turns plain integers, not {what}"


def _odd_pairs(site: hf.AttentionSite, rotary: int) -> str | None:
    if hf.by_halves(site, rotary):
        return None
    return f"{DECODED}: RoPE does not pair channels of two halves here"


def warn_of_shape(kernels: str, pair: LayerCodecs, device: torch.device, why: str) -> None:
    """Where the kernel would run but for the layer's shape or dtype, `why`. Codecs that have no kernel at all say so in
    describe() alone.
    """
    runs = kernels in ("torch", "triton") or runs_kernels(device)
    has_kernel = codebook.both(pair) or all(type(codec).fused is not Codec.fused for codec in (pair.key, pair.value))
    shape = why == shape_refusal(pair) or why.startswith(DTYPES_TAKEN) or why.endswith(MANY_HEADS)
    if kernels != "off" and runs and has_kernel and shape:
        warn(f"fused kernel: {why}")


def runs_kernels(device: torch.device) -> bool:
    return verdicts.unsupported(device) is None


def absence(
    kernels: str, pair: LayerCodecs, ratio: int, dtype: torch.dtype, device: torch.device, rotary: int = 0
) -> str | None:
    """Why the kernel does not run for this layer where it is; None if it does. On a GPU that is tried out once.

    rotary: channels that it must turn by RoPE.
    """
    if kernels == "torch":
        return None
    here = kernels == "triton" and verdicts.interpreted()
    if not here and not runs_kernels(device):
        why = verdicts.unsupported(device)
        if device.type == "cuda":
            warn(f"fused kernel: {why}")
        return why
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{DTYPES_TAKEN}, not {str(dtype).removeprefix('torch.')}"
    if here:
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
    """One line for describe()."""
    if refused is not None:
        return f"reference: {refused}"
    return "fused: the kernel's reference in torch (kernels='torch')" if kernels == "torch" else "fused: Triton kernel"


def summary(refused: list[str | None], kernels: str) -> str:
    """All layers in one line."""
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


def rule_of(codec: Codec) -> AnyRule | str:
    """How the kernel writes what the codec stores; else why it cannot."""
    return codec.rule()


def rules(kernels: str, pair: LayerCodecs, dtype: torch.dtype, device: torch.device) -> tuple[AnyRule, AnyRule] | str:
    """How the append kernel packs keys and values of steps, SQuat's as they are corrected; why torch does where no kernel
    can or passes its check.
    """
    both = _rules(kernels, pair.key.rounding, pair.value)
    if isinstance(both, str) or verdicts.interpreted():
        return both
    if why := verdicts.append_verdict(*both, dtype, device, pair.key.corrected_channels):
        warn(f"append kernel: {why}", "what decode steps pack is packed by torch instead, slowly", why)
        return f"the append kernel does not pass: {why}"
    return both


def block_rules(
    kernels: str, pair: LayerCodecs, dtype: torch.dtype, device: torch.device
) -> tuple[AnyRule, AnyRule] | str:
    """As `rules`, of whole blocks, a prompt's or those that steps push out of a window that grows; of keys as their codec's
    `before_rounding` leaves them.
    """
    both = _rules(kernels, pair.key.rounding, pair.value)
    if isinstance(both, str) or verdicts.interpreted():
        return both
    dtypes = torch.float32 if pair.key.corrected_channels else dtype, dtype
    if why := verdicts.quantise_verdict(*both, dtypes, pair.key.divided, device):
        warn(f"quantise kernel: {why}", "blocks are packed by torch instead, slowly", why)
        return f"the quantise kernel does not pass: {why}"
    return both


def _rules(kernels: str, key: Codec, value: Codec) -> tuple[AnyRule, AnyRule] | str:
    if kernels == "torch":
        return "kernels='torch'"
    roundings = [rule_of(codec) for codec in (key, value)]
    for rounding, role in zip(roundings, ("keys", "values"), strict=True):
        if isinstance(rounding, str):
            return f"{role}: {rounding}"
    rule, other = (rounding for rounding in roundings if not isinstance(rounding, str))
    return rule, other


def packing(kernels: str, pair: LayerCodecs, dtype: torch.dtype, device: torch.device) -> LayerCodecs:
    """The codecs, encoding by kernels where these run and give torch's bytes. On a GPU that is tried out once."""
    anywhere = kernels == "triton" and verdicts.interpreted()
    if kernels in ("off", "torch") or not (anywhere or verdicts.unsupported(device) is None):
        return pair
    codecs = []
    for codec in (pair.key, pair.value):
        encoder = codec.by_kernel()
        if encoder is not codec and not anywhere and (why := verdicts.encode_verdict(codec, dtype, device)):
            warn(f"encoding kernel: {why}", "blocks are packed by torch instead, slowly", why)
            encoder = codec
        codecs.append(encoder)
    return LayerCodecs(*codecs)
