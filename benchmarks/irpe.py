"""iRPE contextual attention beside the algorithm of its official code without the compiled operator.

    python benchmarks/irpe.py               # about two minutes on one core
    python benchmarks/irpe.py --keep-pages  # freed memory stays with the process, as on a GPU

"naive" is that algorithm: the products with all bucket vectors are flattened and indexed with bucket + i * buckets, and
attention is spelt out. "mmpe" gathers along the last axis and leaves the rest to scaled_dot_product_attention. Both get
their bucket indices ready, as both build them once for all blocks. Numbers are CPU seconds of one thread relative to
attention without positions in the same round (median); both results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from _timing import interleaved, keep_pages, versions
from torch import Tensor

import mmpe

SHAPES = {(8, 12, 64): (14, 1), (1, 6, 64): (32, 0)}  # (B, H, D) -> side of the grid, prefix tokens


def naive(q: Tensor, k: Tensor, v: Tensor, vectors: Tensor, bucket: Tensor) -> Tensor:
    """Attention with rpe_k: q, k, v (B, H, N, D), vectors (1, D, buckets), bucket (N, N)."""
    batch, heads, count, width = q.shape
    q = q * width**-0.5
    products = q.transpose(0, 1).reshape(heads, batch * count, width) @ vectors.expand(heads, -1, -1)
    products = products.reshape(heads, batch, -1).transpose(0, 1)  # (B, H, N buckets)
    index = bucket + torch.arange(count)[:, None] * vectors.shape[-1]
    bias = products[:, :, index.flatten()].reshape(batch, heads, count, count)
    return (q @ k.transpose(-2, -1) + bias).softmax(-1) @ v


def candidates(shape: tuple[int, int, int], side: int, prefix: int, backward: bool) -> dict[str, Callable[[], object]]:
    """No positions, naive and ours, on the same tensors."""
    batch, heads, width = shape
    positions = mmpe.Positions.grid(side, side, prefix=prefix)
    encoding = mmpe.create_encoding("irpe", heads * width, heads)
    (table,) = encoding.parameters()
    torch.nn.init.normal_(table, std=0.2)
    q, k, v = torch.randn(3, batch, heads, positions.num_tokens, width, requires_grad=backward).unbind()
    weights = torch.randn_like(v)
    terms = encoding(positions).layer(0)
    (bucket,) = terms.buckets  # type: ignore[attr-defined]
    calls = {
        "none": lambda: mmpe.attend(q, k, v),
        "naive": lambda: naive(q, k, v, table[0, 0], bucket),
        "mmpe": lambda: mmpe.attend(q, k, v, terms),
    }
    torch.testing.assert_close(calls["mmpe"](), calls["naive"](), atol=1e-5, rtol=1e-5)

    def run(name: str) -> object:
        with torch.set_grad_enabled(backward):
            o = calls[name]()
        inputs = [q, k, v] if name == "none" else [q, k, v, table]
        return torch.autograd.grad(o, inputs, weights) if backward else o

    return {name: lambda name=name: run(name) for name in calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds")
    parser.add_argument("--keep-pages", action="store_true", help="freed memory stays with the process")
    options = parser.parse_args()
    if options.keep_pages:
        keep_pages()
    torch.manual_seed(0)
    print(versions())
    for shape, (side, prefix) in SHAPES.items():
        for backward in (False, True):
            found = interleaved(candidates(shape, side, prefix, backward), "none", rounds=options.rounds, warmup=1)
            speed = found["naive"].milliseconds / found["mmpe"].milliseconds
            print(
                f"(B, H, D) {shape}, {side} x {side} + {prefix}, {'forward + backward' if backward else 'forward'}: "
                f"naive {found['naive'].ratio:.2f}, mmpe {found['mmpe'].ratio:.2f} of no positions; "
                f"mmpe is {speed:.2f} times as fast as naive"
            )


if __name__ == "__main__":
    main()
