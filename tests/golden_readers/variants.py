"""Readers of the variants of rotary encodings, from grape to wire."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmpe import AttentionTerms, PositionEncoding, Positions, attend, create_encoding
from mmpe.encodings.grape import ContextualGRAPE, rank2_rotation
from mmpe.encodings.pope import PoPE, polar
from mmpe.encodings.selective import SelectiveRoPE

from . import Arrays, Comparison, reader


def _tensor(arrays: Arrays, name: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(arrays[name]))


def _number(arrays: Arrays, name: str, default: float = float("nan")) -> float:
    return float(arrays[name].reshape(-1)[0]) if name in arrays else default


def _base(frequencies: np.ndarray) -> float:
    """Base of a geometric spectrum base^(-f / F)."""
    return float((float(frequencies[0]) / float(frequencies[1])) ** len(frequencies))


def _build(name: str, q: Tensor, axes: int = 1, **options: Any) -> PositionEncoding:
    """An encoding for the heads of q (B, H, N, D)."""
    return create_encoding(name, q.shape[1] * q.shape[3], q.shape[1], axes=axes, **options)


def _places(arrays: Arrays, q: Tensor) -> Positions:
    """Positions that a file gives for the tokens of q, else 0, 1, 2, .."""
    if "positions" in arrays:
        return Positions.points(_tensor(arrays, "positions")[..., None])
    return Positions.line(q.shape[2])


def _rotated(arrays: Arrays, terms: AttentionTerms, atol: float) -> list[Comparison]:
    q, k = terms.queries_keys(_tensor(arrays, "q"), _tensor(arrays, "k"))
    return [Comparison("q_out", q, arrays["q_out"], atol), Comparison("k_out", k, arrays["k_out"], atol)]


def _rotated_bthd(arrays: Arrays, terms: AttentionTerms, atol: float) -> list[Comparison]:
    q, k = (_tensor(arrays, name).transpose(1, 2) for name in ("q_bthd", "k_bthd"))
    q, k = (t.transpose(1, 2) for t in terms.queries_keys(q, k))
    return [Comparison("q_out", q, arrays["q_out_bthd"], atol), Comparison("k_out", k, arrays["k_out_bthd"], atol)]


# ---------------------------------------------------------------- grape


@reader("grape_m")
def read_grape(stem: str, arrays: Arrays) -> list[Comparison]:
    """Frequencies that are learned, a phase that content advances, or one rank-2 rotation."""
    if "a" in arrays:
        a, b, x = (_tensor(arrays, name) for name in ("a", "b", "x"))
        y = rank2_rotation(x, a, b, _tensor(arrays, "n") * _number(arrays, "omega"))
        return [Comparison("y", y, arrays["y"], 2e-5)]
    return _contextual_grape(arrays) if "x" in arrays else _learned_grape(arrays)


def _learned_grape(arrays: Arrays) -> list[Comparison]:
    log_freq, (_, tokens, heads, width) = _tensor(arrays, "log_freq"), arrays["q_bthd"].shape
    options = {"log_freq_scale": _number(arrays, "log_freq_scale"), "base": _number(arrays, "base")}
    shared = bool(_number(arrays, "share_across_heads"))
    enc = create_encoding("grape", heads * width, heads, axes=1, share_heads=shared, **options)
    initial = enc.log_freq.detach().clone().reshape(log_freq.shape)
    enc.load_state_dict({"log_freq": log_freq.reshape(enc.log_freq.shape)})
    found = [Comparison("log_freq_init", initial, arrays["log_freq_init"], 2e-5)]
    return found + _rotated_bthd(arrays, enc(Positions.line(tokens)).layer(0), 2e-5)


def _contextual_grape(arrays: Arrays) -> list[Comparison]:
    x, weight, (_, tokens, heads, width) = _tensor(arrays, "x"), _tensor(arrays, "omega_weight"), arrays["q_bthd"].shape
    options = {"per_head": len(weight) > 1, "share_heads": arrays["log_freq"].ndim == 1}
    enc = create_encoding("grape_contextual", heads * width, heads, axes=1, **options)
    assert isinstance(enc, ContextualGRAPE)
    found = [Comparison("bias_init", enc.gate_bias[0, 0], arrays["bias_init"], 1e-5)]
    enc.gate_weight = torch.nn.Parameter(weight[None])  # the file's tokens have a width of their own
    enc.gate_bias.data = _tensor(arrays, "omega_bias")[None]
    enc.log_freq.data = _tensor(arrays, "log_freq").reshape(enc.log_freq.shape)
    line = Positions.line(tokens)
    found.append(Comparison("phi", enc.phase(x, line), arrays["phi"], 2e-5))
    return found + _rotated_bthd(arrays, enc(line, x), 2e-5)


# ---------------------------------------------------------------- without content


@reader("p_rope")
def read_p_rope(stem: str, arrays: Arrays) -> list[Comparison]:
    """Frequencies and rotated q and k; the pairing is in the name."""
    q = _tensor(arrays, "q")
    enc = _build("p_rope", q, p=_number(arrays, "p"), base=_number(arrays, "theta"), half="half" in stem)
    found = [Comparison("inv_freq", enc.frequencies()[0], arrays["inv_freq"], 1e-6)]
    return found + _rotated(arrays, enc(_places(arrays, q)), 1e-5)


@reader("rove")
def read_rove(stem: str, arrays: Arrays) -> list[Comparison]:
    """Attention weights and output, without projections; interleaved."""
    q, k, v = (_tensor(arrays, name) for name in ("q", "k", "v"))
    enc = _build("rove", q, base=_base(arrays["inv_freq"]))
    terms = enc(_places(arrays, q))
    rotated_q, rotated_k = terms.queries_keys(q, k)
    weights = (rotated_q @ rotated_k.mT * q.shape[-1] ** -0.5).softmax(-1)
    return [
        Comparison("attn", weights, arrays["attn"], 1e-5),
        Comparison("out", attend(q, k, v, terms), arrays["out"], 1e-5),
    ]


@reader("rope_pp")
def read_rope_pp(stem: str, arrays: Arrays) -> list[Comparison]:
    """Rotated q and k, and causal attention of all heads."""
    q, k, v = (_tensor(arrays, name) for name in ("q", "k", "v"))
    terms = _build("rope_pp", q, base=_base(arrays["inv_freq"]))(_places(arrays, q))
    found = _rotated(arrays, terms, 1e-5)
    return [*found, Comparison("attn_out", attend(q, k, v, terms, causal=True), arrays["attn_out"], 1e-5)]


@reader("pope")
def read_pope(stem: str, arrays: Arrays) -> list[Comparison]:
    """Polar q and k and their scores, in 1 axis (cosines, then sines) or on a grid (side by side, last axis first)."""
    q, k = _tensor(arrays, "q"), _tensor(arrays, "k")
    if "grid" in arrays:
        sizes, delta, half = arrays["grid"].astype(int).tolist(), _tensor(arrays, "bias"), False
        positions = Positions.of_size(sizes)
    else:
        sizes, delta, half = [q.shape[2]], _tensor(arrays, "bias_raw"), True
        positions = _places(arrays, q)
    base = _base(arrays["inv_freq"]) if "inv_freq" in arrays else 10000.0
    dims = arrays["axial_dims"].astype(int).tolist() if "axial_dims" in arrays else None
    options = {"base": base, "half": half, "axial_dims": dims, "grid_indexing": "xy"}
    enc = _build("pope", q, axes=len(sizes), **options)
    assert isinstance(enc, PoPE)
    enc.load_state_dict({"delta": delta[None]})
    phase = enc.phase(positions)
    keyed = phase + delta.clamp(-2 * torch.pi, 0)[:, None]
    wide_q, wide_k = enc(positions).layer(0).queries_keys(q, k)
    scores = _tensor(arrays, "q_out") @ _tensor(arrays, "k_out").mT
    found = [
        Comparison("q_out", polar(q, phase, half), arrays["q_out"], 1e-5),
        Comparison("k_out", polar(k, keyed, half), arrays["k_out"], 1e-5),
        Comparison("scores", wide_q @ wide_k.mT, arrays.get("scores_unscaled", scores), 1e-4),
    ]
    return found + ([Comparison("angles", phase, arrays["angles"], 1e-5)] if "angles" in arrays else [])


@reader("drope")
def read_drope(stem: str, arrays: Arrays) -> list[Comparison]:
    """Headings in radians; interleaved."""
    enc = _build("drope", _tensor(arrays, "q"))
    return _rotated(arrays, enc(Positions.points(_tensor(arrays, "heading")[..., None])), 1e-5)


@reader("wire")
def read_wire(stem: str, arrays: Arrays) -> list[Comparison]:
    """Stored spectral coordinates, since their signs are arbitrary; interleaved."""
    coords, omega = _tensor(arrays, "coords"), _tensor(arrays, "omega")
    modes = coords.shape[1]
    enc = _build("wire", _tensor(arrays, "q"), axes=modes, coordinates="graph")
    enc.load_state_dict({"omega": omega[None]})
    positions = Positions.points(coords, axes=[f"u{m}" for m in range(modes)])
    return _rotated(arrays, enc(positions).layer(0), 1e-5)


# ---------------------------------------------------------------- with content


@reader("selective_rope")
def read_selective_rope(stem: str, arrays: Arrays) -> list[Comparison]:
    """Low-rank projection, causal filter and temperatures of the released class."""
    x, (_, tokens, heads, width) = _tensor(arrays, "x"), arrays["q_bthd"].shape
    proj1, temperature = _tensor(arrays, "proj1"), arrays["temperature"]
    taps = _tensor(arrays, "conv_weight") if "conv_weight" in arrays else None
    options = {"rank": len(proj1), "base": _base(temperature), "max_temperature": float(temperature[0])}
    kernel = None if taps is None else taps.shape[-1]
    enc = create_encoding("selective_rope", heads * width, heads, axes=1, kernel_size=kernel, **options)
    assert isinstance(enc, SelectiveRoPE)
    enc.proj1 = torch.nn.Parameter(proj1[None])  # the file's tokens have a width of their own
    enc.proj2.data = _tensor(arrays, "proj2")[None]
    if taps is not None and enc.conv_weight is not None:
        enc.conv_weight.data = taps[None]
    return _rotated_bthd(arrays, enc(Positions.line(tokens), x), 2e-5)


@reader("carope")
def read_carope(stem: str, arrays: Arrays) -> list[Comparison]:
    """Angles and rotated q and k; interleaved."""
    x, q = _tensor(arrays, "x"), _tensor(arrays, "q")
    enc = _build("carope", q)
    enc.weight = torch.nn.Parameter(_tensor(arrays, "W").T[None].contiguous())  # the file's tokens have their own width
    line = Positions.line(q.shape[2])
    found = [Comparison("phi", enc.content_angles(x, line), arrays["phi"], 1e-5)]
    return found + _rotated(arrays, enc(line, x), 1e-5)
