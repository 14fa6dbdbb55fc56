"""`--compare` and `--plot`: noise is no verdict, what does not match is said, other files are refused by name."""

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from rich.console import Console
from typer.testing import CliRunner

from bench import cli, compare
from bench.compare import Change, ResultError, compare_case, load_result
from bench.fuzz_targets import InstantWorker
from bench.measure import time_summary
from tests.eval_stand_ins import ROOT

RECORDED = ROOT / "docs" / "data" / "bench_h200.json"


def entry(median_us, half_band=0.05, runs=50, reader_us=5.0, kv_bytes=576):
    band = {"p20_us": median_us * (1 - half_band), "p80_us": median_us * (1 + half_band)}
    times = {"runs": runs, "median_us": median_us, **band}
    return {"case": "2x64", "time": times, "reader_time": {"median_us": reader_us}, "kv_bytes": kv_bytes}


def result(**changes):
    return {"mode": "benchmark", "environment": {"device": "this"}, "cases": [entry(10.0)], **changes}


def run(*args):
    return CliRunner().invoke(cli.app, list(map(str, args)), prog_name="python eval.py")


@pytest.fixture
def instant(monkeypatch):
    monkeypatch.setattr(cli, "Worker", InstantWorker)
    return InstantWorker


# ---- the verdict ----


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (entry(10.0), entry(12.0), "slower"),
        (entry(12.0), entry(10.0), "faster"),
        (entry(10.0), entry(10.9), "within noise"),  # the bands overlap
        (entry(10.0, 0.001), entry(10.05, 0.001), "within noise"),  # apart, but half a per cent
        (entry(10.0, reader_us=5.0), entry(12.0, reader_us=6.5), "within noise"),  # the machine got slower by more
        (entry(10.0, reader_us=5.0), entry(12.0, reader_us=5.6), "within noise"),  # by as much but for the bands
        (entry(10.0, reader_us=5.0), entry(10.0, reader_us=7.0), "within noise"),  # as measured, nothing changed
        (entry(10.0, reader_us=5.0), entry(12.0, reader_us=3.9), "slower"),  # although the machine got faster
        (entry(10.0, reader_us=5.0), entry(20.0, reader_us=6.0), "slower"),  # by more than the machine
        (entry(10.0, 0.001, reader_us=5.0), entry(10.3, 0.001, reader_us=5.13), "within noise"),  # half a per cent more
        (entry(10.0, kv_bytes=576), entry(12.0, reader_us=9.0, kv_bytes=300), "slower"),  # another reader says nothing
        (entry(10.0, runs=50), entry(12.0, runs=9), "under 10 runs"),
    ],
)
def test_the_rule(old, new, verdict):
    assert compare_case("2x64", old, new).verdict == verdict


def measured(rng, median_us, noise, runs):
    times_ns = [1e3 * median_us * rng.lognormvariate(0, noise) for _ in range(runs)]
    reader_us = 5.0 * rng.lognormvariate(0, 0.001)
    return {**entry(1.0, reader_us=reader_us), "time": time_summary(times_ns)}


@pytest.mark.parametrize(("runs", "noise"), [(10, 0.05), (50, 0.2), (200, 0.01)])
def test_an_unchanged_kernel_is_within_noise_and_a_doubled_one_is_not(runs, noise):
    rng = random.Random(0)

    def verdicts(factor):
        return [
            compare_case("", measured(rng, 30, noise, runs), measured(rng, 30 * factor, noise, runs)).verdict
            for _ in range(300)
        ]

    assert verdicts(1.0).count("within noise") >= 0.97 * 300
    assert verdicts(2.0).count("slower") >= 0.97 * 300


times = st.builds(entry, st.floats(1, 1e4), st.floats(0, 0.5), st.integers(1, 99), st.floats(1, 1e4))


@given(times, times)
def test_old_and_new_exchanged_exchange_the_verdict(old, new):
    there, back = compare_case("", old, new), compare_case("", new, old)
    exchanged = {"faster": "slower", "slower": "faster"}
    assert back.verdict == exchanged.get(there.verdict, there.verdict)
    assert there.ratio * back.ratio == pytest.approx(1)


def test_a_result_is_within_noise_of_itself():
    recorded = load_result(RECORDED)
    comparison = compare.compare(recorded, recorded)
    assert len(comparison.changes) == 8 and comparison.differences == []
    assert {change.verdict for change in comparison.changes} <= {"within noise", "under 10 runs"}
    assert comparison.geomean_ratio == pytest.approx(1)


# ---- what does not match ----


def test_common_cases_are_compared_and_the_rest_is_named():
    old = result(environment={"device": "that", "torch": "2"}, mode="leaderboard", complete=False)
    old["cases"] = [{**entry(10.0), "arm": "a"}, {**entry(4.0), "case": "1x1"}, {"case": "3x3", "good": False}]
    new = result(environment={"device": "this", "torch": "2"})
    new["cases"] = [{**entry(20.0), "arm": "b"}, {**entry(4.0), "case": "3x3"}, entry(7.0)]
    comparison = compare.compare(old, new)
    assert [(change.case, change.ratio) for change in comparison.changes] == [("2x64", 2.0)]
    assert comparison.differences == [
        "mode: was leaderboard, now benchmark",
        "device: was that, now this",
        "the old run is incomplete",
        "timed in the old run only: 1x1",
        "timed in the new run only: 3x3, 2x64 (2)",
        "2x64, arm: was a, now b",
    ]


