"""The leaderboard's rules for the submission file, as the platform and its client apply them.

`broken_rules` needs only the file's bytes. `kernelguard_verdict` asks the PyPI package `kernelguard`, the platform's
static pre-check. `submit_command` is what the client wants to hear.
"""

import base64
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import zlib

LEADERBOARD = "amd-mixed-mla"
GPU = "MI355X"
REQUIRED = {"leaderboard": LEADERBOARD, "gpu": GPU}

MAX_BYTES = 1_000_000
# The request travels as base64 of zlib in one field of 65,535 characters, of which the official files leave about this.
MAX_PACKED_CHARS = 48_000
KERNELGUARD_LIMIT_S = 120
FORBIDDEN_WORD = "".join(("str", "eam"))


def submit_command(path: str, mode: str = "leaderboard") -> str:
    """The client's command line for the file at `path`."""
    return f"popcorn submit --no-tui --gpu {GPU} --leaderboard {LEADERBOARD} --mode {mode} {shlex.quote(path)}"


def packed_chars(content: bytes) -> int:
    """Characters the file takes in the platform's request: base64 of zlib."""
    return len(base64.b64encode(zlib.compress(content)))


def _broken_header_rules(text: str) -> list[str]:
    lines = text.splitlines()
    header = []
    for line in lines:
        if not line.startswith("#"):
            break
        header.append(line)
    broken = []
    if not header:
        broken.append("header: expected the file to begin with its comment block")
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        directive = re.match(r"\s*#!POPCORN\b\s*(\S*)\s*(.*)", line, re.IGNORECASE)
        if directive is None:
            continue
        if number > len(header):
            broken.append(f"header: line {number} is a directive outside the leading comment block")
            continue
        if not re.fullmatch(r"#!POPCORN [a-z]+ \S.*", line):
            broken.append(
                f"header: line {number}: expected '#!POPCORN name value' with a lower-case name, got {line!r}"
            )
        found.setdefault(directive[1].lower(), []).append(directive[2].strip())
    for name, value in REQUIRED.items():
        values = found.pop(name, [])
        if values != [value]:
            broken.append(f"header: expected '#!POPCORN {name} {value}' exactly once, got {values or 'none'}")
    for name, values in found.items():
        if len(values) > 1:
            broken.append(f"header: expected '#!POPCORN {name}' at most once, got {values}")
    return broken


def broken_rules(content: bytes) -> list[str]:
    """One line for each broken rule, naming what was expected and what was found; empty for a good file."""
    broken = []
    if len(content) >= MAX_BYTES:
        broken.append(f"size: expected under {MAX_BYTES} bytes, got {len(content)}")
    if packed_chars(content) > MAX_PACKED_CHARS:
        broken.append(f"packed size: expected at most {MAX_PACKED_CHARS} characters, got {packed_chars(content)}")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        return [*broken, f"encoding: expected UTF-8, got {error}"]
    for number, line in enumerate(text.splitlines(), 1):
        if FORBIDDEN_WORD in line.lower():
            broken.append(f"forbidden word: expected no {FORBIDDEN_WORD!r} in any case, got it in line {number}")
    return broken + _broken_header_rules(text)


def kernelguard_verdict(content: bytes) -> tuple[bool, list[str]] | None:
    """(filtered, one line for each matched pattern), or None where kernelguard is not installed.

    Raises RuntimeError if kernelguard does not answer.
    """
    if importlib.util.find_spec("kernelguard") is None:
        return None
    command = [sys.executable, "-m", "kernelguard", "--api-mode"]
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=KERNELGUARD_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"kernelguard: expected a verdict within {KERNELGUARD_LIMIT_S} s, got none") from error
    try:
        answer = json.loads(done.stdout)
        patterns = [f"{found['pattern']}: {found['evidence']}" for found in answer["matched_patterns"]]
        return answer["should_filter"], patterns
    except (ValueError, KeyError, TypeError) as error:
        said = done.stderr.decode(errors="backslashreplace")[-500:]
        raise RuntimeError(f"kernelguard: expected a JSON verdict, got {said!r}") from error
