"""Vector quantisation: nearest codeword, residual codes, sums by code."""

from .residual import backend, compile_for, nearest, residual_codes, residual_sum, sums

__all__ = ["backend", "compile_for", "nearest", "residual_codes", "residual_sum", "sums"]
