"""One self-contained HTML file: tables, curves, and all that is needed to repeat them."""

from __future__ import annotations

import base64
import html
import io
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from .tables import Row, cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #8886; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
.wide { overflow-x: auto; } img { max-width: 100%; background: #fff; }
pre { white-space: pre-wrap; padding: .8rem; border: 1px solid #8886; border-radius: .4rem; }
.failed { color: #D55E00; }
"""


@dataclass(frozen=True)
class Section:
    """A task in a report.

    Attributes:
        title: heading.
        text: a paragraph that says what was measured.
        rows: the summarised results.
        notes: what may be concluded and what not, one sentence or two each.
        failures: runs that failed, one line each.
    """

    title: str
    text: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    failures: Sequence[str] = field(default_factory=tuple)


def write_html(
    path: Path,
    title: str,
    sections: Sequence[Section],
    figures: Sequence[tuple[str, Figure]] = (),
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write the report; nothing in it is loaded from elsewhere.

    Args:
        path: the HTML file.
        title: heading of the page.
        sections: one for each task.
        figures: captions and figures, put in as PNG.
        facts: what else to state: the command, seeds, seconds. Versions, machine and date are added.
    """
    body = [f"<h1>{html.escape(title)}</h1>", *map(_section, sections)]
    for caption, figure in figures:
        body.append(f'<h2>{html.escape(caption)}</h2><img alt="{html.escape(caption)}" src="{data_uri(figure)}">')
    body.append(_facts({**(facts or {}), **environment()}))
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )
    path.write_text(page, encoding="utf-8")


def data_uri(figure: Figure) -> str:
    """The figure as a PNG inside a data: address."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def environment() -> dict[str, str]:
    """Versions, machine, commit and date."""
    found = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "python": platform.python_version()}
    for package in ("mmpe", "torch", "timm", "lightning", "scikit-learn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if "mmpe" not in found:  # run from a checkout that is not installed
        found["mmpe"] = sys.modules["mmpe"].__version__
    commit = git_commit()
    if commit:
        found["commit"] = commit
    found["machine"] = f"{platform.system()} {platform.machine()}"
    return found


def git_commit() -> str | None:
    """Commit of the checkout that mmpe is imported from, with "+changes" if files differ; None outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    return commit + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _section(section: Section) -> str:
    header, table = cells(section.rows)
    parts = [f"<h2>{html.escape(section.title)}</h2><p>{html.escape(section.text)}</p>"]
    if table:
        parts.append(f'<div class="wide"><table><thead>{_row(header, "th")}</thead>')
        parts.append(f"<tbody>{''.join(_row(row, 'td') for row in table)}</tbody></table></div>")
        parts.append("<p>Per cent, mean ± standard deviation over seeds; * marks the best mean of a column.</p>")
    parts += [f'<p class="failed">Failed: {html.escape(line)}</p>' for line in section.failures]
    if section.notes:
        parts.append("<ul>" + "".join(f"<li>{html.escape(note)}</li>" for note in section.notes) + "</ul>")
    return "".join(parts)


def _row(row: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"


def _facts(facts: Mapping[str, str]) -> str:
    lines = "\n".join(f"{key}: {value}" for key, value in facts.items())
    return f"<h2>How to repeat this</h2><pre>{html.escape(lines)}</pre>"
