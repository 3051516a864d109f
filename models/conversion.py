"""Weights and settings to and from timm: plain `vit_*`, `vit_*_rope_*`, `vit_*_rope_mixed_*`, their `_ape` variants.

The converted model computes the same function: tests compare logits. Pairs of rotary channels are 2f, 2f + 1 in one
convention and f, f + F in the other; the conversion keeps the source's pairing, or reorders the q and k projections.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from timm import create_model
from torch import Tensor, nn

from mmpe.encoding import PositionEncoding, SumEncoding
from mmpe.rotary import convert_pairing

from . import timm_settings

if TYPE_CHECKING:
    from .vit import VisionTransformer


class TimmModel(NamedTuple):
    """A model in timm's terms: `timm.create_model(name, **kwargs)` builds it, and `state_dict` fits it."""

    name: str
    kwargs: dict[str, Any]
    state_dict: dict[str, Tensor]


def from_timm(
    source: nn.Module | Mapping[str, Tensor],
    architecture: str | None = None,
    *,
    half: bool | None = None,
    timm_kwargs: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> VisionTransformer:
    """Our vision transformer with the settings and weights of one of timm.

    Args:
        source: a timm model, or its state dict.
        architecture: timm's name of the model, needed with a state dict.
        half: pairing of rotary channels in our model; None keeps that of the source.
        timm_kwargs: with a state dict, the keywords that its model was created with.
        overrides: arguments of our `VisionTransformer` that win over those read from the source.

    Raises:
        ValueError: for parts of timm that our model does not have.

    Example:
        >>> import timm
        >>> model = from_timm(timm.create_model("vit_small_patch16_rope_mixed_224"))
        >>> model.encoding_name
        'rope_mixed'
    """
    from .vit import VisionTransformer

    if isinstance(source, nn.Module):
        skeleton, weights = source, source.state_dict()
    else:
        skeleton, weights = _skeleton(architecture, timm_kwargs, source), dict(source)
    model = VisionTransformer(**(timm_settings.read(skeleton) | overrides), weight_init="skip")
    state = from_timm_names(weights, model.encoding)
    if half is not None:
        state = _with_pairing(state, model, half)
        model = _rebuilt_with_half(model, half)
    model.load_state_dict(state)
    return model.train(skeleton.training)


def to_timm(model: VisionTransformer) -> TimmModel:
    """The settings and weights of our vision transformer in timm's terms.

    Raises:
        ValueError: for an encoding or option that timm does not have.

    Example:
        >>> from mmpe.models.vit import VisionTransformer
        >>> model = VisionTransformer(img_size=64, embed_dim=64, depth=2, num_heads=2, encoding="rope_axial")
        >>> to_timm(model).name
        'vit_small_patch16_rope_224'
    """
    name, kwargs = timm_settings.write(model)
    state = dict(model.state_dict())
    if timm_settings.is_interleaved_only(model) and rotary_half(model.encoding):
        state = _with_pairing(state, model, half=False)
    has_rope = bool(kwargs.get("use_rot_pos_emb"))
    return TimmModel(name, kwargs, dict(_to_timm_names(state, model.encoding, has_rope)))


def _skeleton(architecture: str | None, kwargs: Mapping[str, Any] | None, weights: Mapping[str, Tensor]) -> nn.Module:
    if architecture is None:
        raise ValueError("a state dict does not say its heads or its rotary base; pass architecture='vit_...' of timm")
    arguments = dict(kwargs or {})
    if "head.weight" in weights:
        arguments.setdefault("num_classes", weights["head.weight"].shape[0])
    with torch.device("meta"):
        return create_model(architecture, **arguments)


def looks_like_timm(weights: Mapping[str, Any]) -> bool:
    """Whether a state dict has a name that timm uses and our model does not."""
    return any(
        key in ("pos_embed", "rope.freqs") or re.search(r"\.(gamma_[12]|attn\.(q_bias|q_proj\.weight))$", key)
        for key in weights
    )


def from_timm_names(weights: Mapping[str, Tensor], encoding: PositionEncoding) -> dict[str, Tensor]:
    """A timm state dict in our names.

    Args:
        weights: state dict of timm's VisionTransformer or Eva.
        encoding: the encoding of our model, which says where a position table or frequencies belong.
    """
    out: dict[str, Tensor] = {}
    for key, value in weights.items():
        if key == "pos_embed":
            out[_location(encoding, "ape_learned") + "table"] = value
        elif key == "rope.freqs":
            out[_location(encoding, "rope_mixed") + "freqs"] = value
        elif not key.startswith("rope.") and not re.search(r"attn\.([qkv]_bias|[qkv]_proj\.)", key):
            out[re.sub(r"\.gamma_([12])$", r".ls\1.gamma", key)] = value
    for i in _block_indices(weights):
        out.update(_joined_qkv(weights, f"blocks.{i}.attn."))
    return out


def _block_indices(weights: Mapping[str, Any]) -> list[int]:
    return sorted({int(match[1]) for key in weights if (match := re.match(r"blocks\.(\d+)\.", key))})


def _joined_qkv(weights: Mapping[str, Tensor], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """One qkv projection from separate ones; where keys have no bias (EVA), theirs is zero."""
    projections = [weights.get(f"{prefix}{letter}_proj.weight") for letter in "qkv"]
    if projections[0] is not None:
        yield f"{prefix}qkv.weight", torch.cat([p for p in projections if p is not None])
    q_bias = weights.get(f"{prefix}q_bias", weights.get(f"{prefix}q_proj.bias"))
    v_bias = weights.get(f"{prefix}v_bias", weights.get(f"{prefix}v_proj.bias"))
    if q_bias is not None and v_bias is not None:
        k_bias = weights.get(f"{prefix}k_proj.bias", torch.zeros_like(q_bias))
        yield f"{prefix}qkv.bias", torch.cat([q_bias, k_bias, v_bias])


def _to_timm_names(state: Mapping[str, Tensor], encoding: PositionEncoding, eva: bool) -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if not key.startswith("encoding."):
            yield (re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", key) if eva else key), value
    for part_name, own, theirs in (("ape_learned", "table", "pos_embed"), ("rope_mixed", "freqs", "rope.freqs")):
        if any(part.name == part_name for _, part in named_parts(encoding)):
            yield theirs, state[_location(encoding, part_name) + own]
    for i in _block_indices(state) if eva else ():
        for branch in (1, 2):
            if f"blocks.{i}.ls{branch}.gamma" not in state:
                yield f"blocks.{i}.gamma_{branch}", torch.ones_like(state[f"blocks.{i}.norm{branch}.weight"])


def named_parts(encoding: PositionEncoding) -> list[tuple[str, PositionEncoding]]:
    """The elementary encodings with the prefix of their weights in the model's state dict."""
    if isinstance(encoding, SumEncoding):
        return [(f"encoding.parts.{i}.", part) for i, part in enumerate(encoding)]
    return [("encoding.", encoding)]


def _location(encoding: PositionEncoding, name: str) -> str:
    for prefix, part in named_parts(encoding):
        if part.name == name:
            return prefix
    own = "+".join(part.name for _, part in named_parts(encoding))
    raise ValueError(f"the timm checkpoint has weights of {name!r}, this model has encoding={own!r}; add it there")


def rotary_half(encoding: PositionEncoding) -> bool | None:
    """The pairing of the rotary part: True for half-split, False for interleaved; None without one."""
    rotary: list[Any] = [part for _, part in named_parts(encoding) if part.kind == "rotary"]
    return rotary[0].half_pairing if rotary else None


def _with_pairing(state: Mapping[str, Tensor], model: VisionTransformer, half: bool) -> dict[str, Tensor]:
    """Reorder q and k of every block so that the other pairing gives the same scores."""
    out = dict(state)
    if rotary_half(model.encoding) in (None, half):
        return out
    head_dim = model.encoding.head_dim
    for key, value in state.items():
        if re.search(r"attn\.qkv\.(weight|bias)$", key):
            q, k, v = value.chunk(3)
            out[key] = torch.cat([convert_pairing(q, head_dim, half), convert_pairing(k, head_dim, half), v])
        elif re.search(r"attn\.[qk]_norm\.(weight|bias)$", key):
            out[key] = convert_pairing(value, head_dim, half)
    return out


def _rebuilt_with_half(model: VisionTransformer, half: bool) -> VisionTransformer:
    current = rotary_half(model.encoding)
    if current is None:
        raise ValueError(f"half={half} is the pairing of a rotary encoding; this model has {model.encoding_name!r}")
    config = model.config
    config["encoding_options"] = {**(config.get("encoding_options") or {}), "half": half}
    return type(model)(**config)
