"""Faults planted in the emulator: the comparison with float64 must notice each of them."""

import numpy as np
import pytest

from . import decode as decoder
from . import flash_decode, ops_convert, ops_lds, ops_mfma
from .flash_decode import decode
from .snippet import assemble

TOLERANCE = 3e-2


@pytest.fixture(autouse=True)
def _fresh_translation():
    """Translations made under a fault must not outlive it, nor healthy ones hide it."""
    flash_decode.compiled.cache_clear()
    yield
    flash_decode.compiled.cache_clear()


def fails() -> bool:
    """Whether a small decode comes out wrong or not at all."""
    try:
        result = decode(batch=1, s_kv=200, splits=1)
    except Exception:
        return True
    return not (result.error < TOLERANCE and result.lse_error < 2e-6)


def test_without_a_fault():
    assert not fails()


def test_any_eight_bytes_taken_for_a_scale_prefix(monkeypatch):
    monkeypatch.setattr(decoder, "has_scale_prefix", lambda code: True)
    assert fails()


def test_scale_prefix_overlooked(monkeypatch):
    code = assemble("v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3], v20, v21")
    assert decoder.decode(code, 0).size == 16
    monkeypatch.setattr(decoder, "has_scale_prefix", lambda code: False)
    with pytest.raises(Exception, match="no CDNA instruction|is not modelled"):
        ins = decoder.decode(code, 0)
        assert ins.size == 16 or ops_mfma.is_mfma(ins.name), f"{ins.name} is not modelled"


def wrong_row_map(matrix):
    """Accumulator registers as rows i + 4 * group instead of 4 * group + i."""
    return matrix.reshape(4, 64)[[0, 2, 1, 3]]


def test_wrong_row_map(monkeypatch):
    monkeypatch.setattr(ops_mfma, "to_registers", wrong_row_map)
    assert fails()


def test_wrong_element_order_of_fp8(monkeypatch):
    swapped = {
        name: table.view(np.float32).reshape(-1, 2)[:, ::-1].copy().view(np.uint64)[:, 0]
        for name, table in ops_mfma._PAIRS.items()
    }
    healthy = ops_mfma.decode_elements
    # Both operands alike would only permute K; the fault must hit one of them.
    calls = iter(range(1 << 30))

    def faulty(words, form):
        if form == "fp8" and next(calls) % 2:
            return swapped[form].take(words.view(np.uint16)).view(np.float32)
        return healthy(words, form)

    monkeypatch.setattr(ops_mfma, "decode_elements", faulty)
    assert fails()


def test_fp8_read_as_the_other_8_bit_format(monkeypatch):
    monkeypatch.setattr(ops_mfma, "F8F6F4", ("bf8", "fp8"))
    assert fails()


def test_transposing_read_that_does_not_transpose(monkeypatch):
    lanes, byte = np.arange(64)[:, None], np.arange(8)[None, :]
    monkeypatch.setattr(ops_lds, "_transpose_index", lambda _: (lanes + 0 * byte, byte + 0 * lanes))
    assert fails()


def test_truncating_conversion(monkeypatch):
    def truncate(form, value):
        codes = np.asarray(value).astype(ops_convert.NARROW[form])
        too_far = np.abs(codes.astype(np.float32)) > np.abs(value)
        return codes.view(np.uint8) - too_far.astype(np.uint8)

    monkeypatch.setattr(ops_convert, "encode", truncate)
    assert fails()
