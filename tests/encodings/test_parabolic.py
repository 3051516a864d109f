"""PaPE and PaPE-RI: the quadratic form, its invariances, half precision and checkpoints."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mmpe
from mmpe import Positions, create_encoding
from mmpe.encodings.parabolic import Parabolas, ParabolicEncoding, ParabolicTerms

BOTH = pytest.mark.parametrize("name", ["pape", "pape_ri"])


def parabolic(
    name: str, dim: int = 32, heads: int = 2, axes: int = 2, depth: int = 1, **options: Any
) -> ParabolicEncoding:
    enc = create_encoding(name, dim, heads, axes, depth, **options)
    assert isinstance(enc, ParabolicEncoding)
    return enc


def term(enc: ParabolicEncoding, positions: Positions, x: torch.Tensor, layer: int = 0) -> torch.Tensor:
    """The positional part of q.k (B, H, N, N), in the precision of x."""
    terms = enc(positions, x, layer)
    assert isinstance(terms, ParabolicTerms)
    return terms.q_channels @ terms.k_channels.transpose(-1, -2)


def tokens(positions: Positions, dim: int = 32, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, positions.num_tokens, dim)


def offsets(positions: Positions) -> torch.Tensor:
    """p_i - p_j (N, N, A) of the paper's coordinates: patches from 1, prefix at 0, (column, row) in 2 axes."""
    p = torch.cat([torch.zeros(positions.prefix, positions.num_axes), positions.coords + 1])
    p = p.flip(-1) if positions.num_axes == 2 else p
    return (p[:, None] - p[None]).double()


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_channels_hold_the_sum_over_all_parabolas(axes: int, prefix: int) -> None:
    positions = Positions.of_size((3, 4, 2)[:axes], prefix=prefix)
    enc = parabolic("pape", axes=axes, parabolas=7).double()
    x = tokens(positions).double()
    block = enc.layers[0]
    assert isinstance(block, Parabolas)
    a, b = block.ab(x).unflatten(-1, (2, 2, 7)).unbind(2)  # (B, N, H, M)
    z = torch.einsum("ija,hma->hmij", offsets(positions), block.position.weight.unflatten(0, (2, 7)))
    expected = torch.einsum("bihm,hmij->bhij", -F.softplus(a), z * z) + torch.einsum("bihm,hmij->bhij", b, z)
    torch.testing.assert_close(term(enc, positions, x), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_rotation_invariant_channels_hold_the_squared_distance(axes: int) -> None:
    positions = Positions.of_size((3, 4, 2)[:axes], prefix=1)
    enc = parabolic("pape_ri", axes=axes).double()
    x = tokens(positions).double()
    slope = F.softplus(enc.layers[0].a(x)).transpose(1, 2)[..., None]  # type: ignore[operator, union-attr]
    scales = enc.layers[0].position_scales
    expected = -slope * scales**2 * offsets(positions).square().sum(-1)  # type: ignore[operator]
    torch.testing.assert_close(term(enc, positions, x), expected, atol=1e-6, rtol=0)


@BOTH
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_only_differences_of_positions_matter(name: str, axes: int) -> None:
    here = Positions.of_size((5, 4, 3)[:axes])
    enc, x = parabolic(name, axes=axes), tokens(here)
    moved = here.with_coords(here.coords + torch.tensor([37.0, -11.0, 5.0][:axes]))
    torch.testing.assert_close(term(enc, moved, x), term(enc, here, x), atol=1e-3, rtol=0)


@pytest.mark.parametrize("axes", [2, 3])
def test_distances_alone_matter_to_the_rotation_invariant_form(axes: int) -> None:
    turn = torch.linalg.qr(torch.randn(axes, axes))[0]
    here = Positions.of_size((5, 4, 3)[:axes])
    turned = here.with_coords(here.coords @ turn)
    x = tokens(here)
    ours, other = parabolic("pape_ri", axes=axes), parabolic("pape", axes=axes)
    torch.testing.assert_close(term(ours, turned, x), term(ours, here, x), atol=1e-4, rtol=0)
    assert not torch.allclose(term(other, turned, x), term(other, here, x), atol=1e-2)


def test_windows_open_downwards() -> None:
    enc, positions = parabolic("pape", parabolas=9), Positions.grid(3, 4)
    a_matrix, beta = enc.layers[0](tokens(positions))
    torch.testing.assert_close(a_matrix, a_matrix.transpose(-1, -2))
    assert torch.linalg.eigvalsh(a_matrix).min() > -1e-6
    assert beta.shape == (2, 2, 12, 2)


def test_without_linear_part_every_token_looks_at_itself() -> None:
    enc, positions = parabolic("pape", parabolas=9), Positions.grid(5, 5)
    block = enc.layers[0]
    assert isinstance(block, Parabolas)
    with torch.no_grad():
        block.ab.weight.chunk(2)[1].zero_()
    logits = term(enc, positions, tokens(positions)).reshape(2, 2, 25, 5, 5)
    assert torch.equal(logits.flatten(-2).argmax(-1), torch.arange(25).expand(2, 2, 25))
    centre = logits[:, :, 12]
    torch.testing.assert_close(centre, centre.flip(-1, -2), atol=1e-4, rtol=0)
    assert (centre[..., 2, :].diff(n=2) < 0).all()


def test_zero_coefficients_leave_the_slope_of_softplus() -> None:
    enc, positions = parabolic("pape", parabolas=9), Positions.grid(3, 4)
    block = enc.layers[0]
    assert isinstance(block, Parabolas)
    with torch.no_grad():
        block.ab.weight.zero_()
    w = block.position.weight.unflatten(0, (2, 9))
    expected = torch.log(torch.tensor(2.0)) * w.transpose(1, 2) @ w  # (H, A, A)
    a_matrix, beta = block(tokens(positions))
    torch.testing.assert_close(a_matrix, expected[None, :, None].expand_as(a_matrix))
    assert beta.eq(0).all()


@BOTH
def test_zero_positions_are_no_encoding(name: str) -> None:
    enc, positions = parabolic(name), Positions.grid(3, 4, prefix=1)
    with torch.no_grad():
        weight = enc.layers[0].position.weight if name == "pape" else enc.layers[0].position_scales
        weight.zero_()  # type: ignore[operator, union-attr]
    q, k, v = torch.randn(3, 2, 2, 13, 16)
    with_terms = mmpe.attend(q, k, v, enc(positions, tokens(positions)))
    torch.testing.assert_close(with_terms, mmpe.attend(q, k, v), atol=1e-6, rtol=0)


@BOTH
def test_prefix_may_be_exempt(name: str) -> None:
    positions = Positions.grid(3, 4, prefix=2)
    x = tokens(positions)
    torch.manual_seed(0)
    default = parabolic(name)
    torch.manual_seed(0)
    exempt = parabolic(name, exempt_prefix=True)
    free, bound = term(exempt, positions, x), term(default, positions, x)
    assert free[..., :2, :].eq(0).all()
    assert free[..., :, :2].eq(0).all()
    torch.testing.assert_close(free[..., 2:, 2:], bound[..., 2:, 2:])
    assert bound[..., :2, 2:].ne(0).all()


@BOTH
@pytest.mark.parametrize("side", [14, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision_keeps_the_attention(name: str, side: int, dtype: torch.dtype) -> None:
    """The card measures 47 % error in bf16 at 64 x 64, and infinity in fp16, for plain uncentred channels."""
    positions = Positions.grid(side, side)
    enc = parabolic(name, dim=64, heads=1)
    x = tokens(positions, 64, batch=1)
    q, k = torch.randn(2, 1, 1, side * side, 64)
    rows = torch.arange(0, side * side, 41)

    def attention(as_dtype: torch.dtype, precise: torch.dtype) -> torch.Tensor:
        wide_q, wide_k = enc(positions, x).queries_keys(q.to(as_dtype), k.to(as_dtype))
        logits = wide_q[:, :, rows].to(precise) @ wide_k.to(precise).transpose(-1, -2)
        return (logits / 8.0).softmax(-1)

    exact = attention(torch.float64, torch.float64)
    found = attention(dtype, torch.float32)
    assert (found - exact).abs().sum(-1).mean() / 2 < 0.01
    if side == 64 and dtype == torch.bfloat16 and name == "pape":
        enc.split = False
        assert (attention(dtype, torch.float32) - exact).abs().sum(-1).mean() / 2 > 0.05


@BOTH
@pytest.mark.parametrize("split", [False, True])
def test_width_is_a_multiple_of_eight(name: str, split: bool) -> None:
    enc, positions = parabolic(name, dim=128, split=split), Positions.grid(3, 4)
    q, k = torch.randn(2, 2, 2, 12, 64)
    wide_q, wide_k = enc(positions, tokens(positions, 128)).queries_keys(q, k)
    expected = {("pape", False): 72, ("pape", True): 88, ("pape_ri", False): 72, ("pape_ri", True): 80}
    assert wide_q.shape[-1] == wide_k.shape[-1] == expected[name, split]
    assert torch.equal(wide_q[..., :64], q)


@BOTH
def test_split_channels_give_the_same_gradients(name: str) -> None:
    positions = Positions.grid(3, 4, prefix=1)
    enc, x = parabolic(name).double(), tokens(positions).double()
    q, k, v = torch.randn(3, 2, 2, 13, 16, dtype=torch.float64)
    found = []
    for split in (False, True):
        enc.split = split
        enc.zero_grad()
        mmpe.attend(q, k, v, enc(positions, x)).square().sum().backward()
        found.append([p.grad.clone() for p in enc.parameters() if p.grad is not None])
    assert len(found[0]) == len(list(enc.parameters()))
    torch.testing.assert_close(found[1], found[0])


@BOTH
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    positions = Positions.grid(2, 3, prefix=1)
    enc = parabolic(name, dim=8, heads=2, **({"parabolas": 3} if name == "pape" else {})).double()
    x = tokens(positions, 8, batch=1).double().requires_grad_()
    q, k, v = torch.randn(3, 1, 2, 7, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, *_: mmpe.attend(q, k, v, enc(positions, x)), (x, *enc.parameters()))


@BOTH
def test_grouped_keys_and_masks(name: str) -> None:
    positions = Positions.grid(3, 4, prefix=1)
    enc, x = parabolic(name, dim=64, heads=4), tokens(positions, 64)
    q, k, v = torch.randn(2, 4, 13, 16), torch.randn(2, 2, 13, 16), torch.randn(2, 2, 13, 16)
    terms = enc(positions, x)
    mask = torch.ones(2, 1, 1, 13, dtype=torch.bool)
    mask[1, ..., 9:] = False
    grouped = mmpe.attend(q, k, v, terms, mask)
    repeated = mmpe.attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), terms, mask)
    torch.testing.assert_close(grouped, repeated)
    changed = v.clone()
    changed[1, :, 9:] = 100.0
    torch.testing.assert_close(mmpe.attend(q, k, changed, terms, mask), grouped)


@BOTH
def test_tokens_may_come_in_any_order(name: str) -> None:
    positions, order = Positions.grid(3, 4), torch.randperm(12)
    enc, x = parabolic(name), tokens(positions)
    shuffled = Positions.points(positions.coords[order])
    expected = term(enc, positions, x)[:, :, order][..., order]
    torch.testing.assert_close(term(enc, shuffled, x[:, order]), expected, atol=1e-4, rtol=0)


@BOTH
def test_positions_of_each_sample(name: str) -> None:
    coords = torch.rand(2, 9, 3) * 20
    both = Positions.points(coords, prefix=1)
    enc, x = parabolic(name, axes=3).double(), tokens(both).double()
    found = term(enc, both, x)
    for i in range(2):
        alone = term(enc, Positions.points(coords[i], prefix=1), x[i : i + 1])
        torch.testing.assert_close(found[i : i + 1], alone)


def test_checkpoint_has_the_names_of_the_official_layers() -> None:
    enc = parabolic("pape", dim=768, heads=12, depth=2)
    shapes = {name: tuple(t.shape) for name, t in enc.state_dict().items()}
    assert shapes["layers.1.position.weight"] == (600, 2)
    assert shapes["layers.1.ab.weight"] == (1200, 768)
    assert sum(p.numel() for p in enc.layers[0].parameters()) == 922_800
    assert enc.no_weight_decay() == set(dict(enc.named_parameters()))


def test_random_scales_travel_with_the_checkpoint() -> None:
    """Fault: ports of PaPE-RI drew the scales anew at every start."""
    source, target = parabolic("pape_ri", depth=2), parabolic("pape_ri", depth=2)
    assert "layers.1.position_scales" in source.state_dict()
    assert sum(p.numel() for p in source.parameters()) == 2 * 2 * 32
    target.load_state_dict(source.state_dict())
    positions = Positions.grid(3, 4)
    x = tokens(positions)
    assert torch.equal(term(target, positions, x, 1), term(source, positions, x, 1))


def test_weights_that_are_loaded_in_evaluation_are_used() -> None:
    """Fault: the official fast path cached a product of weights when it entered evaluation."""
    positions = Positions.grid(3, 4)
    source, target, x = parabolic("pape"), parabolic("pape").eval(), tokens(positions)
    term(target, positions, x)
    target.load_state_dict(source.state_dict())
    assert torch.equal(term(target, positions, x), term(source.eval(), positions, x))


def test_initial_strength_and_units() -> None:
    torch.manual_seed(5)
    plain = parabolic("pape", parabolas=20)
    torch.manual_seed(5)
    wide = parabolic("pape", parabolas=20, init_scale=0.5)
    torch.testing.assert_close(wide.layers[0].position.weight, plain.layers[0].position.weight / 2)  # type: ignore[union-attr, operator]
    torch.manual_seed(5)
    normal = parabolic("pape", parabolas=20, normalize=True)
    positions = Positions.grid(4, 4)
    smaller = positions.with_coords(positions.coords / 4)
    x = tokens(positions)
    torch.testing.assert_close(term(normal, positions, x), term(plain, smaller, x), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="extent="):
        normal(Positions.points(positions.coords), x)


@BOTH
def test_wrong_use_is_refused(name: str) -> None:
    enc, positions = parabolic(name, depth=2), Positions.grid(3, 4, prefix=1)
    x = tokens(positions)
    with pytest.raises(ValueError, match=r"call encoding\(positions, x, layer=i\)"):
        enc(positions)
    with pytest.raises(ValueError, match="depth=2 blocks, asked for layer=2"):
        enc(positions, x, 2)
    with pytest.raises(ValueError, match=r"x of shape \(B, 13, 32\)"):
        enc(positions, x[:, 1:])
    with pytest.raises(ValueError, match="init_scale"):
        parabolic(name, init_scale=0.0)


def test_a_head_needs_a_parabola() -> None:
    with pytest.raises(ValueError, match="parabolas must be at least 1"):
        parabolic("pape", parabolas=0)


def test_casting_the_model_keeps_the_fixed_scales_exact() -> None:
    """Reports 8 and 10's kind: a persistent buffer that sets the bias must not be rounded by .to(bfloat16)."""
    enc = mmpe.create_encoding("pape_ri", dim=32, heads=2, axes=2)
    before = {name: buffer.clone() for name, buffer in enc.named_buffers()}
    enc.to(torch.bfloat16)
    assert before
    assert all(torch.equal(before[name], buffer) for name, buffer in enc.named_buffers())
