"""`VideoReader`: frames of a video by number or by time, the right ones or an error."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .video_backends import BACKENDS, Backend, backend_problem, find_pictures
from .video_codecs import VideoError, scan_packets

__all__ = ["VideoBackend", "VideoError", "VideoReader"]

VideoBackend = Literal["auto", "decord", "pyav", "torchcodec"]
# Decoders that a process inherited: their threads are gone, so closing them could wait for ever.
_inherited: list[Backend] = []


class VideoReader:
    """Frames of a video file by number or by time.

    Creating one reads what the file holds and leaves no decoder open, so it may happen before a process forks; frames
    are decoded by whichever process asks for them. A pickled reader opens its file anew where it arrives.

    "auto" decodes with decord the files that decord reads rightly, as far as codec, container and key frames tell, and
    all others with PyAV, which jumps only to where decoding can start. Files without a trustworthy index (AVI, MPEG-1
    and 2, MS-MPEG4, GIF, ...) are decoded once from the start. Frames are turned as the file asks to show them.

    A file that lacks frames which its index names is refused. Damage inside a frame is an error where the decoder
    reports it: PyAV does for H.264 and MPEG-4. Decoders of HEVC and VP9, and decord always, fill what is damaged.

    Args:
        path: the video file.
        backend: "auto"; or "decord", "pyav" or "torchcodec", which are refused where they may give wrong frames.
        num_threads: threads of the decoder; one is best inside of loader workers.

    Raises:
        FileNotFoundError: if there is no such file.
        VideoError: if it is no video, holds no frames, or is cut short.
        ValueError: for a backend that cannot be trusted with this file.

    Example:
        >>> with VideoReader("clip.mp4") as video:  # doctest: +SKIP
        ...     clip = video.frames(range(0, len(video), 4))  # (T, H, W, 3) uint8
    """

    def __init__(self, path: str | Path, backend: VideoBackend = "auto", num_threads: int = 1) -> None:
        self.path, self.requested, self.num_threads = Path(path), backend, num_threads
        if backend not in ("auto", *BACKENDS):
            raise ValueError(f"backend={backend!r} must be one of {('auto', *BACKENDS)}")
        if num_threads < 1:
            raise ValueError(f"num_threads={num_threads} must be 1 or more")
        if not self.path.is_file():
            raise FileNotFoundError(f"no video file at {self.path.absolute()}")
        self._pictures = find_pictures(self.path, scan_packets(self.path))
        self._timestamps = self._make_timestamps()
        self._backend_name = self._choose()
        self._open: Backend | None = None
        self._owner = os.getpid()

    def _choose(self) -> str:
        if self.requested == "auto":
            trusted = find_spec("decord") is not None and not backend_problem("decord", self._pictures)
            return "decord" if trusted else "pyav"
        problem = backend_problem(self.requested, self._pictures)
        if problem:
            raise ValueError(
                f"{self.requested} may return wrong frames of {self.path}: {problem}; use backend='auto' or 'pyav'"
            )
        return self.requested

    def _make_timestamps(self) -> np.ndarray:
        pictures, packets = self._pictures, self._pictures.packets
        if pictures.times is not None:
            return (pictures.times - pictures.times[0]) * float(packets.time_base)
        return np.arange(pictures.count) / float(packets.rate or 1)

    def __len__(self) -> int:
        return self._pictures.count

    @property
    def backend(self) -> str:
        """Name of the decoder in use."""
        return self._backend_name

    @property
    def codec(self) -> str:
        """FFmpeg's name of the codec."""
        return self._pictures.packets.codec

    @property
    def container(self) -> str:
        """FFmpeg's name of the container."""
        return self._pictures.packets.container

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the frames, as shown."""
        return self._pictures.height, self._pictures.width

    @property
    def timestamps(self) -> np.ndarray:
        """Seconds from the first frame to each frame, (len,) float64, as the file has them, not counted by the rate."""
        return self._timestamps

    @property
    def fps(self) -> float:
        """Frames a second, on average."""
        if len(self) > 1 and self._timestamps[-1] > 0:
            return float((len(self) - 1) / self._timestamps[-1])
        return float(self._pictures.packets.rate or 1)

    @property
    def duration(self) -> float:
        """Seconds from the first frame until the last one is over."""
        return float(self._timestamps[-1] + 1 / self.fps)

    def indices_at(self, seconds: Sequence[float] | np.ndarray) -> np.ndarray:
        """Numbers of the frames shown at these times, counted from the first frame.

        Raises:
            ValueError: for a time before the first frame or after the end.
        """
        wanted = np.asarray(seconds, dtype=np.float64).reshape(-1)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < self.duration):
            raise ValueError(
                f"{self.path} lasts {self.duration:.3f} s; asked for {wanted.min():.3f} to {wanted.max():.3f} s"
            )
        # A time computed as number / rate must not fall just short of its own frame.
        return np.searchsorted(self._timestamps, wanted + 1e-6, side="right") - 1

    def frames_at(self, seconds: Sequence[float] | np.ndarray) -> np.ndarray:
        """The frames shown at these times, (T, H, W, 3) uint8."""
        return self.frames(self.indices_at(seconds))

    def frames(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Frames by number, in any order and as often as asked for, (T, H, W, 3) uint8; negative ones from the end.

        Raises:
            IndexError: for a number beyond the frames.
            VideoError: if one of them cannot be decoded.
        """
        wanted = np.asarray(indices)
        if wanted.size and not np.issubdtype(wanted.dtype, np.integer):
            raise TypeError(f"frame numbers must be integers, got {wanted.dtype}; for seconds use frames_at")
        wanted = wanted.reshape(-1).astype(np.int64)
        beyond = wanted[(wanted < -len(self)) | (wanted >= len(self))]
        if len(beyond):
            raise IndexError(f"{self.path} has {len(self)} frames; no frame {int(beyond[0])}")
        numbers, places = np.unique(wanted % len(self), return_inverse=True)
        images = np.empty((len(numbers), *self.size, 3), dtype=np.uint8)  # (U, H, W, 3)
        if len(numbers):
            for i, image in enumerate(self._decoder().read(numbers.tolist())):
                images[i] = image
        return images if np.array_equal(places, np.arange(len(numbers))) else images[places]

    def _decoder(self) -> Backend:
        if self._owner != os.getpid():
            if self._open is not None:
                _inherited.append(self._open)
            self._open, self._owner = None, os.getpid()
        if self._open is None:
            try:
                self._open = BACKENDS[self._backend_name](self._pictures, self.num_threads)
            except VideoError:
                if self.requested != "auto" or self._backend_name == "pyav":
                    raise
                self._backend_name = "pyav"
                self._open = BACKENDS["pyav"](self._pictures, self.num_threads)
        return self._open

    def close(self) -> None:
        """Close the file; reading opens it again."""
        if self._open is not None and self._owner == os.getpid():
            self._open.close()
        self._open = None

    def __enter__(self) -> VideoReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.requested, self.num_threads)

    def __repr__(self) -> str:
        height, width = self.size
        return f"VideoReader({str(self.path)!r}: {len(self)} frames {height}x{width}, {self.codec}, {self.backend})"
