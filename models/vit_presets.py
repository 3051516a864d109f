"""The sizes of the vision transformer in timm's registry; the encoding is a keyword of `timm.create_model`.

    timm.create_model("mmpe_vit_small_patch16_224", encoding="rope_mixed", img_size=256)

mmpe imports this module when timm is there. It imports the model only when one is created, so that `import timm` stays
as fast as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from .vit_cfg import default_cfg

if TYPE_CHECKING:
    from .vit import VisionTransformer

_TINY = {"embed_dim": 192, "depth": 12, "num_heads": 3}
_SMALL = {"embed_dim": 384, "depth": 12, "num_heads": 6}
_BASE = {"embed_dim": 768, "depth": 12, "num_heads": 12}
_LARGE = {"embed_dim": 1024, "depth": 24, "num_heads": 16}


def _create(variant: str, pretrained: bool, arguments: dict[str, Any]) -> VisionTransformer:
    from .vit import VisionTransformer
    from .vit_checkpoints import checkpoint_filter_fn

    features = {"out_indices": arguments.pop("out_indices", 3), "feature_cls": "getter"}
    return build_model_with_cfg(
        VisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=features,
        **arguments,
    )


def _cfgs() -> dict[str, dict[str, Any]]:
    sizes, patches = ("tiny", "small", "base", "large"), (16, 14, 8)
    names = [f"mmpe_vit_{size}_patch{patch}_224" for size in sizes for patch in patches]
    return {name: default_cfg((3, 224, 224)) for name in names}


default_cfgs = generate_default_cfgs(_cfgs())


@register_model
def mmpe_vit_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """ViT-Ti/16."""
    return _create("mmpe_vit_tiny_patch16_224", pretrained, {"patch_size": 16, **_TINY, **kwargs})


@register_model
def mmpe_vit_tiny_patch14_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """ViT-Ti/14."""
    return _create("mmpe_vit_tiny_patch14_224", pretrained, {"patch_size": 14, **_TINY, **kwargs})


@register_model
def mmpe_vit_tiny_patch8_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """ViT-Ti/8."""
    return _create("mmpe_vit_tiny_patch8_224", pretrained, {"patch_size": 8, **_TINY, **kwargs})


@register_model
def mmpe_vit_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """ViT-S/16."""
    return _create("mmpe_vit_small_patch16_224", pretrained, {"patch_size": 16, **_SMALL, **kwargs})


@register_model
def mmpe_vit_small_patch14_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """ViT-S/14."""
    return _create("mmpe_vit_small_patch14_224", pretrained, {"patch_size": 14, **_SMALL, **kwargs})


@register_model
def mmpe_vit_small_patch8_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """ViT-S/8."""
    return _create("mmpe_vit_small_patch8_224", pretrained, {"patch_size": 8, **_SMALL, **kwargs})


@register_model
def mmpe_vit_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """ViT-B/16."""
    return _create("mmpe_vit_base_patch16_224", pretrained, {"patch_size": 16, **_BASE, **kwargs})


@register_model
def mmpe_vit_base_patch14_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """ViT-B/14."""
    return _create("mmpe_vit_base_patch14_224", pretrained, {"patch_size": 14, **_BASE, **kwargs})


@register_model
def mmpe_vit_base_patch8_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """ViT-B/8."""
    return _create("mmpe_vit_base_patch8_224", pretrained, {"patch_size": 8, **_BASE, **kwargs})


@register_model
def mmpe_vit_large_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """ViT-L/16."""
    return _create("mmpe_vit_large_patch16_224", pretrained, {"patch_size": 16, **_LARGE, **kwargs})


@register_model
def mmpe_vit_large_patch14_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """ViT-L/14."""
    return _create("mmpe_vit_large_patch14_224", pretrained, {"patch_size": 14, **_LARGE, **kwargs})


@register_model
def mmpe_vit_large_patch8_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """ViT-L/8."""
    return _create("mmpe_vit_large_patch8_224", pretrained, {"patch_size": 8, **_LARGE, **kwargs})
