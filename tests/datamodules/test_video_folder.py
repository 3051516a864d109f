"""Folders of videos: which frames make a clip, transforms alike over frames, broken files, several views."""

import logging
from pathlib import Path

import clips
import numpy as np
import pytest
import torch

from mmpe.datamodules import VideoFolder, VideoReader, VideoTransforms
from mmpe.datamodules.clip_sampling import ClipSampler
from mmpe.datamodules.loading import TooManyErrorsError, seed_everything

CALM = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "hflip": 0.0}
SMALL = {"image_size": 16, "frames": 4, "stride": 2, "batch_size": 2, "num_workers": 0}


def fill(root: Path, train: int, val: int) -> Path:
    source = clips.write(root, clips.KINDS["h264"], 24).read_bytes()
    short = clips.write(root, clips.KINDS["mpeg4 in avi"], 10).read_bytes()
    for part, count in (("train", train), ("val", val)):
        for name in ("run", "walk"):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                (root / part / name / f"{i}.mp4").write_bytes(source)
        (root / part / "run" / "short.avi").write_bytes(short)
    return root


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with train (4 and 3 videos of two classes) and val (3 and 2). Do not write into it."""
    return fill(tmp_path_factory.mktemp("videos"), 3, 2)


@pytest.fixture
def own_videos(tmp_path: Path) -> Path:
    return fill(tmp_path, 3, 2)


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> VideoReader:
    """60 frames at 25 a second, then 60 at 12.5."""
    times = [*range(60), *range(60, 180, 2)]
    return VideoReader(clips.write(tmp_path_factory.mktemp("video"), clips.KINDS["h264"], 120, times))


def test_batches_classes_and_sizes(videos):
    data = VideoFolder(videos, eval_sizes=[16, 24], eval_frames=6, **SMALL)
    assert (data.classes, data.num_classes, data.in_chans) == (["run", "walk"], 2, 3)
    assert (data.eval_sizes, data.eval_names) == ([16, 24], ["16px", "24px"])
    train = list(data.train_dataloader())
    assert len(train) == 7 // 2
    assert train[0]["image"].shape == (2, 3, 4, 16, 16)
    assert train[0]["image"].dtype == torch.float32
    for size, loader in zip(data.eval_sizes, data.val_dataloader(), strict=True):
        batches = list(loader)
        assert {batch["image"].shape[1:] for batch in batches} == {(3, 6, size, size)}
        assert torch.cat([batch["label"] for batch in batches]).tolist() == [0, 0, 0, 1, 1]
        assert all(batch["valid"].all() for batch in batches)


def test_dense_clips_are_windows_of_the_asked_step(video):
    sampler = ClipSampler(frames=8, stride=3)
    starts = set()
    for seed in range(60):
        torch.manual_seed(seed)
        numbers = sampler.drawn(video)
        assert np.diff(numbers).tolist() == [3] * 7
        assert 0 <= numbers[0] <= 120 - 22
        starts.add(int(numbers[0]))
    assert len(starts) > 30
    assert sampler.fixed(video).tolist() == [[49 + 3 * k for k in range(8)]]
    assert ClipSampler(8, 3, clips=3).fixed(video)[:, 0].tolist() == [0, 49, 98]


def test_a_rate_is_counted_in_seconds_and_not_in_frames(video):
    numbers = ClipSampler(frames=6, fps=5.0, clips=2).fixed(video)
    assert numbers[0].tolist() == [0, 5, 10, 15, 20, 25]  # 25 frames a second
    times = video.timestamps[numbers[1]]
    np.testing.assert_allclose(np.diff(times), 0.2, atol=0.081)  # 12.5 frames a second: within a frame
    assert numbers[1][-1] == 119


def test_uniform_clips_take_one_frame_of_each_part(video):
    sampler = ClipSampler(frames=5, sampling="uniform")
    torch.manual_seed(0)
    drawn = np.array([sampler.drawn(video) for _ in range(40)])
    assert (drawn // 24 == np.arange(5)).all()
    assert len(set(drawn[:, 0])) > 10
    assert sampler.fixed(video).tolist() == [[12, 36, 60, 84, 108]]
    assert ClipSampler(5, sampling="uniform", clips=2).fixed(video)[:, 0].tolist() == [6, 18]
    assert ClipSampler(240, sampling="uniform").fixed(video)[0].tolist() == sorted([*range(120), *range(120)])


@pytest.mark.parametrize("settings", [{"stride": 30}, {"fps": 1.0}])
def test_the_last_frame_of_a_short_video_is_repeated(video, settings):
    numbers = ClipSampler(frames=16, clips=2, **settings).fixed(video)
    assert (numbers[0] == numbers[1]).all()
    assert numbers[0][0] == 0
    assert numbers[0][-1] == numbers[0][-5] == 119


def test_clips_and_augmentations_follow_seed_and_epoch_and_not_the_workers(videos):
    def images(workers, seed=0, epoch=0):
        data = VideoFolder(videos, **{**SMALL, "num_workers": workers}, seed=seed)
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


def test_training_goes_on_where_it_stopped(videos):
    whole = [batch["image"] for batch in VideoFolder(videos, **SMALL).train_dataloader()]
    first = VideoFolder(videos, **SMALL).train_dataloader()
    next(iter(first))
    second = VideoFolder(videos, **SMALL).train_dataloader()
    second.load_state_dict(first.state_dict())
    rest = [batch["image"] for batch in second]
    assert len(rest) == len(whole) - 1
    assert all(torch.equal(one, other) for one, other in zip(rest, whole[1:], strict=True))


@pytest.mark.parametrize(
    "settings", [{}, {"hflip": 1.0}, {"reprob": 1.0, "remode": "const"}, {"auto_augment": "rand-m7-n4-mstd0.5-inc1"}]
)
def test_all_frames_of_a_clip_are_transformed_alike(settings):
    frame = np.random.default_rng(0).integers(0, 255, (40, 52, 3), dtype=np.uint8)
    transform = VideoTransforms(**settings).train(16)
    seen = []
    for seed in range(6):
        seed_everything(seed)
        clip = transform(np.stack([frame] * 5))
        assert clip.shape == (3, 5, 16, 16)
        assert torch.equal(clip, clip[:, :1].expand_as(clip))
        seen.append(clip)
    assert not torch.equal(seen[0], seen[1])


def test_calm_training_is_resizing_and_normalising():
    frames = np.full((2, 8, 8, 3), (10, 20, 30), dtype=np.uint8)
    settings = VideoTransforms(**CALM, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0))
    expected = (torch.tensor([10.0, 20.0, 30.0]) / 255 - torch.tensor(settings.mean)) / torch.tensor(settings.std)
    clip = settings.train(4)(frames)
    torch.testing.assert_close(clip, expected.view(3, 1, 1, 1).expand(3, 2, 4, 4))
    assert torch.equal(settings.evaluate(4)(frames[None])[0], clip)


def test_validation_crops_lie_along_the_longer_side():
    frames = np.zeros((1, 2, 20, 40, 3), dtype=np.uint8)
    frames[..., :] = (np.arange(40) * 6)[None, None, None, :, None]
    settings = VideoTransforms(mean=(0, 0, 0), std=(1, 1, 1))
    left, middle, right = settings.evaluate(20, crops=3)(frames)[:, 0, 0, 0, :] * 255  # one row each
    assert (left.round().tolist(), right.round().tolist()) == (
        [6.0 * i for i in range(20)],
        [6.0 * i for i in range(20, 40)],
    )
    assert middle.round().tolist() == [6.0 * i for i in range(10, 30)]
    standing = settings.evaluate(20, crops=3)(frames.transpose(0, 1, 3, 2, 4))
    assert torch.equal(standing.transpose(-1, -2)[0, 0, 0, 0] * 255, left)
    assert settings.evaluate(10)(frames).shape == (1, 3, 2, 10, 10)
    assert VideoTransforms(crop_pct=0.5).evaluate(10)(frames).shape == (1, 3, 2, 10, 10)


def test_several_views_of_a_video_have_an_axis_of_their_own(videos):
    data = VideoFolder(videos, eval_clips=2, eval_crops=3, **SMALL)
    batch = next(iter(data.val_dataloader()[0]))
    assert batch["image"].shape == (2, 6, 3, 4, 16, 16)
    single = next(iter(VideoFolder(videos, **SMALL).val_dataloader()[0]))
    middle = next(iter(VideoFolder(videos, eval_clips=3, **SMALL).val_dataloader()[0]))
    assert torch.equal(middle["image"][:, 1], single["image"])


def test_clips_hold_the_frames_of_the_video(videos):
    settings = {**SMALL, "image_size": 48, "transforms": VideoTransforms(**CALM, mean=(0, 0, 0), std=(1, 1, 1))}
    data = VideoFolder(videos, **settings)
    shown = next(iter(data.val_dataloader()[0]))["image"][0].permute(1, 2, 3, 0) * 255  # (T, S, S, 3)
    with VideoReader(data.val_files[0][0]) as reader:
        whole = reader.frames(ClipSampler(4, 2).fixed(reader)[0])
    left = (clips.WIDTH - clips.HEIGHT) // 2
    assert np.abs(shown.numpy() - whole[:, :, left : left + 48]).max() <= 1


def _break(root: Path) -> None:
    (root / "train" / "run" / "0.mp4").write_bytes(b"no video")
    whole = (root / "train" / "walk" / "1.mp4").read_bytes()
    (root / "train" / "walk" / "1.mp4").write_bytes(whole[: len(whole) // 2])
    (root / "val" / "walk" / "1.mp4").write_bytes(b"")


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_videos_are_counted_and_replaced(own_videos, caplog, workers):
    _break(own_videos)
    data = VideoFolder(own_videos, **{**SMALL, "num_workers": workers, "batch_size": 7}, on_error="skip")
    with caplog.at_level(logging.WARNING, "mmpe.datamodules"):
        assert [batch["image"].shape for batch in data.train_dataloader()] == [(7, 3, 4, 16, 16)]
        assert data.skipped.count == 2
        val = list(data.val_dataloader()[0])
    assert torch.cat([batch["valid"] for batch in val]).tolist() == [True] * 4 + [False]
    assert data.skipped.count == 3
    data.teardown("fit")
    assert "VideoError" in caplog.text
    assert "3 broken sample(s)" in caplog.text


def test_an_unreadable_video_stops_the_run_by_default(own_videos):
    _break(own_videos)
    with pytest.raises(ValueError, match=r"cannot read .*\.mp4 .*on_error='skip'"):
        list(VideoFolder(own_videos, **SMALL).train_dataloader())
    data = VideoFolder(own_videos, **SMALL, on_error="skip", max_errors=0)
    with pytest.raises(TooManyErrorsError, match="More than max_errors=0"):
        list(data.train_dataloader())


def test_settings_are_plain_values_in_checkpoints(videos):
    hparams = dict(VideoFolder(videos, **SMALL).hparams)
    assert hparams["root"] == str(videos)
    assert hparams["transforms"]["hflip"] == 0.5
    assert str(VideoFolder(**hparams)) == "VideoFolder(2 classes, evaluated at 16px)"


def test_folders_without_videos(tmp_path):
    (tmp_path / "train" / "run").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"no video in 1 of 1 class folders .*run; searched for .*\.mp4"):
        VideoFolder(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "ignore"}, "on_error='ignore' must be 'raise' or 'skip'"),
        ({"sampling": "random"}, "sampling='random' must be 'dense' or 'uniform'"),
        ({"backend": "opencv"}, "backend='opencv' must be"),
        ({"fps": 0.0}, "fps=0.0 must be above 0"),
        ({"eval_crops": 2}, "eval_crops=2 must be 1 or 3"),
        ({"frames": 0}, "frames=0"),
        ({"eval_clips": 0}, "eval_clips=0"),
        ({"eval_sizes": [16, 16]}, "different"),
        ({"transforms": {"scale": (0.5, 0.1)}}, "shares of the area"),
        ({"transforms": {"hflip": 2}}, "hflip=2"),
        ({"transforms": {"crop_pct": 0}}, "crop_pct=0"),
        ({"transforms": {"auto_augment": "3a"}}, "must be a RandAugment policy"),
        ({"transforms": {"interpolation": "cubic"}}, "must be 'bilinear' or 'bicubic'"),
    ],
)
def test_bad_options(videos, options, message):
    with pytest.raises(ValueError, match=message):
        VideoFolder(videos, **{**SMALL, **options})
