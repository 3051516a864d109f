"""ComRoPE: learned block rotations whose generators commute, so that attention sees offsets alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoding import AttentionTerms, PositionEncoding
from ..positions import Positions
from ..registry import register_encoding
from ..rotary import RotaryTable
from .coordinates import NormalizeCoords, check_choice
from .lie import BlockRotationTerms, LayeredTerms, exponential_along
from .rotary import RotaryTerms


class ComRoPE(PositionEncoding):
    """Base of both forms: block j turns by exp(tau[n,j] S_j) with one generator S_j = P_j - P_j^T.

    A subclass gives `rates`: how tau follows from the coordinates.
    """

    kind = "rotary"
    terms = ("queries_keys",)
    per_layer = True
    promises = ("translation_invariant", "isometric")
    parity = "official"
    source = "ComRoPE, arXiv 2506.03737"
    cost = "one b x b eigendecomposition per block, head and layer, then one b x b product per token and block"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        block_size: int = 8,
        init_std: float = 1.0,
        perturbation: float = 0.0,
        offset: float = 0.0,
        normalize_coords: NormalizeCoords = "separate",
        share_heads: bool = False,
        share_layers: bool = False,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        if block_size < 2 or self.head_dim % block_size:
            raise ValueError(f"block_size={block_size} must be at least 2 and divide head_dim={self.head_dim}")
        if init_std < 0 or perturbation < 0 or offset < 0:
            raise ValueError(
                f"init_std={init_std}, perturbation={perturbation} and offset={offset} must not be negative"
            )
        check_choice("normalize_coords", normalize_coords, ("separate", "max", "min"))
        self.block_size, self.blocks, self.init_std = block_size, self.head_dim // block_size, init_std
        self.perturbation, self.offset, self.normalize_coords = perturbation, offset, normalize_coords
        self.share_layers = share_layers
        layers, heads = 1 if share_layers else depth, 1 if share_heads else heads
        self.freqs = nn.Parameter(torch.empty(layers, heads, self.blocks, block_size, block_size))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the angle matrices anew."""
        self.freqs.normal_().mul_(self.init_std)

    def rates(self, layer: int) -> Tensor:
        """Factor (A, m) of each coordinate in tau of each block of channels, for one block of the network."""
        raise NotImplementedError(f"{type(self).__name__} must define rates()")

    def coordinates(self, positions: Positions) -> Tensor:
        """Coordinates (..., prefix + N, A) in (0, 1), perturbed in training; prefix tokens are at the centre, 0.5."""
        p, sizes = positions.coords, self._divisors(positions)
        noise = shift = None
        if self.training and self.offset > 0:
            shift = self.offset * torch.randn(self.axes, device=p.device)
        if self.training and self.perturbation > 0:
            noise = patch_noise(torch.randn(p.shape, device=p.device), self.perturbation)
        return unit_coordinates(p, sizes, positions.prefix, noise, shift)

    def _divisors(self, positions: Positions) -> tuple[float, ...]:
        """Number of tokens that makes a coordinate 1, per axis: time is counted in heights of the picture."""
        if positions.extent is None:
            raise ValueError(f"{self.name} needs the range of the positions; pass extent= to Positions.points")
        space = positions.extent[-2:]
        if self.normalize_coords != "separate":
            space = ((max if self.normalize_coords == "max" else min)(space),) * len(space)
        return space if self.axes < 3 else (space[0], *space)

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        self.check_positions(positions)
        p = self.coordinates(positions)
        if self.freqs.shape[0] == 1:
            return self._terms(p, 0)
        return LayeredTerms(lambda index: self._terms(p, index), self.depth)

    def _terms(self, p: Tensor, layer: int) -> AttentionTerms:
        tau = self.tau(p, layer)  # (..., m, N)
        if self.block_size > 2:
            return BlockRotationTerms(exponential_along(self.generators(layer), tau))
        # A block of 2 is a plane, and [[0, s], [-s, 0]] turns it by -s.
        return RotaryTerms(RotaryTable.from_angles(-(tau * self.generators(layer)[..., 0, 1, None]).mT))

    def tau(self, p: Tensor, layer: int = 0) -> Tensor:
        """Position of every token along the generator of every block of channels: (m, N) or (B, 1, m, N)."""
        rates = self.rates(layer).float()
        total = p[..., None, :, 0] * rates[0, :, None]
        for a in range(1, self.axes):
            # Elementwise on purpose: a matmul would be lowered by autocast.
            total = total + p[..., None, :, a] * rates[a, :, None]
        return total if total.dim() == 2 else total.unsqueeze(-3)

    def generators(self, layer: int = 0) -> Tensor:
        """S_j = P_j - P_j^T of one block of the network: (H, m, b, b)."""
        return self.freqs[layer] - self.freqs[layer].mT

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block_size={self.block_size}, perturbation={self.perturbation}"


