"""Class folders: what is found, what is refused, what broken files do, and that augmentations follow the seed."""

import logging

import pytest
import torch
from conftest_images import CLASSES, write_images

from mmpe.datamodules import ImageFolder, ImageTransforms
from mmpe.datamodules.loading import TooManyErrorsError

SMALL = {"image_size": 16, "batch_size": 4, "num_workers": 0}


def test_batches_classes_and_sizes(pictures):
    data = ImageFolder(pictures, eval_sizes=[16, 24], **SMALL)
    assert data.classes == list(CLASSES)
    assert (data.num_classes, data.in_chans) == (3, 3)
    assert (data.eval_sizes, data.eval_names) == ([16, 24], ["16px", "24px"])
    train = list(data.train_dataloader())
    assert len(train) == 30 // 4
    assert train[0]["image"].shape == (4, 3, 16, 16)
    assert train[0]["image"].dtype == torch.float32
    for size, loader in zip(data.eval_sizes, data.val_dataloader(), strict=True):
        batches = list(loader)
        assert {batch["image"].shape[1:] for batch in batches} == {(3, size, size)}
        assert torch.cat([b["label"] for b in batches]).tolist() == [0] * 5 + [1] * 5 + [2] * 5
        assert all(batch["valid"].all() for batch in batches)


def test_augmentations_follow_seed_and_epoch_and_not_the_workers(pictures):
    def images(workers, seed=0, epoch=0):
        data = ImageFolder(pictures, **{**SMALL, "num_workers": workers}, seed=seed)
        loader = data.train_dataloader()
        loader.set_epoch(epoch)
        batches = torch.cat([batch["image"] for batch in loader])
        data.teardown("fit")
        return batches

    reference = images(0)
    assert torch.equal(reference, images(0))
    assert torch.equal(reference, images(2))
    assert not torch.equal(reference, images(0, seed=1))
    assert not torch.equal(reference, images(0, epoch=1))


def test_augmentations_leave_the_models_random_numbers_alone(pictures):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    list(ImageFolder(pictures, **SMALL).train_dataloader())
    assert torch.equal(torch.rand(2), expected)


def test_transforms_reach_timm(pictures):
    calm = ImageTransforms(scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0, color_jitter=0, auto_augment=None, reprob=0)
    data = ImageFolder(pictures, transforms=calm, **SMALL)
    loader = data.train_dataloader()
    one = next(iter(loader))["image"]
    assert torch.equal(one, next(iter(data.train_dataloader()))["image"])
    erased = ImageFolder(pictures, transforms=ImageTransforms(reprob=1.0, remode="const"), **SMALL)
    assert (next(iter(erased.train_dataloader()))["image"] == 0).any()
    names = [type(step).__name__ for step in ImageTransforms(auto_augment="3a").train(16).transforms]
    assert "AugMixAugment" not in names
    assert ImageTransforms(crop_pct=0.5).evaluate(16).transforms[0].size == 32


def test_settings_are_plain_values_in_checkpoints(pictures):
    hparams = dict(ImageFolder(pictures, **SMALL).hparams)
    assert hparams["root"] == str(pictures)
    assert hparams["transforms"]["hflip"] == 0.5
    assert str(ImageFolder(**hparams)) == "ImageFolder(3 classes, evaluated at 16px)"


