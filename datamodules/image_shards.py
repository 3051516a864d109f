"""`ImageShards`: labelled images in webdataset shards, for ImageNet-sized training on many processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .image_folder import DEFAULT_TRANSFORMS, ImageData, ImageTransforms, OnError, Transform, check_same_classes
from .loading import ResumableLoader, check_counts, rank_and_world
from .shard_index import ShardIndex, open_shards
from .shard_streams import Decoder, StreamEvalLoader, StreamTrainLoader


class ImageShards(ImageData):
    """Images in tar shards: a sample is `KEY.jpg` (or another image suffix) and `KEY.cls` with the class number.

    Training draws shards with replacement, differently in every worker of every process. Validation shows each sample
    exactly once over all processes and workers, and every process takes the same number of steps; "valid" marks what
    counts. `mmpe shards make` writes shards with an index of classes and counts.

    Batches: {"image": (B, 3, S, S) float32, normalised, "label": (B,) int64}; in validation also "valid": (B,) bool.

    Killed and resumed, training goes on with the same samples and augmentations: the stream of a worker follows from
    seed, epoch, process and worker, and a resumed one passes over what was seen. With another number of processes or
    workers, the rest of the epoch draws fresh samples.

    Args:
        train: folder of training shards, or urls such as "/data/train-{000000..001023}.tar", "https://..." or
            "pipe:COMMAND"; several joined by "::".
        val: the same for validation; these must be local, or have an index beside them.
        image_size: side of the training images, in pixels.
        eval_sizes: sides of the validation images; one validation loader each, named "224px", ...; `image_size` alone
            when not given.
        batch_size: training images of one process in a step.
        eval_batch_size: images of one process in a validation step; `batch_size` when not given.
        num_workers: worker processes that read and augment; 0 does so in the training process.
        seed: of the shards drawn, the order and the augmentations.
        transforms: augmentation and preprocessing.
        on_error: what a broken shard or sample does: "raise" stops the run, "skip" counts it. A broken training sample
            is replaced by another one of its batch.
        max_errors: with "skip", more different broken shards and samples than this stop the run.
        num_classes: number of classes; needed where the shards have no index.
        steps_per_epoch: training steps that count as an epoch; by default as many as make the number of samples.
        shuffle_buffer: stored samples in each worker's shuffle buffer.
        label_key: suffix of the member with the class number.
    """

    def __init__(
        self,
        train: str,
        val: str,
        image_size: int = 224,
        eval_sizes: Sequence[int] | None = None,
        batch_size: int = 128,
        eval_batch_size: int | None = None,
        num_workers: int = 4,
        seed: int = 0,
        transforms: ImageTransforms = DEFAULT_TRANSFORMS,
        on_error: OnError = "raise",
        max_errors: int = 100,
        num_classes: int | None = None,
        steps_per_epoch: int | None = None,
        shuffle_buffer: int = 1000,
        label_key: str = "cls",
    ) -> None:
        super().__init__(
            image_size, eval_sizes, batch_size, eval_batch_size, num_workers, seed, transforms, on_error, max_errors
        )
        check_counts(shuffle_buffer=shuffle_buffer, steps_per_epoch=1 if steps_per_epoch is None else steps_per_epoch)
        train, val, transforms = str(train), str(val), asdict(self.transforms)  # type: ignore[assignment]
        self.save_hyperparameters(logger=False)
        self.train_shards, self.val_shards = open_shards(train), open_shards(val)
        self.num_classes = _number_of_classes(self.train_shards, self.val_shards, num_classes)
        self.steps_per_epoch, self.shuffle_buffer, self.label_key = steps_per_epoch, shuffle_buffer, label_key
        if steps_per_epoch is None and not self.train_shards.counts:
            raise ValueError("the number of samples in remote training shards is unknown: pass steps_per_epoch")
        if not self.val_shards.counts:
            raise ValueError(f"exactly-once validation needs the number of samples in each shard: keep {val} locally")

    def setup(self, stage: str | None = None) -> None:
        if stage in (None, "fit"):
            self._steps()
            world, shards, workers = rank_and_world()[1], len(self.train_shards.urls), max(1, self.num_workers)
            if shards < world * workers:
                raise ValueError(
                    f"{shards} training shards are too few for {world} processes x {workers} workers = "
                    f"{world * workers} readers: lower num_workers to {shards // world} "
                    f"or write smaller shards (samples_per_shard of mmpe shards make)"
                )

    def _steps(self) -> int:
        world = rank_and_world()[1]
        steps = self.steps_per_epoch or self.train_shards.samples // (self.batch_size * world)
        if steps == 0:
            raise ValueError(
                f"{self.train_shards.samples} training samples do not fill one global batch of batch_size="
                f"{self.batch_size} x {world} processes: lower batch_size or pass steps_per_epoch"
            )
        return steps

    def _decoder(self, transform: Transform, size: int) -> Decoder:
        return Decoder(transform, size, self.label_key, self.num_classes)

    def make_train_loader(self, frozen: bool) -> ResumableLoader:
        decoder = self._decoder(self.transforms.train(self.image_size), self.image_size)
        return StreamTrainLoader(
            self.train_shards.urls,
            decoder,
            self.batch_size,
            self._steps(),
            self.shuffle_buffer,
            self.seed,
            self.num_workers,
            self.on_error,
            self.skipped,
            frozen,
        )

    def make_eval_loader(self, size: int) -> Any:
        return StreamEvalLoader(
            self.val_shards.urls,
            self.val_shards.counts,
            self._decoder(self.transforms.evaluate(size), size),
            self.eval_batch_size,
            self.num_workers,
            self.on_error,
            self.skipped,
        )


def _number_of_classes(train: ShardIndex, val: ShardIndex, given: int | None) -> int:
    """The number of classes that the indexes and the argument agree on."""
    if train.classes and val.classes:
        check_same_classes(train.classes, val.classes, "training shards", "validation shards")
    known = len(train.classes or val.classes)
    if given is None and not known:
        raise ValueError("the shards have no index.json with class names: pass num_classes")
    if given is not None and known and given != known:
        raise ValueError(f"num_classes={given}, but the index of the shards names {known} classes")
    return given or known
