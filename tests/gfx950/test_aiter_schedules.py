"""The arms over the machine code of AITER's kernels, with schedules of ours and of AITER; the reduce is the model's.

The arms run as they do on a card, down to stage 1; the emulator then executes the code object from the wheel. The
persistent a8w8 is one version older than the runner's; the others were read to be the same (digests in docs/aiter.md).
"""

import contextlib

import pytest
import torch

import reference
import submission
from bench.options import case_label
from task import BENCHMARKS

from ..aiter_model import BF16, BLOCK, D_QK, FP8, AiterModel, call_of, standing_in
from ..aiter_wheel import skip_without_wheel
from . import aiter_objects

STAGE1, REDUCE, QUANT = "mla_decode_stage1_asm_fwd", "mla_reduce_v1", "dynamic_per_tensor_quant"
pytestmark = pytest.mark.usefixtures("no_gpu")
METADATA = "get_mla_metadata_v1"
FORMS = {BF16: "bf16", FP8: "fp8"}


class MachineModel(AiterModel):
    """The CPU model with stage 1 executed by the emulator, after the model's checks unless `unchecked`.

    `options` are the emulator's for a launch.
    """

    unchecked = False
    options: dict = {}

    def _persistent(self, v: dict, batch: int) -> None:
        self._check(super()._persistent, v, batch)
        kernel = aiter_objects.PERSISTENT[FORMS[v["Q"].dtype], FORMS[v["KV"].dtype]]
        work, rows = (v["work_indptr"], v["work_info_set"]), v["splitData"].shape[0]
        self._take(v, aiter_objects.run_persistent(kernel, self._problem(v), *work, rows, **self.options))

    def _split_kv(self, v: dict, batch: int) -> None:
        self._check(super()._split_kv, v, batch)
        kernel, splits = aiter_objects.SPLIT[FORMS[v["Q"].dtype]], v["splitData"].shape[1]
        self._take(v, aiter_objects.run_split(kernel, self._problem(v), splits, **self.options))

    def _check(self, modelled, v: dict, batch: int) -> None:
        if not self.unchecked:
            self.arithmetic = False
            modelled(v, batch)
            self.arithmetic = True

    @staticmethod
    def _problem(v: dict) -> aiter_objects.Problem:
        scales = {name: v[name].item() for name in ("q_scale", "kv_scale") if v[name] is not None}
        return aiter_objects.Problem(
            v["Q"], v["KV"].view(-1, D_QK), v["kv_indptr"], v["kv_page_indices"], sm_scale=v["softmax_scale"], **scales
        )

    @staticmethod
    def _take(v: dict, done: aiter_objects.Stage1) -> None:
        for name, result in (("splitData", done.partial), ("splitLse", done.lse), ("output", done.output)):
            v[name].view(result.shape).copy_(result)


@pytest.fixture
def machine(monkeypatch):
    skip_without_wheel()
    monkeypatch.setattr(submission, "_cast_keeps_overflow", lambda device: True)
    with contextlib.ExitStack() as stack:
        yield lambda version="pin": stack.enter_context(standing_in(MachineModel(version, num_cu=17)))


OWN, SPLIT_OWN = [STAGE1], [STAGE1, REDUCE]


@pytest.mark.parametrize(
    "arm, batch, kv_len, tile, ops, lengths",
    [
        ("aiter_own_a16w8", 2, 152, 80, SPLIT_OWN, {80, 72}),  # a tail of 8
        ("aiter_own_a16w8", 3, 49, 32, SPLIT_OWN, {24, 25}),  # cut 8 tokens early for a tail of 1
        ("aiter_own_a16w8", 3, 52, 64, OWN, {52}),  # a tail of 4
        ("aiter_own_a16w8", 3, 300, 32, SPLIT_OWN, {32, 44, 64, 76}),  # all CUs; two items on some
        ("aiter_own_a8w8", 2, 400, 128, [QUANT, *SPLIT_OWN], {128, 144}),
        ("aiter_own_a8w8", 2, 1162, 128, [QUANT, *SPLIT_OWN], {128, 138}),  # an item of two tiles is cut
        ("aiter_own_a8w8_cast", 2, 500, 512, OWN, {500}),
    ],
)
def test_own_schedule_through_the_machine_code(machine, arm, batch, kv_len, tile, ops, lengths):
    run_arm(machine(), arm, batch, kv_len, tile, ops, lengths)


