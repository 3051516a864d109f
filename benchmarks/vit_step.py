"""A ViT training step (forward, backward, AdamW) with and without position encoding, beside timm's.

    python benchmarks/vit_step.py                                # ViT-S/16 at 224 pixels, some minutes on one core
    python benchmarks/vit_step.py --quick                        # four blocks, one image
    python benchmarks/vit_step.py --encodings rope_axial pape --json out.json

All candidates run interleaved, in CPU seconds of one thread. "ratio" is relative to our ViT without encoding, median
over the rounds with its quartiles; "own" relative to the ViT without encoding of the same library.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from _timing import Timing, interleaved, keep_pages, versions
from torch import nn

import mmpe

OURS, THEIRS = "mmpe: none", "timm: none"


def training_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """A function that runs one optimisation step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, foreach=True)
    model.train()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def build(encodings: list[str], depth: int) -> dict[str, nn.Module]:
    """ViT-S of the same shape: ours with each encoding, timm's with and without its own rope_mixed."""
    ours, theirs = "mmpe_vit_small_patch16_224", "vit_small_patch16_rope_mixed_224"
    models = {
        f"mmpe: {name}": timm.create_model(ours, encoding=name, init_values=1e-5, depth=depth)
        for name in dict.fromkeys(["none", *encodings])
    }
    models[THEIRS] = timm.create_model(theirs, use_rot_pos_emb=False, depth=depth)
    models["timm: rope_mixed"] = timm.create_model(theirs, depth=depth)
    return models


def measure(encodings: list[str], depth: int, batch: int, rounds: int) -> dict[str, Timing]:
    """Timings of all models in one interleaved run."""
    torch.manual_seed(0)
    keep_pages()
    images, labels = torch.randn(batch, 3, 224, 224), torch.arange(batch)
    steps = {name: training_step(model, images, labels) for name, model in build(encodings, depth).items()}
    return interleaved(steps, baseline=OURS, rounds=rounds, warmup=2)


def own_ratio(timings: dict[str, Timing], name: str) -> float:
    """Time relative to the model without encoding of the same library."""
    return timings[name].ratio / timings[OURS if name.startswith("mmpe") else THEIRS].ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="four blocks, one image, five rounds")
    parser.add_argument("--encodings", nargs="+", default=["rope_mixed"], choices=mmpe.list_encodings(axes=2))
    parser.add_argument("--rounds", type=int, default=None, help="timed rounds (default 11, quick 5)")
    parser.add_argument("--batch", type=int, default=None, help="images in a step (default 4, quick 1)")
    parser.add_argument("--json", type=Path, default=None, help="write all records to this file")
    options = parser.parse_args()
    depth, batch = (4, options.batch or 1) if options.quick else (12, options.batch or 4)
    warnings.filterwarnings("ignore", message=".*Can't initialize NVML.*")
    timings = measure(options.encodings, depth, batch, options.rounds or (5 if options.quick else 11))
    print(f"ViT-S/16, depth {depth}, batch {batch}, fp32, {versions('timm')}")
    print(f"{'model':24} {'ms':>9} {'ratio':>7} {'quartiles':>13} {'own':>7}")
    for name, t in timings.items():
        own = own_ratio(timings, name)
        print(f"{name:24} {t.milliseconds:9.1f} {t.ratio:7.3f} {t.low:6.3f}-{t.high:.3f} {own:7.3f}")
    if options.json is not None:
        records = [{**t.as_dict(), "own": own_ratio(timings, name)} for name, t in timings.items()]
        options.json.write_text(
            json.dumps({"versions": versions("timm"), "depth": depth, "timings": records}, indent=1)
        )


if __name__ == "__main__":
    main()
