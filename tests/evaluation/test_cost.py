"""Costs are measured in the same blocks; memory is what really lives at once."""

import pytest
import torch

import mmpe
from mmpe.evaluation.cost import LiveMemory, measure
from mmpe.evaluation.peers import installed_peers


def encodings(*names, axes=2):
    return {name: mmpe.create_encoding(name, 32, 2, axes, 2) for name in ("none", *names)}


@pytest.mark.parametrize("backward", [False, True])
def test_costs_are_relative_to_no_encoding(backward):
    costs = measure(
        encodings("rope_mixed", "alibi_2d", "cpe", "pape"), mmpe.Positions.grid(6, 5, prefix=1),
        batch=2, backward=backward, rounds=3,
    )  # fmt: skip
    assert [cost.name for cost in costs] == ["none", "rope_mixed", "alibi_2d", "cpe", "pape"]
    assert costs[0].ratio == 1.0
    assert costs[0].memory_ratio == 1.0
    assert costs[0].parameters == 0
    assert all(cost.milliseconds > 0 and cost.ratio > 0 and cost.mebibytes > 0 for cost in costs)
    assert costs[1].parameters == sum(p.numel() for p in encodings("rope_mixed")["rope_mixed"].parameters())


def test_without_the_baseline_there_is_no_ratio():
    with pytest.raises(ValueError, match="baseline 'none' is not among rope"):
        measure({"rope": mmpe.create_encoding("rope", 32, 2, 2)}, mmpe.Positions.grid(2, 2))


def test_live_memory_counts_new_storage_once_and_forgets_what_is_freed():
    x = torch.zeros(1000)
    with LiveMemory() as memory:
        y = x + 1  # 4000 bytes
        z = y[10:].view(-1)  # no new storage
        del z
        y = y * 2  # 8000 bytes while the old one lives
        assert memory.peak == 8000
        assert memory.live == 4000
        del y
        assert memory.live == 0
        x.add_(1)
    assert memory.peak == 8000


def test_peers_agree_with_ours_on_what_they_compute():
    pytest.importorskip("timm")
    torch.manual_seed(0)
    peers = installed_peers(64, 2, 3, axes=2)
    positions = mmpe.Positions.grid(5, 4, prefix=1)
    q, k = torch.randn(2, 1, 2, 21, 32)
    ours = mmpe.create_encoding("rope_axial", 64, 2, 2, 3, grid_indexing="ij")(positions).queries_keys(q, k)
    theirs = peers["timm rope_axial"](positions).layer(1).queries_keys(q, k)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    mixed = peers["timm rope_mixed"](positions)
    assert not torch.equal(mixed.layer(0).queries_keys(q, k)[0], mixed.layer(1).queries_keys(q, k)[0])


def test_no_peer_where_none_fits():
    assert installed_peers(64, 2, 1, axes=3) == {}
    assert installed_peers(12, 2, 1, axes=2) == {}
