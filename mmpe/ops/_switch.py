"""The one switch of the fast paths."""

from __future__ import annotations

import os

_OFF = ("0", "false", "off", "no")
_fused: bool = os.environ.get("MMPE_FUSED", "1").strip().lower() not in _OFF


def set_fused(enabled: bool) -> bool:
    """Turn the fast paths of `mmpe.ops` on or off for this process; off means the plain twins everywhere.

    Args:
        enabled: whether fast paths may be used. The environment variable MMPE_FUSED=0 starts with them off.

    Returns:
        The setting before the call, to restore it.
    """
    global _fused
    before, _fused = _fused, bool(enabled)
    return before


def fused_enabled() -> bool:
    """Whether fast paths may be used."""
    return _fused
