"""The AITER arms over the CPU model of AITER: results, the ops of a steady-state call, versions, refusals."""

import contextlib
import inspect
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import reference
import submission
from submission import AITER_MODES, ARMS, Problem, Target
from task import BENCHMARKS
from tests.aiter_model import SCHEMAS, AiterModel, Misuse, Watch, call_of, standing_in
from tests.inputs import ragged_input

STAGE1, REDUCE, QUANT = "mla_decode_stage1_asm_fwd", "mla_reduce_v1", "dynamic_per_tensor_quant"
pytestmark = pytest.mark.usefixtures("no_gpu")
NUM_CU = 64


@pytest.fixture
def aiter():
    """`aiter(version=..., ...)` makes and installs a model."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(standing_in(AiterModel(**{"num_cu": NUM_CU} | options)))


@pytest.fixture
def keep_overflow(monkeypatch):
    """Lets the cast arms run where torch's own cast clips."""
    monkeypatch.setattr(submission, "_cast_keeps_overflow", lambda device: True)


@pytest.fixture
def unproven(monkeypatch):
    """Spares the first call its proof, which a model without arithmetic would fail."""
    monkeypatch.setattr(submission, "_attend_float32", lambda data, kv: None)
    monkeypatch.setattr(submission, "_prove", lambda *arguments: (0.0, 0.0))


@pytest.fixture(scope="module")
def small():
    """AITER's own schedules cut its sequences into items of one 128-token tile and a rest."""
    return reference.generate_input(3, 1, 600, seed=7)


@pytest.fixture(scope="module")
def long():
    return reference.generate_input(3, 1, 1536, seed=7)


def hollow(batch: int, kv_len: int) -> tuple:
    """Inputs of any size whose pages are never touched."""
    total = batch * kv_len
    kv_data = {
        "bf16": torch.empty(total, 1, 576, dtype=torch.bfloat16),
        "fp8": (torch.empty(total, 1, 576, dtype=torch.float8_e4m3fn), torch.ones(1)),
        "mxfp4": (torch.empty(total, 1, 288, dtype=torch.uint8), torch.empty(total, 24, dtype=torch.uint8)),
    }
    config = reference.case_config(batch, 1, kv_len)
    q = torch.zeros(batch, 16, 576, dtype=torch.bfloat16)
    indptr = torch.arange(batch + 1, dtype=torch.int32)
    return q, kv_data, indptr, indptr * kv_len, config


def problem(**changes) -> Problem:
    given = {"device": torch.device("cpu"), "batch_size": 4, "q_seq_len": 1, "kv_seq_len": 1024, "sm_scale": 576**-0.5,
             "uniform": True, "aligned": True, "packed": True, "contiguous": True}  # fmt: skip
    return Problem(**given | changes)


# ---- results ----


@pytest.mark.parametrize("version", SCHEMAS)
@pytest.mark.parametrize("arm", AITER_MODES)
def test_arm_is_exact(aiter, keep_overflow, small, version, arm):
    aiter(version=version)
    call = call_of(small, arm)
    out = call(small).clone()
    report = reference.strict_check(small, out, ARMS[arm].kv)
    assert report.passed, report
    assert torch.equal(call(small), out)


@pytest.mark.parametrize("batch, kv_len", [(64, 256), (70, 300)])
def test_a8w8_cuts_sequences_of_an_even_number_of_tiles(aiter, batch, kv_len):
    """Also those that no other CU has a part of."""
    model = aiter()
    data = reference.generate_input(batch, 1, kv_len, seed=kv_len)
    call = call_of(data, "aiter_own_a8w8")
    assert reference.strict_check(data, call(data), "fp8").passed
    assert model.ops() == [QUANT, STAGE1, REDUCE]


@pytest.mark.parametrize("kv_len, tile", [(16, 16), (17, 16), (100, 32), (1025, 128), (4, 64)])
def test_own_schedule_on_short_and_awkward_lengths(aiter, kv_len, tile):
    aiter()
    data = reference.generate_input(5, 1, kv_len, seed=kv_len)
    call = call_of(data, "aiter_own_a16w8", tile)
    assert reference.strict_check(data, call(data), "fp8").passed


@pytest.mark.parametrize("arm", AITER_MODES)
def test_forced_arm_proves_itself_in_custom_kernel(aiter, keep_overflow, monkeypatch, small, arm):
    model = aiter()
    monkeypatch.setenv("MLA_BACKEND", arm)
    out = submission.custom_kernel(small)
    assert reference.strict_check(small, out, ARMS[arm].kv).passed
    assert submission.last_run() == submission.Selection(arm, ARMS[arm].kv, AITER_MODES[arm].entry)
    model.calls.clear()
    submission.custom_kernel(small)
    assert model.ops() == expected_ops(arm, batch=3)


