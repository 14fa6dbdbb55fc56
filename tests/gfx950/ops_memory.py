"""Global memory: SMEM, GLOBAL, FLAT and MUBUF, with direct-to-LDS loads and atomics.

Without `caches` memory is sequentially consistent: sc0 makes an atomic return its old value, sc1, buffer_wbl2 and
buffer_inv have no effect beyond their place in the queue. FLAT addresses are global ones; scratch is an error.
"""

import numpy as np

from .atomics import ATOMICS, apply_atomic
from .decode import Instruction
from .operands import rows_read, rows_written, scalar, scalar_writer, signed
from .ops_lds import LGKM_LIMIT, accumulator, active, merge_half, sign_extend
from .state import LANES, M0

VM_LIMIT = 63
NO_SADDR = 127
SWIZZLE_ENABLE, ADD_TID_ENABLE = 1 << 31, 1 << 23  # in words 1 and 3 of a buffer resource
_WIDTHS = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2} | {
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
}


def smem(ins: Instruction):
    """s_load_* and s_buffer_load_* (out of range: 0), and s_dcache_*, which has no effect."""
    name = ins.name
    if name.startswith("s_dcache"):
        return lambda w: None
    parts = name.split("_")
    buffer = parts[1] == "buffer"
    if "_".join(parts[1:-1]) not in ("load", "buffer_load"):
        raise ins.unknown()
    count = int(parts[-1].removeprefix("dword").removeprefix("x") or 1)
    base, register = ins.sbase, ins.sdata
    ins.reads.update(range(base, base + (4 if buffer else 2)))
    if ins.imm:
        immediate = signed(ins.offset, 21)
        extra = scalar(ins, ins.soffset) if ins.soffset_en else (lambda w: 0)
    else:
        immediate, extra = 0, scalar(ins, ins.soffset if ins.soffset_en else ins.offset & 127)
    writers = [scalar_writer(ins, register + n) for n in range(count)]

    def run(w):
        offset = immediate + extra(w)
        if buffer:
            start, stride, records = descriptor(w, base)
            limit = records * (stride or 1)
        else:
            start, limit = w.pair(base), None
        address = start + offset & ~3

        def land():
            fits = count if limit is None else min(count, max(0, (limit - offset) // 4))
            values = (w.memory.load_scalar(address, fits) if fits else []) + [0] * (count - fits)
            for write, value in zip(writers, values, strict=True):
                write(w, value)

        w.queue(w.smem, land, LGKM_LIMIT)

    return run


def descriptor(w, base: int) -> tuple[int, int, int]:
    """(address, stride, records) of a buffer resource in four SGPRs."""
    return w.s[base] | (w.s[base + 1] & 0xFFFF) << 32, w.s[base + 1] >> 16 & 0x3FFF, w.s[base + 2]


def _flat_addresses(ins: Instruction):
    """Reader of the active lanes' addresses, for GLOBAL and FLAT."""
    is_global = ins.encoding == "GLOBAL"
    offset = signed(ins.offset, 13) if is_global else ins.offset
    row = rows_read(ins, ins.addr)
    if is_global and ins.saddr != NO_SADDR:
        base = scalar(ins, ins.saddr, wide=True)
        return lambda w: active(w.u[row], w.mask) + (base(w) + offset)
    rows_read(ins, row + 1)

    def addresses(w):
        return active(w.u[row], w.mask) + (active(w.u[row + 1], w.mask) << 32) + offset

    return addresses


def _buffer_offsets(ins: Instruction):
    """Reader of (addresses, in range) of the active lanes, for MUBUF.

    Without swizzling, num_records counts bytes whatever the stride; the whole element must lie within it.
    """
    base, immediate = ins.srsrc, ins.offset
    ins.reads.update(range(base, base + 4))
    if ins.idxen:
        raise ins.unknown("indexes a structured buffer, which is not modelled")
    soffset = scalar(ins, ins.soffset)
    row = rows_read(ins, ins.vaddr) if ins.offen else None

    def offsets(w, width):
        start, _, records = descriptor(w, base)
        if w.s[base + 1] & SWIZZLE_ENABLE or w.s[base + 3] & ADD_TID_ENABLE:
            raise ins.unknown("swizzles or adds the thread id, which is not modelled")
        extra = soffset(w)
        if row is None:
            count = 64 if w.full else int(w.lanes.sum())
            within = np.full(count, immediate, np.int64)
        else:
            within = active(w.u[row], w.mask) + immediate
        return within + (start + extra), within + (width + extra) <= records

    return offsets


def _load_form(name: str) -> tuple[int, bool, bool | None]:
    """(width, signed, None or "into the high half") from e.g. `ubyte_d16_hi`."""
    base, d16, high = name.partition("_d16")
    return _WIDTHS[base], base in ("sbyte", "sshort"), bool(high) if d16 else None


def _write_back(w, row: int, data: np.ndarray, width: int, is_signed: bool, half: bool | None, mask) -> None:
    if is_signed:
        data = sign_extend(data, width)
    if half is not None:
        data = merge_half(w.read_rows(row, 1, mask), data & 0xFFFF, half)
    w.write_rows(row, data, mask)


def flat(ins: Instruction):
    """GLOBAL and FLAT loads, stores, atomics and direct-to-LDS loads."""
    action = ins.name.split("_", 1)[1]
    if action.startswith("load_lds_"):
        return _flat_to_lds(ins, _WIDTHS[action.removeprefix("load_lds_")])
    addresses = _flat_addresses(ins)
    if action.startswith("atomic_"):
        return _atomic(ins, action, lambda w, width: (addresses(w), None), ins.data, ins.vdst)
    if action.startswith("store_"):
        return _store(ins, action, lambda w, width: (addresses(w), None), ins.data)
    return _load(ins, action, lambda w, width: (addresses(w), None), ins.vdst)


def mubuf(ins: Instruction):
    """Buffer loads (out of range: 0), stores (dropped), atomics, direct-to-LDS loads and cache control."""
    action = ins.name.split("_", 1)[1]
    if action in ("wbl2", "inv"):
        return _cache_control(ins, action)
    offsets = _buffer_offsets(ins)
    if ins.lds:
        width = _WIDTHS.get(action.removeprefix("load_"))
        if width is None:
            raise ins.unknown()
        return _to_lds(ins, width, offsets)
    if action.startswith("atomic_"):
        return _atomic(ins, action, offsets, ins.vdata, ins.vdata)
    if action.startswith("store_") and "format" not in action:
        return _store(ins, action, offsets, ins.vdata)
    if action.startswith("load_") and "format" not in action:
        return _load(ins, action, offsets, ins.vdata)
    raise ins.unknown()


def _cache_control(ins: Instruction, action: str):
    def run(w):
        def land():
            if ins.sc1:
                w.memory.write_back() if action == "wbl2" else w.memory.invalidate()

        w.queue(w.vm, land, VM_LIMIT)

    return run


def _memory(ins: Instruction, w):
    """The wave's memory, past its cache for an access of device scope."""
    return w.memory.device_scope() if ins.sc1 else w.memory


def _fetch(memory, addresses: np.ndarray, inside: np.ndarray | None, width: int) -> np.ndarray:
    """Loads the lanes in range; the others read 0."""
    if inside is None or inside.all():
        return memory.load(addresses, width)
    data = np.zeros((addresses.size, -(-width // 4)), np.uint32)
    data[inside] = memory.load(addresses[inside], width)
    return data


def _load(ins: Instruction, action: str, locate, register: int):
    width, is_signed, half = _load_form(action.removeprefix("load_"))
    row = register + accumulator(ins)
    rows_written(ins, row, -(-width // 4))
    if half is not None:
        rows_read(ins, row)

    def run(w):
        mask = w.mask
        addresses, inside = locate(w, width)

        def land():
            _write_back(w, row, _fetch(_memory(ins, w), addresses, inside, width), width, is_signed, half, mask)

        w.queue(w.vm, land, VM_LIMIT)

    return run


def _store(ins: Instruction, action: str, locate, register: int):
    form = action.removeprefix("store_")
    width, high = _WIDTHS[form.removesuffix("_d16_hi")], form.endswith("_d16_hi")
    count, row = -(-width // 4), register + accumulator(ins)
    rows_read(ins, row, count)

    def run(w):
        mask = w.mask
        addresses, inside = locate(w, width)
        data = w.read_rows(row, count, mask)
        if high:
            data >>= 16
        if inside is not None and not inside.all():
            addresses, data = addresses[inside], data[inside]
        w.queue(w.vm, lambda: _memory(ins, w).store(addresses, data, width), VM_LIMIT)

    return run


def _atomic(ins: Instruction, action: str, locate, data_register: int, result_register: int):
    key = action.removeprefix("atomic_").removesuffix("_x2")
    width = 8 if action.endswith("_x2") else 4
    if key not in ATOMICS and key != "cmpswap":
        raise ins.unknown()
    row, result = data_register + accumulator(ins), result_register + accumulator(ins)
    count = width // 4 * (2 if key == "cmpswap" else 1)
    rows_read(ins, row, count)
    returns = bool(ins.sc0)
    if returns:
        rows_written(ins, result, width // 4)

    def run(w):
        mask = w.mask
        addresses, inside = locate(w, width)
        data = w.read_rows(row, count, mask)

        def land():
            old = np.zeros((addresses.size, width // 4), np.uint32)
            chosen = slice(None) if inside is None else inside
            old[chosen] = apply_atomic(w.memory.device_scope(), addresses[chosen], data[chosen], key, width)
            if returns:
                w.write_rows(result, old, mask)

        w.queue(w.vm, land, VM_LIMIT)

    return run


def _flat_to_lds(ins: Instruction, width: int):
    addresses = _flat_addresses(ins)
    return _to_lds(ins, width, lambda w, _: (addresses(w), None), signed(ins.offset, 13))


def _to_lds(ins: Instruction, width: int, locate, offset: int | None = None):
    """Lane l writes LDS at M0 + instruction offset + l * width; lanes out of range write 0."""
    ins.reads.add(M0)
    offset = ins.offset if offset is None else offset
    stride = max(width, 4)

    def run(w):
        mask = w.mask
        addresses, inside = locate(w, width)
        places = active(LANES, mask) * stride + (w.s[M0] + offset)

        def land():
            w.lds.store(places, _fetch(_memory(ins, w), addresses, inside, width), stride)

        w.queue(w.vm, land, VM_LIMIT)

    return run


def scratch(ins: Instruction):
    raise ins.unknown("uses scratch memory, which these kernels must not")


ENCODINGS = {"SMEM": smem, "FLAT": flat, "GLOBAL": flat, "MUBUF": mubuf, "SCRATCH": scratch}
