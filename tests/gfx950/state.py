"""What the machine remembers: memory, LDS, registers; and the errors that reading or writing it can raise."""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

WAVE = 64
LDS_BYTES = 160 * 1024
FULL_EXEC = (1 << WAVE) - 1
VCC, M0, EXEC = 106, 124, 126
# Never-written registers and LDS bytes read as NaN in every float format.
POISON = 0xFFFFFFFF
LANES = np.arange(WAVE, dtype=np.int64)
DWORDS = [np.arange(count, dtype=np.int64) for count in range(17)]


class EmulatorError(Exception):
    """Base of everything the emulator raises; the message ends with kernel, work-group, wave and instruction."""


class OutOfBounds(EmulatorError):
    """A memory or LDS access outside the buffers handed in, or a write to a read-only one."""


class UnknownInstruction(EmulatorError):
    """An instruction, or a form of one, that is not modelled."""


class Uninitialised(EmulatorError):
    """A read of a never-written register or LDS byte, with `uninitialised="raise"`."""


class Deadlock(EmulatorError):
    """Waves that can make no more progress, or more instructions than `max_instructions`."""


@dataclass(frozen=True)
class Finding:
    """Something suspicious that did not stop the run.

    `kind` is "uninitialised register", "uninitialised LDS", "read before wait" or "fp8 saturation".
    """

    kind: str
    address: int  # of the instruction, in the code object
    instruction: str
    detail: str


@lru_cache(maxsize=1 << 14)
def lane_mask(bits: int) -> np.ndarray:
    """64-bit integer -> bool[64], lane 0 from bit 0."""
    raw = np.frombuffer(bits.to_bytes(8, "little"), np.uint8)
    mask = np.unpackbits(raw, bitorder="little").view(bool)
    mask.flags.writeable = False
    return mask


