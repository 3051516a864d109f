"""Results of trained runs: one `RunResult` a run, summarised over seeds into rows of a table."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunResult:
    """Scores of one trained model beyond its training size.

    Attributes:
        task: name of the experiment.
        encoding: the encoding with its options, as typed.
        seed: seed of the run.
        scores: positions ("raw" or "scaled") -> size as a multiple of the training size -> score in [0, 1].
        seconds: CPU seconds of training.
        parameters: number of trained parameters of the encoding alone.
        details: whatever else should be kept (configuration, versions, metric).
    """

    task: str
    encoding: str
    seed: int
    scores: Mapping[str, Mapping[float, float]]
    seconds: float = 0.0
    parameters: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(asdict(self), indent=2, default=str) + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> RunResult:
        """Read what `save` wrote.

        Raises:
            ValueError: if the file holds something else.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            scores = {p: {float(s): float(v) for s, v in by.items()} for p, by in data["scores"].items()}
            return cls(**{**data, "scores": scores})
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no result of mmpe compare ({error}); delete it to run anew") from error


@dataclass(frozen=True)
class Score:
    """Mean and sample standard deviation over seeds; the deviation of one seed is None."""

    mean: float
    std: float | None
    seeds: int

    @classmethod
    def over(cls, values: Sequence[float]) -> Score:
        """Summarise the scores of several seeds."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))

    def __str__(self) -> str:
        # In per cent: two digits before the point and one after is what a few hundred test pictures resolve.
        shown = f"{100 * self.mean:.1f}"
        return shown if self.std is None else f"{shown} ± {100 * self.std:.1f}"


@dataclass(frozen=True)
class Row:
    """One line of a table: an encoding, how positions were fed to it, and its scores by size.

    Attributes:
        encoding: the encoding with its options.
        positions: "raw", "scaled", or "any" where both gave the same scores in every run.
        scores: size as a multiple of the training size -> score over seeds.
        seconds: mean CPU seconds of a training.
    """

    encoding: str
    positions: str
    scores: Mapping[float, Score]
    seconds: float = 0.0


def summarise(results: Iterable[RunResult]) -> list[Row]:
    """Rows over seeds, in the order in which the encodings first appear, raw before scaled."""
    by_encoding: dict[str, list[RunResult]] = {}
    for result in results:
        by_encoding.setdefault(result.encoding, []).append(result)
    return [row for name, runs in by_encoding.items() for row in _rows(name, runs)]


def positions_of(rows: Iterable[Row]) -> list[str]:
    """The ways of feeding positions that occur, with "any" counted as every one of them."""
    found = {row.positions for row in rows} - {"any"}
    return [p for p in ("raw", "scaled") if p in found] + sorted(found - {"raw", "scaled"}) or ["any"]


def cells(rows: Sequence[Row], best: bool = True) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a table.

    Args:
        rows: what `summarise` returned.
        best: mark the highest mean of each column with a star.
    """
    sizes = sorted({size for row in rows for size in row.scores})
    header = ["encoding", "positions", *(f"{size:g}x" for size in sizes), "seeds", "CPU s"]
    top = {s: max(round(row.scores[s].mean, 3) for row in rows if s in row.scores) for s in sizes}
    table = []
    for row in rows:
        shown = []
        for size in sizes:
            score = row.scores.get(size)
            star = " *" if best and score is not None and round(score.mean, 3) == top[size] else ""
            shown.append("-" if score is None else f"{score}{star}")
        seeds = max((score.seeds for score in row.scores.values()), default=0)
        table.append([row.encoding, row.positions, *shown, str(seeds), f"{row.seconds:.0f}"])
    return header, table


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table of the rows."""
    header, table = cells(rows)
    line = "| " + " | ".join(["---", "---", *["---:"] * (len(header) - 2)]) + " |"
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
    return "\n".join(["| " + " | ".join(header) + " |", line, *body])


def _rows(name: str, runs: list[RunResult]) -> list[Row]:
    ways = [p for p in ("raw", "scaled") if any(p in run.scores for run in runs)]
    seconds = statistics.fmean(run.seconds for run in runs)
    if len(ways) == 2 and all(run.scores.get("raw") == run.scores.get("scaled") for run in runs):
        return [Row(name, "any", _over_seeds(runs, "raw"), seconds)]
    return [Row(name, way, _over_seeds(runs, way), seconds) for way in ways]


def _over_seeds(runs: list[RunResult], way: str) -> dict[float, Score]:
    sizes = sorted({size for run in runs for size in run.scores.get(way, {})})
    return {s: Score.over([r.scores[way][s] for r in runs if s in r.scores.get(way, {})]) for s in sizes}
