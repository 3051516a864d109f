"""Fused operations, each with a plain torch twin of the same meaning behind one switch (`set_fused`)."""

from ._switch import fused_enabled, set_fused
from .rotary import make_phasor, rotate, rotate_plain

__all__ = ["fused_enabled", "make_phasor", "rotate", "rotate_plain", "set_fused"]
