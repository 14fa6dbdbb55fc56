"""The platform's side of eval.py, end to end through a real pipe, and its rules one by one."""

import base64
import json
import math
import os
import subprocess
import sys
import types

import pytest
import torch

import eval as evaluator
from tests.eval_stand_ins import (
    EXACT,
    ROOT,
    TOY_REFERENCE,
    TOY_SUBMISSION,
    ZEROS,
    case_line,
    platform_folder,
    run_platform,
)

OVERWRITTEN = "input data['seed']: expected unchanged, got overwritten"
STATS = ["runs", "mean", "std", "err", "best", "worst"]


def toy(folder, act="", sleep_s=0.2):
    source = TOY_SUBMISSION.replace("SLEEP_S", str(sleep_s)) + act
    return platform_folder(folder, source, TOY_REFERENCE)


def toy_answer(folder, monkeypatch, act, mode):
    """The answer of a worker's session in this process to one case of seed 5; a timed mode makes three timed runs."""
    reference = types.ModuleType("reference")
    exec(TOY_REFERENCE, reference.__dict__)
    monkeypatch.setitem(sys.modules, "reference", reference)
    monkeypatch.setitem(sys.modules, "submission", None)  # restores what the session puts there
    path = toy(folder, act) / "submission.py"
    session = evaluator._Session(path, lambda done, total: None)
    args = {"batchsize": 2, "qseqlen": 1, "kvseqlen": 64, "seed": 5}
    if mode == "test":
        return session.test(args)
    return session.benchmark(args, evaluator.Protocol(mode == "leaderboard", 3, math.inf))


def records(folder):
    return [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]


def as_dict(lines):
    return dict(line.split(": ", 1) for line in lines)


# ---- end to end ----


def test_test_mode_reports_each_case_and_passes(tmp_path):
    lines_in = [case_line(2, 1024, 11), case_line(3, 1024, 12)]
    code, lines, _ = run_platform(platform_folder(tmp_path, EXACT), "test", cases="\n".join(lines_in))
    keys = [line.split(": ", 1)[0] for line in lines]
    assert [key for key in keys if "message" not in key] == [
        "test-count", "test.0.spec", "test.0.status", "test.1.spec", "test.1.status", "check",
    ]  # fmt: skip
    out = as_dict(lines)
    assert (out["test-count"], out["test.0.spec"], out["test.1.spec"]) == ("2", *lines_in)
    assert (out["test.0.status"], out["test.1.status"], out["check"], code) == ("pass", "pass", "pass", 0)


def test_test_mode_fails_a_wrong_output_in_one_line(tmp_path):
    cases = "\n".join([case_line(2, 1024, 11), case_line(3, 1024, 12)])
    code, lines, _ = run_platform(platform_folder(tmp_path, ZEROS), "test", cases=cases)
    out = as_dict(lines)
    assert code == 112
    assert (out["test.0.status"], out["test.1.status"], out["check"]) == ("fail", "fail", "fail")
    assert out["test.0.error"] and out["test.1.error"]


def test_test_mode_keeps_the_input_safe_and_one_worker_for_all_cases(tmp_path):
    act = "\n\ndef act(data):\n    data['seed'].fill_(0)\n    return data['seed'].clone()\n"
    code, lines, _ = run_platform(toy(tmp_path, act), "test", cases=case_line(seed=5) + "\n" + case_line(seed=6))
    assert code == 112
    assert as_dict(lines)["test.0.error"] == OVERWRITTEN
    seen = records(tmp_path)
    assert [(one["seed"], one["call"]) for one in seen] == [(5, 1), (6, 2)]
    assert len({one["pid"] for one in seen}) == 1
    assert seen[0]["popcorn"] == []


def test_secret_seed_is_combined_and_hidden_from_the_submission(tmp_path):
    code, _, _ = run_platform(toy(tmp_path, sleep_s=0), "test", cases=case_line(seed=4220), POPCORN_SEED="7")
    seen = records(tmp_path)
    assert code == 0
    assert seen[0]["seed"] == 4220 + 4227 * 4228 // 2
    assert seen[0]["popcorn"] == []


