"""The pages of docs/ are true: their examples run and compute what they say, their links and commands exist."""

import os
import re
import shlex
import subprocess
import sys

import pytest

import reference
import submission
from reference import relative_error
from tests.eval_stand_ins import ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))
SERVING_LOOP, NEW_ROW = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adapting.md").read_text(), re.DOTALL)


@pytest.fixture(autouse=True)
def no_plans(monkeypatch):
    monkeypatch.setattr(submission, "_PLANS", {})
    monkeypatch.setattr(submission, "TABLE", submission.TABLE)


def test_serving_loop_stays_one_shape_and_is_right(capsys):
    names = {}
    exec(SERVING_LOOP, names)
    data = tuple(names[x] for x in ("q", "kv_data", "qo_indptr", "kv_indptr", "config"))
    assert len(set(map(len, names["caches"]))) == 4
    assert relative_error(names["output"], reference.oracle(data, submission.last_run().kv)) < 3e-3
    assert len(submission._PLANS) == 1
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_row_of_a_new_shape_is_taken(no_gpu):
    before = submission.TABLE
    exec(NEW_ROW, {})
    assert submission.TABLE[1:] == before
    assert submission.last_run().arm == "torch_bmm"
    submission.custom_kernel(reference.generate_input(3, 1, 101, seed=1))
    assert submission.last_run().arm == "torch_chunked"


def test_changelog_begins_with_the_version_of_the_project():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    latest = re.search(r"^## ([\d.]+) ", (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.search(rf'^version = "{re.escape(latest[1])}"$', project, re.MULTILINE)


def test_design_lists_every_arm():
    rows = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs" / "design.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert listed == set(submission.ARMS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_modules_exist(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert "://" in link or (page.parent / link.split("#")[0]).exists(), link
    for name in re.findall(r"`(?:docs|tests|bench)/[\w./]+`", text):
        assert (ROOT / name.strip("`")).exists(), name


def documented_commands() -> list[str]:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    return sorted(set(re.findall(r"python -m bench\.[^`\n]+", text)))


@pytest.mark.parametrize("module", sorted({line.split()[2] for line in documented_commands()}))
def test_module_commands_know_their_options(module):
    done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "COLUMNS": "200"})  # fmt: skip
    assert done.returncode == 0 and "Usage" in done.stdout, done.stderr
    for line in documented_commands():
        words = shlex.split(line)
        for option in words[3:] if words[2] == module else []:
            if option.startswith("--"):
                assert re.search(rf"(?<![\w-]){option}(?![\w-])", done.stdout), (line, option)
