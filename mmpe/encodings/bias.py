"""Biases added to the attention logits."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..encoding import AttentionTerms, PositionEncoding, ScoreMod
from ..positions import Positions
from ..registry import register_encoding

PrefixRule = Literal["exempt", "origin"]


@register_encoding("alibi_2d")
class ALiBi2D(PositionEncoding):
    """Attention falls off with the Euclidean distance, at a fixed rate for each head (nD-ALiBi); no parameters.

    Distances are in grid units, in any number of axes; in 1D it is the two-sided ALiBi. It cannot tell directions:
    turning or mirroring the image changes nothing. One (H, N, N) bias is made for each attention call and not kept;
    flex_attention does without it.

    Args:
        prefix_rule: "exempt" gives prefix tokens no bias in either direction, which keeps a class token neutral;
            "origin" places them one step before the first patch, as PaPE's baseline does: they prefer its corner.
    """

    kind = "bias"
    terms = ("bias", "score_mod")
    equation = "s_ij = <q_i, k_j> * scale - m_h ||p_i - p_j||,   m_h = 2^(-8h/H)"
    source = "Fuller et al., CROMA (2D), arXiv 2311.00566; Press et al., ALiBi, arXiv 2108.12409; nD: baseline of PaPE"
    promises = ("translation_invariant", "rotation_invariant", "mirror_invariant", "symmetric_bias")
    parity = "official"
    cost = "one N x N distance per call, or none with flex_attention"

    def __init__(self, dim: int, heads: int, axes: int = 2, depth: int = 1, prefix_rule: PrefixRule = "exempt") -> None:
        super().__init__(dim, heads, axes, depth)
        if prefix_rule not in get_args(PrefixRule):
            raise ValueError(f"prefix_rule={prefix_rule!r} must be one of {', '.join(map(repr, get_args(PrefixRule)))}")
        self.prefix_rule: PrefixRule = prefix_rule

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        self.check_positions(positions)
        coords, exempt = positions.coords, positions.prefix
        if self.prefix_rule == "origin" and positions.prefix:
            # One step before the first cell of a grid is index -1 on every axis.
            coords, exempt = F.pad(coords, (0, 0, positions.prefix, 0), value=-1.0), 0
        return DistanceTerms(coords, alibi_slopes(self.heads, coords.device), exempt)


class DistanceTerms(AttentionTerms):
    """Bias -slope_h * ||p_i - p_j||, zero in the rows and columns of the exempt leading tokens.

    Args:
        coords: (N, A) or (B, N, A) float32, without the exempt tokens.
        slopes: (H,) float32.
        exempt: number of leading tokens without a bias.
    """

    def __init__(self, coords: Tensor, slopes: Tensor, exempt: int = 0) -> None:
        self.coords, self.slopes, self.exempt = coords, slopes, exempt
        self.tokens = exempt + coords.shape[-2]

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        # Made anew for each block: kept over all of them, it would be the largest tensor of the model.
        bias = distance_bias(self.coords, self.slopes)
        return F.pad(bias, (self.exempt, 0, self.exempt, 0)) if self.exempt else bias

    def score_mod(self) -> ScoreMod:
        coords = F.pad(self.coords, (0, 0, self.exempt, 0))
        columns = [c.contiguous() for c in coords.unbind(-1)]  # A of (N,) or (B, N)
        batched, slopes, exempt = coords.dim() > 2, self.slopes, self.exempt

        def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            squares = score.float() * 0
            for column in columns:
                step = column[b, i] - column[b, j] if batched else column[i] - column[j]
                squares = squares + step * step
            bias = slopes[h] * squares.sqrt()
            return score - torch.where((i >= exempt) & (j >= exempt), bias, 0.0).to(score.dtype)

        return mod


def distance_bias(coords: Tensor, slopes: Tensor) -> Tensor:
    """-slope_h * ||p_i - p_j|| of coords (N, A) or (B, N, A) and slopes (H,): (1 or B, H, N, N) in float32.

    By subtraction and not by |a|^2 + |b|^2 - 2ab, which loses the zeros of the diagonal to rounding.
    """
    coords = coords if coords.dim() > 2 else coords.unsqueeze(0)
    squares: Tensor | float = 0.0
    for c in coords.unbind(-1):  # (B, N)
        squares = squares + (c[:, :, None] - c[:, None, :]).square()
    return torch.as_tensor(squares).sqrt()[:, None] * -slopes[:, None, None]  # (B, H, N, N)


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Slopes 2^(-8k/H), k = 1 .. H, for a power of two -> (heads,) float32.

    Other counts take those of the next smaller power of two, then every second one of the next larger.
    """
    power = 1 << (heads.bit_length() - 1)
    first = torch.arange(1, power + 1, device=device, dtype=torch.float32) * (8 / power)
    between = torch.arange(heads - power, device=device, dtype=torch.float32) * (8 / power) + 4 / power
    return torch.exp2(-torch.cat([first, between]))
