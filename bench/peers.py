"""Our arms beside other kernels and the reader: one run, interleaved, cold cache.

    python -m bench.peers --case 32x8192 --repeats 25 --json peers.json

Peers: torch's batched matrix products (our arm `torch_bmm`), FlashAttention-3 over the bf16 cache where the package
`fa3-fwd==0.0.3` is installed, and a grouped split-K decode in the manner of SGLang's and vLLM's Triton backends. Every
call is timed whole. Our arms must pass the strict check; a peer's error against float64 is printed beside it.
"""

import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

import eval as evaluator
import reference
import submission
from bench.console import make_console, require_gpu, run_tool
from bench.environment import describe_environment, package_version
from bench.measure import time_interleaved, time_summary
from bench.options import CaseOption, JsonOption, case_label, choose_cases, require_arm
from bench.reader import Reader, cache_tensors
from task import QK_HEAD_DIM, V_HEAD_DIM

OURS = "ours"  # what the submission picks by itself
FA3 = "FlashAttention-3"
GROUPED_SPLITS = (4, 8, 16, 32)
TUNING_RUNS = 5


@dataclass
class Entry:
    """One competitor on one case: the cache it reads, its call, and what was found out about it."""

    name: str
    kv: str
    call: Callable[[], torch.Tensor]
    config: str = ""
    error: float | None = None
    strict: str | None = None


def fa3_entry(data: tuple) -> Entry | None:
    """FlashAttention-3 with the absorbed query in `qv`; None where `fa3-fwd` is not installed."""
    try:
        from fa3_fwd_interface import flash_attn_with_kvcache
    except ImportError:
        return None
    q, kv_data, _, kv_indptr, config = data
    kv = kv_data["bf16"].view(config["batch_size"], config["kv_seq_len"], 1, QK_HEAD_DIM)
    lengths = kv_indptr.diff()

    def call() -> torch.Tensor:
        return flash_attn_with_kvcache(
            q[:, None, :, V_HEAD_DIM:], kv[..., V_HEAD_DIM:], kv[..., :V_HEAD_DIM], qv=q[:, None, :, :V_HEAD_DIM],
            cache_seqlens=lengths, softmax_scale=config["sm_scale"], causal=True,
        )  # fmt: skip

    return Entry(FA3, "bf16", call)


def our_entry(data: tuple, arm: str) -> Entry:
    """One arm of the submission, forced by its name, or its own choice for `ours`; raises what the arm raises."""
    forced = "" if arm == OURS else arm

    def call() -> torch.Tensor:
        os.environ["MLA_BACKEND"] = forced
        return submission.custom_kernel(data)

    output = call()
    selection = submission.last_run()
    assert selection is not None
    report = reference.strict_check(data, output, selection.kv)
    return Entry(
        arm,
        selection.kv,
        call,
        f"{selection.arm} {selection.config}" if arm == OURS else selection.config,
        report.end_to_end_error,
        "pass" if report.passed else f"FAIL: {report.message}",
    )


def grouped_entry(data: tuple, kv: str, timer: evaluator.ColdTimer) -> Entry:
    """The grouped Triton decode with the fastest of GROUPED_SPLITS."""
    from bench.grouped import GroupedDecode

    calls = {splits: GroupedDecode(data, kv, splits) for splits in GROUPED_SPLITS}
    medians = {}
    for splits, call in calls.items():
        call()
        medians[splits] = statistics.median(timer.time_ns(call)[0] for _ in range(TUNING_RUNS))
    best = min(medians, key=lambda splits: medians[splits])
    return Entry(f"Triton grouped {kv}", kv, calls[best], f"splits={best}")


