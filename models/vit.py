"""Vision transformer on timm's building blocks, with any position encoding of mmpe, for images and clips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import PyTorchModelHubMixin
from timm.layers import AttentionPoolLatent, get_act_layer, global_pool_nlc, to_2tuple
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmpe.encoding import SumEncoding
from mmpe.integrations import features
from mmpe.integrations.backbone import BlockTerms, create_for_grid, drop_patches
from mmpe.positions import Positions

from . import vit_checkpoints
from .vit_blocks import Attention, Block, NormLayer, drop_path_rates, heads_of, init_weights
from .vit_cfg import default_cfg
from .vit_checks import check_choices, check_pool, check_rates, norm_layer_of
from .vit_stem import check_size, make_stem, own_size

SCALINGS = ("raw", "scaled")
PositionScaling = Literal["raw", "scaled"]


class VisionTransformer(nn.Module, PyTorchModelHubMixin, library_name="mmpe", tags=["position-encoding"]):
    """Vision transformer (ViT, arXiv 2010.11929) with a position encoding of your choice; the arguments are timm's.

    One model takes images of any size and shape, batch by batch. `timm.create_model("mmpe_vit_small_patch16_224")`
    builds it too, and so does `VisionTransformer.from_pretrained(folder)`.

    Args:
        img_size: size of the training images, one number or (height, width); position tables have its grid.
        patch_size: size of a patch, one number or (height, width).
        in_chans: channels of the image.
        num_classes: classes of the head; 0 for none.
        global_pool: "token" (class token), "avg", "avgmax", "max", "map" (attention pooling) or "" (all tokens).
        embed_dim: model width C.
        depth: number of blocks.
        num_heads: attention heads; must divide embed_dim.
        mlp_ratio: hidden width of the MLP over C.
        swiglu: gated MLP: True with two matrices, "packed" with one (half of its width gates), False for none.
        qkv_bias: biases in the qkv projection.
        qk_norm: normalise queries and keys, before position acts on them.
        scale_attn_norm: norm after attention, before its projection.
        scale_mlp_norm: norm inside the MLP.
        init_values: start of LayerScale; None for no LayerScale.
        class_token: prepend a class token.
        reg_tokens: number of register tokens after the class token.
        no_embed_class: a position table has no rows for class and register tokens.
        pre_norm: norm before the first block.
        fc_norm: norm after pooling instead of before; by default with "avg", "avgmax" and "max".
        dynamic_img_size: accept any image size; False accepts img_size alone.
        dynamic_img_pad: pad images at the bottom and right to whole patches instead of refusing them.
        drop_rate: dropout before the head.
        pos_drop_rate: dropout of the tokens after the token term of the encoding.
        patch_drop_rate: share of the patches dropped in training; positions follow the kept ones.
        proj_drop_rate: dropout after projections.
        attn_drop_rate: dropout of attention weights.
        drop_path_rate: stochastic depth of the last block; earlier ones rise linearly to it.
        weight_init: "" (truncated normal), "jax", "jax_nlhb", "moco" or "skip".
        norm_layer: name of a norm of timm, such as "layernorm" or "rmsnorm".
        norm_eps: epsilon of all norms; None is that of the norm, 1e-6.
        act_layer: name of an activation of timm, such as "gelu" or "silu".
        encoding: name of a position encoding (`mmpe.list_encodings(axes=2)`) or a sum such as "ape_learned+rope_mixed".
        encoding_options: options of the encoding (`mmpe.describe(name)`).
        position_scaling: "raw" counts patches; "scaled" stretches the positions of every image to the trained grid.
        trained_grid: (rows, columns) that "scaled" stretches to, (time, rows, columns) with clips; by default the grid
            of img_size and num_frames.
        num_frames: frames of the training clips, which makes it a model of clips (B, in_chans, T, H, W) of any length,
            with an encoding over time, rows and columns; None for images.
        tubelet_size: frames of a token of clips.
        temporal_positions: False places all tokens of a clip at one time, an ablation.

    Example:
        >>> model = VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=2, num_classes=10)
        >>> model(torch.rand(1, 3, 40, 56)).shape
        torch.Size([1, 10])
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        swiglu: bool | Literal["packed"] = False,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        scale_attn_norm: bool = False,
        scale_mlp_norm: bool = False,
        init_values: float | None = None,
        class_token: bool = True,
        reg_tokens: int = 0,
        no_embed_class: bool = False,
        pre_norm: bool = False,
        fc_norm: bool | None = None,
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = False,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        patch_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        weight_init: Literal["", "skip", "jax", "jax_nlhb", "moco"] = "",
        norm_layer: str = "layernorm",
        norm_eps: float | None = None,
        act_layer: str = "gelu",
        encoding: str = "rope_mixed",
        encoding_options: dict[str, Any] | None = None,
        position_scaling: PositionScaling = "raw",
        trained_grid: tuple[int, ...] | None = None,
        num_frames: int | None = None,
        tubelet_size: int = 2,
        temporal_positions: bool = True,
    ) -> None:
        super().__init__()
        check_choices(global_pool, class_token, weight_init, embed_dim, num_heads)
        check_rates(drop_rate, pos_drop_rate, patch_drop_rate, proj_drop_rate, attn_drop_rate, drop_path_rate)
        norm = norm_layer_of(norm_layer, norm_eps)
        self.num_classes, self.global_pool, self.depth, self.grad_checkpointing = num_classes, global_pool, depth, False
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        size = (img_size, patch_size, num_frames, tubelet_size)
        self._make_stem(size, in_chans, dynamic_img_size, dynamic_img_pad, not pre_norm)
        self._make_prefix(class_token, reg_tokens)
        table_prefix = 0 if no_embed_class else self.num_prefix_tokens
        self._make_encoding(encoding, num_heads, table_prefix, encoding_options, patch_drop_rate)
        self.trained_grid = self.grid_size if trained_grid is None else _grid_of(trained_grid, len(self.grid_size))
        self.temporal_positions = temporal_positions
        if not temporal_positions and self.encoding.needs_grid:
            raise ValueError(f"temporal_positions=False leaves no grid in time, which encoding={encoding!r} needs")
        self.set_position_scaling(position_scaling)
        self.pos_drop, self.patch_drop_rate = nn.Dropout(pos_drop_rate), patch_drop_rate
        self.norm_pre = norm(embed_dim) if pre_norm else nn.Identity()
        attention = partial(Attention, qkv_bias=qkv_bias, qk_norm=qk_norm, scale_norm=scale_attn_norm)
        attention = partial(attention, attn_drop=attn_drop_rate, proj_drop=proj_drop_rate, **heads_of(self.encoding))
        block = partial(Block, embed_dim, num_heads, norm, get_act_layer(act_layer), mlp_ratio, swiglu, scale_mlp_norm)
        block = partial(block, init_values, attention=attention, proj_drop=proj_drop_rate)
        self.blocks = nn.Sequential(*(block(drop_path=rate) for rate in drop_path_rates(drop_path_rate, depth)))
        self._make_head(norm, num_heads, mlp_ratio, fc_norm, drop_rate)
        self.weight_init = weight_init
        if weight_init != "skip":
            self._draw_own_weights(weight_init)
        vit_checkpoints.register_hooks(self)

    def _make_stem(
        self,
        size: tuple[int | tuple[int, int], int | tuple[int, int], int | None, int],
        in_chans: int,
        dynamic_size: bool,
        pad: bool,
        bias: bool,
    ) -> None:
        image, patch, frames, tubelet = size
        self.in_chans, self.dynamic_img_size, self.num_frames = in_chans, dynamic_size, frames
        sizes = (to_2tuple(image), to_2tuple(patch), frames, tubelet)
        self.patch_embed = make_stem(*sizes, in_chans, self.embed_dim, bias, pad)
        check_size(self.patch_embed, own_size(self.patch_embed), dynamic_size)
        reduction = self.patch_embed.feat_ratio()
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": self.embed_dim, "reduction": reduction} for i in range(self.depth)
        ]
        self.pretrained_cfg = self.default_cfg = default_cfg((in_chans, *self.patch_embed.img_size))

    def _make_prefix(self, class_token: bool, reg_tokens: int) -> None:
        self.num_prefix_tokens, self.has_class_token = int(class_token) + reg_tokens, class_token
        self.cls_token = nn.Parameter(torch.zeros(1, 1, self.embed_dim)) if class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, reg_tokens, self.embed_dim)) if reg_tokens else None

    def _make_encoding(
        self, name: str, heads: int, table_prefix: int, options: dict[str, Any] | None, patch_drop_rate: float
    ) -> None:
        self.encoding_name = name
        self.encoding = create_for_grid(name, self.embed_dim, heads, self.depth, self.grid_size, table_prefix, options)
        if patch_drop_rate > 0 and self.encoding.needs_grid:
            raise ValueError(f"patch_drop_rate={patch_drop_rate} leaves no full grid, which encoding={name!r} needs")

    def _make_head(
        self, norm: NormLayer, num_heads: int, mlp_ratio: float, fc_norm: bool | None, drop_rate: float
    ) -> None:
        width, pools_first = self.embed_dim, self.global_pool in ("avg", "avgmax", "max")
        if fc_norm is not None:
            pools_first = fc_norm
        self.norm = nn.Identity() if pools_first else norm(width)
        self.fc_norm = norm(width) if pools_first else nn.Identity()
        make_pool = partial(AttentionPoolLatent, width, num_heads=num_heads, mlp_ratio=mlp_ratio, norm_layer=norm)
        self.attn_pool = make_pool() if self.global_pool == "map" else None
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(width, self.num_classes) if self.num_classes > 0 else nn.Identity()

    def init_weights(self, mode: str = "") -> None:
        """Draw every parameter anew and rebuild derived buffers, for instance after `to_empty` of a meta model.

        Args:
            mode: one of "", "jax", "jax_nlhb" and "moco"; "" is the mode of construction.
        """
        mode = mode or self.weight_init
        self._draw_own_weights("" if mode == "skip" else mode)
        self.encoding.reset_parameters()
        self.init_non_persistent_buffers()

    def _draw_own_weights(self, mode: str) -> None:
        init_weights(self, mode, self.num_classes, skip="encoding")
        for token in (self.cls_token, self.reg_token):
            if token is not None:
                nn.init.normal_(token, std=1e-6)

    def init_non_persistent_buffers(self) -> None:
        """Rebuild the buffers that no checkpoint holds."""
        self.encoding.init_non_persistent_buffers()

    @property
    def grid_size(self) -> tuple[int, ...]:
        """Rows and columns of patches of an image of the current `img_size`; with clips, time before them."""
        return self.patch_embed.dynamic_feat_size(own_size(self.patch_embed))

    def set_position_scaling(self, mode: PositionScaling) -> None:
        """Choose how positions of other image sizes are counted.

        Args:
            mode: "raw" counts patches; "scaled" stretches positions to the trained grid (position interpolation).
        """
        if mode not in SCALINGS:
            raise ValueError(f"position_scaling must be one of {SCALINGS}, got {mode!r}")
        self.position_scaling = mode
        self._record(position_scaling=mode)

    def positions_for(self, *size: int, device: torch.device | str | None = None) -> Positions:
        """Positions of the patches of images of H, W pixels, or of clips of T, H, W, in the current scaling."""
        check_size(self.patch_embed, size, self.dynamic_img_size)
        grid = self.patch_embed.dynamic_feat_size(size)
        positions = Positions.of_size(grid, prefix=self.num_prefix_tokens, device=device)
        if self.position_scaling == "scaled":
            positions = positions.scaled_to(self.trained_grid)
        if self.num_frames is not None and not self.temporal_positions:
            still = torch.tensor([0.0, 1.0, 1.0], device=device)
            positions = replace(positions, coords=positions.coords * still, grid_size=None)
        return positions

    def forward_tokens(self, x: Tensor, positions: Positions | None = None) -> tuple[Tensor, Positions]:
        """Images (B, in_chans, H, W) -> tokens (B, P + N, C) before the first block, and their positions."""
        axes = "H, W" if self.num_frames is None else "T, H, W"
        if x.dim() != (4 if self.num_frames is None else 5) or x.shape[1] != self.in_chans:
            raise ValueError(f"{self._inputs} must be (B, {self.in_chans}, {axes}), got shape {tuple(x.shape)}")
        grid_positions = self.positions_for(*x.shape[2:], device=x.device)
        x = self.patch_embed(x).flatten(1, -2)  # (B, N, C)
        positions = grid_positions if positions is None else self._own_positions(positions, x)
        positions = self.encoding.place(positions, x.shape[0])
        prefix = [t.expand(x.shape[0], -1, -1) for t in (self.cls_token, self.reg_token) if t is not None]
        x = torch.cat([*(t.to(x.dtype) for t in prefix), x], dim=1)  # (B, P + N, C)
        x = self.pos_drop(self.encoding.embed(x, positions, layer=0))
        if self.training and self.patch_drop_rate > 0:
            x, positions = drop_patches(x, positions, self.patch_drop_rate)
        return self.norm_pre(x), positions

    @property
    def _inputs(self) -> str:
        return "images" if self.num_frames is None else "clips"

    def _own_positions(self, positions: Positions, patches: Tensor) -> Positions:
        # The caller knows where the patches are; how many tokens precede them is the model's business.
        coords = positions.coords
        if coords.shape[-2] != patches.shape[1] or (coords.dim() > 2 and coords.shape[0] != patches.shape[0]):
            raise ValueError(
                f"positions of shape {tuple(coords.shape)} do not fit {patches.shape[0]} {self._inputs} of "
                f"{patches.shape[1]} patches; give (N, A) or (B, N, A), without prefix tokens"
            )
        return replace(positions.to(patches.device), prefix=self.num_prefix_tokens)

    def forward_block(
        self, layer: int, x: Tensor, terms: BlockTerms, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Tokens x (B, P + N, C) through block `layer`, after the token term that the encoding has there."""
        if layer > 0:
            x = self.encoding.embed(x, terms.positions, layer=layer)
        block, terms_of = self.blocks[layer], partial(terms, layer=layer)
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, terms_of, attn_mask, is_causal, use_reentrant=False)
        return block(x, terms_of, attn_mask, is_causal)

    def forward_features(
        self,
        x: Tensor,
        positions: Positions | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Images (B, in_chans, H, W) -> tokens (B, P + N, C) after the last norm.

        Args:
            x: images of one size, any size.
            positions: where the patches are, if not on their grid: (N, 2) or, per sample, (B, N, 2); used as given,
                whatever the position scaling.
            attn_mask: broadcasts to (B, H, P + N, P + N); True may attend.
            is_causal: hide later tokens.
        """
        x, positions = self.forward_tokens(x, positions)
        terms = BlockTerms(self.encoding, positions)
        for layer in range(len(self.blocks)):
            x = self.forward_block(layer, x, terms, attn_mask, is_causal)
        return self.norm(x)

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """Tokens (B, P + N, C) -> (B, C), or all tokens with pool_type "" ."""
        if self.attn_pool is not None:
            return self.attn_pool(x[:, self.num_prefix_tokens :])
        pool_type = self.global_pool if pool_type is None else pool_type
        return global_pool_nlc(x, pool_type=pool_type, num_prefix_tokens=self.num_prefix_tokens)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, P + N, C) -> logits (B, num_classes), or the features before the head."""
        x = self.head_drop(self.fc_norm(self.pool(x)))
        return x if pre_logits else self.head(x)

    def forward(
        self,
        x: Tensor,
        positions: Positions | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Images (B, in_chans, H, W) -> logits (B, num_classes); the arguments are those of `forward_features`."""
        return self.forward_head(self.forward_features(x, positions, attn_mask, is_causal))

    def forward_intermediates(
        self, x: Tensor, indices: int | Sequence[int] | None = None, **options: Any
    ) -> list[Any] | tuple[Tensor, list[Any]] | dict[str, Any]:
        """Outputs of chosen blocks, as maps (B, C, H', W') unless asked otherwise.

        Args:
            x: images.
            indices: the last n blocks, or the blocks listed; None for all.
            options: timm's return_prefix_tokens, norm, stop_early, output_fmt ("NCHW" or "NLC"), intermediates_only,
                output_dict, attn_mask, is_causal; and positions.
        """
        return features.forward_intermediates(self, x, indices, **options)

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        attn_mask: Tensor | None = None,
    ) -> list[Any]:
        """DINO's interface to `forward_intermediates`."""
        options: dict[str, Any] = {"return_prefix_tokens": return_prefix_tokens, "norm": norm, "attn_mask": attn_mask}
        options |= {"output_fmt": "NCHW" if reshape else "NLC", "intermediates_only": True}
        return features.forward_intermediates(self, x, n, **options)  # type: ignore[return-value]

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the blocks after the last one asked for, and the last norm and the head if told so."""
        taken, last = features.take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.fc_norm = nn.Identity()
            self.reset_classifier(0, "")
        return taken

    def get_classifier(self) -> nn.Module:
        """The classification head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head.

        Args:
            num_classes: its classes; 0 for none.
            global_pool: another pooling; None keeps it.
        """
        if global_pool is not None:
            if global_pool == "map" and self.attn_pool is None:
                raise ValueError("global_pool='map' has weights; build the model with it instead")
            check_pool(global_pool, self.has_class_token)
            self.attn_pool = self.attn_pool if global_pool == "map" else None
            self.global_pool = global_pool
        weight = self.patch_embed.proj.weight
        head = nn.Linear(self.embed_dim, num_classes) if num_classes > 0 else nn.Identity()
        self.num_classes, self.head = num_classes, head.to(weight.device, weight.dtype).train(self.training)
        # Where the norm sits followed from the first pooling; the new one must not move it when the model is rebuilt.
        pools_first = not isinstance(self.fc_norm, nn.Identity)
        self._record(num_classes=num_classes, global_pool=self.global_pool, fc_norm=pools_first)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass instead of storing what they need."""
        self.grad_checkpointing = enable

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
        num_frames: int | None = None,
    ) -> None:
        """Make another size of images, patches or clips the model's own: kernel and position tables are resampled.

        The grid that "scaled" positions are stretched to stays the one trained on.
        """
        vit_checkpoints.set_input_size(self, img_size, patch_size, num_frames)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters without weight decay: tokens and everything of the encoding."""
        tokens = {name for name in ("cls_token", "reg_token") if getattr(self, name) is not None}
        return tokens | {f"encoding.{name}" for name in self.encoding.no_weight_decay()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that sort parameters into the stem and the blocks, for layer-wise learning rates.

        A token term belongs to the stem; what acts in all blocks has the full rate, as frequencies have in timm.
        """
        parts = enumerate(self.encoding) if isinstance(self.encoding, SumEncoding) else [(None, self.encoding)]
        names = ["encoding" if i is None else rf"encoding\.parts\.{i}\." for i, part in parts if part.kind == "token"]
        stem = "|".join(["cls_token", "reg_token", "patch_embed", "norm_pre", *names])
        return {"stem": rf"^(?:{stem})", "blocks": [(r"^blocks\.(\d+)", None), (r"^norm\.", (99999,))]}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights; a checkpoint of another encoding or depth is a ValueError that says so, unless not `strict`."""
        signed = getattr(state_dict, "_metadata", {}).get("", {}).get("encoding")
        problem = vit_checkpoints.mismatch(self, state_dict, signed) if strict else None
        if problem is not None:
            raise ValueError(problem)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def load_pretrained(self, checkpoint_path: str | Path, strict: bool = True) -> None:
        """Load weights of this model, or of a timm ViT, resampling patch kernel and position tables to this grid.

        Args:
            checkpoint_path: a .safetensors or torch file, or a folder of `save_pretrained`.
            strict: refuse missing and superfluous weights.
        """
        vit_checkpoints.load_pretrained(self, Path(checkpoint_path), strict)

    @classmethod
    def _load_as_safetensor(cls, model: Any, model_file: str, map_location: str, strict: bool) -> Any:
        model.load_state_dict(vit_checkpoints.read_state_dict(Path(model_file), map_location), strict=strict)
        return model.eval()

    @classmethod
    def _from_pretrained(cls, *, strict: bool = True, **arguments: Any) -> Any:
        # The mixin's own default would load a checkpoint of another encoding and leave ours as drawn.
        return super()._from_pretrained(strict=strict, **arguments)

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that build this model as it is now, as plain values."""
        return dict(self._hub_mixin_config or {})  # type: ignore[arg-type]

    def _record(self, **arguments: Any) -> None:
        """Keep the constructor arguments true that `save_pretrained` and timm store."""
        self._hub_mixin_config = self.config | arguments
        stored = getattr(self, "_model_args", None)
        if isinstance(stored, dict):
            self.__dict__["_model_args"] = stored | arguments


def _grid_of(sizes: Sequence[int] | int, axes: int) -> tuple[int, ...]:
    grid = (sizes,) * axes if isinstance(sizes, int) else tuple(sizes)
    if len(grid) != axes:
        raise ValueError(f"trained_grid={sizes} must give one size for each of {axes} axes")
    return grid
