"""Operand access, resolved once per instruction into closures over a wave.

Kinds: u i f = 32-bit unsigned, signed, float; H I h = the same on 16-bit halves; q r = 64-bit unsigned, signed;
m = a 64-lane mask held in an SGPR pair.
"""

import struct

import numpy as np

from .decode import Instruction
from .state import EXEC, M0, lane_mask

DTYPES = {
    **{"u": np.uint32, "i": np.int32, "f": np.float32, "q": np.uint64, "r": np.int64},
    **{"H": np.uint16, "I": np.int16, "h": np.float16},
}
FLOATS = "fh"
WIDE = "qr"
HALVES = "HIh"
_FLOAT_CONSTANTS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0}
_INVERSE_2PI = {"e": 0x3118, "f": 0x3E22F983, "d": 0x3FC45F306DC9C882}
LITERAL = 255
VGPR = 256


def signed(value: int, bits: int = 32) -> int:
    """Two's complement reading of the low bits."""
    value &= (1 << bits) - 1
    return value - (value >> bits - 1 << bits)


def constant(ins: Instruction, code: int, kind: str) -> int | None:
    """Bits of an inline constant or literal, or None when `code` is a register."""
    bits = 64 if kind in WIDE else 16 if kind in HALVES else 32
    if 128 <= code <= 208:
        return (code - 128 if code <= 192 else 192 - code) & (1 << bits) - 1
    if 240 <= code <= 248:
        form = {64: "d", 32: "f", 16: "e"}[bits]
        if code == 248:
            return _INVERSE_2PI[form]
        return int.from_bytes(struct.pack("<" + form, _FLOAT_CONSTANTS[code]), "little")
    if code == LITERAL:
        if "literal" not in ins.fields:
            raise ins.unknown("uses a literal in an encoding without one")
        return ins.literal & (1 << bits) - 1
    return None


def scalar(ins: Instruction, code: int, wide: bool = False, is_signed: bool = False):
    """Reader of a 32- or 64-bit scalar source, as a Python integer."""
    value = constant(ins, code, "q" if wide else "u")
    if value is not None:
        if is_signed:
            value = signed(value, 64 if wide and code != LITERAL else 32)
        return lambda w: value
    if code == 253:
        return lambda w: w.scc
    if code == 251:
        return lambda w: int(w.pair(106) == 0)
    if code == 252:
        return lambda w: int(w.exec == 0)
    if code >= 128:
        raise ins.unknown(f"reads scalar operand {code}, which is not modelled")
    ins.reads.update((code, code + 1) if wide else (code,))
    if wide:
        return (
            (lambda w: signed(w.s[code] | w.s[code + 1] << 32, 64))
            if is_signed
            else (lambda w: w.s[code] | w.s[code + 1] << 32)
        )
    return (lambda w: signed(w.s[code])) if is_signed else (lambda w: w.s[code])


def scalar_writer(ins: Instruction, code: int, wide: bool = False):
    """Writer of a 32- or 64-bit scalar destination; takes any Python integer and keeps the low bits."""
    ins.writes.update((code, code + 1) if wide else (code,))
    if code == EXEC and wide:
        return lambda w, value: w.set_exec(value & 0xFFFFFFFFFFFFFFFF)
    if code == EXEC:
        return lambda w, value: w.set_exec(w.exec & ~0xFFFFFFFF | value & 0xFFFFFFFF)
    if code == EXEC + 1:
        return lambda w, value: w.set_exec(w.exec & 0xFFFFFFFF | (value & 0xFFFFFFFF) << 32)
    if code > M0:
        raise ins.unknown(f"writes scalar operand {code}, which is not modelled")
    if wide:

        def write(w, value):
            w.s[code] = value & 0xFFFFFFFF
            w.s[code + 1] = value >> 32 & 0xFFFFFFFF

        return write

    def write_low(w, value):
        w.s[code] = value & 0xFFFFFFFF

    return write_low


def mask_reader(ins: Instruction, code: int):
    """Reader of a lane mask (bool[64]) from an SGPR pair, VCC or a constant."""
    read = scalar(ins, code, wide=True)
    return lambda w: lane_mask(read(w))


def rows_read(ins: Instruction, row: int, count: int = 1) -> int:
    """Notes that rows (AGPRs from 256 on) are read, and returns `row`."""
    ins.reads.update(range(VGPR + row, VGPR + row + count))
    return row


def rows_written(ins: Instruction, row: int, count: int = 1) -> int:
    ins.writes.update(range(VGPR + row, VGPR + row + count))
    return row


def row_reader(ins: Instruction, row: int, kind: str, high: bool = False):
    """Reader of one VGPR (pair) as a 64-lane array of `kind`."""
    rows_read(ins, row, 2 if kind in WIDE else 1)
    dtype = DTYPES[kind]
    if kind in WIDE:
        return lambda w: (w.u[row] | w.u[row + 1].astype(np.uint64) << np.uint64(32)).view(dtype)
    if kind in HALVES:
        return lambda w: w.u[row].view(dtype)[int(high) :: 2]
    return {"u": lambda w: w.u[row], "i": lambda w: w.i[row], "f": lambda w: w.f[row]}[kind]


def vector(ins: Instruction, code: int, kind: str, high: bool = False):
    """Reader of a vector source: a 64-lane array, or a numpy scalar for SGPRs and constants."""
    if kind == "m":
        return mask_reader(ins, code)
    if code >= VGPR:
        return row_reader(ins, code - VGPR, kind, high)
    dtype = DTYPES[kind]
    bits = constant(ins, code, kind)
    if bits is not None:
        bits = bits >> 16 if high and code == LITERAL else bits
        value = np.array(bits).astype(f"u{dtype().itemsize}").view(dtype)[()]
        return lambda w: value
    read = scalar(ins, code, wide=kind in WIDE)
    if kind == "u":
        return lambda w: np.uint32(read(w))
    if kind in HALVES:
        shift = 16 if high else 0
        return lambda w: np.uint16(read(w) >> shift & 0xFFFF).view(dtype)
    unsigned = np.uint64 if kind in WIDE else np.uint32
    return lambda w: unsigned(read(w)).view(dtype)


def vector_writer(ins: Instruction, row: int, kind: str, high: bool | None = False):
    """Writer `(wave, value, mask)` of one VGPR (pair); `mask` None means all lanes.

    A 16-bit result clears the other half, as on GFX9; into the high half (op_sel) it keeps the low one.
    """
    rows_written(ins, row, 2 if kind in WIDE else 1)
    if kind in HALVES and high:
        rows_read(ins, row)
    if kind in WIDE:

        def write_pair(w, value, mask):
            bits = np.broadcast_to(np.asarray(value, DTYPES[kind]), (64,)).view(np.uint64)
            low, top = bits.astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)
            where = True if mask is None else mask
            np.copyto(w.u[row], low, where=where)
            np.copyto(w.u[row + 1], top, where=where)

        return write_pair
    if kind in HALVES:

        def write_half(w, value, mask):
            bits = np.asarray(value, DTYPES[kind]).view(np.uint16).astype(np.uint32)
            if high:
                bits = w.u[row] & np.uint32(0xFFFF) | bits << np.uint32(16)
            np.copyto(w.u[row], bits, where=True if mask is None else mask)

        return write_half
    rows = {"u": lambda w: w.u[row], "i": lambda w: w.i[row], "f": lambda w: w.f[row]}[kind]

    def write(w, value, mask):
        if mask is None:
            rows(w)[...] = value
        else:
            np.copyto(rows(w), value, where=mask)

    return write
