"""Readers of biases that are functions of a distance in a sequence: T5, FIRE, KERPLE."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmpe import Positions, create_encoding
from mmpe.encoding import PositionEncoding
from mmpe.encodings.distance_bias import t5_buckets

from . import Arrays, Comparison, reader


def _tensor(arrays: Arrays, name: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(arrays[name]))


def _bias(enc: PositionEncoding, length: int) -> Tensor:
    q = torch.zeros(1, enc.heads, length, enc.head_dim)
    bias = enc(Positions.line(length)).bias(q, q)
    assert bias is not None
    return bias


@reader("t5_rpb")
def read_t5(stem: str, arrays: Arrays) -> list[Comparison]:
    """Buckets (N, N) and bias (H, N, N) for both directions; meta = [N, buckets, max_distance, H]."""
    length, buckets, distance, heads = arrays["meta"].astype(int).tolist()
    place, found = torch.arange(length), []
    for case, both in (("bidirectional", True), ("causal", False)):
        enc = create_encoding(
            "t5", 8 * heads, heads, axes=1, buckets=buckets, max_distance=distance, bidirectional=both
        )
        enc.load_state_dict({"table": _tensor(arrays, "table")[None, None]})
        ids = t5_buckets(place - place[:, None].float(), buckets, distance, both)
        found += [
            Comparison(f"bucket_{case}", ids, arrays[f"bucket_{case}"], 0.0),
            Comparison(f"bias_{case}", _bias(enc, length)[0], arrays[f"bias_{case}"], 0.0),
        ]
    return found


@reader("fire")
def read_fire(stem: str, arrays: Arrays) -> list[Comparison]:
    """Bias (1, H, N, N) of a causal decoder, above the diagonal too; meta = [N, H, width]."""
    length, heads, hidden = arrays["meta"].astype(int).tolist()
    enc = create_encoding(
        "fire", 8 * heads, heads, axes=1, hidden=hidden, normalizer="query",
        init_length=float(arrays["init_L"]), eps=float(arrays["eps"]),
    )  # fmt: skip
    scalars = {"c": "c", "length_factor": "L_multiplier"}
    state = {ours: _tensor(arrays, theirs).reshape(1) for ours, theirs in scalars.items()}
    enc.load_state_dict(state | {n: _tensor(arrays, n)[None] for n in ("w1", "b1", "w2", "b2")})
    return [Comparison("bias", _bias(enc, length), arrays["bias"], 1e-6)]


@reader("kerple")
def read_kerple(stem: str, arrays: Arrays) -> list[Comparison]:
    """Both kernels, causal: the bias above the diagonal is zero in the file, and masked in a decoder."""
    heads, length = arrays["bias_log_causal"].shape[:2]
    found = []
    for form in ("log", "power"):
        enc = create_encoding("kerple", 8 * heads, heads, axes=1, form=form)
        enc.load_state_dict({"p": _tensor(arrays, "p_raw")[None], "a": _tensor(arrays, "a_raw")[None]})
        found.append(Comparison(form, _bias(enc, length)[0].tril(), arrays[f"bias_{form}_causal"], 1e-5))
    return found
