"""The portable Triton kernels in Triton's interpreter, to be called in a process of its own.

Triton decides when it is imported whether it interprets or compiles, so one process cannot do both. `interpreter()` is
an executor whose process interprets; submit `run` or `call` to it.
"""

import concurrent.futures
import contextlib
import multiprocessing
import os
from unittest import mock

import torch
import triton
import triton.language as tl

import submission


def _repair_dot():
    """Triton's interpreter keeps bf16 as integers and multiplies them as such in `tl.dot`; this makes it use floats."""
    from triton.runtime import interpreter as triton_interpreter

    builder, bf16, fp32 = triton_interpreter.InterpreterBuilder, tl.bfloat16, tl.float32
    create_dot = builder.create_dot

    def widened(self, x):
        return self.cast_impl(x, fp32) if x.dtype.scalar == bf16 else x

    def create_dot_of_floats(self, a, b, *rest):
        return create_dot(self, widened(self, a), widened(self, b), *rest)

    builder.create_dot = create_dot_of_floats


@contextlib.contextmanager
def interpreter():
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        # Only the process that starts here is to interpret, not what other tests ask of this one.
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):
            pool.submit(_repair_dot).result()
        yield pool


def run(data, splits, block_n=64, combine=True, kv="fp8"):
    """The decode over the cache `kv` in two launches (or one), on partials and an output full of NaN.

    With `combine` False its partials and their LSE.
    """
    q, kv_data, _, kv_indptr, config = data
    cache, scale = kv_data[kv]
    kv_scale, stride_scale_t, partials = scale, None, torch.float16
    if kv == "mxfp4":
        cache, scale = cache.view(torch.uint8), scale.view(torch.uint8)
        kv_scale, stride_scale_t, partials = torch.ones(1), scale.stride(0), torch.float32
    total_q = q.shape[0]
    out = torch.full((total_q, 16, 512), float("nan"), dtype=torch.bfloat16)
    part = torch.full((total_q, splits, 16, 512), float("nan"), dtype=partials)
    lse = torch.full((total_q, splits, 16), float("nan"))
    submission._decode[(splits, total_q)](
        q, cache, scale, kv_indptr, out, part, lse, config["sm_scale"] * submission.LOG2E, config["q_seq_len"],
        q.stride(0), q.stride(1), cache.stride(0), SPLITS=splits, BLOCK_N=block_n, stride_scale_t=stride_scale_t,
    )  # fmt: skip
    if not combine:
        return part, lse
    if splits > 1:
        submission._launch_combine(part, lse, kv_scale, out, dependent=False)
    return out


@triton.jit
def _values(packed_ptr, scale_ptr, value_ptr, N: tl.constexpr):
    rows = tl.arange(0, N)[:, None]
    packed = tl.load(packed_ptr + rows * 16 + tl.arange(0, 16)[None, :])
    tl.store(value_ptr + rows * 32 + tl.arange(0, 32)[None, :], submission._mxfp4(packed, tl.load(scale_ptr + rows)))


def decode_mxfp4(packed, scales):
    """`_mxfp4` of packed uint8 (n, 16) and scale codes (n, 1): bf16 (n, 32)."""
    n = packed.shape[0]
    values = torch.empty(n, 32, dtype=torch.bfloat16)
    _values[(1,)](packed, scales, values, n)
    return values


def run_far(data, splits, stride):
    """`run` with the cache's rows `stride` bytes apart: untouched pages in between take no memory."""
    q, kv_data, qo_indptr, kv_indptr, config = data
    kv, kv_scale = kv_data["fp8"]
    total_kv = kv.shape[0]
    far = torch.empty(total_kv * stride, dtype=torch.uint8).as_strided((total_kv, 1, 576), (stride, 576, 1))
    far.copy_(kv.view(torch.uint8))
    return run((q, {"fp8": (far.view(kv.dtype), kv_scale)}, qo_indptr, kv_indptr, config), splits)


def combine(part, lse, kv_scale):
    """bf16 (total_q, 16, 512) from partials."""
    import submission

    out = torch.full((part.shape[0], 16, 512), float("nan"), dtype=torch.bfloat16)
    submission._launch_combine(part, lse, kv_scale, out, dependent=False)
    return out


def call(data, backend):
    """`custom_kernel` with an arm forced, and what it says it ran."""
    with mock.patch.dict(os.environ, MLA_BACKEND=backend):
        return submission.custom_kernel(data).clone(), submission.last_run()
