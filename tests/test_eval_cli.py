"""The person's side of eval.py: tables, JSON, broken submissions, limits and exit codes."""

import contextlib
import io
import json
import math
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import eval as evaluator
from bench import cli, console, tables
from bench.fuzz_targets import InstantWorker
from bench.measure import time_summary
from bench.options import DEFAULT_SEED, choose_cases, parse_case_word
from eval import Worker
from task import BENCHMARKS, TESTS
from tests.eval_stand_ins import EVERY_SECOND_TOKEN, EXACT, REPLAY, ROOT, ZEROS, case_line, run_person


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch):
    monkeypatch.setenv("MLA_BACKEND", "")  # restores what --backend sets
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the cases are tiny and workers run side by side


def run_here(*args):
    """The command line in this process, its worker in another; saves importing torch twice."""
    return CliRunner().invoke(cli.app, list(map(str, args)), prog_name="python eval.py")


def write(folder, source, name="other.py"):
    path = folder / name
    path.write_text(source)
    return path


# ---- test ----


def test_own_submission_passes_and_names_its_arm(tmp_path):
    report = tmp_path / "report.json"
    done = run_person("test", "--case", "2x1024", "--case", "2x256x2", "--json", report, "--timeout", 120)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(report.read_text())
    assert [case["case"] for case in result["cases"]] == ["2x1024", "2x256x2"]
    assert result["passed"] and result["mode"] == "test" and result["submission"] == "submission.py"
    for case in result["cases"]:
        assert case["good"] and case["official_good"] and case["arm"]
        assert 0 < case["strict"]["kernel_error"] < case["strict"]["kernel_bound"]
        assert case["arm"] in done.stdout
    for name in ("timing", "device", "driver", "torch", "triton", "aiter", "commit"):
        assert result["environment"][name] in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


def test_backend_reaches_the_submission():
    done = run_here("test", "--case", "2x256", "--backend", "torch_bmm")
    assert done.exit_code == 0 and "torch_bmm" in done.stdout


@pytest.mark.parametrize("given", [["--backend", "no_such_arm"], []])
def test_an_arm_that_the_submission_does_not_list_is_wrong_usage(monkeypatch, given):
    monkeypatch.setenv("MLA_BACKEND", "no_such_arm")
    done = run_here("test", "--case", "2x256", *given)
    assert done.exit_code == 2 and done.stdout == ""
    assert all(word in done.stderr for word in ("--backend", "MLA_BACKEND", "torch_bmm", "no_such_arm"))


@pytest.mark.parametrize(
    ("more", "code"), [("", 0), ("ARMS = {'mine': 1}", 2), ("ARMS = {'other': 1}", 0), ("ARMS = 3", 0), ("1 / 0", 112)]
)
def test_another_submission_has_its_own_arms_or_none(tmp_path, more, code):
    path = write(tmp_path, EXACT + more + "\n")
    assert run_here("test", "--case", "1x1024", "--backend", "other", "--submission", path).exit_code == code


@pytest.mark.parametrize(
    ("source", "strict", "official"),
    [(EXACT, "pass", "pass"), (ZEROS, "FAIL", "pass"), (EVERY_SECOND_TOKEN, "FAIL", "pass")],
    ids=["exact", "zeros", "every second token"],
)
def test_bad_submissions_that_the_official_check_forgives_are_told_apart(tmp_path, source, strict, official):
    done = run_here("test", "--case", "2x8192", "--submission", write(tmp_path, source))
    row = next(line for line in done.stdout.splitlines() if line.startswith("│ 2x8192"))
    assert [cell.strip() for cell in row.split("│")][-3:-1] == [strict, official]
    assert done.exit_code == (0 if strict == "pass" else 112)


