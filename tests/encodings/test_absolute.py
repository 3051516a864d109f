"""Learned tables and their resizing; sines and cosines and their layouts."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmpe
from mmpe.encodings.absolute import resample_table, sample_table, sincos_table

small = st.integers(1, 9)


def learned(dim=12, axes=2, **options):
    torch.manual_seed(0)
    return mmpe.create_encoding("ape_learned", dim=dim, heads=1, axes=axes, **options)


def added(enc, positions):
    """What an encoding adds to the tokens."""
    return enc.embed(torch.zeros(1, positions.num_tokens, enc.dim), positions)[0].detach()


def same(ours, theirs, atol=1e-6):
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0.0)


# ---------------------------------------------------------------- resampling


@settings(max_examples=40)
@given(
    old=st.tuples(small, small), new=st.tuples(small, small), prefix=st.integers(0, 3), antialias=st.booleans(),
    interpolation=st.sampled_from(["bicubic", "bilinear"]),
)  # fmt: skip
def test_resampling_is_timms(old, new, prefix, antialias, interpolation):
    """Fault: the old grid taken for a square, equal counts taken for equal grids (timm#2317, #2737, dino#8)."""
    from timm.layers import resample_abs_pos_embed

    table = torch.randn(1, prefix + old[0] * old[1], 6)
    theirs = resample_abs_pos_embed(table, new, old, prefix, interpolation, antialias)
    same(resample_table(table, new, old, prefix, interpolation, antialias), theirs, atol=2e-6)


def test_wide_and_tall_grids_are_transposed_tables():
    """Fault: tables resized wrongly where width and height differ (dino#8)."""
    table = torch.randn(7, 7, 5)
    wide = resample_table(table.reshape(1, 49, 5), (14, 20), prefix=0).reshape(14, 20, 5)
    tall = resample_table(table.transpose(0, 1).reshape(1, 49, 5), (20, 14), prefix=0).reshape(20, 14, 5)
    same(tall, wide.transpose(0, 1), atol=1e-5)
    assert (wide - tall.reshape(14, 20, 5)).abs().max() > 0.1


def test_same_grid_returns_the_table_itself():
    table = torch.randn(1, 13, 4)
    assert resample_table(table, (3, 4), (3, 4)) is table
    assert resample_table(table[:, :10], (3, 3)).data_ptr() == table.data_ptr()


def test_equal_counts_are_not_equal_grids():
    """Fault: 2 x 8 positions loaded into 4 x 4 unchanged (timm#2737)."""
    table = torch.randn(1, 17, 4)
    moved = resample_table(table, (4, 4), (2, 8))
    assert moved.shape == table.shape
    assert not torch.allclose(moved[:, 1:], table[:, 1:], atol=0.1)
    same(moved[:, :1], table[:, :1], atol=0.0)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("old", "new"), [((5,), (8,)), ((4, 3), (7, 9)), ((3, 4, 2), (5, 6, 6))])
def test_constants_and_ramps_survive(old, new, interpolation):
    constant = torch.full((1, torch.tensor(old).prod() + 2, 3), 0.7)
    same(resample_table(constant, new, old, 2, interpolation), torch.full((1, torch.tensor(new).prod() + 2, 3), 0.7))
    coords = mmpe.Positions.of_size(old).coords
    scale = torch.tensor(new) / torch.tensor(old)
    # With antialias: the cubic kernel without it (a = -0.75) bends straight lines by up to 0.04 of a cell.
    grown = resample_table(coords[None], new, old, 0, interpolation)[0]
    where = (mmpe.Positions.of_size(new).coords + 0.5) / scale - 0.5
    reach = 0 if interpolation == "bilinear" else 1  # cells of the border that the kernel needs on either side
    inside = ((where >= reach) & (where <= torch.tensor(old) - 1 - reach)).all(-1)
    same(grown[inside], where[inside], atol=1e-5)


