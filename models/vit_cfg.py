"""What timm's data pipeline and trainer ask of a model."""

from __future__ import annotations

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD


def default_cfg(input_size: tuple[int, int, int]) -> dict[str, Any]:
    """What timm's data pipeline and trainer ask of a model, for a model without published weights."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": input_size,
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
    }
