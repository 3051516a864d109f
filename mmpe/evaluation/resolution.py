"""Curves beyond the training size: from the metrics of an evaluation to scores by size and rule of positions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ACCURACIES = ("top1", "acc")
RULES = ("raw", "scaled")
# What the tasks log: STAGE/METRIC@1.5x, and _RULE for other rules of positions than raw.
_NAME = re.compile(r"[a-z]+/(?P<metric>\w+)@(?P<scale>[\d.]+)x(?:_(?P<rule>[a-z]+))?")


def curves(metrics: Iterable[Mapping[str, float]], names: Sequence[str] = ACCURACIES) -> dict[str, dict[float, float]]:
    """Rule of positions -> size in training sizes -> score, sorted by size.

    Args:
        metrics: what `Trainer.validate` or `Trainer.test` returned: one mapping for each evaluation set.
        names: names of the metric; the first that occurs is taken.

    Raises:
        ValueError: if no metric is named so.
    """
    # Where there are several loaders Lightning appends its number to what was logged inside of a step.
    values = {key.split("/dataloader_idx_")[0]: float(value) for part in metrics for key, value in part.items()}
    parsed = [(match, value) for key, value in values.items() if (match := _NAME.fullmatch(key))]
    chosen = next((name for name in names if any(match["metric"] == name for match, _ in parsed)), None)
    if chosen is None:
        raise ValueError(f"none of {', '.join(names)} is among the metrics {', '.join(values) or '(none)'}")
    found: dict[str, dict[float, float]] = {}
    for match, value in parsed:
        if match["metric"] == chosen:
            found.setdefault(match["rule"] or "raw", {})[float(match["scale"])] = value
    return {rule: dict(sorted(found[rule].items())) for rule in sorted(found, key=RULES.index)}


def use_scales(datamodule: Any, scales: Sequence[float], step: int = 1) -> dict[float, int]:
    """Let a datamodule evaluate at multiples of its training size; returns the sizes by multiple.

    Args:
        datamodule: has `image_size` or `grid_size`, `eval_sizes` and `eval_names`.
        scales: multiples of the training size.
        step: sizes are rounded to multiples of this, such as the side of a patch.

    Raises:
        ValueError: for a datamodule without sizes, or scales below one step or that mean the same size.
    """
    trained = getattr(datamodule, "image_size", None) or getattr(datamodule, "grid_size", None)
    if trained is None or not hasattr(datamodule, "eval_sizes"):
        raise ValueError(f"{type(datamodule).__name__} needs image_size or grid_size, and eval_sizes, for other sizes")
    sizes = {scale: step * round(trained * scale / step) for scale in scales}
    if min(sizes.values()) < step:
        raise ValueError(f"scales {list(scales)} of {trained} must give at least {step}")
    if len(set(sizes.values())) < len(sizes):
        raise ValueError(f"scales {list(scales)} of {trained} mean the sizes {list(sizes.values())}, which must differ")
    datamodule.eval_sizes = list(sizes.values())
    datamodule.eval_names = [f"{scale:g}x" for scale in sizes]
    return sizes
