"""The README is true: its commands parse, its cheap ones run, its paths exist, and CI runs the set-up it describes."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
import typer

import submission
from bench import cli, options
from bench.file_rules import submit_command
from tests.eval_stand_ins import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
SET_UP = [line for line in COMMANDS if "venv" in line]
EVAL = [part for line in COMMANDS for part in line.split(" && ") if part.startswith("python eval.py")]
MODULES = [line for line in COMMANDS if line.startswith("python -m bench.")]
SUBMIT = [line for line in COMMANDS if line.startswith("popcorn ")]
# Written by the commands above them, so not in the repository.
MADE_BY_COMMANDS = {"result.json", "times.png", "peers.json"}


def test_every_command_is_of_a_kind_these_tests_know():
    assert COMMANDS and EVAL and MODULES and SUBMIT
    assert set(COMMANDS) == {*SET_UP, *(one for one in EVAL if one in COMMANDS), *MODULES, *SUBMIT}


def test_ci_runs_the_two_set_up_commands_word_for_word():
    assert len(SET_UP) == 2
    for line in SET_UP:
        assert f"\n{line} || exit\n" in CI
    work = [line for line in CI.splitlines() if re.match(r"(python|pip|\.|ruff|mypy)", line)]
    assert work == [f"{SET_UP[1]} || exit", "ruff check .", "ruff format --check .", "mypy", f"{SET_UP[0]} || exit"]
    subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=True)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_ci_ends_with_what_was_skipped_and_why(tmp_path):
    skipping = "import pytest\n\n@pytest.mark.parametrize('n', range(3))\ndef test_it(n):\n    pytest.skip('a & b')\n"
    (tmp_path / "test_skipping.py").write_text(skipping)
    (tmp_path / "skipped").write_text("not compared: x\n")
    junit = ["--junitxml", tmp_path / "tests.xml", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path]
    subprocess.run([sys.executable, "-m", "pytest", *junit, tmp_path], check=True, capture_output=True)
    (function,) = re.findall(r"^skipped\(\) \{\n.*?^\}$", CI, re.DOTALL | re.MULTILINE)
    script = f"set -euo pipefail\nwork={shlex.quote(str(tmp_path))}\n{function}\ntrap skipped EXIT\nexit 3\n"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.splitlines() == [
        "== skipped, and why",
        "    3 tests: a & b",
        "    3 tests in all",
        "not compared: x",
    ]


def test_set_up_commands_install_what_the_project_declares():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for line in SET_UP:
        (extra,) = re.findall(r'pip install -e "\.\[(\w+)\]"', line)
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)
    triton = re.search(r"triton==[\d.]+", project)[0]
    fa3 = re.search(r"fa3-fwd==[\d.]+", (ROOT / "bench" / "peers.py").read_text(encoding="utf-8"))[0]
    assert triton in README and fa3 in README


@pytest.mark.parametrize("line", EVAL)
def test_eval_command_parses(line, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    words = [str(tmp_path / word) if word in MADE_BY_COMMANDS else word for word in shlex.split(line)[2:]]
    (tmp_path / "result.json").touch()
    if "--help" in words:
        done = subprocess.run([sys.executable, "eval.py", *words], capture_output=True, text=True)
        assert done.returncode == 0 and all(mode in done.stdout for mode in ("test", "benchmark", "leaderboard"))
        return
    command = typer.main.get_command(cli.app).commands[words[0]]
    context = command.make_context(words[0], words[1:])
    if "case" in context.params:
        cases = options.choose_cases(words[0], context.params["case"], context.params["cases"])
        assert cases
        if backend := context.params["backend"]:
            for args in cases:
                sizes = args["batchsize"], args["qseqlen"], args["kvseqlen"]
                problem = submission.Problem(torch.device("cpu"), *sizes, 1.0, True, False, True, True, True)
                assert submission.ARMS[backend].why_not(problem) is None


@pytest.mark.parametrize("line", MODULES)
def test_module_command_knows_its_options(line):
    words = shlex.split(line)
    env = {**os.environ, "COLUMNS": "200"}
    run = [sys.executable, *words[1:3], "--help"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0
    for option in filter(lambda word: word.startswith("--"), words):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", done.stdout), option


def test_submit_commands_are_the_ones_the_file_rules_give():
    assert [submit_command("submission.py", mode) for mode in ("test", "leaderboard")] == SUBMIT


def test_every_path_exists():
    code = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL))
    words = {word for text in [*code, *COMMANDS] for word in text.split()}
    paths = {word for word in words if re.fullmatch(r"[\w./-]+\.(py|md|toml|json|png)|[\w-]+/|LICENSE|\.ci/run", word)}
    links = {link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link}
    assert {"submission.py", "eval.py", "LICENSE"} <= paths
    for path in (paths | links) - MADE_BY_COMMANDS:
        assert (ROOT / path.split("#")[0]).exists(), path


def test_environment_variables_and_options_in_the_text_exist():
    sources = "".join(
        (ROOT / name).read_text(encoding="utf-8") for name in ("eval.py", "submission.py", "bench/cli.py")
    )
    text = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    for name in re.findall(r"`([A-Z]+_[A-Z_]+|--[a-z]+)`", text):
        assert name in sources, name
