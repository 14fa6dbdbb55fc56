"""Times every sensible configuration of an arm on each benchmark shape: where the rows of `submission.TABLE` come from.

    python -m bench.sweep --json docs/data/sweep_h200.json

Configurations are compiled in parallel, checked against float64 on some sequences, then timed interleaved, cold cache,
with the reader kernel over the same bytes among them.
"""

import concurrent.futures
import itertools
import multiprocessing
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

import eval as evaluator
import reference
import submission
from bench.console import make_console, require_gpu, run_tool
from bench.measure import time_interleaved, write_results
from bench.options import CaseOption, JsonOption, case_label, choose_cases, require_arm
from bench.reader import Reader, cache_tensors
from submission import Config

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CHECKED_SEQUENCES = 4
PRINTED_ROWS = 6


def hopper_configs(batch_size: int, kv_seq_len: int, num_cu: int) -> list[Config]:
    """Splits that give each program a tile and the machine at most two rounds of programs, and those of the model."""
    tiles = -(-kv_seq_len // 64)
    splits = [s for s in SPLITS if s == 1 or s <= tiles and batch_size * s <= 4 * num_cu]
    splits = [s for s in splits if batch_size * s >= num_cu // 4] or splits[-1:]
    modelled = submission.choose_splits(batch_size, kv_seq_len, 64, num_cu, 2)
    return [
        Config("hopper_fp8", splits=s, one_launch=one_launch, programs_per_cu=2)
        for s, one_launch in itertools.product(sorted({*splits, modelled}), (False, True))
        if not (one_launch and (s == 1 or s > 16))
    ]


def portable_configs(batch_size: int, kv_seq_len: int, num_cu: int) -> list[Config]:
    """The portable kernel over tile heights and warps, splits by the model and their neighbours."""
    configs = []
    for block_n, num_warps in ((32, 4), (64, 4), (64, 8)):
        best = submission.choose_splits(batch_size, kv_seq_len, block_n, num_cu, 1)
        for splits in sorted({max(1, best // 2), best, best * 2}):
            configs.append(Config("triton_fp8", splits=splits, block_n=block_n, num_warps=num_warps))
    return configs


ARMS = {"hopper_fp8": hopper_configs, "triton_fp8": portable_configs}


def sample_error(data: tuple, output: torch.Tensor) -> float:
    """Relative L2 error against the float64 oracle over the fp8 cache, on the first, last and some middle sequences."""
    q, kv_data, _, kv_indptr, config = data
    batch_size, s_q = config["batch_size"], config["q_seq_len"]
    picked = sorted({round(i * (batch_size - 1) / (CHECKED_SEQUENCES - 1)) for i in range(CHECKED_SEQUENCES)})
    error = norm = 0.0
    for b in picked:
        start, end = kv_indptr[b : b + 2].tolist()
        rows = slice(b * s_q, (b + 1) * s_q)
        one = (
            q[rows],
            {"bf16": kv_data["bf16"][start:end], "fp8": (kv_data["fp8"][0][start:end], kv_data["fp8"][1])},
            torch.tensor([0, s_q], dtype=torch.int32, device=q.device),
            torch.tensor([0, end - start], dtype=torch.int32, device=q.device),
            {**config, "batch_size": 1, "kv_seq_len": end - start},
        )
        expected = reference.oracle(one, "fp8")
        error += (output[rows].double() - expected).square().sum().item()
        norm += expected.square().sum().item()
    return (error / norm) ** 0.5


def _compile(config: Config) -> None:
    """Fills the compiler's cache on disk; the shape matters only through the configuration."""
    data = reference.generate_input(1, 1, 1024, 1)
    submission.ARMS[config.arm].run(data, submission.problem_of(data), config)


def main(
    case: CaseOption = None,
    arm: Annotated[list[str] | None, typer.Option("--arm", help=f"Among {', '.join(ARMS)}; repeatable.")] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Timed runs of each configuration.")] = 25,
    json_path: JsonOption = None,
) -> None:
    """Sweep configurations on the GPU."""
    arms = arm or ["hopper_fp8"]
    for name in arms:
        require_arm(name, ARMS, "--arm")
    require_gpu()
    console = make_console()
    timer = evaluator.ColdTimer()
    num_cu = torch.cuda.get_device_properties(0).multi_processor_count
    cases = choose_cases("benchmark", case)
    shapes = [(args["batchsize"], args["kvseqlen"]) for args in cases]
    plans = {shape: [c for name in arms for c in ARMS[name](*shape, num_cu)] for shape in shapes}
    distinct = list({config for configs in plans.values() for config in configs})
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, distinct))
    results: list[dict[str, Any]] = []
    for args in cases:
        label, data = case_label(args), reference.generate_input(**args)
        problem = submission.problem_of(data)
        reader = Reader(cache_tensors(data, "fp8"), timer)
        calls: dict[Config | None, Callable] = {None: reader}
        errors = {}
        for config in plans[args["batchsize"], args["kvseqlen"]]:
            calls[config] = partial(submission.ARMS[config.arm].run, data, problem, config)
            errors[config] = sample_error(data, calls[config]())
        durations_ns = time_interleaved(calls, repeats, timer, label)
        medians = {config: statistics.median(values) / 1e3 for config, values in durations_ns.items()}
        table = Table(title=f"{label}: reader {medians[None]:.1f} us", title_justify="left")
        for name in ("configuration", "median us", "of the reader", "error"):
            table.add_column(name)
        for config in sorted(errors, key=lambda config: medians[config]):
            results.append(
                {"case": label, "config": asdict(config), "median_us": medians[config],
                 "reader_us": medians[None], "error": errors[config]}
            )  # fmt: skip
        for row in [r for r in results if r["case"] == label][:PRINTED_ROWS]:
            shown = " ".join(f"{k}={v}" for k, v in row["config"].items())
            ratio = row["median_us"] / row["reader_us"]
            table.add_row(shown, f"{row['median_us']:.1f}", f"{ratio:.3f}", f"{row['error']:.1e}")
        console.print(table)
    if json_path:
        write_results(json_path, timer, results)


if __name__ == "__main__":
    run_tool(main)
