"""LookHere: what each head sees, and how attention falls."""

import math

import pytest
import torch

import mmpe
from mmpe.encodings.lookhere import HIDDEN, head_views


def lookhere(heads=12, depth=1, **options):
    return mmpe.create_encoding("lookhere", 8 * heads, heads, depth=depth, **options)


def bias_of(enc, positions, layer=0):
    q = torch.zeros(1, enc.heads, positions.num_tokens, 8)
    return enc(positions).layer(layer).bias(q, q)


def test_views_of_the_paper():
    """From the centre of a 5 x 5 grid: quadrants, cones to both diagonals, everything."""
    found = bias_of(lookhere(), mmpe.Positions.grid(5, 5))[0, :, 12].reshape(12, 5, 5) > HIDDEN
    y, x = torch.meshgrid(torch.arange(-2, 3), torch.arange(-2, 3), indexing="ij")
    expected = [
        (y <= 0) & (x <= 0), (y <= 0) & (x >= 0), (y >= 0) & (x <= 0), (y >= 0) & (x >= 0),
        -y >= x.abs(), y >= x.abs(), -x >= y.abs(), x >= y.abs(), *[x == x] * 4,
    ]  # fmt: skip
    assert torch.equal(found, torch.stack(expected))


def test_attention_falls_with_distance_less_in_deeper_blocks():
    enc = lookhere(depth=3)
    positions = mmpe.Positions.grid(4, 5)
    for layer, slope in ((0, 1.5), (1, 1.0), (2, 0.5)):
        found = bias_of(enc, positions, layer)[0]
        distance = math.dist((3, 4), (1, 1))
        assert float(found[0, 19, 6]) == pytest.approx(-2 * slope * 0.5 * distance, rel=1e-5)
        assert float(found[11, 19, 6]) == pytest.approx(-2 * slope * 2**-8 * distance, rel=1e-5)
        assert float(found[3, 19, 6]) == HIDDEN


@pytest.mark.parametrize(
    ("heads", "layout", "groups", "slopes"),
    [
        (6, "corners-triangles-none", (4, 2, 0), [0.5] * 6),
        (6, "triangles-none", (4, 2), [0.5] * 4 + [0.25, 0.0625]),
        (12, "halves-none", (8, 4), [0.5] * 4 + [0.25] * 4 + [0.25, 0.0625, 0.015625, 0.00390625]),
        (16, "corners-triangles-none", (8, 4, 4), None),
        (16, "corners-none", (8, 8), [0.5] * 4 + [0.25] * 6 + [0.0625] * 2 + [0.015625] * 2 + [0.00390625] * 2),
    ],
)
def test_heads_are_dealt_out_in_fours(heads, layout, groups, slopes):
    views, found = head_views(layout, heads)
    assert len(views) == len(found) == heads
    cones = sum(view.startswith("cone") for view in views)
    everywhere = sum(view == "all" for view in views)
    counted = {"triangles": cones, "none": everywhere}
    for name, count in zip(layout.split("-"), groups, strict=True):
        assert counted.get(name, heads - cones - everywhere) == count
    if slopes:
        assert list(found) == slopes


def test_prefix_tokens_see_and_are_seen():
    found = bias_of(lookhere(), mmpe.Positions.grid(3, 3, prefix=2))
    assert not found[..., :2, :].any()
    assert not found[..., :2].any()


def test_a_query_that_sees_no_unmasked_key_gives_no_nan():
    enc, positions = lookhere(), mmpe.Positions.grid(3, 3)
    q = torch.randn(1, 12, 9, 8, requires_grad=True)
    mask = torch.zeros(9, dtype=torch.bool)
    mask[8] = True  # the last patch alone, which most heads do not see from above
    o = mmpe.attend(q, q, q, enc(positions), mask=mask[None, None, None])
    o.sum().backward()
    assert torch.isfinite(o).all()
    assert torch.isfinite(q.grad).all()


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"has unknown groups \['sides'\]; join some of corners, halves"):
        lookhere(layout="sides-none")
    with pytest.raises(ValueError, match="one number for each of the 12 heads, got 2"):
        lookhere(head_slopes=(1, 2))
    with pytest.raises(ValueError, match="layer_slopes must be the slopes of the first and the last block"):
        lookhere(layer_slopes=(1.0,))
