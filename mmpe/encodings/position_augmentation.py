"""Augmentations of positions in training, around any encoding: shift, jitter, rescale, crop, random order, dropout.

The backbone calls `place` once in a forward pass; everything after it sees the same draw. In evaluation nothing is
drawn. The encoding inside stays whole: `wrapper.inner` is the encoding to use or to save without the augmentation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from ..encoding import AttentionTerms, PositionEncoding
from ..positions import Positions
from ..registry import create_encoding_for, register_encoding
from .coordinates import CoordinateAugmentation, check_choice

AtTest = Literal["consecutive", "spread"]


@dataclass(frozen=True, eq=False)
class AugmentedPositions(Positions):
    """Positions that `place` has drawn.

    Attributes:
        dropped: (B,) bool, the samples that are to see no position at all; None where there are none.
    """

    dropped: Tensor | None = None

    @classmethod
    def of(cls, positions: Positions, **changes: Any) -> Self:
        """The positions with some attributes changed."""
        known = {field.name: getattr(positions, field.name) for field in fields(positions)}
        return cls(**(known | changes))


class PositionWrapper(PositionEncoding):
    """Base of encodings that change positions and leave the rest to an encoding inside.

    Args:
        dim: model width C.
        heads: number of attention heads.
        axes: number of position axes.
        depth: number of blocks.
        inner: name of the encoding inside, or several joined by "+".
        inner_options: its options.
        grid_size: training grid, for encodings that have one.
        prefix: prefix tokens with a row of their own, for encodings that have such.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int,
        depth: int,
        inner: str,
        inner_options: Mapping[str, Any] | None,
        grid_size: int | Sequence[int],
        prefix: int,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        offers = {"grid_size": grid_size, "prefix": prefix}
        self.inner = create_encoding_for(inner, dim, heads, axes, depth, offers, inner_options)
        self.kind = self.inner.kind  # type: ignore[misc]
        self.content_dependent = self.inner.content_dependent  # type: ignore[misc]
        self.embeds_content = self.inner.embeds_content  # type: ignore[misc]
        self.per_layer = self.inner.per_layer  # type: ignore[misc]
        self.needs_grid = self.inner.needs_grid  # type: ignore[misc]

    @property
    def draws(self) -> bool:
        """Whether anything is random in training."""
        return True

    def draw(self, positions: Positions, batch: int) -> Positions:
        """Positions of one training step."""
        return positions

    def at_rest(self, positions: Positions) -> Positions:
        """Positions in evaluation."""
        return positions

    def place(self, positions: Positions, batch: int) -> Positions:
        self.check_positions(positions)
        positions = self.inner.place(positions, batch)
        if not (self.training and self.draws):
            return positions
        return AugmentedPositions.of(self.draw(positions, batch))

    def placed(self, positions: Positions) -> Positions:
        """What the encoding inside gets to see."""
        if isinstance(positions, AugmentedPositions):
            return positions
        if self.training and self.draws:
            raise ValueError(
                f"{self.name} draws positions in training: call positions = encoding.place(positions, batch) once at "
                "the start of each forward pass, and give the result to embed and to the encoding"
            )
        return self.at_rest(positions)

    def embed(self, x: Tensor, positions: Positions, layer: int = 0) -> Tensor:
        self.check_positions(positions)
        return self.inner.embed(x, self.placed(positions), layer)

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        self.check_positions(positions)
        return self.inner(self.placed(positions), x, layer)

    def auxiliary_loss(self) -> Tensor | None:
        return self.inner.auxiliary_loss()

    def no_weight_decay(self) -> set[str]:
        return {f"inner.{name}" for name in self.inner.no_weight_decay()}

    def reset_parameters(self) -> None:
        self.inner.reset_parameters()

    def init_non_persistent_buffers(self) -> None:
        self.inner.init_non_persistent_buffers()


