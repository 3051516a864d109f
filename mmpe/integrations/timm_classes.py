"""Subclasses of timm's models and attention layers that take an encoding of mmpe.

`set_position_encoding` changes the class of an existing object, so parameters, hooks, names and wrappers stay what they
are. The position terms travel to the attention layers inside of timm's own `attn_mask` argument, which every block of
timm passes on; nothing is written to a module in forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timm.layers import Attention, AttentionRope  # noqa: TID253  (imported only by users of this bridge)
from timm.models.eva import Eva, EvaAttention  # noqa: TID253
from timm.models.vision_transformer import VisionTransformer  # noqa: TID253
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..attention import attend
from ..encoding import AttentionTerms, PositionEncoding
from ..positions import Positions
from .backbone import BlockTerms, drop_patches
from .features import forward_intermediates


@dataclass(frozen=True)
class _Carrier:
    """What a block's attention needs besides its input, in the place of timm's mask."""

    terms: BlockTerms
    layer: int
    mask: Tensor | None

    def of(self, h: Tensor) -> AttentionTerms:
        return self.terms(h, self.layer)


class _EncodedAttention:
    """Attention with the terms that its mask argument carries; without a carrier it is timm's own."""

    def forward(self, x: Tensor, *args: Any, attn_mask: Any = None, is_causal: bool = False, **kwargs: Any) -> Tensor:
        layer: Any = self
        if not isinstance(attn_mask, _Carrier):
            return super().forward(x, *args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)  # type: ignore[misc]
        terms = attn_mask.of(x)
        x = terms.inputs(x)
        q, k, v = _queries_keys_values(layer, x)
        q, k = layer.q_norm(q).to(v.dtype), layer.k_norm(k).to(v.dtype)
        dropout = layer.attn_drop.p if layer.training else 0.0
        o = attend(q, k, v, terms, attn_mask.mask, dropout=dropout, causal=is_causal)
        o = layer.norm(o.transpose(1, 2).flatten(2))  # (B, N, H * D)
        gate = getattr(layer, "gate", None)
        o = o if gate is None else o * gate(x).sigmoid()
        return layer.proj_drop(layer.proj(o))


def _queries_keys_values(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The projections of any of timm's attention layers: (B, H, N, D), keys and values perhaps with fewer heads."""
    if layer.qkv is None:
        return tuple(
            projection(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
            for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
    bias = layer.qkv.bias
    if getattr(layer, "q_bias", None) is not None:
        bias = torch.cat([layer.q_bias, torch.zeros_like(layer.q_bias), layer.v_bias])  # EVA's keys have no bias
    qkv = F.linear(x, layer.qkv.weight, bias)
    return qkv.unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


class EncodedAttention(_EncodedAttention, Attention):
    """timm's Attention with position terms."""


class EncodedAttentionRope(_EncodedAttention, AttentionRope):
    """timm's AttentionRope with position terms instead of its rotation."""


class EncodedEvaAttention(_EncodedAttention, EvaAttention):
    """timm's EvaAttention with position terms instead of its rotation."""


class _EncodedModel:
    """A timm model whose positions come from `self.encoding`."""

    encoding: PositionEncoding

    def forward_tokens(self, x: Tensor, positions: Positions | None = None) -> tuple[Tensor, Positions]:
        """Images (B, C, H, W) -> tokens before the first block, and their positions."""
        model: Any = self
        height, width = x.shape[2:]
        grid = model.patch_embed.dynamic_feat_size((height, width))
        x = model.patch_embed(x)
        x = x.flatten(1, 2) if x.dim() == 4 else x  # (B, N, C)
        positions = positions or Positions.grid(*grid, prefix=model.num_prefix_tokens, device=x.device)
        positions = self.encoding.place(positions, x.shape[0])
        tokens = [model.cls_token, model.reg_token]
        x = torch.cat([*(t.expand(x.shape[0], -1, -1) for t in tokens if t is not None), x], dim=1)
        x = model.pos_drop(self.encoding.embed(x, positions, layer=0))
        drop = model.patch_drop
        if model.training and hasattr(drop, "prob") and drop.prob > 0:
            x, positions = drop_patches(x, positions, drop.prob, drop.ordered)
        return model.norm_pre(x), positions

    def forward_block(
        self, layer: int, x: Tensor, terms: BlockTerms, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Tokens x (B, P + N, C) through block `layer`, after the token term that the encoding has there."""
        model: Any = self
        if layer > 0:
            x = self.encoding.embed(x, terms.positions, layer=layer)
        call = partial(model.blocks[layer], attn_mask=_Carrier(terms, layer, attn_mask), is_causal=is_causal)
        recompute = model.grad_checkpointing and torch.is_grad_enabled()
        return checkpoint(call, x, use_reentrant=False) if recompute else call(x)

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Images -> tokens after the last norm."""
        model: Any = self
        x, positions = self.forward_tokens(x)
        terms = BlockTerms(self.encoding, positions)
        for layer in range(len(model.blocks)):
            x = self.forward_block(layer, x, terms, attn_mask, is_causal)
        return model.norm(x)

    def forward_intermediates(self, x: Tensor, indices: int | Sequence[int] | None = None, **options: Any) -> Any:
        """Outputs of chosen blocks, with timm's options."""
        return forward_intermediates(self, x, indices, **options)  # type: ignore[arg-type]

    def no_weight_decay(self) -> set[str]:
        """The names that timm has and all of the encoding."""
        names = set(super().no_weight_decay())  # type: ignore[misc]
        return names | {f"encoding.{name}" for name in self.encoding.no_weight_decay()}


class EncodedVisionTransformer(_EncodedModel, VisionTransformer):
    """timm's VisionTransformer with an encoding of mmpe."""


class EncodedEva(_EncodedModel, Eva):
    """timm's Eva with an encoding of mmpe."""


_MODELS: dict[type, type] = {VisionTransformer: EncodedVisionTransformer, Eva: EncodedEva}
_ATTENTION: dict[type, type] = {
    Attention: EncodedAttention,
    AttentionRope: EncodedAttentionRope,
    EvaAttention: EncodedEvaAttention,
}


def encoded_class(model: Any) -> type:
    """The class that a model gets with an encoding; refuses models that cannot carry one."""
    kind = type(model)
    if kind not in _MODELS and kind not in _MODELS.values():
        raise ValueError(f"{kind.__name__} cannot take an encoding; timm's VisionTransformer and Eva can")
    for i, block in enumerate(model.blocks):
        attention = type(getattr(block, "attn", None))
        if attention not in _ATTENTION and attention not in _ATTENTION.values():
            raise ValueError(f"block {i} has attention of class {attention.__name__}, which takes no position terms")
    return _MODELS.get(kind, kind)


def plain_class(model: Any) -> type:
    """The class that timm has for a model that has an encoding."""
    return {encoded: plain for plain, encoded in _MODELS.items()}[type(model)]


def swapped_attention(model: Any, encoded: bool) -> None:
    """Give the attention layers the class with terms, or timm's own again."""
    table = _ATTENTION if encoded else {new: old for old, new in _ATTENTION.items()}
    for block in model.blocks:
        layer = block.attn
        layer.__class__ = table.get(type(layer), type(layer))
