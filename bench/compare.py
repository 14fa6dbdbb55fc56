"""Compares two results of `eval.py benchmark` or `leaderboard`, case by case, without calling noise a change."""

import json
import math
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

LEAST_CHANGE = 0.01
# Of ten runs each of one unchanged kernel, one pair in a hundred has bands that lie apart; of five, nine. On a machine
# whose speed drifts between processes more do.
MIN_RUNS = 10
RULE = (
    f"faster or slower if, with {MIN_RUNS} runs each, the bands from p20 to p80 lie apart and the medians differ by "
    f"{100 * LEAST_CHANGE:g} % or more, as measured and also after the reader's change, the machine's, is taken out"
)
_COLOURS = {"faster": "green", "slower": "red"}


class ResultError(ValueError):
    """A file that holds no result of a timed mode."""


@dataclass(frozen=True)
class Change:
    """One case measured twice: the results' `time` entries, and new over old of the medians, above 1 if slower.

    `reader_ratio` is None where the two runs read another number of bytes.
    """

    case: str
    old: dict[str, float]
    new: dict[str, float]
    ratio: float
    reader_ratio: float | None
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """The cases both results hold, the geometric mean of their ratios, and what keeps the two from being alike."""

    changes: list[Change]
    geomean_ratio: float
    differences: list[str]


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _is_case(case: Any) -> bool:
    if not isinstance(case, dict) or not isinstance(case.get("case"), str):
        return False
    if "time" not in case:
        return True
    own, reader = case["time"], case.get("reader_time")
    if not isinstance(own, dict) or not isinstance(reader, dict) or not _is_time(case.get("kv_bytes")):
        return False
    figures = [own.get(name) for name in ("runs", "p20_us", "median_us", "p80_us")]
    return (
        all(map(_is_time, [*figures, reader.get("median_us")])) and own["p20_us"] <= own["median_us"] <= own["p80_us"]
    )


def load_result(path: Path) -> dict[str, Any]:
    """The document a timed mode wrote with `--json`; raises ResultError saying what is wrong with the file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ResultError(f"expected the JSON of a timed mode in {str(path)!r}, got {error}") from error
    if not isinstance(document, dict) or document.get("mode") not in ("benchmark", "leaderboard"):
        mode = document.get("mode") if isinstance(document, dict) else type(document).__name__
        raise ResultError(f"expected a result of benchmark or leaderboard in {str(path)!r}, got {mode!r:.100}")
    cases = document.get("cases")
    if not isinstance(cases, list) or not isinstance(document.get("environment"), dict):
        raise ResultError(f"expected a list of cases and an environment in {str(path)!r}, got none")
    for index, case in enumerate(cases):
        if not _is_case(case):
            raise ResultError(f"expected cases with their times in {str(path)!r}, got {case!r:.100} as case {index}")
    return document


def timed_cases(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The timed cases by label; a case measured twice is two, the second `32x8192 (2)`."""
    seen: Counter[str] = Counter()
    timed = {}
    for case in document["cases"]:
        if "time" in case:
            seen[case["case"]] += 1
            count = seen[case["case"]]
            timed[case["case"] + (f" ({count})" if count > 1 else "")] = case
    return timed


def _judge(before: dict[str, float], now: dict[str, float], scale: float) -> str:
    """The verdict where the machine alone would have made `scale` of every old time."""
    ratio = now["median_us"] / (before["median_us"] * scale)
    if now["p20_us"] > before["p80_us"] * scale and ratio >= 1 + LEAST_CHANGE:
        return "slower"
    if now["p80_us"] < before["p20_us"] * scale and 1 / ratio >= 1 + LEAST_CHANGE:
        return "faster"
    return "within noise"


def compare_case(label: str, old: dict[str, Any], new: dict[str, Any]) -> Change:
    """Judge two entries of one case by RULE."""
    before, now = old["time"], new["time"]
    reader_ratio = None
    if old["kv_bytes"] == new["kv_bytes"]:
        reader_ratio = new["reader_time"]["median_us"] / old["reader_time"]["median_us"]
    if min(before["runs"], now["runs"]) < MIN_RUNS:
        verdict = f"under {MIN_RUNS} runs"
    else:
        verdict = _judge(before, now, 1.0)
        if verdict != _judge(before, now, reader_ratio or 1.0):
            verdict = "within noise"
    return Change(label, before, now, now["median_us"] / before["median_us"], reader_ratio, verdict)


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    def said(name: str, before: Any, now: Any) -> list[str]:
        return [] if before == now else [f"{name}: was {before}, now {now}"]

    found = said("mode", old["mode"], new["mode"])
    for name in dict.fromkeys([*old["environment"], *new["environment"]]):
        if name != "on_gpu":
            found += said(name, *(document["environment"].get(name, "not said") for document in (old, new)))
    if not old.get("complete", True):
        found.append("the old run is incomplete")
    before, now = timed_cases(old), timed_cases(new)
    for one, other, where in ((before, now, "old"), (now, before, "new")):
        if only := ", ".join(label for label in one if label not in other):
            found.append(f"timed in the {where} run only: {only}")
    for label in filter(now.__contains__, before):
        for name in ("arm", "kv"):
            found += said(f"{label}, {name}", before[label].get(name), now[label].get(name))
    return found


def compare(old: dict[str, Any], new: dict[str, Any]) -> Comparison:
    """Compare what two documents of `load_result` have in common."""
    before, now = timed_cases(old), timed_cases(new)
    changes = [compare_case(label, before[label], now[label]) for label in before if label in now]
    mean = statistics.geometric_mean([change.ratio for change in changes]) if changes else math.nan
    return Comparison(changes, mean, _differences(old, new))


def comparison_table(comparison: Comparison, name: str) -> Table:
    """One row a case, the geometric mean of the ratios, and what else differs."""
    table = Table(title=escape(f"against {name}: median microseconds, p20 to p80"), caption_justify="left")
    table.add_column("case", no_wrap=True)
    for column in ("old", "", "new", "", "new / old", "reader's"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for change in comparison.changes:
        times = (change.old, change.new)
        table.add_row(
            escape(change.case),
            *(text for t in times for text in (f"{t['median_us']:.1f}", f"{t['p20_us']:.1f} to {t['p80_us']:.1f}")),
            f"{change.ratio:.3f}",
            "-" if change.reader_ratio is None else f"{change.reader_ratio:.3f}",
            f"[{_COLOURS.get(change.verdict, 'default')}]{change.verdict}[/]",
        )
    if comparison.changes:
        table.add_section()
        table.add_row("geometric mean", "", "", "", "", f"{comparison.geomean_ratio:.3f}")
    table.caption = escape("\n".join([RULE, *comparison.differences]))
    return table
