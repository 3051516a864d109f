"""Where tokens are: the immutable `Positions` that every encoding reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

AXIS_NAMES: dict[int, tuple[str, ...]] = {1: ("n",), 2: ("h", "w"), 3: ("t", "h", "w")}


@dataclass(frozen=True, eq=False)
class Positions:
    """Coordinates of the tokens of one sequence, or of a batch of sequences.

    Build one with `grid`, `video`, `line` or `points`; every method returns a new object.
    Coordinates are in grid-index units and always float32: bf16 cannot hold consecutive integers above 256.

    Attributes:
        coords: (..., N, A) float32, the positioned tokens only, row-major (last axis fastest).
        axes: names of the A axes, in the order ("t", "h", "w").
        grid_size: sizes of the grid that the N tokens fill, or None if they fill none.
        prefix: number of leading tokens without a position (class token, registers).
        extent: length of the coordinate range along each axis, or None if unknown.
        lattice: sizes of the evenly spaced grid that every token is a cell of, whether all cells are there or not;
            None if the coordinates are free. Offsets between its cells repeat, and a bias is computed once for each.

    Example:
        >>> Positions.grid(14, 14, prefix=1).num_tokens
        197
    """

    coords: Tensor
    axes: tuple[str, ...]
    grid_size: tuple[int, ...] | None = None
    prefix: int = 0
    extent: tuple[float, ...] | None = None
    lattice: tuple[int, ...] | None = None

    @classmethod
    def grid(cls, height: int, width: int, *, prefix: int = 0, device: torch.device | str | None = None) -> Positions:
        """Patches of an image: (h, w) = (row, column), counted from 0."""
        return cls._lattice((height, width), prefix, device)

    @classmethod
    def video(
        cls, frames: int, height: int, width: int, *, prefix: int = 0, device: torch.device | str | None = None
    ) -> Positions:
        """Tubelets of a clip or cells of a volume: (t, h, w), counted from 0."""
        return cls._lattice((frames, height, width), prefix, device)

    @classmethod
    def line(cls, length: int, *, prefix: int = 0, device: torch.device | str | None = None) -> Positions:
        """A sequence of tokens, counted from 0."""
        return cls._lattice((length,), prefix, device)

    @classmethod
    def of_size(
        cls, sizes: Sequence[int], *, prefix: int = 0, device: torch.device | str | None = None
    ) -> Positions:
        """A full grid with one size per axis: 1 (line), 2 (image) or 3 (video) sizes."""
        return cls._lattice(tuple(sizes), prefix, device)

    @classmethod
    def points(
        cls,
        coords: Tensor,
        *,
        axes: Sequence[str] | None = None,
        prefix: int = 0,
        extent: Sequence[float] | None = None,
        check: bool | None = None,
    ) -> Positions:
        """Arbitrary coordinates, shared (N, A) or one set per sample (B, N, A).

        Args:
            coords: coordinates in index units; converted to float32.
            axes: axis names; by default ("n",), ("h", "w") or ("t", "h", "w").
            prefix: number of leading tokens without a position.
            extent: range of the coordinates per axis, for encodings that normalise.
            check: refuse NaN and infinity. By default only for tensors on the CPU, because it waits for the device.

        Raises:
            ValueError: for a wrong shape, an unnamed number of axes or coordinates that are not finite.
        """
        if coords.dim() not in (2, 3):
            raise ValueError(
                f"coords must be (N, A) or (B, N, A), got shape {tuple(coords.shape)}; use coords[:, None] in 1D"
            )
        if coords.shape[-2] == 0:
            raise ValueError(f"coords of shape {tuple(coords.shape)} hold no token; at least one needs a position")
        names = tuple(axes) if axes is not None else AXIS_NAMES.get(coords.shape[-1])
        if names is None or len(names) != coords.shape[-1]:
            raise ValueError(f"axes={axes} does not name the {coords.shape[-1]} coordinates of coords")
        if extent is not None and len(extent) != len(names):
            raise ValueError(f"extent has {len(extent)} entries, expected one per axis {names}")
        _check_positive("extent", extent or ())
        coords = coords.to(torch.float32)
        must_check = coords.device.type == "cpu" and not torch.compiler.is_compiling() if check is None else check
        if must_check and not bool(torch.isfinite(coords).all()):
            bad = torch.nonzero(~torch.isfinite(coords))[0].tolist()
            raise ValueError(f"coords must be finite, found NaN or infinity at index {bad}")
        return cls(coords, names, None, _checked_prefix(prefix), tuple(map(float, extent)) if extent else None)

    @classmethod
    def _lattice(cls, sizes: tuple[int, ...], prefix: int, device: torch.device | str | None) -> Positions:
        if len(sizes) not in AXIS_NAMES:
            raise ValueError(f"a grid has 1, 2 or 3 sizes, got {sizes}")
        if any(size < 1 for size in sizes):
            raise ValueError(f"every grid size must be at least 1, got {sizes}; is the image smaller than a patch?")
        ranges = [torch.arange(size, dtype=torch.float32, device=device) for size in sizes]
        coords = torch.stack(torch.meshgrid(*ranges, indexing="ij"), dim=-1).flatten(0, -2)  # (N, A)
        return cls(coords, AXIS_NAMES[len(sizes)], sizes, _checked_prefix(prefix), sizes, sizes)

    @property
    def num_axes(self) -> int:
        """Number of coordinates of a token, A."""
        return len(self.axes)

    @property
    def num_tokens(self) -> int:
        """Length of the token sequence: prefix + N."""
        return self.prefix + self.coords.shape[-2]

    @property
    def device(self) -> torch.device:
        """Device of the coordinates."""
        return self.coords.device

    def to(self, device: torch.device | str) -> Positions:
        """The same positions on another device; the coordinates stay float32."""
        return self if self.coords.device == torch.device(device) else replace(self, coords=self.coords.to(device))

    def keep(self, indices: Tensor) -> Positions:
        """Positions of the patch tokens that survive patch dropout or masking.

        Args:
            indices: (B, K) or (K,) int64 indices into the N positioned tokens (prefix not counted).
        """
        if self.coords.dim() > 2 and indices.dim() == 1:
            return replace(self, coords=self.coords[:, indices], grid_size=None)
        if self.coords.dim() == 2:
            return replace(self, coords=self.coords[indices], grid_size=None)
        index = indices[..., None].expand(*indices.shape, self.num_axes)
        return replace(self, coords=torch.gather(self.coords, -2, index), grid_size=None)

    def scaled_to(self, sizes: Sequence[float]) -> Positions:
        """Position interpolation: stretch the coordinates so that the extent becomes `sizes` (the trained grid).

        Raises:
            ValueError: if the extent is unknown or has another number of axes.
        """
        if self.extent is None:
            raise ValueError("positions without an extent cannot be rescaled; pass extent= to Positions.points")
        if len(sizes) != self.num_axes:
            raise ValueError(f"sizes={tuple(sizes)} must give one size for each of the axes {self.axes}")
        _check_positive("sizes", sizes)
        factors = torch.tensor([s / e for s, e in zip(sizes, self.extent, strict=True)], device=self.device)
        return replace(self, coords=self.coords * factors, extent=tuple(sizes))

    def with_coords(self, coords: Tensor) -> Positions:
        """The same tokens at other coordinates (same trailing shape), for augmentations."""
        if coords.shape[-2:] != self.coords.shape[-2:]:
            raise ValueError(f"coords {tuple(coords.shape)} must end in {tuple(self.coords.shape[-2:])}")
        return replace(self, coords=coords.to(torch.float32), lattice=None)


def _check_positive(name: str, values: Sequence[float]) -> None:
    if not all(0 < value < math.inf for value in values):
        raise ValueError(f"{name}={tuple(values)} must be positive and finite on every axis")


def _checked_prefix(prefix: int) -> int:
    if prefix < 0:
        raise ValueError(f"prefix must be 0 or more tokens, got {prefix}")
    return prefix
