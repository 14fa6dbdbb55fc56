"""Runs the submission's gfx950 kernels in the emulator on drawn inputs and compares them with float64."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import reference
import submission
from bench import mxfp4_gfx950
from bench.gfx950 import MI355X, WAVES_PER_EU, compile_combine, compile_decode
from submission import LOG2E, Config
from task import NUM_HEADS, QK_HEAD_DIM, SM_SCALE, V_HEAD_DIM

from . import Finding, Run, TritonKernel

SUBMISSION = Path(submission.__file__)
POISON = 0x7F  # an e4m3 NaN


@dataclass(frozen=True)
class Case:
    """q bf16 (b * s_q, 16, 576), kv fp8 (total, 576) and its scale (1,), kv_indptr int32 (b + 1,)."""

    q: torch.Tensor
    kv: torch.Tensor
    kv_scale: torch.Tensor
    kv_indptr: torch.Tensor
    s_q: int

    def expected(self) -> torch.Tensor:
        """Attention in float64 over the dequantised cache."""
        total, batch = self.kv.shape[0], self.kv_indptr.numel() - 1
        kv_data = {"bf16": torch.empty(total, 1, QK_HEAD_DIM), "fp8": (self.kv[:, None], self.kv_scale)}
        config = {"batch_size": batch, "q_seq_len": self.s_q, "sm_scale": SM_SCALE}
        qo_indptr = torch.arange(batch + 1, dtype=torch.int32) * self.s_q
        return reference.oracle((self.q, kv_data, qo_indptr, self.kv_indptr, config), "fp8")


def _whole(x: torch.Tensor) -> torch.Tensor:
    """The contiguous tensor that `x`, perhaps a strided view from its first element on, lies in."""
    return x if x.is_contiguous() else x._base


def draw(
    lengths: list[int], s_q: int = 1, q_factors: list[float] | None = None, poisoned: tuple[int, ...] = ()
) -> Case:
    """Standard normal inputs, q times its sequence's factor; the rows of `poisoned` sequences are NaN."""
    gen = torch.Generator().manual_seed(950)
    q = torch.randn(len(lengths) * s_q, NUM_HEADS, QK_HEAD_DIM, generator=gen)
    if q_factors:
        q *= torch.tensor(q_factors).repeat_interleave(s_q)[:, None, None]
    kv, kv_scale = reference.quantize_fp8(torch.randn(sum(lengths), QK_HEAD_DIM, generator=gen))
    kv_indptr = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    for b in poisoned:
        kv[kv_indptr[b] : kv_indptr[b + 1]].view(torch.uint8).fill_(POISON)
    return Case(q.bfloat16(), kv, kv_scale, kv_indptr, s_q)


@dataclass(frozen=True)
class Result:
    """The output of a call, what its decode launch left, and what was found in its launches."""

    out: torch.Tensor
    part: torch.Tensor
    lse: torch.Tensor
    ticket: torch.Tensor
    unexpected: list[Finding]


def taken(kernel: TritonKernel, arguments: dict) -> dict:
    """The arguments that the compiler has not made constants."""
    return {name: value for name, value in arguments.items() if name in kernel.signature}


def execute(
    case: Case, config: Config, pairs: bool = True, module=submission, ticket: torch.Tensor | None = None, **options
) -> Result:
    """One call as the launcher makes it: decode and, with two launches, combine. All scratch starts as NaN.

    `module`: where the decode kernel comes from. `ticket`: of an earlier call. `options`: as for `Emulator.launch`, for
    both launches.
    """
    total_q, splits = case.q.shape[0], config.splits
    out = torch.full((total_q, NUM_HEADS, V_HEAD_DIM), torch.nan, dtype=torch.bfloat16)
    part = torch.full((total_q, splits, NUM_HEADS, V_HEAD_DIM), torch.nan, dtype=torch.float16)
    lse = torch.full((total_q, splits, NUM_HEADS), torch.nan)
    ticket = torch.zeros(total_q, dtype=torch.int32) if ticket is None else ticket
    inputs = {
        "q_ptr": _whole(case.q),
        "kv_ptr": _whole(case.kv),
        "kv_scale_ptr": case.kv_scale,
        "kv_indptr": case.kv_indptr,
    }
    scalars = {
        "softmax_scale": SM_SCALE * LOG2E,
        "s_q": case.s_q,
        "stride_q_t": case.q.stride(0),
        "stride_q_h": case.q.stride(1),
        "stride_kv_t": case.kv.stride(0),
    }
    scratch = {"out_ptr": out, "part_ptr": part, "lse_ptr": lse, "ticket_ptr": ticket}
    decode = TritonKernel(compile_decode(config, pairs, module, case.s_q))
    arguments = taken(decode, inputs | scratch | scalars)
    found = unexpected(decode.launch((total_q, splits), arguments, read_only=tuple(inputs), **options))
    if splits > 1 and not config.one_launch:
        compiled, blocks_d = compile_combine(splits)
        arguments = {"part_ptr": part, "lse_ptr": lse, "kv_scale_ptr": case.kv_scale, "out_ptr": out}
        read_only = ("part_ptr", "lse_ptr", "kv_scale_ptr")
        combine = TritonKernel(compiled)
        found += unexpected(combine.launch((blocks_d, NUM_HEADS, total_q), arguments, read_only=read_only, **options))
    return Result(out, part, lse, ticket, found)