# Batch size chooses the fault.
FAULTS = EXACT.replace(
    "    q, kv_data",
    """    out = exact(data)
    fault = data[4]["batch_size"]
    if fault == 2:
        return out[:, :8]
    if fault == 3:
        return out.float()
    if fault == 4:
        raise RuntimeError("boom\\nand more")
    if fault == 5:
        out[0, 0, 0] = float("nan")
    if fault == 6:
        return None
    if fault == 7:
        raise SystemExit("leaving")
    if fault == 8:
        import os
        os._exit(9)
    return out

def exact(data):
    q, kv_data""",
)
FAULT_MESSAGES = {
    "2x1024": r"output: expected shape \(2, 16, 512\), got \(2, 8, 512\)",
    "3x1024": r"output: expected dtype torch.bfloat16, got torch.float32",
    "4x1024": r"RuntimeError: boom \| and more \(other.py, line \d+\)",
    "5x1024": r"output: expected finite values, got 1 NaN or Inf.*",
    "6x1024": r"output: expected a torch.Tensor, got NoneType",
    "7x1024": r"SystemExit: leaving \(other.py, line \d+\)",
    "8x1024": r"worker process died, exit code 9",
}


def test_each_fault_gets_one_line_and_the_other_cases_go_on(tmp_path):
    labels = ["1x1024", *FAULT_MESSAGES, "9x1024"]
    options = [word for label in labels for word in ("--case", label)]
    done = run_here("test", *options, "--submission", write(tmp_path, FAULTS))
    assert done.exit_code == 112
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAIL ")]
    assert len(failures) == len(FAULT_MESSAGES)
    for line, (label, message) in zip(failures, FAULT_MESSAGES.items(), strict=True):
        assert re.fullmatch(f"FAIL {label}: {message}", line), line
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def custom_kernel(data)\n    pass\n", r"SyntaxError: .*other.py, line 1\)"),
        ("import no_such_module\n", r"ModuleNotFoundError: No module named 'no_such_module' \(other.py, line 1\)"),
        ("custom_kernel = 3\n", r"AttributeError: other.py defines no function custom_kernel"),
    ],
)
def test_a_submission_that_cannot_be_loaded_fails_every_case(tmp_path, source, message):
    with Worker(write(tmp_path, source)) as worker:
        for case in TESTS[:2]:
            answer = worker.ask("test", args=case, full=True)
            assert not answer["good"] and re.fullmatch(message, answer["message"])


def test_a_hang_ends_at_the_limit(tmp_path):
    hang = "import time\n\ntime.sleep(1000)\n"
    done = run_here("test", "--case", "1x64", "--case", "2x64", "--timeout", 1, "--submission", write(tmp_path, hang))
    assert done.exit_code == 112
    for label in ("1x64", "2x64"):
        assert f"FAIL {label}: no result within 1 s, worker ended" in done.stdout


# ---- the worker against a submission that does not play along ----


TINY = {"batchsize": 1, "qseqlen": 1, "kvseqlen": 1024, "seed": 1}


def ask_worker(folder, source, timeout_s=60, **more):
    with Worker(write(folder, source)) as worker:
        return worker.ask("test", args=TINY, full=True, timeout_s=timeout_s, **more)


