"""Pictures are figures without a window: what they show is checked, and that they can be written."""

import subprocess
import sys

import matplotlib
import matplotlib.figure
import pytest
import torch

import mmpe
from mmpe import plots
from mmpe.evaluation.tables import RunResult, summarise


def encoding(name, axes=2, depth=2, **options):
    return mmpe.create_encoding(name, dim=64, heads=2, axes=axes, depth=depth, **options)


def rows(*names, way="raw"):
    return summarise(RunResult("t", n, s, {way: {1.0: 0.9, 2.0: 0.5 + s / 10}}) for n in names for s in (0, 1))


def written(figure, path):
    figure.savefig(path)
    return path.stat().st_size > 1000


def test_importing_plots_does_not_load_matplotlib():
    code = "import sys, mmpe.plots; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_frequencies_show_each_turning_plane_once_per_axis(tmp_path):
    values = encoding("rope_axial").frequencies()  # (2, 16): one half turns along h, the other along w
    figure = plots.frequencies(values)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert set(lines) == {"along h", "along w"}
    assert [len(line.get_ydata()) for line in lines.values()] == [8, 8]
    assert max(lines["along h"].get_ydata()) == pytest.approx(1.0)
    assert figure.axes[0].get_yscale() == "log"
    assert written(figure, tmp_path / "f.png")


def test_frequency_plane_has_a_point_for_every_plane_of_every_head(tmp_path):
    values = encoding("rope_mixed").frequencies()[0]  # (H, 2, F)
    figure = plots.frequency_plane(values)
    lines = [line for line in figure.axes[0].lines if str(line.get_label()).startswith("head")]
    assert [len(line.get_xdata()) for line in lines] == [values.shape[-1]] * 2
    torch.testing.assert_close(torch.as_tensor(lines[0].get_xdata()), values[0, 1].detach())
    assert written(figure, tmp_path / "f.svg")


def test_frequency_plane_of_other_axes_is_refused():
    with pytest.raises(ValueError, match="draws two axes"):
        plots.frequency_plane(torch.ones(3, 8))


@pytest.mark.parametrize("name", ["none", "ape_learned", "alibi_2d", "rope_mixed", "cpe", "pape", "ape_sincos+rope"])
def test_attention_decay_draws_a_map_for_every_head(name, tmp_path):
    figure = plots.attention_decay(encoding(name), mmpe.Positions.grid(5, 7, prefix=1), layer=1)
    maps = [axes.images[0] for axes in figure.axes if axes.images]
    assert [image.get_array().shape for image in maps] == [(5, 7), (5, 7)]
    assert written(figure, tmp_path / "a.png")


def test_attention_decay_falls_with_distance_for_a_distance_bias():
    figure = plots.attention_decay(encoding("alibi_2d"), mmpe.Positions.grid(7, 7), token=(3, 3))
    values = torch.as_tensor(figure.axes[0].images[0].get_array())
    assert values[3, 3] == values.max() == 0
    assert values[3, 3] > values[3, 4] > values[3, 5] > values[3, 6]
    torch.testing.assert_close(values, values.T)


def test_axial_attention_is_constant_where_only_prefix_or_nothing_moves():
    values = plots.scores(encoding("none"), mmpe.Positions.grid(3, 3, prefix=2))
    assert values.shape == (1, 2, 9, 9)
    torch.testing.assert_close(values, values.mean().expand_as(values))


def test_a_video_is_drawn_in_the_frame_of_its_token_and_a_line_as_a_row():
    video = plots.attention_decay(encoding("pape", axes=3), mmpe.Positions.video(3, 4, 5), token=(2, 0, 0))
    assert video.axes[0].images[0].get_array().shape == (4, 5)
    line = plots.attention_decay(encoding("rope", axes=1), mmpe.Positions.line(9))
    assert line.axes[0].images[0].get_array().shape == (1, 9)


@pytest.mark.parametrize("name", ["ape_sincos", "rope_axial"])
def test_similarity_of_a_token_to_itself_is_one_and_the_highest(name, tmp_path):
    figure = plots.similarity(encoding(name), mmpe.Positions.grid(6, 6))
    maps = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert len(maps) == 9
    assert maps[0][0, 0] == pytest.approx(1.0, abs=1e-5)
    assert all(values.max() <= 1 + 1e-5 for values in maps)
    assert written(figure, tmp_path / "s.png")


def test_tokens_off_the_grid_and_loose_points_are_refused():
    with pytest.raises(ValueError, match=r"token \(9, 0\) is not on the grid \(4, 4\)"):
        plots.attention_decay(encoding("rope_axial"), mmpe.Positions.grid(4, 4), token=(9, 0))
    with pytest.raises(ValueError, match="fill a grid"):
        plots.attention_decay(encoding("rope_axial"), mmpe.Positions.points(torch.rand(5, 2)))


def test_given_axes_are_drawn_on_and_no_figure_is_made():
    figure = matplotlib.figure.Figure()
    first, second = figure.subplots(1, 2)
    assert plots.extrapolation(rows("a"), ax=first) is figure
    assert plots.attention_decay(encoding("alibi_2d"), mmpe.Positions.grid(3, 3), ax=[first, second]) is figure
    with pytest.raises(ValueError, match="has 2 panels, ax holds 1"):
        plots.attention_decay(encoding("alibi_2d"), mmpe.Positions.grid(3, 3), ax=first)


def test_extrapolation_draws_means_in_per_cent_against_size(tmp_path):
    figure = plots.extrapolation(rows("a", "b"), title="curves")
    lines = figure.axes[0].lines
    assert [line.get_label() for line in lines] == ["a", "b"]
    assert list(lines[0].get_xdata()) == [1.0, 2.0]
    assert list(lines[0].get_ydata()) == pytest.approx([90.0, 55.0])
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 2
    assert written(figure, tmp_path / "e.png")


def test_more_encodings_than_colours_still_differ():
    names = [f"e{i}" for i in range(20)]
    lines = plots.extrapolation(rows(*names)).axes[0].lines
    assert len({(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}) == 20


def test_an_encoding_looks_the_same_in_every_panel(tmp_path):
    figure = plots.extrapolation_panels([("one", rows("a", "b")), ("two", rows("b", "c"))])
    colours = {}
    for axes in figure.axes:
        for line in axes.lines:
            colours.setdefault(line.get_label(), set()).add(line.get_color())
    assert set(colours) == {"a", "b", "c"}
    assert all(len(found) == 1 for found in colours.values())
    assert written(figure, tmp_path / "p.png")


def test_no_window_and_no_pyplot_figure_is_opened():
    before = matplotlib.get_backend()
    plots.extrapolation(rows("a"))
    assert matplotlib.get_backend() == before
    if "matplotlib.pyplot" in sys.modules:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == []
