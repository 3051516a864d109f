"""Rotary application beside the field's, in one interleaved run.

    python benchmarks/rotary.py                  # the whole table, about six minutes on one core
    python benchmarks/rotary.py --quick          # small shape, few rounds
    python benchmarks/rotary.py --json out.json

Every entry rotates q and k of the shape given, with tables made beforehand, as one transformer block does. Numbers are
CPU seconds of one thread relative to timm in the same round (median), so other processes hardly disturb them. Freed
memory stays with the process (`keep_pages`), as on a GPU. "copy" only clones q and k (and the two gradients): the least
that anything can cost which makes new tensors.

Where the shape has a cls token, timm cuts it off and joins it again, as its attention does; the others get identity
rows. Interleaved and half-split planes are both shown: weights made for one cannot be used with the other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _timing import interleaved, keep_pages, one_thread, versions
from torch import Tensor

from mmpe.rotary import RotaryTable

Pair = tuple[Tensor, Tensor]
Apply = Callable[[Tensor, Tensor], Pair]

SHAPES = {"image": (8, 12, 197, 64), "long": (2, 8, 4096, 64)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS = ("mmpe", "mmpe, half")
BOUND = "copy"
BASELINE = "timm"


@dataclass(frozen=True)
class Case:
    """One shape in one dtype, with the angles that everybody's tables are made from."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    prefix: int
    angles: Tensor  # (prefix + N, F); zero rows for the prefix

    @classmethod
    def make(cls, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Case:
        prefix = shape[2] % 2  # 197 = one cls token and 14 x 14 patches
        omega = 100.0 ** -torch.linspace(0, 1, shape[3] // 2)
        return cls(shape, dtype, prefix, (torch.arange(shape[2]) - prefix).clamp(min=0)[:, None] * omega)

    def pair(self, requires_grad: bool) -> Pair:
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(self.shape, generator=generator).to(self.dtype) for _ in "qk")
        return q.requires_grad_(requires_grad), k.requires_grad_(requires_grad)

    def cos_sin(self, half: bool) -> Pair:
        wide = torch.cat((self.angles, self.angles), -1) if half else self.angles.repeat_interleave(2, -1)
        return wide.cos(), wide.sin()  # (N, D)


def implementations(case: Case) -> dict[str, Apply]:
    """Everybody's way to rotate q and k, by name; libraries that are not installed are left out."""
    table = RotaryTable.from_angles(case.angles[case.prefix :], prefix=case.prefix)
    found: dict[str, Apply] = {
        "mmpe": lambda q, k: table.rotate_pair(q, k),
        "mmpe, half": lambda q, k: table.rotate_pair(q, k, half=True),
    }
    for make in (_timm, _transformers, _diffusers, _rotary_embedding_torch):
        try:
            found.update(make(case))
        except ImportError as error:
            print(f"left out: {error}")
    return found


def _timm(case: Case) -> dict[str, Apply]:
    from timm.layers import apply_rot_embed_cat

    cut = case.prefix

    def make(half: bool) -> Apply:
        cos, sin = case.cos_sin(half)
        embed = torch.cat((sin, cos), -1)[cut:]

        def one(x: Tensor) -> Tensor:
            if not cut:
                return apply_rot_embed_cat(x, embed, half=half)
            return torch.cat((x[:, :, :cut], apply_rot_embed_cat(x[:, :, cut:], embed, half=half)), 2)

        return lambda q, k: (one(q), one(k))

    return {"timm": make(False), "timm, half": make(True)}


def _transformers(case: Case) -> dict[str, Apply]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    # The LLaMA model hands its tables over in the dtype of the hidden states.
    cos, sin = (t[None].to(case.dtype) for t in case.cos_sin(half=True))
    return {"transformers, half": lambda q, k: apply_rotary_pos_emb(q, k, cos, sin)}


def _diffusers(case: Case) -> dict[str, Apply]:
    from diffusers.models.embeddings import apply_rotary_emb

    def make(half: bool) -> Apply:
        tables, dim = case.cos_sin(half), -2 if half else -1
        return lambda q, k: (
            apply_rotary_emb(q, tables, use_real_unbind_dim=dim),
            apply_rotary_emb(k, tables, use_real_unbind_dim=dim),
        )

    return {"diffusers": make(False), "diffusers, half": make(True)}


def _rotary_embedding_torch(case: Case) -> dict[str, Apply]:
    from rotary_embedding_torch import apply_rotary_emb

    angles = case.angles.repeat_interleave(2, -1)
    return {"rotary-embedding-torch": lambda q, k: (apply_rotary_emb(angles, q), apply_rotary_emb(angles, k))}


def check(case: Case, applies: dict[str, Apply]) -> None:
    """Everybody must rotate by the same angles: compare with ours of the same pairing."""
    q, k = case.pair(False)
    tolerance = 1e-5 if case.dtype == torch.float32 else 0.06
    for name, apply in applies.items():
        ours = applies[OURS[name.endswith("half")]](q, k)
        for mine, theirs in zip(ours, apply(q, k), strict=True):
            torch.testing.assert_close(theirs, mine, rtol=tolerance, atol=tolerance)


def calls(case: Case, apply: Apply, backward: bool, compiled: bool) -> Callable[[], object]:
    """A function without arguments that rotates q and k once, with the backward pass if asked."""
    run = torch.compile(apply, dynamic=False) if compiled else apply
    q, k = case.pair(backward)
    if not backward:

        def forward() -> Pair:
            with torch.no_grad():
                return run(q, k)

        return forward
    gradients = tuple(torch.randn_like(t) for t in (q, k))
    return lambda: torch.autograd.grad(run(q, k), (q, k), gradients)


def extra_memory(call: Callable[[], object], case: Case, backward: bool) -> float:
    """Peak bytes allocated while `call` runs beyond what it must make, in tensors of the size of q.

    What it must make: two rotated tensors, and with the backward pass two gradients.
    """
    with one_thread(), _silent_profiler():
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    size = torch.Size(case.shape).numel() * torch.empty((), dtype=case.dtype).element_size()
    return round(peak / size - (4 if backward else 2), 2)


def copies(case: Case, backward: bool) -> Callable[[], object]:
    """The lower bound: as many new tensors, each filled in one pass."""
    tensors = case.pair(False) * (2 if backward else 1)
    return lambda: [t.clone() for t in tensors]


@contextmanager
def _silent_profiler() -> Iterator[None]:
    # Some builds of the profiler's library write a line to the standard error at each start and stop.
    kept, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(sink)


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each implementation, shape, dtype, mode and direction."""
    for compiled in (False,) if options.eager_only else (False, True):
        for shape_name in ("image",) if options.quick else SHAPES:
            for dtype_name, dtype in DTYPES.items():
                case = Case.make(SHAPES[shape_name], dtype)
                applies = implementations(case)
                check(case, applies)
                torch.compiler.reset()
                for backward in (False, True):
                    todo = {name: calls(case, apply, backward, compiled) for name, apply in applies.items()}
                    todo[BOUND] = copies(case, backward)
                    times = interleaved(todo, BASELINE, rounds=options.rounds)
                    setting = {
                        "mode": "compiled" if compiled else "eager",
                        "shape": shape_name,
                        "dtype": dtype_name,
                        "direction": "forward+backward" if backward else "forward",
                    }
                    for name, timing in times.items():
                        yield setting | timing.as_dict() | {"extra_memory": extra_memory(todo[name], case, backward)}


def tables(records: list[dict[str, Any]]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of one table for each mode and shape."""
    for mode, shape in dict.fromkeys((r["mode"], r["shape"]) for r in records):
        here = [r for r in records if (r["mode"], r["shape"]) == (mode, shape)]
        columns = list(dict.fromkeys((r["dtype"], r["direction"]) for r in here))
        header = ["q and k"] + [f"{dtype} {direction}" for dtype, direction in columns]
        rows = []
        for name in dict.fromkeys(r["name"] for r in here):
            cells = {(r["dtype"], r["direction"]): r for r in here if r["name"] == name}
            rows.append([name] + [_cell(cells[column]) for column in columns])
        yield f"{mode}, {SHAPES[shape]}: ratio to timm | CPU ms | extra memory in q-sized tensors", header, rows


def _cell(record: dict[str, Any]) -> str:
    return f"{record['ratio']:.2f} | {record['milliseconds']:.2f} | {record['extra_memory']:.1f}"


def verdicts(records: list[dict[str, Any]]) -> Iterator[str]:
    """The aims of this project, each with what was measured."""
    keys = ("mode", "shape", "dtype", "direction")
    for setting in dict.fromkeys(tuple(r[key] for key in keys) for r in records):
        here = {r["name"]: r for r in records if tuple(r[key] for key in keys) == setting}
        ratios = {name: record["ratio"] for name, record in here.items()}
        peer = min((name for name in ratios if name not in (*OURS, BOUND)), key=ratios.__getitem__)
        memory = max(here[name]["extra_memory"] for name in OURS)
        aims = {f"fastest peer {peer} {ratios[peer]:.2f}": max(ratios[name] for name in OURS) <= ratios[peer]}
        if setting[0] == "eager" and setting[2] == "fp32":
            limit = 0.2 if setting[3] == "forward" else 0.4
            aims[f"mmpe <= {limit} of timm"] = ratios["mmpe"] <= limit
        aims[f"extra memory {memory:.1f} <= 1 and the tables"] = memory <= 1.05
        measured = f"{' '.join(setting)}: mmpe {ratios['mmpe']:.2f}, half {ratios['mmpe, half']:.2f}"
        yield "; ".join([measured] + [f"{aim}: {'met' if met else 'MISSED'}" for aim, met in aims.items()])


def show(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print one table, with rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"\n{title}\n" + "\n".join("  ".join(f"{cell:24s}" for cell in row) for row in [header, *rows]))
        return
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row, style="bold" if row[0] in OURS else None)
    Console(width=132).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="only the image shape and five rounds")
    parser.add_argument("--eager-only", action="store_true", help="leave torch.compile out")
    parser.add_argument("--rounds", type=int, default=None, help="timed rounds (default 25, quick 5)")
    parser.add_argument("--json", type=Path, default=None, help="write all records to this file")
    options = parser.parse_args()
    options.rounds = options.rounds or (5 if options.quick else 25)
    warnings.filterwarnings("ignore", message=".*Can't initialize NVML.*")
    keep_pages()
    records = list(measure(options))
    for title, header, rows in tables(records):
        show(title, header, rows)
    print("\n".join(verdicts(records)))
    if options.json:
        about = {
            "versions": versions("timm", "transformers", "diffusers", "rotary-embedding-torch"),
            "processor": platform.processor() or platform.machine(),
            "threads": 1,
        }
        options.json.write_text(json.dumps(about | {"records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
