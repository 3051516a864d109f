"""Tables of relative position: lookups written out, resizing beside timm, checkpoints of other grids."""

import pytest
import torch

import mmpe
from mmpe.encodings.swin import entry_offsets, resize_table


def table_encoding(name="swin", heads=2, depth=1, **options):
    torch.manual_seed(0)
    enc = mmpe.create_encoding(name, 8 * heads, heads, axes=options.pop("axes", 2), depth=depth, **options)
    enc.table.data.normal_()
    return enc


def bias_of(enc, positions, layer=0):
    q = torch.zeros(1, enc.heads, positions.num_tokens, 8)
    return enc(positions).layer(layer).bias(q, q)


def test_every_pair_reads_the_entry_of_its_offset():
    enc, positions = table_encoding(grid_size=(3, 4), depth=2), mmpe.Positions.grid(3, 4)
    found = bias_of(enc, positions, layer=1)[0]
    for i, j in ((0, 11), (7, 2), (5, 5)):
        dr, dc = i // 4 - j // 4, i % 4 - j % 4
        assert torch.equal(found[:, i, j], enc.table[1, (dr + 2) * 7 + dc + 3])


def test_class_token_reads_the_last_three_entries():
    enc, positions = table_encoding("beit", grid_size=2), mmpe.Positions.grid(2, 2, prefix=2)
    found, (to_patch, from_patch, between) = bias_of(enc, positions)[0], enc.table[0, -3:]
    assert (found[:, 0, 2:] == to_patch[:, None]).all()
    assert (found[:, 3, :2] == from_patch[:, None]).all()
    assert (found[:, :2, :2] == between[:, None, None]).all()


@pytest.mark.parametrize(
    ("old", "new"), [((4, 4), (7, 9)), ((7, 7), (14, 14)), ((14, 14), (24, 20)), ((2, 3), (5, 5)), ((7, 7), (5, 6))]
)
@pytest.mark.parametrize("class_rows", [0, 3])
@pytest.mark.filterwarnings("ignore::UserWarning:timm")  # its interpolator warns on today's torch
def test_geometric_resize_is_timms(old, new, class_rows):
    timm_layers = pytest.importorskip("timm.layers.pos_embed_rel")
    torch.manual_seed(0)
    table = torch.randn((2 * old[0] - 1) * (2 * old[1] - 1) + class_rows, 3)
    rows = (2 * new[0] - 1) * (2 * new[1] - 1) + class_rows
    theirs = timm_layers.resize_rel_pos_bias_table(table, new, (rows, 3), old_window_size=old)
    torch.testing.assert_close(resize_table(table, new, old, class_rows), theirs, atol=2e-5, rtol=0)


def test_entries_move_outward_geometrically():
    where = entry_offsets(7, 14)
    assert torch.equal(where, -where.flip(0))
    assert where[7] == 1
    assert float(where[-1]) == pytest.approx(13, abs=1e-3)
    steps = where[6:].diff()
    torch.testing.assert_close(steps[1:] / steps[:-1], torch.full((5,), float(steps[1])), atol=1e-4, rtol=0)
    assert torch.equal(entry_offsets(7, 7), torch.arange(-6.0, 7))


@pytest.mark.parametrize("resize", ["geometric", "simple"])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_constant_tables_stay_constant(resize, axes):
    enc = table_encoding(grid_size=3, axes=axes, resize=resize)
    enc.table.data.fill_(0.7)
    found = bias_of(enc, mmpe.Positions.of_size((5, 4, 2)[:axes]))
    torch.testing.assert_close(found, torch.full_like(found, 0.7))


def test_checkpoints_of_another_grid_are_resized():
    for name, class_rows in (("swin", 0), ("beit", 3)):
        small, large = table_encoding(name, depth=2, grid_size=(3, 5)), table_encoding(name, depth=2, grid_size=(5, 3))
        large.load_state_dict(small.state_dict())
        for layer in range(2):
            expected = resize_table(small.table[layer], (5, 3), (3, 5), class_rows)
            torch.testing.assert_close(large.table[layer], expected)
        assert large.table_grid.tolist() == [5, 3]


def test_one_official_table_serves_every_block():
    enc = table_encoding("beit", depth=3, grid_size=(2, 3))
    theirs = torch.randn(3 * 5 + 3, 2)
    enc.load_state_dict({"table": theirs})
    assert all(torch.equal(own, theirs) for own in enc.table)
    square = torch.randn(7 * 7 + 3, 2)
    enc.load_state_dict({"table": square})
    torch.testing.assert_close(enc.table[2], resize_table(square, (2, 3), (4, 4), 3))


def test_points_between_cells_read_between_entries():
    enc = table_encoding(grid_size=3, axes=1)
    points = mmpe.Positions.points(torch.tensor([[0.0], [0.25]]), extent=(3,))
    table = enc.table[0]
    torch.testing.assert_close(bias_of(enc, points)[0, :, 1, 0], 0.75 * table[2] + 0.25 * table[3])


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"grid_size=\(3, 0\) must be one positive size"):
        table_encoding(grid_size=(3, 0))
    with pytest.raises(ValueError, match="resize='cubic' must be one of 'geometric', 'simple'"):
        table_encoding(resize="cubic")
    with pytest.raises(ValueError, match="std must be greater than 0"):
        table_encoding(std=0)
    with pytest.raises(ValueError, match="has a table of 9 rows and 3 for prefix tokens, got 9"):
        resize_table(torch.zeros(9, 1), (3, 3), (2, 2), class_rows=3)
    enc = table_encoding(grid_size=3)
    with pytest.raises(RuntimeError, match="size mismatch for table"):
        enc.load_state_dict({"table": torch.zeros(1, 25, 5)})