def test_two_tiles_of_one_shape_have_their_own_schedules(aiter, small):
    model = aiter()
    for tile in (32, 64):
        call = call_of(small, "aiter_own_a16w8", tile)
        call(small)
    fine, coarse = (call.values["work_info_set"].shape[0] for call in model.calls[::2])
    assert fine > coarse


def test_dispatch_times_the_arms_and_keeps_one_of_aiters(aiter, keep_overflow, monkeypatch, capsys):
    """With a planted arm that does what the kernels do to pages of two tokens: it reads one of each."""

    def page_of_two(data, problem, config):
        q, kv_data, *rest = data
        fp8, scale = kv_data["fp8"]
        halved = kv_data | {"fp8": (fp8[::2].repeat_interleave(2, 0).contiguous(), scale)}
        return call_of(data, "aiter_own_a16w8")((q, halved, *rest))

    aiter()
    monkeypatch.setitem(ARMS, "page_of_two", replace(ARMS["aiter_own_a16w8"], run=page_of_two))
    configs = (submission.Config("page_of_two", splits=1), submission._A16W8, submission._A8W8)
    monkeypatch.setattr(submission, "TABLE", (("gfx950", None, None, configs),))
    data = reference.generate_input(2, 1, 260, seed=9)
    out = submission.custom_kernel(data)
    assert submission.last_run().arm.startswith("aiter_")
    assert reference.strict_check(data, out, "fp8").passed
    assert re.search(r"dropped page_of_two .*: error: expected at most 1e-02, got", capsys.readouterr().err)


@pytest.mark.parametrize("batch, kv_len, arm", [(4, 1024, "aiter_own_a16w8"), (3, 520, "aiter_own_a16w8")])
def test_table_takes_an_aiter_arm_first(aiter, monkeypatch, batch, kv_len, arm):
    aiter()
    monkeypatch.setenv("MLA_TUNE", "0")
    submission.custom_kernel(reference.generate_input(batch, 1, kv_len, seed=1))
    assert submission.last_run().arm == arm


@pytest.mark.parametrize("case", BENCHMARKS)
def test_table_lists_two_kernels_for_each_official_shape_and_none_that_is_refused(aiter, keep_overflow, case):
    aiter(num_cu=256, arithmetic=False)
    batch, kv_len = case["batchsize"], case["kvseqlen"]
    configs = submission.select_config(batch, kv_len, Target("gfx950", 256))
    arms = [config.arm for config in configs if config.arm in AITER_MODES]
    smallest = (batch, kv_len) == (4, 1024)
    expected = {("bf16", "fp8"), ("bf16", "bf16")} if smallest else {("bf16", "fp8"), ("fp8", "fp8")}
    modes = [AITER_MODES[arm] for arm in arms]
    assert {("bf16" if mode.q == "bf16" else "fp8", mode.kv) for mode in modes} == expected
    for arm in arms:
        assert ARMS[arm].why_not(problem(batch_size=batch, kv_seq_len=kv_len)) is None


def test_arguments_go_by_position_up_to_the_first_that_is_left_out():
    def op(*args, **kwargs):
        return args, kwargs

    op.__signature__ = inspect.signature(lambda Q, kv_buffer, lse=None, sm_scale=None: None)
    module = SimpleNamespace(no_compiled_op=op)
    call = submission._bind(module, "no_compiled_op", {"sm_scale": 3, "kv_buffer": 2, "q": None})
    assert call(q=1) == ((1, 2), {"sm_scale": 3})


# ---- the steady-state call ----


def expected_ops(arm: str, batch: int) -> list[str]:
    mode = AITER_MODES[arm]
    quantise = [QUANT] if mode.q == "dynamic" else []
    if mode.entry == "split_kv":
        return [STAGE1, "stage2"]
    # The library always reduces; we only where a sequence is cut, as the a8w8 kernel's always are.
    return [*quantise, STAGE1, *([REDUCE] if mode.entry == "fwd" or mode.q != "bf16" or batch < 256 else [])]


def gives_even_tiles(mode: submission.AiterMode, batch: int, kv_len: int) -> bool:
    """Whether AITER's schedule of a benchmark shape gives the a8w8 kernel an even number of tiles."""
    return mode.entry in ("fwd", "direct") and mode.q != "bf16" and (batch, kv_len) > (32, 1024)


