"""Scalar ALU, branches, waits and mode registers (SOP1, SOP2, SOPC, SOPK, SOPP)."""

from .decode import Instruction
from .operands import LITERAL, scalar, scalar_writer, signed
from .state import FULL_EXEC, M0, VCC

MASK32, MASK64 = 0xFFFFFFFF, FULL_EXEC


def _width(name: str) -> bool:
    """True for the 64-bit forms."""
    return name.endswith(("_b64", "_u64", "_i64"))


def _borrow(a, b, c=0):
    return a - b - c, int(b + c > a)


def _overflow(value):
    return value, int(not -(1 << 31) <= value < 1 << 31)


def _field(a, b, bits, is_signed):
    """Bit field extract: offset in the low bits of b, width from bit 16."""
    offset, width = b & (bits - 1), b >> 16 & 127
    value = (signed(a, bits) if is_signed else a) >> offset & (1 << width) - 1
    return signed(value, width) if is_signed and width else value


# name -> (signed sources, function of a and b giving (result, scc)); scc None leaves SCC alone.
_TWO = {
    "s_add_u32": (False, lambda a, b: (a + b, a + b >> 32)),
    "s_sub_u32": (False, _borrow),
    "s_add_i32": (True, lambda a, b: _overflow(a + b)),
    "s_sub_i32": (True, lambda a, b: _overflow(a - b)),
    "s_min_i32": (True, lambda a, b: (min(a, b), int(a < b))),
    "s_max_i32": (True, lambda a, b: (max(a, b), int(a > b))),
    "s_min_u32": (False, lambda a, b: (min(a, b), int(a < b))),
    "s_max_u32": (False, lambda a, b: (max(a, b), int(a > b))),
    "s_mul_i32": (False, lambda a, b: (a * b, None)),
    "s_mul_hi_u32": (False, lambda a, b: (a * b >> 32, None)),
    "s_mul_hi_i32": (True, lambda a, b: (a * b >> 32, None)),
    "s_absdiff_i32": (True, lambda a, b: (abs(a - b), int((a - b) & MASK32 != 0))),
    "s_pack_ll_b32_b16": (False, lambda a, b: (a & 0xFFFF | (b & 0xFFFF) << 16, None)),
    "s_pack_lh_b32_b16": (False, lambda a, b: (a & 0xFFFF | b & 0xFFFF0000, None)),
    "s_pack_hh_b32_b16": (False, lambda a, b: (a >> 16 | b & 0xFFFF0000, None)),
    "s_bfm_b32": (False, lambda a, b: ((1 << (a & 31)) - 1 << (b & 31), None)),
    "s_bfm_b64": (False, lambda a, b: ((1 << (a & 63)) - 1 << (b & 63), None)),
}
for _n in (1, 2, 3, 4):
    _TWO[f"s_lshl{_n}_add_u32"] = (False, lambda a, b, n=_n: ((a << n) + b, int((a << n) + b > MASK32)))

# Results whose SCC says "not zero"; b is 32 bits for shifts and fields, whatever the width of a.
_LOGIC = {
    "and": lambda a, b, n: a & b,
    "or": lambda a, b, n: a | b,
    "xor": lambda a, b, n: a ^ b,
    "andn2": lambda a, b, n: a & ~b,
    "orn2": lambda a, b, n: a | ~b,
    "nand": lambda a, b, n: ~(a & b),
    "nor": lambda a, b, n: ~(a | b),
    "xnor": lambda a, b, n: ~(a ^ b),
}
_SHIFT = {
    "s_lshl_b": lambda a, b, n: a << (b & n - 1),
    "s_lshr_b": lambda a, b, n: a >> (b & n - 1),
    "s_ashr_i": lambda a, b, n: signed(a, n) >> (b & n - 1),
    "s_bfe_u": lambda a, b, n: _field(a, b, n, False),
    "s_bfe_i": lambda a, b, n: _field(a, b, n, True),
}


