"""Position encoding generators."""

import torch

import mmpe
from golden_readers import Arrays, Comparison, reader
from mmpe.encodings.conditional import fold_identity, peg

ATOL = 1e-6


@reader("peg")
def read_peg(stem: str, arrays: Arrays) -> list[Comparison]:
    """x (B, P + N, C) -> y; weight (C, 1, k, ...), bias (C); meta = [sizes of the grid ..., stride]; num_prefix = P."""
    *sizes, stride = arrays["meta"].tolist()
    prefix = int(arrays["num_prefix"]) if "num_prefix" in arrays else 0
    x, weight, y = (torch.from_numpy(arrays[name]) for name in ("x", "weight", "y"))
    bias = torch.from_numpy(arrays["bias"]) if "bias" in arrays else None
    found = [Comparison("function", peg(x, weight, bias, sizes, stride, prefix), y, ATOL)]
    if stride > 1:
        return found
    folded = peg(x, fold_identity(weight), bias, sizes, prefix=prefix, identity=False)
    found.append(Comparison("folded", folded, y, 2 * ATOL))
    enc = mmpe.create_encoding(
        "cpe", dim=x.shape[-1], heads=1, axes=len(sizes), kernel_size=weight.shape[-1], bias=bias is not None
    )
    enc.load_state_dict({"weight": weight[None]} | ({} if bias is None else {"bias": bias[None]}))
    with torch.no_grad():
        found.append(Comparison("module", enc.embed(x, mmpe.Positions.of_size(sizes, prefix=prefix)), y, ATOL))
    return found
