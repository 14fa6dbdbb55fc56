"""Conversions between number formats, with and without an E8M0 scale.

The narrow formats are ml_dtypes'; all conversions round to nearest even. Results too large for fp8 become NaN in
`v_cvt_pk_*` (FP16_OVFL is off) and the largest finite value in `v_cvt_scalef32_*`: an assumption, so a run in which it
mattered has a finding "fp8 saturation".
"""

import ml_dtypes
import numpy as np

from .decode import Instruction
from .operands import VGPR, rows_read, vector, vector_writer
from .ops_vector import OPS, Op, sources

NARROW = {"fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2, "fp4": ml_dtypes.float4_e2m1fn}
WIDE = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
LARGEST_CODE = {"fp8": 0x7E, "bf8": 0x7B, "fp4": 0x7}
# Every code's value, as float32; e2m1 codes above 15 are not used.
DECODE = {
    name: np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    for name, dtype in NARROW.items()
    if name != "fp4"
}
DECODE["fp4"] = (np.arange(256, dtype=np.uint8) & 15).view(NARROW["fp4"]).astype(np.float32)


def encode(form: str, value: np.ndarray) -> np.ndarray:
    """float32 -> uint8 codes, to nearest even; too large gives NaN (fp8), infinity (bf8) or the largest (fp4)."""
    return np.asarray(value).astype(NARROW[form]).view(np.uint8)


def saturate(form: str, codes: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes with overflows replaced by the largest finite value, where that was done); NaN stays."""
    overflow = (codes & 0x7F > LARGEST_CODE[form]) & ~np.isnan(value)
    return np.where(overflow, codes & 0x80 | LARGEST_CODE[form], codes), overflow


def bf16_bits(value) -> np.ndarray:
    return np.asarray(value, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)


def f16_bits(value) -> np.ndarray:
    return np.asarray(value, np.float32).astype(np.float16).view(np.uint16).astype(np.uint32)


_BITS = {"f32": lambda x: np.asarray(x, np.float32).view(np.uint32), "f16": f16_bits, "bf16": bf16_bits}


def _clipped_int(value, low, high, dtype):
    """Truncation with saturation; NaN gives 0."""
    whole = np.nan_to_num(np.trunc(np.asarray(value, np.float64)), nan=0, posinf=high, neginf=low)
    return np.clip(whole, low, high).astype(np.int64).astype(dtype)


def _toward_zero_f16(x):
    """float32 -> float16 bits, rounded toward zero."""
    half = np.asarray(x, np.float32).astype(np.float16)
    too_far = np.abs(half.astype(np.float32)) > np.abs(x)
    return (half.view(np.uint16) - too_far.astype(np.uint16)).astype(np.uint32)


def _pack(low, high):
    return low | high << np.uint32(16)


OPS |= {
    "v_cvt_f32_i32": Op("f", "i", lambda x: x.astype(np.float32)),
    "v_cvt_f32_u32": Op("f", "u", lambda x: x.astype(np.float32)),
    "v_cvt_i32_f32": Op("i", "f", lambda x: _clipped_int(x, -(2**31), 2**31 - 1, np.int32)),
    "v_cvt_u32_f32": Op("u", "f", lambda x: _clipped_int(x, 0, 2**32 - 1, np.uint32)),
    "v_cvt_flr_i32_f32": Op("i", "f", lambda x: _clipped_int(np.floor(x), -(2**31), 2**31 - 1, np.int32)),
    "v_cvt_f16_f32": Op("h", "f", lambda x: x.astype(np.float16)),
    "v_cvt_f32_f16": Op("f", "h", lambda x: x.astype(np.float32)),
    "v_cvt_f32_bf16": Op("f", "H", lambda x: (x.astype(np.uint32) << np.uint32(16)).view(np.float32)),
    "v_cvt_pk_bf16_f32": Op("u", "ff", lambda a, b: _pack(bf16_bits(a), bf16_bits(b))),
    "v_cvt_pk_f16_f32": Op("u", "ff", lambda a, b: _pack(f16_bits(a), f16_bits(b))),
    "v_cvt_pkrtz_f16_f32": Op("u", "ff", lambda a, b: _pack(_toward_zero_f16(a), _toward_zero_f16(b))),
    "v_cvt_pk_u16_u32": Op("u", "uu", lambda a, b: _pack(np.minimum(a, 0xFFFF), np.minimum(b, 0xFFFF))),
    "v_pack_b32_f16": Op("u", "HH", lambda a, b: _pack(a.astype(np.uint32), b.astype(np.uint32))),
}
for _byte in range(4):
    OPS[f"v_cvt_f32_ubyte{_byte}"] = Op("f", "u", lambda x, n=_byte: (x >> np.uint32(8 * n) & 255).astype(np.float32))


def _merge(ins: Instruction, shift: int, bits: int):
    """Writer of `bits` bits at `shift` of vdst that keeps the others."""
    row = rows_read(ins, ins.vdst)
    write = vector_writer(ins, row, "u")
    kept = np.uint32(~(((1 << bits) - 1) << shift) & 0xFFFFFFFF)
    return lambda w, value: write(w, w.u[row] & kept | value << np.uint32(shift), w.mask)


def narrow_to_f32(ins: Instruction):
    """v_cvt_f32_{fp8,bf8} and v_cvt_pk_f32_{fp8,bf8}; SDWA picks the byte or word."""
    table, packed = DECODE[ins.name[-3:]], "_pk_" in ins.name
    if ins.encoding.endswith("SDWA"):
        read = vector(ins, ins.vsrc0 if ins.s0 else VGPR + ins.vsrc0, "u")
        select = ins.src0_sel
        if packed and select not in (4, 5) and select != 6:
            raise ins.unknown("selects a byte for a packed conversion")
        first = {4: 0, 5: 2, 6: 0}.get(select, select)
    else:
        read, first = vector(ins, ins.src0, "u"), 0
        if ins.get("opsel"):
            raise ins.unknown("has op_sel, which no assembler gives it")
    writers = [vector_writer(ins, ins.vdst + n, "f") for n in range(1 + packed)]

    def run(w):
        word = read(w)
        values = [table[word >> np.uint32(8 * (first + n)) & np.uint32(255)] for n in range(1 + packed)]
        for write, value in zip(writers, values, strict=True):
            write(w, value, w.mask)

    return run


def f32_to_narrow(ins: Instruction):
    """v_cvt_pk_{fp8,bf8}_f32: two codes into the half of vdst that op_sel[3] names."""
    form = ins.name.split("_")[3]
    a, b = sources(ins, "ff")
    write = _merge(ins, 16 * (ins.opsel >> 3 & 1), 16)

    def run(w):
        low, high = (encode(form, read(w)).astype(np.uint32) for read in (a, b))
        write(w, low | high << np.uint32(8))

    return run


def _scale(ins: Instruction, code: int):
    """Reader of 2**(exponent - 127), the exponent being that of a float32; code 255 is NaN."""
    read = vector(ins, code, "u")

    def scale(w):
        exponent = read(w) >> np.uint32(23) & np.uint32(255)
        value = np.ldexp(1.0, np.asarray(exponent, np.int64) - 127)
        return np.where(exponent == 255, np.nan, value)

    return scale


def _source_pair(ins: Instruction, wide: str):
    """Readers of the two float32 values that a packed down-conversion starts from, and the code of its scale."""
    if wide == "f32":
        a, b = (vector(ins, code, "f") for code in (ins.src0, ins.src1))
        if ins.neg or ins.abs:
            raise ins.unknown("has abs or neg, which is not modelled")
        return a, b, ins.src2
    read = vector(ins, ins.src0, "u")

    def half(shift):
        return lambda w: (read(w) >> np.uint32(shift)).astype(np.uint16).view(WIDE[wide]).astype(np.float32)

    return half(0), half(16), ins.src1


def scaled_down(ins: Instruction):
    """v_cvt_scalef32_pk_{fp8,bf8,fp4}_{f32,f16,bf16}: value / scale, two codes into the part op_sel names."""
    form, wide = ins.name.split("_")[4:6]
    a, b, scale_code = _source_pair(ins, wide)
    scale = _scale(ins, scale_code)
    if form == "fp4":
        write, width = _merge(ins, 8 * (ins.opsel >> 2 & 3), 8), 4
    else:
        write, width = _merge(ins, 16 * (ins.opsel >> 3 & 1), 16), 8

    def run(w):
        divisor, codes = scale(w), []
        for read in (a, b):
            value = np.broadcast_to((read(w) / divisor).astype(np.float32), (64,))
            code = encode(form, value)
            if form != "fp4":
                code, overflow = saturate(form, code, value)
                if (overflow & w.lanes).any():
                    w.report("fp8 saturation", f"largest magnitude {np.abs(value[w.lanes]).max():g}")
            codes.append(code.astype(np.uint32))
        write(w, codes[0] | codes[1] << np.uint32(width))

    return run


def scaled_up(ins: Instruction):
    """v_cvt_scalef32_pk_{f32,f16,bf16}_{fp8,bf8,fp4} and v_cvt_scalef32_f32_{fp8,bf8}: code * scale."""
    packed = "_pk_" in ins.name
    wide, form = ins.name.split("_")[-2:]
    read, scale, table = vector(ins, ins.src0, "u"), _scale(ins, ins.src1), DECODE[form]
    if form == "fp4":
        shifts = (8 * (ins.opsel & 3), 8 * (ins.opsel & 3) + 4)
    elif packed:
        shifts = (16 * (ins.opsel & 1), 16 * (ins.opsel & 1) + 8)
    else:
        shifts = (8 * (ins.opsel & 3),)
    code_mask = np.uint32(15 if form == "fp4" else 255)
    bits = _BITS[wide]
    if wide == "f32":
        writers = [vector_writer(ins, ins.vdst + n, "u") for n in range(len(shifts))]
    else:
        writers = [vector_writer(ins, ins.vdst, "u")]

    def run(w):
        word, factor = read(w), scale(w)
        values = [bits(table[word >> np.uint32(shift) & code_mask] * factor) for shift in shifts]
        if wide != "f32":
            values = [_pack(*values)]
        for write, value in zip(writers, values, strict=True):
            write(w, value, w.mask)

    return run


TABLE = {f"v_cvt_{pk}f32_{form}": narrow_to_f32 for pk in ("", "pk_") for form in ("fp8", "bf8")}
TABLE |= {f"v_cvt_pk_{form}_f32": f32_to_narrow for form in ("fp8", "bf8")}
for _form in ("fp8", "bf8"):
    TABLE[f"v_cvt_scalef32_f32_{_form}"] = scaled_up
for _form in NARROW:
    for _wide in WIDE:
        TABLE[f"v_cvt_scalef32_pk_{_form}_{_wide}"] = scaled_down
        TABLE[f"v_cvt_scalef32_pk_{_wide}_{_form}"] = scaled_up
