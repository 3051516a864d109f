"""`make_shards`: class folders of images -> webdataset shards, atomic and resumable.

The whole plan follows from the folder's contents and the seed, so a shard is the same bytes whenever and in whatever
order it is written. A shard is written under a temporary name, flushed to disk and renamed: a name that ends in `.tar`
is a finished shard. After a kill the same call skips what is finished and writes the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import tarfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from .image_folder import check_same_classes, scan_classes
from .loading import check_counts
from .shard_index import INDEX_NAME, VERSION

PLAN_NAME = "plan.json"
SPLITS = ("train", "val")


@dataclass(frozen=True)
class _Plan:
    """What goes into which shard: chunks of (file, class number)."""

    classes: list[str]
    chunks: list[list[tuple[Path, int]]]
    samples_per_shard: int
    seed: int
    fingerprint: str

    def name(self, number: int) -> str:
        return f"shard-{number:06d}.tar"


def make_shards(
    folder: str | Path,
    out: str | Path,
    samples_per_shard: int = 1000,
    seed: int = 0,
    workers: int = 4,
    progress: bool | None = None,
) -> list[Path]:
    """Write the images of class folders into shards, in random order, with an index.

    A folder with `train` and `val` gives `OUT/train` and `OUT/val`, both with the same classes. Files are copied byte
    by byte; a sample is `NUMBER.jpg` (or its own suffix) and `NUMBER.cls` with the class number.

    Args:
        folder: class folders, or `train` and `val` with class folders in them.
        out: where the shards go; made if missing. May hold an unfinished run of the same call.
        samples_per_shard: images in a shard; the last one has the rest.
        seed: of the order of the images.
        workers: threads that write.
        progress: show a progress bar; by default only on a terminal.

    Returns:
        The index file of each set of shards; `mmpe.datamodules.ImageShards` reads it from the folder.

    Raises:
        FileNotFoundError: if there are no class folders or no images.
        ValueError: if `train` and `val` have different classes, or `out` holds shards of another call.
    """
    check_counts(samples_per_shard=samples_per_shard, seed=seed, workers=workers)
    folder, out = Path(folder), Path(out)
    splits = [name for name in SPLITS if (folder / name).is_dir()]
    pairs = [(folder / name, out / name) for name in splits] if len(splits) == len(SPLITS) else [(folder, out)]
    plans = [_make_plan(source, samples_per_shard, seed) for source, _ in pairs]
    if len(plans) > 1:
        check_same_classes(plans[0].classes, plans[1].classes, str(pairs[0][0]), str(pairs[1][0]))
    show = sys.stderr.isatty() if progress is None else progress
    return [_write_all(plan, target, workers, show) for plan, (_, target) in zip(plans, pairs, strict=True)]


def _make_plan(source: Path, samples_per_shard: int, seed: int) -> _Plan:
    classes, files = scan_classes(source)
    random.Random(seed).shuffle(files)
    chunks = [files[start : start + samples_per_shard] for start in range(0, len(files), samples_per_shard)]
    digest = hashlib.sha256(json.dumps([classes, samples_per_shard, seed]).encode())
    for path, label in files:
        digest.update(f"{path.relative_to(source).as_posix()}\0{label}\0{path.stat().st_size}\n".encode())
    return _Plan(classes, chunks, samples_per_shard, seed, digest.hexdigest())


def _write_all(plan: _Plan, out: Path, workers: int, show: bool) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    _claim(plan, out)
    todo = [number for number in range(len(plan.chunks)) if not (out / plan.name(number)).is_file()]
    with (
        Progress(console=Console(stderr=True), disable=not show) as bar,
        ThreadPoolExecutor(workers) as pool,
    ):
        task = bar.add_task(str(out), total=len(plan.chunks), completed=len(plan.chunks) - len(todo))
        jobs = [pool.submit(_write_shard, plan, out, number) for number in todo]
        try:
            for job in as_completed(jobs):
                job.result()
                bar.advance(task)
        finally:
            for job in jobs:
                job.cancel()  # after an error, the rest must not run on
    _write_index(plan, out)
    for leftover in out.glob("*.tmp"):
        leftover.unlink(missing_ok=True)
    return out / INDEX_NAME


def _claim(plan: _Plan, out: Path) -> None:
    """Note the plan in `out`, or check that what is there belongs to it."""
    path = out / PLAN_NAME
    if path.is_file():
        if json.loads(path.read_text(encoding="utf-8"))["fingerprint"] != plan.fingerprint:
            raise ValueError(
                f"{out} holds shards of other images or of another samples_per_shard or seed: "
                f"choose another folder, or delete this one"
            )
    elif foreign := sorted(entry.name for entry in out.glob("*.tar")):
        raise ValueError(f"{out} holds {foreign[0]}, which this did not write: choose an empty folder")
    else:
        write_atomically(path, [json.dumps({"fingerprint": plan.fingerprint}).encode()])


def _write_shard(plan: _Plan, out: Path, number: int) -> None:
    write_atomically(out / plan.name(number), _tar_parts(plan, number))


def _tar_parts(plan: _Plan, number: int) -> Iterable[bytes]:
    """The bytes of a shard, member by member, then the end mark."""
    first = number * plan.samples_per_shard
    for offset, (path, label) in enumerate(plan.chunks[number]):
        key = f"{first + offset:09d}"
        yield _member(key + path.suffix.lower(), path.read_bytes())
        yield _member(key + ".cls", str(label).encode())
    yield bytes(tarfile.BLOCKSIZE * 2)


def _member(name: str, data: bytes) -> bytes:
    """One tar member; owner, mode and time are fixed, so equal input gives equal shards."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    padding = bytes(-len(data) % tarfile.BLOCKSIZE)
    return info.tobuf(tarfile.USTAR_FORMAT) + data + padding


def _write_index(plan: _Plan, out: Path) -> None:
    shards = [{"name": plan.name(n), "samples": len(chunk)} for n, chunk in enumerate(plan.chunks)]
    index = {
        "version": VERSION,
        "samples": sum(map(len, plan.chunks)),
        "samples_per_shard": plan.samples_per_shard,
        "seed": plan.seed,
        "classes": plan.classes,
        "shards": shards,
    }
    write_atomically(out / INDEX_NAME, [json.dumps(index, indent=1).encode()])


def write_atomically(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file so that its name appears only with its whole contents, also after a power cut."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, where the system can open folders."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
