"""SeqPE: positions spelt as digits, read by a tiny transformer; its output acts on queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoding import AttentionTerms, FloatModule, PositionEncoding
from ..positions import Positions
from ..precision import full_precision
from ..registry import register_encoding
from .coordinates import check_choice
from .seqpe_losses import contrastive_loss, digits_of, draw_candidates, draw_windows, transfer_loss

Mode = Literal["attn_mul", "attn_add", "attn_scalar", "input_add"]


@register_encoding("seqpe")
class SeqPE(PositionEncoding):
    """Sequential encoding: a tiny causal transformer reads the digits of a position, and its output meets q and k.

    Each coordinate is rounded, held in the range of its digits and spelt with leading zeros, one coordinate after the
    other, so any index of so many digits can be read at test time. The embedding PE does not depend on the image: one
    pass over the distinct positions serves all blocks, each of which has a projection of PE to pe_q and pe_k.

    "attn_mul" (the paper's recipe) multiplies q and k by pe_q and pe_k, "attn_add" adds them, "attn_scalar" adds
    pe_q pe_k' to q k' before scaling, and "input_add" adds PE to the tokens once. The first `prefix` tokens have
    learned vectors of their own; registers after those are left alone.

    Training has two losses more, weighted 0.1 each: `auxiliary_loss` draws and adds them.

    Args:
        mode: what PE does, see above.
        pe_dim: width of the digit transformer; None takes the model width, at most 384.
        pe_heads: heads of the digit transformer; None takes those of the model.
        pe_layers: blocks of the digit transformer.
        max_digits: digits of a coordinate; None is 4 in one axis and 2 in more (10000 positions).
        bidirectional: let digits see later digits.
        mask_padding: hide leading zeros.
        final_norm: LayerNorm before the last projection.
        temperature: divides PE.
        share_heads: one pe_q and pe_k for all heads, which grouped queries need.
        prefix: number of prefix tokens with a vector of their own.
        grid_size: training grid, the window of the transfer loss.
        random_shift: probability that the positions of a training step start at a random place.
        dropout: dropout in the digit transformer.
        loss_weight: weight of each of the two losses.
    """

    kind = "token"
    per_layer = True
    terms = ("embed", "queries_keys")
    equation = "PE_i = Transformer(digits of p_i) / T;  (pe_q, pe_k) = W_l PE;  (q, k)_i <- (q, k)_i * (pe_q, pe_k)_i"
    source = "Li et al., SeqPE: Transformer with Sequential Position Encoding, arXiv 2506.13277"
    parity = "official"
    cost = "a small transformer over A x digits + 1 tokens for each position, once; one projection of N x C a block"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        mode: Mode = "attn_mul",
        pe_dim: int | None = None,
        pe_heads: int | None = None,
        pe_layers: int = 2,
        max_digits: int | None = None,
        bidirectional: bool = False,
        mask_padding: bool = False,
        final_norm: bool = True,
        temperature: float = 1.0,
        share_heads: bool = False,
        prefix: int = 0,
        grid_size: int | Sequence[int] = 14,
        random_shift: float = 0.1,
        dropout: float = 0.0,
        loss_weight: float = 0.1,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        check_choice("mode", mode, get_args(Mode))
        if temperature <= 0 or prefix < 0 or not 0 <= random_shift <= 1 or loss_weight < 0:
            raise ValueError(
                f"temperature={temperature} must be positive, prefix={prefix} and loss_weight={loss_weight} not "
                f"negative, random_shift={random_shift} a probability"
            )
        self.mode: Mode = mode
        self.temperature, self.share_heads, self.prefix = temperature, share_heads, prefix
        self.random_shift, self.loss_weight = random_shift, loss_weight
        self.grid_size = (grid_size,) * axes if isinstance(grid_size, int) else tuple(grid_size)
        digits = (4 if axes == 1 else 2) if max_digits is None else max_digits
        pe_dim = min(dim, 384) if pe_dim is None else pe_dim
        self.digits = DigitTransformer(
            dim, axes, digits, pe_dim, heads if pe_heads is None else pe_heads, pe_layers, bidirectional, mask_padding,
            final_norm, dropout,
        )  # fmt: skip
        if len(self.grid_size) != axes or not all(1 <= size <= self.digits.limit for size in self.grid_size):
            raise ValueError(
                f"grid_size={grid_size} must be one size or {axes}, each from 1 to {self.digits.limit} (max_digits)"
            )
        width = self.head_dim if share_heads else dim
        self.prefix_pe = nn.Parameter(torch.empty(prefix, dim)) if prefix else None
        acts_inside = mode != "input_add"
        self.qk_weight = nn.Parameter(torch.empty(depth, 2 * width, dim)) if acts_inside else None
        self.qk_bias = nn.Parameter(torch.empty(depth, 2 * width)) if acts_inside else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.digits.reset_parameters()
        for weight in (self.prefix_pe, self.qk_weight):
            if weight is not None:
                nn.init.trunc_normal_(weight, std=0.02)
        if self.qk_bias is not None:
            nn.init.zeros_(self.qk_bias)

    def place(self, positions: Positions, batch: int) -> Positions:
        if not self.training or self.random_shift == 0 or positions.extent is None:
            return positions
        room = torch.tensor([max(self.digits.limit - int(size), 0) for size in positions.extent])
        draws = torch.rand(self.axes + 1, device=positions.device)
        start = torch.floor(draws[1:] * (room.to(positions.device) + 1)) * (draws[0] < self.random_shift)
        return positions.with_coords(positions.coords + start)

    def embed(self, x: Tensor, positions: Positions, layer: int = 0) -> Tensor:
        if self.mode != "input_add" or layer != 0:
            return x
        self.check_positions(positions)
        pe = self._with_registers(self.rows(positions), positions, 0.0)
        return x + pe.to(x.dtype)

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        self.check_positions(positions)
        if self.mode == "input_add":
            return AttentionTerms()
        of_layer = partial(self._layer_terms, self.rows(positions), positions)
        return of_layer(0) if self.depth == 1 else LayeredTerms(of_layer, self.depth)

    def rows(self, positions: Positions) -> Tensor:
        """PE of the named prefix tokens and of the patches: (..., prefix + N, C) float32."""
        if self.prefix > positions.prefix:
            raise ValueError(
                f"seqpe has vectors for {self.prefix} prefix tokens, the positions have {positions.prefix}; "
                f"build it with prefix={positions.prefix}"
            )
        self._check_range(positions)
        pe = self.encode(positions.coords)
        if self.prefix_pe is None:
            return pe
        return torch.cat([self.prefix_pe.expand(*pe.shape[:-2], -1, -1), pe], dim=-2)

    def encode(self, coords: Tensor) -> Tensor:
        """PE of coordinates (..., A) -> (..., C) float32."""
        index = coords.round().clamp(0, self.digits.limit - 1).long()
        return self.digits(digits_of(index, self.digits.max_digits)) / self.temperature

    def auxiliary_loss(self, pivots: int = 32, candidates: int = 64, windows: int = 32, cells: int = 64) -> Tensor:
        """The contrastive and the transfer loss on positions drawn now, weighted and added up.

        Args:
            pivots: positions that must recognise the nearest of their candidates.
            candidates: candidates of each pivot.
            windows: shifted windows whose similarities must be those of the training grid.
            cells: cells that are compared in each window.
        """
        limit, device = self.digits.limit, self.digits.token.device
        pivot, others, nearest = draw_candidates(pivots, candidates, self.axes, self.digits.max_digits, device)
        loss = contrastive_loss(self.encode(pivot), self.encode(others), nearest)
        inside, shifted = draw_windows(windows, cells, self.grid_size, limit, device)
        loss = loss + transfer_loss(self.encode(inside), self.encode(shifted), self.heads)
        return self.loss_weight * loss

    def _check_range(self, positions: Positions) -> None:
        sizes = positions.grid_size
        if sizes is not None and not torch.compiler.is_exporting() and max(sizes) > self.digits.limit:
            raise ValueError(
                f"a grid of {tuple(sizes)} does not fit into max_digits={self.digits.max_digits}; build seqpe with "
                f"max_digits={len(str(max(sizes) - 1))}"
            )

    def _layer_terms(self, pe: Tensor, positions: Positions, layer: int) -> AttentionTerms:
        self.check_layer(layer)
        if self.qk_weight is None or self.qk_bias is None:
            return AttentionTerms()
        with full_precision(pe):
            both = F.linear(pe, self.qk_weight[layer], self.qk_bias[layer])
        neutral = 1.0 if self.mode == "attn_mul" else 0.0
        both = self._with_registers(both, positions, neutral)
        pe_q, pe_k = both.unflatten(-1, (2, -1, self.head_dim)).movedim(-3, 0).transpose(-3, -2)  # (.., H, N, D) each
        return SeqPETerms(self.mode, pe_q, pe_k)

    def _with_registers(self, rows: Tensor, positions: Positions, neutral: float) -> Tensor:
        """Neutral rows for the prefix tokens that have none."""
        missing = positions.prefix - self.prefix
        if not missing:
            return rows
        between = rows.new_full((*rows.shape[:-2], missing, rows.shape[-1]), neutral)
        return torch.cat([rows[..., : self.prefix, :], between, rows[..., self.prefix :, :]], dim=-2)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}, prefix={self.prefix}"


class SeqPETerms(AttentionTerms):
    """Vectors that meet q and k, as `SeqPE` describes.

    Args:
        mode: "attn_mul", "attn_add" or "attn_scalar".
        pe_q: (N, D) with leading (H,) or (B, H), H = 1 for all heads.
        pe_k: as `pe_q`.
    """

    def __init__(self, mode: Mode, pe_q: Tensor, pe_k: Tensor) -> None:
        self.mode, self.pe_q, self.pe_k = mode, pe_q, pe_k

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._joined(q, self.pe_q), self._joined(k, self.pe_k)

    def _joined(self, x: Tensor, pe: Tensor) -> Tensor:
        if pe.shape[-3] not in (1, x.shape[1]):
            raise ValueError(
                f"seqpe has vectors for {pe.shape[-3]} heads and meets {x.shape[1]} key heads; grouped queries need "
                "share_heads=True"
            )
        if self.mode == "attn_scalar":
            return torch.cat([x, pe.to(x.dtype).expand(*x.shape[:-1], -1)], dim=-1)
        return (x * pe if self.mode == "attn_mul" else x + pe).to(x.dtype)


class LayeredTerms(AttentionTerms):
    """Terms of several blocks, each made when it is asked for.

    Args:
        make: index of a block -> its terms.
        depth: number of blocks.
    """

    def __init__(self, make: Callable[[int], AttentionTerms], depth: int) -> None:
        self.make, self.depth = make, depth

    def layer(self, index: int) -> AttentionTerms:
        return self.make(index)

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        raise ValueError(f"these are the terms of {self.depth} blocks; take those of one with terms.layer(i)")


class _Linear(FloatModule, nn.Linear):
    """A linear layer that stays float32."""


class _Norm(FloatModule, nn.LayerNorm):
    """A norm that stays float32."""


class DigitBlock(nn.Module):
    """Pre-norm transformer block of the digits (as GPT-2: 4x MLP, tanh form of GELU).

    Args:
        dim: width P.
        heads: attention heads.
        dropout: dropout of both residual branches and of the attention weights.
    """

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = _Norm(dim), _Norm(dim)
        self.qkv, self.proj = _Linear(dim, 3 * dim), _Linear(dim, dim)
        self.fc1, self.fc2 = _Linear(dim, 4 * dim), _Linear(4 * dim, dim)

    def forward(self, x: Tensor, visible: Tensor, last_only: bool = False) -> Tensor:
        """Digits x (n, S, P) -> (n, S, P), or the last one alone (n, 1, P); `visible` broadcasts to (n, 1, S, S)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if last_only:
            q, x, visible = q[:, :, -1:], x[:, -1:], visible[..., -1:, :]
        rate = self.dropout if self.training else 0.0
        o = F.scaled_dot_product_attention(q, k, v, visible, dropout_p=rate)
        x = x + F.dropout(self.proj(o.transpose(1, 2).flatten(2)), rate)
        return x + F.dropout(self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh")), rate)


class DigitTransformer(FloatModule):
    """Digits of positions -> embeddings: a transformer whose last token, a learned one, is the answer.

    Args:
        out_dim: width of the embeddings.
        axes: coordinates of a position.
        max_digits: digits of a coordinate.
        dim: width P.
        heads: attention heads.
        layers: number of blocks.
        bidirectional: let digits see later digits.
        mask_padding: hide leading zeros.
        final_norm: norm before the last projection.
        dropout: dropout in the blocks.
    """

    def __init__(
        self,
        out_dim: int,
        axes: int,
        max_digits: int,
        dim: int,
        heads: int,
        layers: int = 2,
        bidirectional: bool = False,
        mask_padding: bool = False,
        final_norm: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if min(dim, heads, layers, max_digits) < 1 or dim % heads:
            raise ValueError(
                f"the digit transformer needs pe_dim={dim} divisible by pe_heads={heads}, and pe_layers={layers} and "
                f"max_digits={max_digits} of at least 1"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} must be in [0, 1)")
        self.axes, self.max_digits, self.limit = axes, max_digits, 10**max_digits
        self.bidirectional, self.mask_padding = bidirectional, mask_padding
        self.token = nn.Parameter(torch.empty(10, dim))
        self.place = nn.Parameter(torch.empty(axes * max_digits, dim))
        self.axis = nn.Parameter(torch.empty(axes, dim)) if axes > 1 else None
        self.cls = nn.Parameter(torch.empty(dim))
        self.blocks = nn.ModuleList(DigitBlock(dim, heads, dropout) for _ in range(layers))
        self.norm = _Norm(dim) if final_norm else nn.Identity()
        self.out = _Linear(dim, out_dim)

    def reset_parameters(self) -> None:
        """Truncated normal weights of deviation 0.02, biases of zero, as the official code."""
        for table in (self.token, self.place, self.axis, self.cls):
            if table is not None:
                nn.init.trunc_normal_(table, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def forward(self, digits: Tensor) -> Tensor:
        """Digits (..., A * max_digits) int64 -> (..., out_dim) float32."""
        flat = digits.flatten(0, -2)
        x = self.token[flat] + self.place
        if self.axis is not None:
            x = x + self.axis.repeat_interleave(self.max_digits, 0)
        x = torch.cat([x, self.cls.expand(x.shape[0], 1, -1)], dim=1)  # (n, S, P), the answer last
        visible = self._visible(flat)
        with full_precision(x):
            for block in self.blocks[:-1]:
                x = block(x, visible)
            x = self.blocks[-1](x, visible, last_only=True)
            return self.out(self.norm(x)).reshape(*digits.shape[:-1], -1)

    def _visible(self, digits: Tensor) -> Tensor:
        """What each token may attend to, at least itself: broadcasts to (n, 1, S, S)."""
        size = digits.shape[-1] + 1
        visible = torch.ones(1, 1, size, size, dtype=torch.bool, device=digits.device)
        visible = visible if self.bidirectional else visible.tril()
        if self.mask_padding:
            keys = F.pad(~leading_zeros(digits, self.max_digits), (0, 1), value=True)  # (n, S)
            visible = visible & keys[:, None, None, :]
            visible = visible | torch.eye(size, dtype=torch.bool, device=digits.device)
        return visible


def leading_zeros(digits: Tensor, max_digits: int) -> Tensor:
    """Which digits (..., A * max_digits) are zeros that only fill up; the last digit of a coordinate never is."""
    numbers = digits.unflatten(-1, (-1, max_digits))
    leading = numbers.cumsum(-1) == 0
    leading[..., -1] = False
    return leading.flatten(-2)
