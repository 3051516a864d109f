"""selective_rope and carope: phases that tokens add up."""

import pytest
import torch
import torch.nn.functional as F

import mmpe
from mmpe.encodings.selective import causal_filter


def build(name: str, **options: object) -> mmpe.PositionEncoding:
    torch.manual_seed(0)
    return mmpe.create_encoding(name, 32, 2, axes=1, **options)


def test_the_filter_is_a_causal_convolution():
    x, taps = torch.randn(2, 9, 6), torch.randn(6, 1, 4)
    expected = F.conv1d(F.pad(x.mT, (3, 0)), taps, groups=6).mT
    torch.testing.assert_close(causal_filter(x, taps), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["selective_rope", "carope"])
def test_phases_depend_on_the_past_alone(name: str):
    enc, line, x = build(name), mmpe.Positions.line(8, prefix=2), torch.randn(3, 10, 32)
    before = enc.content_angles(x, line)
    assert before.shape == (3, 2, 10, 8)
    assert (before[:, :, :2] == 0).all()
    x[:, 6] = torch.randn(3, 32)
    changed = (enc.content_angles(x, line) - before).abs().amax((0, 1, 3)) > 1e-6
    assert changed.tolist() == 6 * [False] + 4 * [True]


@pytest.mark.parametrize("name", ["selective_rope", "carope"])
def test_tokens_are_counted_in_the_order_of_their_positions(name: str):
    enc, x = build(name), torch.randn(2, 7, 32)
    coords = torch.rand(7, 1)
    order = coords[:, 0].argsort()
    found = enc.content_angles(x, mmpe.Positions.points(coords))
    expected = enc.content_angles(x[:, order], mmpe.Positions.line(7))
    torch.testing.assert_close(found[:, :, order], expected, atol=1e-5, rtol=0)


def test_no_projection_is_no_position():
    enc, q = build("selective_rope"), torch.randn(2, 1, 2, 5, 16)
    with torch.no_grad():
        enc.proj2.zero_()
    for rotated, plain in zip(enc(mmpe.Positions.line(5), torch.randn(1, 5, 32)).queries_keys(*q), q, strict=True):
        assert torch.equal(rotated, plain)


def test_without_a_filter_the_angle_is_the_tokens_own():
    enc, x = build("selective_rope", kernel_size=None), torch.randn(1, 6, 32)
    line = mmpe.Positions.line(6)
    before = enc.content_angles(x, line)
    x[:, 2] = torch.randn(32)
    changed = (enc.content_angles(x, line) - before).abs().amax((0, 1, 3)) > 1e-6
    assert changed.tolist() == [False, False, True, False, False, False]
    assert "conv_weight" not in dict(enc.named_parameters())


def test_selective_rope_ignores_the_length_of_a_token():
    enc, x, line = build("selective_rope"), torch.randn(1, 6, 32), mmpe.Positions.line(6)
    torch.testing.assert_close(enc.content_angles(7 * x, line), enc.content_angles(x, line), atol=1e-5, rtol=0)


def test_carope_with_no_weights_is_a_geometric_spectrum():
    enc = build("carope", init_std=0.0)
    base = 1 / (1 + torch.log(torch.tensor(2.0)))
    expected = torch.arange(1.0, 6)[:, None] * base ** torch.arange(1, 9)
    found = enc.content_angles(torch.randn(1, 5, 32), mmpe.Positions.line(5))
    torch.testing.assert_close(found, expected.expand(1, 2, 5, 8), atol=1e-5, rtol=0)


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="rank and kernel_size"):
        build("selective_rope", rank=0)
    with pytest.raises(ValueError, match="max_temperature must be greater"):
        build("selective_rope", max_temperature=0.0)
