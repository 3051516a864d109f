"""Loaders whose order and augmentations survive a kill: same data after a resume as in an uninterrupted run.

Three rules make it so:

* The order of an epoch is a permutation drawn from `(seed, epoch)`. Global batch `k` is its k-th slice of
  `batch_size * world_size`, and a rank takes its part of that slice, so every rank knows its batches without asking.
* The random numbers of a sample are drawn from `(seed, epoch, index)`, whichever worker or rank computes it.
* A loader carries its position as `state_dict`. Lightning stores that in every checkpoint and hands it back on resume.

The loaders here are no `torch.utils.data.DataLoader`, therefore Lightning never wraps their sampler: they shard by rank
themselves, and `Trainer(use_distributed_sampler=...)` changes nothing. `_batches` runs at the first `next`, not at
`iter`: on resume Lightning calls `iter` before it sets the epoch.

A checkpoint may be saved at any step, after a validation or at the end of an epoch. One case is Lightning's own: with
`max_steps` and no validation in an epoch, resuming from its end adds a step to that epoch, and the order moves. Save
by steps there.
"""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

log = logging.getLogger("mmpe.datamodules")
Batch = dict[str, Any]
ERRORS = "__errors__"  # key under which a worker sends messages of skipped samples to the main process


def rank_and_world() -> tuple[int, int]:
    """Rank of this process and number of processes; (0, 1) outside distributed training."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def mix_seeds(*key: int) -> int:
    """A 63-bit seed from any number of non-negative integers; different keys give unrelated seeds."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator(*key: int) -> torch.Generator:
    """A CPU generator seeded by `mix_seeds`."""
    return torch.Generator().manual_seed(mix_seeds(*key))


