"""The portable Triton kernels in Triton's interpreter, against the float64 oracle over the same fp8 cache.

The interpreter truncates where hardware rounds (to fp16, bf16), which costs up to about 4e-3 here; ACCURACY leaves that
room and no more. tests/test_gpu.py holds the compiled kernels to 3e-3.
"""

import pytest
import torch

import reference
from reference import relative_error
from tests import interpreted
from tests.inputs import (
    RAGGED_LENGTHS,
    assert_each_sequence_close,
    check_rows_outside,
    check_tile_height,
    check_two_queries,
    ragged_input,
)

ACCURACY = 5e-3


@pytest.fixture(scope="module")
def interpreter():
    with interpreted.interpreter() as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.fixture
def run(interpreter):
    return lambda *args: interpreter(interpreted.run, *args)


@pytest.mark.parametrize("splits", [1, 2, 3, 8])
@pytest.mark.parametrize("lengths", RAGGED_LENGTHS.values(), ids=RAGGED_LENGTHS)
def test_ragged_lengths_and_splits(run, lengths, splits):
    data = ragged_input(lengths, seed=splits)
    assert_each_sequence_close(run(data, splits), data, "fp8", ACCURACY)


@pytest.mark.parametrize("block_n", [16, 32])
def test_other_tile_heights(run, block_n):
    check_tile_height(run, block_n, "fp8", ACCURACY)


@pytest.mark.parametrize("splits", [1, 4])
def test_two_queries_are_bottom_right_causal(run, splits):
    check_two_queries(run, splits, "fp8", ACCURACY)


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_outside_the_sequences_may_be_nan(run, splits):
    """Rows before and after a sequence, in its own last tile too, are NaN (which the interpreter reads as 480)."""

    def spread(data, rows, total):
        kv, kv_scale = data[1]["fp8"]
        poisoned = torch.full((total, 1, 576), float("nan")).to(kv.dtype)
        poisoned.view(torch.uint8)[rows] = kv.view(torch.uint8)
        return poisoned, kv_scale

    check_rows_outside(run, splits, spread, "fp8", ACCURACY)


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
