"""Scalar instructions against Python integers."""

import numpy as np
import pytest

from .snippet import execute
from .state import UnknownInstruction

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EDGES = [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678, 0xFFFF8000, 0x00FF00FF]


def s32(x):
    return x - (1 << 32) if x & 0x80000000 else x


def overflows(x):
    return int(x != s32(x & M32))


# name -> (a, b) -> (result, SCC or None when it is left alone)
BINARY = {
    "s_add_u32": lambda a, b: (a + b & M32, int(a + b > M32)),
    "s_sub_u32": lambda a, b: (a - b & M32, int(b > a)),
    "s_add_i32": lambda a, b: (a + b & M32, overflows(s32(a) + s32(b))),
    "s_sub_i32": lambda a, b: (a - b & M32, overflows(s32(a) - s32(b))),
    "s_mul_i32": lambda a, b: (a * b & M32, None),
    "s_mul_hi_u32": lambda a, b: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b: (s32(a) * s32(b) >> 32 & M32, None),
    "s_min_u32": lambda a, b: (min(a, b), int(a < b)),
    "s_max_u32": lambda a, b: (max(a, b), int(a > b)),
    "s_min_i32": lambda a, b: (min(s32(a), s32(b)) & M32, int(s32(a) < s32(b))),
    "s_max_i32": lambda a, b: (max(s32(a), s32(b)) & M32, int(s32(a) > s32(b))),
    "s_and_b32": lambda a, b: (a & b, int(a & b != 0)),
    "s_or_b32": lambda a, b: (a | b, int(a | b != 0)),
    "s_xor_b32": lambda a, b: (a ^ b, int(a ^ b != 0)),
    "s_andn2_b32": lambda a, b: (a & ~b & M32, int(a & ~b & M32 != 0)),
    "s_orn2_b32": lambda a, b: ((a | ~b) & M32, int((a | ~b) & M32 != 0)),
    "s_nand_b32": lambda a, b: (~(a & b) & M32, int(~(a & b) & M32 != 0)),
    "s_xnor_b32": lambda a, b: (~(a ^ b) & M32, int(~(a ^ b) & M32 != 0)),
    "s_lshl_b32": lambda a, b: (a << b % 32 & M32, int(a << b % 32 & M32 != 0)),
    "s_lshr_b32": lambda a, b: (a >> b % 32, int(a >> b % 32 != 0)),
    "s_ashr_i32": lambda a, b: (s32(a) >> b % 32 & M32, int(s32(a) >> b % 32 != 0)),
    "s_lshl2_add_u32": lambda a, b: ((a << 2) + b & M32, int((a << 2) + b > M32)),
    "s_pack_ll_b32_b16": lambda a, b: (a & 0xFFFF | (b & 0xFFFF) << 16, None),
    "s_pack_lh_b32_b16": lambda a, b: (a & 0xFFFF | b & 0xFFFF0000, None),
    "s_bfm_b32": lambda a, b: ((1 << a % 32) - 1 << b % 32 & M32, None),
    "s_pack_hh_b32_b16": lambda a, b: (a >> 16 | b & 0xFFFF0000, None),
    "s_nor_b32": lambda a, b: (~(a | b) & M32, int(~(a | b) & M32 != 0)),
    "s_absdiff_i32": lambda a, b: (abs(s32(a) - s32(b)) & M32, int(a != b)),
    "s_lshl1_add_u32": lambda a, b: ((a << 1) + b & M32, int((a << 1) + b > M32)),
    "s_lshl4_add_u32": lambda a, b: ((a << 4) + b & M32, int((a << 4) + b > M32)),
    "s_bfe_u32": lambda a, b: ((f := a >> (b & 31) & (1 << (b >> 16 & 127)) - 1), int(f != 0)),
}


@pytest.mark.parametrize("name", BINARY)
def test_binary(name):
    for a in EDGES:
        for b in EDGES:
            # s7 receives SCC: 1 or 0; before, SCC is 1 because 0 == 0.
            code = f"s_cmp_eq_u32 0, 0\n{name} s4, s2, s3\ns_cselect_b32 s7, 1, 0"
            s = execute(code, s={2: a, 3: b}).wave.s
            result, scc = BINARY[name](a, b)
            assert s[4] == result, f"{name}({a:#x}, {b:#x})"
            assert s[7] == (1 if scc is None else scc), f"SCC of {name}({a:#x}, {b:#x})"


