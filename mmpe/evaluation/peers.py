"""Encodings of other libraries under the face of ours, to be measured in the same blocks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..encoding import AttentionTerms, PositionEncoding
from ..positions import Positions


class TimmTerms(AttentionTerms):
    """Rotation by timm's `apply_rot_embed_cat`, with the prefix sliced off as timm's attention does.

    Args:
        tables: (N, 2D), or (L, H, N, 2D) for one table per block and head.
        prefix: leading tokens that are not rotated.
        half: channel pairing.
    """

    def __init__(self, tables: Tensor, prefix: int, half: bool = False) -> None:
        self.tables, self.prefix, self.half = tables, prefix, half

    def layer(self, index: int) -> AttentionTerms:
        return self if self.tables.dim() == 2 else TimmTerms(self.tables[index], self.prefix, self.half)

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotate(q), self._rotate(k)

    def _rotate(self, x: Tensor) -> Tensor:
        import torch
        from timm.layers.pos_embed_sincos import apply_rot_embed_cat

        head, tail = x[:, :, : self.prefix], x[:, :, self.prefix :]
        rotated = apply_rot_embed_cat(tail, self.tables, half=self.half).type_as(x)
        return torch.cat([head, rotated], dim=2) if self.prefix else rotated


class TimmRope(PositionEncoding):
    """A rotary module of timm.

    Args:
        dim: model width.
        heads: number of heads.
        depth: number of blocks.
        make: builds timm's module from (dim, heads, depth).
    """

    kind = "rotary"
    supported_axes = (2,)

    def __init__(self, dim: int, heads: int, depth: int, make: Callable[[int, int, int], Any]) -> None:
        super().__init__(dim, heads, 2, depth)
        self.rope = make(dim, heads, depth)

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        self.check_positions(positions)
        return TimmTerms(self.rope.get_embed(list(positions.grid_size or ())), positions.prefix)


def installed_peers(dim: int, heads: int, depth: int, axes: int) -> dict[str, PositionEncoding]:
    """Peers that are installed and fit these sizes, by name."""
    if axes != 2 or importlib.util.find_spec("timm") is None or (dim // heads) % 4:
        return {}
    makers = {"timm rope_axial": _axial, "timm rope_mixed": _mixed}
    return {name: TimmRope(dim, heads, depth, make) for name, make in makers.items()}


def _axial(dim: int, heads: int, depth: int) -> Any:
    from timm.layers.pos_embed_sincos import RotaryEmbeddingCat

    return RotaryEmbeddingCat(dim // heads, temperature=100.0, in_pixels=False, feat_shape=None)


def _mixed(dim: int, heads: int, depth: int) -> Any:
    from timm.layers.pos_embed_sincos import RotaryEmbeddingMixed

    return RotaryEmbeddingMixed(dim, depth=depth, num_heads=heads, temperature=10.0, feat_shape=None)
