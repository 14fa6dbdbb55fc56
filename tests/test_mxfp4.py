"""What the mxfp4 cache adds to tests/test_kernels.py: its codes, its negative controls, its policy, its arms.

The interpreter truncates where hardware rounds, P and the output: ACCURACY leaves room for that. The partials, which
are float32, and the kernel on a GPU are held to KERNEL_ERROR.
"""

import math

import pytest
import torch
from typer.testing import CliRunner

import reference
import submission
from bench import mxfp4_policy
from bench.console import tool_app
from reference import relative_error
from submission import ARMS, Config, problem_of
from task import BENCHMARKS, QK_HEAD_DIM
from tests import interpreted
from tests.inputs import ragged_input

ACCURACY = 5e-3
KERNEL_ERROR = 3e-3
BLOCKS = QK_HEAD_DIM // reference.MXFP4_BLOCK


@pytest.fixture
def run(interpreter):
    return lambda *args: interpreter(interpreted.run, *args, kv="mxfp4")


def with_cache(data, packed, scales):
    """The case with another mxfp4 cache, uint8 (total_kv, 1, 288) and (rows, columns)."""
    q, kv_data, qo_indptr, kv_indptr, config = data
    return q, {**kv_data, "mxfp4": (packed, scales)}, qo_indptr, kv_indptr, config


def codes_of(data):
    """The mxfp4 cache of a case as uint8, its scales without their padding: (total_kv, 1, 288), (total_kv, 18)."""
    packed, scales = (x.view(torch.uint8) for x in data[1]["mxfp4"])
    return packed.clone(), scales[: packed.shape[0], :BLOCKS].clone()


@pytest.mark.parametrize("q_factor", [1.0, 6.0])
def test_partials_combined_in_float64_are_within_the_kernel_error(run, q_factor):
    data = ragged_input([700, 65], q_factor=q_factor)
    part, lse = run(data, 3, 64, False)
    empty = lse.isneginf()
    weights = torch.softmax(lse.double() * math.log(2), 1)
    output = (torch.where(empty[..., None], 0.0, part.double()) * weights[..., None]).sum(1)
    assert relative_error(output, reference.oracle(data, "mxfp4")) < KERNEL_ERROR


@pytest.mark.parametrize("columns", [18, 24, 25, 32])
def test_strided_q_cache_and_scales(run, columns):
    data = ragged_input([100, 37])
    expected = reference.oracle(data, "mxfp4")
    packed, scales = codes_of(data)
    wide_q = torch.full((2, 20, 640), float("nan"), dtype=torch.bfloat16)
    wide_q[:, 2:18, 32:608] = data[0]
    wide_packed = torch.full((137, 1, 304), 0x77, dtype=torch.uint8)
    wide_packed[:, :, 16:] = packed
    wide_scales = torch.full((137, columns), 255, dtype=torch.uint8)
    wide_scales[:, columns - BLOCKS :] = scales
    strided = with_cache(data, wide_packed[:, :, 16:], wide_scales[:, columns - BLOCKS :])
    assert relative_error(run((wide_q[:, 2:18, 32:608], *strided[1:]), 2), expected) < ACCURACY


# ---- the format


def test_every_code_under_every_scale_is_exact(interpreter):
    """All 16 x 256, as low and as high nibble; scale 255 makes every code NaN, zero included."""
    nibbles = torch.arange(16, dtype=torch.uint8)
    packed = (nibbles | nibbles.flip(0) << 4).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    values = interpreter(interpreted.decode_mxfp4, packed, scales)
    assert torch.equal(values.float()[:255], reference.dequantize_mxfp4(packed, scales)[:255])
    assert values[255].isnan().all()


