"""Judge a submission: the leaderboard's evaluation protocol, and the same protocol for a person at a terminal.

    POPCORN_FD=3 python eval.py MODE CASEFILE     the platform's form; `key: value` lines go to the descriptor
    python eval.py test                           a person's form, see `python eval.py --help` (needs the extra `cli`)

MODE is `test`, `benchmark`, `leaderboard` or `profile`. Exit codes: 0 all checks passed, 2 wrong usage, 111 no usable
`POPCORN_FD` or nobody reads it, 112 a check failed, 113 bad case file. The platform's form needs torch and the
standard library only.

One spawned worker process imports the submission and serves all cases, so its module state lives from case to case.
Only the worker imports torch. It is replaced when it dies, hangs past the limit, or loses its GPU context.
"""

import base64
import contextlib
import dataclasses
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
MODES = ("test", "benchmark", "leaderboard", "profile")

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_NO_DESCRIPTOR = 111
EXIT_CHECK_FAILED = 112
EXIT_BAD_CASE_FILE = 113
EXIT_INTERRUPTED = 130

# The cold-cache flush writes FLUSH_LLC_MULTIPLE times the last-level cache, over and over until FLUSH_GPU_BYTES are
# drawn: on a GPU it must also outlast the host's launch work, which the official flush (62.5 GiB) hides.
FLUSH_LLC_MULTIPLE = 8
FLUSH_GPU_BYTES = 8 << 30
# CDNA3/4 report their 4 MB L2; the 256 MB Infinity Cache behind it is what keeps data between calls.
INFINITY_CACHE_BYTES = {"gfx942": 256 << 20, "gfx950": 256 << 20}
ASSUMED_CPU_LLC_BYTES = 64 << 20

MAX_ANSWER_BYTES = 16 << 20
MAX_TEXT = 300
ALIVE_CHECK_S = 0.5
COMPARE_BYTES = 256 << 20


class CaseFileError(ValueError):
    """A case file that cannot be read or parsed."""


@dataclasses.dataclass(frozen=True)
class TestCase:
    """Keyword arguments of `reference.generate_input`, and the text they came from."""

    args: dict[str, int]
    spec: str

    __test__ = False  # pytest would collect the class by its name


