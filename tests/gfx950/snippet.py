"""Runs a few lines of gfx950 assembly: the bench on which the instruction families are tested."""

import functools
import io
from dataclasses import dataclass

import numpy as np
from elftools.elf.elffile import ELFFile
from triton._C.libtriton import amd, llvm

from .loader import CodeObject, Kernel
from .machine import Launch, Program, Run
from .state import FULL_EXEC, Memory, Wave


@functools.cache
def assemble(text: str) -> bytes:
    """Machine code of `text`, by the LLVM inside Triton."""
    llvm.init_targets()
    source = '.amdgcn_target "amdgcn-amd-amdhsa--gfx950"\n.text\n' + text + "\n"
    return ELFFile(io.BytesIO(amd.assemble_amdgcn(source, "gfx950", ""))).get_section_by_name(".text").data()


@dataclass
class Outcome:
    """The waves as the snippet left them; `wave` is the first."""

    waves: list[Wave]
    run: Run

    @property
    def wave(self) -> Wave:
        return self.waves[0]


def execute(
    text: str | bytes,
    *,
    v: dict | None = None,
    s: dict | None = None,
    exec_mask: int = FULL_EXEC,
    num_warps: int = 1,
    memory: Memory | None = None,
    lds_bytes: int = 4096,
    lds: np.ndarray | None = None,
    **options,
) -> Outcome:
    """Runs assembly (or machine code) to an s_endpgm that is added.

    v: VGPR number (256 and up: AGPRs) -> array of 64 dwords, or one value for all lanes. s: SGPR number (106 is VCC,
    124 M0) -> 32-bit integer. lds: initial contents, counted as written. options: attributes of Launch, such as
    late_loads and uninitialised.
    """
    code = (text if isinstance(text, bytes) else assemble(text)) + bytes.fromhex("000081bf")
    kernel = Kernel("snippet", 0, 0, 0, 0, 0, (False, False, False), 0, 0)
    waves = []

    class SnippetLaunch(Launch):
        def set_registers(self, wave):
            for number, value in (s or {}).items():
                wave.s[number] = value & 0xFFFFFFFF
                wave.defined[number] = 1
            for number, value in (v or {}).items():
                wave.u[number][...] = np.asarray(value).view(np.uint32)
                wave.defined[256 + number] = 1
            wave.set_exec(exec_mask)
            if lds is not None and not waves:
                wave.lds.store(np.arange(lds.nbytes), lds.reshape(-1).view(np.uint8)[:, None].astype(np.uint32), 1)
            waves.append(wave)

    program = Program(CodeObject(code, {}, 0, len(code)))
    launch = SnippetLaunch(program, kernel, (1, 1, 1), num_warps, memory or Memory(), lds_bytes)
    for name, value in options.items():
        setattr(launch, name, value)
    with np.errstate(all="ignore"):
        run = launch.run("ascending", 1)
    return Outcome(waves, run)
