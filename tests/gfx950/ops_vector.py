"""Vector ALU: arithmetic, logic, compares and packed math (VOP1, VOP2, VOP3, VOP3P, VOPC).

Lane moves are in ops_lane, conversions in ops_convert. Denormals are kept, whatever the mode register says, except in
the transcendental instructions, which flush them as the hardware does; NaN payloads are not modelled.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .decode import Instruction
from .operands import (
    DTYPES,
    FLOATS,
    HALVES,
    VGPR,
    constant,
    mask_reader,
    row_reader,
    rows_read,
    rows_written,
    scalar,
    scalar_writer,
    vector,
    vector_writer,
)
from .ops_lane import dpp_enabled, dpp_source, sdwa_destination, sdwa_source
from .state import VCC, mask_bits

F32_TINY = np.float32(2.0**-126)


def fma32(a, b, c):
    """Single rounding: the double sum is rounded to odd before it is rounded to float32."""
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = np.asarray(total).view(np.int64)
    inexact = ((error > 0) | (error < 0)) & (bits & 1 == 0)
    toward_larger = (error > 0) == (total > 0)
    return (bits + np.where(inexact, np.where(toward_larger, 1, -1), 0)).view(np.float64).astype(np.float32)


def fma16(a, b, c):
    return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float16)


def _extremum(choose, zero_sign):
    """fmin or fmax, with -0 < +0 as the ISA has it."""

    def compute(a, b):
        value = choose(a, b)
        zero = value == 0
        if zero.any():
            value = np.where(zero & (a == 0) & (b == 0), zero_sign(a, b), value)
        return value

    return compute


fmax = _extremum(np.fmax, lambda a, b: np.where(np.signbit(a), b, a))
fmin = _extremum(np.fmin, lambda a, b: np.where(np.signbit(a), a, b))


def _median(a, b, c):
    middle = fmax(fmin(a, b), fmin(fmax(a, b), c))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), fmin(fmin(a, b), c), middle)


def _nan_through(choose):
    """IEEE 754-2019 minimum or maximum: NaN wins."""
    return lambda a, b, c: choose(choose(a, b), c)


def flush(x):
    """Denormals to zero of the same sign."""
    return np.where(np.abs(x) < F32_TINY, np.copysign(np.float32(0), x), x)


def _transcendental(compute):
    return lambda x: flush(compute(np.asarray(flush(x), np.float64)).astype(np.float32))


def _mul_high(a, b, wide):
    return (a.astype(wide) * b.astype(wide) >> wide(32)).astype(a.dtype)


def _u24(x):
    return x & np.uint32(0xFFFFFF)


def _i24(x):
    return x << 8 >> 8


def _bfe(a, offset, width):
    offset, width = offset & 31, width & 31
    return a >> offset & ((np.uint32(1) << width) - np.uint32(1))


def _bfe_signed(a, offset, width):
    offset, width = offset & np.uint32(31), width & np.uint32(31)
    shift = (np.uint32(32) - width) & np.uint32(31)
    # An arithmetic shift: a field that reaches beyond bit 31 is filled with the sign.
    field = a >> offset.astype(np.int32) << shift.astype(np.int32) >> shift.astype(np.int32)
    return np.where(width == 0, 0, field)


def _perm(a, b, select):
    """v_perm_b32: bytes 0-3 come from b, 4-7 from a, then sign bytes and constants."""
    a, b, select = (np.broadcast_to(x, (64,)) for x in (a, b, select))
    pool = np.zeros((64, 16), np.uint8)
    pool[:, 0:4] = np.ascontiguousarray(b).view(np.uint8).reshape(64, 4)
    pool[:, 4:8] = np.ascontiguousarray(a).view(np.uint8).reshape(64, 4)
    pool[:, 8:12] = np.where(pool[:, 1:8:2] & 0x80, 0xFF, 0)
    pool[:, 13:] = 0xFF
    chosen = np.minimum(np.ascontiguousarray(select).view(np.uint8).reshape(64, 4), 13)
    return np.take_along_axis(pool, chosen.astype(np.intp), axis=1).view(np.uint32)[:, 0]


def _funnel(high, low, amount):
    """Low 32 bits of the 64-bit value high:low shifted right."""
    pair = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    return (pair >> amount.astype(np.uint64)).astype(np.uint32)


def _reverse_bits(x):
    raw = np.unpackbits(np.broadcast_to(x, (64,)).astype(">u4").view(np.uint8).reshape(64, 4), axis=1)
    return np.packbits(raw[:, ::-1], axis=1).view(">u4")[:, 0].astype(np.uint32)


def _first_high(x):
    """Leading zeros; all ones for zero."""
    _, exponent = np.frexp(x.astype(np.float64))
    return np.where(x == 0, 0xFFFFFFFF, 32 - exponent).astype(np.uint32)


def _first_low(x):
    lowest = x & (~x + np.uint32(1))
    return np.where(x == 0, 0xFFFFFFFF, 31 - _first_high(lowest).astype(np.int64)).astype(np.uint32)


def _count_bits(a, b):
    raw = np.unpackbits(np.ascontiguousarray(np.broadcast_to(a, (64,))).view(np.uint8).reshape(64, 4), axis=1)
    return raw.sum(axis=1, dtype=np.uint32) + b


def _ldexp(x, exponent):
    return np.ldexp(x.astype(np.float64), np.clip(exponent, -400, 400)).astype(np.float32)


def _exponent(x):
    return (x.view(np.uint32) >> 23 & 0xFF).astype(np.int64)


def _is_denormal(x):
    return (x != 0) & (np.abs(x) < F32_TINY)


def _div_fixup(quotient, denominator, numerator):
    sign = np.where(np.signbit(denominator) ^ np.signbit(numerator), np.float32(-1), np.float32(1))
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    value = np.copysign(quotient, sign)
    # The pseudo-code's overflow case cannot occur as written; this one mirrors its underflow case.
    value = np.where(_exponent(numerator) - _exponent(denominator) > 150, inf * sign, value)
    value = np.where(_exponent(numerator) - _exponent(denominator) < -150, np.float32(0) * sign, value)
    value = np.where(np.isinf(denominator) | (numerator == 0), np.float32(0) * sign, value)
    value = np.where((denominator == 0) | np.isinf(numerator), inf * sign, value)
    undefined = (denominator == 0) & (numerator == 0) | np.isinf(denominator) & np.isinf(numerator)
    return np.where(undefined | np.isnan(denominator) | np.isnan(numerator), nan, value)


def _div_scale(s0, denominator, numerator):
    """(value, VCC) of v_div_scale_f32: scales an operand out of the way of overflow and denormals.

    The ISA's pseudo-code compares float32 reciprocals with float64 denormals and scales large denominators up; read
    here as what makes the division sequence of LLVM correct.
    """
    s0, denominator, numerator = (np.broadcast_to(x, (64,)) for x in (s0, denominator, numerator))
    up, down = _ldexp(s0, 64), _ldexp(s0, -64)
    for_denominator, for_numerator = s0 == denominator, s0 == numerator
    reciprocal = np.abs(1.0 / denominator.astype(np.float64))
    tiny_reciprocal = (reciprocal < 2.0**-126) & (reciprocal > 0)
    quotient = numerator.astype(np.float64) / denominator
    tiny_quotient = (quotient != 0) & (np.abs(quotient) < 2.0**-126)
    cases = [
        (denominator == 0) | (numerator == 0),
        _exponent(numerator) - _exponent(denominator) >= 96,
        _is_denormal(denominator),
        tiny_reciprocal & tiny_quotient,
        tiny_reciprocal,
        tiny_quotient,
        _exponent(numerator) <= 23,
    ]
    values = [
        np.full(64, np.nan, np.float32),
        np.where(for_denominator, up, s0),
        up,
        np.where(for_denominator, down, s0),
        down,
        np.where(for_numerator, up, s0),
        up,
    ]
    flags = [np.full(64, case in (1, 3, 5)) for case in range(7)]
    return np.select(cases, values, s0), np.select(cases, flags, False)


@dataclass(frozen=True)
class Op:
    """Result kind, source kinds (see operands) and a function of 64-lane arrays or scalars."""

    result: str
    sources: str
    compute: Callable
    reads_destination: bool = False  # as the last source


def _shift(kind, compute):
    bits = DTYPES[kind]().itemsize * 8 - 1
    return lambda amount, x: compute(x, amount.astype(x.dtype) & x.dtype.type(bits))


def _dot2(a, b, c, form):
    def halves(x):
        low, high = (x << np.uint32(16), x & np.uint32(0xFFFF0000)) if form == "bf16" else (x, x >> np.uint32(16))
        if form == "bf16":
            return low.view(np.float32), high.view(np.float32)
        return (y.astype(np.uint16).view(np.float16).astype(np.float32) for y in (low, high))

    (a0, a1), (b0, b1) = halves(a), halves(b)
    return a0 * b0 + a1 * b1 + c


_select = lambda a, b, mask: np.where(mask, b, a)  # noqa: E731

OPS: dict[str, Op] = {
    "v_mov_b32": Op("u", "u", lambda a: a),
    "v_mov_b64": Op("q", "q", lambda a: a),
    "v_not_b32": Op("u", "u", np.invert),
    "v_bfrev_b32": Op("u", "u", _reverse_bits),
    "v_ffbh_u32": Op("u", "u", _first_high),
    "v_ffbl_b32": Op("u", "u", _first_low),
    "v_bcnt_u32_b32": Op("u", "uu", _count_bits),
    "v_cndmask_b32": Op("u", "uum", _select),
    "v_and_b32": Op("u", "uu", np.bitwise_and),
    "v_or_b32": Op("u", "uu", np.bitwise_or),
    "v_xor_b32": Op("u", "uu", np.bitwise_xor),
    "v_xnor_b32": Op("u", "uu", lambda a, b: ~(a ^ b)),
    "v_lshlrev_b32": Op("u", "uu", _shift("u", np.left_shift)),
    "v_lshrrev_b32": Op("u", "uu", _shift("u", np.right_shift)),
    "v_ashrrev_i32": Op("i", "ii", _shift("i", np.right_shift)),
    "v_lshlrev_b64": Op("q", "uq", _shift("q", np.left_shift)),
    "v_lshrrev_b64": Op("q", "uq", _shift("q", np.right_shift)),
    "v_ashrrev_i64": Op("r", "ur", _shift("r", np.right_shift)),
    "v_lshlrev_b16": Op("H", "HH", _shift("H", np.left_shift)),
    "v_lshrrev_b16": Op("H", "HH", _shift("H", np.right_shift)),
    "v_ashrrev_i16": Op("I", "HI", _shift("I", np.right_shift)),
    "v_bfm_b32": Op("u", "uu", lambda a, b: ((np.uint32(1) << (a & 31)) - np.uint32(1)) << (b & 31)),
    "v_bfi_b32": Op("u", "uuu", lambda a, b, c: a & b | ~a & c),
    "v_bfe_u32": Op("u", "uuu", _bfe),
    "v_bfe_i32": Op("i", "iuu", _bfe_signed),
    "v_perm_b32": Op("u", "uuu", _perm),
    "v_alignbit_b32": Op("u", "uuu", lambda a, b, c: _funnel(a, b, c & 31)),
    "v_alignbyte_b32": Op("u", "uuu", lambda a, b, c: _funnel(a, b, (c & 3) * np.uint32(8))),
    "v_and_or_b32": Op("u", "uuu", lambda a, b, c: a & b | c),
    "v_or3_b32": Op("u", "uuu", lambda a, b, c: a | b | c),
    "v_xad_u32": Op("u", "uuu", lambda a, b, c: (a ^ b) + c),
    "v_add3_u32": Op("u", "uuu", lambda a, b, c: a + b + c),
    "v_lshl_add_u32": Op("u", "uuu", lambda a, b, c: (a << (b & 31)) + c),
    "v_add_lshl_u32": Op("u", "uuu", lambda a, b, c: (a + b) << (c & 31)),
    "v_lshl_or_b32": Op("u", "uuu", lambda a, b, c: a << (b & 31) | c),
    "v_lshl_add_u64": Op("q", "quq", lambda a, b, c: (a << (b & 7).astype(np.uint64)) + c),
    "v_add_u32": Op("u", "uu", np.add),
    "v_sub_u32": Op("u", "uu", np.subtract),
    "v_subrev_u32": Op("u", "uu", lambda a, b: b - a),
    "v_add_i32": Op("i", "ii", np.add),
    "v_sub_i32": Op("i", "ii", np.subtract),
    "v_mul_lo_u32": Op("u", "uu", np.multiply),
    "v_mul_hi_u32": Op("u", "uu", lambda a, b: _mul_high(a, b, np.uint64)),
    "v_mul_hi_i32": Op("i", "ii", lambda a, b: _mul_high(a, b, np.int64)),
    "v_mul_u32_u24": Op("u", "uu", lambda a, b: _u24(a) * _u24(b)),
    "v_mul_i32_i24": Op("i", "ii", lambda a, b: _i24(a) * _i24(b)),
    "v_mul_hi_u32_u24": Op("u", "uu", lambda a, b: _mul_high(_u24(a), _u24(b), np.uint64)),
    "v_mul_hi_i32_i24": Op("i", "ii", lambda a, b: _mul_high(_i24(a), _i24(b), np.int64)),
    "v_mad_u32_u24": Op("u", "uuu", lambda a, b, c: _u24(a) * _u24(b) + c),
    "v_mad_i32_i24": Op("i", "iii", lambda a, b, c: _i24(a) * _i24(b) + c),
    "v_add_u16": Op("H", "HH", np.add),
    "v_sub_u16": Op("H", "HH", np.subtract),
    "v_subrev_u16": Op("H", "HH", lambda a, b: b - a),
    "v_mul_lo_u16": Op("H", "HH", np.multiply),
    "v_add_f32": Op("f", "ff", np.add),
    "v_sub_f32": Op("f", "ff", np.subtract),
    "v_subrev_f32": Op("f", "ff", lambda a, b: b - a),
    "v_mul_f32": Op("f", "ff", np.multiply),
    "v_fma_f32": Op("f", "fff", fma32),
    "v_fmac_f32": Op("f", "ff", fma32, reads_destination=True),
    "v_max_f32": Op("f", "ff", fmax),
    "v_min_f32": Op("f", "ff", fmin),
    "v_max3_f32": Op("f", "fff", lambda a, b, c: fmax(fmax(a, b), c)),
    "v_min3_f32": Op("f", "fff", lambda a, b, c: fmin(fmin(a, b), c)),
    "v_med3_f32": Op("f", "fff", _median),
    "v_maximum3_f32": Op("f", "fff", _nan_through(np.maximum)),
    "v_minimum3_f32": Op("f", "fff", _nan_through(np.minimum)),
    "v_exp_f32": Op("f", "f", _transcendental(np.exp2)),
    "v_log_f32": Op("f", "f", _transcendental(np.log2)),
    "v_rcp_f32": Op("f", "f", _transcendental(np.reciprocal)),
    "v_rcp_iflag_f32": Op("f", "f", _transcendental(np.reciprocal)),
    "v_rsq_f32": Op("f", "f", _transcendental(lambda x: 1 / np.sqrt(x))),
    "v_sqrt_f32": Op("f", "f", _transcendental(np.sqrt)),
    "v_trunc_f32": Op("f", "f", np.trunc),
    "v_ceil_f32": Op("f", "f", np.ceil),
    "v_floor_f32": Op("f", "f", np.floor),
    "v_rndne_f32": Op("f", "f", np.rint),
    "v_fract_f32": Op("f", "f", lambda x: np.minimum(x - np.floor(x), np.float32(1 - 2.0**-24))),
    "v_frexp_exp_i32_f32": Op("i", "f", lambda x: np.where(np.isfinite(x), np.frexp(x)[1], 0)),
    "v_frexp_mant_f32": Op("f", "f", lambda x: np.frexp(x)[0]),
    "v_ldexp_f32": Op("f", "fi", _ldexp),
    "v_div_fixup_f32": Op("f", "fff", _div_fixup),
    "v_add_f16": Op("h", "hh", np.add),
    "v_sub_f16": Op("h", "hh", np.subtract),
    "v_subrev_f16": Op("h", "hh", lambda a, b: b - a),
    "v_mul_f16": Op("h", "hh", np.multiply),
    "v_max_f16": Op("h", "hh", fmax),
    "v_min_f16": Op("h", "hh", fmin),
    "v_fma_f16": Op("h", "hhh", fma16),
    "v_max3_f16": Op("h", "hhh", lambda a, b, c: fmax(fmax(a, b), c)),
    "v_min3_f16": Op("h", "hhh", lambda a, b, c: fmin(fmin(a, b), c)),
    "v_dot2c_f32_bf16": Op("f", "uu", lambda a, b, c: _dot2(a, b, c.view(np.float32), "bf16"), reads_destination=True),
    "v_dot2_f32_bf16": Op("f", "uuf", lambda a, b, c: _dot2(a, b, c, "bf16")),
    "v_dot2_f32_f16": Op("f", "uuf", lambda a, b, c: _dot2(a, b, c, "f16")),
}
for _kind, _type in (("i32", "i"), ("u32", "u"), ("i16", "I"), ("u16", "H")):
    OPS[f"v_max_{_kind}"] = Op(_type, _type * 2, np.maximum)
    OPS[f"v_min_{_kind}"] = Op(_type, _type * 2, np.minimum)
    OPS[f"v_max3_{_kind}"] = Op(_type, _type * 3, lambda a, b, c: np.maximum(np.maximum(a, b), c))
    OPS[f"v_min3_{_kind}"] = Op(_type, _type * 3, lambda a, b, c: np.minimum(np.minimum(a, b), c))
    OPS[f"v_med3_{_kind}"] = Op(
        _type, _type * 3, lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    )


def _source_codes(ins: Instruction) -> list[int]:
    """Encoded sources in order; a VOP2's second source is a VGPR number."""
    first = ins.get("src0") if "vsrc0" not in ins.fields else None
    codes = [first]
    if "vsrc1" in ins.fields:
        codes.append(VGPR + ins.vsrc1)
    codes += [ins.fields[name] for name in ("src1", "src2") if name in ins.fields]
    return codes