@dataclasses.dataclass(frozen=True)
class Stats:
    """Times of one case in nanoseconds; `err` is the standard error of the mean, NaN for a single run."""

    runs: int
    mean: float
    std: float
    err: float
    best: float
    worst: float


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How often one case is timed: whichever of the limits comes first ends it, but never before three runs.

    `recheck` draws a new input for every run (seed + 13) and checks every output.
    """

    recheck: bool
    max_repeats: int
    max_time_ns: float
    max_wall_ns: float = 120e9


WARM_UP = {"benchmark": Protocol(False, 100, 1e8), "leaderboard": Protocol(False, 100, 1e7)}
PROTOCOLS = {"benchmark": Protocol(False, 1000, 50e9), "leaderboard": Protocol(True, 100, 30e9)}
SEED_STEP = 13
MIN_RUNS = 3
TARGET_RELATIVE_ERROR = 0.001


def combine_seeds(case_seed: int, secret_seed: int) -> int:
    """Cantor-style pairing: large whenever the secret seed is, so that public case seeds tell nothing about it."""
    total = case_seed + secret_seed
    return case_seed + total * (total + 1) // 2


# A generator takes seeds below 2**64; the upper half is left to the steps of a ranked case.
CASE_RANGES = {
    "batchsize": (1, 2**31 - 1),
    "qseqlen": (1, 2**31 - 1),
    "kvseqlen": (1, 2**31 - 1),
    "seed": (0, 2**63 - 1),
}
_CASE_FIELD = re.compile(r"\s*([a-zA-Z_]\w*):\s*([a-zA-Z_]\w*|[+-]?[0-9]{1,30})\s*")


def _case_value(name: str, word: str) -> int:
    low, high = CASE_RANGES[name]
    try:
        value = int(word)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise CaseFileError(f"{name}: expected an integer from {low} to {high}, got {word}")
    return value


def parse_case(line: str, secret_seed: int | None = None) -> dict[str, int]:
    """Parse `name: value; name: value`, each key of CASE_RANGES once; the seed is combined with `secret_seed`.

    Raises CaseFileError naming the part that does not fit.
    """
    args: dict[str, int] = {}
    for part in line.split(";"):
        field = _CASE_FIELD.fullmatch(part)
        if field is None:
            raise CaseFileError(f"expected 'name: value', got {part[:MAX_TEXT]!r}")
        name, word = field.groups()
        if name not in CASE_RANGES:
            raise CaseFileError(f"{name}: unknown key, expected {', '.join(CASE_RANGES)}")
        if name in args:
            raise CaseFileError(f"{name}: expected once, got it again")
        args[name] = _case_value(name, word)
    missing = [name for name in CASE_RANGES if name not in args]
    if missing:
        raise CaseFileError(f"{missing[0]}: expected in every case, got none")
    if secret_seed is not None:
        combined = combine_seeds(args["seed"], secret_seed)
        largest = CASE_RANGES["seed"][1]
        if combined > largest:
            raise CaseFileError(f"seed: expected at most {largest} combined with POPCORN_SEED, got {combined}")
        args["seed"] = combined
    return args


def read_case_file(path: str | os.PathLike[str], secret_seed: int | None = None) -> list[TestCase]:
    """Read one case a line; with `secret_seed`, each case's `seed` is combined with it.

    Raises CaseFileError if the file cannot be read, has no case, or has a line (a blank one included) that is no case.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CaseFileError(f"cannot read case file {str(path)!r}: {error}") from error
    if not lines:
        raise CaseFileError(f"case file {str(path)!r} has no case")
    cases = []
    for number, line in enumerate(lines, 1):
        try:
            cases.append(TestCase(parse_case(line, secret_seed), line))
        except CaseFileError as error:
            raise CaseFileError(f"case file {str(path)!r}, line {number}: {error}") from error
    return cases


def calculate_stats(durations_ns: list[float]) -> Stats:
    """Mean, sample standard deviation, standard error, best and worst of a non-empty list of times."""
    runs = len(durations_ns)
    mean = sum(durations_ns) / runs
    variance = sum((duration - mean) ** 2 for duration in durations_ns) / (runs - 1) if runs > 1 else math.nan
    std = math.sqrt(variance)
    return Stats(runs, mean, std, std / math.sqrt(runs), min(durations_ns), max(durations_ns))


def should_stop(durations_ns: list[float], wall_ns: float, protocol: Protocol) -> bool:
    """The official stop rule, asked after every run: precise enough, or out of kernel time, or out of wall time."""
    if len(durations_ns) < MIN_RUNS:
        return False
    stats = calculate_stats(durations_ns)
    return (
        stats.err < TARGET_RELATIVE_ERROR * stats.mean
        or stats.mean * stats.runs > protocol.max_time_ns
        or wall_ns > protocol.max_wall_ns
    )


def clone_data(data: Any) -> Any:
    """Clone every tensor in a nest of tuples, lists and dicts; anything else is passed on as it is."""
    if isinstance(data, tuple | list):
        return type(data)(clone_data(item) for item in data)
    if isinstance(data, dict):
        return {key: clone_data(value) for key, value in data.items()}
    return data.clone() if hasattr(data, "clone") else data


def first_difference(expected: Any, got: Any, name: str = "data") -> str:
    """Name of the first part of a nest of tuples, lists and dicts whose bits are not the expected ones, or ""."""
    import torch

    if type(got) is not type(expected):
        return name
    if isinstance(expected, torch.Tensor):
        if (got.shape, got.dtype, got.device) != (expected.shape, expected.dtype, expected.device):
            return name
        pairs = zip(*(x.reshape(-1).view(torch.uint8).split(COMPARE_BYTES) for x in (expected, got)), strict=True)
        return "" if all(torch.equal(a, b) for a, b in pairs) else name
    if isinstance(expected, dict):
        keys: Sequence = list(expected)
        if expected.keys() != got.keys():
            return name
    elif isinstance(expected, tuple | list):
        keys = range(len(expected))
        if len(expected) != len(got):
            return name
    else:
        return "" if expected == got else name
    return next(filter(None, (first_difference(expected[key], got[key], f"{name}[{key!r}]") for key in keys)), "")


