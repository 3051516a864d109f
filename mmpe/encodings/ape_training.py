"""Learned tables that are perturbed in training: random crops of an enlarged table, dropout of the whole embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..positions import Positions
from ..registry import register_encoding
from .absolute import Interpolation, LearnedAPE, resample_table, sample_table
from .position_augmentation import AugmentedEncoding


@register_encoding("ape_cropped")
class CroppedAPE(LearnedAPE):
    """Cropped positional embedding (RO-ViT): in training, patches get a random crop of the enlarged table.

    The table is enlarged to the grid of a later task, a random region of it is cut out and resized (bilinear) to the
    grid of the image: a pre-training image stands for a region of a larger one. In evaluation the whole table is used,
    as by `ape_learned`, whose checkpoints fit. Corners are drawn as x1 ~ U(0, 1), x2 ~ U(x1, 1) on each axis, and sides
    shorter than `min_scale` grow to it; these numbers are remembered from the paper and not verified.

    Args:
        grid_size: grid of the table, one size for each axis or one for all.
        prefix: number of rows for prefix tokens, which are never cropped.
        enlarged: grid that the table is enlarged to before the crop, one size for each axis or one for all.
        min_scale: least side of a crop, in sides of the table.
        interpolation: kernel that enlarges the table.
        antialias: widen the kernel when shrinking; see `ape_learned`.
        std: standard deviation of the truncated normal initialisation.
        dropout: probability of dropping a channel after the addition, in training.
    """

    equation = "x_i <- x_i + W[crop(p_i)] in training,   x_i <- x_i + W[p_i] after"
    source = "Kim et al., RO-ViT: Region-Aware Pretraining for Open-Vocabulary Detection, arXiv 2305.07011"
    parity = "formula"
    cost = "one addition before block 0; in training one resize of the table and one sampling of it for each sample"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        grid_size: int | Sequence[int] = 14,
        prefix: int = 0,
        enlarged: int | Sequence[int] = 64,
        min_scale: float = 0.1,
        interpolation: Interpolation = "bicubic",
        antialias: bool = True,
        std: float = 0.02,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dim, heads, axes, depth, grid_size, prefix, interpolation, antialias, std, dropout)
        self.enlarged = (enlarged,) * axes if isinstance(enlarged, int) else tuple(enlarged)
        if len(self.enlarged) != axes or min(self.enlarged) < 1:
            raise ValueError(f"enlarged={enlarged} must be one positive size or one for each of the {axes} axes")
        if not 0 < min_scale <= 1:
            raise ValueError(f"min_scale={min_scale} must be in (0, 1]")
        self.min_scale = min_scale

    def embed(self, x: Tensor, positions: Positions, layer: int = 0) -> Tensor:
        if layer != 0 or not self.training:
            return super().embed(x, positions, layer)
        self.check_input(x, positions)
        x = x + self.cropped_rows(positions, x.shape[0]).to(x.dtype)
        return F.dropout(x, self.dropout) if self.dropout else x

    def cropped_rows(self, positions: Positions, batch: int) -> Tensor:
        """Rows of a batch, with one crop for each sample: (B, prefix + N, C)."""
        extent = positions.extent or tuple(map(float, self.grid_size))
        where = draw_crops(batch, self.axes, self.min_scale, positions.device)  # (B, 2, A)
        start, side = where[:, :1], where[:, 1:]
        sizes = [torch.full_like(start[..., 0], float(n)) for n in extent]
        share = (positions.coords + 0.5) / torch.stack(sizes, dim=-1)  # (B, N, A) in (0, 1)
        large = torch.stack([torch.full_like(start[..., 0], float(n)) for n in self.enlarged], dim=-1)
        points = (start + share * side) * large - 0.5
        table = resample_table(
            self.table[:, self.prefix :], self.enlarged, self.grid_size, 0, self.interpolation, self.antialias
        )
        patches = sample_table(table, self.enlarged, points, self.enlarged, "bilinear")
        named = self.table[:, : self.prefix].expand(batch, -1, -1)
        return torch.cat([named, F.pad(patches, (0, 0, positions.prefix - self.prefix, 0))], dim=1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, enlarged={self.enlarged}, min_scale={self.min_scale}"


@register_encoding("pe_dropout")
class PEDropout(AugmentedEncoding):
    """PE dropout (CFM-ViT): in training, a random half of the images see no position at all.

    Against a fit to the low resolution of pre-training. The whole embedding of a sample goes, that of the class token
    too, and nothing is rescaled. Around encodings that act in attention, all tokens of a dropped sample are at one
    place. The probability is remembered from the paper and not verified.

    Args:
        inner: name of the encoding, or several joined by "+".
        inner_options: its options.
        grid_size: training grid, for encodings that have one.
        prefix: prefix tokens with a row of their own, for encodings that have such.
        dropout: probability that a sample sees no position.
    """

    kind = "token"
    terms = ("embed",)
    equation = "x_i <- x_i + m W[p_i],   m ~ Bernoulli(1 - dropout) for each sample in training, 1 after"
    source = "Kim et al., CFM-ViT: Contrastive Feature Masking Open-Vocabulary ViT, arXiv 2309.00775"
    cost = "that of the encoding inside"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        inner: str = "ape_learned",
        inner_options: Mapping[str, Any] | None = None,
        grid_size: int | Sequence[int] = 14,
        prefix: int = 0,
        dropout: float = 0.5,
    ) -> None:
        super().__init__(dim, heads, axes, depth, inner, inner_options, grid_size, prefix, dropout=dropout)


def draw_crops(batch: int, axes: int, min_scale: float, device: torch.device | str | None = None) -> Tensor:
    """Random crops in units of the whole: start and side of each axis, (B, 2, A)."""
    first, second = torch.rand(2, batch, axes, device=device).unbind()
    side = ((1 - first) * second).clamp(min=min_scale)
    start = torch.minimum(first, 1 - side)
    return torch.stack([start, side], dim=1)
