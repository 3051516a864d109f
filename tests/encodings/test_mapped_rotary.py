"""STRING and HARoPE: maps before the rotation, circulant generators, folding into the projections."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mmpe
from mmpe import Positions, create_encoding
from mmpe.encodings.lie import cayley, rotate_blocks, skew_symmetric
from mmpe.encodings.mapped_rotary import MappedRotaryEncoding, MappedRotaryTerms
from mmpe.encodings.rotary import RotaryTerms
from mmpe.encodings.string_pe import CirculantTerms, StringCayley, StringCirculant, fourier_basis

HEADS, WIDTH = 3, 16
DIM = HEADS * WIDTH
MAPPED = pytest.mark.parametrize("name", ["string_cayley", "harope"])


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


def same(ours: Tensor, theirs: Tensor, atol: float) -> None:
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0.0, check_dtype=False)


def norm_error(rotation: Tensor) -> float:
    return float((rotation.mT @ rotation - torch.eye(rotation.shape[-1])).abs().max())


# ---------------------------------------------------------------- STRING


@pytest.mark.parametrize(("std", "atol"), [(0.1, 1e-6), (1.0, 2e-6), (5.0, 1e-5)])
def test_cayley_is_orthogonal(std: float, atol: float) -> None:
    s = skew_symmetric(std * torch.randn(4, 64 * 63 // 2), 64)
    p, eye = cayley(s), torch.eye(64)
    assert norm_error(p) < atol
    assert torch.equal(cayley(torch.zeros(64, 64)), eye)
    same(p, ((eye.double() - s) @ torch.linalg.inv(eye.double() + s)).float(), 3e-6)
    same(torch.linalg.det(p), torch.ones(4), 1e-4)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_cayley_scores_are_those_of_commuting_generators(axes: int) -> None:
    enc = make("string_cayley", axes)
    positions = Positions.points(3 * torch.rand(7, axes))
    q, k = pair(7)
    p = enc.maps()[0][0].double().detach()  # (H, D, D)
    generators = []
    for a in range(axes):
        planes = torch.zeros(HEADS, WIDTH, WIDTH, dtype=torch.float64)
        even = torch.arange(0, WIDTH, 2)
        planes[:, even + 1, even] = enc.freqs[0, :, a].double().detach()
        planes[:, even, even + 1] = -enc.freqs[0, :, a].double().detach()
        generators.append(p.mT @ planes @ p)
    for first in generators:
        for second in generators:
            same(first @ second, second @ first, 1e-5)
    exponent = sum(positions.coords[:, a, None, None, None].double() * g for a, g in enumerate(generators))
    turn = torch.linalg.matrix_exp(exponent).transpose(0, 1)  # (H, N, D, D)
    expected = (turn @ q.double()[..., None]).squeeze(-1) @ (turn @ k.double()[..., None]).squeeze(-1).mT
    same(scores(enc, positions, q, k), expected, 2e-5)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_cayley_without_a_basis_is_rope_mixed(axes: int) -> None:
    enc = make("string_cayley", axes, noise=0.0, start="mixed")
    mixed = create_encoding("rope_mixed", DIM, HEADS, axes, grid_indexing="ij")
    with torch.no_grad():
        mixed.freqs.copy_(enc.freqs.permute(2, 0, 1, 3))
    positions = Positions.of_size((4, 3, 2)[:axes], prefix=1)
    q, k = pair(positions.num_tokens)
    for ours, theirs in zip(enc(positions).queries_keys(q, k), mixed(positions).queries_keys(q, k), strict=True):
        assert torch.equal(ours, theirs)


def test_cayley_starts_as_rope_axial() -> None:
    positions = Positions.grid(4, 5, prefix=2)
    q, k = pair(positions.num_tokens)
    axial = create_encoding("rope_axial", DIM, HEADS, grid_indexing="ij")
    same(scores(make("string_cayley", noise=0.0), positions, q, k), scores(axial, positions, q, k), 1e-5)


def test_prefix_tokens_are_in_the_basis_of_the_patches() -> None:
    """Without P on the class token, its scores would depend on the choice of P alone."""
    enc, positions = make("string_cayley"), Positions.grid(3, 4, prefix=2)
    q, k = pair(positions.num_tokens)
    p = enc.maps()[0][0]
    same(enc(positions).queries_keys(q, k)[0][:, :, :2], (p @ q[:, :, :2].mT).mT, 1e-5)
    same(scores(enc, positions, q, k)[:, :, :2, :2], q[:, :, :2] @ k[:, :, :2].mT, 1e-4)


@pytest.mark.parametrize("block_size", [None, 8, 4, 3])
def test_circulant_equals_the_dense_exponential(block_size: int | None) -> None:
    width = 15 if block_size == 3 else WIDTH
    enc = create_encoding("string_circulant", 2 * width, 2, block_size=block_size)
    size = block_size or width
    with torch.no_grad():
        enc.c.add_(0.3 * torch.randn_like(enc.c))
    p = 14 * torch.rand(5, 2)
    index = (torch.arange(size)[:, None] - torch.arange(size)) % size
    c = enc.c[0].double().detach()[..., index]  # (H, A, m, b, b)
    exponent = torch.einsum("na,hamij->hmnij", p.double(), c - c.mT).contiguous()
    q, k = torch.randn(2, 3, 2, 5, width)
    expected = rotate_blocks(torch.linalg.matrix_exp(exponent), q.double(), k.double())
    for ours, theirs in zip(enc(Positions.points(p)).queries_keys(q, k), expected, strict=True):
        same(ours, theirs, 3e-5)


@pytest.mark.parametrize("block_size", [16, 8, 4])
def test_fourier_and_real_basis_agree(block_size: int) -> None:
    enc, positions = make("string_circulant", block_size=block_size), Positions.grid(3, 4, prefix=1)
    q, k = pair(positions.num_tokens)
    terms = enc(positions).layer(0)
    assert isinstance(terms, CirculantTerms)
    fast = terms.queries_keys(q, k)
    plain = terms._in_real_basis(terms.table, q, k)
    for ours, theirs in zip(fast, plain, strict=True):
        same(ours, theirs, 1e-5)
    same(fast[0][:, :, 0], q[:, :, 0], 1e-6)  # the prefix stays
    basis = fourier_basis(block_size, 3)
    same(basis.mT @ basis, torch.eye(3 * block_size), 1e-6)


def test_circulant_block_of_the_whole_head_is_the_full_form() -> None:
    torch.manual_seed(0)
    full = make("string_circulant")
    torch.manual_seed(0)
    block = make("string_circulant", block_size=WIDTH)
    positions = Positions.grid(3, 4)
    q, k = pair(12)
    assert torch.equal(scores(full, positions, q, k), scores(block, positions, q, k))


def test_circulant_rates_start_on_the_spectrum_and_feel_the_odd_part_alone() -> None:
    enc = create_encoding("string_circulant", DIM, HEADS, block_size=8)
    assert isinstance(enc, StringCirculant)
    cayley_like = create_encoding("string_cayley", HEADS * 12, HEADS)  # as many planes: 2 blocks of 3
    same(enc.frequencies(), cayley_like.freqs, 1e-6)
    enc.frequencies().square().sum().backward()
    even = enc.c.grad + enc.c.grad[..., -torch.arange(8) % 8]  # c_m + c_(b-m)
    assert even.abs().max() < 1e-6


@pytest.mark.parametrize("name", ["string_cayley", "string_circulant"])
def test_repeated_start_has_one_frequency_for_all_axes(name: str) -> None:
    rates = make(name, noise=0.0, start="repeated").frequencies()
    same(rates[:, :, 0], rates[:, :, 1], 0.0)


# ---------------------------------------------------------------- HARoPE


@pytest.mark.parametrize("variant", ["v1", "v2"])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_harope_starts_as_the_axial_rotation(variant: str, axes: int) -> None:
    enc = create_encoding("harope", 2 * 24, 2, axes, variant=variant)
    axial = create_encoding("rope_axial", 2 * 24, 2, axes, base=10000.0, grid_indexing="ij")
    positions = Positions.of_size((2, 3, 4)[:axes], prefix=1)
    q, k = torch.randn(2, 1, 2, positions.num_tokens, 24)
    same(scores(enc, positions, q, k), scores(axial, positions, q, k), 1e-4)


def test_harope_maps_are_inverse_and_keep_products_at_one_place() -> None:
    enc = make("harope", noise=0.5)
    query, key = enc.maps()
    same(query @ key.mT, torch.eye(WIDTH).expand(1, HEADS, -1, -1), 1e-5)
    q, k = pair(5)
    same(scores(enc, Positions.points(torch.full((5, 2), 7.0)), q, k), q @ k.mT, 1e-4)


def test_harope_variants_agree_where_singular_values_are_one() -> None:
    first, second = (make("harope", noise=0.0, variant=variant) for variant in ("v1", "v2"))
    with torch.no_grad():
        for name in ("A_u", "A_v"):
            getattr(first, name).normal_()
            getattr(second, name).copy_(getattr(first, name))
    positions = Positions.grid(3, 3)
    q, k = pair(9)
    same(scores(first, positions, q, k), scores(second, positions, q, k), 2e-4)
    with torch.no_grad():
        for enc in (first, second):
            enc.sigma.normal_(std=2.0)
    assert (scores(first, positions, q, k) - scores(second, positions, q, k)).abs().max() > 0.1


# ---------------------------------------------------------------- folding into the projections


class Projections(nn.Module):
    """Queries and keys of one block from separate layers, as Hugging Face has them."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(DIM, DIM, bias=bias), nn.Linear(DIM, DIM, bias=bias)

    def logits(self, x: Tensor, enc: mmpe.PositionEncoding, positions: Positions, layer: int) -> Tensor:
        q, k = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj))
        return scores(enc, positions, q, k, layer)


