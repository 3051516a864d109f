"""Rotary encodings: the conventions of other libraries, and what each card promises."""

import math
from typing import Any

import pytest
import torch
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed

import mmpe
from mmpe import Positions, create_encoding
from mmpe.encodings.coordinates import CoordinateAugmentation, normalise
from mmpe.encodings.rotary import RotaryEncoding, timm_table
from mmpe.rotary import pairing_permutation


def rotary(
    name: str, head_dim: int = 16, heads: int = 2, axes: int = 2, depth: int = 1, **options: Any
) -> RotaryEncoding:
    enc = create_encoding(name, head_dim * heads, heads, axes, depth, **options)
    assert isinstance(enc, RotaryEncoding)
    return enc


def queries(positions: Positions, head_dim: int = 16, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (2, heads, positions.num_tokens, head_dim)
    return torch.randn(shape), torch.randn(shape)


def scores(enc: RotaryEncoding, positions: Positions, q: torch.Tensor, k: torch.Tensor, layer: int = 0) -> torch.Tensor:
    q, k = enc(positions).layer(layer).queries_keys(q, k)
    return q @ k.transpose(-1, -2)


def table_of(enc: RotaryEncoding, height: int, width: int) -> torch.Tensor:
    return timm_table(enc.rotary_table(Positions.grid(height, width)), enc.half_pairing).detach()


# ---------------------------------------------------------------- other libraries, option by option

CAT = [
    {"in_pixels": False, "temperature": 100.0, "grid_indexing": "xy"},
    {"in_pixels": False, "grid_indexing": "ij", "rotate_half": True},
    {"in_pixels": False, "ref_feat_shape": (4, 6), "grid_offset": 1.0, "grid_indexing": "xy"},
    {"in_pixels": True},
    {"in_pixels": True, "linear_bands": True, "max_res": 64, "grid_indexing": "xy"},
    {"in_pixels": True, "grid_type": "index", "grid_offset": 0.5},
    {"in_pixels": True, "grid_type": "centered", "normalize_coords": "max", "grid_offset": 0.25},
    {"in_pixels": False, "grid_type": "centered", "normalize_coords": "min", "ref_feat_shape": (3, 3)},
    {"in_pixels": False, "grid_type": "pixel", "grid_indexing": "xy"},
]


def from_timm_cat(options: dict[str, Any]) -> dict[str, Any]:
    same = ("linear_bands", "max_res", "normalize_coords", "grid_offset", "ref_feat_shape", "grid_indexing")
    ours = {name: options[name] for name in same if name in options}
    renamed = {"temperature": "base", "grid_type": "coordinates", "rotate_half": "half"}
    ours |= {renamed[name]: value for name, value in options.items() if name in renamed}
    return ours | {"convention": "timm-cat", "spectrum": "pixel" if options["in_pixels"] else "lang"}


@pytest.mark.parametrize("options", CAT, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()))
def test_axial_equals_timm_cat(options: dict[str, Any]) -> None:
    enc = rotary("rope_axial", **from_timm_cat(options))
    theirs = RotaryEmbeddingCat(16, **options).get_embed((5, 7))
    # pixel frequencies reach 350 rad, so their angles carry 4e-5 of rounding
    torch.testing.assert_close(table_of(enc, 5, 7), theirs, atol=1e-4 if options["in_pixels"] else 1e-6, rtol=0)


DINO = [
    {},
    {"normalize_coords": "max", "rotate_half": False},
    {"normalize_coords": "min", "grid_indexing": "xy", "grid_offset": 0.25},
    {"temperature": None, "min_period": 0.05, "max_period": 3.0, "normalize_coords": "min"},
]