def _modified(read, negate: bool, absolute: bool):
    if negate and absolute:
        return lambda w: -np.abs(read(w))
    if absolute:
        return lambda w: np.abs(read(w))
    if negate:
        return lambda w: -read(w)
    return read


def sources(ins: Instruction, kinds: str):
    """Readers of the first `len(kinds)` sources, with abs, neg, op_sel, DPP and SDWA applied."""
    codes, readers = _source_codes(ins), []
    for position, kind in enumerate(kinds):
        if kind == "m":
            readers.append(mask_reader(ins, codes[2] if len(codes) > 2 else VCC))
            continue
        high = kind in HALVES and bool(ins.get("opsel") >> position & 1)
        if ins.encoding.endswith("SDWA") or ins.encoding.endswith("SDWA_SDST"):
            read = sdwa_source(ins, position, kind)
            negate, absolute = ins.get(f"src{position}_neg"), ins.get(f"src{position}_abs")
        elif ins.encoding.endswith("DPP16"):
            read = dpp_source(ins, kind) if position == 0 else vector(ins, codes[position], kind)
            negate, absolute = ins.get(f"src{position}_neg"), ins.get(f"src{position}_abs")
        else:
            read = vector(ins, codes[position], kind, high)
            negate, absolute = ins.get("neg") >> position & 1, ins.get("abs") >> position & 1
        if (negate or absolute) and kind not in FLOATS:
            raise ins.unknown(f"has abs or neg on source {position}, which is no float")
        readers.append(_modified(read, negate, absolute))
    return readers


