"""Vector ALU instructions against Python integers, fractions and numpy."""

from fractions import Fraction

import numpy as np
import pytest

from .snippet import execute

M32 = (1 << 32) - 1
RNG = np.random.default_rng(0)
EDGES = [0, 1, 31, 32, 0x7FFFFF, 0x800000, 0xFFFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFF00, 0x8000]
INTS = [np.concatenate([RNG.permutation(EDGES), RNG.integers(0, 1 << 32, 52)]).astype(np.uint32) for _ in range(3)]
SPECIAL = np.array(
    [
        0,
        -0.0,
        1,
        -1,
        np.inf,
        -np.inf,
        np.nan,
        2**-149,
        -(2**-130),
        2**-126,
        3.4028235e38,
        -3.4028235e38,
        0.5,
        448,
        1e-5,
        7,
    ],
    np.float32,
)


def floats(seed):
    rng = np.random.default_rng(seed)
    drawn = (rng.standard_normal(48) * 2.0 ** rng.integers(-20, 20, 48)).astype(np.float32)
    return np.concatenate([rng.permutation(SPECIAL), drawn])


def s32(x):
    return x - (1 << 32) if x & 0x80000000 else x


def s64(x):
    return x - (1 << 64) if x >> 63 else x


def s16(x):
    return (x & 0x7FFF) - (x & 0x8000)


def s24(x):
    x &= 0xFFFFFF
    return x - (1 << 24) if x & 0x800000 else x


def median(a, b, c):
    return sorted((a, b, c))[1]


INTEGER = {
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_hi_i32": lambda a, b: s32(a) * s32(b) >> 32,
    "v_mul_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_mul_i32_i24": lambda a, b: s24(a) * s24(b),
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32": lambda a, b: b << a % 32,
    "v_lshrrev_b32": lambda a, b: b >> a % 32,
    "v_ashrrev_i32": lambda a, b: s32(b) >> a % 32,
    "v_max_u32": max,
    "v_min_u32": min,
    "v_max_i32": lambda a, b: max(s32(a), s32(b)),
    "v_min_i32": lambda a, b: min(s32(a), s32(b)),
    "v_bfm_b32": lambda a, b: (1 << a % 32) - 1 << b % 32,
    "v_bcnt_u32_b32": lambda a, b: bin(a).count("1") + b,
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_lshl_add_u32": lambda a, b, c: (a << b % 32) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b & M32) << c % 32,
    "v_lshl_or_b32": lambda a, b, c: a << b % 32 | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_bfe_u32": lambda a, b, c: a >> b % 32 & (1 << c % 32) - 1,
    "v_bfe_i32": lambda a, b, c: bfe_i32(a, b % 32, c % 32),
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> c % 32,
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c % 4),
    "v_mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_mad_i32_i24": lambda a, b, c: s24(a) * s24(b) + s32(c),
    "v_max3_u32": max,
    "v_max3_i32": lambda a, b, c: max(s32(a), s32(b), s32(c)),
    "v_med3_i32": lambda a, b, c: median(s32(a), s32(b), s32(c)),
    "v_med3_u32": median,
    "v_not_b32": lambda a: ~a,
    "v_bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_ffbh_u32": lambda a: 32 - a.bit_length() if a else M32,
    "v_ffbl_b32": lambda a: (a & -a).bit_length() - 1 if a else M32,
    "v_max_u16": lambda a, b: max(a & 0xFFFF, b & 0xFFFF),
    "v_max3_u16": lambda a, b, c: max(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF),
    "v_add_u16": lambda a, b: a + b & 0xFFFF,
    "v_lshlrev_b16": lambda a, b: (b & 0xFFFF) << a % 16 & 0xFFFF,
    "v_lshrrev_b16": lambda a, b: (b & 0xFFFF) >> a % 16,
    "v_ashrrev_i16": lambda a, b: s16(b) >> a % 16 & 0xFFFF,
    "v_sub_u16": lambda a, b: a - b & 0xFFFF,
    "v_subrev_u16": lambda a, b: b - a & 0xFFFF,
    "v_mul_lo_u16": lambda a, b: a * b & 0xFFFF,
    "v_min_u16": lambda a, b: min(a & 0xFFFF, b & 0xFFFF),
    "v_max_i16": lambda a, b: max(s16(a), s16(b)) & 0xFFFF,
    "v_min_i16": lambda a, b: min(s16(a), s16(b)) & 0xFFFF,
    "v_max3_i16": lambda a, b, c: max(s16(a), s16(b), s16(c)) & 0xFFFF,
    "v_min3_i16": lambda a, b, c: min(s16(a), s16(b), s16(c)) & 0xFFFF,
    "v_min3_u16": lambda a, b, c: min(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF),
    "v_med3_u16": lambda a, b, c: median(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF),
    "v_med3_i16": lambda a, b, c: median(s16(a), s16(b), s16(c)) & 0xFFFF,
    "v_min3_u32": lambda a, b, c: min(a, b, c),
    "v_min3_i32": lambda a, b, c: min(s32(a), s32(b), s32(c)),
    "v_add_i32": lambda a, b: a + b,
    "v_sub_i32": lambda a, b: a - b,
    "v_mul_hi_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32,
    "v_mul_hi_i32_i24": lambda a, b: s24(a) * s24(b) >> 32,
}


