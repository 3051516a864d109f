"""`irpe`: relative offsets fall into buckets, and each bucket has a bias or a vector that meets q, k or v."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoding import AttentionTerms
from ..positions import Positions
from ..precision import full_precision
from ..registry import register_encoding
from .coordinates import check_choice
from .offsets import RESERVED, OffsetBias, Offsets, OffsetTerms, squared_lengths

IRPEMethod = Literal["euc", "quant", "cross", "product"]
IRPEMode = Literal["contextual", "bias"]
Buckets = list[Tensor]  # for each table the bucket of every offset, those of prefix pairs first: (RESERVED + R,) int64


@register_encoding("irpe")
class IRPE(OffsetBias):
    """Image relative position encoding: offsets in buckets, fine when near and coarse when far.

    A piecewise function g keeps offsets up to alpha = ratio, compresses those up to gamma = 8 ratio logarithmically and
    clips at beta = 2 ratio. The bucket is that of the distance ("euc"), of the squared distance ("quant"), of each
    axis with a table of its own, added up ("cross"), or of all axes together ("product"). Mode "contextual" gives each
    bucket a vector: <q_i, w> for "k", <k_j, w> for "q", and attn_ij w added to the output for "v"; mode "bias" a
    number. The vectors meet q, k scaled by D ** -0.5. Everything starts at zero.

    The parameters `table_q`, `table_k` and `table_v` are (L, T, H, D, buckets), or (L, T, H, buckets) for biases, with
    T tables and one head if shared. The official models keep a learned absolute embedding: "ape_learned+irpe".

    Args:
        method: "euc", "quant", "cross" or "product"; the first two cannot tell directions.
        mode: "contextual" or "bias".
        rpe_on: which of q, k and v meet the buckets, such as "k", "qk" or "qkv". "v" needs the attention weights in
            memory, and has no mode "bias".
        share_heads: one table for all heads.
        ratio: scales alpha, beta and gamma; 1.9 makes 49 buckets of "product", 20 and 33 are the paper's for the rest.
        prefix_bucket: give all pairs with a prefix token one more bucket; False gives them nothing.
    """

    per_layer = True
    terms: ClassVar[tuple[str, ...]] = ("bias", "from_weights", "score_mod")
    equation = (
        "s_ij = <q_i, k_j> * scale + <q_i * scale, Wk[u(p_i - p_j)]> + <k_j * scale, Wq[u(p_j - p_i)]>,\n"
        "o_i = sum_j a_ij (v_j + Wv[u(p_i - p_j)]);   mode 'bias': s_ij + b[u(p_i - p_j)]"
    )
    source = "Wu et al., Rethinking and Improving Relative Position Encoding, arXiv 2107.14222"
    promises = ("translation_invariant", "nothing_at_init")
    parity = "official"
    cost = "q times one vector per bucket, gathered to one B x H x N x N bias per block; on v explicit attention"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        method: IRPEMethod = "product",
        mode: IRPEMode = "contextual",
        rpe_on: str = "k",
        share_heads: bool = True,
        ratio: float = 1.9,
        prefix_bucket: bool = True,
    ) -> None:
        super().__init__(dim, heads, axes, depth, share_layers=False)
        check_choice("method", method, get_args(IRPEMethod))
        check_choice("mode", mode, get_args(IRPEMode))
        _check_rpe_on(rpe_on, mode)
        if not ratio >= 0.5:
            raise ValueError(f"ratio must be at least 0.5, so that there is a bucket beside the first, got {ratio}")
        self.method: IRPEMethod = method
        self.mode: IRPEMode = mode
        self.rpe_on, self.share_heads, self.ratio, self.prefix_bucket = rpe_on, share_heads, ratio, prefix_bucket
        side = 2 * int(2 * ratio) + 1
        self.patch_buckets = side**axes if method == "product" else side
        tables, table_heads = axes if method == "cross" else 1, 1 if share_heads else heads
        inner = (self.head_dim,) if mode == "contextual" else ()
        shape = (depth, tables, table_heads, *inner, self.patch_buckets + prefix_bucket)
        for on in rpe_on:
            self.register_parameter(f"table_{on}", nn.Parameter(torch.empty(shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for p in self.parameters():
            nn.init.zeros_(p)

    def prepare(self, offsets: Offsets, positions: Positions) -> Any:
        """Mode "bias": the buckets of query minus key, and of key minus query. Else those of all pairs of tokens."""
        there = self.buckets(offsets.vectors)
        if self.mode == "bias":
            return there, self.buckets(-offsets.vectors)
        return [offsets.of_pairs(bucket) for bucket in there]

    def buckets(self, vectors: Tensor) -> Buckets:
        """Buckets of the offsets (R, A) in each table, with those of the prefix pairs in front: (RESERVED + R,)."""
        found = offset_buckets(vectors, self.method, self.ratio)
        return [F.pad(bucket, (RESERVED, 0), value=self.patch_buckets) for bucket in found]

    def layer_terms(self, offsets: Offsets, prepared: Any, layer: int) -> AttentionTerms:
        tables = {on: self._with_prefix(getattr(self, f"table_{on}")[layer]) for on in self.rpe_on}
        if self.mode == "bias":
            return self._bias_terms(tables, offsets, *prepared)
        return ContextualTerms(tables, prepared, self.head_dim**-0.5)

    def _with_prefix(self, table: Tensor) -> Tensor:
        return table if self.prefix_bucket else F.pad(table, (0, 1))  # a bucket of zeros

    def _bias_terms(self, tables: dict[str, Tensor], offsets: Offsets, there: Buckets, back: Buckets) -> OffsetTerms:
        rows: Tensor | float = 0.0
        for on, table in tables.items():
            for t, bucket in zip(table.unbind(0), there if on == "k" else back, strict=True):
                rows = rows + t.index_select(1, bucket)  # (H or 1, RESERVED + R)
        return OffsetTerms(torch.as_tensor(rows), offsets.index)

    def extra_repr(self) -> str:
        return (
            f"{super(OffsetBias, self).extra_repr()}, method={self.method!r}, mode={self.mode!r}, "
            f"rpe_on={self.rpe_on!r}, share_heads={self.share_heads}, ratio={self.ratio}"
        )


class ContextualTerms(AttentionTerms):
    """What q, k and the attention weights make of the vectors of the buckets.

    Products with all vectors come first, (B, H, N, buckets), and are gathered by bucket afterwards; for v the weights
    are first summed by bucket. No tensor has N x N x D entries.

    Args:
        tables: for some of "q", "k", "v" the vectors (T, H or 1, D, buckets).
        buckets: for each of the T tables the buckets (N, N) or (B, N, N) of the pairs, query first.
        scale: factor on q and k.
    """

    def __init__(self, tables: dict[str, Tensor], buckets: list[Tensor], scale: float) -> None:
        self.tables, self.buckets, self.scale = tables, buckets, scale
        self.needs_weights = "v" in tables

    def bias(self, q: Tensor, k: Tensor) -> Tensor | None:
        terms = []
        if "k" in self.tables:
            terms += self._gathered(q, self.tables["k"])
        if "q" in self.tables:
            groups = q.shape[1] // k.shape[1]
            keys = k if groups == 1 else k.repeat_interleave(groups, dim=1)
            # Row j of the buckets is that of key j as a "query": the offset turns round.
            terms += [term.transpose(-1, -2) for term in self._gathered(keys, self.tables["q"])]
        return None if not terms else sum(terms[1:], terms[0])

    def _gathered(self, x: Tensor, table: Tensor) -> list[Tensor]:
        """<x_i * scale, w[bucket(i, j)]> (B, H, N, N) of each table."""
        x = x[..., : table.shape[-2]]  # other terms may have widened q and k
        found = []
        for vectors, bucket in zip(table.unbind(0), self.buckets, strict=True):
            # A single matrix where the heads share it: a batch of one would be copied for every head.
            matrix = (vectors[0] if len(vectors) == 1 else vectors) * self.scale
            with full_precision(x):
                products = x @ matrix.to(x.dtype)  # (B, H, N, buckets)
            found.append(torch.gather(products, -1, _for_heads(bucket, products)))
        return found

    def from_weights(self, weights: Tensor) -> Tensor | None:
        if "v" not in self.tables:
            return None
        terms = []
        for vectors, bucket in zip(self.tables["v"].unbind(0), self.buckets, strict=True):
            sums = weights.new_zeros(*weights.shape[:-1], vectors.shape[-1])
            sums = sums.scatter_add(-1, _for_heads(bucket, weights), weights)  # (B, H, N, buckets)
            matrix = (vectors[0] if len(vectors) == 1 else vectors).mT
            with full_precision(weights):
                terms.append(sums @ matrix.to(weights.dtype))
        return sum(terms[1:], terms[0])


def _for_heads(bucket: Tensor, like: Tensor) -> Tensor:
    """(N, N) or (B, N, N) -> a view (B, H, N, N)."""
    return (bucket if bucket.dim() == 2 else bucket[:, None]).expand(*like.shape[:2], -1, -1)


def offset_buckets(vectors: Tensor, method: IRPEMethod = "product", ratio: float = 1.9) -> list[Tensor]:
    """Buckets, counted from 0, of offsets (R, A): one tensor (R,) int64 for each table of the method."""
    g = partial(piecewise_index, alpha=ratio, beta=2 * ratio, gamma=8 * ratio)
    most = int(2 * ratio)
    if method in ("euc", "quant"):
        squares = squared_lengths(vectors)
        return [g(squares if method == "quant" else squares.sqrt().round()) + most]
    columns = [g(c) + most for c in vectors.unbind(-1)]
    if method == "cross":
        return columns
    index = columns[0]
    for column in columns[1:]:
        index = index * (2 * most + 1) + column
    return [index]


def piecewise_index(x: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    """g(x): x rounded where |x| <= alpha, else compressed logarithmically and clipped at beta; (...) int64.

    The clipped value is cut to a whole number, not rounded: with beta = 3.8 the last index is 3.
    """
    x = x.float()
    size = x.abs()
    # The clamp keeps the logarithm of what is not compressed finite.
    ratio = torch.log(size.clamp(min=alpha) / alpha) / math.log(gamma / alpha)
    far = (alpha + ratio * (beta - alpha)).round().clamp(max=beta) * x.sign()
    return torch.where(size <= alpha, x.round(), far).long()


def _check_rpe_on(rpe_on: str, mode: IRPEMode) -> None:
    if not rpe_on or set(rpe_on) - set("qkv") or len(set(rpe_on)) < len(rpe_on):
        raise ValueError(f"rpe_on={rpe_on!r} must name some of q, k and v, each once, such as 'k' or 'qkv'")
    if mode == "bias" and "v" in rpe_on:
        raise ValueError("a bias on v does not exist: use mode='contextual', or rpe_on without 'v'")