_SATURATING = {f"v_{name}_{kind}" for name in ("add", "sub", "subrev") for kind in ("u32", "i32", "u16")}


def _saturated(compute, dtype):
    """Integer clamp: the exact result, limited to what the destination holds."""
    limits = np.iinfo(dtype)
    return lambda a, b: np.clip(compute(a.astype(np.int64), b.astype(np.int64)), limits.min, limits.max).astype(dtype)


def _output_modifiers(ins: Instruction, kind: str, compute):
    scale, clamp = (1, 2, 4, 0.5)[ins.get("omod")], ins.get("clmp")
    if clamp and ins.name in _SATURATING:
        return _saturated(compute, DTYPES[kind])
    if (scale != 1 or clamp) and kind not in FLOATS:
        raise ins.unknown("has a clamp or output modifier on an integer, which is not modelled")
    if scale == 1 and not clamp:
        return compute
    dtype = DTYPES[kind]

    def modified(*values):
        value = compute(*values) * dtype(scale)
        # Clamping turns NaN into 0 (DX10_CLAMP).
        return np.fmin(np.fmax(value, dtype(0)), dtype(1)) if clamp else value

    return modified


def finish(ins: Instruction, kind: str, compute, readers):
    """The closure that evaluates `compute` and writes vdst under EXEC, through DPP or SDWA where encoded."""
    if ins.encoding.endswith("DPP16"):
        enabled = dpp_enabled(ins)
        write = vector_writer(ins, ins.vdst, kind)
        return lambda w: write(w, compute(*[read(w) for read in readers]), enabled(w))
    if ins.encoding.endswith("SDWA"):
        write = sdwa_destination(ins, kind)
    else:
        write = vector_writer(ins, ins.vdst, kind, bool(ins.get("opsel") >> 3 & 1) and kind in HALVES)
    if len(readers) == 2:
        a, b = readers
        return lambda w: write(w, compute(a(w), b(w)), w.mask)
    if len(readers) == 1:
        (a,) = readers
        return lambda w: write(w, compute(a(w)), w.mask)
    return lambda w: write(w, compute(*[read(w) for read in readers]), w.mask)


