"""Optimiser, weight-decay groups and learning-rate schedule of every training task, on timm's optimisers.

Weight decay follows the field's convention: none on vectors (biases, norms), on what the model lists in
`no_weight_decay()`, and on any parameter of a position encoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import timm.optim
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mmpe.encoding import PositionEncoding


def undecayed_names(network: nn.Module) -> set[str]:
    """Names of the parameters without weight decay, beyond the vectors that never have any."""
    listed = getattr(network, "no_weight_decay", set)  # timm's models list theirs in a method
    names: set[str] = set(listed())
    for prefix, module in network.named_modules():
        if isinstance(module, PositionEncoding):
            names |= {f"{prefix}.{name}".lstrip(".") for name in module.no_weight_decay()}
    return names


def parameter_groups(
    network: nn.Module, lr: float, weight_decay: float, layer_decay: float | None = None
) -> list[dict[str, Any]]:
    """Parameters grouped by weight decay and, with `layer_decay`, by depth; each group carries its own `lr`.

    Args:
        network: the module whose trainable parameters are grouped.
        lr: learning rate of the last layer.
        weight_decay: weight decay of the matrices.
        layer_decay: factor on the learning rate per layer, counted from the head; needs timm's `group_matcher`.
    """
    excluded = undecayed_names(network)
    if layer_decay is None:
        groups = param_groups_weight_decay(network, weight_decay, no_weight_decay_list=excluded)
    else:
        groups = param_groups_layer_decay(network, weight_decay, no_weight_decay_list=excluded, layer_decay=layer_decay)
    # torch's schedulers do not know timm's lr_scale, so it goes into the rate itself.
    return [{**group, "lr": lr * group.get("lr_scale", 1.0)} for group in groups]


def build_optimizer(
    network: nn.Module,
    name: str = "adamw",
    lr: float = 1e-3,
    weight_decay: float = 0.05,
    betas: Sequence[float] | None = None,
    layer_decay: float | None = None,
) -> Optimizer:
    """One of timm's optimisers over `parameter_groups(network)`.

    Args:
        network: the module to train.
        name: a name of `timm.optim.list_optimizers()`, such as "adamw" or "lamb".
        lr: peak learning rate.
        weight_decay: weight decay of the matrices.
        betas: momentum coefficients, for optimisers that have them; None keeps the optimiser's own.
        layer_decay: factor on the learning rate per layer, counted from the head.
    """
    check_optimizer(name)
    extra = {} if betas is None else {"betas": tuple(betas)}
    groups = parameter_groups(network, lr, weight_decay, layer_decay)
    return timm.optim.create_optimizer_v2(groups, opt=name, lr=lr, weight_decay=weight_decay, **extra)


def check_optimizer(name: str) -> None:
    """Refuse an optimiser that timm does not have, and name the nearest ones."""
    known = timm.optim.list_optimizers()
    if name.lower() not in known:
        near = get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "see timm.optim.list_optimizers()"
        raise ValueError(f"unknown optimizer {name!r}; {hint}")


def cosine_factor(step: int, total: int, warmup: int, floor: float = 0.0) -> float:
    """Linear warm-up to 1 over `warmup` steps, then half a cosine down to `floor` at step `total`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def cosine_schedule(optimizer: Optimizer, total: int, warmup: int, floor: float = 0.0) -> LambdaLR:
    """`cosine_factor` on the learning rate of every group, one call a step."""
    return LambdaLR(optimizer, lambda step: cosine_factor(step, total, warmup, floor))


def optimizer_config(
    optimizer: Optimizer, total: float, warmup_steps: int, warmup_epochs: float, epochs: int, floor: float
) -> OptimizerLRSchedulerConfig:
    """What `configure_optimizers` returns: the optimiser with its cosine schedule, stepped every batch.

    Args:
        optimizer: the optimiser.
        total: number of optimiser steps of the whole run.
        warmup_steps: warm-up in steps.
        warmup_epochs: warm-up in epochs, used where `warmup_steps` is 0.
        epochs: number of epochs of the whole run; read only for `warmup_epochs`.
        floor: final learning rate as a share of the peak.
    """
    if not math.isfinite(total) or total < 1:
        raise ValueError(
            "the cosine schedule needs the length of the run: set trainer.max_steps, or trainer.max_epochs together "
            "with trainer.limit_train_batches where the data has no length"
        )
    warmup = warmup_steps
    if warmup_epochs:
        if epochs < 1:
            raise ValueError("warmup_epochs needs trainer.max_epochs; with trainer.max_steps give warmup_steps")
        warmup = round(warmup_epochs * total / epochs)
    schedule = cosine_schedule(optimizer, int(total), warmup, floor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "lr"}}


@torch.no_grad()
def update_average(average: nn.Module, network: nn.Module, decay: float) -> None:
    """Move `average` towards `network`: a <- decay * a + (1 - decay) * w; buffers are copied."""
    for a, w in zip(average.parameters(), network.parameters(), strict=True):
        a.lerp_(w, 1.0 - decay)
    for kept, buffer in zip(average.buffers(), network.buffers(), strict=True):
        kept.copy_(buffer)
