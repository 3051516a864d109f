"""LOOPE: sines and cosines of a real-valued patch order, a space-filling curve plus a learned correction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoding import AttentionTerms, PositionEncoding
from ..positions import Positions
from ..precision import full_precision
from ..registry import register_encoding

_LEVELS = 24
"""Levels of the curve in a compiled graph, which cannot stop when all cells are done; enough for 2048 cells a side."""


@register_encoding("loope")
class LOOPE(PositionEncoding):
    """Learned patch order: sines and cosines of the rank on the Gilbert curve plus a learned, content-dependent shift.

    The order is X = X_G + X_C. X_G is the rank of a patch along the generalised Hilbert ("Gilbert") curve, which visits
    neighbours one after the other on a grid of any size. X_C is a shift of the patch by its content,
    bound * tanh(MLP(LayerNorm(x))), which starts at zero.

    There is no official code, and public summaries give X_G + X_C and the embedding, but neither the network nor the
    range of X_C nor the frequencies: those here are the least that does what the paper says. Videos, an extension, run
    through the curve of each frame forwards and backwards in turn, so that consecutive patches remain neighbours; in
    one axis the order is that of the sequence. Prefix tokens get nothing.

    Args:
        temperature: the ratio between the fastest and the slowest frequency.
        bound: largest shift of a patch, in ranks; below 0.5 no two patches change places.
        hidden_dim: hidden width of the network of the shift.
    """

    kind = "token"
    needs_grid = True
    embeds_content = True
    terms = ("embed",)
    equation = "x_i <- x_i + [sin(X_i w), cos(X_i w)],  X_i = rank_i + bound tanh(MLP(x_i)),  w_k = T^(-2k/C)"
    source = "Chowdhury et al., LOOPE: Learnable Optimal Patch Order in Positional Embeddings, arXiv 2504.14386"
    promises = ("transpose_invariant",)
    cost = "a small MLP on the tokens and one addition before block 0"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        temperature: float = 10000.0,
        bound: float = 0.5,
        hidden_dim: int = 32,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        if dim % 2:
            raise ValueError(f"loope needs an even dim, for pairs of sines and cosines, got dim={dim}")
        if temperature <= 0 or bound < 0 or hidden_dim < 1:
            raise ValueError(
                f"temperature={temperature} must be positive, bound={bound} not negative, hidden_dim={hidden_dim} at "
                "least 1"
            )
        self.temperature, self.bound = temperature, bound
        self.weight1 = nn.Parameter(torch.empty(hidden_dim, dim))
        self.bias1 = nn.Parameter(torch.empty(hidden_dim))
        self.weight2 = nn.Parameter(torch.empty(1, hidden_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight1, std=0.02)
        nn.init.zeros_(self.bias1)
        nn.init.zeros_(self.weight2)

    def embed(self, x: Tensor, positions: Positions, layer: int = 0) -> Tensor:
        if layer != 0:
            return x
        self.check_positions(positions)
        rank = curve_rank(positions.grid_size or (), positions.device)
        order = rank + self.shift(x[..., positions.prefix :, :])  # (B, N)
        with full_precision(order):
            half = torch.arange(self.dim // 2, dtype=torch.float32, device=order.device)
            angles = order.unsqueeze(-1) * self.temperature ** (-2 * half / self.dim)
            rows = torch.cat([angles.sin(), angles.cos()], dim=-1)  # (B, N, C)
        return x + F.pad(rows, (0, 0, positions.prefix, 0)).to(x.dtype)

    def shift(self, patches: Tensor) -> Tensor:
        """X_C of patch tokens (B, N, C) -> (B, N) float32, at most `bound` in size."""
        with full_precision(patches):
            normed = F.layer_norm(patches.float(), (self.dim,), eps=1e-6)
            hidden = F.gelu(F.linear(normed, self.weight1, self.bias1))
            return self.bound * F.linear(hidden, self.weight2).squeeze(-1).tanh()

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        # Only `embed` needs the grid: patches may be dropped after it.
        if positions.num_axes != self.axes:
            self.check_positions(positions)
        return AttentionTerms()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bound={self.bound}, temperature={self.temperature}"


def curve_rank(sizes: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Rank of every cell of a grid in its order, row-major -> (prod(sizes),) float32.

    Args:
        sizes: grid of 1 to 3 axes; see `LOOPE` for the order in each case.
        device: where the tensor is made.
    """
    if len(sizes) == 1:
        return torch.arange(sizes[0], dtype=torch.float32, device=device)
    height, width = sizes[-2:]
    if torch.compiler.is_compiling():
        rank = _gilbert_rank(height, width, device, _LEVELS).float()
    else:
        rank = torch.tensor(_known_rank(height, width), dtype=torch.float32, device=device)
    if len(sizes) == 2:
        return rank
    count = height * width
    frames = torch.arange(sizes[0], dtype=torch.float32, device=device)[:, None]
    there_and_back = torch.where(frames % 2 == 0, rank, count - 1 - rank)
    return (frames * count + there_and_back).flatten()


