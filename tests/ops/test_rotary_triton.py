"""The Triton kernels on the CPU, through Triton's interpreter, against the plain twin."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import itertools
import torch
from mmpe.ops import rotary, rotary_triton

torch.manual_seed(0)
tolerance = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 1e-2}
tables = [(7, 3), (4, 7, 3), (2, 1, 7, 3), (2, 4, 7, 3), (1, 7, 3)]
count = 0
for half, shape, dim, dtype in itertools.product((False, True), tables, (6, 9), tolerance):
    fused = torch.randn(2, 7, 3, 4, dim).to(dtype)
    x, grad = fused.permute(2, 0, 3, 1, 4)[1], torch.randn(2, 4, 7, dim).to(dtype)
    angles = torch.randn(shape)
    cos, sin = angles.cos(), angles.sin()
    close = {"rtol": tolerance[dtype], "atol": tolerance[dtype]}
    out = rotary_triton.rotate(x, cos, sin, half)
    assert out.dtype == dtype
    torch.testing.assert_close(out, rotary.rotate_plain(x, cos, sin, half), **close)
    assert torch.equal(out[..., 6:], x[..., 6:])
    back = rotary_triton.rotate(grad, cos, sin, half, inverse=True)
    torch.testing.assert_close(back, rotary.rotate_plain(grad, cos, -sin, half), **close)
    mine = rotary_triton.table_gradient(grad, x, cos, half)
    for a, b in zip(mine, rotary.table_gradient_plain(grad, x, cos, half), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    count += 1

# More tokens than one program takes, and nothing at all.
x, angles = torch.randn(1, 2, 300, 16), torch.randn(2, 300, 8)
torch.testing.assert_close(
    rotary_triton.rotate(x, angles.cos(), angles.sin(), False), rotary.rotate_plain(x, angles.cos(), angles.sin())
)
for empty in ((0, 2, 5, 8), (2, 2, 0, 8)):
    x, table = torch.randn(empty), torch.ones(empty[2], 3)
    assert rotary_triton.rotate(x, table, table, True).shape == empty
    assert all(not g.any() for g in rotary_triton.table_gradient(x, x, table, True))
print(count)
"""


def test_kernels_equal_the_plain_twin_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    # A process of its own: Triton reads the variable when the kernels are decorated.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "60"


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus(capability: int) -> None:
    """Down to PTX, which needs no GPU: the interpreter does not check types and layouts."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mmpe.ops import rotary_triton

    if "nvidia" not in triton.backends.backends:
        pytest.skip("this build of Triton has no NVIDIA backend")
    for kernel in (rotary_triton._rotate_kernel, rotary_triton._table_gradient_kernel):
        for half, planes, rest, dtype in ((False, 32, 0, "bf16"), (True, 21, 4, "fp32"), (False, 21, 4, "fp16")):
            constants = {
                "PLANES": planes, "PLANES_PAD": 32, "REST_PAD": rest, "BLOCK": 32, "HALF": half, "INVERSE": True,
                "WORK": triton.language.float32,
            }  # fmt: skip
            constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
            types = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "grad_ptr": f"*{dtype}"}
            signature = {
                name: "constexpr" if name in constants else types.get(name, "*fp32" if name.endswith("_ptr") else "i32")
                for name in kernel.arg_names
            }
            source = ASTSource(kernel, signature, constants)
            assert "ptx" in triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm
