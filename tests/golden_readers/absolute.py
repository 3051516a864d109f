"""Learned tables (resampling) and sin-cos tables."""

import torch
from torch import Tensor

import mmpe
from golden_readers import Arrays, Comparison, reader
from mmpe.encodings.absolute import resample_table

ATOL = 1e-6


@reader("ape_resample")
def resample(stem: str, arrays: Arrays) -> list[Comparison]:
    """posemb (1, P + H0 W0, C) -> out; meta = [H0, W0, H1, W1, P, antialias, bicubic, old size passed]."""
    h0, w0, h1, w1, prefix, antialias, bicubic, passed = arrays["meta"].tolist()
    table = torch.from_numpy(arrays["posemb"])
    kernel, old = ("bicubic" if bicubic else "bilinear"), ((h0, w0) if passed else None)
    ours = resample_table(table, (h1, w1), old, prefix, kernel, bool(antialias))
    expected = arrays["out"]
    enc = mmpe.create_encoding(
        "ape_learned", dim=table.shape[-1], heads=1, axes=2,
        grid_size=(h0, w0), prefix=prefix, interpolation=kernel, antialias=bool(antialias),
    )  # fmt: skip
    enc.load_state_dict({"table": table})
    with torch.no_grad():
        added = enc.embed(torch.zeros(expected.shape), mmpe.Positions.grid(h1, w1, prefix=prefix))
    return [Comparison("function", ours, expected, ATOL), Comparison("module", added, expected, ATOL)]


@reader("sincos2d_mae")
def sincos_mae(stem: str, arrays: Arrays) -> list[Comparison]:
    """Meta is [C, grid, class token] for square grids and [C, h, w] where the rows fill another grid."""
    dim, first, second = arrays["meta"].tolist()
    square = arrays["out"].shape[0] == first * first + second and second in (0, 1)
    sizes, prefix = ((first, first), second) if square else ((first, second), 0)
    return [Comparison("out", _table(dim, sizes, prefix, layout="mae"), arrays["out"], ATOL)]


@reader("sincos2d_timm")
def sincos_timm(stem: str, arrays: Arrays) -> list[Comparison]:
    """out_rev{0,1}_interleave{0,1}; meta = [h, w, C].

    timm's reverse_coord counts the grid column by column with x first: the table of the transposed grid.
    """
    h, w, dim = arrays["meta"].tolist()
    temperature = float(arrays["temperature"])
    found = []
    for name, expected in arrays.items():
        if name.startswith("out_rev"):
            sizes = (w, h) if "rev1" in name else (h, w)
            layout = "timm-interleaved" if name.endswith("interleave1") else "timm"
            found.append(Comparison(name, _table(dim, sizes, layout=layout, temperature=temperature), expected, ATOL))
    return found


@reader("sincos2d_diffusers")
def sincos_diffusers(stem: str, arrays: Arrays) -> list[Comparison]:
    """Out (h w, C); meta = [C, h, w, base_size]; scale = interpolation_scale."""
    dim, h, w, base = arrays["meta"].tolist()
    options = {"layout": "diffusers", "base_size": base, "interpolation_scale": float(arrays["scale"])}
    return [Comparison("out", _table(dim, (h, w), **options), arrays["out"], ATOL)]


@reader("sincos")
def sincos_models(stem: str, arrays: Arrays) -> list[Comparison]:
    """Kept rows of a table: interpolated to a grid, or a centred crop of a table of max_size (in latents / 2)."""
    dim, base = arrays["table"].shape[-1], int(arrays["base_size"])
    if "max_size" in arrays:
        sizes, full = [int(n) // 2 for n in arrays["latent_hw"]], int(arrays["max_size"])
        corner = torch.tensor([(full - n) // 2 for n in sizes])
        positions = mmpe.Positions.points(mmpe.Positions.of_size(sizes).coords + corner, extent=(full, full))
        options: dict[str, object] = {}
    else:
        positions = mmpe.Positions.of_size(arrays["grid"].tolist())
        options = {"interpolation_scale": float(arrays["interpolation_scale"])}
    enc = mmpe.create_encoding("ape_sincos", dim=dim, heads=1, axes=2, layout="diffusers", base_size=base, **options)
    table = enc.embed(torch.zeros(1, positions.num_tokens, dim), positions)[0]
    return [Comparison("table", table[torch.from_numpy(arrays["rows"])], arrays["table"], ATOL)]


@reader("sincos3d_diffusers")
def sincos_cogvideox(stem: str, arrays: Arrays) -> list[Comparison]:
    """Out (T, h w, C); meta = [C, T, h, w]; scales = [spatial, temporal]."""
    dim, t, h, w = arrays["meta"].tolist()
    spatial, temporal = arrays["scales"].tolist()
    ours = _table(dim, (t, h, w), layout="diffusers", interpolation_scale=(temporal, spatial, spatial))
    return [Comparison("out", ours, arrays["out"].reshape(-1, dim), ATOL)]


def _table(dim: int, sizes: tuple[int, ...], prefix: int = 0, **options: object) -> Tensor:
    """What `ape_sincos` adds to the tokens of a grid."""
    enc = mmpe.create_encoding("ape_sincos", dim=dim, heads=1, axes=len(sizes), **options)
    positions = mmpe.Positions.of_size(sizes, prefix=prefix)
    return enc.embed(torch.zeros(1, positions.num_tokens, dim), positions)[0]
