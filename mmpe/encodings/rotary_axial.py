"""`rope_axial`: every axis turns its own planes, with the conventions of rope-vit, timm, EVA-02, PE and DINOv3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..frequencies import geometric, split_planes
from ..positions import Positions
from ..registry import register_encoding
from .coordinates import (
    CoordinateAugmentation,
    CoordinateKind,
    GridIndexing,
    NormalizeCoords,
    check_choice,
    in_axis_order,
    normalise,
    per_axis,
)
from .rotary import RotaryEncoding, linear_bands

Spectrum = Literal["lang", "pixel", "period", "constant"]
ConventionName = Literal["rope-vit", "timm-cat", "eva02", "pe-core", "dinov3", "rotary-embedding-torch"]


@dataclass(frozen=True)
class AxialConvention:
    """What distinguishes one axial rotary encoding from another; the options of `RoPEAxial` have the same names."""

    base: float | Sequence[float] = 100.0
    spectrum: Spectrum = "lang"
    max_res: float = 224.0
    linear_bands: bool = False
    min_period: float | None = None
    max_period: float | None = None
    coordinates: CoordinateKind | None = None
    normalize_coords: NormalizeCoords = "separate"
    grid_offset: float | Sequence[float] = 0.0
    ref_feat_shape: float | Sequence[float] | None = None
    grid_indexing: GridIndexing = "xy"
    half: bool = False

    def __post_init__(self) -> None:
        check_choice("spectrum", self.spectrum, ("lang", "pixel", "period", "constant"))
        check_choice("coordinates", self.coordinates, (None, "index", "pixel", "centered"))
        check_choice("normalize_coords", self.normalize_coords, ("separate", "max", "min"))
        check_choice("grid_indexing", self.grid_indexing, ("ij", "xy"))
        if (self.min_period is None) != (self.max_period is None):
            raise ValueError("min_period and max_period belong together; give both or neither")
        if self.min_period is not None and self.spectrum != "period":
            raise ValueError(f"min_period and max_period need spectrum='period', got spectrum={self.spectrum!r}")

    @property
    def coordinate_kind(self) -> CoordinateKind:
        """The kind of coordinates; it follows from the spectrum where the convention names none."""
        if self.coordinates is not None:
            return self.coordinates
        return {"pixel": "pixel", "period": "centered"}.get(self.spectrum, "index")  # type: ignore[return-value]

    def bands(self, planes: int, base: float, device: torch.device | str | None = None) -> Tensor:
        """Frequencies of the planes of one axis -> (planes,)."""
        if self.spectrum == "lang":
            return geometric(planes, base, device)
        if self.spectrum == "pixel":
            if self.linear_bands:
                return linear_bands(planes, self.max_res, device)
            return 2.0 ** torch.linspace(0.0, math.log2(self.max_res) - 1.0, planes, device=device) * torch.pi
        if self.spectrum == "period":
            return 2.0 * math.pi / self.periods(planes, base, device)
        return torch.ones(planes, device=device)

    def periods(self, planes: int, base: float, device: torch.device | str | None = None) -> Tensor:
        """Periods of the planes of one axis, in units of the coordinates -> (planes,)."""
        if self.min_period is None or self.max_period is None:
            return base ** (torch.arange(planes, dtype=torch.float32, device=device) / planes)
        ratio = self.max_period / self.min_period
        return self.min_period * ratio ** torch.linspace(0.0, 1.0, planes, device=device)


CONVENTIONS: dict[str, AxialConvention] = {
    "rope-vit": AxialConvention(),
    "timm-cat": AxialConvention(base=10000.0, spectrum="pixel", grid_indexing="ij"),
    "eva02": AxialConvention(base=10000.0, ref_feat_shape=16.0, grid_indexing="ij"),
    "pe-core": AxialConvention(base=10000.0, ref_feat_shape=24.0, grid_offset=1.0),
    "dinov3": AxialConvention(base=100.0, spectrum="period", grid_indexing="ij", half=True),
    "rotary-embedding-torch": AxialConvention(base=10000.0, linear_bands=True, max_res=10.0, grid_indexing="ij"),
}
"""Presets of the options, by the code base whose checkpoints they fit."""


@register_encoding("rope_axial")
class RoPEAxial(RotaryEncoding):
    """Axial rotary encoding: every axis turns its own share of the planes, so attention sees the offset on each axis.

    `convention` presets all options; an option that is given wins over the preset. Options that are given per axis are
    in the order of the axes (t, h, w).

    Args:
        convention: "rope-vit" (base 100, column first, indices), "timm-cat" (pixel spectrum on [-1, 1]), "eva02"
            (base 10000, stretched to 16 x 16), "pe-core" (base 10000, column first, counted from 1, stretched to
            24 x 24), "dinov3" (periods on centred coordinates, half-split) or "rotary-embedding-torch" (base 10000).
        base: wavelength ratio of the spectra "lang" and "period", one or one per axis.
        planes: rotary planes per axis; by default head_dim / (2 axes) each. A smaller sum rotates the first channels.
        spectrum: "lang" is base^(-f/F); "pixel" is pi 2^linspace(0, log2(max_res) - 1), or linear with
            `linear_bands`; "period" is 2 pi / period_f; "constant" is 1.
        max_res: resolution of the spectrum "pixel".
        linear_bands: space the spectrum "pixel" evenly, pi linspace(1, max_res / 2).
        min_period: first period of the spectrum "period", instead of base^(f/F).
        max_period: last period of the spectrum "period".
        coordinates: "index", "pixel" ([-1, 1] from the first to the last token) or "centered" ([-1, 1] between the
            outer borders of the grid); by default what the spectrum is made for.
        normalize_coords: extent that divides "centered" coordinates: each axis' own, or the largest or smallest.
        grid_offset: added to the coordinates before they are normalised ("pixel": after), one or one per axis.
        ref_feat_shape: stretch every grid to this one (EVA-02), one size or one per axis.
        grid_indexing: axis that takes the first planes: "ij" the first (t, h, w), "xy" the last (w, h, t).
        half: pair channel f with f + F ("half-split") instead of 2f with 2f + 1.
        shift_coords: in training, shift each axis by U(-s, s) in units of the coordinates.
        jitter_coords: in training, scale each axis by a log-uniform factor in [1/J, J].
        rescale_coords: in training, scale all axes by one log-uniform factor in [1/R, R].
    """

    equation = (
        "theta[n,(a,f)] = p[n,a] omega[a,f], omega[a,f] = base_a^(-f/F_a)\n"
        "(q, k) <- R(theta) (q, k) plane by plane"
    )
    source = "RoPE-ViT, arXiv 2403.13298; EVA-02, arXiv 2303.11331; DINOv3, arXiv 2508.10104; PE, arXiv 2504.13181"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        convention: ConventionName = "rope-vit",
        base: float | Sequence[float] | None = None,
        planes: Sequence[int] | None = None,
        spectrum: Spectrum | None = None,
        max_res: float | None = None,
        linear_bands: bool | None = None,
        min_period: float | None = None,
        max_period: float | None = None,
        coordinates: CoordinateKind | None = None,
        normalize_coords: NormalizeCoords | None = None,
        grid_offset: float | Sequence[float] | None = None,
        ref_feat_shape: float | Sequence[float] | None = None,
        grid_indexing: GridIndexing | None = None,
        half: bool | None = None,
        shift_coords: float | None = None,
        jitter_coords: float | None = None,
        rescale_coords: float | None = None,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        self.convention = _convention(
            convention,
            base=base,
            spectrum=spectrum,
            max_res=max_res,
            linear_bands=linear_bands,
            min_period=min_period,
            max_period=max_period,
            coordinates=coordinates,
            normalize_coords=normalize_coords,
            grid_offset=grid_offset,
            ref_feat_shape=ref_feat_shape,
            grid_indexing=grid_indexing,
            half=half,
        )
        self.half_pairing = self.convention.half
        self.planes = _planes_per_axis(planes, self.head_dim, axes)
        self.bases = per_axis(self.convention.base, axes, "base")
        if min(self.bases) <= 0:
            raise ValueError(f"base must be greater than 0, got {self.convention.base}")
        self.grid_offset = per_axis(self.convention.grid_offset, axes, "grid_offset")
        reference = self.convention.ref_feat_shape
        self.ref_feat_shape = None if reference is None else per_axis(reference, axes, "ref_feat_shape")
        self.augmentation = CoordinateAugmentation(shift_coords, jitter_coords, rescale_coords)

    def coordinates(self, positions: Positions) -> Tensor:
        c = self.convention
        p = normalise(
            positions.coords,
            positions.extent,
            c.coordinate_kind,
            normalize_coords=c.normalize_coords,
            offset=self.grid_offset,
            reference=self.ref_feat_shape,
        )
        # The draws come in the order of the planes, as in timm, so that a seed gives the same augmentation.
        p = in_axis_order(p, c.grid_indexing)
        return self.augmentation(p) if self.training else p

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        bands = [self.convention.bands(self.planes[a], self.bases[a], device) for a in self._order]
        return torch.block_diag(*bands)  # (A, F): a plane turns along one axis only

    def angles(self, positions: Positions) -> Tensor:
        if self.convention.spectrum != "period":
            return super().angles(positions)
        # DINOv3 divides by its periods; a product with 2 pi / period rounds otherwise, by 1e-5 at short periods.
        p = 2.0 * math.pi * self.coordinates(positions)
        parts = [
            p[..., i, None] / self.convention.periods(self.planes[a], self.bases[a], p.device)
            for i, a in enumerate(self._order)
        ]
        theta = torch.cat(parts, dim=-1)  # (..., N, F)
        return theta.unsqueeze(-3) if theta.dim() > 2 else theta

    @property
    def _order(self) -> tuple[int, ...]:
        """Axes in the order in which they take planes."""
        axes = tuple(range(self.axes))
        return axes if self.convention.grid_indexing == "ij" else axes[::-1]


def _convention(name: str, **given: Any) -> AxialConvention:
    check_choice("convention", name, tuple(CONVENTIONS))
    return replace(CONVENTIONS[name], **{key: value for key, value in given.items() if value is not None})


def _planes_per_axis(planes: Sequence[int] | None, head_dim: int, axes: int) -> tuple[int, ...]:
    if planes is not None:
        if len(planes) != axes or min(planes) < 1 or 2 * sum(planes) > head_dim:
            raise ValueError(
                f"planes={tuple(planes)} must give at least 1 plane for each of the {axes} axes and at most "
                f"{head_dim // 2} in all, half of head_dim={head_dim}"
            )
        return tuple(planes)
    if head_dim % 2:
        raise ValueError(f"a rotation needs an even head_dim, got {head_dim}; choose dim and heads so that it is even")
    if head_dim % (2 * axes):
        possible = tuple(split_planes(head_dim // 2, axes))
        raise ValueError(
            f"head_dim={head_dim} is not divisible by 2 * axes = {2 * axes}; give every axis its planes, "
            f"for example planes={possible}"
        )
    return (head_dim // (2 * axes),) * axes
