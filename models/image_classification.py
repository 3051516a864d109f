"""Image classification: any timm backbone, ours with a chosen position encoding, evaluated at several sizes."""

from __future__ import annotations

import copy
from difflib import get_close_matches
from typing import Any, Literal, cast

import timm
import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn
from torch.optim import Optimizer

from .optim import update_average
from .task import IGNORED, EvalScores, Task, check_training, load_weights, use_positions
from .vit import VisionTransformer  # the import registers the mmpe_vit_* models in timm
from .vit_checkpoints import checkpoint_filter_fn

Batch = dict[str, Tensor]
Rule = Literal["raw", "scaled"]


class ImageClassification(Task):
    """Train and evaluate an image classifier.

    A batch is {"image": (B, C, H, W), "label": (B,), optional "valid": (B,) bool}; examples that are not valid (the
    padding of the last batch of a process) are not counted. For every evaluation size the validation logs
    `val/loss@NAME`, `val/top1@NAME` and, above 5 classes, `val/top5@NAME`, with NAME from the datamodule's
    `eval_names`; results with scaled positions end in `_scaled`.

    Args:
        backbone: name of a timm model; those called mmpe_vit_* take `encoding`.
        encoding: name of a position encoding, or several joined by "+"; None leaves the backbone's own.
        encoding_options: options of the encoding, as `mmpe describe NAME` lists them.
        backbone_options: further arguments of the backbone, such as img_size, patch_size, in_chans, embed_dim, depth,
            num_heads or drop_path_rate.
        num_classes: number of classes.
        init_from: weights to start from: "pretrained" for timm's, or the path of a checkpoint (Lightning, torch or
            safetensors). A checkpoint that training resumes from takes precedence.
        optimizer: name of a timm optimiser, such as adamw or lamb.
        lr: peak learning rate.
        weight_decay: weight decay of the matrices; vectors, position encodings and class tokens have none.
        betas: momentum coefficients of the optimiser; None keeps its own.
        layer_decay: factor on the learning rate per layer, counted from the head; None for one rate.
        warmup_steps: linear warm-up in steps.
        warmup_epochs: linear warm-up in epochs, instead of `warmup_steps`.
        min_lr: learning rate at the end of the cosine.
        loss: cross_entropy, or bce (binary cross-entropy over all classes, any mixed-in class counts as present).
        label_smoothing: share of the target spread over all classes; cross_entropy only.
        mixup: alpha of mixup; 0 for none.
        cutmix: alpha of CutMix; 0 for none.
        mixup_prob: probability that a batch is mixed at all.
        mixup_switch_prob: probability of CutMix where both are on.
        ema_decay: decay of the moving average of the weights, which validation and prediction then use; None for none.
        resolution_schedule: pairs [epoch, size]: from that epoch on, training images are resized to size x size.
        position_scaling: how positions beyond the trained grid are numbered in training and prediction: raw (as they
            come) or scaled (stretched to the trained grid).
        eval_positions: the rules that validation and test report: raw, scaled or both.
        compile: compile the backbone with torch.compile.
        grad_checkpointing: recompute activations in the backward pass to save memory.
    """

    network_name = "backbone"

    def __init__(
        self,
        backbone: str = "mmpe_vit_small_patch16_224",
        encoding: str | None = None,
        encoding_options: dict[str, Any] | None = None,
        backbone_options: dict[str, Any] | None = None,
        num_classes: int = 1000,
        init_from: str | None = None,
        optimizer: str = "adamw",
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        betas: tuple[float, float] | None = None,
        layer_decay: float | None = None,
        warmup_steps: int = 0,
        warmup_epochs: float = 0.0,
        min_lr: float = 0.0,
        loss: Literal["cross_entropy", "bce"] = "cross_entropy",
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mixup_prob: float = 1.0,
        mixup_switch_prob: float = 0.5,
        ema_decay: float | None = None,
        resolution_schedule: list[tuple[int, int]] | None = None,
        position_scaling: Rule = "raw",
        eval_positions: list[Rule] = ["raw"],  # noqa: B006  (never modified; jsonargparse shows it)
        compile: bool = False,
        grad_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        check_training(optimizer, lr, min_lr, warmup_steps, warmup_epochs, eval_positions)
        _check_losses(loss, label_smoothing, ema_decay, resolution_schedule)
        self.backbone = self._build()
        for rule in (*eval_positions, position_scaling):
            use_positions(self.backbone, rule)
        if grad_checkpointing:
            cast(Any, self.backbone).set_grad_checkpointing(True)
        self.ema = None if ema_decay is None else copy.deepcopy(self.backbone).requires_grad_(False)
        # bce thresholds its targets at 0, which smoothing would lift everywhere.
        self.mix = _mixer(mixup, cutmix, mixup_prob, mixup_switch_prob, label_smoothing, num_classes)
        self.scores = nn.ModuleList()

    @property
    def eval_network(self) -> nn.Module:
        """The network of validation and prediction: the moving average where there is one."""
        return self.backbone if self.ema is None else self.ema

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) -> logits (B, classes)."""
        network = self.backbone if self.training else self.eval_network
        return network(images)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and self.hparams.init_from is not None:
            self._start_from(self.hparams.init_from)
        if self.hparams.compile:
            self.backbone.compile()

    def _start_from(self, source: str) -> None:
        if source == "pretrained":
            weights = self._build(pretrained=True).state_dict()
        else:
            weights = backbone_weights(load_weights(source), self.backbone)
        try:
            self.backbone.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"init_from={source!r} does not fit {self.hparams.backbone}: {error}") from error
        if self.ema is not None:
            self.ema.load_state_dict(self.backbone.state_dict())

    def _build(self, pretrained: bool = False) -> nn.Module:
        h = self.hparams
        return build_backbone(h.backbone, h.encoding, h.encoding_options, h.backbone_options, h.num_classes, pretrained)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, targets = self._augmented(batch["image"], batch["label"])
        loss = self._loss(self.backbone(images), targets)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(images), sync_dist=True)
        return self.with_own_losses(loss)

    def _augmented(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Resize and mix: images (B, C, H, W) with labels (B,), or (B, classes) where mixing is on."""
        size = scheduled_size(self.hparams.resolution_schedule, self.current_epoch)
        if size is not None and images.shape[-2:] != (size, size):
            images = F.interpolate(images, (size, size), mode="bilinear", antialias=True, align_corners=False)
        if self.mix is None:
            return images, labels
        # timm mixes in place and in pairs: keep the loader's tensors whole, and leave an odd last example unmixed.
        even = len(images) // 2 * 2
        mixed, targets = self.mix(images[:even].clone(), labels[:even]) if even else (images[:0], labels[:0])
        if even == len(images):
            return mixed, targets
        rest = F.one_hot(labels[even:], self.hparams.num_classes).to(torch.float32)
        return torch.cat([mixed, images[even:]]), torch.cat([targets.view(even, -1), rest]) if even else rest

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.hparams.loss == "bce":
            present = targets > 0 if targets.dim() == 2 else F.one_hot(targets, self.hparams.num_classes)
            return F.binary_cross_entropy_with_logits(logits, present.to(logits.dtype))
        smoothing = self.hparams.label_smoothing if targets.dim() == 1 else 0.0  # mixed targets are smooth already
        return F.cross_entropy(logits, targets, label_smoothing=smoothing)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer | Any, optimizer_closure: Any = None
    ) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        # Here and not at the end of the batch, when the checkpoint of this step is written already.
        if self.ema is not None:
            update_average(self.ema, self.backbone, self.hparams.ema_decay)

    def new_scores(self) -> EvalScores:
        top_k = {"top1": 1, "top5": 5} if self.hparams.num_classes > 5 else {"top1": 1}
        return EvalScores(self.hparams.num_classes, top_k)

    def logits(self, images: Tensor) -> Tensor:
        """What evaluation scores: images -> logits (B, classes)."""
        return self.eval_network(images)

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        labels = batch["label"]
        if "valid" in batch:
            labels = torch.where(batch["valid"], labels, IGNORED)
        return self.logits(batch["image"]), labels

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Class and probabilities of every valid image: {"label": (B,), "probability": (B, classes)}."""
        probability = self.logits(batch["image"]).float().softmax(-1)
        if "valid" in batch:
            probability = probability[batch["valid"]]
        return {"label": probability.argmax(-1), "probability": probability}


def build_backbone(
    name: str,
    encoding: str | None,
    encoding_options: dict[str, Any] | None,
    options: dict[str, Any] | None,
    num_classes: int,
    pretrained: bool = False,
) -> nn.Module:
    """A timm model with its classifier; `encoding` replaces the position encoding of a timm ViT that is not ours."""
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "see timm.list_models()"
        raise ValueError(f"unknown backbone {name!r}; {hint}")
    if pretrained and name.startswith("mmpe_"):
        raise ValueError(f"timm has no pretrained weights for {name}; give init_from the path of a checkpoint")
    if encoding is None and encoding_options:
        raise ValueError(f"encoding_options={encoding_options} without an encoding; name one")
    ours = name.startswith("mmpe_")
    chosen = {"encoding": encoding, "encoding_options": encoding_options} if ours and encoding is not None else {}
    network = timm.create_model(name, pretrained=pretrained, num_classes=num_classes, **chosen, **(options or {}))
    if encoding is not None and not ours:
        from mmpe.integrations.timm import set_position_encoding

        set_position_encoding(network, encoding, **(encoding_options or {}))
    return network


def backbone_weights(weights: dict[str, Tensor], backbone: nn.Module) -> dict[str, Tensor]:
    """The backbone's part of a checkpoint: the moving average where there is one, with a new head for new classes."""
    for part in ("ema.", "backbone."):
        if any(name.startswith(part) for name in weights):
            weights = {k.removeprefix(part): v for k, v in weights.items() if k.startswith(part)}
            break
    if isinstance(backbone, VisionTransformer):
        weights = checkpoint_filter_fn(weights, backbone)
    head = getattr(backbone, "pretrained_cfg", {}).get("classifier") or "head"
    own = {name: tensor for name, tensor in backbone.state_dict().items() if name.startswith(f"{head}.")}
    return {**weights, **{k: v for k, v in own.items() if k not in weights or weights[k].shape != v.shape}}


