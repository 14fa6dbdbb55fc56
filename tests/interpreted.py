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


@contextlib.contextmanager
def interpreter():
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
            pool.submit(int).result()  # starts the process while the environment holds
            yield pool


def run(data, splits, block_n=64):
    """The fp8 decode in two launches (or one), on partials and an output full of NaN."""
    import submission

    q, kv_data, _, kv_indptr, config = data
    kv, kv_scale = kv_data["fp8"]
    total_q = q.shape[0]
    out = torch.full((total_q, 16, 512), float("nan"), dtype=torch.bfloat16)
    part = torch.full((total_q, splits, 16, 512), float("nan"), dtype=torch.float16)
    lse = torch.full((total_q, splits, 16), float("nan"))
    submission._decode_fp8[(splits, total_q)](
        q, kv, kv_scale, kv_indptr, out, part, lse, config["sm_scale"] * submission.LOG2E, config["q_seq_len"],
        q.stride(0), q.stride(1), kv.stride(0), SPLITS=splits, BLOCK_N=block_n,
    )  # fmt: skip
    if splits > 1:
        submission._launch_combine(part, lse, kv_scale, out, dependent=False)
    return out


def call(data, backend):
    """`custom_kernel` with an arm forced, and what it says it ran."""
    import submission

    with mock.patch.dict(os.environ, MLA_BACKEND=backend):
        return submission.custom_kernel(data).clone(), submission.last_run()
