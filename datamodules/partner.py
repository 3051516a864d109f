"""`PartnerGrids`: the "direction to the partner" task, made on the fly, trained small and evaluated on larger grids."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import grids
from .base import SizedData, check_sizes
from .loading import Batch, EvalLoader, ResumableLoader, check_counts, generator, rank_and_world


class PartnerGrids(SizedData):
    """Grids of four kinds of tokens; some tokens ask in which of eight directions their partner lies.

    A bias that depends on distance alone cannot exceed 0.25; relative encodings keep working on larger grids. The rule
    is that of `mmpe.datamodules.grids.partner`.

    Batches: {"tokens": (B, G, G) int64 in 0 to 3, "label": (B, G, G) int64 in 0 to 7, -100 where nothing is asked}; in
    validation also "valid": (B,) bool, and the labels of fillers are -100.

    Args:
        grid_size: side of the training grids.
        batch_size: training grids of one process in a step.
        eval_sizes: sides of the validation grids; one validation loader each, named "8x8", "12x12", ...
        steps_per_epoch: training steps that count as an epoch; every one has fresh grids.
        eval_samples: validation grids of each size.
        seed: of the training grids.
        eval_seed: of the validation grids.
        eval_batch_size: grids of one process in a validation step; `batch_size` when not given.
        num_workers: worker processes; making a batch takes a fraction of a millisecond and 0 is fastest.
    """

    num_classes = grids.PARTNER_CLASSES
    in_chans = grids.PARTNER_TOKENS

    def __init__(
        self,
        grid_size: int = 8,
        batch_size: int = 16,
        eval_sizes: Sequence[int] = (8, 12, 16, 24),
        steps_per_epoch: int = 100,
        eval_samples: int = 256,
        seed: int = 0,
        eval_seed: int = 0,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
    ) -> None:
        check_counts(steps_per_epoch=steps_per_epoch, eval_samples=eval_samples)
        super().__init__(batch_size, eval_batch_size, num_workers, seed)
        if min([grid_size, *eval_sizes]) < 2:
            raise ValueError(f"grid_size={grid_size} and eval_sizes={list(eval_sizes)} must be 2 or more")
        self.save_hyperparameters(logger=False)
        self.grid_size = grid_size
        self.num_tokens = grids.PARTNER_TOKENS
        self.eval_sizes = check_sizes(eval_sizes)
        self.eval_names = [f"{size}x{size}" for size in eval_sizes]
        self.steps_per_epoch = steps_per_epoch
        self.eval_samples = eval_samples
        self.eval_seed = eval_seed

    def make_train_loader(self, frozen: bool) -> ResumableLoader:
        return self._train_loader_of(
            FreshGrids(self.steps_per_epoch, self.batch_size, self.grid_size, self.seed), frozen
        )

    def make_eval_loader(self, size: int) -> EvalLoader:
        fixed = FixedGrids(*grids.partner(self.eval_samples, size, generator(self.eval_seed, size, 2)))
        return EvalLoader(fixed, self.eval_batch_size, self.num_workers)


class FreshGrids:
    """New grids for every batch of every epoch; a batch is seeded by the number of its first sample.

    Args:
        steps: batches of an epoch, on each rank.
        batch_size: grids of one rank in a batch.
        size: side of the grids.
        seed: of the grids.
    """

    def __init__(self, steps: int, batch_size: int, size: int, seed: int) -> None:
        self.steps, self.batch_size, self.size, self.seed = steps, batch_size, size, seed

    def __len__(self) -> int:
        return self.steps * self.batch_size * rank_and_world()[1]

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        tokens, label = grids.partner(len(indices), self.size, generator(self.seed, epoch, indices[0], 3))
        return {"tokens": tokens, "label": label}


class FixedGrids:
    """Grids in memory.

    Args:
        tokens: (n, G, G) int64.
        label: (n, G, G) int64.
    """

    def __init__(self, tokens: Tensor, label: Tensor) -> None:
        self.tokens, self.label = tokens, label

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        return {"tokens": self.tokens[list(indices)], "label": self.label[list(indices)]}
