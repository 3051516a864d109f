"""Results over seeds become rows; a row says what was measured and no more."""

import pytest

from mmpe.evaluation.tables import RunResult, Score, cells, markdown, positions_of, summarise


def run(encoding, seed, raw, scaled=None, task="digits"):
    scores = {"raw": raw} | ({"scaled": scaled} if scaled is not None else {})
    return RunResult(task, encoding, seed, scores, seconds=10.0 + seed)


def test_mean_and_sample_deviation_over_seeds():
    score = Score.over([0.9, 0.8])
    assert score.mean == pytest.approx(0.85)
    assert score.std == pytest.approx(0.0707, abs=1e-4)
    assert str(score) == "85.0 ± 7.1"


def test_one_seed_has_no_deviation():
    assert str(Score.over([0.5])) == "50.0"
    assert Score.over([0.5]).std is None


def test_encodings_that_ignore_the_rule_of_positions_get_one_row():
    rows = summarise([run("none", 0, {1.0: 0.5}, {1.0: 0.5}), run("rope", 0, {1.0: 0.5}, {1.0: 0.6})])
    assert [(row.encoding, row.positions) for row in rows] == [("none", "any"), ("rope", "raw"), ("rope", "scaled")]
    assert positions_of(rows) == ["raw", "scaled"]


def test_order_of_appearance_is_kept_and_seeds_are_merged():
    runs = [run("b", 0, {1.0: 0.2}), run("a", 0, {1.0: 0.4}), run("b", 1, {1.0: 0.4})]
    rows = summarise(runs)
    assert [row.encoding for row in rows] == ["b", "a"]
    assert rows[0].scores[1.0] == Score.over([0.2, 0.4])
    assert rows[0].seconds == 10.5


def test_sizes_that_some_seeds_lack_are_summarised_over_the_others():
    rows = summarise([run("a", 0, {1.0: 0.2, 2.0: 0.1}), run("a", 1, {1.0: 0.4})])
    assert (rows[0].scores[1.0].seeds, rows[0].scores[2.0].seeds) == (2, 1)


def test_table_marks_the_best_of_every_column():
    rows = summarise([run("a", 0, {1.0: 0.9, 2.0: 0.1}), run("b", 0, {1.0: 0.8, 2.0: 0.3})])
    header, table = cells(rows)
    assert header == ["encoding", "positions", "1x", "2x", "seeds", "CPU s"]
    assert [row[2:4] for row in table] == [["90.0 *", "10.0"], ["80.0", "30.0 *"]]


def test_markdown_has_one_line_a_row():
    lines = markdown(summarise([run("a", 0, {1.5: 0.9})])).splitlines()
    assert lines[0] == "| encoding | positions | 1.5x | seeds | CPU s |"
    assert lines[2] == "| a | raw | 90.0 * | 1 | 10 |"
    assert len(lines) == 3


def test_result_survives_the_way_through_its_file(tmp_path):
    result = run("rope_axial:base=10", 3, {1.0: 0.5, 1.5: 0.25}, {1.0: 0.5})
    result.save(tmp_path / "result.json")
    assert RunResult.load(tmp_path / "result.json") == result
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"task": "x"}', '{"scores": {}, "colour": 1}'])
def test_a_file_that_is_no_result_says_which(tmp_path, text):
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="result.json is no result"):
        RunResult.load(path)
