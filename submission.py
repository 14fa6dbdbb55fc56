#!POPCORN leaderboard amd-mixed-mla
#!POPCORN gpu MI355X

"""Exact MLA decode attention for one set of 16 query heads over a shared KV cache.

For each query row t of sequence b, with K = all 576 dims of the cached rows and V = their first 512 dims:

    out[t, h] = softmax(q[t, h] . K^T * sm_scale) V        over every token of sequence b

Algorithm: split-K flash decoding. A sequence's cache is cut into tiles of BLOCK_N tokens and its tiles are dealt to
`splits` programs; each program reads its tiles once for all 16 heads, keeps a running maximum m, sum l and output
accumulator, and leaves a normalised partial output with its log2-sum-exp. The combine weighs the partials.

Launches per call: one when a sequence is not split (or when the last program to arrive combines), two otherwise.

Dispatch: `custom_kernel` looks its arguments' shapes up in `_PLANS`. The first call of a shape checks the arguments,
runs the candidates of `select_config` on them, drops each that is not right there and then, and keeps the fastest.
Scratch and output are allocated once per shape; the returned tensor is valid until the next call of that shape.

Environment: MLA_BACKEND=<arm> forces an arm; MLA_TUNE=0 takes the first arm that proves right, untimed; MLA_VERBOSE=1
prints each arm's error and time; MLA_TUNE_SECONDS=<s> limits a first call (20), after which untried arms stay out.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:
    gluon = None

H_Q = 16  # query heads
D_V = 512  # value dims: the latent part of a cache row
D_ROPE = 64
D_QK = D_V + D_ROPE
LOG2E = 1.4426950408889634
CACHE_NAMES = ("bf16", "fp8", "mxfp4")


def _jit(fn):
    """`triton.jit` where Triton is installed; elsewhere the kernels stay plain, uncalled functions."""
    return fn if triton is None else triton.jit(fn)


def _gluon_jit(fn):
    """`gluon.jit`, likewise."""
    return fn if gluon is None else gluon.jit(fn)


# ---- device helpers ----


@_jit
def _tile_range(kv_indptr, t, s_q, split, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of the cache that query row `t` sees and the tiles [first, last) of BLOCK_N rows that `split` takes.

    Queries are bottom-right causal: query i of s_q sees all but the last s_q - 1 - i tokens of its sequence.
    """
    b = t // s_q
    kv_start = tl.load(kv_indptr + b)
    kv_end = tl.load(kv_indptr + b + 1) - (s_q - 1 - t % s_q)
    n_tiles = tl.cdiv(tl.maximum(kv_end - kv_start, 0), BLOCK_N)
    return kv_start, kv_end, n_tiles * split // SPLITS, n_tiles * (split + 1) // SPLITS


@_jit
def _power_of_two_scale(amax):
    """(2^k, 2^-k) that bring a float32 `amax` to [128, 256); 0 and denormals count as 2^-97."""
    exponent = tl.maximum(amax.to(tl.int32, bitcast=True) >> 23, 30)
    up = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    return up, down


# ---- kernels ----


@_jit
def _load_tile(kv_ptrs, n, first_row, kv_end, stride_kv_t, BLOCK_N: tl.constexpr):
    """Tile `n` of a sequence; rows at or past `kv_end` read as zeros, whatever lies there."""
    rows = first_row + n * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.load(kv_ptrs + rows.to(tl.int64)[:, None] * stride_kv_t, mask=(rows < kv_end)[:, None], other=0.0)


