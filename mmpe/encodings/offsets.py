"""What biases share that depend on the offset between two tokens: one value for each distinct offset, then a lookup."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..encoding import AttentionTerms, PositionEncoding, ScoreMod
from ..positions import Positions
from ..precision import full_precision

PREFIX_TO_PATCH, PATCH_TO_PREFIX, PREFIX_TO_PREFIX, RESERVED = range(4)
"""Rows that `Offsets.index` keeps free for pairs with a prefix token; offset r has row RESERVED + r."""


@dataclass(frozen=True)
class Offsets:
    """Offsets p_i - p_j (query minus key) of all pairs of tokens.

    Attributes:
        vectors: (R, A) float32: the distinct offsets of a lattice in row-major order, from the most negative one; of
            free coordinates one vector for each pair.
        index: (N, N) or (B, N, N) int64, prefix tokens included: the row of each pair among RESERVED + R.
    """

    vectors: Tensor
    index: Tensor

    def of_pairs(self, rows: Tensor) -> Tensor:
        """Rows (RESERVED + R, ...) of the distinct offsets, laid out over the pairs: (N, N, ...) or (B, N, N, ...)."""
        return rows.index_select(0, self.index.flatten()).reshape(*self.index.shape, *rows.shape[1:])


def offsets_of(positions: Positions) -> Offsets:
    """The offsets between all tokens: (2n - 1) per axis on a lattice of n cells, else one for each pair."""
    return pair_offsets(positions) if positions.lattice is None else _lattice_offsets(positions)


def pair_offsets(positions: Positions) -> Offsets:
    """One offset for each pair of tokens, in the order of the pairs."""
    p = positions.coords
    vectors = (p[..., :, None, :] - p[..., None, :, :]).flatten(0, -2)  # (N N, A) or (B N N, A)
    pairs = torch.arange(RESERVED, RESERVED + vectors.shape[0], device=p.device)
    return Offsets(vectors, _with_prefix(pairs.reshape(*p.shape[:-1], p.shape[-2]), positions.prefix))


def _lattice_offsets(positions: Positions) -> Offsets:
    sizes, extent = positions.lattice, positions.extent
    assert sizes is not None
    assert extent is not None
    cells = cells_of(positions)
    steps: list[Tensor] = []
    code: Tensor | int = 0
    centre = RESERVED
    for a, size in enumerate(sizes):
        step = torch.arange(1 - size, size, dtype=torch.float32, device=positions.device)
        steps.append(step if extent[a] == size else step * (extent[a] / size))
        stride = _product([2 * s - 1 for s in sizes[a + 1 :]])
        code = code + cells[a] * stride
        centre = centre + (size - 1) * stride
    vectors = torch.stack(torch.meshgrid(*steps, indexing="ij"), dim=-1).flatten(0, -2)  # (R, A)
    code = torch.as_tensor(code)
    return Offsets(vectors, _with_prefix(code[..., :, None] - code[..., None, :] + centre, positions.prefix))


def cells_of(positions: Positions) -> list[Tensor]:
    """Cell numbers of the tokens of a lattice, one int64 tensor (..., N) for each axis."""
    sizes, extent = positions.lattice, positions.extent
    if sizes is None or extent is None:
        raise ValueError("these positions are no cells of a lattice")
    columns = positions.coords.unbind(-1)
    scaled = [c if e == n else c * (n / e) for c, n, e in zip(columns, sizes, extent, strict=True)]
    return [c.round().long() for c in scaled]


def _with_prefix(index: Tensor, prefix: int) -> Tensor:
    """Rows and columns of the prefix tokens in front of (..., N, N)."""
    if not prefix:
        return index
    index = F.pad(index, (prefix, 0), value=PATCH_TO_PREFIX)
    index = F.pad(index, (0, 0, prefix, 0), value=PREFIX_TO_PATCH)
    index[..., :prefix, :prefix] = PREFIX_TO_PREFIX
    return index


class OffsetTerms(AttentionTerms):
    """A bias looked up by offset.

    Args:
        rows: (H or 1, RESERVED + R) float32.
        index: (N, N) or (B, N, N) rows of the pairs.
        shared: the terms serve all blocks, so the bias is laid out once and kept for the forward; not on a GPU, where
            flex_attention looks it up without the N x N tensor.
    """

    def __init__(self, rows: Tensor, index: Tensor, shared: bool = False) -> None:
        self.rows, self.index = rows, index
        self.ready = self._lay_out(rows) if shared and not rows.is_cuda else None

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        return self._lay_out(self.rows.to(q.dtype)) if self.ready is None else self.ready

    def _lay_out(self, rows: Tensor) -> Tensor:
        # index_select, because the backward of fancy indexing sorts
        bias = rows.index_select(1, self.index.flatten()).reshape(rows.shape[0], *self.index.shape)
        return bias[None] if self.index.dim() == 2 else bias.transpose(0, 1)  # (1 or B, H, N, N)

    def score_mod(self) -> ScoreMod:
        rows, index, batched, single = self.rows, self.index, self.index.dim() > 2, len(self.rows) == 1

        def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            row = index[b, i, j] if batched else index[i, j]
            return score + (rows[0, row] if single else rows[h, row]).to(score.dtype)

        return mod


class LayeredTerms(AttentionTerms):
    """Terms that differ by block, made when a block asks for its own.

    Args:
        make: the terms of a block, from its index.
        depth: number of blocks.
    """

    def __init__(self, make: Callable[[int], AttentionTerms], depth: int) -> None:
        self.make, self.depth = make, depth

    def layer(self, index: int) -> AttentionTerms:
        if not 0 <= index < self.depth:
            raise ValueError(f"these terms are those of {self.depth} blocks, there is no block {index}")
        return self.make(index)

    def _only(self) -> AttentionTerms:
        if self.depth > 1:
            raise ValueError(f"these are the terms of {self.depth} blocks: take those of one with terms.layer(i)")
        return self.make(0)

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        """Whether those of the only block act on the attention weights."""
        return self._only().needs_weights

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._only().queries_keys(q, k)

    def bias(self, q: Tensor, k: Tensor) -> Tensor | None:
        return self._only().bias(q, k)

    def from_weights(self, weights: Tensor) -> Tensor | None:
        return self._only().from_weights(weights)

    def score_mod(self) -> ScoreMod | None:
        return self._only().score_mod()


class OffsetBias(PositionEncoding):
    """Base of the encodings whose bias depends on the offset between two tokens alone.

    A subclass gives `prepare`, what all blocks share, and `offset_bias`, the bias of one block for each offset.

    Args:
        dim: model width C.
        heads: number of attention heads H.
        axes: number of position axes.
        depth: number of blocks.
        share_layers: all blocks have the same bias.
    """

    kind = "bias"
    terms: ClassVar[tuple[str, ...]] = ("bias", "score_mod")
    promises: ClassVar[tuple[str, ...]] = ("translation_invariant",)
    cost = "one value for each distinct offset, laid out to one H x N x N bias per block"

    def __init__(self, dim: int, heads: int, axes: int, depth: int, share_layers: bool) -> None:
        super().__init__(dim, heads, axes, depth)
        self.share_layers = share_layers
        self.layers = 1 if share_layers else depth

    def offsets(self, positions: Positions) -> Offsets:
        """The offsets of all pairs."""
        return offsets_of(positions)

    def prepare(self, offsets: Offsets, positions: Positions) -> Any:
        """What the blocks share, from the offsets; by default the vectors (R, A)."""
        return offsets.vectors

    def offset_bias(self, prepared: Any, layer: int) -> Tensor:
        """Bias of block `layer` for each offset: (R, H or 1) float32."""
        raise NotImplementedError(f"{type(self).__name__} must define offset_bias()")

    def prefix_bias(self, layer: int) -> Tensor | None:
        """(RESERVED, H or 1): bias of the pairs with prefix tokens; None is zero."""
        return None

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        self.check_positions(positions)
        for p in self.parameters():
            positions = positions.to(p.device)
            break
        offsets = self.offsets(positions)
        make = partial(self.layer_terms, offsets, self.prepare(offsets, positions))
        return make(0) if self.share_layers else LayeredTerms(make, self.depth)

    def layer_terms(self, offsets: Offsets, prepared: Any, layer: int) -> AttentionTerms:
        """The terms of one block."""
        with full_precision(offsets.vectors):
            values = self.offset_bias(prepared, layer).T  # (H, R)
            special = self.prefix_bias(layer)
            rows = F.pad(values, (RESERVED, 0)) if special is None else torch.cat([special.T, values], dim=1)
        return OffsetTerms(rows, offsets.index, self.share_layers)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, share_layers={self.share_layers}"


def squared_lengths(vectors: Tensor) -> Tensor:
    """Squared Euclidean lengths of offsets (R, A), axis by axis: (R,)."""
    first, *others = vectors.unbind(-1)
    return sum((c.square() for c in others), first.square())


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total = total * size
    return total
