"""Registers, LDS and main loop of every gfx950 row, read from the machine code of the pinned Triton."""

import json
import math
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import submission
from bench import gfx950
from bench.console import tool_app
from bench.gfx950 import (
    STRANGERS,
    candidates,
    classify,
    code_of,
    compile_decode,
    describe,
    examine,
    forms,
    main_loop,
    predict,
)
from submission import Config
from task import BENCHMARKS

SHAPES = [(spec["batchsize"], spec["kvseqlen"]) for spec in BENCHMARKS]
# Every form of the rows, those for any shape too; then forms no row has, and rows at several queries a sequence.
ROWS = list(dict.fromkeys(code_of(config) for shape in [*SHAPES, (7, 5000)] for config in candidates(*shape)))
SPARE = [
    replace(submission._gfx950(1), splits=2),
    replace(submission._gfx950(1), splits=1),
    replace(submission._gfx950(2), splits=1),
    replace(submission._gfx950(2, one_launch=True), splits=4),
]
SEVERAL = [
    replace(submission._gfx950(4), splits=2),
    *(replace(submission._gfx950(4, one_launch=True), splits=splits) for splits in (2, 4)),
]
FORMS = [(config, 1) for config in ROWS + SPARE] + [(config, 2) for config in SEVERAL]
LDS_BYTES, LDS_GRANULE = 160 * 1024, 1280
every_row = pytest.mark.parametrize("config, s_q", FORMS, ids=[f"{describe(c)}, s_q {s_q}" for c, s_q in FORMS])


def test_every_row_of_the_table_is_covered():
    rows = [configs for target, _, _, configs in submission.TABLE if target == "gfx950"]
    listed = {(c.num_warps, c.one_launch) for row in rows for c in row if c.arm == "gfx950_fp8"}
    assert listed == {(c.num_warps, c.one_launch) for c in ROWS}
    assert all(row[0].arm == "gfx950_fp8" for row in rows)


def test_number_of_splits_is_but_a_constant():
    """What `predict` and this file rely on."""
    one, other = (examine(config) for config in (candidates(4, 8192)[0], code_of(candidates(4, 8192)[0])))
    assert one.config.splits != other.config.splits
    assert one.per_tile == other.per_tile and one.resources == other.resources


@every_row
def test_a_cu_holds_the_programs_that_the_row_states(config, s_q):
    r = examine(config, s_q=s_q).resources
    assert (r.spills, r.scratch_bytes, r.agprs) == (0, 0, 0)
    assert r.waves_per_cu >= config.num_warps * config.programs_per_cu
    assert config.programs_per_cu * LDS_GRANULE * math.ceil(r.lds_bytes / LDS_GRANULE) <= LDS_BYTES


@every_row
def test_main_loop(config, s_q):
    loop = examine(config, s_q=s_q).per_tile
    # The loop holds two tiles; no step stands outside of it, as cold code that no prediction would count.
    asm = compile_decode(config, s_q=s_q).asm["amdgcn"]
    assert len(re.findall(r"^\s+v_mfma", asm, re.M)) == 2 * (loop["mfma_k128"] + loop["mfma_k32"])
    # Nothing but what is listed: no ds_read_u8, no narrow load, no AGPR move, no scratch, no other MFMA.
    assert not loop.keys() & STRANGERS
    # A wave's 32 rows of 576 bytes, 64 lanes x 16 bytes at a time.
    assert loop["load_to_lds"] * 64 * 16 == 32 * 576
    # Q K^T: two blocks of 16 tokens, four chunks of 128 dims by two halves of Q, and rope's one; P V: P's two halves.
    assert loop["mfma_k128"] == 2 * (4 * 2 + 1)
    assert loop["mfma_k32"] == 2 * 512 // 16
    # P only, four at a time: its high half, that back, its low half. The cache is not converted.
    assert loop["convert"] == 3 * 4
    assert loop.get("barrier", 0) <= 4


