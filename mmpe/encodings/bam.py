"""`bam`: a prior over the distance of a key, a generalised Gaussian of one shape per head.

Shapes: B batch, H heads, N positioned tokens, P prefix tokens, A axes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoding import AttentionTerms, PositionEncoding, ScoreMod
from ..positions import Positions
from ..registry import register_encoding
from .bias import alibi_slopes
from .sequence import sequence_ranks

_EPS = 1e-5


@register_encoding("bam")
class BAM(PositionEncoding):
    """Bayesian attention mechanism: a generalised Gaussian prior over the distance of a key, one shape per head.

    With an exponent of 1 it is ALiBi. An exponent that training drives below 0 prefers what is far ("retrieval head").
    The paper's is one-dimensional; in images and videos the distance is Euclidean and the location a vector. It needs
    no order and hides nothing: a decoder passes causal=True to `attend`.

    Args:
        train_location: learn where the prior is centred, as an offset of the key from the query; else it is the query,
            and the prior is the same in all directions.
        share_layers: learn one prior for all blocks.
        ssmax: initial value of a learned factor per head that, times the logarithm of the number of visible keys,
            multiplies the logits (scalable softmax); None leaves them. Padding counts as visible.
        causal: for `ssmax` in one axis, count the keys up to the query as visible, and not all.
    """

    kind = "bias"
    terms = ("bias", "score_mod")
    equation = (
        "b_ij = -exp(s_h) (||p_j - p_i - mu_h|| + 1e-5)^(beta_h),  mu_h = exp(l_h) - exp(-l_h)\n"
        "ssmax: all logits, the prior too, times c_h ln(number of visible keys)"
    )
    source = "Bayesian Attention Mechanism, arXiv 2505.22842; more than one axis is ours"
    promises = ("translation_invariant", "rotation_invariant", "mirror_invariant")
    parity = "official"
    cost = "one N x N distance and power per head and call, or none with flex_attention"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        train_location: bool = False,
        share_layers: bool = True,
        ssmax: float | None = None,
        causal: bool = False,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        if causal and (axes != 1 or ssmax is None):
            raise ValueError(f"causal=True counts keys in the order of one axis for ssmax; got {axes} axes, {ssmax=}")
        layers, self.ssmax, self.causal, self.share_layers = 1 if share_layers else depth, ssmax, causal, share_layers
        self.log_scale = nn.Parameter(torch.empty(layers, heads))
        self.shape = nn.Parameter(torch.empty(layers, heads))
        self.loc = nn.Parameter(torch.empty(layers, heads, axes)) if train_location else None
        self.length_scale = nn.Parameter(torch.empty(layers, heads)) if ssmax is not None else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start as ALiBi."""
        self.log_scale.copy_(alibi_slopes(self.heads, self.log_scale.device).log())
        self.shape.fill_(1.0)
        if self.loc is not None:
            self.loc.zero_()
        if self.length_scale is not None and self.ssmax is not None:
            self.length_scale.fill_(self.ssmax)

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        self.check_positions(positions)
        location = None if self.loc is None else 2.0 * torch.sinh(self.loc)
        layers = [
            PriorTerms(
                positions,
                self.log_scale[i].exp(),
                self.shape[i],
                None if location is None else location[i],
                None if self.length_scale is None else self._temperature(self.length_scale[i], positions),
            )
            for i in range(len(self.shape))
        ]
        return layers[0] if self.share_layers else LayeredTerms(layers)

    def _temperature(self, factor: Tensor, positions: Positions) -> Tensor:
        """c_h ln(visible keys): (1 or B, H, P + N, 1)."""
        if self.causal:
            visible = sequence_ranks(positions) + 1 + positions.prefix  # (..., P + N); the prefix sees the prefix
            logarithm = visible.float().log()[..., None, :, None]
        else:
            logarithm = factor.new_full((1, 1, 1), positions.num_tokens).log()
        temperature = factor[:, None, None] * logarithm
        return temperature if temperature.dim() > 3 else temperature[None]


class LayeredTerms(AttentionTerms):
    """Terms of several blocks, one object for each."""

    def __init__(self, layers: Sequence[AttentionTerms]) -> None:
        self.layers = layers

    def layer(self, index: int) -> AttentionTerms:
        if not 0 <= index < len(self.layers):
            raise ValueError(f"these are the terms of {len(self.layers)} blocks, asked for layer {index}")
        return self.layers[index]

    def bias(self, q: Tensor, k: Tensor) -> Tensor | None:
        if len(self.layers) > 1:
            raise ValueError(f"these terms hold those of {len(self.layers)} blocks; in block i use terms.layer(i)")
        return self.layers[0].bias(q, k)


class PriorTerms(AttentionTerms):
    """Bias -scale_h (||p_j - p_i - mu_h|| + eps)^(shape_h), zero in rows and columns of prefix tokens.

    Args:
        positions: where the tokens are.
        scale: (H,) float32.
        shape: (H,) float32.
        location: (H, A) float32, or None for zero.
        temperature: factor on all logits, the bias too, that broadcasts to (B, H, P + N, 1).
    """

    def __init__(
        self,
        positions: Positions,
        scale: Tensor,
        shape: Tensor,
        location: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> None:
        self.positions, self.scale, self.shape, self.location = positions, scale, shape, location
        self.temperature = temperature

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        prefix = self.positions.prefix
        prior = distance_prior(self.positions.coords, self.scale, self.shape, self.location)
        prior = F.pad(prior, (prefix, 0, prefix, 0))
        if isinstance(self.temperature, Tensor):
            prior = prior * self.temperature
        # A negative exponent makes the diagonal large, and infinity would hide a token from itself in float16.
        return prior.clamp_min(torch.finfo(q.dtype).min / 2)

    def score_mod(self) -> ScoreMod | None:
        if self.temperature is not None:
            return None
        coords, prefix = F.pad(self.positions.coords, (0, 0, self.positions.prefix, 0)), self.positions.prefix
        columns, batched = [c.contiguous() for c in coords.unbind(-1)], coords.dim() > 2
        scale, shape, location = self.scale, self.shape, self.location

        def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            squares = score.float() * 0
            for a, column in enumerate(columns):
                step = column[b, j] - column[b, i] if batched else column[j] - column[i]
                step = step if location is None else step - location[h, a]
                squares = squares + step * step
            prior = scale[h] * (squares.sqrt() + _EPS) ** shape[h]
            return score - torch.where((i >= prefix) & (j >= prefix), prior, 0.0).to(score.dtype)

        return mod


def distance_prior(coords: Tensor, scale: Tensor, shape: Tensor, location: Tensor | None = None) -> Tensor:
    """-scale (||p_j - p_i - mu|| + 1e-5)^shape of coords (N, A) or (B, N, A) -> (1 or B, H, N, N) float32.

    Args:
        coords: float32.
        scale: (H,).
        shape: (H,).
        location: (H, A), or None for zero.
    """
    coords = coords if coords.dim() > 2 else coords.unsqueeze(0)
    squares: Tensor | float = 0.0
    for a, column in enumerate(coords.unbind(-1)):  # (B, N)
        step = (column[:, None, :] - column[:, :, None]).unsqueeze(1)  # (B, 1, N, N)
        step = step if location is None else step - location[:, a, None, None]
        squares = squares + step.square()
    # The floor keeps the gradient of the root finite where a token meets itself.
    distance = torch.as_tensor(squares).clamp_min(1e-20).sqrt()
    return -scale[:, None, None] * (distance + _EPS) ** shape[:, None, None]
