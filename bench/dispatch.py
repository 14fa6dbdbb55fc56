"""What the dispatch costs: the first call of each shape, and a later call beside its arm called directly.

    python -m bench.dispatch --json docs/data/dispatch_h200.json

Triton's compile cache starts empty, in a temporary folder. Every arm's error and time is printed as the submission
itself reports it.
"""

import os
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

import eval as evaluator
import reference
from bench.cli import case_label, choose_cases, make_console, progress_bar, write_results


def dispatch(
    case: Annotated[list[str] | None, typer.Option("--case", help="A shape such as 32x8192; repeatable.")] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Timed runs of each call.")] = 51,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every figure there.")] = None,
) -> None:
    """Time first and later calls of `custom_kernel`."""
    os.environ.setdefault("MLA_VERBOSE", "1")
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="triton-cache-")
    import submission  # after the cache folder is set

    console = make_console()
    timer = evaluator.ColdTimer()
    results: list[dict[str, Any]] = []
    cases = choose_cases("benchmark", case, None)
    with progress_bar("dispatch", len(cases)) as (progress, task):
        for one in cases:
            data = reference.generate_input(**one.args)
            if data[0].is_cuda:
                torch.cuda.synchronize()
            start_s = time.perf_counter()
            submission.custom_kernel(data)
            if data[0].is_cuda:
                torch.cuda.synchronize()
            first_s = time.perf_counter() - start_s
            selection, plan = submission.last_run(), submission._last
            assert selection and plan
            calls = {
                "custom_kernel_us": partial(submission.custom_kernel, data),
                "arm_us": partial(plan.run, data),
            }
            times_us: dict[str, list[float]] = {name: [] for name in calls}
            shuffled = random.Random(0)
            for _ in range(repeats):
                # In a fixed pattern a call keeps a place that costs or saves up to 0.6 us (docs/results.md).
                for name in shuffled.sample(list(calls), len(calls)):
                    time_ns, _ = timer.time_ns(calls[name])
                    times_us[name].append(time_ns / 1e3)
            medians = {name: statistics.median(values) for name, values in times_us.items()}
            results.append({"case": case_label(one.args), "arm": selection.arm, "first_call_s": first_s, **medians})
            progress.advance(task)
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
    typer.run(dispatch)
