"""Streams of samples from tar shards, and the two loaders on them: resampled training and exactly-once validation.

Training: every worker of every rank draws shards with replacement from all shards, under the seed
`(seed, epoch, rank, worker)`, shuffles in a buffer and forms batches of a fixed number of stored samples. The epoch is
cut over the whole loader, after `steps` batches, not in each worker. Batches come from the workers in turn, so batch
`k` is the `k // workers`-th of worker `k % workers`: a resumed loader passes over that many stored samples without
decoding them, and gives each sample the random numbers of its place in the stream.

Validation: the shards are dealt out to the workers of all ranks, each sample is read once, and a rank that has fewer
batches than another fills up with batches of one sample that is not `valid`.
"""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from webdataset.filters import shuffle
from webdataset.gopen import gopen
from webdataset.tariterators import group_by_keys, tar_file_iterator

from .image_folder import IMAGE_SUFFIXES, READ_ERRORS, OnError, Transform, describe, read_image, stack_samples
from .image_folder import unreadable as unreadable_error
from .loading import (
    ERRORS,
    Batch,
    ResumableLoader,
    SkipLog,
    TooManyErrorsError,
    as_is,
    log,
    mix_seeds,
    preserved_rng,
    rank_and_world,
    seed_everything,
    with_validity,
)

Sample = dict[str, Any]
SHARD_ERRORS: tuple[type[Exception], ...] = (*READ_ERRORS, tarfile.TarError)


@dataclass
class Notes:
    """Errors of one worker since its last batch, and the policy for them.

    Args:
        on_error: "raise" or "skip".
        most_in_a_row: more errors than this without one sample between them stop the run.
    """

    on_error: OnError
    most_in_a_row: int
    errors: list[tuple[str, str]] = field(default_factory=list)
    in_a_row: int = 0

    def add(self, name: str, error: Exception) -> None:
        """Raise or note an error."""
        if self.on_error == "raise":
            raise unreadable_error(name, error) from error
        self.errors.append((name, describe(error)))
        self.in_a_row += 1
        if self.in_a_row > self.most_in_a_row:
            raise TooManyErrorsError(f"{self.in_a_row} errors without a readable sample; the last: {self.errors[-1]}")

    def take(self) -> list[tuple[str, str]]:
        """The errors so far, forgotten here."""
        errors, self.errors = self.errors, []
        return errors


def stored_samples(urls: Iterable[str], notes: Notes) -> Iterator[Sample]:
    """Undecoded samples of shards one after another; what cannot be read goes to `notes`."""

    def members() -> Iterator[Sample]:
        for url in urls:
            try:
                with gopen(url) as stream:
                    for member in tar_file_iterator(stream):
                        yield {**member, "__url__": url}
            except SHARD_ERRORS as error:
                notes.add(url, error)
            yield {}  # the end of a shard: samples never span two

    def duplicate(error: Exception) -> bool:
        notes.add("a shard", error)
        return True

    return group_by_keys(members(), handler=duplicate)


@dataclass(frozen=True)
class Decoder:
    """From a stored sample to (image, label).

    Args:
        transform: from a PIL image to a tensor.
        size: side of the transformed images.
        label_key: suffix of the member with the class number.
        num_classes: class numbers are below this.
    """

    transform: Transform
    size: int
    label_key: str
    num_classes: int

    def __call__(self, sample: Sample, notes: Notes, *seed: int) -> tuple[Tensor, int] | None:
        """The pair, or None for a broken sample; the transform is seeded by `seed`."""
        try:
            image, label = read_image(io.BytesIO(self._image_bytes(sample))), self._label(sample)
        except READ_ERRORS as error:
            notes.add(f"{sample['__url__']}:{sample['__key__']}", error)
            return None
        notes.in_a_row = 0
        with preserved_rng():
            seed_everything(*seed)
            return self.transform(image), label

    def _image_bytes(self, sample: Sample) -> bytes:
        for key, data in sample.items():
            if f".{key}" in IMAGE_SUFFIXES:
                return data
        raise LookupError(f"no image among its members {sorted(k for k in sample if not k.startswith('__'))}")

    def _label(self, sample: Sample) -> int:
        if self.label_key not in sample:
            raise LookupError(f"no member .{self.label_key} with the class number")
        label = int(sample[self.label_key])
        if not 0 <= label < self.num_classes:
            raise ValueError(f"class number {label} is not in 0 to {self.num_classes - 1}")
        return label


