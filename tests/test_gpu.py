"""What only a GPU can show. Skipped, with the reason, where there is none."""

import os
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

import reference
import submission
import task
from reference import relative_error
from submission import ARMS, Config, Target, problem_of
from tests.inputs import ragged_input

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a CUDA or ROCm GPU")
TARGET = submission._target(torch.device("cuda", 0)) if torch.cuda.is_available() else Target("cpu")
needs_hopper = pytest.mark.skipif(TARGET.name != "sm90", reason="requires a Hopper GPU")

HOPPER = [Config("hopper_fp8", splits=splits, one_launch=one) for splits, one in
          [(1, False), (2, False), (5, False), (16, False), (32, False), (2, True), (5, True), (16, True)]]  # fmt: skip
PORTABLE = [Config("triton_fp8", splits=splits, block_n=n) for splits, n in [(1, 64), (4, 64), (7, 32)]]
CONFIGS = [pytest.param(c, marks=needs_hopper) for c in HOPPER] + PORTABLE


def name(config):
    return f"{config.arm}-{config.splits}{'-one' if config.one_launch else ''}"


def run(data, config):
    return ARMS[config.arm].run(data, problem_of(data), config)


@pytest.mark.parametrize("config", CONFIGS, ids=name)
@pytest.mark.parametrize(
    "lengths, s_q, q_factor",
    [
        ([0, 1, 63, 64, 65, 700, 128], 1, 1.0),
        ([1000, 3000, 5, 0, 777], 3, 1.0),
        ([1024] * 4, 1, 10.0),
        ([8192] * 2, 1, 10.0),
    ],
    ids=["edges", "three queries", "1024, q x 10", "8192, q x 10"],
)
def test_error_and_bitwise_repeats(config, lengths, s_q, q_factor):
    data = ragged_input(lengths, s_q, q_factor=q_factor, device="cuda")
    output = run(data, config).clone()
    expected = reference.oracle(data, "fp8")
    assert relative_error(output, expected) < 3e-3
    for b, length in enumerate(lengths):
        if length == 0:
            assert not output[b * s_q : (b + 1) * s_q].any()
    assert all(torch.equal(run(data, config), output) for _ in range(100))


@needs_hopper
@pytest.mark.parametrize("config", HOPPER, ids=name)
@pytest.mark.parametrize("s_q", [1, 3])
def test_a_wrong_guess_of_the_lengths_does_not_show(config, s_q):
    """Tiles that started from where equal lengths would have them are dropped when kv_indptr says otherwise."""
    data = ragged_input([0, 1, 63, 64, 65, 700, 128, 2000], s_q, device="cuda")
    expected = run(data, config).clone()
    guessed = ARMS[config.arm].run(data, problem_of(data)._replace(uniform=True), config)
    assert torch.equal(guessed, expected)
    assert relative_error(guessed, reference.oracle(data, "fp8")) < 3e-3


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_nan_stays_in_its_sequence(config):
    """A sequence of NaN poisons itself and, though it shares tiles' memory with them, not its neighbours."""
    data = ragged_input([100, 50, 200, 64], device="cuda")
    expected = reference.oracle(data, "fp8")
    data[1]["fp8"][0].view(torch.uint8)[100:150] = 0x7F
    output = run(data, config)
    assert output[1].isnan().all()
    for b in (0, 2, 3):
        assert relative_error(output[b], expected[b]) < 3e-3


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_stale_partials_do_not_show(config):
    """Scratch full of NaN, more splits than tiles: an empty split's partial is never used."""
    data = ragged_input([70, 0, 64], device="cuda")
    run(data, config)
    for key, buffer in submission._SCRATCH.items():
        if key[0] in ("part", "lse"):
            buffer.fill_(float("nan"))
    assert relative_error(run(data, config), reference.oracle(data, "fp8")) < 3e-3


@pytest.mark.parametrize("case", task.BENCHMARKS, ids=lambda c: f"{c['batchsize']}x{c['kvseqlen']}")
def test_official_shapes_pass_strictly(case):
    data = reference.generate_input(**case)
    report = reference.strict_check(data, submission.custom_kernel(data), kv=submission.last_run().kv)
    assert report.passed, report


