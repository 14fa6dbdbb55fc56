"""Translates a code object once and runs its work-groups, a few instructions of each wave in turn."""

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from . import loader, ops_convert, ops_lane, ops_lds, ops_memory, ops_mfma, ops_scalar, ops_vector
from .caches import CachedMemory
from .decode import Instruction, decode
from .operands import VGPR
from .state import (
    LANES,
    LDS_BYTES,
    Deadlock,
    EmulatorError,
    Finding,
    Lds,
    Memory,
    Uninitialised,
    UnknownInstruction,
    Wave,
    WorkGroup,
)

_BY_NAME = {**ops_lane.TABLE, **ops_convert.TABLE, **ops_lds.TABLE, **ops_vector.TABLE}
_BY_NAME |= {name: ops_vector.alu for name in ops_vector.OPS}
_BY_ENCODING = {**ops_scalar.ENCODINGS, **ops_memory.ENCODINGS}
_LATE = (None, "late", "late memory", "random")
# Chance, per instruction and wave, that random late loads let an outstanding access land.
_LANDING_CHANCE = 0.05


def translate(ins: Instruction):
    """A closure that executes `ins` on a wave. Raises UnknownInstruction."""
    build = _BY_ENCODING.get(ins.encoding.removesuffix("_LIT")) or _BY_NAME.get(ins.name)
    if build is None and ops_vector.is_compare(ins.name):
        build = ops_vector.compare
    if build is None and ops_mfma.is_mfma(ins.name):
        build = ops_mfma.mfma
    if build is None:
        raise ins.unknown()
    return build(ins)


@dataclass
class Run:
    """What a launch did."""

    instructions: int = 0  # wave-instructions
    executed: Counter = field(default_factory=Counter)  # by mnemonic
    findings: list[Finding] = field(default_factory=list)


class Program:
    """The text section, decoded and translated instruction by instruction when first reached."""

    def __init__(self, code: loader.CodeObject, wrap=None):
        self.code, self.start, self.wrap = code, code.text_start, wrap
        self.length = (code.text_end - code.text_start) // 4
        self.instructions: list[Instruction | None] = [None] * self.length
        self.operations: list = [None] * self.length
        self.following = [0] * self.length
        self._indexed = {}

    def prepare(self, index: int):
        """Decodes and translates the instruction at a dword index, and returns its operation."""
        if not 0 <= index < self.length:
            raise UnknownInstruction(f"the program counter left the text section: {self.start + 4 * index:#x}")
        address = self.start + 4 * index
        ins = decode(self.code.image[address : self.code.text_end], address)
        ins.program_start = self.start
        operation = translate(ins)
        if self.wrap:
            operation = self.wrap(ins, operation)
        self.instructions[index], self.operations[index] = ins, operation
        self.following[index] = index + ins.size // 4
        return operation

    def indexed(self, index: int, gpr_index: tuple[int, int]):
        """The operation with its VGPR operands moved as s_set_gpr_idx_on asks, or as it is when it has none."""
        key = (index, gpr_index)
        if key not in self._indexed:
            self._indexed[key] = self._shifted(self.instructions[index], *gpr_index) or self.operations[index]
        return self._indexed[key]

    @staticmethod
    def _shifted(ins: Instruction, offset: int, operands: int):
        if not ins.encoding.startswith("VOP"):
            return None
        fields = dict(ins.fields)
        for bit, names in enumerate((("src0", "vsrc0"), ("src1", "vsrc1"), ("src2",), ("vdst",))):
            for name in names:
                if name not in fields or not operands >> bit & 1:
                    continue
                # In the source fields VGPRs start at 256; SGPRs and constants do not move.
                if name in ("src0", "src1", "src2") and fields[name] < VGPR:
                    continue
                fields[name] += offset
        return translate(replace(ins, fields=fields, reads=set(), writes=set()))


