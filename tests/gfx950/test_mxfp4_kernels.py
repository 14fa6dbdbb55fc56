"""The mxfp4 kernels, executed instruction by instruction, against float64 over the same dequantised cache."""

import functools

import pytest
import torch

import reference
import submission
from submission import LOG2E
from tests.inputs import ragged_input, relative_error
from tests.test_compile import MXFP4

from . import TritonKernel

KERNEL_ERROR = 3e-3


@functools.cache
def portable(splits: int) -> TritonKernel:
    constexprs = {"SPLITS": splits, "BLOCK_N": 32, "SCALE_ALIGN": 8}
    names = submission._decode_mxfp4.arg_names
    types = {name: MXFP4[name] for name in names if name not in constexprs}
    aligned = [i for i, name in enumerate(names) if types.get(name, "")[:1] == "*"]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
    return TritonKernel.compile(submission._decode_mxfp4, types, constexprs, attrs, num_warps=8)


def cache_of(data):
    """The mxfp4 cache as uint8 and without a byte to spare: a read past it is out of bounds."""
    packed, scales = (x.view(torch.uint8) for x in data[1]["mxfp4"])
    rows = packed.shape[0]
    exact = torch.empty(rows * 24 - 6, dtype=torch.uint8)
    exact.as_strided((rows, 18), (24, 1)).copy_(scales[:rows, :18])
    return packed[:, 0].clone(), exact


def run_portable(data, splits: int, **options):
    """Output (total_q, 16, 512), partials merged in float64; checks that nothing is read out of bounds or unwritten."""
    q, _, _, kv_indptr, config = data
    packed, scales = cache_of(data)
    out = torch.full((q.shape[0], 16, 512), torch.nan, dtype=torch.bfloat16)
    part = torch.full((q.shape[0], splits, 16, 512), torch.nan)
    lse = torch.full((q.shape[0], splits, 16), torch.nan)
    inputs = {"q_ptr": q, "kv_ptr": packed, "scale_ptr": scales, "kv_indptr": kv_indptr}
    scalars = {
        "softmax_scale": config["sm_scale"] * LOG2E, "s_q": config["q_seq_len"], "stride_q_t": q.stride(0),
        "stride_q_h": q.stride(1), "stride_kv_t": packed.stride(0), "stride_scale_t": 24,
    }  # fmt: skip
    outputs = {"out_ptr": out, "part_ptr": part, "lse_ptr": lse}
    run = portable(splits).launch((splits, q.shape[0]), inputs | scalars | outputs, read_only=tuple(inputs), **options)
    assert not run.findings
    if splits == 1:
        return out
    weights = torch.exp2(lse.double() - torch.logsumexp(lse.double() / LOG2E, 1, keepdim=True) * LOG2E)
    return (torch.where(lse.isneginf()[..., None], 0.0, part.double()) * weights.nan_to_num()[..., None]).sum(1)


@pytest.mark.parametrize("splits", [1, 3])
def test_portable_kernel(splits):
    data = ragged_input([65, 0, 31], seed=5)
    output, expected = run_portable(data, splits), reference.oracle(data, "mxfp4")
    assert not output[1].any()
    assert relative_error(output, expected) < KERNEL_ERROR


def test_portable_kernel_sees_nan_and_keeps_it_in_its_sequence():
    data = ragged_input([40, 33])
    data[1]["mxfp4"][1].view(torch.uint8)[39, 7] = 255
    output, expected = run_portable(data, 2), reference.oracle(data, "mxfp4")
    assert output[0].isnan().all()
    assert relative_error(output[1], expected[1]) < KERNEL_ERROR