@every_row
def test_clocks_leave_the_loop_to_memory(config, s_q):
    """Nothing overlapping: 2,600 clocks for 64 tokens, of the 3,331 that memory takes. Programs of one wave, three to
    a CU, leave a SIMD idle and take about 2,910."""
    assert examine(config, s_q=s_q).clocks_per_64() <= (2600 if config.num_warps > 1 else 3000)


@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)
def test_splits_are_those_of_256_cus(shape):
    for config in candidates(*shape):
        splits = submission.choose_splits(*shape, config.block_n, 256, config.programs_per_cu)
        assert config.splits == splits and splits * shape[0] <= 256 * config.programs_per_cu


# All shapes would take minutes to compile.
@pytest.mark.parametrize("shape", [(4, 1024), (64, 1024)], ids="{0[0]}x{0[1]}".format)
def test_row_starts_with_the_best_predicted_form(shape):
    best = min(predict(*shape, config).time_us for config in forms(*shape))
    assert predict(*shape, candidates(*shape)[0]).time_us <= 1.01 * best


@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)
def test_memory_binds_the_main_loop(shape):
    p = predict(*shape, candidates(*shape)[0])
    # 4 x 1024: 32 programs of one tile leave most of the memory idle whatever the loop does.
    assert p.serial_us < p.units_us["HBM"] or p.kv_bytes < 20e6
    assert p.bound == "HBM" or shape == (4, 1024)


def test_plain_fp8_does_not_earn_its_place():
    for shape in ((64, 1024), (256, 8192)):
        exact, plain = (predict(*shape, candidates(*shape)[0], pairs).time_us for pairs in (True, False))
        assert exact <= 1.1 * plain


def test_hand_over_between_xcds():
    """Every wave's stores, barrier, write-back, ticket, invalidation; then every wave's own before it reads."""
    asm = compile_decode(Config("gfx950_fp8", 4, 128, 4, one_launch=True)).asm["amdgcn"]
    wanted = [
        r"global_store_dwordx4 ",
        r"s_waitcnt vmcnt\(0\)",
        r"s_barrier",
        r"buffer_wbl2 sc1",
        r"s_waitcnt vmcnt\(0\)",
        r"global_atomic_add .* sc0",
        r"s_waitcnt vmcnt\(0\)",
        r"buffer_inv sc1",
        r"s_barrier",
        r"buffer_inv sc1",
        r"global_load_dwordx4 ",
    ]
    text = "\n".join(line.strip() for line in asm.splitlines())
    position = text.rindex("ds_read_b128")
    for pattern in wanted:
        match = re.compile(pattern).search(text, position)
        assert match, f"no {pattern} after character {position}"
        position = match.end()
    # Between the waves' wait and the barrier nothing goes to memory.
    between = re.search(r"s_waitcnt vmcnt\(0\) //[^\n]*\n(.*?)s_barrier", text, re.S).group(1)
    assert not re.search(r"(global|buffer)_", between)


def test_budget_sees_agpr_moves(monkeypatch):
    """The accumulators move to AGPRs when the compiler is not held to 256 registers: the loop's classes show it."""
    monkeypatch.setattr(gfx950, "WAVES_PER_EU", 1)
    asm = gfx950.compile_decode.__wrapped__(Config("gfx950_fp8", 2, 128, 4)).asm["amdgcn"]
    counts = classify([i for block in main_loop(asm) for i in block])
    assert counts.keys() & STRANGERS


