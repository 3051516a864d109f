"""`rope_pp`: the imaginary part of the rotary score, which RoPE leaves out, as attention heads of its own."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..frequencies import axial, split_planes
from ..positions import Positions
from ..registry import register_encoding
from .coordinates import check_choice
from .rotary import RotaryEncoding, RotaryTerms, check_rotary_dim
from .rotary_variants import default_base


def quarter_turn_back(x: Tensor, half: bool = False) -> Tensor:
    """Every plane of x (..., D) turned by -90 degrees: (a, b) -> (b, -a).

    Args:
        x: vectors whose channels are planes.
        half: planes are (f, f + D/2) instead of (2f, 2f + 1).
    """
    if half:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([b, -a], dim=-1)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([b, -a], dim=-1).flatten(-2)


class ImaginaryTerms(RotaryTerms):
    """Rotation of k, and of q in two ways: (B, H, N, D) -> (B, 2 H, N, D), heads real_0, imaginary_0, real_1, .."""

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        real, k = super().queries_keys(q, k)
        return torch.stack([real, quarter_turn_back(real, self.half)], dim=2).flatten(1, 2), k


@register_encoding("rope_pp")
class RoPEPlusPlus(RotaryEncoding):
    """RoPE++: every query head attends twice, with the real and with the imaginary part of the rotary score.

    For equal content the imaginary score is odd in the offset: such a head looks to one side. The block has to take
    part: it projects to `encoding.qkv_heads` heads and reads `encoding.output_heads` of them; the models of mmpe do.

    Args:
        mode: "ec" (equal cache): H query heads become 2 H, keys and values stay, the output projection reads twice as
            much; "eh" (equal heads): the block projects to H / 2 heads, which become H again.
        base: wavelengths of every axis grow from 2 pi towards 2 pi base; None is 10000 in one axis and 100 in more.
        half: pair channel f with f + F ("half-split", as the code) instead of 2f with 2f + 1.
    """

    promises = ("translation_invariant",)
    equation = "q_real = R(theta) q, q_imag = R(theta - pi/2) q, k <- R(theta) k;  theta[n,f] = p_n base^(-f/F)"
    source = "Beyond Real (RoPE++), arXiv 2512.07525"
    cost = '"ec": twice the heads in attention and a wider output projection; "eh": half the keys and values'

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        mode: Literal["ec", "eh"] = "ec",
        base: float | None = None,
        half: bool = True,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        check_choice("mode", mode, ("ec", "eh"))
        if mode == "eh" and heads % 2:
            raise ValueError(f"mode='eh' projects to half of the heads, and heads={heads} is odd")
        self.planes = check_rotary_dim(self.head_dim, self.head_dim)
        self.mode, self.base, self.half_pairing = mode, default_base(base, axes), half

    @property
    def qkv_heads(self) -> int:
        """Heads of q, k and v that the block projects to."""
        return self.heads if self.mode == "ec" else self.heads // 2

    @property
    def output_heads(self) -> int:
        """Twice as many: one real and one imaginary for each."""
        return 2 * self.qkv_heads

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        return axial(split_planes(self.planes, self.axes), (self.base,) * self.axes, device)

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> ImaginaryTerms:
        return ImaginaryTerms(self.rotary_table(positions), self.half_pairing)
