"""Encodings of mmpe inside timm's models, and the registration of our models in timm."""

from __future__ import annotations

import copy
import io
import subprocess
import sys

import pytest
import timm
import torch
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn

import mmpe
from mmpe.integrations.backbone import drop_patches
from mmpe.integrations.timm import TimmRope, restore, set_position_encoding

SMALL = {"img_size": 64, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 5, "dynamic_img_size": True}
MODELS = {
    "plain": ("vit_small_patch16_224", {}),
    "registers": ("vit_small_patch16_224", {"reg_tokens": 2, "no_embed_class": True, "qk_norm": True}),
    "mixed": ("vit_small_patch16_rope_mixed_224", {}),
    "axial_ape": ("vit_small_patch16_rope_ape_224", {}),
    "eva02": ("eva02_tiny_patch14_224", {"img_size": 56}),
    "dinov3": ("vit_small_patch16_dinov3", {}),
}


def build(case: str, **extra: object) -> nn.Module:
    name, options = MODELS[case]
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **options, **extra})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def images(model: nn.Module, rows: int = 4, columns: int = 4, batch: int = 2) -> Tensor:
    patch = model.patch_embed.patch_size[0]
    return torch.randn(batch, 3, rows * patch, columns * patch)


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()


@pytest.mark.parametrize("order", ["import timm, mmpe", "import mmpe.models.vit, timm"])
def test_timm_finds_our_models_when_it_came_first(order: str) -> None:
    code = f"{order}; print(len(timm.list_models('mmpe_vit_*')), timm.is_model('mmpe_vit_small_patch16_224'))"
    assert run(code) == "12 True"


def test_timm_finds_our_models_when_it_comes_later_and_mmpe_does_not_import_it() -> None:
    code = (
        "import importlib.util, sys, mmpe; importlib.util.find_spec('timm'); print('timm' in sys.modules, end=' ');"
        "import timm; print(timm.is_model('mmpe_vit_base_patch8_224'), end=' ');"
        "print(any('WaitForTimm' in repr(finder) for finder in sys.meta_path))"
    )
    assert run(code) == "False True False"


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("encoding", ["pape", "rope_mixed", "cpe", "alibi_2d", "ape_learned+rope_axial", "none"])
def test_swap_trains_at_any_size(case: str, encoding: str) -> None:
    model = build(case)
    kept = {name for name, _ in model.named_parameters()} - {"pos_embed", "rope.freqs"}
    assert set_position_encoding(model, encoding) is model
    names = {name for name, _ in model.named_parameters()}
    assert {name for name in names if not name.startswith("encoding.")} == kept
    assert {f"encoding.{name}" for name in model.encoding.no_weight_decay()} <= model.no_weight_decay() & names
    model.train()
    model(images(model, 3, 5)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("case", "encoding", "options"),
    [
        ("plain", "ape_learned", {}),
        ("registers", "ape_learned", {}),
        ("mixed", "rope_mixed", {}),
        ("axial_ape", "ape_learned+rope_axial", {}),
        ("eva02", "ape_learned+rope_axial", {"convention": "eva02"}),
        ("dinov3", "rope_axial", {"convention": "dinov3"}),
    ],
)
def test_swap_for_what_the_model_had_changes_nothing(case: str, encoding: str, options: dict[str, object]) -> None:
    model = build(case)
    x = images(model, 3, 5)
    with torch.no_grad():
        expected, had = model(x), [p.clone() for n, p in model.named_parameters() if n in ("pos_embed", "rope.freqs")]
        set_position_encoding(model, encoding, **options)
        for new, old in zip(model.encoding.parameters(), had, strict=True):
            new.copy_(old)
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", MODELS)
def test_restore_undoes_the_swap_exactly(case: str) -> None:
    model = build(case)
    x = images(model, 4, 4)
    before, state, kind = model(x), copy.deepcopy(model.state_dict()), type(model)
    kinds = [type(module) for module in model.modules()]
    set_position_encoding(model, "pape")
    set_position_encoding(model, "rope_axial", base=50.0)
    assert (model(x) - before).abs().max() > 1e-5
    assert restore(model) is model
    assert type(model) is kind
    assert [type(module) for module in model.modules()] == kinds
    assert list(model.state_dict()) == list(state)
    torch.testing.assert_close(model.state_dict(), state, atol=0, rtol=0)
    torch.testing.assert_close(model(x), before, atol=0, rtol=0)
    with pytest.raises(ValueError, match="nothing to restore"):
        restore(model)


def test_restored_model_follows_the_casts_in_between() -> None:
    model = set_position_encoding(build("axial_ape"), "rope_mixed").double()
    restore(model)
    assert model.pos_embed.dtype == torch.float64
    assert model(images(model).double()).dtype == torch.float64


@pytest.mark.parametrize("case", ["plain", "mixed"])
def test_swap_inside_and_around_feature_wrappers(case: str) -> None:
    name, options = MODELS[case]
    kwargs = {**SMALL, **options, "features_only": True, "out_indices": (0, 1)}
    wrapped = set_position_encoding(timm.create_model(name, **kwargs), "pape")
    maps = wrapped(torch.randn(2, 3, 48, 80))
    assert [tuple(m.shape) for m in maps] == [(2, 64, 3, 5)] * 2
    restore(wrapped)
    assert not hasattr(wrapped.model, "encoding")


def test_intermediates_match_the_plain_forward() -> None:
    model = set_position_encoding(build("registers"), "rope_axial")
    x = images(model, 3, 4)
    final, maps = model.forward_intermediates(x, indices=1, norm=True, return_prefix_tokens=True)
    torch.testing.assert_close(final, model.forward_features(x))
    image, prefix = maps[0]
    torch.testing.assert_close(image.flatten(2).transpose(1, 2), final[:, 3:])
    torch.testing.assert_close(prefix, final[:, :3])