def alu(ins: Instruction):
    """Any instruction of OPS, in every encoding it has."""
    op = OPS[ins.name]
    kinds = op.sources
    if ins.name == "v_cndmask_b32" and (ins.get("neg") or ins.get("abs")):
        kinds, op = "ffm", Op("f", "ffm", _select)
    readers = sources(ins, kinds)
    if op.reads_destination:
        readers.append(row_reader(ins, ins.vdst, op.result))
    return finish(ins, op.result, _output_modifiers(ins, op.result, op.compute), readers)


def fma_literal(ins: Instruction):
    """v_fmamk_f32 (a * K + b) and v_fmaak_f32 (a * b + K)."""
    a, b = vector(ins, ins.src0, "f"), vector(ins, VGPR + ins.vsrc1, "f")
    k = np.uint32(ins.literal).view(np.float32)
    compute = (lambda x, y: fma32(x, k, y)) if ins.name == "v_fmamk_f32" else (lambda x, y: fma32(x, y, k))
    return finish(ins, "f", compute, [a, b])


_COMPARES = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "lg": lambda a, b: (a < b) | (a > b),
    "ne": np.not_equal,
    "ge": np.greater_equal,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "f": lambda a, b: np.zeros(64, bool),
    "t": lambda a, b: np.ones(64, bool),
    "tru": lambda a, b: np.ones(64, bool),
}
_COMPARE_KINDS = {"f32": "f", "i32": "i", "u32": "u", "f16": "h", "i16": "I", "u16": "H", "i64": "r", "u64": "q"}