@pytest.mark.parametrize(
    "version, arm, batch, kv_len, ops, lengths",
    [
        ("pin", "aiter_direct_a16w8", 17, 20, [METADATA, STAGE1], {20}),
        ("pin", "aiter_direct_a16w8", 2, 300, [METADATA, STAGE1, REDUCE], {80, 60}),
        ("wheel", "aiter_direct_a8w8", 3, 300, [METADATA, QUANT, STAGE1, REDUCE], {112, 76}),
    ],
)
def test_librarys_schedule_through_the_machine_code(machine, version, arm, batch, kv_len, ops, lengths):
    run_arm(machine(version), arm, batch, kv_len, None, ops, lengths)


def run_arm(model: MachineModel, arm: str, batch: int, kv_len: int, tile: int | None, ops: list, lengths: set) -> None:
    """One call of an arm, which must make these op calls over items of these lengths and pass the strict check."""
    data = reference.generate_input(batch, 1, kv_len, seed=kv_len)
    call = call_of(data, arm, tile)
    report = reference.strict_check(data, call(data), "fp8")
    assert model.ops() == ops
    assert item_lengths(model) == lengths
    assert report.passed, report


def test_references_schedule_through_the_machine_code(machine, monkeypatch):
    """AITER's other rule, for each sequence by itself."""
    monkeypatch.setattr(reference, "_on_rocm", lambda x: True)
    model, data = machine(), reference.generate_input(2, 1, 400, seed=400)
    report = reference.strict_check(data, reference.ref_kernel(data), "fp8")
    assert model.ops() == [METADATA, STAGE1, REDUCE]
    assert item_lengths(model) == {208, 192}
    assert report.passed, report


def item_lengths(model: MachineModel) -> set[int]:
    stage1 = stage1_values(model)
    return {item[5] - item[4] for item in stage1["work_info_set"][: stage1["work_indptr"][-1]].tolist()}


def stage1_values(model: MachineModel) -> dict:
    return next(call.values for call in model.calls if call.op == STAGE1)


@pytest.mark.parametrize(
    "arm, tile, batch, kv_len", [("aiter_own_a16w8", 48, 2, 100), ("aiter_direct_a16w8", None, 1, 400)]
)
def test_a16w16_takes_both_schedules_too(machine, arm, tile, batch, kv_len):
    model, data = machine(), reference.generate_input(batch, 1, kv_len, seed=100)
    call = call_of(data, arm, tile)
    call(data)
    stage1, reduce = (call.values for call in model.calls if call.op in (STAGE1, REDUCE))
    torch.ops.aiter.mla_decode_stage1_asm_fwd(**stage1 | {"KV": data[1]["bf16"].view(-1, 1, 1, D_QK), "kv_scale": None})
    torch.ops.aiter.mla_reduce_v1(**reduce)
    assert reference.strict_check(data, stage1["output"], "bf16").passed


@pytest.mark.parametrize("batch, kv_len, splits", [(2, 300, 5), (18, 70, 1), (2, 3, 1), (2, 1, 1)])
def test_bf16_arm_through_the_machine_code(machine, batch, kv_len, splits):
    """Not persistent: blocks of 64 tokens dealt to the splits in turn; the library combines."""
    model, data = machine(), reference.generate_input(batch, 1, kv_len, seed=kv_len)
    call = call_of(data, "aiter_bf16")
    report = reference.strict_check(data, call(data), "bf16")
    assert model.ops() == [STAGE1, "stage2"]
    assert stage1_values(model)["splitData"].shape[1] == splits
    assert report.passed, report


