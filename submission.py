#!POPCORN leaderboard amd-mixed-mla
#!POPCORN gpu MI355X

"""Exact MLA decode attention for one set of 16 query heads over a shared KV cache.

For each query row t of sequence b, with K = all 576 dims of the cached rows and V = their first 512 dims:

    out[t, h] = softmax(q[t, h] . K^T * sm_scale) V        over every token of sequence b

Algorithm: split-K flash decoding. A sequence's tiles of BLOCK_N tokens are dealt to `splits` programs. Each reads its
tiles once for all 16 heads, keeps a running maximum m, sum l and output accumulator, and leaves a normalised partial
output with its log2-sum-exp. The combine weighs the partials.

Launches per call: one when a sequence is not split (or when the last program to arrive combines), two otherwise.

Dispatch: a first call of a shape runs the candidates of `select_config` on its own input, drops each that is not right
there and then, and keeps the fastest in `_PLANS`, where later calls find it.

Environment: MLA_BACKEND=<arm> forces an arm; MLA_KV=fp8 never reads the mxfp4 cache, MLA_KV=mxfp4 always does, auto,
the default, where that costs little accuracy (MXFP4_MIN_KV_LEN); MLA_TUNE=0 takes the first arm that proves right,
untimed; MLA_VERBOSE=1 prints each arm's error and time; MLA_TUNE_SECONDS=<s> limits a first call (20), after which
untried arms stay out.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import accumulate, chain, pairwise, takewhile
from operator import itemgetter
from typing import Any, NamedTuple

# What decorates kernels of a package that is missing; to mypy all kernels, which are not Python.
from typing import no_type_check as _gluon_builtin
from typing import no_type_check as _gluon_constexpr
from typing import no_type_check as _gluon_jit
from typing import no_type_check as _jit

import torch

try:
    import triton
    import triton.language as tl

    _jit = triton.jit
except ImportError:
    triton = None
try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.amd import AMDMFMALayout, cdna4
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    _gluon_jit, _gluon_constexpr, _gluon_builtin = gluon.jit, gluon.constexpr_function, gl._core.builtin
except ImportError:
    gluon = None

H_Q = 16  # query heads
D_V = 512  # value dims: the latent part of a cache row
D_ROPE = 64
D_QK = D_V + D_ROPE
LOG2E = 1.4426950408889634
CACHE_NAMES = ("bf16", "fp8", "mxfp4")
_caches = itemgetter(*CACHE_NAMES)


# ---- what all kernels share ----


@_jit
def _tile_range(kv_indptr, t, s_q, split, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows [start, end) of the cache that query row `t` sees; of their tiles of BLOCK_N, [first, last) of `split`.

    Queries are bottom-right causal: query i of s_q sees all but the last s_q - 1 - i tokens of its sequence, so that
    `end` may lie before `start`.
    """
    b = t // s_q
    kv_start = tl.load(kv_indptr + b)
    kv_end = tl.load(kv_indptr + b + 1) - (s_q - 1 - t % s_q)
    n_tiles = tl.cdiv(tl.maximum(kv_end - kv_start, 0), BLOCK_N)
    return kv_start, kv_end, n_tiles * split // SPLITS, n_tiles * (split + 1) // SPLITS


@_jit
def _power_of_two_scale(amax):
    """(2^k, 2^-k) that bring a float32 `amax` to [128, 256); less than 2^-97 counts as that."""
    exponent = tl.maximum(amax.to(tl.int32, bitcast=True) >> 23, 30)
    up = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    return up, down


# ---- Triton: any GPU ----