def _class(value, wanted):
    """v_cmp_class_f32: the ten classes of the ISA, one bit each."""
    negative, tiny = np.signbit(value), _is_denormal(value)
    quiet = value.view(np.uint32) >> 22 & 1 == 1
    normal = np.isfinite(value) & (value != 0) & ~tiny
    classes = [
        np.isnan(value) & ~quiet,
        np.isnan(value) & quiet,
        np.isinf(value) & negative,
        normal & negative,
        tiny & negative,
        (value == 0) & negative,
        (value == 0) & ~negative,
        tiny & ~negative,
        normal & ~negative,
        np.isinf(value) & ~negative,
    ]
    return np.any([members & (wanted >> bit & 1 == 1) for bit, members in enumerate(classes)], axis=0)


def compare(ins: Instruction):
    prefix, operation, kind = ins.name.rsplit("_", 2)
    if operation == "class":
        if kind != "f32":
            raise ins.unknown()
        kinds, compute = "fu", _class
    else:
        if kind not in _COMPARE_KINDS:
            raise ins.unknown()
        kinds, compute = _COMPARE_KINDS[kind] * 2, _COMPARES[operation]
    a, b = sources(ins, kinds)
    if ins.encoding == "VOP3_SDST":
        destination = ins.vdst
    elif ins.encoding == "VOPC_SDWA_SDST" and ins.sd:
        destination = ins.sdst
    else:
        destination = VCC
    write, writes_exec = scalar_writer(ins, destination, wide=True), prefix == "v_cmpx"

    def run(w):
        result = np.broadcast_to(compute(a(w), b(w)), (64,))
        bits = mask_bits(result if w.full else result & w.lanes)
        write(w, bits)
        if writes_exec:
            w.set_exec(bits)

    return run