def output_fault(output: Any) -> str:
    """What keeps an output from being judged at all, or "": it must hold its numbers by the time the call is over.

    A subclass of torch.Tensor may compute them when they are looked at, after the clock has stopped.
    """
    import torch

    if type(output) is not torch.Tensor:
        more = ", a subclass" if isinstance(output, torch.Tensor) else ""
        return f"output: expected a torch.Tensor, got {type(output).__name__}{more}"
    if output.layout != torch.strided:
        return f"output: expected a dense tensor, got {output.layout}"
    if output.requires_grad:
        return "output: expected a tensor without gradient, got one that requires it"
    return ""


def input_fault(untouched: Any, data: Any) -> str:
    """The name of the first input that a call has changed, in a sentence, or ""."""
    changed = first_difference(untouched, data)
    return f"input {changed}: expected unchanged, got overwritten" if changed else ""


def call_fault(untouched: Any, data: Any, output: Any) -> str:
    """`output_fault` or else `input_fault`."""
    return output_fault(output) or input_fault(untouched, data)


def last_level_cache_bytes() -> tuple[int, str]:
    """Size of the device's last-level cache, and where the number comes from."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        arch = getattr(properties, "gcnArchName", "").split(":")[0]
        if arch in INFINITY_CACHE_BYTES:
            return INFINITY_CACHE_BYTES[arch], "Infinity Cache"
        return properties.L2_cache_size, "L2"
    sizes = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        with contextlib.suppress(OSError, ValueError):
            kilobytes = (index / "size").read_text().strip().removesuffix("K")
            sizes[int((index / "level").read_text())] = int(kilobytes) << 10
    if not sizes:
        return ASSUMED_CPU_LLC_BYTES, "assumed, the system does not tell"
    return sizes[max(sizes)], f"L{max(sizes)}"


class ColdTimer:
    """Times calls that start with a cold last-level cache.

    On a GPU the flush is asynchronous and the time lies between two events, so launch work hides behind the flush
    unless the call synchronises. On a CPU the flush is done when the clock starts.
    """

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.on_gpu = torch.cuda.is_available()
        self.llc_bytes, self.llc_source = last_level_cache_bytes()
        self.flush_bytes = FLUSH_LLC_MULTIPLE * self.llc_bytes
        if self.on_gpu:
            self.flush_bytes = min(self.flush_bytes, torch.cuda.mem_get_info()[0] // 4)
        self.flush_passes = max(1, FLUSH_GPU_BYTES // self.flush_bytes) if self.on_gpu else 1
        self._scratch = torch.empty(self.flush_bytes // 4, device="cuda" if self.on_gpu else "cpu")

    def synchronize(self) -> None:
        if self.on_gpu:
            self._torch.cuda.synchronize()

    def flush(self) -> None:
        for _ in range(self.flush_passes):
            if self.on_gpu:
                self._scratch.normal_()
            else:
                self._scratch.fill_(1.0)

    def time_ns(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Run `call` once from a cold cache; returns its time in nanoseconds and its result."""
        self.synchronize()
        self.flush()
        if not self.on_gpu:
            start_ns = time.perf_counter_ns()
            result = call()
            return float(time.perf_counter_ns() - start_ns), result
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call()
        end.record()
        self.synchronize()
        return start.elapsed_time(end) * 1e6, result


def _one_line(text: str) -> str:
    """`text` in one line that a terminal and any encoding can take: control characters and surrogates are escaped."""
    line = " | ".join(line.strip() for line in text.splitlines() if line.strip())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def _word(value: object) -> str | None:
    """A foreign object in one line of at most MAX_TEXT characters; None if it cannot be put into words."""
    try:
        # A str's own text, not what a subclass such as an enum prints.
        text = _one_line(str.__str__(value) if isinstance(value, str) else str(value))
    except Exception:
        return None
    half = (MAX_TEXT - 5) // 2  # the end often says what came, as in "expected ..., got ..."
    return text if len(text) <= MAX_TEXT else f"{text[:half]} ... {text[-half:]}"