def test_missing_folder_says_what_was_expected(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*train.*CLASS"):
        ImageFolder(tmp_path, **SMALL)


def test_folder_without_classes(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(FileNotFoundError, match="no class folder in"):
        ImageFolder(tmp_path, **SMALL)


def test_empty_class_folder_is_named_with_the_suffixes_searched(own_pictures):
    (own_pictures / "train" / "dog").mkdir()
    with pytest.raises(FileNotFoundError, match=r"1 of 4 class folders .*dog; searched for .*\.jpg"):
        ImageFolder(own_pictures, **SMALL)


def test_hidden_files_and_folders_are_no_images(own_pictures):
    """Fault: what macOS and notebooks leave beside images stops the run as unreadable, or trains twice."""
    before = len(ImageFolder(own_pictures, **SMALL).train_dataloader())
    ant = own_pictures / "train" / "ant"
    (ant / "._000.png").write_bytes(b"no picture")
    (ant / ".ipynb_checkpoints").mkdir()
    for n in range(40):
        (ant / ".ipynb_checkpoints" / f"{n}-checkpoint.png").write_bytes(b"no picture")
    data = ImageFolder(own_pictures, **SMALL)
    assert len(data.train_dataloader()) == before
    assert sum(len(batch["image"]) for batch in data.train_dataloader()) > 0


def test_class_mismatch_names_missing_and_extra_classes(own_pictures):
    write_images(own_pictures / "train", 1, ("dog",))
    write_images(own_pictures / "val", 1, ("elk",))
    with pytest.raises(ValueError, match=r"missing in .*val: dog; only in .*val: elk"):
        ImageFolder(own_pictures, **SMALL)


def _break(root):
    (root / "train" / "ant" / "000.png").write_bytes(b"no picture")
    whole = (root / "train" / "bee" / "000.png").read_bytes()
    (root / "train" / "bee" / "000.png").write_bytes(whole[: len(whole) // 2])
    (root / "val" / "cat" / "001.jpg").write_bytes(b"")


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_counted_and_replaced(own_pictures, caplog, workers):
    _break(own_pictures)
    data = ImageFolder(own_pictures, image_size=16, batch_size=3, num_workers=workers, on_error="skip")
    loader = data.train_dataloader()
    with caplog.at_level(logging.WARNING, "mmpe.datamodules"):
        first = [batch["image"] for batch in loader]
        assert [len(images) for images in first] == [3] * 4
        assert data.skipped.count == 2
        again = [batch["image"] for batch in loader]
        assert data.skipped.count == 2  # the same file counts once
        val = list(data.val_dataloader()[0])
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert data.skipped.count == 3
    valid = torch.cat([batch["valid"] for batch in val])
    assert valid.tolist() == [True] * 5 + [False]
    assert "000.png" in data.skipped.report()
    assert "UnidentifiedImageError" in caplog.text
    data.teardown("fit")
    assert "3 broken sample(s)" in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_image_stops_the_run_by_default(own_pictures, workers):
    _break(own_pictures)
    data = ImageFolder(own_pictures, image_size=16, batch_size=3, num_workers=workers)
    with pytest.raises(ValueError, match=r"cannot read .*000.png .*on_error='skip'"):
        list(data.train_dataloader())


def test_more_unreadable_images_than_the_limit_stop_the_run(own_pictures):
    _break(own_pictures)
    data = ImageFolder(own_pictures, **SMALL, on_error="skip", max_errors=1)
    with pytest.raises(TooManyErrorsError, match="More than max_errors=1"):
        list(data.train_dataloader())


def test_nothing_but_unreadable_images(own_pictures):
    for path in (own_pictures / "train").rglob("*.*"):
        path.write_bytes(b"")
    data = ImageFolder(own_pictures, **SMALL, on_error="skip")
    with pytest.raises(ValueError, match="10 images drawn in a row are unreadable"):
        list(data.train_dataloader())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "ignore"}, "on_error='ignore' must be 'raise' or 'skip'"),
        ({"eval_sizes": [16, 16]}, "different"),
        ({"eval_sizes": [0]}, "positive"),
        ({"max_errors": -1}, "max_errors=-1"),
        ({"transforms": {"scale": (0.5, 0.1)}}, "shares of the area"),
        ({"transforms": {"crop_pct": 0}}, "crop_pct=0"),
        ({"transforms": {"hflip": 2}}, "hflip=2"),
    ],
)
def test_bad_options(pictures, options, message):
    with pytest.raises(ValueError, match=message):
        ImageFolder(pictures, **{**SMALL, **options})
