"""Learned tables of relative position: `swin` (a window of patches) and `beit` (patches and a class token)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..positions import Positions
from ..registry import register_encoding
from .absolute import sample_table
from .coordinates import check_choice
from .offsets import RESERVED, OffsetBias, Offsets

TableResize = Literal["geometric", "simple"]
Resample = Callable[[Tensor], Tensor]  # a table (R, H) -> its values (R', H) at other offsets
_STEPS = 19  # halvings that bring the bracket [1.01, 1.5] of the ratio below 1e-6


class RelativeTable(OffsetBias):
    """Base of the tables: a learned bias for each offset of the trained grid and each head.

    The parameter `table` is (L, R, H) with R = prod(2n - 1), then `class_rows` rows for pairs with prefix tokens; one
    layer if shared. A checkpoint of another grid is resized when it is loaded, and a single (R, H) table is copied
    into every block.

    Args:
        dim: model width C.
        heads: number of attention heads H.
        axes: number of position axes.
        depth: number of blocks.
        grid_size: the trained grid.
        resize: rule for other grids.
        share_layers: one table for all blocks.
    """

    per_layer = True
    parity = "official"
    class_rows = 0

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int,
        depth: int,
        grid_size: int | Sequence[int],
        resize: TableResize,
        share_layers: bool,
    ) -> None:
        super().__init__(dim, heads, axes, depth, share_layers)
        self.grid_size = grid_sizes(grid_size, axes)
        check_choice("resize", resize, get_args(TableResize))
        self.resize: TableResize = resize
        rows = table_rows(self.grid_size) + self.class_rows
        self.table = nn.Parameter(torch.empty(self.layers, rows, heads))
        # In the checkpoint, because the number of rows does not tell a 3 x 5 grid from a 5 x 3 one.
        self.register_buffer("table_grid", torch.tensor(self.grid_size))
        self.reset_parameters()

    def init_non_persistent_buffers(self) -> None:
        self.table_grid = torch.tensor(self.grid_size, device=self.table.device)

    def prepare(self, offsets: Offsets, positions: Positions) -> Resample | None:
        """How to read the table at the offsets; None where they are its own."""
        extent = self.grid_size if positions.extent is None else positions.extent
        # An exported graph serves any size, so it always resizes; onto the same grid that is the identity.
        if not torch.compiler.is_exporting() and positions.lattice == self.grid_size == tuple(extent):
            return None
        return resampling(offsets.vectors, self.grid_size, extent, self.resize)

    def offset_bias(self, prepared: Resample | None, layer: int) -> Tensor:
        table: Tensor = self.table[layer]
        table = table[: table.shape[0] - self.class_rows]
        return table if prepared is None else prepared(table)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        loaded, grid = state_dict.get(f"{prefix}table"), state_dict.get(f"{prefix}table_grid")
        if isinstance(loaded, Tensor) and loaded.dim() in (2, 3) and loaded.shape[-1] == self.heads:
            old = self._old_grid(loaded.shape[-2]) if grid is None else tuple(grid.tolist())
            loaded = loaded[None] if loaded.dim() == 2 else loaded
            if old != self.grid_size:
                loaded = torch.stack(
                    [resize_table(t, self.grid_size, old, self.class_rows, self.resize) for t in loaded]
                )
            state_dict[f"{prefix}table"] = loaded.expand(self.layers, -1, -1) if len(loaded) == 1 else loaded
        state_dict[f"{prefix}table_grid"] = torch.tensor(self.grid_size)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _old_grid(self, rows: int) -> tuple[int, ...]:
        """The grid of a table of which only the number of rows is known: ours, or one of equal sides."""
        side = round((rows - self.class_rows) ** (1 / self.axes))
        equal = ((side + 1) // 2,) * self.axes
        return equal if rows != self.table.shape[1] and table_rows(equal) + self.class_rows == rows else self.grid_size

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, grid_size={self.grid_size}, resize={self.resize!r}"


@register_encoding("swin")
class SwinBias(RelativeTable):
    """Relative position bias of Swin: a learned number for each offset of the window and each head.

    Prefix tokens have no bias. On other grids the table is resized to the grid's offsets; loose points read it between
    its entries, stretched to the extent of the positions (or as it is, if that is unknown).

    Args:
        grid_size: the trained window, one size for each axis or one for all.
        resize: rule for other grids. "geometric" keeps near offsets where they are and spreads far ones (BEiT's,
            linear in between); "simple" stretches the table as an image, by bicubic interpolation (linear in 3D).
        std: standard deviation of the truncated normal initialisation.
        share_layers: one table for all blocks.
    """

    equation = "s_ij = <q_i, k_j> * scale + T[h, p_i - p_j]"
    source = "Liu et al., Swin Transformer, arXiv 2103.14030; resizing as BEiT and timm 1.0"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        grid_size: int | Sequence[int] = 14,
        resize: TableResize = "geometric",
        std: float = 0.02,
        share_layers: bool = False,
    ) -> None:
        if std <= 0:
            raise ValueError(f"std must be greater than 0, got {std}")
        self.std = std
        super().__init__(dim, heads, axes, depth, grid_size, resize, share_layers)

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.table, std=self.std)


@register_encoding("beit")
class BEiTBias(RelativeTable):
    """Relative position bias of BEiT: Swin's table over the whole image, and three entries for the class token.

    The last rows of the table are the bias from a prefix token to a patch, from a patch to a prefix token and between
    prefix tokens; several prefix tokens (registers) share them, where the paper has one. It starts at zero.

    Args:
        grid_size: the trained grid, one size for each axis or one for all.
        resize: rule for other grids. "geometric" keeps near offsets where they are and spreads far ones (linear in
            between, where BEiT's own script was cubic); "simple" stretches the table as an image, by bicubic
            interpolation (linear in 3D). The class token's entries stay.
        share_layers: one table for all blocks, as BEiT is pre-trained.
    """

    equation = "s_ij = <q_i, k_j> * scale + T[h, p_i - p_j],   T[h, class -> patch | patch -> class | class -> class]"
    source = "Bao et al., BEiT, arXiv 2106.08254; resizing as BEiT and timm 1.0"
    promises = ("translation_invariant", "nothing_at_init")
    class_rows = RESERVED

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        grid_size: int | Sequence[int] = 14,
        resize: TableResize = "geometric",
        share_layers: bool = False,
    ) -> None:
        super().__init__(dim, heads, axes, depth, grid_size, resize, share_layers)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table)

    def prefix_bias(self, layer: int) -> Tensor:
        table: Tensor = self.table[layer]
        return table[table.shape[0] - RESERVED :]


def resize_table(
    table: Tensor,
    new_size: Sequence[int],
    old_size: Sequence[int],
    class_rows: int = 0,
    resize: TableResize = "geometric",
) -> Tensor:
    """A relative position table for another grid; the last `class_rows` rows are kept as they are.

    Args:
        table: (prod(2 old - 1) + class_rows, H).
        new_size: the grid to resize to, one size for each axis.
        old_size: the grid of the table.
        class_rows: number of rows at the end that belong to prefix tokens.
        resize: "geometric" or "simple", see `swin`.

    Returns:
        (prod(2 new - 1) + class_rows, H).

    Raises:
        ValueError: if the rows of the table are not those of the old grid.
    """
    if table.shape[0] != table_rows(old_size) + class_rows:
        raise ValueError(
            f"a grid {tuple(old_size)} has a table of {table_rows(old_size)} rows and {class_rows} for prefix tokens, "
            f"got {table.shape[0]}"
        )
    steps = [torch.arange(1.0 - n, n, device=table.device) for n in new_size]
    vectors = torch.stack(torch.meshgrid(*steps, indexing="ij"), dim=-1).flatten(0, -2)
    cells, named = table[: table.shape[0] - class_rows], table[table.shape[0] - class_rows :]
    return torch.cat([resampling(vectors, old_size, new_size, resize)(cells.float()).to(table.dtype), named])


def resampling(vectors: Tensor, old_size: Sequence[int], extent: Sequence[float], resize: TableResize) -> Resample:
    """How to read a table of the grid `old_size` at offsets (R, A) of a grid that spans `extent`."""
    if resize == "geometric":
        return _geometric(vectors, old_size, extent)
    spans = [2 * e - 1 for e in extent]
    columns = [c + (e - 1) for c, e in zip(vectors.unbind(-1), extent, strict=True)]
    coords, sizes = torch.stack(columns, dim=-1), [2 * n - 1 for n in old_size]
    return lambda table: sample_table(table[None], sizes, coords, spans, "bicubic")[0]


def _geometric(vectors: Tensor, old_size: Sequence[int], extent: Sequence[float]) -> Resample:
    """Linear interpolation between table entries that lie at +-(1, 1 + q, 1 + q + q^2, ...) along each axis."""
    sides = []  # for each axis the lower and the upper row with their weights
    for x, size, e in zip(vectors.unbind(-1), old_size, extent, strict=True):
        sides.append(_neighbours(x, entry_offsets(size, e, x.device)))
    corners = []
    for corner in itertools.product(*sides):  # 2^A of them
        index: Tensor | int = 0
        weight: Tensor | float = 1.0
        for (row, w), size in zip(corner, old_size, strict=True):
            index, weight = index * (2 * size - 1) + row, weight * w
        corners.append((torch.as_tensor(index), torch.as_tensor(weight)))
    return partial(_weighted_rows, corners=corners)


def _weighted_rows(table: Tensor, corners: list[tuple[Tensor, Tensor]]) -> Tensor:
    total: Tensor | float = 0.0
    for index, weight in corners:
        total = total + table.index_select(0, index) * weight[:, None]
    return torch.as_tensor(total)


def _neighbours(x: Tensor, nodes: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The entries on both sides of each x (R,) and their weights; x outside of the nodes counts as the outermost."""
    if len(nodes) == 1:
        return [(torch.zeros_like(x, dtype=torch.long), torch.ones_like(x))]
    x = torch.minimum(torch.maximum(x, nodes[0]), nodes[-1])
    lower = (x[:, None] >= nodes[1:-1]).sum(-1)  # searchsorted, but known to every exporter
    left, right = nodes.index_select(0, lower), nodes.index_select(0, lower + 1)
    weight = (x - left) / (right - left)
    return [(lower, 1 - weight), (lower + 1, weight)]


def entry_offsets(size: int, extent: float, device: torch.device | None = None) -> Tensor:
    """Where the 2 size - 1 entries of an axis lie on a grid of `extent` cells, so that the outermost reach its end.

    The ratio q is found by bisection, as BEiT does it; a grid of the same size keeps q = 1.
    """
    terms = size - 1
    dtype = torch.float32 if device is not None and device.type == "mps" else torch.float64
    goal = torch.full((), extent - 1.0, dtype=dtype, device=device)
    low, high = torch.full_like(goal, 1.01), torch.full_like(goal, 1.5)
    q = low
    for _ in range(_STEPS):
        q = (low + high) / 2
        beyond = (1 - q**terms) / (1 - q) > goal
        low, high = torch.where(beyond, low, q), torch.where(beyond, q, high)
    q = torch.where(goal == terms, torch.ones_like(q), q)
    outward = (q ** torch.arange(terms, dtype=dtype, device=device)).cumsum(0)  # 1, 1 + q, ...
    return torch.cat([-outward.flip(0), outward.new_zeros(1), outward]).float()


def table_rows(grid_size: Sequence[int]) -> int:
    """Number of distinct offsets of a grid."""
    rows = 1
    for size in grid_size:
        rows *= 2 * size - 1
    return rows


def grid_sizes(grid_size: int | Sequence[int], axes: int, name: str = "grid_size") -> tuple[int, ...]:
    """One size for every axis, from one for all or one for each.

    Raises:
        ValueError: for another count, or for sizes that are not positive.
    """
    sizes = (grid_size,) * axes if isinstance(grid_size, int) else tuple(grid_size)
    if len(sizes) != axes or min(sizes) < 1:
        raise ValueError(f"{name}={grid_size} must be one positive size or one for each of the {axes} axes")
    return sizes
