"""`mmpe fit | validate | test | predict`: LightningCLI over mmpe.models and mmpe.datamodules."""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
import re
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

import mmpe.datamodules
import mmpe.models

from ._errors import UsageError
from .checkpoints import find_checkpoint
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


def last_checkpoints(trainer: pl.Trainer) -> list[str]:
    """The last checkpoint of each callback that wrote one, relative to the working folder where it is below it."""
    paths = [getattr(callback, "last_model_path", "") for callback in trainer.checkpoint_callbacks]
    return [path.removeprefix(f"{Path.cwd()}/") for path in paths if path]


class Cli(LightningCLI):
    """LightningCLI whose configs are found among the shipped ones too, and whose runs can be repeated from one file."""

    def __init__(self, args: list[str], run: bool = True, callbacks: Sequence[pl.Callback] = ()) -> None:
        load_classes()
        try:
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
        except ArgumentError as error:
            raise UsageError(one_line(str(error))) from error

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser that raises its errors, for `mmpe` to tell them in one line."""
        return super().init_parser(**{**kwargs, "exit_on_error": False})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """As Lightning does, without its warning that arguments come from Python: they are those of `mmpe`."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            super().parse_arguments(parser, args)

    def _parse_ckpt_path(self) -> None:
        """Nothing, where Lightning lets the hyperparameters in `--ckpt_path` overrule what was typed without a word.

        A checkpoint of another model is then refused when its weights are loaded (`Task.on_load_checkpoint`).
        """

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
    check_checkpoint(argv)
    # Lightning asks torch in a way that torch calls old; a user can do nothing about it.
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec")
    cli = Cli([command, *argv])
    if command == "predict":
        print(write_predictions(cli))
    if command == "fit" and cli.trainer.is_global_zero:
        for path in last_checkpoints(cli.trainer):
            print(f"wrote {path}")
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


def one_line(message: str) -> str:
    """The reason in a parser's message of many lines, with the place it belongs to and the nearest allowed name."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    told = [_PLACE.sub(r"\1:", line) for line in lines if not _UNTOLD.match(line)]
    text = _TYPE.sub(r"\1", " ".join(line for line in told if line))
    unknown = re.search(r"(mmpe\.[\w.]+): Option '(\w+)' is not accepted", text)
    return text if unknown is None else text + _nearest(*unknown.groups())


# What jsonargparse says about the types that a model could also have had, and the whole configuration after it.
_UNTOLD = re.compile(r"Does not validate|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value|tip:|$")
_PLACE = re.compile(r"""(?:Problem with given class_path|Parser key) ['"]([\w.]+)['"]:""")
_TYPE = re.compile(r"<class '([\w.]+)'>")


def _nearest(class_path: str, option: str) -> str:
    module, _, name = class_path.rpartition(".")
    allowed = list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    near = get_close_matches(option, allowed, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; allowed: {', '.join(allowed)}"


def check_checkpoint(argv: list[str]) -> None:
    """Refuse a `--ckpt_path` that is neither a file nor one of Lightning's words, before anything is built."""
    values = [b for a, b in zip(argv, argv[1:], strict=False) if a == "--ckpt_path"]
    values += [a.removeprefix("--ckpt_path=") for a in argv if a.startswith("--ckpt_path=")]
    for value in values:
        a_word = value in ("last", "best", "hpc", "null") or value.startswith("registry") or "://" in value
        if not a_word and not Path(value).exists():
            find_checkpoint(value)


def quiet() -> None:
    """No banners, tips and worker advice of Lightning: for processes whose output is a table."""
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
