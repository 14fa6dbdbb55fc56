"""Conversions: every code of the narrow formats, and rounding checked against a search over all codes."""

from fractions import Fraction

import numpy as np
import pytest

from .snippet import execute


def value_of(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """A small float's value from its definition; the caller deals with NaN and infinity."""
    bias = (1 << exponent_bits - 1) - 1
    sign = -1.0 if code >> exponent_bits + mantissa_bits & 1 else 1.0
    exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


FORMATS = {"fp8": (4, 3, 0x7E), "bf8": (5, 2, 0x7B), "fp4": (2, 1, 0x7)}  # exponent, mantissa, largest finite code
CODES = np.arange(256, dtype=np.uint8).reshape(64, 4)
ALL = CODES.view(np.uint32)[:, 0]


def decoded(form: str, code: int) -> float:
    exponent, mantissa, largest = FORMATS[form]
    magnitude = code & (1 << exponent + mantissa) - 1
    if magnitude > largest:
        if form == "bf8" and magnitude == 0x7C:
            return -np.inf if code & 0x80 else np.inf
        return np.nan
    return value_of(code, exponent, mantissa)


def nearest(form: str, x: float, saturating: bool) -> int:
    """The code nearest to x, ties to the even code, by search; overflow as asked."""
    exponent, mantissa, largest = FORMATS[form]
    sign = (1 << exponent + mantissa) * bool(np.signbit(x))
    if np.isnan(x):
        return None
    candidates = [(code, Fraction(value_of(code, exponent, mantissa))) for code in range(largest + 1)]
    # One code beyond the largest decides whether rounding overflows.
    step = candidates[-1][1] - candidates[-2][1]
    candidates.append((largest + 1, candidates[-1][1] + step))
    target = min(Fraction(abs(float(x))) if np.isfinite(x) else Fraction(10**9), Fraction(10**9))
    code = min(candidates, key=lambda c: (abs(c[1] - target), c[0] % 2))[0]
    if code > largest:
        code = largest if saturating else {"fp8": 0x7F, "bf8": 0x7C, "fp4": largest}[form]
    return sign | code


def awkward(form: str, seed: int) -> np.ndarray:
    """Values on, between and halfway between codes, beyond the range, zeros and denormals."""
    exponent, mantissa, largest = FORMATS[form]
    values = np.array([value_of(code, exponent, mantissa) for code in range(largest + 1)], np.float32)
    halfway = (values[1:] + values[:-1]) / 2
    rng = np.random.default_rng(seed)
    top = values[-1]
    fixed = np.array([0, -0.0, 2**-149, top * 1.03, top * 1.04, top * 2, -top * 8, np.inf, -np.inf], np.float32)
    near = np.nextafter(halfway, np.float32(np.inf))
    pool = np.concatenate([halfway, near, values, rng.standard_normal(40).astype(np.float32)])
    drawn = rng.choice(pool, 64 - fixed.size)
    return np.concatenate([fixed, drawn * rng.choice([-1, 1], drawn.size).astype(np.float32)]).astype(np.float32)


@pytest.mark.parametrize("form", ["fp8", "bf8"])
def test_every_code_decodes(form):
    code = f"""v_cvt_f32_{form}_sdwa v1, v0 src0_sel:BYTE_0
               v_cvt_f32_{form}_sdwa v2, v0 src0_sel:BYTE_3
               v_cvt_pk_f32_{form} v[4:5], v0
               v_cvt_f32_{form}_e64 v12, v0
               v_cvt_pk_f32_{form}_sdwa v[6:7], v0 src0_sel:WORD_1
               v_cvt_scalef32_pk_f32_{form} v[8:9], v0, v3 op_sel:[1,0,0]
               v_cvt_scalef32_pk_f16_{form} v10, v0, 1.0
               v_cvt_scalef32_pk_bf16_{form} v11, v0, v3"""
    wave = execute(code, v={0: ALL, 3: np.float32(0.125)}).wave
    expected = np.array([[decoded(form, int(c)) for c in row] for row in CODES])
    for row, byte, scale in (
        (12, 0, 1),
        (1, 0, 1),
        (2, 3, 1),
        (4, 0, 1),
        (5, 1, 1),
        (6, 2, 1),
        (7, 3, 1),
        (8, 2, 0.125),
        (9, 3, 0.125),
    ):
        np.testing.assert_array_equal(wave.f[row], (expected[:, byte] * scale).astype(np.float32))
        assert (np.signbit(wave.f[row]) == np.signbit(expected[:, byte]))[expected[:, byte] == 0].all()
    np.testing.assert_array_equal(wave.u[10].view(np.float16).reshape(64, 2), expected[:, :2].astype(np.float16))
    top = wave.u[11].view(np.uint16).reshape(64, 2).astype(np.uint32) << np.uint32(16)
    np.testing.assert_array_equal(top.view(np.float32), (expected[:, :2] * 0.125).astype(np.float32))


def test_every_fp4_code_decodes():
    for byte in range(4):
        select = f"op_sel:[{byte & 1},{byte >> 1},0]"
        code = f"v_cvt_scalef32_pk_f32_fp4 v[2:3], v0, v1 {select}\nv_cvt_scalef32_pk_bf16_fp4 v4, v0, v1 {select}"
        wave = execute(code, v={0: ALL, 1: np.float32(4)}).wave
        for half in range(2):
            expected = [4 * decoded("fp4", int(code) >> 4 * half & 15) for code in CODES[:, byte]]
            np.testing.assert_array_equal(wave.f[2 + half], expected)
            bf16 = wave.u[4].view(np.uint16)[half::2].astype(np.uint32) << np.uint32(16)
            np.testing.assert_array_equal(bf16.view(np.float32), expected)


@pytest.mark.parametrize("form", ["fp8", "bf8"])
def test_packing_rounds_to_even_and_overflows(form):
    old = np.uint32(0xABCD1234)
    for seed in range(4):
        a, b = awkward(form, seed), awkward(form, seed + 10)
        code = f"v_cvt_pk_{form}_f32 v2, v0, v1\nv_cvt_pk_{form}_f32 v3, v0, -v1 op_sel:[0,0,1]"
        wave = execute(code, v={0: a, 1: b, 2: old, 3: old}).wave
        for lane in range(64):
            low, high = nearest(form, a[lane], False), nearest(form, b[lane], False)
            assert wave.u[2][lane] == 0xABCD0000 | high << 8 | low, (a[lane], b[lane])
            assert wave.u[3][lane] == 0x1234 | (high ^ 0x80) << 24 | low << 16


@pytest.mark.parametrize("form", ["fp8", "bf8", "fp4"])
def test_scaled_packing_divides_and_saturates(form):
    old = np.uint32(0xABCD1234)
    for seed, scale in ((0, 1.0), (1, 0.25), (2, 8.0)):
        a, b = (awkward(form, seed + n) * np.float32(scale) for n in (0, 10))
        select = "op_sel:[0,0,0,1]"
        outcome = execute(
            f"v_cvt_scalef32_pk_{form}_f32 v3, v0, v1, v2 {select}", v={0: a, 1: b, 2: np.float32(scale), 3: old}
        )
        for lane in range(64):
            with np.errstate(all="ignore"):
                low, high = (nearest(form, np.float32(x[lane] / np.float32(scale)), True) for x in (a, b))
            if form == "fp4":
                expected = 0xAB001234 | (high << 4 | low) << 16
            else:
                expected = 0x1234 | high << 24 | low << 16
            assert outcome.wave.u[3][lane] == expected, (a[lane], b[lane])
        kinds = [finding.kind for finding in outcome.run.findings]
        assert kinds == ([] if form == "fp4" else ["fp8 saturation"])


def test_scale_uses_the_exponent_only_and_propagates_nan():
    v = {0: np.float32(6), 1: np.float32(np.nan), 2: np.float32(3.9), 3: np.uint32(0)}
    outcome = execute("v_cvt_scalef32_pk_fp8_f32 v3, v0, v1, v2", v=v)
    assert decoded("fp8", int(outcome.wave.u[3][0]) & 255) == 3  # 6 / 2
    assert np.isnan(decoded("fp8", int(outcome.wave.u[3][0]) >> 8 & 255))
    assert not outcome.run.findings  # NaN is no overflow, and 464 still rounds to 448
    v[0], v[2] = np.float32(464), np.float32(1)
    outcome = execute("v_cvt_scalef32_pk_fp8_f32 v3, v0, v0, v2", v=v)
    assert outcome.wave.u[3][0] & 255 == 0x7E and not outcome.run.findings


def test_packing_from_halves():
    pair = np.array([1.0625, -3.5], np.float16)
    bf16 = np.array([1.0625, -3.5], np.float32).view(np.uint32) >> 16
    v = {
        0: pair.view(np.uint32)[0],
        1: np.uint32(bf16[0] | bf16[1] << 16),
        2: np.float32(0.5),
        3: np.uint32(0),
        4: np.uint32(0),
    }
    wave = execute("v_cvt_scalef32_pk_fp8_f16 v3, v0, v2\nv_cvt_scalef32_pk_bf8_bf16 v4, v1, v2", v=v).wave
    assert [decoded("fp8", int(wave.u[3][0]) >> s & 255) for s in (0, 8)] == [2.0, -7.0]  # 2.125 is a tie
    assert [decoded("bf8", int(wave.u[4][0]) >> s & 255) for s in (0, 8)] == [2.0, -7.0]


@pytest.mark.parametrize("form", ["fp8", "bf8"])
def test_single_scaled_decode_selects_a_byte(form):
    for byte in range(4):
        code = f"v_cvt_scalef32_f32_{form} v2, v0, v1 op_sel:[{byte & 1},{byte >> 1},0]"
        wave = execute(code, v={0: ALL, 1: np.float32(2)}).wave
        np.testing.assert_array_equal(wave.f[2], np.float32([2 * decoded(form, int(c)) for c in CODES[:, byte]]))


def test_fp4_to_and_from_halves():
    x = np.random.default_rng(8).choice(np.float16([0.5, 1, -1.5, 2, 3, -4, 6, 0.25, 0.75, 2.5, 7]), (64, 2))
    bits = x.astype(np.float32).view(np.uint32) >> np.uint32(16)
    v = {
        0: x.view(np.uint32)[:, 0],
        1: bits[:, 0] | bits[:, 1] << np.uint32(16),
        2: np.float32(1),
        3: np.uint32(0),
        4: np.uint32(0),
    }
    code = """v_cvt_scalef32_pk_fp4_f16 v3, v0, v2
              v_cvt_scalef32_pk_fp4_bf16 v4, v1, v2 op_sel:[0,0,1]
              v_cvt_scalef32_pk_f16_fp4 v5, v3, v2"""
    wave = execute(code, v=v).wave
    codes = [nearest("fp4", np.float32(a), True) | nearest("fp4", np.float32(b), True) << 4 for a, b in x]
    assert wave.u[3].tolist() == codes and wave.u[4].tolist() == [code << 8 for code in codes]
    expected = [[decoded("fp4", code & 15), decoded("fp4", code >> 4)] for code in codes]
    np.testing.assert_array_equal(wave.u[5].view(np.float16).reshape(64, 2), expected)


def test_packing_of_pairs():
    x, y = np.array([70000, 5, 65535, 65536] * 16, np.uint32), np.arange(64, dtype=np.uint32)
    code = "v_cvt_pk_u16_u32 v2, v0, v1\nv_pack_b32_f16 v3, v0, v1\nv_cvt_pk_f16_f32 v4, v5, v6"
    f = [np.random.default_rng(n).standard_normal(64).astype(np.float32) for n in (5, 6)]
    wave = execute(code, v={0: x, 1: y, 5: f[0], 6: f[1]}).wave
    np.testing.assert_array_equal(wave.u[2], np.minimum(x, 65535) | y << 16)
    np.testing.assert_array_equal(wave.u[3], x & 0xFFFF | y << 16)
    np.testing.assert_array_equal(wave.u[4].view(np.float16).reshape(64, 2), np.stack(f, axis=1).astype(np.float16))


def rounded_to_bf16(x: np.float32) -> int:
    """Upper half after adding half an ulp, ties to even, in integers."""
    bits = int(np.float32(x).view(np.uint32))
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


def test_bf16_and_f16_rounding():
    x = np.concatenate(
        [
            awkward("fp8", 1)[:32],
            np.float32([1 + 2**-8, 1 + 3 * 2**-8, 3e38, 2**-133, 2**-134, 65504, 65520, -0.0]),
            np.random.default_rng(5).standard_normal(24).astype(np.float32),
        ]
    )
    y = x[::-1].copy()
    code = "v_cvt_pk_bf16_f32 v2, v0, v1\nv_cvt_f16_f32 v3, v0\nv_cvt_pkrtz_f16_f32 v4, v0, v1\nv_cvt_f32_f16 v5, v3"
    wave = execute(code, v={0: x, 1: y}).wave
    with np.errstate(all="ignore"):
        half = x.astype(np.float16)
    for lane in range(64):
        if not np.isnan(x[lane]) and not np.isnan(y[lane]):
            assert wave.u[2][lane] == rounded_to_bf16(x[lane]) | rounded_to_bf16(y[lane]) << 16
        truncated = wave.u[4].view(np.float16)[2 * lane]
        if abs(x[lane]) > 65504:
            assert abs(truncated) == (np.inf if np.isinf(x[lane]) else 65504)
        elif not np.isnan(x[lane]):
            with np.errstate(over="ignore"):
                beyond = np.nextafter(np.abs(truncated), np.float16(np.inf))
            assert abs(float(truncated)) <= abs(float(x[lane])) < float(beyond)
    np.testing.assert_array_equal(wave.u[3], half.view(np.uint16))
    np.testing.assert_array_equal(wave.f[5], half.astype(np.float32))


def test_integers_saturate_and_nan_is_zero():
    x = np.array(
        [0.9, -0.9, 2.5, -3.7, 2**31, -(2**31), 3e9, 5e9, -5e9, np.inf, -np.inf, np.nan] + [1] * 52, np.float32
    )
    code = "v_cvt_i32_f32 v1, v0\nv_cvt_u32_f32 v2, v0\nv_cvt_flr_i32_f32 v3, v0"
    wave = execute(code, v={0: x}).wave
    top, bottom = 2**31 - 1, -(2**31)
    assert wave.i[1][:12].tolist() == [0, 0, 2, -3, top, bottom, top, top, bottom, top, bottom, 0]
    assert wave.u[2][:12].tolist() == [0, 0, 2, 0, 2**31, 0, 3000000000 // 256 * 256, 2**32 - 1, 0, 2**32 - 1, 0, 0]
    assert wave.i[3][:4].tolist() == [0, -1, 2, -4]


def test_floats_from_integers_and_bytes():
    x = np.random.default_rng(6).integers(0, 1 << 32, 64).astype(np.uint32)
    code = "v_cvt_f32_u32 v1, v0\nv_cvt_f32_i32 v2, v0\nv_cvt_f32_bf16 v4, v0\n"
    code += "\n".join(f"v_cvt_f32_ubyte{n} v{10 + n}, v0" for n in range(4))
    wave = execute(code, v={0: x}).wave
    np.testing.assert_array_equal(wave.f[1], np.float32(x.astype(np.float64)))
    np.testing.assert_array_equal(wave.f[2], np.float32(x.view(np.int32).astype(np.float64)))
    for n in range(4):
        np.testing.assert_array_equal(wave.f[10 + n], x.view(np.uint8)[n::4].astype(np.float32))
    np.testing.assert_array_equal(wave.u[4], x << np.uint32(16))
