"""fox, cable, cope_contextual and grape_additive against loops over pairs, and the order that they count in."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mmpe
from mmpe.encodings.bias import alibi_slopes
from mmpe.encodings.sequence import sequence_ranks

NAMES = ["fox", "cable", "cope_contextual", "grape_additive"]
HIDDEN = float("-inf")


def build(name: str, **options: object) -> mmpe.PositionEncoding:
    torch.manual_seed(0)
    enc = mmpe.create_encoding(name, 32, 2, axes=1, **options)
    with torch.no_grad():
        for p in enc.parameters():
            p.normal_()
    return enc


def bias_of(enc: mmpe.PositionEncoding, positions: mmpe.Positions, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    terms = enc(positions, x) if enc.content_dependent else enc(positions).layer(0)
    bias = terms.bias(q, k)
    assert bias is not None
    return bias.detach()


def inputs(count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, count, 32, generator=generator)
    q, k = torch.randn(2, 2, 2, count, 16, generator=generator)
    return x, q, k


def naive(name: str, enc: mmpe.PositionEncoding, x: Tensor, q: Tensor, k: Tensor, b: int, h: int) -> Tensor:
    """The bias of one head, pair by pair."""
    count = x.shape[1]
    bias = torch.full((count, count), HIDDEN)
    for i in range(count):
        for j in range(i + 1):
            between = range(j + 1, i + 1)
            if name == "fox":
                steps = [F.logsigmoid(enc.weight[0, h] @ x[b, t] + enc.gate_bias[0, h]) for t in between]
                bias[i, j] = sum(steps)
            elif name == "cable":
                bias[i, j] = -sum(F.softplus(enc.weight[0, h] @ x[b, t] + enc.bias[0, h]) for t in between)
            elif name == "cope_contextual":
                p = min(float(sum(torch.sigmoid(q[b, h, i] @ k[b, h, t] / 4) for t in range(j, i + 1))), 63.0)
                low, table = math.floor(p), enc.pos_emb[0]
                scores = q[b, h, i] @ table
                bias[i, j] = scores[low] + (p - low) * (scores[math.ceil(p)] - scores[low])
            else:
                bias[i, j] = alibi_slopes(2)[h] * sum(judged(enc, x, b, h, i, t) for t in between)
    return bias


def judged(enc: mmpe.PositionEncoding, x: Tensor, b: int, h: int, i: int, t: int) -> Tensor:
    """What query i makes of the step at t in `grape_additive`."""
    u = (x[b] @ enc.weight[0].T).unflatten(-1, (2, 16))[:, h]
    unit = torch.complex(u[t, :8], u[t, 8:]) / u[t].square().mean().sqrt()
    turned = unit * torch.exp(torch.tensor(-1j * t))
    return F.logsigmoid((u[i] @ torch.cat([turned.real, turned.imag])) / 16)


@pytest.mark.parametrize("name", NAMES)
def test_the_bias_is_the_formula(name: str):
    enc, (x, q, k) = build(name), inputs(6)
    found = bias_of(enc, mmpe.Positions.line(6), x, q, k)
    for b in range(2):
        for h in range(2):
            expected = naive(name, enc, x, q, k, b, h).detach()
            torch.testing.assert_close(found[b, h], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_prefix_tokens_come_first_and_are_free(name: str):
    enc, (x, q, k) = build(name), inputs(8)
    found = bias_of(enc, mmpe.Positions.line(6, prefix=2), x, q, k)
    alone = bias_of(enc, mmpe.Positions.line(6), x[:, 2:], q[:, :, 2:], k[:, :, 2:])
    torch.testing.assert_close(found[:, :, 2:, 2:], alone, atol=1e-4, rtol=0)
    assert (found[..., :2] == 0).all()
    assert (found[:, :, :2, 2:] == HIDDEN).all()


@pytest.mark.parametrize("name", NAMES)
def test_attention_is_causal_by_itself(name: str):
    enc, (x, q, k), line = build(name), inputs(7), mmpe.Positions.line(7)
    terms = enc(line, x) if enc.content_dependent else enc(line).layer(0)
    first = mmpe.attend(q, k, k, terms)
    torch.testing.assert_close(mmpe.attend(q, k, k, terms, causal=True), first, atol=1e-6, rtol=0)
    later = [t.clone() for t in (x, q, k)]
    for t in later:
        t[..., 4:, :] += 1.0
    terms = enc(line, later[0]) if enc.content_dependent else enc(line).layer(0)
    moved = mmpe.attend(*later[1:], later[2], terms)
    torch.testing.assert_close(moved[:, :, :4], first[:, :, :4], atol=1e-5, rtol=0)
    assert (moved - first)[:, :, 4:].abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_order_is_that_of_the_positions(name: str):
    enc, (x, q, k) = build(name), inputs(6)
    order = torch.stack([torch.randperm(6), torch.randperm(6)])  # each sample has its own
    row = order[:, None, :, None]
    shuffled = mmpe.Positions.points(order[..., None].float())
    gathered = (x.gather(1, order[..., None].expand_as(x)), *(t.gather(2, row.expand_as(t)) for t in (q, k)))
    found = bias_of(enc, shuffled, *gathered)
    expected = bias_of(enc, mmpe.Positions.line(6), x, q, k)
    expected = expected.gather(2, row.expand_as(expected)).gather(3, order[:, None, None].expand_as(expected))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_ranks():
    coords = torch.tensor([[3.0], [1.0], [1.0], [0.5]])
    assert sequence_ranks(mmpe.Positions.points(coords, prefix=1)).tolist() == [-1, 3, 1, 2, 0]
    assert sequence_ranks(mmpe.Positions.line(3, prefix=2)).tolist() == [-1, -1, 0, 1, 2]


@pytest.mark.parametrize("name", ["fox", "cable"])
@pytest.mark.parametrize("batched", [False, True])
def test_flex_attention_sees_the_same_bias(name: str, batched: bool):
    enc, (x, q, k) = build(name), inputs(7)
    coords = torch.rand(2, 6, 1) if batched else torch.rand(6, 1)
    terms = enc(mmpe.Positions.points(coords, prefix=1), x)
    mod, bias, zero = terms.score_mod(), terms.bias(q, k), torch.tensor(0.0)
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (2, 2, 7, 7)), indexing="ij")
    torch.testing.assert_close(mod(zero, b, h, i, j), bias, atol=1e-5, rtol=0)


def test_cable_is_fox_with_the_opposite_sign():
    (x, q, k), line = inputs(6), mmpe.Positions.line(6)
    cable, fox = build("cable"), build("fox")
    with torch.no_grad():
        fox.weight.copy_(-cable.weight)
        fox.gate_bias.copy_(-cable.bias)
    torch.testing.assert_close(bias_of(cable, line, x, q, k), bias_of(fox, line, x, q, k), atol=1e-4, rtol=0)


def test_cable_can_leave_out_the_scale():
    (x, q, k), line = inputs(6), mmpe.Positions.line(6)
    terms = build("cable", unscaled_logits=True)(line, x)
    expected = (q @ k.mT + terms.bias(q, k)).softmax(-1) @ k
    torch.testing.assert_close(mmpe.attend(q, k, k, terms), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("gate", ["learned", "fixed"])
def test_fox_without_content_forgets_at_many_speeds(gate: str):
    enc = mmpe.create_encoding("fox", 32, 4, axes=1, gate=gate, shortest=2.0, longest=16.0)
    bias = enc(mmpe.Positions.line(5)).bias(torch.zeros(1, 4, 5, 8), torch.zeros(1, 4, 5, 8))
    spans = -1 / bias[0, :, 4, 3]
    torch.testing.assert_close(spans, torch.tensor([2.0, 4.0, 8.0, 16.0]), atol=1e-4, rtol=0)
    assert ("gate_bias" in dict(enc.named_parameters())) == (gate == "learned")
    coords = torch.stack([torch.arange(5.0), torch.arange(5.0).flip(0)])[..., None]  # the second sample backwards
    turned = enc(mmpe.Positions.points(coords)).bias(torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 5, 8))
    torch.testing.assert_close(turned, torch.cat([bias, bias.flip(-1, -2)]), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="shortest and longest"):
        mmpe.create_encoding("fox", 32, 4, axes=1, shortest=3.0, longest=2.0)


def test_cope_starts_without_a_bias_and_ends_at_its_last_distance():
    x, q, k = inputs(9)
    line = mmpe.Positions.line(9)
    start = mmpe.create_encoding("cope_contextual", 32, 2, axes=1)
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    assert (bias_of(start, line, x, q, k)[..., visible] == 0).all()
    enc = build("cope_contextual", npos_max=3)
    far = bias_of(enc, line, x, torch.full_like(q, 9.0), torch.full_like(k, 9.0))[..., 8, 0]  # nine open gates
    expected = (torch.full((2, 16), 9.0) @ enc.pos_emb[0])[:, 2]
    torch.testing.assert_close(far, expected.detach().expand(2, 2), atol=1e-3, rtol=0)


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="npos_max must be at least 2"):
        mmpe.create_encoding("cope_contextual", 32, 2, axes=1, npos_max=1)
    with pytest.raises(ValueError, match="even number of channels, got 3"):
        mmpe.create_encoding("grape_additive", 32, 2, axes=1, path_dim=3)
    for name in NAMES:
        with pytest.raises(ValueError, match="supports axes"):
            mmpe.create_encoding(name, 32, 2, axes=2)
