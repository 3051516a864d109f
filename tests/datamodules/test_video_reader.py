"""Frames are those that decoding from the start gives, whatever the codec, the container and the order of asking."""

import multiprocessing
import os
import pickle
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import av
import clips
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mmpe.datamodules import VideoError, VideoReader
from mmpe.datamodules import video_backends as backends

NEAR = 2  # grey levels between decoders


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A clip of a kind, written once: `numbered("hevc")`. Do not write into it."""

    @cache
    def write(name: str) -> Path:
        return clips.write(tmp_path_factory.mktemp("clip"), clips.KINDS[name])

    return write


@pytest.fixture
def clip(numbered) -> Path:
    """An H.264 clip with B-frames and long groups of pictures."""
    return numbered("h264")


def requests(count: int) -> list[list[int]]:
    """Sequential, reversed, random and repeated frame numbers."""
    draw = random.Random(1)
    scattered = [[draw.randrange(count) for _ in range(8)] for _ in range(3)]
    near = [[i, i + 1] for i in (29, 31, 39)]
    return [list(range(count)), list(range(count))[::-1], *scattered, *near, [5, 5, 3, count - 1, 3], [-1, 0]]


def check_all(path: Path, reader: VideoReader, first: int = 0) -> None:
    reference = clips.decoded_forward(path)
    assert len(reader) == len(reference)
    assert [clips.number_of(image) for image in reference] == list(range(first, first + len(reference)))
    expected = np.stack(reference).astype(np.int16)
    with reader:
        for wanted in requests(len(reference)):
            found = reader.frames(wanted)
            assert found.dtype == np.uint8
            off = np.abs(found - expected[wanted]).max(axis=(1, 2, 3))
            assert off.max() <= NEAR, f"asked for {wanted}, got {[clips.number_of(image) for image in found]}"


@pytest.mark.parametrize("backend", ["auto", "pyav"])
@pytest.mark.parametrize("name", clips.KINDS)
def test_every_codec_gives_the_frames_of_decoding_from_the_start(numbered, name, backend):
    kind, path = clips.KINDS[name], numbered(name)
    reader = VideoReader(path, backend)
    assert reader.backend == (kind.backend if backend == "auto" else "pyav")
    assert reader.fps == pytest.approx(25, abs=0.1)
    np.testing.assert_allclose(reader.timestamps, np.arange(clips.COUNT) / 25, atol=2e-3)
    check_all(path, reader)


@pytest.mark.parametrize("name", [name for name, kind in clips.KINDS.items() if kind.backend == "pyav"])
def test_decord_is_refused_where_it_may_be_wrong(numbered, name):
    with pytest.raises(ValueError, match=r"decord may return wrong frames of .*: .*; use backend='auto' or 'pyav'"):
        VideoReader(numbered(name), "decord")


@pytest.mark.parametrize("name", ["h264 open gop", "h264 intra refresh", "hevc", "mpeg4 b frames", "mpeg2 in mkv"])
def test_decord_is_indeed_wrong_on_files_that_it_is_refused(numbered, name):
    import decord

    reader, wrong = decord.VideoReader(str(numbered(name)), num_threads=1), 0
    for wanted in requests(clips.COUNT):
        images = reader.get_batch([i % clips.COUNT for i in wanted]).asnumpy()
        wrong += sum(clips.number_of(image) != i % clips.COUNT for image, i in zip(images, wanted, strict=True))
    assert wrong > 0


@pytest.mark.parametrize("backend", ["auto", "pyav"])
@pytest.mark.parametrize("first", [13, 40])
def test_clip_cut_with_an_edit_list(tmp_path, clip, backend, first):
    path = clips.cut(clip, tmp_path / "cut.mp4", first)
    reader = VideoReader(path, backend)
    assert len(reader) == clips.COUNT - first
    np.testing.assert_allclose(reader.timestamps, np.arange(clips.COUNT - first) / 25, atol=2e-3)
    check_all(path, reader, first)


def test_times_are_those_of_the_file_where_the_rate_varies(tmp_path):
    ticks = np.cumsum([0, *[1, 1, 5, 2] * 10])[:40].tolist()
    path = clips.write(tmp_path, clips.KINDS["h264"], 40, ticks)
    for backend in ("auto", "pyav"):
        with VideoReader(path, backend) as reader:
            np.testing.assert_allclose(reader.timestamps, np.array(ticks) / 25, atol=1e-3)
            assert reader.indices_at(np.array(ticks) / 25).tolist() == list(range(40))
            # Ticks 2 to 6 show frame 2.
            assert [clips.number_of(f) for f in reader.frames_at([0.0, 2 / 25, 4 / 25, 6.9 / 25, 7 / 25])] == [
                0,
                2,
                2,
                2,
                3,
            ]
            assert reader.fps == pytest.approx(39 / (ticks[-1] / 25))


def test_a_time_outside_of_the_video_is_refused(clip):
    reader = VideoReader(clip)
    assert reader.duration == pytest.approx(4.0)
    assert reader.indices_at([3.999]).tolist() == [99]
    for seconds in (-0.1, 4.01, float("nan")):
        with pytest.raises(ValueError, match=r"lasts 4.000 s; asked for"):
            reader.frames_at([seconds])


TURNS = {
    "right": ((0, 1, -1, 0), lambda image: np.rot90(image, 3)),
    "half": ((-1, 0, 0, -1), lambda image: np.rot90(image, 2)),
    "left": ((0, -1, 1, 0), lambda image: np.rot90(image, 1)),
    "mirror": ((-1, 0, 0, 1), lambda image: image[:, ::-1]),
    "mirrored turn": ((0, 1, 1, 0), lambda image: image.transpose(1, 0, 2)),
}


@pytest.mark.parametrize("backend", ["auto", "pyav"])
@pytest.mark.parametrize("name", TURNS)
def test_frames_are_turned_as_the_file_asks(tmp_path, clip, name, backend):
    matrix, turned = TURNS[name]
    path = clips.turn(clip, tmp_path / "turned.mp4", matrix)
    expected = turned(clips.decoded_forward(path)[7])
    with VideoReader(path, backend) as reader:
        assert reader.backend == "pyav"  # decord fails at turned clips of some sizes
        assert reader.size == expected.shape[:2]
        assert np.abs(reader.frames([7])[0].astype(int) - expected.astype(int)).max() <= NEAR


def test_a_turn_by_another_angle_is_refused(tmp_path, clip):
    path = clips.turn(clip, tmp_path / "turned.mp4", (2, 1, -1, 2))
    with pytest.raises(VideoError, match="only quarter turns are supported"):
        VideoReader(path)


def test_wrong_requests(clip, tmp_path):
    reader = VideoReader(clip)
    assert reader.frames([]).shape == (0, clips.HEIGHT, clips.WIDTH, 3)
    for number in (100, -101):
        with pytest.raises(IndexError, match=f"has 100 frames; no frame {number}"):
            reader.frames([0, number])
    with pytest.raises(TypeError, match="must be integers, got float64; for seconds use frames_at"):
        reader.frames([0.5])
    with pytest.raises(ValueError, match="backend='opencv' must be one of"):
        VideoReader(clip, "opencv")
    with pytest.raises(ValueError, match="num_threads=0"):
        VideoReader(clip, num_threads=0)
    with pytest.raises(FileNotFoundError, match=r"no video file at .*none\.mp4"):
        VideoReader(tmp_path / "none.mp4")


def audio_file(path: Path) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def test_files_without_video(tmp_path):
    with pytest.raises(VideoError, match="has no video stream; it holds audio"):
        VideoReader(audio_file(tmp_path / "sound.m4a"))
    (tmp_path / "text.mp4").write_text("no video at all")
    with pytest.raises(VideoError, match=r"cannot open .*text\.mp4 as a video: InvalidDataError"):
        VideoReader(tmp_path / "text.mp4")
    (tmp_path / "empty.mp4").write_bytes(b"")
    with pytest.raises(VideoError, match="cannot open"):
        VideoReader(tmp_path / "empty.mp4")


def test_video_without_a_frame(tmp_path):
    path = tmp_path / "none.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mjpeg", rate=25)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuvj420p"
        container.start_encoding()
    with pytest.raises(VideoError, match=r"holds no picture that can be decoded|cannot open"):
        VideoReader(path)


def fast_start(source: Path, target: Path) -> Path:
    """The clip with its index in front, so that a shortened file can still be opened."""
    with av.open(str(source)) as old, av.open(str(target), "w", options={"movflags": "faststart"}) as new:
        copy = new.add_stream_from_template(old.streams.video[0])
        for packet in old.demux(video=0):
            if packet.dts is not None:
                packet.stream = copy
                new.mux(packet)
    return target


def test_shortened_files_are_refused(tmp_path, clip):
    whole = clip.read_bytes()
    (tmp_path / "end.mp4").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(VideoError, match="cannot open"):
        VideoReader(tmp_path / "end.mp4")
    whole = fast_start(clip, tmp_path / "fast.mp4").read_bytes()
    assert len(VideoReader(tmp_path / "fast.mp4")) == clips.COUNT
    (tmp_path / "short.mp4").write_bytes(whole[: 2 * len(whole) // 3])
    with pytest.raises(VideoError, match="cut short"):
        VideoReader(tmp_path / "short.mp4")


def test_a_damaged_frame_is_an_error_and_not_a_wrong_picture(tmp_path):
    path = clips.write(tmp_path, clips.KINDS["mjpeg"])
    data = bytearray(path.read_bytes())
    at = data.find(b"\xff\xd8", len(data) // 2)
    data[at : at + 600] = bytes(600)
    path.write_bytes(data)
    with pytest.raises(VideoError, match="cannot decode"):
        VideoReader(path).frames(range(100))


def test_files_too_large_for_memory_are_decoded_again(numbered, monkeypatch):
    monkeypatch.setattr(backends, "CACHE_BYTES", 100_000)
    check_all(numbered("mpeg2"), VideoReader(numbered("mpeg2")))


def test_a_pickled_reader_opens_its_file_anew(clip):
    with VideoReader(clip, "pyav") as reader:
        before = reader.frames([50])
        copy = pickle.loads(pickle.dumps(reader))
        assert copy.backend == "pyav"
        assert np.array_equal(copy.frames([50]), before)
    assert np.array_equal(reader.frames([50]), before)  # after it was closed


def _read_in_child(reader: VideoReader, answer) -> None:
    answer.put((os.getpid(), [clips.number_of(image) for image in reader.frames([70, 3])]))
    answer.close()
    answer.join_thread()


@pytest.mark.parametrize("backend", ["auto", "pyav"])
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_reader_open_before_a_fork_works_after_it(clip, backend):
    reader = VideoReader(clip, backend)
    reader.frames([10])
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    child = context.Process(target=_read_in_child, args=(reader, answer))
    child.start()
    pid, numbers = answer.get(timeout=30)
    child.join(30)
    assert (pid == child.pid, numbers, child.exitcode) == (True, [70, 3], 0)
    assert [clips.number_of(image) for image in reader.frames([70, 3])] == [70, 3]


class Readers(Dataset):
    """Readers made, and used, in the process that starts the workers."""

    def __init__(self, path: Path) -> None:
        self.readers = [VideoReader(path, backend) for backend in ("auto", "pyav")]
        for reader in self.readers:
            reader.frames([1])

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(clips.number_of(self.readers[index % 2].frames([10 * index])[0]))


def test_readers_in_forked_loader_workers(clip):
    loader = DataLoader(Readers(clip), num_workers=2, timeout=60, multiprocessing_context="fork")
    assert [int(number) for number in loader] == [10 * i for i in range(8)]


@pytest.mark.parametrize(
    "name", [name for name in clips.KINDS if name.split()[0] in ("h264", "hevc", "vp9", "av1", "mpeg4")]
)
def test_torchcodec_where_it_is_installed(numbered, name):
    try:
        import torchcodec  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"torchcodec cannot be loaded: {error}".splitlines()[0])
    path = numbered(name)
    try:
        reader = VideoReader(path, "torchcodec")
        reader.frames(range(len(reader)))
    except ValueError:
        return  # refused, rather than wrong
    check_all(path, reader)


def test_torchcodec_that_cannot_be_loaded_says_what_to_do(clip):
    try:
        import torchcodec  # noqa: F401
    except (ImportError, RuntimeError, OSError):
        with pytest.raises(ImportError, match=r"torchcodec cannot be loaded .*pip install mmpe\[video\]"):
            VideoReader(clip, "torchcodec").frames([0])
    else:
        assert VideoReader(clip, "torchcodec").backend == "torchcodec"