def test_one_kernel_for_all_axes():
    """A table that is constant along two axes is resized like the one-dimensional one."""
    line = torch.randn(1, 6, 4)
    expected = resample_table(line, (9,), (6,), 0)[0]
    volume = line.reshape(6, 1, 1, 4).expand(6, 2, 3, 4).reshape(1, -1, 4)
    same(resample_table(volume, (9, 4, 2), (6, 2, 3), 0).reshape(9, 4, 2, 4)[:, 1, 1], expected, atol=1e-5)
    image = line.reshape(1, 6, 4).expand(3, 6, 4).reshape(1, -1, 4)
    same(resample_table(image, (3, 9), (3, 6), 0).reshape(3, 9, 4)[2], expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_kept_and_float32_inside(dtype):
    """Fault: bf16 tables have no interpolation (timm#1890)."""
    table = torch.randn(1, 17, 4).to(dtype)
    found = resample_table(table, (7, 7))
    assert found.dtype == dtype
    same(found, resample_table(table.float(), (7, 7)).to(dtype), atol=0.0)


def test_bicubic_keeps_the_norms_better_than_bilinear():
    """Fault: bilinear resizing shrinks the vectors and costs accuracy (timm#750); bicubic is the default."""
    table = torch.randn(1, 14 * 14, 64)
    norm = table.norm(dim=-1).mean()
    shrunk = {k: float(resample_table(table, (24, 24), None, 0, k).norm(dim=-1).mean() / norm) for k in
              ("bicubic", "bilinear")}  # fmt: skip
    assert shrunk["bilinear"] < shrunk["bicubic"] - 0.1
    assert learned().interpolation == "bicubic"
    assert learned().antialias


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: resample_table(t, (4, 4)), "12 rows are no grid of 2 equal sides.*old_size"),
        (lambda t: resample_table(t, (4, 4), (3, 3)), r"does not fill the grid \(3, 3\)"),
        (lambda t: resample_table(t, (4, 4), (12,)), "does not fill"),
        (lambda t: resample_table(t, (4, 4), (3, 4), interpolation="lanczos"), "must be one of 'bicubic', 'bilinear'"),
        (lambda t: resample_table(t, (4, 4, 4), prefix=13), "no grid"),
    ],
)
def test_tables_that_are_no_grid_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(1, 13, 2))


# ---------------------------------------------------------------- sampling at points


@pytest.mark.parametrize("sizes", [(6,), (5, 4), (3, 4, 2)])
def test_cells_of_the_grid_have_the_rows_of_the_table(sizes):
    table = torch.randn(1, torch.tensor(sizes).prod(), 3)
    same(sample_table(table, sizes, mmpe.Positions.of_size(sizes).coords, sizes), table, atol=1e-5)


@settings(max_examples=20)
@given(old=st.tuples(small, small), new=st.tuples(small, small), interpolation=st.sampled_from(["bicubic", "bilinear"]))
def test_points_and_grids_agree(old, new, interpolation):
    """Sampling at the cells of another grid is resizing without antialias."""
    table = torch.randn(1, old[0] * old[1], 3)
    dense = resample_table(table, new, old, 0, interpolation, antialias=False)
    same(sample_table(table, old, mmpe.Positions.grid(*new).coords, new, interpolation), dense, atol=1e-4)


def test_points_cost_what_they_are_and_not_the_grid_around_them():
    """Fault: a dense grid for the largest image of the batch (timm#2720). This one would need a petabyte."""
    enc = learned(grid_size=(4, 4))
    points = mmpe.Positions.points(torch.rand(3, 5, 2) * 1e7, extent=(1e7, 1e7), prefix=1)
    assert torch.isfinite(enc.embed(torch.zeros(3, 6, 12), points)).all()


def test_points_outside_take_the_border():
    enc = learned(grid_size=(4, 4))
    far = added(enc, mmpe.Positions.points(torch.tensor([[-50.0, -50.0], [99.0, 99.0]])))
    same(far, enc.table[0, [0, -1]].detach(), atol=1e-5)


def test_extent_says_what_the_points_span():
    enc = learned(grid_size=(4, 4))
    whole = mmpe.Positions.grid(8, 8)
    kept = whole.keep(torch.arange(64))
    same(added(learned(grid_size=(4, 4), antialias=False), whole), added(enc, kept), atol=1e-5)


# ---------------------------------------------------------------- the module


def test_prefix_rows_go_to_the_first_prefix_tokens_and_registers_get_nothing():
    enc = learned(grid_size=(2, 3), prefix=1)
    same(added(enc, mmpe.Positions.grid(2, 3, prefix=1)), enc.table[0].detach())
    with_registers = added(enc, mmpe.Positions.grid(2, 3, prefix=5))
    same(with_registers[0], enc.table[0, 0].detach())
    same(with_registers[1:5], torch.zeros(4, 12))
    same(with_registers[5:], enc.table[0, 1:].detach())
    loose = mmpe.Positions.points(mmpe.Positions.grid(2, 3).coords.expand(4, -1, -1), prefix=5)
    same(enc.embed(torch.zeros(4, 11, 12), loose)[2].detach(), with_registers, atol=1e-5)


