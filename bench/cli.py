"""The person's side of `eval.py`: commands, tables, progress and JSON around the evaluator's worker."""

import contextlib
import json
import math
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import eval as evaluator
from bench.file_rules import SUBMIT_COMMAND, broken_rules, kernelguard_verdict
from eval import EXIT_BAD_CASE_FILE, EXIT_CHECK_FAILED, CaseFileError, TestCase, Worker

if TYPE_CHECKING:
    from task import TestSpec

EXIT_INTERRUPTED = 130
PIPE_WIDTH = 160
DEFAULT_SEED = 4220
# A CPU needs seconds for one call of a large case; a GPU keeps the official bound.
CPU_SECONDS_PER_CASE = 20.0

EXAMPLES = """
Examples:

  python eval.py test                        # the official cases

  python eval.py benchmark --case 32x8192    # batch 32, 8192 tokens

  python eval.py test --backend torch_bmm    # force an arm

  python eval.py test --submission other.py  # judge another file

  python eval.py benchmark --json new.json   # keep the numbers

Exit codes: 0 all checks passed, 2 wrong usage, 112 a check failed, 113 bad case file, 130 interrupted.
"""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Judge an MLA decode submission: strictly against a float64 oracle, and in time against a plain reader.",
    epilog=EXAMPLES,
)


def _require_place(path: Path | None) -> Path | None:
    """Refuse, before any work, a result file whose folder takes no new file."""
    if path is not None and not path.exists():
        _require_folder(path.parent)
    return path


def _require_folder(folder: Path | None) -> Path | None:
    """Refuse, before any work, a folder that takes no new file."""
    if folder is not None:
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise typer.BadParameter(f"expected a place to write to, got {str(folder)!r}: {error.strerror}") from error
    return folder


def _make_folder(folder: Path | None) -> Path | None:
    if folder is not None:
        with contextlib.suppress(OSError):  # what is not there is refused below
            folder.mkdir(parents=True, exist_ok=True)
    return _require_folder(folder)


CaseOption = Annotated[
    list[str] | None,
    typer.Option(
        "--case", metavar="BxKV[xQ]", help="Batch x cached tokens, x queries a sequence if not one; repeatable."
    ),
]
CasesOption = Annotated[Path | None, typer.Option("--cases", help="Case file in the platform's format.")]
JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        dir_okay=False,
        writable=True,
        callback=_require_place,
        help="Write environment and results to this file.",
    ),
]
BackendOption = Annotated[str | None, typer.Option("--backend", help="Arm to force (sets MLA_BACKEND).")]
SubmissionOption = Annotated[
    Path, typer.Option("--submission", exists=True, dir_okay=False, help="The file to judge.", show_default=False)
]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds one case may take in all.")]
RepeatsOption = Annotated[
    int | None, typer.Option("--repeats", min=1, help="Most timed runs of a case; officially 1000, leaderboard 100.")
]
SecondsOption = Annotated[
    float | None,
    typer.Option(
        "--seconds", min=0.0, help="Stop timing a case after this long, three runs at least; 120, on a CPU 20."
    ),
]

OWN_SUBMISSION = evaluator.ROOT / "submission.py"
DEFAULT_TIMEOUT_S = 900.0


def case_label(args: Mapping[str, Any]) -> str:
    """`32x8192`, with `x2` appended for two queries a sequence."""
    sizes = [args.get(name, "?") for name in ("batchsize", "kvseqlen", "qseqlen")]
    return "x".join(str(size) for size in (sizes if sizes[2] != 1 else sizes[:2]))


def parse_case_word(word: str, official: "list[TestSpec]") -> TestCase:
    """`BxKV` or `BxKVxQ` as a case, with the seed of the first official case of that shape where there is one.

    Raises typer.BadParameter for anything else.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?", word)
    if match is None:
        raise typer.BadParameter(f"expected BATCHxKV or BATCHxKVxQ such as 32x8192, got {word!r}", param_hint="--case")
    shape = {"batchsize": int(match[1]), "qseqlen": int(match[3] or 1), "kvseqlen": int(match[2])}
    seeds = [case["seed"] for case in official if shape.items() <= case.items()]
    return as_test_case({**shape, "seed": seeds[0] if seeds else DEFAULT_SEED})


def as_test_case(args: Mapping[str, Any]) -> TestCase:
    return TestCase(dict(args), "; ".join(f"{name}: {value}" for name, value in args.items()))


def choose_cases(mode: str, words: list[str] | None, case_file: Path | None) -> list[TestCase]:
    """The cases of `--case` or `--cases`, else the official ones of the mode; exits with 113 for a bad file."""
    from task import BENCHMARKS, TESTS

    if words and case_file:
        raise typer.BadParameter("expected one of --case and --cases, got both", param_hint="--cases")
    if case_file:
        try:
            return evaluator.read_case_file(case_file)
        except CaseFileError as error:
            Console(stderr=True, highlight=False).print(str(error), markup=False)
            raise typer.Exit(EXIT_BAD_CASE_FILE) from error
    own, other = (TESTS, BENCHMARKS) if mode == "test" else (BENCHMARKS, TESTS)
    if words:
        return [parse_case_word(word, [*own, *other]) for word in words]
    return [as_test_case(case) for case in own]


def make_console() -> Console:
    """Standard output; a pipe or file gets a width of its own, so that tables are not squeezed into 80 columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