class Fused(nn.Module):
    """One projection of q, k and v, as timm has it."""

    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.qkv = nn.Linear(DIM, (HEADS + 2 * kv_heads) * WIDTH)
        self.q_norm: nn.Module = nn.Identity()

    def logits(self, x: Tensor, enc: mmpe.PositionEncoding, positions: Positions, layer: int) -> Tensor:
        sizes = [heads * WIDTH for heads in (HEADS, self.kv_heads, self.kv_heads)]
        q, k, _ = (t.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for t in self.qkv(x).split(sizes, -1))
        q, k = enc(positions).layer(layer).queries_keys(q, k)
        return (q @ k.repeat_interleave(HEADS // k.shape[1], 1).mT).detach()


@MAPPED
@pytest.mark.parametrize("share_layers", [False, True])
@pytest.mark.parametrize("kind", [Projections, Fused, lambda: Projections(bias=False)], ids=["q k", "qkv", "no bias"])
def test_folding_leaves_the_logits(name: str, share_layers: bool, kind: Any) -> None:
    enc, positions = make(name, depth=2, share_layers=share_layers), Positions.grid(3, 4, prefix=1)
    assert isinstance(enc, MappedRotaryEncoding)
    x, blocks = torch.randn(2, 13, DIM), [kind() for _ in range(2)]
    before = [b.logits(x, enc, positions, i) for i, b in enumerate(blocks)]
    weights = [copy.deepcopy(b.state_dict()) for b in blocks]
    for i in (1, 0):
        enc.fold_(blocks[i], layer=i)
        for j, block in enumerate(blocks):
            same(block.logits(x, enc, positions, j), before[j], 1e-5)
    assert all(not torch.equal(old[key], block.state_dict()[key]) for old, block in zip(weights, blocks, strict=True)
               for key in old)  # fmt: skip
    assert type(enc(positions).layer(1)) is RotaryTerms  # nothing but the rotation is left
    enc.fold_(blocks[1], layer=1)
    same(blocks[1].logits(x, enc, positions, 1), before[1], 1e-5)


@MAPPED
@pytest.mark.parametrize("share_layers", [False, True])
def test_a_folded_state_dict_is_right_in_a_new_encoding(name: str, share_layers: bool) -> None:
    enc, positions = make(name, share_layers=share_layers), Positions.grid(3, 4, prefix=1)
    x, block = torch.randn(2, 13, DIM), Projections()
    before = block.logits(x, enc, positions, 0)
    unfolded = copy.deepcopy(enc.state_dict())
    enc.fold_(block)
    file = io.BytesIO()
    torch.save(enc.state_dict(), file)
    file.seek(0)
    other = create_encoding(name, DIM, HEADS, share_layers=share_layers)
    other.load_state_dict(torch.load(file))
    same(block.logits(x, other, positions, 0), before, 1e-5)
    other.fold_(block)  # type: ignore[operator]
    assert type(other(positions).layer(0)) is RotaryTerms
    same(block.logits(x, other, positions, 0), before, 1e-5)
    # Weights from before the folding bring their matrices back.
    enc.load_state_dict(unfolded)
    assert isinstance(enc(positions).layer(0), MappedRotaryTerms)


def test_folding_with_grouped_queries_needs_shared_heads() -> None:
    positions, x = Positions.grid(3, 4), torch.randn(2, 12, DIM)
    with pytest.raises(ValueError, match="share_heads=True"):
        make("string_cayley").fold_(Fused(kv_heads=1))
    enc, block = make("string_cayley", share_heads=True), Fused(kv_heads=1)
    before = block.logits(x, enc, positions, 0)
    enc.fold_(block)
    same(block.logits(x, enc, positions, 0), before, 1e-5)


def test_a_refused_folding_changes_nothing() -> None:
    enc, block = make("string_cayley"), Fused()
    before = copy.deepcopy(block.state_dict())
    block.q_norm = nn.LayerNorm(WIDTH)
    with pytest.raises(ValueError, match="q_norm stands between"):
        enc.fold_(block)
    with pytest.raises(TypeError, match="fold_into"):
        enc.fold_(nn.Linear(DIM, DIM))
    block.q_norm = nn.Identity()
    block.q_bias = torch.zeros(DIM)
    with pytest.raises(ValueError, match="call fold_into"):
        enc.fold_(block)
    block.q_bias = None
    with pytest.raises(ValueError, match="q projection has 32 rows"):
        enc.fold_into(torch.zeros(32, DIM), torch.zeros(DIM, DIM))
    with pytest.raises(ValueError, match="layer=3"):
        enc.fold_(block, layer=3)
    assert all(torch.equal(block.state_dict()[key], value) for key, value in before.items())
    assert enc.folded == (False,)


def test_a_whole_vision_transformer_folds() -> None:
    from mmpe.models.vit import VisionTransformer

    model = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5, encoding="string_cayley"
    ).eval()
    with torch.no_grad():
        model.encoding.skew.normal_(std=0.3)
    image = torch.rand(1, 3, 32, 48)
    before = model(image)
    for i, block in enumerate(model.blocks):
        model.encoding.fold_(block.attn, layer=i)
    same(model(image), before, 1e-5)


# ---------------------------------------------------------------- wrong options


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("string_cayley", {"start": "random"}, "start='random' must be one of"),
        ("string_cayley", {"base": 0.0}, "base must be greater than 0"),
        ("string_circulant", {"block_size": 2}, "at least 3"),
        ("string_circulant", {"block_size": 5}, "divide head_dim=16"),
        ("harope", {"variant": "v3"}, "variant='v3'"),
        ("harope", {"base": -1.0}, "base must be greater than 0"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_encoding(name, DIM, HEADS, **options)


def test_odd_heads_cannot_rotate_planes() -> None:
    for name in ("string_cayley", "harope"):
        with pytest.raises(ValueError, match="even number of channels"):
            create_encoding(name, 15, 1)


def test_mapped_terms_keep_the_batch_and_head_layout_of_any_strides() -> None:
    """q comes as a permuted view of qkv in every model."""
    enc = make("string_cayley")
    assert isinstance(enc, StringCayley)
    qkv = torch.randn(2, 12, 3, HEADS, WIDTH)
    q, k, _ = qkv.permute(2, 0, 3, 1, 4)
    terms = enc(Positions.grid(3, 4))
    for ours, theirs in zip(terms.queries_keys(q, k), terms.queries_keys(q.contiguous(), k.contiguous()), strict=True):
        same(ours, theirs, 1e-6)