def test_without_prefix_rows_the_table_is_for_patches_alone():
    """timm's no_embed_class."""
    enc = learned(grid_size=(2, 3))
    same(added(enc, mmpe.Positions.grid(2, 3, prefix=1))[0], torch.zeros(12))


def test_missing_prefix_tokens_are_refused():
    with pytest.raises(ValueError, match="rows for 1 prefix tokens, the positions have 0"):
        added(learned(grid_size=(2, 3), prefix=1), mmpe.Positions.grid(2, 3))
    with pytest.raises(ValueError, match="the positions hold 6 tokens"):
        learned(grid_size=(2, 3)).embed(torch.zeros(1, 7, 12), mmpe.Positions.grid(2, 3))


@pytest.mark.parametrize("grid", [(1, 1), (3, 50), (40, 2), (100, 100)])
def test_any_grid_is_served(grid):
    """Fault: a grid larger than the table gives negative indices and kills the process (diffusers#12656)."""
    assert torch.isfinite(added(learned(dim=2, grid_size=(4, 4)), mmpe.Positions.grid(*grid))).all()


def test_acts_once():
    enc = learned(grid_size=(2, 2), depth=3)
    x, positions = torch.randn(1, 4, 12), mmpe.Positions.grid(2, 2)
    assert enc.embed(x, positions, layer=1) is x
    assert not torch.equal(enc.embed(x, positions, layer=0), x)


def test_dropout_acts_in_training_only():
    enc = learned(grid_size=(2, 2), dropout=0.5)
    x, positions = torch.ones(1, 4, 12), mmpe.Positions.grid(2, 2)
    assert (enc.embed(x, positions) == 0).any()
    enc.eval()
    assert (enc.embed(x, positions) != 0).all()


def test_initialisation():
    enc = learned(dim=64, grid_size=(16, 16), std=0.05)
    assert enc.table.shape == (1, 256, 64)
    assert abs(float(enc.table.detach().std()) - 0.05) < 0.002
    assert enc.no_weight_decay() == {"table"}


@pytest.mark.parametrize(
    "options",
    [
        {"grid_size": (3,)}, {"grid_size": 0}, {"grid_size": (3, -1)}, {"prefix": -1}, {"interpolation": "area"},
        {"std": 0.0}, {"dropout": 1.0},
    ],
)  # fmt: skip
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        learned(**options)


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("axes", "old", "new"), [(1, (9,), (5,)), (2, (3, 8), (6, 5)), (3, (2, 3, 4), (4, 3, 2))])
def test_checkpoint_of_another_grid_is_resized_as_in_forward(axes, old, new):
    """Fault: a larger input's table does not load (Swin#24), or loading and forward resize by different rules."""
    source, target = learned(axes=axes, grid_size=old, prefix=1), learned(axes=axes, grid_size=new, prefix=1)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    positions = mmpe.Positions.of_size(new, prefix=1)
    same(added(target, positions), added(source, positions))
    assert target.table_grid.tolist() == list(new)


def test_checkpoint_knows_its_grid_even_with_equal_counts():
    source, target = learned(grid_size=(2, 8)), learned(grid_size=(4, 4))
    target.load_state_dict(source.state_dict())
    same(target.table.detach(), resample_table(source.table.detach(), (4, 4), (2, 8), 0))


def test_checkpoint_without_a_grid_is_square_or_refused():
    table = torch.randn(1, 16, 12)
    target = learned(grid_size=(3, 5))
    target.load_state_dict({"table": table})
    same(target.table.detach(), resample_table(table, (3, 5), (4, 4), 0))
    with pytest.raises(ValueError, match="14 rows are no grid of 2 equal sides"):
        target.load_state_dict({"table": table[:, :14]})
    with pytest.raises(RuntimeError, match="size mismatch"):
        target.load_state_dict({"table": torch.randn(1, 15, 13)})


def test_loading_leaves_the_checkpoint_alone():
    source, target = learned(grid_size=(2, 8)), learned(grid_size=(3, 3))
    state = source.state_dict()
    target.load_state_dict(state)
    assert state["table"].shape == (1, 16, 12)
    assert state["table_grid"].tolist() == [2, 8]


# ---------------------------------------------------------------- sines and cosines


def sincos(dim=24, axes=2, **options):
    return mmpe.create_encoding("ape_sincos", dim=dim, heads=1, axes=axes, **options)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_layouts_are_permutations_of_each_other(axes):
    coords = mmpe.Positions.of_size((4, 5, 6)[:axes]).coords
    reference = sincos_table(coords, 24, "mae").sort(dim=-1).values
    for layout in ("timm", "timm-interleaved", "pape-nd"):
        same(sincos_table(coords, 24, layout).sort(dim=-1).values, reference, atol=2e-6)


