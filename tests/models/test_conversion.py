"""Conversion between timm's ViTs and ours: the same logits, at the trained size and at another one."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from mmpe.models.conversion import from_timm, to_timm
from mmpe.models.vit import VisionTransformer

SMALL = {"img_size": 64, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 7}
DYNAMIC = {**SMALL, "dynamic_img_size": True}
TIMM_MODELS = {
    "plain": ("vit_small_patch16_224", {}),
    "plain_nope": ("vit_small_patch16_224", {"pos_embed": "none"}),
    "registers_gap": ("vit_small_patch16_224", {"reg_tokens": 3, "class_token": False, "global_pool": "avg"}),
    "deit3": ("deit3_small_patch16_224", {}),
    "dinov2": ("vit_small_patch14_reg4_dinov2", {"img_size": 56, "num_classes": 7}),
    "clip_norms": ("vit_small_patch16_224", {"pre_norm": True, "norm_layer": nn.LayerNorm, "qk_norm": True}),
    "swiglu": ("vit_giant_patch14_dinov2", {"img_size": 56, "num_classes": 7, "mlp_ratio": 2.5}),
    "siglip": ("vit_base_patch16_siglip_224", {}),
    "axial": ("vit_small_patch16_rope_224", {}),
    "axial_ape": ("vit_small_patch16_rope_ape_224", {}),
    "mixed": ("vit_small_patch16_rope_mixed_224", {}),
    "mixed_ape": ("vit_small_patch16_rope_mixed_ape_224", {}),
    "sbb_registers": ("vit_medium_patch16_rope_reg1_gap_256", {"img_size": 64, "ref_feat_shape": (4, 4)}),
    "eva02": ("eva02_tiny_patch14_224", {"img_size": 56}),
    "eva02_norms": ("eva02_base_patch14_224", {"img_size": 56}),
    "dinov3": ("vit_small_patch16_dinov3", {"num_classes": 7}),
    "half": ("vit_small_patch16_rope_224", {"rope_rotate_half": True}),
}


def timm_model(case: str, **extra: object) -> nn.Module:
    """A tiny timm model with weights far from their start, where a wrong term would show."""
    name, options = TIMM_MODELS[case]
    torch.manual_seed(0)
    model = timm.create_model(name, **{**DYNAMIC, **options, **extra})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter) * (1.0 if parameter.dim() < 2 else 0.3))
    return model.eval()


def images(model: nn.Module, rows: int, columns: int) -> torch.Tensor:
    patch = model.patch_embed.patch_size[0]
    return torch.randn(2, 3, rows * patch, columns * patch, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", TIMM_MODELS)
def test_logits_equal_those_of_timm(case: str) -> None:
    theirs = timm_model(case)
    ours = from_timm(theirs)
    for rows, columns in ((4, 4), (3, 6), (6, 4)):
        x = images(theirs, rows, columns)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(ours.forward_features(x), theirs.forward_features(x), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("case", [c for c in TIMM_MODELS if c != "siglip"])
def test_way_back_gives_timm_the_same_logits(case: str) -> None:
    theirs = timm_model(case)
    ours = from_timm(theirs)
    name, kwargs, state = to_timm(ours)
    again = timm.create_model(name, **kwargs).eval()
    again.load_state_dict(state)
    for rows, columns in ((4, 4), (5, 3)):
        x = images(theirs, rows, columns)
        with torch.no_grad():
            torch.testing.assert_close(again(x), theirs(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", ["tiny", "small", "base", "large"])
def test_names_are_those_of_timm_and_weights_fit(size: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(f"mmpe_vit_{size}_patch16_224", encoding="ape_learned")
        name, kwargs, state = to_timm(model)
        assert name == f"vit_{size}_patch16_224"
        shapes = {key: value.shape for key, value in timm.create_model(name, **kwargs).state_dict().items()}
    assert shapes == {key: value.shape for key, value in state.items()}


@pytest.mark.parametrize("case", ["axial", "mixed", "dinov3", "half"])
@pytest.mark.parametrize("half", [False, True])
def test_pairing_of_channels_is_converted(case: str, half: bool) -> None:
    """nanotron 241: a converter that ignores the pairing flag corrupts attention without an error."""
    theirs = timm_model(case, qk_norm=True)
    ours = from_timm(theirs, half=half)
    x = images(theirs, 3, 5)
    assert ours.encoding.half_pairing is half
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)
        name, kwargs, state = to_timm(ours)
        back = timm.create_model(name, **kwargs).eval()
        back.load_state_dict(state)
        torch.testing.assert_close(back(x), theirs(x), atol=1e-5, rtol=1e-5)
        wrong = VisionTransformer(
            **{**ours.config, "encoding_options": {**ours.config["encoding_options"], "half": not half}}
        )
        wrong.load_state_dict(ours.state_dict())
        assert (wrong.eval()(x) - theirs(x)).abs().max() > 1e-3  # the flag does matter at these weights


@pytest.mark.parametrize("case", ["plain", "mixed_ape", "eva02"])
def test_state_dict_with_the_name_of_its_architecture(case: str) -> None:
    theirs = timm_model(case)
    name, options = TIMM_MODELS[case]
    ours = from_timm(theirs.state_dict(), name, timm_kwargs={**SMALL, **options}).eval()
    x = images(theirs, 4, 4)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_state_dict_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="architecture"):
        from_timm(timm_model("plain").state_dict())


def test_our_scaled_positions_are_eva_reference_grid() -> None:
    torch.manual_seed(0)
    options = {"base": 10000.0, "grid_indexing": "ij"}
    ours = VisionTransformer(**SMALL, encoding="rope_axial", encoding_options=options, position_scaling="scaled")
    name, kwargs, state = to_timm(ours.eval())
    theirs = timm.create_model(name, **kwargs).eval()
    theirs.load_state_dict(state)
    x = torch.randn(2, 3, 96, 128)
    with torch.no_grad():
        torch.testing.assert_close(theirs(x), ours(x), atol=1e-5, rtol=1e-5)
        ours.set_position_scaling("raw")
        assert (theirs(x) - ours(x)).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("resnet18", {}, "ResNet"),
        (
            "vit_base_patch32_plus_256",
            {"img_size": 64, "block_fn": timm.models.vision_transformer.ResPostBlock},
            "ResPost",
        ),
        ("beit_base_patch16_224", {}, "Beit"),
        ("vit_small_patch16_dinov3", {"attn_only_layer_scale": True, "num_classes": 7}, "LayerScale"),
    ],
)
def test_foreign_parts_are_named(name: str, kwargs: dict[str, object], message: str) -> None:
    arguments = {**SMALL, **kwargs} if "resnet" not in name else {}
    with pytest.raises(ValueError, match=message):
        from_timm(timm.create_model(name, **arguments))


@pytest.mark.parametrize(
    ("encoding", "options", "message"),
    [
        ("pape", {}, "timm has no"),
        ("rope_mixed", {"share_layers": True}, "share_"),
        ("rope_axial", {"spectrum": "pixel"}, "cannot express"),
    ],
)
def test_what_timm_lacks_is_named(encoding: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_timm(VisionTransformer(**SMALL, encoding=encoding, encoding_options=options))


def test_checkpoint_with_a_table_needs_a_model_with_one(tmp_path: pytest.TempPathFactory) -> None:
    path = tmp_path / "timm.pth"
    torch.save(timm_model("plain").state_dict(), path)
    with pytest.raises(ValueError, match="ape_learned"):
        VisionTransformer(**SMALL, encoding="rope_mixed").load_pretrained(path)
