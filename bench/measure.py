"""Timing as every measuring command does it, and what it keeps of the times."""

import json
import random
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bench.console import tracked
from eval import ColdTimer

K = TypeVar("K")


def time_interleaved(
    calls: Mapping[K, Callable[[], Any]], repeats: int, timer: ColdTimer, description: str
) -> dict[K, list[float]]:
    """Nanoseconds of `repeats` cold runs of each call, in rounds of all of them.

    A round is in random order: in a fixed one a call's place costs or saves up to 0.6 us (docs/results.md).
    """
    durations_ns: dict[K, list[float]] = {name: [] for name in calls}
    shuffled = random.Random(0)
    for _ in tracked(range(repeats), description):
        for name in shuffled.sample(list(calls), len(calls)):
            durations_ns[name].append(timer.time_ns(calls[name])[0])
    return durations_ns


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


def write_results(path: Path, timer: ColdTimer, results: list[dict[str, Any]]) -> None:
    """JSON of `results` and of what they were measured on."""
    from bench.environment import describe_environment  # with torch, which a command line must not wait for

    document = {"environment": describe_environment(timer), "results": results}
    path.write_text(json.dumps(document, indent=1) + "\n")