@contextlib.contextmanager
def progress_bar(description: str, total: int) -> Iterator[tuple[Progress, Any]]:
    """A bar on standard error, shown on a terminal only."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task(description, total=total)


def time_summary(durations_ns: list[float]) -> dict[str, float]:
    """Median, mean, 20th and 80th percentile in microseconds, and the number of runs."""
    times_us = [duration / 1e3 for duration in durations_ns]
    deciles = statistics.quantiles(times_us, n=10, method="inclusive") if len(times_us) > 1 else times_us * 9
    return {
        "runs": len(times_us),
        "median_us": statistics.median(times_us),
        "mean_us": statistics.fmean(times_us),
        "p20_us": deciles[1],
        "p80_us": deciles[7],
    }


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
    """One command's work: asks the worker case by case, collects results, prints them and decides the exit code."""

    def __init__(self, mode: str, submission: Path, backend: str | None, timeout_s: float, json_path: Path | None):
        if backend is not None:
            os.environ["MLA_BACKEND"] = backend
        self.mode = mode
        self.submission = submission.resolve()
        self.console = make_console()
        self.environment: dict[str, Any] = {}
        self.results: list[dict[str, Any]] = []
        self._json_path = json_path
        self._timeout_s = timeout_s
        self._interrupted = False

    def ask_all(self, cases: list[TestCase], ask: Callable[[Callable, TestCase], dict[str, Any]]) -> None:
        """Run `ask(ask_worker, case)` for each case, `ask_worker` being `Worker.ask` with this run's time limit.

        Ctrl-C keeps the results so far.
        """
        try:
            with Worker(self.submission) as worker:
                self._describe(worker)
                with progress_bar(self.mode, len(cases)) as (bar, task):
                    for case in cases:
                        label = case_label(case.args)
                        bar.update(task, description=f"{self.mode} {label}")

                        def on_progress(done: int, total: int, label: str = label) -> None:
                            bar.update(task, description=f"{self.mode} {label}, run {done} of at most {total}")

                        ask_worker = partial(worker.ask, timeout_s=self._timeout_s, on_progress=on_progress)
                        answer = ask(ask_worker, case)
                        self.results.append({"case": label, "args": case.args, **add_derived(answer)})
                        bar.advance(task)
        except KeyboardInterrupt:
            self._interrupted = True

    def _describe(self, worker: Worker) -> None:
        self.environment = worker.ask("environment")
        if not self.environment.pop("good"):
            self.console.print(f"error: {self.environment['message']}", markup=False)
            raise typer.Exit(EXIT_CHECK_FAILED)
        for name, value in {"submission": self.submission.name, **self.environment}.items():
            if name != "on_gpu":
                self.console.print(f"{name:>10}: {value}", markup=False)

    def finish(self, table: Table | None = None, extra: dict[str, Any] | None = None) -> None:
        """Print the table and one line for each failed case, write the JSON file, exit with the documented code."""
        failed = [result for result in self.results if not result["good"]]
        if table is not None:
            self.console.print(table)
        for result in failed:
            self.console.print(f"FAIL {result['case']}: {result['message']}", markup=False, soft_wrap=True)
        passed = not failed and not self._interrupted
        if self._json_path is not None:
            report = {
                "mode": self.mode,
                "command": ["python", "eval.py", *sys.argv[1:]],
                "submission": self.submission.name,
                "environment": self.environment,
                "cases": self.results,
                **(extra or {}),
                "passed": passed,
            }
            self._json_path.write_text(json.dumps(_finite(report), indent=2) + "\n", encoding="utf-8")
        if self._interrupted:
            self.console.print("interrupted; the results so far are above")
            raise typer.Exit(EXIT_INTERRUPTED)
        raise typer.Exit(EXIT_CHECK_FAILED if failed else evaluator.EXIT_OK)


