"""Rotary encodings with other planes (`p_rope`, `partial_rope`), angles (`drope`, `wire`) or values too (`rove`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ..frequencies import axial, geometric, split_planes
from ..positions import Positions
from ..precision import full_precision
from ..registry import register_encoding
from .coordinates import check_choice, per_axis
from .rotary import RotaryEncoding, RotaryTerms, check_rotary_dim


def default_base(base: float | None, axes: int) -> float:
    """The base asked for, or that of `rope` (10000) in one axis and of `rope_axial` (100) in more."""
    base = (10000.0 if axes == 1 else 100.0) if base is None else base
    if not base > 0:
        raise ValueError(f"base must be greater than 0, got {base}")
    return base


class _AxialRotary(RotaryEncoding):
    """Base of the variants of axial rotation: the planes are shared out among the axes in their order."""

    parity = "formula"

    def __init__(
        self, dim: int, heads: int, axes: int, depth: int, base: float | None, half: bool, rotary_dim: int | None = None
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        self.planes = check_rotary_dim(self.head_dim if rotary_dim is None else rotary_dim, self.head_dim)
        self.base, self.half_pairing = default_base(base, axes), half

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        return axial(split_planes(self.planes, self.axes), (self.base,) * self.axes, device)


@register_encoding("p_rope")
class PRoPE(_AxialRotary):
    """Rotary encoding without its lowest frequencies: those planes do not turn at all and carry content alone.

    The spectrum is that of the whole head, cut off; `partial_rope` compresses it into fewer channels instead.

    Args:
        p: share of the planes of each axis that turn, highest frequencies first; 1 is RoPE, 0 no position at all.
        base: wavelengths of every axis grow from 2 pi towards 2 pi base; None is 10000 in one axis and 100 in more.
        half: pair channel f with f + F ("half-split") instead of 2f with 2f + 1.
    """

    equation = "theta[n,f] = p_n base^(-f/F) for f < pF, else 0;  every axis has its own planes"
    source = "Round and Round We Go!, arXiv 2410.06205"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        p: float = 0.75,
        base: float | None = None,
        half: bool = False,
    ) -> None:
        super().__init__(dim, heads, axes, depth, base, half)
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p must be a share between 0 and 1, got {p}")
        self.p = p

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        sizes = split_planes(self.planes, self.axes)
        # int(p D // 2) for D = 2 planes, as transformers counts them
        kept = torch.cat([torch.arange(size, device=device) < int(self.p * 2 * size // 2) for size in sizes])
        return super().frequencies(device) * kept


@register_encoding("partial_rope")
class PartialRoPE(_AxialRotary):
    """Rotary encoding of the first channels of every head, with their own whole spectrum; the rest carry content.

    Args:
        rotary_dim: number of channels that turn; None is half of the head.
        base: wavelengths of every axis grow from 2 pi towards 2 pi base; None is 10000 in one axis and 100 in more.
        half: pair channel f with f + F, F half of the rotated channels, instead of 2f with 2f + 1.
    """

    equation = "theta[n,f] = p_n base^(-f/F), F = rotary_dim / 2, on the first rotary_dim channels of a head"
    source = "GPT-J and later language models; RoFormer, arXiv 2104.09864"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        rotary_dim: int | None = None,
        base: float | None = None,
        half: bool = False,
    ) -> None:
        width = max(2, dim // heads // 4 * 2) if rotary_dim is None else rotary_dim
        super().__init__(dim, heads, axes, depth, base, half, width)


class RoVETerms(RotaryTerms):
    """Rotation of q, k and v, and of the output back at the place of the query."""

    def values(self, v: Tensor) -> Tensor:
        return self._table_of_one_block().rotate(v, self.half)

    def outputs(self, o: Tensor) -> Tensor:
        return self._table_of_one_block().inverse().rotate(o, self.half)


@register_encoding("rove")
class RoVE(_AxialRotary):
    """Rotary encoding of the values too: a query receives each value turned by the offset between the two.

    Attention becomes a convolution whose kernel depends on the offset. Prefix tokens are turned neither way, so what
    they receive depends on the places of the others. To be trained with: added to a trained model it does harm.

    Args:
        base: wavelengths of every axis grow from 2 pi towards 2 pi base; None is 10000 in one axis and 100 in more.
        half: pair channel f with f + F ("half-split") instead of 2f with 2f + 1.
    """

    terms = ("queries_keys", "values", "outputs")
    equation = "o_i = sum_j A_ij R(p_j - p_i) v_j with rotary A_ij;  theta[n,f] = p_n base^(-f/F) along each axis"
    source = "Rotary value embeddings, arXiv 2606.11275"
    cost = "one rotation each of q, k, v and the output"

    def __init__(
        self, dim: int, heads: int, axes: int = 2, depth: int = 1, base: float | None = None, half: bool = False
    ) -> None:
        super().__init__(dim, heads, axes, depth, base, half)

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> RoVETerms:
        return RoVETerms(self.rotary_table(positions), self.half_pairing)


@register_encoding("drope")
class DRoPE(RotaryEncoding):
    """Directional rotary encoding for coordinates that go in a circle: headings, hues, longitudes of a panorama.

    Planes turn by whole multiples of the angle, so a full turn is no turn at all. Axes that are not circular can be
    named; they rotate as `rope_axial` does, on their own channels or on their own heads.

    Args:
        period: length of a full turn in units of the coordinate, for all axes or one for each; 2 pi for radians.
        harmonics: planes of a circular axis turn 1, 2, .. harmonics times as fast, in turn; 1 is the paper's, more
            tell nearby directions apart better.
        circular: which axes are circular, all or one bool for each.
        share: whether circular and other axes share out the "channels" of every head, or the "heads": then the last
            half of them turns with the circular axes and the others do not.
        base: wavelengths of the other axes grow from 2 pi towards 2 pi base.
        half: pair channel f with f + F ("half-split") instead of 2f with 2f + 1.
    """

    parity = "formula"
    equation = "theta[n,f] = k_f 2 pi p_n / period, k_f = 1 + f mod harmonics;  (q, k) <- R(theta) (q, k)"
    source = "DRoPE, arXiv 2503.15029; more than one harmonic is ours"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 1,
        depth: int = 1,
        period: float | Sequence[float] = 2 * math.pi,
        harmonics: int = 1,
        circular: bool | Sequence[bool] = True,
        share: Literal["channels", "heads"] = "channels",
        base: float = 100.0,
        half: bool = False,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        self.planes, self.base, self.half_pairing = check_rotary_dim(self.head_dim, self.head_dim), base, half
        self.period, self.harmonics, self.share = per_axis(period, axes, "period"), harmonics, share
        self.circular = tuple(map(bool, per_axis(circular, axes, "circular")))
        check_choice("share", share, ("channels", "heads"))
        if harmonics < 1 or base <= 0 or min(self.period) <= 0:
            raise ValueError(f"harmonics, base and period must be positive, got {harmonics}, {base} and {period}")
        if share == "heads" and (heads < 2 or len(set(self.circular)) < 2):
            raise ValueError(f"share='heads' needs two heads, a circular axis and another; got {heads}, {circular}")

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        if self.share == "channels":
            return self._of_axes(range(self.axes), device)
        circular = [a for a in range(self.axes) if self.circular[a]]
        others = [a for a in range(self.axes) if not self.circular[a]]
        groups = [self._of_axes(group, device) for group in (others, circular)]  # 2 of (A, F)
        sizes = (self.heads - self.heads // 2, self.heads // 2)
        heads = [group.expand(size, -1, -1) for group, size in zip(groups, sizes, strict=True)]
        return torch.cat(heads)  # (H, A, F)

    def _of_axes(self, chosen: Sequence[int], device: torch.device | str | None) -> Tensor:
        """Frequencies (A, F) that share out all planes among the chosen axes."""
        out, start = torch.zeros(self.axes, self.planes, device=device), 0
        for a, size in zip(chosen, split_planes(self.planes, len(chosen)), strict=True):
            out[a, start : start + size] = self._of_axis(a, size, device)
            start += size
        return out

    def _of_axis(self, axis: int, planes: int, device: torch.device | str | None) -> Tensor:
        if not self.circular[axis]:
            return geometric(planes, self.base, device)
        turns = 1.0 + torch.arange(planes, device=device) % self.harmonics
        return turns * (2 * math.pi / self.period[axis])


def laplacian_coordinates(adjacency: Tensor, modes: int) -> Tensor:
    """Entries of the lowest eigenvectors of a graph's Laplacian D - A, without the constant one, for `wire`.

    The decomposition takes O(N^3): keep the result with the graph. Signs are arbitrary, and so are directions among
    eigenvectors of equal eigenvalues. Of a graph in several pieces the first are constant on each piece.

    Args:
        adjacency: (N, N) symmetric weights, or (B, N, N).
        modes: number of eigenvectors m; those that a small graph lacks are zero.

    Returns:
        (..., N, m) float32, orthonormal columns.
    """
    if adjacency.dim() < 2 or adjacency.shape[-1] != adjacency.shape[-2]:
        raise ValueError(f"adjacency must be (..., N, N), got {tuple(adjacency.shape)}")
    if modes < 1:
        raise ValueError(f"modes must be at least 1, got {modes}")
    weights = adjacency.double()
    if not torch.equal(weights, weights.mT):
        raise ValueError("adjacency must be symmetric; of a directed graph take (A + A.T) / 2")
    with full_precision(weights):
        laplacian = torch.diag_embed(weights.sum(-1)) - weights
        vectors = torch.linalg.eigh(laplacian).eigenvectors[..., 1 : modes + 1]
    missing = modes - vectors.shape[-1]
    return nn.functional.pad(vectors, (0, missing)).float()


def grid_coordinates(positions: Positions, modes: int) -> Tensor:
    """The same for the grid graph of the positions, in closed form and without its decomposition.

    With n the extent of an axis, the eigenvectors of a grid are products of cos(pi k (p + 1/2) / n), one k per axis,
    with eigenvalue sum_a 4 sin^2(pi k_a / 2 n_a). Kept tokens have the values that they have in the full grid, and
    equal eigenvalues are ordered by k. Multiplied by the root of the number of cells, so that entries are of order 1
    on grids of any size.

    Args:
        positions: cells of a grid, with its extent.
        modes: number of eigenvectors m; those that a small grid lacks are zero.

    Returns:
        (..., N, m) float32.
    """
    if positions.extent is None:
        raise ValueError("spectral coordinates of loose points need the size of their grid; pass extent= to points")
    device, axes = positions.device, positions.num_axes
    each = [torch.arange(modes + 1, dtype=torch.float32, device=device)] * axes
    k = torch.stack(torch.meshgrid(*each, indexing="ij"), dim=-1).flatten(0, -2)[1:]  # (K, A) without the constant one
    value, exists = torch.zeros_like(k[:, 0]), torch.ones_like(k[:, 0], dtype=torch.bool)
    for a, size in enumerate(positions.extent):
        value = value + torch.sin(k[:, a] * (math.pi / (2 * size))).square()
        exists = exists & (k[:, a] < size)
    # Whole numbers, so that equal eigenvalues stay equal whatever the rounding of a device, and the order of k decides
    # between them. (ONNX has no stable sort.)
    level = torch.where(exists, (value.log2() * 2**14).round(), 2.0**20).long()
    order = torch.arange(len(k), device=device)
    lowest = (level * len(k) + order).topk(modes, largest=False, sorted=True).indices
    chosen, present = k[lowest], exists[lowest].float()  # (m, A), (m,)
    product = present
    for a, size in enumerate(positions.extent):
        phase = (positions.coords[..., a, None] + 0.5) * (math.pi / size)
        product = product * torch.cos(phase * chosen[:, a]) * torch.where(chosen[:, a] > 0, math.sqrt(2.0), 1.0)
    return product


@register_encoding("wire")
class WIRE(RotaryEncoding):
    """Rotary encoding of a node by its entries in the lowest eigenvectors of the graph's Laplacian.

    For any graph compute the eigenvectors once with `mmpe.encodings.rotary_variants.laplacian_coordinates` and pass
    them as `Positions.points(eigenvectors, axes=names)` with coordinates="graph"; `axes` is then their number, however
    large. For images and videos the grid itself is the graph. Not translation invariant: the eigenvectors see
    the border.

    Args:
        coordinates: "grid" derives the eigenvectors of the grid that the positions are cells of; "graph" takes the
            coordinates of the positions as they are, one axis for each eigenvector.
        modes: number of eigenvectors of a grid.
        init_std: standard deviation of the initial frequencies; the paper's is not published.
        share_heads: learn one set for all heads.
        share_layers: learn one set for all blocks.
    """

    per_layer = True
    promises = ("isometric",)
    parity = "formula"
    equation = "theta[h,n,f] = omega[h,f] . r_n,  r_n = (u_1[n], .., u_m[n]),  (D - A) u_k = lambda_k u_k"
    source = "WIRE, arXiv 2509.22259"
    cost = "one rotation of q and k; a grid's eigenvectors are in closed form, a graph's are the caller's O(N^3), once"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        coordinates: Literal["grid", "graph"] = "grid",
        modes: int = 8,
        init_std: float = 1.0,
        share_heads: bool = False,
        share_layers: bool = False,
    ) -> None:
        check_choice("coordinates", coordinates, ("grid", "graph"))
        # The axes of a graph are eigenvectors, of which there may be any number.
        super().__init__(dim, heads, axes if coordinates == "grid" else min(axes, 3), depth)
        self.axes = axes
        if modes < 1:
            raise ValueError(f"modes must be at least 1, got {modes}")
        self.coordinate_kind, self.modes, self.init_std, self.share_layers = coordinates, modes, init_std, share_layers
        self.planes = check_rotary_dim(self.head_dim, self.head_dim)
        sets = (1 if share_layers else depth, 1 if share_heads else heads)
        self.omega = nn.Parameter(torch.empty(*sets, self.planes, modes if coordinates == "grid" else axes))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all frequencies from a normal distribution."""
        nn.init.normal_(self.omega, std=self.init_std)

    @property
    def table_layers(self) -> int | None:
        """Blocks that the table has entries for; None if all blocks share it."""
        return None if self.share_layers else self.depth

    def coordinates(self, positions: Positions) -> Tensor:
        return grid_coordinates(positions, self.modes) if self.coordinate_kind == "grid" else positions.coords

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        omega = self.omega.transpose(-1, -2)  # (L, H or 1, m, F)
        return omega[0] if self.share_layers else omega
