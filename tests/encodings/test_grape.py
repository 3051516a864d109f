"""GRAPE: the closed form of a rank-2 rotation, learned frequencies, and phases that content advances."""

import math

import pytest
import torch

import mmpe
from mmpe.encodings.grape import rank2_rotation


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_rank2_rotation_is_the_matrix_exponential(dtype: torch.dtype, atol: float):
    a, b = torch.randn(2, 12, dtype=dtype)
    t, x = torch.linspace(-1.5, 1.5, 7, dtype=dtype), torch.randn(7, 12, dtype=dtype)
    generator = torch.outer(a, b) - torch.outer(b, a)
    expected = torch.stack([torch.matrix_exp(n * generator) @ row for n, row in zip(t, x, strict=True)])
    y = rank2_rotation(x, a, b, t)
    torch.testing.assert_close(y, expected, atol=atol, rtol=0)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), atol=atol, rtol=0)


@pytest.mark.parametrize("tilt", [0.0, 1e-9, 1e-5, 1e-3])
def test_rank2_rotation_of_nearly_parallel_vectors(tilt: float):
    a = torch.randn(6, dtype=torch.float64)
    b = (a + tilt * torch.randn(6, dtype=torch.float64)).requires_grad_()
    x, t = torch.randn(6, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    y = rank2_rotation(x, a, b, t)
    generator = torch.outer(a, b.detach()) - torch.outer(b.detach(), a)
    torch.testing.assert_close(y.detach(), torch.matrix_exp(t * generator) @ x, atol=1e-9, rtol=0)
    y.sum().backward()
    assert torch.isfinite(b.grad).all()


def test_gradients_of_rank2_rotation():
    a, b, x = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    t = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rank2_rotation, (x, a, b, t))


@pytest.mark.parametrize("axes", [1, 2])
def test_it_starts_as_rope_in_the_mirror(axes: int):
    positions = mmpe.Positions.of_size((6, 4)[:axes])
    mirrored = mmpe.Positions.points(-positions.coords)
    q, k = torch.randn(2, 1, 2, positions.num_tokens, 16)
    grape = mmpe.create_encoding("grape", 32, 2, axes=axes)(positions).layer(0)
    name, options = ("rope", {}) if axes == 1 else ("rope_axial", {"grid_indexing": "ij"})
    rope = mmpe.create_encoding(name, 32, 2, axes=axes, half=True, **options)(mirrored)
    for ours, theirs in zip(grape.queries_keys(q, k), rope.queries_keys(q, k), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_the_scale_divides_the_step_of_the_frequency():
    steps = []
    for scale in (1.0, 16.0):
        enc = mmpe.create_encoding("grape", 16, 1, axes=1, log_freq_scale=scale)
        before = enc.frequencies()
        with torch.no_grad():
            enc.log_freq.add_(0.16)
        steps.append((enc.frequencies() / before).log().mean())
    torch.testing.assert_close(steps[0] / steps[1], torch.tensor(16.0), atol=1e-3, rtol=0)


def test_the_phase_is_the_sum_of_the_gates_before():
    enc = mmpe.create_encoding("grape_contextual", 16, 2, axes=1, per_head=True)
    line, x = mmpe.Positions.line(5, prefix=1), torch.randn(2, 6, 16)
    first = enc.phase(x, line)
    gate = 1 / (1 + math.exp(-math.log(math.expm1(1e-3)) / 16))
    expected = gate * torch.tensor([0.0, 0, 1, 2, 3, 4])
    torch.testing.assert_close(first, expected[None, :, None].expand(2, 6, 2), atol=1e-5, rtol=0)
    with torch.no_grad():
        enc.gate_weight.normal_()
    x[:, 3] += 1.0  # the third positioned token moves those after it alone
    moved = enc.phase(x, line)
    x[:, 3] -= 1.0
    changed = (enc.phase(x, line) - moved).abs().amax((0, 2)) > 1e-6
    assert changed.tolist() == [False, False, False, False, True, True]


def test_grape_refuses_what_it_cannot():
    with pytest.raises(ValueError, match="base must be greater"):
        mmpe.create_encoding("grape", 16, 2, axes=1, base=0.0)
    with pytest.raises(ValueError, match="log_freq_scale must be greater"):
        mmpe.create_encoding("grape", 16, 2, axes=1, log_freq_scale=0.0)
    with pytest.raises(ValueError, match="depends on content"):
        mmpe.create_encoding("grape_contextual", 16, 2, axes=1)(mmpe.Positions.line(3))