def test_one_token_is_its_own_output(run):
    """With q = 0 and one token the output is that token's values, bit for bit, under every scale that bf16 holds."""
    data = ragged_input([1] * 16)
    data[0].zero_()
    packed, scales = codes_of(data)
    scales[:, :16] = torch.arange(256, dtype=torch.uint8).clamp_(max=252).view(16, 16)
    data = with_cache(data, packed, scales)
    expected = reference.dequantize_mxfp4(packed[:, 0], scales)[:, None, :512].expand(-1, 16, -1)
    # The interpreter loses denormals when it narrows the output.
    normal = expected.abs() >= torch.finfo(torch.bfloat16).tiny
    output = run(data, 1).float()
    assert torch.equal(output[normal], expected[normal]) and normal.double().mean() > 0.8


@pytest.mark.parametrize("block", [3, 17])
@pytest.mark.parametrize("splits", [1, 2])
def test_a_scale_of_nan_surfaces_in_its_sequence_alone(run, block, splits):
    data = ragged_input([100, 70, 64])
    packed, scales = codes_of(data)
    expected = reference.oracle(data, "mxfp4")
    scales[100 + 33, block] = 255
    output = run(with_cache(data, packed, scales), splits)
    assert output[1].isnan().all(), "a key of NaN leaves no weight a number"
    for b in (0, 2):
        assert relative_error(output[b], expected[b]) < ACCURACY


def test_scales_over_many_octaves_stay_exact(run):
    """Blocks of dims 120 octaves apart, and tokens 12 apart within them: each block is as accurate as any."""
    data = ragged_input([150, 64])
    packed, scales = codes_of(data)
    generator = torch.Generator().manual_seed(3)
    octaves = torch.linspace(-60, 60, BLOCKS).round().int()
    by_token = torch.randint(-11, 1, scales.shape, generator=generator)
    scales = (scales.int() + octaves + by_token).to(torch.uint8)
    q = data[0].float() * torch.exp2(-octaves.float()).repeat_interleave(32)
    data = (q.bfloat16(), *with_cache(data, packed, scales)[1:])
    expected = reference.oracle(data, "mxfp4").unflatten(2, (16, 32))
    for splits in (1, 2):
        output = run(data, splits).unflatten(2, (16, 32))
        for block in range(16):
            assert relative_error(output[:, :, block], expected[:, :, block]) < ACCURACY, f"block {block}"


@pytest.mark.parametrize("scale, q_factor", [(250, 1.0), (127, 2.0**120)])
def test_products_near_the_end_of_float32_stay_exact(run, scale, q_factor):
    """One block of 2^123, or a Q of 2^120: scaling Q must not take the one's room for the other."""
    data = ragged_input([70, 33], q_factor=q_factor)
    packed, scales = codes_of(data)
    scales[5, 3] = scale
    data = with_cache(data, packed, scales)
    assert relative_error(run(data, 1), reference.oracle(data, "mxfp4")) < ACCURACY


# ---- negative controls


def neighbours_scale(packed, scales):
    return packed, scales.roll(1, dims=1)


def swapped_nibbles(packed, scales):
    return packed << 4 | packed >> 4, scales


def scale_stride_18(packed, scales):
    padded = torch.full((scales.shape[0], 24), reference.E8M0_BIAS, dtype=torch.uint8)
    padded[:, :BLOCKS] = scales
    return packed, padded.flatten()[: scales.numel()].view_as(scales)


def dropped_dims(packed, scales):
    return torch.cat([packed[:, :, :64], torch.zeros_like(packed[:, :, :16]), packed[:, :, 80:]], 2), scales


CONTROLS = [neighbours_scale, swapped_nibbles, scale_stride_18, dropped_dims]


@pytest.fixture(scope="module")
def judged():
    return reference.generate_input(2, 1, 512, 42)


def test_the_strict_check_passes_the_kernel(run, judged):
    report = reference.strict_check(judged, run(judged, 2), kv="mxfp4")
    assert report.passed, report.message


@pytest.mark.parametrize("misread", CONTROLS, ids=lambda f: f.__name__)
def test_the_strict_check_fails_a_misread_cache(run, judged, misread):
    packed, scales = codes_of(judged)
    output = run(with_cache(judged, *misread(packed, scales)), 2)
    assert not reference.strict_check(judged, output, kv="mxfp4").passed


