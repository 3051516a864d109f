"""The vision transformer on clips, and the task that trains it: positions in time, views, mixing, weights of images."""

from pathlib import Path

import lightning as L
import pytest
import timm
import torch

import mmpe
from mmpe.datamodules import MotionClips
from mmpe.models import VideoClassification, VisionTransformer
from mmpe.models.vit_checkpoints import checkpoint_filter_fn
from mmpe.models.vit_stem import TubeletEmbed

pytestmark = [
    # Lightning speaks of loader workers, folders and log intervals, none of which these tiny runs need.
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:The number of training batches.*"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed.*"),
]

NAME = "mmpe_vit_tiny_patch16_224"
SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2, "num_classes": 3}
CLIPS = {**SMALL, "num_frames": 4, "tubelet_size": 2}


def model_of(**options) -> VisionTransformer:
    return timm.create_model(NAME, **{"encoding": "rope_axial", **CLIPS, **options}).eval()


def test_clips_of_any_length_and_size():
    model = model_of()
    assert isinstance(model, VisionTransformer)
    assert (model.num_frames, model.grid_size, model.encoding.axes) == (4, (2, 2, 2), 3)
    for shape in ((4, 16, 16), (2, 8, 32), (10, 24, 16)):
        assert model(torch.rand(2, 3, *shape)).shape == (2, 3)
    tokens = model.forward_features(torch.rand(2, 3, 6, 16, 24))
    assert tokens.shape == (2, 1 + 3 * 2 * 3, 48)
    maps = model.forward_intermediates(torch.rand(2, 3, 6, 16, 24), intermediates_only=True)
    assert [m.shape for m in maps] == [(2, 48, 3, 2, 3)] * 2


@pytest.mark.parametrize("name", mmpe.list_encodings(axes=3))
def test_every_encoding_of_three_axes_trains_on_clips(name):
    model = timm.create_model(NAME, encoding=name, **{**CLIPS, "embed_dim": 72, "num_heads": 3}).train()
    loss = model(torch.rand(2, 3, 4, 16, 16)).square().sum()
    loss.backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
    assert model.patch_embed.proj.weight.grad.abs().sum() > 0
    with torch.no_grad():
        assert model.eval()(torch.rand(1, 3, 6, 24, 16)).shape == (1, 3)


def shuffled(clip: torch.Tensor) -> torch.Tensor:
    """The tubelets of two frames in another order."""
    return clip.unflatten(2, (-1, 2)).flip(2).flatten(2, 3)


@pytest.mark.parametrize("encoding", ["none", "ape_learned", "rope_axial", "rope_mixed", "pape"])
def test_without_temporal_positions_the_order_of_frames_does_not_matter(encoding):
    clip = torch.rand(2, 3, 8, 16, 16)
    torch.manual_seed(0)
    with_time = model_of(encoding=encoding)
    torch.manual_seed(0)
    without = model_of(encoding=encoding, temporal_positions=False)
    assert sum(p.numel() for p in with_time.parameters()) == sum(p.numel() for p in without.parameters())
    with torch.no_grad():  # at the start attention is nearly even, whatever the positions
        for block in (*with_time.blocks, *without.blocks):
            block.attn.qkv.weight.mul_(20)
    torch.testing.assert_close(without(clip), without(shuffled(clip)), atol=1e-5, rtol=1e-5)
    if encoding != "none":
        assert (with_time(clip) - with_time(shuffled(clip))).abs().max() > 1e-4
        rows = clip.flip(3)
        assert (without(clip) - without(rows)).abs().max() > 1e-4


def test_positions_count_time_rows_and_columns():
    model = model_of(img_size=(16, 24))
    positions = model.positions_for(6, 16, 24)
    torch.testing.assert_close(positions.coords, mmpe.Positions.video(3, 2, 3).coords)
    assert (positions.axes, positions.prefix) == (("t", "h", "w"), 1)
    model.set_position_scaling("scaled")
    assert model.positions_for(8, 32, 24).coords.max(0).values.tolist() == [1.5, 1.5, 2.0]
    assert model.trained_grid == (2, 2, 3)
    still = model_of(temporal_positions=False).positions_for(8, 16, 16)
    assert still.coords[:, 0].abs().max() == 0
    assert still.grid_size is None


