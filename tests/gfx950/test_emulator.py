"""The emulator as a whole: a compiled flash decode against float64, scheduling, and the launch interface."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from . import Deadlock, Emulator, Memory, OutOfBounds, TritonKernel
from .flash_decode import compiled, decode
from .snippet import execute

# P is rounded to fp8.
TOLERANCE = 3e-2


def test_flash_decode_of_1024_tokens_in_two_splits():
    result = decode(batch=1, s_kv=1024, splits=2)
    assert result.error < TOLERANCE and result.lse_error < 2e-6
    assert not result.run.findings
    assert result.run.executed["v_mfma_f32_16x16x128_f8f6f4"] and result.run.executed["ds_read_b64_tr_b8"]
    assert sum(result.run.executed.values()) == result.run.instructions > 10_000


@pytest.mark.parametrize("s_kv, splits", [(1, 1), (63, 1), (65, 1), (200, 3)])
def test_ragged_lengths(s_kv, splits):
    result = decode(batch=1, s_kv=s_kv, splits=splits)
    assert result.error < 2 * TOLERANCE and result.lse_error < 2e-6 and not result.run.findings


def test_results_do_not_depend_on_scheduling():
    first = decode(batch=2, s_kv=128, splits=2)
    for options in (
        {"order": "descending", "quantum": 1},
        {"order": "shuffled", "seed": 1, "concurrent": 0},
        {"order": [2, 0, 3, 1], "concurrent": 2, "quantum": 1000},
        {"late_loads": "late"},
        {"late_loads": "random", "seed": 2},
    ):
        again = decode(batch=2, s_kv=128, splits=2, **options)
        assert torch.equal(again.output, first.output), options
        assert not again.run.findings


@triton.jit
def last_arrival_sum(x_ptr, partial_ptr, counter_ptr, out_ptr, SIZE: tl.constexpr, ORDER: tl.constexpr,
                     WAIT: tl.constexpr):  # fmt: skip
    """Each program stores its part; the last to take a ticket adds up all of them."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    offs = tl.arange(0, SIZE)
    tl.store(partial_ptr + program * SIZE + offs, tl.load(x_ptr + program * SIZE + offs) * 2)
    if WAIT:
        # The release before the ticket is one wave's; each wave must see its own stores done before the barrier.
        tl.inline_asm_elementwise("s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1", "=v,v", [offs], tl.int32, False, 1)
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr, 1, sem=ORDER, scope="gpu") == programs - 1:
        total = tl.zeros([SIZE], tl.float32)
        for n in range(programs):
            total += tl.load(partial_ptr + n * SIZE + offs)
        tl.store(out_ptr + offs, total)


def hand_over(semantics, wait=True, **options):
    """(output, expected, run) of last_arrival_sum over six programs."""
    pointers = {"x_ptr": "*fp32", "partial_ptr": "*fp32", "counter_ptr": "*i32", "out_ptr": "*fp32"}
    kernel = TritonKernel.compile(
        last_arrival_sum, pointers, {"SIZE": 256, "ORDER": semantics, "WAIT": wait}, num_warps=2
    )
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    partial, out = torch.full((6, 256), torch.nan), torch.full((256,), torch.nan)
    counter = torch.zeros(1, dtype=torch.int32)
    arguments = {"x_ptr": x, "partial_ptr": partial, "counter_ptr": counter, "out_ptr": out}
    run = kernel.launch((6,), arguments, read_only=("x_ptr",), **options)
    assert counter.item() == 6 and torch.equal(partial, 2 * x)
    return out, 2 * x.sum(dim=0), run


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"concurrent": 0}, {"order": "shuffled", "concurrent": 3, "late_loads": "late"}]
)
def test_last_arrival_hand_over(options, caches):
    out, expected, run = hand_over("acq_rel", caches=caches, **options)
    assert torch.allclose(out, expected, atol=1e-5)
    assert run.executed["buffer_wbl2"] and run.executed["buffer_inv"] and not run.findings