TO_EVERY_PIPE = """
import os, stat

for fd in range(3, 40):
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.write(fd, GARBAGE)
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    "garbage", ["b'check: pass\\n'", "b'3\\n'", "b'[\"result\", 3]\\n'", "b'\\xff\\x00\\n'", "b'[1, 2'"]
)
def test_garbage_in_the_workers_pipe_fails_the_case(tmp_path, garbage):
    source = TO_EVERY_PIPE.replace("GARBAGE", garbage) + "\ndef custom_kernel(data):\n    return None\n"
    answer = ask_worker(tmp_path, source)
    assert not answer["good"] and answer["message"].startswith("unreadable answer, worker ended")


@pytest.mark.parametrize("garbage", ["b'[1, 2'", "b'[\"progress\", [1, 2]]\\n'"])
def test_the_limit_holds_whatever_comes_through_the_pipe(tmp_path, garbage):
    source = TO_EVERY_PIPE.replace("GARBAGE", garbage) + "\nimport time\n\ntime.sleep(1000)\n"
    assert ask_worker(tmp_path, source, timeout_s=3)["message"] == "no result within 3 s, worker ended"


def test_a_flood_of_progress_does_not_move_the_limit(tmp_path):
    source = TO_EVERY_PIPE.replace("GARBAGE", "b'[\"progress\", [1, 2]]\\n' * 1000")
    source = source.replace("for fd", "while True:\n  for fd", 1).replace("\n    ", "\n      ")
    seen = []
    answer = ask_worker(tmp_path, source, timeout_s=3, on_progress=lambda *progress: seen.append(progress))
    assert seen and answer["message"] == "no result within 3 s, worker ended"


def test_a_line_without_end_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "MAX_ANSWER_BYTES", 1 << 16)
    source = TO_EVERY_PIPE.replace("GARBAGE", "b'x' * (1 << 17)") + "\nimport time\n\ntime.sleep(1000)\n"
    assert ask_worker(tmp_path, source)["message"].startswith("unreadable answer, worker ended")


def test_a_process_left_behind_neither_delays_the_verdict_nor_survives_it(tmp_path):
    source = f"""
import os, time

def custom_kernel(data):
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    with open({str(tmp_path / "child")!r}, "w") as file:
        file.write(str(child))
    os._exit(5)
"""
    assert ask_worker(tmp_path, source)["message"] == "worker process died, exit code 5"
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 30
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"  # nobody may be there to reap it


@pytest.mark.parametrize(
    ("arm", "shown"),
    [
        ("lambda: 1", r"<function Selection\.<lambda> at .*>"),
        ("7", "7"),
        ("Name.X", "x"),
        ("Mute()", None),
        ("'a' * 1000", r"a{147} \.\.\. a{147}"),
        (r"'a\x1b[31m\nb\udc80'", r"a\\x1b\[31m \| b\\udc80"),
    ],
)
def test_what_ran_may_be_said_in_any_object(tmp_path, arm, shown):
    source = f"""{EXACT}
import enum

class Name(str, enum.Enum):
    X = "x"

class Mute:
    def __str__(self):
        raise ValueError("no words")

class Selection:
    arm = {arm}
    kv = Mute()
    config = None

def last_run():
    return Selection
"""
    answer = ask_worker(tmp_path, source)
    assert answer["good"] and answer["kv"] == "bf16" and answer["config"] is None
    assert re.fullmatch(shown, answer["arm"]) if shown else answer["arm"] is None


def test_a_failing_last_run_does_not_fail_the_verdict(tmp_path):
    answer = ask_worker(tmp_path, EXACT + "\ndef last_run():\n    raise RuntimeError\n")
    assert answer["good"] and answer["arm"] is None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("Mute()", r"Mute: \(its message cannot be printed\)"),
        ("RuntimeError('y' * 3_000_000)", r"RuntimeError: y{147} \.\.\. y{147}"),
        (r"RuntimeError('\u2603 \x1b[31mred\r\tgo \udc80')", r"RuntimeError: ☃ \\x1b\[31mred \| go \\udc80"),
    ],
)
def test_any_exception_becomes_one_short_printable_line(tmp_path, error, message):
    source = f"""
class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")

def custom_kernel(data):
    raise {error}
"""
    with Worker(write(tmp_path, source)) as worker:
        answers = [worker.ask("test", args=TINY, full=True) for _ in range(2)]
    for answer in answers:
        assert not answer["good"] and re.fullmatch(message + r" \(other.py, line 7\)", answer["message"])


# ---- a run that ends early ----


STUCK = """
import time
exact = custom_kernel

def custom_kernel(data):
    open({trace!r}, "a").write("x")
    return time.sleep(1000) if data[0].shape[0] == 2 else exact(data)
