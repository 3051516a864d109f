"""The two losses of SeqPE, and the positions that they are computed on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_UNIFORM, _HARD = 0.5, 0.8
"""Share of pivots with uniform candidates, and with these or hard ones; the others draw from a small window."""
_HARD_SHARE = 0.2
_WINDOW_AREA = 196


def digits_of(index: Tensor, max_digits: int) -> Tensor:
    """Decimal digits of indices (..., A) int64, coordinate by coordinate, first digit first: (..., A * max_digits)."""
    digits = torch.div(index.unsqueeze(-1), _powers(max_digits, index.device), rounding_mode="floor") % 10
    return digits.flatten(-2)


def _powers(max_digits: int, device: torch.device) -> Tensor:
    return 10 ** torch.arange(max_digits - 1, -1, -1, device=device)


def contrastive_loss(pivot: Tensor, candidates: Tensor, nearest: Tensor, heads: int = 1) -> Tensor:
    """Cross-entropy of recognising the nearest candidate by the dot product of embeddings.

    Args:
        pivot: (P, C) embeddings.
        candidates: (P, M, C) embeddings of M candidates each.
        nearest: (P,) int64, which candidate is nearest.
        heads: pieces of the width that each must do so on their own.
    """
    a = pivot.unflatten(-1, (heads, -1))  # (P, H, D)
    b = candidates.unflatten(-1, (heads, -1)).transpose(1, 2)  # (P, H, M, D)
    logits = (b @ a.unsqueeze(-1)).squeeze(-1)  # (P, H, M)
    return F.cross_entropy(logits.flatten(0, 1), nearest.repeat_interleave(heads))


def transfer_loss(inside: Tensor, shifted: Tensor, heads: int = 1, beta: float = 1.0) -> Tensor:
    """Divergence between the similarities within the training grid and within a shifted copy of it, both ways.

    The mean is over all entries, as `torch.nn.functional.kl_div` has taken it by default until now.

    Args:
        inside: (W, n, C) embeddings of cells of the training grid.
        shifted: (W, n, C) embeddings of the same cells in shifted windows.
        heads: pieces of the width that are compared one by one.
        beta: share of the loss that teaches the shifted ones; the rest teaches those inside.
    """
    p, q = _log_similarities(inside, heads), _log_similarities(shifted, heads)
    loss = beta * _both_ways(p.detach(), q)
    return loss + (1 - beta) * _both_ways(p, q.detach()) if beta < 1 else loss


def _log_similarities(x: Tensor, heads: int) -> Tensor:
    x = x.unflatten(-1, (heads, -1)).transpose(1, 2)  # (W, H, n, D)
    return (x @ x.transpose(-1, -2)).log_softmax(-1)


def _both_ways(p: Tensor, q: Tensor) -> Tensor:
    return ((p.exp() - q.exp()) * (p - q)).mean()


def draw_candidates(
    pivots: int, candidates: int, axes: int, max_digits: int, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions for the contrastive loss.

    Half of the pivots have candidates from anywhere; for 30 % of them a fifth of the candidates is the pivot with
    digits exchanged or replaced, unless that is nearer than all others; 20 % draw from a window of about 14 x 14 cells.

    Args:
        pivots: number of pivots P.
        candidates: number of candidates M.
        axes: coordinates of a position.
        max_digits: digits of a coordinate.
        device: where the tensors are made.

    Returns:
        Pivots (P, A), candidates (P, M, A), none of which is the pivot, and the index (P,) of the nearest of each.
    """
    limit = 10**max_digits
    pivot = torch.randint(limit, (pivots, axes), device=device)
    uniform = torch.randint(limit, (pivots, candidates, axes), device=device)
    kind = torch.rand(pivots, 1, 1, device=device)
    others = torch.where(kind < _UNIFORM, uniform, _with_hard_ones(pivot, uniform, max_digits))
    others = torch.where(kind < _HARD, others, _from_window(uniform, limit))
    same = (others == pivot[:, None]).all(-1, keepdim=True)
    others = torch.where(same, (others + 1) % limit, others)
    return pivot, others, _square_distance(pivot, others).argmin(-1)


def _with_hard_ones(pivot: Tensor, uniform: Tensor, max_digits: int) -> Tensor:
    """Candidates of which the first fifth looks like the pivot."""
    count = int(_HARD_SHARE * uniform.shape[1])
    if count == 0:
        return uniform
    digits = digits_of(pivot, max_digits)[:, None].expand(-1, count, -1).contiguous()  # (P, count, A * max_digits)
    where = torch.rand(digits.shape, device=pivot.device).argsort(-1)[..., :2]  # two different digits
    if digits.shape[-1] > 1:
        exchanged = digits.scatter(-1, where, digits.gather(-1, where).flip(-1))
        digits = torch.where(torch.rand(*digits.shape[:2], 1, device=pivot.device) < 0.5, exchanged, digits)
    new = torch.randint(10, (*digits.shape[:2], 1), device=pivot.device)
    digits = digits.scatter(-1, where[..., :1], new)
    hard = (digits.unflatten(-1, (-1, max_digits)) * _powers(max_digits, digits.device)).sum(-1)  # (P, count, A)
    rest = uniform[:, count:]
    closest = _square_distance(pivot, rest).min(-1, keepdim=True).values
    keep = (_square_distance(pivot, hard) > closest).unsqueeze(-1)
    return torch.cat([torch.where(keep, hard, uniform[:, :count]), rest], dim=1)


def _from_window(uniform: Tensor, limit: int) -> Tensor:
    """The candidates moved into a window of the first one's choice."""
    side = min(limit, max(2, round(_WINDOW_AREA ** (1 / uniform.shape[-1]))))
    return uniform[:, :1] % (limit - side + 1) + uniform % side


def draw_windows(
    windows: int, cells: int, grid: Sequence[int], limit: int, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Cells of the training grid and the same cells of windows that start anywhere: two of (W, n, A).

    Args:
        windows: number of windows W.
        cells: cells that are drawn in each, at most all.
        grid: size of the training grid.
        limit: positions along an axis.
        device: where the tensors are made.
    """
    ranges = [torch.arange(size, device=device) for size in grid]
    lattice = torch.stack(torch.meshgrid(*ranges, indexing="ij"), dim=-1).flatten(0, -2)  # (N, A)
    chosen = torch.rand(windows, len(lattice), device=device).argsort(-1)[:, :cells]
    start = torch.stack([torch.randint(limit - size + 1, (windows,), device=device) for size in grid], dim=-1)
    inside = lattice[chosen]
    return inside, inside + start[:, None]


def _square_distance(pivot: Tensor, others: Tensor) -> Tensor:
    return (others - pivot[:, None]).square().sum(-1)