def bfe_i32(a, offset, width):
    if not width:
        return 0
    bits = a >> offset & (1 << width) - 1
    # A field that reaches beyond bit 31 ends at the value's sign.
    top = min(offset + width, 32) - offset
    return bits - (bits >> top - 1 << top)


@pytest.mark.parametrize("name", INTEGER)
def test_integer(name):
    compute = INTEGER[name]
    count = compute.__code__.co_argcount if compute not in (max, min) else 3 if "3_" in name else 2
    registers = ", ".join(["v3", "v0", "v1", "v2"][: count + 1])
    wave = execute(f"{name} {registers}", v=dict(enumerate(INTS))).wave
    expected = [compute(*(int(x[lane]) for x in INTS[:count])) & M32 for lane in range(64)]
    assert wave.u[3].tolist() == expected


def round_to_f32(value: Fraction) -> np.float32:
    """Nearest float32, ties to even, by exact arithmetic."""
    if not value:
        return np.float32(0)
    magnitude, exponent = abs(value), -149
    while magnitude >= Fraction(2) ** (exponent + 24):
        exponent += 1
    result = round(magnitude / Fraction(2) ** exponent) * Fraction(2) ** exponent  # Python rounds half to even
    if result >= Fraction(2) ** 128:
        return np.float32(np.inf if value > 0 else -np.inf)
    return np.float32(float(result) * (1 if value > 0 else -1))


def test_fma_rounds_once():
    a, b, c = floats(1), floats(2), floats(3)
    # 97 * 172961 = 2**24 + 1: halfway between two float32, and c, too small for a double's sum, decides.
    a[0], b[0], c[0] = 97, 172961 * 2.0**-24, 2.0**-80
    a[2], b[2], c[2] = 97, 172961 * 2.0**-24, -(2.0**-80)
    a[1], b[1], c[1] = 2.0**-75, 2.0**-75, 2.0**-148  # a denormal result
    wave = execute("v_fma_f32 v3, v0, v1, v2\nv_mov_b32 v4, v2\nv_fmac_f32 v4, v0, v1", v={0: a, 1: b, 2: c}).wave
    for lane in range(64):
        x, y, z = a[lane], b[lane], c[lane]
        if np.isfinite([x, y, z]).all():
            exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
            assert wave.f[3][lane] == round_to_f32(exact), (x, y, z)
        else:
            with np.errstate(all="ignore"):
                np.testing.assert_equal(wave.f[3][lane], np.float32(np.float64(x) * y + z))
    np.testing.assert_array_equal(wave.u[4], wave.u[3])


@pytest.mark.parametrize(
    "name, operator", [("add", "__add__"), ("sub", "__sub__"), ("subrev", "__rsub__"), ("mul", "__mul__")]
)
def test_float_arithmetic(name, operator):
    a, b = floats(4), floats(5)
    wave = execute(f"v_{name}_f32 v3, v0, v1\nv_{name}_f32_e64 v4, -v0, |v1|", v={0: a, 1: b}).wave
    for row, x, y in ((3, a, b), (4, -a, np.abs(b))):
        for lane in range(64):
            if np.isfinite([x[lane], y[lane]]).all():
                exact = getattr(Fraction(float(x[lane])), operator)(Fraction(float(y[lane])))
                assert wave.f[row][lane] == round_to_f32(exact)
            else:
                with np.errstate(all="ignore"):
                    np.testing.assert_equal(wave.f[row][lane], getattr(x[lane], operator)(y[lane]))


