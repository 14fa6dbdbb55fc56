"""Runs AITER's stage-1 MLA decode code objects (16 heads, q_seq_len 1) in the emulator.

Kernel arguments: 304 bytes, one value per 16-byte slot; the slots are listed in `_kernarg`.
"""

import struct
from dataclasses import dataclass, field

import torch

from .. import aiter_wheel
from .machine import Emulator, Run
from .state import Memory

HEADS, QK_DIM, V_DIM = 16, 576, 512
WAVES = 4

SPLIT = {
    "fp8": "mla_a8w8_qh16_qseqlen1_gqaratio16",
    "bf16": "mla_dec_stage1_bf16_a16w16_subQ16_mqa16",
}
PERSISTENT = {
    ("fp8", "fp8"): "mla_a8w8_qh16_qseqlen1_gqaratio16_ps",
    ("bf16", "fp8"): "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps",
    ("bf16", "bf16"): "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_ps",
}
_DTYPES = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
_emulators: dict[str, Emulator] = {}


@dataclass
class Problem:
    """q [b, 16, 576]; kv [pool, 576], pages of one token; sequence i owns indices[indptr[i] : indptr[i + 1]].

    A scale of None is 1 and a null pointer.
    """

    q: torch.Tensor
    kv: torch.Tensor
    indptr: torch.Tensor  # int32 [b + 1]
    indices: torch.Tensor  # int32 [sum of lengths]
    q_scale: float | None = None
    kv_scale: float | None = None
    sm_scale: float = QK_DIM**-0.5

    @classmethod
    def random(cls, lengths: list[int], q_form: str, kv_form: str, seed: int = 0) -> "Problem":
        generator = torch.Generator().manual_seed(seed)
        total = sum(lengths)
        pool = total + 5
        return cls(
            q=torch.randn(len(lengths), HEADS, QK_DIM, generator=generator).to(_DTYPES[q_form]),
            kv=torch.randn(pool, QK_DIM, generator=generator).to(_DTYPES[kv_form]),
            indptr=torch.tensor([0, *lengths]).cumsum(0).int(),
            indices=torch.randperm(pool, generator=generator)[:total].int(),
            q_scale=0.7 if q_form == "fp8" else None,
            kv_scale=0.5 if kv_form == "fp8" else None,
        )

    def attention(self, sequence: int, start: int = 0, end: int | None = None):
        """float64 (output [16, 512], natural-log LSE [16]) over tokens start .. end (exclusive) of a sequence."""
        first, last = self.indptr[sequence : sequence + 2].tolist()
        pages = self.indices[first + start : last if end is None else first + end].long()
        kv = self.kv[pages].double() * (self.kv_scale or 1.0)
        scores = self.q[sequence].double() * (self.q_scale or 1.0) @ kv.T * self.sm_scale
        return torch.softmax(scores, dim=1) @ kv[:, :V_DIM], torch.logsumexp(scores, dim=1)


@dataclass
class Stage1:
    """partial float32 [rows, 16, 512], lse float32 [rows, 16] (natural log), output bf16 [b, 16, 512].

    NaN where nothing was written.
    """

    partial: torch.Tensor
    lse: torch.Tensor
    output: torch.Tensor
    run: Run | None = field(default=None)


def _launch(name: str, grid, problem: Problem, rows: int, slots: dict, memory: Memory, options: dict) -> Stage1:
    if name not in _emulators:
        _emulators[name] = Emulator(aiter_wheel.code_object(name))
    emulator = _emulators[name]
    batch = problem.q.shape[0]
    result = Stage1(
        torch.full((rows, HEADS, V_DIM), torch.nan),
        torch.full((rows, HEADS), torch.nan),
        torch.full((batch, HEADS, V_DIM), torch.nan, dtype=torch.bfloat16),
    )

    def add(tensor, label):
        return memory.add(tensor, label, writable=False)

    def scale(value, label):
        return 0 if value is None else add(torch.tensor([value]), label)

    slots = {
        0x00: memory.add(result.partial, "partial output"),
        0x10: memory.add(result.lse, "partial LSE"),
        0x20: add(problem.q, "q"),
        0x30: add(problem.kv, "kv"),
        0x50: add(problem.indices, "page indices"),
        0x70: problem.sm_scale,
        0x80: HEADS,
        0xB0: QK_DIM * problem.kv.element_size(),
        0xF0: memory.add(result.output, "output"),
        0x100: scale(problem.q_scale, "q_scale"),
        0x110: scale(problem.kv_scale, "kv_scale"),
        **slots,
    }
    kernarg = bytearray(304)
    for offset, value in slots.items():
        struct.pack_into("<f" if isinstance(value, float) else "<Q", kernarg, offset, value)
    (kernel,) = emulator.code.kernels
    result.run = emulator.launch(kernel, grid, bytes(kernarg), WAVES, memory, **options)
    return result


def run_split(name: str, problem: Problem, splits: int, **options) -> Stage1:
    """The non-persistent kernels; row b * splits + s holds split s of sequence b."""
    memory, batch = Memory(), problem.q.shape[0]

    def add(tensor, label):
        return memory.add(tensor.int(), label, writable=False)

    slots = {
        0x40: add(problem.indptr, "kv_indptr"),
        0x60: add(torch.ones(batch), "last page lengths"),
        0x90: splits,
        0xA0: HEADS * QK_DIM * problem.q.element_size(),
        0xD0: add(torch.arange(batch + 1), "qo_indptr"),
        0xE0: add(torch.arange(batch + 1) * splits, "splits indptr"),
        0x120: splits,
    }
    return _launch(name, (1, batch, splits), problem, batch * splits, slots, memory, options)


def run_persistent(
    name: str, problem: Problem, work_indptr: torch.Tensor, work_info: torch.Tensor, rows: int, **options
) -> Stage1:
    """The persistent kernels, one work-group per compute unit.

    work_indptr int32 [units + 1]; work_info int32 [items, 8]: batch, partial row (negative: write `output`), q_start,
    q_end, kv_start, kv_end, tokens of the sequence after kv_end, padding. rows: partial rows to allocate.
    """
    memory = Memory()
    tables = [memory.add(work_indptr.int(), "work_indptr"), memory.add(work_info.int().contiguous(), "work_info")]
    slots = {0xE0: memory.add(torch.tensor(tables, dtype=torch.int64), "work_metadata", writable=False)}
    return _launch(name, (len(work_indptr) - 1, 1, 1), problem, max(rows, 1), slots, memory, options)


def work_tables(problem: Problem, units: list[list[tuple[int, int, int, int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(work_indptr, work_info) from each unit's items (sequence, start, end, partial row)."""
    indptr = torch.tensor([0, *(len(items) for items in units)]).cumsum(0).int()
    lengths = problem.indptr.diff().tolist()
    info = [
        [b, row, b, b + 1, int(problem.indptr[b]) + start, int(problem.indptr[b]) + end, lengths[b] - end, 0]
        for items in units
        for b, start, end, row in items
    ]
    return indptr, torch.tensor(info, dtype=torch.int32)
