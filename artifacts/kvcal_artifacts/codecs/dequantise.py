"""Packed keys or values of one layer become numbers in the model's dtype, by a kernel if there is one or by the codec.

Layers are read lowest first, each from what the one below left in the same dtype. So two buffers of keys and two of
values are enough for a model, and one more of keys after RoPE, if they are stored before it. `out` and `rotated` may be
any of these buffers that the call does not read.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from kvcal_kernels.dequantise import Coded, Rotation, fast
from kvcal_kernels.layout import Form

from ..errors import KVCalError
from .base import EMPTY, Codec, Context, Packed
from .higgs import Higgs
from .predicted import Predicted
from .predictors import Linear, Predictor, QuantisedLinear
from .scaled import Scaled

KERNEL_DTYPES = (torch.float16, torch.bfloat16)


def refuses(codec: Codec, dtype: torch.dtype, rotary: int = 0) -> str | None:
    """Why the kernel that dequantises cannot read this codec on any GPU; None if it can.

    rotary: channels that it rotates by RoPE.
    """
    inner, predictor, _ = _parts(codec)
    if predictor is not None and not isinstance(predictor, Linear | QuantisedLinear):
        return f"a {predictor.name} predictor; the kernel takes linear ones"
    if not isinstance(inner, Higgs) or inner.axis != "channel":
        return f"{inner.describe()}; the kernel reads HIGGS along channels"
    if isinstance(inner.fused(), Form):
        return f"{inner.describe()} as the attention kernel reads it; this one reads Codec.for_decoding()"
    if dtype not in KERNEL_DTYPES:
        return f"{dtype}; the kernel writes float16 and bfloat16"
    if find_spec("triton") is None:
        return "triton is not installed"
    norms = codec.shape.heads if inner.norm == "head" else 1
    inputs = len(codec.inputs) if isinstance(codec, Predicted) else 0
    reason: str | None = fast().refuses(
        codec.shape.dim, inner.d, inner.rotation_width * inner.rotation_factor, norms, inputs, rotary
    )
    return reason


def _parts(codec: Codec) -> tuple[Codec, Predictor | None, Tensor | None]:
    """The codec that codes the numbers, the predictor around it if any, and the factors (H, D) between them if any."""
    inner, predictor = (codec.inner, codec.predictor) if isinstance(codec, Predicted) else (codec, None)
    if isinstance(inner, Scaled) and inner.factor is not None:
        return inner.inner, predictor, inner.factor
    return inner, predictor, None


class Dequantiser:
    """Reads one layer's keys or values.

    codec: on its device. dtype: of what is written. rotary: channels of a head that RoPE rotates by halves, if keys
    after RoPE are written too; 0: no RoPE. Weights lie as the kernel reads them, in `dtype`; those that no RoPE follows
    and that have this dtype already are the codec's.

    by: "auto", the kernel on a GPU; "triton", the kernel anywhere; "torch", the codec. why: the reason that the kernel
    does not run, None where it does; path: "triton" or "reference".
    """

    def __init__(self, codec: Codec, dtype: torch.dtype, rotary: int = 0, by: str = "auto") -> None:
        self.codec, self.dtype, self.rotary = codec, dtype, rotary
        device = next((t.device for t in codec.tensors().values()), torch.device("cpu"))
        missing = f"{device.type}: no CUDA GPU" if by == "auto" and device.type != "cuda" else None
        self.why = "kernels='torch'" if by == "torch" else missing or refuses(codec, dtype)
        self._fused_rotary = rotary if refuses(codec, dtype, rotary) is None else 0
        self._prepared: object = None  # of the kernel: the weights as it reads them

    @property
    def path(self) -> str:
        return "reference" if self.why else "triton"

    def __call__(
        self,
        packed: Packed,
        context: Context = EMPTY,
        rotation: Rotation | None = None,
        out: Tensor | None = None,
        rotated: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """What the layer holds, and the same after RoPE (None without), each (B, H, N * b, D) of `dtype`.

        packed: N blocks, as the codec's encode gives them. context: decoded inputs of the layer below (and k0), in any
        dtype; those in `dtype` and contiguous are read where they are. rotation: given exactly where `rotary` is. out,
        rotated: tensors that results are written into, if given, which may have space for more tokens.
        """
        if (rotation is None) == bool(self.rotary):
            raise KVCalError(f"reconstruction for RoPE of {self.rotary} channels: cos and sin must be given with it")
        if self.path == "reference":
            decoded = self.codec.decode(packed, context)
            return _put(decoded, out, self.dtype), None if rotation is None else _put(
                rotation(decoded), rotated, self.dtype
            )
        if rotation is None or self._fused_rotary:
            return self._fused(packed, context, rotation, out, rotated)
        out, _ = self._fused(packed, context, None, out, None)
        tokens = packed["norm"].shape[2] * self.codec.shape.block
        return out, _put(rotation(out[:, :, :tokens].float()), rotated, self.dtype)

    def _fused(
        self, packed: Packed, context: Context, rotation: Rotation | None, out: Tensor | None, rotated: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        kernel, codec = fast(), self.codec
        blocks = coded(codec, packed)
        if self._prepared is None:
            weight, bias = _linear(codec)
            self._prepared = kernel.prepare(blocks, weight, bias, self._fused_rotary, self.dtype)
        inputs: list[Tensor] = []
        if isinstance(codec, Predicted):
            codec.check_inputs(context)
            inputs = [getattr(context, name) for name in codec.inputs]
            inputs = [x if x.dtype == self.dtype else x.to(self.dtype) for x in inputs]
            strides = inputs[0].stride()
            if strides[2:] != (codec.shape.dim, 1) or any(x.stride() != strides for x in inputs[1:]):
                inputs = [x.contiguous() for x in inputs]
        outputs: tuple[Tensor, Tensor | None] = kernel.dequantise(
            blocks, self._prepared, inputs, rotation, out, rotated, self.dtype
        )
        return outputs


def _linear(codec: Codec) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of a codec's linear predictor, if it has one."""
    if not isinstance(codec, Predicted):
        return None, None
    predictor = codec.predictor
    weights = predictor.weights if isinstance(predictor, Linear) else predictor.working()
    return weights["weight"], weights["bias"]


def kind(codec: Codec) -> str:
    """What the kernel's code depends on, in words."""
    inner, _, factor = _parts(codec)
    assert isinstance(inner, Higgs)
    behind = f"{codec.predictor.name} of {len(codec.inputs)}" if isinstance(codec, Predicted) else "alone"
    shape = f"{codec.shape.heads} x {codec.shape.dim}, blocks of {codec.shape.block}"
    factors = "" if factor is None else ", factors"
    return f"{codec.role}s of {shape}, {behind}, {inner.outline_of_grid()}{factors}"


def coded(codec: Codec, packed: Packed) -> Coded:
    """Packed blocks of HIGGS, alone or within factors or a predictor, as the kernel takes them."""
    inner, _, factor = _parts(codec)
    assert isinstance(inner, Higgs)
    return Coded(
        packed["codes"].contiguous(),
        packed["norm"].contiguous(),
        inner.grid,
        inner.sign,
        inner.rotation_width,
        inner.code_bits,
        inner.shape.dim,
        inner.role == "key",
        inner.rotation_factor,
        inner.mix,
        None if factor is None else factor.flatten(),
    )


def _put(values: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The values in `dtype`, in the first tokens of `out` unless it is None."""
    if out is None:
        return values.to(dtype)
    out[:, :, : values.shape[2]] = values
    return out
