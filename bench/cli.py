"""The person's side of `eval.py`: commands, tables, progress and JSON around the evaluator's worker."""

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Table

import eval as evaluator
from bench.compare import RULE, ResultError, compare, comparison_table, load_result, timed_cases
from bench.console import EXIT_BROKEN_PIPE, EXIT_UNWRITTEN, make_console, nobody_reads, progress_bar
from bench.file_rules import broken_rules, kernelguard_verdict, submit_command
from bench.measure import time_summary
from bench.options import (
    Case,
    CaseOption,
    JsonOption,
    PlotOption,
    case_label,
    choose_cases,
    require_arm,
    require_folder,
    require_number,
)
from bench.tables import profile_table, test_table, timing_table
from eval import EXIT_CHECK_FAILED, EXIT_INTERRUPTED, EXIT_OK, Worker

# A CPU needs seconds for one call of a large case; a GPU keeps the official bound.
CPU_SECONDS_PER_CASE = 20.0

EXIT_CODES = (
    "Exit codes: 0 all checks passed, 1 a result could not be written, 2 wrong usage, 111 a case file but no usable "
    "POPCORN_FD, 112 a check failed, 113 bad case file, 130 interrupted (Ctrl-C), 141 nobody reads the output any more."
)


def with_examples(*examples: tuple[str, str], after: str = "") -> str:
    """An epilog of commands and what they are for; blank lines keep each on a line of its own."""
    width = max(len(command) for command, _ in examples)
    lines = [f"  python eval.py {command:{width}}  [dim]# {purpose}[/dim]" for command, purpose in examples]
    return "\n\n".join(["Examples:", *lines, *filter(None, [after]), EXIT_CODES])


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Judge an MLA decode submission: strictly against a float64 oracle, and in time against a plain reader.",
    epilog=with_examples(
        ("test", "is submission.py right?"),
        ("test --case 32x8192", "batch 32, 8192 tokens each"),
        ("test --submission other.py", "is that file right?"),
        ("benchmark --json old.json", "how fast? keep the numbers"),
        ("benchmark --compare old.json", "after a change: faster?"),
        ("profile --case 64x8192", "which kernels take the time?"),
        ("lint", "may it be submitted, and how?"),
    ),
)


CasesOption = Annotated[Path | None, typer.Option("--cases", help="Case file in the platform's format.")]
BackendOption = Annotated[str | None, typer.Option("--backend", help="Arm to force (sets MLA_BACKEND).")]
SubmissionOption = Annotated[
    Path, typer.Option("--submission", exists=True, dir_okay=False, help="The file to judge.", show_default=False)
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, callback=require_number, help="Seconds one case may take in all.")
]
RepeatsOption = Annotated[
    int | None, typer.Option("--repeats", min=1, help="Most timed runs of a case; officially 1000, leaderboard 100.")
]
SecondsOption = Annotated[
    float | None,
    typer.Option(
        "--seconds",
        min=0.0,
        callback=require_number,
        help="Stop timing a case after this long, three runs at least; 120, on a CPU 20.",
    ),
]
CompareOption = Annotated[
    Path | None,
    typer.Option(
        "--compare",
        metavar="OLD.json",
        exists=True,
        dir_okay=False,
        help="Compare with this result of an earlier --json, case by case; being slower is no failure.",
    ),
]
OWN_SUBMISSION = evaluator.ROOT / "submission.py"
DEFAULT_TIMEOUT_S = 900.0


def add_derived(answer: dict[str, Any]) -> dict[str, Any]:
    """Turn a timed case's raw durations into what the tables and the JSON file show."""
    if "durations_ns" not in answer:
        return answer
    reader_ns = answer.pop("reader_ns")
    answer["time"] = time_summary(answer.pop("durations_ns"))
    answer["reader_time"] = time_summary(reader_ns)
    median_us = answer["time"]["median_us"]
    answer["gb_per_s"] = answer["kv_bytes"] / median_us / 1e3
    answer["percent_of_reader"] = 100 * answer["reader_time"]["median_us"] / median_us
    return answer