def test_a_dying_worker_fails_its_case_and_is_replaced(tmp_path):
    act = "\n\ndef act(data):\n    if data['batchsize'] == 9:\n        os._exit(3)\n    return data['seed'].clone()\n"
    cases = "\n".join(case_line(batchsize) for batchsize in (1, 9, 2))
    code, lines, _ = run_platform(toy(tmp_path, act), "test", cases=cases)
    out = as_dict(lines)
    assert [out[f"test.{i}.status"] for i in range(3)] == ["pass", "fail", "pass"]
    assert out["test.1.error"] == "worker process died, exit code 3"
    assert code == 112


def test_benchmark_mode_times_one_unchanged_input(tmp_path):
    code, lines, _ = run_platform(toy(tmp_path), "benchmark", cases=case_line(seed=5) + "\n" + case_line(seed=6))
    out = as_dict(lines)
    assert list(out) == ["benchmark-count"] + [
        f"benchmark.{i}.{name}" for i in range(2) for name in ["spec", *STATS]
    ] + ["check"]  # fmt: skip
    assert (code, out["benchmark-count"], out["check"]) == (0, "2", "pass")
    for i in range(2):
        runs, mean, std, err, best, worst = (float(out[f"benchmark.{i}.{name}"]) for name in STATS)
        assert runs >= 3 and 0.2e9 <= best <= mean <= worst
        assert err == pytest.approx(std / math.sqrt(runs))
    assert {one["seed"] for one in records(tmp_path)} == {5, 6}


def test_benchmark_mode_stops_at_the_first_failure(tmp_path):
    act = "\n\ndef act(data):\n    raise RuntimeError('boom')\n"
    code, lines, _ = run_platform(toy(tmp_path, act), "benchmark", cases=case_line() + "\n" + case_line(3))
    out = as_dict(lines)
    assert list(out) == [
        "benchmark-count", "benchmark.0.spec", "benchmark.0.status", "benchmark.0.error", "check",
    ]  # fmt: skip
    assert out["benchmark.0.error"].startswith("RuntimeError: boom (submission.py, line ")
    assert (code, out["check"]) == (112, "fail")


def test_leaderboard_mode_draws_new_inputs_and_passes(tmp_path):
    code, lines, _ = run_platform(toy(tmp_path), "leaderboard", cases=case_line(seed=5))
    out = as_dict(lines)
    assert list(out) == ["benchmark-count", "benchmark.0.spec", *(f"benchmark.0.{name}" for name in STATS), "check"]
    assert (code, out["check"]) == (0, "pass")
    runs = int(out["benchmark.0.runs"])
    seeds = [one["seed"] for one in records(tmp_path)]
    # The warm-up times the first case's own seed; then one checked call and `runs` calls on new inputs.
    assert seeds[-runs - 1 :] == [5 + 13 * run for run in range(runs + 1)]
    assert set(seeds[: -runs - 1]) == {5}


def test_leaderboard_mode_checks_every_output_where_benchmark_mode_does_not(tmp_path):
    replay = (
        "\n\nkept = {}\n\ndef act(data):\n    time.sleep(0.2)\n    return kept.setdefault(0, data['seed'].clone())\n"
    )
    folder = toy(tmp_path, replay)
    assert run_platform(folder, "benchmark", cases=case_line(seed=5))[0] == 0
    code, lines, _ = run_platform(folder, "leaderboard", cases=case_line(seed=5))
    assert code == 112
    assert as_dict(lines)["benchmark.0.error"] == "run 0: expected 18, | got 5"


def test_profile_mode_sends_a_readable_report(tmp_path):
    code, lines, _ = run_platform(toy(tmp_path, sleep_s=0), "profile", cases=case_line())
    out = as_dict(lines)
    assert list(out) == ["benchmark-count", "benchmark.0.spec", "benchmark.0.report", "check"]
    assert "aten::clone" in base64.b64decode(out["benchmark.0.report"], b"+*").decode()
    assert (code, out["check"]) == (0, "pass")


# ---- outputs and inputs that make a judgement worthless ----

ZEROED = "\n\ndef act(data):\n    return data['seed'].fill_(0).clone()\n"


def test_a_toy_passes_in_this_process(tmp_path, monkeypatch):
    for mode in ("test", "benchmark", "leaderboard"):
        assert toy_answer(tmp_path, monkeypatch, "", mode)["good"]


@pytest.mark.parametrize("mode", ["test", "benchmark", "leaderboard"])
def test_an_input_zeroed_to_make_zeros_right_fails_the_checked_call(tmp_path, monkeypatch, mode):
    answer = toy_answer(tmp_path, monkeypatch, ZEROED, mode)
    assert (answer["good"], answer["message"]) == (False, OVERWRITTEN)


