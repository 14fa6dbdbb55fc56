"""Properties of `build_schedule`, checked by an independent reading of the work lists, and AITER's own schedules."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.schedules import Schedule, fast_schedule, intra_batch_schedule, main, summary, tokens_per_cu
from submission import build_schedule, schedule_fault, split_count
from task import BENCHMARKS

DOCS = Path(__file__).resolve().parents[1] / "docs" / "aiter.md"
SHAPES = [(case["batchsize"], case["kvseqlen"]) for case in BENCHMARKS]
# Busy CUs and most tokens on one CU of the library's two rules, as its executed metadata ops gave them.
LIBRARY = {
    (4, 1024): ((20, 208), (128, 32)),
    (4, 8192): ((128, 256), (228, 144)),
    (32, 1024): ((160, 208), (224, 160)),
    (32, 8192): ((256, 1024), (256, 1056)),
    (64, 1024): ((256, 256), (256, 320)),
    (64, 8192): ((256, 2048), (256, 2112)),
    (256, 1024): ((256, 1024), (256, 1024)),
    (256, 8192): ((256, 8192), (256, 8192)),
}


def items_of_sequences(schedule: Schedule, batch: int) -> list[list[list[int]]]:
    sequences = [[] for _ in range(batch)]
    for item in schedule["work_info_set"]:
        sequences[item[0]].append(item)
    return [sorted(x, key=lambda item: item[4]) for x in sequences]


def check_coverage(schedule: Schedule, batch: int, kv_len: int, num_cu: int) -> None:
    """Every token in exactly one item, and the pointers and maps of all lists consistent."""
    assert len(schedule["work_indptr"]) == num_cu + 1
    assert schedule["work_indptr"][0] == 0 and schedule["work_indptr"][-1] == len(schedule["work_info_set"])
    assert schedule["work_indptr"] == sorted(schedule["work_indptr"])
    assert schedule["reduce_indptr"][0] == 0 and schedule["reduce_indptr"][-1] == len(schedule["reduce_partial_map"])
    assert len(schedule["reduce_indptr"]) == batch + 1
    assert schedule["reduce_final_map"] == [[b, b + 1] for b in range(batch)]
    for b, items in enumerate(items_of_sequences(schedule, batch)):
        position = b * kv_len
        for _, _, q_start, q_end, start, end, rest, pad in items:
            assert (q_start, q_end, pad) == (b, b + 1, 0)
            assert start == position and end > start and rest == (b + 1) * kv_len - end
            position = end
        assert position == (b + 1) * kv_len
        rows = schedule["reduce_partial_map"][schedule["reduce_indptr"][b] : schedule["reduce_indptr"][b + 1]]
        if len(items) == 1:
            assert items[0][1] == -1 and not rows
        else:
            assert [item[1] for item in items] == rows
    assert len(set(schedule["reduce_partial_map"])) == len(schedule["reduce_partial_map"])


def check_items(schedule: Schedule, batch: int, kv_len: int, num_cu: int, tile: int) -> None:
    """Balance, order on a CU, and the items that the kernels were reported or seen to get wrong."""
    mean = batch * kv_len / num_cu
    tokens = tokens_per_cu(schedule)
    sequences = items_of_sequences(schedule, batch)
    assert max(tokens) <= mean + tile
    assert min(tokens) > mean - tile
    for a, b in pairwise(schedule["work_indptr"]):
        order = [(item[0], item[4]) for item in schedule["work_info_set"][a:b]]
        assert order == sorted(order)
    for items in sequences:
        assert len(items) != 16
        lengths = [item[5] - item[4] for item in items]
        if kv_len >= 4:
            assert all(length % 16 not in (1, 2, 3) for length in lengths)
        if tile % 128 == 0:
            assert all(length < 128 or length // 128 % 2 == 1 for length in lengths)


def fault_of(schedule: Schedule, kv_len: int, tile: int) -> str | None:
    batch = len(schedule["reduce_final_map"])
    return schedule_fault(schedule["work_indptr"], schedule["work_info_set"], batch, kv_len, tile)


batches = st.integers(1, 512)
near_tiles = st.builds(lambda tiles, extra: 128 * tiles + extra, st.integers(1, 540), st.integers(0, 4))
lengths = st.integers(1, 70_000) | st.integers(1, 600) | near_tiles
tiles = st.sampled_from([16, 32, 64, 128, 256])


@settings(max_examples=150, deadline=None)
@given(batches, lengths, st.sampled_from([256, 304, 80, 17]), tiles)
@example(256, 1025, 256, 128)
@example(255, 8192, 256, 128)
@example(1, 70_000, 256, 128)
@example(16, 256, 256, 16)
@example(1, 256, 256, 16)
@example(1, 2048, 80, 128)
@example(1, 17, 256, 128)
@example(1, 33, 256, 32)
@example(4, 1026, 256, 128)
@example(512, 3, 256, 16)
def test_every_token_once_balanced_and_no_bad_item(batch, kv_len, num_cu, tile):
    schedule = build_schedule(batch, kv_len, num_cu, tile)
    check_coverage(schedule, batch, kv_len, num_cu)
    check_items(schedule, batch, kv_len, num_cu, tile)
    fault, most_items = fault_of(schedule, kv_len, tile), summary(schedule)[2]
    if kv_len < 4:
        assert fault.endswith("a tail under 4")
    else:
        # Only items of two or more 128-token tiles are cut for their number.
        assert most_items <= num_cu or tile % 128 == 0
        assert fault == (None if most_items <= num_cu else f"sequence 0 is in {most_items} items")


@pytest.mark.parametrize("batch, kv_len", SHAPES)
@pytest.mark.parametrize("tile", [16, 32, 64, 128])
def test_official_shapes(batch, kv_len, tile):
    schedule = build_schedule(batch, kv_len, 256, tile)
    check_coverage(schedule, batch, kv_len, 256)
    check_items(schedule, batch, kv_len, 256, tile)
    busy, most, _ = summary(schedule)
    assert busy == min(256, batch * kv_len // tile)
    assert most == max(tile, batch * kv_len // 256)
    # The a8w8 kernel's tile cuts even a sequence that has a CU to itself.
    assert bool(schedule["reduce_partial_map"]) == (batch < 256 or tile == 128)
    assert fault_of(schedule, kv_len, tile) is None


def test_small_case_fills_half_the_machine():
    assert summary(build_schedule(4, 1024, 256, 32))[0] == 128


def test_a_sequence_with_a_bad_tail_is_cut_even_alone_on_its_cu():
    schedule = build_schedule(256, 1025, 256, 128)
    assert {item[5] - item[4] for item in schedule["work_info_set"]} == {8, 1017}
    assert summary(schedule)[:2] == (256, 1025)


def test_a_sequence_alone_on_its_cu_is_cut_into_odd_numbers_of_tiles():
    schedule = build_schedule(256, 8192, 256, 128)
    assert {item[5] - item[4] for item in schedule["work_info_set"]} == {128, 63 * 128}
    assert summary(schedule) == (256, 8192, 2)


@pytest.mark.parametrize(
    "batch, kv_len, fits", [(1, 32_895, True), (1, 32_896, False), (1, 70_000, False), (300, 4096, True)]
)
def test_more_items_than_the_reduce_takes_are_found(batch, kv_len, fits):
    # 70,000 tokens on 256 CUs are two tiles and a bit each, and most are cut.
    schedule = build_schedule(batch, kv_len, 256, 128)
    most_items = summary(schedule)[2]
    assert (most_items <= 256) == fits
    assert fault_of(schedule, kv_len, 128) == (None if fits else f"sequence 0 is in {most_items} items")


@pytest.mark.parametrize("argument, bad", [("batch", 0), ("kv_len", 0), ("num_cu", 16), ("tile", 24), ("tile", 0)])
def test_bad_argument_is_named(argument, bad):
    with pytest.raises(ValueError, match=f"{argument}: expected .*, got {bad}"):
        build_schedule(**{"batch": 4, "kv_len": 1024, "num_cu": 256, "tile": 64} | {argument: bad})


@pytest.mark.parametrize("batch, kv_len", SHAPES)
def test_library_rules_reproduce_what_it_leaves_idle(batch, kv_len):
    for schedule, expected in zip(
        (intra_batch_schedule(batch, kv_len), fast_schedule(batch, kv_len)), LIBRARY[batch, kv_len], strict=True
    ):
        assert summary(schedule)[:2] == expected
        assert fault_of(schedule, kv_len, tile=16) is None
    even = fault_of(intra_batch_schedule(batch, kv_len), kv_len, tile=128)
    assert even is None if kv_len == 1024 and batch < 64 else "an even number of 128-token tiles" in even


def _edit(schedule: Schedule, index: int, *changes: tuple[int, int]) -> Schedule:
    """With these (field, value) in one item."""
    items = [[*item] for item in schedule["work_info_set"]]
    for field, value in changes:
        items[index][field] = value
    return schedule | {"work_info_set": items}


GOOD = build_schedule(4, 1024, 256, 32)  # 32 items of 32 tokens a sequence
WHOLE = build_schedule(256, 1024, 256, 32)
FAULTS = {
    "gap": (_edit(GOOD, 3, (4, 100)), "do not cover"),
    "overlap": (_edit(GOOD, 3, (4, 80)), "do not cover"),
    "left out": (GOOD | {"work_indptr": [0] * 256 + [127]}, "do not cover"),
    "empty item": (_edit(GOOD, 3, (5, 96), (6, 928)), "tokens 96 to 96"),
    "reversed item": (_edit(GOOD, 3, (5, 64), (6, 960)), "tokens 96 to 64"),
    "wrong query": (_edit(GOOD, 3, (2, 1)), "queries 1 to 1"),
    "wrong sequence": (
        _edit(GOOD, 3, (0, 1), (2, 1), (3, 2), (6, 1920)),
        "sequence 1 has queries 1 to 2, tokens 96 to",
    ),
    "wrong rest": (_edit(GOOD, 3, (6, -1)), "tokens 96 to 128, then -1"),
    "past its sequence": (_edit(_edit(GOOD, 31, (5, 1040), (6, -16)), 32, (4, 1040)), "tokens 992 to 1040, then -16"),
    "tail of one": (_edit(_edit(GOOD, 3, (5, 113), (6, 911)), 4, (4, 113)), "17 tokens, a tail under 4"),
    "direct write of a part": (_edit(GOOD, 3, (1, -1)), "in 32 items, one with the partial row -1"),
    "partial row of a whole": (_edit(WHOLE, 3, (1, 0)), "in 1 items, one with the partial row 0"),
    "16 splits": (intra_batch_schedule(16, 16 * 196, max_split=16), "is in 16 items"),
    "falling pointers": (GOOD | {"work_indptr": [1, *GOOD["work_indptr"][1:]]}, "does not rise"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name):
    schedule, message = FAULTS[name]
    kv_len = schedule["work_info_set"][-1][5] // len(schedule["reduce_final_map"])
    assert message in fault_of(schedule, kv_len, tile=16)


def test_library_never_divides_by_zero_here():
    with pytest.raises(ZeroDivisionError):
        intra_batch_schedule(4, 195)


@settings(max_examples=100, deadline=None)
@given(batches, lengths)
def test_split_count_is_never_16_and_never_slower_than_one_fewer(batch, kv_len):
    splits = split_count(batch, kv_len, 256)
    blocks = -(-kv_len // 64)
    assert 1 <= splits <= min(15, blocks)
    longest = -(-blocks // splits)
    assert splits == 1 or -(-blocks // (splits - 1)) > longest
    assert all(-(-blocks // s) >= longest for s in range(1, max(2, min(15, 256 // batch, blocks) + 1)))


def test_split_count_of_the_official_shapes():
    assert [split_count(b, s_kv, 256) for b, s_kv in SHAPES] == [8, 15, 8, 8, 4, 4, 1, 1]


def test_docs_hold_the_table_that_the_command_prints(capsys):
    main()
    printed = [line.replace("│", "|").split() for line in capsys.readouterr().out.splitlines() if "│" in line]
    documented = [line.split() for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    assert len(printed) == len(SHAPES)
    for row in printed:
        assert row in documented


def test_docs_name_tests_that_exist():
    sources = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_aiter_*.py"))
    sources += Path(__file__).read_text()
    for name in re.findall(r"`(test_\w+)`", DOCS.read_text()):
        assert f"def {name}(" in sources, name
