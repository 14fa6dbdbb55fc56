"""CPU model of the AITER ops that the arms use, strict about what the compiled ops are strict about, and a recorder.

The real ops misread wrong input without an error; the model raises `Misuse` instead. It installs itself as the package
`aiter` and as `torch.ops.aiter`, with the schemas of one of three versions: "wheel" (the PyPI build of November 2025),
"pin" (the runner's commit) or "head" (August 2026). Its ops have real torch schemas but are not registered: torch does
not survive registering and removing ops of one name many times.

What it computes is float64 attention over what the work items name, with P rounded as the kernels round it. With
`arithmetic=False` it checks and records only, for shapes that are too large for a CPU.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import submission
from bench.schedules import fast_schedule, intra_batch_schedule

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
H_Q, D_QK, D_V = 16, 576, 512
BLOCK = 64  # tokens that the non-persistent kernel deals to its splits at a time


class Misuse(ValueError):
    """What the real op would refuse, or take and misread."""


def need(ok: bool, message: str) -> None:
    if not ok:
        raise Misuse(message)


# ---- the three versions ----

_STAGE1 = (
    "Tensor Q, Tensor KV, Tensor qo_indptr, Tensor kv_indptr, Tensor kv_page_indices, Tensor kv_last_page_lens, "
    "Tensor? num_kv_splits_indptr, Tensor? {addresses}, Tensor? work_indptr, Tensor? work_info_set, int max_seqlen_q, "
    "{pages}float softmax_scale, Tensor splitData, Tensor splitLse, Tensor output, {lse}Tensor? q_scale=None, "
    "Tensor? kv_scale=None{tail}"
)
_PAGES = "int page_size, int nhead_kv, "
_CONTEXT_PARALLEL = (
    ", Tensor? g_kv_indptr=None, int cp_world_size=1, int cp_rank=0, Tensor? valid_split_count=None, "
    "int use_valid_split_count_reduce=0, bool causal=True"
)
_REDUCE = (
    "Tensor partial_output, Tensor partial_lse, Tensor reduce_indptr, Tensor? reduce_final_map, "
    "Tensor reduce_partial_map, {extra}Tensor final_output, Tensor? final_lse=None"
)
_METADATA = (
    "Tensor seqlens_qo_indptr, Tensor seqlens_kv_indptr, {lens}int num_heads_per_head_k, int num_heads_k, "
    "bool is_causal, Tensor work_metadata_ptrs, Tensor {first}, Tensor {second}, Tensor reduce_indptr, "
    "Tensor reduce_final_map, Tensor reduce_partial_map, {page}int kv_granularity=16, int max_seqlen_qo=-1, "
    "int uni_seqlen_qo=-1, bool fast_mode=True, int topk=-1, int max_split_per_batch=-1{tail}"
)
_NEW_METADATA = _METADATA.format(
    lens="Tensor kv_last_page_lens, ", first="work_info_set", second="work_indptr", page="int page_size=1, ",
    tail=", bool intra_batch_mode=False, ScalarType? dtype_q=None, ScalarType? dtype_kv=None",
)  # fmt: skip
_QUANT = "Tensor out, Tensor input, Tensor scale"

SCHEMAS: dict[str, dict[str, str]] = {
    "wheel": {
        "mla_decode_stage1_asm_fwd": _STAGE1.format(addresses="work_metadata", pages="", lse="", tail=""),
        "mla_reduce_v1": _REDUCE.format(extra=""),
        # The stub names the two buffers the wrong way round; the compiled op takes the items first.
        "get_mla_metadata_v1": _METADATA.format(lens="", first="work_indptr", second="work_info", page="", tail=""),
        "dynamic_per_tensor_quant": _QUANT,
    },
    "pin": {
        "mla_decode_stage1_asm_fwd": _STAGE1.format(addresses="work_meta_data", pages=_PAGES, lse="", tail=""),
        "mla_reduce_v1": _REDUCE.format(extra="int max_seqlen_q, "),
        "get_mla_metadata_v1": _NEW_METADATA,
        "dynamic_per_tensor_quant": _QUANT,
    },
    "head": {
        "mla_decode_stage1_asm_fwd": _STAGE1.format(
            addresses="work_meta_data", pages=_PAGES, lse="Tensor? lse=None, ", tail=_CONTEXT_PARALLEL
        ),
        "mla_reduce_v1": _REDUCE.format(extra="int max_seqlen_q, int num_kv_splits, "),
        "get_mla_metadata_v1": _NEW_METADATA,
        "dynamic_per_tensor_quant": _QUANT,
    },
}


@dataclass(frozen=True)
class Call:
    """One call of an op: its arguments by the op's own names."""

    op: str
    values: dict[str, Any]

    def pointers(self) -> dict[str, int]:
        return {name: x.data_ptr() for name, x in self.values.items() if isinstance(x, torch.Tensor)}


