"""The share of elements that attention over the fp8 and the mxfp4 cache keeps within the problem's written tolerance.

    python -m bench.mxfp4_policy

Tolerance: rtol 2e-2, atol 8e-3 against float64 attention over the bf16 cache. Sequences are drawn alone; their shares
are independent, so the share of a batch of b has the same mean and 1 / sqrt(b) of the deviation. A batch may be offered
the mxfp4 cache when its mean less four deviations is at least 99.5 %. Needs no GPU. The figures in docs/mxfp4.md are
this command's.
"""

import math
import statistics
from typing import Annotated

import torch
import typer
from rich.table import Table

import reference
from bench.check_bounds import KERNELS, emulate
from bench.console import make_console, run_tool, tracked
from eval import EXIT_CHECK_FAILED, EXIT_OK
from submission import ATOL, MIN_SHARE_WITHIN, MXFP4_MIN_BATCH, MXFP4_MIN_KV_LEN, RTOL
from task import input_t

CACHES = ("fp8", "mxfp4")
ROUNDED = [kernel for kernel in KERNELS if kernel.kv in CACHES]
BATCHES = (4, 32, 64, 256)
DEVIATIONS = 4.0


def share_within(output: torch.Tensor, expected: torch.Tensor) -> float:
    """The share of elements of `output` within the written tolerance of `expected`, both of one shape."""
    return torch.isclose(output.double(), expected, rtol=RTOL, atol=ATOL).double().mean().item()


def shares(data: input_t) -> dict[str, float]:
    """The share within tolerance of exact attention over each cache and of kernels with their own roundings."""
    expected = reference.oracle(data, "bf16")
    outputs = {f"{kv} cache, exact": reference.oracle(data, kv) for kv in CACHES}
    outputs |= {kernel.name: emulate(data, kernel) for kernel in ROUNDED}
    return {name: share_within(output, expected) for name, output in outputs.items()}


def sure_share(mean: float, deviation: float, batch: int) -> float:
    """The share that a batch of sequences with this mean and deviation keeps but for one input in tens of thousands."""
    return mean - DEVIATIONS * deviation / math.sqrt(batch)


def main(
    sequences: Annotated[int, typer.Option(min=2, help="Sequences drawn for each length.")] = 100,
    kv: Annotated[list[int] | None, typer.Option(min=1, help="Cached tokens; repeatable.")] = None,
) -> None:
    """Tabulate the shares; exit with 112 if `select_config` offers mxfp4 where the exact cache falls short."""
    console, short = make_console(), False
    for s_kv in kv or (1024, 8192):
        drawn = [shares(reference.generate_input(1, 1, s_kv, seed)) for seed in tracked(range(sequences), f"kv {s_kv}")]
        table = Table(
            "", "mean", "deviation", "least", title=f"{s_kv} tokens, {sequences} sequences: share in tolerance"
        )
        for batch in BATCHES:
            table.add_column(f"sure of {batch}", justify="right")
        for name in drawn[0]:
            values = [of_sequence[name] for of_sequence in drawn]
            mean, deviation = statistics.mean(values), statistics.stdev(values)
            sure = {batch: sure_share(mean, deviation, batch) for batch in BATCHES}
            cells = [f"{share:.2%}{'' if share >= MIN_SHARE_WITHIN else ' no'}" for share in sure.values()]
            table.add_row(name, f"{mean:.2%}", f"{deviation:.2%}", f"{min(values):.2%}", *cells)
            offered = s_kv >= MXFP4_MIN_KV_LEN and name == "mxfp4 cache, exact"
            short |= offered and sure[MXFP4_MIN_BATCH] < MIN_SHARE_WITHIN
        console.print(table)
    raise typer.Exit(EXIT_CHECK_FAILED if short else EXIT_OK)


if __name__ == "__main__":
    run_tool(main)