def test_cuda_graph_replays_on_changed_inputs():
    for case in (task.BENCHMARKS[0], task.BENCHMARKS[2], task.BENCHMARKS[6]):
        data = reference.generate_input(**case)
        submission.custom_kernel(data)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = submission.custom_kernel(data)
        other = reference.generate_input(**{**case, "seed": 99})
        data[0].copy_(other[0])
        for old, new in zip(data[1]["fp8"], other[1]["fp8"], strict=True):
            old.copy_(new)
        for _ in range(3):
            output.fill_(float("nan"))
            graph.replay()
        torch.cuda.synchronize()
        assert relative_error(output, reference.oracle(other, "fp8")) < 3e-3


@needs_hopper
@pytest.mark.parametrize("one_launch", [False, True])
def test_cuda_graph_of_both_forms(one_launch):
    data = reference.generate_input(8, 1, 1000, 5)
    config = Config("hopper_fp8", splits=4, one_launch=one_launch)
    expected = run(data, config).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(data, config)
    for _ in range(20):
        output.fill_(float("nan"))
        graph.replay()
        assert torch.equal(output, expected)


def test_steady_state_neither_allocates_nor_synchronises():
    data = reference.generate_input(32, 1, 1024, 5)
    submission.custom_kernel(data)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            submission.custom_kernel(data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_one_or_two_launches():
    for case in task.BENCHMARKS:
        data = reference.generate_input(**case)
        submission.custom_kernel(data)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            submission.custom_kernel(data)
            torch.cuda.synchronize()
        kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert 1 <= len(kernels) <= 2, [event.name for event in kernels]


def test_misaligned_cache_falls_back_to_the_portable_kernel(capsys):
    data = ragged_input([100, 64], device="cuda")
    expected = reference.oracle(data, "fp8")
    kv, kv_scale = data[1]["fp8"]
    shifted = torch.empty(kv.numel() + 1, dtype=torch.uint8, device="cuda")[1:].view(kv.dtype).view(kv.shape)
    shifted.copy_(kv)
    moved = (data[0], {**data[1], "fp8": (shifted, kv_scale)}, *data[2:])
    with mock.patch.dict(os.environ, MLA_BACKEND=""):
        output = submission.custom_kernel(moved)
    assert submission.last_run().arm == "triton_fp8"
    assert relative_error(output, expected) < 3e-3
    if TARGET.name == "sm90":
        assert "fell back to triton_fp8 (hopper_fp8: it needs" in capsys.readouterr().err


def test_a_call_runs_under_its_own_device(monkeypatch):
    """Another device is current: launches belong to the one that holds the inputs. One GPU stands for both."""
    data = reference.generate_input(4, 1, 1024, 5)
    expected = submission.custom_kernel(data).clone()
    current = [1]

    @contextmanager
    def under(device):
        current.append(device.index)
        yield
        current.pop()

    def run_under(*call):
        ran_under.append(current[-1])
        return arm.run(*call)

    name = submission.last_run().arm
    ran_under, arm = [], ARMS[name]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", under)
    monkeypatch.setitem(ARMS, name, replace(arm, run=run_under))
    assert torch.equal(submission.custom_kernel(data), expected)
    assert ran_under == [0] and current == [1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="requires two GPUs")
def test_another_current_device():
    data = reference.generate_input(4, 1, 1024, 5)
    expected = submission.custom_kernel(data).clone()
    moved = tuple(
        {k: tuple(t.to("cuda:1") for t in v) if isinstance(v, tuple) else v.to("cuda:1") for k, v in x.items()}
        if isinstance(x, dict) and "bf16" in x else x.to("cuda:1") if isinstance(x, torch.Tensor) else x
        for x in data
    )  # fmt: skip
    with torch.cuda.device(0):
        for _ in range(2):
            output = submission.custom_kernel(moved)
            assert output.device == torch.device("cuda", 1)
            assert relative_error(output.to("cuda:0"), expected) < 5e-3