def test_layouts_say_where_the_channels_are():
    """Fault: a checkpoint of one layout used with another fails silently."""
    y, x, width = 3.0, 5.0, 2
    omega = torch.tensor([1.0, 0.01])
    sin_y, cos_y, sin_x, cos_x = (y * omega).sin(), (y * omega).cos(), (x * omega).sin(), (x * omega).cos()
    blocks = {
        "mae": (sin_x, cos_x, sin_y, cos_y),
        "diffusers": (sin_x, cos_x, sin_y, cos_y),
        "timm": (sin_y, sin_x, cos_y, cos_x),
        "timm-interleaved": (sin_y, cos_y, sin_x, cos_x),
        "pape-nd": (sin_y, cos_y, sin_x, cos_x),
    }
    for layout, expected in blocks.items():
        same(sincos_table(torch.tensor([[y, x]]), 4 * width, layout)[0], torch.cat(expected))


def test_video_layout_of_cogvideox():
    coords = torch.tensor([[2.0, 3.0, 5.0]])
    table = sincos_table(coords, 32, "diffusers")[0]
    time = sincos_table(coords[:, :1], 8, "mae")[0]
    space = sincos_table(coords[:, 1:], 24, "mae")[0]
    same(table, torch.cat([time, space]))


def test_pape_nd_takes_any_width():
    for dim in (7, 10, 11):
        table = sincos_table(torch.tensor([[2.0, 3.0, 5.0]]), dim, "pape-nd")
        assert table.shape == (1, dim)
    # 7 channels in 3 axes: 2, 2 and 3, the last with two sines and one cosine.
    last = torch.tensor([5.0, 5.0 * 10000 ** (-2 / 3)])
    same(sincos_table(torch.tensor([[2.0, 3.0, 5.0]]), 7, "pape-nd")[0, 4:], torch.cat([last.sin(), last[:1].cos()]))


def test_far_positions_keep_float64_angles():
    """At a position of 100 000 a float32 angle is wrong by a hundredth."""
    table = sincos_table(torch.tensor([[100001.0]]), 64, "mae")[0, :32].double()
    omega = 10000 ** (-torch.arange(32, dtype=torch.float64) / 32)
    same(table, (100001.0 * omega).sin(), atol=1e-7)


def test_base_size_and_scale_move_the_coordinates():
    plain, scaled = sincos(), sincos(base_size=7, interpolation_scale=2.0)
    half = mmpe.Positions.points(mmpe.Positions.grid(14, 21).coords / torch.tensor([4.0, 6.0]))
    same(added(scaled, mmpe.Positions.grid(14, 21)), added(plain, half))
    same(added(sincos(base_size=(14, 21)), mmpe.Positions.grid(14, 21)), added(plain, mmpe.Positions.grid(14, 21)))
    with pytest.raises(ValueError, match="base_size needs the extent"):
        added(scaled, half)


def test_scaled_positions_span_the_trained_grid():
    """Position interpolation by the positions is that by the encoding."""
    larger = mmpe.Positions.grid(28, 21)
    same(added(sincos(), larger.scaled_to((14, 14))), added(sincos(base_size=14), larger))


def test_prefix_tokens_get_zeros_and_samples_their_own_rows():
    enc = sincos()
    same(added(enc, mmpe.Positions.grid(2, 3, prefix=3))[:3], torch.zeros(3, 24))
    points = torch.rand(2, 5, 2) * 9
    rows = enc.embed(torch.zeros(2, 5, 24), mmpe.Positions.points(points))
    for sample in range(2):
        same(rows[sample], sincos_table(points[sample], 24))


@pytest.mark.parametrize(
    ("dim", "axes", "layout", "multiple"),
    [(25, 1, "mae", 2), (26, 2, "mae", 4), (26, 2, "timm", 4), (64, 3, "mae", 6), (24, 3, "diffusers", 16)],
)
def test_widths_that_do_not_divide_are_refused(dim, axes, layout, multiple):
    with pytest.raises(ValueError, match=f"divisible by {multiple}, got dim={dim}"):
        sincos(dim, axes, layout=layout)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "MAE"}, {"temperature": 0.0}, {"base_size": (1, 2, 3)}, {"base_size": 0},
        {"interpolation_scale": (1.0, -1.0)},
    ],
)  # fmt: skip
def test_impossible_sincos_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        sincos(**options)
