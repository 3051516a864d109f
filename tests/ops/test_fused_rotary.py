"""The fast paths of mmpe.ops.rotary against the plain twin, in values and gradients, and the switch between them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpe import ops
from mmpe.ops import rotary_cpu
from mmpe.rotary import RotaryTable

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}
TABLES = [(7, 3), (4, 7, 3), (2, 1, 7, 3), (2, 4, 7, 3), (1, 1, 7, 3)]


@contextmanager
def fused(enabled: bool) -> Iterator[None]:
    before = ops.set_fused(enabled)
    try:
        yield
    finally:
        ops.set_fused(before)


def layout(x: torch.Tensor, name: str) -> torch.Tensor:
    """The same values with another memory layout."""
    batch, heads, tokens, dim = x.shape
    if name == "qkv":
        base = torch.zeros(batch, tokens, 3, heads, dim, dtype=x.dtype)
        view = base.permute(2, 0, 3, 1, 4)[1]
    elif name == "sliced":
        view = torch.zeros(batch, heads, tokens, dim + 3, dtype=x.dtype)[..., 1 : dim + 1]
    elif name == "channels_first":
        view = torch.zeros(batch, heads, dim, tokens, dtype=x.dtype).mT
    else:
        return x
    view.copy_(x)
    return view


def rotated_with_gradients(x: torch.Tensor, angles: torch.Tensor, grad: torch.Tensor, half: bool) -> list[torch.Tensor]:
    x, angles = x.detach().requires_grad_(), angles.detach().requires_grad_()
    out = ops.rotate(x, angles.cos(), angles.sin(), half)
    return [out, *torch.autograd.grad(out, (x, angles), grad)]


@pytest.mark.parametrize("half", [False, True], ids=["interleaved", "half"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("memory", ["contiguous", "qkv", "sliced", "channels_first"])
def test_fast_paths_equal_the_plain_twin(half: bool, dtype: torch.dtype, memory: str) -> None:
    for shape in TABLES:
        for dim in (6, 8, 9):
            angles = torch.randn(shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
            x, grad = (layout(torch.randn(2, 4, 7, dim).to(dtype), memory) for _ in "xg")
            with fused(True):
                fast = rotated_with_gradients(x, angles, grad, half)
            with fused(False):
                plain = rotated_with_gradients(x, angles, grad, half)
            for name, mine, theirs in zip(("out", "x", "angles"), fast, plain, strict=True):
                assert mine.dtype == theirs.dtype
                scale = 10 if name == "angles" else 1  # a sum over tokens, heads and samples
                tolerance = {key: scale * value for key, value in TOLERANCE[dtype].items()}
                torch.testing.assert_close(mine, theirs, **tolerance, msg=lambda m: f"{name} {shape} {dim}: {m}")  # noqa: B023


@settings(max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(2, 9)),
    tile=st.integers(1, 200),
    half=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    token_major=st.booleans(),
    own=st.tuples(st.booleans(), st.booleans()),
)
def test_tiles_of_any_size_cover_everything_once(shape, tile, half, dtype, token_major, own) -> None:
    """Whatever the tile size and the memory order, the result and the sums of the table's gradient are the same."""
    batch, heads, tokens, dim = shape
    x, grad = (torch.randn(shape).to(dtype) for _ in "xg")
    if token_major:
        x = layout(x, "qkv")
    angles = torch.randn(batch if own[0] else 1, heads if own[1] else 1, tokens, dim // 2)
    with fused(False):
        plain = rotated_with_gradients(x, angles, grad, half)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotary_cpu, "_TILE", tile)
        patch.setattr(rotary_cpu, "_SMALL", tile)
        fast = rotated_with_gradients(x, angles, grad, half)
    for mine, theirs in zip(fast, plain, strict=True):
        scale = 20 if mine.shape == angles.shape else 1
        torch.testing.assert_close(mine, theirs, **{key: scale * value for key, value in TOLERANCE[dtype].items()})


@pytest.mark.parametrize("half", [False, True], ids=["interleaved", "half"])
def test_expanded_gradients_and_inputs(half: bool) -> None:
    """`out.sum().backward()` hands over a gradient of stride 0; broadcast inputs have strides of 0 too."""
    table = RotaryTable.from_angles(torch.randn(5, 4))
    x = torch.randn(1, 3, 5, 8, requires_grad=True)
    table.rotate(x.expand(4, 3, 5, 8), half).sum().backward()
    expected = 4 * table.inverse().rotate(torch.ones(1, 3, 5, 8), half)
    torch.testing.assert_close(x.grad, expected)


def test_inputs_are_not_written_to() -> None:
    table = RotaryTable.from_angles(torch.randn(5, 4, requires_grad=True))
    for dtype in DTYPES.values():
        for dim in (8, 9):
            x = torch.randn(2, 3, 5, dim, dtype=dtype, requires_grad=True)
            before, tables = x.detach().clone(), (table.cos.detach().clone(), table.sin.detach().clone())
            for half in (False, True):
                grad = torch.ones(2, 3, 5, dim, dtype=dtype)
                torch.autograd.grad(table.rotate(x, half), (x, table.cos), grad, retain_graph=True)
                assert torch.equal(grad, torch.ones_like(grad))
            assert torch.equal(x, before)
            assert torch.equal(table.cos, tables[0])
            assert torch.equal(table.sin, tables[1])


