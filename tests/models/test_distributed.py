"""Two processes train on the same global batches as one, replicated (DDP) or sharded (FSDP), to the same numbers."""

import math

import pytest
import torch

COMMON = [
    "--config=vit/digits.yaml", "--model.encoding=ape_learned+rope_mixed", "--model.ema_decay=0.5",
    "--model.warmup_steps=2", "--trainer.accelerator=cpu", "--trainer.max_steps=6", "--trainer.log_every_n_steps=1",
    "--trainer.check_val_every_n_epoch=1", "--trainer.limit_train_batches=6", "--data.scales=[1.0,2.0]",
    "--data.eval_batch_size=70",
]  # fmt: skip
METRICS = ["val/loss@1x", "val/top1@1x", "val/top5@2x", "val/top1@2x_scaled"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, mmpe_fit):
    folder = tmp_path_factory.mktemp("one")
    run = mmpe_fit(folder, *COMMON, "--data.batch_size=64")
    assert run.returncode == 0, run.stderr
    return folder


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_as_one(tmp_path, one_process, mmpe_fit, metric_by_step, strategy):
    pytest.importorskip("sklearn")
    two = [f"--trainer.strategy={strategy}", "--trainer.devices=2", "--data.batch_size=32"]
    run = mmpe_fit(tmp_path, *COMMON, *two)
    assert run.returncode == 0, run.stderr
    assert "distributed_backend=gloo" in run.stderr

    start = "runs/digits/version_0"
    losses = [metric_by_step(folder / start / "metrics.csv", "train/loss") for folder in (one_process, tmp_path)]
    assert losses[0].keys() == losses[1].keys() == set(range(6))
    for step, loss in losses[0].items():
        assert math.isclose(loss, losses[1][step], rel_tol=1e-4), (step, losses)
    # 500 pictures in batches of 70 fill neither one process nor two: fillers must not be counted.
    for name in METRICS:
        alone, together = (metric_by_step(f / start / "metrics.csv", name)[5] for f in (one_process, tmp_path))
        assert together == pytest.approx(alone, abs=1e-4 if "loss" in name else 2.5e-3), name

    saved = [torch.load(f / start / "checkpoints/last.ckpt", weights_only=True) for f in (one_process, tmp_path)]
    weights = [checkpoint["state_dict"] for checkpoint in saved]
    assert weights[0].keys() == weights[1].keys()  # whole and under the same names, however it was trained
    for name, tensor in weights[0].items():
        assert weights[1][name].shape == tensor.shape, name
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-3, rtol=1e-3, msg=name)
    moments = [checkpoint["optimizer_states"][0]["state"] for checkpoint in saved]
    assert moments[0].keys() == moments[1].keys()


@pytest.mark.slow
def test_a_sharded_run_resumes_from_its_whole_checkpoint(tmp_path, mmpe_fit, metric_by_step):
    pytest.importorskip("sklearn")
    sharded = ["--trainer.strategy=fsdp", "--trainer.devices=2", "--data.batch_size=32"]
    command = [*COMMON, "--config", "interval.yaml", *sharded]
    (tmp_path / "interval.yaml").write_text(
        "trainer: {callbacks: [{class_path: mmpe.models.callbacks.RunCheckpoint, "
        "init_args: {every_n_train_steps: 4}}, {class_path: kill_at.KillAt}]}"
    )
    whole = mmpe_fit(tmp_path, *command, "--trainer.logger.save_dir=whole")
    assert whole.returncode == 0, whole.stderr
    assert mmpe_fit(tmp_path, *command, "--trainer.logger.save_dir=broken", KILL_AT="5").returncode != 0
    resumed = mmpe_fit(tmp_path, *command, "--trainer.logger.save_dir=broken", "--ckpt_path=last")
    assert resumed.returncode == 0, resumed.stderr
    files = [tmp_path / p / "metrics.csv" for p in ("whole/digits/version_0", "broken/digits/version_1")]
    expected, found = (metric_by_step(file, "train/loss") for file in files)
    assert found == pytest.approx({step: expected[step] for step in (4, 5)})
