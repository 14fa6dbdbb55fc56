"""`generate_input` as the contract describes it."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import task
from reference import E8M0_DTYPE, FP4_DTYPE, generate_input, quantize_fp8, quantize_mxfp4

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("batch", "s_q", "s_kv"), [(4, 1, 100), (2, 2, 7), (1, 1, 1)])
def test_shapes_and_dtypes(batch, s_q, s_kv):
    q, kv_data, qo_indptr, kv_indptr, config = generate_input(batchsize=batch, qseqlen=s_q, kvseqlen=s_kv, seed=1)
    total_kv = batch * s_kv
    assert (q.shape, q.dtype, q.device.type) == ((batch * s_q, 16, 576), torch.bfloat16, DEVICE)
    assert sorted(kv_data) == ["bf16", "fp8", "mxfp4"]
    assert (kv_data["bf16"].shape, kv_data["bf16"].dtype) == ((total_kv, 1, 576), torch.bfloat16)
    fp8, fp8_scale = kv_data["fp8"]
    assert (fp8.shape, fp8.dtype) == ((total_kv, 1, 576), torch.float8_e4m3fn)
    assert (fp8_scale.shape, fp8_scale.dtype) == ((1,), torch.float32)
    packed, scales = kv_data["mxfp4"]
    assert (packed.shape, packed.dtype) == ((total_kv, 1, 288), FP4_DTYPE)
    assert (scales.shape, scales.dtype) == ((math.ceil(total_kv / 256) * 256, 24), E8M0_DTYPE)
    for indptr, step in ((qo_indptr, s_q), (kv_indptr, s_kv)):
        assert indptr.dtype == torch.int32 and indptr.tolist() == [i * step for i in range(batch + 1)]
    assert config == {
        "batch_size": batch,
        "num_heads": 16,
        "num_kv_heads": 1,
        "qk_head_dim": 576,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 512,
        "q_seq_len": s_q,
        "kv_seq_len": s_kv,
        "sm_scale": 1 / math.sqrt(576),
    }


def test_q_is_drawn_first_then_kv_in_bf16():
    q, kv_data, _, _, _ = generate_input(2, 1, 33, seed=7)
    gen = torch.Generator(device=DEVICE)
    gen.manual_seed(7)
    draw = {"dtype": torch.bfloat16, "device": DEVICE, "generator": gen}
    assert torch.equal(q, torch.randn((2, 16, 576), **draw))
    assert torch.equal(kv_data["bf16"], torch.randn((66, 1, 576), **draw))


def test_all_caches_come_from_the_bf16_one():
    _, kv_data, _, _, _ = generate_input(3, 1, 50, seed=2)
    fp8, scale = quantize_fp8(kv_data["bf16"])
    packed, scales = quantize_mxfp4(kv_data["bf16"])
    assert same_bytes(kv_data["fp8"][0], fp8) and torch.equal(kv_data["fp8"][1], scale)
    assert same_bytes(kv_data["mxfp4"][0], packed)
    assert same_bytes(kv_data["mxfp4"][1][:150, :18].contiguous(), scales[:150, :18].contiguous())


def test_a_seed_decides_and_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, again, other = (generate_input(1, 1, 40, seed)[1]["bf16"] for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_inputs_are_standard_normal():
    q, kv_data, _, _, _ = generate_input(4, 1, 1024, seed=3)
    for x in (q.double(), kv_data["bf16"].double()):
        assert abs(x.mean()) < 6 / math.sqrt(x.numel())
        assert abs(x.square().mean() - 1) < 6 * math.sqrt(2 / x.numel()) + 1e-4


@pytest.mark.parametrize("name", ["batchsize", "qseqlen", "kvseqlen"])
@pytest.mark.parametrize("value", [0, -4])
def test_sizes_must_be_positive(name, value):
    sizes = {"batchsize": 1, "qseqlen": 1, "kvseqlen": 8, name: value}
    with pytest.raises(ValueError, match=f"{name}: expected a positive integer, got {value}"):
        generate_input(**sizes, seed=0)


def test_official_cases():
    shapes = [(case["batchsize"], case["kvseqlen"], case["seed"]) for case in task.TESTS]
    assert shapes == [(4, 1024, 4220), (32, 1024, 5412), (64, 8192, 1360), (256, 8192, 9826)]
    assert [(case["batchsize"], case["kvseqlen"], case["seed"]) for case in task.BENCHMARKS] == [
        (4, 1024, 4217),
        (4, 8192, 4220),
        (32, 1024, 5412),
        (32, 8192, 5415),
        (64, 1024, 1357),
        (64, 8192, 1360),
        (256, 1024, 9823),
        (256, 8192, 9826),
    ]
    assert {case["qseqlen"] for case in (*task.TESTS, *task.BENCHMARKS)} == {1}


PEAK_MEMORY = """
import resource, torch
import reference
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
torch.randn(8, 8) @ torch.randn(8, 8)
before = peak()
data = reference.generate_input(8, 1, 8192, 0)
output = reference.ref_kernel(data)
assert reference.strict_check(data, output, "fp8").passed
print(peak() - before)
"""


def test_no_full_copy_of_the_cache_is_made():
    """Draw and judge 8x8192 in a process of its own: beyond the inputs only chunks may be allocated."""
    root = Path(__file__).resolve().parent.parent
    run = subprocess.run(
        [sys.executable, "-c", PEAK_MEMORY],
        cwd=root,
        env={"PATH": "", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    elements = 8 * 8192 * 576
    inputs = elements * (2 + 1 + 0.5 + 1 / 24)
    assert int(run.stdout) - inputs < 0.6 * 4 * elements
