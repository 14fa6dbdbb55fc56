"""Random shapes through `custom_kernel` on the GPU, each against the float64 oracle.

    python -m bench.random_shapes --count 1000

Batch 1-300, cached tokens 0-9000 per sequence (ragged more often than not), 1-4 queries per sequence. Caches are slices
of one pool, so that drawing them costs nothing; queries are new each time. Exit code 112 if any output is off.
"""

import os
import random
import time
from collections import Counter
from typing import Annotated

import torch
import typer

import reference
import submission
from bench.console import make_console, require_gpu, run_tool, tracked
from eval import EXIT_CHECK_FAILED, EXIT_OK
from task import NUM_HEADS, QK_HEAD_DIM

MAX_BATCH, MAX_KV, MAX_Q = 300, 9000, 4
MAX_ERROR = 3e-3  # relative L2, over the cache that was read
MAX_TOKENS = MAX_BATCH * MAX_KV


def draw_lengths(rng: random.Random) -> list[int]:
    """Small and large batches and lengths alike: both are drawn uniformly on a logarithmic scale."""
    batch_size = round(MAX_BATCH ** rng.random())
    longest = round(MAX_KV ** rng.random())
    if rng.random() < 0.25:
        return [longest] * batch_size
    return [rng.choice([0, 1, longest, rng.randint(0, longest), rng.randint(0, longest)]) for _ in range(batch_size)]


def make_case(pool: dict, lengths: list[int], s_q: int, rng: random.Random) -> tuple:
    total_kv, batch_size = sum(lengths), len(lengths)
    start = rng.randint(0, MAX_TOKENS - total_kv)
    rows = slice(start, start + total_kv)
    device = pool["bf16"].device
    kv_data = {
        "bf16": pool["bf16"][rows],
        "fp8": (pool["fp8"][0][rows], pool["fp8"][1]),
        "mxfp4": (pool["mxfp4"][0][rows], pool["mxfp4"][1][rows]),
    }
    q = torch.randn(batch_size * s_q, NUM_HEADS, QK_HEAD_DIM, device=device).bfloat16()
    config = reference.case_config(batch_size, s_q, max(lengths))
    kv_indptr = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    qo_indptr = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * s_q
    return q, kv_data, qo_indptr, kv_indptr, config


def main(
    count: Annotated[int, typer.Option(min=1, help="Shapes to try.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of shapes and data.")] = 0,
) -> None:
    """Try random shapes on the GPU."""
    require_gpu()
    # Every shape is new here; timing its arms would take most of the run.
    os.environ.setdefault("MLA_TUNE", "0")
    console = make_console()
    rng = random.Random(seed)
    torch.manual_seed(seed)
    bf16 = torch.randn(MAX_TOKENS, 1, QK_HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    pool = {"bf16": bf16, "fp8": reference.quantize_fp8(bf16), "mxfp4": reference.quantize_mxfp4(bf16)}
    failures, worst = 0, 0.0
    arms: Counter[str] = Counter()
    start_s = time.monotonic()
    for _ in tracked(range(count), "random shapes"):
        lengths, s_q = draw_lengths(rng), rng.randint(1, MAX_Q)
        data = make_case(pool, lengths, s_q, rng)
        output = submission.custom_kernel(data)
        selection = submission.last_run()
        assert selection
        expected = reference.oracle(data, selection.kv)
        arms[selection.arm] += 1
        error = reference.relative_error(output, expected)
        worst = max(worst, error)
        if not error <= MAX_ERROR:
            failures += 1
            shape = f"batch {len(lengths)}, longest {max(lengths)}, {s_q} queries, {sum(lengths)} tokens"
            console.print(f"FAIL {shape}: error {error:.2e} with {selection.arm} {selection.config}")
    took_s = time.monotonic() - start_s
    console.print(f"{count} shapes in {took_s:.0f} s: {failures} failures, worst error {worst:.2e}, arms {dict(arms)}")
    raise typer.Exit(EXIT_CHECK_FAILED if failures else EXIT_OK)


if __name__ == "__main__":
    run_tool(main)
