"""What an encoding does beyond its training size, and how results become tables and reports."""

from .tables import Row, RunResult, Score, markdown, summarise

__all__ = ["Row", "RunResult", "Score", "markdown", "summarise"]
