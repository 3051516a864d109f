"""The digits: split, sizes, crops, and what is asked of them wrongly."""

import sys

import pytest
import torch

from mmpe.datamodules import Digits
from mmpe.datamodules.digits import load_digits, resized_crops


@pytest.fixture(scope="module")
def data() -> Digits:
    digits = Digits()
    digits.setup("fit")
    return digits


def test_split_is_1297_and_500_without_overlap_and_fixed(data):
    train, val = data._splits["train"], data._splits["val"]
    assert (len(train[1]), len(val[1])) == (1297, 500)
    images, _ = load_digits()
    everything = torch.cat([train[0], val[0]]).flatten(1)
    assert sorted(everything.tolist()) == sorted(images.flatten(1).tolist())
    other = Digits(seed=5)
    other.setup()
    assert torch.equal(other._splits["val"][0], val[0])
    moved = Digits(split_seed=1)
    moved.setup()
    assert not torch.equal(moved._splits["val"][0], val[0])


def test_validation_shows_the_same_pictures_at_every_size(data):
    assert data.eval_names == ["1x", "1.5x", "2x", "3x"]
    assert data.eval_sizes == [16, 24, 32, 48]
    assert (data.num_classes, data.in_chans, data.image_size) == (10, 1, 16)
    labels = []
    for size, loader in zip(data.eval_sizes, data.val_dataloader(), strict=True):
        batches = list(loader)
        assert all(batch["valid"].all() for batch in batches)
        assert {batch["image"].shape[1:] for batch in batches} == {(1, size, size)}
        labels.append(torch.cat([batch["label"] for batch in batches]))
    assert len(labels[0]) == 500
    assert all(torch.equal(one, labels[0]) for one in labels)


def test_pixels_are_normalised(data):
    images, labels = load_digits()
    assert abs(images.mean()) < 0.01
    assert abs(images.std() - 1) < 0.01
    assert labels.dtype == torch.int64


def test_training_batches_are_cropped_and_differ_between_epochs(data):
    loader = data.train_dataloader()
    first = list(loader)
    assert len(first) == len(loader) == 10
    assert first[0]["image"].shape == (128, 1, 16, 16)
    assert first[0]["image"].isfinite().all()
    loader.set_epoch(1)
    assert not torch.equal(first[0]["label"], next(iter(loader))["label"])
    seen = torch.cat([batch["label"] for batch in first])
    assert len(seen) == 1280


def test_crops_stay_inside_and_never_mirror():
    ramp = torch.linspace(0, 1, 16).expand(200, 1, 16, 16)  # grows to the right
    crops = resized_crops(ramp, torch.rand(200, 4))
    assert (crops.diff(dim=-1) > -1e-6).all()
    assert crops.min() >= 0
    assert crops.max() <= 1
    spans = (crops[..., -1] - crops[..., 0]).amax((1, 2))
    assert spans.min() < 0.65
    assert spans.max() > 0.9


def test_crop_of_the_whole_picture_is_the_picture():
    images = torch.rand(3, 1, 16, 16)
    draws = torch.tensor([[1.0, 0.5, 0.3, 0.9]] * 3)  # area 1, aspect 1: the place does not matter
    torch.testing.assert_close(resized_crops(images, draws), images, atol=1e-5, rtol=1e-5)


def test_without_augmentation_training_shows_whole_pictures():
    plain = Digits(augment=False, image_size=8)
    plain.setup()
    batch = next(iter(plain.train_dataloader()))
    pool = {tuple(row) for row in plain._splits["train"][0].flatten(1).tolist()}
    assert all(tuple(row) in pool for row in batch["image"].flatten(1).tolist())


def test_the_models_random_numbers_are_left_alone(data):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    for _ in data.train_dataloader():
        pass
    for _ in data.val_dataloader()[0]:
        pass
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scales": []}, "positive multiples"),
        ({"scales": [1.0, -2.0]}, "positive multiples"),
        ({"scales": [1.0, float("nan")]}, "positive multiples"),
        ({"scales": [float("inf")]}, "positive multiples"),
        ({"scales": [1.0, 1.0]}, "twice"),
        ({"image_size": 0}, "image_size=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"split_seed": -1}, "split_seed=-1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Digits(**options)


def test_batch_larger_than_the_data():
    data = Digits(batch_size=2000)
    data.setup()
    with pytest.raises(ValueError, match="1297 training samples do not fill one global batch of 2000"):
        data.train_dataloader()


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install mmpe\[demo\]"):
        Digits().setup()


def test_settings_are_plain_values_in_checkpoints():
    assert dict(Digits(scales=[1.0, 2.0], seed=3).hparams)["seed"] == 3
