"""Keys and values of a layer from HIGGS codes and a linear predictor."""

from .reference import Coded, Turn, decode, reconstruct

__all__ = ["Coded", "Turn", "decode", "reconstruct"]
