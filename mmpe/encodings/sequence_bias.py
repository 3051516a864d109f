"""Biases for causal sequences that content sets: `fox`, `cable`, `cope_contextual` and `grape_additive`.

They are defined for causal attention only, so they hide the keys after a query themselves, whether
or not `attend` is told to; there is no bidirectional form. They count tokens in the order of their
coordinates, whose values matter to `grape_additive` alone. Prefix tokens come before all others: they are seen by
every query at no cost, see one another only, and are not counted.

Shapes: B batch, H heads, N positioned tokens, P prefix tokens, D head dim, A axes.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoding import AttentionTerms, PositionEncoding, ScoreMod
from ..positions import Positions
from ..precision import full_precision
from ..registry import register_encoding
from .bias import alibi_slopes
from .coordinates import check_choice
from .sequence import along_sequence, causal_pairs, draw_linear_, hidden_keys, project, sequence_ranks


class CausalBias(PositionEncoding):
    """Base of the contextual biases."""

    kind = "bias"
    supported_axes = (1,)
    per_layer = True
    content_dependent = True
    cumulative = True
    terms: ClassVar[tuple[str, ...]] = ("bias",)
    promises: ClassVar[tuple[str, ...]] = ("translation_invariant",)


# ---------------------------------------------------------------- differences of a cumulative sum


class CumulativeTerms(AttentionTerms):
    """Bias c_i - c_j for every key j before query i, with c a sum along the sequence.

    Args:
        total: (B or 1, H, P + N) float32; read only where neither token is a prefix.
        ranks: (P + N,) or (B, P + N), see `sequence_ranks`.
        temperature: factor on the scaled logits.
    """

    def __init__(self, total: Tensor, ranks: Tensor, temperature: float | None = None) -> None:
        self.total, self.ranks, self.temperature = total, ranks, temperature

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        counted = (self.ranks >= 0).unsqueeze(-2)  # ([B,] 1, P + N)
        difference = cumulative_bias(self.total)
        outside = ~(counted & counted.mT).unsqueeze(-3)  # ([B,] 1, P + N, P + N)
        bias = difference.masked_fill(outside, 0.0)
        return bias.masked_fill(hidden_keys(self.ranks).unsqueeze(-3), float("-inf"))

    def score_mod(self) -> ScoreMod:
        total, ranks = self.total.contiguous(), self.ranks
        batched, shared = ranks.dim() > 1, total.shape[0] == 1

        def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            row, column = (ranks[b, i], ranks[b, j]) if batched else (ranks[i], ranks[j])
            sample = b * 0 if shared else b
            bias = total[sample, h, i] - total[sample, h, j]
            bias = torch.where((row >= 0) & (column >= 0), bias, 0.0)
            return torch.where(column > row, float("-inf"), score + bias.to(score.dtype))

        return mod


def cumulative_bias(total: Tensor) -> Tensor:
    """Differences c_i - c_j of sums (..., N) -> (..., N, N)."""
    return total[..., :, None] - total[..., None, :]


@register_encoding("fox")
class FoX(CausalBias):
    """Forgetting attention: every token and head has a forget gate, and a key fades by the gates since then.

    Args:
        gate: "content" computes the gates from the tokens, "learned" learns one number per head, "fixed" keeps its
            initial value.
        shortest: of the gates that do not depend on content, tokens after which the first head has forgotten all but
            1/e.
        longest: the same of the last head; those between are spaced evenly in the logarithm.
    """

    terms = ("bias", "score_mod")
    equation = "b_ij = sum_(j<t<=i) log sigmoid(w_h . x_t + c_h) for j <= i, -inf after i"
    source = "Forgetting Transformer, arXiv 2503.02130"
    cost = "one projection to H numbers per token; one N x N bias per head and block, or none with flex_attention"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 1,
        depth: int = 1,
        gate: Literal["content", "learned", "fixed"] = "content",
        shortest: float = 2.0,
        longest: float = 1024.0,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        check_choice("gate", gate, ("content", "learned", "fixed"))
        if not 0 < shortest <= longest:
            raise ValueError(f"shortest and longest must be positive and in this order, got {shortest} and {longest}")
        self.gate, self.shortest, self.longest = gate, shortest, longest
        self.weight = nn.Parameter(torch.empty(depth, heads, dim)) if gate == "content" else None
        bias = torch.empty(depth, heads)
        if gate == "fixed":
            self.register_buffer("gate_bias", bias)
        else:
            self.gate_bias = nn.Parameter(bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Small weights and no bias for gates of content; otherwise half-lives that are spread over the heads."""
        if self.weight is not None:
            draw_linear_(self.weight)
            self.gate_bias.zero_()
            return
        span = torch.linspace(math.log(self.shortest), math.log(self.longest), self.heads, device=self.gate_bias.device)
        self.gate_bias.copy_(-torch.log(torch.expm1(1.0 / span.exp())))  # log sigmoid of it is -1 / span

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        self.check_positions(positions)
        self.check_layer(layer)
        if self.weight is not None:
            logits = project(self.require_content(x), self.weight[layer], self.gate_bias[layer])  # (B, P + N, H)
        else:
            logits = self.gate_bias[layer].float().expand(1, positions.num_tokens, -1)
        return _summed(F.logsigmoid(logits), positions)