def test_a_case_measured_twice_is_compared_twice():
    two = result(cases=[entry(10.0), entry(20.0)])
    comparison = compare.compare(two, result(cases=[entry(10.0), entry(10.0)]))
    assert [(c.case, c.ratio) for c in comparison.changes] == [("2x64", 1.0), ("2x64 (2)", 0.5)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "expected the JSON of a timed mode in .*, got 'utf-8' codec"),
        (b"{", "expected the JSON of a timed mode in .*, got Expecting"),
        (b"[" * 100_000, "expected the JSON of a timed mode in .*, got maximum recursion"),
        (b"[1]", "expected a result of benchmark or leaderboard in .*, got 'list'"),
        (json.dumps(result(mode="test")).encode(), "expected a result of benchmark or leaderboard in .*, got 'test'"),
        (json.dumps(result(cases={})).encode(), "expected a list of cases and an environment"),
        (json.dumps(result(cases=[1])).encode(), "got 1 as case 0"),
        (json.dumps(result(cases=[entry(10.0), entry(-1.0)])).encode(), "as case 1"),
        (json.dumps(result(cases=[entry(10.0, runs=True)])).encode(), "as case 0"),
        (json.dumps(result(cases=[entry(10.0, runs=10**400)])).encode(), "as case 0"),
        (json.dumps(result(cases=[entry(10.0, half_band=-0.1)])).encode(), "as case 0"),
        (json.dumps(result(cases=[{**entry(10.0), "kv_bytes": None}])).encode(), "as case 0"),
        (json.dumps(result(cases=[{**entry(10.0), "reader_time": {}}])).encode(), "as case 0"),
    ],
)
def test_a_file_that_is_no_result_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "old.json"
    path.write_bytes(content)
    with pytest.raises(ResultError, match=message):
        load_result(path)
    done = run("benchmark", "--compare", path)
    assert done.exit_code == 2 and "--compare" in done.stderr


def test_nothing_in_common_is_refused_before_any_work(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(result()))
    done = run("benchmark", "--case", "3x7", "--compare", path)
    assert done.exit_code == 2 and "expected a time of 3x7" in done.stderr


# ---- through the command line ----


@pytest.mark.parametrize("mode", ["benchmark", "leaderboard"])
def test_a_slower_run_is_told_and_does_not_fail(tmp_path, instant, monkeypatch, mode):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    assert run(mode, "--case", "2x64", "--case", "3x64", "--json", old).exit_code == 0
    monkeypatch.setattr(instant, "time_ns", 8000.0)
    # InstantWorker's reader is as much slower, as it would be on a slower machine.
    done = run(mode, "--case", "2x64", "--case", "3x64", "--compare", old)
    assert done.exit_code == 0 and done.stdout.count("within noise") == 2
    document = json.loads(old.read_text())
    for case in document["cases"]:
        case["reader_time"]["median_us"] = 4.0
    old.write_text(json.dumps(document))
    done = run(mode, "--case", "2x64", "--case", "3x64", "--compare", old, "--json", new)
    assert done.exit_code == 0
    for label in ("2x64", "3x64"):
        assert re.search(rf"│ {label} +│ +4\.0 .* 8\.0 .* 1\.99\d │ +1\.000 │ slower ", done.stdout)
    compared = json.loads(new.read_text())["comparison"]
    assert compared["old"] == "old.json" and [c["verdict"] for c in compared["changes"]] == ["slower"] * 2
    assert compared["geomean_ratio"] == pytest.approx(8000 / 4000, rel=1e-2)


def test_the_plot_is_drawn_with_the_old_result_in_it(tmp_path, instant, monkeypatch):
    from bench import roofline

    seen = {}

    def draw(picture, times_us, styles, environment):
        seen.update(times_us=times_us, names=list(styles))
        return drawn(picture, times_us, styles, environment)

    drawn = roofline.draw
    monkeypatch.setattr(roofline, "draw", draw)
    old, picture = tmp_path / "old.json", tmp_path / "times.png"
    old.write_text(json.dumps(result()))
    done = run("benchmark", "--case", "2x64", "--case", "3x64", "--compare", old, "--plot", picture)
    assert done.exit_code == 0, done.output
    assert imread(picture).shape[1] > 1000
    assert seen["names"] == ["reader", "submission.py", "old.json"]
    assert seen["times_us"] == {
        "2x64": {"reader": 2.0, "submission.py": pytest.approx(4.0, rel=1e-2), "old.json": 10.0},
        "3x64": {"reader": 2.0, "submission.py": pytest.approx(4.0, rel=1e-2)},
    }


def test_a_plot_that_cannot_be_is_refused_before_any_work(tmp_path):
    done = run("benchmark", "--plot", tmp_path / "times.xyz")
    assert done.exit_code == 2 and "expected a name that ends in one of" in done.stderr
    done = run("benchmark", "--plot", tmp_path / "none" / "times.png")
    assert done.exit_code == 2 and "expected a place to write to" in done.stderr
    (tmp_path / "link").symlink_to(tmp_path)
    done = run("benchmark", "--plot", tmp_path / "x.svg", "--json", tmp_path / "link" / "x.svg")
    assert done.exit_code == 2 and "expected another file than that of --json" in done.stderr


def test_a_name_that_looks_like_markup_is_shown_as_it_is():
    change = Change("[red]x", {"median_us": 1, "p20_us": 1, "p80_us": 1}, entry(1.0)["time"], 1.0, None, "within noise")
    table = compare.comparison_table(compare.Comparison([change], 1.0, ["device: was [b], now c"]), "[i].json")
    console = Console(width=200)
    with console.capture() as shown:
        console.print(table)
    assert all(word in shown.get() for word in ("[red]x", "[b]", "[i].json"))
