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
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

import eval as evaluator
import reference
import submission
from bench.cli import case_label, choose_cases, make_console, time_interleaved, time_summary
from bench.reader import Reader, cache_tensors
from task import NUM_HEADS, QK_HEAD_DIM, V_HEAD_DIM

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise SystemExit(f"bench.peers: expected Triton, which a GPU build of torch brings ({error})") from error

LOG2E = 1.4426950408889634
OURS = "ours"  # what the submission picks by itself
FA3 = "FlashAttention-3"
GROUPED_SPLITS = (4, 8, 16, 32)
GROUPED_BLOCK_N = 32
TUNING_RUNS = 5


@triton.jit
def _grouped_decode(
    q_ptr,  # bf16 [b, 16, 576]
    kv_ptr,  # bf16 or fp8 [total_kv, 576]
    kv_indptr,  # int32 [b + 1]
    kv_scale_ptr,  # fp32 [1]
    part_ptr,  # fp32 [b, SPLITS, 16, 512], normalised
    lse_ptr,  # fp32 [b, SPLITS, 16], log2; -inf for an empty split
    softmax_scale,  # sm_scale * log2(e)
    stride_q_t,
    stride_q_h,
    stride_kv_t,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_TYPE: tl.constexpr,  # what the matrix products take
):
    """Grid (b, SPLITS): one split of one sequence for all 16 heads; K and V are loaded separately."""
    H: tl.constexpr = 16
    D: tl.constexpr = 512
    R: tl.constexpr = 64
    b = tl.program_id(0)
    split = tl.program_id(1)
    offs_h = tl.arange(0, H)
    offs_d = tl.arange(0, D)
    offs_r = tl.arange(0, R)
    q_base = q_ptr + b.to(tl.int64) * stride_q_t + offs_h[:, None] * stride_q_h
    qn = tl.load(q_base + offs_d[None, :]).to(DOT_TYPE)
    qr = tl.load(q_base + D + offs_r[None, :]).to(DOT_TYPE)
    logit_scale = tl.load(kv_scale_ptr) * softmax_scale
    kv_start = tl.load(kv_indptr + b)
    length = tl.load(kv_indptr + b + 1) - kv_start
    per_split = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    first = split * per_split
    last = tl.minimum(first + per_split, length)

    m = tl.full([H], float("-inf"), tl.float32)
    norm = tl.zeros([H], tl.float32)
    acc = tl.zeros([H, D], tl.float32)
    for n in range(first, last, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < last
        row = kv_ptr + (kv_start + offs_n).to(tl.int64) * stride_kv_t
        kn = tl.load(row[None, :] + offs_d[:, None], mask=mask_n[None, :], other=0.0).to(DOT_TYPE)
        kr = tl.load(row[None, :] + D + offs_r[:, None], mask=mask_n[None, :], other=0.0).to(DOT_TYPE)
        x = tl.dot(qr, kr, tl.dot(qn, kn)) * logit_scale
        x = tl.where(mask_n[None, :], x, float("-inf"))
        v = tl.load(row[:, None] + offs_d[None, :], mask=mask_n[:, None], other=0.0).to(DOT_TYPE)
        m_new = tl.maximum(m, tl.max(x, 1))
        rescale = tl.exp2(m - m_new)
        p = tl.exp2(x - m_new[:, None])
        norm = norm * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(DOT_TYPE), v, acc * rescale[:, None])
        m = m_new

    part = b.to(tl.int64) * SPLITS + split
    safe_norm = tl.where(first < last, norm, 1.0)
    tl.store(part_ptr + part * (H * D) + offs_h[:, None] * D + offs_d[None, :], acc / safe_norm[:, None])
    tl.store(lse_ptr + part * H + offs_h, m + tl.log2(norm))


@triton.jit
def _grouped_merge(
    part_ptr,  # fp32 [b, SPLITS, 16, 512]
    lse_ptr,  # fp32 [b, SPLITS, 16]
    kv_scale_ptr,  # fp32 [1]
    out_ptr,  # bf16 [b, 16, 512]
    SPLITS: tl.constexpr,
):
    """Grid (b, 16): weighs one head's partials, one split after the other; an empty sequence gives zeros."""
    H: tl.constexpr = 16
    D: tl.constexpr = 512
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    offs_d = tl.arange(0, D)
    m = float("-inf")
    norm = 0.0
    acc = tl.zeros([D], tl.float32)
    for split in range(SPLITS):
        row = (b * SPLITS + split) * H + h
        lse = tl.load(lse_ptr + row)
        if lse > float("-inf"):
            m_new = tl.maximum(m, lse)
            rescale = tl.exp2(m - m_new)
            weight = tl.exp2(lse - m_new)
            acc = acc * rescale + weight * tl.load(part_ptr + row * D + offs_d)
            norm = norm * rescale + weight
            m = m_new
    out = acc / tl.where(norm > 0.0, norm, 1.0) * tl.load(kv_scale_ptr)
    tl.store(out_ptr + (b * H + h) * D + offs_d, out.to(tl.bfloat16))


