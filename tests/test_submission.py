"""The submission's arguments, table and dispatch."""

import itertools
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import reference
import submission
import task
from reference import relative_error
from submission import ARMS, TABLE, Arm, Config, Target, choose_splits, select_config
from tests.inputs import ragged_input

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.fixture(autouse=True)
def fresh_module_state(monkeypatch):
    for name in ("_PLANS", "_SCRATCH"):
        monkeypatch.setattr(submission, name, {})
    submission._say_once.cache_clear()
    for name in ("MLA_BACKEND", "MLA_TUNE", "MLA_VERBOSE", "MLA_TUNE_SECONDS", "MLA_KV"):
        monkeypatch.delenv(name, raising=False)


def test_dimensions_are_the_tasks():
    assert (submission.H_Q, submission.D_QK, submission.D_V, submission.D_ROPE) == (
        task.NUM_HEADS, task.QK_HEAD_DIM, task.V_HEAD_DIM, task.QK_ROPE_HEAD_DIM,
    )  # fmt: skip


# ---- arms


@pytest.mark.parametrize("lengths, s_q", [([100, 0, 64, 65, 1], 1), ([130, 1, 2, 0], 3), ([128, 128], 1)])
def test_default_arm_on_a_cpu(lengths, s_q, capsys):
    data = ragged_input(lengths, s_q)
    output = submission.custom_kernel(data)
    assert submission.last_run().arm == "torch_chunked"
    assert relative_error(output, reference.oracle(data, "bf16")) < 3e-3
    assert capsys.readouterr().err == "mixed-mla: no GPU in use, so torch_chunked computes on the CPU\n"
    submission.custom_kernel(data)
    assert capsys.readouterr().err == "", "said once"


def test_bmm_arm(monkeypatch):
    monkeypatch.setenv("MLA_BACKEND", "torch_bmm")
    data = reference.generate_input(3, 1, 200, 5)
    output = submission.custom_kernel(data)
    assert submission.last_run().arm == "torch_bmm"
    assert relative_error(output, reference.oracle(data, "bf16")) < 3e-3


@pytest.mark.parametrize(
    "backend, lengths, s_q, reason",
    [
        ("torch_bmm", [100, 64], 1, "ragged"),
        ("torch_bmm", [64, 64], 2, "one query"),
        ("triton_fp8", [64], 1, "not on a GPU"),
        ("hopper_fp8", [64], 1, "for sm90, not for cpu"),
        ("gfx950_mxfp4", [64], 1, "for gfx950, not for cpu"),
    ],
)
def test_forced_arm_that_cannot_serve_is_refused(monkeypatch, backend, lengths, s_q, reason):
    monkeypatch.setenv("MLA_BACKEND", backend)
    with pytest.raises(RuntimeError, match=f"no arm can serve this call: {backend}: .*{reason}"):
        submission.custom_kernel(ragged_input(lengths, s_q))


