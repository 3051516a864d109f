"""Intermediate features of vision transformers, in the forms that timm's `forward_intermediates` has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from ..encoding import PositionEncoding
from ..positions import Positions
from .backbone import BlockTerms


class TokenModel(Protocol):
    """What `forward_intermediates` needs of a model."""

    encoding: PositionEncoding
    blocks: nn.Sequential
    norm: nn.Module

    def forward_tokens(self, x: Tensor, positions: Positions | None = None) -> tuple[Tensor, Positions]:
        """Tokens before the first block, and their positions."""

    def forward_block(
        self, layer: int, x: Tensor, terms: BlockTerms, attn_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Tokens after one block."""


def take_indices(count: int, indices: int | Sequence[int] | None) -> tuple[list[int], int]:
    """Blocks that are asked for, in order, and the last of them.

    Args:
        count: number of blocks.
        indices: the last n blocks (a number), chosen blocks (negative ones count from the end), or None for all.
    """
    if indices is None:
        wanted = list(range(count))
    elif isinstance(indices, int):
        wanted = list(range(count - indices, count)) if 0 < indices <= count else [count]
    else:
        wanted = [count + i if i < 0 else i for i in indices]
    if not wanted or any(not 0 <= i < count for i in wanted):
        raise ValueError(f"indices={indices} do not name blocks of this model, which has {count}")
    return wanted, max(wanted)


def forward_intermediates(
    model: TokenModel,
    x: Tensor,
    indices: int | Sequence[int] | None = None,
    return_prefix_tokens: bool = False,
    norm: bool = False,
    stop_early: bool = False,
    output_fmt: Literal["NCHW", "NLC"] = "NCHW",
    intermediates_only: bool = False,
    output_dict: bool = False,
    positions: Positions | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> list[Any] | tuple[Tensor, list[Any]] | dict[str, Any]:
    """Outputs of chosen blocks.

    Args:
        model: the vision transformer.
        x: images (B, in_chans, H, W).
        indices: which blocks, see `take_indices`.
        return_prefix_tokens: give pairs (map, prefix tokens).
        norm: pass every output through the model's last norm.
        stop_early: run no block after the last one asked for.
        output_fmt: "NCHW" for maps or "NLC" for tokens; both without the prefix.
        intermediates_only: leave out the final tokens.
        output_dict: give a dict with `image_intermediates`, `image_intermediates_prefix` and `image_features`.
        positions: where the patches are, if not on their grid.
        attn_mask: mask of the attention.
        is_causal: hide later tokens.
    """
    if output_fmt not in ("NCHW", "NLC"):
        raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
    wanted, last = take_indices(len(model.blocks), indices)
    tokens, places = model.forward_tokens(x, positions)
    terms = BlockTerms(model.encoding, places)
    outputs: dict[int, Tensor] = {}
    for i in range(last + 1 if stop_early else len(model.blocks)):
        tokens = model.forward_block(i, tokens, terms, attn_mask, is_causal)
        if i in wanted:
            outputs[i] = model.norm(tokens) if norm else tokens
    grid = _map_size(model, x, places) if output_fmt == "NCHW" else None
    prefixes = [outputs[i][:, : places.prefix] for i in sorted(outputs)]
    features = [_as_map(outputs[i][:, places.prefix :], grid) for i in sorted(outputs)]
    final = None if intermediates_only else model.norm(tokens)
    if output_dict:
        return _as_dict(features, prefixes if return_prefix_tokens and places.prefix else None, final)
    found = list(zip(features, prefixes, strict=True)) if return_prefix_tokens and places.prefix else features
    return found if final is None else (final, found)


def _map_size(model: TokenModel, x: Tensor, positions: Positions) -> tuple[int, ...]:
    grid = model.patch_embed.dynamic_feat_size(tuple(x.shape[2:]))  # type: ignore[attr-defined]
    if math.prod(grid) != positions.coords.shape[-2]:
        raise ValueError("patches were dropped, so features form no map; ask for output_fmt='NLC' or model.eval()")
    return grid


def _as_map(tokens: Tensor, grid: tuple[int, ...] | None) -> Tensor:
    if grid is None:
        return tokens
    return tokens.transpose(1, 2).unflatten(2, grid).contiguous()  # (B, C, H', W'), with clips (B, C, T', H', W')


def _as_dict(features: list[Tensor], prefixes: list[Tensor] | None, final: Tensor | None) -> dict[str, Any]:
    found: dict[str, Any] = {"image_intermediates": features}
    if prefixes is not None:
        found["image_intermediates_prefix"] = prefixes
    if final is not None:
        found["image_features"] = final
    return found