def test_max_and_min_with_nan_and_zeros():
    values = np.array([np.nan, -0.0, 0.0, 1, -1, np.inf, -np.inf, 2**-149], np.float32)
    a, b = (x.reshape(-1) for x in np.meshgrid(values, values))
    wave = execute("v_max_f32 v2, v0, v1\nv_min_f32 v3, v0, v1", v={0: a, 1: b}).wave

    def key(x):
        return (x, not np.signbit(x))

    for lane in range(64):
        numbers = sorted((x for x in (a[lane], b[lane]) if not np.isnan(x)), key=key)
        for row, pick in ((2, -1), (3, 0)):
            expected = numbers[pick] if numbers else np.float32(np.nan)
            np.testing.assert_equal(wave.f[row][lane], expected)
            if expected == 0:
                assert np.signbit(wave.f[row][lane]) == np.signbit(expected)


def test_three_operand_extrema():
    a, b, c = (np.random.default_rng(n).standard_normal(64).astype(np.float32) for n in (6, 7, 8))
    a[0], b[1], c[2] = np.nan, np.nan, np.nan
    names = ("max3", "min3", "med3", "maximum3", "minimum3")
    code = "\n".join(f"v_{name}_f32 v{3 + n}, v0, v1, v2" for n, name in enumerate(names))
    wave = execute(code, v={0: a, 1: b, 2: c}).wave
    stack = np.stack([a, b, c])
    np.testing.assert_array_equal(wave.f[3], np.nanmax(stack, axis=0))
    np.testing.assert_array_equal(wave.f[4], np.nanmin(stack, axis=0))
    np.testing.assert_array_equal(wave.f[5][3:], np.median(stack, axis=0)[3:])
    np.testing.assert_array_equal(wave.f[5][:3], np.nanmin(stack, axis=0)[:3])
    np.testing.assert_array_equal(wave.f[6], stack.max(axis=0))
    np.testing.assert_array_equal(wave.f[7], stack.min(axis=0))


def test_transcendentals_and_their_flushing():
    x = np.concatenate([np.linspace(-140, 130, 60), [np.inf, -np.inf, np.nan, -126.5]]).astype(np.float32)
    wave = execute(
        "v_exp_f32 v1, v0\nv_log_f32 v2, v3\nv_rcp_f32 v4, v3\nv_rsq_f32 v5, v3\nv_sqrt_f32 v6, v3",
        v={0: x, 3: np.abs(floats(9))},
    ).wave
    with np.errstate(all="ignore"):
        expected = np.exp2(x.astype(np.float64))
        expected[expected < 2.0**-126] = 0
        np.testing.assert_allclose(wave.f[1], expected.astype(np.float32), rtol=1e-7)
        y = np.abs(floats(9)).astype(np.float64)
        y[y < 2.0**-126] = 0
        np.testing.assert_allclose(wave.f[2], np.log2(y).astype(np.float32), rtol=1e-7)
        reciprocal = 1 / y
        reciprocal[reciprocal < 2.0**-126] = 0
        np.testing.assert_allclose(wave.f[4], reciprocal.astype(np.float32), rtol=1e-7)
        np.testing.assert_allclose(wave.f[5], (1 / np.sqrt(y)).astype(np.float32), rtol=1e-7)
        np.testing.assert_allclose(wave.f[6], np.sqrt(y).astype(np.float32), rtol=1e-7)


IEEE_DIVISION = """v_div_scale_f32 v2, s[0:1], v1, v1, v0
v_div_scale_f32 v3, vcc, v0, v1, v0
v_rcp_f32 v4, v2
v_fma_f32 v5, -v2, v4, 1.0
v_fma_f32 v4, v5, v4, v4
v_mul_f32 v5, v3, v4
v_fma_f32 v6, -v2, v5, v3
v_fma_f32 v5, v6, v4, v5
v_fma_f32 v2, -v2, v5, v3
v_div_fmas_f32 v2, v2, v4, v5
v_div_fixup_f32 v2, v2, v1, v0"""