"""


def start(*args, stdout=subprocess.PIPE, **more):
    env = {name: value for name, value in os.environ.items() if name != "POPCORN_FD"}
    command = [sys.executable, str(ROOT / "eval.py"), *map(str, args)]
    return subprocess.Popen(command, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True, **more)


def children(pid):
    """Processes that `pid` or one of its threads started, as far as they still run."""
    return [int(child) for path in Path("/proc").glob(f"{pid}/task/*/children") for child in path.read_text().split()]


def wait_for(condition, seconds=120, pause_s=0.02):
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(pause_s)
    return met


def test_ctrl_c_keeps_the_results_so_far(tmp_path):
    trace, report = tmp_path / "called", tmp_path / "report.json"
    submission = write(tmp_path, EXACT + STUCK.format(trace=str(trace)))
    cases = ["--case", "1x1024", "--case", "2x1024", "--case", "3x1024"]
    process = start("test", *cases, "--json", report, "--submission", submission)
    assert wait_for(lambda: trace.exists() and len(trace.read_text()) == 2)
    workers = children(process.pid)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "│ 1x1024" in stdout and "stopped after 1 of 3 cases" in stdout and "Traceback" not in stderr
    result = json.loads(report.read_text())
    assert [case["case"] for case in result["cases"]] == ["1x1024"]
    assert result["complete"] is False and result["passed"] is False
    assert workers and wait_for(lambda: not any(map(is_running, workers)), 10)


def test_the_worker_ignores_ctrl_c_from_its_first_moment_on():
    def workers():
        return [pid for pid in children(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    process = start("test", "--case", "1x64")
    (worker,) = wait_for(workers, pause_s=0)
    os.kill(worker, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr


@pytest.mark.parametrize("delay_s", [0, 0.01, 0.05, 0.2])
def test_ctrl_c_in_a_terminal_while_the_worker_starts_leaves_no_traceback(delay_s):
    process = start("test", "--case", "1x64", start_new_session=True)
    assert wait_for(lambda: children(process.pid))
    time.sleep(delay_s)
    started = children(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, "") and "stopped after 0 of 1 cases" in stdout
    assert wait_for(lambda: not any(map(is_running, started)), 10)


def test_ctrl_c_while_the_command_line_is_imported_leaves_no_traceback(tmp_path):
    (tmp_path / "typer.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)")
    done = run_person("test", PYTHONPATH=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_reader_that_leaves_ends_the_run_with_the_results_so_far(tmp_path):
    trace, report = tmp_path / "called", tmp_path / "report.json"
    slow = "import time\nexact = custom_kernel\n\ndef custom_kernel(data):\n"
    slow += f"    open({str(trace)!r}, 'a').write('x')\n    time.sleep(1)\n    return exact(data)\n"
    cases = ["--case", "1x1024", "--case", "2x1024"]
    process = start("test", *cases, "--json", report, "--submission", write(tmp_path, EXACT + slow))
    assert wait_for(trace.exists)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == ""
    result = json.loads(report.read_text())
    assert [case["case"] for case in result["cases"]] == ["1x1024"] and result["complete"] is False
    assert trace.read_text() == "x"


@pytest.mark.parametrize("words", [["lint"], ["--help"], ["test", "--help"], []])
def test_short_commands_take_a_broken_pipe_calmly(words):
    process = start(*words)
    process.stdout.close()
    assert process.wait(timeout=60) == 141 and process.stderr.read() == ""


def test_a_full_disk_under_standard_output_is_one_line():
    with open("/dev/full", "w") as full:
        process = start("lint", stdout=full)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and said.splitlines() == ["[Errno 28] No space left on device"]


@pytest.mark.parametrize("mode", ["test", "profile"])
def test_a_closed_standard_error_changes_nothing(mode, tmp_path):
    more = ["--trace", tmp_path] if mode == "profile" else []
    process = start(mode, "--case", "1x16", *more, preexec_fn=lambda: os.close(2))
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "1x16" in shown


def test_a_killed_command_leaves_no_worker_and_no_traceback(tmp_path):
    process = start("test", "--case", "1x64", stdin=subprocess.DEVNULL)
    assert wait_for(lambda: process.stdout.readline().startswith("submission"))
    workers = children(process.pid)
    process.kill()
    assert wait_for(lambda: not any(map(is_running, workers)), 30)
    assert "Traceback" not in process.stderr.read()


def test_a_result_that_cannot_be_written_costs_the_exit_code_only(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "Worker", InstantWorker)
    done = run_here("test", "--case", "2x64", "--json", "/dev/full")
    assert done.exit_code == 1 and "not written, --json: " in done.stdout and "│ 2x64" in done.stdout


# ---- what a terminal gets ----


def in_a_terminal(*args, columns=120, **env):
    """All that the command writes to a terminal of so many columns, and its exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        clean = {name: value for name, value in os.environ.items() if name not in ("POPCORN_FD", "NO_COLOR")}
        os.environ.clear()
        os.environ.update(clean, TERM="xterm-256color", COLUMNS=str(columns), **env)
        os.execv(sys.executable, [sys.executable, str(ROOT / "eval.py"), *args])
    written = b""
    with contextlib.suppress(OSError):  # how a terminal says that it ended
        while chunk := os.read(terminal, 1 << 16):
            written += chunk
    os.close(terminal)
    return written.decode(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9\d)(?:;\d+)*m")