@pytest.mark.parametrize("missing", ["triton", "aiter"])
def test_module_works_without(missing):
    """Without Triton (or AITER) the module imports and computes; the import adds little to torch's own."""
    code = f"""
import sys, time
sys.modules[{missing!r}] = None
import torch
from tests.inputs import ragged_input
start = time.perf_counter()
import submission
print(time.perf_counter() - start)
submission.custom_kernel(ragged_input([70, 3]))
print(submission.last_run().arm)
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MLA_", "TRITON_"))}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "torch_chunked"


# ---- buffers and state


@pytest.mark.parametrize("second", [([64, 30, 5],), ([64], 2), ([64, 31, 0, 7],), ([65, 30],)], ids=str)
def test_two_shapes_never_share_an_output_and_inputs_are_left_alone(second):
    first, second = ragged_input([64, 30]), ragged_input(*second)
    before = [x.clone() for x in (first[0], first[1]["bf16"], first[2], first[3])]
    one = submission.custom_kernel(first)
    kept = one.clone()
    other = submission.custom_kernel(second)
    assert one.data_ptr() != other.data_ptr()
    assert torch.equal(one, kept), "valid until the next call with the same shape"
    for x, was in zip((first[0], first[1]["bf16"], first[2], first[3]), before, strict=True):
        assert torch.equal(x, was)


def test_same_shape_with_other_data_is_computed_anew():
    first, second = ragged_input([64, 30], seed=1), ragged_input([30, 64], seed=2)
    submission.custom_kernel(first)
    output = submission.custom_kernel(second)
    assert relative_error(output, reference.oracle(second, "bf16")) < 3e-3


def test_two_devices_never_share_a_buffer():
    """Two GPUs are seen in tests/test_gpu.py; here a second device that holds no memory stands in."""
    here = submission.problem_of(ragged_input([64, 30]))
    elsewhere = here._replace(device=torch.device("meta"))
    for make in (submission._output, lambda problem: partials(problem)[0]):
        assert make(here).device.type == "cpu"
        assert make(elsewhere).device.type == "meta"
        assert make(here) is make(here)


def test_a_growing_cache_does_not_grow_the_state():
    for length in (10, 11, 12, 13):
        submission.custom_kernel(ragged_input([length, 5], kv_seq_len=64))
    assert len(submission._PLANS) == len(submission._SCRATCH) == 1


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_buffers_made_in_a_grad_mode_serve_outside_it(mode, monkeypatch):
    data = reference.generate_input(2, 1, 64, 3)
    for backend in ("torch_chunked", "torch_bmm"):
        monkeypatch.setenv("MLA_BACKEND", backend)
        with mode():
            inside = submission.custom_kernel(data).clone()
        assert torch.equal(submission.custom_kernel(data), inside)


def test_a_problem_holds_all_that_the_checks_and_the_choice_depend_on(monkeypatch):
    """A later call finds its configuration by its problem alone: what that leaves out goes unseen."""
    base = submission.problem_of(GOOD)

    def moved(x):
        """A tensor like `x`, one element past an aligned address."""
        return torch.empty(x.nbytes + x.itemsize, dtype=torch.uint8)[x.itemsize :].view(x.dtype).view_as(x)

    more = ragged_input([70, 71])[1]
    uniform, none = (
        {"bf16": x["bf16"][:n]} | {name: (x[name][0][:n], x[name][1]) for name in ("fp8", "mxfp4")}
        for x, n in ((more, 140), (KV, 0))
    )
    changed = {
        "sm_scale": edit(GOOD, config={"sm_scale": 0.5}),
        "kv_seq_len": edit(GOOD, config={"kv_seq_len": 80}),
        "num_heads": edit(GOOD, config={"num_heads": 8}),
        "type of a size": edit(GOOD, config={"q_seq_len": True}),
        "gradient": edit(GOOD, q=Q.clone().requires_grad_()),
        "alignment of q": edit(GOOD, q=moved(Q)),
        "alignment of fp8": edit(GOOD, kv_data={"fp8": (moved(KV["fp8"][0]), KV["fp8"][1])}),
        "alignment of mxfp4": edit(GOOD, kv_data={"mxfp4": (moved(KV["mxfp4"][0]), KV["mxfp4"][1])}),
        "alignment of its scales": edit(GOOD, kv_data={"mxfp4": (KV["mxfp4"][0], moved(KV["mxfp4"][1]))}),
        "strides of q": edit(GOOD, q=torch.empty(2, 16, 640, dtype=torch.bfloat16)[..., :576]),
        "strides of kv_indptr": edit(GOOD, kv_indptr=KVI.repeat_interleave(2)[::2]),
        "uniform": edit(GOOD, kv_data=uniform),
        "no token at all": edit(GOOD, kv_data=none),
        "more tokens than fit": edit(GOOD, kv_data=more),
        "rows that do not fit": edit(GOOD, kv_data={"fp8": (KV["fp8"][0][:-1], KV["fp8"][1])}),
        "rows of mxfp4 that do not fit": edit(GOOD, kv_data={"mxfp4": (KV["mxfp4"][0][:-1], KV["mxfp4"][1])}),
        "too few rows of its scales": edit(GOOD, kv_data={"mxfp4": (KV["mxfp4"][0], KV["mxfp4"][1][:133])}),
        "columns of its scales": edit(GOOD, kv_data={"mxfp4": (KV["mxfp4"][0], KV["mxfp4"][1][:, :20])}),
        "dtype of its scales": edit(GOOD, kv_data={"mxfp4": (KV["mxfp4"][0], KV["mxfp4"][1].view(torch.uint8))}),
        "heads": edit(GOOD, q=Q[:, :8]),
        "scales of fp8": edit(GOOD, kv_data={"fp8": (KV["fp8"][0], torch.ones(2))}),
        "dtype": edit(GOOD, kv_indptr=KVI.long()),
        "device": edit(GOOD, kv_indptr=KVI.to("meta")),
    }
    for name, data in changed.items():
        assert submission.problem_of(data) != base, name
    assert submission.problem_of(edit(GOOD, config={"extra": [1, 2]})) == base, "unknown entries do not count"
    monkeypatch.setenv("MLA_BACKEND", "torch_chunked")
    assert submission.problem_of(GOOD) != base


def test_an_empty_cache_is_neither_uniform_nor_aligned():
    empty, full = (submission.problem_of(ragged_input([length, length])) for length in (0, 64))
    assert full.uniform and full.aligned and full.packed
    assert not (empty.uniform or empty.aligned or empty.packed)


def test_another_sm_scale_is_another_call(monkeypatch):
    monkeypatch.setenv("MLA_BACKEND", "torch_bmm")
    data = reference.generate_input(2, 1, 64, 3)
    submission.custom_kernel(data)
    sharper = edit(data, config={"sm_scale": 0.2})
    assert relative_error(submission.custom_kernel(sharper), reference.oracle(sharper, "bf16")) < 3e-3


def test_another_default_dtype_changes_nothing():
    expected = submission.custom_kernel(GOOD).clone()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(submission.custom_kernel(GOOD), expected)
    finally:
        torch.set_default_dtype(torch.float32)


# ---- arguments


def edit(data, **changes):
    """The five arguments with some replaced; `config` and `kv_data` entries by key."""
    q, kv_data, qo_indptr, kv_indptr, config = data
    config = {**config, **changes.pop("config", {})}
    kv_data = {**kv_data, **changes.pop("kv_data", {})}
    named = {"q": q, "kv_data": kv_data, "qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "config": config, **changes}
    return tuple(named.values())


def without(mapping, key):
    return {k: v for k, v in mapping.items() if k != key}


GOOD = ragged_input([70, 64])
Q, KV, QO, KVI, CONFIG = GOOD
INT32 = torch.int32
BAD_ARGUMENTS = {
    "not a tuple": (None, TypeError, "data: expected the tuple .* got NoneType"),
    "four items": (GOOD[:4], TypeError, "got tuple of 4"),
    "q is a list": (edit(GOOD, q=[1]), TypeError, "q: expected a torch.Tensor, got list"),
    "q rank": (edit(GOOD, q=Q[0]), ValueError, r"q: expected shape \(2, 16, 576\) .* got \(16, 576\)"),
    "q dtype": (edit(GOOD, q=Q.half()), TypeError, "q: expected dtype torch.bfloat16, got torch.float16"),
    "q heads": (edit(GOOD, q=Q[:, :8]), ValueError, r"q: expected shape \(2, 16, 576\) .* got \(2, 8, 576\)"),
    "q head dim": (edit(GOOD, q=Q[..., :512]), ValueError, r"q: expected shape .* got \(2, 16, 512\)"),
    "q rows": (edit(GOOD, q=Q[:1]), ValueError, r"q: expected shape .* got \(1, 16, 576\)"),
    "q not unit stride": (edit(GOOD, q=Q.mT.contiguous().mT), ValueError, "q: expected a last dimension of stride 1"),
    "q wants a gradient": (edit(GOOD, q=Q.clone().requires_grad_()), ValueError, "q: expected no gradient"),
    "q on the meta device": (edit(GOOD, q=Q.to("meta")), ValueError, "q: expected a tensor that holds values"),
    "q sparse": (edit(GOOD, q=Q.to_sparse()), ValueError, "q: expected a dense tensor, got torch.sparse_coo"),
    "q nested": (edit(GOOD, q=torch.nested.nested_tensor([*Q])), ValueError, "expected a dense tensor, got a nested"),
    "q without a dimension": (edit(GOOD, q=Q[0, 0, 0]), ValueError, r"q: expected shape .* got \(\)"),
    "kv_data is a list": (edit(GOOD) [:1] + ([],) + GOOD[2:], TypeError, "kv_data: expected a dict, got list"),
    "no fp8": ((Q, without(KV, "fp8"), QO, KVI, CONFIG), KeyError, r"kv_data\['fp8'\]: expected the key to be there"),
    "no bf16": ((Q, without(KV, "bf16"), QO, KVI, CONFIG), KeyError, r"kv_data\['bf16'\]"),
    "bf16 dtype": (edit(GOOD, kv_data={"bf16": KV["bf16"].float()}), TypeError, r"kv_data\['bf16'\]: expected dtype"),
    "bf16 rank": (edit(GOOD, kv_data={"bf16": KV["bf16"][:, 0]}), ValueError, r"kv_data\['bf16'\]: expected shape"),
    "fp8 not a pair": (
        edit(GOOD, kv_data={"fp8": KV["fp8"][0]}),
        TypeError,
        r"kv_data\['fp8'\]: expected the tuple \(values, scales\), got Tensor",
    ),
    "bf16 without a dimension": (
        edit(GOOD, kv_data={"bf16": KV["bf16"][0, 0, 0]}),
        ValueError,
        r"kv_data\['bf16'\]: expected shape .* got \(\)",
    ),
    "fp8 scale wants a gradient": (
        edit(GOOD, kv_data={"fp8": (KV["fp8"][0], torch.ones(1, requires_grad=True))}),
        ValueError,
        r"kv_data\['fp8'\]\[1\]: expected no gradient",
    ),
    "fp8 scale is a float": (
        edit(GOOD, kv_data={"fp8": (KV["fp8"][0], 1.0)}),
        TypeError,
        r"kv_data\['fp8'\]\[1\]: expected a torch.Tensor, got float",
    ),
    "fp8 rows": (
        edit(GOOD, kv_data={"fp8": (KV["fp8"][0][:-1], KV["fp8"][1])}),
        ValueError,
        r"kv_data\['fp8'\]\[0\]: expected shape \(134, 1, 576\) .* got \(133, 1, 576\)",
    ),
    "fp8 scale of two": (
        edit(GOOD, kv_data={"fp8": (KV["fp8"][0], torch.ones(2))}),
        ValueError,
        r"kv_data\['fp8'\]\[1\]: expected shape \(1,\) .* got \(2,\)",
    ),
    "mxfp4 width": (
        edit(GOOD, kv_data={"mxfp4": (KV["mxfp4"][0].view(torch.uint8)[..., :100], KV["mxfp4"][1])}),
        ValueError,
        r"kv_data\['mxfp4'\]\[0\]: expected shape \(134, 1, 288\)",
    ),
    "mxfp4 scale columns": (
        edit(GOOD, kv_data={"mxfp4": (KV["mxfp4"][0], KV["mxfp4"][1][:, :17])}),
        ValueError,
        r"kv_data\['mxfp4'\]\[1\]: expected shape of at least \(134, 18\) .* got \(256, 17\)",
    ),
    "mxfp4 not unit stride": (
        edit(GOOD, kv_data={"mxfp4": (KV["mxfp4"][0].view(torch.uint8).repeat(1, 1, 2)[..., ::2], KV["mxfp4"][1])}),
        ValueError,
        r"kv_data\['mxfp4'\]\[0\]: expected a last dimension of stride 1",
    ),
    "other device": (edit(GOOD, kv_indptr=KVI.to("meta")), ValueError, r"kv_indptr: expected device cpu .* got meta"),
    "indptr dtype": (edit(GOOD, kv_indptr=KVI.long()), TypeError, "kv_indptr: expected dtype torch.int32"),
    "indptr size": (edit(GOOD, kv_indptr=KVI[:2]), ValueError, r"kv_indptr: expected shape \(3,\) from config"),
    "indptr falls": (
        edit(GOOD, kv_indptr=torch.tensor([0, 140, 134], dtype=INT32), config={"kv_seq_len": 200}),
        ValueError,
        "kv_indptr: expected steps of 0 to 200, got -6 at 1",
    ),
    "indptr does not start at 0": (
        edit(GOOD, kv_indptr=torch.tensor([1, 70, 134], dtype=INT32)),
        ValueError,
        "kv_indptr: expected to go from 0 to 134, got 1 to 134",
    ),
    "indptr beyond the cache": (
        edit(GOOD, kv_indptr=torch.tensor([0, 70, 135], dtype=INT32)),
        ValueError,
        "kv_indptr: expected to go from 0 to 134, got 0 to 135",
    ),
    "sequence longer than kv_seq_len": (
        edit(GOOD, config={"kv_seq_len": 69}),
        ValueError,
        "kv_indptr: expected steps of 0 to 69, got 70 at 0",
    ),
    "kv_seq_len below the mean": (edit(GOOD, config={"kv_seq_len": 60}), ValueError, r"config\['kv_seq_len'\]: exp"),
    "queries not uniform": (
        edit(GOOD, qo_indptr=torch.tensor([0, 0, 2], dtype=INT32)),
        ValueError,
        "qo_indptr: expected steps of 1 to 1, got 0 at 0",
    ),
    "config is an array": ((*GOOD[:4], np.ones(3)), TypeError, "config: expected a dict, got ndarray"),
    "config lacks sm_scale": ((*GOOD[:4], without(CONFIG, "sm_scale")), KeyError, r"config\['sm_scale'\]"),
    "config batch_size": (edit(GOOD, config={"batch_size": 3}), ValueError, "q: expected shape"),
    "config batch_size 0": (edit(GOOD, config={"batch_size": 0}), ValueError, "in range.1, .*, got 0"),
    "config q_seq_len is a bool": (edit(GOOD, config={"q_seq_len": True}), ValueError, "in range.1, .*, got True"),
    "config kv_seq_len is a float": (edit(GOOD, config={"kv_seq_len": 70.0}), ValueError, "in range.0, .*, got 70.0"),
    "config batch_size is a list": (edit(GOOD, config={"batch_size": [2]}), ValueError, r"in range.1, .*, got \[2\]"),
    "config num_heads": (edit(GOOD, config={"num_heads": 8}), ValueError, r"\['num_heads'\]: .* in \[16\], got 8"),
    "config num_heads is a tensor": (edit(GOOD, config={"num_heads": torch.ones(2)}), ValueError, "16.*, got tensor"),
    "config num_heads is an array": (edit(GOOD, config={"num_heads": np.ones(2)}), ValueError, r"\[16\], got array"),
    "config num_heads is a float": (edit(GOOD, config={"num_heads": 16.0}), ValueError, r"\[16\], got 16.0"),
    "config num_kv_heads is a bool": (edit(GOOD, config={"num_kv_heads": True}), ValueError, r"\[1\], got True"),
    "config v_head_dim": (edit(GOOD, config={"v_head_dim": 576}), ValueError, r"\['v_head_dim'\]: .* in \[512\]"),
    "config sm_scale": (edit(GOOD, config={"sm_scale": float("nan")}), ValueError, r"config\['sm_scale'\]: expected a"),
}  # fmt: skip


@pytest.mark.parametrize("scale", [KV["fp8"][1].view(()), torch.ones(5)[::5]], ids=["0-d", "strided"])
def test_one_scale_of_any_form_is_taken(scale):
    submission.custom_kernel(edit(GOOD, kv_data={"fp8": (KV["fp8"][0], scale)}))


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_argument_is_named(name):
    data, error, message = BAD_ARGUMENTS[name]
    with pytest.raises(error, match=message):
        submission.custom_kernel(data)


def test_bad_values_are_seen_after_a_good_call_of_the_shape():
    submission.custom_kernel(GOOD)
    with pytest.raises(ValueError, match="kv_indptr: expected to go from 0"):
        submission.custom_kernel(edit(GOOD, kv_indptr=torch.tensor([0, 70, 133], dtype=INT32)))


@pytest.mark.parametrize(
    "name, value",
    [
        ("MLA_TUNE", "maybe"),
        ("MLA_VERBOSE", "yes"),
        ("MLA_KV", "int4"),
        ("MLA_BACKEND", "cuda_graphs"),
        ("MLA_TUNE_SECONDS", "abc"),
        ("MLA_TUNE_SECONDS", "-1"),
        ("MLA_TUNE_SECONDS", "nan"),
    ],
)
def test_bad_setting_is_named(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}: expected .* got '{value}'"):
        submission.custom_kernel(GOOD)


# ---- table


TARGETS = [Target("cpu"), Target("sm90", 132), Target("gfx950", 256), Target("gpu", 108)]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("batch_size", [1, 4, 7, 256, 1000])
@pytest.mark.parametrize("kv_seq_len", [0, 1, 1024, 8192, 100_000])
def test_every_shape_has_candidates_that_end_with_one_for_anything(target, batch_size, kv_seq_len):
    configs = select_config(batch_size, kv_seq_len, target)
    assert configs[-1].arm == "torch_chunked"
    assert len(configs) <= submission.MAX_CANDIDATES
    assert all(config.arm in ARMS for config in configs)
    assert all(1 <= config.splits <= submission.MAX_SPLITS for config in configs)


def test_unknown_target_is_named():
    with pytest.raises(ValueError, match="target: expected one of .*'sm90'.* got 'tpu'"):
        select_config(4, 1024, Target("tpu"))


def test_measured_rows_come_before_the_rows_for_any_shape():
    seen_any = set()
    for row in TABLE:
        target, batch_size, *_ = row
        if batch_size is None:
            seen_any.add(target)
        else:
            assert target not in seen_any, f"{row} is never reached"


def test_worked_example_of_choose_splits():
    assert choose_splits(32, 8192, 64, num_cu=132, programs_per_cu=2) == 8


def test_splits_never_exceed_the_tiles_and_fill_a_small_batch():
    for tiles in range(1, 40):
        assert choose_splits(1, tiles * 64, 64, 132, 2) <= min(tiles, submission.MAX_SPLITS)
    assert choose_splits(4, 8192, 64, 132, 2) == submission.MAX_SPLITS
    assert choose_splits(256, 8192, 64, 132, 2) == 1


# ---- dispatch


def right(data, problem, config):
    out = submission._output(problem)
    return out.copy_(submission._attend_float32(data, "bf16"))


def partials(problem):
    shape = (problem.total_q, 2, 16)
    part = submission._buffer("part", (*shape, 512), torch.float16, problem.device)
    return part, submission._buffer("lse", shape, torch.float32, problem.device)


def wrong_gain(data, problem, config):
    return right(data, problem, config).mul_(1.05)


def every_second_token(data, problem, config):
    q, kv_data, qo_indptr, kv_indptr, sizes = data
    halves = {"bf16": kv_data["bf16"][::2]}
    return right((q, halves, qo_indptr, kv_indptr // 2, sizes), problem, config)


class NanEveryTenth:
    def __init__(self):
        self.runs = 0

    def __call__(self, data, problem, config):
        self.runs += 1
        output = right(data, problem, config)
        return output.fill_(float("nan")) if self.runs % 10 == 0 else output


def raises(data, problem, config):
    raise RuntimeError("illegal\n    instruction")


def slow(data, problem, config):
    time.sleep(0.02)
    return right(data, problem, config)


def wrong_dtype(data, problem, config):
    return right(data, problem, config).float()


@pytest.fixture
def plant(monkeypatch):
    """Arms by name, tried in the order given, for data on a CPU."""

    def planted(**runs):
        monkeypatch.setattr(
            submission, "ARMS", {name: Arm("bf16", lambda problem: None, f) for name, f in runs.items()}
        )
        row = ("cpu", None, None, tuple(Config(name, splits=1) for name in runs))
        monkeypatch.setattr(submission, "TABLE", (row,))

    return planted


def test_a_timed_call_starts_behind_a_flush_that_outlasts_its_launch(monkeypatch):
    """One GiB took less time than a slow host needed for two launches, and the slower arm won (H200)."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return 0.012

    monkeypatch.setattr(torch.cuda, "Event", Event)
    flush = SimpleNamespace(nbytes=1 << 30, zero_=lambda: log.append("flush"))
    assert submission._timed(lambda: log.append("call"), flush) == (None, 12.0)
    assert log == ["flush"] * 8 + ["event", "call", "event", "wait"]


