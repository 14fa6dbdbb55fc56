"""Reads a code object: its loadable segments and kernel descriptors.

Layout of the 64-byte kernel descriptor: LLVM's AMDGPU usage guide, "Kernel Descriptor".
"""

import io
import struct
from dataclasses import dataclass

from elftools.elf.elffile import ELFFile

KERNARG_POINTER = 1 << 3  # kernel_code_properties: enable_sgpr_kernarg_segment_ptr


@dataclass(frozen=True)
class Kernel:
    """One kernel descriptor."""

    name: str
    entry: int
    lds_bytes: int  # static part
    scratch_bytes: int
    kernarg_bytes: int
    user_sgprs: int
    group_id_enabled: tuple[bool, bool, bool]
    properties: int
    preload_dwords: int


@dataclass(frozen=True)
class CodeObject:
    image: bytes  # the loaded segments, from address 0
    kernels: dict[str, Kernel]
    text_start: int
    text_end: int


def load(code_object: bytes) -> CodeObject:
    """Raises ValueError when the bytes are no ELF file or hold no kernel."""
    if code_object[:4] != b"\x7fELF":
        raise ValueError(f"code_object: expected an ELF file, got bytes starting with {code_object[:4]!r}")
    elf = ELFFile(io.BytesIO(code_object))
    segments = [s for s in elf.iter_segments() if s["p_type"] == "PT_LOAD"]
    image = bytearray(max(s["p_vaddr"] + s["p_memsz"] for s in segments))
    for segment in segments:
        image[segment["p_vaddr"] : segment["p_vaddr"] + segment["p_filesz"]] = segment.data()
    symbols = elf.get_section_by_name(".dynsym") or elf.get_section_by_name(".symtab")
    kernels = {}
    for symbol in symbols.iter_symbols():
        if symbol.name.endswith(".kd"):
            name = symbol.name.removesuffix(".kd")
            kernels[name] = _descriptor(name, symbol["st_value"], image)
    if not kernels:
        raise ValueError("code_object: expected at least one kernel descriptor (NAME.kd), got none")
    text = elf.get_section_by_name(".text")
    return CodeObject(bytes(image), kernels, text["sh_addr"], text["sh_addr"] + text["sh_size"])


def _descriptor(name: str, address: int, image: bytearray) -> Kernel:
    lds_bytes, scratch_bytes, kernarg_bytes = struct.unpack_from("<III", image, address)
    (entry,) = struct.unpack_from("<q", image, address + 16)
    _, _, rsrc2, properties, preload = struct.unpack_from("<IIIHH", image, address + 44)
    return Kernel(
        name=name,
        entry=address + entry,
        lds_bytes=lds_bytes,
        scratch_bytes=scratch_bytes,
        kernarg_bytes=kernarg_bytes,
        user_sgprs=rsrc2 >> 1 & 31,
        group_id_enabled=(bool(rsrc2 & 1 << 7), bool(rsrc2 & 1 << 8), bool(rsrc2 & 1 << 9)),
        properties=properties,
        preload_dwords=preload & 127,
    )
