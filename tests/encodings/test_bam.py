"""BAM: ALiBi at the start, priors with a place, negative exponents, and logits that grow with the context."""

import math

import pytest
import torch

import mmpe


def build(**options: object) -> mmpe.PositionEncoding:
    return mmpe.create_encoding("bam", 32, 2, **{"axes": 1} | options)


@pytest.mark.parametrize("sizes", [(6,), (3, 4), (2, 2, 3)])
def test_it_starts_as_alibi(sizes: tuple[int, ...]):
    positions = mmpe.Positions.of_size(sizes, prefix=1)
    q = torch.zeros(1, 2, positions.num_tokens, 16)
    theirs = mmpe.create_encoding("alibi_2d", 32, 2, axes=len(sizes))(positions).bias(q, q)
    torch.testing.assert_close(build(axes=len(sizes))(positions).bias(q, q), theirs, atol=1e-5, rtol=0)


def test_the_location_is_where_the_prior_peaks():
    enc = build(axes=2, train_location=True)
    with torch.no_grad():
        enc.loc[0, 0] = torch.asinh(torch.tensor([0.5, -1.0]))  # one row below, two columns to the left
    grid = mmpe.Positions.grid(5, 5)
    bias = enc(grid).bias(torch.zeros(1, 2, 25, 16), torch.zeros(1, 2, 25, 16))
    here, there = 2 * 5 + 2, 3 * 5 + 0
    assert bias[0, 0, here].argmax() == there
    assert bias[0, 1, here].argmax() == here


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_negative_exponents_prefer_the_far_and_stay_finite(dtype: torch.dtype):
    enc, line = build(), mmpe.Positions.line(5)
    with torch.no_grad():
        enc.shape.fill_(-1.5)
    q = torch.randn(1, 2, 5, 16, dtype=dtype)
    bias = enc(line).bias(q, q)
    assert (bias[0, :, 0].diff(dim=-1) > 0).all()
    assert torch.isfinite(mmpe.attend(q, q, q, enc(line), causal=True)).all()


def test_gradients_where_a_token_meets_itself():
    enc = build(axes=2, train_location=True)
    q = torch.zeros(1, 2, 9, 16)
    (enc(mmpe.Positions.grid(3, 3)).bias(q, q) * torch.randn(1, 2, 9, 9)).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in enc.parameters())


@pytest.mark.parametrize("causal", [False, True])
def test_scalable_softmax_multiplies_logits_and_prior(causal: bool):
    enc, line = build(ssmax=0.4, causal=causal), mmpe.Positions.line(5, prefix=1)
    q, k, v = torch.randn(3, 1, 2, 6, 16)
    prior = build()(line).bias(q, k)
    visible = torch.arange(1.0, 7) if causal else torch.full((6,), 6.0)
    logits = (q @ k.mT / 4 + prior) * 0.4 * visible.log()[:, None]
    if causal:
        logits = logits.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -math.inf)
    found = mmpe.attend(q, k, v, enc(line), causal=causal)
    torch.testing.assert_close(found, logits.softmax(-1) @ v, atol=1e-5, rtol=0)


def test_blocks_may_have_their_own():
    enc = build(share_layers=False, depth=3)
    with torch.no_grad():
        enc.log_scale[2] = -math.inf
    q, terms = torch.zeros(1, 2, 4, 16), enc(mmpe.Positions.line(4))
    assert (terms.layer(2).bias(q, q) == 0).all()
    assert (terms.layer(1).bias(q, q) < 0).any()
    with pytest.raises(ValueError, match="those of 3 blocks"):
        terms.bias(q, q)
    with pytest.raises(ValueError, match="asked for layer 3"):
        terms.layer(3)


@pytest.mark.parametrize("located", [False, True])
def test_flex_attention_sees_the_same_prior(located: bool):
    enc, q = build(axes=2, train_location=located), torch.zeros(1, 2, 7, 16)
    with torch.no_grad():
        for p in enc.parameters():
            p.add_(0.2 * torch.randn_like(p))
    terms = enc(mmpe.Positions.grid(2, 3, prefix=1))
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (1, 2, 7, 7)), indexing="ij")
    torch.testing.assert_close(terms.score_mod()(torch.tensor(0.0), b, h, i, j), terms.bias(q, q), atol=1e-5, rtol=0)
    assert build(ssmax=1.0)(mmpe.Positions.line(3)).score_mod() is None


def test_causal_counting_needs_an_order():
    with pytest.raises(ValueError, match="counts keys in the order of one axis"):
        build(axes=2, causal=True, ssmax=1.0)
