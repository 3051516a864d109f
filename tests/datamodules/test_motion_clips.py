"""Rendered clips: real files, the same for the same settings, whose class is in the order of the frames alone."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mmpe.datamodules import MotionClips, VideoReader
from mmpe.datamodules.motion_clips import DIRECTIONS, Scenes, render, write_video

TINY = {"train_clips": 8, "val_clips": 4, "clip_frames": 5, "frames": 4, "batch_size": 4}


def tiny(root: Path, **options) -> MotionClips:
    data = MotionClips(root, **{**TINY, **options})
    data.prepare_data()
    data.setup()
    return data


def test_real_files_make_batches(tmp_path):
    data = tiny(tmp_path, eval_sizes=[32, 48])
    assert (data.classes, data.num_classes) == (["down", "left", "right", "up"], 4)
    assert data.eval_names == ["32px", "48px"]
    assert sorted(path.name for path in (tmp_path / "train" / "left").iterdir()) == ["00001.mp4", "00005.mp4"]
    with VideoReader(tmp_path / "train" / "left" / "00001.mp4") as video:
        assert (len(video), video.size, video.codec, round(video.fps)) == (5, (32, 32), "h264", 12)
    batch = next(iter(data.train_dataloader()))
    assert batch["image"].shape == (4, 3, 4, 32, 32)
    labels = torch.cat([batch["label"] for batch in data.val_dataloader()[0]])
    assert labels.tolist() == [0, 1, 2, 3]


def _place(image: np.ndarray) -> np.ndarray:
    """Where the bright shape is, on a plane whose borders meet, as two angles (rows, columns)."""
    light = image.astype(float).max(-1)
    weight = np.clip(light - light.min() - 0.6 * (light.max() - light.min()), 0, None)
    turn = np.exp(2j * np.pi * np.arange(len(light)) / len(light))
    return np.angle([(weight.sum(1) * turn).sum(), (weight.sum(0) * turn).sum()])


@pytest.mark.parametrize("directions", [4, 8])
def test_the_class_is_the_direction_of_the_motion_in_the_file(tmp_path, directions):
    data = tiny(tmp_path, directions=directions, train_clips=16)
    for path, label in data.train_files:
        with VideoReader(path) as video:
            places = np.array([_place(image) for image in video.frames(range(5))])
        step = np.angle(np.exp(1j * np.diff(places, axis=0))).mean(0)  # (rows, columns), rows count downwards
        angle = np.arctan2(-step[0], step[1])
        expected = DIRECTIONS.index(data.classes[label]) * np.pi / 4
        assert abs(np.angle(np.exp(1j * (angle - expected)))) < 0.35, path


def test_no_frame_tells_the_way():
    """Clips of all classes start alike, and the shape is anywhere in every frame."""
    scenes = Scenes(clip_frames=6)
    starts = [next(scenes.frames("train", 3, direction)) for direction in scenes.classes]
    assert all(np.array_equal(start, starts[0]) for start in starts)
    for frame in (0, 5):
        seen = [list(scenes.frames("train", i, "right"))[frame] for i in range(150)]
        places = np.array([_place(image) for image in seen])
        assert (np.abs(np.exp(1j * places).mean(0)) < 0.2).all()  # uniform around the picture


def test_rendering_is_repeatable_resumable_and_complete(tmp_path):
    scenes = Scenes(train_clips=4, val_clips=4, clip_frames=4)
    assert render(tmp_path / "one", scenes) == 8
    assert render(tmp_path / "one", scenes) == 0
    assert render(tmp_path / "two", scenes) == 8
    files = scenes.files(Path(), "train")
    for path, _ in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes()
    lost, kept = tmp_path / "two" / files[0][0], tmp_path / "two" / files[1][0]
    before, whole = kept.stat().st_mtime_ns, lost.read_bytes()
    lost.unlink()
    assert render(tmp_path / "two", scenes) == 1
    assert lost.read_bytes() == whole
    assert kept.stat().st_mtime_ns == before
    assert not list(tmp_path.rglob(".*"))


def test_a_stopped_encoding_leaves_no_file(tmp_path, monkeypatch):
    scenes = Scenes(train_clips=4, val_clips=4, clip_frames=4)

    def stopped(self, part, index, direction):
        yield np.zeros((32, 32, 3), np.uint8)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Scenes, "frames", stopped)
        with pytest.raises(KeyboardInterrupt):
            render(tmp_path, scenes)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "scenes.json"]
    assert render(tmp_path, scenes) == 8


def test_other_settings_in_the_same_folder_are_refused(tmp_path):
    tiny(tmp_path)
    with pytest.raises(ValueError, match=r"holds clips of other settings: \{'render_seed': 0\}; give another root"):
        tiny(tmp_path, render_seed=1)
    tiny(tmp_path, seed=5)  # of the order, not of the files
    with pytest.raises(FileNotFoundError, match=r"12 clips are missing, the first .*; call prepare_data"):
        MotionClips(tmp_path / "nothing", **TINY).setup()


def test_training_and_validation_show_different_scenes(tmp_path):
    scenes = Scenes(clip_frames=1)
    train, val = (next(scenes.frames(part, 0, "up")) for part in ("train", "val"))
    assert not np.array_equal(train, val)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directions": 6}, "directions=6 must be 4 or 8"),
        ({"clip_size": 33}, "clip_size=33 must be even"),
        ({"speed": (3.0, 9.0)}, r"speed=\(3.0, 9.0\) must satisfy 0 < slowest <= fastest <= 8.0"),
        ({"transforms": {"hflip": 0.5}}, "would exchange left and right"),
        ({"train_clips": 0}, "train_clips=0"),
    ],
)
def test_bad_options(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        MotionClips(tmp_path, **options)


def test_a_video_of_no_frames(tmp_path):
    with pytest.raises(ValueError, match="no frames to write"):
        write_video(tmp_path / "none.mp4", iter(()), 12)