def test_division_sequence_is_correctly_rounded():
    for seed in range(8):
        rng = np.random.default_rng(seed)
        a, b = ((rng.standard_normal(64) * 2.0 ** rng.integers(-120, 120, 64)).astype(np.float32) for _ in range(2))
        a[:16], b[:16] = rng.permutation(SPECIAL), rng.permutation(SPECIAL)
        wave = execute(IEEE_DIVISION, v={0: a, 1: b}).wave
        with np.errstate(all="ignore"):
            quotient = a / b
        # A denormal quotient is rounded once as a normal number and again when it is scaled back.
        normal = ~((np.abs(quotient) < 2.0**-126) & (quotient != 0))
        np.testing.assert_array_equal(wave.f[2][normal], quotient[normal])
        np.testing.assert_allclose(wave.f[2][~normal], quotient[~normal], rtol=0, atol=2.0**-149)


def test_rounding_to_whole_numbers():
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.4999, -0.0, 1e10, np.inf, np.nan] + [0.25] * 54, np.float32)
    code = "v_rndne_f32 v1, v0\nv_floor_f32 v2, v0\nv_ceil_f32 v3, v0\nv_trunc_f32 v4, v0\nv_fract_f32 v5, v0"
    wave = execute(code, v={0: x}).wave
    assert wave.f[1][:7].tolist() == [0, 2, 2, 0, -2, 2, 0] and np.signbit(wave.f[1][[3, 6]]).all()
    assert wave.f[2][:7].tolist() == [0, 1, 2, -1, -2, 2, 0]
    assert wave.f[3][:7].tolist() == [1, 2, 3, 0, -1, 3, 0]
    assert wave.f[4][:7].tolist() == [0, 1, 2, 0, -1, 2, 0]
    assert wave.f[5][:5].tolist() == [0.5, 0.5, 0.5, 0.5, 0.5]


def test_ldexp_and_frexp():
    x, e = floats(10), RNG.integers(-40, 40, 64).astype(np.int32)
    wave = execute("v_ldexp_f32 v2, v0, v1\nv_frexp_mant_f32 v3, v0\nv_frexp_exp_i32_f32 v4, v0", v={0: x, 1: e}).wave
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(wave.f[2], (x.astype(np.float64) * 2.0**e).astype(np.float32))
    finite = np.isfinite(x)
    np.testing.assert_array_equal((wave.f[3].astype(np.float64) * 2.0 ** wave.i[4])[finite], x[finite])


def test_output_modifiers_and_clamp():
    x = np.array([-3, -0.0, 0.25, 0.75, 3, np.nan] + [1] * 58, np.float32)
    wave = execute(
        "v_add_f32_e64 v1, v0, 0 clamp\nv_mul_f32_e64 v2, v0, 1.0 mul:4\nv_mul_f32_e64 v3, v0, 1.0 div:2", v={0: x}
    ).wave
    assert wave.f[1][:6].tolist() == [0, 0, 0.25, 0.75, 1, 0]
    assert wave.f[2][:5].tolist() == [-12, 0, 1, 3, 12]
    assert wave.f[3][:5].tolist() == [-1.5, 0, 0.125, 0.375, 1.5]


def test_integer_clamp():
    a, b = INTS[0], INTS[1]
    code = """v_add_u32_e64 v2, v0, v1 clamp
              v_sub_u32_e64 v3, v0, v1 clamp
              v_sub_i32 v4, v0, v1 clamp
              v_add_i32 v5, v0, v1 clamp
              v_sub_u16_e64 v6, v0, v1 clamp"""
    wave = execute(code, v={0: a, 1: b}).wave
    for lane, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        assert wave.u[2][lane] == min(x + y, M32) and wave.u[3][lane] == max(x - y, 0)
        top, bottom = 2**31 - 1, -(2**31)
        assert wave.i[4][lane] == min(max(s32(x) - s32(y), bottom), top)
        assert wave.i[5][lane] == min(max(s32(x) + s32(y), bottom), top)
        assert wave.u[6][lane] == max((x & 0xFFFF) - (y & 0xFFFF), 0)


def test_fma_with_literals():
    a, b, k = np.float32(3), np.float32(5), np.float32(1.7)
    wave = execute(f"v_fmamk_f32 v2, v0, {float(k)!r}, v1\nv_fmaak_f32 v3, v0, v1, {float(k)!r}", v={0: a, 1: b}).wave
    assert wave.f[2][0] == np.float32(np.float64(a) * k + b) and wave.f[3][0] == np.float32(np.float64(a) * b + k)


