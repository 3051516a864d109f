"""Fully sharded data parallelism (torch's FSDP2) for every task, on GPUs and on CPUs.

Lightning's own `fsdp` refuses CPUs, and torch's first FSDP behind it does too; torch's second one runs on both.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp import fully_shard


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2 over all processes; known to the Trainer as "fsdp2".

    Every child of the task that owns parameters is one sharded unit and so is each of its `blocks`; a task must
    therefore call its networks as a whole (`self.backbone(x)`), not their methods. Each process keeps its share of
    parameters, gradients and optimiser state. Checkpoints are whole, in one file, and load under any strategy.

    Args:
        process_group_backend: backend of torch.distributed; by default nccl on GPUs and gloo on CPUs.
    """

    strategy_name = "fsdp2"

    def __init__(self, process_group_backend: str | None = None) -> None:
        super().__init__(save_distributed_checkpoint=False, process_group_backend=process_group_backend)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        # As the parent does it, but the sharding happens here instead of in a hook of the task.
        trainer.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(trainer.lightning_module)
        self.model_to_device()
        shard(trainer.lightning_module, self.device_mesh["data_parallel"])
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()


def shard(task: nn.Module, mesh: Any) -> None:
    """Apply `fully_shard` to each network of a task, block by block."""
    for network in task.children():
        if next(network.parameters(), None) is None:
            continue
        for block in getattr(network, "blocks", ()):
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)


def resolve_strategy(strategy: Any) -> Any:
    """What the command line gives the Trainer for `--trainer.strategy`: "fsdp" is torch's FSDP2 on every device."""
    return ShardedStrategy.strategy_name if strategy == "fsdp" else strategy


StrategyRegistry.register(
    ShardedStrategy.strategy_name, ShardedStrategy, description="fully sharded data parallelism (FSDP2), GPU or CPU"
)
