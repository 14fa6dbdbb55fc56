"""Matrix instructions: layouts by one-hot operands and by what Triton's compiler assumes, values against float64.

One-hot operands: a single 1 in A picks one row of B; where it lands in the accumulators shows every map at once. The
expected maps are AMD's published register layouts, written out here a second time.
"""

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

from .snippet import execute
from .state import UnknownInstruction
from .triton_kernel import TritonKernel

TYPES = {
    "fp8": (ml_dtypes.float8_e4m3fn, 8),
    "bf8": (ml_dtypes.float8_e5m2, 8),
    "fp6": (ml_dtypes.float6_e2m3fn, 6),
    "bf6": (ml_dtypes.float6_e3m2fn, 6),
    "fp4": (ml_dtypes.float4_e2m1fn, 4),
    "bf16": (ml_dtypes.bfloat16, 16),
    "f16": (np.float16, 16),
    "f32": (np.float32, 32),
}
# instruction, size, depth, formats of A and B
CASES = [
    ("v_mfma_f32_16x16x16_bf16", 16, 16, "bf16", "bf16"),
    ("v_mfma_f32_16x16x16_f16", 16, 16, "f16", "f16"),
    ("v_mfma_f32_16x16x32_bf16", 16, 32, "bf16", "bf16"),
    ("v_mfma_f32_32x32x8_bf16", 32, 8, "bf16", "bf16"),
    ("v_mfma_f32_32x32x16_f16", 32, 16, "f16", "f16"),
    ("v_mfma_f32_16x16x4_f32", 16, 4, "f32", "f32"),
    ("v_mfma_f32_32x32x2_f32", 32, 2, "f32", "f32"),
    ("v_mfma_f32_16x16x32_fp8_fp8", 16, 32, "fp8", "fp8"),
    ("v_mfma_f32_16x16x32_bf8_fp8", 16, 32, "bf8", "fp8"),
    ("v_mfma_f32_32x32x16_fp8_bf8", 32, 16, "fp8", "bf8"),
    ("v_mfma_f32_16x16x128_f8f6f4", 16, 128, "fp8", "fp8"),
    ("v_mfma_f32_16x16x128_f8f6f4", 16, 128, "fp8", "fp4"),
    ("v_mfma_f32_16x16x128_f8f6f4", 16, 128, "fp6", "bf8"),
    ("v_mfma_f32_32x32x64_f8f6f4", 32, 64, "fp8", "bf6"),
    ("v_mfma_f32_32x32x64_f8f6f4", 32, 64, "fp4", "fp4"),
]
CODES = {"fp8": 0, "bf8": 1, "fp6": 2, "bf6": 3, "fp4": 4}


