"""What position adds to attention: `PositionEncoding`, the `AttentionTerms` that it makes, and `attend` that uses them.

Shapes: B batch, H heads, N tokens (prefix included), D head dim, C model width, A axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from .positions import Positions

_HALF = (torch.float16, torch.bfloat16)
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class AttentionTerms:
    """What position contributes to one attention call; this base contributes nothing.

    Subclasses override what differs. Objects are made once per forward and never modified.
    """

    temperature: Tensor | float | None = None
    """Factor on the scaled logits, a number or a tensor that broadcasts to (B, H, N, 1); None is 1."""

    tokens: int | None = None
    """Number of queries and of keys, prefix included, that the terms are made for; None leaves it to the tensors."""

    needs_weights: bool = False
    """Whether `from_weights` acts; it makes `attend` compute the softmax explicitly, so only where there is no way
    around it."""

    def layer(self, index: int) -> AttentionTerms:
        """The terms of block `index`; terms that all blocks share return themselves."""
        return self

    def inputs(self, h: Tensor) -> Tensor:
        """Transform h (B, N, C), the normalised tokens, before the projections to q, k and v read it."""
        return h

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Transform q (B, H, N, D) and k (B, Hkv, N, D); the width may grow, the softmax scale does not follow it."""
        return q, k

    def values(self, v: Tensor) -> Tensor:
        """Transform v (B, Hkv, N, Dv) before the weighted sum."""
        return v

    def outputs(self, o: Tensor) -> Tensor:
        """Transform o (B, H, N, Dv) after the weighted sum."""
        return o

    def bias(self, q: Tensor, k: Tensor) -> Tensor | None:
        """A term that broadcasts to (B, H, N, N), added to the scaled logits; None if there is none."""
        return None

    def from_weights(self, weights: Tensor) -> Tensor | None:
        """A term (B, H, N, Dv) made from the attention weights (B, H, N, M), added to the weighted sum of v."""
        return None

    def score_mod(self) -> ScoreMod | None:
        """The same bias as a flex_attention score_mod, where it has one; avoids the N x N tensor on a GPU."""
        return None

    def __add__(self, other: AttentionTerms) -> AttentionTerms:
        return ComposedTerms((self, other))