@register_encoding("augmented")
class AugmentedEncoding(PositionWrapper):
    """Any encoding, trained on positions that are shifted, jittered, rescaled, cropped, reordered or dropped at random.

    The augmentations act in this order: random order, crop, then shift, jitter and rescale as DINOv3 has them, all in
    units of cells; an option that is None does nothing. A moved grid fills no grid any more, so learned tables are
    sampled at the points, and encodings that need a grid are refused unless dropout is the only augmentation. Dropped
    samples get no token term, and all of their tokens are at one place for the attention.

    Args:
        inner: name of the encoding, or several joined by "+".
        inner_options: its options.
        grid_size: training grid, for encodings that have one.
        prefix: prefix tokens with a row of their own, for encodings that have such.
        shift: adds U(-s, s) cells to each axis.
        jitter: multiplies each axis by exp(U(-ln J, ln J)).
        rescale: multiplies all axes by one exp(U(-ln R, ln R)).
        crop: each axis becomes a random part of itself, stretched over all tokens: of U(crop, 1) of its length.
        max_size: indices of each axis become an ordered random choice from so many (random order).
        dropout: probability that a sample sees no position at all.
        per_sample: draw for each sample; False draws once for the batch, which costs less. Dropout always does.
    """

    kind = "rotary"
    terms = ("queries_keys",)
    equation = "the encoding inside at p' = rescale * jitter * (crop(order(p)) + shift), drawn once a training step"
    source = "Simeoni et al., DINOv3 (shift, jitter, rescale), arXiv 2508.10104; the others are described one by one"
    cost = "that of the encoding inside; per_sample makes one table for each sample"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        inner: str = "rope_axial",
        inner_options: Mapping[str, Any] | None = None,
        grid_size: int | Sequence[int] = 14,
        prefix: int = 0,
        shift: float | None = None,
        jitter: float | None = None,
        rescale: float | None = None,
        crop: float | None = None,
        max_size: int | None = None,
        dropout: float = 0.0,
        per_sample: bool = False,
    ) -> None:
        super().__init__(dim, heads, axes, depth, inner, inner_options, grid_size, prefix)
        if crop is not None and not 0 < crop <= 1:
            raise ValueError(f"crop={crop} must be None or in (0, 1], the smallest part of an axis")
        if max_size is not None and max_size < 1:
            raise ValueError(f"max_size={max_size} must be None or at least 1")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout={dropout} must be a probability")
        self.affine = CoordinateAugmentation(shift, jitter, rescale)
        self.crop, self.max_size, self.dropout, self.per_sample = crop, max_size, dropout, per_sample
        self.moves = any(option is not None for option in (shift, jitter, rescale, crop, max_size))
        if self.needs_grid and (self.moves or _acts_in_attention(self.inner)):
            raise ValueError(
                f"inner={inner!r} needs tokens that fill a grid, which moved positions do not; only dropout works, and "
                "that with encodings that have a token term alone"
            )

    @property
    def draws(self) -> bool:
        return self.moves or self.dropout > 0

    def draw(self, positions: Positions, batch: int) -> Positions:
        sets = batch if self.per_sample else 1
        if self.max_size is not None:
            positions = random_order(positions, self.max_size, sets)
        if self.crop is not None:
            positions = random_crop(positions, self.crop, sets)
        if self.moves:
            coords = self.affine(positions.coords, batch if self.per_sample else None)
            positions = AugmentedPositions.of(positions, coords=coords, grid_size=None)
        if self.dropout > 0:
            dropped = torch.rand(batch, device=positions.device) < self.dropout
            positions = AugmentedPositions.of(positions, dropped=dropped)
        return positions

    def embed(self, x: Tensor, positions: Positions, layer: int = 0) -> Tensor:
        y = super().embed(x, positions, layer)
        dropped = getattr(positions, "dropped", None)
        return y if dropped is None else torch.where(dropped[:, None, None], x, y)

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        return super().forward(positions if self.needs_grid else at_one_place(positions), x, layer)

    def extra_repr(self) -> str:
        shown = {"crop": self.crop, "max_size": self.max_size, "dropout": self.dropout} | vars(self.affine)
        used = ", ".join(f"{key}={value}" for key, value in shown.items() if value)
        return f"{super().extra_repr()}, {used or 'no augmentation'}"


