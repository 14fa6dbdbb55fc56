"""A grouped split-K decode in the manner of SGLang's and vLLM's Triton backends, a peer of `bench.peers`."""

import torch
import triton
import triton.language as tl

from task import NUM_HEADS, V_HEAD_DIM

LOG2E = 1.4426950408889634
BLOCK_N = 32


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
            SPLITS=self._splits, BLOCK_N=BLOCK_N, DOT_TYPE=self.dot_type, num_warps=4, num_stages=2,
        )  # fmt: skip
        _grouped_merge[(q.shape[0], NUM_HEADS)](
            self._part, self._lse, self._kv_scale, self._out, SPLITS=self._splits, num_warps=4
        )
        return self._out
