"""Readers of pape and pape_ri files: the official attention module, and its gradients."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmpe import Positions, attend, create_encoding
from mmpe.encodings.parabolic import Parabolas, ParabolicEncoding, ParabolicTerms

from . import Arrays, Comparison, reader

FORWARD = 1e-4


def _tensor(arrays: Arrays, name: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(arrays[name]))


def _positions(arrays: Arrays) -> tuple[Positions, float]:
    """The file's tokens as positions, and the coordinate of its class token, if it has one at the origin."""
    coords = _tensor(arrays, "positions").float()
    if coords.shape[-1] == 2:
        coords = coords.flip(-1)  # files say (x, y), positions say (row, column)
    has_class = bool((coords[:, 0] == 0).all())
    coords = coords[:, 1:] if has_class else coords
    return Positions.points(coords[0] if len(coords) == 1 else coords, prefix=int(has_class)), 0.0


def _encoding(arrays: Arrays, prefix_position: float) -> ParabolicEncoding:
    heads, head_dim, parabolas, axes = arrays["cfg"].astype(int).tolist()
    width = arrays["x"].shape[-1]
    if "w_position" in arrays:
        encoding = create_encoding(
            "pape", width, heads, axes, parabolas=parabolas, prefix_position=prefix_position
        )
        names = {"position.weight": "w_position", "ab.weight": "w_ab"}
    else:
        encoding = create_encoding("pape_ri", width, heads, axes, prefix_position=prefix_position)
        names = {"a.weight": "w_a", "position_scales": "position_scales"}
    encoding.load_state_dict({f"layers.0.{ours}": _tensor(arrays, theirs) for ours, theirs in names.items()})
    assert isinstance(encoding, ParabolicEncoding)
    return encoding


def _logits(arrays: Arrays, terms: ParabolicTerms, q: Tensor, k: Tensor) -> Tensor:
    wide_q, wide_k = terms.queries_keys(q, k)
    return wide_q @ wide_k.transpose(-1, -2) * float(arrays["scale"].reshape(-1)[0])


@reader("pape", "pape_ri")
def read_attention(stem: str, arrays: Arrays) -> list[Comparison]:
    """The official attention: positional term, logits, output of the block, closed form."""
    heads, head_dim = arrays["cfg"].astype(int).tolist()[:2]
    positions, prefix_position = _positions(arrays)
    encoding = _encoding(arrays, prefix_position)
    x = _tensor(arrays, "x")
    qkv = F.linear(x, _tensor(arrays, "w_qkv"), _tensor(arrays, "b_qkv"))
    q, k, v = qkv.unflatten(-1, (3, heads, head_dim)).permute(2, 0, 3, 1, 4)
    terms = encoding(positions, x)
    assert isinstance(terms, ParabolicTerms)
    # The channels of the term alone: in float64, as the file's product is
    term = terms.q_channels.double() @ terms.k_channels.double().transpose(-1, -2)
    mask = None
    if "padding_mask" in arrays:
        mask = _tensor(arrays, "padding_mask").bool().logical_not()[:, None, None, :]
    o = attend(q, k, v, terms, mask).transpose(1, 2).flatten(2)
    output = F.linear(o, _tensor(arrays, "w_out"), _tensor(arrays, "b_out"))
    found = [
        Comparison("pos_term_unscaled", term, arrays["pos_term_unscaled"], FORWARD, 1e-5),
        Comparison("logits", _logits(arrays, terms, q, k), arrays["logits"], FORWARD, 1e-5),
        Comparison("output", output, arrays["output"], 1e-5),
    ]
    return found + _closed_form(arrays, encoding, x)


def _closed_form(arrays: Arrays, encoding: ParabolicEncoding, x: Tensor) -> list[Comparison]:
    block = encoding.layers[0]
    if not isinstance(block, Parabolas):
        return []
    a_matrix, beta = block(x)
    return [
        Comparison(name, ours, arrays[name], 1e-5)
        for name, ours in (("a_matrix", a_matrix), ("b_vector", beta))
        if name in arrays
    ]


@reader("pape__efficient_layout_grads")
def read_gradients(stem: str, arrays: Arrays) -> list[Comparison]:
    """Logits of given q and k, and the gradients of all inputs and weights."""
    positions, prefix_position = _positions(arrays)
    encoding = _encoding(arrays, prefix_position)
    x, q, k = (_tensor(arrays, name).requires_grad_() for name in ("x", "q", "k"))
    terms = encoding(positions, x)
    assert isinstance(terms, ParabolicTerms)
    logits = _logits(arrays, terms, q, k)
    (_tensor(arrays, "grad_out") * logits).sum().backward()
    block = encoding.layers[0]
    assert isinstance(block, Parabolas)
    sources = {"x": x, "q": q, "k": k, "w_position": block.position.weight, "w_ab": block.ab.weight}
    found = [Comparison("logits", logits, arrays["logits"], FORWARD)]
    for name, source in sources.items():
        assert source.grad is not None
        found.append(Comparison(f"grad_{name}", source.grad, arrays[f"grad_{name}"], 1e-3, 1e-3))
    return found
