"""Rotary encodings that multiply q and k by a learned matrix before they rotate them, and its folding into weights.

Shapes: B batch, H heads (1 where all heads share), L layers (1 where all blocks share), N tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..encoding import AttentionTerms
from ..positions import Positions
from ..precision import full_precision
from ..rotary import RotaryTable
from .lie import repeated_heads
from .rotary import RotaryEncoding, RotaryTerms


def apply_map(x: Tensor, matrix: Tensor) -> Tensor:
    """M x for every token of x (B, H, N, D) with one matrix M (H, D, D) per head, or (1, D, D) for all."""
    matrix = matrix.to(x.dtype)
    with full_precision(x):
        if matrix.shape[0] == 1:
            return x @ matrix[0].mT
        batch, heads, count, width = x.shape
        tokens = x.transpose(0, 1).reshape(heads, batch * count, width)  # one product a head, not one a head and sample
        return torch.bmm(tokens, matrix.mT).view(heads, batch, count, width).transpose(0, 1)


class MappedRotaryTerms(RotaryTerms):
    """Multiplication of q and k by a matrix each, then rotation.

    Args:
        table: cosines and sines.
        maps: the matrices of q and of k, (H, D, D), or (L, H, D, D) where blocks have their own.
        folded: for each block, whether its projections contain the matrices already.
        layers: number of blocks that the table and the matrices hold; None if all blocks share them.
    """

    def __init__(
        self, table: RotaryTable, maps: tuple[Tensor, Tensor], folded: tuple[bool, ...], layers: int | None = None
    ) -> None:
        super().__init__(table, layers=layers)
        self.maps, self.folded = maps, folded

    def layer(self, index: int) -> RotaryTerms:
        if not 0 <= index < len(self.folded):
            raise ValueError(f"these are the terms of {len(self.folded)} blocks, asked for layer {index}")
        own = self.layers is not None
        table = self.table.layer(index) if own else self.table
        if self.folded[index]:
            return RotaryTerms(table)
        query, key = self.maps
        return MappedRotaryTerms(table, (query[index], key[index]) if own else self.maps, (False,))

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.layers is not None or any(self.folded):
            if len(self.folded) > 1:
                raise ValueError(f"these terms hold those of {len(self.folded)} blocks; in block i use terms.layer(i)")
            return self.layer(0).queries_keys(q, k)
        query, key = self.maps
        return super().queries_keys(apply_map(q, query), apply_map(self._repeated(k), key))

    def _repeated(self, x: Tensor) -> Tensor:
        return repeated_heads(super()._repeated(x), self.maps[1].shape[-3])


class MappedRotaryEncoding(RotaryEncoding):
    """Base of the encodings with q' = R M_q q and k' = R M_k k.

    A subclass gives `maps` and `_set_identity`; both matrices can be folded into the projections of q and k, which
    leaves the rotation alone at inference.
    """

    share_layers: bool = False

    def __init__(self, dim: int, heads: int, axes: int = 2, depth: int = 1) -> None:
        super().__init__(dim, heads, axes, depth)
        self.folded = (False,) * depth

    def maps(self) -> tuple[Tensor, Tensor]:
        """M_q and M_k, each (L, H, D, D)."""
        raise NotImplementedError(f"{type(self).__name__} must define maps()")

    def _set_identity(self, slot: int | slice) -> None:
        """Give the parameters of one set (L axis) the values at which M_q = M_k = I."""
        raise NotImplementedError(f"{type(self).__name__} must define _set_identity()")

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        table = self.rotary_table(positions)
        if all(self.folded):
            return RotaryTerms(table, layers=self.table_layers)
        query, key = self.maps()
        if self.share_layers:
            return MappedRotaryTerms(table, (query[0], key[0]), self.folded)
        if self.table_layers is None:
            table = _for_layers(table, self.depth)
        return MappedRotaryTerms(table, (query, key), self.folded, layers=self.depth)

    @torch.no_grad()
    def fold_into(
        self,
        q_weight: Tensor,
        k_weight: Tensor,
        q_bias: Tensor | None = None,
        k_bias: Tensor | None = None,
        layer: int = 0,
    ) -> None:
        """Multiply the projections of block `layer` by its matrices, in place: W_q <- M_q W_q, W_k <- M_k W_k.

        For inference: the block then rotates only, the logits stay the same. The parameters of a folded set become
        those of the identity, so a saved state dict is right in any model and folding twice does no harm; a model
        that loads one multiplies by the identity until it is folded again. With `share_layers` the parameters change
        when the last block is folded, so fold all blocks before saving. Norms of q and k, which would stand between
        projection and matrix, do not allow folding.

        Args:
            q_weight: (H D, C) rows of the q projection, head after head.
            k_weight: (Hkv D, C); Hkv must be H unless all heads share their matrices.
            q_bias: (H D), where the projection has one.
            k_bias: (Hkv D).
            layer: index of the block.
        """
        self.check_layer(layer)
        if self.folded[layer]:
            return
        slot = 0 if self.share_layers else layer
        query, key = (matrices[slot] for matrices in self.maps())  # (H, D, D)
        self._check_rows(q_weight, query.shape[0], "q")
        self._check_rows(k_weight, key.shape[0], "k")
        for matrix, rows in ((query, q_weight), (query, q_bias), (key, k_weight), (key, k_bias)):
            if rows is not None:
                rows.copy_(_fold_rows(matrix, rows))
        self.folded = tuple(done or i == layer for i, done in enumerate(self.folded))
        if not self.share_layers:
            self._set_identity(layer)
        elif all(self.folded):
            self._set_identity(0)

    def fold_(self, attention: nn.Module, layer: int = 0) -> None:
        """Fold into an attention module with a fused linear `qkv` (rows of q, then k, then v), or `q_proj`, `k_proj`.

        Args:
            attention: attention of block `layer`; timm's and the models of mmpe fit.
            layer: index of the block.
        """
        for name in ("q_norm", "k_norm"):
            if not isinstance(getattr(attention, name, nn.Identity()), nn.Identity):
                raise ValueError(f"{self.name} cannot be folded: {name} stands between the projection and its matrix")
        for name in ("q_bias", "k_bias", "v_bias"):
            if getattr(attention, name, None) is not None:
                raise ValueError(f"{name} of {type(attention).__name__} is apart from the Linear; call fold_into")
        if isinstance(qkv := getattr(attention, "qkv", None), nn.Linear):
            self._fold_fused(qkv, layer)
            return
        q, k = (getattr(attention, name, None) for name in ("q_proj", "k_proj"))
        if not isinstance(q, nn.Linear) or not isinstance(k, nn.Linear):
            raise TypeError(
                f"{type(attention).__name__} has neither a Linear qkv nor q_proj and k_proj; call fold_into"
            )
        self.fold_into(q.weight, k.weight, q.bias, k.bias, layer)

    def _fold_fused(self, qkv: nn.Linear, layer: int) -> None:
        queries = self.heads * self.head_dim
        keys, rest = divmod(qkv.out_features - queries, 2)
        if rest or keys < self.head_dim:
            raise ValueError(
                f"qkv has {qkv.out_features} rows, expected {queries} of q and as many of k as of v after them"
            )
        q_weight, k_weight, _ = qkv.weight.split([queries, keys, keys])
        q_bias, k_bias = (None, None) if qkv.bias is None else qkv.bias.split([queries, keys, keys])[:2]
        self.fold_into(q_weight, k_weight, q_bias, k_bias, layer)

    def _check_rows(self, weight: Tensor, own_heads: int, name: str) -> None:
        heads, rest = divmod(weight.shape[0], self.head_dim)
        if rest or (own_heads not in (1, heads)) or (name == "q" and heads != self.heads):
            raise ValueError(
                f"the {name} projection has {weight.shape[0]} rows, expected {self.heads} heads of {self.head_dim}; "
                "with fewer key heads only matrices that all heads share (share_heads=True) can be folded"
            )

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self.folded = (False,) * self.depth  # whatever was folded, the parameters now say what is left to do
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _fold_rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """M (H or 1, D, D) times the rows of a weight (H D, C) or bias (H D), computed in float32."""
    heads = rows.float().reshape(-1, matrix.shape[-1], 1 if rows.dim() == 1 else rows.shape[1])  # (H, D, C)
    with full_precision(heads):
        return (matrix.float() @ heads).reshape(rows.shape).to(rows.dtype)


def _for_layers(table: RotaryTable, layers: int) -> RotaryTable:
    """A table that all layers share, as views for each of them, so that it can be cut like the matrices."""
    cos, sin = (t.expand(layers, *t.shape) for t in (table.cos, table.sin))
    return RotaryTable(cos, sin, None if table.phasor is None else table.phasor.expand(layers, *table.phasor.shape))
