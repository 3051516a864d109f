"""LaPE: the chain of norms, the base, and that backbones add it where attention reads."""

import pytest
import torch
import torch.nn.functional as F

import mmpe
from mmpe.evaluation.cost import Block, run_blocks
from mmpe.models.vit_blocks import Block as VitBlock

POSITIONS = mmpe.Positions.grid(3, 4, prefix=1)


def lape(depth=3, **options):
    enc = mmpe.create_encoding("lape", 24, 3, depth=depth, **options).eval()
    with torch.no_grad():
        enc.weight.add_(torch.randn_like(enc.weight))
        enc.bias.add_(torch.randn_like(enc.bias))
    return enc


def added(enc, positions=POSITIONS):
    zeros = torch.zeros(1, positions.num_tokens, enc.dim)
    return [enc(positions).layer(i).inputs(zeros) for i in range(enc.depth)]


def test_each_norm_is_on_top_of_the_one_before():
    enc = lape(grid_size=(3, 4), prefix=1)
    expected = enc.base.table
    for pe, weight, bias in zip(added(enc), enc.weight, enc.bias, strict=True):
        expected = F.layer_norm(expected, (24,), weight, bias, 1e-6)
        torch.testing.assert_close(pe, expected)


def test_tokens_are_left_alone():
    enc, x = lape(), torch.randn(2, 13, 24)
    assert all(torch.equal(enc.embed(x, POSITIONS, layer), x) for layer in range(3))


@pytest.mark.parametrize("base", ["ape_learned", "ape_sincos", "fourier_learned", "ape_sincos+ape_learned"])
def test_wraps_any_embedding_of_positions(base):
    enc = lape(base=base)
    first, last = added(enc)[0], added(enc)[-1]
    assert first.shape == (1, 13, 24)
    assert (first[:, 1:] - first[:, 1:2]).abs().max() > 0.1
    assert (last - first).abs().max() > 0.1


def test_options_reach_the_base():
    enc = lape(base="ape_learned", grid_size=(5, 6), prefix=2, base_options={"std": 0.5})
    assert (enc.base.grid_size, enc.base.prefix, enc.base.std) == ((5, 6), 2, 0.5)


@pytest.mark.parametrize("base", ["rope_axial", "cpe", "loope", "none", "ape_sincos+cpe"])
def test_refuses_what_is_no_embedding_of_positions(base):
    with pytest.raises(ValueError, match="lape normalises an embedding"):
        mmpe.create_encoding("lape", 24, 3, base=base)


def test_a_zero_table_with_fresh_norms_is_no_encoding():
    enc = mmpe.create_encoding("lape", 24, 3, depth=3, grid_size=(3, 4), prefix=1)
    torch.nn.init.zeros_(enc.base.table)
    assert all(torch.equal(pe, torch.zeros_like(pe)) for pe in added(enc))


def test_terms_of_all_blocks_are_not_those_of_one():
    with pytest.raises(ValueError, match="terms of 3 blocks"):
        lape()(POSITIONS).inputs(torch.zeros(1, 13, 24))


@pytest.mark.parametrize("kind", ["bench", "vit"])
def test_blocks_add_it_to_what_attention_reads(kind):
    """The value path reads it too: x + Attn(LN(x) + PE), with all of q, k and v from the sum."""
    enc, x = lape(depth=1), torch.randn(2, 13, 24)
    pe = added(enc)[0]
    if kind == "bench":
        block = Block(24, 3)
        found = run_blocks(torch.nn.ModuleList([block]), enc, x, POSITIONS)
    else:
        block = VitBlock(24, 3, torch.nn.LayerNorm)
        found = block(x, lambda h: enc(POSITIONS).layer(0))
    h = block.norm1(x) + pe
    qkv, proj = (block.qkv, block.proj) if kind == "bench" else (block.attn.qkv, block.attn.proj)
    q, k, v = qkv(h).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    expected = x + proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(found, expected + block.mlp(block.norm2(expected)), atol=1e-5, rtol=0)


def test_timm_models_add_it_too():
    timm = pytest.importorskip("timm")
    from mmpe.integrations.timm import set_position_encoding

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3).eval()
    set_position_encoding(model, "lape")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        before = model(images)
        model.encoding.base.table.add_(torch.randn_like(model.encoding.base.table))
        assert (model(images) - before).abs().max() > 1e-4
        model.encoding.weight.zero_()
        plain = model(images)
        model.encoding.base.table.zero_()
        torch.testing.assert_close(model(images), plain)
