"""A plain Triton fp8 MLA decode, to exercise the emulator with compiled code that keeps Q, K, P and V in fp8."""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .machine import Run
from .triton_kernel import TritonKernel

HEADS, QK_DIM, V_DIM = 16, 576, 512
LOG2_E = 1.4426950408889634
P_SCALE = 256.0  # P lies in [0, 1]; scaled up it uses more of fp8's normal range


@triton.jit
def split_decode(q_ptr, kv_ptr, partial_ptr, lse_ptr, kv_scale, score_scale, s_kv, split_len,
                 BLOCK_N: tl.constexpr, P_SCALE: tl.constexpr):  # fmt: skip
    """Grid (b, splits). q [b, 16, 576] fp8, kv [b, s_kv, 576] fp8 -> partial [b, splits, 16, 512], lse (base 2)."""
    batch, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    offs_h, offs_nope, offs_rope = tl.arange(0, 16), tl.arange(0, 512), tl.arange(0, 64)
    q_row = q_ptr + batch * 16 * 576 + offs_h[:, None] * 576
    q_nope = tl.load(q_row + offs_nope[None, :])
    q_rope = tl.load(q_row + 512 + offs_rope[None, :])
    running_max = tl.full([16], float("-inf"), tl.float32)
    running_sum = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, 512], tl.float32)
    first = split * split_len
    last = tl.minimum(first + split_len, s_kv)
    for start in range(first, last, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < last
        kv_row = kv_ptr + batch * s_kv * 576 + offs_n[:, None] * 576
        k_nope = tl.load(kv_row + offs_nope[None, :], mask=mask_n[:, None], other=0.0)
        k_rope = tl.load(kv_row + 512 + offs_rope[None, :], mask=mask_n[:, None], other=0.0)
        scores = tl.dot(q_rope, k_rope.T, tl.dot(q_nope, k_nope.T)) * score_scale
        scores = tl.where(mask_n[None, :], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        rescale = tl.exp2(running_max - new_max)
        p = tl.exp2(scores - new_max[:, None])
        running_sum = running_sum * rescale + tl.sum(p, axis=1)
        acc = tl.dot((p * P_SCALE).to(tl.float8e4nv), k_nope, acc * rescale[:, None])
        running_max = new_max
    row = (batch * num_splits + split) * 16 + offs_h
    out = acc * (kv_scale / P_SCALE / running_sum[:, None])
    tl.store(partial_ptr + row[:, None] * 512 + offs_nope[None, :], out)
    tl.store(lse_ptr + row, running_max + tl.log2(running_sum))


SIGNATURE = {"q_ptr": "*fp8e4nv", "kv_ptr": "*fp8e4nv", "partial_ptr": "*fp32", "lse_ptr": "*fp32"} | {
    "kv_scale": "fp32",
    "score_scale": "fp32",
    "s_kv": "i32",
    "split_len": "i32",
}


@functools.cache
def compiled() -> TritonKernel:
    # 32-bit offsets turn the loads into buffer_load, as in the submission.
    attrs = {(n,): [["tt.divisibility", 16], ["tt.pointer_range", 32]] for n in range(4)}
    constexprs = {"BLOCK_N": 64, "P_SCALE": P_SCALE}
    return TritonKernel.compile(split_decode, SIGNATURE, constexprs, attrs, num_warps=4, num_stages=2, waves_per_eu=2)


@dataclass
class Decode:
    """Combined output [b, 16, 512], natural-log LSE [b, 16], and their float64 references."""

    output: torch.Tensor
    lse: torch.Tensor
    expected: torch.Tensor
    expected_lse: torch.Tensor
    run: Run

    @property
    def error(self) -> float:
        return float((self.output - self.expected).norm() / self.expected.norm())

    @property
    def lse_error(self) -> float:
        return float((self.lse - self.expected_lse).abs().max())


def decode(batch: int, s_kv: int, splits: int, **options) -> Decode:
    """Runs split_decode on random data and merges the splits in float64."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, HEADS, QK_DIM, generator=generator).to(torch.float8_e4m3fn)
    kv = torch.randn(batch, s_kv, QK_DIM, generator=generator).to(torch.float8_e4m3fn)
    kv_scale, sm_scale = 0.5, QK_DIM**-0.5
    partial = torch.full((batch, splits, HEADS, V_DIM), torch.nan)
    lse = torch.full((batch, splits, HEADS), torch.nan)
    arguments = {"q_ptr": q, "kv_ptr": kv, "partial_ptr": partial, "lse_ptr": lse, "kv_scale": kv_scale}
    arguments |= {"score_scale": sm_scale * kv_scale * LOG2_E, "s_kv": s_kv, "split_len": -(-s_kv // splits)}
    run = compiled().launch((batch, splits), arguments, read_only=("q_ptr", "kv_ptr"), **options)
    natural = lse.double() / LOG2_E
    total = torch.logsumexp(natural, dim=1)
    output = (partial.double() * (natural - total[:, None]).exp()[..., None]).sum(dim=1)
    keys = kv.double() * kv_scale
    scores = q.double() @ keys.transpose(1, 2) * sm_scale
    expected = torch.softmax(scores, dim=2) @ keys[:, :, :V_DIM]
    return Decode(output, total, expected, torch.logsumexp(scores, dim=2), run)