@pytest.mark.parametrize(
    "arm, kv_len, tile, options",
    [
        # A quantum of 1000 lets each wave run to its next barrier.
        ("aiter_own_a16w8", 152, 80, [{"quantum": 1}, {"quantum": 1000}]),
        # These waves must stay nearly level.
        ("aiter_own_a8w8_cast", 400, 512, [{"quantum": 1}, {"quantum": 37}]),
        # LDS instructions land late too.
        ("aiter_bf16", 100, None, [{"late_loads": "late", "quantum": 1}, {"late_loads": "late", "quantum": 1000}]),
    ],
)
def test_same_bits_however_late_loads_land(machine, arm, kv_len, tile, options):
    model, data = machine(), reference.generate_input(2, 1, kv_len, seed=kv_len)
    call = call_of(data, arm, tile)
    early = call(data).clone()
    for choice in options:
        model.options = {"late_loads": "late memory"} | choice
        assert torch.equal(call(data), early), choice


@pytest.mark.parametrize(
    "arm, kv_len, tile, poisoned",
    [
        ("aiter_own_a16w8", 48, 48, False),
        ("aiter_own_a16w8", 52, 64, True),
        ("aiter_own_a8w8_cast", 128, 128, False),
        ("aiter_own_a8w8_cast", 144, 256, True),
        ("aiter_bf16", 64, None, False),
        ("aiter_bf16", 80, None, True),
    ],
)
def test_token_0_poisons_other_sequences_where_a_step_is_not_whole(machine, arm, kv_len, tile, poisoned):
    """A step is 16 tokens in a16w8, 128 in a8w8 and 64 in the bf16 kernel; token 0 stands for those that it lacks."""
    machine()
    data = reference.generate_input(2, 1, kv_len, seed=kv_len)
    data[1]["bf16"][0] = torch.nan
    data[1]["fp8"][0].view(torch.uint8)[0] = 0x7F
    call = call_of(data, arm, tile)
    out = call(data)
    assert out[0].isnan().any() and out[1].isnan().any() == poisoned


@pytest.mark.parametrize("case", BENCHMARKS, ids=case_label)
def test_official_shapes_have_only_whole_steps_with_bf16_queries(case):
    """So token 0 stands in for nothing there."""
    batch, kv_len = case["batchsize"], case["kvseqlen"]
    assert kv_len % BLOCK == 0
    tile = submission.AITER_MODES["aiter_own_a16w8"].tile
    items = submission.build_schedule(batch, kv_len, 256, tile)["work_info_set"]
    assert all((item[5] - item[4]) % 16 == 0 for item in items)


def test_no_arm_gives_a_persistent_kernel_a_bf16_cache():
    """The a16w16 kernel misses a wait; `test_steady_state_call` holds each arm to its mode."""
    modes = submission.AITER_MODES.values()
    assert {mode.kv for mode in modes if mode.entry != "split_kv"} == {"fp8"}


def test_an_empty_item_makes_the_kernel_skip_the_rest_of_its_cu(machine):
    """Why the schedule never has one; also that a wrong schedule does not pass here."""
    model, data = machine(), reference.generate_input(2, 1, 36, seed=36)
    call = call_of(data, "aiter_own_a16w8", tile=48)
    assert reference.strict_check(data, call(data), "fp8").passed
    stage1 = stage1_values(model)
    first, second = stage1["work_info_set"].tolist()
    empty = [*first[:5], first[4], first[6], 0]
    model.unchecked = True
    for items, good in (([first, second], True), ([first, empty, second], False)):
        indptr = torch.tensor([0] + [len(items)] * model.num_cu, dtype=torch.int32)
        work = {"work_indptr": indptr, "work_info_set": torch.tensor(items, dtype=torch.int32)}
        torch.ops.aiter.mla_decode_stage1_asm_fwd(**stage1 | work)
        assert stage1["output"][0].isfinite().all()
        assert stage1["output"][1].isfinite().all() == good
