"""`harope`: a learned linear map of every head before the axial rotation, free at the start and exactly relative."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ..frequencies import axial, split_planes
from ..precision import full_precision
from ..registry import register_encoding
from .coordinates import check_choice
from .lie import exponential
from .mapped_rotary import MappedRotaryEncoding
from .rotary import check_rotary_dim

_FLOOR = 1e-6
"""Least singular value, which keeps the inverse finite."""


@register_encoding("harope")
class HARoPE(MappedRotaryEncoding):
    """Head-wise adaptive rotary encoding: a learned map per head in SVD form, then axial rotation.

    It starts as the axial rotary encoding with the first planes for the first axis. `fold_` moves the maps into the
    projections for inference.

    Args:
        variant: "v2" (the released code): q by M and k by its inverse transpose, so that tokens at one place keep their
            product; "v1" (first paper): both by M.
        base: wavelengths of every axis grow from 2 pi towards 2 pi base.
        share_heads: learn one map for all heads.
        share_layers: learn one map for all blocks.
    """

    per_layer = True
    promises = ("translation_invariant",)
    equation = (
        "q_n <- R(theta_n) M q_n,  k_n <- R(theta_n) M^-T k_n  (v1: M k_n);  M = U diag(s) V^T\n"
        "U = exp((A_u - A_u^T)/2), V = exp((A_v - A_v^T)/2), s = softplus(sigma) + 1e-6"
    )
    source = "HARoPE, arXiv 2510.10489"
    cost = "two D x D exponentials per head and block, one product per token, one rotation; folded: the rotation"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        variant: Literal["v2", "v1"] = "v2",
        base: float = 10000.0,
        share_heads: bool = False,
        share_layers: bool = False,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        self.planes = check_rotary_dim(self.head_dim, self.head_dim)
        check_choice("variant", variant, ("v2", "v1"))
        if not base > 0:
            raise ValueError(f"base must be greater than 0, got {base}")
        self.variant, self.base, self.share_layers = variant, base, share_layers
        sets, width = (1 if share_layers else depth, 1 if share_heads else heads), self.head_dim
        self.A_u = nn.Parameter(torch.empty(*sets, width, width))
        self.A_v = nn.Parameter(torch.empty(*sets, width, width))
        self.sigma = nn.Parameter(torch.empty(*sets, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start from the identity (singular values 1 + 1e-6, as the released code)."""
        self.A_u.zero_()
        self.A_v.zero_()
        self.sigma.fill_(math.log(math.e - 1.0))
        self.folded = (False,) * self.depth

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        return axial(split_planes(self.planes, self.axes), (self.base,) * self.axes, device)

    def maps(self) -> tuple[Tensor, Tensor]:
        u, v = (exponential((a - a.mT) / 2.0) for a in (self.A_u, self.A_v))  # (L, H, D, D)
        s = nn.functional.softplus(self.sigma) + _FLOOR
        with full_precision(u):
            m = u * s[..., None, :] @ v.mT
            return m, m if self.variant == "v1" else u / s[..., None, :] @ v.mT

    def _set_identity(self, slot: int | slice) -> None:
        self.A_u[slot], self.A_v[slot] = 0.0, 0.0
        self.sigma[slot] = math.log(math.expm1(1.0 - _FLOOR))