@pytest.mark.parametrize("tune, arms, flushes", [("1", 2, True), ("0", 2, False), ("1", 1, False)])
def test_a_flush_is_made_and_a_time_said_only_where_times_decide(plant, monkeypatch, capsys, tune, arms, flushes):
    plant(**{f"arm{i}": right for i in range(arms)}, resort=right)
    submission.ARMS["resort"] = replace(submission.ARMS["resort"], last_resort=True)
    monkeypatch.setenv("MLA_TUNE", tune)
    monkeypatch.setenv("MLA_VERBOSE", "1")
    monkeypatch.setattr(submission, "_target", lambda device: Target("cpu"))
    monkeypatch.setattr(submission, "_attend_float32", lambda data, kv: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 0))
    monkeypatch.setattr(torch, "empty", lambda size, **_: size)
    given = []
    monkeypatch.setattr(submission, "_prove", lambda *call: given.append(call[-2]) or (0.0, 1.0))
    problem = submission.problem_of(GOOD)._replace(device=SimpleNamespace(type="cuda"))
    submission._first_call(GOOD, problem)
    assert given == [1 << 30 if flushes else None] * (1 if tune == "0" else arms)
    assert ("1.0 us" in capsys.readouterr().err) == flushes


def test_only_the_right_and_fast_arm_wins(plant, capsys):
    plant(gain=wrong_gain, halved=every_second_token, nan=NanEveryTenth(), raises=raises, slow=slow, fast=right)
    data = reference.generate_input(2, 1, 64, 3)
    output = submission.custom_kernel(data)
    assert submission.last_run().arm == "fast"
    assert relative_error(output, reference.oracle(data, "bf16")) < 3e-3
    lines = capsys.readouterr().err.splitlines()
    dropped = {line.split("dropped ")[1].split()[0]: line for line in lines if "dropped" in line}
    assert set(dropped) == {"gain", "halved", "nan", "raises"}
    assert "error: expected at most 1e-02, got 5.0e-02" in dropped["gain"]
    assert "differs from the first" in dropped["nan"]
    assert dropped["raises"].endswith(": illegal instruction"), "one line, whatever was raised"