@pytest.mark.parametrize("options", DINO, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "defaults")
def test_axial_equals_timm_dinov3(options: dict[str, Any]) -> None:
    renamed = {"temperature": "base", "rotate_half": "half"}
    ours = {renamed.get(name, name): value for name, value in options.items()}
    theirs = RotaryEmbeddingDinoV3(16, **options).eval().get_embed((5, 7))
    enc = rotary("rope_axial", convention="dinov3", **ours)
    torch.testing.assert_close(table_of(enc, 5, 7), theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("indexing", ["xy", "ij"])
def test_mixed_equals_timm(indexing: str) -> None:
    torch.manual_seed(3)
    theirs = RotaryEmbeddingMixed(48, depth=3, num_heads=3, grid_indexing=indexing)
    torch.manual_seed(3)
    enc = rotary("rope_mixed", heads=3, depth=3, grid_indexing=indexing)
    torch.testing.assert_close(enc.freqs, theirs.freqs)
    torch.testing.assert_close(table_of(enc, 4, 7), theirs.get_embed((4, 7)).detach())


AUGMENTATIONS = [
    {"shift_coords": 0.4},
    {"jitter_coords": 1.5, "rescale_coords": 2.0},
    {"shift_coords": 0.4, "jitter_coords": 1.5, "rescale_coords": 2.0},
]


@pytest.mark.parametrize("options", AUGMENTATIONS, ids=lambda o: "-".join(o))
@pytest.mark.parametrize("indexing", ["xy", "ij"])
def test_augmentation_draws_what_timm_draws(indexing: str, options: dict[str, float]) -> None:
    pairs = [
        (
            rotary("rope_axial", convention="dinov3", grid_indexing=indexing, **options),
            RotaryEmbeddingDinoV3(16, grid_indexing=indexing, **options),
        ),
        (
            rotary("rope_axial", convention="timm-cat", spectrum="lang", grid_indexing=indexing, **options),
            RotaryEmbeddingCat(16, in_pixels=False, grid_indexing=indexing, **options),
        ),
        (
            rotary("rope_mixed", grid_indexing=indexing, **options),
            RotaryEmbeddingMixed(32, depth=1, num_heads=2, grid_indexing=indexing, **options),
        ),
    ]
    pairs[2][0].load_state_dict(pairs[2][1].state_dict())
    for ours, theirs in pairs:
        torch.manual_seed(11)
        expected = theirs.train().get_embed((4, 5)).detach()
        torch.manual_seed(11)
        torch.testing.assert_close(table_of(ours.train(), 4, 5), expected, atol=2e-6, rtol=0)


def test_augmentation_is_for_training_and_leaves_the_generator_alone_when_off() -> None:
    enc = rotary("rope_axial", convention="dinov3", rescale_coords=2.0)
    plain = rotary("rope_axial", convention="dinov3")
    state = torch.get_rng_state()
    torch.testing.assert_close(table_of(enc.eval(), 4, 5), table_of(plain.train(), 4, 5), atol=0, rtol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.allclose(table_of(enc.train(), 4, 5), table_of(plain, 4, 5))


def test_one_augmentation_serves_the_whole_batch() -> None:
    enc = rotary("rope_mixed", shift_coords=1.0, jitter_coords=2.0).train()
    same = Positions.points(torch.rand(1, 6, 2).expand(3, 6, 2))
    cos = enc.rotary_table(same).cos[0]
    torch.testing.assert_close(cos[0], cos[2])


@pytest.mark.parametrize("wrong", [{"shift": -1.0}, {"jitter": 0.5}, {"rescale": math.inf}])
def test_impossible_augmentation_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}_coords must be"):
        CoordinateAugmentation(**wrong)


OTHER = pytest.importorskip("rotary_embedding_torch")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"interpolate_factor": 2.0}, {"interpolate_factor": 2.0}),
        ({"theta_rescale": 4.0, "rotary_dim": 8}, {"theta_rescale_factor": 4.0, "dim": 8}),
        (
            {"spectrum": "constant", "coordinates": "index"},
            {"freqs_for": "constant", "num_freqs": 8, "cache_if_possible": False},
        ),
    ],
    ids=["plain", "interpolate", "ntk-partial", "constant"],
)
def test_rope_equals_rotary_embedding_torch(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    module = OTHER.RotaryEmbedding(**({"dim": 16} | theirs))
    q = torch.randn(1, 2, 9, 16)
    found = rotary("rope", axes=1, **ours)(Positions.line(9)).queries_keys(q, q)[0]
    torch.testing.assert_close(found, module.rotate_queries_or_keys(q).detach(), atol=2e-6, rtol=0)


def test_xpos_equals_rotary_embedding_torch() -> None:
    module = OTHER.RotaryEmbedding(dim=16, use_xpos=True)
    q, k = torch.randn(2, 1, 2, 40, 16)
    expected = [t.detach() for t in module.rotate_queries_and_keys(q, k)]
    found = rotary("rope", axes=1, xpos_scale_base=512.0)(Positions.line(40)).queries_keys(q, k)
    torch.testing.assert_close(list(found), expected, atol=2e-6, rtol=1e-6)


# ---------------------------------------------------------------- rope

ANGLES_1D = {"lang": {}, "half": {"half": True}, "partial": {"rotary_dim": 8}, "xpos": {"xpos_scale_base": 512.0}}


@pytest.mark.parametrize("options", ANGLES_1D.values(), ids=ANGLES_1D)
def test_rope_depends_on_the_offset_alone(options: dict[str, Any]) -> None:
    enc = rotary("rope", axes=1, **options)
    here = Positions.points(torch.arange(12.0)[:, None])
    q, k = queries(here)
    there = Positions.points(here.coords + 100.0)
    torch.testing.assert_close(scores(enc, there, q, k), scores(enc, here, q, k), atol=2e-4, rtol=0)


def test_rotations_add_up_and_position_zero_is_the_identity() -> None:
    enc = rotary("rope", axes=1)

    def turn(x: torch.Tensor, by: float) -> torch.Tensor:
        return enc(Positions.points(torch.full((1, 1), by))).queries_keys(x, x)[0]

    x = torch.randn(1, 2, 1, 16)
    assert torch.equal(turn(x, 0.0), x)
    torch.testing.assert_close(turn(turn(x, 437.0), 391.0), turn(x, 828.0), atol=2e-4, rtol=0)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_half_split_is_interleaved_in_another_order(axes: int) -> None:
    positions = Positions.of_size((3, 4, 5)[:axes], prefix=1)
    q, k = queries(positions, head_dim=24)
    order = pairing_permutation(24)
    for name in ("rope", "rope_axial"):
        plain = rotary(name, 24, axes=axes)(positions).queries_keys(q, k)[0]
        half = rotary(name, 24, axes=axes, half=True)(positions).queries_keys(q[..., order], k[..., order])[0]
        torch.testing.assert_close(half, plain[..., order], atol=1e-6, rtol=0)


def test_partial_rotation_passes_the_other_channels_through() -> None:
    positions = Positions.line(9)
    q, k = queries(positions)
    rotated = rotary("rope", axes=1, rotary_dim=6)(positions).queries_keys(q, k)[0]
    assert torch.equal(rotated[..., 6:], q[..., 6:])
    assert not torch.equal(rotated[..., 1:, :6], q[..., 1:, :6])


def test_rope_reads_an_image_row_by_row() -> None:
    enc_line, enc_image = rotary("rope", axes=1), rotary("rope", axes=2)
    line, image = Positions.line(15), Positions.grid(3, 5)
    assert torch.equal(enc_image.rotary_table(image).cos, enc_line.rotary_table(line).cos)
    kept = torch.tensor([[1, 7, 14], [0, 2, 3]])
    assert torch.equal(enc_image.rotary_table(image.keep(kept)).cos[:, 0], enc_line.rotary_table(line).cos[kept])
    with pytest.raises(ValueError, match="no row-major order"):
        enc_image(Positions.points(torch.rand(4, 2)))


def test_pixel_rope_needs_to_know_the_length() -> None:
    enc = rotary("rope", axes=1, spectrum="pixel", max_freq=20.0)
    assert enc.rotary_table(Positions.line(9)).cos[4].eq(1).all()  # the middle of [-1, 1]
    with pytest.raises(ValueError, match="extent="):
        enc(Positions.points(torch.rand(4, 1)))


# ---------------------------------------------------------------- rope_axial


def test_equal_token_counts_are_not_equal_grids() -> None:
    """Fault: a 7 x 28 grid silently got the positions of 14 x 14, and H and W were swapped on other grids."""
    for name in ("rope_axial", "rope_mixed"):
        enc = rotary(name)
        assert not torch.allclose(table_of(enc, 7, 28), table_of(enc, 14, 14))
        assert not torch.allclose(table_of(enc, 5, 7), table_of(enc, 7, 5))


def test_transposed_grid_swaps_the_halves_of_the_channels() -> None:
    enc = rotary("rope_axial")
    wide, tall = (enc.rotary_table(Positions.grid(*size)).cos for size in ((3, 5), (5, 3)))
    transposed = tall.reshape(5, 3, 8).transpose(0, 1).reshape(15, 8)
    assert torch.equal(transposed.roll(4, dims=-1), wide)


def test_a_column_of_patches_is_a_sequence() -> None:
    column = rotary("rope_axial", convention="rope-vit").rotary_table(Positions.grid(6, 1)).cos
    line = rotary("rope", axes=1, rotary_dim=8, base=100.0).rotary_table(Positions.line(6)).cos
    torch.testing.assert_close(column[:, 4:], line, atol=1e-6, rtol=0)
    assert column[:, :4].eq(1).all()


def test_dinov3_sees_the_shape_of_the_grid_and_not_its_size() -> None:
    enc = rotary("rope_axial", convention="dinov3")
    table = enc.rotary_table(Positions.grid(3, 5))
    assert table.sin[7].eq(0).all()
    # Every second of the borders between 6 patches is a border of 3: the mean of 2 fine centres is a coarse one.
    fine, coarse = enc.coordinates(Positions.grid(6, 10)), enc.coordinates(Positions.grid(3, 5))
    mean = fine.reshape(3, 2, 5, 2, 2).mean(dim=(1, 3)).reshape(15, 2)
    torch.testing.assert_close(mean, coarse, atol=1e-6, rtol=0)


def test_eva02_stretches_every_grid_to_its_reference() -> None:
    enc = rotary("rope_axial", convention="eva02")
    large, small = enc.coordinates(Positions.grid(32, 48)), enc.coordinates(Positions.grid(16, 16))
    torch.testing.assert_close(large[-1], torch.tensor([15.5, 16 - 1 / 3]))
    assert small[-1].tolist() == [15.0, 15.0]


def test_planes_may_differ_between_axes() -> None:
    """The usual heads of 64 channels have 32 planes, which 3 axes cannot share evenly."""
    positions = Positions.video(2, 3, 4, prefix=1)
    enc = rotary("rope_axial", 64, axes=3, planes=(6, 13, 13), base=(1000.0, 100.0, 100.0), grid_indexing="ij")
    frequencies = enc.frequencies()
    assert [int(row.count_nonzero()) for row in frequencies] == [6, 13, 13]
    torch.testing.assert_close(frequencies[0, 5], torch.tensor(1000.0 ** (-5 / 6)))
    q, k = queries(positions, 64)
    assert enc(positions).queries_keys(q, k)[0].shape == q.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 15}, "even head_dim, got 15"),
        ({"head_dim": 64, "axes": 3}, r"not divisible by 2 \* axes = 6.*planes=\(11, 11, 10\)"),
        ({"head_dim": 18}, "head_dim=18 is not divisible"),
        ({"planes": (5, 4)}, "at most 8 in all"),
        ({"planes": (8,)}, "each of the 2 axes"),
        ({"base": (10.0, 10.0, 10.0)}, "one for each of the 2 axes"),
        ({"base": -1.0}, "base must be greater than 0"),
        ({"convention": "dino"}, "'dinov3'"),
        ({"coordinates": "centred"}, "'centered'"),
        ({"min_period": 0.1}, "belong together"),
        ({"min_period": 0.1, "max_period": 4.0}, "spectrum='period'"),
        ({"jitter_coords": 0.0}, "jitter_coords must be"),
    ],
)
def test_axial_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotary("rope_axial", **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rope", {"head_dim": 15}, "even number of channels, got 15"),
        ("rope", {"rotary_dim": 7}, "even number of channels, got 7"),
        ("rope", {"rotary_dim": 18}, "cannot rotate 18"),
        ("rope", {"spectrum": "pixels"}, "'pixel'"),
        ("rope", {"interpolate_factor": 0.0}, "interpolate_factor must be greater"),
        ("rope_mixed", {"head_dim": 15}, "even number of channels, got 15"),
        ("rope_mixed", {"base": 0.0}, "base must be greater"),
        ("rope_mixed", {"grid_indexing": "yx"}, "'xy'"),
    ],
)
def test_rope_and_mixed_refuse(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotary(name, **options)


def test_normalised_coordinates_need_an_extent() -> None:
    points = torch.rand(5, 2)
    for kind, reference in (("pixel", None), ("centered", None), ("index", (4.0, 4.0))):
        with pytest.raises(ValueError, match="extent="):
            normalise(points, None, kind, reference=reference)
    enc = rotary("rope_axial", convention="dinov3")
    loose = Positions.points(Positions.grid(3, 4).coords, extent=(3, 4))
    assert torch.equal(enc.rotary_table(loose).cos, enc.rotary_table(Positions.grid(3, 4)).cos)


# ---------------------------------------------------------------- rope_mixed


@pytest.mark.parametrize("axes", [2, 3])
def test_mixed_starts_as_an_axial_encoding_in_a_random_frame(axes: int) -> None:
    enc = rotary("rope_mixed", head_dim=64, heads=3, axes=axes, depth=2)
    groups = torch.split(enc.freqs.detach(), mmpe.frequencies.split_planes(32, axes), dim=-1)
    for a, group in enumerate(groups):
        sizes = group.norm(dim=0)  # (L, H, F_a)
        expected = 10.0 ** (-torch.arange(group.shape[-1]) * axes / 32)
        torch.testing.assert_close(sizes, expected.expand_as(sizes), atol=1e-5, rtol=0)
        for other in groups[a + 1 :]:
            assert (group[..., 0] * other[..., 0]).sum(0).abs().max() < 1e-5
    assert not torch.allclose(enc.freqs[:, 0, 0], enc.freqs[:, 1, 0])
    assert not torch.allclose(enc.freqs[:, 0, 0], enc.freqs[:, 0, 1])


def test_mixed_holds_axial_as_a_special_case() -> None:
    mixed, axial = rotary("rope_mixed"), rotary("rope_axial", convention="rope-vit")
    with torch.no_grad():
        mixed.freqs.copy_(axial.frequencies()[:, None, None].expand_as(mixed.freqs))
    torch.testing.assert_close(table_of(mixed, 4, 6)[0, 1], table_of(axial, 4, 6))


@pytest.mark.parametrize(("share_heads", "share_layers"), [(True, False), (False, True), (True, True)])
def test_sharing_makes_fewer_parameters_and_equal_angles(share_heads: bool, share_layers: bool) -> None:
    enc = rotary("rope_mixed", heads=3, depth=4, share_heads=share_heads, share_layers=share_layers)
    assert enc.freqs.shape == (2, 1 if share_layers else 4, 1 if share_heads else 3, 8)
    positions = Positions.grid(3, 4)
    q, k = queries(positions, heads=3)
    terms = enc(positions)
    first, last = (terms.layer(i).queries_keys(q[:, :1].expand_as(q), k)[0] for i in (0, 3))
    assert torch.equal(first, last) == share_layers
    assert torch.equal(first[:, 0], first[:, 1]) == share_heads


@pytest.mark.parametrize("shape", [(2, 3, 16), (2, 3, 2, 8)], ids=["rope-vit", "timm"])
def test_mixed_loads_checkpoints_of_rope_vit_and_timm(shape: tuple[int, ...]) -> None:
    enc = rotary("rope_mixed", depth=3)
    freqs = torch.randn(shape)
    enc.load_state_dict({"freqs": freqs})
    assert torch.equal(enc.freqs, freqs.reshape(2, 3, 2, 8))
    swin = torch.randn(2, 2, 8)
    block = rotary("rope_mixed")
    block.load_state_dict({"freqs": swin})
    assert torch.equal(block.freqs[:, 0], swin)
    with pytest.raises(RuntimeError, match="size mismatch"):
        enc.load_state_dict({"freqs": torch.randn(2, 4, 16)})


def test_terms_of_several_blocks_are_not_those_of_one() -> None:
    positions = Positions.grid(3, 4)
    q, k = queries(positions)
    terms = rotary("rope_mixed", depth=2)(positions)
    with pytest.raises(ValueError, match=r"in block i use terms.layer\(i\)"):
        mmpe.attend(q, k, k, terms)
    with pytest.raises(ValueError, match="those of 2 blocks, asked for layer 2"):
        terms.layer(2)
    one = rotary("rope_mixed", depth=1)(positions)
    assert torch.equal(mmpe.attend(q, k, k, one), mmpe.attend(q, k, k, one.layer(0)))


def test_gradient_reaches_every_frequency() -> None:
    enc = rotary("rope_mixed", depth=2)
    positions = Positions.grid(3, 4, prefix=1)
    q, k = queries(positions)
    terms = enc(positions)
    sum(mmpe.attend(q, k, k, terms.layer(i)).square().sum() for i in range(2)).backward()
    assert enc.freqs.grad is not None
    assert enc.freqs.grad.ne(0).all()


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("name", ["rope", "rope_axial", "rope_mixed"])
def test_batched_positions_are_the_positions_of_each_sample(name: str, axes: int) -> None:
    enc = rotary(name, 24, axes=axes, depth=2)
    grids = [Positions.of_size((3, 4, 5)[:axes], prefix=2)] * 2
    extent = grids[0].extent
    coords = torch.stack([grids[0].coords, grids[0].coords.flip(0)])
    q, k = queries(grids[0], 24)
    both = enc(Positions.points(coords, prefix=2, extent=extent)).layer(1).queries_keys(q, k)
    for i in range(2):
        one = Positions.points(coords[i], prefix=2, extent=extent)
        alone = enc(one).layer(1).queries_keys(q[i : i + 1], k[i : i + 1])
        torch.testing.assert_close([t[i : i + 1] for t in both], list(alone))
    assert torch.equal(both[0][:, :, :2], q[:, :, :2])


def test_patch_dropout_keeps_the_rotation_of_the_patch() -> None:
    """Fault: tables that were not gathered with the kept patches (timm 2549)."""
    positions, kept = Positions.grid(4, 5, prefix=1), torch.tensor([[3, 7, 19], [0, 1, 12]])
    rows = torch.cat([torch.zeros(2, 1, dtype=torch.int64), kept + 1], dim=1)[:, None, :, None].expand(2, 2, 4, 16)
    q, k = queries(positions)
    for name in ("rope_axial", "rope_mixed"):
        enc = rotary(name)
        whole = enc(positions).queries_keys(q, k)[0].gather(2, rows)
        few = enc(positions.keep(kept)).queries_keys(q.gather(2, rows), k.gather(2, rows))[0]
        torch.testing.assert_close(few, whole)


def test_interpolated_positions_span_the_trained_range() -> None:
    enc = rotary("rope_axial")
    fine = enc.rotary_table(Positions.grid(8, 8).scaled_to((4, 4))).cos.reshape(8, 8, 8)
    coarse = enc.rotary_table(Positions.grid(4, 4)).cos.reshape(4, 4, 8)
    torch.testing.assert_close(fine[::2, ::2], coarse)
