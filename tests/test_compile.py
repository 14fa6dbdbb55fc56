"""Every kernel and configuration of the table compiles for the GPUs it is meant for, on a machine without one."""

import re
import subprocess
from collections import Counter

import pytest
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

import submission
from submission import TABLE, Target, select_config
from task import BENCHMARKS

SM90, GFX950 = GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx950", 64)
SHAPES = [(case["batchsize"], case["kvseqlen"]) for case in BENCHMARKS]
PORTABLE = {
    "q_ptr": "*bf16", "kv_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "kv_scale_ptr": "*fp32", "kv_indptr": "*i32",
    "out_ptr": "*bf16", "part_ptr": "*fp16", "lse_ptr": "*fp32", "softmax_scale": "fp32", "s_q": "i32",
    "stride_q_t": "i32", "stride_q_h": "i32", "stride_kv_t": "i32",
}  # fmt: skip


def descriptor(columns, swizzle):
    layout = gl.NVMMASharedLayout(swizzle, 8, 2)
    return f"tensordesc<fp8e4nv[64, {columns}],{layout!r}>"


HOPPER = {
    **{name: PORTABLE[name] for name in PORTABLE if name not in ("kv_ptr", "stride_kv_t")},
    "kn_desc": descriptor(512, 128), "kr_desc": descriptor(64, 64), "ticket_ptr": "*i32", "kv_len": "i32",
}  # fmt: skip


MXFP4 = {**PORTABLE, "kv_ptr": "*u8", "scale_ptr": "*u8", "part_ptr": "*fp32"}


def compile_kernel(kernel, types, constants, target, source=ASTSource, **options):
    """Compiles as the launcher does: pointers and strides divisible by 16, everything else unknown."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or (name.startswith("stride") and name not in constants)
    }
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    return compile(source(kernel, signature, constexprs=constexprs, attrs=attrs), target=target, options=options)


def portable_variants(name):
    """(splits, tile height, warps) of the portable kernel that the table uses on `name` for the official shapes."""
    targets = {"sm90": Target("sm90", 132), "gfx950": Target("gfx950", 256), "gpu": Target("gpu", 108)}
    configs = {config for b, kv in SHAPES for config in select_config(b, kv, targets[name])}
    return sorted({(c.splits > 1, c.block_n, c.num_warps) for c in configs if c.arm == "triton_fp8"})


@pytest.mark.parametrize("name, target", [("gpu", SM90), ("sm90", SM90), ("gfx950", GFX950)])
def test_portable_decode_compiles(name, target):
    for split, block_n, num_warps in portable_variants(name):
        constants = {"SPLITS": 4 if split else 1, "BLOCK_N": block_n, "stride_scale_t": None}
        compiled = compile_kernel(submission._decode, PORTABLE, constants, target, num_warps=num_warps)
        if target is SM90:
            ptx = compiled.asm["ptx"]
            assert "ld.shared.b8" not in ptx and "ld.shared.u8" not in ptx, "the tile is read bytewise"
            elements = block_n * (512 + 64)
            conversions = len(re.findall(r"cvt\.rn\.f16x2\.e4m3x2", ptx))
            assert conversions == elements // (2 * 32 * num_warps), "the tile is converted more than once"
        else:
            assert "ds_read_u8" not in compiled.asm["amdgcn"]


@pytest.mark.parametrize("target", [SM90, GFX950], ids=["sm_90", "gfx950"])
@pytest.mark.parametrize("splits", [1, 4])
def test_portable_mxfp4_decode_compiles(target, splits):
    """Q and the latent part are loaded by 16 bytes, a thread's four scales of it at once."""
    constants = {"SPLITS": splits, "BLOCK_N": 64, "stride_scale_t": 24}
    compiled = compile_kernel(submission._decode, MXFP4, constants, target, num_warps=8)
    if target is SM90:
        loads = Counter(re.findall(r"ld\.global\.(\S+)", compiled.asm["ptx"]))
        # Each of the cache's before the loop and in it.
        assert loads["v4.b32"] == 4 + 8 and loads["b16"] == 0 and loads["b8"] == 2
    else:
        asm = compiled.asm["amdgcn"]
        assert asm.count("global_load_dwordx4") == 2 + 4 and asm.count("global_load_ubyte") == 2
        assert re.search(r"\.vgpr_spill_count: +0\n", asm)


@pytest.mark.parametrize("target", [SM90, GFX950], ids=["sm_90", "gfx950"])
@pytest.mark.parametrize("splits", [2, 4, 8, 16, 32])
def test_combine_compiles(target, splits):
    types = {name: PORTABLE[name] for name in ("part_ptr", "lse_ptr", "kv_scale_ptr", "out_ptr")}
    constants = {"SPLITS": splits, "BLOCK_S": splits, "BLOCK_D": 128, "DEPENDENT": target is SM90}
    compiled = compile_kernel(submission._combine, types, constants, target, num_warps=1)
    if target is SM90:
        assert "griddepcontrol.wait" in compiled.asm["ptx"]


def hopper_variants():
    listed = [c for target, _, _, configs in TABLE if target == "sm90" for c in configs if c.arm == "hopper_fp8"]
    return sorted({(c.splits, c.one_launch) for c in listed if c.splits} | {(2, True), (16, True)})


@pytest.mark.parametrize("splits, one_launch", hopper_variants())
def test_hopper_decode_compiles_within_budget(splits, one_launch, tmp_path):
    compiled = compile_kernel(
        submission._decode_fp8_hopper, HOPPER, {"SPLITS": splits, "ONE_LAUNCH": one_launch}, SM90, GluonASTSource,
        num_warps=4,
    )  # fmt: skip
    ptx = compiled.asm["ptx"]
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([knobs.nvidia.cuobjdump.path, "-res-usage", cubin], capture_output=True, text=True).stdout
    assert "STACK:0 " in usage, f"registers spill: {usage}"
    assert 2 * (compiled.metadata.shared + 1024) <= 228 * 1024, "two programs fit an SM"
    assert "ld.shared.b8" not in ptx and "ld.shared.u8" not in ptx
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3") == 18, "QK on raw fp8, 576 dims by 32"
    assert ("atom.global.gpu.acq_rel" in ptx or "atom.acq_rel.gpu" in ptx) == one_launch
    assert ("griddepcontrol.launch_dependents" in ptx) == (splits > 1 and not one_launch)