def seed_everything(*key: int) -> None:
    """Seed `random`, numpy and torch (CPU) of this process by `mix_seeds`."""
    seed = mix_seeds(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Put the states of `random`, numpy and torch (CPU) back on leaving: augmentations must not move the model's."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class TooManyErrorsError(RuntimeError):
    """More samples were skipped than the policy allows."""


class SkipLog:
    """Samples that could not be read: each counted once by name, and a limit.

    Args:
        max_errors: more different broken samples than this stop the run. The count is that of one process.
    """

    def __init__(self, max_errors: int) -> None:
        if max_errors < 0:
            raise ValueError(f"max_errors={max_errors} must be 0 or more")
        self.max_errors = max_errors
        self.reasons: dict[str, str] = {}

    @property
    def count(self) -> int:
        """How many different samples were skipped."""
        return len(self.reasons)

    def add(self, errors: Sequence[tuple[str, str]]) -> None:
        """Note (name, reason) pairs; raise when there are more than the limit."""
        for name, reason in errors:
            if name not in self.reasons:
                self.reasons[name] = reason
                log.warning("skipped %s: %s", name, reason)
        if self.count > self.max_errors:
            raise TooManyErrorsError(
                f"{self.report()}\nMore than max_errors={self.max_errors}: repair or remove them, or raise the limit."
            )

    def report(self, most: int = 10) -> str:
        """One line a sample, at most `most` of them."""
        lines = [f"{self.count} broken sample(s) skipped:"]
        lines += [f"  {name}: {reason}" for name, reason in list(self.reasons.items())[:most]]
        return "\n".join(lines + (["  ..."] if self.count > most else []))


class Source(Protocol):
    """What a loader reads from: numbered samples, a whole batch at a time."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Tensors of these samples; a pure function of the source's seed, `indices` and `epoch`."""


class _Keyed:
    """A map-style data set whose keys are (epoch, indices): persistent workers learn the epoch from the key."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, key: tuple[int, Sequence[int]]) -> Batch:
        with preserved_rng():
            return self.source.batch(key[1], key[0])


class _Keys:
    """The sampler under the torch loader: keys set anew for every pass."""

    def __init__(self) -> None:
        self.keys: Sequence[tuple[int, Sequence[int]]] = ()

    def __iter__(self) -> Iterator[tuple[int, Sequence[int]]]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)


def as_is(batch: Any) -> Any:
    """The collate function of a loader whose data set returns whole batches."""
    return batch


def _torch_loader(source: Source, keys: _Keys, num_workers: int, persistent: bool) -> DataLoader:
    # Its own generator, because the loader draws a base seed at every pass, and the model's stream must not notice.
    return DataLoader(
        _Keyed(source),  # type: ignore[arg-type]
        sampler=keys,
        batch_size=None,
        num_workers=num_workers,
        collate_fn=as_is,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=persistent and num_workers > 0,
        generator=torch.Generator(),
    )


def check_counts(**counts: int) -> None:
    """Raise ValueError for a batch size, number of workers, ... below its minimum (0 for names with "num_workers")."""
    for name, value in counts.items():
        least = 0 if name in ("num_workers", "seed", "split_seed", "shuffle_buffer") else 1
        if value < least:
            raise ValueError(f"{name}={value} must be {least} or more")


class ResumableLoader(ABC):
    """A training loader with a position: (epoch, batches delivered in it).

    Iterating starts at the position that `load_state_dict` set, once; afterwards at the start of the epoch that
    `set_epoch` set (Lightning calls it; in a plain loop call it as for a DistributedSampler).

    Args:
        skipped: takes the messages about broken samples out of the batches.
        frozen: every epoch repeats epoch 0, as `Trainer(overfit_batches=...)` asks.
    """

    def __init__(self, skipped: SkipLog | None = None, frozen: bool = False) -> None:
        self.skipped = skipped
        self.frozen = frozen
        self._epoch = self._pending = self._delivered = self._shift = 0
        self._resumed: int | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Batches of an epoch on every rank."""

    @abstractmethod
    def layout(self) -> dict[str, int]:
        """What the meaning of a position depends on; stored beside it."""

    @abstractmethod
    def translate(self, batches: int, layout: Mapping[str, int]) -> int:
        """The position in this loader that continues one saved under another layout."""

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on."""

    @property
    def sampler(self) -> ResumableLoader:
        """Itself: Lightning calls `loader.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; a pending position of the same epoch is kept.

        With `max_steps`, Lightning resumes from a checkpoint of the end of an epoch by counting that epoch twice. So
        right after a resume this goes no further than the epoch after the saved one, and keeps the difference.
        """
        target = epoch - self._shift
        if self._resumed is not None and target > self._resumed + 1:
            self._shift += target - (self._resumed + 1)
            target = self._resumed + 1
        if target != self._epoch:
            self._epoch, self._pending, self._delivered = target, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The position, in plain values."""
        return {"epoch": self._epoch, "batches": self._delivered, "shift": self._shift, "layout": self.layout()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position; one at the end of an epoch means the start of the next."""
        epoch, batches = int(state["epoch"]), int(state["batches"])
        if batches and dict(state["layout"]) != self.layout():
            batches = self.translate(batches, state["layout"])
        self._shift, self._resumed = int(state["shift"]), epoch
        if batches >= len(self):
            epoch, batches = epoch + 1, 0
        self._epoch, self._pending, self._delivered = epoch, batches, batches

    def __iter__(self) -> Iterator[Batch]:
        start, self._pending = self._pending, 0
        self._delivered = start
        for batch in self._batches(0 if self.frozen else self._epoch, start):
            errors = batch.pop(ERRORS, ())
            if self.skipped is not None:
                self.skipped.add(errors)
            self._resumed = None
            self._delivered += 1  # before the yield: a checkpoint of this step counts this batch
            yield batch


class TrainLoader(ResumableLoader):
    """Shuffled batches of a numbered source, sharded by rank, the last incomplete global batch dropped.

    Args:
        source: the samples.
        batch_size: samples of one rank in a batch.
        seed: of the order; augmentations are the source's own.
        num_workers: worker processes, kept between epochs; 0 loads in this process.
        skipped: as in ResumableLoader.
        frozen: as in ResumableLoader.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        seed: int = 0,
        num_workers: int = 0,
        skipped: SkipLog | None = None,
        frozen: bool = False,
    ) -> None:
        check_counts(batch_size=batch_size, num_workers=num_workers, seed=seed)
        super().__init__(skipped, frozen)
        self.source, self.batch_size, self.seed = source, batch_size, seed
        self._keys = _Keys()
        self._num_workers = num_workers
        self._loader: DataLoader | None = None
        if len(self) == 0:
            raise ValueError(
                f"{len(source)} training samples do not fill one global batch of {self._global_batch()} "
                f"(batch_size={batch_size} x {rank_and_world()[1]} processes): lower batch_size"
            )

    def _global_batch(self) -> int:
        return self.batch_size * rank_and_world()[1]

    def __len__(self) -> int:
        return len(self.source) // self._global_batch()

    def layout(self) -> dict[str, int]:
        return {"samples": len(self.source), "global_batch": self._global_batch(), "seed": self.seed}

    def translate(self, batches: int, layout: Mapping[str, int]) -> int:
        for name in ("samples", "seed"):
            if layout[name] != self.layout()[name]:
                raise ValueError(
                    f"the checkpoint was saved within an epoch with {name}={layout[name]}, the data now have "
                    f"{name}={self.layout()[name]}: its place in the epoch has no meaning here. Resume with the same "
                    f"data and seed, or from a checkpoint saved at the end of an epoch."
                )
        return -(-batches * layout["global_batch"] // self._global_batch())

    def order(self, epoch: int) -> Tensor:
        """The samples of an epoch, all ranks together, in order."""
        return torch.randperm(len(self.source), generator=generator(self.seed, epoch))

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        rank, world = rank_and_world()
        size = self.batch_size * world
        order = self.order(epoch)[: len(self) * size].view(len(self), world, self.batch_size)
        self._keys.keys = [(epoch, indices) for indices in order[start:, rank].tolist()]
        if self._loader is None:
            self._loader = _torch_loader(self.source, self._keys, self._num_workers, persistent=True)
        yield from self._loader

    def close(self) -> None:
        """End the worker processes that are kept between epochs."""
        self._loader = None


def with_validity(batch: Batch, valid: Tensor) -> Batch:
    """The batch with `valid` (B,), joined with its own; labels of single tokens become -100 where it is False."""
    valid = valid & batch["valid"] if "valid" in batch else valid
    label = batch["label"]
    if label.ndim > 1:
        label = label.masked_fill(~valid.view(-1, *[1] * (label.ndim - 1)), -100)
    return {**batch, "label": label, "valid": valid}


class EvalLoader:
    """Every sample exactly once over all ranks, and the same number of batches on each.

    The batches carry `valid` (B,) bool: False marks a filler, repeated where the samples do not divide evenly among
    the ranks, or a sample that could not be read. Sums over `valid` entries, added over ranks, count each sample once.
    With one process there are no fillers.

    Args:
        source: the samples, read with epoch 0.
        batch_size: samples of one rank in a batch.
        num_workers: worker processes; 0 loads in this process.
        skipped: takes the messages about broken samples out of the batches.
    """

    def __init__(self, source: Source, batch_size: int, num_workers: int = 0, skipped: SkipLog | None = None) -> None:
        check_counts(batch_size=batch_size, num_workers=num_workers)
        self.source, self.batch_size, self.skipped = source, batch_size, skipped
        self._num_workers = num_workers

    def __len__(self) -> int:
        return -(-len(self.source) // (self.batch_size * rank_and_world()[1]))

    def plan(self, rank: int, world: int) -> list[tuple[list[int], int]]:
        """Per batch of a rank: the indices, and how many of them (the first ones) are no fillers."""
        total, batches = len(self.source), []
        for first in range(0, total, self.batch_size * world):
            end = min(first + self.batch_size * world, total)
            share = -(-(end - first) // world)
            mine = list(range(first + rank * share, min(first + (rank + 1) * share, end)))
            batches.append((mine + [first] * (share - len(mine)), len(mine)))
        return batches

    def __iter__(self) -> Iterator[Batch]:
        plan = self.plan(*rank_and_world())
        keys = _Keys()
        keys.keys = [(0, indices) for indices, _ in plan]
        loader = _torch_loader(self.source, keys, self._num_workers, persistent=False)
        for batch, (indices, genuine) in zip(loader, plan, strict=True):
            errors = batch.pop(ERRORS, ())
            if self.skipped is not None:
                self.skipped.add(errors)
            valid = torch.arange(len(indices)) < genuine  # (B,)
            yield with_validity(batch, valid)
