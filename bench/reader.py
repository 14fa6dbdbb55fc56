"""The roof of every measurement: a kernel that only reads the bytes an exact decode has to read.

`Reader(tensors, timer)` is a callable. On a GPU with Triton it is one launch in which each program sums
a block of the tensors' bytes, taken as int32, and stores the sum; the fastest of `CONFIGS` is kept. On a CPU it is
torch's sum over the same bytes.
"""

import statistics
from dataclasses import dataclass
from typing import Any, Protocol

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


class Timer(Protocol):
    """The part of `eval.ColdTimer` the reader uses."""

    on_gpu: bool

    def time_ns(self, call: Any) -> tuple[float, Any]: ...


@dataclass(frozen=True)
class ReaderConfig:
    """`block` int32 values per program and pass, `passes` of them in flight one after the other."""

    block: int
    passes: int
    num_warps: int


# 4 to 16 loads of 16 bytes per thread are in flight at once; more programs suit small inputs, longer ones large inputs.
CONFIGS = (
    ReaderConfig(block=2048, passes=1, num_warps=4),
    ReaderConfig(block=4096, passes=2, num_warps=8),
    ReaderConfig(block=4096, passes=4, num_warps=4),
    ReaderConfig(block=8192, passes=4, num_warps=8),
)
TUNING_RUNS = 7


if triton is not None:

    @triton.jit
    def _sum_block(ptr, n, block, BLOCK: tl.constexpr, PASSES: tl.constexpr):
        """Sum of the BLOCK * PASSES values of `ptr`, int32 [n], that belong to `block`."""
        first = block.to(tl.int64) * (BLOCK * PASSES)
        total = tl.zeros([BLOCK], tl.int32)
        for index in tl.static_range(PASSES):
            offs = first + index * BLOCK + tl.arange(0, BLOCK)
            total += tl.load(ptr + offs, mask=offs < n, other=0)
        return tl.sum(total, 0)

    @triton.jit
    def _read(
        a_ptr,  # int32 [n_a]
        b_ptr,  # int32 [n_b]
        out_ptr,  # int32 [programs]
        n_a,
        n_b,
        programs_a,
        BLOCK: tl.constexpr,
        PASSES: tl.constexpr,
    ):
        """Grid (programs_a + programs_b,): the first programs_a sum one block each of `a`, the others of `b`."""
        pid = tl.program_id(0)
        # Two branches, not one selected pointer: its alignment would be lost, and the 16-byte loads with it.
        if pid < programs_a:
            tl.store(out_ptr + pid, _sum_block(a_ptr, n_a, pid, BLOCK, PASSES))
        else:
            tl.store(out_ptr + pid, _sum_block(b_ptr, n_b, pid - programs_a, BLOCK, PASSES))


def cache_tensors(data: tuple, kv: str) -> tuple[torch.Tensor, ...]:
    """The tensors of `data` a kernel over the cache `kv` ("bf16", "fp8" or "mxfp4") must read in full.

    mxfp4's scale matrix counts with its padding columns: they share cache lines with the valid ones. Its padding rows
    are left out, as are the query, the fp8 scale and the index pointers, all of which are small.

    Raises ValueError for an unknown cache.
    """
    _, kv_data, _, _, _ = data
    if kv == "bf16":
        return (kv_data["bf16"],)
    if kv == "fp8":
        return (kv_data["fp8"][0],)
    if kv == "mxfp4":
        packed, scales = kv_data["mxfp4"]
        return packed, scales[: packed.shape[0]]
    raise ValueError(f"kv: expected 'bf16', 'fp8' or 'mxfp4', got {kv!r}")


def _as_int32(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes as int32 [n]; raises ValueError if they do not fill whole values."""
    if not tensor.is_contiguous() or tensor.nbytes % 4:
        raise ValueError(
            f"tensor: expected contiguous and a multiple of 4 bytes, got shape {tuple(tensor.shape)}, "
            f"strides {tensor.stride()}, {tensor.nbytes} bytes"
        )
    return tensor.view(torch.uint8).reshape(-1).view(torch.int32)


class Reader:
    """Reads one or two contiguous tensors in full when called; returns int32 partial sums that add up to all values.

    Raises ValueError for another number of tensors or one that is not contiguous.
    """

    def __init__(self, tensors: tuple[torch.Tensor, ...], timer: Timer) -> None:
        self.tensors = tensors
        self.read_bytes = sum(tensor.nbytes for tensor in tensors)
        device = tensors[0].device
        self._use_triton = triton is not None and device.type == "cuda"
        self.config = CONFIGS[0]
        largest = max(self._programs(config)[1] for config in CONFIGS)
        self._sums = torch.empty(largest, dtype=torch.int32, device=device)
        if self._use_triton:
            self._tune(timer)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self._tensors

    @tensors.setter
    def tensors(self, tensors: tuple[torch.Tensor, ...]) -> None:
        if len(tensors) not in (1, 2):
            raise ValueError(f"tensors: expected one or two, got {len(tensors)}")
        self._tensors = tensors
        self._views = [_as_int32(tensor) for tensor in tensors]

    def _programs(self, config: ReaderConfig) -> tuple[int, int]:
        """Programs for the first tensor and for all of them."""
        counts = [-(-view.numel() // (config.block * config.passes)) for view in self._views]
        return counts[0], sum(counts)

    def _tune(self, timer: Timer) -> None:
        medians = {}
        for config in CONFIGS:
            self.config = config
            self()
            medians[config] = statistics.median(timer.time_ns(self)[0] for _ in range(TUNING_RUNS))
        self.config = min(medians, key=lambda config: medians[config])

    def launch(self) -> torch.Tensor:
        """Run the Triton kernel with `self.config`."""
        first, last = self._views[0], self._views[-1]
        programs_a, programs = self._programs(self.config)
        sums = self._sums[:programs]
        _read[(programs,)](
            first, last, sums, first.numel(), last.numel(), programs_a,
            BLOCK=self.config.block, PASSES=self.config.passes, num_warps=self.config.num_warps,
        )  # fmt: skip
        return sums

    def __call__(self) -> torch.Tensor:
        if self._use_triton:
            return self.launch()
        return torch.stack([view.sum(dtype=torch.int32) for view in self._views])
