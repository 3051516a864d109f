"""Any encoding of mmpe in a timm vision transformer.

`set_position_encoding` swaps the encoding of an existing model, `restore` undoes it, and `TimmRope` gives one of our
rotary encodings the face of a rotary module of timm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..encoding import PositionEncoding
from ..encodings.rotary import RotaryEncoding, timm_table
from ..positions import Positions
from .backbone import create_for_grid
from .timm_classes import encoded_class, plain_class, swapped_attention

__all__ = ["TimmRope", "restore", "set_position_encoding"]

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class _Original:
    """What `restore` needs; held outside of the module's own parameters, so that no state dict shows it."""

    pos_embed: nn.Parameter | None
    rope: nn.Module | None


def set_position_encoding(model: M, encoding: str | PositionEncoding, **options: Any) -> M:
    """Give a timm VisionTransformer or Eva another position encoding; all other weights stay.

    The position table and the rotary module of the model go, `model.encoding` comes. Everything else of the model goes
    on working: forward_features, features_only wrappers, other image sizes, patch dropout, no_weight_decay, state
    dicts, compilation. A second call replaces the encoding of the first.

    Args:
        model: a timm VisionTransformer or Eva, or a features_only wrapper of one; changed in place.
        encoding: a name such as "pape" or "ape_learned+rope_mixed", or an encoding for this width, heads and depth.
        options: options of the encoding.

    Returns:
        The model.

    Raises:
        ValueError: for another class of model, or an encoding that does not fit it.

    Example:
        >>> import timm
        >>> model = set_position_encoding(timm.create_model("vit_tiny_patch16_224"), "rope_mixed")
        >>> sorted(name for name, _ in model.named_parameters() if "encoding" in name)
        ['encoding.freqs']
    """
    net = _inner(model)
    target = encoded_class(net)
    new = _fitting(net, encoding, options)
    if not hasattr(net, "_position_original"):
        net._position_original = _Original(net.pos_embed, getattr(net, "rope", None))
        net.pos_embed = None
        if hasattr(net, "rope"):
            net.rope = None
    weight = net.patch_embed.proj.weight
    net.encoding = new.to(weight.device, weight.dtype).train(net.training)
    net.__class__ = target
    swapped_attention(net, encoded=True)
    return model


def restore(model: M) -> M:
    """Undo `set_position_encoding`: the model has its own class, table and rotary module again, as they were.

    Args:
        model: the model, or a features_only wrapper of it; changed in place.

    Returns:
        The model.
    """
    net = _inner(model)
    original: _Original | None = getattr(net, "_position_original", None)
    if original is None:
        raise ValueError("this model has the position encoding it was built with; there is nothing to restore")
    weight = net.patch_embed.proj.weight
    del net._position_original, net.encoding
    if original.pos_embed is not None:
        original.pos_embed.data = original.pos_embed.data.to(weight.device, weight.dtype)
    net.pos_embed = original.pos_embed
    if hasattr(net, "rope"):
        net.rope = None if original.rope is None else original.rope.to(weight.device, weight.dtype)
    swapped_attention(net, encoded=False)
    net.__class__ = plain_class(net)
    return model


def _inner(model: nn.Module) -> Any:
    # The wrapper's class is private to timm; a wrapped model under this name is what marks it.
    return model.model if hasattr(model, "out_indices") else model


def _fitting(model: Any, encoding: str | PositionEncoding, options: dict[str, Any]) -> PositionEncoding:
    attention, depth = model.blocks[0].attn, len(model.blocks)
    width, heads = attention.head_dim * attention.num_heads, attention.num_heads
    if width != model.embed_dim:
        raise ValueError(f"heads of width {attention.head_dim} do not add up to embed_dim={model.embed_dim}")
    if isinstance(encoding, str):
        grid = model.patch_embed.dynamic_feat_size(model.patch_embed.img_size)
        prefix = 0 if model.no_embed_class else model.num_prefix_tokens
        encoding = create_for_grid(encoding, width, heads, depth, grid, prefix, options)
    elif options:
        raise ValueError(f"options {sorted(options)} are for an encoding given by name; this one is built already")
    if (encoding.dim, encoding.heads, encoding.axes) != (width, heads, 2) or encoding.depth < depth:
        needed = f"dim={width}, heads={heads}, axes=2, depth={depth}"
        raise ValueError(f"the encoding is {encoding}; this model needs {needed}")
    if (encoding.qkv_heads, encoding.output_heads) != (heads, heads):
        raise ValueError(f"{encoding.name} changes the number of heads, which the projections of this model do not fit")
    if model.patch_drop is not None and not isinstance(model.patch_drop, nn.Identity) and encoding.needs_grid:
        raise ValueError(f"patch dropout leaves no full grid, which {encoding.name} needs")
    return encoding