class ModelOp:
    """Stands for `torch.ops.aiter.NAME`: binds its arguments by a torch schema, records them, runs the model's code."""

    running = 0

    def __init__(self, model: "AiterModel", name: str, schema: str, implementation: Callable[[dict], None]):
        numbers = iter(range(100))
        # The real schemas declare every tensor as written to.
        schema = re.sub(r"\bTensor\b", lambda _: f"Tensor(a{next(numbers)}!)", schema)
        self.default = SimpleNamespace(_schema=torch._C.parse_schema(f"aiter::{name}({schema}) -> ()"))
        arguments = self.default._schema.arguments
        self._signature = inspect.Signature(
            [
                inspect.Parameter(
                    x.name,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=x.default_value if x.has_default_value() else inspect.Parameter.empty,
                )
                for x in arguments
            ]
        )
        self._tensors = {x.name: "Optional" in str(x.type) for x in arguments if "Tensor" in str(x.type)}
        self._model, self._name, self._implementation = model, name, implementation

    def __call__(self, *args, **kwargs) -> None:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(bound.arguments)
        for name, x in values.items():
            tensor = isinstance(x, torch.Tensor)
            expected = tensor or (x is None and self._tensors[name]) if name in self._tensors else not tensor
            if not expected:
                raise TypeError(f"{self._name}: {name} cannot be {type(x).__name__}")
        self._model.calls.append(Call(self._name, values))
        ModelOp.running += 1
        try:
            self._implementation(values)
        finally:
            ModelOp.running -= 1


