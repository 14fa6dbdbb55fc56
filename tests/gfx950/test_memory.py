"""Global memory instructions: addressing, widths, ranges, direct-to-LDS loads, atomics and bounds."""

import numpy as np
import pytest

from .snippet import execute
from .state import Memory, OutOfBounds, UnknownInstruction

LANES = np.arange(64, dtype=np.uint32)
DWORDS = np.random.default_rng(1).integers(0, 1 << 32, (4, 64)).astype(np.uint32)
UNLIMITED = 0x7FFFFFFE


@pytest.fixture
def data():
    return np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)


def low(address):
    return address & 0xFFFFFFFF


def pointer(address, offsets=0):
    """Two VGPRs holding address + offsets."""
    total = np.uint64(address) + np.asarray(offsets).astype(np.uint64)
    return total.astype(np.uint32), (total >> np.uint64(32)).astype(np.uint32)


def resource(address, records=UNLIMITED, stride=0, first=4):
    """SGPRs of a buffer resource."""
    return {first: low(address), first + 1: address >> 32 | stride << 16, first + 2: records, first + 3: 0x27000}


def rows(data, offsets, width):
    return np.ascontiguousarray(np.stack([data[o : o + width] for o in offsets])).view(np.uint32).T


@pytest.mark.parametrize("family", ["global", "flat", "buffer"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_wide_loads_and_stores(data, family, count):
    memory, out = Memory(), np.zeros(2048, np.uint8)
    source, target = memory.add(data, "data", writable=False), memory.add(out, "out")
    offsets = LANES[::-1] * np.uint32(4 * count) + np.uint32(3)
    suffix, registers = ("" if count == 1 else f"x{count}"), "v4" if count == 1 else f"v[4:{3 + count}]"
    if family == "buffer":
        code = f"buffer_load_dword{suffix} {registers}, v0, s[4:7], s2 offen offset:24\n"
        code += f"s_waitcnt vmcnt(0)\nbuffer_store_dword{suffix} {registers}, v0, s[8:11], 0 offen offset:5"
        v, s = {0: offsets}, {2: 16, **resource(source), **resource(target, first=8)}
    else:
        code = f"{family}_load_dword{suffix} {registers}, v[0:1]" + (
            ", off offset:40" if family == "global" else " offset:40"
        )
        code += f"\ns_waitcnt vmcnt(0)\n{family}_store_dword{suffix} v[2:3], {registers}"
        code += ", off offset:5" if family == "global" else " offset:5"
        (a, b), (c, d) = pointer(source, offsets), pointer(target, offsets)
        v, s = {0: a, 1: b, 2: c, 3: d}, {}
    outcome = execute(code, v=v, s=s, memory=memory)
    expected = rows(data, offsets.astype(int) + 40, 4 * count)
    np.testing.assert_array_equal(outcome.wave.v[4 : 4 + count], expected)
    np.testing.assert_array_equal(rows(out, offsets.astype(int) + 5, 4 * count), expected)
    assert not outcome.run.findings


@pytest.mark.parametrize("family", ["global", "buffer"])
def test_narrow_loads_and_stores(data, family):
    memory, out, old = Memory(), np.zeros(512, np.uint8), np.uint32(0xAAAA5555)
    source, target = memory.add(data), memory.add(out)
    where = (
        (lambda n: f"v0, s[8:9] offset:{n}") if family == "global" else (lambda n: f"v0, s[4:7], 0 offen offset:{n}")
    )
    names = ["ubyte", "sbyte", "ushort", "sshort", "short_d16", "short_d16_hi", "ubyte_d16_hi", "sbyte_d16"]
    code = "\n".join(f"{family}_load_{name} v{2 + n}, {where(3)}" for n, name in enumerate(names))
    store = (
        (lambda v, n: f"v0, {v}, s[14:15] offset:{n}")
        if family == "global"
        else (lambda v, n: f"{v}, v0, s[16:19], 0 offen offset:{n}")
    )
    for name, offset in (("byte", 0), ("short_d16_hi", 2), ("byte_d16_hi", 1), ("short", 5)):
        code += f"\n{family}_store_{name} {store('v12', offset)}"
    s = {
        8: low(source),
        9: source >> 32,
        14: low(target),
        15: target >> 32,
        **resource(source),
        **resource(target, first=16),
    }
    v = {0: LANES * 8, 12: np.uint32(0x11223344)} | {row: old for row in range(2, 10)}
    if family == "buffer":
        s.update(resource(source))
    wave = execute(code, v=v, s=s, memory=memory).wave
    for lane in range(64):
        byte = data[8 * lane + 3]
        word = int(byte) | int(data[8 * lane + 4]) << 8
        signed = int(byte.view(np.int8)) & 0xFFFF
        expected = [
            int(byte),
            int(byte.view(np.int8)) & 0xFFFFFFFF,
            word,
            int(np.uint16(word).view(np.int16)) & 0xFFFFFFFF,
        ]
        expected += [0xAAAA0000 | word, word << 16 | 0x5555, int(byte) << 16 | 0x5555, 0xAAAA0000 | signed]
        assert [int(wave.u[2 + n][lane]) for n in range(8)] == expected
        assert out[8 * lane : 8 * lane + 8].tolist() == [0x44, 0x22, 0x22, 0x11, 0, 0x44, 0x33, 0]


def test_addressing_forms(data):
    memory = Memory()
    source = memory.add(data)
    code = """global_load_dword v2, v0, s[8:9] offset:-16
              global_load_dword v4, v[6:7], off offset:-4096
              buffer_load_dword v5, off, s[4:7], s2 offset:8"""
    high = pointer(source, 4096 + 64)
    s = {2: 32, 8: low(source), 9: source >> 32, **resource(source)}
    wave = execute(code, v={0: LANES * 4 + 16, 6: high[0], 7: high[1]}, s=s, memory=memory).wave
    words = data.view(np.uint32)
    np.testing.assert_array_equal(wave.u[2], words[:64])
    assert (wave.u[4] == words[16]).all() and (wave.u[5] == words[10]).all()


def test_buffer_range_check(data):
    """Elements that do not lie in num_records whole read 0 and are not written; soffset counts."""
    memory, out = Memory(), np.full(256, 0xEE, np.uint8)
    source, target = memory.add(data), memory.add(out)
    code = """buffer_load_dwordx2 v[2:3], v0, s[4:7], s2 offen
              buffer_store_dword v1, v0, s[8:11], 0 offen"""
    offsets = LANES * 8
    offsets[5] = 0x80000000  # Triton's mask
    s = {2: 16, **resource(source, records=100), **resource(target, records=99, stride=4, first=8)}
    wave = execute(code, v={0: offsets, 1: LANES}, s=s, memory=memory).wave
    words = data.view(np.uint32)
    for lane in range(64):
        inside = lane != 5 and 8 * lane + 16 + 8 <= 100
        assert wave.u[2][lane] == (words[2 * lane + 4] if inside else 0)
        if lane < 32:
            stored = lane != 5 and 8 * lane + 4 <= 99
            assert out.view(np.uint32)[2 * lane] == (lane if stored else 0xEEEEEEEE)


def test_scalar_loads(data):
    memory = Memory()
    source = memory.add(data)
    code = """s_load_dword s16, s[2:3], 0x8
              s_load_dwordx2 s[18:19], s[2:3], s0
              s_load_dwordx8 s[24:31], s[2:3], -0x10
              s_buffer_load_dwordx4 s[20:23], s[4:7], 0x10"""
    s = {0: 36, 2: low(source + 64), 3: source >> 32, **resource(source, records=24)}
    wave = execute(code, s=s, memory=memory).wave
    words = data.view(np.uint32).tolist()
    assert wave.s[16] == words[18] and wave.s[18:20] == words[25:27] and wave.s[24:32] == words[12:20]
    assert wave.s[20:24] == [words[4], words[5], 0, 0]


@pytest.mark.parametrize("width", [1, 4])
def test_loads_to_lds(data, width):
    """Lane l's data lands at M0 + offset + l * width * 4; a lane out of range writes 0; an inactive one nothing."""
    memory = Memory()
    source = memory.add(data)
    suffix = "" if width == 1 else "x4"
    places = np.random.default_rng(3).permutation(64).astype(np.uint32) * np.uint32(4 * width)
    places[7] = 0x80000000
    active = ~(1 << 9) & (1 << 64) - 1
    code = f"s_mov_b32 m0, 0x400\nbuffer_load_dword{suffix} v0, s[4:7], 0 offen offset:32 lds"
    outcome = execute(code, v={0: places}, s=resource(source), memory=memory, exec_mask=active, lds_bytes=4096)
    got = outcome.wave.lds.bytes[0x400 + 32 :][: 256 * width].reshape(64, 4 * width)
    for lane in range(64):
        start = int(places[lane]) + 32
        expected = (
            np.zeros(4 * width)
            if lane == 7
            else np.full(4 * width, 0xFF)
            if lane == 9
            else data[start : start + 4 * width]
        )
        np.testing.assert_array_equal(got[lane], expected)
    assert outcome.wave.lds.written.bytes.sum() == 63 * 4 * width
    s = {8: low(source), 9: source >> 32, 124: 0x80}
    outcome = execute(
        f"global_load_lds_dword{suffix} v0, s[8:9] offset:16", v={0: LANES * (4 * width)}, s=s, memory=memory
    )
    np.testing.assert_array_equal(outcome.wave.lds.bytes[0x90:][: 256 * width], data[16 : 16 + 256 * width])


ATOMICS = {
    "add": lambda old, x: old + x,
    "sub": lambda old, x: old - x,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "umin": min,
    "umax": max,
    "swap": lambda old, x: x,
    "inc": lambda old, x: 0 if old >= x else old + 1,
    "dec": lambda old, x: x if old == 0 or old > x else old - 1,
}


@pytest.mark.parametrize("family", ["global", "buffer", "flat"])
@pytest.mark.parametrize("name", ATOMICS)
def test_atomics(family, name):
    memory, cells = Memory(), np.array([7, 0xFFFFFFF0, 100], np.uint32)
    address = memory.add(cells, "cells")
    offsets = LANES % 3 * 4
    if family == "buffer":
        where, v = "v2, v0, s[4:7], 0 offen", {0: offsets}
    else:
        where, v = (
            ("v2, v[0:1], v2" + (", off" if family == "global" else "")),
            dict(enumerate(pointer(address, offsets))),
        )
    v[2] = DWORDS[0] % np.uint32(300)
    wave = execute(f"{family}_atomic_{name} {where} sc0", v=v, s=resource(address), memory=memory).wave
    model, returned = [7, 0xFFFFFFF0, 100], []
    for lane in range(64):
        cell = lane % 3
        returned.append(model[cell])
        model[cell] = ATOMICS[name](model[cell], int(v[2][lane])) & 0xFFFFFFFF
    assert cells.tolist() == model and wave.u[2].tolist() == returned


def test_atomics_signed_float_wide_and_compare():
    memory, cells = Memory(), np.zeros(8, np.uint32)
    cells[0] = 5
    address = memory.add(cells)
    code = """global_atomic_smin v0, v1, s[8:9]
              global_atomic_add_f32 v0, v2, s[8:9] offset:4
              global_atomic_add_x2 v[4:5], v0, v[6:7], s[8:9] offset:8 sc0
              global_atomic_cmpswap v10, v0, v[8:9], s[8:9] offset:16 sc0"""
    v = {
        0: np.uint32(0),
        1: np.int32(-3),
        2: np.float32(0.25),
        6: np.uint32(0xFFFFFFFF),
        7: np.uint32(1),
        8: LANES + 1,
        9: LANES,
    }
    wave = execute(code, v=v, s={8: low(address), 9: address >> 32}, memory=memory).wave
    assert cells.view(np.int32)[0] == -3 and cells.view(np.float32)[1] == 16
    assert int(cells[2]) | int(cells[3]) << 32 == 64 * 0x1FFFFFFFF
    assert int(wave.u[4][1]) | int(wave.u[5][1]) << 32 == 0x1FFFFFFFF
    assert cells[4] == 64 and wave.u[10].tolist() == list(range(64))


def test_ticket_of_the_last_arrival():
    """The hand-over of a one-launch split reduction: release, returning atomic, acquire, in one wave each."""
    memory, counter = Memory(), np.zeros(1, np.uint32)
    address = memory.add(counter, "counter")
    code = """buffer_wbl2 sc1
              s_waitcnt vmcnt(0) lgkmcnt(0)
              v_mov_b32 v1, 1
              global_atomic_add v2, v0, v1, s[8:9] sc0 sc1
              s_waitcnt vmcnt(0)
              buffer_inv sc1"""
    v, s = {0: np.uint32(0)}, {8: low(address), 9: address >> 32}
    for late in (None, "late"):
        counter[0] = 0
        outcome = execute(code, v=v, s=s, memory=memory, num_warps=4, exec_mask=1, late_loads=late)
        assert sorted(int(wave.u[2][0]) for wave in outcome.waves) == [0, 1, 2, 3] and counter[0] == 4
        assert not outcome.run.findings


def test_bounds_name_the_buffer(data):
    memory = Memory()
    memory.add(np.zeros(8, np.uint8), "neighbour")
    address = memory.add(data, "kv")
    s = {8: low(address), 9: address >> 32}
    message = (
        r"16-byte access at byte 4092 of kv \(4096 bytes\), 1 lanes outside; in snippet.*wave 0.*global_load_dwordx4"
    )
    with pytest.raises(OutOfBounds, match=message):
        execute("global_load_dwordx4 v[4:7], v0, s[8:9]", v={0: LANES * 16 + 3084}, s=s, memory=memory)
    # The range of a buffer resource is no excuse: it may be wider than the buffer.
    with pytest.raises(OutOfBounds, match="byte 4096 of kv"):
        execute("buffer_load_dword v4, v0, s[4:7], 0 offen", v={0: np.uint32(4096)}, s=resource(address), memory=memory)
    with pytest.raises(OutOfBounds, match="is in no buffer"):
        execute("global_load_dword v4, v[0:1], off", v={0: np.uint32(64), 1: np.uint32(0)}, memory=memory)
    with pytest.raises(OutOfBounds, match="scalar load of 2 dwords at byte 4092 of kv"):
        execute("s_load_dwordx2 s[4:5], s[8:9], 0xffc", s=s, memory=memory)
    with pytest.raises(OutOfBounds, match="byte -16 of LDS"):
        execute("global_load_lds_dword v0, s[8:9] offset:-16", v={0: LANES * 4 + 16}, s=s | {124: 0}, memory=memory)
    # Inactive lanes access nothing.
    execute("global_load_dword v4, v0, s[8:9]", v={0: LANES * 4096}, s=s, memory=memory, exec_mask=1)


def test_read_only_buffers(data):
    memory = Memory()
    address = memory.add(data, "q", writable=False)
    with pytest.raises(OutOfBounds, match="write to read-only q"):
        execute(
            "global_store_dword v0, v0, s[8:9]", v={0: LANES * 4}, s={8: low(address), 9: address >> 32}, memory=memory
        )


def test_scratch_and_unknown_instructions_are_named():
    with pytest.raises(UnknownInstruction, match=r"scratch_load_dword.*at 0x0 uses scratch memory"):
        execute("scratch_load_dword v0, off, s0")
    with pytest.raises(UnknownInstruction, match=r"v_sin_f32.* at 0x4 is not modelled"):
        execute("s_nop 0\nv_sin_f32 v0, v0", v={0: np.float32(1)})
    with pytest.raises(UnknownInstruction, match=r"no CDNA instruction at 0x0: ffffffff"):
        execute(b"\xff" * 8)


def test_unwritten_registers_are_reported():
    outcome = execute("v_add_u32 v2, v0, v1\nv_mov_b32 v3, v2\ns_add_u32 s4, s5, 1", v={0: LANES})
    assert [(f.kind, f.address, f.detail.split(",")[0]) for f in outcome.run.findings] == [
        ("uninitialised register", 0, "reads v1"),
        ("uninitialised register", 8, "reads s5"),
    ]