def test_a_terminal_gets_a_progress_bar_and_colour_unless_it_asks_for_none():
    written, code = in_a_terminal("test", "--case", "1x64")
    assert code == 0 and "━" * 10 + "\x1b" in written and COLOUR.search(written)
    written, code = in_a_terminal("test", "--case", "1x64", NO_COLOR="1")
    assert code == 0 and "pass" in written and not COLOUR.search(written)


def test_a_narrow_terminal_gets_every_figure_whole():
    written, code = in_a_terminal("test", "--case", "1x64", columns=80, NO_COLOR="1")
    (row,) = [line for line in written.splitlines() if "│ 1x64" in line]
    assert code == 0 and "…" not in row and len(re.findall(r"\d\.\d\de-\d\d / \d\.\d\de-\d\d", row)) == 2


def test_elsewhere_there_is_no_bar_whatever_forces_colour():
    done = run_person("test", "--case", "1x64", FORCE_COLOR="1")
    assert done.returncode == 0 and COLOUR.search(done.stdout) and "\x1b" not in done.stderr


# ---- timed modes and profile ----


@pytest.mark.parametrize("mode", ["benchmark", "leaderboard"])
def test_timed_modes_report_times_and_the_roof(tmp_path, mode):
    report = tmp_path / "report.json"
    options = ["--case", "2x1024", "--case", "1x1024", "--repeats", 4, "--seconds", 30, "--json", report]
    done = run_here(mode, *options)
    assert done.exit_code == 0, done.stdout + done.stderr
    result = json.loads(report.read_text())
    for case in result["cases"]:
        own, reader = case["time"], case["reader_time"]
        assert 3 <= own["runs"] <= 4 and own["runs"] == reader["runs"]
        assert 0 < own["p20_us"] <= own["median_us"] <= own["p80_us"]
        bytes_per_token = {"bf16": 1152, "fp8": 576, "mxfp4": 288 + 24}[case["kv"]]
        assert case["kv_bytes"] == case["args"]["batchsize"] * case["args"]["kvseqlen"] * bytes_per_token
        assert case["gb_per_s"] == pytest.approx(case["kv_bytes"] / own["median_us"] / 1e3)
        assert case["percent_of_reader"] == pytest.approx(100 * reader["median_us"] / own["median_us"])
    medians = [case["time"]["median_us"] for case in result["cases"]]
    assert result["geomean_median_us"] == pytest.approx(math.sqrt(medians[0] * medians[1]))
    assert "geometric mean" in done.stdout


def test_benchmark_of_a_wrong_submission_prints_no_time(tmp_path):
    done = run_here("benchmark", "--case", "2x1024", "--submission", write(tmp_path, ZEROS))
    assert done.exit_code == 112
    assert "FAIL 2x1024" in done.stdout and "geometric mean" not in done.stdout


