"""The three-cell experiment: its pictures, its answers, and what models can and cannot learn."""

import json

import pytest
import torch

from mmpe.cli import main
from mmpe.evaluation.three_cell import (
    CHANCE,
    NO_ANSWER,
    QUESTIONS,
    Setting,
    ThreeCellResult,
    answers,
    cells,
    draw_pictures,
    summarise,
    train_and_ask,
)

NAMES = [question.name for question in QUESTIONS]


def picture(*cells_of_abc: tuple[int, int], side: int = 6) -> torch.Tensor:
    tokens = torch.zeros(1, side, side, dtype=torch.int64)
    for mark, cell in enumerate(cells_of_abc, start=1):
        tokens[(0, *cell)] = mark
    return tokens


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        # quadrant, A left of B, A above B, leftmost, middle row, A nearer to B
        (((0, 0), (1, 1), (5, 5)), [0, 1, 1, 0, 1, 1]),
        (((4, 1), (0, 3), (3, 0)), [2, 1, 0, 2, 2, 0]),
        (((2, 5), (2, 0), (2, 2)), [1, 0, NO_ANSWER, 1, NO_ANSWER, 0]),
        (((3, 3), (1, 3), (5, 3)), [3, NO_ANSWER, 0, NO_ANSWER, 0, NO_ANSWER]),
    ],
)
def test_answers_are_right(places, expected):
    assert answers(picture(*places))[0].tolist() == expected


def test_the_middle_of_an_odd_grid_is_in_no_quadrant():
    assert answers(picture((2, 0), (0, 1), (1, 2), side=5))[0, 0] == NO_ANSWER
    assert answers(picture((3, 1), (0, 1), (1, 2), side=5))[0, 0] == 2


def test_pictures_hold_three_different_cells_anywhere():
    tokens = draw_pictures(4000, 4, torch.Generator().manual_seed(0))
    assert torch.equal(tokens.flatten(1).sort(1).values[:, -3:], torch.tensor([[1, 2, 3]]).expand(4000, -1))
    counts = (tokens == 2).sum(0)
    assert counts.min() > 180  # 250 each
    assert counts.max() < 320


def test_guessing_gets_what_the_table_says():
    """No answer is much more frequent than another, so no constant answer beats guessing."""
    right = answers(draw_pictures(20000, 8, torch.Generator().manual_seed(0)))
    for question, column in zip(QUESTIONS, right.T, strict=True):
        counts = torch.bincount(column[column != NO_ANSWER], minlength=question.classes)
        assert float(counts.max() / counts.sum()) < CHANCE[question.name] + 0.02


def test_a_run_is_reproducible_and_leaves_the_random_state_alone():
    setting = Setting(side=4, dim=16, heads=2, depth=1, batch=8, steps=5, pictures=64)
    before = torch.get_rng_state()
    steps = []
    first = train_and_ask("rope_axial", seed=3, setting=setting, on_step=lambda *step: steps.append(step))
    assert torch.equal(torch.get_rng_state(), before)
    assert first.scores == train_and_ask("rope_axial", seed=3, setting=setting).scores
    assert steps == [(5, 5)]
    assert list(first.scores) == NAMES


@pytest.mark.parametrize("name", ["seqpe", "lape", "loope", "augmented", "pe_dropout", "rpe_2d_randomized", "cpe"])
def test_encodings_of_all_sorts_train(name):
    setting = Setting(side=4, dim=16, heads=2, depth=2, batch=8, steps=2, pictures=64)
    options = {"dropout": 0.5, "shift": 1.0} if name == "augmented" else None
    assert 0 <= train_and_ask(name, options, setting=setting).mean() <= 1


def test_without_positions_nothing_can_be_answered_and_with_them_much():
    setting = Setting(side=5, dim=32, heads=2, depth=2, batch=64, steps=150, pictures=512)
    none, rope = (train_and_ask(name, setting=setting) for name in ("none", "rope_axial"))
    assert abs(none.mean() - sum(CHANCE.values()) / len(CHANCE)) < 0.05
    assert rope.mean("direction") > none.mean("direction") + 0.2


def test_tables_summarise_over_seeds():
    results = [ThreeCellResult("a", seed, dict.fromkeys(NAMES, 0.5 + seed / 10), 2.0) for seed in (0, 1)]
    results.append(ThreeCellResult("b", 0, dict.fromkeys(NAMES, 1.0), 4.0))
    header, table = cells(summarise(results))
    assert header[0] == "encoding"
    assert table[0][:2] == ["(guessing)", "25"]
    assert table[1] == ["a", *["55.0 ± 7.1"] * 6, "55.0", "2", "2"]
    assert table[2] == ["b", *["100.0"] * 6, "100.0", "1", "4"]
    assert results[0].mean("absolute") == 0.5


def test_wrong_settings():
    with pytest.raises(ValueError, match="side must be at least 3"):
        Setting(side=2)
    with pytest.raises(ValueError, match="unknown encoding"):
        train_and_ask("rop_axial")


def test_command_line(tmp_path, capsys):
    out = tmp_path / "three.json"
    command = ["evaluate", "three-cell", "--encodings", "none", "rope_axial:base=10", "--steps", "2", "--side", "4"]
    assert main([*command, "--seeds", "2", "--jobs", "1", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "rope_axial:base=10" in shown
    assert "(guessing)" in shown
    results = json.loads(out.read_text())["results"]
    assert [(r["encoding"], r["seed"]) for r in results] == [
        ("none", 0), ("rope_axial:base=10", 0), ("none", 1), ("rope_axial:base=10", 1),
    ]  # fmt: skip
    for wrong, message in (("--steps=0", "--steps"), ("--encodings=rop", "did you mean"), ("--side=2", "side must be")):
        assert main([*command, wrong]) == 2
        assert message in capsys.readouterr().err
