"""Rotary encodings: their common base, and `rope`, rotation by the index in a sequence."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..encoding import AttentionTerms, PositionEncoding
from ..frequencies import angles, geometric
from ..positions import Positions
from ..registry import register_encoding
from ..rotary import RotaryTable
from .coordinates import CoordinateKind, check_choice, normalise


class RotaryTerms(AttentionTerms):
    """Rotation of q and k by a table, shared by all blocks or one per block.

    Args:
        table: cosines and sines; with `layers` its first axis counts blocks.
        half: pair channel f with f + F instead of 2f with 2f + 1.
        layers: number of blocks that the table holds; None if all blocks share it.
    """

    def __init__(self, table: RotaryTable, half: bool = False, layers: int | None = None) -> None:
        self.table, self.half, self.layers = table, half, layers

    def layer(self, index: int) -> RotaryTerms:
        if self.layers is None:
            return self
        if not 0 <= index < self.layers:
            raise ValueError(f"these rotary terms are those of {self.layers} blocks, asked for layer {index}")
        return RotaryTerms(self.table.layer(index), self.half)

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        table = self._table_of_one_block()
        return table.rotate_pair(q, self._repeated(k), half=self.half)

    def values(self, v: Tensor) -> Tensor:
        return self._repeated(v)

    def _repeated(self, x: Tensor) -> Tensor:
        """Grouped keys and values, once per query head where every head has its own angles."""
        heads = self.table.cos.shape[-3] if self.table.cos.dim() > 2 else 1
        if heads == 1 or x.shape[1] == heads or heads % x.shape[1]:
            return x
        return x.repeat_interleave(heads // x.shape[1], dim=1)

    def _table_of_one_block(self) -> RotaryTable:
        if self.layers is None:
            return self.table
        if self.layers > 1:
            raise ValueError(f"these terms hold those of {self.layers} blocks; in block i use terms.layer(i)")
        return self.table.layer(0)


class RotaryEncoding(PositionEncoding):
    """Base of the encodings that rotate planes of q and k by theta[n, f] = sum_a p[n, a] omega[a, f].

    A subclass gives `coordinates` and `frequencies` (or `angles`); prefix tokens keep angle zero.
    """

    kind = "rotary"
    terms: ClassVar[tuple[str, ...]] = ("queries_keys",)
    promises: ClassVar[tuple[str, ...]] = ("translation_invariant", "isometric")
    parity = "official"
    cost = "one rotation of q and k; the table is built once per forward"
    half_pairing: bool = False  # not "half", the name of a method of every module

    def coordinates(self, positions: Positions) -> Tensor:
        """Coordinates (..., N, A) in the units and the axis order of `frequencies`."""
        return positions.coords

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        """Angular frequencies, (A, F) or with leading axes (L, H, A, F), in float32."""
        raise NotImplementedError(f"{type(self).__name__} must define frequencies()")

    def angles(self, positions: Positions) -> Tensor:
        """Angles of the positioned tokens: (N, F), (B, 1, N, F), or with leading axes (L, [B,] H, N, F)."""
        frequencies = self.frequencies(positions.device)
        return angles(self.coordinates(positions).to(frequencies.device), frequencies)

    @property
    def table_layers(self) -> int | None:
        """Blocks that the table has entries for; None if all blocks share it."""
        return None

    def rotary_table(self, positions: Positions) -> RotaryTable:
        """Cosines and sines of all angles, with identity rows for the prefix tokens."""
        self.check_positions(positions)
        return RotaryTable.from_angles(self.angles(positions), positions.prefix)

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        return RotaryTerms(self.rotary_table(positions), self.half_pairing, self.table_layers)


def timm_table(table: RotaryTable, half: bool = False) -> Tensor:
    """A table as timm's rotary modules return it: (..., N, 2D), the D sines first, then the D cosines.

    Args:
        table: F = D / 2 planes.
        half: repeat the planes as [f0, f1, .., f0, f1, ..] instead of [f0, f0, f1, f1, ..].
    """
    parts = (table.sin, table.cos)
    if half:
        return torch.cat([parts[0], parts[0], parts[1], parts[1]], dim=-1)
    return torch.cat([part.repeat_interleave(2, dim=-1) for part in parts], dim=-1)


def check_rotary_dim(rotary_dim: int, head_dim: int) -> int:
    """Number of planes of the first `rotary_dim` channels; refuses odd numbers and more channels than there are."""
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(
            f"a rotation needs an even number of channels, got {rotary_dim} of head_dim={head_dim}; "
            f"choose dim and heads so that dim / heads is even, or rotate fewer channels"
        )
    if rotary_dim > head_dim:
        raise ValueError(f"cannot rotate {rotary_dim} channels of heads with head_dim={head_dim}")
    return rotary_dim // 2


def row_major_index(positions: Positions) -> Tensor:
    """Index (..., N) of each token in row-major order, also for tokens that are kept from a grid.

    Raises:
        ValueError: for loose points in more than one axis, which have no order.
    """
    index = positions.coords[..., 0]
    if positions.num_axes > 1 and positions.extent is None:
        raise ValueError("points in 2 or 3 axes have no row-major order; use Positions.grid or .video, or rope_axial")
    for a in range(1, positions.num_axes):
        index = index * positions.extent[a] + positions.coords[..., a]  # type: ignore[index]
    return index


class XPosTerms(RotaryTerms):
    """Rotation that also scales plane f of q by zeta_f^power(p) and of k by its inverse.

    Args:
        table: cosines and sines, shared by all blocks.
        half: pairing of the channels.
        scale: (..., P + N, F) factors of q.
    """

    def __init__(self, table: RotaryTable, half: bool, scale: Tensor) -> None:
        super().__init__(table, half)
        planes = scale.shape[-1]
        self.scale = torch.cat([scale, scale], -1) if half else scale.repeat_interleave(2, -1)
        self.rotated = 2 * planes

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().queries_keys(q, k)
        return self._times(q, self.scale), self._times(k, 1.0 / self.scale)

    def _times(self, x: Tensor, scale: Tensor) -> Tensor:
        scaled = (x[..., : self.rotated] * scale).to(x.dtype)
        return torch.cat([scaled, x[..., self.rotated :]], dim=-1) if self.rotated < x.shape[-1] else scaled


@register_encoding("rope")
class RoPE(RotaryEncoding):
    """Rotary encoding of the index in the sequence; images and videos are read row by row.

    In 2 and 3 axes the index is row-major (what is called 1D RoPE on images); use `rope_axial` to give every axis its
    own planes.

    Args:
        base: wavelengths grow from 2 pi towards 2 pi base.
        rotary_dim: rotate only this many first channels of each head; None rotates all.
        half: pair channel f with f + F ("half-split") instead of 2f with 2f + 1.
        spectrum: "lang" is base^(-f/F), "pixel" pi linspace(1, max_freq/2), "constant" 1 for every plane.
        max_freq: highest frequency of "pixel".
        coordinates: "index", "pixel" ([-1, 1] from end to end) or "centered" ([-1, 1] between the outer borders); None
            is "pixel" for the pixel spectrum, else "index".
        offset: added to the coordinate.
        interpolate_factor: divides the coordinate after the offset (position interpolation).
        theta_rescale: r of the NTK rule base -> base r^(d / (d - 2)) with d rotated channels.
        xpos_scale_base: tokens after which xPos decays by its smallest factor (512 is common); only for causal
            attention. None rotates without decay.
    """

    equation = "theta[n,f] = p_n base^(-f/F);  (q, k)[2f:2f+2] <- R(theta[n,f]) (q, k)[2f:2f+2];  p = row-major index"
    source = "RoFormer, arXiv 2104.09864"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 1,
        depth: int = 1,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        half: bool = False,
        spectrum: Literal["lang", "pixel", "constant"] = "lang",
        max_freq: float = 10.0,
        coordinates: CoordinateKind | None = None,
        offset: float = 0.0,
        interpolate_factor: float = 1.0,
        theta_rescale: float = 1.0,
        xpos_scale_base: float | None = None,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        self.planes = check_rotary_dim(self.head_dim if rotary_dim is None else rotary_dim, self.head_dim)
        _check_positive(base=base, interpolate_factor=interpolate_factor, theta_rescale=theta_rescale)
        check_choice("spectrum", spectrum, ("lang", "pixel", "constant"))
        check_choice("coordinates", coordinates, (None, "index", "pixel", "centered"))
        if theta_rescale != 1.0 and self.planes == 1:
            raise ValueError("theta_rescale needs at least 4 rotated channels; its exponent is d / (d - 2)")
        if theta_rescale != 1.0:
            base = base * theta_rescale ** (self.planes / (self.planes - 1))
        self.base, self.half_pairing, self.spectrum, self.max_freq = base, half, spectrum, max_freq
        self.coordinate_kind: CoordinateKind = coordinates or ("pixel" if spectrum == "pixel" else "index")
        self.offset, self.interpolate_factor, self.xpos_scale_base = offset, interpolate_factor, xpos_scale_base

    def coordinates(self, positions: Positions) -> Tensor:
        index = row_major_index(positions)[..., None]  # (..., N, 1)
        length = None if positions.extent is None else (math.prod(positions.extent),)
        p = normalise(index, length, self.coordinate_kind, offset=(self.offset,))
        return p / self.interpolate_factor if self.interpolate_factor != 1.0 else p

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        if self.spectrum == "pixel":
            return linear_bands(self.planes, self.max_freq, device)[None]  # (1, F)
        if self.spectrum == "constant":
            return torch.ones(1, self.planes, device=device)
        return geometric(self.planes, self.base, device)[None]

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        table = self.rotary_table(positions)
        if self.xpos_scale_base is None:
            return RotaryTerms(table, self.half_pairing)
        return XPosTerms(table, self.half_pairing, self._xpos_scale(positions, self.xpos_scale_base))

    def _xpos_scale(self, positions: Positions, scale_base: float) -> Tensor:
        """zeta_f^((p - N // 2) / scale_base), zeta_f = (2f + 0.4 d) / (1.4 d); 1 for the prefix -> (..., P+N, F)."""
        p = self.coordinates(positions)
        rotated = 2 * self.planes
        zeta = (torch.arange(0, rotated, 2, device=p.device) + 0.4 * rotated) / (1.4 * rotated)  # (F,)
        scale = zeta ** ((p - p.shape[-2] // 2) / scale_base)  # (..., N, F)
        if p.dim() > 2:
            scale = scale.unsqueeze(-3)
        return torch.nn.functional.pad(scale, (0, 0, positions.prefix, 0), value=1.0)


def linear_bands(planes: int, max_freq: float, device: torch.device | str | None = None) -> Tensor:
    """Evenly spaced frequencies for coordinates in [-1, 1], pi linspace(1, max_freq / 2) -> (planes,)."""
    return torch.linspace(1.0, max_freq / 2.0, planes, device=device) * torch.pi


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be greater than 0, got {value}")
