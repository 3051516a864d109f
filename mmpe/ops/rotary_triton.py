"""Triton kernels for `mmpe.ops.rotary`: one pass over x forward, one pass over the gradient backward.

Imported only where Triton is installed and x is on a GPU (or under TRITON_INTERPRET=1, where the tests run it).
The strides of x are read as they are, so views of a fused qkv tensor need no copy.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
"""Channels of x that one program handles at a time, over all its tokens."""


@triton.jit
def _load_planes(
    row_ptr, mask, PLANES: tl.constexpr, PLANES_PAD: tl.constexpr, HALF: tl.constexpr, WORK: tl.constexpr
):  # fmt: skip
    """Both channels of every plane of the tokens at row_ptr (BLOCK, 1): 2 x (BLOCK, PLANES_PAD)."""
    if HALF:
        plane = row_ptr + tl.arange(0, PLANES_PAD)[None, :]
        a = tl.load(plane, mask=mask, other=0.0)
        b = tl.load(plane + PLANES, mask=mask, other=0.0)
    else:
        # Whole rows in order, then split in registers: loading every second channel would waste half of each access.
        channel = tl.arange(0, 2 * PLANES_PAD)[None, :]
        both = tl.load(row_ptr + channel, mask=_channel_mask(mask, PLANES_PAD), other=0.0)
        a, b = tl.split(tl.reshape(both, (mask.shape[0], PLANES_PAD, 2)))
    return a.to(WORK), b.to(WORK)


@triton.jit
def _channel_mask(mask, PLANES_PAD: tl.constexpr):
    """The mask of planes (BLOCK, PLANES_PAD) as a mask of interleaved channels (BLOCK, 2 PLANES_PAD)."""
    return tl.reshape(tl.join(mask, mask), (mask.shape[0], 2 * PLANES_PAD))


@triton.jit
def _rotate_kernel(
    x_ptr, out_ptr, cos_ptr, sin_ptr, heads, tokens, dim,
    xb, xh, xn, ob, oh, on, tb, th, tn,
    PLANES: tl.constexpr, PLANES_PAD: tl.constexpr, REST_PAD: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr, INVERSE: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK tokens of one head of one sample."""
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    plane = tl.arange(0, PLANES_PAD)
    live = token < tokens
    mask = live[:, None] & (plane < PLANES)[None, :]
    n = token.to(tl.int64)[:, None]

    table = batch * tb + head * th + n * tn + plane[None, :]
    cos = tl.load(cos_ptr + table, mask=mask, other=0.0).to(WORK)
    sin = tl.load(sin_ptr + table, mask=mask, other=0.0).to(WORK)
    if INVERSE:
        sin = -sin
    source = x_ptr + batch * xb + head * xh + n * xn
    target = out_ptr + batch * ob + head * oh + n * on
    a, b = _load_planes(source, mask, PLANES, PLANES_PAD, HALF, WORK)
    out_a = (a * cos - b * sin).to(out_ptr.dtype.element_ty)
    out_b = (a * sin + b * cos).to(out_ptr.dtype.element_ty)
    if HALF:
        tl.store(target + plane[None, :], out_a, mask=mask)
        tl.store(target + PLANES + plane[None, :], out_b, mask=mask)
    else:
        both = tl.reshape(tl.join(out_a, out_b), (BLOCK, 2 * PLANES_PAD))
        channels = target + tl.arange(0, 2 * PLANES_PAD)[None, :]
        tl.store(channels, both, mask=_channel_mask(mask, PLANES_PAD))
    if REST_PAD > 0:
        channel = 2 * PLANES + tl.arange(0, REST_PAD)[None, :]
        rest = live[:, None] & (channel < dim)
        tl.store(target + channel, tl.load(source + channel, mask=rest), mask=rest)