def _finite(value: Any) -> Any:
    """The same nest with NaN and infinities, which JSON has no words for, as None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_results(path: Path, timer: evaluator.ColdTimer, results: list[dict[str, Any]]) -> None:
    """JSON of `results` and of what they were measured on; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"environment": evaluator.describe_environment(timer), "results": results}
    path.write_text(json.dumps(document, indent=1) + "\n")


def geometric_mean(values: list[float]) -> float:
    return statistics.geometric_mean(values) if values else math.nan


def _mark(good: bool | None) -> str:
    return {True: "[green]pass[/green]", False: "[red]FAIL[/red]", None: "-"}[good]


def _against_bound(strict: dict[str, Any], name: str) -> str:
    value, bound = strict.get(f"{name}_error", math.nan), strict.get(f"{name}_bound", math.nan)
    return "-" if math.isnan(value) else f"{value:.2e} / {bound:.2e}"


def _said(result: dict[str, Any], *names: str) -> list[str]:
    """Cells with the submission's own words, which may look like markup."""
    return [escape(result.get(name) or "-") for name in names]


def _share(percent: float) -> str:
    """An exact kernel cannot take less time than reading its cache: more than 100 % is marked."""
    return f"[red]{percent:.1f} ![/red]" if percent > 100 else f"{percent:.1f}"