@dataclass
class TrainStream(IterableDataset):
    """The endless resampled stream of one rank's workers; see the module's text.

    Args:
        urls: all shards.
        decoder: makes (image, label).
        batch_size: stored samples of a batch.
        buffer: samples in the shuffle buffer; 0 for none.
        seed: numbers that seed the stream: seed, epoch, salt, rank.
        start: batches of this rank to pass over.
        on_error: policy.
    """

    urls: Sequence[str]
    decoder: Decoder
    batch_size: int
    buffer: int
    seed: tuple[int, ...]
    start: int
    on_error: OnError

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        workers = 1 if info is None else info.num_workers
        worker = (self.start + (0 if info is None else info.id)) % workers  # the first batch is that of start % workers
        passed = len(range(worker, self.start, workers)) * self.batch_size
        notes = Notes(self.on_error, len(self.urls) + self.batch_size)
        stream = islice(self._shuffled(worker, notes), passed, None)
        place = passed
        while chunk := list(islice(stream, self.batch_size)):
            samples = [self.decoder(sample, notes, *self.seed, worker, place + n) for n, sample in enumerate(chunk)]
            place += len(chunk)
            yield stack_samples(_filled(samples, notes), notes.take(), self.decoder.size)

    def _shuffled(self, worker: int, notes: Notes) -> Iterator[Sample]:
        draw = random.Random(mix_seeds(*self.seed, worker, 0))
        stream = stored_samples((draw.choice(self.urls) for _ in iter(int, 1)), notes)
        if self.buffer == 0:
            return stream
        order = random.Random(mix_seeds(*self.seed, worker, 1))
        return iter(shuffle(self.buffer, initial=self.buffer, rng=order)(stream))


def _filled(samples: list[tuple[Tensor, int] | None], notes: Notes) -> list[tuple[Tensor, int] | None]:
    """Broken samples replaced by good ones of the same batch, in turn."""
    good = [sample for sample in samples if sample is not None]
    if not good:
        raise TooManyErrorsError(f"all {len(samples)} samples of a batch are broken; the last: {notes.errors[-1]}")
    spare = iter(good * len(samples))
    return [next(spare) if sample is None else sample for sample in samples]


class StreamTrainLoader(ResumableLoader):
    """Resampled training batches from shards, with a position that a checkpoint can keep.

    When the number of processes, workers or the batch size has changed, a position within an epoch cannot be found
    again: the rest of that epoch then draws fresh samples.

    Args:
        urls: all shards.
        decoder: makes (image, label).
        batch_size: samples of one rank in a batch.
        steps: batches of an epoch, on each rank.
        buffer: samples in each worker's shuffle buffer.
        seed: of the shards drawn, the order and the augmentations.
        num_workers: worker processes, started anew at every epoch.
        on_error: policy for broken samples.
        skipped: as in ResumableLoader.
        frozen: as in ResumableLoader.
    """

    def __init__(
        self,
        urls: Sequence[str],
        decoder: Decoder,
        batch_size: int,
        steps: int,
        buffer: int,
        seed: int,
        num_workers: int,
        on_error: OnError,
        skipped: SkipLog | None = None,
        frozen: bool = False,
    ) -> None:
        super().__init__(skipped, frozen)
        self.urls, self.decoder, self.batch_size, self.steps = urls, decoder, batch_size, steps
        self.buffer, self.seed, self.num_workers, self.on_error = buffer, seed, num_workers, on_error
        self._fresh_from: int | None = None

    def __len__(self) -> int:
        return self.steps

    def layout(self) -> dict[str, int]:
        return {
            "shards": len(self.urls),
            "world": rank_and_world()[1],
            "workers": max(self.num_workers, 1),
            "batch_size": self.batch_size,
            "buffer": self.buffer,
            "seed": self.seed,
        }

    def translate(self, batches: int, layout: Mapping[str, int]) -> int:
        log.warning(
            "saved within an epoch under %s, resumed under %s: the rest of the epoch draws fresh samples",
            dict(layout),
            self.layout(),
        )
        self._fresh_from = batches
        return batches

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        fresh, self._fresh_from = self._fresh_from == start and start > 0, None
        seed = (self.seed, epoch, start if fresh else 0, rank_and_world()[0])
        passed = 0 if fresh else start
        stream = TrainStream(self.urls, self.decoder, self.batch_size, self.buffer, seed, passed, self.on_error)
        yield from islice(stream_loader(stream, self.num_workers), self.steps - start)