class ComposedTerms(AttentionTerms):
    """Terms of several encodings that act together, applied in order."""

    def __init__(self, parts: tuple[AttentionTerms, ...]) -> None:
        self.parts = parts

    @property
    def temperature(self) -> Tensor | float | None:  # type: ignore[override]
        """Product of the parts' temperatures."""
        product: Tensor | float | None = None
        for part in self.parts:
            if part.temperature is not None:
                product = part.temperature if product is None else product * part.temperature
        return product

    @property
    def tokens(self) -> int | None:  # type: ignore[override]
        """The number that a part is made for; `attend` finds out where parts disagree."""
        return next((part.tokens for part in self.parts if part.tokens is not None), None)

    def layer(self, index: int) -> AttentionTerms:
        return ComposedTerms(tuple(part.layer(index) for part in self.parts))

    def inputs(self, h: Tensor) -> Tensor:
        for part in self.parts:
            h = part.inputs(h)
        return h

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        for part in self.parts:
            q, k = part.queries_keys(q, k)
        return q, k

    def values(self, v: Tensor) -> Tensor:
        for part in self.parts:
            v = part.values(v)
        return v

    def outputs(self, o: Tensor) -> Tensor:
        for part in reversed(self.parts):
            o = part.outputs(o)
        return o

    def bias(self, q: Tensor, k: Tensor) -> Tensor | None:
        total: Tensor | None = None
        for part in self.parts:
            term = part.bias(q, k)
            if term is not None:
                total = term if total is None else total + term
        return total

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        """True if any part makes a term from the attention weights."""
        return any(part.needs_weights for part in self.parts)

    def from_weights(self, weights: Tensor) -> Tensor | None:
        total: Tensor | None = None
        for part in self.parts:
            term = part.from_weights(weights)
            if term is not None:
                total = term if total is None else total + term
        return total

    def score_mod(self) -> ScoreMod | None:
        biased = [part for part in iterate_terms(self) if type(part).bias is not AttentionTerms.bias]
        mods = [mod for part in biased if (mod := part.score_mod()) is not None]
        if not mods or len(mods) < len(biased):
            return None

        def all_of_them(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            for mod in mods:
                score = mod(score, b, h, i, j)
            return score

        return all_of_them


class FloatModule(nn.Module):
    """A module whose own float32 parameters and buffers stay float32 when the model is cast to half precision."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Frequencies and fixed scales lose their meaning in bf16, so only the device follows the model.
        parameters = {n: p.data for n, p in self._parameters.items() if p is not None and p.dtype == torch.float32}
        buffers = {n: b for n, b in self._buffers.items() if b is not None and b.dtype == torch.float32}
        super()._apply(fn, recurse)
        for name, data in parameters.items():
            p = self._parameters[name]
            if p is not None and p.dtype in _HALF:
                grad, p.grad = p.grad, None
                p.data = data.to(p.device)  # the same Parameter object: an optimiser may hold it
                p.grad = None if grad is None else grad.float()
        for name, buffer in buffers.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype in _HALF:
                self._buffers[name] = buffer.to(moved.device)
        return self


class PositionEncoding(FloatModule):
    """Base of all encodings: a token term (`embed`) and terms inside attention (`forward`).

    Args:
        dim: model width C.
        heads: number of attention heads H; must divide `dim`.
        axes: number of position axes: 1 (sequence), 2 (image) or 3 (video, volume).
        depth: number of blocks that use this encoding; encodings with parameters per layer make `depth` sets.

    Class attributes say what an encoding is: `kind`, `supported_axes`, `per_layer` (owns parameters per block),
    `content_dependent` (`forward` needs the block's input x and its layer), `embeds_content` (what `embed` adds depends
    on the tokens), `needs_grid` (refuses loose points), `cumulative` (counts along the sequence what tokens contain, so
    that dropping one changes those after it), `terms` it sets, `equation`, `source`, `promises` (properties that the
    generic tests check), `parity` ("official" or "formula") and `cost`.
    """

    name: ClassVar[str] = ""
    kind: ClassVar[str] = "none"
    supported_axes: ClassVar[tuple[int, ...]] = (1, 2, 3)
    per_layer: ClassVar[bool] = False
    content_dependent: ClassVar[bool] = False
    embeds_content: ClassVar[bool] = False
    needs_grid: ClassVar[bool] = False
    cumulative: ClassVar[bool] = False
    terms: ClassVar[tuple[str, ...]] = ()
    equation: ClassVar[str] = ""
    source: ClassVar[str] = ""
    promises: ClassVar[tuple[str, ...]] = ()
    parity: ClassVar[str] = "formula"
    cost: ClassVar[str] = "free"

    def __init__(self, dim: int, heads: int, axes: int = 2, depth: int = 1) -> None:
        super().__init__()
        if dim < 1 or heads < 1 or depth < 1:
            raise ValueError(f"dim, heads and depth must be positive, got dim={dim}, heads={heads}, depth={depth}")
        if dim % heads:
            raise ValueError(f"dim={dim} must be divisible by heads={heads}")
        if axes not in self.supported_axes:
            raise ValueError(f"{self.name or type(self).__name__} supports axes {self.supported_axes}, got axes={axes}")
        self.dim, self.heads, self.axes, self.depth = dim, heads, axes, depth
        self.head_dim = dim // heads

    @property
    def qkv_heads(self) -> int:
        """Heads of width `head_dim` that the block projects q, k and v to."""
        return self.heads

    @property
    def output_heads(self) -> int:
        """Heads of width `head_dim` that `attend` returns, which the block's output projection reads."""
        return self.heads

    def place(self, positions: Positions, batch: int) -> Positions:
        """Where the tokens of a batch of sequences are to be: the same positions unless an encoding augments them.

        A backbone calls it once in each forward pass, before anything else, so that all that follows in this pass
        sees the same draw.
        """
        return positions

    def embed(self, x: Tensor, positions: Positions, layer: int = 0) -> Tensor:
        """Token term: x (B, N, C) before block `layer` -> (B, N, C). The identity unless an encoding overrides it."""
        self.check_tokens(x, positions)
        return x

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        """Terms inside attention.

        Args:
            positions: where the N tokens are.
            x: (B, N, C) input of the block's qkv projection; needed where `content_dependent`.
            layer: index of the block; read only where `content_dependent`. Other encodings return the terms of all
                blocks at once: take those of one with `terms.layer(i)`.
        """
        self.check_positions(positions)
        return AttentionTerms()

    def auxiliary_loss(self) -> Tensor | None:
        """A loss of its own that an encoding adds to that of the task in each training step; None if it has none."""
        return None

    def check_positions(self, positions: Positions) -> None:
        """Refuse positions with another number of axes, or without the grid that the encoding needs."""
        if not isinstance(positions, Positions):
            raise TypeError(
                f"{self.name} needs mmpe.Positions, got {type(positions).__name__}; "
                "make them with Positions.grid, .video, .line or .points"
            )
        if positions.num_axes != self.axes:
            raise ValueError(
                f"{self.name} was built for axes={self.axes}, got positions with axes {positions.axes}; "
                f"create it with axes={positions.num_axes}"
            )
        if self.needs_grid and positions.grid_size is None:
            raise ValueError(f"{self.name} needs tokens that fill a grid; these positions are loose points")

    def check_tokens(self, x: Tensor, positions: Positions) -> None:
        """Refuse tokens that the positions do not fit: broadcasting would give all of them the position of one."""
        self.check_positions(positions)
        if x.dim() != 3 or x.shape[1] != positions.num_tokens or x.shape[2] != self.dim:
            raise ValueError(
                f"{self.name} needs x of shape (B, {positions.num_tokens}, {self.dim}), got {tuple(x.shape)}: the "
                f"positions hold {positions.num_tokens} tokens, {positions.prefix} of them prefix tokens, which count"
            )
        if not x.is_floating_point():
            raise TypeError(f"{self.name} needs floating-point tokens, got {x.dtype}")
        if positions.coords.dim() > 2 and positions.coords.shape[0] not in (1, x.shape[0]):
            raise ValueError(f"{self.name}: positions of {positions.coords.shape[0]} samples, x has {x.shape[0]}")

    def check_layer(self, layer: int) -> None:
        """Refuse a block index outside of `depth`."""
        if not 0 <= layer < self.depth:
            raise ValueError(f"{self.name} has parameters for depth={self.depth} blocks, asked for layer={layer}")

    def require_content(self, x: Tensor | None) -> Tensor:
        """The block input, or an error that says how to pass it."""
        if x is None:
            raise ValueError(f"{self.name} depends on content: call encoding(positions, x, layer=i) inside block i")
        return x

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimiser must not decay: all of them, by the field's convention."""
        return {name for name, _ in self.named_parameters()}

    def reset_parameters(self) -> None:
        """Draw the parameters anew; after `to_empty` this and `init_non_persistent_buffers` make the module whole."""

    def init_non_persistent_buffers(self) -> None:
        """Rebuild derived buffers. The encodings of mmpe derive tables in forward, so most have none."""

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, axes={self.axes}, depth={self.depth}"


class SumEncoding(PositionEncoding):
    """Several encodings at once, such as "ape_learned+rope_mixed": token terms add up, attention terms compose."""

    def __init__(self, parts: list[PositionEncoding]) -> None:
        first = parts[0]
        super().__init__(first.dim, first.heads, first.axes, first.depth)
        acting = [part for part in parts if set(part.terms) - {"embed", "inputs"}]
        for part in acting:
            if len(acting) > 1 and (part.qkv_heads, part.output_heads) != (self.heads, self.heads):
                others = ", ".join(other.name for other in acting if other is not part)
                raise ValueError(
                    f"{part.name} changes the number of heads in attention and cannot be combined with {others}, "
                    "made for the heads that come in; a token encoding can go with it"
                )
        self.parts = nn.ModuleList(parts)

    def __iter__(self) -> Iterator[PositionEncoding]:
        return iter(self.parts)  # type: ignore[arg-type]

    @property
    def qkv_heads(self) -> int:
        """The heads of the part that acts in attention."""
        return next((part.qkv_heads for part in self if part.qkv_heads != self.heads), self.heads)

    @property
    def output_heads(self) -> int:
        """The heads of the part that acts in attention."""
        return next((part.output_heads for part in self if part.output_heads != self.heads), self.heads)

    @property
    def content_dependent(self) -> bool:  # type: ignore[override]
        """True if any part needs the block input."""
        return any(part.content_dependent for part in self)

    @property
    def per_layer(self) -> bool:  # type: ignore[override]
        """True if any part owns parameters per block."""
        return any(part.per_layer for part in self)

    @property
    def needs_grid(self) -> bool:  # type: ignore[override]
        """True if any part needs tokens that fill a grid."""
        return any(part.needs_grid for part in self)

    @property
    def embeds_content(self) -> bool:  # type: ignore[override]
        """True if what any part adds to the tokens depends on them."""
        return any(part.embeds_content for part in self)

    def place(self, positions: Positions, batch: int) -> Positions:
        """An augmentation of one part moves the tokens for all of them."""
        for part in self:
            positions = part.place(positions, batch)
        return positions

    def embed(self, x: Tensor, positions: Positions, layer: int = 0) -> Tensor:
        for part in self:
            x = part.embed(x, positions, layer)
        return x

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        terms = [
            part(positions, x, layer) if part.content_dependent else self._of_layer(part(positions), layer)
            for part in self
        ]
        return ComposedTerms(tuple(terms))

    def auxiliary_loss(self) -> Tensor | None:
        losses = [loss for part in self if (loss := part.auxiliary_loss()) is not None]
        return torch.stack(losses).sum() if losses else None

    def _of_layer(self, terms: AttentionTerms, layer: int) -> AttentionTerms:
        # A sum that is called inside every block must hand out single-block terms for all of its parts.
        return terms.layer(layer) if self.content_dependent else terms

    def no_weight_decay(self) -> set[str]:
        return {f"parts.{i}.{name}" for i, part in enumerate(self) for name in part.no_weight_decay()}

    def reset_parameters(self) -> None:
        for part in self:
            part.reset_parameters()

    def init_non_persistent_buffers(self) -> None:
        for part in self:
            part.init_non_persistent_buffers()


def iterate_terms(terms: AttentionTerms) -> Iterator[AttentionTerms]:
    """The elementary terms of a composition, in order."""
    if isinstance(terms, ComposedTerms):
        for part in terms.parts:
            yield from iterate_terms(part)
    else:
        yield terms


def encoding_kwargs(encoding: PositionEncoding) -> dict[str, Any]:
    """The four construction arguments that every encoding shares."""
    return {"dim": encoding.dim, "heads": encoding.heads, "axes": encoding.axes, "depth": encoding.depth}
