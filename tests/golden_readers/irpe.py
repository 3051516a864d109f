"""Readers of iRPE files: the piecewise function, the bias and value terms, and DeiT's attention."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmpe import Positions, attend, create_encoding
from mmpe.encoding import PositionEncoding
from mmpe.encodings.irpe import piecewise_index
from mmpe.encodings.offsets import offsets_of

from . import Arrays, Comparison, reader

TOLERANCE = 1e-5


def _tensor(arrays: Arrays, name: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(arrays[name]))


@reader("irpe__piecewise_index")
def read_piecewise(stem: str, arrays: Arrays) -> list[Comparison]:
    """Per ratio r: inputs x_r*, and the index of the same numbers as integers and as floats."""
    found = []
    for name in arrays:
        if not name.startswith("x_r"):
            continue
        ratio = float(name[3:].replace("p", "."))
        ours = piecewise_index(_tensor(arrays, name), ratio, 2 * ratio, 8 * ratio)
        found += [
            Comparison(f"idx_{kind}_{name[2:]}", ours, arrays[f"idx_{kind}_{name[2:]}"], 0.0)
            for kind in ("long", "float")
        ]
    return found


def _load(encoding: PositionEncoding, tables: dict[str, list[Tensor]]) -> None:
    """Tables of the file (one, or rows and columns of "cross"): ours have heads x channels x buckets."""
    with torch.no_grad():
        for on, parts in tables.items():
            getattr(encoding, f"table_{on}").copy_(torch.stack(parts)[None])


def _parts(arrays: Arrays, name: str) -> list[Tensor]:
    names = [name] if name in arrays else [f"{name}_rows", f"{name}_cols"]
    parts = [_tensor(arrays, n) for n in names]
    return [p.mT for p in parts] if name == "table_v" else parts


@reader("irpe")
def read_terms(stem: str, arrays: Arrays) -> list[Comparison]:
    """Terms on q, k and v; the method is the first word of the case, the rest is in meta."""
    height, width, skip, shared, heads, head_dim = arrays["meta"].astype(int).tolist()[:6]
    method, ratio = stem.split("__")[1].split("_")[0], float(arrays["ratio"])
    positions = Positions.grid(height, width, prefix=skip)
    options = {
        "method": method, "share_heads": bool(shared), "ratio": ratio, "prefix_bucket": bool(skip)
    }  # fmt: skip
    q, k, v = (_tensor(arrays, name) for name in ("q_scaled", "k", "v"))
    q = q * head_dim**0.5
    encodings = {}
    for on in ("k", "q", "qkv"):
        encodings[on] = create_encoding("irpe", heads * head_dim, heads, rpe_on=on, **options)
        _load(encodings[on], {o: _parts(arrays, f"table_{o}") for o in on})
    biased = create_encoding("irpe", heads * head_dim, heads, mode="bias", **options)
    _load(biased, {"k": _parts(arrays, "table_bias")})
    terms = encodings["qkv"](positions).layer(0)
    weights = _tensor(arrays, "attn")
    offsets = offsets_of(positions)
    buckets = encodings["k"].buckets(offsets.vectors)
    ids = ["bucket_ids"] if "bucket_ids" in arrays else ["bucket_ids_rows", "bucket_ids_cols"]
    found = [
        Comparison(name, offsets.of_pairs(bucket), arrays[name], 0.0) for name, bucket in zip(ids, buckets, strict=True)
    ]
    counted = torch.tensor(encodings["k"].table_k.shape[-1])
    return [
        *found,
        Comparison("num_buckets", counted.reshape(arrays["num_buckets"].shape), arrays["num_buckets"], 0.0),
        Comparison("bias_k", encodings["k"](positions).bias(q, k), arrays["bias_k"], TOLERANCE),
        Comparison("bias_q", encodings["q"](positions).bias(q, k), arrays["bias_q"], TOLERANCE),
        Comparison("bias_mode_bias", biased(positions).bias(q, k), arrays["bias_mode_bias"], TOLERANCE),
        Comparison("v_add", terms.from_weights(weights), arrays["v_add"], TOLERANCE),
        Comparison("out", attend(q, k, v, terms), arrays["out"], TOLERANCE),
    ]


@reader("irpe__deit_attention")
def read_attention(stem: str, arrays: Arrays) -> list[Comparison]:
    """DeiT's attention with a class token, product buckets and contextual tables on some of q, k and v."""
    side, heads, shared = arrays["meta"].astype(int).tolist()[:3]
    x = _tensor(arrays, "x")
    prefix = x.shape[1] - side * side
    names = {on: f"p_rpe_{on}__lookup_table_weight" for on in "qkv"}
    on = "".join(o for o in "qkv" if names[o] in arrays)
    encoding = create_encoding(
        "irpe", x.shape[-1], heads, rpe_on=on, share_heads=bool(shared), ratio=float(arrays["ratio"])
    )
    _load(encoding, {o: [_tensor(arrays, names[o]).mT if o == "v" else _tensor(arrays, names[o])] for o in on})
    qkv = F.linear(x, _tensor(arrays, "p_qkv__weight"), _tensor(arrays, "p_qkv__bias"))
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    o = attend(q, k, v, encoding(Positions.grid(side, side, prefix=prefix)))
    y = F.linear(o.transpose(1, 2).flatten(2), _tensor(arrays, "p_proj__weight"), _tensor(arrays, "p_proj__bias"))
    return [Comparison("y", y, arrays["y"], TOLERANCE)]
