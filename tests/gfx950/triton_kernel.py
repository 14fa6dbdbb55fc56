"""Runs a Triton or Gluon kernel that was cross-compiled to gfx950 in the emulator."""

import struct

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .machine import Emulator, Run
from .state import Memory

TARGET = GPUTarget("hip", "gfx950", 64)
_FORMATS = {"i1": "b", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q"} | {
    "fp32": "f",
    "f32": "f",
    "fp64": "d",
}


class TritonKernel:
    """A compiled kernel and its signature, ready to launch.

    `compiled` is what `triton.compile(..., target=GPUTarget("hip", "gfx950", 64))` returned; `signature` maps argument
    names to types ("*bf16", "i32", "constexpr", ...) in order and may be left out when `compiled` still has its source.
    """

    def __init__(self, compiled, signature: dict[str, str] | None = None):
        self.compiled, self.metadata = compiled, compiled.metadata
        signature = signature or compiled.src.signature
        self.signature = {name: kind for name, kind in signature.items() if kind != "constexpr"}
        self.emulator = Emulator(compiled.asm["hsaco"])

    @classmethod
    def compile(cls, fn, signature: dict[str, str], constexprs: dict | None = None, attrs=None, **options):
        """Compiles a @triton.jit function; `constexprs` by name, `options` as for triton.compile."""
        constexprs = constexprs or {}
        signature = signature | {name: "constexpr" for name in constexprs}
        signature = {name: signature[name] for name in fn.arg_names}
        values = {(fn.arg_names.index(name),): value for name, value in constexprs.items()}
        source = ASTSource(fn, signature, values, attrs)
        return cls(triton.compile(source, target=TARGET, options=options), signature)

    def wrapped(self, wrap) -> "TritonKernel":
        """The same kernel with a hook on each of its instructions: see `Emulator`."""
        kernel = TritonKernel(self.compiled, self.signature)
        kernel.emulator = Emulator(self.compiled.asm["hsaco"], wrap)
        return kernel

    def kernarg(self, arguments: dict, memory: Memory, read_only=()) -> bytes:
        """Packs the explicit arguments, mapping arrays and tensors into `memory`; Triton's scratch pointers stay null.

        Raises ValueError when the arguments are not the signature's.
        """
        if set(arguments) != set(self.signature):
            raise ValueError(f"arguments: expected {sorted(self.signature)}, got {sorted(arguments)}")
        packed = bytearray()
        for name, kind in self.signature.items():
            value = arguments[name]
            if kind.startswith("*"):
                form = "Q"
                if not isinstance(value, int):
                    value = memory.add(value, name, writable=name not in read_only)
            elif kind in _FORMATS:
                form = _FORMATS[kind]
            else:
                raise ValueError(f"{name}: expected a pointer, integer or float type, got {kind!r}")
            size = struct.calcsize(form)
            packed += bytes(-len(packed) % size) + struct.pack("<" + form, value)
        packed += bytes(-len(packed) % 8) + struct.pack("<QQ", 0, 0)
        return bytes(packed)

    def launch(self, grid, arguments: dict, *, read_only=(), memory: Memory | None = None, **options) -> Run:
        """Runs the kernel; results are in the arrays and tensors handed in.

        arguments: name -> numpy array, CPU tensor, device address (int) or number. read_only: names of buffers the
        kernel must not write. options: see `Emulator.launch`. Raises ValueError and EmulatorError.
        """
        memory = memory or Memory()
        grid = (*grid, 1, 1)[:3]
        kernarg = self.kernarg(arguments, memory, read_only)
        # A kernel that asks for its grid reads it from the hidden arguments (code object v5): block counts, block size.
        hidden = struct.pack("<IIIHHH", *grid, 64 * self.metadata.num_warps, 1, 1).ljust(256, b"\0")
        return self.emulator.launch(
            self.metadata.name,
            grid,
            kernarg + hidden,
            self.metadata.num_warps,
            memory,
            lds_bytes=self.metadata.shared,
            **options,
        )
