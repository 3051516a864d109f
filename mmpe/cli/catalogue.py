"""`mmpe list` and `mmpe describe`."""

from __future__ import annotations

import json
import re

import mmpe

from ._arguments import parser
from ._errors import UsageError
from ._text import columns, count, shorten, terminal_width


def main(command: str, argv: list[str]) -> int:
    """Run either command."""
    return list_command(argv) if command == "list" else describe_command(argv)


def list_command(argv: list[str]) -> int:
    """Print the encodings that match, one a line."""
    p = parser("list", "Every encoding. Parameters are counted for a ViT-S (12 blocks of width 384, 6 heads).")
    p.add_argument("pattern", nargs="?", default="*", help="wildcard on the name, such as 'rope*'")
    p.add_argument("--axes", type=int, choices=(1, 2, 3), help="only encodings for this number of position axes")
    p.add_argument("--kind", help="only encodings of this kind, such as rotary or bias")
    p.add_argument("--json", action="store_true", help="print JSON")
    args = p.parse_args(argv)
    kinds = sorted({mmpe.describe(name).kind for name in mmpe.list_encodings()})
    if args.kind is not None and args.kind not in kinds:
        raise UsageError(f"unknown kind {args.kind!r}; known: {', '.join(kinds)}")
    infos = [mmpe.describe(name) for name in mmpe.list_encodings(args.pattern, axes=args.axes, kind=args.kind)]
    if args.json:
        print(json.dumps([info.as_dict() for info in infos], indent=2, default=str))
        return 0
    if not infos:
        raise UsageError(f"no encoding matches {args.pattern!r}; known: {', '.join(mmpe.list_encodings())}")
    print(_table(infos))
    return 0


def describe_command(argv: list[str]) -> int:
    """Print what is known about one or more encodings."""
    p = parser("describe", "Equation, options and defaults, promises with the tests that check them, and source.")
    p.add_argument("names", nargs="+", metavar="NAME", help="an encoding of `mmpe list`")
    p.add_argument("--json", action="store_true", help="print JSON")
    args = p.parse_args(argv)
    infos = [mmpe.describe(name) for name in args.names]
    if args.json:
        dicts = [info.as_dict() for info in infos]
        print(json.dumps(dicts if len(dicts) > 1 else dicts[0], indent=2, default=str))
    else:
        print("\n\n".join(map(str, infos)))
    return 0


def _table(infos: list[mmpe.EncodingInfo]) -> str:
    rows = [
        [i.name, i.kind, ",".join(map(str, i.axes)), count(i.parameters) + ("*" if i.per_layer else " "),
         shorten(i.cost.split(";")[0], 44)]
        for i in infos
    ]  # fmt: skip
    header = ["name", "kind", "axes", "parameters ", "cost"]
    used = sum(max(len(row[c]) for row in [header, *rows]) + 2 for c in range(len(header)))
    room = max(24, terminal_width() - used)
    rows = [[*row, _source(info.source, room)] for row, info in zip(rows, infos, strict=True)]
    text = columns([*header, "source"], rows, right=(3,))
    return text + ("\n* has parameters of its own in every block" if any(i.per_layer for i in infos) else "")


def _source(source: str, room: int) -> str:
    """The source, or its arXiv number alone where there is no room for more."""
    number = re.search(r"arXiv \d{4}\.\d{4,5}", source)
    return number[0] if number is not None and len(source) > room else shorten(source or "-", room)