def test_a_still_clip_under_weights_of_an_image_model_is_the_image():
    images = timm.create_model(NAME, encoding="none", **SMALL, class_token=False, global_pool="avg").eval()
    clips = model_of(encoding="none", class_token=False, global_pool="avg")
    clips.load_state_dict(checkpoint_filter_fn(images.state_dict(), clips))
    image = torch.rand(2, 3, 16, 16)
    still = image[:, :, None].expand(-1, -1, 6, -1, -1)
    torch.testing.assert_close(clips(still), images(image), atol=1e-5, rtol=1e-5)
    coarse = model_of(encoding="none", class_token=False, global_pool="avg", patch_size=16, img_size=32)
    coarse.load_state_dict(checkpoint_filter_fn(clips.state_dict(), coarse))
    flat = torch.rand(2, 3, 1, 1, 1).expand(-1, -1, 4, 16, 16)
    large = flat[..., :1, :1].expand(-1, -1, -1, 32, 32)
    assert coarse(large).shape == (2, 3)


def test_tubelets_are_the_linear_map_of_their_block():
    stem = TubeletEmbed((8, 8), (4, 4), 4, 2, 3, 5)
    clip = torch.rand(1, 3, 6, 8, 12)
    tokens = stem(clip)
    assert tokens.shape == (1, 3, 2, 3, 5)
    block = clip[:, :, 2:4, 4:8, 8:12].flatten()
    expected = stem.proj.weight.flatten(1) @ block + stem.proj.bias
    torch.testing.assert_close(tokens[0, 1, 1, 2], expected)


def test_padding_fills_rows_and_columns_and_never_time():
    model = model_of(dynamic_img_pad=True)
    assert model.forward_features(torch.rand(1, 3, 4, 17, 9)).shape == (1, 1 + 2 * 3 * 2, 48)
    with pytest.raises(ValueError, match="clip 5x17x9 is no multiple of the tubelet 2x8x8"):
        model(torch.rand(1, 3, 5, 17, 9))


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3, 16, 16), {}, r"clips must be \(B, 3, T, H, W\), got shape \(1, 3, 16, 16\)"),
        ((1, 4, 16, 16), {}, r"clips must be \(B, 3, T, H, W\)"),
        ((3, 5, 16, 16), {}, "clip 5x16x16 is no multiple of the tubelet 2x8x8; use 4x16x16"),
        ((3, 1, 16, 16), {}, "clip 1x16x16 is smaller than a tubelet of 2x8x8"),
        ((3, 8, 16, 16), {"dynamic_img_size": False}, "clip 8x16x16 is not 4x16x16"),
    ],
)
def test_refused_clips(shape, options, message):
    with pytest.raises(ValueError, match=message):
        model_of(**options)(torch.rand(1, *shape))


def test_refused_options():
    with pytest.raises(ValueError, match="clip 5x16x16 is no multiple"):
        model_of(num_frames=5)
    with pytest.raises(ValueError, match="num_frames=0"):
        model_of(num_frames=0)
    with pytest.raises(ValueError, match=r"trained_grid=\(2, 2\) must give one size for each of 3 axes"):
        model_of(trained_grid=(2, 2))
    with pytest.raises(ValueError, match="temporal_positions=False leaves no grid in time, which encoding='cpe' needs"):
        model_of(encoding="cpe", temporal_positions=False)
    with pytest.raises(ValueError, match="num_frames=8 is for models of clips"):
        timm.create_model(NAME, **SMALL).set_input_size(num_frames=8)


def test_another_size_becomes_the_own_one():
    model = model_of(encoding="ape_learned")
    model.set_input_size(img_size=32, num_frames=8)
    assert model.grid_size == (4, 4, 4)
    assert (model.config["num_frames"], tuple(model.config["img_size"])) == (8, (32, 32))
    assert model(torch.rand(1, 3, 8, 32, 32)).shape == (1, 3)
    model.set_input_size(patch_size=16)
    assert model.patch_embed.proj.weight.shape == (48, 3, 2, 16, 16)
    assert model(torch.rand(1, 3, 8, 32, 32)).shape == (1, 3)


def test_saved_and_loaded(tmp_path):
    model = model_of(encoding="rope_mixed", temporal_positions=False)
    model.set_input_size(num_frames=8)
    model.save_pretrained(tmp_path)
    loaded = VisionTransformer.from_pretrained(tmp_path)
    clip = torch.rand(1, 3, 8, 16, 16)
    assert torch.equal(loaded(clip), model(clip))
    assert (loaded.num_frames, loaded.temporal_positions) == (8, False)


def test_patch_dropout_keeps_positions_of_all_axes():
    torch.manual_seed(0)
    model = model_of(patch_drop_rate=0.5).train()
    tokens, positions = model.forward_tokens(torch.rand(2, 3, 8, 16, 16))
    assert tokens.shape == (2, 1 + 8, 48)
    assert positions.coords.shape == (2, 8, 3)


