"""Data movement between lanes (DPP, permlane, readlane) and within a register (SDWA)."""

import numpy as np

from .decode import Instruction
from .operands import (
    DTYPES,
    VGPR,
    row_reader,
    rows_read,
    rows_written,
    scalar,
    scalar_writer,
    vector,
    vector_writer,
)
from .state import LANES

ROW = LANES // 16 * 16
IN_ROW = LANES % 16


def dpp_lanes(control: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(source lane, it exists) of each lane for a DPP control word, or None when it is not defined."""
    amount = control & 15
    if control < 0x100:  # quad_perm
        pick = np.array([control >> 2 * n & 3 for n in range(4)])
        source = LANES // 4 * 4 + pick[LANES % 4]
    elif 0x101 <= control <= 0x10F:  # row_shl
        source = np.where(IN_ROW + amount < 16, LANES + amount, -1)
    elif 0x111 <= control <= 0x11F:  # row_shr
        source = np.where(IN_ROW >= amount, LANES - amount, -1)
    elif 0x121 <= control <= 0x12F:  # row_ror
        source = ROW + (IN_ROW - amount) % 16
    elif control == 0x130:  # wave_shl
        source = np.where(LANES < 63, LANES + 1, -1)
    elif control == 0x134:  # wave_rol
        source = (LANES + 1) % 64
    elif control == 0x138:  # wave_shr
        source = LANES - 1
    elif control == 0x13C:  # wave_ror
        source = (LANES - 1) % 64
    elif control == 0x140:  # row_mirror
        source = ROW + 15 - IN_ROW
    elif control == 0x141:  # row_half_mirror
        source = LANES // 8 * 8 + 7 - LANES % 8
    elif control == 0x142:  # row_bcast15: lane 15 of the row before
        source = np.where(LANES >= 16, ROW - 1, -1)
    elif control == 0x143:  # row_bcast31: lane 31 for the upper half
        source = np.where(LANES >= 32, 31, -1)
    elif 0x150 <= control <= 0x15F:  # row_newbcast
        source = ROW + amount
    else:
        return None
    return np.maximum(source, 0), source >= 0


def _dpp(ins: Instruction):
    lanes = dpp_lanes(ins.dpp)
    if lanes is None:
        raise ins.unknown(f"has DPP control {ins.dpp:#x}, which is not modelled")
    source, exists = lanes
    return source, lambda w: exists if w.full else exists & w.lanes[source]


def dpp_source(ins: Instruction, kind: str):
    """Reader of the first source through DPP; lanes without a source read 0."""
    source, valid = _dpp(ins)
    read, zero = row_reader(ins, ins.vsrc0, kind), DTYPES[kind](0)
    return lambda w: np.where(valid(w), read(w)[source], zero)


def dpp_enabled(ins: Instruction):
    """Lanes that DPP lets write: row and bank masks, and unless bound_ctrl is set only those with a source."""
    _, valid = _dpp(ins)
    allowed = (ins.row_mask >> LANES // 16 & 1 == 1) & (ins.bank_mask >> IN_ROW // 4 & 1 == 1)
    if ins.bc:
        return lambda w: allowed & w.lanes
    return lambda w: allowed & w.lanes & valid(w)


DWORD = 6


def _select(value, select: int, sign_extend: int):
    """Byte or word of a dword, as uint32."""
    if select == DWORD:
        return value
    bits, shift = (8, 8 * select) if select < 4 else (16, 16 * (select - 4))
    if sign_extend:
        return (value.view(np.int32) << np.int32(32 - bits - shift) >> np.int32(32 - bits)).view(np.uint32)
    return value >> np.uint32(shift) & np.uint32((1 << bits) - 1)


def sdwa_source(ins: Instruction, position: int, kind: str):
    """Reader of source 0 or 1 through its SDWA selection."""
    register = ins.fields["vsrc0" if position == 0 else "vsrc1"]
    read = vector(ins, register if ins.get(f"s{position}") else VGPR + register, "u")
    select, sign_extend, dtype = ins.fields[f"src{position}_sel"], ins.get(f"src{position}_sext"), DTYPES[kind]

    def selected(w):
        value = np.asarray(_select(read(w), select, sign_extend))
        if dtype().itemsize == 2:
            value = value.astype(np.uint16)
        return value.view(dtype)

    return selected


def sdwa_destination(ins: Instruction, kind: str):
    """Writer of vdst through dst_sel, with the unused bits zeroed, sign-extended or kept."""
    row, select, unused, dtype = ins.vdst, ins.dst_sel, ins.dst_unused, DTYPES[kind]
    if select == DWORD:
        return vector_writer(ins, row, kind)
    rows_written(ins, row)
    bits, shift = (8, 8 * select) if select < 4 else (16, 16 * (select - 4))
    field = np.uint32((1 << bits) - 1)
    if unused == 2:
        rows_read(ins, row)

    def write(w, value, mask):
        value = np.asarray(value, dtype)
        value = value.view(np.uint16).astype(np.uint32) if dtype().itemsize == 2 else value.view(np.uint32)
        placed = (value & field) << np.uint32(shift)
        if unused == 1:
            placed = ((value << np.uint32(32 - bits)).view(np.int32) >> np.int32(32 - bits - shift)).view(np.uint32)
            placed = placed & ~np.uint32((1 << shift) - 1)
        elif unused == 2:
            placed = placed | w.u[row] & ~(field << np.uint32(shift))
        np.copyto(w.u[row], placed, where=True if mask is None else mask)

    return write


def permlane_swap(ins: Instruction):
    """Exchanges odd blocks of vdst with even blocks of src0 (blocks of 16 or 32 lanes), whatever EXEC is."""
    block = 16 if "16" in ins.name.split("_")[1] else 32
    a, b = ins.vdst, ins.src0 - VGPR
    for row in (rows_read(ins, a), rows_read(ins, b)):
        rows_written(ins, row)

    def run(w):
        odd, even = w.u[a].reshape(-1, 2, block)[:, 1], w.u[b].reshape(-1, 2, block)[:, 0]
        kept = odd.copy()
        odd[...] = even
        even[...] = kept

    return run


def readfirstlane(ins: Instruction):
    write = scalar_writer(ins, ins.vdst)
    if ins.src0 < VGPR:
        read_scalar = scalar(ins, ins.src0)
        return lambda w: write(w, read_scalar(w))
    row = rows_read(ins, ins.src0 - VGPR)
    # With no lane active, lane 0 is read.
    return lambda w: write(w, int(w.u[row][(w.exec & -w.exec).bit_length() - 1 if w.exec else 0]))


def readlane(ins: Instruction):
    write, lane = scalar_writer(ins, ins.vdst), scalar(ins, ins.src1)
    row = rows_read(ins, ins.src0 - VGPR)
    return lambda w: write(w, int(w.u[row][lane(w) & 63]))


def writelane(ins: Instruction):
    value, lane = scalar(ins, ins.src0), scalar(ins, ins.src1)
    row = rows_written(ins, ins.vdst)

    def run(w):
        w.u[row][lane(w) & 63] = value(w)

    return run


TABLE = {
    "v_permlane16_swap_b32": permlane_swap,
    "v_permlane32_swap_b32": permlane_swap,
    "v_readfirstlane_b32": readfirstlane,
    "v_readlane_b32": readlane,
    "v_writelane_b32": writelane,
}
