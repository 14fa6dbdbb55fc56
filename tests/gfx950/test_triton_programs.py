"""Small Triton programs against torch: what the compiler emits beyond the decode kernels."""

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from .triton_kernel import TritonKernel


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def launch(fn, grid, arguments, signature, constexprs, **options):
    attrs = {(n,): [["tt.divisibility", 16]] for n, kind in enumerate(signature.values()) if kind.startswith("*")}
    kernel = TritonKernel.compile(fn, signature, constexprs, attrs, **options)
    run = kernel.launch(grid, arguments)
    assert not run.findings
    return run


@triton.jit
def softmax_rows(x_ptr, out_ptr, lse_ptr, columns, BLOCK: tl.constexpr):
    row, offs = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + offs, mask=offs < columns, other=float("-inf"))
    peak = tl.max(x, axis=0)
    p = tl.exp(x - peak)
    total = tl.sum(p, axis=0)
    tl.store(out_ptr + row * columns + offs, p / total, mask=offs < columns)
    tl.store(lse_ptr + row, peak + tl.log(total))


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
def test_softmax(num_warps):
    x, out, lse = randn(3, 300), torch.zeros(3, 300), torch.zeros(3)
    signature = {"x_ptr": "*fp32", "out_ptr": "*fp32", "lse_ptr": "*fp32", "columns": "i32"}
    arguments = {"x_ptr": x, "out_ptr": out, "lse_ptr": lse, "columns": 300}
    launch(softmax_rows, (3,), arguments, signature, {"BLOCK": 512}, num_warps=num_warps)
    assert torch.allclose(out, torch.softmax(x, 1), atol=1e-6) and torch.allclose(lse, torch.logsumexp(x, 1), atol=1e-5)


@triton.jit
def matrix_product(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    offs_m, offs_n, offs_k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + offs_m[:, None] * K + offs_k[None, :])
    b = tl.load(b_ptr + offs_k[:, None] * N + offs_n[None, :])
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], tl.dot(a, b))