def as_text(table):
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_words_that_look_like_markup_are_shown_as_they_are():
    result = {"case": "1x1", "good": True, "arm": "[/red]", "kv": "[b]", "config": "[bold]x"}
    assert all(word in as_text(tables.test_table([result])) for word in ("[/red]", "[b]", "[bold]x"))
    assert all(word in as_text(tables.timing_table("benchmark", [result])[0]) for word in ("[/red]", "[bold]x"))


def test_a_time_below_the_readers_is_marked():
    def rendered(median_us):
        answer = {"case": "1x1", "good": True, "durations_ns": [1e3 * median_us] * 3, "reader_ns": [5e3] * 3}
        return as_text(tables.timing_table("benchmark", [cli.add_derived({**answer, "kv_bytes": 1000})])[0])

    assert "500.0 !" in rendered(1.0) and "distrust" in rendered(1.0)
    assert "!" not in rendered(5.0) and "distrust" not in rendered(5.0)


def test_profile_prints_operations_and_writes_a_trace(tmp_path):
    traces, report = tmp_path / "traces", tmp_path / "report.json"
    done = run_here("profile", "--case", "1x256", "--trace", traces, "--json", report)
    assert done.exit_code == 0, done.stdout + done.stderr
    (case,) = json.loads(report.read_text())["cases"]
    times = [time_us for _, _, time_us in case["times"]]
    assert times == sorted(times, reverse=True) and len(times) > tables.PROFILE_ROWS
    assert case["times"][0][0] in done.stdout and f"{len(times) - tables.PROFILE_ROWS} more" in done.stdout
    assert case["trace"] == str(traces / "1x256_4220.json")
    # The trace event format: a list of events, complete ones ("X") with a start and a duration in microseconds.
    events = json.loads(Path(case["trace"]).read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {name for name, _, _ in case["times"]} <= {span["name"] for span in spans}
    assert all(span["dur"] >= 0 and span["ts"] > 0 and "pid" in span and "tid" in span for span in spans)


def test_the_profilers_probes_stay_off_the_terminal_and_its_errors_do_not(tmp_path, capfd):
    done = run_person("profile", "--case", "1x16", "--trace", tmp_path)
    assert done.returncode == 0 and "USDT" not in done.stderr
    with evaluator._without_probes():
        os.write(2, b"USDT:2026 profiler_start\nERROR:2026 USDT: no device\n")
    assert capfd.readouterr().err == "ERROR:2026 USDT: no device\n"


def test_a_gpus_profile_is_of_kernels_by_device_time(tmp_path, monkeypatch):
    from torch.autograd import DeviceType

    def averaged(key, device, self_us, device_us, is_user_annotation=False):
        return types.SimpleNamespace(
            key=key, count=2, device_type=device, self_cpu_time_total=self_us, self_device_time_total=device_us,
            is_user_annotation=is_user_annotation,
        )  # fmt: skip

    class Averages(list):
        def table(self, sort_by, row_limit):
            return sort_by

    class Profile:
        def __init__(self, activities):
            assert torch.profiler.ProfilerActivity.CUDA in activities

        def start(self):
            pass

        stop = start

        def export_chrome_trace(self, path):
            Path(path).touch()

        def key_averages(self):
            return Averages([
                averaged("aten::mm", DeviceType.CPU, 900, 30),
                averaged("combine", DeviceType.CUDA, 0, 5),
                averaged("decode", DeviceType.CUDA, 0, 30),
                averaged("range", DeviceType.CUDA, 0, 40, is_user_annotation=True),
            ])  # fmt: skip

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setitem(sys.modules, "submission", None)  # restores what the session puts there
    session = evaluator._Session(write(tmp_path, EXACT), lambda done, total: None)
    session._timer = types.SimpleNamespace(on_gpu=True, synchronize=lambda: None)
    answer = session.profile(TINY, str(tmp_path / "trace.json"))
    assert answer["times"] == [("decode", 2, 30), ("combine", 2, 5)] and answer["report"] == "self_device_time_total"
    shown = as_text(tables.profile_table({"case": "1x1", "trace": "t.json", **answer}, on_gpu=True))
    assert re.search(r"kernel, by device time ┃ calls", shown)
    assert "saw nothing" not in shown
    nothing = {"case": "1x1", "trace": "t.json", "arm": None, "times": []}
    assert "saw nothing" in as_text(tables.profile_table(nothing, on_gpu=True))
    assert re.search(r"│ decode +│ +2 │ 30\.0 │ 85\.7 │\n│ combine +│ +2 │ +5\.0 │ 14\.3 │", shown)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a CUDA or ROCm GPU")
def test_profile_on_a_gpu_names_the_kernels(tmp_path):
    report = tmp_path / "report.json"
    done = run_here("profile", "--case", "4x1024", "--trace", tmp_path, "--json", report, "--backend", "triton_fp8")
    assert done.exit_code == 0, done.output
    (case,) = json.loads(report.read_text())["cases"]
    names = [name for name, _, _ in case["times"]]
    assert any("decode_fp8" in name for name in names) and not any(name.startswith("aten::") for name in names)
    kernels = [
        evaluator._word(event["name"]) for event in json.loads(Path(case["trace"]).read_text())["traceEvents"]
        if event.get("cat") == "kernel"
    ]  # fmt: skip
    assert set(kernels) <= set(names)


# ---- words and codes ----


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["tset"], "tset"),
        (["test", "--no-such-option"], "--no-such-option"),
        (["test", "--case", "4by1024"], "4by1024"),
        (["test", "--case", "0x1024"], "0x1024"),
        (["test", "--case", "4x0"], "4x0"),
        (["test", "--json", "/dev/null/report.json"], "--json"),
        (["benchmark", "--json", "no/such/folder/report.json"], "no/such/folder"),
        (["test", "--json", "tests"], "--json"),
        (["profile", "--trace", "/dev/null/traces"], "--trace"),
        (["profile", "--trace", "/proc/traces"], "--trace"),
        (["test", "--submission", "no_such_file.py"], "no_such_file.py"),
        (["benchmark", "--repeats", "0"], "--repeats"),
        (["benchmark", "--seconds", "nan"], "--seconds"),
        (["test", "--timeout", "nan"], "--timeout"),
        (["test", "--case", "٣x1024"], "٣x1024"),
        (["test", "--case", "2147483648x1"], "2147483647"),
        (["test", "--case", "9" * 5000 + "x1"], "--case"),
        (["test", "--case", "4x1024", "--cases", "cases.txt"], "expected one of --case and --cases"),
    ],
)
def test_wrong_usage_is_2(args, named):
    done = run_here(*args)
    assert done.exit_code == 2 and named in done.stderr


