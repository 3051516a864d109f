"""RoPE++: imaginary heads, and blocks that take another number of heads."""

import pytest
import timm
import torch

import mmpe
from mmpe.encodings.rope_pp import quarter_turn_back
from mmpe.evaluation.cost import measure
from mmpe.integrations.timm import TimmRope, set_position_encoding
from mmpe.models.vit import VisionTransformer


@pytest.mark.parametrize("half", [False, True])
def test_the_imaginary_query_is_a_quarter_turn_behind(half: bool):
    positions = mmpe.Positions.grid(3, 4, prefix=1)
    enc = mmpe.create_encoding("rope_pp", 32, 2, axes=2, half=half)
    q, k = torch.randn(1, 2, 13, 16), torch.randn(1, 1, 13, 16)
    turned_q, turned_k = enc(positions).queries_keys(q, k)
    real, imaginary = turned_q.unflatten(1, (2, 2)).unbind(2)
    plain = mmpe.create_encoding("rope_axial", 32, 2, axes=2, half=half, grid_indexing="ij")(positions)
    for ours, theirs in zip((real, turned_k), plain.queries_keys(q, k), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    torch.testing.assert_close(imaginary.norm(dim=-1), q.norm(dim=-1))
    assert (imaginary * real).sum(-1).abs().max() < 1e-5
    twice = quarter_turn_back(quarter_turn_back(q, half), half)
    assert torch.equal(twice, -q)


def test_the_imaginary_score_of_equal_content_is_odd_in_the_offset():
    q = torch.randn(1, 1, 1, 16).expand(-1, -1, 7, -1)
    turned_q, turned_k = mmpe.create_encoding("rope_pp", 16, 1, axes=1)(mmpe.Positions.line(7)).queries_keys(q, q)
    scores = turned_q[:, 1] @ turned_k[:, 0].mT
    torch.testing.assert_close(scores, -scores.mT, atol=1e-5, rtol=0)
    assert scores.abs().max() > 0.1


@pytest.mark.parametrize(("mode", "rows", "columns"), [("ec", 3 * 32, 64), ("eh", 3 * 16, 32)])
def test_backbones_make_room_for_the_heads(mode: str, rows: int, columns: int):
    model = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=3, encoding="ape_sincos+rope_pp",
        encoding_options={"mode": mode},
    )  # fmt: skip
    attention = model.blocks[1].attn
    assert attention.qkv.weight.shape == (rows, 32)
    assert attention.proj.weight.shape == (32, columns)
    out = model(torch.randn(2, 3, 16, 24))
    out.sum().backward()
    assert out.shape == (2, 3)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in attention.parameters())


def test_costs_are_measured_in_blocks_that_fit():
    encodings = {name: mmpe.create_encoding(name, 32, 2, axes=1) for name in ("none", "rope_pp")}
    plain, double = measure(encodings, mmpe.Positions.line(8), rounds=1, batch=1)
    assert double.mebibytes > plain.mebibytes


def test_what_cannot_take_more_heads_says_so():
    with pytest.raises(ValueError, match="rope_pp changes the number of heads.*alibi_2d"):
        mmpe.create_encoding("rope_pp+alibi_2d", 32, 2, axes=2)
    with pytest.raises(ValueError, match="heads=3 is odd"):
        mmpe.create_encoding("rope_pp", 33, 3, axes=2, mode="eh")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    with pytest.raises(ValueError, match="changes the number of heads"):
        set_position_encoding(model, "rope_pp")
    for name in ("rope_pp", "rove"):
        with pytest.raises(ValueError, match="no more"):
            TimmRope(mmpe.create_encoding(name, 32, 2, axes=2))