@dataclass
class EvalStream(IterableDataset):
    """Every sample of the shards dealt to one worker, once, in batches; the last one may be smaller.

    Args:
        shards: the shards of each worker.
        decoder: makes (image, label).
        batch_size: samples of a batch.
        on_error: policy.
    """

    shards: Sequence[Sequence[str]]
    decoder: Decoder
    batch_size: int
    on_error: OnError

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        urls = self.shards[0 if info is None else info.id]
        notes = Notes(self.on_error, most_in_a_row=2**62)
        stream = iter(stored_samples(urls, notes))
        while chunk := list(islice(stream, self.batch_size)):
            samples = [self.decoder(sample, notes, 0) for sample in chunk]
            yield stack_samples(samples, notes.take(), self.decoder.size)
        if notes.errors:
            yield {ERRORS: notes.take()}


class StreamEvalLoader:
    """Each sample of the shards exactly once over all ranks and workers, the same number of batches on each rank.

    Batches carry `valid` as those of `EvalLoader`.

    Args:
        urls: all shards.
        counts: samples of each shard.
        decoder: makes (image, label).
        batch_size: samples of one rank in a batch.
        num_workers: worker processes; no more are used than a rank has shards.
        on_error: policy for broken samples.
        skipped: takes the messages about broken samples out of the batches.
    """

    def __init__(
        self,
        urls: Sequence[str],
        counts: Sequence[int],
        decoder: Decoder,
        batch_size: int,
        num_workers: int,
        on_error: OnError,
        skipped: SkipLog | None = None,
    ) -> None:
        self.urls, self.counts, self.decoder, self.batch_size = urls, counts, decoder, batch_size
        self.num_workers, self.on_error, self.skipped = num_workers, on_error, skipped

    def deal(self, rank: int, world: int) -> list[list[int]]:
        """The numbers of the shards of each worker of a rank."""
        most = max(1, len(self.urls) // world)
        workers = max(1, min(self.num_workers, most))
        parts = world * workers
        return [list(range(rank + world * worker, len(self.urls), parts)) for worker in range(workers)]

    def steps(self, rank: int, world: int) -> int:
        """Batches that a rank's own samples make."""
        samples = [sum(self.counts[n] for n in numbers) for numbers in self.deal(rank, world)]
        return sum(-(-total // self.batch_size) for total in samples)

    def __len__(self) -> int:
        world = rank_and_world()[1]
        return max(self.steps(rank, world) for rank in range(world))

    def __iter__(self) -> Iterator[Batch]:
        done = 0
        for batch in self._own_batches():
            done += 1
            if done > len(self):
                raise ValueError("the shards hold more samples than their index says: make the index again")
            yield with_validity(batch, torch.ones(len(batch["label"]), dtype=torch.bool))
        for _ in range(len(self) - done):
            yield stack_samples([None], [], self.decoder.size) | {"valid": torch.tensor([False])}

    def _own_batches(self) -> Iterator[Batch]:
        shards = [[self.urls[n] for n in numbers] for numbers in self.deal(*rank_and_world())]
        stream = EvalStream(shards, self.decoder, self.batch_size, self.on_error)
        for batch in stream_loader(stream, len(shards) if self.num_workers else 0):
            errors = batch.pop(ERRORS, ())
            if self.skipped is not None:
                self.skipped.add(errors)
            if batch:
                yield batch


def stream_loader(stream: IterableDataset, num_workers: int) -> DataLoader:
    """A torch loader around a stream that yields whole batches, leaving the process's random numbers alone."""
    return DataLoader(
        stream,
        batch_size=None,
        num_workers=num_workers,
        collate_fn=as_is,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),
    )
