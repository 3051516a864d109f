"""The continuous position bias: other windows, its bounds, cosine attention."""

import pytest
import torch

import mmpe


def log_cpb(heads=2, **options):
    torch.manual_seed(0)
    enc = mmpe.create_encoding("log_cpb", 8 * heads, heads, axes=options.pop("axes", 2), hidden=16, **options)
    for p in (enc.w1, enc.w2, enc.b1):
        p.data.normal_()
    return enc


def bias_of(enc, positions):
    q = torch.zeros(1, enc.heads, positions.num_tokens, 8)
    return enc(positions).bias(q, q)


def test_pretrained_size_is_the_size_of_the_window_by_default():
    grid = mmpe.Positions.grid(3, 5)
    torch.testing.assert_close(bias_of(log_cpb(), grid), bias_of(log_cpb(pretrained_size=(3, 5)), grid))


def test_with_a_pretrained_size_equal_offsets_have_equal_bias_in_every_window():
    enc = log_cpb(pretrained_size=4)
    small, large = bias_of(enc, mmpe.Positions.grid(4, 4)), bias_of(enc, mmpe.Positions.grid(4, 8))
    same_rows = large.reshape(1, 2, 4, 8, 4, 8)[..., :4, :, :4].reshape(small.shape)
    torch.testing.assert_close(same_rows, small)


def test_bias_is_between_0_and_16():
    enc = log_cpb()
    enc.w2.data.mul_(50)
    found = bias_of(enc, mmpe.Positions.grid(6, 6)).detach()
    assert float(found.min()) >= 0
    assert float(found.max()) <= 16
    assert float(found.max() - found.min()) > 8


def test_an_axis_of_one_cell_is_no_division_by_zero():
    for sizes in ((1, 1), (1, 6)):
        assert torch.isfinite(bias_of(log_cpb(), mmpe.Positions.grid(*sizes))).all()


def test_cosine_attention_forgets_the_length_of_q_and_k():
    enc, positions = log_cpb(cosine=True), mmpe.Positions.grid(3, 3)
    terms = enc(positions)
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    torch.testing.assert_close(mmpe.attend(7 * q, 0.1 * k, v, terms), mmpe.attend(q, k, v, terms))
    wide_q, wide_k = terms.queries_keys(q, k)
    logits = wide_q @ wide_k.mT * 8**-0.5
    cosines = torch.nn.functional.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)
    torch.testing.assert_close(logits, 10 * cosines)


def test_the_temperature_of_cosine_attention_is_at_most_100():
    enc = log_cpb(cosine=True)
    enc.logit_scale.data.fill_(20.0)
    q = torch.randn(1, 2, 4, 8)
    wide_q, wide_k = enc(mmpe.Positions.grid(2, 2)).queries_keys(q, q)
    torch.testing.assert_close((wide_q * wide_k).sum(-1) * 8**-0.5, torch.full((1, 2, 4), 100.0))


def test_raw_offsets_of_mode_cr_need_no_window():
    points = mmpe.Positions.points(torch.rand(5, 2))
    assert torch.isfinite(bias_of(log_cpb(mode="cr"), points)).all()
    with pytest.raises(
        ValueError, match="pass extent= to Positions.points, or build the encoding with pretrained_size="
    ):
        bias_of(log_cpb(), points)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="mode='v2' must be one of 'swin', 'cr'"):
        log_cpb(mode="v2")
    with pytest.raises(ValueError, match="pretrained_size=0 must be one positive size"):
        log_cpb(pretrained_size=0)
    with pytest.raises(ValueError, match="hidden must be at least 1, got 0"):
        mmpe.create_encoding("log_cpb", 8, 1, hidden=0)
