"""The mxfp4 kernels, executed instruction by instruction, against float64 over the same dequantised cache."""

import functools
from collections import Counter

import pytest
import torch
from typer.testing import CliRunner

import reference
import submission
from bench import gfx950, mxfp4_gfx950
from bench.console import tool_app
from bench.gfx950 import resources
from reference import relative_error
from submission import LOG2E, Config
from task import BENCHMARKS
from tests.inputs import ragged_input
from tests.test_compile import MXFP4

from . import OutOfBounds, TritonKernel
from .kernels import pretend_mi355x, taken, unexpected, with_fault

pytestmark = pytest.mark.usefixtures("no_gpu")
KERNEL_ERROR = 3e-3


@functools.cache
def portable(splits: int) -> TritonKernel:
    config = Config("triton_mxfp4")
    constexprs = {"SPLITS": splits, "BLOCK_N": config.block_n, "stride_scale_t": 24}
    names = submission._decode.arg_names
    types = {name: MXFP4[name] for name in names if name not in constexprs}
    aligned = [i for i, n in enumerate(names) if types.get(n, "")[:1] == "*" or n in types and n[:6] == "stride"]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
    return TritonKernel.compile(submission._decode, types, constexprs, attrs, num_warps=config.num_warps)


def cache_of(data):
    """The mxfp4 cache as uint8 and without a byte to spare: a read past it is out of bounds."""
    packed, scales = (x.view(torch.uint8) for x in data[1]["mxfp4"])
    rows = packed.shape[0]
    exact = torch.empty(rows * 24 - 6, dtype=torch.uint8)
    exact.as_strided((rows, 18), (24, 1)).copy_(scales[:rows, :18])
    return packed[:, 0].clone(), exact


def run_portable(data, splits: int, **options):
    """Output (total_q, 16, 512), partials merged in float64; checks that nothing is read out of bounds or unwritten."""
    q, _, _, kv_indptr, config = data
    packed, scales = cache_of(data)
    out = torch.full((q.shape[0], 16, 512), torch.nan, dtype=torch.bfloat16)
    part = torch.full((q.shape[0], splits, 16, 512), torch.nan)
    lse = torch.full((q.shape[0], splits, 16), torch.nan)
    inputs = {"q_ptr": q, "kv_ptr": packed, "scale_ptr": scales, "kv_indptr": kv_indptr}
    scalars = {
        "softmax_scale": config["sm_scale"] * LOG2E, "s_q": config["q_seq_len"], "stride_q_t": q.stride(0),
        "stride_q_h": q.stride(1), "stride_kv_t": packed.stride(0),
    }  # fmt: skip
    outputs = {"out_ptr": out, "part_ptr": part, "lse_ptr": lse}
    run = portable(splits).launch((splits, q.shape[0]), inputs | scalars | outputs, read_only=tuple(inputs), **options)
    assert not run.findings
    return out if splits == 1 else merged(part, lse)


