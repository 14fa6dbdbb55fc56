"""AITER's gfx950 code objects and Python layer, from the wheel `amd-aiter==0.1.7.post2.dev18`.

The wheel (40 MB) is downloaded without its dependencies, once per machine, into the temporary directory and is never
imported as a package. `code_object` and `mla_source` raise `WheelUnavailable` when it cannot be fetched; tests call
`skip_without_wheel()` first, which prints that reason.
"""

import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

VERSION = "0.1.7.post2.dev18"
WHEEL = f"amd_aiter-{VERSION}-py3-none-any.whl"
SHA256 = "fe139d74438217c35e87e3b961166bac8db2d381eadccb371da2e63615f05a31"
MLA_CODE_OBJECTS = "aiter_meta/hsa/gfx950/mla"


class WheelUnavailable(RuntimeError):
    """The wheel is neither cached nor downloadable."""


@functools.cache
def _fetch() -> Path | WheelUnavailable:
    cached = Path(tempfile.gettempdir()) / f"mixed-mla-aiter-{os.getuid()}" / WHEEL
    if not cached.exists():
        cached.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as download:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--retries", "1", "--timeout", "20"]
            done = subprocess.run([*pip, "--dest", download, f"amd-aiter=={VERSION}"], capture_output=True, text=True)
            fetched = Path(download) / WHEEL
            if not fetched.exists():
                last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
                return WheelUnavailable(f"amd-aiter=={VERSION} cannot be fetched: {last_line}")
            # Atomic, so that parallel test processes never see half a wheel.
            os.replace(fetched, cached)
    digest = hashlib.sha256(cached.read_bytes()).hexdigest()
    if digest != SHA256:
        return WheelUnavailable(f"{WHEEL}: expected sha256 {SHA256}, got {digest}")
    return cached


def wheel_path() -> Path:
    """The wheel on disk. Raises WheelUnavailable."""
    found = _fetch()
    if isinstance(found, WheelUnavailable):
        raise found
    return found


def read_member(name: str) -> bytes:
    """One file of the wheel. Raises WheelUnavailable, or KeyError when the wheel has no such file."""
    with zipfile.ZipFile(wheel_path()) as wheel:
        return wheel.read(name)


def code_object(name: str) -> bytes:
    """A gfx950 MLA code object (an ELF file), e.g. `mla_a8w8_qh16_qseqlen1_gqaratio16_ps`, with or without `.co`."""
    return read_member(f"{MLA_CODE_OBJECTS}/{name.removesuffix('.co')}.co")


def mla_source() -> str:
    """The text of the wheel's `aiter/mla.py`."""
    return read_member("aiter/mla.py").decode()


def skip_without_wheel() -> None:
    """Skips the calling test, with the reason, when the wheel cannot be had."""
    try:
        wheel_path()
    except WheelUnavailable as reason:
        pytest.skip(f"requires the amd-aiter wheel: {reason}")