def test_lint_names_broken_rules_and_gives_the_submit_command(tmp_path):
    done = run_here("lint")
    assert done.exit_code == 0
    for mode in ("test", "leaderboard"):
        command = f"popcorn submit --no-tui --gpu MI355X --leaderboard amd-mixed-mla --mode {mode}"
        assert f"\n{command} {os.path.relpath(ROOT / 'submission.py')}\n" in done.stdout
    done = run_here("lint", "--submission", write(tmp_path, EXACT))
    assert done.exit_code == 112 and "FAIL header: expected '#!POPCORN gpu MI355X'" in done.stdout
    done = run_here("lint", "--submission", write(tmp_path, REPLAY))
    assert done.exit_code == 112 and "FAIL kernelguard: " in done.stdout


def test_lint_gives_the_command_for_the_file_it_was_given_and_a_reason_for_no_verdict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    header = "".join(REPLAY.splitlines(keepends=True)[:2])
    done = run_here("lint", "--submission", write(tmp_path, header, "my file.py"))
    assert done.exit_code == 0 and done.stdout.endswith("--mode leaderboard 'my file.py'\n")

    def no_verdict(content):
        raise RuntimeError("kernelguard: expected a verdict")

    monkeypatch.setattr(cli, "kernelguard_verdict", no_verdict)
    done = run_here("lint", "--submission", "my file.py")
    assert done.exit_code == 112 and done.stdout == "FAIL kernelguard: expected a verdict\n"
    monkeypatch.setattr(cli, "kernelguard_verdict", lambda content: None)
    done = run_here("lint", "--submission", "my file.py")
    assert done.exit_code == 0 and "kernelguard: not installed, not asked" in done.stdout