def _explain(error: BaseException, submission: Path) -> str:
    """One line for any exception, with the submission's line it passed through last."""
    message = _word(error)
    text = f"{type(error).__name__}: {'(its message cannot be printed)' if message is None else message}"
    if isinstance(error, SyntaxError):
        return text
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(submission)]
    return f"{text} ({submission.name}, line {lines[-1]})" if lines else text


@contextlib.contextmanager
def _without_probes() -> Iterator[None]:
    """Keep from standard error what torch's profiler says of its trace points, at a level above its errors."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            captured.seek(0)
            with contextlib.suppress(OSError):  # nobody may listen
                os.write(2, b"".join(line for line in captured if not line.startswith(b"USDT:")))


class _Session:
    """The worker's side: the loaded submission and the operations the parent may ask for.

    Operations return dicts that JSON can hold: the parent unpickles nothing that comes from the submission's process.
    """

    def __init__(self, submission: Path, report: Callable[[int, int], None]) -> None:
        self.submission = submission
        self._report = report
        self._module: Any = None
        self._timer: ColdTimer | None = None

    @property
    def timer(self) -> ColdTimer:
        if self._timer is None:
            self._timer = ColdTimer()
        return self._timer

    def _kernel(self) -> Callable[[Any], Any]:
        if self._module is None:
            spec = importlib.util.spec_from_file_location("submission", self.submission)
            if spec is None or spec.loader is None:
                raise ImportError(f"{self.submission} is not a Python file")
            module = importlib.util.module_from_spec(spec)
            sys.modules["submission"] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules["submission"]
                raise
            self._module = module
        if not callable(getattr(self._module, "custom_kernel", None)):
            raise AttributeError(f"{self.submission.name} defines no function custom_kernel")
        return self._module.custom_kernel

    def _selection(self) -> dict[str, str | None]:
        """What ran, in the submission's own words; a submission without a working `last_run` does not say."""
        said: dict[str, str | None] = dict.fromkeys(("arm", "kv", "config"))
        with contextlib.suppress(Exception):
            selection = self._module.last_run()
            for name in said:
                value = getattr(selection, name, None)
                said[name] = None if value is None else _word(value)
        return said

    def _verdict(self, data: Any, output: Any, full: bool) -> dict[str, Any]:
        """Check one output; `full` adds what a person wants to see to the platform's (good, message) pair."""
        import reference

        selection = self._selection()
        if not full:
            good, message = reference.check_implementation(data, output)
            return {"good": bool(good), "message": _one_line(message), **selection}
        strict = reference.strict_check(data, output, selection["kv"])
        official_good, official_message = reference.official_check(data, output)
        return {
            "good": strict.passed,
            "message": _one_line(strict.message),
            **selection,
            "kv": strict.kv,
            "strict": dataclasses.asdict(strict),
            "official_good": official_good,
            "official_message": _one_line(official_message),
        }

    def environment(self) -> dict[str, Any]:
        from bench.environment import describe_environment

        return {"good": True, "on_gpu": self.timer.on_gpu, **describe_environment(self.timer)}

    def arms(self) -> dict[str, Any]:
        """Names that MLA_BACKEND may have: those in the submission's `ARMS`, none where it has no such dict."""
        self._kernel()
        return {"good": True, "arms": [_word(name) for name in getattr(self._module, "ARMS", ())]}

    def test(self, args: dict[str, Any], full: bool = False) -> dict[str, Any]:
        import reference

        kernel = self._kernel()
        data = reference.generate_input(**args)
        given = clone_data(data)
        output = kernel(given)
        self.timer.synchronize()
        if fault := call_fault(data, given, output):
            return {"good": False, "message": fault, **self._selection()}
        del given
        gc.collect()  # the cloned caches must go before the check asks for its own memory
        return self._verdict(data, output, full)

    def benchmark(self, args: dict[str, Any], protocol: Protocol, full: bool = False) -> dict[str, Any]:
        """Time one case; `full` times the reader kernel over the same bytes after every run."""
        import reference

        kernel = self._kernel()
        args = dict(args)
        data: Any = reference.generate_input(**args)
        untouched = clone_data(data)
        output = kernel(data)
        if fault := call_fault(untouched, data, output):
            return {"good": False, "message": fault, **self._selection()}
        verdict = self._verdict(untouched, output, full)
        del output
        if not verdict["good"]:
            return verdict

        reader = None
        if full:
            from bench.reader import Reader, cache_tensors

            reader = Reader(cache_tensors(data, verdict["kv"]), self.timer)
            verdict["kv_bytes"] = reader.read_bytes

        durations_ns: list[float] = []
        reader_ns: list[float] = []
        start_ns = time.perf_counter_ns()
        for run in range(protocol.max_repeats):
            if protocol.recheck:
                args["seed"] += SEED_STEP
                data = untouched = None  # two inputs at a time are enough
                data = reference.generate_input(**args)
                untouched = clone_data(data)
            duration_ns, output = self.timer.time_ns(partial(kernel, data))
            fault = call_fault(untouched, data, output) if protocol.recheck else output_fault(output)
            if protocol.recheck and not fault:
                good, message = reference.check_implementation(untouched, output)
                fault = "" if good else _one_line(message)
            if fault:
                return {**verdict, "good": False, "message": f"run {run}: {fault}"}
            del output
            durations_ns.append(duration_ns)
            if reader is not None:
                if protocol.recheck:
                    reader.tensors = cache_tensors(data, verdict["kv"])
                reader_ns.append(self.timer.time_ns(reader)[0])
            self._report(run + 1, protocol.max_repeats)
            if should_stop(durations_ns, time.perf_counter_ns() - start_ns, protocol):
                break
        if fault := input_fault(untouched, data):
            return {**verdict, "good": False, "message": f"after the timed runs: {fault}"}
        return {**verdict, "durations_ns": durations_ns, "reader_ns": reader_ns}

    def profile(self, args: dict[str, Any], trace: str | None = None, warm: bool = False) -> dict[str, Any]:
        """Profile one call; `warm` makes one call before it, so that compilation is left out.

        `report` is torch's own table. `times` holds (name, calls, microseconds), longest first: kernels and copies on a
        GPU, operations without what they call on a CPU.
        """
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        import reference

        kernel = self._kernel()
        data = reference.generate_input(**args)
        if warm:
            kernel(data)
        self.timer.synchronize()
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if self.timer.on_gpu else [ProfilerActivity.CPU]
        profiler = profile(activities=activities)
        with _without_probes():
            profiler.start()
        try:
            kernel(data)
            self.timer.synchronize()
        finally:
            with _without_probes():
                profiler.stop()
        if trace is not None:
            profiler.export_chrome_trace(trace)
        averages = profiler.key_averages()
        own_time = "self_device_time_total" if self.timer.on_gpu else "self_cpu_time_total"
        times = [
            (_word(entry.key), entry.count, getattr(entry, own_time))
            for entry in averages
            if (entry.device_type != DeviceType.CPU) == self.timer.on_gpu and not entry.is_user_annotation
        ]
        return {
            "good": True,
            "message": "",
            "report": averages.table(sort_by=own_time, row_limit=20),
            "times": sorted(times, key=lambda entry: -entry[2]),
            **self._selection(),
        }

    def gpu_is_lost(self) -> bool:
        try:
            if self._timer is not None:
                self._timer.synchronize()
        except RuntimeError:
            return True
        return False


