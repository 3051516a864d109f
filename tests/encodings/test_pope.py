"""PoPE: the formula of the score, its clamp, and keys that heads share."""

import math

import pytest
import torch
import torch.nn.functional as F

import mmpe
from mmpe.frequencies import geometric


def test_the_score_is_the_formula():
    enc = mmpe.create_encoding("pope", 24, 2, axes=1, init_delta="uniform")
    coords, (q, k) = 9 * torch.rand(5, 1), torch.randn(2, 1, 2, 5, 12)
    wide_q, wide_k = enc(mmpe.Positions.points(coords)).layer(0).queries_keys(q, k)
    assert wide_q.shape == wide_k.shape == (1, 2, 5, 24)
    omega, delta = geometric(12, 10000.0), enc.delta[0, :, None, None]
    turn = (coords[None, :, :] - coords[:, None, :]) * omega  # (i, j, c)
    magnitudes = F.softplus(q)[..., :, None, :] * F.softplus(k)[..., None, :, :]
    expected = (magnitudes * torch.cos(turn + delta)).sum(-1)
    torch.testing.assert_close(wide_q @ wide_k.mT, expected, atol=1e-4, rtol=0)


def test_phases_are_clamped_where_they_are_used():
    enc = mmpe.create_encoding("pope", 16, 1, axes=1)
    q, k = torch.randn(2, 1, 1, 4, 16)
    scores = []
    for delta in (0.0, 1.0, -2 * math.pi, -9.0):
        with torch.no_grad():
            enc.delta.fill_(delta)
        wide_q, wide_k = enc(mmpe.Positions.line(4)).layer(0).queries_keys(q, k)
        scores.append(wide_q @ wide_k.mT)
    for other in scores[1:]:
        torch.testing.assert_close(other, scores[0], atol=1e-4, rtol=0)


def test_layouts_and_unequal_axes():
    grid, (q, k) = mmpe.Positions.grid(3, 4), torch.randn(2, 1, 2, 12, 12)
    scores = []
    for half in (False, True):
        enc = mmpe.create_encoding("pope", 24, 2, axes=2, axial_dims=(4, 8), half=half)
        assert (enc.phase(grid)[:4, :4] == 0).all()  # the first row of patches, where the first axis is 0
        wide_q, wide_k = enc(grid).layer(0).queries_keys(q, k)
        scores.append(wide_q @ wide_k.mT)
    torch.testing.assert_close(scores[0], scores[1], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="add up to head_dim=12"):
        mmpe.create_encoding("pope", 24, 2, axes=2, axial_dims=(4, 4))


def test_terms_of_all_blocks_are_not_those_of_one():
    terms = mmpe.create_encoding("pope", 24, 2, axes=1, depth=3)(mmpe.Positions.line(4))
    q = torch.randn(1, 2, 4, 12)
    with pytest.raises(ValueError, match="those of 3 blocks"):
        terms.queries_keys(q, q)
    with pytest.raises(ValueError, match="asked for layer 3"):
        terms.layer(3)
