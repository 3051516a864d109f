"""Calls of the command line for tests."""

import os
import subprocess
import sys
from pathlib import Path

from mmpe.cli import main

ROOT = Path(__file__).resolve().parents[1]


def mmpe_process(*arguments, cwd=None):
    """The script in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mmpe.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def mistake(capsys, *arguments):
    """The one line that a mistake is told in."""
    assert main(list(map(str, arguments))) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    return captured.err
