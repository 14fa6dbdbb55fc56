"""What a reader of a measurement needs to know: timing method, device, versions and commit."""

import contextlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import torch

from eval import ROOT, ColdTimer


def package_version(*names: str) -> str:
    """Version of the first installed distribution among `names`."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "not installed"


def _command_output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _driver_version() -> str:
    if not torch.cuda.is_available():
        return "none"
    if torch.version.hip:
        with contextlib.suppress(OSError):
            return f"amdgpu {Path('/sys/module/amdgpu/version').read_text().strip()}, HIP {torch.version.hip}"
        return f"HIP {torch.version.hip}"
    driver = _command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    return f"{driver or 'unknown'}, CUDA {torch.version.cuda}"


def _device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    name = "unknown CPU"
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()):
            name = found[1].strip()
    return f"CPU, {name}, {torch.get_num_threads()} threads"


def _commit() -> str:
    commit = _command_output("git", "rev-parse", "--short=12", "HEAD")
    if commit and _command_output("git", "status", "--porcelain", "--untracked-files=no"):
        return f"{commit} with local changes"
    return commit or "unknown"


def _timing(timer: ColdTimer) -> str:
    how = "GPU events around the call" if timer.on_gpu else "host clock around the call"
    drawn = f"{timer.flush_passes} x {timer.flush_bytes >> 20} MiB written before each call"
    return f"{how}; cold cache: {drawn}, {timer.llc_source} {timer.llc_bytes >> 20} MiB"


def describe_environment(timer: ColdTimer) -> dict[str, str]:
    return {
        "timing": _timing(timer),
        "device": _device_name(),
        "driver": _driver_version(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": package_version("triton", "pytorch-triton-rocm"),
        "aiter": package_version("amd-aiter", "aiter"),
        "commit": _commit(),
    }
