"""The grid-labelling task: what its network can and cannot tell apart, and how cells without a label are treated."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mmpe.models import GridLabelling
from mmpe.models.grid_labelling import NO_LABEL, TokenGridTransformer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*"),
]


class LeftNeighbours(Dataset):
    """Tokens 0 to 3; every cell with a 1 is labelled by its left neighbour."""

    def __init__(self, count: int, size: int, seed: int) -> None:
        self.tokens = torch.randint(4, (count, size, size), generator=torch.Generator().manual_seed(seed))
        left = self.tokens.roll(1, dims=2)
        self.labels = torch.where(self.tokens == 1, left, NO_LABEL)
        self.labels[:, :, 0] = NO_LABEL

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.tokens[index], "label": self.labels[index]}


class GridData(L.LightningDataModule):
    num_classes = 8
    eval_names = ("8x8", "12x12")

    def train_dataloader(self) -> DataLoader:
        return DataLoader(LeftNeighbours(16 * 160, 8, seed=0), batch_size=16)

    def val_dataloader(self) -> list[DataLoader]:
        return [DataLoader(LeftNeighbours(32, size, seed=1), batch_size=5) for size in (8, 12)]


def test_a_directional_encoding_learns_the_left_neighbour_and_keeps_it_on_a_larger_grid(tmp_path):
    run = L.Trainer(
        default_root_dir=tmp_path,
        max_epochs=1,
        accelerator="cpu",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    run.fit(GridLabelling("rope_axial", eval_positions=["raw", "scaled"]), GridData())
    accuracy = {name: float(value) for name, value in run.callback_metrics.items() if "acc@" in name}
    assert accuracy["val/acc@8x8"] > 0.9
    assert accuracy["val/acc@12x12"] > 0.9
    assert accuracy["val/acc@8x8"] == accuracy["val/acc@8x8_scaled"]
    assert set(accuracy) == {"val/acc@8x8", "val/acc@12x12", "val/acc@8x8_scaled", "val/acc@12x12_scaled"}


def sharp(encoding: str) -> TokenGridTransformer:
    """A network whose attention is far from uniform, as after training; fresh weights would hide any position."""
    network = TokenGridTransformer(encoding=encoding).eval()
    for block in network.blocks:
        block.attn.qkv.weight.mul_(10.0)
        block.attn.proj.weight.mul_(10.0)
    return network


@torch.no_grad()
def test_no_encoding_cannot_tell_cells_apart_and_a_distance_bias_cannot_tell_mirrored_grids():
    tokens = torch.randint(4, (3, 5, 7))
    order = torch.randperm(35)
    none = sharp("none")
    shuffled = tokens.flatten(1)[:, order].view_as(tokens)
    torch.testing.assert_close(none(shuffled).flatten(1, 2), none(tokens).flatten(1, 2)[:, order], atol=1e-4, rtol=1e-4)

    isotropic = sharp("alibi_2d")
    torch.testing.assert_close(isotropic(tokens.flip(2)), isotropic(tokens).flip(2), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(isotropic(tokens.mT), isotropic(tokens).transpose(1, 2), atol=1e-4, rtol=1e-4)

    directional = sharp("rope_axial")
    assert (directional(tokens.flip(2)) - directional(tokens).flip(2)).abs().max() > 0.05


@torch.no_grad()
def test_scaled_positions_stretch_a_grid_to_the_trained_one():
    network = TokenGridTransformer(encoding="rope_axial", grid=(4, 4)).eval()
    same, larger = torch.randint(4, (1, 4, 4)), torch.randint(4, (1, 8, 8))
    raw = network(same), network(larger)
    network.set_position_scaling("scaled")
    assert torch.equal(network(same), raw[0])
    assert not torch.allclose(network(larger), raw[1])
    with pytest.raises(ValueError, match="'raw' or 'scaled'"):
        network.set_position_scaling("both")


def test_cells_without_a_label_count_neither_in_the_loss_nor_in_the_accuracy():
    model = GridLabelling("none")
    model.log = lambda *args, **kwargs: None
    tokens = torch.randint(4, (2, 3, 3))
    labels = torch.full((2, 3, 3), NO_LABEL)
    assert model.training_step({"tokens": tokens, "label": labels}, 0) == 0.0
    labels[0, 1, 1] = 5
    loss = model.training_step({"tokens": tokens, "label": labels}, 0)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(model(tokens)[0, 1, 1], torch.tensor(5)))

    model.eval()
    scores = model.new_scores()
    labels[1, 0, 0] = 2
    scores.update(*model.evaluate({"tokens": tokens, "label": labels, "valid": torch.tensor([True, False])}))
    assert scores.compute()["acc"] == float(model(tokens)[0, 1, 1].argmax() == 5)
    torch.testing.assert_close(scores.compute()["loss"], loss)


def test_the_network_has_no_decayed_encoding_and_predicts_every_cell():
    model = GridLabelling("rope_mixed")
    assert model.network.no_weight_decay() == {
        name for name, _ in model.network.named_parameters() if name.startswith("encoding.")
    }
    assert model.predict_step({"tokens": torch.zeros(2, 3, 4, dtype=torch.long)}, 0)["label"].shape == (2, 3, 4)