def unit_coordinates(
    coords: Tensor,
    sizes: tuple[float, ...],
    prefix: int = 0,
    noise: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """(p + 1/2 + noise) / size on each axis, prefix tokens at 0.5 in front, and a common shift of all tokens.

    Args:
        coords: (..., N, A) index coordinates.
        sizes: tokens that make a coordinate 1, per axis.
        prefix: number of tokens without a position.
        noise: (..., N, A) in units of tokens.
        shift: (A,) in units of the result.
    """
    p = coords + 0.5 if noise is None else coords + 0.5 + noise
    p = torch.stack([p[..., a] / size for a, size in enumerate(sizes)], dim=-1)
    p = F.pad(p, (0, 0, prefix, 0), value=0.5)
    return p if shift is None else p + shift


def patch_noise(normal: Tensor, intensity: float) -> Tensor:
    """Displacement of tokens within their cells from N(0, 1) draws (..., N, A); in 3 axes none of the frames."""
    noise = (0.5 * intensity * normal).clamp(-0.5, 0.5)
    return noise if normal.shape[-1] < 3 else F.pad(noise[..., 1:], (1, 0))


@register_encoding("comrope_ap")
class ComRoPEAP(ComRoPE):
    """ComRoPE with axial partition: blocks of channels take turns with the axes, each turned along its own.

    Coordinates are in (0, 1), patch centres, on a grid of any size; time is divided by the height, as in the
    released code. Prefix tokens are at the centre, 0.5 on every axis.

    Args:
        block_size: channels b of a block, a divisor of head_dim; there must be a block for every axis. Where the axes
            do not divide the number of blocks (the paper wants that they do) the first ones get one more.
        init_std: standard deviation of the angle matrices; 0 starts from plain attention, for fine-tuning.
        perturbation: in training, move patches within their cells by N(0, perturbation / 2) cells, at most to the
            border; the paper trains with 1 for robustness to other resolutions.
        offset: in training, shift all tokens by offset N(0, 1) on each axis.
        normalize_coords: size that divides rows and columns: each its own, or the larger or smaller for both.
        share_heads: learn one set for all heads.
        share_layers: learn one set for all blocks of the network.
    """

    equation = "(q, k)_n[j] <- exp(p[n, j mod A] (P_j - P_j^T)) (q, k)_n[j]  on blocks j of b channels"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        block_size: int = 8,
        init_std: float = 1.0,
        perturbation: float = 0.0,
        offset: float = 0.0,
        normalize_coords: NormalizeCoords = "separate",
        share_heads: bool = False,
        share_layers: bool = False,
    ) -> None:
        super().__init__(
            dim, heads, axes, depth, block_size, init_std, perturbation, offset, normalize_coords, share_heads,
            share_layers,
        )  # fmt: skip
        if self.blocks < axes:
            raise ValueError(
                f"head_dim={self.head_dim} has {self.blocks} blocks of block_size={block_size}, too few for {axes} "
                f"axes; use block_size={max(2, self.head_dim // axes // 2 * 2)} or less, or comrope_ld"
            )
        self.reset_parameters()

    def rates(self, layer: int) -> Tensor:
        turns = torch.arange(self.blocks, device=self.freqs.device) % self.axes
        return (turns == torch.arange(self.axes, device=self.freqs.device)[:, None]).float()  # (A, m)


@register_encoding("comrope_ld")
class ComRoPELD(ComRoPE):
    """ComRoPE with linearly dependent generators: every block turns along one learned direction of all axes.

    The generator of axis a is a learned multiple of the block's one; heads share these multipliers, as in the released
    code. Coordinates are in (0, 1), patch centres; time is divided by the height. Prefix tokens are at the centre.

    Args:
        block_size: channels b of a block, a divisor of head_dim.
        init_std: standard deviation of the angle matrices; 0 starts from plain attention, for fine-tuning.
        perturbation: in training, move patches within their cells by N(0, perturbation / 2) cells, at most to the
            border; the paper trains with 1 for robustness to other resolutions.
        offset: in training, shift all tokens by offset N(0, 1) on each axis.
        normalize_coords: size that divides rows and columns: each its own, or the larger or smaller for both.
        share_heads: learn one set of angle matrices for all heads.
        share_layers: learn one set for all blocks of the network.
    """

    equation = "(q, k)_n[j] <- exp(sum_a p[n,a] multiplier[a,j] (P_j - P_j^T)) (q, k)_n[j]  on blocks j of b channels"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        block_size: int = 8,
        init_std: float = 1.0,
        perturbation: float = 0.0,
        offset: float = 0.0,
        normalize_coords: NormalizeCoords = "separate",
        share_heads: bool = False,
        share_layers: bool = False,
    ) -> None:
        super().__init__(
            dim, heads, axes, depth, block_size, init_std, perturbation, offset, normalize_coords, share_heads,
            share_layers,
        )  # fmt: skip
        self.multiplier = nn.Parameter(torch.empty(self.freqs.shape[0], axes, self.blocks))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the angle matrices and the multipliers anew."""
        super().reset_parameters()
        self.multiplier.normal_()

    def rates(self, layer: int) -> Tensor:
        return self.multiplier[layer]  # (A, m)
