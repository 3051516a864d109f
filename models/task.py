"""What the training tasks share: optimiser and schedule from the hyperparameters, seeding by step, evaluation sets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from . import strategies  # noqa: F401  (makes "fsdp2" known to the Trainer)
from .callbacks import AtomicCheckpointIO, StepSeed
from .optim import build_optimizer, check_optimizer, optimizer_config
from .vit import VisionTransformer
from .vit_checkpoints import mismatch, read_safetensors

IGNORED = -1  # label of an example that no metric counts
POSITION_RULES = {"raw", "scaled"}


class Task(pl.LightningModule, ABC):
    """Base of the tasks: optimisation and evaluation from the hyperparameters, which subclasses save.

    A subclass names the network that is trained and gives `training_step`, `evaluate` and `new_scores`. Read from
    `hparams`: optimizer, lr, weight_decay, betas, layer_decay (optional), warmup_steps, warmup_epochs, min_lr,
    position_scaling and eval_positions.
    """

    network_name = "network"
    """Attribute of the network that is trained."""

    scores: nn.ModuleList
    """One `EvalScores` for every evaluation set and rule of positions, made anew for each evaluation."""

    def with_own_losses(self, loss: Tensor) -> Tensor:
        """The loss of the task and, where the position encoding has losses of its own, those."""
        encoding = getattr(getattr(self, self.network_name), "encoding", None)
        own = encoding.auxiliary_loss() if encoding is not None else None
        return loss if own is None else loss + own

    @property
    def eval_network(self) -> nn.Module:
        """The network of evaluation and prediction."""
        return getattr(self, self.network_name)

    @abstractmethod
    def new_scores(self) -> EvalScores:
        """Empty scores of one evaluation set."""

    @abstractmethod
    def evaluate(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (M, classes) of `eval_network` and labels (M,), `IGNORED` where an example does not count."""

    def configure_callbacks(self) -> list[pl.Callback]:
        return [StepSeed()]

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        h, network = self.hparams, getattr(self, self.network_name)
        optimizer = build_optimizer(network, h.optimizer, h.lr, h.weight_decay, h.betas, h.get("layer_decay"))
        total, epochs = self.trainer.estimated_stepping_batches, self.trainer.max_epochs or -1
        return optimizer_config(optimizer, total, h.warmup_steps, h.warmup_epochs, epochs, h.min_lr / h.lr)

    def setup(self, stage: str) -> None:
        check_classes(getattr(self.trainer, "datamodule", None), self.hparams.num_classes)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Encodings without parameters fit each other's weights, so the weights alone would not tell.
        saved, own = checkpoint.get("hyper_parameters", {}), self.hparams
        for name in ("backbone", "encoding"):
            if name in saved and saved[name] != own.get(name):
                raise ValueError(
                    f"the checkpoint was made with {name}={saved[name]!r}, this model has {name}={own.get(name)!r}; "
                    f"set model.{name} to {saved[name]!r}, or start from its weights with model.init_from"
                )
        network, prefix = getattr(self, self.network_name), f"{self.network_name}."
        if isinstance(network, VisionTransformer) and self.strict_loading:
            weights = checkpoint["state_dict"]
            problem = mismatch(network, {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
            if problem is not None:
                raise ValueError(problem)

    def on_validation_epoch_start(self) -> None:
        loaders = len(self.trainer.num_test_batches if self.trainer.testing else self.trainer.num_val_batches)
        count = loaders * len(self.hparams.eval_positions)
        self.scores = nn.ModuleList(self.new_scores() for _ in range(count)).to(self.device)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        rules = self.hparams.eval_positions
        for i, rule in enumerate(rules):
            use_positions(self.eval_network, rule)
            self._score(dataloader_idx * len(rules) + i).update(*self.evaluate(batch))

    def on_validation_epoch_end(self) -> None:
        stage, rules = "test" if self.trainer.testing else "val", self.hparams.eval_positions
        for loader, name in enumerate(self._eval_names(len(self.scores) // len(rules))):
            for i, rule in enumerate(rules):
                results = self._score(loader * len(rules) + i).compute()
                logged = {metric_name(stage, metric, name, rule): value for metric, value in results.items()}
                # compute() has summed over the processes; sync_dist averages equal numbers and tells Lightning so.
                self.log_dict(logged, sync_dist=True, prog_bar=loader == 0 and i == 0)
        use_positions(self.eval_network, self.hparams.position_scaling)

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def test_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_step(batch, batch_idx, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()

    def _score(self, index: int) -> EvalScores:
        return cast(EvalScores, self.scores[index])

    def _eval_names(self, count: int) -> list[str]:
        """Names of the evaluation sets: the datamodule's `eval_names`, or their numbers."""
        names = getattr(getattr(self.trainer, "datamodule", None), "eval_names", None)
        if names is None:
            return [str(i) for i in range(count)]
        if len(names) != count:
            raise ValueError(f"the datamodule names {len(names)} evaluation sets {list(names)} and gives {count}")
        return list(names)


def use_positions(network: nn.Module, rule: str) -> None:
    """Number positions beyond the training size as they come ("raw") or stretched to the trained grid ("scaled")."""
    setter = getattr(network, "set_position_scaling", None)
    if setter is not None:
        setter(rule)
    elif rule != "raw":
        raise ValueError(f"{type(network).__name__} has no set_position_scaling: only positions 'raw' are possible")


class EvalScores(nn.Module):
    """Running loss and accuracies of one evaluation set under one rule of positions.

    Every process adds its own examples; `compute` sums over processes, so neither the batch size nor the way the
    examples are dealt out changes the result.

    Args:
        num_classes: number of classes.
        top_k: accuracies to keep, as {name: k}.
    """

    def __init__(self, num_classes: int, top_k: dict[str, int]) -> None:
        super().__init__()
        self.loss = MeanMetric()
        self.accuracy = nn.ModuleDict(
            {
                name: MulticlassAccuracy(num_classes, top_k=k, average="micro", ignore_index=IGNORED)
                for name, k in top_k.items()
            }
        )

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits (M, classes) with labels (M,), where a label of `IGNORED` is left out."""
        logits, counted = logits.float(), labels != IGNORED
        losses = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")  # (M,)
        # A set whose examples are all left out still weighs nothing: torchmetrics divides 0 by 0 only if nothing came.
        self.loss.update(losses, counted.to(losses.dtype))
        for metric in self.accuracy.values():
            cast(Metric, metric).update(logits, labels)

    def compute(self) -> dict[str, Tensor]:
        """Results by name, over all processes."""
        named: dict[str, Metric] = {"loss": self.loss, **self.accuracy}  # type: ignore[dict-item]
        return {name: metric.compute() for name, metric in named.items()}


def metric_name(stage: str, metric: str, name: str, rule: str) -> str:
    """`val/top1@2x` for raw positions, `val/top1@2x_scaled` for scaled ones."""
    return f"{stage}/{metric}@{name}" + ("" if rule == "raw" else f"_{rule}")


def check_training(
    optimizer: str, lr: float, min_lr: float, warmup_steps: int, warmup_epochs: float, eval_positions: Sequence[str]
) -> None:
    """Refuse hyperparameters that would only fail once training runs."""
    check_optimizer(optimizer)
    if lr <= 0 or not 0 <= min_lr <= lr:
        raise ValueError(f"learning rates must satisfy 0 <= min_lr <= lr and lr > 0, got lr={lr}, min_lr={min_lr}")
    if warmup_steps < 0 or warmup_epochs < 0 or (warmup_steps and warmup_epochs):
        raise ValueError(
            f"give either warmup_steps or warmup_epochs, not negative; got {warmup_steps} and {warmup_epochs}"
        )
    if not eval_positions or len(set(eval_positions)) < len(eval_positions) or set(eval_positions) - POSITION_RULES:
        raise ValueError(f"eval_positions must name 'raw', 'scaled' or both, each once, got {list(eval_positions)}")


def load_weights(path: str) -> dict[str, Tensor]:
    """The state dict in a Lightning or plain torch checkpoint, or in a safetensors file."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no checkpoint at {file.absolute()}")
    if file.suffix == ".safetensors":
        return read_safetensors(file)
    saved: dict[str, Any] = AtomicCheckpointIO().load_checkpoint(file, map_location=lambda storage, location: storage)
    return saved.get("state_dict", saved.get("model", saved))


def check_classes(datamodule: Any, num_classes: int) -> None:
    """Refuse data with another number of classes than the model has."""
    given = getattr(datamodule, "num_classes", None)
    if given is not None and given != num_classes:
        raise ValueError(f"model.num_classes is {num_classes}, but the data has {given} classes; set it to {given}")
