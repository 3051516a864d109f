"""Learned Fourier features: sines and cosines at learned frequencies, through a small MLP, added to the tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoding import PositionEncoding
from ..positions import Positions
from ..precision import full_precision
from ..registry import register_encoding
from .coordinates import CoordinateKind, check_choice, normalise


@register_encoding("fourier_learned")
class LearnedFourier(PositionEncoding):
    """Learned Fourier features of the coordinates, through an MLP of one hidden layer, added to the tokens once.

    Any coordinates work, also fractional and negative ones; prefix tokens get nothing. Groups cut the coordinates into
    equal runs of M = A / G, which share frequencies and MLP and fill C / G channels each.

    Frequencies start from a normal distribution of standard deviation 1 / gamma, that is variance gamma^-2, which is
    how the paper is remembered (not verified; ports take gamma^-2 or gamma^2 as the deviation). What gamma means
    depends on the units of the coordinates: 10 makes slow waves of about 60 cells of a grid, coordinates in [-1, 1]
    want about 0.3.

    Args:
        fourier_dim: number of sines and cosines, even; None takes the model width (one less if it is odd).
        hidden_dim: hidden width of the MLP.
        gamma: reciprocal of the standard deviation of the first frequencies.
        groups: number G of groups of coordinates; must divide both the axes and the model width.
        coordinates: "index" counts cells, "pixel" is [-1, 1] from end to end, "centered" between the outer borders.
    """

    kind = "token"
    terms = ("embed",)
    equation = "x_i <- x_i + W2 gelu(W1 [cos W_r p_i, sin W_r p_i] / sqrt(F) + b1) + b2"
    source = "Li et al., Learnable Fourier Features for Multi-Dimensional Spatial PE, arXiv 2106.02795"
    cost = "a small MLP on N positions and one addition before block 0"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        fourier_dim: int | None = None,
        hidden_dim: int = 32,
        gamma: float = 10.0,
        groups: int = 1,
        coordinates: CoordinateKind = "index",
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        fourier_dim = dim - dim % 2 if fourier_dim is None else fourier_dim
        if fourier_dim < 2 or fourier_dim % 2 or hidden_dim < 1:
            raise ValueError(f"fourier_dim={fourier_dim} must be even and hidden_dim={hidden_dim} at least 1")
        if groups < 1 or axes % groups or dim % groups:
            raise ValueError(f"groups={groups} must divide axes={axes} and dim={dim}")
        if gamma <= 0:
            raise ValueError(f"gamma={gamma} must be positive")
        check_choice("coordinates", coordinates, ("index", "pixel", "centered"))
        self.gamma, self.groups = gamma, groups
        self.coordinate_kind: CoordinateKind = coordinates
        self.frequencies = nn.Parameter(torch.empty(fourier_dim // 2, axes // groups))
        self.weight1 = nn.Parameter(torch.empty(hidden_dim, fourier_dim))
        self.bias1 = nn.Parameter(torch.empty(hidden_dim))
        self.weight2 = nn.Parameter(torch.empty(dim // groups, hidden_dim))
        self.bias2 = nn.Parameter(torch.empty(dim // groups))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.frequencies, std=1 / self.gamma)
        for weight, bias in ((self.weight1, self.bias1), (self.weight2, self.bias2)):
            limit = weight.shape[1] ** -0.5  # as torch draws the weights of linear layers
            nn.init.uniform_(weight, -limit, limit)
            nn.init.zeros_(bias)

    def rows(self, coords: Tensor) -> Tensor:
        """What is added at coordinates (..., N, A) -> (..., N, C) float32."""
        mlp = (self.weight1, self.bias1, self.weight2, self.bias2)
        return learned_fourier(coords.unflatten(-1, (self.groups, -1)), self.frequencies, *mlp)

    def embed(self, x: Tensor, positions: Positions, layer: int = 0) -> Tensor:
        if layer != 0:
            return x
        self.check_positions(positions)
        coords = normalise(positions.coords, positions.extent, self.coordinate_kind)
        return x + F.pad(self.rows(coords), (0, 0, positions.prefix, 0)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gamma={self.gamma}, groups={self.groups}"


def fourier_features(x: Tensor, frequencies: Tensor) -> Tensor:
    """[cos, sin] of x (..., M) at frequencies (F / 2, M), over sqrt(F) -> (..., F), vectors of length sqrt(1/2)."""
    angles = x[..., :1] * frequencies[:, 0]
    for m in range(1, x.shape[-1]):
        angles = angles + x[..., m : m + 1] * frequencies[:, m]
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * (2 * frequencies.shape[0]) ** -0.5


def learned_fourier(
    x: Tensor, frequencies: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> Tensor:
    """Embedding of grouped coordinates, in their own precision whatever autocast says.

    Args:
        x: (..., N, G, M) coordinates in G groups.
        frequencies: (F / 2, M).
        weight1: (hidden, F) of the first layer.
        bias1: (hidden,).
        weight2: (C / G, hidden) of the second layer.
        bias2: (C / G,).

    Returns:
        (..., N, C), the groups one after the other.
    """
    with full_precision(x):
        hidden = F.gelu(F.linear(fourier_features(x, frequencies), weight1, bias1))
        return F.linear(hidden, weight2, bias2).flatten(-2)