def _find(a: int, n: int) -> int:
    """Index of the lowest set bit, or -1."""
    return (a & -a).bit_length() - 1 if a else -1


def _leading(a: int, n: int) -> int:
    """Zeros above the highest set bit, or -1."""
    return n - a.bit_length() if a else -1


def _leading_signed(a: int, n: int) -> int:
    value = signed(a, n)
    return _leading((value if value >= 0 else ~value), n)


def _reverse(a: int, n: int) -> int:
    return int(f"{a:0{n}b}"[::-1], 2)


# name without width -> (function of a and the width, sets SCC)
_ONE = {
    "s_mov": (lambda a, n: a, False),
    "s_not": (lambda a, n: ~a, True),
    "s_brev": (_reverse, False),
    "s_bcnt0_i32": (lambda a, n: n - bin(a).count("1"), True),
    "s_bcnt1_i32": (lambda a, n: bin(a).count("1"), True),
    "s_ff0_i32": (lambda a, n: _find(~a & (1 << n) - 1, n), False),
    "s_ff1_i32": (_find, False),
    "s_flbit_i32": (_leading, False),
}
_ONE_32 = {
    "s_sext_i32_i8": lambda a: signed(a, 8),
    "s_sext_i32_i16": lambda a: signed(a, 16),
    "s_flbit_i32": lambda a: _leading_signed(a, 32),
}
_COMPARE = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


def sop2(ins: Instruction):
    name, wide = ins.name, _width(ins.name)
    write = scalar_writer(ins, ins.sdst, wide or name == "s_bfm_b64")
    if name in _TWO:
        is_signed, compute = _TWO[name]
        a, b = (scalar(ins, code, False, is_signed) for code in (ins.ssrc0, ins.ssrc1))

        def two(w):
            value, scc = compute(a(w), b(w))
            write(w, value)
            if scc is not None:
                w.scc = scc

        return two
    if name in ("s_addc_u32", "s_subb_u32"):
        a, b = scalar(ins, ins.ssrc0), scalar(ins, ins.ssrc1)

        def with_carry(w):
            x, y = a(w), b(w)
            total = x + y + w.scc if name == "s_addc_u32" else x - y - w.scc
            write(w, total)
            w.scc = int(not 0 <= total <= MASK32)

        return with_carry
    if name.startswith("s_cselect"):
        a, b = scalar(ins, ins.ssrc0, wide), scalar(ins, ins.ssrc1, wide)
        return lambda w: write(w, a(w) if w.scc else b(w))
    logic = _LOGIC.get(name[2:-4]) if name.endswith(("_b32", "_b64")) else None
    shift = _SHIFT.get(name[:-2])
    compute = logic or shift
    if compute is None:
        raise ins.unknown()
    bits = 64 if wide else 32
    limit = (1 << bits) - 1
    a, b = scalar(ins, ins.ssrc0, wide), scalar(ins, ins.ssrc1, wide and shift is None)

    def with_scc(w):
        value = compute(a(w), b(w), bits) & limit
        write(w, value)
        w.scc = int(value != 0)

    return with_scc


_SAVEEXEC = {
    "and": lambda s, e: s & e,
    "or": lambda s, e: s | e,
    "xor": lambda s, e: s ^ e,
    "andn2": lambda s, e: s & ~e,
    "orn2": lambda s, e: s | ~e,
    "andn1": lambda s, e: ~s & e,
    "orn1": lambda s, e: ~s | e,
    "nand": lambda s, e: ~(s & e),
    "nor": lambda s, e: ~(s | e),
    "xnor": lambda s, e: ~(s ^ e),
}


