"""`mvit_decomposed`: the query meets one learned vector for the offset along each axis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoding import AttentionTerms, PositionEncoding
from ..positions import AXIS_NAMES, Positions
from ..precision import full_precision
from ..registry import register_encoding
from .offsets import LayeredTerms, cells_of
from .swin import grid_sizes


@register_encoding("mvit_decomposed")
class DecomposedRelative(PositionEncoding):
    """Decomposed relative position of MViTv2, ViTDet and SAM: a dot product of the query with a vector for each axis.

    The parameters `rel_pos_h`, `rel_pos_w` (in 3 axes also `rel_pos_t`, in one `rel_pos_n`) are (L, 2n - 1, D), shared
    by the heads. The query enters without the softmax scale; prefix tokens get nothing. On other grids the vectors of
    an axis are interpolated linearly to its length, as ViTDet does; loose points read between them. Pooled keys lie on
    another grid than the queries: `between(queries, keys)` gives the terms of such a block.

    Args:
        grid_size: the trained grid, one size for each axis or one for all; with pooling, the finer of both grids.
        std: standard deviation of the truncated normal initialisation; 0 starts without an effect.
    """

    kind = "bias"
    per_layer = True
    terms = ("bias",)
    equation = "s_ij = <q_i, k_j> * scale + sum_a <q_i, R_a[p_ia - p_ja]>"
    source = "Li et al., MViTv2, arXiv 2112.01526; other grids as ViTDet, arXiv 2203.16527"
    promises = ("translation_invariant",)
    parity = "official"
    cost = "q times 2n - 1 vectors per axis and block, laid out to one B x H x N x N bias"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        grid_size: int | Sequence[int] = 14,
        std: float = 0.02,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        if std < 0:
            raise ValueError(f"std must not be negative, got {std}")
        self.std = std
        self.grid_size = grid_sizes(grid_size, axes)
        for name, size in zip(self.table_names, self.grid_size, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(depth, 2 * size - 1, self.head_dim)))
        self.reset_parameters()

    @property
    def table_names(self) -> tuple[str, ...]:
        """Names of the parameters, one for each axis."""
        return tuple(f"rel_pos_{axis}" for axis in AXIS_NAMES[self.axes])

    def reset_parameters(self) -> None:
        for p in self.parameters():
            nn.init.trunc_normal_(p, std=self.std) if self.std else nn.init.zeros_(p)

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        return self.between(positions, positions)

    def between(self, queries: Positions, keys: Positions) -> AttentionTerms:
        """Terms of attention from tokens at `queries` to tokens at `keys`, which may lie on a coarser or finer grid.

        Raises:
            ValueError: if only one of them is a lattice, which leaves no common unit.
        """
        self.check_positions(queries)
        self.check_positions(keys)
        device = next(self.parameters()).device
        queries, keys = queries.to(device), keys.to(device)
        if (queries.lattice is None) != (keys.lattice is None):
            raise ValueError("queries and keys must both be cells of a lattice, or both be loose points")
        lookups = _point_lookups(queries, keys, self.grid_size) if queries.lattice is None else _lookups(queries, keys)
        return LayeredTerms(partial(self._layer_terms, lookups, queries, keys), self.depth)

    def _layer_terms(
        self, lookups: list[AxisLookup], queries: Positions, keys: Positions, layer: int
    ) -> AttentionTerms:
        tables = [getattr(self, name)[layer] for name in self.table_names]
        with full_precision(tables[0]):
            rows = [resize_rows(t, lookup.length) for t, lookup in zip(tables, lookups, strict=True)]
        grid = keys.grid_size if keys.lattice is not None else None
        return DecomposedTerms(rows, lookups, (queries.prefix, keys.prefix), grid)


class AxisLookup:
    """Which vector of an axis each pair of tokens reads.

    Args:
        length: number of vectors that the table must have.
        lower: int64 (..., N, M), or (N, m) where the m places along the axis stand for all M keys of a full grid.
        weight: share of the vector after that one, of the same shape; None if every pair has a vector of its own.
    """

    def __init__(self, length: int, lower: Tensor, weight: Tensor | None = None) -> None:
        self.length, self.lower, self.weight = length, lower, weight


class DecomposedTerms(AttentionTerms):
    """The sum over axes of q with the vectors of the offsets.

    Args:
        rows: (length, D) vectors of each axis.
        lookups: which of them a pair reads.
        prefix: number of prefix tokens of queries and keys.
        grid: sizes of the full grid of the keys, over which the axes are spread; None if lookups are pair by pair.
    """

    def __init__(
        self,
        rows: list[Tensor],
        lookups: list[AxisLookup],
        prefix: tuple[int, int],
        grid: tuple[int, ...] | None,
    ) -> None:
        self.rows, self.lookups, self.prefix, self.grid = rows, lookups, prefix, grid

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        q = q[..., self.prefix[0] :, : self.rows[0].shape[-1]]  # other terms may have widened q
        total: Tensor | float = 0.0
        for axis, (rows, lookup) in enumerate(zip(self.rows, self.lookups, strict=True)):
            with full_precision(q):
                products = q @ rows.to(q.dtype).T  # (B, H, N, length)
            total = total + self._spread(_read(products, lookup), axis)
        bias = torch.as_tensor(total)
        bias = bias if self.grid is None else bias.flatten(3)
        return F.pad(bias, (self.prefix[1], 0, self.prefix[0], 0)) if any(self.prefix) else bias

    def _spread(self, values: Tensor, axis: int) -> Tensor:
        """(B, H, N, m) along one axis of the keys' grid: (B, H, N, 1, .., m, .., 1)."""
        if self.grid is None:
            return values
        shape = [1] * len(self.grid)
        shape[axis] = self.grid[axis]
        return values.reshape(*values.shape[:3], *shape)


