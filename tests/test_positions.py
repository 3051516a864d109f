"""`Positions`: constructors, dropping tokens, rescaling, and what is refused."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmpe import Positions

sizes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@given(sizes=sizes, prefix=st.integers(0, 5))
def test_grids_are_row_major(sizes, prefix):
    positions = Positions.of_size(sizes, prefix=prefix)
    assert positions.coords.dtype == torch.float32
    assert positions.num_axes == len(sizes) == positions.coords.shape[-1]
    assert positions.grid_size == sizes == positions.extent
    assert positions.num_tokens == prefix + len(positions.coords)
    strides = torch.tensor([math.prod(sizes[a + 1 :]) for a in range(len(sizes))])
    torch.testing.assert_close((positions.coords.long() * strides).sum(-1), torch.arange(len(positions.coords)))


def test_named_constructors():
    assert Positions.grid(2, 3).axes == ("h", "w")
    assert Positions.grid(2, 3).coords[1].tolist() == [0, 1]  # (row, column)
    assert Positions.video(4, 2, 3).axes == ("t", "h", "w")
    assert Positions.video(4, 2, 3).coords[6].tolist() == [1, 0, 0]
    assert Positions.line(5).coords.tolist() == [[0], [1], [2], [3], [4]]
    assert Positions.grid(14, 14, prefix=1).num_tokens == 197


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bfloat16])
def test_points_are_float32(dtype):
    """Fault: bf16 positions merge neighbours above 256."""
    assert Positions.points(torch.tensor([[1, 2], [3, 4]], dtype=dtype)).coords.dtype == torch.float32


def test_integers_up_to_2_24_stay_exact():
    coords = torch.tensor([[2**24 - 1], [2**24]])
    assert Positions.points(coords).coords.diff(dim=0).item() == 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Positions.grid(0, 3), "at least 1.*smaller than a patch"),
        (lambda: Positions.of_size((1, 2, 3, 4)), "1, 2 or 3 sizes"),
        (lambda: Positions.of_size(()), "1, 2 or 3 sizes"),
        (lambda: Positions.grid(2, 2, prefix=-1), "prefix must be 0 or more"),
        (lambda: Positions.points(torch.zeros(4)), r"must be \(N, A\) or \(B, N, A\)"),
        (lambda: Positions.points(torch.zeros(1, 2, 4, 2)), r"must be \(N, A\) or \(B, N, A\)"),
        (lambda: Positions.points(torch.zeros(2, 0, 2)), "hold no token"),
        (lambda: Positions.points(torch.zeros(4, 2), extent=(3, 0)), "extent.*positive"),
        (lambda: Positions.points(torch.zeros(4, 2), extent=(3, float("nan"))), "extent.*positive"),
        (lambda: Positions.grid(4, 2).scaled_to((2, 0)), "sizes.*positive"),
        (lambda: Positions.points(torch.zeros(4, 4)), "does not name the 4 coordinates"),
        (lambda: Positions.points(torch.zeros(4, 2), axes=("x",)), "does not name the 2 coordinates"),
        (lambda: Positions.points(torch.zeros(4, 2), extent=(3,)), "extent has 1 entries"),
        (lambda: Positions.points(torch.tensor([[0.0, float("nan")]])), r"finite.*\[0, 1\]"),
        (lambda: Positions.points(torch.tensor([[0.0], [float("inf")]])), r"finite.*\[1, 0\]"),
        (lambda: Positions.points(torch.zeros(4, 2)).scaled_to((2, 2)), "extent"),
        (lambda: Positions.grid(4, 2).scaled_to((2,)), "one size for each of the axes"),
        (lambda: Positions.grid(4, 2).with_coords(torch.zeros(7, 2)), "must end in"),
    ],
)
def test_mistakes_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_four_axes_need_names():
    assert Positions.points(torch.zeros(5, 4), axes=("t", "d", "h", "w")).num_axes == 4


def test_keep_is_per_sample_and_composes():
    """Fault: patch dropout loses which tokens stayed in which sample (timm#2549)."""
    positions = Positions.grid(3, 4, prefix=2)
    kept = positions.keep(torch.tensor([[0, 5, 11], [1, 2, 3]]))
    assert kept.coords.shape == (2, 3, 2)
    assert kept.coords[0].tolist() == [[0, 0], [1, 1], [2, 3]]
    assert (kept.grid_size, kept.prefix, kept.num_tokens, kept.extent) == (None, 2, 5, (3, 4))
    again = kept.keep(torch.tensor([[2, 0], [1, 1]]))
    assert again.coords.tolist() == [[[2, 3], [0, 0]], [[0, 2], [0, 2]]]
    assert positions.keep(torch.tensor([4, 1])).coords.tolist() == [[1, 0], [0, 1]]


def test_scaled_to_spans_the_trained_grid():
    scaled = Positions.grid(28, 7).scaled_to((14, 14))
    torch.testing.assert_close(scaled.coords[:8, 1], torch.tensor([0.0, 2, 4, 6, 8, 10, 12, 0]))
    assert scaled.coords[-1].tolist() == [13.5, 12.0]
    assert scaled.extent == (14, 14)
    torch.testing.assert_close(scaled.scaled_to((28, 7)).coords, Positions.grid(28, 7).coords)


def test_positions_are_immutable_values():
    positions = Positions.grid(2, 2)
    with pytest.raises(AttributeError):
        positions.prefix = 3
    moved = positions.with_coords(positions.coords.double() + 1)
    assert moved.coords.dtype == torch.float32
    assert positions.coords.max() == 1
    for twin in (copy.deepcopy(positions), pickle.loads(pickle.dumps(positions))):
        assert torch.equal(twin.coords, positions.coords)


def test_device_is_that_of_the_call():
    """Fault: positions built on the CPU and copied in every step block CUDA graphs (diffusers#9299)."""
    positions = Positions.grid(3, 3, device="meta")
    assert positions.device.type == "meta"
    assert Positions.grid(3, 3).to("meta").device.type == "meta"
    assert positions.to("meta") is positions


def test_building_positions_compiles():
    def count(x):
        return Positions.grid(x.shape[-2], x.shape[-1], prefix=1).coords.sum() + x.sum()

    x = torch.zeros(3, 4)
    compiled = torch.compile(count, fullgraph=True, backend="eager")
    assert compiled(x) == count(x) == 30


def test_shared_indices_keep_the_same_tokens_of_every_sample():
    coords = torch.rand(3, 6, 2)
    kept = Positions.points(coords).keep(torch.tensor([4, 1]))
    torch.testing.assert_close(kept.coords, coords[:, [4, 1]])
