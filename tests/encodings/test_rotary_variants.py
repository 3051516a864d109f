"""p_rope, partial_rope, rove, drope and wire."""

import math

import pytest
import torch

import mmpe
from mmpe.encodings.rotary_variants import grid_coordinates, laplacian_coordinates


def rotated(name: str, positions: mmpe.Positions, width: int = 16, heads: int = 2, **options: object) -> torch.Tensor:
    torch.manual_seed(1)
    q = torch.randn(1, heads, positions.num_tokens, width)
    enc = mmpe.create_encoding(name, heads * width, heads, axes=positions.num_axes, **options)
    return enc(positions).layer(0).queries_keys(q, q)[0]


def same(ours: torch.Tensor, theirs: torch.Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


# ---------------------------------------------------------------- p_rope, partial_rope


def test_p_rope_of_everything_is_rope_and_of_nothing_is_none():
    line = mmpe.Positions.line(9)
    assert torch.equal(rotated("p_rope", line, p=1.0), rotated("rope", line))
    assert torch.equal(rotated("p_rope", line, p=0.0), rotated("none", line))
    grid = mmpe.Positions.grid(3, 4)
    assert torch.equal(rotated("p_rope", grid, p=1.0), rotated("rope_axial", grid, grid_indexing="ij"))


@pytest.mark.parametrize("half", [False, True])
def test_p_rope_leaves_the_slow_planes_bit_for_bit(half: bool):
    line = mmpe.Positions.line(9)
    plain, turned = rotated("none", line), rotated("p_rope", line, p=0.5, half=half)
    still = [c for c in range(16) if torch.equal(plain[..., c], turned[..., c])]
    assert still == ([4, 5, 6, 7, 12, 13, 14, 15] if half else list(range(8, 16)))


def test_partial_rope_has_a_whole_spectrum_in_fewer_channels():
    line = mmpe.Positions.line(9)
    plain, turned = rotated("none", line), rotated("partial_rope", line)
    assert torch.equal(turned[..., 8:], plain[..., 8:])
    assert torch.equal(turned, rotated("rope", line, rotary_dim=8))
    assert not torch.equal(turned, rotated("p_rope", line, p=0.5))


# ---------------------------------------------------------------- rove


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_rove_turns_every_value_by_its_offset(dtype: torch.dtype, atol: float):
    coords = 5 * torch.rand(6, 2)
    enc = mmpe.create_encoding("rove", 32, 2, axes=2)
    q, k, v = torch.randn(3, 1, 2, 6, 16, dtype=dtype)
    o = mmpe.attend(q, k, v, enc(mmpe.Positions.points(coords)))
    turned_q, turned_k = enc(mmpe.Positions.points(coords)).queries_keys(q, k)
    weights = (turned_q @ turned_k.mT / 4).softmax(-1)  # (1, 2, 6, 6)
    expected = torch.zeros_like(o)
    for i in range(6):
        to_i = enc(mmpe.Positions.points(coords - coords[i])).values(v)  # R(p_j - p_i) v_j
        expected[:, :, i] = (weights[:, :, i, :, None] * to_i).sum(-2)
    same(o, expected, atol)


def test_rove_gives_back_a_value_that_meets_itself():
    positions = mmpe.Positions.grid(3, 3, prefix=1)
    terms, v = mmpe.create_encoding("rove", 32, 2, axes=2)(positions), torch.randn(2, 2, 10, 16)
    same(terms.outputs(terms.values(v)), v, atol=1e-5)
    assert torch.equal(terms.values(v)[:, :, 0], v[:, :, 0])


# ---------------------------------------------------------------- drope


@pytest.mark.parametrize("harmonics", [1, 3])
def test_a_full_turn_is_no_turn(harmonics: int):
    heading = 6 * torch.rand(7, 1)
    here, around = (mmpe.Positions.points(heading + turns) for turns in (0.0, 2 * math.pi))
    same(rotated("drope", here, harmonics=harmonics), rotated("drope", around, harmonics=harmonics), atol=2e-5)
    columns = mmpe.Positions.points(torch.arange(24.0)[:, None])  # a panorama twice around
    turned = rotated("drope", columns, period=12.0, harmonics=harmonics)
    plain = rotated("none", columns)
    assert (turned - plain)[..., 1:12, :].abs().amax() > 0.1
    same(turned[:, :, 12], plain[:, :, 12], atol=1e-5)


def test_more_harmonics_tell_nearby_headings_apart():
    coords = torch.tensor([[0.0], [0.2]])
    products = []
    for harmonics in (1, 4):
        enc = mmpe.create_encoding("drope", 16, 1, axes=1, harmonics=harmonics)
        q = torch.ones(1, 1, 2, 16)
        turned, _ = enc(mmpe.Positions.points(coords)).queries_keys(q, q)
        products.append(float((turned[0, 0, 0] * turned[0, 0, 1]).sum()))
    assert products[1] < products[0] - 0.5


@pytest.mark.parametrize("share", ["channels", "heads"])
def test_place_and_heading_together(share: str):
    """The heading of a token is circular, its place is not."""
    points = torch.cat([4 * torch.rand(5, 2), 6 * torch.rand(5, 1)], dim=1)
    moves = {"turned": (0.0, 0.0, 2 * math.pi), "moved": (2 * math.pi, 0.0, 0.0)}
    options = {"circular": (False, False, True), "share": share}
    start = rotated("drope", mmpe.Positions.points(points), **options)
    found = {
        name: rotated("drope", mmpe.Positions.points(points + torch.tensor(move)), **options)
        for name, move in moves.items()
    }
    same(found["turned"], start, atol=2e-5)
    assert (found["moved"] - start).abs().max() > 0.1
    if share == "heads":  # the second of the two heads sees headings alone
        same(found["moved"][:, 1], start[:, 1], atol=1e-6)


def test_drope_refuses_what_it_cannot():
    with pytest.raises(ValueError, match="needs two heads, a circular axis and another"):
        mmpe.create_encoding("drope", 16, 2, axes=2, share="heads")
    with pytest.raises(ValueError, match="one for each of the 2 axes"):
        mmpe.create_encoding("drope", 16, 2, axes=2, period=(1.0, 2.0, 3.0))
    with pytest.raises(ValueError, match="must be positive"):
        mmpe.create_encoding("drope", 16, 2, axes=1, harmonics=0)


# ---------------------------------------------------------------- wire


def grid_adjacency(sizes: tuple[int, ...]) -> torch.Tensor:
    coords = mmpe.Positions.of_size(sizes).coords
    return (torch.cdist(coords, coords, p=1) == 1).float()


@pytest.mark.parametrize("sizes", [(8,), (3, 7), (2, 3, 7)])  # sizes without equal eigenvalues
def test_the_closed_form_spectrum_of_a_grid(sizes: tuple[int, ...]):
    positions, modes = mmpe.Positions.of_size(sizes), 7
    count = len(positions.coords)
    ours = grid_coordinates(positions, modes) / count**0.5
    theirs = laplacian_coordinates(grid_adjacency(sizes), modes)
    same(ours.T @ ours, torch.eye(modes), atol=1e-5)
    same((ours.T @ theirs).abs(), torch.eye(modes), atol=1e-4)  # signs are arbitrary


def test_on_square_grids_the_spectra_span_the_same_space():
    positions = mmpe.Positions.grid(4, 4)
    ours = grid_coordinates(positions, 2) / 4
    theirs = laplacian_coordinates(grid_adjacency((4, 4)), 2)
    same(ours @ ours.T, theirs @ theirs.T, atol=1e-5)


def test_small_graphs_have_fewer_modes():
    coords = grid_coordinates(mmpe.Positions.grid(1, 3), 4)
    assert torch.equal(coords[:, 2:], torch.zeros(3, 2))
    assert torch.equal(laplacian_coordinates(grid_adjacency((3,)), 4)[:, 2:], torch.zeros(3, 2))


def test_wire_takes_graphs_with_any_number_of_eigenvectors():
    adjacency = torch.rand(10, 10)
    adjacency = adjacency + adjacency.T
    coords = laplacian_coordinates(adjacency, 6)
    axes = [f"u{i}" for i in range(6)]
    enc = mmpe.create_encoding("wire", 32, 2, axes=6, depth=2, coordinates="graph")
    assert enc.omega.shape == (2, 2, 8, 6)
    q, order = torch.randn(1, 2, 10, 16), torch.randperm(10)
    turned = enc(mmpe.Positions.points(coords, axes=axes)).layer(1).queries_keys(q, q)[0]
    permuted = enc(mmpe.Positions.points(coords[order], axes=axes)).layer(1).queries_keys(q[:, :, order], q)[0]
    same(permuted, turned[:, :, order])
    for f in range(8):  # omega of one plane against a plain rotation
        angle = coords @ enc.omega[1, 0, f]
        a, b = q[0, 0, :, 2 * f], q[0, 0, :, 2 * f + 1]
        same(turned[0, 0, :, 2 * f], a * angle.cos() - b * angle.sin(), atol=1e-5)


def test_constant_coordinates_turn_nothing_apart():
    enc = mmpe.create_encoding("wire", 32, 2, axes=3, coordinates="graph")
    q, k = torch.randn(2, 1, 2, 5, 16)
    turned = enc(mmpe.Positions.points(torch.ones(5, 3), axes=("a", "b", "c"))).layer(0).queries_keys(q, k)
    same(turned[0] @ turned[1].mT, q @ k.mT, atol=1e-5)


def test_wire_refuses_what_it_cannot():
    with pytest.raises(ValueError, match="supports axes"):
        mmpe.create_encoding("wire", 32, 2, axes=5)
    with pytest.raises(ValueError, match="pass extent="):
        mmpe.create_encoding("wire", 32, 2, axes=2)(mmpe.Positions.points(torch.rand(4, 2)))
    with pytest.raises(ValueError, match="symmetric"):
        laplacian_coordinates(torch.triu(torch.ones(3, 3)), 2)
    with pytest.raises(ValueError, match="must be .*N, N"):
        laplacian_coordinates(torch.ones(3, 2), 2)
