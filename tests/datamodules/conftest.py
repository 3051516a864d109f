"""Fixtures: folders of small images."""

from pathlib import Path

import pytest
from conftest_images import write_images


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with train (3 classes x 10) and val (3 classes x 5). Do not write into it."""
    root = tmp_path_factory.mktemp("pictures")
    write_images(root / "train", 10)
    write_images(root / "val", 5)
    return root


@pytest.fixture
def own_pictures(tmp_path: Path) -> Path:
    """A smaller one (4 and 2 of each class), for one test to damage."""
    write_images(tmp_path / "train", 4)
    write_images(tmp_path / "val", 2)
    return tmp_path
