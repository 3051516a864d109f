"""`attend` beside the equation written out in the plainest way."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import mmpe
from mmpe.encoding import AttentionTerms, ComposedTerms, iterate_terms


def plain(q, k, v, bias=0.0, mask=None, scale=None):
    """softmax(q k' scale + bias) v, with repeated keys for grouped queries."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    logits = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(-1) @ v


def qkv(batch=2, heads=4, tokens=9, width=8, kv_heads=None, keys=None):
    kv_heads, keys = kv_heads or heads, keys or tokens
    return (torch.randn(batch, h, n, width) for h, n in ((heads, tokens), (kv_heads, keys), (kv_heads, keys)))


class Everything(AttentionTerms):
    """One of each term: wider queries and keys, scaled values, shifted outputs, a bias, a temperature."""

    temperature = 0.7

    def __init__(self, heads=4, tokens=9):
        self.table = torch.randn(1, heads, tokens, tokens)

    def queries_keys(self, q, k):
        return torch.cat([q, q], dim=-1), torch.cat([k, k.flip(-1)], dim=-1)

    def values(self, v):
        return 2 * v

    def outputs(self, o):
        return o + 1

    def bias(self, q, k):
        return self.table


def test_is_sdpa_without_terms():
    q, k, v = qkv(keys=5)
    torch.testing.assert_close(mmpe.attend(q, k, v), F.scaled_dot_product_attention(q, k, v))
    torch.testing.assert_close(mmpe.attend(q, k, v, AttentionTerms()), F.scaled_dot_product_attention(q, k, v))


@given(
    kv_heads=st.sampled_from([1, 2, 4]),
    keys=st.integers(1, 9),
    scale=st.sampled_from([None, 0.1]),
    mask=st.sampled_from([None, "bool", "float", "keys"]),
)
def test_masks_scales_and_groups(kv_heads, keys, scale, mask):
    q, k, v = qkv(kv_heads=kv_heads, keys=keys)
    shape = (2, 1, 1, keys) if mask == "keys" else (2, 1, 9, keys)
    hidden = None
    if mask in ("bool", "keys"):
        hidden = torch.rand(shape) < 0.7
        hidden[..., 0] = True  # no query without a key
    elif mask == "float":
        hidden = torch.randn(shape)
    torch.testing.assert_close(
        mmpe.attend(q, k, v, mask=hidden, scale=scale), plain(q, k, v, mask=hidden, scale=scale), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("mask", ["none", "bool", "float", "causal"])
def test_every_term_at_once(mask):
    q, k, v = qkv()
    terms = Everything()
    masks = {"none": None, "bool": torch.rand(2, 1, 9, 9) < 0.8, "float": torch.randn(9, 9), "causal": None}
    hidden = masks[mask]
    if mask == "bool":
        hidden |= torch.eye(9, dtype=torch.bool)
    wide_q, wide_k = terms.queries_keys(q, k)
    visible = torch.ones(9, 9, dtype=torch.bool).tril() if mask == "causal" else hidden
    # The scale is that of the 8 channels that came in, not of the 16 that the terms made.
    expected = plain(wide_q, wide_k, 2 * v, terms.table, visible, scale=0.7 * 8**-0.5) + 1
    found = mmpe.attend(q, k, v, terms, mask=hidden, causal=mask == "causal")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_causal_and_mask_together():
    q, k, v = qkv()
    hidden = torch.rand(2, 1, 9, 9) < 0.5
    hidden |= torch.eye(9, dtype=torch.bool)
    expected = plain(q, k, v, mask=hidden & torch.ones(9, 9, dtype=torch.bool).tril())
    torch.testing.assert_close(mmpe.attend(q, k, v, mask=hidden, causal=True), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        mmpe.attend(q, k, v, causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    )


def test_temperature_of_each_query():
    q, k, v = qkv()

    class Hot(AttentionTerms):
        temperature = torch.rand(2, 4, 9, 1)

    torch.testing.assert_close(mmpe.attend(q, k, v, Hot()), plain(Hot.temperature * q, k, v), atol=1e-5, rtol=1e-4)
    both = Hot() + Hot()
    torch.testing.assert_close(both.temperature, Hot.temperature**2)


def test_values_of_another_width():
    q, k, _ = qkv()
    for width in (3, 8, 20):
        v = torch.randn(2, 4, 9, width)
        torch.testing.assert_close(mmpe.attend(q, k, v), plain(q, k, v), atol=1e-5, rtol=1e-4)
        wide = mmpe.attend(q, k, v, Everything())
        assert wide.shape == v.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_and_out(dtype):
    q, k, v = (t.to(dtype) for t in qkv())
    terms = Everything()
    found = mmpe.attend(q, k, v, terms)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), mmpe.attend(q.float(), k.float(), v.float(), terms), atol=0.05, rtol=0.02)


def test_composition_applies_in_order_and_adds_biases():
    q, k, v = qkv()
    first, second = Everything(), Everything()
    total = first + second + AttentionTerms()
    assert len(list(iterate_terms(total))) == 3
    torch.testing.assert_close(total.bias(q, k), first.table + second.table)
    torch.testing.assert_close(total.temperature, 0.49)
    assert total.queries_keys(q, k)[0].shape[-1] == 32
    torch.testing.assert_close(total.layer(3).values(v), 4 * v)
    torch.testing.assert_close(total.outputs(v), v + 2)
    assert ComposedTerms((AttentionTerms(),)).bias(q, k) is None
    assert ComposedTerms((AttentionTerms(),)).temperature is None


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 2, 3), (1, 2, 3), (1, 2, 3)), r"must be \(B, H, N, D\)"),
        (((1, 4, 5, 8), (1, 3, 5, 8), (1, 3, 5, 8)), "multiple"),
        (((1, 4, 5, 8), (1, 4, 5, 8), (1, 4, 6, 8)), "agree in heads and length"),
        (((1, 4, 5, 8), (1, 2, 5, 8), (1, 4, 5, 8)), "agree in heads and length"),
    ],
)
def test_wrong_shapes_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        mmpe.attend(*(torch.zeros(shape) for shape in shapes))


