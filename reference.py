"""Inputs, quantisers, oracle and checks of the `amd-mixed-mla` problem.

Attention here is MLA decode: for query row `q_h` and cached row `k_j` of the same sequence,
`p = softmax_j(sm_scale * q_h . k_j)` and `out_h = sum_j p_j k_j[:512]`. Query `i` of `s_q` sees the first
`len - (s_q - 1 - i)` tokens of its sequence (bottom-right causal); a query that sees none gives zeros.

`strict_check` is the judge; `official_check` only predicts the leaderboard's. docs/checks.md derives every bound.
"""

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from types import ModuleType

import torch

from task import (
    KV_LORA_RANK,
    NUM_HEADS,
    NUM_KV_HEADS,
    QK_HEAD_DIM,
    QK_ROPE_HEAD_DIM,
    SM_SCALE,
    V_HEAD_DIM,
    input_t,
    output_t,
)

FORMATS = ("bf16", "fp8", "mxfp4")
FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8_DTYPE).max
FP4_DTYPE = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
E8M0_DTYPE = getattr(torch, "float8_e8m0fnu", torch.uint8)
MXFP4_BLOCK = 32
E8M0_BIAS = 127
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Padding of the mxfp4 scale matrix, as AITER allocates it.
SCALE_ROW_MULTIPLE, SCALE_COL_MULTIPLE = 256, 8
# Rows of the cache handled at once: 4.5 MiB in float32, so that a chunk stays in a CPU's cache.
CHUNK_ROWS = 2048


