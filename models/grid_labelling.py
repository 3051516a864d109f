"""Labelling of token grids: the small model that shows which encodings know direction, and on which grids."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpe.integrations.backbone import BlockTerms, create_for_grid
from mmpe.positions import Positions

from .task import IGNORED, POSITION_RULES, EvalScores, Task, check_training
from .vit_blocks import Attention, Block, heads_of, init_weights

NO_LABEL = -100  # cross_entropy's own value for tokens that carry no label
Rule = Literal["raw", "scaled"]


class TokenGridTransformer(nn.Module):
    """A pre-norm transformer over a grid of tokens, with one prediction a token and no class token.

    Args:
        num_tokens: number of token types.
        num_classes: number of classes.
        encoding: name of a position encoding, or several joined by "+".
        encoding_options: options of the encoding.
        grid: trained rows and columns; position tables have this size, and scaled positions are stretched to it.
        dim: model width C.
        depth: number of blocks.
        num_heads: number of attention heads.
        mlp_ratio: hidden width of the MLP over C.
        position_scaling: "raw" counts cells; "scaled" stretches the positions of every grid to the trained one.
    """

    def __init__(
        self,
        num_tokens: int = 4,
        num_classes: int = 8,
        encoding: str = "none",
        encoding_options: dict[str, Any] | None = None,
        grid: tuple[int, int] = (8, 8),
        dim: int = 64,
        depth: int = 2,
        num_heads: int = 4,
        mlp_ratio: float = 2.0,
        position_scaling: Rule = "raw",
    ) -> None:
        super().__init__()
        self.grid = tuple(grid)
        self.set_position_scaling(position_scaling)
        self.embedding = nn.Embedding(num_tokens, dim)
        self.encoding = create_for_grid(encoding, dim, num_heads, depth, self.grid, 0, encoding_options)
        norm = partial(nn.LayerNorm, eps=1e-6)
        block = partial(Block, attention=partial(Attention, **heads_of(self.encoding)))
        self.blocks = nn.ModuleList(block(dim, num_heads, norm, mlp_ratio=mlp_ratio) for _ in range(depth))
        self.norm = norm(dim)
        self.head = nn.Linear(dim, num_classes)
        init_weights(self, "", num_classes, skip="encoding")

    def set_position_scaling(self, mode: str) -> None:
        """Choose how the positions of grids of other sizes are counted: "raw" or "scaled"."""
        if mode not in POSITION_RULES:
            raise ValueError(f"position_scaling must be 'raw' or 'scaled', got {mode!r}")
        self.position_scaling = mode

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters without weight decay: those of the encoding."""
        return {f"encoding.{name}" for name in self.encoding.no_weight_decay()}

    def forward(self, tokens: Tensor) -> Tensor:
        """Token types (B, H, W) -> logits (B, H, W, classes)."""
        positions = Positions.grid(*tokens.shape[1:], device=tokens.device)
        if self.position_scaling == "scaled":
            positions = positions.scaled_to(self.grid)
        positions = self.encoding.place(positions, tokens.shape[0])
        terms = BlockTerms(self.encoding, positions)
        x = self.embedding(tokens.flatten(1))  # (B, N, C)
        for layer, block in enumerate(self.blocks):
            x = block(self.encoding.embed(x, positions, layer=layer), partial(terms, layer=layer))
        return self.head(self.norm(x)).unflatten(1, tokens.shape[1:])


class GridLabelling(Task):
    """Train and evaluate a small transformer that labels the cells of a grid.

    A batch is {"tokens": (B, H, W) int64, "label": (B, H, W) int64}, where -100 marks cells without a label, and
    optionally "valid": (B,) bool. For every evaluation grid the validation logs `val/acc@NAME` and `val/loss@NAME`,
    with NAME such as 12x12 from the datamodule's `eval_names`; results with scaled positions end in `_scaled`.

    Args:
        encoding: name of a position encoding, or several joined by "+".
        encoding_options: options of the encoding, as `mmpe describe NAME` lists them.
        num_tokens: number of token types.
        num_classes: number of classes.
        grid: rows and columns of the training grids.
        dim: model width.
        depth: number of blocks.
        num_heads: attention heads.
        mlp_ratio: hidden width of the MLP over the model width.
        optimizer: name of a timm optimiser, such as adamw or lamb.
        lr: peak learning rate.
        weight_decay: weight decay of the matrices; vectors and position encodings have none.
        betas: momentum coefficients of the optimiser; None keeps its own.
        warmup_steps: linear warm-up in steps.
        warmup_epochs: linear warm-up in epochs, instead of `warmup_steps`.
        min_lr: learning rate at the end of the cosine.
        position_scaling: how positions of other grids are numbered in training and prediction: raw or scaled.
        eval_positions: the rules that validation and test report: raw, scaled or both.
    """

    network_name = "network"

    def __init__(
        self,
        encoding: str = "none",
        encoding_options: dict[str, Any] | None = None,
        num_tokens: int = 4,
        num_classes: int = 8,
        grid: tuple[int, int] = (8, 8),
        dim: int = 64,
        depth: int = 2,
        num_heads: int = 4,
        mlp_ratio: float = 2.0,
        optimizer: str = "adamw",
        lr: float = 2e-3,
        weight_decay: float = 0.01,
        betas: tuple[float, float] | None = None,
        warmup_steps: int = 50,
        warmup_epochs: float = 0.0,
        min_lr: float = 0.0,
        position_scaling: Rule = "raw",
        eval_positions: list[Rule] = ["raw"],  # noqa: B006  (never modified; jsonargparse shows it)
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        check_training(optimizer, lr, min_lr, warmup_steps, warmup_epochs, eval_positions)
        self.network = TokenGridTransformer(
            num_tokens, num_classes, encoding, encoding_options, grid, dim, depth, num_heads, mlp_ratio,
            position_scaling,
        )  # fmt: skip
        self.scores = nn.ModuleList()

    def forward(self, tokens: Tensor) -> Tensor:
        """Token types (B, H, W) -> logits (B, H, W, classes)."""
        return self.network(tokens)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = batch["label"].flatten()
        losses = F.cross_entropy(
            self.network(batch["tokens"]).flatten(0, 2), labels, ignore_index=NO_LABEL, reduction="sum"
        )
        # A batch without a single labelled cell has loss 0 and not NaN.
        loss = losses / (labels != NO_LABEL).sum().clamp(min=1)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch["tokens"]), sync_dist=True)
        return self.with_own_losses(loss)

    def new_scores(self) -> EvalScores:
        return EvalScores(self.hparams.num_classes, {"acc": 1})

    def evaluate(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = torch.where(batch["label"] == NO_LABEL, IGNORED, batch["label"])
        if "valid" in batch:
            labels = torch.where(batch["valid"][:, None, None], labels, IGNORED)
        return self.eval_network(batch["tokens"]).flatten(0, 2), labels.flatten()

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Class of every cell: {"label": (B, H, W)}."""
        return {"label": self.eval_network(batch["tokens"]).argmax(-1)}
