"""A short form of `bench.fuzz`, and that it finds faults where they are."""

import pytest

import eval as evaluator
import submission
from bench import cli, fuzz, fuzz_targets, options


@pytest.mark.parametrize(("name", "inputs"), [("case files", 300), ("command line", 150), ("custom_kernel", 150)])
def test_random_inputs_are_served_or_refused(name, inputs):
    outcome = fuzz.fuzz_target(fuzz_targets.TARGETS[name], inputs, seed=1)
    assert outcome.error is None, f"{outcome.failing!r}: {outcome.error!r}"
    assert outcome.tried == inputs


def let_zero_pass(name, word):
    return int(word) if word.isdigit() else evaluator.CASE_RANGES[name][0]


def raise_a_foreign_error(*_):
    raise ValueError("boom")


def exit_quietly(*_, **__):
    raise SystemExit(112)


def say_nothing_of_the_argument(*_):
    raise IndexError("Dimension out of range")


def read_rows_as_if_they_followed_each_other(data, custom_kernel=submission.custom_kernel):
    output = custom_kernel(data)
    return output if data[0].is_contiguous() else output.roll(1, 0) + 1


FAULTS = {
    "case file parser": ("case files", evaluator, "_case_value", let_zero_pass),
    "foreign error of an option": ("command line", options, "parse_case_word", raise_a_foreign_error),
    "no reason": ("command line", cli, "choose_cases", exit_quietly),
    "foreign error": ("custom_kernel", submission, "check_arguments", raise_a_foreign_error),
    "no check": ("custom_kernel", submission, "check_arguments", lambda data: None),
    "deaf to strides": ("custom_kernel", submission, "custom_kernel", read_rows_as_if_they_followed_each_other),
    "no words": ("custom_kernel", submission, "check_arguments", say_nothing_of_the_argument),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found_and_shown_small(name, monkeypatch):
    target, owner, attribute, fault = FAULTS[name]
    monkeypatch.setattr(owner, attribute, fault)
    outcome = fuzz.fuzz_target(fuzz_targets.TARGETS[target], 400, seed=1)
    assert outcome.error is not None
    assert len(repr(outcome.failing)) < 150


def test_the_command_counts_its_inputs_and_fails_with_the_smallest_one(monkeypatch, capsys):
    def refuse_seven(given):
        assert given < 7

    small = fuzz_targets.Target(fuzz_targets.st.integers(0, 1000), refuse_seven, 0.5)
    good = fuzz_targets.Target(fuzz_targets.st.integers(0, 10**9), lambda given: None, 0.5)
    monkeypatch.setattr(fuzz_targets, "TARGETS", {"small": small, "good": good})
    with pytest.raises(fuzz.typer.Exit) as end:
        fuzz.main(inputs=100, seed=5)
    shown = capsys.readouterr().out
    assert end.value.exit_code == 112
    assert "FAIL small: " in shown and "smallest failing input: 7\n" in shown
    assert "│ good   │ 50 " in shown and "seed 5" in shown