def test_own_positions_of_tubelets():
    model = model_of()
    clip = torch.rand(2, 3, 4, 16, 16)
    grid = mmpe.Positions.video(2, 2, 2)
    torch.testing.assert_close(model(clip, grid), model(clip))
    later = mmpe.Positions.points(grid.coords * torch.tensor([3.0, 1.0, 1.0]))
    assert (model(clip, later) - model(clip)).abs().max() > 1e-5
    with pytest.raises(ValueError, match="do not fit 2 clips of 8 patches"):
        model(clip, mmpe.Positions.video(3, 2, 2))


@pytest.mark.parametrize("mode", ["", "jax", "moco"])
def test_initialisation_covers_the_stem(mode):
    model = model_of(weight_init=mode)
    before = model.patch_embed.proj.weight.clone()
    model.init_weights(mode)
    assert not torch.equal(model.patch_embed.proj.weight, before)
    if mode == "jax":
        assert model.patch_embed.proj.bias.abs().max() == 0
        assert before.std().item() == pytest.approx((3 * 2 * 8 * 8) ** -0.5, rel=0.1)


BACKBONE = {k: v for k, v in CLIPS.items() if k != "num_classes"}


def task(**options) -> VideoClassification:
    settings = {"encoding": "rope_axial", "backbone_options": BACKBONE, "num_classes": 4, "lr": 1e-3}
    return VideoClassification(NAME, **settings | options)


def test_logits_of_several_views_are_averaged():
    model = task().eval()
    views = torch.rand(3, 5, 3, 4, 16, 16)
    expected = torch.stack([model(views[:, i]) for i in range(5)]).mean(0)
    logits, labels = model.evaluate({"image": views, "label": torch.tensor([0, 1, 2])})
    torch.testing.assert_close(logits, expected)
    assert labels.tolist() == [0, 1, 2]
    torch.testing.assert_close(model.logits(views[:, :1]), model.logits(views[:, 0]))
    predicted = model.predict_step({"image": views, "valid": torch.tensor([True, False, True])}, 0)
    torch.testing.assert_close(predicted["probability"], expected.softmax(-1)[[0, 2]])


@pytest.mark.parametrize("settings", [{"mixup": 0.8}, {"cutmix": 1.0}])
def test_mixing_is_the_same_in_all_frames(settings):
    model = task(**settings)
    still = torch.rand(4, 3, 1, 16, 16).expand(-1, -1, 4, -1, -1).clone()
    mixed, targets = model._augmented(still, torch.arange(4))
    assert mixed.shape == still.shape
    assert targets.shape == (4, 4)
    assert not torch.equal(mixed, still)
    assert torch.equal(mixed, mixed[:, :, :1].expand_as(mixed))


def test_the_resolution_schedule_resizes_frames():
    model = task(resolution_schedule=[[0, 24]])
    model.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    clips, _ = model._augmented(torch.rand(2, 3, 4, 16, 16), torch.tensor([0, 1]))
    assert clips.shape == (2, 3, 4, 24, 24)


def test_a_backbone_of_images_is_refused():
    with pytest.raises(ValueError, match="takes images unless backbone_options have num_frames"):
        task(backbone_options={k: v for k, v in BACKBONE.items() if k != "num_frames"})


def test_weights_of_an_image_classifier_start_a_clip_classifier(tmp_path):
    images = timm.create_model(NAME, encoding="rope_axial", **SMALL)
    torch.save(images.state_dict(), tmp_path / "image.pt")
    model = task(init_from=str(tmp_path / "image.pt"))
    model._start_from(model.hparams.init_from)
    kernel = model.backbone.patch_embed.proj.weight
    torch.testing.assert_close(kernel.sum(2), images.patch_embed.proj.weight)
    torch.testing.assert_close(model.backbone.blocks[1].attn.qkv.weight, images.blocks[1].attn.qkv.weight)


def fit(folder: Path, data: Path, steps: int, ckpt: str | None = None) -> VideoClassification:
    torch.manual_seed(0)
    clips = MotionClips(
        data, train_clips=16, val_clips=6, clip_frames=6, frames=4, image_size=16, batch_size=4, eval_clips=2
    )
    model = task()
    saver = L.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = L.Trainer(default_root_dir=folder, max_steps=steps, callbacks=[saver], num_sanity_val_steps=0, **quiet)
    trainer.fit(model, clips, ckpt_path=ckpt, weights_only=False)
    assert {"val/loss@16px", "val/top1@16px"} <= set(trainer.callback_metrics)
    return model


def test_training_on_files_resumes_bit_by_bit(tmp_path):
    whole = fit(tmp_path / "whole", tmp_path / "clips", 8)
    resumed = fit(tmp_path / "resumed", tmp_path / "clips", 8, str(tmp_path / "whole" / "step=3.ckpt"))
    for (name, one), other in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
