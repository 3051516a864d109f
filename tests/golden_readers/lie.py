"""Readers of string, liere, comrope and harope files."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmpe import PositionEncoding, Positions, attend, create_encoding
from mmpe.encodings.comrope import ComRoPE, patch_noise, unit_coordinates
from mmpe.encodings.lie import upper_triangle
from mmpe.encodings.liere import LieRE
from mmpe.encodings.mapped_rotary import MappedRotaryTerms
from mmpe.encodings.rotary import RotaryTerms
from mmpe.encodings.string_pe import StringCayley

from . import Arrays, Comparison, reader


def _tensor(arrays: Arrays, name: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(arrays[name]))


def _whole(arrays: Arrays, name: str) -> int:
    return int(arrays[name].reshape(-1)[0])


def _rotated(
    arrays: Arrays, encoding: PositionEncoding, positions: Positions, atol: float, layered: bool = False
) -> list[Comparison]:
    """q and k through the terms; with a leading layer axis where the file has one."""
    terms = encoding(positions)
    q, k = _tensor(arrays, "q"), _tensor(arrays, "k")
    each = [terms.layer(n).queries_keys(q, k) for n in range(encoding.depth)]
    ours = {
        name: torch.stack([pair[i] for pair in each]) if layered else each[0][i]
        for i, name in enumerate(("q_out", "k_out"))
    }
    if "scores_unscaled" in arrays:
        ours["scores_unscaled"] = ours["q_out"] @ ours["k_out"].mT
    return [Comparison(name, tensor, arrays[name], atol) for name, tensor in ours.items() if name in arrays]


# ---------------------------------------------------------------- string


@reader("string")
def read_string(stem: str, arrays: Arrays) -> list[Comparison]:
    """Cayley with S, a third-party layer with P itself (which may have determinant -1), and circulant."""
    if "c" in arrays:
        return _circulant(arrays)
    x = _tensor(arrays, "q" if "q" in arrays else "x")
    freqs = _tensor(arrays, "freqs")
    freqs = freqs if freqs.dim() == 3 else freqs[None]  # (H, A, F)
    heads = x.shape[1]
    encoding = create_encoding(
        "string_cayley", heads * x.shape[-1], heads, axes=freqs.shape[1], share_heads=len(freqs) == 1 < heads
    )
    assert isinstance(encoding, StringCayley)
    skew = _tensor(arrays, "S_upper") if "S_upper" in arrays else torch.zeros(len(freqs), *x.shape[-1:] * 2)
    encoding.load_state_dict({"skew": upper_triangle(skew)[None], "freqs": freqs[None]})
    positions = Positions.points(_tensor(arrays, "positions"))
    if "S_upper" in arrays:
        found = _rotated(arrays, encoding, positions, 2e-5)
        return [Comparison("P", encoding.maps()[0][0], arrays["P"], 2e-5), *found] if "P" in arrays else found
    p = _tensor(arrays, "P").expand(len(freqs), -1, -1)
    turned, _ = MappedRotaryTerms(encoding.rotary_table(positions).layer(0), (p, p), (False,)).queries_keys(x, x)
    return [Comparison("x_out", turned, arrays["x_out"], 2e-5)]


def _circulant(arrays: Arrays) -> list[Comparison]:
    c, q = _tensor(arrays, "c"), _tensor(arrays, "q")  # c (H, A, D/b, b)
    heads = q.shape[1]
    encoding = create_encoding(
        "string_circulant",
        heads * q.shape[-1],
        heads,
        axes=c.shape[1],
        block_size=c.shape[-1],
        share_heads=len(c) == 1 < heads,
    )
    encoding.load_state_dict({"c": c[None]})
    found = _rotated(arrays, encoding, Positions.points(_tensor(arrays, "positions")), 2e-5)
    if "phase_mu" in arrays:
        planes = (c.shape[-1] - 1) // 2
        rates = encoding.frequencies()[0].unflatten(-1, (-1, planes))  # type: ignore[operator]
        found.append(Comparison("phase_mu", rates, arrays["phase_mu"][..., 1 : planes + 1], 2e-5))
    return found


# ---------------------------------------------------------------- liere


def _grid(arrays: Arrays, name: str) -> tuple[int, ...]:
    pairs = zip(arrays[name].astype(int).tolist(), arrays["patch"].astype(int).tolist(), strict=True)
    return tuple(-(-size // patch) for size, patch in pairs)


def _liere(raw: Tensor, grid: tuple[int, ...]) -> LieRE:
    """LieRE with generators (A, L, H, m, b, b), loaded as its own checkpoint would be."""
    axes, layers, heads, blocks, size, _ = raw.shape
    encoding = create_encoding(
        "liere", heads * blocks * size, heads, axes=axes, depth=layers, block_size=size, grid_size=grid
    )
    encoding.load_state_dict({"generators": raw.flatten(2, 3)})
    assert isinstance(encoding, LieRE)
    return encoding


@reader("liere")
def read_liere(stem: str, arrays: Arrays) -> list[Comparison]:
    """Positions, rotations (R: token, layer, head, block) and rotated q and k, layer by layer."""
    if "tiled" in stem:
        return _tiled(arrays)
    trained, grid = _grid(arrays, "train_image"), _grid(arrays, "eval_image")
    axes = len(grid)
    raw = _tensor(arrays, "raw") if "raw" in arrays else torch.zeros(axes, 1, 1, 1, 2, 2)
    encoding = _liere(raw, trained)
    found = [Comparison("positions", encoding.coordinates(Positions.of_size(grid)), arrays["positions"], 1e-6)]
    if "q" in arrays:
        positions = Positions.of_size(grid, prefix=arrays["q"].shape[2] - len(arrays["positions"]))
        found += _rotated(arrays, encoding, positions, 2e-4, layered=True)
    for name in ("R", "R_first_tokens"):
        if name in arrays:
            p = torch.nn.functional.pad(_tensor(arrays, "positions"), (0, 0, 1, 0))[: len(arrays[name])]
            ours = torch.stack([encoding.rotations(p, n) for n in range(encoding.depth)])  # (L, H, m, N, b, b)
            found.append(Comparison(name, ours.permute(3, 0, 1, 2, 4, 5), arrays[name], 2e-4))
    return found


def _tiled(arrays: Arrays) -> list[Comparison]:
    """The fixed frequencies that LieRE compares with: exp(-4 linspace(0, 1)) on planes of each axis in turn."""
    grid, width = _grid(arrays, "image"), _whole(arrays, "head_dim")
    axes = len(grid)
    phases = torch.exp(-4.0 * torch.linspace(0.0, 1.0, width // (2 * axes)))
    raw = torch.zeros(axes, 1, 1, width // 2, 2, 2)
    for a in range(axes):
        raw[a, 0, 0, a * len(phases) : (a + 1) * len(phases), 0, 1] = -phases
    encoding = _liere(raw, grid)
    p = encoding.coordinates(Positions.of_size(grid))
    p = torch.nn.functional.pad(p, (0, 0, len(arrays["R"]) - len(p), 0))
    return [Comparison("R", encoding.rotations(p)[0].movedim(1, 0), arrays["R"], 2e-4)]


# ---------------------------------------------------------------- comrope


@reader("comrope")
def read_comrope(stem: str, arrays: Arrays) -> list[Comparison]:
    """Both forms and the repository's plain rotation, as q and k and as a whole block; and perturbed positions."""
    if "normal_perturb" in arrays:
        return _perturbed(arrays)
    heads, axes, width = _whole(arrays, "num_heads"), _whole(arrays, "num_axes"), arrays["x"].shape[-1]
    if "theta_base" in arrays:
        return _vanilla(arrays, heads, axes, width)
    name = "comrope_ld" if "multiplier" in arrays else "comrope_ap"
    encoding = create_encoding(name, width, heads, axes=axes, block_size=_whole(arrays, "block_size"))
    assert isinstance(encoding, ComRoPE)
    state = {"freqs": _tensor(arrays, "freqs").transpose(0, 1)}
    if "multiplier" in arrays:
        state["multiplier"] = _tensor(arrays, "multiplier").flatten(2)
    encoding.load_state_dict(state)
    generators = encoding.rates(0)[:, :, None, None] * encoding.generators()[:, None]  # (H, A, m, b, b)
    found = [Comparison("exponent", generators, arrays["exponent"], 1e-6)]
    # The file has coordinates in (0, 1), class token included: points that the encoding places just there.
    points = _tensor(arrays, "positions")
    return found + _whole_block(arrays, encoding, Positions.points(points - 0.5, extent=(1.0,) * axes))


