"""`pope`: magnitudes say what, phases say where, so content cannot shift the place that a head looks at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoding import AttentionTerms, PositionEncoding
from ..frequencies import angles, axial, split_planes
from ..positions import Positions
from ..registry import register_encoding
from .coordinates import GridIndexing, check_choice, in_axis_order
from .rotary_variants import default_base


def polar(x: Tensor, phase: Tensor, half: bool = False) -> Tensor:
    """softplus(x) as the magnitude of complex numbers with the given phases: (B, H, N, D) -> (B, H, N, 2 D).

    Args:
        x: magnitudes before the softplus, of any floating-point dtype; computed in float32.
        phase: (..., N, D) float32.
        half: all cosines, then all sines, instead of both of each channel side by side.
    """
    magnitude = F.softplus(x.to(torch.promote_types(x.dtype, torch.float32)))
    parts = (magnitude * phase.cos()).to(x.dtype), (magnitude * phase.sin()).to(x.dtype)
    return torch.cat(parts, dim=-1) if half else torch.stack(parts, dim=-1).flatten(-2)


class PolarTerms(AttentionTerms):
    """q and k as complex numbers of D channels each, written as 2 D real ones.

    The learned phase of the keys is taken from the queries instead, which gives the same scores, and works where
    several query heads share their keys.

    Args:
        phase: (N, D) or (B, 1, N, D) float32 of keys.
        delta: (L, H, D) learned phases.
        half: layout of the channels, see `polar`.
    """

    def __init__(self, phase: Tensor, delta: Tensor, half: bool) -> None:
        self.phase, self.delta, self.half = phase, delta, half

    def layer(self, index: int) -> AttentionTerms:
        layers = len(self.delta)
        if not 0 <= index < layers:
            raise ValueError(f"these are the terms of {layers} blocks, asked for layer {index}")
        return self if layers == 1 else PolarTerms(self.phase, self.delta[index : index + 1], self.half)

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.delta) > 1:
            raise ValueError(f"these terms hold those of {len(self.delta)} blocks; in block i use terms.layer(i)")
        q_phase = self.phase - self.delta[0, :, None]  # (H, N, D) or (B, H, N, D)
        return polar(q, q_phase, self.half), polar(k, self.phase, self.half)


@register_encoding("pope")
class PoPE(PositionEncoding):
    """Polar position encoding: every channel has a non-negative magnitude (content) and a phase (position alone).

    q and k become twice as wide, values stay. All magnitudes are positive, so that initial logits share a large mean.

    Args:
        base: wavelengths of every axis grow from 2 pi towards 2 pi base; None is 10000 in one axis and 100 in more.
        init_delta: initial learned phases, "zero" (generalises better to other lengths) or "uniform" in [-2 pi, 0].
        share_heads: learn one set of phases for all heads.
        share_layers: learn one set of phases for all blocks.
        axial_dims: channels of each axis in the order of `grid_indexing`; None shares them out evenly.
        grid_indexing: order in which axes share out the channels: "ij" first axis first (t, h, w), "xy" the reverse.
        half: all cosines, then all sines, instead of both of each channel side by side; scores are the same.
    """

    kind = "rotary"
    per_layer = True
    terms = ("queries_keys",)
    equation = (
        "s_ij = scale sum_c softplus(q_ic) softplus(k_jc) cos((p_j - p_i) omega_c + delta_hc)\n"
        "omega_c = base^(-c/D), c < D, each axis its own channels; delta clamped to [-2 pi, 0]"
    )
    source = "PoPE, arXiv 2509.10534"
    promises = ("translation_invariant",)
    parity = "formula"  # compared with x-transformers and PoPE-pytorch, which are not the authors'
    cost = "q and k of twice the width: logits cost twice as much; one table per block"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        base: float | None = None,
        init_delta: Literal["zero", "uniform"] = "zero",
        share_heads: bool = False,
        share_layers: bool = False,
        axial_dims: Sequence[int] | None = None,
        grid_indexing: GridIndexing = "ij",
        half: bool = False,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        check_choice("init_delta", init_delta, ("zero", "uniform"))
        check_choice("grid_indexing", grid_indexing, ("ij", "xy"))
        self.base, self.init_delta = default_base(base, axes), init_delta
        self.grid_indexing, self.half_layout = grid_indexing, half
        self.axial_dims = list(axial_dims) if axial_dims is not None else split_planes(self.head_dim, axes)
        if len(self.axial_dims) != axes or sum(self.axial_dims) != self.head_dim or min(self.axial_dims) < 0:
            raise ValueError(f"axial_dims={axial_dims} must be {axes} numbers that add up to head_dim={self.head_dim}")
        sets = (1 if share_layers else depth, 1 if share_heads else heads)
        self.delta = nn.Parameter(torch.empty(*sets, self.head_dim))
        self.share_layers = share_layers
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start without a phase of their own, or from random ones."""
        if self.init_delta == "zero":
            self.delta.zero_()
        else:
            self.delta.uniform_(-2.0 * math.pi, 0.0)

    def phase(self, positions: Positions) -> Tensor:
        """Angles of position (N, D) or (B, 1, N, D), float32, without prefix tokens."""
        frequencies = axial(self.axial_dims, (self.base,) * self.axes, positions.device)
        return angles(in_axis_order(positions.coords, self.grid_indexing), frequencies)

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        self.check_positions(positions)
        phase = F.pad(self.phase(positions), (0, 0, positions.prefix, 0))
        return PolarTerms(phase, self.delta.clamp(-2.0 * math.pi, 0.0), self.half_layout)
