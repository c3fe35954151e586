"""Error of HIGGS with its rotation per kv head, as the fused kernel has it, and over the token, as the AQUA-KV paper
has it.

    PYTHONPATH=.:kernels:artifacts python docs/benchmarks/higgs_rotation.py    # 20 s on one CPU core

8 kv heads of 128 channels: per head a Hadamard transform of 128, over the token one of 1024. The norm spans the token
(0.016 bits a number) or, in the last column, the head (0.125). Random data, the same for all: relative squared error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Higgs, Shape
from kvcal_artifacts.codecs.higgs import Span

HEADS, DIM, TOKENS = 8, 128, 1024


def data() -> dict[str, Tensor]:
    """Names -> (1, H, T, D)."""
    g = torch.Generator().manual_seed(0)
    plain = torch.randn(1, HEADS, TOKENS, DIM, generator=g)
    channels = torch.ones(1, HEADS, 1, DIM)
    channels[..., 5::32] = 8.0
    heads = 2.0 ** torch.linspace(-1.5, 1.5, HEADS)[None, :, None, None]
    tail = torch.distributions.StudentT(3.0)
    torch.manual_seed(0)
    return {
        "Gaussian": plain,
        "4 channels of a head 8 times as large": plain * channels,
        "heads from 0.35 to 2.8 times as large": plain * heads,
        "both": plain * channels * heads,
        "Student t, 3 degrees of freedom": tail.sample((1, HEADS, TOKENS, DIM)),
    }


def error(x: Tensor, n: int, rotation: Span, norm: Span) -> float:
    codec = Higgs(Shape(HEADS, DIM, 64), "key", 2, n, rotation=rotation, norm=norm)
    made = codec.decode(codec.encode(x))
    return float((made - x).square().sum() / x.square().sum())


def main() -> None:
    torch.set_num_threads(1)
    for name, x in data().items():
        for bits, n in ((2, 16), (3, 64), (4, 256)):
            token, head, own = error(x, n, "token", "token"), error(x, n, "head", "token"), error(x, n, "head", "head")
            change = [f"{100 * (part / token - 1):+.1f} %" for part in (head, own)]
            found = f"token {token:.5f}; head {head:.5f} {change[0]}; norm of the head {own:.5f} {change[1]}"
            print(f"{name:38} {bits} bits: {found}")


if __name__ == "__main__":
    main()