def merged(part: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The partials of each query row weighed by 2^lse, in float64."""
    weights = torch.exp2(lse.double() - torch.logsumexp(lse.double() / LOG2E, 1, keepdim=True) * LOG2E)
    return (torch.where(lse.isneginf()[..., None], 0.0, part.double()) * weights.nan_to_num()[..., None]).sum(1)


@pytest.mark.parametrize("splits", [1, 3])
def test_portable_kernel(splits):
    data = ragged_input([65, 0, 31], seed=5)
    output, expected = run_portable(data, splits), reference.oracle(data, "mxfp4")
    assert not output[1].any()
    assert relative_error(output, expected) < KERNEL_ERROR


def test_portable_kernel_sees_nan_and_keeps_it_in_its_sequence():
    data = ragged_input([40, 33])
    data[1]["mxfp4"][1].view(torch.uint8)[39, 7] = 255
    output, expected = run_portable(data, 2), reference.oracle(data, "mxfp4")
    assert output[0].isnan().all()
    assert relative_error(output[1], expected[1]) < KERNEL_ERROR


# ---- the Gluon kernel


def run_gluon(data, splits: int, one_launch: bool = False, module=submission, ticket=None, first_row=0, **options):
    """Output (total_q, 16, 512); two launches' partials are merged in float64.

    Rows are 304 and 28 bytes apart, the first at `first_row`; what lies between is NaN.
    """
    q, kv_data, _, kv_indptr, config = data
    rows = kv_data["mxfp4"][0].shape[0]
    # Never written before `first_row`, so the system hands out no memory for it.
    packed, scales = (torch.empty(first_row + rows, width, dtype=torch.uint8) for width in (304, 28))
    packed[first_row:] = 0x77
    scales[first_row:] = 255
    packed[first_row:, :288] = kv_data["mxfp4"][0].view(torch.uint8)[:, 0]
    scales[first_row:, :18] = kv_data["mxfp4"][1].view(torch.uint8)[:rows, :18]
    words, kv_indptr = scales.view(torch.int32), kv_indptr + first_row
    out = torch.full((q.shape[0], 16, 512), torch.nan, dtype=torch.bfloat16)
    part = torch.full((q.shape[0], splits, 16, 512), torch.nan)
    lse = torch.full((q.shape[0], splits, 16), torch.nan)
    ticket = torch.zeros(q.shape[0], dtype=torch.int32) if ticket is None else ticket
    inputs = {"q_ptr": q, "kv_ptr": packed, "scale_ptr": words, "kv_indptr": kv_indptr}
    scalars = {
        "softmax_scale": config["sm_scale"] * LOG2E, "s_q": config["q_seq_len"], "stride_q_t": q.stride(0),
        "stride_q_h": q.stride(1), "stride_kv_t": packed.stride(0), "stride_scale_t": words.stride(0),
    }  # fmt: skip
    outputs = {"out_ptr": out, "part_ptr": part, "lse_ptr": lse, "ticket_ptr": ticket}
    kernel = TritonKernel(mxfp4_gfx950.compile_decode(splits, one_launch, module, config["q_seq_len"]))
    arguments = taken(kernel, inputs | scalars | outputs)
    run = kernel.launch((q.shape[0], splits), arguments, read_only=tuple(inputs), **options)
    assert module is not submission or unexpected(run) == []
    return out if splits == 1 or one_launch else merged(part, lse)


@pytest.mark.parametrize("splits", [1, 2])
def test_lengths_around_a_tile(splits):
    """Starts are odd rows; waves of a last tile have 32, some and no rows; up to four tiles."""
    data = ragged_input([127, 1, 0, 129, 2 * 128 + 31, 4 * 128 if splits == 1 else 33])
    output, expected = run_gluon(data, splits), reference.oracle(data, "mxfp4")
    assert not output[2].any()
    for b in range(len(expected)):
        assert relative_error(output[b], expected[b]) < KERNEL_ERROR, f"sequence {b}"


def test_several_queries_are_bottom_right_causal():
    data = ragged_input([66, 2, 0], s_q=3)
    output = run_gluon(data, 1)
    assert not output[[3, 6, 7, 8]].any()
    assert relative_error(output, reference.oracle(data, "mxfp4")) < KERNEL_ERROR


def test_sequence_beyond_two_gibibytes():
    data = ragged_input([150])
    output = run_gluon(data, 2, first_row=2**31 // 304 + 1000)
    assert relative_error(output, reference.oracle(data, "mxfp4")) < KERNEL_ERROR


def test_loads_may_land_late():
    data = ragged_input([4 * 128 + 7])
    early = run_gluon(data, 1)
    for late in ("late", "random"):
        assert torch.equal(run_gluon(data, 1, late_loads=late, seed=4, quantum=3), early)


def test_one_launch_whatever_the_order_of_programs():
    data, ticket = ragged_input([300, 0]), torch.zeros(2, dtype=torch.int32)
    outputs = [
        run_gluon(data, 3, True, ticket=ticket, order=order, concurrent=0, quantum=500, late_loads="late", caches=True)
        for order in ("ascending", "descending")
    ]
    assert torch.equal(*outputs) and not ticket.any()
    assert relative_error(outputs[0], reference.oracle(data, "mxfp4")) < KERNEL_ERROR


@pytest.mark.parametrize("block", [2, 17])
def test_a_scale_of_nan_surfaces_in_its_sequence_alone(block):
    data = ragged_input([37, 60, 41])
    data[1]["mxfp4"][1].view(torch.uint8)[37 + 5, block] = 255
    output, expected = run_gluon(data, 1), reference.oracle(data, "mxfp4")
    assert output[1].isnan().all()
    for b in (0, 2):
        assert relative_error(output[b], expected[b]) < KERNEL_ERROR


def scaled(data, octaves: torch.Tensor):
    """The case with the latent scales of its cache moved by `octaves`, and Q's latent part zero: its logits stay."""
    scales, rows = data[1]["mxfp4"][1].view(torch.uint8), data[1]["mxfp4"][0].shape[0]
    scales[:rows, :16] = (scales[:rows, :16].int() + octaves).to(torch.uint8)
    data[0][..., :512] = 0
    return data


def each_block_close(data) -> bool:
    output = run_gluon(data, 1).unflatten(2, (16, 32))
    expected = reference.oracle(data, "mxfp4").unflatten(2, (16, 32))
    return all(relative_error(output[:, :, b], expected[:, :, b]) < KERNEL_ERROR for b in range(16))


def test_scales_over_many_octaves_stay_exact():
    """Latent blocks 120 octaves apart: exact in V, and in K where Q, one power of two a head, keeps its 20 bits."""
    assert each_block_close(scaled(ragged_input([150]), torch.linspace(-60, 60, 16).round().int()))


def test_few_large_weights_are_rounded_in_the_sum_as_in_the_products():
    """Of queries six times larger a few weights make the output: summed unrounded they would miss the strict check."""
    q, *rest = case_of(300)
    data = ((6 * q).bfloat16(), *rest)
    output = run_gluon(data, 1)
    assert relative_error(output, reference.oracle(data, "mxfp4")) < 2e-3
    assert reference.strict_check(data, output, "mxfp4").passed


# ---- P = 2^logit without a running maximum


def one_try(folder):
    """The kernel without its second try."""
    return with_fault(folder, "    tries = 2\n", "    tries = 1\n")


@pytest.mark.parametrize("q_factor, again", [(6.0, False), (60.0, True)])
def test_larger_queries(q_factor, again, tmp_path):
    """Logits of some hundred octaves leave float32: only the second try, relative to the maxima, gets them right."""
    data = ragged_input([300], q_factor=q_factor)
    expected = reference.oracle(data, "mxfp4")
    assert relative_error(run_gluon(data, 2), expected) < KERNEL_ERROR
    assert (not relative_error(run_gluon(data, 2, module=one_try(tmp_path)), expected) < KERNEL_ERROR) == again


def test_logits_far_below_zero(tmp_path):
    """All logits at about -200: without a second try every P would vanish."""
    data = ragged_input([150])
    q, (packed, scales) = data[0], data[1]["mxfp4"]
    packed.view(torch.uint8)[:] = 0x22  # every value 1 ..
    scales.view(torch.uint8)[:] = 127
    packed.view(torch.uint8)[:, :, 0] = torch.arange(150, dtype=torch.uint8)[:, None]  # .. but of a token's first two
    q.fill_(-200.0 / 576 / data[4]["sm_scale"] / LOG2E)
    expected = reference.oracle(data, "mxfp4")
    assert relative_error(run_gluon(data, 1), expected) < KERNEL_ERROR
    assert not relative_error(run_gluon(data, 1, module=one_try(tmp_path)), expected) < KERNEL_ERROR


def test_values_and_weights_that_together_leave_float32(tmp_path):
    """V of 2^100 and P up to 2^35: the sums would be infinite, the output is not."""
    data = scaled(ragged_input([150], q_factor=15.0), torch.full((16,), 100))
    assert each_block_close(data)
    output = run_gluon(data, 1, module=one_try(tmp_path))
    assert not output.isfinite().all()


# ---- what must show


def case_of(length: int):
    """One sequence as the reference draws it."""
    return reference.generate_input(1, 1, length, seed=950)


FAULTS = {
    "neighbour's scale in K": ("(words >> (8 * c))", "(words >> (8 * (c ^ 1)))"),
    "neighbour's scale in V": ("scales.store(words.", "scales.store((words >> 8)."),
    "swapped nibbles": ("16 * (e % 2)", "16 * (1 - e % 2)"),
    "scale stride 18": ("(stride_scale_t, last)[:, :, None]", "(18, last)[:, :, None] // 4"),
    "dropped chunk of blocks": ("gl.static_range(4):\n        scale", "gl.static_range(3):\n        scale"),
    "dropped tile": ("range(n_tiles):", "range(n_tiles - 1):"),
    "tile in the place of its successor": ("if left > 128:", "if left > 256:"),
    "rope without Q's low half": ("slice(64, 64, 1).store(qr_lo)", "slice(64, 64, 1).store(qr_hi)"),
    "no mask": ("(x, left)\n    p = ", "(x, 128)\n    p = "),
}


def test_without_a_fault():
    data = case_of(450)
    output = run_gluon(data, 1)
    assert relative_error(output, reference.oracle(data, "mxfp4")) < KERNEL_ERROR
    assert reference.strict_check(data, output, "mxfp4").passed


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault, tmp_path):
    """In the error, and in the strict check of the output."""
    data = case_of(450)
    output = run_gluon(data, 1, module=with_fault(tmp_path, *FAULTS[fault]), late_loads="late")
    assert not relative_error(output, reference.oracle(data, "mxfp4")) < 3 * KERNEL_ERROR
    assert not reference.strict_check(data, output, "mxfp4").passed


