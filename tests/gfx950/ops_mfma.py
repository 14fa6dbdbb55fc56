"""Matrix instructions: float32 results from bf16, f16, f32, fp8 and the scaled or unscaled f8f6f4 operands.

Layouts (M = N rows and columns, L = 64 / M lane groups): lane l holds row l % M of A and column l % M of B. Its n
elements are k = n * (l // M) and up, except that 32 elements of 8 bits come as two runs of 16, k = 16 * (l // M) and
up, the second 16 * L further on. The E8M0 scale of row l % M and k block l // M (of 32 elements) is in lane l; op_sel
names its byte. Accumulator register i of lane l is column l % M and, for M = 16, row 4 * (l // 16) + i, for M = 32, row
8 * (i // 4) + 4 * (l // 32) + i % 4. Triton's compiler assumes the same layouts, which the tests use to check these.
EXEC is ignored. Sums are float32; the hardware's order and rounding inside one instruction are not modelled.
"""

import re

import ml_dtypes
import numpy as np

from .decode import Instruction
from .operands import VGPR, constant, rows_read, rows_written, vector
from .ops_convert import DECODE

# cbsz and blgp of the f8f6f4 instructions.
F8F6F4 = ("fp8", "bf8", "fp6", "bf6", "fp4")
BITS = {"fp8": 8, "bf8": 8, "fp6": 6, "bf6": 6, "fp4": 4, "f16": 16, "bf16": 16, "f32": 32}
# Two narrow codes at a time, as one index: halves the number of look-ups.
_PAIRS = {
    name: np.stack([DECODE[name][np.arange(65536) & 255], DECODE[name][np.arange(65536) >> 8]], axis=1).view(np.uint64)
    for name in ("fp8", "bf8")
}
_PAIRS = {name: table.reshape(-1).copy() for name, table in _PAIRS.items()}
_BYTE_TO_FP4 = np.stack([DECODE["fp4"][np.arange(256) & 15], DECODE["fp4"][np.arange(256) >> 4]], axis=1)
_FP6 = {
    "fp6": np.arange(64, dtype=np.uint8).view(ml_dtypes.float6_e2m3fn).astype(np.float32),
    "bf6": np.arange(64, dtype=np.uint8).view(ml_dtypes.float6_e3m2fn).astype(np.float32),
}
_NAME = re.compile(r"v_mfma_(scale_)?f32_(16x16|32x32)x(\d+)_(f8f6f4|bf16|f16|f32|(fp8|bf8)_(fp8|bf8))$")


def decode_elements(words: np.ndarray, form: str) -> np.ndarray:
    """uint32 [..., registers] -> float32 [..., elements], lowest bits first."""
    if form in _PAIRS:
        return _PAIRS[form].take(words.view(np.uint16)).view(np.float32)
    if form == "bf16":
        return (words.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if form == "f16":
        return words.view(np.float16).astype(np.float32)
    if form == "f32":
        return words.view(np.float32)
    raw = words.view(np.uint8)
    if form == "fp4":
        return _BYTE_TO_FP4[raw].reshape(*raw.shape[:-1], -1)
    bits = np.unpackbits(raw, axis=-1, bitorder="little").reshape(*raw.shape[:-1], -1, 6)
    return _FP6[form][(bits << np.arange(6, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)]


def to_registers(matrix: np.ndarray) -> np.ndarray:
    """[M, M] -> accumulator registers [M * M // 64, 64]."""
    if matrix.shape[0] == 16:
        return matrix.reshape(4, 4, 16).transpose(1, 0, 2).reshape(4, 64)
    return matrix.reshape(4, 2, 4, 32).transpose(0, 2, 1, 3).reshape(16, 64)


def _operand(ins: Instruction, code: int, accumulator: int, form: str, size: int, depth: int):
    """Reader of a float32 [size, depth] operand: rows of A or columns of B."""
    if code < VGPR:
        raise ins.unknown("takes a matrix from SGPRs or constants, which is not modelled")
    registers = size * depth // 64 * BITS[form] // 32
    row = rows_read(ins, code - VGPR + 256 * accumulator, registers)
    groups = 64 // size
    runs = 2 if registers == 8 else 1

    def read(w):
        # [row, run, lane group, register of the run]
        words = w.v[row : row + registers].reshape(runs, registers // runs, groups, size).transpose(3, 0, 2, 1)
        return decode_elements(np.ascontiguousarray(words), form).reshape(size, depth)

    return read


def _scale(ins: Instruction, code: int, position: int, size: int):
    """Reader of the [size, depth // 32] factors of A (position 0) or B (1); op_sel picks the byte."""
    read = vector(ins, code, "u")
    shift = np.uint32(8 * (ins.opsel >> position & 1 | (ins.opsel_hi >> position & 1) << 1))

    def factors(w):
        exponent = np.broadcast_to(read(w) >> shift & np.uint32(255), (64,)).astype(np.int32)
        value = np.where(exponent == 255, np.nan, np.ldexp(1.0, exponent - 127)).astype(np.float32)
        return value.reshape(-1, size).T

    return factors


def mfma(ins: Instruction):
    scaled, shape, depth, forms = _NAME.match(ins.name).groups()[:4]
    size, depth = int(shape[:2]), int(depth)
    if forms == "f8f6f4":
        if max(ins.cbsz, ins.blgp) >= len(F8F6F4):
            raise ins.unknown(f"has formats {ins.cbsz} and {ins.blgp}, which are not modelled")
        form_a, form_b = F8F6F4[ins.cbsz], F8F6F4[ins.blgp]
    else:
        form_a, form_b = forms.split("_") if "_" in forms else (forms, forms)
        if ins.cbsz or ins.blgp or ins.abid:
            raise ins.unknown("broadcasts or permutes blocks, which is not modelled")
    read_a = _operand(ins, ins.src0, ins.acc & 1, form_a, size, depth)
    read_b = _operand(ins, ins.src1, ins.acc >> 1, form_b, size, depth)
    registers = size * size // 64
    target = rows_written(ins, ins.vdst + 256 * ins.acc_cd, registers)
    if ins.src2 >= VGPR:
        source = rows_read(ins, ins.src2 - VGPR + 256 * ins.acc_cd, registers)
        read_c = lambda w: w.v[source : source + registers].view(np.float32)  # noqa: E731
    else:
        bits = constant(ins, ins.src2, "u")
        if bits is None:
            raise ins.unknown("accumulates onto SGPRs, which is not modelled")
        addend = np.uint32(bits).view(np.float32)
        read_c = lambda w: addend  # noqa: E731
    if scaled:
        scale_a, scale_b = (_scale(ins, code, n, size) for n, code in enumerate((ins.scale_src0, ins.scale_src1)))

        def product(w):
            blocks = depth // 32
            a = read_a(w).reshape(size, blocks, 32) * scale_a(w)[:, :, None]
            b = read_b(w).reshape(size, blocks, 32) * scale_b(w)[:, :, None]
            return a.reshape(size, depth) @ b.reshape(size, depth).T
    else:

        def product(w):
            return read_a(w) @ read_b(w).T

    def run(w):
        w.v[target : target + registers].view(np.float32)[...] = to_registers(product(w)) + read_c(w)

    return run


def is_mfma(name: str) -> bool:
    return _NAME.match(name) is not None
