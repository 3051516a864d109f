"""RotaryTable: the mathematics of rotation, errors, autograd, autocast, compile, export, checkpointing."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from mmpe.rotary import RotaryTable, convert_pairing, pairing_permutation

PAIRINGS = pytest.mark.parametrize("half", [False, True], ids=["interleaved", "half"])


def line_table(tokens: int, planes: int, shift: float = 0.0, base: float = 100.0) -> RotaryTable:
    omega = base ** -(torch.arange(planes) / planes)
    return RotaryTable.from_angles((torch.arange(tokens) + shift)[:, None] * omega)


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


# ----------------------------------------------------------------------------------------------- mathematics


@given(shift=st.floats(-300, 300), planes=st.integers(1, 8), half=st.booleans())
def test_scores_depend_on_offsets_only(shift: float, planes: int, half: bool) -> None:
    q, k = heads(1, 2, 6, 2 * planes), heads(1, 2, 6, 2 * planes)
    here, there = line_table(6, planes), line_table(6, planes, shift)
    scores = [qr @ kr.mT for qr, kr in (t.rotate_pair(q, k, half) for t in (here, there))]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-3, atol=2e-3)


@given(planes=st.integers(1, 9), rest=st.integers(0, 5), half=st.booleans())
def test_norms_are_preserved(planes: int, rest: int, half: bool) -> None:
    x = heads(2, 2, 5, 2 * planes + rest)
    torch.testing.assert_close(line_table(5, planes, 3.0).rotate(x, half).norm(dim=-1), x.norm(dim=-1))


@PAIRINGS
def test_position_zero_is_the_identity(half: bool) -> None:
    x = heads(2, 3, 4, 8)
    assert torch.equal(line_table(4, 4).rotate(x, half)[:, :, 0], x[:, :, 0])


@given(a=st.floats(-30, 30), b=st.floats(-30, 30), half=st.booleans())
def test_rotations_add_up(a: float, b: float, half: bool) -> None:
    x = heads(1, 1, 3, 8)
    twice = line_table(3, 4, a).rotate(RotaryTable.from_angles(torch.full((3, 4), b)).rotate(x, half), half)
    once = RotaryTable.from_angles((torch.arange(3.0) + a)[:, None] * 100.0 ** -(torch.arange(4) / 4) + b)
    torch.testing.assert_close(twice, once.rotate(x, half), rtol=1e-4, atol=1e-4)


@PAIRINGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inverse_undoes(half: bool, dtype: torch.dtype) -> None:
    x, table = heads(2, 3, 5, 10, dtype=dtype), line_table(5, 4, 1.5)
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 0.05}
    torch.testing.assert_close(table.inverse().rotate(table.rotate(x, half), half), x, **tolerance)


def test_sign_and_channels_of_both_pairings() -> None:
    """+theta takes the first channel of a plane to (cos, sin); planes are (2f, 2f+1), or (f, f+F) for half."""
    table = RotaryTable.from_angles(torch.tensor([[0.3, 1.1]]))
    first, second = torch.eye(4)[0].view(1, 1, 1, 4), torch.eye(4)[2].view(1, 1, 1, 4)
    cos, sin = torch.tensor([0.3, 1.1]).cos(), torch.tensor([0.3, 1.1]).sin()
    zero = torch.zeros(())
    for x, half, expected in [
        (first, False, (cos[0], sin[0], zero, zero)),
        (second, False, (zero, zero, cos[1], sin[1])),
        (first, True, (cos[0], zero, sin[0], zero)),
        (second, True, (-sin[0], zero, cos[0], zero)),
    ]:
        torch.testing.assert_close(table.rotate(x, half).flatten(), torch.stack(expected))


@given(planes=st.integers(1, 8), rest=st.integers(0, 4))
def test_interleaved_is_half_split_under_the_permutation(planes: int, rest: int) -> None:
    dim = 2 * planes + rest
    x, table, perm = heads(1, 2, 5, dim), line_table(5, planes, 2.0), pairing_permutation(dim, 2 * planes)
    torch.testing.assert_close(table.rotate(x[..., perm], half=True), table.rotate(x)[..., perm], rtol=1e-6, atol=1e-6)


@given(
    planes=st.integers(1, 6), rest=st.integers(1, 5), half=st.booleans(), dtype=st.sampled_from(["f", "b", "h", "d"])
)
def test_unrotated_channels_stay_bit_identical(planes: int, rest: int, half: bool, dtype: str) -> None:
    kind = {"f": torch.float32, "b": torch.bfloat16, "h": torch.float16, "d": torch.float64}[dtype]
    x = heads(2, 2, 4, 2 * planes + rest, dtype=kind)
    x[0, 0, 0, -1], x[0, 0, 1, -1] = float("nan"), float("inf")
    out = line_table(4, planes).rotate(x, half)
    assert out.dtype == kind
    torch.testing.assert_close(out[..., 2 * planes :], x[..., 2 * planes :], rtol=0, atol=0, equal_nan=True)


@PAIRINGS
def test_prefix_tokens_are_untouched(half: bool) -> None:
    """Register and cls tokens keep their values without being cut off and joined again."""
    angles, x = torch.randn(6, 4), heads(2, 3, 8, 8)
    out = RotaryTable.from_angles(angles, prefix=2).rotate(x, half)
    assert torch.equal(out[:, :, :2], x[:, :, :2])
    torch.testing.assert_close(out[:, :, 2:], RotaryTable.from_angles(angles).rotate(x[:, :, 2:].contiguous(), half))


def test_converted_projections_give_the_same_scores() -> None:
    dim, count = 8, 3
    x, weights = torch.randn(2, 5, 12), [torch.randn(count * dim, 12) for _ in "qk"]
    table = line_table(5, 3)

    def scores(weights: list[torch.Tensor], half: bool) -> torch.Tensor:
        q, k = ((x @ w.T).unflatten(-1, (count, dim)).transpose(1, 2) for w in weights)
        q, k = table.rotate_pair(q, k, half)
        return q @ k.mT

    halves = [convert_pairing(w, dim, rotary_dim=6) for w in weights]
    torch.testing.assert_close(scores(halves, True), scores(weights, False), rtol=1e-4, atol=1e-4)
    for half, original in zip(halves, weights, strict=True):
        assert torch.equal(convert_pairing(half, dim, to_half=False, rotary_dim=6), original)


# ----------------------------------------------------------------------------------------------- shapes


@PAIRINGS
@pytest.mark.parametrize("shape", [(5, 2), (3, 5, 2), (2, 1, 5, 2), (2, 3, 5, 2), (1, 3, 5, 2), (2, 1, 1, 5, 2)])
def test_every_broadcast_equals_the_written_out_table(shape: tuple[int, ...], half: bool) -> None:
    angles = torch.randn(shape)
    table = RotaryTable.from_angles(angles)
    if len(shape) == 5:
        table, angles = table.layer(1), angles[1]
    x = heads(2, 3, 5, 4)
    whole = RotaryTable.from_angles(angles.expand(2, 3, 5, 2).contiguous())
    torch.testing.assert_close(table.rotate(x, half), whole.rotate(x, half))


def test_layer_takes_the_leading_axis() -> None:
    angles, x = torch.randn(4, 3, 5, 2), heads(2, 3, 5, 4)
    stacked = RotaryTable.from_angles(angles)
    for index in (0, 3, -1):
        torch.testing.assert_close(stacked.layer(index).rotate(x), RotaryTable.from_angles(angles[index]).rotate(x))


@PAIRINGS
@pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 3, 0, 8), (2, 0, 5, 8)], ids=["batch", "tokens", "heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_tensors_pass_with_gradients(shape: tuple[int, ...], half: bool, dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    angles = torch.randn(shape[2], 3, requires_grad=True)
    out = RotaryTable.from_angles(angles).rotate(x, half)
    out.sum().backward()
    assert out.shape == x.shape
    assert x.grad is not None
    assert torch.equal(angles.grad, torch.zeros_like(angles))


@PAIRINGS
def test_views_of_a_fused_qkv_projection(half: bool) -> None:
    qkv = torch.randn(2, 7, 3, 4, 8, requires_grad=True)
    table = line_table(7, 4)
    q, k, _ = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    rotated = table.rotate_pair(q, k, half)
    for out, x in zip(rotated, (q, k), strict=True):
        torch.testing.assert_close(out, table.rotate(x.contiguous(), half))
    torch.autograd.grad(rotated[0].square().sum() + rotated[1].sum(), qkv)


def test_grouped_query_keys_share_a_table_without_heads() -> None:
    q, k, table = heads(2, 6, 5, 8), heads(2, 2, 5, 8), line_table(5, 4)
    rotated_q, rotated_k = table.rotate_pair(q, k)
    torch.testing.assert_close(rotated_k, table.rotate(k))
    torch.testing.assert_close(rotated_q, table.rotate(q))


# ----------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: RotaryTable.from_angles(torch.randn(5, 2).bfloat16()), TypeError, "float32.*bfloat16.*autocast"),
        (lambda: RotaryTable.from_angles(torch.randn(5)), ValueError, r"\(\.\.\., N, F\)"),
        (lambda: RotaryTable.from_angles(torch.randn(5, 2), prefix=-1), ValueError, "prefix"),
        (lambda: RotaryTable(torch.ones(5, 2), torch.ones(5, 3)), ValueError, "one shape"),
        (lambda: line_table(5, 4).rotate(heads(2, 3, 5, 6)), ValueError, "8 channels.*only 6"),
        (lambda: line_table(5, 2).rotate(heads(2, 3, 6, 4)), ValueError, "5 tokens.*6.*prefix"),
        (lambda: line_table(5, 2).rotate(heads(3, 5, 4)), TypeError, r"\(B, H, N, D\)"),
        (lambda: line_table(5, 2).rotate(torch.ones(1, 1, 5, 4, dtype=torch.int64)), TypeError, "int64"),
        (lambda: line_table(5, 2).layer(0), ValueError, "no layer axis"),
        (lambda: RotaryTable.from_angles(torch.randn(9, 1, 3, 5, 2)).rotate(heads(2, 3, 5, 4)), ValueError, "layer"),
        (lambda: RotaryTable.from_angles(torch.randn(9, 3, 5, 2)).rotate(heads(2, 3, 5, 4)), ValueError, "batch of 9"),
        (
            lambda: RotaryTable.from_angles(torch.randn(6, 5, 2)).rotate_pair(heads(2, 6, 5, 4), heads(2, 2, 5, 4)),
            ValueError,
            "6 heads, x has 2 heads.*Grouped-query",
        ),
        (lambda: pairing_permutation(8, 3), ValueError, "even"),
        (lambda: pairing_permutation(8, 10), ValueError, "dim=8"),
        (lambda: convert_pairing(torch.ones(10, 4), 4), ValueError, "whole heads of dim=4"),
    ],
)
def test_mistakes_are_named(make, error, words) -> None:
    with pytest.raises(error, match=words):
        make()


def test_tables_are_immutable() -> None:
    with pytest.raises(AttributeError):
        line_table(5, 2).cos = torch.zeros(5, 2)


# ----------------------------------------------------------------------------------------------- gradients


@PAIRINGS
@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 2), (2, 1, 3, 2), (2, 2, 3, 2)])
def test_gradients_of_x_and_of_the_angles(shape: tuple[int, ...], half: bool) -> None:
    x = torch.randn(2, 2, 3, 5, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        return RotaryTable.from_angles(angles).rotate(x, half)

    torch.autograd.gradcheck(rotate, (x, angles))
    torch.autograd.gradgradcheck(rotate, (x, angles))
    torch.autograd.gradcheck(lambda x: rotate(x, angles.detach()), (x,))
    torch.autograd.gradcheck(lambda angles: rotate(x.detach(), angles), (angles,))


@PAIRINGS
def test_gradients_of_prefix_rows_vanish(half: bool) -> None:
    angles = torch.randn(4, 2, requires_grad=True)
    RotaryTable.from_angles(angles, prefix=1).rotate(heads(2, 2, 5, 4), half)[:, :, 0].sum().backward()
    assert torch.equal(angles.grad, torch.zeros(4, 2))


def saved_by(call) -> list[torch.Tensor]:
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call()
    return saved


@PAIRINGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_are_not_kept_for_backward(half: bool, dtype: torch.dtype) -> None:
    q, k = (torch.randn(4, 3, 5, 8, dtype=dtype, requires_grad=True) for _ in "qk")
    table = line_table(5, 4)
    sizes = [t.numel() for t in saved_by(lambda: table.rotate_pair(q, k, half))]
    assert sizes
    assert max(sizes) == table.cos.numel()


def test_a_learned_table_keeps_x_once() -> None:
    q = torch.randn(4, 3, 5, 8, requires_grad=True)
    table = RotaryTable.from_angles(torch.randn(5, 4, requires_grad=True))
    saved = saved_by(lambda: table.rotate(q))
    assert [t.data_ptr() for t in saved if t.numel() == q.numel()] == [q.data_ptr()]


@PAIRINGS
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(half: bool, reentrant: bool) -> None:
    x, weight = torch.randn(2, 3, 5, 8, requires_grad=True), torch.randn(2, 3, 5, 8)
    table = line_table(5, 3)
    plain = torch.autograd.grad((table.rotate(x, half) * weight).sum(), x)[0]
    again = checkpoint(lambda x: table.rotate(x, half), x, use_reentrant=reentrant)
    again.backward(weight)
    torch.testing.assert_close(x.grad, plain)


# ----------------------------------------------------------------------------------------------- precision, compilers


@PAIRINGS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_input_is_rounded_once(half: bool, dtype: torch.dtype) -> None:
    """bf16 drift: computed in float32 with float32 tables, so the result is the exact one, rounded."""
    x, table = heads(2, 3, 40, 16, dtype=dtype), line_table(40, 8)
    exact = RotaryTable(table.cos.double(), table.sin.double()).rotate(x.double(), half)
    error = (table.rotate(x, half).double() - exact).abs()
    # Half a unit in the last place of the exact value, plus float32 rounding of the two products.
    assert (error <= torch.finfo(dtype).eps / 2 * exact.abs() * 1.001 + 1e-6).all()


@PAIRINGS
def test_autocast_changes_nothing(half: bool) -> None:
    angles, x = torch.randn(5, 4, requires_grad=True), heads(2, 3, 5, 8)
    plain = RotaryTable.from_angles(angles).rotate(x, half)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        table = RotaryTable.from_angles(angles)
        inside = table.rotate(x, half)
    assert table.cos.dtype == torch.float32
    assert torch.equal(inside, plain)


def test_tables_copy_and_move() -> None:
    table, x = line_table(5, 4), heads(2, 3, 5, 8)
    assert table.to("cpu") is table
    assert table.to("meta").rotate(x.to("meta")).shape == x.shape
    torch.testing.assert_close(copy.deepcopy(table).rotate(x), table.rotate(x))


def test_meta_tensors_give_shapes() -> None:
    x = torch.empty(2, 3, 5, 8, device="meta", requires_grad=True)
    for half in (False, True):
        assert RotaryTable.from_angles(torch.empty(4, 3, device="meta"), prefix=1).rotate(x, half).shape == x.shape


class Rotate(torch.nn.Module):
    """What an encoding does: angles from parameters, prefix rows, one application."""

    def __init__(self, learned: bool, half: bool) -> None:
        super().__init__()
        self.omega = torch.nn.Parameter(torch.randn(4), requires_grad=learned)
        self.half = half

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(q.shape[2] - 1, device=q.device)[:, None] * self.omega
        return RotaryTable.from_angles(angles, prefix=1).rotate_pair(q, k, self.half)


# Inductor compiles C++ here, seconds a case: it takes the three that differ in its code, aot_eager traces the others.
@pytest.mark.parametrize(
    ("dtype", "half", "learned", "backend"),
    [
        (torch.float32, False, False, "inductor"),
        (torch.bfloat16, False, False, "inductor"),
        (torch.bfloat16, True, True, "inductor"),
        (torch.float32, True, False, "aot_eager"),
        (torch.float32, False, True, "aot_eager"),
        (torch.float16, False, False, "aot_eager"),
        (torch.float16, True, True, "aot_eager"),
    ],
)
def test_compiled_without_graph_breaks_equals_eager(
    dtype: torch.dtype, half: bool, learned: bool, backend: str
) -> None:
    torch.compiler.reset()
    module = Rotate(learned, half)
    qkv = torch.randn(2, 7, 3, 2, 11).to(dtype).requires_grad_()
    weight = torch.randn(2, 2, 7, 11).to(dtype)

    def attention_input(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, _ = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return module(q, k)

    def step(call) -> list[torch.Tensor]:
        out_q, out_k = call(qkv)
        inputs = [qkv, *(p for p in module.parameters() if p.requires_grad)]
        return [out_q, out_k, *torch.autograd.grad((out_q * weight + out_k).float().sum(), inputs)]

    compiled = torch.compile(attention_input, fullgraph=True, backend=backend)
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for mine, theirs in zip(step(attention_input), step(compiled), strict=True):
        if mine.shape == (4,):  # sums over all tokens
            tolerance = {"rtol": 2e-2, "atol": 0.2}
        torch.testing.assert_close(theirs, mine, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_interleaved_rounds_as_eager_and_keeps_nan_and_inf(dtype: torch.dtype) -> None:
    """The compiled CPU path rounds by hand: ties, overflow, infinities and NaN must come out as elsewhere."""
    torch.compiler.reset()
    angles = torch.randn(64, 8)
    angles[0] = 0  # the identity: special values pass through one by one
    table, x = RotaryTable.from_angles(angles), torch.randn(4, 4, 64, 16)
    special = torch.tensor([1.0, -0.0, 3.0e38, -3.3e38, 1e-40, 1.00390625, 1.01171875, -2.0])
    x[0, 0, 0], x[0, 0, 1] = special.repeat(2), 3.3e38
    x[0, 1, 0, ::2], x[0, 1, 1], x[0, 2, 1] = float("nan"), float("inf"), float("-inf")
    x = x.to(dtype)
    rotated = torch.compile(lambda x: table.rotate(x), fullgraph=True)(x)
    torch.testing.assert_close(rotated, table.rotate(x), rtol=1e-6, atol=1e-6, equal_nan=True)
    assert rotated[0, 1, 0].isnan().all()


def test_compiled_slices_at_odd_offsets() -> None:
    torch.compiler.reset()
    table, x = line_table(5, 4), torch.randn(2, 3, 5, 12)
    rotate = torch.compile(lambda x: table.rotate(x[..., 1:10]), fullgraph=True)
    torch.testing.assert_close(rotate(x), table.rotate(x[..., 1:10]))


def test_a_table_can_be_an_argument_of_a_compiled_function() -> None:
    torch.compiler.reset()
    rotate = torch.compile(lambda table, x: table.layer(1).inverse().rotate(x), fullgraph=True, backend="aot_eager")
    table, x = RotaryTable.from_angles(torch.randn(2, 5, 4)), heads(2, 3, 5, 8)
    torch.testing.assert_close(rotate(table, x), table.layer(1).inverse().rotate(x))


@PAIRINGS
@pytest.mark.parametrize("strict", [False, True])
def test_exported_graphs_are_real(half: bool, strict: bool) -> None:
    """No complex numbers and no integer views of floats: ONNX and most accelerators know neither."""
    module, batch = Rotate(False, half), torch.export.Dim("batch", max=64)
    q, k = heads(2, 2, 7, 10), heads(2, 2, 7, 10)
    program = torch.export.export(module, (q, k), dynamic_shapes=({0: batch}, {0: batch}), strict=strict)
    program = program.run_decompositions()
    values = [node.meta.get("val") for node in program.graph.nodes]
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    assert dtypes <= {torch.float32, torch.int64}  # int64: the arange of the positions
    assert not [node for node in program.graph.nodes if "view.dtype" in str(node.target)]
    bigger = heads(5, 2, 7, 10), heads(5, 2, 7, 10)
    for mine, theirs in zip(module(*bigger), program.module()(*bigger), strict=True):
        torch.testing.assert_close(theirs, mine)
