"""What the generic tests share: all encodings in every number of axes, and a small transformer around them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

import mmpe
from mmpe.registry import encoding_class, option_names

# 96 channels divide for every layout of sin-cos in 1 to 3 axes, and heads of 24 into planes of 1 to 3 axes.
DIM, HEADS, DEPTH = 96, 4, 2
GRIDS = {1: (7,), 2: (3, 5), 3: (2, 3, 4)}
LARGER = {1: (19,), 2: (8, 6), 3: (4, 5, 7)}
CASES = [(name, axes) for name in mmpe.list_encodings() for axes in encoding_class(name).supported_axes]
IDS = [f"{name}-{axes}d" for name, axes in CASES]


def build(name: str, axes: int, depth: int = DEPTH, **options: Any) -> mmpe.PositionEncoding:
    """An encoding whose parameters are all in use: those that start at zero are moved away from it."""
    torch.manual_seed(0)
    enc = fresh(name, axes, depth, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in enc.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return enc


def fresh(name: str, axes: int, depth: int = DEPTH, **options: Any) -> mmpe.PositionEncoding:
    """An encoding as its constructor leaves it, trained on the small grid where it has one."""
    allowed = {o for part in name.split("+") for o in option_names(encoding_class(part))}
    if "grid_size" in allowed:
        options.setdefault("grid_size", GRIDS[axes])
    # In evaluation, where nothing is drawn: augmentations are tested where they live.
    return mmpe.create_encoding(name, dim=DIM, heads=HEADS, axes=axes, depth=depth, **options).eval()


def loose(positions: mmpe.Positions, batch: int | None = None) -> mmpe.Positions:
    """The same places as points that fill no grid, shared or once per sample."""
    coords = positions.coords if batch is None else positions.coords.expand(batch, -1, -1).contiguous()
    return mmpe.Positions.points(coords, prefix=positions.prefix, extent=positions.extent)


class TinyTransformer(nn.Module):
    """Pre-norm attention blocks without MLP, used exactly as the documentation tells backbones to."""

    def __init__(self, enc: mmpe.PositionEncoding, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.enc = enc
        self.heads = (enc.qkv_heads, *(2 * [kv_heads * enc.qkv_heads // enc.heads]))  # of q, k and v
        width = enc.head_dim * sum(self.heads)
        self.norm = nn.LayerNorm(enc.dim)
        self.qkv = nn.ModuleList(nn.Linear(enc.dim, width) for _ in range(enc.depth))
        self.proj = nn.ModuleList(nn.Linear(enc.output_heads * enc.head_dim, enc.dim) for _ in range(enc.depth))

    def forward(self, x: Tensor, positions: mmpe.Positions, mask: Tensor | None = None) -> Tensor:
        positions = self.enc.place(positions, x.shape[0])  # len(x) would fix the size in an exported graph
        shared = None if self.enc.content_dependent else self.enc(positions)
        for layer in range(self.enc.depth):
            x = self.enc.embed(x, positions, layer=layer)
            x = x + self.attention(x, positions, shared, layer, mask)
        return x

    def attention(
        self,
        x: Tensor,
        positions: mmpe.Positions,
        shared: mmpe.AttentionTerms | None,
        layer: int,
        mask: Tensor | None = None,
    ) -> Tensor:
        h = self.norm(x)
        terms = self.enc(positions, h, layer=layer) if shared is None else shared.layer(layer)
        parts = self.qkv[layer](terms.inputs(h)).split([n * self.enc.head_dim for n in self.heads], dim=-1)
        split = zip(parts, self.heads, strict=True)
        q, k, v = (p.unflatten(-1, (n, -1)).transpose(1, 2) for p, n in split)  # (B, H, N, D)
        o = mmpe.attend(q, k, v, terms, mask=mask, backend="sdpa")
        return self.proj[layer](o.transpose(1, 2).flatten(2))


def transformer(name: str, axes: int, **options: Any) -> TinyTransformer:
    """The transformer around a built encoding, with the same weights in every call."""
    enc = build(name, axes, **options)
    torch.manual_seed(2)
    return TinyTransformer(enc).eval()


def tokens(positions: mmpe.Positions, batch: int = 3) -> Tensor:
    """(B, N, C) random tokens for the positions; the batch differs from the number of heads on purpose."""
    return torch.randn(batch, positions.num_tokens, DIM, generator=torch.Generator().manual_seed(3))


def probe(enc: mmpe.PositionEncoding, positions: mmpe.Positions, batch: int = 2) -> list[Tensor]:
    """All that an encoding does, applied to fixed float32 tensors: tokens, inputs, q, k, v, o, bias, temperature."""
    generator = torch.Generator().manual_seed(4)
    count = positions.num_tokens
    x = torch.randn(batch, count, DIM, generator=generator).to(positions.device)
    q, k, v = torch.randn(3, batch, HEADS, count, DIM // HEADS, generator=generator).to(positions.device).unbind()
    found = []
    for layer in range(enc.depth):
        terms = enc(positions, x, layer=layer) if enc.content_dependent else enc(positions).layer(layer)
        found += [enc.embed(x, positions, layer), terms.inputs(x), *terms.queries_keys(q, k)]
        found += [terms.values(v), terms.outputs(v)]
        for extra in (terms.bias(q, k), terms.temperature):
            found += [extra] if isinstance(extra, Tensor) else []
    return found


def default_options(name: str) -> dict[str, Any]:
    """Options of an encoding and their defaults."""
    parameters = inspect.signature(encoding_class(name).__init__).parameters
    return {option: parameters[option].default for option in option_names(encoding_class(name))}