@pytest.mark.parametrize("bits", [32, 16])
def test_every_table_of_bitop3(bits):
    a, b, c = np.uint32(0xF0F0F0F0), np.uint32(0xCCCCCCCC), np.uint32(0xAAAAAAAA)
    for table in (0, 1, 0x16, 0x3C, 0x80, 0x96, 0xCA, 0xE8, 0xFE, 0xFF):
        wave = execute(f"v_bitop3_b{bits} v3, v0, v1, v2 bitop3:{table}", v={0: a, 1: b, 2: c}).wave
        expected = sum(
            (table >> (int(a) >> n & 1) * 4 + (int(b) >> n & 1) * 2 + (int(c) >> n & 1) & 1) << n for n in range(bits)
        )
        assert wave.u[3][0] == expected, hex(table)


def test_byte_permute():
    a, b, select = INTS[0], INTS[1], np.random.default_rng(11).integers(0, 16, (64, 4)).astype(np.uint8)
    wave = execute("v_perm_b32 v3, v0, v1, v2", v={0: a, 1: b, 2: select.view(np.uint32)[:, 0]}).wave
    for lane in range(64):
        pool = int(b[lane]).to_bytes(4, "little") + int(a[lane]).to_bytes(4, "little")

        def pick(code, pool=pool):
            if code < 8:
                return pool[code]
            if code < 12:
                return 0xFF if pool[2 * (code - 8) + 1] & 0x80 else 0
            return 0 if code == 12 else 0xFF

        assert int(wave.u[3][lane]) == int.from_bytes(bytes(pick(code) for code in select[lane]), "little")


COMPARES = {"lt": "<", "eq": "==", "le": "<=", "gt": ">", "ge": ">=", "ne": "!="}


@pytest.mark.parametrize("kind", ["u32", "i32", "f32"])
def test_compares_write_active_lanes_only(kind):
    view = {"u32": np.uint32, "i32": np.int32, "f32": np.float32}[kind]
    a, b = INTS[0].copy(), INTS[1].copy()
    b[:8] = a[:8]
    active = 0xFFFF0000FFFFFF0F
    for name, symbol in COMPARES.items():
        name = "neq" if kind == "f32" and name == "ne" else name
        wave = execute(
            f"v_cmp_{name}_{kind} vcc, v0, v1\nv_cmp_{name}_{kind} s[4:5], v0, v1", v={0: a, 1: b}, exec_mask=active
        ).wave
        holds = eval(f"x {symbol} y", {"x": a.view(view), "y": b.view(view)})
        expected = sum(1 << lane for lane in range(64) if holds[lane]) & active
        assert wave.pair(106) == expected and wave.pair(4) == expected


def test_float_compares_with_nan():
    a, b = np.array([np.nan, 1, -0.0, np.inf] * 16, np.float32), np.array([1, np.nan, 0, np.inf] * 16, np.float32)
    expected = {
        "u": 0b0011,
        "o": 0b1100,
        "lg": 0,
        "nlg": 0b1111,
        "nlt": 0b1111,
        "nge": 0b0011,
        "neq": 0b0011,
        "eq": 0b1100,
    }
    for name, bits in expected.items():
        assert execute(f"v_cmp_{name}_f32 vcc, v0, v1", v={0: a, 1: b}).wave.pair(106) & 15 == bits, name


def test_compare_into_exec_and_classes():
    x = np.array([-np.inf, -1, -(2**-140), -0.0, 0, 2**-140, 1, np.inf, np.nan] + [0] * 55, np.float32)
    wave = execute("v_cmpx_lt_f32 vcc, 0, v0\nv_mov_b32 v1, 7", v={0: x, 1: np.uint32(0)}).wave
    assert wave.exec == wave.pair(106) == 0b11100000
    assert wave.u[1][:9].tolist() == [0, 0, 0, 0, 0, 7, 7, 7, 0]
    for bit, lane in ((2, 0), (3, 1), (4, 2), (5, 3), (6, 4), (7, 5), (8, 6), (9, 7), (1, 8)):
        vcc = execute("v_cmp_class_f32 vcc, v0, v1", v={0: x, 1: np.uint32(1 << bit)}).wave.pair(106)
        assert [n for n in range(9) if vcc >> n & 1] == ([lane] if bit != 6 else [4])


