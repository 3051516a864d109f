"""Readers of the biases for sequences: cope, fox, cable, bam."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmpe import Positions, attend, create_encoding
from mmpe.encodings.bam import BAM
from mmpe.encodings.sequence import sequence_ranks
from mmpe.encodings.sequence_bias import CoPE, CumulativeTerms, contextual_distances, cumulative_bias

from . import Arrays, Comparison, reader


def _tensor(arrays: Arrays, name: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(arrays[name]))


def _causal_part(bias: Tensor | np.ndarray) -> Tensor:
    """Without what lies after the query, which our biases hide and the files hold in various ways."""
    return torch.as_tensor(bias).masked_fill(~torch.ones(bias.shape[-2:], dtype=torch.bool).tril(), 0.0)


@reader("cope")
def read_cope(stem: str, arrays: Arrays) -> list[Comparison]:
    """Distances, bias and causal attention weights; meta = [npos_max]."""
    q, k, table = (_tensor(arrays, name) for name in ("q", "k", "pos_emb"))
    heads, tokens, width = q.shape[1:]
    enc = create_encoding("cope_contextual", heads * width, heads, axes=1, npos_max=table.shape[1])
    assert isinstance(enc, CoPE)
    enc.load_state_dict({"pos_emb": table[None]})
    terms = enc(Positions.line(tokens)).layer(0)
    bias = terms.bias(q, k)
    assert bias is not None
    logits = q @ k.mT * width**-0.5
    distances = contextual_distances(logits.sigmoid(), table.shape[1])
    identity = torch.eye(tokens).expand(len(q), heads, -1, -1).contiguous()  # its values are the weights
    return [
        Comparison("positions", _causal_part(distances), _causal_part(arrays["positions"]), 1e-5),
        Comparison("bias", _causal_part(bias), _causal_part(arrays["bias"]), 1e-5),
        Comparison("attn", (logits + bias).softmax(-1), arrays["attn"], 1e-5),
        Comparison("attend", attend(q, k, identity, terms), arrays["attn"], 1e-5),
    ]


@reader("fox")
def read_fox(stem: str, arrays: Arrays) -> list[Comparison]:
    """Gates, the full square of the bias, and causal attention."""
    q, k, v, logits = (_tensor(arrays, name) for name in ("q", "k", "v", "fgate_logit"))
    total = F.logsigmoid(logits).cumsum(-1)
    from_gates = CumulativeTerms(total, sequence_ranks(Positions.line(q.shape[2])))
    # The gate of token t is the projection of a vector that holds its logits: the whole encoding, with an identity.
    heads = q.shape[1]
    enc = create_encoding("fox", heads * q.shape[3], heads, axes=1)
    enc.weight = torch.nn.Parameter(torch.eye(heads)[None])
    terms = enc(Positions.line(q.shape[2]), logits.transpose(1, 2))
    bias = terms.bias(q, k)
    assert bias is not None
    return [
        Comparison("bias", cumulative_bias(total), arrays["bias"], 1e-5),
        Comparison("causal bias", _causal_part(bias), _causal_part(arrays["bias"]), 1e-5),
        Comparison("out", attend(q, k, v, terms), arrays["out"], 1e-5),
        Comparison("out from gates", attend(q, k, v, from_gates, causal=True), arrays["out"], 1e-5),
    ]


@reader("cable")
def read_cable(stem: str, arrays: Arrays) -> list[Comparison]:
    """The official attention, whose logits are not scaled; meta = [C, H, N]."""
    dim, heads, tokens = arrays["meta"].astype(int).tolist()
    x = _tensor(arrays, "x")
    enc = create_encoding("cable", dim, heads, axes=1, unscaled_logits=True)
    weight, bias = (_tensor(arrays, f"p_h_attn__{name}") for name in ("weight", "bias"))
    enc.load_state_dict({"weight": weight[None], "bias": bias[None]})
    qkv = F.linear(x, _tensor(arrays, "p_c_attn__weight"), _tensor(arrays, "p_c_attn__bias"))
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    terms = enc(Positions.line(tokens), x)
    ours = terms.bias(q, k)
    assert ours is not None
    o = attend(q, k, v, terms).transpose(1, 2).flatten(2)
    y = F.linear(o, _tensor(arrays, "p_c_proj__weight"), _tensor(arrays, "p_c_proj__bias"))
    return [
        Comparison("bias", _causal_part(ours), _causal_part(arrays["bias"]), 1e-5),
        Comparison("y", y, arrays["y"], 1e-5),
    ]


@reader("bam")
def read_bam(stem: str, arrays: Arrays) -> list[Comparison]:
    """Bias of the initial and of changed parameters; meta = [N, H]."""
    tokens, heads = arrays["meta"].astype(int).tolist()
    enc = create_encoding("bam", 8 * heads, heads, axes=1, train_location=True)
    assert isinstance(enc, BAM)
    q = torch.zeros(1, heads, tokens, 8)
    line = Positions.line(tokens)
    initial = enc(line).bias(q, q)
    state = {name: _tensor(arrays, name)[None] for name in ("shape", "log_scale", "loc")}
    enc.load_state_dict(state | {"loc": state["loc"][..., None]})
    changed = enc(line).bias(q, q)
    assert initial is not None
    assert changed is not None
    return [
        Comparison("bias_init", initial, arrays["bias_init"], 1e-6, 1e-4),
        Comparison("bias", changed, arrays["bias"], 1e-6, 1e-4),
    ]
