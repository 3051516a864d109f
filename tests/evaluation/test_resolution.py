"""From the metrics of the tasks to curves by size, and from multiples of a size to evaluation sets."""

from types import SimpleNamespace

import pytest

from mmpe.evaluation.resolution import curves, use_scales


def test_curves_are_sorted_by_size_and_parted_by_rule():
    metrics = [
        {"test/top1@2x": 0.5, "test/top5@2x": 0.9, "test/loss@2x": 1.0},
        {"test/top1@1x": 0.75, "test/top1@1x_scaled": 0.75, "test/top1@2x_scaled": 0.625},
    ]
    found = curves(metrics)
    assert found == {"raw": {1.0: 0.75, 2.0: 0.5}, "scaled": {1.0: 0.75, 2.0: 0.625}}
    assert list(found["raw"]) == [1.0, 2.0]


def test_the_other_task_names_its_accuracy_acc():
    assert curves([{"test/acc@1.5x": 0.5, "test/loss@1.5x": 2.0}]) == {"raw": {1.5: 0.5}}


def test_metrics_of_several_loaders_may_bear_their_number():
    assert curves([{"test/acc@1x/dataloader_idx_0": 0.5}]) == {"raw": {1.0: 0.5}}


def test_metrics_without_an_accuracy_are_named():
    with pytest.raises(ValueError, match="none of top1, acc is among the metrics val/loss"):
        curves([{"val/loss": 1.0}])


def test_sizes_follow_from_multiples_in_whole_patches():
    data = SimpleNamespace(image_size=224, eval_sizes=[], eval_names=[])
    assert use_scales(data, (1.0, 1.25, 2.0), step=16) == {1.0: 224, 1.25: 288, 2.0: 448}
    assert data.eval_sizes == [224, 288, 448]
    assert data.eval_names == ["1x", "1.25x", "2x"]


def test_grids_count_in_cells():
    data = SimpleNamespace(grid_size=8, eval_sizes=[], eval_names=[])
    assert use_scales(data, (1.5, 3.0)) == {1.5: 12, 3.0: 24}


@pytest.mark.parametrize(
    ("scales", "message"), [((1.0, 1.01), "must differ"), ((0.01,), "at least 4")]
)
def test_multiples_that_mean_no_size_of_their_own_are_refused(scales, message):
    with pytest.raises(ValueError, match=message):
        use_scales(SimpleNamespace(image_size=16, eval_sizes=[]), scales, step=4)


def test_data_without_sizes_are_refused():
    with pytest.raises(ValueError, match="SimpleNamespace needs image_size or grid_size"):
        use_scales(SimpleNamespace(), (1.0,))
