"""`selective_rope` and `carope`: rotation by angles that the tokens themselves add up along the sequence.

Both are made for causal attention. They count tokens in the order of their coordinates, whose values do not matter, and
leave it to `attend(..., causal=True)` to hide what comes later: without it they work too, on phases of the past.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoding import AttentionTerms, PositionEncoding
from ..frequencies import geometric
from ..positions import Positions
from ..registry import register_encoding
from ..rotary import RotaryTable
from .rotary import RotaryTerms, check_rotary_dim
from .sequence import along_sequence, draw_linear_, project


class _ContentRotary(PositionEncoding):
    """Base of the encodings that rotate every head by angles (B, H, P + N, F) made from the tokens.

    A subclass gives `content_angles`; prefix tokens keep angle zero.
    """

    kind = "rotary"
    supported_axes = (1,)
    per_layer = True
    content_dependent = True
    cumulative = True
    terms = ("queries_keys",)
    promises = ("translation_invariant",)
    half_pairing: bool = False

    def content_angles(self, x: Tensor, positions: Positions, layer: int = 0) -> Tensor:
        """Angles of every token, head and plane: x (B, P + N, C) -> (B, H, P + N, F) float32."""
        raise NotImplementedError(f"{type(self).__name__} must define content_angles()")

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        self.check_positions(positions)
        self.check_layer(layer)
        angles = self.content_angles(self.require_content(x), positions, layer)
        return RotaryTerms(RotaryTable.from_angles(angles), self.half_pairing)


@register_encoding("selective_rope")
class SelectiveRoPE(_ContentRotary):
    """Selective RoPE: every token decides how far it turns those that follow, through a projection and a short filter.

    The low-rank form of the released code. Its gate, its bias and its full-rank form are not described well enough to
    be here.

    Args:
        rank: width between the two projections; 16, or 32 in the language models.
        kernel_size: taps of the causal filter along the sequence; None takes the first difference, which makes the
            angle that of the token itself.
        base: the temperatures of the planes fall from `max_temperature` towards this many times less.
        max_temperature: temperature of the first plane.
        half: pair channel f with f + F ("half-split", as the code) instead of 2f with 2f + 1.
    """

    equation = (
        "phi_t = W_2 W_1 (x_t / |x_t| head by head), Phi_t = sum_(s<=t) conv(phi)_s\n"
        "theta[h,t,f] = Phi_t[h,f] max_temperature base^(-f/F);  (q, k) <- R(theta) (q, k)"
    )
    source = "Selective RoPE, arXiv 2511.17388"
    parity = "official"
    cost = "one rotation of q and k; rank (C + H D / 2) products per token and a table per block"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 1,
        depth: int = 1,
        rank: int = 16,
        kernel_size: int | None = 4,
        base: float = 500000.0,
        max_temperature: float = 1.0,
        half: bool = True,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        self.planes = check_rotary_dim(self.head_dim, self.head_dim)
        if rank < 1 or (kernel_size is not None and kernel_size < 1):
            raise ValueError(f"rank and kernel_size must be at least 1, got {rank} and {kernel_size}")
        if not (base > 0 and max_temperature > 0):
            raise ValueError(f"base and max_temperature must be greater than 0, got {base} and {max_temperature}")
        self.base, self.max_temperature, self.half_pairing = base, max_temperature, half
        angles = heads * self.planes
        self.proj1 = nn.Parameter(torch.empty(depth, rank, dim))
        self.proj2 = nn.Parameter(torch.empty(depth, angles, rank))
        self.conv_weight = nn.Parameter(torch.empty(depth, angles, 1, kernel_size)) if kernel_size else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights uniformly within one over the root of their inputs, as torch draws linear layers."""
        for weight in self.parameters():
            fan_in = weight[0, 0].numel()
            weight.uniform_(-(fan_in**-0.5), fan_in**-0.5)

    def content_angles(self, x: Tensor, positions: Positions, layer: int = 0) -> Tensor:
        # Head by head of unit length, so that no token turns the others further than the weights allow
        unit = F.normalize(x.float().unflatten(-1, (self.heads, -1)), dim=-1, eps=1e-6).flatten(2)
        phi = project(project(unit, self.proj1[layer]), self.proj2[layer])  # (B, P + N, H F)
        if self.conv_weight is not None:
            taps = self.conv_weight[layer]
            phi = along_sequence(phi, positions, lambda p: causal_filter(p, taps).cumsum(1))
        else:
            phi = along_sequence(phi, positions, lambda p: p)  # a sum of differences is its last value
        phases = phi.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, P + N, F)
        return phases * (self.max_temperature * geometric(self.planes, self.base, phases.device))


def causal_filter(x: Tensor, taps: Tensor) -> Tensor:
    """Each channel filtered along the sequence by its own taps, the last of which meets the token itself.

    Args:
        x: (B, N, E) float32, zero before the first token.
        taps: (E, 1, width).
    """
    width = taps.shape[-1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    total = torch.zeros_like(x)
    for i in range(width):  # a handful of taps: sums stay in float32 also under autocast, which lowers convolutions
        total = total + padded[:, i : i + x.shape[1]] * taps[:, 0, i].float()
    return total


@register_encoding("carope")
class CARoPE(_ContentRotary):
    """Context-aware RoPE: every token and head has its own base frequency, whose powers turn the planes.

    The paper says that it starts as RoPE, and not how; here the weights start small, so that every base frequency is
    near 1 / (1 + ln 2).

    Args:
        init_std: standard deviation of the initial weights.
        half: pair channel f with f + F ("half-split") instead of 2f with 2f + 1.
    """

    equation = (
        "f_t[h] = 1 / (1 + softplus(w_h . x_t)),  theta[h,t,i] = sum_(s<=t) f_s[h]^i, i = 1 .. D/2\n"
        "(q, k) <- R(theta) (q, k)"
    )
    source = "CARoPE, arXiv 2507.23083"
    parity = "formula"
    cost = "one rotation of q and k; one projection to H numbers per token and a table per block"

    def __init__(
        self, dim: int, heads: int, axes: int = 1, depth: int = 1, init_std: float = 0.02, half: bool = False
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        self.planes, self.init_std = check_rotary_dim(self.head_dim, self.head_dim), init_std
        self.half_pairing = half
        self.weight = nn.Parameter(torch.empty(depth, heads, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw small weights."""
        draw_linear_(self.weight, std=self.init_std)

    def content_angles(self, x: Tensor, positions: Positions, layer: int = 0) -> Tensor:
        frequency = 1.0 / (F.softplus(project(x, self.weight[layer])) + 1.0)  # (B, P + N, H)
        powers = torch.arange(1, self.planes + 1, dtype=torch.float32, device=frequency.device)
        steps = (frequency[..., None] ** powers).flatten(2)  # (B, P + N, H F)
        phases = along_sequence(steps, positions, lambda s: s.cumsum(1))
        return phases.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, P + N, F)
