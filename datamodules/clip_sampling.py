"""Which frames of a video make a clip: consecutive or spread out, drawn or fixed, one clip or several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from .video_reader import VideoReader

Sampling = Literal["dense", "uniform"]


@dataclass(frozen=True)
class ClipSampler:
    """Picks the frames of the clips of a video.

    "dense" takes frames at even steps of a window, "uniform" one frame from each of `frames` equal parts of the whole
    video (TSN, arXiv 1608.00859). Where the video is over before the clip, its last frame is repeated.

    Args:
        frames: frames of a clip, T.
        stride: step of "dense", in frames.
        fps: step of "dense", as frames a second of the clip, whatever the rate of the video; instead of `stride`.
        sampling: "dense" or "uniform".
        clips: clips of a video, K, evenly spread; used where nothing is drawn.
    """

    frames: int
    stride: int = 1
    fps: float | None = None
    sampling: Sampling = "dense"
    clips: int = 1

    def drawn(self, video: VideoReader) -> np.ndarray:
        """The frames (T,) of one clip at a random place, from torch's generator."""
        return self._pick(video, lambda count: torch.rand(count).numpy())

    def fixed(self, video: VideoReader) -> np.ndarray:
        """The frames (K, T) of all clips: one from the middle, or several from the beginning to the end."""
        if self.sampling == "uniform":
            places = (np.arange(self.clips) + 0.5) / self.clips
        else:
            places = np.linspace(0, 1, self.clips) if self.clips > 1 else np.array([0.5])
        return np.stack([self._pick(video, partial(np.full, fill_value=place)) for place in places])

    def _pick(self, video: VideoReader, places: Callable[[int], np.ndarray]) -> np.ndarray:
        """The frames of the clip at these places: shares of the room that each choice has."""
        if self.sampling == "uniform":
            part = len(video) / self.frames
            numbers = np.floor((np.arange(self.frames) + places(self.frames)) * part).astype(np.int64)
            return np.minimum(numbers, len(video) - 1)
        place = float(places(1)[0])
        if self.fps is None:
            last = len(video) - 1
            room = max(0, last - (self.frames - 1) * self.stride)
            start = min(int(place * (room + 1)), room)
            return np.minimum(start + np.arange(self.frames) * self.stride, last)
        end = float(video.timestamps[-1])
        first = place * max(0.0, end - (self.frames - 1) / self.fps)
        return video.indices_at(np.minimum(first + np.arange(self.frames) / self.fps, end))