def mask_bits(mask: np.ndarray) -> int:
    """bool[64] -> 64-bit integer."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


class Region:
    """A bounds-checked span of bytes, addressed by byte offsets (int64 arrays, one per active lane)."""

    def __init__(self, data: np.ndarray, name: str, writable: bool):
        self.bytes, self.name, self.writable, self.size = data, name, writable, data.size
        self.dwords = data[: data.size // 4 * 4].view(np.uint32)

    def check(self, offsets: np.ndarray, width: int) -> None:
        # The unsigned view turns a negative offset into a huge one.
        if int(offsets.view(np.uint64).max(initial=0)) + width > self.size:
            bad = offsets[(offsets < 0) | (offsets + width > self.size)]
            where = f"byte {int(bad[0])} of {self.name} ({self.size} bytes)"
            raise OutOfBounds(f"{width}-byte access at {where}, {bad.size} lanes outside")

    def index(self, offsets: np.ndarray, width: int) -> np.ndarray | None:
        """Dword indices [n, width // 4] of an aligned access, or None when it must go byte by byte."""
        if width % 4 or (np.bitwise_or.reduce(offsets) & 3):
            return None
        return (offsets >> 2)[:, None] + DWORDS[width // 4]

    def load(self, offsets: np.ndarray, width: int) -> np.ndarray:
        """uint32 [n, ceil(width / 4)]; 1- and 2-byte values are zero-extended."""
        self.check(offsets, width)
        index = self.index(offsets, width)
        if index is not None:
            return self.dwords[index]
        raw = self.bytes[offsets[:, None] + np.arange(width)]
        if width < 4:
            raw = np.pad(raw, ((0, 0), (0, 4 - width)))
        return np.ascontiguousarray(raw).view(np.uint32)

    def store(self, offsets: np.ndarray, data: np.ndarray, width: int) -> None:
        """`data` is uint32 [n, ceil(width / 4)]; of several lanes at one place the last one wins."""
        if not self.writable:
            raise OutOfBounds(f"write to read-only {self.name}")
        self.check(offsets, width)
        index = self.index(offsets, width)
        if index is not None:
            self.dwords[index] = data
        else:
            raw = np.ascontiguousarray(data).view(np.uint8)[:, :width]
            self.bytes[offsets[:, None] + np.arange(width)] = raw


class Lds(Region):
    """A work-group's LDS, which reports reads of bytes nobody wrote."""

    def __init__(self, size: int, report):
        size = -(-size // 4) * 4
        super().__init__(np.full(size, 0xFF, np.uint8), "LDS", True)
        self.written = Region(np.zeros(size, np.uint8), "LDS", True)
        self.report = report

    def load(self, offsets, width):
        data = super().load(offsets, width)
        index = self.index(offsets, width)
        if index is not None:
            complete = self.written.dwords[index].min(initial=0x01010101) == 0x01010101
        else:
            complete = self.written.bytes[offsets[:, None] + np.arange(width)].min(initial=1) == 1
        if not complete:
            missing = self.written.bytes[offsets[:, None] + np.arange(width)].min(axis=1) == 0
            self.report("uninitialised LDS", f"{width} bytes at byte {int(offsets[missing][0])}")
        return data

    def store(self, offsets, data, width):
        super().store(offsets, data, width)
        index = self.index(offsets, width)
        if index is not None:
            self.written.dwords[index] = 0x01010101
        else:
            self.written.bytes[offsets[:, None] + np.arange(width)] = 1


def as_bytes(array) -> np.ndarray:
    """A flat uint8 view of a C-contiguous numpy array or CPU torch tensor (any dtype). Raises ValueError."""
    if hasattr(array, "untyped_storage"):
        import torch

        if array.device.type != "cpu" or not array.is_contiguous():
            raise ValueError(f"buffer: expected a contiguous CPU tensor, got {array.device}, strides {array.stride()}")
        return array.detach().reshape(-1).view(torch.uint8).numpy()
    if not (isinstance(array, np.ndarray) and array.flags.c_contiguous):
        raise ValueError(f"buffer: expected a C-contiguous numpy array or torch tensor, got {type(array).__name__}")
    return array.reshape(-1).view(np.uint8)


class Memory:
    """Global memory: buffers 64 GiB apart, so that no stray offset reaches the next one."""

    REGION_BITS = 36

    def __init__(self):
        self.regions: list[Region | None] = [None]

    def add(self, array, name: str | None = None, writable: bool = True) -> int:
        """Maps a buffer in place (writes go to `array`) and returns its device address.

        A numpy array that is not writeable is mapped read-only whatever `writable` says.
        """
        data = as_bytes(array)
        number = len(self.regions)
        self.regions.append(Region(data, name or f"buffer {number}", writable and data.flags.writeable))
        return number << self.REGION_BITS

    def _region(self, address: int) -> Region:
        number = address >> self.REGION_BITS
        if not 0 < number < len(self.regions):
            raise OutOfBounds(f"address {address & (1 << 64) - 1:#x} is in no buffer")
        return self.regions[number]

    def _split(self, addresses: np.ndarray):
        """(region, selection of lanes, offsets) for each region touched; one, in nearly all cases."""
        numbers = addresses >> self.REGION_BITS
        first = int(numbers[0])
        if (numbers == first).all():
            yield self._region(int(addresses[0])), slice(None), addresses - (first << self.REGION_BITS)
            return
        for number in np.unique(numbers):
            lanes = numbers == number
            base = int(number) << self.REGION_BITS
            yield self._region(base), lanes, addresses[lanes] - base

    def load(self, addresses: np.ndarray, width: int) -> np.ndarray:
        """uint32 [n, ceil(width / 4)] from int64 byte addresses. Raises OutOfBounds."""
        data = np.empty((addresses.size, -(-width // 4)), np.uint32)
        if addresses.size:
            for region, lanes, offsets in self._split(addresses):
                data[lanes] = region.load(offsets, width)
        return data

    def store(self, addresses: np.ndarray, data: np.ndarray, width: int) -> None:
        """Raises OutOfBounds."""
        if addresses.size:
            for region, lanes, offsets in self._split(addresses):
                region.store(offsets, data[lanes], width)

    def write_back(self) -> None:
        """buffer_wbl2 sc1; nothing to do without caches."""

    def invalidate(self) -> None:
        """buffer_inv sc1; nothing to do without caches."""

    def device_scope(self) -> "Memory":
        """What atomics and accesses with sc1 read and write."""
        return self

    def load_scalar(self, address: int, count: int) -> list[int]:
        """`count` dwords from a dword-aligned address. Raises OutOfBounds."""
        region = self._region(address)
        offset = address - (address >> self.REGION_BITS << self.REGION_BITS)
        if offset + 4 * count > region.size:
            raise OutOfBounds(f"scalar load of {count} dwords at byte {offset} of {region.name} ({region.size} bytes)")
        return region.load(np.array([offset]), 4 * count)[0].tolist()


class WorkGroup:
    """What the waves of one work-group share."""

    def __init__(self, number: int, index: tuple[int, int, int], lds: Lds, memory: Memory, report):
        self.number, self.index, self.lds, self.memory, self.report = number, index, lds, memory, report
        self.waves: list[Wave] = []


class Wave:
    """Registers and queues of 64 lanes.

    `u`, `i`, `f` are the rows of one register file as uint32, int32, float32: VGPR r is row r, AGPR r row 256 + r.
    SGPRs, VCC, M0 and EXEC are Python integers in `s`, at their encodings.
    """

    def __init__(self, group: WorkGroup, number: int, program_length: int):
        self.group, self.number = group, number
        self.memory, self.lds, self.report = group.memory, group.lds, group.report
        self.v = np.full((512, WAVE), POISON, np.uint32)
        self.u, self.i, self.f = list(self.v), list(self.v.view(np.int32)), list(self.v.view(np.float32))
        self.s = [POISON] * 128
        self.scc = 0
        self.mode = 0
        self.gpr_index = None  # (offset, operand mask) between s_set_gpr_idx_on and _off
        self.pc = 0  # dword index in the program
        self.done = self.at_barrier = self.stopped = False
        self.seen = bytearray(program_length)
        self.defined = bytearray(768)  # SGPRs at 0, VGPRs at 256, AGPRs at 512
        self.defined[102:128] = b"\1" * 26
        self.late = self.late_lds = False
        # Outstanding (landing function, instruction), in program order.
        self.vm: deque = deque()
        self.lds_queue: deque = deque()
        self.smem: deque = deque()
        self.current = None  # the instruction being executed
        self.set_exec(FULL_EXEC)

    def set_exec(self, bits: int) -> None:
        self.exec = bits
        self.full = bits == FULL_EXEC
        self.lanes = lane_mask(bits)
        self.s[EXEC], self.s[EXEC + 1] = bits & 0xFFFFFFFF, bits >> 32

    @property
    def mask(self) -> np.ndarray | None:
        """Active lanes, or None when all are."""
        return None if self.full else self.lanes

    def pair(self, register: int) -> int:
        return self.s[register] | self.s[register + 1] << 32

    def write_rows(self, row: int, data: np.ndarray, mask: np.ndarray | None) -> None:
        """`data` is uint32 [active lanes, rows]."""
        target = self.v[row : row + data.shape[1]]
        if mask is None:
            target[...] = data.T
        else:
            target[:, mask] = data.T

    def read_rows(self, row: int, count: int, mask: np.ndarray | None) -> np.ndarray:
        """uint32 [active lanes, count], a copy."""
        rows = self.v[row : row + count]
        return (rows if mask is None else rows[:, mask]).T.copy()

    def queue(self, queue: deque, land, limit: int) -> None:
        """Runs `land` now or, with late loads, keeps it until a wait; a full counter stalls, as in hardware."""
        if not self.late:
            land()
            return
        if queue is self.lds_queue and not self.late_lds:
            limit = 0
        while queue and len(queue) >= limit:
            self.land(queue)
        queue.append((land, self.current))
        if not limit:
            self.land(queue)

    def land(self, queue: deque) -> None:
        land, instruction = queue.popleft()
        issuer, self.current = self.current, instruction
        land()
        self.settle(instruction)
        self.current = issuer

    def settle(self, instruction) -> None:
        """Marks what an instruction wrote as written."""
        for register in instruction.writes:
            self.defined[register] = 1

    def wait(self, vm: int, lgkm: int) -> None:
        while len(self.vm) > vm:
            self.land(self.vm)
        # Scalar loads return in any order, so only a wait for everything is sure to land one.
        while len(self.lds_queue) + len(self.smem) > lgkm:
            self.land(self.lds_queue or self.smem)
