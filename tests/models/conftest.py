"""What the tests of this folder share: training in processes of its own, as a user starts it."""

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


def fit(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """`mmpe fit` in `folder` with one thread."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return subprocess.run(
        [sys.executable, "-m", "mmpe.cli", "fit", *arguments, *QUIET],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def logged(file: Path, name: str) -> dict[int, float]:
    """One metric of a metrics.csv, by step."""
    with file.open() as lines:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(lines) if row.get(name)}


@pytest.fixture(scope="session")
def mmpe_fit() -> Callable[..., subprocess.CompletedProcess]:
    """`mmpe fit` in a folder: `mmpe_fit(folder, *arguments, **environment)`."""
    return fit


@pytest.fixture(scope="session")
def metric_by_step() -> Callable[[Path, str], dict[int, float]]:
    """One metric of a metrics.csv: `metric_by_step(file, name)`."""
    return logged
