"""Write docs/encodings.md, the overview of every encoding, from the registry: `python docs/generate.py [FILE]`.

The page is made anew at every build of the documentation and is not committed, so it cannot fall behind the code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import mmpe

KINDS = {
    "none": "No position",
    "token": "Token terms: added to the tokens",
    "rotary": "Rotary terms: turn queries and keys",
    "bias": "Bias terms: added to the scores",
    "parabolic": "Parabolic terms: a quadratic of the displacement",
}
HEADER = """# Encodings

Every name of `mmpe.create_encoding`, as the installed version knows it; `mmpe describe NAME` prints the same.
Parameters are counted for a ViT-S: 12 blocks of width 384 with 6 heads.
Names compose: `"ape_learned+rope_mixed"` uses both.
"""


def main() -> None:
    """Write the page, to docs/encodings.md unless told otherwise."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("encodings.md")
    target.write_text(page(mmpe.describe(name) for name in mmpe.list_encodings()), encoding="utf-8")


def page(encodings: Iterable[mmpe.EncodingInfo]) -> str:
    """The whole page: one table, then one section for every kind and every encoding in it."""
    infos = list(encodings)
    kinds = [*KINDS, *sorted({info.kind for info in infos} - set(KINDS))]
    parts = [HEADER, *overview(infos)]
    for kind in kinds:
        members = [info for info in infos if info.kind == kind]
        if members:
            parts += ["", f"## {KINDS.get(kind, kind)}", ""]
            parts += [line for info in members for line in section(info)]
    return "\n".join(parts).rstrip() + "\n"


def overview(infos: list[mmpe.EncodingInfo]) -> Iterator[str]:
    """The table of all encodings, one line each."""
    yield "| name | kind | axes | parameters | cost | parity | source |"
    yield "| --- | --- | --- | ---: | --- | --- | --- |"
    for info in infos:
        axes = ", ".join(map(str, info.axes))
        cells = [f"[`{info.name}`](#{info.name})", info.kind, axes, f"{info.parameters:,}", info.cost, info.parity]
        yield row([*cells, info.source])


def section(info: mmpe.EncodingInfo) -> Iterator[str]:
    """What `mmpe describe` tells of one encoding."""
    yield from (f"### {info.name}", "", info.summary, "")
    if info.equation:
        yield from ("```text", *info.equation.splitlines(), "```", "")
    yield from (f"- Source: {info.source or 'none'}", f"- Parity: {info.parity}", f"- Cost: {info.cost}")
    facts = [text for text, holds in _facts(info) if holds]
    if facts:
        yield f"- {'; '.join(facts)}"
    for promise, test in zip(info.promises, info.checked_by, strict=True):
        yield f"- Promises {promise.replace('_', ' ')} (`{test}`)"
    yield ""
    if info.options:
        yield from ("| option | default | meaning |", "| --- | --- | --- |")
        yield from (row([f"`{o.name}`", f"`{o.default!r}`", o.help]) for o in info.options)
        yield ""


def row(cells: Iterable[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _facts(info: mmpe.EncodingInfo) -> Iterator[tuple[str, bool]]:
    yield "has its own parameters in every block", info.per_layer
    yield "depends on content: call it inside every block", info.content_dependent


if __name__ == "__main__":
    main()