class Emulator:
    """Runs the kernels of one gfx950 code object (an ELF file). See the package's docstring for the interface.

    wrap(instruction, operation) returns what to execute in place of `operation`, a function of a wave: a hook for
    traces and planted faults.
    """

    def __init__(self, code_object: bytes, wrap=None):
        self.code = loader.load(code_object)
        self.program = Program(self.code, wrap)

    def launch(
        self,
        kernel: str,
        grid,
        kernarg: bytes,
        num_warps: int,
        memory: Memory,
        *,
        lds_bytes: int = 0,
        order="ascending",
        concurrent: int = 1,
        late_loads: str | None = None,
        seed: int = 0,
        quantum: int = 4,
        uninitialised: str = "report",
        caches: bool = False,
        max_instructions: int = 200_000_000,
    ) -> Run:
        """Runs every work-group of `grid` (1 to 3 sizes, x first) to its end.

        num_warps: waves per work-group. lds_bytes: dynamic LDS, added to the kernel's static LDS.
        order: "ascending", "descending", "shuffled" (by `seed`) or a permutation of the linear work-group numbers.
        concurrent: work-groups in flight together; 1 runs them one after another, 0 all at once.
        late_loads: None lands every access at once; "late" as late as the code's waits allow; "late memory" likewise,
        but LDS instructions at once; "random" at a random point before that.
        quantum: instructions a wave runs before the next one's turn.
        uninitialised: "report" (a Finding), "raise" (Uninitialised) or "ignore". caches: give each work-group a
        private cache, which only device-scope operations see through (see `caches`).
        Raises ValueError for bad arguments and EmulatorError for what the program does wrong.
        """
        if kernel not in self.code.kernels:
            raise ValueError(f"kernel: expected one of {sorted(self.code.kernels)}, got {kernel!r}")
        if late_loads not in _LATE:
            raise ValueError(f"late_loads: expected one of {_LATE}, got {late_loads!r}")
        if uninitialised not in ("report", "raise", "ignore"):
            raise ValueError(f"uninitialised: expected 'report', 'raise' or 'ignore', got {uninitialised!r}")
        grid = (*grid, 1, 1)[:3]
        chosen = self.code.kernels[kernel]
        total_lds = chosen.lds_bytes + lds_bytes
        if total_lds > LDS_BYTES:
            raise ValueError(f"lds_bytes: expected at most {LDS_BYTES} with the static part, got {total_lds}")
        if len(kernarg) < chosen.kernarg_bytes:
            raise ValueError(f"kernarg: expected {chosen.kernarg_bytes} bytes, got {len(kernarg)}")
        launch = Launch(self.program, chosen, grid, num_warps, memory, total_lds)
        launch.late_loads, launch.quantum, launch.uninitialised = late_loads, quantum, uninitialised
        launch.caches = [] if caches else None
        launch.max_instructions = launch.remaining = max_instructions
        launch.random = np.random.default_rng(seed)
        launch.kernarg = memory.add(np.frombuffer(kernarg, np.uint8), "kernarg")
        with np.errstate(all="ignore"):
            return launch.run(order, concurrent)


