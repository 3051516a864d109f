"""`mmpe compare`: train several encodings with several seeds, evaluate each beyond its training size."""

from __future__ import annotations

import json
import math
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmpe.evaluation.report import Section, environment, write_html
from mmpe.evaluation.tables import RunResult, cells, markdown, summarise

from ._arguments import EncodingSpec, Parser, known_encodings, parser
from ._errors import UsageError
from ._text import columns, duration
from .configs import find
from .progress import Progress
from .runs import LOG_NAME, Job, perform
from .workers import run_all

POSITIONS = ("raw", "scaled")
NOTES = (
    "The deviation is over training seeds on one split of the data; it says nothing about another split.",
    "Raw positions count cells beyond the trained range. Scaled positions stretch every grid to the trained range, "
    "which is what resampling a learned table does: compare a learned table with scaled rotary positions, not with raw "
    "ones.",
    "All encodings share one set of hyperparameters, tuned for none of them: read kinds of failure off the curves, not "
    "a ranking.",
)


@dataclass(frozen=True)
class Study:
    """A task of a comparison.

    Attributes:
        title: name of the task, in tables and folders.
        config: path of its config.
        encodings: what to compare.
        seeds: seeds of the runs.
        scales: sizes to evaluate at, in training sizes.
        positions: rules of positions to evaluate.
        overrides: further arguments of `mmpe fit`.
        text: a sentence for the report.
        notes: what may be concluded and what not.
    """

    title: str
    config: str
    encodings: tuple[EncodingSpec, ...]
    seeds: tuple[int, ...]
    scales: tuple[float, ...]
    positions: tuple[str, ...] = POSITIONS
    overrides: tuple[str, ...] = ()
    text: str = ""
    notes: tuple[str, ...] = NOTES

    def jobs(self, out: Path) -> list[Job]:
        """One for each encoding and seed, seeds outermost: an early stop leaves all encodings with equal seeds."""
        return [
            Job(self.title, self.config, encoding, seed, self.scales, self.positions, str(out), self.overrides)
            for seed in self.seeds
            for encoding in self.encodings
        ]


@dataclass
class Outcome:
    """What came of the jobs.

    Attributes:
        results: of the runs that finished, now or before.
        failures: the runs that failed, with one line each.
        skipped: how many had been finished before.
        seconds: wall time of this call.
    """

    results: list[RunResult] = field(default_factory=list)
    failures: list[tuple[Job, str]] = field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0


def main(command: str, argv: list[str]) -> int:
    """Compare and write table, curves, results and report."""
    args, overrides = _parser(command).parse_known_args(argv)
    study = _study(args, overrides)
    out = Path(args.out or Path("runs") / "compare" / Path(study.config).stem)
    outcome = run_studies([study], out, args.jobs)
    write_all([study], outcome, out, f"Position encodings on {study.title}", shlex.join(["mmpe", command, *argv]))
    return 1 if outcome.failures else 0


def run_studies(studies: Sequence[Study], out: Path, workers: int) -> Outcome:
    """Run what is not finished yet, in `workers` processes of one thread each."""
    start, outcome = time.monotonic(), Outcome()
    jobs = [job for study in studies for job in study.jobs(out)]
    done = {job.folder: result for job in jobs if (result := job.finished()) is not None}
    todo = [job for job in jobs if job.folder not in done]
    outcome.skipped = len(done)
    if done:
        print(f"{len(done)} of {len(jobs)} runs are finished already in {out}", flush=True)
    with Progress([job.name for job in todo], "all runs") as progress:
        for event in run_all(perform, todo, workers):
            job = todo[event.index]
            if event.kind == "started":
                progress.started(event.index)
            elif event.kind == "progress":
                progress.advanced(event.index, event.done, event.total)
            elif event.kind == "finished":
                done[job.folder] = event.result
                progress.finished(event.index, _first_and_last(event.result))
            else:
                outcome.failures.append((job, event.message))
                _keep_trace(job, event.trace)
                progress.finished(event.index, f"FAILED: {event.message} (see {job.folder / LOG_NAME})")
    outcome.results = [job.chosen(done[job.folder]) for job in jobs if job.folder in done]
    outcome.seconds = time.monotonic() - start
    return outcome


