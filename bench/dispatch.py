"""What the dispatch costs: the first call of each shape, and a later call beside its arm called directly.

    python -m bench.dispatch --json docs/data/dispatch_h200.json

Triton's compile cache starts empty, in a temporary folder. Every arm's error and time is printed as the submission
itself reports it.
"""

import os
import statistics
import tempfile
import time
from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Table

import eval as evaluator
import reference
from bench.console import make_console, require_gpu, run_tool
from bench.measure import time_interleaved, write_results
from bench.options import CaseOption, JsonOption, case_label, choose_cases


def main(
    case: CaseOption = None,
    repeats: Annotated[int, typer.Option(min=3, help="Timed runs of each call.")] = 51,
    json_path: JsonOption = None,
) -> None:
    """Time first and later calls of `custom_kernel`."""
    require_gpu()
    os.environ.setdefault("MLA_VERBOSE", "1")
    compiled = tempfile.TemporaryDirectory(prefix="triton-cache-")
    os.environ["TRITON_CACHE_DIR"] = compiled.name
    import submission  # after the cache folder is set

    console = make_console()
    timer = evaluator.ColdTimer()
    results: list[dict[str, Any]] = []
    for args in choose_cases("benchmark", case):
        label, data = case_label(args), reference.generate_input(**args)
        timer.synchronize()
        start_s = time.perf_counter()
        submission.custom_kernel(data)
        timer.synchronize()
        first_s = time.perf_counter() - start_s
        config = submission._last
        assert config
        run = partial(submission.ARMS[config.arm].run, data, submission.problem_of(data), config)
        calls = {"custom_kernel_us": partial(submission.custom_kernel, data), "arm_us": run}
        durations_ns = time_interleaved(calls, repeats, timer, label)
        medians = {name: statistics.median(values) / 1e3 for name, values in durations_ns.items()}
        results.append({"case": label, "arm": config.arm, "first_call_s": first_s, **medians})
    table = Table(title="First call, and later calls in microseconds", title_justify="left")
    for name in ("case", "arm", "first call, s", "custom_kernel", "arm alone", "ratio"):
        table.add_column(name)
    for row in results:
        ratio = row["custom_kernel_us"] / row["arm_us"]
        times = [f"{row[name]:.1f}" for name in ("custom_kernel_us", "arm_us")]
        table.add_row(row["case"], row["arm"], f"{row['first_call_s']:.2f}", *times, f"{ratio:.3f}")
    console.print(table)
    console.print(f"all first calls: {sum(row['first_call_s'] for row in results):.1f} s")
    if json_path:
        write_results(json_path, timer, results)


if __name__ == "__main__":
    run_tool(main)
