"""The leaderboard's file rules hold for submission.py, and each rule catches a file that breaks it."""

import random
import string
import subprocess
import sys
from pathlib import Path

import pytest

from bench import file_rules
from bench.file_rules import (
    FORBIDDEN_WORD,
    MAX_PACKED_CHARS,
    broken_rules,
    kernelguard_verdict,
    packed_chars,
    submit_command,
)
from tests.eval_stand_ins import REPLAY

SUBMISSION = Path(__file__).resolve().parents[1] / "submission.py"

GOOD = b"#!POPCORN leaderboard amd-mixed-mla\n#!POPCORN gpu MI355X\n\nimport torch\n"


def test_submission_keeps_every_rule():
    content = SUBMISSION.read_bytes()
    assert broken_rules(content) == []
    assert packed_chars(content) < MAX_PACKED_CHARS


def test_minimal_good_file_keeps_every_rule():
    assert broken_rules(GOOD) == []


def _incompressible(chars: int) -> bytes:
    letters = string.ascii_letters + string.digits
    return ("# " + "".join(random.Random(0).choices(letters, k=chars))).encode()


BAD = {
    "blank line inside the block": (GOOD.replace(b"\n#!POPCORN gpu", b"\n\n#!POPCORN gpu"), "outside the leading"),
    "code before the block": (b"import os\n" + GOOD, "begin with its comment block"),
    "blank line before the block": (b"\n" + GOOD, "begin with its comment block"),
    "docstring before the block": (b'"""Text."""\n' + GOOD, "begin with its comment block"),
    "no leaderboard": (GOOD.replace(b"#!POPCORN leaderboard amd-mixed-mla\n", b""), "leaderboard amd-mixed-mla"),
    "other leaderboard": (GOOD.replace(b"amd-mixed-mla", b"amd-mla-decode"), "leaderboard amd-mixed-mla"),
    "leaderboard in capitals": (GOOD.replace(b"amd-mixed-mla", b"AMD-mixed-mla"), "leaderboard amd-mixed-mla"),
    "no gpu": (GOOD.replace(b"#!POPCORN gpu MI355X\n", b""), "gpu MI355X"),
    "gpu in lower case": (GOOD.replace(b"MI355X", b"mi355x"), "gpu MI355X"),
    "two gpus in one line": (GOOD.replace(b"MI355X", b"MI355X MI300"), "gpu MI355X"),
    "another directive twice": (GOOD.replace(b"\n\n", b"\n#!POPCORN x y\n#!POPCORN x z\n\n"), "x' at most once"),
    "gpu twice": (GOOD.replace(b"gpu MI355X\n", b"gpu MI355X\n#!POPCORN gpu MI355X\n"), "exactly once"),
    "upper-case directive": (GOOD.replace(b"gpu", b"GPU"), "lower-case name"),
    "upper-case leaderboard directive": (GOOD.replace(b"leaderboard", b"Leaderboard"), "lower-case name"),
    "forbidden word": (GOOD + f"# up{FORBIDDEN_WORD}\n".encode(), "line 5"),
    "forbidden word in capitals": (GOOD + FORBIDDEN_WORD.upper().encode(), "line 5"),
    "not UTF-8": (GOOD + b"# \xff\n", "UTF-8"),
    "a million bytes": (GOOD + b"#" * 1_000_000, "under 1000000 bytes"),
    "too large when packed": (GOOD + _incompressible(60_000), "packed size"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_file_is_caught(name):
    content, expected = BAD[name]
    broken = broken_rules(content)
    assert any(expected in line for line in broken), broken


def test_kernelguard_does_not_filter_the_submission():
    assert kernelguard_verdict(SUBMISSION.read_bytes()) == (False, [])


def test_kernelguard_filters_replayed_output():
    filtered, patterns = kernelguard_verdict(REPLAY.encode())
    assert filtered and patterns
    assert broken_rules(REPLAY.encode()) == []


@pytest.mark.parametrize("answer", ["print('no')", "import time\ntime.sleep(9)", "import os\nos.write(2, b'\\xff')"])
def test_a_kernelguard_that_gives_no_verdict_is_an_error_with_a_reason(tmp_path, monkeypatch, answer):
    (tmp_path / "kernelguard.py").write_text(answer)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(file_rules, "KERNELGUARD_LIMIT_S", 0.5)
    with pytest.raises(RuntimeError, match="kernelguard: expected a"):
        kernelguard_verdict(GOOD)


def test_the_submit_command_quotes_the_files_name():
    assert submit_command("my file.py").endswith(" --mode leaderboard 'my file.py'")


def test_running_the_file_is_harmless(tmp_path):
    # The platform runs it once before every evaluation.
    done = subprocess.run([sys.executable, str(SUBMISSION)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
