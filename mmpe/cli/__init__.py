"""The command line: `mmpe COMMAND ...`.

Each command lives in one module of this package and is imported when it is called, so that `mmpe list` does not wait
for the training libraries.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches

import mmpe

from ._errors import describe_error, mistake_in

# name -> (module of this package, one line of help), in the order in which `mmpe --help` lists them
COMMANDS: dict[str, tuple[str, str]] = {
    "list": ("catalogue", "every encoding: kind, axes, parameters, cost, source"),
    "describe": ("catalogue", "one encoding: equation, options, promises and the tests that check them, source"),
    "configs": ("configs", "the shipped experiments; --copy takes one to edit"),
    "fit": ("lightning", "train a model from a config"),
    "validate": ("lightning", "evaluate on the validation data"),
    "test": ("lightning", "evaluate on the test data"),
    "predict": ("lightning", "write the predictions of a trained model"),
    "compare": ("compare", "train several encodings, evaluate each beyond its training size, write table and report"),
    "extrapolate": ("extrapolate", "evaluate a trained checkpoint beyond its training size"),
    "evaluate": ("evaluate", "small experiments: what an encoding lets a transformer know (three-cell)"),
    "bench": ("bench", "time and memory of encodings, relative to none and to peers"),
    "plot": ("plot", "frequencies, attention, similarity and extrapolation curves as PNG or SVG"),
    "shards": ("shards", "write webdataset shards from a folder of images"),
    "demo": ("demo", "the whole story on real digits in minutes: two tables, curves, a report"),
}
USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the entry point of the `mmpe` script.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        The exit code: 0, 1 (a run failed) or 2 (a mistake in the arguments, told in one line).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if arguments[0] in ("--version", "-V"):
        print(f"mmpe {mmpe.__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        print(f"mmpe: unknown command {name!r}; {_suggestion(name)}", file=sys.stderr)
        return USAGE_ERROR
    return _guarded(name, rest)


def overview() -> str:
    """The text of `mmpe --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            f"mmpe {mmpe.__version__}: position encodings for vision, video and multimodal transformers",
            "",
            "usage: mmpe COMMAND [options]      (mmpe COMMAND --help tells more)",
            "",
            *lines,
            "",
            "MMPE_TRACEBACK=1 shows where a reported mistake was found.",
        ]
    )


def _guarded(name: str, rest: list[str]) -> int:
    """Run a command: mistakes of the user become one line, everything else keeps its traceback."""
    module = importlib.import_module(f"mmpe.cli.{COMMANDS[name][0]}")
    try:
        return int(module.main(name, rest))
    except BrokenPipeError:  # the reader went away, as in `mmpe list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"mmpe {name}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        mistake = mistake_in(error)
        if mistake is None or os.environ.get("MMPE_TRACEBACK"):
            raise
        print(f"mmpe {name}: {describe_error(mistake)}", file=sys.stderr)
        return USAGE_ERROR


def _suggestion(name: str) -> str:
    near = get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}? (mmpe --help lists all)" if near else f"known: {', '.join(COMMANDS)}"
