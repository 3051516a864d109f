"""The vision transformer: any size, any encoding, timm's interface, checkpoints."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.optim import create_optimizer_v2
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import mmpe
from mmpe.models.vit import VisionTransformer

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
ENCODINGS = mmpe.list_encodings(axes=2)
STATED = ("ape_learned", "rope", "rope_axial", "rope_mixed", "cpe", "pape", "pape_ri", "alibi_2d")


def build(encoding: str = "rope_mixed", **options: object) -> VisionTransformer:
    return VisionTransformer(**{**SMALL, "encoding": encoding, **options})


def by_timm(**options: object) -> VisionTransformer:
    return timm.create_model("mmpe_vit_tiny_patch16_224", **{**SMALL, **options})


@pytest.mark.parametrize("encoding", [*ENCODINGS, "ape_learned+rope_mixed", "cpe+rope_axial"])
def test_every_encoding_trains_at_several_sizes(encoding: str) -> None:
    model = build(encoding, reg_tokens=1)
    for height, width in ((32, 32), (24, 40), (56, 32)):
        logits = model(torch.randn(2, 3, height, width))
        assert logits.shape == (2, 5)
        logits.square().sum().backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())


@pytest.mark.parametrize("encoding", ["rope_axial", "rope_mixed", "ape_learned", "pape"])
def test_encoding_makes_the_order_of_patches_matter(encoding: str) -> None:
    x = torch.randn(1, 3, 32, 32)
    moved = x.roll(8, dims=-1)
    torch.manual_seed(1)
    bag, ordered = build("none").eval(), build(encoding, weight_init="jax").eval()
    torch.testing.assert_close(bag(x), bag(moved))
    with torch.no_grad():
        for p in ordered.parameters():
            p.add_(0.2 * torch.randn_like(p))
    assert (ordered(x) - ordered(moved)).abs().max() > 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"global_pool": "avg", "class_token": False},
        {"global_pool": "", "reg_tokens": 2},
        {"global_pool": "map"},
        {"global_pool": "avgmax", "fc_norm": False},
        {"swiglu": True, "scale_mlp_norm": True, "scale_attn_norm": True},
        {"swiglu": "packed", "act_layer": "silu"},
        {"qk_norm": True, "norm_layer": "rmsnorm", "norm_eps": 1e-5},
        {"init_values": 0.1, "pre_norm": True, "qkv_bias": False},
        {"drop_rate": 0.1, "pos_drop_rate": 0.1, "proj_drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.2},
        {"weight_init": "jax_nlhb"},
        {"weight_init": "moco"},
        {"weight_init": "skip"},
        {"num_classes": 0},
    ],
)
def test_options_of_timm(options: dict[str, object]) -> None:
    model = build(**options)
    out = model(torch.randn(2, 3, 32, 40))
    width = options.get("num_classes", 5) or 32
    tokens = 20 + 1 + options.get("reg_tokens", 0)
    assert out.shape == ((2, tokens, width) if options.get("global_pool") == "" else (2, width))
    out.sum().backward()
    assert set(VisionTransformer(**model.config).state_dict()) == set(model.state_dict())


def test_patch_dropout_drops_in_training_alone_and_per_sample() -> None:
    """timm 2549: with patch dropout, heads met the batch axis."""
    model = build("ape_learned+rope_mixed", patch_drop_rate=0.5)
    x = torch.randn(3, 3, 32, 48)
    tokens, positions = model.forward_tokens(x)
    assert tokens.shape[1] == positions.num_tokens == 1 + 12
    assert positions.coords.shape == (3, 12, 2)
    assert not torch.equal(positions.coords[0], positions.coords[1])
    model(x).sum().backward()
    assert model.eval().forward_tokens(x)[0].shape[1] == 25
    with pytest.raises(ValueError, match="cpe"):
        build("cpe", patch_drop_rate=0.5)
    with pytest.raises(ValueError, match="NLC"):
        model.train().forward_intermediates(x)


def test_loose_positions_per_sample() -> None:
    model = build("rope_axial").eval()
    x = torch.randn(2, 3, 32, 32)
    grid = mmpe.Positions.grid(4, 4)
    torch.testing.assert_close(model(x, positions=grid), model(x))
    batched = mmpe.Positions.points(torch.stack([grid.coords, grid.coords * 2.5]))
    out = model(x, positions=batched)
    torch.testing.assert_close(out[:1], model(x[:1]))
    torch.testing.assert_close(out[1:], model(x[1:], positions=mmpe.Positions.points(grid.coords * 2.5)))
    with pytest.raises(ValueError, match="do not fit 2 images of 16 patches"):
        model(x, positions=mmpe.Positions.grid(4, 5))


def test_scaled_positions_span_the_trained_grid() -> None:
    model = build("rope_axial", position_scaling="scaled")
    stretched = model.positions_for(64, 48)
    torch.testing.assert_close(stretched.coords, mmpe.Positions.grid(8, 6).scaled_to((4, 4)).coords)
    model.set_position_scaling("raw")
    torch.testing.assert_close(model.positions_for(64, 48).coords, mmpe.Positions.grid(8, 6).coords)
    assert model.config["position_scaling"] == "raw"
    with pytest.raises(ValueError, match="raw"):
        model.set_position_scaling("stretched")


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        ((4, 32), {}, "smaller than a patch of 8x8"),
        ((32, 36), {}, "use 32x32 or dynamic_img_pad"),
        ((40, 40), {"dynamic_img_size": False}, "is not 32x32"),
    ],
)
def test_image_sizes_that_do_not_fit(size: tuple[int, int], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)(torch.randn(1, 3, *size))


def test_padding_takes_any_size() -> None:
    model = build(dynamic_img_pad=True, img_size=30).eval()
    assert model.grid_size == (4, 4)
    assert model(torch.randn(1, 3, 5, 33)).shape == (1, 5)
    x = torch.randn(1, 3, 30, 30)
    torch.testing.assert_close(model(x), model(torch.nn.functional.pad(x, (0, 2, 0, 2))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"img_size": 36}, "multiple of the patch"),
        ({"num_heads": 3}, "divisible by num_heads"),
        ({"global_pool": "mean"}, "global_pool must be one of"),
        ({"global_pool": "token", "class_token": False}, "class_token"),
        ({"encoding": "rope_mixd"}, "rope_mixed"),
        ({"encoding_options": {"bse": 3}}, "base"),
        ({"weight_init": "xavier"}, "weight_init"),
        ({"drop_path_rate": 1.5}, "drop rates"),
        ({"norm_layer": "layer"}, "norm_layer"),
        ({"swiglu": "wide"}, "swiglu"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_wrong_images_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(B, 3, H, W\)"):
        build()(torch.randn(1, 1, 32, 32))


def test_timm_builds_the_model_with_its_keywords() -> None:
    model = by_timm(encoding="rope_axial", encoding_options={"base": 50.0}, img_size=(32, 48), drop_path_rate=0.1)
    assert model.encoding.bases == (50.0, 50.0)
    assert model.grid_size == (4, 6)
    config = resolve_model_data_config(model, args={"input_size": (3, 32, 48)})
    image = Image.new("RGB", (70, 50))
    assert create_transform(**config, is_training=True)(image).shape == (3, 32, 48)
    assert model.pretrained_cfg["architecture"] == "mmpe_vit_tiny_patch16_224"
    direct = build(img_size=(32, 48))
    assert resolve_model_data_config(direct)["input_size"] == (3, 32, 48)


@pytest.mark.parametrize("encoding", ["rope_mixed", "ape_learned", "pape", "cpe"])
def test_features_only_gives_maps_also_when_not_square(encoding: str) -> None:
    model = by_timm(features_only=True, out_indices=(0, -1), encoding=encoding, depth=3)
    maps = model(torch.randn(2, 3, 24, 56))
    assert [tuple(m.shape) for m in maps] == [(2, 32, 3, 7)] * 2
    assert model.feature_info.channels() == [32, 32]
    assert model.feature_info.reduction() == [8, 8]


def test_intermediate_features() -> None:
    model = build(reg_tokens=2, depth=3).eval()
    x = torch.randn(2, 3, 24, 40)
    final, maps = model.forward_intermediates(x, norm=True)
    torch.testing.assert_close(final, model.forward_features(x))
    torch.testing.assert_close(maps[-1].flatten(2).transpose(1, 2), final[:, 3:])
    found = model.forward_intermediates(x, indices=[1], output_dict=True, return_prefix_tokens=True, stop_early=True)
    torch.testing.assert_close(found["image_intermediates"][0], model.forward_intermediates(x)[1][1])
    assert found["image_intermediates_prefix"][0].shape == (2, 3, 32)
    assert model.get_intermediate_layers(x, n=2)[0].shape == (2, 15, 32)
    assert model.prune_intermediate_layers([1]) == [1]
    pruned = model.forward_intermediates(x, indices=1, intermediates_only=True)
    torch.testing.assert_close(pruned[0], found["image_intermediates"][0])
    assert len(model.blocks) == 2
    assert isinstance(model.head, torch.nn.Identity)
    with pytest.raises(ValueError, match="has 2"):
        model.forward_intermediates(x, indices=[2])


def test_classifier_and_pooling_can_be_replaced() -> None:
    model = build()
    model.reset_classifier(9, "avg")
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 9)
    assert model.get_classifier().out_features == 9
    again = VisionTransformer(**model.config)
    again.load_state_dict(model.state_dict())
    assert model.forward_head(torch.randn(1, 17, 32), pre_logits=True).shape == (1, 32)
    with pytest.raises(ValueError, match="map"):
        model.reset_classifier(9, "map")


def test_optimizer_groups() -> None:
    model = build("ape_learned+rope_mixed", reg_tokens=1)
    skipped = model.no_weight_decay()
    expected = {"cls_token", "reg_token", "encoding.parts.0.table", "encoding.parts.1.freqs"}
    assert skipped == expected <= {name for name, _ in model.named_parameters()}
    groups = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.1, layer_decay=0.5).param_groups
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert all(decay[id(p)] == 0 for name, p in model.named_parameters() if name in expected)
    table, freqs = (part for part in model.encoding.parameters())
    assert scale[id(table)] == scale[id(model.patch_embed.proj.weight)] < scale[id(model.blocks[0].attn.qkv.weight)]
    assert scale[id(freqs)] == scale[id(model.head.weight)] == 1.0


@pytest.mark.parametrize("encoding", ["rope_mixed", "pape", "ape_learned+rope_axial", "alibi_2d"])
def test_checkpointing_recomputes_the_same_gradients(encoding: str) -> None:
    """miles_diffusion 15: recomputed tensors had another dtype than the saved ones under mixed precision."""
    model, x = build(encoding), torch.randn(2, 3, 24, 32)
    gradients = []
    for enable in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enable)
        with torch.autocast("cpu", torch.bfloat16):
            model(x).float().square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("encoding", ["rope_mixed", "ape_learned", "pape"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_bfloat16_model_and_autocast(encoding: str, qk_norm: bool) -> None:
    """timm 1890: a bf16 model could not resample its table."""
    model, x = build(encoding, qk_norm=qk_norm, num_classes=64).eval(), torch.randn(2, 3, 40, 24)
    with torch.no_grad():
        exact = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert (model(x) - exact).abs().max() < 0.05
        assert (model.bfloat16()(x.bfloat16()) - exact).abs().max() < 0.05


@pytest.mark.parametrize("encoding", ["rope_mixed", "ape_learned", "pape", "rope_axial"])
def test_compiles_without_graph_breaks(encoding: str) -> None:
    model, x = build(encoding), torch.randn(2, 3, 24, 32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))


def test_exports_with_any_image_size() -> None:
    """sam2 186, onnx 6480: complex rotations and sizes frozen into the graph stopped exports."""
    model = build("ape_learned+rope_mixed").eval()
    batch, rows, columns = (torch.export.Dim(name, min=2, max=32) for name in ("batch", "rows", "columns"))
    shapes = {"x": {0: batch, 2: 8 * rows, 3: 8 * columns}}
    exported = torch.export.export(model, (torch.randn(2, 3, 40, 48),), dynamic_shapes=shapes).module()
    x = torch.randn(3, 3, 64, 24)
    torch.testing.assert_close(exported(x), model(x))


def test_copies_and_pickles() -> None:
    model, x = build().eval(), torch.randn(1, 3, 32, 32)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        torch.testing.assert_close(other(x), model(x))
        assert other.config == model.config


@pytest.mark.parametrize("encoding", ["rope_mixed", "rope_axial", "ape_learned", "pape"])
def test_meta_model_becomes_whole(encoding: str) -> None:
    """transformers 45902: after to_empty, rotary frequencies were random memory."""
    with torch.device("meta"):
        model = build(encoding, init_values=0.1)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    model.init_weights()
    assert bool(torch.isfinite(model(torch.randn(1, 3, 40, 32))).all())
    torch.testing.assert_close(model.state_dict(), {**model.state_dict(), "blocks.0.ls1.gamma": torch.full((32,), 0.1)})


@pytest.mark.parametrize("new", [(48, 32), (32, 48), (24, 16)])
def test_set_input_size_keeps_rectangles(new: tuple[int, int]) -> None:
    """timm 2317, dino 8: after a non-square size the old grid was taken for a square one."""
    model = build("ape_learned", img_size=(16, 40)).eval()
    table = model.encoding.table.detach()
    x = torch.randn(1, 3, *new)
    before = model(x)
    model.set_input_size(new)
    torch.testing.assert_close(model(x), before)
    resized = timm.layers.resample_abs_pos_embed(table, model.grid_size, old_size=(2, 5), num_prefix_tokens=1)
    torch.testing.assert_close(model.encoding.table.detach(), resized)
    again = VisionTransformer(**model.config).eval()
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(x), before)


def test_set_input_size_resamples_patches_and_keeps_the_trained_grid() -> None:
    model = build("rope_axial", position_scaling="scaled")
    model.set_input_size(img_size=64, patch_size=4)
    assert model.patch_embed.proj.weight.shape == (32, 3, 4, 4)
    assert model.grid_size == (16, 16)
    assert model.trained_grid == (4, 4)
    assert VisionTransformer(**model.config).trained_grid == (4, 4)


@pytest.mark.parametrize("encoding", ["rope_mixed", "ape_learned+rope_axial", "pape"])
def test_saved_folder_rebuilds_the_model(encoding: str, tmp_path: Path) -> None:
    options = {"base": 20.0} if encoding == "rope_mixed" else None
    model = build(encoding, encoding_options=options, reg_tokens=1, img_size=(32, 48), position_scaling="scaled").eval()
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"model.safetensors", "config.json"}
    assert json.loads((tmp_path / "config.json").read_text())["encoding"] == encoding
    again = VisionTransformer.from_pretrained(tmp_path)
    x = torch.randn(1, 3, 40, 40)
    torch.testing.assert_close(again(x), model(x), atol=0, rtol=0)
    assert again.config == {**model.config, "img_size": [32, 48]}
    with pytest.raises(ValueError, match="depth=3"):
        VisionTransformer.from_pretrained(tmp_path, depth=3)


def test_model_built_by_timm_can_be_saved(tmp_path: Path) -> None:
    model = by_timm(encoding="rope_axial").eval()
    model.save_pretrained(tmp_path)
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(VisionTransformer.from_pretrained(tmp_path)(x), model(x))


@pytest.mark.parametrize(("made", "loading"), [("rope_axial", "none"), ("rope_mixed", "pape"), ("none", "ape_learned")])
def test_checkpoint_of_another_encoding_is_refused(made: str, loading: str, tmp_path: Path) -> None:
    torch.save(build(made).state_dict(), tmp_path / "checkpoint.pt")
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    with pytest.raises(ValueError, match=rf"encoding='{made}'.*encoding='{loading}'"):
        build(loading).load_state_dict(state)
    build(loading).load_state_dict(state, strict=False)


def test_checkpoint_without_a_signature_is_compared_by_its_weights() -> None:
    bare: dict[str, Tensor] = dict(build("rope_mixed").state_dict())
    with pytest.raises(ValueError, match=r"another position encoding.*'table'.*'freqs'"):
        build("ape_learned").load_state_dict(bare)
    with pytest.raises(ValueError, match="has 2 blocks, this model depth=3"):
        build("rope_mixed", depth=3).load_state_dict(bare)
    holder = torch.nn.ModuleDict({"model": build("rope_mixed", depth=1)})
    with pytest.raises(RuntimeError, match="has 2 blocks, this model depth=1"):
        holder.load_state_dict({f"model.{key}": value for key, value in bare.items()})


def test_load_pretrained_resamples_tables_and_patches(tmp_path: Path) -> None:
    """Swin 24: a larger input could not load the tables; timm's own checkpoints bring derived rotary buffers."""
    small = build("ape_learned+rope_mixed").eval()
    foreign = {f"model.{key}": value for key, value in small.state_dict().items()}
    foreign["model.freqs_t_x"], foreign["model.rope.periods"] = torch.zeros(3), torch.zeros(3)
    torch.save({"state_dict": foreign}, tmp_path / "last.ckpt")
    large = build("ape_learned+rope_mixed", img_size=(96, 64), patch_size=16)
    large.load_pretrained(tmp_path / "last.ckpt")
    old, new = small.encoding.parts[0].table, large.encoding.parts[0].table
    torch.testing.assert_close(new, timm.layers.resample_abs_pos_embed(old, (6, 4), old_size=(4, 4)))
    torch.testing.assert_close(large.encoding.parts[1].freqs, small.encoding.parts[1].freqs)
    same = build("ape_learned+rope_mixed").eval()
    same.load_pretrained(tmp_path / "last.ckpt")
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(same(x), small(x))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        same.load_pretrained(tmp_path / "nowhere.pth")


