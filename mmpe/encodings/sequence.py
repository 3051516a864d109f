"""What encodings of causal sequences share: counting along the order of the tokens.

Tokens are taken in the order of their coordinates, not in that of storage, so tokens that are dropped, padded or
shuffled together with their positions count the same. Prefix tokens come before all others and are not counted.

Shapes: B batch, H heads, N positioned tokens, P prefix tokens, E any number of quantities per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..positions import Positions
from ..precision import full_precision


def sequence_ranks(positions: Positions) -> Tensor:
    """Place of each token in the order of the coordinates: (P + N,) or (B, P + N) int64, -1 for prefix tokens.

    Tokens at equal coordinates keep the order in which they are stored.
    """
    order = _order(positions)
    if order is None:
        ranks = torch.arange(positions.coords.shape[-2], device=positions.device)
    else:
        ranks = order.argsort(dim=-1)
    return F.pad(ranks, (positions.prefix, 0), value=-1)


def along_sequence(quantities: Tensor, positions: Positions, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function to the tokens in the order of their coordinates.

    Args:
        quantities: (B or 1, P + N, E).
        positions: in one axis.
        function: (B, N, E) in sequence order -> (B, N, E').

    Returns:
        (B, P + N, E') in the order of storage; zeros for prefix tokens.
    """
    tokens = quantities[:, positions.prefix :]
    order = _order(positions)
    if order is None:
        result = function(tokens)
    else:
        result = _take(function(_take(tokens, order)), order.argsort(dim=-1))
    return F.pad(result, (0, 0, positions.prefix, 0))


def hidden_keys(ranks: Tensor) -> Tensor:
    """Which keys come after which query: ranks (..., P + N) -> bool (..., P + N, P + N)."""
    return ranks[..., None, :] > ranks[..., :, None]


def causal_pairs(vectors: tuple[Tensor, ...], positions: Positions, function: Callable[..., Tensor]) -> Tensor:
    """A bias of all pairs of tokens that a function makes from the tokens in sequence order.

    Args:
        vectors: (B, H, P + N, E) each.
        positions: in one axis.
        function: of the vectors (B, H, N, E) and the coordinates (B or 1, 1, N), all in sequence order, to
            (B, H, N, N).

    Returns:
        (B, H, P + N, P + N): zero for pairs with a prefix token, -inf for keys after the query.
    """
    prefix, order = positions.prefix, _order(positions)
    coords = positions.coords[..., 0].reshape(-1, 1, positions.coords.shape[-2])  # (B or 1, 1, N)
    tokens = [v[:, :, prefix:] for v in vectors]
    if order is None:
        bias = function(*tokens, coords)
    else:
        order = order.expand(vectors[0].shape[0], -1)[:, None]  # (B, 1, N)
        place = order.argsort(dim=-1)
        coords = torch.gather(coords.expand(order.shape), -1, order)
        bias = _rows(function(*(_rows(v, order) for v in tokens), coords), place)
        bias = torch.gather(bias, -1, place[:, :, None].expand_as(bias))
    bias = F.pad(bias, (prefix, 0, prefix, 0))
    return bias.masked_fill(hidden_keys(sequence_ranks(positions)).unsqueeze(-3), float("-inf"))


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The linear map x W^T + b in float32, also under autocast: what is summed up must not be rounded to 16 bits first.

    Args:
        x: (B, N, C) of any floating-point dtype.
        weight: (E, C).
        bias: (E,).
    """
    with full_precision(x):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


def draw_linear_(weight: nn.Parameter, bias: nn.Parameter | None = None, std: float = 0.02) -> None:
    """Normal weights and zero biases, as language models start their projections."""
    nn.init.normal_(weight, std=std)
    if bias is not None:
        nn.init.zeros_(bias)


def _order(positions: Positions) -> Tensor | None:
    """Indices (N,) or (B, N) that sort the coordinates; None where they are sorted, as on a full line."""
    if positions.grid_size is not None:
        return None
    return positions.coords[..., 0].argsort(dim=-1, stable=True)


def _take(x: Tensor, index: Tensor) -> Tensor:
    if index.dim() == 1:
        return x[:, index]
    batch = index.shape[0]
    return torch.gather(x.expand(batch, -1, -1), 1, index[..., None].expand(-1, -1, x.shape[-1]))


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (B, H, N, E) by index (B, 1, N)."""
    return torch.gather(x, 2, index[..., None].expand(-1, x.shape[1], -1, x.shape[-1]))
