"""Time of `import mmpe` relative to `import torch`, in fresh processes: python benchmarks/import_time.py

The aim is at most 1.1. Both are run in turn, so that a busy machine slows both; the median of the ratios is reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = "import time; start = time.process_time(); import {}; print(time.process_time() - start)"


def cpu_seconds(module: str) -> float:
    """CPU seconds that a fresh interpreter spends on the import."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(module)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for module in ("torch", "mmpe"):  # the files come into the cache of the disk
        cpu_seconds(module)
    pairs = [(cpu_seconds("torch"), cpu_seconds("mmpe")) for _ in range(args.rounds)]
    result = {
        "torch_seconds": statistics.median(torch for torch, _ in pairs),
        "mmpe_seconds": statistics.median(ours for _, ours in pairs),
        "ratio": statistics.median(ours / torch for torch, ours in pairs),
        "rounds": args.rounds,
    }
    if args.json:
        print(json.dumps(result, indent=2))
        return
    print(f"import torch {result['torch_seconds']:.2f} CPU s, import mmpe {result['mmpe_seconds']:.2f} CPU s, "
          f"ratio {result['ratio']:.3f} (median of {args.rounds} pairs; the aim is at most 1.1)")  # fmt: skip


if __name__ == "__main__":
    main()
