"""`lookhere`: every head looks in a fixed direction, and less and less far away."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..positions import Positions
from ..registry import register_encoding
from .offsets import OffsetBias, Offsets, squared_lengths

# What a head sees, of d = key minus query with x to the right and y down: all of these must hold.
_SEES: dict[str, tuple[str, ...]] = {
    "up_left": ("up", "left"),
    "up_right": ("up", "right"),
    "down_left": ("down", "left"),
    "down_right": ("down", "right"),
    "up": ("up",),
    "down": ("down",),
    "left": ("left",),
    "right": ("right",),
    "cone_up": ("cone_up",),
    "cone_down": ("cone_down",),
    "cone_left": ("cone_left",),
    "cone_right": ("cone_right",),
    "all": (),
}
_GROUPS: dict[str, tuple[str, ...]] = {
    "corners": ("up_left", "up_right", "down_left", "down_right"),
    "halves": ("up", "down", "left", "right"),
    "triangles": ("cone_up", "cone_down", "cone_left", "cone_right"),
    "none": ("all",) * 4,
}
_UNDIRECTED_SLOPES = (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8)
HIDDEN = torch.finfo(torch.bfloat16).min
"""Bias of keys that a head does not see. Finite, so that a query whose visible keys are all masked gives no NaN."""


@register_encoding("lookhere")
class LookHere(OffsetBias):
    """Each head sees one direction only, and its attention falls with the distance; nothing is learned.

    The bias is -g s_l m_h |p_i - p_j| for the keys that head h sees, with s_l falling over the blocks, and as good as
    minus infinity for the others. Heads are dealt out to the groups of `layout` in fours, the first groups first, and
    the last four may be cut: 12 heads are 4 / 4 / 4, 16 are 8 / 4 / 4, and 6 are 4 / 2, all as in the official code.
    Prefix tokens see everything and are seen by all. The official code stores the bias in bfloat16; here it is
    float32. With `depth` at 1 (the baseline of PaPE) every block has the first slope.

    Args:
        layout: groups of directions joined by "-": "corners" (quadrants), "halves", "triangles" (90 degrees to each
            side) and "none" (all around). The default is the paper's 90-degree version.
        global_slope: g.
        layer_slopes: s_l in the first and the last block, linear in between.
        head_slopes: m_h of each head; None is 1/2, 1/4, ... for each next four heads of a directed group, and 1/4,
            1/16, 1/64, 1/256 over an undirected one.
    """

    supported_axes = (2,)
    equation = "s_ij = <q_i, k_j> * scale - g s_l m_h |p_i - p_j| if head h sees p_j - p_i, else -inf"
    source = "Fuller et al., LookHere, arXiv 2405.13985"
    promises = ("translation_invariant",)
    parity = "official"
    cost = "one H x N x N bias per block, or none with flex_attention; no parameters"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        layout: str = "corners-triangles-none",
        global_slope: float = 2.0,
        layer_slopes: tuple[float, float] = (1.5, 0.5),
        head_slopes: Sequence[float] | None = None,
    ) -> None:
        super().__init__(dim, heads, axes, depth, share_layers=False)
        self.views, slopes = head_views(layout, heads)
        if head_slopes is not None and len(head_slopes) != heads:
            raise ValueError(f"head_slopes must give one number for each of the {heads} heads, got {len(head_slopes)}")
        self.head_slopes = slopes if head_slopes is None else tuple(map(float, head_slopes))
        self.layout, self.global_slope, self.layer_slopes = layout, global_slope, tuple(layer_slopes)
        if len(self.layer_slopes) != 2:
            raise ValueError(f"layer_slopes must be the slopes of the first and the last block, got {layer_slopes}")

    def prepare(self, offsets: Offsets, positions: Positions) -> tuple[Tensor, Tensor]:
        """-m_h |d| of every offset (R, H), and which offsets a head sees (R, H)."""
        dy, dx = (-offsets.vectors).unbind(-1)  # key minus query
        distance = squared_lengths(offsets.vectors).sqrt()
        falling = [distance * -slope for slope in self.head_slopes]
        return torch.stack(falling, dim=-1), torch.stack(_visible(dx, dy, self.views), dim=-1)

    def offset_bias(self, prepared: tuple[Tensor, Tensor], layer: int) -> Tensor:
        falling, visible = prepared
        return (falling * (self.global_slope * self.layer_slope(layer))).masked_fill(~visible, HIDDEN)

    def layer_slope(self, layer: int) -> float:
        """s_l of a block."""
        first, last = self.layer_slopes
        return first + (last - first) * layer / max(self.depth - 1, 1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, layout={self.layout!r}"


def head_views(layout: str, heads: int) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """What each head sees, and its slope m_h.

    Raises:
        ValueError: for a layout with unknown groups.
    """
    groups = layout.split("-")
    unknown = [group for group in groups if group not in _GROUPS]
    if unknown:
        raise ValueError(f"layout={layout!r} has unknown groups {unknown}; join some of {', '.join(_GROUPS)} by '-'")
    fours = -(-heads // 4)
    shares = [4 * (fours // len(groups) + (g < fours % len(groups))) for g in range(len(groups))]
    views = [_GROUPS[group][i % 4] for group, share in zip(groups, shares, strict=True) for i in range(share)]
    slopes = [
        _UNDIRECTED_SLOPES[i * 4 // share] if group == "none" else 2.0 ** -(1 + i // 4)
        for group, share in zip(groups, shares, strict=True)
        for i in range(share)
    ]
    return tuple(views[:heads]), tuple(slopes[:heads])


def _visible(dx: Tensor, dy: Tensor, views: Sequence[str]) -> list[Tensor]:
    """For each head the offsets (R,) that it sees; the query itself is always among them."""
    regions = {
        "up": dy <= 0,
        "down": dy >= 0,
        "left": dx <= 0,
        "right": dx >= 0,
        "cone_up": -dy >= dx.abs(),
        "cone_down": dy >= dx.abs(),
        "cone_left": -dx >= dy.abs(),
        "cone_right": dx >= dy.abs(),
    }
    seen = []
    for view in views:
        visible = torch.ones_like(dx, dtype=torch.bool)
        for region in _SEES[view]:
            visible = visible & regions[region]
        seen.append(visible)
    return seen