@dataclass
class AiterModel:
    """`install` puts the model in place of AITER until `remove`.

    `schemas` overrides the version's, by op; an op set to None is left out.
    """

    version: str = "pin"
    num_cu: int = 256
    arithmetic: bool = True
    schemas: dict[str, str | None] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    # ---- installation ----

    def install(self) -> None:
        # Kept in the instance's dict, where torch looks before it makes a namespace.
        vars(torch.ops)["aiter"] = self.namespace = SimpleNamespace()
        aiter, mla, dtypes, ops, quant = (
            ModuleType(name) for name in ("aiter", "aiter.mla", "aiter.dtypes", "aiter.ops", "aiter.ops.quant")
        )
        for op, schema in (SCHEMAS[self.version] | self.schemas).items():
            if schema is None:
                continue
            setattr(quant if op.endswith("quant") else aiter, op, self._register(op, schema))
        self._register("stage2", "Tensor part, Tensor lse, Tensor kv_indptr, Tensor out")
        dtypes.fp8, dtypes.bf16, dtypes.fp32, dtypes.i32 = FP8, BF16, torch.float32, torch.int32
        aiter.mla, aiter.dtypes, aiter.ops, ops.quant = mla, dtypes, ops, quant
        quant.per_tensor_quant_hip = aiter.per_tensor_quant_hip = self._per_tensor_quant_hip
        aiter.get_mla_metadata_info_v1 = self._info_function()
        mla.mla_decode_fwd = self._decode_fwd_function()
        self.module = aiter
        self._replaced = {}
        for module in (aiter, mla, dtypes, ops, quant):
            self._replaced[module.__name__] = sys.modules.get(module.__name__)
            sys.modules[module.__name__] = module

    def remove(self) -> None:
        for name, module in self._replaced.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        del vars(torch.ops)["aiter"]

    def _register(self, name: str, schema: str) -> Callable:
        op = ModelOp(self, name, schema, getattr(self, f"_{name}"))
        setattr(self.namespace, name, op)

        def hidden(*args, **kwargs):
            return op(*args, **kwargs)

        return hidden

    def ops(self) -> list[str]:
        return [call.op for call in self.calls]

    # ---- metadata ----

    def _info_function(self) -> Callable:
        def info(batch, is_sparse, fast_mode, num_kv_splits, intra_batch_mode):
            need(is_sparse is False, "is_sparse: the dense schedule is meant")
            cus = self.num_cu
            if intra_batch_mode:
                items = partials = batch * num_kv_splits
            elif fast_mode:
                items, partials = batch + cus - 1, min(batch + cus - 1, 2 * (cus - 1))
            else:
                items = partials = batch * cus
            i32 = torch.int32
            return (
                (2, torch.uint64), (cus + 1, i32), ((items, 8), i32), (batch + 1, i32), ((batch, 2), i32),
                (partials, i32),
            )  # fmt: skip

        if self.version == "wheel":

            def get_mla_metadata_info_v1(
                batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode=True
            ):
                return info(batch_size, is_sparse, fast_mode, 0, False)
        else:

            def get_mla_metadata_info_v1(
                batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode=True,
                num_kv_splits=32, intra_batch_mode=False,
            ):  # fmt: skip
                return info(batch_size, is_sparse, fast_mode, num_kv_splits, intra_batch_mode)

        return get_mla_metadata_info_v1

    def _get_mla_metadata_v1(self, v: dict) -> None:
        names = list(v)
        # By position, as the compiled op takes them whatever the stub calls them.
        addresses, work_info, work_indptr, *maps = (v[x] for x in names[names.index("work_metadata_ptrs") :][:6])
        qo, kv = v["seqlens_qo_indptr"], v["seqlens_kv_indptr"]
        batch = kv.numel() - 1
        for name, x in (("seqlens_qo_indptr", qo), ("seqlens_kv_indptr", kv)):
            need(x.dtype == torch.int32 and x.dim() == 1 and x.is_contiguous(), f"{name}: int32, contiguous")
        need((v["num_heads_per_head_k"], v["num_heads_k"]) == (H_Q, 1), "16 heads for each of one KV head are meant")
        need(addresses.dtype == torch.uint64 and addresses.numel() == 2, "work_metadata_ptrs: uint64 [2]")
        need(work_info.dim() == 2 and work_info.shape[1] == 8, "work_info_set: [items, 8]; is it work_indptr?")
        need(tuple(work_indptr.shape) == (self.num_cu + 1,), "work_indptr: [CUs + 1]; is it work_info_set?")
        need(all(x.dtype == torch.int32 for x in (work_info, work_indptr, *maps)), "work lists and maps: int32")
        if "page_size" in v:
            need(v["page_size"] == 1, "page_size: the kernels read one token of a larger page")
            need(v["dtype_q"] is not None and v["dtype_kv"] is not None, "dtype_q, dtype_kv: must be passed")
            need(v["kv_last_page_lens"].numel() == batch, "kv_last_page_lens: [batch]")
        lengths = kv.diff().tolist()
        need(kv[0].item() == 0, "seqlens_kv_indptr: must begin with 0")
        need(len(set(lengths)) == 1, "the model makes schedules for equal sequences only")
        if v.get("intra_batch_mode"):
            need(not v["fast_mode"], "fast_mode: must be off in intra-batch mode")
            need(lengths[0] >= 196, "the rule divides by zero under 196 tokens")
            schedule = intra_batch_schedule(batch, lengths[0], self.num_cu, v["max_split_per_batch"])
        else:
            need(v["fast_mode"], "the rule that is neither fast nor intra-batch is not modelled")
            need(v["max_split_per_batch"] < 0, "the fast rule is modelled without a limit")
            schedule = fast_schedule(batch, lengths[0], self.num_cu)
        names = ("work_info_set", "work_indptr", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
        for buffer, name in zip((work_info, work_indptr, *maps), names, strict=True):
            source = schedule[name]
            need(len(source) <= buffer.shape[0], f"a buffer of {buffer.shape[0]} rows for {len(source)}")
            buffer[: len(source)] = torch.tensor(source, dtype=torch.int32).view(-1, *buffer.shape[1:])
        addresses.view(torch.int64).copy_(torch.tensor([work_indptr.data_ptr(), work_info.data_ptr()]))

    # ---- quantisation ----

    def _dynamic_per_tensor_quant(self, v: dict) -> None:
        out, x, scale = v["out"], v["input"], v["scale"]
        need(out.dtype == FP8 and out.shape == x.shape and out.is_contiguous(), "out: fp8, shaped as the input")
        need(x.dtype == BF16 and x.is_contiguous(), "input: bf16, contiguous")
        need(scale.dtype == torch.float32 and scale.numel() == 1, "scale: float32 [1]")
        if self.arithmetic:
            scale.copy_(x.abs().max().float() / 448)
            out.copy_((x.float() / scale).clamp(-448, 448))

    def _per_tensor_quant_hip(self, x, scale=None, quant_dtype=torch.int8, num_rows=None, num_rows_factor=1):
        need(scale is None and quant_dtype == FP8, "the model quantises to fp8 with a dynamic scale")
        out, scale = torch.empty_like(x, dtype=FP8), torch.empty(1)
        values = {"out": out, "input": x, "scale": scale}
        self.calls.append(Call("per_tensor_quant_hip", values))
        self._dynamic_per_tensor_quant(values)
        return out, scale

    # ---- stage 1 ----

    def _mla_decode_stage1_asm_fwd(self, v: dict) -> None:
        q, kv, out = v["Q"], v["KV"], v["output"]
        need(q.dim() == 3 and q.is_contiguous(), "Q: 3-D, contiguous")
        need(kv.dim() == 4 and kv.is_contiguous(), "KV: 4-D, contiguous")
        need(q.shape[1:] == (H_Q, D_QK) and kv.shape[3] == D_QK, "Q and KV: 16 heads, 576 dims")
        need(kv.shape[1] == 1 and v.get("page_size", 1) == 1, "page_size: the kernels read one token of a larger page")
        need(kv.shape[2] == 1 and v.get("nhead_kv", 1) == 1, "nhead_kv: only 1")
        need(v["max_seqlen_q"] == 1, "max_seqlen_q: only 1 is modelled")
        need(kv.numel() * kv.element_size() < 1 << 32 and kv.shape[0] < 1 << 24, "KV: offsets over 4 GiB are misread")
        need(out.dtype == BF16 and out.is_contiguous(), "output: written as contiguous bf16, unchecked")
        need(tuple(out.shape) == (q.shape[0], H_Q, D_V), "output: [total_q, 16, 512]")
        batch = v["qo_indptr"].numel() - 1
        sizes = {"qo_indptr": batch + 1, "kv_indptr": batch + 1, "kv_last_page_lens": batch, "kv_page_indices": None}
        for name, size in sizes.items():
            x = v[name]
            need(x.dtype == torch.int32 and x.dim() == 1 and x.is_contiguous(), f"{name}: int32, 1-D, contiguous")
            need(size is None or x.numel() == size, f"{name}: {size} elements")
        need(q.shape[0] == batch, "Q: one query a sequence")
        tokens = int(v["kv_indptr"][-1])
        need(v["kv_page_indices"].numel() >= tokens, f"kv_page_indices: {tokens} tokens are read")
        formats = (q.dtype, kv.dtype)
        persistent = v["num_kv_splits_indptr"] is None
        known = {(BF16, BF16), (FP8, FP8)} | ({(BF16, FP8)} if persistent else set())
        need(formats in known, f"no kernel for Q {q.dtype} and KV {kv.dtype}, persistent: {persistent}")
        for name, used in (("q_scale", q.dtype == FP8), ("kv_scale", kv.dtype == FP8)):
            scale = v[name]
            need(not used or scale is not None, f"{name}: without it a garbage pointer is read")
            need(not used or scale.dtype == torch.float32 and scale.numel() >= 1, f"{name}: float32, on the device")
        for name in ("splitData", "splitLse"):
            need(v[name].is_contiguous() and v[name].dim() == 4, f"{name}: 4-D, contiguous")
        if persistent:
            self._persistent(v, batch)
        else:
            self._split_kv(v, batch)

    def _attend(self, v: dict, row: int, pages: torch.Tensor, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised output [16, 512] and natural-log sum-exp [16] of one query over these pages, float64."""
        q, kv = v["Q"][row].double(), v["KV"].view(-1, D_QK)
        need(bool(((pages >= 0) & (pages < kv.shape[0])).all()), "kv_page_indices: a page outside the pool")
        scale = float(v["kv_scale"].view(-1)[0]) if kv.dtype == FP8 else 1.0
        if v["Q"].dtype == FP8:
            q = q * float(v["q_scale"].view(-1)[0])
        k = kv[pages.long()].double() * scale
        x = q @ k.T * v["softmax_scale"]
        lse = torch.logsumexp(x, 1)
        p = torch.exp(x - x.amax(1, keepdim=True))
        norm = p.sum(1, keepdim=True)
        p = p.float().to(FP8 if v["Q"].dtype == FP8 else BF16).double()
        o = p @ k[:, :D_V] / norm
        if len(pages) % tile and not kv[0].float().isfinite().all():
            # The missing tokens of the last tile are read from token 0, and 0 x NaN is NaN.
            o, lse = o * float("nan"), lse * float("nan")
        return o, lse

    def _persistent(self, v: dict, batch: int) -> None:
        part, lse, out = v["splitData"], v["splitLse"], v["output"]
        addresses = v.get("work_meta_data", v.get("work_metadata"))
        indptr, info = v["work_indptr"], v["work_info_set"]
        need(all(x is not None for x in (addresses, indptr, info)), "the work lists: all three are needed")
        need(indptr.dtype == info.dtype == torch.int32, "the work lists: int32")
        need(indptr.dim() == 1 and info.dim() == 2 and info.shape[1] == 8, "work_indptr and work_info_set: swapped?")
        need(addresses.dtype == torch.uint64 and addresses.numel() == 2, "work_meta_data: uint64 [2]")
        pointers = addresses.view(torch.int64).tolist()
        need(pointers == [indptr.data_ptr(), info.data_ptr()], "work_meta_data: addresses of indptr, then items")
        need(indptr.numel() == self.num_cu + 1, "work_indptr: one entry a CU and one more")
        rows = part.shape[0]
        need(part.dtype == lse.dtype == torch.float32, "splitData, splitLse: float32")
        need(tuple(part.shape[1:]) == (1, H_Q, D_V) and tuple(lse.shape) == (rows, 1, H_Q, 1), "partials: [rows, ...]")

        ends = indptr.tolist()
        need(ends[0] == 0 and ends == sorted(ends) and ends[-1] <= info.shape[0], "work_indptr: must rise from 0")
        items = info[: ends[-1]].tolist()
        kv_indptr = v["kv_indptr"].tolist()
        covered: list[list[tuple[int, int]]] = [[] for _ in range(batch)]
        partial_rows: list[int] = []
        for cu in range(self.num_cu):
            mine = items[ends[cu] : ends[cu + 1]]
            order = [(item[0], item[4]) for item in mine]
            need(order == sorted(order), f"CU {cu}: items out of order")
            for b, row, q_start, q_end, start, end, rest, _ in mine:
                need(0 <= b < batch and (q_start, q_end) == (b, b + 1), f"CU {cu}: queries {q_start} to {q_end} of {b}")
                need(start < end, f"CU {cu}: an item without tokens ends its CU")
                need(rest == kv_indptr[b + 1] - end >= 0, f"CU {cu}: {rest} tokens said to follow")
                need((end - start) % 16 not in (1, 2, 3), f"CU {cu}: a tail under 4 tokens")
                tiles = (end - start) // 128 if v["Q"].dtype == FP8 else 1
                need(tiles == 0 or tiles % 2 == 1, f"CU {cu}: an even number of 128-token tiles")
                need(row < rows, f"CU {cu}: partial row {row} of {rows}")
                covered[b].append((start, end))
                if row >= 0:
                    partial_rows.append(row)
        need(len(set(partial_rows)) == len(partial_rows), "a partial row is written twice")
        for b, spans in enumerate(covered):
            position = kv_indptr[b]
            for start, end in sorted(spans):
                need(start == position, f"sequence {b}: a gap or an overlap at token {position}")
                position = end
            need(position == kv_indptr[b + 1], f"sequence {b}: tokens {position} to {kv_indptr[b + 1]} are left out")
            need(len(spans) != 16, f"sequence {b}: 16 splits")
        if not self.arithmetic:
            return
        tile = 128 if v["Q"].dtype == FP8 else 16
        for _, row, q_start, _, start, end, _, _ in items:
            o, sum_exp = self._attend(v, q_start, v["kv_page_indices"][start:end], tile)
            if row < 0:
                out[q_start] = o.to(BF16)
            else:
                part[row, 0], lse[row, 0, :, 0] = o.float(), sum_exp.float()

    def _split_kv(self, v: dict, batch: int) -> None:
        part, lse = v["splitData"], v["splitLse"]
        need(all(v[x] is None for x in ("work_indptr", "work_info_set")), "no work lists without persistence")
        total_q, splits = part.shape[:2]
        need(splits != 16, "16 splits")
        need(total_q == batch and tuple(part.shape[2:]) == (H_Q, D_V), "splitData: [total_q, splits, 16, 512]")
        need(tuple(lse.shape) == (total_q, splits, H_Q, 1) and lse.dtype == torch.float32, "splitLse: [.., 16, 1]")
        straight = v["Q"].dtype == FP8 and splits == 1
        need(part.dtype == (BF16 if straight else torch.float32), "splitData: float32, bf16 when written straight")
        need(v["num_kv_splits_indptr"].tolist() == [b * splits for b in range(batch + 1)], "num_kv_splits_indptr")
        need(v["kv_last_page_lens"].tolist() == [1] * batch, "kv_last_page_lens: 1 with pages of one token")
        if not self.arithmetic:
            return
        kv_indptr = v["kv_indptr"].tolist()
        for b in range(batch):
            pages = v["kv_page_indices"][kv_indptr[b] : kv_indptr[b + 1]]
            blocks = torch.arange(len(pages)) // BLOCK
            for split in range(min(splits, -(-len(pages) // BLOCK))):
                o, sum_exp = self._attend(v, b, pages[blocks % splits == split], BLOCK)
                part[b, split], lse[b, split, :, 0] = o.to(part.dtype), sum_exp.float()

    # ---- reduce ----

    def _mla_reduce_v1(self, v: dict) -> None:
        part, lse, out, final_lse = v["partial_output"], v["partial_lse"], v["final_output"], v["final_lse"]
        indptr, final_map, partial_map = v["reduce_indptr"], v["reduce_final_map"], v["reduce_partial_map"]
        need(part.dtype == lse.dtype == torch.float32, "partial_output, partial_lse: float32")
        need(part.is_contiguous() and lse.is_contiguous(), "partial_output, partial_lse: contiguous")
        need(tuple(part.shape[-2:]) == (H_Q, D_V) and lse.numel() == part.numel() // D_V, "partials: [rows, 16, ...]")
        need(all(x.dtype == torch.int32 and x.is_contiguous() for x in (indptr, final_map, partial_map)), "maps: int32")
        need(final_map.dim() == 2 and final_map.shape[1] == 2, "reduce_final_map: [batch, 2]")
        need(out.dtype == BF16 and out.shape[-1] == D_V, "final_output: bf16, [total_q, 16, 512]")
        need(v.get("max_seqlen_q", 1) == 1, "max_seqlen_q: only 1 is modelled")
        need(final_lse is None or final_lse.dtype == torch.float32, "final_lse: float32")
        need(v.get("num_kv_splits", 0) == 0, "num_kv_splits: 0 (automatic) is meant")
        ends = indptr.tolist()
        for tile, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
            need(0 <= start <= end <= partial_map.numel(), "reduce_indptr: must rise within the partial map")
            need(end - start <= self.num_cu, f"tile {tile}: {end - start} splits, and only {self.num_cu} are read")
            if end - start < 2 or not self.arithmetic:
                continue
            rows = partial_map[start:end].long()
            need(bool(((rows >= 0) & (rows < part.shape[0])).all()), "reduce_partial_map: a row outside the partials")
            sums = lse.view(-1, H_Q)[rows].double()
            total = torch.logsumexp(sums, 0)
            weights = torch.exp(sums - total)
            q_start, q_end = final_map[tile].tolist()
            need(q_end - q_start == 1, "reduce_final_map: one query a tile")
            out[q_start] = (weights[..., None] * part.view(-1, H_Q, D_V)[rows].double()).sum(0).to(BF16)
            if final_lse is not None:
                final_lse[q_start] = total.float()

    # ---- the Python layer of "pin" and "head" ----

    def _decode_fwd_function(self) -> Callable:
        def decode(
            q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, page_size=1,
            nhead_kv=1, sm_scale=None, logit_cap=0.0, num_kv_splits=None, num_kv_splits_indptr=None,
            work_meta_data=None, work_indptr=None, work_info_set=None, reduce_indptr=None, reduce_final_map=None,
            reduce_partial_map=None, q_scale=None, kv_scale=None, intra_batch_mode=False, return_logits=False,
            return_lse=False,
        ):  # fmt: skip
            sm_scale = D_QK**-0.5 if sm_scale is None else sm_scale
            common = {
                "Q": q, "KV": kv_buffer, "qo_indptr": qo_indptr, "kv_indptr": kv_indptr,
                "kv_page_indices": kv_indices, "kv_last_page_lens": kv_last_page_lens, "max_seqlen_q": max_seqlen_q,
                "softmax_scale": sm_scale, "output": o, "q_scale": q_scale, "kv_scale": kv_scale,
            }  # fmt: skip
            if self.version == "wheel":
                common["work_metadata"] = work_meta_data
            else:
                common |= {"work_meta_data": work_meta_data, "page_size": page_size, "nhead_kv": nhead_kv}
            persistent = work_meta_data is not None
            rows = (reduce_partial_map.shape[0], 1) if persistent else (q.shape[0], num_kv_splits)
            part, lse = torch.empty(*rows, H_Q, D_V), torch.empty(*rows, H_Q, 1)
            self.module.mla_decode_stage1_asm_fwd(
                **common, num_kv_splits_indptr=num_kv_splits_indptr, work_indptr=work_indptr,
                work_info_set=work_info_set, splitData=part, splitLse=lse,
            )  # fmt: skip
            if persistent:
                extra = {"wheel": (), "pin": (max_seqlen_q,), "head": (max_seqlen_q, 0)}[self.version]
                self.module.mla_reduce_v1(
                    part, lse, reduce_indptr, reduce_final_map, reduce_partial_map, *extra, o, None
                )
            else:
                torch.ops.aiter.stage2(part, lse, kv_indptr, o)

        # The wheel reads the page size off the cache.
        absent = {"page_size", "nhead_kv", "intra_batch_mode", "return_logits", "return_lse"}
        absent = absent if self.version == "wheel" else set()
        parameters = inspect.signature(decode).parameters.values()
        signature = inspect.Signature([x for x in parameters if x.name not in absent])

        def mla_decode_fwd(*args, **kwargs):
            decode(**signature.bind(*args, **kwargs).arguments)

        mla_decode_fwd.__signature__ = signature
        return mla_decode_fwd

    def _stage2(self, v: dict) -> None:
        """The library's Triton combine of the non-persistent kernel."""
        part, lse = v["part"], v["lse"]
        if not self.arithmetic:
            return
        for b, length in enumerate(v["kv_indptr"].diff().tolist()):
            valid = min(part.shape[1], -(-length // BLOCK))
            weights = torch.softmax(lse[b, :valid, :, 0].double(), 0)
            v["out"][b] = (weights[..., None] * part[b, :valid].double()).sum(0).to(BF16)


# ---- the submission over the model ----


SHAPE_CACHES = ("_PLANS", "_SCRATCH")


@contextlib.contextmanager
def standing_in(model: AiterModel) -> Iterator[AiterModel]:
    """Installs the model; the submission starts with empty caches and takes the CPU for a gfx950 with its CUs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in SHAPE_CACHES:
            patch.setattr(submission, name, {})
        submission._say_once.cache_clear()
        patch.setattr(submission, "_target", lambda device: submission.Target("gfx950", model.num_cu))
        submission._aiter.cache_clear()
        model.install()
        try:
            yield model
        finally:
            model.remove()
            submission._aiter.cache_clear()


def call_of(data: tuple, arm: str, tile: int | None = None) -> Callable[[tuple], torch.Tensor]:
    """An arm as a function of inputs like `data`, with its own tile unless told."""
    problem, config, mode = submission.problem_of(data), submission.Config(arm), submission.AITER_MODES[arm]
    mode = mode._replace(tile=tile or mode.tile)
    assert submission._no_aiter(problem, mode) is None
    return lambda data: submission._run_aiter(data, problem, config, mode)


# ---- watching a call ----

SYNCHRONISING = {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "equal")
}


def _frame_outside_torch() -> str:
    frame = sys._getframe(2)
    while (
        frame.f_code.co_filename.split("/")[-1] == "aiter_model.py"
        and frame.f_code.co_name != "decode"
        or ("/torch/" in frame.f_code.co_filename)
    ):
        frame = frame.f_back
    return Path(frame.f_code.co_filename).name


class Watch(TorchDispatchMode):
    """While entered, collects (file, op) of each torch op that returns new storage, and of each that writes data.

    Ops inside the modelled ones are not seen. `synchronised` has the calls that would wait for a GPU.
    """

    def __init__(self):
        super().__init__()
        self.allocated: list[tuple[str, str]] = []
        self.written: list[tuple[str, str]] = []
        self.synchronised: list[str] = []
        self._functions = _FunctionWatch(self.synchronised)

    def __enter__(self):
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        return self._functions.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if ModelOp.running:
            return out
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in known:
                self.allocated.append((_frame_outside_torch(), str(func)))
        if func._schema.is_mutable:
            self.written.append((_frame_outside_torch(), str(func)))
        return out


class _FunctionWatch(TorchFunctionMode):
    def __init__(self, synchronised: list[str]):
        super().__init__()
        self.synchronised = synchronised

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in SYNCHRONISING and not ModelOp.running:
            self.synchronised.append(func.__name__)
        return func(*args, **(kwargs or {}))
