"""The synthetic tasks against a slow, obvious reading of their rules, and the reference levels of the partner task."""

from collections import Counter

import pytest
import torch

from mmpe.datamodules import PartnerGrids, grids


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def partner_by_hand(grid: list[list[int]]) -> list[list[int]]:
    directions = [(-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 1), (1, -1), (1, 0), (1, 1)]
    size, labels = len(grid), [[-100] * len(grid) for _ in grid]
    for y in range(size):
        for x in range(size):
            near = [
                (j - y, i - x)
                for j in range(max(0, y - 2), min(size, y + 3))
                for i in range(max(0, x - 2), min(size, x + 3))
                if grid[j][i] == grids.PARTNER
            ]
            if grid[y][x] == grids.SEEKER and len(near) == 1:
                dy, dx = near[0]
                labels[y][x] = directions.index(((dy > 0) - (dy < 0), (dx > 0) - (dx < 0)))
    return labels


@pytest.mark.parametrize("size", [3, 8, 11])
def test_partner_labels_follow_the_rule(size):
    tokens, labels = grids.partner(20, size, seeded())
    assert labels.tolist() == [partner_by_hand(grid) for grid in tokens.tolist()]
    assert (labels != grids.IGNORED).any()


def test_partner_shares_of_the_tokens():
    tokens, _ = grids.partner(400, 24, seeded())
    shares = torch.bincount(tokens.flatten(), minlength=4) / tokens.numel()
    torch.testing.assert_close(shares, torch.tensor([0.64, 0.20, 0.06, 0.10]), atol=0.005, rtol=0)


def test_partner_reference_levels():
    """A constant answer reaches 0.16; the best answer from the distance alone reaches 0.25."""
    tokens, labels = grids.partner(4000, 8, seeded())
    asked = labels != grids.IGNORED
    answers = labels[asked]
    assert torch.bincount(answers, minlength=8).max() / len(answers) == pytest.approx(0.16, abs=0.01)
    here = (tokens == grids.PARTNER).float()[:, None]
    offset = torch.arange(-2, 3)
    squares = (offset[:, None] ** 2 + offset**2).float()
    distance = torch.nn.functional.conv2d(here, squares[None, None], padding=2)[:, 0][asked].round().long()
    by_distance: dict[int, Counter] = {}
    for far, answer in zip(distance.tolist(), answers.tolist(), strict=True):
        by_distance.setdefault(far, Counter())[answer] += 1
    best = sum(counter.most_common(1)[0][1] for counter in by_distance.values()) / len(answers)
    assert best == pytest.approx(0.25, abs=0.015)


def test_relloc_has_one_of_each_and_the_larger_offset_decides():
    tokens, labels = grids.relloc(500, 6, seeded())
    assert set(labels.tolist()) == {0, 1, 2, 3}
    for grid, label in zip(tokens, labels.tolist(), strict=True):
        (a,), (b,) = (grid == grids.A).nonzero().tolist(), (grid == grids.B).nonzero().tolist()
        dy, dx = a[0] - b[0], a[1] - b[1]
        assert abs(dy) != abs(dx)
        expected = ("left" if dx < 0 else "right") if abs(dx) > abs(dy) else ("above" if dy < 0 else "below")
        assert grids.DIRECTIONS[label] == expected
    assert tokens.max() == grids.SYMBOLS - 1


def test_relloc_mirrored_and_transposed_grids_change_class():
    """What forbids an isotropic bias to exceed chance: the same distances, another answer."""
    tokens, labels = grids.relloc(50, 6, seeded())
    for grid, label in zip(tokens, labels.tolist(), strict=True):
        (a,), (b,) = ((grid.T == s).nonzero().tolist() for s in (grids.A, grids.B))
        dy, dx = a[0] - b[0], a[1] - b[1]
        transposed = int(dx > 0) if abs(dx) > abs(dy) else 2 + int(dy > 0)
        assert transposed == (label + 2) % 4


def test_count_counts_and_is_balanced():
    tokens, labels = grids.count(1200, 6, seeded())
    assert torch.equal((tokens == grids.A).sum((1, 2)), labels)
    assert not (tokens == grids.B).any()
    assert torch.bincount(labels, minlength=6).min() > 150


def test_three_always_has_three_and_only_rows_are_positive():
    tokens, labels = grids.three(600, 6, seeded())
    assert ((tokens == grids.A).sum((1, 2)) == 3).all()
    kinds = Counter()
    for grid, label in zip(tokens, labels.tolist(), strict=True):
        cells = (grid == grids.A).nonzero().tolist()
        row = cells[0][0] == cells[2][0] and cells[2][1] - cells[0][1] == 2
        column = len({x for _, x in cells}) == 1 and cells[2][0] - cells[0][0] == 2
        assert label == int(row)
        kinds["row" if row else "column" if column else "scattered"] += 1
    assert 250 < kinds["row"] < 350
    assert kinds["column"] > 100
    assert kinds["scattered"] > 100


def test_scattered_on_the_smallest_grid_ends():
    tokens, labels = grids.three(300, 3, seeded())
    assert ((tokens == grids.A).sum((1, 2)) == 3).all()
    assert set(labels.tolist()) == {0, 1}


@pytest.mark.parametrize("task", [grids.partner, grids.relloc, grids.count, grids.three])
def test_same_seed_same_grids_and_bad_sizes(task):
    for one, other in zip(task(5, 6, seeded(3)), task(5, 6, seeded(3)), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="size=1"):
        task(5, 1, seeded())
    with pytest.raises(ValueError, match="number=0"):
        task(0, 6, seeded())


def test_datamodule_batches_names_and_seeds():
    data = PartnerGrids(steps_per_epoch=3, eval_samples=10, eval_sizes=[8, 12])
    loader = data.train_dataloader()
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append(list(loader))
    assert [len(batches) for batches in epochs] == [3, 3]
    assert epochs[0][0]["tokens"].shape == epochs[0][0]["label"].shape == (16, 8, 8)
    assert epochs[0][0]["tokens"].dtype == epochs[0][0]["label"].dtype == torch.int64
    seen = [batch["tokens"] for batches in epochs for batch in batches]
    assert not any(torch.equal(seen[i], seen[j]) for i in range(6) for j in range(i))
    again = PartnerGrids(steps_per_epoch=3, eval_samples=10, eval_sizes=[8, 12])
    assert torch.equal(next(iter(again.train_dataloader()))["tokens"], seen[0])
    other = PartnerGrids(steps_per_epoch=3, seed=1)
    assert not torch.equal(next(iter(other.train_dataloader()))["tokens"], seen[0])
    assert (data.eval_sizes, data.eval_names, data.num_classes, data.num_tokens) == ([8, 12], ["8x8", "12x12"], 8, 4)
    for size, loader in zip(data.eval_sizes, data.val_dataloader(), strict=True):
        batches = list(loader)
        assert sum(len(batch["tokens"]) for batch in batches) == 10
        assert batches[0]["tokens"].shape[1:] == (size, size)
        assert all(batch["valid"].all() for batch in batches)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid_size": 1}, "grid_size=1"),
        ({"eval_sizes": []}, "eval_sizes"),
        ({"eval_sizes": [8, 8]}, "different"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"steps_per_epoch": 0}, "steps_per_epoch=0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_options_of_the_datamodule(options, message):
    with pytest.raises(ValueError, match=message):
        PartnerGrids(**options)
