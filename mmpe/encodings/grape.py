"""`grape` and `grape_contextual`: rotations as a group, with learned frequencies or a phase that content advances."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..encoding import AttentionTerms, PositionEncoding
from ..frequencies import split_planes
from ..positions import Positions
from ..precision import full_precision
from ..registry import register_encoding
from ..rotary import RotaryTable
from .rotary import RotaryEncoding, RotaryTerms, check_rotary_dim
from .rotary_variants import default_base
from .sequence import along_sequence, project

_GATE_SCALE = 16.0
_SMALL_ANGLE = 1e-2


def rank2_rotation(x: Tensor, a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """exp(t L) x for the rank-2 generator L = a b^T - b a^T, in O(D) and without a matrix.

    L turns the plane of a and b by the angle t s, s = sqrt(|a|^2 |b|^2 - (a.b)^2), and leaves the rest alone:
    exp(t L) = I + sin(t s)/s L + (1 - cos(t s))/s^2 L^2.

    Args:
        x: (..., D) vectors.
        a: (D,) first vector of the generator, or (..., D).
        b: (D,) second vector.
        t: (...) how far to turn, position times frequency.

    Returns:
        (..., D)
    """
    with full_precision(x):
        alpha, beta, gamma = (a * a).sum(-1), (b * b).sum(-1), (a * b).sum(-1)
        square = (alpha * beta - gamma * gamma).clamp_min(0.0)  # s^2; rounding may leave it below zero
        first, second = _rodrigues(t, square)
        u, v = (a * x).sum(-1), (b * x).sum(-1)
        # L x = a v - b u and L^2 x = gamma (a v + b u) - beta u a - alpha v b, sorted by a and b
        along_a = first * v + second * (gamma * v - beta * u)
        along_b = second * (gamma * u - alpha * v) - first * u
        return x + along_a[..., None] * a + along_b[..., None] * b


def _rodrigues(t: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    """sin(t s)/s and (1 - cos(t s))/s^2, from their series where t s is small."""
    angle_square = t * t * square
    small = angle_square < _SMALL_ANGLE**2
    safe = torch.where(small, torch.ones_like(angle_square), angle_square)  # else the unused branch gives NaN gradients
    angle = safe.sqrt()
    half_sine = torch.sin(angle / 2)  # 1 - cos loses digits, 2 sin^2 does not
    first = torch.where(small, 1 - angle_square / 6 * (1 - angle_square / 20), angle.sin() / angle)
    second = torch.where(small, 0.5 - angle_square / 24 * (1 - angle_square / 30), 2 * half_sine**2 / safe)
    return t * first, t * t * second


@register_encoding("grape")
class GRAPE(RotaryEncoding):
    """Multiplicative GRAPE: rotation with learned frequencies, in half-split planes and with the opposite sign.

    The planes are the coordinate pairs, as in the released models; each axis has its own, so that the rotations
    commute and attention stays relative. It starts as RoPE turning the other way, which scores see as a mirror image.
    Planes that are spanned by free vectors are `mmpe.encodings.grape.rank2_rotation`.

    Args:
        base: initial wavelengths of every axis grow from 2 pi towards 2 pi base; None is 10000 in one axis and 100 in
            more.
        log_freq_scale: the parameter is this many times the logarithm of the frequency, which divides the learning
            rate; 16 in the released models.
        share_heads: learn one set for all heads.
        share_layers: learn one set for all blocks.
    """

    per_layer = True
    half_pairing = True
    equation = "theta[h,n,f] = -p[n,a(f)] exp(log_freq[h,f] / scale);  (q, k) <- R(theta) (q, k), planes (f, f + F)"
    source = "GRAPE, arXiv 2512.07805"
    cost = "one rotation of q and k; a table per block is built once per forward"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 1,
        depth: int = 1,
        base: float | None = None,
        log_freq_scale: float = 16.0,
        share_heads: bool = True,
        share_layers: bool = False,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        self.planes = check_rotary_dim(self.head_dim, self.head_dim)
        self.base, self.log_freq_scale = default_base(base, axes), log_freq_scale
        if not log_freq_scale > 0:
            raise ValueError(f"log_freq_scale must be greater than 0, got {log_freq_scale}")
        self.share_layers = share_layers
        sets = (1 if share_layers else depth, 1 if share_heads else heads)
        self.log_freq = nn.Parameter(torch.empty(*sets, self.planes))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start from the geometric spectrum of every axis."""
        start = 0
        for size in split_planes(self.planes, self.axes):
            exponent = torch.arange(size, dtype=torch.float32, device=self.log_freq.device) / max(size, 1)
            self.log_freq[..., start : start + size] = -self.log_freq_scale * math.log(self.base) * exponent
            start += size

    @property
    def table_layers(self) -> int | None:
        """Blocks that the table has entries for; None if all blocks share it."""
        return None if self.share_layers else self.depth

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        omega = -torch.exp(self.log_freq / self.log_freq_scale)  # (L, H or 1, F)
        parts = omega.split(split_planes(self.planes, self.axes), dim=-1)
        by_axis = [
            torch.cat([part if a == b else torch.zeros_like(part) for b, part in enumerate(parts)], dim=-1)
            for a in range(self.axes)
        ]
        frequencies = torch.stack(by_axis, dim=-2)  # (L, H or 1, A, F)
        return frequencies[0] if self.share_layers else frequencies


