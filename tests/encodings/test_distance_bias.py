"""T5, FIRE and KERPLE beside their formulas."""

import math

import pytest
import torch

import mmpe
from mmpe.encodings.distance_bias import kerple_bias, t5_buckets


def bias_of(enc, positions, layer=0):
    q = torch.zeros(1, enc.heads, positions.num_tokens, enc.head_dim)
    return enc(positions).layer(layer).bias(q, q)


# ---------------------------------------------------------------- T5


@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (8, 20), (6, 9)])
def test_near_offsets_have_a_bucket_each_and_far_ones_share(buckets, most):
    half = buckets // 2
    ahead = t5_buckets(torch.arange(1.0, 2 * most), buckets, most)
    behind = t5_buckets(-torch.arange(0.0, 2 * most), buckets, most)
    exact = half // 2
    assert ahead[: exact - 1].tolist() == list(range(half + 1, half + exact))
    assert behind[:exact].tolist() == list(range(exact))
    assert (behind.diff() >= 0).all()
    assert behind[most:].unique().tolist() == [half - 1]
    assert torch.equal(ahead, behind[1:] + half)


def test_a_causal_decoder_sees_nothing_ahead():
    ids = t5_buckets(torch.arange(-5.0, 6.0), 8, 16, bidirectional=False)
    assert (ids[5:] == 0).all()
    assert ids[:5].tolist() == [4, 4, 3, 2, 1]


def test_axes_add_up():
    enc = mmpe.create_encoding("t5", 16, 2, axes=2, buckets=8, max_distance=16)
    found = bias_of(enc, mmpe.Positions.grid(3, 4))[0]
    for i, j in ((0, 11), (6, 1), (4, 4)):
        rows, columns = torch.tensor(float(j // 4 - i // 4)), torch.tensor(float(j % 4 - i % 4))
        expected = enc.table[0, 0, t5_buckets(rows, 8, 16)] + enc.table[0, 1, t5_buckets(columns, 8, 16)]
        torch.testing.assert_close(found[:, i, j], expected)


def test_too_few_buckets_are_refused():
    with pytest.raises(ValueError, match="buckets=2 must be at least 4"):
        mmpe.create_encoding("t5", 16, 2, buckets=2)
    with pytest.raises(ValueError, match="max_distance=8 greater than the 8 offsets"):
        mmpe.create_encoding("t5", 16, 2, max_distance=8)
    with pytest.raises(ValueError, match="std must be greater than 0"):
        mmpe.create_encoding("t5", 16, 2, std=0.0)


# ---------------------------------------------------------------- KERPLE


@pytest.mark.parametrize("form", ["log", "power"])
def test_kernels_of_the_euclidean_distance(form):
    enc = mmpe.create_encoding("kerple", 16, 2, axes=3, form=form)
    positions = mmpe.Positions.video(2, 3, 4)
    found, (p, a) = bias_of(enc, positions)[0], (enc.p[0].clamp(min=0.01), enc.a[0].clamp(min=0.01))
    for i, j in ((0, 23), (13, 2), (5, 5)):
        d = math.dist(positions.coords[i].tolist(), positions.coords[j].tolist())
        expected = -p * torch.log(1 + a * d) if form == "log" else -a * d**p
        torch.testing.assert_close(found[:, i, j], expected)


def test_parameters_outside_of_their_bounds_can_come_back():
    distance = torch.tensor([0.0, 1.0, 3.0])
    p, a = torch.tensor([-1.0, 5.0], requires_grad=True), torch.tensor([-1.0, 1.0], requires_grad=True)
    for form, exponent in (("log", None), ("power", 2.0)):
        bias = kerple_bias(distance, p, a, form)
        torch.testing.assert_close(
            bias[:, 0], kerple_bias(distance, torch.tensor([0.01]), torch.tensor([0.01]), form)[:, 0]
        )
        if exponent:
            torch.testing.assert_close(bias[:, 1], -(distance**exponent))
        gradients = torch.autograd.grad(bias.sum(), (p, a))
        assert all(torch.isfinite(g).all() and (g != 0).all() for g in gradients)


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="form='gauss' must be one of 'log', 'power'"):
        mmpe.create_encoding("kerple", 16, 2, form="gauss")


# ---------------------------------------------------------------- FIRE


def test_fire_is_its_formula():
    torch.manual_seed(0)
    enc = mmpe.create_encoding("fire", 16, 2, hidden=8, init_length=2.0)
    positions = mmpe.Positions.grid(3, 4)
    found, longest = bias_of(enc, positions)[0], math.hypot(2, 3)
    for i, j in ((0, 11), (5, 6), (4, 4)):
        d = math.dist(positions.coords[i].tolist(), positions.coords[j].tolist())
        x = torch.tensor(math.log(1 + 0.1 * d) / (math.log(1 + 0.1 * longest) + 1e-6))
        expected = enc.w2[0] @ torch.relu(enc.w1[0, :, 0] * x + enc.b1[0]) + enc.b2[0]
        torch.testing.assert_close(found[:, i, j], expected)


def test_fire_interpolates_over_the_grid():
    """Beyond the threshold, the ends of every grid have the same bias: positions are relative to the whole."""
    enc = mmpe.create_encoding("fire", 16, 2, init_length=1.0)
    ends = [bias_of(enc, mmpe.Positions.grid(n, n))[0, :, 0, -1] for n in (4, 16)]
    torch.testing.assert_close(ends[0], ends[1])


def test_fire_below_its_threshold_is_the_same_in_every_grid():
    enc = mmpe.create_encoding("fire", 16, 2, init_length=100.0)
    small, large = bias_of(enc, mmpe.Positions.grid(1, 5)), bias_of(enc, mmpe.Positions.grid(1, 9))
    torch.testing.assert_close(large[..., :5, :5], small)


def test_points_without_an_extent_are_measured():
    enc = mmpe.create_encoding("fire", 16, 2, init_length=1.0)
    grid = mmpe.Positions.grid(3, 4)
    torch.testing.assert_close(bias_of(enc, mmpe.Positions.points(grid.coords)), bias_of(enc, grid))


def test_the_index_of_the_query_is_for_sequences():
    with pytest.raises(ValueError, match=r"normalizer='query' is for sequences \(axes=1\), got axes=2"):
        mmpe.create_encoding("fire", 16, 2, normalizer="query")
    with pytest.raises(ValueError, match="hidden=0"):
        mmpe.create_encoding("fire", 16, 2, hidden=0)