def test_a_load_past_the_cache_is_caught(tmp_path):
    module = with_fault(tmp_path, "last = gl.minimum(left, 128) - 1\n    rows", "last = 127\n    rows")
    with pytest.raises(OutOfBounds):
        run_gluon(ragged_input([300]), 1, module=module)


@pytest.mark.parametrize(
    "splits, one_launch, s_q", [(1, False, 1), (2, False, 1), (2, False, 2), (4, True, 1), (8, True, 1)]
)
def test_budget(splits, one_launch, s_q):
    r = resources(mxfp4_gfx950.compile_decode(splits, one_launch, s_q=s_q))
    assert (r.spills, r.scratch_bytes) == (0, 0)
    assert r.waves_per_cu >= mxfp4_gfx950.WAVES and r.lds_bytes <= 160 * 1024
    loop = mxfp4_gfx950.examine(splits, one_launch, s_q)
    executed = Counter()
    for instruction, count in loop.executed.items():
        executed[instruction.split()[0]] += count
    # Per wave and 32 tokens: two blocks of 16 tokens, four chunks of 128 dims by two halves of Q, and rope's one.
    assert executed["v_mfma_scale_f32_16x16x128_f8f6f4"] == 2 * (4 * 2 + 1)
    assert executed["v_mfma_f32_16x16x32_bf16"] == 512 // 16
    # Two values each, V once; nothing else of the cache is converted.
    assert executed["v_cvt_scalef32_pk_bf16_fp4"] == 32 * 512 // 64 // 2
    # Rope comes twice; a lane's words of scales are loads of their own.
    assert executed["buffer_load_dwordx4"] * 64 * 16 == 32 * (256 + 2 * 32)
    assert executed["buffer_load_dword"] == 4
    # The 128 accumulators stay in AGPRs; what moves are the scores of 32 tokens, 8 registers, and a few of others.
    assert executed["v_accvgpr_write_b32"] + executed["v_accvgpr_read_b32"] <= 4 * 8
    assert executed["s_barrier"] <= 4
    # All units in turn: less than memory takes.
    assert sum(loop.clocks_per_64().values()) <= 1800