def _plain(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def test_table(results: list[dict[str, Any]]) -> Table:
    """Strict figures per case: relative L2 errors over the cache that was read and over the bf16 cache, worst gain."""
    table = Table(title="strict check against the float64 oracle, relative L2 error / bound")
    for name in ("case", "arm", "cache", "config", "kernel", "end to end", "worst slope", "strict", "official"):
        table.add_column(name, no_wrap=True)
    for result in results:
        strict = result.get("strict", {})
        table.add_row(
            result["case"],
            *_said(result, "arm", "kv", "config"),
            _against_bound(strict, "kernel"),
            _against_bound(strict, "end_to_end"),
            _plain(strict.get("worst_slope", math.nan)),
            _mark(result["good"]),
            _mark(result.get("official_good")),
        )
    return table


def timing_table(mode: str, results: list[dict[str, Any]]) -> tuple[Table, dict[str, float]]:
    """The table of a timed mode and the geometric means under it; a failed case leaves no means."""
    table = Table(title=f"{mode}: microseconds, cold cache; GB/s and reader over the bytes of the arm's cache")
    for name in ("case", "arm", "config"):
        table.add_column(name, no_wrap=True)
    for name in ("median", "mean", "p20", "p80", "runs", "GB/s", "reader", "% of reader"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("strict", no_wrap=True)
    if any(result.get("percent_of_reader", 0) > 100 for result in results):
        table.caption = "! faster than reading its cache once: distrust the time, or the reader's"
    timed = [result for result in results if "time" in result]
    for result in results:
        cells = [result["case"], *_said(result, "arm", "config")]
        if "time" in result:
            times = result["time"]
            cells += [f"{times[name]:.1f}" for name in ("median_us", "mean_us", "p20_us", "p80_us")]
            cells += [str(times["runs"]), f"{result['gb_per_s']:.1f}"]
            cells += [f"{result['reader_time']['median_us']:.1f}", _share(result["percent_of_reader"])]
        else:
            cells += ["-"] * 8
        table.add_row(*cells, _mark(result["good"]))
    means: dict[str, float] = {}
    if timed and len(timed) == len(results):
        means = {
            "geomean_median_us": geometric_mean([result["time"]["median_us"] for result in timed]),
            "geomean_mean_us": geometric_mean([result["time"]["mean_us"] for result in timed]),
            "geomean_reader_us": geometric_mean([result["reader_time"]["median_us"] for result in timed]),
        }
        percent = _share(100 * means["geomean_reader_us"] / means["geomean_median_us"])
        table.add_section()
        table.add_row(
            "geometric mean", "", "", f"{means['geomean_median_us']:.1f}", f"{means['geomean_mean_us']:.1f}",
            "", "", "", "", f"{means['geomean_reader_us']:.1f}", percent, "",
        )  # fmt: skip
    return table, means


@app.command(epilog=EXAMPLES)
def test(
    case: CaseOption = None,
    cases: CasesOption = None,
    json: JsonOption = None,
    backend: BackendOption = None,
    submission: SubmissionOption = OWN_SUBMISSION,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
) -> None:
    """Check every output: the strict verdict decides, the official one is shown beside it."""
    chosen = choose_cases("test", case, cases)
    run = Run("test", submission, backend, timeout, json)
    run.ask_all(chosen, lambda ask_worker, one: ask_worker("test", args=one.args, full=True))
    run.finish(test_table(run.results))


def _timed(mode: str, chosen: list[TestCase], run: Run, repeats: int | None, seconds: float | None) -> None:
    protocol = evaluator.PROTOCOLS[mode]
    if repeats is not None:
        protocol = replace(protocol, max_repeats=repeats)
    warm = False

    def ask(ask_worker: Callable, one: TestCase) -> dict[str, Any]:
        nonlocal warm
        limit_s = seconds
        if limit_s is None and not run.environment["on_gpu"]:
            limit_s = CPU_SECONDS_PER_CASE
        bounded = protocol if limit_s is None else replace(protocol, max_wall_ns=limit_s * 1e9)
        if not warm:
            answer = ask_worker("benchmark", args=one.args, protocol=evaluator.WARM_UP[mode])
            if not answer["good"]:
                return answer
            warm = True
        return ask_worker("benchmark", args=one.args, protocol=bounded, full=True)

    run.ask_all(chosen, ask)
    table, means = timing_table(mode, run.results)
    run.finish(table, {"protocol": asdict(protocol), **means})


@app.command(epilog=EXAMPLES)
def benchmark(
    case: CaseOption = None,
    cases: CasesOption = None,
    json: JsonOption = None,
    backend: BackendOption = None,
    repeats: RepeatsOption = None,
    seconds: SecondsOption = None,
    submission: SubmissionOption = OWN_SUBMISSION,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
) -> None:
    """Time each case: one checked call, then timed calls on the same input, each followed by the reader."""
    chosen = choose_cases("benchmark", case, cases)
    _timed("benchmark", chosen, Run("benchmark", submission, backend, timeout, json), repeats, seconds)


@app.command(epilog=EXAMPLES)
def leaderboard(
    case: CaseOption = None,
    cases: CasesOption = None,
    json: JsonOption = None,
    backend: BackendOption = None,
    repeats: RepeatsOption = None,
    seconds: SecondsOption = None,
    submission: SubmissionOption = OWN_SUBMISSION,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
) -> None:
    """Time each case as the ranking does: a new input for every call, every output checked."""
    chosen = choose_cases("leaderboard", case, cases)
    _timed("leaderboard", chosen, Run("leaderboard", submission, backend, timeout, json), repeats, seconds)


@app.command(epilog=EXAMPLES)
def profile(
    case: CaseOption = None,
    cases: CasesOption = None,
    json: JsonOption = None,
    backend: BackendOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            file_okay=False,
            callback=_make_folder,
            help="Folder for one browser-readable trace a case.",
        ),
    ] = None,
    submission: SubmissionOption = OWN_SUBMISSION,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
) -> None:
    """Profile one warm call of each case: operations and kernels by their own time."""
    chosen = choose_cases("profile", case, cases)
    run = Run("profile", submission, backend, timeout, json)

    def ask(ask_worker: Callable, one: TestCase) -> dict[str, Any]:
        path = str(trace / f"{case_label(one.args)}.json") if trace is not None else None
        return ask_worker("profile", args=one.args, trace=path, warm=True)

    run.ask_all(chosen, ask)
    for result in run.results:
        if "report" in result:
            run.console.print(f"\n{result['case']}, arm {result['arm'] or '-'}", markup=False)
            run.console.print(result["report"], markup=False, soft_wrap=True)
    run.finish()


@app.command(epilog=EXAMPLES)
def lint(submission: SubmissionOption = OWN_SUBMISSION) -> None:
    """Hold the file to the leaderboard's rules and, where it is installed, to kernelguard; print how to submit it."""
    console = make_console()
    content = submission.read_bytes()
    failures = broken_rules(content)
    verdict = kernelguard_verdict(content)
    if verdict is None:
        console.print("kernelguard: not installed, not asked; it comes with the extra `test`", markup=False)
    else:
        filtered, patterns = verdict
        failures += [f"kernelguard: {pattern}" for pattern in patterns]
        if filtered and not patterns:
            failures.append("kernelguard: would filter the file")
    for failure in failures:
        console.print(f"FAIL {failure}", markup=False, soft_wrap=True)
    if failures:
        raise typer.Exit(EXIT_CHECK_FAILED)
    console.print(f"{submission.name} keeps every rule; to submit it:\n{SUBMIT_COMMAND}", markup=False, soft_wrap=True)
