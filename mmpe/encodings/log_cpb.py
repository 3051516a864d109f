"""`log_cpb`: the relative position bias is a small network of the offset, so that it serves windows of any size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoding import AttentionTerms
from ..positions import Positions
from ..registry import register_encoding
from .coordinates import check_choice
from .offsets import OffsetBias, Offsets, OffsetTerms
from .swin import grid_sizes

CpbMode = Literal["swin", "cr"]
_MAX_LOGIT_SCALE = math.log(100.0)


@register_encoding("log_cpb")
class LogCPB(OffsetBias):
    """Continuous position bias of Swin v2: a network of log-spaced offsets gives the bias of every head.

    Mode "swin": offsets divided by the window size minus one, times 8, then sign(x) log2(1 + |x|) / 3; two layers with
    ReLU, no bias in the second, and 16 sigmoid(.) on top. Mode "cr" (timm's swinv2_cr): sign(x) ln(1 + |x|) of the
    offsets as they are, biases in both layers, no sigmoid. The network runs once for each distinct offset, in float32.
    Prefix tokens have no bias. Not here: the hidden dropout of timm's module.

    Args:
        mode: "swin" or "cr", see above.
        hidden: width of the hidden layer.
        pretrained_size: window of the pre-training, whose sizes divide the offsets instead of those of the positions;
            set it when a model is used with larger windows. One size for each axis or one for all.
        cosine: also make attention a cosine, as Swin v2 does: q and k get length 1 and the logits a learned
            temperature of at most 100 for each head. The scale of `attend` must then be the default.
        share_layers: one network for all blocks.
    """

    per_layer = True
    terms = ("bias", "score_mod", "queries_keys")
    equation = (
        "s_ij = <q_i, k_j> * scale + 16 sigmoid(W2 relu(W1 g(p_i - p_j) + b1)),\n"
        "g(x) = sign(x) log2(1 + |x|) / 3 with x = 8 (p_i - p_j) / (n - 1);   cosine: cos(q_i, k_j) exp(min(t, ln 100))"
    )
    source = "Liu et al., Swin Transformer V2, arXiv 2111.09883; mode 'cr': timm 1.0 RelPosMlp"
    parity = "official"
    cost = "one small network per distinct offset and block, laid out to one H x N x N bias"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        mode: CpbMode = "swin",
        hidden: int = 512,
        pretrained_size: int | Sequence[int] | None = None,
        cosine: bool = False,
        share_layers: bool = False,
    ) -> None:
        super().__init__(dim, heads, axes, depth, share_layers)
        check_choice("mode", mode, get_args(CpbMode))
        if hidden < 1:
            raise ValueError(f"hidden must be at least 1, got {hidden}")
        self.mode: CpbMode = mode
        self.pretrained_size = None if pretrained_size is None else grid_sizes(pretrained_size, axes, "pretrained_size")
        layers = self.layers
        self.w1 = nn.Parameter(torch.empty(layers, hidden, axes))
        self.b1 = nn.Parameter(torch.empty(layers, hidden))
        self.w2 = nn.Parameter(torch.empty(layers, heads, hidden))
        self.b2 = nn.Parameter(torch.empty(layers, heads)) if mode == "cr" else None
        self.logit_scale = nn.Parameter(torch.empty(layers, heads, 1, 1)) if cosine else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for weight in (self.w1, self.w2):
            nn.init.trunc_normal_(weight, std=0.02)
        for bias in (self.b1, self.b2):
            if bias is not None:
                bias.zero_()
        if self.logit_scale is not None:
            self.logit_scale.fill_(math.log(10.0))

    def prepare(self, offsets: Offsets, positions: Positions) -> Tensor:
        if self.mode == "cr":
            return offsets.vectors.sign() * offsets.vectors.abs().log1p()
        return log_coordinates(offsets.vectors, self._window(positions))

    def _window(self, positions: Positions) -> Sequence[float]:
        if self.pretrained_size is not None:
            return self.pretrained_size
        if positions.extent is None:
            raise ValueError(
                "log_cpb divides offsets by the size of the window; pass extent= to Positions.points, or build the "
                "encoding with pretrained_size="
            )
        return positions.extent

    def offset_bias(self, prepared: Tensor, layer: int) -> Tensor:
        hidden = F.relu(F.linear(prepared, self.w1[layer], self.b1[layer]))  # (R, hidden)
        values = F.linear(hidden, self.w2[layer], None if self.b2 is None else self.b2[layer])  # (R, H)
        return values if self.mode == "cr" else 16.0 * torch.sigmoid(values)

    def layer_terms(self, offsets: Offsets, prepared: Any, layer: int) -> AttentionTerms:
        terms = super().layer_terms(offsets, prepared, layer)
        if self.logit_scale is None or not isinstance(terms, OffsetTerms):
            return terms
        return CosineTerms(terms, self.logit_scale[layer], self.head_dim)


class CosineTerms(OffsetTerms):
    """A bias beside logits that are cosines times a temperature.

    Args:
        terms: the bias.
        logit_scale: (H, 1, 1), logarithm of the temperature, cut at ln 100.
        head_dim: D; the default scale D ** -0.5 of `attend` is undone.
    """

    def __init__(self, terms: OffsetTerms, logit_scale: Tensor, head_dim: int) -> None:
        self.rows, self.index, self.ready = terms.rows, terms.index, terms.ready
        self.factor = logit_scale.clamp(max=_MAX_LOGIT_SCALE).exp() * head_dim**0.5

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        unit_q = F.normalize(q.float(), dim=-1) * self.factor
        return unit_q.to(q.dtype), F.normalize(k.float(), dim=-1).to(k.dtype)


def log_coordinates(vectors: Tensor, window: Sequence[float]) -> Tensor:
    """Offsets (R, A) of a window -> sign(x) log2(1 + |x|) / log2(8) with x = 8 offset / (size - 1)."""
    # A single cell has no offset but zero.
    columns = [c * (8.0 / torch.sym_max(n - 1, 1)) for c, n in zip(vectors.unbind(-1), window, strict=True)]
    x = torch.stack([torch.as_tensor(c) for c in columns], dim=-1)
    return x.sign() * torch.log2(x.abs() + 1.0) / 3.0
