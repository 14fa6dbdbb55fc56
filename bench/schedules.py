"""AITER's own MLA decode schedules against `submission.build_schedule`, for the eight benchmark shapes.

    python -m bench.schedules

prints busy CUs, the most tokens on one CU and the most items of one sequence; nothing runs on a GPU.
"""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from rich.table import Table

from bench.console import make_console, run_tool
from bench.options import case_label
from submission import build_schedule
from task import BENCHMARKS

NUM_CU = 256
MIN_TOKENS_PER_SPLIT = 196
FIXED_BLOCKS = 16  # what the fast rule charges an item on top of its blocks
Schedule = dict[str, list]  # as of `build_schedule`


def intra_batch_schedule(
    batch: int, kv_len: int, num_cu: int = NUM_CU, max_split: int = 32, granularity: int = 16
) -> Schedule:
    """AITER's schedule with fast_mode=False, intra_batch_mode=True: each sequence in equal chunks, dealt in order.

    More items than CUs are taken to be dealt in equal blocks. Raises ZeroDivisionError under 196 tokens a sequence,
    as the library does. Source: AITER's metadata op at the runner's commit.
    """
    splits = min(kv_len // MIN_TOKENS_PER_SPLIT, -(-num_cu // batch), max_split)
    blocks = -(-kv_len // granularity)
    chunk = -(-blocks // splits) * granularity
    slices = -(-kv_len // chunk)
    items = []
    for b in range(batch):
        for i in range(slices):
            start, end = b * kv_len + i * chunk, b * kv_len + min((i + 1) * chunk, kv_len)
            row = -1 if slices == 1 else b * slices + i
            items.append([b, row, b, b + 1, start, end, (b + 1) * kv_len - end, 0])
    per_cu = -(-len(items) // num_cu)
    return {
        "work_indptr": [min(cu * per_cu, len(items)) for cu in range(num_cu + 1)],
        "work_info_set": items,
        # It advances even for a sequence that is not split.
        "reduce_indptr": [b * slices for b in range(batch + 1)],
        "reduce_final_map": [[b, b + 1] for b in range(batch)],
        "reduce_partial_map": list(range(batch * slices)),
    }


def fast_schedule(batch: int, kv_len: int, num_cu: int = NUM_CU, granularity: int = 16) -> Schedule:
    """AITER's schedule with fast_mode=True: CUs filled one after the other up to one load.

    Source: the device code of the metadata op in the wheel (v1_2).
    """
    blocks = -(-kv_len // granularity)
    load = -(-batch * (blocks + FIXED_BLOCKS) // num_cu) + FIXED_BLOCKS
    items, work_indptr, reduce_indptr = [], [0], [0]
    b = done = splits = row = 0
    for _ in range(num_cu):
        room = load
        while b < batch:
            left = blocks - done
            last = room >= left + FIXED_BLOCKS
            take = left if last else room - FIXED_BLOCKS
            if take <= 0:
                break
            start = b * kv_len + done * granularity
            end = min(start + take * granularity, (b + 1) * kv_len)
            split = splits > 0 or not last
            items.append([b, row if split else -1, b, b + 1, start, end, (b + 1) * kv_len - end, 0])
            row += split
            if not last:
                done, splits = done + take, splits + 1
                break
            reduce_indptr.append(row)
            room -= left + FIXED_BLOCKS
            b, done, splits = b + 1, 0, 0
        work_indptr.append(len(items))
    return {
        "work_indptr": work_indptr,
        "work_info_set": items,
        "reduce_indptr": reduce_indptr,
        "reduce_final_map": [[b, b + 1] for b in range(batch)],
        "reduce_partial_map": list(range(row)),
    }


def tokens_per_cu(schedule: Schedule) -> list[int]:
    """Tokens that each CU reads, [num_cu]."""
    return [
        sum(item[5] - item[4] for item in schedule["work_info_set"][a:b]) for a, b in pairwise(schedule["work_indptr"])
    ]


def summary(schedule: Schedule) -> tuple[int, int, int]:
    """Busy CUs, most tokens on one CU, most items of one sequence."""
    tokens = tokens_per_cu(schedule)
    return sum(x > 0 for x in tokens), max(tokens), max(Counter(item[0] for item in schedule["work_info_set"]).values())


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "AITER intra-batch": intra_batch_schedule,
    "AITER fast": fast_schedule,
    "own, tile 32": lambda batch, kv_len: build_schedule(batch, kv_len, NUM_CU, 32),
    "own, tile 64": lambda batch, kv_len: build_schedule(batch, kv_len, NUM_CU, 64),
    "own, tile 128": lambda batch, kv_len: build_schedule(batch, kv_len, NUM_CU, 128),
}


def main() -> None:
    """Count what each schedule makes of the ranked shapes."""
    table = Table(title=f"Busy CUs of {NUM_CU} / most tokens on one CU / most items of one sequence")
    table.add_column("batch x kv")
    for name in SCHEDULES:
        table.add_column(name, justify="right")
    for case in BENCHMARKS:
        batch, kv_len = case["batchsize"], case["kvseqlen"]
        cells = ("/".join(map(str, summary(make(batch, kv_len)))) for make in SCHEDULES.values())
        table.add_row(case_label(case), *cells)
    make_console().print(table)


if __name__ == "__main__":
    run_tool(main)
