"""Predicts the gfx950 mxfp4 kernel's time on an MI355X from its machine code. Nothing here was ever timed on one.

    python -m bench.mxfp4_gfx950

The model is `bench.gfx950`'s, beside whose fp8 predictions it puts its own: the same clocks an instruction, the same
bandwidth and latencies, 312 bytes a token (288 and a row of 24 scales), float32 partials.
"""

import functools
import math
import re
from collections import Counter
from dataclasses import dataclass

from rich.table import Table

import submission
from bench import gfx950
from bench.console import make_console, run_tool
from bench.gfx950 import CLOCK_MHZ, HBM_BYTES_PER_US, MI355X
from bench.options import case_label
from submission import Config
from task import BENCHMARKS

WAVES, TOKENS = 4, 128
WAVES_PER_EU = 1  # a wave a SIMD, of whose 512 registers the AGPRs hold the accumulators
ROW_BYTES = 288 + 24
PARTIAL_BYTES = 16 * 512 * 4 + 16 * 4
TYPES = gfx950.DECODE_TYPES | {"kv_ptr": "*u8", "scale_ptr": "*i32", "part_ptr": "*fp32", "stride_scale_t": "i32"}
# Unit and clocks of an instruction, first match wins: as `bench.gfx950.CLOCKS`; bf16 at the rate of K = 32 fp8.
CLOCKS = (
    (r"v_mfma_scale_f32_16x16x128_f8f6f4", "MFMA", 32),
    (r"v_mfma_f32_16x16x32_bf16", "MFMA", 16),
    (r"ds_(read|write)_b128", "LDS", 8),
    (r"ds_(read_b64_tr_b8|write2_b32)\b", "LDS", 4),
    (r"v_(exp|log|rcp|rsq|sqrt)_", "VALU", 16),
    (r"v_(?!mfma)", "VALU", 4),
    (r"buffer_load_dword(x4)?\b", "issue", 4),
    (r"s_", "issue", 4),
)


@functools.cache
def compile_decode(splits: int, one_launch: bool = False, module=submission, s_q: int = 1):
    """The decode kernel of `module` for gfx950, as `submission` launches it (a `triton.compiler.CompiledKernel`)."""
    constexprs = {"SPLITS": splits, "ONE_LAUNCH": one_launch and splits > 1} | ({"s_q": 1} if s_q == 1 else {})
    options = {"num_warps": WAVES, "waves_per_eu": WAVES_PER_EU}
    return gfx950.compile_kernel(module._decode_mxfp4_gfx950, constexprs, TYPES, **options)


@dataclass(frozen=True)
class Loop:
    """A compiled kernel: a full tile of 128 tokens in the main loop, and the number of instructions outside of it."""

    executed: Counter
    outside: int

    def clocks_per_64(self) -> dict[str, float]:
        """Clocks of each unit of a CU for 64 tokens; LDS is shared by the waves, the rest is a SIMD's."""
        busy = dict.fromkeys(("MFMA", "VALU", "LDS", "issue"), 0.0)
        for instruction, count in self.executed.items():
            unit, clocks = next((u, c) for pattern, u, c in CLOCKS if re.match(pattern, instruction))
            busy[unit] += count * clocks * (WAVES if unit == "LDS" else 1) * 64 / TOKENS
        return busy


@functools.cache
def examine(splits: int, one_launch: bool = False, s_q: int = 1) -> Loop:
    """`Loop.clocks_per_64` raises StopIteration if the loop holds an instruction without clocks, as a narrow LDS access
    or scratch."""
    asm = compile_decode(splits, one_launch, s_q=s_q).asm["amdgcn"]
    blocks = gfx950.main_loop(asm)
    inside = [i for block in blocks if not gfx950.is_mask(block) for i in block]
    everything = sum(len(instructions) for _, instructions in gfx950._blocks(asm))
    return Loop(Counter(inside), everything - sum(map(len, blocks)))


def predict(batch_size: int, kv_seq_len: int, config: Config) -> tuple[float, float, float]:
    """(memory, compute with nothing overlapping, whole call) in microseconds, as `bench.gfx950.predict`."""
    merged = config.one_launch or config.splits == 1
    loop = examine(config.splits if merged else 2, config.one_launch)
    programs = batch_size * config.splits
    tiles = math.ceil(programs / MI355X.num_cu) * math.ceil(math.ceil(kv_seq_len / TOKENS) / config.splits)
    serial_us = tiles * sum(loop.clocks_per_64().values()) * TOKENS / 64 / CLOCK_MHZ
    memory_us = gfx950.memory_us(batch_size * kv_seq_len * ROW_BYTES, programs)
    time_us = gfx950.call_us(config, programs, max(serial_us, memory_us), loop.outside, PARTIAL_BYTES)
    return memory_us, serial_us, time_us


def config_of(batch_size: int, kv_seq_len: int) -> Config:
    """The configuration that `MLA_KV=mxfp4` runs on an MI355X."""
    return submission.select_config(batch_size, kv_seq_len, MI355X, kv="mxfp4")[0]


def main() -> None:
    """Print the main loop's clocks and the predicted times."""
    console = make_console()
    clocks = examine(2).clocks_per_64()
    loop = Table(title="Main loop, clocks of a CU per 64 tokens (from the machine code; clocks predicted)")
    for name, value in (*clocks.items(), ("all of them in turn", sum(clocks.values()))):
        loop.add_row(name, f"{value:.0f}")
    loop.add_row("HBM at 6.8 TB/s", f"{64 * ROW_BYTES * MI355X.num_cu / HBM_BYTES_PER_US * CLOCK_MHZ:.0f}")
    console.print(loop)
    table = Table(title="PREDICTION for one MI355X, never run on a card (us)")
    for column in ("shape", "splits", "launches", "HBM", "in turn", "time", "fp8", "ratio"):
        table.add_column(column, justify="right")
    for case in BENCHMARKS:
        shape = (case["batchsize"], case["kvseqlen"])
        config = config_of(*shape)
        fp8_us = gfx950.predict(*shape, gfx950.candidates(*shape)[0]).time_us
        figures = (*predict(*shape, config), fp8_us)
        launches = 1 if config.one_launch or config.splits == 1 else 2
        table.add_row(
            case_label(case), str(config.splits), str(launches), *(f"{us:.1f}" for us in figures),
            f"{figures[2] / fp8_us:.2f}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    run_tool(main)
