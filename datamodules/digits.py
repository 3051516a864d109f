"""`Digits`: real handwritten digits that come with scikit-learn, trained small and evaluated larger."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .base import SizedData, sizes_of_scales
from .loading import Batch, EvalLoader, ResumableLoader, check_counts, generator

TRAIN_SAMPLES = 1297
MEAN, STD = 0.305, 0.376  # of all pixels, on the scale 0 to 1


class Digits(SizedData):
    """1797 handwritten digits of 8x8 pixels (10 classes, one channel), resized bicubically.

    1297 train, 500 test, split once by `split_seed`. Training pictures are random resized crops (area 0.35 to 1, aspect
    exp(U(-0.2, 0.2)), any position), never flipped. Validation shows the same 500 pictures at each scale.

    Batches: {"image": (B, 1, S, S) float32, normalised, "label": (B,) int64}; in validation also "valid": (B,) bool.

    Args:
        image_size: side of the training pictures, in pixels.
        batch_size: training pictures of one process in a step.
        scales: validation sizes, as multiples of `image_size`; one validation loader each, named "1x", "1.5x", ...
        seed: of the order and of the crops.
        split_seed: of the split into training and test pictures.
        eval_batch_size: pictures of one process in a validation step; `batch_size` when not given.
        num_workers: worker processes; the data are in memory and 0 is fastest.
        augment: whether training pictures are cropped at random.
    """

    num_classes = 10
    in_chans = 1

    def __init__(
        self,
        image_size: int = 16,
        batch_size: int = 128,
        scales: Sequence[float] = (1.0, 1.5, 2.0, 3.0),
        seed: int = 0,
        split_seed: int = 0,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        augment: bool = True,
    ) -> None:
        check_counts(image_size=image_size, split_seed=split_seed)
        super().__init__(batch_size, eval_batch_size, num_workers, seed)
        self.save_hyperparameters(logger=False)
        self.image_size = image_size
        self.eval_sizes, self.eval_names = sizes_of_scales(image_size, scales)
        self.split_seed = split_seed
        self.augment = augment
        self._splits: dict[str, tuple[Tensor, Tensor]] = {}

    def setup(self, stage: str | None = None) -> None:
        if not self._splits:
            images, labels = load_digits()
            order = torch.randperm(len(labels), generator=generator(self.split_seed))
            for name, part in (("train", order[:TRAIN_SAMPLES]), ("val", order[TRAIN_SAMPLES:])):
                self._splits[name] = images[part], labels[part]

    def make_train_loader(self, frozen: bool) -> ResumableLoader:
        seed = self.seed if self.augment else None
        return self._train_loader_of(Pictures(*self._splits["train"], self.image_size, seed), frozen)

    def make_eval_loader(self, size: int) -> EvalLoader:
        return EvalLoader(Pictures(*self._splits["val"], size), self.eval_batch_size, self.num_workers)


def load_digits() -> tuple[Tensor, Tensor]:
    """All pictures (1797, 1, 8, 8) float32, normalised, and their labels (1797,) int64."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn, which is not installed: pip install mmpe[demo]"
        ) from error
    bunch = datasets.load_digits()
    images = torch.from_numpy(bunch.images.astype(np.float32))[:, None] / 16
    return (images - MEAN) / STD, torch.from_numpy(bunch.target.astype(np.int64))


class Pictures:
    """Pictures in memory, resized to one size once and cropped by the batch.

    Args:
        images: (n, C, h, w).
        labels: (n,) int64.
        size: side of the pictures in a batch.
        crop_seed: of the random resized crops; None for whole pictures.
    """

    def __init__(self, images: Tensor, labels: Tensor, size: int, crop_seed: int | None = None) -> None:
        self.images = F.interpolate(images, size=(size, size), mode="bicubic", align_corners=False)  # (n, C, S, S)
        self.labels = labels
        self.crop_seed = crop_seed

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        index = torch.as_tensor(indices)
        images = self.images[index]
        if self.crop_seed is not None:
            # One row of numbers per picture and epoch, so a crop depends on neither batch, rank nor worker.
            draws = torch.rand(len(self), 4, generator=generator(self.crop_seed, epoch, 1))[index]
            images = resized_crops(images, draws)
        return {"image": images, "label": self.labels[index]}


def resized_crops(images: Tensor, draws: Tensor) -> Tensor:
    """Random resized crops: area 0.35 to 1 of the picture, aspect exp(-0.2) to exp(0.2), anywhere inside it.

    Args:
        images: (B, C, S, S).
        draws: (B, 4) uniform in 0 to 1: area, aspect, vertical and horizontal place.
    """
    area, aspect = 0.35 + 0.65 * draws[:, 0], torch.exp(0.4 * draws[:, 1] - 0.2)
    height, width = (area / aspect).sqrt().clamp(max=1), (area * aspect).sqrt().clamp(max=1)  # (B,) shares of a side
    theta = torch.zeros(len(images), 2, 3)
    theta[:, 0, 0], theta[:, 1, 1] = width, height
    theta[:, 0, 2], theta[:, 1, 2] = (1 - width) * (2 * draws[:, 3] - 1), (1 - height) * (2 * draws[:, 2] - 1)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)  # (B, S, S, 2)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