class Emulated:
    """Stands in for a jitted kernel: `kernel[grid](...)` runs `compiled` in the emulator.

    The launch must ask for the constants and options in `keywords` and read nothing unwritten: AssertionError else.
    """

    def __init__(self, fn, compiled, **keywords):
        self.names = [name for name in fn.arg_names if name not in keywords]
        self.kernel, self.keywords, self.launches = TritonKernel(compiled), keywords, 0

    def __getitem__(self, grid):
        def launch(*args, **keywords):
            assert keywords == self.keywords
            run = self.kernel.launch(grid, taken(self.kernel, dict(zip(self.names, args, strict=True))))
            assert unexpected(run) == []
            self.launches += 1

        return launch


def emulated_kernels(config: Config) -> dict[str, Emulated]:
    """Stand-ins by name for the kernels that the launcher of `config` launches."""
    splits, waves, merged = config.splits, config.num_warps, config.one_launch and config.splits > 1
    constants = {"SPLITS": splits, "ONE_LAUNCH": merged, "num_warps": waves}
    if config.arm == "gfx950_mxfp4":
        name, compiled, partials = "_decode_mxfp4_gfx950", mxfp4_gfx950.compile_decode(splits, merged), "*fp32"
        constants |= {"waves_per_eu": mxfp4_gfx950.WAVES_PER_EU}
    else:
        name, compiled, partials = "_decode_fp8_gfx950", compile_decode(config), "*fp16"
        constants |= {"PAIRS": True, "waves_per_eu": WAVES_PER_EU}
    block_d, block_s, num_warps = submission.combine_shape(splits)
    combine = Emulated(
        submission._combine, compile_combine(splits, partials)[0], SPLITS=splits, BLOCK_S=block_s, BLOCK_D=block_d,
        DEPENDENT=False, num_warps=num_warps,
    )  # fmt: skip
    return {name: Emulated(getattr(submission, name), compiled, **constants), "_combine": combine}


def pretend_mi355x(monkeypatch, config: Config) -> dict[str, Emulated]:
    """The submission takes the CPU for an MI355X, whose launches run in the emulator, and `config` for its first
    choice."""
    kernels = emulated_kernels(config)
    for name, kernel in kernels.items():
        monkeypatch.setattr(submission, name, kernel)
    for name in ("_PLANS", "_SCRATCH"):
        monkeypatch.setattr(submission, name, {})
    monkeypatch.setattr(submission, "_target", lambda device: MI355X)
    monkeypatch.setattr(submission, "TABLE", (("gfx950", None, None, (config,)),))
    monkeypatch.setenv("MLA_TUNE", "0")
    monkeypatch.setenv("MLA_KV", submission.ARMS[config.arm].kv)
    return kernels


def error(result: Result, expected: torch.Tensor) -> float:
    """Relative error of the output in the 2-norm, the largest of all query rows; a row of zeros must be zeros."""
    out = result.out.double().flatten(1)
    norms = expected.flatten(1).norm(dim=1)
    return ((out - expected.flatten(1)).norm(dim=1) / torch.where(norms == 0, 1e-30, norms)).max().item()


def unexpected(run: Run) -> list[Finding]:
    """Findings but for a harmless one: where the lower half of v_mad_u64_u32's result is all that is used, the addend's
    upper half stays unwritten.
    """
    harmless = ("uninitialised register", "v_mad_u64_u32")
    return [f for f in run.findings if (f.kind, f.instruction.split("(")[0]) != harmless]


def with_fault(folder: Path, old: str, new: str):
    """The submission with `old`, which must stand in it once, replaced by `new`, as a module of its own."""
    source = SUBMISSION.read_text()
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {SUBMISSION.name}"
    path = folder / "faulty_submission.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
