"""Rotary tables: the cos and sin of every token and plane, and their application to queries and keys.

Shapes: B batch, H heads, N tokens (prefix included), D head dim, F rotary planes, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from . import ops

__all__ = ["RotaryTable", "convert_pairing", "pairing_permutation"]


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Rotation angles of N tokens in F planes, as cos and sin; immutable.

    A plane is turned by +theta: out_a = a cos - b sin, out_b = a sin + b cos, with (a, b) the channels (2f, 2f + 1),
    or (f, f + F) where `half` is given. Tables of several layers carry the layers first and are cut with `layer`.

        >>> import torch
        >>> from mmpe.rotary import RotaryTable
        >>> theta = torch.arange(4.0)[:, None] * torch.tensor([1.0, 0.1])
        >>> table = RotaryTable.from_angles(theta, prefix=1)
        >>> table.rotate(torch.randn(2, 3, 5, 8)).shape
        torch.Size([2, 3, 5, 8])

    Args:
        cos: float32 (..., N, F): (N, F), (H, N, F), (B, 1, N, F) or (B, H, N, F).
        sin: the same shape.
        phasor: cos + i sin, kept where eager code on the CPU will use it; derived, never differentiated.
    """

    cos: Tensor
    sin: Tensor
    phasor: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.cos.shape != self.sin.shape or self.cos.dim() < 2:
            raise ValueError(
                f"cos and sin must share one shape (..., N, F), got {tuple(self.cos.shape)} and {tuple(self.sin.shape)}"
            )

    @classmethod
    def from_angles(cls, angles: Tensor, prefix: int = 0) -> RotaryTable:
        """The table of these angles.

        Args:
            angles: float32 (..., N, F), in radians; a learned encoding's gradient flows back into them.
            prefix: number of leading tokens without a position. They get rows cos = 1, sin = 0 in front, so that
                attention need not cut them off and join them again.
        """
        if angles.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"angles must be float32 or float64, got {angles.dtype}: 16-bit angles lose the position; "
                "compute them outside of autocast"
            )
        if angles.dim() < 2:
            raise ValueError(f"angles must be (..., N, F), got {tuple(angles.shape)}")
        if prefix < 0:
            raise ValueError(f"prefix must not be negative, got {prefix}")
        if prefix:
            angles = F.pad(angles, (0, 0, prefix, 0))
        cos, sin = angles.cos(), angles.sin()
        # Once for all layers that share the table. A learned table is another one in every layer: see `rotate_pair`.
        return cls(cos, sin, None if angles.requires_grad else ops.make_phasor(cos, sin))

    def layer(self, index: int) -> RotaryTable:
        """The table of one layer, from a table with a leading layer axis."""
        if self.cos.dim() < 3:
            raise ValueError(f"this table has no layer axis: its shape is {tuple(self.cos.shape)}")
        return RotaryTable(self.cos[index], self.sin[index], None if self.phasor is None else self.phasor[index])

    def inverse(self) -> RotaryTable:
        """The table of the opposite angles."""
        return RotaryTable(self.cos, -self.sin, None if self.phasor is None else torch.conj_physical(self.phasor))

    def to(self, device: torch.device | str) -> RotaryTable:
        """The table on another device; itself where it is there already."""
        if self.cos.device == torch.device(device):
            return self
        cos, sin = self.cos.to(device), self.sin.to(device)
        return RotaryTable(cos, sin, None if cos.requires_grad else ops.make_phasor(cos, sin))

    def rotate(self, x: Tensor, half: bool = False) -> Tensor:
        """Rotate the first 2F channels of every token and pass the others through unchanged.

        Args:
            x: (B, H, N, D) of any floating-point dtype; computed in float32 (float64 for float64).
            half: split-half pairing (f, f + F) instead of interleaved (2f, 2f + 1).

        Returns:
            (B, H, N, D) in the dtype of x.
        """
        self._check(x)
        return ops.rotate(x, self.cos, self.sin, half, self.phasor)

    def rotate_pair(self, q: Tensor, k: Tensor, half: bool = False) -> tuple[Tensor, Tensor]:
        """Rotate queries q (B, H, N, D) and keys k (B, Hkv, N, D).

        Args:
            q: queries.
            k: keys, possibly of fewer heads; a table of one row per head then has no meaning and is refused.
            half: as in `rotate`.
        """
        self._check(q)
        self._check(k)
        phasor = self.phasor
        if phasor is None and not half:
            phasor = ops.make_phasor(self.cos, self.sin)
        return tuple(ops.rotate(x, self.cos, self.sin, half, phasor) for x in (q, k))  # type: ignore[return-value]

    def _check(self, x: Tensor) -> None:
        table = self.cos.shape
        if x.dim() != 4 or not x.is_floating_point():
            raise TypeError(f"rotary needs a floating-point (B, H, N, D), got {x.dtype} of shape {tuple(x.shape)}")
        if self.cos.dim() > 4:
            raise ValueError(f"the table {tuple(table)} still has a layer axis: take one layer with .layer(index)")
        if 2 * table[-1] > x.shape[-1]:
            raise ValueError(f"the table rotates {2 * table[-1]} channels, the heads have only {x.shape[-1]}")
        if table[-2] != x.shape[-2]:
            raise ValueError(
                f"the table has {table[-2]} tokens, x has {x.shape[-2]} (shape {tuple(x.shape)}); "
                "prefix tokens (cls, registers) count: say Positions(..., prefix=...)"
            )
        self._check_broadcast(x)

    def _check_broadcast(self, x: Tensor) -> None:
        table = self.cos.shape
        if len(table) > 2 and table[-3] not in (1, x.shape[1]):
            raise ValueError(
                f"the table has angles for {table[-3]} heads, x has {x.shape[1]} heads. Grouped-query keys need a "
                "table that all heads share; a table of several layers must be cut with .layer(index)"
            )
        if len(table) > 3 and table[-4] not in (1, x.shape[0]):
            raise ValueError(
                f"the table has angles for a batch of {table[-4]}, x has {x.shape[0]} samples; "
                "a table of several layers must be cut with .layer(index)"
            )


