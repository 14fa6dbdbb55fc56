"""What `bench.fuzz` tries: random case files, command lines and arguments of `custom_kernel`, and what must hold."""

import contextlib
import functools
import io
import json
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import torch
import typer
from hypothesis import strategies as st

import eval as evaluator
import reference
import submission
from bench import cli
from task import NUM_HEADS, QK_HEAD_DIM, V_HEAD_DIM

# What argv can hold: no NUL, and bytes that are no UTF-8 as Python passes them on. No slash: files stay in the folder.
WORDS = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]) | st.just("\udc80"), max_size=8)
NUMBERS = ["0", "1", "-1", "+7", "1.5", "1e3", "nan", "inf", "-inf", "1e400", "٣", "9" * 5000, str(2**63), str(2**31)]


# ---- case files ----

CASE_NAMES = list(evaluator.CASE_RANGES)
_value = st.integers(0, 300).map(str) | st.sampled_from(NUMBERS) | WORDS
_field = st.tuples(st.sampled_from([*CASE_NAMES, "foo", ""]), st.sampled_from([": ", ":", " : ", "="]), _value)
_whole_line = st.tuples(*(_value.map(f"{name}: ".__add__) for name in CASE_NAMES)).flatmap(st.permutations)
_line = (
    st.integers(0, 10**6).map(lambda n: f"batchsize: {n % 9 + 1}; qseqlen: 1; kvseqlen: {n}; seed: {n}")
    | _whole_line.map("; ".join)
    | st.lists(_field.map("".join), max_size=5).map(";".join)
    | WORDS
)
_lines = st.lists(_line, max_size=4).map("\n".join)
case_files = st.tuples(
    st.binary(max_size=40) | _lines.map(lambda text: text.encode(errors="surrogateescape")),
    st.none() | st.integers(-(2**70), 2**70),
)


def check_case_file(given: tuple[bytes, int | None]) -> None:
    content, secret_seed = given
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(content)
        try:
            cases = evaluator.read_case_file(file.name, secret_seed)
        except evaluator.CaseFileError as error:
            assert len(str(error).splitlines()) == 1, str(error)
            return
    for case in cases:
        for name, (low, high) in evaluator.CASE_RANGES.items():
            assert low <= case.args[name] <= high, case


# ---- the command line ----


class InstantWorker:
    """Stands in for `eval.Worker` and answers at once: an exact submission, `time_ns` fast, its reader twice that."""

    time_ns = 4000.0

    def __init__(self, submission: Path) -> None:
        pass

    def __enter__(self) -> "InstantWorker":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, operation: str, *, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        assert timeout_s is None or timeout_s > 0, timeout_s
        answer: dict[str, Any] = {"good": True, "message": "", "arm": "exact", "kv": "fp8", "config": None}
        if operation == "environment":
            return {"good": True, "on_gpu": False, **dict.fromkeys(("timing", "device", "torch", "triton"), "none")}
        if operation == "arms":
            return {"good": True, "arms": ["torch_bmm"]}
        for name, (low, high) in evaluator.CASE_RANGES.items():
            assert low <= arguments["args"][name] <= high, arguments["args"]
        if operation == "benchmark":
            protocol = arguments["protocol"]
            assert protocol.max_repeats >= 1 and protocol.max_wall_ns >= 0, protocol
            runs = min(protocol.max_repeats, 12)
            times = {"durations_ns": [self.time_ns + i for i in range(runs)], "reader_ns": [self.time_ns / 2] * runs}
            return {**answer, **times, "kv_bytes": 576}
        if operation == "profile":
            return {**answer, "report": "", "times": [("a kernel", 1, 4.0)]}
        return {**answer, "strict": {"kernel_error": 1e-3, "kernel_bound": 1e-2}, "official_good": True}


