"""Predicts the gfx950 kernel's time on an MI355X from its machine code. Nothing here was ever timed on one.

    python -m bench.gfx950 --plot docs/gfx950.png

Each row of `submission.TABLE` for gfx950 is cross-compiled; the instructions of a full tile are counted in its main
loop and charged the clocks of `CLOCKS`; bytes and clocks together give the bound and the time. docs/gfx950.md says what
the figures rest on.
"""

import functools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

import eval as evaluator
import submission
from bench.console import make_console, run_tool
from bench.options import JsonOption, PlotOption, case_label
from submission import Config
from task import BENCHMARKS

MI355X = submission.Target("gfx950", num_cu=256)
WAVES = (4, 2, 1)
WAVES_PER_EU = 2  # caps a wave at 256 registers; without it accumulators move to AGPRs and back

ROW_BYTES = 576
PARTIAL_BYTES = 16 * 512 * 2 + 16 * 4
HBM_BYTES_PER_US = 6.8e6
LAUNCH_US = 4.3  # no-op event pair on an MI355X, measured by others
CLOCK_MHZ = 2400
CU_BYTES_PER_US = 64 * CLOCK_MHZ  # L2 to one CU, 64 bytes a clock
# Assumptions: a round trip to memory, and what a second launch adds (on an H200 1.3 us were measured).
ROUND_TRIP_US = 0.8
SECOND_LAUNCH_US = 2.0

# Clocks a wave-instruction occupies its unit; `--mca` sets LLVM's beside them. MFMA: 5.0 PFLOP/s dense fp8 / (256 CUs
# x 4 SIMDs x 2.4 GHz) is 2,035 FLOP a clock, so 65,536 take 32; the K = 32 form keeps CDNA3's rate, 2.6 PFLOP/s / (304
# x 4 x 2.1 GHz), so 16,384 take 16. VALU: 64 lanes on 16, transcendentals at a quarter of that, swaps at half. LDS: 128
# bytes a clock for the CU. Any other instruction takes a wave's issue slot, one every 4 clocks.
CLOCKS = {
    "mfma_k128": 32,
    "mfma_k32": 16,
    "valu": 4,
    "convert": 4,
    "permlane_swap": 8,
    "transcendental": 16,
    "lds_read_b128": 8,
    "lds_read_tr_b8": 4,
    "load_to_lds": 8,
    "barrier": 4,
    "wait": 4,
    "scalar": 4,
    "mfma_other": 32,
    "agpr_move": 4,
    "lds_other": 8,
    "memory_other": 4,
    "scratch": 4,
}
VALU = {"valu", "convert", "permlane_swap", "transcendental", "agpr_move"}
# Classes that have no business in the main loop.
STRANGERS = {"mfma_other", "agpr_move", "lds_other", "memory_other", "scratch"}
# First match wins.
CLASSES = (
    ("mfma_k128", r"v_mfma_f32_16x16x128_f8f6f4"),
    ("mfma_k32", r"v_mfma_f32_16x16x32_fp8_fp8"),
    ("mfma_other", r"v_mfma"),
    ("agpr_move", r"v_accvgpr"),
    ("lds_read_b128", r"ds_read_b128"),
    ("lds_read_tr_b8", r"ds_read_b64_tr_b8"),
    ("lds_other", r"ds_"),
    ("load_to_lds", r"buffer_load_dwordx4 .* lds$"),
    ("scratch", r"scratch_"),
    ("memory_other", r"(buffer|global|flat|s_load|s_buffer)_"),
    ("convert", r"v_cvt_"),
    ("permlane_swap", r"v_permlane\d+_swap"),
    ("transcendental", r"v_(exp|log|rcp|rsq|sqrt)_"),
    ("valu", r"v_"),
    ("barrier", r"s_barrier"),
    ("wait", r"s_(waitcnt|nop)"),
    ("scalar", r"s_"),
)

DECODE_TYPES = {
    "q_ptr": "*bf16",
    "kv_ptr": "*fp8e4nv",
    "kv_scale_ptr": "*fp32",
    "kv_indptr": "*i32",
    "out_ptr": "*bf16",
    "part_ptr": "*fp16",
    "lse_ptr": "*fp32",
    "ticket_ptr": "*i32",
    "softmax_scale": "fp32",
    "s_q": "i32",
    "stride_q_t": "i32",
    "stride_q_h": "i32",
    "stride_kv_t": "i32",
}