class Launch:
    """One run: its work-groups, scheduler and report."""

    kernarg = 0
    late_loads: str | None = None
    caches: list[CachedMemory] | None = None
    quantum = 4
    uninitialised = "report"
    max_instructions = remaining = 200_000_000

    def __init__(self, program: Program, kernel: loader.Kernel, grid, num_warps: int, memory: Memory, lds_bytes: int):
        self.program, self.kernel, self.grid = program, kernel, grid
        self.num_warps, self.memory, self.lds_bytes = num_warps, memory, lds_bytes
        self.counts = [0] * program.length
        self.result = Run()
        self.reported = set()
        self.wave: Wave | None = None
        self.random = np.random.default_rng(0)

    def _order(self, order) -> list[int]:
        groups = self.grid[0] * self.grid[1] * self.grid[2]
        if order == "shuffled":
            return self.random.permutation(groups).tolist()
        if order in ("ascending", "descending"):
            return list(range(groups)) if order == "ascending" else list(range(groups))[::-1]
        if isinstance(order, str) or sorted(order) != list(range(groups)):
            raise ValueError(
                f"order: expected 'ascending', 'descending', 'shuffled' or a permutation of {groups}, got {order!r}"
            )
        return list(order)

    def run(self, order, concurrent: int) -> Run:
        waiting = self._order(order)[::-1]
        limit = concurrent or len(waiting)
        active: list[WorkGroup] = []
        while waiting or active:
            while waiting and len(active) < limit:
                active.append(self._start(waiting.pop()))
            for group in active:
                self._turn(group)
            active = [group for group in active if not all(wave.done for wave in group.waves)]
        for cache in self.caches or ():
            cache.write_back()
        instructions = self.program.instructions
        for index, count in enumerate(self.counts):
            if count:
                self.result.executed[instructions[index].name] += count
        self.result.instructions = sum(self.counts)
        return self.result

    def _start(self, number: int) -> WorkGroup:
        x, y, _ = self.grid
        index = (number % x, number // x % y, number // (x * y))
        memory = self.memory
        if self.caches is not None:
            memory = CachedMemory(memory)
            self.caches.append(memory)
        group = WorkGroup(number, index, Lds(self.lds_bytes, self.report), memory, self.report)
        for warp in range(self.num_warps):
            wave = Wave(group, warp, self.program.length)
            wave.late, wave.late_lds = self.late_loads is not None, self.late_loads != "late memory"
            wave.pc = (self.kernel.entry - self.program.start) // 4
            self.set_registers(wave)
            group.waves.append(wave)
        return group

    def set_registers(self, wave: Wave) -> None:
        """Initial registers: kernarg pointer, work-group ids, and the work-item id packed into v0."""
        kernel = self.kernel
        if kernel.properties & ~loader.KERNARG_POINTER & 0x7F:
            raise EmulatorError(f"{kernel.name}: kernel_code_properties {kernel.properties:#x} are not modelled")
        if kernel.properties & loader.KERNARG_POINTER:
            wave.s[0], wave.s[1] = self.kernarg & 0xFFFFFFFF, self.kernarg >> 32
            wave.defined[0] = wave.defined[1] = 1
        # Preloaded arguments are left to the kernel's own prologue, which loads them too.
        user = kernel.user_sgprs
        for enabled, value in zip(kernel.group_id_enabled, wave.group.index, strict=True):
            if enabled:
                wave.s[user] = value
                wave.defined[user] = 1
                user += 1
        wave.u[0][...] = LANES + 64 * wave.number
        wave.defined[VGPR] = 1

    def _turn(self, group: WorkGroup) -> None:
        progressed = False
        for wave in group.waves:
            if not (wave.done or wave.at_barrier):
                self._step(wave)
                progressed = True
        if not progressed:
            for wave in group.waves:
                wave.at_barrier = False
        if self.remaining < 0:
            raise Deadlock(f"{self.kernel.name}: more than {self.max_instructions} wave-instructions")

    def _step(self, wave: Wave) -> None:
        """Up to `quantum` instructions of one wave."""
        program, counts, seen = self.program, self.counts, wave.seen
        operations, following, instructions = program.operations, program.following, program.instructions
        self.wave = wave
        index = wave.pc
        wave.stopped = False
        try:
            for _ in range(self.quantum):
                index, wave.current = wave.pc, None
                if not 0 <= index < program.length:
                    program.prepare(index)
                operation = operations[index] or program.prepare(index)
                ins = instructions[index]
                wave.current = ins
                if not seen[index]:
                    seen[index] = 1
                    self._first_visit(wave, ins)
                if wave.late:
                    self._late_checks(wave, ins)
                if wave.gpr_index:
                    operation = program.indexed(index, wave.gpr_index)
                counts[index] += 1
                wave.pc = following[index]
                operation(wave)
                if wave.stopped:
                    break
            self.remaining -= self.quantum
        except EmulatorError as error:
            self._explain(error, wave, program.start + 4 * index)
            raise

    def _explain(self, error: EmulatorError, wave: Wave, address: int) -> None:
        where = f"{wave.current.text} at {wave.current.address:#x}" if wave.current else f"{address:#x}"
        group = wave.group.index
        error.args = (f"{error.args[0]}; in {self.kernel.name}, work-group {group}, wave {wave.number}, {where}",)

    def _first_visit(self, wave: Wave, ins: Instruction) -> None:
        """Registers once written stay written, so looking at a wave's first visit finds every unwritten read."""
        for register in ins.reads:
            if not wave.defined[register]:
                self.report("uninitialised register", f"reads {_register_name(register)}, which nothing wrote")
        # With late loads, what a memory instruction writes is written when it lands.
        if not wave.late or ins.encoding not in ("DS", "SMEM", "MUBUF", "GLOBAL", "FLAT"):
            wave.settle(ins)

    def _late_checks(self, wave: Wave, ins: Instruction) -> None:
        if not (wave.vm or wave.lds_queue or wave.smem):
            return
        if self.late_loads == "random" and self.random.random() < _LANDING_CHANCE:
            queues = [queue for queue in (wave.vm, wave.lds_queue, wave.smem) if queue]
            wave.land(queues[self.random.integers(len(queues))])
        for queue in (wave.vm, wave.lds_queue, wave.smem):
            for _, pending in queue:
                if not pending.writes.isdisjoint(ins.reads):
                    names = ", ".join(_register_name(r) for r in sorted(pending.writes & ins.reads))
                    self.report("read before wait", f"reads {names} while {pending.text} is outstanding")

    def report(self, kind: str, detail: str) -> None:
        """Files a finding, once for each instruction and kind; raises it if it is an unwritten read and asked to."""
        ins = self.wave.current
        if kind.startswith("uninitialised"):
            if self.uninitialised == "ignore":
                return
            if self.uninitialised == "raise":
                raise Uninitialised(f"{kind}: {detail}")
        if (kind, ins.address) not in self.reported:
            self.reported.add((kind, ins.address))
            self.result.findings.append(Finding(kind, ins.address, ins.text, detail))


def _register_name(register: int) -> str:
    return f"s{register}" if register < 256 else f"v{register - 256}" if register < 512 else f"a{register - 512}"
