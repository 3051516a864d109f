"""A callback for the resume test, which puts this folder on the path of the training process."""

import os
import signal
from typing import Any

import lightning as L


class KillAt(L.Callback):
    """Kill the process without any notice after the optimisation step in the environment variable KILL_AT."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == int(os.environ.get("KILL_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
