"""`liere`: dense rotations of blocks of q and k, exponentials of generators that need not commute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoding import AttentionTerms, PositionEncoding
from ..frequencies import angles
from ..positions import Positions
from ..precision import full_precision
from ..registry import register_encoding
from ..rotary import RotaryTable
from .coordinates import per_axis
from .lie import BlockRotationTerms, LayeredTerms, exponential, skew_symmetric, upper_triangle
from .rotary import RotaryTerms


@register_encoding("liere")
class LieRE(PositionEncoding):
    """Lie rotational encoding: every block of channels learns one generator per axis, which need not commute.

    Attention sees offsets and places: it is exactly relative only for blocks of 2, or in 1 axis. Positions run from 0
    to 1 on the trained grid and proportionally further on larger ones; prefix tokens are not rotated. Rotations are
    made block by block of the network, when it asks for them.

    Args:
        block_size: channels b of a block, a divisor of head_dim (LieRE_8 in the paper); None is one dense block. Blocks
            of 2 are planes and cost what `rope_mixed` costs.
        grid_size: trained grid, one size for each axis or one for all.
        init_scale: generators start from U(0, init_scale); by default 2 pi.
        share_heads: learn one set for all heads.
        share_layers: learn one set for all blocks of the network. The released code trains so, by overwriting the
            rotations of layer 0; the paper has one set per layer.
    """

    kind = "rotary"
    terms = ("queries_keys",)
    per_layer = True
    promises = ("isometric",)
    parity = "official"
    equation = (
        "(q, k)_n <- exp(sum_a p[n,a] S[a,l,h]) (q, k)_n  on blocks of b channels,  S = U - U^T\n"
        "p[n,a] = i / (n_a - 1) * n_a / n_a(trained)"
    )
    source = "LieRE, arXiv 2406.10322"
    cost = "one b x b exponential and product per token, block, head and layer; the exponentials once per forward"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        block_size: int | None = 8,
        grid_size: int | Sequence[int] = 14,
        init_scale: float = 2.0 * math.pi,
        share_heads: bool = False,
        share_layers: bool = False,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        size = self.head_dim if block_size is None else block_size
        if size < 2 or self.head_dim % size:
            raise ValueError(f"block_size={size} must be at least 2 and divide head_dim={self.head_dim}")
        self.grid_size = per_axis(grid_size, axes, "grid_size")
        if min(self.grid_size) < 1:
            raise ValueError(f"grid_size={grid_size} must be positive")
        self.block_size, self.init_scale, self.share_layers = size, init_scale, share_layers
        layers, heads = 1 if share_layers else depth, 1 if share_heads else heads
        blocks, entries = self.head_dim // size, size * (size - 1) // 2
        self.generators = nn.Parameter(torch.empty(axes, layers, heads, blocks, entries))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all generators anew."""
        self.generators.uniform_(0.0, 1.0).mul_(self.init_scale)

    def coordinates(self, positions: Positions) -> Tensor:
        """Coordinates (..., N, A): 0 .. 1 from the first to the last token of the trained grid."""
        columns = []
        for a, trained in enumerate(self.grid_size):
            # Points of unknown extent are placed as on the trained grid.
            size = trained if positions.extent is None else positions.extent[a]
            columns.append(positions.coords[..., a] * (size / trained / max(size - 1.0, 1.0)))
        return torch.stack(columns, dim=-1)

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        self.check_positions(positions)
        p = F.pad(self.coordinates(positions), (0, 0, positions.prefix, 0))  # (..., N, A); prefix tokens at 0: identity
        if self.block_size == 2:
            return self._as_planes(p)
        if self.generators.shape[1] == 1:
            return self._terms(p, 0)
        return LayeredTerms(lambda index: self._terms(p, index), self.depth)

    def _as_planes(self, p: Tensor) -> RotaryTerms:
        # [[0, u], [-u, 0]] turns by -u.
        frequencies = -self.generators[..., 0].permute(1, 2, 0, 3)  # (L, H, A, m)
        shared = self.share_layers
        table = RotaryTable.from_angles(angles(p, frequencies[0] if shared else frequencies))
        return RotaryTerms(table, layers=None if shared else self.depth)

    def _terms(self, p: Tensor, layer: int) -> BlockRotationTerms:
        return BlockRotationTerms(self.rotations(p, layer))

    def rotations(self, p: Tensor, layer: int = 0) -> Tensor:
        """Rotations of one block of the network at p (..., N, A): (..., H, m, N, b, b)."""
        size = self.block_size
        generators = skew_symmetric(self.generators[:, layer], size).flatten(-2)  # (A, H, m, b b)
        with full_precision(p):
            total = p[..., None, None, :, :] @ generators.movedim(0, -2)  # (..., H, m, N, b b)
        return exponential(total.unflatten(-1, (size, size)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # LieRE's code stores whole matrices (A, L, H m, b, b) and reads what lies above the diagonal.
        raw, size = state_dict.get(f"{prefix}generators"), self.block_size
        whole = self.generators[..., 0].numel() * size * size
        if isinstance(raw, Tensor) and raw.shape[-2:] == (size, size) and raw.numel() == whole:
            state_dict[f"{prefix}generators"] = upper_triangle(raw).reshape(self.generators.shape)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block_size={self.block_size}, grid_size={self.grid_size}"
