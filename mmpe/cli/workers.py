"""Runs side by side: processes of one thread each, which report progress; one that dies takes only its run along."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from ._errors import describe_error, mistake_in
from ._text import shorten

Emit = Callable[[int, int], None]
"""Called by a run with the steps done and the steps in all."""

Work = Callable[[Any, Emit], Any]
"""A module-level function: (payload, emit) -> result; both must survive pickling."""


@dataclass(frozen=True)
class Event:
    """What happened to the run `index`.

    Attributes:
        kind: "started", "progress", "finished" or "failed".
        index: place of the run in the list.
        done: steps done, of a "progress".
        total: steps in all, of a "progress".
        result: of a "finished".
        message: of a "failed": one line.
        trace: of a "failed": the traceback; for mistakes of the user the whole message.
    """

    kind: str
    index: int
    done: int = 0
    total: int = 0
    result: Any = None
    message: str = ""
    trace: str = ""


def run_all(work: Work, payloads: Sequence[Any], workers: int) -> Iterator[Event]:
    """Run `work` on every payload in `workers` processes; yields events as they come, one end for every run."""
    waiting = deque(range(len(payloads)))
    busy: list[_Worker] = []
    try:
        for _ in range(min(workers, len(payloads))):
            busy.append(_Worker())
            yield _start(busy[-1], work, payloads, waiting.popleft())
        while busy:
            for worker in _ready(busy):
                event = worker.next_event()
                yield event
                if event.kind == "progress":
                    continue
                if not waiting:
                    worker.stop()
                    busy.remove(worker)
                    continue
                if not worker.process.is_alive():
                    busy[busy.index(worker)] = worker = _Worker()
                yield _start(worker, work, payloads, waiting.popleft())
    finally:
        for worker in busy:
            worker.kill()


@dataclass
class _Worker:
    """One process and the pipe to it."""

    index: int = -1
    process: Any = field(init=False)
    pipe: Connection = field(init=False)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=False)
        with _single_threaded():
            self.process.start()
        theirs.close()

    def next_event(self) -> Event:
        """The next message, or the death of the process as a failure."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return Event("failed", self.index, message=f"the process died (exit code {self.process.exitcode})")

    def stop(self) -> None:
        """Let an idle process end."""
        with contextlib.suppress(OSError):  # it died, which its run has reported
            self.pipe.send(None)
        self.pipe.close()
        self.process.join(timeout=30)
        self.kill()

    def kill(self) -> None:
        """End the process whatever it does."""
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.kill()


def _start(worker: _Worker, work: Work, payloads: Sequence[Any], index: int) -> Event:
    worker.index = index
    worker.pipe.send((work, payloads[index], index))
    return Event("started", index)


def _ready(workers: list[_Worker]) -> list[_Worker]:
    pipes = wait([worker.pipe for worker in workers])
    return [worker for worker in workers if worker.pipe in pipes]


def _serve(pipe: Connection) -> None:
    """Life of a worker process."""
    import torch

    torch.set_num_threads(1)
    # A parent that was killed leaves a broken pipe: then there is nobody to work for.
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while (order := pipe.recv()) is not None:
            pipe.send(_perform(pipe, *order))


def _perform(pipe: Connection, work: Work, payload: Any, index: int) -> Event:
    try:
        return Event("finished", index, result=work(payload, lambda d, t: pipe.send(Event("progress", index, d, t))))
    except KeyboardInterrupt:
        return Event("failed", index, message="interrupted")
    except (Exception, SystemExit) as error:  # noqa: BLE001  the parent reports it, and other runs go on
        mistake = mistake_in(error)
        message = f"{type(error).__name__}: {describe_error(error)}" if mistake is None else describe_error(mistake)
        trace = traceback.format_exc() if mistake is None else f"{message}\n"
        return Event("failed", index, message=shorten(message, 300), trace=trace)


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """Children started here get one thread for OpenMP and BLAS, whose pools would fight over the same cores."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