@pytest.mark.parametrize(("mode", "when"), [("leaderboard", "run 0"), ("benchmark", "after the timed runs")])
@pytest.mark.parametrize(
    ("change", "name"), [("data['seed'].fill_(0)", "seed"), ("data.update(batchsize=3)", "batchsize")]
)
def test_an_input_overwritten_in_a_timed_run_fails(tmp_path, monkeypatch, mode, when, change, name):
    act = f"\n\ndef act(data):\n    if calls > 1:\n        {change}\n    return data['seed'].clone()\n"
    answer = toy_answer(tmp_path, monkeypatch, act, mode)
    assert (answer["good"], answer["message"]) == (False, f"{when}: {OVERWRITTEN.replace('seed', name)}")


REFUSED_OUTPUTS = [
    ("data['seed'].clone().as_subclass(Lazy)", "output: expected a torch.Tensor, got Lazy, a subclass"),
    ("data['seed'].to_sparse()", "output: expected a dense tensor, got torch.sparse_coo"),
    ("data['seed'].float().requires_grad_()", "output: expected a tensor without gradient, got one that requires it"),
    ("[data['seed']]", "output: expected a torch.Tensor, got list"),
]


@pytest.mark.parametrize(("mode", "first"), [("test", 1), ("benchmark", 1), ("benchmark", 2), ("leaderboard", 2)])
@pytest.mark.parametrize(("result", "message"), REFUSED_OUTPUTS)
def test_outputs_that_cannot_be_judged_are_refused_by_name(tmp_path, monkeypatch, mode, first, result, message):
    act = "\n\nimport torch\n\nclass Lazy(torch.Tensor):\n    pass\n\ndef act(data):\n"
    act += f"    return {result} if calls >= {first} else data['seed'].clone()\n"
    answer = toy_answer(tmp_path, monkeypatch, act, mode)
    assert (answer["good"], answer["message"]) == (False, message if first == 1 else f"run 0: {message}")


def test_first_difference_names_the_part_and_compares_bits():
    def nest():
        return (torch.tensor([0.0, math.nan]), {"a": [torch.zeros(2, 3)], "b": 1.0})

    changes = {
        "": lambda data: None,
        "data[0]": lambda data: data[0][:1].neg_(),  # -0.0 equals 0.0 but is no 0.0
        "data[1]['a'][0]": lambda data: data[1]["a"][0].t_(),
        "data[1]['a']": lambda data: data[1]["a"].append(1),
        "data[1]['b']": lambda data: data[1].update(b=1),
        "data[1]": lambda data: data[1].update(c=1),
    }
    for name, change in changes.items():
        data = nest()
        change(data)
        assert evaluator.first_difference(nest(), data) == name


# ---- exit codes that need no worker ----


@pytest.mark.parametrize("mode", evaluator.MODES)
@pytest.mark.parametrize("content", ["", case_line() + "\n\n" + case_line(), "batchsize=4", "seed: 1.5", "seed: 1;"])
def test_bad_case_file_is_113_in_every_mode(tmp_path, mode, content, monkeypatch, capsys):
    (tmp_path / "cases.txt").write_text(content)
    monkeypatch.setenv("POPCORN_FD", "9")
    assert evaluator.main([mode, str(tmp_path / "cases.txt")]) == 113
    assert capsys.readouterr().err.count("\n") == 1


GOOD = case_line()
BAD_CASES = {
    GOOD + "; foo: 1": "foo: unknown key, expected batchsize, qseqlen, kvseqlen, seed",
    "batchsize: 2; seed: 2; kvseqlen: 64": "qseqlen: expected in every case, got none",
    GOOD + "; seed: 5": "seed: expected once, got it again",
    GOOD.replace("kvseqlen: 64", "kvseqlen: many"): f"kvseqlen: expected an integer from 1 to {2**31 - 1}, got many",
    GOOD.replace("qseqlen: 1", "qseqlen: true"): f"qseqlen: expected an integer from 1 to {2**31 - 1}, got true",
    GOOD.replace("kvseqlen: 64", "kvseqlen: 0"): f"kvseqlen: expected an integer from 1 to {2**31 - 1}, got 0",
    GOOD.replace("batchsize: 2", "batchsize: -1"): f"batchsize: expected an integer from 1 to {2**31 - 1}, got -1",
    GOOD.replace("seed: 1", "seed: abc"): f"seed: expected an integer from 0 to {2**63 - 1}, got abc",
    GOOD.replace("seed: 1", "seed: -5"): f"seed: expected an integer from 0 to {2**63 - 1}, got -5",
    GOOD.replace("seed: 1", f"seed: {2**63}"): f"seed: expected an integer from 0 to {2**63 - 1}, got {2**63}",
}