def _vanilla(arrays: Arrays, heads: int, axes: int, width: int) -> list[Comparison]:
    """Frequencies theta_base^j on the planes of each axis in turn: axial rotation."""
    planes = width // heads // (2 * axes)
    base = float(arrays["theta_base"].reshape(-1)[0]) ** -planes
    encoding = create_encoding("rope_axial", width, heads, axes=axes, base=base, grid_indexing="ij")
    return _whole_block(arrays, encoding, Positions.points(_tensor(arrays, "positions")))


def _whole_block(arrays: Arrays, encoding: PositionEncoding, positions: Positions) -> list[Comparison]:
    found = _rotated(arrays, encoding, positions, 1e-5)
    x, terms = _tensor(arrays, "x"), encoding(positions)
    q, k, v = (
        torch.nn.functional.linear(x, _tensor(arrays, f"{n}_weight"), _tensor(arrays, f"{n}_bias"))
        .unflatten(-1, (encoding.heads, -1))
        .transpose(1, 2)
        for n in "qkv"
    )
    o = attend(q, k, v, terms).transpose(1, 2).flatten(2)
    y = torch.nn.functional.linear(o, _tensor(arrays, "o_weight"), _tensor(arrays, "o_bias"))
    return [*found, Comparison("y", y, arrays["y"], 1e-5)]


