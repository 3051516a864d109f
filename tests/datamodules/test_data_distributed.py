"""Two processes (gloo): each validation sample once, equal steps, disjoint training parts; Lightning as it comes."""

import json
import logging
from collections import Counter
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from mmpe.datamodules import ImageFolder, ImageShards, PartnerGrids, make_shards
from mmpe.datamodules.base import SizedData

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec")  # Lightning uses what torch 2.14 calls old
SMALL = {"image_size": 16, "batch_size": 2, "num_workers": 0}


class Recorder(pl.LightningModule):
    """Notes the labels of every step and meets the other process in each, so unequal steps would time out."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out = out
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.trained: list[list[float]] = []
        self.validated: list[int] = []
        self.steps = 0

    def training_step(self, batch, index):
        self.trained.append([image.double().sum().item() for image in batch["image"]])
        return self.scale * batch["image"].mean()

    def validation_step(self, batch, index, dataloader_idx=0):
        self.steps += 1
        dist.all_reduce(torch.ones(1))
        self.validated += batch["label"][batch["valid"]].tolist()

    def on_fit_end(self):
        record = {"trained": self.trained, "validated": self.validated, "steps": self.steps}
        (self.out / f"{self.global_rank}.json").write_text(json.dumps(record))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit_in_two_processes(data: SizedData, out: Path) -> list[dict]:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", start_method="fork", timeout=timedelta(seconds=60)),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Recorder(out), data)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def test_image_folder_in_two_processes(tmp_path, pictures):
    ranks = fit_in_two_processes(ImageFolder(pictures, **SMALL), tmp_path)
    assert Counter(ranks[0]["validated"] + ranks[1]["validated"]) == {0: 5, 1: 5, 2: 5}
    assert ranks[0]["steps"] == ranks[1]["steps"] == 4
    assert [len(rank["trained"]) for rank in ranks] == [30 // 4] * 2
    seen = [image for rank in ranks for step in rank["trained"] for image in step]
    assert len(set(seen)) == len(seen) == 28


def test_image_shards_in_two_processes(tmp_path, pictures):
    make_shards(pictures, tmp_path / "shards", samples_per_shard=4)  # validation: 4, 4, 4 and 3 samples
    shards = ImageShards(f"{tmp_path}/shards/train", f"{tmp_path}/shards/val", shuffle_buffer=4, **SMALL)
    ranks = fit_in_two_processes(shards, tmp_path)
    assert Counter(ranks[0]["validated"] + ranks[1]["validated"]) == {0: 5, 1: 5, 2: 5}
    assert ranks[0]["steps"] == ranks[1]["steps"]
    assert [len(rank["trained"]) for rank in ranks] == [30 // 4] * 2
    assert ranks[0]["trained"] != ranks[1]["trained"]


def test_fillers_of_token_labels_are_ignored(monkeypatch):
    grids = []
    for rank in range(2):
        monkeypatch.setattr("mmpe.datamodules.loading.rank_and_world", lambda rank=rank: (rank, 2))
        grids.append(list(PartnerGrids(eval_samples=5, eval_sizes=[8], batch_size=2).val_dataloader()[0]))
    filler = grids[1][-1]
    assert filler["valid"].tolist() == [False]
    assert (filler["label"] == -100).all()
    assert sum(int(batch["valid"].sum()) for batches in grids for batch in batches) == 5
