"""Parsers that report a mistake in one line, and the argument types that several commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from ._errors import UsageError

if TYPE_CHECKING:
    from mmpe.encoding import PositionEncoding


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line without the usage block."""

    def error(self, message: str) -> NoReturn:
        """Print the line and leave with exit code 2."""
        print(f"{self.prog}: {message} ({self.prog} --help tells more)", file=sys.stderr)
        raise SystemExit(2)


def parser(command: str, description: str, epilog: str | None = None) -> Parser:
    """The parser of `mmpe COMMAND`; abbreviations of options are off, since a typo would pass for one."""
    return Parser(
        prog=f"mmpe {command}",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


@dataclass(frozen=True)
class EncodingSpec:
    """An encoding as typed: "rope_axial" or, with options, "rope_axial:base=10,half=true".

    Attributes:
        name: a registered name, or several joined by "+".
        options: its options by name.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> EncodingSpec:
        """Read NAME or NAME:OPTION=VALUE,...; values are YAML, so numbers, true, null and [1, 2] work."""
        name, _, rest = text.partition(":")
        options = {}
        for item in _split_options(rest):
            key, equals, value = item.partition("=")
            if not equals or not key.strip():
                raise UsageError(f"encoding {text!r}: {item!r} is no option; write NAME:OPTION=VALUE,OPTION=VALUE")
            options[key.strip()] = _value(value)
        return cls(name.strip(), options)

    @property
    def label(self) -> str:
        """The spec as one would type it."""
        shown = ",".join(f"{key}={_typed(value)}" for key, value in self.options.items())
        return f"{self.name}:{shown}" if shown else self.name

    def build(self, dim: int, heads: int, size: Sequence[int], depth: int) -> PositionEncoding:
        """The encoding for a grid of this size; a learned table gets its size unless options say otherwise."""
        import mmpe

        names = {option.name for part in self.name.split("+") for option in mmpe.describe(part.strip()).options}
        options = dict(self.options)
        if "grid_size" in names:
            options.setdefault("grid_size", tuple(size))
        return mmpe.create_encoding(self.name, dim, heads, len(size), depth, **options)

    def check(self, axes: int = 2) -> None:
        """Build it once without memory, so that a misspelt name or option is told before anything runs."""
        import torch

        import mmpe

        with torch.device("meta"):
            mmpe.create_encoding(self.name, dim=96, heads=2, axes=axes, depth=1, **self.options)


def known_encodings(pattern: list[str], axes: int | None = None) -> list[str]:
    """`all`, wildcards and plain names (with options) -> specs as text, in the order typed, each once."""
    import mmpe

    found: dict[str, None] = {}
    for item in pattern:
        if item == "all" or "*" in item:
            names = mmpe.list_encodings("*" if item == "all" else item, axes=axes)
            if not names:
                raise UsageError(f"no encoding matches {item!r}; known: {', '.join(mmpe.list_encodings(axes=axes))}")
            found.update(dict.fromkeys(names))
        else:
            found[item] = None
    return list(found)


def _split_options(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    items, depth, current = [], 0, ""
    for char in text:
        depth += (char in "[{(") - (char in "]})")
        if char == "," and depth == 0:
            items.append(current)
            current = ""
        else:
            current += char
    return [item for item in [*items, current] if item.strip()]


def _value(text: str) -> Any:
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"cannot read the value {text!r}: {error}") from error
    if isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 reads 1e4 as text
        except ValueError:
            return value
    return value


def _typed(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value).replace(" ", "")
