"""RO-ViT's cropped tables."""

import pytest
import torch

import mmpe
from mmpe.encodings.ape_training import draw_crops

GRID = mmpe.Positions.grid(6, 8, prefix=2)


def cropped(**options):
    options = {"grid_size": (6, 8), "prefix": 1, "enlarged": (24, 32)} | options
    return mmpe.create_encoding("ape_cropped", 16, 2, **options)


def linear_table(enc):
    """A table whose first two channels are the coordinates of the cells."""
    with torch.no_grad():
        enc.table[0, 1:, :2] = mmpe.Positions.grid(6, 8).coords
    return enc


def rows(enc, batch=64):
    return (enc.embed(torch.zeros(batch, 50, 16), GRID)).detach()


def test_evaluation_uses_the_whole_table_and_checkpoints_of_ape_learned_fit():
    enc = cropped().eval()
    plain = mmpe.create_encoding("ape_learned", 16, 2, grid_size=(6, 8), prefix=1)
    plain.load_state_dict(enc.state_dict())
    assert torch.equal(rows(enc, 3), rows(plain, 3))


def test_training_takes_regions_of_the_table():
    """On a table of coordinates a crop is an evenly spaced region, inside of the picture, in raster order."""
    torch.manual_seed(0)
    enc = linear_table(cropped(min_scale=0.2, interpolation="bilinear"))
    found = rows(enc)
    assert torch.equal(found[:, 0], enc.table[:, 0].expand(64, -1))  # the class token's row
    assert torch.equal(found[:, 1], torch.zeros(64, 16))  # a register
    region = found[:, 2:, :2].reshape(64, 6, 8, 2)
    down, right = region[..., 0].diff(dim=1), region[..., 1].diff(dim=2)
    assert (down >= -1e-4).all()
    assert (right >= -1e-4).all()
    assert region[..., 0].diff(dim=2).abs().max() < 1e-3
    sizes = (region[:, -1, -1] - region[:, 0, 0]) / torch.tensor([5.0, 7.0])
    assert sizes.min() > 0.1
    assert sizes.max() < 1.01
    assert sizes.std(0).min() > 0.1  # each sample has its own


def test_the_whole_picture_is_the_whole_table():
    enc = linear_table(cropped(min_scale=1.0))
    inside = rows(enc, 2)[:, 2:, :2].reshape(2, 6, 8, 2)[:, 1:-1, 1:-1]
    expected = mmpe.Positions.grid(6, 8).coords.reshape(6, 8, 2)[1:-1, 1:-1]
    torch.testing.assert_close(inside, expected.expand(2, -1, -1, -1), atol=0.05, rtol=0)


def test_crops_are_drawn_as_said():
    where = draw_crops(4000, 2, 0.1)
    start, side = where.unbind(1)
    assert start.min() >= 0
    assert (start + side).max() <= 1 + 1e-6
    assert side.min() >= 0.1
    assert 0.2 < float(side.mean()) < 0.35  # E[(1 - u) v] is 1/4, and small sides grow
    torch.manual_seed(1)
    first = draw_crops(2, 2, 0.1)
    torch.manual_seed(1)
    assert torch.equal(draw_crops(2, 2, 0.1), first)


def test_gradients_reach_the_table():
    enc = cropped()
    enc.embed(torch.zeros(4, 50, 16), GRID).square().sum().backward()
    assert enc.table.grad.abs().sum() > 0


@pytest.mark.parametrize("axes", [1, 3])
def test_other_axes_crop_too(axes):
    sizes = (6,) if axes == 1 else (2, 3, 4)
    enc = mmpe.create_encoding("ape_cropped", 16, 2, axes=axes, grid_size=sizes, enlarged=12)
    x = torch.zeros(3, *mmpe.Positions.of_size(sizes).coords.shape[:1], 16)
    out = enc.embed(x, mmpe.Positions.of_size(sizes))
    assert (out[0] - out[1]).abs().max() > 1e-4
    assert not torch.equal(out, enc.embed(x, mmpe.Positions.of_size(sizes)))


@pytest.mark.parametrize(
    ("options", "message"), [({"min_scale": 0.0}, "min_scale"), ({"enlarged": (3,)}, "enlarged"), ({"std": 0.0}, "std")]
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        cropped(**options)


def test_mismatched_tokens_are_refused():
    with pytest.raises(ValueError, match=r"ape_cropped needs x of shape \(B, 50, 16\), got \(1, 49, 16\)"):
        cropped().embed(torch.zeros(1, 49, 16), GRID)
    with pytest.raises(ValueError, match="ape_cropped has rows for 1 prefix"):
        cropped().embed(torch.zeros(1, 48, 16), mmpe.Positions.grid(6, 8))
