"""Biases that are functions of a distance: `t5` (learned buckets), `fire` (a learned function), `kerple` (a kernel)."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..positions import Positions
from ..registry import register_encoding
from .coordinates import check_choice
from .offsets import OffsetBias, Offsets, pair_offsets, squared_lengths

KerpleForm = Literal["log", "power"]
FireNormalizer = Literal["extent", "query"]


@register_encoding("t5")
class T5Bias(OffsetBias):
    """Bucketed relative bias of T5: exact for near offsets, coarser for far ones; a sum over the axes in 2D and 3D.

    The parameter `table` is (L, A, buckets, H), with one layer if shared. An offset that is no whole number is rounded.
    T5 itself uses no 1/sqrt(D): pass `scale=1.0` to `attend` for that. Prefix tokens have no bias.

    Args:
        buckets: number of buckets of an axis; with both directions each has half of them.
        max_distance: offsets from here on share the last bucket.
        bidirectional: tell keys after the query from keys before it; False (a causal decoder) treats later ones as
            the query itself.
        share_layers: one table for all blocks, as in T5.
        std: standard deviation of the normal initialisation; None is dim ** -0.5.
    """

    equation = "s_ij = <q_i, k_j> * scale + sum_a T_a[h, bucket(p_ja - p_ia)]"
    source = "Raffel et al., T5, arXiv 1910.10683; axes added up"
    parity = "official"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        share_layers: bool = True,
        std: float | None = None,
    ) -> None:
        super().__init__(dim, heads, axes, depth, share_layers)
        exact = buckets // (4 if bidirectional else 2)
        if exact < 1 or max_distance <= exact:
            raise ValueError(
                f"buckets={buckets} must be at least {4 if bidirectional else 2}, and max_distance={max_distance} "
                f"greater than the {exact} offsets that have a bucket of their own"
            )
        if std is not None and std <= 0:
            raise ValueError(f"std must be greater than 0, got {std}")
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.std = dim**-0.5 if std is None else std
        self.table = nn.Parameter(torch.empty(self.layers, axes, buckets, heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.std)

    def prepare(self, offsets: Offsets, positions: Positions) -> Tensor:
        return t5_buckets(-offsets.vectors, self.buckets, self.max_distance, self.bidirectional)

    def offset_bias(self, prepared: Tensor, layer: int) -> Tensor:
        total: Tensor | float = 0.0
        for table, ids in zip(self.table[layer].unbind(0), prepared.unbind(-1), strict=True):
            total = total + table.index_select(0, ids)  # (R, H)
        return torch.as_tensor(total)


def t5_buckets(relative: Tensor, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Tensor:
    """Bucket of each relative position, key minus query, as T5 numbers them: (...) -> (...) int64."""
    relative = relative.round()
    if bidirectional:
        buckets //= 2
        first, distance = (relative > 0).long() * buckets, relative.abs()
    else:
        first, distance = torch.zeros_like(relative, dtype=torch.long), (-relative).clamp(min=0)
    exact = buckets // 2
    # The logarithm and its truncation in float32 decide the borders, so the order of operations is T5's.
    far = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + far.long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance.long(), far)


@register_encoding("kerple")
class Kerple(OffsetBias):
    """Kernelised relative bias: attention falls with the distance by a power or a logarithm that each head learns.

    "log" is -p ln(1 + a d), "power" -a d^p with p at most 2; both parameters stay at or above 0.01. Like the official
    code, a parameter below that bound keeps its gradient. The distance is Euclidean, in any number of axes; it cannot
    tell directions. Prefix tokens have no bias.

    Args:
        form: "log" or "power".
        share_layers: one pair of parameters for all blocks.
    """

    per_layer = True
    equation = "s_ij = <q_i, k_j> * scale - p_h ln(1 + a_h |p_i - p_j|),   or - a_h |p_i - p_j|^p_h"
    source = "Chi et al., KERPLE, arXiv 2205.09921; Euclidean distance in 2D and 3D"
    promises = ("translation_invariant", "rotation_invariant", "mirror_invariant", "symmetric_bias")

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        form: KerpleForm = "log",
        share_layers: bool = False,
    ) -> None:
        super().__init__(dim, heads, axes, depth, share_layers)
        check_choice("form", form, get_args(KerpleForm))
        self.form: KerpleForm = form
        self.p = nn.Parameter(torch.empty(self.layers, heads))
        self.a = nn.Parameter(torch.empty(self.layers, heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.p, 0.0, 2.0)
        nn.init.uniform_(self.a, 0.0, 1.0)

    def prepare(self, offsets: Offsets, positions: Positions) -> Tensor:
        return squared_lengths(offsets.vectors).sqrt()

    def offset_bias(self, prepared: Tensor, layer: int) -> Tensor:
        return kerple_bias(prepared, self.p[layer], self.a[layer], self.form)


def kerple_bias(distance: Tensor, p: Tensor, a: Tensor, form: KerpleForm = "log", least: float = 0.01) -> Tensor:
    """-p ln(1 + a d) or -a d^p of distances (R,) and parameters (H,): (R, H)."""
    d, a = distance[:, None], _clamped(a, least)
    if form == "log":
        return -_clamped(p, least) * torch.log1p(a * d)
    return -a * d ** _clamped(p, least, 2.0)


def _clamped(x: Tensor, least: float, most: float | None = None) -> Tensor:
    """Within bounds, but with the gradient of x itself: a parameter that left them can come back."""
    return x + (x.clamp(least, most) - x).detach()


@register_encoding("fire")
class Fire(OffsetBias):
    """Functional interpolation: a small network of the relative distance, divided by the length, on a log scale.

    With psi(x) = ln(1 + |c x|) the bias is MLP(psi(d) / (psi(max(m, L)) + eps)), where c and L are learned and m is the
    length that is interpolated over. The distance is Euclidean, in any number of axes; it cannot tell directions.
    Prefix tokens have no bias.

    Args:
        hidden: width of the hidden layer.
        init_length: L at the start, in grid units; below it distances are not interpolated.
        init_c: c at the start.
        normalizer: what m is. "extent" is the diagonal of the grid (of loose points without an extent, their largest
            distance), for attention in both directions; "query" the index of the query, as the paper's causal decoder
            has it (1 axis only), which is not translation invariant.
        eps: added to the denominator.
        share_layers: one function for all blocks.
    """

    per_layer = True
    equation = "s_ij = <q_i, k_j> * scale + MLP_h(psi(|p_i - p_j|) / (psi(max(m, L)) + eps)),   psi(x) = ln(1 + |c x|)"
    source = "Li et al., FIRE, arXiv 2310.04418; code of TAPE, arXiv 2501.00712; Euclidean distance in 2D and 3D"
    promises = ("translation_invariant", "rotation_invariant", "mirror_invariant")
    parity = "official"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        hidden: int = 32,
        init_length: float = 512.0,
        init_c: float = 0.1,
        normalizer: FireNormalizer = "extent",
        eps: float = 1e-6,
        share_layers: bool = False,
    ) -> None:
        super().__init__(dim, heads, axes, depth, share_layers)
        check_choice("normalizer", normalizer, get_args(FireNormalizer))
        if normalizer == "query" and axes != 1:
            raise ValueError(f"normalizer='query' is for sequences (axes=1), got axes={axes}; use 'extent'")
        if hidden < 1 or init_length <= 0 or eps < 0:
            raise ValueError(f"hidden={hidden}, init_length={init_length} must be positive, eps={eps} not negative")
        self.normalizer: FireNormalizer = normalizer
        self.init_length, self.init_c, self.eps = init_length, init_c, eps
        layers = self.layers
        self.c = nn.Parameter(torch.empty(layers))
        self.length_factor = nn.Parameter(torch.empty(layers))
        self.w1 = nn.Parameter(torch.empty(layers, hidden, 1))
        self.b1 = nn.Parameter(torch.empty(layers, hidden))
        self.w2 = nn.Parameter(torch.empty(layers, heads, hidden))
        self.b2 = nn.Parameter(torch.empty(layers, heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.c.fill_(self.init_c)
        self.length_factor.fill_(1.0)
        for weight, bias in ((self.w1, self.b1), (self.w2, self.b2)):
            limit = weight.shape[-1] ** -0.5  # the default of a linear layer
            for p in (weight, bias):
                nn.init.uniform_(p, -limit, limit)

    def offsets(self, positions: Positions) -> Offsets:
        # Divided by the index of the query, equal offsets have different values.
        return pair_offsets(positions) if self.normalizer == "query" else super().offsets(positions)

    def prepare(self, offsets: Offsets, positions: Positions) -> tuple[Tensor, Tensor]:
        """Distances (R,) and the lengths that divide them, (R,) or a single one."""
        distance = squared_lengths(offsets.vectors).sqrt()
        if self.normalizer == "query":
            query = positions.coords  # (..., N, 1)
            return distance, query.expand(*query.shape[:-1], query.shape[-2]).flatten()
        if positions.extent is None:
            return distance, distance.amax()
        diagonal = sum((e - 1) ** 2 for e in positions.extent) ** 0.5
        return distance, torch.full_like(distance[:1], diagonal)

    def offset_bias(self, prepared: tuple[Tensor, Tensor], layer: int) -> Tensor:
        distance, length = prepared
        c, least = self.c[layer], (self.length_factor[layer] * self.init_length).abs()
        where = _psi(c, distance) / (_psi(c, torch.maximum(length, least)) + self.eps)
        hidden = F.relu(F.linear(where[:, None], self.w1[layer], self.b1[layer]))  # (R, hidden)
        return F.linear(hidden, self.w2[layer], self.b2[layer])


def _psi(c: Tensor, x: Tensor) -> Tensor:
    return torch.log((c * x).abs() + 1.0)
