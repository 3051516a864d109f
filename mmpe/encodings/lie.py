"""Rotations as exponentials of skew-symmetric generators, and their application to q and k block by block.

A head of D channels is cut into m = D / b blocks of b neighbouring channels. Every block has its own rotation, an
orthogonal b x b matrix for each token, which acts on column vectors: out_i = sum_j R_ij x_j.

Shapes: B batch, H heads (1 where all heads share), N tokens (prefix included), D head dim, m blocks, b block size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..encoding import AttentionTerms
from ..ops import fused_enabled
from ..precision import full_precision

# ---------------------------------------------------------------- generators and their exponentials


def skew_symmetric(upper: Tensor, size: int) -> Tensor:
    """S = U - U^T with the entries of the strict upper triangle of U row by row: (..., b (b-1) / 2) -> (..., b, b)."""
    rows, columns = torch.triu_indices(size, size, offset=1, device=upper.device)
    triangle = upper.new_zeros(*upper.shape[:-1], size, size)
    triangle[..., rows, columns] = upper
    return triangle - triangle.mT


def upper_triangle(matrix: Tensor) -> Tensor:
    """The entries above the diagonal, row by row: (..., b, b) -> (..., b (b-1) / 2)."""
    rows, columns = torch.triu_indices(matrix.shape[-2], matrix.shape[-1], offset=1, device=matrix.device)
    return matrix[..., rows, columns]


def cayley(generator: Tensor) -> Tensor:
    """P = (I - S)(I + S)^-1 of skew-symmetric S (..., D, D); orthogonal, I for S = 0. Outside of autocast."""
    with full_precision(generator):
        identity = torch.eye(generator.shape[-1], dtype=generator.dtype, device=generator.device)
        # I + S is always invertible, so the check, which would wait for the GPU, has nothing to find. In this form the
        # result is orthogonal to fewer units of the last digit than by a solve with I - S.
        return 2.0 * torch.linalg.inv_ex(identity + generator, check_errors=False)[0] - identity


def exponential(generator: Tensor) -> Tensor:
    """exp(S) of skew-symmetric S (..., b, b), in float32 outside of autocast.

    Far from the origin the series loses orthogonality, by 1e-3 at angles of 10^4 rad; two Newton steps towards the
    nearest orthogonal matrix restore it. Along the group such a step has the derivative of the identity, so gradients
    do not pass through it.
    """
    with full_precision(generator):
        rotation = torch.linalg.matrix_exp(generator.contiguous())  # torch refuses other layouts
        r = rotation.detach()
        for _ in range(2):
            r = 1.5 * r - 0.5 * r @ (r.mT @ r)
        return rotation + (r - rotation).detach()


def exponential_along(generator: Tensor, tau: Tensor) -> Tensor:
    """exp(tau S) for many numbers tau and one generator S, from one eigendecomposition of S.

    A product of small matrices per token instead of a series, forward and backward. The derivative is that of the
    exponential itself, which stays finite where eigenvalues meet, also at S = 0; it cannot be differentiated twice.
    Exported graphs, and eager code with `mmpe.ops.set_fused(False)`, hold the series.

    Args:
        generator: (..., m, b, b) skew-symmetric.
        tau: (..., m, N), whose leading dimensions broadcast with those of `generator`.

    Returns:
        (..., m, N, b, b).
    """
    if torch.compiler.is_exporting() or not fused_enabled():
        return exponential(tau[..., None, None] * generator[..., None, :, :])
    with full_precision(generator):
        batch = torch.broadcast_shapes(generator.shape[:-2], tau.shape[:-1])
        out: Tensor = _ExponentialAlong.apply(generator, tau.expand(*batch, tau.shape[-1]))
        return out


@torch.library.custom_op("mmpe::skew_eigen", mutates_args=())
def skew_eigen(generator: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues mu (..., b) and X, Y (..., b, b) with i S = V diag(mu) V^H, V = X + i Y unitary; mu ascends.

    An operator of its own because compilers know no complex numbers.
    """
    mu, v = torch.linalg.eigh(torch.complex(torch.zeros_like(generator), generator))
    # Eigenvalues come with both signs. Rounding makes them differ, which large tau would multiply.
    return 0.5 * (mu - mu.flip(-1)), v.real.contiguous(), v.imag.contiguous()


