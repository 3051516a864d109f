"""`mmpe fit | validate | test | predict`: LightningCLI over mmpe.models and mmpe.datamodules."""

from __future__ import annotations

import importlib
import logging
import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

import mmpe.datamodules
import mmpe.models

from ._errors import UsageError
from .configs import find

CONFIG_NAME = "config.yaml"


class ConfigBesideCheckpoints(SaveConfigCallback):
    """Writes the whole configuration of a run next to its checkpoints, where `mmpe extrapolate` looks for it."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Nothing yet: which folder it will be is known once every callback has been set up."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the file into each checkpoint folder; a repeated or resumed run overwrites its own."""
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        for folder in checkpoint_folders(trainer):
            folder.mkdir(parents=True, exist_ok=True)
            self.parser.save(
                self.config, str(folder / CONFIG_NAME), skip_none=False, overwrite=True, multifile=self.multifile
            )


def checkpoint_folders(trainer: pl.Trainer) -> list[Path]:
    """Local folders that the checkpoint callbacks write to, each once."""
    folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    return [Path(folder) for folder in dict.fromkeys(folders) if folder and "://" not in str(folder)]


class Cli(LightningCLI):
    """LightningCLI whose configs are found among the shipped ones too, and whose runs can be repeated from one file."""

    def __init__(self, args: list[str], run: bool = True, callbacks: Sequence[pl.Callback] = ()) -> None:
        load_classes()
        super().__init__(
            model_class=pl.LightningModule,
            datamodule_class=pl.LightningDataModule,
            save_config_callback=ConfigBesideCheckpoints,
            trainer_defaults={"callbacks": list(callbacks)} if callbacks else None,
            seed_everything_default=0,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            args=with_found_configs(args),
            run=run,
            parser_kwargs={"prog": "mmpe"} if not run else _subcommand_parsers(),
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults({"trainer.default_root_dir": "runs"})

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """As Lightning does, with a sharded strategy that runs on CPUs too in the place of its own."""
        from mmpe.models.strategies import resolve_strategy

        strategy = self._get(self.config_init, "trainer.strategy", default="auto")
        return super().instantiate_trainer(**{"strategy": resolve_strategy(strategy), **kwargs})


def _subcommand_parsers() -> dict[str, dict[str, str]]:
    return {name: {"prog": f"mmpe {name}"} for name in ("fit", "validate", "test", "predict")}


def main(command: str, argv: list[str]) -> int:
    """Run one of Lightning's four subcommands; `argv` are its arguments."""
    cli = Cli([command, *argv])
    if command == "predict":
        print(write_predictions(cli))
    return 0


def load_classes() -> None:
    """Import every task and datamodule, so that configs and the command line may name classes without their module."""
    for package in (mmpe.models, mmpe.datamodules):
        for module in pkgutil.iter_modules(package.__path__):
            if not module.ispkg:
                importlib.import_module(f"{package.__name__}.{module.name}")


def with_found_configs(args: list[str]) -> list[str]:
    """The arguments with `--config NAME` replaced by the file that the name means."""
    found: list[str] = []
    for i, argument in enumerate(args):
        if i and args[i - 1] in ("--config", "-c"):
            found.append(str(find(argument)))
        elif argument.startswith("--config="):
            found.append(f"--config={find(argument.removeprefix('--config='))}")
        else:
            found.append(argument)
    if found and found[-1] in ("--config", "-c"):
        raise UsageError("--config needs the name of a YAML file; `mmpe configs` lists the shipped ones")
    return found


def quiet() -> None:
    """No banners, tips and worker advice of Lightning: for processes whose output is a table."""
    import warnings

    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=re.escape("lightning"))


def write_predictions(cli: Cli) -> Path:
    """Save what predict_step returned, one entry a batch, below the run folder."""
    loop = cli.trainer.predict_loop
    path = Path(cli.trainer.default_root_dir) / "predictions.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(loop.predictions, path)
    return path
