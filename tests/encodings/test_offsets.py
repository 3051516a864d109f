"""Biases that depend on offsets: the lookup beside the differences written out, and what blocks share."""

import pytest
import torch

import mmpe
from mmpe.encodings.offsets import (
    PATCH_TO_PREFIX,
    PREFIX_TO_PATCH,
    PREFIX_TO_PREFIX,
    RESERVED,
    OffsetBias,
    offsets_of,
    pair_offsets,
)
from mmpe.registry import encoding_class

LOOKED_UP = [n for n in mmpe.list_encodings() if issubclass(encoding_class(n), OffsetBias)]
KEPT = torch.tensor([[0, 5, 7, 11], [1, 2, 3, 10]])


def differences(positions):
    return positions.coords[..., :, None, :] - positions.coords[..., None, :, :]


def laid_out(offsets, prefix):
    rows = torch.cat([offsets.vectors.new_full((RESERVED, offsets.vectors.shape[1]), float("nan")), offsets.vectors])
    return offsets.of_pairs(rows)[..., prefix:, prefix:, :]


@pytest.mark.parametrize("sizes", [(7,), (3, 5), (5, 1), (2, 3, 4)])
def test_few_offsets_of_a_lattice_are_those_of_all_pairs(sizes):
    positions = mmpe.Positions.of_size(sizes, prefix=2)
    offsets = offsets_of(positions)
    assert len(offsets.vectors) == torch.tensor([2 * n - 1 for n in sizes]).prod()
    assert torch.equal(laid_out(offsets, 2), differences(positions))
    assert torch.equal(laid_out(pair_offsets(positions), 2), differences(positions))


def test_lattices_survive_dropped_tokens_and_scaling():
    positions = mmpe.Positions.grid(3, 4, prefix=1)
    for kept in (positions.keep(KEPT), positions.keep(KEPT[0]), positions.scaled_to((6, 2)), positions.to("cpu")):
        offsets = offsets_of(kept)
        assert len(offsets.vectors) == 5 * 7
        torch.testing.assert_close(laid_out(offsets, 1), differences(kept))


def test_moved_tokens_are_no_lattice():
    positions = mmpe.Positions.grid(3, 4)
    moved = positions.with_coords(positions.coords + 0.3 * torch.rand(12, 2))
    assert len(offsets_of(moved).vectors) == 12 * 12
    torch.testing.assert_close(laid_out(offsets_of(moved), 0), differences(moved))


def test_pairs_with_prefix_tokens_have_rows_of_their_own():
    index = offsets_of(mmpe.Positions.grid(2, 2, prefix=2)).index
    assert (index[:2, :2] == PREFIX_TO_PREFIX).all()
    assert (index[:2, 2:] == PREFIX_TO_PATCH).all()
    assert (index[2:, :2] == PATCH_TO_PREFIX).all()
    assert (index[2:, 2:] >= RESERVED).all()


@pytest.mark.parametrize("name", LOOKED_UP)
def test_score_mod_is_the_bias(name):
    torch.manual_seed(0)
    options = {"mode": "bias"} if name == "irpe" else {}
    enc = mmpe.create_encoding(name, 32, 4, depth=2, **options)
    for p in enc.parameters():
        p.data.add_(torch.randn_like(p))
    grid = mmpe.Positions.grid(3, 4, prefix=1)
    for positions in (grid, grid.keep(KEPT)):
        n = positions.num_tokens
        q = torch.zeros(2, 4, n, 8)
        terms = enc(positions).layer(1)
        where = torch.meshgrid(*(torch.arange(size) for size in (2, 4, n, n)), indexing="ij")
        found = terms.score_mod()(torch.zeros(2, 4, n, n), *where)
        torch.testing.assert_close(found, terms.bias(q, q).expand(2, 4, n, n))


def test_terms_of_several_blocks_name_the_way_to_one():
    terms = mmpe.create_encoding("kerple", 32, 4, depth=3)(mmpe.Positions.grid(2, 2))
    q = torch.zeros(1, 4, 4, 8)
    with pytest.raises(ValueError, match=r"terms of 3 blocks: take those of one with terms.layer\(i\)"):
        mmpe.attend(q, q, q, terms)
    with pytest.raises(ValueError, match="there is no block 3"):
        terms.layer(3)
    only = mmpe.create_encoding("kerple", 32, 4)(mmpe.Positions.grid(2, 2))
    assert torch.equal(only.bias(q, q), only.layer(0).bias(q, q))


def test_a_shared_bias_is_laid_out_once():
    enc = mmpe.create_encoding("t5", 32, 4, depth=3)
    terms, q = enc(mmpe.Positions.grid(3, 3)), torch.zeros(1, 4, 9, 8)
    assert terms.layer(0).bias(q, q).data_ptr() == terms.layer(2).bias(q, q).data_ptr()
    assert len(list(enc.parameters())[0]) == 1
