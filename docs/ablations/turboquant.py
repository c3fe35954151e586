"""TurboQuant's two choices on keys: which random rotation, and the MSE form against the unbiased one. Prints two
tables.

    python docs/ablations/turboquant.py [--model tiny]

Rotation: the codec's randomised Hadamard transform against the paper's dense random one (QR of a Gaussian matrix),
relative squared error on Gaussian vectors, on the model's keys after RoPE (its own text, all layers), on the keys of
its outlier twin (kvcal/evaluate/outliers.py), and on vectors with a single channel. Form: squared error of inner
products with random queries, "prod" (b - 1 bits by MSE, then one bit a coordinate by a quantised Johnson-Lindenstrauss
transform of the residual, and its norm) over MSE at b bits.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from kvcal.capture.scan import Capture
from kvcal.evaluate.outliers import outlier_twin
from kvcal.models.loading import load_model
from kvcal.models.names import resolve
from kvcal.text.sources import default_text
from kvcal.text.token_windows import token_windows
from kvcal_artifacts.codecs.higgs_grids import gaussian_grid
from kvcal_kernels.hadamard import largest_power_of_two, rotate, signs, unrotate
from kvcal_kernels.lattice import lookup, nearest

TWO_LEVELS = torch.tensor([[-1.0], [1.0]]) * (2 / torch.pi) ** 0.5  # Lloyd-Max at one bit


def rounded(x: Tensor, bits: int) -> Tensor:
    """(n, D) by TurboQuant's MSE form without a rotation: norm, scalar grid."""
    grid = TWO_LEVELS if bits == 1 else gaussian_grid(1, 2**bits)
    size = x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
    return lookup(nearest((x / size).reshape(-1, 1), grid).view(x.shape), grid).view(x.shape) * size


def dense_rotation(dim: int) -> Tensor:
    return torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(1))).Q


def error(x: Tensor, made: Tensor) -> float:
    return float((made - x).double().square().sum() / x.double().square().sum())


def keys_of(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """(n, D) float32: all layers' keys after RoPE, the first 32 tokens left out."""
    with Capture(model, ids, device="cpu") as capture:
        found = [
            batch.k[:, :, 32:] for taps in capture for batch in taps.batches({"k"}, "post_rope") if batch.k is not None
        ]
    return torch.cat([k.flatten(0, 2) for k in found]).float()


def print_rotations(data: dict[str, Tensor]) -> None:
    print("| vectors | bits | Hadamard | dense |\n|---|---|---|---|")
    for name, x in data.items():
        width, sign, dense = largest_power_of_two(x.shape[1]), signs(x.shape[1], 0), dense_rotation(x.shape[1])
        for bits in (2, 3, 4):
            fast = unrotate(rounded(rotate(x, sign, width), bits), sign, width)
            slow = rounded(x @ dense, bits) @ dense.T
            print(f"| {name} | {bits} | {error(x, fast):.4f} | {error(x, slow):.4f} |")


def print_forms(x: Tensor) -> None:
    """Queries are Gaussian; both forms in a dense rotation."""
    dim, generator = x.shape[1], torch.Generator().manual_seed(2)
    queries = torch.randn(256, dim, generator=generator)
    sketch, dense = torch.randn(dim, dim, generator=generator), dense_rotation(dim)
    print("\n| bits | inner products, prod over MSE |\n|---|---|")
    for bits in (2, 3, 4):
        plain = rounded(x @ dense, bits) @ dense.T - x
        rest = x - rounded(x @ dense, bits - 1) @ dense.T
        size = rest.norm(dim=-1, keepdim=True)
        prod = (torch.pi / 2) ** 0.5 / dim * size * ((rest @ sketch.T).sign() @ sketch) - rest
        ratio = float((prod @ queries.T).square().mean() / (plain @ queries.T).square().mean())
        print(f"| {bits} | {ratio:.2f} |")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    source = resolve(parser.parse_args().model)
    loaded = load_model(source, dtype="float32", device="cpu")
    text = default_text(source, "calibration")
    ids = token_windows(loaded.tokenizer, text, windows=2, holdout=1, length=512, seed=0).train
    dim = keys_of(loaded.model, ids).shape[1]
    gaussian = torch.randn(1 << 13, dim, generator=torch.Generator().manual_seed(0))
    data = {
        "Gaussian": gaussian,
        "keys": keys_of(loaded.model, ids),
        "keys of the outlier twin": keys_of(outlier_twin(loaded.model), ids),
        "one channel": torch.eye(dim),
    }
    print_rotations(data)
    print_forms(gaussian)


if __name__ == "__main__":
    main()
