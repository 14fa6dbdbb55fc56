"""How close correct kernels come to the bounds of `reference.strict_check`, and how far beyond them wrong ones lie.

    python -m bench.check_bounds

Needs no GPU. The figures in docs/checks.md are this command's.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich.table import Table

import reference
from bench.console import make_console, run_tool, tracked
from eval import EXIT_CHECK_FAILED, EXIT_OK
from reference import FP8_DTYPE, MXFP4_BLOCK, StrictReport, generate_input, strict_check
from task import KV_LORA_RANK, QK_HEAD_DIM, V_HEAD_DIM, input_t


@dataclass(frozen=True)
class Kernel:
    """A kernel's arithmetic: the cache it reads and where it rounds Q and P; sums are float32."""

    name: str
    kv: str
    q: str
    p: str


KERNELS = (
    Kernel("bf16", "bf16", "bf16", "bf16"),
    Kernel("fp8 cache, bf16 Q and P", "fp8", "bf16", "bf16"),
    Kernel("a8w8, P unscaled", "fp8", "fp8", "fp8"),
    Kernel("a8w8, P times 256", "fp8", "fp8", "fp8 times 256"),
    Kernel("mxfp4 cache, bf16 Q and P", "mxfp4", "bf16", "bf16"),
    Kernel("mxfp4 cache, fp8 Q and P", "mxfp4", "fp8", "fp8"),
)


def _round_p(p: torch.Tensor, how: str) -> torch.Tensor:
    if how == "bf16":
        return p.bfloat16().float()
    gain = 256.0 if how == "fp8 times 256" else 1.0
    return (p * gain).to(FP8_DTYPE).float() / gain


def emulate(data: input_t, kernel: Kernel, keep: torch.Tensor | None = None) -> torch.Tensor:
    """Attention of equal-length sequences, one query each, with a kernel's roundings: bfloat16 (b, 16, 512).

    keep: bool (s_kv,), the tokens to attend to; all if None.
    """
    q, kv_data, _, _, config = data
    b, s_kv = config["batch_size"], config["kv_seq_len"]
    keys = reference.read_cache(kv_data, kernel.kv, 0, b * s_kv).view(b, s_kv, QK_HEAD_DIM)
    rows = reference.dequantize_fp8(*reference.quantize_fp8(q)) if kernel.q == "fp8" else q.float()
    scores = (rows @ keys.mT) * config["sm_scale"]
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (_round_p(p, kernel.p) @ keys[..., :V_HEAD_DIM] / p.sum(-1, keepdim=True)).bfloat16()


def _keep_all_but(skipped: Callable[[int], slice]) -> Callable[[input_t, Kernel], torch.Tensor]:
    def run(data: input_t, kernel: Kernel) -> torch.Tensor:
        keep = torch.ones(data[4]["kv_seq_len"], dtype=torch.bool, device=data[0].device)
        keep[skipped(len(keep))] = False
        return emulate(data, kernel, keep)

    return run


def _other_mxfp4(change: Callable) -> Callable[[input_t, Kernel], torch.Tensor]:
    """Misread the mxfp4 cache: `change(packed, scales)` takes and gives uint8 (rows, 288) and (rows, 18)."""

    def run(data: input_t, kernel: Kernel) -> torch.Tensor:
        q, kv_data, qo_indptr, kv_indptr, config = data
        packed, scales = (x.view(torch.uint8) for x in kv_data["mxfp4"])
        num_blocks = QK_HEAD_DIM // MXFP4_BLOCK
        # Uninitialised padding would make the misreading depend on the allocator.
        scales = scales.clone()
        scales[:, num_blocks:] = reference.E8M0_BIAS
        misread = {**kv_data, "mxfp4": change(packed, scales)}
        return emulate((q, misread, qo_indptr, kv_indptr, config), kernel)

    return run