def compile_kernel(fn, constexprs: dict, types: dict | None = None, **options):
    """As a launch with the official arguments compiles it: addresses and strides, but of scales, of 16 bytes, tensors
    under 2 GiB."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    signature = {name: "constexpr" if name in constexprs else (types or DECODE_TYPES)[name] for name in fn.arg_names}
    attributes = {}
    for i, (name, kind) in enumerate(signature.items()):
        if kind[0] == "*" or (name.startswith("stride") and "scale" not in name):
            attributes[(i,)] = [["tt.divisibility", 16]]
        if kind[0] == "*":
            attributes[(i,)].append(["tt.pointer_range", 32])
    values = {(fn.arg_names.index(name),): value for name, value in constexprs.items()}
    source = (GluonASTSource if isinstance(fn, GluonJITFunction) else ASTSource)(fn, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("hip", "gfx950", 64), options=options)


@functools.cache
def compile_decode(config: Config, pairs: bool = True, module=submission, s_q: int = 1):
    """The decode kernel of `module` for gfx950, as `submission` launches it (a `triton.compiler.CompiledKernel`).

    Triton makes an argument of 1 a constant: with one query a sequence, `s_q` is none of the kernel's arguments.
    """
    one_launch = config.one_launch and config.splits > 1
    constexprs = {"SPLITS": config.splits, "PAIRS": pairs, "ONE_LAUNCH": one_launch}
    if s_q == 1:
        constexprs["s_q"] = 1
    fn = module._decode_fp8_gfx950
    return compile_kernel(fn, constexprs, num_warps=config.num_warps, waves_per_eu=WAVES_PER_EU)


@functools.cache
def compile_combine(splits: int, partials: str = "*fp16"):
    """The combine kernel for gfx950, as `submission` launches it, and the first size of its grid."""
    block_d, block_s, num_warps = submission.combine_shape(splits)
    constexprs = {"SPLITS": splits, "BLOCK_S": block_s, "BLOCK_D": block_d, "DEPENDENT": False}
    types = DECODE_TYPES | {"part_ptr": partials}
    return compile_kernel(submission._combine, constexprs, types, num_warps=num_warps), 512 // block_d


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers a lane, spilled ones, bytes of scratch a lane, bytes of LDS a group."""

    vgprs: int
    agprs: int
    spills: int
    scratch_bytes: int
    lds_bytes: int

    @property
    def waves_per_cu(self) -> int:
        """Waves a CU can hold by registers: 4 SIMDs of 512 registers a lane, given out in eights."""
        return 4 * (512 // (8 * math.ceil((self.vgprs + self.agprs) / 8)))


def resources(kernel) -> Resources:
    def figure(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s*(\d+)", kernel.asm["amdgcn"])[0])

    # The metadata's .vgpr_count is the sum of both kinds.
    agprs = figure("agpr_count")
    return Resources(
        figure("vgpr_count") - agprs, agprs, figure("vgpr_spill_count"), figure("private_segment_fixed_size"),
        kernel.metadata.shared,
    )  # fmt: skip


def _blocks(asm: str) -> list[tuple[str, list[str]]]:
    """Basic blocks in order: what LLVM's comments say of each, and its instructions."""
    blocks: list[tuple[str, list[str]]] = [("", [])]
    for line in asm.splitlines():
        if re.match(r"^(\.LBB\d+_\d+:|; %bb\.\d+:)", line):
            blocks.append((line, []))
        elif re.match(r"^\s+; ", line) and not blocks[-1][1]:
            blocks[-1] = (blocks[-1][0] + line, [])
        elif match := re.match(r"^\s+([a-z]\w+\b[^;]*)", line):
            blocks[-1][1].append(match.group(1).strip())
    return blocks


def main_loop(asm: str) -> list[list[str]]:
    """The blocks of the loop of most matrix instructions, each a list of instructions; ValueError if there is none."""
    loops: dict[str, list[list[str]]] = {}
    for head, instructions in _blocks(asm):
        if match := re.search(r"in Loop: Header=(BB\d+_\d+)", head):
            loops.setdefault(match.group(1), []).append(instructions)
        elif match := re.match(r"\.L(BB\d+_\d+).*Loop Header", head):
            loops.setdefault(match.group(1), []).append(instructions)
    if not loops:
        raise ValueError("asm: expected a loop, got none")
    return max(loops.values(), key=lambda blocks: sum(i.startswith("v_mfma") for block in blocks for i in block))


def classify(instructions: list[str]) -> Counter:
    """Instructions by the classes of `CLASSES`."""
    return Counter(next(name for name, pattern in CLASSES if re.match(pattern, i)) for i in instructions)


def is_mask(block: list[str]) -> bool:
    """A block that hides rows past the end of a sequence: only its last tile enters it."""
    counts = classify(block)
    return any(i.startswith("v_cndmask") for i in block) and not counts["mfma_k32"] and not counts["load_to_lds"]


@dataclass(frozen=True)
class Form:
    """A compiled form of the kernel, per wave: instructions of a full tile and outside of the loop."""

    config: Config
    per_tile: dict[str, float]
    outside: int
    resources: Resources

    @property
    def tokens(self) -> int:
        return self.config.block_n

    def clocks_per_tile(self, programs: int | None = None) -> dict[str, float]:
        """Clocks of a CU for a tile of each of its `programs`: of a SIMD's units and issue slot, one wave a SIMD, and
        of the LDS that all waves share. By default as many programs as the CU holds."""
        waves = self.config.num_warps * (programs or self.config.programs_per_cu)
        busy = dict.fromkeys(("MFMA", "VALU", "LDS", "issue"), 0.0)
        for name, count in self.per_tile.items():
            if name.startswith("mfma"):
                unit = "MFMA"
            elif name.startswith(("lds", "load")):
                unit = "LDS"
            else:
                unit = "VALU" if name in VALU else "issue"
            busy[unit] += count * CLOCKS[name] * (waves if unit == "LDS" else 1)
        return busy

    def clocks_per_64(self, unit: str | None = None) -> float:
        """Clocks of a full CU for 64 tokens: of one unit, or with nothing overlapping anything."""
        busy = self.clocks_per_tile()
        clocks = busy[unit] if unit else sum(busy.values())
        return clocks * 64 / (self.tokens * self.config.programs_per_cu)


@functools.cache
def examine(config: Config, pairs: bool = True, s_q: int = 1) -> Form:
    kernel = compile_decode(config, pairs, s_q=s_q)
    blocks = main_loop(kernel.asm["amdgcn"])
    counts = classify([i for block in blocks if not is_mask(block) for i in block])
    inside = sum(map(len, blocks))
    everything = sum(len(instructions) for _, instructions in _blocks(kernel.asm["amdgcn"]))
    per_tile = {name: count / 2 for name, count in counts.items()}  # the loop holds two
    return Form(config, per_tile, everything - inside, resources(kernel))


@dataclass(frozen=True)
class Prediction:
    """Of one shape and configuration, none of it measured.

    `per_tile`: a wave's instructions of a full tile by class; `tile_bytes`: what a program reads for it; `tile_clocks`:
    a full CU's clocks by unit for a tile of each of its programs. `units_us`: how long memory and each unit of a CU are
    busy in the main loop; `serial_us`: the CU's units one after the other, nothing overlapping; `floor_us`: launch and
    bytes alone; `time_us`: the whole call.
    """

    shape: str
    config: Config
    kv_bytes: int
    per_tile: dict[str, float]
    tile_bytes: int
    tile_clocks: dict[str, float]
    floor_us: float
    units_us: dict[str, float]
    serial_us: float
    time_us: float

    @property
    def bound(self) -> str:
        return max(self.units_us, key=lambda unit: self.units_us[unit])


def code_of(config: Config) -> Config:
    """The configuration whose code stands for it: splits are but a constant in it, unless they are merged there."""
    return config if config.one_launch or config.splits == 1 else replace(config, splits=2)


def call_us(config: Config, programs: int, loop_us: float, outside: int, partial_bytes: int) -> float:
    """A call whose main loop takes `loop_us`, of `outside` instructions besides, with partials of `partial_bytes`.

    Before the first tile: kv_indptr, then the tile, one round trip each; most of the prologue hides there. Half of what
    stands outside of the loop is charged, an issue slot an instruction.
    """
    time_us = LAUNCH_US + 2 * ROUND_TRIP_US + loop_us + outside * 2 / CLOCK_MHZ
    if config.splits == 1:
        return time_us
    partials_us = programs * partial_bytes / HBM_BYTES_PER_US
    if config.one_launch:
        # Partial out, ticket, partials in, all by way of memory; one CU reads them.
        return time_us + partials_us + 3 * ROUND_TRIP_US + config.splits * partial_bytes / CU_BYTES_PER_US
    return time_us + 2 * partials_us + SECOND_LAUNCH_US + 2 * ROUND_TRIP_US


def memory_us(kv_bytes: int, programs: int) -> float:
    return kv_bytes / min(HBM_BYTES_PER_US, min(programs, MI355X.num_cu) * CU_BYTES_PER_US)


def predict(batch_size: int, kv_seq_len: int, config: Config, pairs: bool = True) -> Prediction:
    form = examine(code_of(config), pairs)
    programs = batch_size * config.splits
    slots = MI355X.num_cu * config.programs_per_cu
    on_a_cu = math.ceil(min(programs, slots) / MI355X.num_cu)
    tiles = math.ceil(programs / slots) * math.ceil(math.ceil(kv_seq_len / form.tokens) / config.splits)
    units_us = {unit: tiles * clocks / CLOCK_MHZ for unit, clocks in form.clocks_per_tile(on_a_cu).items()}
    serial_us = sum(units_us.values())
    kv_bytes = batch_size * kv_seq_len * ROW_BYTES
    units_us["HBM"] = memory_us(kv_bytes, programs)
    time_us = call_us(config, programs, max(serial_us, units_us["HBM"]), form.outside, PARTIAL_BYTES)
    shape = case_label({"batchsize": batch_size, "kvseqlen": kv_seq_len, "qseqlen": 1})
    return Prediction(
        shape, config, kv_bytes, form.per_tile, form.tokens * ROW_BYTES, form.clocks_per_tile(),
        kv_bytes / HBM_BYTES_PER_US + LAUNCH_US, units_us, serial_us, time_us,
    )  # fmt: skip


def candidates(batch_size: int, kv_seq_len: int) -> list[Config]:
    """The table's configurations of this kernel for a shape on an MI355X, the one chosen without timing first."""
    configs = submission.select_config(batch_size, kv_seq_len, MI355X)
    return [config for config in configs if config.arm == "gfx950_fp8"]


def forms(batch_size: int, kv_seq_len: int) -> list[Config]:
    """Every form of the kernel for a shape, splits by the same function as the table's."""
    found = []
    for waves in WAVES:
        config = submission._gfx950(waves)
        splits = submission.choose_splits(batch_size, kv_seq_len, config.block_n, MI355X.num_cu, config.programs_per_cu)
        config = replace(config, splits=splits)
        found.append(config)
        # Beyond 8 splits one program reads too much; one wave has no registers left for it.
        if 1 < splits <= 8 and waves > 1:
            found.append(replace(config, one_launch=True))
    return found


def describe(config: Config) -> str:
    """A configuration in a few words."""
    launches = 1 if config.one_launch or config.splits == 1 else 2
    return f"waves {config.num_warps}, splits {config.splits}, launches {launches}"


def _loop_table(titled: list[tuple[str, Form]]) -> Table:
    names = sorted({name for _, form in titled for name in form.per_tile}, key=list(CLOCKS).index)
    table = Table(title="Main loop, a wave and tile of 32 tokens (from the machine code; clocks predicted)")
    table.add_column("")
    for title, _ in titled:
        table.add_column(title, justify="right")
    for name in names:
        table.add_row(name, *(f"{form.per_tile.get(name, 0):g}" for _, form in titled))
    table.add_section()
    table.add_row("registers", *(str(form.resources.vgprs + form.resources.agprs) for _, form in titled))
    table.add_row("spills", *(str(form.resources.spills) for _, form in titled))
    table.add_row("LDS bytes", *(str(form.resources.lds_bytes) for _, form in titled))
    table.add_row("programs a CU", *(str(form.config.programs_per_cu) for _, form in titled))
    table.add_row("bytes a tile", *(str(form.tokens * ROW_BYTES) for _, form in titled))
    table.add_section()
    for unit in ("MFMA", "VALU", "LDS", "issue"):
        table.add_row(f"clocks per 64 tokens, {unit}", *(f"{form.clocks_per_64(unit):.0f}" for _, form in titled))
    table.add_row("all of them in turn", *(f"{form.clocks_per_64():.0f}" for _, form in titled))
    budget = 64 * ROW_BYTES * MI355X.num_cu / HBM_BYTES_PER_US * CLOCK_MHZ
    table.add_row("HBM at 6.8 TB/s", *[f"{budget:.0f}"] * len(titled))
    return table


def _shape_table(predictions: list[Prediction], mean: bool) -> Table:
    table = Table(title="PREDICTION for one MI355X, never run on a card (us)")
    columns = ["shape", "configuration", "tile KB", "tile clocks", "MB", "HBM", "MFMA", "VALU", "LDS", "in turn"]
    for column in (*columns, "bound", "time", "floor"):
        table.add_column(column, justify="left" if column in ("shape", "configuration", "bound") else "right")
    for p in predictions:
        units = [f"{p.units_us[unit]:.1f}" for unit in ("HBM", "MFMA", "VALU", "LDS")]
        table.add_row(
            p.shape, describe(p.config), f"{p.tile_bytes / 1e3:.1f}", f"{sum(p.tile_clocks.values()):.0f}",
            f"{p.kv_bytes / 1e6:.1f}", *units, f"{p.serial_us:.1f}", p.bound,
            f"{p.time_us:.1f}", f"{p.floor_us:.1f}",
        )  # fmt: skip
    if mean:
        table.add_section()
        means = [statistics.geometric_mean([getattr(p, name) for p in predictions]) for name in ("time_us", "floor_us")]
        table.add_row("geometric mean", *[""] * 10, *(f"{us:.1f}" for us in means))
    return table


def _draw(path: Path, predictions: list[Prediction]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    positions = range(len(predictions))
    axes.bar(positions, [p.time_us for p in predictions], color="tab:blue", label="predicted time of a call")
    axes.bar(positions, [p.serial_us for p in predictions], 0.5, color="tab:cyan", label="compute, not overlapped")
    axes.scatter(positions, [p.floor_us for p in predictions], color="black", marker="_", s=900, label="floor")
    axes.set_xticks(positions, [p.shape for p in predictions])
    axes.set_yscale("log")
    axes.set_xlabel("batch x cached tokens")
    axes.set_ylabel("us")
    axes.set_title("gfx950_fp8 on an MI355X: predicted, never measured")
    axes.legend()
    figure.savefig(path, dpi=120)


def _as_json(titled: list[tuple[str, Form]], predictions: list[Prediction]) -> dict:
    import triton

    return {
        "kind": "prediction, never measured",
        "triton": triton.__version__,
        "loops": {title: asdict(form) for title, form in titled},
        "shapes": [asdict(p) | {"bound": p.bound} for p in predictions],
    }


def _changes(old: dict, new: dict) -> list[str]:
    """What another Triton does differently: a line for each form, and the predicted times' geometric mean."""
    lines = []
    for title, loop in old["loops"].items():
        other = new["loops"][title]
        differences = []
        for group in ("resources", "per_tile"):
            for name in sorted(loop[group].keys() | other[group].keys()):
                was, now = loop[group].get(name, 0), other[group].get(name, 0)
                if was != now:
                    differences.append(f"{name} {was:g} -> {now:g}")
        lines.append(f"{title}: {', '.join(differences) or 'nothing changes'}")
    was, now = (statistics.geometric_mean([shape["time_us"] for shape in figures["shapes"]]) for figures in (old, new))
    return [*lines, f"predicted geometric mean: {was:.1f} -> {now:.1f} us"]


def _compare(figures: dict, folder: Path) -> list[str]:
    """What the Triton in `folder` changes in the rows' figures, or the error with which it ends."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "other.json"
        command = [sys.executable, "-m", "bench.gfx950", "--rows", "--json", str(path)]
        environment = os.environ | {"PYTHONPATH": str(folder.resolve())}
        done = subprocess.run(command, cwd=evaluator.ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if re.match(r"\w+(Error|Exception)\b", line)]
            return [f"the Triton in {folder} cannot compile the kernel: {(errors or ['no error printed'])[0]}"]
        other = json.loads(path.read_text())
    return [f"Triton {figures['triton']} -> {other['triton']}", *_changes(figures, other)]


def mca_passes(tool: str, instructions: list[str]) -> list[float]:
    """Passes of 4 clocks for which `tool`, LLVM's llvm-mca, keeps each instruction's unit busy on gfx950."""
    done = subprocess.run(
        [tool, "-mtriple=amdgcn-amd-amdhsa", "-mcpu=gfx950", "-instruction-tables"],
        input="\n".join(instructions), capture_output=True, text=True, check=True,
    )  # fmt: skip
    # Micro-operations, latency, reciprocal throughput, flags, instruction.
    found = re.findall(r"^ +\d+ +\d+ +(\d+\.\d+)[ *U]+\w+ ", done.stdout, re.M)
    if len(found) != len(instructions):
        raise RuntimeError(f"{tool}: expected {len(instructions)} instructions in its table, got {len(found)}")
    return [float(passes) for passes in found]


def _mca_table(tool: str) -> Table:
    """The clocks charged and LLVM's for the classes of the main loop; one instruction of each mnemonic is asked for."""
    blocks = main_loop(compile_decode(replace(submission._gfx950(4), splits=2)).asm["amdgcn"])
    samples = {i.split()[0]: i for block in blocks for i in block if not i.startswith(("s_cbranch", "s_branch"))}
    passes: dict[str, set[float]] = {}
    for instruction, count in zip(samples.values(), mca_passes(tool, list(samples.values())), strict=True):
        passes.setdefault(next(iter(classify([instruction]))), set()).add(count)
    table = Table(title=f"Clocks of a wave-instruction: charged, and by {tool}")
    for column in ("class", "charged", "llvm-mca"):
        table.add_column(column, justify="left" if column == "class" else "right")
    for name in sorted(passes, key=list(CLOCKS).index):
        table.add_row(name, str(CLOCKS[name]), " or ".join(f"{4 * count:g}" for count in sorted(passes[name])))
    return table


def main(
    all_forms: Annotated[bool, typer.Option("--forms", help="Every form for every shape, not only the rows.")] = False,
    json_path: JsonOption = None,
    picture: PlotOption = None,
    rows: Annotated[bool, typer.Option("--rows", help="Only the forms that the shapes' rows choose.")] = False,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="FOLDER", help="Only compare the rows with the Triton in this folder."),
    ] = None,
    mca: Annotated[
        str | None,
        typer.Option("--mca", metavar="TOOL", help="Only compare the clocks charged with this llvm-mca, LLVM 22 on."),
    ] = None,
) -> None:
    """Predict the gfx950 kernel's time on an MI355X from its machine code."""
    if against and not (against / "triton").is_dir():
        raise typer.BadParameter(f"expected a folder that holds a Triton, got {against}", param_hint="--against")
    if mca and not shutil.which(mca):
        raise typer.BadParameter(f"expected a program, got {mca}", param_hint="--mca")
    console = make_console()
    if mca:
        console.print(_mca_table(mca))
        return
    shapes = [(case["batchsize"], case["kvseqlen"]) for case in BENCHMARKS]
    predictions = [
        predict(batch_size, kv_seq_len, config)
        for batch_size, kv_seq_len in shapes
        for config in (forms(batch_size, kv_seq_len) if all_forms else candidates(batch_size, kv_seq_len)[:1])
    ]
    if rows or against:
        codes = dict.fromkeys(code_of(p.config) for p in predictions)
        titled = [(describe(config), examine(config)) for config in codes]
    else:
        titled = [
            (f"{waves} wave{'s' * (waves > 1)}{'' if pairs else ', plain fp8'}",
             examine(replace(submission._gfx950(waves), splits=2), pairs))
            for waves in WAVES
            for pairs in (True, False)
        ]  # fmt: skip
    figures = _as_json(titled, predictions)
    if against:
        console.print("\n".join(_compare(figures, against)), markup=False, soft_wrap=True)
        return
    console.print(_loop_table(titled))
    console.print(_shape_table(predictions, mean=not all_forms))
    if json_path:
        json_path.write_text(json.dumps(figures, indent=1) + "\n")
    if picture:
        _draw(picture, predictions)


if __name__ == "__main__":
    run_tool(main)
