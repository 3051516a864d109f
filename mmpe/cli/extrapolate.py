"""`mmpe extrapolate CKPT`: a trained checkpoint at several sizes, with raw and with scaled positions."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

from mmpe.evaluation.report import Section, write_html
from mmpe.evaluation.tables import Row, RunResult, cells, markdown, summarise

from ._arguments import Parser, parser
from ._errors import UsageError
from ._text import columns
from .checkpoints import cli_of, find_checkpoint

POSITIONS = ("raw", "scaled")


def main(command: str, argv: list[str]) -> int:
    """Evaluate, print the table, write extrapolation.{md,json,png,html} beside the checkpoint."""
    args, overrides = _parser(command).parse_known_args(argv)
    if not all(0 < scale < math.inf for scale in args.scales):
        raise UsageError(f"--scales must be greater than 0 and finite, got {args.scales}")
    if overrides and not overrides[0].startswith("--"):
        raise UsageError(f"unexpected argument {overrides[0]!r}")
    checkpoint = find_checkpoint(args.checkpoint)
    result = _evaluate(checkpoint, args, overrides)
    rows = summarise([result])
    header, table = cells(rows, best=False)
    print(columns(header[:-2], [row[:-2] for row in table], right=tuple(range(2, len(header) - 2))))
    out = Path(args.out) if args.out else checkpoint.parent
    _write(out, result, rows, shlex.join(["mmpe", command, *argv]))
    print(f"\nwrote {out}/ extrapolation.md, extrapolation.json, extrapolation.png, extrapolation.html")
    return 0


def _parser(command: str) -> Parser:
    p = parser(
        command,
        "Evaluate a trained checkpoint beyond its training size, with the data of the config.yaml beside it.",
        "Every other argument changes the run's config, as in mmpe test: --data.batch_size 64.",
    )
    p.add_argument("checkpoint", help="a checkpoint of mmpe fit, or a folder to take the last one from")
    p.add_argument("--scales", nargs="+", type=float, default=[1.0, 1.25, 1.5, 2.0, 3.0], metavar="X",
                   help="sizes, in training sizes; rounded to whole patches")  # fmt: skip
    p.add_argument("--positions", nargs="+", choices=POSITIONS, default=list(POSITIONS),
                   help="raw counts cells, scaled stretches every grid to the trained range")  # fmt: skip
    p.add_argument("--config", help="config of the run; by default config.yaml beside the checkpoint")
    p.add_argument("--out", help="folder for table and plot; by default that of the checkpoint")
    return p


def _evaluate(checkpoint: Path, args: Any, overrides: list[str]) -> RunResult:
    from .lightning import quiet
    from .runs import encoding_parameters, evaluate

    quiet()
    rules = [rule for rule in POSITIONS if rule in args.positions]
    fixed = [f"--model.eval_positions={json.dumps(rules)}", "--trainer.logger=false", "--trainer.callbacks=[]",
             "--trainer.enable_model_summary=false"]  # fmt: skip
    if not sys.stderr.isatty():
        fixed.append("--trainer.enable_progress_bar=false")
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print meanwhile is no part of the table
        cli = cli_of(checkpoint, args.config, [*fixed, *overrides])
        scores = evaluate(cli, tuple(dict.fromkeys(args.scales)), checkpoint)
    name = str(cli.model.hparams.get("encoding") or "the backbone's own")
    sizes = dict(zip(cli.datamodule.eval_names, cli.datamodule.eval_sizes, strict=True))
    details = {"checkpoint": str(checkpoint), "sizes": sizes}
    return RunResult(checkpoint.stem, name, 0, scores, 0.0, encoding_parameters(cli.model), details)


def _write(out: Path, result: RunResult, rows: list[Row], command: str) -> None:
    from mmpe.plots import extrapolation

    out.mkdir(parents=True, exist_ok=True)
    result.save(out / "extrapolation.json")
    (out / "extrapolation.md").write_text(f"{markdown(rows)}\n\n{command}\n", encoding="utf-8")
    labelled = [Row(f"{row.encoding}, {row.positions}", "any", row.scores) for row in rows]
    figure = extrapolation(labelled, title=result.encoding)
    figure.savefig(out / "extrapolation.png")
    text = f"Accuracy in per cent of {result.details['checkpoint']}. Sizes: {result.details['sizes']}."
    write_html(
        out / "extrapolation.html", f"{result.encoding} beyond its training size",
        [Section("Scores", text, rows, ("One checkpoint: no deviation over seeds.",))],
        [("Score against size", figure)], {"command": command},
    )  # fmt: skip
