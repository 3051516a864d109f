"""Eager rotation on the CPU: as few passes over memory as torch's own kernels allow.

Interleaved planes in float32 are one complex product, which torch vectorises and which reads and writes everything
once. What needs several kernels (half-split planes, 16-bit dtypes) goes through x in tiles that stay in the cache, so
that main memory is still read and written once and the temporary tensors are a few tiles in all.

Shapes: x (B, H, N, D), tables broadcast to (B, H, N, F); nothing here is differentiable by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TILE = 3 << 17
"""Elements of a tile for each thread: 1.5 MiB in float32. Smaller tiles cost more in calls, larger ones in misses."""
_SMALL = 1 << 18
"""Tensors of so few elements are one tile; of larger ones a tile is at most a quarter, which bounds the memory."""


def working_dtype(x: Tensor) -> torch.dtype:
    """What x is rotated in: float64 stays, everything else is float32 (torch.promote_types would be exported)."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def is_packable(x: Tensor) -> bool:
    """Whether neighbouring channels of x can be viewed as one element of twice the width."""
    *outer, last = x.stride()
    even = (x.shape[-1], x.storage_offset(), *outer)
    return last == 1 and all(number % 2 == 0 for number in even)


def rotate_interleaved(x: Tensor, phasor: Tensor) -> Tensor:
    """Multiply the planes (2f, 2f + 1) of x by phasor = cos + i sin."""
    out, source, target = _start(x, 2 * phasor.shape[-1])
    dtype = working_dtype(x)
    phasor = phasor.to(dtype.to_complex())
    if dtype == x.dtype and is_packable(source) and is_packable(target):
        torch.mul(_as_complex(source), phasor, out=_as_complex(target))
        return out
    for x_tile, out_tile, phasor_tile in _tiles(source, target, phasor):
        _rotate_interleaved_tile(x_tile, phasor_tile, out_tile)
    return out


def _rotate_interleaved_tile(x: Tensor, phasor: Tensor, out: Tensor) -> None:
    # A function of its own, so that its temporary is gone before the next tile makes another.
    work = _packable_copy(x)
    _as_complex(work).mul_(phasor)
    out.copy_(work)


def rotate_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the planes (f, f + F) of x by the tables cos and sin."""
    planes = cos.shape[-1]
    out, source, target = _start(x, 2 * planes)
    dtype = working_dtype(x)
    # One product over whole rows and two over half rows: short rows are what torch's kernels are slow at.
    cos_twice, sin = torch.cat((cos, cos), -1).to(dtype), sin.to(dtype)
    for x_tile, out_tile, c, s in _tiles(source, target, cos_twice, sin):
        _rotate_half_split_tile(x_tile, c, s, out_tile)
    return out


def _rotate_half_split_tile(x: Tensor, cos_twice: Tensor, sin: Tensor, out: Tensor) -> None:
    planes = sin.shape[-1]
    work = x.to(sin.dtype)
    result = torch.mul(work, cos_twice, out=out) if work is x else work * cos_twice
    result[..., :planes].addcmul_(work[..., planes:], sin, value=-1)
    result[..., planes:].addcmul_(work[..., :planes], sin)
    if result is not out:
        out.copy_(result)


def table_gradient(grad: Tensor, x: Tensor, cos: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """Gradients of cos and sin, summed over the dimensions along which the table was broadcast."""
    planes, dtype = cos.shape[-1], working_dtype(x)
    x = x if x.stride(-1) == 1 else x.contiguous()
    shape = (1,) * (4 - cos.dim()) + tuple(cos.shape[:-1])
    sums = torch.zeros(*shape, 2 * planes, dtype=dtype)
    products = _half_split_products if half else _interleaved_products
    for x_tile, grad_tile, sum_tile in _tiles(x[..., : 2 * planes], grad[..., : 2 * planes], sums):
        shared = tuple(slice(1) if size == 1 else slice(None) for size in shape)
        total = sum_tile[shared]
        total.add_(products(x_tile, grad_tile.to(dtype)).sum_to_size(total.shape))
    grad_cos, grad_sin = (sums[..., :planes], sums[..., planes:]) if half else (sums[..., 0::2], sums[..., 1::2])
    return grad_cos.reshape(cos.shape).to(cos.dtype), grad_sin.reshape(cos.shape).to(cos.dtype)


def _interleaved_products(x: Tensor, grad: Tensor) -> Tensor:
    # The product conj(x) * grad is (ga a + gb b) + i (gb a - ga b).
    grad = grad if is_packable(grad) else _packable_copy(grad)
    return torch.view_as_real(_as_complex(_packable_copy(x)).conj_physical_().mul_(_as_complex(grad))).flatten(-2)


def _half_split_products(x: Tensor, grad: Tensor) -> Tensor:
    planes, x = x.shape[-1] // 2, x.to(grad.dtype)
    a, b, ga, gb = x[..., :planes], x[..., planes:], grad[..., :planes], grad[..., planes:]
    out = torch.empty_like(x)
    torch.mul(ga, a, out=out[..., :planes]).addcmul_(gb, b)
    torch.mul(gb, a, out=out[..., planes:]).addcmul_(ga, b, value=-1)
    return out


def _start(x: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """An output laid out like x with the unrotated channels in place, and the parts of x and of it to be rotated."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty_like(x)
    if width == x.shape[-1]:
        return out, x, out
    out[..., width:] = x[..., width:]
    return out, x[..., :width], out[..., :width]


def _packable_copy(x: Tensor) -> Tensor:
    # Dimensions of size 1 keep whatever stride they had, odd ones too.
    copy = x.to(working_dtype(x), copy=True)
    return copy if is_packable(copy) else copy.clone(memory_format=torch.contiguous_format)


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (x.shape[-1] // 2, 2)))


def _tiles(x: Tensor, *others: Tensor) -> zip[tuple[Tensor, ...]]:
    """Matching tiles of x (B, H, N, D) and of tensors that broadcast to its (B, H, N)."""
    sizes = _tile_sizes(x)
    if all(size >= whole for size, whole in zip(sizes, x.shape, strict=False)):
        return zip((x,), *((t,) for t in others), strict=True)
    whole = (t.expand(*x.shape[:-1], t.shape[-1]) for t in others)
    return zip(*(_split(t, sizes) for t in (x, *whole)), strict=True)


def _tile_sizes(x: Tensor) -> list[int]:
    """How many samples, heads and tokens of x (B, H, N, D) make one tile, neighbours in memory first."""
    elements = min(_TILE * torch.get_num_threads(), max(_SMALL, x.numel() // 4))
    budget = max(1, elements // max(1, x.shape[-1]))
    sizes = [1, 1, 1]
    for dim in sorted(range(3), key=x.stride):
        sizes[dim] = max(1, min(x.shape[dim], budget))
        budget = max(1, budget // sizes[dim])
    return sizes


def _split(x: Tensor, sizes: list[int]) -> list[Tensor]:
    tiles = [x]
    for dim, size in enumerate(sizes):
        if size < x.shape[dim]:
            tiles = [piece for tile in tiles for piece in tile.split(size, dim)]
    return tiles
