"""`mmpe evaluate three-cell`: small experiments that show what an encoding lets a transformer know."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ._arguments import EncodingSpec, Parser, known_encodings, parser
from ._errors import UsageError
from ._text import columns, duration
from .compare import default_jobs
from .progress import Progress
from .workers import Emit, run_all

if TYPE_CHECKING:
    from mmpe.evaluation.three_cell import Setting, ThreeCellResult

DEFAULT = ["none", "ape_learned", "ape_sincos", "rope_axial", "rope_mixed", "pape", "alibi_2d"]
NOTE = """A blank grid with three marked cells; a small transformer answers questions on where they are. All pictures
hold the same tokens, so what is answered better than by guessing comes from positions. Accuracy in per cent: a quadrant
asks for absolute position, left, above, leftmost and middle for directions, nearer for distances. Distances alone do
better than guessing at leftmost and middle too, since a cell close to both others is likely between them. One setting
for all, tuned for none: read off what cannot be told, not a ranking."""


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        encoding: the encoding and its options.
        seed: seed of weights and pictures.
        setting: sizes of the experiment.
    """

    encoding: EncodingSpec
    seed: int
    setting: Setting


def main(command: str, argv: list[str]) -> int:
    """Run the experiment and print its table."""
    args = _parser(command).parse_args(argv)
    jobs = _jobs(args)
    began, results, failures = time.monotonic(), *_run(jobs, args.jobs)
    if results:
        from mmpe.evaluation.three_cell import cells, summarise

        header, table = cells(summarise([results[i] for i in sorted(results)]))
        print(columns(header, table, right=tuple(range(1, len(header)))))
    if args.out:
        _write(Path(args.out), [results[i] for i in sorted(results)], shlex.join(["mmpe", command, *argv]))
    wrote = f"; wrote {args.out}" if args.out else ""
    print(f"\n{len(results)} runs in {duration(time.monotonic() - began)}{wrote}")
    return 1 if failures else 0


def perform(job: Job, emit: Emit) -> ThreeCellResult:
    """Train and question one model, in a process of its own."""
    from mmpe.evaluation.three_cell import train_and_ask

    spec = job.encoding
    return train_and_ask(spec.name, spec.options, job.seed, job.setting, spec.label, emit)


def _parser(command: str) -> Parser:
    p = parser(command, "What position encodings let a small transformer know, on generated pictures.", NOTE)
    p.add_argument("experiment", choices=("three-cell",), help="which experiment")
    p.add_argument("--encodings", nargs="+", default=DEFAULT, metavar="NAME",
                   help="names, wildcards or 'all'; options as in rope_axial:base=10")  # fmt: skip
    p.add_argument("--seeds", type=int, default=1, metavar="N", help="number of seeds: 0 to N-1")
    p.add_argument("--side", type=int, default=8, metavar="N", help="rows and columns of the grid")
    p.add_argument("--steps", type=int, default=400, metavar="N", help="training steps")
    p.add_argument("--batch", type=int, default=64, metavar="N", help="pictures in a step")
    p.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    p.add_argument("--jobs", type=int, default=default_jobs(), metavar="N", help="processes, of one thread each")
    p.add_argument("--out", help="JSON file for the results")
    return p


def _jobs(args: object) -> list[Job]:
    from mmpe.evaluation.three_cell import Setting

    a = vars(args)
    for name in ("seeds", "jobs", "steps", "batch"):
        if a[name] < 1:
            raise UsageError(f"--{name} must be at least 1, got {a[name]}")
    if not a["lr"] > 0:
        raise UsageError(f"--lr must be greater than 0, got {a['lr']}")
    specs = [EncodingSpec.parse(text) for text in known_encodings(a["encodings"], axes=2)]
    for spec in specs:
        spec.check()
    setting = Setting(side=a["side"], steps=a["steps"], batch=a["batch"], lr=a["lr"])
    return [Job(spec, seed, setting) for seed in range(a["seeds"]) for spec in specs]


def _run(jobs: Sequence[Job], workers: int) -> tuple[dict[int, ThreeCellResult], int]:
    """Results by number of the job, and how many failed."""
    results: dict[int, ThreeCellResult] = {}
    failures = 0
    with Progress([f"{job.encoding.label}, seed {job.seed}" for job in jobs], f"{len(jobs)} runs") as progress:
        for event in run_all(perform, jobs, workers):
            if event.kind == "started":
                progress.started(event.index)
            elif event.kind == "progress":
                progress.advanced(event.index, event.done, event.total)
            elif event.kind == "finished":
                results[event.index] = event.result
                progress.finished(event.index, f"mean {100 * event.result.mean():.1f} %")
            else:
                failures += 1
                progress.finished(event.index, f"FAILED: {event.message}")
    return results, failures


def _write(path: Path, results: Sequence[ThreeCellResult], command: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"command": command, "results": [asdict(result) for result in results]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
