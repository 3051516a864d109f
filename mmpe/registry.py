"""Names -> encodings: `register_encoding`, `create_encoding`, `list_encodings`, `describe`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, TypeVar

import torch

from .encoding import PositionEncoding, SumEncoding

_REGISTRY: dict[str, type[PositionEncoding]] = {}
_SHARED = ("self", "dim", "heads", "axes", "depth")
T = TypeVar("T", bound=type[PositionEncoding])


@dataclass(frozen=True)
class Option:
    """One option of an encoding's constructor."""

    name: str
    default: Any
    help: str


@dataclass(frozen=True)
class EncodingInfo:
    """What `describe` tells of an encoding; print it, or take `as_dict()`.

    `parameters` counts those of 12 blocks of width 384 with 6 heads (ViT-S) in the first supported axes of 2, 1, 3.
    """

    name: str
    kind: str
    summary: str
    equation: str
    source: str
    axes: tuple[int, ...]
    per_layer: bool
    content_dependent: bool
    terms: tuple[str, ...]
    promises: tuple[str, ...]
    checked_by: tuple[str, ...]
    parity: str
    cost: str
    parameters: int
    options: tuple[Option, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        terms = ", ".join(self.terms) or "none"
        lines = [f"{self.name}: {self.summary}", f"  kind         {self.kind} (terms: {terms})"]
        lines += [f"  equation     {line}" if not i else f"               {line}" for i, line in enumerate(
            self.equation.splitlines())]
        lines += [
            f"  axes         {', '.join(map(str, self.axes))}",
            f"  parameters   {self.parameters} in 12 blocks of width 384"
            + (" (per layer)" if self.per_layer else ""),
            f"  cost         {self.cost}",
            f"  source       {self.source}",
            f"  parity       {self.parity}",
        ]
        lines += [f"  promises     {p}, checked by {c}" for p, c in zip(self.promises, self.checked_by, strict=True)]
        lines += ["  options" if self.options else "  options      none"]
        lines += [f"    {o.name}={o.default!r}: {o.help}" for o in self.options]
        return "\n".join(lines)


def register_encoding(name: str) -> Callable[[T], T]:
    """Class decorator that enters an encoding under `name`; a second registration of a name is an error."""

    def decorate(cls: T) -> T:
        if name in _REGISTRY:
            raise ValueError(f"encoding {name!r} is registered already, by {_REGISTRY[name].__module__}")
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return decorate


def create_encoding(
    name: str, dim: int, heads: int, axes: int = 2, depth: int = 1, **options: Any
) -> PositionEncoding:
    """Build an encoding by name; "a+b" composes several.

    Args:
        name: a name of `list_encodings()`, or several joined by "+".
        dim: model width C.
        heads: number of attention heads.
        axes: number of position axes, 1 to 3.
        depth: number of blocks.
        options: options of the encoding (`describe(name)` lists them). In a sum an option goes to every part that
            has it, and `part_name={...}` to one part alone.

    Raises:
        ValueError: for an unknown name or option; the nearest allowed ones are named.

    Example:
        >>> create_encoding("rope_axial", dim=384, heads=6, axes=2).kind
        'rotary'
    """
    names = [part.strip() for part in name.split("+")]
    if len(names) == 1:
        return _build(encoding_class(names[0]), names[0], dim, heads, axes, depth, options)
    classes = [encoding_class(part) for part in names]
    shared = {key: value for key, value in options.items() if key not in names}
    taken = {key for cls in classes for key in shared if key in option_names(cls)}
    _refuse_unknown(name, set(shared) - taken, {o for cls in classes for o in option_names(cls)} | set(names))
    parts = []
    for part, cls in zip(names, classes, strict=True):
        own = {k: v for k, v in shared.items() if k in option_names(cls)} | dict(options.get(part, {}))
        parts.append(_build(cls, part, dim, heads, axes, depth, own))
    return SumEncoding(parts)


def create_encoding_for(
    name: str,
    dim: int,
    heads: int,
    axes: int,
    depth: int,
    offers: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
) -> PositionEncoding:
    """Build an encoding on behalf of something that knows more than the user, such as a backbone its grid.

    Args:
        name: an encoding or a sum of them.
        dim: model width C.
        heads: number of attention heads.
        axes: number of position axes.
        depth: number of blocks.
        offers: options that are set where an encoding has them.
        options: options of the encoding; they win over the offers.
    """
    wanted = {option for part in name.split("+") for option in option_names(encoding_class(part.strip()))}
    taken = {key: value for key, value in offers.items() if key in wanted}
    return create_encoding(name, dim, heads, axes, depth, **(taken | dict(options or {})))


def list_encodings(pattern: str = "*", *, axes: int | None = None, kind: str | None = None) -> list[str]:
    """Sorted names that match a wildcard pattern, a number of axes and a kind."""
    classes = _encodings()
    return sorted(
        name
        for name, cls in classes.items()
        if fnmatchcase(name, pattern)
        and (axes is None or axes in cls.supported_axes)
        and (kind is None or cls.kind == kind)
    )


def describe(name: str) -> EncodingInfo:
    """Equation, options and defaults, promises with the tests that check them, source and cost of an encoding."""
    cls = encoding_class(name)
    summary = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
    return EncodingInfo(
        name=name,
        kind=cls.kind,
        summary=summary,
        equation=cls.equation,
        source=cls.source,
        axes=cls.supported_axes,
        per_layer=cls.per_layer,
        content_dependent=cls.content_dependent,
        terms=cls.terms,
        promises=cls.promises,
        checked_by=tuple(f"tests/test_properties.py::test_{p}[{name}]" for p in cls.promises),
        parity=cls.parity,
        cost=cls.cost,
        parameters=count_parameters(name),
        options=_options(cls),
    )


def encoding_class(name: str) -> type[PositionEncoding]:
    """The class behind a name; an unknown name raises with the nearest ones."""
    classes = _encodings()
    if name not in classes:
        near = get_close_matches(name, classes, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see mmpe.list_encodings()"
        raise ValueError(f"unknown encoding {name!r}; {hint} Known: {', '.join(sorted(classes))}")
    return classes[name]


def option_names(cls: type[PositionEncoding]) -> tuple[str, ...]:
    """Names of a class's own constructor options."""
    return tuple(p for p in inspect.signature(cls.__init__).parameters if p not in _SHARED)


def count_parameters(name: str, dim: int = 384, heads: int = 6, depth: int = 12) -> int:
    """Number of parameters of an encoding at a reference size, without allocating them."""
    cls = encoding_class(name)
    axes = next(a for a in (2, 1, 3) if a in cls.supported_axes)
    with torch.device("meta"):
        return sum(p.numel() for p in cls(dim, heads, axes, depth).parameters())


def _build(
    cls: type[PositionEncoding], name: str, dim: int, heads: int, axes: int, depth: int, options: dict[str, Any]
) -> PositionEncoding:
    allowed = set(option_names(cls))
    _refuse_unknown(name, set(options) - allowed, allowed)
    return cls(dim, heads, axes, depth, **options)


def _refuse_unknown(name: str, unknown: set[str], allowed: set[str]) -> None:
    if unknown:
        wrong = sorted(unknown)[0]
        near = get_close_matches(wrong, allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} has no option {wrong!r}{hint} Allowed: {', '.join(sorted(allowed)) or 'none'}")


@cache
def _load_encodings() -> None:
    # Importing every file of the folder is what lets a new encoding be one new file and nothing else.
    package = importlib.import_module("mmpe.encodings")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"mmpe.encodings.{module.name}")


def _encodings() -> dict[str, type[PositionEncoding]]:
    _load_encodings()
    return _REGISTRY


def _options(cls: type[PositionEncoding]) -> tuple[Option, ...]:
    helps = _argument_help(inspect.getdoc(cls) or "")
    parameters = inspect.signature(cls.__init__).parameters
    return tuple(Option(n, parameters[n].default, helps.get(n, "")) for n in option_names(cls))


def _argument_help(doc: str) -> dict[str, str]:
    """Lines of a Google-style `Args:` section as {name: text}."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, flags=re.MULTILINE | re.DOTALL)
    if section is None:
        return {}
    entries = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", section[1], flags=re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in entries}
