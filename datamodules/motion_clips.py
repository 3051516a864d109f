"""`MotionClips`: rendered videos of a moving shape, whose class is the direction of the motion."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import cos, pi, sin
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np

from .clip_sampling import Sampling
from .image_folder import OnError
from .loading import check_counts, mix_seeds
from .video_folder import VideoData
from .video_reader import VideoBackend
from .video_transforms import VideoTransforms

# Counter-clockwise from the right, as on paper: rows count downwards.
DIRECTIONS = ("right", "up_right", "up", "up_left", "left", "down_left", "down", "down_right")
CALM = VideoTransforms(scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0.0, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
RATE = 12  # frames a second
_NORMS = (1.0, 2.0, np.inf)  # diamond, disc, square


@dataclass(frozen=True)
class Scenes:
    """What the rendered clips are like; equal values give equal files.

    Args:
        directions: 4 or 8 classes.
        train_clips: clips to train on, the classes in turn.
        val_clips: clips to validate on.
        clip_frames: frames of a clip.
        clip_size: height and width of a clip, in pixels.
        speed: slowest and fastest motion, in pixels a frame.
        render_seed: of everything that is drawn.
    """

    directions: Literal[4, 8] = 4
    train_clips: int = 1024
    val_clips: int = 256
    clip_frames: int = 8
    clip_size: int = 32
    speed: tuple[float, float] = (6.0, 8.0)
    render_seed: int = 0

    def __post_init__(self) -> None:
        if self.directions not in (4, 8):
            raise ValueError(f"directions={self.directions} must be 4 or 8")
        check_counts(train_clips=self.train_clips, val_clips=self.val_clips, clip_frames=self.clip_frames)
        if self.clip_size < 16 or self.clip_size % 2:
            raise ValueError(f"clip_size={self.clip_size} must be even and at least 16")
        low, high = self.speed
        # Faster than a quarter of the picture a frame, a motion around the border looks like the opposite one.
        if not 0 < low <= high <= self.clip_size / 4:
            raise ValueError(f"speed={self.speed} must satisfy 0 < slowest <= fastest <= {self.clip_size / 4}")

    @property
    def classes(self) -> list[str]:
        """Names of the classes, sorted as those of folders are."""
        return sorted(DIRECTIONS[:: 8 // self.directions])

    def files(self, root: Path, part: str) -> list[tuple[Path, int]]:
        """(path, class number) of every clip of "train" or "val"."""
        names, count = self.classes, self.train_clips if part == "train" else self.val_clips
        numbered = [(i % len(names), i) for i in range(count)]
        return [(root / part / names[label] / f"{i:05d}.mp4", label) for label, i in sorted(numbered)]

    def frames(self, part: str, index: int, direction: str) -> Iterator[np.ndarray]:
        """The frames (H, W, 3) uint8 of a clip: a shape that leaves at one border and comes back at the other.

        Its place is uniform in every frame, so no frame tells the direction, and neither do frames without their order.
        """
        draw = np.random.default_rng(mix_seeds(self.render_seed, part == "val", index))
        size, angle = self.clip_size, DIRECTIONS.index(direction) * pi / 4
        step = draw.uniform(*self.speed) * np.array([-sin(angle), cos(angle)])  # (rows, columns)
        place, radius, norm = draw.uniform(0, size, 2), draw.uniform(0.1, 0.16) * size, draw.choice(_NORMS)
        ground = draw.uniform(0.2, 0.5, 3) + draw.normal(0, 0.03, (size, size, 1))
        colour = draw.uniform(0.6, 1.0, 3)
        for k in range(self.clip_frames):
            cover = _cover(size, place + k * step, radius, norm)  # (S, S, 1)
            yield (255 * np.clip(ground + cover * (colour - ground), 0, 1)).round().astype(np.uint8)


def _cover(size: int, centre: np.ndarray, radius: float, norm: float) -> np.ndarray:
    """Share of every pixel under a shape, on a plane whose borders meet."""
    offsets = [(np.arange(size) - c + size / 2) % size - size / 2 for c in centre]
    distance = np.linalg.norm(np.stack(np.meshgrid(*offsets, indexing="ij")), ord=norm, axis=0)
    return np.clip(radius - distance + 0.5, 0, 1)[..., None]


def render(root: Path, scenes: Scenes) -> int:
    """Write the clips that are not there yet and return how many those were.

    Every file appears whole or not at all, and its contents follow from the settings: several processes may render
    into one folder, and a stopped one is continued.

    Raises:
        ValueError: if the folder holds clips of other settings.
    """
    root.mkdir(parents=True, exist_ok=True)
    note, settings = root / "scenes.json", json.loads(json.dumps(asdict(scenes)))
    if note.is_file():
        found = json.loads(note.read_text())
        if found != settings:
            other = {name: found.get(name) for name in settings if found.get(name) != settings[name]}
            raise ValueError(f"{root} holds clips of other settings: {other}; give another root or remove it")
    else:
        _write_whole(note, lambda path: path.write_text(json.dumps(settings)))
    written = 0
    for part in ("train", "val"):
        for path, label in scenes.files(root, part):
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                frames = scenes.frames(part, int(path.stem), scenes.classes[label])
                _write_whole(path, lambda place, frames=frames: write_video(place, frames, RATE))
                written += 1
    return written


def _write_whole(path: Path, write: Any) -> None:
    unfinished = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        write(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_video(path: Path, frames: Iterator[np.ndarray], rate: int, crf: int = 10) -> None:
    """Encode frames (H, W, 3) uint8 as H.264; the name's ending says in which container.

    Args:
        path: the file.
        frames: all of one size, of even height and width.
        rate: frames a second.
        crf: quality of x264, 0 (lossless) to 51; at 10 hardly a trace of earlier frames is left in a frame.
    """
    # Bit-exact: no date inside, so that equal frames make equal files.
    with av.open(str(path), "w", container_options={"fflags": "+bitexact"}) as container:
        stream = None
        for image in frames:
            if stream is None:
                stream = container.add_stream("libx264", rate=rate)
                stream.height, stream.width, stream.pix_fmt = *image.shape[:2], "yuv420p"
                stream.options = {"crf": str(crf), "preset": "veryfast", "threads": "1"}
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        if stream is None:
            raise ValueError(f"no frames to write to {path}")
        container.mux(stream.encode(None))


class MotionClips(VideoData):
    """Rendered videos of a shape that moves to one of 4 or 8 sides, encoded as H.264 in mp4 files.

    The class is the direction of the motion. The shape leaves at one border and comes back at the other, so a frame
    says nothing about the class. Frames without their order tell the line of the motion but not which way: a model
    without temporal positions cannot exceed one half.

    The files are written into `root` before the first use (`root/train/CLASS/00000.mp4`, ...), some hundred a second.

    Batches: {"image": (B, 3, T, S, S) float32, normalised, "label": (B,) int64}; in validation also "valid": (B,) bool.

    Args:
        root: the folder of the files.
        directions: number of classes, 4 or 8.
        train_clips: videos to train on.
        val_clips: videos to validate on.
        clip_frames: frames of a video.
        clip_size: height and width of a video, in pixels.
        speed: slowest and fastest motion, in pixels a frame.
        render_seed: of the videos.
        frames: frames of a clip, T.
        stride: step between them, in frames of the video.
        sampling: "dense" (a window with that step) or "uniform" (one frame from each of T equal parts of the video).
        eval_frames: frames of the clips in validation; `frames` when not given.
        eval_clips: clips of each video in validation, evenly spread.
        image_size: side of the training clips, in pixels.
        eval_sizes: sides of the validation clips; one validation loader each, named "32px", ...; `image_size` alone
            when not given.
        batch_size: training clips of one process in a step.
        eval_batch_size: videos of one process in a validation step; `batch_size` when not given.
        num_workers: worker processes that decode; 0 does so in the training process.
        seed: of the order and the clips.
        transforms: preprocessing. Flips would change the class.
        backend: decoder: "auto", "decord", "pyav" or "torchcodec", see `VideoReader`.
        on_error: what an unreadable video does: "raise" stops the run, "skip" counts it.
        max_errors: with "skip", more different unreadable videos than this stop the run.
    """

    def __init__(
        self,
        root: str | Path = "data/motion-clips",
        directions: Literal[4, 8] = 4,
        train_clips: int = 1024,
        val_clips: int = 256,
        clip_frames: int = 8,
        clip_size: int = 32,
        speed: tuple[float, float] = (6.0, 8.0),
        render_seed: int = 0,
        frames: int = 4,
        stride: int = 1,
        sampling: Sampling = "dense",
        eval_frames: int | None = None,
        eval_clips: int = 1,
        image_size: int = 32,
        eval_sizes: Sequence[int] | None = None,
        batch_size: int = 48,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        transforms: VideoTransforms = CALM,
        backend: VideoBackend = "auto",
        on_error: OnError = "raise",
        max_errors: int = 0,
    ) -> None:
        super().__init__(
            frames, stride, None, sampling, eval_frames, eval_clips, 1, image_size, eval_sizes, batch_size,
            eval_batch_size, num_workers, seed, transforms, backend, on_error, max_errors,
        )  # fmt: skip
        speed = (float(speed[0]), float(speed[1]))
        self.scenes = Scenes(directions, train_clips, val_clips, clip_frames, clip_size, speed, render_seed)
        if self.transforms.hflip > 0:
            raise ValueError(f"transforms.hflip={self.transforms.hflip} would exchange left and right; set it to 0")
        root, transforms = str(root), asdict(self.transforms)  # type: ignore[assignment]  # plain values in checkpoints
        self.save_hyperparameters(logger=False)
        self.root, self.classes = Path(root), self.scenes.classes
        self.num_classes = len(self.classes)
        self.train_files, self.val_files = (self.scenes.files(self.root, part) for part in ("train", "val"))

    def prepare_data(self) -> None:
        """Render what is missing; Lightning calls it in one process of each node."""
        render(self.root, self.scenes)

    def setup(self, stage: str | None = None) -> None:
        missing = [path for path, _ in (*self.train_files, *self.val_files) if not path.is_file()]
        if missing:
            raise FileNotFoundError(f"{len(missing)} clips are missing, the first {missing[0]}; call prepare_data()")