def test_an_arm_cannot_live_on_what_another_left_behind(plant, capsys):
    def through_partials(data, problem, config):
        output = slow(data, problem, config)
        part, lse = partials(problem)
        part.copy_(output[:, None])
        lse.zero_()
        return output

    def combines_only(data, problem, config):
        part, lse = partials(problem)
        return submission._output(problem).copy_((part * lse.softmax(1)[..., None]).sum(1))

    writes = itertools.cycle([True, False])
    plant(
        slow=through_partials,
        idle=lambda data, problem, config: submission._output(problem),
        combine=combines_only,
        idle_now_and_then=lambda *call: (right if next(writes) else submission.ARMS["idle"].run)(*call),
    )
    submission.custom_kernel(reference.generate_input(2, 1, 64, 3))
    assert submission.last_run().arm == "slow"
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[3] for line in lines if "dropped" in line] == ["idle", "combine", "idle_now_and_then"]


def test_nothing_right_is_an_error_with_every_reason(plant):
    plant(gain=wrong_gain, raises=raises, dtype=wrong_dtype)
    with pytest.raises(RuntimeError, match=r"no arm is right for 2x64: gain \(.*raises \(.*illegal.*dtype \(.*float32"):
        submission.custom_kernel(reference.generate_input(2, 1, 64, 3))