@register_encoding("rpe_2d_randomized")
class RandomizedPositions(PositionWrapper):
    """Randomised positions (RPE-2D): in training, rows and columns are ordered random choices from a larger range.

    Each axis draws as many different indices from 0 .. max_size - 1 as it is long, in order and independently of the
    other axes, so that a model learns the order of cells and meets large indices. The paper adds resize and crop
    conditions and rules for inference that are no part of the encoding; its range and sampling could not be verified.

    Args:
        inner: name of the encoding that reads the positions, or several joined by "+".
        inner_options: its options.
        grid_size: training grid, for encodings that have one.
        prefix: prefix tokens with a row of their own, for encodings that have such.
        max_size: size of the range that indices are drawn from; at least the longest axis in training.
        at_test: indices in evaluation: "consecutive", or "spread" evenly over the trained range.
        per_sample: draw for each sample instead of once for the batch.
    """

    kind = "rotary"
    terms = ("queries_keys",)
    equation = "in training p_a = sort(choice(max_size, n_a)) on each axis a, after it p_a (or spread over the range)"
    source = "RPE-2D, arXiv 2503.18719; in one axis: Ruoss et al., Randomized Positional Encodings, arXiv 2305.16843"
    cost = "that of the encoding inside; per_sample makes one table for each sample"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        inner: str = "rope_axial",
        inner_options: Mapping[str, Any] | None = None,
        grid_size: int | Sequence[int] = 14,
        prefix: int = 0,
        max_size: int = 64,
        at_test: AtTest = "consecutive",
        per_sample: bool = False,
    ) -> None:
        super().__init__(dim, heads, axes, depth, inner, inner_options, grid_size, prefix)
        check_choice("at_test", at_test, get_args(AtTest))
        if max_size < 1:
            raise ValueError(f"max_size={max_size} must be at least 1")
        if self.needs_grid:
            raise ValueError(f"inner={inner!r} reads a grid and no coordinates; randomised positions would do nothing")
        self.max_size, self.at_test, self.per_sample = max_size, at_test, per_sample

    def draw(self, positions: Positions, batch: int) -> Positions:
        return random_order(positions, self.max_size, batch if self.per_sample else 1)

    def at_rest(self, positions: Positions) -> Positions:
        if self.at_test == "consecutive":
            return positions
        steps = [(self.max_size - 1) / max(size - 1, 1) for size in _extent(positions)]
        coords = torch.stack([c * step for c, step in zip(positions.coords.unbind(-1), steps, strict=True)], dim=-1)
        extent = (float(self.max_size),) * self.axes
        return AugmentedPositions.of(positions, coords=coords, grid_size=None, extent=extent)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, max_size={self.max_size}, at_test={self.at_test!r}"


def random_order(positions: Positions, max_size: int, sets: int = 1) -> Positions:
    """Indices replaced by ordered random choices from `max_size`, axis by axis.

    Args:
        positions: integer coordinates within their extent.
        max_size: how many indices there are to choose from.
        sets: number of draws: 1, or one for each sample of a batch.
    """
    if max(_extent(positions)) > max_size:
        raise ValueError(f"max_size={max_size} must be at least the longest axis of {_extent(positions)}")
    columns = []
    for c, size in zip(positions.coords.unbind(-1), _extent(positions), strict=True):
        drawn = torch.rand(sets, max_size, device=c.device).argsort(-1)[:, : int(size)].sort(-1).values  # (S, n)
        index = c.round().clamp(0, int(size) - 1).long().expand(sets if c.dim() == 1 else -1, -1)
        columns.append(drawn.expand(index.shape[0], -1).gather(1, index).float())
    coords = torch.stack(columns, dim=-1)  # (S, N, A)
    coords = coords[0] if positions.coords.dim() == 2 and sets == 1 else coords
    extent = (float(max_size),) * positions.num_axes
    return AugmentedPositions.of(positions, coords=coords, grid_size=None, extent=extent)


def random_crop(positions: Positions, smallest: float, sets: int = 1) -> Positions:
    """Each axis mapped onto a random part of itself: a crop of the picture, stretched over all tokens.

    Args:
        positions: with an extent.
        smallest: the least share of an axis that is left.
        sets: number of draws: 1, or one for each sample of a batch.
    """
    coords, axes = positions.coords, positions.num_axes
    draws = coords.new_empty(2, sets, 1, axes).uniform_(0, 1)
    share = smallest + (1 - smallest) * draws[0]
    columns = []
    for a, size in enumerate(_extent(positions)):
        start = draws[1, ..., a] * (1 - share[..., a]) * size  # (S, 1)
        # Centres of cells map onto centres of smaller cells, so that the borders map onto the borders of the crop.
        columns.append(start + (coords[..., a] + 0.5) * share[..., a] - 0.5)
    moved = torch.stack(columns, dim=-1)  # (S, N, A)
    moved = moved[0] if coords.dim() == 2 and sets == 1 else moved
    return AugmentedPositions.of(positions, coords=moved, grid_size=None)


def at_one_place(positions: Positions) -> Positions:
    """All tokens of the dropped samples at the origin: relative to one another they have no position."""
    dropped = getattr(positions, "dropped", None)
    if dropped is None:
        return positions
    coords = torch.where(dropped[:, None, None], 0.0, positions.coords)  # (B, N, A)
    return AugmentedPositions.of(positions, coords=coords, grid_size=None)


def _acts_in_attention(encoding: PositionEncoding) -> bool:
    parts = getattr(encoding, "parts", (encoding,))
    return any(term != "embed" for part in parts for term in part.terms)


def _extent(positions: Positions) -> tuple[float, ...]:
    if positions.extent is None:
        raise ValueError("this augmentation needs the range of the positions; pass extent= to Positions.points")
    return positions.extent
