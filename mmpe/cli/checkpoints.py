"""From the path of a checkpoint to the model and the data that it was trained with."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ._errors import UsageError

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from .lightning import Cli

# Keys of `mmpe fit` that say how one run began; they do not belong to the experiment.
_OF_THE_RUN = ("ckpt_path", "weights_only", "config")


def find_checkpoint(path: str) -> Path:
    """The checkpoint itself, or the last one in a folder.

    Raises:
        UsageError: if there is none; those nearby are named.
    """
    given = Path(path).expanduser()
    if given.is_dir():
        found = sorted(given.rglob("last*.ckpt"), key=lambda p: p.stat().st_mtime)
        if not found:
            raise UsageError(f"no last.ckpt in {given}")
        return found[-1]
    if not given.exists():
        raise UsageError(f"no checkpoint {given}; {_nearby(given.parent)}")
    return given


def _nearby(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}"
    near = sorted(folder.glob("*.ckpt")) or sorted(folder.glob("*/checkpoints/*.ckpt"))  # where mmpe fit writes them
    return f"there are {', '.join(map(str, near))}" if near else f"{folder} has none"


def find_config(checkpoint: Path) -> Path:
    """The config.yaml that `mmpe fit` wrote beside the checkpoint, or in one of the two folders above.

    Raises:
        UsageError: if there is none.
    """
    for folder in list(checkpoint.resolve().parents)[:3]:
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    raise UsageError(f"no config.yaml beside {checkpoint}; give the run's config with --config")


def cli_of(checkpoint: Path, config: str | None = None, overrides: list[str] | None = None, **options: Any) -> Cli:
    """Model, data and trainer of the run that wrote a checkpoint; its weights are not loaded.

    Args:
        checkpoint: a Lightning checkpoint.
        config: the run's config; by default the one beside the checkpoint.
        overrides: arguments that change the config.
        options: further arguments of `Cli`.
    """
    from .lightning import Cli

    path = find_config(checkpoint) if config is None else Path(config)
    experiment = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(experiment, dict) or "model" not in experiment:
        raise UsageError(f"{path} is no config of mmpe fit: it has no model")
    for key in _OF_THE_RUN:
        experiment.pop(key, None)
    with tempfile.TemporaryDirectory() as folder:
        cleaned = Path(folder, "config.yaml")
        cleaned.write_text(yaml.safe_dump(experiment, sort_keys=False), encoding="utf-8")
        return Cli(["--config", str(cleaned), *(overrides or [])], run=False, **options)


def load_model(path: str, config: str | None = None) -> pl.LightningModule:
    """The trained task of a checkpoint, in evaluation mode."""
    from mmpe.models.task import load_weights

    from .lightning import quiet

    quiet()
    checkpoint = find_checkpoint(path)
    fixed = ["--trainer.logger=false", "--trainer.callbacks=[]", "--trainer.accelerator=cpu"]
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print meanwhile
        task = cli_of(checkpoint, config, fixed).model
    task.load_state_dict(load_weights(str(checkpoint)))
    return task.eval()