def _summed(steps: Tensor, positions: Positions, temperature: float | None = None) -> CumulativeTerms:
    """Terms whose bias between two tokens is the sum of the steps (B, P + N, H) after the first to the second."""
    total = along_sequence(steps, positions, lambda s: s.cumsum(1)).transpose(1, 2)  # (B, H, P + N)
    return CumulativeTerms(total, sequence_ranks(positions), temperature)


@register_encoding("cable")
class Cable(CausalBias):
    """Context-aware bias: every token and head has its own length, and a key fades by the lengths passed since then.

    The same form as `fox` with the sign of the projection reversed.

    Args:
        unscaled_logits: multiply the products of q and k by the root of the head dim, which undoes the usual scale of
            attention: the released code has none.
    """

    terms = ("bias", "score_mod")
    equation = "b_ij = -sum_(j<t<=i) softplus(w_h . x_t + c_h) for j <= i, -inf after i"
    source = "CABLE, arXiv 2503.08067"
    parity = "official"
    cost = "one projection to H numbers per token; one N x N bias per head and block, or none with flex_attention"

    def __init__(
        self, dim: int, heads: int, axes: int = 1, depth: int = 1, unscaled_logits: bool = False
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        self.unscaled_logits = unscaled_logits
        self.weight = nn.Parameter(torch.empty(depth, heads, dim))
        self.bias = nn.Parameter(torch.empty(depth, heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small weights, no bias."""
        draw_linear_(self.weight, self.bias)

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        self.check_positions(positions)
        self.check_layer(layer)
        lengths = F.softplus(project(self.require_content(x), self.weight[layer], self.bias[layer]))  # (B, P + N, H)
        return _summed(-lengths, positions, self.head_dim**0.5 if self.unscaled_logits else None)


# ---------------------------------------------------------------- biases that need all pairs


def sum_after(pairs: Tensor) -> Tensor:
    """For each query i and key j <= i, the sum of a lower triangle (..., N, N) over the keys after j up to i."""
    pairs = pairs.tril()
    return pairs.sum(-1, keepdim=True) - pairs.cumsum(-1)


def sum_from(pairs: Tensor) -> Tensor:
    """The same with key j itself."""
    return sum_after(pairs) + pairs.tril()


@register_encoding("grape_additive")
class AdditiveGRAPE(CausalBias):
    """Path-integral additive GRAPE (GRAPE-AP): each query judges every step of the path back to a key.

    A step is judged by the product of the query's path vector with that of the token, turned by its coordinate. The
    released model turns all planes by one radian per token.

    Args:
        path_dim: channels of the path vectors of a head; None is the head dim. Even.
    """

    equation = (
        "b_ij = sum_(j<t<=i) m_h log sigmoid(<u_i, R(-t) u_t / rms(u_t)> / E) for j <= i, -inf after i\n"
        "u = W_p x (E channels a head), m_h the slopes of ALiBi; R turns every plane (f, f + E/2) by one angle"
    )
    source = "GRAPE, arXiv 2512.07805"
    promises = ()
    cost = "one projection to H E numbers per token; a second N x N product and a cumulative sum per head and block"

    def __init__(self, dim: int, heads: int, axes: int = 1, depth: int = 1, path_dim: int | None = None) -> None:
        super().__init__(dim, heads, axes, depth)
        self.path_dim = self.head_dim if path_dim is None else path_dim
        if self.path_dim < 2 or self.path_dim % 2:
            raise ValueError(f"path vectors are rotated and need an even number of channels, got {self.path_dim}")
        self.weight = nn.Parameter(torch.empty(depth, heads * self.path_dim, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of deviation 0.5 / sqrt(C), as the released models draw their projections."""
        draw_linear_(self.weight, std=0.5 * self.dim**-0.5)

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        self.check_positions(positions)
        self.check_layer(layer)
        path = project(self.require_content(x), self.weight[layer])
        return PathTerms(path.unflatten(-1, (self.heads, -1)).transpose(1, 2), positions)


class PathTerms(AttentionTerms):
    """Bias of `grape_additive` from path vectors (B, H, P + N, E)."""

    def __init__(self, path: Tensor, positions: Positions) -> None:
        self.path, self.positions = path, positions

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        return causal_pairs((self.path,), self.positions, self._ordered)

    def _ordered(self, path: Tensor, coords: Tensor) -> Tensor:
        slopes = alibi_slopes(path.shape[1], path.device)
        return sum_after(path_potential(path, coords) * slopes[:, None, None])


def path_potential(path: Tensor, coords: Tensor) -> Tensor:
    """What query i makes of a step at token t: log sigmoid(<u_i, R(-p_t) u_t / rms(u_t)> / E).

    Args:
        path: (B, H, N, E) path vectors u.
        coords: (..., N) coordinates p.

    Returns:
        (B, H, N, N), rows for i.
    """
    width = path.shape[-1]
    with full_precision(path):
        unit = F.rms_norm(path, (width,))
        a, b = unit.chunk(2, dim=-1)
        cos, sin = coords.cos()[..., None], coords.sin()[..., None]
        turned = torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)
        return F.logsigmoid(path @ turned.mT / width)


@register_encoding("cope_contextual")
class CoPE(PositionEncoding):
    """Contextual position encoding: the distance to a key is how many gates are open from there to the query.

    A gate is the sigmoid of the logit, so positions can count words or frames. Distances in between whole numbers are
    interpolated, those beyond the table end at its last row. Causal: it hides the keys after a query.

    Args:
        npos_max: number of learned distances.
    """

    kind = "bias"
    supported_axes = (1,)
    per_layer = True
    cumulative = True
    terms = ("bias",)
    equation = (
        "g_ij = sigmoid(q_i . k_j / sqrt(D)), p_ij = min(sum_(j<=t<=i) g_it, npos_max - 1)\n"
        "b_ij = q_i . e[p_ij], e interpolated, for j <= i, -inf after i"
    )
    source = "CoPE, arXiv 2405.18719"
    promises = ("translation_invariant",)
    cost = "a second N x N product, a cumulative sum and two gathers per head and block"

    def __init__(self, dim: int, heads: int, axes: int = 1, depth: int = 1, npos_max: int = 64) -> None:
        super().__init__(dim, heads, axes, depth)
        if npos_max < 2:
            raise ValueError(f"npos_max must be at least 2, got {npos_max}")
        self.npos_max = npos_max
        self.pos_emb = nn.Parameter(torch.empty(depth, self.head_dim, npos_max))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start without a bias."""
        nn.init.zeros_(self.pos_emb)

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        self.check_positions(positions)
        return ContextualTerms(self.pos_emb, positions)


class ContextualTerms(AttentionTerms):
    """Bias of `cope_contextual` from the tables (L, D, M) of L blocks."""

    def __init__(self, pos_emb: Tensor, positions: Positions) -> None:
        self.pos_emb, self.positions = pos_emb, positions

    def layer(self, index: int) -> AttentionTerms:
        layers = len(self.pos_emb)
        if not 0 <= index < layers:
            raise ValueError(f"these are the terms of {layers} blocks, asked for layer {index}")
        return ContextualTerms(self.pos_emb[index : index + 1], self.positions)

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        if len(self.pos_emb) > 1:
            raise ValueError(f"these terms hold those of {len(self.pos_emb)} blocks; in block i use terms.layer(i)")
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return causal_pairs((q, k), self.positions, self._ordered)

    def _ordered(self, q: Tensor, k: Tensor, coords: Tensor) -> Tensor:
        q, k, table = q.float(), k.float(), self.pos_emb[0].float()
        with full_precision(q):
            gates = torch.sigmoid(q @ k.mT * q.shape[-1] ** -0.5)
            return interpolated(q @ table, contextual_distances(gates, table.shape[-1]))


def contextual_distances(gates: Tensor, npos_max: int) -> Tensor:
    """p_ij = min(sum_(j<=t<=i) g_it, npos_max - 1) of gates (..., N, N)."""
    return sum_from(gates).clamp(0.0, npos_max - 1.0)


def interpolated(rows: Tensor, distances: Tensor) -> Tensor:
    """Entries of rows (..., N, M) at distances (..., N, N) in [0, M - 1], linear between whole numbers."""
    low, high = distances.floor(), distances.ceil()
    below, above = (torch.gather(rows, -1, index.long()) for index in (low, high))
    return below + (above - below) * (distances - low)