@pytest.mark.parametrize("secret", ["", "7"])
@pytest.mark.parametrize(("line", "message"), BAD_CASES.items(), ids=range(len(BAD_CASES)))
def test_a_bad_case_is_113_and_names_line_and_key(tmp_path, monkeypatch, capsys, line, message, secret):
    (tmp_path / "cases.txt").write_text(f"{GOOD}\n{line}\n")
    monkeypatch.setenv("POPCORN_FD", "9")
    monkeypatch.setenv("POPCORN_SEED", secret)
    assert evaluator.main(["test", str(tmp_path / "cases.txt")]) == 113
    assert capsys.readouterr().err.endswith(f"cases.txt', line 2: {message}\n")


def test_a_secret_seed_too_large_for_torch_is_113(tmp_path, monkeypatch, capsys):
    (tmp_path / "cases.txt").write_text(GOOD)
    largest = next(b for b in range(2**32 + 9, 0, -1) if evaluator.combine_seeds(1, b) < 2**63)
    assert evaluator.read_case_file(tmp_path / "cases.txt", largest)[0].args["seed"] < 2**63
    monkeypatch.setenv("POPCORN_FD", "9")
    monkeypatch.setenv("POPCORN_SEED", str(largest + 1))
    assert evaluator.main(["test", str(tmp_path / "cases.txt")]) == 113
    assert "line 1: seed: expected at most 9223372036854775807 combined with POPCORN_SEED" in capsys.readouterr().err