def test_flex_refuses_what_it_cannot_do():
    q, k, v = qkv()
    for extra in ({"mask": torch.ones(9, 9)}, {"dropout": 0.1}, {"causal": True}):
        with pytest.raises(ValueError, match="backend='flex'"):
            mmpe.attend(q, k, v, AttentionTerms(), backend="flex", **extra)


def test_dropout_drops():
    q, k, v = qkv()
    assert not torch.equal(mmpe.attend(q, k, v, dropout=0.9), mmpe.attend(q, k, v))


def test_gradients_are_those_of_the_equation():
    q, k, v = (t.double().requires_grad_() for t in qkv(batch=1, heads=2, tokens=4, width=3))
    table = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)

    class Biased(AttentionTerms):
        def bias(self, q, k):
            return table

    found = torch.autograd.grad(mmpe.attend(q, k, v, Biased()).square().sum(), (q, k, v, table))
    expected = torch.autograd.grad(plain(q, k, v, table).square().sum(), (q, k, v, table))
    torch.testing.assert_close(found, expected)


def test_flex_backend_refuses_terms_that_it_cannot_express() -> None:
    """Fault: a backend that was asked for by name falls back to another one without a word."""
    q = torch.randn(1, 2, 6, 8)
    terms = mmpe.create_encoding("rope_axial", dim=16, heads=2, axes=2)(mmpe.Positions.grid(2, 3))
    with pytest.raises(ValueError, match="score_mod"):
        mmpe.attend(q, q, q, terms, backend="flex")


class _WeightSums(mmpe.AttentionTerms):
    """A term made from the weights alone: every channel receives the weight of key 0."""

    needs_weights = True

    def from_weights(self, weights: torch.Tensor) -> torch.Tensor:
        return weights[..., :1].expand(*weights.shape[:-1], 8)


@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [None, "bool", "float"])
def test_explicit_attention_equals_sdpa_plus_the_term(kv_heads: int, causal: bool, masked: str | None) -> None:
    q = torch.randn(2, 2, 5, 8)
    k, v = torch.randn(2, 2, kv_heads, 5, 8)
    visible = torch.rand(2, 1, 5, 5) > 0.3
    visible[..., 0] = True
    mask = None if masked is None else visible if masked == "bool" else torch.where(visible, 0.5, -3.0)
    plain = mmpe.attend(q, k, v, mmpe.AttentionTerms(), mask, causal=causal)
    one_hot = torch.zeros_like(v)
    one_hot[..., 0, :] = 1.0
    first = mmpe.attend(q, k, one_hot, mmpe.AttentionTerms(), mask, causal=causal)
    with_term = mmpe.attend(q, k, v, _WeightSums(), mask, causal=causal)
    torch.testing.assert_close(with_term, plain + first, atol=1e-5, rtol=1e-5)


def test_explicit_attention_of_a_query_that_sees_nothing_is_zero() -> None:
    q = torch.randn(1, 2, 4, 8)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask[..., 2, :] = False
    out = mmpe.attend(q, q, q, _WeightSums(), mask)
    assert torch.isfinite(out).all()
    assert (out[..., 2, :] == 0).all()


class FixedBias(AttentionTerms):
    """A bias that ignores the tensors it is for, as a term made for other positions does."""

    def __init__(self, *shape: int) -> None:
        self.fixed = torch.zeros(shape)

    def bias(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.fixed


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 4, 1, 1), (2, 4, 6, 1), (1, 4, 5, 6), (1, 3, 6, 6), (3, 4, 6, 6), (1, 1, 7)]
)
def test_a_bias_for_other_tensors_is_refused(shape):
    """Fault: the bias of one token is broadcast over all of them."""
    q = torch.randn(2, 4, 6, 8)
    with pytest.raises(ValueError, match="positional bias"):
        mmpe.attend(q, q, q, FixedBias(*shape))


@pytest.mark.parametrize("shape", [(6, 6), (1, 6), (4, 1, 6), (1, 4, 6, 6), (2, 1, 6, 6), (2, 4, 6, 6)])
def test_a_bias_may_be_shared_by_samples_heads_or_queries(shape):
    q = torch.randn(2, 4, 6, 8)
    torch.testing.assert_close(mmpe.attend(q, q, q, FixedBias(*shape)), plain(q, q, q))


def test_tensors_that_cannot_be_attended_are_refused():
    q = torch.randn(2, 4, 6, 8)
    with pytest.raises(ValueError, match="head dim"):
        mmpe.attend(q, q[..., :6], q)
    with pytest.raises(TypeError, match="floating-point"):
        mmpe.attend(q.long(), q.long(), q.long())
