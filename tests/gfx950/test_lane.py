"""Lane moves (DPP, permlane, readlane) and SDWA, lane by lane."""

import numpy as np
import pytest

from .snippet import execute

IDS = np.arange(64, dtype=np.uint32) + 100
OLD = np.uint32(7)

# modifier -> source lane of lane l, or None when there is none
DPP = {
    "quad_perm:[3,0,2,1]": lambda n: n // 4 * 4 + (3, 0, 2, 1)[n % 4],
    "row_shl:3": lambda n: n + 3 if n % 16 + 3 < 16 else None,
    "row_shr:5": lambda n: n - 5 if n % 16 >= 5 else None,
    "row_ror:6": lambda n: n // 16 * 16 + (n - 6) % 16,
    "wave_shl:1": lambda n: n + 1 if n < 63 else None,
    "wave_rol:1": lambda n: (n + 1) % 64,
    "wave_shr:1": lambda n: n - 1 if n else None,
    "wave_ror:1": lambda n: (n - 1) % 64,
    "row_mirror": lambda n: n // 16 * 16 + 15 - n % 16,
    "row_half_mirror": lambda n: n // 8 * 8 + 7 - n % 8,
    "row_bcast:15": lambda n: n // 16 * 16 - 1 if n >= 16 else None,
    "row_bcast:31": lambda n: 31 if n >= 32 else None,
    "row_newbcast:9": lambda n: n // 16 * 16 + 9,
}


@pytest.mark.parametrize("modifier", DPP)
def test_dpp(modifier):
    source = DPP[modifier]
    for bound_ctrl in ("", " bound_ctrl:0"):
        text = f"v_mov_b32_dpp v1, v0 {modifier} row_mask:0xf bank_mask:0xf{bound_ctrl}"
        got = execute(text, v={0: IDS, 1: OLD}).wave.u[1].tolist()
        missing = 0 if bound_ctrl else int(OLD)
        assert got == [missing if source(n) is None else 100 + source(n) for n in range(64)]


def test_dpp_masks_and_inactive_sources():
    active = ~(1 << 5) & (1 << 64) - 1
    text = "v_mov_b32_dpp v1, v0 row_shr:1 row_mask:0x9 bank_mask:0x7"
    got = execute(text, v={0: IDS, 1: OLD}, exec_mask=active).wave.u[1].tolist()
    for n in range(64):
        written = n // 16 in (0, 3) and n % 16 // 4 != 3 and n % 16 > 0 and n not in (5, 6)
        assert got[n] == (99 + n if written else 7), n


def test_dpp_onto_its_own_source_and_in_arithmetic():
    got = execute("v_mov_b32_dpp v0, v0 quad_perm:[1,2,3,0] row_mask:0xf bank_mask:0xf", v={0: IDS}).wave.u[0].tolist()
    assert got == [100 + n // 4 * 4 + (n + 1) % 4 for n in range(64)]
    text = "v_add_u32_dpp v2, v0, v1 row_newbcast:2 row_mask:0xf bank_mask:0xf"
    got = execute(text, v={0: IDS, 1: IDS, 2: OLD}).wave.u[2].tolist()
    assert got == [100 + n // 16 * 16 + 2 + 100 + n for n in range(64)]


@pytest.mark.parametrize("block", [16, 32])
def test_permlane_swap(block):
    a, b = IDS, IDS + np.uint32(1000)
    wave = execute(f"v_permlane{block}_swap_b32 v0, v1", v={0: a, 1: b}).wave
    for n in range(64):
        odd = n // block % 2
        assert wave.u[0][n] == (b[n - block] if odd else a[n])
        assert wave.u[1][n] == (b[n] if odd else a[n + block])


def test_read_and_write_lanes():
    code = """v_readlane_b32 s4, v0, 17
              v_readlane_b32 s5, v0, s2
              v_writelane_b32 v1, s2, 9
              v_readfirstlane_b32 s6, v0"""
    wave = execute(code, v={0: IDS, 1: OLD}, s={2: 66}, exec_mask=0xFF00).wave
    assert (wave.s[4], wave.s[5], wave.s[6]) == (117, 102, 108)
    assert wave.u[1].tolist() == [66 if n == 9 else 7 for n in range(64)]
    assert execute("v_readfirstlane_b32 s6, v0", v={0: IDS}, exec_mask=0).wave.s[6] == 100


def test_sdwa_sources():
    a, b = np.uint32(0x81C2F3E4), np.uint32(0x11223344)
    code = """v_and_b32_sdwa v2, v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:DWORD
              v_add_u32_sdwa v3, v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:BYTE_0
              v_max_i32_sdwa v4, sext(v0), v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_0 src1_sel:BYTE_3
              v_lshlrev_b32_sdwa v5, v1, v0 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_3 src1_sel:BYTE_3
              v_add_f16_sdwa v6, v7, v7 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:WORD_0"""
    halves = np.array([1.5, 2.25], np.float16).view(np.uint32)[0]
    wave = execute(code, v={0: a, 1: b, 7: halves}).wave
    assert wave.u[2][0] == 0xC2 & 0x11223344
    assert wave.u[3][0] == 0x81C2 + 0x44
    assert wave.i[4][0] == 0x11
    assert wave.u[5][0] == 0x81 << 0x11
    assert wave.u[6].view(np.float16)[0] == 3.75


def test_sdwa_destinations():
    code = "\n".join(
        f"v_mov_b32_sdwa v{row}, v0 dst_sel:{select} dst_unused:{unused} src0_sel:DWORD"
        for row, (select, unused) in enumerate(
            [
                ("BYTE_1", "UNUSED_PAD"),
                ("BYTE_1", "UNUSED_PRESERVE"),
                ("WORD_1", "UNUSED_PRESERVE"),
                ("WORD_0", "UNUSED_SEXT"),
                ("BYTE_2", "UNUSED_SEXT"),
            ],
            start=1,
        )
    )
    old = np.uint32(0x11223344)
    wave = execute(code, v={0: np.uint32(0xA5B6C7D8), 1: old, 2: old, 3: old, 4: old, 5: old}).wave
    assert [hex(wave.u[row][0]) for row in range(1, 6)] == [
        "0xd800",
        "0x1122d844",
        "0xc7d83344",
        "0xffffc7d8",
        "0xffd80000",
    ]


def test_sdwa_compare():
    code = """v_cmp_eq_u32_sdwa s[4:5], v0, v1 src0_sel:BYTE_1 src1_sel:BYTE_0
              v_cmp_lt_u32_sdwa vcc, v0, v1 src0_sel:BYTE_0 src1_sel:DWORD"""
    wave = execute(code, v={0: IDS << np.uint32(8), 1: np.uint32(163)}).wave
    assert wave.pair(4) == 1 << 63 and wave.pair(106) == (1 << 64) - 1