def test_64_bit_arithmetic_through_carries():
    a, b = (RNG.integers(0, 1 << 63, 64, dtype=np.uint64) * np.uint64(2) + np.uint64(1) for _ in range(2))
    low, high = (lambda x: x.astype(np.uint32)), (lambda x: (x >> np.uint64(32)).astype(np.uint32))
    code = """v_add_co_u32 v4, vcc, v0, v2
              v_addc_co_u32 v5, vcc, v1, v3, vcc
              v_sub_co_u32 v6, vcc, v0, v2
              v_subb_co_u32 v7, vcc, v1, v3, vcc
              v_mad_u64_u32 v[8:9], s[2:3], v0, v2, v[2:3]
              v_lshl_add_u64 v[10:11], v[0:1], 3, v[2:3]
              v_lshlrev_b64 v[12:13], 7, v[0:1]
              v_lshrrev_b64 v[16:17], 9, v[0:1]
              v_ashrrev_i64 v[18:19], v2, v[0:1]
              v_mad_i64_i32 v[20:21], s[4:5], v0, v2, v[2:3]
              v_subrev_co_u32 v22, vcc, v0, v2
              v_subbrev_co_u32 v23, vcc, v1, v3, vcc
              v_cmp_lt_i64 s[6:7], v[0:1], v[2:3]
              v_cmp_gt_u64 s[8:9], v[0:1], v[2:3]
              v_mov_b64 v[14:15], v[0:1]"""
    wave = execute(code, v={0: low(a), 1: high(a), 2: low(b), 3: high(b)}).wave

    def pair(row):
        return [int(x) | int(y) << 32 for x, y in zip(wave.u[row], wave.u[row + 1], strict=True)]

    for lane, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        m = (1 << 64) - 1
        assert pair(4)[lane] == x + y & m
        assert pair(6)[lane] == x - y & m
        total = (x & M32) * (y & M32) + y
        assert pair(8)[lane] == total & m and wave.pair(2) >> lane & 1 == total >> 64
        assert pair(10)[lane] == (x << 3) + y & m
        assert pair(12)[lane] == x << 7 & m
        assert pair(14)[lane] == x
        assert pair(16)[lane] == x >> 9
        assert pair(18)[lane] == s64(x) >> (y & 63) & m
        signed = s32(x & M32) * s32(y & M32) + s64(y)
        assert pair(20)[lane] == signed & m and wave.pair(4) >> lane & 1 == (signed != s64(signed & m))
        assert pair(22)[lane] == y - x & m
        assert wave.pair(6) >> lane & 1 == (s64(x) < s64(y)) and wave.pair(8) >> lane & 1 == (x > y)


def test_packed_float_selects_halves():
    rows = {n: np.random.default_rng(n).standard_normal(64).astype(np.float32) for n in range(6)}
    code = """v_pk_mul_f32 v[6:7], v[0:1], v[2:3] op_sel_hi:[1,0]
              v_pk_add_f32 v[8:9], v[0:1], v[2:3] op_sel:[1,0] op_sel_hi:[0,1] neg_lo:[0,1]
              v_pk_fma_f32 v[10:11], v[0:1], v[2:3], v[4:5]
              v_pk_mul_f32 v[0:1], v[0:1], s[2:3] op_sel_hi:[1,0]"""
    two = int(np.float32(2).view(np.uint32))
    wave = execute(code, v=rows, s={2: two, 3: 0}).wave
    np.testing.assert_array_equal(wave.f[6], rows[0] * rows[2])
    np.testing.assert_array_equal(wave.f[7], rows[1] * rows[2])
    np.testing.assert_array_equal(wave.f[8], rows[1] - rows[2])
    np.testing.assert_array_equal(wave.f[9], rows[0] + rows[3])
    np.testing.assert_array_equal(wave.f[11], (rows[1].astype(np.float64) * rows[3] + rows[5]).astype(np.float32))
    np.testing.assert_array_equal(wave.f[1], rows[1] * 2)
    wave = execute("v_pk_mov_b32 v[0:1], v[2:3], v[0:1] op_sel:[1,0]", v=rows).wave
    np.testing.assert_array_equal(wave.f[0], rows[3])
    np.testing.assert_array_equal(wave.f[1], rows[0])


