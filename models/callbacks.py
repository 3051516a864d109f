"""What makes a run survive a kill: randomness by step, checkpoints written whole, and finding the last one again."""

from __future__ import annotations

import os
import pickle
import random
import zipfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

SEED_VARIABLE = "PL_GLOBAL_SEED"  # where Lightning's seed_everything leaves its seed for the other processes


class StepSeed(Callback):
    """Seed torch, numpy and python anew before every optimisation step, from (seed, step, rank).

    What dropout, stochastic depth and mixup draw in a step then depends on the step alone, so a run that was
    interrupted and resumed draws what the uninterrupted run draws. The tasks of `mmpe.models` add it by themselves.

    Args:
        seed: base seed; by default the one of `seed_everything`, or 0.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = run_seed() if seed is None else seed

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # The first batch moves to the device, where it may be augmented, before on_train_batch_start.
        self._seed(trainer, stream=0)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seed(trainer, stream=0)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._seed(trainer, stream=1 + batch_idx % trainer.accumulate_grad_batches)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._seed(trainer, stream=0)

    def _seed(self, trainer: pl.Trainer, stream: int) -> None:
        sequence = numpy.random.SeedSequence((self.seed, trainer.global_step, trainer.global_rank, stream))
        first, second, third = (int(word) for word in sequence.generate_state(3))
        torch.manual_seed(first)
        numpy.random.seed(second)
        random.seed(third)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seed = state_dict["seed"]


def run_seed() -> int:
    """The seed that `seed_everything` set for this run, or 0."""
    return int(os.environ.get(SEED_VARIABLE, 0))


class RunCheckpoint(ModelCheckpoint):
    """`ModelCheckpoint` whose `ckpt_path="last"` also finds the checkpoints of earlier starts of the same run.

    Lightning gives every start of a program a new folder (`version_0`, `version_1`, ...) and looks for the last
    checkpoint in the new one, where there is none yet. This one searches the folders beside it too, and keeps the
    checkpoints whose seed and hyperparameters are those of the run that asks.

    Args:
        every_n_train_steps: save every so many optimisation steps; 0 saves at the end of every epoch only.
        save_top_k: how many of the best checkpoints by `monitor` to keep; 0 keeps the last one only.
        monitor: metric that decides which checkpoint is best, such as "val/top1@1x".
        mode: "max" if a higher `monitor` is better, else "min".
        filename: name of the best checkpoints, as in `ModelCheckpoint`.
        dirpath: folder to write to; by default a new folder a start, below the logger's or `default_root_dir`.
    """

    def __init__(
        self,
        every_n_train_steps: int = 0,
        save_top_k: int = 0,
        monitor: str | None = None,
        mode: str = "max",
        filename: str | None = None,
        dirpath: str | None = None,
    ) -> None:
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=True,
            every_n_train_steps=every_n_train_steps or None,
            every_n_epochs=None if every_n_train_steps else 1,
            auto_insert_metric_name=False,
        )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A run whose length is no multiple of the interval would otherwise end without its last steps on disk.
        super().on_train_end(trainer, pl_module)
        if self._last_global_step_saved != trainer.global_step and not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # The folder of this start is new, but what was best so far in the run still is.
        super().load_state_dict({**state_dict, "dirpath": self.dirpath})

    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        found = {Path(path) for path in super()._find_last_checkpoints(trainer)}
        if self.dirpath is None or not Path(self.dirpath).exists():
            found |= set(run_folder(trainer).glob(f"**/{self.CHECKPOINT_NAME_LAST}*{self.FILE_EXTENSION}"))
        newest_first = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
        return {str(path) for path in islice((p for p in newest_first if is_same_run(p, trainer.lightning_module)), 1)}


def run_folder(trainer: pl.Trainer) -> Path:
    """The folder that holds every start of a run: the logger's, or `default_root_dir`."""
    folder = getattr(trainer.logger, "root_dir", None)
    return Path(folder if isinstance(folder, str) else trainer.default_root_dir)


def is_same_run(path: Path, module: pl.LightningModule) -> bool:
    """True if the checkpoint was written by a run with this seed and these hyperparameters."""
    if path.is_dir():  # sharded by a strategy of Lightning: nothing in it tells the run
        return True
    if is_torn(path):
        raise ValueError(torn_message(path))
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:  # written by other software: no task of ours stores more than plain values
        return False
    seeds = [state["seed"] for name, state in saved.get("callbacks", {}).items() if name.startswith("StepSeed")]
    return saved.get("hyper_parameters", {}) == dict(module.hparams) and seeds in ([], [run_seed()])


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its final name, flushes it to the disk, and renames it in one step.

    A kill at any moment leaves the old file or the new one, never a torn one. (Lightning's own writer goes through
    the system's temporary folder, and where that is another disk the last part is a plain copy.)
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        final = Path(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, final)
        finally:
            partial.unlink(missing_ok=True)
        _flush_folder(final.parent)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Callable | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        try:
            return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        except (EOFError, OSError, RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
            if not is_torn(path):
                raise
            raise ValueError(torn_message(Path(path))) from error


def is_torn(path: Any) -> bool:
    """True if a local file is no complete zip archive, which every torch checkpoint is."""
    return Path(path).is_file() and not zipfile.is_zipfile(path)


def torn_message(path: Path) -> str:
    """What to tell of an incomplete checkpoint: its size, and the newest whole one beside it."""
    others = sorted(
        (p for p in path.parent.glob("*.ckpt") if p != path and not is_torn(p)),
        key=lambda p: p.stat().st_mtime,
        reverse=True,
    )
    hint = f"pass ckpt_path={others[0]}, the newest whole one beside it" if others else "no whole one is beside it"
    return f"checkpoint {path} is incomplete ({path.stat().st_size} bytes); {hint}"


def _flush_folder(folder: Path) -> None:
    """Make the rename itself durable; Windows has no handle on folders and needs none."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