def scheduled_size(schedule: list[tuple[int, int]] | None, epoch: int) -> int | None:
    """The training size of an epoch: that of the last entry that has begun; None before the first."""
    begun = [(start, size) for start, size in schedule or [] if start <= epoch]
    return max(begun)[1] if begun else None


def _mixer(mixup: float, cutmix: float, prob: float, switch: float, smoothing: float, num_classes: int) -> Mixup | None:
    if mixup <= 0 and cutmix <= 0:
        return None
    return Mixup(mixup, cutmix, prob=prob, switch_prob=switch, label_smoothing=smoothing, num_classes=num_classes)


def _check_losses(
    loss: str, label_smoothing: float, ema_decay: float | None, schedule: list[tuple[int, int]] | None
) -> None:
    if loss not in ("cross_entropy", "bce"):
        raise ValueError(f"loss must be 'cross_entropy' or 'bce', got {loss!r}")
    if loss == "bce" and label_smoothing:
        raise ValueError(f"label_smoothing={label_smoothing} has no meaning with loss='bce'; set it to 0")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
    if ema_decay is not None and not 0 < ema_decay < 1:
        raise ValueError(f"ema_decay must be between 0 and 1, or null, got {ema_decay}")
    if any(epoch < 0 or size < 1 for epoch, size in schedule or []):
        raise ValueError(f"resolution_schedule must hold pairs [epoch, size] of positive numbers, got {schedule}")