def test_timm_loads_a_file_of_a_timm_model(tmp_path: Path) -> None:
    kwargs = {"img_size": 48, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    theirs = timm.create_model("vit_small_patch16_rope_mixed_224", **kwargs).eval()
    torch.save(theirs.state_dict(), tmp_path / "timm.pth")
    overlay = {"file": str(tmp_path / "timm.pth"), "num_classes": 5}
    name = "mmpe_vit_small_patch16_224"
    ours = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, init_values=1e-5, **kwargs).eval()
    x = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kept", [0, 100, 4000])
@pytest.mark.parametrize("kind", ["folder", "safetensors", "torch"])
def test_torn_files_are_named(kind: str, kept: int, tmp_path: Path) -> None:
    """Fault: a download or copy that broke off ends in the parser's own words, without the file."""
    model, folder = build(), tmp_path / "größe 1"
    model.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "weights.pt")
    file = folder / ("weights.pt" if kind == "torch" else "model.safetensors")
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"größe 1.{file.name}.*{kept} bytes"):
        VisionTransformer.from_pretrained(folder) if kind == "folder" else build().load_pretrained(file)


@pytest.mark.parametrize("encoding", STATED)
def test_gradients_of_each_sample(encoding: str) -> None:
    """Fault: a custom backward that torch.func cannot see through; vmap over grad equals one backward per sample."""
    model, images = build(encoding).eval(), torch.randn(2, 3, 32, 32)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], image: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (image[None],)).square().sum()

    with sdpa_kernel(SDPBackend.MATH):  # torch has no batching rule for its fused kernel on the CPU
        found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, images)
    for i, image in enumerate(images):
        model.zero_grad()
        loss(dict(model.named_parameters()), image).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(found[name][i], p.grad, atol=1e-4, rtol=1e-3)
