"""Inputs that `reference.generate_input` does not draw: sequences of different lengths, larger queries."""

import torch

import reference
from reference import relative_error
from task import NUM_HEADS, QK_HEAD_DIM

# What a kernel with tiles of 64 tokens may stumble over.
RAGGED_LENGTHS = {
    "empty, one, tile - 1, tile, tile + 1": [0, 1, 63, 64, 65],
    "mixed": [200, 3, 130, 0, 77],
    "equal": [128, 128],
}


def ragged_input(lengths, s_q=1, seed=0, q_factor=1.0, kv_seq_len=None, device="cpu"):
    """A case with `lengths[b]` cached tokens in sequence b; q is standard normal times `q_factor`."""
    generator = torch.Generator(device=device).manual_seed(seed)
    b, total_kv = len(lengths), sum(lengths)
    q = torch.randn(b * s_q, NUM_HEADS, QK_HEAD_DIM, generator=generator, device=device) * q_factor
    kv = torch.randn(total_kv, 1, QK_HEAD_DIM, generator=generator, device=device).bfloat16()
    if total_kv:
        fp8, mxfp4 = reference.quantize_fp8(kv), reference.quantize_mxfp4(kv)
    else:
        fp8 = kv.to(torch.float8_e4m3fn), torch.ones(1, device=device)
        mxfp4 = (
            torch.empty(0, 1, QK_HEAD_DIM // 2, dtype=torch.uint8, device=device),
            torch.empty(0, 24, dtype=torch.uint8, device=device),
        )
    config = reference.case_config(b, s_q, max(lengths) if kv_seq_len is None else kv_seq_len)
    kv_indptr = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32).to(device)
    qo_indptr = torch.arange(b + 1, dtype=torch.int32, device=device) * s_q
    return q.bfloat16(), {"bf16": kv, "fp8": fp8, "mxfp4": mxfp4}, qo_indptr, kv_indptr, config


def assert_each_sequence_close(output, data, kv, accuracy):
    """Each sequence by itself against the oracle over the cache `kv`; one query a sequence."""
    expected = reference.oracle(data, kv)
    for b, length in enumerate(data[3].diff().tolist()):
        if length == 0:
            assert not output[b].any(), "an empty sequence yields zeros"
        assert relative_error(output[b], expected[b]) < accuracy, f"sequence {b} of {length} tokens"


def check_tile_height(run, block_n, kv, accuracy):
    """`run(data, splits, block_n)` on lengths around a tile, against the oracle over the cache `kv`."""
    data = ragged_input([block_n - 1, block_n, block_n + 1, 3 * block_n + 5])
    assert relative_error(run(data, 2, block_n), reference.oracle(data, kv)) < accuracy


def check_rows_outside(run, splits, spread, kv, accuracy):
    """`run(data, splits)` on one sequence after the other, in a cache that holds them 40 rows of NaN apart.

    `spread(data, rows, total)` makes this cache: the rows of `data`'s at `rows` of `total`.
    """
    lengths, gap = [70, 64, 5], 40
    data = ragged_input(lengths)
    q, _, _, kv_indptr, config = data
    expected = reference.oracle(data, kv)
    starts = [start + (b + 1) * gap for b, start in enumerate(kv_indptr[:-1].tolist())]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    rows = torch.cat([torch.arange(*bounds) for bounds in zip(starts, ends, strict=True)])
    cache = spread(data, rows, ends[-1] + gap)
    # One indptr has no gaps, so each sequence runs alone.
    for b, bounds in enumerate(zip(starts, ends, strict=True)):
        alone = (q[b : b + 1], {kv: cache}, None, torch.tensor(bounds, dtype=torch.int32), config)
        assert relative_error(run(alone, splits)[0], expected[b]) < accuracy


def check_two_queries(run, splits, kv, accuracy):
    """`run(data, splits)` with two queries a sequence, bottom-right causal, against the oracle over the cache `kv`."""
    data = ragged_input([65, 1, 2, 130, 0], s_q=2)
    output, expected = run(data, splits), reference.oracle(data, kv)
    assert not output[2].any(), "the first of two queries over one token sees none"
    assert relative_error(output, expected) < accuracy
