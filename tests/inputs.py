"""Inputs that `reference.generate_input` does not draw: sequences of different lengths, larger queries."""

import torch

import reference
from task import NUM_HEADS, QK_HEAD_DIM


def ragged_input(lengths, s_q=1, seed=0, q_factor=1.0, kv_seq_len=None, device="cpu"):
    """A case with `lengths[b]` cached tokens in sequence b; q is standard normal times `q_factor`."""
    generator = torch.Generator(device=device).manual_seed(seed)
    b, total_kv = len(lengths), sum(lengths)
    q = torch.randn(b * s_q, NUM_HEADS, QK_HEAD_DIM, generator=generator, device=device) * q_factor
    kv = torch.randn(total_kv, 1, QK_HEAD_DIM, generator=generator, device=device).bfloat16()
    if total_kv:
        fp8, mxfp4 = reference.quantize_fp8(kv), reference.quantize_mxfp4(kv)
    else:
        fp8 = kv.to(torch.float8_e4m3fn), torch.ones(1, device=device)
        mxfp4 = (
            torch.empty(0, 1, QK_HEAD_DIM // 2, dtype=torch.uint8, device=device),
            torch.empty(0, 24, dtype=torch.uint8, device=device),
        )
    config = reference.case_config(b, s_q, max(lengths) if kv_seq_len is None else kv_seq_len)
    kv_indptr = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32).to(device)
    qo_indptr = torch.arange(b + 1, dtype=torch.int32, device=device) * s_q
    return q.bfloat16(), {"bf16": kv, "fp8": fp8, "mxfp4": mxfp4}, qo_indptr, kv_indptr, config