class Run:
    """One command's work: asks the worker case by case, collects results, prints them and decides the exit code.

    Ctrl-C and a reader that leaves stop it early; the results so far are kept.
    """

    def __init__(self, mode: str, submission: Path, backend: str | None, timeout_s: float, json_path: Path | None):
        if backend is not None:
            os.environ["MLA_BACKEND"] = backend
        self.mode = mode
        self.submission = submission.resolve()
        self.console = make_console()
        self.environment: dict[str, Any] = {}
        self.results: list[dict[str, Any]] = []
        self.cases = 0
        self.json_path = json_path
        self._timeout_s = timeout_s
        self._stopped: int | str | None = None
        self._unwritten: list[str] = []

    @property
    def complete(self) -> bool:
        return self._stopped is None and len(self.results) == self.cases

    def ask_all(self, cases: Sequence[Case], ask: Callable[[Callable, Case], dict[str, Any]]) -> None:
        """Run `ask(ask_worker, args)` for each case, `ask_worker` being `Worker.ask` with this run's time limit."""
        self.cases = len(cases)
        try:
            with Worker(self.submission) as worker:
                self._require_known_arm(worker)
                self._describe(worker)
                with progress_bar(self.mode, len(cases)) as (bar, task):
                    for args in cases:
                        if nobody_reads():
                            sys.exit(EXIT_BROKEN_PIPE)
                        label = case_label(args)
                        bar.update(task, description=f"{self.mode} {label}")

                        def on_progress(done: int, total: int, label: str = label) -> None:
                            bar.update(task, description=f"{self.mode} {label}, run {done} of at most {total}")

                        ask_worker = partial(worker.ask, timeout_s=self._timeout_s, on_progress=on_progress)
                        answer = ask(ask_worker, args)
                        self.results.append({"case": label, "args": args, **add_derived(answer)})
                        bar.advance(task)
        except KeyboardInterrupt:
            self._stopped = EXIT_INTERRUPTED
        except SystemExit as stop:
            self._stopped = stop.code

    def _require_known_arm(self, worker: Worker) -> None:
        """Refuse an arm that the submission does not list; one that lists none may have any."""
        arm = os.environ.get("MLA_BACKEND")
        arms = worker.ask("arms", timeout_s=self._timeout_s).get("arms") if arm else None
        if arm and arms:
            require_arm(arm, arms, "--backend", "MLA_BACKEND")

    def _describe(self, worker: Worker) -> None:
        self.environment = worker.ask("environment")
        if not self.environment.pop("good"):
            self.console.print(f"error: {self.environment['message']}", markup=False)
            sys.exit(EXIT_CHECK_FAILED)
        for name, value in {"submission": self.submission.name, **self.environment}.items():
            if name != "on_gpu":
                self.console.print(f"{name:>10}: {value}", markup=False)

    def document(self) -> dict[str, Any]:
        """What `--json` writes."""
        return {
            "mode": self.mode,
            "command": ["python", "eval.py", *sys.argv[1:]],
            "submission": self.submission.name,
            "environment": self.environment,
            "cases": self.results,
            "complete": self.complete,
            "passed": self.complete and all(result["good"] for result in self.results),
        }

    def write(self, option: str, action: Callable[[], object]) -> None:
        """Write one of the files asked for; one that cannot be written costs the exit code, not the other results."""
        try:
            action()
        except OSError as error:
            self._unwritten.append(f"{option}: {error}")

    def finish(self, *tables: Table, extra: dict[str, Any] | None = None) -> NoReturn:
        """Write the JSON file, print the tables and one line for each failed case, exit with the documented code."""
        if self.json_path is not None:
            text = json.dumps(_finite({**self.document(), **(extra or {})}), indent=2) + "\n"
            self.write("--json", partial(self.json_path.write_text, text, encoding="utf-8"))
        for table in tables if self.results else ():
            self.console.print(table)
        failed = [result for result in self.results if not result["good"]]
        for result in failed:
            self.console.print(f"FAIL {result['case']}: {result['message']}", markup=False, soft_wrap=True)
        for line in self._unwritten:
            self.console.print(f"not written, {line}", markup=False, soft_wrap=True)
        if self._stopped is not None:
            self.console.print(f"stopped after {len(self.results)} of {self.cases} cases")
            sys.exit(self._stopped)
        if failed:
            sys.exit(EXIT_CHECK_FAILED)
        sys.exit(EXIT_UNWRITTEN if self._unwritten else EXIT_OK)


