"""What encodings do to coordinates before they use them: normalisation, axis order and training augmentation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

CoordinateKind = Literal["index", "pixel", "centered"]
NormalizeCoords = Literal["separate", "max", "min"]
GridIndexing = Literal["ij", "xy"]


def in_axis_order(coords: Tensor, grid_indexing: GridIndexing) -> Tensor:
    """Coordinates (..., N, A) as they are ("ij": t, h, w), or reversed ("xy": column, row, then time)."""
    return coords.flip(-1) if grid_indexing == "xy" else coords


def normalise(
    coords: Tensor,
    extent: Sequence[float] | None,
    kind: CoordinateKind = "index",
    *,
    normalize_coords: NormalizeCoords = "separate",
    offset: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
) -> Tensor:
    """Index coordinates (..., N, A) in the units that an encoding wants.

    With n the extent of an axis, o its offset and d the extent that `normalize_coords` picks:

        index     p + o
        pixel     2 p / (n - 1) - 1 + o           the first and last index lie at -1 and 1
        centered  2 (p + 1/2 + o) / d - 1         the outer borders of the grid lie at -1 and 1

    A reference r stretches every axis by r / n, for "centered" before the map to [-1, 1].

    Raises:
        ValueError: if the extent is needed and unknown.
    """
    axes = coords.shape[-1]
    if extent is None and (kind != "index" or reference is not None):
        raise ValueError(
            f"coordinates={kind!r} needs the range of the positions; pass extent= to Positions.points"
            if kind != "index"
            else "ref_feat_shape needs the range of the positions; pass extent= to Positions.points"
        )
    sizes = tuple(extent) if extent is not None else (1.0,) * axes
    offsets = tuple(offset) if offset is not None else (0.0,) * axes
    divisors = {"separate": sizes, "max": (max(sizes),) * axes, "min": (min(sizes),) * axes}[normalize_coords]
    columns = []
    for a in range(axes):  # axis by axis, with Python numbers: a tensor of sizes would be a copy to the device
        p = _one_axis(coords[..., a], kind, sizes[a], divisors[a], offsets[a])
        if reference is not None:
            p = p / sizes[a] * reference[a]
        columns.append(2.0 * p - 1.0 if kind == "centered" else p)
    return torch.stack(columns, dim=-1)


def _one_axis(p: Tensor, kind: CoordinateKind, size: float, divisor: float, offset: float) -> Tensor:
    if kind == "pixel":
        return 2.0 * p / max(size - 1.0, 1.0) - 1.0 + offset
    if kind == "centered":
        return (p + 0.5 + offset) / divisor
    return p + offset


@dataclass(frozen=True)
class CoordinateAugmentation:
    """Random shift, jitter and rescaling of all coordinates of one call, for training (DINOv3, arXiv 2508.10104).

    An option that is None draws nothing.

    Attributes:
        shift: adds U(-s, s) to each axis, in units of the coordinates.
        jitter: multiplies each axis by exp(U(-ln J, ln J)).
        rescale: multiplies all axes by one exp(U(-ln R, ln R)).
    """

    shift: float | None = None
    jitter: float | None = None
    rescale: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("shift", 0.0), ("jitter", 1.0), ("rescale", 1.0)):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= least):
                raise ValueError(f"{name}_coords must be None or a finite number of at least {least:g}, got {value}")

    def __call__(self, coords: Tensor, batch: int | None = None) -> Tensor:
        """Augmented coords (..., N, A); the order of the draws is that of DINOv3 and timm.

        Args:
            coords: (N, A) or (B, N, A).
            batch: draw once for each of so many samples; None shares each draw by the whole batch.
        """
        axes, sets = coords.shape[-1], () if batch is None else (batch, 1)
        if self.shift is not None:
            coords = coords + coords.new_empty(*sets, axes).uniform_(-self.shift, self.shift)
        if self.jitter is not None:
            coords = coords * _log_uniform(coords, (*sets, axes), self.jitter)
        if self.rescale is not None:
            coords = coords * _log_uniform(coords, (*sets, 1), self.rescale)
        return coords


def _log_uniform(like: Tensor, size: tuple[int, ...], factor: float) -> Tensor:
    limit = math.log(factor)
    return like.new_empty(size).uniform_(-limit, limit).exp()


def per_axis(value: float | Sequence[float], axes: int, name: str) -> tuple[float, ...]:
    """One number for all axes, or one for each of them, as a tuple of `axes` numbers.

    Raises:
        ValueError: for another count of numbers.
    """
    values = (float(value),) * axes if isinstance(value, (int, float)) else tuple(map(float, value))
    if len(values) != axes:
        raise ValueError(f"{name}={value} must be one number or one for each of the {axes} axes")
    return values


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Refuse a value that is not one of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")