_timed_case = {
    "case": "2x64",
    "kv_bytes": 576,
    "time": {"runs": 12, "median_us": 5.0, "p20_us": 4.9, "p80_us": 5.1},
    "reader_time": {"median_us": 2.0},
}
_result = {"mode": "benchmark", "environment": {"device": "other"}, "cases": [_timed_case]}
FILES: dict[str, bytes] = {
    "cases.txt": b"batchsize: 2; qseqlen: 1; kvseqlen: 64; seed: 3",
    "blank.txt": b"batchsize: 2; qseqlen: 1; kvseqlen: 64; seed: 3\n\n",
    "empty": b"",
    "binary": bytes(range(256)),
    "old.json": json.dumps(_result).encode(),
    "no_cases.json": json.dumps({**_result, "cases": []}).encode(),
    "no_times.json": json.dumps({**_result, "cases": [{**_timed_case, "time": {"runs": True}}]}).encode(),
    "list.json": b"[1, 2]",
    "deep.json": b"[" * 100_000,
    "other.py": b"#!POPCORN leaderboard amd-mixed-mla\n#!POPCORN gpu MI355X\n",
    "\udc80.py": b"",
}
PATHS = [*FILES, "folder", "folder/new", "none/new", "missing", "out.png", "out.json", ".", ""]
# A good value comes first: without many of them hardly an input would get past the first option.
VALUES = {
    "--case": ["2x64", "2x64x3", "0x1", "4by4", "2x", "٣x64", "9" * 5000 + "x1", f"{2**31}x1"],
    "--cases": ["cases.txt", *PATHS],
    "--json": ["out.json", *PATHS],
    "--backend": ["torch_bmm", "none", ""],
    "--repeats": ["12", *NUMBERS],
    "--seconds": ["1", *NUMBERS],
    "--timeout": ["9", *NUMBERS],
    "--submission": ["other.py", *PATHS],
    "--compare": ["old.json", *PATHS],
    "--plot": ["out.png", *PATHS],
    "--trace": ["folder", *PATHS],
}
OPTIONS = {
    name: [option for parameter in command.params for option in parameter.opts]
    for name, command in typer.main.get_command(cli.app).commands.items()  # type: ignore[attr-defined]
}
COMMANDS = list(OPTIONS)


@st.composite
def _useful(draw: st.DrawFn) -> list[str]:
    """A command with options that it knows, most of their values good."""
    command = draw(st.sampled_from(COMMANDS))
    argv = [command]
    for option in draw(st.lists(st.sampled_from(OPTIONS[command]), max_size=4)):
        good = st.just(VALUES[option][0])
        argv += [option, draw(good | good | st.sampled_from(VALUES[option]) | WORDS)]
    return argv


_any = st.lists(st.sampled_from([*COMMANDS, *VALUES, *PATHS, "--", "--help"]) | WORDS, max_size=6)
_platform = st.tuples(
    st.tuples(st.sampled_from([*COMMANDS, "tset"]), st.sampled_from(["cases.txt", *PATHS])).map(list) | _any,
    st.fixed_dictionaries(
        {"POPCORN_FD": st.sampled_from(["opened", "closed", "-1", "x", "1e3", "9" * 30])},
        optional={"POPCORN_SEED": st.sampled_from(["", "7", "-7", "x", str(2**70)])},
    ),
)
command_lines: st.SearchStrategy = st.tuples(_useful() | _useful() | _any, st.just({})) | _platform


