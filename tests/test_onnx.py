"""Every encoding leaves PyTorch: ONNX knows no complex numbers (fault reports sam2#186, onnx#6480)."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mmpe

pytest.importorskip("onnxscript", reason="the ONNX exporter is in the dev extra")
onnxruntime = pytest.importorskip("onnxruntime", reason="running the export needs onnxruntime, in the dev extra")

QUICK = ("rope_axial", "rope_mixed", "pape")


class Attention(nn.Module):
    """One attention layer over the cells of a feature map of any size."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.encoding = mmpe.create_encoding(name, dim=32, heads=2, axes=2)
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        positions = mmpe.Positions.grid(x.shape[2], x.shape[3], device=x.device)
        tokens = self.encoding.embed(x.flatten(2).transpose(1, 2), positions)
        q, k, v = self.qkv(tokens).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return mmpe.attend(q, k, v, self.encoding(positions, tokens))


def _cases() -> list[object]:
    two_axes = mmpe.list_encodings(axes=2)
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in two_axes]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", _cases())
def test_onnx_runs_at_another_size_than_it_was_exported_at(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Attention(name).eval()
    sizes = {2: torch.export.Dim("height", min=2, max=64), 3: torch.export.Dim("width", min=2, max=64)}
    program = torch.onnx.export(model, (torch.randn(1, 32, 3, 5),), dynamo=True, dynamic_shapes=(sizes,), verbose=False)
    program.save(tmp_path / "attention.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "attention.onnx", providers=["CPUExecutionProvider"])
    x = torch.randn(1, 32, 4, 7)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(x), atol=1e-5, rtol=1e-5)
