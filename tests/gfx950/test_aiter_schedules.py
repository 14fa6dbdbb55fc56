"""Schedules, ours and AITER's, through the machine code of AITER's persistent kernels; the reduce is the model's.

The arms run as they do on a card, down to stage 1; the emulator then executes the code object from the wheel. a16w8 and
a16w16 are byte for byte those of the runner, a8w8 is one version older.
"""

import pytest
import torch

import reference
import submission

from ..aiter_model import BF16, D_QK, FP8, AiterModel, plan_for, standing_in
from ..aiter_wheel import skip_without_wheel
from . import aiter_objects

STAGE1, REDUCE, QUANT = "mla_decode_stage1_asm_fwd", "mla_reduce_v1", "dynamic_per_tensor_quant"
METADATA = "get_mla_metadata_v1"
FORMS = {BF16: "bf16", FP8: "fp8"}


class MachineModel(AiterModel):
    """The CPU model with persistent stage 1 executed by the emulator, after the model's checks unless `unchecked`."""

    unchecked = False

    def _persistent(self, v: dict, batch: int) -> None:
        if not self.unchecked:
            self.arithmetic = False
            super()._persistent(v, batch)
            self.arithmetic = True
        q, kv, part, lse, out = (v[name] for name in ("Q", "KV", "splitData", "splitLse", "output"))
        problem = aiter_objects.Problem(
            q, kv.view(-1, D_QK), v["kv_indptr"], v["kv_page_indices"],
            sm_scale=v["softmax_scale"],
            **{name: v[name].item() for name in ("q_scale", "kv_scale") if v[name] is not None},
        )  # fmt: skip
        kernel = aiter_objects.PERSISTENT[FORMS[q.dtype], FORMS[kv.dtype]]
        done = aiter_objects.run_persistent(kernel, problem, v["work_indptr"], v["work_info_set"], part.shape[0])
        # NaN is what the kernel did not write.
        for buffer, result in ((part[:, 0], done.partial), (lse[:, 0, :, 0], done.lse), (out, done.output)):
            buffer.copy_(torch.where(result.isnan(), buffer, result))


@pytest.fixture
def machine(monkeypatch):
    skip_without_wheel()
    monkeypatch.setattr(submission, "_cast_keeps_overflow", lambda device: True)
    with standing_in(MachineModel(num_cu=17)) as model:
        yield model


@pytest.mark.parametrize(
    "arm, batch, kv_len, tile, ops",
    [
        ("aiter_own_a16w8", 2, 152, 80, [STAGE1, REDUCE]),  # uneven items, tail of 8
        ("aiter_own_a16w8", 3, 49, 32, [STAGE1, REDUCE]),  # cut 8 tokens early for a tail of 1
        ("aiter_own_a16w8", 3, 52, 64, [STAGE1]),  # nothing split, tail of 4
        ("aiter_own_a8w8", 2, 400, 128, [QUANT, STAGE1, REDUCE]),
        ("aiter_own_a8w8_cast", 2, 500, 512, [STAGE1]),
        ("aiter_direct_a16w8", 2, 200, 0, [METADATA, STAGE1]),
        ("aiter_direct_a8w8", 2, 400, 0, [METADATA, QUANT, STAGE1, REDUCE]),
    ],
)
def test_schedule_through_the_machine_code(machine, arm, batch, kv_len, tile, ops):
    data = reference.generate_input(batch, 1, kv_len, seed=kv_len)
    plan = plan_for(data, arm, tile)
    report = reference.strict_check(data, plan.run(data), "fp8")
    assert machine.ops() == ops
    assert report.passed, report


def test_a16w16_takes_our_schedule_too(machine):
    data = reference.generate_input(2, 1, 100, seed=100)
    plan = plan_for(data, "aiter_own_a16w8", tile=48)
    plan.run(data)
    stage1, reduce = (call.values for call in machine.calls)
    torch.ops.aiter.mla_decode_stage1_asm_fwd(**stage1 | {"KV": data[1]["bf16"].view(-1, 1, 1, 576)})
    torch.ops.aiter.mla_reduce_v1(**reduce)
    assert reference.strict_check(data, stage1["output"], "bf16").passed


def test_an_empty_item_makes_the_kernel_skip_the_rest_of_its_cu(machine):
    """Why the schedule never has one; also that a wrong schedule does not pass here."""
    data = reference.generate_input(2, 1, 36, seed=36)
    plan = plan_for(data, "aiter_own_a16w8", tile=48)
    assert reference.strict_check(data, plan.run(data), "fp8").passed
    stage1 = machine.calls[0].values
    first, second = stage1["work_info_set"].tolist()
    empty = [*first[:5], first[4], first[6], 0]
    machine.unchecked = True
    for items, good in (([first, second], True), ([first, empty, second], False)):
        indptr = torch.tensor([0] + [len(items)] * machine.num_cu, dtype=torch.int32)
        work = {"work_indptr": indptr, "work_info_set": torch.tensor(items, dtype=torch.int32)}
        stage1["output"].fill_(float("nan"))
        torch.ops.aiter.mla_decode_stage1_asm_fwd(**stage1 | work)
        assert stage1["output"][0].isfinite().all()
        assert stage1["output"][1].isfinite().all() == good
