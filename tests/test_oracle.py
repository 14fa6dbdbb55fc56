"""The oracle against an independent float64 loop, and the reference kernel; its AITER call: test_aiter_arms.py."""

import math

import numpy as np
import pytest
import torch

import reference
from reference import generate_input, oracle, ref_kernel
from tests.test_formats import e2m1_value, e4m3_value, e8m0_value

FORMATS = ["bf16", "fp8", "mxfp4"]


def ragged(lengths: list[int], s_q: int = 1, seed: int = 0):
    """A case whose sequence `i` has `lengths[i]` tokens; one row of the cache before and some after are unused."""
    q, kv_data, qo_indptr, _, config = generate_input(len(lengths), s_q, max(1, *lengths) + 2, seed)
    kv_indptr = torch.tensor([1] + lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(q.device)
    return q, kv_data, qo_indptr, kv_indptr, config


def plain_cache(kv_data: dict, kv: str) -> np.ndarray:
    """float64 (tokens, 576), decoded byte by byte from the formats' definitions."""
    if kv == "bf16":
        return kv_data["bf16"].double().flatten(1).cpu().numpy()
    if kv == "fp8":
        cache, scale = kv_data["fp8"]
        values = np.array([e4m3_value(c) for c in range(256)])
        return values[cache.view(torch.uint8).flatten(1).cpu().numpy()] * scale.item()
    packed, scales = (x.view(torch.uint8).cpu().numpy() for x in kv_data["mxfp4"])
    packed = packed.reshape(len(packed), 288)
    values = np.array([e2m1_value(c) for c in range(16)])
    powers = np.array([e8m0_value(c) for c in range(256)])
    out = np.empty((len(packed), 576))
    for dim in range(576):
        nibble = packed[:, dim // 2] >> 4 if dim % 2 else packed[:, dim // 2] & 15
        out[:, dim] = values[nibble] * powers[scales[: len(packed), dim // 32]]
    return out


def plain_attention(data, kv: str) -> np.ndarray:
    """float64 (total_q, 16, 512), one row at a time."""
    q, kv_data, qo_indptr, kv_indptr, config = data
    cache, queries = plain_cache(kv_data, kv), q.double().cpu().numpy()
    out = np.zeros((len(queries), 16, 512))
    for b in range(config["batch_size"]):
        q_start, q_stop = qo_indptr[b].item(), qo_indptr[b + 1].item()
        start, stop = kv_indptr[b].item(), kv_indptr[b + 1].item()
        for row in range(q_start, q_stop):
            keys = cache[start : max(start, stop - (q_stop - 1 - row))]
            for head in range(16):
                if len(keys):
                    scores = keys @ queries[row, head] / 24
                    p = np.exp(scores - scores.max())
                    out[row, head] = p @ keys[:, :512] / p.sum()
    return out


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize(("lengths", "s_q"), [([0, 1, 63, 64, 65, 0, 130], 1), ([0, 1, 2, 64, 7], 2), ([3, 40], 4)])
def test_oracle_matches_a_plain_loop(kv, lengths, s_q):
    data = ragged(lengths, s_q)
    actual = oracle(data, kv)
    assert actual.dtype == torch.float64 and actual.shape == (len(lengths) * s_q, 16, 512)
    np.testing.assert_allclose(actual.cpu().numpy(), plain_attention(data, kv), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kv", FORMATS)
def test_oracle_is_the_same_over_several_chunks(kv):
    size = reference.CHUNK_ROWS
    data = ragged([size - 1, 2 * size + 5, size], s_q=2)
    np.testing.assert_allclose(oracle(data, kv).cpu().numpy(), plain_attention(data, kv), rtol=0, atol=1e-6)


def test_oracle_defaults_to_the_bf16_cache():
    data = ragged([30])
    assert torch.equal(oracle(data), oracle(data, "bf16"))


def test_empty_sequences_and_blind_queries_are_zero():
    out = oracle(ragged([0, 5, 1], s_q=2))
    assert not out[[0, 1, 4]].any()
    assert out[[2, 3, 5]].flatten(1).any(dim=1).all()


def test_rows_outside_every_sequence_are_not_read():
    data = ragged([5, 0, 9])
    q, kv_data, qo_indptr, kv_indptr, config = data
    clean = {kv: oracle(data, kv) for kv in FORMATS}
    for i in (slice(0, 1), slice(kv_indptr[-1].item(), None)):
        kv_data["bf16"][i] = math.nan
        kv_data["fp8"][0].view(torch.uint8)[i] = 0x7F
        kv_data["mxfp4"][1].view(torch.uint8)[i] = 255
    for kv in FORMATS:
        assert torch.equal(oracle(data, kv), clean[kv])


def test_strides_of_q_and_cache_are_respected():
    q, kv_data, qo_indptr, kv_indptr, config = data = ragged([20, 31])
    wide_q = torch.full((*q.shape[:2], 600), math.nan, dtype=q.dtype, device=q.device)
    wide_q[..., 8:584] = q
    wide_kv = torch.full((len(kv_data["bf16"]), 2, 576), math.nan, dtype=q.dtype, device=q.device)
    wide_kv[:, :1] = kv_data["bf16"]
    strided = (wide_q[..., 8:584], {**kv_data, "bf16": wide_kv[:, :1]}, qo_indptr, kv_indptr, config)
    assert torch.equal(oracle(strided), oracle(data))


def test_bad_arguments_are_named():
    q, kv_data, qo_indptr, kv_indptr, config = data = ragged([20, 31])
    with pytest.raises(ValueError, match="kv: expected one of bf16, fp8, mxfp4, got 'int4'"):
        oracle(data, "int4")
    with pytest.raises(ValueError, match=r"q: expected shape \(2, 16, 576\), got \(1, 16, 576\)"):
        oracle((q[:1], kv_data, qo_indptr, kv_indptr, config))
    with pytest.raises(ValueError, match=r"kv_indptr: expected shape \(3,\), got \(2,\)"):
        oracle((q, kv_data, qo_indptr, kv_indptr[:2], config))
    for bounds in ([0, 9, 5], [-1, 3, 5], [0, 3, 10_000]):
        broken = torch.tensor(bounds, dtype=torch.int32, device=q.device)
        with pytest.raises(ValueError, match="kv_indptr: expected non-decreasing offsets within 66 cached tokens"):
            oracle((q, kv_data, qo_indptr, broken, config))


# ----- reference kernel


@pytest.mark.parametrize(("lengths", "s_q"), [([0, 1, 64, 300], 1), ([5, 0, 33], 2)])
def test_ref_kernel_is_attention_with_fp8_q_over_the_fp8_cache(lengths, s_q):
    q, kv_data, qo_indptr, kv_indptr, config = data = ragged(lengths, s_q)
    fp8_q = reference.dequantize_fp8(*reference.quantize_fp8(q))
    expected = plain_attention((fp8_q, kv_data, qo_indptr, kv_indptr, config), "fp8")
    actual = ref_kernel(data)
    assert actual.dtype == torch.bfloat16
    np.testing.assert_allclose(actual.double().cpu().numpy(), expected, rtol=2**-8, atol=1e-5)