def test_signed_field_extract():
    assert execute("s_bfe_i32 s4, s2, 0x40004", s={2: 0xF0}).wave.s[4] == M32
    assert execute("s_bfe_i32 s4, s2, 0x40004", s={2: 0x70}).wave.s[4] == 7


@pytest.mark.parametrize(
    "name, expected",
    [
        ("s_not_b32", lambda a: ~a & M32),
        ("s_brev_b32", lambda a: int(f"{a:032b}"[::-1], 2)),
        ("s_bcnt0_i32_b32", lambda a: 32 - bin(a).count("1")),
        ("s_ff0_i32_b32", lambda a: next((i for i in range(32) if not a >> i & 1), M32)),
        ("s_flbit_i32", lambda a: next((i for i in range(32) if (a << i ^ a) & 0x80000000), M32)),
        ("s_bcnt1_i32_b32", lambda a: bin(a).count("1")),
        ("s_ff1_i32_b32", lambda a: next((i for i in range(32) if a >> i & 1), M32)),
        ("s_flbit_i32_b32", lambda a: next((i for i in range(32) if a << i & 0x80000000), M32)),
        ("s_sext_i32_i8", lambda a: (a & 0xFF) - (a & 0x80) * 2 & M32),
        ("s_sext_i32_i16", lambda a: (a & 0xFFFF) - (a & 0x8000) * 2 & M32),
        ("s_abs_i32", lambda a: abs(s32(a)) & M32),
    ],
)
def test_unary(name, expected):
    for a in EDGES:
        assert execute(f"{name} s4, s2", s={2: a}).wave.s[4] == expected(a), f"{name}({a:#x})"


def test_64_bit_pairs_and_carries():
    a, b = 0xFEDCBA9876543210, 0x0123456789ABCDF1
    s = execute(
        """s_add_u32 s8, s2, s4
           s_addc_u32 s9, s3, s5
           s_sub_u32 s10, s4, s2
           s_subb_u32 s11, s5, s3
           s_subb_u32 s20, 0, 0
           s_add_u32 s21, s2, s2
           s_addc_u32 s21, s3, s3
           s_addc_u32 s21, 0, 0
           s_lshl_b64 s[12:13], s[2:3], 36
           s_ashr_i64 s[14:15], s[2:3], 4
           s_andn2_b64 s[16:17], s[2:3], s[4:5]
           s_mov_b64 s[18:19], -3""",
        s={2: a & M32, 3: a >> 32, 4: b & M32, 5: b >> 32},
    ).wave.s
    assert s[8] | s[9] << 32 == (a + b) & M64
    assert s[10] | s[11] << 32 == (b - a) & M64
    assert s[20] == M32 and s[21] == 1  # the borrow of b - a and the carry of a + a
    assert s[12] | s[13] << 32 == a << 36 & M64
    assert s[14] | s[15] << 32 == (a - (1 << 64) >> 4) & M64
    assert s[16] | s[17] << 32 == a & ~b
    assert s[18] | s[19] << 32 == M64 - 2


@pytest.mark.parametrize("immediate", [0, 7, -5, 32767, -32768])
def test_immediates(immediate):
    code = f"s_movk_i32 s4, {immediate}\ns_mov_b32 s5, s2\ns_addk_i32 s5, {immediate}\ns_mov_b32 s6, s2\n"
    s = execute(code + f"s_mulk_i32 s6, {immediate}", s={2: 0x7FFFFFF0}).wave.s
    assert s[4] == immediate & M32
    assert s[5] == 0x7FFFFFF0 + immediate & M32
    assert s[6] == 0x7FFFFFF0 * immediate & M32


def test_saveexec_and_exec_halves():
    wave = execute("s_and_saveexec_b64 s[4:5], s[2:3]", s={2: 0xFF, 3: 0xF0}, exec_mask=0xFFFFFFFF0000000F).wave
    assert (wave.s[4], wave.s[5]) == (0xF, M32)
    assert wave.exec == 0xF00000000F and wave.scc == 1
    wave = execute("s_mov_b32 exec_lo, 5\ns_mov_b32 exec_hi, 0\nv_mov_b32 v1, 9", v={1: np.uint32(1)}).wave
    assert wave.u[1].tolist() == [9, 1, 9] + [1] * 61