def sop1(ins: Instruction):
    name = ins.name
    if name.endswith(("_saveexec_b64", "_wrexec_b64")):
        operation, action = name[2:].split("_")[:2]
        compute = _SAVEEXEC[operation]
        source, write = scalar(ins, ins.ssrc0, True), scalar_writer(ins, ins.sdst, True)

        def saveexec(w):
            old, s = w.exec, source(w)
            value = compute(s, old) & MASK64
            write(w, old if action == "saveexec" else value)
            w.set_exec(value)
            w.scc = int(value != 0)

        return saveexec
    if name == "s_getpc_b64":
        write, after = scalar_writer(ins, ins.sdst, True), ins.address + ins.size
        return lambda w: write(w, after)
    if name in ("s_setpc_b64", "s_swappc_b64"):
        target, start, after = scalar(ins, ins.ssrc0, True), ins.program_start, ins.address + ins.size
        save = scalar_writer(ins, ins.sdst, True) if name == "s_swappc_b64" else None

        def jump(w):
            to = target(w)
            if save:
                save(w, after)
            w.pc = (to - start) // 4

        return jump
    if name == "s_abs_i32":
        source, write = scalar(ins, ins.ssrc0, False, True), scalar_writer(ins, ins.sdst)

        def absolute(w):
            value = abs(source(w))
            write(w, value)
            w.scc = int(value != 0)

        return absolute
    if name.startswith("s_cmov"):
        wide = _width(name)
        source, write = scalar(ins, ins.ssrc0, wide), scalar_writer(ins, ins.sdst, wide)

        def conditional(w):
            if w.scc:
                write(w, source(w))

        return conditional
    if name.startswith("s_bitset"):
        wide = _width(name)
        source, write = scalar(ins, ins.ssrc0), scalar_writer(ins, ins.sdst, wide)
        old, bits, value = scalar(ins, ins.sdst, wide), 64 if wide else 32, int(name[8])
        if value:
            return lambda w: write(w, old(w) | 1 << (source(w) & bits - 1))
        return lambda w: write(w, old(w) & ~(1 << (source(w) & bits - 1)))
    if name in _ONE_32:
        compute32, source, write = _ONE_32[name], scalar(ins, ins.ssrc0), scalar_writer(ins, ins.sdst)
        return lambda w: write(w, compute32(source(w)))
    if name[:-4] in _ONE:
        compute, sets_scc = _ONE[name[:-4]]
        wide = _width(name)
        bits, limit = (64, MASK64) if wide else (32, MASK32)
        source, write = scalar(ins, ins.ssrc0, wide), scalar_writer(ins, ins.sdst, wide and "_i32" not in name)

        def one(w):
            value = compute(source(w), bits) & limit
            write(w, value)
            if sets_scc:
                w.scc = int(value != 0)

        return one
    raise ins.unknown()


def sopc(ins: Instruction):
    name = ins.name
    if name == "s_set_gpr_idx_on":
        source, operands = scalar(ins, ins.ssrc0), ins.ssrc1 & 15

        def index_on(w):
            w.s[M0] = w.s[M0] & ~0xF0FF | source(w) & 0xFF | operands << 12
            w.gpr_index = (w.s[M0] & 0xFF, operands)

        return index_on
    if name.startswith("s_bitcmp"):
        wide = _width(name)
        a, b = scalar(ins, ins.ssrc0, wide), scalar(ins, ins.ssrc1)
        bits, wanted = 64 if wide else 32, int(name[8])

        def bit(w):
            w.scc = int(a(w) >> (b(w) & bits - 1) & 1 == wanted)

        return bit
    _, _, operation, kind = name.split("_")
    wide, is_signed, compute = kind == "u64", kind == "i32", _COMPARE[operation]
    a, b = (scalar(ins, code, wide, is_signed) for code in (ins.ssrc0, ins.ssrc1))

    def compare(w):
        w.scc = int(compute(a(w), b(w)))

    return compare


HW_REG_MODE, HW_REG_XCC_ID = 1, 20
XCDS = 8


