"""`mmpe plot KIND`: pictures of encodings and of results, as PNG or SVG."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import mmpe
from mmpe.encoding import PositionEncoding
from mmpe.encodings.rotary import RotaryEncoding
from mmpe.positions import AXIS_NAMES

from ._arguments import EncodingSpec, Parser, parser
from ._errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("frequencies", "attention", "similarity", "extrapolation")
SUFFIXES = (".png", ".svg", ".pdf")


def main(command: str, argv: list[str]) -> int:
    """Draw one picture and write it."""
    args = _parser(command).parse_args(argv)
    out = Path(args.out or f"{args.kind}.png")
    if out.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--out {out}: the name must end in {', '.join(SUFFIXES)}")
    torch.manual_seed(args.seed)
    figure = _DRAW[args.kind](args)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    print(out)
    return 0


def _parser(command: str) -> Parser:
    p = parser(command, "Pictures of encodings and of results.", epilog=_EXAMPLES)
    kinds = p.add_subparsers(dest="kind", required=True, metavar="KIND", parser_class=Parser)
    frequencies = kinds.add_parser("frequencies", help="rotary frequencies per plane and axis")
    attention = kinds.add_parser("attention", help="scores of one token to equal contents, a heat map per head")
    similarity = kinds.add_parser("similarity", help="similarity of several tokens to all others, by position alone")
    extrapolation = kinds.add_parser("extrapolation", help="score against size, from results of mmpe compare")
    for sub in (frequencies, attention, similarity):
        _add_encoding(sub)
    attention.add_argument("--token", nargs="+", type=int, metavar="I", help="grid indices; the middle by default")
    similarity.add_argument("--head", type=int, default=0, help="head whose scores are drawn")
    extrapolation.add_argument("runs", nargs="+", help="folders of mmpe compare or demo, or result.json files")
    extrapolation.add_argument("--title", default="", help="text above the curves")
    for sub in (frequencies, attention, similarity, extrapolation):
        sub.add_argument("--out", help="file to write: .png, .svg or .pdf; by default KIND.png")
        sub.add_argument("--seed", type=int, default=0, help="seed of learned parameters that are drawn at random")
    return p


_EXAMPLES = """examples:
  mmpe plot frequencies rope_mixed --out mixed.png
  mmpe plot attention alibi_2d --size 24 24 --token 3 20 --out alibi.svg
  mmpe plot similarity --ckpt runs/.../last.ckpt --out learned.png
  mmpe plot extrapolation runs/demo --out curves.png"""


def _add_encoding(p: argparse.ArgumentParser) -> None:
    p.add_argument("encoding", nargs="?", help="an encoding, options as in rope_axial:base=10")
    p.add_argument("--ckpt", help="draw the trained encoding of this checkpoint instead")
    p.add_argument("--size", nargs="+", type=int, metavar="N", help="grid: N, H W or T H W; 14 14 or that of --ckpt")
    p.add_argument("--dim", type=int, default=384, help="model width")
    p.add_argument("--heads", type=int, default=6, help="attention heads")
    p.add_argument("--depth", type=int, default=12, help="blocks")
    p.add_argument("--layer", type=int, default=0, help="block that is drawn")


def _encoding(args: argparse.Namespace) -> tuple[PositionEncoding, tuple[int, ...]]:
    """What is drawn, and the grid to draw it on."""
    if (args.encoding is None) == (args.ckpt is None):
        raise UsageError("name an encoding, or a checkpoint with --ckpt")
    if args.ckpt is not None:
        return _trained(args.ckpt, args.size)
    size = tuple(args.size or (14, 14))
    if len(size) > 3:
        raise UsageError(f"--size takes 1, 2 or 3 numbers, got {len(size)}")
    return EncodingSpec.parse(args.encoding).build(args.dim, args.heads, size, args.depth).eval(), size


def _trained(checkpoint: str, size: list[int] | None) -> tuple[PositionEncoding, tuple[int, ...]]:
    """The encoding of a checkpoint, and the grid that it was trained on unless another is asked for."""
    from .checkpoints import load_model

    network = load_model(checkpoint).eval_network
    if not isinstance(getattr(network, "encoding", None), PositionEncoding):
        raise UsageError(f"the model of {checkpoint} has no encoding of mmpe")
    trained = getattr(network, "trained_grid", None) or getattr(network, "grid", None) or (14, 14)
    return network.encoding, tuple(size or trained)


def _frequencies(args: argparse.Namespace) -> Figure:
    from mmpe import plots

    encoding, size = _encoding(args)
    values, axes = rotary_frequencies(encoding, size, args.layer), AXIS_NAMES[len(size)]
    title = f"{plots.name_of(encoding)}, block {args.layer}" if values.dim() == 3 else plots.name_of(encoding)
    if len(axes) != 2:
        return plots.frequencies(values, axes, title=title)
    figure, (left, right) = plots.new_figure(2, width=5.2, height=4.0)
    plots.frequencies(values, axes, title=title, ax=left)
    plots.frequency_plane(values, title="direction of each plane", ax=right)
    return figure


def rotary_frequencies(encoding: PositionEncoding, size: tuple[int, ...], layer: int = 0) -> torch.Tensor:
    """How far each plane of a block turns in one step along each axis of a grid: (A, F), or (H, A, F).

    Raises:
        UsageError: for an encoding without rotary planes.
    """
    parts = [part for part in encoding.modules() if isinstance(part, RotaryEncoding)]
    if not parts:
        rotary = ", ".join(mmpe.list_encodings(kind="rotary", axes=len(size)))
        raise UsageError(f"this encoding has no rotary planes; encodings that have: {rotary}")
    encoding.check_layer(layer)
    size = tuple(max(2, n) for n in size)
    with torch.no_grad():
        theta = parts[0].angles(mmpe.Positions.of_size(size))  # (N, F), (H, N, F) or (L, H, N, F)
    if theta.dim() == 4:
        theta = theta[min(layer, len(theta) - 1)]
    steps = [math.prod(size[a + 1 :]) for a in range(len(size))]  # index of the token one step along each axis
    return theta[..., steps, :] - theta[..., :1, :]


def _attention(args: argparse.Namespace) -> Figure:
    from mmpe import plots

    encoding, size = _encoding(args)
    encoding.check_layer(args.layer)
    return plots.attention_decay(encoding, mmpe.Positions.of_size(size), token=args.token, layer=args.layer)


def _similarity(args: argparse.Namespace) -> Figure:
    from mmpe import plots

    encoding, size = _encoding(args)
    encoding.check_layer(args.layer)
    if not 0 <= args.head < encoding.heads:
        raise UsageError(f"--head must be below {encoding.heads}, got {args.head}")
    return plots.similarity(encoding, mmpe.Positions.of_size(size), layer=args.layer, head=args.head)


def _extrapolation(args: argparse.Namespace) -> Figure:
    from mmpe import plots
    from mmpe.evaluation.tables import RunResult, summarise

    files = [path for run in args.runs for path in result_files(Path(run))]
    results = [RunResult.load(path) for path in files]
    tasks = dict.fromkeys(result.task for result in results)
    return plots.extrapolation_panels(
        [(args.title or task, summarise(r for r in results if r.task == task)) for task in tasks]
    )


def result_files(path: Path) -> list[Path]:
    """The result files below a folder, or the file itself."""
    if path.is_file():
        return [path]
    found = sorted(path.rglob("result.json"))
    if not found:
        raise UsageError(f"no result.json in {path}; name a folder that mmpe compare or mmpe demo wrote")
    return found


_DRAW = {
    "frequencies": _frequencies,
    "attention": _attention,
    "similarity": _similarity,
    "extrapolation": _extrapolation,
}
