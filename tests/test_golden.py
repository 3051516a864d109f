"""Our numbers beside those of the official code: every file of the golden folder, through the reader of its prefix.

`MMPE_GOLDEN_DIR` names another folder. There, files without a reader are listed and do not fail: they belong to
encodings that we may not have yet. In our own folder they fail.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_readers import Comparison, find_reader

OWN = Path(__file__).parent / "golden"
FOLDER = Path(os.environ.get("MMPE_GOLDEN_DIR") or OWN).expanduser()
FILES = sorted(FOLDER.glob("*.npz")) if FOLDER.is_dir() else []
READABLE = [path for path in FILES if find_reader(path.stem)]
UNREADABLE = [path.stem for path in FILES if not find_reader(path.stem)]


def load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def check(comparison: Comparison) -> None:
    expected, ours = torch.as_tensor(comparison.expected), comparison.ours.detach()
    assert ours.shape == expected.shape, f"{comparison.name}: {tuple(ours.shape)} is not {tuple(expected.shape)}"
    torch.testing.assert_close(
        ours, expected, atol=comparison.atol, rtol=comparison.rtol, check_dtype=False,
        msg=lambda text: f"{comparison.name}: {text}",
    )  # fmt: skip


def test_folder_has_files():
    assert FOLDER.is_dir(), f"golden folder {FOLDER} does not exist; MMPE_GOLDEN_DIR names another one"
    assert FILES, f"golden folder {FOLDER} has no .npz file: nothing would be checked"
    assert READABLE, f"no file of {FOLDER} has a reader: {UNREADABLE}"


def test_every_file_has_a_reader(capsys: pytest.CaptureFixture[str]):
    with capsys.disabled():
        sys.stdout.write(
            f"\ngolden: checked {len(READABLE)} of {len(FILES)} files in {FOLDER}; no reader for {UNREADABLE}\n"
        )
    if FOLDER.resolve() == OWN.resolve():
        assert not UNREADABLE, f"no reader for {UNREADABLE}: add one in tests/golden_readers"


def test_every_own_file_is_in_the_manifest():
    """Reference numbers are worth what is known about where they come from."""
    manifest = (OWN / "MANIFEST.md").read_text()
    assert [path.stem for path in OWN.glob("*.npz") if f"`{path.stem}`" not in manifest] == []


@pytest.mark.parametrize("path", READABLE, ids=lambda path: path.stem)
def test_golden(path: Path):
    read = find_reader(path.stem)
    assert read is not None
    comparisons = read(path.stem, load(path))
    assert comparisons, f"the reader of {path.stem} compares nothing"
    for comparison in comparisons:
        check(comparison)
