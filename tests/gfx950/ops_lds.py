"""LDS instructions (DS): reads, transposing reads, writes, atomics and lane permutes.

Addresses need no alignment (HSA runs in unaligned mode); an access outside the work-group's LDS is an error.
"""

import numpy as np

from .atomics import ATOMICS, apply_atomic
from .decode import Instruction
from .operands import rows_read, rows_written, vector_writer
from .state import LANES, WAVE

LGKM_LIMIT = 15

_READS = {
    "ds_read_b32": 4,
    "ds_read_b64": 8,
    "ds_read_b96": 12,
    "ds_read_b128": 16,
    "ds_read_u8": 1,
    "ds_read_i8": 1,
    "ds_read_u16": 2,
    "ds_read_i16": 2,
}
_WRITES = {
    "ds_write_b8": 1,
    "ds_write_b16": 2,
    "ds_write_b32": 4,
    "ds_write_b64": 8,
    "ds_write_b96": 12,
    "ds_write_b128": 16,
}


def accumulator(ins: Instruction) -> int:
    """256 when the data registers are AGPRs."""
    return 256 * ins.acc


def active(values: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """The active lanes' values as int64."""
    return (values if mask is None else values[mask]).astype(np.int64)


def sign_extend(data: np.ndarray, width: int) -> np.ndarray:
    """uint32 whose low `width` bytes hold a signed value -> the value in 32 bits."""
    shift = np.int32(32 - 8 * width)
    return (data.view(np.int32) << shift >> shift).view(np.uint32)


def read(ins: Instruction):
    width, row = _READS[ins.name], ins.vdst + accumulator(ins)
    address, offset = rows_read(ins, ins.addr), ins.offset0 | ins.offset1 << 8
    rows_written(ins, row, -(-width // 4))
    is_signed = "_i8" in ins.name or "_i16" in ins.name

    def run(w):
        mask, offsets = w.mask, active(w.u[address], w.mask) + offset

        def land():
            data = w.lds.load(offsets, width)
            w.write_rows(row, sign_extend(data, width) if is_signed else data, mask)

        w.queue(w.lds_queue, land, LGKM_LIMIT)

    return run


def read_half(ins: Instruction):
    """ds_read_{u8,i8,u16}_d16[_hi]: into one half of vdst, keeping the other."""
    width, row, high = 1 if "8" in ins.name.split("_")[2] else 2, ins.vdst + accumulator(ins), ins.name.endswith("_hi")
    address, offset, is_signed = rows_read(ins, ins.addr), ins.offset0 | ins.offset1 << 8, "_i8" in ins.name
    rows_read(ins, row)
    rows_written(ins, row)

    def run(w):
        mask, offsets = w.mask, active(w.u[address], w.mask) + offset

        def land():
            data = w.lds.load(offsets, width)
            half = (sign_extend(data, width) if is_signed else data) & 0xFFFF
            w.write_rows(row, merge_half(w.read_rows(row, 1, mask), half, high), mask)

        w.queue(w.lds_queue, land, LGKM_LIMIT)

    return run


def merge_half(old: np.ndarray, half: np.ndarray, high: bool) -> np.ndarray:
    """Replaces the low or high 16 bits."""
    return old & 0xFFFF | half << 16 if high else old & 0xFFFF0000 | half


def write(ins: Instruction):
    high = ins.name.endswith("_d16_hi")
    width, row = _WRITES[ins.name.removesuffix("_d16_hi")], ins.data0 + accumulator(ins)
    address, offset, count = rows_read(ins, ins.addr), ins.offset0 | ins.offset1 << 8, -(-width // 4)
    rows_read(ins, row, count)

    def run(w):
        mask = w.mask
        offsets, data = active(w.u[address], mask) + offset, w.read_rows(row, count, mask)
        if high:
            data >>= 16
        w.queue(w.lds_queue, lambda: w.lds.store(offsets, data, width), LGKM_LIMIT)

    return run


def _two_offsets(ins: Instruction) -> tuple[int, tuple[int, int]]:
    width = 8 if ins.name.endswith("b64") else 4
    unit = width * (64 if "st64" in ins.name else 1)
    return width, (ins.offset0 * unit, ins.offset1 * unit)


def read_two(ins: Instruction):
    """ds_read2[st64]: two values at offsets counted in elements (or 64 elements)."""
    width, offsets = _two_offsets(ins)
    row, address, count = ins.vdst + accumulator(ins), rows_read(ins, ins.addr), width // 4
    rows_written(ins, row, 2 * count)

    def run(w):
        mask, base = w.mask, active(w.u[address], w.mask)

        def land():
            data = np.concatenate([w.lds.load(base + offset, width) for offset in offsets], axis=1)
            w.write_rows(row, data, mask)

        w.queue(w.lds_queue, land, LGKM_LIMIT)

    return run


def write_two(ins: Instruction):
    width, offsets = _two_offsets(ins)
    count, address = width // 4, rows_read(ins, ins.addr)
    rows = [rows_read(ins, data + accumulator(ins), count) for data in (ins.data0, ins.data1)]

    def run(w):
        mask = w.mask
        base, data = active(w.u[address], mask), [w.read_rows(row, count, mask) for row in rows]

        def land():
            for offset, values in zip(offsets, data, strict=True):
                w.lds.store(base + offset, values, width)

        w.queue(w.lds_queue, land, LGKM_LIMIT)

    return run


# Source of byte `j` of lane `i` within 16 lanes that hold 8 bytes each: the lanes' 128 bytes are a matrix with rows
# (the reduction dimension) in lane order, and lane i receives column i. Checked against the layouts that Triton's
# compiler pairs with these instructions.
def _transpose_index(element_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """(source lane, source byte), both [64, 8]."""
    elements = 8 // element_bytes
    lane, byte = LANES[:, None], np.arange(8)[None, :]
    column, row = lane % 16, byte // element_bytes
    source_lane = lane // 16 * 16 + row * (16 // elements) + column // elements
    source_byte = column % elements * element_bytes + byte % element_bytes
    return source_lane, source_byte


def read_transposed(ins: Instruction):
    """ds_read_b64_tr_{b8,b16}: a 16-lane block reads 8 bytes a lane and hands out columns."""
    source_lane, source_byte = _transpose_index(1 if ins.name.endswith("b8") else 2)
    flat = source_lane * 8 + source_byte
    row, address, offset = ins.vdst + accumulator(ins), rows_read(ins, ins.addr), ins.offset0 | ins.offset1 << 8
    rows_written(ins, row, 2)

    def run(w):
        if not w.full:
            raise ins.unknown("runs with inactive lanes, which is not modelled")
        offsets = w.u[address].astype(np.int64) + offset

        def land():
            raw = w.lds.load(offsets, 8).view(np.uint8).reshape(-1)
            w.write_rows(row, raw[flat].view(np.uint32), None)

        w.queue(w.lds_queue, land, LGKM_LIMIT)

    return run


def permute(ins: Instruction):
    """ds_bpermute_b32 (pull) and ds_permute_b32 (push); inactive sources read 0."""
    address, data = rows_read(ins, ins.addr), rows_read(ins, ins.data0 + accumulator(ins))
    offset, write_row = ins.offset0 | ins.offset1 << 8, vector_writer(ins, ins.vdst + accumulator(ins), "u")
    pull = ins.name == "ds_bpermute_b32"

    def run(w):
        mask, lanes = w.mask, (w.u[address] + np.uint32(offset)) // 4 % WAVE
        source = np.where(w.lanes, w.u[data], 0).astype(np.uint32)
        if pull:
            result = source[lanes]
        else:
            result = np.zeros(WAVE, np.uint32)
            result[lanes[w.lanes]] = source[w.lanes]
        w.queue(w.lds_queue, lambda: write_row(w, result, mask), LGKM_LIMIT)

    return run


def swizzle(ins: Instruction):
    """ds_swizzle_b32: quad permutes (bit 15) or the and/or/xor masks within 32 lanes."""
    data, pattern = rows_read(ins, ins.addr), ins.offset0 | ins.offset1 << 8
    write_row = vector_writer(ins, ins.vdst + accumulator(ins), "u")
    if pattern & 0x8000:
        pick = np.array([pattern >> 2 * n & 3 for n in range(4)])
        lanes = LANES // 4 * 4 + pick[LANES % 4]
    else:
        low = (LANES & 31 & pattern | pattern >> 5 & 31) ^ pattern >> 10 & 31
        lanes = LANES & 32 | low & 31

    def run(w):
        mask, result = w.mask, np.where(w.lanes, w.u[data], 0).astype(np.uint32)[lanes]
        w.queue(w.lds_queue, lambda: write_row(w, result, mask), LGKM_LIMIT)

    return run


def atomic(ins: Instruction):
    """ds_OP[_rtn]_{u32,f32,...}: lanes take their turns in lane order."""
    parts = ins.name.split("_")
    returns = "rtn" in parts
    operation, kind = parts[1], parts[-1]
    key = {"wrxchg": "swap"}.get(operation, operation)
    if kind == "f32":
        key += "_f32"
    elif key in ("min", "max"):
        key = ("s" if kind == "i32" else "u") + key
    if key not in ATOMICS or kind not in ("u32", "i32", "b32", "f32"):
        raise ins.unknown()
    address, data = rows_read(ins, ins.addr), rows_read(ins, ins.data0 + accumulator(ins))
    row, offset = ins.vdst + accumulator(ins), ins.offset0 | ins.offset1 << 8
    if returns:
        rows_written(ins, row)

    def run(w):
        mask = w.mask
        offsets, values = active(w.u[address], mask) + offset, w.read_rows(data, 1, mask)

        def land():
            old = apply_atomic(w.lds, offsets, values, key, 4)
            if returns:
                w.write_rows(row, old, mask)

        w.queue(w.lds_queue, land, LGKM_LIMIT)

    return run


TABLE = {name: read for name in _READS}
TABLE |= {name: write for name in _WRITES} | {"ds_write_b8_d16_hi": write, "ds_write_b16_d16_hi": write}
TABLE |= {f"ds_read_{kind}_d16{high}": read_half for kind in ("u8", "i8", "u16") for high in ("", "_hi")}
for _form in ("2_b32", "2_b64", "2st64_b32", "2st64_b64"):
    TABLE[f"ds_read{_form}"], TABLE[f"ds_write{_form}"] = read_two, write_two
TABLE |= {
    "ds_read_b64_tr_b8": read_transposed,
    "ds_read_b64_tr_b16": read_transposed,
    "ds_bpermute_b32": permute,
    "ds_permute_b32": permute,
    "ds_swizzle_b32": swizzle,
}
for _operation, _kinds in {
    **dict.fromkeys(("add", "sub"), ("u32",)),
    **dict.fromkeys(("min", "max"), ("i32", "u32", "f32")),
    **dict.fromkeys(("and", "or", "xor"), ("b32",)),
}.items():
    for _kind in _kinds:
        TABLE[f"ds_{_operation}_{_kind}"] = TABLE[f"ds_{_operation}_rtn_{_kind}"] = atomic
TABLE |= {"ds_add_f32": atomic, "ds_add_rtn_f32": atomic, "ds_wrxchg_rtn_b32": atomic}
