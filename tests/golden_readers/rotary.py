"""Readers of rope1d, rope_axial and rope_mixed files."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmpe import Positions, attend, create_encoding
from mmpe.encodings.rotary import RotaryEncoding, RotaryTerms, timm_table

from . import Arrays, Comparison, reader

NORMALISATIONS = ("separate", "min", "max")


def _tensor(arrays: Arrays, name: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(arrays[name]))


def _scalar(arrays: Arrays, name: str, default: float) -> float:
    return float(arrays[name].reshape(-1)[0]) if name in arrays else default


def _whole(arrays: Arrays, name: str, default: int = 0) -> int:
    return int(_scalar(arrays, name, default))


def _flag(arrays: Arrays, name: str, default: bool = False) -> bool:
    return bool(_whole(arrays, name, int(default)))


def _sizes(arrays: Arrays) -> list[int]:
    return arrays["grid_hw" if "grid_hw" in arrays else "grid"].astype(int).tolist()


def _positions(arrays: Arrays, tokens: int | None = None) -> Positions:
    """The grid of a file; where it does not count its prefix tokens, those that q or x has too many."""
    sizes = _sizes(arrays)
    surplus = 0 if tokens is None else tokens - int(np.prod(sizes))
    return Positions.of_size(sizes, prefix=_whole(arrays, "n_prefix", surplus))


def _rotated(arrays: Arrays, terms: RotaryTerms, atol: float) -> list[Comparison]:
    """q and k through the terms, where the file has them; layers on a leading axis."""
    found = []
    q = _tensor(arrays, "q")
    inputs = (q, _tensor(arrays, "k") if "k" in arrays else q)
    layers = range(terms.layers) if terms.layers is not None else None
    for i, name in enumerate(("q_out", "k_out")):
        if name in arrays:
            each = [terms.layer(n).queries_keys(*inputs)[i] for n in layers or range(1)]
            ours = torch.stack(each) if layers is not None else each[0]
            found.append(Comparison(name, ours.reshape(arrays[name].shape), arrays[name], atol))
    return found


def _block(arrays: Arrays, encoding: RotaryEncoding, positions: Positions, atol: float) -> Comparison:
    """A whole attention block: fused projection, rotation, softmax, output projection."""
    x = _tensor(arrays, "x")
    qkv = torch.nn.functional.linear(x, _tensor(arrays, "qkv_weight"), _tensor(arrays, "qkv_bias"))
    q, k, v = qkv.unflatten(-1, (3, encoding.heads, -1)).permute(2, 0, 3, 1, 4)
    o = attend(q, k, v, encoding(positions)).transpose(1, 2).flatten(2)
    y = torch.nn.functional.linear(o, _tensor(arrays, "proj_weight"), _tensor(arrays, "proj_bias"))
    return Comparison("y", y, arrays["y"], atol)


@reader("rope1d")
def read_rope1d(stem: str, arrays: Arrays) -> list[Comparison]:
    """rotary-embedding-torch (interleaved, shared positions) and LLaMA (half-split, positions per sample)."""
    ids = _tensor(arrays, "position_ids" if "position_ids" in arrays else "positions").float()
    tolerance = 2e-6  # for angles that are products in float32, as ours are
    q = _tensor(arrays, "q")
    encoding = create_encoding(
        "rope",
        dim=q.shape[1] * q.shape[-1],
        heads=q.shape[1],
        axes=1,
        base=_scalar(arrays, "theta", 10000.0),
        rotary_dim=_whole(arrays, "rot_dim", q.shape[-1]),
        half=_flag(arrays, "rotate_half", "half_split" in stem or "position_ids" in arrays),
    )
    assert isinstance(encoding, RotaryEncoding)
    terms = encoding(Positions.points(ids[..., None]))
    assert isinstance(terms, RotaryTerms)
    found = []
    if "inv_freq" in arrays:
        found.append(Comparison("inv_freq", encoding.frequencies()[0], arrays["inv_freq"], 1e-6))
    if "cos" in arrays:
        planes = terms.table.cos.shape[-1]
        found += [
            Comparison(name, part.reshape(*ids.shape, planes), arrays[name][..., :planes], tolerance)
            for name, part in (("cos", terms.table.cos), ("sin", terms.table.sin))
        ]
    return found + _rotated(arrays, terms, tolerance)


def _axial_options(arrays: Arrays) -> dict[str, Any]:
    """Options of `rope_axial` that the arrays of a timm, DINOv3 or rope-vit file imply."""
    options: dict[str, Any] = {"convention": "rope-vit"}
    if "theta" in arrays:
        options["base"] = _scalar(arrays, "theta", 100.0)
    if "periods" in arrays:
        options["convention"] = "dinov3"
        code = _whole(arrays, "normalize_coords_code")
        options["normalize_coords"] = NORMALISATIONS[code]
    elif "in_pixels" in arrays or "temperature" in arrays:
        options["convention"] = "timm-cat"
        pixels = _flag(arrays, "in_pixels")
        options["spectrum"] = "pixel" if pixels else "lang"
    return options | _axial_switches(arrays, pixels=options.get("spectrum") == "pixel")


def _axial_switches(arrays: Arrays, pixels: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, option in (("temperature", "base"), ("min_period", "min_period"), ("max_period", "max_period")):
        if _scalar(arrays, name, -1.0) > 0:
            found[option] = _scalar(arrays, name, -1.0)
    if "grid_is_xy" in arrays:
        found["grid_indexing"] = "xy" if _flag(arrays, "grid_is_xy") else "ij"
    if "rotate_half" in arrays:
        found["half"] = _flag(arrays, "rotate_half")
    if "grid_offset" in arrays and not pixels:  # timm does not offset its pixel grid
        found["grid_offset"] = _scalar(arrays, "grid_offset", 0.0)
    if "ref_feat_shape" in arrays:
        found["ref_feat_shape"] = arrays["ref_feat_shape"].tolist()
    if "max_res" in arrays:
        found["max_res"] = _scalar(arrays, "max_res", 224.0)
    if "linear_bands" in arrays:
        found["linear_bands"] = _flag(arrays, "linear_bands")
    for name in ("shift_coords", "jitter_coords", "rescale_coords"):
        if _scalar(arrays, name, -1.0) >= 0:
            found[name] = _scalar(arrays, name, -1.0)
    return found


def _head_dim(arrays: Arrays) -> tuple[int, int, int | None]:
    """(heads, head dim, tokens) of a file with q, with a block, or with a table only."""
    if "q" in arrays:
        return arrays["q"].shape[1], arrays["q"].shape[-1], arrays["q"].shape[2]
    if "x" in arrays:
        heads = _whole(arrays, "num_heads")
        return heads, arrays["x"].shape[-1] // heads, arrays["x"].shape[1]
    return 1, arrays["emb_sin_cos"].shape[-1] // 2, None


@reader("rope_axial")
def read_rope_axial(stem: str, arrays: Arrays) -> list[Comparison]:
    """rope-vit axial, timm cat and DINOv3, with q and k, a whole block, or augmented coordinates."""
    heads, head_dim, tokens = _head_dim(arrays)
    encoding = create_encoding("rope_axial", heads * head_dim, heads, axes=2, **_axial_options(arrays))
    assert isinstance(encoding, RotaryEncoding)
    encoding.eval()
    atol = 2e-5 if "periods" in arrays else 2e-4 if _flag(arrays, "in_pixels") else 1e-5
    positions = _positions(arrays, tokens)
    patches = Positions.of_size(_sizes(arrays))
    found = []
    if "coords" in arrays:
        found.append(Comparison("coords", encoding.coordinates(patches), arrays["coords"], 1e-6))
    if "bands" in arrays:
        bands = encoding.frequencies()[0, : len(arrays["bands"])]
        found.append(Comparison("bands", bands, arrays["bands"], 1e-6, 1e-6))
    if "coords_aug" in arrays:
        encoding.train()
        torch.manual_seed(_whole(arrays, "seed"))
        found.append(Comparison("coords_aug", encoding.coordinates(patches), arrays["coords_aug"], 1e-6))
    if "emb_sin_cos" in arrays:
        torch.manual_seed(_whole(arrays, "seed"))
        table = timm_table(encoding.rotary_table(patches), encoding.half_pairing)
        found.append(Comparison("emb_sin_cos", table, arrays["emb_sin_cos"], atol))
    if "cos" in arrays:
        table = encoding.rotary_table(patches)
        found += [Comparison(name, getattr(table, name), arrays[name], atol) for name in ("cos", "sin")]
    if "q" in arrays:
        terms = encoding(positions)
        assert isinstance(terms, RotaryTerms)
        found += _rotated(arrays, terms, atol)
    if "y" in arrays:
        found.append(_block(arrays, encoding, positions, atol))
    return found


@reader("rope_axial__rotarytorch")
def read_rotarytorch(stem: str, arrays: Arrays) -> list[Comparison]:
    """rotary-embedding-torch: the same planes on every axis, then unrotated channels; q is (B, H, *grid, D)."""
    pixels, sizes = _flag(arrays, "is_pixel"), _sizes(arrays)
    q = _tensor(arrays, "q")
    planes = _whole(arrays, "dim_per_axis") // 2
    encoding = create_encoding(
        "rope_axial",
        dim=q.shape[1] * q.shape[-1],
        heads=q.shape[1],
        axes=len(sizes),
        convention="rotary-embedding-torch",
        spectrum="pixel" if pixels else "lang",
        base=_scalar(arrays, "theta", 10000.0),
        max_res=_scalar(arrays, "max_freq", 10.0),
        planes=[planes] * len(sizes),
        grid_offset=arrays["offsets"].tolist() if "offsets" in arrays else 0.0,
    )
    assert isinstance(encoding, RotaryEncoding)
    atol = 3e-4 if pixels else 1e-5
    positions = Positions.of_size(sizes)
    terms = encoding(positions)
    ours = terms.queries_keys(*[q.flatten(2, -2)] * 2)[0]
    found = [Comparison("q_out", ours.reshape(q.shape), arrays["q_out"], atol)]
    if "freqs_per_axis" in arrays:
        bands = encoding.frequencies()[0, :planes]
        found.append(Comparison("freqs_per_axis", bands, arrays["freqs_per_axis"], 1e-5, 1e-6))
    if "angles" in arrays:
        table = encoding.rotary_table(positions)
        expected = torch.from_numpy(arrays["angles"]).flatten(0, -2)[:, ::2]
        found.append(Comparison("cos", table.cos, expected.cos(), atol))
        found.append(Comparison("sin", table.sin, expected.sin(), atol))
    return found


def _mixed(arrays: Arrays, heads: int) -> RotaryEncoding:
    """`rope_mixed` with the file's frequencies, loaded as its own checkpoint would be."""
    freqs = _tensor(arrays, "freqs")
    width = arrays["q"].shape[-1] * heads if "q" in arrays else arrays["x"].shape[-1] if "x" in arrays else None
    planes = freqs.shape[-1] if width is None else width // heads // 2
    layers = freqs.numel() // (freqs.shape[0] * heads * planes)
    indexing = "xy" if _flag(arrays, "grid_is_xy", True) else "ij"
    encoding = create_encoding(
        "rope_mixed", dim=heads * planes * 2, heads=heads, axes=freqs.shape[0], depth=layers, grid_indexing=indexing
    )
    encoding.load_state_dict({"freqs": freqs})
    assert isinstance(encoding, RotaryEncoding)
    return encoding


