"""Augmented positions: what is drawn, that one draw serves a whole pass, and that evaluation draws nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmpe
from mmpe.encodings.position_augmentation import AugmentedPositions, random_crop, random_order
from mmpe.models import VisionTransformer

GRID = mmpe.Positions.grid(5, 7, prefix=1)


def augmented(inner="rope_axial", name="augmented", dim=24, depth=2, **options):
    return mmpe.create_encoding(name, dim, 3, depth=depth, inner=inner, **options)


def moved(enc, batch=4):
    return enc.place(GRID, batch).coords


# ---------------------------------------------------------------- the draws


@settings(max_examples=20)
@given(height=st.integers(1, 9), width=st.integers(1, 9), sets=st.integers(1, 3))
def test_random_order_keeps_the_order_of_cells(height, width, sets):
    drawn = random_order(mmpe.Positions.grid(height, width), 16, sets)
    coords = drawn.coords.reshape(-1, height, width, 2)
    assert len(coords) == sets
    assert torch.equal(coords, coords.round())
    assert coords.min() >= 0
    assert coords.max() <= 15
    assert (coords[..., 0].diff(dim=1) > 0).all()
    assert (coords[..., 1].diff(dim=2) > 0).all()
    assert (coords[..., 0].diff(dim=2) == 0).all()
    assert (coords[..., 1].diff(dim=1) == 0).all()
    assert drawn.extent == (16, 16)
    assert drawn.grid_size is None


def test_random_order_chooses_all_indices_alike():
    counts = torch.zeros(8)
    for _ in range(400):
        counts += torch.bincount(random_order(mmpe.Positions.line(4), 8).coords[:, 0].long(), minlength=8)
    assert (counts > 140).all()  # 200 each
    assert (counts < 260).all()


def test_random_order_follows_tokens_that_were_dropped_or_placed():
    torch.manual_seed(3)
    whole = random_order(mmpe.Positions.grid(4, 5), 9).coords
    torch.manual_seed(3)
    kept = random_order(mmpe.Positions.grid(4, 5).keep(torch.tensor([[0, 7, 19], [3, 2, 1]])), 9).coords
    assert torch.equal(kept[0], whole[[0, 7, 19]])
    assert torch.equal(kept[1], whole[[3, 2, 1]])


def test_crops_stay_inside_and_reach_every_size():
    crops = random_crop(mmpe.Positions.grid(4, 8), 0.25, 300).coords.reshape(300, 4, 8, 2)
    first, last = crops[:, 0, 0], crops[:, -1, -1]
    step = (last - first) / torch.tensor([3.0, 7.0])
    assert (first - step / 2 >= -0.5 - 1e-5).all()
    assert (last + step / 2 <= torch.tensor([3.5, 7.5]) + 1e-5).all()
    assert step.min() >= 0.25 - 1e-6
    assert step.max() <= 1 + 1e-6
    assert (step.amin(0) < 0.3).all()
    assert (step.amax(0) > 0.95).all()
    torch.testing.assert_close(random_crop(GRID, 1.0).coords, GRID.coords, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "check"),
    [
        ({"shift": 2.0}, lambda old, new: ((new - old).abs() <= 2).all() and (new - old).std(dim=-2).max() < 1e-5),
        ({"jitter": 1.5}, lambda old, new: (new[..., 1:, :] <= 1.5 * old[1:] + 1e-5).all()),
        ({"rescale": 1.5}, lambda old, new: (new[..., 8, 0] / new[..., 8, 1] - 1).abs().max() < 1e-5),
    ],
)
@pytest.mark.parametrize("per_sample", [False, True])
def test_each_augmentation_does_what_it_says(options, check, per_sample):
    enc = augmented(per_sample=per_sample, **options)
    new = moved(enc)
    assert new.shape == ((4, 35, 2) if per_sample else (35, 2))
    assert check(GRID.coords, new)
    assert (new - GRID.coords).abs().max() > 1e-3
    assert (moved(enc) - new).abs().max() > 1e-3
    if per_sample:
        assert (new[0] - new[1]).abs().max() > 1e-3


def test_draws_are_reproducible():
    enc = augmented(shift=1.0, jitter=1.2, crop=0.5, max_size=20, per_sample=True)
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(moved(enc))
    assert torch.equal(*found)


# ---------------------------------------------------------------- one draw a pass, none in evaluation


def test_evaluation_is_the_encoding_inside():
    enc = augmented("rope_mixed", shift=3.0, dropout=0.5).eval()
    q = torch.randn(2, 3, 36, 8)
    assert enc.place(GRID, 2) is GRID
    for layer in range(2):
        ours, theirs = enc(GRID).layer(layer), enc.inner(GRID).layer(layer)
        assert torch.equal(mmpe.attend(q, q, q, ours), mmpe.attend(q, q, q, theirs))
    assert enc.kind == "rotary"
    assert (enc.per_layer, enc.content_dependent) == (True, False)


def test_forgetting_to_place_in_training_is_an_error():
    enc = augmented(shift=1.0)
    with pytest.raises(ValueError, match=r"encoding.place\(positions, batch\)"):
        enc(GRID)
    with pytest.raises(ValueError, match=r"encoding.place\(positions, batch\)"):
        enc.embed(torch.zeros(1, 36, 24), GRID)
    enc(enc.place(GRID, 1))
    augmented()(GRID)  # nothing to draw


def test_token_term_and_attention_of_all_blocks_see_one_draw():
    enc, x = augmented("ape_sincos+pape", shift=20.0), torch.zeros(1, 36, 24)
    positions = enc.place(GRID, 1)
    assert isinstance(positions, AugmentedPositions)
    expected = mmpe.Positions.points(positions.coords, prefix=1, extent=GRID.extent)
    assert torch.equal(enc.embed(x, positions), enc.inner.embed(x, expected))
    q, h = torch.randn(1, 3, 36, 8), torch.randn(1, 36, 24)
    for layer in range(2):
        ours, theirs = enc(positions, h, layer), enc.inner(expected, h, layer)
        assert torch.equal(mmpe.attend(q, q, q, ours), mmpe.attend(q, q, q, theirs))


def test_draws_survive_patch_dropout():
    enc = augmented(shift=5.0)
    placed = enc.place(GRID, 2)
    kept = placed.keep(torch.tensor([[1, 2], [3, 4]]))
    assert torch.equal(kept.coords[1], placed.coords[[3, 4]])
    assert isinstance(kept, AugmentedPositions)
    enc(kept)


@pytest.mark.parametrize("inner", ["ape_learned", "ape_sincos", "rope_mixed", "pape", "alibi_2d", "lape"])
def test_models_train_with_it(inner):
    options = {"inner": inner, "shift": 0.5, "jitter": 1.2, "rescale": 1.2, "crop": 0.5, "dropout": 0.3,
               "per_sample": True}  # fmt: skip
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=3, encoding="augmented",
        encoding_options=options, patch_drop_rate=0.25,
    )  # fmt: skip
    images = torch.randn(4, 3, 32, 32)
    model.train()(images).square().sum().backward()
    # (the table's row of the class token is used as well, since the backbone says that it has one)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(images), model(images))


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize("name", ["augmented", "pe_dropout"])
def test_dropped_samples_see_no_position(name):
    enc = augmented("ape_learned+rope_axial", name, dropout=0.5, grid_size=(5, 7), prefix=1)
    torch.manual_seed(1)
    positions = enc.place(GRID, 6)
    dropped = positions.dropped
    assert 0 < int(dropped.sum()) < 6
    x = torch.randn(6, 36, 24)
    y = enc.embed(x, positions)
    assert torch.equal(y[dropped], x[dropped])
    assert torch.equal(y[~dropped], enc.inner.embed(x, GRID)[~dropped])
    q, k = torch.randn(2, 6, 3, 36, 8)
    o, plain = mmpe.attend(q, k, k, enc(positions)), mmpe.attend(q, k, k)
    torch.testing.assert_close(o[dropped], plain[dropped], atol=1e-5, rtol=0)
    torch.testing.assert_close(o[~dropped], mmpe.attend(q, k, k, enc.inner(GRID))[~dropped], atol=1e-5, rtol=0)


def test_dropout_works_on_grids_too():
    enc = augmented("cpe", "pe_dropout", dropout=0.5)
    torch.manual_seed(1)
    positions, x = enc.place(GRID, 6), torch.randn(6, 36, 24)
    assert torch.equal(enc.embed(x, positions, 1)[positions.dropped], x[positions.dropped])
    assert enc(positions).bias(x, x) is None


# ---------------------------------------------------------------- RPE-2D


def test_rpe_2d_draws_in_training_and_counts_or_spreads_after():
    for at_test, last in (("consecutive", (4.0, 6.0)), ("spread", (15.0, 15.0))):
        enc = augmented("rope_axial", "rpe_2d_randomized", max_size=16, at_test=at_test)
        drawn = enc.place(GRID, 3)
        assert (drawn.coords[7:, 0] - drawn.coords[:-7, 0] > 0).all()
        assert (enc.eval().place(GRID, 3)) is GRID
        where = enc.placed(GRID)
        assert tuple(where.coords[-1].tolist()) == last
        assert tuple(where.coords[0].tolist()) == (0.0, 0.0)
    assert torch.equal(enc.placed(where).coords, where.coords)
    with pytest.raises(ValueError, match="max_size=16 must be at least the longest axis"):
        enc.train().place(mmpe.Positions.grid(4, 17), 1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("augmented", {"inner": "cpe", "shift": 1.0}, "fill a grid"),
        ("pe_dropout", {"inner": "cpe+rope_axial"}, "fill a grid"),
        ("rpe_2d_randomized", {"inner": "cpe"}, "reads a grid"),
        ("augmented", {"crop": 0.0}, "crop"),
        ("augmented", {"dropout": 1.5}, "probability"),
        ("augmented", {"jitter": 0.5}, "jitter_coords"),
        ("rpe_2d_randomized", {"at_test": "even"}, "at_test"),
        ("rpe_2d_randomized", {"inner": "rop"}, "unknown encoding 'rop'"),
    ],
)
def test_wrong_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        mmpe.create_encoding(name, 24, 3, **options)


def test_points_without_a_range_are_refused():
    enc = augmented("rope_axial", "rpe_2d_randomized")
    with pytest.raises(ValueError, match="extent="):
        enc.place(mmpe.Positions.points(torch.zeros(3, 2)), 1)


def test_augmentation_compiles():
    enc = augmented(shift=1.0, crop=0.5, max_size=20, dropout=0.5, per_sample=True)
    q = torch.randn(2, 3, 36, 8)

    def step(q):
        return mmpe.attend(q, q, q, enc(enc.place(GRID, 2)))

    compiled = torch.compile(step, fullgraph=True, backend="eager", dynamic=False)
    assert compiled(q).shape == q.shape
    assert (compiled(q) - compiled(q)).abs().max() > 1e-6  # a new draw in every call
