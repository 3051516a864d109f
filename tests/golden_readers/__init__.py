"""Readers of golden files: each builds our encoding from the arrays of a file and says what to compare.

A file is called `PREFIX__CASE.npz`. Sizes, options, parameters, inputs and outputs are arrays in it, so one reader
serves every file of its prefix, also with other numbers than ours.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from torch import Tensor

Arrays = dict[str, np.ndarray]


@dataclass
class Comparison:
    """One of our tensors beside what the file says it must be."""

    name: str
    ours: Tensor
    expected: np.ndarray | Tensor
    atol: float
    rtol: float = 0.0


Reader = Callable[[str, Arrays], list[Comparison]]
_READERS: dict[str, Reader] = {}


def reader(*prefixes: str) -> Callable[[Reader], Reader]:
    """Register `read(stem, arrays)` for files called `PREFIX__*`.

    A prefix may reach into the case ("peg__cls"); the longest one that fits a file reads it.
    """

    def decorate(read: Reader) -> Reader:
        for prefix in prefixes:
            key = prefix if "__" in prefix else f"{prefix}__"
            if key in _READERS:
                raise ValueError(f"golden prefix {prefix!r} has a reader already, in {_READERS[key].__module__}")
            _READERS[key] = read
        return read

    return decorate


def find_reader(stem: str) -> Reader | None:
    """The reader with the longest prefix of a file's stem; None if there is none."""
    _load_readers()
    fitting = [key for key in _READERS if stem.startswith(key)]
    return _READERS[max(fitting, key=len)] if fitting else None


@cache
def _load_readers() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
