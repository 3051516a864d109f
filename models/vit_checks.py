"""Checks of the arguments of the vision transformer."""

from __future__ import annotations

from functools import partial

from timm.layers import get_norm_layer

from .vit_blocks import INIT_MODES, NormLayer

POOLS = ("", "token", "avg", "avgmax", "max", "map")


def norm_layer_of(name: str, eps: float | None) -> NormLayer:
    """The norm that timm knows by this name, with an epsilon of its own if one is given."""
    try:
        layer = get_norm_layer(name)
    except (AssertionError, KeyError) as error:
        raise ValueError(f"norm_layer={name!r} is no name of a norm in timm; use 'layernorm' or 'rmsnorm'") from error
    return layer if eps is None else partial(layer, eps=eps)


def check_choices(pool: str, class_token: bool, weight_init: str, dim: int, heads: int) -> None:
    """Refuse a pooling, an initialisation or a number of heads that does not fit."""
    check_pool(pool, class_token)
    if weight_init not in INIT_MODES:
        raise ValueError(f"weight_init must be one of {INIT_MODES}, got {weight_init!r}")
    if heads < 1 or dim % heads:
        raise ValueError(f"embed_dim={dim} must be divisible by num_heads={heads}")


def check_pool(pool: str, class_token: bool) -> None:
    """Refuse a pooling that is unknown, or that needs a class token where there is none."""
    if pool not in POOLS:
        raise ValueError(f"global_pool must be one of {POOLS}, got {pool!r}")
    if pool == "token" and not class_token:
        raise ValueError("global_pool='token' needs class_token=True; use 'avg' without a class token")


def check_rates(*rates: float) -> None:
    """Refuse drop rates outside of [0, 1)."""
    if any(not 0.0 <= rate < 1.0 for rate in rates):
        raise ValueError(f"drop rates must lie in [0, 1), got {rates} (head, pos, patch, proj, attn, path)")