def test_the_output_keeps_the_memory_order_of_a_fused_projection() -> None:
    """So that attention and the output projection after it need no copy either."""
    qkv = torch.randn(2, 7, 3, 4, 8).permute(2, 0, 3, 1, 4)
    out = RotaryTable.from_angles(torch.randn(7, 4)).rotate(qkv[0])
    assert out.transpose(1, 2).is_contiguous()


def peak_bytes(call) -> int:
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()
    held = peak = 0
    events = (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert result is not None
    return peak


@pytest.mark.parametrize("half", [False, True], ids=["interleaved", "half"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_beyond_the_result_is_at_most_one_input(half: bool, dtype: torch.dtype) -> None:
    x = torch.randn(8, 12, 197, 64, dtype=dtype)
    table = RotaryTable.from_angles(torch.randn(197, 32))
    size, tables = x.numel() * x.element_size(), 4 * table.cos.numel() * 4
    assert peak_bytes(lambda: table.rotate(x, half)) <= 2 * size + tables


def test_the_switch_changes_the_path_and_not_the_result() -> None:
    x, table = torch.randn(2, 3, 5, 8, requires_grad=True), RotaryTable.from_angles(torch.randn(5, 4))
    with fused(True):
        assert ops.fused_enabled()
        fast = table.rotate(x)
        assert fast.grad_fn.name() == "_RotateBackward"
    with fused(False):
        assert not ops.fused_enabled()
        plain = table.rotate(x)
        assert plain.grad_fn.name() != "_RotateBackward"
    torch.testing.assert_close(fast, plain)


@pytest.mark.parametrize(("value", "expected"), [("0", "False"), ("1", "True")])
def test_the_environment_variable_sets_the_switch(value: str, expected: str) -> None:
    code = "from mmpe.ops import fused_enabled; print(fused_enabled())"
    environment = {**os.environ, "MMPE_FUSED": value}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == expected


def test_fake_tensors_and_tracing_take_the_plain_path() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode():
        out = RotaryTable.from_angles(torch.randn(5, 4)).rotate(torch.randn(2, 3, 5, 8))
        assert out.shape == (2, 3, 5, 8)
    trace = make_fx(lambda x, angles: RotaryTable.from_angles(angles).rotate(x), tracing_mode="fake")
    graph = trace(torch.randn(2, 3, 5, 8), torch.randn(5, 4))
    outputs = [node.meta["val"] for node in graph.graph.nodes if "val" in node.meta]
    assert not [value for value in outputs if isinstance(value, torch.Tensor) and value.is_complex()]


@pytest.mark.parametrize("half", [False, True], ids=["interleaved", "half"])
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")  # torch's own, in forward mode
def test_transforms_of_torch_func_take_the_plain_path(half: bool) -> None:
    x, direction = torch.randn(2, 2, 4, 7, 8, dtype=torch.float64)  # each (B, H, N, D)
    angles = torch.randn(7, 4, dtype=torch.float64)

    def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        return RotaryTable.from_angles(angles).rotate(x, half)

    expected = rotated(x, angles)
    _, forward = torch.func.jvp(lambda x: rotated(x, angles), (x,), (direction,))
    torch.testing.assert_close(forward, rotated(direction, angles))
    each = torch.func.vmap(lambda x: rotated(x[None], angles)[0])(x)
    torch.testing.assert_close(each, expected)
    gradient = torch.func.grad(lambda a: rotated(x, a).mul(direction).sum())(angles)
    own = angles.clone().requires_grad_()
    rotated(x, own).mul(direction).sum().backward()
    torch.testing.assert_close(gradient, own.grad)
    with torch.autograd.forward_ad.dual_level():
        dual = rotated(torch.autograd.forward_ad.make_dual(x, direction), angles)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, forward)


def test_several_threads_rotate_at_once() -> None:
    """No state is written in forward: threads that share a table do not disturb each other."""
    from concurrent.futures import ThreadPoolExecutor

    table = RotaryTable.from_angles(torch.randn(40, 8))
    inputs = [torch.randn(4, 4, 40, 16).bfloat16() for _ in range(8)]
    expected = [table.rotate(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for mine, theirs in zip(pool.map(table.rotate, inputs), expected, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.slow
def test_the_benchmark_runs_and_shows_us_ahead(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    script, out = Path(__file__).parents[2] / "benchmarks" / "rotary.py", tmp_path / "rotary.json"
    command = [sys.executable, str(script), "--quick", "--eager-only", "--rounds", "5", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ratios = {(r["name"], r["dtype"], r["direction"]): r["ratio"] for r in json.loads(out.read_text())["records"]}
    # The aims are 0.2 and 0.4; a loaded machine gets some slack, a lost fast path would be at 0.6 or more.
    assert ratios["mmpe", "fp32", "forward"] < 0.35
    assert ratios["mmpe", "fp32", "forward+backward"] < 0.5
