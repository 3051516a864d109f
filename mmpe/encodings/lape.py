"""LaPE: the position embedding gets a LayerNorm of its own in every block and joins the input of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoding import AttentionTerms, PositionEncoding
from ..positions import Positions
from ..precision import full_precision
from ..registry import create_encoding_for, register_encoding


class InputTerms(AttentionTerms):
    """Vectors added to what the qkv projections read.

    Args:
        added: one tensor (1 or B, N, C) for each block.
    """

    def __init__(self, added: Sequence[Tensor]) -> None:
        self.added = tuple(added)

    def layer(self, index: int) -> AttentionTerms:
        return self if len(self.added) == 1 else InputTerms((self.added[index],))

    def inputs(self, h: Tensor) -> Tensor:
        if len(self.added) != 1:
            raise ValueError(f"these are the terms of {len(self.added)} blocks; take those of one with terms.layer(i)")
        return h + self.added[0].to(h.dtype)


@register_encoding("lape")
class LaPE(PositionEncoding):
    """Layer-adaptive embedding: a base embedding, normalised anew in every block, is added to the input of attention.

    Nothing is added to the tokens themselves. With PE_0 what the base would add to them, block l has
    PE_l = LN_l(PE_{l-1}), each norm on top of the one before, and x <- x + Attn(LN(x) + PE_l). The chain does not
    depend on the image: it is computed once in a forward pass. Prefix tokens take part with the base's rows for them;
    a row of zeros becomes the bias of the norm, as in the official code.

    Args:
        base: the encoding that makes PE_0: "ape_learned", "ape_sincos", "fourier_learned", or a sum of such.
        base_options: options of the base.
        grid_size: training grid, for bases that have one.
        prefix: number of prefix tokens with a row of their own, for bases that have such.
        eps: added to the variance in the norms.
    """

    kind = "token"
    per_layer = True
    terms = ("inputs",)
    equation = "PE_l = LN_l(PE_{l-1});  x <- x + Attn(LN(x) + PE_l)"
    source = "Yu et al., LaPE: Layer-adaptive Position Embedding for Vision Transformers, arXiv 2212.05262"
    parity = "official"
    cost = "one norm of N x C and one addition a block"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        base: str = "ape_learned",
        base_options: Mapping[str, Any] | None = None,
        grid_size: int | Sequence[int] = 14,
        prefix: int = 0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        if eps <= 0:
            raise ValueError(f"eps={eps} must be positive")
        offers = {"grid_size": grid_size, "prefix": prefix}
        self.base = create_encoding_for(base, dim, heads, axes, depth, offers, base_options)
        if self.base.embeds_content or not _embeds(self.base):
            raise ValueError(
                f"lape normalises an embedding that is added to the tokens and independent of them; base={base!r} is "
                "none: use ape_learned, ape_sincos or fourier_learned"
            )
        self.eps, self.needs_grid = eps, self.base.needs_grid  # type: ignore[misc]
        self.weight = nn.Parameter(torch.empty(depth, dim))
        self.bias = nn.Parameter(torch.empty(depth, dim))
        self._reset_norms()

    def _reset_norms(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def reset_parameters(self) -> None:
        self.base.reset_parameters()
        self._reset_norms()

    def init_non_persistent_buffers(self) -> None:
        self.base.init_non_persistent_buffers()

    def place(self, positions: Positions, batch: int) -> Positions:
        return self.base.place(positions, batch)

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        self.check_positions(positions)
        coords = positions.coords
        batch = coords.shape[0] if coords.dim() > 2 else 1
        nothing = coords.new_zeros(batch, positions.num_tokens, self.dim)
        pe, added = self.base.embed(nothing, positions), []
        for weight, bias in zip(self.weight, self.bias, strict=True):
            with full_precision(pe):
                pe = F.layer_norm(pe, (self.dim,), weight, bias, self.eps)
            added.append(pe)
        return InputTerms(added)

    def no_weight_decay(self) -> set[str]:
        return {"weight", "bias"} | {f"base.{name}" for name in self.base.no_weight_decay()}


def _embeds(encoding: PositionEncoding) -> bool:
    """Whether an encoding, or any part of a sum, has a token term."""
    parts = getattr(encoding, "parts", (encoding,))
    return any(type(part).embed is not PositionEncoding.embed for part in parts)
