"""Clips whose frames carry their number, written by PyAV in many codecs and containers."""

import struct
from dataclasses import dataclass, field
from pathlib import Path

import av
import numpy as np
import pytest

BITS = 7
COUNT = 100
WIDTH, HEIGHT = 112, 48


def picture(number: int, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """A frame (H, W, 3): its number as dark and bright blocks, under a stripe that moves."""
    image = np.full((height, width, 3), 128, np.uint8)
    for bit in range(BITS):
        left, right = bit * width // BITS, (bit + 1) * width // BITS
        image[height // 4 : 3 * height // 4, left:right] = 210 if number >> bit & 1 else 40
    image[: height // 8] = (np.arange(width)[None, :, None] * 2 + number * 7) % 256
    return image


def number_of(image: np.ndarray) -> int:
    """The number that a decoded frame carries."""
    height, width = image.shape[:2]
    total = 0
    for bit in range(BITS):
        left, right = bit * width // BITS + 4, (bit + 1) * width // BITS - 4
        total |= int(image[height // 4 + 4 : 3 * height // 4 - 4, left:right].mean() > 125) << bit
    return total


@dataclass(frozen=True)
class Kind:
    """A codec in a container, and who is to read it."""

    suffix: str
    codec: str
    backend: str = "pyav"
    pix_fmt: str = "yuv420p"
    gop: int = 30
    b_frames: int = 0
    options: dict[str, str] = field(default_factory=dict)
    size: tuple[int, int] = (WIDTH, HEIGHT)


AV1 = {"preset": "8", "crf": "10", "svtav1-params": "enable-tf=0"}  # filtering over time blends numbers
X265 = "keyint=32:bframes=3:log-level=none"
KINDS = {
    "h264": Kind("mp4", "libx264", "decord", b_frames=3, gop=40),
    "h264 in mkv": Kind("mkv", "libx264", "decord", b_frames=3, gop=40),
    "h264 10 bit": Kind("mov", "libx264", "decord", "yuv420p10le", b_frames=3, gop=40),
    "h264 open gop": Kind("mp4", "libx264", options={"x264-params": "open-gop=1:keyint=20:min-keyint=20:scenecut=0"}),
    "h264 intra refresh": Kind("mp4", "libx264", options={"x264-params": "intra-refresh=1:keyint=20"}),
    "h264 in avi": Kind("avi", "libx264", b_frames=3),
    "h264 in ts": Kind("ts", "libx264", b_frames=3),
    "h264 in flv": Kind("flv", "libx264", b_frames=3),
    "h264 raw": Kind("h264", "libx264", b_frames=3),
    "hevc": Kind("mp4", "libx265", options={"x265-params": X265}),
    "hevc in mkv": Kind("mkv", "libx265", options={"x265-params": X265}),
    "hevc closed": Kind("mp4", "libx265", options={"x265-params": X265 + ":open-gop=0"}),
    "mpeg4": Kind("mp4", "mpeg4", "decord"),
    "mpeg4 b frames": Kind("mp4", "mpeg4", b_frames=2),
    "mpeg4 in mkv b frames": Kind("mkv", "mpeg4", b_frames=2),
    "mpeg4 in avi": Kind("avi", "mpeg4"),
    "mpeg4 in avi b frames": Kind("avi", "mpeg4", b_frames=2),
    "mpeg1": Kind("mpg", "mpeg1video", gop=15, b_frames=2),
    "mpeg2": Kind("mpg", "mpeg2video", gop=15, b_frames=2),
    "mpeg2 in ts": Kind("ts", "mpeg2video", gop=15, b_frames=2),
    "mpeg2 in mkv": Kind("mkv", "mpeg2video", gop=15, b_frames=2),
    "mpeg2 raw": Kind("m2v", "mpeg2video", gop=15, b_frames=2),
    "msmpeg4": Kind("avi", "msmpeg4", gop=15),
    "wmv1": Kind("asf", "wmv1", gop=15),
    "wmv2": Kind("wmv", "wmv2", gop=15),
    "vp8": Kind("webm", "libvpx", gop=40, options={"lag-in-frames": "16", "auto-alt-ref": "1"}),
    "vp9": Kind("webm", "libvpx-vp9", "decord", gop=40, options={"lag-in-frames": "16", "deadline": "realtime"}),
    "av1": Kind("mp4", "libsvtav1", gop=40, options=AV1, size=(WIDTH, 64)),
    "gif": Kind("gif", "gif", pix_fmt="rgb8"),
    "h263": Kind("3gp", "h263", gop=15, size=(176, 144)),
    "flv1": Kind("flv", "flv", gop=15),
    "mjpeg": Kind("avi", "mjpeg", pix_fmt="yuvj420p"),
    "ffv1": Kind("mkv", "ffv1", gop=10),
    "prores": Kind("mov", "prores", pix_fmt="yuv422p10le"),
}


def write(folder: Path, kind: Kind, count: int = COUNT, times: list[int] | None = None) -> Path:
    """A clip of this kind, 25 frames a second; `times` are the frames' times in ticks of 1/25 s."""
    try:
        av.codec.Codec(kind.codec, "w")
    except (ValueError, av.error.FFmpegError):
        pytest.skip(f"this build of PyAV has no encoder {kind.codec}")
    path = folder / f"clip.{kind.suffix}"
    width, height = kind.size
    with av.open(str(path), "w") as container:
        stream = container.add_stream(kind.codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = width, height, kind.pix_fmt
        stream.codec_context.gop_size = kind.gop
        if "crf" not in kind.options:
            stream.bit_rate = 2_000_000
        if kind.b_frames:
            stream.codec_context.max_b_frames = kind.b_frames
        stream.options = {**kind.options, **({"threads": "1"} if kind.codec in ("libx264", "libvpx-vp9") else {})}
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(picture(number, width, height), format="rgb24")
            frame.pts = number if times is None else times[number]
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def cut(source: Path, target: Path, frames: int) -> Path:
    """The clip without its first frames and without new coding: an edit list hides those up to the cut."""
    with av.open(str(source)) as old, av.open(str(target), "w") as new:
        stream = old.streams.video[0]
        copy = new.add_stream_from_template(stream)
        shift = int(frames / (stream.average_rate * stream.time_base))
        for packet in old.demux(stream):
            if packet.dts is not None:
                packet.pts, packet.dts, packet.stream = packet.pts - shift, packet.dts - shift, copy
                new.mux(packet)
    return target


def turn(source: Path, target: Path, matrix: tuple[int, int, int, int]) -> Path:
    """The mp4 file with another display matrix (a, b, c, d): x' = a x + c y, y' = b x + d y."""
    data = bytearray(source.read_bytes())
    head = data.find(b"tkhd")
    at = head + 4 + (24 if data[head + 4] == 0 else 36) + 16
    a, b, c, d = (65536 * value for value in matrix)
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    target.write_bytes(data)
    return target


def decoded_forward(path: Path) -> list[np.ndarray]:
    """All frames, by PyAV from the start."""
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
