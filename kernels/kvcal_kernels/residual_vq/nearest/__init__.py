"""Vector quantisation: nearest codeword, residual codes, sums by code."""

from .residual import backend, nearest, residual_codes, residual_sum, sums

__all__ = ["backend", "nearest", "residual_codes", "residual_sum", "sums"]
