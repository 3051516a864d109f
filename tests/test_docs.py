"""What the documentation is made of exists: pages, modules, and an overview of every registered encoding."""

import importlib
import re
import runpy
from pathlib import Path

import pytest
import yaml

import mmpe

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.fixture(scope="module")
def overview() -> str:
    """The page that `make docs` writes."""
    page = runpy.run_path(str(DOCS / "generate.py"))["page"]
    return page(mmpe.describe(name) for name in mmpe.list_encodings())


def test_overview_has_a_row_and_a_section_for_every_encoding(overview):
    for name in mmpe.list_encodings():
        assert f"| [`{name}`](#{name}) |" in overview
        assert f"\n### {name}\n" in overview


def test_overview_explains_every_option(overview):
    for name in mmpe.list_encodings():
        section = overview.split(f"\n### {name}\n")[1].split("\n### ")[0]
        for option in mmpe.describe(name).options:
            row = re.search(rf"^\| `{option.name}` \| .* \| (.*) \|$", section, re.MULTILINE)
            assert row, f"{name} has no row for {option.name}"
            assert row[1].strip(), f"{name} does not explain {option.name}"


def test_navigation_and_pages_name_each_other():
    nav = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())["nav"]
    named = set(re.findall(r"[\w/]+\.md", str(nav)))
    assert named | {"encodings.md"} == {path.relative_to(DOCS).as_posix() for path in PAGES} | {"encodings.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_reference_names_things_that_exist(page):
    for dotted in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
        head, _, tail = dotted.rpartition(".")
        try:
            importlib.import_module(dotted)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(head), tail), dotted


def test_readme_names_every_encoding_and_no_other():
    """Fault: a page that lists methods drifts away from the registry."""
    readme = (DOCS.parent / "README.md").read_text()
    listed = set(re.findall(r"`(\w+)`", readme.split("## The encodings")[1].split("\n## ")[0].split("\n\nNames")[0]))
    assert listed == set(mmpe.list_encodings())