def _init(arrays: Arrays) -> list[Comparison]:
    """The initial frequencies of heads that were drawn with a seed."""
    freqs = arrays["freqs"]
    heads, planes = freqs.shape[-2:]
    base = _scalar(arrays, "theta", 10.0)
    torch.manual_seed(_whole(arrays, "seed"))
    layers = freqs.shape[1] if freqs.ndim == 4 else 1
    encoding = create_encoding("rope_mixed", dim=heads * planes * 2, heads=heads, depth=layers, base=base)
    ours = encoding.freqs.detach().reshape(freqs.shape)  # type: ignore[operator, union-attr]
    found = [Comparison("freqs", ours, freqs, 1e-5)]
    if "freqs_norotate" in arrays:
        sizes = torch.from_numpy(arrays["freqs_norotate"]).norm(dim=0)
        found.append(Comparison("magnitudes", ours.norm(dim=0), sizes, 1e-5))
    if "angles" in arrays:
        drawn = torch.atan2(ours[1], ours[0])[..., 0].reshape(-1) % (2 * torch.pi)
        found.append(Comparison("angles", drawn, arrays["angles"], 1e-5))
    return found


@reader("rope_mixed")
def read_rope_mixed(stem: str, arrays: Arrays) -> list[Comparison]:
    """rope-vit and timm mixed: tables, rotated q and k, a whole block, padded batches and the initial draw."""
    if "seed" in arrays and "q" not in arrays and "grid_hw" not in arrays:
        return _init(arrays)
    atol = 1e-5
    heads = _whole(arrays, "num_heads", arrays["q"].shape[1] if "q" in arrays else arrays["freqs"].shape[-2])
    encoding = _mixed(arrays, heads)
    if "shapes" in arrays:
        return [Comparison("emb_sin_cos", _padded_batch(arrays, encoding), arrays["emb_sin_cos"], atol)]
    tokens = next((arrays[n].shape[-2] for n in ("q", "x") if n in arrays), None)
    positions = _positions(arrays, tokens)
    table = encoding.rotary_table(Positions.of_size(_sizes(arrays)))
    found = []
    if "emb_sin_cos" in arrays:
        ours = timm_table(table, encoding.half_pairing).reshape(arrays["emb_sin_cos"].shape)
        found.append(Comparison("emb_sin_cos", ours, arrays["emb_sin_cos"], atol))
    if "cos" in arrays:
        found += [
            Comparison(name, getattr(table, name).reshape(arrays[name].shape), arrays[name], atol)
            for name in ("cos", "sin")
        ]
    if "q" in arrays:
        terms = encoding(positions)
        assert isinstance(terms, RotaryTerms)
        found += _rotated(arrays, terms, atol)
    if "y" in arrays:
        found.append(_block(arrays, encoding, positions, atol))
    return found


def _padded_batch(arrays: Arrays, encoding: RotaryEncoding) -> Tensor:
    """timm's batched tables: one grid per sample, rows after its end are zero."""
    expected = arrays["emb_sin_cos"]
    padded = torch.zeros(expected.shape)
    for i, sizes in enumerate(arrays["shapes"].astype(int).tolist()):
        one = timm_table(encoding.rotary_table(Positions.of_size(sizes)), encoding.half_pairing)
        padded[i, ..., : one.shape[-2], :] = one.reshape(*expected.shape[1:-2], *one.shape[-2:])
    return padded.detach()
