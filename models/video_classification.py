"""Clip classification: the task of images with an axis of time, and several views of a video in evaluation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .image_classification import ImageClassification


class VideoClassification(ImageClassification):
    """Train and evaluate a classifier of video clips.

    A batch is {"image": (B, C, T, H, W), "label": (B,), optional "valid": (B,) bool}. In evaluation it may hold V views
    of each video, {"image": (B, V, C, T, H, W)}: their logits are averaged. Everything else, the arguments too, is as
    in `ImageClassification`, with a backbone of clips: an mmpe_vit_* model with `num_frames` among its
    `backbone_options`, or another timm model that takes (B, C, T, H, W). Mixing and resizing treat all frames of a clip
    alike. Weights of an image model fit as `init_from`: their patch kernel is shared out over the frames of a tubelet.
    """

    def _build(self, pretrained: bool = False) -> nn.Module:
        network, name = super()._build(pretrained), self.hparams.backbone
        if name.startswith("mmpe_vit_") and network.num_frames is None:
            raise ValueError(f"{name} takes images unless backbone_options have num_frames, the frames of a clip")
        return network

    def _augmented(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        # With time among the channels, whatever is done to an image is done alike to all frames.
        folded, targets = super()._augmented(images.flatten(1, 2), labels)  # (B, C T, H, W)
        return folded.unflatten(1, images.shape[1:3]), targets

    def logits(self, images: Tensor) -> Tensor:
        """Clips (B, C, T, H, W), or views (B, V, C, T, H, W), -> logits (B, classes)."""
        if images.dim() < 6:
            return self.eval_network(images)
        # One view of all videos at a time, so that memory does not grow with the number of views.
        return torch.stack([self.eval_network(view) for view in images.unbind(1)]).mean(0)