def _serve(connection: Any, submission: Path) -> None:
    """Main loop of the worker process: requests come through the connection, answers go back as lines of JSON."""
    os.setsid()  # whatever the submission starts ends with this process's group
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    for folder in (str(submission.parent), str(ROOT)):
        if folder not in sys.path:
            sys.path.append(folder)

    answers = open(connection.fileno(), "w", encoding="ascii", closefd=False)

    def send(kind: str, content: Any) -> None:
        print(json.dumps([kind, content]), file=answers, flush=True)

    session = _Session(submission, lambda done, total: send("progress", [done, total]))
    with contextlib.suppress(EOFError, ConnectionError):  # the parent was killed
        while True:
            operation, arguments = connection.recv()
            try:
                answer = getattr(session, operation)(**arguments)
            except BaseException as error:
                answer = {"good": False, "message": _explain(error, submission), "fatal": session.gpu_is_lost()}
            send("result", answer)
            gc.collect()


class Worker:
    """The parent's side: a context manager around the one worker process."""

    def __init__(self, submission: Path) -> None:
        self._submission = submission
        self._process: Any = None
        self._connection: Any = None
        self._unread = b""

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self) -> None:
        # On a busy CPU, OpenMP threads that spin while they wait make everything several times slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # here, because it would lift the mask below
        # A terminal sends Ctrl-C to the worker as well, which takes a moment to start and ignore it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._connection, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._submission), daemon=True)
            process.start()
            self._process = process
            theirs.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._unread = b""

    def _stop(self) -> None:
        """End the process and all it started."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):  # there is no group before the worker's first line, nor after the last one
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._connection.close()
        self._process = None

    def _read_line(self, deadline: float) -> bytes:
        """The worker's next line.

        Raises TimeoutError past the deadline, EOFError if the worker died, ValueError for a line without an end. No
        read blocks: the submission may have written into the pipe, or left it open in a process of its own.
        """
        while b"\n" not in self._unread:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            # A process the submission forked holds both the pipe and `sentinel` open, so neither tells of the end.
            alive = self._process.is_alive()
            if not self._connection.poll(min(left_s, ALIVE_CHECK_S)):
                if alive:
                    continue
                raise EOFError
            chunk = os.read(self._connection.fileno(), 1 << 16)
            if not chunk:
                raise EOFError
            self._unread += chunk
            if len(self._unread) > MAX_ANSWER_BYTES:
                raise ValueError(f"expected at most {MAX_ANSWER_BYTES} bytes")
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def ask(
        self,
        operation: str,
        *,
        timeout_s: float | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Run one operation of the worker.

        An exception, a dead worker or a wait past `timeout_s` comes back as `{"good": False, "message": ...}`.
        """
        if self._process is None:
            self._start()
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._connection.send((operation, arguments))
            while True:
                kind, answer = json.loads(self._read_line(deadline))
                if kind == "result":
                    if answer.pop("fatal", False):
                        self._stop()
                    return answer
                if on_progress is not None:
                    on_progress(*answer)
        except TimeoutError:
            message = f"no result within {timeout_s:g} s, worker ended"
        except (EOFError, OSError):
            self._process.join(timeout=5)
            message = f"worker process died, exit code {self._process.exitcode}"
        except (ValueError, TypeError, AttributeError):
            message = "unreadable answer, worker ended: something else wrote into the worker's pipe"
        self._stop()
        return {"good": False, "message": message}


