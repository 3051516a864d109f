"""Rotation of channel planes by tables of cos and sin: the plain twin, and the choice of the fastest exact path.

    interleaved: plane f is channels (2f, 2f + 1)        half: plane f is channels (f, f + F)
    out_a = a cos - b sin,    out_b = a sin + b cos      (a, b) the two channels of a plane

Every path computes in float32 (float64 for float64 input) and rounds once. Which path runs:

    eager, CPU         complex products and cache-sized tiles (`rotary_cpu`)
    eager, CUDA        Triton (`rotary_triton`), forward and backward one pass each
    torch.compile      the plain twin; on the CPU interleaved planes as integer words, which vectorise
    export, tracing    the plain twin: real arithmetic only

Shapes: B batch, H heads, N tokens, D head dim, F planes; tables broadcast to (B, H, N, F).
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import rotary_cpu
from ._switch import fused_enabled

_LITTLE_ENDIAN = sys.byteorder == "little"


def rotate(x: Tensor, cos: Tensor, sin: Tensor, half: bool = False, phasor: Tensor | None = None) -> Tensor:
    """Rotate the first 2F channels of x (B, H, N, D) and pass the others through; differentiable in x, cos and sin.

    Args:
        x: floating-point tensor (B, H, N, D).
        cos: table that broadcasts to (B, H, N, F).
        sin: table of the same shape.
        half: planes are (f, f + F) instead of (2f, 2f + 1).
        phasor: cos + i sin where the caller has it already (`make_phasor`); never differentiated.

    Returns:
        (B, H, N, D) in the dtype of x.
    """
    if torch.compiler.is_compiling():
        return _rotate_compiled(x, cos, sin, half)
    if not _eager_fast(x):
        return rotate_plain(x, cos, sin, half)
    if torch.is_grad_enabled() and (x.requires_grad or cos.requires_grad or sin.requires_grad):
        return _Rotate.apply(x, cos, sin, half, phasor)
    return _rotate_eager(x, cos, sin, half, phasor)


def rotate_plain(x: Tensor, cos: Tensor, sin: Tensor, half: bool = False) -> Tensor:
    """The same in plain real arithmetic: what the other paths are tested against, and what is exported."""
    dtype = rotary_cpu.working_dtype(x)
    cos, sin = cos.to(dtype), sin.to(dtype)
    width = 2 * cos.shape[-1]
    a, b = (p.to(dtype) for p in split_planes(x[..., :width], half))  # 2 x (B, H, N, F)
    # Rounding before the parts are joined lets inductor write x.dtype at once, without a float32 tensor in between.
    parts = (a * cos - b * sin).to(x.dtype), (a * sin + b * cos).to(x.dtype)
    rotated = torch.cat(parts, -1) if half else torch.stack(parts, -1).flatten(-2)
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), -1)


def split_planes(x: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """The first and the second channel of every plane: (..., 2F) -> 2 x (..., F)."""
    planes = x.shape[-1] // 2
    if half:
        return x[..., :planes], x[..., planes:]
    first, second = x.unflatten(-1, (planes, 2)).unbind(-1)
    return first, second


def make_phasor(cos: Tensor, sin: Tensor) -> Tensor | None:
    """The table cos + i sin, where an eager path will use it (on the CPU); None elsewhere. Carries no gradient."""
    if torch.compiler.is_compiling() or cos.device.type != "cpu" or not _eager_fast(cos):
        return None
    return torch.complex(cos.detach(), sin.detach())


def _eager_fast(x: Tensor) -> bool:
    """Whether x may take a path other than the plain twin; fake tensors, subclasses and tracers may not."""
    if not fused_enabled() or type(x) not in (Tensor, torch.nn.Parameter) or torch.jit.is_tracing() or _transformed():
        return False
    return x.device.type == "cpu" or (x.is_cuda and _has_triton())


def _transformed() -> bool:
    """Whether torch.func (vmap, grad, jvp) or forward-mode AD is at work, which see through plain arithmetic only."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _rotate_eager(
    x: Tensor, cos: Tensor, sin: Tensor, half: bool, phasor: Tensor | None, inverse: bool = False
) -> Tensor:
    """One pass over x without autograd; `inverse` rotates by the opposite angle."""
    if x.is_cuda:
        from . import rotary_triton

        return rotary_triton.rotate(x, cos, sin, half, inverse)
    if half:
        return rotary_cpu.rotate_half_split(x, cos, -sin if inverse else sin)
    phasor = torch.complex(cos, sin) if phasor is None else phasor
    return rotary_cpu.rotate_interleaved(x, torch.conj_physical(phasor) if inverse else phasor)


