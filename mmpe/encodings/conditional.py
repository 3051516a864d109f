"""Conditional position encodings: position from the neighbourhood, by a depthwise convolution over the token grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoding import PositionEncoding
from ..positions import Positions
from ..registry import register_encoding

PaddingMode = Literal["zeros", "circular", "reflect"]
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@register_encoding("cpe")
class CPE(PositionEncoding):
    """PEG: between blocks, each token gets a depthwise convolution of its neighbours on the grid added (CPVT, Twins).

    Zero padding is what tells absolute position: it leaks in from the border. Prefix tokens pass by. The tokens must
    fill a grid in row-major order, so it cannot follow patch dropout or packing. In 3D the kernel is a cube.

    Args:
        kernel_size: odd width of the kernel along every axis, at least 3.
        after_blocks: counts of blocks after which one acts; 1 is after the first block, 0 before it. By default (1,),
            as in the paper, or (0,) where there is one block only.
        padding_mode: what lies outside of the grid. "circular" and "reflect" carry no absolute position (an ablation).
        bias: add a learned vector to the convolution.
        separable: follow the depthwise convolution by one of width 1 over the channels.
    """

    kind = "token"
    needs_grid = True
    embeds_content = True
    terms = ("embed",)
    equation = "x <- x + DWConv(x) on the grid of tokens, zero padding"
    source = "Chu et al., CPVT, arXiv 2102.10882; code as Twins, arXiv 2104.13840"
    promises = ("interior_shift_equivariant",)
    parity = "official"
    cost = "one depthwise convolution (k^A multiplications a channel) between two blocks"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        kernel_size: int = 3,
        after_blocks: Sequence[int] | None = None,
        padding_mode: PaddingMode = "zeros",
        bias: bool = True,
        separable: bool = False,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        if kernel_size < 3 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={kernel_size} must be odd and at least 3, to have a centre and neighbours")
        if padding_mode not in get_args(PaddingMode):
            raise ValueError(f"padding_mode={padding_mode!r} must be one of {', '.join(get_args(PaddingMode))}")
        self.kernel_size, self.padding_mode = kernel_size, padding_mode
        self.after_blocks = _checked_blocks(after_blocks, depth)
        count = len(self.after_blocks)
        self.weight = nn.Parameter(torch.empty(count, dim, 1, *(kernel_size,) * axes))
        self.bias = nn.Parameter(torch.empty(count, dim)) if bias else None
        self.pointwise = nn.Parameter(torch.empty(count, dim, dim)) if separable else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # As Twins: variance 2 / fan_out, which for a depthwise kernel is the number of its taps.
        nn.init.normal_(self.weight, std=(2 / self.kernel_size**self.axes) ** 0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.pointwise is not None:
            nn.init.normal_(self.pointwise, std=(2 / self.dim) ** 0.5)

    def embed(self, x: Tensor, positions: Positions, layer: int = 0) -> Tensor:
        self.check_layer(layer)
        self.check_tokens(x, positions)
        if layer not in self.after_blocks:
            return x
        i = self.after_blocks.index(layer)
        bias = None if self.bias is None else self.bias[i]
        pointwise = None if self.pointwise is None else self.pointwise[i]
        grid = positions.grid_size or ()
        return peg(x, self.weight[i], bias, grid, 1, positions.prefix, self.padding_mode, pointwise)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kernel_size={self.kernel_size}, after_blocks={self.after_blocks}"


def peg(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grid: Sequence[int],
    stride: int = 1,
    prefix: int = 0,
    padding_mode: PaddingMode = "zeros",
    pointwise: Tensor | None = None,
    identity: bool = True,
) -> Tensor:
    """Position encoding generator: y = x + DWConv(x) on the grid; with a stride above 1 the identity is left out.

    Args:
        x: (B, prefix + prod(grid), C) tokens, row-major.
        weight: (C, 1, k, ...) depthwise kernel, one k for each axis.
        bias: (C,) or None.
        grid: size of the token grid, 1 to 3 axes.
        stride: step of the convolution along every axis.
        prefix: number of leading tokens that pass by unchanged.
        padding_mode: "zeros", "circular" or "reflect".
        pointwise: (C, C) weight of a convolution of width 1 that follows, or None.
        identity: add x; False for a kernel that was folded by `fold_identity`.

    Returns:
        (B, prefix + prod(new grid), C) in the dtype of x.
    """
    tokens = x[:, prefix:]  # (B, N, C)
    _check_grid(tokens.shape[1], grid, weight, padding_mode)
    image = tokens.transpose(1, 2).reshape(x.shape[0], x.shape[-1], *grid)  # (B, C, *grid)
    if len(grid) == 3:
        # oneDNN's bf16 gradient of a depthwise 3D kernel reads memory that nobody wrote if channels come last.
        image = image.contiguous()
    y = _depthwise(image, weight, bias, stride, padding_mode).flatten(2).transpose(1, 2)  # (B, N', C)
    if pointwise is not None:
        y = F.linear(y, pointwise.to(y.dtype))
    y = y.to(x.dtype)
    if identity and stride == 1:
        y = tokens + y
    return torch.cat([x[:, :prefix], y], dim=1) if prefix else y


def fold_identity(weight: Tensor) -> Tensor:
    """The kernel that does the work of kernel and identity at once, for inference: its centre tap grows by one."""
    folded = weight.clone()
    taps = folded.flatten(2)  # (C, 1, k^A), a view; the centre is the middle one
    taps[..., taps.shape[-1] // 2] += 1
    return folded


def _depthwise(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding_mode: PaddingMode) -> Tensor:
    pad = [size // 2 for size in weight.shape[2:]]
    weight = weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    if padding_mode != "zeros":
        x = F.pad(x, [p for size in reversed(pad) for p in (size, size)], mode=padding_mode)
        pad = [0] * len(pad)
    return _CONV[x.dim() - 2](x, weight, bias, stride, pad, groups=x.shape[1])


def _check_grid(count: int, grid: Sequence[int], weight: Tensor, padding_mode: str) -> None:
    total = 1
    for size in grid:
        total *= size
    if total != count or len(grid) != weight.dim() - 2:
        raise ValueError(
            f"{count} tokens after the prefix do not fill the grid {tuple(grid)} of a {weight.dim() - 2}-axis kernel"
        )
    smallest = {"zeros": 1, "circular": weight.shape[-1] // 2, "reflect": weight.shape[-1] // 2 + 1}[padding_mode]
    if min(grid) < smallest:
        raise ValueError(f"padding_mode={padding_mode!r} needs a grid of at least {smallest}, got {tuple(grid)}")


def _checked_blocks(after_blocks: Sequence[int] | None, depth: int) -> tuple[int, ...]:
    blocks = ((1,) if depth > 1 else (0,)) if after_blocks is None else tuple(after_blocks)
    if not blocks or len(set(blocks)) != len(blocks) or any(not 0 <= block < depth for block in blocks):
        raise ValueError(
            f"after_blocks={blocks} must be different counts of blocks from 0 to {depth - 1}: with depth={depth}, "
            "nothing reads the tokens after the last block"
        )
    return blocks