def measure(data: tuple, arms: list[str], repeats: int, timer: evaluator.ColdTimer, label: str) -> list[dict[str, Any]]:
    """Time every entry of one case, interleaved; times in microseconds, ratios above 1 mean slower than the other."""
    exact = reference.oracle(data, "bf16")
    entries = [our_entry(data, arm) for arm in arms]
    peers = [fa3_entry(data), *(grouped_entry(data, kv, timer) for kv in ("bf16", "fp8"))]
    for peer in filter(None, peers):
        peer.error = reference.relative_error(peer.call().view_as(exact), exact)
        entries.append(peer)
    readers = {kv: Reader(cache_tensors(data, kv), timer) for kv in dict.fromkeys(entry.kv for entry in entries)}
    roofs = {kv: Entry(f"reader {kv}", kv, reader, str(reader.config)) for kv, reader in readers.items()}
    everyone = [*entries, *roofs.values()]
    durations_ns = time_interleaved({entry.name: entry.call for entry in everyone}, repeats, timer, label)
    times = {name: time_summary(values) for name, values in durations_ns.items()}
    rows = []
    for entry in everyone:
        median_us = times[entry.name]["median_us"]
        row = {"name": entry.name, "cache": entry.kv, "config": entry.config, **times[entry.name]}
        row["gb_per_s"] = readers[entry.kv].read_bytes / median_us / 1e3
        row["to_reader"] = median_us / times[f"reader {entry.kv}"]["median_us"]
        row["to_fa3"] = median_us / times[FA3]["median_us"] if FA3 in times else None
        rows.append({**row, "error": entry.error, "strict": entry.strict})
    return rows


def case_table(label: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{label}: microseconds, cold cache; GB/s and reader over the bytes of the entry's cache")
    for name in ("entry", "config"):
        table.add_column(name, no_wrap=True)
    for name in ("median", "p20", "p80", "GB/s", "x reader", "x FA3", "error", "strict"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: row["median_us"]):
        table.add_row(
            row["name"],
            row["config"],
            *(f"{row[name]:.1f}" for name in ("median_us", "p20_us", "p80_us")),
            f"{row['gb_per_s']:.0f}",
            f"{row['to_reader']:.2f}",
            "-" if row["to_fa3"] is None else f"{row['to_fa3']:.2f}",
            "-" if row["error"] is None else f"{row['error']:.1e}",
            (row["strict"] or "-").split(":")[0],
        )
    return table


def summary_table(results: dict[str, list[dict[str, Any]]]) -> tuple[Table, dict[str, float]]:
    """Medians by entry and case, with geometric means of the entries that ran on every case."""
    table = Table(title="median microseconds")
    table.add_column("entry", no_wrap=True)
    for label in [*results, "geometric mean"]:
        table.add_column(label, justify="right", no_wrap=True)
    medians = {label: {row["name"]: row["median_us"] for row in rows} for label, rows in results.items()}
    means = {}
    for name in dict.fromkeys(name for by_name in medians.values() for name in by_name):
        cells = [f"{by_name[name]:.1f}" if name in by_name else "-" for by_name in medians.values()]
        if all(name in by_name for by_name in medians.values()):
            means[name] = statistics.geometric_mean([by_name[name] for by_name in medians.values()])
        table.add_row(name, *cells, f"{means[name]:.1f}" if name in means else "-")
    return table, means


def main(
    case: CaseOption = None,
    arm: Annotated[
        list[str] | None,
        typer.Option("--arm", help=f"Arm of the submission, '{OURS}' for its own choice; repeatable."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Timed runs of each entry.")] = 25,
    json_path: JsonOption = None,
) -> None:
    """Compare the submission with its peers and the reader on the GPU."""
    arms = arm or [OURS, "triton_fp8", "torch_bmm"]
    for name in arms:
        require_arm(name, [OURS, *submission.ARMS], "--arm")
    require_gpu()
    import bench.grouped  # noqa: F401 - where Triton is missing, say so before any work

    console = make_console()
    timer = evaluator.ColdTimer()
    environment = {**describe_environment(timer), "fa3-fwd": package_version("fa3-fwd")}
    for name, value in environment.items():
        console.print(f"{name:>10}: {value}", markup=False)
    results: dict[str, list[dict[str, Any]]] = {}
    for args in choose_cases("benchmark", case):
        label, data = case_label(args), reference.generate_input(**args)
        results[label] = measure(data, arms, repeats, timer, label)
        console.print(case_table(label, results[label]))
    table, means = summary_table(results)
    console.print(table)
    failed = [f"{label}, {row['name']}: {row['strict']}" for label, rows in results.items() for row in rows
              if (row["strict"] or "pass") != "pass"]  # fmt: skip
    for line in failed:
        console.print(line, markup=False, soft_wrap=True)
    if json_path is not None:
        report = {"environment": environment, "repeats": repeats, "cases": results, "geomean_us": means}
        json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(evaluator.EXIT_CHECK_FAILED if failed else evaluator.EXIT_OK)


if __name__ == "__main__":
    run_tool(main)