class _Rotate(torch.autograd.Function):
    """Eager rotation. Keeps the table alone for the backward pass, and x only if the table is being learned."""

    @staticmethod
    def forward(ctx, x, cos, sin, half, phasor):  # type: ignore[no-untyped-def]
        learned = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        ctx.half = half
        ctx.save_for_backward(cos, sin, phasor, x if learned else None)
        return _rotate_eager(x, cos, sin, half, phasor)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        cos, sin, phasor, x = ctx.saved_tensors
        grad_x = grad_cos = grad_sin = None
        # Gradients of gradients are rare: with create_graph the plain twin records them.
        recorded = torch.is_grad_enabled()
        if ctx.needs_input_grad[0]:
            if recorded:
                grad_x = rotate_plain(grad, cos, -sin, ctx.half)
            else:
                grad_x = _rotate_eager(grad, cos, sin, ctx.half, phasor, inverse=True)
        if x is not None:
            table_gradient = table_gradient_plain if recorded else _table_gradient
            grad_cos, grad_sin = table_gradient(grad, x, cos, ctx.half)
        return grad_x, grad_cos, grad_sin, None, None


def table_gradient_plain(grad: Tensor, x: Tensor, cos: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """Gradients of cos and sin: grad and x (B, H, N, D) -> 2 x the shape of `cos`, summed over what it broadcasts."""
    width, dtype = 2 * cos.shape[-1], rotary_cpu.working_dtype(x)
    a, b = (p.to(dtype) for p in split_planes(x[..., :width], half))  # 2 x (B, H, N, F)
    ga, gb = (p.to(dtype) for p in split_planes(grad[..., :width], half))
    grad_cos = (ga * a + gb * b).sum_to_size(cos.shape)
    grad_sin = (gb * a - ga * b).sum_to_size(cos.shape)
    return grad_cos.to(cos.dtype), grad_sin.to(cos.dtype)


def _table_gradient(grad: Tensor, x: Tensor, cos: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        from . import rotary_triton

        return rotary_triton.table_gradient(grad, x, cos, half)
    return rotary_cpu.table_gradient(grad, x, cos, half)


def _rotate_compiled(x: Tensor, cos: Tensor, sin: Tensor, half: bool) -> Tensor:
    if cos.requires_grad or sin.requires_grad or torch.compiler.is_exporting():
        return rotate_plain(x, cos, sin, half)
    return _RotateCompiled.apply(x, cos, sin, half)


class _RotateCompiled(torch.autograd.Function):
    """Rotation by a fixed table, for compilers: backward is the same code, not the derivative of slices and cat."""

    @staticmethod
    def forward(ctx, x, cos, sin, half):  # type: ignore[no-untyped-def]
        ctx.half = half
        ctx.save_for_backward(cos, sin)
        return _rotate_traced(x, cos, sin, half)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        return _rotate_traced(grad, cos, -sin, ctx.half), None, None, None


def _rotate_traced(x: Tensor, cos: Tensor, sin: Tensor, half: bool) -> Tensor:
    if half or not _words_pay(x, cos):
        return rotate_plain(x, cos, sin, half)
    width = 2 * cos.shape[-1]
    rotated = _rotate_words(x[..., :width], cos, sin)
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), -1)


def _words_pay(x: Tensor, cos: Tensor) -> bool:
    """Whether interleaved planes are better read as integer words: on the CPU, for two dtypes."""
    if not (fused_enabled() and _LITTLE_ENDIAN) or x.device.type != "cpu":
        return False
    return x.dtype in (torch.float32, torch.bfloat16) and cos.dtype == torch.float32


def _rotate_words(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved planes read and written as integers of twice the width: (..., 2F) -> (..., 2F).

    Inductor's CPU code for loads and stores of every second channel is scalar; words of one plane are contiguous.
    """
    # Words need even strides; inductor drops the clone of an x that is contiguous already. What remains refused (by
    # torch, at run time) is a contiguous input of the compiled function at an odd storage offset: dynamo cannot see it.
    x = x.clone(memory_format=torch.contiguous_format)
    return _rotate_words_bf16(x, cos, sin) if x.dtype == torch.bfloat16 else _rotate_words_fp32(x, cos, sin)


def _rotate_words_fp32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    word = x.view(torch.int64)  # (..., F): a in the low half, b in the high half
    a = word.to(torch.int32).view(torch.float32)
    b = (word >> 32).to(torch.int32).view(torch.float32)
    low = (a * cos - b * sin).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    high = (a * sin + b * cos).view(torch.int32).to(torch.int64) << 32
    return (low | high).view(torch.float32)


def _rotate_words_bf16(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    word = x.view(torch.int32)  # (..., F); a bfloat16 is the upper half of the float32 of the same value
    a = (word << 16).view(torch.float32)
    b = (word & -0x10000).view(torch.float32)
    low = _round_to_upper_half(a * cos - b * sin) >> 16 & 0xFFFF
    high = _round_to_upper_half(a * sin + b * cos) & -0x10000
    return (low | high).view(torch.bfloat16)


def _round_to_upper_half(value: Tensor) -> Tensor:
    """Bits of float32 `value` whose upper 16 are its bfloat16, rounded to nearest even.

    NaN stays NaN: those that arithmetic makes, or passes on from a bfloat16, have low bits that cannot carry.
    """
    bits = value.view(torch.int32)
    return bits + ((bits >> 16 & 1) + 0x7FFF)