@pytest.mark.parametrize("case", BENCHMARKS, ids=lambda case: f"{case['batchsize']}x{case['kvseqlen']}")
@pytest.mark.parametrize("arm", AITER_MODES)
def test_steady_state_call(aiter, keep_overflow, unproven, monkeypatch, arm, case):
    model = aiter(num_cu=256, arithmetic=False)
    mode, batch, kv_len = AITER_MODES[arm], case["batchsize"], case["kvseqlen"]
    data = hollow(batch, kv_len)
    monkeypatch.setenv("MLA_BACKEND", arm)
    if gives_even_tiles(mode, batch, kv_len):
        with pytest.raises(RuntimeError, match=f"{arm}: .* an even number of 128-token tiles"):
            submission.custom_kernel(data)
        return
    out = submission.custom_kernel(data)
    # On a GPU only the first call of a shape checks its arguments.
    monkeypatch.setattr(submission, "check_arguments", lambda data: None)
    model.calls.clear()
    with Watch() as watch:
        assert submission.custom_kernel(data).data_ptr() == out.data_ptr()
    first, model.calls = model.calls, []
    assert submission.custom_kernel(data).data_ptr() == out.data_ptr()

    assert submission.last_run().arm == arm
    assert [call.op for call in first] == expected_ops(arm, batch)
    assert watch.synchronised == []
    if mode.entry in ("direct", "own"):
        assert watch.allocated == []
        assert [call.pointers() for call in model.calls] == [call.pointers() for call in first]
    else:
        assert [x for x in watch.allocated if x[0] == "submission.py"] == []
    # The direct cast is one copy of ours; nothing else of ours writes.
    assert watch.written == ([("submission.py", "aten.copy_.default")] if mode.q == "cast" else [])
    values = {call.op: call.values for call in first}
    stage1, fp8_q = values[STAGE1], mode.q != "bf16"
    assert stage1["Q"].dtype == (torch.float8_e4m3fn if fp8_q else torch.bfloat16)
    assert stage1["KV"].data_ptr() == (data[1]["fp8"][0] if mode.kv == "fp8" else data[1]["bf16"]).data_ptr()
    assert tuple(stage1["KV"].shape) == (batch * kv_len, 1, 1, 576)
    assert stage1["page_size"] == 1
    assert (stage1["q_scale"] is not None) == fp8_q
    assert (stage1["kv_scale"] is not None) == (mode.kv == "fp8")
    assert stage1["output"].data_ptr() == out.data_ptr()
    assert stage1["splitData"].numel() > 0  # an empty buffer is a null pointer
    if QUANT in values:
        assert values[QUANT]["input"] is data[0]
        assert same_tensors((values[QUANT]["out"], values[QUANT]["scale"]), (stage1["Q"], stage1["q_scale"]))
    if REDUCE in values:
        reduce = values[REDUCE]
        passed_on = reduce["partial_output"], reduce["partial_lse"], reduce["final_output"]
        assert same_tensors(passed_on, (stage1["splitData"], stage1["splitLse"], out))
        assert reduce["reduce_partial_map"].numel() <= len(stage1["splitData"])
        assert len(reduce["reduce_indptr"]) == len(reduce["reduce_final_map"]) + 1 == batch + 1


def same_tensors(some, others) -> bool:
    return [x.data_ptr() for x in some] == [x.data_ptr() for x in others]


def test_watch_sees_allocations_and_synchronisation(aiter, small):
    """The recorder of the test above can fail."""
    aiter()
    call = call_of(small, "aiter_own_a16w8")
    call(small)
    with Watch() as watch:
        call(small)
        torch.zeros(3)
        small[3].tolist()
        bool(small[1]["fp8"][1] > 0)
    assert [op for _, op in watch.allocated] == ["aten.zeros.default", "aten.gt.Scalar"]
    assert watch.synchronised == ["tolist", "__bool__"]


def test_shapes_share_no_output(aiter):
    aiter(num_cu=256, arithmetic=False)
    one, other = hollow(4, 1024), hollow(4, 8192)
    outputs = []
    for data in (one, other, one):
        call = call_of(data, "aiter_own_a16w8")
        outputs.append(call(data).data_ptr())
    assert outputs[0] == outputs[2] != outputs[1]


@pytest.mark.parametrize("arm", AITER_MODES)
def test_first_call_under_inference_mode_serves_later_ones(aiter, keep_overflow, small, arm):
    aiter()
    with torch.inference_mode():
        out = call_of(small, arm)(small).clone()
    assert torch.equal(call_of(small, arm)(small), out)


