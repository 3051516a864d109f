"""Progress of several runs: live bars on a terminal, one line for every finished run elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ._text import duration


class Progress:
    """Shows runs as they go; on a pipe or in a file nothing but plain lines is written.

    Args:
        names: one for each run.
        title: what is being run.
    """

    def __init__(self, names: Sequence[str], title: str) -> None:
        self.names, self.title, self.began = list(names), title, time.monotonic()
        self.starts: dict[int, float] = {}
        self.ended = 0
        self.bars: Any = self._make_bars() if sys.stdout.isatty() else None
        self.tasks: dict[int, Any] = {}

    def __enter__(self) -> Progress:
        if self.bars is not None:
            self.bars.start()
            self.overall = self.bars.add_task(self.title, total=len(self.names), note="")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: Any, trace: TracebackType | None) -> None:
        if self.bars is not None:
            self.bars.stop()

    def started(self, index: int) -> None:
        """A run begins."""
        self.starts[index] = time.monotonic()
        if self.bars is not None:
            self.tasks[index] = self.bars.add_task("  " + self.names[index], total=None, note="starting")

    def advanced(self, index: int, done: int, total: int) -> None:
        """A run has done some of its steps."""
        if self.bars is not None:
            note = f"step {done}/{total}" if done < total else "evaluating"
            self.bars.update(self.tasks[index], completed=done, total=total, note=note)

    def finished(self, index: int, text: str) -> None:
        """A run has ended, well or not; `text` says how."""
        self.ended += 1
        spent = duration(time.monotonic() - self.starts.get(index, self.began))
        line = f"[{self.ended}/{len(self.names)}] {self.names[index]}: {text} ({spent})"
        if self.bars is None:
            print(line, flush=True)
            return
        self.bars.console.print(line, markup=False, highlight=False)
        self.bars.remove_task(self.tasks.pop(index))
        self.bars.advance(self.overall)

    @staticmethod
    def _make_bars() -> Any:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        text = TextColumn("{task.description}", markup=False)
        return Bars(text, BarColumn(bar_width=30), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
