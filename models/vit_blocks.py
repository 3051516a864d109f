"""Attention and transformer block of the vision transformer, and the initialisation of its weights.

Parameters bear the names of timm's VisionTransformer, so that state dicts fit both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from timm.layers import DropPath, LayerScale, Mlp, SwiGLU, SwiGLUPacked, lecun_normal_, trunc_normal_
from torch import Tensor, nn

from mmpe.attention import attend
from mmpe.encoding import AttentionTerms, PositionEncoding

NormLayer = Callable[[int], nn.Module]
TermsOf = Callable[[Tensor], AttentionTerms]
INIT_MODES = ("", "skip", "jax", "jax_nlhb", "moco")


class Attention(nn.Module):
    """Multi-head self-attention with position terms.

    Args:
        dim: model width C.
        num_heads: number of heads H.
        norm_layer: norm over one head (qk_norm) or over the output (scale_norm).
        qkv_bias: biases in the qkv projection.
        qk_norm: normalise queries and keys before position acts on them.
        scale_norm: normalise the output before the last projection.
        attn_drop: dropout of attention weights.
        proj_drop: dropout of the output.
        qkv_heads: heads that q, k and v are projected to, where the encoding wants another number than num_heads.
        output_heads: heads that come out of attention, where the encoding makes another number.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        norm_layer: NormLayer,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        scale_norm: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        qkv_heads: int | None = None,
        output_heads: int | None = None,
    ) -> None:
        super().__init__()
        head_dim = dim // num_heads
        self.num_heads, self.attn_drop = qkv_heads or num_heads, attn_drop
        self.qkv = nn.Linear(dim, 3 * self.num_heads * head_dim, bias=qkv_bias)
        self.q_norm = norm_layer(head_dim) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(head_dim) if qk_norm else nn.Identity()
        width = (output_heads or num_heads) * head_dim
        self.norm = norm_layer(width) if scale_norm else nn.Identity()
        self.proj = nn.Linear(width, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self, x: Tensor, terms: AttentionTerms | None = None, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Tokens x (B, N, C) -> (B, N, C); `mask` broadcasts to (B, H, N, N)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, N, D)
        # Under autocast a norm returns float32, while v stays in the low precision.
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        o = attend(q, k, v, terms, mask, dropout=self.attn_drop if self.training else 0.0, causal=causal)
        return self.proj_drop(self.proj(self.norm(o.transpose(1, 2).flatten(2))))


def heads_of(encoding: PositionEncoding) -> dict[str, Any]:
    """The heads that an encoding wants in and makes of them, as options of `Attention`."""
    return {"qkv_heads": encoding.qkv_heads, "output_heads": encoding.output_heads}


class Block(nn.Module):
    """Pre-norm transformer block; the position terms of its attention come with the call.

    Args:
        dim: model width C.
        num_heads: number of heads H.
        norm_layer: makes a norm from its width.
        act_layer: activation of the plain MLP.
        mlp_ratio: hidden width of the MLP over C.
        swiglu: gated MLP: True with two matrices, "packed" with one, False for the plain MLP.
        scale_mlp_norm: norm inside the MLP.
        init_values: start of LayerScale; None for none.
        drop_path: rate of stochastic depth.
        attention: makes the attention from dim, num_heads and norm_layer.
        proj_drop: dropout of the MLP.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        norm_layer: NormLayer,
        act_layer: Callable[[], nn.Module] = nn.GELU,
        mlp_ratio: float = 4.0,
        swiglu: bool | Literal["packed"] = False,
        scale_mlp_norm: bool = False,
        init_values: float | None = None,
        drop_path: float = 0.0,
        attention: Callable[..., nn.Module] = Attention,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm_layer(dim), norm_layer(dim)
        self.attn = attention(dim, num_heads, norm_layer)
        hidden = int(dim * mlp_ratio + 1e-6)  # ratios such as 8/3 must not lose a unit to rounding
        inner_norm = norm_layer if scale_mlp_norm else None
        self.mlp = _mlp_layer(swiglu, act_layer)(dim, hidden, norm_layer=inner_norm, drop=proj_drop)
        self.ls1 = LayerScale(dim, init_values) if init_values is not None else nn.Identity()
        self.ls2 = LayerScale(dim, init_values) if init_values is not None else nn.Identity()
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(
        self, x: Tensor, terms_of: TermsOf | None = None, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Tokens x (B, N, C) -> (B, N, C); `terms_of` maps the input of the qkv projection to the terms."""
        h = self.norm1(x)
        terms = terms_of(h) if terms_of is not None else None
        h = terms.inputs(h) if terms is not None else h
        x = x + self.drop_path1(self.ls1(self.attn(h, terms, mask, causal)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


def _mlp_layer(swiglu: bool | str, act_layer: Callable[[], nn.Module]) -> Callable[..., nn.Module]:
    if swiglu not in (False, True, "packed"):
        raise ValueError(f"swiglu must be False, True or 'packed', got {swiglu!r}")
    if swiglu:
        return SwiGLUPacked if swiglu == "packed" else SwiGLU
    return partial(Mlp, act_layer=act_layer)


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """Rates of stochastic depth that rise linearly from 0 at the first block."""
    return [rate * layer / max(depth - 1, 1) for layer in range(depth)]


def init_weights(model: nn.Module, mode: str, num_classes: int, skip: str) -> None:
    """Draw all weights as timm does in this mode, leaving the subtree named `skip` to itself.

    Args:
        model: the backbone.
        mode: "" (truncated normal), "jax" (Xavier), "jax_nlhb" (and a head bias of -log classes) or "moco".
        num_classes: number of classes, for the head bias.
        skip: name of a child that initialises itself.
    """
    for name, module in model.named_modules():
        if name == "" or name.split(".")[0] == skip:
            continue
        if isinstance(module, nn.Linear):
            _init_linear(module, name, mode, num_classes)
        elif isinstance(module, nn.Conv2d | nn.Conv3d) and mode.startswith("jax"):
            lecun_normal_(module.weight)
            _zero_bias(module)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, module in model.named_modules():  # gated MLPs and pooling have a start of their own, over their parts'
        if name.split(".")[0] not in ("", skip) and hasattr(module, "init_weights"):
            module.init_weights()


def _init_linear(module: nn.Linear, name: str, mode: str, num_classes: int) -> None:
    is_head = name.split(".")[0] == "head"
    if mode == "":
        trunc_normal_(module.weight, std=0.02)
    elif is_head and mode.startswith("jax"):
        nn.init.zeros_(module.weight)
    elif mode == "moco" and "qkv" in name:
        bound = math.sqrt(6.0 / (module.weight.shape[0] // 3 + module.weight.shape[1]))
        nn.init.uniform_(module.weight, -bound, bound)
    else:
        nn.init.xavier_uniform_(module.weight)
    _zero_bias(module)
    bias: Tensor | None = module.bias
    if bias is None:
        return
    if is_head and mode == "jax_nlhb":
        nn.init.constant_(bias, -math.log(num_classes))
    elif mode.startswith("jax") and "mlp" in name:
        nn.init.normal_(bias, std=1e-6)


def _zero_bias(module: nn.Linear | nn.Conv2d | nn.Conv3d) -> None:
    bias: Tensor | None = module.bias
    if bias is not None:
        nn.init.zeros_(bias)
