"""Position encoding generators beside a loop over the neighbours."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmpe
from mmpe.encodings.conditional import fold_identity, peg


def by_hand(image, weight, bias):
    """x + sum over offsets of weight[offset] x[p + offset], zero outside; image (B, C, *grid)."""
    grid, reach = image.shape[2:], weight.shape[-1] // 2
    out = image + bias.reshape(-1, *[1] * len(grid))
    for cell in itertools.product(*map(range, grid)):
        for offset in itertools.product(range(-reach, reach + 1), repeat=len(grid)):
            source = tuple(c + o for c, o in zip(cell, offset, strict=True))
            if all(0 <= s < size for s, size in zip(source, grid, strict=True)):
                tap = weight[(slice(None), 0, *(o + reach for o in offset))]
                out[(..., *cell)] += tap * image[(..., *source)]
    return out


@settings(max_examples=12)
@given(
    grid=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    kernel=st.sampled_from([3, 5]),
    prefix=st.integers(0, 2),
)
def test_is_the_sum_over_the_neighbourhood(grid, kernel, prefix):
    image = torch.randn(2, 3, *grid)
    weight, bias = torch.randn(3, 1, *[kernel] * len(grid)), torch.randn(3)
    x = torch.cat([torch.randn(2, prefix, 3), image.flatten(2).transpose(1, 2)], dim=1)
    y = peg(x, weight, bias, grid, prefix=prefix)
    assert torch.equal(y[:, :prefix], x[:, :prefix])
    expected = by_hand(image.clone(), weight, bias).flatten(2).transpose(1, 2)
    torch.testing.assert_close(y[:, prefix:], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        peg(x, fold_identity(weight), bias, grid, prefix=prefix, identity=False), y, atol=1e-5, rtol=1e-5
    )


def test_zero_weights_are_the_identity():
    x = torch.randn(2, 13, 4)
    assert torch.equal(peg(x, torch.zeros(4, 1, 3, 3), torch.zeros(4), (3, 4), prefix=1), x)
    assert torch.equal(peg(x, torch.zeros(4, 1, 3, 3), None, (3, 4), prefix=1), x)


def test_stride_shrinks_the_grid_and_drops_the_identity():
    x = torch.randn(2, 25, 4)
    y = peg(x, torch.zeros(4, 1, 3, 3), torch.ones(4), (4, 6), stride=2, prefix=1)
    assert torch.equal(y, torch.cat([x[:, :1], torch.ones(2, 6, 4)], dim=1))


@pytest.mark.parametrize("mode", ["circular", "reflect"])
@pytest.mark.parametrize("sizes", [(8,), (5, 6), (4, 5, 6)])
def test_other_paddings_tell_no_absolute_position(mode, sizes):
    enc = mmpe.create_encoding("cpe", dim=4, heads=1, axes=len(sizes), padding_mode=mode)
    positions = mmpe.Positions.of_size(sizes)
    constant = torch.randn(1, 1, 4).expand(1, positions.num_tokens, 4)
    spread = enc.embed(constant, positions).detach().std(dim=1).max()
    assert spread < 1e-5
    zeros = mmpe.create_encoding("cpe", dim=4, heads=1, axes=len(sizes))
    assert zeros.embed(constant, positions).detach().std(dim=1).max() > 0.01  # the border shows
    if mode == "circular":
        x = torch.randn(1, *sizes, 4)
        dims = tuple(range(1, len(sizes) + 1))
        shifted = enc.embed(torch.roll(x, (1,) * len(sizes), dims).flatten(1, -2), positions).reshape(x.shape)
        expected = torch.roll(enc.embed(x.flatten(1, -2), positions).reshape(x.shape), (1,) * len(sizes), dims)
        torch.testing.assert_close(shifted, expected, atol=1e-5, rtol=0.0)


def test_acts_after_the_blocks_it_is_asked_for():
    enc = mmpe.create_encoding("cpe", dim=4, heads=1, depth=5, after_blocks=(0, 3))
    x, positions = torch.randn(1, 6, 4), mmpe.Positions.grid(2, 3)
    acting = [not torch.equal(enc.embed(x, positions, layer), x) for layer in range(5)]
    assert acting == [True, False, False, True, False]
    assert not torch.equal(enc.embed(x, positions, 0), enc.embed(x, positions, 3))  # each has weights of its own
    assert mmpe.create_encoding("cpe", dim=4, heads=1, depth=5).after_blocks == (1,)
    assert mmpe.create_encoding("cpe", dim=4, heads=1, depth=1).after_blocks == (0,)


def test_parameters_and_initialisation():
    enc = mmpe.create_encoding("cpe", dim=512, heads=8, depth=12)
    assert sum(p.numel() for p in enc.parameters()) == 512 * 10
    assert abs(float(enc.weight.detach().std()) - (2 / 9) ** 0.5) < 0.02
    assert not enc.bias.any()
    assert enc.no_weight_decay() == {"weight", "bias"}
    assert mmpe.create_encoding("cpe", dim=8, heads=1, bias=False).no_weight_decay() == {"weight"}


def test_separable_mixes_the_channels():
    enc = mmpe.create_encoding("cpe", dim=6, heads=1, separable=True)
    x, positions = torch.randn(1, 12, 6), mmpe.Positions.grid(3, 4)
    depthwise = peg(x, enc.weight[0], enc.bias[0], (3, 4)) - x
    torch.testing.assert_close(enc.embed(x, positions), x + depthwise @ enc.pointwise[0].T)
    assert enc.no_weight_decay() == {"weight", "bias", "pointwise"}


@pytest.mark.parametrize("sizes", [(9,), (3, 5), (2, 3, 4)])
def test_bf16_gradients_are_those_of_float32(sizes):
    """Fault: oneDNN's bf16 gradient of a 3D depthwise kernel reads memory that nobody wrote (channels last)."""
    torch.manual_seed(0)
    for _ in range(20):
        x, weight = torch.randn(3, 1 + math.prod(sizes), 96), torch.randn(96, 1, *[3] * len(sizes))
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            w = weight.to(dtype).detach().requires_grad_()
            peg(x.to(dtype), w, None, sizes, prefix=1).sum().backward()
            found.append(w.grad.float())
        torch.testing.assert_close(found[1], found[0], atol=0.3, rtol=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_size": 4}, "odd"),
        ({"kernel_size": 1}, "odd and at least 3"),
        ({"padding_mode": "replicate"}, "must be one of zeros, circular, reflect"),
        ({"after_blocks": (4,)}, "from 0 to 3"),
        ({"after_blocks": (-1,)}, "from 0 to 3"),
        ({"after_blocks": (1, 1)}, "different"),
        ({"after_blocks": ()}, "after_blocks"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        mmpe.create_encoding("cpe", dim=8, heads=1, depth=4, **options)


def test_tokens_that_fill_no_grid_are_refused():
    enc = mmpe.create_encoding("cpe", dim=8, heads=1)
    with pytest.raises(ValueError, match=r"x of shape \(B, 6, 8\), got \(1, 7, 8\)"):
        enc.embed(torch.zeros(1, 7, 8), mmpe.Positions.grid(2, 3))
    with pytest.raises(ValueError, match="loose points"):
        enc.embed(torch.zeros(1, 6, 8), mmpe.Positions.points(torch.zeros(6, 2)))
    with pytest.raises(ValueError, match="depth=1 blocks, asked for layer=1"):
        enc.embed(torch.zeros(1, 6, 8), mmpe.Positions.grid(2, 3), layer=1)
    tiny = mmpe.create_encoding("cpe", dim=8, heads=1, padding_mode="reflect")
    with pytest.raises(ValueError, match="needs a grid of at least 2"):
        tiny.embed(torch.zeros(1, 3, 8), mmpe.Positions.grid(1, 3))
