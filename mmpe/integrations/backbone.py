"""What every backbone does with an encoding: build it for a grid, hand out its terms, drop patches with positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..encoding import AttentionTerms, PositionEncoding
from ..positions import Positions
from ..registry import create_encoding_for


class BlockTerms:
    """The attention terms of one forward pass, block by block.

    Terms that do not depend on content are made once, here; the others inside each block. An object lives for one
    forward pass and is never stored on a module, so recomputation and parallel calls see the same terms.

    Args:
        encoding: the encoding of all blocks.
        positions: positions of the tokens that enter the blocks.
    """

    def __init__(self, encoding: PositionEncoding, positions: Positions) -> None:
        self.encoding, self.positions = encoding, positions
        self.shared = None if encoding.content_dependent else encoding(positions)

    def __call__(self, h: Tensor, layer: int) -> AttentionTerms:
        """Terms of block `layer`, whose qkv projection reads h (B, N, C)."""
        if self.shared is not None:
            return self.shared.layer(layer)
        return self.encoding(self.positions, h, layer=layer)


def create_for_grid(
    name: str,
    dim: int,
    heads: int,
    depth: int,
    grid: tuple[int, ...],
    prefix: int,
    options: Mapping[str, Any] | None = None,
) -> PositionEncoding:
    """Build an encoding and tell it the backbone's grid and prefix, where it has such options and none were given.

    Args:
        name: an encoding or a sum of them.
        dim: model width C.
        heads: attention heads.
        depth: number of blocks.
        grid: sizes of the grid that the backbone is built for.
        prefix: number of tokens without a position.
        options: options of the encoding; they win over what the backbone offers.
    """
    offers = {"grid_size": tuple(grid), "prefix": prefix}
    return create_encoding_for(name, dim, heads, len(grid), depth, offers, options)


def drop_patches(x: Tensor, positions: Positions, rate: float, ordered: bool = False) -> tuple[Tensor, Positions]:
    """Keep a random share of the patch tokens of every sample, and the positions of just those.

    Each sample keeps its own tokens, so the positions become batched and the encoding follows token by token.

    Args:
        x: (B, prefix + N, C) tokens; the prefix is always kept.
        positions: positions of the N patches.
        rate: share of the patches to drop, in [0, 1).
        ordered: keep the raster order of the tokens.
    """
    batch, prefix, total = x.shape[0], positions.prefix, x.shape[1] - positions.prefix
    count = max(1, int(total * (1.0 - rate)))
    keep = torch.rand(batch, total, device=x.device).argsort(dim=1)[:, :count]  # (B, K)
    if ordered:
        keep = keep.sort(dim=1).values
    patches = x[:, prefix:].gather(1, keep[..., None].expand(-1, -1, x.shape[2]))  # (B, K, C)
    return torch.cat([x[:, :prefix], patches], dim=1), positions.keep(keep)