def place(size: int, depth: int, bits: int, row: int, k: int) -> tuple[int, int]:
    """(lane, element) that holds A[row, k] or B[k, row]."""
    groups = 64 // size
    count = depth // groups
    if bits == 8 and count == 32:
        return row + size * (k // 16 % groups), k % 16 + 16 * (k // (16 * groups))
    return row + size * (k // count), k % count


def registers(matrix: np.ndarray, bits: int) -> np.ndarray:
    """[size, depth] of a narrow type -> uint32 [registers, 64]."""
    size, depth = matrix.shape
    count = size * depth // 64
    raw = matrix.view(np.uint8 if bits <= 8 else np.uint16 if bits == 16 else np.uint32)
    stream = np.zeros((64, count * bits), np.uint8)  # one lane's bits, lowest first
    for row in range(size):
        for k in range(depth):
            lane, element = place(size, depth, bits, row, k)
            for bit in range(bits):
                stream[lane, element * bits + bit] = int(raw[row, k]) >> bit & 1
    return np.packbits(stream, axis=1, bitorder="little").view(np.uint32).T.copy()


def accumulator_place(size: int, row: int, column: int) -> tuple[int, int]:
    """(register, lane) of result [row, column]."""
    if size == 16:
        return row % 4, column + 16 * (row // 4)
    return row % 4 + 4 * (row // 8), column + 32 * (row // 4 % 2)


def gather(rows: np.ndarray, size: int) -> np.ndarray:
    result = np.empty((size, size), np.float32)
    for row in range(size):
        for column in range(size):
            result[row, column] = rows[accumulator_place(size, row, column)]
    return result


def run(name, size, depth, form_a, form_b, a, b, c=None, suffix="", extra=None):
    bits_a, bits_b = TYPES[form_a][1], TYPES[form_b][1]
    ra, rb = registers(a, bits_a), registers(b, bits_b)
    wide = size * size // 64

    def span(first, count):
        return f"v[{first}:{first + count - 1}]" if count > 1 else f"v{first}"

    v = {10 + n: row for n, row in enumerate(ra)} | {20 + n: row for n, row in enumerate(rb)}
    source = "0"
    if c is not None:
        source = span(40, wide)
        rows = np.empty((wide, 64), np.float32)
        for row in range(size):
            for column in range(size):
                rows[accumulator_place(size, row, column)] = c[row, column]
        v |= {40 + n: row for n, row in enumerate(rows)}
    code = f"{name} {span(60, wide)}, {span(10, len(ra))}, {span(20, len(rb))}, {source}{suffix}"
    if "f8f6f4" in name:
        code += f" cbsz:{CODES[form_a]} blgp:{CODES[form_b]}"
    outcome = execute(code, v=v | (extra or {}), exec_mask=1)
    assert not outcome.run.findings
    return gather(outcome.wave.v[60 : 60 + wide].view(np.float32), size)


def random_matrix(rng, rows, columns, form):
    return rng.standard_normal((rows, columns)).astype(TYPES[form][0])


@pytest.mark.parametrize("name, size, depth, form_a, form_b", CASES)
def test_layout_by_one_hot(name, size, depth, form_a, form_b):
    rng = np.random.default_rng(0)
    for _ in range(6):
        row, k = rng.integers(size), rng.integers(depth)
        a = np.zeros((size, depth), TYPES[form_a][0])
        a[row, k] = 1
        b = random_matrix(rng, size, depth, form_b)
        expected = np.zeros((size, size), np.float32)
        expected[row] = b[:, k].astype(np.float32)
        np.testing.assert_array_equal(run(name, size, depth, form_a, form_b, a, b), expected)


@pytest.mark.parametrize("name, size, depth, form_a, form_b", CASES)
def test_product_and_accumulation(name, size, depth, form_a, form_b):
    rng = np.random.default_rng(1)
    a, b = random_matrix(rng, size, depth, form_a), random_matrix(rng, size, depth, form_b)
    c = rng.standard_normal((size, size)).astype(np.float32)
    expected = a.astype(np.float64) @ b.astype(np.float64).T + c
    np.testing.assert_allclose(run(name, size, depth, form_a, form_b, a, b, c), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size, depth", [(16, 128), (32, 64)])
@pytest.mark.parametrize("form_a, form_b", [("fp8", "fp8"), ("fp8", "fp4"), ("fp4", "fp4")])
def test_scales(size, depth, form_a, form_b):
    """One E8M0 scale for each row and 32 elements of K, in the byte that op_sel names."""
    rng = np.random.default_rng(2)
    a, b = random_matrix(rng, size, depth, form_a), random_matrix(rng, size, depth, form_b)
    codes = rng.integers(0, 256, (2, 64, 4)).astype(np.uint8)
    codes[0, :, 2] = codes[1, :, 1] = 0
    codes[0, :, 2], codes[1, :, 1] = rng.integers(120, 134, 64), rng.integers(120, 134, 64)
    extra = {90: codes[0].view(np.uint32)[:, 0], 91: codes[1].view(np.uint32)[:, 0]}
    name = f"v_mfma_scale_f32_{size}x{size}x{depth}_f8f6f4"
    suffix = ", v90, v91 op_sel:[0,1,0] op_sel_hi:[1,0,0]"
    got = run(name, size, depth, form_a, form_b, a, b, suffix=suffix, extra=extra)

    def scaled(matrix, scales):
        blocks = matrix.astype(np.float64).reshape(size, -1, 32)
        factor = 2.0 ** (scales.astype(int).reshape(-1, size).T - 127)
        return (blocks * factor[:, :, None]).reshape(size, depth)

    np.testing.assert_allclose(got, scaled(a, codes[0, :, 2]) @ scaled(b, codes[1, :, 1]).T, rtol=1e-5, atol=1e-4)


def test_nan_scale_and_nan_element():
    a, b = np.ones((16, 128), ml_dtypes.float8_e4m3fn), np.ones((16, 128), ml_dtypes.float8_e4m3fn)
    scales = np.full(64, 127, np.uint32)
    scales[3 + 16] = 255
    suffix = ", v90, v91"
    name = "v_mfma_scale_f32_16x16x128_f8f6f4"
    got = run(name, 16, 128, "fp8", "fp8", a, b, suffix=suffix, extra={90: scales, 91: np.uint32(127)})
    assert np.isnan(got[3]).all() and (np.delete(got, 3, axis=0) == 128).all()
    a[5, 100] = np.nan
    got = run("v_mfma_f32_16x16x128_f8f6f4", 16, 128, "fp8", "fp8", a, b)
    assert np.isnan(got[5]).all() and (np.delete(got, 5, axis=0) == 128).all()


def test_agpr_operands_and_in_place_accumulation():
    rng = np.random.default_rng(3)
    a, b = random_matrix(rng, 16, 32, "fp8"), random_matrix(rng, 16, 32, "fp8")
    ra, rb = registers(a, 8), registers(b, 8)
    code = """v_mfma_f32_16x16x32_fp8_fp8 a[0:3], a[10:11], v[4:5], 1.0
              v_mfma_f32_16x16x32_fp8_fp8 a[0:3], a[10:11], v[4:5], a[0:3]"""
    wave = execute(code, v={266: ra[0], 267: ra[1], 4: rb[0], 5: rb[1]}).wave
    expected = 2 * (a.astype(np.float64) @ b.astype(np.float64).T) + 1
    np.testing.assert_allclose(gather(wave.v[256:260].view(np.float32), 16), expected, rtol=1e-5, atol=1e-5)


def test_unmodelled_forms_are_named():
    with pytest.raises(UnknownInstruction, match="v_mfma_f32_4x4x4_16b_f16.*is not modelled"):
        execute("v_mfma_f32_4x4x4_16b_f16 v[0:3], v[4:5], v[6:7], 0")
    with pytest.raises(UnknownInstruction, match="broadcasts"):
        execute("v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], 0 cbsz:1")


@triton.jit
def scaled_product(a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, SIZE: tl.constexpr, K: tl.constexpr,
                   FORM_A: tl.constexpr, FORM_B: tl.constexpr, PACK_A: tl.constexpr, PACK_B: tl.constexpr):  # fmt: skip
    """c[SIZE, SIZE] = (a * scales) @ (b * scales)^T; fp4 packs two elements of K in a byte."""
    offs, offs_s = tl.arange(0, SIZE), tl.arange(0, K // 32)
    a = tl.load(a_ptr + offs[:, None] * (K // PACK_A) + tl.arange(0, K // PACK_A)[None, :])
    b = tl.load(b_ptr + offs[:, None] * (K // PACK_B) + tl.arange(0, K // PACK_B)[None, :])
    a_scale = tl.load(a_scale_ptr + offs[:, None] * (K // 32) + offs_s[None, :])
    b_scale = tl.load(b_scale_ptr + offs[:, None] * (K // 32) + offs_s[None, :])
    c = tl.dot_scaled(a, a_scale, FORM_A, b.T, b_scale, FORM_B)
    tl.store(c_ptr + offs[:, None] * SIZE + offs[None, :], c)


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("form_a, form_b", [("fp8", "fp8"), ("fp8", "fp4"), ("bf8", "fp4")])
def test_scaled_layouts_are_the_compilers(size, form_a, form_b):
    """Triton knows these layouts from hardware; its dot_scaled must come out right."""
    rng = np.random.default_rng(4)
    depth, edge = 256, 64
    names = {"fp8": ("e4m3", "*fp8e4nv"), "bf8": ("e5m2", "*fp8e5"), "fp4": ("e2m1", "*u8")}
    operands, dense = [], []
    for form in (form_a, form_b):
        matrix = random_matrix(rng, edge, depth, form)
        scales = rng.integers(120, 134, (edge, depth // 32)).astype(np.uint8)
        raw = matrix.view(np.uint8)
        operands += [raw if form != "fp4" else raw[:, ::2] | raw[:, 1::2] << 4, scales]
        factor = 2.0 ** (scales.astype(int) - 127)
        dense.append((matrix.astype(np.float64).reshape(edge, -1, 32) * factor[:, :, None]).reshape(edge, depth))
    signature = {
        "a_ptr": names[form_a][1],
        "a_scale_ptr": "*u8",
        "b_ptr": names[form_b][1],
        "b_scale_ptr": "*u8",
        "c_ptr": "*fp32",
    }
    constexprs = {"SIZE": edge, "K": depth, "FORM_A": names[form_a][0], "FORM_B": names[form_b][0]}
    constexprs |= {"PACK_A": 1 + (form_a == "fp4"), "PACK_B": 1 + (form_b == "fp4")}
    attrs = {(n,): [["tt.divisibility", 16]] for n in range(5)}
    kernel = TritonKernel.compile(scaled_product, signature, constexprs, attrs, num_warps=4, matrix_instr_nonkdim=size)
    c = np.zeros((edge, edge), np.float32)
    result = kernel.launch((1,), dict(zip(signature, [*map(np.ascontiguousarray, operands), c], strict=True)))
    assert result.executed[f"v_mfma_scale_f32_{size}x{size}x{2048 // size}_f8f6f4"]
    expected = dense[0] @ dense[1].T
    assert np.abs(c - expected).max() < 1e-6 * np.abs(expected).max()
    assert not result.findings
