"""Time and memory of encodings inside the same transformer blocks, relative to no encoding.

Seconds are CPU seconds of one thread (on CUDA: events around the call). Every candidate runs once in each round, in
an order that changes, and is compared with the baseline of the same round; the median over rounds is reported.
"""

from __future__ import annotations

import random
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..attention import attend
from ..encoding import AttentionTerms, PositionEncoding
from ..positions import Positions

BASELINE = "none"


@dataclass(frozen=True)
class Cost:
    """What one candidate costs.

    Attributes:
        name: the candidate.
        milliseconds: median time of one call.
        ratio: median over the rounds of this candidate's time over the baseline's.
        spread: half the range between the quartiles of that ratio.
        mebibytes: peak memory of one call beyond its inputs and parameters.
        memory_ratio: that peak over the baseline's.
        parameters: number of parameters of the encoding.
    """

    name: str
    milliseconds: float
    ratio: float
    spread: float
    mebibytes: float
    memory_ratio: float
    parameters: int


class Block(nn.Module):
    """A pre-norm transformer block around `attend`, the same for every candidate.

    Args:
        dim: model width C.
        heads: number of heads H.
        qkv_heads: heads that q, k and v are projected to; H by default.
        output_heads: heads that attention returns; H by default.
    """

    def __init__(self, dim: int, heads: int, qkv_heads: int | None = None, output_heads: int | None = None) -> None:
        super().__init__()
        self.heads, head_dim = qkv_heads or heads, dim // heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * self.heads * head_dim)
        self.proj = nn.Linear((output_heads or heads) * head_dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, terms_of: Callable[[Tensor], AttentionTerms]) -> Tensor:
        """Tokens x (B, N, C) -> (B, N, C)."""
        h = self.norm1(x)
        terms = terms_of(h)
        qkv = self.qkv(terms.inputs(h)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, N, D)
        x = x + self.proj(attend(q, k, v, terms).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def run_blocks(blocks: nn.ModuleList, encoding: PositionEncoding, x: Tensor, positions: Positions) -> Tensor:
    """All blocks with an encoding, as a backbone calls it."""
    positions = encoding.place(positions, x.shape[0])
    shared = None if encoding.content_dependent else encoding(positions)
    for i, block in enumerate(blocks):
        x = encoding.embed(x, positions, layer=i)
        if shared is None:
            x = block(x, lambda h, i=i: encoding(positions, h, layer=i))
        else:
            x = block(x, lambda h, i=i: shared.layer(i))
    return x


def measure(
    encodings: Mapping[str, PositionEncoding],
    positions: Positions,
    *,
    batch: int = 4,
    backward: bool = False,
    rounds: int = 9,
    device: str = "cpu",
    on_round: Callable[[int], object] = lambda done: None,
) -> list[Cost]:
    """Time and memory of each encoding in its blocks, interleaved.

    Args:
        encodings: name -> encoding; one must be the baseline "none". All share dim, heads and depth.
        positions: where the tokens are.
        batch: sequences in a batch.
        backward: time forward and backward, as in training.
        rounds: how many times each candidate is timed.
        device: "cpu" or a CUDA device.
        on_round: called with the number of finished rounds.
    """
    if BASELINE not in encodings:
        raise ValueError(f"the baseline {BASELINE!r} is not among {', '.join(encodings)}")
    calls = _calls(encodings, positions.to(device), batch, backward, device)
    with _one_thread(device):
        memory = {name: _peak_bytes(call, device) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        order, shuffler = list(calls), random.Random(0)
        for done in range(rounds):
            shuffler.shuffle(order)
            for name in order:
                times[name].append(_seconds(calls[name], device))
            on_round(done + 1)
    return [_cost(name, times, memory, _count(encodings[name])) for name in calls]


def _calls(
    encodings: Mapping[str, PositionEncoding], positions: Positions, batch: int, backward: bool, device: str
) -> dict[str, Callable[[], object]]:
    first = encodings[BASELINE]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, positions.num_tokens, first.dim, generator=generator).to(device).requires_grad_(backward)
    heads = {(e.qkv_heads, e.output_heads) for e in encodings.values()}
    blocks_for = {
        h: nn.ModuleList(Block(first.dim, first.heads, *h) for _ in range(first.depth)).to(device) for h in heads
    }

    def call(encoding: PositionEncoding) -> object:
        blocks = blocks_for[encoding.qkv_heads, encoding.output_heads]
        if not backward:
            with torch.no_grad():
                return run_blocks(blocks, encoding, x, positions)
        inputs = [p for p in (x, *blocks.parameters(), *encoding.parameters()) if p.requires_grad]
        return torch.autograd.grad(run_blocks(blocks, encoding, x, positions).sum(), inputs, allow_unused=True)

    moved = {name: encoding.to(device).eval() for name, encoding in encodings.items()}
    return {name: partial(call, encoding) for name, encoding in moved.items()}


def _cost(name: str, times: dict[str, list[float]], memory: dict[str, int], parameters: int) -> Cost:
    ratios = [own / base for own, base in zip(times[name], times[BASELINE], strict=True)]
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Cost(
        name=name,
        milliseconds=1e3 * statistics.median(times[name]),
        ratio=quarters[1],
        spread=(quarters[2] - quarters[0]) / 2,
        mebibytes=memory[name] / 2**20,
        memory_ratio=memory[name] / memory[BASELINE],
        parameters=parameters,
    )


def _seconds(call: Callable[[], object], device: str) -> float:
    if device == "cpu":
        start = time.process_time()
        call()
        return time.process_time() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    call()
    end_event.record()
    torch.cuda.synchronize(device)
    return start_event.elapsed_time(end_event) / 1e3


def _peak_bytes(call: Callable[[], object], device: str) -> int:
    """Most memory that lives at once during a call; also warms the call up."""
    call()
    if device != "cpu":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with LiveMemory() as memory:
        call()
    return memory.peak


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of the tensors that operations create, while they live.

    Attributes:
        live: bytes that live now.
        peak: most bytes that lived at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            key = storage._cdata
            if key not in self._known and key not in given:  # else it is a view
                self._known.add(key)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._release, key, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _storages(tree: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def _one_thread(device: str) -> Iterator[None]:
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _count(encoding: PositionEncoding) -> int:
    return sum(p.numel() for p in encoding.parameters())
