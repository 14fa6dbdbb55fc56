"""Fuzzes what takes words from outside: the case-file parser, the command line, `custom_kernel`'s argument checks.

    python -m bench.fuzz --inputs 10000

Every input must be served, or refused in words of our own; anything else is a failure: it is printed with the smallest
input that still fails, and the exit code is 112. Needs the extra `test`, no GPU.
"""

import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from bench.console import make_console, run_tool
from eval import EXIT_CHECK_FAILED, EXIT_OK

if TYPE_CHECKING:
    from bench.fuzz_targets import Target


@dataclass(frozen=True)
class Outcome:
    """How many inputs were tried in how long, and the smallest one that failed with its error."""

    tried: int
    seconds: float
    failing: Any = None
    error: BaseException | None = None


def fuzz_target(target: "Target", inputs: int, seed: int) -> Outcome:
    """Try `inputs` inputs; stops at the first failure and shrinks it."""
    import hypothesis

    tried, last = 0, None

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        report_multiple_bugs=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(target.inputs)
    def check(given: Any) -> None:
        nonlocal tried, last
        last = given  # after shrinking, the smallest input is tried once more
        target.check(given)
        tried += 1

    start_s = time.monotonic()
    try:
        check()
    except Exception as error:
        return Outcome(tried, time.monotonic() - start_s, last, error)
    return Outcome(tried, time.monotonic() - start_s)


def main(
    inputs: Annotated[int, typer.Option(min=10, help="Inputs in all.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
) -> None:
    """Try random inputs on everything that takes words from outside."""
    from bench.fuzz_targets import TARGETS

    console = make_console()
    table = Table("target", "inputs", "seconds", "failures", title=f"fuzzed with seed {seed}")
    failed = False
    for name, target in TARGETS.items():
        outcome = fuzz_target(target, round(inputs * target.share), seed)
        table.add_row(name, str(outcome.tried), f"{outcome.seconds:.1f}", "none" if outcome.error is None else "1")
        if outcome.error is not None:
            failed = True
            trace = "".join(traceback.format_exception(outcome.error))
            console.print(f"FAIL {name}: {trace}\nsmallest failing input: {outcome.failing!r}", markup=False)
    console.print(table)
    raise typer.Exit(EXIT_CHECK_FAILED if failed else EXIT_OK)


if __name__ == "__main__":
    run_tool(main)
