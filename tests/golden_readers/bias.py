"""Biases on the logits."""

import torch
from torch import Tensor

import mmpe
from golden_readers import Arrays, Comparison, reader
from mmpe.encodings.bias import alibi_slopes


@reader("alibi2d_croma")
def alibi_croma(stem: str, arrays: Arrays) -> list[Comparison]:
    """Bias (1, H, g g, g g); meta = [H, g]."""
    heads, side = arrays["meta"].tolist()
    return [Comparison("bias", _bias(heads, mmpe.Positions.grid(side, side)), arrays["bias"], 1e-6)]


@reader("alibi_nd")
def alibi_nd(stem: str, arrays: Arrays) -> list[Comparison]:
    """Positions (B, N, A), slopes (H), bias (B, H, N, N); a class token sits at the origin, patches count from 1."""
    coords, heads = torch.from_numpy(arrays["positions"]), len(arrays["slopes"])
    found = [
        Comparison("slopes", alibi_slopes(heads), arrays["slopes"], 1e-7),
        Comparison("bias", _bias(heads, mmpe.Positions.points(coords)), arrays["bias"], 1e-5),
    ]
    if bool((coords[:, 0] == 0).all()) and bool((coords[:, 1:] >= 1).all()):
        patches = mmpe.Positions.points(coords[:, 1:] - 1, prefix=1)
        found.append(Comparison("prefix at the origin", _bias(heads, patches, "origin"), arrays["bias"], 1e-5))
    return found


def _bias(heads: int, positions: mmpe.Positions, rule: str = "exempt") -> Tensor:
    enc = mmpe.create_encoding("alibi_2d", dim=8 * heads, heads=heads, axes=positions.num_axes, prefix_rule=rule)
    q = torch.zeros(1, heads, positions.num_tokens, 8)
    bias = enc(positions).bias(q, q)
    assert bias is not None
    return bias
