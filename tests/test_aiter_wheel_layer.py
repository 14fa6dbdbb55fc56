"""The arms through the real `aiter/mla.py` of the wheel: only its compiled ops and its Triton kernel are the model's.

What it would allocate on a GPU comes from the CPU.
"""

import hashlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import reference
import submission
from submission import AITER_MODES, ARMS
from tests.aiter_model import BLOCK, AiterModel, Watch, call_of, standing_in
from tests.aiter_wheel import code_object, mla_source, skip_without_wheel
from tests.gfx950.aiter_objects import PERSISTENT, SPLIT

STAGE1, REDUCE, QUANT = "mla_decode_stage1_asm_fwd", "mla_reduce_v1", "dynamic_per_tensor_quant"
pytestmark = pytest.mark.usefixtures("no_gpu")
LIBRARY_ARMS = [name for name, mode in AITER_MODES.items() if mode.entry in ("split_kv", "fwd")]


class CpuTorch(ModuleType):
    """torch, with `arange` on the CPU whatever device it is given."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def arange(self, *args, device=None, **kwargs):
        return torch.arange(*args, **kwargs)


class Stage2:
    """Launches the model's combine with the arguments of the wheel's Triton kernel."""

    def __init__(self, model: AiterModel, arg_names: list[str]):
        self.model, self.arg_names = model, arg_names

    def __getitem__(self, grid: tuple[int, int]):
        def launch(*args, **constexprs):
            v = dict(zip(self.arg_names, args, strict=False)) | constexprs
            batch = v["O"].shape[0]
            assert grid == (batch, 16) and v["mgc"] == BLOCK and not v["MAYBE_FINAL_OUT"] and v["Lv"] == 512
            torch.ops.aiter.stage2(v["Mid_O"], v["Mid_lse"], v["kv_indptr"], v["O"])

        return launch


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    skip_without_wheel()
    monkeypatch.setattr(submission, "_cast_keeps_overflow", lambda device: True)
    with standing_in(AiterModel("wheel", num_cu=64)) as model:
        model.module.mla = wheels_layer(model, monkeypatch, tmp_path / "mla.py")
        yield model


def wheels_layer(model: AiterModel, monkeypatch, path: Path) -> ModuleType:
    chip_info = ModuleType("aiter.jit.utils.chip_info")
    chip_info.get_cu_num = lambda: model.num_cu
    for name in ("aiter.jit", "aiter.jit.utils", "aiter.jit.utils.chip_info"):
        monkeypatch.setitem(sys.modules, name, chip_info if name.endswith("chip_info") else ModuleType(name))
    # A file, because Triton reads the source of the kernel.
    path.write_text(mla_source())
    spec = importlib.util.spec_from_file_location("aiter.mla", path)
    mla = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mla)
    mla.torch = CpuTorch("torch")
    mla._fwd_kernel_stage2_asm = Stage2(model, mla._fwd_kernel_stage2_asm.arg_names)
    return mla


@pytest.fixture(scope="module")
def small():
    return reference.generate_input(3, 1, 600, seed=7)


@pytest.mark.parametrize("arm", LIBRARY_ARMS)
def test_arm_is_exact_through_the_wheels_layer(wheel, small, arm):
    call = call_of(small, arm)
    wheel.calls.clear()
    out = call(small)
    report = reference.strict_check(small, out, ARMS[arm].kv)
    assert report.passed, report
    quantise = [QUANT] if AITER_MODES[arm].q == "dynamic" else []
    assert wheel.ops() == [*quantise, STAGE1, REDUCE if AITER_MODES[arm].entry == "fwd" else "stage2"]


def test_the_wheels_layer_allocates_three_buffers_a_call(wheel, small):
    """Partial outputs, their sums and a final sum that nothing asked for; none of them ours."""
    call = call_of(small, "aiter_fwd_a16w8")
    call(small)
    with Watch() as watch:
        call(small)
    assert watch.allocated == [("mla.py", "aten.empty.memory_format")] * 3
    assert watch.synchronised == []


def test_the_wheels_layer_gets_our_split_count(wheel, small):
    call = call_of(small, "aiter_bf16")
    call(small)
    assert wheel.calls[0].values["splitData"].shape[1] == 10


def test_docs_hold_the_digests_of_the_code_objects():
    """Of those that the emulator runs."""
    skip_without_wheel()
    docs = (Path(__file__).parents[1] / "docs" / "aiter.md").read_text()
    digests = {name: hashlib.sha256(code_object(name)).hexdigest() for name in (*SPLIT.values(), *PERSISTENT.values())}
    assert dict(re.findall(r"\| `(mla_\w+)\.co` \| `(\w{64})` \|", docs)) == digests
