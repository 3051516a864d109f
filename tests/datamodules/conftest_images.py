"""Small class folders of noise pictures in PNG and JPEG."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ant", "bee", "cat")


def write_images(folder: Path, each: int, classes: tuple[str, ...] = CLASSES, size: int = 20) -> None:
    """Pictures that differ in every file; suffixes take turns."""
    draw = np.random.default_rng(len(folder.name))
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for n in range(each):
            pixels = draw.integers(0, 256, (size, size + n % 3, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{n:03d}{('.png', '.jpg', '.JPEG')[n % 3]}")
