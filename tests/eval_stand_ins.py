"""Stand-in submissions and helpers that run eval.py the way the platform and a person do."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Exact attention over the bf16 cache for one query a sequence and equal lengths; it does not say what it ran.
EXACT = """
import torch

def custom_kernel(data):
    q, kv_data, _, _, config = data
    kv = kv_data["bf16"].view(config["batch_size"], config["kv_seq_len"], 576).float()
    p = torch.softmax(q.float() @ kv.transpose(1, 2) * config["sm_scale"], -1)
    return (p @ kv[..., :512]).bfloat16()
"""

ZEROS = """
import torch

def custom_kernel(data):
    return torch.zeros(data[0].shape[0], 16, 512, dtype=torch.bfloat16, device=data[0].device)
"""

EVERY_SECOND_TOKEN = EXACT.replace(".float()\n    p =", ".float()[:, ::2]\n    p =")

# What kernelguard is there to catch, behind a correct header.
REPLAY = """#!POPCORN leaderboard amd-mixed-mla
#!POPCORN gpu MI355X

_outputs = {}

def custom_kernel(data):
    key = data[0].data_ptr()
    if key not in _outputs:
        _outputs[key] = data[0] * 2
    return _outputs[key]
"""

# A reference whose input carries its seed and whose check compares with it: protocol tests need no attention.
TOY_REFERENCE = """
import torch

def generate_input(batchsize, qseqlen, kvseqlen, seed):
    return {"seed": torch.tensor([seed]), "batchsize": batchsize}

def check_implementation(data, output):
    if output.item() == data["seed"].item():
        return True, "as expected"
    return False, f"expected {data['seed'].item()},\\ngot {output.item()}"
"""

# Records each call and then does what its module-level `act` says.
TOY_SUBMISSION = """
import json, os, time

def record(**what):
    with open(os.path.join(os.path.dirname(__file__), "record.jsonl"), "a") as log:
        print(json.dumps(what), file=log)

calls = 0

def custom_kernel(data):
    global calls
    calls += 1
    record(pid=os.getpid(), seed=data["seed"].item(), batchsize=data["batchsize"], call=calls,
           popcorn=[name for name in os.environ if name.startswith("POPCORN")])
    return act(data)

def act(data):
    time.sleep(SLEEP_S)
    return data["seed"].clone()
"""


def case_line(batchsize=2, kvseqlen=64, seed=1):
    return f"batchsize: {batchsize}; qseqlen: 1; kvseqlen: {kvseqlen}; seed: {seed}"


def platform_folder(folder, submission, reference=None):
    """A folder as the platform lays it out: eval.py, task.py, reference.py and submission.py, nothing else."""
    for name in ("eval.py", "task.py", "reference.py"):
        shutil.copy(ROOT / name, folder / name)
    if reference is not None:
        (folder / "reference.py").write_text(reference)
    (folder / "submission.py").write_text(submission)
    return folder


def run_platform(folder, *args, cases=None, read=True, **env):
    """Run eval.py with a real pipe as POPCORN_FD; returns (exit code, lines that came through the pipe, stderr).

    Without `read`, nobody listens.
    """
    if cases is not None:
        (folder / "cases.txt").write_text(cases)
        args = (*args, "cases.txt")
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "eval.py", *args],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "POPCORN_FD": str(write_end), **env},
        pass_fds=[write_end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        lines = pipe.read().splitlines() if read else []
    _, stderr = process.communicate(timeout=120)
    return process.returncode, lines, stderr


def run_person(*args, **env):
    """Run the command line without POPCORN_FD as a process of its own; returns it finished, with text output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("POPCORN", "MLA_"))}
    return subprocess.run(
        [sys.executable, str(ROOT / "eval.py"), *map(str, args)],
        cwd=ROOT, env={**clean, **env}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
