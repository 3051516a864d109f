"""Readers of the biases of windows and grids: Swin, BEiT, Swin v2, MViTv2, LookHere."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmpe import AttentionTerms, Positions, attend, create_encoding
from mmpe.encodings.log_cpb import log_coordinates
from mmpe.encodings.offsets import RESERVED, offsets_of
from mmpe.encodings.swin import resize_table

from . import Arrays, Comparison, reader


def _tensor(arrays: Arrays, name: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(arrays[name]))


def _bias(terms: AttentionTerms, heads: int, count: int) -> Tensor:
    q = torch.zeros(1, heads, count, 8)
    bias = terms.bias(q, q)
    assert bias is not None
    return bias


@reader("swin_rpb", "beit_rpb")
def read_table(stem: str, arrays: Arrays) -> list[Comparison]:
    """Table (R, H), the row of each pair (N, N), bias (1, H, N, N); meta = [h, w, H, prefix]."""
    height, width, heads, prefix = arrays["meta"].astype(int).tolist()
    name = stem.split("_")[0]
    enc = create_encoding(name, 8 * heads, heads, grid_size=(height, width))
    table = _tensor(arrays, "table")
    enc.load_state_dict({"table": table})
    positions = Positions.grid(height, width, prefix=prefix)
    # Ours has the rows of prefix tokens in front, theirs at the end.
    index = (offsets_of(positions).index - RESERVED) % len(table)
    return [
        Comparison("index", index, arrays["index"], 0.0),
        Comparison("bias", _bias(enc(positions), heads, positions.num_tokens), arrays["bias"], 0.0),
    ]


@reader("swin_rpb_resize", "beit_rpb_resize")
def read_resize(stem: str, arrays: Arrays) -> list[Comparison]:
    """A table (R, H) on another grid, by both rules; meta = [h0, w0, h1, w1, H, rows of the class token]."""
    h0, w0, h1, w1, heads, class_rows = arrays["meta"].astype(int).tolist()
    table, found = _tensor(arrays, "table"), []
    for rule, key in (("geometric", "out_geometric_linear"), ("simple", "out_bicubic_simple")):
        if key not in arrays:
            continue
        expected = arrays[key]
        resized = resize_table(table, (h1, w1), (h0, w0), class_rows, rule)  # type: ignore[arg-type]
        found.append(Comparison(rule, resized, expected, 1e-5))
        found += _loaded_and_called(table, expected, rule, (h0, w0), (h1, w1), heads, class_rows)
    return found


def _loaded_and_called(
    table: Tensor,
    expected: np.ndarray,
    rule: str,
    old: tuple[int, int],
    new: tuple[int, int],
    heads: int,
    class_rows: int,
) -> list[Comparison]:
    """The same numbers when another grid's checkpoint is loaded, and when a model meets another grid."""
    name, prefix = ("beit", 1) if class_rows else ("swin", 0)
    small, large = (create_encoding(name, 8 * heads, heads, grid_size=size, resize=rule) for size in (old, new))
    small.load_state_dict({"table": table[None], "table_grid": torch.tensor(old)})
    large.load_state_dict(small.state_dict())
    positions = Positions.grid(*new, prefix=prefix)
    rows = torch.from_numpy(expected)[(offsets_of(positions).index - RESERVED) % len(expected)]  # (N, N, H)
    return [
        Comparison(f"{rule}, loaded", large.state_dict()["table"][0], expected, 1e-5),
        Comparison(
            f"{rule}, called", _bias(small(positions), heads, positions.num_tokens), rows.movedim(-1, 0)[None], 1e-5
        ),
    ]


@reader("swinv2_logcpb_timm", "relposmlp_cr_timm")
def read_network(stem: str, arrays: Arrays) -> list[Comparison]:
    """Log-spaced coordinates, network and bias (1, H, N, N); meta = [h, w, H, hidden, pretrained h, w]."""
    height, width, heads, hidden, *pretrained = arrays["meta"].astype(int).tolist()
    enc = create_encoding(
        "log_cpb", 8 * heads, heads,
        mode="cr" if "_cr_" in stem else "swin", hidden=hidden,
        pretrained_size=pretrained if all(pretrained) else None,
    )  # fmt: skip
    enc.load_state_dict({n: _tensor(arrays, n)[None] for n in ("w1", "b1", "w2", "b2") if n in arrays})
    positions = Positions.grid(height, width)
    coords = enc.prepare(offsets_of(positions), positions).reshape(arrays["coords"].shape)
    return [
        Comparison("coords", coords, arrays["coords"], 1e-5),
        Comparison("bias", _bias(enc(positions), heads, height * width), arrays["bias"], 1e-5),
    ]