def with_carry(ins: Instruction):
    """32-bit add and subtract with carry out, and in for the addc and subb forms."""
    a, b = sources(ins, "uu")
    destination = ins.sdst if ins.encoding == "VOP3SD" else VCC
    takes_carry = ins.name.startswith(("v_addc", "v_subb"))
    carry_in = mask_reader(ins, ins.src2 if ins.encoding == "VOP3SD" else VCC) if takes_carry else None
    write, write_carry = vector_writer(ins, ins.vdst, "u"), scalar_writer(ins, destination, wide=True)
    subtract, reverse = ins.name.startswith("v_sub"), "rev" in ins.name

    def run(w):
        x, y = np.asarray(a(w), np.int64), np.asarray(b(w), np.int64)
        if reverse:
            x, y = y, x
        carry = carry_in(w).astype(np.int64) if takes_carry else 0
        total = np.broadcast_to(x - y - carry if subtract else x + y + carry, (64,))
        out = (total < 0) | (total > 0xFFFFFFFF)
        write_carry(w, mask_bits(out if w.full else out & w.lanes))
        write(w, total.astype(np.uint32), w.mask)

    return run


def div_scale(ins: Instruction):
    readers = sources(ins, "fff")
    write, write_flags = vector_writer(ins, ins.vdst, "f"), scalar_writer(ins, ins.sdst, wide=True)

    def run(w):
        value, flags = _div_scale(*[read(w) for read in readers])
        write_flags(w, mask_bits(flags & w.lanes))
        write(w, value, w.mask)

    return run


def div_fmas(ins: Instruction):
    """v_div_fmas_f32: undoes the 2**64 of v_div_scale (RDNA3's pseudo-code; CDNA's 2**32 cannot be right)."""
    readers, scaled = sources(ins, "fff"), mask_reader(ins, VCC)
    write = vector_writer(ins, ins.vdst, "f")

    def run(w):
        a, b, c = (read(w) for read in readers)
        value = fma32(a, b, c)
        rescaled = _ldexp(value, np.where(_exponent(c) > 127, 64, -64))
        write(w, np.where(scaled(w), rescaled, value), w.mask)

    return run


