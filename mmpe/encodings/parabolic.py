"""PaPE: every token chooses, per head, a quadratic window over the positions of the keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoding import AttentionTerms, FloatModule, PositionEncoding
from ..positions import Positions
from ..precision import full_precision
from ..registry import register_encoding

# The part of a logit that all keys share may exceed float16's 65504; a power of two moves it to the key without error.
_ROW_UNIT = 1024.0


class ParabolicTerms(AttentionTerms):
    """Channels beside q and k whose product is the positional part of the logit.

    Args:
        q_channels: (B, H, N, E), float32 or float64.
        k_channels: (1 or B, 1, N, E), the same for all heads.
        split: store every channel as a high and a low part, for half precision; None does so for fp16 and bf16.
    """

    def __init__(self, q_channels: Tensor, k_channels: Tensor, split: bool | None = None) -> None:
        self.q_channels, self.k_channels, self.split = q_channels, k_channels, split
        self.tokens = q_channels.shape[-2]

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        split = q.dtype in (torch.float16, torch.bfloat16) if self.split is None else self.split
        if not split:
            return _widen(q, self.q_channels.to(q.dtype)), _widen(k, self.k_channels.to(k.dtype))
        q_high, q_low = _high_low(self.q_channels, q.dtype)
        k_high, k_low = _high_low(self.k_channels, k.dtype)
        # (qh + ql)(kh + kl) without the product of the two low parts
        q_parts, k_parts = torch.cat([q_high, q_high, q_low], -1), torch.cat([k_high, k_low, k_high], -1)
        return _widen(q, q_parts), _widen(k, k_parts)


def _high_low(channels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    high = channels.to(dtype)
    return high, (channels - high.to(channels.dtype)).to(dtype)


def _widen(x: Tensor, channels: Tensor) -> Tensor:
    """[x | channels | zeros], as wide as the next multiple of 8, which the fused kernels want."""
    padding = -(x.shape[-1] + channels.shape[-1]) % 8
    channels = F.pad(channels, (0, padding)).expand(*x.shape[:-1], -1)
    return torch.cat([x, channels], dim=-1)


def query_channels(a_matrix: Tensor, beta: Tensor, p: Tensor) -> Tensor:
    """[beta.p - p'Ap | -A_uu, -2 A_uv | 2 Ap - beta] of the queries, the first divided by a constant.

    Args:
        a_matrix: (B, H, N, A, A) symmetric.
        beta: (B, H, N, A).
        p: (1 or B, 1, N, A).

    Returns:
        (B, H, N, 1 + A (A + 1) / 2 + A)
    """
    ap = (a_matrix * p[..., None, :]).sum(-1)  # (B, H, N, A)
    row = (p * (beta - ap)).sum(-1) / _ROW_UNIT
    quadratic = [a_matrix[..., u, v] * (-1.0 if u == v else -2.0) for u, v in _pairs(p.shape[-1])]
    return torch.stack([row, *quadratic, *(2.0 * ap - beta).unbind(-1)], dim=-1)


def key_channels(p: Tensor) -> Tensor:
    """[1 | p_u p_v for u <= v | p_u] of the keys, the first times a constant: (..., N, A) -> (..., N, E)."""
    columns = p.unbind(-1)
    quadratic = [columns[u] * columns[v] for u, v in _pairs(len(columns))]
    return torch.stack([torch.full_like(columns[0], _ROW_UNIT), *quadratic, *columns], dim=-1)


def _pairs(axes: int) -> list[tuple[int, int]]:
    return [(u, v) for u in range(axes) for v in range(u, axes)]


class Parabolas(nn.Module):
    """The learned parabolas of one block: projected directions (`position`) and coefficients (`ab`).

    Args:
        dim: model width C.
        heads: number of heads H.
        axes: number of axes A.
        parabolas: parabolas per head M.
        init_scale: factor on the initial directions.
    """

    def __init__(self, dim: int, heads: int, axes: int, parabolas: int, init_scale: float = 1.0) -> None:
        super().__init__()
        self.heads, self.axes, self.init_scale = heads, axes, init_scale
        self.position = nn.Linear(axes, heads * parabolas, bias=False)
        self.ab = nn.Linear(dim, 2 * heads * parabolas, bias=False)
        self._scale_directions()

    def reset_parameters(self) -> None:
        """Draw both weights as torch draws those of a linear layer; the directions are scaled."""
        self.position.reset_parameters()
        self.ab.reset_parameters()
        self._scale_directions()

    @torch.no_grad()
    def _scale_directions(self) -> None:
        self.position.weight.mul_(self.init_scale)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A_i = sum_m a_i[m] w_m w_m' (B, H, N, A, A) and beta_i = sum_m b_i[m] w_m (B, H, N, A)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight_a, weight_b = self.ab.weight.chunk(2)  # (H M, C) each
        with full_precision(x):
            w = self.position.weight.to(dtype).unflatten(0, (self.heads, -1))  # (H, M, A)
            outer = (w[..., :, None] * w[..., None, :]).flatten(-2)  # (H, M, A A)
            # b enters through sum_m b[m] w_m alone: project x by W w and never make the M numbers b.
            to_beta = w.transpose(1, 2) @ weight_b.to(dtype).unflatten(0, (self.heads, -1))  # (H, A, C)
        a = F.softplus(F.linear(x, weight_a.to(x.dtype)))
        beta = F.linear(x, to_beta.flatten(0, 1).to(x.dtype))
        with full_precision(x):
            a_matrix = _to_heads(a.to(dtype), self.heads) @ outer
        return a_matrix.unflatten(-1, (self.axes, self.axes)), _to_heads(beta.to(dtype), self.heads)


class IsotropicParabola(FloatModule):
    """The one learned slope per head of PaPE-RI, with a random scale that is part of the checkpoint.

    Args:
        dim: model width C.
        heads: number of heads H.
        axes: number of axes A.
        init_scale: factor on the random scales.
    """

    def __init__(self, dim: int, heads: int, axes: int, init_scale: float = 1.0) -> None:
        super().__init__()
        self.heads = heads
        self.limit = init_scale * axes**-0.5
        self.a = nn.Linear(dim, heads, bias=False)
        self.position_scales: Tensor
        self.register_buffer("position_scales", torch.empty(1, heads, 1, 1).uniform_(-self.limit, self.limit))

    def reset_parameters(self) -> None:
        """Draw the slopes and the scales, which are never trained."""
        self.a.reset_parameters()
        self.position_scales.uniform_(-self.limit, self.limit)

    def forward(self, x: Tensor) -> Tensor:
        """g_i = softplus(x_i w) s^2 (B, H, N, 1); s moves to the query, so that all heads share the keys' channels."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        a = F.softplus(F.linear(x, self.a.weight.to(x.dtype))).to(dtype)
        return _to_heads(a, self.heads) * self.position_scales.to(dtype).square()


def _to_heads(x: Tensor, heads: int) -> Tensor:
    """(B, N, H K) -> (B, H, N, K)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class ParabolicEncoding(PositionEncoding):
    """Base of PaPE and PaPE-RI: centred positions, channels beside q and k.

    Args:
        dim: model width C.
        heads: number of attention heads H.
        axes: number of position axes.
        depth: number of blocks, each with its own weights.
        init_scale: factor on the initial position weights.
        normalize: divide coordinates by the extent of their axis.
        exempt_prefix: give prefix tokens no positional part.
        prefix_position: coordinate of prefix tokens on every axis.
        split: high and low parts for half precision; None decides by dtype.
    """

    kind = "parabolic"
    per_layer = True
    content_dependent = True
    terms = ("queries_keys",)
    parity = "official"
    source = "Parabolic Position Encoding, arXiv 2602.01418"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int,
        depth: int,
        init_scale: float,
        normalize: bool,
        exempt_prefix: bool,
        prefix_position: float,
        split: bool | None,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        if not init_scale > 0:
            raise ValueError(f"init_scale must be greater than 0, got {init_scale}")
        self.normalize, self.exempt_prefix = normalize, exempt_prefix
        self.prefix_position, self.split = prefix_position, split
        self.layers = nn.ModuleList()

    def reset_parameters(self) -> None:
        for layer in self.layers:
            layer.reset_parameters()  # type: ignore[operator]

    def coordinates(self, positions: Positions, dtype: torch.dtype = torch.float32) -> Tensor:
        """Centred coordinates of all tokens (1 or B, 1, P + N, A): (x, y) = (column, row) in 2 axes, else as they are.

        Only differences matter; around the centre the squares are smallest and so is their rounding error.
        """
        p = positions.coords.to(dtype)
        prefix = torch.full_like(p[..., :1, :], self.prefix_position).expand(*p.shape[:-2], positions.prefix, -1)
        mean = p.mean(dim=-2, keepdim=True)
        p = torch.cat([prefix, p], dim=-2) - mean
        if self.normalize:
            p = torch.stack([c / n for c, n in zip(p.unbind(-1), self._extent(positions), strict=True)], dim=-1)
        p = p.flip(-1) if self.axes == 2 else p
        return p.unsqueeze(-3) if p.dim() > 2 else p[None, None]

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        self.check_layer(layer)
        x = self.require_content(x)
        self.check_tokens(x, positions)
        p = self.coordinates(positions, torch.promote_types(x.dtype, torch.float32))
        q_channels, k_channels = self.channels(x, p, layer)
        if self.exempt_prefix:
            q_channels, k_channels = (_without_prefix(c, positions.prefix) for c in (q_channels, k_channels))
        return ParabolicTerms(q_channels, k_channels, self.split)

    def channels(self, x: Tensor, p: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Positional channels of the queries (B, H, N, E) and of the keys (1 or B, 1, N, E)."""
        raise NotImplementedError(f"{type(self).__name__} must define channels()")

    def _extent(self, positions: Positions) -> tuple[float, ...]:
        if positions.extent is None:
            raise ValueError("normalize=True needs the range of the positions; pass extent= to Positions.points")
        return positions.extent


def _without_prefix(channels: Tensor, prefix: int) -> Tensor:
    return F.pad(channels[..., prefix:, :], (0, 0, prefix, 0))


@register_encoding("pape")
class PaPE(ParabolicEncoding):
    """Parabolic encoding: each token adds to its logits a sum of downward parabolas of the offset to the key.

    The sum is one quadratic form per token and head, so it rides in a few more channels of q and k (6 in 2 axes, 10 in
    3) and needs no N x N bias. The window starts about one patch wide; D^-0.5 scales the positional part too.

    Args:
        parabolas: parabolas per head, M. They only over-parameterise the quadratic form; no cost at run time depends
            on it but that of the projection.
        init_scale: factor on the initial directions; 1 suits positions in patches.
        normalize: divide coordinates by the extent of their axis; the initial window then spans the grid.
        exempt_prefix: give class and register tokens no positional part. The paper's code gives them one.
        prefix_position: coordinate of prefix tokens on every axis; -1 is the paper's (0, 0) beside patches from 1.
        split: store positional channels as a high and a low half-precision part; None does so for fp16 and bf16.
    """

    promises = ("translation_invariant",)
    cost = "projection C -> H (M + A) per block; q and k widen by 6 (2 axes) or 10 (3 axes) channels"
    equation = (
        "logit_ij = (q_i.k_j + sum_m [-a_im (w_m.d)^2 + b_im w_m.d]) / sqrt(D), d = p_i - p_j\n"
        "         = (q_i.k_j - d' A_i d + beta_i.d) / sqrt(D);  a_i = softplus(x_i W_a), b_i = x_i W_b"
    )

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        parabolas: int = 50,
        init_scale: float = 1.0,
        normalize: bool = False,
        exempt_prefix: bool = False,
        prefix_position: float = -1.0,
        split: bool | None = None,
    ) -> None:
        super().__init__(dim, heads, axes, depth, init_scale, normalize, exempt_prefix, prefix_position, split)
        if parabolas < 1:
            raise ValueError(f"parabolas must be at least 1, got {parabolas}")
        self.layers.extend(Parabolas(dim, heads, axes, parabolas, init_scale) for _ in range(depth))

    def channels(self, x: Tensor, p: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        a_matrix, beta = self.layers[layer](x)
        return query_channels(a_matrix, beta, p), key_channels(p)


@register_encoding("pape_ri")
class PaPERI(ParabolicEncoding):
    """Rotation-invariant parabolic encoding: logits fall with the squared distance, at a rate that the token chooses.

    The scale s of a head is random, never trained and part of the checkpoint; a head with a small s hardly sees
    positions.

    Args:
        init_scale: factor on the random scales; 1 suits positions in patches.
        normalize: divide coordinates by the extent of their axis.
        exempt_prefix: give class and register tokens no positional part. The paper's code gives them one.
        prefix_position: coordinate of prefix tokens on every axis; -1 is the paper's (0, 0) beside patches from 1.
        split: store positional channels as a high and a low half-precision part; None does so for fp16 and bf16.
    """

    promises = ("translation_invariant", "rotation_invariant", "mirror_invariant")
    cost = "projection C -> H per block; q and k widen by 2 + axes channels"
    equation = "logit_ij = (q_i.k_j - softplus(x_i w_h) s_h^2 |p_i - p_j|^2) / sqrt(D)"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        init_scale: float = 1.0,
        normalize: bool = False,
        exempt_prefix: bool = False,
        prefix_position: float = -1.0,
        split: bool | None = None,
    ) -> None:
        super().__init__(dim, heads, axes, depth, init_scale, normalize, exempt_prefix, prefix_position, split)
        self.layers.extend(IsotropicParabola(dim, heads, axes, init_scale) for _ in range(depth))

    def channels(self, x: Tensor, p: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        g = self.layers[layer](x)  # (B, H, N, 1)
        square = p.square().sum(-1, keepdim=True)
        q_channels = torch.cat([-g * square / _ROW_UNIT, -g, 2.0 * g * p], dim=-1)
        return q_channels, torch.cat([torch.full_like(square, _ROW_UNIT), square, p], dim=-1)