def test_fallback_names_the_arms_before_it(monkeypatch, capsys):
    row = ("cpu", None, None, (Config("triton_fp8"), Config("torch_chunked", splits=1), Config("hopper_fp8")))
    monkeypatch.setattr(submission, "TABLE", (row,))
    submission.custom_kernel(GOOD)
    reason = "triton_fp8: the inputs are on cpu, not on a GPU"
    assert capsys.readouterr().err == f"mixed-mla: fell back to torch_chunked ({reason})\n"


def test_a_row_without_an_arm_for_the_call_is_an_error_with_every_reason(monkeypatch):
    row = ("cpu", None, None, (Config("triton_fp8"), Config("torch_bmm", splits=1)))
    monkeypatch.setattr(submission, "TABLE", (row,))
    with pytest.raises(RuntimeError, match="no arm can serve .*: triton_fp8: .* GPU; torch_bmm: .* ragged batch"):
        submission.custom_kernel(GOOD)


def test_gain_of_two_percent_is_caught_even_where_the_error_would_pass(plant):
    plant(gain=lambda data, problem, config: right(data, problem, config).mul_(1.02))
    submission.ARMS["gain"] = replace(submission.ARMS["gain"], max_error=0.05)
    with pytest.raises(RuntimeError, match="gain: expected .* got 1.02"):
        submission.custom_kernel(reference.generate_input(2, 1, 64, 3))


