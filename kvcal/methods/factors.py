"""Factors that even key channels out (InnerQ section 4.3), from how large each channel is."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal_artifacts.codecs import Codec
from kvcal_artifacts.codecs.refusals import to_half
from kvcal_artifacts.codecs.scaled import LARGEST

LEAST = 1e-4  # of the head's median: what a channel counts at least, so that dead ones do not get factors near zero
SMALLEST = 2.0**-14  # the smallest float16 of full precision, and a power of two


def channel_factor(largest: Tensor, exponent: float = 0.5) -> Tensor:
    """InnerQ section 4.3: norm_c = sqrt(max |K_c|). largest (..., D) float32, not negative -> float16 (..., D),
    positive.

    A channel counts at least 1e-4 of its head's median; a head without any key has factor 1.
    """
    floored = largest.maximum(LEAST * largest.median(-1, keepdim=True).values)
    floored = torch.where(floored > 0, floored, 1.0)
    return to_half(floored.pow(exponent).clamp(SMALLEST, LARGEST), "channel factor")


def query_weight(squares: Tensor) -> Tensor:
    """What a squared error of each key channel counts when a group's scale is searched (Uniform.weight).

    It is the mean square of the queries that meet the channel as it is rounded, behind its factor. squares (..., D),
    not negative -> float16.

    It is not multiplied by the factor's square, which would make it the error of scores. An outlier channel's error
    hardly changes from token to token, and a softmax does not see what all tokens share (docs/lab/methods.md, InnerQ).
    A channel counts at least 1e-4 of its head's mean; in a head without queries all count alike.
    """
    mean = squares.double().mean(-1, keepdim=True)
    weight = torch.where(mean > 0, squares.double() / mean.clamp_min(1e-300), 1.0)
    return weight.clamp_min(LEAST).half()  # at most D, as the mean is 1


def by_queries(codec: Codec, squares: Tensor) -> Codec:
    """The codec of keys with a search that weighs channels by queries; itself where it searches for nothing. squares as
    of `query_weight`, (H, D).
    """
    if codec.weighable:
        return codec.weighted(query_weight(squares).cpu())
    return codec


def share_pairs(largest: Tensor, partners: Tensor) -> Tensor:
    """(..., D), each channel and its RoPE partner at the larger of the two. partners: hf.rope_partners."""
    return largest.maximum(largest[..., partners.to(largest.device)])


def outlier_ratios(largest: Tensor) -> Tensor:
    """max |K_c| over the median channel of its head. (H, D) -> (H, D); 1 in a head without any key."""
    middle = largest.median(-1, keepdim=True).values
    return torch.where(middle > 0, largest / middle.clamp_min(1e-30), 1.0)
