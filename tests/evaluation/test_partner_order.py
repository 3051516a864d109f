"""The order of the encodings on the direction-to-the-partner task, where it is sharp (trains for minutes)."""

import json
from pathlib import Path

import pytest

from mmpe.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

SCALES = (1.0, 1.5, 2.0, 3.0)
BOUNDS: dict[str, dict[float, tuple[float, float]]] = {
    # Content says nothing, and a bias that knows distances only cannot exceed 0.25: at no size.
    "none": dict.fromkeys(SCALES, (0.0, 0.22)),
    "alibi_2d": dict.fromkeys(SCALES, (0.0, 0.22)),
    "pape_ri": dict.fromkeys(SCALES, (0.0, 0.3)),
    # Absolute places are learned at the trained size and mean nothing beyond it.
    "ape_learned": {1.0: (0.95, 1.0), 3.0: (0.0, 0.40)},
    "ape_sincos": {1.0: (0.95, 1.0), 3.0: (0.0, 0.40)},
    # Relative ones carry over; PaPE to any size, rotary ones to about twice the trained range.
    "rope_axial": {1.0: (0.98, 1.0), 2.0: (0.90, 1.0), 3.0: (0.35, 0.95)},
    "pape": dict.fromkeys(SCALES, (0.98, 1.0)),
    # One 3x3 convolution sees radius 1 of 2.
    "cpe": {1.0: (0.45, 0.90)},
}


@pytest.mark.parametrize("encoding", BOUNDS)
def test_encoding_fails_and_holds_where_its_symmetry_says(encoding: str, tmp_path: Path) -> None:
    arguments = ["compare", "--config", "vit/partner.yaml", "--encodings", encoding, "--seeds", "1", "--jobs", "1"]
    arguments += ["--positions", "raw", "--scales", *map(str, SCALES), "--out", str(tmp_path)]
    assert main(arguments) == 0
    (result,) = tmp_path.rglob("result.json")
    raw = json.loads(result.read_text(encoding="utf-8"))["scores"]["raw"]
    found = {float(scale): score for scale, score in raw.items()}
    for scale, (low, high) in BOUNDS[encoding].items():
        assert low <= found[scale] <= high, f"{encoding} at {scale}x: {found[scale]:.3f}, expected {low} to {high}"