def test_bits_and_conditional_moves():
    code = """s_bitset1_b32 s4, 37
              s_bitset0_b32 s5, 3
              s_bitcmp1_b32 s2, 1
              s_cselect_b32 s6, 1, 0
              s_cmov_b32 s7, 42
              s_bitcmp0_b32 s2, 1
              s_cselect_b32 s8, 1, 0
              s_cmov_b32 s9, 42
              s_cmovk_i32 s9, 43
              s_cmp_eq_u64 s[2:3], s[2:3]
              s_cselect_b64 s[10:11], s[2:3], 0
              s_cmovk_i32 s12, -2
              s_cmp_lg_u64 s[2:3], s[2:3]
              s_cselect_b32 s13, 1, 0"""
    s = execute(code, s={2: 2, 3: 9, 4: 0, 5: M32, 7: 0, 9: 1, 12: 0}).wave.s
    assert s[4:10] == [32, M32 - 8, 1, 42, 0, 1] and s[10:14] == [2, 9, M32 - 1, 0]


@pytest.mark.parametrize(
    "name, holds", [("eq", "=="), ("lg", "!="), ("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")]
)
def test_compares(name, holds):
    for a in EDGES:
        for b in (a, 5, 0x80000000):
            for kind, view in (("i32", s32), ("u32", int)):
                expected = int(eval(f"x {holds} y", {"x": view(a), "y": view(b)}))
                assert execute(f"s_cmp_{name}_{kind} s2, s3", s={2: a, 3: b}).wave.scc == expected
        signed = int(eval(f"x {holds} -7", {"x": s32(a)}))
        assert execute(f"s_cmpk_{name}_i32 s2, -7", s={2: a}).wave.scc == signed
        unsigned = int(eval(f"x {holds} 0xFFF9", {"x": a}))
        assert execute(f"s_cmpk_{name}_u32 s2, 0xfff9", s={2: a}).wave.scc == unsigned


def test_other_exec_updates_and_calls():
    wave = execute("s_or_saveexec_b64 s[4:5], s[2:3]", s={2: 6, 3: 0}, exec_mask=1).wave
    assert wave.exec == 7 and wave.pair(4) == 1
    wave = execute("s_andn2_wrexec_b64 s[4:5], s[2:3]", s={2: 6, 3: 0}, exec_mask=3).wave
    assert wave.exec == wave.pair(4) == 4
    code = """s_getpc_b64 s[4:5]
              s_add_u32 s4, s4, 16
              s_swappc_b64 s[6:7], s[4:5]
              s_mov_b32 s2, 1
              s_endpgm
              s_setpc_b64 s[6:7]"""
    s = execute(code, s={2: 0}).wave.s
    assert s[2] == 1 and s[6] == 12


def test_loop_and_branches():
    code = """s_mov_b32 s4, 0
              loop:
              s_add_u32 s4, s4, s2
              s_sub_u32 s2, s2, 1
              s_cmp_lg_u32 s2, 0
              s_cbranch_scc1 loop
              s_mov_b64 vcc, 0
              s_cbranch_vccnz end
              s_mov_b32 s5, 1
              end:"""
    s = execute(code, s={2: 100, 5: 0}).wave.s
    assert (s[4], s[5]) == (5050, 1)


def test_program_counter():
    code = """s_getpc_b64 s[4:5]
              s_add_u32 s4, s4, 12
              s_setpc_b64 s[4:5]
              s_mov_b32 s2, 1
              s_mov_b32 s3, 1"""
    s = execute(code, s={2: 0, 3: 0}).wave.s
    assert (s[2], s[3]) == (0, 1)


def test_mode_register_and_unmodelled_ones():
    s = execute("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), 5\ns_getreg_b32 s2, hwreg(HW_REG_MODE, 4, 2)").wave.s
    assert s[2] == 1
    with pytest.raises(UnknownInstruction, match="hardware register 4"):
        execute("s_getreg_b32 s2, hwreg(HW_REG_HW_ID)")