@skew_eigen.register_fake
def _(generator: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return generator.new_empty(generator.shape[:-1]), torch.empty_like(generator), torch.empty_like(generator)


class _ExponentialAlong(torch.autograd.Function):
    """exp(tau S) = V diag(exp(-i tau mu)) V^H, in real arithmetic."""

    @staticmethod
    def forward(ctx, generator, tau):  # type: ignore[no-untyped-def]
        mu, x, y = skew_eigen(generator)
        angle = tau[..., None, None] * mu[..., None, None, :]  # (..., N, 1, b)
        cos, sin, re, im = angle.cos(), angle.sin(), x[..., None, :, :], y[..., None, :, :]
        turned = torch.cat([re * cos + im * sin, im * cos - re * sin], dim=-1)  # (..., N, b, 2b)
        # All tokens of a block in one product, (N b, 2b) times (2b, b); the imaginary part is zero.
        rotation = (turned.flatten(-3, -2) @ torch.cat([x, y], dim=-1).mT).unflatten(-2, turned.shape[-3:-1])
        ctx.save_for_backward(generator, tau, mu, x, y, rotation)
        return rotation

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        generator, tau, mu, x, y, rotation = ctx.saved_tensors
        grad_generator = grad_tau = None
        with full_precision(grad):
            if ctx.needs_input_grad[0]:
                grad_generator = _generator_gradient(grad, tau, mu, x, y).sum_to_size(generator.shape)
            if ctx.needs_input_grad[1]:
                grad_tau = ((generator[..., None, :, :] @ rotation) * grad).sum((-2, -1))
        return grad_generator, grad_tau


def _generator_gradient(grad: Tensor, tau: Tensor, mu: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Adjoint of d exp(tau S): Re V (sum_n conj(Phi_n) * (V^H G_n V)) V^H, with divided differences of exp.

    Phi_ij = tau exp(-i tau (mu_i + mu_j) / 2) sinc(tau (mu_i - mu_j) / 2).
    """
    size, both = x.shape[-1], torch.cat([x, y], dim=-1)  # (..., b, 2b)
    right = (grad.flatten(-3, -2) @ both).unflatten(-2, grad.shape[-3:-1])  # (..., N, b, 2b)
    inner = (right.mT.flatten(-3, -2) @ both).unflatten(-2, (-1, 2 * size))  # (..., N, 2b, 2b), transposed
    (xx, yx), (xy, yy) = (part.split(size, dim=-1) for part in inner.split(size, dim=-2))
    re, im = xx + yy, xy - yx  # (..., N, b, b): V^H G V, transposed like Phi, which is symmetric
    half = 0.5 * tau[..., None] * mu[..., None, :]  # (..., N, b)
    c, s, d = half.cos(), half.sin(), half[..., None] - half[..., None, :]
    weight = tau[..., None, None] * torch.sinc(d / torch.pi)
    mean_cos = (c[..., None] * c[..., None, :] - s[..., None] * s[..., None, :]) * weight
    mean_sin = (c[..., None] * s[..., None, :] + s[..., None] * c[..., None, :]) * weight
    z_re = (re * mean_cos - im * mean_sin).sum(-3).mT  # (..., b, b)
    z_im = (re * mean_sin + im * mean_cos).sum(-3).mT
    return (x @ z_re - y @ z_im) @ x.mT + (x @ z_im + y @ z_re) @ y.mT


# ---------------------------------------------------------------- application to q and k


def rotate_blocks(rotation: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply every block of q and k by its rotation; the dtype of q is kept.

    Batch, q and k (and the heads, where they share) become columns of one product per token and block: the usual
    broadcast would copy all rotations for every sample.

    Args:
        rotation: (H, m, N, b, b), or (B, H, m, N, b, b) where samples have positions of their own; H may be 1.
        q: (B, H, N, D).
        k: (B, Hkv, N, D); as many heads as q unless all heads share their rotations.
    """
    rotation = rotation.to(q.dtype)
    if rotation.shape[-5] > 1:
        turned = _rotate_columns(rotation, torch.stack((q, k)))
        return turned[0], turned[1]
    heads = torch.cat((q, k), dim=1).transpose(0, 1).unsqueeze(2)  # (H + Hkv, B, 1, N, D): heads are columns, too
    turned = _rotate_columns(rotation, heads).squeeze(2).transpose(0, 1)
    return turned[:, : q.shape[1]], turned[:, q.shape[1] :]


def _rotate_columns(rotation: Tensor, x: Tensor) -> Tensor:
    """Rotate x (G, B, H, N, D), whose G parts meet the same rotations."""
    groups, batch = x.shape[:2]
    blocks = x.unflatten(-1, (rotation.shape[-4], rotation.shape[-1]))  # (G, B, H, N, m, b)
    with full_precision(x):
        if rotation.dim() > 5:
            columns = blocks.permute(1, 2, 4, 3, 5, 0)  # (B, H, m, N, b, G)
            return (rotation @ columns).permute(5, 0, 1, 3, 2, 4).flatten(-2)
        columns = blocks.permute(2, 4, 3, 5, 0, 1).flatten(-2)  # (H, m, N, b, G B)
        turned = (rotation @ columns).unflatten(-1, (groups, batch))
        return turned.permute(4, 5, 0, 2, 1, 3).flatten(-2)


class BlockRotationTerms(AttentionTerms):
    """Rotation of the blocks of q and k.

    Args:
        rotation: (H, m, N, b, b), or (B, H, m, N, b, b); H is 1 where all heads share.
    """

    def __init__(self, rotation: Tensor) -> None:
        self.rotation = rotation

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_blocks(self.rotation, q, repeated_heads(k, self.rotation.shape[-5]))

    def values(self, v: Tensor) -> Tensor:
        return repeated_heads(v, self.rotation.shape[-5])


def repeated_heads(x: Tensor, heads: int) -> Tensor:
    """Grouped keys or values (B, Hkv, N, D), once for each of the `heads` that have a transform of their own."""
    if heads == 1 or x.shape[1] == heads or heads % x.shape[1]:
        return x
    return x.repeat_interleave(heads // x.shape[1], dim=1)


class LayeredTerms(AttentionTerms):
    """Terms of several blocks, made when a block asks for its own, so that only one block's are in memory.

    Args:
        make: terms of block i.
        layers: number of blocks.
    """

    def __init__(self, make: Callable[[int], AttentionTerms], layers: int) -> None:
        self.make, self.layers = make, layers

    def layer(self, index: int) -> AttentionTerms:
        if not 0 <= index < self.layers:
            raise ValueError(f"these are the terms of {self.layers} blocks, asked for layer {index}")
        return self.make(index)

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        raise ValueError(f"these terms hold those of {self.layers} blocks; in block i use terms.layer(i)")