def test_case_file_by_hand(tmp_path):
    cases = tmp_path / "cases.txt"
    cases.write_text(case_line(2, 1024, 3))
    done = run_here("test", "--cases", cases)
    assert done.exit_code == 0 and "2x1024" in done.stdout
    cases.write_text(case_line() + "\n\n")
    done = run_here("test", "--cases", cases)
    assert done.exit_code == 113 and "expected 'name: value', got ''" in done.stderr


def test_official_cases_are_the_default():
    assert choose_cases("test", None, None) == TESTS
    assert choose_cases("benchmark", None, None) == BENCHMARKS


def test_case_words_take_the_official_seed_of_their_shape():
    case = parse_case_word("32x8192", [*BENCHMARKS, *TESTS])
    assert case == {"batchsize": 32, "qseqlen": 1, "kvseqlen": 8192, "seed": 5415}
    case = parse_case_word("3x5x2", BENCHMARKS)
    assert case == {"batchsize": 3, "qseqlen": 2, "kvseqlen": 5, "seed": DEFAULT_SEED}
    with pytest.raises(typer.BadParameter):
        parse_case_word("32x", BENCHMARKS)


def test_percentiles():
    summary = time_summary([1e3 * time_us for time_us in range(11)])
    assert summary == {"runs": 11, "median_us": 5, "mean_us": 5, "p20_us": 2, "p80_us": 8}
    assert time_summary([7e3])["p80_us"] == 7


def test_every_command_teaches_by_examples_that_parse(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.py").touch()
    (tmp_path / "old.json").touch()
    (tmp_path / "cases.txt").write_text(case_line())
    group = typer.main.get_command(cli.app)
    for name, command in {"": group, **group.commands}.items():
        shown = run_here(*filter(None, [name]), "--help").stdout
        examples = re.findall(r"python eval\.py (.+?) +\[dim\](# .+)\[/dim\]", command.epilog)
        assert len(examples) >= 2
        for example, purpose in examples:
            words = shlex.split(example)
            assert name in ("", words[0])
            assert re.search(rf"python eval\.py {example} +{re.escape(purpose)}", shown), "on one line of 80 columns"
            context = group.commands[words[0]].make_context(words[0], words[1:])
            if words[0] != "lint":
                assert choose_cases(words[0], context.params["case"], context.params["cases"])


def test_help_lists_every_exit_code():
    codes = {value for module in (evaluator, console) for name, value in vars(module).items() if name[:5] == "EXIT_"}
    assert {0, 1, 2, 111, 112, 113, 130, 141} == codes
    shown = run_here("--help").stdout.partition("Exit codes: ")[2]
    assert {int(code) for code in re.findall(r"(?:^|, )(\d+) ", " ".join(shown.split()))} == codes


def test_the_parent_needs_no_torch_and_a_missing_extra_is_named():
    code = "import sys; sys.modules['torch'] = None; import eval; from bench.options import choose_cases; "
    code += "choose_cases('test', None, None); eval.main(['--help'])"
    env = {name: value for name, value in os.environ.items() if name != "POPCORN_FD"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "benchmark" in done.stdout
    for package, words, extra in (("typer", ["test"], "cli"), ("matplotlib", ["benchmark", "--plot", "x.png"], "plot")):
        code = f"import sys; sys.modules[{package!r}] = None; import eval; sys.exit(eval.main({words}))"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 2 and f"pip install -e '.[{extra}]'" in done.stderr and done.stderr.count("\n") == 1
