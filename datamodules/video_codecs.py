"""What the packets of a video file say about its pictures, and which decoder can be trusted with them.

Jumping to a picture is right only if decoding can start there. The rules below come from reading clips whose pictures
carry their number, at random, in the codecs and containers that PyAV can write: tests/datamodules/test_video_reader.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from .image_folder import describe

# Containers that store the time of every picture and mark key frames rightly.
INDEXED = frozenset({"mov", "matroska"})
# Codecs with one packet a picture, decodable from their key frames on (H.264: from IDR pictures only).
SEEKABLE = frozenset({"h264", "hevc", "vp9", "av1", "mpeg4", "mjpeg", "prores", "dnxhd", "ffv1", "png"})
DECORD_CODECS = frozenset({"h264", "vp9", "mpeg4"})
TORCHCODEC_CODECS = frozenset({"h264", "hevc", "vp9", "av1", "mpeg4"})
_H264_IDR = 5
_EDITED = "an edit list hides some of its pictures"
_UNCLEAN = "pictures near a key frame need others from before it"
_DECODERS = {"libdav1d": "av1", "libaom-av1": "av1", "libvpx-vp9": "vp9", "libvpx": "vp8"}  # names of their formats


class VideoError(ValueError):
    """A file that holds no video, or one that cannot be decoded as it should."""


@dataclass(frozen=True)
class Packets:
    """What a file holds, found without decoding it.

    Attributes:
        container: FFmpeg's name of the container, the first where it has several.
        codec: name of the codec.
        time_base: seconds of a tick.
        rate: pictures a second by the header; None if it does not say.
        times: presentation times of the pictures shown, in ticks and in order; None where packets do not tell them.
        starts: times of the pictures from which on decoding is exact: of presentation, and to seek by (mov files are
            ordered by the time of decoding).
        problem: why jumping to a picture cannot be trusted; "" if it can.
        clean: every key frame is a start.
        closed: no picture that follows a key frame in the file is shown before it.
        first: the first picture, decoded.
    """

    container: str
    codec: str
    time_base: Fraction
    rate: Fraction | None
    times: np.ndarray | None
    starts: tuple[tuple[int, int], ...] = ()
    problem: str = ""
    clean: bool = False
    closed: bool = False
    first: Any = None


@dataclass
class _Tally:
    """Packets counted one by one, in the order of the file."""

    times: list[int | None] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)
    hidden: int = 0
    clean: bool = True
    closed: bool = True
    key_time: int | None = None

    def add(self, packet: Any, exact: bool, place: int | None) -> None:
        if packet.is_discard:
            self.hidden += 1
        else:
            self.times.append(packet.pts)
        if packet.pts is None:
            return
        if packet.is_keyframe:
            self.key_time = packet.pts
            self.clean &= exact
            if exact and place is not None:
                self.starts.append((packet.pts, place))
        elif self.key_time is None or packet.pts < self.key_time:
            self.closed = False


def open_video(path: Path) -> tuple[Any, Any]:
    """An open container and its video stream.

    Raises:
        VideoError: if the file is no video or has no video stream.
    """
    try:
        container = av.open(str(path))
    except av.error.FFmpegError as error:
        raise VideoError(f"cannot open {path} as a video: {describe(error)}") from error
    # The cover picture of an audio file is a video stream by name.
    streams = [s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
    if not streams:
        kinds = sorted({stream.type for stream in container.streams})
        container.close()
        raise VideoError(f"{path} has no video stream; it holds {', '.join(kinds) or 'nothing'}")
    return container, streams[0]


def scan_packets(path: Path) -> Packets:
    """Read the packets of a file, decoding no more than its first picture.

    Raises:
        VideoError: if the file is no video, holds no picture, or is cut short.
    """
    container, stream = open_video(path)
    with container:
        try:
            return _scan(path, container, stream)
        except av.error.FFmpegError as error:
            raise VideoError(f"cannot read {path}: {describe(error)}") from error


def _scan(path: Path, container: Any, stream: Any) -> Packets:
    kind, codec = container.format.name.split(",")[0], _codec_name(stream)
    is_start, tally = _start_test(stream, codec), _Tally()
    decoded: list[Any] = []
    stream.thread_count = 1
    for packet in container.demux(stream):
        if not decoded:
            decoded = packet.decode()
        if packet.size:  # the last one is empty and asks the decoder for what it still has
            if packet.is_corrupt and kind in INDEXED:
                raise VideoError(f"{path} is damaged or cut short after {len(tally.times)} pictures")
            tally.add(packet, is_start(packet), packet.dts if kind == "mov" else packet.pts)
    if kind == "mov" and _is_cut_short(path, stream):
        raise VideoError(f"{path} is cut short: its index names pictures beyond the end of the file")
    if not decoded:
        raise VideoError(f"{path} holds no picture that can be decoded")
    problem = _problem(kind, codec, stream, tally)
    # An edit list leaves the times as they are; other problems make them doubtful.
    times = _in_order(tally.times) if problem in ("", _EDITED) else None
    starts = () if problem else tuple(tally.starts)
    return Packets(
        kind,
        codec,
        stream.time_base,
        stream.average_rate,
        times,
        starts,
        problem,
        tally.clean,
        tally.closed,
        decoded[0],
    )


def _is_cut_short(path: Path, stream: Any) -> bool:
    end = path.stat().st_size
    return any(entry.pos + entry.size > end for entry in stream.index_entries)


def _codec_name(stream: Any) -> str:
    name = stream.codec_context.name
    return _DECODERS.get(name, name)


def _problem(kind: str, codec: str, stream: Any, tally: _Tally) -> str:
    """Why jumping cannot be trusted."""
    if kind not in INDEXED:
        return f"{kind} files do not index their pictures"
    if codec not in SEEKABLE:
        return f"{codec} pictures cannot be reached by seeking"
    if tally.hidden:
        return _EDITED
    if int(getattr(stream.codec_context, "field_order", 0) or 0) > 1:
        return "it is interlaced, so a picture may take two packets"
    if _in_order(tally.times) is None:
        return "its pictures do not all have a time of their own"
    return ""


def _in_order(times: list[int | None]) -> np.ndarray | None:
    known = [time for time in times if time is not None]
    if len(known) < len(times) or len(set(known)) < len(known):
        return None
    return np.array(sorted(known), dtype=np.int64)


def _start_test(stream: Any, codec: str) -> Any:
    """A function that tells of a packet whether decoding can start there."""
    if codec != "h264":
        return lambda packet: packet.is_keyframe
    # H.264 marks recovery points as key frames too: pictures after those may need some from before.
    extra = bytes(stream.codec_context.extradata or b"")
    length_size = (extra[4] & 3) + 1 if len(extra) > 4 and extra[0] == 1 else 0
    return lambda packet: packet.is_keyframe and _H264_IDR in _h264_units(bytes(packet), length_size)


def _h264_units(data: bytes, length_size: int) -> list[int]:
    """Types of the units of an H.264 packet, with lengths before them or (length_size 0) start codes."""
    if not length_size:
        return [data[at + 3] & 31 for at in _find_all(data, b"\0\0\1") if at + 3 < len(data)]
    types, at = [], 0
    while at + length_size < len(data):
        types.append(data[at + length_size] & 31)
        at += length_size + int.from_bytes(data[at : at + length_size], "big")
    return types


def _find_all(data: bytes, code: bytes) -> list[int]:
    found, at = [], data.find(code)
    while at >= 0:
        found.append(at)
        at = data.find(code, at + len(code))
    return found


def decord_problem(packets: Packets) -> str:
    """Why decord may return wrong pictures of this file; "" if it does not.

    decord seeks by key frames and counts on from there, so a picture that is shown before the key frame it follows,
    or a key frame that is no start, shifts what it returns. It cannot open AV1.
    """
    if packets.problem:
        return packets.problem
    if packets.codec not in DECORD_CODECS:
        return f"it is not trusted with {packets.codec}"
    return "" if packets.clean and packets.closed else _UNCLEAN


def torchcodec_problem(packets: Packets) -> str:
    """Why torchcodec may return wrong pictures of this file; "" if it does not."""
    if packets.problem:
        return packets.problem
    if packets.codec not in TORCHCODEC_CODECS:
        return f"it is not trusted with {packets.codec}"
    return "" if packets.clean else _UNCLEAN