def _read(products: Tensor, lookup: AxisLookup) -> Tensor:
    lower = lookup.lower if lookup.lower.dim() == 2 else lookup.lower[:, None]
    lower = lower.expand(*products.shape[:2], -1, -1)
    values = torch.gather(products, -1, lower)
    if lookup.weight is None:
        return values
    weight = (lookup.weight if lookup.weight.dim() == 2 else lookup.weight[:, None]).to(products.dtype)
    after = torch.gather(products, -1, (lower + 1).clamp(max=products.shape[-1] - 1))
    return torch.lerp(values, after, weight)


def _lookups(queries: Positions, keys: Positions) -> list[AxisLookup]:
    """Whole-numbered offsets between the cells of two lattices over the same area, in cells of the finer one."""
    assert queries.lattice is not None
    assert keys.lattice is not None
    full = keys.grid_size is not None
    found = []
    for axis, (i, n) in enumerate(zip(cells_of(queries), queries.lattice, strict=True)):
        m = keys.lattice[axis]
        j = torch.arange(m, device=keys.device) if full else cells_of(keys)[axis]
        found.append(AxisLookup(2 * (n if n == m else max(n, m)) - 1, _index(i, j, n, m)))
    return found


def _index(i: Tensor, j: Tensor, n: int, m: int) -> Tensor:
    """Rows of the table for cells i (..., N) of n and j (..., M) of m, as MViTv2 counts them: (..., N, M)."""
    if n == m:
        return i[..., :, None] - j[..., None, :] + (m - 1)
    q_ratio, k_ratio = max(m / n, 1.0), max(n / m, 1.0)
    return (i[..., :, None] * q_ratio - j[..., None, :] * k_ratio + (m - 1) * k_ratio).long()


def _point_lookups(queries: Positions, keys: Positions, grid_size: tuple[int, ...]) -> list[AxisLookup]:
    """Offsets between loose points, in grid units: two neighbouring vectors and the share of the second."""
    found = []
    for axis in range(queries.num_axes):
        size = grid_size[axis] if keys.extent is None else max(round(keys.extent[axis]), 1)
        offset = queries.coords[..., axis, None] - keys.coords[..., None, :, axis]
        place = (offset + (size - 1)).clamp(0, 2 * size - 2)
        lower = place.floor()
        found.append(AxisLookup(2 * size - 1, lower.long(), place - lower))
    return found


def resize_rows(table: Tensor, length: int) -> Tensor:
    """Vectors of one axis (2n - 1, D), interpolated linearly to another length; itself if it has that length."""
    if not torch.compiler.is_exporting() and table.shape[0] == length:
        return table
    return F.interpolate(table.T[None], size=length, mode="linear", align_corners=False)[0].T