def test_new_inputs_of_a_shape_are_read(aiter, small):
    aiter()
    call = call_of(small, "aiter_own_a8w8")
    call(small)
    other = reference.generate_input(3, 1, 600, seed=8)
    assert reference.strict_check(other, call(other), "fp8").passed


# ---- the reference ----


@pytest.fixture
def on_rocm(monkeypatch):
    """Lets the reference take the CPU for a ROCm GPU."""
    monkeypatch.setattr(reference, "_on_rocm", lambda x: True)


@pytest.mark.parametrize("version", ["pin", "head"])
def test_reference_takes_the_librarys_persistent_path(aiter, on_rocm, small, version):
    model = aiter(version=version)
    out = reference.ref_kernel(small)
    assert model.ops() == ["get_mla_metadata_v1", STAGE1, REDUCE]
    assert reference.strict_check(small, out, "fp8").passed


REFERENCE_UNFIT = {
    "wheel": ("wheel", [600], "plans no splits"),
    "short": ("pin", [200, 195], "196 tokens from 0 on, not 195"),
    "tail of one": ("pin", [1025], "tail of under 4"),
    "16 splits": ("pin", [16 * 196], "16 times"),
}


@pytest.mark.parametrize("name", REFERENCE_UNFIT)
def test_reference_says_why_it_falls_back(aiter, on_rocm, name):
    version, lengths, message = REFERENCE_UNFIT[name]
    model = aiter(version=version)
    data = ragged_input(lengths)
    with pytest.warns(RuntimeWarning, match=message):
        out = reference.ref_kernel(data)
    assert STAGE1 not in model.ops()
    assert reference.strict_check(data, out, "fp8").passed


def test_reference_refuses_what_its_kernel_misreads(aiter, monkeypatch, small):
    aiter()
    q, kv_data, qo_indptr, kv_indptr, config = small
    pool = torch.empty(7_456_541, 1, 576, dtype=torch.float8_e4m3fn)
    for changed, message in (
        ((q, kv_data | {"fp8": (pool, kv_data["fp8"][1])}, qo_indptr, kv_indptr, config), "has 4294967616"),
        ((q, kv_data, qo_indptr, kv_indptr, config | {"q_seq_len": 2}), "one query a sequence, not 2"),
        ((q, kv_data, qo_indptr, kv_indptr + 1, config), "not 600 from 1 on"),
    ):
        with pytest.raises(reference.AiterUnfit, match=message):
            reference._aiter_for(changed)
    monkeypatch.setitem(sys.modules, "aiter", None)
    with pytest.raises(reference.AiterUnfit, match="AITER is not installed"):
        reference._aiter_for(small)


def test_reference_leaves_other_devices_to_torch(aiter, small, recwarn):
    model = aiter()
    reference.ref_kernel(small)
    assert model.calls == [] and not recwarn
    # One that says it is on a GPU: it is ROCm's only in a ROCm build.
    assert not reference._on_rocm(SimpleNamespace(is_cuda=True)) and not reference._on_rocm(small[0])


# ---- versions ----


@pytest.mark.parametrize("op", [STAGE1, REDUCE, "get_mla_metadata_v1"])
@pytest.mark.parametrize("version", SCHEMAS)
def test_unknown_layout_is_refused_by_name(aiter, version, op):
    schema = SCHEMAS[version][op]
    first, rest = schema.split(", ", 1)
    unknown = f"{first}, int brand_new, {rest}"
    aiter(version=version, schemas={op: unknown})
    reason = ARMS["aiter_direct_a16w8"].why_not(problem())
    assert f"{op}: expected a layout with [] and without ['brand_new'], got (" in reason


@pytest.mark.parametrize(
    "op, kind, name", [(STAGE1, "Tensor?", "kv_scale=None"), (REDUCE, "Tensor", "reduce_partial_map")]
)
def test_layout_without_an_argument_we_need_is_refused(aiter, op, kind, name):
    schema = SCHEMAS["pin"][op]
    aiter(schemas={op: re.sub(rf", {re.escape(f'{kind} {name}')}\b", "", schema)})
    expected = f"{op}: expected a layout with ['{name.split('=')[0]}'] and without []"
    assert expected in ARMS["aiter_direct_a16w8"].why_not(problem())