def mad_wide(ins: Instruction):
    """v_mad_u64_u32 and v_mad_i64_i32; the carry out says that the 64-bit sum wrapped."""
    kinds = "uuq" if ins.name == "v_mad_u64_u32" else "iir"
    a, b, c = sources(ins, kinds)
    write, write_carry = vector_writer(ins, ins.vdst, kinds[2]), scalar_writer(ins, ins.sdst, wide=True)
    wide = DTYPES[kinds[2]]

    def run(w):
        product, addend = np.multiply(a(w), b(w), dtype=wide), c(w)
        total = product + addend
        wrapped = total < product if wide is np.uint64 else (total < product) != (addend < 0)
        write_carry(w, mask_bits(np.broadcast_to(wrapped, (64,)) & w.lanes))
        write(w, total, w.mask)

    return run


def bitop3(ins: Instruction):
    """v_bitop3_b{32,16}: any function of three bits; the table sits where other VOP3s keep omod, abs and neg."""
    table = ins.omod << 6 | ins.abs << 3 | ins.neg
    if ins.opsel:
        raise ins.unknown("takes or writes a high half, which is not modelled")
    kind = "H" if ins.name.endswith("b16") else "u"
    readers = [vector(ins, code, kind) for code in _source_codes(ins)]
    write = vector_writer(ins, ins.vdst, kind)
    terms = [term for term in range(8) if table >> term & 1]

    def run(w):
        a, b, c = (read(w) for read in readers)
        result = DTYPES[kind](0)
        for term in terms:
            result = result | (a if term & 4 else ~a) & (b if term & 2 else ~b) & (c if term & 1 else ~c)
        write(w, result, w.mask)

    return run


_PACKED_32 = {
    "v_pk_mul_f32": (2, np.multiply),
    "v_pk_add_f32": (2, np.add),
    "v_pk_fma_f32": (3, fma32),
}


def _pair_half(ins: Instruction, code: int, kind: str, high: int, negate: int):
    """One half of a packed 32-bit source: op_sel picks the register of the pair."""
    if constant(ins, code, "u") is not None:
        if high:
            raise ins.unknown("selects the high half of a constant, which is not modelled")
        return _modified(vector(ins, code, kind), negate, False)
    return _modified(vector(ins, code + high, kind), negate, False)


def packed_32(ins: Instruction):
    """v_pk_{mul,add,fma}_f32 on register pairs."""
    count, compute = _PACKED_32[ins.name]
    codes = (ins.src0, ins.src1, ins.src2)[:count]
    op_sel_high = ins.opsel_hi | ins.opsel_hi2 << 2
    low = [_pair_half(ins, code, "f", ins.opsel >> n & 1, ins.neg >> n & 1) for n, code in enumerate(codes)]
    high = [_pair_half(ins, code, "f", op_sel_high >> n & 1, ins.neg_hi >> n & 1) for n, code in enumerate(codes)]
    write_low, write_high = vector_writer(ins, ins.vdst, "f"), vector_writer(ins, ins.vdst + 1, "f")
    compute = _output_modifiers(ins, "f", compute)

    def run(w):
        # Both halves are computed before either is written: the destination may be a source.
        first, second = compute(*[read(w) for read in low]), compute(*[read(w) for read in high])
        write_low(w, first, w.mask)
        write_high(w, second, w.mask)

    return run


def packed_mov(ins: Instruction):
    """v_pk_mov_b32: op_sel picks the half of src0 for the low result and of src1 for the high one."""
    low = _pair_half(ins, ins.src0, "u", ins.opsel & 1, 0)
    high = _pair_half(ins, ins.src1, "u", ins.opsel >> 1 & 1, 0)
    write_low, write_high = vector_writer(ins, ins.vdst, "u"), vector_writer(ins, ins.vdst + 1, "u")

    def run(w):
        first, second = np.array(low(w)), np.array(high(w))
        write_low(w, first, w.mask)
        write_high(w, second, w.mask)

    return run


_PACKED_16 = {
    "v_pk_add_f16": ("h", 2, np.add),
    "v_pk_mul_f16": ("h", 2, np.multiply),
    "v_pk_fma_f16": ("h", 3, fma16),
    "v_pk_max_f16": ("h", 2, fmax),
    "v_pk_min_f16": ("h", 2, fmin),
    "v_pk_maximum3_f16": ("h", 3, _nan_through(np.maximum)),
    "v_pk_minimum3_f16": ("h", 3, _nan_through(np.minimum)),
    "v_pk_add_u16": ("H", 2, np.add),
    "v_pk_sub_u16": ("H", 2, np.subtract),
    "v_pk_mul_lo_u16": ("H", 2, np.multiply),
    "v_pk_mad_u16": ("H", 3, lambda a, b, c: a * b + c),
    "v_pk_max_u16": ("H", 2, np.maximum),
    "v_pk_min_u16": ("H", 2, np.minimum),
    "v_pk_add_i16": ("I", 2, np.add),
    "v_pk_sub_i16": ("I", 2, np.subtract),
    "v_pk_max_i16": ("I", 2, np.maximum),
    "v_pk_min_i16": ("I", 2, np.minimum),
    "v_pk_lshlrev_b16": ("H", 2, _shift("H", np.left_shift)),
    "v_pk_lshrrev_b16": ("H", 2, _shift("H", np.right_shift)),
    "v_pk_ashrrev_i16": ("I", 2, _shift("I", np.right_shift)),
}


