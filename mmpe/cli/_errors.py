"""Which exceptions are the user's mistakes, told in one line, and which keep their traceback."""

from __future__ import annotations

import errno
import traceback


class UsageError(ValueError):
    """A mistake in what was typed or in a file that was named; the message says what is allowed."""


# What the library raises for mistakes (docs/architecture.md, "Errors").
_MISTAKES = (ValueError, TypeError, FileNotFoundError, FileExistsError, NotADirectoryError, ImportError)


# The system's refusals of a path: no write permission, a read-only or full disk, a file where a folder must be.
_REFUSALS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
    errno.ENAMETOOLONG,
}  # fmt: skip


def is_user_error(error: BaseException) -> bool:
    """True for mistakes that mmpe found itself, raised by a line of mmpe, and for paths that the system refuses."""
    if isinstance(error, UsageError):
        return True
    if isinstance(error, OSError) and error.errno in _REFUSALS and error.filename is not None:
        return True
    if not isinstance(error, _MISTAKES):
        return False
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return False
    frame, line = frames[-1]
    module = frame.f_globals.get("__name__", "")
    return module.split(".")[0] == "mmpe" and _is_raise(frame.f_code.co_filename, line)


def mistake_in(error: BaseException) -> BaseException | None:
    """The user's mistake behind an error: itself, or what it was raised from, as configuration parsers do."""
    found: BaseException | None = error
    while found is not None and not is_user_error(found):
        found = found.__cause__
    return found


def describe_error(error: BaseException) -> str:
    """The message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _is_raise(filename: str, line: int) -> bool:
    """True if a `raise` statement spans the line; other errors of that line (`int("x")`) are bugs, not messages."""
    import ast
    from pathlib import Path

    try:
        tree = ast.parse(Path(filename).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return False
    raises = (node for node in ast.walk(tree) if isinstance(node, ast.Raise))
    return any(node.lineno <= line <= (node.end_lineno or node.lineno) for node in raises)