def gilbert_path(height: int, width: int) -> Tensor:
    """The cells (row, column) of a grid in the order of the Gilbert curve -> (height * width, 2) int64."""
    order = torch.tensor(_known_rank(height, width)).argsort()
    return torch.stack([order // width, order % width], dim=-1)


@lru_cache(maxsize=64)
def _known_rank(height: int, width: int) -> tuple[int, ...]:
    return tuple(_gilbert_rank(height, width, "cpu").tolist())


def _gilbert_rank(
    height: int, width: int, device: torch.device | str | None, levels: int | None = None
) -> Tensor:
    """Rank of every cell on the generalised Hilbert curve, row-major (N,) int64.

    All cells descend through the rectangles of the construction at the same time. A cell at (u, v) of a rectangle that
    is a cells along the curve's direction and b across it counts the cells of the parts that the curve visits before
    its own. A rectangle more than 1.5 times as long as wide is halved; another one is left in three parts: in, across
    the far half, and back. Halves are even where they can be; a length that runs against its axis is halved upwards.

    Args:
        height: number of rows.
        width: number of columns; the curve starts along the longer side.
        device: where the tensor is made.
        levels: number of descents; None goes on until all cells are done, which waits for the device.
    """
    # By broadcasting: ONNX has no division by a size that is not known yet.
    row, column = (x.flatten() for x in torch.meshgrid(
        torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij"))  # fmt: skip
    along = torch.full_like(row, width) >= height  # elementwise, so that a graph of any size knows both cases
    u, v = torch.where(along, column, row), torch.where(along, row, column)
    a = torch.where(along, width, height)
    b = torch.where(along, height, width)
    forth_a, forth_b = torch.ones_like(along), torch.ones_like(along)
    rank = torch.zeros_like(row)
    while levels is None or levels > 0:
        line = (a == 1) | (b == 1)
        rank = rank + torch.where(line, u + v, 0)
        a, b, u, v = (torch.where(line, done, x) for done, x in ((1, a), (1, b), (0, u), (0, v)))
        if levels is None and bool(line.all()):
            break
        levels = levels - 1 if levels is not None else None
        step = _descend(a, b, u, v, forth_a, forth_b)
        rank = rank + torch.where(line, 0, step[0])
        a, b, u, v = (torch.where(line, x, new) for x, new in zip((a, b, u, v), step[1:5], strict=True))
        forth_a, forth_b = step[5:]
    return rank


def _descend(a: Tensor, b: Tensor, u: Tensor, v: Tensor, forth_a: Tensor, forth_b: Tensor) -> tuple[Tensor, ...]:
    """One level of the curve: cells visited before the part of each cell, and (a, b, u, v, forth_a, forth_b) in it."""
    half_a, half_b = (torch.div(n + ~forth, 2, rounding_mode="floor") for n, forth in ((a, forth_a), (b, forth_b)))
    is_long = 2 * a > 3 * b
    half_a = half_a + (is_long & (half_a % 2 == 1) & (a > 2))
    half_b = half_b + (~is_long & (half_b % 2 == 1) & (b > 2))
    first, second = is_long & (u < half_a), is_long & (u >= half_a)
    enter = ~is_long & (v < half_b) & (u < half_a)
    across = ~is_long & (v >= half_b)
    leave = ~is_long & (v < half_b) & (u >= half_a)
    before = torch.where(second, half_a * b, 0) + torch.where(across | leave, half_a * half_b, 0)
    before = before + torch.where(leave, a * (b - half_b), 0)
    turned = enter | leave
    new_a = torch.where(first, half_a, torch.where(second, a - half_a, torch.where(turned, half_b, a)))
    new_b = torch.where(enter, half_a, torch.where(across, b - half_b, torch.where(leave, a - half_a, b)))
    new_u = torch.where(second, u - half_a, torch.where(enter, v, torch.where(leave, half_b - 1 - v, u)))
    new_v = torch.where(across, v - half_b, torch.where(enter, u, torch.where(leave, a - 1 - u, v)))
    new_forth_a = (turned & (forth_b ^ leave)) | (~turned & forth_a)  # ONNX runtimes choose between numbers only
    new_forth_b = (turned & (forth_a ^ leave)) | (~turned & forth_b)
    return before, new_a, new_b, new_u, new_v, new_forth_a, new_forth_b
