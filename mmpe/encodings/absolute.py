"""Absolute encodings, added to the tokens before the first block: learned tables, sines and cosines, none at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoding import PositionEncoding
from ..positions import Positions
from ..registry import register_encoding

Interpolation = Literal["bicubic", "bilinear"]
Layout = Literal["mae", "timm", "timm-interleaved", "diffusers", "pape-nd"]


@register_encoding("none")
class NoEncoding(PositionEncoding):
    """No position at all: in a bidirectional transformer the tokens are a bag.

    The control of every study. Permuting the patch tokens permutes their outputs and leaves a class token unchanged.
    """

    kind = "none"
    equation = "x_i <- x_i,   s_ij = <q_i, k_j> * scale"
    source = "Kazemnejad et al., The Impact of Positional Encoding on Length Generalization, arXiv 2305.19466"
    promises = ("permutation_equivariant", "translation_invariant", "rotation_invariant", "mirror_invariant")
    cost = "free"


@register_encoding("ape_learned")
class LearnedAPE(PositionEncoding):
    """A learned vector for each cell of the training grid, added to the tokens once; other grids resample the table.

    The table is (1, prefix + prod(grid_size), C). Its first rows belong to the first prefix tokens; prefix tokens after
    those (registers) get nothing, and with `prefix=0` (timm's `no_embed_class`) the table covers patches alone.

    Grids of another size resample the table by `resample_table`, at load time (`load_state_dict` of a table of another
    size) and at forward time by the same rule. Loose points sample it at their coordinates, which span the extent of
    the positions, or the training grid if that is unknown; sampling has no antialias and is trilinear in 3D. On a full
    grid the place in the grid decides, not the coordinates.

    Args:
        grid_size: training grid, one size for each axis or one for all.
        prefix: number of rows for prefix tokens (class token, distillation token).
        interpolation: kernel along every axis. Bilinear shrinks the vectors, bicubic nearly keeps their norms.
        antialias: widen the kernel when shrinking; it also sharpens the bicubic kernel (a = -0.5 instead of -0.75).
        std: standard deviation of the truncated normal initialisation.
        dropout: probability of dropping a channel after the addition, in training.
    """

    kind = "token"
    terms = ("embed",)
    equation = "x_i <- x_i + W[p_i],   W resampled when the grid is not the trained one"
    source = "Dosovitskiy et al., ViT, arXiv 2010.11929; resampling as timm 1.0 resample_abs_pos_embed"
    parity = "official"
    cost = "one addition before block 0; one resize of the table on other grids"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        grid_size: int | Sequence[int] = 14,
        prefix: int = 0,
        interpolation: Interpolation = "bicubic",
        antialias: bool = True,
        std: float = 0.02,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        self.grid_size = _per_axis(grid_size, axes, "grid_size")
        if any(size < 1 for size in self.grid_size) or prefix < 0:
            raise ValueError(f"grid_size={grid_size} must be positive and prefix={prefix} not negative")
        _check_choice(interpolation, Interpolation, "interpolation")
        if not std > 0 or not 0 <= dropout < 1:
            raise ValueError(f"std={std} must be positive and dropout={dropout} in [0, 1)")
        self.prefix, self.std, self.dropout = prefix, std, dropout
        self.interpolation: Interpolation = interpolation
        self.antialias = antialias
        self.table = nn.Parameter(torch.empty(1, prefix + _product(self.grid_size), dim))
        # In the checkpoint, so that a table is never taken for a square one when another model loads it.
        self.register_buffer("table_grid", torch.tensor(self.grid_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.table, std=self.std)

    def init_non_persistent_buffers(self) -> None:
        self.table_grid = torch.tensor(self.grid_size, device=self.table.device)

    def embed(self, x: Tensor, positions: Positions, layer: int = 0) -> Tensor:
        if layer != 0:
            return x
        self.check_input(x, positions)
        x = x + self._rows(positions).to(x.dtype)
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def check_input(self, x: Tensor, positions: Positions) -> None:
        """Refuse tokens that the positions do not fit, and fewer prefix tokens than there are rows for."""
        self.check_tokens(x, positions)
        if self.prefix > positions.prefix:
            raise ValueError(
                f"{self.name} has rows for {self.prefix} prefix tokens, the positions have {positions.prefix}; "
                f"pass prefix={self.prefix} to Positions, or build the encoding with prefix={positions.prefix}"
            )

    def _rows(self, positions: Positions) -> Tensor:
        """What is added to every token, prefix tokens included: (1 or B, prefix + N, C)."""
        table: Tensor = self.table
        if positions.grid_size is None:
            extent = self.grid_size if positions.extent is None else positions.extent
            named, cells = table[:, : self.prefix], table[:, self.prefix :]
            patches = sample_table(cells, self.grid_size, positions.coords, extent, self.interpolation)
            table = torch.cat([named.expand(patches.shape[0], -1, -1), patches], dim=1)
        else:
            table = resample_table(
                table, positions.grid_size, self.grid_size, self.prefix, self.interpolation, self.antialias
            )
        registers = positions.prefix - self.prefix
        if not registers:
            return table
        named, patches = table[:, : self.prefix], table[:, self.prefix :]
        return torch.cat([named, F.pad(patches, (0, 0, registers, 0))], dim=1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Resize a table of another grid on the way in; without a word on its grid, equal counts are equal grids."""
        loaded, grid = state_dict.get(f"{prefix}table"), state_dict.get(f"{prefix}table_grid")
        if isinstance(loaded, Tensor) and loaded.dim() == 3 and loaded.shape[-1] == self.dim:
            known = None if grid is None else tuple(grid.tolist())
            if loaded.shape != self.table.shape or (known is not None and known != self.grid_size):
                state_dict[f"{prefix}table"] = resample_table(
                    loaded, self.grid_size, known, self.prefix, self.interpolation, self.antialias
                )
        state_dict[f"{prefix}table_grid"] = torch.tensor(self.grid_size)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, grid_size={self.grid_size}, prefix={self.prefix}"


@register_encoding("ape_sincos")
class SinCosAPE(PositionEncoding):
    """Fixed sines and cosines of each coordinate, added to the tokens once; prefix tokens get nothing.

    Layouts (blocks of C / (2A) channels, frequencies T^(-f / (C / (2A)))), for positions (y, x):
    "mae" [sin x, cos x, sin y, cos y] (last axis first, angles in float64); "timm" [sin y, sin x, cos y, cos x];
    "timm-interleaved" [sin y, cos y, sin x, cos x] (timm's `interleave_sin_cos`); "diffusers" is "mae" in 1D and 2D and
    CogVideoX's in 3D: a quarter [sin t, cos t], three quarters [sin x, cos x, sin y, cos y]; "pape-nd" takes any C:
    C // A channels an axis, the last one the remainder, [sines, cosines] axis by axis in the order of the positions.

    Args:
        layout: order of the channels, see above. A checkpoint trained with one layout fails silently with another.
        temperature: T, the ratio between the fastest and the slowest frequency.
        base_size: divide coordinates by (grid size / base_size), so that every grid spans this one (diffusers: 16).
        interpolation_scale: divide coordinates by this factor, one for all axes or one for each.
    """

    kind = "token"
    terms = ("embed",)
    equation = "x_i <- x_i + [sin(p_ia T^(-f/F)), cos(p_ia T^(-f/F))] for axes a and f = 0 .. F-1"
    source = (
        "Vaswani et al., arXiv 1706.03762; 2D: He et al., MAE, arXiv 2111.06377; "
        "3D: Yang et al., CogVideoX, arXiv 2408.06072; nD: baseline of PaPE"
    )
    promises = ("offset_products",)
    parity = "official"
    cost = "one table of N x C sines and one addition before block 0"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        layout: Layout = "mae",
        temperature: float = 10000.0,
        base_size: int | Sequence[int] | None = None,
        interpolation_scale: float | Sequence[float] = 1.0,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        _check_choice(layout, Layout, "layout")
        _check_width(dim, axes, layout)
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} must be positive")
        self.layout: Layout = layout
        self.temperature = temperature
        self.base_size = None if base_size is None else _per_axis(base_size, axes, "base_size")
        self.interpolation_scale = _per_axis(interpolation_scale, axes, "interpolation_scale")
        if min(self.interpolation_scale) <= 0 or (self.base_size and min(self.base_size) <= 0):
            raise ValueError(f"base_size={base_size} and interpolation_scale={interpolation_scale} must be positive")

    def embed(self, x: Tensor, positions: Positions, layer: int = 0) -> Tensor:
        if layer != 0:
            return x
        self.check_tokens(x, positions)
        rows = sincos_table(self.scaled_coords(positions), self.dim, self.layout, self.temperature)
        return x + F.pad(rows, (0, 0, positions.prefix, 0)).to(x.dtype)

    def scaled_coords(self, positions: Positions) -> Tensor:
        """Coordinates after `base_size` and `interpolation_scale`: (..., N, A)."""
        divisors = list(self.interpolation_scale)
        if self.base_size is not None:
            if positions.extent is None:
                raise ValueError("base_size needs the extent of the positions; pass extent= to Positions.points")
            divisors = [d * e / b for d, e, b in zip(divisors, positions.extent, self.base_size, strict=True)]
        if all(d == 1 for d in divisors):
            return positions.coords
        return torch.stack([c / d for c, d in zip(positions.coords.unbind(-1), divisors, strict=True)], dim=-1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, layout={self.layout!r}, temperature={self.temperature}"


def sincos_table(coords: Tensor, dim: int, layout: Layout = "mae", temperature: float = 10000.0) -> Tensor:
    """Sines and cosines of coordinates (..., N, A) -> (..., N, dim) float32; the layouts are those of `SinCosAPE`."""
    axes = coords.shape[-1]
    _check_width(dim, axes, layout)
    if layout in ("mae", "diffusers") and coords.device.type != "mps":  # which has no float64
        coords = coords.double()
    points = list(coords.unbind(-1))
    if layout == "pape-nd":
        widths = [dim // axes] * (axes - 1) + [dim // axes + dim % axes]
    elif layout == "diffusers" and axes == 3:
        points, widths = [points[0], points[2], points[1]], [dim // 4, dim // 8 * 3, dim // 8 * 3]
    else:
        widths = [dim // axes] * axes
        points = points[::-1] if layout in ("mae", "diffusers") else points
    pairs = [_sines_cosines(p, width, temperature) for p, width in zip(points, widths, strict=True)]
    if layout == "timm":
        blocks = [sin for sin, _ in pairs] + [cos for _, cos in pairs]
    else:
        blocks = [block for pair in pairs for block in pair]
    return torch.cat(blocks, dim=-1).float()


def resample_table(
    table: Tensor,
    new_size: Sequence[int],
    old_size: Sequence[int] | None = None,
    prefix: int = 1,
    interpolation: Interpolation = "bicubic",
    antialias: bool = True,
) -> Tensor:
    """Resize the grid part of a position table; the prefix rows are kept as they are.

    In 2D this is timm's rule. In 1D and 3D the same kernel acts along every axis. Computed in float32.

    Args:
        table: (1, prefix + prod(old_size), C).
        new_size: the grid to resize to, one size for each axis.
        old_size: the grid of the table. Without it the grid must have equal sizes, or the call fails.
        prefix: number of rows that belong to prefix tokens.
        interpolation: "bicubic" or "bilinear".
        antialias: widen the kernel when shrinking (for bicubic it also changes how tables grow).

    Returns:
        (1, prefix + prod(new_size), C) in the dtype of the table; the table itself if the grid is the same.
    """
    _check_choice(interpolation, Interpolation, "interpolation")
    new = tuple(new_size)
    old = _equal_sides(table.shape[1] - prefix, len(new)) if old_size is None else tuple(old_size)
    if len(old) != len(new) or _product(old) != table.shape[1] - prefix:
        raise ValueError(
            f"a table of {table.shape[1]} rows, {prefix} of them for prefix tokens, does not fill the grid {old}, "
            f"to be resized to {new}"
        )
    # An exported graph serves any size, so it always resizes; onto the same grid that is the identity.
    if not torch.compiler.is_exporting() and old == new:
        return table
    grid = table[0, prefix:].float().reshape(*old, -1)  # (*old, C)
    patches = _resize(grid, new, interpolation, antialias).reshape(1, -1, table.shape[-1]).to(table.dtype)
    return torch.cat([table[:, :prefix], patches], dim=1) if prefix else patches


def sample_table(
    table: Tensor,
    grid_size: Sequence[int],
    coords: Tensor,
    extent: Sequence[float],
    interpolation: Interpolation = "bicubic",
) -> Tensor:
    """Values of a table at loose points, without a dense grid in between: time and memory grow with the points alone.

    Args:
        table: (1, prod(grid_size), C), no prefix rows.
        grid_size: the grid of the table.
        coords: (N, A) or (B, N, A); point i of an axis is the centre of the i-th of `extent` cells.
        extent: cells along each axis that span the table.
        interpolation: "bicubic" (1D and 2D; 3D is always linear) or "bilinear".

    Returns:
        (1 or B, N, C) in the dtype of the table. Points outside take the value of the nearest border.
    """
    axes = len(grid_size)
    where = torch.stack([(c + 0.5) * (2 / e) - 1 for c, e in zip(coords.unbind(-1), extent, strict=True)], dim=-1)
    where = where.reshape(1, -1, *coords.shape[-2:]).flip(-1)  # (1, 1 or B, N, A), last axis first
    image = table.float().reshape(1, *grid_size, -1).movedim(-1, 1)  # (1, C, *grid)
    if axes == 1:
        image, where = image.unsqueeze(2), F.pad(where, (0, 1))  # one row, at its centre
    elif axes == 3:
        where = where.unsqueeze(1)  # (1, 1, B, N, 3)
    mode = "bilinear" if axes == 3 else interpolation
    values = F.grid_sample(image, where, mode=mode, padding_mode="border", align_corners=False)
    return values.reshape(image.shape[1], *where.shape[-3:-1]).movedim(0, -1).to(table.dtype)  # (1 or B, N, C)


def _sines_cosines(points: Tensor, width: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Sines of the even and cosines of the odd ones of `width` channels: (..., N) -> two of (..., N, width / 2)."""
    half = torch.arange((width + 1) // 2, dtype=points.dtype, device=points.device)
    angles = points.unsqueeze(-1) * temperature ** (-2 * half / width)
    return angles.sin(), angles[..., : width // 2].cos()


def _resize(grid: Tensor, sizes: tuple[int, ...], interpolation: Interpolation, antialias: bool) -> Tensor:
    """Separable resize (*old, C) -> (*sizes, C); torch has antialias and cubic kernels for images only."""
    if len(sizes) == 2:
        return _resize_images(grid[None], sizes, interpolation, antialias)[0]
    if len(sizes) == 3:
        grid = _resize_images(grid, sizes[1:], interpolation, antialias)  # (t, h', w', C)
    # A row and not a column: torch resizes images of width 1 wrongly with antialias when channels come first.
    row = grid.reshape(1, 1, grid.shape[0], -1)
    return _resize_images(row, (1, sizes[0]), interpolation, antialias).reshape(*sizes, -1)


def _resize_images(images: Tensor, size: tuple[int, ...], interpolation: Interpolation, antialias: bool) -> Tensor:
    """(B, h, w, C) -> (B, *size, C)."""
    resized = F.interpolate(
        images.permute(0, 3, 1, 2), size=size, mode=interpolation, antialias=antialias, align_corners=False
    )
    return resized.permute(0, 2, 3, 1)


def _equal_sides(count: int, axes: int) -> tuple[int, ...]:
    side = round(count ** (1 / axes)) if count > 0 else 0
    if side < 1 or side**axes != count:
        raise ValueError(
            f"{count} rows are no grid of {axes} equal sides; say which grid the table has (old_size=...), "
            "or whether some of the rows belong to prefix tokens"
        )
    return (side,) * axes


def _check_width(dim: int, axes: int, layout: str) -> None:
    multiple = 1 if layout == "pape-nd" else 16 if layout == "diffusers" and axes == 3 else 2 * axes
    if dim % multiple:
        raise ValueError(
            f"layout {layout!r} with axes={axes} needs dim divisible by {multiple}, got dim={dim}; "
            f"use dim={dim + multiple - dim % multiple} or layout='pape-nd'"
        )


def _check_choice(value: str, choices: Any, name: str) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, get_args(choices)))}")


def _per_axis(value: Any, axes: int, name: str) -> tuple[Any, ...]:
    """One value for every axis, from one for all or one for each."""
    values = (value,) * axes if isinstance(value, int | float) else tuple(value)
    if len(values) != axes:
        raise ValueError(f"{name}={value} must be one value or one for each of the {axes} axes")
    return values


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total = total * size
    return total
