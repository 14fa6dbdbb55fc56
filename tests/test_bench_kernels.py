"""The reader reads every byte once and the grouped peer is exact: in the interpreter, and compiled for real targets."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import reference
from bench import grouped, peers
from bench.reader import CONFIGS, Reader, _read, cache_tensors
from tests.eval_stand_ins import ROOT

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx950": GPUTarget("hip", "gfx950", 64)}

INTERPRETED = """
import json, sys, torch
from bench import grouped, peers
from bench.reader import CONFIGS, Reader
import reference

class Timer:
    on_gpu = False

found = {"reader": [], "grouped": {}}
for config in CONFIGS:
    for sizes in ([1], [4 * 4096 + 1], [40_000, 5]):
        g = torch.Generator().manual_seed(len(sizes))
        tensors = [torch.randint(1, 99, (n,), dtype=torch.int32, generator=g) for n in sizes]
        reader = Reader(tuple(tensors), Timer())
        reader.config = config
        reader._sums.fill_(-1)
        found["reader"].append(reader.launch().sum().item() - sum(t.sum().item() for t in tensors))

q, kv_data, qo_indptr, _, config = reference.generate_input(4, 1, 75, 7)
config["kv_seq_len"] = 170
kv_indptr = torch.tensor([0, 97, 97, 130, 300], dtype=torch.int32, device=q.device)
data = (q, kv_data, qo_indptr, kv_indptr, config)
grouped.GroupedDecode.dot_type = grouped.tl.float32  # the interpreter's tl.dot takes bf16 for integers
for kv in ("bf16", "fp8"):
    call = grouped.GroupedDecode(data, kv, splits=4)
    call._part.fill_(float("nan"))
    call._lse.fill_(float("nan"))
    found["grouped"][kv] = reference.relative_error(call(), reference.oracle(data, kv))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def interpreted():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_reader_kernel_sums_every_value_once(interpreted):
    assert interpreted["reader"] == [0] * (3 * len(CONFIGS))


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_grouped_decode_is_exact_on_ragged_lengths(interpreted, kv):
    assert interpreted["grouped"][kv] < 4e-3


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_reader_compiles_to_16_byte_loads(config, target):
    types = ["*i32"] * 3 + ["i32"] * 3 + ["constexpr"] * 2
    signature = dict(zip(_read.arg_names, types, strict=True))
    constants = {"BLOCK": config.block, "PASSES": config.passes}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(5)}
    kernel = triton.compile(
        ASTSource(_read, signature, constants, aligned),
        target=TARGETS[target],
        options={"num_warps": config.num_warps},
    )
    wide, narrow = {
        "sm_90": (r"ld\.global\.v4\.b32", r"ld\.global\.(b8|b16|b32|v2)"),
        "gfx950": (r"(global|buffer)_load_dwordx4", r"(global|buffer)_load_(dword|dwordx2|ubyte|ushort)\b"),
    }[target]
    text = kernel.asm["ptx" if target == "sm_90" else "amdgcn"]
    threads = config.num_warps * TARGETS[target].warp_size
    # At least one tensor's share: the back end may merge the two branches.
    assert len(re.findall(wide, text)) >= config.block * config.passes // (4 * threads)
    assert not re.findall(narrow, text)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kv_type", ["*bf16", "*fp8e4nv"])
def test_grouped_decode_compiles(kv_type, target):
    pointers = ["*bf16", kv_type, "*i32", "*fp32", "*fp32", "*fp32"]
    for kernel, types, options in (
        (grouped._grouped_decode, [*pointers, "fp32", "i32", "i32", "i32", *["constexpr"] * 3], {"num_stages": 2}),
        (grouped._grouped_merge, ["*fp32", "*fp32", "*fp32", "*bf16", "constexpr"], {}),
    ):
        signature = dict(zip(kernel.arg_names, types, strict=True))
        every = {"SPLITS": 8, "BLOCK_N": grouped.BLOCK_N, "DOT_TYPE": grouped.GroupedDecode.dot_type}
        constants = {name: value for name, value in every.items() if name in kernel.arg_names}
        triton.compile(
            ASTSource(kernel, signature, constants), target=TARGETS[target], options={"num_warps": 4, **options}
        )


class _NoTimer:
    on_gpu = False

    def time_ns(self, call):
        return 1.0, call()


def test_reader_covers_each_cache():
    data = reference.generate_input(2, 1, 96, 3)
    for kv, bytes_per_token in (("bf16", 1152), ("fp8", 576), ("mxfp4", 288 + 24)):
        reader = Reader(cache_tensors(data, kv), _NoTimer())
        assert reader.read_bytes == 2 * 96 * bytes_per_token
        expected = sum(t.contiguous().view(torch.uint8).view(-1).view(torch.int32).long().sum() for t in reader.tensors)
        assert (reader().long().sum() - expected) % 2**32 == 0


def test_reader_refuses_what_it_cannot_read_in_full():
    with pytest.raises(ValueError, match="kv: expected 'bf16', 'fp8' or 'mxfp4', got 'int8'"):
        cache_tensors(reference.generate_input(1, 1, 1, 1), "int8")
    with pytest.raises(ValueError, match="expected contiguous"):
        Reader((torch.zeros(8, 8)[:, :4],), _NoTimer())
    with pytest.raises(ValueError, match="expected one or two, got 3"):
        Reader((torch.zeros(4),) * 3, _NoTimer())


def test_peers_measure_ranks_entries_against_reader_and_each_other(monkeypatch):
    class Timer:
        on_gpu = False
        times_ns = {"reader": 1e3, "torch_bmm": 4e3, "torch_chunked": 8e3}

        def time_ns(self, call):
            name = "reader" if isinstance(call, Reader) else call.__closure__[1].cell_contents
            call()
            return self.times_ns[name or "torch_chunked"], None

    monkeypatch.setenv("MLA_BACKEND", "")
    monkeypatch.setattr(peers, "grouped_entry", lambda data, kv, timer: None)
    data = reference.generate_input(2, 1, 1024, 3)
    rows = {row["name"]: row for row in peers.measure(data, ["torch_bmm", "torch_chunked"], 3, Timer(), "2x1024")}
    assert list(rows) == ["torch_bmm", "torch_chunked", "reader bf16"]
    assert [rows[name]["to_reader"] for name in rows] == [4, 8, 1]
    assert all(row["to_fa3"] is None for row in rows.values())
    assert [row["strict"] for row in rows.values()] == ["pass", "pass", None]
    assert rows["torch_bmm"]["gb_per_s"] == pytest.approx(2 * 1024 * 1152 / 4e3)
    _, means = peers.summary_table({"a": list(rows.values()), "b": list(rows.values())[:1]})
    assert means == {"torch_bmm": pytest.approx(4)}
