"""LOOPE: the curve, and the learned shift of the order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmpe
from mmpe.encodings.loope import _LEVELS, _gilbert_rank, curve_rank, gilbert_path


@settings(max_examples=60)
@given(height=st.integers(1, 23), width=st.integers(1, 23))
def test_the_curve_visits_every_cell_once_and_steps_to_neighbours(height, width):
    path = gilbert_path(height, width)
    assert sorted(map(tuple, path.tolist())) == [(i, j) for i in range(height) for j in range(width)]
    steps = path.diff(dim=0).abs()
    assert (steps.max(-1).values == 1).all() if len(steps) else True
    # Only a grid of even length and odd width across it forces one diagonal step.
    diagonal = int((steps.sum(-1) == 2).sum())
    longer, shorter = max(height, width), min(height, width)
    assert diagonal <= (1 if longer % 2 == 1 and shorter % 2 == 0 else 0)


@settings(max_examples=30)
@given(height=st.integers(1, 40), width=st.integers(1, 40))
def test_a_compiled_graph_knows_the_same_curve(height, width):
    assert torch.equal(_gilbert_rank(height, width, "cpu", _LEVELS), _gilbert_rank(height, width, "cpu"))


def test_the_curve_starts_along_the_longer_side_at_the_first_cell():
    assert gilbert_path(3, 9)[:2].tolist() == [[0, 0], [0, 1]] or gilbert_path(3, 9)[:2].tolist() == [[0, 0], [1, 0]]
    assert curve_rank((4, 7))[0] == 0
    assert torch.equal(curve_rank((4, 7)).reshape(4, 7), curve_rank((7, 4)).reshape(7, 4).T)


def test_frames_run_forwards_and_backwards():
    rank = curve_rank((3, 4, 6)).reshape(3, 4, 6)
    cells = torch.stack(torch.meshgrid(*map(torch.arange, rank.shape), indexing="ij"), -1).reshape(-1, 3)
    steps = cells[rank.flatten().long().argsort()].diff(dim=0).abs().sum(-1)
    assert (steps == 1).all()
    assert torch.equal(curve_rank((5,)), torch.arange(5.0))


def test_starts_as_sines_of_the_curve():
    enc = mmpe.create_encoding("loope", 8, 2)
    x = torch.randn(2, 36, 8)
    added = enc.embed(x, mmpe.Positions.grid(5, 7, prefix=1)) - x
    assert torch.equal(added[:, 0], torch.zeros(2, 8))
    angles = curve_rank((5, 7))[:, None] * 10000 ** (-torch.arange(4) / 4)
    expected = torch.cat([angles.sin(), angles.cos()], -1).expand(2, -1, -1)
    torch.testing.assert_close(added[:, 1:], expected, atol=1e-5, rtol=0)


def test_the_shift_follows_content_within_its_bound():
    enc = mmpe.create_encoding("loope", 8, 2, bound=0.25)
    torch.nn.init.normal_(enc.weight2, std=100.0)
    torch.nn.init.normal_(enc.weight1)
    shift = enc.shift(torch.randn(3, 10, 8))
    assert shift.abs().max() <= 0.25
    assert shift.std() > 0.05
    same = enc.shift(torch.ones(1, 10, 8))
    assert torch.equal(same, same[:, :1].expand_as(same))


def test_the_shift_is_learned():
    """From its start at zero the order moves to where a target says."""
    torch.manual_seed(0)
    enc, positions = mmpe.create_encoding("loope", 16, 2), mmpe.Positions.grid(4, 4)
    x, optimiser = torch.randn(8, 16, 16), torch.optim.Adam(enc.parameters(), lr=1e-2)
    target = 0.4 * x[..., 0].sign()
    assert torch.equal(enc.shift(x), torch.zeros(8, 16))
    angles = (curve_rank((4, 4)) + target)[..., None] * 10000 ** (-torch.arange(8) / 8)
    wanted = torch.cat([angles.sin(), angles.cos()], -1)
    losses = []
    for _ in range(150):
        loss = (enc.embed(x, positions) - x - wanted).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_patches_may_be_dropped_after_the_tokens_have_it():
    enc, positions = mmpe.create_encoding("loope", 8, 2), mmpe.Positions.grid(4, 4)
    kept = positions.keep(torch.tensor([[0, 5, 9]]))
    assert enc(kept).bias(torch.zeros(1), torch.zeros(1)) is None
    with pytest.raises(ValueError, match="fill a grid"):
        enc.embed(torch.zeros(1, 3, 8), kept)


@pytest.mark.parametrize(("options", "message"), [({"bound": -1}, "bound"), ({"temperature": 0}, "temperature")])
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        mmpe.create_encoding("loope", 8, 2, **options)
    with pytest.raises(ValueError, match="even dim"):
        mmpe.create_encoding("loope", 9, 3)
