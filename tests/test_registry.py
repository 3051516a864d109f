"""Names, options, sums, and what is said about wrong ones."""

import json

import pytest
import torch
from torch import nn

import mmpe
from mmpe.encoding import SumEncoding
from mmpe.registry import _REGISTRY, count_parameters

FIRST = {"none", "ape_learned", "ape_sincos", "rope", "rope_axial", "rope_mixed", "cpe", "pape", "pape_ri", "alibi_2d"}


def test_the_first_encodings_are_there():
    assert set(mmpe.list_encodings()) >= FIRST


def test_list_filters():
    assert set(mmpe.list_encodings("rope*")) >= {"rope", "rope_axial", "rope_mixed"}
    assert set(mmpe.list_encodings("ape_*")) >= {"ape_learned", "ape_sincos"}
    assert all(name.startswith("ape_") for name in mmpe.list_encodings("ape_*"))
    assert "alibi_2d" in mmpe.list_encodings(kind="bias")
    assert "alibi_2d" not in mmpe.list_encodings(kind="rotary")
    assert mmpe.list_encodings(axes=4) == []
    assert mmpe.list_encodings() == sorted(mmpe.list_encodings())


@pytest.mark.parametrize(("wrong", "right"), [("rope_axal", "rope_axial"), ("alibi2d", "alibi_2d"), ("nome", "none")])
def test_unknown_names_offer_the_nearest(wrong, right):
    with pytest.raises(ValueError, match=f"unknown encoding '{wrong}'") as error:
        mmpe.create_encoding(wrong, dim=64, heads=4)
    hint, known = str(error.value).split("Known: ")
    assert f"did you mean {right!r}" in hint
    assert known.split(", ") == mmpe.list_encodings()


def test_unknown_options_offer_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'interpolation'"):
        mmpe.create_encoding("ape_learned", dim=64, heads=4, interpolatoin="bilinear")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"dim": 64, "heads": 5}, "divisible"),
        ({"dim": 0, "heads": 1}, "positive"),
        ({"dim": 8, "heads": -1}, "positive"),
    ],
)
def test_impossible_widths_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        mmpe.create_encoding("none", **shape)


def test_a_name_is_registered_once():
    before = dict(_REGISTRY)
    with pytest.raises(ValueError, match="'none' is registered already"):

        @mmpe.register_encoding("none")
        class Twin(mmpe.PositionEncoding):
            """A second encoding of the same name."""

    assert before == _REGISTRY


def test_new_encodings_need_nothing_but_the_decorator():
    @mmpe.register_encoding("test_only")
    class TestOnly(mmpe.PositionEncoding):
        """Adds a learned constant to every token.

        Args:
            std: spread of the initial values,
                over all channels.
        """

        source = "arXiv 0000.00000"

        def __init__(self, dim, heads, axes=2, depth=1, std=1.0):
            super().__init__(dim, heads, axes, depth)
            self.constant = nn.Parameter(std * torch.randn(dim))

        def embed(self, x, positions, layer=0):
            return x + self.constant

    try:
        enc = mmpe.create_encoding("test_only", dim=8, heads=2, std=0.0)
        assert torch.equal(enc.embed(torch.ones(1, 4, 8), mmpe.Positions.grid(2, 2)), torch.ones(1, 4, 8))
        (option,) = mmpe.describe("test_only").options
        assert (option.name, option.default) == ("std", 1.0)
        assert option.help == "spread of the initial values, over all channels."
        assert mmpe.describe("test_only").parameters == 384
    finally:
        del _REGISTRY["test_only"]


def test_describe_is_plain_data():
    json.dumps(mmpe.describe("ape_learned").as_dict())
    assert mmpe.describe("ape_learned").parameters == count_parameters("ape_learned") == 14 * 14 * 384
    assert mmpe.describe("cpe").parameters == 384 * 10
    assert mmpe.describe("none").parameters == 0


def test_counting_parameters_allocates_nothing():
    with torch.device("meta"):
        assert count_parameters("ape_learned", dim=1 << 20, heads=1) == 14 * 14 << 20


def test_sums_hand_options_to_whom_they_belong():
    total = mmpe.create_encoding("ape_learned+alibi_2d", dim=64, heads=4, grid_size=5, prefix_rule="origin")
    learned, alibi = total
    assert (learned.grid_size, alibi.prefix_rule) == ((5, 5), "origin")
    assert total.no_weight_decay() == {"parts.0.table"}
    own = mmpe.create_encoding("ape_learned+cpe", dim=64, heads=4, depth=2, cpe={"kernel_size": 5})
    assert own.parts[1].kernel_size == 5
    with pytest.raises(ValueError, match="has no option 'grid_sise'; did you mean 'grid_size'"):
        mmpe.create_encoding("ape_learned+alibi_2d", dim=64, heads=4, grid_sise=5)
    with pytest.raises(ValueError, match="unknown encoding"):
        mmpe.create_encoding("ape_learned+alibi", dim=64, heads=4)


def test_sums_pass_on_what_their_parts_are():
    total = mmpe.create_encoding("cpe+pape", dim=48, heads=2, depth=2)
    assert isinstance(total, SumEncoding)
    assert total.content_dependent
    assert total.needs_grid
    assert not mmpe.create_encoding("ape_sincos+alibi_2d", dim=48, heads=2).content_dependent
    with torch.device("meta"):
        late = mmpe.create_encoding("ape_learned+cpe", dim=48, heads=2, depth=2)
    late.to_empty(device="cpu")
    late.reset_parameters()
    late.init_non_persistent_buffers()
    assert all(torch.isfinite(p).all() for p in late.parameters())
    assert late.parts[0].table_grid.tolist() == [14, 14]