def packed_16(ins: Instruction):
    """Packed 16-bit math: op_sel picks each source's half for the low result, op_sel_hi for the high one."""
    kind, count, compute = _PACKED_16[ins.name]
    if ins.clmp and kind != "h":
        raise ins.unknown("clamps packed integers, which is not modelled")
    codes = (ins.src0, ins.src1, ins.src2)[:count]
    op_sel_high = ins.opsel_hi | ins.opsel_hi2 << 2
    halves = []
    for select, negate in ((ins.opsel, ins.neg), (op_sel_high, ins.neg_hi)):
        halves.append(
            [
                _modified(vector(ins, code, kind, bool(select >> n & 1)), negate >> n & 1, False)
                for n, code in enumerate(codes)
            ]
        )
    write = vector_writer(ins, ins.vdst, "u")
    compute = _output_modifiers(ins, kind, compute)

    def run(w):
        low, high = (
            np.asarray(compute(*[read(w) for read in half])).view(np.uint16).astype(np.uint32) for half in halves
        )
        write(w, low | high << np.uint32(16), w.mask)

    return run


def accvgpr(ins: Instruction):
    """Moves between VGPRs and AGPRs."""
    if ins.name == "v_accvgpr_write":
        read = vector(ins, ins.src0, "u")
        write = vector_writer(ins, 256 + ins.vdst, "u")
    elif ins.name == "v_accvgpr_read":
        read = row_reader(ins, 256 + ins.src0 - VGPR, "u")
        write = vector_writer(ins, ins.vdst, "u")
    else:
        read = row_reader(ins, 256 + ins.src0 - VGPR, "u")
        write = vector_writer(ins, 256 + ins.vdst, "u")
    return lambda w: write(w, read(w), w.mask)


def swap(ins: Instruction):
    """v_swap_b32 on the active lanes."""
    a, b = ins.vdst, ins.src0 - VGPR
    for row in (rows_read(ins, a), rows_read(ins, b)):
        rows_written(ins, row)

    def run(w):
        where = True if w.full else w.lanes
        old = w.u[a].copy()
        np.copyto(w.u[a], w.u[b], where=where)
        np.copyto(w.u[b], old, where=where)

    return run


def mbcnt(ins: Instruction):
    """v_mbcnt_{lo,hi}_u32_b32: set bits of the mask below this lane, plus src1."""
    mask, addend = scalar(ins, ins.src0), vector(ins, ins.src1, "u")
    write, high = vector_writer(ins, ins.vdst, "u"), ins.name == "v_mbcnt_hi_u32_b32"

    def run(w):
        bits = np.array([mask(w) >> lane & 1 for lane in range(32)], np.uint32)
        counts = np.zeros(64, np.uint32)
        below = np.concatenate(([0], np.cumsum(bits))).astype(np.uint32)
        if high:
            counts[32:] = below[:32]
        else:
            counts[:32], counts[32:] = below[:32], below[32]
        write(w, counts + addend(w), w.mask)

    return run


TABLE = {name: alu for name in OPS}
TABLE |= {name: packed_32 for name in _PACKED_32} | {name: packed_16 for name in _PACKED_16}
TABLE |= {
    "v_nop": lambda ins: lambda w: None,
    "v_fmamk_f32": fma_literal,
    "v_fmaak_f32": fma_literal,
    "v_div_scale_f32": div_scale,
    "v_div_fmas_f32": div_fmas,
    "v_mad_u64_u32": mad_wide,
    "v_mad_i64_i32": mad_wide,
    "v_bitop3_b32": bitop3,
    "v_bitop3_b16": bitop3,
    "v_pk_mov_b32": packed_mov,
    "v_accvgpr_write": accvgpr,
    "v_accvgpr_read": accvgpr,
    "v_accvgpr_mov_b32": accvgpr,
    "v_swap_b32": swap,
    "v_mbcnt_lo_u32_b32": mbcnt,
    "v_mbcnt_hi_u32_b32": mbcnt,
}
for _name in ("add", "sub", "subrev", "addc", "subb", "subbrev"):
    TABLE[f"v_{_name}_co_u32"] = with_carry


def is_compare(name: str) -> bool:
    return name.startswith(("v_cmp_", "v_cmpx_"))