def _round_up(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple


def _chunks(start: int, stop: int, rows: int = CHUNK_ROWS):
    return ((i, min(i + rows, stop)) for i in range(start, stop, rows))


# ----- formats


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to OCP e4m3fn with one scale for the whole tensor.

    x: floating point, any shape with at least one dimension. Returns (float8_e4m3fn of the same shape,
    float32 scale `(1,)`) with `scale = amax / 448`, so that `x ~ fp8 * scale`; an all-zero tensor gets the scale of
    amax 1e-12. Raises ValueError for an empty or non-finite tensor.
    """
    if x.numel() == 0:
        raise ValueError(f"x: expected at least one element, got shape {tuple(x.shape)}")
    low, high = torch.aminmax(x)
    amax = torch.maximum(-low, high).float()
    if not torch.isfinite(amax):
        raise ValueError("x: expected finite values, got NaN or Inf")
    scale = amax.clamp(min=1e-12) / FP8_MAX
    out = torch.empty(x.shape, dtype=FP8_DTYPE, device=x.device)
    for i, j in _chunks(0, x.shape[0]):
        out[i:j] = (x[i:j].float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
    return out, scale.reshape(1)


def dequantize_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn `x` times the float32 `scale` `(1,)`, in float32."""
    return x.float() * scale


def _quantize_mxfp4_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, d) finite float32 -> uint8 packed (n, d / 2) and uint8 scale codes (n, d / 32)."""
    blocks = x.reshape(x.shape[0], -1, MXFP4_BLOCK)
    amax_bits = blocks.abs().amax(-1).view(torch.int32)
    # Adding a quarter of a binade carries into the exponent from 1.75 x 2^k on.
    exponent = ((amax_bits + 0x200000) >> 23) - E8M0_BIAS - 2
    exponent = exponent.clamp(-127, 127)
    scaled = torch.ldexp(blocks, -exponent.unsqueeze(-1))
    codes = torch.signbit(scaled).to(torch.uint8) << 3
    scaled.abs_()
    for low, high in pairwise(E2M1_MAGNITUDES):
        codes += scaled >= (low + high) / 2
    codes = codes.view(x.shape)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), (exponent + E8M0_BIAS).to(torch.uint8)


def quantize_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks of 32 along the last dimension to OCP MX fp4.

    x: floating point `(..., d)`, d a multiple of 32. Returns
    - packed E2M1 `(..., d / 2)`, `torch.float4_e2m1fn_x2` (uint8 where torch lacks it), low nibble = even index;
    - E8M0 scales `(ceil(rows / 256) * 256, ceil(d / 32 / 8) * 8)`, `torch.float8_e8m0fnu` (else uint8), of which
      `rows x d / 32` are valid, the rest uninitialised, where rows counts all leading dimensions together.
    A block's amax is rounded to a power of two (up from 1.75 x 2^k on) and the scale is a quarter of that; elements
    round to the nearest E2M1 value, ties away from zero, saturating at 6.
    Raises ValueError if d is not a multiple of 32 or a value is not finite.
    """
    d = x.shape[-1]
    if d % MXFP4_BLOCK:
        raise ValueError(f"x: expected a last dimension divisible by {MXFP4_BLOCK}, got {d}")
    rows = x.numel() // d
    flat = x.reshape(rows, d)
    packed = torch.empty((rows, d // 2), dtype=torch.uint8, device=x.device)
    num_blocks = d // MXFP4_BLOCK
    padded_shape = (_round_up(rows, SCALE_ROW_MULTIPLE), _round_up(num_blocks, SCALE_COL_MULTIPLE))
    scales = torch.empty(padded_shape, dtype=torch.uint8, device=x.device)
    for i, j in _chunks(0, rows):
        chunk = flat[i:j].float()
        if not torch.isfinite(chunk).all():
            raise ValueError("x: expected finite values, got NaN or Inf")
        packed[i:j], scales[i:j, :num_blocks] = _quantize_mxfp4_rows(chunk)
    return packed.view(FP4_DTYPE).view(*x.shape[:-1], d // 2), scales.view(E8M0_DTYPE)


def dequantize_mxfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Inverse of `quantize_mxfp4`: packed `(..., d / 2)` and scales, padded or not, to float32 `(..., d)`.

    E2M1 and E8M0 as in the OCP Microscaling Formats (MX) specification v1.0: code 0 is 2^-127 and 255 is NaN.
    Raises ValueError if `scales` has fewer rows or columns than `packed` needs.
    """
    rows, half = packed.numel() // packed.shape[-1], packed.shape[-1]
    num_blocks = 2 * half // MXFP4_BLOCK
    if scales.dim() != 2 or scales.shape[0] < rows or scales.shape[1] < num_blocks:
        raise ValueError(f"scales: expected at least ({rows}, {num_blocks}), got {tuple(scales.shape)}")
    codes = packed.view(torch.uint8).reshape(rows, half).int()
    magnitudes = torch.tensor(E2M1_MAGNITUDES, device=packed.device)
    values = torch.cat([magnitudes, -magnitudes])
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)
    powers = torch.tensor([2.0 ** (code - E8M0_BIAS) for code in range(255)] + [math.nan], device=packed.device)
    scale = powers[scales.view(torch.uint8)[:rows, :num_blocks].int()]
    out = pairs[codes].view(rows, num_blocks, MXFP4_BLOCK) * scale.unsqueeze(-1)
    return out.view(*packed.shape[:-1], 2 * half)


# ----- inputs


def case_config(batchsize: int, qseqlen: int, kvseqlen: int) -> dict:
    """The fifth argument of `custom_kernel`; `kvseqlen` is the length of every sequence, or of the longest."""
    return {
        "batch_size": batchsize,
        "num_heads": NUM_HEADS,
        "num_kv_heads": NUM_KV_HEADS,
        "qk_head_dim": QK_HEAD_DIM,
        "kv_lora_rank": KV_LORA_RANK,
        "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
        "v_head_dim": V_HEAD_DIM,
        "q_seq_len": qseqlen,
        "kv_seq_len": kvseqlen,
        "sm_scale": SM_SCALE,
    }


def generate_input(batchsize: int, qseqlen: int, kvseqlen: int, seed: int) -> input_t:
    """Draw one case on the GPU if there is one, else on the CPU: `q` first, then the KV cache, standard normal.

    Returns (q, kv_data, qo_indptr, kv_indptr, config), with total_q = batchsize * qseqlen and
    total_kv = batchsize * kvseqlen:
    - q: bfloat16 (total_q, 16, 576)
    - kv_data["bf16"]: bfloat16 (total_kv, 1, 576); ["fp8"] and ["mxfp4"]: `quantize_fp8` and `quantize_mxfp4` of it
    - qo_indptr, kv_indptr: int32 (batchsize + 1,)
    Raises ValueError if a size is not positive.
    """
    for name, value in (("batchsize", batchsize), ("qseqlen", qseqlen), ("kvseqlen", kvseqlen)):
        if value < 1:
            raise ValueError(f"{name}: expected a positive integer, got {value}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gen = torch.Generator(device=device)
    gen.manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=gen)

    q = draw(batchsize * qseqlen, NUM_HEADS, QK_HEAD_DIM)
    kv = draw(batchsize * kvseqlen, NUM_KV_HEADS, QK_HEAD_DIM)
    kv_data = {"bf16": kv, "fp8": quantize_fp8(kv), "mxfp4": quantize_mxfp4(kv)}
    steps = torch.arange(batchsize + 1, dtype=torch.int32, device=device)
    return q, kv_data, steps * qseqlen, steps * kvseqlen, case_config(batchsize, qseqlen, kvseqlen)


# ----- attention


def read_cache(kv_data: dict, kv: str, start: int, stop: int) -> torch.Tensor:
    """Tokens [start, stop) of one of the three caches, dequantised: float32 (stop - start, 576)."""
    if kv == "bf16":
        rows = kv_data["bf16"][start:stop].float()
    elif kv == "fp8":
        cache, scale = kv_data["fp8"]
        rows = dequantize_fp8(cache[start:stop], scale)
    else:
        packed, scales = kv_data["mxfp4"]
        rows = dequantize_mxfp4(packed[start:stop], scales[start:stop])
    return rows.reshape(stop - start, QK_HEAD_DIM)


def _require_case(data: input_t) -> None:
    """Raise ValueError unless q and kv_indptr fit the config and the cache."""
    q, kv_data, _, kv_indptr, config = data
    expected = (config["batch_size"] * config["q_seq_len"], NUM_HEADS, QK_HEAD_DIM)
    if tuple(q.shape) != expected:
        raise ValueError(f"q: expected shape {expected}, got {tuple(q.shape)}")
    if tuple(kv_indptr.shape) != (config["batch_size"] + 1,):
        raise ValueError(f"kv_indptr: expected shape ({config['batch_size'] + 1},), got {tuple(kv_indptr.shape)}")
    bounds = kv_indptr.tolist()
    if bounds[0] < 0 or bounds[-1] > kv_data["bf16"].shape[0] or bounds != sorted(bounds):
        raise ValueError(
            f"kv_indptr: expected non-decreasing offsets within {kv_data['bf16'].shape[0]} cached tokens, got {bounds}"
        )


def _visible(data: input_t) -> torch.Tensor:
    """Tokens that each query sees, bottom-right causal: int64 (batch, s_q)."""
    _, _, _, kv_indptr, config = data
    hidden = torch.arange(config["q_seq_len"] - 1, -1, -1, device=kv_indptr.device)
    return (kv_indptr.diff().long()[:, None] - hidden).clamp_(min=0)


def _scores(q: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, first: int, sm_scale: float) -> torch.Tensor:
    """Scaled scores (rows, tokens) of tokens `first, first + 1, ...`; -inf from token `visible[row]` on."""
    scores = (q @ keys.mT).mul_(sm_scale)
    offs = torch.arange(first, first + keys.shape[0], device=q.device)
    return scores.masked_fill_(offs >= visible[:, None], -math.inf)


def _attend(q: torch.Tensor, data: input_t, kv: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in the dtype of `q` (total_q, 16, 576): output (total_q, 16, 512), natural-log LSE (total_q, 16).

    A row without a visible token gives zeros and an LSE of -inf.
    """
    _, kv_data, _, kv_indptr, config = data
    out = q.new_zeros((*q.shape[:2], V_HEAD_DIM))
    lse = q.new_full(q.shape[:2], -math.inf)
    bounds = kv_indptr.tolist()
    s_q = config["q_seq_len"]
    for b, visible in enumerate(_visible(data)):
        queries = slice(b * s_q, (b + 1) * s_q)
        rows = q[queries].reshape(-1, QK_HEAD_DIM)
        visible = visible.repeat_interleave(NUM_HEADS)
        row_max = q.new_full((rows.shape[0], 1), -math.inf)
        total = q.new_zeros((rows.shape[0], 1))
        acc = q.new_zeros((rows.shape[0], V_HEAD_DIM))
        for i, j in _chunks(bounds[b], bounds[b + 1]):
            keys = read_cache(kv_data, kv, i, j).to(q.dtype)
            scores = _scores(rows, keys, visible, i - bounds[b], config["sm_scale"])
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            # A row that has seen no token yet has a maximum of -inf: keep -inf - -inf out of exp.
            shift = new_max.masked_fill(new_max == -math.inf, 0.0)
            p = torch.exp(scores - shift)
            decay = torch.exp(row_max - shift)
            total = total * decay + p.sum(-1, keepdim=True)
            acc = acc * decay + p @ keys[:, :V_HEAD_DIM]
            row_max = new_max
        out[queries] = (acc / total).masked_fill(total == 0, 0.0).view(s_q, NUM_HEADS, V_HEAD_DIM)
        lse[queries] = (row_max + total.log()).view(s_q, NUM_HEADS)
    return out, lse


def _require_format(kv: str) -> None:
    if kv not in FORMATS:
        raise ValueError(f"kv: expected one of {', '.join(FORMATS)}, got {kv!r}")


def oracle(data: input_t, kv: str = "bf16") -> torch.Tensor:
    """Attention in float64 over one of the three caches, dequantised: float64 (total_q, 16, 512).

    Works on `CHUNK_ROWS` tokens at a time. Raises ValueError for an unknown `kv`, and for a `q` or `kv_indptr` that
    does not fit the config.
    """
    _require_format(kv)
    _require_case(data)
    return _attend(data[0].double(), data, kv)[0]


# AITER's schedule divides by len // 196, and its kernels' cache offsets have 32 bits.
AITER_MIN_KV_LEN = 196
AITER_MAX_POOL_BYTES = 1 << 32


class AiterUnfit(RuntimeError):
    """AITER must not compute the reference; the message says why."""


def _aiter_for(data: input_t) -> ModuleType:
    """AITER, if it is there and takes this case. Raises AiterUnfit."""
    try:
        import aiter
        import aiter.mla
    except ImportError as error:
        raise AiterUnfit(f"AITER is not installed ({error})") from None
    # Versions before it lack other keywords of `_aiter_decode` too.
    if "intra_batch_mode" not in inspect.signature(aiter.get_mla_metadata_info_v1).parameters:
        raise AiterUnfit("this version of AITER plans no splits per sequence")
    _, kv_data, _, kv_indptr, config = data
    if config["q_seq_len"] != 1:
        raise AiterUnfit(f"its kernel takes one query a sequence, not {config['q_seq_len']}")
    pool_bytes = kv_data["fp8"][0].numel()
    if pool_bytes >= AITER_MAX_POOL_BYTES:
        raise AiterUnfit(f"its cache must end before {AITER_MAX_POOL_BYTES} bytes, and this has {pool_bytes}")
    first, shortest = kv_indptr[0].item(), kv_indptr.diff().min().item()
    if first != 0 or shortest < AITER_MIN_KV_LEN:
        raise AiterUnfit(f"its schedule takes {AITER_MIN_KV_LEN} tokens from 0 on, not {shortest} from {first} on")
    return aiter


def _require_safe_work(work_indptr: torch.Tensor, work_info: torch.Tensor) -> None:
    """Raises AiterUnfit for what was reported to return NaN: items with a tail under 4 tokens, 16 of one sequence."""
    items = work_info[: work_indptr[-1]]
    tails = (items[:, 5] - items[:, 4]) % 16
    if ((tails > 0) & (tails < 4)).any():
        raise AiterUnfit("its schedule leaves a tail of under 4 tokens")
    if (items[:, 0].bincount() == 16).any():
        raise AiterUnfit("its schedule splits a sequence 16 times")


def _aiter_decode(q: torch.Tensor, q_scale: torch.Tensor, data: input_t) -> torch.Tensor:
    """AITER's persistent a8w8 decode, one token a page (its kernels ignore larger pages), metadata built per call.

    Raises AiterUnfit.
    """
    aiter = _aiter_for(data)
    _, kv_data, qo_indptr, kv_indptr, config = data
    kv, kv_scale = kv_data["fp8"]
    num_splits, s_q = 32, config["q_seq_len"]
    kv_lens = kv_indptr.diff()
    schedule = {"fast_mode": False, "intra_batch_mode": True}
    info = aiter.get_mla_metadata_info_v1(
        config["batch_size"], s_q, NUM_HEADS, q.dtype, kv.dtype, is_sparse=False, num_kv_splits=num_splits, **schedule
    )
    work = [torch.empty(shape, dtype=dtype, device=q.device) for shape, dtype in info]
    metadata, work_indptr, work_info, reduce_indptr, reduce_final_map, reduce_partial_map = work
    # Positional, because the order (info_set before indptr) is stable over AITER versions and the names are not.
    aiter.get_mla_metadata_v1(
        qo_indptr, kv_indptr, kv_lens, NUM_HEADS // NUM_KV_HEADS, NUM_KV_HEADS, True,
        metadata, work_info, work_indptr, reduce_indptr, reduce_final_map, reduce_partial_map,
        page_size=1, kv_granularity=16, max_seqlen_qo=s_q, uni_seqlen_qo=s_q, max_split_per_batch=num_splits,
        dtype_q=q.dtype, dtype_kv=kv.dtype, **schedule,
    )  # fmt: skip
    _require_safe_work(work_indptr, work_info)
    out = torch.empty((q.shape[0], NUM_HEADS, V_HEAD_DIM), dtype=torch.bfloat16, device=q.device)
    tokens = torch.arange(kv.shape[0], dtype=torch.int32, device=q.device)
    aiter.mla.mla_decode_fwd(
        q, kv.view(-1, 1, NUM_KV_HEADS, QK_HEAD_DIM), out, qo_indptr, kv_indptr, tokens, kv_lens, s_q,
        page_size=1, nhead_kv=NUM_KV_HEADS, sm_scale=config["sm_scale"], num_kv_splits=num_splits,
        q_scale=q_scale, kv_scale=kv_scale, intra_batch_mode=True,
        work_meta_data=metadata, work_indptr=work_indptr, work_info_set=work_info,
        reduce_indptr=reduce_indptr, reduce_final_map=reduce_final_map, reduce_partial_map=reduce_partial_map,
    )  # fmt: skip
    return out


def _on_rocm(x: torch.Tensor) -> bool:
    return torch.version.hip is not None and x.is_cuda


def ref_kernel(data: input_t) -> output_t:
    """The leaderboard's reference, a8w8: Q quantised to fp8 per tensor, fp8 cache; bfloat16 (total_q, 16, 512).

    AITER's persistent kernel on a ROCm GPU, as far as it is there and takes the case; plain torch in float32 elsewhere,
    with a RuntimeWarning that says why if that is on a ROCm GPU. Raises as `oracle` does.
    """
    _require_case(data)
    q_fp8, q_scale = quantize_fp8(data[0])
    if _on_rocm(data[0]):
        try:
            return _aiter_decode(q_fp8, q_scale, data)
        except AiterUnfit as reason:
            warnings.warn(f"ref_kernel computes in plain torch: {reason}", RuntimeWarning, stacklevel=2)
    return _attend(dequantize_fp8(q_fp8, q_scale), data, "fp8")[0].bfloat16()


# ----- checks

OFFICIAL_TOLERANCE = 0.1
OFFICIAL_FORGIVEN = 0.05


def official_check(data: input_t, output: output_t) -> tuple[bool, str]:
    """Predict the leaderboard's verdict: rtol = atol = 0.1 against `ref_kernel`, 5 % of the elements forgiven.

    Returns (passed, message). It proves almost nothing: all zeros pass at kv 8192.
    """
    problem = _malformed(data, output)
    if problem:
        return False, problem
    expected = ref_kernel(data).float()
    close = torch.isclose(output.float(), expected, rtol=OFFICIAL_TOLERANCE, atol=OFFICIAL_TOLERANCE)
    share = 1.0 - close.float().mean().item()
    message = f"{share:.2%} of the elements differ by more than rtol = atol = {OFFICIAL_TOLERANCE}"
    return share <= OFFICIAL_FORGIVEN, message


def _malformed(data: input_t, output: object) -> str:
    """What is wrong with the output's type, device, shape or dtype; empty if nothing is."""
    expected = (data[0].shape[0], NUM_HEADS, V_HEAD_DIM)
    if not isinstance(output, torch.Tensor):
        return f"output: expected a torch.Tensor, got {type(output).__name__}"
    if tuple(output.shape) != expected:
        return f"output: expected shape {expected}, got {tuple(output.shape)}"
    if output.dtype != torch.bfloat16:
        return f"output: expected dtype torch.bfloat16, got {output.dtype}"
    if output.device != data[0].device:
        return f"output: expected device {data[0].device}, got {output.device}"
    return ""


def _not_finite(output: torch.Tensor) -> str:
    bad = ~torch.isfinite(output)
    if not bad.any():
        return ""
    first = tuple(bad.nonzero()[0].tolist())
    return f"output: expected finite values, got {bad.sum().item()} NaN or Inf, first at {first}"


# RMS relative rounding error of a standard normal: bf16 (8 significant bits), e4m3 (4).
ROUNDING = {"bf16": 0.00166, "fp8": 0.0266, "mxfp4": 0.0266}
# Room for what the error model leaves out; bf16 arms may also round their scores.
MODEL_ROOM = {"bf16": 2.0, "fp8": 1.05, "mxfp4": 1.05}
# Standard deviations between a correct kernel's expected error and the bound.
SIGMAS = 6.0
SLOPE_TOLERANCE = 0.01
OWN_ERROR_MULTIPLE = 1.1
# A group of tokens is miscounted when its weight is off by half and by this many standard deviations.
WEIGHT_TOLERANCE = 0.5
WEIGHT_SIGMAS = 8.0
# Largest relative error of rounding to nearest: half a unit in the last place.
HALF_ULP = {"bf16": 2.0**-8, "fp8": 2.0**-4, "mxfp4": 2.0**-4}
# Standard deviations of the noise that one element may be off by.
ELEMENT_SIGMAS = 8.0
TOKEN_GROUP = 64


@dataclass(frozen=True)
class StrictReport:
    """Outcome of `strict_check`. Errors are relative L2; a figure that was not reached is NaN.

    kernel_error: against the oracle over cache `kv`. end_to_end_error: against the bf16 oracle; own_error: the
    cache's alone. slope: of the output on the oracle over all elements; worst_slope: of the head, sequence or row
    farthest out for its bound (`worst_slope` may differ from 1 by `slope_bound`). worst_row_error: of the
    (query, head) row farthest out for its bound. worst_element_error: of the element farthest out for its bound,
    absolute. worst_weight: of the group of tokens that the output counts most wrongly, 1 being right and 0 missing;
    tokens that a query must not see count 1 more than their weight.
    """

    passed: bool
    message: str
    kv: str | None = None
    kernel_error: float = math.nan
    kernel_bound: float = math.nan
    end_to_end_error: float = math.nan
    end_to_end_bound: float = math.nan
    own_error: float = math.nan
    slope: float = math.nan
    worst_slope: float = math.nan
    slope_bound: float = math.nan
    worst_row_error: float = math.nan
    row_bound: float = math.nan
    worst_element_error: float = math.nan
    element_bound: float = math.nan
    worst_weight: float = math.nan


@dataclass(frozen=True)
class _ErrorModel:
    """What a correct kernel's error looks like, by (query, head) row: float64 (total_q, 16) each.

    Over n tokens of a standard normal cache a row has a signal of variance S = sm_scale^2 and sampling noise of
    variance N = e / n per element; rounding Q (or the output) and P with relative error u adds u^2 (S + 2 N).
    docs/checks.md derives it.
    """

    u: float
    half_ulp: float
    room: float
    power: torch.Tensor
    error_power: torch.Tensor
    error_spread: torch.Tensor
    slope_spread: torch.Tensor

    @classmethod
    def of(cls, data: input_t, kv: str) -> "_ErrorModel":
        n = _visible(data).reshape(-1, 1).expand(-1, NUM_HEADS).double()
        noise = (math.e / n).clamp(max=1.0)
        power = data[4]["sm_scale"] ** 2 + noise
        # Share of a row's noise that hangs on single tokens: sum p^4 / (sum p^2)^2 = e^4 / n.
        concentration = (math.e**4 / n).clamp(max=1.0)
        return cls(
            u=ROUNDING[kv],
            half_ulp=HALF_ULP[kv],
            room=MODEL_ROOM[kv],
            power=power * (n > 0),
            error_power=(power + noise) * (n > 0),
            error_spread=(0.04**2 + concentration / 4).sqrt(),
            slope_spread=ROUNDING[kv] * (4 / V_HEAD_DIM + 2 * (noise / power) ** 2 * concentration).sqrt(),
        )

    def _spread(self, per_row: torch.Tensor, group: Callable) -> torch.Tensor:
        return _ratio(group(self.power * per_row).square().sum(-1).sqrt(), group(self.power).sum(-1))

    def error_bound(self, group: Callable) -> torch.Tensor:
        """Largest relative L2 error of each group of rows, (groups,)."""
        level = self.u * _ratio(group(self.error_power).sum(-1), group(self.power).sum(-1)).sqrt()
        return level * (self.room + SIGMAS * self._spread(self.error_spread, group))

    def slope_bound(self, group: Callable) -> torch.Tensor:
        """Largest distance from 1 of the slope of each group of rows, (groups,)."""
        return (SIGMAS * self._spread(self.slope_spread, group)).clamp(min=SLOPE_TOLERANCE)

    def element_bound(self, out: torch.Tensor, signal: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        """Largest absolute error of each element, (total_q, 16, 512) like its arguments.

        signal: sm_scale * q; variance: of the sampling noise. The former moves by at most half a unit in the last
        place of q times the keys' variance under p, which is 1 up to what single heavy tokens add; the latter by
        Q's and P's rounding, u each.
        """
        noise = variance.double().sqrt()
        rounded_q = self.half_ulp * signal.abs() * (1 + 5 * noise)
        return self.room * (rounded_q + ELEMENT_SIGMAS * math.sqrt(2) * self.u * noise) + HALF_ULP["bf16"] * out.abs()


def _ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a / b, where 0 / 0 is 0: rows without a token have no error and no size."""
    return torch.where(a == 0, 0.0, a / b)


def _groupings(batch: int) -> dict[str, Callable]:
    """Ways to take (total_q, 16) rows together: each gives a (groups, rows in the group) view."""
    return {
        "all rows": lambda x: x.reshape(1, -1),
        "head": lambda x: x.mT,
        "sequence": lambda x: x.reshape(batch, -1),
        "row (query * 16 + head)": lambda x: x.reshape(-1, 1),
    }


def _worst(errors: torch.Tensor, bounds: torch.Tensor) -> tuple[int, float, float]:
    """Flat index of the error that is largest for its bound, that error and its bound."""
    k = int(_ratio(errors, bounds).argmax())
    return k, errors.flatten()[k].item(), bounds.flatten()[k].item()


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 error, in float64, of tensors of one shape; 0 where both are zero."""
    expected = expected.double()
    return _ratio((output.double() - expected).norm(), expected.norm()).item()


@dataclass(frozen=True)
class _Miscount:
    """A group of tokens whose weight in the output is off by `excess` from `right_weight`."""

    excess: float
    right_weight: int
    tokens: str
    rank: float


def _worst_group(
    moved: torch.Tensor, known: torch.Tensor, sigmas: float, right_weight: int, name: Callable[[int], str]
) -> _Miscount:
    """The worst of the groups of tokens whose least-squares coefficient is `moved` / `known`, (groups,) each."""
    evidence = _ratio(moved.abs(), known.sqrt())
    excess = torch.where(evidence > sigmas, _ratio(moved, known), 0.0)
    size = excess.abs()
    # Of miscounted groups name the surest: a lost split rather than its heaviest token.
    rank = torch.where(size > WEIGHT_TOLERANCE, evidence, size)
    k = int(rank.argmax())
    return _Miscount(excess[k].item(), right_weight, name(k), rank[k].item())


@dataclass(frozen=True)
class _SequenceError:
    """The error of one sequence's (query, head) rows: float64 `rows` (r, 576), `ref` and `error` (r, 512)."""

    rows: torch.Tensor
    ref: torch.Tensor
    error: torch.Tensor
    row_weight: torch.Tensor

    @classmethod
    def of(cls, q: torch.Tensor, ref: torch.Tensor, output: torch.Tensor) -> "_SequenceError":
        """All (s_q, 16, dims)."""
        rows, ref, error = q.double().flatten(0, 1), ref.flatten(0, 1), (output - ref).flatten(0, 1)
        # Below a bf16's rounding the error says nothing; the floor also keeps exact rows from dividing by zero.
        noise = torch.maximum(error.square().mean(-1), (ROUNDING["bf16"] * ref).square().mean(-1))
        # A row without noise sees no token: it is judged elsewhere.
        return cls(rows, ref, error, torch.where(noise == 0, 0.0, 1 / noise)[:, None])

    def project(self, p: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted products of a_jh = p_jh (v_j - out_h) with the error and with itself, (r, tokens) each."""
        values = keys[:, :V_HEAD_DIM]
        along = self.error @ values.mT - (self.error * self.ref).sum(-1, keepdim=True)
        squares = values.square().sum(-1)
        size = squares - 2 * (self.ref @ values.mT) + self.ref.square().sum(-1, keepdim=True)
        # Where v_j is all of out_h, as with one token, the difference is rounding and the weight unknowable.
        size = torch.maximum(size, squares * 1e-12)
        return self.row_weight * p * along, self.row_weight * p.square() * size


def _miscounts_at_causal_limit(
    errors: _SequenceError, keys: torch.Tensor, lse: torch.Tensor, s_q: int, sm_scale: float
) -> list[_Miscount]:
    """Miscounts among the last s_q tokens of a sequence, query by query; `keys` are those of them that exist.

    A token that a query must not see has the right weight 0; a kernel that lets it in moves the row by
    p / (1 + p) (v_j - out_h), p being its weight relative to the visible ones.
    """
    share = torch.sigmoid((errors.rows @ keys.mT) * sm_scale - lse)
    # (queries, last s_q tokens): the diagonal holds every query's last visible token, the triangle above hidden ones.
    moved, known = (
        torch.nn.functional.pad(x.view(s_q, NUM_HEADS, -1).sum(1), (s_q - keys.shape[0], 0))
        for x in errors.project(share, keys)
    )
    moved_last, known_last = (x.diagonal().sum()[None] for x in (moved, known))
    moved_hidden, known_hidden = moved.triu(1), known.triu(1)
    groups = (
        (lambda x: x.sum()[None], lambda k: "the tokens past the causal limit"),
        (lambda x: x.sum(1), lambda k: f"the tokens past the causal limit of query {k}"),
        (
            lambda x: torch.stack([x.diagonal(r).sum() for r in range(1, s_q)]),
            lambda k: f"each query's token {k + 1} past the causal limit",
        ),
        (lambda x: x.flatten(), lambda k: f"token {k % s_q - k // s_q} past the causal limit of query {k // s_q}"),
    )
    return [
        _worst_group(moved_last, known_last, SIGMAS, 1, lambda k: "the last token that each query sees"),
        *(_worst_group(group(moved_hidden), group(known_hidden), SIGMAS, 0, name) for group, name in groups),
    ]


def _judge_tokens(
    data: input_t, output: torch.Tensor, kv: str, out: torch.Tensor, lse: torch.Tensor
) -> tuple[_Miscount, torch.Tensor]:
    """The group of tokens that `output` most evidently counts with a wrong weight, else the one farthest from it.

    Leaving token j out changes row h by -a_jh, a_jh = p_jh (v_j - out_h), up to a factor near 1. So the least-squares
    coefficient of the error on a_jh, rows weighted by their noise, is the token's weight less the right one. Groups
    are single tokens, 64 consecutive ones, those with the same position modulo 64, and those at the causal limit.

    Also returns sum_j (p_jh v_j)^2, the variance of a row's sampling noise by element: float32 (total_q, 16, 512).
    """
    q, kv_data, _, kv_indptr, config = data
    bounds, s_q, sm_scale = kv_indptr.tolist(), config["q_seq_len"], config["sm_scale"]
    worst = _Miscount(0.0, 1, "none", 0.0)
    variance = out.new_zeros(out.shape, dtype=torch.float32)
    for b, visible in enumerate(_visible(data)):
        start, stop = bounds[b], bounds[b + 1]
        if start == stop:
            continue
        queries = slice(b * s_q, (b + 1) * s_q)
        errors = _SequenceError.of(q[queries], out[queries], output[queries])
        row_lse = lse[queries].reshape(-1, 1)
        visible = visible.repeat_interleave(NUM_HEADS)
        shift, power = q.new_zeros((2, _round_up(stop - start, TOKEN_GROUP)), dtype=torch.float64)
        for i, j in _chunks(start, stop):
            cached = read_cache(kv_data, kv, i, j)
            keys = cached.double()
            scores = _scores(errors.rows, keys, visible, i - start, sm_scale)
            p = torch.exp(scores - row_lse).nan_to_num(0.0)
            moved, known = errors.project(p, keys)
            shift[i - start : j - start] = moved.sum(0)
            power[i - start : j - start] = known.sum(0)
            variance[queries] += (p.float().square() @ cached[:, :V_HEAD_DIM].square()).view(s_q, NUM_HEADS, -1)
        shift, power = shift.view(-1, TOKEN_GROUP), power.view(-1, TOKEN_GROUP)
        miscounts = [
            _worst_group(group(shift), group(power), WEIGHT_SIGMAS, 1, name)
            for group, name in (
                (lambda x: x.flatten(), lambda k: f"token {k}"),
                (lambda x: x.sum(1), lambda k: f"tokens {k} * 64 to + 63"),
                (lambda x: x.sum(0), lambda k: f"every 64th token from {k}"),
            )
        ]
        if s_q > 1:
            tail = read_cache(kv_data, kv, max(start, stop - s_q), stop).double()
            miscounts += _miscounts_at_causal_limit(errors, tail, row_lse, s_q, sm_scale)
        candidate = max(miscounts, key=lambda miscount: miscount.rank)
        if candidate.rank > worst.rank:
            worst = replace(candidate, tokens=f"{candidate.tokens} of sequence {b}")
    return worst, variance


def strict_check(data: input_t, output: output_t, kv: str | None = None) -> StrictReport:
    """Judge `output`, bfloat16 (total_q, 16, 512), of a kernel that read cache `kv` (None: the closest of the three).

    It passes if all of these hold; no element is forgiven, NaN and Inf never pass.
    - Kernel error against the oracle over the same cache, of all rows together, each row and each element alone.
    - End-to-end error against the bf16 oracle, at most `OWN_ERROR_MULTIPLE` times the cache's own quantisation error
      with the kernel bound added in quadrature.
    - Slope of the output on the oracle within 1 +- 0.01: overall, for each head, each sequence and each row, wider
      where a group is too small to tell.
    - Every group of tokens that the output can resolve counts with its weight, 0 for those that a query must not see:
      `_judge_tokens`.
    The bounds hold for the contract's standard normal inputs. Raises as `oracle` does.
    """
    if kv is not None:
        _require_format(kv)
    _require_case(data)
    problem = _malformed(data, output) or _not_finite(output)
    if problem:
        return StrictReport(False, problem, kv)
    x = output.double()
    unseen = _visible(data).flatten() == 0
    if x[unseen].any():
        row = int(x[unseen].flatten(1).any(-1).nonzero()[0])
        query = int(unseen.nonzero()[row])
        return StrictReport(False, f"output: expected zeros for query {query}, which sees no token", kv)

    q = data[0].double()
    candidates = FORMATS if kv is None else dict.fromkeys((kv, "bf16"))
    attended = {name: _attend(q, data, name) for name in candidates}
    if kv is None:
        kv = min(FORMATS, key=lambda name: relative_error(x, attended[name][0]))
    out, lse = attended[kv]
    exact = attended["bf16"][0]

    model = _ErrorModel.of(data, kv)
    groupings = _groupings(data[4]["batch_size"])
    failures: list[str] = []

    def require(what: str, error: float, bound: float, where: str = "") -> None:
        if not error <= bound:
            failures.append(f"{what} {error:.2e} > {bound:.2e}{where}")

    kernel_error = relative_error(x, out)
    kernel_bound = model.error_bound(groupings["all rows"]).item()
    require("kernel error", kernel_error, kernel_bound)

    own_error = relative_error(out, exact)
    end_to_end_error = relative_error(x, exact)
    end_to_end_bound = math.hypot(OWN_ERROR_MULTIPLE * own_error, kernel_bound)
    require("end-to-end error", end_to_end_error, end_to_end_bound)

    row_errors = _ratio((x - out).norm(dim=-1), out.norm(dim=-1)).flatten()
    row, worst_row_error, row_bound = _worst(row_errors, model.error_bound(groupings["row (query * 16 + head)"]))
    query, head = divmod(row, NUM_HEADS)
    require("error", worst_row_error, row_bound, f" of query {query}, head {head}")

    miscount, variance = _judge_tokens(data, x, kv, out, lse)
    element_bounds = model.element_bound(out, data[4]["sm_scale"] * q[..., :V_HEAD_DIM], variance)
    k, worst_element_error, element_bound = _worst((x - out).abs(), element_bounds)
    row, dim = divmod(k, V_HEAD_DIM)
    query, head = divmod(row, NUM_HEADS)
    require("error", worst_element_error, element_bound, f" of query {query}, head {head}, dim {dim}")

    dot, square = (x * out).sum(-1), out.square().sum(-1)
    slope, worst_slope, slope_bound = math.nan, 1.0, SLOPE_TOLERANCE
    for name, group in groupings.items():
        gains = _ratio(group(dot).sum(-1) - group(square).sum(-1), group(square).sum(-1))
        tolerances = model.slope_bound(group)
        k, _, tolerance = _worst(gains.abs(), tolerances)
        gain = gains[k].item()
        if name == "all rows":
            slope = 1 + gain
        if abs(gain) / tolerance >= abs(worst_slope - 1) / slope_bound:
            worst_slope, slope_bound = 1 + gain, tolerance
        if not abs(gain) <= tolerance:
            failures.append(f"slope {1 + gain:.4f} not within 1 +- {tolerance:.4f} for {name} {k}")

    if not abs(miscount.excess) <= WEIGHT_TOLERANCE:
        weight = miscount.right_weight + miscount.excess
        failures.append(f"weight {weight:.2f} instead of {miscount.right_weight} for {miscount.tokens}")

    figures = f"{kv}: kernel error {kernel_error:.2e} (bound {kernel_bound:.2e}), slope {slope:.4f}"
    return StrictReport(
        passed=not failures,
        message="; ".join([f"{kv}: {failures[0]}", *failures[1:]]) if failures else figures,
        kv=kv,
        kernel_error=kernel_error,
        kernel_bound=kernel_bound,
        end_to_end_error=end_to_end_error,
        end_to_end_bound=end_to_end_bound,
        own_error=own_error,
        slope=slope,
        worst_slope=worst_slope,
        slope_bound=slope_bound,
        worst_row_error=worst_row_error,
        row_bound=row_bound,
        worst_element_error=worst_element_error,
        element_bound=element_bound,
        worst_weight=1 + miscount.excess,
    )


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    """The strict check in the form of the official `check_implementation`: (passed, message)."""
    report = strict_check(data, output)
    return report.passed, report.message