class DescriptorError(OSError):
    """Nobody reads the descriptor any more, or it cannot be written."""


class _PopcornOutput:
    """Writes `key: value` lines to the descriptor the platform listens on; raises DescriptorError where it cannot."""

    def __init__(self, descriptor: str) -> None:
        try:
            os.set_inheritable(int(descriptor), False)
            self._file = os.fdopen(int(descriptor), "w", encoding="utf-8", errors="backslashreplace")
        except (ValueError, OverflowError, OSError) as error:
            raise DescriptorError(str(error)) from error

    def __enter__(self) -> "_PopcornOutput":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what could not be written is still in the buffer
            self._file.close()

    def log(self, key: str, value: object) -> None:
        try:
            print(f"{key}: {value}", file=self._file, flush=True)
        except OSError as error:
            raise DescriptorError(str(error)) from error


def _run_tests(out: _PopcornOutput, worker: Worker, cases: list[TestCase]) -> bool:
    passed = True
    out.log("test-count", len(cases))
    for index, case in enumerate(cases):
        out.log(f"test.{index}.spec", case.spec)
        answer = worker.ask("test", args=case.args)
        out.log(f"test.{index}.status", "pass" if answer["good"] else "fail")
        if answer["message"]:
            out.log(f"test.{index}.{'message' if answer['good'] else 'error'}", answer["message"])
        passed = passed and answer["good"]
    return passed