def write_all(studies: Sequence[Study], outcome: Outcome, out: Path, title: str, command: str) -> None:
    """Print the tables; write table.md, results.json, extrapolation.png and report.html."""
    out.mkdir(parents=True, exist_ok=True)
    tables = [(s, summarise(r for r in outcome.results if r.task == s.title)) for s in studies]
    facts = {"command": command, "seeds": _seeds(studies), "runs": _runs(outcome)}
    facts |= {"wall time": duration(outcome.seconds), "CPU time of all trainings": duration(_cpu_seconds(outcome))}
    parts, sections = [f"# {title}"], []
    for study, rows in tables:
        failures = tuple(f"{job.name}: {text}" for job, text in outcome.failures if job.task == study.title)
        parts += [f"## {study.title}", study.text, markdown(rows) if rows else "No run finished."]
        parts += [f"- Failed: {line}" for line in failures] + ["\n".join(f"- {note}" for note in study.notes)]
        sections.append(Section(study.title, study.text, rows, study.notes, failures))
        _print_table(study, rows)
    parts.append("\n".join(f"- {key}: {value}" for key, value in {**facts, **environment()}.items()))
    (out / "table.md").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    results = [{"task": r.task, "encoding": r.encoding, "seed": r.seed, "scores": r.scores, "seconds": r.seconds,
                "parameters": r.parameters} for r in outcome.results]  # fmt: skip
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    figures = []
    drawn = [(study.title, rows) for study, rows in tables if rows]
    if drawn:
        from mmpe.plots import extrapolation_panels

        figure = extrapolation_panels(drawn)
        figure.savefig(out / "extrapolation.png")
        figures.append(("Score against size", figure))
    write_html(out / "report.html", title, sections, figures, facts)
    print(f"\n{duration(outcome.seconds)}; wrote {out}/ table.md, extrapolation.png, results.json, report.html")


def _parser(command: str) -> Parser:
    p = parser(
        command,
        "Train each encoding with each seed, evaluate it at each size; finished runs are skipped when repeated.",
        "Every other argument goes to the training as in mmpe fit, such as --trainer.max_steps 200 --model.lr 1e-3.",
    )
    p.add_argument("--config", required=True, help="the experiment; its encoding is replaced")
    p.add_argument("--encodings", nargs="+", required=True, metavar="NAME",
                   help="names or wildcards; options as in rope_axial:base=10")  # fmt: skip
    p.add_argument("--seeds", type=int, default=3, metavar="N", help="number of seeds: 0 to N-1")
    p.add_argument("--scales", nargs="+", type=float, default=[1.0, 1.5, 2.0, 3.0], metavar="X",
                   help="evaluation sizes, in training sizes")  # fmt: skip
    p.add_argument("--positions", nargs="+", choices=POSITIONS, default=list(POSITIONS),
                   help="raw counts cells, scaled stretches every grid to the trained range")  # fmt: skip
    p.add_argument("--out", help="folder for everything; by default runs/compare/CONFIG")
    p.add_argument("--jobs", type=int, default=default_jobs(), metavar="N", help="processes, of one thread each")
    return p


def default_jobs() -> int:
    """As many processes as cores that this process may use, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores))


def _study(args: object, overrides: list[str]) -> Study:
    a = vars(args)
    for name in ("seeds", "jobs"):
        if a[name] < 1:
            raise UsageError(f"--{name} must be at least 1, got {a[name]}")
    if not all(0 < scale < math.inf for scale in a["scales"]):
        raise UsageError(f"--scales must be greater than 0 and finite, got {a['scales']}")
    if overrides and not overrides[0].startswith("--"):
        raise UsageError(f"unexpected argument {overrides[0]!r}")
    config = find(a["config"])
    specs = [EncodingSpec.parse(text) for text in known_encodings(a["encodings"], axes=2)]
    for spec in specs:
        spec.check()
    return Study(
        title=config.stem,
        config=str(config),
        encodings=tuple(specs),
        seeds=tuple(range(a["seeds"])),
        scales=tuple(dict.fromkeys(a["scales"])),
        positions=tuple(p for p in POSITIONS if p in a["positions"]),
        overrides=tuple(overrides),
        text=f"Accuracy in per cent, trained by {config.name}, evaluated beyond the training size.",
    )


def _print_table(study: Study, rows: list) -> None:
    header, table = cells(rows)
    print(f"\n{study.title}: {study.text}")
    if table:
        print(columns(header, table, right=tuple(range(2, len(header)))))


def _first_and_last(result: RunResult) -> str:
    """The scores at the smallest and the largest size."""
    rule = next(iter(result.scores))
    sizes = sorted(result.scores[rule])
    shown = [f"{100 * result.scores[rule][size]:.1f} % at {size:g}x" for size in dict.fromkeys((sizes[0], sizes[-1]))]
    return f"{', '.join(shown)} ({rule})"


def _keep_trace(job: Job, trace: str) -> None:
    if trace:
        job.folder.mkdir(parents=True, exist_ok=True)
        with (job.folder / LOG_NAME).open("a", encoding="utf-8") as file:
            file.write(trace)


def _seeds(studies: Sequence[Study]) -> str:
    return "; ".join(f"{study.title}: {', '.join(map(str, study.seeds))}" for study in studies)


def _cpu_seconds(outcome: Outcome) -> float:
    return sum(result.seconds for result in outcome.results)


def _runs(outcome: Outcome) -> str:
    new = len(outcome.results) - outcome.skipped
    return f"{new} now, {outcome.skipped} taken from before, {len(outcome.failures)} failed"