@pytest.mark.parametrize("case", ["plain", "axial_ape"])
def test_patch_dropout_indexes_positions_by_sample(case: str) -> None:
    """timm 2549: rotary tables crashed with patch dropout, 12 heads against a batch of 8."""
    model = set_position_encoding(build(case, patch_drop_rate=0.5), "ape_learned+rope_mixed").train()
    assert model(images(model, batch=8)).shape == (8, 5)
    with pytest.raises(ValueError, match="cpe"):
        set_position_encoding(build(case, patch_drop_rate=0.5), "cpe")


def test_dropped_patches_take_their_positions_along() -> None:
    positions = mmpe.Positions.grid(4, 5, prefix=2)
    x = torch.cat([torch.full((2, 2), -1.0), positions.coords])[None].repeat(3, 1, 1)  # tokens that are coordinates
    kept, where = drop_patches(x, positions, 0.4)
    assert kept.shape == (3, 14, 2)
    torch.testing.assert_close(kept[:, 2:], where.coords)
    assert not torch.equal(where.coords[0], where.coords[1])
    ordered = drop_patches(x, positions, 0.4, ordered=True)[1].coords
    index = ordered[..., 0] * 5 + ordered[..., 1]
    assert bool((index.diff(dim=1) > 0).all())


@pytest.mark.parametrize("case", ["plain", "mixed", "eva02"])
def test_state_dict_checkpointing_and_pickle(case: str) -> None:
    model = set_position_encoding(build(case), "rope_mixed")
    x = images(model)
    other = set_position_encoding(build(case), "rope_mixed")
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), model(x))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.load(buffer, weights_only=False)(x), model(x))
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x))
    model(x).sum().backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.set_grad_checkpointing()
    model(x).sum().backward()
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, plain)


@pytest.mark.parametrize("case", ["plain", "mixed"])
def test_swapped_model_compiles_without_graph_breaks(case: str) -> None:
    model = set_position_encoding(build(case), "rope_axial")
    x = images(model, 3, 4)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))


def test_set_input_size_still_works() -> None:
    model = set_position_encoding(build("plain", dynamic_img_size=False), "ape_learned")
    model.set_input_size(img_size=(96, 32))
    assert model(torch.randn(1, 3, 96, 32)).shape == (1, 5)


def test_refusals_name_the_fault() -> None:
    with pytest.raises(ValueError, match="ResNet"):
        set_position_encoding(timm.create_model("resnet18"), "pape")
    with pytest.raises(ValueError, match="rope_mixed"):
        set_position_encoding(build("plain"), "rope_mixd")
    with pytest.raises(ValueError, match="depth=2"):
        set_position_encoding(build("plain"), mmpe.create_encoding("rope_mixed", 64, 2, depth=1))
    with pytest.raises(ValueError, match="built already"):
        set_position_encoding(build("plain"), mmpe.create_encoding("rope_axial", 64, 2), base=3.0)


@pytest.mark.parametrize(
    ("case", "name", "options"),
    [
        ("mixed", "rope_mixed", {}),
        ("axial_ape", "rope_axial", {}),
        ("dinov3", "rope_axial", {"convention": "dinov3"}),
        ("eva02", "rope_axial", {"convention": "eva02"}),
    ],
)
def test_adapter_stands_in_for_the_rotary_module_of_timm(case: str, name: str, options: dict[str, object]) -> None:
    model = build(case)
    x = images(model, 3, 5)
    rope = TimmRope(mmpe.create_encoding(name, 64, 2, depth=2, **options))
    with torch.no_grad():
        expected = model(x)
        if name == "rope_mixed":
            rope.encoding.freqs.copy_(model.rope.freqs)
        torch.testing.assert_close(rope.get_embed((3, 5)), model.rope.get_embed((3, 5)), atol=1e-5, rtol=1e-5)
        assert rope.rotate_half == model.blocks[0].attn.rotate_half
        assert rope.per_layer == model.rope_mixed
        model.rope = rope
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert {f"rope.{n}" for n in rope.no_weight_decay()} <= model.no_weight_decay()


def test_adapter_shapes_dtypes_and_refusals() -> None:
    rope = TimmRope(mmpe.create_encoding("rope_axial", 64, 2), (2, 3))
    assert rope.get_embed().shape == (6, 64)
    rope.update_feat_shape([4, 3])
    assert rope.get_embed(dtype=torch.bfloat16).dtype == torch.bfloat16
    assert rope.get_embed().shape == (12, 64)
    assert rope.get_batch_embeds([(2, 2), (3, 2)], seq_len=9).shape == (2, 9, 64)
    torch.testing.assert_close(rope.get_batch_embeds([(2, 2)])[0], rope.get_embed((2, 2)))
    with pytest.raises(ValueError, match="no rotary"):
        TimmRope(mmpe.create_encoding("pape", 64, 2))
    with pytest.raises(ValueError, match="shape"):
        TimmRope(mmpe.create_encoding("rope_axial", 64, 2)).get_embed()


def test_adapter_extends_a_partial_rotation_to_whole_heads() -> None:
    encoding = mmpe.create_encoding("rope_axial", 64, 2, planes=(3, 3))
    positions = mmpe.Positions.grid(3, 4)
    q = torch.randn(2, 2, 12, 32)
    ours, _ = encoding(positions).queries_keys(q, q)
    torch.testing.assert_close(apply_rot_embed_cat(q, TimmRope(encoding).get_embed((3, 4))), ours)