def test_predicted_beside_fp8():
    for batch_size, kv_seq_len in ((32, 8192), (64, 8192), (256, 1024), (256, 8192)):
        fp8 = gfx950.predict(batch_size, kv_seq_len, gfx950.candidates(batch_size, kv_seq_len)[0]).time_us
        config = mxfp4_gfx950.config_of(batch_size, kv_seq_len)
        assert mxfp4_gfx950.predict(batch_size, kv_seq_len, config)[2] <= 0.75 * fp8


def test_report():
    result = CliRunner().invoke(tool_app(mxfp4_gfx950.main))
    assert result.exit_code == 0, result.output
    assert "never run on a card" in result.output
    assert all("{batchsize}x{kvseqlen}".format(**case) in result.output for case in BENCHMARKS)


# ---- the dispatch


DTYPES = [
    pytest.param(packed, scales, id=f"{packed}-{scales}")
    for packed in ("uint8", "float4_e2m1fn_x2")
    for scales in ("uint8", "float8_e8m0fnu")
]


@pytest.mark.parametrize("packed, scales", DTYPES)
@pytest.mark.parametrize("one_launch", [False, True])
def test_submission_proves_and_launches_it(packed, scales, one_launch, monkeypatch):
    """`custom_kernel` on a pretended MI355X whose launches run in the emulator, the cache in every dtype."""
    config = Config("gfx950_mxfp4", 2, 128, 4, one_launch=one_launch)
    kernels = pretend_mi355x(monkeypatch, config)
    q, kv_data, qo_indptr, kv_indptr, sizes = case_of(140)
    values, codes = (x.view(torch.uint8) for x in kv_data["mxfp4"])
    mxfp4 = values.view(getattr(torch, packed)), codes.view(getattr(torch, scales))
    data = (q, {**kv_data, "mxfp4": mxfp4}, qo_indptr, kv_indptr, sizes)
    out = submission.custom_kernel(data)
    assert (submission.last_run().arm, submission.last_run().kv) == ("gfx950_mxfp4", "mxfp4")
    assert reference.strict_check(data, out, "mxfp4").passed
    # Twice for the proof, once for the call.
    assert kernels["_decode_mxfp4_gfx950"].launches == 3
    assert kernels["_combine"].launches == (0 if one_launch else 3)
