"""The image-classification task: what is optimised, what is measured, what a checkpoint holds."""

import math
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from torch.utils.data import DataLoader, Dataset

import mmpe.models
from mmpe.models import ImageClassification
from mmpe.models.image_classification import backbone_weights, scheduled_size
from mmpe.models.optim import build_optimizer, cosine_factor, parameter_groups

pytestmark = [
    # Lightning speaks of loader workers, loggers and log intervals, none of which these tiny runs need.
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:The number of training batches.*"),
]

TINY = {
    "img_size": 16,
    "patch_size": 4,
    "in_chans": 1,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "global_pool": "avg",
    "class_token": False,
}
BACKBONE = "mmpe_vit_tiny_patch16_224"


class Pictures(Dataset):
    """Noise around one of four grey levels, which is the class."""

    def __init__(self, count: int, size: int = 16, seed: int = 0) -> None:
        source = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(4, (count,), generator=source)
        self.images = torch.randn(count, 1, size, size, generator=source) * 0.3
        self.images += self.labels.view(-1, 1, 1, 1) - 1.5

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": self.images[index], "label": self.labels[index]}


class PictureData(L.LightningDataModule):
    num_classes = 4
    eval_names = ("1x", "2x")

    def __init__(self, batch_size: int = 16, eval_batch_size: int = 7) -> None:
        super().__init__()
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Pictures(64), batch_size=self.batch_size)

    def val_dataloader(self) -> list[DataLoader]:
        return [DataLoader(Pictures(20, size, seed=1), batch_size=self.eval_batch_size) for size in (16, 32)]

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(Pictures(20, 16, seed=1), batch_size=self.eval_batch_size)


def task(**options) -> ImageClassification:
    return ImageClassification(
        BACKBONE, **{"encoding": "rope_mixed", "backbone_options": TINY, "num_classes": 4, "lr": 3e-3} | options
    )


def trainer(folder: Path, **options) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return L.Trainer(default_root_dir=folder, **quiet | {"enable_checkpointing": False} | options)


def test_training_learns_and_every_size_is_measured_under_both_rules(tmp_path):
    model = task(eval_positions=["raw", "scaled"], warmup_steps=4)
    run = trainer(tmp_path, max_epochs=10, gradient_clip_val=1.0, check_val_every_n_epoch=10)
    run.fit(model, PictureData())
    metrics = run.callback_metrics
    named = {f"val/{m}@{size}{rule}" for m in ("top1", "loss") for size in ("1x", "2x") for rule in ("", "_scaled")}
    assert named <= set(metrics)
    assert metrics["val/top1@1x"] == metrics["val/top1@1x_scaled"] >= 0.9
    assert metrics["val/loss@2x"] != metrics["val/loss@2x_scaled"]
    assert model.backbone.position_scaling == "raw"  # evaluation leaves the rule of training in place


