"""iRPE beside its definition: pair by pair, without gathers."""

import pytest
import torch

import mmpe
from mmpe.encodings.irpe import offset_buckets, piecewise_index
from mmpe.evaluation.cost import LiveMemory

SCALE = 8**-0.5


def irpe(heads=2, axes=2, **options):
    torch.manual_seed(0)
    enc = mmpe.create_encoding("irpe", 8 * heads, heads, axes=axes, **options)
    for p in enc.parameters():
        p.data.normal_()
    return enc


def bucket(enc, offset):
    return [int(b) for b in offset_buckets(torch.tensor([offset]), enc.method, enc.ratio)]


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (1.9, [0, 1, 2, 2, 3, 3, 3]),
        (2.0, [0, 1, 2, 2, 3, 3, 3, 3, 3, 3, 4, 4]),
        (2.5, [0, 1, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 5, 5]),
        (3.0, [0, 1, 2, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5, 6, 6]),
    ],
)
def test_piecewise_index(ratio, expected):
    x = torch.arange(len(expected))
    assert piecewise_index(x, ratio, 2 * ratio, 8 * ratio).tolist() == expected
    assert piecewise_index(-x, ratio, 2 * ratio, 8 * ratio).tolist() == [-index for index in expected]


@pytest.mark.parametrize(
    ("method", "ratio", "reached"),
    [("product", 1.9, [49]), ("euc", 20, [19]), ("quant", 33, [50]), ("cross", 20, [27] * 2)],
)
def test_buckets_of_the_paper(method, ratio, reached):
    """Its models are called 50, 20, 51, 56: what 14 x 14 patches reach, and one for the class token in each table."""
    p = mmpe.Positions.grid(14, 14).coords
    found = offset_buckets((p[:, None] - p).flatten(0, 1), method, ratio)
    assert [len(b.unique()) for b in found] == reached


@pytest.mark.parametrize("method", ["product", "cross", "euc", "quant"])
@pytest.mark.parametrize("share_heads", [True, False])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_contextual_terms_are_dot_products_with_vectors(method, share_heads, axes):
    enc = irpe(axes=axes, method=method, share_heads=share_heads, rpe_on="qkv")
    positions = mmpe.Positions.of_size((2, 3, 4)[:axes] if axes > 1 else (6,), prefix=1)
    n = positions.num_tokens
    q, k, v = torch.randn(3, 2, 2, n, 8)
    terms = enc(positions)
    weights = torch.randn(2, 2, n, n).softmax(-1)
    bias, added = terms.bias(q, k), terms.from_weights(weights)
    vectors = torch.zeros(2, n, n, 8)  # Wv of every pair, for one query
    for i in (0, n - 1):
        for j in range(n):
            if 0 in (i, j):
                there = back = [enc.patch_buckets] * enc.table_k.shape[1]
            else:
                offset = (positions.coords[i - 1] - positions.coords[j - 1]).tolist()
                there, back = bucket(enc, offset), bucket(enc, [-o for o in offset])
            sums = {
                on: sum(getattr(enc, f"table_{on}")[0, t, ..., b] for t, b in enumerate(where)).expand(2, -1)
                for on, where in (("k", there), ("q", back), ("v", there))
            }
            expected = ((q[:, :, i] * sums["k"]).sum(-1) + (k[:, :, j] * sums["q"]).sum(-1)) * SCALE
            torch.testing.assert_close(bias[..., i, j], expected)
            vectors[:, i, j] = sums["v"]
        torch.testing.assert_close(added[:, :, i], torch.einsum("bhj,hjd->bhd", weights[:, :, i], vectors[:, i]))


def test_biases_are_numbers_of_buckets():
    enc = irpe(mode="bias", rpe_on="qk", share_heads=False)
    positions = mmpe.Positions.grid(3, 6)
    q = torch.zeros(1, 2, 18, 8)
    found = enc(positions).bias(q, q)[0]
    for i, j in ((0, 17), (8, 3)):
        offset = (positions.coords[i] - positions.coords[j]).tolist()
        there, back = bucket(enc, offset)[0], bucket(enc, [-o for o in offset])[0]
        torch.testing.assert_close(found[:, i, j], enc.table_k[0, 0, :, there] + enc.table_q[0, 0, :, back])


@pytest.mark.parametrize("mode", ["contextual", "bias"])
def test_without_their_bucket_prefix_tokens_get_nothing(mode):
    enc = irpe(mode=mode, prefix_bucket=False)
    found = enc(mmpe.Positions.grid(2, 3, prefix=2)).bias(*torch.randn(2, 1, 2, 8, 8))
    assert not found[..., :2].any()
    assert not found[..., :2, :].any()
    assert found[..., 2:, 2:].all()


def test_methods_that_see_directions_and_those_that_do_not():
    offset = torch.tensor([[2.0, -1.0]])
    for method in ("euc", "quant"):
        assert torch.equal(*(offset_buckets(o, method)[0] for o in (offset, -offset)))
    for method in ("product", "cross"):
        assert not torch.equal(*(offset_buckets(o, method)[0] for o in (offset, -offset)))
    grid = torch.cartesian_prod(torch.arange(-4.0, 5), torch.arange(-4.0, 5))
    pairs = {tuple(piecewise_index(o, 1.9, 3.8, 15.2).tolist()) for o in grid}
    assert len(offset_buckets(grid, "product")[0].unique()) == len(pairs) == 49


def test_a_table_per_head_with_equal_rows_is_the_shared_one():
    shared, own = irpe(rpe_on="qk"), irpe(rpe_on="qk", share_heads=False)
    own.load_state_dict({n: t.expand_as(own.state_dict()[n]) for n, t in shared.state_dict().items()})
    positions = mmpe.Positions.grid(3, 3)
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    torch.testing.assert_close(mmpe.attend(q, k, v, own(positions)), mmpe.attend(q, k, v, shared(positions)))


def test_no_tensor_has_a_vector_for_each_pair():
    enc, positions = irpe(rpe_on="kv"), mmpe.Positions.grid(9, 9)
    q = torch.randn(1, 2, 81, 8)
    terms = enc(positions)
    with LiveMemory() as memory, torch.no_grad():
        o = mmpe.attend(q, q, q, terms)
    assert o.shape == q.shape
    assert memory.peak < 6 * 2 * 81 * 81 * 4 < 2 * 81 * 81 * 8 * 4


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="rpe_on='kk' must name some of q, k and v, each once"):
        irpe(rpe_on="kk")
    with pytest.raises(ValueError, match="rpe_on='' must name"):
        irpe(rpe_on="")
    with pytest.raises(ValueError, match="a bias on v does not exist"):
        irpe(rpe_on="kv", mode="bias")
    with pytest.raises(ValueError, match="method='l2' must be one of 'euc', 'quant', 'cross', 'product'"):
        irpe(method="l2")
    with pytest.raises(ValueError, match=r"ratio must be at least 0.5"):
        irpe(ratio=0.1)
