"""A gfx950 (MI355X) emulator: runs code objects on the CPU, instruction by instruction.

A Triton or Gluon kernel::

    kernel = TritonKernel.compile(fn, signature, constexprs, attrs, num_warps=4, waves_per_eu=2)
    kernel = TritonKernel(triton.compile(source, target=TARGET, options=options))   # or compiled elsewhere
    run = kernel.launch((batch, splits), {"q_ptr": q, "kv_ptr": kv, ..., "kv_len": 1024}, read_only=("q_ptr", "kv_ptr"))
    assert not run.findings

Arrays are numpy arrays or CPU tensors, contiguous; the kernel reads and writes them in place. Any other code object::

    memory = Memory()
    kernarg = struct.pack("<QQi", memory.add(out, "out"), memory.add(x, "x", writable=False), n)
    run = Emulator(code_object).launch(kernel_name, grid, kernarg, num_warps, memory, lds_bytes=0)

Options of both launches (`Emulator.launch` documents them): order="shuffled", concurrent=4, late_loads="late" or
"random", caches=True, seed=0, quantum=4, uninitialised="raise". A run has `instructions` (wave-instructions),
`executed` (a Counter by mnemonic) and `findings`; `state.Finding` lists their kinds. Errors are subclasses of
EmulatorError: OutOfBounds, UnknownInstruction, Uninitialised, Deadlock.

A planted fault, here a lost matrix instruction::

    def lose_third(instruction, operation, count=itertools.count(1)):
        if not instruction.name.startswith("v_mfma"):
            return operation
        return lambda wave: None if next(count) == 3 else operation(wave)

    kernel.wrapped(lose_third).launch(...)

What it cannot show: missing s_nop, most races, rounding and order inside an MFMA, denormal modes, and time.
"""

from .machine import Emulator, Run
from .state import (
    Deadlock,
    EmulatorError,
    Finding,
    Memory,
    OutOfBounds,
    Uninitialised,
    UnknownInstruction,
)
from .triton_kernel import TARGET, TritonKernel

__all__ = [
    "TARGET",
    "Deadlock",
    "Emulator",
    "EmulatorError",
    "Finding",
    "Memory",
    "OutOfBounds",
    "Run",
    "TritonKernel",
    "Uninitialised",
    "UnknownInstruction",
]