class TimmRope(nn.Module):
    """A rotary encoding of mmpe as a rotary module of timm, for `model.rope` of an Eva model or own code.

    The table is made at every call from the sizes asked for: nothing is cached, so nothing is stale. Give the
    attention layers this module's `rotate_half`, and `model.rope_mixed` its `per_layer`.

    Args:
        encoding: a rotary encoding in two axes.
        feat_shape: (rows, columns) that `get_embed()` without a shape is for.

    Example:
        >>> from mmpe import create_encoding
        >>> TimmRope(create_encoding("rope_axial", dim=64, heads=4), (2, 3)).get_embed().shape
        torch.Size([6, 32])
    """

    def __init__(self, encoding: PositionEncoding, feat_shape: Sequence[int] | None = None) -> None:
        super().__init__()
        if not isinstance(encoding, RotaryEncoding):
            raise ValueError(f"timm's rotary modules rotate q and k; {encoding.name!r} is no rotary encoding")
        if encoding.terms != ("queries_keys",) or encoding.output_heads != encoding.heads:
            raise ValueError(f"timm's rotary modules rotate q and k and no more; {encoding.name!r} does more than that")
        self.encoding = encoding
        self.feat_shape = None if feat_shape is None else list(feat_shape)
        self.dim, self.num_heads, self.depth = encoding.head_dim, encoding.heads, encoding.depth

    @property
    def _rotary(self) -> Any:
        return self.encoding

    @property
    def rotate_half(self) -> bool:
        """The pairing that attention must rotate with, `half` or `rotate_half` in timm."""
        return self._rotary.half_pairing

    @property
    def per_layer(self) -> bool:
        """Whether `get_embed` has a first axis for the blocks, as timm's mixed module has."""
        return self._rotary.table_layers is not None

    def get_embed(self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Sines, then cosines: (N, 2 D), or (L, H, N, 2 D) where blocks and heads differ.

        Args:
            shape: (rows, columns); by default `feat_shape`.
            dtype: of the result; float32 by default.
        """
        sizes = shape if shape is not None else self.feat_shape
        if sizes is None:
            raise ValueError("give get_embed a shape, or build TimmRope with feat_shape")
        device = next((p.device for p in self.encoding.parameters()), None)
        positions = Positions.of_size([int(size) for size in sizes], device=device)
        table = _whole_heads(
            timm_table(self._rotary.rotary_table(positions), self.rotate_half), self.dim, self.rotate_half
        )
        return table if dtype is None else table.to(dtype)

    def get_batch_embeds(
        self, shapes: Sequence[Sequence[int]], seq_len: int | None = None, dtype: torch.dtype | None = None
    ) -> list[Tensor] | Tensor:
        """`get_embed` for each shape: a list, or padded with zeros to `seq_len` tokens and stacked."""
        embeds = [self.get_embed(shape, dtype) for shape in shapes]
        if seq_len is None:
            return embeds
        padded = [nn.functional.pad(e, (0, 0, 0, seq_len - e.shape[-2])) for e in embeds]
        return torch.stack(padded, dim=1 if self.per_layer else 0)

    def update_feat_shape(self, feat_shape: Sequence[int]) -> None:
        """Change the shape that `get_embed()` is for."""
        self.feat_shape = list(feat_shape)

    def init_non_persistent_buffers(self) -> None:
        """Rebuild derived buffers of the encoding."""
        self.encoding.init_non_persistent_buffers()

    def reset_parameters(self) -> None:
        """Draw the encoding's parameters anew."""
        self.encoding.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters without weight decay."""
        return {f"encoding.{name}" for name in self.encoding.no_weight_decay()}


def _whole_heads(table: Tensor, head_dim: int, half: bool) -> Tensor:
    """Extend a partial rotation to the whole head, with sine 0 and cosine 1 for the other channels."""
    rotated = table.shape[-1] // 2
    if rotated == head_dim:
        return table
    if half:
        raise ValueError("timm rotates whole heads; a partial rotation in half-split pairs has no table for that")
    sin, cos = table.split(rotated, dim=-1)
    rest = (0, head_dim - rotated)
    return torch.cat([nn.functional.pad(sin, rest), nn.functional.pad(cos, rest, value=1.0)], dim=-1)
