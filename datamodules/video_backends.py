"""The decoders behind `VideoReader`: each returns pictures by their number in the order of presentation, or refuses."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np

from .image_folder import describe
from .video_codecs import Packets, VideoError, decord_problem, open_video, torchcodec_problem

CACHE_BYTES = 256 * 2**20  # decoded pictures that a file without an index may keep, to be decoded once and not twice
TIME_TOLERANCE = 1e-3  # seconds; decord has times in single precision


@dataclass(frozen=True)
class Orientation:
    """How pictures are turned before they are shown.

    Args:
        transpose: exchange rows and columns first.
        flip_rows: then turn upside down.
        flip_columns: and left to right.
    """

    transpose: bool = False
    flip_rows: bool = False
    flip_columns: bool = False

    @property
    def mirrored(self) -> bool:
        """Whether it is no pure rotation."""
        return self.transpose ^ self.flip_rows ^ self.flip_columns

    def apply(self, image: np.ndarray) -> np.ndarray:
        """The picture (H, W, C) as it is shown."""
        if self.transpose:
            image = image.transpose(1, 0, 2)
        return image[:: -1 if self.flip_rows else 1, :: -1 if self.flip_columns else 1]


@dataclass(frozen=True)
class Pictures:
    """The pictures of a file: what they are, without the file.

    Attributes:
        path: the file.
        packets: what its packets say.
        times: presentation time of each, in ticks; None where the file gives none.
        count: how many.
        height: rows of a picture as shown.
        width: columns of a picture as shown.
        orientation: how decoded pictures are turned.
        cache: all decoded pictures, if they were decoded to be counted and fit in memory.
    """

    path: Path
    packets: Packets
    times: np.ndarray | None
    count: int
    height: int
    width: int
    orientation: Orientation
    cache: tuple[Any, ...] = ()


def find_pictures(path: Path, packets: Packets) -> Pictures:
    """Count the pictures of a file: by its packets where they can be trusted, otherwise by decoding all."""
    times, first, cache = packets.times, packets.first, ()
    if times is not None and len(times) and first.pts == times[0]:
        count = len(times)
    else:
        times, count, cache = _count_by_decoding(path)
    orientation = _orientation(path, first)
    height, width = (first.width, first.height) if orientation.transpose else (first.height, first.width)
    return Pictures(path, packets, times, count, height, width, orientation, cache)


def _decoded(path: Path) -> Iterator[Any]:
    """The pictures of a file from the start."""
    container, stream = open_video(path)
    with container:
        stream.thread_count = 1
        try:
            yield from container.decode(stream)
        except av.error.FFmpegError as error:
            raise VideoError(f"cannot decode {path}: {describe(error)}") from error


def _count_by_decoding(path: Path) -> tuple[np.ndarray | None, int, tuple[Any, ...]]:
    times: list[int | None] = []
    kept: list[Any] = []
    budget = CACHE_BYTES
    for frame in _decoded(path):
        times.append(frame.pts)
        budget -= sum(plane.buffer_size for plane in frame.planes)
        if budget >= 0:
            kept.append(frame)
        else:
            kept.clear()
    known = [time for time in times if time is not None]
    rising = len(known) == len(times) and all(a < b for a, b in zip(known, known[1:], strict=False))
    return np.array(known, dtype=np.int64) if rising else None, len(times), tuple(kept)


def _orientation(path: Path, frame: Any) -> Orientation:
    """The display matrix of a picture, a multiple of a quarter turn with or without mirroring."""
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return Orientation()
    a, b, _, c, d = np.frombuffer(bytes(data), "<i4")[:5] / 65536  # x' = a x + c y, y' = b x + d y
    if {abs(a), abs(d)} == {1.0} and b == c == 0:
        return Orientation(False, bool(d < 0), bool(a < 0))
    if {abs(b), abs(c)} == {1.0} and a == d == 0:
        return Orientation(True, bool(b < 0), bool(c < 0))
    raise VideoError(f"{path} is to be shown turned by {frame.rotation} degrees; only quarter turns are supported")


class Backend(ABC):
    """An open decoder of one file.

    Args:
        pictures: what the file holds.
        threads: threads of the decoder.
    """

    name: str

    def __init__(self, pictures: Pictures, threads: int) -> None:
        self.pictures, self.threads = pictures, threads

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """The pictures (H, W, 3) uint8 of these numbers, which rise strictly."""

    @abstractmethod
    def close(self) -> None:
        """Release the file."""


class _Misplaced(VideoError):
    """Another picture came than the one that the packets announce."""


class PyAV(Backend):
    """PyAV: right for every file, because it jumps only to where decoding can start, and checks what comes."""

    name = "pyav"

    def __init__(self, pictures: Pictures, threads: int) -> None:
        super().__init__(pictures, threads)
        self._starts = [] if pictures.cache else _numbered(pictures)
        self._container: Any = None
        self._stream: Any = None
        self._source: Iterator[Any] = iter(())
        self._next = 0  # number of the picture that the source gives next
        self._colours = av.video.reformatter.VideoReformatter()  # one for all pictures, for the sake of speed

    def read(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        for number in numbers:
            yield self._converted(self._picture(number), number)

    def _picture(self, number: int) -> Any:
        if self.pictures.cache:
            return self.pictures.cache[number]
        try:
            return self._reach(number)
        except _Misplaced:
            if not self._starts:
                raise
            self._starts = []  # seeking does not do here what the packets promise: read from the start
            self._open()
            return self._reach(number)

    def _reach(self, number: int) -> Any:
        start = max((s for s in self._starts if s[0] <= number), default=None)
        if self._container is None or number < self._next:
            self._open()
        if start is not None and start[0] > self._next:
            self._seek(*start)
        while self._next < number:
            self._take()
        return self._take()

    def _open(self) -> None:
        self.close()
        self._container, self._stream = open_video(self.pictures.path)
        self._stream.thread_count = self.threads
        self._source = self._container.decode(self._stream)

    def _seek(self, number: int, shown: int, place: int) -> None:
        """Make picture `number` the next one: the start that is shown at one time and found by the other."""
        self._container.seek(place, stream=self._stream)
        self._source, self._next = self._container.decode(self._stream), number
        frame = self._pull()
        while frame is not None and frame.pts is not None and frame.pts < shown:
            frame = self._pull()  # decoded after the start and shown before it
        self._source = itertools.chain(() if frame is None else (frame,), self._source)

    def _take(self) -> Any:
        frame, times = self._pull(), self.pictures.times
        if frame is None:
            raise VideoError(f"{self.pictures.path} ends at picture {self._next} of {self.pictures.count}")
        if times is not None and frame.pts != times[self._next]:
            raise _Misplaced(f"{self.pictures.path} has no picture {self._next} at tick {times[self._next]}")
        self._next += 1
        return frame

    def _pull(self) -> Any:
        try:
            return next(self._source, None)
        except av.error.FFmpegError as error:
            raise VideoError(
                f"cannot decode picture {self._next} of {self.pictures.path}: {describe(error)}"
            ) from error

    def _converted(self, frame: Any, number: int) -> np.ndarray:
        pictures = self.pictures
        if frame.is_corrupt:
            raise VideoError(f"picture {number} of {pictures.path} is damaged")
        image = pictures.orientation.apply(self._colours.reformat(frame, format="rgb24").to_ndarray())
        return checked_size(image, pictures, number)

    def close(self) -> None:
        if self._container is not None:
            self._container.close()
        self._container, self._source, self._next = None, iter(()), 0


def _numbered(pictures: Pictures) -> list[tuple[int, int, int]]:
    """Where decoding can start: number of the picture, its time of presentation, and the time to seek by."""
    if pictures.times is None:
        return []
    number = {time: i for i, time in enumerate(pictures.times.tolist())}
    return [(number[shown], shown, place) for shown, place in pictures.packets.starts if shown in number]


def checked_size(image: np.ndarray, pictures: Pictures, number: int) -> np.ndarray:
    """The picture, if it has the size of the first one."""
    if image.shape[:2] != (pictures.height, pictures.width):
        size, found = f"{pictures.height}x{pictures.width}", f"{image.shape[0]}x{image.shape[1]}"
        raise VideoError(f"{pictures.path} changes its size from {size} to {found} at picture {number}")
    return image


class Decord(Backend):
    """decord, for the files with whose table of pictures it agrees."""

    name = "decord"

    def __init__(self, pictures: Pictures, threads: int) -> None:
        super().__init__(pictures, threads)
        try:
            import decord
        except ImportError as error:
            raise ImportError("decord is not installed (no wheels for this system?); use backend='pyav'") from error
        self._errors = (decord.DECORDError, RuntimeError)
        self._reader = self._guarded(lambda: decord.VideoReader(str(pictures.path), num_threads=threads))
        times = self._guarded(lambda: self._reader.get_frame_timestamp(range(len(self._reader)))[:, 0])
        _check_times(pictures, np.asarray(times, dtype=np.float64), self.name)

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._errors as error:
            raise VideoError(f"decord cannot read {self.pictures.path}: {describe(error)}") from error

    def read(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        images = self._guarded(lambda: self._reader.get_batch(list(numbers)).asnumpy())
        for number, image in zip(numbers, images, strict=True):
            yield checked_size(image, self.pictures, number)

    def close(self) -> None:
        self._reader = None


class TorchCodec(Backend):
    """torchcodec in its exact mode; it needs FFmpeg's libraries on the system."""

    name = "torchcodec"

    def __init__(self, pictures: Pictures, threads: int) -> None:
        super().__init__(pictures, threads)
        try:
            from torchcodec.decoders import VideoDecoder
        except (ImportError, RuntimeError, OSError) as error:  # its wheels need FFmpeg's libraries on the system
            raise ImportError(
                f"torchcodec cannot be loaded ({describe(error)}); pip install mmpe[video] and install FFmpeg, or use "
                f"backend='pyav'"
            ) from error
        options = {"dimension_order": "NHWC", "num_ffmpeg_threads": threads, "seek_mode": "exact"}
        try:
            self._decoder = VideoDecoder(str(pictures.path), **options)
        except (RuntimeError, ValueError) as error:
            raise VideoError(f"torchcodec cannot read {pictures.path}: {describe(error)}") from error
        if len(self._decoder) != pictures.count:
            raise VideoError(
                f"torchcodec counts {len(self._decoder)} pictures in {pictures.path}, not {pictures.count}"
            )

    def read(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        try:
            batch = self._decoder.get_frames_at(list(numbers))
        except (RuntimeError, ValueError, IndexError) as error:
            raise VideoError(f"torchcodec cannot read {self.pictures.path}: {describe(error)}") from error
        _check_times(self.pictures, batch.pts_seconds.numpy(), self.name, numbers)
        for number, image in zip(numbers, batch.data.numpy(), strict=True):
            yield checked_size(image, self.pictures, number)

    def close(self) -> None:
        self._decoder = None


def _check_times(pictures: Pictures, seconds: np.ndarray, name: str, numbers: Sequence[int] | None = None) -> None:
    """Refuse a decoder that gives pictures other times than the packets have."""
    assert pictures.times is not None  # files without are refused before
    times = pictures.times * float(pictures.packets.time_base)
    times = times if numbers is None else times[list(numbers)]
    if len(seconds) != len(times):
        raise VideoError(f"{name} counts {len(seconds)} pictures in {pictures.path}, not {len(times)}")
    if len(times) and not np.abs(seconds - times).max() < TIME_TOLERANCE:
        raise VideoError(f"{name} shows pictures of {pictures.path} at other times than the file says")


BACKENDS: dict[str, type[Backend]] = {backend.name: backend for backend in (PyAV, Decord, TorchCodec)}


def backend_problem(name: str, pictures: Pictures) -> str:
    """Why a backend may return wrong pictures of this file; "" if it does not."""
    if name == "pyav":
        return ""
    if pictures.orientation != Orientation() and (name == "decord" or pictures.orientation.mirrored):
        return "its pictures are to be turned"
    problem = decord_problem(pictures.packets) if name == "decord" else torchcodec_problem(pictures.packets)
    if not problem and pictures.times is not pictures.packets.times:
        return "its first pictures cannot be decoded"
    return problem
