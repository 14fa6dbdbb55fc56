"""The gfx950 kernels, executed instruction by instruction, against float64 over the same dequantised cache."""

import math
from dataclasses import replace

import pytest
import torch

import reference
import submission
from bench.gfx950 import candidates, describe
from submission import Config
from task import BENCHMARKS, NUM_HEADS, QK_HEAD_DIM, SM_SCALE

from . import OutOfBounds
from .kernels import POISON, draw, error, execute, pretend_mi355x, with_fault

pytestmark = pytest.mark.usefixtures("no_gpu")
EXACT = 2e-3
PLAIN = 4e-2
FORMS = {waves: replace(submission._gfx950(waves), splits=2) for waves in (4, 2, 1)}
ONE_LAUNCH = {waves: replace(FORMS[waves], splits=3, one_launch=True) for waves in (4, 2)}
# All programs in flight, each behind a cache of its own and a wave far ahead of the others, accesses as late as may be.
UNEVEN = {"concurrent": 0, "quantum": 500, "late_loads": "late", "caches": True}
forms = pytest.mark.parametrize("waves", FORMS)
one_launch = pytest.mark.parametrize("waves", ONE_LAUNCH)


def shapes_by_config() -> dict[Config, str]:
    """The table's configurations for the benchmark shapes, several of which share one, and the shapes' names."""
    found: dict[Config, list[str]] = {}
    for spec in BENCHMARKS:
        shape = (spec["batchsize"], spec["kvseqlen"])
        for config in candidates(*shape):
            found.setdefault(config, []).append("{}x{}".format(*shape))
    return {config: f"{'+'.join(shapes)} {describe(config)}" for config, shapes in found.items()}


def check(case, config, bound=EXACT, **options):
    result = execute(case, config, **options)
    assert result.unexpected == []
    assert error(result, case.expected()) <= bound
    return result


@pytest.mark.parametrize("config", [pytest.param(config, id=name) for config, name in shapes_by_config().items()])
def test_table_configurations(config):
    """Ragged, and one sequence with q six times larger, which makes most weights tiny."""
    # Many splits of few tiles are mostly empty, and take their time all the same.
    few = config.splits <= 8
    case = draw([450, 129], q_factors=[1, 6]) if few else draw([300], q_factors=[6])
    check(case, config, order="shuffled")


@forms
def test_lengths_around_a_tile(waves):
    """Starts are odd rows; the last program of a sequence has one to 32 * waves rows in its last tile."""
    tile = 32 * waves
    result = check(draw([tile - 1, 1, 0, tile + 1, 2 * tile + 31]), FORMS[waves])
    assert not result.out[2].any()


@forms
def test_split_takes_whole_pairs_and_odd_tiles(waves):
    """One split of two to four tiles: the buffers' turns and an odd last one."""
    tile = 32 * waves
    check(draw([2 * tile, 3 * tile - 9, 4 * tile]), replace(FORMS[waves], splits=1))


@forms
def test_several_queries_are_bottom_right_causal(waves):
    result = check(draw([66, 2, 0], s_q=3), replace(FORMS[waves], splits=1))
    # The first query of two tokens sees none of them, like all three of none.
    assert not result.out[[3, 6, 7, 8]].any()


@forms
def test_neighbouring_sequences_may_hold_nan(waves):
    case = draw([37, 32 * waves + 6, 41], poisoned=(0, 2))
    result = execute(case, FORMS[waves])
    row = replace(result, out=result.out[1:2])
    healthy = draw([37, 32 * waves + 6, 41]).expected()[1:2]
    assert error(row, healthy) <= EXACT


def test_strided_q_and_cache():
    case = draw([150, 70])
    q = torch.full((2, NUM_HEADS + 2, QK_HEAD_DIM + 16), torch.nan, dtype=torch.bfloat16)
    kv = torch.full((220, QK_HEAD_DIM + 48), POISON, dtype=torch.uint8).view(torch.float8_e4m3fn)
    q[:, :NUM_HEADS, :QK_HEAD_DIM] = case.q
    kv[:, :QK_HEAD_DIM] = case.kv
    check(replace(case, q=q[:, :NUM_HEADS, :QK_HEAD_DIM], kv=kv[:, :QK_HEAD_DIM]), FORMS[4])


def test_sequence_beyond_two_gibibytes():
    case, start = draw([150]), 2**31 // QK_HEAD_DIM + 1000
    # Never written but for its end, so the system hands out no memory for it.
    kv = torch.empty(start + 150, QK_HEAD_DIM, dtype=torch.float8_e4m3fn)
    kv[start:] = case.kv
    check(replace(case, kv=kv, kv_indptr=case.kv_indptr + start), FORMS[4])


