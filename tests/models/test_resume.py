"""A run that is killed and resumed ends as the uninterrupted one, and no kill leaves a torn checkpoint."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger

from mmpe.datamodules import PartnerGrids
from mmpe.models import GridLabelling
from mmpe.models.callbacks import AtomicCheckpointIO, RunCheckpoint

quiet = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*treespec, LeafSpec.*",
    "ignore:The number of training batches.*",
)

# Everything that draws random numbers is on: crops, order, dropout, stochastic depth, mixup; and so is the average.
OVERLAY = {
    "trainer": {
        "max_steps": 13,
        "check_val_every_n_epoch": 1,
        "log_every_n_steps": 1,
        "callbacks": [
            {"class_path": "mmpe.models.callbacks.RunCheckpoint", "init_args": {"every_n_train_steps": 3}},
            {"class_path": "kill_at.KillAt"},
        ],
    },
    "model": {
        "init_args": {
            "mixup": 0.8,
            "cutmix": 1.0,
            "ema_decay": 0.9,
            "warmup_steps": 4,
            "backbone_options": {
                "img_size": 16, "patch_size": 4, "in_chans": 1, "embed_dim": 32, "depth": 2, "num_heads": 2,
                "class_token": False, "global_pool": "avg", "drop_path_rate": 0.2, "proj_drop_rate": 0.1,
            },
        }
    },
    "data": {"init_args": {"batch_size": 256, "scales": [1.0, 2.0]}},
}  # fmt: skip


def test_killed_in_mid_epoch_and_resumed_equals_uninterrupted(tmp_path, mmpe_fit, metric_by_step):
    pytest.importorskip("sklearn")
    (tmp_path / "overlay.yaml").write_text(yaml.safe_dump(OVERLAY))
    command = ["--config", "vit/digits.yaml", "--config", "overlay.yaml", "--trainer.accelerator=cpu"]
    whole, broken = "--trainer.logger.save_dir=whole", "--trainer.logger.save_dir=broken"

    run = mmpe_fit(tmp_path, *command, whole)
    assert run.returncode == 0, run.stderr
    # An epoch has 5 steps: the checkpoint of step 6 lies within the second one, and so does the kill in step 8.
    killed = mmpe_fit(tmp_path, *command, broken, KILL_AT="8")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = mmpe_fit(tmp_path, *command, broken, "--ckpt_path=last")
    assert resumed.returncode == 0, resumed.stderr

    last = [tmp_path / p / "checkpoints/last.ckpt" for p in ("whole/digits/version_0", "broken/digits/version_1")]
    expected, found = (torch.load(path, weights_only=True) for path in last)
    assert expected["global_step"] == found["global_step"] == 13  # the end of the run, no multiple of 3
    assert expected["lr_schedulers"] == found["lr_schedulers"]
    assert expected["state_dict"].keys() == found["state_dict"].keys()
    for name, tensor in expected["state_dict"].items():
        assert torch.equal(tensor, found["state_dict"][name]), name
    for name in ("train/loss", "val/top1@1x", "val/loss@2x_scaled"):
        uninterrupted, again = (metric_by_step(path.parents[1] / "metrics.csv", name) for path in last)
        assert again == {step: value for step, value in uninterrupted.items() if step >= 6}
        assert again


SAVE_AND_DIE = """
import os, signal, sys, torch
from mmpe.models.callbacks import AtomicCheckpointIO

class Deadly:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)

AtomicCheckpointIO().save_checkpoint({"weights": torch.zeros(1000), "last": Deadly()}, sys.argv[1])
"""


def test_a_kill_while_saving_leaves_the_old_checkpoint(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", SAVE_AND_DIE, str(path)], env=environment, check=False, timeout=120)
    assert run.returncode == -signal.SIGKILL
    assert AtomicCheckpointIO().load_checkpoint(path) == {"step": 1}


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_else(tmp_path):
    path = tmp_path / "last.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"step": 1}, path)
    with pytest.raises((AttributeError, TypeError)):
        io.save_checkpoint({"step": 2, "unpicklable": lambda: None}, path)
    assert io.load_checkpoint(path) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_torn_checkpoint_is_named_together_with_the_newest_whole_one(tmp_path, share):
    io = AtomicCheckpointIO()
    torn, whole = tmp_path / "last.ckpt", tmp_path / "step=5.ckpt"
    for path in (whole, torn):
        io.save_checkpoint({"weights": torch.zeros(1000)}, path)
    torn.write_bytes(torn.read_bytes()[: int(share * torn.stat().st_size)])
    with pytest.raises(ValueError, match=r"last\.ckpt is incomplete.*ckpt_path=.*step=5\.ckpt"):
        io.load_checkpoint(torn)
    with pytest.raises(FileNotFoundError, match="missing"):
        io.load_checkpoint(tmp_path / "missing.ckpt")


def train(folder: Path, encoding: str, steps: int, ckpt_path: str | None = None) -> L.Trainer:
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=CSVLogger(folder, "run"),
        callbacks=[RunCheckpoint(every_n_train_steps=1)],
        plugins=[AtomicCheckpointIO()],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = PartnerGrids(grid_size=4, batch_size=4, eval_sizes=[4], eval_samples=4, steps_per_epoch=8)
    trainer.fit(GridLabelling(encoding, grid=(4, 4), dim=16), data, ckpt_path=ckpt_path)
    return trainer


@quiet
def test_last_means_the_last_checkpoint_of_a_run_with_the_same_hyperparameters_and_seed(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    first = train(tmp_path, "rope_axial", steps=1)
    train(tmp_path, "rope_mixed", steps=2)
    resumed = train(tmp_path, "rope_axial", steps=3, ckpt_path="last")
    assert resumed.ckpt_path == first.checkpoint_callback.last_model_path
    assert resumed.logger.version == 2
    again = train(tmp_path, "rope_axial", steps=4, ckpt_path="last")
    assert again.ckpt_path == resumed.checkpoint_callback.last_model_path
    monkeypatch.setenv("PL_GLOBAL_SEED", "2")
    with pytest.warns(UserWarning, match="no last checkpoint"):
        assert train(tmp_path, "rope_axial", steps=1, ckpt_path="last").ckpt_path is None