def _neighbour_scale(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return packed, scales[:, : QK_HEAD_DIM // MXFP4_BLOCK].roll(1, dims=1)


def _swapped_nibbles(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return packed << 4 | packed >> 4, scales


def _dense_scales(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, num_blocks = packed.shape[0], QK_HEAD_DIM // MXFP4_BLOCK
    return packed, scales.flatten()[: rows * num_blocks].view(rows, num_blocks)


def _wrong_row(data: input_t, kernel: Kernel) -> torch.Tensor:
    out = emulate(data, kernel)
    out[0, 3] = out[0, 4]
    return out


def _wrong_element(data: input_t, kernel: Kernel) -> torch.Tensor:
    out = emulate(data, kernel)
    # What an element of average size loses when it is zeroed.
    out[0, 3, 7] += out.float().square().mean().sqrt()
    return out


def _gain(data: input_t, kernel: Kernel) -> torch.Tensor:
    return (emulate(data, kernel).float() * 1.02).bfloat16()


def _zeros(data: input_t, kernel: Kernel) -> torch.Tensor:
    return torch.zeros_like(data[0][..., :V_HEAD_DIM])


def _query_only(data: input_t, kernel: Kernel) -> torch.Tensor:
    return (data[0][..., :KV_LORA_RANK].float() * data[4]["sm_scale"]).bfloat16()


# Wrong kernels, each on top of a correct one's arithmetic.
CONTROLS: dict[str, Callable[[input_t, Kernel], torch.Tensor]] = {
    "one token in 64 skipped": _keep_all_but(lambda s_kv: slice(5, s_kv, 64)),
    "last 64 tokens dropped": _keep_all_but(lambda s_kv: slice(s_kv - 64, s_kv)),
    "every second token skipped": _keep_all_but(lambda s_kv: slice(1, s_kv, 2)),
    "gain of 2 %": _gain,
    "one wrong row": _wrong_row,
    "one element off by the RMS": _wrong_element,
    "zeros": _zeros,
    "q * sm_scale": _query_only,
    "neighbour's mxfp4 scale": _other_mxfp4(_neighbour_scale),
    "mxfp4 nibbles swapped": _other_mxfp4(_swapped_nibbles),
    "mxfp4 scale stride 18": _other_mxfp4(_dense_scales),
}


# Below this many tokens some controls skip all of them.
MIN_CONTROL_KV = 128


def controls_of(kernel: Kernel) -> dict[str, Callable[[input_t, Kernel], torch.Tensor]]:
    """The controls that make sense for a kernel: those about mxfp4 need its cache."""
    return {name: run for name, run in CONTROLS.items() if "mxfp4" not in name or kernel.kv == "mxfp4"}


def usage(report: StrictReport) -> dict[str, float]:
    """How much of each bound an output uses: above 1 it fails."""
    return {
        "kernel": report.kernel_error / report.kernel_bound,
        "end to end": report.end_to_end_error / report.end_to_end_bound,
        "row": report.worst_row_error / report.row_bound,
        "element": report.worst_element_error / report.element_bound,
        "slope": abs(report.worst_slope - 1) / report.slope_bound,
        "weight": abs(report.worst_weight - 1) / reference.WEIGHT_TOLERANCE,
    }


def rounding_error(mantissa_bits: int, offset: float) -> float:
    """RMS relative error of rounding a standard normal to `mantissa_bits`, binades starting at 2^k / offset."""
    x = (torch.arange(800_000, dtype=torch.float64) + 0.5) * 1e-5
    density = torch.exp(-x.square() / 2)
    step = torch.exp2(torch.floor(torch.log2(x * offset)) - mantissa_bits) / offset
    return math.sqrt((step.square() / 12 * density).sum() / (x.square() * density).sum())


def _rounding_table() -> Table:
    table = Table("format", "smallest", "largest", title="RMS relative rounding error over all positions of the scale")
    for name, mantissa_bits in (("bf16", 7), ("e4m3", 3)):
        errors = [rounding_error(mantissa_bits, 2 ** (i / 64)) for i in range(64)]
        table.add_row(name, f"{min(errors):.5f}", f"{max(errors):.5f}")
    return table


def _correct_table(title: str, reports: dict[str, list[StrictReport]]) -> Table:
    table = Table("correct kernel", "passed", "error", "sd", "end to end / own", title=title)
    for check in usage(StrictReport(True, "")):
        table.add_column(f"{check} bound used, at most")
    for kernel in KERNELS:
        of_kernel = reports[kernel.name]
        errors = torch.tensor([report.kernel_error for report in of_kernel])
        ratios = [report.end_to_end_error / report.own_error for report in of_kernel if report.own_error]
        most = [max(used) for used in zip(*(usage(report).values() for report in of_kernel), strict=True)]
        table.add_row(
            kernel.name,
            f"{sum(report.passed for report in of_kernel)} of {len(of_kernel)}",
            f"{errors.mean():.4f}",
            f"{errors.std():.4f}",
            f"{sum(ratios) / len(ratios):.2f}" if ratios else "",
            *(f"{part:.0%}" for part in most),
        )
    return table


def _wrong_table(title: str, reports: dict[tuple[str, str], list[StrictReport]]) -> Table:
    table = Table("wrong kernel", *(f"{kernel.name}" for kernel in KERNELS), title=title)
    for name in CONTROLS:
        cells = []
        for kernel in KERNELS:
            of_kernel = reports.get((kernel.name, name), [])
            failed = sum(not report.passed for report in of_kernel)
            least = min((max(usage(report).values()) for report in of_kernel), default=0.0)
            cells.append(f"{failed} of {len(of_kernel)}, {least:.3g}x" if of_kernel else "")
        table.add_row(name, *cells)
    return table


def main(
    seeds: Annotated[int, typer.Option(min=2, help="Inputs for each correct kernel.")] = 100,
    wrong_seeds: Annotated[int, typer.Option(min=0, help="Inputs, of these, for each wrong kernel.")] = 10,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in each input.")] = 2,
    kv: Annotated[list[int] | None, typer.Option(min=1, help="Cached tokens; repeatable.")] = None,
) -> None:
    """Run correct and wrong kernels over many inputs; exit with 112 if a correct one fails or a wrong one passes."""
    console = make_console()
    console.print(_rounding_table())
    wrong_verdicts = 0
    for s_kv in kv or (1024, 8192):
        correct, wrong = defaultdict(list), defaultdict(list)
        for seed in tracked(range(seeds), f"kv {s_kv}"):
            data = generate_input(batch, 1, s_kv, seed)
            for kernel in KERNELS:
                correct[kernel.name].append(strict_check(data, emulate(data, kernel)))
                if seed < wrong_seeds and s_kv >= MIN_CONTROL_KV:
                    for name, run in controls_of(kernel).items():
                        wrong[kernel.name, name].append(strict_check(data, run(data, kernel)))
        console.print(_correct_table(f"{batch}x{s_kv}, the judge is not told the cache", correct))
        if wrong:
            console.print(
                _wrong_table("verdicts, and the least by which a seed exceeds its most exceeded bound", wrong)
            )
        wrong_verdicts += sum(not report.passed for reports in correct.values() for report in reports)
        wrong_verdicts += sum(report.passed for reports in wrong.values() for report in reports)
    console.print(f"{wrong_verdicts} wrong verdicts")
    raise typer.Exit(EXIT_CHECK_FAILED if wrong_verdicts else EXIT_OK)


if __name__ == "__main__":
    run_tool(main)