def test_noise_is_caught_where_no_row_or_gain_is_far_off(plant):
    def noisy(data, problem, config):
        output = right(data, problem, config)
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        return output.add_(noise * output.norm(dim=2, keepdim=True) / 512**0.5 * 0.015)

    plant(noisy=noisy)
    with pytest.raises(RuntimeError, match="noisy .*: error: expected at most 1e-02, got 1.5e-02"):
        submission.custom_kernel(reference.generate_input(2, 1, 64, 3))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_element_that_is_not_finite_is_caught(plant, value):
    def one_element(data, problem, config):
        output = right(data, problem, config)
        output[1, 7, 3] = value
        return output

    plant(only=one_element)
    with pytest.raises(RuntimeError, match="expected NaN and infinity where they belong, got 1 elements otherwise"):
        submission.custom_kernel(reference.generate_input(2, 1, 64, 3))


def test_nan_that_belongs_there_is_right(plant):
    data = reference.generate_input(2, 1, 64, 3)
    data[1]["bf16"][70] = float("nan")
    plant(only=right)
    output = submission.custom_kernel(data)
    assert output[0].isfinite().all() and output[1].isnan().all()


def test_one_wrong_row_is_caught(plant):
    def one_row(data, problem, config):
        output = right(data, problem, config)
        output[1, 7] = output[0, 7]
        return output

    plant(row=one_row)
    submission.ARMS["row"] = replace(submission.ARMS["row"], max_error=0.3)
    with pytest.raises(RuntimeError, match=r"row: expected at most 9e-01, got more at \[query, head\] \[\[1, 7\]\]"):
        submission.custom_kernel(reference.generate_input(16, 1, 64, 3))


def test_within_the_margin_the_earlier_arm_stays(plant, monkeypatch):
    for times, winner in (([100.0, 98.5], "first"), ([100.0, 97.5], "second")):
        monkeypatch.setattr(submission, "_PLANS", {})
        measured = iter(times)
        monkeypatch.setattr(submission, "_prove", lambda *_, it=measured: (0.0, next(it)))
        plant(first=right, second=right)
        submission.custom_kernel(reference.generate_input(2, 1, 64, 3))
        assert submission.last_run().arm == winner, times


def test_the_median_of_the_runs_counts(plant, monkeypatch):
    plant(only=right)
    data = reference.generate_input(2, 1, 64, 3)
    problem, config = submission.problem_of(data), Config("only", splits=1)
    times = iter([1.0, 2.0, *[50.0] * (submission.TUNE_RUNS - 2)])
    monkeypatch.setattr(submission, "_timed", lambda call, flush: (call(), next(times)))
    expected = submission._attend_float32(data, "bf16")
    assert submission._prove(data, problem, config, expected, None, submission.TUNE_RUNS)[1] == 50.0


def test_untuned_takes_the_first_right_arm(plant, monkeypatch, capsys):
    monkeypatch.setenv("MLA_TUNE", "0")
    plant(gain=wrong_gain, slow=slow, fast=right)
    submission.custom_kernel(reference.generate_input(2, 1, 64, 3))
    assert submission.last_run().arm == "slow"
    assert "dropped gain" in capsys.readouterr().err