def _perturbed(arrays: Arrays) -> list[Comparison]:
    """Coordinates of square pictures with the file's draws of noise and shift."""
    side, frames = _whole(arrays, "patches_per_side"), _whole(arrays, "num_frames")
    axes = _whole(arrays, "num_axes")
    sizes = (frames, side, side)[-axes:]
    intensity, offset = (float(arrays[f"{n}_intensity"]) for n in ("perturbation", "offset"))
    noise = patch_noise(_tensor(arrays, "normal_perturb"), intensity)
    shift = offset * _tensor(arrays, "normal_offset")
    grid = Positions.of_size(sizes, prefix=1)
    still = create_encoding("comrope_ld", 32, 2, axes=axes).eval()
    assert isinstance(still, ComRoPE)
    moved = unit_coordinates(grid.coords, (float(side),) * axes, 1, noise, shift)
    return [
        Comparison("positions_unperturbed", still.coordinates(grid), arrays["positions_unperturbed"], 1e-6),
        Comparison("positions", moved, arrays["positions"], 1e-6),
    ]


# ---------------------------------------------------------------- harope


@reader("harope")
def read_harope(stem: str, arrays: Arrays) -> list[Comparison]:
    """Both variants: the maps, the table, and q and k on the grid."""
    heads, width = arrays["q"].shape[1], arrays["q"].shape[-1]
    encoding = create_encoding("harope", heads * width, heads, variant="v1" if "v1" in stem else "v2")
    encoding.load_state_dict({name: _tensor(arrays, name)[None] for name in ("A_u", "A_v", "sigma")})
    positions = Positions.of_size(arrays["grid_hw"].astype(int).tolist())
    query, key = encoding.maps()  # type: ignore[operator]
    found = [Comparison("M", query[0], arrays["M"], 2e-5)]
    if "M_inv" in arrays:
        found.append(Comparison("M_inv", key[0].mT, arrays["M_inv"], 2e-5))
    if "cos" in arrays:
        terms = encoding(positions).layer(0)
        assert isinstance(terms, RotaryTerms)
        found += [
            Comparison(name, table.repeat_interleave(2, -1), arrays[name], 2e-5)
            for name, table in (("cos", terms.table.cos), ("sin", terms.table.sin))
        ]
    return found + _rotated(arrays, encoding, positions, 2e-5)