def test_metadata_with_its_buffers_the_other_way_round_is_refused(aiter):
    schema, pair = SCHEMAS["pin"]["get_mla_metadata_v1"], "Tensor work_info_set, Tensor work_indptr"
    assert pair in schema
    aiter(schemas={"get_mla_metadata_v1": schema.replace(pair, "Tensor work_indptr, Tensor work_info_set")})
    reason = ARMS["aiter_direct_a16w8"].why_not(problem())
    assert "get_mla_metadata_v1: expected a layout with work_info_set, work_indptr, got (" in reason


@pytest.mark.parametrize("name", [STAGE1, REDUCE, "get_mla_metadata_v1", "get_mla_metadata_info_v1", "mla"])
def test_missing_op_leaves_the_call_to_other_arms(aiter, monkeypatch, small, name):
    model = aiter()
    monkeypatch.delattr(model.module, name)
    monkeypatch.setenv("MLA_TUNE", "0")
    assert re.match(f"AttributeError: .*'{name}'", ARMS["aiter_direct_a16w8"].why_not(problem()))
    output = submission.custom_kernel(small)
    assert reference.strict_check(small, output, submission.last_run().kv).passed


def test_failing_metadata_op_refuses_the_arm(aiter, monkeypatch):
    model = aiter()

    def fails(*args, **kwargs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(model.module, "get_mla_metadata_v1", fails)
    assert ARMS["aiter_direct_a16w8"].why_not(problem()) == "RuntimeError: no compiler"


def test_a_first_token_that_is_not_finite_is_seen_at_once(aiter, monkeypatch, capsys):
    """The kernels read token 0 for the missing tokens of a last tile; the dispatch's proof drops the arm."""
    aiter()
    data = reference.generate_input(3, 1, 520, seed=7)
    data[1]["fp8"][0].view(torch.uint8)[0, 0, 3] = 0x7F
    monkeypatch.setenv("MLA_BACKEND", "aiter_own_a16w8")
    with pytest.raises(RuntimeError, match="no arm is right"):
        submission.custom_kernel(data)


@pytest.mark.parametrize("batch, refused", [(455, False), (456, True)])
def test_bf16_pool_counts_two_bytes(aiter, batch, refused):
    aiter()
    reason = ARMS["aiter_bf16"].why_not(problem(batch_size=batch, kv_seq_len=8192))
    assert (reason is not None and "the cache has 4303355904 bytes" in reason) == refused


def test_new_optional_argument_is_left_alone(aiter, small):
    aiter(schemas={STAGE1: SCHEMAS["pin"][STAGE1] + ", int brand_new=0"})
    call = call_of(small, "aiter_own_a16w8")
    assert reference.strict_check(small, call(small), "fp8").passed


def test_decode_fwd_without_a_keyword_is_refused(aiter):
    model = aiter()
    model.module.mla.mla_decode_fwd = lambda q, kv_buffer, o, qo_indptr: None
    assert "mla_decode_fwd: expected a layout with ['kv_indices'" in ARMS["aiter_fwd_a16w8"].why_not(problem())


def test_op_without_schema_and_signature_is_refused(aiter):
    model = aiter(schemas={REDUCE: None})
    model.module.mla_reduce_v1 = lambda *args, **kwargs: None
    reason = ARMS["aiter_own_a16w8"].why_not(problem())
    assert reason.startswith("ValueError: mla_reduce_v1: ") and reason.endswith("got ('args', 'kwargs')")


@pytest.mark.parametrize("wrapper", [True, False])
def test_quantisation_without_the_op(aiter, capsys, small, wrapper):
    model = aiter(schemas={QUANT: None})
    if not wrapper:
        del model.module.per_tensor_quant_hip
    call = call_of(small, "aiter_own_a8w8")
    out = call(small)
    with Watch() as watch:
        call(small)
    assert watch.synchronised == []
    assert wrapper or watch.allocated == []
    assert reference.strict_check(small, out, "fp8").passed
    assert capsys.readouterr().err.count("AITER has no dynamic_per_tensor_quant") == 1
    assert ("per_tensor_quant_hip" in model.ops()) == wrapper


def test_torch_quantisation_of_zeros(aiter, small):
    model = aiter(schemas={QUANT: None})
    del model.module.per_tensor_quant_hip
    data = (torch.zeros_like(small[0]), *small[1:])
    call = call_of(data, "aiter_own_a8w8")
    assert call(data).isfinite().all()


@pytest.mark.parametrize(
    "source, reason",
    [
        (None, "ModuleNotFoundError: No module named 'aiter'"),
        ("import no_such_module", "ModuleNotFoundError: .*no_such_module"),
        ("raise RuntimeError('no rocminfo')", "RuntimeError: no rocminfo"),
    ],
)
def test_without_a_working_aiter(monkeypatch, tmp_path, source, reason):
    if source:
        (tmp_path / "aiter.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(submission, "_target", lambda device: Target("gfx950", 256))
    submission._aiter.cache_clear()
    for _ in range(2):
        assert re.search(reason, ARMS["aiter_own_a16w8"].why_not(problem()))
    submission._aiter.cache_clear()


# ---- refusals ----

UNFIT = {
    "ragged": ({"uniform": False}, "ragged"),
    "two queries": ({"q_seq_len": 2}, "one query a sequence"),
    "no tokens": ({"kv_seq_len": 0, "uniform": False}, "empty or ragged"),
    "strided": ({"contiguous": False}, "contiguous"),
    "misaligned": ({"aligned": False}, "multiples of 16 bytes"),
    "4 GiB": ({"batch_size": 911, "kv_seq_len": 8192}, "offsets have 32 bits"),
}


@pytest.mark.parametrize("arm", AITER_MODES)
@pytest.mark.parametrize("name", UNFIT)
def test_problem_is_refused(aiter, keep_overflow, arm, name):
    model = aiter()
    changes, message = UNFIT[name]
    assert message in ARMS[arm].why_not(problem(**changes))
    assert model.calls == []


def test_largest_pool_is_taken(aiter):
    aiter(num_cu=256, arithmetic=False)
    assert ARMS["aiter_own_a16w8"].why_not(problem(batch_size=910, kv_seq_len=8192)) is None


def test_other_device_is_refused(monkeypatch):
    monkeypatch.setattr(submission, "_target", lambda device: Target("sm90", 132))
    assert "not for sm90" in ARMS["aiter_own_a16w8"].why_not(problem())


def test_ragged_batch_goes_to_triton(aiter, monkeypatch):
    """No sequence is longer than kv_seq_len, so one that is shorter shows in the total."""
    aiter()

    def decode(data, problem, config):
        return submission._attend_float32(data, "fp8").bfloat16()

    monkeypatch.setitem(ARMS, "triton_fp8", replace(ARMS["triton_fp8"], why_not=lambda given: None, run=decode))
    monkeypatch.setenv("MLA_TUNE", "0")
    for lengths, arm in (([260, 260], "aiter_own_a16w8"), ([260, 259], "triton_fp8")):
        data = ragged_input(lengths)
        out = submission.custom_kernel(data)
        assert submission.last_run().arm == arm
        assert reference.strict_check(data, out, "fp8").passed


@pytest.mark.parametrize("kv_len, message", [(1025, "tail under 4"), (4096, "is in 16 items")])
def test_librarys_schedule_is_refused_where_it_is_unsafe(aiter, kv_len, message):
    aiter(num_cu=256, arithmetic=False)
    given = problem(batch_size=16, kv_seq_len=kv_len)
    for arm in ("aiter_fwd_a16w8", "aiter_direct_a16w8"):
        reason = ARMS[arm].why_not(given)
        assert reason.startswith(f"ValueError: {AITER_MODES[arm].entry} schedule: ") and message in reason
    assert ARMS["aiter_own_a16w8"].why_not(given) is None


def test_other_fp8_is_refused(aiter):
    aiter().module.dtypes.fp8 = torch.float8_e4m3fnuz
    reason = ARMS["aiter_own_a16w8"].why_not(problem())
    assert reason == "ValueError: aiter.dtypes.fp8: expected torch.float8_e4m3fn, got torch.float8_e4m3fnuz"


@pytest.mark.parametrize("kv_len", [1, 2, 3])
def test_sequences_under_4_tokens_are_refused(aiter, keep_overflow, kv_len):
    aiter()
    for arm, mode in AITER_MODES.items():
        reason = ARMS[arm].why_not(problem(kv_seq_len=kv_len))
        assert (reason is None) if mode.entry == "split_kv" else ("a tail under 4" in reason), arm


@pytest.mark.parametrize("version", SCHEMAS)
def test_librarys_rule_takes_short_sequences(aiter, version):
    """Its other rule divides by zero under 196 tokens."""
    model = aiter(version=version)
    data = reference.generate_input(3, 1, 190, seed=7)
    call = call_of(data, "aiter_direct_a16w8")
    assert model.calls[0].values["fast_mode"] and not model.calls[0].values.get("intra_batch_mode")
    assert reference.strict_check(data, call(data), "fp8").passed


def test_split_kv_never_uses_16_splits(aiter):
    """4 x 1024 is where the library's own table says 16."""
    model = aiter(num_cu=256, arithmetic=False)
    data = hollow(4, 1024)
    call = call_of(data, "aiter_bf16")
    call(data)
    assert model.calls[0].values["splitData"].shape[1] == 8


# ---- the direct cast ----


def test_cast_is_allowed_only_where_it_keeps_overflow(aiter, small):
    """What torch does here decides, read off the cast itself."""
    aiter()
    submission._cast_keeps_overflow.cache_clear()
    clips = torch.tensor([1e4], dtype=torch.bfloat16).to(torch.float8_e4m3fn).float().isfinite().item()
    reason = ARMS["aiter_own_a8w8_cast"].why_not(submission.problem_of(small))
    assert ("clips here" in reason) if clips else (reason is None)


@pytest.mark.parametrize("clip", [True, False])
def test_probe_tells_a_clipping_cast(monkeypatch, clip):
    def copy(self, source):
        source = source.float()
        bits = source.clamp(-448, 448).to(torch.float8_e4m3fn)
        if not clip:
            bits = torch.where(source.abs() > 464, torch.tensor(0x7F, dtype=torch.uint8), bits.view(torch.uint8))
        self.view(torch.uint8)[:] = bits.view(torch.uint8)
        return self

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    submission._cast_keeps_overflow.cache_clear()
    assert submission._cast_keeps_overflow(torch.device("cpu")) is not clip
    submission._cast_keeps_overflow.cache_clear()


# ---- the caller's duty ----


@pytest.mark.parametrize("kv_len, poisoned", [(520, True), (256, False)])
def test_token_0_that_is_not_finite_poisons_other_sequences_through_tails(aiter, kv_len, poisoned):
    """What `custom_kernel` documents: not visible from the host."""
    aiter()
    data = reference.generate_input(3, 1, kv_len, seed=7)
    data[1]["fp8"][0].view(torch.uint8)[0] = 0x7F
    call = call_of(data, "aiter_own_a16w8")
    out = call(data)
    assert out[0].isnan().any() and out[2].isnan().any() == poisoned


# ---- the model refuses what the real ops misread ----


def _good_call(model: AiterModel, data: tuple, arm: str) -> dict:
    call = call_of(data, arm)
    call(data)
    return dict(next(call.values for call in model.calls if call.op == STAGE1))


def _items(values: dict, edit) -> dict:
    items = values["work_info_set"].clone()
    edit(items)
    addresses = torch.tensor([values["work_indptr"].data_ptr(), items.data_ptr()]).view(torch.uint64)
    return values | {"work_info_set": items, "work_meta_data": addresses}


def _set(row, column, value):
    def edit(items):
        items[row, column] = value

    return edit


def _swap_items(items):
    items[[0, 1]] = items[[1, 0]]


MISUSES = {
    "page_size 2": (lambda v: v | {"page_size": 2}, "page_size"),
    "KV of two-token pages": (lambda v: v | {"KV": v["KV"].view(-1, 2, 1, 576)}, "page_size"),
    "3-D KV": (lambda v: v | {"KV": v["KV"].view(-1, 1, 576)}, "KV: 4-D"),
    "strided Q": (lambda v: v | {"Q": v["Q"].transpose(0, 1).contiguous().transpose(0, 1)}, "Q: 3-D, contiguous"),
    "no q_scale": (lambda v: v | {"q_scale": None}, "q_scale"),
    "no kv_scale": (lambda v: v | {"kv_scale": None}, "kv_scale"),
    "float64 scale": (lambda v: v | {"kv_scale": v["kv_scale"].double()}, "kv_scale: float32"),
    "bf16 Q over bf16 output buffer of another size": (lambda v: v | {"output": v["output"][:1]}, "output"),
    "float32 output": (lambda v: v | {"output": v["output"].float()}, "output: written as contiguous bf16"),
    "bf16 partials": (lambda v: v | {"splitData": v["splitData"].bfloat16()}, "splitData, splitLse: float32"),
    "few partials": (lambda v: v | {"splitData": v["splitData"][:2], "splitLse": v["splitLse"][:2]}, "partial row"),
    "swapped work lists": (
        lambda v: v | {"work_indptr": v["work_info_set"], "work_info_set": v["work_indptr"]},
        "swapped",
    ),
    "swapped addresses": (lambda v: v | {"work_meta_data": v["work_meta_data"][[1, 0]]}, "addresses"),
    "few indices": (lambda v: v | {"kv_page_indices": v["kv_page_indices"][:-1]}, "4608 tokens are read"),
    "int64 indices": (lambda v: v | {"kv_page_indices": v["kv_page_indices"].long()}, "kv_page_indices: int32"),
    "page outside": (lambda v: v | {"kv_page_indices": v["kv_page_indices"] + 8}, "outside the pool"),
    "gap": (lambda v: _items(v, _set(0, 4, 16)), "a gap or an overlap"),
    "overlap": (lambda v: _items(v, _set(2, 4, 144)), "a gap or an overlap"),
    "left out": (lambda v: _items(v, _set(-1, 0, 0)), "said to follow|queries"),
    "empty item": (lambda v: _items(v, _set(0, 5, 0)), "without tokens"),
    "tail of one": (lambda v: _items(v, _set(0, 4, 15)), "tail under 4"),
    "items out of order": (lambda v: _items(v, _swap_items), "out of order"),
    "row twice": (lambda v: _items(v, _set(1, 1, 0)), "written twice"),
    "wrong rest": (lambda v: _items(v, _set(0, 6, 5)), "said to follow"),
    "wrong query": (lambda v: _items(v, _set(0, 2, 1)), "queries"),
    "pool of 4 GiB": (
        lambda v: v | {"KV": torch.empty(7_456_541, 1, 1, 576, dtype=torch.float8_e4m3fn)},
        "over 4 GiB",
    ),
    "bf16 cache under fp8 Q": (lambda v: v | {"KV": v["KV"].bfloat16()}, "no kernel"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSES)
def test_model_refuses(aiter, long, name):
    # 271 tokens a CU: some have two items, of one tile each.
    model = aiter(num_cu=17)
    values = _good_call(model, long, "aiter_own_a8w8")
    call = torch.ops.aiter.mla_decode_stage1_asm_fwd
    call(**values)
    spoil, message = MISUSES[name]
    with pytest.raises(Misuse, match=message):
        call(**spoil(values))


METADATA_MISUSES = {
    "no dtypes": ({"dtype_q": None}, "dtype_q, dtype_kv"),
    "page_size 2": ({"page_size": 2}, "page_size"),
    "short": (
        {"seqlens_kv_indptr": torch.arange(4, dtype=torch.int32) * 195, "fast_mode": False, "intra_batch_mode": True},
        "divides by zero",
    ),
    "not from 0": ({"seqlens_kv_indptr": torch.arange(1, 5, dtype=torch.int32) * 520}, "begin with 0"),
}


@pytest.mark.parametrize("name", METADATA_MISUSES)
def test_model_refuses_metadata(aiter, small, name):
    model = aiter()
    call_of(small, "aiter_direct_a16w8")
    values = model.calls[0].values
    changes, message = METADATA_MISUSES[name]
    with pytest.raises(Misuse, match=message):
        torch.ops.aiter.get_mla_metadata_v1(**values | changes)
    swapped = {"work_indptr": values["work_info_set"], "work_info_set": values["work_indptr"]}
    with pytest.raises(Misuse, match="is it work_indptr"):
        torch.ops.aiter.get_mla_metadata_v1(**values | swapped)


def test_model_refuses_an_even_number_of_tiles(aiter, long):
    """Of fp8 Q only."""
    model = aiter(num_cu=17)
    call = call_of(long, "aiter_own_a16w8", tile=272)
    call(long)
    values = model.calls[0].values
    with pytest.raises(Misuse, match="an even number of 128-token tiles"):
        fp8_q = values["Q"].to(torch.float8_e4m3fn)
        torch.ops.aiter.mla_decode_stage1_asm_fwd(**values | {"Q": fp8_q, "q_scale": torch.ones(1)})


def test_model_refuses_more_splits_than_the_reduce_reads(aiter, small):
    model = aiter()
    call = call_of(small, "aiter_own_a16w8")
    call(small)
    values = model.calls[-1].values
    rows = values["reduce_partial_map"].numel()
    model.num_cu = 16
    with pytest.raises(Misuse, match="splits, and only 16 are read"):
        torch.ops.aiter.mla_reduce_v1(**values | {"reduce_indptr": torch.tensor([0, 0, 0, rows], dtype=torch.int32)})


def test_model_refuses_a_number_of_splits_in_the_reduce(aiter, small):
    model = aiter(version="head")
    call_of(small, "aiter_own_a16w8")(small)
    values = model.calls[-1].values
    assert values["num_kv_splits"] == 0
    with pytest.raises(Misuse, match="num_kv_splits"):
        torch.ops.aiter.mla_reduce_v1(**values | {"num_kv_splits": 8})