def test_q_of_zeros_averages_the_values():
    case = draw([40, 161])
    case.q.zero_()
    check(case, FORMS[4])


def test_zeros_over_a_cache_of_zeros():
    """Quantised, such a cache has a scale of 2e-15, whose product with that of Q is below float32's numbers."""
    case = draw([40])
    case.q.zero_()
    case.kv.copy_(torch.zeros(case.kv.shape))
    assert not execute(replace(case, kv_scale=reference.quantize_fp8(torch.zeros(1))[1]), FORMS[4]).out.any()


def test_plain_fp8_is_an_order_of_magnitude_off():
    case = draw([300])
    plain = error(execute(case, FORMS[4], pairs=False), case.expected())
    assert 10 * error(execute(case, FORMS[4]), case.expected()) < plain <= PLAIN


@forms
@pytest.mark.parametrize("late_loads", ["late", "random"])
def test_loads_may_land_late(waves, late_loads):
    case = draw([5 * 32 * waves + 7])
    early = execute(case, replace(FORMS[waves], splits=1))
    late = check(case, replace(FORMS[waves], splits=1), late_loads=late_loads, seed=4, quantum=3)
    assert torch.equal(early.out, late.out)


def test_partials_are_normalised_and_their_lse_is_to_base_two():
    case = draw([300, 100])
    result = execute(case, replace(FORMS[4], splits=3))
    keys = case.kv.double() * case.kv_scale.double()
    # Tiles [0, 3) of 300 tokens go one to a split; the only one of 100 tokens goes to the last split.
    for row, split, start, end in ((0, 0, 0, 128), (0, 1, 128, 256), (0, 2, 256, 300), (1, 2, 300, 400)):
        expected = torch.logsumexp(case.q[row].double() @ keys[start:end].T * SM_SCALE, 1) / math.log(2)
        torch.testing.assert_close(result.lse[row, split].double(), expected, rtol=0, atol=1e-4)
    assert torch.equal(result.lse[1, :2], torch.full((2, NUM_HEADS), -torch.inf))


@one_launch
def test_one_launch_whatever_the_order_of_programs(waves):
    case = draw([64 * waves + 40, 0])
    outs, ticket = [], torch.zeros(2, dtype=torch.int32)
    for order in ("ascending", "descending", "shuffled"):
        result = check(case, ONE_LAUNCH[waves], order=order, ticket=ticket, **UNEVEN)
        assert not ticket.any()
        outs.append(result.out)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("config", [ONE_LAUNCH[4], FORMS[4], replace(FORMS[4], splits=1)], ids=describe)
def test_submission_proves_and_launches_it(config, monkeypatch):
    """`custom_kernel` on a pretended MI355X whose launches run in the emulator."""
    kernels = pretend_mi355x(monkeypatch, config)
    data = reference.generate_input(1, 1, 140, seed=950)
    out = submission.custom_kernel(data)
    assert submission.last_run().arm == "gfx950_fp8" and submission.last_run().kv == "fp8"
    assert reference.strict_check(data, out, "fp8").passed
    # Twice for the proof, once for the call.
    assert kernels["_decode_fp8_gfx950"].launches == 3
    assert kernels["_combine"].launches == (0 if config.one_launch or config.splits == 1 else 3)


FAULTS = {
    "dropped tile": ("n_tiles * (split + 1) // SPLITS\n", "(n_tiles - 1) * (split + 1) // SPLITS\n"),
    "LSE to the base e": (", top + gl.log2(total))", ", (top + gl.log2(total)) * 0.6931)"),
    "mask off by one": ("gl.where(token < left,", "gl.where(token <= left,"),
    "wrong swizzle": ("(key * 16)", "((key & 3) * 16)"),
    "load into the buffer in use": ("stride_kv_t, 1 - BUF)", "stride_kv_t, BUF)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault, tmp_path):
    case = draw([450, 129])
    result = execute(case, FORMS[4], module=with_fault(tmp_path, *FAULTS[fault]), late_loads="late")
    assert not error(result, case.expected()) <= EXACT


def test_a_load_past_the_cache_is_caught(tmp_path):
    module = with_fault(tmp_path, "gl.minimum(offs, last)", "gl.minimum(offs, last + 2**20)")
    with pytest.raises(OutOfBounds):
        execute(draw([300]), FORMS[4], module=module)


def test_a_ticket_taken_before_all_waves_have_stored_shows(tmp_path):
    case = draw([300, 45])
    module = with_fault(tmp_path, '"s_waitcnt vmcnt(0) // $0"', '"// $0"')
    result = execute(case, ONE_LAUNCH[4], module=module, **UNEVEN)
    assert not error(result, case.expected()) <= EXACT