def test_verbose_prints_arms_errors_and_times(plant, monkeypatch, capsys):
    plant(slow=slow, fast=right)
    submission.custom_kernel(reference.generate_input(2, 1, 65, 3))
    assert "2x65" not in capsys.readouterr().err
    monkeypatch.setenv("MLA_VERBOSE", "1")
    submission.custom_kernel(reference.generate_input(2, 1, 64, 3))
    err = capsys.readouterr().err
    assert "2x64: slow" in err and "2x64: fast" in err and "2x64: chose fast" in err and " us" in err


def test_a_first_call_out_of_time_leaves_the_rest_out(plant, monkeypatch, capsys):
    monkeypatch.setenv("MLA_TUNE_SECONDS", "0.01")
    plant(slow=slow, fast=right)
    submission.custom_kernel(reference.generate_input(2, 1, 64, 3))
    assert submission.last_run().arm == "slow"
    assert "fast (splits=1) not tried" in capsys.readouterr().err


def test_past_the_limit_the_search_for_a_right_arm_goes_on(plant, monkeypatch):
    monkeypatch.setenv("MLA_TUNE_SECONDS", "0.000001")
    plant(raises=raises, wrong=wrong_gain, fast=right)
    submission.custom_kernel(reference.generate_input(2, 1, 64, 3))
    assert submission.last_run().arm == "fast"


def test_no_more_than_the_first_candidates_are_tried(plant, monkeypatch, capsys):
    monkeypatch.setenv("MLA_VERBOSE", "1")
    plant(**{f"arm{i}": right for i in range(submission.MAX_CANDIDATES + 2)})
    submission.custom_kernel(reference.generate_input(2, 1, 64, 3))
    assert capsys.readouterr().err.count("(splits=1): error") == submission.MAX_CANDIDATES


