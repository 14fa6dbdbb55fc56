"""One instruction at a time: tinygrad's CDNA tables, without their traps.

tinygrad decodes the fields; this module guards the scale prefix of the f8f6f4 MFMAs, gives raw field values instead of
register objects, and strips the encoding suffix from names. 16-bit operations need no care here: CDNA has no true16,
so v128 and up are plain registers.
"""

import re
from dataclasses import dataclass, field

from tinygrad.renderer.amd import decode_inst
from tinygrad.renderer.amd.dsl import FixedBitField, SBaseField, SRsrcField

from .state import UnknownInstruction

# Upper half of the first word of v_mfma_ld_scale_b32, the only thing that makes a 16-byte scaled MFMA.
SCALE_PREFIX = 0xD3AC


@dataclass(eq=False)
class Instruction:
    """Fields are raw encodings: sources 0-511 (256 and up are VGPRs), destinations without their 256."""

    name: str
    encoding: str  # VOP2_DPP16, MUBUF, ...
    fields: dict[str, int]
    address: int
    size: int
    decoded: object  # tinygrad's
    program_start: int = 0
    # Registers by key (SGPR n, 256 + VGPR n, 512 + AGPR n); filled in by the operand accessors.
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)

    def __getattr__(self, name):
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def text(self) -> str:
        return repr(self.decoded)

    def get(self, name: str, default: int = 0) -> int:
        return self.fields.get(name, default)

    def unknown(self, why: str = "is not modelled") -> UnknownInstruction:
        return UnknownInstruction(f"{self.text} at {self.address:#x} {why}")


def has_scale_prefix(code: bytes) -> bool:
    return int.from_bytes(code[2:4], "little") == SCALE_PREFIX


def decode(code: bytes, address: int) -> Instruction:
    """The instruction at the start of `code`. Raises UnknownInstruction."""
    # Eight bytes are too few for the scaled form, which tinygrad would otherwise accept after any eight bytes.
    window = code[:16] if has_scale_prefix(code) else code[:8]
    try:
        decoded = decode_inst(window, "cdna")
        name = re.sub(r"_E(32|64)$", "", decoded.op.name).lower()
    except (ValueError, AssertionError) as error:
        raise UnknownInstruction(f"no CDNA instruction at {address:#x}: {code[:8].hex()} ({error})") from error
    fields = {}
    for key, bits in decoded._fields:
        if key == "op" or isinstance(bits, FixedBitField):
            continue
        raw = decoded._raw >> bits.lo & bits.mask
        if isinstance(bits, SBaseField):
            raw *= 2
        elif isinstance(bits, SRsrcField):
            raw *= 4
        fields[key] = raw
    return Instruction(name, type(decoded).__name__, fields, address, decoded.size(), decoded)