def _run_benchmarks(out: _PopcornOutput, worker: Worker, cases: list[TestCase], mode: str) -> bool:
    """Time or profile the cases, up to the first that fails."""
    if mode == "profile":
        ask = partial(worker.ask, "profile")
    else:
        ask = partial(worker.ask, "benchmark", protocol=PROTOCOLS[mode])
        worker.ask("benchmark", args=cases[0].args, protocol=WARM_UP[mode])  # its failure shows in the first case
    out.log("benchmark-count", len(cases))
    for index, case in enumerate(cases):
        out.log(f"benchmark.{index}.spec", case.spec)
        answer = ask(args=case.args)
        if not answer["good"]:
            out.log(f"benchmark.{index}.status", "fail")
            out.log(f"benchmark.{index}.error", answer["message"])
            return False
        if mode == "profile":
            # The alternative alphabet is the platform's: its reader decodes with the same two characters.
            figures = {"report": base64.b64encode(answer["report"].encode(), b"+*").decode()}
        else:
            figures = dataclasses.asdict(calculate_stats(answer["durations_ns"]))
        for name, value in figures.items():
            out.log(f"benchmark.{index}.{name}", value)
    return True


def platform_main(argv: list[str]) -> int:
    """The platform's form of the command; reads and removes `POPCORN_FD` and `POPCORN_SEED`. Returns the exit code."""
    descriptor, secret = os.environ.pop("POPCORN_FD"), os.environ.pop("POPCORN_SEED", "")
    if len(argv) != 2:
        print("usage: python eval.py MODE CASEFILE", file=sys.stderr)
        return EXIT_USAGE
    mode, case_file = argv
    try:
        secret_seed = int(secret) if secret else None
    except ValueError:
        print(f"POPCORN_SEED: expected an integer, got {secret!r}", file=sys.stderr)
        return EXIT_USAGE
    try:
        cases = read_case_file(case_file, secret_seed)
    except CaseFileError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_CASE_FILE
    if mode not in MODES:
        print(f"MODE: expected one of {', '.join(MODES)}, got {mode!r}", file=sys.stderr)
        return EXIT_USAGE
    try:
        with _PopcornOutput(descriptor) as out, Worker(ROOT / "submission.py") as worker:
            passed = _run_tests(out, worker, cases) if mode == "test" else _run_benchmarks(out, worker, cases, mode)
            out.log("check", "pass" if passed else "fail")
    except DescriptorError as error:
        print(
            f"POPCORN_FD: expected an open file descriptor that is read, got {descriptor!r}: {error}", file=sys.stderr
        )
        return EXIT_NO_DESCRIPTOR
    return EXIT_OK if passed else EXIT_CHECK_FAILED


def main(argv: list[str] | None = None) -> int:
    """Choose the audience: with `POPCORN_FD` in the environment the platform, else a person. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if os.environ.get("POPCORN_FD"):
        return platform_main(argv)
    if len(argv) == 2 and argv[0] in MODES and Path(argv[1]).is_file():
        print("POPCORN_FD is not set; to run a case file by hand use `--cases FILE`", file=sys.stderr)
        return EXIT_NO_DESCRIPTOR
    try:
        from bench.cli import app
        from bench.console import run_app
    except ModuleNotFoundError as error:
        print(
            f"{error}; without POPCORN_FD, eval.py is a command line that needs the extra `cli`: "
            "pip install -e '.[cli]'",
            file=sys.stderr,
        )
        return EXIT_USAGE
    run_app(app, argv, "python eval.py")


if __name__ == "__main__":
    try:
        # Under its own name, so that the worker unpickles the very classes the parent sends.
        from eval import main as run

        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
