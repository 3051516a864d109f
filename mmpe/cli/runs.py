"""One run of a comparison: train one encoding with one seed, evaluate it at every size, keep the result."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import mmpe
from mmpe.evaluation.resolution import curves, use_scales
from mmpe.evaluation.tables import RunResult

from ._arguments import EncodingSpec

if TYPE_CHECKING:
    from .lightning import Cli
    from .workers import Emit

RESULT_NAME = "result.json"
LOG_NAME = "log.txt"


@dataclass(frozen=True)
class Job:
    """What one run is made of.

    Attributes:
        task: title of the experiment.
        config: path of its config.
        encoding: the encoding and its options.
        seed: seed of weights, order and augmentations.
        scales: evaluation sizes, in training sizes.
        positions: rules of positions to evaluate, "raw" and "scaled".
        out: folder of the comparison.
        overrides: further arguments of `mmpe fit`.
    """

    task: str
    config: str
    encoding: EncodingSpec
    seed: int
    scales: tuple[float, ...]
    positions: tuple[str, ...]
    out: str
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.task}, {self.encoding.label}, seed {self.seed}"

    @property
    def key(self) -> str:
        """Changes with all that training depends on: config, overrides, encoding, seed and the version of mmpe."""
        config = yaml.safe_load(Path(self.config).read_text(encoding="utf-8"))
        parts = [config, self.overrides, self.encoding.name, dict(self.encoding.options), self.seed, mmpe.__version__]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:10]

    @property
    def folder(self) -> Path:
        """Where the run keeps everything."""
        slug = re.sub(r"[^\w.=+-]+", "-", self.encoding.label).strip("-")
        return Path(self.out) / re.sub(r"\W+", "-", self.task) / f"{slug}-seed{self.seed}-{self.key}"

    def finished(self) -> RunResult | None:
        """The result, if all that is asked for has been evaluated already."""
        path = self.folder / RESULT_NAME
        if not path.is_file():
            return None
        result = RunResult.load(path)
        wanted = all(scale in result.scores.get(rule, {}) for rule in self.positions for scale in self.scales)
        return result if wanted else None

    def chosen(self, result: RunResult) -> RunResult:
        """The result with the sizes and rules that this job asks for, whatever else was evaluated earlier."""
        scores = {rule: {scale: result.scores[rule][scale] for scale in self.scales} for rule in self.positions}
        return RunResult(self.task, self.encoding.label, self.seed, scores, result.seconds, result.parameters,
                         result.details)  # fmt: skip


def perform(job: Job, emit: Emit) -> RunResult:
    """Train unless it was done, evaluate, write result.json; what is printed meanwhile goes to log.txt."""
    from .lightning import Cli, quiet

    job.folder.mkdir(parents=True, exist_ok=True)
    with _log_to(job.folder / LOG_NAME):
        quiet()
        cli = Cli(arguments(job), run=False, callbacks=[_step_reporter(emit)])
        last = _last_checkpoint(job.folder)
        earlier = RunResult.load(job.folder / RESULT_NAME) if (job.folder / RESULT_NAME).is_file() else None
        if earlier is None or last is None:
            earlier = None
            seconds = train(cli, last)
        else:
            seconds = earlier.seconds
        result = _result(job, cli, seconds, evaluate(cli, job.scales, None if earlier is None else last), earlier)
        result.save(job.folder / RESULT_NAME)
    return job.chosen(result)


def arguments(job: Job) -> list[str]:
    """Arguments of the command line that train this job."""
    rules = json.dumps(list(job.positions))
    options = json.dumps(dict(job.encoding.options)) if job.encoding.options else "null"
    return [
        "--config", job.config, *job.overrides,
        f"--model.encoding={job.encoding.name}", f"--model.encoding_options={options}",
        f"--model.eval_positions={rules}", f"--seed_everything={job.seed}", f"--data.seed={job.seed}",
        f"--trainer.default_root_dir={job.folder}", "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false", "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
        f"--trainer.logger.save_dir={job.folder}", "--trainer.logger.name=log", "--trainer.logger.version=0",
        "--trainer.limit_val_batches=0", "--trainer.num_sanity_val_steps=0",
    ]  # fmt: skip


def train(cli: Cli, resume_from: Path | None = None) -> float:
    """Fit; returns the CPU seconds it took."""
    start = time.process_time()
    cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=resume_from)
    return time.process_time() - start


def evaluate(cli: Cli, scales: Sequence[float], checkpoint: Path | None = None) -> dict[str, dict[float, float]]:
    """Scores at multiples of the training size, by rule of positions.

    Args:
        cli: model, data and trainer.
        scales: multiples of the training size.
        checkpoint: weights to load first; None takes those of the model as it is.
    """
    use_scales(cli.datamodule, scales, patch_side(cli.model))
    return curves(cli.trainer.test(cli.model, datamodule=cli.datamodule, ckpt_path=checkpoint, verbose=False))


def patch_side(model: Any) -> int:
    """Side of a patch in pixels, the step of image sizes; 1 for models without patches."""
    embed = getattr(getattr(model, "eval_network", None), "patch_embed", None)
    sides = getattr(embed, "patch_size", 1)
    return max(sides) if isinstance(sides, (tuple, list)) else int(sides)


def encoding_parameters(model: Any) -> int:
    """Parameters of the position encoding alone."""
    encoding = getattr(getattr(model, "eval_network", None), "encoding", None)
    return sum(p.numel() for p in encoding.parameters()) if encoding is not None else 0


def _result(
    job: Job, cli: Cli, seconds: float, scores: dict[str, dict[float, float]], earlier: RunResult | None
) -> RunResult:
    if earlier is not None:
        scores = {rule: {**earlier.scores.get(rule, {}), **by_scale} for rule, by_scale in scores.items()}
    details = {"config": cli.parser.dump(cli.config, format="json"), "key": job.key, "overrides": list(job.overrides),
               "mmpe": mmpe.__version__, "steps": cli.trainer.global_step}  # fmt: skip
    if earlier is not None:
        details = dict(earlier.details)
    return RunResult(job.task, job.encoding.label, job.seed, scores, seconds, encoding_parameters(cli.model), details)


def _last_checkpoint(folder: Path) -> Path | None:
    found = sorted(folder.rglob("last*.ckpt"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def _step_reporter(emit: Emit) -> Any:
    from lightning.pytorch.callbacks import Callback

    class StepReporter(Callback):
        """Tells the parent process about every tenth step."""

        def on_train_batch_end(self, trainer: Any, *unused: Any) -> None:
            if trainer.global_step % 10 == 0 or trainer.global_step == trainer.estimated_stepping_batches:
                emit(trainer.global_step, int(trainer.estimated_stepping_batches))

    return StepReporter()


@contextlib.contextmanager
def _log_to(path: Path) -> Iterator[None]:
    with (
        path.open("a", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        yield