@contextlib.contextmanager
def _scene() -> Iterator[int]:
    """A folder of FILES to work in, no worker and no kernelguard; gives an open descriptor."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ), contextlib.ExitStack() as patches:
        for module, name, stand_in in (
            (evaluator, "Worker", InstantWorker),
            (cli, "Worker", InstantWorker),
            (cli, "kernelguard_verdict", lambda content: (False, [])),
        ):
            patches.enter_context(mock.patch.object(module, name, stand_in))
        os.environ.pop("POPCORN_FD", None)
        os.chdir(folder)
        try:
            Path("folder").mkdir()
            for name, content in FILES.items():
                Path(name).write_bytes(content)
            yield os.open(os.devnull, os.O_WRONLY)
        finally:
            os.chdir(before)


def check_command_line(given: tuple[list[str], dict[str, str]]) -> None:
    argv, variables = given
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=how) for how in ("strict", "backslashreplace"))
    with _scene() as descriptor, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        os.environ.update(variables)
        if variables.get("POPCORN_FD") == "opened":
            os.environ["POPCORN_FD"] = str(descriptor)
        else:
            os.close(descriptor)
        if variables.get("POPCORN_FD") == "closed":
            os.environ["POPCORN_FD"] = str(descriptor)
        code: Any
        try:
            code = evaluator.main(argv)
        except SystemExit as end:
            code = end.code
        with contextlib.suppress(OSError):
            os.close(descriptor)  # where it was not used
        out.flush()
        err.flush()
    assert code in (0, 1, 2, 111, 112, 113), code
    assert code == 0 or out.buffer.getvalue() or err.buffer.getvalue(), "no reason given"


# ---- custom_kernel ----

CONFIG_KEYS = list(reference.case_config(1, 1, 1))
PLACES: list[tuple] = [(), (0,), (1,), (2,), (3,), (4,), (1, "bf16"), (1, "fp8"), (1, "mxfp4")]
PLACES += [(1, kv, i) for kv in ("fp8", "mxfp4") for i in (0, 1)] + [(4, key) for key in CONFIG_KEYS]
LEAVE_OUT = "leave out"
HARMLESS: dict[str, Callable[[torch.Tensor], Any]] = {
    "x.clone()": lambda x: x.clone(),
    "rows further apart": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}
TENSOR_CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    **HARMLESS,
    "x[1:]": lambda x: x[1:],
    "x[:0]": lambda x: x[:0],
    "x[..., ::2]": lambda x: x[..., ::2],
    "x[..., None]": lambda x: x[..., None],
    "x.mT": lambda x: x.mT,
    "x.mT.contiguous().mT": lambda x: x.mT.contiguous().mT,
    "x.flatten()": lambda x: x.flatten(),
    "x.expand(2, *x.shape)": lambda x: x.expand(2, *x.shape),
    "torch.cat([x, x])": lambda x: torch.cat([x, x]),
    "-x": lambda x: -x,
    "x + 1": lambda x: x + 1,
    "x * float('nan')": lambda x: x * float("nan"),
    "x.long()": lambda x: x.long(),
    "x.float()": lambda x: x.float(),
    "x.double()": lambda x: x.double(),
    "x.bool()": lambda x: x.bool(),
    "x.to(torch.complex64)": lambda x: x.to(torch.complex64),
    "x.to_sparse()": lambda x: x.to_sparse(),
    "x.to('meta')": lambda x: x.to("meta"),
    "x.requires_grad_()": lambda x: x.clone().requires_grad_(),
    "torch.nn.Parameter(x)": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "x.tolist()": lambda x: x.tolist(),
    "x.numpy()": lambda x: x.numpy(),
    "x.dtype": lambda x: x.dtype,
}
_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
    | st.integers(-2, 9) | st.sampled_from([torch.empty(0), torch.zeros(3), torch.tensor(True), 10**400, object]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
_change = st.tuples(
    st.sampled_from(PLACES),
    st.sampled_from([*TENSOR_CHANGES, LEAVE_OUT]) | _junk.map(lambda value: ("replace by", value)),
) | st.tuples(st.sampled_from([place for place in PLACES if place[:1] != (4,)]), st.sampled_from(list(HARMLESS)))
_shapes = st.sampled_from([((3,), 1), ((0, 2), 2), ((5, 1, 5), 1), ((70,), 3), ((0,), 1)])
kernel_inputs = st.tuples(_shapes, st.lists(_change, max_size=3))


@functools.cache
def _valid_input(lengths: tuple[int, ...], s_q: int) -> tuple:
    generator = torch.Generator().manual_seed(sum(lengths))
    kv = torch.randn(max(1, sum(lengths)), 1, QK_HEAD_DIM, generator=generator).bfloat16()
    kept = slice(sum(lengths))
    fp8, fp8_scale = reference.quantize_fp8(kv)
    packed, scales = reference.quantize_mxfp4(kv)
    return (
        torch.randn(len(lengths) * s_q, NUM_HEADS, QK_HEAD_DIM, generator=generator).bfloat16(),
        {"bf16": kv[kept], "fp8": (fp8[kept], fp8_scale), "mxfp4": (packed[kept], scales)},
        torch.arange(len(lengths) + 1, dtype=torch.int32) * s_q,
        torch.tensor([0, *lengths]).cumsum(0).int(),
        reference.case_config(len(lengths), s_q, max(lengths)),
    )


def _changed(nest: Any, place: tuple, change: Any) -> Any:
    """A copy of a nest of tuples and dicts with what is at `place` changed; rejected where that cannot be done."""
    if not place:
        if isinstance(change, tuple):
            return change[1]
        try:
            return TENSOR_CHANGES[change](nest)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            hypothesis.reject()
    key, deeper = place[0], place[1:]
    try:
        copy = dict(nest) if isinstance(nest, dict) else dict(enumerate(nest))
        if not deeper and change == LEAVE_OUT:
            del copy[key]
        else:
            copy[key] = _changed(copy[key], deeper, change)
    except (TypeError, KeyError):
        hypothesis.reject()
    return copy if isinstance(nest, dict) else tuple(copy.values())


def check_kernel(given: tuple[tuple[tuple[int, ...], int], list[tuple[tuple, Any]]]) -> None:
    (lengths, s_q), changes = given
    data = _valid_input(lengths, s_q)
    for place, change in changes:
        data = _changed(data, place, change)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of junk
            output = submission.custom_kernel(data)
    except (TypeError, KeyError, ValueError) as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        words = str(error.args[0]) if error.args else ""
        if raised_in != submission.__file__ or ": expected " not in words or ", got " not in words:
            raise
        return
    assert output.dtype == torch.bfloat16 and output.shape == (data[0].shape[0], NUM_HEADS, V_HEAD_DIM), output.shape
    if all(isinstance(change, str) and change in HARMLESS for _, change in changes):
        torch.testing.assert_close(output.clone(), submission.custom_kernel(_valid_input(lengths, s_q)))


@dataclass(frozen=True)
class Target:
    """What is fuzzed: its inputs, the check that raises where one is not answered well, its share of all inputs."""

    inputs: st.SearchStrategy
    check: Callable[[Any], None]
    share: float


TARGETS = {
    "case files": Target(case_files, check_case_file, 0.5),
    "command line": Target(command_lines, check_command_line, 0.2),
    "custom_kernel": Target(kernel_inputs, check_kernel, 0.3),
}
