"""Killed in the middle of an epoch and resumed, a run sees the same data and ends with the same weights, bit by bit."""

import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import resume_script
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from mmpe.datamodules import make_shards
from mmpe.datamodules.loading import EvalLoader, ResumableLoader, TrainLoader, preserved_rng, seed_everything

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec"),  # Lightning uses what torch 2.14 calls old
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),  # left out on purpose
]


@pytest.fixture
def quiet_lightning():
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


SCRIPT = Path(__file__).with_name("resume_script.py")
ROOT = SCRIPT.parent.parent.parent


def run(work: Path, data: str, workers: int, kill_at: int = -1) -> int | None:
    """A run in a forked process: the libraries are loaded already."""
    process = multiprocessing.get_context("fork").Process(target=resume_script.run, args=(work, data, workers, kill_at))
    process.start()
    process.join(120)
    return process.exitcode


def resume(work: Path, data: str, workers: int, ckpt: Path) -> None:
    """A run in a new interpreter, as after a crash."""
    command = [sys.executable, str(SCRIPT), str(work), data, str(workers), str(ckpt)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def check_killed_equals_uninterrupted(work: Path, data: str, workers: int) -> None:
    assert run(work / "whole", data, workers) == 0
    assert run(work / "killed", data, workers, kill_at=14) == -signal.SIGKILL
    last = work / "killed" / "step=12.ckpt"
    assert last.is_file()
    assert not (work / "killed" / "step=16.ckpt").exists()
    resume(work / "killed", data, workers, last)
    whole, resumed = (json.loads((work / name / "seen.json").read_text()) for name in ("whole", "killed"))
    assert min(map(int, resumed)) == 12
    assert resumed == {step: total for step, total in whole.items() if int(step) >= 12}
    one, other = (torch.load(work / name / "weights.pt", weights_only=True) for name in ("whole", "killed"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_killed_run_on_digits(tmp_path, quiet_lightning):
    check_killed_equals_uninterrupted(tmp_path, "digits", 0)


@pytest.mark.slow
def test_killed_run_on_image_folder_with_workers(tmp_path, quiet_lightning, pictures):
    check_killed_equals_uninterrupted(tmp_path, f"folder:{pictures}", 2)


@pytest.mark.slow
def test_killed_run_on_digits_with_workers(tmp_path, quiet_lightning):
    check_killed_equals_uninterrupted(tmp_path, "digits", 2)


@pytest.mark.slow
def test_killed_run_on_shards_with_workers(tmp_path, quiet_lightning, pictures):
    make_shards(pictures, tmp_path / "shards", samples_per_shard=4)
    check_killed_equals_uninterrupted(tmp_path, f"shards:{tmp_path / 'shards'}", 2)


# In one process: every place at which Lightning can save a checkpoint, with and without worker processes.


class Numbers:
    """22 samples that are their own number, with noise from the sample's seed."""

    def __len__(self) -> int:
        return 22

    def batch(self, indices, epoch):
        rows = []
        for index in indices:
            seed_everything(1, epoch, index)
            rows.append([index, epoch, random.random(), np.random.rand(), torch.rand(()).item()])
        return {"x": torch.tensor(rows), "label": torch.tensor(list(indices))}


class Notebook(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(5, 1)
        self.seen: dict[int, list] = {}

    def training_step(self, batch, index):
        self.seen.setdefault(self.global_step, []).append(batch["x"].tolist())
        return self.layer(batch["x"] / 10).square().mean()

    def validation_step(self, batch, index):
        pass

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class AfterValidation(ModelCheckpoint):
    """A second kind, since Lightning allows one of each."""


def fit(workers, folder=None, ckpt=None, **options):
    """Train; with a folder, save at every place."""
    model = Notebook()
    callbacks = (
        []
        if folder is None
        else [
            ModelCheckpoint(folder / "step", every_n_train_steps=1, save_top_k=-1),
            ModelCheckpoint(folder / "epoch", save_on_train_epoch_end=True, save_top_k=-1),
            AfterValidation(folder / "val", save_on_train_epoch_end=False, save_top_k=-1),
        ]
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=callbacks, enable_checkpointing=folder is not None, **quiet, **options
    )
    train = TrainLoader(Numbers(), 4, seed=3, num_workers=workers)
    trainer.fit(model, train, EvalLoader(Numbers(), 4), ckpt_path=ckpt, weights_only=True)
    train.close()
    return model


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 3},
        {"max_steps": 13},
        {"max_epochs": 4, "limit_train_batches": 3},
        {"max_steps": 11, "limit_train_batches": 3},
        {"max_epochs": 2, "val_check_interval": 2},
        {"max_steps": 7, "accumulate_grad_batches": 2},
    ],
    ids=str,
)
def test_resumed_from_any_checkpoint(tmp_path, quiet_lightning, options, workers):
    whole = fit(workers, tmp_path, **options)
    checkpoints = sorted(tmp_path.glob("*/*.ckpt"))
    assert len(checkpoints) > 8
    for ckpt in checkpoints if workers == 0 else checkpoints[::5]:
        resumed = fit(workers, ckpt=ckpt, **options)
        for step, batches in resumed.seen.items():
            assert batches == whole.seen[step][-len(batches) :], (ckpt.relative_to(tmp_path), step)
        assert torch.equal(resumed.layer.weight, whole.layer.weight), ckpt


def order(loader: ResumableLoader, epoch: int) -> list[int]:
    loader.set_epoch(epoch)
    return [int(n) for batch in loader for n in batch["label"]]


def test_order_is_a_new_permutation_each_epoch_without_the_incomplete_batch():
    loader = TrainLoader(Numbers(), 4, seed=1)
    first, second = order(loader, 0), order(loader, 1)
    assert len(first) == len(set(first)) == 20
    assert first != second
    assert order(loader, 0) == first
    assert order(TrainLoader(Numbers(), 4, seed=2), 0) != first


def test_ranks_share_one_permutation_whatever_their_number(monkeypatch):
    whole = order(TrainLoader(Numbers(), 8, seed=1), 0)
    parts = []
    for rank in range(2):
        monkeypatch.setattr("mmpe.datamodules.loading.rank_and_world", lambda rank=rank: (rank, 2))
        parts.append(order(TrainLoader(Numbers(), 4, seed=1), 0))
    merged = [n for k in range(2) for part in parts for n in part[4 * k : 4 * k + 4]]
    assert merged == whole


def test_resume_with_another_batch_size_goes_on_with_the_samples_not_yet_seen():
    old = TrainLoader(Numbers(), 2, seed=1)
    passes = iter(old)
    seen = [int(n) for _ in range(4) for n in next(passes)["label"]]
    new = TrainLoader(Numbers(), 4, seed=1)
    new.load_state_dict(old.state_dict())
    rest = [int(n) for batch in new for n in batch["label"]]
    assert seen + rest == order(TrainLoader(Numbers(), 4, seed=1), 0)


def test_resume_within_an_epoch_refuses_other_data_or_seed():
    old = TrainLoader(Numbers(), 4, seed=1)
    next(iter(old))
    with pytest.raises(ValueError, match="seed=1, the data now have seed=2"):
        TrainLoader(Numbers(), 4, seed=2).load_state_dict(old.state_dict())
    state = {**old.state_dict(), "layout": {**old.state_dict()["layout"], "samples": 99}}
    with pytest.raises(ValueError, match="samples=99, the data now have samples=22"):
        TrainLoader(Numbers(), 4, seed=1).load_state_dict(state)
    at_the_start = {**TrainLoader(Numbers(), 4, seed=1).state_dict(), "epoch": 2}
    TrainLoader(Numbers(), 4, seed=2).load_state_dict(at_the_start)


def test_position_at_the_end_of_an_epoch_is_the_start_of_the_next():
    old = TrainLoader(Numbers(), 4, seed=1)
    list(old)
    new = TrainLoader(Numbers(), 4, seed=1)
    new.load_state_dict(old.state_dict())
    rest = [int(n) for batch in new for n in batch["label"]]
    assert rest == order(TrainLoader(Numbers(), 4, seed=1), 1)


def test_frozen_loader_repeats_the_first_epoch():
    loader = TrainLoader(Numbers(), 4, seed=1, frozen=True)
    assert order(loader, 3) == order(loader, 0) == order(TrainLoader(Numbers(), 4, seed=1), 0)


def test_preserved_rng_puts_all_three_generators_back():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with preserved_rng():
        seed_everything(9, 9)
        random.random(), np.random.rand(), torch.rand(())
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


@pytest.mark.parametrize("world", [1, 2, 3, 5, 30])
@pytest.mark.parametrize("size", [1, 4, 22, 40])
def test_validation_plan_shows_each_sample_once_in_equal_steps(monkeypatch, world, size):
    monkeypatch.setattr("mmpe.datamodules.loading.rank_and_world", lambda: (0, world))
    loader = EvalLoader(Numbers(), size)
    plans = [loader.plan(rank, world) for rank in range(world)]
    genuine = [n for plan in plans for indices, count in plan for n in indices[:count]]
    assert sorted(genuine) == list(range(22))
    assert {len(plan) for plan in plans} == {len(loader)}
    for step in zip(*plans, strict=True):
        assert len({len(indices) for indices, _ in step}) == 1
        assert 1 <= len(step[0][0]) <= size


def test_one_process_has_no_fillers():
    assert all(batch["valid"].all() for batch in EvalLoader(Numbers(), 4))