def test_main_loop_is_the_longest_and_masks_are_told_apart():
    asm = """
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	s_nop 0
	s_cbranch_scc1 .LBB0_1
.LBB0_2:                                ; =>This Inner Loop Header: Depth=1
	v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[4:5], v[6:7], 0
	s_cbranch_scc1 .LBB0_4
; %bb.3:                                ;   in Loop: Header=BB0_2 Depth=1
	v_cndmask_b32_e32 v0, v1, v2, vcc
.LBB0_4:                                ;   in Loop: Header=BB0_2 Depth=1
	buffer_load_dwordx4 v1, s[20:23], 0 offen lds
	buffer_load_dword v1, s[20:23], 0 offen lds
	s_cbranch_scc1 .LBB0_2
.LBB0_5:
	s_endpgm
"""
    blocks = main_loop(asm)
    assert [len(block) for block in blocks] == [2, 1, 3]
    assert [gfx950.is_mask(block) for block in blocks] == [False, True, False]
    assert classify(blocks[2]) == {"load_to_lds": 1, "memory_other": 1, "scalar": 1}
    with pytest.raises(ValueError, match="expected a loop"):
        main_loop("\ts_endpgm\n")


def test_report(tmp_path):
    pytest.importorskip("matplotlib", reason="requires matplotlib")
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    result = CliRunner().invoke(tool_app(gfx950.main), ["--json", str(figures), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert "PREDICTION" in result.output and "never run on a card" in result.output
    data = json.loads(figures.read_text())
    assert "geometric mean" in result.output and data["kind"] == "prediction, never measured"
    assert [shape["shape"] for shape in data["shapes"]] == ["{}x{}".format(*shape) for shape in SHAPES]
    for shape in data["shapes"]:
        assert shape["time_us"] > shape["floor_us"]
        assert shape["bound"] in shape["units_us"]
        assert shape["per_tile"]["load_to_lds"] * 1024 * shape["config"]["num_warps"] == shape["tile_bytes"]
        assert shape["tile_clocks"].keys() == {"MFMA", "VALU", "LDS", "issue"}
    assert plot.read_bytes().startswith(b"\x89PNG")


def figures(triton, **loop):
    return {"triton": triton, "loops": {"a": loop}, "shapes": [{"time_us": 10.0 if triton == "3.6.0" else 12.0}]}


def test_changes_of_another_triton_are_listed():
    old = figures("3.6.0", per_tile={"valu": 4, "wait": 2}, resources={"spills": 0})
    new = figures("4.0", per_tile={"valu": 4, "agpr_move": 7.5}, resources={"spills": 9})
    mean = "predicted geometric mean: 10.0 -> 12.0 us"
    assert gfx950._changes(old, new) == ["a: spills 0 -> 9, agpr_move 0 -> 7.5, wait 2 -> 0", mean]
    assert gfx950._changes(old, old)[0] == "a: nothing changes"


def test_a_triton_that_cannot_compile_is_reported_not_an_error(tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('too new')")
    result = CliRunner().invoke(tool_app(gfx950.main), ["--against", str(tmp_path)])
    assert result.exit_code == 0
    assert "cannot compile the kernel: ImportError: too new" in result.output


@pytest.mark.parametrize("option", ["--against", "--mca"])
def test_what_to_compare_with_must_exist(option, tmp_path):
    result = CliRunner().invoke(tool_app(gfx950.main), [option, str(tmp_path)])
    assert result.exit_code == 2 and "expected a" in result.output


LLVM_MCA_22 = """
[1]    [2]    [3]    [4]    [5]    [6]    Instructions:
 1      8     4.00                  U     v_mfma_f32_16x16x32_fp8_fp8 v[222:225], v[170:171], v[50:51], 0
 1      80    1.00    *      *      U     buffer_load_dwordx4 v170, s[0:3], 0 offen lds

Resource pressure by instruction:
 -      -      -      -      -      -     4.00   v_mfma_f32_16x16x32_fp8_fp8 v[222:225], v[170:171], v[50:51], 0
"""


def test_clocks_of_llvm_mca(tmp_path):
    tool = tmp_path / "llvm-mca"
    tool.write_text(f"#!/bin/sh\ncat > /dev/null\ncat <<'END'{LLVM_MCA_22}END\n")
    tool.chmod(0o755)
    assert gfx950.mca_passes(str(tool), ["first", "second"]) == [4, 1]
    with pytest.raises(RuntimeError, match="expected 1 instructions in its table, got 2"):
        gfx950.mca_passes(str(tool), ["only"])
