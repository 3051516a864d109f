"""Augmentation and preprocessing of clips: the same for all frames of a clip."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms.v2 import functional

ClipTransform = Callable[[np.ndarray], Tensor]


@dataclass(frozen=True)
class VideoTransforms:
    """Augmentation and preprocessing of clips; every frame of a clip is cropped, turned and erased alike.

    Args:
        scale: smallest and largest share of the area that a random crop takes.
        ratio: smallest and largest aspect of a random crop.
        hflip: probability of a horizontal flip; 0 where left and right are part of the class.
        auto_augment: RandAugment policy of timm, such as "rand-m7-n4-mstd0.5-inc1"; None for none.
        reprob: probability that a rectangle is erased from all frames.
        remode: filling of erased pixels: "const", "rand" or "pixel".
        interpolation: filter of resizing.
        crop_pct: share of the resized frame's shorter side that the crops of validation keep.
        mean: of the three channels, subtracted.
        std: of the three channels, divided by.
    """

    scale: tuple[float, float] = (0.5, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    hflip: float = 0.5
    auto_augment: str | None = None
    reprob: float = 0.0
    remode: Literal["const", "rand", "pixel"] = "pixel"
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    crop_pct: float = 1.0
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        for name in ("hflip", "reprob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"transforms.{name}={getattr(self, name)} is a probability: 0 to 1")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"transforms.scale={self.scale} must be shares of the area: 0 < smallest <= largest <= 1")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"transforms.crop_pct={self.crop_pct} must be above 0 and at most 1")
        if self.auto_augment is not None and not self.auto_augment.startswith("rand"):
            raise ValueError(
                f"transforms.auto_augment={self.auto_augment!r} must be a RandAugment policy such as 'rand-m7-n4-inc1'"
            )
        if self.interpolation not in ("bilinear", "bicubic"):
            raise ValueError(f"transforms.interpolation={self.interpolation!r} must be 'bilinear' or 'bicubic'")

    def train(self, size: int) -> ClipTransform:
        """From frames (T, H, W, 3) uint8 to one clip (3, T, size, size), drawing from the global generators."""
        return _TrainTransform(self, size)

    def evaluate(self, size: int, crops: int = 1) -> ClipTransform:
        """From clips (K, T, H, W, 3) uint8 to K * crops clips (V, 3, T, size, size).

        Args:
            size: side of the crops.
            crops: 1 for the middle, 3 for both ends of the longer side too.
        """
        return _EvalTransform(self, size, crops)

    @property
    def filter(self) -> InterpolationMode:
        """The filter of resizing."""
        return InterpolationMode(self.interpolation)

    def normalised(self, frames: Tensor) -> Tensor:
        """Frames (..., 3, H, W) uint8 -> float32 with the mean and deviation taken out."""
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (self.mean, self.std))
        return (frames.float() / 255 - mean) / std


class _TrainTransform:
    def __init__(self, settings: VideoTransforms, size: int) -> None:
        self.settings, self.size = settings, size
        mean = tuple(round(255 * m) for m in settings.mean)
        hints = {"translate_const": int(0.45 * size), "img_mean": mean}
        policy = settings.auto_augment
        self.augment = rand_augment_transform(policy, hints) if policy is not None else None
        self.erase = RandomErasing(settings.reprob, mode=settings.remode, device="cpu")

    def __call__(self, frames: np.ndarray) -> Tensor:
        s = self.settings
        clip = torch.from_numpy(frames).permute(0, 3, 1, 2)  # (T, 3, H, W)
        top, left, height, width = RandomResizedCrop.get_params(clip, list(s.scale), list(s.ratio))
        side = [self.size, self.size]
        clip = functional.resized_crop(clip, top, left, height, width, side, s.filter, antialias=True)
        if self.augment is not None:
            clip = self._augmented(clip)
        if torch.rand(()) < s.hflip:
            clip = clip.flip(-1)
        clip = s.normalised(clip).transpose(0, 1)  # (3, T, S, S)
        if s.reprob > 0:
            # As one image of 3 T channels, so that the rectangle is the same in all frames.
            clip = self.erase(clip.flatten(0, 1)).unflatten(0, clip.shape[:2])
        return clip.contiguous()

    def _augmented(self, clip: Tensor) -> Tensor:
        """The frames (T, 3, S, S) under one draw of the policy."""
        states, images = (random.getstate(), np.random.get_state()), []
        for frame in clip.permute(0, 2, 3, 1).numpy():
            random.setstate(states[0])
            np.random.set_state(states[1])
            images.append(np.asarray(self.augment(Image.fromarray(frame))))  # type: ignore[misc]
        return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


class _EvalTransform:
    def __init__(self, settings: VideoTransforms, size: int, crops: int) -> None:
        self.settings, self.size, self.crops = settings, size, crops

    def __call__(self, clips: np.ndarray) -> Tensor:
        s, size = self.settings, self.size
        frames = torch.from_numpy(clips).flatten(0, 1).permute(0, 3, 1, 2)  # (K T, 3, H, W)
        frames = functional.resize(frames, round(size / s.crop_pct), s.filter, antialias=True)
        height, width = (side - size for side in frames.shape[-2:])
        tall, shares = height > width, (0.5,) if self.crops == 1 else (0.0, 0.5, 1.0)
        views = []
        for share in shares:
            top, left = (share if tall else 0.5) * height, (0.5 if tall else share) * width
            crop = s.normalised(functional.crop(frames, round(top), round(left), size, size))
            views.append(crop.unflatten(0, clips.shape[:2]).transpose(1, 2))  # (K, 3, T, S, S)
        return torch.stack(views, dim=1).flatten(0, 1)  # (K crops, 3, T, S, S)