def test_missing_case_file_is_113(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("POPCORN_FD", "9")
    assert evaluator.main(["test", str(tmp_path / "none.txt")]) == 113
    assert "none.txt" in capsys.readouterr().err


def test_blank_line_through_the_real_command(tmp_path):
    code, lines, stderr = run_platform(platform_folder(tmp_path, EXACT), "test", cases=case_line() + "\n\n")
    assert (code, lines) == (113, [])
    assert "expected 'name: value', got ''" in stderr


def test_no_descriptor_is_111(tmp_path, monkeypatch, capsys):
    (tmp_path / "cases.txt").write_text(case_line())
    monkeypatch.delenv("POPCORN_FD", raising=False)
    assert evaluator.main(["test", str(tmp_path / "cases.txt")]) == 111
    assert "POPCORN_FD is not set" in capsys.readouterr().err


@pytest.mark.parametrize("descriptor", ["pipe", "987654"])
def test_unusable_descriptor_is_111(tmp_path, monkeypatch, capsys, descriptor):
    (tmp_path / "cases.txt").write_text(case_line())
    monkeypatch.setenv("POPCORN_FD", descriptor)
    assert evaluator.main(["test", str(tmp_path / "cases.txt")]) == 111
    assert descriptor in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_111_without_a_traceback(tmp_path):
    code, _, stderr = run_platform(toy(tmp_path), "test", cases=case_line(), read=False)
    assert code == 111
    assert stderr.startswith("POPCORN_FD: ") and "Broken pipe" in stderr and stderr.count("\n") == 1


def test_a_descriptor_that_cannot_be_written_is_111(tmp_path, monkeypatch, capsys):
    (tmp_path / "cases.txt").write_text(case_line())
    monkeypatch.setenv("POPCORN_FD", str(os.open(os.devnull, os.O_RDONLY)))
    assert evaluator.main(["test", str(tmp_path / "cases.txt")]) == 111
    assert capsys.readouterr().err.startswith("POPCORN_FD: expected an open file descriptor")


def test_any_text_comes_through_the_descriptor(tmp_path):
    read_end, write_end = os.pipe()
    with evaluator._PopcornOutput(str(write_end)) as out:
        out.log("message", "a\udc80b")
    with os.fdopen(read_end, encoding="utf-8") as pipe:
        assert pipe.read() == "message: a\\udc80b\n"


@pytest.mark.parametrize("args", [["foo", "bar"], ["test", "2x64"], ["tset", "cases.txt"]])
def test_words_that_are_no_case_file_are_wrong_usage(tmp_path, args):
    (tmp_path / "cases.txt").write_text(case_line())
    done = subprocess.run(
        [sys.executable, ROOT / "eval.py", *args],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "POPCORN_FD"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "Usage: python eval.py" in done.stderr


@pytest.mark.parametrize("args", [[], ["test"], ["test", "cases.txt", "more"]])
def test_wrong_number_of_arguments_is_2(monkeypatch, args):
    monkeypatch.setenv("POPCORN_FD", "9")
    assert evaluator.main(args) == 2


def test_unknown_mode_and_bad_secret_seed_are_2(tmp_path, monkeypatch, capsys):
    cases = tmp_path / "cases.txt"
    cases.write_text(case_line())
    monkeypatch.setenv("POPCORN_FD", "9")
    assert evaluator.main(["tset", str(cases)]) == 2
    assert "'tset'" in capsys.readouterr().err
    monkeypatch.setenv("POPCORN_FD", "9")
    monkeypatch.setenv("POPCORN_SEED", "x")
    assert evaluator.main(["test", str(cases)]) == 2
    assert "POPCORN_SEED" in capsys.readouterr().err


def test_platform_form_needs_neither_the_command_line_extra_nor_torch_in_the_parent():
    code = "import sys; sys.modules.update(dict.fromkeys(['rich', 'typer', 'torch'])); import eval; eval.main([])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "POPCORN_FD": "9"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "usage: python eval.py MODE CASEFILE\n")


# ---- rules ----


def test_case_values():
    args = evaluator.parse_case(" seed: +7;batchsize: 4;  kvseqlen:1024; qseqlen: 02 ")
    assert args == {"batchsize": 4, "qseqlen": 2, "kvseqlen": 1024, "seed": 7}


def test_secret_seed_formula():
    assert evaluator.combine_seeds(3, 4) == 3 + 7 * 8 // 2
    assert evaluator.combine_seeds(1, 2**40) > 2**78


def test_the_cache_is_flushed_before_each_call():
    timer = evaluator.ColdTimer()
    for _ in range(2):
        timer._scratch.zero_()
        _, flushed = timer.time_ns(lambda: bool(timer._scratch.any()))
        assert flushed


def test_stats_are_those_of_the_sample():
    stats = evaluator.calculate_stats([1.0, 2.0, 3.0, 6.0])
    assert (stats.runs, stats.mean, stats.best, stats.worst) == (4, 3.0, 1.0, 6.0)
    assert stats.std == pytest.approx(math.sqrt(14 / 3))
    assert stats.err == pytest.approx(math.sqrt(14 / 12))
    assert math.isnan(evaluator.calculate_stats([1.0]).std)


@pytest.mark.parametrize(
    ("durations", "wall_ns", "stop"),
    [
        ([1e3] * 2, 1e12, False),  # never before three runs
        ([1e3] * 3, 0, True),  # no spread at all
        ([1e3, 2e3, 3e3], 0, False),
        ([1e3, 2e3, 3e3], 121e9, True),  # wall time
        ([1e10, 2e10, 3e10], 0, True),  # kernel time: 60 s of 50
        ([1e10, 2e10, 1.5e10], 0, False),
        ([1e3, 1.005e3] * 500, 0, True),  # 0.25 % spread over 1000 runs
        ([1e3, 1.1e3] * 500, 0, False),  # 5 % spread over 1000 runs
    ],
)
def test_stop_rule(durations, wall_ns, stop):
    assert evaluator.should_stop(durations, wall_ns, evaluator.PROTOCOLS["benchmark"]) is stop


def test_limits_are_the_official_ones():
    fields = {
        mode: [(p.recheck, p.max_repeats, p.max_time_ns, p.max_wall_ns) for p in (table[mode] for table in tables)]
        for mode in ("benchmark", "leaderboard")
        for tables in [(evaluator.WARM_UP, evaluator.PROTOCOLS)]
    }
    assert fields == {
        "benchmark": [(False, 100, 1e8, 120e9), (False, 1000, 50e9, 120e9)],
        "leaderboard": [(False, 100, 1e7, 120e9), (True, 100, 30e9, 120e9)],
    }
