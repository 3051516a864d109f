"""Exponentials of generators and the encodings made of them, LieRE and ComRoPE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmpe
from mmpe import Positions, create_encoding
from mmpe.encodings.comrope import ComRoPE, patch_noise
from mmpe.encodings.lie import BlockRotationTerms, cayley, exponential, exponential_along, rotate_blocks, skew_symmetric
from mmpe.encodings.liere import LieRE
from mmpe.encodings.rotary import RotaryTerms

HEADS, WIDTH = 3, 16
DIM = HEADS * WIDTH
BOTH_FORMS = pytest.mark.parametrize("name", ["comrope_ap", "comrope_ld"])


def make(name: str, axes: int = 2, depth: int = 1, noise: float = 0.3, **options: Any) -> Any:
    """An encoding in evaluation mode, away from its start."""
    enc = create_encoding(name, DIM, HEADS, axes, depth, **options).eval()
    with torch.no_grad():
        for p in enc.parameters():
            p.add_(noise * torch.randn_like(p))
    return enc


def scores(enc: mmpe.PositionEncoding, positions: Positions, q: Tensor, k: Tensor, layer: int = 0) -> Tensor:
    q, k = enc(positions).layer(layer).queries_keys(q, k)
    return (q @ k.mT).detach()


def pair(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, 2, HEADS, count, WIDTH, dtype=dtype)
    return q, k


def random_skew(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    m = torch.randn(*shape, shape[-1], dtype=dtype)
    return m - m.mT


def same(ours: Tensor, theirs: Tensor, atol: float) -> None:
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0.0, check_dtype=False)


def norm_error(rotation: Tensor) -> float:
    return float((rotation.mT @ rotation - torch.eye(rotation.shape[-1])).abs().max())


# ---------------------------------------------------------------- exponentials


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_one_generator_has_the_exponentials_of_all_its_multiples(size: int) -> None:
    s, tau = random_skew(2, 3, size), torch.randn(2, 3, 7, dtype=torch.float64)
    expected = torch.linalg.matrix_exp(tau[..., None, None] * s[..., None, :, :])
    same(exponential_along(s, tau), expected, 1e-12)


def test_multiples_broadcast_over_samples_and_heads() -> None:
    s, tau = random_skew(2, 3, 4), torch.randn(5, 1, 3, 7, dtype=torch.float64)
    found = exponential_along(s, tau)  # (B, H, m, N, b, b)
    assert found.shape == (5, 2, 3, 7, 4, 4)
    same(found[4, 1, 2, 6], torch.linalg.matrix_exp(tau[4, 0, 2, 6] * s[1, 2]), 1e-12)


SPECTRA = {
    "distinct": random_skew(2, 4),
    "odd": random_skew(2, 5),
    "zero": torch.zeros(2, 4, 4, dtype=torch.float64),
    "equal": torch.block_diag(*[torch.tensor([[0.0, 2.0], [-2.0, 0.0]])] * 2).double().expand(2, 4, 4).contiguous(),
    "half zero": torch.block_diag(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), torch.zeros(2, 2)).double()[None],
}


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_derivative_holds_where_eigenvalues_meet(spectrum: str) -> None:
    """An eigendecomposition that autograd differentiates gives NaN here."""
    s = SPECTRA[spectrum].clone().requires_grad_()
    tau = torch.randn(3, len(s), 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m, t: exponential_along(m - m.mT, t), (s, tau))


def test_fast_and_plain_exponentials_agree() -> None:
    s, tau = random_skew(3, 8, dtype=torch.float32), torch.rand(3, 20)
    found = []
    for fused in (True, False):
        before = mmpe.ops.set_fused(fused)
        try:
            leaves = [s.clone().requires_grad_(), tau.clone().requires_grad_()]
            rotation = exponential_along(leaves[0] - leaves[0].mT, leaves[1])
            (rotation * torch.arange(64.0).reshape(8, 8).sin()).sum().backward()
            found.append([rotation.detach(), *(leaf.grad for leaf in leaves)])
        finally:
            mmpe.ops.set_fused(before)
    for fast, plain, atol in zip(*found, (1e-5, 1e-3, 1e-3), strict=True):
        same(fast, plain, atol)


def test_second_derivatives_are_refused() -> None:
    s = random_skew(1, 4).requires_grad_()
    (first,) = torch.autograd.grad(
        exponential_along(s, torch.ones(1, 1, dtype=torch.float64)).square().sum(), s, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_exponentials_stay_orthogonal(scale: float) -> None:
    s = random_skew(2, 5, 8, dtype=torch.float32)
    tau = scale * torch.rand(2, 5, 11)
    assert norm_error(exponential_along(s, tau)) < 5e-6
    assert norm_error(exponential(tau[..., None, None] * s[..., None, :, :])) < 5e-6


def test_exponentials_ignore_autocast() -> None:
    s, tau = random_skew(2, 8, dtype=torch.float32), torch.rand(2, 5)
    expected = exponential_along(s, tau), exponential(s), cayley(s)
    with torch.autocast("cpu", torch.bfloat16):
        found = exponential_along(s, tau), exponential(s), cayley(s)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


# ---------------------------------------------------------------- application


@pytest.mark.parametrize("batch", [None, 4], ids=["shared positions", "positions per sample"])
@pytest.mark.parametrize("heads", [1, HEADS], ids=["shared heads", "per head"])
def test_columns_equal_the_plain_product(batch: int | None, heads: int) -> None:
    shape = (heads, 4, 6, 4, 4) if batch is None else (batch, heads, 4, 6, 4, 4)
    rotation = torch.randn(shape)
    q, k = torch.randn(4, HEADS, 6, WIDTH), torch.randn(4, HEADS if heads > 1 else 1, 6, WIDTH)
    for ours, x in zip(rotate_blocks(rotation, q, k), (q, k), strict=True):
        blocks = x.unflatten(-1, (4, 4)).transpose(-3, -2).unsqueeze(-1)  # (B, H, m, N, b, 1)
        same(ours, (rotation @ blocks).squeeze(-1).transpose(-3, -2).flatten(-2), 1e-6)


def test_skew_symmetric_places_numbers_row_by_row() -> None:
    s = skew_symmetric(torch.tensor([1.0, 2.0, 3.0]), 3)
    assert s.tolist() == [[0, 1, 2], [-1, 0, 3], [-2, -3, 0]]


# ---------------------------------------------------------------- LieRE


def test_liere_positions_grow_with_the_grid() -> None:
    enc = create_encoding("liere", DIM, HEADS, grid_size=14)
    assert isinstance(enc, LieRE)
    for side in (14, 24, 1):
        rows = enc.coordinates(Positions.grid(side, side))[::side, 0]
        same(rows, torch.linspace(0, side / 14, side), 1e-6)
    same(enc.coordinates(Positions.points(torch.tensor([[13.0, 0.0]]))), torch.tensor([[1.0, 0.0]]), 1e-6)


def moved_by(enc: LieRE, delta: float) -> float:
    """Largest change of unscaled scores (standard deviation 8) when all positions move by delta."""
    count, width = 9, enc.head_dim
    coords = torch.rand(count, enc.axes) * 13
    q, k = torch.randn(2, 1, enc.heads, count, width) * 8**0.5 / width**0.25
    step = delta * 13  # the trained grid of 14 is 1 long
    where = [Positions.points(c, extent=(14.0,) * enc.axes) for c in (coords, coords + step)]
    before, after = (scores(enc, at, q, k) for at in where)
    return float((after - before).abs().max())


def test_liere_sees_places_unless_its_generators_commute() -> None:
    """The price of generators that do not commute, and that they are what costs it."""
    free = create_encoding("liere", 64, 1, block_size=8)
    assert isinstance(free, LieRE)
    assert moved_by(free, 0.25) > 1.0
    assert moved_by(create_encoding("liere", 64, 1, block_size=4), 0.25) > 1.0  # type: ignore[arg-type]
    with torch.no_grad():
        free.generators[1] = 0.4 * free.generators[0]
    assert moved_by(free, 0.25) < 2e-3


@pytest.mark.parametrize(("axes", "block_size"), [(1, 8), (1, None), (2, 2), (3, 2)])
def test_liere_is_relative_in_planes_and_in_one_axis(axes: int, block_size: int | None) -> None:
    enc = create_encoding("liere", 64, 1, axes, block_size=block_size)
    assert moved_by(enc, 0.25) < 2e-3  # type: ignore[arg-type]


@pytest.mark.parametrize("block_size", [2, 4, 8, 64])
def test_liere_equals_float64_and_is_orthogonal(block_size: int) -> None:
    enc = create_encoding("liere", 64, 1, block_size=block_size)
    assert isinstance(enc, LieRE)
    p = torch.rand(6, 2)
    found = enc.rotations(p).detach()  # (H, m, N, b, b)
    s = skew_symmetric(enc.generators[:, 0].double(), block_size).detach()
    expected = torch.linalg.matrix_exp(torch.einsum("na,ahmij->hmnij", p.double(), s).contiguous())
    assert norm_error(found) < 3e-6
    same(found, expected, 2e-4 if block_size == 64 else 2e-5)
    same(enc.rotations(torch.zeros(1, 2))[0, :, 0], torch.eye(block_size).expand(64 // block_size, -1, -1), 0.0)


def test_liere_planes_equal_blocks_of_two() -> None:
    enc, positions = make("liere", depth=2, block_size=2), Positions.grid(3, 4, prefix=1)
    q, k = pair(13)
    p = torch.nn.functional.pad(enc.coordinates(positions), (0, 0, 1, 0))
    for layer in range(2):
        expected = rotate_blocks(enc.rotations(p, layer), q, k)
        for ours, theirs in zip(enc(positions).layer(layer).queries_keys(q, k), expected, strict=True):
            same(ours, theirs, 2e-5)


@pytest.mark.parametrize("name", ["liere", "comrope_ap", "comrope_ld"])
def test_zero_generators_are_plain_attention(name: str) -> None:
    options = {"init_scale": 0.0} if name == "liere" else {"init_std": 0.0}
    enc, positions = make(name, noise=0.0, **options), Positions.grid(3, 4, prefix=1)
    q, k = pair(13)
    same(scores(enc, positions, q, k), q @ k.mT, 1e-4)
    enc(positions).queries_keys(q, k)[0].square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in enc.parameters() if p.grad is not None)


def test_liere_loads_whole_matrices_as_its_code_stores_them() -> None:
    enc = create_encoding("liere", DIM, HEADS, depth=2, block_size=4)
    raw = torch.rand(2, 2, HEADS * 4, 4, 4)
    enc.load_state_dict({"generators": raw})
    rows, columns = torch.triu_indices(4, 4, 1)
    assert torch.equal(enc.generators.flatten(2, 3), raw[..., rows, columns])  # type: ignore[operator]


def test_shared_layers_and_heads_have_one_set() -> None:
    for name in ("liere", "comrope_ap", "comrope_ld", "string_cayley", "string_circulant", "harope"):
        own, shared = (
            sum(p.numel() for p in create_encoding(name, DIM, HEADS, depth=4, **options).parameters())
            for options in ({}, {"share_layers": True, "share_heads": True})
        )
        # The multipliers of comrope_ld are those of all heads from the start.
        multipliers = 2 * (WIDTH // 8) if name == "comrope_ld" else 0
        assert own - 4 * multipliers == 4 * HEADS * (shared - multipliers)
        enc, positions = make(name, depth=2, share_layers=True), Positions.grid(2, 3)
        q, k = pair(6)
        assert torch.equal(scores(enc, positions, q, k, 0), scores(enc, positions, q, k, 1))


def test_terms_of_several_blocks_ask_for_one() -> None:
    q, k = pair(6)
    for name in ("liere", "comrope_ap", "string_cayley", "harope"):
        terms = make(name, depth=2)(Positions.grid(2, 3))
        with pytest.raises(ValueError, match=r"terms\.layer\(i\)"):
            terms.queries_keys(q, k)
        with pytest.raises(ValueError, match="asked for layer 2"):
            terms.layer(2)


# ---------------------------------------------------------------- ComRoPE


@BOTH_FORMS
@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_comrope_is_relative(name: str, block_size: int) -> None:
    enc = create_encoding(name, 64, 1, block_size=block_size).eval()
    q, k = torch.randn(2, 1, 1, 9, 64)
    coords = torch.rand(9, 2)
    where = [Positions.points(c, extent=(1.0, 1.0)) for c in (coords, coords + 3.3)]
    before, after = (scores(enc, at, q, k) for at in where)
    same(after, before, 2e-3)


@BOTH_FORMS
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_comrope_equals_exponentials_of_its_generators(name: str, axes: int) -> None:
    enc = make(name, axes, block_size=4)
    assert isinstance(enc, ComRoPE)
    positions = Positions.of_size((2, 3, 4)[:axes], prefix=1)
    p = enc.coordinates(positions)  # (N, A)
    same(p[0], torch.full((axes,), 0.5), 0.0)
    exponent = torch.einsum("na,am,hmij->hmnij", p, enc.rates(0), enc.generators()).detach().contiguous()
    q, k = pair(positions.num_tokens)
    expected = rotate_blocks(torch.linalg.matrix_exp(exponent), q, k)
    for ours, theirs in zip(enc(positions).queries_keys(q, k), expected, strict=True):
        same(ours, theirs, 2e-5)


def test_axes_take_turns_with_the_blocks() -> None:
    enc = create_encoding("comrope_ap", 2 * 20, 2, block_size=4)
    assert isinstance(enc, ComRoPE)
    assert enc.rates(0).tolist() == [[1, 0, 1, 0, 1], [0, 1, 0, 1, 0]]


def test_comrope_planes_are_an_axial_rotation() -> None:
    enc, positions = make("comrope_ap", block_size=2), Positions.grid(3, 4, prefix=1)
    terms = enc(positions)
    assert isinstance(terms, RotaryTerms)
    speed = -enc.generators()[..., 0, 1]  # (H, m)
    p = enc.coordinates(positions)
    theta = p[:, torch.arange(8) % 2] * speed[:, None]
    same(terms.table.cos, theta.cos(), 1e-5)
    same(terms.table.sin, theta.sin(), 1e-5)


def test_comrope_in_one_axis_is_liere_in_one_axis() -> None:
    comrope, liere = make("comrope_ld", axes=1), create_encoding("liere", DIM, HEADS, axes=1, grid_size=2)
    assert isinstance(liere, LieRE)
    generators = comrope.multiplier[0, 0, :, None, None] * comrope.generators()
    with torch.no_grad():
        liere.load_state_dict({"generators": generators[None, None].flatten(2, 3)})
    p = torch.rand(6, 1)
    same(exponential_along(comrope.generators(), comrope.tau(p)), liere.rotations(p), 2e-5)


@BOTH_FORMS
@pytest.mark.parametrize("axes", [2, 3])
def test_perturbation_happens_in_training_alone_and_stays_in_the_cell(name: str, axes: int) -> None:
    enc = create_encoding(name, DIM, HEADS, axes, block_size=4, perturbation=1.0)
    assert isinstance(enc, ComRoPE)
    positions = Positions.of_size((4, 5, 5)[-axes:], prefix=1)
    still = enc.eval().coordinates(positions)
    first, second = (enc.train().coordinates(positions) for _ in range(2))
    assert torch.equal(enc.eval().coordinates(positions), still)
    assert not torch.equal(first, second)
    assert (first - still).abs().max() <= 0.5 / 5 + 1e-6
    assert torch.equal(first[0], still[0])  # the prefix
    if axes == 3:
        assert torch.equal(first[:, 0], still[:, 0])  # frames
    same((first - still)[1:, 1].std(), torch.tensor(0.08), 0.03)


def test_offset_moves_all_tokens_alike() -> None:
    enc = create_encoding("comrope_ap", DIM, HEADS, block_size=4, offset=0.5)
    assert isinstance(enc, ComRoPE)
    positions = Positions.grid(3, 4, prefix=1)
    shift = enc.train().coordinates(positions) - enc.eval().coordinates(positions)
    same(shift, shift[:1].expand_as(shift), 1e-6)
    assert shift.abs().min() > 0


def test_noise_is_half_the_normal_and_clamped() -> None:
    normal = torch.tensor([[-3.0, 0.5, 0.2], [0.1, 9.0, -0.4]])
    same(patch_noise(normal[:, :2], 1.0), torch.tensor([[-0.5, 0.25], [0.05, 0.5]]), 1e-7)
    same(patch_noise(normal, 0.5), torch.tensor([[0.0, 0.125, 0.05], [0.0, 0.5, -0.1]]), 1e-7)


def test_comrope_coordinates_are_patch_centres_and_time_counts_heights() -> None:
    enc = make("comrope_ap", axes=3, block_size=4)
    p = enc.coordinates(Positions.video(6, 3, 4))
    same(p[0], torch.tensor([0.5 / 3, 0.5 / 3, 0.5 / 4]), 1e-6)
    same(p[-1], torch.tensor([5.5 / 3, 2.5 / 3, 3.5 / 4]), 1e-6)
    longest = make("comrope_ap", block_size=4, normalize_coords="max").coordinates(Positions.grid(2, 4))
    same(longest[-1], torch.tensor([1.5 / 4, 3.5 / 4]), 1e-6)
    with pytest.raises(ValueError, match="extent"):
        enc(Positions.points(torch.rand(3, 3)))


# ---------------------------------------------------------------- wrong options


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("liere", {"block_size": 3}, "divide head_dim=16"),
        ("liere", {"grid_size": (3, 4, 5)}, "one for each of the 2 axes"),
        ("liere", {"grid_size": 0}, "must be positive"),
        ("comrope_ap", {"block_size": 5}, "divide head_dim=16"),
        ("comrope_ap", {"block_size": 16}, "too few for 2 axes; use block_size=8"),
        ("comrope_ld", {"perturbation": -1.0}, "must not be negative"),
        ("comrope_ld", {"normalize_coords": "mean"}, "normalize_coords='mean'"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_encoding(name, DIM, HEADS, **options)


def test_q_and_k_may_be_views_of_any_strides() -> None:
    """They come as permuted views of qkv in every model."""
    q, k, _ = torch.randn(2, 12, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
    terms = make("comrope_ap")(Positions.grid(3, 4))
    assert isinstance(terms, BlockRotationTerms)
    for ours, theirs in zip(terms.queries_keys(q, k), terms.queries_keys(q.contiguous(), k.contiguous()), strict=True):
        same(ours, theirs, 1e-6)