def test_threads_settle_a_shape_once(plant):
    runs = []

    def counted(data, problem, config):
        runs.append(threading.get_ident())
        time.sleep(0.005)
        return right(data, problem, config)

    plant(counted=counted)
    data = reference.generate_input(2, 1, 64, 3)
    threads = [threading.Thread(target=submission.custom_kernel, args=(data,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    proof_runs = 2
    assert len(runs) == proof_runs + len(threads)


def test_a_last_resort_is_not_tried_beside_a_right_arm(plant):
    runs = []
    plant(slow=slow, resort=lambda data, problem, config: runs.append(1) or right(data, problem, config))
    submission.ARMS["resort"] = replace(submission.ARMS["resort"], last_resort=True)
    submission.custom_kernel(reference.generate_input(2, 1, 64, 3))
    assert submission.last_run().arm == "slow" and not runs


def test_steady_state_runs_the_arm_once(plant):
    runs = []
    plant(counted=lambda data, problem, config: runs.append(1) or right(data, problem, config))
    data = reference.generate_input(2, 1, 64, 3)
    submission.custom_kernel(data)
    runs.clear()
    submission.custom_kernel(data)
    assert len(runs) == 1


# ---- the mxfp4 cache


def test_cache_is_dequantised_as_by_the_reference():
    data = ragged_input([200, 0, 65], s_q=2)
    assert relative_error(submission._attend_float32(data, "mxfp4"), reference.oracle(data, "mxfp4")) < 1e-6
    # Every E2M1 code in every position, under every scale; 255 is NaN.
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 2)[:, None, :288]
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 18)
    rows = submission._dequantize({"mxfp4": (packed, scales)}, "mxfp4", 0, 256)
    assert torch.equal(rows[:255], reference.dequantize_mxfp4(packed[:255, 0], scales[:255]))
    assert rows[255].isnan().all()


def test_asked_for_mxfp4_is_read_on_a_cpu_too(monkeypatch, capsys):
    monkeypatch.setenv("MLA_KV", "mxfp4")
    data = ragged_input([100, 0, 65])
    output = submission.custom_kernel(data)
    assert (submission.last_run().arm, submission.last_run().kv) == ("torch_chunked_mxfp4", "mxfp4")
    assert relative_error(output, reference.oracle(data, "mxfp4")) < 3e-3
    assert "fell back to torch_chunked_mxfp4 (triton_mxfp4: the inputs are on cpu" in capsys.readouterr().err
    monkeypatch.setenv("MLA_KV", "fp8")
    submission.custom_kernel(data)
    assert submission.last_run().kv == "bf16", "what was chosen for the other cache is not reused"


def test_unknown_cache_is_named(monkeypatch):
    monkeypatch.setenv("MLA_KV", "int4")
    with pytest.raises(ValueError, match="MLA_KV: expected one of auto, fp8, mxfp4, got 'int4'"):
        submission.custom_kernel(GOOD)


@pytest.mark.parametrize("arm, kv", [("torch_chunked_mxfp4", "fp8"), ("torch_chunked", "mxfp4")])
def test_forced_arm_that_reads_another_cache_is_refused(monkeypatch, arm, kv):
    monkeypatch.setenv("MLA_BACKEND", arm)
    monkeypatch.setenv("MLA_KV", kv)
    with pytest.raises(ValueError, match=f"MLA_BACKEND: expected an arm for MLA_KV={kv}, got {arm}, which reads"):
        submission.custom_kernel(GOOD)


@pytest.mark.parametrize("arm, num_warps", [("gfx950_fp8", 4), ("gfx950_mxfp4", 4), ("triton_mxfp4", 8)])
def test_forced_arm_takes_its_configuration_from_the_table(monkeypatch, arm, num_warps):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(submission, "_target", lambda device: Target("gfx950", 256))
    (config,) = submission._candidates(submission.problem_of(GOOD), arm, "auto")
    assert (config.arm, config.num_warps) == (arm, num_warps)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_candidates_by_cache(target):
    for kv_seq_len in (1024, 8192):
        for kv in ("fp8", "auto"):
            for batch_size in (4, 32):
                read = {ARMS[config.arm].kv for config in select_config(batch_size, kv_seq_len, target, kv=kv)}
                assert "mxfp4" not in read or (kv, batch_size, kv_seq_len) == ("auto", 32, 8192)
        for batch_size in (4, 40):
            configs = select_config(batch_size, kv_seq_len, target, kv="mxfp4")
            assert {ARMS[config.arm].kv for config in configs} == {"mxfp4"}
            assert len(set(configs)) == len(configs)


@pytest.mark.parametrize("batch_size", [32, 64, 256, 40])
def test_mi355x_tries_mxfp4_for_many_long_sequences(batch_size):
    """Among the candidates of a first call, fp8 before it, and the portable and the last resort kept."""
    arms = [config.arm for config in select_config(batch_size, 8192, Target("gfx950", 256))]
    assert len(arms) <= submission.MAX_CANDIDATES
    assert arms[:2] == ["gfx950_fp8", "gfx950_mxfp4"] and arms[-2:] == ["triton_fp8", "torch_chunked"]
    assert any(arm.startswith("aiter") for arm in arms)


def test_layouts_that_the_kernels_cannot_read_are_told():
    def wide(x, width):
        """`x` in rows `width` elements apart."""
        return torch.empty(*x.shape[:-1], width * x.itemsize, dtype=torch.uint8).view(x.dtype)[..., : x.shape[-1]]

    fp8, scale = KV["fp8"]
    shifted = torch.empty(KV["bf16"].numel() + 1, dtype=torch.bfloat16)[1:].view_as(KV["bf16"])
    for name, given, contiguous, aligned in (
        ("as they come", {}, True, True),
        ("q", {"q": wide(Q, 640)}, False, True),
        ("q, heads between 16 bytes", {"q": wide(Q, 580)}, False, False),
        ("bf16", {"kv_data": {"bf16": wide(KV["bf16"], 640)}}, False, True),
        ("bf16, one element off", {"kv_data": {"bf16": shifted}}, False, True),
        ("fp8", {"kv_data": {"fp8": (wide(fp8, 640), scale)}}, False, True),
        ("fp8, rows between 16 bytes", {"kv_data": {"fp8": (wide(fp8, 584), scale)}}, False, False),
    ):
        problem = submission.problem_of(edit(GOOD, **given))
        assert (problem.contiguous, problem.aligned) == (contiguous, aligned), name


def test_packed_rows_are_told_from_other_layouts():
    values, scales = GOOD[1]["mxfp4"]
    scales = scales.view(torch.uint8)

    def packed(values, scales):
        return submission.problem_of(edit(GOOD, kv_data={"mxfp4": (values, scales)})).packed

    assert packed(values, scales) and packed(values, scales[1:, :20])
    assert not packed(values, scales[:, :18])
    assert not packed(values, scales[:, :22])
    assert not packed(values, torch.empty(256, 25, dtype=torch.uint8)[:, :24])
    assert not packed(values, scales.flatten()[1:-23].view(-1, 24))
    assert not packed(torch.empty(134, 1, 296, dtype=torch.uint8)[..., :288], scales)


@pytest.fixture
def plant_mxfp4(plant, monkeypatch):
    """A fast arm over the mxfp4 cache before a slow one over bf16, on offer from 64 tokens a sequence on."""
    plant(packed=lambda data, problem, config: submission._run_torch_chunked(data, problem, config), slow=slow)
    submission.ARMS["packed"] = replace(submission.ARMS["packed"], kv="mxfp4")
    monkeypatch.setattr(submission, "MXFP4_MIN_KV_LEN", 64)
    monkeypatch.setattr(submission, "MXFP4_MIN_BATCH", 2)


def finer(data):
    """The case with a bf16 cache that the mxfp4 one holds exactly."""
    q, kv_data, qo_indptr, kv_indptr, config = data
    bf16 = submission._dequantize(kv_data, "mxfp4", 0, kv_data["bf16"].shape[0]).bfloat16()[:, None]
    return q, {**kv_data, "bf16": bf16}, qo_indptr, kv_indptr, config


def test_mxfp4_wins_unasked_only_within_tolerance(plant_mxfp4, monkeypatch, capsys):
    data = reference.generate_input(2, 1, 64, 3)
    submission.custom_kernel(data)
    assert submission.last_run().arm == "slow"
    assert "dropped packed (splits=1): its cache keeps" in capsys.readouterr().err
    monkeypatch.setattr(submission, "_PLANS", {})
    submission.custom_kernel(finer(data))
    assert submission.last_run().arm == "packed"


@pytest.mark.parametrize("name, value", [("MLA_KV", "mxfp4"), ("MLA_BACKEND", "packed")])
def test_mxfp4_asked_for_need_not_be_within_tolerance(plant_mxfp4, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(submission, "_MXFP4", ())
    submission.custom_kernel(reference.generate_input(2, 1, 64, 3))
    assert submission.last_run().arm == "packed"


@pytest.mark.parametrize("lengths, kv_seq_len", [([64, 63], 64), ([63, 63], 63), ([64], 64)])
def test_mxfp4_is_not_on_offer_for_shorter_sequences_or_a_small_batch(plant_mxfp4, lengths, kv_seq_len):
    submission.custom_kernel(finer(ragged_input(lengths, kv_seq_len=kv_seq_len)))
    assert submission.last_run().arm == "slow"
