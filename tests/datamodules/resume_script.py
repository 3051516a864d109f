"""A tiny training run for test_data_resume.py: `python resume_script.py WORKDIR DATA WORKERS [CKPT]`.

Writes the final weights, and for every step what was seen, to WORKDIR.
"""

import json
import os
import signal
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from mmpe.datamodules import Digits, ImageFolder, ImageShards
from mmpe.datamodules.base import SizedData


class Tiny(pl.LightningModule):
    """A linear classifier that notes what it saw."""

    def __init__(self, inputs: int, classes: int, kill_at: int) -> None:
        super().__init__()
        self.kill_at = kill_at
        self.head = torch.nn.Linear(inputs, classes)
        self.seen: dict[int, float] = {}

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        if self.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen[self.global_step] = batch["image"].double().sum().item()
        return torch.nn.functional.cross_entropy(self.head(batch["image"].flatten(1)), batch["label"])

    def validation_step(self, batch: dict[str, torch.Tensor], index: int, dataloader_idx: int = 0) -> None:
        assert batch["valid"].all()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def make_data(kind: str, workers: int) -> SizedData:
    """The datamodule under test; `kind` is "digits" or KIND:PATH."""
    kind, _, path = kind.partition(":")
    if kind == "digits":
        return Digits(batch_size=128, num_workers=workers, scales=[1.0])
    small = {"image_size": 16, "batch_size": 4, "num_workers": workers}
    if kind == "folder":
        return ImageFolder(path, **small)
    return ImageShards(f"{path}/train", f"{path}/val", shuffle_buffer=8, steps_per_epoch=9, **small)


def run(work: Path, kind: str, workers: int, kill_at: int = -1, ckpt: str | None = None) -> None:
    """Train three epochs, saving every 4 steps; SIGKILL in the middle of step `kill_at`."""
    work.mkdir(exist_ok=True)
    data = make_data(kind, workers)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Tiny(data.in_chans * data.image_size**2, data.num_classes, kill_at)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(work, every_n_train_steps=4, save_top_k=-1, filename="{step}")],
    )
    trainer.fit(model, data, ckpt_path=ckpt, weights_only=True)
    torch.save(model.state_dict(), work / "weights.pt")
    (work / "seen.json").write_text(json.dumps(model.seen))


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), ckpt=sys.argv[4])