def test_packed_halves():
    a, b = (np.random.default_rng(n).standard_normal((64, 2)).astype(np.float16) for n in (20, 21))
    code = "v_pk_add_f16 v2, v0, v1\nv_pk_mul_f16 v3, v0, v1 op_sel:[1,0] op_sel_hi:[0,1]\nv_pk_max_u16 v4, v0, v1"
    wave = execute(code, v={0: a.view(np.uint32)[:, 0], 1: b.view(np.uint32)[:, 0]}).wave
    np.testing.assert_array_equal(wave.u[2].view(np.float16).reshape(64, 2), a + b)
    np.testing.assert_array_equal(wave.u[3].view(np.float16).reshape(64, 2), a[:, ::-1] * b)
    expected = np.maximum(a.view(np.uint16), b.view(np.uint16))
    np.testing.assert_array_equal(wave.u[4].view(np.uint16).reshape(64, 2), expected)


PACKED_INTEGERS = {
    "v_pk_add_u16": lambda a, b, c: a + b,
    "v_pk_sub_u16": lambda a, b, c: a - b,
    "v_pk_mul_lo_u16": lambda a, b, c: a * b,
    "v_pk_mad_u16": lambda a, b, c: a * b + c,
    "v_pk_min_u16": lambda a, b, c: min(a, b),
    "v_pk_add_i16": lambda a, b, c: a + b,
    "v_pk_sub_i16": lambda a, b, c: a - b,
    "v_pk_max_i16": lambda a, b, c: max(s16(a), s16(b)),
    "v_pk_min_i16": lambda a, b, c: min(s16(a), s16(b)),
    "v_pk_lshlrev_b16": lambda a, b, c: b << a % 16,
    "v_pk_lshrrev_b16": lambda a, b, c: b >> a % 16,
    "v_pk_ashrrev_i16": lambda a, b, c: s16(b) >> a % 16,
}


@pytest.mark.parametrize("name", PACKED_INTEGERS)
def test_packed_integers(name):
    sources = "v0, v1, v2" if "mad" in name else "v0, v1"
    wave = execute(f"{name} v3, {sources}", v=dict(enumerate(INTS))).wave
    halves = [x.view(np.uint16).tolist() for x in INTS]
    expected = [PACKED_INTEGERS[name](*three) & 0xFFFF for three in zip(*halves, strict=True)]
    assert wave.u[3].view(np.uint16).tolist() == expected


HALF_MATH = {
    "add": lambda a, b, c: a + b,
    "sub": lambda a, b, c: a - b,
    "subrev": lambda a, b, c: b - a,
    "mul": lambda a, b, c: a * b,
    "max": lambda a, b, c: np.maximum(a, b),
    "min": lambda a, b, c: np.minimum(a, b),
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float16),
    "max3": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "min3": lambda a, b, c: np.minimum(np.minimum(a, b), c),
}


@pytest.mark.parametrize("name", HALF_MATH)
def test_half_precision(name):
    a, b, c = (np.random.default_rng(n).standard_normal((64, 2)).astype(np.float16) for n in (22, 23, 24))
    v = {n: x.view(np.uint32)[:, 0] for n, x in enumerate((a, b, c))} | {4: np.uint32(0xABCD1234)}
    sources = "v0, v1, v2" if name in ("fma", "max3", "min3") else "v0, v1"
    wave = execute(f"v_{name}_f16 v3, {sources}", v=v).wave
    expected = HALF_MATH[name](a[:, 0], b[:, 0], c[:, 0])
    # The upper half of the destination is cleared.
    np.testing.assert_array_equal(wave.u[3], expected.view(np.uint16))
    if name in ("fma", "max3", "min3"):
        wave = execute(f"v_{name}_f16 v4, {sources} op_sel:[1,0,1,1]", v=v).wave
        expected = HALF_MATH[name](a[:, 1], b[:, 0], c[:, 1])
        np.testing.assert_array_equal(wave.u[4], expected.view(np.uint16).astype(np.uint32) << 16 | 0x1234)