@register_encoding("grape_contextual")
class ContextualGRAPE(PositionEncoding):
    """Contextual multiplicative GRAPE: each token advances the phase of those after it by a learned gate, in (0, 1).

    For causal attention: tokens are counted in the order of their coordinates and only those before a token move it.
    The values of the coordinates do not matter, and attention itself is not made causal (`attend(..., causal=True)`).

    Args:
        base: initial wavelengths grow from 2 pi towards 2 pi base, in steps of the gate.
        per_head: one gate per head instead of one per token.
        share_heads: learn one set of frequencies for all heads.
    """

    kind = "rotary"
    supported_axes = (1,)
    per_layer = True
    content_dependent = True
    cumulative = True
    terms = ("queries_keys",)
    equation = (
        "theta[n,f] = -Phi_n exp(log_freq[f]),  Phi_n = sum_(t<n) sigmoid((w . x_t + b) / 16)\n"
        "(q, k) <- R(theta) (q, k), planes (f, f + F)"
    )
    source = "GRAPE, arXiv 2512.07805; the gate is that of the released code"
    promises = ("translation_invariant",)
    parity = "official"
    cost = "one rotation of q and k, one projection to 1 or H numbers per token, one table per block"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 1,
        depth: int = 1,
        base: float = 10000.0,
        per_head: bool = False,
        share_heads: bool = True,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        planes = check_rotary_dim(self.head_dim, self.head_dim)
        self.base, gates = default_base(base, axes), heads if per_head else 1
        self.log_freq = nn.Parameter(torch.empty(depth, 1 if share_heads else heads, planes))
        self.gate_weight = nn.Parameter(torch.empty(depth, gates, dim))
        self.gate_bias = nn.Parameter(torch.empty(depth, gates))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """RoPE's spectrum and a gate of 0.39 for every token, as in the released code."""
        planes = self.log_freq.shape[-1]
        exponent = torch.arange(planes, dtype=torch.float32, device=self.log_freq.device) / planes
        self.log_freq.copy_(-math.log(self.base) * exponent)
        nn.init.zeros_(self.gate_weight)
        # The inverse of softplus at 1e-3; the code then divides by 16 and takes a sigmoid.
        self.gate_bias.fill_(math.log(math.expm1(1e-3)))

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        self.check_positions(positions)
        self.check_layer(layer)
        phase = self.phase(self.require_content(x), positions, layer).transpose(1, 2)  # (B, 1 or H, P + N)
        angles = -phase[..., None] * self.log_freq[layer, :, None].float().exp()  # (B, 1 or H, P + N, F)
        return RotaryTerms(RotaryTable.from_angles(angles), half=True)

    def phase(self, x: Tensor, positions: Positions, layer: int = 0) -> Tensor:
        """Sum of the gates of all tokens before each: x (B, P + N, C) -> (B, P + N, 1 or H) float32."""
        gate = torch.sigmoid(project(x, self.gate_weight[layer], self.gate_bias[layer]) / _GATE_SCALE)
        return along_sequence(gate, positions, lambda g: g.cumsum(1) - g)