@pytest.mark.parametrize("form, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)])
@pytest.mark.parametrize("size, num_warps", [(16, 1), (64, 4), (128, 8)])
def test_matrix_product(form, dtype, size, num_warps):
    a, b, c = randn(size, 64, dtype=dtype), randn(64, size, seed=1, dtype=dtype), torch.zeros(size, size)
    signature = {"a_ptr": "*" + form, "b_ptr": "*" + form, "c_ptr": "*fp32"}
    run = launch(
        matrix_product,
        (1,),
        {"a_ptr": a, "b_ptr": b, "c_ptr": c},
        signature,
        {"M": size, "N": size, "K": 64},
        num_warps=num_warps,
    )
    assert any(name.startswith("v_mfma") for name in run.executed)
    assert (c - a.double() @ b.double()).abs().max() < 1e-4


@triton.jit
def mixed_product(a_ptr, b_ptr, scale_ptr, c_ptr, SIZE: tl.constexpr, K: tl.constexpr):
    offs, offs_k = tl.arange(0, SIZE), tl.arange(0, K)
    a = tl.load(a_ptr + offs[:, None] * K + offs_k[None, :])
    b = tl.load(b_ptr + offs[:, None] * (K // 2) + tl.arange(0, K // 2)[None, :])
    scale = tl.load(scale_ptr + offs[:, None] * (K // 32) + tl.arange(0, K // 32)[None, :])
    c = tl.dot_scaled(a, None, "bf16", b.T, scale, "e2m1")
    tl.store(c_ptr + offs[:, None] * SIZE + offs[None, :], c)


def test_mxfp4_decoded_to_bf16():
    """A bf16 left side makes the compiler decode the fp4 operand with v_cvt_scalef32_pk_bf16_fp4."""
    rng, size, depth = np.random.default_rng(0), 64, 128
    a = randn(size, depth, dtype=torch.bfloat16)
    b = rng.standard_normal((size, depth)).astype(ml_dtypes.float4_e2m1fn)
    scales = rng.integers(120, 134, (size, depth // 32)).astype(np.uint8)
    raw = b.view(np.uint8)
    c = np.zeros((size, size), np.float32)
    arguments = {"a_ptr": a, "b_ptr": raw[:, ::2] | raw[:, 1::2] << 4, "scale_ptr": scales, "c_ptr": c}
    signature = {"a_ptr": "*bf16", "b_ptr": "*u8", "scale_ptr": "*u8", "c_ptr": "*fp32"}
    run = launch(mixed_product, (1,), arguments, signature, {"SIZE": size, "K": depth}, num_warps=4)
    assert run.executed["v_cvt_scalef32_pk_bf16_fp4"]
    dense = b.astype(np.float64).reshape(size, -1, 32) * 2.0 ** (scales.astype(int)[:, :, None] - 127)
    expected = a.double().numpy() @ dense.reshape(size, depth).T
    assert np.abs(c - expected).max() < 1e-5 * np.abs(expected).max()


@triton.jit
def integer_work(x_ptr, out_ptr, divisor, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, x // divisor)
    tl.store(out_ptr + BLOCK + offs, x % divisor)
    tl.store(out_ptr + 2 * BLOCK + offs, tl.cumsum(x & 255, axis=0))
    tl.store(out_ptr + 3 * BLOCK + offs, tl.sort(x))


def test_integers_scans_and_sorting():
    x = torch.from_numpy(np.random.default_rng(1).integers(-(2**31), 2**31, 256).astype(np.int32))
    out = torch.zeros(4, 256, dtype=torch.int32)
    arguments, signature = (
        {"x_ptr": x, "out_ptr": out, "divisor": 7},
        {"x_ptr": "*i32", "out_ptr": "*i32", "divisor": "i32"},
    )
    launch(integer_work, (1,), arguments, signature, {"BLOCK": 256}, num_warps=2)
    assert torch.equal(out[0], torch.div(x, 7, rounding_mode="trunc")) and torch.equal(out[1], torch.fmod(x, 7))
    assert torch.equal(out[2], torch.cumsum(x & 255, 0).int()) and torch.equal(out[3], torch.sort(x).values)


@triton.jit
def float_functions(x_ptr, out_ptr, bf16_ptr, fp8_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, tl.exp(x))
    tl.store(out_ptr + BLOCK + offs, tl.log(tl.abs(x)))
    tl.store(out_ptr + 2 * BLOCK + offs, tl.sqrt(tl.abs(x)))
    tl.store(out_ptr + 3 * BLOCK + offs, 1 / x)
    tl.store(out_ptr + 4 * BLOCK + offs, tl.floor(x * 10))
    tl.store(bf16_ptr + offs, x.to(tl.bfloat16))
    tl.store(fp8_ptr + offs, x.to(tl.float8e4nv))


def test_float_functions_and_casts():
    x, out = randn(256), torch.zeros(5, 256)
    x[:4] = torch.tensor([0.1, -100.0, 90.0, -3e-39])
    bf16, fp8 = torch.zeros(256, dtype=torch.bfloat16), torch.zeros(256, dtype=torch.float8_e4m3fn)
    signature = {"x_ptr": "*fp32", "out_ptr": "*fp32", "bf16_ptr": "*bf16", "fp8_ptr": "*fp8e4nv"}
    arguments = {"x_ptr": x, "out_ptr": out, "bf16_ptr": bf16, "fp8_ptr": fp8}
    launch(float_functions, (1,), arguments, signature, {"BLOCK": 256}, num_warps=2)
    expected = torch.stack([x.exp(), x.abs().log(), x.abs().sqrt(), 1 / x, (x * 10).floor()])
    assert torch.allclose(out, expected, rtol=2e-6, atol=1e-6)
    assert torch.equal(bf16, x.bfloat16())
    assert torch.equal(fp8.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))


@triton.jit
def atomics(counter_ptr, total_ptr, peak_ptr, x_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.atomic_add(counter_ptr + (offs & 7), 1)
    tl.atomic_add(total_ptr + (offs & 3), x)
    tl.atomic_max(peak_ptr, tl.max((x * 1000).to(tl.int32), axis=0))


def test_atomics():
    x, counter = randn(512), torch.zeros(8, dtype=torch.int32)
    total, peak = torch.zeros(4), torch.full((1,), -(2**31), dtype=torch.int32)
    signature = {"counter_ptr": "*i32", "total_ptr": "*fp32", "peak_ptr": "*i32", "x_ptr": "*fp32"}
    arguments = {"counter_ptr": counter, "total_ptr": total, "peak_ptr": peak, "x_ptr": x}
    launch(atomics, (2,), arguments, signature, {"BLOCK": 256}, num_warps=2)
    assert counter.tolist() == [64] * 8
    assert torch.allclose(total, x.reshape(-1, 4).sum(0), atol=1e-4) and peak.item() == (x * 1000).int().max()
