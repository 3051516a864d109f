"""How fast each rotary plane turns along which axis: spectra and their allocation to axes.

All functions return float32 tensors built on the device that is asked for; nothing is cached, so a model that was
cast, moved or created on the meta device never holds a stale table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def geometric(planes: int, base: float, device: torch.device | str | None = None) -> Tensor:
    """omega_f = base^(-f / planes), f = 0 .. planes-1: RoPE's spectrum of `planes` planes -> (planes,)."""
    exponent = torch.arange(planes, dtype=torch.float32, device=device) / planes
    return 1.0 / base**exponent  # in this form, as all references: base**-exponent differs in the last bit


def split_planes(planes: int, axes: int) -> list[int]:
    """Planes for each of `axes` axes, as even as possible, the first axes take the rest."""
    return [planes // axes + (a < planes % axes) for a in range(axes)]


def axial(sizes: Sequence[int], bases: Sequence[float], device: torch.device | str | None = None) -> Tensor:
    """Block-diagonal frequencies (A, F): planes of axis a turn along axis a only, in axis order."""
    out = torch.zeros(len(sizes), sum(sizes), device=device)
    start = 0
    for a, (planes, base) in enumerate(zip(sizes, bases, strict=True)):
        out[a, start : start + planes] = geometric(planes, base, device)
        start += planes
    return out


def angles(coords: Tensor, frequencies: Tensor) -> Tensor:
    """theta[..., n, f] = sum_a coords[..., n, a] * frequencies[..., a, f], in float32 also under autocast.

    Args:
        coords: (N, A) or (B, N, A).
        frequencies: (A, F), or with leading axes (L, H, A, F).

    Returns:
        (N, F), (B, 1, N, F), (L, H, N, F) or (L, B, H, N, F), ready to broadcast against (B, H, N, F).
    """
    coords, frequencies = coords.to(torch.float32), frequencies.to(torch.float32)
    if coords.dim() > 2:
        coords = coords.unsqueeze(-3)  # (B, 1, N, A)
        if frequencies.dim() > 3:
            frequencies = frequencies.unsqueeze(-4)  # (L, 1, H, A, F)
    total = coords[..., :, 0, None] * frequencies[..., None, 0, :]
    for a in range(1, coords.shape[-1]):
        # Elementwise on purpose: a matmul or einsum would be cast to bf16 under autocast.
        total = total + coords[..., :, a, None] * frequencies[..., None, a, :]
    return total
