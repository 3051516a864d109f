"""`mmpe bench`: time and memory of encodings side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch

import mmpe
from mmpe.encoding import PositionEncoding

from ._arguments import EncodingSpec, Parser, known_encodings, parser
from ._errors import UsageError
from ._text import columns, count

NOTE = """Times are CPU seconds of one thread (events on CUDA) of DEPTH transformer blocks with the encoding, in turn
with the same blocks without one; "x none" is the median ratio within a round, +- half the quartile range.
Memory is the peak beyond inputs and weights. Peers are measured in the same blocks."""


def main(command: str, argv: list[str]) -> int:
    """Measure and print."""
    args = _parser(command).parse_args(argv)
    candidates = _candidates(args, len(args.size))
    positions = mmpe.Positions.of_size(args.size, prefix=args.prefix)
    from mmpe.evaluation.cost import measure

    tick: Callable[[int], object] = (lambda done: None) if args.json else _ticker(args.rounds, len(candidates))
    costs = measure(candidates, positions, batch=args.batch, backward=args.backward, rounds=args.rounds,
                    device=args.device, on_round=tick)  # fmt: skip
    setting = {
        "size": list(args.size), "prefix": args.prefix, "dim": args.dim, "heads": args.heads, "depth": args.depth,
        "batch": args.batch, "backward": args.backward, "rounds": args.rounds, "device": args.device,
        "torch": str(torch.__version__),
    }  # fmt: skip
    if args.json:
        print(json.dumps({"setting": setting, "costs": [asdict(cost) for cost in costs]}, indent=2))
        return 0
    rows = [
        [c.name, f"{c.milliseconds:.1f}", f"{c.ratio:.3f}", f"+-{c.spread:.3f}", f"{c.mebibytes:.1f}",
         f"{c.memory_ratio:.2f}", count(c.parameters)]
        for c in costs
    ]  # fmt: skip
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    header = ["encoding", "ms", "x none", "", "peak MiB", "x none", "parameters"]
    print(columns(header, rows, right=(1, 2, 3, 4, 5, 6)))
    return 0


def _parser(command: str) -> Parser:
    p = parser(command, "Time and memory of encodings, relative to no encoding, and of peers where installed.", NOTE)
    p.add_argument("--encodings", nargs="+", default=["all"], metavar="NAME",
                   help="names, wildcards or 'all'; options as in rope_axial:base=10")  # fmt: skip
    p.add_argument("--size", nargs="+", type=int, default=[14, 14], metavar="N", help="grid: N, H W or T H W")
    p.add_argument("--prefix", type=int, default=1, help="class and register tokens")
    p.add_argument("--dim", type=int, default=384, help="model width")
    p.add_argument("--heads", type=int, default=6, help="attention heads")
    p.add_argument("--depth", type=int, default=2, help="transformer blocks")
    p.add_argument("--batch", type=int, default=4, help="images in a batch")
    p.add_argument("--rounds", type=int, default=9, help="how often each is timed")
    p.add_argument("--backward", action="store_true", help="time forward and backward")
    p.add_argument("--device", default="cpu", help="cpu or cuda")
    p.add_argument("--no-peers", action="store_true", help="leave other libraries out")
    p.add_argument("--json", action="store_true", help="print JSON")
    return p


def _candidates(args: object, axes: int) -> dict[str, PositionEncoding]:
    """The baseline first, then what was asked for, then peers."""
    a = vars(args)
    _check(a, axes)
    found: dict[str, PositionEncoding] = {}
    for text in ["none", *known_encodings(a["encodings"], axes)]:
        spec = EncodingSpec.parse(text)
        if spec.label in found:
            continue
        try:
            found[spec.label] = spec.build(a["dim"], a["heads"], a["size"], a["depth"])
        except ValueError as error:
            if text in a["encodings"]:
                raise
            # "all" and wildcards mean those that can be built at these sizes.
            print(f"left out: {text}: {error}", file=sys.stderr)
    if not a["no_peers"]:
        from mmpe.evaluation.peers import installed_peers

        found.update(installed_peers(a["dim"], a["heads"], a["depth"], axes))
    return found


def _check(a: dict, axes: int) -> None:
    if not 1 <= axes <= 3:
        raise UsageError(f"--size takes 1, 2 or 3 numbers, got {axes}")
    for name in ("depth", "batch", "rounds"):
        if a[name] < 1:
            raise UsageError(f"--{name} must be at least 1, got {a[name]}")
    if a["device"] != "cpu" and not (a["device"].startswith("cuda") and torch.cuda.is_available()):
        raise UsageError(f"--device {a['device']} is not available here; use cpu" + _cuda_hint())


def _cuda_hint() -> str:
    return f" or cuda ({torch.cuda.device_count()} found)" if torch.cuda.is_available() else ""


def _ticker(rounds: int, candidates: int) -> Callable[[int], object]:
    if not sys.stderr.isatty():
        return lambda done: None
    return lambda done: print(
        f"\r{candidates} candidates, round {done} of {rounds}", end="\n" if done == rounds else "", file=sys.stderr
    )