def pairing_permutation(dim: int, rotary_dim: int | None = None) -> Tensor:
    """The channel order that turns interleaved planes into half-split ones.

    With perm = [0, 2, 4, ..., 1, 3, 5, ...]: x_half = x_interleaved[..., perm], and rotating x_half with half=True
    equals rotating x_interleaved and then permuting. Scores are the same either way.

    Args:
        dim: head dim D.
        rotary_dim: rotated channels 2F; the others stay in place. All of them by default.

    Returns:
        (D,) int64.
    """
    rotary_dim = dim if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or not 0 <= rotary_dim <= dim:
        raise ValueError(f"rotary_dim must be even and between 0 and dim={dim}, got {rotary_dim}")
    channels = torch.arange(dim)
    return torch.cat((channels[0:rotary_dim:2], channels[1:rotary_dim:2], channels[rotary_dim:]))


def convert_pairing(rows: Tensor, dim: int, to_half: bool = True, rotary_dim: int | None = None) -> Tensor:
    """Reorder the rows of a query or key projection for the other pairing, with the same attention scores.

    Apply it to W_q and W_k, their biases, and the per-channel weights of q/k norms; leave values and the output alone.

    Args:
        rows: (heads * dim, ...) rows of the projection, head after head.
        dim: head dim D.
        to_half: from interleaved to half-split; False is the way back.
        rotary_dim: as in `pairing_permutation`.
    """
    if rows.dim() < 1 or rows.shape[0] % dim:
        raise ValueError(f"the {tuple(rows.shape)} rows are not whole heads of dim={dim}")
    order = pairing_permutation(dim, rotary_dim).to(rows.device)
    order = order if to_half else order.argsort()
    return rows.unflatten(0, (-1, dim))[:, order].flatten(0, 1)
