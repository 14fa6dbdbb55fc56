"""The measuring scripts as far as a CPU can run them: they refuse, choose, draw and write what they say."""

import json
import random
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from matplotlib.image import imread
from typer.testing import CliRunner

import reference
import submission
from bench import dispatch, peers, random_shapes, roofline, sweep
from bench.console import tool_app
from bench.measure import time_interleaved
from task import BENCHMARKS
from tests.eval_stand_ins import ROOT

RUNNER = CliRunner()


# Runs `python -m bench.<tool>` once for every list of words, as where only torch and the extra `cli` are installed.
WITHOUT_EXTRAS = """
import json, os, runpy, sys, tempfile

missing = ["elftools", "hypothesis", "kernelguard", "matplotlib", "ml_dtypes", "tinygrad", "triton"]
sys.modules.update(dict.fromkeys(missing))
ended = []
for words in json.loads(sys.argv[1]):
    sys.argv = words
    sys.modules.pop(f"bench.{words[0]}", None)
    said = [tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")]
    kept = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = said
    try:
        runpy.run_module(f"bench.{words[0]}", run_name="__main__", alter_sys=False)
        code = "no exit"
    except BaseException as end:
        code = end.code if isinstance(end, SystemExit) else repr(end)
    sys.stdout, sys.stderr = kept
    for file in said:
        file.seek(0)
    ended.append([code, *(file.read() for file in said)])
print(json.dumps(ended))
"""
TOOLS = sorted(path.stem for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text())
LACKING = {
    "fuzz": ([], "hypothesis"),
    "gfx950": ([], "triton"),
    "mxfp4_gfx950": ([], "triton"),
    "roofline": ([str(ROOT / "docs" / "data" / "peers_h200.json"), "times.png"], "matplotlib"),
}


def test_tools_explain_themselves_and_what_they_lack_without_the_other_extras():
    assert {"dispatch", "peers", "sweep", *LACKING} <= set(TOOLS)
    lines = [[tool, "--help"] for tool in TOOLS] + [[tool, *words] for tool, (words, _) in LACKING.items()]
    lines.append(["gfx950", "--plot", "times.png"])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, json.dumps(lines)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout)
    for tool, (code, out, err) in zip(TOOLS, ended, strict=False):
        assert code == 0 and "Usage: " in out and err == "", (tool, code, err)
    packages = [*(package for _, package in LACKING.values()), "matplotlib"]
    for package, (code, out, err) in zip(packages, ended[len(TOOLS) :], strict=True):
        assert (code, out) == (2, "") and re.fullmatch(f"{package}: expected this package, got none; .*\n", err), err


@pytest.mark.parametrize("tool", [dispatch, peers, random_shapes, sweep])
def test_gpu_tools_say_what_they_need(tool, no_gpu, capsys):
    with pytest.raises(SystemExit, match="2"):
        tool.main()
    assert capsys.readouterr() == ("", "device: expected a CUDA or ROCm GPU, got none\n")


@pytest.mark.parametrize("tool", [peers, sweep])
def test_an_unknown_arm_is_wrong_usage(tool):
    result = RUNNER.invoke(tool_app(tool.main), ["--arm", "no_such_arm"])
    assert result.exit_code == 2 and "expected one of" in result.output and "triton_fp8" in result.output


@pytest.mark.parametrize("case", BENCHMARKS, ids=lambda c: f"{c['batchsize']}x{c['kvseqlen']}")
def test_sweeps_hold_the_tables_configurations(case):
    shape = case["batchsize"], case["kvseqlen"]
    swept = sweep.hopper_configs(*shape, num_cu=132)
    assert submission.select_config(*shape, submission.Target("sm90", 132))[0] in swept
    portable = submission.select_config(*shape, submission.Target("gpu", 132))[0]
    assert portable in sweep.portable_configs(*shape, num_cu=132)


def test_sample_error_sees_a_wrong_sequence():
    data = reference.generate_input(5, 1, 70, 3)
    right = reference.oracle(data, "fp8").bfloat16()
    wrong = right.clone()
    wrong[4] = 0
    assert sweep.sample_error(data, right) < 3e-3 < 0.1 < sweep.sample_error(data, wrong)


def test_random_shapes_are_valid_arguments(monkeypatch):
    monkeypatch.setattr(random_shapes, "MAX_TOKENS", 20_000)
    bf16 = torch.randn(20_000, 1, 576).bfloat16()
    pool = {"bf16": bf16, "fp8": reference.quantize_fp8(bf16), "mxfp4": reference.quantize_mxfp4(bf16)}
    rng = random.Random(1)
    seen = set()
    for _ in range(60):
        lengths, s_q = random_shapes.draw_lengths(rng), rng.randint(1, 4)
        assert 1 <= len(lengths) <= random_shapes.MAX_BATCH and 0 <= max(lengths) <= random_shapes.MAX_KV
        if sum(lengths) <= 20_000:
            submission.check_arguments(random_shapes.make_case(pool, lengths, s_q, rng))
            seen.add((len(lengths) > 8, len(set(lengths)) > 1))
    assert len(seen) == 4, "small and large batches, equal and ragged"


def test_interleaved_calls_are_timed_in_rounds_of_random_order():
    order = []

    class Timer:
        def time_ns(self, call):
            order.append(call())
            return float(len(order)), None

    calls = {name: partial(str, name) for name in "abc"}
    durations_ns = time_interleaved(calls, 20, Timer(), "test")
    rounds = ["".join(order[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds) and len(set(rounds)) > 3
    assert all(order[int(time_ns) - 1] == name for name, times in durations_ns.items() for time_ns in times)
    assert [len(times) for times in durations_ns.values()] == [20] * 3


def test_dispatch_reports_first_and_later_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "require_gpu", lambda: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    path = tmp_path / "dispatch.json"
    result = RUNNER.invoke(tool_app(dispatch.main), ["--case", "2x64", "--repeats", "3", "--json", str(path)])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(path.read_text())["results"]
    assert row["case"] == "2x64" and row["first_call_s"] > 0
    assert row["custom_kernel_us"] > 0 and row["arm_us"] > 0


def test_a_case_alone_shows_in_every_series():
    """A line of one point is none: only its marker is seen."""
    assert all(style.get("marker") for style in roofline.PEERS.values())


def test_roofline_draws_the_recorded_result(tmp_path):
    picture = tmp_path / "roofline.png"
    recorded = ROOT / "docs" / "data" / "peers_h200.json"
    result = RUNNER.invoke(tool_app(roofline.main), [str(recorded), str(picture)])
    assert result.exit_code == 0, result.output
    assert imread(picture).shape[1] > 1000
    empty = tmp_path / "empty.json"
    environment = {"device": "a", "torch": "b", "triton": "c"}
    empty.write_text(json.dumps({"cases": {}, "environment": environment}))
    assert RUNNER.invoke(tool_app(roofline.main), [str(empty), str(picture)]).exit_code == 2
    for content in ("{", "[]", '{"cases": {}}', json.dumps({"cases": {"4x1024": [{}]}, "environment": environment})):
        empty.write_text(content)
        result = RUNNER.invoke(tool_app(roofline.main), [str(empty), str(picture)])
        assert result.exit_code == 2 and "expected a result of bench.peers" in result.output
    result = RUNNER.invoke(tool_app(roofline.main), [str(recorded), str(tmp_path / "roofline.xyz")])
    assert result.exit_code == 2 and "expected a name that ends in one of" in result.output