@_jit
def _decode_fp8(
    q_ptr,  # bf16 [total_q, 16, 576]
    kv_ptr,  # fp8 e4m3 [total_kv, 576]
    kv_scale_ptr,  # fp32 [1]
    kv_indptr,  # int32 [b + 1]
    out_ptr,  # bf16 [total_q, 16, 512]
    part_ptr,  # fp16 [total_q, SPLITS, 16, 512], normalised, in units of the cache's scale
    lse_ptr,  # fp32 [total_q, SPLITS, 16], log2; -inf for an empty split
    softmax_scale,  # sm_scale * log2(e)
    s_q,
    stride_q_t,
    stride_q_h,
    stride_kv_t,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (SPLITS, total_q). With SPLITS == 1 writes `out_ptr`, else one partial per split."""
    H: tl.constexpr = 16
    D: tl.constexpr = 512
    R: tl.constexpr = 64
    split = tl.program_id(0)
    t = tl.program_id(1)
    offs_h = tl.arange(0, H)
    offs_d = tl.arange(0, D)
    offs_r = tl.arange(0, R)
    # Q before KV: it would queue behind the tiles.
    q_base = q_ptr + t.to(tl.int64) * stride_q_t + offs_h[:, None] * stride_q_h
    qn = tl.load(q_base + offs_d[None, :]).to(tl.float32)  # [16, 512]
    qr = tl.load(q_base + D + offs_r[None, :]).to(tl.float32)  # [16, 64]
    kv_scale = tl.load(kv_scale_ptr)
    kv_start, kv_end, first, last = _tile_range(kv_indptr, t, s_q, split, SPLITS, BLOCK_N)
    # A power-of-two scale per head makes Q fit fp16 exactly, as every e4m3 value does.
    up, down = _power_of_two_scale(tl.maximum(tl.max(tl.abs(qn), 1), tl.max(tl.abs(qr), 1)))
    qn = (qn * up[:, None]).to(tl.float16)
    qr = (qr * up[:, None]).to(tl.float16)
    logit_scale = down * (kv_scale * softmax_scale)

    m = tl.full([H], float("-inf"), tl.float32)
    norm = tl.zeros([H], tl.float32)
    acc = tl.zeros([H, D], tl.float32)
    kn_ptrs = kv_ptr + offs_d[None, :]
    kr_ptrs = kv_ptr + D + offs_r[None, :]
    kn_next = _load_tile(kn_ptrs, first, kv_start, kv_end, stride_kv_t, BLOCK_N)
    kr_next = _load_tile(kr_ptrs, first, kv_start, kv_end, stride_kv_t, BLOCK_N)
    for n in range(first, last):
        # One conversion serves K and V; the next tile is on its way in registers meanwhile.
        kn = kn_next.to(tl.float16)
        kr = kr_next.to(tl.float16)
        kn_next = _load_tile(kn_ptrs, n + 1, kv_start, kv_end, stride_kv_t, BLOCK_N)
        kr_next = _load_tile(kr_ptrs, n + 1, kv_start, kv_end, stride_kv_t, BLOCK_N)
        x = tl.dot(qr, tl.trans(kr), tl.dot(qn, tl.trans(kn))) * logit_scale[:, None]
        mask_n = kv_start + n * BLOCK_N + tl.arange(0, BLOCK_N) < kv_end
        x = tl.where(mask_n[None, :], x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        rescale = tl.exp2(m - m_new)
        p = tl.exp2(x - m_new[:, None])
        norm = norm * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.float16), kn, acc * rescale[:, None])
        m = m_new

    o = acc / tl.where(first < last, norm, 1.0)[:, None]
    offs_o = offs_h[:, None] * D + offs_d[None, :]
    if SPLITS == 1:
        tl.store(out_ptr + t.to(tl.int64) * (H * D) + offs_o, (o * kv_scale).to(tl.bfloat16))
    else:
        row = t.to(tl.int64) * SPLITS + split
        tl.store(part_ptr + row * (H * D) + offs_o, o.to(tl.float16))
        tl.store(lse_ptr + row * H + offs_h, m + tl.log2(norm))


@_jit
def _combine(
    part_ptr,  # fp16 [total_q, SPLITS, 16, 512]
    lse_ptr,  # fp32 [total_q, SPLITS, 16]
    kv_scale_ptr,  # fp32 [1]
    out_ptr,  # bf16 [total_q, 16, 512]
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,  # SPLITS rounded up to a power of two
    BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,  # launched while the partials are still being written (CUDA only)
):
    """Grid (512 / BLOCK_D, 16, total_q): weighs the partials of one head by 2^lse; no token at all gives zeros."""
    H: tl.constexpr = 16
    D: tl.constexpr = 512
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    h = tl.program_id(1)
    t = tl.program_id(2).to(tl.int64)
    offs_s = tl.arange(0, BLOCK_S)
    row = (t * SPLITS + offs_s) * H + h
    kv_scale = tl.load(kv_scale_ptr)
    if DEPENDENT:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    mask_s = offs_s < SPLITS
    lse = tl.load(lse_ptr + row, mask=mask_s, other=float("-inf"))
    part = tl.load(part_ptr + row[:, None] * D + offs_d[None, :], mask=mask_s[:, None], other=0.0)
    # An empty split's partial may be anything, and a weight of zero would not silence a NaN in it.
    empty = lse == float("-inf")
    part = tl.where(empty[:, None], 0.0, part.to(tl.float32))
    w = tl.where(empty, 0.0, tl.exp2(lse - tl.max(lse, 0)))
    total = tl.sum(w, 0)
    o = tl.sum(part * w[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + (t * H + h) * D + offs_d, (o * kv_scale).to(tl.bfloat16))


# ---- Gluon: one launch ----


@_gluon_jit
def _arrive_last(ticket_ptr, SPLITS: gl.constexpr):
    """Whether this program is the last of its query row's SPLITS to arrive; leaves the ticket at zero when it is.

    The barrier puts every thread's partial before the one thread that takes the ticket; release makes them visible to
    the device with it, acquire keeps the last program's reads behind it. Nobody waits, so no residency is needed, and
    the ticket is back at zero for the next launch or graph replay.
    """
    gl.thread_barrier()
    last = gl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        gl.store(ticket_ptr, 0)
    return last


@_gluon_jit
def _merge_partials(
    part_ptr,  # fp16 [SPLITS, 16, 512] of one query row
    lse_ptr,  # fp32 [SPLITS, 16]
    out_ptr,  # bf16 [16, 512]
    kv_scale,
    SPLITS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """`_combine` for one query row by one program, in the order of the splits: the order of arrival has no say."""
    offs_h = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
    offs = offs_h[:, None] * 512 + gl.arange(0, 512, gl.SliceLayout(0, LAYOUT))[None, :]
    m = gl.full([16], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    norm = gl.zeros([16], gl.float32, gl.SliceLayout(1, LAYOUT))
    acc = gl.zeros([16, 512], gl.float32, LAYOUT)
    for s in gl.static_range(SPLITS):
        lse = gl.load(lse_ptr + s * 16 + offs_h, cache_modifier=".cg")
        part = gl.load(part_ptr + s * 8192 + offs, cache_modifier=".cg").to(gl.float32)
        # An empty split's partial may be anything, and a weight of zero would not silence a NaN in it.
        empty = lse == float("-inf")
        m_new = gl.maximum(m, lse)
        w = gl.where(empty, 0.0, gl.exp2(lse - m_new))
        rescale = gl.where(norm == 0.0, 0.0, gl.exp2(m - m_new))
        norm = norm * rescale + w
        acc = acc * rescale[:, None] + gl.where(empty[:, None], 0.0, part) * w[:, None]
        m = m_new
    o = acc * (kv_scale / gl.where(norm == 0.0, 1.0, norm))[:, None]
    gl.store(out_ptr + offs, o.to(gl.bfloat16))


# ---- Gluon: Hopper ----


@_gluon_jit
def _hopper_issue(kn_desc, kr_desc, kn_smem, kr_smem, bars, slot, row, pred):
    """TMA of the 64 raw rows at `row`, 576 bytes each, into ring slot `slot`."""
    bar = bars.index(slot)
    mbarrier.expect(bar, 64 * 576, pred=pred)
    tma.async_copy_global_to_shared(kn_desc, [row, 0], bar, kn_smem.index(slot), pred=pred)
    tma.async_copy_global_to_shared(kr_desc, [row, 512], bar, kr_smem.index(slot), pred=pred)


@_gluon_jit
def _exp2(x):
    """2^x by the special function unit, denormal results flushed to zero."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@_gluon_jit
def _hi_lo(x, up):
    """x * up as the sum of two e4m3 numbers, exact for bf16 x down to about 2^-20 of the scaled maximum.

    hi is x * up rounded to 4 significant bits on its float32 pattern: converting a fresh e4m3 pair back to fp16 is
    miscompiled by ptxas, so lo is not taken from the converted hi.
    """
    x = x.to(gl.float32) * up
    hi = ((x.to(gl.int32, bitcast=True) + 0x80000) & -0x100000).to(gl.float32, bitcast=True)
    return hi.to(gl.float8e4nv), (x - hi).to(gl.float8e4nv)


@_gluon_jit
def _hopper_pv(acc_even, acc_odd, p_smem, v_smem, V_LAYOUT: gl.constexpr):
    """O^T += V^T P^T for 128 dims: V^T from registers, P^T from shared memory.

    v_smem views two neighbouring dims as one int16, so a transposing ldmatrix fetches V^T; one byte permute and two
    conversions split a register of two tokens into the even and the odd dim.
    """
    even, odd = gl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $2, 0, 0x3120; mov.b32 {l, h}, t;"
        " cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
        "=r,=r,r", [v_smem.permute((1, 0)).load(V_LAYOUT)], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip
    acc_even = warpgroup_mma(even, p_smem, acc_even, is_async=True)
    acc_odd = warpgroup_mma(odd, p_smem, acc_odd, is_async=True)
    return acc_even, acc_odd


@_gluon_jit
def _hopper_clear_tail(kn_tile, valid):
    """Zeroes rows [valid, 64) of a tile: they may hold NaN, which a weight of zero does not silence."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    words = kn_tile._reinterpret(gl.int32, [64, 128], gl.NVMMASharedLayout(128, 32, 2))
    keep = (gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)) < valid)[:, None]
    for c in gl.static_range(4):
        chunk = words.slice(c * 32, 32, 1)
        rows = chunk.load(LAYOUT)
        chunk.store(gl.where(keep, rows, gl.zeros_like(rows)))


@_gluon_jit
def _hopper_store(ptr, acc_even, acc_odd, factor, CHUNK: gl.constexpr, LAYOUT: gl.constexpr):
    """Dims [128 * CHUNK, +128) of O^T * factor to `ptr` [16, 512] fp16 or bf16, even and odd dims as one word."""
    word = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None] + CHUNK * 64
    head = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    if ptr.dtype.element_ty == gl.float16:
        CVT: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    else:
        CVT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    packed = gl.inline_asm_elementwise(
        CVT, "=r,r,r", [acc_even * factor, acc_odd * factor], dtype=gl.int32, is_pure=True, pack=1
    )
    gl.store(ptr.to(gl.pointer_type(gl.int32)) + head * 256 + word, packed)


@_gluon_jit
def _decode_fp8_hopper(
    q_ptr,  # bf16 [total_q, 16, 576]
    kn_desc,  # TMA descriptor of the fp8 cache [total_kv, 576], box [64, 512]
    kr_desc,  # the same cache, box [64, 64]
    kv_scale_ptr,  # fp32 [1]
    kv_indptr,  # int32 [b + 1]
    out_ptr,  # bf16 [total_q, 16, 512]
    part_ptr,  # fp16 [total_q, SPLITS, 16, 512]
    lse_ptr,  # fp32 [total_q, SPLITS, 16]
    ticket_ptr,  # int32 [total_q], zero between launches
    softmax_scale,
    s_q,
    stride_q_t,
    stride_q_h,
    n_chunks,  # 4, passed so that the loops over Q's chunks stay rolled: less cold code
    SPLITS: gl.constexpr,
    ONE_LAUNCH: gl.constexpr,
):
    """Grid (total_q, SPLITS), 4 warps, tiles of 64 tokens in a two-slot TMA ring of raw fp8 rows, 110 KB.

    S^T = K Q^T on the fp8 tensor cores straight from the ring, Q as hi + lo; softmax over tokens in registers with one
    exchange of maxima through shared memory; O^T += V^T P^T in fp16 with V converted once, from the same tile.
    """
    STAGES: gl.constexpr = 2
    BLOCK_N: gl.constexpr = 64
    K_SMEM: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    V_SMEM: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    R_SMEM: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 32])  # [64 tokens, 16 hi + 16 lo]
    X_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 32])  # [64 tokens, 16 heads]
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])  # [64 dim pairs, 16 heads]
    V_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    t = gl.program_id(0)
    split = gl.program_id(1)

    # Q before KV: it would queue behind the tiles.
    QN_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    QR_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    qn_raw = gl.allocate_shared_memory(gl.bfloat16, [4, 16, 128], PLAIN)
    qr_raw = gl.allocate_shared_memory(gl.bfloat16, [16, 64], PLAIN)
    q_row = q_ptr + t.to(gl.int64) * stride_q_t
    h_n = gl.arange(0, 16, gl.SliceLayout(1, QN_COPY))[:, None]
    h_r = gl.arange(0, 16, gl.SliceLayout(1, QR_COPY))[:, None]
    qn_ptrs = q_row + h_n * stride_q_h + gl.arange(0, 128, gl.SliceLayout(0, QN_COPY))[None, :]
    for c in gl.static_range(4):
        async_copy.async_copy_global_to_shared(qn_raw.index(c), qn_ptrs + c * 128)
    qr_ptrs = q_row + 512 + h_r * stride_q_h + gl.arange(0, 64, gl.SliceLayout(0, QR_COPY))[None, :]
    async_copy.async_copy_global_to_shared(qr_raw, qr_ptrs)
    async_copy.commit_group()

    kn_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, 512], K_SMEM)
    kr_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, 64], R_SMEM)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    b = t // s_q
    kv_scale = gl.load(kv_scale_ptr)
    kv_start = gl.load(kv_indptr + b)
    kv_end = gl.load(kv_indptr + b + 1) - (s_q - 1 - t % s_q)  # bottom-right causal
    n_tiles = gl.cdiv(gl.maximum(kv_end - kv_start, 0), BLOCK_N)
    # Tiles are dealt in turn, so that a sequence's splits read neighbouring memory at about the same time.
    STEP: gl.constexpr = SPLITS * BLOCK_N
    n = (n_tiles - split + SPLITS - 1) // SPLITS
    row = kv_start + split * BLOCK_N
    for i in gl.static_range(STAGES):
        _hopper_issue(kn_desc, kr_desc, kn_smem, kr_smem, bars, i, row + i * STEP, i < n)

    # Q as hi + lo e4m3 under a power-of-two scale per head: rows 0-15 of the B operand are hi, 16-31 lo.
    QN_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    QR_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    qn_chunks = gl.allocate_shared_memory(gl.float8e4nv, [4, 32, 128], K_SMEM)
    qr_smem = gl.allocate_shared_memory(gl.float8e4nv, [32, 64], R_SMEM)
    async_copy.wait_group(0)
    gl.thread_barrier()
    qr = qr_raw.load(QR_LAYOUT)
    amax = gl.zeros([16, 128], gl.float32, QN_LAYOUT)
    for c in range(n_chunks):
        amax = gl.maximum(amax, gl.abs(qn_raw.index(c).load(QN_LAYOUT).to(gl.float32)))
    amax_r = gl.convert_layout(gl.max(gl.abs(qr.to(gl.float32)), 1), gl.SliceLayout(1, QN_LAYOUT))
    amax_h = gl.maximum(gl.max(amax, 1), amax_r)
    exponent = gl.maximum(amax_h.to(gl.int32, bitcast=True) >> 23, 30)
    up = ((261 - exponent) << 23).to(gl.float32, bitcast=True)
    down = ((exponent - 7) << 23).to(gl.float32, bitcast=True)
    for c in range(n_chunks):
        hi, lo = _hi_lo(qn_raw.index(c).load(QN_LAYOUT), up[:, None])
        qn_chunks.index(c).store(gl.join(hi, lo).permute((2, 0, 1)).reshape([32, 128]))
    hi, lo = _hi_lo(qr, gl.convert_layout(up, gl.SliceLayout(1, QR_LAYOUT))[:, None])
    qr_smem.store(gl.join(hi, lo).permute((2, 0, 1)).reshape([32, 64]))
    fence_async_shared()
    qn_smem = qn_chunks._reinterpret(gl.float8e4nv, [32, 512], K_SMEM)
    logit_scale = gl.convert_layout(down, gl.SliceLayout(0, X_LAYOUT)) * (kv_scale * softmax_scale)

    # The four warps' maxima meet in max_smem; MAX_LAYOUT hands each thread all four for its own heads.
    MAX_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [1, 0], [2, 0]], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, 16]
    )
    max_smem = gl.allocate_shared_memory(gl.float32, [4, 16], PLAIN)
    p_smem = gl.allocate_shared_memory(gl.float16, [BLOCK_N, 16], gl.NVMMASharedLayout(32, 16, 2))
    m = gl.full([16], float("-inf"), gl.float32, gl.SliceLayout(0, X_LAYOUT))
    norm = gl.zeros([BLOCK_N, 16], gl.float32, X_LAYOUT)
    e0 = gl.zeros([64, 16], gl.float32, O_LAYOUT)
    o0 = gl.zeros([64, 16], gl.float32, O_LAYOUT)
    e1 = gl.zeros([64, 16], gl.float32, O_LAYOUT)
    o1 = gl.zeros([64, 16], gl.float32, O_LAYOUT)
    e2 = gl.zeros([64, 16], gl.float32, O_LAYOUT)
    o2 = gl.zeros([64, 16], gl.float32, O_LAYOUT)
    e3 = gl.zeros([64, 16], gl.float32, O_LAYOUT)
    o3 = gl.zeros([64, 16], gl.float32, O_LAYOUT)
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, X_LAYOUT))
    slot = 0
    phase = 0
    for i in range(n):
        mbarrier.wait(bars.index(slot), phase)
        # fp8 sums are promoted to fp32 every 256 dims; never promoting doubles the error for large q.
        s = gl.zeros([BLOCK_N, 32], gl.float32, S_LAYOUT)
        s = warpgroup_mma(kn_smem.index(slot), qn_smem.permute((1, 0)), s, use_acc=False, is_async=True,
                          max_num_imprecise_acc=256)  # fmt: skip
        s = warpgroup_mma(kr_smem.index(slot), qr_smem.permute((1, 0)), s, is_async=True, max_num_imprecise_acc=64)
        s = warpgroup_mma_wait(0, deps=[s])
        s_hi, s_lo = gl.split(s.reshape([BLOCK_N, 2, 16]).permute((0, 2, 1)))
        x = gl.convert_layout(s_hi + s_lo, X_LAYOUT) * logit_scale[None, :]
        v_smem = kn_smem.index(slot)._reinterpret(gl.int16, [BLOCK_N, 256], V_SMEM)
        valid = kv_end - row - i * STEP
        if valid < BLOCK_N:
            _hopper_clear_tail(kn_smem.index(slot), valid)
        x = gl.where((offs_n < valid)[:, None], x, float("-inf"))
        max_smem.store(gl.max(x.reshape([4, 16, 16]), 1))
        m_tile = gl.max(max_smem.load(MAX_LAYOUT), 0)
        m_new = gl.maximum(m, gl.convert_layout(m_tile, gl.SliceLayout(0, X_LAYOUT), assert_trivial=True))
        rescale = _exp2(m - m_new)
        p = _exp2(x - m_new[None, :])
        p_smem.store(p.to(gl.float16))
        norm = norm * rescale[None, :] + p
        m = m_new
        r = gl.convert_layout(rescale, gl.SliceLayout(0, O_LAYOUT), assert_trivial=True)[None, :]
        fence_async_shared()
        e0, o0 = _hopper_pv(e0 * r, o0 * r, p_smem, v_smem.slice(0, 64, 1), V_LAYOUT)
        e1, o1 = _hopper_pv(e1 * r, o1 * r, p_smem, v_smem.slice(64, 64, 1), V_LAYOUT)
        e2, o2 = _hopper_pv(e2 * r, o2 * r, p_smem, v_smem.slice(128, 64, 1), V_LAYOUT)
        e3, o3 = _hopper_pv(e3 * r, o3 * r, p_smem, v_smem.slice(192, 64, 1), V_LAYOUT)
        e0, o0, e1, o1, e2, o2, e3, o3 = warpgroup_mma_wait(0, deps=[e0, o0, e1, o1, e2, o2, e3, o3])
        _hopper_issue(kn_desc, kr_desc, kn_smem, kr_smem, bars, slot, row + (i + STAGES) * STEP, i + STAGES < n)
        slot ^= 1
        phase ^= slot ^ 1

    total = gl.sum(norm, 0)
    inverse = 1.0 / gl.where(n > 0, total, 1.0)
    factor = gl.convert_layout(inverse, gl.SliceLayout(0, O_LAYOUT))[None, :]
    if SPLITS == 1:
        dst = out_ptr + t.to(gl.int64) * 8192
        factor = factor * kv_scale
    else:
        part_row = t.to(gl.int64) * SPLITS + split
        dst = part_ptr + part_row * 8192
        if not ONE_LAUNCH:
            # Lets the combine, launched dependent, start its prologue now; it still waits for this grid's end.
            gl.inline_asm_elementwise(
                "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
            )
        gl.store(lse_ptr + part_row * 16 + gl.arange(0, 16, gl.SliceLayout(0, X_LAYOUT)), m + gl.log2(total))
    _hopper_store(dst, e0, o0, factor, 0, O_LAYOUT)
    _hopper_store(dst, e1, o1, factor, 1, O_LAYOUT)
    _hopper_store(dst, e2, o2, factor, 2, O_LAYOUT)
    _hopper_store(dst, e3, o3, factor, 3, O_LAYOUT)
    if ONE_LAUNCH:
        if _arrive_last(ticket_ptr + t, SPLITS):
            row_parts = t.to(gl.int64) * SPLITS
            MERGE_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
            _merge_partials(part_ptr + row_parts * 8192, lse_ptr + row_parts * 16, out_ptr + t.to(gl.int64) * 8192,
                            kv_scale, SPLITS, MERGE_LAYOUT)  # fmt: skip


# ---- tuning table ----


@dataclass(frozen=True)
class Target:
    """What the tuning table is keyed by: `name` is "cpu", "sm90", "gfx950" or "gpu"; `num_cu` its SMs or CUs."""

    name: str
    num_cu: int = 0


@dataclass(frozen=True)
class Config:
    """One way to run one shape. `splits == 0` asks `choose_splits`; fields an arm does not use are ignored by it."""

    arm: str
    splits: int = 0
    block_n: int = 64
    num_warps: int = 8
    programs_per_cu: int = 1
    one_launch: bool = False


@dataclass(frozen=True)
class Row:
    """Configurations, best first, for a target and, unless None, one batch size and one KV length."""

    target: str
    batch_size: int | None
    kv_seq_len: int | None
    configs: tuple[Config, ...]


_TORCH = (Config("torch_bmm", splits=1), Config("torch_chunked", splits=1))
_GPU = (Config("triton_fp8"), *_TORCH)


def _hopper(batch_size: int | None, kv_seq_len: int | None, splits: int) -> Row:
    return Row("sm90", batch_size, kv_seq_len, (Config("hopper_fp8", splits=splits, programs_per_cu=2), *_GPU))


# The first row that matches counts. sm90 splits are the fastest of docs/data/sweep_h200.json; the time beside each is
# the median there, H200, cold cache, beside the reader kernel's over the same bytes.
TABLE: tuple[Row, ...] = (
    Row("cpu", None, None, _TORCH[1:]),
    _hopper(4, 1024, 16),  # 10.0 us, reader 5.1
    _hopper(4, 8192, 32),  # 15.8 us, reader 10.3
    _hopper(32, 1024, 4),  # 15.9 us, reader 10.2
    _hopper(32, 8192, 8),  # 54.0 us, reader 45.6
    _hopper(64, 1024, 2),  # 22.5 us, reader 16.2
    _hopper(64, 8192, 4),  # 89.1 us, reader 78.6
    _hopper(256, 1024, 1),  # 52.3 us, reader 46.0
    _hopper(256, 8192, 1),  # 291.7 us, reader 275.0
    _hopper(None, None, 0),
    Row("gfx950", None, None, _GPU),
    Row("gpu", None, None, _GPU),
)

MAX_SPLITS = 32
MAX_CANDIDATES = 6


def choose_splits(rows: int, kv_len: int, block_n: int, num_cu: int, programs_per_cu: int) -> int:
    """Splits per sequence that minimise the modelled time of one call, in tile times of a busy CU (or SM).

    `rows` query rows over `kv_len` tokens in tiles of `block_n`; a CU holds `programs_per_cu` programs at a time. They
    share its bandwidth, and a program alone on a CU made for several gets at most 1 / 1.2 of it. A round of programs
    starts up in 2 tile times. Splitting costs a second pass of 2, and a partial's 16 KiB written and read about 1.

    Worked example, 32 rows x 8192 on 132 SMs of 2 programs, 128 tiles of 64. 1 split: 32 programs, each alone,
    2 + 128 x 1.2 = 155.6. 4 splits: 128 programs, 2 + 32 x 1.2 + 2 + 1.0 = 43.4. 8 splits: 256 programs, two on an SM,
    2 + 16 x 2 + 2 + 1.9 = 37.9. 12 splits: a second round, 2 x (2 + 11 x 2) + 2 + 2.9 = 52.9. So 8.
    """
    tiles = -(-kv_len // block_n)
    alone = 1.2 if programs_per_cu > 1 else 1.0

    def tile_times(splits: int) -> float:
        programs = rows * splits
        rounds = -(-programs // (num_cu * programs_per_cu))
        tile_time = max(alone, min(programs_per_cu, -(-programs // num_cu)))
        merge = 0 if splits == 1 else 2 + programs / num_cu
        return rounds * (2 + -(-tiles // splits) * tile_time) + merge

    return min(range(1, max(1, min(tiles, MAX_SPLITS)) + 1), key=tile_times)


def _with_splits(config: Config, rows: int, kv_len: int, target: Target) -> Config:
    if config.splits or not target.num_cu:
        return config
    splits = choose_splits(rows, kv_len, config.block_n, target.num_cu, config.programs_per_cu)
    return replace(config, splits=splits)


def select_config(batch_size: int, kv_seq_len: int, target: Target, q_seq_len: int = 1) -> tuple[Config, ...]:
    """Candidate configurations for a shape, best first: the first matching row of `TABLE`, splits filled in."""
    for row in TABLE:
        if row.target == target.name and row.batch_size in (None, batch_size) and row.kv_seq_len in (None, kv_seq_len):
            rows = batch_size * q_seq_len
            return tuple(_with_splits(config, rows, kv_seq_len, target) for config in row.configs)
    raise ValueError(f"target: expected one of {sorted({row.target for row in TABLE})}, got {target.name!r}")


# ---- arguments ----


def _expect(ok: bool, name: str, expected: str, got: object, error: type[Exception] = ValueError) -> None:
    if not ok:
        raise error(f"{name}: expected {expected}, got {got}")


def _check_tensor(
    name: str, x: object, dtypes: tuple[torch.dtype, ...], rank: int, device: torch.device | None
) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    _expect(x.dtype in dtypes, name, f"dtype {' or '.join(map(str, dtypes))}", x.dtype, TypeError)
    _expect(x.dim() == rank, name, f"{rank} dimensions", f"shape {tuple(x.shape)}")
    _expect(device is None or x.device == device, name, f"device {device} (that of q)", x.device)


_CONFIG = {
    "num_heads": H_Q,
    "num_kv_heads": 1,
    "qk_head_dim": D_QK,
    "kv_lora_rank": D_V,
    "qk_rope_head_dim": D_ROPE,
    "v_head_dim": D_V,
}


def check_arguments(data: object) -> None:
    """Raises TypeError, KeyError or ValueError naming the argument, what was expected and what came.

    Values of the index pointers are checked on the CPU only: reading them on a GPU would synchronise. There it is the
    caller's duty that kv_indptr rises from 0 to total_kv and that no sequence is longer than kv_seq_len.
    """
    if not isinstance(data, (tuple, list)) or len(data) != 5:
        got = f"{len(data)} items" if isinstance(data, (tuple, list)) else type(data).__name__
        raise TypeError(f"data: expected the tuple (q, kv_data, qo_indptr, kv_indptr, config), got {got}")
    q, kv_data, qo_indptr, kv_indptr, config = data
    _check_tensor("q", q, (torch.bfloat16,), 3, None)
    device = q.device
    for name, x in (("kv_data", kv_data), ("config", config)):
        _expect(isinstance(x, dict), name, "a dict", type(x).__name__, TypeError)
    for name in CACHE_NAMES:
        _expect(name in kv_data, f"kv_data[{name!r}]", "the key to be there", sorted(map(str, kv_data)), KeyError)
    for name in ("batch_size", "q_seq_len", "kv_seq_len", "sm_scale", *_CONFIG):
        _expect(name in config, f"config[{name!r}]", "the key to be there", sorted(map(str, config)), KeyError)
    for name, value in _CONFIG.items():
        _expect(config[name] == value, f"config[{name!r}]", str(value), config[name])
    for name, x in (("q", q), ("kv_data['bf16']", kv_data["bf16"])):
        grad = isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()
        _expect(not grad, name, "no gradient to be asked for (detach it or use torch.no_grad)", "requires_grad=True")
    batch_size, s_q, s_kv = (config[name] for name in ("batch_size", "q_seq_len", "kv_seq_len"))
    for name, value, least in (("batch_size", batch_size, 1), ("q_seq_len", s_q, 1), ("kv_seq_len", s_kv, 0)):
        _expect(isinstance(value, int) and value >= least, f"config[{name!r}]", f"an int >= {least}", repr(value))
    sm_scale = config["sm_scale"]
    _expect(isinstance(sm_scale, float) and 0 < sm_scale < float("inf"), "config['sm_scale']", "a float > 0", sm_scale)

    _expect(tuple(q.shape) == (batch_size * s_q, H_Q, D_QK), "q",
            f"shape {(batch_size * s_q, H_Q, D_QK)} from config", tuple(q.shape))  # fmt: skip
    bf16 = kv_data["bf16"]
    _check_tensor("kv_data['bf16']", bf16, (torch.bfloat16,), 3, device)
    total_kv = bf16.shape[0]
    fp8, fp8_scale = _pair("fp8", kv_data["fp8"])
    mxfp4, mxfp4_scale = _pair("mxfp4", kv_data["mxfp4"])
    _check_tensor("kv_data['fp8'][0]", fp8, (torch.float8_e4m3fn,), 3, device)
    for name, x in (("kv_data['bf16']", bf16), ("kv_data['fp8'][0]", fp8)):
        _expect(tuple(x.shape) == (total_kv, 1, D_QK), name, f"shape {(total_kv, 1, D_QK)}", tuple(x.shape))
        _expect(x.stride(2) == 1, name, "a last dimension of stride 1", f"strides {x.stride()}")
    _expect(q.stride(2) == 1, "q", "a last dimension of stride 1", f"strides {q.stride()}")
    _check_tensor("kv_data['fp8'][1]", fp8_scale, (torch.float32,), fp8_scale.dim(), device)
    _expect(fp8_scale.numel() == 1, "kv_data['fp8'][1]", "one element", f"shape {tuple(fp8_scale.shape)}")
    packed = tuple(getattr(torch, x) for x in ("float4_e2m1fn_x2", "uint8") if hasattr(torch, x))
    e8m0 = tuple(getattr(torch, x) for x in ("float8_e8m0fnu", "uint8") if hasattr(torch, x))
    _check_tensor("kv_data['mxfp4'][0]", mxfp4, packed, 3, device)
    _expect(tuple(mxfp4.shape) == (total_kv, 1, D_QK // 2), "kv_data['mxfp4'][0]",
            f"shape {(total_kv, 1, D_QK // 2)}", tuple(mxfp4.shape))  # fmt: skip
    _check_tensor("kv_data['mxfp4'][1]", mxfp4_scale, e8m0, 2, device)
    _expect(mxfp4_scale.shape[0] >= total_kv and mxfp4_scale.shape[1] >= D_QK // 32, "kv_data['mxfp4'][1]",
            f"at least {(total_kv, D_QK // 32)}", tuple(mxfp4_scale.shape))  # fmt: skip
    for name, x in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        _check_tensor(name, x, (torch.int32,), 1, device)
        _expect(x.numel() == batch_size + 1, name, f"{batch_size + 1} elements (batch_size + 1)", x.numel())
        _expect(x.is_contiguous(), name, "a contiguous tensor", f"strides {x.stride()}")
    _expect(total_kv <= batch_size * s_kv, "config['kv_seq_len']",
            f"at least the mean length, {total_kv} tokens / {batch_size} sequences", s_kv)  # fmt: skip
    if device.type == "cpu":
        _check_indptr("qo_indptr", qo_indptr.tolist(), total=batch_size * s_q, longest=s_q, uniform=True)
        _check_indptr("kv_indptr", kv_indptr.tolist(), total=total_kv, longest=s_kv, uniform=False)


def _pair(name: str, value: object) -> tuple[torch.Tensor, torch.Tensor]:
    ok = isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(x, torch.Tensor) for x in value)
    _expect(ok, f"kv_data[{name!r}]", "a pair of tensors (values, scales)", type(value).__name__, TypeError)
    return value[0], value[1]


def _check_indptr(name: str, indptr: list[int], total: int, longest: int, uniform: bool) -> None:
    ends = (indptr[0], indptr[-1])
    _expect(ends == (0, total), name, f"to go from 0 to {total}", f"{ends[0]} to {ends[1]}")
    for i, (start, end) in enumerate(zip(indptr, indptr[1:], strict=False)):
        length = end - start
        _expect(length >= 0, name, "a non-decreasing sequence", f"{start}, {end} at {i}")
        ok = length == longest if uniform else length <= longest
        _expect(ok, name, f"steps of {'' if uniform else 'at most '}{longest}", f"{length} at {i}")


# ---- launchers ----


@dataclass(frozen=True)
class Selection:
    """What a call ran: the arm, the cache it read ("bf16", "fp8" or "mxfp4") and its configuration, readable."""

    arm: str
    kv: str
    config: str


@dataclass(frozen=True)
class Problem:
    """What the choice of an arm and its buffers depend on, known without reading device memory."""

    device: torch.device
    batch_size: int
    q_seq_len: int
    kv_seq_len: int
    sm_scale: float
    # Every sequence has kv_seq_len tokens: as none is longer, that is so when they add up to total_kv.
    uniform: bool
    empty: bool  # no token at all
    aligned: bool  # addresses and row strides of Q and of the fp8 cache are multiples of 16 bytes

    @property
    def total_q(self) -> int:
        return self.batch_size * self.q_seq_len


@dataclass(frozen=True)
class Plan:
    """An arm bound to a problem: its configuration, output and scratch."""

    problem: Problem
    config: Config
    selection: Selection
    run: Callable[[tuple, Plan], torch.Tensor]


_PLANS: dict[tuple, Plan] = {}
_OUT: dict[tuple, torch.Tensor] = {}
_PARTIALS: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}
_TICKETS: dict[tuple, torch.Tensor] = {}
_BMM: dict[tuple, tuple[torch.Tensor, ...]] = {}


def _scratch(store: dict, key: tuple, make: Callable[[], object]):
    """`store[key]`, made on first use; never as inference tensors, which nothing could write to outside that mode."""
    if key not in store:
        with torch.inference_mode(False):
            store[key] = make()
    return store[key]


def _output(problem: Problem) -> torch.Tensor:
    """bf16 (total_q, 16, 512), one for each shape and device, reused by every call."""
    key = (problem.device, problem.batch_size, problem.q_seq_len, problem.kv_seq_len)
    shape = (problem.total_q, H_Q, D_V)
    return _scratch(_OUT, key, lambda: torch.empty(shape, dtype=torch.bfloat16, device=problem.device))


def _partials(problem: Problem, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised fp16 partial outputs [total_q, splits, 16, 512] and fp32 log2-sum-exps [total_q, splits, 16]."""
    shape = (problem.total_q, splits, H_Q)
    return _scratch(
        _PARTIALS,
        (problem.device, *shape),
        lambda: (
            torch.empty(*shape, D_V, dtype=torch.float16, device=problem.device),
            torch.empty(shape, dtype=torch.float32, device=problem.device),
        ),
    )


def _tickets(problem: Problem) -> torch.Tensor:
    """int32 [total_q] of zeros; every launch that uses it leaves it so."""
    key = (problem.device, problem.total_q)
    return _scratch(_TICKETS, key, lambda: torch.zeros(problem.total_q, dtype=torch.int32, device=problem.device))


def _run_triton_fp8(data: tuple, plan: Plan) -> torch.Tensor:
    """Two launches: partials, then the combine; one when the sequences are not split."""
    q, kv_data, _, kv_indptr, _ = data
    kv, kv_scale = kv_data["fp8"]
    problem, config = plan.problem, plan.config
    out = _output(problem)
    part, lse = _partials(problem, config.splits) if config.splits > 1 else (out, out)
    _decode_fp8[(config.splits, problem.total_q)](
        q, kv, kv_scale, kv_indptr, out, part, lse, problem.sm_scale * LOG2E, problem.q_seq_len,
        q.stride(0), q.stride(1), kv.stride(0),
        SPLITS=config.splits, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip
    if config.splits > 1:
        _launch_combine(part, lse, kv_scale, out, dependent=False)
    return out


def _launch_combine(
    part: torch.Tensor, lse: torch.Tensor, kv_scale: torch.Tensor, out: torch.Tensor, dependent: bool
) -> None:
    """`dependent`: a CUDA dependent launch, whose start-up overlaps the end of the launch before it."""
    total_q, splits = lse.shape[:2]
    options = {"launch_pdl": True} if dependent else {}
    block_d = 512 if splits <= 4 else 256 if splits <= 8 else 128 if splits <= 16 else 64
    _combine[(D_V // block_d, H_Q, total_q)](
        part, lse, kv_scale, out, SPLITS=splits, BLOCK_S=triton.next_power_of_2(splits), BLOCK_D=block_d,
        DEPENDENT=dependent, num_warps=2 if splits <= 4 else 1, **options,
    )  # fmt: skip


def _run_hopper_fp8(data: tuple, plan: Plan) -> torch.Tensor:
    """One launch when a sequence is not split or `one_launch` says so, else two, the combine launched dependent."""
    q, kv_data, _, kv_indptr, _ = data
    kv, kv_scale = kv_data["fp8"]
    problem, config = plan.problem, plan.config
    out = _output(problem)
    part, lse = _partials(problem, config.splits) if config.splits > 1 else (out, out)
    one_launch = config.one_launch and config.splits > 1
    rows = kv[:, 0]  # [total_kv, 576]
    _decode_fp8_hopper[(problem.total_q, config.splits)](
        q, TensorDescriptor.from_tensor(rows, [64, D_V], gl.NVMMASharedLayout(128, 8, 2)),
        TensorDescriptor.from_tensor(rows, [64, D_ROPE], gl.NVMMASharedLayout(64, 8, 2)),
        kv_scale, kv_indptr, out, part, lse, _tickets(problem) if one_launch else kv_indptr,
        problem.sm_scale * LOG2E, problem.q_seq_len, q.stride(0), q.stride(1), 4,
        SPLITS=config.splits, ONE_LAUNCH=one_launch, num_warps=4,
    )  # fmt: skip
    if config.splits > 1 and not one_launch:
        _launch_combine(part, lse, kv_scale, out, dependent=True)
    return out


def _run_torch_bmm(data: tuple, plan: Plan) -> torch.Tensor:
    """Two batched matrix products over the bf16 cache, for equal lengths and one query a sequence.

    Scores stay in float32: rounded to bf16 they would cost up to 0.9 % in a row.
    """
    q, kv_data, _, _, _ = data
    problem = plan.problem
    kv = kv_data["bf16"].view(problem.batch_size, problem.kv_seq_len, D_QK)
    out = _output(problem)
    shape = (problem.batch_size, H_Q, problem.kv_seq_len)
    scores, probabilities, weights = _scratch(
        _BMM,
        (problem.device, *shape),
        lambda: (
            torch.empty(shape, dtype=torch.float32, device=problem.device),
            torch.empty(shape, dtype=torch.float32, device=problem.device),
            torch.empty(shape, dtype=torch.bfloat16, device=problem.device),
        ),
    )
    k = kv.transpose(1, 2)
    if problem.device.type == "cpu":  # which has no product of bf16 with a float32 result
        torch.baddbmm(scores, q.float(), k.float(), beta=0, alpha=problem.sm_scale, out=scores)
    else:
        torch.ops.aten.baddbmm.dtype_out(scores, q, k, torch.float32, beta=0, alpha=problem.sm_scale, out=scores)
    torch.softmax(scores, -1, out=probabilities)
    torch.bmm(weights.copy_(probabilities), kv[..., :D_V], out=out)
    return out


CHUNK_BYTES = 64 << 20


def _attend_float32(data: tuple, kv: str) -> torch.Tensor:
    """Float32 (total_q, 16, 512): attention over the cache named `kv`, one sequence after the other, in chunks.

    Right for any lengths on any device, but it reads kv_indptr on the host, so it synchronises on a GPU. A chunk's
    float32 copy takes CHUNK_BYTES.
    """
    q, kv_data, _, kv_indptr, config = data
    s_q, device = config["q_seq_len"], q.device
    cache, cache_scale = (kv_data["bf16"], None) if kv == "bf16" else kv_data[kv]
    out = torch.empty(q.shape[0], H_Q, D_V, dtype=torch.float32, device=device)
    chunk = CHUNK_BYTES // (4 * D_QK)
    indptr = kv_indptr.tolist()
    hidden = torch.arange(s_q - 1, -1, -1, device=device)  # tokens at the end that query i does not see
    for b in range(config["batch_size"]):
        rows = slice(b * s_q, (b + 1) * s_q)
        qb = q[rows].float().reshape(s_q * H_Q, D_QK) * config["sm_scale"]
        m = torch.full((s_q * H_Q, 1), float("-inf"), device=device)
        norm = torch.zeros_like(m)
        acc = torch.zeros(s_q * H_Q, D_V, device=device)
        for start in range(indptr[b], indptr[b + 1], chunk):
            end = min(start + chunk, indptr[b + 1])
            k = cache[start:end, 0].float()
            if cache_scale is not None:
                k *= cache_scale
            x = qb @ k.T
            if s_q > 1:
                unseen = torch.arange(start, end, device=device) >= indptr[b + 1] - hidden[:, None]
                x.view(s_q, H_Q, -1).masked_fill_(unseen[:, None, :], float("-inf"))
            m_new = torch.maximum(m, x.amax(1, keepdim=True))
            # A row that has seen no token yet keeps m = -inf; 0 stands in for it to avoid inf - inf.
            base = m_new.masked_fill(m_new == float("-inf"), 0.0)
            p = torch.exp(x - base)
            rescale = torch.exp(m - base)
            norm = norm * rescale + p.sum(1, keepdim=True)
            acc = acc * rescale + p @ k[:, :D_V]
            m = m_new
        out[rows] = (acc / norm.masked_fill(norm == 0.0, 1.0)).view(s_q, H_Q, D_V)
    return out


def _run_torch_chunked(data: tuple, plan: Plan) -> torch.Tensor:
    """`_attend_float32` over the bf16 cache."""
    return _output(plan.problem).copy_(_attend_float32(data, "bf16"))


EXACT_ERROR = 1e-2


@dataclass(frozen=True)
class Arm:
    """A way to compute the result.

    kv: the cache it reads. why_not: why it cannot serve a problem; None if it can. run: its launcher. max_error: the
    largest relative L2 error against float32 attention over the same cache with which it may be used. last_resort: it
    is tried only when nothing else proved right.
    """

    kv: str
    why_not: Callable[[Problem], str | None]
    run: Callable[[tuple, Plan], torch.Tensor]
    max_error: float = EXACT_ERROR
    last_resort: bool = False


def _no_gpu_triton(problem: Problem) -> str | None:
    if triton is None:
        return "Triton is not installed"
    if problem.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the inputs are on {problem.device}, not on a GPU"
    return None


def _no_bmm(problem: Problem) -> str | None:
    if problem.q_seq_len != 1:
        return f"it takes one query a sequence, not {problem.q_seq_len}"
    if not problem.uniform or problem.empty:
        return "it takes sequences of one length, not an empty or ragged batch"
    return None


def _no_hopper(problem: Problem) -> str | None:
    if gluon is None:
        return "Triton with Gluon is not installed"
    if _target(problem.device).name != "sm90":
        return f"{problem.device} is not a Hopper GPU"
    if not problem.aligned or problem.empty:
        return "it needs a non-empty fp8 cache and Q with addresses and row strides of 16 bytes"
    return None


ARMS: dict[str, Arm] = {
    "hopper_fp8": Arm("fp8", _no_hopper, _run_hopper_fp8),
    "triton_fp8": Arm("fp8", _no_gpu_triton, _run_triton_fp8),
    "torch_bmm": Arm("bf16", _no_bmm, _run_torch_bmm),
    "torch_chunked": Arm("bf16", lambda problem: None, _run_torch_chunked, last_resort=True),
}


@cache
def _target(device: torch.device) -> Target:
    if device.type != "cuda":
        return Target("cpu")
    properties = torch.cuda.get_device_properties(device)
    name = "gpu"
    if getattr(properties, "gcnArchName", "").startswith("gfx950"):
        name = "gfx950"
    elif torch.version.cuda and (properties.major, properties.minor) == (9, 0):
        name = "sm90"
    return Target(name, properties.multi_processor_count)


# ---- dispatch ----


TUNE_SECONDS = 20.0
TUNE_RUNS = 12
TUNE_MARGIN = 0.02
GAIN_TOLERANCE = 0.01
ROW_FACTOR = 3.0

_CHOICES: dict[tuple, Config] = {}
_LOCK = threading.RLock()
_said: set[str] = set()


def _say(message: str) -> None:
    print(f"mixed-mla: {message}", file=sys.stderr)


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _say(message)


def problem_of(data: tuple) -> Problem:
    """The problem that checked arguments pose."""
    q, kv_data, _, _, config = data
    total_kv = kv_data["bf16"].shape[0]
    return Problem(
        device=q.device,
        batch_size=config["batch_size"],
        q_seq_len=config["q_seq_len"],
        kv_seq_len=config["kv_seq_len"],
        sm_scale=config["sm_scale"],
        uniform=total_kv == config["batch_size"] * config["kv_seq_len"],
        empty=total_kv == 0,
        aligned=_aligned(q, kv_data["fp8"][0]),
    )


def bind(problem: Problem, config: Config) -> Plan:
    """A plan that runs `config` on `problem`; raises ValueError if its arm is unknown or cannot serve it."""
    if config.arm not in ARMS:
        raise ValueError(f"arm: expected one of {', '.join(ARMS)}, got {config.arm!r}")
    arm = ARMS[config.arm]
    reason = arm.why_not(problem)
    if reason:
        raise ValueError(f"arm {config.arm}: expected one that can serve this call, but {reason}")
    return Plan(problem, config, Selection(config.arm, arm.kv, _describe(config)), arm.run)


def _describe(config: Config) -> str:
    """The fields that differ from their defaults."""
    values = ((f.name, getattr(config, f.name), f.default) for f in fields(config) if f.name != "arm")
    return " ".join(f"{name}={value}" for name, value, default in values if value != default)


def _fault(output: torch.Tensor, expected: torch.Tensor, max_error: float) -> tuple[float, str | None]:
    """Relative L2 error of `output` on `expected` (float32, same shape), and what is wrong with it, if anything.

    Wrong is: NaN where `expected` has none or the reverse, an error above `max_error`, one row (query and head) above
    ROW_FACTOR times that, or a gain (least-squares slope of output on expected) off by more than GAIN_TOLERANCE.
    """
    if output.shape != expected.shape or output.dtype != torch.bfloat16:
        return float("nan"), f"{output.dtype} {tuple(output.shape)} instead of bfloat16 {tuple(expected.shape)}"
    finite = expected.isfinite()
    strays = (output.isfinite() != finite).sum().item()
    if strays:
        return float("nan"), f"{strays} elements are NaN or infinite where they should not be, or finite by mistake"
    expected = expected.masked_fill(~finite, 0.0)
    difference = output.float().masked_fill(~finite, 0.0) - expected
    energy = expected.square().sum().item()
    error = (difference.square().sum().item() / energy) ** 0.5 if energy else difference.abs().max().item()
    rows = difference.norm(dim=2) > ROW_FACTOR * max_error * expected.norm(dim=2)
    gain = (difference * expected).sum().item() / energy if energy else 0.0
    if error > max_error:
        return error, f"error {error:.1e} is above {max_error:.0e}"
    if rows.any():
        t, h = rows.nonzero()[0].tolist()
        return error, f"error above {ROW_FACTOR * max_error:.0e} at query {t}, head {h} ({int(rows.sum())} such rows)"
    if abs(gain) > GAIN_TOLERANCE:
        return error, f"gain {1 + gain:.4f} is not 1 +- {GAIN_TOLERANCE}"
    return error, None


class _ColdTimer:
    """Times calls in microseconds: between events behind an asynchronous flush on a GPU, by the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            # Several times any last-level cache, memory permitting.
            flush_bytes = min(1 << 30, torch.cuda.mem_get_info(device)[0] // 4)
            self._flush = torch.empty(flush_bytes, dtype=torch.uint8, device=device)

    def __call__(self, call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
        if not self._on_gpu:
            start_s = time.perf_counter()
            return call(), (time.perf_counter() - start_s) * 1e6
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        output = call()
        end.record()
        end.synchronize()
        return output, start.elapsed_time(end) * 1e3


def _try(data: tuple, plan: Plan, expected: torch.Tensor, timer: _ColdTimer | None) -> tuple[float, float]:
    """(error, median time in us) of a plan; without a timer it runs twice and the time is 0.

    Raises RuntimeError if it proves wrong, or different from one run to the next.
    """

    def run() -> torch.Tensor:
        return plan.run(data, plan)

    first = run().clone()
    error, fault = _fault(first, expected, ARMS[plan.config.arm].max_error)
    if fault:
        raise RuntimeError(fault)
    times_us = []
    for i in range(TUNE_RUNS if timer else 1):
        output, time_us = timer(run) if timer else (run(), 0.0)
        times_us.append(time_us)
        # Compared as bits, so that a NaN that belongs there equals itself.
        if not torch.equal(output.view(torch.int16), first.view(torch.int16)):
            raise RuntimeError(f"run {i + 2} differs from the first on the same input")
    return error, sorted(times_us)[len(times_us) // 2]


def _choose(data: tuple, problem: Problem, candidates: tuple[Config, ...], tune: bool) -> Config:
    """The fastest candidate that proves right on `data`; without `tune`, the first one that does.

    Every other candidate is named on stderr with its reason. Raises RuntimeError with all reasons if none is left.
    """
    seconds = float(os.environ.get("MLA_TUNE_SECONDS", TUNE_SECONDS))
    deadline = time.monotonic() + seconds
    label = f"{problem.batch_size}x{problem.kv_seq_len}"
    expected: dict[str, torch.Tensor] = {}
    timer = _ColdTimer(problem.device) if tune and len(candidates) > 1 else None
    best: tuple[float, Config] | None = None
    reasons, lines = [], []
    for config in candidates:
        if best and ARMS[config.arm].last_resort:
            continue
        if best and time.monotonic() > deadline:
            _say(f"{label}: {config.arm} not tried, the first call has taken its {seconds:g} s")
            continue
        kv = ARMS[config.arm].kv
        try:
            plan = bind(problem, config)
            if kv not in expected:
                expected[kv] = _attend_float32(data, kv)
            error, time_us = _try(data, plan, expected[kv], timer)
        except Exception as failure:
            reasons.append(f"{config.arm} ({_describe(config)}): {failure}")
            _say(f"{label}: dropped {reasons[-1]}")
            continue
        lines.append(f"{label}: {config.arm} ({_describe(config)}): error {error:.1e}, {time_us:.1f} us")
        if best is None or time_us < (1 - TUNE_MARGIN) * best[0]:
            best = (time_us, config)
        if timer is None:
            break
    if os.environ.get("MLA_VERBOSE") == "1":
        for line in lines:
            _say(line)
        if best:
            _say(f"{label}: chose {best[1].arm} ({_describe(best[1])})")
    if best is None:
        raise RuntimeError(f"no arm is right for {label}: {'; '.join(reasons)}")
    return best[1]


def _make_plan(data: tuple) -> Plan:
    """Checks the arguments, settles which configuration serves their shape, if that is still open, and binds it."""
    check_arguments(data)
    problem = problem_of(data)
    forced, tune = os.environ.get("MLA_BACKEND", ""), os.environ.get("MLA_TUNE", "1") != "0"
    choice = (replace(problem, sm_scale=1.0), forced)
    if choice not in _CHOICES:
        _CHOICES[choice] = _settle(data, problem, forced, tune)
    return bind(problem, _CHOICES[choice])


def _settle(data: tuple, problem: Problem, forced: str, tune: bool) -> Config:
    target = _target(problem.device)
    candidates = select_config(problem.batch_size, problem.kv_seq_len, target, problem.q_seq_len)
    if forced:
        target = replace(target, num_cu=target.num_cu or 1)
        default = _with_splits(Config(forced), problem.total_q, problem.kv_seq_len, target)
        config = next((config for config in candidates if config.arm == forced), default)
        bind(problem, config)
        return _choose(data, problem, (config,), tune=False)
    reasons = {config: ARMS[config.arm].why_not(problem) for config in candidates}
    eligible = tuple(config for config in candidates if reasons[config] is None)[:MAX_CANDIDATES]
    passed_over = [f"{c.arm}: {reasons[c]}" for c in candidates[: candidates.index(eligible[0])]]
    if passed_over:
        _say_once(f"fell back to {eligible[0].arm} ({'; '.join(passed_over)})")
    elif target.name == "cpu":
        _say_once(f"no GPU in use, so {eligible[0].arm} computes on the CPU")
    # The last resort is the yardstick itself: there is nothing to check it against.
    return eligible[0] if ARMS[eligible[0].arm].last_resort else _choose(data, problem, eligible, tune)


_last: Plan | None = None


def last_run() -> Selection | None:
    """What the latest `custom_kernel` call of this process ran; None before the first."""
    return _last.selection if _last else None


def _aligned(q: torch.Tensor, kv: torch.Tensor) -> bool:
    bits = q.data_ptr() | kv.data_ptr() | kv.stride(0) | (q.stride(0) | q.stride(1)) * q.element_size()
    return bits % 16 == 0


def _key(data: tuple) -> tuple:
    """All that a call's checks and its plan depend on, read without touching the device.

    Of the number of cached tokens only what matters enters, so that a growing cache does not grow `_PLANS`.
    """
    q, kv_data, qo_indptr, kv_indptr, config = data
    bf16, (fp8, fp8_scale), (mxfp4, mxfp4_scale) = (kv_data[name] for name in CACHE_NAMES)
    caches = (bf16, fp8, mxfp4, mxfp4_scale)
    total_kv, most = bf16.shape[0], config["batch_size"] * config["kv_seq_len"]
    sizes = (
        fp8.shape[0] == mxfp4.shape[0] == total_kv <= mxfp4_scale.shape[0], total_kv <= most, total_kv == most,
        total_kv == 0, _aligned(q, fp8),
    )  # fmt: skip
    layout = tuple((x.shape[1:], x.stride(), x.dtype, x.device) for x in caches) + tuple(
        (x.shape, x.stride(), x.dtype, x.device) for x in (q, fp8_scale, qo_indptr, kv_indptr)
    )
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, bf16))
    return layout, sizes, grad, tuple(config.items()), os.environ.get("MLA_BACKEND", "")


def custom_kernel(data: tuple) -> torch.Tensor:
    """MLA decode attention over every token of the cache.

    `data` is (q, kv_data, qo_indptr, kv_indptr, config):
      q          bfloat16 (batch_size * q_seq_len, 16, 576), any strides with the last one 1
      kv_data    "bf16": bfloat16 (total_kv, 1, 576); "fp8": (float8_e4m3fn (total_kv, 1, 576), float32 scale (1,));
                 "mxfp4": (packed E2M1 (total_kv, 1, 288), E8M0 scales, at least (total_kv, 18))
      qo_indptr, kv_indptr   int32 (batch_size + 1,), the rows of each sequence; queries are uniform
      config     batch_size, q_seq_len, kv_seq_len (no sequence is longer), sm_scale, dimensions

    Returns bfloat16 (batch_size * q_seq_len, 16, 512), owned by this module, valid until the next call with the same
    device, batch_size, q_seq_len and kv_seq_len. Inputs are never written. Query i of a sequence sees all but its last
    q_seq_len - 1 - i tokens; without a token to see it is zero. There is no gradient.

    The first call of a shape proves and times the arms on its input, so it synchronises and cannot be captured in a
    graph; later ones neither synchronise nor allocate. Calls of one shape share scratch: order them on one queue.
    Raises TypeError, KeyError or ValueError for arguments that do not fit (see `check_arguments`), RuntimeError if no
    arm proves right.
    """
    global _last
    try:
        plan = _PLANS.get(key := _key(data))
    except (AttributeError, KeyError, TypeError, ValueError):
        check_arguments(data)
        raise
    if plan is None:
        with _LOCK, torch.cuda.device(data[0].device) if data[0].is_cuda else nullcontext():
            plan = _PLANS.get(key) or _PLANS.setdefault(key, _make_plan(data))
    elif not data[0].is_cuda:
        check_arguments(data)
    _last = plan
    if data[0].is_cuda and data[0].device.index != torch.cuda.current_device():
        with torch.cuda.device(data[0].device):
            return plan.run(data, plan)
    return plan.run(data, plan)