@pytest.mark.parametrize("name", ["fma", "max", "min", "maximum3", "minimum3"])
def test_packed_half_extrema_and_fma(name):
    a, b, c = (np.random.default_rng(n).standard_normal((64, 2)).astype(np.float16) for n in (25, 26, 27))
    a[0], b[1] = np.nan, np.nan
    sources = "v0, v1, v2" if name in ("fma", "maximum3", "minimum3") else "v0, v1"
    wave = execute(
        f"v_pk_{name}_f16 v3, {sources}", v={n: x.view(np.uint32)[:, 0] for n, x in enumerate((a, b, c))}
    ).wave
    expected = {
        "fma": lambda: (a.astype(np.float64) * b + c).astype(np.float16),
        "max": lambda: np.fmax(a, b),
        "min": lambda: np.fmin(a, b),
        "maximum3": lambda: np.maximum(np.maximum(a, b), c),
        "minimum3": lambda: np.minimum(np.minimum(a, b), c),
    }[name]()
    np.testing.assert_array_equal(wave.u[3].view(np.float16).reshape(64, 2), expected)


def test_select_and_partial_exec():
    code = "v_cndmask_b32 v2, v0, v1, vcc\nv_cndmask_b32 v3, v0, v1, s[2:3]\nv_cndmask_b32_e64 v4, -v0, v1, s[2:3]"
    s = {106: 0x0F0F0F0F, 107: 0, 2: 1, 3: 0}
    one = np.float32(1)
    wave = execute(code, v={0: one, 1: np.float32(2), 2: one, 3: one, 4: one}, s=s, exec_mask=0xFF).wave
    assert wave.f[2][:9].tolist() == [2, 2, 2, 2, 1, 1, 1, 1, 1]
    assert wave.f[3][:3].tolist() == [2, 1, 1]
    assert wave.f[4][:9].tolist() == [2] + [-1] * 7 + [1]


def test_dot_products_of_bf16_pairs():
    a, b = (np.random.default_rng(n).standard_normal((64, 2)).astype(np.float32) for n in (30, 31))
    a, b = (x.view(np.uint32) >> 16 << 16 for x in (a, b))
    packed = [(x[:, 0] >> 16 | x[:, 1]).astype(np.uint32) for x in (a, b)]
    wave = execute("v_dot2_f32_bf16 v3, v0, v1, v2", v={0: packed[0], 1: packed[1], 2: np.float32(0.5)}).wave
    expected = (a.view(np.float32).astype(np.float64) * b.view(np.float32)).sum(axis=1) + 0.5
    np.testing.assert_allclose(wave.f[3], expected, rtol=1e-6, atol=1e-6)
    v = {0: packed[0], 1: packed[1], 2: np.float32(0.5)}
    np.testing.assert_array_equal(execute("v_dot2c_f32_bf16 v2, v0, v1", v=v).wave.f[2], wave.f[3])
    a, b = (x.view(np.float32).astype(np.float16) for x in (a, b))
    v = {0: a.view(np.uint32)[:, 0], 1: b.view(np.uint32)[:, 0], 2: np.float32(0.5)}
    wave = execute("v_dot2_f32_f16 v3, v0, v1, v2", v=v).wave
    np.testing.assert_allclose(wave.f[3], (a.astype(np.float64) * b).sum(axis=1) + 0.5, rtol=1e-6, atol=1e-6)


def test_accumulator_moves_and_swap():
    code = "v_accvgpr_write_b32 a3, v0\nv_accvgpr_read_b32 v2, a3\nv_accvgpr_mov_b32 a4, a3\nv_swap_b32 v0, v1"
    wave = execute(code, v={0: INTS[0], 1: INTS[1]}).wave
    np.testing.assert_array_equal(wave.u[2], INTS[0])
    np.testing.assert_array_equal(wave.u[256 + 4], INTS[0])
    np.testing.assert_array_equal(wave.u[0], INTS[1])
    np.testing.assert_array_equal(wave.u[1], INTS[0])


def test_lane_counting():
    wave = execute("v_mbcnt_lo_u32_b32 v0, -1, 0\nv_mbcnt_hi_u32_b32 v0, -1, v0").wave
    assert wave.u[0].tolist() == list(range(64))


def test_register_indexing():
    code = """s_set_gpr_idx_on s2, gpr_idx(SRC0,DST)
              v_mov_b32 v10, v0
              v_mov_b32 v11, s3
              s_set_gpr_idx_off
              v_mov_b32 v20, v0"""
    wave = execute(code, v={0: np.uint32(5), 3: np.uint32(8)}, s={2: 3, 3: 77}).wave
    assert wave.u[13][0] == 8 and wave.u[14][0] == 77 and wave.u[20][0] == 5