def sopk(ins: Instruction):
    name, immediate = ins.name, ins.simm16
    if name.startswith("s_cmpk"):
        _, _, operation, kind = name.split("_")
        compute, is_signed = _COMPARE[operation], kind == "i32"
        source, value = scalar(ins, ins.sdst, False, is_signed), signed(immediate, 16) if is_signed else immediate

        def compare(w):
            w.scc = int(compute(source(w), value))

        return compare
    if name in ("s_setreg_b32", "s_setreg_imm32_b32", "s_getreg_b32"):
        return _hardware_register(ins)
    value, write = signed(immediate, 16), scalar_writer(ins, ins.sdst)
    if name == "s_movk_i32":
        return lambda w: write(w, value)
    if name == "s_cmovk_i32":
        return lambda w: write(w, value) if w.scc else None
    source = scalar(ins, ins.sdst, False, True)
    if name == "s_mulk_i32":
        return lambda w: write(w, source(w) * value)
    if name == "s_addk_i32":

        def add(w):
            total, w.scc = _overflow(source(w) + value)
            write(w, total)

        return add
    raise ins.unknown()


def _hardware_register(ins: Instruction):
    register, offset, width = ins.simm16 & 63, ins.simm16 >> 6 & 31, (ins.simm16 >> 11) + 1
    field = (1 << width) - 1
    if ins.name == "s_getreg_b32":
        write = scalar_writer(ins, ins.sdst)
        if register == HW_REG_XCC_ID:
            # Work-groups are dealt to the XCDs in turn.
            return lambda w: write(w, w.group.number % XCDS >> offset & field)
        if register == HW_REG_MODE:
            return lambda w: write(w, w.mode >> offset & field)
        raise ins.unknown(f"reads hardware register {register}, which is not modelled")
    if register != HW_REG_MODE:
        raise ins.unknown(f"writes hardware register {register}, which is not modelled")
    source = scalar(ins, LITERAL if ins.name == "s_setreg_imm32_b32" else ins.sdst)

    def set_mode(w):
        w.mode = w.mode & ~(field << offset) | (source(w) & field) << offset

    return set_mode


_TAKEN = {
    "s_branch": lambda w: True,
    "s_cbranch_scc0": lambda w: not w.scc,
    "s_cbranch_scc1": lambda w: w.scc,
    "s_cbranch_vccz": lambda w: not (w.s[VCC] or w.s[VCC + 1]),
    "s_cbranch_vccnz": lambda w: w.s[VCC] or w.s[VCC + 1],
    "s_cbranch_execz": lambda w: not w.exec,
    "s_cbranch_execnz": lambda w: w.exec,
}
_NO_EFFECT = ("s_nop", "s_sleep", "s_setprio", "s_icache_inv", "s_wakeup", "s_sethalt", "s_sendmsg")


def wait_counts(immediate: int) -> tuple[int, int]:
    """(vmcnt, lgkmcnt) of an s_waitcnt; the counters' maxima mean no wait."""
    return immediate & 15 | immediate >> 10 & 48, immediate >> 8 & 15


def sopp(ins: Instruction):
    name = ins.name
    if name in _TAKEN:
        taken = _TAKEN[name]
        target = (ins.address - ins.program_start) // 4 + 1 + signed(ins.simm16, 16)

        def branch(w):
            if taken(w):
                w.pc = target

        return branch
    if name == "s_waitcnt":
        vm, lgkm = wait_counts(ins.simm16)
        return lambda w: w.wait(vm, lgkm)
    if name == "s_barrier":

        def barrier(w):
            w.at_barrier = w.stopped = True

        return barrier
    if name == "s_endpgm":

        def end(w):
            w.wait(0, 0)
            w.done = w.stopped = True

        return end
    if name == "s_set_gpr_idx_off":

        def index_off(w):
            w.gpr_index = None

        return index_off
    if name in _NO_EFFECT:
        return lambda w: None
    raise ins.unknown()


ENCODINGS = {"SOP1": sop1, "SOP2": sop2, "SOPC": sopc, "SOPK": sopk, "SOPP": sopp}