@_jit
def _load_parts(ptr, rows, end, stride, LATENT: tl.constexpr):
    """LATENT columns of `rows` and, behind them, the rope's, an eighth as many; rows from `end` on read as zeros."""
    row_ptrs = ptr + rows.to(tl.int64)[:, None] * stride
    mask = (rows < end)[:, None]
    latent = tl.load(row_ptrs + tl.arange(0, LATENT)[None, :], mask=mask, other=0.0)
    return latent, tl.load(row_ptrs + LATENT + tl.arange(0, LATENT // 8)[None, :], mask=mask, other=0.0)


@_jit
def _load_tile(kv_ptr, scale_ptr, rows, kv_end, stride_kv_t, stride_scale_t: tl.constexpr):
    """Both parts of the values and, over mxfp4, both of their scales, as they lie in the cache."""
    if stride_scale_t is None:
        tile = _load_parts(kv_ptr, rows, kv_end, stride_kv_t, 512)
    else:
        tile = _load_parts(kv_ptr, rows, kv_end, stride_kv_t, 256)
        tile = tile + _load_parts(scale_ptr, rows, kv_end, stride_scale_t, 16)
    return tile


@_jit
def _mxfp4(packed, scales):
    """bf16 [n, blocks * 32] of E2M1 codes [n, blocks * 16], the low nibble for the even dim, and E8M0 [n, blocks].

    Exact: every product is a bf16 number, down to 2^-128; 2^128 and more become infinite.
    """
    n: tl.constexpr = scales.shape[0]
    blocks: tl.constexpr = scales.shape[1]
    # The sign at float32's and the other bits at 24 .. 22 are the value times 2^-126, denormals included.
    pairs = packed.to(tl.uint32).reshape(n, blocks, 16, 1)
    shift = 4 * tl.arange(0, 2)
    bits = ((pairs << (28 - shift)) & 0x80000000) | ((pairs << (22 - shift)) & 0x1C00000)
    values = bits.to(tl.float32, bitcast=True) * 2.0**126
    # 2^(code - 127), code 0 a denormal; 255 is NaN.
    scale = tl.maximum(scales.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)
    scale = tl.where(scales == 255, float("nan"), scale)[:, :, None, None]
    upper = ((values * scale).to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    return upper.to(tl.bfloat16, bitcast=True).reshape(n, blocks * 32)


@_jit
def _decode(
    q_ptr,  # bf16 [total_q, 16, 576]
    kv_ptr,  # fp8 e4m3 [total_kv, 576], or mxfp4, uint8 [total_kv, 288] of two E2M1 codes each
    scale_ptr,  # fp32 [1], or uint8 [>= total_kv, >= 18] of E8M0 codes, one for 32 dims
    kv_indptr,  # int32 [b + 1]
    out_ptr,  # bf16 [total_q, 16, 512]
    part_ptr,  # [total_q, SPLITS, 16, 512], normalised: of fp8 fp16, in units of the cache's scale; of mxfp4 fp32
    lse_ptr,  # fp32 [total_q, SPLITS, 16], log2; -inf for an empty split
    softmax_scale,  # sm_scale * log2(e)
    s_q,
    stride_q_t,
    stride_q_h,
    stride_kv_t,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    stride_scale_t: tl.constexpr,  # None over fp8; constant, as the width of loads hangs on it
):
    """Grid (SPLITS, total_q). With SPLITS == 1 writes `out_ptr`, else one partial per split.

    Multiplies in fp16 (fp8) or bf16 (mxfp4), where cache and Q are exact: only P is rounded, in products as in its sum.
    """
    split = tl.program_id(0)
    t = tl.program_id(1)
    offs_h = tl.arange(0, 16)
    # Q before KV: it would queue behind the tiles.
    qn, qr = _load_parts(q_ptr + t.to(tl.int64) * stride_q_t, offs_h, 16, stride_q_h, 512)
    kv_scale = tl.load(scale_ptr) if stride_scale_t is None else 1.0
    kv_start, kv_end, first, last = _tile_range(kv_indptr, t, s_q, split, SPLITS, BLOCK_N)
    # A power-of-two scale per head makes Q fit fp16, as every e4m3 value does, exactly down to 2^-24 of its maximum.
    dtype: tl.constexpr = tl.float16 if stride_scale_t is None else tl.bfloat16
    qn, qr = qn.to(tl.float32), qr.to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(qn), 1), tl.max(tl.abs(qr), 1))
    if stride_scale_t is not None:  # bf16 holds any Q; scaled up, it would take float32's room from a large cache
        amax = tl.maximum(amax, 128.0)
    up, down = _power_of_two_scale(amax)
    qn, qr = (qn * up[:, None]).to(dtype), (qr * up[:, None]).to(dtype)
    logit_scale = down * (kv_scale * softmax_scale)

    m = tl.full([16], float("-inf"), tl.float32)
    norm = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, 512], tl.float32)
    rows = kv_start + first * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = _load_tile(kv_ptr, scale_ptr, rows, kv_end, stride_kv_t, stride_scale_t)
    for _ in range(first, last):
        # One conversion serves K and V; the next tile is on its way in registers meanwhile.
        if stride_scale_t is None:
            kn, kr = tile[0].to(dtype), tile[1].to(dtype)
        else:
            kn, kr = _mxfp4(tile[0], tile[2]), _mxfp4(tile[1], tile[3])
        mask_n = rows < kv_end
        rows += BLOCK_N
        tile = _load_tile(kv_ptr, scale_ptr, rows, kv_end, stride_kv_t, stride_scale_t)
        x = tl.dot(qn, tl.trans(kn), tl.dot(qr, tl.trans(kr))) * logit_scale[:, None]
        x = tl.where(mask_n[None, :], x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        rescale = tl.exp2(m - m_new)
        p = tl.exp2(x - m_new[:, None]).to(dtype)
        norm = norm * rescale + tl.sum(p.to(tl.float32), 1)
        acc = tl.dot(p, kn, acc * rescale[:, None])
        m = m_new

    o = acc / tl.where(first < last, norm, 1.0)[:, None]
    row = t.to(tl.int64) * SPLITS + split
    offs_o = offs_h[:, None] * 512 + tl.arange(0, 512)[None, :]
    if SPLITS == 1:
        tl.store(out_ptr + row * 8192 + offs_o, o * kv_scale)
    else:
        tl.store(part_ptr + row * 8192 + offs_o, o)
        tl.store(lse_ptr + row * 16 + offs_h, m + tl.log2(norm))


@_jit
def _combine(
    part_ptr,  # fp16 or fp32 [total_q, SPLITS, 16, 512]
    lse_ptr,  # fp32 [total_q, SPLITS, 16]
    kv_scale_ptr,  # fp32 [1]
    out_ptr,  # bf16 [total_q, 16, 512]
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,  # SPLITS rounded up to a power of two
    BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,  # launched while the partials are still being written (CUDA only)
):
    """Grid (512 / BLOCK_D, 16, total_q): weighs the partials of one head by 2^lse; no token at all gives zeros."""
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    h = tl.program_id(1)
    t = tl.program_id(2).to(tl.int64)
    offs_s = tl.arange(0, BLOCK_S)
    row = (t * SPLITS + offs_s) * 16 + h
    kv_scale = tl.load(kv_scale_ptr)
    if DEPENDENT:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    mask_s = offs_s < SPLITS
    lse = tl.load(lse_ptr + row, mask=mask_s, other=float("-inf"))
    part = tl.load(part_ptr + row[:, None] * 512 + offs_d[None, :], mask=mask_s[:, None], other=0.0)
    # An empty split's partial may be anything, and a weight of zero would not silence a NaN in it.
    empty = lse == float("-inf")
    part = tl.where(empty[:, None], 0.0, part.to(tl.float32))
    w = tl.where(empty, 0.0, tl.exp2(lse - tl.max(lse, 0)))
    total = tl.sum(w, 0)
    o = tl.sum(part * w[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + (t * 16 + h) * 512 + offs_d, o * kv_scale)


# ---- what the Gluon kernels share ----


@_gluon_builtin
def _barrier(_semantic=None):
    """A barrier of the program's threads: `thread_barrier`, which Triton 3.7 renames."""
    barrier = getattr(gl, "thread_barrier", None) or gl.barrier
    return barrier(_semantic=_semantic)


@_gluon_jit
def _hi_lo(x, up):
    """float32 x * up as the sum of two e4m3 numbers, `up` bringing the largest x to [128, 256).

    Exact for bf16 x down to 2^-9 of that largest one; smaller ones come out to within 2^-16 of it.
    hi is x * up rounded to 4 significant bits on its float32 pattern: converting a fresh e4m3 pair back to fp16 is
    miscompiled by ptxas, so lo is not taken from the converted hi.
    """
    x = x * up
    hi = ((x.to(gl.int32, bitcast=True) + 0x80000) & -0x100000).to(gl.float32, bitcast=True)
    return hi.to(gl.float8e4nv), (x - hi).to(gl.float8e4nv)


@_gluon_jit
def _arrive_last(ticket_ptr, SPLITS: gl.constexpr):
    """Whether this program is the last of its query row's SPLITS to arrive; leaves the ticket at zero when it is.

    The barrier puts every thread's partial before the one thread that takes the ticket; release makes them visible to
    the device with it, acquire keeps the last program's reads behind it. Nobody waits, so no residency is needed, and
    the ticket is back at zero for the next launch or graph replay.
    """
    _barrier()
    last = gl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        gl.store(ticket_ptr, 0)
    return last


@_gluon_jit
def _merge_partials(
    part_ptr,  # fp16 or fp32 [SPLITS, 16, 512] of one query row
    lse_ptr,  # fp32 [SPLITS, 16]
    out_ptr,  # bf16 [16, 512]
    kv_scale,
    SPLITS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """`_combine` for one query row by one program, in the order of the splits: the order of arrival has no say.

    An empty split's partial must be zeros, as the kernels leave it.
    """
    GROUP: gl.constexpr = min(4, SPLITS)  # partials on their way at once; the loop is rolled: less cold code
    offs_h = gl.set_auto_layout(gl.arange(0, 16)[:, None], LAYOUT)
    offs = offs_h * 512 + gl.arange(0, 512)[None, :]
    m = gl.full([16, 1], -3.4e38, gl.float32, LAYOUT)  # not -inf: inf - inf is NaN
    norm = gl.zeros([16, 1], gl.float32, LAYOUT)
    acc = gl.zeros([16, 512], gl.float32, LAYOUT)
    for first in range(0, SPLITS, GROUP):
        lses = ()
        parts = ()
        m_new = m
        for i in gl.static_range(GROUP):
            s = gl.minimum(first + i, SPLITS - 1)
            lse = gl.load(lse_ptr + s * 16 + offs_h, cache_modifier=".cg")
            lses = lses + (gl.where(first + i < SPLITS, lse, float("-inf")),)
            parts = parts + (gl.load(part_ptr + s * 8192 + offs, cache_modifier=".cg"),)
            m_new = gl.maximum(m_new, lses[i])
        rescale = gl.exp2(m - m_new)
        norm *= rescale
        acc *= rescale
        for i in gl.static_range(GROUP):
            w = gl.exp2(lses[i] - m_new)
            norm += w
            acc += parts[i].to(gl.float32) * w
        m = m_new
    o = acc * (kv_scale / gl.where(norm == 0.0, 1.0, norm))
    gl.store(out_ptr + offs, o.to(gl.bfloat16))


# ---- Gluon: Hopper ----


@_gluon_jit
def _hopper_issue(kn_desc, kr_desc, kn_smem, kr_smem, bars, slot, row, kv_end):
    """TMA of the 64 raw rows at `row`, 576 bytes each, into ring slot `slot`, if that is before `kv_end`."""
    bar = bars.index(slot)
    pred = row < kv_end
    mbarrier.expect(bar, 64 * 576, pred=pred)
    tma.async_copy_global_to_shared(kn_desc, [row, 0], bar, kn_smem.index(slot), pred=pred)
    tma.async_copy_global_to_shared(kr_desc, [row, 512], bar, kr_smem.index(slot), pred=pred)


@_gluon_jit
def _exp2(x):
    """2^x by the special function unit, denormal results flushed to zero."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@_gluon_jit
def _hopper_pv(acc_even, acc_odd, p_smem, v_smem, LAYOUT: gl.constexpr):
    """O^T += V^T P^T for 128 dims: V^T from registers, P^T from shared memory.

    v_smem views two neighbouring dims as one int16, so a transposing ldmatrix fetches V^T; one byte permute and two
    conversions split a register of two tokens into the even and the odd dim.
    """
    even, odd = gl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $2, 0, 0x3120; mov.b32 {l, h}, t;"
        " cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
        "=r,=r,r", [v_smem.permute((1, 0)).load(gl.DotOperandLayout(0, LAYOUT, 2))], dtype=(gl.float16, gl.float16),
        is_pure=True, pack=2,
    )  # fmt: skip
    acc_even = warpgroup_mma(even, p_smem, acc_even, is_async=True)
    acc_odd = warpgroup_mma(odd, p_smem, acc_odd, is_async=True)
    return acc_even, acc_odd


@_gluon_jit
def _hopper_clear_tail(kn_tile, valid):
    """Zeroes rows [valid, 64) of a tile's latent part: they may hold NaN, which a weight of zero does not silence."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    words = kn_tile._reinterpret(gl.int32, [64, 128], gl.NVMMASharedLayout(128, 32, 2))
    keep = gl.arange(0, 64)[:, None] < valid
    for c in gl.static_range(4):
        chunk = words.slice(c * 32, 32, 1)
        rows = chunk.load(LAYOUT)
        chunk.store(gl.where(keep, rows, gl.zeros_like(rows)))


@_gluon_jit
def _hopper_store(ptr, even, odd):
    """128 dims of the output, [64 dim pairs, 16 heads] each of even and odd ones, to `ptr` [16, 512]."""
    offs_h = gl.arange(0, 16)[None, :, None] * 512
    offs = offs_h + gl.arange(0, 64)[:, None, None] * 2 + gl.arange(0, 2)[None, None, :]
    gl.store(ptr + offs, gl.join(even, odd).to(ptr.dtype.element_ty))


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
    kv_len,  # tokens of a sequence when all have as many, else 0
    SPLITS: gl.constexpr,
    ONE_LAUNCH: gl.constexpr,
):
    """Grid (total_q, SPLITS), 4 warps, tiles of 64 tokens in a two-slot TMA ring of raw fp8 rows, 94 KB.

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
    X_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])  # [64 tokens or dim pairs, 16]
    t = gl.program_id(0)
    split = gl.program_id(1)

    # Q before KV: it would queue behind the tiles.
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    qn_raw = gl.allocate_shared_memory(gl.bfloat16, [16, 512], PLAIN)
    qr_raw = gl.allocate_shared_memory(gl.bfloat16, [16, 64], PLAIN)
    q_heads = q_ptr + t.to(gl.int64) * stride_q_t + gl.set_auto_layout(gl.arange(0, 16)[:, None], Q_LAYOUT) * stride_q_h
    async_copy.async_copy_global_to_shared(qn_raw, q_heads + gl.arange(0, 512)[None, :])
    async_copy.async_copy_global_to_shared(qr_raw, q_heads + 512 + gl.arange(0, 64)[None, :])
    async_copy.commit_group()

    kn_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, 512], K_SMEM)
    kr_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, 64], R_SMEM)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    # Tiles are dealt in turn, so that a sequence's splits read neighbouring memory at about the same time. The first
    # ones start from where sequences of kv_len tokens have them; when kv_indptr arrives and differs, they start again.
    STEP: gl.constexpr = SPLITS * BLOCK_N
    row = t // s_q * kv_len + split * BLOCK_N
    end = (t // s_q + 1) * kv_len - (s_q - 1 - t % s_q)
    for i in gl.static_range(STAGES):
        _hopper_issue(kn_desc, kr_desc, kn_smem, kr_smem, bars, i, row + i * STEP, end)
    kv_scale = gl.load(kv_scale_ptr)
    kv_start, kv_end, _, _ = _tile_range(kv_indptr, t, s_q, split, SPLITS, BLOCK_N)
    if (kv_start + split * BLOCK_N != row) | (kv_end != end):
        for i in gl.static_range(STAGES):
            if row + i * STEP < end:
                mbarrier.wait(bars.index(i), 0)
            mbarrier.invalidate(bars.index(i))
            mbarrier.init(bars.index(i), count=1)
        row = kv_start + split * BLOCK_N
        for i in gl.static_range(STAGES):
            _hopper_issue(kn_desc, kr_desc, kn_smem, kr_smem, bars, i, row + i * STEP, kv_end)
    n = gl.cdiv(gl.maximum(kv_end - row, 0), STEP)

    # Q as hi + lo e4m3 under a power-of-two scale per head: rows 0-15 of the B operand are hi, 16-31 lo. A thread reads
    # what it has copied itself, so it waits for no other.
    async_copy.wait_group(0)
    qn = qn_raw.load(Q_LAYOUT).to(gl.float32)
    qr = qr_raw.load(Q_LAYOUT).to(gl.float32)
    up, down = _power_of_two_scale(gl.maximum(gl.max(gl.abs(qn), 1), gl.max(gl.abs(qr), 1)))
    qn = gl.join(*_hi_lo(qn, up[:, None])).permute((2, 0, 1)).reshape([32, 512])
    qr = gl.join(*_hi_lo(qr, up[:, None])).permute((2, 0, 1)).reshape([32, 64])
    qn_smem = gl.allocate_shared_memory(gl.float8e4nv, [32, 512], K_SMEM, qn)
    qr_smem = gl.allocate_shared_memory(gl.float8e4nv, [32, 64], R_SMEM, qr)
    fence_async_shared()
    logit_scale = gl.convert_layout(down, gl.SliceLayout(0, X_LAYOUT)) * (kv_scale * softmax_scale)

    # The four warps' maxima meet in max_smem; MAX_LAYOUT hands each thread all four for its own heads.
    MAX_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [1, 0], [2, 0]], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, 16]
    )
    max_smem = gl.allocate_shared_memory(gl.float32, [4, 16], PLAIN)
    p_smem = gl.allocate_shared_memory(gl.float16, [BLOCK_N, 16], gl.NVMMASharedLayout(32, 16, 2))
    m = gl.full([16], float("-inf"), gl.float32, gl.SliceLayout(0, X_LAYOUT))
    norm = gl.zeros([BLOCK_N, 16], gl.float32, X_LAYOUT)
    zero = gl.zeros([64, 16], gl.float32, X_LAYOUT)
    acc = (zero, zero, zero, zero, zero, zero, zero, zero)
    offs_n = gl.arange(0, BLOCK_N)[:, None]
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
        x = gl.where(offs_n < valid, x, float("-inf"))
        max_smem.store(gl.max(x.reshape([4, 16, 16]), 1))
        m_tile = gl.max(max_smem.load(MAX_LAYOUT), 0)
        m_new = gl.maximum(m, gl.convert_layout(m_tile, gl.SliceLayout(0, X_LAYOUT), assert_trivial=True))
        r = _exp2(m - m_new)[None, :]
        p = _exp2(x - m_new[None, :])
        p_smem.store(p.to(gl.float16))
        norm = norm * r + p
        m = m_new
        fence_async_shared()
        pv = ()
        for d in gl.static_range(4):
            pv = pv + _hopper_pv(acc[2 * d] * r, acc[2 * d + 1] * r, p_smem, v_smem.slice(64 * d, 64, 1), X_LAYOUT)
        acc = warpgroup_mma_wait(0, deps=pv)
        _hopper_issue(kn_desc, kr_desc, kn_smem, kr_smem, bars, slot, row + (i + STAGES) * STEP, kv_end)
        slot ^= 1
        phase ^= slot ^ 1

    total = gl.sum(norm, 0)
    factor = (1.0 / gl.where(n > 0, total, 1.0))[None, :]
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
    for d in gl.static_range(4):
        _hopper_store(dst + 128 * d, acc[2 * d] * factor, acc[2 * d + 1] * factor)
    if ONE_LAUNCH:
        if _arrive_last(ticket_ptr + t, SPLITS):
            row_parts = t.to(gl.int64) * SPLITS
            MERGE_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
            _merge_partials(part_ptr + row_parts * 8192, lse_ptr + row_parts * 16, out_ptr + t.to(gl.int64) * 8192,
                            kv_scale, SPLITS, MERGE_LAYOUT)  # fmt: skip


# ---- Gluon: gfx950 ----


@_gluon_builtin
def _mfma_k128(a, b, acc, a_scale=None, b_scale=None, _semantic=None):
    """acc + a @ b with 128 dims an instruction, which `cdna4` lacks in three dimensions: fp8 [.., m, 128] by fp8
    [.., 128, n] or, under E8M0 scales [.., m, 4] and [.., n, 4], by packed E2M1 [.., 64, n].
    """
    e4m3, e2m1 = (_semantic._str_to_fp_type(name) for name in ("e4m3", "e2m1"))
    scales = [None if x is None else x.handle for x in (a_scale, b_scale)]
    handle = _semantic.builder.create_dot_scaled(
        a.handle, scales[0], e4m3, b.handle, scales[1], e4m3 if b_scale is None else e2m1, False, True, True, acc.handle
    )
    return gl.tensor(handle, acc.type)


@_gluon_builtin
def _view(smem, dtype, shape, layout, _semantic=None):
    """The bytes of `smem` as another type, shape and layout: a method that Triton 3.9 renames."""
    method = getattr(smem, "_reinterpret", None) or smem.reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@_gluon_constexpr
def _mfma(waves, k):
    """Products [waves, 16, n], a wave each, by instructions of `k` dims."""
    return AMDMFMALayout(4, [16, 16, k], True, [waves, 1, 1])


@_gluon_constexpr
def _tile_layout(waves, width, tokens):
    """[waves, 64, width] bytes, two buffers of 32 rows a wave; bit i of a row's number stands for row tokens[i]. Each
    XORs its key onto the row's 16-byte units, against bank conflicts.
    """
    keys = (1, 2, 4, 4, 0, 0) if width == 512 else (0, 0, 0, 1, 2, 0)
    return gl.SharedLinearLayout(
        [[0, 0, 1 << i] for i in range(width.bit_length() - 1)]
        + [[0, row, 16 * key] for row, key in zip((*tokens, 32), keys, strict=True)]
        + [[1 << i, 0, 0] for i in range(waves.bit_length() - 1)]
    )


@_gluon_jit
def _copy_offsets(stride_kv_t, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Offsets of what fills [waves, ROWS, WIDTH] bytes of LDS in order: they carry the swizzle of `_tile_layout`."""
    WAVES: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 1024 // WIDTH, WIDTH // 16], [WAVES, 1, 1], [2, 1, 0])
    row = gl.arange(0, ROWS)[None, :, None]
    key = (row & 7) ^ ((row >> 1) & 4) if WIDTH == 512 else row >> 3
    byte = gl.arange(0, WIDTH)[None, None, :] ^ (key * 16)
    return gl.set_auto_layout((gl.arange(0, WAVES)[:, None, None] * 32 + row) * stride_kv_t + byte, LAYOUT)


@_gluon_jit
def _head_offsets(stride, WIDTH: gl.constexpr, VEC: gl.constexpr):
    """Offsets of [16, WIDTH], VEC neighbours a lane."""
    WAVES: gl.constexpr = gl.num_warps()
    ALL: gl.constexpr = gl.BlockedLayout([WAVES, 1, VEC], [1, 16 // WAVES, 4 * WAVES], [1, WAVES, 1], [2, 1, 0])
    offs = gl.arange(0, 16)[:, None] * stride + gl.arange(0, WIDTH)[None, :]
    return gl.set_auto_layout(offs, gl.SliceLayout(0, ALL))


@_gluon_jit
def _gfx950_start(q_ptr, kv_indptr, s_q, stride_q_t, stride_q_h, SPLITS: gl.constexpr):
    """Q's latent and rope parts, float32 [16, 512] and [16, 64], number of tiles, their first row and number of rows.

    Without a tile row 0, which exists, stands in. Grid (total_q, SPLITS): programs go round the 8 XCDs, and with t
    first, the splits of a row share an XCD when 8 divides total_q.
    """
    TILE: gl.constexpr = 32 * gl.num_warps()
    t = gl.program_id(0)
    # Q before KV: loads complete in order.
    q_row = q_ptr + t.to(gl.int64) * stride_q_t
    qn = cdna4.buffer_load(q_row, _head_offsets(stride_q_h, 512, 8)).to(gl.float32)
    qr = cdna4.buffer_load(q_row + 512, _head_offsets(stride_q_h, 64, 4)).to(gl.float32)
    kv_start, kv_end, first, last = _tile_range(kv_indptr, t, s_q, gl.program_id(1), SPLITS, TILE)
    row = gl.where(last > first, kv_start + first * TILE, 0).to(gl.int64)
    rows = gl.where(last > first, gl.minimum(kv_end - kv_start, last * TILE) - first * TILE, 1)
    return qn, qr, last - first, row, rows


@_gluon_jit
def _query_chunk(smem, c: gl.constexpr):
    """128 dims of fp8 [16, 512] in LDS as an operand [waves, 16, 128]."""
    WAVES: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.DotOperandLayout(0, _mfma(WAVES, 128), 16))
    x = cdna4.async_copy.load_shared_relaxed(smem.slice(128 * c, 128, 1), LAYOUT).to(gl.int8, bitcast=True)
    return (gl.expand_dims(x, 0) | gl.zeros([WAVES, 1, 1], gl.int8)).to(gl.float8e4nv, bitcast=True)


@_gluon_jit
def _gfx950_query(qn, qr, scale):
    """Q as fp8 pairs: operands of 128 dims, four of the latent part's hi and one of rope's hi and lo; the latent part's
    lo [16, 512] in LDS; and what turns products into logits, [waves, 16].
    """
    WAVES: gl.constexpr = gl.num_warps()
    STAT: gl.constexpr = gl.SliceLayout(2, gl.DotOperandLayout(0, _mfma(WAVES, 32), 8))
    amax_r = gl.convert_layout(gl.max(gl.abs(qr), 1), gl.SliceLayout(1, qn.type.layout))
    up, down = _power_of_two_scale(gl.maximum(gl.max(gl.abs(qn), 1), amax_r))
    qn_hi, qn_lo = _hi_lo(qn, up[:, None])
    qr_hi, qr_lo = _hi_lo(qr, gl.convert_layout(up, gl.SliceLayout(1, qr.type.layout))[:, None])
    # Not 0, as for zeros over a cache of zeros: a masked score is -inf.
    least = gl.full([WAVES, 1], 1e-37, gl.float32)
    logit_scale = gl.convert_layout(down, gl.SliceLayout(0, STAT))[None, :] * scale + least
    # One piece of LDS hands out rope, then hi.
    smem = gl.allocate_shared_memory(gl.float8e4nv, [16, 512], gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
    smem.slice(0, 64, 1).store(qr_hi)
    smem.slice(64, 64, 1).store(qr_lo)
    rope = _query_chunk(smem, 0)
    smem.store(qn_hi)
    hi = [_query_chunk(smem, c) for c in (0, 1, 2, 3)]
    smem.store(qn_lo)
    return hi + (rope,), smem, logit_scale


@_gluon_jit
def _gfx950_copy(smem, ptr, offs, last):
    """To LDS, 16 bytes a lane. Past `last`, the sequence's end, it reads at `last`: nothing foreign, nothing NaN."""
    offs = gl.minimum(offs, last)
    offs = gl.max_contiguous(gl.multiple_of(offs, [1, 1, 16]), [1, 1, 16])
    cdna4.async_copy.buffer_load_to_shared(smem, ptr, offs)


@_gluon_jit
def _gfx950_issue(tile, offs, kv_rows, left, stride_kv_t, BUF: gl.constexpr):
    """Starts loading the tile at `kv_rows`, of which `left` > 0 rows count, into buffer BUF."""
    nope, rope = tile
    offs_n, offs_r = offs
    last = (gl.minimum(left, 32 * gl.num_warps()) - 1) * stride_kv_t
    half = gl.minimum(16 * stride_kv_t, last)
    _gfx950_copy(nope.slice(BUF * 32, 16, 1), kv_rows, offs_n, last + 496)
    _gfx950_copy(nope.slice(BUF * 32 + 16, 16, 1), kv_rows + half, offs_n, last - half + 496)
    _gfx950_copy(rope.slice(BUF * 32, 32, 1), kv_rows + 512, offs_r, last + 48)
    cdna4.async_copy.commit_group()


@_gluon_jit
def _gfx950_by_token(x, left):
    """Scores [waves, 16, 32] of a tile with `left` rows by token, -inf past the end.

    They lie as P V takes them because Q K^T takes token 8 b + 4 a + c as its row 16 a + 4 b + c.
    """
    WAVES: gl.constexpr = gl.num_warps()
    x = x.reshape([WAVES, 16, 2, 4, 4]).permute([0, 1, 3, 2, 4]).reshape([WAVES, 16, 32])
    x = gl.convert_layout(x, gl.DotOperandLayout(0, _mfma(WAVES, 32), 8), assert_trivial=True)
    if left < 32 * WAVES:
        token = gl.arange(0, WAVES)[:, None, None] * 32 + gl.arange(0, 32)[None, None, :]
        x = gl.where(token < left, x, float("-inf"))
    return x


@_gluon_jit
def _gfx950_step(tile, q, q_lo, state, left, logit_scale, BUF: gl.constexpr, PAIRS: gl.constexpr):
    """The tile in buffer BUF: a wave takes 32 tokens, all heads and dims, so waves meet only at the end.

    tile: LDS, latent [waves, 64, 512] and rope [waves, 64, 64]. q, q_lo, logit_scale: of `_gfx950_query`. state: what P
    is relative to and its sum, [waves, 16], and four accumulators [waves, 16, 128]. left: rows from this tile on.
    """
    WAVES: gl.constexpr = gl.num_warps()
    M128: gl.constexpr = _mfma(WAVES, 128)
    M32: gl.constexpr = _mfma(WAVES, 32)
    K: gl.constexpr = gl.DotOperandLayout(1, M128, 16)
    K_TOKENS: gl.constexpr = (1, 2, 16, 4, 8)
    V_TOKENS: gl.constexpr = (1, 2, 4, 8, 16)
    nope, rope = tile
    kn = _view(nope, gl.float8e4nv, nope.shape, _tile_layout(WAVES, 512, K_TOKENS)).permute([0, 2, 1])
    kr = _view(rope, gl.float8e4nv, rope.shape, _tile_layout(WAVES, 64, K_TOKENS)).permute([0, 2, 1])
    vn = _view(nope, gl.float8e4nv, nope.shape, _tile_layout(WAVES, 512, V_TOKENS)).slice(BUF * 32, 32, 1)
    base, norm, acc = state

    # An ordinary shared load would wait for the other buffer's loads too. Rope goes under Q's hi and under its lo.
    k = cdna4.async_copy.load_shared_relaxed(kr.slice(BUF * 32, 32, 2), gl.DotOperandLayout(1, M32, 16))
    k = gl.convert_layout(gl.join(k, k).permute([0, 3, 1, 2]).reshape([WAVES, 128, 32]), K, assert_trivial=True)
    x = _mfma_k128(q[4], k, gl.zeros([WAVES, 16, 32], gl.float32, M128))
    for c in gl.static_range(4):
        k = cdna4.async_copy.load_shared_relaxed(kn.slice(128 * c, 128, 1).slice(BUF * 32, 32, 2), K)
        x = _mfma_k128(q[c], k, x)
        if PAIRS:
            x = _mfma_k128(_query_chunk(q_lo, c), k, x)

    x = _gfx950_by_token(x, left)
    # P up to 2^8 uses e4m3's range, so that lo is no denormal.
    new = gl.maximum(base, gl.max(x, 2) * logit_scale - 8.0)
    p = gl.exp2(x * logit_scale[:, :, None] - new[:, :, None])
    rescale = gl.exp2(base - new)
    norm = norm * rescale + gl.sum(p, 2)
    rescale = gl.convert_layout(rescale, gl.SliceLayout(2, M32), assert_trivial=True)
    p_hi = p.to(gl.float8e4nv)
    p_lo = (p - p_hi.to(gl.float32)).to(gl.float8e4nv)
    out = ()
    for c in gl.static_range(4):
        v = cdna4.async_copy.load_shared_relaxed(vn.slice(128 * c, 128, 2), gl.DotOperandLayout(1, M32, 8))
        a = cdna4.mfma(p_hi, v, acc[c] * rescale[:, :, None])
        if PAIRS:
            a = cdna4.mfma(p_lo, v, a)
        out = out + (a,)
    return new, norm, out


@_gluon_jit
def _gfx950_finish(
    state, kv_scale, out_ptr, part_ptr, lse_ptr, ticket_ptr, SPLITS: gl.constexpr, ONE_LAUNCH: gl.constexpr
):
    """Adds up the waves' shares: by wave and head what P is relative to and its sum, [waves, 16], and the output in
    pieces [waves, 16, ..]. Writes the output, or the partial and, as the last of a query row to arrive, the output.
    """
    base, norm, acc = state
    WIDTH: gl.constexpr = acc[0].shape[2]
    top = gl.max(base, 0)
    weight = gl.exp2(base - top[None, :])
    total = gl.sum(norm * weight, 0)
    weight = weight / gl.where(total == 0.0, 1.0, total)[None, :]
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 16, [2, 1, 0])
    shares = gl.allocate_shared_memory(gl.float32, [gl.num_warps(), 16, 512], SWIZZLED)
    for c in gl.static_range(512 // WIDTH):
        shares.slice(WIDTH * c, WIDTH, 2).store(acc[c])

    offs = _head_offsets(512, 512, 8)
    LAYOUT: gl.constexpr = offs.type.layout
    weight = gl.convert_layout(weight, gl.SliceLayout(2, LAYOUT.parent))[:, :, None]
    o = gl.sum(shares.load(LAYOUT.parent) * weight, 0)
    t, split = gl.program_id(0).to(gl.int64), gl.program_id(1)
    out_row = out_ptr + t * 8192
    parts = part_ptr + t * SPLITS * 8192
    lses = lse_ptr + t * SPLITS * 16
    if SPLITS == 1:
        gl.store(out_row + offs, (o * kv_scale).to(gl.bfloat16))
    else:
        gl.store(parts + split * 8192 + offs, o.to(part_ptr.dtype.element_ty))
        gl.store(lses + split * 16 + gl.arange(0, 16), top + gl.log2(total))
    if ONE_LAUNCH:
        # XCDs share no L2. Every wave waits for its own stores, as gfx950's s_barrier does not; then the release in
        # `_arrive_last` writes this XCD's L2 back before it takes the ticket, and the last program's acquire drops
        # stale lines, in every wave rather than in the one that took the ticket.
        gl.inline_asm_elementwise("s_waitcnt vmcnt(0) // $0", "=v", [], dtype=gl.int32, is_pure=False, pack=1)
        if _arrive_last(ticket_ptr + t, SPLITS):
            gl.inline_asm_elementwise("buffer_inv sc1 // $0", "=v", [], dtype=gl.int32, is_pure=False, pack=1)
            _merge_partials(parts, lses, out_row, kv_scale, SPLITS, LAYOUT)


@_gluon_jit
def _decode_fp8_gfx950(
    q_ptr,  # bf16 [total_q, 16, 576]
    kv_ptr,  # fp8 e4m3 [total_kv, 576], rows of 16-byte multiples
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
    stride_kv_t,
    SPLITS: gl.constexpr,
    PAIRS: gl.constexpr,  # Q and P as hi + lo fp8 pairs, else rounded to fp8, but for Q's rope part
    ONE_LAUNCH: gl.constexpr,
):
    """Grid (total_q, SPLITS), 1, 2 or 4 waves, tiles of 32 tokens a wave in two LDS buffers of raw fp8 rows.

    Q, K, P and V stay fp8; V comes through the transposing LDS read. docs/gfx950.md has the layouts.
    """
    WAVES: gl.constexpr = gl.num_warps()
    gl.static_assert(WAVES > 1 or not ONE_LAUNCH)
    TILE: gl.constexpr = 32 * WAVES
    qn, qr, n_tiles, row, left = _gfx950_start(q_ptr, kv_indptr, s_q, stride_q_t, stride_q_h, SPLITS)
    kv_scale = gl.load(kv_scale_ptr)
    kv_rows = kv_ptr + row * stride_kv_t
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    tile = [gl.allocate_shared_memory(gl.float8e4nv, [WAVES, 64, width], FLAT) for width in (512, 64)]
    offs = (_copy_offsets(stride_kv_t, 16, 512), _copy_offsets(stride_kv_t, 32, 64))
    _gfx950_issue(tile, offs, kv_rows, left, stride_kv_t, 0)

    q, q_lo, logit_scale = _gfx950_query(qn, qr, kv_scale * softmax_scale)
    # Not -inf: a wave with all rows past the end keeps it, and inf - inf is NaN.
    base = gl.full_like(logit_scale, -3.4e38)
    acc = (gl.zeros([WAVES, 16, 128], gl.float32, _mfma(WAVES, 32)),) * 4
    state = (base, gl.zeros_like(base), acc)
    for _ in range(0, n_tiles, 2):
        for BUF in gl.static_range(2):
            # This buffer has landed and every wave has read the other one.
            cdna4.async_copy.wait_group(0)
            kv_rows += TILE * stride_kv_t
            if left > TILE:
                _gfx950_issue(tile, offs, kv_rows, left - TILE, stride_kv_t, 1 - BUF)
            if BUF == 0 or left > 0:
                state = _gfx950_step(tile, q, q_lo, state, left, logit_scale, BUF, PAIRS)
            left -= TILE
    # Without a tile the one that stands in is still on its way.
    cdna4.async_copy.wait_group(0)
    _gfx950_finish(state, kv_scale, out_ptr, part_ptr, lse_ptr, ticket_ptr, SPLITS, ONE_LAUNCH)


# ---- Gluon: gfx950, mxfp4 ----


@_gluon_constexpr
def _scale_layout(rows):
    """[4 waves, rows, 4]: a row a lane, one of the four a group of 16 lanes."""
    lanes = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 0, 1], [0, 0, 2]]
    return gl.DistributedLinearLayout([[0, 16, 0]][: rows // 32], lanes, [[1, 0, 0], [2, 0, 0]], [], [4, rows, 4])


@_gluon_jit
def _mxfp4_rows(stride, last):
    """Offsets [4, 32] of a tile's rows in the order of `_gfx950_by_token`, `last` standing in for those past it."""
    row = gl.arange(0, 32)[None, :]
    token = gl.arange(0, 4)[:, None] * 32 + (row & 12) * 2 + (row & 16) // 4 + (row & 3)
    return gl.minimum(token * stride, last * stride)


@_gluon_jit
def _mxfp4_load(kv_rows, scale_rows, left, stride_kv_t, stride_scale_t):
    """Operands of the tile at `kv_rows`, of which `left` > 0 rows count: four chunks of 128 dims, rope, and the
    words of scales of both. Past the end it reads the last row: nothing foreign, nothing NaN.

    Chunk c takes block 4 g + c for lane group g, so that a lane's scales of four chunks are one word.
    """
    last = gl.minimum(left, 128) - 1
    rows = _mxfp4_rows(stride_kv_t, last)[:, None, :]
    byte = gl.arange(0, 64)[None, :, None]
    k = ()
    for c in gl.static_range(5):
        # Rope's 64 dims come twice: under Q's hi and under its lo.
        offs = rows + (256 + byte % 32 if c == 4 else 16 * c + byte // 16 * 64 + byte % 16)
        offs = gl.max_contiguous(gl.multiple_of(offs, [1, 16, 1]), [1, 16, 1])
        offs = gl.set_auto_layout(offs, gl.DotOperandLayout(1, _mfma(4, 128), 16))
        k = k + (cdna4.buffer_load(kv_rows, offs),)
    rows = gl.set_auto_layout(_mxfp4_rows(stride_scale_t, last)[:, :, None], _scale_layout(32))
    words = cdna4.buffer_load(scale_rows, rows + gl.arange(0, 4)[None, None, :])
    return k, words, cdna4.buffer_load(scale_rows, rows + 4)


@_gluon_jit
def _mxfp4_scores(tile, q, values, scales):
    """Q K^T [4, 16, 32 rows] of a tile, whose latent rows and scales go to LDS, token by token."""
    k, words, rope_words = tile
    rows = gl.join(gl.join(k[0], k[2]), gl.join(k[1], k[3])).reshape([4, 4, 16, 2, 4, 4, 4])
    values.store(rows.permute([0, 4, 3, 5, 1, 6, 2]).reshape([4, 32, 256]))
    scales.store(words.reshape([4, 2, 4, 4, 4]).permute([0, 2, 1, 3, 4]).reshape([4, 32, 4]))
    one = gl.full([4, 16, 4], 127, gl.uint8, _scale_layout(16))
    x = gl.zeros([4, 16, 32], gl.float32, _mfma(4, 128))
    scale = (rope_words >> (gl.arange(0, 4)[None, None, :] % 2 * 8)).to(gl.uint8)
    x = _mfma_k128(q[4], k[4], x, one, scale)
    for c in gl.static_range(4):
        scale = (words >> (8 * c)).to(gl.uint8)
        x = _mfma_k128(q[5 + c], k[c], _mfma_k128(q[c], k[c], x, one, scale), one, scale)
    return x


@_gluon_jit
def _mxfp4_step(x, words, values, scales, state, base, left, logit_scale):
    """A tile's scores and its share of the output, P being 2^(logit - base): nothing is rescaled."""
    V: gl.constexpr = gl.DotOperandLayout(1, _mfma(4, 32), 8)
    top, norm, large, acc = state
    x = _gfx950_by_token(x, left)
    p = gl.exp2(x * logit_scale[:, :, None] - base[:, :, None]).to(gl.bfloat16)
    # By lane, which holds 8 tokens.
    x_top = gl.max(x.reshape([4, 16, 4, 8]), 3)
    p_sum = gl.sum(p.to(gl.float32).reshape([4, 16, 4, 8]), 3)
    top = gl.maximum(top, gl.convert_layout(x_top, top.type.layout, assert_trivial=True))
    norm += gl.convert_layout(p_sum, top.type.layout, assert_trivial=True)
    # A lane's values all belong to one block, so the conversion applies their scales; only their exponents count, and
    # NaN has reached the scores.
    scale = _view(scales, gl.uint8, [4, 32, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])).load(V).to(gl.int32)
    scale = (scale << 23).to(gl.float32, bitcast=True)
    # [4 waves, 32 tokens, 16 blocks x 4 words]: lane l holds 8 tokens, from 8 * (l // 16) on, of block l % 16.
    WORDS: gl.constexpr = gl.BlockedLayout([1, 8, 4], [1, 4, 16], [4, 1, 1], [2, 1, 0])
    v = _view(values, gl.int32, [4, 32, 64], gl.SwizzledSharedLayout(4, 1, 16, [2, 1, 0])).load(WORDS)
    v = gl.split(v.reshape([4, 32, 16, 2, 2]))
    v = gl.split(v[0]) + gl.split(v[1])
    out = ()
    for e in gl.static_range(32):
        # Nibble e of a block. Of v first the words 0 and 2; a pair holds the even dim's bf16 below the odd one's.
        bits = gl.convert_layout(v[e // 8 % 2 * 2 + e // 16], V, assert_trivial=True)
        pair = gl.inline_asm_elementwise(
            f"v_cvt_scalef32_pk_bf16_fp4 $0, $1, $2 op_sel:[{e // 2 % 2},{e // 4 % 2},0]", "=v,v,v", [bits, scale],
            dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        value = (pair >> (16 * (e % 2))).to(gl.int16).to(gl.bfloat16, bitcast=True)
        out = out + (cdna4.mfma(p, value, acc[e]),)
    # The top bit of a byte: its scale is 2^33 or more.
    return top, norm, large | (words & ((words << 1) | (words << 2))), out


@_gluon_jit
def _decode_mxfp4_gfx950(
    q_ptr,  # bf16 [total_q, 16, 576]
    kv_ptr,  # uint8 [total_kv, 288], rows of 16-byte multiples
    scale_ptr,  # int32 [>= total_kv, >= 5], four E8M0 codes each
    kv_indptr,  # int32 [b + 1]
    out_ptr,  # bf16 [total_q, 16, 512]
    part_ptr,  # fp32 [total_q, SPLITS, 16, 512]
    lse_ptr,  # fp32 [total_q, SPLITS, 16]
    ticket_ptr,  # int32 [total_q], zero between launches
    softmax_scale,
    s_q,
    stride_q_t,
    stride_q_h,
    stride_kv_t,
    stride_scale_t,
    SPLITS: gl.constexpr,
    ONE_LAUNCH: gl.constexpr,
):
    """Grid (total_q, SPLITS), 4 waves, tiles of 128 tokens, the next one on its way in registers.

    Scores: Q as hi + lo fp8 against packed K, by the scaled matrix instruction. Output: bf16 P against V, which LDS
    turns round and registers convert, exact. bf16 has float32's range, so P is 2^logit, without a running maximum;
    should sums not surely fit float32, all is done again relative to the maxima, known by then. See docs/mxfp4.md.
    """
    gl.static_assert(gl.num_warps() == 4)
    qn, qr, n_tiles, row, length = _gfx950_start(q_ptr, kv_indptr, s_q, stride_q_t, stride_q_h, SPLITS)
    kv_first = kv_ptr + row * stride_kv_t
    scale_first = scale_ptr + row * stride_scale_t
    tile = _mxfp4_load(kv_first, scale_first, length, stride_kv_t, stride_scale_t)

    # Blocks of 32 dims in the order in which K's chunks take them.
    qn = qn.reshape([16, 4, 4, 32]).permute([0, 2, 1, 3]).reshape([16, 512])
    q, q_lo, logit_scale = _gfx950_query(qn, qr, softmax_scale)
    q = q + [_query_chunk(q_lo, c) for c in (0, 1, 2, 3)]

    values = gl.allocate_shared_memory(gl.uint8, [4, 32, 256], gl.SwizzledSharedLayout(16, 1, 16, [2, 1, 0]))
    scales = gl.allocate_shared_memory(gl.int32, [4, 32, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    base = gl.zeros_like(logit_scale)
    # By head and lane the largest score and the sum of P; what tells large scales; an accumulator a dim of a block.
    start = (
        gl.full([4, 16, 4], float("-inf"), gl.float32, _scale_layout(16)),
        gl.zeros([4, 16, 4], gl.float32, _scale_layout(16)),
        gl.zeros([4, 32, 4], gl.int32, _scale_layout(32)),
        (gl.zeros([4, 16, 16], gl.float32, _mfma(4, 32)),) * 32,
    )
    state = start
    tries = 2
    while tries > 0:
        state, kv_rows, scale_rows = start, kv_first, scale_first
        for i in range(n_tiles):
            left = length - 128 * i
            x = _mxfp4_scores(tile, q, values, scales)
            words = tile[1]
            if left > 128:
                kv_rows += 128 * stride_kv_t
                scale_rows += 128 * stride_scale_t
                tile = _mxfp4_load(kv_rows, scale_rows, left - 128, stride_kv_t, stride_scale_t)
            state = _mxfp4_step(x, words, values, scales, state, base, left, logit_scale)
        # A wave without a token keeps the least maximum: inf - inf is NaN.
        top = gl.maximum(gl.convert_layout(gl.max(state[0], 2), base.type.layout) * logit_scale, -3.4e38)
        # Safe are largest P from 2^-16, far above where float32 ends, to 2^64, V up to 6 x 2^32 and 2^26 tokens.
        unsafe = (top > base + 64.0) | ((top < base - 16.0) & (top > -3.4e38))
        large = gl.max(gl.max((state[2] >> 7) & 0x1010101, 2), 1)
        unsafe = gl.max(
            gl.max(unsafe.to(gl.int32), 1) | gl.convert_layout(large, gl.SliceLayout(1, base.type.layout)), 0
        )
        tries = gl.where(unsafe > 0, tries - 1, 0)
        if tries > 0:
            base = top
            tile = _mxfp4_load(kv_first, scale_first, length, stride_kv_t, stride_scale_t)

    # Accumulator e holds dim e of each block of 32.
    acc = state[3]
    for level in gl.static_range(5):
        joined = ()
        for i in gl.static_range(16 >> level):
            joined = joined + (gl.join(acc[i], acc[i + (16 >> level)]),)
        acc = joined
    norm = gl.convert_layout(gl.sum(state[1], 2), base.type.layout)
    state = base, norm, (acc[0].reshape([4, 16, 512]),)
    _gfx950_finish(state, 1.0, out_ptr, part_ptr, lse_ptr, ticket_ptr, SPLITS, ONE_LAUNCH)


# ---- tuning table ----


class Target(NamedTuple):
    """What the tuning table is keyed by: `name` is "cpu", "sm90", "gfx950" or "gpu"; `num_cu` its SMs or CUs."""

    name: str
    num_cu: int = 0


@cache
def _target(device: torch.device) -> Target:
    if device.type != "cuda":
        return Target("cpu")
    properties = torch.cuda.get_device_properties(device)
    gfx950 = getattr(properties, "gcnArchName", "").startswith("gfx950")
    sm90 = torch.version.cuda and (properties.major, properties.minor) == (9, 0)
    return Target("gfx950" if gfx950 else "sm90" if sm90 else "gpu", properties.multi_processor_count)


@dataclass(frozen=True)
class Config:
    """One way to run one shape. `splits == 0` asks `choose_splits`; fields an arm does not use are ignored by it."""

    arm: str
    splits: int = 0
    block_n: int = 64
    num_warps: int = 8
    programs_per_cu: int = 1
    one_launch: bool = False


_TRITON, _CHUNKED = Config("triton_fp8"), Config("torch_chunked", splits=1)
_GPU = (_TRITON, Config("torch_bmm", splits=1), _CHUNKED)
_A16W8 = Config("aiter_own_a16w8", splits=1)
_A8W8 = Config("aiter_own_a8w8", splits=1)
# At scale 1, which fits the official queries: they are standard normal.
_CAST = Config("aiter_own_a8w8_cast", splits=1)


def _gfx950(waves: int, one_launch: bool = False) -> Config:
    """A wave takes 32 tokens a step; a CU holds one program of 4 waves, two of 2 or three of 1."""
    return Config("gfx950_fp8", 0, 32 * waves, waves, {4: 1, 2: 2, 1: 3}[waves], one_launch)


_FP8, _FP8_MERGED = _gfx950(4), _gfx950(4, one_launch=True)
_PACKED = Config("gfx950_mxfp4", 0, 128, 4)
_PACKED_MERGED = replace(_PACKED, one_launch=True)


def _hopper(batch_size: int | None, kv_seq_len: int | None, splits: int) -> tuple:
    return "sm90", batch_size, kv_seq_len, (Config("hopper_fp8", splits=splits, programs_per_cu=2), *_GPU)


def _mi355x(batch_size: int | None, kv_seq_len: int | None, *configs: Config) -> tuple:
    return "gfx950", batch_size, kv_seq_len, (*configs, _TRITON, _CHUNKED)


# Rows of a target's name, a batch size, a KV length (None: any) and the configurations there, best first. The first row
# that matches counts. sm90 splits are the fastest of docs/data/sweep_h200.json; the time beside each is the median
# there, H200, cold cache, beside the reader kernel's over the same bytes.
TABLE: tuple[tuple[str, int | None, int | None, tuple[Config, ...]], ...] = (
    ("cpu", None, None, (_CHUNKED,)),
    _hopper(4, 1024, 16),  # 9.9 us, reader 5.1
    _hopper(4, 8192, 32),  # 15.2 us, reader 10.3
    _hopper(32, 1024, 4),  # 15.3 us, reader 10.3
    _hopper(32, 8192, 8),  # 54.0 us, reader 45.7
    _hopper(64, 1024, 2),  # 22.3 us, reader 16.2
    _hopper(64, 8192, 4),  # 89.8 us, reader 78.9
    _hopper(256, 1024, 1),  # 52.7 us, reader 45.6
    _hopper(256, 8192, 1),  # 293.4 us, reader 275.0
    _hopper(None, None, 0),
    # No row of gfx950 was measured. gfx950_fp8 is ordered by `python -m bench.gfx950 --forms`, whose one launch pays
    # while few splits meet in one program; gfx950_mxfp4, on offer for many long sequences, is predicted faster there by
    # `python -m bench.mxfp4_gfx950`; AITER goes by its schedules' busy CUs and longest CU, see docs/aiter.md.
    _mi355x(4, 1024, _FP8, _gfx950(2), _A16W8, Config("aiter_bf16", splits=1)),  # too few bytes to quantise Q for
    _mi355x(4, 8192, _FP8, _CAST, _A16W8, _A8W8),
    _mi355x(32, 1024, _FP8_MERGED, _FP8, _CAST, _A16W8),
    _mi355x(32, 8192, _FP8_MERGED, _PACKED_MERGED, _CAST, _A16W8),
    _mi355x(64, 1024, _FP8_MERGED, _FP8, _CAST, _A16W8),
    _mi355x(64, 8192, _FP8_MERGED, _PACKED_MERGED, _CAST, _A16W8),
    _mi355x(256, 1024, _FP8, _CAST, _A16W8, _A8W8),
    _mi355x(256, 8192, _FP8, _PACKED_MERGED, _CAST, _A16W8),
    _mi355x(None, None, _FP8, _PACKED, _A16W8, _A8W8),
    ("gpu", None, None, _GPU),
)

# Over the mxfp4 cache wherever it is asked for.
_MXFP4 = (Config("triton_mxfp4"), Config("torch_chunked_mxfp4", splits=1))
# From here on attention over the mxfp4 cache stays within the written tolerance, for standard normal inputs: of 8192
# tokens 99.7 % of the elements do, of 1024 only 74 %, and four sequences vary too much to be sure of 99.5 %
# (`python -m bench.mxfp4_policy`, docs/mxfp4.md).
MXFP4_MIN_KV_LEN, MXFP4_MIN_BATCH = 8192, 32

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


def select_config(
    batch_size: int, kv_seq_len: int, target: Target, q_seq_len: int = 1, kv: str = "auto", arm: str = ""
) -> tuple[Config, ...]:
    """Candidate configurations for a shape, best first: the first matching row of `TABLE`, splits filled in.

    kv: "fp8" leaves out those that read the mxfp4 cache, "mxfp4" all others, "auto" the former below MXFP4_MIN_KV_LEN
    tokens or MXFP4_MIN_BATCH sequences. arm: only its first configuration, whatever it reads.
    """
    shape = (target.name, batch_size, kv_seq_len)
    found = (configs for name, b, s_kv, configs in TABLE if (name, b or batch_size, s_kv or kv_seq_len) == shape)
    configs = next(found, ())
    _expect(bool(configs), "target", f"one of {sorted({name for name, *_ in TABLE})}", repr(target.name))
    many = kv_seq_len >= MXFP4_MIN_KV_LEN and batch_size >= MXFP4_MIN_BATCH
    wanted = {"fp8": (False,), "mxfp4": (True,), "auto": (False, many)}[kv]
    if kv == "mxfp4" or arm:
        configs += (_PACKED, *_MXFP4) if target.name == "gfx950" else _MXFP4
    if arm:
        configs = (next((c for c in configs if c.arm == arm), Config(arm)),)
    else:
        configs = tuple(c for c in dict.fromkeys(configs) if (ARMS[c.arm].kv == "mxfp4") in wanted)
    rows = batch_size * q_seq_len
    num_cu = target.num_cu or 1  # of a CPU, for Triton's interpreter, which runs one program at a time
    return tuple(
        replace(c, splits=c.splits or choose_splits(rows, kv_seq_len, c.block_n, num_cu, c.programs_per_cu))
        for c in configs
    )


# ---- arguments ----


INT32 = range(1 << 31)
# What each number in config may be.
CONFIG_INTS = {
    "batch_size": INT32[1:], "q_seq_len": INT32[1:], "kv_seq_len": INT32, "num_heads": [H_Q], "num_kv_heads": [1],
    "qk_head_dim": [D_QK], "kv_lora_rank": [D_V], "qk_rope_head_dim": [D_ROPE], "v_head_dim": [D_V],
}  # fmt: skip
CONFIG_KEYS = ("sm_scale", *CONFIG_INTS)
_config_values = itemgetter(*CONFIG_KEYS)


def _expect(ok: bool, name: str, expected: str, got: object, error: type[Exception] = ValueError) -> None:
    if not ok:
        raise error(f"{name}: expected {expected}, got {got}")


def check_arguments(data: Any) -> None:
    """Raises TypeError, KeyError or ValueError naming the argument, what was expected and what came.

    Values of the index pointers are checked on the CPU only: reading them on a GPU would synchronise. There it is the
    caller's duty that kv_indptr rises from 0 to total_kv and that no sequence is longer than kv_seq_len.
    """
    _check_tuple("data", data, "q", "kv_data", "qo_indptr", "kv_indptr", "config")
    q, kv_data, qo_indptr, kv_indptr, config = data
    for name, value, keys in (("kv_data", kv_data, CACHE_NAMES), ("config", config, CONFIG_KEYS)):
        _expect(isinstance(value, dict), name, "a dict", type(value).__name__, TypeError)
        for key in keys:
            _expect(key in value, f"{name}[{key!r}]", "the key to be there", sorted(map(str, value)), KeyError)
    for key, values in CONFIG_INTS.items():
        ok = type(config[key]) is int and config[key] in values
        _expect(ok, f"config[{key!r}]", f"an int in {values}", repr(config[key]))
    scale, b, s_q, s_kv, *_ = _config_values(config)
    ok = isinstance(scale, float) and 0 < scale < float("inf")
    _expect(ok, "config['sm_scale']", "a float > 0", repr(scale))

    for key in ("fp8", "mxfp4"):
        _check_tuple(f"kv_data[{key!r}]", kv_data[key], "values", "scales")
    bf16, (fp8, fp8_scale), (mxfp4, mxfp4_scale) = _caches(kv_data)
    check = partial(_check_tensor, getattr(q, "device", None))
    check("q", q, (b * s_q, H_Q, D_QK), torch.bfloat16)
    _expect(q.device.type != "meta", "q", "a tensor that holds values", "one on the meta device")
    check("kv_data['bf16']", bf16, (None, 1, D_QK), torch.bfloat16)
    total_kv = bf16.shape[0]
    _expect(total_kv <= b * s_kv, "config['kv_seq_len']", f"at least the mean of {total_kv} tokens / {b}", s_kv)
    check("kv_data['fp8'][0]", fp8, (total_kv, 1, D_QK), torch.float8_e4m3fn)
    check("kv_data['fp8'][1]", fp8_scale, (1,) * getattr(fp8_scale, "ndim", 1), torch.float32)
    e2m1 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)  # torch before 2.8 lacks it
    check("kv_data['mxfp4'][0]", mxfp4, (total_kv, 1, D_QK // 2), torch.uint8, e2m1)
    check("kv_data['mxfp4'][1]", mxfp4_scale, (total_kv, D_QK // 32), torch.uint8, torch.float8_e8m0fnu, padded=True)
    for name, x, total, least, most in (
        ("qo_indptr", qo_indptr, b * s_q, s_q, s_q), ("kv_indptr", kv_indptr, total_kv, 0, s_kv)
    ):  # fmt: skip
        check(name, x, (b + 1,), torch.int32)
        if q.device.type == "cpu":
            first, *_, last = rows = x.tolist()
            _expect((first, last) == (0, total), name, f"to go from 0 to {total}", f"{first} to {last}")
            for i, (start, end) in enumerate(pairwise(rows)):
                _expect(least <= end - start <= most, name, f"steps of {least} to {most}", f"{end - start} at {i}")


def _check_tuple(name: str, value: Any, *items: str) -> None:
    ok = isinstance(value, (tuple, list))
    got = f"{type(value).__name__} of {len(value)}" if ok else type(value).__name__
    _expect(ok and len(value) == len(items), name, f"the tuple ({', '.join(items)})", got, TypeError)


def _check_tensor(
    device: Any, name: str, x: Any, shape: tuple[int | None, ...], *dtypes: torch.dtype, padded: bool = False
) -> None:
    """`shape`: None is any size; the sizes are the least when `padded`."""
    _expect(isinstance(x, torch.Tensor), name, "a torch.Tensor", type(x).__name__, TypeError)
    _expect(x.dtype in dtypes, name, f"dtype {' or '.join(map(str, dtypes))}", x.dtype, TypeError)
    _expect(x.device == device, name, f"device {device} (that of q)", x.device)
    layout = "a nested one" if x.is_nested else x.layout
    _expect(layout is torch.strided, name, "a dense tensor", layout)
    fits = (size is None or n == size or (padded and n > size) for n, size in zip(x.shape, shape, strict=False))
    expected = f"shape {'of at least ' if padded else ''}{shape} from config and the bf16 cache"
    _expect(x.dim() == len(shape) and all(fits), name, expected, tuple(x.shape))
    _expect(x.numel() == 1 or x.stride(-1) == 1, name, "a last dimension of stride 1", f"strides {x.stride()}")
    grad = x.requires_grad and torch.is_grad_enabled()
    _expect(not grad, name, "no gradient to be asked for (detach it or use torch.no_grad)", "requires_grad=True")


class Problem(NamedTuple):
    """All that a call's checks, the choice of its arm and its buffers depend on, read without touching the device."""

    device: torch.device
    batch_size: int
    q_seq_len: int
    kv_seq_len: int
    sm_scale: float
    # Every sequence has kv_seq_len > 0 tokens: as none is longer, that is so when they add up to total_kv.
    uniform: bool
    aligned: bool  # addresses and row strides of Q and of a non-empty fp8 cache are multiples of 16 bytes
    packed: bool  # so are those of Q and of a non-empty mxfp4 cache; its scales come in whole words
    contiguous: bool  # Q and the bf16 and fp8 caches; of the bf16 one also the address is a multiple of 16 bytes
    rest: tuple = ()  # what only the checks and the settings see

    @property
    def total_q(self) -> int:
        return self.batch_size * self.q_seq_len


def problem_of(data: tuple) -> Problem:
    """The problem that a call poses; any exception where `check_arguments` would raise its own.

    Of the number of cached tokens only what matters enters, so that a growing cache stays one problem.
    """
    q, kv_data, qo_indptr, kv_indptr, config = data
    bf16, (fp8, fp8_scale), (mxfp4, scales) = _caches(kv_data)
    values = _config_values(config)
    sm_scale, b, s_q, s_kv, *dims = values
    total_kv, width = bf16.shape[0], scales.shape[-1]
    layouts = [
        (x.dtype, x.device, x.stride(), x.requires_grad and torch.is_grad_enabled())
        for x in (q, qo_indptr, kv_indptr, fp8_scale, bf16, fp8, mxfp4, scales)
    ]
    stride_q_t, stride_q_h, _ = q.stride()
    bits = q.data_ptr() | 2 * (stride_q_t | stride_q_h)
    words = total_kv > 0 and width >= 20 and (scales.data_ptr() | scales.stride()[0] | width) % 4 == 0
    return Problem(
        q.device, b, s_q, s_kv, sm_scale, 0 < total_kv == b * s_kv,
        total_kv > 0 and (bits | fp8.data_ptr() | fp8.stride()[0]) % 16 == 0,
        words and (bits | mxfp4.data_ptr() | mxfp4.stride()[0]) % 16 == 0,
        q.is_contiguous() and bf16.is_contiguous() and fp8.is_contiguous() and bf16.data_ptr() % 16 == 0,
        (
            *layouts,
            *[x.shape for x in (q, qo_indptr, kv_indptr, fp8_scale)],
            *[x.shape[1:] for x in (bf16, fp8, mxfp4, scales)],
            fp8.shape[0] == mxfp4.shape[0] == total_kv <= scales.shape[0],
            total_kv <= b * s_kv,
            *dims,
            *map(type, values),
            os.environ.get("MLA_BACKEND"),
            os.environ.get("MLA_KV"),
        ),
    )  # fmt: skip


# ---- launchers ----


_SCRATCH: dict[tuple, Any] = {}


def _scratch(key: tuple, make: Callable[[], Any]) -> Any:
    """What `make` made when `key` was new; never inference tensors, which nothing outside that mode could write to."""
    kept = _SCRATCH.get(key)
    if kept is None:
        with torch.inference_mode(False):
            kept = _SCRATCH.setdefault(key, make())
    return kept


def _buffer(
    name: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, make: Callable = torch.empty
) -> torch.Tensor:
    return _scratch((name, shape, dtype, device), lambda: make(shape, dtype=dtype, device=device))


def _output(problem: Problem) -> torch.Tensor:
    """bf16 (total_q, 16, 512), one for each shape and device, reused by every call."""
    name = ("output", problem.batch_size, problem.q_seq_len, problem.kv_seq_len)
    return _buffer(name, (problem.total_q, H_Q, D_V), torch.bfloat16, problem.device)


def _split_k(
    data: tuple, problem: Problem, config: Config, kernel: Any, cache: tuple, strides: tuple, **options
) -> torch.Tensor:
    """One launch of a decode `kernel`, and one of the combine where partials are left.

    cache: its arguments between q and kv_indptr, the last one the scale or scales; strides: those behind Q's. A Gluon
    kernel takes tickets and may combine by itself; its grid is the other way round.
    """
    q, _, _, kv_indptr, _ = data
    total_q, splits, kv_scale = problem.total_q, config.splits, cache[-1]
    out = part = lse = _output(problem)  # stands in where there are no partials
    part_dtype = torch.float16
    if kv_scale.dtype is not torch.float32:  # values that carry their scales may exceed fp16's range
        kv_scale, part_dtype = _buffer("unit scale", (1,), torch.float32, q.device, torch.ones), torch.float32
    if splits > 1:  # normalised partial outputs and their log2-sum-exps
        shape = (total_q, splits, H_Q)
        part = _buffer("part", (*shape, D_V), part_dtype, q.device)
        lse = _buffer("lse", shape, torch.float32, q.device)
    options.setdefault("num_warps", config.num_warps)
    grid, tickets, one_launch = (splits, total_q), [], False
    if kernel is not _decode:
        one_launch = config.one_launch and splits > 1
        grid, tickets = (total_q, splits), [kv_indptr]  # stands in where no ticket is taken
        options["ONE_LAUNCH"] = one_launch
    if one_launch:  # zeros, which every launch leaves so
        tickets = [_buffer("tickets", (total_q,), torch.int32, q.device, torch.zeros)]
    kernel[grid](
        q, *cache, kv_indptr, out, part, lse, *tickets, problem.sm_scale * LOG2E, problem.q_seq_len, *q.stride()[:2],
        *strides, SPLITS=splits, **options,
    )  # fmt: skip
    if splits > 1 and not one_launch:
        # On CUDA its start-up overlaps the end of the decode.
        _launch_combine(part, lse, kv_scale, out, dependent=kernel is _decode_fp8_hopper)
    return out


def combine_shape(splits: int) -> tuple[int, int, int]:
    """BLOCK_D, BLOCK_S and warps of `_combine`: the more splits, the fewer dims a program takes."""
    block_s = triton.next_power_of_2(splits)
    return min(D_V, 2048 // block_s), block_s, 2 if splits <= 4 else 1


def _launch_combine(
    part: torch.Tensor, lse: torch.Tensor, kv_scale: torch.Tensor, out: torch.Tensor, dependent: bool
) -> None:
    total_q, splits = lse.shape[:2]
    options = {"launch_pdl": True} if dependent else {}
    block_d, block_s, num_warps = combine_shape(splits)
    _combine[(D_V // block_d, H_Q, total_q)](
        part, lse, kv_scale, out, SPLITS=splits, BLOCK_S=block_s, BLOCK_D=block_d, DEPENDENT=dependent,
        num_warps=num_warps, **options,
    )  # fmt: skip


def _run_triton(data: tuple, problem: Problem, config: Config) -> torch.Tensor:
    kv, scale = data[1][ARMS[config.arm].kv]
    stride_scale_t = None
    if config.arm == "triton_mxfp4":  # Triton takes neither of its dtypes
        kv, scale = kv.view(torch.uint8), scale.view(torch.uint8)
        stride_scale_t = scale.stride(0)
    return _split_k(
        data, problem, config, _decode, (kv, scale), (kv.stride(0),), BLOCK_N=config.block_n,
        stride_scale_t=stride_scale_t,
    )  # fmt: skip


def _run_hopper_fp8(data: tuple, problem: Problem, config: Config) -> torch.Tensor:
    kv, kv_scale = data[1]["fp8"]
    tiles = (
        TensorDescriptor.from_tensor(kv[:, 0], [64, dims], gl.NVMMASharedLayout(min(dims, 128), 8, 2))
        for dims in (D_V, D_ROPE)
    )
    kv_len = problem.kv_seq_len if problem.uniform else 0
    return _split_k(data, problem, config, _decode_fp8_hopper, (*tiles, kv_scale), (kv_len,), num_warps=4)


def _run_gfx950_fp8(data: tuple, problem: Problem, config: Config) -> torch.Tensor:
    kv, kv_scale = data[1]["fp8"]
    options = {"PAIRS": True, "waves_per_eu": 2}
    return _split_k(data, problem, config, _decode_fp8_gfx950, (kv, kv_scale), (kv.stride(0),), **options)


def _run_gfx950_mxfp4(data: tuple, problem: Problem, config: Config) -> torch.Tensor:
    packed, scales = data[1]["mxfp4"]
    cache = packed.view(torch.uint8), scales.view(torch.int32)
    strides = tuple(x.stride(0) for x in cache)
    return _split_k(data, problem, config, _decode_mxfp4_gfx950, cache, strides, waves_per_eu=1)


def _run_torch_bmm(data: tuple, problem: Problem, config: Config) -> torch.Tensor:
    """Two batched matrix products over the bf16 cache, for equal lengths and one query a sequence.

    Scores stay in float32: rounded to bf16 they would cost up to 0.9 % in a row.
    """
    device, b, _, s_kv, scale, *_ = problem
    q, kv = data[0], data[1]["bf16"].view(b, s_kv, D_QK)
    k = kv.mT
    scores, p = (_buffer(name, (b, H_Q, s_kv), torch.float32, device) for name in ("scores", "p"))
    if device.type == "cpu":  # which has no product of bf16 with a float32 result
        torch.baddbmm(scores, q.float(), k.float(), beta=0, alpha=scale, out=scores)
    else:
        torch.ops.aten.baddbmm.dtype_out(scores, q, k, torch.float32, beta=0, alpha=scale, out=scores)
    torch.softmax(scores, -1, out=p)
    rounded = _buffer("p", p.shape, torch.bfloat16, device).copy_(p)
    return torch.bmm(rounded, kv[..., :D_V], out=_output(problem))


def _dequantize(kv_data: dict, kv: str, start: int, end: int) -> torch.Tensor:
    """Rows [start, end) of the cache named `kv` as float32 (end - start, 576)."""
    if kv == "bf16":
        return kv_data["bf16"][start:end, 0].float()
    values, scales = kv_data[kv]
    if kv == "fp8":
        return values[start:end, 0].float() * scales
    packed = values.view(torch.uint8)[start:end, 0]
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32, device=packed.device)
    codes = torch.stack([packed & 15, packed >> 4], dim=2).view(-1, D_QK // 32, 32).int()
    bits = scales.view(torch.uint8)[start:end, : D_QK // 32].int()
    powers = (bits << 23).masked_fill_(bits == 0, 0x400000).masked_fill_(bits == 255, 0x7FC00000).view(torch.float32)
    return (torch.cat([magnitudes, -magnitudes])[codes] * powers[:, :, None]).view(-1, D_QK)


def _attend_float32(data: tuple, kv: str) -> torch.Tensor:
    """Float32 (total_q, 16, 512): attention over the cache named `kv`, one sequence after the other.

    Right for any lengths on any device, but it reads kv_indptr on the host, so it synchronises on a GPU.
    """
    q, kv_data, _, kv_indptr, config = data
    s_q, indptr = config["q_seq_len"], kv_indptr.tolist()
    out = torch.empty(q.shape[0], H_Q, D_V, dtype=torch.float32, device=q.device)
    for b, (start, end) in enumerate(pairwise(indptr)):
        rows = slice(b * s_q, (b + 1) * s_q)
        k = _dequantize(kv_data, kv, start, end)  # [s_kv, 576]
        x = q[rows].float() * config["sm_scale"] @ k.T  # [s_q, 16, s_kv]
        # Query i sees all but the last s_q - 1 - i tokens. One that sees none would get NaN from the softmax.
        unseen = torch.ones(s_q, end - start, dtype=torch.bool, device=q.device).triu(end - start - s_q + 1)[:, None]
        p = x.masked_fill(unseen, float("-inf")).softmax(2).masked_fill(unseen, 0.0)
        out[rows] = p @ k[:, :D_V]
    return out


def _run_torch_chunked(data: tuple, problem: Problem, config: Config) -> torch.Tensor:
    """`_attend_float32` over the arm's cache."""
    return _output(problem).copy_(_attend_float32(data, ARMS[config.arm].kv))


# ---- AITER ----


A8W8_TILE = 128  # tokens that one step of the a8w8 kernel takes; the a16w8 kernel takes 16
NAN_SPLITS = 16  # splits of a sequence with which AITER was reported to return NaN on gfx950


def _item_fault(length: int, tile: int) -> str | None:
    """Why stage 1 must not be given an item of `length` tokens; a `tile` of whole 128 tokens means the a8w8 kernel.

    Tails of 1 to 3 tokens were reported to return NaN; after an even number of whole tiles the a8w8 kernel may overlap
    its last prefetch with the staging of its output.
    """
    if length % 16 in (1, 2, 3):
        return f"an item has {length} tokens, a tail under 4"
    if tile % A8W8_TILE == 0 and length >= A8W8_TILE and length // A8W8_TILE % 2 == 0:
        return f"an item has {length} tokens, an even number of {A8W8_TILE}-token tiles"
    return None


def _cut(length: int, tile: int) -> list[int]:
    """Lengths of two items without a fault, the first one of whole tiles if possible; [length] if there are none."""
    for first in chain(range(tile, length, tile), range(8, length, 8)):
        if not (_item_fault(first, tile) or _item_fault(length - first, tile)):
            return [first, length - first]
    return [length]


def build_schedule(batch: int, kv_len: int, num_cu: int, tile: int) -> dict[str, list]:
    """AITER's work lists, by its names, for `batch` sequences of `kv_len` tokens on `num_cu` CUs.

    CU c runs `work_info_set[work_indptr[c] : work_indptr[c + 1]]`. An item is [sequence, partial row or -1 when it
    writes the output itself, q_start, q_end, kv_start, kv_end, tokens of the sequence after kv_end, 0]; KV positions
    count over the whole batch, ends are exclusive. Output rows `reduce_final_map[b]` are combined from the partial rows
    `reduce_partial_map[reduce_indptr[b] : reduce_indptr[b + 1]]`, none when sequence b is not split. Source: the
    work-info union and the metadata and reduce kernels of AITER's MLA.

    Laid end to end, the sequences are cut at the multiples of 1 / num_cu, each moved down to a multiple of `tile`
    (itself one of 16) within its sequence, so every CU is within one tile of the mean. An item with an `_item_fault` is
    cut in two, as is one of a sequence in exactly 16 items. What cannot be mended is for `schedule_fault` to find.

    Worked example, 32 x 8192 on 256 CUs in tiles of 128: 1024 tokens a CU, as items of 1 and 7 tiles, which is 16 items
    a sequence, so one of 7 is cut. Raises ValueError when an argument is out of range.
    """
    _expect(batch >= 1, "batch", "at least 1", batch)
    _expect(kv_len >= 1, "kv_len", "at least 1", kv_len)
    _expect(num_cu > NAN_SPLITS, "num_cu", f"more than {NAN_SPLITS}", num_cu)
    _expect(tile >= 16 and tile % 16 == 0, "tile", "a positive multiple of 16", tile)
    # Cuts 8 tokens early give the last item 9 to 11 tokens instead of a tail of 1 to 3.
    early = 8 if kv_len % 16 in (1, 2, 3) else 0
    bounds = []
    for cu in range(num_cu + 1):
        b, offset = divmod(cu * batch * kv_len // num_cu, kv_len)
        bounds.append(b * kv_len + max(0, (offset + early) // tile * tile - early))

    items: list[list[int]] = []
    reduce_indptr = [0]
    rows = 0
    for b in range(batch):
        first, end = b * kv_len, (b + 1) * kv_len
        cuts = sorted({first, *(x for x in bounds if first < x < end), end})
        lengths = [after - before for before, after in pairwise(cuts)]
        pieces = [x for length in lengths for x in (_cut(length, tile) if _item_fault(length, tile) else [length])]
        if len(pieces) == NAN_SPLITS:
            i = pieces.index(max(pieces))
            pieces[i : i + 1] = _cut(pieces[i], tile)
        split = len(pieces) > 1
        for kv_start, kv_end in pairwise(accumulate(pieces, initial=first)):
            items.append([b, rows if split else -1, b, b + 1, kv_start, kv_end, end - kv_end, 0])
            rows += split
        reduce_indptr.append(rows)
    starts = [item[4] for item in items]
    return {
        "work_indptr": [bisect_left(starts, x) for x in bounds],  # [num_cu + 1]
        "work_info_set": items,  # [items, 8]
        "reduce_indptr": reduce_indptr,  # [batch + 1]
        "reduce_final_map": [[b, b + 1] for b in range(batch)],  # [batch, 2]
        "reduce_partial_map": list(range(rows)),  # [partial rows]
    }


def schedule_fault(work_indptr: list, work_info_set: list, batch: int, kv_len: int, tile: int) -> str | None:
    """Why AITER's kernel of such a tile must not be given these lists of `batch` sequences of `kv_len` tokens, or None.

    An empty item ends its CU, so later ones are skipped; the reduce takes as many of a sequence as there are CUs.
    """
    if work_indptr[0] != 0 or work_indptr != sorted(work_indptr):
        return "work_indptr does not rise from 0"
    items = sorted(work_info_set[: work_indptr[-1]], key=itemgetter(4))
    splits = Counter(item[0] for item in items)
    for b, row, q_start, q_end, start, end, rest, _ in items:
        if not (start // kv_len == q_start == b == q_end - 1 and start < end and rest == (b + 1) * kv_len - end >= 0):
            return f"an item of sequence {b} has queries {q_start} to {q_end}, tokens {start} to {end}, then {rest}"
        if fault := _item_fault(end - start, tile):
            return fault
        if splits[b] == NAN_SPLITS or splits[b] >= len(work_indptr):
            return f"sequence {b} is in {splits[b]} items"
        if (row >= 0) != (splits[b] > 1):
            return f"sequence {b} is in {splits[b]} items, one with the partial row {row}"
    if [item[4] for item in items] + [batch * kv_len] != [0] + [item[5] for item in items]:
        return "the items do not cover each token once"
    return None


def split_count(batch: int, kv_len: int, num_cu: int) -> int:
    """Splits of a sequence for the non-persistent kernel: the fewest, under 16, with the shortest longest one."""
    blocks = -(-kv_len // 64)  # of 64 tokens, which it deals to its splits in turn
    most = max(1, min(NAN_SPLITS - 1, num_cu // batch, blocks))
    return -(-blocks // -(-blocks // most))


class AiterMode(NamedTuple):
    """How an arm calls AITER.

    `entry`: "split_kv" is `mla_decode_fwd` without persistence; "fwd" the same with the library's work lists; "direct"
    stage 1 and, when something is split, the reduce over buffers of ours; "own" the same over `build_schedule`.
    `q`: "bf16"; "dynamic" is fp8 by AITER's per-tensor quantisation; "cast" is fp8 at scale 1.
    """

    entry: str
    q: str
    kv: str = "fp8"
    tile: int = A8W8_TILE  # what our work lists are cut in


AITER_MODES = {"aiter_bf16": AiterMode("split_kv", "bf16", "bf16")}
for _entry in ("fwd", "direct", "own"):
    AITER_MODES[f"aiter_{_entry}_a16w8"] = AiterMode(_entry, "bf16", tile=32)
    AITER_MODES[f"aiter_{_entry}_a8w8"] = AiterMode(_entry, "dynamic")
    AITER_MODES[f"aiter_{_entry}_a8w8_cast"] = AiterMode(_entry, "cast")

_WORK = ("work_meta_data", "work_indptr", "work_info_set")
_REDUCE = ("reduce_indptr", "reduce_final_map", "reduce_partial_map")
# What stage 1 calls the arguments of `mla_decode_fwd`.
_ALIASES = {
    "Q": "q", "KV": "kv_buffer", "kv_page_indices": "kv_indices", "softmax_scale": "sm_scale", "output": "o",
    "work_metadata": "work_meta_data",
}  # fmt: skip


@cache
def _aiter() -> Any:
    """AITER with its MLA and quantisation modules, imported when an arm asks for it: it takes seconds."""
    import aiter
    import aiter.mla
    import aiter.ops.quant

    return aiter


def _parameters(module: Any, name: str) -> dict[str, bool]:
    """Whether each parameter of an AITER function is required, in order. Compiled ops show them in their schema."""
    overloads = getattr(torch.ops.aiter, name, None)
    if overloads is not None:
        return {x.name: not x.has_default_value() for x in overloads.default._schema.arguments}
    return {x.name: x.default is x.empty for x in inspect.signature(getattr(module, name)).parameters.values()}


def _bind(module: Any, name: str, values: dict[str, Any], *newer: str) -> Callable[..., Any]:
    """An AITER function with these values, which a call may replace; a version may lack the `newer` parameters only."""
    parameters = _parameters(module, name)
    accepted = {x: _ALIASES.get(x, x) for x in parameters}
    missing = sorted({*values} - {*newer} - {*accepted.values()})
    unknown = [x for x, required in parameters.items() if required and accepted[x] not in values]
    _expect(not (missing or unknown), name, f"a layout with {missing} and without {unknown}", tuple(parameters))
    # By position as far as it goes: a name of the Python layer need not be the compiled op's own.
    leading = list(takewhile(values.__contains__, accepted.values()))
    named = {x: value for x, value in accepted.items() if value in values and value not in leading}
    function = getattr(module, name)

    def call(**replaced: Any) -> Any:
        given = values | replaced
        return function(*[given[value] for value in leading], **{x: given[value] for x, value in named.items()})

    return call


def _library_work(problem: Problem, mode: AiterMode, indices: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """AITER's own work lists and reduce maps, by its fast rule, which every version has."""
    aiter, fp8 = _aiter(), torch.float8_e4m3fn
    q_dtype = torch.bfloat16 if mode.q == "bf16" else fp8
    buffers = _bind(aiter, "get_mla_metadata_info_v1", {
        "batch_size": problem.batch_size, "max_seqlen_qo": 1, "num_head_qo": H_Q, "q_dtype": q_dtype, "kv_dtype": fp8,
        "is_sparse": False, "fast_mode": True,
    })()  # fmt: skip
    work = {
        name: torch.empty(shape, dtype=dtype, device=problem.device)
        for name, (shape, dtype) in zip(_WORK + _REDUCE, buffers, strict=True)
    }
    layout = tuple(_parameters(aiter, "get_mla_metadata_v1"))
    # Every version takes the items, then work_indptr; an older one names the two the other way round.
    items, indptr = ("work_indptr", "work_info") if "work_info" in layout else ("work_info_set", "work_indptr")
    _expect((items, indptr) in pairwise(layout), "get_mla_metadata_v1", f"a layout with {items}, {indptr}", layout)
    _bind(aiter, "get_mla_metadata_v1", {x: work[x] for x in _REDUCE} | {
        "seqlens_qo_indptr": indices["qo_indptr"], "seqlens_kv_indptr": indices["kv_indptr"],
        "kv_last_page_lens": indices["kv_last_page_lens"], "num_heads_per_head_k": H_Q, "num_heads_k": 1,
        "is_causal": False, "work_metadata_ptrs": work["work_meta_data"], items: work["work_info_set"],
        indptr: work["work_indptr"], "page_size": 1, "max_seqlen_qo": 1, "uni_seqlen_qo": 1, "fast_mode": True,
        "dtype_q": q_dtype, "dtype_kv": fp8,
    }, "kv_last_page_lens", "page_size", "dtype_q", "dtype_kv")()  # fmt: skip
    return work


def _aiter_work(problem: Problem, mode: AiterMode, indices: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Work lists and reduce maps on the device, made once a shape. Raises ValueError if they are not safe."""
    b, s_kv = problem.batch_size, problem.kv_seq_len
    if mode.entry == "own":
        upload = partial(torch.tensor, device=problem.device)
        lists = build_schedule(b, s_kv, _target(problem.device).num_cu, mode.tile)
        work = {name: upload(values, dtype=torch.int32) for name, values in lists.items()}
        addresses = work["work_indptr"].data_ptr(), work["work_info_set"].data_ptr()
        work["work_meta_data"] = upload(addresses, dtype=torch.int64).view(torch.uint64)
    else:
        work = _library_work(problem, mode, indices)
    fault = schedule_fault(work["work_indptr"].tolist(), work["work_info_set"].tolist(), b, s_kv, mode.tile)
    _expect(fault is None, f"{mode.entry} schedule", "one that its kernel takes", fault)
    return work


@cache
def _cast_keeps_overflow(device: torch.device) -> bool:
    """Whether a copy of bf16 into e4m3 turns what is too large into NaN here, where another device would clip it."""
    large = torch.tensor([480.0, -1e4, float("inf")], dtype=torch.bfloat16, device=device)
    return bool(torch.empty_like(large, dtype=torch.float8_e4m3fn).copy_(large).float().isnan().all())


def _quantizer(problem: Problem, form: str) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]:
    """What brings Q [batch, 16, 576] into the form of an `AiterMode`, with its scale, float32 [1] or None."""
    if form == "bf16":
        return lambda q: (q, None)
    device, aiter = problem.device, _aiter()
    q8 = _buffer("q8", (problem.total_q, H_Q, D_QK), torch.float8_e4m3fn, device)
    if form == "cast":
        one = _buffer("unit scale", (1,), torch.float32, device, torch.ones)
        return lambda q: (q8.copy_(q), one)
    scale = _buffer("scale of q8", (1,), torch.float32, device)
    quantize = getattr(aiter.ops.quant, "dynamic_per_tensor_quant", None)
    if quantize is None:
        _say_once("AITER has no dynamic_per_tensor_quant: per_tensor_quant_hip, or else torch, quantises Q")
        if hasattr(aiter, "per_tensor_quant_hip"):
            return partial(aiter.per_tensor_quant_hip, quant_dtype=torch.float8_e4m3fn)
        wide = _buffer("wide q", q8.shape, torch.float32, device)

        def quantize(out: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> None:
            # The largest magnitude becomes 448, as there; all zeros would divide 0 by 0.
            torch.linalg.vector_norm(q, float("inf"), dtype=torch.float32, out=scale.view(()))
            scale.div_(448).clamp_(min=torch.finfo(torch.float32).tiny)
            out.copy_(torch.div(q, scale, out=wide))

    def run(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantize(q8, q, scale)
        return q8, scale

    return run


def _prepare_aiter(problem: Problem, mode: AiterMode) -> Callable[[tuple], torch.Tensor]:
    """The call of one arm for one shape, with all but its inputs bound and made. Raises where AITER does not fit."""
    aiter, out, device = _aiter(), _output(problem), problem.device
    fp8 = aiter.dtypes.fp8
    _expect(fp8 is torch.float8_e4m3fn, "aiter.dtypes.fp8", "torch.float8_e4m3fn", fp8)
    b, s_kv = problem.batch_size, problem.kv_seq_len
    arange = partial(torch.arange, dtype=torch.int32, device=device)
    # Equal sequences in consecutive pages of one token.
    indices = _scratch(("aiter indices", device, b, s_kv), lambda: {
        "qo_indptr": arange(b + 1), "kv_indptr": arange(0, b * s_kv + 1, s_kv), "kv_indices": arange(b * s_kv),
        "kv_last_page_lens": arange(1, 2).repeat(b),
    })  # fmt: skip
    values: dict[str, Any] = indices | {
        "o": out, "max_seqlen_q": 1, "page_size": 1, "nhead_kv": 1, "sm_scale": problem.sm_scale,
        "num_kv_splits_indptr": None, "q": None, "kv_buffer": None, "q_scale": None, "kv_scale": None,
    }  # fmt: skip
    module, name, reduce = aiter.mla, "mla_decode_fwd", None
    if mode.entry == "split_kv":
        splits = split_count(b, s_kv, _target(device).num_cu)
        values |= {"num_kv_splits": splits, "num_kv_splits_indptr": splits * indices["qo_indptr"]}
    else:
        values |= _aiter_work(problem, mode, indices)
    if mode.entry in ("direct", "own"):
        module, name = aiter, "mla_decode_stage1_asm_fwd"
        maps = {x: values.pop(x) for x in _REDUCE}
        rows = max(1, len(maps["reduce_partial_map"]))
        part = _buffer("part", (rows, 1, H_Q, D_V), torch.float32, device)
        lse = _buffer("lse", (rows, 1, H_Q, 1), torch.float32, device)
        values |= {"splitData": part, "splitLse": lse}
        if maps["reduce_indptr"][-1] > 0:
            reduce = _bind(aiter, "mla_reduce_v1", maps | {
                "partial_output": part, "partial_lse": lse, "final_output": out, "max_seqlen_q": 1,
                "num_kv_splits": 0,  # automatic
            }, "max_seqlen_q", "num_kv_splits")  # fmt: skip
    decode, quantize = _bind(module, name, values, "page_size", "nhead_kv"), _quantizer(problem, mode.q)

    def run(data: tuple) -> torch.Tensor:
        q, kv_data, *_ = data
        kv, kv_scale = kv_data["fp8"] if mode.kv == "fp8" else (kv_data["bf16"], None)
        q, q_scale = quantize(q)
        decode(q=q, kv_buffer=kv.view(-1, 1, 1, D_QK), q_scale=q_scale, kv_scale=kv_scale)
        if reduce is not None:
            reduce()
        return out

    return run


def _run_aiter(data: tuple, problem: Problem, config: Config, mode: AiterMode) -> torch.Tensor:
    return _SCRATCH["aiter call", problem[:5], mode](data)


def _no_aiter(problem: Problem, mode: AiterMode) -> str | None:
    """Why an AITER arm cannot serve a problem, found out in the end by preparing the call that `_run_aiter` makes.

    Its schedules are cached by shape, so they hold only for uniform problems. Other batches are left to this file's
    kernels, which read kv_indptr on the device.
    """
    target = _target(problem.device).name
    if target != "gfx950":
        return f"its kernels are for gfx950, not for {target}"
    if reason := _no_equal_sequences(problem):
        return reason
    if not (problem.contiguous and problem.aligned):
        return "it takes a contiguous Q and cache at multiples of 16 bytes"
    pool_bytes = problem.batch_size * problem.kv_seq_len * D_QK * (1 if mode.kv == "fp8" else 2)
    if pool_bytes >= 1 << 32:
        return f"its KV offsets have 32 bits, and the cache has {pool_bytes} bytes"
    if mode.q == "cast" and not _cast_keeps_overflow(problem.device):
        return "a cast to fp8 clips here, so a query above 448 would be wrong without a sign"
    try:
        _scratch(("aiter call", problem[:5], mode), partial(_prepare_aiter, problem, mode))
    except Exception as error:  # also an op that is missing or fails to build: other arms serve
        return f"{type(error).__name__}: {error}"
    return None


# ---- arms ----


EXACT_ERROR = 1e-2  # relative L2; this file's fp8 kernels stay below 2.5e-3 (docs/h200.md)
A8W8_ERROR = 5e-2  # P is rounded to e4m3 in the fp8 kernel, and so is Q before it


@dataclass(frozen=True)
class Arm:
    """A way to compute the result."""

    kv: str  # the cache it reads
    why_not: Callable[[Problem], str | None]  # why it cannot serve a problem; None if it can
    run: Callable[[tuple, Problem, Config], torch.Tensor]
    max_error: float = EXACT_ERROR  # largest relative L2 error against float32 attention over the same cache
    last_resort: bool = False  # taken only when nothing else proved right


def _no_triton(problem: Problem) -> str | None:
    if triton is None:
        return "Triton is not installed"
    if problem.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the inputs are on {problem.device}, not on a GPU"
    return None


def _no_gluon(problem: Problem, target: str, cache: str = "fp8") -> str | None:
    if gluon is None:
        return "Triton with Gluon is not installed"
    if _target(problem.device).name != target:
        return f"its kernel is for {target}, not for {_target(problem.device).name}"
    if not (problem.aligned if cache == "fp8" else problem.packed):
        words = "addresses and row strides of 16 bytes (4 for mxfp4's scales, 20 or more to a row)"
        return f"it needs a non-empty {cache} cache and Q with {words}"
    return None


def _no_equal_sequences(problem: Problem) -> str | None:
    if problem.q_seq_len != 1:
        return f"it takes one query a sequence, not {problem.q_seq_len}"
    if not problem.uniform:
        return "it takes sequences of one length, not an empty or ragged batch"
    return None


ARMS: dict[str, Arm] = {
    "hopper_fp8": Arm("fp8", partial(_no_gluon, target="sm90"), _run_hopper_fp8),
    "gfx950_fp8": Arm("fp8", partial(_no_gluon, target="gfx950"), _run_gfx950_fp8),
    "gfx950_mxfp4": Arm("mxfp4", partial(_no_gluon, target="gfx950", cache="mxfp4"), _run_gfx950_mxfp4),
    "triton_fp8": Arm("fp8", _no_triton, _run_triton),
    "triton_mxfp4": Arm("mxfp4", _no_triton, _run_triton),
    "torch_bmm": Arm("bf16", _no_equal_sequences, _run_torch_bmm),
    "torch_chunked": Arm("bf16", lambda problem: None, _run_torch_chunked, last_resort=True),
    "torch_chunked_mxfp4": Arm("mxfp4", lambda problem: None, _run_torch_chunked, last_resort=True),
}
for _name, _mode in AITER_MODES.items():
    _max_error = EXACT_ERROR if _mode.q == "bf16" else A8W8_ERROR
    ARMS[_name] = Arm(_mode.kv, partial(_no_aiter, mode=_mode), partial(_run_aiter, mode=_mode), _max_error)


# ---- dispatch ----


TUNE_RUNS = 13  # the first, which compiles, counts as a slow one
TUNE_MARGIN = 0.02
FLUSH_BYTES = 8 << 30  # some 2 ms, in which the host gets ahead: launching is not to be timed
GAIN_TOLERANCE = 0.01
ROW_FACTOR = 3.0
# The problem's written tolerance, and the share of elements that the mxfp4 cache must keep within it.
RTOL, ATOL = 2e-2, 8e-3
MIN_SHARE_WITHIN = 0.995


def _say(message: str) -> None:
    print(f"mixed-mla: {message}", file=sys.stderr)


_say_once = cache(_say)


def _setting(name: str, *choices: str) -> str:
    """An environment variable, by default the first of its choices."""
    value = os.environ.get(name) or choices[0]
    _expect(value in choices, name, f"one of {', '.join(filter(None, choices))}", repr(value))
    return value


def _describe(config: Config) -> str:
    """The fields that differ from their defaults; for AITER's arms, which use none, how they call it."""
    if config.arm in AITER_MODES:
        return AITER_MODES[config.arm].entry
    values = ((f.name, getattr(config, f.name), f.default) for f in fields(config) if f.name != "arm")
    return " ".join(f"{name}={value}" for name, value, default in values if value != default)


def _candidates(problem: Problem, backend: str, kv: str) -> list[Config]:
    """What a first call tries, best first: the arms that can serve the problem, or the one asked for as `backend`."""
    target = _target(problem.device)
    if backend:
        reads = ARMS[backend].kv
        ok = kv == "auto" or (kv == "mxfp4") == (reads == "mxfp4")
        _expect(ok, "MLA_BACKEND", f"an arm for MLA_KV={kv}", f"{backend}, which reads the {reads} cache")
    elif kv == "auto" and not problem.uniform:
        kv = "fp8"  # some sequence is shorter than kv_seq_len
    configs = select_config(problem.batch_size, problem.kv_seq_len, target, problem.q_seq_len, kv, backend)
    able: list[Config] = []
    passed_over = []
    for config in configs:
        reason = ARMS[config.arm].why_not(problem)
        if reason is None:
            able.append(config)
        elif not able:
            passed_over.append(f"{config.arm}: {reason}")
    if not able:
        raise RuntimeError(f"no arm can serve this call: {'; '.join(passed_over)}")
    if passed_over:
        _say_once(f"fell back to {able[0].arm} ({'; '.join(passed_over)})")
    elif target.name == "cpu" and not backend:
        _say_once(f"no GPU in use, so {able[0].arm} computes on the CPU")
    return able[:MAX_CANDIDATES]


def _error(output: torch.Tensor, expected: torch.Tensor, max_error: float) -> float:
    """Relative L2 error of `output` on `expected`, float32 [total_q, 16, 512].

    Raises RuntimeError where `output` has another shape or dtype, is not finite where `expected` is or the reverse, or
    is too far off: in all, in one row (query and head), or in its gain, the least-squares slope on `expected`.
    """
    expect = partial(_expect, error=RuntimeError)
    ok = output.shape == expected.shape and output.dtype == torch.bfloat16
    expect(ok, "output", f"torch.bfloat16 {tuple(expected.shape)}", f"{output.dtype} {tuple(output.shape)}")
    finite = expected.isfinite()
    strays = int((output.isfinite() != finite).sum())
    expect(strays == 0, "output", "NaN and infinity where they belong", f"{strays} elements otherwise")
    output, expected = (x.double().masked_fill(~finite, 0.0) for x in (output, expected))
    difference, norm = output - expected, expected.norm().item() or 1.0
    error = difference.norm().item() / norm
    expect(error <= max_error, "error", f"at most {max_error:.0e}", f"{error:.1e}")
    rows = (difference.norm(dim=2) > ROW_FACTOR * max_error * expected.norm(dim=2)).nonzero().tolist()
    expect(not rows, "error of a row", f"at most {ROW_FACTOR * max_error:.0e}", f"more at [query, head] {rows[:1]}")
    gain = 1 + (difference * expected).sum().item() / norm**2
    expect(abs(gain - 1) <= GAIN_TOLERANCE, "gain", f"1 +- {GAIN_TOLERANCE}", f"{gain:.4f}")
    return error


def _timed(call: Callable[[], torch.Tensor], flush: torch.Tensor | None) -> tuple[torch.Tensor, float]:
    """What a call returns, and its time in us: by events behind an asynchronous flush, by the clock without one."""
    if flush is None:
        start_s = time.perf_counter()
        return call(), (time.perf_counter() - start_s) * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(FLUSH_BYTES // flush.nbytes):
        flush.zero_()
    start.record()
    output = call()
    end.record()
    end.synchronize()
    return output, start.elapsed_time(end) * 1e3


def _prove(
    data: tuple, problem: Problem, config: Config, expected: torch.Tensor, flush: torch.Tensor | None, runs: int
) -> tuple[float, float]:
    """(error, median time in us) of a configuration, run `runs` times.

    Raises RuntimeError if it is wrong, or differs from one run to the next.
    """
    arm, times_us = ARMS[config.arm], []
    for i in range(runs):
        # No arm may live on what another one, or its last run, left. Other threads add to _SCRATCH.
        for (name, *_, device), x in [*_SCRATCH.items()]:
            if name in ("part", "lse") and device == problem.device:
                x.fill_(float("nan"))
        _output(problem).fill_(float("nan"))
        output, time_us = _timed(partial(arm.run, data, problem, config), flush)
        times_us.append(time_us)
        if i == 0:
            first, error = output.clone(), _error(output, expected, arm.max_error)
        # Compared as bits, so that a NaN that belongs there equals itself.
        if not torch.equal(output.view(torch.int16), first.view(torch.int16)):
            raise RuntimeError(f"run {i + 1} differs from the first on the same input")
    return error, sorted(times_us)[runs // 2]


def _first_call(data: tuple, problem: Problem) -> Config:
    """The configuration for all calls that pose `problem`: the fastest candidate that proves right on `data`.

    Unless asked for, the mxfp4 cache must itself be within tolerance of the bf16 cache on `data`. Candidates that are
    dropped are named on stderr with the reason. Raises what `check_arguments` raises, ValueError for a setting,
    RuntimeError with all reasons if no candidate is left.
    """
    check_arguments(data)
    backend, kv = _setting("MLA_BACKEND", "", *ARMS), _setting("MLA_KV", "auto", "fp8", "mxfp4")
    tune, verbose = _setting("MLA_TUNE", "1", "0") == "1", _setting("MLA_VERBOSE", "0", "1") == "1"
    seconds = os.environ.get("MLA_TUNE_SECONDS") or "20"
    ok = seconds.replace(".", "", 1).isdecimal() and float(seconds) > 0
    _expect(ok, "MLA_TUNE_SECONDS", "a decimal number of seconds > 0", repr(seconds))
    deadline = time.monotonic() + float(seconds)
    configs = _candidates(problem, backend, kv)
    timed = tune and sum(not ARMS[config.arm].last_resort for config in configs) > 1
    flush = None
    if timed and problem.device.type == "cuda":  # several times any last-level cache, memory permitting
        flush_bytes = min(1 << 30, torch.cuda.mem_get_info(problem.device)[0] // 4)
        flush = torch.empty(flush_bytes, dtype=torch.uint8, device=problem.device)
    attend = cache(partial(_attend_float32, data))
    label = f"{problem.batch_size}x{problem.kv_seq_len}:"
    best, best_us, reasons = None, float("inf"), []
    for config in configs:
        arm, name = ARMS[config.arm], f"{config.arm} ({_describe(config)})"
        if arm.last_resort:  # the yardstick itself: there is nothing to check it against
            best = best or config
            continue
        if best and time.monotonic() > deadline:
            _say(f"{label} {name} not tried, the first call has taken its {seconds} s")
            continue
        try:
            if arm.kv == "mxfp4" and kv == "auto" and not backend:
                share = attend("mxfp4").isclose(attend("bf16"), RTOL, ATOL).double().mean().item()
                if share < MIN_SHARE_WITHIN:
                    raise RuntimeError(f"its cache keeps {share:.2%} of the elements in tolerance")
            error, time_us = _prove(data, problem, config, attend(arm.kv), flush, TUNE_RUNS if timed else 2)
        except Exception as failure:
            reasons.append(f"{name}: {' '.join(str(failure).split())}")  # a compiler's error has many lines
            _say(f"{label} dropped {reasons[-1]}")
            continue
        if verbose:
            _say(f"{label} {name}: error {error:.1e}" + (f", {time_us:.1f} us" if timed else ""))
        if time_us < (1 - TUNE_MARGIN) * best_us:
            best, best_us = config, time_us
        if not tune:
            break
    if best is None:
        raise RuntimeError(f"no arm is right for {label} {'; '.join(reasons)}")
    if verbose:
        _say(f"{label} chose {best.arm} ({_describe(best)})")
    return best


_PLANS: dict[Problem, Config] = {}
_LOCK = threading.RLock()
_last: Config | None = None


class Selection(NamedTuple):
    """What a call ran."""

    arm: str
    kv: str  # the cache it read: "bf16", "fp8" or "mxfp4"
    config: str  # for a reader


def last_run() -> Selection | None:
    """What the latest `custom_kernel` call of this process ran; None before the first."""
    return Selection(_last.arm, ARMS[_last.arm].kv, _describe(_last)) if _last else None


def custom_kernel(data: tuple) -> torch.Tensor:
    """MLA decode attention over every token of the cache.

    `data` is (q, kv_data, qo_indptr, kv_indptr, config):
      q          bfloat16 (batch_size * q_seq_len, 16, 576), any strides with the last one 1
      kv_data    "bf16": bfloat16 (total_kv, 1, 576); "fp8": (float8_e4m3fn (total_kv, 1, 576), float32 scale (1,));
                 "mxfp4": (packed E2M1 (total_kv, 1, 288), E8M0 scales, at least (total_kv, 18))
      qo_indptr, kv_indptr   int32 (batch_size + 1,), the rows of each sequence; queries are uniform
      config     batch_size, q_seq_len, kv_seq_len (no sequence is longer), sm_scale, dimensions

    Returns bfloat16 (batch_size * q_seq_len, 16, 512), owned by this module, valid until the next call with the same
    device, batch_size, q_seq_len and kv_seq_len; calls share scratch, so order all of a device's on one queue.
    Query i of a sequence sees all but its last q_seq_len - 1 - i tokens; without a token to see it is zero. Inputs are
    never written. There is no gradient. Where an AITER arm serves, token 0 of the cache must be finite: the kernels
    read it in place of the tokens a last tile lacks.

    The first call of a shape and layout synchronises and cannot be captured in a graph; later ones neither synchronise
    nor allocate, but in `torch_chunked` and, in part, AITER. Raises what `check_arguments` raises, RuntimeError if no
    arm proves right.
    """
    global _last
    try:
        config = _PLANS.get(problem := problem_of(data))
    except Exception:
        check_arguments(data)
        raise
    on_gpu = data[0].is_cuda
    if on_gpu and problem.device.index != torch.cuda.current_device():
        with torch.cuda.device(problem.device):
            return custom_kernel(data)
    if config is None:
        with _LOCK:
            config = _PLANS.get(problem) or _PLANS.setdefault(problem, _first_call(data, problem))
    elif not on_gpu:
        check_arguments(data)
    _last = config
    return ARMS[config.arm].run(data, problem, config)
