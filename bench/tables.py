"""The tables that `eval.py` prints for a person."""

import math
import statistics
from typing import Any

from rich.markup import escape
from rich.table import Table

PROFILE_ROWS = 20


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
    """Strict figures per case: relative L2 errors over the cache that was read and over the bf16 cache, worst slope."""
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


def timing_table(mode: str, results: list[dict[str, Any]], complete: bool = True) -> tuple[Table, dict[str, float]]:
    """The table of a timed mode and the geometric means under it; a failed or missing case leaves no means."""
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
    if complete and timed and len(timed) == len(results):
        means = {
            "geomean_median_us": statistics.geometric_mean([result["time"]["median_us"] for result in timed]),
            "geomean_mean_us": statistics.geometric_mean([result["time"]["mean_us"] for result in timed]),
            "geomean_reader_us": statistics.geometric_mean([result["reader_time"]["median_us"] for result in timed]),
        }
        percent = _share(100 * means["geomean_reader_us"] / means["geomean_median_us"])
        table.add_section()
        table.add_row(
            "geometric mean", "", "", f"{means['geomean_median_us']:.1f}", f"{means['geomean_mean_us']:.1f}",
            "", "", "", "", f"{means['geomean_reader_us']:.1f}", percent, "",
        )  # fmt: skip
    return table, means


def profile_table(result: dict[str, Any], on_gpu: bool) -> Table:
    """Where a profiled call's time went, longest first; what is past PROFILE_ROWS is summed up."""
    total_us = math.fsum(time_us for _, _, time_us in result["times"])
    table = Table(title=escape(f"{result['case']}, arm {result['arm'] or '-'}: {total_us:.1f} us, {result['trace']}"))
    table.add_column("kernel, by device time" if on_gpu else "operation, by its own time on the CPU", overflow="fold")
    for name in ("calls", "us", "%"):
        table.add_column(name, justify="right", no_wrap=True)
    times = result["times"]
    if not times:
        table.caption = "torch's profiler saw nothing run there"
    if rest := times[PROFILE_ROWS:]:
        _, calls, rest_us = zip(*rest, strict=True)
        times = [*times[:PROFILE_ROWS], (f"{len(rest)} more", sum(calls), math.fsum(rest_us))]
    for name, count, time_us in times:
        table.add_row(escape(name), str(count), f"{time_us:.1f}", f"{100 * time_us / (total_us or 1):.1f}")
    return table