@triton.jit
def _table_gradient_kernel(
    x_ptr, grad_ptr, cos_grad_ptr, sin_grad_ptr, table_heads, batches, heads, tokens,
    xb, xh, xn, gb, gh, gn,
    PLANES: tl.constexpr, PLANES_PAD: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK tokens of one row of the table, summed in order over the samples and heads that share it."""
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first_batch, first_head = (row // table_heads) * batches, (row % table_heads) * heads
    plane = tl.arange(0, PLANES_PAD)
    mask = (token < tokens)[:, None] & (plane < PLANES)[None, :]
    n = token.to(tl.int64)[:, None]

    cos_sum = tl.zeros((BLOCK, PLANES_PAD), WORK)
    sin_sum = tl.zeros((BLOCK, PLANES_PAD), WORK)
    for served in range(batches * heads):
        batch = (first_batch + served // heads).to(tl.int64)
        head = (first_head + served % heads).to(tl.int64)
        x_row = x_ptr + batch * xb + head * xh + n * xn
        grad_row = grad_ptr + batch * gb + head * gh + n * gn
        a, b = _load_planes(x_row, mask, PLANES, PLANES_PAD, HALF, WORK)
        grad_a, grad_b = _load_planes(grad_row, mask, PLANES, PLANES_PAD, HALF, WORK)
        cos_sum += grad_a * a + grad_b * b
        sin_sum += grad_b * a - grad_a * b
    table = row.to(tl.int64) * tokens * PLANES + n * PLANES + plane[None, :]
    tl.store(cos_grad_ptr + table, cos_sum, mask=mask)
    tl.store(sin_grad_ptr + table, sin_sum, mask=mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, half: bool, inverse: bool = False) -> Tensor:
    """Rotate x (B, H, N, D) by tables that broadcast to (B, H, N, F); `inverse` turns by the opposite angle."""
    x = _with_unit_stride(x)
    out = torch.empty_like(x)
    batch, heads, tokens, dim = x.shape
    planes = cos.shape[-1]
    if x.numel() == 0:
        return out
    cos, sin = (_with_unit_stride(t.expand(batch, heads, tokens, planes)) for t in (cos, sin))
    if sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    block, pad = _block(planes, tokens)
    rest = dim - 2 * planes
    with _on_device(x):
        _rotate_kernel[(batch * heads, triton.cdiv(tokens, block))](
            x, out, cos, sin, heads, tokens, dim, *x.stride()[:3], *out.stride()[:3], *cos.stride()[:3],
            PLANES=planes, PLANES_PAD=pad, REST_PAD=triton.next_power_of_2(rest) if rest else 0, BLOCK=block,
            HALF=half, INVERSE=inverse, WORK=_work(x),
        )  # fmt: skip
    return out


def table_gradient(grad: Tensor, x: Tensor, cos: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """Gradients of cos and sin from grad and x (B, H, N, D), each summed over what the table was broadcast along."""
    x, grad = _with_unit_stride(x), _with_unit_stride(grad)
    batch, heads, tokens, _ = x.shape
    table_batch, table_heads, rows, planes = (1,) * (4 - cos.dim()) + tuple(cos.shape)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    sums = torch.zeros(2, table_batch, table_heads, tokens, planes, device=x.device, dtype=dtype)
    block, pad = _block(planes, tokens)
    if x.numel():
        with _on_device(x):
            _table_gradient_kernel[(table_batch * table_heads, triton.cdiv(tokens, block))](
                x, grad, sums[0], sums[1], table_heads, batch // table_batch, heads // table_heads, tokens,
                *x.stride()[:3], *grad.stride()[:3],
                PLANES=planes, PLANES_PAD=pad, BLOCK=block, HALF=half, WORK=_work(x),
            )  # fmt: skip
    if rows != tokens:
        sums = sums.sum(-2, keepdim=True)
    grad_cos, grad_sin = (s.reshape(cos.shape).to(cos.dtype) for s in sums.unbind(0))
    return grad_cos, grad_sin


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _block(planes: int, tokens: int) -> tuple[int, int]:
    """Tokens of one program, and the planes rounded up to a power of two."""
    pad = triton.next_power_of_2(max(1, planes))
    return max(1, min(_TILE // (2 * pad), triton.next_power_of_2(tokens))), pad


def _work(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _on_device(x: Tensor) -> AbstractContextManager[object]:
    # Triton launches on the current device, which need not be the one of x.
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
