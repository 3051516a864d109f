"""The report is one file that needs nothing else and shows foreign text as text."""

import re

import torch

import mmpe
from mmpe import plots
from mmpe.evaluation.report import Section, environment, write_html
from mmpe.evaluation.tables import RunResult, summarise


def test_report_holds_table_picture_notes_failures_and_versions(tmp_path):
    rows = summarise([RunResult("t", "rope_axial", s, {"raw": {1.0: 0.5, 2.0: 0.25 + s / 4}}) for s in (0, 1)])
    section = Section("digits", "What was measured.", rows, ["Conclude nothing."], ["pape, seed 1: broke"])
    path = tmp_path / "report.html"
    write_html(path, "Title", [section], [("Curves", plots.extrapolation(rows))], {"command": "mmpe compare --x"})
    page = path.read_text()
    for part in ("Title", "digits", "What was measured.", "rope_axial", "37.5 ± 17.7", "Conclude nothing.",
                 "pape, seed 1: broke", "command: mmpe compare --x", f"torch: {torch.__version__.split('+')[0]}",
                 "src=\"data:image/png;base64,iVBOR"):  # fmt: skip
        assert part in page, part
    assert re.search(r"""(?:src|href)=["'](?!data:)""", page) is None


def test_text_is_escaped(tmp_path):
    path = tmp_path / "report.html"
    write_html(path, "<b>", [Section("<i>", "a & b", [])], facts={"command": "<script>"})
    page = path.read_text()
    assert "<script>" not in page
    assert "&lt;b&gt;" in page
    assert "a &amp; b" in page


def test_environment_names_what_a_reader_needs_to_repeat_it():
    facts = environment()
    assert {"date", "python", "mmpe", "torch", "machine"} <= set(facts)
    assert facts["mmpe"].startswith(mmpe.__version__.split(".dev")[0])