def test_the_strict_check_fails_a_dropped_tile(run, judged):
    q, kv_data, qo_indptr, _, config = judged
    # Sequence 0 without its last tile, sequence 1 without its first.
    outputs = [
        run((q[b : b + 1], kv_data, None, torch.tensor([start, start + 448], dtype=torch.int32), config), 2)
        for b, start in enumerate((0, 576))
    ]
    assert not reference.strict_check(judged, torch.cat(outputs), kv="mxfp4").passed


# ---- dispatch


@pytest.mark.parametrize("own_dtypes", [True, False])
def test_custom_kernel_reaches_the_arm(interpreter, own_dtypes):
    data = ragged_input([100, 64])
    if not own_dtypes:
        data = with_cache(data, *(x.view(torch.uint8) for x in data[1]["mxfp4"]))
    output, selection = interpreter(interpreted.call, data, "triton_mxfp4")
    assert (selection.arm, selection.kv) == ("triton_mxfp4", "mxfp4")
    assert relative_error(output, reference.oracle(data, "mxfp4")) < ACCURACY


# ---- policy


def test_policy_report():
    result = CliRunner().invoke(tool_app(mxfp4_policy.main), ["--sequences", "2", "--kv", "64"])
    assert result.exit_code == 0, result.output
    assert "mxfp4 cache, exact" in result.output
    assert mxfp4_policy.sure_share(0.9966, 0.0011, 4) < submission.MIN_SHARE_WITHIN
    assert mxfp4_policy.sure_share(0.9966, 0.0011, submission.MXFP4_MIN_BATCH) > submission.MIN_SHARE_WITHIN


# ---- on a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a CUDA or ROCm GPU")
CONFIGS = [Config("triton_mxfp4", splits=splits, block_n=block_n) for splits, block_n in ((1, 32), (4, 32), (7, 64))]


def run_on_gpu(data, config):
    return ARMS[config.arm].run(data, problem_of(data), config)


@needs_gpu
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.splits}-{c.block_n}")
@pytest.mark.parametrize(
    "lengths, s_q, q_factor",
    [([0, 1, 63, 64, 65, 700, 128], 1, 1.0), ([1000, 3000, 5, 0, 777], 3, 1.0), ([8192] * 2, 1, 10.0)],
    ids=["edges", "three queries", "8192, q x 10"],
)
def test_error_and_bitwise_repeats_on_a_gpu(config, lengths, s_q, q_factor):
    data = ragged_input(lengths, s_q, q_factor=q_factor, device="cuda")
    output = run_on_gpu(data, config).clone()
    assert relative_error(output, reference.oracle(data, "mxfp4")) < KERNEL_ERROR
    assert all(torch.equal(run_on_gpu(data, config), output) for _ in range(20))


@needs_gpu
def test_a_scale_of_nan_surfaces_in_its_sequence_alone_on_a_gpu():
    data = ragged_input([100, 50, 200], device="cuda")
    expected = reference.oracle(data, "mxfp4")
    data[1]["mxfp4"][1].view(torch.uint8)[120, 2] = 255
    output = run_on_gpu(data, CONFIGS[1])
    assert output[1].isnan().all()
    for b in (0, 2):
        assert relative_error(output[b], expected[b]) < KERNEL_ERROR


@needs_gpu
@pytest.mark.parametrize("case", BENCHMARKS, ids=lambda c: f"{c['batchsize']}x{c['kvseqlen']}")
def test_official_shapes_pass_strictly_on_a_gpu(monkeypatch, case):
    monkeypatch.setenv("MLA_KV", "mxfp4")
    data = reference.generate_input(**case)
    output = submission.custom_kernel(data)
    assert submission.last_run().arm.endswith("_mxfp4") and submission.last_run().arm != "torch_chunked_mxfp4"
    report = reference.strict_check(data, output, kv="mxfp4")
    assert report.passed, report.message
