"""Late loads: a missing or too weak wait becomes a wrong value and, for registers, a finding."""

import numpy as np
import pytest

from .snippet import execute
from .state import Memory

LANES = np.arange(64, dtype=np.uint32)
OLD = np.uint32(99)


@pytest.fixture
def pool():
    """(memory, SGPRs 8-9 pointing at the words 0, 1, 2, ...)"""
    memory, words = Memory(), np.arange(1024, dtype=np.uint32)
    address = memory.add(words, "words")
    return memory, {8: address & 0xFFFFFFFF, 9: address >> 32}


def run(pool, code, late_loads="late", **options):
    memory, s = pool
    v = {0: LANES * 4} | {row: OLD for row in range(1, 30)}
    return execute(code, v=v, s=s, memory=memory, late_loads=late_loads, **options)


def kinds(outcome):
    return [finding.kind for finding in outcome.run.findings]


def test_a_wait_makes_the_value_arrive(pool):
    code = "global_load_dword v1, v0, s[8:9]\ns_waitcnt vmcnt(0)\nv_mov_b32 v2, v1"
    outcome = run(pool, code)
    assert outcome.wave.u[2].tolist() == LANES.tolist() and not kinds(outcome)


def test_a_missing_wait_reads_the_old_value(pool):
    outcome = run(pool, "global_load_dword v1, v0, s[8:9]\nv_mov_b32 v2, v1")
    assert (outcome.wave.u[2] == OLD).all() and kinds(outcome) == ["read before wait"]
    assert "v1 while global_load_dword" in outcome.run.findings[0].detail
    # The program's end lands everything.
    assert outcome.wave.u[1].tolist() == LANES.tolist()
    assert run(pool, "global_load_dword v1, v0, s[8:9]\nv_mov_b32 v2, v1", None).wave.u[2].tolist() == LANES.tolist()


def test_vmcnt_counts_in_order(pool):
    code = """global_load_dword v1, v0, s[8:9]
              global_load_dword v2, v0, s[8:9] offset:4
              global_store_dword v0, v0, s[8:9] offset:2048
              s_waitcnt vmcnt(2)
              v_mov_b32 v3, v1
              v_mov_b32 v4, v2"""
    outcome = run(pool, code)
    assert outcome.wave.u[3].tolist() == LANES.tolist() and (outcome.wave.u[4] == OLD).all()
    assert kinds(outcome) == ["read before wait"]


def test_lgkmcnt_counts_lds_in_order_but_not_scalar_loads(pool):
    lds = np.arange(256, dtype=np.uint32)
    code = "ds_read_b32 v1, v0\nds_read_b32 v2, v0 offset:4\ns_waitcnt lgkmcnt(1)\nv_mov_b32 v3, v1\nv_mov_b32 v4, v2"
    outcome = run(pool, code, lds=lds)
    assert outcome.wave.u[3].tolist() == LANES.tolist() and (outcome.wave.u[4] == OLD).all()
    code = "s_load_dword s20, s[8:9], 0x4\ns_load_dword s21, s[8:9], 0x8\ns_waitcnt lgkmcnt({})\ns_mov_b32 s22, s21"
    outcome = run(pool, code.format(0))
    assert outcome.wave.s[22] == 2 and not kinds(outcome)
    assert "read before wait" in kinds(run(pool, code.format(1)))


def test_direct_to_lds_loads_need_vmcnt(pool):
    code = """s_mov_b32 m0, 0
              global_load_lds_dword v0, s[8:9]
              s_waitcnt {}
              ds_read_b32 v1, v0
              s_waitcnt lgkmcnt(0)"""
    outcome = run(pool, code.format("vmcnt(0)"))
    assert outcome.wave.u[1].tolist() == LANES.tolist() and not kinds(outcome)
    outcome = run(pool, code.format("lgkmcnt(0)"))
    assert kinds(outcome) == ["uninitialised LDS"]


def test_writes_to_lds_before_a_barrier_need_a_wait(pool):
    """Wave n reads what wave n + 1 wrote: the barrier alone does not make the write arrive."""
    code = """v_mov_b32 v1, 0
              v_mov_b32 v2, 1
              ds_add_rtn_u32 v3, v1, v2 offset:1024
              s_waitcnt lgkmcnt(0)
              v_readfirstlane_b32 s2, v3
              s_lshl_b32 s3, s2, 8
              v_add_u32 v4, s3, v0
              v_add_u32 v5, 0x100, v4
              v_and_b32 v5, 0x3ff, v5
              v_mov_b32 v6, s2
              ds_write_b32 v4, v6
              {}
              s_barrier
              ds_read_b32 v7, v5
              s_waitcnt lgkmcnt(0)"""
    options = {"lds": np.zeros(257, np.uint32), "num_warps": 4, "exec_mask": 1}
    for wait, arrives in (("s_waitcnt lgkmcnt(0)", True), ("", False)):
        outcome = run(pool, code.format(wait), **options)
        correct = all(wave.u[7][0] == (wave.s[2] + 1) % 4 for wave in outcome.waves)
        assert correct == arrives


def test_full_counters_stall(pool):
    loads = "\n".join(f"global_load_dword v{row}, v0, s[8:9] offset:{4 * row}" for row in range(1, 30))
    # 29 * 3 = 87 loads: the 6-bit counter holds 63, so the first 24 must have landed.
    outcome = run(pool, "\n".join([loads] * 3) + "\nv_mov_b32 v40, v1")
    assert (outcome.wave.u[40] == LANES + 1).all() and kinds(outcome) == ["read before wait"]


def test_stores_and_loads_of_a_wave_stay_in_order(pool):
    code = "global_store_dword v0, v0, s[8:9]\nglobal_load_dword v1, v0, s[8:9]\ns_waitcnt vmcnt(0)\nv_mov_b32 v2, v1"
    assert run(pool, code).wave.u[2].tolist() == (LANES * 4).tolist()


def test_random_landing_finds_a_missing_wait_now_and_then(pool):
    code = "global_load_dword v1, v0, s[8:9]\n" + "s_nop 0\n" * 20 + "{}\nv_mov_b32 v2, v1"
    right = [
        (
            run(pool, code.format("s_waitcnt vmcnt(0)"), "random", random=np.random.default_rng(seed)).wave.u[2]
            == LANES
        ).all()
        for seed in range(10)
    ]
    assert all(right)
    lucky = {
        bool((run(pool, code.format(""), "random", random=np.random.default_rng(seed)).wave.u[2] == LANES).all())
        for seed in range(20)
    }
    assert lucky == {True, False}


def test_late_memory_leaves_lds_alone(pool):
    lds = np.arange(256, dtype=np.uint32)
    code = "ds_read_b32 v1, v0\nv_mov_b32 v2, v1\nglobal_load_dword v3, v0, s[8:9]\nv_mov_b32 v4, v3"
    outcome = run(pool, code, "late memory", lds=lds)
    assert outcome.wave.u[2].tolist() == LANES.tolist() and (outcome.wave.u[4] == OLD).all()
    assert kinds(outcome) == ["read before wait"]
