"""Synthetic token grids where position is the answer: pure functions from a generator to tensors.

Letters: N grids, G cells a side. `partner` labels tokens; `relloc`, `count` and `three` label whole grids.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLANK, SEEKER, PARTNER, DISTRACTOR = range(4)  # tokens of `partner`: blank, A, B, C
PARTNER_TOKENS = 4
PARTNER_CLASSES = 8
IGNORED = -100  # the label that cross_entropy skips
A, B = 0, 1  # the special ones among the 8 symbols of the other tasks; 2 to 7 mean nothing
SYMBOLS = 8
DIRECTIONS = ("left", "right", "above", "below")  # classes of `relloc`
MOST = 5  # the largest answer of `count`


def _check(number: int, size: int, least: int) -> None:
    if number < 1 or size < least:
        raise ValueError(f"number={number} must be 1 or more and size={size} must be {least} or more")


def partner(number: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Direction to the partner: where, seen from an A, is the only B within two cells?

    Cells are drawn independently: C 10 %, A 20 %, B 6 %, else blank. An A with exactly one B within Chebyshev radius 2
    carries the class of (sign dy, sign dx) of that B: 0 to 7 in row-major order of the eight directions, so 0 is up
    left, 1 up, 3 left, 4 right, 7 down right. Every other cell carries -100. The majority class has a share of about
    0.16; an encoding that knows distances only can reach 0.25.

    Args:
        number: grids.
        size: cells a side.
        generator: the source of randomness.

    Returns:
        tokens (N, G, G) int64: 0 blank, 1 A, 2 B, 3 C; and labels (N, G, G) int64.
    """
    _check(number, size, 2)
    draw = torch.rand(number, size, size, generator=generator)  # (N, G, G)
    tokens = torch.full_like(draw, BLANK, dtype=torch.int64)
    tokens[draw < 0.36] = PARTNER
    tokens[draw < 0.30] = SEEKER
    tokens[draw < 0.10] = DISTRACTOR
    return tokens, partner_labels(tokens)


def partner_labels(tokens: Tensor) -> Tensor:
    """The labels that belong to grids of `partner`.

    Args:
        tokens: (N, G, G) int64.
    """
    here = (tokens == PARTNER).float()[:, None]  # (N, 1, G, G)
    offset = torch.arange(-2, 3)
    cell = (offset.sign()[:, None] + 1) * 3 + offset.sign() + 1  # (5, 5), 0 to 8 with the centre at 4
    classes = cell - (cell > 4).long()
    kernels = torch.stack([torch.ones(5, 5), classes.float()])[:, None]  # (2, 1, 5, 5)
    found, direction = F.conv2d(here, kernels, padding=2).round().long().unbind(1)  # (N, G, G) each
    return torch.where((tokens == SEEKER) & (found == 1), direction, IGNORED)


def _fillers(number: int, size: int, generator: torch.Generator) -> Tensor:
    """Grids of symbols 2 to 7, flattened: (N, G*G)."""
    return torch.randint(2, SYMBOLS, (number, size * size), generator=generator)


def relloc(number: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Where is A relative to B? One A and one B at random cells whose offsets differ in size; the larger one decides.

    Args:
        number: grids.
        size: cells a side.
        generator: the source of randomness.

    Returns:
        symbols (N, G, G) int64 in 0 to 7, and labels (N,) int64: A is 0 left of, 1 right of, 2 above, 3 below B.
    """
    _check(number, size, 2)
    cells = torch.cartesian_prod(*[torch.arange(size)] * 4)  # every (ay, ax, by, bx)
    dy, dx = cells[:, 0] - cells[:, 2], cells[:, 1] - cells[:, 3]
    cells = cells[dy.abs() != dx.abs()]
    ay, ax, by, bx = cells[torch.randint(len(cells), (number,), generator=generator)].unbind(1)  # (N,) each
    grid = _fillers(number, size, generator)
    grid.scatter_(1, (ay * size + ax)[:, None], A).scatter_(1, (by * size + bx)[:, None], B)
    dy, dx = ay - by, ax - bx
    label = torch.where(dx.abs() > dy.abs(), (dx > 0).long(), 2 + (dy > 0).long())
    return grid.view(number, size, size), label


def count(number: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """How many A's, 0 to 5 with equal chances: the control that needs no position.

    Args:
        number: grids.
        size: cells a side, at least 3.
        generator: the source of randomness.

    Returns:
        symbols (N, G, G) int64 in 0 to 7 without any 1, and labels (N,) int64.
    """
    _check(number, size, 3)
    label = torch.randint(MOST + 1, (number,), generator=generator)
    rank = torch.rand(number, size * size, generator=generator).argsort(1).argsort(1)  # a random order of the cells
    grid = _fillers(number, size, generator).masked_fill(rank < label[:, None], A)
    return grid.view(number, size, size), label


def three(number: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Three A's: side by side in a row (class 1), or in a column or scattered (class 0, half each).

    Args:
        number: grids.
        size: cells a side, at least 3.
        generator: the source of randomness.

    Returns:
        symbols (N, G, G) int64 in 0 to 7 without any 1, and labels (N,) int64.
    """
    _check(number, size, 3)
    kind = torch.tensor([0, 1, 2, 2])[torch.randint(4, (number,), generator=generator)]  # column, scattered, row, row
    major = torch.randint(size, (number,), generator=generator)
    minor = torch.randint(size - 2, (number,), generator=generator)[:, None] + torch.arange(3)  # (N, 3)
    row, column = major[:, None] * size + minor, minor * size + major[:, None]  # (N, 3) cells
    cells = torch.where((kind == 2)[:, None], row, column)
    scattered = kind == 1
    cells[scattered] = _scattered(int(scattered.sum()), size, generator)
    grid = _fillers(number, size, generator).scatter(1, cells, A)
    return grid.view(number, size, size), (kind == 2).long()


def _scattered(number: int, size: int, generator: torch.Generator) -> Tensor:
    """Three different cells (N, 3) that are not neighbours in a line; drawn again until none is."""
    cells = torch.empty(number, 3, dtype=torch.int64)
    left = torch.arange(number)
    while len(left):
        order = torch.rand(len(left), size * size, generator=generator).argsort(1)
        cells[left] = order[:, :3].sort(1).values
        left = left[_in_line(cells[left], size)]
    return cells


def _in_line(cells: Tensor, size: int) -> Tensor:
    """Whether sorted cells (N, 3) are adjacent in a row or in a column: (N,) bool."""
    y, x = cells // size, cells % size
    row = (y[:, 0] == y[:, 2]) & (x[:, 2] - x[:, 0] == 2)
    column = (x == x[:, :1]).all(1) & (y[:, 2] - y[:, 0] == 2)
    return row | column
