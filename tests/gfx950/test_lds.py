"""LDS instructions against a plain byte array."""

import numpy as np
import pytest

from .snippet import execute
from .state import OutOfBounds, Uninitialised

CONTENT = np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)
LANES = np.arange(64, dtype=np.uint32)
DWORDS = np.random.default_rng(1).integers(0, 1 << 32, (4, 64)).astype(np.uint32)


def expected_rows(offsets, width):
    """uint32 [rows, 64] of `width` bytes at each lane's offset."""
    raw = np.stack([CONTENT[o : o + width] for o in offsets])
    return np.ascontiguousarray(raw).view(np.uint32).T


@pytest.mark.parametrize("bits", [32, 64, 96, 128])
@pytest.mark.parametrize("base", [0, 1, 2, 6])
def test_reads(bits, base):
    address = LANES[::-1] * np.uint32(bits // 8) + np.uint32(base)
    last = bits // 32 - 1
    target = f"v[4:{4 + last}]" if last else "v4"
    wave = execute(f"ds_read_b{bits} {target}, v0 offset:16", v={0: address}, lds=CONTENT).wave
    np.testing.assert_array_equal(wave.v[4 : 5 + last], expected_rows(address.astype(int) + 16, bits // 8))


def test_narrow_reads():
    old = np.uint32(0xAAAA5555)
    code = """ds_read_u8 v1, v0 offset:3
              ds_read_i8 v2, v0 offset:3
              ds_read_u16 v3, v0 offset:3
              ds_read_i16 v4, v0 offset:3
              ds_read_u16_d16 v5, v0 offset:3
              ds_read_u16_d16_hi v6, v0 offset:3
              ds_read_i8_d16_hi v7, v0 offset:3
              ds_read_u8_d16 v8, v0 offset:3
              ds_read_u8_d16_hi v9, v0 offset:3
              ds_read_i8_d16 v10, v0 offset:3"""
    wave = execute(code, v={0: LANES * 5} | {row: old for row in range(5, 11)}, lds=CONTENT).wave
    for lane in range(64):
        byte = CONTENT[5 * lane + 3]
        number = int(byte)
        word = number | int(CONTENT[5 * lane + 4]) << 8
        assert wave.u[1][lane] == byte and wave.i[2][lane] == byte.view(np.int8)
        assert wave.u[3][lane] == word and wave.i[4][lane] == np.uint16(word).view(np.int16)
        assert wave.u[5][lane] == 0xAAAA0000 | word and wave.u[6][lane] == 0x5555 | word << 16
        assert wave.u[7][lane] == 0x5555 | (int(byte.view(np.int8)) & 0xFFFF) << 16
        assert wave.u[8][lane] == 0xAAAA0000 | number and wave.u[9][lane] == 0x5555 | number << 16
        assert wave.u[10][lane] == 0xAAAA0000 | int(byte.view(np.int8)) & 0xFFFF


def test_two_address_reads_and_writes():
    code = """ds_write2_b32 v0, v4, v5 offset0:1 offset1:64
              ds_write2st64_b64 v0, v[4:5], v[6:7] offset0:2 offset1:3
              s_waitcnt lgkmcnt(0)
              ds_read2_b32 v[8:9], v0 offset0:64 offset1:1
              ds_read2st64_b64 v[10:13], v0 offset0:3 offset1:2
              ds_read2_b64 v[14:17], v0 offset0:128 offset1:192"""
    wave = execute(code, v={0: LANES * 8, **{4 + n: DWORDS[n] for n in range(4)}}, lds=CONTENT).wave
    np.testing.assert_array_equal(wave.v[8:10], DWORDS[[1, 0]])
    np.testing.assert_array_equal(wave.v[10:14], DWORDS[[2, 3, 0, 1]])
    np.testing.assert_array_equal(wave.v[14:18], DWORDS[[0, 1, 2, 3]])


@pytest.mark.parametrize("bits", [8, 16, 32, 64, 96, 128])
def test_writes_of_active_lanes(bits):
    size, count = bits // 8, max(bits // 32, 1)
    source = f"v[4:{3 + count}]" if count > 1 else "v4"
    active = 0xFFFFFFFF00000005
    code = f"ds_write_b{bits} v0, {source} offset:3"
    v = {0: LANES * 16, **{4 + n: DWORDS[n] for n in range(count)}}
    outcome = execute(code, v=v, lds=CONTENT, exec_mask=active)
    expected = CONTENT.copy()
    for lane in range(64):
        if active >> lane & 1:
            raw = b"".join(int(DWORDS[n][lane]).to_bytes(4, "little") for n in range(count))[:size]
            expected[16 * lane + 3 : 16 * lane + 3 + size] = np.frombuffer(raw, np.uint8)
    np.testing.assert_array_equal(outcome.wave.lds.bytes, expected)


def test_high_half_writes_and_other_pairs():
    code = """ds_write_b8_d16_hi v0, v4
              ds_write_b16_d16_hi v0, v4 offset:2
              ds_write2_b64 v0, v[4:5], v[6:7] offset0:128 offset1:192
              ds_write2st64_b32 v0, v4, v5 offset0:12 offset1:14
              ds_read2st64_b32 v[8:9], v0 offset0:14 offset1:12"""
    wave = execute(code, v={0: LANES * 8, **{4 + n: DWORDS[n] for n in range(4)}}, lds=CONTENT).wave
    words = wave.lds.dwords
    np.testing.assert_array_equal(wave.lds.bytes[:512:8], DWORDS[0] >> 16 & 255)
    np.testing.assert_array_equal(words[:128:2] >> 16, DWORDS[0] >> 16)
    np.testing.assert_array_equal(words[256:384].reshape(64, 2).T, DWORDS[:2])
    np.testing.assert_array_equal(words[384:512].reshape(64, 2).T, DWORDS[2:4])
    np.testing.assert_array_equal(words[768:896:2], DWORDS[0])
    np.testing.assert_array_equal(words[896:1024:2], DWORDS[1])
    np.testing.assert_array_equal(wave.v[8:10], DWORDS[[1, 0]])


def test_accumulator_registers_as_data():
    code = "ds_write_b32 v0, a1\ns_waitcnt lgkmcnt(0)\nds_read_b32 a2, v0"
    wave = execute(code, v={0: LANES * 4, 257: DWORDS[0]}).wave
    np.testing.assert_array_equal(wave.u[258], DWORDS[0])


def test_transposing_read_of_bytes():
    """16 lanes read an 8 x 16 byte matrix by rows, 8 bytes each; lane i receives column i."""
    matrices = CONTENT[:512].reshape(4, 8, 16)
    wave = execute("ds_read_b64_tr_b8 v[2:3], v0", v={0: LANES * 8}, lds=CONTENT).wave
    got = np.ascontiguousarray(wave.v[2:4].T).view(np.uint8).reshape(4, 16, 8)
    np.testing.assert_array_equal(got, matrices.transpose(0, 2, 1))


def test_transposing_read_of_halves():
    """16 lanes read a 4 x 16 matrix of 16-bit elements by rows, 4 elements each; lane i receives column i."""
    matrices = CONTENT[:512].view(np.uint16).reshape(4, 4, 16)
    wave = execute("ds_read_b64_tr_b16 v[2:3], v0", v={0: LANES * 8}, lds=CONTENT).wave
    got = np.ascontiguousarray(wave.v[2:4].T).view(np.uint16).reshape(4, 16, 4)
    np.testing.assert_array_equal(got, matrices.transpose(0, 2, 1))


def test_lane_permutes():
    picks = np.random.default_rng(2).permutation(64).astype(np.uint32)
    code = """ds_bpermute_b32 v2, v0, v1
              ds_permute_b32 v3, v0, v1
              ds_swizzle_b32 v4, v1 offset:swizzle(QUAD_PERM,2,3,0,1)
              ds_swizzle_b32 v5, v1 offset:swizzle(SWAP,8)
              ds_swizzle_b32 v6, v1 offset:swizzle(BROADCAST,8,5)"""
    wave = execute(code, v={0: picks * 4, 1: DWORDS[0]}).wave
    np.testing.assert_array_equal(wave.u[2], DWORDS[0][picks])
    np.testing.assert_array_equal(wave.u[3][picks], DWORDS[0])
    np.testing.assert_array_equal(wave.u[4], DWORDS[0][LANES ^ 2])
    np.testing.assert_array_equal(wave.u[5], DWORDS[0][LANES ^ 8])
    np.testing.assert_array_equal(wave.u[6], DWORDS[0][LANES // 8 * 8 + 5])


def test_atomics_take_turns():
    code = """ds_add_rtn_u32 v2, v0, v1
              ds_max_i32 v0, v3 offset:4
              ds_add_f32 v0, v4 offset:8"""
    lds = np.zeros(16, np.uint32)
    lds[1] = 0xFFFFFFF0
    v = {0: np.uint32(0), 1: LANES + 1, 3: LANES.view(np.int32) - 20, 4: np.float32(0.5)}
    wave = execute(code, v=v, lds=lds).wave
    assert wave.u[2].tolist() == [lane * (lane + 1) // 2 for lane in range(64)]
    assert wave.lds.dwords[:2].tolist() == [64 * 65 // 2, 43] and wave.lds.dwords[2:3].view(np.float32)[0] == 32


ATOMICS = {
    "add_u32": lambda old, x: old + x,
    "sub_u32": lambda old, x: old - x,
    "min_u32": min,
    "max_u32": max,
    "min_i32": lambda old, x: min(old, x, key=signed),
    "max_i32": lambda old, x: max(old, x, key=signed),
    "and_b32": lambda old, x: old & x,
    "or_b32": lambda old, x: old | x,
    "xor_b32": lambda old, x: old ^ x,
}


def signed(x):
    return x - (1 << 32) if x >> 31 else x


@pytest.mark.parametrize("name", ATOMICS)
def test_atomics(name):
    operation, kind = name.split("_")
    code = f"ds_{operation}_rtn_{kind} v2, v0, v1\nds_{operation}_{kind} v0, v1 offset:16"
    model, returned = [7, 0xFFFFFFF0, 100, 0x80000000], []
    wave = execute(code, v={0: LANES % 4 * 4, 1: DWORDS[0]}, lds=np.array(model * 2, np.uint32)).wave
    for lane in range(64):
        returned.append(model[lane % 4])
        model[lane % 4] = ATOMICS[name](model[lane % 4], int(DWORDS[0][lane])) & 0xFFFFFFFF
    assert wave.u[2].tolist() == returned and wave.lds.dwords[:8].tolist() == model * 2


def test_float_atomics_and_exchange():
    code = """ds_max_rtn_f32 v2, v0, v1
              ds_min_f32 v0, v1 offset:4
              ds_min_rtn_f32 v5, v0, v1 offset:4
              ds_max_f32 v0, v1 offset:12
              ds_wrxchg_rtn_b32 v3, v0, v1 offset:8
              ds_add_rtn_f32 v4, v0, v1 offset:8"""
    x = np.random.default_rng(4).standard_normal(64).astype(np.float32)
    wave = execute(code, v={0: np.uint32(0), 1: x}, lds=np.zeros(4, np.float32)).wave
    np.testing.assert_array_equal(wave.f[2], np.maximum.accumulate(np.concatenate([[0], x]))[:-1])
    cells = wave.lds.dwords.view(np.float32)
    assert cells[0] == cells[3] == x.max() and cells[1] == x.min() and (wave.f[5] == x.min()).all()
    np.testing.assert_array_equal(wave.f[3], np.concatenate([[0], x[:-1]]))
    assert wave.f[4][0] == x[-1] and wave.f[4][1] == x[-1] + x[0]


def test_unwritten_bytes_are_reported():
    code = "ds_write_b32 v0, v0\nds_read_b64 v[2:3], v0"
    outcome = execute(code, v={0: LANES * 4}, lds_bytes=260)
    assert [f.kind for f in outcome.run.findings] == ["uninitialised LDS"]
    assert "byte 252" in outcome.run.findings[0].detail
    assert outcome.wave.u[3][63] == 0xFFFFFFFF
    with pytest.raises(Uninitialised, match="LDS: 8 bytes at byte 252"):
        execute(code, v={0: LANES * 4}, lds_bytes=260, uninitialised="raise")


def test_bounds():
    with pytest.raises(
        OutOfBounds, match=r"16-byte access at byte 1024 of LDS \(1024 bytes\), 1 lanes outside.*ds_read_b128"
    ):
        execute("ds_read_b128 v[4:7], v0 offset:16", v={0: LANES * 16}, lds_bytes=1024)
    with pytest.raises(OutOfBounds, match="LDS"):
        execute("ds_write_b8 v0, v0", v={0: np.uint32(0xFFFFFFF0)}, lds_bytes=1024)


def test_barrier_orders_waves():
    """Each wave takes a ticket, works for as long as the ticket says, writes its word and reads all four."""
    code = """v_mov_b32 v1, 0
              v_mov_b32 v2, 1
              ds_add_rtn_u32 v3, v1, v2 offset:16
              s_waitcnt lgkmcnt(0)
              v_readfirstlane_b32 s2, v3
              v_lshlrev_b32 v4, 2, v3
              s_mul_i32 s3, s2, 50
              work:
              s_sub_u32 s3, s3, 1
              s_cmp_gt_i32 s3, 0
              s_cbranch_scc1 work
              ds_write_b32 v4, v3
              s_waitcnt lgkmcnt(0)
              s_barrier
              ds_read_b128 v[8:11], v1"""
    for quantum in (1, 4, 1000):
        outcome = execute(code, lds=np.zeros(5, np.uint32), exec_mask=1, num_warps=4, quantum=quantum)
        for wave in outcome.waves:
            assert wave.v[8:12, 0].tolist() == [0, 1, 2, 3]
        assert outcome.run.executed["s_barrier"] == 4