class GroupedDecode:
    """Callable on `data` (one query a sequence): bf16 (b, 16, 512) from the bf16 or fp8 cache in two launches.

    Raises ValueError for more than one query a sequence.
    """

    dot_type = tl.bfloat16

    def __init__(self, data: tuple, kv: str, splits: int) -> None:
        q, kv_data, _, kv_indptr, config = data
        if config["q_seq_len"] != 1:
            raise ValueError(f"config['q_seq_len']: expected 1, got {config['q_seq_len']}")
        unscaled = (kv_data["bf16"], torch.ones(1, device=q.device))
        self._kv: torch.Tensor
        self._kv_scale: torch.Tensor
        self._kv, self._kv_scale = kv_data["fp8"] if kv == "fp8" else unscaled
        self._q, self._kv_indptr = q, kv_indptr
        self._softmax_scale = config["sm_scale"] * LOG2E
        self._splits = splits
        shape = (q.shape[0], splits, NUM_HEADS)
        self._part = torch.empty(*shape, V_HEAD_DIM, device=q.device)
        self._lse = torch.empty(shape, device=q.device)
        self._out = torch.empty(q.shape[0], NUM_HEADS, V_HEAD_DIM, dtype=torch.bfloat16, device=q.device)

    def __call__(self) -> torch.Tensor:
        q, kv = self._q, self._kv
        _grouped_decode[(q.shape[0], self._splits)](
            q, kv, self._kv_indptr, self._kv_scale, self._part, self._lse, self._softmax_scale,
            q.stride(0), q.stride(1), kv.stride(0),
            SPLITS=self._splits, BLOCK_N=GROUPED_BLOCK_N, DOT_TYPE=self.dot_type, num_warps=4, num_stages=2,
        )  # fmt: skip
        _grouped_merge[(q.shape[0], NUM_HEADS)](
            self._part, self._lse, self._kv_scale, self._out, SPLITS=self._splits, num_warps=4
        )
        return self._out


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
    calls = {splits: GroupedDecode(data, kv, splits) for splits in GROUPED_SPLITS}
    medians = {}
    for splits, call in calls.items():
        call()
        medians[splits] = statistics.median(timer.time_ns(call)[0] for _ in range(TUNING_RUNS))
    best = min(medians, key=lambda splits: medians[splits])
    return Entry(f"Triton grouped {kv}", kv, calls[best], f"splits={best}")


def relative_error(output: torch.Tensor, exact: torch.Tensor) -> float:
    return ((output.double().view_as(exact) - exact).norm() / exact.norm()).item()


def measure(data: tuple, arms: list[str], repeats: int, timer: evaluator.ColdTimer, label: str) -> list[dict[str, Any]]:
    """Time every entry of one case, interleaved; times in microseconds, ratios above 1 mean slower than the other."""
    exact = reference.oracle(data, "bf16")
    entries = [our_entry(data, arm) for arm in arms]
    peers = [fa3_entry(data), *(grouped_entry(data, kv, timer) for kv in ("bf16", "fp8"))]
    for peer in filter(None, peers):
        peer.error = relative_error(peer.call(), exact)
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


def peers(
    case: Annotated[list[str] | None, typer.Option("--case", help="A shape such as 32x8192; repeatable.")] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option("--arm", help=f"Arm of the submission, '{OURS}' for its own choice; repeatable."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Timed runs of each entry.")] = 25,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every figure there.")] = None,
) -> None:
    """Compare the submission with its peers and the reader on the GPU."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("expected a CUDA or ROCm GPU, found none", param_hint="device")
    console = make_console()
    timer = evaluator.ColdTimer()
    environment = {**evaluator.describe_environment(timer), "fa3-fwd": evaluator.package_version("fa3-fwd")}
    for name, value in environment.items():
        console.print(f"{name:>10}: {value}", markup=False)
    arms = arm or [OURS, "triton_fp8", "torch_bmm"]
    results: dict[str, list[dict[str, Any]]] = {}
    for one in choose_cases("benchmark", case, None):
        label = case_label(one.args)
        data = reference.generate_input(**one.args)
        results[label] = measure(data, arms, repeats, timer, label)
        console.print(case_table(label, results[label]))
    table, means = summary_table(results)
    console.print(table)
    failed = [f"{label}, {row['name']}: {row['strict']}" for label, rows in results.items() for row in rows
              if (row["strict"] or "pass") != "pass"]  # fmt: skip
    for line in failed:
        console.print(line, markup=False, soft_wrap=True)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        report = {"environment": environment, "repeats": repeats, "cases": results, "geomean_us": means}
        json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(evaluator.EXIT_CHECK_FAILED if failed else evaluator.EXIT_OK)


if __name__ == "__main__":
    typer.run(peers)
