"""`attend`: scaled dot-product attention with the terms of a position encoding, on torch's fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .encoding import AttentionTerms, iterate_terms


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: AttentionTerms | None = None,
    mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    backend: Literal["auto", "sdpa", "flex"] = "auto",
) -> Tensor:
    """Attention with position terms; a drop-in for `torch.nn.functional.scaled_dot_product_attention`.

    Computes o_i = To_i sum_j softmax_j(<Tq_i q_i, Tk_j k_j> * scale + b_ij) Tv_j v_j (docs/architecture.md).

    Args:
        q: (B, H, N, D) queries, prefix tokens first.
        k: (B, Hkv, M, D) keys; Hkv divides H (grouped-query attention).
        v: (B, Hkv, M, Dv) values.
        terms: what position adds; None is plain attention.
        mask: broadcasts to (B, H, N, M); bool (True = may attend) or float (added to the logits).
        dropout: probability of dropping an attention weight; pass 0 in evaluation.
        causal: hide keys after the query.
        scale: factor on the logits; D ** -0.5 by default, also where the terms widen q and k.
        backend: "flex" uses flex_attention with the terms' score_mod (no N x N bias; forward only on the CPU);
            "auto" does so on CUDA where the terms have one and nothing else needs a mask.

    Returns:
        (B, H, N, Dv) in the dtype of q.

    Raises:
        ValueError: for head counts that do not divide, terms of several layers at once, or a backend that the terms
            cannot use.
    """
    _check_heads(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if terms is None:
        return _sdpa(q, k, v, None, mask, dropout, causal, scale)
    _check_tokens(q, k, terms)
    dtype, score_mod = q.dtype, None
    q, k = terms.queries_keys(q, k)
    q, scale = _apply_temperature(q, scale, terms.temperature)
    v = terms.values(v)
    if terms.needs_weights:
        return terms.outputs(_explicit(q, k, v, terms, mask, dropout, causal, scale)).to(dtype)
    if _may_use_flex(q, mask, dropout, causal, backend):
        score_mod = terms.score_mod()
        if score_mod is None and backend == "flex":
            raise ValueError("backend='flex' needs terms with a score_mod, and these have none; use backend='auto'")
    if score_mod is not None:
        o = _flex()(q, k, v, score_mod=score_mod, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    else:
        o = _sdpa(q, k, v, terms.bias(q, k), mask, dropout, causal, scale)
    return terms.outputs(o).to(dtype)


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k, v must be (B, H, N, D), got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must agree in heads and length")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"the {q.shape[1]} query heads must be a multiple of the {k.shape[1]} key heads")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in the head dim")
    if not q.is_floating_point():
        raise TypeError(f"q, k, v must be floating-point, got {q.dtype}")


def _check_tokens(q: Tensor, k: Tensor, terms: AttentionTerms) -> None:
    """Every part says how many tokens it is for; a wrong number could broadcast, or index out of a table on a GPU."""
    for part in iterate_terms(terms):
        if part.tokens is not None and (q.shape[-2] != part.tokens or k.shape[-2] != part.tokens):
            raise ValueError(
                f"the positions hold {part.tokens} tokens, q has {q.shape[-2]} and k {k.shape[-2]}; "
                "prefix tokens (cls, registers) count: say Positions(..., prefix=...)"
            )


def _check_bias(bias: Tensor, q: Tensor, k: Tensor) -> None:
    """A bias may be the same for samples, heads or queries; one that is the same for all keys is a mistake."""
    full = (q.shape[0] if k.shape[0] == 1 else k.shape[0], q.shape[1], q.shape[-2], k.shape[-2])
    sizes = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if len(sizes) != 4 or sizes[3] != full[3] or any(size not in (1, n) for size, n in zip(sizes, full, strict=True)):
        raise ValueError(
            f"the positional bias is {tuple(bias.shape)}, the logits are {full}: positions, encoding and q, k "
            "must agree in batch, heads and tokens (prefix tokens count)"
        )


def _apply_temperature(q: Tensor, scale: float, temperature: Tensor | float | None) -> tuple[Tensor, float]:
    if temperature is None:
        return q, scale
    if isinstance(temperature, Tensor):
        return q * temperature.to(q.dtype), scale
    return q, scale * temperature


def _may_use_flex(q: Tensor, mask: Tensor | None, dropout: float, causal: bool, backend: str) -> bool:
    if backend == "sdpa":
        return False
    plain = mask is None and dropout == 0.0 and not causal
    if backend == "flex":
        if not plain:
            raise ValueError("backend='flex' takes no mask, dropout or causal flag; use backend='auto'")
        return True
    return plain and q.is_cuda


def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling():
        return flex_attention
    return _compiled_flex()


@cache
def _compiled_flex() -> Callable[..., Any]:
    # One compiled callable for the process: a new one per call would recompile, and after eight recompilations
    # dynamo falls back to the eager reference without saying so.
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float,
) -> Tensor:
    """SDPA with a bias and a mask, padding v where q and k are wider: unequal widths leave the fused kernels."""
    attn_mask = _merge_masks(bias, mask, causal, q, k)
    width = v.shape[-1]
    if q.shape[-1] > width:
        v = F.pad(v, (0, q.shape[-1] - width))
    o = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=attn_mask,
        dropout_p=dropout,
        is_causal=causal and attn_mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return o[..., :width]


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: AttentionTerms,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float,
) -> Tensor:
    """Attention with its weights in memory, for terms that need them."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (k, v) if groups == 1 else (k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
    logits = (q @ keys.transpose(-2, -1)) * scale  # (B, H, N, M)
    if causal and mask is None:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        causal = False
    extra = _merge_masks(terms.bias(q, k), mask, causal, q, k)
    if extra is not None:
        logits = logits.masked_fill(~extra, float("-inf")) if extra.dtype == torch.bool else logits + extra
    weights = F.dropout(_softmax(logits), dropout)
    o = weights @ values
    term = terms.from_weights(weights)
    return o if term is None else o + term


def _softmax(logits: Tensor) -> Tensor:
    """Softmax over keys in float32; a query that may attend to nothing gets zeros, as SDPA gives."""
    weights = logits.float().softmax(-1) if logits.dtype in (torch.float16, torch.bfloat16) else logits.softmax(-1)
    return weights.nan_to_num(0.0).to(logits.dtype)


def _merge_masks(bias: Tensor | None, mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    if bias is None and mask is None:
        return None
    if causal:
        visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        mask = visible if mask is None else _hide(mask, visible)
    if bias is None:
        return mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
    _check_bias(bias, q, k)
    bias = bias.to(q.dtype)
    if mask is None:
        return bias.expand(-1, -1, q.shape[-2], k.shape[-2]) if bias.dim() == 4 else bias
    return _hide(bias, mask) if mask.dtype == torch.bool else bias + mask.to(q.dtype)


def _hide(values: Tensor, visible: Tensor) -> Tensor:
    if values.dtype == torch.bool:
        return values & visible
    return values.masked_fill(~visible, float("-inf"))
