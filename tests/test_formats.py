"""fp8 and mxfp4 code, exhaustively and exactly, against scalar formulas written from the formats' definitions."""

import math

import numpy as np
import pytest
import torch

import reference
from reference import dequantize_fp8, dequantize_mxfp4, quantize_fp8, quantize_mxfp4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3_value(code: int) -> float:
    """OCP e4m3fn: bias 7, no infinities, all ones is NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e8m0_value(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


def e2m1_value(code: int) -> float:
    return -E2M1[code - 8] if code > 7 else E2M1[code]


def scalar_mxfp4(block: list[float]) -> tuple[list[int], int]:
    """Codes and scale code of one block, by the contract's words: no bit patterns, no vectors."""
    amax = max(abs(v) for v in block)
    if amax == 0:
        return [8 if math.copysign(1, v) < 0 else 0 for v in block], 0
    _, exponent = math.frexp(amax)
    power = exponent - 1
    if amax >= 1.75 * 2.0**power:
        power += 1
    scale_exponent = min(max(power - 2, -127), 127)
    codes = []
    for v in block:
        magnitude = abs(v) / 2.0**scale_exponent
        # Ties go to the larger magnitude, which comes last.
        nearest = min(reversed(range(8)), key=lambda c: abs(E2M1[c] - magnitude))
        codes.append(nearest + (8 if math.copysign(1, v) < 0 else 0))
    return codes, scale_exponent + 127


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 codes (rows, 2 * bytes), low nibble first."""
    raw = packed.view(torch.uint8)
    return torch.stack([raw & 15, raw >> 4], dim=-1).flatten(-2)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# ----- fp8


@pytest.mark.parametrize("scale", [1.0, 0.01, 2.0**-30])
def test_dequantize_fp8_all_codes(scale):
    codes = torch.arange(256, dtype=torch.uint8)
    actual = dequantize_fp8(codes.view(torch.float8_e4m3fn), torch.tensor([scale]))
    expected = torch.tensor([e4m3_value(c) for c in range(256)]) * torch.tensor([scale])
    assert actual.dtype == torch.float32
    assert_same(actual, expected)


def test_quantize_fp8_returns_every_finite_code():
    codes = torch.tensor([c for c in range(256) if not math.isnan(e4m3_value(c))], dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    quantized, scale = quantize_fp8(values.bfloat16())
    assert scale.item() == 1.0
    assert torch.equal(quantized.view(torch.uint8), codes)


def test_quantize_fp8_rounds_every_bf16_to_nearest_even():
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.float().abs() <= 448]
    quantized, scale = quantize_fp8(x)
    assert scale.item() == 1.0
    magnitudes = np.array([e4m3_value(c) for c in range(127)])
    distance = np.abs(np.abs(x.double().numpy())[:, None] - magnitudes)
    lower = distance.argmin(axis=1)
    tie = (distance == distance.min(axis=1, keepdims=True)).sum(axis=1) == 2
    # Of two equally near codes the even one wins.
    expected = lower + (tie & (lower % 2 == 1))
    actual = quantized.view(torch.uint8).numpy()
    assert tie.sum() > 200
    np.testing.assert_array_equal(actual & 0x7F, expected)
    np.testing.assert_array_equal(actual >> 7, torch.signbit(x).numpy())


def test_quantize_fp8_scale_is_amax_over_448():
    x = torch.tensor([[1.0, -3.140625], [0.5, 2.0]], dtype=torch.bfloat16)
    quantized, scale = quantize_fp8(x)
    assert scale.shape == (1,) and scale.dtype == torch.float32
    assert scale.item() == np.float32(3.140625) / np.float32(448)
    assert quantized.dtype == torch.float8_e4m3fn and quantized.shape == x.shape
    assert quantized.float()[0, 1] == -448


def test_quantize_fp8_of_zeros():
    quantized, scale = quantize_fp8(torch.zeros(3, 4, dtype=torch.bfloat16))
    assert scale.item() > 0
    assert not dequantize_fp8(quantized, scale).any()


@pytest.mark.parametrize("quantize", [quantize_fp8, quantize_mxfp4])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_quantizers_reject_non_finite_values(quantize, value):
    x = torch.ones(4, 1, 64, dtype=torch.bfloat16)
    x[2, 0, 5] = value
    with pytest.raises(ValueError, match="x: expected finite values, got NaN or Inf"):
        quantize(x)


def test_quantize_fp8_rejects_an_empty_tensor():
    with pytest.raises(ValueError, match="x: expected at least one element"):
        quantize_fp8(torch.empty(0, 1, 576))


# ----- mxfp4


def test_dequantize_mxfp4_all_codes_and_scales():
    packed = torch.arange(16, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    actual = dequantize_mxfp4(packed, scales).view(256, 16, 2)
    with np.errstate(over="ignore"):
        expected = np.array(
            [[np.float32(e2m1_value(e)) * np.float32(e8m0_value(s)) for e in range(16)] for s in range(256)]
        )
    # Byte b of this table is code b in the low nibble and 0 in the high one.
    assert_same(actual[..., 0], torch.from_numpy(expected))
    assert torch.isnan(actual[255]).all() and not torch.isnan(actual[:255]).any()
    assert actual[0, 1, 0] == 0.5 * 2.0**-127


def test_packing_order_is_low_nibble_first():
    packed = torch.zeros(1, 1, 16, dtype=torch.uint8)
    packed[0, 0, 3] = 0x72
    out = dequantize_mxfp4(packed, torch.full((1, 1), 127, dtype=torch.uint8))
    assert out[0, 0, 6] == 1.0 and out[0, 0, 7] == 6.0


def test_quantize_mxfp4_returns_every_code_at_every_scale():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    # 6 x 2^126 is beyond float32: such a scale does not come from finite input.
    exponents = range(-127, 126)
    blocks = torch.stack([torch.tensor([math.ldexp(e2m1_value(c), e) for c in codes.tolist()]) for e in exponents])
    packed, scales = quantize_mxfp4(blocks.bfloat16())
    assert torch.equal(scales.view(torch.uint8)[: len(exponents), 0], torch.arange(253, dtype=torch.uint8))
    assert torch.equal(unpack(packed), codes.expand(len(exponents), -1))


@pytest.mark.parametrize("fraction", [1.0, 1.25, 1.5, 1.7421875, 1.75, 1.7578125, 1.9921875])
def test_scale_is_rounded_up_from_seven_quarters(fraction):
    exponents = torch.arange(-126, 128)
    x = torch.zeros(len(exponents), 32)
    x[:, 7] = -fraction * torch.exp2(exponents.double())
    _, scales = quantize_mxfp4(x.bfloat16())
    power = exponents + (1 if fraction >= 1.75 else 0)
    expected = (power - 2).clamp(-127, 127) + 127
    assert torch.equal(scales.view(torch.uint8)[: len(exponents), 0].long(), expected)


def test_elements_round_to_nearest_with_ties_away_and_saturate():
    # amax 6.96875 keeps the scale at 1, so every value below is seen as it is.
    values = [6.96875, 5.0, 4.96875, 3.5, 3.484375, 2.5, 2.484375, 1.75, 1.7421875, 1.25, 0.75, 0.25, 0.2490234375, 0.0]
    expected = [6.0, 6.0, 4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.5, 1.5, 1.0, 0.5, 0.0, 0.0]
    x = torch.tensor(values + [-v for v in values] + [0.0] * 4).bfloat16()
    assert x[:14].tolist() == values
    out = dequantize_mxfp4(*quantize_mxfp4(x[None, None]))
    assert out.flatten().tolist() == expected + [-v for v in expected] + [0.0] * 4


@pytest.mark.parametrize("spread", [1.0, 1e-30, 1e30])
def test_quantize_mxfp4_matches_scalar_code(spread):
    gen = torch.Generator().manual_seed(3)
    x = (torch.randn(40, 64, generator=gen) * torch.rand(40, 1, generator=gen).exp2() * spread).bfloat16()
    packed, scales = quantize_mxfp4(x)
    for row in range(40):
        for block in range(2):
            codes, scale = scalar_mxfp4(x[row, 32 * block : 32 * block + 32].tolist())
            assert unpack(packed)[row, 32 * block : 32 * block + 32].tolist() == codes
            assert scales.view(torch.uint8)[row, block].item() == scale


def test_scalar_code_covers_zero_blocks():
    packed, scales = quantize_mxfp4(torch.zeros(1, 32, dtype=torch.bfloat16))
    assert scalar_mxfp4([0.0] * 32) == (unpack(packed)[0].tolist(), scales.view(torch.uint8)[0, 0].item())
    assert not dequantize_mxfp4(packed, scales[:1, :1]).any()


@pytest.mark.parametrize("rows", [1, 255, 256, 257, reference.CHUNK_ROWS + 1])
def test_scales_are_padded_and_the_padding_is_not_read(rows):
    x = torch.randn(rows, 1, 576, generator=torch.Generator().manual_seed(rows)).bfloat16()
    packed, scales = quantize_mxfp4(x)
    assert packed.shape == (rows, 1, 288) and packed.dtype == reference.FP4_DTYPE
    assert scales.shape == (math.ceil(rows / 256) * 256, 24) and scales.dtype == reference.E8M0_DTYPE
    assert scales.stride() == (24, 1)
    clean = dequantize_mxfp4(packed, scales)
    raw = scales.view(torch.uint8)
    raw[rows:], raw[:, 18:] = 255, 255
    assert clean.shape == x.shape
    assert_same(dequantize_mxfp4(packed, scales), clean)
    alone = dequantize_mxfp4(*quantize_mxfp4(x[-1:]))
    assert_same(clean[-1:], alone)


def test_dequantize_mxfp4_rejects_missing_scales():
    packed, scales = quantize_mxfp4(torch.ones(300, 1, 576, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"scales: expected at least \(300, 18\), got \(299, 24\)"):
        dequantize_mxfp4(packed, scales[:299])


def test_quantize_mxfp4_rejects_partial_blocks():
    with pytest.raises(ValueError, match="x: expected a last dimension divisible by 32, got 48"):
        quantize_mxfp4(torch.ones(2, 48))


def test_formats_without_torch_dtypes_are_bytes(monkeypatch):
    x = torch.randn(5, 1, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed, scales = quantize_mxfp4(x)
    monkeypatch.setattr(reference, "FP4_DTYPE", torch.uint8)
    monkeypatch.setattr(reference, "E8M0_DTYPE", torch.uint8)
    raw_packed, raw_scales = quantize_mxfp4(x)
    assert raw_packed.dtype == raw_scales.dtype == torch.uint8
    assert torch.equal(raw_packed, packed.view(torch.uint8))
    assert_same(dequantize_mxfp4(raw_packed, raw_scales), dequantize_mxfp4(packed, scales))