def test_metrics_do_not_depend_on_the_batch_size_and_skip_padding(tmp_path):
    model = task().eval()
    results = [
        trainer(tmp_path).validate(model, PictureData(eval_batch_size=size), verbose=False)[0] for size in (1, 7, 20)
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    assert results[1] == pytest.approx(results[2], rel=1e-5)

    labels = torch.tensor([0, 1, 2, 3])
    valid = torch.tensor([True, False, True, False])
    batch = {"image": Pictures(4).images, "label": labels, "valid": valid}
    model.scores = torch.nn.ModuleList([model.new_scores()])
    model.validation_step(batch, 0)
    expected = (model(batch["image"]).argmax(-1) == labels)[valid].float().mean()
    assert model.scores[0].compute()["top1"] == expected
    loss = torch.nn.functional.cross_entropy(model(batch["image"])[valid], labels[valid])
    torch.testing.assert_close(model.scores[0].compute()["loss"], loss)


@pytest.mark.parametrize("layer_decay", [None, 0.7])
def test_no_parameter_of_an_encoding_and_no_vector_is_decayed(layer_decay):
    model = task(encoding="ape_learned+rope_mixed+cpe")
    groups = parameter_groups(model.backbone, 1e-3, 0.05, layer_decay)
    decayed = {id(p) for group in groups if group["weight_decay"] > 0 for p in group["params"]}
    for name, p in model.backbone.named_parameters():
        inside = name.startswith("encoding.")
        assert (id(p) in decayed) == (p.dim() > 1 and not inside), name
    assert sum(len(g["params"]) for g in groups) == len(list(model.backbone.parameters()))
    rates = {g["lr"] for g in groups}
    assert (len(rates) > 1) == (layer_decay is not None)
    assert max(rates) == 1e-3


def test_an_encoding_put_into_a_foreign_timm_model_is_not_decayed_either():
    options = {k: v for k, v in TINY.items() if k != "class_token"} | {"class_token": False, "dynamic_img_size": True}
    model = ImageClassification("vit_tiny_patch16_224", "rope_mixed", backbone_options=options, num_classes=4)
    encodings = [m for m in model.backbone.modules() if isinstance(m, mmpe.PositionEncoding)]
    groups = parameter_groups(model.backbone, 1e-3, 0.05)
    decayed = {id(p) for group in groups if group["weight_decay"] > 0 for p in group["params"]}
    own = [p for encoding in encodings for p in encoding.parameters()]
    assert own
    assert not decayed & {id(p) for p in own}
    assert model(torch.randn(2, 1, 24, 24)).shape == (2, 4)


def test_cosine_warms_up_and_ends_at_the_floor():
    factors = [cosine_factor(step, 100, 10, 0.1) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == 1.0
    assert factors[55] == pytest.approx(0.55)
    assert factors[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(factors[10:], factors[11:], strict=False))


@pytest.mark.parametrize("warmup", [{"warmup_steps": 2}, {"warmup_epochs": 0.5}])
def test_schedule_is_stepped_every_optimiser_step(tmp_path, warmup):
    rates = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    model = task(lr=1.0, min_lr=0.5, optimizer="sgd", **warmup)
    run = trainer(tmp_path, max_epochs=2, limit_val_batches=0, callbacks=[Watch()])
    run.fit(model, PictureData())
    assert rates == pytest.approx([cosine_factor(step, 8, 2, 0.5) for step in range(8)])


def test_a_run_without_an_end_is_refused(tmp_path):
    with pytest.raises(ValueError, match="max_steps"):
        trainer(tmp_path, max_epochs=-1, limit_val_batches=0).fit(task(), PictureData())


def test_the_average_follows_the_weights_and_is_what_validation_uses(tmp_path):
    model = task(ema_decay=0.5)
    before = {k: v.clone() for k, v in model.backbone.state_dict().items()}
    run = trainer(tmp_path, max_steps=1, limit_val_batches=0, enable_checkpointing=True)
    run.fit(model, PictureData())
    for name, start in before.items():
        expected = (start + model.backbone.state_dict()[name]) / 2
        torch.testing.assert_close(model.ema.state_dict()[name], expected, msg=name)
    image = Pictures(3).images
    model.eval()
    assert torch.equal(model(image), model.ema(image))
    assert not torch.equal(model(image), model.backbone(image))
    # The checkpoint of a step holds the average after that step, not before it.
    saved = torch.load(run.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
    assert torch.equal(saved["ema.head.weight"], model.ema.head.weight)
    assert not any(p.requires_grad for p in model.ema.parameters())


def test_checkpoints_are_plain_values_and_rebuild_the_task(tmp_path):
    options = {"mixup": 0.8, "cutmix": 1.0, "betas": (0.9, 0.95), "resolution_schedule": [(0, 8), (1, 16)]}
    model = task(ema_decay=0.9, encoding_options={"base": 5.0}, **options)
    run = trainer(tmp_path, max_epochs=2, enable_checkpointing=True)
    run.fit(model, PictureData())
    again = ImageClassification.load_from_checkpoint(run.checkpoint_callback.best_model_path, weights_only=True)
    assert dict(again.hparams) == dict(model.hparams)
    image = Pictures(3).images
    assert torch.equal(again.eval()(image), model.eval()(image))


def test_a_checkpoint_of_another_encoding_is_refused_even_where_its_weights_fit(tmp_path):
    run = trainer(tmp_path, max_steps=1, limit_val_batches=0, enable_checkpointing=True)
    run.fit(task(encoding="none"), PictureData())
    path = run.checkpoint_callback.best_model_path
    with pytest.raises(ValueError, match="encoding='none'.*encoding='rope_axial'"):
        trainer(tmp_path).validate(task(encoding="rope_axial"), PictureData(), ckpt_path=path, verbose=False)
    with pytest.raises(RuntimeError, match="encoding='none'.*encoding='rope_axial'"):
        ImageClassification.load_from_checkpoint(path, encoding="rope_axial")


def test_mixing_leaves_the_loaders_tensors_and_any_batch_size_works():
    model = task(mixup=0.8, cutmix=1.0, label_smoothing=0.1).train()
    for count in (1, 2, 7):
        data = Pictures(count)
        kept = data.images.clone()
        images, targets = model._augmented(data.images, data.labels)
        assert torch.equal(data.images, kept)
        assert images.shape == kept.shape
        assert targets.shape == (count, 4)
        torch.testing.assert_close(targets.sum(-1), torch.ones(count))


def test_binary_cross_entropy_counts_every_mixed_class_as_present():
    model = task(loss="bce")
    logits = torch.randn(2, 4)
    mixed = torch.tensor([[0.7, 0.3, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, (mixed > 0).float())
    torch.testing.assert_close(model._loss(logits, mixed), expected)
    hard = model._loss(logits, torch.tensor([3, 3]))
    assert hard.isfinite()


def test_resolution_schedule_resizes_training_images(tmp_path):
    schedule = [(0, 8), (2, 16), (4, 24)]
    assert [scheduled_size(schedule, epoch) for epoch in range(6)] == [8, 8, 16, 16, 24, 24]
    assert scheduled_size(None, 3) is None
    seen = []
    model = task(resolution_schedule=[(0, 8), (1, 16)])
    model.backbone.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[-1]))
    trainer(tmp_path, max_epochs=2, limit_val_batches=0).fit(model, PictureData())
    assert seen == [8] * 4 + [16] * 4


def test_prediction_gives_classes_and_probabilities(tmp_path):
    outputs = trainer(tmp_path).predict(task(), PictureData())
    probability = torch.cat([o["probability"] for o in outputs])
    assert probability.shape == (20, 4)
    torch.testing.assert_close(probability.sum(-1), torch.ones(20))
    assert torch.equal(torch.cat([o["label"] for o in outputs]), probability.argmax(-1))


def test_weights_to_start_from_give_way_to_a_new_head_and_to_another_grid(tmp_path):
    source = task(encoding="ape_learned", ema_decay=0.5)
    torch.nn.init.normal_(source.ema.blocks[0].attn.qkv.weight)
    path = tmp_path / "source.ckpt"
    torch.save({"state_dict": source.state_dict()}, path)
    bigger = {**TINY, "img_size": 32}
    model = task(encoding="ape_learned", backbone_options=bigger, num_classes=7, init_from=str(path))
    model._start_from(str(path))
    assert torch.equal(model.backbone.blocks[0].attn.qkv.weight, source.ema.blocks[0].attn.qkv.weight)
    assert model(torch.randn(1, 1, 32, 32)).shape == (1, 7)
    with pytest.raises(ValueError, match="encoding"):
        task(encoding="rope_mixed")._start_from(str(path))
    with pytest.raises(FileNotFoundError, match="missing"):
        task()._start_from(str(tmp_path / "missing.ckpt"))
    assert "head.weight" in backbone_weights({}, model.backbone)


def test_grad_checkpointing_changes_no_gradient():
    data, gradients = Pictures(4), []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = task(grad_checkpointing=enabled).train()
        model._loss(model.backbone(data.images), data.labels).backward()
        gradients.append([p.grad for p in model.backbone.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adamv"}, "did you mean"),
        ({"lr": 0.0}, "lr"),
        ({"min_lr": 1.0}, "min_lr"),
        ({"warmup_steps": 1, "warmup_epochs": 1.0}, "either"),
        ({"loss": "bce", "label_smoothing": 0.1}, "label_smoothing"),
        ({"ema_decay": 1.5}, "ema_decay"),
        ({"eval_positions": ["raw", "raw"]}, "each once"),
        ({"eval_positions": []}, "eval_positions"),
        ({"encoding": None, "encoding_options": {"base": 1.0}}, "without an encoding"),
        ({"encoding": "rope_mixt"}, "rope_mixed"),
        ({"resolution_schedule": [(0, 0)]}, "resolution_schedule"),
        ({"position_scaling": "stretched"}, "position_scaling"),
    ],
)
def test_mistakes_are_told_at_construction(options, words):
    with pytest.raises(ValueError, match=words):
        task(**options)


def test_an_unknown_backbone_names_the_nearest():
    with pytest.raises(ValueError, match="mmpe_vit_small_patch16_224"):
        ImageClassification("mmpe_vit_smal_patch16_224")


def test_scaled_positions_need_a_backbone_that_knows_them():
    with pytest.raises(ValueError, match="set_position_scaling"):
        ImageClassification("resnet18", num_classes=4, eval_positions=["raw", "scaled"])


def test_a_wrong_number_of_classes_is_told_before_training(tmp_path):
    with pytest.raises(ValueError, match="has 4 classes"):
        trainer(tmp_path, max_epochs=1).fit(task(num_classes=5), PictureData())


@pytest.mark.slow
def test_a_compiled_backbone_trains_to_the_same_loss(tmp_path):
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        run = trainer(tmp_path, max_steps=3, limit_val_batches=0)
        run.fit(task(compile=compiled), PictureData())
        losses.append(float(run.callback_metrics["train/loss"]))
    assert math.isclose(*losses, rel_tol=1e-4)


CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "vit").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_recipe_says_its_command_and_builds_what_it_trains(path):
    text = path.read_text()
    assert f"mmpe fit --config vit/{path.name}" in text.split("seed_everything")[0]
    config = yaml.safe_load(text)
    options, data = config["model"]["init_args"], config["data"]["init_args"]
    if "backbone_options" in options:
        options["backbone_options"]["depth"] = 1
    model = getattr(mmpe.models, config["model"]["class_path"].rsplit(".", 1)[1])(**options).train()
    optimizer = build_optimizer(getattr(model, model.network_name), model.hparams.optimizer, 1e-3, 0.05)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    size = data.get("image_size", data.get("grid_size"))
    if isinstance(model, ImageClassification):
        assert model.backbone.patch_embed.img_size == (size, size)
        frames = () if model.backbone.num_frames is None else (model.backbone.num_frames,)
        images = torch.randn(2, model.backbone.in_chans, *frames, size, size)
        targets = model._augmented(images, torch.tensor([1, 2]))[1]
        assert model._loss(model.backbone(images), targets).isfinite()