def _finite(value: Any) -> Any:
    """The same nest with NaN and infinities, which JSON has no words for, as None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@app.command(
    epilog=with_examples(
        ("test", "the official cases"),
        ("test --case 32x8192 --case 4x1000x2", "x2: two queries"),
        ("test --backend torch_bmm", "force an arm"),
        ("test --submission other.py", "judge another file"),
        ("test --cases cases.txt --json out.json", "keep the figures"),
        after="[dim]strict[/dim] decides: errors against float64 attention over every token. "
        "[dim]official[/dim] is what the leaderboard's check would have said; it forgives much.",
    )
)
def test(
    case: CaseOption = None,
    cases: CasesOption = None,
    json_path: JsonOption = None,
    backend: BackendOption = None,
    submission: SubmissionOption = OWN_SUBMISSION,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
) -> None:
    """Check every output: the strict verdict decides, the official one is shown beside it."""
    chosen = choose_cases("test", case, cases)
    run = Run("test", submission, backend, timeout, json_path)
    run.ask_all(chosen, lambda ask_worker, args: ask_worker("test", args=args, full=True))
    run.finish(test_table(run.results))


def _old_result(path: Path, chosen: Sequence[Case]) -> dict[str, Any]:
    """The result to compare with; refused, before any work, if it is none or holds none of the chosen cases."""
    try:
        old = load_result(path)
    except ResultError as error:
        raise typer.BadParameter(str(error), param_hint="--compare") from error
    labels = list(map(case_label, chosen))
    if not set(labels) & set(timed_cases(old)):
        raise typer.BadParameter(
            f"expected a time of {', '.join(labels)} in {str(path)!r}, got {', '.join(timed_cases(old)) or 'none'}",
            param_hint="--compare",
        )
    return old


def _plot(run: Run, picture: Path, old: dict[str, Any] | None, old_name: str) -> None:
    from bench.roofline import ROOF, draw

    own, timed = run.submission.name, timed_cases(run.document())
    if not timed:
        run.console.print(f"no case was timed, so {picture} is not drawn", markup=False)
        return
    times_us = {
        label: {"reader": case["reader_time"]["median_us"], own: case["time"]["median_us"]}
        for label, case in timed.items()
    }
    styles: dict[str, dict[str, Any]] = {"reader": ROOF, own: {"color": "tab:red", "marker": "o"}}
    if old is not None:
        styles[old_name] = {"color": "tab:gray", "marker": "x"}
        for label, case in timed_cases(old).items():
            if label in times_us:
                times_us[label][old_name] = case["time"]["median_us"]
    run.write("--plot", partial(draw, picture, times_us, styles, run.environment))


COMPARING = f"[dim]--compare[/dim] calls a case {RULE}. The exit code does not tell: it is that of the checks."


@app.command(
    "leaderboard",
    help="Time each case as the ranking does: a new input for every call, every output checked.",
    epilog=with_examples(
        ("leaderboard", "timed as in the ranking"),
        ("leaderboard --repeats 10", "at most ten new inputs"),
        ("leaderboard --json old.json", "keep the numbers"),
        ("leaderboard --compare old.json", "is it faster now?"),
        after=COMPARING,
    ),
)
@app.command(
    "benchmark",
    help="Time each case: one checked call, then timed calls on the same input, each followed by the reader.",
    epilog=with_examples(
        ("benchmark", "the ranked shapes"),
        ("benchmark --case 32x8192 --repeats 50", "one, 50 runs"),
        ("benchmark --json old.json", "keep the numbers"),
        ("benchmark --compare old.json", "is it faster now?"),
        ("benchmark --plot times.png", "with the roof"),
        after=COMPARING,
    ),
)
def timed(
    context: typer.Context,
    case: CaseOption = None,
    cases: CasesOption = None,
    json_path: JsonOption = None,
    old_path: CompareOption = None,
    picture: PlotOption = None,
    backend: BackendOption = None,
    repeats: RepeatsOption = None,
    seconds: SecondsOption = None,
    submission: SubmissionOption = OWN_SUBMISSION,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
) -> None:
    mode = context.command.name or ""
    chosen = choose_cases(mode, case, cases)
    if picture is not None and json_path is not None and picture.resolve() == json_path.resolve():
        message = f"expected another file than that of --json, got {str(picture)!r}"
        raise typer.BadParameter(message, param_hint="--plot")
    old = None if old_path is None else _old_result(old_path, chosen)
    old_name = "" if old_path is None else old_path.name
    protocol = evaluator.PROTOCOLS[mode]
    if repeats is not None:
        protocol = replace(protocol, max_repeats=repeats)
    run = Run(mode, submission, backend, timeout, json_path)
    warm = False

    def ask(ask_worker: Callable, args: Case) -> dict[str, Any]:
        nonlocal warm
        limit_s = seconds
        if limit_s is None and not run.environment["on_gpu"]:
            limit_s = CPU_SECONDS_PER_CASE
        bounded = protocol if limit_s is None else replace(protocol, max_wall_ns=limit_s * 1e9)
        if not warm:
            answer = ask_worker("benchmark", args=args, protocol=evaluator.WARM_UP[mode])
            if not answer["good"]:
                return answer
            warm = True
        return ask_worker("benchmark", args=args, protocol=bounded, full=True)

    run.ask_all(chosen, ask)
    table, means = timing_table(mode, run.results, run.complete)
    tables, extra = [table], {"protocol": asdict(protocol), **means}
    if old is not None:
        comparison = compare(old, run.document())
        tables.append(comparison_table(comparison, old_name))
        extra["comparison"] = {"old": old_name, **asdict(comparison)}
    if picture is not None:
        _plot(run, picture, old, old_name)
    run.finish(*tables, extra=extra)


@app.command(
    epilog=with_examples(
        ("profile --case 64x8192", "trace in traces/"),
        ("profile --trace /tmp/traces", "the eight ranked shapes"),
        ("profile --backend torch_bmm", "another arm"),
        after="A trace opens in chrome://tracing or https://ui.perfetto.dev.",
    )
)
def profile(
    case: CaseOption = None,
    cases: CasesOption = None,
    json_path: JsonOption = None,
    backend: BackendOption = None,
    trace: Annotated[
        Path, typer.Option("--trace", file_okay=False, help="Folder for one browser-readable trace a case.")
    ] = Path("traces"),
    submission: SubmissionOption = OWN_SUBMISSION,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
) -> None:
    """Profile one warm call of each case: kernels by device time, on a CPU operations by their own."""
    chosen = choose_cases("profile", case, cases)
    require_folder(trace, make=True, option="--trace")
    run = Run("profile", submission, backend, timeout, json_path)

    def ask(ask_worker: Callable, args: Case) -> dict[str, Any]:
        path = str(trace / f"{case_label(args)}_{args['seed']}.json")
        answer = ask_worker("profile", args=args, trace=path, warm=True)
        answer.pop("report", None)
        return {**answer, "trace": path} if answer["good"] else answer

    run.ask_all(chosen, ask)
    run.finish(*(profile_table(result, run.environment["on_gpu"]) for result in run.results if "times" in result))


@app.command(
    epilog=with_examples(
        ("lint", "is submission.py in order?"),
        ("lint --submission other.py", "another file"),
    )
)
def lint(submission: SubmissionOption = OWN_SUBMISSION) -> None:
    """Hold the file to the leaderboard's rules and, where it is installed, to kernelguard; print how to submit it."""
    console = make_console()
    content = submission.read_bytes()
    failures = broken_rules(content)
    try:
        verdict = kernelguard_verdict(content)
        if verdict is None:
            console.print("kernelguard: not installed, not asked; it comes with the extra `test`", markup=False)
        else:
            filtered, patterns = verdict
            failures += [f"kernelguard: {pattern}" for pattern in patterns]
            if filtered and not patterns:
                failures.append("kernelguard: would filter the file")
    except RuntimeError as error:
        failures.append(str(error))
    for failure in failures:
        console.print(f"FAIL {failure}", markup=False, soft_wrap=True)
    if failures:
        sys.exit(EXIT_CHECK_FAILED)
    commands = "\n".join(submit_command(os.path.relpath(submission), mode) for mode in ("test", "leaderboard"))
    console.print(f"{submission.name} keeps every rule; to submit it:\n{commands}", markup=False, soft_wrap=True)
