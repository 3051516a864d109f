"""Learned Fourier features: what the formula says, beyond the golden numbers."""

import pytest
import torch

import mmpe
from mmpe.encodings.fourier import fourier_features


def test_products_of_features_depend_on_the_difference_only():
    frequencies, x = torch.randn(16, 2), 5 * torch.randn(9, 2)
    features, moved = fourier_features(x, frequencies), fourier_features(x + 3.5, frequencies)
    torch.testing.assert_close(moved @ moved.T, features @ features.T, atol=1e-4, rtol=0)
    torch.testing.assert_close(features.square().sum(-1), torch.full((9,), 0.5))


@pytest.mark.parametrize("gamma", [0.5, 10.0])
def test_frequencies_start_with_deviation_one_over_gamma(gamma):
    enc = mmpe.create_encoding("fourier_learned", 64, 4, fourier_dim=4096, gamma=gamma)
    assert float(enc.frequencies.detach().std()) == pytest.approx(1 / gamma, rel=0.05)


def test_has_the_parameters_of_the_paper():
    enc = mmpe.create_encoding("fourier_learned", 768, 12, axes=2, fourier_dim=384, hidden_dim=32)
    assert sum(p.numel() for p in enc.parameters()) == 192 * 2 + 384 * 32 + 32 + 32 * 768 + 768


def test_groups_embed_their_own_coordinates_alone():
    enc = mmpe.create_encoding("fourier_learned", 12, 2, axes=3, groups=3)
    coords = torch.rand(5, 3)
    moved = coords.clone()
    moved[:, 1] += 40
    before, after = (enc.rows(c).unflatten(-1, (3, 4)) for c in (coords, moved))
    assert torch.equal(before[:, [0, 2]], after[:, [0, 2]])
    assert (before[:, 1] - after[:, 1]).abs().max() > 1e-3
    # Groups share their network: equal coordinates have equal vectors, whatever the axis.
    same = enc.rows(coords[:, :1].expand(-1, 3)).unflatten(-1, (3, 4))
    assert torch.equal(same[:, 0], same[:, 2])


def test_centered_coordinates_span_every_grid_alike():
    enc = mmpe.create_encoding("fourier_learned", 32, 4, coordinates="centered", gamma=0.3)

    def corner(size):
        positions = mmpe.Positions.points(torch.tensor([[-0.5, size - 0.5]]), extent=(size, size))
        return enc.embed(torch.zeros(1, 1, 32), positions)

    torch.testing.assert_close(corner(7), corner(28))
    with pytest.raises(ValueError, match="range of the positions"):
        enc.embed(torch.zeros(1, 1, 32), mmpe.Positions.points(torch.zeros(1, 2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"fourier_dim": 7}, "even"), ({"groups": 3}, "divide axes=2"), ({"gamma": 0}, "gamma"), ({"hidden_dim": 0}, "1")],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        mmpe.create_encoding("fourier_learned", 32, 4, **options)
