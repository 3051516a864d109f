"""Distance biases beside the formula written out."""

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmpe
from mmpe.encodings.bias import alibi_slopes, distance_bias


def alibi(heads=4, axes=2, **options):
    return mmpe.create_encoding("alibi_2d", dim=8 * heads, heads=heads, axes=axes, **options)


def bias_of(enc, positions):
    q = torch.zeros(1, enc.heads, positions.num_tokens, 8)
    return enc(positions).bias(q, q)


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_slopes_of_powers_of_two(heads):
    expected = torch.tensor([2 ** (-8 * k / heads) for k in range(1, heads + 1)])
    torch.testing.assert_close(alibi_slopes(heads), expected, atol=1e-7, rtol=1e-6)


@given(heads=st.integers(1, 40))
def test_slopes_of_any_count(heads):
    slopes = alibi_slopes(heads)
    power = 2 ** int(math.log2(heads))
    assert slopes.shape == (heads,)
    torch.testing.assert_close(slopes[:power], alibi_slopes(power))
    torch.testing.assert_close(slopes[power:], alibi_slopes(2 * power)[::2][: heads - power])


def test_bias_is_minus_slope_times_distance():
    coords = mmpe.Positions.grid(3, 4).coords
    bias = bias_of(alibi(), mmpe.Positions.grid(3, 4))
    for h, i, j in ((0, 0, 11), (1, 5, 6), (3, 7, 2)):
        expected = -(2.0 ** (-2 * (h + 1))) * math.dist(coords[i].tolist(), coords[j].tolist())
        assert float(bias[0, h, i, j]) == pytest.approx(expected, abs=1e-6)
    line = bias_of(alibi(axes=1), mmpe.Positions.line(6))[0, 0]
    torch.testing.assert_close(line, -0.25 * (torch.arange(6.0)[:, None] - torch.arange(6.0)).abs())


def test_far_from_the_origin_the_diagonal_is_zero():
    """Squares added up and subtracted would lose these zeros to rounding."""
    coords = torch.rand(7, 3) + 30000
    assert not distance_bias(coords, alibi_slopes(2)).diagonal(dim1=-2, dim2=-1).any()


def test_prefix_tokens_are_exempt_or_at_the_corner():
    positions = mmpe.Positions.grid(2, 3, prefix=2)
    exempt = bias_of(alibi(), positions)
    assert not exempt[:, :, :2].any()
    assert not exempt[..., :2].any()
    torch.testing.assert_close(exempt[..., 2:, 2:], bias_of(alibi(), mmpe.Positions.grid(2, 3)))
    corner = bias_of(alibi(prefix_rule="origin"), positions)
    assert float(corner[0, 0, 0, 2]) == pytest.approx(-0.25 * math.sqrt(2))
    assert not corner[..., :2, :2].any()


def test_batched_positions_have_a_bias_each():
    points = torch.rand(3, 5, 2) * 9
    bias = bias_of(alibi(prefix_rule="origin"), mmpe.Positions.points(points, prefix=1))
    assert bias.shape == (3, 4, 6, 6)
    for sample in range(3):
        alone = bias_of(alibi(prefix_rule="origin"), mmpe.Positions.points(points[sample], prefix=1))
        torch.testing.assert_close(bias[sample], alone[0])


@pytest.mark.parametrize("rule", ["exempt", "origin"])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("prefix", [0, 2])
def test_score_mod_is_the_bias(rule, batched, prefix):
    from torch.nn.attention.flex_attention import flex_attention

    points = torch.rand(2, 14, 2) * 9
    terms = alibi(prefix_rule=rule)(mmpe.Positions.points(points if batched else points[0], prefix=prefix))
    q, k, v = torch.randn(3, 2, 4, prefix + 14, 8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        flex = flex_attention(q, k, v, score_mod=terms.score_mod())
    torch.testing.assert_close(flex, mmpe.attend(q, k, v, terms, backend="sdpa"), atol=1e-5, rtol=1e-5)


def test_score_mods_compose():
    """Fault: a sum with a bias falls back to the N x N tensor that flex_attention is there to avoid."""
    positions = mmpe.Positions.grid(3, 4)
    total = mmpe.create_encoding("alibi_2d+ape_sincos+alibi_2d", dim=32, heads=4)(positions)
    score, index = torch.zeros(()), torch.arange(12)
    mod = total.score_mod()
    assert mod is not None
    found = torch.stack([mod(score, index[0], index[2], i, index) for i in index])
    torch.testing.assert_close(found, 2 * bias_of(alibi(), positions)[0, 2])
    assert mmpe.create_encoding("ape_sincos+none", dim=32, heads=4)(positions).score_mod() is None


@pytest.mark.slow
def test_compiled_flex_attention_is_the_bias():
    positions = mmpe.Positions.grid(4, 8, prefix=1)
    q, k, v = torch.randn(3, 2, 4, 33, 16)
    terms = mmpe.create_encoding("alibi_2d", dim=64, heads=4)(positions)
    with torch.no_grad():
        flex = mmpe.attend(q, k, v, terms, backend="flex")
    torch.testing.assert_close(flex, mmpe.attend(q, k, v, terms, backend="sdpa"), atol=1e-5, rtol=1e-5)


def test_nothing_of_the_size_of_the_bias_is_kept():
    terms = alibi()(mmpe.Positions.grid(16, 16))
    q = torch.zeros(1, 4, 256, 8)
    terms.bias(q, q)
    kept = sum(t.numel() for t in vars(terms).values() if isinstance(t, torch.Tensor))
    assert kept == 256 * 2 + 4


def test_a_wrong_rule_is_refused():
    with pytest.raises(ValueError, match="prefix_rule='cls' must be one of 'exempt', 'origin'"):
        alibi(prefix_rule="cls")