@pytest.mark.parametrize("semantics", ["relaxed", "acquire"])
def test_hand_over_without_release_fails_with_private_caches(semantics):
    out, expected, _ = hand_over(semantics)
    assert torch.allclose(out, expected, atol=1e-5)
    out, _, _ = hand_over(semantics, caches=True)
    assert out.isnan().any()


def test_hand_over_needs_every_wave_to_wait_for_its_stores():
    """A barrier orders no stores: without the wait, another wave's part may not be in the cache that is released."""
    out, _, _ = hand_over("acq_rel", wait=False, caches=True, late_loads="late", concurrent=0)
    assert out.isnan().any()


def test_hooks_see_every_instruction():
    seen, kernel = [], compiled()

    def trace(instruction, operation):
        def run(wave):
            seen.append(instruction.name)
            operation(wave)

        return run

    zeros = torch.zeros(1, 16, 576, dtype=torch.uint8)
    names = {"kv_scale": 1.0, "score_scale": 1.0, "s_kv": 1, "split_len": 1}
    arguments = {"q_ptr": zeros, "kv_ptr": zeros, "partial_ptr": torch.zeros(16, 512), "lse_ptr": torch.zeros(16)}
    run = kernel.wrapped(trace).launch((1, 1), names | arguments)
    assert len(seen) == run.instructions and seen.count("s_endpgm") == 4


def test_triton_arguments_are_checked():
    kernel, zeros = compiled(), torch.zeros(16)
    with pytest.raises(ValueError, match=r"arguments: expected \['kv_ptr'.*got \['q_ptr'\]"):
        kernel.launch((1, 1), {"q_ptr": zeros})
    names = {"kv_scale": 1.0, "score_scale": 1.0, "s_kv": 1, "split_len": 1}
    pointers = dict.fromkeys(("q_ptr", "kv_ptr", "partial_ptr", "lse_ptr"), zeros)
    with pytest.raises(OutOfBounds, match="of q_ptr"):
        kernel.launch((1, 1), names | pointers)
    with pytest.raises(ValueError, match="contiguous"):
        kernel.launch((1, 1), names | pointers | {"q_ptr": torch.zeros(4, 4).T})


def test_launch_arguments_are_checked():
    emulator = compiled().emulator
    (name,) = emulator.code.kernels
    good = {"grid": (1,), "kernarg": bytes(512), "num_warps": 4, "memory": Memory()}
    for wrong, message in (
        ({"kernel": "nothing"}, r"kernel: expected one of \['split_decode'\], got 'nothing'"),
        ({"late_loads": "soon"}, "late_loads: expected one of .*got 'soon'"),
        ({"uninitialised": "maybe"}, "uninitialised: expected"),
        ({"lds_bytes": 1 << 20}, "lds_bytes: expected at most 163840"),
        ({"kernarg": b""}, "kernarg: expected [0-9]+ bytes, got 0"),
        ({"order": "sideways"}, "order: expected"),
        ({"order": [0, 0]}, "order: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            emulator.launch(**{"kernel": name, **good, **wrong})
    with pytest.raises(ValueError, match="code_object: expected an ELF file"):
        Emulator(b"no code object")


def test_waves_that_never_end_are_stopped():
    with pytest.raises(Deadlock, match="more than 1000 wave-instructions"):
        execute("again:\ns_branch again", max_instructions=1000, remaining=1000)


def test_buffers_are_far_apart():
    memory = Memory()
    first, second = memory.add(np.zeros(16, np.uint8), "a"), memory.add(np.zeros(16, np.uint8), "b")
    assert second - first > 1 << 32
    with pytest.raises(OutOfBounds, match="byte 16 of a"):
        memory.load(np.array([first + 16]), 4)
    with pytest.raises(OutOfBounds, match="16-byte access at byte 1 of b"):
        memory.load(np.array([first, second + 1]), 16)
