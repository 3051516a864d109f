"""`VideoFolder`: class folders of videos (`ROOT/train/CLASS/*.mp4`, `ROOT/val/CLASS/*.mp4`), read as clips."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from .base import SizedData, check_sizes
from .clip_sampling import ClipSampler, Sampling
from .image_folder import ImageFiles, OnError, check_same_classes, scan_classes
from .loading import EvalLoader, ResumableLoader, check_counts
from .video_reader import VideoBackend, VideoError, VideoReader
from .video_transforms import VideoTransforms

_SUFFIXES = "3g2 3gp asf avi f4v flv gif m1v m2ts m2v m4v mkv mov mp4 mpeg mpg mts ogv rm ts vob webm wmv"
VIDEO_SUFFIXES = frozenset(f".{suffix}" for suffix in _SUFFIXES.split())
DEFAULT_TRANSFORMS = VideoTransforms()


class VideoData(SizedData):
    """Videos in files, read as clips: sampling, transforms, loaders and the policy for broken files.

    Batches: {"image": (B, 3, T, S, S) float32, normalised, "label": (B,) int64}; in validation also "valid": (B,) bool.
    With several clips or crops of a video, validation images are (B, V, 3, T, S, S), whose logits the task averages.

    A subclass lists the files: `classes`, `num_classes`, `train_files` and `val_files`.
    """

    in_chans = 3
    classes: list[str]
    train_files: Sequence[tuple[Path, int]]
    val_files: Sequence[tuple[Path, int]]

    def __init__(
        self,
        frames: int,
        stride: int,
        fps: float | None,
        sampling: Sampling,
        eval_frames: int | None,
        eval_clips: int,
        eval_crops: int,
        image_size: int,
        eval_sizes: Sequence[int] | None,
        batch_size: int,
        eval_batch_size: int | None,
        num_workers: int,
        seed: int,
        transforms: VideoTransforms | Mapping[str, Any],
        backend: VideoBackend,
        on_error: OnError,
        max_errors: int,
    ) -> None:
        eval_frames = frames if eval_frames is None else eval_frames
        check_counts(
            image_size=image_size, frames=frames, stride=stride, eval_frames=eval_frames, eval_clips=eval_clips
        )
        super().__init__(batch_size, eval_batch_size, num_workers, seed, max_errors)
        _check_choices(on_error, sampling, backend, fps, eval_crops)
        self.frames, self.eval_frames, self.eval_crops, self.image_size = frames, eval_frames, eval_crops, image_size
        self.sampler = ClipSampler(frames, stride, fps, sampling)
        self.eval_sampler = ClipSampler(eval_frames, stride, fps, sampling, eval_clips)
        self.eval_sizes = check_sizes([image_size] if eval_sizes is None else eval_sizes)
        self.eval_names = [f"{size}px" for size in self.eval_sizes]
        self.transforms = VideoTransforms(**transforms) if isinstance(transforms, Mapping) else transforms
        self.backend, self.on_error = backend, on_error

    def make_train_loader(self, frozen: bool) -> ResumableLoader:
        size, sampler = self.image_size, self.sampler
        shape, transform = (3, sampler.frames, size, size), self.transforms.train(size)
        pick = sampler.drawn
        source = VideoFiles(self.train_files, pick, transform, shape, self.seed, self.backend, self.on_error, True)
        return self._train_loader_of(source, frozen)

    def make_eval_loader(self, size: int) -> EvalLoader:
        sampler, crops = self.eval_sampler, self.eval_crops
        clip, views = (3, sampler.frames, size, size), sampler.clips * crops
        transform, pick = _Views(self.transforms.evaluate(size, crops)), sampler.fixed
        shape: tuple[int, ...] = clip if views == 1 else (views, *clip)
        source = VideoFiles(self.val_files, pick, transform, shape, self.seed, self.backend, self.on_error, False)
        return EvalLoader(source, self.eval_batch_size, self.num_workers, self.skipped)


class VideoFolder(VideoData):
    """Videos in class folders, `ROOT/train/CLASS/...` and `ROOT/val/CLASS/...`; classes are sorted by name.

    Batches: {"image": (B, 3, T, S, S) float32, normalised, "label": (B,) int64}; in validation also "valid": (B,) bool.
    Training draws one clip of a video. Validation takes the clip in the middle or, with `eval_clips` and `eval_crops`,
    V views of each video: images are then (B, V, 3, T, S, S), whose logits the task averages.

    With `on_error="skip"` an unreadable training video is replaced by another one, drawn from the seed, and an
    unreadable validation video counts for nothing ("valid" is False). `skipped` holds the names and reasons.

    Args:
        root: the folder with `train` and `val`.
        frames: frames of a clip, T; the last frame of a video that is too short is repeated.
        stride: step between them, in frames of the video.
        fps: frames a second of the clip, whatever the rate of the video; where given, `stride` has no effect.
        sampling: "dense" (a window with that step) or "uniform" (one frame from each of T equal parts of the video).
        eval_frames: frames of the clips in validation; `frames` when not given.
        eval_clips: clips of each video in validation, evenly spread.
        eval_crops: crops of each of them: 1 in the middle, or 3 along the longer side.
        image_size: side of the training clips, in pixels.
        eval_sizes: sides of the validation clips; one validation loader each, named "224px", ...; `image_size` alone
            when not given.
        batch_size: training clips of one process in a step.
        eval_batch_size: videos of one process in a validation step; `batch_size` when not given.
        num_workers: worker processes that decode and augment; 0 does so in the training process.
        seed: of the order, the clips and the augmentations.
        transforms: augmentation and preprocessing.
        backend: decoder: "auto", "decord", "pyav" or "torchcodec", see `VideoReader`.
        on_error: what an unreadable video does: "raise" stops the run, "skip" counts it.
        max_errors: with "skip", more different unreadable videos than this stop the run.
    """

    def __init__(
        self,
        root: str | Path,
        frames: int = 16,
        stride: int = 4,
        fps: float | None = None,
        sampling: Sampling = "dense",
        eval_frames: int | None = None,
        eval_clips: int = 1,
        eval_crops: Literal[1, 3] = 1,
        image_size: int = 224,
        eval_sizes: Sequence[int] | None = None,
        batch_size: int = 8,
        eval_batch_size: int | None = None,
        num_workers: int = 4,
        seed: int = 0,
        transforms: VideoTransforms = DEFAULT_TRANSFORMS,
        backend: VideoBackend = "auto",
        on_error: OnError = "raise",
        max_errors: int = 100,
    ) -> None:
        super().__init__(
            frames, stride, fps, sampling, eval_frames, eval_clips, eval_crops, image_size, eval_sizes, batch_size,
            eval_batch_size, num_workers, seed, transforms, backend, on_error, max_errors,
        )  # fmt: skip
        root, transforms = str(root), asdict(self.transforms)  # type: ignore[assignment]  # plain values in checkpoints
        self.save_hyperparameters(logger=False)
        self.root = Path(root)
        train, val = self.root / "train", self.root / "val"
        self.classes, self.train_files = scan_classes(train, VIDEO_SUFFIXES, "video")
        val_classes, self.val_files = scan_classes(val, VIDEO_SUFFIXES, "video")
        check_same_classes(self.classes, val_classes, str(train), str(val))
        self.num_classes = len(self.classes)


class VideoFiles(ImageFiles):
    """Labelled video files, each opened in the process that reads it, and closed after its clips are read.

    Args:
        files: (path, class number).
        pick: from an open video to the frames of its clip (T,), or of its clips (K, T).
        transform: from the frames (..., H, W, 3) uint8 to a tensor of `shape`.
        shape: of a transformed sample.
        seed: of the randomness of `pick` and `transform`, together with epoch and index.
        backend: decoder.
        on_error: policy for unreadable files.
        replace: with "skip", put another sample in place of an unreadable one, otherwise mark it as not valid.
    """

    kind = "video"
    errors = (VideoError, OSError)

    def __init__(
        self,
        files: Sequence[tuple[Path, int]],
        pick: Callable[[VideoReader], np.ndarray],
        transform: Callable[[np.ndarray], Tensor],
        shape: tuple[int, ...],
        seed: int,
        backend: VideoBackend,
        on_error: OnError,
        replace: bool,
    ) -> None:
        super().__init__(files, transform, shape[-1], seed, on_error, replace)
        self.pick, self.backend, self._shape = pick, backend, shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def read(self, path: Path) -> np.ndarray:
        with VideoReader(path, self.backend) as video:
            numbers = self.pick(video)
            return video.frames(numbers.reshape(-1)).reshape(*numbers.shape, *video.size, 3)


class _Views:
    """The transform of validation; a single view has no axis of its own."""

    def __init__(self, transform: Callable[[np.ndarray], Tensor]) -> None:
        self.transform = transform

    def __call__(self, clips: np.ndarray) -> Tensor:
        views = self.transform(clips)
        return views[0] if len(views) == 1 else views


def _check_choices(on_error: str, sampling: str, backend: str, fps: float | None, crops: int) -> None:
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error={on_error!r} must be 'raise' or 'skip'")
    if sampling not in ("dense", "uniform"):
        raise ValueError(f"sampling={sampling!r} must be 'dense' or 'uniform'")
    if backend not in ("auto", "decord", "pyav", "torchcodec"):
        raise ValueError(f"backend={backend!r} must be 'auto', 'decord', 'pyav' or 'torchcodec'")
    if fps is not None and fps <= 0:
        raise ValueError(f"fps={fps} must be above 0")
    if crops not in (1, 3):
        raise ValueError(f"eval_crops={crops} must be 1 or 3")
