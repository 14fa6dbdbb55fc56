"""The portable Triton kernel in Triton's interpreter, against the float64 oracle over the same cache.

The interpreter truncates where hardware rounds (to fp16, bf16), which costs up to about 4e-3 here; ACCURACY leaves that
room and no more. tests/test_gpu.py holds the compiled kernels to 3e-3. What only the mxfp4 cache has is in
tests/test_mxfp4.py.
"""

import pytest
import torch

import reference
from reference import relative_error
from tests import interpreted
from tests.inputs import ragged_input

ACCURACY = 5e-3
# What a kernel with tiles of 64 tokens may stumble over.
RAGGED_LENGTHS = {
    "empty, one, tile - 1, tile, tile + 1": [0, 1, 63, 64, 65],
    "mixed": [200, 3, 130, 0, 77],
    "equal": [128, 128],
}
over_both_caches = pytest.mark.parametrize("kv", ["fp8", "mxfp4"])


@pytest.fixture
def run(interpreter):
    return lambda *args, **named: interpreter(interpreted.run, *args, **named)


@over_both_caches
@pytest.mark.parametrize("splits", [1, 2, 3, 8])
@pytest.mark.parametrize("lengths", RAGGED_LENGTHS.values(), ids=RAGGED_LENGTHS)
def test_ragged_lengths_and_splits(run, lengths, splits, kv):
    data = ragged_input(lengths, seed=splits)
    output, expected = run(data, splits, kv=kv), reference.oracle(data, kv)
    for b, length in enumerate(lengths):
        if length == 0:
            assert not output[b].any(), "an empty sequence yields zeros"
        assert relative_error(output[b], expected[b]) < ACCURACY, f"sequence {b} of {length} tokens"


@over_both_caches
@pytest.mark.parametrize("block_n", [16, 32])
def test_other_tile_heights(run, block_n, kv):
    data = ragged_input([block_n - 1, block_n, block_n + 1, 3 * block_n + 5])
    assert relative_error(run(data, 2, block_n, kv=kv), reference.oracle(data, kv)) < ACCURACY


@over_both_caches
@pytest.mark.parametrize("splits", [1, 4])
def test_two_queries_are_bottom_right_causal(run, splits, kv):
    data = ragged_input([65, 1, 2, 130, 0], s_q=2)
    output, expected = run(data, splits, kv=kv), reference.oracle(data, kv)
    assert not output[2].any(), "the first of two queries over one token sees none"
    assert relative_error(output, expected) < ACCURACY


@over_both_caches
@pytest.mark.parametrize("splits", [1, 3])
def test_rows_outside_the_sequences_may_be_nan(run, splits, kv):
    """Rows 40 before and after a sequence, in its own last tile too: NaN (which the interpreter reads as 480) in fp8,
    sixes under a scale of NaN in mxfp4.
    """
    lengths, gap = [70, 64, 5], 40
    data = ragged_input(lengths)
    q, kv_data, _, kv_indptr, config = data
    expected = reference.oracle(data, kv)
    starts = [start + (b + 1) * gap for b, start in enumerate(kv_indptr[:-1].tolist())]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    rows = torch.cat([torch.arange(*bounds) for bounds in zip(starts, ends, strict=True)])

    def spread(x, filler):
        x = x.view(torch.uint8)
        poisoned = torch.full((ends[-1] + gap, *x.shape[1:]), filler, dtype=torch.uint8)
        poisoned[rows] = x[: len(rows)]
        return poisoned

    values, scale = kv_data[kv]
    if kv == "fp8":
        cache = spread(values, 0x7F).view(values.dtype), scale
    else:
        cache = spread(values, 0x77), spread(scale, 0xFF)
        cache[1][:, 18:] = 0xFF  # and so is the padding of its rows
    # One indptr has no gaps, so each sequence runs alone.
    for b, bounds in enumerate(zip(starts, ends, strict=True)):
        alone = (q[b : b + 1], {kv: cache}, None, torch.tensor(bounds, dtype=torch.int32), config)
        assert relative_error(run(alone, splits, kv=kv)[0], expected[b]) < ACCURACY


def test_strided_q_and_cache(run):
    data = ragged_input([100, 37])
    q, kv_data, qo_indptr, kv_indptr, config = data
    expected = reference.oracle(data, "fp8")
    wide_q = torch.full((2, 20, 640), float("nan"), dtype=torch.bfloat16)
    wide_q[:, 2:18, 32:608] = q
    wide_kv = torch.full((137, 1, 640), float("nan")).to(torch.float8_e4m3fn)
    wide_kv.view(torch.uint8)[:, :, 64:] = kv_data["fp8"][0].view(torch.uint8)
    strided = (
        wide_q[:, 2:18, 32:608],
        {**kv_data, "fp8": (wide_kv[:, :, 64:], kv_data["fp8"][1])},
        qo_indptr,
        kv_indptr,
        config,
    )
    assert relative_error(run(strided, 2), expected) < ACCURACY


@pytest.mark.parametrize("q_factor", [10.0, 2.0**-60, 2.0**60])
def test_q_of_any_size(run, q_factor):
    """2^60 and 2^-60 are far outside fp16, in which Q is multiplied after its power-of-two scale."""
    data = ragged_input([100, 64], q_factor=q_factor)
    assert relative_error(run(data, 2), reference.oracle(data, "fp8")) < ACCURACY


def test_a_cache_beyond_two_gibibytes(interpreter):
    data = ragged_input([100])
    output = interpreter(interpreted.run_far, data, 2, 1 << 25)
    assert relative_error(output, reference.oracle(data, "fp8")) < ACCURACY


def test_an_empty_splits_partial_is_never_used(interpreter):
    part = torch.randn(2, 3, 16, 512, generator=torch.Generator().manual_seed(0)).half()
    lse = torch.zeros(2, 3, 16)
    lse[:, 1], lse[1] = float("-inf"), float("-inf")
    expected = part[0, ::2].float().mean(0)
    part[:, 1], part[1] = float("nan"), float("nan")
    output = interpreter(interpreted.combine, part, lse, torch.ones(1))
    assert relative_error(output[0], expected) < ACCURACY
    assert not output[1].any(), "no token at all yields zeros"


def test_custom_kernel_reaches_the_portable_arm(interpreter):
    data = ragged_input([100, 64])
    output, selection = interpreter(interpreted.call, data, "triton_fp8")
    assert (selection.arm, selection.kv) == ("triton_fp8", "fp8")
    assert relative_error(output, reference.oracle(data, "fp8")) < ACCURACY


def test_a_dropped_partial_is_seen(run):
    """Negative control: the combine without the last split is far outside ACCURACY."""
    data = ragged_input([256])
    q, kv_data, _, kv_indptr, config = data
    output = run(data, 4)
    shortened = (q, kv_data, None, torch.tensor([0, 192], dtype=torch.int32), config)
    assert relative_error(run(shortened, 4), output) > 50 * ACCURACY
