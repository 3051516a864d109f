"""Decomposed relative position beside sums written out."""

import pytest
import torch

import mmpe


def decomposed(axes=2, heads=2, **options):
    torch.manual_seed(0)
    enc = mmpe.create_encoding("mvit_decomposed", 8 * heads, heads, axes=axes, **options)
    for p in enc.parameters():
        p.data.normal_()
    return enc


def test_one_vector_for_each_axis():
    enc, positions = decomposed(3, grid_size=(2, 3, 4)), mmpe.Positions.video(2, 3, 4, prefix=1)
    q = torch.randn(2, 2, 25, 8)
    found = enc(positions).bias(q, q)
    cells = positions.coords.long()
    for i, j in ((0, 23), (17, 3), (9, 9)):
        dt, dh, dw = (cells[i] - cells[j]).tolist()
        vector = enc.rel_pos_t[0, dt + 1] + enc.rel_pos_h[0, dh + 2] + enc.rel_pos_w[0, dw + 3]
        torch.testing.assert_close(found[..., 1 + i, 1 + j], q[:, :, 1 + i] @ vector)
    assert not found[..., 0].any()
    assert not found[..., 0, :].any()


@pytest.mark.parametrize(("queries", "keys"), [((6, 4), (3, 2)), ((2, 3), (4, 6)), ((4, 4), (2, 8))])
def test_pooled_grids_meet_in_cells_of_the_finer_one(queries, keys):
    enc = decomposed(grid_size=[max(pair) for pair in zip(queries, keys, strict=True)])
    q, k = torch.randn(1, 2, queries[0] * queries[1], 8), torch.randn(1, 2, keys[0] * keys[1], 8)
    found = enc.between(mmpe.Positions.grid(*queries), mmpe.Positions.grid(*keys)).bias(q, k)
    assert found.shape == (1, 2, q.shape[2], k.shape[2])
    for i, j in ((0, 0), (q.shape[2] - 1, 1), (1, k.shape[2] - 1)):
        vector = 0
        for table, n, m, a, b in (
            (enc.rel_pos_h, queries[0], keys[0], i // queries[1], j // keys[1]),
            (enc.rel_pos_w, queries[1], keys[1], i % queries[1], j % keys[1]),
        ):
            up, down = max(m / n, 1), max(n / m, 1)
            vector = vector + table[0, int(a * up - b * down + (m - 1) * down)]
        torch.testing.assert_close(found[..., i, j], q[:, :, i] @ vector)


def test_vectors_are_stretched_to_larger_grids():
    """The ends stay the ends, and halfway between two vectors lies their mean."""
    enc, q = decomposed(1, grid_size=3), torch.randn(1, 2, 8, 8)
    found = enc(mmpe.Positions.line(8)).bias(q, q)
    rows = torch.nn.functional.interpolate(enc.rel_pos_n[0].T[None], size=15, mode="linear")[0].T
    for i, j in ((0, 7), (7, 0), (4, 2)):
        torch.testing.assert_close(found[..., i, j], q[:, :, i] @ rows[i - j + 7])


def test_loose_points_read_between_vectors():
    enc, q = decomposed(1, grid_size=3), torch.randn(1, 2, 2, 8)
    found = enc(mmpe.Positions.points(torch.tensor([[0.0], [0.25]]))).bias(q, q)
    expected = 0.75 * enc.rel_pos_n[0, 2] + 0.25 * enc.rel_pos_n[0, 3]
    torch.testing.assert_close(found[..., 1, 0], q[:, :, 1] @ expected)


def test_zero_vectors_are_no_encoding():
    enc = mmpe.create_encoding("mvit_decomposed", 16, 2, std=0.0)
    q = torch.randn(1, 2, 9, 8)
    torch.testing.assert_close(mmpe.attend(q, q, q, enc(mmpe.Positions.grid(3, 3))), mmpe.attend(q, q, q))


def test_mistakes_are_named():
    grid = mmpe.Positions.grid(2, 2)
    with pytest.raises(ValueError, match="both be cells of a lattice, or both be loose points"):
        decomposed().between(grid, mmpe.Positions.points(grid.coords))
    with pytest.raises(ValueError, match="std must not be negative"):
        decomposed(std=-1.0)