@reader("swinv2_attention")
def read_attention(stem: str, arrays: Arrays) -> list[Comparison]:
    """The official window attention, cosine and all; meta = [h, w, H, pretrained h, w]."""
    height, width, heads, *pretrained = arrays["meta"].astype(int).tolist()
    x = _tensor(arrays, "x")
    window = pretrained if all(pretrained) else None
    hidden = len(arrays["p_cpb_mlp__0__bias"])
    enc = create_encoding("log_cpb", x.shape[-1], heads, cosine=True, hidden=hidden, pretrained_size=window)
    enc.load_state_dict({
        "w1": _tensor(arrays, "p_cpb_mlp__0__weight")[None],
        "b1": _tensor(arrays, "p_cpb_mlp__0__bias")[None],
        "w2": _tensor(arrays, "p_cpb_mlp__2__weight")[None],
        "logit_scale": _tensor(arrays, "p_logit_scale")[None],
    })  # fmt: skip
    q_bias, v_bias = _tensor(arrays, "p_q_bias"), _tensor(arrays, "p_v_bias")
    qkv = F.linear(x, _tensor(arrays, "p_qkv__weight"), torch.cat([q_bias, torch.zeros_like(v_bias), v_bias]))
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    positions = Positions.grid(height, width)
    o = attend(q, k, v, enc(positions).layer(0)).transpose(1, 2).flatten(2)
    coords = log_coordinates(offsets_of(positions).vectors, window or (height, width))
    return [
        Comparison("coords", coords.reshape(arrays["coords"].shape), arrays["coords"], 1e-5),
        Comparison("index", offsets_of(positions).index - RESERVED, arrays["index"], 0.0),
        Comparison(
            "y", F.linear(o, _tensor(arrays, "p_proj__weight"), _tensor(arrays, "p_proj__bias")), arrays["y"], 1e-5
        ),
    ]


@reader("mvitv2_decomposed")
def read_decomposed(stem: str, arrays: Arrays) -> list[Comparison]:
    """Logits before and after; queries and keys may lie on different grids; meta = [qh, qw, kh, kw, class token]."""
    qh, qw, kh, kw, prefix = arrays["meta"].astype(int).tolist()
    q, k = _tensor(arrays, "q"), _tensor(arrays, "k")
    heads, head_dim = q.shape[1], q.shape[-1]
    enc = create_encoding("mvit_decomposed", heads * head_dim, heads, grid_size=(max(qh, kh), max(qw, kw)))
    enc.load_state_dict({name: _tensor(arrays, name)[None] for name in ("rel_pos_h", "rel_pos_w")})
    queries, keys = Positions.grid(qh, qw, prefix=prefix), Positions.grid(kh, kw, prefix=prefix)
    logits = _tensor(arrays, "logits_in")
    found = [Comparison("logits_out", logits + enc.between(queries, keys).bias(q, k), arrays["logits_out"], 1e-5)]
    if (qh, qw) == (kh, kw):
        found.append(Comparison("one grid", logits + enc(queries).bias(q, k), arrays["logits_out"], 1e-5))
    return found


@reader("lookhere90")
def read_lookhere(stem: str, arrays: Arrays) -> list[Comparison]:
    """Bias of every block (L, H, N, N) in bfloat16, 0 where it is masked; meta = [h, w, L, H]."""
    height, width, depth, heads = arrays["meta"].astype(int).tolist()
    enc = create_encoding(
        "lookhere", 8 * heads, heads, depth=depth,
        global_slope=float(arrays["global_slope"]), layer_slopes=tuple(arrays["layer_slopes"].tolist()),
    )  # fmt: skip
    terms = enc(Positions.grid(height, width))
    bias = torch.cat([_bias(terms.layer(i), heads, height * width) for i in range(depth)])
    hidden = bias < -1e30
    rounded = bias.masked_fill(hidden, 0.0).bfloat16().float()
    return [
        Comparison("masked", hidden.long(), arrays["masked"], 0.0),
        Comparison("bias_finite", rounded, arrays["bias_finite"], 0.0),
    ]
