"""The three-cell experiment: how much absolute and relative position does an encoding let a transformer recover?

In the spirit of LOOPE's benchmark (arXiv 2504.14386), whose exact labels and metrics could not be verified. A blank
grid has three marked cells A, B and C. Questions on their places can only be answered from positions, since the tokens
are the same in every picture: what of them is absolute, which directions and which distances get through is read off
the accuracy for each question. Who knows distances alone also beats guessing at "leftmost" and "middle row", since a
cell that is close to both others is likely between them; "A left of B" and "A above B" have no such way in.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..positions import Positions
from ..registry import create_encoding_for
from .cost import Block, run_blocks

NO_ANSWER = -100  # what cross_entropy ignores


@dataclass(frozen=True)
class Question:
    """One question on the three cells.

    Attributes:
        name: for tables.
        kind: "absolute", "direction" or "distance": what an encoding must tell to answer it.
        classes: number of answers; all are equally frequent but for rounding.
        answer: rows and columns (B, 3) of A, B, C and the side of the grid -> (B,) class, or NO_ANSWER for a tie.
    """

    name: str
    kind: str
    classes: int
    answer: Callable[[Tensor, Tensor, int], Tensor]


def _quadrant(rows: Tensor, columns: Tensor, side: int) -> Tensor:
    answer = 2 * (2 * rows[:, 0] >= side).long() + (2 * columns[:, 0] >= side).long()
    middle = (2 * rows[:, 0] == side - 1) | (2 * columns[:, 0] == side - 1)  # of a grid with an odd side
    return answer.masked_fill(middle, NO_ANSWER)


def _before(coordinate: Tensor) -> Tensor:
    a, b = coordinate[:, 0], coordinate[:, 1]
    return (a < b).long().masked_fill(a == b, NO_ANSWER)


def _ranked(coordinate: Tensor, rank: int) -> Tensor:
    """Which of three has the given rank; no answer where two are equal."""
    ordered = coordinate.sort(dim=1)
    tie = (ordered.values.diff(dim=1) == 0).any(1)
    return ordered.indices[:, rank].masked_fill(tie, NO_ANSWER)


def _nearer(rows: Tensor, columns: Tensor, side: int) -> Tensor:
    squares = (rows[:, :1] - rows[:, 1:]).square() + (columns[:, :1] - columns[:, 1:]).square()  # A-B, A-C
    return (squares[:, 0] < squares[:, 1]).long().masked_fill(squares[:, 0] == squares[:, 1], NO_ANSWER)


QUESTIONS = (
    Question("quadrant of A", "absolute", 4, _quadrant),
    Question("A left of B", "direction", 2, lambda rows, columns, side: _before(columns)),
    Question("A above B", "direction", 2, lambda rows, columns, side: _before(rows)),
    Question("leftmost", "direction", 3, lambda rows, columns, side: _ranked(columns, 0)),
    Question("middle row", "direction", 3, lambda rows, columns, side: _ranked(rows, 1)),
    Question("A nearer to B", "distance", 2, _nearer),
)
CHANCE = {question.name: 1 / question.classes for question in QUESTIONS}


@dataclass(frozen=True)
class Setting:
    """Size of the experiment; the same for every encoding.

    Attributes:
        side: rows and columns of the grid.
        dim: model width.
        heads: attention heads.
        depth: transformer blocks.
        batch: pictures in a training step.
        steps: training steps.
        warmup: steps of linear warm-up, before a cosine.
        lr: highest learning rate.
        weight_decay: of matrices that the encoding does not exempt.
        pictures: pictures of the test, drawn from a seed that no training uses.
    """

    side: int = 8
    dim: int = 64
    heads: int = 4
    depth: int = 2
    batch: int = 64
    steps: int = 400
    warmup: int = 50
    lr: float = 2e-3
    weight_decay: float = 0.01
    pictures: int = 2048

    def __post_init__(self) -> None:
        if self.side < 3 or min(self.batch, self.steps, self.pictures, self.depth) < 1:
            raise ValueError(f"side must be at least 3, and batch, steps, pictures and depth at least 1, got {self}")


@dataclass(frozen=True)
class ThreeCellResult:
    """What one trained model can answer.

    Attributes:
        encoding: the encoding, with its options as typed.
        seed: seed of weights and training pictures.
        scores: question -> accuracy over the test pictures that have an answer.
        seconds: CPU seconds of training.
        parameters: parameters of the encoding.
    """

    encoding: str
    seed: int
    scores: Mapping[str, float]
    seconds: float = 0.0
    parameters: int = 0

    def mean(self, kind: str | None = None) -> float:
        """Mean accuracy over the questions of a kind, or over all."""
        return statistics.fmean(self.scores[q.name] for q in QUESTIONS if kind in (None, q.kind))


class ThreeCellNet(nn.Module):
    """A small transformer over the grid; its tokens at A, B and C answer all questions at once.

    Args:
        encoding: name of the encoding, or several joined by "+".
        options: its options.
        setting: sizes.
    """

    def __init__(self, encoding: str, options: Mapping[str, Any] | None, setting: Setting) -> None:
        super().__init__()
        offers = {"grid_size": (setting.side, setting.side), "prefix": 0}
        self.encoding = create_encoding_for(encoding, setting.dim, setting.heads, 2, setting.depth, offers, options)
        self.embedding = nn.Embedding(4, setting.dim)
        nn.init.trunc_normal_(self.embedding.weight, std=0.5)  # small enough for position tables to be seen beside it
        self.blocks = nn.ModuleList(Block(setting.dim, setting.heads) for _ in range(setting.depth))
        self.norm = nn.LayerNorm(setting.dim)
        self.head = nn.Linear(3 * setting.dim, sum(question.classes for question in QUESTIONS))

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """Token types (B, side, side) -> logits (B, classes) of each question."""
        positions = Positions.grid(*tokens.shape[1:], device=tokens.device)
        x = run_blocks(self.blocks, self.encoding, self.embedding(tokens.flatten(1)), positions)
        index = marked_cells(tokens)[..., None].expand(-1, -1, x.shape[-1])
        logits = self.head(self.norm(x.gather(1, index)).flatten(1))
        return list(logits.split([question.classes for question in QUESTIONS], dim=-1))


def draw_pictures(count: int, side: int, generator: torch.Generator | None = None) -> Tensor:
    """Blank grids with A = 1, B = 2 and C = 3 in three different cells: (count, side, side) int64."""
    cells = torch.rand(count, side * side, generator=generator).topk(3).indices  # (count, 3)
    return torch.zeros(count, side * side, dtype=torch.int64).scatter(1, cells, torch.tensor([[1, 2, 3]]).expand(
        count, -1)).unflatten(1, (side, side))  # fmt: skip


def marked_cells(tokens: Tensor) -> Tensor:
    """Where A, B and C are, as indices of a row-major grid: (B, side, side) -> (B, 3)."""
    return torch.stack([(tokens.flatten(1) == mark).int().argmax(1) for mark in (1, 2, 3)], dim=1)


def answers(tokens: Tensor) -> Tensor:
    """Answers to all questions: (B, side, side) -> (B, questions), NO_ANSWER where two cells tie."""
    side = tokens.shape[-1]
    cells = marked_cells(tokens)
    rows, columns = torch.div(cells, side, rounding_mode="floor"), cells % side
    return torch.stack([question.answer(rows, columns, side) for question in QUESTIONS], dim=1)


def train_and_ask(
    encoding: str,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    setting: Setting | None = None,
    label: str | None = None,
    on_step: Callable[[int, int], object] = lambda done, steps: None,
) -> ThreeCellResult:
    """Train a model with an encoding on fresh pictures, and ask it about others.

    Args:
        encoding: name of the encoding, or several joined by "+".
        options: its options.
        seed: seed of weights and training pictures; the test pictures are always the same.
        setting: sizes; `Setting()` by default.
        label: name in the result; that of the encoding by default.
        on_step: called now and then with the steps done and the steps in all.
    """
    setting = setting or Setting()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = ThreeCellNet(encoding, options, setting)
        start = time.process_time()
        _train(net, setting, on_step)
        seconds = time.process_time() - start
    parameters = sum(p.numel() for p in net.encoding.parameters())
    return ThreeCellResult(label or encoding, seed, ask(net, setting), seconds, parameters)


def ask(net: ThreeCellNet, setting: Setting) -> dict[str, float]:
    """Accuracy for each question on the test pictures."""
    net.eval()
    tokens = draw_pictures(setting.pictures, setting.side, torch.Generator().manual_seed(1 << 40))
    with torch.no_grad():
        parts = [net(part) for part in tokens.split(256)]
    logits = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
    expected, scores = answers(tokens), {}
    for question, own, right in zip(QUESTIONS, logits, expected.unbind(1), strict=True):
        asked = right != NO_ANSWER
        scores[question.name] = float((own.argmax(-1)[asked] == right[asked]).float().mean())
    return scores


def _train(net: ThreeCellNet, setting: Setting, on_step: Callable[[int, int], object]) -> None:
    net.train()
    exempt = {f"encoding.{name}" for name in net.encoding.no_weight_decay()}
    named = list(net.named_parameters())
    decayed = [p for name, p in named if p.dim() > 1 and name not in exempt]
    others = [p for name, p in named if p.dim() < 2 or name in exempt]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": setting.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=setting.lr,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, setting))
    for step in range(1, setting.steps + 1):
        tokens = draw_pictures(setting.batch, setting.side)
        loss = _loss(net, tokens)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % 10 == 0 or step == setting.steps:
            on_step(step, setting.steps)


def _rate(step: int, setting: Setting) -> float:
    if step < setting.warmup:
        return (step + 1) / setting.warmup
    done = (step - setting.warmup) / max(setting.steps - setting.warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def _loss(net: ThreeCellNet, tokens: Tensor) -> Tensor:
    losses = []
    for logits, right in zip(net(tokens), answers(tokens).unbind(1), strict=True):
        total = F.cross_entropy(logits, right, ignore_index=NO_ANSWER, reduction="sum")
        losses.append(total / (right != NO_ANSWER).sum().clamp(min=1))  # a batch of ties has loss 0 and not NaN
    own = net.encoding.auxiliary_loss()
    return torch.stack(losses).mean() + (0.0 if own is None else own)


@dataclass
class Summary:
    """One line of the table: an encoding over its seeds.

    Attributes:
        encoding: the encoding with its options.
        results: one for each seed.
    """

    encoding: str
    results: list[ThreeCellResult] = field(default_factory=list)

    def score(self, question: str) -> tuple[float, float | None]:
        """Mean and sample standard deviation over seeds of one question; one seed has no deviation."""
        values = [result.scores[question] for result in self.results]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def summarise(results: Sequence[ThreeCellResult]) -> list[Summary]:
    """Results by encoding, in the order in which they first appear."""
    found: dict[str, Summary] = {}
    for result in results:
        found.setdefault(result.encoding, Summary(result.encoding)).results.append(result)
    return list(found.values())


def cells(summaries: Sequence[Summary]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table, in per cent, with a first line that says what guessing gets."""
    names = [question.name for question in QUESTIONS]
    header = ["encoding", *names, "mean", "seeds", "CPU s"]
    guessing = [CHANCE[name] for name in names]
    table = [["(guessing)", *(f"{100 * c:.0f}" for c in guessing), f"{100 * statistics.fmean(guessing):.0f}", "", ""]]
    for summary in summaries:
        shown = [_per_cent(*summary.score(name)) for name in names]
        mean = statistics.fmean(result.mean() for result in summary.results)
        seconds = statistics.fmean(result.seconds for result in summary.results)
        table.append([summary.encoding, *shown, f"{100 * mean:.1f}", str(len(summary.results)), f"{seconds:.0f}"])
    return header, table


def _per_cent(mean: float, deviation: float | None) -> str:
    return f"{100 * mean:.1f}" if deviation is None else f"{100 * mean:.1f} ± {100 * deviation:.1f}"
