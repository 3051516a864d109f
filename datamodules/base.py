"""What the datamodules share: names of the evaluation sizes, loaders, the report about broken samples."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from .loading import EvalLoader, ResumableLoader, SkipLog, TrainLoader, check_counts, log

Loader = ResumableLoader | EvalLoader


class SizedData(pl.LightningDataModule):
    """A datamodule that trains at one size and evaluates at several: one validation loader per size.

    The loaders shard by rank themselves, so `Trainer(use_distributed_sampler=False)` says how it is; with the default
    True Lightning leaves them as they are too.

    Attributes:
        num_classes: classes of the labels.
        in_chans: channels of an image; kinds of tokens where there are no images.
        eval_sizes: side of the images or grids of each validation loader.
        eval_names: name of each validation loader, for metrics and tables.
        skipped: what could not be read so far, in this process.
    """

    num_classes: int
    in_chans: int
    eval_sizes: list[int]
    eval_names: list[str]

    def __init__(
        self,
        batch_size: int,
        eval_batch_size: int | None,
        num_workers: int,
        seed: int,
        max_errors: int = 0,
    ) -> None:
        check_counts(
            batch_size=batch_size, eval_batch_size=eval_batch_size or batch_size, num_workers=num_workers, seed=seed
        )
        super().__init__()
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.skipped = SkipLog(max_errors)
        self._train_loader: ResumableLoader | None = None

    def __str__(self) -> str:  # Lightning's own builds every loader to print their lengths
        return f"{type(self).__name__}({self.num_classes} classes, evaluated at {', '.join(self.eval_names)})"

    @abstractmethod
    def make_train_loader(self, frozen: bool) -> ResumableLoader:
        """The training loader; `frozen` repeats the first epoch."""

    @abstractmethod
    def make_eval_loader(self, size: int) -> EvalLoader:
        """The validation loader of one size."""

    def train_dataloader(self) -> ResumableLoader:
        overfit = self.trainer is not None and getattr(self.trainer, "overfit_batches", 0) > 0
        self._train_loader = self.make_train_loader(frozen=overfit)
        return self._train_loader

    def val_dataloader(self) -> list[Any]:
        return [self.make_eval_loader(size) for size in self.eval_sizes]

    def test_dataloader(self) -> list[Any]:
        return self.val_dataloader()

    def predict_dataloader(self) -> list[Any]:
        return self.val_dataloader()

    def teardown(self, stage: str) -> None:
        if isinstance(self._train_loader, TrainLoader):
            self._train_loader.close()
        self._train_loader = None
        if self.skipped.count:
            log.warning(self.skipped.report())

    def _train_loader_of(self, source: Any, frozen: bool) -> TrainLoader:
        return TrainLoader(source, self.batch_size, self.seed, self.num_workers, self.skipped, frozen)


def sizes_of_scales(image_size: int, scales: Sequence[float]) -> tuple[list[int], list[str]]:
    """Image sizes and names, such as [16, 24] and ["1x", "1.5x"], of multiples of a size."""
    if not scales or not all(0 < scale < math.inf for scale in scales):
        raise ValueError(f"scales={list(scales)} must be one or more positive multiples of the training size")
    if len(set(scales)) < len(scales):
        raise ValueError(f"scales={list(scales)} names a size twice")
    return [round(image_size * scale) for scale in scales], [f"{scale:g}x" for scale in scales]


def check_sizes(sizes: Sequence[int]) -> list[int]:
    """The evaluation sizes as a list, each positive and named once."""
    if not sizes or any(size < 1 for size in sizes) or len(set(sizes)) < len(sizes):
        raise ValueError(f"eval_sizes={list(sizes)} must be one or more different positive sizes")
    return list(sizes)
