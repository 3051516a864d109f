"""Interleaved timing in CPU seconds of one thread.

Wall time on a shared machine measures the neighbours. The CPU seconds of this process hardly move with the load, and
running every candidate once per round, in a changing order, spreads what does move (caches, clock speed) over all of
them. Ratios are taken inside a round and the median over the rounds is reported.
"""

from __future__ import annotations

import ctypes
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

__all__ = ["Timing", "interleaved", "keep_pages", "one_thread", "versions"]


@dataclass(frozen=True)
class Timing:
    """What one candidate cost, alone and next to the baseline.

    Attributes:
        name: The candidate.
        milliseconds: Median CPU milliseconds of one call.
        ratio: Median over the rounds of (this candidate / baseline), both timed in the same round.
        low: The first quartile of that ratio.
        high: The third quartile of that ratio.
        rounds: How many rounds were timed.
    """

    name: str
    milliseconds: float
    ratio: float
    low: float
    high: float
    rounds: int

    def as_dict(self) -> dict[str, object]:
        """The fields as plain values, for JSON."""
        return asdict(self)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the body on one intra-op thread and restore the count afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    baseline: str,
    rounds: int = 25,
    warmup: int = 3,
    seconds: float = 0.01,
    seed: int = 0,
) -> dict[str, Timing]:
    """Time all candidates side by side.

    Args:
        candidates: Name -> function without arguments; its result is dropped.
        baseline: The name whose time is 1.00 in the ratios.
        rounds: Rounds in which every candidate is timed once.
        warmup: Untimed calls of every candidate before the first round (compilation happens here).
        seconds: Shortest timed span; a faster candidate is called several times in a row and averaged.
        seed: Seed of the order inside the rounds.

    Returns:
        One `Timing` for each candidate, in the order given.
    """
    if baseline not in candidates:
        raise ValueError(f"baseline {baseline!r} is not among the candidates {sorted(candidates)}")
    with one_thread():
        repeats = {name: _repeats(call, warmup, seconds) for name, call in candidates.items()}
        spans: dict[str, list[float]] = {name: [] for name in candidates}
        order, shuffler = list(candidates), random.Random(seed)
        for _ in range(rounds):
            shuffler.shuffle(order)
            for name in order:
                spans[name].append(_cpu_seconds(candidates[name], repeats[name]))
    return {name: _summary(name, spans[name], spans[baseline]) for name in candidates}


def keep_pages() -> bool:
    """Make the allocator keep freed memory, as the caching allocators of GPUs do; False where it cannot be told to.

    Otherwise glibc hands large tensors back to the system at a moment that depends on the history of the process, and
    the page faults of the next allocation (more than the arithmetic, here) are charged to whoever comes next.
    """
    trim_threshold, mmap_threshold, mebibytes = -1, -3, 1 << 20  # the names are M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(mmap_threshold, 1024 * mebibytes) and mallopt(trim_threshold, 2047 * mebibytes))


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of the packages named, torch first; those not installed are left out."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torch", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _repeats(call: Callable[[], object], warmup: int, seconds: float) -> int:
    for _ in range(max(1, warmup)):
        call()
    return max(1, round(seconds / max(_cpu_seconds(call, 1), 1e-7)))


def _cpu_seconds(call: Callable[[], object], repeats: int) -> float:
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.process_time()
        for _ in range(repeats):
            call()
        return (time.process_time() - start) / repeats
    finally:
        if collecting:
            gc.enable()


def _summary(name: str, spans: list[float], base: list[float]) -> Timing:
    ratios = [span / reference for span, reference in zip(spans, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Timing(name, 1e3 * statistics.median(spans), middle, low, high, len(spans))
