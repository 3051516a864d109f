"""`rope_mixed`: every plane of every head and block learns its own direction and frequency."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..frequencies import split_planes
from ..positions import Positions
from ..registry import register_encoding
from .coordinates import CoordinateAugmentation, GridIndexing, check_choice, in_axis_order
from .rotary import RotaryEncoding, check_rotary_dim


@register_encoding("rope_mixed")
class RoPEMixed(RotaryEncoding):
    """Mixed rotary encoding: learned frequency vectors, so one plane can see a diagonal direction.

    The parameter `freqs` (A, L, H, F) holds them in the axis order of `grid_indexing`; index 0 is x, the column, as in
    rope-vit and timm, whose checkpoints load as they are. Each head starts as an axial encoding in a random frame.

    Args:
        base: wavelength ratio of the initial frequencies. 10 is the paper's; `rope_axial` starts from 100.
        half: pair channel f with f + F ("half-split") instead of 2f with 2f + 1.
        share_heads: learn one set for all heads.
        share_layers: learn one set for all blocks.
        grid_indexing: axis of index 0: "xy" is the column (then row, then time), "ij" the first axis (t, h, w).
        shift_coords: in training, shift each axis by U(-s, s) patches.
        jitter_coords: in training, scale each axis by a log-uniform factor in [1/J, J].
        rescale_coords: in training, scale all axes by one log-uniform factor in [1/R, R].
    """

    per_layer = True
    equation = "theta[l,h,n,f] = sum_a p[n,a] freqs[a,l,h,f];  (q, k) <- R(theta) (q, k) plane by plane"
    source = "RoPE-ViT, arXiv 2403.13298"
    cost = "one rotation of q and k; a table per block and head is built once per forward"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        base: float = 10.0,
        half: bool = False,
        share_heads: bool = False,
        share_layers: bool = False,
        grid_indexing: GridIndexing = "xy",
        shift_coords: float | None = None,
        jitter_coords: float | None = None,
        rescale_coords: float | None = None,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        planes = check_rotary_dim(self.head_dim, self.head_dim)
        if base <= 0:
            raise ValueError(f"base must be greater than 0, got {base}")
        check_choice("grid_indexing", grid_indexing, ("ij", "xy"))
        self.base, self.half_pairing, self.grid_indexing = base, half, grid_indexing
        self.share_layers = share_layers
        self.augmentation = CoordinateAugmentation(shift_coords, jitter_coords, rescale_coords)
        self.freqs = nn.Parameter(torch.empty(axes, 1 if share_layers else depth, 1 if share_heads else heads, planes))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw a random frame for each head and block; the groups of planes point along its axes."""
        axes, layers, heads, planes = self.freqs.shape
        frames = random_frames(layers, heads, axes, device=self.freqs.device)  # (L, H, A, A), columns are directions
        start = 0
        for group, size in enumerate(split_planes(planes, axes)):
            exponent = torch.arange(size, dtype=torch.float32, device=self.freqs.device) * axes / planes
            directions = frames[..., group].permute(2, 0, 1)[..., None]  # (A, L, H, 1)
            self.freqs[..., start : start + size] = directions / self.base**exponent
            start += size

    @property
    def table_layers(self) -> int | None:
        """Blocks that the table has entries for; None if all blocks share it."""
        return None if self.share_layers else self.depth

    def coordinates(self, positions: Positions) -> Tensor:
        p = in_axis_order(positions.coords, self.grid_indexing)
        return self.augmentation(p) if self.training else p

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        freqs = self.freqs.permute(1, 2, 0, 3)  # (L, H, A, F)
        return freqs[0] if self.share_layers else freqs

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # rope-vit stores heads and planes as one axis, (2, L, H * D / 2), and Swin's blocks have no layer axis; the
        # memory order is ours.
        freqs = state_dict.get(f"{prefix}freqs")
        if isinstance(freqs, Tensor) and freqs.shape[:1] == self.freqs.shape[:1] and (
            freqs.numel() == self.freqs.numel() and freqs.dim() < 4
        ):
            state_dict[f"{prefix}freqs"] = freqs.reshape(self.freqs.shape)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def random_frames(layers: int, heads: int, axes: int, device: torch.device | None = None) -> Tensor:
    """Random orthonormal frames (L, H, A, A) whose columns are the directions; in 1 axis the positive direction."""
    if axes == 1:
        return torch.ones(layers, heads, 1, 1, device=device)
    if axes == 2:
        phi = torch.rand(layers, heads, device=device) * 2.0 * math.pi
        turned = phi + math.pi / 2.0
        first = torch.stack([phi.cos(), phi.sin()], dim=-1)
        return torch.stack([first, torch.stack([turned.cos(), turned.sin()], dim=-1)], dim=-1)
    q, r = torch.linalg.qr(torch.randn(layers, heads, axes, axes, device=device))
    # With the signs of R's diagonal taken out, the frames are uniform over the orthogonal group.
    return q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
